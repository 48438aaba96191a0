"""Runs `./train_gpt plan` and `./train_gpt train` and returns their numbers as JSON-compatible objects.

Each function in SECTIONS measures one part of the report. playbook.py writes the report.
"""
import array
import copy
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "dev"), str(ROOT / "scripts")]
from tokens import fail
from trainer import BARE, flags, printed_bytes, trace_steps

MODES = ["none", "selective", "full"]


class Failed(Exception):
    """A program failed; `said` is the message that it printed."""

    def __init__(self, text, said=""):
        super().__init__(text)
        self.said = said


# ---- amount of work for each device

DEVICES = ["quick", "cpu", "gpu"]


def shape(layers, heads, channels, **more):
    return {"layers": layers, "heads": heads, "channels": channels, **more}


WORK = {    # a column for each device
    "model": [shape(4, 4, 128), shape(6, 4, 256), shape(24, 16, 1024)],     # of all measured parts but demonstrations
    "micro_batch": [8, 4, 16],
    "seq_len": [128, 256, 1024],
    "rounds": [3, 5, 5],                    # of each comparison
    "run_seconds": [0.4, 2, 1.5],           # time for the steps of one run; at least MIN_STEPS steps
    "parallel": [{"micro_batch": 1, "seq_len": 64}, {"micro_batch": 1, "seq_len": 64},
                 {"micro_batch": 4, "seq_len": 1024}],      # per process
    "parallel_steps": [12, 20, 40],         # steps whose losses are compared
    "demo": [shape(2, 4, 64, seq_len=64, micro_batch=4), shape(4, 4, 128, seq_len=64, micro_batch=4),
             shape(6, 6, 384, seq_len=256, micro_batch=16)],    # the small models of the demonstrations
    "demo_steps": [80, 200, 300],
    "demo_parts": [4, 8, 16],               # micro-batches per step where the magnitude of gradients matters
    "demo_part_steps": [60, 120, 300],      # number of such steps
    "demo_part_rate": [2e-3, 2e-3, 1e-3],   # their learning rate
    "batches": [[512, 2048, 8192], [512 << i for i in range(7)], [512 << i for i in range(7)]],     # tokens per step
    "batch_tokens": [1 << 16, 1 << 19, 1 << 21],    # of each run that compares batches
    "batch_micro": [8, 8, 64],              # their largest micro-batch; a CPU is hardly faster with more than 8
    "duration": ["about 10 minutes on 2 CPU cores", "about 80 minutes on 2 CPU cores", "an estimated 20 minutes"],
}
MIN_STEPS, MAX_STEPS, WARM_UP = 3, 60, 1    # the first step includes set-up and is not counted
SEEDS = (1, 2, 3)                           # of each demonstration


def conclusive(ratios):
    """Returns whether repeated ratios show a difference from 1: their range must be smaller than the distance of their
    median from 1. A single ratio shows nothing."""
    return len(ratios) > 1 and max(ratios) - min(ratios) < abs(statistics.median(ratios) - 1)


# ---- the trainer

TEXT, FEW_WORDS = "text.txt", "few_words.txt"   # a small model learns the second one in a hundred steps


def read_json(path):
    return json.loads(Path(path).read_text())


def write_text(path, different):
    """Writes a text of `different` words, drawn at random from a fixed seed."""
    generator = random.Random(1)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 8))) for _ in range(different)]
    Path(path).write_text(" ".join(generator.choices(words, k=300_000)))


class Trainer:
    """Runs ./train_gpt, or another program with the same options."""
    commands = []       # run by all trainers in the current section

    def __init__(self, program, folder, name=None, flag="--train-gpt"):
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            fail(f"{flag} {program}: expected a program; run make")
        self.program, self.folder = os.path.abspath(program), folder
        self.name = name or os.path.join(".", os.path.relpath(program))
        self.others = {}                # trainers in other precisions, by name
        self.first_record = None        # of the first run: device and build
        self.peak_flops = 0             # the highest of all runs: on a CPU each run measures it
        self.gpu = False                # whether this is a GPU build

    def call(self, *arguments):
        """Runs the program; returns its standard output."""
        command = self.shown(arguments)
        if command not in Trainer.commands:
            Trainer.commands.append(command)
        done = subprocess.run([self.program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
            ours = [line for line in lines if line.startswith("train_gpt: ")]
            said = (ours or lines)[-1].removeprefix("train_gpt: ")
            raise Failed(f"exit code {done.returncode} from {command}: {said}", said)
        return done.stdout

    def shown(self, arguments):
        """Returns the command line as a reader would type it."""
        text = shlex.join([self.name, *arguments])
        return re.sub(r" --out \S+", "", text).replace(self.folder + "/", "")

    def plan(self, **options):
        return json.loads(self.call("plan", *flags(options), "--json"))

    def log_of(self, data, options, may_stop=False):
        """Trains. Returns the log, standard output, and the message that stopped the run (with may_stop) or None."""
        output, stopped = "", None
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            try:
                output = self.call("train", "--data", data, *flags(options), "--out", out)
            except Failed as error:
                stopped = error.said
                if not may_stop or not re.match(r"step \d+: ", stopped):
                    raise
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                records = [json.loads(line) for line in log]
        self.first_record = self.first_record or records[0]["run"]
        self.peak_flops = max(self.peak_flops, records[0]["run"]["peak_flops"])
        return records, output, stopped

    def train(self, steps, **options):
        """Trains. Returns times, losses and norms from the log, memory and communication from the closing lines."""
        data = os.path.join(self.folder, TEXT)
        (record, *lines), output, _ = self.log_of(data, {**BARE, **options, "steps": steps})
        record, lines = record["run"], [line for line in lines if "ms" in line]
        return {"ms": [line["ms"] for line in lines[WARM_UP:]], "losses": [line["loss"] for line in lines],
                "norms": [line["norm"] for line in lines], "flops_per_token": record["flops_per_token"],
                "planned": record["planned_bytes"], "as_planned": "allocated as planned" in output,
                "sent": printed_bytes(output, "a step by each")}

    def fits(self, **options):
        plan = self.plan(**options)
        return plan["bytes"]["total"] <= 0.95 * plan["gpu_memory"]     # 5 % for other programs and fragmentation

    def compare(self, setups, rounds, seconds):
        """Runs all setups in each round. Each round starts with a different setup, so that other load on the machine
        affects all of them. Returns {name: figures}; figures is None if the setup does not fit into memory. `ratios`:
        for each round, the median step time divided by the first setup's. `median_ms`: the median of all steps.
        """
        results = {name: {"ms": [], "round_ms": []} if self.fits(**setup) else None for name, setup in setups.items()}
        steps = dict.fromkeys(setups, WARM_UP + MIN_STEPS)
        for round_ in range(rounds):
            names = [*setups][round_ % len(setups):] + [*setups][:round_ % len(setups)]
            for name in (name for name in names if results[name]):
                run, result = self.train(steps[name], **setups[name]), results[name]
                median = statistics.median(run["ms"])
                ms, round_ms = result["ms"] + run["ms"], result["round_ms"] + [median]
                result.update({**run, "ms": ms, "round_ms": round_ms})
                steps[name] = WARM_UP + min(MAX_STEPS, max(MIN_STEPS, round(1000 * seconds / median)))
        reference = results[next(iter(setups))] or {"round_ms": []}
        for result in filter(None, results.values()):
            result["ratios"] = [a / b for a, b in zip(result["round_ms"], reference["round_ms"])]
            result["median_ms"] = statistics.median(result["ms"])
        return results


def tokens_of(setup):
    return setup.get("total_batch", setup["micro_batch"] * setup["seq_len"])


def setup_of(size, **more):
    """Returns options of a run or a plan: a model of bytes whose context is the sequence length."""
    setup = {**size.model, "vocab": 256, "micro_batch": size.micro_batch, "seq_len": size.seq_len, **more}
    return {**setup, "context": setup["seq_len"]}


# ---- plans of large models

CARD = "80GB"           # GPU memory that large models are planned for, on every machine
LARGE = ["1b", "7b", "70b", "405b"]
STATE = ["weights", "gradients", "master", "adam_m", "adam_v"]
PRECISIONS = {"FP32": ("fp32", "fp32"), "BF16, BF16 gradients": ("bf16", "bf16"),
              "BF16, FP32 gradients": ("bf16", "fp32")}
GPT3_175B = {"layers": 96, "heads": 96, "channels": 12288, "context": 2048}


def activations_of(plan):
    return {"activations": plan["bytes"]["activations"],
            "per_token_layer": plan["activation_bytes_per_token_per_layer"]}


def state(trainer, size):
    """Memory by category of large models with one sequence per micro-batch, in each precision."""
    wanted = ("parameters", "bytes", "seq_len", "bytes_per_parameter", "max_micro_batch", "gpu_memory")

    def figures(model, precision, grads):
        plan = trainer.plan(model=model, micro_batch=1, precision=precision, grad_dtype=grads, gpu_memory=CARD)
        return {key: plan[key] for key in wanted}
    return {model: {name: figures(model, *each) for name, each in PRECISIONS.items()} for model in LARGE}


def activations(trainer, size):
    """Activations against sequence length."""
    def figures(**options):
        plan = trainer.plan(micro_batch=1, precision="bf16", gpu_memory=CARD, **options)
        T, (L, a, h) = plan["seq_len"], (plan["model"][key] for key in ("layers", "heads", "channels"))
        # Korthikanti et al. 2022, section 4.1: mixed precision, neither recomputation nor flash attention
        return {**activations_of(plan), "korthikanti": L * T * h * (34 + 5 * a * T / h), "model": plan["model"]}

    lengths = [512 << i for i in range(8)]
    curves = {f"{attention}, {mode}": [figures(model="7b", context=T, seq_len=T, attention=attention, recompute=mode)
                                       for T in lengths] for attention in ("flash", "naive") for mode in MODES}
    gpt3 = {mode: figures(**GPT3_175B, attention="naive", recompute=mode) for mode in MODES}
    plan = trainer.plan(model="7b", micro_batch=1, precision="bf16", grad_dtype="bf16", gpu_memory=CARD)
    return {"lengths": lengths, "curves": curves, "gpt3_175b": gpt3, "gpu_memory": plan["gpu_memory"],
            "state": sum(plan["bytes"][name] for name in STATE)}


# ---- one device

def last_step(trace):
    """Returns the passes and the live bytes over time of the last complete step in a Chrome trace."""
    steps = trace_steps(trace)
    if not steps:
        raise Failed("--trace: found no kernel in its file, expected at least one step")
    kernels = steps[-1]
    begin, end = kernels[0]["ts"], max(event["ts"] + event["dur"] for event in kernels)
    groups = [(name, [*events]) for name, events in itertools.groupby(kernels, lambda event: event["args"]["pass"])]
    passes = [[name, (events[0]["ts"] - begin) / 1000, (events[-1]["ts"] + events[-1]["dur"] - begin) / 1000]
              for name, events in groups]
    counters = sorted((event for event in trace["traceEvents"] if event["ph"] == "C" and
                       event["name"] == "live bytes"), key=lambda event: event["ts"])
    shown = ([event for event in counters if event["ts"] <= begin][-1:]
             + [event for event in counters if begin < event["ts"] <= end])
    live = {"ms": [max(0, event["ts"] - begin) / 1000 for event in shown]}
    for category in shown[0]["args"] if shown else []:
        live[category] = [event["args"][category] for event in shown]
    return {"ms": (end - begin) / 1000, "passes": passes, "live": live}


def timeline(trainer, size):
    """Memory over a step."""
    results, path = {}, os.path.join(trainer.folder, "trace.json")
    for mode in MODES:
        run = trainer.train(3, **setup_of(size, recompute=mode), trace=path)
        results[mode] = {**last_step(read_json(path)), "planned": run["planned"]}
    return results


def recomputation(trainer, size):
    """Time and memory of the recompute modes."""
    setups = {mode: setup_of(size, recompute=mode) for mode in MODES}
    modes = trainer.compare(setups, size.rounds, size.run_seconds)
    for mode, result in modes.items():
        result.update(tokens=tokens_of(setups[mode]), **activations_of(trainer.plan(**setups[mode])))
    large = trainer.plan(model="7b", micro_batch=1, recompute="full", gpu_memory=CARD)
    return {"modes": modes, "flops_7b": large["flops_per_token"]}


def accumulation(trainer, size):
    """The same batch split into different numbers of micro-batches."""
    sequences = 8
    setups = {f"{B} × {sequences // B}": setup_of(size, micro_batch=B, total_batch=sequences * size.seq_len)
              for B in (1, 2, 4, 8)}
    return {"tokens": sequences * size.seq_len, "sequences": sequences,
            "splits": trainer.compare(setups, size.rounds, size.run_seconds)}


# ---- several processes

STAGES = [0, 1, 2, 3]           # of ZeRO
SEVERAL = 3                     # micro-batches of each process, to measure communication with accumulation
ZERO_PAPER = {"layers": 36, "channels": 4096, "heads": 32}  # 7.5 billion parameters, as in that paper's figure 1
ZERO_PAPER_GPUS = 64
TENSOR = [1, 2, 4]              # processes of a tensor group


def gpu_count():
    """Returns the number of GPUs of this machine."""
    if not shutil.which("nvidia-smi"):
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def why_alone(trainer, most, setup):
    """Returns the reason why the trainer cannot run as several processes, or None."""
    if most < 2:
        return "this machine has one GPU"
    try:
        trainer.train(1, gpus=2, **setup)
    except Failed as error:
        return f"two processes do not run here ({error.said})"
    return None


def parallel_run(trainer, setup, steps, gpus, parts, **more):
    """Trains with several processes and `parts` micro-batches each. more: further options, which are also returned.
    Raises Failed if the run does not allocate or send what is planned."""
    tokens = tokens_of(setup) * parts
    options = {**setup, "total_batch": tokens * (gpus // more.get("tensor_parallel", 1)), "gpus": gpus, **more}
    figures, plan = trainer.train(steps, **options), trainer.plan(**options)
    require_planned(trainer.shown(["train", *flags(options)]), figures, plan)
    return {"gpus": gpus, "parts": parts, "tokens": tokens, **more,
            **{name: figures[name] for name in ("planned", "sent", "losses", "norms")},
            **{name: plan[name] for name in ("bytes_sent", "tensor_bytes_sent", "precision")}}


def require_planned(command, figures, plan):
    """Raises Failed if a run did not do what was planned: bytes sent may differ by the printed digits and the small
    sums of losses and norms."""
    if not figures["as_planned"] or figures["planned"] != plan["bytes"]["total"]:
        raise Failed(f"{command}: allocated {figures['planned']:,} bytes, planned {plan['bytes']['total']:,}")
    sent, planned = figures["sent"] or 0, plan["bytes_sent"]
    last_digit = 1e7 if planned >= 1e9 else 1e5
    if abs(sent - planned) > last_digit / 2 + 0.01 * planned:
        raise Failed(f"{command}: sent {sent:,.0f} bytes a step, planned {planned:,.0f}")


def data_parallel(trainer, size):
    """Several processes that share one step's batch: memory, communication, losses."""
    most = gpu_count() if trainer.gpu else 4
    setup = setup_of(size, **size.parallel)
    why = why_alone(trainer, most, setup)
    if why:
        return {"why": why}
    numbers = sorted({1, 2, most})

    def run(gpus, zero, parts, steps):
        return parallel_run(trainer, setup, steps, gpus, parts, zero=zero)

    plans = [{"gpus": gpus, "zero": zero, "bytes": trainer.plan(**setup, gpus=gpus, zero=zero)["bytes"]}
             for zero in STAGES for gpus in numbers]
    runs = [run(gpus, zero, 1, size.parallel_steps) for gpus in numbers[1:] for zero in STAGES]
    runs += [run(numbers[-1], zero, SEVERAL, MIN_STEPS) for zero in STAGES]
    same_batch = math.lcm(*numbers)
    splits = [run(gpus, 0, same_batch // gpus, size.parallel_steps) for gpus in numbers]
    plan = trainer.plan(**setup)
    paper = [trainer.plan(**ZERO_PAPER, micro_batch=1, precision="bf16", grad_dtype="bf16", gpu_memory=CARD,
                          gpus=ZERO_PAPER_GPUS, zero=zero) for zero in STAGES]
    return {"numbers": numbers, "plans": plans, "runs": runs, "splits": splits,
            "parameters": plan["parameters"], "precision": plan["precision"], "grad_dtype": plan["grad_dtype"],
            "paper": {"parameters": paper[0]["parameters"], "bytes": [each["bytes"] for each in paper]}}


def tensor_parallel(trainer, size):
    """Several processes that share each micro-batch: memory, communication, losses."""
    most = gpu_count() if trainer.gpu else max(TENSOR)
    setup = setup_of(size, **{**size.parallel, "micro_batch": 4})
    why = why_alone(trainer, most, {**setup, "tensor_parallel": 2})
    if why:
        return {"why": why}
    runs = [parallel_run(trainer, setup, steps, t, parts, tensor_parallel=t, recompute=mode)
            for mode, parts, steps in (("none", 1, size.parallel_steps), ("full", SEVERAL, MIN_STEPS))
            for t in TENSOR if t <= most and (t > 1 or mode == "none")]

    def plan_of_7b(t, mode):
        plan = trainer.plan(model="7b", micro_batch=1, precision="bf16", gpu_memory=CARD, gpus=t, tensor_parallel=t,
                            recompute=mode)
        return {**{name: plan[name] for name in ("gpus", "recompute", "state", "model", "seq_len")},
                **activations_of(plan),
                "weights": {row["name"]: row["bytes"] for row in plan["tensors"] if row["category"] == "weights"}}
    return {"runs": runs, "plans": [plan_of_7b(t, mode) for mode in MODES for t in TENSOR]}


# ---- formats of 16 and 8 bits

MICRO_BATCHES = [1, 4, 16, 64, 256]     # of summed gradients
DEMO_RATES = [1e-3, 1e-4, 1e-5]     # learning rates


def first_moments(program, options):
    """Returns Adam's first moments after one step as FP32 numbers: the step's gradients times 1 - beta1."""
    with tempfile.TemporaryDirectory(dir=program.folder) as out:
        program.call("train", "--data", os.path.join(program.folder, FEW_WORDS), *flags(options), "--out", out)
        with open(os.path.join(out, "step_000001", "optimizer.state"), "rb") as file:
            tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            places = [tensor["data_offsets"] for name, tensor in tensors.items() if name.startswith("m/")]
            data = file.read()
    return array.array("f", b"".join(data[begin:end] for begin, end in places))


def distance(a, b):
    """|a - b| / |b|"""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b))


def formats(trainer, size):
    """Gradients of the same weights and micro-batches, summed in BF16 and in FP32."""
    program = trainer.others.get("bf16")
    if not program:
        return {"why": "no --bf16 PROGRAM was given"}
    sums = []
    for count in MICRO_BATCHES:
        options = {**BARE, **setup_of(size, **size.demo), "steps": 1, "checkpoint_every": 1, "grad_clip": 0,
                   "total_batch": count * tokens_of(size.demo)}
        exact, rounded = (first_moments(program, {**options, "grad_dtype": dtype}) for dtype in ("fp32", "bf16"))
        sums.append({"micro_batches": count, "error": distance(rounded, exact)})
    return {"sums": sums}


def last_loss(curves):
    """Returns the last validation loss, or the median of the last tenth of the training losses, as they have spikes."""
    losses = [loss for _, loss in curves.get("val_loss") or curves["loss"]]
    return losses[-1] if "val_loss" in curves else statistics.median(losses[-max(1, len(losses) // 10):])


def demonstration(program, data, options, kinds, keys, seeds=SEEDS):
    """Runs all kinds with the same data and seeds; they differ in some options. Returns {name: figures}: for each of
    `keys` the log's values by step and seed; `ratios`: the last losses of finished runs over the first kind's."""
    results = {name: {"last": [], "stopped": [], **{key: [] for key in keys}} for name in kinds}
    for seed in seeds:
        for name, more in kinds.items():
            print(f"  {name}, seed {seed}", file=sys.stderr)
            records, _, stopped = program.log_of(data, {**options, "seed": seed, **more}, may_stop=True)
            curves = {key: [[record["step"], record[key]] for record in records if key in record] for key in keys}
            results[name]["last"].append(None if stopped else last_loss(curves))
            results[name]["stopped"].append(stopped)
            for key, curve in curves.items():
                results[name][key].append(curve)
    first = results[next(iter(kinds))]["last"]
    for result in results.values():
        result["ratios"] = [a / b for a, b in zip(result["last"], first) if a is not None and b is not None]
    return results


# The precision of the trainer that each demonstration needs, what it logs, and its kinds of runs.
DEMONSTRATIONS = {"master": ("bf16", "unchanged", {kind: {"master_weights": kind} for kind in ("fp32", "none")}),
                  "loss_scaling": ("fp16", "zero_gradients",
                                   {kind: {"loss_scaling": kind} for kind in ("dynamic", "none")}),
                  "fp8_scaling": ("bf16", "fp8", {"bf16": {"matmul": "plain"}, **{
                      kind: {"matmul": "fp8", "fp8_scaling": kind} for kind in ("delayed", "none")}})}


def failures(trainer, size):
    """Demonstrations: training without master weights, loss scaling and FP8 scales."""
    tokens, steps = size.demo_parts * tokens_of(size.demo), size.demo_part_steps

    def measured(name, precision, key, kinds):
        if precision not in trainer.others:
            return {"why": f"no --{precision} PROGRAM was given"}
        program = trainer.others[precision]

        def runs(**options):
            return demonstration(program, os.path.join(program.folder, FEW_WORDS),
                                 {**BARE, **setup_of(size, **size.demo), **options}, kinds, ["loss", key])
        if name == "master":
            return {"rates": {str(lr): runs(steps=size.demo_steps, lr=lr) for lr in DEMO_RATES}}
        # The mean loss over many tokens has small gradients.
        try:
            return {"tokens": tokens, "kinds": runs(steps=steps, total_batch=tokens, lr=size.demo_part_rate,
                                                    eval_every=max(1, steps // 10), val_fraction=0.1, eval_sequences=4)}
        except Failed as error:     # for example on a GPU without FP8
            if name != "fp8_scaling":
                raise
            return {"why": error.said or str(error)}
    return {name: measured(name, *each) for name, each in DEMONSTRATIONS.items()}


EARLIER = ROOT / "data/playbook.json"
SHAKESPEARE = os.path.relpath(ROOT / "data/shakespeare.txt")
REFERENCE, AGAIN = "bf16", "bf16 again"
# AGAIN differs from REFERENCE only in the order of a step's sums: it measures the effect of rounding alone.
WHOLE_RUNS = {REFERENCE: {"matmul": "plain"}, AGAIN: {"matmul": "plain", "micro_batch": 4, "total_batch": 1024},
              "fp8, delayed": {"matmul": "fp8", "fp8_scaling": "delayed"},
              "fp8, current": {"matmul": "fp8", "fp8_scaling": "current"}, "fp8-all": {"matmul": "fp8-all"}}
# Ten million parameters, bytes as tokens. The schedule is that of make run, with a lower learning rate, as the model is
# three times as wide.
WHOLE_OPTIONS = {"layers": 6, "heads": 6, "channels": 384, "context": 128, "micro_batch": 8, "steps": 1500,
                 "eval_every": 100, "lr": 1e-3, "min_lr": 1e-4, "warmup": 50, "beta2": 0.99, "eval_sequences": 0,
                 "checkpoint_every": 0}


def fp8_quality(trainer, size):
    """Whole runs in FP8 and BF16, from an earlier measurement or with --whole-runs."""
    if not size.whole_runs:
        return read_json(EARLIER)["fp8_quality"]["results"]
    program = Trainer(trainer.others["bf16"].program, trainer.folder)
    kinds = demonstration(program, SHAKESPEARE, WHOLE_OPTIONS, WHOLE_RUNS, ["val_loss"])
    run = program.first_record
    about = {"device": run["device"], "precision": run["precision"], "parameters": run["model"]["parameters"],
             "date": time.strftime("%Y-%m-%d")}
    return {"about": about, "options": WHOLE_OPTIONS, "kinds": kinds}


# ---- batch size

SMALL = {"layers": 2, "heads": 4, "channels": 128, "context": 64}   # the model of make run
EVALUATIONS = 8             # of a run, after equal numbers of tokens
SEARCH_SEED = 4             # of the runs that select a learning rate; the compared runs have other seeds
RATES, MAX_RATES = [2e-3, 4e-3], 6      # the first learning rates, and how many are tried at most
RAMP = 8                    # the ramp begins with a batch that is so many times smaller, and takes half of the tokens


def batch_size(trainer, size):
    """The same number of tokens in batches of different sizes, each at its best learning rate; and a ramp."""
    trainer = copy.copy(trainer)    # the report describes the model of the original's first run
    common = {**SMALL, "tokens": size.batch_tokens, "sample_every": 0, "checkpoint_every": 0,
              "eval_sequences": 128}

    def of(batch, rate):
        steps, micro = size.batch_tokens // batch, min(size.batch_micro, batch // SMALL["context"])
        options = {"total_batch": batch, "micro_batch": micro, "lr": rate, "warmup": steps // 4,
                   "eval_every": max(1, steps // EVALUATIONS)}
        return {**options, "noise_every": 1} if micro * SMALL["context"] < batch else options

    def trained(kinds, *keys, **more):
        return demonstration(trainer, SHAKESPEARE, common, kinds, ["val_loss", *keys], **more)

    def rates(batch):
        """Returns [[rate, last loss], ...], the best first. Tries more rates while the best one is at the edge."""
        tried, more = [], RATES
        while more and len(tried) < MAX_RATES:
            for rate in more:
                [result] = trained({f"{batch} {rate:g}": of(batch, rate)}, seeds=[SEARCH_SEED]).values()
                tried.append([rate, result["last"][0]])
            tried.sort(key=lambda each: each[1] or math.inf)
            best, lowest, highest = (of_all(rate for rate, _ in tried) for of_all in (next, min, max))
            more = [best / 2] if best == lowest else [best * 2] if best == highest else []
        return tried
    tried = {str(batch): rates(batch) for batch in size.batches}
    kinds = {str(batch): of(batch, tried[str(batch)][0][0]) for batch in size.batches}
    ramp = {"from": max(size.batches) // RAMP, "to": max(size.batches), "tokens": size.batch_tokens // 2}
    quarter = math.log((RAMP + 1) / 2) / (2 - 2 / RAMP)     # steps for a quarter of the tokens, over those for all
    kinds["ramp"] = {**kinds[str(ramp["to"])], "batch_ramp": f"{ramp['from']}:{ramp['tokens']}",
                     "warmup": round(quarter * size.batch_tokens / ramp["to"])}
    return {"tokens": size.batch_tokens, "batches": size.batches, "micro": size.batch_micro, "rates": tried,
            "ramp": ramp, "runs": trained(kinds, "tokens", "ms", "noise_scale")}


# ---- all parts

SECTIONS = [batch_size, state, activations, timeline, recomputation, accumulation, data_parallel, tensor_parallel,
            formats, failures, fp8_quality]


def measure(program, quick, programs, whole_runs):
    """Measures all parts. Returns {"about": ..., section: {"results": ..., "commands": [...]}, ...}. `programs`: paths
    of trainers in other precisions, by name, or None."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpt_playbook_") as folder:
        write_text(os.path.join(folder, TEXT), 1000)
        write_text(os.path.join(folder, FEW_WORDS), 20)
        trainer = Trainer(program, folder, "./train_gpt")
        trainer.others = {name: Trainer(path, folder, flag=f"--{name}") for name, path in programs.items() if path}
        plan = trainer.plan(micro_batch=1)
        trainer.others.setdefault(plan["precision"], trainer)
        trainer.gpu = plan["bytes"]["cuda"] > 0     # only plans for a GPU reserve bytes for CUDA
        device = "gpu" if trainer.gpu else "cpu"
        column = DEVICES.index("quick" if quick else device)
        size = SimpleNamespace(whole_runs=whole_runs, **{name: columns[column] for name, columns in WORK.items()})
        while size.micro_batch > 1 and not trainer.fits(**setup_of(size, recompute="none")):
            size.micro_batch //= 2
        print(f"playbook: {len(SECTIONS)} sections, {size.duration}", file=sys.stderr)
        results = {}
        for number, section in enumerate(SECTIONS, 1):
            name = section.__name__
            print(f"playbook: {number}/{len(SECTIONS)} {name.replace('_', ' ')} ... ({time.monotonic() - began:.0f} s)",
                  file=sys.stderr)
            Trainer.commands = []
            results[name] = {"results": section(trainer, size), "commands": Trainer.commands}
        record = trainer.first_record
        results["about"] = {
            **{key: record[key] for key in ("device", "peak_source", "cuda_runtime", "cublaslt", "model")},
            "build": f"{device.upper()} build, {record['precision']}", "quick": quick, "gpu": trainer.gpu,
            "peak_flops": trainer.peak_flops, "seq_len": size.seq_len, "micro_batch": size.micro_batch,
            "rounds": size.rounds, "date": time.strftime("%Y-%m-%d %H:%M"), "seconds": time.monotonic() - began,
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        }
        return results

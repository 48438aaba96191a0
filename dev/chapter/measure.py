"""Runs `plan` and `train` of ./train_gpt and returns their numbers in JSON-compatible objects.

Each function from `state` on measures one part of the report. report.py draws the results; this file uses the standard
library only.
"""
import functools
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
from dataclasses import dataclass

MODES = ["none", "selective", "full"]


class Mistake(Exception):
    """The user's mistake; the message names the flag or file, what was found and what was expected."""


class Failed(Exception):
    """A program that was started failed; `said` is its own message."""

    def __init__(self, text, said=""):
        super().__init__(text)
        self.said = said


# ---- amount of work for each device

@dataclass
class Size:
    model: dict             # the model of parts 3 to 6 and 8
    micro_batch: int
    seq_len: int
    rounds: int             # of each comparison
    run_seconds: float      # time for the steps of one run; at least LEAST_STEPS steps
    attention_lens: list    # sequence lengths for naive and flash attention
    attention_tokens: int   # of each of those steps
    scan_batches: list
    scan_lens: list
    scan_tokens: int        # larger micro-batches are left out
    scan_seconds: float     # start no further point of the scan after this time
    parallel_batch: int     # micro-batch of each process, in sequences of parallel_len tokens
    parallel_len: int
    parallel_steps: int     # with compared losses
    demo: dict              # setup of the demonstrations of part 10
    demo_steps: int
    demo_parts: int         # micro-batches of a step where the magnitude of gradients matters
    demo_part_steps: int    # number of such steps
    demo_part_rate: float   # their learning rate


SIZES = {
    "quick": Size({"layers": 4, "heads": 4, "channels": 128}, micro_batch=8, seq_len=128, rounds=3, run_seconds=0.4,
                  attention_lens=[128, 512], attention_tokens=1024,
                  scan_batches=[1, 4], scan_lens=[64, 256], scan_tokens=1024, scan_seconds=20,
                  parallel_batch=1, parallel_len=64, parallel_steps=12,
                  demo={"layers": 2, "heads": 4, "channels": 64, "seq_len": 64, "micro_batch": 4},
                  demo_steps=80, demo_parts=4, demo_part_steps=60, demo_part_rate=2e-3),
    "cpu": Size({"layers": 6, "heads": 4, "channels": 256}, micro_batch=4, seq_len=256, rounds=5, run_seconds=2,
                attention_lens=[128, 256, 512, 1024], attention_tokens=1024,
                scan_batches=[1, 2, 4, 8, 16], scan_lens=[64, 256, 1024], scan_tokens=2048, scan_seconds=120,
                parallel_batch=1, parallel_len=64, parallel_steps=20,
                demo={"layers": 4, "heads": 4, "channels": 128, "seq_len": 64, "micro_batch": 4},
                demo_steps=200, demo_parts=8, demo_part_steps=120, demo_part_rate=2e-3),
    "gpu": Size({"layers": 24, "heads": 16, "channels": 1024}, micro_batch=16, seq_len=1024, rounds=5, run_seconds=1.5,
                attention_lens=[512, 1024, 2048, 4096], attention_tokens=16384,
                scan_batches=[1, 4, 16, 64], scan_lens=[512, 1024, 2048], scan_tokens=1 << 17, scan_seconds=200,
                parallel_batch=4, parallel_len=1024, parallel_steps=40,
                demo={"layers": 6, "heads": 6, "channels": 384, "seq_len": 256, "micro_batch": 16},
                demo_steps=300, demo_parts=16, demo_part_steps=300, demo_part_rate=1e-3),
}
LEAST_STEPS, MOST_STEPS, WARM_UP = 3, 60, 1     # the first step of a run includes set-up and is not counted
ATTENTION_ROUNDS, SCAN_ROUNDS = 3, 2            # at most, in sections with many setups
SEEDS = (1, 2, 3)                               # of each demonstration


def conclusive(ratios):
    """Whether repeated ratios show a difference from 1: their range must be smaller than the median's distance from 1.
    A single ratio shows nothing."""
    return len(ratios) > 1 and max(ratios) - min(ratios) < abs(statistics.median(ratios) - 1)


# ---- the trainer

# Always in effect unless a run overrides them.
BARE = {"schedule": "constant", "val_fraction": 0, "eval_every": 0, "sample_every": 0, "checkpoint_every": 0}
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
# Open MPI refuses more processes than cores, and to run as root, without these.
OPEN_MPI = ["--oversubscribe", "--bind-to", "none"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def flags(options):
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


def in_bytes(text, what):
    """The size before `what` in the trainer's closing lines, such as '343 MB resident at most', or None."""
    found = re.search(r"([0-9.]+) (\w+) " + what, text)
    return float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else None


def started_by(processes):
    if processes == 1:
        return []
    version = subprocess.run(["mpirun", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return ["mpirun", *(OPEN_MPI if "Open MPI" in version.stdout else []), "-n", str(processes)]


def write_text(path, different):
    """Writes a text of so many different words, drawn from a fixed seed, unless the file exists."""
    if os.path.exists(path):
        return
    generator = random.Random(1)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 8))) for _ in range(different)]
    with open(path, "w", encoding="ascii") as file:
        file.write(" ".join(generator.choices(words, k=300_000)))


def require_program(flag, program):
    if not os.access(program, os.X_OK) or os.path.isdir(program):
        raise Mistake(f"{flag} {program}: expected a program; run make")


class Trainer:
    """Runs ./train_gpt and keeps what all sections share: commands, device, peak speed."""

    def __init__(self, program, folder, name="./train_gpt", flag="--train-gpt"):
        require_program(flag, program)
        self.program, self.folder, self.name = os.path.abspath(program), folder, name
        self.others = {}                # trainers of other precisions by name; formats: a path
        self.text = os.path.join(folder, "text.txt")
        self.few_words = os.path.join(folder, "few_words.txt")     # which a small model learns in a hundred steps
        write_text(self.text, 1000)
        write_text(self.few_words, 20)
        self.commands = []              # of the current section
        self.first_record = None        # of the first run: device and build
        self.peak_flops = 0             # the highest of all runs: on a CPU each run measures it

    @functools.cached_property
    def gpu(self):
        return self.plan(micro_batch=1)["bytes"]["cuda"] > 0    # only plans for a GPU reserve bytes for CUDA

    def call(self, *arguments, processes=1):
        done = subprocess.run([*started_by(processes), self.program, *arguments], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, env={**os.environ, **AS_ROOT})
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
            ours = [line for line in lines if line.startswith("train_gpt: ")]    # the others are mpirun's
            said = (ours or lines)[-1].removeprefix("train_gpt: ")
            raise Failed(f"exit code {done.returncode} from {self.shown(arguments, processes)}: {said}", said)
        return done.stdout

    def shown(self, arguments, processes=1):
        """The command line as a reader would type it."""
        text = shlex.join([*(["mpirun", "-n", str(processes)] if processes > 1 else []), self.name, *arguments])
        return re.sub(re.escape(self.folder) + r"/(\S*/)?", "", text)

    def remember(self, arguments, processes=1):
        command = self.shown(arguments, processes)
        if command not in self.commands:
            self.commands.append(command)

    def plan(self, **options):
        arguments = ["plan", *flags(options), "--json"]
        self.remember(arguments)
        return json.loads(self.call(*arguments))

    def log_of(self, data, options, processes=1, may_stop=False):
        """Trains: its log, what it printed, and the message of a step that stopped the run, if may_stop, or None."""
        command = ["train", "--data", data, *flags(options)]
        self.remember(command, processes)
        output, stopped = "", None
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            try:
                output = self.call(*command, "--out", out, processes=processes)
            except Failed as error:
                stopped = error.said
                if not may_stop or not re.match(r"step \d+: ", stopped):
                    raise
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                return [json.loads(line) for line in log], output, stopped

    def train(self, steps, gpus=1, **options):
        """Trains: times, losses and norms from the log, memory and communication from the closing lines."""
        (record, *lines), output, _ = self.log_of(self.text, {**BARE, **options, "steps": steps}, gpus)
        record, lines = record["run"], [line for line in lines if "ms" in line]
        self.first_record = self.first_record or record
        self.peak_flops = max(self.peak_flops, record["peak_flops"])
        return {"ms": [line["ms"] for line in lines[WARM_UP:]], "losses": [line["loss"] for line in lines],
                "norms": [line["norm"] for line in lines],
                "flops_per_token": record["flops_per_token"], "planned": record["planned_bytes"],
                "as_planned": "allocated as planned" in output, "resident": in_bytes(output, "resident"),
                "sent": in_bytes(output, "a step by each")}

    def fits(self, **options):
        plan = self.plan(**options)
        return plan["bytes"]["total"] <= 0.95 * plan["gpu_memory"]     # the rest: other programs, fragmentation

    def compare(self, setups, rounds, seconds):
        """Runs the setups in turn for some rounds, each starting with another setup, so that other load on the
        machine affects all of them. Returns {name: figures}, None for a setup that does not fit into memory. `ratios`
        has, for each round, the median step time over the first setup's; `median_ms` is the median of all steps.
        """
        results = {name: {"ms": [], "round_ms": []} if self.fits(**setup) else None for name, setup in setups.items()}
        steps = dict.fromkeys(setups, WARM_UP + LEAST_STEPS)
        for turn in range(rounds):
            names = [*setups][turn % len(setups):] + [*setups][:turn % len(setups)]
            for name in (name for name in names if results[name]):
                run, result = self.train(steps[name], **setups[name]), results[name]
                median = statistics.median(run["ms"])
                ms, round_ms = result["ms"] + run["ms"], result["round_ms"] + [median]
                result.update({**run, "ms": ms, "round_ms": round_ms})
                steps[name] = WARM_UP + min(MOST_STEPS, max(LEAST_STEPS, round(1000 * seconds / median)))
        reference = results[next(iter(setups))] or {"round_ms": []}
        for result in filter(None, results.values()):
            result["ratios"] = [a / b for a, b in zip(result["round_ms"], reference["round_ms"])]
            result["median_ms"] = statistics.median(result["ms"])
        return results


def tokens_of(setup):
    return setup.get("total_batch", setup["micro_batch"] * setup["seq_len"])


def setup_of(size, **more):
    """Options of a run or a plan: the model on bytes, with as many positions as the sequence has."""
    setup = {**size.model, "vocab": 256, "micro_batch": size.micro_batch, "seq_len": size.seq_len, **more}
    return {**setup, "context": setup["seq_len"]}


# ---- parts 1 to 8

CARD = "80GB"           # large models are planned for this card on every machine
LARGE = ["1b", "7b", "70b", "405b"]
STATE = ["weights", "gradients", "master", "adam_m", "adam_v"]
PRECISIONS = {"FP32": ("fp32", "fp32"), "BF16, BF16 gradients": ("bf16", "bf16"),
              "BF16, FP32 gradients": ("bf16", "fp32")}
GPT3_175B = {"layers": 96, "heads": 96, "channels": 12288, "context": 2048}


def activations_of(plan):
    return {"activations": plan["bytes"]["activations"],
            "per_token_layer": plan["activation_bytes_per_token_per_layer"]}


def plans_of(trainer, model):
    """A model with one sequence a micro-batch, in each precision."""
    wanted = ("parameters", "bytes", "seq_len", "bytes_per_parameter", "max_micro_batch", "gpu_memory")
    plans = {name: trainer.plan(model=model, micro_batch=1, precision=precision, grad_dtype=grads, gpu_memory=CARD)
             for name, (precision, grads) in PRECISIONS.items()}
    return {name: {key: plan[key] for key in wanted} for name, plan in plans.items()}


def state(trainer, size):
    """1. Memory by category, for large models."""
    return {model: plans_of(trainer, model) for model in LARGE}


def activations(trainer, size):
    """2. Activations against sequence length."""
    def figures(**options):
        plan = trainer.plan(micro_batch=1, precision="bf16", gpu_memory=CARD, **options)
        logits = next(tensor for tensor in plan["tensors"] if tensor["name"] == "logits")
        return {**activations_of(plan), "korthikanti": plan["korthikanti_bytes"], "model": plan["model"],
                "head_rows": logits["shape"][0]}

    lengths = [512 << i for i in range(8)]
    curves = {f"{attention}, {mode}": [figures(model="7b", context=T, seq_len=T, attention=attention, recompute=mode)
                                       for T in lengths] for attention in ("flash", "naive") for mode in MODES}
    gpt3 = {mode: figures(**GPT3_175B, attention="naive", recompute=mode) for mode in MODES}
    plan = trainer.plan(model="7b", micro_batch=1, precision="bf16", grad_dtype="bf16", gpu_memory=CARD)
    return {"lengths": lengths, "curves": curves, "gpt3_175b": gpt3, "gpu_memory": plan["gpu_memory"],
            "state": sum(plan["bytes"][name] for name in STATE)}


def last_step(trace):
    """The last whole step of a Chrome trace: passes, live bytes, time of each kernel by name."""
    events = trace["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    kernels = sorted((event for event in events if event["ph"] == "X"
                      and event["tid"] == rows.get("stream: kernels", event["tid"])), key=lambda event: event["ts"])
    # A step begins where forward follows update.
    starts = [i for i, event in enumerate(kernels)
              if event["args"]["pass"] == "forward" and (i == 0 or kernels[i - 1]["args"]["pass"] == "update")]
    if not starts:
        raise Failed("--trace: found no event with pass 'forward' in its file, expected at least one step")
    kernels = kernels[starts[-1]:]
    begin, end = kernels[0]["ts"], max(event["ts"] + event["dur"] for event in kernels)

    passes, by_kernel = [], {}
    for event in kernels:
        name, stop = event["args"]["pass"], (event["ts"] + event["dur"] - begin) / 1000
        if passes and passes[-1][0] == name:
            passes[-1][2] = stop
        else:
            passes.append([name, (event["ts"] - begin) / 1000, stop])
        by_kernel[event["name"]] = by_kernel.get(event["name"], 0) + event["dur"] / 1000

    counters = sorted((event for event in events if event["ph"] == "C" and event["name"] == "live bytes"),
                      key=lambda event: event["ts"])
    shown = ([event for event in counters if event["ts"] <= begin][-1:]
             + [event for event in counters if begin < event["ts"] <= end])
    live = {"ms": [max(0, event["ts"] - begin) / 1000 for event in shown]}
    for category in shown[0]["args"] if shown else []:
        live[category] = [event["args"][category] for event in shown]
    return {"ms": (end - begin) / 1000, "passes": passes, "kernels": by_kernel, "live": live}


def timeline(trainer, size):
    """3. Memory over a step."""
    results, path = {}, os.path.join(trainer.folder, "trace.json")
    for mode in MODES:
        run = trainer.train(3, **setup_of(size, recompute=mode), trace=path)
        with open(path, encoding="utf-8") as file:
            results[mode] = {**last_step(json.load(file)), "planned": run["planned"]}
    return results


def recomputation(trainer, size):
    """4. Time and memory of the recompute modes, and of naive and flash attention."""
    setups = {mode: setup_of(size, recompute=mode) for mode in MODES}
    modes = trainer.compare(setups, size.rounds, size.run_seconds)
    for mode, result in modes.items():
        result.update(tokens=tokens_of(setups[mode]), **activations_of(trainer.plan(**setups[mode])))
    lengths = {}
    for T in size.attention_lens:
        shape = {"seq_len": T, "micro_batch": size.attention_tokens // T}
        setups = {"flash": setup_of(size, **shape, attention="flash"),
                  "naive": setup_of(size, **shape, attention="naive"),
                  "naive, selective": setup_of(size, **shape, attention="naive", recompute="selective")}
        results = trainer.compare(setups, min(ATTENTION_ROUNDS, size.rounds), size.run_seconds / 2)
        lengths[T] = {name: {**(results[name] or {"median_ms": None}), **activations_of(trainer.plan(**setup))}
                      for name, setup in setups.items()}
    large = trainer.plan(model="7b", micro_batch=1, recompute="full", gpu_memory=CARD)
    return {"modes": modes, "attention": lengths, "attention_tokens": size.attention_tokens,
            "flops_7b": large["flops_per_token"]}


def accumulation(trainer, size):
    """5. The same batch split into different numbers of micro-batches."""
    sequences = 8
    setups = {f"{B} x {sequences // B}": setup_of(size, micro_batch=B, total_batch=sequences * size.seq_len)
              for B in (1, 2, 4, 8)}
    return {"tokens": sequences * size.seq_len, "sequences": sequences,
            "splits": trainer.compare(setups, size.rounds, size.run_seconds)}


def scan(trainer, size):
    """6. Throughput over micro-batch x sequence x recompute."""
    deadline = time.monotonic() + size.scan_seconds
    points = [{"micro_batch": B, "seq_len": T, "recompute": mode} for B in size.scan_batches for T in size.scan_lens
              for mode in MODES if B * T <= size.scan_tokens]
    random.Random(1).shuffle(points)    # a machine that slows down must not look like a trend
    results = []
    for point in points:
        setup = setup_of(size, **point)
        results.append({**point, "planned": trainer.plan(**setup)["bytes"]["total"], "round_ms": [],
                        "why": None if trainer.fits(**setup) else "does not fit"})
    for result, point in list(zip(results, points)) * SCAN_ROUNDS:
        if result["why"] is None and time.monotonic() < deadline:
            run = trainer.train(LEAST_STEPS + WARM_UP, **setup_of(size, **point))
            result["round_ms"].append(statistics.median(run["ms"]))
            result["flops"] = run["flops_per_token"]["model"]
    for result in results:
        if result["round_ms"]:
            ms = statistics.median(result["round_ms"])
            result.update(ms=ms, tokens_per_s=1000 * result["micro_batch"] * result["seq_len"] / ms)
        elif result["why"] is None:
            result["why"] = "no time left"
    return results


def mixed_precision(trainer, size):
    """7. Bytes per parameter."""
    return plans_of(trainer, "7b")


STAGES = [0, 1, 2, 3]           # of ZeRO
SEVERAL = 3                     # micro-batches of each process, to measure communication with accumulation
ZERO_PAPER = {"layers": 36, "channels": 4096, "heads": 32}  # 7.5 billion parameters, as in that paper's figure 1
ZERO_PAPER_GPUS = 64


def gpu_count():
    """GPUs of this machine that programs can use."""
    if not shutil.which("nvidia-smi"):
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([name for name in visible.split(",") if name.strip()]))


def why_alone(trainer, most, setup):
    """Why the trainer cannot run as several processes, or None."""
    if most < 2:
        return "this machine has one GPU"
    if not shutil.which("mpirun"):
        return "there is no mpirun on PATH"
    try:
        run = trainer.train(1, gpus=2, **setup)
    except Failed as error:
        return f"two processes do not run here ({error.said})"
    # As with the mpirun of another MPI than the build's.
    return None if run["sent"] else "two processes that mpirun started did not find each other"


def data_parallel(trainer, size):
    """8. Several processes that share one step's batch: memory, communication, losses."""
    most = gpu_count() if trainer.gpu else 4
    setup = setup_of(size, micro_batch=size.parallel_batch, seq_len=size.parallel_len)
    why = why_alone(trainer, most, setup)
    if why:
        return {"why": why}
    numbers = sorted({1, 2, most})

    def run(gpus, zero, parts, steps):
        options = {**setup, "total_batch": tokens_of(setup) * gpus * parts, "gpus": gpus, "zero": zero}
        figures = trainer.train(steps, **options)
        kept = ("planned", "as_planned", "sent", "losses", "norms")
        return {"gpus": gpus, "zero": zero, "parts": parts, **{name: figures[name] for name in kept},
                "bytes_sent": trainer.plan(**options)["bytes_sent"]}

    plans = [{"gpus": gpus, "zero": zero, "bytes": trainer.plan(**setup, gpus=gpus, zero=zero)["bytes"]}
             for zero in STAGES for gpus in numbers]
    runs = [run(gpus, zero, 1, size.parallel_steps) for gpus in numbers[1:] for zero in STAGES]
    runs += [run(numbers[-1], zero, SEVERAL, LEAST_STEPS) for zero in STAGES]
    same_batch = math.lcm(*numbers)
    splits = [run(gpus, 0, same_batch // gpus, size.parallel_steps) for gpus in numbers]
    plan = trainer.plan(**setup)
    paper = [trainer.plan(**ZERO_PAPER, micro_batch=1, precision="bf16", grad_dtype="bf16", gpu_memory=CARD,
                          gpus=ZERO_PAPER_GPUS, zero=zero) for zero in STAGES]
    return {"numbers": numbers, "plans": plans, "runs": runs, "splits": splits,
            "parameters": plan["parameters"], "precision": plan["precision"], "grad_dtype": plan["grad_dtype"],
            "paper": {"parameters": paper[0]["parameters"], "bytes": [each["bytes"] for each in paper]}}


# ---- parts 9 to 11: formats of 16 and 8 bits

MOST_MICRO_BATCHES = 256        # of summed gradients
DEMO_RATES = [1e-3, 1e-4, 1e-5]     # learning rates


def formats(trainer, size):
    """9. What formats.cu prints: where the values of a step lie. Part 10 uses its sums of gradients."""
    program = trainer.others.get("formats")
    if not program:
        trainer.numbers = {"why": "no --formats PROGRAM was given"}
        return trainer.numbers
    setup = {**setup_of(size, **size.demo), "steps": size.demo_steps // 2, "lr": DEMO_RATES[0], **BARE,
             "total_batch": MOST_MICRO_BATCHES * size.demo["micro_batch"] * size.demo["seq_len"]}
    command = [program, "--data", trainer.few_words, *flags(setup)]
    text = shlex.join(command)
    trainer.commands.append(text.replace(trainer.folder + "/", ""))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"exit code {done.returncode} from {text}: {done.stderr.strip()}")
    trainer.numbers = json.loads(done.stdout)
    return {"values": trainer.numbers["values"]}


def last_loss(records):
    """The median of the last tenth of a run's losses: small models have spikes."""
    losses = [record["loss"] for record in records if "loss" in record]
    return statistics.median(losses[-max(1, len(losses) // 10):])


def demonstration(program, size, kinds, kept, steps, **setup):
    """Runs with the same data and seeds that differ in some options, {name: figures}. `kept`: keys of log records to
    keep beside losses, from the first seed. ratios: each seed's last loss over the first kind's, for finished runs."""
    results = {name: {"last": [], "stopped": []} for name in kinds}
    for seed in SEEDS:
        for name, options in kinds.items():
            run = {**BARE, **setup_of(size, **{**size.demo, **setup}), "steps": steps, "seed": seed, **options}
            (_, *records), _, stopped = program.log_of(program.few_words, run, may_stop=True)
            result = results[name]
            result["last"].append(last_loss(records) if not stopped else None)
            result["stopped"].append(stopped)
            if seed == SEEDS[0]:
                for key, name_kept in (("loss", "losses"), *zip(kept, kept)):
                    result[name_kept] = [[record["step"], record[key]] for record in records if key in record]
    first = results[next(iter(kinds))]["last"]
    for result in results.values():
        result["ratios"] = [a / b for a, b in zip(result["last"], first) if a is not None and b is not None]
    return results


def without_master(program, size):
    kinds = {kind: {"master_weights": kind} for kind in ("fp32", "none")}
    return {"rates": {str(lr): demonstration(program, size, kinds, ["unchanged"], size.demo_steps, lr=lr)
                      for lr in DEMO_RATES}}


def with_many_tokens(program, size, kinds, kept):
    """A demonstration with many tokens a step: the more tokens the mean loss has, the smaller the gradients."""
    tokens = size.demo_parts * size.demo["micro_batch"] * size.demo["seq_len"]
    steps = size.demo_part_steps
    return {"tokens": tokens,
            "kinds": demonstration(program, size, kinds, kept, steps, total_batch=tokens, lr=size.demo_part_rate,
                                   eval_every=max(1, steps // 10), val_fraction=0.1, eval_sequences=4)}


def without_loss_scaling(program, size):
    kinds = {kind: {"loss_scaling": kind} for kind in ("dynamic", "none")}
    return with_many_tokens(program, size, kinds, ["zero_gradients", "loss_scale"])


def without_fp8_scales(program, size):
    kinds = {"bf16": {"matmul": "plain"},
             **{kind: {"matmul": "fp8", "fp8_scaling": kind} for kind in ("delayed", "none")}}
    try:
        return with_many_tokens(program, size, kinds, ["fp8"])
    except Failed as error:     # as on cards without FP8
        return {"why": error.said or str(error)}


def failures(trainer, size):
    """10. What goes wrong without each technique that makes 16 and 8 bits train."""
    numbers = trainer.numbers
    results = {"sums": {"why": numbers["why"]} if "why" in numbers else
                       {"sums": numbers["sums"], "copies": numbers["values"]["unchanged"]}}
    for name, precision, measured in (("master", "bf16", without_master),
                                      ("loss_scaling", "fp16", without_loss_scaling),
                                      ("fp8_scaling", "bf16", without_fp8_scales)):
        program = trainer.others.get(precision)
        results[name] = measured(program, size) if program else {"why": f"no --{precision} PROGRAM was given"}
    return results


FP8_QUALITY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fp8_quality.json")


def fp8_quality(trainer, size):
    """11. Whole runs in FP8 and BF16, measured earlier by fp8_quality.py."""
    if not os.path.exists(FP8_QUALITY):
        return {"why": "there is no dev/chapter/fp8_quality.json"}
    with open(FP8_QUALITY, encoding="utf-8") as file:
        return json.load(file)


SECTIONS = [state, activations, timeline, recomputation, accumulation, scan, mixed_precision, data_parallel, formats,
            failures, fp8_quality]


def programs_of(trainer, programs):
    """The programs given by flags, by name: trainers, and the path of formats. The trainer itself counts for its
    own precision."""
    found = {trainer.plan(micro_batch=1)["precision"]: trainer}
    for name, program in programs.items():
        if program and name == "formats":
            require_program("--formats", program)
            path = os.path.relpath(program)
            found[name] = path if "/" in path else "./" + path
        elif program and name not in found:
            found[name] = Trainer(program, trainer.folder, os.path.relpath(program), f"--{name}")
    return found


def measure(program, device, quick, programs=None):
    """All parts: {"about": ..., section: {"results": ..., "commands": [...]}, ...}. programs: those of other precisions
    by name, None for a missing one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpt_chapter_") as folder:
        trainer = Trainer(program, folder)
        trainer.others = programs_of(trainer, programs or {})
        found = "gpu" if trainer.gpu else "cpu"
        size = SIZES["quick" if quick else device or found]
        while size.micro_batch > 1 and not trainer.fits(**setup_of(size, recompute="none")):
            size.micro_batch //= 2
        results = {}
        for number, section in enumerate(SECTIONS, 1):
            name = section.__name__
            print(f"chapter: {number}/{len(SECTIONS)} {name.replace('_', ' ')} ... ({time.monotonic() - began:.0f} s)",
                  file=sys.stderr)
            trainer.commands = []
            for other in trainer.others.values():
                if isinstance(other, Trainer):
                    other.commands = trainer.commands
            results[name] = {"results": section(trainer, size), "commands": trainer.commands}
        record = trainer.first_record
        results["about"] = {
            **{key: record[key] for key in ("device", "peak_source", "cuda_runtime", "cublaslt", "model")},
            "build": f"{found.upper()} build, {record['precision']}", "quick": quick, "gpu": found == "gpu",
            "peak_flops": trainer.peak_flops, "seq_len": size.seq_len, "micro_batch": size.micro_batch,
            "rounds": size.rounds, "date": time.strftime("%Y-%m-%d %H:%M"), "seconds": time.monotonic() - began,
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        }
        return results

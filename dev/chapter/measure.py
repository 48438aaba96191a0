"""The measurements: plans and training runs of ./train_gpt, as plain numbers.

Each of the eleven functions at the end answers one question of the book and returns what JSON can
hold. Drawing is report.py's: this file needs the standard library only.
"""
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

from formats import FORMATS

MODES = ["none", "selective", "full"]


class Mistake(Exception):
    """The user's; the message names the flag or file, what was found and what was expected."""


class Failed(Exception):
    """A program that was started did not do its work; `said`: its own words."""

    def __init__(self, text, said=""):
        super().__init__(text)
        self.said = said


# ---- How much work, for which device

@dataclass
class Size:
    model: dict             # the one model of all runs
    micro_batch: int
    seq_len: int
    rounds: int             # how often a comparison goes around
    run_seconds: float      # how long a run's steps should take; three steps at least
    attention_lens: list    # sequence lengths for flash against naive
    attention_tokens: int   # of each of those steps
    scan_batches: list
    scan_lens: list
    scan_tokens: int        # larger micro-batches are left out
    scan_seconds: float     # no further point of the scan is begun after so long
    parallel_batch: int     # micro-batch of each process of several, in sequences of parallel_len tokens
    parallel_len: int
    parallel_steps: int     # whose losses are compared
    lesson: dict            # setup of the runs that lack what makes few bits train
    lesson_steps: int
    lesson_parts: int       # micro-batches of a step where the size of gradients matters, and so its tokens
    lesson_part_steps: int  # so many such steps
    lesson_part_rate: float     # their learning rate
    lesson_seeds: int


SIZES = {
    "quick": Size({"layers": 4, "heads": 4, "channels": 128}, micro_batch=8, seq_len=128, rounds=3, run_seconds=0.4,
                  attention_lens=[128, 512], attention_tokens=1024,
                  scan_batches=[1, 4], scan_lens=[64, 256], scan_tokens=1024, scan_seconds=20,
                  parallel_batch=1, parallel_len=64, parallel_steps=12,
                  lesson={"layers": 2, "heads": 4, "channels": 64, "seq_len": 64, "micro_batch": 4},
                  lesson_steps=80, lesson_parts=4, lesson_part_steps=60,
                  lesson_part_rate=2e-3, lesson_seeds=3),
    "cpu": Size({"layers": 6, "heads": 4, "channels": 256}, micro_batch=4, seq_len=256, rounds=5, run_seconds=2,
                attention_lens=[128, 256, 512, 1024], attention_tokens=1024,
                scan_batches=[1, 2, 4, 8, 16], scan_lens=[64, 256, 1024], scan_tokens=2048, scan_seconds=120,
                parallel_batch=1, parallel_len=64, parallel_steps=20,
                lesson={"layers": 4, "heads": 4, "channels": 128, "seq_len": 64, "micro_batch": 4},
                lesson_steps=200, lesson_parts=8, lesson_part_steps=120,
                lesson_part_rate=2e-3, lesson_seeds=3),
    "gpu": Size({"layers": 24, "heads": 16, "channels": 1024}, micro_batch=16, seq_len=1024, rounds=5, run_seconds=1.5,
                attention_lens=[512, 1024, 2048, 4096], attention_tokens=16384,
                scan_batches=[1, 4, 16, 64], scan_lens=[512, 1024, 2048], scan_tokens=1 << 17, scan_seconds=200,
                parallel_batch=4, parallel_len=1024, parallel_steps=40,
                lesson={"layers": 6, "heads": 6, "channels": 384, "seq_len": 256, "micro_batch": 16},
                lesson_steps=300, lesson_parts=16, lesson_part_steps=300,
                lesson_part_rate=1e-3, lesson_seeds=3),
}
LEAST_STEPS, MOST_STEPS, WARM_UP = 3, 60, 1     # the first step of a run also sets things up: not counted
ATTENTION_ROUNDS, SCAN_ROUNDS = 3, 2            # at most: of sections with many setups


# ---- What may be concluded

def told(ratios):
    """Whether rounds tell a ratio from 1: where they differ by more than its median is away from 1, they do not.
    A single round says nothing of itself."""
    return len(ratios) > 1 and max(ratios) - min(ratios) < abs(statistics.median(ratios) - 1)


# ---- The trainer

def flags(options):
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def in_bytes(text, what):
    """A size on the trainer's closing line, such as that of '343 MB resident at most', or None."""
    found = re.search(r"([0-9.]+) (\w+) " + what, text)
    return float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else None


def first_number(text, pattern):
    found = re.search(pattern, text)
    return float(found[1]) if found else None


# What Open MPI, if it is that, refuses unless it is asked: more processes than cores, and to be run as root.
OPEN_MPI = ["--oversubscribe", "--bind-to", "none"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def started_by(processes):
    if processes == 1:
        return []
    version = subprocess.run(["mpirun", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return ["mpirun", *(OPEN_MPI if "Open MPI" in version.stdout else []), "-n", str(processes)]


FEW_WORDS = 20      # that a small model learns within a hundred steps, if its attention and MLP do


def write_text(path, different=1000):
    """Words that are made up: something to learn, and always the same."""
    if os.path.exists(path):
        return
    generator = random.Random(1)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 8))) for _ in range(different)]
    with open(path, "w", encoding="ascii") as file:
        file.write(" ".join(generator.choices(words, k=300_000)))


# What a run is without, unless it asks for it.
BARE = {"schedule": "constant", "val_fraction": 0, "eval_every": 0, "sample_every": 0, "checkpoint_every": 0}


def require_program(flag, program):
    if not os.access(program, os.X_OK) or os.path.isdir(program):
        raise Mistake(f"{flag} {program}: expected a program; run make")


class Trainer:
    """./train_gpt: runs it, and keeps what all sections share (commands, device, its best speed)."""

    def __init__(self, program, folder, name="./train_gpt", flag="--train-gpt"):
        require_program(flag, program)
        self.program, self.folder, self.name = os.path.abspath(program), folder, name
        self.others = {}                # of other precisions, by name; and the program that looks at single numbers
        self.text = os.path.join(folder, "text.txt")
        self.few_words = os.path.join(folder, "few_words.txt")
        write_text(self.text)
        write_text(self.few_words, FEW_WORDS)
        self.commands = []              # of the section that is being measured
        self.first_record = None        # of the first run: device and build
        self.peak_flops = 0             # the highest of all runs: a CPU's is measured anew by each
        self.help = self.call("--help")
        # Only a plan for a GPU sets bytes aside for CUDA.
        self.gpu = self.plan(micro_batch=1)["bytes"]["cuda"] > 0

    def knows(self, flag):
        return re.search(rf"^  {flag}\s", self.help, re.MULTILINE) is not None

    def can_trace(self):
        return self.knows("--trace")

    def call(self, *arguments, processes=1):
        done = subprocess.run([*started_by(processes), self.program, *arguments], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, env={**os.environ, **AS_ROOT})
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
            ours = [line for line in lines if line.startswith("train_gpt: ")]    # mpirun adds words of its own
            said = (ours or lines)[-1]
            raise Failed(f"exit code {done.returncode} from {self.shown(arguments, processes)}: {said}", said)
        return done.stdout

    def shown(self, arguments, processes=1):
        """A command line as a reader would type it."""
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

    def train(self, steps, gpus=1, **options):
        """Trains for some steps, on so many GPUs or with so many processes: what the log says of them, and the
        closing lines' memory and traffic."""
        command = ["train", "--data", self.text, *flags({**options, "steps": steps, **BARE})]
        self.remember(command, gpus)
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            output = self.call(*command, "--out", out, processes=gpus)
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                record, *lines = [json.loads(line) for line in log]
        record = record["run"]
        self.first_record = self.first_record or record
        self.peak_flops = max(self.peak_flops, record["peak_flops"])
        lines = [line for line in lines if "ms" in line]
        return {"ms": [line["ms"] for line in lines[WARM_UP:]], "losses": [line["loss"] for line in lines],
                "norms": [line["norm"] for line in lines],
                "flops_per_token": record["flops_per_token"], "planned": record["planned_bytes"],
                "as_planned": "allocated as planned" in output, "resident": in_bytes(output, "resident"),
                "sent": in_bytes(output, "a step by each"),
                "sending_ms": first_number(output, r"sending +(\S+) ms a step"),
                "exposed_ms": first_number(output, r"sending .*, (\S+) ms of it .* not hidden")}

    def curve(self, steps, **options):
        """The log's records of a run, and why it stopped before its end, if it did: a lesson's may."""
        command = ["train", "--data", self.few_words, *flags({"steps": steps, **BARE, **options})]
        self.remember(command)
        stopped = None
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            try:
                self.call(*command, "--out", out)
            except Failed as error:
                stopped = error.said.removeprefix("train_gpt: ")
                if not re.match(r"step \d+: ", stopped):     # it is no number of the run that was at fault
                    raise
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                records = [json.loads(line) for line in log][1:]
        return records, stopped

    def fits(self, **options):
        plan = self.plan(**options)
        return plan["bytes"]["total"] <= 0.95 * plan["gpu_memory"]     # the rest: other programs, fragments

    def compare(self, setups, rounds, seconds):
        """Runs each setup in turn, `rounds` times around, so that whatever else the machine does
        hits all of them: {name: figures}, None for what does not fit into memory. Each round begins with
        another setup: one that always came first would gain or lose by it in all of them alike.

        A figure is the median of all steps; `ratios` holds, for each round, this run's median over
        the first setup's.
        """
        results = {name: {"ms": [], "round_ms": []} if self.fits(**setup) else None for name, setup in setups.items()}
        steps = dict.fromkeys(setups, WARM_UP + LEAST_STEPS)
        for turn in range(rounds):
            names = [*setups][turn % len(setups):] + [*setups][:turn % len(setups)]
            for name, setup in ((name, setups[name]) for name in names):
                if results[name] is None:
                    continue
                run = self.train(steps[name], **setup)
                median = statistics.median(run["ms"])
                results[name]["ms"] += run["ms"]
                results[name]["round_ms"].append(median)
                results[name].update({key: value for key, value in run.items() if key != "ms"})
                steps[name] = WARM_UP + min(MOST_STEPS, max(LEAST_STEPS, round(1000 * seconds / median)))
        reference = results[next(iter(setups))]
        for result in filter(None, results.values()):
            result["ratios"] = [mine / theirs for mine, theirs in zip(result["round_ms"], reference["round_ms"])] if reference else []
            result["median_ms"] = statistics.median(result["ms"])
        return results


def tokens_of(setup):
    return setup.get("total_batch", setup["micro_batch"] * setup["seq_len"])


def setup_of(size, **more):
    """Options of a run or a plan: the model on bytes, with as many positions as the sequence has."""
    setup = {**size.model, "vocab": 256, "micro_batch": size.micro_batch, "seq_len": size.seq_len, **more}
    return {**setup, "context": setup["seq_len"]}


# ---- The eleven questions

CARD = "80GB"           # the card that large models are planned for, whatever this machine is
LARGE = ["1b", "7b", "70b", "405b"]
PRECISIONS = {"FP32": ("fp32", "fp32"), "BF16, BF16 gradients": ("bf16", "bf16"), "BF16, FP32 gradients": ("bf16", "fp32")}
GPT3_175B = {"layers": 96, "heads": 96, "channels": 12288, "context": 2048}


def state(trainer, size):
    """1. Where the bytes of a model go, by category."""
    results = {}
    for model in LARGE:
        results[model] = {}
        for name, (precision, grad_dtype) in PRECISIONS.items():
            plan = trainer.plan(model=model, micro_batch=1, precision=precision, grad_dtype=grad_dtype, gpu_memory=CARD)
            results[model][name] = {key: plan[key] for key in ("parameters", "bytes", "seq_len", "bytes_per_parameter", "max_micro_batch")}
    return results


def activations(trainer, size):
    """2. Activations against sequence length."""
    def figures(**options):
        plan = trainer.plan(micro_batch=1, precision="bf16", gpu_memory=CARD, **options)
        return {"bytes": plan["bytes"]["activations"], "per_token_layer": plan["activation_bytes_per_token_per_layer"],
                "korthikanti": plan["korthikanti_bytes"]}

    lengths = [512 << i for i in range(8)]
    curves = {f"{attention}, {mode}": [figures(model="7b", context=T, seq_len=T, attention=attention, recompute=mode) for T in lengths]
              for attention in ("flash", "naive") for mode in MODES}
    gpt3 = {mode: figures(**GPT3_175B, attention="naive", recompute=mode) for mode in MODES}
    state_bytes = trainer.plan(model="7b", micro_batch=1, precision="bf16", grad_dtype="bf16", gpu_memory=CARD)["bytes"]
    return {"lengths": lengths, "channels": 4096, "curves": curves, "gpt3_175b": gpt3,
            "state": sum(state_bytes[name] for name in ("weights", "gradients", "master", "adam_m", "adam_v"))}


def last_step(trace):
    """From a Chrome trace, its last whole step: passes, live bytes, time of each kind of kernel."""
    events = trace["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    kernels = sorted((event for event in events if event["ph"] == "X" and event["tid"] == rows.get("stream: kernels", event["tid"])),
                     key=lambda event: event["ts"])
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

    counters = sorted((event for event in events if event["ph"] == "C" and event["name"] == "live bytes"), key=lambda event: event["ts"])
    before = [event for event in counters if event["ts"] <= begin][-1:]
    within = [event for event in counters if begin < event["ts"] <= end]
    live = {"ms": [max(0, event["ts"] - begin) / 1000 for event in before + within]}
    for category in (before + within)[0]["args"] if before + within else []:
        live[category] = [event["args"][category] for event in before + within]
    return {"ms": (end - begin) / 1000, "passes": passes, "kernels": by_kernel, "live": live}


def timeline(trainer, size):
    """3. Memory over a step. None where the trainer cannot write traces."""
    if not trainer.can_trace():
        return None
    results = {}
    for mode in MODES:
        path = os.path.join(trainer.folder, "trace.json")
        run = trainer.train(3, **setup_of(size, recompute=mode), trace=path)
        with open(path, encoding="utf-8") as file:
            results[mode] = {**last_step(json.load(file)), "planned": run["planned"]}
    return results


def recomputation(trainer, size):
    """4. What recomputation costs and saves, and naive attention beside flash attention."""
    setups = {mode: setup_of(size, recompute=mode) for mode in MODES}
    modes = trainer.compare(setups, size.rounds, size.run_seconds)
    for mode, result in modes.items():
        plan = trainer.plan(**setups[mode])
        if result:
            result.update(tokens=tokens_of(setups[mode]), activations=plan["bytes"]["activations"],
                          per_token_layer=plan["activation_bytes_per_token_per_layer"])
    lengths = {}
    for T in size.attention_lens:
        shape = {"seq_len": T, "micro_batch": size.attention_tokens // T}
        setups = {"flash": setup_of(size, **shape, attention="flash"),
                  "naive": setup_of(size, **shape, attention="naive"),
                  "naive, selective": setup_of(size, **shape, attention="naive", recompute="selective")}
        lengths[T] = trainer.compare(setups, min(ATTENTION_ROUNDS, size.rounds), size.run_seconds / 2)
        for name, setup in setups.items():
            plan = trainer.plan(**setup)
            figures = {"activations": plan["bytes"]["activations"], "per_token_layer": plan["activation_bytes_per_token_per_layer"]}
            lengths[T][name] = {**(lengths[T][name] or {"median_ms": None}), **figures}
    return {"modes": modes, "attention": lengths, "attention_tokens": size.attention_tokens}


def accumulation(trainer, size):
    """5. The same batch in parts."""
    sequences = 8
    setups = {f"{B} x {sequences // B}": setup_of(size, micro_batch=B, total_batch=sequences * size.seq_len) for B in (1, 2, 4, 8)}
    results = trainer.compare(setups, size.rounds, size.run_seconds)
    return {"tokens": sequences * size.seq_len, "splits": results}


def scan(trainer, size):
    """6. Throughput over micro-batch x sequence x recompute."""
    deadline = time.monotonic() + size.scan_seconds
    points = [(B, T, mode) for B in size.scan_batches for T in size.scan_lens for mode in MODES if B * T <= size.scan_tokens]
    random.Random(1).shuffle(points)    # a machine that slows down should not look like a trend
    results = []
    for B, T, mode in points:
        setup = setup_of(size, micro_batch=B, seq_len=T, recompute=mode)
        plan = trainer.plan(**setup)
        results.append({"micro_batch": B, "seq_len": T, "recompute": mode, "planned": plan["bytes"]["total"],
                        "why": None if trainer.fits(**setup) else "does not fit", "round_ms": []})
    for _ in range(SCAN_ROUNDS):
        for result in results:
            if result["why"] is None and time.monotonic() < deadline:
                point = {name: result[name] for name in ("micro_batch", "seq_len", "recompute")}
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
    results = {}
    for name, (precision, grad_dtype) in PRECISIONS.items():
        plan = trainer.plan(model="7b", micro_batch=1, precision=precision, grad_dtype=grad_dtype, gpu_memory=CARD)
        moment = plan["bytes"]["adam_m"] / 4    # always FP32: so many elements, the vocabulary's padding included
        results[name] = {category: plan["bytes"][category] / moment for category in ("weights", "gradients", "master", "adam_m", "adam_v")}
        results[name]["total"] = plan["bytes_per_parameter"]
        results[name]["activations"] = plan["bytes"]["activations"]
    return results


STAGES = [0, 1, 2, 3]           # of ZeRO
SEVERAL = 3                     # micro-batches that each process adds up in a step, for what it sends then
ZERO_PAPER = {"layers": 36, "channels": 4096, "heads": 32}  # 7.5 billion parameters, as in that paper's figure 1
ZERO_PAPER_GPUS = 64


def gpu_count():
    """Of this machine, as far as programs see them."""
    if not shutil.which("nvidia-smi"):
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([name for name in visible.split(",") if name.strip()]))


def why_alone(trainer, most, setup):
    """What keeps the trainer from running as several processes, or None."""
    if most < 2:
        return "this machine has one GPU"
    if not shutil.which("mpirun"):
        return "there is no mpirun on PATH"
    try:
        run = trainer.train(1, gpus=2, **setup)
    except Failed as error:
        return f"two processes do not run here ({error.said.removeprefix('train_gpt: ')})"
    # As with the mpirun of another MPI than the build's.
    return None if run["sent"] else "two processes that mpirun started did not find each other"


def parallel_speed(trainer, size, setup, numbers):
    """Step times with the same work for each GPU, and how much of the sending is hidden under kernels."""
    setups = {"1 GPU": setup, **{f"{gpus} GPUs, ZeRO {zero}": {**setup, "gpus": gpus, "zero": zero}
                                 for gpus in numbers[1:] for zero in (STAGES[0], STAGES[-1])}}
    results = trainer.compare(setups, min(ATTENTION_ROUNDS, size.rounds), size.run_seconds)
    path = os.path.join(trainer.folder, "trace.json")
    for name, result in results.items():
        if result:
            gpus = setups[name].get("gpus", 1)
            traced = trainer.train(WARM_UP + LEAST_STEPS, **setups[name], trace=path) if gpus > 1 else {}
            result.update(gpus=gpus, tokens=gpus * tokens_of(setup),
                          sending_ms=traced.get("sending_ms"), exposed_ms=traced.get("exposed_ms"))
    return results


def data_parallel(trainer, size):
    """8. Several processes that share one step's batch: memory, traffic, losses; on GPUs, throughput."""
    most = gpu_count() if trainer.gpu else 4
    setup = setup_of(size, micro_batch=size.parallel_batch, seq_len=size.parallel_len)
    why = why_alone(trainer, most, setup)
    if why:
        return {"why": why}
    numbers = sorted({1, 2, most})

    def run(gpus, zero, parts, steps):
        total = size.parallel_batch * size.parallel_len * gpus * parts
        figures = trainer.train(steps, **setup, total_batch=total, gpus=gpus, zero=zero)
        kept = ("planned", "as_planned", "sent", "losses", "norms")
        return {"gpus": gpus, "zero": zero, "parts": parts, **{name: figures[name] for name in kept}}

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
            "paper": {"parameters": paper[0]["parameters"], "bytes": [each["bytes"] for each in paper]},
            "speed": parallel_speed(trainer, size, setup, numbers) if trainer.gpu else None}


# ---- few bits: 9, 10, 11

MOST_MICRO_BATCHES = 256        # that are summed


def numbers_of(trainer, size):
    """What formats.cu prints, or why it does not."""
    program = trainer.others.get("formats")
    if not program:
        return {"why": "no --formats PROGRAM was given"}
    setup = {**setup_of(size, **size.lesson), "steps": size.lesson_steps // 2, "lr": LESSON_RATES[0], **BARE,
             "total_batch": MOST_MICRO_BATCHES * size.lesson["micro_batch"] * size.lesson["seq_len"]}
    command = ["--data", trainer.few_words, *flags(setup)]
    text = shlex.join([program, *command])
    trainer.commands.append(text.replace(trainer.folder + "/", ""))
    done = subprocess.run([program, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"exit code {done.returncode} from {text}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def formats(trainer, size):
    """9. Formats from their bits, and where a step's values lie."""
    trainer.numbers = numbers_of(trainer, size)
    return {"formats": [{"name": f.name, "exponent": f.exponent, "mantissa": f.mantissa,
                         "largest_exponent": f.largest_exponent} for f in FORMATS],
            "values": trainer.numbers.get("values"), "why": trainer.numbers.get("why")}


LESSON_RATES = [1e-3, 1e-4, 1e-5]       # learning rates


def last_loss(records):
    """Of the last tenth of a run's steps, the median: small models have a spike now and then."""
    losses = [record["loss"] for record in records if "loss" in record]
    return statistics.median(losses[-max(1, len(losses) // 10):])


def lesson(program, size, kinds, kept, steps, **setup):
    """Runs of the same data and seeds that differ in some options, {name: figures}. `kept`: the records' keys whose
    values are wanted beside losses, of the first seed. ratios: of each seed, the last loss over the first kind's; none
    of a run that stopped."""
    results = {name: {"last": [], "stopped": []} for name in kinds}
    for seed in range(1, size.lesson_seeds + 1):
        for name, options in kinds.items():
            records, stopped = program.curve(steps, **setup_of(size, **{**size.lesson, **setup}), seed=seed, **options)
            result = results[name]
            result["last"].append(last_loss(records) if not stopped else None)
            result["stopped"].append(stopped)
            if seed == 1:
                result["losses"] = [[record["step"], record["loss"]] for record in records if "loss" in record]
                for key in kept:
                    result[key] = [[record["step"], record[key]] for record in records if key in record]
    first = results[next(iter(kinds))]["last"]
    for result in results.values():
        result["ratios"] = [a / b for a, b in zip(result["last"], first) if a is not None and b is not None]
    return results


def without_master(trainer, size):
    program = trainer.others.get("bf16")
    if not program:
        return {"why": "no --bf16 PROGRAM was given"}
    if not program.knows("--master-weights"):
        return {"why": f"{program.name} knows no --master-weights"}
    return {"rates": {str(lr): lesson(program, size, {kind: {"master_weights": kind} for kind in ("fp32", "none")},
                                      ["unchanged"], size.lesson_steps, lr=lr) for lr in LESSON_RATES}}


def of_many_tokens(size):
    """A step's setup, and how many there are: gradients of the mean loss are the smaller, the more tokens it has."""
    tokens = size.lesson_parts * size.lesson["micro_batch"] * size.lesson["seq_len"]
    return size.lesson_part_steps, tokens, {
        "total_batch": tokens, "lr": size.lesson_part_rate, "eval_every": max(1, size.lesson_part_steps // 10),
        "val_fraction": 0.1, "eval_sequences": 4}


def without_loss_scaling(trainer, size):
    program = trainer.others.get("fp16")
    if not program:
        return {"why": "no --fp16 PROGRAM was given"}
    if not program.knows("--loss-scaling"):
        return {"why": f"{program.name} knows no --loss-scaling"}
    steps, tokens, setup = of_many_tokens(size)
    kinds = {kind: {"loss_scaling": kind} for kind in ("dynamic", "none")}
    return {"tokens": tokens, "kinds": lesson(program, size, kinds, ["zero_gradients", "loss_scale"], steps, **setup)}


def without_fp8_scales(trainer, size):
    program = trainer.others.get("bf16")
    if not program:
        return {"why": "no --bf16 PROGRAM was given"}
    if not program.knows("--fp8-scaling"):
        return {"why": f"{program.name} knows no --fp8-scaling"}
    steps, tokens, setup = of_many_tokens(size)
    kinds = {"bf16": {"matmul": "plain"},
             **{kind: {"matmul": "fp8", "fp8_scaling": kind} for kind in ("delayed", "none")}}
    try:
        results = lesson(program, size, kinds, ["fp8"], steps, **setup)
    except Failed as error:     # as on cards without FP8
        return {"why": error.said or str(error)}
    for result in results.values():     # of all layers together
        result["fp8"] = [[step, {tensor: {what: parts[what] for what in ("flushed", "saturated")}
                                 for tensor, parts in tensors.items()}] for step, tensors in result["fp8"]]
    return {"tokens": tokens, "kinds": results}


def failures(trainer, size):
    """10. What goes wrong without each of the techniques that make few bits train."""
    numbers = trainer.numbers
    return {"master": without_master(trainer, size),
            "sums": {"why": numbers["why"]} if "why" in numbers else
                    {"sums": numbers["sums"], "copies": numbers["values"]["unchanged"]},
            "loss_scaling": without_loss_scaling(trainer, size),
            "fp8_scaling": without_fp8_scales(trainer, size)}


FP8_QUALITY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fp8_quality.json")


def fp8_quality(trainer, size):
    """11. Whole runs in FP8 and BF16: what fp8_quality.py has measured."""
    if not os.path.exists(FP8_QUALITY):
        return {"why": "there is no dev/chapter/fp8_quality.json"}
    with open(FP8_QUALITY, encoding="utf-8") as file:
        return json.load(file)


def programs_of(trainer, programs):
    """The given ones as trainers, where they are; the trainer itself where it is one of them."""
    precision = trainer.plan(micro_batch=1)["precision"]
    found = {precision: trainer}
    for name, program in programs.items():
        if program and name == "formats":
            require_program("--formats", program)
            found[name] = os.path.relpath(program)
            found[name] = found[name] if "/" in found[name] else "./" + found[name]
        elif program and name not in found:
            found[name] = Trainer(program, trainer.folder, os.path.relpath(program), f"--{name}")
    return found


def measure(program, device, quick, programs=None):
    """All of it: {"about": ..., section: {"results": ..., "commands": [...]}, ...}. programs: those of other
    precisions, by name, or None for what is not there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpt_chapter_") as folder:
        trainer = Trainer(program, folder)
        trainer.others = programs_of(trainer, programs or {})
        found = "gpu" if trainer.gpu else "cpu"
        device = device or found
        size = SIZES["quick" if quick else device]
        while size.micro_batch > 1 and not trainer.fits(**setup_of(size, recompute="none")):
            size.micro_batch //= 2
        sections = {"state": state, "activations": activations, "timeline": timeline, "recomputation": recomputation,
                    "accumulation": accumulation, "scan": scan, "mixed_precision": mixed_precision,
                    "data_parallel": data_parallel, "formats": formats, "failures": failures,
                    "fp8_quality": fp8_quality}
        results = {}
        for number, (name, section) in enumerate(sections.items(), 1):
            print(f"chapter: {number}/{len(sections)} {name.replace('_', ' ')} ... ({time.monotonic() - began:.0f} s)", file=sys.stderr)
            trainer.commands = []
            for other in trainer.others.values():
                if isinstance(other, Trainer):
                    other.commands = trainer.commands
            results[name] = {"results": section(trainer, size), "commands": trainer.commands}
        record = trainer.first_record
        results["about"] = {
            "device": record["device"], "build": f"{found.upper()} build, {record['precision']}", "size": device,
            "quick": quick, "peak_flops": trainer.peak_flops, "peak_source": record["peak_source"],
            "cuda_runtime": record["cuda_runtime"], "cublaslt": record["cublaslt"], "gpu": found == "gpu",
            "model": record["model"], "seq_len": size.seq_len, "micro_batch": size.micro_batch, "rounds": size.rounds,
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "date": time.strftime("%Y-%m-%d %H:%M"), "seconds": time.monotonic() - began,
        }
        return results

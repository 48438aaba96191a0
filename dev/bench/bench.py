#!/usr/bin/env python3
"""./train_gpt beside PyTorch, llm.c and transformers on this machine: report.md, results.json and a plot in --out.

    python3 dev/bench/bench.py cpu --ours build/cpu-bf16/train_gpt --ours build/cpu-fp32/train_gpt    # make bench
    python3 dev/bench/bench.py sampling --ours ./train_gpt                                   # make bench-sampling
    python3 dev/bench/bench.py gpu --ours ./train_gpt --llmc ../llm.c                        # make bench-gpu

Contestants take turns, each run in a process of its own with a time limit. A run that fails is named in the report and
ends nothing else. The report is written again after each run. gpu --device cpu is a dry run with tiny models.
"""
import argparse
import concurrent.futures
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

sys.dont_write_bytecode = True
from bench_report import draw_plot, write_report
from contestants import (HERE, Case, Failed, LlmC, OurSampling, Ours, PyTorch, Transformers, run, write_tokens)

ROOT = os.path.join(HERE, "..", "..")
LONG_RUN_S = 60             # on a CPU a contestant whose run takes longer than this has no second one
HOPELESS = 1.5              # nor has a peer that takes so many times the fastest peer's step
COPIED_BYTES = 1 << 28      # by each thread, to measure a CPU's bandwidth: more than caches hold

GPT2 = {"model": "gpt2"}
TINY = {"heads": 2, "channels": 64, "context": 64, "vocab": 512}


class Mistake(Exception):
    """The user's; the message names the flag, what was found and what was expected."""


@dataclass
class Suite:
    cases: list
    tunings: list           # of PyTorch
    rounds: int
    limit_s: float          # of a run
    least_s: float          # a run does not begin with less time left than this
    tokens: int             # in the files of random tokens
    attention: dict         # sizes of attention alone
    matmul: int = 8192      # size of the matmul that PyTorch is timed with
    copy_bytes: int = 1 << 30


SUITES = {
    "cpu": Suite(
        [Case("124M-T64", GPT2, 64, 256, 4, timed=5, goal_ms=1100),
         Case("124M-T1024", GPT2, 1024, 1024, 1, timed=3, goal_ms=6000),
         # nanoGPT's recipe for a CPU, on bytes
         Case("shakespeare", {"layers": 4, "heads": 4, "channels": 128, "context": 64, "vocab": 256}, 64, 768, 12,
              timed=40, goal_ms=20)],
        [*PyTorch.TUNINGS], rounds=2, limit_s=3600, least_s=0, tokens=1 << 17, attention={}),
    "gpu": Suite(
        [Case("gpt2", GPT2, 1024, 524288, timed=5), Case("gpt2-xl", {"model": "gpt2-xl"}, 1024, 131072, timed=4)],
        ["fused, BF16, compiled", "fused, BF16"], rounds=2, limit_s=120, least_s=20, tokens=1 << 20,
        attention={"channels": 2048, "tokens": 16384, "lengths": [2048, 8192], "head_sizes": [64, 128]}),
    # Runs every part and says nothing about speed.
    "dry": Suite(
        [Case("tiny-2", {"layers": 2, **TINY}, 64, 512, 4), Case("tiny-4", {"layers": 4, **TINY}, 64, 512, 4)],
        ["fused, BF16"], rounds=2, limit_s=60, least_s=2, tokens=1 << 14, matmul=128, copy_bytes=1 << 20,
        attention={"channels": 64, "tokens": 512, "lengths": [128, 256], "head_sizes": [16, 32]})}


class Context:
    """What contestants share: files of random tokens, the plan of each case, a python that has PyTorch."""

    def __init__(self, options, suite, folder):
        self.options, self.suite, self.folder = options, suite, folder
        self.device = "cuda" if options.suite == "gpu" and options.device == "gpu" else "cpu"
        self.traced = options.suite == "gpu"
        self.peak = "measured" if self.device == "cpu" else "table"
        self.plans, self.reference = {}, None

    def tokens(self, vocab):
        path = os.path.join(self.folder, f"tokens_{vocab}.bin")
        if not os.path.exists(path):
            write_tokens(path, vocab, self.suite.tokens + 1)
        return path

    def plan(self, case):
        """Of the first of ours: sizes, and the micro-batch with which all begin."""
        if case.name not in self.plans:
            plan = self.reference.plan(case, case.micro_batch or "auto")
            micro_batch, sequences = min(plan["micro_batch"], 64), case.tokens // case.seq_len
            while sequences % micro_batch:
                micro_batch -= 1
            self.plans[case.name] = {**plan, "micro_batch": micro_batch}
        return self.plans[case.name]

    def torch(self, what, limit, *arguments):
        """Runs torch_side.py; raises Failed where it fails."""
        threads = ["--threads", self.options.threads] if self.device == "cpu" else []
        return run([self.options.python, "-B", os.path.join(HERE, "torch_side.py"), what, "--device", self.device,
                    *threads, *arguments], limit).check()


# ---- What is measured. Each function adds to the results.

def copy_bandwidth(threads):
    """Bytes that this CPU's threads read and write per second with memmove, the best of five."""
    blocks = [(ctypes.create_string_buffer(COPIED_BYTES), ctypes.create_string_buffer(COPIED_BYTES))
              for _ in range(threads)]
    best = 0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(5):      # the first of them brings the pages
            start = time.monotonic()
            list(pool.map(lambda pair: ctypes.memmove(*pair, COPIED_BYTES), blocks))
            best = max(best, 2 * COPIED_BYTES * threads / (time.monotonic() - start))
    return best


def measure_copy(results, context, limit):
    """In a process of its own: what this one holds would count as a contestant's peak memory."""
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        results["ceilings"]["copy_bytes_per_s"] = pool.submit(copy_bandwidth, context.options.threads).result()


def measure_step(results, context, case, contestant, limit):
    """One run of a contestant: its steps count together with those of earlier runs."""
    began = time.monotonic()
    found = contestant.measure(case, limit)
    entry = results["cases"].setdefault(case.name, {**asdict(case), "runs": {}})["runs"]
    before = entry.get(contestant.name, {"ms": [], "seconds": 0, "peak_bytes": 0})
    peak = max(found["peak_bytes"] or 0, before["peak_bytes"])
    entry[contestant.name] = {"kind": contestant.kind, **before, **found, "ms": before["ms"] + found["ms"],
                              "peak_bytes": peak, "seconds": time.monotonic() - began}


def attention_points(sizes):
    return [{"B": sizes["tokens"] // T, "T": T, "NH": sizes["channels"] // HS, "HS": HS}
            for HS in sizes["head_sizes"] for T in sizes["lengths"]]


def measure_ceilings(results, context, limit):
    """PyTorch's copy, large matmul, and attention by each of its backends."""
    suite = context.suite
    done = context.torch("ceilings", limit, "--precision", context.reference.precision, "--matmul", suite.matmul,
                         "--copy-bytes", suite.copy_bytes, "--attention", json.dumps(attention_points(suite.attention)))
    found = json.loads(done.output.splitlines()[-1])
    for point in found.pop("attention"):
        results["attention"].setdefault(f"{point['HS']}/{point['T']}", {}).update(point)
    results["ceilings"].update(found)


def measure_our_attention(results, context, limit, point):
    """From the trace of a model of one layer and one micro-batch."""
    options = {"layers": 1, "heads": point["NH"], "channels": point["NH"] * point["HS"], "context": point["T"],
               "seq_len": point["T"], "micro_batch": point["B"], "vocab": 512}
    trace = context.reference.train(options, point["B"] * point["T"], 3, limit)["trace"]
    seconds = {f"{pass_}_s": sum(kernel["ms"] for kernel in trace["kernels"] if kernel["pass"] == pass_
                                 and kernel["name"].startswith("attention")) / 1000
               for pass_ in ("forward", "backward")}
    results["attention"].setdefault(f"{point['HS']}/{point['T']}", {}).update(point, ours=seconds)


def measure_sampling(results, contestant, limit):
    found = contestant.measure(limit)
    entry = results["sampling"].setdefault(contestant.name, {"first_s": [], "tokens_per_s": {}})
    entry["first_s"].append(found["first_s"])
    for length, seconds in found["seconds"].items():
        entry["tokens_per_s"].setdefault(length, []).append(int(length) / max(1e-9, seconds - found["first_s"]))


# ---- The order

def step_jobs(results, context, contestants):
    """(title, function of a limit, whether it is still wanted), round after round, so that contestants take turns."""
    def wanted(case, contestant, round_):
        runs = results["cases"].get(case.name, {}).get("runs", {})
        if round_ == 0:
            return True
        if contestant.name not in runs:
            return False
        if context.options.suite == "cpu" and runs[contestant.name]["seconds"] > LONG_RUN_S:
            return False
        fastest = min((min(entry["ms"]) for name, entry in runs.items() if entry["kind"] != "ours"), default=0)
        return contestant.ours or min(runs[contestant.name]["ms"]) <= HOPELESS * fastest

    return [(f"{case.name}: {contestant.name}, run {round_ + 1}",
             lambda limit, a=case, b=contestant: measure_step(results, context, a, b, limit),
             lambda a=case, b=contestant, c=round_: wanted(a, b, c))
            for round_ in range(context.suite.rounds) for case in context.suite.cases for contestant in contestants]


def training_jobs(results, context):
    options, always = context.options, lambda: True
    contestants = [Ours(context, program) for program in options.ours]
    context.reference = contestants[0]
    if options.python:
        contestants += [PyTorch(context, tuning) for tuning in context.suite.tunings]
    if options.llmc:
        contestants.append(LlmC(context, options.llmc))
    steps = step_jobs(results, context, contestants)
    if options.suite == "cpu":
        return [("a large copy", lambda limit: measure_copy(results, context, limit), always), *steps]
    ceilings = [("PyTorch's copy, matmul and attention",
                 lambda limit: measure_ceilings(results, context, limit), always)]
    attention = [(f"attention of {point['NH']} heads of {point['HS']}, T = {point['T']}",
                  lambda limit, point=point: measure_our_attention(results, context, limit, point), always)
                 for point in attention_points(context.suite.attention)]
    first = len(contestants)
    return steps[:first] + (ceilings if options.python else []) + attention + steps[first:]


def sampling_jobs(results, context):
    """The weights are those with which a run of ours begins, so that all read the same folder."""
    options, ours = context.options, [Ours(context, program) for program in context.options.ours]
    out = os.path.join(context.folder, "start")
    run([ours[0].program, "train", "--data", context.tokens(50257), "--model", "gpt2", "--micro-batch", 1, "--seq-len",
         64, "--steps", 1, "--lr", 0, "--eval-every", 0, "--sample-every", 0, "--val-fraction", 0, "--checkpoint-every",
         1, "--out", out], 600).check()
    weights = os.path.join(out, "step_000001")
    contestants = [OurSampling(each, weights, options.lengths) for each in ours]
    if options.python:
        contestants += [Transformers(context, weights, options.lengths, precision) for precision in ("fp32", "bf16")]
    return [(f"{contestant.name}, run {round_ + 1}",
             lambda limit, each=contestant: measure_sampling(results, each, limit), lambda: True)
            for round_ in range(3) for contestant in contestants]


def save(results, folder, plot=False):
    """results.json and report.md, each whole at any moment."""
    path = os.path.join(folder, "results.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    os.replace(path + ".new", path)
    return write_report(results, folder, draw_plot(results, folder) if plot else None)


def run_jobs(jobs, results, context, folder):
    """All jobs for which there is time; Ctrl-C and SIGTERM end them, not the report. Returns whether all of ours
    succeeded."""
    begin, options, well = time.monotonic(), context.options, True
    try:
        for title, function, wanted in jobs:
            left = 60 * options.minutes - (time.monotonic() - begin)
            if not wanted():
                continue
            if left < context.suite.least_s:
                results["not_run"].append([title, f"{max(0, left):.0f} s were left of {options.minutes:g} minutes"])
                continue
            print(f"bench: {time.monotonic() - begin:5.0f} s  {title}", file=sys.stderr, flush=True)
            try:
                function(min(context.suite.limit_s, left))
            except (Failed, OSError, ValueError, KeyError, IndexError) as failure:
                reason = str(failure) if isinstance(failure, (Failed, OSError)) else repr(failure)
                results["not_run"].append([title, reason])
                print(f"bench: {title}: {reason}", file=sys.stderr, flush=True)
                well = well and "ours" not in title and "attention of" not in title
            results["about"]["seconds"] = time.monotonic() - begin
            save(results, folder)
    except KeyboardInterrupt:
        results["not_run"].append(["the rest", "interrupted"])
        well = False
    print(save(results, folder, plot=True), end="")
    return well


# ---- The command line

def output_of(*command):
    """What a command prints; empty where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def about(options):
    commit = output_of("git", "-C", ROOT, "rev-parse", "--short", "HEAD")
    changed = output_of("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no")
    return {"suite": options.suite, "dry": options.dry, "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": f"{cpu_name()}, {options.threads} threads", "load before": f"{os.getloadavg()[0]:.1f}",
            "GPU, driver, memory, clocks now and at most, power limit": output_of(
                "nvidia-smi", "-i", "0", "--format=csv,noheader",
                "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit") or "-",
            "PyTorch": options.torch_version or f"not found in {', '.join(options.pythons)} (--python names another)",
            "commit": commit + (" with changes" if changed else "") if commit else "unknown: no git repository"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("suite", choices=["cpu", "gpu", "sampling"])
    parser.add_argument("--ours", required=True, metavar="PROGRAM", action="append",
                        help="a build of train_gpt; once more for another")
    parser.add_argument("--out", metavar="FOLDER", help="for the report (default: runs/bench-SUITE)")
    parser.add_argument("--minutes", type=float, help="for all runs together (default: 8 for gpu, else no limit)")
    parser.add_argument("--cases", metavar="NAMES", help="some of a suite's models, such as gpt2,gpt2-xl")
    parser.add_argument("--llmc", default=os.environ.get("LLMC"), metavar="FOLDER",
                        help="of gpu: holds llm.c's program train_gpt2cu (default: $LLMC)")
    parser.add_argument("--torch", choices=["yes", "no"], default="yes", help="measure PyTorch where it is installed")
    parser.add_argument("--python", metavar="PROGRAM", help="the python that has PyTorch (default: this one, then "
                        "/usr/bin/python3)")
    parser.add_argument("--threads", type=int, default=cpus, help="of a CPU, for all contestants (default: all CPUs)")
    parser.add_argument("--lengths", default="64,256,512", help="of sampling: tokens after the first")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="of gpu: cpu is a dry run")
    return parser.parse_args()


def check(options, suite):
    """Names, numbers and paths, before anything takes time."""
    for program in options.ours:
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            raise Mistake(f"--ours {program}: expected a program; run make")
    if options.minutes is not None and not 0 < options.minutes <= 24 * 60:
        raise Mistake(f"--minutes {options.minutes:g}: expected more than 0, at most {24 * 60}")
    if options.threads < 1:
        raise Mistake(f"--threads {options.threads}: expected at least 1")
    if options.llmc and not os.path.isdir(options.llmc):
        raise Mistake(f"--llmc {options.llmc}: expected a folder")
    try:
        options.lengths = [int(length) for length in options.lengths.split(",")]
    except ValueError:
        raise Mistake(f"--lengths {options.lengths}: expected numbers such as 64,256") from None
    if not 1 <= min(options.lengths) <= max(options.lengths) <= 1000:
        raise Mistake(f"--lengths: found {options.lengths}, expected numbers from 1 to 1000")
    known = [case.name for case in suite.cases]
    wanted = options.cases.split(",") if options.cases else known
    for name in wanted:
        if name not in known:
            raise Mistake(f"--cases {name}: expected some of {', '.join(known)}")
    suite.cases = [case for case in suite.cases if case.name in wanted]


def require_device(context):
    """The first program must be a build for the device. Only a plan for a GPU reserves bytes for CUDA."""
    try:
        plan = json.loads(run([context.options.ours[0], "plan", "--json"], 60).check().output)
    except Failed as failure:
        raise Mistake(f"--ours {context.options.ours[0]}: {failure}") from None
    found = "gpu" if plan["bytes"].get("cuda", 0) > 0 else "cpu"
    expected = "gpu" if context.device == "cuda" else "cpu"
    if found != expected:
        raise Mistake(f"--ours {context.options.ours[0]}: found a {found} build of train_gpt, expected a {expected} "
                      f"build" + ("; no GPU? --device cpu is a dry run" if expected == "gpu" else ""))


def main():
    options = parse_arguments()
    options.dry = options.suite == "gpu" and options.device == "cpu"
    suite = SUITES["dry" if options.dry else "cpu" if options.suite == "sampling" else options.suite]
    check(options, suite)
    options.minutes = options.minutes or (8 if options.suite == "gpu" else 24 * 60)
    options.out = options.out or os.path.join("runs", f"bench-{options.suite}")
    options.pythons = [options.python] if options.python else [sys.executable, "/usr/bin/python3"]
    versions = {python: output_of(python, "-c", "import torch; print(torch.__version__)") for python in options.pythons
                if options.torch == "yes"}
    options.python = next((python for python, version in versions.items() if version), None)
    options.torch_version = versions.get(options.python)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)    # every contestant computes with OpenMP
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpt_bench_") as folder:
        context = Context(options, suite, folder)
        require_device(context)
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            raise Mistake(f"--out {options.out}: {error.strerror}; expected a folder that can be written") from None
        results = {"about": about(options), "cases": {}, "ceilings": {}, "attention": {}, "sampling": {}, "not_run": []}
        jobs = (sampling_jobs if options.suite == "sampling" else training_jobs)(results, context)
        return 0 if run_jobs(jobs, results, context, options.out) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Mistake as mistake:
        print(f"bench: {mistake}", file=sys.stderr)
        sys.exit(2)
    except (Failed, KeyboardInterrupt) as error:
        print(f"bench: {error or 'interrupted'}", file=sys.stderr)
        sys.exit(1)

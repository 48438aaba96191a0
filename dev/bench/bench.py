#!/usr/bin/env python3
"""Compares ./train_gpt with PyTorch on this CPU: writes report.md and results.json to --out.

    python3 dev/bench/bench.py --ours build/cpu-bf16/train_gpt --ours build/cpu-fp32/train_gpt    # make bench

The contestants run one after another, in two rounds. Each run is a separate process with a time limit. The report names
each run that fails; the others continue. It is updated after each run. dev/gpu/run.py measures a GPU with the functions
of this file.
"""
import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_report import report
from contestants import HERE, Case, Failed, Ours, PyTorch, fail, run, write_random_shard

ROOT = os.path.join(HERE, "..", "..")

GPT2 = {"model": "gpt2"}
TINY = {"heads": 2, "channels": 64, "context": 64, "vocab": 512}


@dataclass
class Suite:
    cases: list
    tunings: list           # PyTorch's configurations
    limit_s: float          # time limit of a run
    min_s: float            # a run starts only if at least this much time is left
    tokens: int             # in each file of random tokens
    attention: dict         # sizes of the attention benchmark
    matmul: int = 8192      # size n of PyTorch's n x n matmul
    copy_bytes: int = 1 << 30


SUITES = {
    "cpu": Suite(
        [Case("124M-T64", GPT2, 64, 256, 4, timed=5, goal_ms=1100),
         Case("124M-T1024", GPT2, 1024, 1024, 1, timed=3, goal_ms=6000),
         # nanoGPT's recipe for a CPU, on bytes
         Case("shakespeare", {"layers": 4, "heads": 4, "channels": 128, "context": 64, "vocab": 256}, 64, 768, 12,
              timed=40, goal_ms=20)],
        [*PyTorch.TUNINGS], limit_s=3600, min_s=0, tokens=1 << 17, attention={}),
    "gpu": Suite(
        [Case("gpt2", GPT2, 1024, 524288, timed=5), Case("gpt2-xl", {"model": "gpt2-xl"}, 1024, 131072, timed=4)],
        ["fused, BF16, compiled"], limit_s=120, min_s=20, tokens=1 << 20,
        attention={"channels": 2048, "tokens": 16384, "lengths": [1024, 2048, 8192], "head_sizes": [64, 128]}),
    # Runs every part; its times mean nothing.
    "dry": Suite(
        [Case("tiny-2", {"layers": 2, **TINY}, 64, 512, 4), Case("tiny-4", {"layers": 4, **TINY}, 64, 512, 4)],
        ["fused, BF16"], limit_s=600, min_s=2, tokens=1 << 14, matmul=128, copy_bytes=1 << 20,
        attention={"channels": 64, "tokens": 512, "lengths": [128, 256], "head_sizes": [16, 32]})}


class Context:
    """State shared by the contestants: files of random tokens, the plan of each case, the python that has PyTorch."""

    def __init__(self, suite, folder, python, threads=None):
        """suite: the name in SUITES. threads: of PyTorch on a CPU."""
        self.suite, self.folder, self.python, self.threads = SUITES[suite], folder, python, threads
        self.device, self.traced = "cuda" if suite == "gpu" else "cpu", suite != "cpu"
        self.peak = "measured" if self.device == "cpu" else "table"
        self.plans, self.reference = {}, None

    def tokens(self, vocab):
        path = os.path.join(self.folder, f"tokens_{vocab}.bin")
        if not os.path.exists(path):
            write_random_shard(path, vocab, self.suite.tokens + 1)
        return path

    def plan(self, case):
        """Returns the plan of our first program: sizes, and the initial micro-batch of all contestants."""
        if case.name not in self.plans:
            plan = self.reference.plan(case, case.micro_batch or "auto")
            micro_batch, sequences = min(plan["micro_batch"], 64), case.tokens // case.seq_len
            while sequences % micro_batch:
                micro_batch -= 1
            self.plans[case.name] = {**plan, "micro_batch": micro_batch}
        return self.plans[case.name]

    def torch(self, what, limit, *arguments):
        """Runs torch_side.py. Raises Failed if it fails."""
        threads = ["--threads", self.threads] if self.threads else []
        return run([self.python, "-B", os.path.join(HERE, "torch_side.py"), what, "--device", self.device,
                    *threads, *arguments], limit).check()


# ---- Measurements. Each function adds to `results`.

def measure_step(results, context, case, contestant, round_, limit):
    """Adds the steps of one run of a contestant to those of its earlier runs, unless one of them failed."""
    runs = results["cases"].setdefault(case.name, {**asdict(case), "runs": {}})["runs"]
    if round_ > 0 and contestant.name not in runs:
        return
    found, before = contestant.measure(case, limit), runs.get(contestant.name, {"ms": [], "peak_bytes": 0})
    peak = max(found["peak_bytes"] or 0, before["peak_bytes"])
    runs[contestant.name] = {"kind": contestant.kind, **found, "ms": before["ms"] + found["ms"], "peak_bytes": peak}


def attention_points(sizes):
    return [{"B": sizes["tokens"] // T, "T": T, "NH": sizes["channels"] // HS, "HS": HS}
            for HS in sizes["head_sizes"] for T in sizes["lengths"]]


def add_attention(results, point, **found):
    results["attention"].setdefault(f"{point['HS']}/{point['T']}", {}).update(point, **found)


def measure_ceilings(results, context, limit):
    """Measures PyTorch's copy, large matmul, and attention with each backend."""
    suite = context.suite
    done = context.torch("ceilings", limit, "--precision", context.reference.precision, "--matmul", suite.matmul,
                         "--copy-bytes", suite.copy_bytes, "--attention", json.dumps(attention_points(suite.attention)))
    found = json.loads(done.output.splitlines()[-1])
    for point in found.pop("attention"):
        add_attention(results, point)
    results["ceilings"].update(found)


def measure_our_attention(results, context, limit, point):
    """Measures our attention from the trace of a model with one layer and one micro-batch."""
    options = {"layers": 1, "heads": point["NH"], "channels": point["NH"] * point["HS"], "context": point["T"],
               "seq_len": point["T"], "micro_batch": point["B"], "vocab": 512, "matmul_tuning": "off"}
    trace = context.reference.train(options, point["B"] * point["T"], 3, limit)["trace"]
    add_attention(results, point, ours={
        f"{pass_}_s": sum(kernel["ms"] for kernel in trace["kernels"] if kernel["pass"] == pass_
                          and kernel["name"].startswith("attention")) / 1000 for pass_ in ("forward", "backward")})


# ---- Order of the runs

def make_jobs(results, context, options):
    """Returns {title: function of a time limit} in the order of execution: two rounds of all contestants."""
    contestants = [Ours(context, program) for program in options.ours]
    context.reference = contestants[0]
    if context.python:
        contestants += [PyTorch(context, tuning) for tuning in context.suite.tunings]
    return {f"{case.name}: {contestant.name}, run {round_ + 1}":
            lambda limit, a=case, b=contestant, c=round_: measure_step(results, context, a, b, c, limit)
            for round_ in range(2) for case in context.suite.cases for contestant in contestants}


def attempt(results, context, title, function, left):
    """Calls a function of a time limit if enough of the `left` seconds remain. Returns the reason if it did not
    succeed, which it also adds to the report, or ""."""
    try:
        if left < context.suite.min_s:
            raise Failed(f"{max(0, left):.0f} s were left")
        function(min(context.suite.limit_s, left))
        return ""
    except (Failed, OSError, ValueError, LookupError) as failure:
        reason = str(failure) if isinstance(failure, (Failed, OSError)) else repr(failure)
        results["not_run"].append([title, reason])
        return reason


def save(results, folder):
    """Writes results.json and report.md, replacing each atomically. Returns the report."""
    texts = {"results.json": json.dumps(results, indent=1), "report.md": report(results)}
    for name, text in texts.items():
        new = Path(folder, name + ".new")
        new.write_text(text, encoding="utf-8")
        new.replace(Path(folder, name))
    return texts["report.md"]


def run_jobs(jobs, results, context, options):
    """Runs the jobs while there is time. Ctrl-C and SIGTERM end the jobs; the report is still written. Returns whether
    all runs of our programs succeeded."""
    begin, succeeded = time.monotonic(), True
    try:
        for title, function in jobs.items():
            print(f"bench: {time.monotonic() - begin:5.0f} s  {title}", file=sys.stderr, flush=True)
            reason = attempt(results, context, title, function, 60 * options.minutes - (time.monotonic() - begin))
            if reason:
                print(f"bench: {title}: {reason}", file=sys.stderr, flush=True)
                succeeded = succeeded and "ours" not in title
            results["about"]["seconds"] = time.monotonic() - begin
            save(results, options.out)
    except KeyboardInterrupt:
        results["not_run"].append(["the rest", "interrupted"])
        succeeded = False
    print(save(results, options.out), end="")
    return succeeded


# ---- The command line

def output_of(*command):
    """Returns a command's output; "" if it does not exist, fails or takes more than a minute."""
    try:
        return run(command, 60).check().output.strip()
    except (OSError, Failed):
        return ""


def about(options):
    commit = output_of("git", "-C", ROOT, "describe", "--always", "--dirty")
    return {"suite": "cpu", "dry": False, "date": time.strftime("%Y-%m-%d %H:%M"), "threads": options.threads,
            "load before": f"{os.getloadavg()[0]:.1f}",
            "PyTorch": options.torch_version or f"not found in {', '.join(options.pythons)} (--python selects another)",
            "commit": commit or "unknown: no git repository"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", action="append",
                        help="a CPU build of train_gpt; may be repeated")
    parser.add_argument("--out", default="runs/bench-cpu", metavar="FOLDER", help="folder of the report "
                        "(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="limit for all runs together (default: a day)")
    parser.add_argument("--cases", metavar="NAMES", help="only these cases, such as 124M-T64,shakespeare")
    parser.add_argument("--torch", choices=["yes", "no"], default="yes", help="measure PyTorch if it is installed")
    parser.add_argument("--python", metavar="PROGRAM", help="the python that has PyTorch (default: this one, then "
                        "/usr/bin/python3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="CPU threads of each contestant (default: all CPUs)")
    o = parser.parse_args()
    suite = SUITES["cpu"]
    known = [case.name for case in suite.cases]
    names = o.cases.split(",") if o.cases else known
    for valid, found, expected in (
            (set(names) <= set(known), f"--cases {o.cases}", f"some of {', '.join(known)}"),
            (0 < o.minutes <= 24 * 60, f"--minutes {o.minutes:g}", f"more than 0, at most {24 * 60}"),
            (o.threads >= 1, f"--threads {o.threads}", "at least 1"),
            *((os.access(path, os.X_OK) and not os.path.isdir(path), f"--ours {path}", "a program; run make")
              for path in o.ours)):
        if not valid:
            fail(f"{found}: expected {expected}")
    suite.cases = [case for case in suite.cases if case.name in names]
    return o


def main():
    options = parse_arguments()
    options.pythons = [options.python] if options.python else [sys.executable, "/usr/bin/python3"]
    versions = {python: output_of(python, "-c", "import torch; print(torch.__version__)")
                for python in options.pythons * (options.torch == "yes")}
    python = next((python for python, version in versions.items() if version), None)
    options.torch_version = versions.get(python)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)    # all contestants use OpenMP
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpt_bench_") as folder:
        context = Context("cpu", folder, python, options.threads)
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            fail(f"--out {options.out}: {error.strerror}; expected a writable folder")
        results = {"about": about(options), "cases": {}, "ceilings": {}, "attention": {}, "not_run": []}
        succeeded = run_jobs(make_jobs(results, context, options), results, context, options)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    try:
        main()
    except (Failed, KeyboardInterrupt) as error:
        fail(str(error) or "interrupted", 1)

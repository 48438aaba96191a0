#!/usr/bin/env python3
"""Compares ./train_gpt with PyTorch on this CPU: prints a table, and writes it to report.md and all numbers to
results.json in --out. OMP_NUM_THREADS limits the threads of all programs.

    python3 dev/bench/bench.py --ours build/cpu-bf16/train_gpt --ours build/cpu-fp32/train_gpt    # make bench

The programs run one after another, in two rounds. Ctrl-C keeps the measurements of the runs that have ended.
dev/gpu/run.py measures a GPU, and llm.c, with the functions of this file.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from bench_report import report, speed_table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "scripts"))
from runs import read_run
from tables import text_table
from tokens import fail, write_random_shard
from trainer import BARE, flags, printed_bytes, trace_steps

TRACED_STEPS = 3        # --trace records the first three steps, which are not timed
MIN_S = 20              # a run starts only if at least this much time is left
SECONDS = 40            # of a run of make bench on 2 cores, a rough mean


# ==== Running ====

class Failed(Exception):
    """A program failed; the message is the reason."""


class OutOfMemory(Failed):
    """A program ran out of memory; a smaller micro-batch may fit."""


@dataclass
class Done:
    command: list
    output: str
    errors: str
    code: int
    seconds: float
    timed_out: bool     # killed at its limit

    def check(self):
        """Returns itself if the program succeeded; raises Failed otherwise."""
        name = " ".join(os.path.basename(word) for word in self.command[:3])
        # Without enough memory llm.c may use cudaMallocManaged: its state is then on the host, which is slow.
        if re.search("out of (device )?memory|cudaMallocManaged", self.errors + self.output, re.IGNORECASE):
            raise OutOfMemory(f"{name}: out of memory")
        if self.timed_out:
            raise Failed(f"{name}: time limit exceeded, killed after {self.seconds:.0f} s")
        if self.code:
            last = (self.errors.strip() or self.output.strip() or "it printed nothing").splitlines()[-1]
            raise Failed(f"{name}: exit code {self.code}: {last}")
        return self


kept = None     # a folder: run() also writes the output of each command there


def run(command, limit, cwd=None):
    """Runs a command and its child processes for at most `limit` seconds. Returns a Done with the output until then.
    The output goes to files, because a pipe stays open until all child processes end."""
    command, begin, timed_out = [str(word) for word in command], time.monotonic(), False
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd,
                                   start_new_session=True)
        try:
            process.wait(max(1, limit))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:      # at the limit, or interrupted
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds, texts = time.monotonic() - begin, [file.seek(0) or file.read() for file in (out, err)]
    if kept:
        name = "-".join(os.path.basename(word) for word in command[:2])
        Path(kept, f"{len(os.listdir(kept)):03d}-{name}.txt").write_text("\n".join([" ".join(command), *texts]))
    return Done(command, *texts, process.returncode, seconds, timed_out)


def output_of(*command):
    """Returns a command's output; "" if it does not exist, fails or takes more than a minute."""
    try:
        return run(command, 60).check().output.strip()
    except (OSError, Failed):
        return ""


def read_trace(trace):
    """Returns the time and launches by pass and kernel of a trace's second step, the first without set-up. A kernel's
    time is between the events before and after it: if the device waits for the CPU, part of the wait is included."""
    steps = trace_steps(trace)
    if len(steps) < 2:
        raise Failed(f"--trace: found {len(steps)} steps, expected {TRACED_STEPS}")
    by_name = defaultdict(lambda: {"ms": 0.0, "launches": 0})
    for kernel in steps[1]:
        entry = by_name[kernel["args"]["pass"], kernel["name"]]
        entry["ms"] += kernel["dur"] / 1000
        entry["launches"] += 1
    return {"busy_ms": sum(entry["ms"] for entry in by_name.values()),
            "matmuls_us": [kernel["dur"] for kernel in steps[1] if kernel["name"] == "matmul"],
            "kernels": [{"pass": pass_, "name": name, **entry} for (pass_, name), entry in by_name.items()]}


# ==== Contestants of a training step ====

@dataclass
class Case:
    """A model and its step size. micro_batch 0: the largest that fits and divides the step, at most 64."""
    name: str
    model: dict                 # options of ./train_gpt
    seq_len: int
    tokens: int                 # per step
    micro_batch: int = 0
    timed: int = 3              # steps of a run that are timed
    goals: dict = field(default_factory=dict)   # {precision: goal for ./train_gpt in ms per step}


class Contestant:
    """measure() returns the times of one run's steps in ms, without the skipped first steps, and other figures."""
    skipped = 1
    fraction = 1        # of the micro-batch that fits ./train_gpt, tried first

    def __init__(self, context):
        self.context, self.fitting = context, {}     # {case: micro-batch}

    def measure(self, case, limit):
        """Runs it; each time that it runs out of memory, halves the micro-batch and doubles the accumulation steps."""
        begin = time.monotonic()
        first = max(1, self.context.plan(case)["micro_batch"] // self.fraction)
        micro_batch = self.fitting.setdefault(case.name, first)
        try:
            result = self.run_steps(case, micro_batch, limit)
        except OutOfMemory:
            if micro_batch == 1:
                raise
            self.fitting[case.name] = micro_batch // 2
            return self.measure(case, limit - (time.monotonic() - begin))
        if len(result["ms"]) <= self.skipped:
            raise Failed(f"{self.name}: {len(result['ms'])} steps, expected more than {self.skipped}")
        return {**result, "ms": result["ms"][self.skipped:], "micro_batch": micro_batch}


class Ours(Contestant):
    kind = "ours"

    def __init__(self, context, program):
        super().__init__(context)
        self.program, self.skipped = os.path.abspath(program), TRACED_STEPS if context.traced else 1
        self.precision = self.plan({})["precision"]
        self.name = f"ours, {self.precision.upper()}"

    def plan(self, options):
        return json.loads(run([self.program, "plan", *flags(options), "--json"], 60).check().output)

    def train(self, options, steps, limit):
        """Trains on random tokens. Returns times, log, peak memory and, if the context is traced, the trace."""
        with tempfile.TemporaryDirectory(dir=self.context.folder) as out:
            options = {**BARE, "data": self.context.tokens(options.get("vocab", 50257)), "lr": 1e-6, **options,
                       "steps": steps, "out": out + "/run",
                       **({"trace": out + "/trace.json"} if self.context.traced else {})}
            done = run([self.program, "train", *flags(options)], limit).check()
            log = read_run(options["out"])
            peaks = [printed_bytes(done.output, words) for words in ("in use on the device", "resident at most")]
            result = {"ms": [*log.series("ms").values()], "record": log.record, "peak_bytes": peaks[0] or peaks[1]}
            if self.context.traced:
                result["trace"] = read_trace(json.loads(Path(options["trace"]).read_text()))
            return result

    def run_steps(self, case, micro_batch, limit):
        options = {**case.model, "seq_len": case.seq_len, "total_batch": case.tokens, "micro_batch": micro_batch}
        plan = self.plan(options)
        return {**self.train(options, self.skipped + case.timed, limit), "plan": plan,
                "planned_bytes": plan["bytes"]["total"]}


class PyTorch(Contestant):
    kind = "PyTorch"
    # The configurations that a user may choose.
    TUNINGS = {"untuned": (), "fused AdamW": ("fused",), "fused, compiled": ("fused", "compile"),
               "fused, BF16": ("fused", "bf16"), "fused, BF16, compiled": ("fused", "bf16", "compile")}

    def __init__(self, context, tuning):
        super().__init__(context)
        self.name, self.options = f"PyTorch {tuning}", self.TUNINGS[tuning]
        self.skipped = 2 if "compile" in self.options else 1
        # On a GPU PyTorch stores logits in FP32, and each failed attempt costs a compilation.
        self.fraction = 2 if context.device == "cuda" else 1

    def run_steps(self, case, micro_batch, limit):
        model = self.context.plan(case)["model"]
        return self.context.torch(
            "train", limit, model={name: model[name] for name in ("layers", "heads", "channels", "context", "vocab")},
            data=self.context.tokens(model["vocab"]), seq_len=case.seq_len, micro_batch=micro_batch,
            accumulation=case.tokens // (micro_batch * case.seq_len), steps=self.skipped + case.timed,
            **{option: option in self.options for option in ("fused", "bf16", "compile")})


class LlmC(Contestant):
    """llm.c's train_gpt2cu, already built in its folder, with random weights ('-e d12')."""
    name = kind = "llm.c"

    def __init__(self, context, folder):
        super().__init__(context)
        self.program = os.path.join(os.path.abspath(folder), "train_gpt2cu")

    def run_steps(self, case, micro_batch, limit):
        plan, data = self.context.plan(case), self.context.tokens(50257)
        # Evaluation (-v, -m): one batch at the start and one at the end; no samples, HellaSwag or recomputation.
        options = {"i": data, "j": data, "e": f"d{plan['model']['layers']}", "b": micro_batch, "t": case.seq_len,
                   "d": case.tokens, "x": 1 + case.timed, "c": 0.1, "v": 1000000, "m": 1, "s": 0, "h": 0, "r": 0}
        words = [word for name, value in options.items() for word in ("-" + name, value)]
        output = run([self.program, *words], limit, self.context.folder).check().output
        memory = re.search(r"device memory usage: (\d+) MiB", output)
        steps = re.findall(r"^step\s+\d+/\d+ \| loss\s+\S+ \(\S+z\)\|.* (\S+) ms \|", output, re.MULTILINE)
        return {"ms": [float(ms) for ms in steps], "peak_bytes": int(memory[1]) * 2**20 if memory else None}


# ==== Suites ====

GPT2 = {"model": "gpt2"}
NANOGPT = {"layers": 4, "heads": 4, "channels": 128, "context": 64, "vocab": 256}      # its recipe for a CPU, on bytes
TINY = {"heads": 2, "channels": 64, "context": 64, "vocab": 512}


def attention_sizes(tokens, channels, lengths, head_sizes):
    return [{"B": tokens // T, "T": T, "NH": channels // HS, "HS": HS} for HS in head_sizes for T in lengths]


# tunings: PyTorch's; limit_s: the time limit of a run; attention: sizes of the attention benchmark
SUITES = {
    "cpu": SimpleNamespace(tunings=[*PyTorch.TUNINGS], limit_s=3600, attention=[], cases=[
        Case("124M-T64", GPT2, 64, 256, 4, timed=5, goals={"bf16": "≤ 1,100"}),
        Case("124M-T1024", GPT2, 1024, 1024, 1, goals={"bf16": "≤ 6,000", "fp32": "1.25 × the floor"}),
        Case("shakespeare", NANOGPT, 64, 768, 12, timed=40, goals={"fp32": "≤ 20"})]),
    "gpu": SimpleNamespace(
        tunings=["fused, BF16, compiled"], limit_s=120,
        attention=attention_sizes(16384, 2048, (1024, 2048, 8192), (64, 128)), cases=[
            Case("gpt2", GPT2, 1024, 524288, timed=5), Case("gpt2-xl", {"model": "gpt2-xl"}, 1024, 131072, timed=4)]),
    # Runs every part; its times mean nothing.
    "dry": SimpleNamespace(
        tunings=["fused, BF16"], limit_s=600, attention=attention_sizes(512, 64, (128, 256), (16, 32)), cases=[
            Case("tiny-2", {"layers": 2, **TINY}, 64, 512, 4), Case("tiny-4", {"layers": 4, **TINY}, 64, 512, 4)])}


class Context:
    """State shared by the contestants: files of random tokens, the plan of each case, the python that has PyTorch."""

    def __init__(self, suite, folder, python):
        """suite: the name in SUITES."""
        self.suite, self.folder, self.python = SUITES[suite], folder, python
        self.device, self.traced = "cuda" if suite == "gpu" else "cpu", suite != "cpu"
        self.plans, self.reference = {}, None

    def tokens(self, vocab):
        path = os.path.join(self.folder, f"tokens_{vocab}.bin")
        if not os.path.exists(path):
            write_random_shard(path, vocab, 1 << 20)
        return path

    def plan(self, case):
        """Returns the plan of our first program: sizes, and the initial micro-batch of all contestants."""
        if case.name not in self.plans:
            plan = self.reference.plan({**case.model, "seq_len": case.seq_len, "total_batch": case.tokens,
                                        "micro_batch": case.micro_batch or "auto"})
            sequences = case.tokens // case.seq_len
            plan["micro_batch"] = next(n for n in range(min(plan["micro_batch"], 64), 0, -1) if sequences % n == 0)
            self.plans[case.name] = plan
        return self.plans[case.name]

    def torch(self, what, limit, **options):
        """Runs torch_side.py. Returns its result; raises Failed if it fails."""
        command = [self.python, "-B", HERE / "torch_side.py", what, json.dumps({"device": self.device, **options})]
        return json.loads(run(command, limit).check().output.splitlines()[-1])


# ==== Measurements: each function adds to `results` ====

def measure_step(results, case, contestant, limit):
    """Adds the steps of one run of a contestant to those of its earlier runs."""
    runs = results["cases"].setdefault(case.name, {**asdict(case), "runs": {}})["runs"]
    found, before = contestant.measure(case, limit), runs.get(contestant.name, {"ms": [], "peak_bytes": 0})
    peak = max(found["peak_bytes"] or 0, before["peak_bytes"])
    runs[contestant.name] = {"kind": contestant.kind, **found, "ms": before["ms"] + found["ms"], "peak_bytes": peak}


def measure_ceilings(results, context, limit):
    """Measures PyTorch's copy and, on a GPU, large matmul and attention with each backend."""
    found = context.torch("ceilings", limit, attention=context.suite.attention)
    for size, backends in zip(context.suite.attention, found.pop("attention")):
        results["attention"].setdefault(f"{size['HS']}/{size['T']}", {}).update(size, torch=backends)
    results["ceilings"].update(found)


def measure_our_attention(results, context, limit, size):
    """Measures our attention from the trace of a model with one layer and one micro-batch."""
    trace = context.reference.train(
        {"layers": 1, "heads": size["NH"], "channels": size["NH"] * size["HS"], "context": size["T"], "vocab": 512,
         "seq_len": size["T"], "micro_batch": size["B"], "total_batch": size["B"] * size["T"], "matmul_tuning": "off"},
        3, limit)["trace"]
    ours = {"forward_s": 0, "backward_s": 0}
    for kernel in trace["kernels"]:
        if kernel["name"].startswith("attention"):
            ours[kernel["pass"] + "_s"] += kernel["ms"] / 1000
    results["attention"].setdefault(f"{size['HS']}/{size['T']}", {}).update(size, ours=ours)


def attempt(results, context, title, function, left):
    """Calls a function of a time limit if enough of the `left` seconds remain. Returns the reason if it did not
    succeed, which it also adds to the report, or ""."""
    try:
        if left < MIN_S:
            raise Failed(f"{max(0, left):.0f} s were left")
        function(min(context.suite.limit_s, left))
        return ""
    except (Failed, OSError, ValueError, LookupError) as failure:
        reason = str(failure) if isinstance(failure, (Failed, OSError)) else repr(failure)
        results["not_run"].append([title, reason])
        return reason


# ==== make bench ====

def make_jobs(results, context, programs):
    """Returns [(title, function of a time limit)] in the order of execution: two rounds of all contestants. A case runs
    with the precisions that its goals name, and PyTorch in BF16 only if one of our programs does not run in FP32."""
    ours = [Ours(context, program) for program in programs]
    context.reference = ours[0]
    peers = [PyTorch(context, tuning) for tuning in context.suite.tunings if context.python]
    jobs = [("a copy", lambda limit: measure_ceilings(results, context, limit))] if peers else []
    for case in context.suite.cases * 2:
        chosen = [each for each in ours if each.precision in case.goals] or ours
        in_fp32 = all(each.precision == "fp32" for each in chosen)
        chosen = chosen + [each for each in peers if not (in_fp32 and "bf16" in each.options)]
        jobs += [(f"{case.name}: {each.name}", lambda limit, case=case, each=each: measure_step(
            results, case, each, limit)) for each in chosen]
    return jobs


def run_jobs(jobs, results, context, out):
    """Runs the jobs, except those that have failed before; then prints the table."""
    begin = time.monotonic()
    print(f"bench: {len(jobs)} runs, about {len(jobs) * SECONDS / 60:.0f} min on 2 free CPU cores", flush=True)
    try:
        for number, (title, function) in enumerate(jobs, 1):
            print(f"bench: {time.monotonic() - begin:5.0f} s  run {number} of {len(jobs)}  {title}", flush=True)
            again = title in dict(results["not_run"])
            if not again and (reason := attempt(results, context, title, function, context.suite.limit_s)):
                print(f"bench: {reason}", flush=True)
    except KeyboardInterrupt:
        results["not_run"].append(["the rest", "interrupted"])
    results["about"]["seconds"] = time.monotonic() - begin
    Path(out, "results.json").write_text(json.dumps(results, indent=1))
    Path(out, "report.md").write_text(report(results), encoding="utf-8")
    print("\n".join(["", *text_table(*speed_table(results), 2), "", f"bench: written to {out}/report.md"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    cases = {case.name: case for case in SUITES["cpu"].cases}
    parser.add_argument("--ours", required=True, metavar="PROGRAM", action="append",
                        help="a CPU build of train_gpt; may be repeated")
    parser.add_argument("--out", default="runs/bench-cpu", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--cases", nargs="+", choices=cases, default=[*cases], help="default: all")
    parser.add_argument("--torch", metavar="PYTHON", help="the python that has PyTorch, or no: without PyTorch "
                        "(default: this one, then /usr/bin/python3)")
    o = parser.parse_args()
    os.makedirs(o.out, exist_ok=True)
    SUITES["cpu"].cases = [cases[name] for name in o.cases]
    pythons = {"no": [], None: [sys.executable, "/usr/bin/python3"]}.get(o.torch, [o.torch])
    versions = [(output_of(python, "-c", "import torch; print(torch.__version__)"), python) for python in pythons]
    version, python = next(filter(lambda found: found[0], versions), ("not installed", None))
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    results = {"about": {"suite": "cpu", "dry": False, "date": time.strftime("%Y-%m-%d %H:%M"), "threads": threads,
                         "load before": os.getloadavg()[0], "PyTorch": version,
                         "commit": output_of("git", "-C", HERE, "describe", "--always", "--dirty") or "unknown"},
               "cases": {}, "ceilings": {}, "attention": {}, "not_run": []}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpt_bench_") as folder:
        context = Context("cpu", folder, python)
        run_jobs(make_jobs(results, context, o.ours), results, context, o.out)
    sys.exit(any("ours" in title or reason == "interrupted" for title, reason in results["not_run"]))


if __name__ == "__main__":
    try:
        main()
    except (Failed, OSError) as error:
        fail(error)

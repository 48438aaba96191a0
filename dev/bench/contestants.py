"""The programs that bench.py measures: ./train_gpt, PyTorch, llm.c. Each run is a separate process with a time limit.
The functions that parse output are separate from those that run programs, so that tests can call them."""
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, ".."), os.path.join(HERE, "..", "..", "scripts")]
from runs import read_run
from tokens import fail, write_random_shard    # noqa: F401
from trainer import BARE, flags, printed_bytes, trace_steps

TRACED_STEPS = 3        # --trace records the first three steps, which are not timed


class Failed(Exception):
    """A program failed; the message is the reason."""


class OutOfMemory(Failed):
    """A program ran out of memory; a smaller micro-batch may fit."""


# ==== Running ================================================================

@dataclass
class Done:
    command: list
    output: str
    errors: str
    code: int
    seconds: float
    timed_out: bool     # killed at its limit
    resident_bytes: int

    def check(self):
        """Returns itself if the program succeeded; raises Failed otherwise."""
        if re.search("out of (device )?memory", self.errors + self.output, re.IGNORECASE):
            raise OutOfMemory(f"{self.shown()}: out of memory")
        if self.timed_out:
            raise Failed(f"{self.shown()}: time limit exceeded, killed after {self.seconds:.0f} s")
        if self.code:
            last = (self.errors.strip() or self.output.strip() or "it printed nothing").splitlines()[-1]
            raise Failed(f"{self.shown()}: exit code {self.code}: {last}")
        return self

    def shown(self):
        return " ".join(os.path.basename(word) for word in self.command[:3])


kept = None     # a folder: run() also writes the output of each command there


def run(command, limit, cwd=None):
    """Runs a command and its child processes for at most `limit` seconds. Returns a Done with the output until then.
    The output goes to files, because a pipe stays open until all child processes end."""
    command, begin, timed_out = [str(word) for word in command], time.monotonic(), False
    with tempfile.TemporaryFile("w+", errors="replace") as output, \
            tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=cwd,
                                   start_new_session=True)
        pid = 0
        try:    # wait4() returns this child's memory; getrusage() the maximum of all children
            while not pid:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not pid and not timed_out and time.monotonic() - begin > max(1, limit):
                    timed_out = True
                    os.killpg(process.pid, signal.SIGKILL)
                if not pid:
                    time.sleep(0.01)
        finally:
            if not pid:     # interrupted
                os.killpg(process.pid, signal.SIGKILL)
                os.wait4(process.pid, 0)
            process.returncode = 0      # wait4() has reaped it
        output.seek(0)
        errors.seek(0)
        done = Done(command, output.read(), errors.read(), os.waitstatus_to_exitcode(status),
                    time.monotonic() - begin, timed_out, usage.ru_maxrss * 1024)
        if kept:
            text = f"{' '.join(command)}\nexit code {done.code}\n{done.output}{done.errors}"
            Path(kept, f"{len(os.listdir(kept)):03d}-{done.shown().replace(' ', '-')}.txt").write_text(text)
        return done


# ==== Parsing ================================================================

def read_trace(trace):
    """Returns figures of a trace's second step: duration and kernel time in ms, median gap between kernels in us, and
    time and launches by pass and kernel. The second step has no set-up, and ends where the third begins. A kernel's
    time is between the events before and after it: if the device waits for the CPU, part of the wait is included."""
    steps = trace_steps(trace)
    if len(steps) < 2:
        raise Failed(f"--trace: found {len(steps)} steps, expected {TRACED_STEPS}")
    kernels, begin = steps[1], steps[1][0]["ts"]
    end = steps[2][0]["ts"] if len(steps) > 2 else kernels[-1]["ts"] + kernels[-1]["dur"]
    by_name = defaultdict(lambda: {"ms": 0.0, "launches": 0})
    for kernel in kernels:
        entry = by_name[kernel["args"]["pass"], kernel["name"]]
        entry["ms"] += kernel["dur"] / 1000
        entry["launches"] += 1
    gaps = [max(0.0, after["ts"] - kernel["ts"] - kernel["dur"]) for kernel, after in zip(kernels, kernels[1:])]
    return {"step_ms": (end - begin) / 1000, "busy_ms": sum(entry["ms"] for entry in by_name.values()),
            "gap_us": statistics.median(gaps), "launches": len(kernels),
            "matmuls_us": [kernel["dur"] for kernel in kernels if kernel["name"] == "matmul"],
            "kernels": [{"pass": pass_, "name": name, **entry} for (pass_, name), entry in by_name.items()]}


LLMC_STEP = re.compile(r"^step\s+\d+/\d+ \| loss\s+\S+ \(\S+z\)\|.* (\S+) ms \|", re.MULTILINE)
LLMC_MEMORY = re.compile(r"device memory usage: (\d+) MiB")


def read_llmc(text):
    """Returns milliseconds of each step and bytes in use, from the output of llm.c's train_gpt2cu."""
    memory = LLMC_MEMORY.search(text)
    return {"ms": [float(ms) for ms in LLMC_STEP.findall(text)],
            "peak_bytes": int(memory[1]) * 2**20 if memory else None}


# ==== Contestants of a training step =========================================

@dataclass
class Case:
    """A model and its step size. micro_batch 0: the largest that fits and divides the step, at most 64."""
    name: str
    model: dict                 # options of ./train_gpt
    seq_len: int
    tokens: int                 # per step
    micro_batch: int = 0
    timed: int = 3              # steps of a run that are timed
    goal_ms: float = 0          # goal for ./train_gpt


class Contestant:
    """measure() returns the times of one run's steps in ms, without the skipped first steps, and other figures."""

    def __init__(self, context):
        self.context, self.fitting = context, {}     # {case: micro-batch}

    def measure(self, case, limit):
        """Runs it; each time that it runs out of memory, halves the micro-batch and doubles the accumulation steps."""
        deadline = time.monotonic() + limit
        self.fitting.setdefault(case.name, self.first_micro_batch(case))
        while True:
            micro_batch = self.fitting[case.name]
            try:
                result = self.run_steps(case, micro_batch, deadline - time.monotonic())
                break
            except OutOfMemory:
                if micro_batch == 1:
                    raise
                self.fitting[case.name] = micro_batch // 2
        if len(result["ms"]) <= self.skipped:
            raise Failed(f"{self.name}: {len(result['ms'])} steps, expected more than {self.skipped}")
        return {**result, "ms": result["ms"][self.skipped:], "micro_batch": micro_batch}

    def first_micro_batch(self, case):
        return self.context.plan(case)["micro_batch"]


class Ours(Contestant):
    kind = "ours"

    def __init__(self, context, program):
        super().__init__(context)
        self.program, self.skipped = os.path.abspath(program), TRACED_STEPS if context.traced else 1
        self.precision = json.loads(run([self.program, "plan", "--json"], 60).check().output)["precision"]
        self.name = f"ours, {self.precision.upper()}"

    def plan(self, case, micro_batch):
        options = {**case.model, "seq_len": case.seq_len, "total_batch": case.tokens, "micro_batch": micro_batch}
        return json.loads(run([self.program, "plan", *flags(options), "--json"], 60).check().output)

    def train(self, options, tokens, steps, limit):
        """Trains on random tokens. Returns times, log, peak memory and, if the context is traced, the trace."""
        with tempfile.TemporaryDirectory(dir=self.context.folder) as out:
            trace = {"trace": os.path.join(out, "trace.json")} if self.context.traced else {}
            options = {**BARE, "data": self.context.tokens(options.get("vocab", 50257)), "lr": 1e-6, **options,
                       "total_batch": tokens, "steps": steps, "peak": self.context.peak, **trace, "out": out + "/run"}
            done = run([self.program, "train", *flags(options)], limit).check()
            log = read_run(os.path.join(out, "run"))
            result = {"ms": [*log.series("ms").values()], "record": log.record,
                      "peak_bytes": printed_bytes(done.output, "in use on the device") or done.resident_bytes}
            if trace:
                result["trace"] = read_trace(json.loads(Path(trace["trace"]).read_text()))
            return result

    def run_steps(self, case, micro_batch, limit):
        plan = self.plan(case, micro_batch)
        options = {**case.model, "seq_len": case.seq_len, "micro_batch": micro_batch}
        result = self.train(options, case.tokens, self.skipped + case.timed, limit)
        return {**result, "planned_bytes": plan["bytes"]["total"], "plan": {
            key: plan[key] for key in ("bytes", "flops_per_token", "precision")}}


class PyTorch(Contestant):
    kind = "PyTorch"
    # Configurations that a user may choose, as options of torch_side.py.
    TUNINGS = {"untuned": [], "fused AdamW": ["--fused"], "fused, compiled": ["--fused", "--compile"],
               "fused, BF16": ["--fused", "--bf16"], "fused, BF16, compiled": ["--fused", "--bf16", "--compile"]}

    def __init__(self, context, tuning):
        super().__init__(context)
        self.name, self.options = f"PyTorch {tuning}", self.TUNINGS[tuning]
        self.skipped = 2 if "--compile" in self.options else 1

    def first_micro_batch(self, case):
        """Returns half of ours on a GPU: PyTorch stores logits in FP32, and each failed attempt costs a compilation."""
        ours = super().first_micro_batch(case)
        return max(1, ours // 2) if self.context.device == "cuda" else ours

    def run_steps(self, case, micro_batch, limit):
        sizes = self.context.plan(case)["model"]
        options = {**{name: sizes[name] for name in ("layers", "heads", "channels", "context", "vocab")},
                   "seq_len": case.seq_len, "micro_batch": micro_batch, "steps": self.skipped + case.timed,
                   "accumulation": case.tokens // (micro_batch * case.seq_len)}
        done = self.context.torch("train", limit, *flags(options), *self.options, "--data",
                                  self.context.tokens(sizes["vocab"]))
        result = json.loads(done.output.splitlines()[-1])
        return {"ms": result["ms"], "peak_bytes": result["peak_bytes"] or done.resident_bytes}


class LlmC(Contestant):
    """llm.c's train_gpt2cu, already built in its folder, with random weights ('-e d12')."""
    name = kind = "llm.c"
    skipped = 1

    def __init__(self, context, folder):
        super().__init__(context)
        self.program = os.path.join(os.path.abspath(folder), "train_gpt2cu")

    def run_steps(self, case, micro_batch, limit):
        if not os.access(self.program, os.X_OK):
            raise Failed(f"{self.program}: no such program; run 'make train_gpt2cu' in that folder")
        plan, data = self.context.plan(case), self.context.tokens(50257)
        # Evaluation (-v, -m): one batch at the start and one at the end; no samples, HellaSwag or recomputation.
        options = {"i": data, "j": data, "e": f"d{plan['model']['layers']}", "b": micro_batch, "t": case.seq_len,
                   "d": case.tokens, "x": 1 + case.timed, "c": 0.1, "v": 1000000, "m": 1, "s": 0, "h": 0, "r": 0}
        line_buffered = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
        done = run([*line_buffered, self.program, *(text for name, value in options.items()
                                                    for text in ("-" + name, value))], limit, self.context.folder)
        result = read_llmc(done.output)
        # Without enough memory it may use cudaMallocManaged: its state is then on the host, which is slow.
        if "cudaMallocManaged" in done.output:
            raise OutOfMemory(f"{done.shown()}: out of memory")
        if len(result["ms"]) <= self.skipped:
            done.check()
        return result

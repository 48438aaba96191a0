#!/usr/bin/env python3
"""Training steps on this CPU, side by side: ./train_gpt, PyTorch and llm.c, all in FP32.

    python3 dev/bench/cpu.py --ours ./train_gpt [--llmc FOLDER] [--torch yes|no|auto] [--json FILE]

The contestants take turns (ours, PyTorch, llm.c, ours, ...), so that whatever else the machine
does hits all of them. A figure is the median over the steps of all runs but each run's first. Our
peak memory is held against what ./train_gpt plan says. A peer that cannot be had is named, and
its figures are left out.
"""
import argparse
import array
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

sys.dont_write_bytecode = True
from common import Failed, Mistake, executable, find_torch, write_random_llmc_weights, write_shard

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = 2
LONG_RUN_S = 60             # a contestant whose run takes longer than this has no second one
PLAN_SLACK = 150e6          # bytes for the program itself, its libraries and stacks: not in the plan
TOKENS_IN_FILE = 1 << 17


@dataclass
class Configuration:
    name: str
    goal_ms: float
    layers: int
    heads: int
    channels: int
    context: int
    vocab: int
    micro_batch: int
    seq_len: int
    steps: dict             # how many in a run, for each contestant

    @property
    def tokens(self):
        return self.micro_batch * self.seq_len

    @property
    def options(self):
        """As command-line options, which ./train_gpt and torch_step.py call the same."""
        names = "layers", "heads", "channels", "context", "vocab", "micro_batch", "seq_len"
        return [text for name in names for text in ("--" + name.replace("_", "-"), str(getattr(self, name)))]


GPT2 = {"layers": 12, "heads": 12, "channels": 768, "context": 1024, "vocab": 50257}
CONFIGURATIONS = [
    Configuration("124M-T64", 1100, **GPT2, micro_batch=4, seq_len=64,
                  steps={"ours": 6, "PyTorch": 4, "llm.c": 3}),
    Configuration("124M-T1024", 6000, **GPT2, micro_batch=1, seq_len=1024,
                  steps={"ours": 3, "PyTorch": 3, "llm.c": 2}),
    # nanoGPT's recipe for a CPU, on bytes
    Configuration("shakespeare", 20, layers=4, heads=4, channels=128, context=64, vocab=256,
                  micro_batch=12, seq_len=64, steps={"ours": 200, "PyTorch": 60}),
]


def run(command, environment):
    """Runs a command to its end; returns what it printed, and its peak memory in bytes."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment)
        # The usual getrusage() knows only the largest of all children so far.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            last = (errors.read().splitlines() or output.read().splitlines() or ["it printed nothing"])[-1]
            raise Failed(f"exit code {process.returncode} from {' '.join(command)}: {last}")
        return output.read(), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- Inputs. The time a step takes does not depend on tokens and weights: random ones will do.

def write_tokens(path):
    write_shard(path, array.array("H", random.Random(1).choices(range(GPT2["vocab"]), k=TOKENS_IN_FILE)))


def write_text(path):
    with open(path, "w", encoding="ascii") as file:
        file.write("".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz \n", k=TOKENS_IN_FILE)))


# ---- Contestants: each gives the times of the steps of one run, in ms.

class Ours:
    name = "ours"

    def __init__(self, program, folder, environment):
        self.program, self.folder, self.environment = program, folder, environment
        self.peak_bytes = {}

    def step_times(self, configuration):
        data = os.path.join(self.folder, "tokens.bin" if configuration.vocab > 256 else "text.txt")
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            _, peak = run([self.program, "train", *self.memory_options(configuration),
                           "--data", data, "--out", out, "--total-batch", str(configuration.tokens),
                           "--steps", str(configuration.steps[self.name]),
                           "--eval-every", "0", "--sample-every", "0", "--checkpoint-every", "0"], self.environment)
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                entries = [json.loads(line) for line in log]
        precision = entries[0]["run"]["precision"]
        if precision != "fp32":
            raise Mistake(f"--ours {self.program}: computes in {precision}, expected fp32 (make DEVICE=cpu PRECISION=fp32)")
        self.peak_bytes[configuration.name] = max(peak, self.peak_bytes.get(configuration.name, 0))
        return [entry["ms"] for entry in entries if "ms" in entry]

    def planned_bytes(self, configuration):
        output, _ = run([self.program, "plan", *self.memory_options(configuration), "--json"], self.environment)
        return json.loads(output)["bytes"]["total"]

    @staticmethod
    def memory_options(configuration):
        return [*configuration.options, "--recompute", "none", "--grad-dtype", "fp32"]


class PyTorch:
    name = "PyTorch"

    def __init__(self, python, threads, environment):
        self.python, self.threads, self.environment = python, threads, environment

    def step_times(self, configuration):
        output, _ = run([self.python, "-B", os.path.join(HERE, "torch_step.py"), *configuration.options,
                         "--steps", str(configuration.steps[self.name]), "--threads", str(self.threads)],
                        self.environment)
        return json.loads(output)["ms"]


class LlmC:
    """llm.c's train_gpt2 runs what its source fixes: 41 steps, evaluations between them, and a
    batch, so that it takes one program for each configuration."""
    name = "llm.c"
    programs = {"124M-T64": "train_gpt2", "124M-T1024": "train_gpt2_T1024"}
    step = re.compile(r"step \d+: train loss \S+ \(took (\S+) ms\)")
    batches = re.compile(r"train dataset num_batches: (\d+)")

    def __init__(self, checkout, folder, environment):
        self.checkout, self.folder, self.environment = os.path.abspath(checkout), folder, environment
        data = os.path.join(folder, "dev/data/tinyshakespeare")
        os.makedirs(data)
        for split in "train", "val":
            write_tokens(os.path.join(data, f"tiny_shakespeare_{split}.bin"))
        write_random_llmc_weights(os.path.join(folder, "gpt2_124M.bin"), **GPT2, precision="fp32")

    def step_times(self, configuration):
        program = os.path.join(self.checkout, self.programs[configuration.name])
        if not os.access(program, os.X_OK):
            raise Failed(f"no program {program}")
        times = []
        # stdbuf: without it the lines would come through the pipe in one block, after all 41 steps.
        with subprocess.Popen(["stdbuf", "-oL", program], cwd=self.folder, env=self.environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for line in process.stdout:
                if match := self.step.match(line):
                    times.append(float(match[1]))
                # Its one trace of the batch that it was built for: how many of them its data makes.
                elif (match := self.batches.match(line)) and int(match[1]) != TOKENS_IN_FILE // configuration.tokens:
                    process.kill()
                    raise Failed(f"{program} takes {TOKENS_IN_FILE // int(match[1])} tokens a step, "
                                 f"expected {configuration.tokens}")
                if len(times) == configuration.steps[self.name]:
                    process.kill()
                    break
        if len(times) < configuration.steps[self.name]:
            raise Failed(f"{program} ended with exit code {process.returncode} after {len(times)} steps")
        return times


# ---- The comparison

def compare(configuration, contestants, remarks):
    """Each contestant's step times, of all its runs together."""
    times, slow = {}, set()
    for turn in range(ROUNDS):
        for contestant in contestants:
            if contestant.name not in configuration.steps or contestant.name in slow:
                continue
            print(f"{configuration.name}: {contestant.name} {turn + 1}/{ROUNDS} ...", file=sys.stderr)
            start = time.monotonic()
            try:
                times.setdefault(contestant.name, []).extend(contestant.step_times(configuration)[1:])
            except Failed as failure:
                if contestant.name == "ours":
                    raise
                remarks.append(f"{configuration.name}: no figure for {contestant.name}: {failure}")
                del times[contestant.name]
            if contestant.name not in times or time.monotonic() - start > LONG_RUN_S:
                slow.add(contestant.name)
    return times


def print_table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def report(results, remarks):
    rows = [["configuration", "ours ms", "goal ms", "PyTorch ms", "ratio", "llm.c ms", "ratio",
             "tokens/s", "peak memory", "planned"]]
    for result in results:
        ours = result["ms"]["ours"]
        row = [result["name"], f"{ours:,.1f}", f"{result['goal_ms']:,} {'met' if ours <= result['goal_ms'] else 'MISSED'}"]
        for peer in "PyTorch", "llm.c":
            ms = result["ms"].get(peer)
            row += [f"{ms:,.1f}", f"{ms / ours:.2f}x"] if ms else ["-", "-"]
        row += [f"{result['tokens_per_s']:,.0f}", f"{result['peak_bytes'] / 1e6:,.0f} MB",
                f"{result['planned_bytes'] / 1e6:,.0f} MB"]
        rows.append(row)
        excess = result["peak_bytes"] - result["planned_bytes"] - PLAN_SLACK
        if excess > 0:
            remarks.append(f"{result['name']}: peak memory is {excess / 1e6:,.0f} MB more than the plan "
                           f"and the {PLAN_SLACK / 1e6:.0f} MB allowed on top of it")
    print_table(rows)
    for remark in remarks:
        print(remark)


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform
        return platform.processor() or platform.machine()


def main():
    names = [configuration.name for configuration in CONFIGURATIONS]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", help="the CPU build of train_gpt")
    parser.add_argument("--llmc", default=os.environ.get("LLMC"), metavar="FOLDER",
                        help="holds llm.c's CPU programs (see README.md; default: $LLMC)")
    parser.add_argument("--torch", choices=["yes", "no", "auto"], default="auto", help="measure PyTorch: auto: if there")
    parser.add_argument("--python", metavar="PROGRAM", help="the python that has PyTorch")
    parser.add_argument("--only", choices=names, help="one configuration instead of all")
    parser.add_argument("--threads", type=int, default=cpus, help="for everybody (default: all CPUs)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to this file too")
    options = parser.parse_args()

    if not executable(options.ours):
        raise Mistake(f"--ours {options.ours}: expected a program; run make")
    if options.llmc and not os.path.isdir(options.llmc):
        raise Mistake(f"--llmc {options.llmc}: expected a folder")
    pythons = [options.python] if options.python else [sys.executable, "/usr/bin/python3"]
    python, torch_version = find_torch(pythons) if options.torch != "no" else (None, None)
    if options.torch == "yes" and not python:
        raise Mistake(f"--torch yes: no torch in {' or '.join(pythons)}; name a python that has it with --python")

    remarks = []
    if not python:
        remarks.append("PyTorch: not measured, " + ("--torch no" if options.torch == "no" else
                       f"no torch in {' or '.join(pythons)} (pip install torch; --python names another python)"))
    if not options.llmc:
        remarks.append("llm.c: not measured, no --llmc FOLDER")
    load = os.getloadavg()[0]
    print(f"{cpu_name()}, {options.threads} threads" + (f", PyTorch {torch_version}" if python else ""))
    if load > 0.5:
        remarks.append(f"The machine was busy when this began (load {load:.1f}): the figures say less than they could.")

    # Every contestant computes with OpenMP and gets the same number of threads.
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    results = []
    with tempfile.TemporaryDirectory(prefix="gpt_bench_") as folder:
        write_tokens(os.path.join(folder, "tokens.bin"))
        write_text(os.path.join(folder, "text.txt"))
        ours = Ours(os.path.abspath(options.ours), folder, environment)
        contestants = [ours]
        if python:
            contestants.append(PyTorch(python, options.threads, environment))
        if options.llmc:
            contestants.append(LlmC(options.llmc, os.path.join(folder, "llmc"), environment))
        for configuration in CONFIGURATIONS:
            if options.only not in (None, configuration.name):
                continue
            times = compare(configuration, contestants, remarks)
            medians = {name: statistics.median(steps) for name, steps in times.items()}
            results.append({"name": configuration.name, "goal_ms": configuration.goal_ms,
                            "ms": medians, "steps_ms": times,
                            "tokens_per_s": 1000 * configuration.tokens / medians["ours"],
                            "peak_bytes": ours.peak_bytes[configuration.name],
                            "planned_bytes": ours.planned_bytes(configuration)})
    report(results, remarks)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"cpu": cpu_name(), "threads": options.threads, "load_before": load, "pytorch": torch_version,
                       "configurations": results, "remarks": remarks}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

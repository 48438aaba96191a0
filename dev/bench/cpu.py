#!/usr/bin/env python3
"""Training steps on this CPU, side by side: ./train_gpt, PyTorch tuned in several ways, and llm.c.

    python3 dev/bench/cpu.py --ours ./train_gpt [--llmc FOLDER] [--torch yes|no|auto] [--json FILE]

The contestants take turns (ours, PyTorch, llm.c, ours, ...), so that whatever else the machine
does hits all of them. A figure is the median over the steps of all runs but each run's first; the
ratio is that of the fastest peer to ours, the floor what the machine's matmuls and copies allow. Our
peak memory is held against what ./train_gpt plan says. A peer that cannot be had is named, and
its figures are left out.
"""
import argparse
import array
import concurrent.futures
import ctypes
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
HOPELESS = 1.5              # nor has a peer that takes so many times the fastest peer's step
COPIED_BYTES = 1 << 28      # by each thread, to measure the bandwidth: more than caches hold
COPIES = 5
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
    steps: dict             # how many in a run, for each kind of contestant

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
                  micro_batch=12, seq_len=64, steps={"ours": 200, "PyTorch": 40}),
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
    kind = "ours"

    def __init__(self, program, folder, environment):
        self.program, self.folder, self.environment = program, folder, environment
        self.peak_bytes, self.peak_flops = {}, {}
        self.precision = self.plan(CONFIGURATIONS[0])["precision"]
        self.name = f"ours, {self.precision.upper()}"

    def step_times(self, configuration):
        data = os.path.join(self.folder, "tokens.bin" if configuration.vocab > 256 else "text.txt")
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            _, peak = run([self.program, "train", *self.memory_options(configuration),
                           "--data", data, "--out", out, "--total-batch", str(configuration.tokens),
                           "--steps", str(configuration.steps[self.kind]), "--peak", "measured",
                           "--eval-every", "0", "--sample-every", "0", "--checkpoint-every", "0"], self.environment)
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
                entries = [json.loads(line) for line in log]
        name, flops = configuration.name, entries[0]["run"]["peak_flops"]
        self.peak_bytes[name] = max(peak, self.peak_bytes.get(name, 0))
        self.peak_flops[name] = max(flops, self.peak_flops.get(name, 0))
        return [entry["ms"] for entry in entries if "ms" in entry]

    def plan(self, configuration):
        output, _ = run([self.program, "plan", *self.memory_options(configuration), "--json"], self.environment)
        return json.loads(output)

    @staticmethod
    def memory_options(configuration):
        return [*configuration.options, "--recompute", "none", "--grad-dtype", "fp32"]


class PyTorch:
    kind = "PyTorch"
    # What a user may know to ask for: options of torch_step.py.
    tunings = {"untuned": [], "fused AdamW": ["--fused"], "fused, compiled": ["--fused", "--compile"],
               "fused, BF16": ["--fused", "--bf16"], "fused, BF16, compiled": ["--fused", "--bf16", "--compile"]}

    def __init__(self, python, tuning, threads, environment):
        self.python, self.threads, self.environment = python, threads, environment
        self.name, self.flags = f"PyTorch {tuning}", self.tunings[tuning]

    def step_times(self, configuration):
        output, _ = run([self.python, "-B", os.path.join(HERE, "torch_step.py"), *configuration.options, *self.flags,
                         "--steps", str(configuration.steps[self.kind]), "--threads", str(self.threads)],
                        self.environment)
        return json.loads(output.splitlines()[-1])["ms"]


class LlmC:
    """llm.c's train_gpt2 runs what its source fixes: 41 steps, evaluations between them, and a
    batch, so that it takes one program for each configuration."""
    kind = name = "llm.c"
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
                if len(times) == configuration.steps[self.kind]:
                    process.kill()
                    break
        if len(times) < configuration.steps[self.kind]:
            raise Failed(f"{program} ended with exit code {process.returncode} after {len(times)} steps")
        return times


# ---- The floor: what a step must take if its matmuls and attention ran at the rate of a large matmul, and AdamW at
# that of a copy.

def copy_bandwidth(threads):
    """Bytes read and written in a second, the best of some copies by all threads at once."""
    blocks = [(ctypes.create_string_buffer(COPIED_BYTES), ctypes.create_string_buffer(COPIED_BYTES))
              for _ in range(threads)]
    best = 0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(COPIES):     # the first of them brings the pages
            start = time.monotonic()
            list(pool.map(lambda pair: ctypes.memmove(*pair, COPIED_BYTES), blocks))
            best = max(best, 2 * COPIED_BYTES * threads / (time.monotonic() - start))
    return best


def floor_ms(plan, tokens, peak_flops, bytes_per_s):
    # Read and written: gradients, master weights and both moments; written: BF16 weights too.
    held = plan["bytes"]
    master = held["master"] if plan["precision"] != "fp32" else held["weights"]
    copied = 2 * (held["gradients"] + master + held["adam_m"] + held["adam_v"])
    copied += held["weights"] if plan["precision"] != "fp32" else 0
    return 1000 * (plan["flops_per_token"]["model"] * tokens / peak_flops + copied / bytes_per_s)


# ---- The comparison

def compare(configuration, contestants, remarks):
    """Each contestant's step times, of all its runs together."""
    times, done = {}, set()
    for turn in range(ROUNDS):
        for contestant in contestants:
            if contestant.kind not in configuration.steps or contestant.name in done:
                continue
            print(f"{configuration.name}: {contestant.name} {turn + 1}/{ROUNDS} ...", file=sys.stderr)
            start = time.monotonic()
            try:
                times.setdefault(contestant.name, []).extend(contestant.step_times(configuration)[1:])
            except Failed as failure:
                if contestant.kind == "ours":
                    raise
                remarks.append(f"{configuration.name}: no figure for {contestant.name}: {failure}")
                del times[contestant.name]
            if contestant.name not in times or time.monotonic() - start > LONG_RUN_S:
                done.add(contestant.name)
        peers = {c.name: statistics.median(times[c.name]) for c in contestants if c.kind != "ours" and c.name in times}
        done |= {name for name, ms in peers.items() if ms > HOPELESS * min(peers.values())}
    return times


def best_peer(medians, contestants):
    """The name of the fastest peer, or None."""
    peers = [contestant.name for contestant in contestants
             if contestant.kind != "ours" and contestant.name in medians]
    return min(peers, key=medians.get, default=None)


def print_table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def report(results, contestants, remarks):
    """The contestants' times, then what each of our builds makes of the configuration."""
    names = [contestant.name for contestant in contestants]
    times = [[f"{result['ms'][name]:,.1f}" if name in result["ms"] else "-" for name in names] for result in results]
    print_table([["ms a step", *names], *([result["name"], *row] for result, row in zip(results, times))])
    print()
    rows = [["configuration", "ours", "ms", "goal ms", "best peer", "ms", "ratio", "floor ms", "of floor", "tokens/s",
             "peak memory", "planned"]]
    for result in results:
        peer = result["best_peer"]
        for name, our in result["ours"].items():
            ms = result["ms"][name]
            rows.append([
                result["name"], name.removeprefix("ours, "), f"{ms:,.1f}",
                f"{result['goal_ms']:,} {'met' if ms <= result['goal_ms'] else 'MISSED'}", peer or "-",
                *((f"{result['ms'][peer]:,.1f}", f"{result['ms'][peer] / ms:.2f}x") if peer else ("-", "-")),
                f"{our['floor_ms']:,.1f}", f"{ms / our['floor_ms']:.2f}x", f"{our['tokens_per_s']:,.0f}",
                f"{our['peak_bytes'] / 1e6:,.0f} MB", f"{our['planned_bytes'] / 1e6:,.0f} MB"])
            excess = our["peak_bytes"] - our["planned_bytes"] - PLAN_SLACK
            if excess > 0:
                remarks.append(f"{result['name']}: {name}: peak memory is {excess / 1e6:,.0f} MB more than the plan "
                               f"and the {PLAN_SLACK / 1e6:.0f} MB allowed on top of it")
    print_table(rows)
    for remark in remarks:
        print(remark)


def measure(configuration, contestants, bytes_per_s, remarks):
    times = compare(configuration, contestants, remarks)
    medians = {name: statistics.median(steps) for name, steps in times.items()}
    ours = {}
    for contestant in contestants:
        if contestant.kind != "ours":
            continue
        plan, flops = contestant.plan(configuration), contestant.peak_flops[configuration.name]
        ours[contestant.name] = {
            "tokens_per_s": 1000 * configuration.tokens / medians[contestant.name], "peak_flops": flops,
            "floor_ms": floor_ms(plan, configuration.tokens, flops, bytes_per_s),
            "peak_bytes": contestant.peak_bytes[configuration.name], "planned_bytes": plan["bytes"]["total"]}
    return {"name": configuration.name, "goal_ms": configuration.goal_ms, "ms": medians, "steps_ms": times,
            "best_peer": best_peer(medians, contestants), "ours": ours}


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
    parser.add_argument("--ours", required=True, metavar="PROGRAM", action="append",
                        help="a CPU build of train_gpt; once more for another")
    parser.add_argument("--llmc", default=os.environ.get("LLMC"), metavar="FOLDER",
                        help="holds llm.c's CPU programs (see README.md; default: $LLMC)")
    parser.add_argument("--torch", choices=["yes", "no", "auto"], default="auto", help="measure PyTorch: auto: if there")
    parser.add_argument("--python", metavar="PROGRAM", help="the python that has PyTorch")
    parser.add_argument("--only", choices=names, help="one configuration instead of all")
    parser.add_argument("--threads", type=int, default=cpus, help="for everybody (default: all CPUs)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured to this file too")
    options = parser.parse_args()

    for program in options.ours:
        if not executable(program):
            raise Mistake(f"--ours {program}: expected a program; run make")
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
        contestants = [Ours(os.path.abspath(program), folder, environment) for program in options.ours]
        if python:
            contestants += [PyTorch(python, tuning, options.threads, environment) for tuning in PyTorch.tunings]
        if options.llmc:
            contestants.append(LlmC(options.llmc, os.path.join(folder, "llmc"), environment))
        # By a process of its own: what this one holds would count as a contestant's peak memory.
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            bytes_per_s = pool.submit(copy_bandwidth, options.threads).result()
        for configuration in CONFIGURATIONS:
            if options.only in (None, configuration.name):
                results.append(measure(configuration, contestants, bytes_per_s, remarks))
    print(f"copies move {bytes_per_s / 1e9:.1f} GB/s; a large matmul reaches " + ", ".join(
        f"{max(c.peak_flops.values()) / 1e12:.2f} TFLOP/s in {c.precision.upper()}"
        for c in contestants if c.kind == "ours"))
    report(results, contestants, remarks)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"cpu": cpu_name(), "threads": options.threads, "load_before": load, "pytorch": torch_version,
                       "copy_bytes_per_s": bytes_per_s, "configurations": results, "remarks": remarks}, file, indent=1)


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

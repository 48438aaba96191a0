#!/usr/bin/env python3
"""Tests of the benchmarks: what is read from traces and llm.c, the arithmetic of the report from made-up measurements,
and whole runs on the CPU with programs in the place of PyTorch and llm.c.

    python3 dev/bench/test_bench.py --ours ./train_gpt      # a CPU build
"""
import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path.append(os.path.join(ROOT, "dev", "tests"))
import bench_report as report
import contestants
from claims import claim, finish
from contestants import Done, Failed, OutOfMemory


def near(a, b):
    return a is not None and abs(a - b) <= 1e-9 * max(1, abs(b))


# ---- Reading. llm.c's lines are as its train_gpt2.cu prints them.

LLMC_OUTPUT = """| device                | NVIDIA H100 80GB HBM3                              |
device memory usage: 40409 MiB / 81075 MiB
val loss 11.009463
step    1/4 | loss 11.009463 (+nanz)| norm 15.3632 (+nanz)| lr 6.00e-06 | 1342.50 ms | 33.1% bf16 MFU | 390530 tok/s
step    2/4 | loss 10.929188 (-1.25z)| norm 13.0471 (+0.31z)| lr 1.20e-05 | 1120.25 ms | 41.0% bf16 MFU | 468010 tok/s
                  compute 99.0% | memory: 40.1% | fan:  0% | 1980 MHz / 1980 MHz | 690 W / 700 W | 60C / 87C | no cap
"""


def test_reading(scratch):
    claim(contestants.read_llmc(LLMC_OUTPUT) == {"ms": [1342.50, 1120.25], "peak_bytes": 40409 * 2**20},
          "llm.c: the time of each step and the memory in use are read")
    line = "done  5 steps in 0:12, 1.2M tok/s; memory: 31.72 GB allocated as planned, 33.10 GB in use on the device\n"
    claim(contestants.closing_memory(line) == 33.10e9, "the closing line's memory is read")
    path = os.path.join(scratch, "log.jsonl")
    with open(path, "w", encoding="ascii") as file:
        file.write('{"run":{"device":"x"}}\n{"step":1,"ms":10.0}\n{"step":1,"val_loss":3}\n{"step":2,"m')
    record, steps = contestants.read_log(path)
    claim(record == {"device": "x"} and [s["ms"] for s in steps] == [10.0], "log.jsonl is read up to a line cut off")
    for output, kind in (("CUDA error: out of device memory", OutOfMemory), ("it broke", Failed)):
        try:
            Done(["x"], "", output, 1, 1.0, False, 0).check()
            found = None
        except Failed as failure:
            found = type(failure)
        claim(found is kind, f"'{output}' is {kind.__name__}")


KERNELS = [("embedding_forward", "forward", 10), ("matmul", "forward", 20), ("cross_entropy", "forward", 10),
           ("matmul", "backward", 40)] * 2 + [("norm_partials", "update", 5), ("adamw", "update", 15)]


def made_up_trace(steps):
    """1 us between kernels and 100 us more between steps."""
    events = [{"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
              for tid, name in enumerate(["CPU: launches", "stream: kernels", "stream: copies"])]
    at = 1000.0
    for _ in range(steps):
        for name, pass_, us in KERNELS:
            for tid, begin in ((0, at - 500), (1, at)):
                events.append({"ph": "X", "name": name, "tid": tid, "ts": begin, "dur": us, "args": {"pass": pass_}})
            at += us + 1
        at += 100
        events.append({"ph": "X", "name": "copy", "tid": 2, "ts": at, "dur": 1, "args": {"pass": "update"}})
    return {"traceEvents": events}


def test_trace():
    got = contestants.read_trace(made_up_trace(3))
    claim(near(got["busy_ms"], 0.180) and near(got["step_ms"], 0.180 + 0.010 + 0.100) and got["launches"] == 10,
          "a traced step lasts until the next one begins, gaps included", str(got["step_ms"]))
    claim(near(got["gap_us"], 1), "the median gap between kernels")
    kernels = {(k["pass"], k["name"]): (k["launches"], round(k["ms"], 6)) for k in got["kernels"]}
    claim(kernels["forward", "matmul"] == (2, 0.04) and kernels["backward", "matmul"] == (2, 0.08),
          "time and launches by pass and kernel", str(kernels))
    for steps in (0, 1):
        try:
            contestants.read_trace(made_up_trace(steps))
            claim(False, f"a trace of {steps} steps is an error")
        except Failed as failure:
            claim("--trace: found" in str(failure), f"a trace of {steps} steps is an error")


# ---- Arithmetic

BYTES = {"weights": 2e6, "gradients": 4e6, "master": 4e6, "adam_m": 4e6, "adam_v": 4e6, "total": 50e6}
RUN = {"kind": "ours", "ms": [90, 10, 20, 15, 10], "seconds": 1, "peak_bytes": 300e6, "planned_bytes": 50e6,
       "micro_batch": 4, "plan": {"precision": "bf16", "bytes": BYTES, "flops_per_token": {"model": 1e6}},
       "record": {"peak_flops": 2e9, "device": "x", "peak_source": "y",
                  "model": {"layers": 2, "channels": 8, "vocab": 200}}}
PEERS = {"PyTorch untuned": [50, 50], "PyTorch fused": [30, 31, 29]}


def made_up_results():
    run = {**copy.deepcopy(RUN), "trace": contestants.read_trace(made_up_trace(3))}
    peers = {name: {"kind": "PyTorch", "ms": ms, "micro_batch": 4, "peak_bytes": 7e8} for name, ms in PEERS.items()}
    case = {"name": "gpt2", "seq_len": 16, "tokens": 128, "goal_ms": 10, "runs": {"ours, BF16": run, **peers}}
    seconds = {"forward_s": 1e-3, "backward_s": 2e-3}
    attention = {f"64/{T}": {"B": 2, "T": T, "NH": 4, "HS": 64, "ours": seconds, "torch": {
        "flash": {"forward_s": 2e-3, "backward_s": 2e-3}, "cuDNN": {"error": "no kernel"}}} for T in (2048, 8192)}
    return {"about": {"suite": "gpu", "dry": False}, "cases": {"gpt2": case}, "attention": attention, "not_run": [],
            "ceilings": {"copy_bytes_per_s": 34e6}, "sampling": {"ours, BF16": {
                "first_s": [1, 3, 2], "tokens_per_s": {"64": [10, 30, 20]}}}}


def cells(results, section, first):
    """Of the section's row that begins with `first`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section(results) if line.startswith("|")]
    return next((row for row in rows if row[:len(first)] == first), [])


def test_arithmetic():
    results = made_up_results()
    case, run = results["cases"]["gpt2"], results["cases"]["gpt2"]["runs"]["ours, BF16"]
    claim(report.median_ms(run) == 15 and report.best_peer(case) == "PyTorch fused",
          "a step is the median of all runs; the fastest peer is the one compared with")
    # 128 tokens of 1 MFLOP at 2 GFLOP/s; 32 MB of FP32 read and written and 2 MB of weights written, at 34 MB/s
    claim(near(report.floor_ms(case, run, results["ceilings"]), 64 + 1000), "the floor: FLOPs and AdamW's bytes")
    claim(near(report.floor_ms(case, run, {**results["ceilings"], "matmul_flops": 4e9}), 32 + 1000),
          "the floor: at the rate of PyTorch's large matmul where it is known")
    fp32 = {**run, "plan": {**run["plan"], "precision": "fp32", "bytes": {**BYTES, "weights": 4e6, "master": 0}}}
    claim(near(report.floor_ms(case, fp32, results["ceilings"]), 64 + 32e6 / 34e6 * 1000),
          "the floor: FP32 weights are their own master copy")
    claim(report.floor_ms(case, run, {}) is None, "without a copy's rate there is no floor")
    row = cells(results, report.speed, ["gpt2", "ours, BF16"])
    claim(row[4:8] == ["15.0 (10.0 to 90.0)", f"{128 / 0.015:,.0f}", "426.7 %", "2.00x PyTorch fused"]
          and row[9] == "10 MISSED", "the table: median, range, tokens/s, MFU, ratio, goal", str(row))
    claim("more than planned" in "\n".join(report.speed(results)), "memory beyond the plan is named")

    # Embedding: writes and reads 64 rows of 8 values of 2 bytes, twice a step; cross-entropy: padded to 256 words.
    need = report.kernel_bytes(run, 16)
    claim(need["embedding_forward"] == 2 * 64 * 8 * 2 and need["cross_entropy"] == 2 * 64 * 256 * 2
          and need["adamw"] == 2 * 4e6 + 6 * 4e6 + 2e6, "bytes that kernels must move")
    moved = 2 * (need["embedding_forward"] + need["cross_entropy"]) + need["norm_partials"] + need["adamw"]
    claim(near(report.memory_bound_rate(case, run), moved / 60e-6), "the rate of the kernels bound by memory")
    claim(near(report.idle_shares(run)[0], 1 - 180 / 290) and near(report.idle_shares(run)[1], 1 - 0.18 / 15),
          "idle between kernels, in the traced step and in the others")
    forward = 2 * 2 * 4 * 2048**2 * 64
    claim(report.attention_rates(results["attention"]["64/2048"], {"forward_s": 1, "backward_s": 6}) ==
          (forward, forward / 2), "attention's FLOPs: half of the square, backward 2.5 times forward")
    text = "\n".join(report.attention(results))
    claim("2.00x" in text and "1.33x" in text and "cuDNN, T = 2048: no kernel" in text,
          "attention: ours over the fastest backend; a backend that fails is named", text)
    claim(cells(results, report.sampling, ["ours, BF16"]) == ["ours, BF16", "2.00", "20.0"], "sampling: medians")


def test_goals():
    results = made_up_results()
    rows = {row: cells(results, report.goals, [row]) for row in report.GOALS}
    claim(rows["GPT-2 124M"][2] == "8,533 tokens/s, 426.7 % MFU" and rows["GPT-2 1558M"][2] == "not measured",
          "goals: measured values beside them", str(rows))
    claim([row[2] for row in rows.values()][2:4] == ["4.29 / 68.7 TFLOP/s", "5.01 / 80.2 TFLOP/s"],
          "goals: attention's rates at both lengths", str(rows))
    claim(all("measured" not in row[2] for name, row in rows.items() if "1558M" not in name),
          "goals: bandwidth and idle time are there", str(rows))
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    missing = [row for row, goal in report.GOALS.items()
               if not any(line.startswith(f"| {row} | {goal} |") for line in lines)]
    claim(not missing, "README.md's table has the report's rows and goals", ", ".join(missing))


# ---- Whole runs. These programs answer as PyTorch and llm.c do.

FAKE_PYTHON = """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "-c":
    print("0.0.fake")
    sys.exit()
what, flags = sys.argv[3], dict(zip(sys.argv[4:], sys.argv[5:]))
if "--compile" in sys.argv:
    sys.exit("no C++ compiler")
print("a line of PyTorch's own")
answer = {"version": "0.0.fake"}
if what == "train":
    if int(flags["--micro-batch"]) > 2:
        sys.exit("torch.OutOfMemoryError: out of memory")
    assert int(flags["--accumulation"]) * int(flags["--micro-batch"]) * int(flags["--seq-len"]) in (512, 768), flags
    ms = 500 / (1 + ("--fused" in sys.argv) + 2 * ("--bf16" in sys.argv))
    answer.update(ms=[9000] + [ms] * (int(flags["--steps"]) - 1), peak_bytes=None)
elif what == "ceilings":
    points = [{**p, "torch": {"flash": {"forward_s": 1, "backward_s": 2}}} for p in json.loads(flags["--attention"])]
    answer.update(copy_bytes_per_s=1e10, matmul_flops=1e11, attention=points)
else:
    answer.update(first_s=1, seconds={n: 1 + int(n) / 50 for n in flags["--lengths"].split(",")})
print(json.dumps(answer))
"""
FAKE_LLMC = """#!/usr/bin/env python3
import os, sys, time
if "FAKE_LLMC_PID" in os.environ:
    open(os.environ["FAKE_LLMC_PID"], "w").write(str(os.getpid()))
    time.sleep(120)
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.path.exists(flags["-i"]) and flags["-e"] in ("d2", "d4") and flags["-d"] == "512", flags
if int(flags["-b"]) > 1:
    sys.exit("[CUDA ERROR] at file x:1:\\nout of memory")
for i in range(int(flags["-x"])):
    print(f"step {i + 1:4d}/{flags['-x']} | loss 6.000000 (+nanz)| norm 1.0000 (+nanz)| lr 1e-04 | 12.50 ms | x")
"""


class World:
    """A folder with those programs, in which bench.py runs."""

    def __init__(self, scratch, ours):
        self.scratch, self.ours = scratch, ours
        self.python, self.broken = (os.path.join(scratch, name) for name in ("python", "broken"))
        os.makedirs(os.path.join(scratch, "llmc"))
        broken = "#!/bin/sh\n[ \"$1\" = -c ] && echo 0.0.fake && exit\necho it broke >&2\nexit 3\n"
        for path, text in ((self.python, FAKE_PYTHON), (self.broken, broken),
                           (os.path.join(scratch, "llmc", "train_gpt2cu"), FAKE_LLMC)):
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
            os.chmod(path, 0o755)

    def command(self, suite, out, *options):
        python = [] if "--python" in options else ["--python", self.python]
        return [sys.executable, "-B", os.path.join(HERE, "bench.py"), suite, "--ours", self.ours, *python, "--out",
                os.path.join(self.scratch, out), *options]

    def run(self, suite, out, *options):
        """(exit status, errors, report.md, results.json)"""
        done = subprocess.run(self.command(suite, out, *options), capture_output=True, text=True)
        text = self.read(out, "report.md")
        return done.returncode, done.stderr, text, json.loads(self.read(out, "results.json") or "{}")

    def read(self, out, name):
        path = os.path.join(self.scratch, out, name)
        return open(path, encoding="utf-8").read() if os.path.exists(path) else ""


def test_dry_run(world):
    code, errors, text, results = world.run("gpu", "dry", "--device", "cpu", "--llmc",
                                            os.path.join(world.scratch, "llmc"))
    claim(code == 0 and not results["not_run"], "make bench-gpu on a CPU: every part runs", errors)
    titles = [line for line in text.splitlines() if line.startswith("#") and not line.startswith("###")]
    claim(titles == ["# Dry run on a CPU, not a measurement", "## Speed", "## Where a step goes", "## Attention alone"],
          "its report has every section", str(titles))
    runs = results["cases"]["tiny-2"]["runs"]
    claim(set(runs) >= {"PyTorch fused, BF16", "llm.c"} and len(runs) == 3, "all contestants are in it", str([*runs]))
    claim(runs["llm.c"]["micro_batch"] == 1 and runs["PyTorch fused, BF16"]["micro_batch"] == 2,
          "a peer's micro-batch is halved until it fits")
    claim(len(runs["llm.c"]["ms"]) == 6 and set(runs["PyTorch fused, BF16"]["ms"]) == {125},
          "two runs count, without the first steps of each")
    ours = next(run for name, run in runs.items() if run["kind"] == "ours")
    named = {kernel["name"] for kernel in ours["trace"]["kernels"]}
    absent = set(report.kernel_bytes(ours, 64)) - named
    claim(not absent, "every kernel whose bytes are counted is in a trace of ./train_gpt", ", ".join(absent))
    elements = ours["plan"]["bytes"]["adam_m"] / 4
    claim(ours["planned_bytes"] > 12 * elements and ours["peak_bytes"] > ours["planned_bytes"], "memory is measured")
    claim(all(seconds > 0 for point in results["attention"].values() for seconds in point["ours"].values()),
          "attention alone is timed")
    try:
        import matplotlib  # noqa: F401
        claim(len(open(os.path.join(world.scratch, "dry", "plot.png"), "rb").read()) > 5000 and "(plot.png)" in text,
              "a plot is beside it")
    except ImportError:
        claim(".png" not in text, "without matplotlib there is no plot")


def test_cpu_and_sampling(world):
    code, errors, text, results = world.run("cpu", "cpu", "--cases", "shakespeare", "--threads", "1")
    runs = results["cases"]["shakespeare"]["runs"]
    claim(code == 0 and report.best_peer(results["cases"]["shakespeare"]) == "PyTorch fused, BF16" and len(runs) == 4,
          "make bench: PyTorch is asked for every tuning", errors)
    failed = {title: why for title, why in results["not_run"]}
    claim(sum("no C++ compiler" in why for why in failed.values()) == 2 and len(failed) == 2
          and "no C++ compiler" in text, "tunings that fail are named, once", str(failed))
    claim(results["ceilings"]["copy_bytes_per_s"] > 1e8 and "## Goals" not in text, "a copy is measured")

    code, errors, text, results = world.run("sampling", "sampling", "--lengths", "2,4", "--threads", "1")
    row = cells(results, report.sampling, ["transformers, FP32"])
    rates = [found["tokens_per_s"] for found in results["sampling"].values()]
    claim(code == 0 and row == ["transformers, FP32", "1.00", "50.0", "50.0"] and len(rates) == 3
          and all(len(found["4"]) == 3 for found in rates), "make bench-sampling: three runs of all contestants",
          errors + text)


def test_trouble(world):
    llmc = os.path.join(world.scratch, "llmc")
    for options, words in ((["gpu"], "expected a gpu build; no GPU? --device cpu is a dry run"),
                           (["cpu", "--cases", "gpt9"], "--cases gpt9: expected some of 124M-T64"),
                           (["gpu", "--minutes", "0"], "--minutes 0"),
                           (["gpu", "--llmc", "/nowhere"], "--llmc /nowhere"),
                           (["sampling", "--lengths", "a"], "--lengths a"),
                           (["cpu", "--ours", "/nowhere"], "--ours /nowhere"),
                           (["cpu", "--threads", "0"], "--threads 0")):
        code, errors, _, results = world.run(options[0], "bad", *options[1:])
        claim(code == 2 and words in errors and errors.count("\n") == 1 and not results,
              f"{' '.join(options)}: exit 2 and one line", errors)
    options = ["--device", "cpu", "--cases", "tiny-2"]
    code, errors, text, results = world.run("gpu", "no-peers", *options, "--python", world.broken, "--llmc",
                                            world.scratch)
    claim(code == 0 and "it broke" in text and "'make train_gpt2cu' there makes it" in text
          and len(results["not_run"]) == 3 and "| tiny-2 | ours" in text, "peers that fail are named, and ours stays",
          errors)
    code, _, text, _ = world.run("gpu", "late", *options, "--minutes", "0.01")
    claim(code == 0 and "were left of 0.01 minutes" in text, "what the time does not suffice for is named")
    begin = time.monotonic()
    done = contestants.run(["sh", "-c", "echo begun; sleep 60"], 1)
    claim(done.ended and done.output == "begun\n" and time.monotonic() - begin < 20, "a run is ended at its limit")

    pid = os.path.join(world.scratch, "pid")
    # A shell's background jobs ignore Ctrl-C; here it counts.
    process = subprocess.Popen(world.command("gpu", "interrupted", *options, "--llmc", llmc),
                               env={**os.environ, "FAKE_LLMC_PID": pid}, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    until = time.monotonic() + 60
    while not (os.path.exists(pid) and open(pid).read()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait()
    text = world.read("interrupted", "report.md")
    claim(process.returncode == 1 and "| the rest | interrupted |" in text and "| tiny-2 | ours" in text,
          "Ctrl-C: exit 1, and the report keeps what was measured", f"exit {process.returncode}")
    claim(not os.path.exists(f"/proc/{open(pid).read()}"), "and the program that was running is gone")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    with tempfile.TemporaryDirectory(prefix="gpt_test_bench_") as scratch:
        test_reading(scratch)
        test_trace()
        test_arithmetic()
        test_goals()
        world = World(os.path.join(scratch, "world"), ours)
        test_dry_run(world)
        test_cpu_and_sampling(world)
        test_trouble(world)
    finish()


if __name__ == "__main__":
    main()

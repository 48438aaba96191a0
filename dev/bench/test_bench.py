#!/usr/bin/env python3
"""Tests the benchmarks: parsing of traces and llm.c's output, the report's arithmetic on made-up measurements, and
whole runs on the CPU with fake programs instead of PyTorch and llm.c.

    python3 dev/bench/test_bench.py --ours ./train_gpt      # a CPU build
"""
import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))
import bench_report as report
import contestants
from testing import expect, expect_equal, run_tests, wait_for, write
from contestants import Done, Failed, OutOfMemory

TIMEOUT = 300       # seconds a run of bench.py may take


def expect_near(found, expected, text):
    expect(found is not None and math.isclose(found, expected, rel_tol=1e-9), text, f"{found}, expected {expected}")


def expect_fails(function, kind, words, text):
    try:
        function()
        expect(False, text, "it succeeded")
    except Failed as failure:
        expect(type(failure) is kind and words in str(failure), text, repr(failure))


# ---- Parsing. The lines are in the format of llm.c's train_gpt2.cu.

LLMC_OUTPUT = """| device                | NVIDIA H100 80GB HBM3                              |
device memory usage: 40409 MiB / 81075 MiB
val loss 11.009463
step    1/4 | loss 11.009463 (+nanz)| norm 15.3632 (+nanz)| lr 6.00e-06 | 1342.50 ms | 33.1% bf16 MFU | 390530 tok/s
step    2/4 | loss 10.929188 (-1.25z)| norm 13.0471 (+0.31z)| lr 1.20e-05 | 1120.25 ms | 41.0% bf16 MFU | 468010 tok/s
                  compute 99.0% | memory: 40.1% | fan:  0% | 1980 MHz / 1980 MHz | 690 W / 700 W | 60C / 87C | no cap
"""


def test_parsing():
    expect_equal(contestants.read_llmc(LLMC_OUTPUT), {"ms": [1342.50, 1120.25], "peak_bytes": 40409 * 2**20},
                 "llm.c: the time of each step and the memory in use are read")
    for output, kind in (("CUDA error: out of device memory", OutOfMemory), ("it broke", Failed)):
        expect_fails(Done(["x"], "", output, 1, 1.0, False, 0).check, kind, output[-6:],
                     f"'{output}' raises {kind.__name__}")
    begin = time.monotonic()
    done = contestants.run(["sh", "-c", "echo started; sleep 60 & sleep 60"], 1)
    expect(done.timed_out and done.output == "started\n" and time.monotonic() - begin < 20,
           "a run is killed at its time limit, with its child processes")


KERNELS = [("embedding_forward", "forward", 10), ("matmul", "forward", 20), ("cross_entropy", "forward", 10),
           ("matmul", "backward", 40)] * 2 + [("norm_partials", "update", 5), ("adamw", "update", 15)]


def made_up_trace(steps):
    """A trace with gaps of 1 us between kernels and 101 us between steps."""
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
    for key, expected in (("busy_ms", 0.180), ("step_ms", 0.180 + 0.010 + 0.100), ("launches", 10), ("gap_us", 1)):
        expect_near(got[key], expected, f"a traced step ends where the next one starts: {key}")
    kernels = {(k["pass"], k["name"]): (k["launches"], round(k["ms"], 6)) for k in got["kernels"]}
    expect(kernels["forward", "matmul"] == (2, 0.04) and kernels["backward", "matmul"] == (2, 0.08),
           "time and launches are summed by pass and kernel", str(kernels))
    for steps in (0, 1):
        expect_fails(lambda: contestants.read_trace(made_up_trace(steps)), Failed, "--trace: found",
                     f"a trace of {steps} steps is an error")


# ---- Arithmetic

BYTES = {"weights": 2e6, "gradients": 4e6, "master": 4e6, "adam_m": 4e6, "adam_v": 4e6, "total": 50e6}
RUN = {"kind": "ours", "ms": [90, 10, 20, 15, 10], "peak_bytes": 300e6, "planned_bytes": 50e6,
       "micro_batch": 4, "plan": {"precision": "bf16", "bytes": BYTES, "flops_per_token": {"model": 1e6}},
       "record": {"peak_flops": 2e9, "device": "x", "peak_source": "y",
                  "model": {"layers": 2, "channels": 8, "vocab": 200}}}
PEERS = {"PyTorch untuned": [50, 50], "PyTorch fused": [30, 31, 29]}


def made_up_results():
    run = {**RUN, "trace": contestants.read_trace(made_up_trace(3))}
    peers = {name: {"kind": "PyTorch", "ms": ms, "micro_batch": 4, "peak_bytes": 7e8} for name, ms in PEERS.items()}
    case = {"name": "gpt2", "seq_len": 16, "tokens": 128, "goal_ms": 10, "runs": {"ours, BF16": run, **peers}}
    backends = {"flash": {"forward_s": 2e-3, "backward_s": 2e-3}, "cuDNN": {"error": "no kernel"}}
    attention = {f"64/{T}": {"B": 2, "T": T, "NH": 4, "HS": 64, "ours": {"forward_s": 1e-3, "backward_s": 2e-3},
                             "torch": backends} for T in (2048, 8192)}
    return {"about": {"suite": "gpu", "dry": False}, "cases": {"gpt2": case}, "attention": attention, "not_run": [],
            "ceilings": {"copy_bytes_per_s": 34e6}}


def cells(results, section, first):
    """Returns the cells of the section's table row whose first cells are `first`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section(results) if line.startswith("|")]
    return next((row for row in rows if row[:len(first)] == first), [])


def test_arithmetic():
    results = made_up_results()
    case, run, ceilings = results["cases"]["gpt2"], results["cases"]["gpt2"]["runs"]["ours, BF16"], results["ceilings"]
    expect_equal((report.median_ms(run), report.best_peer(case)), (15, "PyTorch fused"),
                 "median of a run and fastest peer")
    fp32 = {**run, "plan": {**run["plan"], "precision": "fp32", "bytes": {**BYTES, "weights": 4e6, "master": 0}}}
    for which, found, expected in (
            # 128 tokens of 1 MFLOP at 2 GFLOP/s; 32 MB of FP32 read and written and 2 MB of weights written, at 34 MB/s
            ("model FLOPs plus AdamW's bytes", report.floor_ms(case, run, ceilings), 64 + 1000),
            ("with PyTorch's matmul", report.floor_ms(case, run, {**ceilings, "matmul_flops": 4e9}), 32 + 1000),
            ("in FP32 without a master copy", report.floor_ms(case, fp32, ceilings), 64 + 32e6 / 34e6 * 1000)):
        expect_near(found, expected, f"floor: {which}")
    expect_equal(report.floor_ms(case, run, {}), None, "no floor without the rate of a copy")
    row = cells(results, report.speed, ["gpt2", "ours, BF16"])
    expect(row[4:8] == ["15.0 (10.0 to 90.0)", f"{128 / 0.015:,.0f}", "426.7 %", "2.00x PyTorch fused"]
           and row[9] == "10 MISSED", "speed table: median, range, tokens/s, MFU, speed-up, goal", str(row))

    # Embedding: writes and reads 64 rows of 8 values of 2 bytes, twice per step. Cross-entropy: V padded to 256.
    moved = report.kernel_bytes(run, 16)
    expect(moved["embedding_forward"] == 2 * 64 * 8 * 2 and moved["cross_entropy"] == 2 * 64 * 256 * 2
           and moved["adamw"] == 2 * 4e6 + 6 * 4e6 + 2e6, "minimum bytes moved by kernels")
    total = 2 * (moved["embedding_forward"] + moved["cross_entropy"]) + moved["norm_partials"] + moved["adamw"]
    expect_near(report.memory_bound_rate(case, run), total / 60e-6, "bandwidth of the memory-bound kernels together")
    expect_near(report.idle_fractions(run)[0], 1 - 180 / 290, "idle time in the traced step")
    expect_near(report.idle_fractions(run)[1], 1 - 0.18 / 15, "idle time in the other steps")
    forward = 2 * 2 * 4 * 2048**2 * 64
    rates = report.attention_rates(results["attention"]["64/2048"], {"forward_s": 1, "backward_s": 6})
    expect_equal(rates, (forward, forward / 2), "attention's FLOPs: T * T / 2 pairs, backward 2.5 times forward")
    text = "\n".join(report.attention(results))
    expect("2.00x" in text and "1.33x" in text and "cuDNN, T = 2048: no kernel" in text,
           "attention is compared with the fastest backend; a failed backend is named", text)


def test_goals():
    rows = {row: cells(made_up_results(), report.goals, [row])[2] for row in report.GOALS}
    expect_equal([*rows.values()][:4], ["8,533 tokens/s, 426.7 % MFU", "not measured", "4.29 / 68.7 TFLOP/s",
                                        "5.01 / 80.2 TFLOP/s"], "the goals table has the measured values")
    expect("not measured" not in [*rows.values()][4:], "the goals table has bandwidth and idle time", str(rows))
    lines = (HERE.parents[1] / "README.md").read_text().splitlines()
    missing = [row for row, goal in report.GOALS.items()
               if not any(line.startswith(f"| {row} | {goal} |") for line in lines)]
    expect_equal(missing, [], "README.md's table has the report's rows and goals")


# ---- Whole runs, with fake programs that print what PyTorch and llm.c print

FAKE_PYTHON = """#!/usr/bin/env python3
import json, os, sys, time
if sys.argv[1] == "-c":
    print("0.0.fake")
    sys.exit()
if "FAKE_PID" in os.environ:
    open(os.environ["FAKE_PID"], "w").write(str(os.getpid()))
    time.sleep(120)
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
print(json.dumps(answer))
"""
BROKEN_PYTHON = '#!/bin/sh\n[ "$1" = -c ] && echo 0.0.fake && exit\necho it broke >&2\nexit 3\n'
FAKE_LLMC = """#!/usr/bin/env python3
import os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.path.exists(flags["-i"]) and flags["-e"] in ("d2", "d4") and flags["-d"] == "512", flags
if int(flags["-b"]) > 1:
    sys.exit("[CUDA ERROR] at file x:1:\\nout of memory")
for i in range(int(flags["-x"])):
    print(f"step {i + 1:4d}/{flags['-x']} | loss 6.000000 (+nanz)| norm 1.0000 (+nanz)| lr 1e-04 | 12.50 ms | x")
"""


def start(out, *arguments, **environment):
    """Starts bench.py in the current folder, with the fake programs."""
    for name, text in (("bin/python", FAKE_PYTHON), ("bin/broken", BROKEN_PYTHON)):
        write(name, text, 0o755)
    python = [] if "--python" in arguments else ["--python", "bin/python"]
    # Restores SIGINT, which a shell's background jobs ignore.
    return subprocess.Popen([sys.executable, HERE / "bench.py", *arguments, "--ours", ours, *python, "--out", out],
                            text=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def end(process, out, timeout=TIMEOUT):
    """Returns exit status, errors, report.md, results.json."""
    try:
        errors = process.communicate(timeout=timeout)[1]
    finally:
        process.kill()
    text, results = (Path(out, name) for name in ("report.md", "results.json"))
    return process.returncode, errors, *((text.read_text(), json.loads(results.read_text())) if text.exists() else
                                         ("", {}))


def run(out, *arguments):
    return end(start(out, *arguments), out)


def test_cpu():
    code, errors, text, results = run("cpu", "--cases", "shakespeare", "--threads", "1")
    case = results["cases"]["shakespeare"]
    expect(code == 0 and report.best_peer(case) == "PyTorch fused, BF16" and len(case["runs"]) == 4,
           "make bench runs PyTorch in every configuration", errors)
    failed = dict(results["not_run"])
    expect(sum("no C++ compiler" in why for why in failed.values()) == 2 and len(failed) == 2
           and "no C++ compiler" in text, "each configuration that fails is named once", str(failed))
    expect("## Goals" not in text, "a CPU's report has no GPU goals")


def test_trouble():
    for options, words in (("--cases gpt9", "--cases gpt9: expected some of 124M-T64"),
                           ("--minutes 0", "--minutes 0"), ("--ours /nowhere", "--ours /nowhere"),
                           ("--threads 0", "--threads 0")):
        code, errors, _, results = run("bad", *options.split())
        expect(code == 2 and words in errors and errors.count("\n") == 1 and not results,
               f"bench.py {options} is rejected", errors)
    options = ["--cases", "shakespeare"]
    code, errors, text, results = run("no-peers", *options, "--python", "bin/broken")
    expect(code == 0 and "it broke" in text and len(results["not_run"]) == 5 and "| shakespeare | ours" in text,
           "peers that fail are named and ours are measured", errors)
    text = run("late", *options, "--minutes", "0.0001")[2]
    expect("| 0 s were left |" in text, "runs without time left are named", text)

    pid = Path("pid").absolute()
    process = start("interrupted", *options, FAKE_PID=str(pid))
    wait_for(lambda: pid.exists() and pid.read_text(), 120)
    process.send_signal(signal.SIGINT)
    code, errors, text, _ = end(process, "interrupted", 60)
    expect(code == 1 and "| the rest | interrupted |" in text and "| shakespeare | ours" in text,
           "Ctrl-C exits with 1, and the report keeps the measurements", errors)
    expect(not os.path.exists(f"/proc/{pid.read_text()}"), "Ctrl-C kills the running program")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    run_tests(globals())

#!/usr/bin/env python3
"""Tests the benchmarks: the report's arithmetic on made-up measurements, the goals in README.md, and make bench on the
CPU with a fake PyTorch. dev/gpu/test_run.py tests the runs for a GPU, with the fake programs of this file.

    python3 dev/bench/test_bench.py --ours ./train_gpt      # a CPU build
"""
import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))
import bench
import bench_report as report
from testing import expect, expect_equal, run_tests, wait_for, write


KERNELS = [("embedding_forward", "forward", 2, 0.02), ("matmul", "forward", 2, 0.04),
           ("cross_entropy", "forward", 2, 0.02), ("matmul", "backward", 2, 0.08),
           ("norm_partials", "update", 1, 0.005), ("adamw", "update", 1, 0.015)]
BYTES = {"weights": 2e6, "gradients": 4e6, "master": 4e6, "adam_m": 4e6, "adam_v": 4e6}


def made_up_results():
    kernels = [dict(zip(("name", "pass", "launches", "ms"), values)) for values in KERNELS]
    run = {"kind": "ours", "ms": [90, 10, 20, 15, 10], "peak_bytes": 300e6, "planned_bytes": 50e6, "micro_batch": 4,
           "plan": {"precision": "bf16", "bytes": BYTES, "flops_per_token": {"model": 1e6}},
           "record": {"peak_flops": 2e10, "device": "x", "peak_source": "y",
                      "model": {"layers": 2, "channels": 8, "vocab": 200}},
           "trace": {"busy_ms": 0.18, "kernels": kernels}}
    peers = {name: {"kind": "PyTorch", "ms": ms, "micro_batch": 4, "peak_bytes": 7e8}
             for name, ms in {"PyTorch untuned": [50, 50], "PyTorch fused, BF16": [30, 31, 29]}.items()}
    case = {"name": "gpt2", "seq_len": 16, "tokens": 128, "goals": {}, "runs": {"ours, BF16": run, **peers}}
    backends = {"flash": {"forward_s": 2e-3, "backward_s": 2e-3}, "cuDNN": {"error": "no kernel"}}
    attention = {f"64/{T}": {"B": 2, "T": T, "NH": 4, "HS": 64, "ours": {"forward_s": 1e-3, "backward_s": 2e-3},
                             "torch": backends} for T in (2048, 8192)}
    return {"about": {"suite": "gpu", "dry": False}, "cases": {"gpt2": case}, "attention": attention, "not_run": [],
            "ceilings": {"copy_bytes_per_s": 34e6}}


def test_arithmetic():
    results = made_up_results()
    case, ceilings = results["cases"]["gpt2"], results["ceilings"]
    run = case["runs"]["ours, BF16"]
    fp32 = {**run, "plan": {**run["plan"], "precision": "fp32", "bytes": {**BYTES, "weights": 4e6, "master": 0}}}
    expect_equal([report.best_peer(case, each) for each in (run, fp32)], ["PyTorch fused, BF16", "PyTorch untuned"],
                 "the fastest peer; for a run in FP32, the fastest in FP32")
    # 128 tokens of 1 MFLOP at 20 or 4 GFLOP/s; 32 MB of FP32 read and written and 2 MB of weights written, at 34 MB/s
    expect_equal([round(report.floor_ms(case, *each), 9) for each in (
        (run, ceilings), (run, {**ceilings, "matmul_flops": 4e9}), (fp32, ceilings))],
        [6.4 + 1000, 32 + 1000, round(6.4 + 32e6 / 34e3, 9)],
        "the floor: ours; with PyTorch's matmul; in FP32 without a master copy")
    expect_equal(report.speed_table(results)[1][0], ["gpt2", "ours, BF16", "4 x 16", "15.0 (10.0 to 90.0)", "-",
                 "1,006 (67.09)", "2.00", "8,533", "42.7 %", "300 MB", "50.0 MB"], "the table's row of our program")
    # Embedding: writes and reads 64 rows of 8 values of 2 bytes, twice per step. Cross-entropy: V padded to 256.
    moved = report.kernel_bytes(run, 16)
    expect(moved["embedding_forward"] == 2 * 64 * 8 * 2 and moved["cross_entropy"] == 2 * 64 * 256 * 2
           and moved["adamw"] == 2 * 4e6 + 6 * 4e6 + 2e6, "minimum bytes moved by kernels")
    total = 2 * (moved["embedding_forward"] + moved["cross_entropy"]) + moved["norm_partials"] + moved["adamw"]
    expect_equal(round(report.bandwidth(case, run, run["trace"]["kernels"])), round(total / 60e-6),
                 "bandwidth of the memory-bound kernels")
    forward = 2 * 2 * 4 * 2048**2 * 64
    rates = report.attention_rates(results["attention"]["64/2048"], {"forward_s": 1, "backward_s": 6})
    expect_equal(rates, (forward, forward / 2), "attention's FLOPs: T * T / 2 pairs, backward 2.5 times forward")
    text = report.report(results)
    for row in ("| 68.7 TFLOP/s | 34.4 TFLOP/s | - | 2.00 |",
                "| GPT-2 1558M | ≥ 60k tokens/s, 60 % MFU | not measured |",
                "| attention forward, T = 2k / 8k | ≥ 370 / 460 TFLOP/s | 4.29 / 68.7 TFLOP/s |",
                "| idle time between kernels | < 2 % of a step | 98.8 % |",
                "| gpt2 | cross_entropy | forward | 0.0100 | 1 | 11.1 % | 6.55 GB/s | 19275 % |"):
        expect(row in text, f"the report has the row {row}", text)


def test_goals():
    lines = (HERE / "README.md").read_text()
    rows = [f"| {row} | {goal} |" for row, goal in report.GOALS.items()]
    rows += [f"T={case.seq_len}, {precision.upper()} | {goal} |" for case in bench.SUITES["cpu"].cases
             for precision, goal in case.goals.items()]
    expect_equal([row for row in rows if row not in lines], [], "README.md's tables have the code's rows and goals")


# ---- Whole runs, with fake programs that print what PyTorch and llm.c print

FAKE_PYTHON = """#!/usr/bin/env python3
import json, os, sys, time
if sys.argv[1] == "-c":
    print("0.0.fake")
    sys.exit()
what, o = sys.argv[3], json.loads(sys.argv[4])
if "FAKE_PID" in os.environ and what == "train":
    open(os.environ["FAKE_PID"], "w").write(str(os.getpid()))
    time.sleep(120)
print("a line of PyTorch's own")
if what == "train":
    if o["compile"]:
        sys.exit("no C++ compiler")
    if o["micro_batch"] > 2:
        sys.exit("torch.OutOfMemoryError: out of memory")
    assert o["accumulation"] * o["micro_batch"] * o["seq_len"] in (512, 768), o
    ms = 500 / (1 + o["fused"] + 2 * o["bf16"])
    answer = {"ms": [9000] + [ms] * (o["steps"] - 1), "peak_bytes": 1e9}
else:
    backends = {"flash": {"forward_s": 1, "backward_s": 2}}
    answer = {"copy_bytes_per_s": 1e10, "matmul_flops": 1e11, "attention": [backends for _ in o["attention"]]}
print(json.dumps(answer))
"""
FAKE_LLMC = """#!/usr/bin/env python3
import os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.path.exists(flags["-i"]) and flags["-e"] in ("d2", "d4") and flags["-d"] == "512", flags
if int(flags["-b"]) > 1:
    sys.exit("[CUDA ERROR] at file x:1:\\nout of memory")
print("device memory usage: 40409 MiB / 81075 MiB")
for i in range(int(flags["-x"])):
    print(f"step {i + 1:4d}/{flags['-x']} | loss 6.000000 (+nanz)| norm 1.0000 (+nanz)| lr 1e-04 | 12.50 ms | x")
"""


def start(out, *options, **environment):
    """Starts bench.py, with the fake PyTorch. Restores SIGINT, which a shell's background jobs ignore."""
    write("python", FAKE_PYTHON, 0o755)
    return subprocess.Popen([sys.executable, HERE / "bench.py", "--ours", ours, "--out", out, "--torch", "./python",
                             *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, **environment},
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def test_make_bench():
    process = start("cpu", "--cases", "shakespeare")
    output = process.communicate(timeout=300)[0]
    text, results = Path("cpu/report.md").read_text(), json.loads(Path("cpu/results.json").read_text())
    runs = results["cases"]["shakespeare"]["runs"]
    expect(process.returncode == 0 and "bench: 9 runs, about " in output and "run 9 of 9" in output,
           "make bench says how many runs it has and how long they take, and numbers them", output)
    expect_equal({name: len(run["ms"]) for name, run in runs.items()},
                 {"ours, FP32": 80, "PyTorch untuned": 80, "PyTorch fused AdamW": 80},
                 "the table has our program and PyTorch's configurations of this precision, in two rounds")
    expect("| PyTorch fused AdamW | 1 x 64 | 250 (250 to 250) |" in text and "250 (250 to 250)" in output,
           "the table is printed and written; a micro-batch that does not fit is halved", output)
    expect_equal(results["not_run"], [["shakespeare: PyTorch fused, compiled", results["not_run"][0][1]]],
                 "a configuration that fails is named once")
    expect("no C++ compiler" in text, "the reason of a failure is in the report", text)


def test_trouble():
    for options, words in ((["--cases", "gpt9"], "gpt9"), (["--ours", "/nowhere"], "/nowhere"),
                           (["--out", "/proc/x"], "/proc/x")):
        output = (process := start("bad", *options)).communicate(timeout=60)[0]
        expect(process.returncode == 2 and words in output.splitlines()[-1], f"bench.py {options} is rejected", output)
    process = start("interrupted", "--cases", "shakespeare", FAKE_PID="pid")
    wait_for(lambda: os.path.exists("pid") and Path("pid").read_text(), 120)
    process.send_signal(signal.SIGINT)
    output, pid = process.communicate(timeout=60)[0], Path("pid").read_text()
    text = Path("interrupted/report.md").read_text()
    expect(process.returncode == 1 and "| the rest | interrupted |" in text and "| shakespeare | ours, FP32 |" in text,
           "Ctrl-C exits with 1, and the report has the measurements until then", output)
    expect(not os.path.exists(f"/proc/{pid}"), "Ctrl-C kills the running program")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    run_tests(globals())

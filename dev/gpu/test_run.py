#!/usr/bin/env python3
"""Tests the kit: all steps with CPU programs, then planted faults, each of which must be named while other steps run.

    python3 dev/gpu/test_run.py build/gpu-kit-cpu       # built by make gpu-kit DEVICE=cpu
"""
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "bench")]
import bench_report
import run as kit_run
from test_bench import FAKE_LLMC, FAKE_PYTHON
from testing import expect, expect_equal, run_tests, write

NVIDIA_SMI = "#!/bin/sh\necho NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, 1980 MHz, 700.00 W, 9.0\n"
# Runs the program; {} is its verdict on racecheck.
SANITIZER = """#!/bin/sh
tool=$2
shift 4
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
[ $tool = racecheck ] || exit 0
{}
"""
STUDY = "#!/bin/sh\necho '| step | error |'\necho '| ---- | ----: |'\n"
ESTIMATES = {"card": "h100", "estimate_range": [0.79, 1.27], "matmuls": [],
             "kernels": [{"range": "adamw", "launches": 1, "estimate_us": 5.0}]}


def run_kit(folder, *words, **files):
    """Runs the kit in `folder`, with programs of the folder tools in PATH; returns exit code, output and report."""
    out = Path(folder, "out")
    path = f"{Path('tools').absolute()}:{os.environ['PATH']}"
    done = subprocess.run([f"{folder}/run.sh", f"OUT={out}", "BUDGET=3000",
                           "TESTS=kernels: gelu,kernels: bias,graphs,runs: plan,bad,memory", *words],
                          text=True, capture_output=True, timeout=3600,
                          env={**os.environ, "PATH": path, "PYTHON": str(Path("tools/python").absolute()),
                               "LLMC": str(Path("tools").absolute()) if os.path.exists("tools") else ""})
    report = out / "report.md"
    return done.returncode, done.stdout + done.stderr, report.read_text() if report.exists() else ""


def results(report):
    """Returns {step: result} of a report's table."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[0] in kit_run.STEPS}


def plant(folder, **files):
    """Copies the kit, with other contents of some files."""
    subprocess.run(["cp", "-al", kit, folder], check=True)
    for name, text in files.items():
        Path(folder, name).unlink(missing_ok=True)
        write(f"{folder}/{name}", text, 0o755)


def test_all_steps():
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("compute-sanitizer", SANITIZER), ("python", FAKE_PYTHON),
                       ("train_gpt2cu", FAKE_LLMC)):
        write(f"tools/{name}", text.format("exit 0") if text is SANITIZER else text, 0o755)
    plant("good", study_matmul=STUDY, study_cross_entropy=STUDY)
    write("good/estimates.json", json.dumps(ESTIMATES))
    code, output, report = run_kit("good")
    found = results(report)
    expect_equal([*found], [*kit_run.STEPS], "every step is in the report, in order")
    expect(code == 0 and not any(result.startswith(("FAILED", "skipped")) for result in found.values()),
           "every step succeeds with CPU programs", output)
    expect(output.splitlines()[-len(found) - 1].split() == ["step", "seconds", "result"] and "H100" in found["env"],
           "the summary comes last and names the card", output)
    expect(all(f"## {title}" in report for title in ("Speed", "Where a step goes", "Attention alone",
                                                     "Kernels of a micro-batch", "Study: matmul"))
           and "| adamw | " in report and "tiny-2 fp8-all" in report and "PyTorch fused, BF16" in report,
           "the report has the tables of speed, kernels, peers and studies", report)
    numbers = json.loads(tarfile.open("good/out/logs.tgz").extractfile("logs/results.json").read())
    runs = numbers["cases"]["tiny-2"]["runs"]
    expect_equal({name: run["micro_batch"] for name, run in runs.items()},
                 {"ours, BF16": 4, "PyTorch fused, BF16": 2, "llm.c": 1},
                 "a peer's micro-batch is halved until it fits in memory")
    ours = runs["ours, BF16"]
    missing = {*bench_report.kernel_bytes(ours, 64)} - {kernel["name"] for kernel in ours["trace"]["kernels"]}
    expect_equal(missing, set(), "a trace of ./train_gpt contains every kernel in kernel_bytes()")
    elements = ours["plan"]["bytes"]["adam_m"] / 4
    expect(ours["planned_bytes"] > 12 * elements and ours["peak_bytes"] > ours["planned_bytes"],
           "peak memory exceeds the planned bytes")
    expect(len(numbers["attention"]) == 4 and all(seconds > 0 for point in numbers["attention"].values()
                                                  for seconds in point["ours"].values()), "attention alone is timed")
    attention = report[report.index("## Study: attention"):report.index("## Study: matmul")]
    expect("T 64: " in attention and "train_gpt.cu: wgmma" in attention and "naive" not in attention,
           "the study of attention runs only the selected steps and lengths", attention)
    names = tarfile.open("good/out/logs.tgz").getnames()
    expect({"logs/smoke-hs64.txt", "logs/racecheck.txt", "logs/study-matmul.txt", "logs/results.json"} <= {*names} and
           sum("train_gpt-train" in name for name in names) >= 10, "logs.tgz has all logs", str(names))


def test_planted_faults():
    losses = json.loads(Path(kit, "expected.json").read_text())
    losses["hs64"][3] *= 1.1
    write("tools/compute-sanitizer", SANITIZER.format('echo "========= RACECHECK SUMMARY: 1 hazard displayed"\nexit 9'),
          0o755)
    plant("faulty", study_attention="#!/bin/sh\nsleep 1000 & sleep 1000\n",
          test_fp32='#!/bin/sh\n[ "$1" = --list ] && echo "kernels: gelu" || kill -SEGV $$\n',
          test_bf16='#!/bin/sh\n[ "$1" = --list ] && echo "kernels: bias" && exit\n'
                    'echo "FAILED  a sum (3, expected 4)"\nexit 1\n',
          **{"expected.json": json.dumps(losses)})
    code, output, report = run_kit("faulty", "LIMIT=40", "smoke", "studies", "tests", "sanitize", "env")
    found = results(report)
    for step, words in (("smoke", "FAILED: hs64: losses differ by up to 9"),
                        ("studies", "FAILED: attention: not finished after 40 s"),
                        ("tests", "fp32 kernels: gelu: exit code -11"),
                        ("tests", "bf16 kernels: bias: a sum (3, expected 4)"),
                        ("sanitize", "FAILED: racecheck: exit code 9, 1 hazard"), ("env", "NVIDIA H100")):
        expect(words in found.get(step, ""), f"{step}: a fault is named, and other steps run: {words}", output)
    expect(code == 1, "a failed step leads to exit code 1", str(code))
    expect("study-cross_entropy: no time was left" in found["studies"], "what a hang prevented is named",
           found["studies"])


def test_missing():
    plant("missing", train_gpt="#!/bin/sh\nexit 3\n")
    write("tools/ldd", "#!/bin/sh\necho 'libcublasLt.so.13 => not found'\n", 0o755)
    code, output, report = run_kit("missing", "env", "speed", "trace")
    os.remove("tools/ldd")
    found = results(report)
    expect(code == 1 and "libcublasLt.so.13 was not found" in found["env"], "a missing library is named", output)
    expect("FAILED" in found["speed"] and "exit code 3" in found["speed"], "a program that fails is named", output)
    shutil.rmtree("tools")
    code, output, report = run_kit("good", "peers", "sanitize")
    expect(code == 0 and {*results(report).values()} ==
           {"skipped: PyTorch is not installed", "skipped: compute-sanitizer is not installed"},
           "steps whose tools are missing are skipped by name", output)


def test_usage():
    for words, expected in ((["nothing"], "nothing: expected a step (env, smoke"), (["BUDGET=x"], "BUDGET=x: expected"),
                            (["LIMIT="], "LIMIT=: expected"), (["OUT=/proc/x"], "OUT=/proc/x: ")):
        code, output, _ = run_kit("good", *words)
        expect(code == 2 and expected in output and output.count("\n") == 1, f"{words[0]} is rejected", output)
    code, output, _ = run_kit("good", "--help")
    expect(code == 0 and all(f"  {step} " in output for step in kit_run.STEPS), "--help lists all steps", output)
    code, output, report = run_kit("good", "TESTS=nothing", "tests")
    expect(code == 1 and results(report)["tests"] == "FAILED: no test has such a name", "TESTS=nothing fails", output)
    code, output, report = run_kit("good", "BUDGET=2", "smoke", "env")
    expect(code == 1 and results(report)["env"] == "FAILED: no time was left", "a step without time is named", output)


def test_comparison():
    kernels = [{"pass": "forward", "name": "gelu", "launches": 4, "ms": 0.08}, {"pass": "update", "name": "adamw",
               "launches": 1, "ms": 0.03}, {"pass": "forward", "name": "matmul", "launches": 4, "ms": 1.0}]
    product = {"m": 2, "n": 3, "k": 4, "accumulate": False, "epilogue": "bias", "estimate_us": 90.0}
    estimates = {"kernels": [{"range": "gelu", "launches": 2, "estimate_us": 15.0}],
                 "matmuls": [product, {**product, "m": 5, "epilogue": "none", "accumulate": True}]}
    traced = {"trace": {"kernels": kernels, "matmuls_us": [100, 200, 300, 400]}}
    expect_equal(kit_run.compare_kernels(traced, 2, estimates),
                 [("matmul 5 x 3 x 4 + C", 1, 300.0, 90.0), ("matmul 2 x 3 x 4, bias", 1, 200.0, 90.0),
                  ("adamw", 1, 30.0, None), ("gelu", 2, 40.0, 30.0)],
                 "kernels are compared per micro-batch, matmuls by shape, the update per step")
    traced["trace"]["matmuls_us"].append(500)
    expect_equal(kit_run.compare_kernels(traced, 2, estimates)[0], ("matmul", 2, 750.0, 180.0),
                 "matmuls in another order are compared together")


if __name__ == "__main__":
    kit = os.path.abspath(sys.argv[1])
    run_tests(globals())

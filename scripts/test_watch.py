#!/usr/bin/env python3
"""Tests of plot.py and board.py with generated logs of finished and running runs.

    python3 scripts/test_watch.py       # needs the packages matplotlib, tensorboard and wandb
"""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "dev/tests"))
import plot
from testing import expect, expect_equal, run_tests, wait_for, write
from runs import read_run, summary

TOKENS = 512        # tokens per step in these logs
END = {"end": "complete"}
GPT2 = {"layers": 12, "heads": 12, "channels": 768, "context": 1024, "vocab": 50257, "parameters": 124439808}
SMALL = {"layers": 2, "heads": 4, "channels": 128, "context": 64, "vocab": 256, "parameters": 437760}


# ---- generated logs

def run_line(steps, model=SMALL, data="data/shakespeare.txt", **options):
    return {"run": {"options": {"steps": steps, "data": data, **options}, "model": model,
                    "flops_per_token": {"model": 1000.0}}}


def loss_of(step, shift=0.0):
    return 5.5 / (1 + 0.01 * step) ** 0.4 + shift


def step_line(step, shift=0.0, ms=20.0):
    return {"step": step, "loss": loss_of(step, shift), "norm": 1.0, "lr": 1e-3, "ms": ms,
            "tokens_per_s": TOKENS * 1000 / ms, "mfu": 0.4, "hfu": 0.5}


def lines_of(steps, first=1, hellaswag=False, **more):
    """Returns log lines of the steps from `first` to `steps`, with a validation loss every 50 steps."""
    lines = []
    for step in range(first, steps + 1):
        lines.append(step_line(step, **more))
        if step % 50 == 0:
            lines.append({"step": step, "val_loss": lines[-1]["loss"] + 0.1})
            lines += [{"step": step, "hellaswag": 0.25 + 0.0001 * step}] * hellaswag
    return lines


def log(folder, lines, tail="", before=""):
    """Writes the log of a run; returns its folder."""
    write(f"{folder}/log.jsonl", before + "".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def start(name, *options, **environment):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", **environment}
    return subprocess.Popen([sys.executable, HERE / name, *map(str, options)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment)


def expect_ends(process, code, words, text):
    """Expects an exit code and `words` in the output. If the code is not 0, expects them in a message of one line."""
    output, errors = process.communicate(timeout=120)
    right = errors.count("\n") == 1 and words in errors if code else words in output
    expect(process.returncode == code and right, text, f"exit {process.returncode}: {output[-300:]} {errors[-900:]}")


def is_png(path):
    """Returns whether the file is a complete PNG."""
    data = Path(path).read_bytes() if os.path.exists(path) else b""
    return data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")


# ---- the log

def test_log():
    run = read_run(log("partial", [run_line(100), *lines_of(60)], '{"step": 61, "lo'))
    expect(run.last == 60 and not run.end and run.series("val_loss").keys() == {50},
           "a last line without a newline is ignored")
    tokens, seconds = run.progress()[60]
    expect(tokens == 60 * TOKENS and math.isclose(seconds, 1.2), "progress() sums tokens and seconds")
    run = read_run(log("resumed", [run_line(100), *lines_of(60), END, *lines_of(55, first=41, shift=1.0)]))
    expect(not run.end and "step 55 of 100," in summary(run) and "step 55," in summary(read_run(log(
        "more", [run_line(50), *lines_of(55)]))), "a run that resumed has not ended; it may exceed its first --steps")
    expect_equal(run.series("loss"), {step: loss_of(step, float(step > 40)) for step in range(1, 56)},
                 "the steps of a resumed run replace the earlier ones")
    expect_equal(run.progress()[55][0], 55 * TOKENS, "a repeated step counts once")
    run = read_run(log("sparse", [run_line(10), step_line(5), {**step_line(10), "loss": None}]))
    expect(run.progress()[10][0] == 10 * TOKENS, "progress() counts steps that were not logged")
    expect(math.isnan(run.series("loss")[10]), "a loss of null is NaN")
    for line in ("step 3", "[1, 2]", '{"step": 1, "loss": "x"}'):
        log("broken", [run_line(9), step_line(1)], f"{line}\n" + json.dumps(step_line(2)) + "\n")
        expect_ends(start("plot.py", "broken"), 2, "line 3", f"the line {line} is rejected with its number")


# ---- plot.py

def test_plot():
    a = log("first", [run_line(400), *lines_of(400), END])
    b = log("second", [run_line(400), *lines_of(300, ms=30.0, shift=0.2, hellaswag=True)])
    expect_ends(start("plot.py", a), 0, f"{a}/plot.png", "without --out, plot.py writes plot.png to the run's folder")
    expect(is_png(f"{a}/plot.png") and sorted(os.listdir(a)) == ["log.jsonl", "plot.png"],
           "plot.py leaves no temporary file")
    expect_ends(start("plot.py", a, b, "--x", "time", "--out", "two.html"), 0, "two.html", "--out x.html writes a page")
    page = Path("two.html").read_text()
    expect("data:image/png;base64," in page and "step 400 of 400" in page and "second: step 300" in page,
           "the page has a picture and each run's latest numbers")
    expect_ends(start("plot.py", "--watch", a), 0, f"{a}/plot.html", "--watch writes plot.html and ends with the run")
    for text, path in (("without --watch, the page", "two.html"), ("the page of a finished run", f"{a}/plot.html")):
        expect("refresh" not in Path(path).read_text(), f"{text} does not reload itself")
    log("empty", [run_line(3)])
    log("old", [step_line(1), step_line(2)])
    for options, words in (("none", "none/log.jsonl"), ("empty", "no step"), (f"{a} --out x.doc", "--out x.doc"),
                           (f"{a} --out none/x.png", "--out none/x.png"), ("old --x flops", "flops_per_token")):
        expect_ends(start("plot.py", *options.split()), 2, words, f"plot.py {options} is rejected")


def test_figures():
    """Inspects the objects of matplotlib's figure."""
    small = read_run(log("small", [run_line(100), *lines_of(100)]))
    web = read_run(log("web", [run_line(100, GPT2, "data/openwebtext/*train*.bin"), *lines_of(100, hellaswag=True)]))
    edu = read_run(log("edu", [run_line(100, GPT2, "data/fineweb-edu/*.bin"), *lines_of(100)]))
    loss, accuracy = {"124M": 3.12}, {"124M": 0.2955}
    for run, expected, text in ((small, ({}, {}), "no line for a small model"),
                                (web, (loss, accuracy), "loss and HellaSwag for a run on OpenWebText"),
                                (edu, ({}, accuracy), "only HellaSwag for a run on other data")):
        expect_equal(plot.references([run]), expected, f"GPT-2's published results: {text}")
    for x, expected in {"steps": 100, "tokens": 51200, "time": 2.0, "flops": 5.12e7}.items():
        last = plot.plot([small], x).axes[0].lines[1].get_xdata()[-1]
        expect(math.isclose(last, expected), f"--x {x}: the last step is at {expected}", str(last))
    labels = ["loss, nats per token", "HellaSwag, acc_norm", "learning rate", "tokens per second"]
    expect_equal([axis.get_ylabel() for axis in plot.plot([small, web]).axes], labels, "each quantity has a panel")
    expect_equal(len(plot.plot([small]).axes), 3, "without HellaSwag results there is no panel for them")
    noisy = [{**line, "batch": 512, "noise_scale": 700.0} for line in lines_of(49)]
    axis = plot.plot([read_run(log("noisy", [run_line(49), *noisy]))]).axes[2]
    expect_equal([{*line.get_ydata()} for line in axis.lines], [{700.0}, {512.0}],
                 "a run with the gradient noise scale has a panel for it and for the batch")
    low, high = plot.plot([web]).axes[0].get_ylim()
    expect(low < 3.12 < high, "the lines of GPT-2's losses are within the axis")
    overfit = [line if "loss" in line else {"step": line["step"], "val_loss": 3 + line["step"] / 20}
               for line in lines_of(150)]
    low, high = plot.plot([read_run(log("overfit", [run_line(150), *overfit]))]).axes[0].get_ylim()
    expect(low < loss_of(150) and 10.5 < high < 11, "a validation loss that rises is within the axis", str(high))
    high = plot.plot([read_run(log("steep", [run_line(150), {**step_line(1), "loss": 40.0}, *lines_of(150, first=2)]))]
                     ).axes[0].get_ylim()[1]
    expect(high < 8, "a first training loss far above the others is clipped", str(high))
    lines = lines_of(100)
    lines[10]["tokens_per_s"] = 1e9
    axis = plot.plot([read_run(log("spike", [run_line(100), *lines]))]).axes[-1]
    expect(axis.get_ylim()[1] < 1e5 and [*axis.lines[2].get_xdata()] == [11] and "1 faster" in axis.get_title("right"),
           "one very fast step is clipped and marked", str(axis.get_ylim()))
    expect_equal([*plot.plot([small]).axes[0].lines[2].get_xdata()], [50, 100], "validation losses: at their steps")


def test_watch():
    log("a", [run_line(100), *lines_of(10)])
    process = start("plot.py", "--watch", "a", "b", "--every", 0.2, "--out", "live.png")
    try:
        expect(wait_for(lambda: is_png("live.png")), "--watch draws the runs that have started")
        first = os.stat("live.png").st_mtime_ns
        log("a", lines_of(50, first=11), '{"step": 51,', Path("a/log.jsonl").read_text())
        expect(wait_for(lambda: os.stat("live.png").st_mtime_ns != first), "--watch draws again when a log grows")
        log("a", [run_line(100), *lines_of(100), END])
        log("b", [run_line(20, minutes=0.5), *lines_of(70)])
        expect(not wait_for(lambda: process.poll() is not None, 1), "--watch continues while a run is not finished")
        log("b", [{"end": "signal"}], before=Path("b/log.jsonl").read_text())
        expect_ends(process, 0, "a: step 100 of 100", "--watch ends when all runs have logged their end")
    finally:
        process.kill()


# ---- board.py

def scalars(folder):
    """Returns {tag: {step: value}} as TensorBoard reads it. Each step occurs once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        found[tag] = {event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)}
        assert len(found[tag]) == len(events.Tensors(tag)), f"{tag}: a step occurs twice"
    return found


def expect_series(found, expected, text):
    """Expects two equal dicts {step: value}, up to FP32 rounding."""
    expect(found.keys() == expected.keys() and all(math.isclose(found[s], expected[s], rel_tol=1e-6) for s in expected),
           text, str(found)[:100])


def test_tensorboard():
    log("c", [run_line(100), *lines_of(100, hellaswag=True)])
    expect_ends(start("board.py", "c"), 0, "tensorboard --logdir", "board.py prints the command that shows the board")
    found = scalars("c/board/gpt.cu")
    expect_series(found["loss/train"], {s: loss_of(s) for s in range(1, 101)}, "TensorBoard shows each loss")
    expect_series(found["hellaswag/acc_norm"], {50: 0.255, 100: 0.26}, "TensorBoard shows HellaSwag")
    expect({"loss/validation", "optimizer/norm", "optimizer/lr", "speed/tokens_per_s", "speed/mfu"} <= found.keys(),
           "TensorBoard shows the other quantities", str(found.keys()))
    process = start("board.py", "--watch", "d", "--every", 0.2)
    try:
        log("d", [run_line(100), *lines_of(70)], '{"step"')
        expect(wait_for(lambda: os.path.isdir("d/board/gpt.cu") and
                        len(scalars("d/board/gpt.cu").get("loss/train", ())) == 70),
               "--watch writes the steps logged so far")
        log("d", [run_line(100), *lines_of(70), *lines_of(100, first=51, shift=1.0), END])     # resumed from step 50
        expect_ends(process, 0, "d: step 100 of 100", "--watch ends with the run")
    finally:
        process.kill()
    expect_series(scalars("d/board/gpt.cu")["loss/train"], {s: loss_of(s, float(s > 50)) for s in range(1, 101)},
                  "TensorBoard shows the later steps of a resumed run")


def test_wandb():
    log("e", [run_line(50), *lines_of(50)])
    expect_ends(start("board.py", "e", "--wandb", "tests"), 0, "e: step 50 of 50", "--wandb works offline")
    data = next(Path("e/wandb").glob("offline-run-*/*.wandb")).read_bytes()
    expected = ["tests", "loss/validation", *(json.dumps(loss_of(step)) for step in range(1, 51))]
    expect_equal([text for text in expected if text.encode() not in data], [],
                 "--wandb writes the project and each step's loss")


def test_missing():
    log("f", [run_line(10), *lines_of(10)])
    for name, package, options in (("board.py", "tensorboard", []), ("board.py", "wandb", ["--wandb", "x"]),
                                   ("plot.py", "matplotlib", []), ("plot.py", "numpy", [])):
        write(f"without/{package}/{package}.py", f'raise ImportError("No module named {package!r}")')
        expect_ends(start(name, "f", *options, PYTHONPATH=f"without/{package}"), 2,
                    "pip install -r scripts/requirements.txt", f"without {package}, {name} prints how to install it")
        expect_ends(start(name, "--help", PYTHONPATH=f"without/{package}"), 0, "usage: ",
                    f"{name} --help needs no {package}")
    expect_equal(os.listdir("f"), ["log.jsonl"], "without the package, no file is written")


if __name__ == "__main__":
    run_tests(globals())

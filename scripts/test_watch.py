#!/usr/bin/env python3
"""Tests of what shows runs, on logs made up here: plot.py and board.py, also while a run goes on.

    python3 scripts/test_watch.py

Needs matplotlib, and the packages tensorboard and wandb to test what is exported to them: without one, a line says so.
"""
import argparse
import glob
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
from runs import Mistake, read_run

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "dev", "tests"))
from claims import claim, finish

TOKENS = 512        # of a step in these logs


# ---- made-up logs

GPT2 = {"layers": 12, "heads": 12, "channels": 768, "context": 1024, "vocab": 50257, "parameters": 124439808}
SMALL = {"layers": 2, "heads": 4, "channels": 128, "context": 64, "vocab": 256, "parameters": 437760}


def run_line(steps, model=SMALL, data="data/shakespeare.txt"):
    return {"run": {"options": {"steps": steps, "data": data}, "model": model,
                    "flops_per_token": {"model": 1000.0, "hardware": 1100.0}}}


def step_line(step, ms=20.0, loss=None, shift=0.0):
    loss = 5.5 / (1 + 0.01 * step) ** 0.4 + shift if loss is None else loss
    return {"step": step, "loss": loss, "norm": 1.0, "lr": 1e-3, "ms": ms,
            "tokens_per_s": TOKENS * 1000 / ms, "mfu": 0.4, "hfu": 0.5}


def lines_of(steps, first=1, every=50, hellaswag=False, **more):
    lines = []
    for step in range(first, steps + 1):
        lines.append(step_line(step, **more))
        if step % every == 0:
            lines.append({"step": step, "val_loss": lines[-1]["loss"] + 0.1})
            if hellaswag:
                lines.append({"step": step, "hellaswag": 0.25 + 0.0001 * step})
    return lines


def log(folder, lines, tail="", mode="w"):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "log.jsonl"), mode, encoding="utf-8") as file:
        file.write("".join(json.dumps(line).replace("NaN", "null") + "\n" for line in lines) + tail)
    return folder


def script(name, *options, wait=True, **environment):
    command = [sys.executable, os.path.join(HERE, name), *map(str, options)]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", **environment}
    if not wait:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def said(done):
    return f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-900:]}"


def until(holds, seconds=60):
    """Whether it came to hold in that time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_png(path):
    """Its beginning and its end: all of it is there."""
    data = open(path, "rb").read() if os.path.exists(path) else b""
    return data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")


# ---- the log

def test_log(scratch):
    run = read_run(log(f"{scratch}/a", [run_line(100), *lines_of(60)], '{"step": 61, "lo'))
    claim(run.last() == 60 and not run.ended(), "a last line that is half written is left out")
    claim(run.series("val_loss").keys() == {50}, "a validation loss is at its step")
    claim(run.progress()[60] == (60 * TOKENS, 60 * 0.02 + (run.progress()[60][1] - 1.2)) and
          abs(run.progress()[60][1] - 1.2) < 1e-9, "tokens and seconds add up", str(run.progress()[60]))

    run = read_run(log(f"{scratch}/b", [run_line(100), *lines_of(60), *lines_of(55, first=41, shift=1.0)]))
    claim(run.last() == 55 and [*run.steps] == list(range(1, 56)), "where steps repeat, what came after is dropped")
    expected = {**{s: step_line(s)["loss"] for s in range(1, 41)},
                **{s: step_line(s, shift=1.0)["loss"] for s in range(41, 56)}}
    claim(run.series("loss") == expected, "where steps repeat, the later ones count")
    claim(run.progress()[55][0] == 55 * TOKENS, "a step that was done twice is one step's tokens")

    run = read_run(log(f"{scratch}/c", [run_line(10), step_line(5), step_line(10, loss=math.nan)]))
    claim(run.progress()[10][0] == 10 * TOKENS, "steps that were not logged count")
    claim(math.isnan(run.series("loss")[10]) and run.ended(), "null is a loss that is not finite")
    for name, text in (("no JSON", "step 3\n"), ("no object", "[1, 2]\n"), ("no number", '{"step": 1, "loss": "x"}\n')):
        try:
            read_run(log(f"{scratch}/d", [run_line(9), step_line(1)], text + json.dumps(step_line(2)) + "\n"))
            claim(False, f"{name} in the middle is a mistake")
        except Mistake as mistake:
            claim("line 3" in str(mistake), f"{name} in the middle is a mistake that names the line", str(mistake))


# ---- plot.py

def test_plot(scratch):
    a = log(f"{scratch}/first", [run_line(400), *lines_of(400)])
    b = log(f"{scratch}/second", [run_line(400), *lines_of(300, ms=30.0, shift=0.2, hellaswag=True)])
    for x in ("steps", "tokens", "time", "flops"):
        done = script("plot.py", a, b, "--x", x, "--out", f"{scratch}/{x}.png")
        claim(done.returncode == 0 and is_png(f"{scratch}/{x}.png"), f"--x {x}: two runs in a picture", said(done))
    done = script("plot.py", a)
    claim(done.stdout == f"{a}/plot.png\n" and is_png(f"{a}/plot.png"),
          "without --out: plot.png in the run's folder", said(done))
    claim(sorted(os.listdir(a)) == ["log.jsonl", "plot.png"], "nothing else is left in the run's folder",
          str(os.listdir(a)))
    done = script("plot.py", a, "--out", f"{scratch}/page.html")
    page = open(f"{scratch}/page.html").read() if done.returncode == 0 else ""
    claim("data:image/png;base64," in page and "step 400 of 400" in page, "--out FILE.html: a page", said(done))

    for text, options in (("no such run", [f"{scratch}/none"]),
                          ("an ending that is no picture's", [a, "--out", f"{scratch}/x.doc"]),
                          ("a run without a step", [log(f"{scratch}/empty", [run_line(3)])]),
                          ("no folder for --out", [a, "--out", f"{scratch}/none/x.png"])):
        done = script("plot.py", *options)
        claim(done.returncode == 2 and done.stderr.startswith("plot: ") and done.stderr.count("\n") == 1,
              f"{text}: one line, exit 2", said(done))
    done = script("plot.py", a, "--every", 3)
    claim(done.returncode == 2 and "goes with --watch" in done.stderr, "--every without --watch is refused", said(done))
    done = script("plot.py", log(f"{scratch}/old", [step_line(1), step_line(2)]), "--x", "flops")
    claim(done.returncode == 2 and "flops_per_token" in done.stderr,
          "--x flops of a log without them is refused", said(done))


def test_figures(scratch):
    """What is in the figure itself."""
    import plot
    small = read_run(log(f"{scratch}/small", [run_line(100), *lines_of(100)]))
    web = read_run(log(f"{scratch}/web", [run_line(100, GPT2, "data/openwebtext/*train*.bin"),
                                        *lines_of(100, hellaswag=True)]))
    edu = read_run(log(f"{scratch}/edu", [run_line(100, GPT2, "data/fineweb-edu/*.bin"), *lines_of(100)]))
    claim(plot.references([small], "auto") == ({}, {}), "a small model on Shakespeare: nothing of GPT-2's")
    claim(plot.references([web], "auto") == ({"124M": 3.12}, {"124M": 0.2955}),
          "GPT-2's size on OpenWebText: its loss and HellaSwag")
    claim(plot.references([edu], "auto") == ({}, {"124M": 0.2955}), "on other data: its HellaSwag only")
    claim(plot.references([small], "gpt2")[0] == {"124M": 3.12, "350M": 2.84, "774M": 2.67, "1558M": 2.54},
          "where asked: all four")
    claim(plot.references([edu], "gpt2") == ({"124M": 3.12}, {"124M": 0.2955}),
          "where asked, of a size of GPT-2's: that size")
    claim(plot.references([web], "none") == ({}, {}), "--reference none: none")

    for x, expected in {"steps": 100, "tokens": 100 * TOKENS / 1e3, "time": 2.0,
                        "flops": 100 * TOKENS * 1000 / 1e7}.items():
        axis = plot.plot([small], x).axes[0]
        claim(math.isclose(axis.lines[1].get_xdata()[-1], expected), f"--x {x}: the last step is where it should be",
              str(axis.lines[1].get_xdata()[-1]))
    labels = [axis.get_ylabel() for axis in plot.plot([small, web]).axes]
    claim(labels == ["loss (nats a token)", "HellaSwag, acc_norm", "learning rate", "tokens a second"],
          "a panel of HellaSwag where a run has it", str(labels))
    claim(len(plot.plot([small]).axes) == 3, "none where no run has it")
    low, high = plot.plot([small], reference="gpt2").axes[0].get_ylim()
    claim(low < 2.54 and 3.12 < high, "GPT-2's lines are within the axis")
    axis = plot.plot([small]).axes[0]
    claim([*axis.lines[2].get_xdata()] == [50, 100], "validation losses are at their steps")


def test_watch(scratch):
    a, b, out = f"{scratch}/a", f"{scratch}/b", f"{scratch}/live.png"
    log(a, [run_line(100), *lines_of(10)])
    watching = script("plot.py", "--watch", a, b, "--every", 0.2, "--out", out, wait=False)
    try:
        claim(until(lambda: is_png(out)), "a picture at once, of the runs that have begun")
        first = os.stat(out).st_mtime_ns
        log(a, lines_of(50, first=11), '{"step": 51,', mode="a")
        claim(until(lambda: os.stat(out).st_mtime_ns != first) and is_png(out), "another when the log has grown")
        log(a, [run_line(100), *lines_of(40), *lines_of(100, first=41)])        # written anew, as by --resume
        claim(watching.poll() is None, "goes on while a run has not begun")
        drawn = os.stat(out).st_mtime_ns
        log(b, [run_line(20), *lines_of(10)])
        claim(until(lambda: os.stat(out).st_mtime_ns != drawn) and not until(lambda: watching.poll() is not None, 1),
              "goes on while one of them has steps to do")
        log(b, lines_of(20, first=11), mode="a")
        output, errors = watching.communicate(timeout=60)
        claim(watching.returncode == 0 and not errors, "ends when all runs have done their steps", errors)
        claim("a: step 100 of 100" in output and "b: step 20 of 20" in output, "says how far each run is", output)
        claim(is_png(out) and sorted(os.listdir(scratch)) == ["a", "b", "live.png"],
              "leaves the picture and nothing else", str(os.listdir(scratch)))
    finally:
        watching.kill()


# ---- board.py

def scalars(folder):
    """What TensorBoard itself reads: {tag: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray
    events = EventAccumulator(folder, size_guidance={"tensors": 0})
    events.Reload()
    return {tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
            for tag in events.Tags()["tensors"]}


def near(found, expected):
    return len(found) == len(expected) and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-6) for a, b in zip(found, expected))


def test_tensorboard(scratch):
    a = log(f"{scratch}/a", [run_line(100), *lines_of(100, hellaswag=True)])
    done = script("board.py", a)
    claim(done.returncode == 0 and "tensorboard --logdir" in done.stdout, "board.py says how to look at it", said(done))
    found = scalars(f"{a}/board/gpt.cu")
    claim(near(found.get("loss/train", []), [(s, step_line(s)["loss"]) for s in range(1, 101)]),
          "TensorBoard reads each step's loss")
    claim(near(found.get("hellaswag/acc_norm", []), [(50, 0.255), (100, 0.26)]), "and HellaSwag")
    claim({"loss/validation", "optimizer/norm", "optimizer/lr", "speed/tokens_per_s", "speed/mfu"} <= found.keys(),
          "and the rest", str(found.keys()))
    other = os.path.join(a, "board", "events.out.tfevents.1.someone")
    open(other, "w").close()
    script("board.py", a)
    files = glob.glob(f"{a}/board/gpt.cu/*")
    claim(len(files) == 1 and os.path.exists(other), "again: written again, and another's file stays", str(files))

    b = f"{scratch}/b"
    watching = script("board.py", "--watch", b, "--every", 0.2, wait=False)
    try:
        time.sleep(1)
        log(b, [run_line(100), *lines_of(70)], '{"step"')
        board = f"{b}/board/gpt.cu"
        claim(until(lambda: os.path.isdir(board) and len(scalars(board).get("loss/train", [])) == 70),
              "--watch: what a run has done so far")
        log(b, [run_line(100), *lines_of(50)])      # resumed from step 50
        time.sleep(0.5)
        log(b, lines_of(100, first=51, ms=25.0, shift=1.0), mode="a")
        output, errors = watching.communicate(timeout=60)
        claim(watching.returncode == 0, "--watch ends with the run", errors)
    finally:
        watching.kill()
    expected = [(s, step_line(s, shift=1.0 if s > 50 else 0.0)["loss"]) for s in range(1, 101)]
    claim(near(scalars(f"{b}/board/gpt.cu")["loss/train"], expected),
          "a run that was resumed: the later steps count, each once")


def wandb_records(path):
    """What is in the file of an offline run. It is LevelDB's log: blocks, in them pieces of records, each with a header
    of checksum, length and whether it is whole (1), a record's first (2), middle (3) or last (4) piece."""
    from wandb.proto import wandb_internal_pb2
    BLOCK, HEADER = 32768, 7
    data, at, record = open(path, "rb").read(), HEADER, b""     # the file has a header of the same length
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        record += data[at + HEADER:at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb(scratch):
    a = log(f"{scratch}/a", [run_line(20), *lines_of(20, every=10)])
    done = script("board.py", a, "--wandb", "tests")
    files = glob.glob(f"{a}/wandb/offline-run-*/*.wandb")
    claim(done.returncode == 0 and len(files) == 1, "--wandb, offline: a run in the folder wandb", said(done))
    rows, project = [], None
    for record in wandb_records(files[0]) if files else []:
        project = record.run.project or project
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json)
                         for item in record.history.item})
    claim(project == "tests", "the project is named", str(project))
    claim([(row["step"], row["loss/train"]) for row in rows if "loss/train" in row] == [(s,
          step_line(s)["loss"]) for s in range(1, 21)],
          "each step and its loss are in it", str(rows[:1]))
    claim([row["step"] for row in rows if "loss/validation" in row] == [10, 20], "and the validation losses")


def test_missing(scratch):
    """Without a package: one line, exit 2, and no waiting."""
    a = log(f"{scratch}/a", [run_line(10), *lines_of(10)])
    for package in ("tensorboard", "wandb"):
        os.makedirs(f"{scratch}/without")
        with open(f"{scratch}/without/{package}.py", "w") as file:
            file.write(f'raise ImportError("No module named {package!r}")')
        done = script("board.py", a, *(["--wandb", "x"] if package == "wandb" else []), PYTHONPATH=f"{scratch}/without")
        claim(done.returncode == 2 and done.stderr.count("\n") == 1 and f"pip install {package}" in done.stderr,
              f"without {package}: a line says what to install", said(done))
        shutil.rmtree(f"{scratch}/without")
    claim(sorted(os.listdir(a)) == ["log.jsonl"], "and nothing was written", str(os.listdir(a)))


def test_help(scratch):
    for name in ("plot.py", "board.py"):
        done = script(name, "--help")
        claim(done.returncode == 0 and "usage" in done.stdout and "--watch" in done.stdout,
              f"{name} --help", said(done))


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, test in (("help", test_help), ("log", test_log), ("plot", test_plot), ("figures", test_figures),
                       ("watch", test_watch), ("missing", test_missing), ("tensorboard", test_tensorboard),
                       ("wandb", test_wandb)):
        if name in ("tensorboard", "wandb") and importlib.util.find_spec(name) is None:
            print(f"absent  {name}: the package is not installed")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            try:
                test(scratch)
            except Exception:
                traceback.print_exc()
                claim(False, f"{name} ended")
    finish()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tests of training on several GPUs: 1 to 4 processes, on whatever the program was built for.

    python3 dev/tests/test_many.py [--ours ./train_gpt] [--ranks 2 3 4] [--only WORDS] [--same-bits yes]

On CPUs every sum has one order, so that results are compared bit by bit; NCCL may choose another one for each kind of
collective, so that on GPUs (--same-bits no) they are compared to rounding.
"""
import argparse
import contextlib
import glob
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from claims import claim, finish

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
U = 2.0 ** -24      # FP32: relative error of a sum of two numbers
ENOUGH = 120        # seconds, for every run here
SOON = 20           # in which processes end after one of them died, on a busy machine
args = None
scratch = ""


# ---- runs

# Odd on purpose: 3 layers, a context that is no power of two, and sizes that neither 3 nor 4 divides.
MODEL = ["--layers", 3, "--heads", 2, "--channels", 32, "--context", 24]
DATA = ["--data", os.path.join(ROOT, "data", "shakespeare.txt")]
SHORT = ["--micro-batch", 2, "--warmup", 1, "--lr", 1e-3, "--eval-every", 0, "--checkpoint-every", 0,
         "--matmul-tuning", "off"]
WINDOW = 24         # tokens of a sequence


def folder(name):
    path = os.path.join(scratch, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def children(process):
    path = f"/proc/{process}/task/{process}/children"
    return [int(word) for word in open(path, encoding="utf-8").read().split()]


class Started:
    """A command; with several ranks by --gpus."""

    def __init__(self, ranks, *words, program=None, environment=None, before=()):
        assert ranks <= max(args.ranks)
        command = [*before, *(program or args.ours), *map(str, words), *(["--gpus", str(ranks)] if ranks > 1 else [])]
        self.out, self.err = (tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2))
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(command, env={**kept, **(environment or {})}, stdout=self.out, stderr=self.err,
                                        cwd=ROOT)

    def pids(self, ranks):
        """The processes of the ranks, which are started in their order."""
        return wait_for(lambda: (found := children(self.process.pid)) and len(found) >= ranks and found[-ranks:])

    def end(self, timeout=ENOUGH):
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for process in [*children(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):   # the others end when one is killed
                    os.kill(process, signal.SIGKILL)
            self.process.wait()
            self.code = None
        for file in (self.out, self.err):
            file.seek(0)
        self.out, self.err = self.out.read(), self.err.read()
        self.said = re.findall(r".*train_gpt: .*", self.err)
        return self

    def __str__(self):
        return f"exit {self.code}: {self.out[-300:]} {self.err[-900:]}"


def wait_for(condition, seconds=ENOUGH):
    until = time.time() + seconds
    while not (result := condition()) and time.time() < until:
        time.sleep(0.02)
    return result


def most(ranks):
    """As many ranks, or all that the machine has GPUs for."""
    return min(ranks, max(args.ranks))


def run(ranks, *words, **more):
    return Started(ranks, *words, **more).end()


def records(out):
    """Of a run's log."""
    path = os.path.join(out, "log.jsonl")
    return [json.loads(line) for line in open(path, encoding="utf-8")] if os.path.exists(path) else []


def steps(out):
    return [record for record in records(out) if "loss" in record]


def train(ranks, name, *words, fresh=True, **more):
    """Trains into the folder `name`; its records of steps, in order."""
    out = folder(name) if fresh else os.path.join(scratch, name)
    done = run(ranks, "train", *MODEL, *DATA, *SHORT, "--out", out, *words, **more)
    done.folder, done.steps, done.header = out, steps(out), (records(out) or [{}])[0].get("run", {})
    done.losses = [step["loss"] for step in done.steps]
    done.norms = [step["norm"] for step in done.steps]
    return done


def tensors(run_folder, step):
    """The bytes of a checkpoint's files."""
    names = ("model.safetensors", "optimizer.safetensors")
    return [open(os.path.join(run_folder, f"step_{step:06d}", name), "rb").read() for name in names]


def near(a, b, limit):
    return len(a) == len(b) > 0 and all(abs(x - y) <= limit * abs(y) for x, y in zip(a, b))


def same(a, b):
    """Two runs: equal bit by bit; where sums may be in another order, near."""
    if not a.steps or a.code or b.code:
        return False
    if args.same_bits == "no":
        return near(a.losses, b.losses, 1e-5) and near(a.norms, b.norms, 1e-3)
    last = a.steps[-1]["step"]
    return a.losses == b.losses and a.norms == b.norms and tensors(a.folder, last) == tensors(b.folder, last)


# ---- claims

KEPT = ["--checkpoint-every", 100]      # one, at the end


def test_stages():
    for ranks in args.ranks:
        batch = ["--total-batch", ranks * 2 * WINDOW, "--steps", 4, *KEPT]
        runs = {zero: train(ranks, f"stage_{zero}", *batch, "--zero", zero) for zero in range(4)}
        claim(all(same(runs[0], runs[zero]) for zero in (1, 2, 3)),
              f"{ranks} ranks: ZeRO 0, 1, 2 and 3 give the same losses, norms, weights and moments", str(runs[0]))
        batch[1] *= 3
        runs = {zero: train(ranks, f"stage_{zero}", *batch, "--zero", zero) for zero in range(4)}
        claim(same(runs[0], runs[1]) and same(runs[2], runs[3]),
              f"{ranks} ranks, 3 micro-batches each: so do 0 and 1, and 2 and 3", str(runs[0]))
        claim(near(runs[2].losses, runs[0].losses, 1e-5) and near(runs[2].norms, runs[0].norms, 1e-3),
              f"{ranks} ranks, 3 micro-batches each: 2 adds up in another order than 1, and differs by rounding",
              f"{runs[0].losses} {runs[2].losses}")


def test_modes():
    batch = ["--total-batch", 3 * 2 * WINDOW * 2, "--steps", 3, *KEPT]
    for zero in (0, 3):
        plain = train(most(3), "plain", *batch, "--zero", zero)
        for name, words in {"--recompute selective": ["--recompute", "selective"],
                            "--recompute full": ["--recompute", "full"], "--overlap off": ["--overlap", "off"],
                            "--matmul-tuning on": ["--matmul-tuning", "on"]}.items():
            claim(same(plain, train(most(3), "mode", *batch, "--zero", zero, *words)),
                  f"--zero {zero} {name}: the same bits as without")


def test_sums():
    """Sums over ranks against one process that accumulates. Losses of the first step are those of the same windows by
    the same weights. Gradients are k micro-batches' gradients g_i, added in another order: each element's error is at
    most (k - 1) U times the sum of |g_i|, twice as much between two orders. AdamW's first step moves a weight by lr g /
    (|g| + eps), so an error of d in g moves the next loss by at most lr sqrt(P) |d|, by Cauchy and Schwarz."""
    for ranks, accumulation in ((2, 1), (3, 2), (4, 1)):
        if ranks not in args.ranks:
            continue
        k = ranks * accumulation
        batch = ["--total-batch", k * 2 * WINDOW, "--steps", 2]
        one, many = train(1, "one", *batch), train(ranks, "many", *batch)
        single = train(1, "single", "--steps", k, "--lr", 0, "--min-lr", 0)     # the micro-batches' own norms
        error = 2 * (k - 1) * U * sum(single.norms) / k
        detail = f"losses {one.losses} {many.losses}, norms {one.norms} {many.norms}, limit {error}"
        limit = 1e-3 * math.sqrt(one.header["model"]["parameters"]) * error + 2 * U * one.losses[1]
        claim(len(many.losses) == 2 and abs(many.losses[0] - one.losses[0]) <= 1e-12 * one.losses[0] and
              abs(many.norms[0] - one.norms[0]) <= error and abs(many.losses[1] - one.losses[1]) <= limit,
              f"{ranks} ranks x {accumulation} micro-batches: loss and norm of {k} micro-batches on one, and the next "
              f"loss to within {limit:.1e}", detail)


def test_tuning():
    """By files that each rank has of its own, rank 0 would take one algorithm and rank 1 another."""
    if args.same_bits == "no":
        return
    words = ["train", *MODEL, *DATA, *SHORT, "--steps", 2, "--total-batch", 2 * 2 * WINDOW, "--matmul-tuning", "on"]
    for name in ("coarse", "fast"):
        run(1, *words, environment={"XDG_CACHE_HOME": os.path.join(scratch, name), "CUDA_CPU_MATMULS": name + ",slow"})
    losses = {}
    for files in (("coarse", "coarse"), ("fast", "fast"), ("coarse", "fast")):
        out = folder("tuned")
        more = [{"XDG_CACHE_HOME": os.path.join(scratch, name), "CUDA_CPU_MATMULS": "slow,fast,coarse"}
                for name in files]
        done, other = launched(TORCHRUN, 2, [*words, "--out", out], by_rank=more, **address())
        losses[files] = done.code == other.code == 0 and [step["norm"] for step in steps(out)]
    claim(losses["coarse", "fast"] == losses["coarse", "coarse"] != losses["fast", "fast"] and losses["fast", "fast"],
          "all ranks take the matmul algorithms that rank 0 has chosen", f"{losses} {done} {other}")


def test_memory():
    batch = ["--total-batch", 12 * 2 * WINDOW]
    for ranks in args.ranks:
        for zero in range(4):
            done = train(ranks, "memory", *batch, "--steps", 1, "--zero", zero)
            planned = run(1, "plan", *MODEL, *batch, "--vocab", 256, "--micro-batch", 2, "--gpus", ranks, "--zero",
                          zero, "--json", "--precision", done.header.get("precision", "fp32"))
            plan = json.loads(planned.out) if planned.code == 0 else {"bytes": {"total": 0}, "bytes_sent": 0}
            claim(done.code == 0 and done.header["planned_bytes"] == plan["bytes"]["total"] and
                  "allocated as planned" in done.out,
                  f"{ranks} ranks, --zero {zero}: the memory of each is as planned", f"{done} {planned}")
            sent = re.search(r"sent +([0-9.]+) (kB|MB) a step", done.out)
            found = float(sent[1]) * {"kB": 1e3, "MB": 1e6}[sent[2]] if sent else 0
            rounding = 6e4 if found >= 1e6 else 60    # the printed digits; norm and losses are sent besides
            claim(abs(found - plan["bytes_sent"]) <= rounding + 1000,
                  f"{ranks} ranks, --zero {zero}: each sends what is planned", f"{plan['bytes_sent']}: {done}")


def test_resume():
    batch = ["--total-batch", 12 * 2 * WINDOW, "--schedule", "constant"]
    whole = train(most(4), "whole", *batch, "--steps", 6, *KEPT, "--zero", 2)
    train(most(4), "parts", *batch, "--steps", 6, "--checkpoint-every", 3, "--zero", 2)
    shutil.rmtree(os.path.join(scratch, "parts", "step_000006"), ignore_errors=True)
    again = train(most(4), "parts", "--resume", *KEPT, fresh=False)
    claim(same(whole, again), f"{most(4)} ranks write checkpoints and resume with the same bits", str(again))
    first = train(most(4), "parts", *batch, "--steps", 3, *KEPT, "--zero", 2)
    second = train(most(3), "parts", "--resume", "--steps", 6, "--zero", 3, *KEPT, fresh=False)
    third = train(1, "parts", "--resume", "--steps", 9, "--zero", 0, *KEPT, fresh=False)
    other = train(1, "other", *batch, "--steps", 9, *KEPT)
    claim([first.code, second.code, third.code] == [0, 0, 0] and near(third.losses, other.losses, 1e-5),
          f"{most(3)} ranks resume what {most(4)} began, then one, each with another stage of ZeRO: the losses are "
          "those of one alone, to rounding", f"{third.losses} {other.losses} {second} {third}")


def test_read():
    """Which bytes of a checkpoint's tensors a rank reads: with ZeRO its shard, and padding is in no file."""
    ranks, runs = most(3), {}
    train(ranks, "read", "--total-batch", ranks * 2 * WINDOW, "--steps", 1, *KEPT)
    start = os.path.join(scratch, "read")
    for zero in range(4):
        shutil.copytree(start, folder(f"read_{zero}"))
        runs[zero] = train(ranks, f"read_{zero}", "--resume", "--steps", 2, "--zero", zero, *KEPT, fresh=False)
    size = 4 * runs[0].header["model"]["parameters"]
    read = {zero: [int(n) for line in re.findall(r"^read .*: (.*)", done.out, re.M) for n in line.split()]
            for zero, done in runs.items()}
    master = ranks if runs[0].header["precision"] == "fp32" else 1     # ranks that read a weight, with ZeRO 1 and 2
    claim(read[0] == [3 * size] * ranks and sum(read[1]) == sum(read[2]) == (2 + master) * size and
          sum(read[3]) == 3 * size, "each rank reads the part of weights and moments that it keeps", f"{read} {size}")
    claim(max(read[3]) < 2 * size and max(read[1]) < 2.5 * size and
          all(same(runs[0], runs[zero]) for zero in (1, 2, 3)),
          "so with ZeRO fewer bytes, and the results are the same", f"{read} {size} {runs[3]}")
    path = os.path.join(start, "step_000001", "optimizer.safetensors")
    with open(path, "r+b") as file:         # the last element of v, in the last tensor's shard of the last rank
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", math.nan))
    refused(ranks, ["train", *MODEL, *DATA, *SHORT, "--resume", "--out", start, "--steps", 2, "--zero", 1],
            ["optimizer.safetensors", "holds nan at element"], "a bad moment that only one rank reads")
    with open(os.path.join(start, "log.jsonl"), encoding="utf-8") as log:
        claim(log.read().count('"run"') == 1, "and the run's log is as before")


def test_evaluation():
    batch = ["--steps", 1, "--total-batch", 12 * 2 * WINDOW]
    more = ["--eval-every", 1, "--eval-sequences", 11, "--sample-every", 1, "--sample-tokens", 20, "--lr", 0,
            "--min-lr", 0, *KEPT]
    runs = {(ranks, zero): train(ranks, f"eval_{ranks}_{zero}", *batch, *more, "--zero", zero)
            for ranks, zero in ((1, 0), (most(3), 0), (most(4), 3))}
    shown = [re.findall(r"validation loss.*|-- sample --(?:.|\n)*?\n------", done.out) for done in runs.values()]
    claim(len(shown[0]) == 3 and shown[0] == shown[1] == shown[2],
          "validation loss and samples of several ranks are those of one", f"{shown}")
    model = os.path.join(scratch, "eval_1_0", "step_000001")
    text = os.path.join(scratch, "some.txt")
    with open(text, "w", encoding="utf-8") as file:
        file.write(open(DATA[1], encoding="utf-8").read()[:3001])
    evals = [run(ranks, "eval", "--from", model, "--data", text, "--micro-batch", 4) for ranks in (1, 2, most(3))]
    lines = [done.out.splitlines()[:3] for done in evals]
    claim(len(lines[0]) == 3 and lines[0] == lines[1] == lines[2], "so does eval", f"{lines} {evals[1]}")
    path = os.path.join(scratch, "questions.bin")
    with open(path, "wb") as file:
        questions = [[65535, 0, i, i % 4, 4, *(word for n in (5, 2 + i, 9, 3 + i, 4)
                                               for word in (n, *range(60 + i, 60 + i + n)))] for i in range(7)]
        file.write(struct.pack("<256i", 20240522, 1, len(questions), *[0] * 253))
        for words in questions:
            words[1] = 2 * len(words)
            file.write(struct.pack(f"<{len(words)}H", *words))
    scores = [run(ranks, "eval", "--from", model, "--hellaswag", path, "--micro-batch", 2) for ranks in (1, 2, most(3))]
    lines = [done.out.splitlines()[:1] for done in scores]
    claim("over 7 questions" in lines[0][0] and lines[0] == lines[1] == lines[2],
          "so does HellaSwag, whose endings are divided among ranks",
          f"{lines} {scores[1]}")


def refused(ranks, words, parts, text, code=2, **more):
    done = run(ranks, *words, **more)
    one = len(done.said) == 1 + (code == 1) and all(part in done.said[0] for part in parts)
    claim(one and done.code == code, f"{text}: one message, and exit code {code}", str(done))


BASE = ["train", *MODEL, *DATA, *SHORT, "--steps", 1]


def test_errors():
    unit, total = most(3) * 2 * WINDOW, 5 * 2 * WINDOW
    refused(2, [*BASE, "--no-such-flag"], ["--no-such-flag"], "an unknown flag")
    refused(most(3), [*BASE, "--total-batch", total],
            ["x GPUs", str(total // unit * unit), str((total // unit + 1) * unit)],
            "a total batch that the ranks cannot share, with the nearest that they can")
    refused(2, [*BASE, "--graph", "on"], ["--graph"], "--graph on")
    taken = folder("taken")
    os.makedirs(taken)
    open(os.path.join(taken, "log.jsonl"), "w", encoding="utf-8").close()
    refused(2, [*BASE, "--out", taken], ["already holds a run"], "a folder that holds a run")
    refused(most(3), [*BASE, "--steps", 9, "--lr", 1e30, "--grad-clip", 0], ["loss", "stopped"],
            "a loss that is not finite", code=1)
    if args.same_bits == "yes":
        refused(2, BASE, ["--gpus 2", "this machine has 1"], "more GPUs than there are",
                environment={"CUDA_CPU_DEVICES": "1"})
        done = run(1, *BASE, "--gpus", "all", environment={"CUDA_CPU_DEVICES": "3"})
        claim("x 3 GPUs" in done.out and done.code == 0, "--gpus all takes all GPUs of the machine", str(done))


def begin_long(ranks, name, *words, **more):
    """A run that takes long, at its first checkpoint."""
    out = folder(name)
    begun = Started(ranks, "train", *MODEL, *DATA, *SHORT, "--steps", 10 ** 6, "--checkpoint-every", 20, "--keep", 2,
                    "--out", out, *words, **more)
    begun.folder = out
    wait_for(lambda: glob.glob(os.path.join(out, "step_*")) or begun.process.poll() is not None)
    return begun


def whole_checkpoints(out):
    steps = sorted(glob.glob(os.path.join(out, "step_*")))
    return steps and all(os.path.exists(os.path.join(s, "trainer.json")) for s in steps)


def test_deaths():
    chance = random.Random(1)
    for number in (signal.SIGKILL, signal.SIGSEGV):
        ranks = max(args.ranks)
        victim, zero = chance.randrange(ranks), chance.randrange(4)
        begun = begin_long(ranks, "killed", "--zero", zero)
        processes = begun.pids(ranks)
        os.kill(processes[victim], number)
        killed = time.time()
        done = begun.end()
        parts = [f"rank {victim} (process {processes[victim]}) was killed by signal {int(number)} ", " in step ",
                 "checkpoint is " + os.path.join(begun.folder, "step_")]
        claim(len(done.said) == 1 and all(part in done.said[0] for part in parts) and time.time() - killed < SOON and
              done.code == 1 and all(map(gone, processes)) and whole_checkpoints(begun.folder),
              f"{ranks} ranks, --zero {zero}, rank {victim} killed by signal {int(number)}: one line says so, all end, "
              f"checkpoints are whole", str(done))
    begun = begin_long(2, "killed")
    processes = begun.pids(2)
    begun.process.kill()
    begun.process.wait()
    claim(all(map(gone, processes)), "ranks end when the process that supervises them is killed")


def stop_rank(begun, victim, text, place):
    """A stopped process is what a hang looks like to the others."""
    processes = begun.pids(most(3))
    os.kill(processes[victim], signal.SIGSTOP)
    done = begun.end(2 + SOON)
    others = [line for line in done.said if re.search("no progress for 2 s|missing ranks", line) and
              f"rank {victim} on" not in line]
    claim(others and done.code == 1 and all(map(gone, processes)) and place in others[0],
          f"rank {victim} stopped {text} with --timeout 2: the others say where they wait, and all end", str(done))


def test_hangs():
    for victim in (1, 0):
        log = os.path.join(folder("stopped"), "log.jsonl")
        begun = Started(most(3), *BASE, "--steps", 10 ** 6, "--timeout", 2, "--out", os.path.dirname(log))
        wait_for(lambda: os.path.exists(log) and len(open(log, encoding="utf-8").readlines()) > 5)
        stop_rank(begun, victim, "at a step", ", in ")
    stop_rank(Started(most(3), *BASE, "--timeout", 2), 1, "while loading", "")
    train(1, "stopped", "--steps", 1, *KEPT)
    model = os.path.join(scratch, "stopped", "step_000001")
    begun = Started(most(3), "eval", "--from", model, *DATA, "--micro-batch", 1, "--timeout", 2)
    time.sleep(1.5)
    stop_rank(begun, 1, "in eval", ", in ")
    done = run(2, *BASE, "--timeout", 60, environment={"CUDA_CPU_NCCL_FAILURE": "9"})
    claim(done.code == 1 and "NCCL reports: a remote rank failed" in done.err,
          "an asynchronous error of NCCL ends a rank that waits, long before --timeout", str(done))
    begun = begin_long(2, "stopped", "--timeout", 2)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for process in begun.pids(2):
            os.kill(process, sign)
        time.sleep(4)
    begun.process.send_signal(signal.SIGTERM)
    done = begun.end()
    claim(done.code == 0 and not done.said, "a run that was stopped as a whole for longer than --timeout continues",
          str(done))


def test_slow_checkpoint():
    """Each write to a checkpoint's tensors takes a while, by a preloaded library."""
    source, library = (os.path.join(scratch, name) for name in ("slow.c", "slow.so"))
    with open(source, "w", encoding="utf-8") as file:
        file.write("""#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int file, const void* data, size_t bytes) {
    char link[32], path[1000] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, ".safetensors")) usleep(atoi(getenv("SLOW_US")));
    return syscall(SYS_write, file, data, bytes);
}
""")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    slow = {"LD_PRELOAD": library, "SLOW_US": "100000"}
    for zero in (0, 3):
        began = time.time()
        done = train(2, "slow", "--steps", 1, *KEPT, "--timeout", 2, "--zero", zero, environment=slow)
        claim(done.code == 0 and whole_checkpoints(done.folder) and time.time() - began > 8,
              f"--zero {zero}: a checkpoint that takes longer than --timeout and makes progress is no hang", str(done))
        out = folder("slow")
        begun = Started(most(3), *BASE, *KEPT, "--timeout", 2, "--out", out, "--zero", zero, environment=slow)
        wait_for(lambda: glob.glob(os.path.join(out, "unfinished_*", "model.safetensors")))
        stop_rank(begun, 0, f"in a checkpoint, --zero {zero}", ", in " + ("broadcast" if zero else "rank 0's"))
    done = train(2, "slow", "--steps", 1, *KEPT, "--timeout", 2, environment={**slow, "SLOW_US": "60000000"})
    claim(done.code == 1 and re.search(r"rank 0 on .*, in rank 0's checkpoint: no progress for 2 s", done.err),
          "a write of rank 0 that takes longer than --timeout is a hang", str(done))


def gone(process):
    """Whether it ends soon."""
    return wait_for(lambda: not os.path.exists(f"/proc/{process}") or
                    open(f"/proc/{process}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()[0] == "Z", SOON)


def test_signals():
    for number, to in ((signal.SIGINT, "the run"), (signal.SIGTERM, "one rank")):
        begun = begin_long(most(3), "signalled", "--zero", 1)
        processes = begun.pids(most(3))
        os.kill(processes[1] if to == "one rank" else begun.process.pid, number)
        done = begun.end()
        last = records(begun.folder)[-1]["step"]
        newest = sorted(glob.glob(os.path.join(begun.folder, "step_*")))[-1]
        claim(done.code == 0 and newest.endswith(f"step_{last:06d}") and whole_checkpoints(begun.folder),
              f"signal {int(number)} to {to}: all stop after the step, with a checkpoint of it",
              f"step {last}, {newest}: {done}")


# ---- launchers

def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple("OMPI_COMM_WORLD_" + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def address(**more):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}


def launched(names, size, words, only=None, by_rank=None, **more):
    """The ranks of a run, each with a launcher's variables."""
    ranks = range(size) if only is None else only
    values = [{**dict(zip(names, (rank, size, rank, size))), **more, **(by_rank[rank] if by_rank else {})}
              for rank in ranks]
    begun = [Started(1, *words, environment={k: str(v) for k, v in value.items()}) for value in values]
    return [one.end() for one in begun]


def test_launchers():
    batch = [*BASE, "--total-batch", 2 * 2 * WINDOW]
    expected = run(2, *batch)
    losses = re.findall(r"loss .*? lr", expected.out)
    alone = [*BASE, "--timeout", 2]
    for name, names, more in (
            ("torchrun with its store", TORCHRUN, address(TORCHELASTIC_USE_AGENT_STORE="True")),
            ("mpirun", OPEN_MPI, {}), ("mpiexec", MPICH, address()),
            ("srun", SLURM, {"SLURM_JOB_ID": str(os.getpid())}),
            ("srun and torchrun", TORCHRUN, address(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="5", SLURM_LOCALID="0"))):
        first, second = launched(names, 2, batch, **more)
        claim(first.code == second.code == 0 and re.findall(r"loss .*? lr", first.out) == losses and second.out == "",
              f"variables of {name}: the same losses as by --gpus, printed by rank 0", f"{first} {second}")
    refusals = (
        ("RANK without WORLD_SIZE", {"RANK": "0"}, ["RANK is set, WORLD_SIZE is not"]),
        ("no MASTER_PORT", {**dict(zip(TORCHRUN, "0202")), "MASTER_ADDR": "127.0.0.1"}, ["MASTER_PORT"]),
        ("a rank beyond the last", {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ("two launchers", {**address(), **dict(zip(TORCHRUN, "0202")), **dict(zip(OPEN_MPI, "1313"))},
         ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
        ("several machines without an address", dict(zip(OPEN_MPI, "0401")), ["MASTER_ADDR"]),
        ("fewer GPUs than processes", {**address(), **dict(zip(TORCHRUN, "1212")), "CUDA_CPU_DEVICES": "1"},
         ["[rank 1] train_gpt: ", "2 processes", "1 GPUs", "--gpus-per-node"]))
    for name, environment, parts in refusals:
        refused(1, alone, parts, name, environment=environment)
    torchrun = {**address(), **dict(zip(TORCHRUN, "0202"))}
    refused(1, [*alone, "--gpus", 2], ["--gpus 2", "WORLD_SIZE=2"], "--gpus below a launcher", environment=torchrun)
    for command in (["sample", "--from", "data/reference/hf_tiny"], ["plan"]):
        refused(1, command, ["one process"], f"{command[0]} below a launcher", environment=torchrun)


def test_connection():
    port = free_port()
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [*BASE, "--timeout", 3]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done, = launched(TORCHRUN, 2, words, only=[0], **names)
        claim(done.code == 2 and str(port) in done.err, "an occupied port is named", str(done))
    done, other = launched(TORCHRUN, 3, words, only=[0, 2], **names)
    claim(done.code == other.code == 1 and done.err.rstrip().endswith("missing ranks: 1"),
          "a rank that is missing is named, and all end", f"{done} {other}")
    first = {**dict(zip(TORCHRUN, "0202")), **names, "MASTER_PORT": str(port)}
    begun = Started(1, *words, "--timeout", 60, environment=first)

    def greet(text):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), 1)
            stranger.send(text)
            return stranger
        except OSError:
            return None
    strangers = [wait_for(lambda: greet(b"")), greet(b"GET / HTTP/1.1\r\n\r\n" * 9)]
    second, = launched(TORCHRUN, 2, words, only=[1], **names)
    done = begun.end()
    claim(all(strangers) and done.code == second.code == 0 and greet(b"") is None,
          "connections of strangers are ignored, and the port is closed afterwards", f"{done} {second}")


def test_cards():
    """Streams that run in any order that CUDA allows: what waits for too little shows as other bits."""
    if not args.card:
        return
    program = [args.card, "--as-train-gpt"]
    words = ["--total-batch", 3 * 2 * WINDOW * 2, "--steps", 2, *KEPT]
    plans = [run(1, "plan", *MODEL, "--vocab", 256, "--micro-batch", 2, "--gpus", gpus, "--json", program=program,
                 environment={"CUDA_CPU_CARD": "h100"}) for gpus in (1, 2)]
    one, two = (json.loads(plan.out)["bytes"]["cuda"] for plan in plans)
    claim(two - one >= 256 << 20, "the plan has what a communicator takes on a card", f"{one} {two}")
    for zero in range(4):
        plain = train(3, "plain", *words, "--zero", zero, program=program)
        runs = [train(3, f"card_{seed}", *words, "--zero", zero, program=program,
                      environment={"CUDA_CPU_CARD": "h100", "CUDA_CPU_SEED": str(seed)}) for seed in (1, 2, 3)]
        claim(all(same(plain, card) for card in runs),
              f"--zero {zero}: the same bits on a card, in whatever order its streams run", str(runs[0]))


def test_fp8():
    """In BF16, as the program for cards is."""
    if not args.card:
        return
    program = [args.card, "--as-train-gpt"]
    batch = ["--matmul", "fp8-all", "--total-batch", 2 * 2 * WINDOW, "--steps", 4, *KEPT]
    runs = {zero: train(2, f"fp8_{zero}", *batch, "--zero", zero, program=program) for zero in range(3)}
    claim(all(same(runs[0], runs[zero]) for zero in (1, 2)), "--matmul fp8-all: ZeRO 0, 1 and 2 give the same bits",
          str(runs[0]))
    def first_of_history(done):
        with open(os.path.join(done.folder, "step_000001", "trainer.json"), encoding="utf-8") as file:
            return json.load(file)["fp8_history"][0]    # of ln1 in the first layer, before any matmul
    batch[5] = 1
    known = []
    for seed in range(4):       # in some of them it is not the first rank that has the largest
        several = train(2, "fp8_two", *batch, "--seed", seed, program=program)
        alone = train(1, "fp8_one", *batch, "--seed", seed, "--micro-batch", 4, program=program)
        known.append(several.code == alone.code == 0 and first_of_history(several) == first_of_history(alone) > 0)
    claim(all(known), "scales know the largest value of all ranks", f"{known} {several} {alone}")


def test_overlap():
    """In a trace of streams that run in any order that CUDA allows: whether a kernel that was handed over after
    something was sent began before that had arrived."""
    if not args.card:
        return
    found = {}
    for overlap in ("on", "off"):
        path = os.path.join(scratch, f"trace_{overlap}.json")
        found[overlap] = 0
        for seed in (1, 2, 3):
            train(2, "overlap", "--steps", 2, "--zero", 3, "--overlap", overlap, "--trace", path,
                  program=[args.card, "--as-train-gpt"],
                  environment={"CUDA_CPU_CARD": "h100", "CUDA_CPU_SEED": str(seed)})
            events = json.load(open(path, encoding="utf-8"))["traceEvents"]
            rows = {e["args"]["name"]: e["tid"] for e in events if e.get("ph") == "M"}
            work = [e for e in events if e.get("ph") == "X" and e["tid"] != rows["CPU: launches"]]    # as handed over
            names = {e["name"] for e in work if e["tid"] == rows["stream: between GPUs"]}
            first = {e["tid"] for e in work if e["args"].get("priority", 0) < 0}
            for i, sent in enumerate(work):
                if sent["tid"] == rows["stream: between GPUs"]:
                    found[overlap] += sum(later["tid"] == rows["stream: kernels"] and later["ts"] < sent["ts"]
                                          for later in work[i + 1:])
    claim(found["on"] > 0 and found["off"] == 0,
          "kernels overtake what is sent before them, and with --overlap off none does", f"{found}")
    claim({"all-gather", "reduce-scatter", "all-reduce"} <= names and first == {rows["stream: between GPUs"]},
          "communication has a stream of its own, of high priority, and a row in the trace", f"{names} {first}")


def main():
    global args, scratch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="./train_gpt", help="the program")
    parser.add_argument("--card", help="tests of the model at width 32 (build/test/bf16-32/test_gpt), for those claims")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", help="of: " + " ".join(sorted(n[5:] for n in globals() if n[:5] == "test_")))
    parser.add_argument("--same-bits", choices=["yes", "no"], default="yes")
    args = parser.parse_args()
    args.ours = [os.path.abspath(args.ours)]
    args.card = args.card and os.path.abspath(args.card)
    with tempfile.TemporaryDirectory() as scratch:
        globals()["scratch"] = scratch
        for name, test in list(globals().items()):
            if name.startswith("test_") and (not args.only or name[5:] in args.only.split()):
                began = time.time()
                print(name[5:], flush=True)
                test()
                print(f"        {time.time() - began:.1f} s", flush=True)
    finish()


if __name__ == "__main__":
    main()

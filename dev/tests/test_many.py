#!/usr/bin/env python3
"""Tests of training on several GPUs: 1 to 4 processes, on whatever the program was built for.

    python3 dev/tests/test_many.py [--ours ./train_gpt] [--ranks 2 3 4] [--only WORDS] [--same-bits yes]

On CPUs every sum has one order, so that results are compared bit by bit; NCCL may choose another one for each kind of
collective, so that on GPUs (--same-bits no) they are compared to rounding.
"""
import argparse
import concurrent.futures
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
from testing import expect, finish

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
U = 2.0 ** -24      # FP32: relative error of a sum of two numbers
ENOUGH = 120        # seconds, for every run here
SOON = 20           # in which processes end after one of them died, on a busy machine
args = None
scratch = ""

# Odd on purpose: 3 layers, a context that is no power of two, and sizes that neither 3 nor 4 divides.
MODEL = ["--layers", 3, "--heads", 2, "--channels", 32, "--context", 24]
DATA = ["--data", os.path.join(ROOT, "data", "shakespeare.txt")]
TRAIN = ["train", *MODEL, *DATA, "--micro-batch", 2, "--warmup", 1, "--lr", 1e-3, "--eval-every", 0,
         "--checkpoint-every", 0, "--matmul-tuning", "off"]
ONE_STEP = [*TRAIN, "--steps", 1]
KEPT = ["--checkpoint-every", 100]      # one, at the end
MICRO = 2 * 24      # tokens of a micro-batch


# ---- runs

class OfN(int):
    """A number of ranks that is smaller where the machine has fewer GPUs."""


def most(ranks):
    return OfN(min(ranks, max(args.ranks)))


def path(*names):
    return os.path.join(scratch, *names)


def fresh(name):
    shutil.rmtree(path(name), ignore_errors=True)
    return path(name)


class Run:
    """A command, started; with several ranks by --gpus. end() waits for it."""
    beyond = []     # commands that ask for a number of ranks that test-many-gpu N=2 does not have

    def __init__(self, ranks, *words, program=None, environment=None, of=1):     # of: ranks that a launcher starts
        words = list(map(str, words))
        if any(n > 2 and not isinstance(n, OfN) for n in (ranks, of)):
            Run.beyond.append(f"{max(ranks, of)} ranks: {words}")
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.folder = words[words.index("--out") + 1] if "--out" in words else None
        self.files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2)]
        self.process = subprocess.Popen(
            [*(program or [args.ours]), *words, *(["--gpus", str(ranks)] if ranks > 1 else [])], cwd=ROOT,
            env={**kept, **(environment or {})}, stdout=self.files[0], stderr=self.files[1], start_new_session=True)

    def pids(self, ranks):
        """The processes of the ranks, which are started in their order."""
        def children():
            pid = self.process.pid
            return list(map(int, open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8").read().split()))
        wait_for(lambda: len(children()) >= ranks)
        return children()[:ranks]

    def end(self, timeout=ENOUGH):
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.code = None
        for file in self.files:
            file.seek(0)
        self.out, self.err = (file.read() for file in self.files)
        self.said = re.findall(r".*train_gpt: .*", self.err)
        log = os.path.join(self.folder or "", "log.jsonl")
        records = [json.loads(line) for line in open(log, encoding="utf-8")] if os.path.exists(log) else []
        self.header = next((record["run"] for record in records if "run" in record), {})
        self.losses, self.norms = ([r[name] for r in records if "loss" in r] for name in ("loss", "norm"))
        self.last = records[-1].get("step", 0) if records else 0
        return self

    def checkpoints(self):
        return sorted(glob.glob(os.path.join(self.folder, "step_*")))

    def has_whole_checkpoints(self):
        return bool(self.checkpoints()) and all(os.path.exists(step + "/trainer.json") for step in self.checkpoints())

    def __str__(self):
        return f"exit {self.code}: {self.out[-300:]} {self.err[-900:]}"


def wait_for(condition, seconds=ENOUGH):
    until = time.time() + seconds
    while not (result := condition()) and time.time() < until:
        time.sleep(0.02)
    return result


def run(ranks, *words, **more):
    return Run(ranks, *words, **more).end()


def train(ranks, name, *words, **more):
    """Trains in the folder `name`, which is emptied unless the run is resumed."""
    return run(ranks, *TRAIN, "--out", path(name) if "--resume" in words else fresh(name), *words, **more)


def tensors(done):
    """The bytes of the last checkpoint's files."""
    folder = done.checkpoints()[-1]
    return [open(os.path.join(folder, name), "rb").read() for name in ("model.safetensors", "optimizer.safetensors")]


def near(a, b, limit):
    return len(a) == len(b) > 0 and all(abs(x - y) <= limit * abs(y) for x, y in zip(a, b))


def same(a, *others):
    """Runs that are equal bit by bit; where sums may be in another order, near."""
    if any(done.code or not done.losses for done in (a, *others)):
        return False
    if args.same_bits == "no":
        return all(near(a.losses, b.losses, 1e-5) and near(a.norms, b.norms, 1e-3) for b in others)
    return all((a.losses, a.norms, tensors(a)) == (b.losses, b.norms, tensors(b)) for b in others)


def refused(ranks, words, parts, text, code=2, **more):
    done = run(ranks, *words, **more)
    one = len(done.said) == 1 + (code == 1) and all(part in done.said[0] for part in parts)
    expect(one and done.code == code, f"{text}: one message, and exit code {code}", str(done))


def two_at_once(*calls):
    """For what waits rather than computes."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(call) for call in calls]:
            result.result()


# ---- values, memory, communication volume

def test_stages():
    """With one micro-batch all stages of ZeRO add up in the same order; with more, 0 and 1 add up micro-batches first,
    2 and 3 ranks first."""
    for ranks in args.ranks:
        for micro_batches, groups in ((1, ["0123"]), (3, ["01", "23"])):
            batch = ["--total-batch", ranks * micro_batches * MICRO]
            runs = {zero: train(ranks, f"stage_{zero}", *batch, "--steps", 4, *KEPT, "--zero", zero)
                    for zero in "0123"}
            text = f"{ranks} ranks x {micro_batches} micro-batches"
            for group in groups:
                expect(same(*(runs[zero] for zero in group)), f"{text}: ZeRO {', '.join(group)} have the same losses, "
                       "norms, weights and moments", str(runs[group[0]]))
            expect(near(runs["2"].losses, runs["0"].losses, 1e-5) and near(runs["2"].norms, runs["0"].norms, 1e-3),
                   f"{text}: ZeRO 2 differs from 0 by rounding at most", f"{runs['0'].losses} {runs['2'].losses}")
        for zero, done in runs.items():
            planned = run(1, "plan", *MODEL, *batch, "--vocab", 256, "--micro-batch", 2, "--gpus", ranks, "--zero",
                          zero, "--json", "--precision", done.header.get("precision", "fp32"))
            plan = json.loads(planned.out)
            expect(done.header["planned_bytes"] == plan["bytes"]["total"] and "allocated as planned" in done.out,
                   f"{ranks} ranks, --zero {zero}: the memory of each is as planned", str(done))
            sent = re.search(r"sent +([0-9.]+) (kB|MB) a step", done.out)
            found = float(sent[1]) * {"kB": 1e3, "MB": 1e6}[sent[2]]
            rounding = 6e4 if found >= 1e6 else 60    # the printed digits; norm and losses are sent besides
            expect(abs(found - plan["bytes_sent"]) <= rounding + 1000,
                   f"{ranks} ranks, --zero {zero}: each sends what is planned", f"{plan['bytes_sent']}: {done}")


def test_modes():
    batch = ["--total-batch", 3 * 2 * MICRO, "--steps", 3, *KEPT]
    for zero in (0, 3):
        plain = train(most(3), "plain", *batch, "--zero", zero)
        for mode in ("--recompute selective", "--recompute full", "--overlap off", "--matmul-tuning on"):
            expect(same(plain, train(most(3), "mode", *batch, "--zero", zero, *mode.split())),
                   f"--zero {zero} {mode}: the same bits as without")


def test_sums():
    """Sums over ranks against one process that accumulates. Losses of the first step are those of the same windows by
    the same weights. Gradients are k micro-batches' gradients g_i, added in another order: each element's error is at
    most (k - 1) U times the sum of |g_i|, twice as much between two orders. AdamW's first step moves a weight by lr g /
    (|g| + eps), so an error of d in g moves the next loss by at most lr sqrt(P) |d|, by Cauchy and Schwarz."""
    for ranks, k in ((most(2), 2), (most(3), 6), (most(4), 4)):
        batch = ["--total-batch", k * MICRO, "--steps", 2]
        one, many = train(1, "one", *batch), train(ranks, "many", *batch)
        single = train(1, "single", "--steps", k, "--lr", 0, "--min-lr", 0)     # the micro-batches' own norms
        error = 2 * (k - 1) * U * sum(single.norms) / k
        detail = f"losses {one.losses} {many.losses}, norms {one.norms} {many.norms}, limit {error}"
        limit = 1e-3 * math.sqrt(one.header["model"]["parameters"]) * error + 2 * U * one.losses[1]
        expect(len(many.losses) == 2 and abs(many.losses[0] - one.losses[0]) <= 1e-12 * one.losses[0] and
               abs(many.norms[0] - one.norms[0]) <= error and abs(many.losses[1] - one.losses[1]) <= limit,
               f"{k} micro-batches on {ranks} ranks: loss and norm equal one rank's, the next loss within {limit:.1e}",
               detail)


def test_tuning():
    """By files that each rank has of its own, rank 0 would take one algorithm and rank 1 another."""
    if args.same_bits == "no":
        return
    words = [*TRAIN, "--steps", 2, "--total-batch", 2 * MICRO, "--matmul-tuning", "on"]
    for name in ("coarse", "fast"):
        run(1, *words, environment={"XDG_CACHE_HOME": path(name), "CUDA_CPU_MATMULS": name + ",slow"})
    norms = {}
    for files in (("coarse", "coarse"), ("fast", "fast"), ("coarse", "fast")):
        more = [{"XDG_CACHE_HOME": path(name), "CUDA_CPU_MATMULS": "slow,fast,coarse"} for name in files]
        done, other = launched(TORCHRUN, 2, [*words, "--out", fresh("tuned")], by_rank=more, **address())
        norms[files] = done.code == other.code == 0 and done.norms
    expect(norms["coarse", "fast"] == norms["coarse", "coarse"] != norms["fast", "fast"] and norms["fast", "fast"],
           "all ranks take the matmul algorithms that rank 0 has chosen", f"{norms} {done} {other}")


# ---- checkpoints, evaluation

def test_resume():
    batch = ["--total-batch", 12 * MICRO, "--schedule", "constant", *KEPT]
    whole = train(most(4), "whole", *batch, "--steps", 6, "--zero", 2)
    first = train(most(4), "parts", *batch, "--steps", 3, "--zero", 2)
    shutil.copytree(first.folder, fresh("again"))
    again = train(most(4), "again", "--resume", "--steps", 6, *KEPT)
    expect(same(whole, again), f"{most(4)} ranks write checkpoints and resume with the same bits", str(again))
    second = train(most(3), "parts", "--resume", "--steps", 6, "--zero", 3, *KEPT)
    third = train(1, "parts", "--resume", "--steps", 9, "--zero", 0, *KEPT)
    other = train(1, "other", *batch, "--steps", 9)
    expect([first.code, second.code, third.code] == [0, 0, 0] and near(third.losses, other.losses, 1e-5),
           f"{most(3)} ranks resume what {most(4)} began, then one, each with another stage of ZeRO: the losses are "
           "those of one alone, to rounding", f"{third.losses} {other.losses} {second} {third}")


def test_read():
    """Which bytes of a checkpoint's tensors a rank reads: with ZeRO its shard, and padding is in no file."""
    ranks, runs, read = most(3), {}, {}
    start = train(ranks, "read", "--total-batch", ranks * MICRO, "--steps", 1, *KEPT).folder
    for zero in range(4):
        shutil.copytree(start, fresh(f"read_{zero}"))
        runs[zero] = train(ranks, f"read_{zero}", "--resume", "--steps", 2, "--zero", zero, *KEPT)
        read[zero] = [int(n) for line in re.findall(r"^read .*: (.*)", runs[zero].out, re.M) for n in line.split()]
    size = 4 * runs[0].header["model"]["parameters"]
    master = ranks if runs[0].header["precision"] == "fp32" else 1     # ranks that read a weight, with ZeRO 1 and 2
    expect(read[0] == [3 * size] * ranks and sum(read[1]) == sum(read[2]) == (2 + master) * size and
           sum(read[3]) == 3 * size, "each rank reads the part of weights and moments that it keeps", f"{read} {size}")
    expect(max(read[3]) < 2 * size and max(read[1]) < 2.5 * size and same(*runs.values()),
           "so with ZeRO fewer bytes, and the results are the same", f"{read} {size} {runs[3]}")
    with open(os.path.join(start, "step_000001", "optimizer.safetensors"), "r+b") as file:
        file.seek(-4, os.SEEK_END)      # the last element of v, in the last tensor's shard of the last rank
        file.write(struct.pack("<f", math.nan))
    refused(ranks, [*TRAIN, "--resume", "--out", start, "--steps", 2, "--zero", 1],
            ["optimizer.safetensors", "holds nan at element"], "a bad moment that only one rank reads")
    with open(os.path.join(start, "log.jsonl"), encoding="utf-8") as log:
        expect(log.read().count('"run"') == 1, "and the run's log is as before")


def test_evaluation():
    words = ["--steps", 1, "--total-batch", 12 * MICRO, "--eval-every", 1, "--eval-sequences", 11, "--sample-every", 1,
             "--sample-tokens", 20, "--lr", 0, "--min-lr", 0, *KEPT]
    one, *several = [train(ranks, f"eval_{ranks}", *words, "--zero", zero)
                     for ranks, zero in ((1, 0), (most(3), 0), (most(4), 3))]
    loss = ["eval", "--from", one.checkpoints()[-1], "--data", "LICENSE", "--micro-batch", 4]
    scores = ["eval", "--from", "data/reference/hf_tiny", "--hellaswag", "data/reference/hellaswag.bin",
              "--micro-batch", 2]
    for text, pattern, runs in (
            ("validation loss and samples", r"validation loss.*|-- sample --(?:.|\n)*?\n------", [one, *several]),
            ("eval's loss", r"loss(?:.|\n)* bytes", [run(n, *loss) for n in (1, 2, most(3))]),
            ("HellaSwag's scores, whose endings are divided among ranks,", r"HellaSwag.* over 16 questions",
             [run(n, *scores) for n in (1, 2, most(3))])):
        found = [re.findall(pattern, done.out) for done in runs]
        expect(found[0] and found[0] == found[1] == found[2], f"{text} of several ranks are those of one",
               f"{found} {runs[1]}")


# ---- errors, deaths, hangs

def test_errors():
    unit, total = most(3) * MICRO, 5 * MICRO
    taken = fresh("taken")
    os.makedirs(taken)
    open(os.path.join(taken, "log.jsonl"), "w", encoding="utf-8").close()
    for text, ranks, words, parts, *code in (
            ("an unknown flag", 2, ["--no-such-flag"], ["--no-such-flag"]),
            ("a total batch that the ranks cannot share, with the nearest that they can", most(3),
             ["--total-batch", total], ["x GPUs", str(total // unit * unit), str((total // unit + 1) * unit)]),
            ("--graph on", 2, ["--graph", "on"], ["--graph"]),
            ("a folder that holds a run", 2, ["--out", taken], ["already holds a run"]),
            ("a loss that is not finite", most(3), ["--steps", 9, "--lr", 1e30, "--grad-clip", 0], ["loss", "stopped"],
             1)):
        refused(ranks, [*ONE_STEP, *words], parts, text, *code)
    if args.same_bits == "yes":
        refused(2, ONE_STEP, ["--gpus 2", "this machine has 1"], "more GPUs than there are",
                environment={"CUDA_CPU_DEVICES": "1"})
        done = run(1, *ONE_STEP, "--gpus", "all", environment={"CUDA_CPU_DEVICES": "3"})
        expect("x 3 GPUs" in done.out and done.code == 0, "--gpus all takes all GPUs of the machine", str(done))


def begin_long(ranks, name, *words):
    """A run that takes long, at its first checkpoint."""
    begun = Run(ranks, *TRAIN, "--steps", 10 ** 6, "--checkpoint-every", 20, "--keep", 2, "--out", fresh(name), *words)
    wait_for(lambda: begun.checkpoints() or begun.process.poll() is not None)
    return begun


def gone(process):
    """Whether it ends soon: then it has no program, even if its parent has not noticed."""
    return wait_for(lambda: not os.path.exists(f"/proc/{process}/exe"), SOON)


def test_deaths():
    chance, ranks = random.Random(1), most(4)
    for number in (signal.SIGKILL, signal.SIGSEGV):
        victim, zero = chance.randrange(ranks), chance.randrange(4)
        begun = begin_long(ranks, "killed", "--zero", zero)
        processes = begun.pids(ranks)
        os.kill(processes[victim], number)
        killed = time.time()
        done = begun.end()
        parts = [f"rank {victim} (process {processes[victim]}) was killed by signal {int(number)} ", " in step ",
                 "checkpoint is " + os.path.join(begun.folder, "step_")]
        expect(len(done.said) == 1 and all(part in done.said[0] for part in parts) and time.time() - killed < SOON and
               done.code == 1 and all(map(gone, processes)) and done.has_whole_checkpoints(),
               f"{ranks} ranks, --zero {zero}, rank {victim} killed by signal {int(number)}: one line, all end, "
               f"checkpoints are whole", str(done))
    begun = begin_long(2, "killed")
    processes = begun.pids(2)
    begun.process.kill()
    begun.process.wait()
    expect(all(map(gone, processes)), "ranks end when the process that supervises them is killed")


def test_signals():
    for number, to in ((signal.SIGINT, "the run"), (signal.SIGTERM, "one rank")):
        begun = begin_long(most(3), "signalled", "--zero", 1)
        os.kill(begun.pids(most(3))[1] if to == "one rank" else begun.process.pid, number)
        done = begun.end()
        expect(done.code == 0 and done.has_whole_checkpoints() and
               done.checkpoints()[-1].endswith(f"step_{done.last:06d}"),
               f"signal {int(number)} to {to}: all stop after the step, with a checkpoint of it",
               f"{done.last} {done.checkpoints()} {done}")


def stop_rank(begun, victim, text, place=", in "):
    """A stopped process is what a hang looks like to the others."""
    processes = begun.pids(most(3))
    os.kill(processes[victim], signal.SIGSTOP)
    done = begun.end(2 + SOON)
    others = [line for line in done.said if re.search("no progress for 2 s|missing ranks", line) and
              f"rank {victim} on" not in line]
    expect(others and done.code == 1 and all(map(gone, processes)) and place in others[0] and
           re.search(r"rank \d+ \(process \d+\) exited with code 1 in step \d+; the last checkpoint is", done.said[-1]),
           f"rank {victim} stopped {text} with --timeout 2: the others say where they wait, the supervising process "
           "which rank has ended, and all end", str(done))


def stop_all(begun):
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in begun.pids(2):
            os.kill(process, number)
        time.sleep(3)
    begun.process.send_signal(signal.SIGTERM)
    done = begun.end()
    expect(done.code == 0 and not done.said, "a run that was stopped as a whole for longer than --timeout continues",
           str(done))


def stop_eval():
    model = train(1, "model", "--steps", 1, *KEPT).checkpoints()[-1]
    begun = Run(most(3), "eval", "--from", model, *DATA, "--micro-batch", 1, "--timeout", 2)
    time.sleep(1.5)
    stop_rank(begun, 1, "in eval")


def fail_nccl():
    done = run(2, *ONE_STEP, "--timeout", 60, environment={"CUDA_CPU_NCCL_FAILURE": "9"})
    expect(done.code == 1 and "NCCL reports: a remote rank failed" in done.err,
           "an asynchronous error of NCCL ends a rank that waits, long before --timeout", str(done))


def test_hangs():
    two_at_once(
        lambda: stop_all(begin_long(2, "paused", "--timeout", 2)),
        lambda: stop_rank(begin_long(most(3), "stopped_1", "--timeout", 2), 1, "at a step"),
        lambda: stop_rank(begin_long(most(3), "stopped_0", "--timeout", 2), 0, "at a step"),
        lambda: stop_rank(Run(most(3), *ONE_STEP, "--timeout", 2), 1, "while loading", ""),
        stop_eval, *([fail_nccl] if args.same_bits == "yes" else []))


def test_slow_checkpoint():
    """Each write to a checkpoint's tensors takes a while, by a preloaded library."""
    library = path("slow.so")
    subprocess.run(["cc", "-x", "c", "-shared", "-fPIC", "-o", library, "-"], check=True, text=True, input="""
#define _GNU_SOURCE
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

    def begin(ranks, name, *words, slow_us="60000"):
        return Run(ranks, *ONE_STEP, *KEPT, "--timeout", 2, "--out", fresh(name), *words,
                   environment={"LD_PRELOAD": library, "SLOW_US": slow_us})

    def slow(zero):
        began = time.time()
        done = begin(2, f"slow_{zero}", "--zero", zero).end()
        expect(done.code == 0 and done.has_whole_checkpoints() and time.time() - began > 5,
               f"--zero {zero}: a checkpoint that takes longer than --timeout and makes progress is no hang", str(done))

    def stopped(zero, place):
        begun = begin(most(3), f"slow_stopped_{zero}", "--zero", zero)
        wait_for(lambda: glob.glob(os.path.join(begun.folder, "unfinished_*", "model.safetensors")))
        stop_rank(begun, 0, f"in a checkpoint, --zero {zero}", ", in " + place)

    def one_write():
        done = begin(2, "slow_write", slow_us="60000000").end()
        expect(done.code == 1 and re.search(r"rank 0 on .*, in rank 0's checkpoint: no progress for 2 s", done.err),
               "a write of rank 0 that takes longer than --timeout is a hang", str(done))

    two_at_once(lambda: slow(0), lambda: slow(3), lambda: stopped(0, "rank 0's"), lambda: stopped(3, "broadcast"),
                one_write)


# ---- launchers

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple("OMPI_COMM_WORLD_" + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def address(**more):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), **more}


def launched(names, size, words, only=None, by_rank=None, **more):
    """The ranks of a run, each with a launcher's variables: local ranks and sizes are those of the whole run."""
    values = [{**dict(zip(names, (rank, size, rank, size))), **more, **(by_rank[rank] if by_rank else {})}
              for rank in (range(size) if only is None else only)]
    begun = [Run(1, *words, environment={k: str(v) for k, v in value.items()}, of=size) for value in values]
    return [one.end() for one in begun]


def test_launchers():
    batch = [*ONE_STEP, "--total-batch", 2 * MICRO]
    losses = re.findall(r"loss .*? lr", run(2, *batch).out)
    for text, names, more in (
            ("torchrun", TORCHRUN, address()),
            ("mpirun", OPEN_MPI, {}), ("mpiexec", MPICH, address()),
            ("srun", SLURM, {"SLURM_JOB_ID": os.getpid()}),
            ("srun --mpi=pmi2", SLURM, {"SLURM_JOB_ID": os.getpid(), "PMI_RANK": 0, "PMI_SIZE": 2}),
            ("srun and torchrun", TORCHRUN, address(SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=5, SLURM_LOCALID=0))):
        first, second = launched(names, 2, batch, **more)
        expect(first.code == second.code == 0 and losses and re.findall(r"loss .*? lr", first.out) == losses and
               second.out == "", f"variables of {text}: the same losses as by --gpus, printed by rank 0",
               f"{first} {second}")
    train_words, torchrun = [*ONE_STEP, "--timeout", 2], {**dict(zip(TORCHRUN, "0202")), **address()}
    fewer = [("fewer GPUs than processes", train_words, {**address(), **dict(zip(TORCHRUN, "1212")),
              "CUDA_CPU_DEVICES": "1"}, ["[rank 1] train_gpt: ", "2 processes", "1 GPUs", "--gpus-per-node"])]
    for text, words, environment, parts in (
            ("RANK without WORLD_SIZE", train_words, {"RANK": "0"}, ["WORLD_SIZE is not set", "RANK", "torchrun"]),
            ("PMI_RANK without MPI_LOCALRANKID", train_words, dict(zip(MPICH[:2], "02")), ["MPI_LOCALRANKID is"]),
            ("WORLD_SIZE without RANK", train_words, {"WORLD_SIZE": "2"}, ["RANK is not set", "torchrun"]),
            ("no MASTER_ADDR", train_words, {**dict(zip(TORCHRUN, "0202")), "MASTER_PORT": "20000"},
             ["MASTER_ADDR is not set"]),
            ("no MASTER_PORT", train_words, {**dict(zip(TORCHRUN, "0202")), "MASTER_ADDR": "127.0.0.1"},
             ["MASTER_PORT is not set"]),
            ("a rank beyond the last", train_words, dict(zip(TORCHRUN, "222")), ["RANK=2", "WORLD_SIZE=2"]),
            ("two launchers with two ranks", train_words, {**torchrun, **dict(zip(OPEN_MPI, "1212"))},
             ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
            ("two launchers with two sizes", train_words, {**torchrun, **dict(zip(OPEN_MPI, "0303"))},
             ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=3"]),
            ("several machines without an address", train_words, dict(zip(OPEN_MPI, "0401")), ["MASTER_ADDR"]),
            ("--gpus below a launcher", [*train_words, "--gpus", 2], torchrun, ["--gpus 2", "WORLD_SIZE=2"]),
            ("sample below a launcher", ["sample", "--from", "data/reference/hf_tiny"], torchrun, ["one process"]),
            ("plan below a launcher", ["plan"], torchrun, ["one process"]),
            *(fewer if args.same_bits == "yes" else [])):
        refused(1, words, parts, text, environment=environment)


def test_connection():
    words, names = [*ONE_STEP, "--timeout", 3], address()
    here = ("127.0.0.1", int(names["MASTER_PORT"]))
    with socket.socket() as taken:
        taken.bind(here)
        taken.listen()
        done, = launched(TORCHRUN, 2, words, only=[0], **names)
        expect(done.code == 2 and names["MASTER_PORT"] in done.err, "an occupied port is named", str(done))
        done, other = launched(TORCHRUN, 2, words, **names, TORCHELASTIC_USE_AGENT_STORE="True")
        expect(done.code == other.code == 0, "torchrun's own store occupies MASTER_PORT: the next one is used",
               f"{done} {other}")
    ranks = most(3)
    done, *others = launched(TORCHRUN, ranks, words, only=[0, *range(2, ranks)], **names)
    expect(all(one.code == 1 for one in (done, *others)) and done.err.rstrip().endswith("missing ranks: 1"),
           "a rank that is missing is named, and all end", f"{done} {others}")
    words += ["--timeout", 60, "--steps", 10 ** 6, "--out", fresh("open")]
    begun = Run(1, *words, environment={**dict(zip(TORCHRUN, "0202")), **names})

    def greet(text):
        try:
            stranger = socket.create_connection(here, 1)
            stranger.send(text)
            return stranger
        except OSError:
            return None
    strangers = [wait_for(lambda: greet(b"")), greet(b"GET / HTTP/1.1\r\n\r\n" * 9)]
    second = Run(1, *words, environment={**dict(zip(TORCHRUN, "1212")), **names})
    trains = wait_for(lambda: os.path.exists(path("open", "log.jsonl")), SOON)
    is_closed = greet(b"") is None
    for one in (begun, second):
        one.process.send_signal(signal.SIGTERM)
    done, other = begun.end(), second.end()
    expect(all(strangers) and trains and is_closed and done.code == other.code == 0,
           "connections of strangers are ignored, and the port is closed while the ranks train", f"{done} {other}")


# ---- the emulator: its NCCL, and cards, whose streams run in any order that CUDA allows

def test_nccl():
    for ranks in (1, 2, 3, 4) if args.nccl else ():
        done = subprocess.run([args.nccl, str(ranks)], capture_output=True, text=True, check=False)
        totals = re.search(r"[1-9]\d* passed, 0 failed", done.stdout)
        expect(totals and done.returncode == 0, f"test_nccl with {ranks} ranks: {totals and totals[0]}",
               "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok")) + done.stderr)


def card(ranks, name, *words, seed=None):
    """A run of the program for tests; with a seed on an emulated H100."""
    return train(ranks, name, *words, program=[args.card, "--as-train-gpt"],
                 environment={} if seed is None else {"CUDA_CPU_CARD": "h100", "CUDA_CPU_SEED": str(seed)})


def overtakers(trace):
    """Of a trace: kernels that were launched after communication and began before it; the names of communication; the
    rows of high priority, and that of communication."""
    events = json.load(open(trace, encoding="utf-8"))["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e.get("ph") == "M"}
    sending, kernels = rows["stream: between GPUs"], rows["stream: kernels"]
    work = [e for e in events if e.get("ph") == "X" and e["tid"] != rows["CPU: launches"]]    # as handed over
    early = sum(later["tid"] == kernels and later["ts"] < sent["ts"]
                for i, sent in enumerate(work) if sent["tid"] == sending for later in work[i + 1:])
    return (early, {e["name"] for e in work if e["tid"] == sending},
            {e["tid"] for e in work if e["args"].get("priority", 0) < 0} == {sending})


def test_cards():
    """What waits for too little shows as other bits, and NCCL's NVLS with three ranks or more."""
    if not args.card:
        return
    plans = [run(1, "plan", *MODEL, "--vocab", 256, "--micro-batch", 2, "--gpus", gpus, "--json",
                 program=[args.card, "--as-train-gpt"], environment={"CUDA_CPU_CARD": "h100"}) for gpus in (1, 2)]
    one, two = (json.loads(plan.out)["bytes"]["cuda"] for plan in plans)
    expect(two - one >= 256 << 20, "the plan has what a communicator takes on a card", f"{one} {two}")
    words, early = ["--total-batch", 3 * 2 * MICRO, "--steps", 2, *KEPT], {"on": 0, "off": 0}
    for zero in range(4):
        plain = card(most(3), "plain", *words, "--zero", zero)
        runs = [card(most(3), f"card_{seed}", *words, "--zero", zero, "--trace", path(f"trace_{seed}"), seed=seed)
                for seed in (1, 2, 3)]
        expect(same(plain, *runs), f"--zero {zero}: the same bits on a card, in whatever order its streams run",
               str(runs[0]))
    for seed in (1, 2, 3):
        found, names, has_priority = overtakers(path(f"trace_{seed}"))      # of ZeRO 3
        early["on"] += found
        card(2, "overlap", "--steps", 2, "--zero", 3, "--overlap", "off", "--trace", path("trace_off"), seed=seed)
        early["off"] += overtakers(path("trace_off"))[0]
    expect(early["on"] > 0 and early["off"] == 0,
           "kernels overtake what is sent before them, and with --overlap off none does", f"{early}")
    expect({"all-gather", "reduce-scatter", "all-reduce"} <= names and has_priority,
           "communication has a stream of its own, of high priority, and a row in the trace", f"{names}")
    done = run(2, *ONE_STEP, "--zero", 3, "--total-batch", 12 * 2 * MICRO, program=[args.card, "--as-train-gpt"],
               environment={"CUDA_CPU_CARD": "h100", "CUDA_CPU_NCCL_FAILURE": "40"})
    expect(done.code == 1 and "in wait for the device: NCCL reports" in done.err,
           "a rank that waits for an event says so, not what it launched last", str(done))


def test_fp8():
    """In BF16, as the program for cards is."""
    if not args.card:
        return
    words = ["--matmul", "fp8-all", "--total-batch", 2 * MICRO, *KEPT]
    runs = [card(2, f"fp8_{zero}", *words, "--steps", 4, "--zero", zero) for zero in range(3)]
    expect(same(*runs), "--matmul fp8-all: ZeRO 0, 1 and 2 give the same bits", str(runs[0]))

    def first_of_history(done):
        with open(os.path.join(done.checkpoints()[0], "trainer.json"), encoding="utf-8") as file:
            return json.load(file)["fp8_history"][0]    # of ln1 in the first layer, before any matmul
    found = []
    for seed in range(4):       # in some of them it is not the first rank that has the largest
        both = [card(ranks, f"fp8_{ranks}", *words, "--steps", 1, "--seed", seed, "--micro-batch", micro_batch)
                for ranks, micro_batch in ((2, 2), (1, 4))]
        found.append([done.code == 0 and first_of_history(done) for done in both])
    expect(all(two == one > 0 for two, one in found), "FP8 scales use the amax of all ranks", f"{found} {both[0]}")


def main():
    global args, scratch
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
            ("--ours", "./train_gpt", "the program"),
            ("--nccl", None, "tests of the emulated NCCL (build/test/many/test_nccl), to run them too"),
            ("--card", None, "tests of the model at width 32 (build/test/bf16-32/test_gpt), for cards and fp8")):
        parser.add_argument(name, type=os.path.abspath, default=default, help=text)
    parser.add_argument("--ranks", type=OfN, nargs="+", default=[OfN(n) for n in (2, 3, 4)])
    parser.add_argument("--only", default=" ".join(tests), help="of: %(default)s")
    parser.add_argument("--same-bits", choices=["yes", "no"], default="yes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only.split():
            began = time.time()
            print(name, flush=True)
            tests[name]()
            print(f"        {time.time() - began:.1f} s", flush=True)
    expect(not Run.beyond, "each run has 1 or 2 ranks, or a number that depends on how many GPUs there are",
           str(Run.beyond))
    finish()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tests training on 1 to 4 GPUs, one process each, with a CPU or a GPU build.

    python3 dev/tests/test_many.py [--ours ./train_gpt] [--ranks 2 3 4] [--only WORDS] [--same-bits yes]

On CPUs each sum has a fixed order, so results are compared bit by bit. On GPUs NCCL may use another order for each kind
of collective, so --same-bits no compares results up to rounding.
"""
import argparse
import concurrent.futures
import functools
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
from testing import expect, finish, wait_for, write

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMEOUT = 120       # seconds for each run
END_LIMIT = 20      # seconds within which all processes end after one of them has died, even on a busy machine
args = None
scratch = ""

# Irregular sizes on purpose: 3 layers, a context that is not a power of two, groups of parameters that need padding.
MODEL = ["--layers", 3, "--heads", 2, "--channels", 32, "--context", 24]
DATA = ["--data", os.path.join(ROOT, "data", "shakespeare.txt")]
TRAIN = ["train", *MODEL, *DATA, "--micro-batch", 2, "--warmup", 1, "--lr", 1e-3, "--eval-every", 0,
         "--checkpoint-every", 0, "--matmul-tuning", "off"]
ONE_STEP = [*TRAIN, "--steps", 1]
CHECKPOINT = ["--checkpoint-every", 100]    # only one, at the end
MICRO = 2 * 24      # tokens in a micro-batch
GROUPED = ["--layers", 2, "--heads", 12, "--channels", 192]     # 2, 3 and 4 divide the heads and MODEL's context


def model_of(t):
    """Returns options: the model for tensor groups of t ranks."""
    return GROUPED if t > 1 else []


# ---- runs

class RankCount(int):
    """A number of ranks that is at most the largest of --ranks."""


def up_to(ranks):
    return RankCount(min(ranks, max(args.ranks)))


def plain_grids():
    """Returns pairs: the number of ranks, and 1: without tensor groups."""
    return [(ranks, 1) for ranks in args.ranks]


def grids():
    """Returns pairs: the number of ranks, and that of a tensor group."""
    return [(RankCount(ranks), t) for ranks, t in ((2, 2), (3, 3), (4, 2), (4, 4)) if ranks <= max(args.ranks)]


def pairs_of_ranks():
    """Returns 4 ranks or, with fewer --ranks, 2: one or two tensor groups of two."""
    return RankCount(up_to(4) // 2 * 2)


def path(*names):
    return os.path.join(scratch, *names)


def fresh(name):
    """Removes the folder `name`; returns its path."""
    shutil.rmtree(path(name), ignore_errors=True)
    return path(name)


class Run:
    """Starts a command, with --gpus if there are several ranks. end() waits until it ends and reads its results."""
    beyond = []     # commands that always use more than 2 ranks: they would fail in `make test-many-gpu N=2`

    def __init__(self, ranks, *words, program=None, environment=None, of=1):    # of: number of ranks of a launcher
        words = list(map(str, words))
        if any(n > 2 and not isinstance(n, RankCount) for n in (ranks, of)):
            Run.beyond.append(f"{max(ranks, of)} ranks: {words}")
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.folder = words[words.index("--out") + 1] if "--out" in words else None
        self.files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2)]
        self.process = subprocess.Popen(
            [*(program or [args.ours]), *words, *(["--gpus", str(ranks)] if ranks > 1 else [])], cwd=ROOT,
            env={**kept, **(environment or {})}, stdout=self.files[0], stderr=self.files[1], start_new_session=True)

    def pids(self, ranks):
        """Returns the process ids of the ranks, in the order of ranks."""
        def children():
            pid = self.process.pid
            return list(map(int, open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8").read().split()))
        wait_for(lambda: len(children()) >= ranks)
        return children()[:ranks]

    def end(self, timeout=TIMEOUT):
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.code = None
        for file in self.files:
            file.seek(0)
        self.out, self.err = (file.read() for file in self.files)
        self.messages = re.findall(r".*train_gpt: .*", self.err)
        log = os.path.join(self.folder or "", "log.jsonl")
        records = [json.loads(line) for line in open(log, encoding="utf-8")] if os.path.exists(log) else []
        self.header = next((record["run"] for record in records if "run" in record), {})
        self.losses, self.norms = ([r[name] for r in records if "loss" in r] for name in ("loss", "norm"))
        self.steps = [r for r in records if "loss" in r]
        self.last = max((r.get("step", 0) for r in records), default=0)
        return self

    def checkpoints(self):
        return sorted(glob.glob(os.path.join(self.folder, "step_*")))

    def has_complete_checkpoints(self):
        return bool(self.checkpoints()) and all(os.path.exists(step + "/trainer.json") for step in self.checkpoints())

    def __str__(self):
        return f"exit {self.code}: {self.out[-300:]} {self.err[-900:]}"


def run(ranks, *words, **more):
    return Run(ranks, *words, **more).end()


def train(ranks, name, *words, **more):
    """Trains in the folder `name`, which is removed first unless the run is resumed."""
    return run(ranks, *TRAIN, "--out", path(name) if "--resume" in words else fresh(name), *words, **more)


def tensors(result):
    """Returns the contents of the last checkpoint's tensor files."""
    folder = result.checkpoints()[-1]
    return [open(os.path.join(folder, name), "rb").read() for name in ("model.safetensors", "optimizer.state")]


def tensor_values(result):
    """Returns {name: values} of all tensors of the last checkpoint: weights, m/... and v/..."""
    found = {}
    for content in tensors(result):
        begin = 8 + struct.unpack_from("<Q", content)[0]
        for name, entry in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                found[name] = struct.unpack_from(f"<{(end - first) // 4}f", content, begin + first)
    return found


def relative_l2(a, b):
    """Returns ||a - b|| / ||b||."""
    return math.dist(a, b) / math.hypot(*b)


def near(a, b, limit):
    """Returns whether two lists have the same length and their elements differ by at most limit, relative to b."""
    return len(a) == len(b) > 0 and all(abs(x - y) <= limit * abs(y) for x, y in zip(a, b))


def equal_up_to_rounding(a, b):
    losses, norms = (1e-5, 1e-3) if a.header.get("precision") == "fp32" else (1e-3, 1e-2)
    return near(a.losses, b.losses, losses) and near(a.norms, b.norms, norms)


def same(a, *others):
    """Returns whether runs are equal bit by bit; with --same-bits no, up to rounding."""
    if any(result.code or not result.losses for result in (a, *others)):
        return False
    if args.same_bits == "no":
        return all(equal_up_to_rounding(a, b) for b in others)
    return all((a.losses, a.norms, tensors(a)) == (b.losses, b.norms, tensors(b)) for b in others)


def expect_planned(result, ranks, *words, program=None):
    """Compares the memory and the bytes sent of a training run on `ranks` ranks with those that `plan` prints."""
    planned = run(1, "plan", *MODEL, "--vocab", 256, "--micro-batch", 2, "--gpus", ranks, "--json", "--precision",
                  result.header.get("precision", "fp32"), *words, program=program)
    plan, text = json.loads(planned.out or "{}"), " ".join(map(str, [ranks, "ranks,", *words]))
    expect(plan and result.header.get("planned_bytes") == plan["bytes"]["total"] and
           "allocated as planned" in result.out, f"{text}: each rank allocates the planned memory",
           f"{planned} {result}")
    sent = re.search(r"sent +([0-9.]+) (kB|MB) a step", result.out)
    found = float(sent[1]) * {"kB": 1e3, "MB": 1e6}[sent[2]] if sent else math.nan
    rounding = 6e4 if found >= 1e6 else 60    # of the printed digits; norm and losses add at most 1000 bytes
    expect(abs(found - plan["bytes_sent"]) <= rounding + 1000, f"{text}: a rank sends the planned bytes",
           f"{plan['bytes_sent']}: {result}")


def expect_rejected(ranks, words, parts, text, code=2, **more):
    """Expects this exit code and one message, which contains `parts`; with code 1 the supervisor adds a second one."""
    result = run(ranks, *words, **more)
    one = len(result.messages) == 1 + (code == 1) and all(part in result.messages[0] for part in parts)
    expect(one and result.code == code, f"{text}: the run ends with one message and exit code {code}", str(result))


def run_concurrently(*calls):
    """Runs the calls on two threads, because they mostly wait."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(call) for call in calls]:
            result.result()


# ---- values, memory, communication volume

def test_sums():
    """Compares two steps of several ranks with those of one process. Without tensor groups the first loss is a sum of
    the same terms. Otherwise only rounding differs. A sum of K terms has a relative error of about sqrt(K) U, K is at
    most 4 C in a layer's matmuls, and forward and backward pass 8 of them per layer: so if all errors add up, 16
    sqrt(4 C) U. --eps is large, because AdamW would enlarge rounding errors of gradients near 0."""
    def compare(ranks, t, micro_batches, program=None):
        name = f"sums_{ranks}_{t}_{micro_batches}_{bool(program)}"
        words = [*model_of(t), "--total-batch", ranks // t * micro_batches * MICRO, "--steps", 2, "--lr", 1e-2, "--eps",
                 1e-2, *CHECKPOINT]
        one = train(1, name + "_one", *words, program=program)
        many = train(ranks, name, *words, "--tensor-parallel", t, program=program)
        precision = one.header.get("precision")
        limit = 16 * math.sqrt(4 * 192) * 2.0 ** -24 if precision == "fp32" else 0.05   # 2^-24: unit roundoff of FP32
        text = f"{ranks} ranks, t = {t}, {micro_batches} micro-batches, {precision}: "
        if one.code or many.code:
            return expect(False, text + "the runs end with exit code 0", f"{one} {many}")
        detail = f"losses {one.losses} {many.losses}, norms {one.norms} {many.norms}"
        expect(t > 1 or near(many.losses[:1], one.losses[:1], 1e-12), text + "the first loss is one rank's", detail)
        expect(near(many.losses, one.losses, limit) and near(many.norms, one.norms, limit),
               text + f"losses and norms are one rank's within {limit:.1e}", detail)
        expected, found = tensor_values(one), tensor_values(many)
        errors = {key: relative_l2(found[key], expected[key]) for key in expected}
        worst = max(errors, key=errors.get)
        expect(errors[worst] <= limit, text + "so are the weights and moments of each parameter",
               f"{worst}: {errors[worst]}")
    run_concurrently(*(functools.partial(compare, ranks, t, k) for ranks, t in [*plain_grids(), *grids()]
                       for k in (1, 3)),
                     *(functools.partial(compare, ranks, t, 1, [args.card, "--as-train-gpt"])
                       for ranks, t in grids() if args.card))


def test_bits():
    """Losses, norms, weights and moments depend neither on the ZeRO stage, nor on --recompute, --overlap and
    --matmul-tuning. With one micro-batch all stages add in the same order. With more, stages 0 and 1 sum over
    micro-batches and then over ranks, stages 2 and 3 over ranks and then over micro-batches. In ten steps differences
    between the copies of unsplit weights in a tensor group would grow with ZeRO 0; the other stages gather each weight
    from one rank."""
    more = {"0": ["--recompute", "none"], "1": ["--recompute", "selective", "--overlap", "off"],
            "2": ["--recompute", "full", "--matmul-tuning", "on"], "3": ["--recompute", "selective", "--overlap", "off"]}

    def compare(ranks, t, micro_batches, groups, attention="flash"):
        text = f"{ranks} ranks, t = {t}, {micro_batches} micro-batches, {attention} attention: ZeRO "
        words = [*model_of(t), "--total-batch", ranks // t * micro_batches * MICRO, "--tensor-parallel", t,
                 "--attention", attention]
        steps, first = ["--steps", 10 if micro_batches == 1 else 3, *CHECKPOINT], []
        for group in groups:
            name = f"bits_{ranks}_{t}_{micro_batches}_{attention}_"
            runs = [train(ranks, name + str(i), *words, *steps, "--zero", zero, *more[zero])
                    for i, zero in enumerate(group)]
            expect(same(*runs), text + f"{', '.join(group)} with different --recompute have the same bits",
                   " ".join(map(str, runs)))
            first.append(runs[0])
            if micro_batches > 1:
                for zero, result in zip(group, runs):
                    expect_planned(result, ranks, *words, "--zero", zero, *more[zero][:2])
        expect(equal_up_to_rounding(first[-1], first[0]),
               text + "2 differs from 0 at most by rounding", f"{first[0].losses} {first[-1].losses}")
    pairs, three = (pairs_of_ranks(), 2), (up_to(3), up_to(3))
    every = [*plain_grids(), pairs, three]
    run_concurrently(*(functools.partial(compare, *grid, 1, ["0123"]) for grid in every),
                     *(functools.partial(compare, *grid, 3, ["01", "23"]) for grid in every),
                     lambda: compare(*pairs, 1, ["002"], "naive"))


def test_tuning():
    """Each rank has its own tuning file. These files select different algorithms for ranks 0 and 1."""
    if args.same_bits == "no":
        return
    words = [*TRAIN, "--steps", 2, "--total-batch", 2 * MICRO, "--matmul-tuning", "on"]
    for name in ("coarse", "fast"):
        run(1, *words, environment={"XDG_CACHE_HOME": path(name), "CUDA_CPU_MATMULS": name + ",slow"})
    norms = {}
    for files in (("coarse", "coarse"), ("fast", "fast"), ("coarse", "fast")):
        more = [{"XDG_CACHE_HOME": path(name), "CUDA_CPU_MATMULS": "slow,fast,coarse"} for name in files]
        result, other = launch_ranks(TORCHRUN, 2, [*words, "--out", fresh("tuned")], by_rank=more, **address())
        norms[files] = result.code == other.code == 0 and result.norms
    expect(norms["coarse", "fast"] == norms["coarse", "coarse"] != norms["fast", "fast"] and norms["fast", "fast"],
           "all ranks use the matmul algorithms of rank 0", f"{norms} {result} {other}")


# ---- checkpoints, evaluation

def test_resume():
    for groups in ((1, 1), (2, 3)):     # ranks of a tensor group, before and after
        four, three = (pairs_of_ranks() if groups[0] > 1 else up_to(4)), up_to(3)
        t4, t3 = (["--tensor-parallel", min(t, ranks)] for t, ranks in zip(groups, (four, three)))
        batch = [*GROUPED, "--total-batch", 12 * MICRO, "--schedule", "constant", *CHECKPOINT]
        whole = train(four, "whole", *batch, "--steps", 4, "--zero", 2, *t4)
        first = train(four, "parts", *batch, "--steps", 2, "--zero", 2, *t4)
        shutil.copytree(first.folder, fresh("again"))
        again = train(four, "again", *GROUPED, "--resume", "--steps", 4, *CHECKPOINT, *t4)
        text = f"{four} ranks ({' '.join(map(str, t4))})"
        expect(same(whole, again), f"a run of {text} resumes with the same bits", str(again))
        second = train(three, "parts", *GROUPED, "--resume", "--steps", 4, "--zero", 3, *CHECKPOINT, *t3)
        third = train(1, "parts", *GROUPED, "--resume", "--steps", 6, "--zero", 0, *CHECKPOINT)
        other = train(1, "other", *batch, "--steps", 6)
        expect([first.code, second.code, third.code] == [0, 0, 0] and near(third.losses, other.losses, 1e-5),
               f"a run of {text} is resumed by {three} ({' '.join(map(str, t3))}), then by one, each with another ZeRO "
               "stage: the losses equal those of one rank up to rounding",
               f"{third.losses} {other.losses} {second} {third}")


def test_batch_ramp():
    """A ramp from one to three micro-batches of each rank, interrupted in between."""
    def compare(ranks, t, zero):
        name, batch = f"ramp_{ranks}_{t}", ranks // t * MICRO
        words = [*model_of(t), "--batch-ramp", f"{batch}:{5 * batch}", "--total-batch", 3 * batch, "--checkpoint-every",
                 3, "--steps", 6, "--zero", zero, "--tensor-parallel", t]
        whole = train(ranks, name, *words)
        shutil.copytree(whole.folder, fresh(name + "_cut"))
        shutil.rmtree(path(name + "_cut", "step_000006"))
        resumed = train(ranks, name + "_cut", *words, "--resume", "auto")
        text = f"{ranks} ranks, t = {t}, --zero {zero}: "
        expect(same(whole, resumed), text + "a run interrupted in a ramp resumes with the same bits",
               f"{whole} {resumed}")
        found = [step["batch"] // batch for step in whole.steps]
        expect(found == [1, 1, 1, 2, 3, 3], text + "the batch grows by whole micro-batches of all ranks", str(found))
    run_concurrently(*(functools.partial(compare, ranks, t, zero)
                       for (ranks, t), zero in zip([*plain_grids(), *grids()], (0, 1, 2, 3) * 2)))


def test_muon():
    """Muon gives the same bits with ZeRO 0 and 1. With 4 ranks and 3 layers one rank has no matrices."""
    def compare(ranks):
        words = ["--optimizer", "muon", "--total-batch", 12 * MICRO, "--lr", 1e-2, "--schedule", "constant",
                 *CHECKPOINT]
        one, whole, sharded = (train(n, f"muon_{ranks}_{n}_{zero}", *words, "--steps", 4, "--zero", zero)
                               for n, zero in ((1, 0), (ranks, 0), (ranks, 1)))
        text = f"--optimizer muon, {ranks} ranks: "
        expect(same(whole, sharded), text + "ZeRO 0 and 1 have the same bits", f"{whole} {sharded}")
        expect(equal_up_to_rounding(sharded, one),
               text + "losses and norms equal those of one rank up to rounding", f"{sharded.losses} {one.losses}")
        expect_planned(sharded, ranks, *words[:4], "--zero", 1)
        train(ranks, f"muon_{ranks}", *words, "--steps", 2, "--zero", 1)
        resumed = train(ranks, f"muon_{ranks}", *words, "--steps", 4, "--zero", 0, "--resume")
        expect(same(whole, resumed), text + "a run with ZeRO 1 resumes with ZeRO 0 with the same bits", str(resumed))
    run_concurrently(*(functools.partial(compare, ranks) for ranks, _ in plain_grids()))
    expect_rejected(2, [*ONE_STEP, "--optimizer", "muon", "--zero", 2], ["--optimizer muon: expected --zero 0 or 1"],
                    "--optimizer muon with ZeRO 2")


def test_noise_scale():
    """Compares the estimates of two ranks with the norms of the same micro-batches on one."""
    fixed = ["--lr", 0, "--min-lr", 0, "--shuffle", "no"]
    one = train(1, "noise_one", *fixed, "--total-batch", MICRO, "--steps", 2)
    for zero in (0, 1):
        two = train(2, f"noise_{zero}", *fixed, "--total-batch", 2 * MICRO, "--steps", 1, "--noise-every", 1, "--zero",
                    zero)
        small, large = sum(norm ** 2 for norm in one.norms) / 2, two.norms[0] ** 2
        expected = [2 * large - small, (small - large) * 2 * MICRO]
        found = [two.steps[0].get(name, math.nan) for name in ("noise_gradient", "noise_trace")]
        expect(near(found, expected, 1e-4 if two.header["precision"] == "fp32" else 0.05),
               f"--zero {zero}: |G|^2 and S follow from each rank's norm and the norm of the step",
               f"{found} {expected} {two}")
        words = ["--total-batch", 6 * MICRO, "--steps", 3, "--zero", zero, *CHECKPOINT]
        expect(same(train(2, "noise_off", *words), train(2, "noise_on", *words, "--noise-every", 2)),
               f"--zero {zero}: --noise-every changes no bit of training")
    for words in (["--zero", 2], [*model_of(2), "--tensor-parallel", 2]):
        expect_rejected(2, [*ONE_STEP, *words, "--noise-every", 1], ["--noise-every 1", "found --zero"],
                        f"--noise-every with {words[-2]} {words[-1]}")


def test_spikes():
    """In step 141 the micro-batch of the last rank, or tensor group, is random. If all ranks skip this step, their
    shards of weights and moments are those of a run without it."""
    for ranks, t, words in ((2, 1, ["--zero", 0]), (2, 1, ["--zero", 1, "--optimizer", "muon"]),
                            (up_to(3), 1, ["--zero", 2]), (2, 1, ["--zero", 3]),
                            (pairs_of_ranks(), 2, ["--zero", 1, "--tensor-parallel", 2])):
        batch = ranks // t * MICRO
        text = bytearray(b"the cat sat on a big mat" * (batch * 151 // 24))    # a sequence of 24 tokens, repeated
        for file in ("calm.txt", "spiky.txt"):
            write(path(file), text)
            text[141 * batch - MICRO + 1:141 * batch] = random.Random(1).randbytes(MICRO - 1)
        common = ["--total-batch", batch, "--lr", 1e-2, "--schedule", "constant", "--shuffle", "no", "--val-fraction",
                  0, *CHECKPOINT, *words]
        calm = train(ranks, "calm", *common, "--data", path("calm.txt"), "--steps", 149, "--skip-spikes", 11.26)
        spiky = train(ranks, "spiky", *common, "--data", path("spiky.txt"), "--steps", 150, "--skip-spikes", 6)
        title = f"{ranks} ranks, {' '.join(map(str, words))}: "
        if calm.code or spiky.code:
            expect(False, title + "the runs end with exit code 0", f"{calm} {spiky}")
            continue
        with open(spiky.checkpoints()[-1] + "/trainer.json", encoding="utf-8") as file:
            trainer = json.load(file)
        expect(tensors(calm) == tensors(spiky) and spiky.steps[-1]["skipped_steps"] == 1,
               title + "all ranks skip a step in which only one has outliers", str(spiky))
        expect(near(trainer["last_losses"], spiky.losses[-128:], 1e-5) and
               trainer["last_norms"] == spiky.norms[-128:],
               title + "the decision is made from loss and norm of all ranks", f"{trainer} {spiky.losses}")


def test_read():
    """Counts the bytes of a checkpoint that each rank reads: with ZeRO only its shard. Files hold no padding."""
    ranks, runs, read = up_to(3), {}, {}
    start = train(ranks, "read", "--total-batch", ranks * MICRO, "--steps", 1, *CHECKPOINT).folder
    for zero in range(4):
        shutil.copytree(start, fresh(f"read_{zero}"))
        runs[zero] = train(ranks, f"read_{zero}", "--resume", "--steps", 2, "--zero", zero, "--verbose",
                           *CHECKPOINT)
        read[zero] = [int(n) for line in re.findall(r"^read .*: (.*)", runs[zero].out, re.M) for n in line.split()]
    size = 4 * runs[0].header["model"]["parameters"]
    master = ranks if runs[0].header["precision"] == "fp32" else 1     # ranks that read each weight with ZeRO 1 and 2
    expect(read[0] == [3 * size] * ranks and sum(read[1]) == sum(read[2]) == (2 + master) * size and
           sum(read[3]) == 3 * size, "each rank reads only its shards of weights and moments", f"{read} {size}")
    expect(max(read[3]) < 2 * size and max(read[1]) < 2.5 * size and same(*runs.values()),
           "with ZeRO 1 and 3 no rank reads the whole checkpoint, and all stages give the same results",
           f"{read} {size} {runs[3]}")
    with open(os.path.join(start, "step_000001", "optimizer.state"), "r+b") as file:
        file.seek(-4, os.SEEK_END)      # the last element of v, which only the last rank reads
        file.write(struct.pack("<f", math.nan))
    expect_rejected(ranks, [*TRAIN, "--resume", "--out", start, "--steps", 2, "--zero", 1],
                    ["optimizer.state", "holds nan at element"], "a NaN moment that only one rank reads")
    with open(os.path.join(start, "log.jsonl"), encoding="utf-8") as log:
        expect(log.read().count('"run"') == 1, "a rejected --resume does not write to the log")


def test_evaluation():
    words = ["--steps", 1, "--total-batch", 12 * MICRO, "--eval-every", 1, "--eval-sequences", 11, "--sample-every", 1,
             "--sample-tokens", 20, "--lr", 0, "--min-lr", 0, *CHECKPOINT]
    one, *several = [train(ranks, f"eval_{ranks}", *words, "--zero", zero, "--tensor-parallel", t)
                     for ranks, zero, t in ((1, 0, 1), (up_to(3), 0, 1), (up_to(4), 3, 1), (pairs_of_ranks(), 1, 2))]
    loss = ["eval", "--from", one.checkpoints()[-1], "--data", "LICENSE", "--micro-batch", 4]
    scores = ["eval", "--from", "data/reference/hf_tiny", "--hellaswag", "data/reference/hellaswag.bin",
              "--micro-batch", 2]

    def evaluate(words):
        return [run(ranks, *words, "--tensor-parallel", t)
                for ranks, t in ((1, 1), (2, 1), (up_to(3), 1), (2, 2), (pairs_of_ranks(), 2))]
    for text, pattern, runs in (
            ("validation loss and samples", r"validation loss.*|-- sample --(?:.|\n)*?\n------", [one, *several]),
            ("the loss of eval", r"loss(?:.|\n)* bytes", evaluate(loss)),
            ("HellaSwag accuracies", r"HellaSwag.* over 16 questions", evaluate(scores))):
        found = [re.findall(pattern, result.out) for result in runs]
        expect(found[0] and all(one == found[0] for one in found), f"{text}: several ranks and tensor groups print the "
               "same as one rank", f"{found} {runs[-1]}")


# ---- errors, killed ranks, hangs

def test_errors():
    for text, ranks, words, parts, *code in (
            ("an unknown flag", 2, ["--no-such-flag"], ["--no-such-flag"]),
            ("--graph on", 2, ["--graph", "on"], ["--graph"]),
            ("a non-finite loss", up_to(3), ["--steps", 9, "--lr", 1e30, "--grad-clip", 0], ["loss", "stopped"],
             1)):
        expect_rejected(ranks, [*ONE_STEP, *words], parts, text, *code)
    if args.same_bits == "yes":
        expect_rejected(2, ONE_STEP, ["--gpus 2", "at most 1"], "more GPUs than the machine has",
                        environment={"CUDA_CPU_DEVICES": "1"})
        result = run(1, *ONE_STEP, "--gpus", "all", environment={"CUDA_CPU_DEVICES": "3"})
        expect("3 GPUs x" in result.out and result.code == 0, "--gpus all uses all GPUs of the machine", str(result))


def begin_long(ranks, name, *words):
    """Starts a long run and waits for its first checkpoint."""
    run_words = [*TRAIN, "--steps", 10 ** 6, "--checkpoint-every", 20, "--keep", 2, "--out", fresh(name), *words]
    started = Run(ranks, *run_words)
    wait_for(lambda: started.checkpoints() or started.process.poll() is not None)
    return started


def ends_soon(process):
    """Returns whether the process ends within END_LIMIT. A zombie has ended: it has no /proc/PID/exe."""
    return wait_for(lambda: not os.path.exists(f"/proc/{process}/exe"), END_LIMIT)


def test_deaths():
    chance, ranks = random.Random(1), up_to(4)
    for number in (signal.SIGKILL, signal.SIGSEGV):
        victim, zero = chance.randrange(ranks), chance.randrange(4)
        started = begin_long(ranks, "killed", "--zero", zero)
        processes = started.pids(ranks)
        os.kill(processes[victim], number)
        killed = time.time()
        result = started.end()
        parts = [f"rank {victim} (process {processes[victim]}) was killed by signal {int(number)} ", " in step ",
                 "checkpoint is " + os.path.join(started.folder, "step_")]
        expect(len(result.messages) == 1 and all(part in result.messages[0] for part in parts) and
               time.time() - killed < END_LIMIT and result.code == 1 and all(map(ends_soon, processes)) and
               result.has_complete_checkpoints(),
               f"{ranks} ranks, --zero {zero}: signal {int(number)} kills rank {victim}: one message, all ranks end, "
               "all checkpoints are complete", str(result))
    started = begin_long(2, "killed")
    processes = started.pids(2)
    started.process.kill()
    started.process.wait()
    expect(all(map(ends_soon, processes)), "all ranks end when the supervising process is killed")


def test_signals():
    for number, to in ((signal.SIGINT, "the run"), (signal.SIGTERM, "one rank")):
        started = begin_long(up_to(3), "signalled", "--zero", 1)
        os.kill(started.pids(up_to(3))[1] if to == "one rank" else started.process.pid, number)
        result = started.end()
        expect(result.code == 0 and result.has_complete_checkpoints() and
               result.checkpoints()[-1].endswith(f"step_{result.last:06d}"),
               f"signal {int(number)} to {to}: all ranks stop after the same step and save a checkpoint",
               f"{result.last} {result.checkpoints()} {result}")


def stop_rank(started, victim, text, place=", in "):
    """Stops one rank with SIGSTOP, which the other ranks see as a hang."""
    processes = started.pids(up_to(3))
    os.kill(processes[victim], signal.SIGSTOP)
    result = started.end(2 + END_LIMIT)
    others = [line for line in result.messages if re.search("no progress for 2 s|missing ranks", line) and
              f"rank {victim} on" not in line]
    expect(others and result.code == 1 and all(map(ends_soon, processes)) and place in others[0] and
           re.search(r"rank \d+ \(process \d+\) exited with code 1 in step \d+; the last checkpoint is",
                     result.messages[-1]),
           f"rank {victim} stopped {text} with --timeout 2: another rank prints where it waits, the supervising "
           "process prints which rank has ended, and all processes end", str(result))


def stop_all(started):
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in started.pids(2):
            os.kill(process, number)
        time.sleep(3)
    started.process.send_signal(signal.SIGTERM)
    result = started.end()
    expect(result.code == 0 and not result.messages,
           "a run whose ranks are all stopped for longer than --timeout continues", str(result))


def stop_eval():
    model = train(1, "model", "--steps", 1, *CHECKPOINT).checkpoints()[-1]
    # The other ranks end their part of the data before they wait, also on a busy machine.
    started = Run(up_to(3), "eval", "--from", model, *DATA, "--val-fraction", 0.4, "--micro-batch", 1, "--timeout", 2)
    process = started.pids(up_to(3))[1]
    computed = lambda: int(open(f"/proc/{process}/stat", encoding="utf-8").read().split()[13])     # in 1/100 s
    wait_for(lambda: computed() >= 30)
    stop_rank(started, 1, "in eval")


def fail_nccl():
    result = run(2, *ONE_STEP, "--timeout", 60, environment={"CUDA_CPU_NCCL_FAILURE": "9"})
    expect(result.code == 1 and "NCCL reports: a remote rank failed" in result.err,
           "an asynchronous NCCL error ends a waiting rank before --timeout", str(result))


def test_hangs():
    run_concurrently(
        lambda: stop_all(begin_long(2, "paused", "--timeout", 2)),
        lambda: stop_rank(begin_long(up_to(3), "stopped_1", "--timeout", 2), 1, "at a step"),
        lambda: stop_rank(begin_long(up_to(3), "stopped_0", "--timeout", 2), 0, "at a step"),
        lambda: stop_rank(Run(up_to(3), *ONE_STEP, "--timeout", 2), 1, "while loading", ""),
        stop_eval, *([fail_nccl] if args.same_bits == "yes" else []))


def test_slow_checkpoint():
    """A preloaded library delays each write() to a checkpoint's tensor files."""
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
    if (readlink(link, path, sizeof path - 1) > 0 && (strstr(path, ".safetensors") || strstr(path, "optimizer.state")))
        usleep(atoi(getenv("SLOW_US")));
    return syscall(SYS_write, file, data, bytes);
}
""")

    def begin(ranks, name, *words, slow_us="60000"):
        return Run(ranks, *ONE_STEP, *CHECKPOINT, "--timeout", 2, "--out", fresh(name), *words,
                   environment={"LD_PRELOAD": library, "SLOW_US": slow_us})

    def slow(zero):
        start_time = time.time()
        result = begin(2, f"slow_{zero}", "--zero", zero).end()
        expect(result.code == 0 and result.has_complete_checkpoints() and time.time() - start_time > 5,
               f"--zero {zero}: the watchdog accepts a checkpoint that takes longer than --timeout but makes progress",
               str(result))

    def stopped(zero, place):
        started = begin(up_to(3), f"slow_stopped_{zero}", "--zero", zero)
        wait_for(lambda: glob.glob(os.path.join(started.folder, "unfinished_*", "model.safetensors")))
        stop_rank(started, 0, f"in a checkpoint, --zero {zero}", ", in " + place)

    def one_write():
        result = begin(2, "slow_write", slow_us="60000000").end()
        expect(result.code == 1 and re.search(r"rank 0 on .*, in rank 0's checkpoint: no progress for 2 s", result.err),
               "a single write of rank 0 that takes longer than --timeout ends the run", str(result))

    run_concurrently(lambda: slow(0), lambda: slow(3), lambda: stopped(0, "rank 0's"), lambda: stopped(3, "broadcast"),
                     one_write)


# ---- launchers

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple("OMPI_COMM_WORLD_" + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def address(**more):
    """Returns the environment variables for a rendezvous on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), **more}


def launch_ranks(names, size, words, only=None, by_rank=None, **more):
    """Runs `size` ranks on one machine with the variables of a launcher: local rank and size equal rank and size."""
    values = [{**dict(zip(names, (rank, size, rank, size))), **more, **(by_rank[rank] if by_rank else {})}
              for rank in (range(size) if only is None else only)]
    started = [Run(1, *words, environment={k: str(v) for k, v in value.items()}, of=size) for value in values]
    return [one.end() for one in started]


def test_launchers():
    batch = [*ONE_STEP, "--total-batch", 2 * MICRO]
    losses = re.findall(r"loss .*  norm \S+", run(2, *batch).out)
    for text, names, more in (
            ("torchrun", TORCHRUN, address()),
            ("mpirun", OPEN_MPI, {}), ("mpiexec", MPICH, address()),
            ("srun", SLURM, {"SLURM_JOB_ID": os.getpid()}),
            ("srun --mpi=pmi2", SLURM, {"SLURM_JOB_ID": os.getpid(), "PMI_RANK": 0, "PMI_SIZE": 2}),
            ("srun and torchrun", TORCHRUN, address(SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=5, SLURM_LOCALID=0))):
        first, second = launch_ranks(names, 2, batch, **more)
        expect(first.code == second.code == 0 and losses and re.findall(r"loss .*  norm \S+", first.out) == losses and
               second.out == "", f"environment of {text}: the same losses as with --gpus, printed by rank 0",
               f"{first} {second}")
    found = launch_ranks(TORCHRUN, 2, [*batch, "--tensor-parallel", 2], by_rank=[{"LOCAL_WORLD_SIZE": 3}] * 2,
                         **address())
    expect(all(one.code == 2 and len(one.messages) == 1 and "groups of neighbouring ranks on one machine" in
               one.messages[0] for one in found),
           "a tensor group that does not divide the processes of a machine is rejected", " ".join(map(str, found)))
    train_words, torchrun = [*ONE_STEP, "--timeout", 2], {**dict(zip(TORCHRUN, "0202")), **address()}
    fewer = [("fewer GPUs than processes", train_words, {**address(), **dict(zip(TORCHRUN, "1212")),
              "CUDA_CPU_DEVICES": "1"}, ["[rank 1] train_gpt: ", "2 processes", "1 GPUs", "--gpus-per-node"])]
    for text, words, environment, parts in (
            ("RANK without WORLD_SIZE", train_words, {"RANK": "0"}, ["WORLD_SIZE is not set", "RANK", "torchrun"]),
            ("PMI_RANK without MPI_LOCALRANKID", train_words, dict(zip(MPICH[:2], "02")), ["MPI_LOCALRANKID is"]),
            ("WORLD_SIZE without RANK", train_words, {"WORLD_SIZE": "2"}, ["RANK is not set", "torchrun"]),
            ("no MASTER_ADDR", train_words, {**dict(zip(TORCHRUN, "0202")), "MASTER_PORT": "20000"},
             ["MASTER_ADDR is not set"]),
            ("a rank beyond the last", train_words, dict(zip(TORCHRUN, "222")), ["RANK=2", "WORLD_SIZE=2"]),
            ("two launchers with two ranks", train_words, {**torchrun, **dict(zip(OPEN_MPI, "1212"))},
             ["RANK=0", "OMPI_COMM_WORLD_RANK=1"]),
            ("two launchers with two sizes", train_words, {**torchrun, **dict(zip(OPEN_MPI, "0303"))},
             ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=3"]),
            ("several machines without an address", train_words, dict(zip(OPEN_MPI, "0401")), ["MASTER_ADDR"]),
            ("--gpus under a launcher", [*train_words, "--gpus", 2], torchrun, ["--gpus 2", "WORLD_SIZE=2"]),
            ("sample under a launcher", ["sample", "--from", "data/reference/hf_tiny"], torchrun, ["one process"]),
            ("plan under a launcher", ["plan"], torchrun, ["one process"]),
            *(fewer if args.same_bits == "yes" else [])):
        expect_rejected(1, words, parts, text, environment=environment)


def test_connection():
    words, names = [*ONE_STEP, "--timeout", 3], address()
    here = ("127.0.0.1", int(names["MASTER_PORT"]))
    with socket.socket() as taken:
        taken.bind(here)
        taken.listen()
        result, = launch_ranks(TORCHRUN, 2, words, only=[0], **names)
        expect(result.code == 2 and names["MASTER_PORT"] in result.err, "a port in use is named", str(result))
        result, other = launch_ranks(TORCHRUN, 2, words, **names, TORCHELASTIC_USE_AGENT_STORE="True")
        expect(result.code == other.code == 0, "with torchrun's own store on MASTER_PORT the next port is used",
               f"{result} {other}")
    ranks = up_to(3)
    result, *others = launch_ranks(TORCHRUN, ranks, words, only=[0, *range(2, ranks)], **names)
    expect(all(one.code == 1 for one in (result, *others)) and result.err.rstrip().endswith("missing ranks: 1"),
           "a missing rank is named, and all ranks end", f"{result} {others}")
    words += ["--timeout", 60, "--steps", 10 ** 6, "--out", fresh("open")]
    started = Run(1, *words, environment={**dict(zip(TORCHRUN, "0202")), **names})

    def connect(text):
        try:
            connection = socket.create_connection(here, 1)
            connection.send(text)
            return connection
        except OSError:
            return None
    connections = [wait_for(lambda: connect(b"")), connect(b"GET / HTTP/1.1\r\n\r\n" * 9)]
    second = Run(1, *words, environment={**dict(zip(TORCHRUN, "1212")), **names})
    log = path("open", "log.jsonl")
    trains = wait_for(lambda: os.path.exists(log) and '"loss"' in open(log, encoding="utf-8").read())
    is_closed = connect(b"") is None
    for one in (started, second):
        one.process.send_signal(signal.SIGTERM)
    result, other = started.end(), second.end()
    expect(all(connections) and trains and is_closed and result.code == other.code == 0,
           "connections from other programs are ignored, and the port is closed while the ranks train",
           f"{result} {other}")


# ---- the emulator's NCCL; emulated GPUs, whose streams run in any order that CUDA allows

def test_nccl():
    for ranks in (1, 2, 3, 4) if args.nccl else ():
        result = subprocess.run([args.nccl, str(ranks)], capture_output=True, text=True, check=False)
        totals = re.search(r"[1-9]\d* passed, 0 failed", result.stdout)
        expect(totals and result.returncode == 0, f"test_nccl with {ranks} ranks: {totals and totals[0]}",
               "\n".join(line for line in result.stdout.splitlines() if not line.startswith("ok")) + result.stderr)


def card(ranks, name, *words, seed=None):
    """Trains with the program --card; with a seed, on an emulated H100."""
    return train(ranks, name, *words, program=[args.card, "--as-train-gpt"],
                 environment={} if seed is None else {"CUDA_CPU_CARD": "h100", "CUDA_CPU_SEED": str(seed)})


def early_kernels(trace):
    """Returns from a trace: the number of pairs of a collective and a kernel that was launched later but started
    earlier; the names of the collectives; whether only the communication stream has high priority."""
    events = json.load(open(trace, encoding="utf-8"))["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e.get("ph") == "M"}
    communication, kernels = rows["stream: between GPUs"], rows["stream: kernels"]
    work = [e for e in events if e.get("ph") == "X" and e["tid"] != rows["CPU: launches"]]    # in launch order
    early = sum(later["tid"] == kernels and later["ts"] < collective["ts"]
                for i, collective in enumerate(work) if collective["tid"] == communication for later in work[i + 1:])
    return (early, {e["name"] for e in work if e["tid"] == communication},
            {e["tid"] for e in work if e["args"].get("priority", 0) < 0} == {communication})


def test_cards():
    """Some orders of the streams change bits if a wait is missing; so does NVLS (NVLink SHARP) with 3 or more ranks."""
    if not args.card:
        return
    words, early = ["--total-batch", 3 * 2 * MICRO, "--steps", 2, *CHECKPOINT], {"on": 0, "off": 0}
    for zero, ranks, t in ((1, pairs_of_ranks(), 2), *((zero, up_to(3), 1) for zero in range(4))):
        plain, *runs = [card(ranks, f"card_{seed}", *words, "--zero", zero, "--tensor-parallel", t,
                             *(["--trace", path(f"trace_{seed}")] if seed else []), seed=seed)
                        for seed in (None, 1, 2, 3)]
        expect(same(plain, *runs), f"{ranks} ranks, t = {t}, --zero {zero}: an emulated H100 gives the same bits in "
               "three orders of its streams", str(runs[0]))
    for seed in (1, 2, 3):
        found, names, has_priority = early_kernels(path(f"trace_{seed}"))      # of ZeRO 3
        early["on"] += found
        card(2, "overlap", "--steps", 2, "--zero", 3, "--overlap", "off", "--trace", path("trace_off"), seed=seed)
        early["off"] += early_kernels(path("trace_off"))[0]
    expect(early["on"] > 0 and early["off"] == 0,
           "kernels run before collectives that were launched earlier; with --overlap off no kernel does", f"{early}")
    expect({"all-gather", "reduce-scatter", "all-reduce"} <= names and has_priority,
           "communication has its own stream of high priority and its own row in the trace", f"{names}")
    result = run(2, *ONE_STEP, "--zero", 3, "--total-batch", 12 * 2 * MICRO, program=[args.card, "--as-train-gpt"],
               environment={"CUDA_CPU_CARD": "h100", "CUDA_CPU_NCCL_FAILURE": "40"})
    expect(result.code == 1 and "in wait for the device: NCCL reports" in result.err,
           "a rank that fails while it waits for an event reports this wait, not its last launch", str(result))


def test_fp8():
    """Trains in BF16 and FP8 with the program --card, which is built for BF16."""
    if not args.card:
        return
    words = ["--matmul", "fp8-all", "--total-batch", 2 * MICRO, *CHECKPOINT]
    runs = [card(2, f"fp8_{zero}", *words, "--steps", 4, "--zero", zero) for zero in range(3)]
    expect(same(*runs), "--matmul fp8-all: ZeRO 0, 1 and 2 give the same bits", str(runs[0]))

    def compare(matmul, scaling):
        more = ["--matmul", matmul, "--fp8-scaling", scaling, "--tensor-parallel", 2, "--total-batch", 2 * MICRO]
        runs = {mode: card(pairs_of_ranks(), f"{matmul}_{scaling}_{mode}", *more, *CHECKPOINT, "--steps", 3, "--zero",
                           zero, "--recompute", mode, seed=seed)
                for zero, mode, seed in ((0, "none", None), (2, "full", 1))}
        expect(same(*runs.values()), f"tensor groups of 2, --matmul {matmul}, {scaling} scaling: ZeRO 2 with "
               "--recompute full on an emulated H100 gives the bits of ZeRO 0", " ".join(map(str, runs.values())))
        expect_planned(runs["none"], pairs_of_ranks(), *more[:2], *more[-4:], program=[args.card, "--as-train-gpt"])
    run_concurrently(*(functools.partial(compare, matmul, scaling) for matmul in ("fp8", "fp8-all")
                       for scaling in ("delayed", "current")))

    def first_of_history(result):
        with open(os.path.join(result.checkpoints()[0], "trainer.json"), encoding="utf-8") as file:
            return json.load(file)["fp8_history"][0]    # amax of ln1 in the first layer, before any matmul
    found = []
    for seed in range(4):       # with some seeds the amax is on rank 1
        several = [card(ranks, f"fp8_{ranks}", *words, "--steps", 1, "--seed", seed, "--micro-batch", 4 * t // ranks,
                        "--tensor-parallel", t) for ranks, t in ((1, 1), (2, 1), (2, 2))]
        found.append([result.code == 0 and first_of_history(result) for result in several])
    expect(all(one == two == group > 0 for one, two, group in found), "FP8 scales use the amax over all ranks",
           f"{found} {several[0]}")


def main():
    global args, scratch
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
            ("--ours", "./train_gpt", "the program"),
            ("--nccl", None, "build/test/many/test_nccl: also run the tests of the emulated NCCL"),
            ("--card", None, "build/test/bf16-32/test_gpt: also run the tests cards and fp8, on emulated GPUs")):
        parser.add_argument(name, type=os.path.abspath, default=default, help=text)
    parser.add_argument("--ranks", type=RankCount, nargs="+", default=[RankCount(n) for n in (2, 3, 4)],
                        help="numbers of ranks to test; the largest limits all tests")
    parser.add_argument("--only", default=" ".join(tests), help="names of tests to run; default: %(default)s")
    parser.add_argument("--same-bits", choices=["yes", "no"], default="yes", help="no: compare up to rounding")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only.split():
            start_time = time.time()
            print(name, flush=True)
            tests[name]()
            print(f"        {time.time() - start_time:.1f} s", flush=True)
    expect(not Run.beyond, "each run of more than 2 ranks is limited by --ranks", str(Run.beyond))
    finish()


if __name__ == "__main__":
    main()

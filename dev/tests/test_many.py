#!/usr/bin/env python3
"""Tests of training on many GPUs: 1 to 4 processes, started by mpirun, on whatever the program was built for.

    python3 dev/tests/test_many.py [--ours ./train_gpt] [--ranks 2 3 4] [--only WORDS] [--same-bits yes]

On CPUs every sum has one order, so that results are compared bit by bit; NCCL may choose another one for each kind of
collective, so that on GPUs (--same-bits no) they are compared to rounding.
"""
import argparse
import glob
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from claims import claim, finish

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
U = 2.0 ** -24      # FP32: relative error of a sum of two numbers
ENOUGH = 120        # seconds, for every run here
SOON = 10           # in which processes end after one of them died, on a busy machine
args = None
scratch = ""


# ---- runs

# Odd on purpose: 3 layers, a context that is no power of two, and sizes that neither 3 nor 4 divides.
MODEL = ["--layers", 3, "--heads", 2, "--channels", 32, "--context", 24]
DATA = ["--data", os.path.join(ROOT, "data", "shakespeare.txt")]
SHORT = ["--micro-batch", 2, "--warmup", 1, "--lr", 1e-3, "--eval-every", 0, "--checkpoint-every", 0,
         "--matmul-tuning", "off"]
WINDOW = 24         # tokens of a sequence

# Says which process each rank is, and how it ended. What it gets of signals the rank gets as well, and answers.
WRAPPER = """trap : TERM INT; "$@" & child=$!; echo $child > "$NOTES/pid.$OMPI_COMM_WORLD_RANK"
wait $child; code=$?
while kill -0 $child 2> /dev/null; do wait $child; code=$?; done
echo $code > "$NOTES/code.$OMPI_COMM_WORLD_RANK"; exit $code"""


def folder(name):
    path = os.path.join(scratch, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


class Started:
    """A command with so many processes; those without mpirun are one."""

    def __init__(self, ranks, *words, program=None, environment=None):
        self.notes = tempfile.mkdtemp(dir=scratch)
        self.ranks = ranks
        command = [*(program or args.ours), *map(str, words)]
        if ranks > 1:
            mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
            command = [*mpirun, "sh", "-c", WRAPPER, "sh", *command]
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "OMP_NUM_THREADS": "1", "NOTES": self.notes, **(environment or {})}
        self.out, self.err = (open(os.path.join(self.notes, name), "w+", encoding="utf-8", errors="replace")
                              for name in ("out", "err"))
        self.process = subprocess.Popen(command, env=environment, stdout=self.out, stderr=self.err, cwd=ROOT)

    def pid(self, rank):
        path = os.path.join(self.notes, f"pid.{rank}")
        until = time.time() + ENOUGH
        while time.time() < until:
            if os.path.exists(path) and (text := open(path, encoding="utf-8").read()).endswith("\n"):
                return int(text)
            time.sleep(0.01)
        raise RuntimeError(f"rank {rank} did not start: {self.text(self.err)}")

    @staticmethod
    def text(file):
        file.flush()
        file.seek(0)
        return file.read()

    def end(self, timeout=ENOUGH):
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.code = None
            self.process.kill()
            for rank in range(self.ranks if self.ranks > 1 else 0):
                try:
                    os.kill(self.pid(rank), signal.SIGKILL)
                except OSError:
                    pass
            self.process.wait()
        self.out, self.err = self.text(self.out), self.text(self.err)
        self.said = re.findall(r"train_gpt: .*", self.err)
        paths = glob.glob(os.path.join(self.notes, "code.*"))
        self.codes = {int(p.rsplit(".", 1)[1]): int(open(p, encoding="utf-8").read() or -1) for p in paths}
        return self

    def __str__(self):
        return f"exit {self.code}, ranks {self.codes}: {self.out[-300:]} {self.err[-900:]}"


def run(ranks, *words, **more):
    return Started(ranks, *words, **more).end()


def train(ranks, name, *words, fresh=True, **more):
    """Trains into the folder `name`; its records of steps, in order."""
    out = folder(name) if fresh else os.path.join(scratch, name)
    done = run(ranks, "train", *MODEL, *DATA, *SHORT, "--out", out, *words, **more)
    done.folder, done.steps, done.header = out, [], {}
    path = os.path.join(out, "log.jsonl")
    if os.path.exists(path):
        records = [json.loads(line) for line in open(path, encoding="utf-8")]
        done.header = records[0].get("run", {})
        done.steps = [record for record in records if "loss" in record]
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
        plain = train(3, "plain", *batch, "--zero", zero)
        for name, words in {"--recompute selective": ["--recompute", "selective"],
                            "--recompute full": ["--recompute", "full"], "--overlap off": ["--overlap", "off"]}.items():
            claim(same(plain, train(3, "mode", *batch, "--zero", zero, *words)),
                  f"--zero {zero} {name}: the same bits as without")
    claim(same(plain, train(3, "mode", *batch, "--zero", 3)), "and once more")


def test_sums():
    """Sums over ranks against one process that accumulates. Losses of the first step are those of the same windows by
    the same weights. Gradients are k micro-batches' gradients g_i, added in another order: each element's error is at
    most (k - 1) U times the sum of |g_i|, twice as much between two orders. AdamW's first step moves a weight by lr g /
    (|g| + eps), so an error of d in g moves the loss by |g| lr d / |g| at most; over all P weights and by Cauchy and
    Schwarz lr sqrt(P) |d|, and so the second loss."""
    for ranks, accumulation in ((2, 1), (3, 2), (4, 1)):
        if ranks not in args.ranks:
            continue
        k = ranks * accumulation
        batch = ["--total-batch", k * 2 * WINDOW, "--steps", 2]
        one, many = train(1, "one", *batch), train(ranks, "many", *batch)
        single = train(1, "single", "--steps", k, "--lr", 0, "--min-lr", 0)     # the micro-batches' own norms
        error = 2 * (k - 1) * U * sum(single.norms) / k
        parameters = one.header["model"]["parameters"]
        detail = f"losses {one.losses} {many.losses}, norms {one.norms} {many.norms}, limit {error}"
        same_start = many.losses and abs(many.losses[0] - one.losses[0]) <= 1e-12 * one.losses[0]
        claim(same_start and abs(many.norms[0] - one.norms[0]) <= error,
              f"{ranks} ranks x {accumulation} micro-batches: loss and norm of {k} micro-batches on one", detail)
        limit = 1e-3 * math.sqrt(parameters) * error + 2 * U * one.losses[1]
        claim(len(many.losses) == 2 and abs(many.losses[1] - one.losses[1]) <= limit,
              f"{ranks} ranks x {accumulation} micro-batches: the next step's loss, to within {limit:.1e}", detail)


def test_memory():
    for ranks in args.ranks:
        for zero in range(4):
            done = train(ranks, "memory", "--steps", 1, "--zero", zero)
            planned = run(1, "plan", *MODEL, "--vocab", 256, "--micro-batch", 2, "--gpus", ranks, "--zero", zero,
                          "--json", "--precision", done.header.get("precision", "fp32"))
            total = json.loads(planned.out)["bytes"]["total"] if planned.code == 0 else None
            claim(done.code == 0 and done.header["planned_bytes"] == total and "allocated as planned" in done.out,
                  f"{ranks} ranks, --zero {zero}: the memory of each is as planned", f"{total}: {done} {planned}")


def test_resume():
    batch = ["--total-batch", 12 * 2 * WINDOW]
    whole = train(4, "whole", *batch, "--steps", 9, *KEPT, "--zero", 2)
    train(4, "parts", *batch, "--steps", 9, "--checkpoint-every", 3, "--zero", 2)
    at = {step: os.path.join(scratch, "parts", f"step_{step:06d}") for step in (3, 6, 9)}
    claim(all(os.path.exists(os.path.join(path, "optimizer.safetensors")) for path in at.values()),
          "4 ranks write checkpoints")
    for path in (at[6], at[9]):
        shutil.rmtree(path, ignore_errors=True)
    again = train(4, "parts", "--resume", *KEPT, fresh=False)
    claim(same(whole, again), "4 ranks resume with the same bits", str(again))
    shutil.rmtree(at[9], ignore_errors=True)
    shutil.rmtree(os.path.join(scratch, "parts"))
    first = train(4, "parts", *batch, "--steps", 3, *KEPT, "--zero", 2)
    second = train(3, "parts", "--resume", "--steps", 6, "--zero", 3, *KEPT, fresh=False)
    third = train(1, "parts", "--resume", "--steps", 9, "--zero", 0, *KEPT, fresh=False)
    claim([first.code, second.code, third.code] == [0, 0, 0] and len(third.losses) == 9,
          "what 4 ranks began 3 go on with, and then one, each with another stage of ZeRO", str(third))
    other = train(1, "other", *batch, "--steps", 3, *KEPT)
    train(1, "other", "--resume", "--steps", 6, *KEPT, fresh=False)
    other = train(1, "other", "--resume", "--steps", 9, *KEPT, fresh=False)
    claim(near(third.losses, other.losses, 1e-5), "with the losses of one alone, to rounding",
          f"{third.losses} {other.losses}")


def test_evaluation():
    batch = ["--steps", 1, "--total-batch", 12 * 2 * WINDOW]
    more = ["--eval-every", 1, "--eval-sequences", 11, "--sample-every", 1, "--sample-tokens", 20, "--lr", 0,
            "--min-lr", 0, *KEPT]
    runs = {(ranks, zero): train(ranks, f"eval_{ranks}_{zero}", *batch, *more, "--zero", zero)
            for ranks, zero in ((1, 0), (3, 0), (4, 3))}
    shown = [re.findall(r"validation loss.*|-- sample --(?:.|\n)*?\n------", done.out) for done in runs.values()]
    claim(len(shown[0]) == 3 and shown[0] == shown[1] == shown[2],
          "validation loss and samples of 3 and 4 ranks are those of one", f"{shown}")
    model = os.path.join(scratch, "eval_1_0", "step_000001")
    text = os.path.join(scratch, "some.txt")
    with open(text, "w", encoding="utf-8") as file:
        file.write(open(DATA[1], encoding="utf-8").read()[:3001])
    evals = [run(ranks, "eval", "--from", model, "--data", text, "--micro-batch", 4) for ranks in (1, 2, 3)]
    lines = [done.out.splitlines()[:3] for done in evals]
    claim(len(lines[0]) == 3 and lines[0] == lines[1] == lines[2], "so does eval", f"{lines} {evals[1]}")


def refused(ranks, words, parts, text, code=2):
    done = run(ranks, *words)
    one = len(done.said) == 1 and all(part in done.said[0] for part in parts)
    claim(one and done.code == code and set(done.codes.values()) == {code},
          f"{text}: one message, and {code} from all", str(done))


def test_errors():
    base = ["train", *MODEL, *DATA, *SHORT, "--steps", 1]
    refused(3, [*base, "--no-such-flag"], ["--no-such-flag"], "an unknown flag")
    refused(3, [*base, "--total-batch", 4 * 2 * WINDOW], ["x GPUs", "144", "288"],
            "a total batch that 3 ranks cannot share, with the nearest that they can")
    refused(2, [*base, "--data", "/no/such/file"], ["/no/such/file"], "data that is not there")
    refused(2, [*base, "--graph", "on"], ["--graph"], "--graph on")
    refused(2, ["sample", "--from", "data/reference/hf_tiny"], ["one process"], "sample")
    refused(2, ["plan"], ["one process"], "plan")
    taken = folder("taken")
    os.makedirs(taken)
    open(os.path.join(taken, "log.jsonl"), "w", encoding="utf-8").close()
    refused(2, [*base, "--out", taken], ["already holds a run"], "a folder that holds a run")
    refused(3, [*base, "--steps", 9, "--lr", 1e30, "--grad-clip", 0], ["loss", "stopped"],
            "a loss that is not finite", code=1)


def begin_long(ranks, name, *words):
    """A run that takes long, at its first checkpoint."""
    out = folder(name)
    begun = Started(ranks, "train", *MODEL, *DATA, *SHORT, "--steps", 10 ** 6, "--checkpoint-every", 20, "--keep", 2,
                    "--out", out, *words)
    begun.folder = out
    until = time.time() + ENOUGH
    while time.time() < until and not glob.glob(os.path.join(out, "step_*")) and begun.process.poll() is None:
        time.sleep(0.02)
    return begun


def whole_checkpoints(out):
    steps = sorted(glob.glob(os.path.join(out, "step_*")))
    return steps and all(os.path.exists(os.path.join(s, "trainer.json")) for s in steps)


def test_deaths():
    chance = random.Random(1)
    well = []
    for number in range(10):
        ranks = chance.choice([r for r in args.ranks if r > 1])
        victim, zero = chance.randrange(ranks), chance.randrange(4)
        begun = begin_long(ranks, "killed", "--zero", zero)
        time.sleep(chance.random() * 0.3)
        process = begun.pid(victim)
        os.kill(process, signal.SIGKILL)
        killed = time.time()
        done = begun.end()
        took = time.time() - killed
        named = len(done.said) == 1 and f"rank {victim} " in done.said[0] and f"process {process})" in done.said[0]
        others = [done.codes.get(rank) for rank in range(ranks) if rank != victim]
        good = named and took < SOON and done.code not in (0, None) and set(others) <= {1, None}    # None: mpirun
        go_on = run(ranks, "train", *MODEL, *DATA, *SHORT, "--resume", "--out", begun.folder, "--steps", 1,
                    "--checkpoint-every", 0)
        resumed = "from" in go_on.out and go_on.code in (0, 2)      # 2: it is past that step already
        well.append(good and whole_checkpoints(begun.folder) and resumed)
        if not well[-1]:
            print(f"        {ranks} ranks, {victim} killed, --zero {zero}, {took:.1f} s: {done} {go_on}")
    claim(all(well), "a rank killed at 10 random moments: one message names it, the others exit with 1 soon, "
                     "checkpoints are whole", f"{well}")


def test_hangs():
    for victim in (1, 0):
        begun = begin_long(3, "stopped", "--timeout", 2)
        process = begun.pid(victim)
        os.kill(process, signal.SIGSTOP)
        stopped = time.time()
        done_in = None
        try:
            begun.process.wait(2 + SOON)
            done_in = time.time() - stopped
        except subprocess.TimeoutExpired:
            pass
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            pass
        done = begun.end()
        said = [line for line in done.said if f"rank {victim} " in line]
        others = [done.codes.get(rank) for rank in range(3) if rank != victim]
        claim(said and set(others) <= {1, None} and whole_checkpoints(begun.folder),
              f"rank {victim} stopped with --timeout 2: the others say so and end", f"{done_in} {done}")


def gone(process):
    until = time.time() + SOON
    while time.time() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_signals():
    """mpirun answers Ctrl-C with SIGTERM to all, and shows no more of what they print."""
    for text in ("Ctrl-C", "SIGTERM to one rank"):
        begun = begin_long(3, "signalled", "--zero", 1)
        processes = [begun.pid(rank) for rank in range(3)]
        if text == "Ctrl-C":
            begun.process.send_signal(signal.SIGINT)
        else:
            os.kill(processes[2], signal.SIGTERM)
        done = begun.end()
        ended = all(gone(process) for process in processes) and (done.code == 0 or text == "Ctrl-C")
        last = [json.loads(line) for line in open(os.path.join(begun.folder, "log.jsonl"), encoding="utf-8")][-1]["step"]
        newest = sorted(glob.glob(os.path.join(begun.folder, "step_*")))[-1]
        claim(ended and newest.endswith(f"step_{last:06d}") and whole_checkpoints(begun.folder),
              f"{text}: all stop after the step, with a checkpoint of it", f"step {last}, {newest}: {done}")


def test_trace():
    path = os.path.join(scratch, "trace.json")
    done = train(2, "traced", "--steps", 3, "--zero", 3, "--trace", path)
    events = json.load(open(path, encoding="utf-8"))["traceEvents"] if os.path.exists(path) else []
    rows = {e["args"]["name"]: e["tid"] for e in events if e.get("ph") == "M"}
    sent = {e["name"] for e in events if e.get("ph") == "X" and e["tid"] == rows.get("stream: between GPUs")}
    claim({"all-gather", "reduce-scatter", "all-reduce"} <= sent and "not hidden" in done.out,
          "the trace has a row for what GPUs send, and says what of it is not hidden", f"{sent} {done}")


def test_cards():
    """Streams that run in any order that CUDA allows: what waits for too little shows as other bits."""
    if not args.card:
        return
    program = [args.card, "--as-train-gpt"]
    words = ["--total-batch", 2 * 2 * WINDOW * 2, "--steps", 2, *KEPT]
    for zero in range(4):
        plain = train(2, "plain", *words, "--zero", zero, program=program)
        runs = [train(2, f"card_{seed}", *words, "--zero", zero, program=program,
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
    card = train(2, "fp8_card", *batch, "--zero", 1, program=program,
                 environment={"CUDA_CPU_CARD": "h100", "CUDA_CPU_SEED": "1"})
    claim(same(runs[1], card), "and on a card, in whatever order its streams run", str(card))

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
    """In a trace of streams that run in any order that CUDA allows: whether a kernel that was handed over after something
    was sent began before that had arrived."""
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
            for i, sent in enumerate(work):
                if sent["tid"] == rows["stream: between GPUs"]:
                    found[overlap] += sum(later["tid"] == rows["stream: kernels"] and later["ts"] < sent["ts"]
                                          for later in work[i + 1:])
    claim(found["on"] > 0 and found["off"] == 0,
          "kernels overtake what is sent before them, and with --overlap off none does", f"{found}")


def main():
    global args, scratch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="./train_gpt", help="the program, made with MULTI=yes")
    parser.add_argument("--card", help="tests of the model at width 32 (build/test/bf16-32/test_gpt), for those claims")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", help="of these words: " + " ".join(sorted(n[5:] for n in globals() if n[:5] == "test_")))
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

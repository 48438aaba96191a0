#!/usr/bin/env python3
"""Interrupts training runs with signals and failing system calls. Each run must exit with 0, or with 1 or 2 and a
message that names the file. Each checkpoint on disk must be complete. --resume must give the bits and losses of an
undisturbed run.

    make test-faults                              # everything, on a CPU
    make test-faults FAULTS="--moments 20"        # fewer moments, and every tenth call
    make test-faults FAULTS="calls --seed 2"      # one part

    kills    kill -9 at random moments
    signals  SIGINT, SIGTERM, SIGHUP and closed standard output at random moments
    calls    in new and resumed runs: each open, write, fsync, rename, mkdir and unlink fails, one per run; a call and
             all later ones fail; the disk fills up in the middle of a write
    order    the order of write, fsync and rename, which makes checkpoints safe in a power failure
    limits   ulimit -f, standard output on a full disk, closed standard streams

--seed selects the random moments; the instruction executed at a moment depends on the machine. All files are in a
temporary folder. Exit codes: 0 all tests pass, 1 a test fails, 2 bad usage.
"""
import argparse
import collections
import concurrent.futures
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "dev/tests"))
from testing import expect, finish, write

MODEL = ("--layers 1 --heads 1 --channels 16 --context 16 --micro-batch 2 --seed 5 --threads 1 --schedule constant "
         "--warmup 4 --eval-sequences 1 --sample-every 0 --eval-every 3 --checkpoint-every 3 --keep 2").split()
EVERY = 3               # steps between checkpoints, and between validations: as in MODEL
LONG, SHORT = 60, 9     # steps of a run; a short run also removes old checkpoints
TIMEOUT = 60            # seconds
Done = collections.namedtuple("Done", "code err")


def hold(text, problems):
    """Expects that all problems are empty strings."""
    problems = [problem for problem in problems if problem]
    expect(not problems, text, "; ".join(problems[:3]) + f" ({len(problems)} in all)")


# ---- runs

def wait(process):
    try:
        err = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Done("none", f"still running after {TIMEOUT} s")
    return Done(process.returncode, (err or b"").decode(errors="replace"))


def failure(done):
    return "" if done.code == 0 else f"exit {done.code}: {done.err.strip() or 'no message'}"


def complaint(done, *words):
    """Returns "" if the run ended with exit code 1 or 2 and a message that contains `words`, otherwise the problem."""
    lines = done.err.splitlines()
    valid = done.code in (1, 2) and lines and all(line.startswith("train_gpt: ") for line in lines)
    if valid and all(word in done.err for word in words):
        return ""
    return f"expected exit 1 or 2 and a message with {', '.join(words)}; found exit {done.code}: {done.err.strip()}"


# ---- files of a run

def digest(path):
    content = path.read_bytes()
    if path.name == "trainer.json":     # it also contains the options, such as --out
        trainer = json.loads(content)
        return trainer["step"], trainer["next_window"]
    return hashlib.sha256(content).hexdigest()


def checkpoints(out):
    """Returns {step: {file: digest}}."""
    found = {}
    for folder in Path(out).glob("step_*"):
        try:
            found[int(folder.name[5:])] = {path.name: digest(path) for path in folder.iterdir()}
        except (OSError, ValueError, KeyError) as error:
            found[int(folder.name[5:])] = {"damaged": str(error)}
    return found


def log_of(out):
    """Returns the records of steps and validations without times. Ignores an incomplete line, as --resume does."""
    try:
        lines = Path(out, "log.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    records = [json.loads(line) for line in lines]
    kept = ("step", "loss", "norm", "lr", "val_loss")
    return [{name: record[name] for name in kept if name in record} for record in records if "step" in record]


def logged(out):
    return max((record["step"] for record in log_of(out)), default=0)


class World:
    """The program, its data, a temporary folder, and an undisturbed run with a checkpoint after each step."""

    def __init__(self, options, folder):
        self.folder, self.seed, self.jobs, self.numbers = folder, options.seed, options.jobs, itertools.count()
        self.program, self.preload = os.path.abspath(options.program), os.path.abspath(options.preload)
        self.data = os.path.join(folder, "data.txt")
        write(self.data, (ROOT / "data/shakespeare.txt").read_bytes()[:20000])
        out, begin = self.new_out(), time.monotonic()
        done = self.run(out, LONG, "--checkpoint-every", "1", "--keep", "0")
        self.duration_s = time.monotonic() - begin
        if done.code != 0:
            sys.exit(f"the undisturbed run fails: {failure(done)}")
        self.checkpoints, self.log = checkpoints(out), log_of(out)

    def new_out(self):
        """Creates a new folder and returns the path of a run folder in it, which does not exist yet."""
        place = os.path.join(self.folder, f"{next(self.numbers):05d}")
        os.mkdir(place)
        return os.path.join(place, "out")

    def start(self, out, steps, *more, at="", log="", **popen):
        """Starts a run. at, log: FAULTS_AT and FAULTS_LOG of failing.cpp, for calls in the folder that has `out`."""
        command = [self.program, "train", "--data", self.data, *MODEL, "--steps", str(steps), "--out", out, *more]
        environment = {**os.environ, "XDG_CACHE_HOME": os.path.join(self.folder, "cache"), "OMP_WAIT_POLICY": "passive"}
        if at or log:
            environment.update(LD_PRELOAD=self.preload, FAULTS_UNDER=os.path.dirname(out), FAULTS_AT=at, FAULTS_LOG=log)
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **popen}
        return subprocess.Popen(command, env=environment, **streams)

    def run(self, out, steps, *more, **how):
        return wait(self.start(out, steps, *more, **how))

    def each(self, work, items):
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(work, items))

    def damage(self, out):
        wrong = [step for step, files in checkpoints(out).items() if files != self.checkpoints.get(step)]
        return f"{out}: the checkpoints of steps {wrong} differ" if wrong else ""

    def difference(self, out, steps, log=True):
        """Returns how a finished run differs from the undisturbed run; "" if it does not."""
        names, found, expected = os.listdir(out), log_of(out), [r for r in self.log if r["step"] <= steps]
        others = [name for name in names if name != "log.jsonl" and not name.startswith("step_")]
        if f"step_{steps:06d}" not in names or others:
            return f"{out}: expected only checkpoints, with step_{steps:06d}, and log.jsonl; found {sorted(names)}"
        if log and found != expected:
            return f"{out}: the log differs; expected {len(expected)} records, found {len(found)}"
        return self.damage(out)

    def resume(self, out, steps, at_least=0, log=True):
        """Finishes the run with --resume, or starts it if there is none. Returns the first problem, or ""."""
        newest = max(checkpoints(out), default=0)
        if self.damage(out):
            return f"before --resume: {self.damage(out)}"
        if newest < at_least:
            return f"{out}: newest checkpoint: expected step {at_least} or later, found step {newest}"
        done = self.run(out, steps, "--resume")
        if done.code == 2 and newest == 0:      # there was no run yet
            done = self.run(out, steps)
        return failure(done) or self.difference(out, steps, log)


# ---- kill -9 and signals

def one_signal(world, number, draw):
    """Sends a signal to a run and resumes the run. Returns (whether the signal came during training, problem). For
    SIGPIPE it closes the run's standard output instead."""
    out = world.new_out()
    process = world.start(out, LONG, stdout=subprocess.PIPE if number == signal.SIGPIPE else subprocess.DEVNULL)
    # Start-up takes longer than training here, so 2/3 of the moments are relative to a step, the others to the start.
    step = draw.randrange(LONG) if draw.random() < 2 / 3 else 0
    while logged(out) < step and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.01 if step else world.duration_s))
    if number == signal.SIGPIPE:
        process.stdout.close()
        process.stdout = None
    else:
        process.send_signal(number)
    done, last, problem = wait(process), logged(out), ""
    if number != signal.SIGKILL:
        if done.code == -number:    # before training started
            problem = f"{number.name} ended a run after step {last}" if last > 0 else ""
        elif failure(done) or done.err:
            problem = f"{number.name}: {failure(done)} {done.err}"
        elif max(checkpoints(out), default=0) != last:
            problem = f"{out}: the run ended after step {last}, which has no checkpoint"
    problem = problem or world.resume(out, LONG)
    shutil.rmtree(os.path.dirname(out))
    return 0 < last < LONG, problem


def test_signals(world, numbers, count):
    for number in numbers:
        generators = [random.Random(f"{world.seed} {number.name} {i}") for i in range(count // len(numbers))]
        during, problems = zip(*world.each(functools.partial(one_signal, world, number), generators))
        name = "closed standard output" if number == signal.SIGPIPE else number.name
        hold(f"{name} at {len(generators)} moments, {sum(during)} during training: --resume gives the same bits",
             [*problems, "" if any(during) or len(generators) < 10 else "no moment was during training"])


# ---- failing system calls

ERRORS = {"open": [errno.EACCES, errno.ENOENT, errno.ENOSPC, errno.EMFILE], "write": [errno.ENOSPC, errno.EIO],
          "fsync": [errno.EIO, errno.ENOSPC], "rename": [errno.EIO, errno.EACCES],
          "mkdir": [errno.ENOSPC, errno.EACCES], "unlink": [errno.EIO, errno.EACCES]}


def calls_of(world, out, *more):
    """Runs to the end and returns the system calls as (name, path)."""
    log = os.path.dirname(out) + ".log"
    done = world.run(out, SHORT, *more, log=log)
    if done.code != 0:
        sys.exit(failure(done))
    return [tuple(line.split("\t")) for line in Path(log).read_text().splitlines()]


def failing(world, prepare, more, at):
    """Runs with one fault, then with --resume. Returns the first problem, or ""."""
    out, action = world.new_out(), at.split(":")[2]
    prepare(out)
    log, before = os.path.dirname(out) + ".log", max(checkpoints(out), default=0)
    done = world.run(out, SHORT, *more, at=at, log=log)
    fired = [line.split()[1:] for line in Path(log).read_text().splitlines() if line.startswith("fault\t")]
    number = {"full": errno.ENOSPC, "half": 0}.get(action) if action.isalpha() else int(action.strip("+"))
    problem = complaint(done, os.path.dirname(out), os.strerror(number)) if number else failure(done)
    # If a line of the log cannot be written, the run saves a checkpoint immediately, before a validation that was due.
    log = fired != [["write", out + "/log.jsonl"]]
    problem = ("" if fired else "the call was not reached") or problem or world.resume(out, SHORT, before, log)
    shutil.rmtree(os.path.dirname(out))
    return f"{at}: {problem}" if problem else ""


def test_calls(world, stride):
    """stride: only every stride-th call fails."""
    half = world.new_out()
    world.run(half, EVERY)
    for name, prepare, more in (("a new run", lambda out: None, ()),
                                ("--resume", lambda out: shutil.copytree(half, out), ("--resume",))):
        out = world.new_out()
        prepare(out)
        count = collections.Counter(call for call, _ in calls_of(world, out, *more))
        faults = {f"{call} fails": [f"{call}:{n}:{errors[n // stride % len(errors)]}"
                                    for n in range(1, count[call] + 1, stride)] for call, errors in ERRORS.items()}
        faults["a call and all later ones fail"] = [f"any:{n}:{errno.EROFS}+"
                                                      for n in range(1, sum(count.values()) + 1, stride * 3)]
        faults["the disk fills up in a write"] = [f"write:{n}:full"
                                                               for n in range(1, count["write"] + 1, stride * 2)]
        for what, places in faults.items():
            hold(f"{name}, {what}, {len(places)} places: a message, complete checkpoints, --resume gives the same bits",
                 world.each(functools.partial(failing, world, prepare, more), places))
    hold("a partial write is continued", [failing(world, lambda out: None, (), "write:1:half")])


def test_order(world):
    """After a power failure only flushed data is guaranteed to be on disk."""
    out = world.new_out()
    calls, problems = calls_of(world, out), []
    renames = [n for n, (call, path) in enumerate(calls) if call == "rename" and "/unfinished_step_" in path]
    for n in renames:
        folder = calls[n][1]
        written = {path: i for i, (call, path) in enumerate(calls[:n]) if call == "write"}
        flushed = {path: i for i, (call, path) in enumerate(calls[:n]) if call == "fsync"}
        inside = [path for path in written if path.startswith(folder + "/")]
        problems += [f"{path} is not flushed before the rename" for path in inside + [out + "/log.jsonl"]
                     if flushed.get(path, -1) < written[path]]
        problems += [f"{folder} is not flushed"] * (folder not in flushed) + ["no writes found"] * (not inside)
        problems += [f"{out} is not flushed after the rename"] * (("fsync", out) not in calls[n + 1:n + 3])
    hold("a checkpoint's files, its folder and the log are flushed before the rename, and the run folder after it",
         problems if renames else ["no checkpoint was written"])


# ---- limits and full disks

def test_limits(world):
    def limit_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))

    out = world.new_out()
    done = world.run(out, SHORT, preexec_fn=limit_files)
    hold("ulimit -f below the size of optimizer.state: a message; --resume without the limit gives the same bits",
         [complaint(done, out, os.strerror(errno.EFBIG)) or world.resume(out, SHORT)])
    out = world.new_out()
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = world.run(out, SHORT, stdout=full)
    hold("standard output on a full disk: the run finishes with the same bits, then reports the error",
         [complaint(done, "standard output: writing failed") or world.difference(out, SHORT)])
    for closed in ((1,), (0, 1, 2)):
        out = world.new_out()
        done = world.run(out, SHORT, preexec_fn=lambda: [os.close(file) for file in closed])
        hold(f"with closed standard streams {closed}: the same bits, no output in other files",
             [failure(done) or world.difference(out, SHORT)])


def main():
    tests = {"kills": lambda: test_signals(world, [signal.SIGKILL], options.moments),
             "signals": lambda: test_signals(
                 world, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE], options.moments),
             "calls": lambda: test_calls(world, max(1, 200 // options.moments)),
             "order": lambda: test_order(world), "limits": lambda: test_limits(world)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(tests) + " (default: all)")
    parser.add_argument("--program", default=ROOT / "train_gpt", help="train_gpt, built for a CPU")
    parser.add_argument("--preload", default=ROOT / "build/faults/failing.so")
    parser.add_argument("--seed", type=int, default=1, help="selects the random moments (default 1)")
    parser.add_argument("--moments", type=int, default=200, metavar="N",
                        help="moments per signal test (default 200); if N < 200, only every (200 / N)-th call fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at a time (default: cores)")
    options = parser.parse_args()
    unknown = set(options.parts) - tests.keys()
    if unknown:
        parser.error(f"unknown part {unknown.pop()}; expected one of {', '.join(tests)}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)    # inherited by the runs, which would ignore it under nohup
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpt-faults-", dir=memory) as folder:
        world = World(options, folder)
        for name in options.parts or tests:
            begin = time.monotonic()
            tests[name]()
            print(f"        {name}: {time.monotonic() - begin:.0f} s", flush=True)
    finish()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Training runs that end badly: killed, stopped by a signal, on a full or failing disk, without their folder. Every such
run must end with exit code 0, or with 1 or 2 and a message; every checkpoint left on disk must be complete; and --resume
must reach the bits and losses of an undisturbed run.

    make test-faults
    dev/faults/test_faults.py --program ./train_gpt --preload build/faults/failing.so [PART...]

--seed draws the moments; the instruction that a moment meets depends on the machine. All files are below a temporary
folder. Exit codes: 0 all tests pass, 1 a test fails, 2 bad usage.
"""
import argparse
import collections
import concurrent.futures
import contextlib
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

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev", "tests"))
from claims import claim, finish

MODEL = ("--layers 1 --heads 1 --channels 16 --context 16 --micro-batch 2 --seed 5 --threads 1 --schedule constant "
         "--warmup 4 --eval-sequences 1 --sample-every 0").split()
EVERY = 3               # steps between checkpoints, and between validations
LONG, SHORT = 60, 9     # steps of a run; a short one also removes old checkpoints
TIMEOUT = 60            # seconds
NOBODY = 65534          # user id
PARTS = ("kills", "signals", "calls", "order", "folders", "limits")


def hold(text, problems):
    """A claim that holds if no problem is named."""
    problems = [problem for problem in problems if problem]
    claim(not problems, text, "; ".join(problems[:3] + [f"and {len(problems) - 3} more"] * (len(problems) > 3)))


# ---- runs

Done = collections.namedtuple("Done", "code err")


class World:
    """The program, its data, and a temporary folder."""
    def __init__(self, options, folder):
        self.folder, self.seed, self.jobs = folder, options.seed, options.jobs
        # copies that an unprivileged user may read
        self.program, self.preload = os.path.join(folder, "train_gpt"), os.path.join(folder, "failing.so")
        shutil.copy(options.program, self.program)
        shutil.copy(options.preload, self.preload)
        self.data, self.numbers = os.path.join(folder, "data.txt"), itertools.count()
        with open(os.path.join(ROOT, "data", "shakespeare.txt"), "rb") as text, open(self.data, "wb") as file:
            file.write(text.read(20000))

    def new_out(self):
        """A new run folder, not created yet, in a folder of its own."""
        place = os.path.join(self.folder, f"{next(self.numbers):05d}")
        os.mkdir(place)
        return os.path.join(place, "out")

    def start(self, out, steps, *more, at="", log="", **popen):
        """Starts a run. at, log: FAULTS_AT and FAULTS_LOG of failing.cpp, for calls beside `out`."""
        command = [self.program, "train", "--data", self.data, *MODEL, "--steps", str(steps), "--eval-every", str(EVERY),
                   "--checkpoint-every", str(EVERY), "--keep", "2", "--out", out, *more]
        faults = {"LD_PRELOAD": self.preload, "FAULTS_UNDER": os.path.dirname(out), "FAULTS_AT": at, "FAULTS_LOG": log}
        environment = {**os.environ, "XDG_CACHE_HOME": os.path.join(self.folder, "cache"), "OMP_WAIT_POLICY": "passive",
                       **(faults if at or log else {})}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **popen}
        return subprocess.Popen(command, env=environment, **streams)

    def run(self, out, steps, *more, **how):
        return wait(self.start(out, steps, *more, **how))

    def each(self, work, items):
        """[work(item) for item in items], on as many cores as --jobs says."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool: return list(pool.map(work, items))


def wait(process):
    try:
        _, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Done("none", f"still running after {TIMEOUT} s")
    return Done(process.returncode, (err or b"").decode(errors="replace"))


def said(done):
    return f"exit {done.code}: {done.err.strip() or 'no message'}"


def complaint(done, *words):
    """Returns "" if the run ended with a message that contains `words`."""
    lines = done.err.splitlines()
    right = done.code in (1, 2) and lines and all(line.startswith("train_gpt: ") for line in lines)
    missing = [word for word in words if word not in done.err]
    return "" if right and not missing else f"{said(done)}; expected exit 1 or 2 and a message with {', '.join(words)}"


# ---- what a run leaves

def digest(path):
    with open(path, "rb") as file: content = file.read()
    if os.path.basename(path) == "trainer.json":    # it also holds the options, such as --out
        trainer = json.loads(content)
        return trainer["step"], trainer["next_window"]
    return hashlib.sha256(content).hexdigest()


def checkpoints(out):
    """step -> file -> digest"""
    found = {}
    for name in sorted(os.listdir(out)) if os.path.isdir(out) else []:
        if not name.startswith("step_"): continue
        folder = os.path.join(out, name)
        try:
            found[int(name[5:])] = {file: digest(os.path.join(folder, file)) for file in sorted(os.listdir(folder))}
        except (OSError, ValueError, KeyError) as error:
            found[int(name[5:])] = {"damaged": str(error)}
    return found


def log_of(out):
    """The records of steps and validations without times. Omits a truncated line, as --resume does."""
    records = []
    with contextlib.suppress(OSError), open(os.path.join(out, "log.jsonl")) as file:
        for line in file:
            with contextlib.suppress(ValueError): records.append(json.loads(line))
    kept = ("step", "loss", "norm", "lr", "val_loss")
    return [{name: record[name] for name in kept if name in record} for record in records if "step" in record]


def logged(out):
    return max((record["step"] for record in log_of(out)), default=0)


def last_is_kept(out):
    newest, last = max(checkpoints(out), default=0), logged(out)
    return "" if newest == last else f"{out}: the newest checkpoint is of step {newest}, the run ended after {last}"


class Reference:
    """An undisturbed run with a checkpoint after each step."""
    def __init__(self, world, steps):
        self.world, out = world, world.new_out()
        done = world.run(out, steps, "--checkpoint-every", "1", "--keep", "0")
        if done.code != 0: sys.exit(f"the undisturbed run fails: {said(done)}")
        self.checkpoints, self.log = checkpoints(out), log_of(out)

    def damage(self, out):
        wrong = [step for step, files in checkpoints(out).items() if files != self.checkpoints.get(step)]
        return f"{out}: {', '.join(f'step_{step:06d}' for step in wrong)} differs" if wrong else ""

    def difference(self, out, steps, log=True, unvalidated=0):
        """Compares a finished run with the reference. log=False: its log was removed; unvalidated: the step at which
        a failing log ended the run before its validation."""
        names = os.listdir(out)
        expected = [record for record in self.log if record["step"] <= steps]
        if log_of(out) != expected:
            expected = [record for record in expected if "val_loss" not in record or record["step"] != unvalidated]
        if self.damage(out): return self.damage(out)
        if f"step_{steps:06d}" not in names: return f"{out}: no checkpoint of the last step, found {sorted(names)}"
        if log and log_of(out) != expected:
            return f"{out}: the log differs: {len(log_of(out))} records, expected {len(expected)}"
        others = [name for name in names if name != "log.jsonl" and not name.startswith("step_")]
        return f"{out}: left behind: {others}" if others else ""

    def resume(self, out, steps, at_least=0, unvalidated=0):
        """Finishes the run with --resume, or starts it if there is none; returns the first problem."""
        newest = max(checkpoints(out), default=0)
        if self.damage(out): return f"before --resume: {self.damage(out)}"
        if newest < at_least: return f"{out}: the newest checkpoint is of step {newest}, step {at_least} was there"
        done = self.world.run(out, steps, "--resume")
        if done.code == 2 and newest == 0: done = self.world.run(out, steps)    # there was no run yet
        return f"--resume from step {newest}: {said(done)}" if done.code != 0 else self.difference(
            out, steps, unvalidated=unvalidated)


# ---- kill -9 and signals

def checkpoint_there(out):
    with contextlib.suppress(FileNotFoundError): return any(name.startswith("step_") for name in os.listdir(out))
    return False


def wait_for_checkpoint(out, process):
    while not checkpoint_there(out) and process.poll() is None: time.sleep(0.0005)


def moments(world, name, count):
    """(random numbers, delay, whether it counts from the first checkpoint) over the whole duration of a run."""
    times = []
    for _ in range(3):
        out, began = world.new_out(), time.monotonic()
        process = world.start(out, LONG)
        wait_for_checkpoint(out, process)
        there = time.monotonic()
        process.communicate()
        times.append((time.monotonic() - began, time.monotonic() - there))
    whole, training = (sorted(column)[1] for column in zip(*times))
    draws = [random.Random(f"{world.seed} {name} {index}") for index in range(count)]
    # Starting takes longer than training here, so two thirds of the moments are in training.
    return [(draw, draw.uniform(0, 1.1 * (training if i % 3 else whole)), i % 3 > 0) for i, draw in enumerate(draws)]


def stage(out):
    if not os.path.exists(os.path.join(out, "log.jsonl")): return "before the log"
    return "before a checkpoint" if not checkpoints(out) else "after the last step" if logged(out) >= LONG else "later"


def one_signal(world, plain, moment, number):
    """Sends a signal to a run, resumes it; returns (stage, problem). SIGPIPE: closes its standard output instead."""
    draw, delay, late = moment
    out = world.new_out()
    twice = number in (signal.SIGINT, signal.SIGTERM) and draw.random() < 0.1
    process = world.start(out, LONG, stdout=subprocess.PIPE if number == signal.SIGPIPE else subprocess.DEVNULL)
    if late: wait_for_checkpoint(out, process)
    time.sleep(delay)
    if number == signal.SIGPIPE:
        process.stdout.close()
        process.stdout = None
    else:
        process.send_signal(number)
    if twice:
        time.sleep(draw.uniform(0, 0.003))
        process.send_signal(number)
    done = wait(process)
    where, last = stage(out), logged(out)
    if number == signal.SIGKILL: problem = ""
    elif done.code == -number:    # before training began, or by the second signal
        problem = f"{number.name} ended a run after step {last}" if last > 0 and not twice else ""
    elif done.code != 0 or done.err: problem = f"{number.name}: {said(done)}"
    else: problem = last_is_kept(out)
    problem = problem or plain.resume(out, LONG)
    shutil.rmtree(os.path.dirname(out))
    return where, problem


def test_signals(world, plain, numbers, count):
    for number in numbers:
        drawn = moments(world, number.name, count // len(numbers))
        where, problems = zip(*world.each(lambda moment: one_signal(world, plain, moment, number), drawn))
        name = "closed standard output" if number == signal.SIGPIPE else number.name
        stages = ", ".join(f"{n} {text}" for text, n in collections.Counter(where).items())
        hold(f"{name} at {len(drawn)} moments ({stages}): --resume reaches the same bits", problems)


# ---- failing system calls

ERRORS = {"open": [errno.EACCES, errno.ENOSPC, errno.EMFILE], "write": [errno.ENOSPC, errno.EIO],
          "fsync": [errno.EIO, errno.ENOSPC], "rename": [errno.EIO, errno.EACCES],
          "mkdir": [errno.ENOSPC, errno.EACCES], "unlink": [errno.EIO, errno.EACCES]}


def calls_of(world, out, *more):
    """Runs to the end; returns its calls as (name, path)."""
    log = os.path.dirname(out) + ".log"
    done = world.run(out, SHORT, *more, log=log)
    if done.code != 0: sys.exit(said(done))
    with open(log) as file: return [tuple(line.rstrip("\n").split("\t")) for line in file]


def failing(world, plain, prepare, more, at):
    """A run with one fault, then --resume; returns the first problem."""
    out, action = world.new_out(), at.split(":")[2]
    prepare(out)
    log, before = os.path.dirname(out) + ".log", max(checkpoints(out), default=0)
    done = world.run(out, SHORT, *more, at=at, log=log)
    with open(log) as file: fired = [line.split()[1:] for line in file if line.startswith("fault\t")]
    number = errno.ENOSPC if action == "full" else 0 if action == "half" else int(action.strip("+"))
    problem = "" if fired else "was not reached"
    if number: problem = problem or complaint(done, os.path.dirname(out), os.strerror(number))
    elif done.code != 0: problem = problem or said(done)
    # If a line of the log cannot be written, the run keeps the step at once, before a validation that was due.
    unvalidated = logged(out) if fired and fired[0] == ["write", out + "/log.jsonl"] else 0
    problem = problem or plain.resume(out, SHORT, before, unvalidated)
    shutil.rmtree(os.path.dirname(out))
    return f"{at}: {problem}" if problem else ""


def test_calls(world, plain, share):
    """share: only every share-th call fails."""
    half = world.new_out()
    world.run(half, EVERY)
    for name, prepare, more in (("a new run", lambda out: None, ()),
                                ("--resume", lambda out: shutil.copytree(half, out), ("--resume",))):
        out = world.new_out()
        prepare(out)
        count = collections.Counter(call for call, _ in calls_of(world, out, *more))
        count["any"] = sum(count.values())
        fail = functools.partial(failing, world, plain, prepare, more)
        for call, errors in ERRORS.items():
            faults = [f"{call}:{n}:{errors[n // share % len(errors)]}" for n in range(1, count[call] + 1, share)]
            hold(f"{name}: each of {len(faults)} {call} calls fails: a message, complete checkpoints, the same bits with "
                 "--resume", world.each(fail, faults))
        numbers = range(1, count["any"] + 1, share * 3)
        hold(f"{name}: from each of {len(numbers)} calls on every call fails",
             world.each(fail, [f"any:{n}:{errno.EROFS}+" for n in numbers]))
        numbers = range(1, count["write"] + 1, share * 2)
        hold(f"{name}: the disk is full in the middle of each of {len(numbers)} writes",
             world.each(fail, [f"write:{n}:full" for n in numbers]))
    hold("a write of half its bytes is continued", [fail("write:1:half")])


def test_order(world):
    """After a power cut only flushed data is certain to be on disk."""
    out = world.new_out()
    calls, problems = calls_of(world, out), []
    renames = [n for n, (call, path) in enumerate(calls) if call == "rename" and "/unfinished_step_" in path]
    for n in renames:
        folder = calls[n][1]
        written = {path: i for i, (call, path) in enumerate(calls[:n]) if call == "write"}
        flushed = {path: i for i, (call, path) in enumerate(calls[:n]) if call == "fsync"}
        inside = [path for path in written if path.startswith(folder + "/")]
        problems += [f"{path} is not flushed before it gets its name" for path in inside + [out + "/log.jsonl"]
                     if flushed.get(path, -1) < written[path]]
        if folder not in flushed: problems.append(f"{folder} is not flushed")
        if ("fsync", out) not in calls[n + 1:n + 3]: problems.append(f"{out} is not flushed after the rename")
        if not inside: problems.append(f"{folder}: no writes seen")
    hold("a checkpoint's files, its folder and the log are flushed before the rename, and the run folder after it",
         problems if renames else ["no checkpoint was written"])


# ---- folders that change during a run

def disturb(world, at, change, mend, **popen):
    """Stops a short run before a call, calls change(out), continues it, calls mend(out) when it has ended."""
    out = world.new_out()
    os.chmod(os.path.dirname(out), 0o777)      # the run may be another user's
    process = world.start(out, SHORT, at=at + ":stop", **popen)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        process.returncode = os.waitstatus_to_exitcode(status)
        return out, wait(process)
    change(out)
    process.send_signal(signal.SIGCONT)
    done = wait(process)
    mend(out)
    return out, done


def test_folders(world, plain):
    calls = calls_of(world, world.new_out())
    first = 1 + next(n for n, (_, path) in enumerate(calls) if path.endswith("/unfinished_step_000006"))
    def move(out): os.rename(out, out + "-moved")
    def replace(out):
        move(out)
        with open(out, "w") as file: file.write("a file")
    def put_back(out):
        if os.path.isdir(out): shutil.rmtree(out)
        elif os.path.exists(out): os.remove(out)
        os.rename(out + "-moved", out)
    def set_modes(mode): return lambda out: [os.chmod(folder, mode) for folder, _, _ in os.walk(out)]
    nobody = {"user": NOBODY, "group": NOBODY} if os.getuid() == 0 else {}
    cases = (("moved away", move, put_back, {}, ()), ("replaced by a file", replace, put_back, {}, ()),
             ("made read-only", set_modes(0o555), set_modes(0o755), nobody, (os.strerror(errno.EACCES),)))
    for when, at in {"before a checkpoint": f"any:{first}", "in the middle of one": f"any:{first + 12}"}.items():
        for what, change, mend, popen, words in cases:
            out, done = disturb(world, at, change, mend, **popen)
            hold(f"--out is {what} {when}: a message; restored, --resume reaches the same bits",
                 [complaint(done, out, *words) or plain.resume(out, SHORT, EVERY)])
        out, done = disturb(world, at, shutil.rmtree, lambda out: None)
        hold(f"--out is removed {when}: a message; --resume finds no run",
             [complaint(done, out), complaint(world.run(out, SHORT, "--resume"), out, "no run")])
    out, done = disturb(world, f"any:{first}", lambda out: os.remove(out + "/log.jsonl"), lambda out: None)
    hold("log.jsonl is removed during a run: checkpoints have the same bits",
         [said(done) if done.code != 0 else plain.difference(out, SHORT, log=False)])


# ---- limits and full disks

def test_limits(world, plain):
    out = world.new_out()
    limit = lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_DFL),
                     resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)))
    done = world.run(out, SHORT, preexec_fn=limit)
    hold("ulimit -f below the optimizer's file: a message; without the limit, the same bits",
         [complaint(done, out, os.strerror(errno.EFBIG)) or plain.resume(out, SHORT)])
    out = world.new_out()
    with open("/dev/full", "w") as full: done = world.run(out, SHORT, stdout=full)
    hold("standard output on a full disk: the run finishes with the same bits, then reports it",
         [complaint(done, "standard output: writing failed") or plain.difference(out, SHORT)])
    for closed in ((1,), (0, 1, 2)):
        out = world.new_out()
        done = world.run(out, SHORT, preexec_fn=lambda: [os.close(file) for file in closed])
        hold(f"started without the streams {closed} (>&-): the same bits, no output in other files",
             [said(done) if done.code != 0 else plain.difference(out, SHORT)])
    disk = os.path.dirname(world.new_out())
    mount = lambda options: subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True)
    if os.getuid() != 0 or mount("size=250k").returncode != 0:
        print("skipped a disk that is really full: needs the right to mount", flush=True)
        return
    try:
        out = os.path.join(disk, "out")
        problem = complaint(world.run(out, SHORT), out, os.strerror(errno.ENOSPC)) or plain.damage(out)
        problem = problem or complaint(world.run(out, SHORT, "--resume"), out, os.strerror(errno.ENOSPC))
        mount("remount,size=4m")
        hold("a full disk: a message, also from --resume; with more room, the same bits",
             [problem or plain.resume(out, SHORT, EVERY)])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS) + " (default: all)")
    parser.add_argument("--program", default=os.path.join(ROOT, "train_gpt"), help="train_gpt, built for a CPU")
    parser.add_argument("--preload", default=os.path.join(ROOT, "build", "faults", "failing.so"))
    parser.add_argument("--seed", type=int, default=1, help="draws the moments (default 1)")
    parser.add_argument("--moments", type=int, default=200, metavar="N", help="of each kind (default 200)")
    parser.add_argument("--quick", action="store_true", help="20 moments, and every tenth call")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at a time (default: cores)")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown: parser.error(f"unknown part {unknown.pop()}; expected one of {', '.join(PARTS)}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)    # inherited by the runs; nohup would have them ignore it
    count = 20 if options.quick else options.moments
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpt-faults-", dir=memory) as folder:
        os.chmod(folder, 0o755)
        world = World(options, folder)
        plain = Reference(world, LONG)
        tests = {"kills": lambda: test_signals(world, plain, [signal.SIGKILL], count),
                 "signals": lambda: test_signals(
                     world, plain, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE], count),
                 "calls": lambda: test_calls(world, plain, max(1, 200 // count)),
                 "order": lambda: test_order(world), "folders": lambda: test_folders(world, plain),
                 "limits": lambda: test_limits(world, plain)}
        for name in options.parts or PARTS:
            began = time.monotonic()
            tests[name]()
            print(f"        {name}: {time.monotonic() - began:.0f} s", flush=True)
    finish()


if __name__ == "__main__":
    main()

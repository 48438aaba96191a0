#!/usr/bin/env python3
"""What is left of a training run that ends badly: killed, stopped, on a full or failing disk, without its files, cut
off from power. Of every such end the program must say what happened (exit code 1 or 2), or be done (0); each checkpoint
that is there must be whole; and --resume must come to the bits and losses of a run that nobody disturbed.

    make test-faults
    dev/faults/test_faults.py --program ./train_gpt --preload build/faults/failing.so [PART...]

The program is the CPU build. Moments are drawn by --seed; which instruction they meet is up to the machine. Everything
happens below a temporary folder. Exit status: 0 all claims hold, 1 one does not, 2 bad usage.
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
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
import crash

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = ("--layers 1 --heads 1 --channels 16 --context 16 --micro-batch 2 --seed 5 --threads 1 --schedule constant "
         "--warmup 4 --eval-sequences 1 --sample-every 0").split()
EVERY = 3               # steps between checkpoints, and between validations
LONG, SHORT = 60, 9     # steps of a run; a short one writes and removes checkpoints, too
PATIENCE = 60           # seconds after which a run hangs
NOBODY = 65534

passed = failed = 0


def claim(text, problems):
    """problems: texts, of which there must be none."""
    global passed, failed
    problems = [problem for problem in problems if problem]
    passed, failed = passed + (not problems), failed + bool(problems)
    print(f"{'FAILED' if problems else 'ok    '}  {text}", flush=True)
    for problem in problems[:3]: print(f"          {problem}")
    if len(problems) > 3: print(f"          and {len(problems) - 3} more", flush=True)


def skipped(text, why):
    print(f"skipped {text}: {why}", flush=True)


# ---- runs

class World:
    """The program, data, and a folder for everything."""
    def __init__(self, options, folder):
        self.folder, self.seed = folder, options.seed
        self.jobs = options.jobs
        self.program, self.preload = os.path.join(folder, "train_gpt"), os.path.join(folder, "failing.so")
        shutil.copy(options.program, self.program)     # where users without rights may read it
        shutil.copy(options.preload, self.preload)
        self.data = os.path.join(folder, "data.txt")
        with open(os.path.join(ROOT, "data", "shakespeare.txt"), "rb") as file: text = file.read(20000)
        with open(self.data, "wb") as file: file.write(text)
        self.numbers, self.lock = itertools.count(), threading.Lock()

    def place(self):
        """A new folder; runs go to its subfolder out."""
        with self.lock: path = os.path.join(self.folder, f"{next(self.numbers):05d}")
        os.mkdir(path)
        return path

    def command(self, out, steps, *more):
        return [self.program, "train", "--data", self.data, *MODEL, "--steps", str(steps), "--eval-every", str(EVERY),
                "--checkpoint-every", str(EVERY), "--keep", "2", "--out", out, *more]

    def environment(self, at="", trace="", under=""):
        faults = {"LD_PRELOAD": self.preload, "FAULTS_UNDER": under, "FAULTS_AT": at, "FAULTS_TRACE": trace}
        return {**os.environ, "XDG_CACHE_HOME": os.path.join(self.folder, "cache"), "OMP_WAIT_POLICY": "passive",
                **(faults if under else {})}

    def start(self, out, steps, *more, at="", trace="", **popen):
        """A run; at and trace: as in failing.cpp, of what lies beside `out`."""
        under = os.path.dirname(out) if at or trace else ""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **popen}
        return subprocess.Popen(self.command(out, steps, *more), env=self.environment(at, trace, under), **streams)

    def run(self, out, steps, *more, **how):
        return finish(self.start(out, steps, *more, **how))

    def each(self, work, items):
        """work(item) of all of them, as many at a time as there are cores."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool: return list(pool.map(work, items))


Done = collections.namedtuple("Done", "code err")


def where_it_hangs(pid):
    """By gdb, if it is there."""
    if not shutil.which("gdb"): return ""
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 20"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def finish(process):
    try:
        _, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        where = where_it_hangs(process.pid)
        process.kill()
        process.communicate()
        return Done("hangs", where)
    return Done(process.returncode, (err or b"").decode(errors="replace"))


def said(done):
    return f"exit {done.code}: {done.err.strip() or 'no message'}"


def complaint(done, *words):
    """Empty: it ended with a message that names these."""
    lines = done.err.splitlines()
    right = done.code in (1, 2) and lines and all(line.startswith("train_gpt: ") for line in lines)
    missing = [word for word in words if word not in done.err]
    return "" if right and not missing else f"{said(done)}; expected exit 1 or 2 and a message with {', '.join(words)}"


# ---- what must be there

def digest(path):
    with open(path, "rb") as file: content = file.read()
    if os.path.basename(path) == "trainer.json":    # which also holds the options, such as --out
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
    """The steps' records without times. A line that is cut short is left out: --resume does the same."""
    records = []
    with contextlib.suppress(OSError), open(os.path.join(out, "log.jsonl")) as file:
        for line in file:
            with contextlib.suppress(ValueError): records.append(json.loads(line))
    kept = ("step", "loss", "norm", "lr", "val_loss")
    return [{name: record[name] for name in kept if name in record} for record in records if "step" in record]


def log_is_json(out):
    with open(os.path.join(out, "log.jsonl"), "rb") as file: lines = file.read().split(b"\n")
    with contextlib.suppress(ValueError):
        return lines.pop() == b"" and all(isinstance(json.loads(line), dict) for line in lines)
    return False


def logged(out):
    return max((record["step"] for record in log_of(out)), default=0)


class Undisturbed:
    """The checkpoint after each step, and the log, of a run that nobody disturbed. start: what it begins with."""
    def __init__(self, world, steps, *start):
        self.world, self.start = world, start
        self.out = os.path.join(world.place(), "out")
        done = world.run(self.out, steps, *start, "--checkpoint-every", "1", "--keep", "0")
        if done.code != 0: sys.exit(f"a run that nobody disturbs fails: {said(done)}")
        self.checkpoints, self.log = checkpoints(self.out), log_of(self.out)

    def damage(self, out):
        """What is wrong with the checkpoints that are there."""
        wrong = [step for step, files in checkpoints(out).items() if files != self.checkpoints.get(step)]
        return f"{out}: {', '.join(f'step_{step:06d}' for step in wrong)} differs" if wrong else ""

    def difference(self, out, steps, log=True, unvalidated=0):
        """Between a run that has come to its end and the undisturbed one. log=False: the log was taken away;
        unvalidated: after this step there was nothing to validate on."""
        names = set(os.listdir(out))
        expected = [record for record in self.log if record["step"] <= steps]
        if log_of(out) != expected:
            expected = [record for record in expected if "val_loss" not in record or record["step"] != unvalidated]
        if self.damage(out): return self.damage(out)
        if f"step_{steps:06d}" not in names: return f"{out}: no checkpoint of the last step, found {sorted(names)}"
        if log and log_of(out) != expected:
            return f"{out}: the log differs: {len(log_of(out))} records of {len(expected)}"
        if log and not log_is_json(out): return f"{out}/log.jsonl: holds more than JSON"
        others = [name for name in names if name != "log.jsonl" and not name.startswith("step_")]
        return f"{out}: left behind: {others}" if others else ""

    def go_on(self, out, steps, at_least=0, unvalidated=0):
        """Ends the run with --resume, or begins it where there is none. Returns what was wrong before or after."""
        before = self.damage(out)
        newest = max(checkpoints(out), default=0)
        if before: return f"before --resume: {before}"
        if newest < at_least:
            return f"{out}: the newest checkpoint is of step {newest}, that of {at_least} was announced"
        done = self.world.run(out, steps, "--resume")
        if done.code == 2 and newest == 0: done = self.world.run(out, steps, *self.start)    # there was no run yet
        if done.code != 0: return f"--resume from step {newest}: {said(done)}"
        return self.difference(out, steps, unvalidated=unvalidated)


def wait_for(condition, process):
    """Until it holds, or the process has ended."""
    while not condition() and process.poll() is None: time.sleep(0.0005)


# ---- 1, 2: killed, and stopped by signals

def checkpoint_there(out):
    with contextlib.suppress(FileNotFoundError): return any(name.startswith("step_") for name in os.listdir(out))
    return False


def moments(world, name, count, start):
    """Draws (random numbers, delay, whether it counts from the first checkpoint on) over all of a run's time."""
    times = []
    for _ in range(3):
        out = os.path.join(world.place(), "out")
        began = time.monotonic()
        process = start(out)
        wait_for(lambda: checkpoint_there(out), process)
        there = time.monotonic()
        process.communicate()
        times.append((time.monotonic() - began, time.monotonic() - there))
    whole, training = (sorted(column)[1] for column in zip(*times))
    drawn = []
    for index in range(count):
        draw = random.Random(f"{world.seed} {name} {index}")
        late = index % 3 > 0        # starting takes longer than training here
        drawn.append((draw, draw.uniform(0, 1.1 * (training if late else whole)), late))
    return drawn


def wait_moment(process, out, delay, late):
    if late: wait_for(lambda: checkpoint_there(out), process)
    time.sleep(delay)


def stage(out, steps):
    """Where a run stood, for the summary."""
    if not os.path.exists(os.path.join(out, "log.jsonl")): return "before there was a log"
    if not checkpoints(out): return "before the first checkpoint"
    return "after the last step" if logged(out) >= steps else "between"


def summary(stages):
    order = ("before there was a log", "before the first checkpoint", "between", "after the last step")
    return ", ".join(f"{stages.count(name)} {name}" for name in order if name in stages)


def test_kills(world, plain, count):
    """kill -9"""
    def kill(moment):
        _, delay, late = moment
        out = os.path.join(world.place(), "out")
        process = world.start(out, LONG)
        wait_moment(process, out, delay, late)
        process.kill()
        process.communicate()
        where = stage(out, LONG)
        problem = plain.go_on(out, LONG)
        shutil.rmtree(os.path.dirname(out))
        return where, problem
    where, problems = zip(*world.each(kill, moments(world, "kill", count, lambda out: world.start(out, LONG))))
    claim(f"killed at {count} moments ({summary(where)}), a run goes on with the same bits", problems)


def one_signal(world, plain, moment, number):
    """(stage, problem) of a run that gets a signal; SIGPIPE: by a reader that leaves."""
    draw, delay, late = moment
    out = os.path.join(world.place(), "out")
    twice = number in (signal.SIGINT, signal.SIGTERM) and draw.random() < 0.1
    process = world.start(out, LONG, stdout=subprocess.PIPE if number == signal.SIGPIPE else subprocess.DEVNULL)
    wait_moment(process, out, delay, late)
    if number == signal.SIGPIPE:
        process.stdout.close()
        process.stdout = None
    else:
        process.send_signal(number)
    if twice:
        time.sleep(draw.uniform(0, 0.003))
        process.send_signal(number)
    done = finish(process)
    where, last = stage(out, LONG), logged(out)
    problem = ""
    if done.code == -number:    # before training began, or by the second one
        if last > 0 and not twice: problem = f"{number.name} ended a run after step {last} by itself"
    elif done.code != 0 or done.err: problem = f"{number.name}: {said(done)}"
    else: problem = last_is_kept(out)
    problem = problem or plain.go_on(out, LONG)
    shutil.rmtree(os.path.dirname(out))
    return where, problem


def test_signals(world, plain, count):
    """Signals"""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]
    for number in numbers:
        drawn = moments(world, number.name, count // len(numbers), lambda out: world.start(out, LONG))
        where, problems = zip(*world.each(lambda moment: one_signal(world, plain, moment, number), drawn))
        claim(f"{'a reader that leaves' if number == signal.SIGPIPE else number.name}, at {len(drawn)} moments "
              f"({summary(where)}): exit 0 and a checkpoint of the last step, the same bits with --resume", problems)


# ---- 3: two at once

def stopped(process):
    """Waits until it has stopped itself; False: it has ended."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status): return True
    process.returncode = os.waitstatus_to_exitcode(status)
    return False


def test_two_at_once(world, plain, count):
    """Two runs with one --out"""
    def second(index):
        draw = random.Random(f"{world.seed} two {index}")
        out = os.path.join(world.place(), "out")
        first = world.start(out, SHORT, at=f"any:{draw.randint(2, 100)}:stop")
        if not stopped(first): return f"the first ended: {said(finish(first))}"
        before = crash.image(crash.from_disk(out)) if os.path.isdir(out) else None
        others = [world.run(out, SHORT, *more) for more in ((), ("--resume",))]
        after = crash.image(crash.from_disk(out)) if os.path.isdir(out) else None
        first.send_signal(signal.SIGCONT)
        done = finish(first)
        problems = [complaint(other, out) for other in others]
        problems += [f"exit {other.code}, expected 2" for other in others if other.code != 2]
        if before != after: problems.append("the second changed files of the first")
        if done.code != 0: problems.append(f"the first: {said(done)}")
        return next(filter(None, problems), "") or plain.difference(out, SHORT)
    moments = max(5, count // 10)
    claim(f"at {moments} moments of a run, a second one and --resume are refused and change nothing; the first has the "
          "same bits", world.each(second, range(moments)))

    def together(more):
        out = os.path.join(world.place(), "out")
        if more: world.run(out, EVERY)
        both = [finish(process) for process in [world.start(out, SHORT, *more) for _ in range(3)]]
        # With --resume one that comes when another is done finds nothing left to do.
        codes = [done.code for done in both]
        if not set(codes) <= {0, 2} or not (codes.count(0) == 1 or (more and 0 in codes)):
            return f"exits {[said(done) for done in both]}"
        return plain.difference(out, SHORT)
    claim("of three that start at once one goes on, without --resume and with it; the same bits",
          world.each(together, [(), ("--resume",)] * max(2, count // 40)))


# ---- 4: calls that fail

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink")
ERRORS = {"open": [errno.EACCES, errno.ENOSPC, errno.EMFILE], "write": [errno.ENOSPC, errno.EIO],
          "fsync": [errno.EIO, errno.ENOSPC], "rename": [errno.EIO, errno.EACCES],
          "mkdir": [errno.ENOSPC, errno.EACCES], "unlink": [errno.EIO, errno.EACCES]}


def announced(calls, out):
    """The step of the newest checkpoint that a run has come past: it has logged a later step, so it said so."""
    newest, step = 0, 0
    for call, words, data in calls:
        if call == "rename" and words[1].startswith(out + "/step_"): newest = max(newest, int(words[1][-6:]))
        line = data.decode(errors="replace") if call == "write" and words[0] == out + "/log.jsonl" else ""
        if line.startswith('{"step":') and line.endswith("}\n") and json.loads(line)["step"] > newest: step = newest
    return step


class Scenario:
    """A run that calls are to fail in. prepare(out) makes what was there before."""
    def __init__(self, world, name, reference, steps, resume, prepare):
        self.world, self.name, self.reference = world, name, reference
        self.steps, self.more, self.prepare = steps, ("--resume",) if resume else reference.start, prepare
        place = self.place()
        self.out, trace = os.path.join(place, "out"), place + ".trace"
        self.before = crash.from_disk(place)
        done = world.run(self.out, steps, *self.more, trace=trace)
        if done.code != 0: sys.exit(f"{name}: {said(done)}")
        self.calls, self.after = crash.read_trace(trace), crash.from_disk(place)
        self.count = collections.Counter(call for call, _, _ in self.calls)
        self.count["any"] = len(self.calls)

    def first_of(self, name):
        """The number of the first call for a file of this name."""
        return 1 + next(n for n, (call, words, _) in enumerate(self.calls) if words[0].endswith("/" + name))

    def place(self):
        place = self.world.place()
        self.prepare(os.path.join(place, "out"))
        return place

    def failing(self, at):
        """The run with one fault; what was wrong with its end, with what it left, and with going on."""
        place = self.place()
        out, trace, what = os.path.join(place, "out"), place + ".trace", at.split(":")[2]
        before = max(checkpoints(out), default=0)
        done = self.world.run(out, self.steps, *self.more, at=at, trace=trace)
        calls = crash.read_trace(trace)
        fired = [words for call, words, _ in calls if call == "fault"]
        number = errno.ENOSPC if what == "full" else int(what.strip("+")) if what[0].isdigit() else 0
        problem = "" if fired else "was not reached"
        if number: problem = problem or complaint(done, place, os.strerror(number))
        elif done.code != 0: problem = problem or said(done)
        # Where a line could not be written, the step is kept at once, without a validation that was due.
        kept_at_once = logged(out) if fired and fired[0] == ["write", out + "/log.jsonl"] else 0
        problem = problem or self.reference.go_on(out, self.steps, max(before, announced(calls, out)), kept_at_once)
        shutil.rmtree(place)
        return f"{at}: {problem}" if problem else ""


def scenarios(world, plain):
    other = Undisturbed(world, SHORT, "--from", os.path.join(plain.out, f"step_{LONG:06d}"))
    def interrupted(at, *more):
        """What a run has left that was killed before a call, as a function that puts it somewhere."""
        out = os.path.join(world.place(), "out")
        world.run(out, SHORT, *more, at=at + ":kill")
        return lambda to: shutil.copytree(out, to)
    unnamed = interrupted(f"rename:{1 + SHORT // EVERY}")   # the last checkpoint: it is whole, but has no name yet
    early = interrupted("open:4", *other.start)             # in the first checkpoint
    return [Scenario(world, "a new run", plain, SHORT, False, lambda out: None),
            Scenario(world, "--resume", plain, SHORT, True, unnamed),
            Scenario(world, "--from", other, EVERY, False, lambda out: None),
            Scenario(world, "--resume, no checkpoint after --from", other, EVERY, True, early)]


def test_failing_calls(world, plain, count, ways):
    """Calls that fail"""
    share = max(1, 200 // count)    # --quick: each tenth
    for way in ways:
        for call in CALLS:
            numbers = range(1, way.count[call] + 1)[::share]
            faults = [f"{call}:{n}:{ERRORS[call][n // share % len(ERRORS[call])]}" for n in numbers]
            claim(f"{way.name}: each of {len(faults)} {call} fails by itself: a message, whole checkpoints, the same "
                  "bits", world.each(way.failing, faults))
    for way in ways[:2]:
        numbers = range(1, way.count["any"] + 1)[::share * 3]
        claim(f"{way.name}: from each of {len(numbers)} calls on nothing can be written any more",
              world.each(way.failing, [f"any:{n}:{errno.EROFS}+" for n in numbers]))
    numbers = range(1, ways[0].count["write"] + 1)[::share * 2]
    claim(f"{ways[0].name}: the disk is full in the midst of each of {len(numbers)} writes",
          world.each(ways[0].failing, [f"write:{n}:full" for n in numbers]))
    claim("writes that write half of what they should are gone on with", [ways[0].failing("write:1:half+")])


# ---- 5: folders and files that change under a run

def disturb(world, at, change, mend, **popen):
    """A short run that is stopped before a call, while change(out) happens; afterwards mend(out). Returns its folder
    and how it ended."""
    place = world.place()
    os.chmod(place, 0o777)      # the run may be another user's
    out = os.path.join(place, "out")
    process = world.start(out, SHORT, at=at + ":stop", **popen)
    if not stopped(process): return out, finish(process)
    change(out)
    process.send_signal(signal.SIGCONT)
    done = finish(process)
    mend(out)
    return out, done


def set_modes(out, mode):
    for folder, _, _ in os.walk(out): os.chmod(folder, mode)


def test_folders(world, plain, ways):
    """Folders"""
    first = ways[0].first_of("unfinished_step_000006")
    moments = {"before a checkpoint": f"any:{first}", "in the midst of one": f"any:{first + 20}"}
    nothing = lambda out: None
    moved = lambda out: os.rename(out, out + "-moved")
    def back(out):
        if os.path.isdir(out): shutil.rmtree(out)
        elif os.path.exists(out): os.remove(out)
        os.rename(out + "-moved", out)
    def file_instead(out):
        moved(out)
        with open(out, "w") as file: file.write("a file")
    for when, at in moments.items():
        for what, change in (("moved away", moved), ("replaced by a file", file_instead)):
            out, done = disturb(world, at, change, back)
            claim(f"--out is {what} {when}: a message; put back, it goes on with the same bits",
                  [complaint(done, out) or plain.go_on(out, SHORT, EVERY)])
        out, done = disturb(world, at, shutil.rmtree, nothing)
        claim(f"--out is removed {when}: a message; --resume finds no run", [
            complaint(done, out), complaint(world.run(out, SHORT, "--resume"), out, "no run")])
        try:
            out, done = disturb(world, at, lambda out: set_modes(out, 0o555), lambda out: set_modes(out, 0o755),
                                **({"user": NOBODY, "group": NOBODY} if os.getuid() == 0 else {}))
            claim(f"--out is made read-only {when}: a message; writable again, it goes on with the same bits",
                  [complaint(done, out, os.strerror(errno.EACCES)) or plain.go_on(out, SHORT, EVERY)])
        except (PermissionError, subprocess.SubprocessError) as error:     # no such user may be run as here
            skipped(f"--out is made read-only {when}", error)
    out, done = disturb(world, moments["before a checkpoint"], lambda out: os.remove(out + "/log.jsonl"), nothing)
    problem = said(done) if done.code != 0 else plain.difference(out, SHORT, log=False)
    claim("log.jsonl is removed under a run: checkpoints have the same bits", [problem])


SHARD_TOKENS = 20000


def write_shard(path, draw):
    tokens = [draw.randrange(200) for _ in range(SHARD_TOKENS)]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        file.write(struct.pack(f"<{len(tokens)}H", *tokens))


def test_data(world, plain, ways):
    """Data"""
    at = f"any:{ways[0].first_of('unfinished_step_000006') - 3}"    # in step 5
    whole = world.data + ".whole"
    shutil.copy(world.data, whole)

    def of_data(change, mend):
        """disturb with data of its own, beside the run"""
        place = world.place()
        out, data = os.path.join(place, "out"), os.path.join(place, "data.txt")
        shutil.copy(whole, data)
        process = world.start(out, SHORT, "--data", data, at=at + ":stop")
        if not stopped(process): return out, data, Done("was not stopped", "")
        change(data)
        process.send_signal(signal.SIGCONT)
        done = finish(process)
        mend(data)
        return out, data, done
    restore = lambda data: shutil.copy(whole, data)
    def replace(data):
        with open(data + ".new", "w") as file: file.write("other text " * 4000)
        os.rename(data + ".new", data)
    for what, change in (("removed", os.remove), ("replaced by another file", replace)):
        out, data, done = of_data(change, restore)
        claim(f"the data is {what} under a run: it goes on with what it has, the same bits",
              [said(done) if done.code != 0 else plain.difference(out, SHORT)])
    for size in (0, 4096, 10000):
        out, data, done = of_data(lambda path: os.truncate(path, size), restore)
        claim(f"the data is cut to {size} bytes under a run: a message that names it, a checkpoint of the last step; "
              "with the data back, the same bits",
              [complaint(done, data), last_is_kept(out), plain.go_on(out, SHORT, EVERY, logged(out))])
    test_shard(world, at)


def last_is_kept(out):
    newest, last = max(checkpoints(out), default=0), logged(out)
    return "" if newest == last else f"{out}: the newest checkpoint is of step {newest}, the run ended after {last}"


def test_shard(world, at):
    place = world.place()
    out, shard = os.path.join(place, "out"), os.path.join(place, "shard.bin")
    write_shard(shard, random.Random(world.seed))
    start = ("--data", shard, "--vocab", "256")
    plain = Undisturbed(world, SHORT, *start)
    shutil.copy(shard, shard + ".whole")
    process = world.start(out, SHORT, *start, at=at + ":stop")
    problem = "" if stopped(process) else "was not stopped"
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 2 * SHARD_TOKENS)
    process.send_signal(signal.SIGCONT)
    done = finish(process)
    shutil.copy(shard + ".whole", shard)
    problem = problem or complaint(done, shard, "65535") or plain.damage(out)
    problem, last = problem or last_is_kept(out), logged(out)
    resumed = world.run(out, SHORT, *start, "--resume")
    claim("tokens outside the vocabulary appear in a shard under a run: a message that names it, a checkpoint of the "
          "last step; with the shard back, the same bits",
          [problem or (said(resumed) if resumed.code != 0 else plain.difference(out, SHORT, unvalidated=last))])


def test_limits(world, plain):
    """What a shell or a system sets"""
    out = os.path.join(world.place(), "out")
    limit = lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_DFL),
                     resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)))
    done = world.run(out, SHORT, preexec_fn=limit)
    claim("files may not be larger than the optimizer's (ulimit -f): a message; without the limit, the same bits",
          [complaint(done, out, os.strerror(errno.EFBIG)) or plain.go_on(out, SHORT)])
    out = os.path.join(world.place(), "out")
    with open("/dev/full", "w") as full: done = world.run(out, SHORT, stdout=full)
    claim("output goes to a full disk: the run goes on to its end, the same bits, and then says so",
          [complaint(done, "standard output: writing failed") or plain.difference(out, SHORT)])
    for closed in ((1,), (0, 1, 2)):
        out = os.path.join(world.place(), "out")
        done = world.run(out, SHORT, preexec_fn=lambda: [os.close(file) for file in closed])
        claim(f"begun without the files {closed} (>&-): nothing that is printed gets into other files, the same bits",
              [said(done) if done.code != 0 else plain.difference(out, SHORT)])
    test_small_disk(world, plain)


def test_small_disk(world, plain):
    disk = world.place()
    mount = lambda options: subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True)
    if os.getuid() != 0 or mount("size=250k").returncode != 0:
        return skipped("a disk that is really full", "needs the right to mount")
    try:
        out = os.path.join(disk, "out")
        done = world.run(out, SHORT)
        problem = complaint(done, out, os.strerror(errno.ENOSPC)) or plain.damage(out)
        again = world.run(out, SHORT, "--resume")
        problem = problem or complaint(again, out, os.strerror(errno.ENOSPC))
        mount("remount,size=4m")
        claim("a disk that is really full: a message, of --resume too; with more room, the same bits",
              [problem or plain.go_on(out, SHORT, EVERY)])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- 6: a power cut

VARIANTS = {"nothing that was not synced survives": (crash.DROPPED, crash.DROPPED),
            "names survive, what is in new files does not": (crash.KEPT, crash.DROPPED),
            "names and lengths survive, in files are zeros": (crash.KEPT, crash.ZEROS),
            "killed, with power: everything survives": (crash.KEPT, crash.KEPT)}
DRAWS = 4       # of each file's and each folder's state, at each moment


def cuts(way, seed):
    """image -> (variant, tree, the newest checkpoint that was announced), over all moments of a run."""
    found = {}
    draw = random.Random(f"{seed} power {way.name}")
    replay = crash.Replay(os.path.dirname(way.out), copy_tree(way.before))
    for moment in range(len(way.calls) + 1):
        if moment > 0:
            call, words, data = way.calls[moment - 1]
            replay.apply(call, *words, data=data)
        last = moment == len(way.calls)
        step = way.steps if last else announced(way.calls[:moment], way.out)
        images = [(name, crash.image(replay.tree, *kind)) for name, kind in VARIANTS.items()]
        images += [("each file and folder at some moment since its sync", crash.image(replay.tree, draw=draw.choice))
                   for _ in range(DRAWS)]
        for name, image in images:
            key = repr(image)
            if key not in found or found[key][2] < step: found[key] = (found.get(key, (name,))[0], image, step)
    same = crash.image(replay.tree) == crash.image(way.after)
    claim(f"power, {way.name}: what {len(way.calls)} calls should have left is what is there",
          ["" if same else "differs"])
    return found.values()


def copy_tree(tree):
    if isinstance(tree, crash.Folder):
        entries = {name: copy_tree(entry) for name, entry in tree.content.items()}
        return crash.Folder(entries, entries)
    return crash.File(tree.content, tree.content)


def test_power(world, plain, count, ways):
    """A power cut"""
    share = max(1, 200 // count)
    for way in ways[:3]:    # the fourth does what the third does
        def go_on(state, reference=way.reference):
            _, image, step = state
            place = world.place()
            crash.write_image(place, image)
            problem = reference.go_on(os.path.join(place, "out"), way.steps, step)
            shutil.rmtree(place)
            return problem
        by_variant = collections.defaultdict(list)
        for state in cuts(way, world.seed): by_variant[state[0]].append(state)
        for name, states in by_variant.items():
            states = states[::min(share, 1 + len(states) // 5)]
            claim(f"power, {way.name}: {name}: from {len(states)} states the same bits", world.each(go_on, states))


# ---- main

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help="kills, signals, two, calls, folders, data, limits, power (default: all)")
    parser.add_argument("--program", default=os.path.join(ROOT, "train_gpt"), help="train_gpt, built for a CPU")
    parser.add_argument("--preload", default=os.path.join(ROOT, "build", "faults", "failing.so"))
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    parser.add_argument("--moments", type=int, default=200, metavar="N", help="of each kind (default 200)")
    parser.add_argument("--quick", action="store_true", help="20 moments, and each tenth of the calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="runs at a time (default: as many as there are cores)")
    parser.add_argument("--folder", help="for everything; default: a temporary one in memory, where there is one")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)    # which runs inherit: under nohup they would ignore it
    started = time.monotonic()
    count = 20 if options.quick else options.moments
    tests = {"kills": lambda: test_kills(world, plain, count),
             "signals": lambda: test_signals(world, plain, count),
             "two": lambda: test_two_at_once(world, plain, count),
             "calls": lambda: test_failing_calls(world, plain, count, ways()),
             "folders": lambda: test_folders(world, plain, ways()),
             "data": lambda: test_data(world, plain, ways()),
             "limits": lambda: test_limits(world, plain),
             "power": lambda: test_power(world, plain, count, ways())}
    for part in options.parts:
        if part not in tests: parser.error(f"no part is called {part}; there are: {', '.join(tests)}")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpt-faults-", dir=options.folder or memory) as folder:
        os.chmod(folder, 0o755)
        world = World(options, folder)
        print(f"seed {options.seed}, {count} moments, {options.jobs} runs at a time, in {folder}", flush=True)
        plain = Undisturbed(world, LONG)
        ways = functools.lru_cache(lambda: scenarios(world, plain))
        for name in options.parts or tests:
            began = time.monotonic()
            tests[name]()
            print(f"        {name}: {time.monotonic() - began:.0f} s", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of a core")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

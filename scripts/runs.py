"""Reads the log.jsonl of finished and running runs, for plot.py and board.py."""
import json
import math
import os
import time

from tokens import fail

# The numbers of a step that are read, and their names in TensorBoard and Weights & Biases
TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "hellaswag": "hellaswag/acc_norm",
        "norm": "optimizer/norm", "lr": "optimizer/lr", "ms": "speed/ms", "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu", "hfu": "speed/hfu", "batch": "optimizer/batch", "noise_scale": "optimizer/noise_scale"}


class Run:
    """A run's log. `record`: the object in the first line, with options, model, device, ...; `steps`:
    {step: {name: number}} in order of steps; `end`: "complete", "signal", "error", or None during the run and after
    the program was killed."""

    def __init__(self, folder, record, steps, end):
        self.folder, self.record, self.steps, self.end = folder, record, steps, end
        self.name = os.path.basename(os.path.abspath(folder))
        self.last = max(steps, default=0)
        options = record.get("options", {})
        self.planned = 0 if options.get("tokens") or options.get("minutes") else options.get("steps", 0)   # 0: unknown

    def series(self, name):
        """Returns {step: value} of the steps that logged this number."""
        return {step: numbers[name] for step, numbers in self.steps.items() if name in numbers}

    def progress(self):
        """Returns {step: (tokens seen, seconds of training)}. A step that was not logged counts as much as the next
        logged one."""
        at, tokens, seconds, before = {0: (0, 0.0)}, 0, 0.0, 0
        for step, numbers in self.steps.items():
            if "ms" in numbers and "tokens_per_s" in numbers:
                tokens += (step - before) * round(numbers["tokens_per_s"] * numbers["ms"] / 1000)
                seconds += (step - before) * numbers["ms"] / 1000
                before = step
            at[step] = (tokens, seconds)
        return at

    def flops_per_token(self):
        return self.record.get("flops_per_token", {}).get("model")


def read_run(folder):
    """Returns the run in `folder` as far as it is logged. Text after the last newline is ignored: that line is still
    being written. If the step number goes back, the run resumed from a checkpoint, and the later steps that were logged
    before are dropped. A loss of null is NaN."""
    path = os.path.join(folder, "log.jsonl")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except OSError as error:
        fail(f"{path}: {error.strerror}; expected the log of a run (its --out folder)")
    record, steps, last, end = {}, {}, 0, None
    for number, line in enumerate(lines, 1):
        try:
            entry = dict(json.loads(line))
            record, end = entry.get("run", record), entry.get("end")    # steps may follow an end: the run resumed
            if "step" not in entry:
                continue
            step = int(entry["step"])
            if "loss" in entry:
                if step <= last:
                    steps = {s: numbers for s, numbers in steps.items() if s < step}
                last = step
            for name in entry.keys() & TAGS.keys():
                steps.setdefault(step, {})[name] = math.nan if entry[name] is None else float(entry[name])
        except (ValueError, TypeError):
            fail(f"{path} line {number}: found {line[:60]!r}, expected a step as JSON")
    return Run(folder, record, steps, end)


def summary(run):
    """Returns one line with the run's name, step and latest numbers."""
    parts = [f"{run.name}: step {run.last:,}" + (f" of {run.planned:,}" if run.planned >= run.last else "")]
    for name, form in (("loss", "loss {:.4f}"), ("val_loss", "validation {:.4f}"), ("hellaswag", "HellaSwag {:.4f}"),
                       ("tokens_per_s", "{:,.0f} tokens/s")):
        if values := run.series(name):
            parts.append(form.format([*values.values()][-1]))
    return ", ".join(parts)


def stamp(folder):
    """Returns a value that changes whenever the log changes; None if the folder has no log yet."""
    try:
        found = os.stat(os.path.join(folder, "log.jsonl"))
        return found.st_ino, found.st_size, found.st_mtime_ns
    except OSError:
        return None


def all_ended(runs, options):
    """Returns whether every run of the command line has logged its end."""
    return len(runs) == len(options.runs) and all(run.end for run in runs)


def follow(options):
    """Yields the list of runs once. With --watch, yields the runs that have logged a step whenever a log changes, until
    all runs have logged their end. A run that was killed has no end, because it can resume."""
    if not options.watch:
        runs = [read_run(folder) for folder in options.runs]
        for run in runs:
            if not run.steps:
                fail(f"{run.folder}/log.jsonl: found no step, expected at least one")
        yield runs
        return
    seen, runs = None, []
    while not all_ended(runs, options):
        now = [stamp(folder) for folder in options.runs]
        if now == seen:
            time.sleep(options.every)
            continue
        seen, runs = now, [read_run(folder) for folder, found in zip(options.runs, now) if found]
        if any(run.steps for run in runs):
            yield [run for run in runs if run.steps]


def parse_arguments(parser):
    """Parses the command line, after adding the options that plot.py and board.py share."""
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER", help="a run's --out folder, holding log.jsonl")
    parser.add_argument("--watch", action="store_true", help="update the output until all runs have ended")
    parser.add_argument("--every", type=float, metavar="SECONDS",
                        help="with --watch: time between updates (default: 10)")
    options = parser.parse_args()
    if options.every is not None and not (options.watch and options.every > 0):
        parser.error(f"--every {options.every:g}: expected more than 0 seconds, together with --watch")
    options.every = options.every or 10
    return options

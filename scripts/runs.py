"""Reads a run's log.jsonl, for plot.py and board.py. A run may still be in progress."""
import json
import math
import os
import sys

NUMBERS = ("loss", "val_loss", "hellaswag", "norm", "lr", "ms", "tokens_per_s", "mfu", "hfu")


class Mistake(Exception):
    """The user's; the message names the file or package, what was found and what was expected."""


class Run:
    """`record`: what the run began with (options, model, ...); `steps`: {step: {name: number}}, in order."""

    def __init__(self, folder, record, steps):
        self.folder, self.record, self.steps = folder, record, steps
        self.name = os.path.basename(os.path.abspath(folder))

    def last(self):
        return max(self.steps, default=0)

    def ended(self):
        return 0 < self.record.get("options", {}).get("steps", 0) <= self.last()

    def series(self, name):
        """{step: value}"""
        return {step: numbers[name] for step, numbers in self.steps.items() if name in numbers}

    def progress(self):
        """{step: (tokens seen, seconds of training)}. Steps that were not logged count as the next that was."""
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
    """A run of whatever its log holds by now; Mistake where that is no log.

    A last line without its end is still being written. Where the steps go back, the run went on from a checkpoint:
    what the log has of later steps is no longer so. JSON has no NaN: null stands for it.
    """
    path = os.path.join(folder, "log.jsonl")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}; expected the log of a run (its --out folder)") from None

    record, steps, last = {}, {}, 0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError
            if "run" in entry:
                record = entry["run"]
            if "step" not in entry:
                continue
            step = int(entry["step"])
            if "loss" in entry:
                if step <= last:
                    steps = {s: numbers for s, numbers in steps.items() if s < step}
                last = step
            for name in entry.keys() & set(NUMBERS):
                value = math.nan if entry[name] is None else float(entry[name])
                steps.setdefault(step, {})[name] = value
        except (ValueError, TypeError):
            raise Mistake(f"{path} line {number}: found {line[:60]!r}, expected a step as JSON") from None
    return Run(folder, record, steps)


def stamp(folder):
    """Changes whenever the log does, also when it is written anew."""
    try:
        found = os.stat(os.path.join(folder, "log.jsonl"))
        return found.st_ino, found.st_size, found.st_mtime_ns
    except OSError:
        return None


def add_watch_flags(parser, watch):
    """Parses the command line with the options that plot.py and board.py share; `watch` is the help of --watch."""
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER", help="a run's --out folder, holding log.jsonl")
    parser.add_argument("--watch", action="store_true", help=watch)
    parser.add_argument("--every", type=float, metavar="SECONDS", help="with --watch: how often to look (default: 10)")
    options = parser.parse_args()
    if options.every is not None and not (options.watch and options.every > 0):
        parser.error("--every takes seconds, more than 0, and goes with --watch")
    options.every = options.every or 10
    return options


def main_with(name, main):
    """Calls main(); a Mistake becomes one line and exit status 2."""
    try:
        main()
    except Mistake as mistake:
        print(f"{name}: {mistake}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

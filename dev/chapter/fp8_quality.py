#!/usr/bin/env python3
"""Trains in BF16 and FP8 with several seeds and collects the validation losses in one file: part 11 of make chapter.

    python3 dev/chapter/fp8_quality.py --train-gpt build/gpu-bf16/train_gpt --out runs/fp8_quality

Each finished run is a file in --out, and later calls skip it: the script can be stopped at any time, and stops by
itself after --minutes. At its end it writes all finished runs to --collect.
"""
import argparse
import json
import os
import re
import sys
import tempfile
import textwrap
import time

sys.dont_write_bytecode = True
from measure import Failed, Mistake, Trainer

REFERENCE, AGAIN = "bf16", "bf16 again"
# AGAIN differs from REFERENCE only in the order of a step's sums: it measures the effect of rounding alone.
FORMATS = {REFERENCE: {"matmul": "plain"},
           AGAIN: {"matmul": "plain", "micro_batch": 4, "total_batch": 1024},
           "fp8, delayed": {"matmul": "fp8", "fp8_scaling": "delayed"},
           "fp8, current": {"matmul": "fp8", "fp8_scaling": "current"},
           "fp8-all": {"matmul": "fp8-all"}}
# Ten million parameters, bytes as tokens; make run's schedule with a lower learning rate for a model 3 times as wide.
OPTIONS = {"layers": 6, "heads": 6, "channels": 384, "context": 128, "micro_batch": 8, "steps": 1500, "eval_every": 100,
           "lr": 1e-3, "min_lr": 1e-4, "warmup": 50, "beta2": 0.99, "eval_sequences": 0, "checkpoint_every": 0}


def run(trainer, data, options):
    """The record of one run: validation losses, and why it stopped early, if it did."""
    began = time.monotonic()
    (first, *records), _, stopped = trainer.log_of(data, options, may_stop=True)
    losses = [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]
    if not stopped and (not losses or losses[-1][0] != options["steps"]):
        raise Failed(f"{trainer.name}: found no validation loss of step {options['steps']} in its log, expected one")
    return {"stopped": stopped, "seconds": round(time.monotonic() - began), "device": first["run"]["device"],
            "precision": first["run"]["precision"], "parameters": first["run"]["model"]["parameters"],
            "losses": [round(loss, 5) for _, loss in losses]}


def done_run(path, options):
    """The record that an earlier call wrote, or None."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        theirs = record["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{path}: {error!r}; expected an earlier run's record: remove it to repeat the run") from None
    if theirs != options:
        raise Mistake(f"{path}: found a run with {theirs}, expected {options}: name another --out")
    return record


def write(path, text):
    """Writes a temporary file and renames it: a file at `path` is always complete."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(path + ".new", path)


def wrapped(items):
    """JSON texts separated by commas, in lines of at most 120 columns that break between items only."""
    text = ", ".join(item.replace(" ", "\0") for item in items)
    return textwrap.fill(text, 107, break_on_hyphens=False, subsequent_indent="  ").replace("\0", " ")


def wrapped_object(record):
    return "{" + wrapped(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()) + "}"


def collected(records, options):
    """All runs as JSON text: what they have in common, then three lines for each run."""
    about = {"device": ", ".join(sorted({record["device"] for record in records})),
             "precision": records[0]["precision"], "parameters": records[0]["parameters"],
             "date": time.strftime("%Y-%m-%d"), "seconds": sum(record["seconds"] for record in records)}
    runs = [wrapped_object({name: record[name] for name in ("format", "seed", "seconds", "stopped")})[:-1]
            + ', "losses":\n  [' + wrapped(map(str, record["losses"])) + "]}" for record in records]
    return (f'{{"about": {wrapped_object(about)},\n"options": {wrapped_object(options)},\n"runs": [\n'
            + ",\n".join(runs) + "\n]}")


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="built with PRECISION=bf16 (default: %(default)s)")
    parser.add_argument("--data", default="data/shakespeare.txt", metavar="FILE", help="text (default: %(default)s)")
    parser.add_argument("--out", default="runs/fp8_quality", metavar="FOLDER",
                        help="gets a file for each run (default: %(default)s)")
    parser.add_argument("--collect", default=os.path.join(here, "fp8_quality.json"), metavar="FILE",
                        help="gets all finished runs (default: dev/chapter/fp8_quality.json)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT",
                        help="of " + "; ".join(FORMATS) + " (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, help="start no further run after this time")
    for name in ("steps", "lr", "layers", "channels"):
        parser.add_argument(f"--{name}", type=type(OPTIONS[name]), default=OPTIONS[name], help="(default: %(default)s)")
    o = parser.parse_args()

    began, records = time.monotonic(), []
    common = {**OPTIONS, "steps": o.steps, "lr": o.lr, "layers": o.layers, "channels": o.channels}
    os.makedirs(o.out, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fp8_quality_") as folder:
        trainer = Trainer(o.train_gpt, folder, o.train_gpt)
        # All formats of one seed, then the next seed: the finished runs can be compared wherever the script stops.
        for seed, name in ((seed, name) for seed in o.seeds for name in o.formats):
            options = {**common, "seed": seed, **FORMATS[name]}
            path = os.path.join(o.out, f"{re.sub('[^a-z0-9]+', '-', name)}-seed{seed}.json")
            record = done_run(path, options)
            if record is None and o.minutes is not None and time.monotonic() - began > 60 * o.minutes:
                continue
            if record is None:
                print(f"fp8_quality: {name}, seed {seed} ... ({time.monotonic() - began:.0f} s)", file=sys.stderr)
                record = {"format": name, "seed": seed, "options": options, **run(trainer, o.data, options)}
                write(path, json.dumps(record, indent=1))
            records.append(record)
    if not records:
        raise Failed("no run was done: --minutes is too short")
    write(o.collect, collected(records, common))
    print(o.collect)


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"fp8_quality: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

#!/usr/bin/env python3
"""Whole runs in BF16 and FP8, several seeds of each, and their validation losses in one file: part 11 of make chapter.

    python3 dev/chapter/fp8_quality.py --train-gpt build/gpu-bf16/train_gpt --out runs/fp8_quality

Each run that is done is a file in --out. Called again the script does those that are not; so it may be stopped at any
time, and given --minutes it stops by itself. Whenever it ends, what there is goes to --collect.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from measure import Failed, Mistake, flags, require_program

REFERENCE, AGAIN = "bf16", "bf16 again"
# AGAIN is the same mathematics with a step's sums in another order: how far runs part that differ by nothing else.
FORMATS = {REFERENCE: {"matmul": "plain"},
           AGAIN: {"matmul": "plain", "micro_batch": 4, "total_batch": 1024},
           "fp8, delayed": {"matmul": "fp8", "fp8_scaling": "delayed"},
           "fp8, current": {"matmul": "fp8", "fp8_scaling": "current"},
           "fp8-all": {"matmul": "fp8-all"}}
# Ten million parameters, on bytes. The schedule is make run's, with a lower peak: the model is three times as wide.
OPTIONS = {"layers": 6, "heads": 6, "channels": 384, "context": 128, "micro_batch": 8, "steps": 1500, "eval_every": 100,
           "lr": 1e-3, "min_lr": 1e-4, "warmup": 50, "beta2": 0.99, "eval_sequences": 0, "checkpoint_every": 0}


def log_of(folder):
    with open(os.path.join(folder, "log.jsonl"), encoding="utf-8") as log:
        return [json.loads(line) for line in log]


def run(program, data, options, steps):
    """A run's record: its curve of validation losses, and in words why it stopped before its end, if it did."""
    with tempfile.TemporaryDirectory(prefix="fp8_quality_") as folder:
        out, began = os.path.join(folder, "run"), time.monotonic()
        done = subprocess.run([program, "train", "--data", data, *flags(options), "--out", out],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        said = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1].removeprefix("train_gpt: ")
        # A loss that is not finite is a result; whatever else ends a run is not.
        if done.returncode != 0 and not re.match(r"step \d+: ", said):
            raise Failed(f"exit code {done.returncode} from {program}: {said}", said)
        first, *records = log_of(out)
        curve = [[record["step"], record["val_loss"]] for record in records if "val_loss" in record]
        made = first["run"]
        if done.returncode == 0 and (not curve or curve[-1][0] != steps):
            raise Failed(f"{program}: found no validation loss of step {steps} in its log, expected one")
        return {"curve": curve, "final": curve[-1][1] if curve and done.returncode == 0 else None,
                "stopped": said if done.returncode != 0 else None, "seconds": time.monotonic() - began,
                "device": made["device"], "precision": made["precision"], "parameters": made["model"]["parameters"]}


def file_of(out, name, seed):
    return os.path.join(out, f"{re.sub('[^a-z0-9]+', '-', name)}-seed{seed}.json")


def done_run(path, options):
    """What an earlier call has left, or None."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        theirs = record["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{path}: {error!r}; expected what an earlier call has written: remove it to run it anew"
                      ) from None
    if theirs != options:
        raise Mistake(f"{path}: is of a run with {theirs}, expected {options}: name another --out")
    return record


def write_json(path, record):
    """Under another name first: a file that is there is whole."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


def collect(records, steps):
    """Everything in one object. Means are over seeds, and relative to those of the same seeds in the reference."""
    formats = {}
    finals = {name: {r["seed"]: r["final"] for r in records if r["format"] == name and r["final"] is not None}
              for name in FORMATS}
    for name, final in finals.items():
        shared = [seed for seed in final if seed in finals[REFERENCE]]
        if not any(record["format"] == name for record in records):
            continue
        formats[name] = {
            "seeds": sorted(final), "final": statistics.mean(final.values()) if final else None,
            "over_reference": statistics.mean(final[s] for s in shared) / statistics.mean(
                finals[REFERENCE][s] for s in shared) - 1 if shared else None}
    devices = sorted({record["device"] for record in records})
    return {"about": {"device": ", ".join(devices), "precision": records[0]["precision"], "steps": steps,
                      "parameters": records[0]["parameters"], "options": records[0]["options"],
                      "date": time.strftime("%Y-%m-%d"), "seconds": sum(record["seconds"] for record in records)},
            "reference": REFERENCE, "formats": formats, "runs": records}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="built with PRECISION=bf16 (default: %(default)s)")
    parser.add_argument("--data", default="data/shakespeare.txt", metavar="FILE", help="text (default: %(default)s)")
    parser.add_argument("--out", default="runs/fp8_quality", metavar="FOLDER",
                        help="a file for each run (default: %(default)s)")
    parser.add_argument("--collect", default=os.path.join(here, "fp8_quality.json"), metavar="FILE",
                        help="all of it (default: dev/chapter/fp8_quality.json)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT",
                        help="of " + "; ".join(FORMATS) + " (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=OPTIONS["steps"])
    parser.add_argument("--lr", type=float, default=OPTIONS["lr"])
    parser.add_argument("--layers", type=int, default=OPTIONS["layers"])
    parser.add_argument("--channels", type=int, default=OPTIONS["channels"])
    parser.add_argument("--minutes", type=float, help="no further run is begun after so long")
    o = parser.parse_args()

    require_program("--train-gpt", o.train_gpt)
    program, began, records = os.path.abspath(o.train_gpt), time.monotonic(), []
    os.makedirs(o.out, exist_ok=True)
    # A seed of all formats, then the next: what is there can be compared, wherever it stops.
    for seed in o.seeds:
        for name in o.formats:
            options = {**OPTIONS, "steps": o.steps, "lr": o.lr, "layers": o.layers, "channels": o.channels,
                       "seed": seed, **FORMATS[name]}
            path = file_of(o.out, name, seed)
            record = done_run(path, options)
            if record is None and o.minutes is not None and time.monotonic() - began > 60 * o.minutes:
                continue
            if record is None:
                print(f"fp8_quality: {name}, seed {seed} ... ({time.monotonic() - began:.0f} s)", file=sys.stderr)
                record = {"format": name, "seed": seed, "options": options, **run(program, o.data, options, o.steps)}
                write_json(path, record)
            records.append(record)
    if not records:
        raise Failed("no run was done: --minutes is too short")
    write_json(o.collect, collect(records, o.steps))
    print(o.collect)


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"fp8_quality: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

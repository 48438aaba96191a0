#!/usr/bin/env python3
"""Compares the statements of the Ultra-Scale Playbook's single-GPU chapter, and of its sections about data parallelism
and mixed precision, with measurements on this machine. Writes one HTML page with figures and tables.

    make chapter
    python3 dev/chapter/chapter.py --train-gpt ./train_gpt --out runs/chapter [--quick]
"""
import argparse
import json
import os
import sys

from measure import Failed, Mistake, measure
try:
    from report import write_report
except ImportError as error:
    sys.exit(f"chapter: {error}: pip install matplotlib, or apt install python3-matplotlib")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="the trainer (default: %(default)s)")
    for precision in ("bf16", "fp16"):
        parser.add_argument(f"--{precision}", metavar="PROGRAM",
                            help=f"a trainer built with PRECISION={precision}, for the parts that need one")
    parser.add_argument("--out", default="runs/chapter", metavar="FOLDER",
                        help="folder for report.html, a PNG per figure and results.json (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small runs: one to two minutes in total")
    options = parser.parse_args()

    try:
        os.makedirs(options.out, exist_ok=True)
    except OSError as error:
        raise Mistake(f"--out {options.out}: {error.strerror}; expected a folder that can be written") from None
    programs = {name: getattr(options, name) for name in ("bf16", "fp16")}
    results = measure(options.train_gpt, options.quick, programs)
    with open(os.path.join(options.out, "results.json"), "w", encoding="utf-8") as file:
        json.dump(results, file)
    print(write_report(results, options.out))


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"chapter: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

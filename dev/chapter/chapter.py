#!/usr/bin/env python3
"""Measures on this machine what the Ultra-Scale Playbook's single-GPU chapter states, and data parallelism and formats
of few bits: eleven figures beside the chapter's values, in one HTML file.

    make chapter
    python3 dev/chapter/chapter.py --train-gpt ./train_gpt --out runs/chapter [--quick]
"""
import argparse
import json
import os
import subprocess
import sys

sys.dont_write_bytecode = True
from measure import Failed, Mistake, measure


def require_matplotlib():
    """Checks in another process that matplotlib works. This process imports it after measuring: a run's resident memory
    is never reported as less than its parent's was."""
    check = subprocess.run([sys.executable, "-c", "import numpy, matplotlib"], capture_output=True, text=True)
    if check.returncode != 0:
        reason = (check.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise Mistake(f"{reason}: needs matplotlib and numpy (pip install matplotlib, or apt install "
                      "python3-matplotlib)")


def read_results(path):
    try:
        with open(path, encoding="utf-8") as file:
            results = json.load(file)
    except (OSError, ValueError) as error:
        raise Mistake(f"--redraw: {path}: {getattr(error, 'strerror', None) or error}; expected the results of an "
                      "earlier run") from None
    if "about" not in results:
        raise Mistake(f"--redraw: {path}: found no 'about', expected the results of an earlier run")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="the trainer (default: %(default)s)")
    for precision in ("bf16", "fp16"):
        parser.add_argument(f"--{precision}", metavar="PROGRAM",
                            help=f"a trainer built with PRECISION={precision}, for the parts that need one")
    parser.add_argument("--formats", metavar="PROGRAM", help="dev/chapter/formats.cu, built with PRECISION=bf16")
    parser.add_argument("--out", default="runs/chapter", metavar="FOLDER",
                        help="gets report.html, a PNG per figure and results.json (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "gpu"],
                        help="size of the runs (default: what the trainer was built for)")
    parser.add_argument("--quick", action="store_true", help="small runs, a minute or two in all")
    parser.add_argument("--redraw", action="store_true", help="write the report from results.json without measuring")
    options = parser.parse_args()

    require_matplotlib()
    try:
        os.makedirs(options.out, exist_ok=True)
    except OSError as error:
        raise Mistake(f"--out {options.out}: {error.strerror}; expected a folder that can be written") from None
    path = os.path.join(options.out, "results.json")
    if not options.redraw:
        programs = {name: getattr(options, name) for name in ("bf16", "fp16", "formats")}
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(measure(options.train_gpt, options.device, options.quick, programs)))
    results = read_results(path)

    from report import write_report
    print(write_report(results, options.out))


if __name__ == "__main__":
    try:
        main()
    except (Mistake, Failed) as error:
        print(f"chapter: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Mistake) else 1)

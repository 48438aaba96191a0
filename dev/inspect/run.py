#!/usr/bin/env python3
"""Runs a program that was built to be inspected, and reports what its kernels do to memory. `make inspect` calls it.

    run.py build/inspect/mine --sources ...               a program, as it is
    run.py build/inspect/train_gpt --costs costs.py --sample    the run that costs.py has; a few blocks of each kernel
    run.py ... --kernel NAME                              kernels with that in their name, line by line
    run.py ... --barriers                                 removes each barrier in turn, to see which are needed

The program's arguments follow --. How it is built: Makefile.
"""
import argparse
import json
import os
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import report       # first: it adds dev/ to sys.path
import barriers
from expectations import Expectations
from results import read_json
from symbols import Mistake, bare_name, demangled


def environment(options, recording, **more):
    """What the recorder reads. One worker: blocks and threads run in their natural order."""
    settings = {"OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": options.card, "INSPECT_OUT": recording,
                "INSPECT_MODE": "sample" if options.sample else "whole", "INSPECT_KERNEL": options.kernel or "",
                "INSPECT_SECONDS": str(options.seconds), "INSPECT_PROGRESS": "yes",
                "INSPECT_REGISTERS": options.registers or "", **more}
    return {**os.environ, **settings}


def run_program(command, settings, log, progress=sys.stderr):
    """Its exit code. Its own output goes to ours, or into a log; the recorder's lines, on stderr, to `progress`."""
    start, is_terminal = time.time(), progress and progress.isatty()
    output = open(log, "w", encoding="utf-8") if log else None
    process = subprocess.Popen(command, env=settings, stdout=output, stderr=subprocess.PIPE, text=True,
                               errors="replace")
    for line in process.stderr:
        if not line.startswith("inspect: "):
            (output or sys.stderr).write(line)
        elif progress:
            name = line[9:].strip()
            name = bare_name(demangled([name])[name]) if name.startswith("_Z") else name
            text = f"{time.time() - start:4.0f} s  records {name}"
            print(f"\r{text:<70}" if is_terminal else text, end="" if is_terminal else "\n", file=progress, flush=True)
    code = process.wait()
    if is_terminal:
        print("\r" + " " * 70, end="\r", file=progress)
    if output:
        output.close()
    return code


def record(command, settings, recording, log, **how):
    """Runs the program; returns its exit code and the recording, without kernels if it has not written any."""
    if os.path.exists(recording):
        os.remove(recording)
    code = run_program(command, settings, log, **how)
    if not os.path.exists(recording):
        return code, {"kernels": [], "ended": f"exit code {code}"}
    raw = read_json(recording, "recording")
    if raw["ended"] == "at its end":
        raw["ended"] = f"exit code {code}"
    return code, raw


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="built to be inspected")
    report.add_options(parser)
    parser.add_argument("--sample", action="store_true", help="run only a few blocks of each kernel: for a program "
                        "whose results nothing depends on")
    parser.add_argument("--sources", nargs="*", default=[], metavar="BUILT=FILE",
                        help="files as compiled, and the user's")
    parser.add_argument("--barriers", action="store_true", help="remove each barrier in turn")
    parser.add_argument("--seconds", type=int, default=0, help="end the program then; 0: it ends by itself")
    parser.set_defaults(card="h100")
    words = sys.argv[1:]
    mine = words[:words.index("--")] if "--" in words else words
    options = parser.parse_args(mine)
    options.arguments = words[len(mine) + 1:]
    options.recording = f"{options.program}.json"
    return options


def inspect(options):
    program = os.path.abspath(options.program)
    expectations = Expectations(options.costs)
    run = expectations.run(program, os.path.dirname(program), options.arguments, options.barriers)
    command, settings = [program, *run["arguments"]], run.get("settings", {})
    log = f"{options.program}.log" if options.sample else None
    code, raw = record(command, environment(options, options.recording, **settings), options.recording, log)
    if "program" not in raw:
        raise Mistake(f"{' '.join(command)} ended with exit code {code} and has launched no kernel")
    raw.update(program=os.path.relpath(program), sources=dict(pair.split("=", 1) for pair in options.sources))
    with open(options.recording, "w", encoding="utf-8") as file:
        json.dump(raw, file)
    if log and code != 0:
        with open(log, encoding="utf-8") as file:
            print(file.read()[-2000:], file=sys.stderr)
    if options.barriers:
        def run_again(name, more):
            again = f"{options.program}.{name}.json"
            return record(command, environment(options, again, **settings, **more), again, f"{again}.log",
                          progress=None)[1]
        return barriers.report(raw, expectations.unnecessary_barriers, run_again)
    options.tokens = None if options.kernel else run.get("tokens")
    status = report.report(options, run.get("shape"))
    return status if code == 0 or raw["ended"].startswith("after") else status or 1


def main():
    options = parse_options()
    try:
        return inspect(options)
    except Mistake as mistake:
        print(f"inspect: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

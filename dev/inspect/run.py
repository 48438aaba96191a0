#!/usr/bin/env python3
"""Runs a program that was built to be inspected, and reports what its kernels do to memory. `make inspect` calls it.

    run.py PROGRAM [--kernel NAME] [--barriers] ... [-- ARGUMENTS OF THE PROGRAM]
"""
import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

sys.dont_write_bytecode = True
import report       # first: it adds dev/ to sys.path
from results import Expectations, Results, read_json
from symbols import Mistake
from tables import text_table


def record(command, settings, recording, log):
    """Runs the program, its output in a log file if there is one; returns its exit code and the recording."""
    if os.path.exists(recording):
        os.remove(recording)
    output = open(log, "w", encoding="utf-8") if log else None
    code = subprocess.run(command, env={**settings, "INSPECT_OUT": recording}, stdout=output, stderr=output).returncode
    if not os.path.exists(recording):
        raise Mistake(f"{' '.join(command)} ended with exit code {code} and has launched no kernel"
                      + (f": see {log}" if log else ""))
    raw = read_json(recording, "recording")
    if raw["ended"] == "at its end":
        raw["ended"] = f"exit code {code}"
    raw["program"] = os.path.relpath(raw["program"])
    with open(recording, "w", encoding="utf-8") as file:
        json.dump(raw, file)
    return code, raw


# ---- which barriers are needed

def hazard_of(raw):
    """Returns the first fault of a recording in a few words, "" if it has none."""
    for kernel in raw["kernels"]:
        for race in kernel["races"]:
            first, second = race["accesses"]
            return f"{race['memory']} memory: {first['access']} and {second['access']}, {race['why']}"
        if kernel["uninitialised"]:
            return "uninitialised shared memory is read"
    return "" if raw["ended"] == "exit code 0" or raw["ended"].startswith("after") else raw["ended"].split("\n")[0]


def barriers_of(results):
    """Returns {(place, name): (addresses, kernels' ranges or symbols)}."""
    found = {}
    for kernel in results.kernels:
        for barrier in kernel.raw["barriers"]:
            place = results.symbols.place(barrier["stack"], kernel.demangled)
            addresses, kernels = found.setdefault((place.file, place.line, barrier["name"]), (place, set(), set()))[1:]
            addresses.add(barrier["stack"][0])
            kernels.add(kernel.range or kernel.raw["symbol"])
    return [(name, *entry) for (_, _, name), entry in sorted(found.items())]


def report_barriers(raw, unnecessary, run_again):
    """Removes each barrier in turn and records its kernels again. It is needed if that causes a race, an uninitialised
    read, or if the program cannot continue; one that is not found needed may be so at other sizes. Prints a line for
    each; returns 1 if some are not as expected. unnecessary: {beginning of a line: why it is there}"""
    results = Results(raw)
    barriers = barriers_of(results)
    # The recorder selects kernels by one name: several are all recorded.
    settings = [{"INSPECT_REMOVE": " ".join(f"{address:x}" for address in addresses),
                 "INSPECT_KERNEL": next(iter(kernels)) if len(kernels) == 1 else ""}
                for _, _, addresses, kernels in barriers]
    with ThreadPoolExecutor(2) as pool:
        faults = map(hazard_of, pool.map(run_again, range(len(settings)), settings))
    rows, needed, wrong = [], 0, 0
    for (name, place, _, kernels), fault in zip(barriers, faults):
        text = results.quoted(place.file, place.line)
        reason = next((why for line, why in unnecessary.items() if text.startswith(line)), "")
        found = fault or (f"nothing; it is there because: {reason}" if reason else "NOTHING: is it needed?")
        if fault and reason:
            found += f" BUT --costs has it in UNNECESSARY_BARRIERS: {reason}"
        needed += bool(fault)
        wrong += bool(fault) == bool(reason)
        rows.append([str(place), name, ", ".join(sorted(kernels))[:40], found])
    print("\n".join(text_table(["barrier", "what", "kernels", "without it"], rows, left=4)))
    print(f"{len(rows)} barriers, {needed} needed, {len(rows) - needed} not found to be; {wrong} not as expected")
    return 1 if wrong else 0


# ---- the command

def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="built to be inspected")
    report.add_options(parser)
    parser.add_argument("--sample", action="store_true", help="run only a few blocks of each kernel: for a program "
                        "whose results nothing depends on")
    parser.add_argument("--barriers", action="store_true", help="remove each barrier in turn")
    parser.add_argument("--seconds", type=int, default=0, help="end the program then; 0: it ends by itself")
    parser.set_defaults(card="h100")
    words = sys.argv[1:]
    mine = words[:words.index("--")] if "--" in words else words
    options = parser.parse_args(mine)
    options.arguments = words[len(mine) + 1:]
    return options


def inspect(options):
    program = os.path.abspath(options.program)
    expectations = Expectations(options.costs)
    run = expectations.run(program, os.path.dirname(program), options.arguments, options.barriers)
    command, log = [program, *run["arguments"]], f"{options.program}.log" if options.sample else None
    # One worker and no seed: blocks and threads run in their natural order.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": options.card,
                "INSPECT_MODE": "sample" if options.sample else "whole", "INSPECT_KERNEL": options.kernel or "",
                "INSPECT_SECONDS": str(options.seconds), "INSPECT_REGISTERS": options.registers or "",
                **run.get("settings", {})}
    recording = f"{options.program}.json"
    code, raw = record(command, settings, recording, log)
    if options.barriers:
        def run_again(number, more):
            again = f"{options.program}.without-{number}.json"
            try:
                return record(command, {**settings, **more}, again, f"{again}.log")[1]
            except Mistake as crash:
                return {"kernels": [], "ended": str(crash)}
        return report_barriers(raw, expectations.unnecessary_barriers, run_again)
    status = report.report(recording, options, run.get("shape"), None if options.kernel else run.get("tokens"))
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

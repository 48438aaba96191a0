#!/usr/bin/env python3
"""Runs an instrumented program and reports the memory accesses of its kernels. `make inspect` calls it.

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
    """Runs the program, with its output in the file `log` if not None; returns its exit code and the recording."""
    if os.path.exists(recording):
        os.remove(recording)
    output = open(log, "w", encoding="utf-8") if log else None
    if not log:
        print(f"output of {os.path.relpath(command[0])} (its times are the emulator's, not a GPU's):", flush=True)
    code = subprocess.run(command, env={**settings, "INSPECT_OUT": recording}, stdout=output, stderr=output).returncode
    raw = read_json(recording, "recording") if os.path.exists(recording) else {}
    if not any(raw.get(name) for name in ("kernels", "matmuls", "ended_at")):
        raise Mistake(f"{' '.join(command)}: exit code {code}, launched no kernel and no matmul"
                      + (f": see {log}" if log else ""))
    if raw["ended"] == "at its end":
        raw["ended"] = f"exit code {code}"
    raw["program"] = os.path.relpath(raw["program"])
    with open(recording, "w", encoding="utf-8") as file:
        json.dump(raw, file)
    return code, raw


# ---- which barriers are needed

def fault_of(raw):
    """Returns a short description of a recording's first fault; "" if it has none."""
    for kernel in raw["kernels"]:
        for race in kernel["races"]:
            first, second = race["accesses"]
            return f"{race['memory']} memory: {first['access']} and {second['access']}, {race['why']}"
        if kernel["uninitialised"]:
            return "uninitialised read of shared memory"
    return "" if raw["ended"] == "exit code 0" or raw["ended"].startswith("after") else raw["ended"].split("\n")[0]


def barriers_of(results):
    """Returns [(name, place, addresses, {(name, range or symbol) of its kernels}), ...]."""
    found = {}
    for kernel in results.kernels:
        for barrier in kernel.raw["barriers"]:
            place = results.symbols.place(barrier["stack"], kernel.demangled)
            addresses, kernels = found.setdefault((place.file, place.line, barrier["name"]), (place, set(), set()))[1:]
            addresses.add(barrier["stack"][0])
            kernels.add((kernel.name, kernel.range or kernel.raw["symbol"]))
    return [(name, *entry) for (_, _, name), entry in sorted(found.items())]


def report_barriers(raw, unnecessary, run_again):
    """Removes each barrier in turn, records its kernels again and prints a row. A barrier is needed if its removal
    causes a race or an uninitialised read, or stops the program; one without such a fault may be needed at other sizes.
    unnecessary: {start of a line: reason why this run does not need its barrier}. Returns 1 if a result differs from
    `unnecessary`, unless that is empty: then nothing was expected."""
    results = Results(raw)
    barriers = barriers_of(results)
    # INSPECT_KERNEL selects one name only: for a barrier in several kernels, all kernels are recorded.
    settings = [{"INSPECT_REMOVE": " ".join(f"{address:x}" for address in addresses),
                 "INSPECT_KERNEL": next(iter(kernels))[1] if len(kernels) == 1 else ""}
                for _, _, addresses, kernels in barriers]
    with ThreadPoolExecutor(2) as pool:
        faults = map(fault_of, pool.map(run_again, range(len(settings)), settings))
    rows, needed, wrong = [], 0, 0
    for (name, place, _, kernels), fault in zip(barriers, faults):
        text = results.quoted(place.file, place.line)
        reason = next((why for line, why in unnecessary.items() if text.startswith(line)), "")
        found = fault or (f"no fault, as expected: {reason}" if reason else "NO FAULT: is it needed?")
        if fault and reason:
            found += f", UNEXPECTED: it is in UNNECESSARY_BARRIERS of --costs: {reason}"
        needed += bool(fault)
        wrong += bool(fault) == bool(reason)
        rows.append([str(place), name, ", ".join(sorted({kernel for kernel, _ in kernels}))[:40], found])
    print("\n".join(text_table(["barrier", "kind", "kernels", "without it"], rows, left=4)))
    print(f"{len(rows)} barriers: {needed} needed, {len(rows) - needed} without a fault"
          + (f"; {wrong} not as expected" if unnecessary else ""))
    return 1 if wrong and unnecessary else 0


# ---- the command

def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="an instrumented program, built by make inspect")
    report.add_options(parser)
    parser.add_argument("--sample", action="store_true", help="run only a few blocks of each kernel; the program must "
                        "not depend on their results")
    parser.add_argument("--barriers", action="store_true", help="remove each barrier in turn: which are needed?")
    parser.add_argument("--seconds", type=int, default=0, help="end the program after this time (default 0: no limit)")
    parser.set_defaults(card="h100")
    words = sys.argv[1:]
    mine = words[:words.index("--")] if "--" in words else words
    options = parser.parse_args(mine)
    options.arguments = words[len(mine) + 1:]
    return options


def inspect():
    options = parse_options()
    program = os.path.abspath(options.program)
    expectations = Expectations(options.costs)
    run = expectations.run(program, os.path.dirname(program), options.arguments, options.barriers)
    command, log = [program, *run["arguments"]], f"{options.program}.log" if options.sample else None
    # With one worker and seed 0, blocks and threads run in the order of their indices.
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": options.card,
                "INSPECT_MODE": "sample" if options.sample else "whole", "INSPECT_KERNEL": options.kernel or "",
                "INSPECT_SECONDS": str(options.seconds), "INSPECT_REGISTERS": options.sass or "",
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


if __name__ == "__main__":
    report.exit_with("inspect", inspect)

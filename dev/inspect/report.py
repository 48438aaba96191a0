#!/usr/bin/env python3
"""Reports on a recording of kernels: a table, or one kernel line by line (--kernel), a page with pictures (--html),
JSON (--json), a check (--check). Times are estimated from data sheets (estimate.py), never measured."""
import argparse
import json
import os
import signal
import sys

sys.dont_write_bytecode = True
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from cards import CARDS
from page import page
from results import Expectations, Results, read_json, read_recording
from symbols import Mistake
from tables import number, plural
from text import hazards, kernel_text, overview


# ---- JSON for other programs

def sites_as_json(kernel, space):
    keys = ("access", "by", "bytes_per_lane", "part", "requests", "lanes", "bytes", "sectors", "least_sectors",
            "l1_hits", "dram_sectors", "wavefronts", "least_wavefronts")
    return [{"file": line.place.file, "line": line.place.line, "function": line.place.function,
             "via": list(line.place.via), **{key: site[key] for key in keys}}
            for line in kernel.lines for site in line.sites if site["space"] == space]


def kernel_as_json(kernel):
    return {"name": kernel.name, "range": kernel.range, "launches": kernel.launches, "grid": kernel.grid,
            "block": kernel.block, "integers": kernel.raw["integers"],
            "recorded_blocks": kernel.raw["recorded_blocks"],
            "global": sites_as_json(kernel, "global"), "shared": sites_as_json(kernel, "shared"),
            "races": kernel.races, "uninitialised": kernel.uninitialised,
            "estimate_us": kernel.us, "bound_by": kernel.bound, "memory_bytes": kernel.moved_bytes,
            "cost": kernel.cost, "ratios": kernel.ratios, "registers": kernel.registers, "spill_bytes": kernel.spills}


def as_json(results):
    seconds = sum(results.step.values())
    return {"card": results.card.key, "ended": results.raw["ended"],
            "kernels": [kernel_as_json(kernel) for kernel in results.kernels], "estimate_ms": 1e3 * seconds,
            "estimate_parts_ms": {name: 1e3 * part for name, part in results.step.items()},
            "estimate_tokens_per_s": results.tokens / seconds if results.tokens else None}


# ---- the check

DEFAULTS = {"sectors": 1.0, "wavefronts": 1.0, "cost": 1.05}
SLACK = 0.03            # an allowance may be so much looser than what was found
ROUNDING = 1e-9


def too_much(kernel, what, allowed):
    """Names the line with most of what is unnecessary."""
    if what == "cost":
        counted = "bytes to and from memory" if kernel.cost[0] == "bytes" else "FLOPs on tensor cores"
        of, excess = f"the cost line ({kernel.cost[2]})", lambda line: line.sums.dram_sectors
    else:
        counted, of = what, "the least"
        excess = lambda line: getattr(line.sums, what) - getattr(line.sums, f"least_{what}")
    worst = max(kernel.lines, key=excess).place
    return f"{kernel.name}: {worst}: {counted} are {kernel.ratios[what]:.3f} times {of}; allowed: {number(allowed, 4)}"


def findings(results):
    """Yields a line for each race, uninitialised read and ratio above DEFAULTS or an allowance; also for each allowance
    that is looser than needed, so that the table says how good the kernels are."""
    allowances = {entry[:2]: entry for entry in results.expectations.allowances}
    largest = {}            # of each allowance that was used, over all kernels that it is for
    for kernel in results.kernels:
        yield from hazards(results, kernel)
        for what, default in DEFAULTS.items():
            ratio, allowed = kernel.ratios[what], default
            if ratio is None:
                continue
            allowance = allowances.get((kernel.name, what)) or allowances.get((kernel.name.split("<")[0], what))
            if allowance:
                largest[allowance] = max(ratio, largest.get(allowance, 0.0))
                allowed = allowance[2]
            if ratio > allowed + ROUNDING:
                yield too_much(kernel, what, allowed)
    for (kernel, what, allowed, reason), ratio in largest.items():
        if ratio <= DEFAULTS[what] + ROUNDING or allowed > ratio * (1 + SLACK):
            yield (f"{kernel}: allowance no longer needed: {what} may be {allowed:g}, found {ratio:.3f} ({reason})")


# ---- the command

def add_options(parser):
    """The options that run.py has too."""
    parser.add_argument("--card", choices=CARDS, help="to estimate for (default: the recording's)")
    parser.add_argument("--kernel", metavar="NAME", help="line by line: kernels with this in their name or range")
    parser.add_argument("--html", metavar="FILE", help="the page to write")
    parser.add_argument("--json", metavar="FILE", help="the same figures for other programs")
    parser.add_argument("--check", action="store_true", help="exit code 1 if something is worse than --costs allows")
    parser.add_argument("--costs", metavar="FILE", help="what is expected of the kernels: README.md")
    parser.add_argument("--registers", metavar="FILE", help="what registers.py wrote")


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None


def report(recording, options, shape=None, tokens=None):
    results = Results(read_recording(recording), options.card, Expectations(options.costs, shape),
                      options.registers and read_json(options.registers, "registers"), tokens=tokens)
    lines = overview(results)
    if options.kernel:
        chosen = [kernel for kernel in results.kernels if options.kernel in f"{kernel.name} {kernel.range}"]
        if not chosen:
            raise Mistake(f"--kernel {options.kernel}: no such kernel was launched; found "
                          f"{', '.join(results.launched) or 'none'}")
        lines = [line for kernel in chosen for line in kernel_text(results, kernel)]
    print("\n".join(lines))
    if results.raw["ended"] != "exit code 0":
        print(f"the program ended with: {results.raw['ended']}")
    if options.html:
        write(options.html, page(results))
    if options.json:
        write(options.json, json.dumps(as_json(results), indent=1) + "\n")
    if not options.check:
        return 0
    found = list(findings(results))
    print("\n".join(["", *found, plural(len(found), "finding")]))
    return 1 if found else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", metavar="raw.json")
    add_options(parser)
    options = parser.parse_args()
    try:
        return report(options.recording, options)
    except Mistake as mistake:
        print(f"report.py: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # for | head
    sys.exit(main())

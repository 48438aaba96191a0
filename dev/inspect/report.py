#!/usr/bin/env python3
"""Reports on a recording: a table of all kernels or one kernel line by line (--kernel), a page with pictures (--html),
JSON (--json), a check (--check). Times are estimated from data sheets (estimate.py), never measured."""
import argparse
import json
import os
import signal
import sys

sys.dont_write_bytecode = True
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from cards import CARDS
from estimate import RANGE, matmul_seconds
from page import page
from results import DEFAULTS, HAZARDS, SUMS, Expectations, Results, read_json, read_recording
from symbols import Mistake
from tables import number, plural
from text import hazard_summaries, kernel_text, overview


# ---- JSON for other programs

def sites_as_json(kernel, space):
    keys = ("access", "by", "bytes_per_lane", "part", *SUMS)
    return [{"file": line.place.file, "line": line.place.line, "function": line.place.function,
             "via": list(line.place.via), **{key: site[key] for key in keys}}
            for line in kernel.lines for site in line.sites if site["space"] == space]


def kernel_as_json(kernel):
    return {"name": kernel.name, "range": kernel.range, "launches": kernel.launches, "grid": kernel.grid,
            "block": kernel.block, "integers": kernel.raw["integers"],
            "recorded_blocks": kernel.raw["recorded_blocks"], "checked": kernel.raw["checked"],
            "global": sites_as_json(kernel, "global"), "shared": sites_as_json(kernel, "shared"),
            **{key: [hazard for hazard in kernel.hazards if hazard["kind"] == kind] for key, kind in HAZARDS.items()},
            "estimate_us": kernel.us, "bound_by": kernel.bound, "memory_bytes": kernel.moved_bytes,
            "cost": kernel.cost, "ratios": kernel.ratios, "registers": kernel.registers, "spill_bytes": kernel.spills,
            "main_loop": kernel.main_loop}


def matmuls_as_json(results):
    """Returns the cuBLASLt products in the order of their launches: shape, in cuBLASLt's order, and estimate."""
    raw = results.raw
    return [{**raw["matmuls"][number], "estimate_us": 1e6 * matmul_seconds(results.card, raw["matmuls"][number])}
            for kind, number in raw["sequence"] if kind == "matmul"]


def as_json(results):
    seconds = sum(results.step.values())
    return {"card": results.card.key, "ended": results.raw["ended"],
            "kernels": [kernel_as_json(kernel) for kernel in results.kernels], "estimate_ms": 1e3 * seconds,
            "estimate_range": RANGE, "matmuls": matmuls_as_json(results),
            "estimate_parts_ms": {name: 1e3 * part for name, part in results.step.items()},
            "estimate_tokens_per_s": results.tokens / seconds if results.tokens else None}


# ---- the check

SLACK = 0.03            # an allowance may exceed the largest ratio found by this fraction
ROUNDING = 1e-9


def excess_sentence(kernel, what, allowed):
    """Returns a finding that names the line with the largest excess."""
    if what == "cost":
        counted = "bytes to and from memory" if kernel.cost[0] == "bytes" else "FLOPs on tensor cores"
        of, excess = f"the cost line ({kernel.cost[2]})", lambda line: line.sums.dram_sectors
    else:
        counted, of = what, "the minimum"
        excess = lambda line: getattr(line.sums, what) - getattr(line.sums, f"least_{what}")
    worst = max(kernel.lines, key=excess).place
    return f"{kernel.name}: {worst}: {counted} are {kernel.ratios[what]:.3f} times {of}; allowed: {number(allowed, 4)}"


def findings(results):
    """Yields sentences on the races and other hazards, and one for each ratio above its allowance or DEFAULTS, and each
    allowance that is looser than necessary: ALLOWANCES must state how good the kernels are."""
    allowances = {entry[:2]: entry for entry in results.expectations.allowances}
    largest = {}            # allowance -> largest ratio of the kernels that it applies to
    yield from hazard_summaries(results)
    for kernel in results.kernels:
        if missed := kernel.raw["checked"]["missed_launches"]:
            yield (f"{kernel.label}: {missed:,} of {kernel.launches:,} launches have other arguments than those that "
                   "were checked for races")
        for what, default in DEFAULTS.items():
            ratio, allowed = kernel.ratios[what], default
            if ratio is None:
                continue
            allowance = allowances.get((kernel.name, what)) or allowances.get((kernel.name.split("<")[0], what))
            if allowance:
                largest[allowance] = max(ratio, largest.get(allowance, 0.0))
                allowed = allowance[2]
            if ratio > allowed + ROUNDING:
                yield excess_sentence(kernel, what, allowed)
    for (kernel, what, allowed, reason), ratio in largest.items():
        if ratio <= DEFAULTS[what] + ROUNDING or allowed > ratio * (1 + SLACK):
            yield (f"{kernel}: allowance looser than necessary: {what} up to {allowed:g} allowed, found {ratio:.3f} "
                   f"({reason})")


# ---- the command

def add_options(parser):
    """Adds the options that report.py and run.py share."""
    parser.add_argument("--card", choices=CARDS, help="the GPU to estimate times for (default: the recording's)")
    parser.add_argument("--kernel", metavar="NAME", help="show kernels with this in their name or NVTX range, by line")
    parser.add_argument("--html", metavar="FILE", help="write a page with source and pictures")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a kernel has a race or too much traffic")
    parser.add_argument("--costs", metavar="FILE", help="expected figures of the kernels (see README.md)")
    parser.add_argument("--sass", metavar="FILE", help="output of sass.py")


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None


def report(recording, options, shape=None, tokens=None):
    results = Results(read_recording(recording), options.card, Expectations(options.costs, shape),
                      options.sass and read_json(options.sass, "sass"), tokens=tokens)
    lines = overview(results)
    if options.kernel:
        chosen = [kernel for kernel in results.kernels if options.kernel in f"{kernel.name} {kernel.range}"]
        if not chosen:
            raise Mistake(f"--kernel {options.kernel}: no such kernel was launched; found "
                          f"{', '.join(results.launched) or 'none'}")
        lines = [line for kernel in chosen for line in kernel_text(results, kernel)]
    print("\n".join(lines))
    if results.raw["ended"] != "exit code 0":
        at = f"{results.ended_at}: " if results.ended_at else ""
        print(f"end of the program: {at}{results.raw['ended']}")
    if options.html:
        write(options.html, page(results))
        print(f"report: {options.html}")
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
    return report(options.recording, options)


def exit_with(name, command):
    """Exits with the result of command(); after a user error, which it prints, with 2."""
    try:
        sys.exit(command())
    except Mistake as mistake:
        print(f"{name}: {mistake}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # no traceback in report.py ... | head
    exit_with("report.py", main)

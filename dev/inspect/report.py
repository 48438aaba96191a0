#!/usr/bin/env python3
"""Reports on a recording of kernels (raw.json): a table, a page, JSON, a check.

    report.py raw.json                          a row for each kernel
    report.py raw.json --kernel layernorm       kernels with that in their name or range, line by line
    report.py raw.json --html report.html       all of it as a page, with pictures
    report.py raw.json --check                  exit code 1 if something races or is worse than --costs allows

Times are estimated from data sheets (estimate.py), never measured.
"""
import argparse
import json
import os
import signal
import sys

sys.dont_write_bytecode = True
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from cards import CARDS
from check import findings
from expectations import Expectations
from page import page
from results import Results, read_json, read_recording
from symbols import Mistake, bare_name, demangled
from tables import plural
from text import kernel_text, overview


# ---- JSON for other programs

def place_of(place):
    return {"file": place.file, "line": place.line}


def site_as_json(line, site):
    keys = {"global": ("sectors", "least_sectors", "bytes", "l1_hits", "dram_sectors"),
            "shared": ("wavefronts", "least_wavefronts", "bytes")}[site["space"]]
    return {**place_of(line.place), "function": line.place.function, "via": list(line.place.via),
            "access": site["access"], "by": site["by"], "bytes_per_lane": site["bytes_per_lane"],
            "part": site["part"], "requests": site["requests"], "lanes": site["lanes"],
            **{key: site.get(key, 0) for key in keys}}


def hazard_as_json(hazard, access):
    return {**place_of(access.place), "array": hazard.array, "address": hazard.address, "count": hazard.count}


def kernel_as_json(kernel):
    sites = {space: [site_as_json(line, site) for line in kernel.lines for site in line.of(space)]
             for space in ("global", "shared")}
    races = [{**hazard_as_json(race, race.accesses[0]), "memory": race.memory,
              "other_file": race.accesses[1].place.file, "other_line": race.accesses[1].place.line,
              "threads": [access.thread for access in race.accesses],
              "blocks": [access.block for access in race.accesses],
              "accesses": [access.what for access in race.accesses], "why": race.why} for race in kernel.races]
    uninitialised = [{**hazard_as_json(read, read.accesses[0]), "thread": read.accesses[0].thread,
                      "block": read.accesses[0].block} for read in kernel.uninitialised]
    room = kernel.estimate.occupancy
    return {"name": kernel.name, "range": kernel.range, "launches": kernel.launches, "grid": kernel.grid,
            "block": kernel.block, "integers": kernel.raw.get("integers", []),
            "recorded_blocks": kernel.raw["recorded_blocks"], **sites, "races": races,
            "uninitialised": uninitialised, "estimate_us": kernel.us, "bound_by": kernel.estimate.bound,
            "bounds_us": {name: 1e6 * seconds for name, seconds in kernel.estimate.bounds.items()},
            "memory_bytes": kernel.moved_bytes,
            "cost_line": kernel.cost and {"unit": kernel.cost.unit, "amount": kernel.cost.amount,
                                          "ratio": kernel.cost_ratio},
            "registers": kernel.registers, "spill_bytes": kernel.spills,
            "occupancy": {"blocks": room.blocks, "bound_by": room.bound, "share": room.share}}


def as_json(results):
    step = results.step
    return {"card": results.card.key, "ended": results.raw.get("ended", ""),
            "kernels": [kernel_as_json(kernel) for kernel in results.kernels],
            "estimate_ms": 1e3 * step.seconds,
            "estimate_parts_ms": {name: 1e3 * seconds for name, seconds in step.parts.items()},
            "estimate_tokens_per_s": step.tokens_per_second(results.tokens) if results.tokens else None}


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
    parser.add_argument("--source-root", metavar="DIR", default=".", help="the folder of the sources (default: here)")


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", metavar="raw.json")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens that the run processes, for tokens/s")
    add_options(parser)
    return parser.parse_args(arguments)


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None


def report(options, shape=None):
    results = Results(read_recording(options.recording), options.card, Expectations(options.costs, shape),
                      options.registers and read_json(options.registers, "registers"), options.source_root,
                      options.tokens)
    if options.kernel:
        chosen = results.matching(options.kernel)
        if not chosen:
            launched = sorted({bare_name(name) for name in demangled(results.raw["launched"]).values()})
            raise Mistake(f"--kernel {options.kernel}: no such kernel was launched; found "
                          f"{', '.join(launched) or 'none'}")
        lines = [line for kernel in chosen for line in kernel_text(results, kernel)]
    else:
        lines = overview(results)
    print("\n".join(lines))
    if results.raw.get("ended", "exit code 0") != "exit code 0":
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


def main(arguments=None):
    options = parse_options(arguments)
    try:
        return report(options)
    except Mistake as mistake:
        print(f"report.py: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # for | head
    sys.exit(main())

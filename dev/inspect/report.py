#!/usr/bin/env python3
"""What a recording of kernels (raw.json) says: a table, a page, JSON, a check.

    report.py raw.json                          a row for each kernel
    report.py raw.json --kernel layernorm       kernels with that in their name or range, line by line
    report.py raw.json --html report.html       all of it as a page, with pictures
    report.py raw.json --check                  exit code 1 where something races or is worse than allowances.json says

Times are estimated from data sheets (cards.py, estimate.py), never measured.
"""
import argparse
import json
import signal
import sys

sys.dont_write_bytecode = True
from cards import CARDS
from check import TABLE, findings, read_allowances
from page import page
from results import Results, read_json, read_recording
from symbols import Mistake, bare_name, demangled
from text import kernel_text, overview, plural


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


def kernel_as_json(kernel):
    sites = {space: [site_as_json(line, site) for line in kernel.lines for site in line.of(space)]
             for space in ("global", "shared")}
    races = [{"memory": race.memory, "array": race.array, "address": race.address,
              **place_of(race.later.place), "other_file": race.earlier.place.file,
              "other_line": race.earlier.place.line, "threads": [race.later.thread, race.earlier.thread],
              "blocks": [race.later.block, race.earlier.block],
              "accesses": [race.later.what, race.earlier.what], "count": race.count, "why": race.why}
             for race in kernel.races]
    uninitialised = [{**place_of(read.access.place), "thread": read.access.thread, "block": read.access.block,
                      "array": read.array, "address": read.address, "count": read.count}
                     for read in kernel.uninitialised]
    room = kernel.estimate.occupancy
    return {"name": kernel.name, "range": kernel.range, "launches": kernel.launches, "grid": kernel.grid,
            "block": kernel.block, "recorded_blocks": kernel.raw["recorded_blocks"], **sites, "races": races,
            "uninitialised": uninitialised, "estimate_us": kernel.us, "bound_by": kernel.estimate.bound,
            "bounds_us": {name: 1e6 * seconds for name, seconds in kernel.estimate.bounds.items()},
            "memory_bytes": kernel.moved_bytes,
            "cost_line": kernel.claim and {"unit": kernel.claim.unit, "amount": kernel.claim.amount,
                                           "ratio": kernel.claim_ratio},
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

def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", metavar="raw.json")
    parser.add_argument("--card", choices=CARDS, help="to estimate for (default: the recording's)")
    parser.add_argument("--kernel", metavar="NAME", help="line by line: kernels with this in their name or range")
    parser.add_argument("--html", metavar="FILE", help="the page to write")
    parser.add_argument("--json", metavar="FILE", help="the same figures for other programs")
    parser.add_argument("--check", action="store_true", help="exit code 1 where something is worse than allowed")
    parser.add_argument("--allowances", metavar="FILE", default=TABLE, help="what is allowed (default: %(default)s)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens that were trained on, for tokens/s")
    parser.add_argument("--registers", metavar="FILE", help="what registers.py wrote")
    parser.add_argument("--shape", metavar="JSON", help='the model\'s, for cost lines: {"B": 64, "T": 1024, "C": 768, '
                        '"V": 50257, "L": 12}')
    parser.add_argument("--source-root", metavar="DIR", default=".", help="where the sources lie (default: here)")
    return parser.parse_args(arguments)


def parse_shape(text):
    try:
        shape = json.loads(text or "{}")
    except ValueError as error:
        raise Mistake(f"--shape is no JSON: {error}") from None
    if not isinstance(shape, dict) or not all(isinstance(size, int) for size in shape.values()):
        raise Mistake(f"--shape takes an object of whole numbers, found {text}")
    return shape


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None


def report(options):
    results = Results(read_recording(options.recording), options.card, parse_shape(options.shape),
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
    found = list(findings(results, read_allowances(options.allowances)))
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

"""Which barriers are needed: each is forgotten in turn, all of its kernels are looked at again, and it is needed if
something races then, if something is read that nobody has written, or if the program cannot go on.

A barrier that is not found needed may be so at other sizes; one that is found so is. needless.json lists those that are
there for another reason than order, by the beginning of their line.
"""
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from results import read_json
from symbols import Place, Sources, Symbols, demangled

AT_A_TIME = 2
NEEDLESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "needless.json")


@dataclass
class Barrier:
    name: str                   # __syncthreads, barrier_wait ...
    place: Place
    addresses: set = field(default_factory=set)
    kernels: set = field(default_factory=set)       # ranges, or names
    found: str = ""             # what went wrong without it


def barriers_of(raw, symbols, names):
    """By name and line of source."""
    found = {}
    for kernel in raw["kernels"]:
        for sync in kernel.get("syncs", []):
            place = symbols.place(sync["stack"], names.get(kernel["symbol"], ""))
            barrier = found.setdefault((sync["name"], place.file, place.line), Barrier(sync["name"], place))
            barrier.addresses.add(sync["stack"][0])
            barrier.kernels.add(kernel["range"] or kernel["symbol"])
    return [found[key] for key in sorted(found)]


def hazard_of(raw):
    """The first thing that is wrong in a recording, in a few words, or nothing."""
    for kernel in raw["kernels"]:
        for race in kernel["races"]:
            return f"{race['memory']} memory: {race['access']} and {race['other_access']}, {race['why']}"
        for _ in kernel["uninitialised"]:
            return "shared memory is read that nobody has written"
    if raw["ended"] not in ("at its end", "exit code 0") and not raw["ended"].startswith("after"):
        return raw["ended"].split("\n")[0]
    return ""


def common_name(kernels):
    """What the recorder is to look for, so that it sees all of these kernels."""
    return next(iter(kernels)) if len(kernels) == 1 else ""


def report(raw, run_again):
    """Prints a line for each; returns 1 where some are not found needed."""
    symbols = Symbols(raw["program"], [sync["stack"] for kernel in raw["kernels"] for sync in kernel.get("syncs", [])],
                      raw.get("sources"))
    names = demangled(kernel["symbol"] for kernel in raw["kernels"])
    barriers = barriers_of(raw, symbols, names)

    def forget(numbered):
        number, barrier = numbered
        addresses = " ".join(f"{address:x}" for address in barrier.addresses)
        again = run_again(f"without-{number}", {"INSPECT_LEAVE_OUT": addresses,
                                                "INSPECT_KERNEL": common_name(barrier.kernels)})
        barrier.found = hazard_of(again)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(forget, enumerate(barriers)))
    sources, reasons = Sources(), {entry["line"]: entry["reason"] for entry in read_json(NEEDLESS, "needless barriers")}
    rows, wrong = [], 0
    for b in barriers:
        text = sources.text(b.place.file, b.place.line).strip()
        reason = next((why for line, why in reasons.items() if text.startswith(line)), "")
        found = b.found or (f"nothing, and need not: {reason}" if reason else "NOTHING: is it needed?")
        if b.found and reason:
            found += f" BUT needless.json says: {reason}"
        wrong += bool(b.found) == bool(reason)
        rows.append([str(b.place), b.name, ", ".join(sorted(b.kernels))[:40], found])
    for row in [["barrier", "what", "kernels", "without it"], *rows]:
        print("{:<40}  {:<18}  {:<40}  {}".format(*row))
    needed = sum(bool(b.found) for b in barriers)
    print(f"{len(barriers)} barriers, {needed} needed, {len(barriers) - needed} not found to be; "
          f"{wrong} not as expected")
    return 1 if wrong else 0

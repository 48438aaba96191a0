"""Which barriers are needed: each is removed in turn and all of its kernels are recorded again. It is needed if that
causes a race or an uninitialised read, or if the program cannot continue.

A barrier that is not found needed may be so at other sizes; one that is found so is. The --costs file lists those that
are there for another reason than order (UNNECESSARY_BARRIERS).
"""
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from symbols import Place, Sources, Symbols, demangled
from tables import text_table

AT_A_TIME = 2


@dataclass
class Barrier:
    name: str                   # __syncthreads, barrier_wait ...
    place: Place
    addresses: set = field(default_factory=set)
    kernels: set = field(default_factory=set)       # ranges, or names
    found: str = ""             # what went wrong without it


def barriers_of(raw, symbols):
    """By name and line of source."""
    found, names = {}, demangled(kernel["symbol"] for kernel in raw["kernels"])
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
        if kernel["uninitialised"]:
            return "uninitialised shared memory is read"
    if raw["ended"] not in ("at its end", "exit code 0") and not raw["ended"].startswith("after"):
        return raw["ended"].split("\n")[0]
    return ""


def report(raw, unnecessary, run_again):
    """Prints a line for each barrier; returns 1 if some are not as expected. unnecessary: {beginning of a line: why}"""
    symbols = Symbols(raw["program"], [sync["stack"] for kernel in raw["kernels"] for sync in kernel.get("syncs", [])],
                      raw.get("sources"))
    barriers = barriers_of(raw, symbols)

    def remove(numbered):
        number, barrier = numbered
        # The recorder looks for kernels by one name: several are all recorded.
        kernel = next(iter(barrier.kernels)) if len(barrier.kernels) == 1 else ""
        addresses = " ".join(f"{address:x}" for address in barrier.addresses)
        barrier.found = hazard_of(run_again(f"without-{number}", {"INSPECT_REMOVE": addresses,
                                                                  "INSPECT_KERNEL": kernel}))

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(remove, enumerate(barriers)))
    sources, rows, wrong = Sources(), [], 0
    for b in barriers:
        text = sources.text(b.place.file, b.place.line).strip()
        reason = next((why for line, why in unnecessary.items() if text.startswith(line)), "")
        found = b.found or (f"nothing; it is there because: {reason}" if reason else "NOTHING: is it needed?")
        if b.found and reason:
            found += f" BUT --costs has it in UNNECESSARY_BARRIERS: {reason}"
        wrong += bool(b.found) == bool(reason)
        rows.append([str(b.place), b.name, ", ".join(sorted(b.kernels))[:40], found])
    print("\n".join(text_table(["barrier", "what", "kernels", "without it"], rows, left=4)))
    needed = sum(bool(b.found) for b in barriers)
    print(f"{len(barriers)} barriers, {needed} needed, {len(barriers) - needed} not found to be; "
          f"{wrong} not as expected")
    return 1 if wrong else 0

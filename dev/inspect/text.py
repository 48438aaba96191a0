"""The report in a terminal: a row for each kernel; with --kernel, a kernel line by line."""
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable

from tables import number, plural, text_table, times

CONTEXT = 2         # lines of source around accesses


# ---- figures of a kernel, for the page too

@dataclass(frozen=True)
class Column:
    name: str
    meaning: str
    value: Callable                 # of a kernel; None: unknown
    shown: Callable = "{:,}".format     # a value as text
    most: float = math.inf          # more than this is marked

    def text(self, kernel):
        value = self.value(kernel)
        return "-" if value is None else self.shown(value)

    def is_bad(self, kernel):
        value = self.value(kernel)
        return self.most < math.inf and value is not None and value > self.most + 5e-3


COLUMNS = [
    Column("kernel", "the kernel's function", lambda k: k.name, str),
    Column("launches", "how often the run launched it with this grid", lambda k: k.launches),
    Column("blocks", "of a launch; its figures are extrapolated from those that were recorded", lambda k: k.blocks),
    Column("threads", "of a block", lambda k: k.threads),
    Column("est. µs", "time of one launch, estimated from the GPU's data sheet; not measured", lambda k: k.us, number),
    Column("bound by", "what takes longest", lambda k: k.bound, str),
    Column("sectors", "of 32 bytes that warps asked for in global memory, over the fewest that could hold what lanes "
           "asked for; 1: coalesced", lambda k: k.ratios["sectors"], times, 1.0),
    Column("wavefr.", "wavefronts that shared memory took, over the fewest; more than 1: bank conflicts",
           lambda k: k.ratios["wavefronts"], times, 1.0),
    Column("of cost", "bytes to and from memory (attention: FLOPs on tensor cores) over the cost line of --costs",
           lambda k: k.ratios["cost"], times, 1.05),
    Column("lanes", "active lanes of a warp's 32 in an access, on average", lambda k: k.sums.active_lanes, number),
    Column("regs", "registers of a thread, by NVIDIA's assembler; !: some spill to memory",
           lambda k: k.registers and f"{k.registers}{'!' if k.spills else ''}", str),
    Column("races", "pairs of lines whose threads access the same memory, one of them storing, unordered",
           lambda k: len(k.races), most=0),
]
LEGEND = """sectors, wavefr.: done over the least possible; of cost: bytes (attention: FLOPs) over the section's cost
line; lanes: active of 32; est.: estimated from data sheets, not measured"""


def totals(results):
    """Returns sentences about all that was launched."""
    seconds = sum(results.step.values())
    parts = ", ".join(f"{name} {number(1e3 * part)}" for name, part in results.step.items())
    lines = [f"{number(1e3 * seconds)} ms, estimated on {results.card.name} for all that was launched ({parts})"]
    if results.tokens:
        lines.append(f"{results.tokens / seconds:,.0f} tokens/s, estimated for {results.tokens:,} tokens")
    return lines


def overview(results):
    rows = [[column.text(kernel) for column in COLUMNS] for kernel in results.kernels]
    dangers = [line for kernel in results.kernels for line in hazards(results, kernel)]
    return [*text_table([column.name for column in COLUMNS], rows), LEGEND, "", *totals(results),
            *([""] if dangers else []), *dangers]


# ---- races and uninitialised reads

def access_words(results, access):
    who = access["by"]          # the copy engine and wgmma access memory asynchronously to all threads
    if access["thread"] >= 0:
        who = f"thread {access['thread']}" + ("" if access["by"] == "thread" else f" ({access['by']})")
    text = results.quoted(access["file"], access["line"])
    return (f"{who} of block {access['block']} {access['access']}s at {access['file']}:{access['line']}"
            + (f"  `{text}`" if text else ""))


def hazard_sentence(results, kernel, hazard):
    memory, sides = f"{hazard['memory']} memory", [access_words(results, access) for access in hazard["accesses"]]
    byte, count = f"byte {hazard['address']} of {hazard['array'] or memory}", plural(hazard["count"], "time")
    if len(sides) == 1:
        return f"{kernel.name}: uninitialised read of {byte}: {sides[0]} ({count})"
    return f"{kernel.name}: race in {memory}, {byte}: {sides[0]}, {sides[1]}; {hazard['why']} ({count})"


def hazards(results, kernel):
    return [hazard_sentence(results, kernel, hazard) for hazard in kernel.races + kernel.uninitialised]


# ---- one kernel

def facts(kernel):
    """Yields (name, value) of what the table does not show of a kernel."""
    longest = sorted(kernel.bounds.items(), key=lambda item: -item[1])[:3]
    yield "estimated", ", ".join(f"{name} {number(1e6 * time)} µs" for name, time in longest if time)
    yield "grid, block", ", ".join(" × ".join(map(str, sizes)) for sizes in (kernel.grid, kernel.block))
    yield "recorded", f"{plural(kernel.raw['recorded_blocks'], 'block')} of {kernel.blocks:,}"
    yield "shared memory", f"{kernel.shared:,} bytes of a block"
    yield "memory moved", f"{number(kernel.moved_bytes / 1e6)} MB a launch"
    if kernel.cost:
        unit, amount, line = kernel.cost
        yield "cost line", f"{line}: {number(amount / 1e6)} million {unit}"


def figures(line):
    """Yields the figures of a line's accesses to global or shared memory, of its loads or stores. ratio: of what was
    done, in sectors or wavefronts, to the least; None without any."""
    found = {}
    for site in line.sites if line else ():
        found.setdefault((site["space"], site["access"]), []).append(site)
    for (space, access), sites in sorted(found.items()):
        unit = "sectors" if space == "global" else "wavefronts"
        done, least, requests, lanes = (sum(site[key] for site in sites)
                                        for key in (unit, f"least_{unit}", "requests", "lanes"))
        yield SimpleNamespace(space=space, access=access, by=sorted({site["by"] for site in sites}), unit=unit,
                              requests=requests, lanes=lanes / max(1, requests), done=done,
                              ratio=done / least if least else None, is_wasteful=done > least > 0)


def source_lines(results, kernel):
    """Yields (file, [(number, text, line or None), ...]) for each file with accesses: their lines and CONTEXT lines
    around them. None stands for lines left out."""
    by_place = {(line.place.file, line.place.line): line for line in kernel.lines}
    for file in sorted({file for file, _ in by_place}):
        length, shown = len(results.sources.lines(file)), set()
        for _, line in (place for place in by_place if place[0] == file):
            shown |= {line} | set(range(max(1, line - CONTEXT), min(line + CONTEXT, length) + 1))
        rows = []
        for at in sorted(shown):
            rows += [None] if rows and at - 1 not in shown else []
            rows.append((at, results.sources.text(file, at), by_place.get((file, at))))
        yield file, rows


def by_line(results, kernel):
    head = f"{'':6} {'':5} {'requests':>10} {'lanes':>5} {'done':>11} {'':10} {'/least':>6}"
    lines = [head]
    for file, rows in source_lines(results, kernel):
        lines.append(file)
        for at, text, line in (row or ("", "...", None) for row in rows):
            entries = [f"{f.space:6} {f.access:5} {f.requests:>10,} {number(f.lanes):>5} {f.done:>11,} {f.unit:10} "
                       f"{times(f.ratio):>5}{'*' if f.is_wasteful else ' '}" for f in figures(line)] or [""]
            lines.append(f"{entries[0]:{len(head)}} {at:5}  {text}".rstrip())
            lines += [entry.rstrip() for entry in entries[1:]]
    return lines


def kernel_text(results, kernel):
    lines = ["", f"== {kernel.name}" + (f"  ({kernel.range})" if kernel.range else "")]
    lines += [f"{column.name + ':':24}{column.text(kernel)}" for column in COLUMNS[1:]]
    lines += [f"{name + ':':24}{value}" for name, value in facts(kernel)]
    return lines + [""] + by_line(results, kernel) + ["(* more than the least)"] + hazards(results, kernel)

"""The report in a terminal: a row for each kernel; with --kernel, a kernel line by line."""
import math
from dataclasses import dataclass
from typing import Callable

from tables import number, percent, plural, text_table, times

CONTEXT = 2         # lines of source around accesses


# ---- the table of kernels, which page.py shows too

@dataclass(frozen=True)
class Column:
    name: str
    meaning: str
    value: Callable                 # of a kernel; None: unknown
    shown: Callable = str           # a value as text
    short: str = ""                 # the name in a terminal
    most: float = math.inf          # what is more is marked

    def text(self, kernel):
        value = self.value(kernel)
        return "-" if value is None else self.shown(value)


def count(x):
    return f"{x:,}"


COLUMNS = [
    Column("kernel", "The kernel's function; below it the NVTX range in which it was launched.", lambda k: k.name),
    Column("launches", "How often the run launched it with this grid.", lambda k: k.launches, count),
    Column("blocks", "Blocks of a launch. Some were recorded; figures of a launch are extrapolated from those.",
           lambda k: k.blocks, count),
    Column("threads", "Threads of a block.", lambda k: k.threads),
    Column("est. µs", "Estimated time of one launch, from what it moves and multiplies and the card's data sheet. Not "
           "measured.", lambda k: k.us, number),
    Column("all µs", "Estimated time of all its launches.", lambda k: k.us * k.launches, number),
    Column("bound by", "What takes longest: memory, the L2 cache, L1 and shared memory, tensor cores, the softmax "
           "between their products, special functions, or a launch's own time.", lambda k: k.estimate.bound),
    Column("sectors", "32-byte sectors that warps asked for in global memory, over the fewest that could hold what "
           "lanes asked for: 1 is coalesced (CUDA C++ Best Practices Guide, “Coalesced Access to Global Memory”).",
           lambda k: k.sums.sector_ratio, times, most=1.0),
    Column("wavefronts", "Passes that shared memory took, over the fewest: more than 1 are bank conflicts (CUDA C++ "
           "Programming Guide, “Shared Memory”; Best Practices Guide, “Shared Memory and Memory Banks”).",
           lambda k: k.sums.wavefront_ratio, times, "wavefr.", 1.0),
    Column("of cost line", "Bytes to and from memory (attention: FLOPs on tensor cores) over the cost line, which "
           "--costs gives.", lambda k: k.cost_ratio, times, "of cost", 1.05),
    Column("lanes", "Lanes of a warp that take part in an access, of 32, on average: fewer where threads diverge or "
           "rows end (CUDA C++ Programming Guide, “SIMT Architecture”).", lambda k: k.sums.active_lanes, number),
    Column("registers", "Of a thread, by NVIDIA's assembler; ! where some spill to memory.",
           lambda k: k.registers and f"{k.registers}{'!' if k.spills else ''}", short="regs"),
    Column("occupancy", "Warps that fit on a multiprocessor at a time, of the most it can hold (CUDA C++ Best "
           "Practices Guide, “Occupancy”).", lambda k: k.estimate.occupancy.share, percent, "occup."),
    Column("races", "Pairs of lines whose threads access the same memory, one of them storing, with nothing that "
           "orders them.", lambda k: len(k.races), most=0),
]
LEGEND = """sectors, wavefr.: done over the least possible; of cost: bytes (attention: FLOPs) over the section's cost
line; lanes: active of 32; est.: estimated from data sheets, not measured"""


def by_time(results):
    """Kernels, the longest first."""
    return sorted(results.kernels, key=lambda kernel: -kernel.launches * kernel.us)


def overview(results):
    rows = [[column.text(kernel) for column in COLUMNS] for kernel in by_time(results)]
    dangers = [line for kernel in by_time(results) for line in hazards(results, kernel)]
    return (text_table([column.short or column.name for column in COLUMNS], rows) + LEGEND.splitlines() + [""] +
            totals(results) + costly(results) + (["", *dangers] if dangers else []))


def totals(results):
    """Sentences about everything that was launched."""
    step = results.step
    if not results.raw.get("sequence"):
        return []
    parts = ", ".join(f"{name} {number(1e3 * seconds)}" for name, seconds in step.parts.items())
    lines = [f"{number(1e3 * step.seconds)} ms, estimated on {results.card.name} for all that was launched ({parts})"]
    if results.tokens:
        lines.append(f"{step.tokens_per_second(results.tokens):,.0f} tokens/s, estimated for {results.tokens:,} tokens")
    return lines


def costly_rows(results):
    """Place, estimated time of all launches, kernel and source of the lines that take most time."""
    return [[str(found.line.place), number(found.us), found.kernel.name, quoted(results, found.line.place)]
            for found in results.costly_lines(5)]


def costly(results):
    rows = [[place, us, name, text[:60]] for place, us, name, text in costly_rows(results)]
    return ["", "the most expensive lines, estimated µs of all launches", *text_table([""] * 4, rows, left=4)[1:]] \
        if rows else []


# ---- races and uninitialised reads, in sentences

def quoted(results, place):
    return results.sources.text(place.file, place.line).strip()


def at(results, place):
    text = quoted(results, place)
    return f"{place}" + (f"  `{text}`" if text else "")


def actor(access):
    if access.thread < 0:       # by the copy engine or wgmma, asynchronously to all threads
        return f"{access.by} of block {access.block} {access.what}s"
    by = "" if access.by == "thread" else f" ({access.by})"
    return f"thread {access.thread} of block {access.block}{by} {access.what}s"


def hazard_sentence(results, kernel, hazard):
    byte = f"byte {hazard.address} of {hazard.array or hazard.memory + ' memory'}"
    sides = [f"{actor(access)} at {at(results, access.place)}" for access in hazard.accesses]
    count = plural(hazard.count, "time")
    if len(sides) == 1:
        return f"{kernel.name}: uninitialised read of {byte}: {sides[0]} ({count})"
    return f"{kernel.name}: race in {hazard.memory} memory, {byte}: {sides[0]}, {sides[1]}; {hazard.why} ({count})"


def hazards(results, kernel):
    return [hazard_sentence(results, kernel, hazard) for hazard in kernel.races + kernel.uninitialised]


# ---- one kernel

def extent(sizes):
    """1,024, or 3 × 1,024: without the 1s at the end."""
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return " × ".join(map(count, sizes))


def facts(kernel):
    """(name, value, the column that explains it) of what is known of a kernel as a whole."""
    room, bounds = kernel.estimate.occupancy, kernel.estimate.bounds
    longest = sorted(bounds.items(), key=lambda item: -item[1])[:3]
    yield "estimated", f"{number(kernel.us)} µs × {kernel.launches:,}", "est. µs"
    yield "bound by", ", ".join(f"{name} {number(1e6 * time)} µs" for name, time in longest if time), "bound by"
    yield "grid, block", f"{extent(kernel.grid)}, {extent(kernel.block)}", ""
    yield "recorded", f"{plural(kernel.raw['recorded_blocks'], 'block')} of {kernel.blocks:,}", "blocks"
    yield "sectors / least", times(kernel.sums.sector_ratio), "sectors"
    yield "wavefronts / least", times(kernel.sums.wavefront_ratio), "wavefronts"
    yield "active lanes", f"{number(kernel.sums.active_lanes)} of 32", "lanes"
    yield "on a multiprocessor", (f"{plural(room.blocks, 'block')}, bounded by {room.bound}; {percent(room.share)} of "
                                  f"its warps; {number(room.waves)} waves"), "occupancy"
    yield "registers", "unknown" if kernel.registers is None else \
        f"{kernel.registers}, {kernel.spills} bytes spill", "registers"
    yield "shared memory", f"{kernel.shared:,} bytes of a block", ""
    yield "memory moved", f"{number(kernel.moved_bytes / 1e6)} MB a launch", ""
    if kernel.cost:
        unit, scale = ("MB", 1e6) if kernel.cost.unit == "bytes" else ("GFLOPs", 1e9)
        yield "cost line", (f"{kernel.cost.line}: {number(kernel.cost.amount / scale)} {unit}; recorded "
                            f"{times(kernel.cost_ratio)} of that"), "of cost line"
    counts = ", ".join(f"{name} {found:,}" for name, found in kernel.raw.get("counts", {}).items() if found)
    if counts:
        yield "in the recorded blocks", counts, ""


@dataclass(frozen=True)
class Figures:
    """Accesses of a line to one space, of one kind."""
    space: str
    access: str
    unit: str
    requests: int
    lanes: float            # active, of a request
    done: int               # sectors or wavefronts
    ratio: float            # of the least; None without any
    by: tuple               # what made them

    @property
    def is_wasteful(self):
        return self.ratio is not None and self.ratio > 1


def figures(line):
    found = {}
    for site in line.sites:
        found.setdefault((site["space"], site["access"]), []).append(site)
    for (space, access), sites in sorted(found.items()):
        unit = "sectors" if space == "global" else "wavefronts"
        done, least, requests, lanes = (sum(site[key] for site in sites)
                                        for key in (unit, f"least_{unit}", "requests", "lanes"))
        yield Figures(space, access, unit, requests, lanes / max(1, requests), done, done / least if least else None,
                      tuple(sorted({site["by"] for site in sites})))


def source_blocks(results, kernel, context):
    """(file, [[(number, text, line or None), ...], ...]): for each file the accesses' lines with some around them.
    Without the source only the lines themselves."""
    by_place = {(line.place.file, line.place.line): line for line in kernel.lines}
    for file in sorted({file for file, _ in by_place}):
        length, spans = len(results.sources.lines(file)), []
        for line in sorted(at for name, at in by_place if name == file):
            first, last = (max(1, line - context), min(line + context, length)) if length else (line, line)
            if length and spans and first <= spans[-1][1] + 1:
                spans[-1][1] = last
            else:
                spans.append([first, last])
        yield file, [[(at, results.sources.text(file, at), by_place.get((file, at)))
                      for at in range(first, max(first, last) + 1)] for first, last in spans]


def by_line(results, kernel):
    head = f"{'':6} {'':5} {'requests':>10} {'lanes':>5} {'done':>11} {'':10} {'/least':>5}  {'time':>5}"
    lines = [head]
    for file, blocks in source_blocks(results, kernel, CONTEXT):
        lines.append(file)
        for block in blocks:
            for number_, text, line in block:
                source = f"{number_:5}  {text}"
                entries = [f"{f.space:6} {f.access:5} {f.requests:>10,} {number(f.lanes):>5} {f.done:>11,} {f.unit:10} "
                           f"{times(f.ratio):>5}{'*' if f.is_wasteful else ' '}"
                           for f in (figures(line) if line else [])] or [""]
                share = percent(line.time_share) if line else ""
                lines.append(f"{entries[0]:{len(head) - 6}} {share:>5}  {source}".rstrip())
                lines += [entry.rstrip() for entry in entries[1:]]
            lines.append(f"{'':{len(head)}}    ...")
    return lines


def kernel_text(results, kernel):
    lines = ["", f"== {kernel.name}" + (f"  ({kernel.range})" if kernel.range else "")]
    lines += [f"{name + ':':24}{value}" for name, value, _ in facts(kernel)]
    return lines + [""] + by_line(results, kernel) + ["(* more than the least)"] + hazards(results, kernel)

"""The report in a terminal: one row per kernel; with --kernel, one kernel line by line."""
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable

from estimate import RANGE
from results import Sums
from tables import number, plural, text_table, times

MAX_PLACES = 8      # lines or pairs of lines named in a sentence about several hazards
CONTEXT = 2         # lines of source shown around a line with accesses
ERROR = " to ".join(f"{100 * (factor - 1):+.0f}" for factor in RANGE) + " %"


# ---- columns, also of the page

@dataclass(frozen=True)
class Column:
    name: str
    meaning: str
    value: Callable                     # kernel -> value; None: unknown
    shown: Callable = "{:,}".format     # value -> text
    best: float = None                  # the value without waste or errors; None: the column has none

    def text(self, kernel):
        value = self.value(kernel)
        return "-" if value is None else self.shown(value)

    def is_above_best(self, kernel):
        value = self.value(kernel)
        return None not in (self.best, value) and value > self.best + 5e-3


def count_of(kind):
    return lambda kernel: sum(hazard["kind"] == kind for hazard in kernel.hazards)


def checked_words(kernel):
    """Returns which blocks were checked for races and uninitialised reads."""
    checked, blocks = kernel.raw["checked"], f"{kernel.blocks:,}"
    first, between, last, later = (checked[key] for key in ("first", "between", "last", "later"))
    if first + between + last + later >= kernel.launches * kernel.blocks:
        return "all"
    if not kernel.is_complete:
        return "part of a block"
    if first + between + last < kernel.blocks:
        blocks = f"{first:,}" + f", {between:,} more" * (between > 0) + f", the last {last:,}" * (last > 0)
    of = f"of {kernel.blocks:,}, launch 1 of {kernel.launches:,}"
    return (f"{'block' if blocks == '1' else 'blocks 1 to'} {blocks} {of}"
            + f"; {plural(later, 'block')} of launches 2 to {checked['launches']:,}" * (later > 0))


def shape_words(sizes):
    """Returns the sizes of a grid or block without trailing dimensions of 1: 256, 16x16."""
    used = max((i + 1 for i, size in enumerate(sizes) if size > 1), default=1)
    return "x".join(f"{size:,}" for size in sizes[:used])


COLUMNS = [
    Column("kernel", "name of the kernel function; of launches with the same grid also what differs", lambda k: k.label,
           str),
    Column("launches", "launches of the kernel with this grid", lambda k: k.launches),
    Column("blocks", "blocks per launch; figures are extrapolated from the recorded blocks", lambda k: k.grid,
           shape_words),
    Column("threads", "threads per block", lambda k: k.block, shape_words),
    Column(f"est. µs, {ERROR}", "estimated time of one launch, from the GPU's data sheet, with the range that 8 in 10 "
           "measurements were in", lambda k: k.us, number),
    Column("bound by", "the resource that takes longest in the estimate", lambda k: k.bound, str),
    Column("sectors", "sectors of global memory, divided by the minimum; 1.00: coalesced",
           lambda k: k.ratios["sectors"], times, 1),
    Column("wavefr.", "wavefronts of shared memory, divided by the minimum; above 1.00: bank conflicts",
           lambda k: k.ratios["wavefronts"], times, 1),
    Column("traffic", "bytes to and from memory (attention: FLOPs), divided by those of the cost line",
           lambda k: k.ratios["cost"], times, 1),
    Column("lanes", "active lanes per request, on average; at most 32", lambda k: k.sums.active_lanes, number),
    Column("regs", "registers per thread, as ptxas reports them; !: some spill to memory",
           lambda k: k.registers and f"{k.registers}{'!' if k.spills else ''}", str),
    Column("races", "pairs of source lines that race, of each array", count_of("race"), best=0),
    Column("uninit.", "source lines that read uninitialised shared memory", count_of("uninitialised read"), best=0),
    Column("bounds", "source lines with an access out of bounds", count_of("access out of bounds"), best=0),
    Column("diverg.", "barriers and shuffles that not all their threads reach", count_of("divergent barrier"), best=0),
    Column("checked", "blocks that were checked for races and uninitialised reads; accesses out of bounds are found in "
           "every block", checked_words, str),
]
LEGEND = """sectors, wavefr.: divided by the minimum; traffic: bytes (attention: FLOPs) divided by those of the cost
line; lanes: active lanes, of 32; est.: from data sheets;
8 in 10 measurements that no constant was fitted to were in the range that est. states (validation.md); checked: blocks,
for races and uninitialised reads; bounds: accesses out of bounds, in all blocks"""


def missing(results):
    """Returns a sentence about columns that are unknown for all kernels; "" if there is none."""
    if not results.sass:
        return "regs: unknown without nvcc"
    return "" if any("loops" in code for code in results.sass.values()) else "loops: unknown without nvdisasm"


def totals(results):
    """Returns sentences about the sum of all launches."""
    seconds = sum(results.step.values())
    parts = ", ".join(f"{name} {number(1e3 * part)}" for name, part in results.step.items())
    least, most = (number(1e3 * factor * seconds) for factor in RANGE)
    lines = [f"All launches: {least} to {most} ms, estimated on {results.card.name}: {number(1e3 * seconds)} ({parts})"]
    if results.tokens:
        rate = results.tokens / seconds
        lines.append(f"{results.tokens:,} tokens: {rate / RANGE[1]:,.0f} to {rate / RANGE[0]:,.0f} tokens/s, "
                     f"estimated: {rate:,.0f}")
    return lines


def red(kernel, line):
    """Marks the row of a kernel with hazards, on a terminal that has colours."""
    return f"\033[31m{line}\033[0m" if kernel.hazards and sys.stdout.isatty() and "NO_COLOR" not in os.environ else line


def overview(results):
    columns = [column for column in COLUMNS if any(column.value(kernel) is not None for kernel in results.kernels)]
    head, *rows = text_table([column.name for column in columns],
                             [[column.text(kernel) for column in columns] for kernel in results.kernels])
    sentences = [*hazard_summaries(results)]
    return [head, *map(red, results.kernels, rows), LEGEND, *filter(None, [missing(results)]), "",
            *totals(results), *([""] if sentences else []), *sentences]


# ---- races, uninitialised reads and accesses out of bounds

def by_name(by):
    """Returns a site's "by" as the reports print it."""
    return "TMA" if by == "copy engine" else by


def access_words(results, access):
    actor = by_name(access["by"])       # TMA and wgmma access memory asynchronously to all threads
    if access["thread"] >= 0:
        actor = f"thread {access['thread']}" + ("" if access["by"] == "thread" else f" ({actor})")
    text = results.quoted(access["file"], access["line"])
    verb = "" if access["access"] == "index" else f" {access['access']}s"
    return (f"{actor} of block {access['block']}{verb} at {access['file']}:{access['line']}"
            + (f"  `{text}`" if text else ""))


def owner_words(hazard):
    """Returns the name of an array or variable, or the size of an allocation and the line that allocates it."""
    size = plural(hazard["bytes"], "byte")
    if hazard["array"]:
        return f"the {size} of {hazard['array']}" if hazard["kind"] == "access out of bounds" else hazard["array"]
    if hazard["allocated"]:
        file, line = hazard["allocated"]
        at = f"line {line}" if file == hazard["accesses"][0]["file"] else f"{file}:{line}"
        return f"the {size} allocated at {at}"
    return f"the {size} of dynamic shared memory" if hazard["memory"] == "shared" else f"{hazard['memory']} memory"


def hazard_sentence(results, kernel, hazard):
    kind, why = hazard["kind"], hazard["why"]
    sides = ", ".join(access_words(results, access) for access in hazard["accesses"])
    byte = f"byte {hazard['address']} of {owner_words(hazard)}"
    if kind == "divergent barrier":
        words = f"{kind}: {sides}: {why}"
    elif kind == "race":
        words = f"race in {hazard['memory']} memory, {byte}: {sides}; {why}"
    else:
        where = ", ".join(filter(None, [why, byte if hazard["bytes"] else ""]))
        words = f"{kind}{' of' if kind == 'uninitialised read' else ':'} {where}: {sides}"
    return f"{kernel.name}: {words} ({plural(hazard['count'], 'time')})"


def other_hazards(kernel, first, others):
    """Returns a sentence that names the lines of further hazards of the same kind and memory."""
    home = first["accesses"][0]["file"]
    words = [[str(access["line"]) if access["file"] == home else f"{access['file']}:{access['line']}"
              for access in sorted(other["accesses"], key=lambda access: access["line"])] for other in others]
    places = list(dict.fromkeys(" and ".join(dict.fromkeys(pair)) for pair in words))
    more = f", and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    return (f"{kernel.name}: {plural(len(others), 'more ' + first['kind'])} of "
            f"{owner_words(first)}: "
            f"{'line' if places[0].isdigit() and len(places) == 1 else 'lines'} {', '.join(places[:MAX_PLACES])}{more}")


def hazard_summary(results, kernel):
    """Yields for each kind of hazard and each array the sentence of the first one, and one about all others: a missing
    barrier causes a race for each pair of lines around it. The page has them all."""
    groups = {}
    for hazard in kernel.hazards:
        groups.setdefault((hazard["kind"], hazard["memory"], owner_words(hazard)), []).append(hazard)
    for first, *others in groups.values():
        yield hazard_sentence(results, kernel, first)
        if others:
            yield other_hazards(kernel, first, others)


def hazard_summaries(results):
    """Yields the summaries of all kernels: of instances and launches of a kernel with the same hazards, that of the
    first."""
    alike = {}          # (name, lines of the hazards) -> [kernel, ...]
    for kernel in results.kernels:
        lines = {(access["file"], access["line"]) for hazard in kernel.hazards for access in hazard["accesses"]}
        if lines:
            alike.setdefault((kernel.name.split("<")[0], frozenset(lines)), []).append(kernel)
    for (name, _), (kernel, *others) in alike.items():
        yield from hazard_summary(results, kernel)
        if others:
            yield f"{name}: the same in {plural(len(others), 'more row')} of the table"


# ---- one kernel

def facts(kernel):
    """Yields (name, value) of the facts about a kernel that are not in the table."""
    longest = sorted(kernel.bounds.items(), key=lambda item: -item[1])[:3]
    yield "estimated", ", ".join(f"{name} {number(1e6 * time)} µs" for name, time in longest if time)
    yield "grid, block", ", ".join(" × ".join(map(str, sizes)) for sizes in (kernel.grid, kernel.block))
    yield "recorded", f"{plural(kernel.raw['recorded_blocks'], 'block')} of {kernel.blocks:,}"
    yield "shared memory", f"{kernel.shared:,} bytes per block"
    yield "memory traffic", f"{number(kernel.moved_bytes / 1e6)} MB per launch"
    if kernel.cost:
        unit, amount, line = kernel.cost
        yield "cost line", f"{line}: {number(amount / 1e6)} million {unit}"
    if (loop := kernel.main_loop) and loop["depth"] > 0:
        loads = "TMA copies" if loop["tma"] else (
            f"in an iteration a warp loads {plural(loop['bytes'], 'byte')} in "
            f"{plural(loop['round_trips'], 'round trip')} and issues "
            f"{plural(loop['counts']['all'], 'instruction')}")
        yield "main loop", "{}:{}-{}: ".format(*loop["lines"]) + loads


def figures(line):
    """Yields the figures of a line's loads and stores, one for each memory space and kind of access. ratio: count of
    sectors or wavefronts divided by the minimum; None if the minimum is 0."""
    found = {}
    for site in line.sites if line else ():
        found.setdefault((site["space"], site["access"]), []).append(site)
    for (space, access), sites in sorted(found.items()):
        unit, sums = "sectors" if space == "global" else "wavefronts", Sums(sites)
        yield SimpleNamespace(space=space, access=access, by=sorted({by_name(site["by"]) for site in sites}), unit=unit,
                              requests=sums.requests, lanes=sums.lanes / max(1, sums.requests),
                              count=getattr(sums, unit), ratio=sums.ratios[unit])


def source_lines(results, kernel):
    """Yields (file, rows) for each file with accesses: rows (number, text, Line or None) for their lines and CONTEXT
    lines around them. A row None stands for omitted lines."""
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
    head = f"{'':6} {'':5} {'requests':>10} {'lanes':>5} {'count':>11} {'of':10} {'ratio':>6}"
    lines = [head]
    for file, rows in source_lines(results, kernel):
        lines.append(file)
        for at, text, line in (row or ("", "...", None) for row in rows):
            entries = [f"{f.space:6} {f.access:5} {f.requests:>10,} {number(f.lanes):>5} {f.count:>11,} {f.unit:10} "
                       f"{times(f.ratio):>5}{'*' if (f.ratio or 0) > 1 else ' '}" for f in figures(line)] or [""]
            lines.append(f"{entries[0]:{len(head)}} {at:5}  {text}".rstrip())
            lines += [entry.rstrip() for entry in entries[1:]]
    return lines


def kernel_text(results, kernel):
    lines = ["", f"== {kernel.name}" + (f"  ({kernel.range})" if kernel.range else "")]
    lines += [f"{column.name + ':':24}{column.text(kernel)}" for column in COLUMNS[1:]]
    lines += [f"{name + ':':24}{value}" for name, value in facts(kernel)]
    return [*lines, "", *by_line(results, kernel), "(ratio: count divided by the minimum; * above 1)",
            *hazard_summary(results, kernel)]

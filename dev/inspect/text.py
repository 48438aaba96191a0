"""The report in a terminal: a row for each kernel; with --kernel, a kernel line by line."""

from claims import BYTES

CONTEXT = 2         # lines of source around accesses
WIDE_RATIO = 1.0    # more than that is marked


def number(x, digits=3):
    """Three digits that count: 0.0123, 12.0, 1,230."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}"


def times(x):
    """A ratio, to be compared with 1."""
    return "-" if x is None else f"{x:.2f}"


def percent(x):
    return "-" if x is None else f"{100 * x:.0f} %"


def plural(count, thing):
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def amount(claim):
    """What a cost line predicts."""
    return f"{number(claim.amount / 1e6)} MB" if claim.unit == BYTES else f"{number(claim.amount / 1e9)} GFLOPs"


def table(head, rows):
    """The first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells]


COLUMNS = ["kernel", "launches", "blocks", "threads", "est. us", "bound by", "sectors", "wavefr.", "of cost", "lanes",
           "regs", "occup.", "races"]


def row(kernel):
    sums, spilt = kernel.sums, "!" if kernel.spills else ""
    return [kernel.name, f"{kernel.launches:,}", f"{kernel.blocks:,}", kernel.threads, number(kernel.us),
            kernel.estimate.bound, times(sums.sector_ratio), times(sums.wavefront_ratio), times(kernel.claim_ratio),
            number(sums.active_lanes), f"{kernel.registers}{spilt}" if kernel.registers else "-",
            percent(kernel.estimate.occupancy.share), len(kernel.races)]


LEGEND = """sectors, wavefr.: done over the least that would do; of cost: bytes (attention: FLOPs) over the section's
cost line; lanes: active of 32; est.: estimated from data sheets, not measured"""


def overview(results):
    kernels = sorted(results.kernels, key=lambda kernel: -kernel.launches * kernel.us)
    dangers = [line for kernel in kernels for line in hazards(results, kernel)]
    return (table(COLUMNS, map(row, kernels)) + LEGEND.splitlines() + [""] + whole(results) + costly(results) +
            (["", *dangers] if dangers else []))


def whole(results):
    step = results.step
    if not results.raw.get("sequence"):
        return []
    parts = ", ".join(f"{name} {number(1e3 * seconds)}" for name, seconds in step.parts.items())
    lines = [f"all of it, estimated on {results.card.name}: {number(1e3 * step.seconds)} ms ({parts})"]
    if results.tokens:
        lines.append(f"estimated: {step.tokens_per_second(results.tokens):,.0f} tokens/s at {results.tokens:,} tokens")
    return lines


def costly(results):
    """The lines on which most of the time goes."""
    rows = [[f"{found.line.place}", number(found.us), found.kernel.name,
             results.sources.text(found.line.place.file, found.line.place.line).strip()[:60]]
            for found in results.costly_lines(5)]
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return ["", "the most expensive lines, estimated us of all launches"] + [
        f"  {place:{widths[0]}}  {us:>{widths[1]}}  {name:{widths[2]}}  {text}" for place, us, name, text in rows]


# ---- races and uninitialised reads, in sentences

def quoted(results, place):
    text = results.sources.text(place.file, place.line).strip()
    return f"{place}" + (f"  `{text}`" if text else "")


def who(access):
    if access.thread < 0:       # the copy engine's or wgmma's, at a moment that is no thread's
        return f"{access.by} of block {access.block} {access.what}s"
    by = "" if access.by == "thread" else f" ({access.by})"
    return f"thread {access.thread} of block {access.block}{by} {access.what}s"


def race_sentence(results, kernel, race):
    byte = f"byte {race.address}" + (f" of {race.array}" if race.array else "")
    return (f"{kernel.name}: race in {race.memory} memory, {byte}: {who(race.later)} at "
            f"{quoted(results, race.later.place)}, {who(race.earlier)} at {quoted(results, race.earlier.place)}; "
            f"{race.why} ({plural(race.count, 'time')})")


def uninitialised_sentence(results, kernel, read):
    return (f"{kernel.name}: {who(read.access)} byte {read.address} of {read.array or 'shared memory'} at "
            f"{quoted(results, read.access.place)}, which nobody has written ({plural(read.count, 'time')})")


def hazards(results, kernel):
    return ([race_sentence(results, kernel, race) for race in kernel.races] +
            [uninitialised_sentence(results, kernel, read) for read in kernel.uninitialised])


# ---- one kernel

def facts(results, kernel):
    room, bounds = kernel.estimate.occupancy, kernel.estimate.bounds
    registers = "unknown" if kernel.registers is None else f"{kernel.registers}" + (
        f", spills {kernel.spills} bytes" if kernel.spills else "")
    longest = sorted(bounds.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{name} {count:,}" for name, count in kernel.raw.get("counts", {}).items() if count)
    lines = [f"launched {plural(kernel.launches, 'time')} with grid {kernel.grid}, block {kernel.block}, "
             f"{kernel.shared:,} bytes of shared memory; recorded: {plural(kernel.raw['recorded_blocks'], 'block')}",
             f"registers {registers}; {plural(room.blocks, 'block')} on a multiprocessor at a time, bounded by "
             f"{room.bound}: {percent(room.share)} of its warps; {number(room.waves)} waves",
             f"estimated {number(kernel.us)} us, bound by {kernel.estimate.bound}: "
             + ", ".join(f"{name} {number(1e6 * seconds)}" for name, seconds in longest if seconds)]
    if kernel.claim:
        lines.append(f"cost line: {kernel.claim.cost}: {amount(kernel.claim)}; "
                     f"recorded {times(kernel.claim_ratio)} of that")
    return lines + ([f"in the recorded blocks: {counts}"] if counts else [])


def accesses(line):
    """Figures of a line, by space and kind: "global load  1.00 of 4,096 sectors"."""
    found = {}
    for site in line.sites:
        found.setdefault((site["space"], site["access"]), []).append(site)
    for (space, access), sites in sorted(found.items()):
        unit = "sectors" if space == "global" else "wavefronts"
        done, least = (sum(site[key] for site in sites) for key in (unit, f"least_{unit}"))
        yield space, access, done, least, sites


def blocks_of_lines(lines, source, context=CONTEXT):
    """Lines of one file with some around them: ranges of line numbers. Without its source only the lines."""
    if not source:
        return [[line] for line in sorted(lines)]
    spans = []
    for line in sorted(lines):
        if spans and line - context <= spans[-1][1] + 1:
            spans[-1][1] = line + context
        else:
            spans.append([max(1, line - context), line + context])
    return [range(first, min(last, len(source)) + 1) for first, last in spans]


def figures(line):
    """What stands beside a line of source, an entry for each kind of access."""
    for space, access, done, least, sites in accesses(line):
        requests, lanes = (sum(site[key] for site in sites) for key in ("requests", "lanes"))
        each = number(lanes / requests if requests else None)
        mark = "*" if least and done > WIDE_RATIO * least else " "
        unit = "sectors" if space == "global" else "wavefr."
        yield (f"{space:6} {access:5} {requests:>10,} {each:>5} {done:>11,} {unit} "
               f"{times(done / least if least else None):>5}{mark}")


def by_line(results, kernel):
    by_place = {(line.place.file, line.place.line): line for line in kernel.lines}
    lines = [f"{'':6} {'':5} {'requests':>10} {'lanes':>5} {'done':>11} {'':7} {'/least':>5}  {'time':>5}"]
    empty = " " * len(lines[0])
    for file in sorted({file for file, _ in by_place}):
        lines.append(f"{file}")
        source = results.sources.lines(file)
        for numbers in blocks_of_lines([at for name, at in by_place if name == file], source):
            for at in numbers:
                text = f"{at:5}  {results.sources.text(file, at)}".rstrip()
                line = by_place.get((file, at))
                if not line:
                    lines.append(f"{empty}  {text}")
                    continue
                for i, entry in enumerate(figures(line)):
                    share = percent(line.time_share) if i == 0 else ""
                    lines.append(f"{entry} {share:>5}  {text if i == 0 else ''}".rstrip())
            lines.append(f"{empty}    ...")
    return lines


def kernel_text(results, kernel):
    lines = ["", f"== {kernel.name}" + (f"  ({kernel.range})" if kernel.range else ""), *facts(results, kernel), ""]
    return lines + by_line(results, kernel) + ["(* more than the least)"] + hazards(results, kernel)

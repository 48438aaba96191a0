"""report.html: the same figures as the terminal's, with pictures; one file that needs no server."""
import html

from pictures import Gallery, lane_styles
from text import accesses, amount, blocks_of_lines, hazards, number, percent, plural, times

CONTEXT = 3

# What each figure means: titles of columns and the legend say it in these words.
MEANING = {
    "kernel": "The kernel's function; below it the NVTX range in which it was launched.",
    "launches": "How often the run launched it with this grid.",
    "blocks": "Blocks of a launch. Few of them were recorded; figures of a launch are extrapolated from those.",
    "threads": "Threads of a block.",
    "est. µs": "Estimated time of one launch, from what it moves and multiplies and the card's data sheet. Not "
               "measured.",
    "all µs": "Estimated time of all its launches.",
    "bound by": "What takes longest: memory, the L2 cache, L1 and shared memory, tensor cores, the softmax between "
                "their products, or a launch's own time.",
    "sectors": "32-byte sectors that warps asked for in global memory, over the fewest that could hold what lanes "
               "asked for: 1 is coalesced (CUDA C++ Best Practices Guide, “Coalesced Access to Global Memory”).",
    "wavefronts": "Passes that shared memory took, over the fewest: more than 1 are bank conflicts (CUDA C++ "
                  "Programming Guide, “Shared Memory”; Best Practices Guide, “Shared Memory and Memory Banks”).",
    "of cost line": "Bytes to and from memory (attention: FLOPs on tensor cores) over what the section's cost line in "
                    "the source predicts.",
    "lanes": "Lanes of a warp that take part in an access, of 32, on average: fewer where threads diverge or rows end "
             "(CUDA C++ Programming Guide, “SIMT Architecture”).",
    "registers": "Of a thread, as NVIDIA's assembler says; ! where some spill to memory.",
    "occupancy": "Warps that fit on a multiprocessor at a time, of the most it can hold (CUDA C++ Best Practices "
                 "Guide, “Occupancy”).",
    "races": "Pairs of lines whose threads access the same memory, one of them storing, with nothing that orders them.",
    "time": "The line's share of its kernel's estimated time, by its share of what the kernel is bound by.",
}
PICTURES = """Global memory: above, the lanes of the worst request; below, the 32-byte sectors that it fetches, with
gaps between lines of 128 bytes. Hatched: fetched and not asked for. Shared memory: a column for each of 32 banks, a row
for each 128 bytes; numbers are lanes, + where several access the same word, which costs nothing. 8-byte accesses go by
half warps, 16-byte ones by quarters; framed in red are banks that those need in several rows, each of which is a pass
(wavefront) of its own."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --paper: #fdfdfb; --panel: #f3f3ef; --rule: #dcdcd6;
  --bad: #b3261e; --bad-ground: #fbe6e3; --good: #256a3a; --accent: #2257a5; --hatch: #c9c9c2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e5e8; --soft: #9aa4ae; --paper: #15181b; --panel: #1f2327;
  --rule: #363c42; --bad: #ff9389; --bad-ground: #42211f; --good: #86d19b; --accent: #8ab8ff; --hatch: #4c535a; } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px;
  margin: 0 auto; padding: 1em 16px 4em; }
h1 { font-size: 1.5em; line-height: 1.2; margin: .4em 0 .2em } h2 { font-size: 1.15em; margin: 2em 0 .5em }
p { margin: .5em 0 } .soft, figcaption { color: var(--soft) }
code, .source { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace }
a { color: var(--accent) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: .32em .5em; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { background: var(--panel); font-weight: 600 } .sortable th { cursor: pointer }
th:first-child, td:first-child, .words, .wide { text-align: left } td.wide { white-space: normal; min-width: 20em }
.sticky th:first-child, .sticky td:first-child { position: sticky; left: 0; background: var(--paper); z-index: 1 }
.sticky th:first-child { background: var(--panel) }
td small { display: block; color: var(--soft); max-width: 17em; overflow: hidden; text-overflow: ellipsis }
td a { display: block; max-width: 17em; overflow: hidden; text-overflow: ellipsis }
.bad { color: var(--bad); font-weight: 600 }
details > summary { cursor: pointer }
.kernel { border: 1px solid var(--rule); border-radius: 8px; margin: .6em 0 }
.kernel > summary { padding: .6em .9em; overflow-wrap: anywhere } .kernel[open] > summary { border-bottom: 1px solid
  var(--rule) }
.kernel > summary b { font-weight: 600; margin-right: .5em } .kernel > div { padding: .6em .9em 1em }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: .4em 1em;
  margin: .3em 0 1em }
.facts div { border-left: 3px solid var(--rule); padding-left: .6em; font-size: 13.5px }
.facts span { display: block; color: var(--soft); font-size: 12px }
.hazard { background: var(--bad-ground); border-left: 3px solid var(--bad); padding: .45em .8em; margin: .4em 0;
  overflow-wrap: anywhere; font-size: 14px }
.source { background: var(--panel); border-radius: 6px; padding: .4em 0; margin: .5em 0 }
.source .file { padding: 0 .8em .2em; color: var(--soft) }
.row { display: grid; grid-template-columns: 4.2em minmax(0, 1fr) auto; column-gap: .8em; padding: 0 .8em 0 0 }
.row i { font-style: normal; color: var(--soft); text-align: right; white-space: nowrap; user-select: none }
.row code { white-space: pre-wrap; overflow-wrap: anywhere }
.context { color: var(--soft) }
.line > summary { list-style: none } .line > summary::-webkit-details-marker { display: none }
.line > summary i::before { content: "▸ " } .line[open] > summary i::before { content: "▾ " }
.line > summary:hover { background: var(--rule) }
.figures { text-align: right; font: 12px/1.55 system-ui, sans-serif; font-variant-numeric: tabular-nums }
.figures span { display: inline-block; margin-left: 1em; white-space: nowrap }
.figures div { display: block }
.worst { box-shadow: inset 3px 0 var(--bad) }
.sites { padding: .5em .8em .8em 1em; background: var(--paper); border: 1px solid var(--rule); border-width: 1px 0;
  font: 13.5px/1.45 system-ui, sans-serif }
.sites p { margin: .5em 0 .1em }
figure { margin: .3em 0 1em } figcaption { font-size: 12.5px; margin-bottom: .2em }
.gap { color: var(--soft); padding-left: 4.2em }
.pic { width: 100%; min-width: 580px; max-width: 860px; display: block; overflow: visible }
.pic.defs { position: absolute; min-width: 0; width: 0; height: 0 }
/* Drawings are shown by <use>: a rule sees what is in the drawing, .d, and nothing around it. */
.d rect { fill: currentColor; stroke: var(--paper); stroke-width: .8 } .d .cell { stroke: none }
.d path { stroke: currentColor; fill: none }
.d .unused { fill: url(#hatch); stroke: var(--soft); stroke-width: .7 }
.ground { fill: var(--paper) } .stripe { stroke: var(--hatch); stroke-width: 2.5 }
.d .grid { stroke: var(--rule); stroke-width: .8; fill: var(--panel) }
.d text { font: 9.5px system-ui, sans-serif; fill: #14171a; text-anchor: middle }
.d .s, .d .e, .d .h, .d .off { fill: var(--soft) } .d .s { text-anchor: start } .d .h { font-size: 8.5px }
.d .e { text-anchor: end; font-weight: 600 }
.d text.bad { fill: var(--bad) } .d rect.bad { stroke: var(--bad); stroke-width: 1.6 }
.legend dt { font-weight: 600; margin-top: .5em } .legend dd { margin: 0 0 0 1em }
@media (max-width: 900px) { .row { grid-template-columns: 3.8em minmax(0, 1fr); column-gap: .5em }
  .figures { grid-column: 2; text-align: left } .figures span { margin: 0 1em 0 0 } .gap { padding-left: 3.8em } }
@media (max-width: 480px) { body { padding: .6em 10px 3em } .kernel > div { padding: .5em .5em .8em }
  code, .source { font-size: 11.5px } td a, td small { max-width: 9.5em } }
"""

# Sorts the table by the column that is clicked, and opens the kernel that a link leads to.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.onclick = () => {
    const down = head.dataset.order !== "down";
    heads.forEach(other => delete other.dataset.order);
    head.dataset.order = down ? "down" : "up";
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => isNaN(a - b) ? a.localeCompare(b) : a - b;
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b)) * (down ? -1 : 1));
    table.tBodies[0].append(...rows);
  });
}
const show = () => { const at = location.hash && document.querySelector(location.hash); if (at) at.open = true; };
addEventListener("hashchange", show);
show();
"""


def escaped(words):
    return html.escape(str(words))


def title(name):
    return f' title="{escaped(MEANING[name])}"' if name in MEANING else ""


def ratio_cell(ratio, most=1.0):
    worse = ratio is not None and ratio > most + 5e-3
    value = -1 if ratio is None else f"{ratio:.4f}"
    return f'<td data-value={value}{" class=bad" if worse else ""}>{times(ratio)}</td>'


def value_cell(value, words):
    return f"<td data-value={-1 if value is None else value}>{escaped(words)}</td>"


# ---- overview

COLUMNS = ["kernel", "launches", "blocks", "threads", "est. µs", "all µs", "bound by", "sectors", "wavefronts",
           "of cost line", "lanes", "registers", "occupancy", "races"]


def overview_row(index, kernel):
    room = kernel.estimate.occupancy
    name = f'<a href="#k{index}">{escaped(kernel.name)}</a><small>{escaped(kernel.range)}</small>'
    cells = [f'<td data-value="{escaped(kernel.name)}">{name}</td>',
             value_cell(kernel.launches, f"{kernel.launches:,}"),
             value_cell(kernel.blocks, f"{kernel.blocks:,}"), value_cell(kernel.threads, kernel.threads),
             value_cell(f"{kernel.us:.3f}", number(kernel.us)),
             value_cell(f"{kernel.us * kernel.launches:.3f}", number(kernel.us * kernel.launches)),
             f"<td class=words>{kernel.estimate.bound}</td>", ratio_cell(kernel.sums.sector_ratio),
             ratio_cell(kernel.sums.wavefront_ratio), ratio_cell(kernel.claim_ratio, 1.05),
             value_cell(kernel.sums.active_lanes, number(kernel.sums.active_lanes)),
             value_cell(kernel.registers, f"{kernel.registers or '-'}{'!' if kernel.spills else ''}"),
             value_cell(f"{room.share:.3f}", percent(room.share)),
             f"<td{' class=bad' if kernel.races else ''}>{len(kernel.races)}</td>"]
    return f"<tr>{''.join(cells)}</tr>"


def overview(results):
    heads = "".join(f'<th{title(name)}{" class=words" if name == "bound by" else ""}>{name}</th>' for name in COLUMNS)
    order = sorted(enumerate(results.kernels), key=lambda item: -item[1].launches * item[1].us)
    rows = "".join(overview_row(index, kernel) for index, kernel in order)
    return (f'<h2>Kernels</h2><p class=soft>A click on a column sorts by it.</p><div class=scroll>'
            f'<table class="sortable sticky"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>')


def table(heads, rows, words=False):
    """The last column, words, begins at the left as the first does."""
    def line(tag, cells):
        last = f"<{tag} class=wide>" if words else f"<{tag}>"
        return "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells[:-1]) + \
            f"{last}{escaped(cells[-1])}</{tag}></tr>"
    return f'<div class=scroll><table>{line("th", heads)}{"".join(line("td", row) for row in rows)}</table></div>'


def whole(results):
    step, parts = results.step, []
    if results.raw.get("sequence"):
        each = ", ".join(f"{name} {number(1e3 * seconds)} ms" for name, seconds in step.parts.items())
        parts.append(f"<p><b>{number(1e3 * step.seconds)} ms</b>, estimated, for all that was launched: {each}.</p>")
        if results.tokens:
            parts.append(f"<p><b>{step.tokens_per_second(results.tokens):,.0f} tokens/s</b>, estimated, at "
                         f"{results.tokens:,} tokens.</p>")
    rows = [[str(found.line.place), number(found.us), found.kernel.name,
             results.sources.text(found.line.place.file, found.line.place.line).strip()]
            for found in results.costly_lines(5)]
    if rows:
        parts.append("<h2>The most expensive lines</h2>" + table(
            ["line", "est. µs, all launches", "kernel", "source"], rows, words=True))
    return "".join(parts)


def matmuls(results):
    rows = [[f"{m['m']:,} × {m['n']:,} × {m['k']:,}", m["type"], m.get("epilogue", "none"), m["launches"],
             number(1e6 * seconds), number(2 * m["m"] * m["n"] * m["k"] / seconds / 1e12)]
            for m, seconds in zip(results.raw.get("matmuls", []), results.step.matmul_seconds)]
    heads = ["M × N × K", "type", "epilogue", "launches", "est. µs", "est. TFLOP/s"]
    return f"<h2>Matmuls</h2><p class=soft>By cuBLASLt: not looked into.</p>{table(heads, rows)}" if rows else ""


# ---- a kernel

def fact(name, value, explained=""):
    return f"<div{title(explained)}><span>{name}</span>{escaped(value)}</div>"


def extent(sizes):
    """1024, or 3 × 1024: without the 1s at the end."""
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return " × ".join(f"{size:,}" for size in sizes)


def facts(kernel):
    room = kernel.estimate.occupancy
    bounds = sorted(kernel.estimate.bounds.items(), key=lambda item: -item[1])[:3]
    shown = [fact("estimated", f"{number(kernel.us)} µs × {kernel.launches:,}", "est. µs"),
             fact("bound by", ", ".join(f"{name} {number(1e6 * seconds)} µs" for name, seconds in bounds if seconds),
                  "bound by"),
             fact("grid, block", f"{extent(kernel.grid)}, {extent(kernel.block)}"),
             fact("recorded", f"{plural(kernel.raw['recorded_blocks'], 'block')} of {kernel.blocks:,}", "blocks"),
             fact("sectors / least", times(kernel.sums.sector_ratio), "sectors"),
             fact("wavefronts / least", times(kernel.sums.wavefront_ratio), "wavefronts"),
             fact("active lanes", f"{number(kernel.sums.active_lanes)} of 32", "lanes"),
             fact("on a multiprocessor", f"{plural(room.blocks, 'block')}, bounded by {room.bound}; "
                  f"{percent(room.share)} of its warps; {number(room.waves)} waves", "occupancy"),
             fact("registers", "unknown" if kernel.registers is None else
                  f"{kernel.registers}, {kernel.spills} bytes spill", "registers"),
             fact("shared memory", f"{kernel.shared:,} bytes of a block"),
             fact("memory moved", f"{number(kernel.moved_bytes / 1e6)} MB a launch")]
    if kernel.claim:
        shown.append(fact("cost line", f"{kernel.claim.cost}: {amount(kernel.claim)}; "
                          f"recorded {times(kernel.claim_ratio)} of that", "of cost line"))
    counts = ", ".join(f"{name} {count:,}" for name, count in kernel.raw.get("counts", {}).items() if count)
    if counts:
        shown.append(fact("in the recorded blocks", counts))
    return f"<div class=facts>{''.join(shown)}</div>"


def figures(line):
    """Beside a line: an entry for each kind of access."""
    entries = []
    for space, access, done, least, sites in accesses(line):
        unit = "sectors" if space == "global" else "wavefronts"
        lanes = sum(site["lanes"] for site in sites) / max(1, sum(site["requests"] for site in sites))
        worse = least and done > least
        name = f"{space} {access}"
        if any(site["by"] != "thread" for site in sites):
            name += f" ({', '.join(sorted({site['by'] for site in sites}))})"
        entries.append(f"<div><span>{name}</span><span{title('lanes')}>{lanes:.0f} lanes</span>"
                       f"<span{title(unit)}{' class=bad' if worse else ''}>{times(done / least if least else None)} × "
                       f"{unit}</span></div>")
    share = f"<div><span{title('time')}>{percent(line.time_share)} of the time</span></div>" \
        if line.time_share >= 0.005 else ""
    return f"<div class=figures>{''.join(entries)}{share}</div>"


def site_words(site, line):
    unit = "sectors" if site["space"] == "global" else "wavefronts"
    via = f", in {', '.join(line.place.via)}" if line.place.via else ""
    part = f", part {site['part'] + 1}" if site["part"] else ""
    moved = f"; {site.get('dram_sectors', 0):,} sectors from memory, {site.get('l1_hits', 0):,} found in L1" \
        if site["space"] == "global" else ""
    by = "" if site["by"] == "thread" else f" by {site['by']}"
    return (f"<p><b>{site['space']} {site['access']}{by}</b> of {site['bytes_per_lane']} bytes a lane{part}"
            f"{escaped(via)}: {site['requests']:,} requests, {site[unit]:,} {unit}, {site[f'least_{unit}']:,} at "
            f"least{moved}. Its worst request:</p>")


def source_line(results, kernel, at, text, line, gallery):
    if not line:
        return f"<div class='row context'><i>{at}</i><code>{escaped(text)}</code></div>"
    worse = any(least and done > least for _, _, done, least, _ in accesses(line))
    pictures = "".join(site_words(site, line) + gallery.figure(site) for site in line.sites)
    return (f"<details class=line><summary class='row{' worst' if worse else ''}'><i>{at}</i>"
            f"<code>{escaped(text)}</code>{figures(line)}</summary><div class=sites>{pictures}</div></details>")


def dedented(lines):
    filled = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    return [line[min(filled, default=0):] for line in lines]


def source(results, kernel, gallery):
    by_place = {(line.place.file, line.place.line): line for line in kernel.lines}
    parts = []
    for file in sorted({file for file, _ in by_place}):
        lines, rows = results.sources.lines(file), []
        for numbers in blocks_of_lines([at for name, at in by_place if name == file], lines, CONTEXT):
            texts = dedented([results.sources.text(file, at) for at in numbers])
            rows.append("".join(source_line(results, kernel, at, text, by_place.get((file, at)), gallery)
                                for at, text in zip(numbers, texts)))
        blocks = "<div class=gap>⋯</div>".join(rows)
        parts.append(f"<div class=source><div class=file>{escaped(file)}</div>{blocks}</div>")
    return "".join(parts)


def badges(kernel):
    found = []
    if kernel.races:
        found.append(plural(len(kernel.races), "race"))
    if kernel.uninitialised:
        found.append(plural(len(kernel.uninitialised), "uninitialised read"))
    for name, ratio in (("sectors", kernel.sums.sector_ratio), ("wavefronts", kernel.sums.wavefront_ratio)):
        if ratio and ratio > 1.005:
            found.append(f"{times(ratio)} × {name}")
    return f" <span class=bad>{', '.join(found)}</span>" if found else ""


def section(results, index, kernel, gallery):
    hazard = "".join(f"<div class=hazard>{escaped(sentence)}</div>" for sentence in hazards(results, kernel))
    name = f"<b>{escaped(kernel.name)}</b>"
    where = f" <span class=soft>{number(kernel.us)} µs × {kernel.launches:,}, {kernel.estimate.bound}</span>"
    return (f"<details class=kernel id=k{index}><summary>{name}{where}{badges(kernel)}</summary><div>{hazard}"
            f"{facts(kernel)}<p class=soft>A click on a marked line shows its accesses.</p>"
            f"{source(results, kernel, gallery)}</div></details>")


# ---- the page

def legend():
    entries = "".join(f"<dt>{name}</dt><dd>{escaped(words)}</dd>" for name, words in MEANING.items())
    return (f"<details class=legend><summary>What the figures mean</summary><dl>{entries}<dt>pictures</dt>"
            f"<dd>{escaped(PICTURES)}</dd></dl></details>")


def page(results):
    gallery = Gallery()
    order = sorted(enumerate(results.kernels), key=lambda item: -item[1].launches * item[1].us)
    sections = "".join(section(results, index, kernel, gallery) for index, kernel in order)
    ended = results.raw.get("ended", "")
    about = (f"{escaped(results.raw['program'])}, recorded on a CPU for {escaped(results.card.name)}"
             + (f"; it ended with {escaped(ended)}" if ended else ""))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Kernels of {escaped(results.raw['program'])}</title>
<style>{STYLE}{lane_styles()}</style></head><body>
<h1>Kernels, access by access</h1>
<p class=soft>{about}. Sectors, wavefronts, bytes and races are counted from every access of the recorded blocks; times
are estimated from data sheets, not measured.</p>
{whole(results)}
{overview(results)}
{legend()}
<h2>Line by line</h2>
{sections}
{matmuls(results)}
{gallery.definitions()}
<script>{SCRIPT}</script></body></html>
"""

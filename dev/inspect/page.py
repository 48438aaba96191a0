"""report.html: the same figures as the terminal's, with pictures; one file that needs no server."""
import html

from pictures import Gallery, lane_styles
from tables import number, percent, plural, times
from text import COLUMNS, by_time, costly_rows, facts, figures, hazards, source_blocks, totals

CONTEXT = 3

MEANING = {column.name: column.meaning for column in COLUMNS}
MEANING["time"] = "The line's share of its kernel's estimated time, by its share of what the kernel is bound by."
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


# ---- overview

def overview_cell(index, column, kernel):
    value, words = column.value(kernel), escaped(column.text(kernel))
    if column.name == "kernel":
        words = f'<a href="#k{index}">{words}</a><small>{escaped(kernel.range)}</small>'
    is_bad = isinstance(value, (int, float)) and value > column.most + 5e-3
    kind = "bad" if is_bad else "words" if column.name == "bound by" else ""
    return f'<td data-value="{-1 if value is None else escaped(value)}" class="{kind}">{words}</td>'


def overview(results):
    heads = "".join(f'<th{title(column.name)}{" class=words" if column.name == "bound by" else ""}>{column.name}</th>'
                    for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(overview_cell(results.kernels.index(kernel), column, kernel) for column in COLUMNS)}"
                   "</tr>" for kernel in by_time(results))
    return (f'<h2>Kernels</h2><p class=soft>A click on a column sorts by it.</p><div class=scroll>'
            f'<table class="sortable sticky"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>')


def table(heads, rows, last=""):
    """last: the class of the last column."""
    def line(tag, cells):
        *others, end = (escaped(cell) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in others)}<{tag} class='{last}'>{end}</{tag}></tr>"
    return f'<div class=scroll><table>{line("th", heads)}{"".join(line("td", row) for row in rows)}</table></div>'


def whole(results):
    parts = []
    for sentence in totals(results):
        figure, word, rest = escaped(sentence).partition(", estimated")
        parts.append(f"<p><b>{figure}</b>{word}{rest}</p>")
    rows = costly_rows(results)
    if rows:
        parts.append("<h2>The most expensive lines</h2>" +
                     table(["line", "est. µs, all launches", "kernel", "source"], rows, "wide"))
    return "".join(parts)


def matmuls(results):
    rows = [[f"{m['m']:,} × {m['n']:,} × {m['k']:,}", m["type"], m.get("epilogue", "none"), m["launches"],
             number(1e6 * seconds), number(2 * m["m"] * m["n"] * m["k"] / seconds / 1e12)]
            for m, seconds in zip(results.raw.get("matmuls", []), results.step.matmul_seconds)]
    heads = ["M × N × K", "type", "epilogue", "launches", "est. µs", "est. TFLOP/s"]
    return f"<h2>Matmuls</h2><p class=soft>By cuBLASLt: not recorded.</p>{table(heads, rows)}" if rows else ""


# ---- a kernel

def fact(name, value, column):
    return f"<div{title(column)}><span>{name}</span>{escaped(value)}</div>"


def line_figures(line):
    """Beside a line: an entry for each kind of access."""
    entries = []
    for f in figures(line):
        name = f"{f.space} {f.access}" + ("" if f.by == ("thread",) else f" ({', '.join(f.by)})")
        entries.append(f"<div><span>{name}</span><span{title('lanes')}>{f.lanes:.0f} lanes</span>"
                       f"<span{title(f.unit)}{' class=bad' if f.is_wasteful else ''}>{times(f.ratio)} × {f.unit}</span>"
                       "</div>")
    if line.time_share >= 0.005:
        entries.append(f"<div><span{title('time')}>{percent(line.time_share)} of the time</span></div>")
    return f"<div class=figures>{''.join(entries)}</div>"


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


def source_line(at, text, line, gallery):
    if not line:
        return f"<div class='row context'><i>{at}</i><code>{escaped(text)}</code></div>"
    worse = any(f.is_wasteful for f in figures(line))
    pictures = "".join(site_words(site, line) + gallery.figure(site) for site in line.sites)
    return (f"<details class=line><summary class='row{' worst' if worse else ''}'><i>{at}</i>"
            f"<code>{escaped(text)}</code>{line_figures(line)}</summary><div class=sites>{pictures}</div></details>")


def source(results, kernel, gallery):
    parts = []
    for file, blocks in source_blocks(results, kernel, CONTEXT):
        shown = []
        for block in blocks:
            indent = min((len(text) - len(text.lstrip()) for _, text, _ in block if text.strip()), default=0)
            shown.append("".join(source_line(at, text[indent:], line, gallery) for at, text, line in block))
        parts.append(f"<div class=source><div class=file>{escaped(file)}</div>"
                     f"{'<div class=gap>⋯</div>'.join(shown)}</div>")
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
            f"<div class=facts>{''.join(fact(*each) for each in facts(kernel))}</div>"
            "<p class=soft>A click on a marked line shows its accesses.</p>"
            f"{source(results, kernel, gallery)}</div></details>")


# ---- the page

def legend():
    entries = "".join(f"<dt>{name}</dt><dd>{escaped(words)}</dd>" for name, words in MEANING.items())
    return (f"<details class=legend><summary>What the figures mean</summary><dl>{entries}<dt>pictures</dt>"
            f"<dd>{escaped(PICTURES)}</dd></dl></details>")


def page(results):
    gallery = Gallery()
    sections = "".join(section(results, results.kernels.index(kernel), kernel, gallery) for kernel in by_time(results))
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

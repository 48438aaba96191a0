"""report.html: the same figures as the terminal's, with pictures; one file that needs no server."""
import html

from pictures import Gallery, lane_styles
from tables import html_table, number, plural, times
from text import COLUMNS, facts, figures, hazards, source_lines, totals

PICTURES = """Global memory: above, the lanes of the worst request; below, the 32-byte sectors that it fetches. Hatched:
fetched and not asked for. Shared memory: a column for each of 32 banks, a row for each 128 bytes; numbers are lanes, +
where several access the same word, which costs nothing. 8-byte accesses go by half warps, 16-byte ones by quarters;
framed in red are banks that those need in several rows, each of which is a pass (wavefront) of its own."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --paper: #fdfdfb; --panel: #f3f3ef; --rule: #dcdcd6;
  --bad: #b3261e; --hatch: #c9c9c2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e5e8; --soft: #9aa4ae; --paper: #15181b; --panel: #1f2327;
  --rule: #363c42; --bad: #ff9389; --hatch: #4c535a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px;
  margin: 0 auto; padding: 1em 16px 4em; }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .5em }
.soft, figcaption { color: var(--soft) }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
a { color: inherit }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: .32em .5em; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { background: var(--panel) } th:first-child, td:first-child { text-align: left }
.bad { color: var(--bad); font-weight: 600 }
summary { cursor: pointer; overflow-wrap: anywhere }
.kernel { border: 1px solid var(--rule); border-radius: 8px; margin: .6em 0; padding: .6em .9em }
.source { background: var(--panel); padding: .4em 0; margin: .5em 0 }
.row { display: grid; grid-template-columns: 4.2em minmax(0, 1fr) auto; column-gap: .8em; padding-right: .8em }
.row i { font-style: normal; color: var(--soft); text-align: right }
.line > summary { list-style: none } .line > summary i::before { content: "▸ " }
.figures { text-align: right; font-size: 12px } .figures span { margin-left: 1em }
.sites { padding: .5em .8em .8em 1em; background: var(--paper) }
figure { margin: .3em 0 1em }
.pic { width: 100%; max-width: 860px; display: block; overflow: visible } .defs { position: absolute }
/* Drawings are shown by <use>: a rule sees what is in the drawing, .d, and nothing around it. */
.d rect { fill: currentColor; stroke: var(--paper); stroke-width: .8 } .d path { stroke: currentColor; fill: none }
.d .unused { fill: url(#hatch); stroke: var(--soft); stroke-width: .7 } .d .grid { fill: var(--panel) }
.ground { fill: var(--paper) } .stripe { stroke: var(--hatch); stroke-width: 2.5 }
.d text { font: 9.5px system-ui, sans-serif; fill: #14171a; text-anchor: middle }
.d .s, .d .e { fill: var(--soft) } .d .s { text-anchor: start } .d .e { text-anchor: end; font-weight: 600 }
.d text.bad { fill: var(--bad) } .d rect.bad { stroke: var(--bad); stroke-width: 1.6 }
"""

# Opens the kernel that a link leads to.
SCRIPT = """
const show = () => { const at = location.hash && document.querySelector(location.hash); if (at) at.open = true; };
addEventListener("hashchange", show);
show();
"""


def escaped(words):
    return html.escape(str(words))


# ---- overview

def overview(results):
    def cell(number, kernel, column):
        words = escaped(column.text(kernel))
        if column.name == "kernel":
            words = f"<a href=#k{number} title='{escaped(kernel.range)}'>{words}</a>"
        return f"<td{' class=bad' if column.is_bad(kernel) else ''}>{words}</td>"

    heads = "".join(f"<th title='{escaped(column.meaning)}'>{column.name}</th>" for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(cell(i, kernel, column) for column in COLUMNS)}</tr>"
                   for i, kernel in enumerate(results.kernels))
    return f"<h2>Kernels</h2><div class=scroll><table><tr>{heads}</tr>{rows}</table></div>"


# ---- a kernel

def line_figures(line):
    entries = ""
    for f in figures(line):
        by = "" if f.by == ["thread"] else f" ({', '.join(f.by)})"
        entries += (f"<div><span>{f.space} {f.access}{by}</span><span>{f.lanes:.0f} lanes</span>"
                    f"<span{' class=bad' if f.is_wasteful else ''}>{times(f.ratio)} × {f.unit}</span></div>")
    return f"<div class=figures>{entries}</div>"


def site_words(site, line):
    unit = "sectors" if site["space"] == "global" else "wavefronts"
    via = f", in {', '.join(line.place.via)}" if line.place.via else ""
    part = f", part {site['part'] + 1}" if site["part"] else ""
    moved = "" if site["space"] == "shared" else \
        f"; {site['dram_sectors']:,} sectors from memory, {site['l1_hits']:,} found in L1"
    by = "" if site["by"] == "thread" else f" by {site['by']}"
    return (f"<p><b>{site['space']} {site['access']}{by}</b> of {site['bytes_per_lane']} bytes a lane{part}"
            f"{escaped(via)}: {site['requests']:,} requests, {site[unit]:,} {unit}, {site[f'least_{unit}']:,} at "
            f"least{moved}. Its worst request:</p>")


def source_line(row, gallery):
    at, text, line = row or ("", "⋯", None)
    words = f"<i>{at}</i><code>{escaped(text)}</code>"
    if not line:
        return f"<div class='row soft'>{words}</div>"
    pictures = "".join(site_words(site, line) + gallery.figure(site) for site in line.sites)
    return (f"<details class=line><summary class=row>{words}{line_figures(line)}</summary>"
            f"<div class=sites>{pictures}</div></details>")


def section(results, number_, kernel, gallery):
    found = [plural(len(kernel.races), "race")] if kernel.races else []
    found += [f"{column.text(kernel)} × {column.name}" for column in COLUMNS if column.is_bad(kernel) and
              column.name != "races"]
    bad = "".join(f"<p class=bad>{escaped(sentence)}</p>" for sentence in hazards(results, kernel))
    sources = "".join(f"<div class=source><div class=soft>{escaped(file)}</div>"
                      f"{''.join(source_line(row, gallery) for row in rows)}</div>"
                      for file, rows in source_lines(results, kernel))
    return (f"<details class=kernel id=k{number_}><summary><b>{escaped(kernel.name)}</b> <span class=soft>"
            f"{number(kernel.us)} µs × {kernel.launches:,}, {kernel.bound}</span> <span class=bad>{', '.join(found)}"
            f"</span></summary>{bad}{html_table(['', ''], facts(kernel))}"
            f"{sources}</details>")


# ---- the page

def page(results):
    gallery = Gallery()
    sections = "".join(section(results, i, kernel, gallery) for i, kernel in enumerate(results.kernels))
    program = escaped(results.raw["program"])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Kernels of {program}</title>
<style>{STYLE}{lane_styles()}</style></head><body>
<h1>Kernels, access by access</h1>
<p class=soft>{program}, recorded on a CPU for {escaped(results.card.name)}; it ended with
{escaped(results.raw["ended"])}. Sectors, wavefronts, bytes and races are counted from every access of the recorded
blocks; times are estimated from data sheets, not measured.</p>
{"".join(f"<p>{escaped(sentence)}</p>" for sentence in totals(results))}
{overview(results)}
<h2>Line by line</h2>
<p class=soft>A click on a marked line shows its accesses, with a picture of the worst request. {escaped(PICTURES)}</p>
{sections}
{gallery.definitions()}
<script>{SCRIPT}</script></body></html>
"""

"""report.html: the figures of the terminal report, with source and pictures; one file that needs no server."""
import os
import re
from html import escape

from pictures import Gallery, lane_styles
from tables import html_table, number, plural, times
from text import COLUMNS, by_name, facts, figures, hazard_sentence, missing, source_lines, totals

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "README.md")
PICTURES = """Global memory: the lanes of the warp above, the 32-byte sectors that they access below. Hatched bytes are
transferred but not requested. Shared memory: one column per bank, one row per 128 bytes. Numbers are lanes; + means
that several lanes access the same word, which is not a conflict. 8-byte accesses are split into half warps, 16-byte
ones into quarter warps. A red frame marks a bank conflict: lanes need several rows of a bank, one wavefront each."""
LEVELS = (1.05, 2, 4, 8)        # the ratios up to which a colour is used: neutral first, then one for each doubling

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --paper: #fdfdfb; --panel: #f3f3ef; --rule: #dcdcd6;
  --amber: #8a5a00; --orange: #b04a00; --bad: #c01d14; --hatch: #c9c9c2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e5e8; --soft: #9aa4ae; --paper: #15181b; --panel: #1f2327;
  --rule: #363c42; --amber: #f0d060; --orange: #ffa550; --bad: #ff7d74; --hatch: #4c535a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1340px;
  margin: 0 auto; padding: 1em 16px 4em; }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .5em }
.soft, figcaption { color: var(--soft) }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
a { color: inherit }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: .32em .5em; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { background: var(--panel) } th:first-child, td:first-child, .facts td { text-align: left }
.facts td { white-space: normal } .facts tr:first-child { display: none }
.r1 { color: var(--amber) } .r2 { color: var(--orange) } .r3, .bad { color: var(--bad) }
.r4 { color: var(--paper); background: var(--bad) } .r1, .r2, .r3, .r4, .bad, dt { font-weight: 600 }
span { white-space: nowrap } span.r4 { padding: 0 .3em; border-radius: 3px } dd { margin: 0 0 .4em 1.2em }
summary { cursor: pointer; overflow-wrap: anywhere }
.kernel { border: 1px solid var(--rule); border-radius: 8px; margin: .6em 0; padding: .6em .9em }
.kernel > summary span { margin-left: .5em }
.source { background: var(--panel); padding: .4em 0; margin: .5em 0 }
.row { display: grid; grid-template-columns: 4.2em minmax(0, 1fr) auto; column-gap: .8em; padding-right: .8em }
.row i { font-style: normal; color: var(--soft); text-align: right }
.line > summary { list-style: none } .line > summary i::before { content: "▸ " }
.figures { text-align: right; font-size: 12px } .figures span { margin-left: 1em }
.sites { padding: .5em .8em .8em 1em; background: var(--paper) }
figure { margin: .3em 0 1em }
.pic { width: 100%; min-width: 560px; max-width: 860px; display: block } .defs { position: absolute }
@media (max-width: 700px) {
  .row { grid-template-columns: 3.2em minmax(0, 1fr) } .figures { grid-column: 2; text-align: left }
  .figures span { margin: 0 1em 0 0 } .kernel { padding: .6em .4em } .sites { padding: .5em .4em }
  .overview :is(td, th):first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9em;
    position: sticky; left: 0 } .overview td:first-child { background: var(--paper) } }
/* Drawings are shown by <use>: rules match only elements inside a drawing (.d), not the ancestors of <use>. */
.d rect { fill: currentColor; stroke: var(--paper); stroke-width: .8 } .d path { stroke: currentColor; fill: none }
.d .unused { fill: url(#hatch); stroke: var(--soft); stroke-width: .7 } .d .grid { fill: var(--panel) }
.ground { fill: var(--paper) } .stripe { stroke: var(--hatch); stroke-width: 2.5 }
.d text { font: 9.5px system-ui, sans-serif; fill: #14171a; text-anchor: middle }
.d .s, .d .e, .d .m { fill: var(--soft) } .d .s { text-anchor: start } .d .e { text-anchor: end; font-weight: 600 }
.d text.bad { fill: var(--bad) } .d rect.bad { stroke: var(--bad); stroke-width: 1.6 }
"""

# Opens the kernel that a link points to.
SCRIPT = """
const show = () => { const at = location.hash && document.querySelector(location.hash); if (at) at.open = true; };
addEventListener("hashchange", show);
show();
"""


# ---- colours and terms

def level(ratio):
    """Returns the class of a ratio's colour: "" up to 1.05, r1 (amber) up to 2, then r2, r3 and r4 (red)."""
    above = sum(round(ratio or 0, 2) > limit for limit in LEVELS)
    return f"r{above}" if above else ""


def column_level(column, kernel):
    if not column.is_above_best(kernel):
        return ""
    return level(column.value(kernel)) if column.best else "r4"     # any race is an error


def legend():
    samples = "".join(f"<span class='{level(limit)}'>up to {limit}</span>, " for limit in LEVELS)
    last = f"<span class=r4>above {LEVELS[-1]}, or an error</span>"
    return f"<p class=soft>Colours of ratios to the minimum: {samples}{last}.</p>"


def glossary():
    """Returns README.md's table of terms as HTML."""
    with open(README, encoding="utf-8") as file:
        rows = re.search(r"\| term \|.*\n\|.*\n((?:\|.*\n)+)", file.read())[1].splitlines()
    terms = "".join("<dt>{}</dt><dd>{}</dd>".format(*escape(row).strip("| ").split(" | ")) for row in rows)
    for mark, tag in ((r"`(.+?)`", r"<code>\1</code>"), (r"\*\*(.+?)\*\*", r"<b>\1</b>"), (r"\[(.+?)\]\(.+?\)", r"\1")):
        terms = re.sub(mark, tag, terms)
    return f"<details><summary>Terms</summary><dl>{terms}</dl></details>"


# ---- overview

def overview(results):
    def cell(number, kernel, column):
        words = escape(column.text(kernel))
        if column.name == "kernel":
            words = f"<a href=#k{number} title='{escape(kernel.range)}'>{words}</a>"
        return f"<td class='{column_level(column, kernel)}'>{words}</td>"

    heads = "".join(f"<th title='{escape(column.meaning)}'>{column.name}</th>" for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(cell(i, kernel, column) for column in COLUMNS)}</tr>"
                   for i, kernel in enumerate(results.kernels))
    return f"<h2>Kernels</h2><div class='scroll overview'><table><tr>{heads}</tr>{rows}</table></div>{legend()}"


# ---- a kernel

def line_figures(line):
    entries = ""
    for f in figures(line):
        by = "" if f.by == ["thread"] else f" ({', '.join(f.by)})"
        entries += (f"<div><span>{f.space} {f.access}{by}</span><span>{plural(round(f.lanes), 'lane')}</span>"
                    f"<span class='{level(f.ratio)}'>{f.unit} {times(f.ratio)}×</span></div>")
    return f"<div class=figures>{entries}</div>"


def site_words(site, line):
    unit = "sectors" if site["space"] == "global" else "wavefronts"
    via = f", through {', '.join(line.place.via)}" if line.place.via else ""
    part = f", part {site['part'] + 1}" if site["part"] else ""
    preposition = "from" if site["access"] == "load" else "to"
    moved = "" if site["space"] == "shared" else \
        f"; {plural(site['dram_sectors'], 'sector')} {preposition} memory, {plural(site['l1_hits'], 'hit')} in L1"
    by = "" if site["by"] == "thread" else f" by {by_name(site['by'])}"
    return (f"<p><b>{site['space']} {site['access']}{by}</b>, {plural(site['bytes_per_lane'], 'byte')} per lane{part}"
            f"{escape(via)}: {plural(site['requests'], 'request')}, {plural(site[unit], unit[:-1])} (minimum "
            f"{site[f'least_{unit}']:,}){moved}. Worst request:</p>")


def source_line(row, gallery):
    at, text, line = row or ("", "⋯", None)
    words = f"<i>{at}</i><code>{escape(text)}</code>"
    if not line:
        return f"<div class='row soft'>{words}</div>"
    pictures = "".join(site_words(site, line) + gallery.figure(site) for site in line.sites)
    return (f"<details class=line><summary class=row>{words}{line_figures(line)}</summary>"
            f"<div class=sites>{pictures}</div></details>")


def section(results, number_, kernel, gallery):
    found = "".join(f"<span class='{column_level(column, kernel)}'>{column.name} {column.text(kernel)}</span>"
                    for column in COLUMNS if column.is_above_best(kernel))
    bad = "".join(f"<p class=bad>{escape(hazard_sentence(results, kernel, hazard))}</p>" for hazard in kernel.hazards)
    sources = "".join(f"<div class=source><div class=soft>{escape(file)}</div>"
                      f"{''.join(source_line(row, gallery) for row in rows)}</div>"
                      for file, rows in source_lines(results, kernel))
    time = f"{number(kernel.us)} µs × {kernel.launches:,}, {kernel.bound}" if kernel.is_complete else "not finished"
    return (f"<details class=kernel id=k{number_}><summary><b>{escape(kernel.label)}</b> <span class=soft>"
            f"{time}</span>{found}</summary>{bad}"
            f"<div class=facts>{html_table(['', ''], facts(kernel))}</div>{sources}</details>")


# ---- the page

def page(results):
    gallery = Gallery()
    sections = "".join(section(results, i, kernel, gallery) for i, kernel in enumerate(results.kernels))
    program = escape(results.raw["program"])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory accesses of {program}</title>
<style>{STYLE}{lane_styles()}</style></head><body>
<h1>Memory accesses of each kernel</h1>
<p class=soft>{program} ran on a CPU, which emulated an {escape(results.card.name)}. End of the run:
{escape(results.raw["ended"])}. Sectors, wavefronts, bytes and races are counted from every access of the recorded
blocks. Times are estimated from data sheets, not measured.</p>
{"".join(f"<p>{escape(sentence)}</p>" for sentence in [*totals(results), missing(results)])}
{glossary()}
{overview(results)}
<h2>Line by line</h2>
<p class=soft>Click a line marked ▸ to see its accesses and a picture of the worst request. {escape(PICTURES)}</p>
{sections}
{gallery.definitions()}
<script>{SCRIPT}</script></body></html>
"""

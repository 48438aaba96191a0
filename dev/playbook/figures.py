"""Used by all parts of the report: claims with their verdicts, texts of numbers, and the style of figures."""
import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib
matplotlib.use("Agg")       # draws into files and needs no display
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from measure import conclusive      # which adds dev/ to sys.path
from tables import html_table, number, percent, plural, size   # the parts import them from here

CHAPTER_COLOR = "#c0392b"   # every figure shows the playbook's values in red, with dashed lines
BLUE, ORANGE, GREEN, RED, TEAL, GREY = "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#9c9c9c"
# The colours of dev/explorer
CATEGORIES = {"weights": "#2b6a9e", "master": "#6f66ad", "adam_m": "#a2558f", "adam_v": "#cf92bd",
              "gradients": "#3b9c94", "buffers": "#86a05c", "activations": "#e0912b", "workspace": "#7e7b74",
              "cuda": "#bdb9af"}
MODE_COLORS = {"none": BLUE, "selective": ORANGE, "full": GREEN}

pyplot.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
                        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
                        "legend.fontsize": 9, "figure.dpi": 130, "figure.constrained_layout.use": True})


# ---- claims

AGREES, DISAGREES, UNCLEAR, NOT_JUDGED = "agrees", "disagrees", "no conclusion", "–"
# Losses are the same if their relative difference is smaller than this. Rounding causes less within these few steps;
# different data or a missing gradient causes more.
ONE_CURVE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


class Claim(NamedTuple):
    """A row of the summary and of its section's first table."""
    what: str
    chapter: str        # what the playbook states
    here: str           # the value on this machine, and whether it is planned or measured
    verdict: str = NOT_JUDGED


@dataclass
class Section:
    title: str
    claims: list
    texts: list                 # paragraphs
    figure: object = None
    caption: str = ""           # of the figure
    tables: str = ""            # HTML


def judged(holds):
    return AGREES if holds else DISAGREES


def ratio_claim(what, chapter, ratios, each, holds=None):
    """Returns a claim about repeated ratios, one for each of `each` ("rounds", "seeds"). `holds` says whether their
    median agrees with the playbook; without it `chapter` begins with "higher" or "lower"."""
    low, middle, high = (of(ratios or [1]) for of in (min, statistics.median, max))
    agrees = holds(middle) if holds else middle > 1 if chapter.startswith("higher") else middle < 1
    return Claim(what, chapter, f"{signed(middle - 1)} ({each} {signed(low - 1)} to {signed(high - 1)}, measured)",
                 judged(agrees) if conclusive(ratios) else UNCLEAR)


def same_losses(what, runs, precision):
    """Returns a claim that runs have the same losses in the steps that all of them have."""
    difference = max(abs(a / b - 1) for losses in runs for a, b in zip(losses, runs[0]))
    return Claim(what, "the same result", f"losses within {difference:.0e} of each other (measured)",
                 judged(difference <= ONE_CURVE[precision]))


def close(values, expected, tolerance):
    return all(abs(a / b - 1) <= tolerance for a, b in zip(values, expected, strict=True))


# ---- numbers as texts

def joined(values, text=number):
    return " / ".join(text(value) for value in values)


def share(x):
    """Returns a fraction as a percentage with two significant digits and at most four decimals."""
    rounded = float(f"{100 * x:.1e}")
    return "0 %" if x == 0 else f"{rounded:.{max(0, min(4, 1 - math.floor(math.log10(rounded))))}f} %"


def signed(x):
    """Returns a fraction as a percentage with its sign."""
    return ("-" if x < 0 else "+") + share(abs(x))


def spread(values, text=number):
    """Returns the median and, if there are several values, the range."""
    if not values:
        return "–"
    middle = text(statistics.median(values))
    return f"{middle} ({text(min(values))} to {text(max(values))})" if len(values) > 1 else middle


# ---- figures

def panels(rows, columns, height, width=10.5, **more_):
    """Returns a figure and its axes, with space for titles between the rows."""
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), **more_)
    figure.get_layout_engine().set(hspace=0.06)
    return figure, axes


def stack(axis, at, values, categories, unit, width=0.7):
    """Draws a stacked bar of memory by category."""
    bottom = 0
    for category in categories:
        axis.bar(at, values[category] / unit, width, bottom, color=CATEGORIES[category])
        bottom += values[category] / unit


def entry(label, color, line=None, marker=None, alpha=1):
    """Returns a legend entry: a line, or a coloured patch."""
    if line is None and marker is None:
        return Patch(color=color, label=label, alpha=alpha)
    return Line2D([], [], color=color, linestyle=line or "", marker=marker, markersize=3.5, label=label)


def entries(colors, **style):
    """Returns one legend entry for each item of {label: color}."""
    return [entry(label, color, **style) for label, color in colors.items()]


def category_entries(categories):
    return entries({name: CATEGORIES[name] for name in categories})


def chapter_entry(label="playbook"):
    return entry(label, CHAPTER_COLOR, "--")


def legend_below(figure, handles, rows=1):
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // rows))


def chapter_mark(axis, x, y, half):
    """Draws the playbook's value across one bar."""
    axis.plot([x - half, x + half], [y, y], color=CHAPTER_COLOR, linestyle="--", linewidth=1.4)


def named_ticks(axis, names, **style):
    """Labels the bars at 0, 1, 2 ... with names."""
    axis.set_xticks(range(len(names)), names, **style)
    axis.grid(axis="x", visible=False)


def doubling_ticks(axis, values, label):
    """Makes the x axis logarithmic, with a tick at each of `values`, which are powers of two."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{v // 1024}k" if v >= 1024 else str(v) for v in values])
    axis.minorticks_off()
    axis.set_xlabel(label)


def whiskers(axis, x, middle, values):
    """Draws the range of repeated measurements on top of a bar."""
    axis.errorbar(x, middle, [[max(0, middle - min(values))], [max(0, max(values) - middle)]], color="0.2", capsize=4)

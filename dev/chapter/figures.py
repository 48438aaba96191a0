"""What all parts of the report share: sentences about ratios, and the look of figures and captions."""
import math
import os
import statistics
import sys
from dataclasses import dataclass, field

import matplotlib
matplotlib.use("Agg")       # draws into files and needs no display
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from measure import conclusive
from tables import html_table, number, percent, plural, size   # the parts import them from here

CHAPTER_COLOR = "#c0392b"   # the chapter's figures are red and dashed in every picture
BLUE, ORANGE, GREEN, RED, TEAL, PURPLE, GREY = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1",
                                                "#9c9c9c")
CATEGORIES = {"weights": BLUE, "master": "#86b4d8", "adam_m": PURPLE, "adam_v": "#d4a6c8", "gradients": ORANGE,
              "buffers": "#edc948", "activations": GREEN, "workspace": GREY, "cuda": "#d0d0d0"}
MODE_COLORS = {"none": BLUE, "selective": ORANGE, "full": GREEN}

pyplot.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
                        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
                        "legend.fontsize": 8, "figure.dpi": 130, "figure.constrained_layout.use": True})


@dataclass
class Section:
    title: str
    name: str                   # of the PNG
    figure: object = None
    sees: list = field(default_factory=list)    # paragraphs
    tables: str = ""            # HTML
    rows: list = field(default_factory=list)    # of the summary: (what, the chapter's value, the value here)
    caption: str = ""


def left_out(title, name, why):
    return Section(title, name, sees=[f"This part is left out: {why}."])


# ---- numbers and sentences

def signed(x):
    return percent(x, "+.1f")


def change(x):
    """A small signed percentage with two significant digits."""
    return percent(x, "+.2g")


def share(x):
    """A percentage with two significant digits, at most four decimals."""
    return "0" if x == 0 else percent(x, f".{max(0, min(4, 1 - math.floor(math.log10(100 * x))))}f")


def spread(values, text=number):
    """The median and, of several values, the range."""
    if not values:
        return "–"
    middle = text(statistics.median(values))
    return f"{middle} ({text(min(values))} to {text(max(values))})" if len(values) > 1 else middle


def ratio_text(x):
    return f"{x:.3f}"


def withheld(ratios, each="rounds", text=signed):
    """Why ratios that are not conclusive allow no conclusion."""
    if len(ratios) < 2:
        return f"there was only one {each.removesuffix('s')}"
    return (f"the range of the {each}, {text(min(ratios) - 1)} to {text(max(ratios) - 1)}, is larger than their median "
            f"effect, {text(statistics.median(ratios) - 1)}")


def concluded(ratios, conclusion, subject, each="rounds", text=signed):
    """The conclusion from measured ratios, or why there is none."""
    return conclusion if conclusive(ratios) else f"No conclusion about {subject}: {withheld(ratios, each, text)}."


def captioned(caption, head, rows):
    return f"<p>{caption}:</p>" + html_table(head, rows)


# ---- figures

def panels(rows, columns, height, width=10.5, **more):
    """A figure and its axes; space for titles between the rows."""
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), **more)
    figure.get_layout_engine().set(hspace=0.06)
    return figure, axes


def opacity(category):
    return 0.55 if category == "activations" else 1


def stack(axis, at, values, categories, unit, width=0.7):
    """A bar of memory by category."""
    bottom = 0
    for category in categories:
        axis.bar(at, values[category] / unit, width, bottom, color=CATEGORIES[category], alpha=opacity(category))
        bottom += values[category] / unit


def entry(label, color, line=None, marker=None, alpha=1, **more):
    """An entry of a legend: a line, or a coloured patch."""
    if line is None and marker is None:
        return Patch(color=color, label=label, alpha=alpha)
    return Line2D([], [], color=color, linestyle=line or "", marker=marker, markersize=3.5, label=label, **more)


def category_entries(categories):
    return [entry(name, CATEGORIES[name], alpha=opacity(name)) for name in categories]


def chapter_entry(label="chapter"):
    return entry(label, CHAPTER_COLOR, "--")


def legend_below(figure, entries, rows=1):
    figure.legend(handles=entries, loc="outside lower center", ncols=-(-len(entries) // rows))


def chapter_mark(axis, x, y, half):
    """The chapter's value beside one bar."""
    axis.plot([x - half, x + half], [y, y], color=CHAPTER_COLOR, linestyle="--", linewidth=1.4)


def chapter_line(axis, y, text=""):
    axis.axhline(y, color=CHAPTER_COLOR, linestyle="--", linewidth=1.2)
    axis.text(0.02, y, text, transform=axis.get_yaxis_transform(), color=CHAPTER_COLOR, va="bottom", fontsize=8)


def named_ticks(axis, names, **style):
    """One name for each bar at 0, 1, 2 ..."""
    axis.set_xticks(range(len(names)), names, **style)
    axis.grid(axis="x", visible=False)


def doubling_ticks(axis, values, label):
    """A logarithmic x axis with one tick for each of some powers of two."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{v // 1024}k" if v >= 1024 else str(v) for v in values])
    axis.minorticks_off()
    axis.set_xlabel(label)


def whiskers(axis, x, middle, values):
    """The range of repeated measurements on top of a bar."""
    axis.errorbar(x, middle, [[max(0, middle - min(values))], [max(0, max(values) - middle)]], color="0.2", capsize=4)


def loss_curves(axis, losses, title):
    """Losses by step, {label: values}; smaller markers on top, as the curves should coincide."""
    for i, (label, values) in enumerate(losses.items()):
        axis.plot(range(1, len(values) + 1), values, marker="osD^"[i % 4], markersize=7 - 1.3 * i, linewidth=1,
                  alpha=0.8, label=label)
    axis.set(title=title, xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)

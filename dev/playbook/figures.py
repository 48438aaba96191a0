"""Used by all parts of the report: sentences about ratios, and the style of figures."""
import math
import statistics
from dataclasses import dataclass, field

import matplotlib
matplotlib.use("Agg")       # draws into files and needs no display
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from measure import conclusive      # which adds dev/ to sys.path
from tables import html_table, number, percent, plural, size   # the parts import them from here

CHAPTER_COLOR = "#c0392b"   # every figure shows the chapter's values in red, with dashed lines
BLUE, ORANGE, GREEN, RED, TEAL, PURPLE, GREY = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1",
                                                "#9c9c9c")
CATEGORIES = {"weights": BLUE, "master": "#86b4d8", "adam_m": PURPLE, "adam_v": "#d4a6c8", "gradients": ORANGE,
              "buffers": "#edc948", "activations": "#9bc796", "workspace": GREY, "cuda": "#d0d0d0"}
MODE_COLORS = {"none": BLUE, "selective": ORANGE, "full": GREEN}

pyplot.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
                        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
                        "legend.fontsize": 8, "figure.dpi": 130, "figure.constrained_layout.use": True})


@dataclass
class Section:
    title: str
    texts: list                 # paragraphs
    figure: object = None
    caption: str = ""           # of the figure
    tables: str = ""            # HTML
    rows: list = field(default_factory=list)    # rows of the summary: (name, the chapter's value, the value here)


def left_out(title, why):
    return Section(title, [f"This part was skipped: {why}."])


# ---- numbers and sentences

def share(x):
    """Returns a fraction as a percentage with two significant digits and at most four decimals."""
    rounded = float(f"{100 * x:.1e}")
    return "0" if x == 0 else f"{rounded:.{max(0, min(4, 1 - math.floor(math.log10(rounded))))}f} %"


def signed(x):
    """Returns a fraction as a percentage with its sign."""
    return ("-" if x < 0 else "+") + share(abs(x))


def less(a, b):
    """Returns by how much a is smaller than b, as a percentage."""
    return percent(1 - a / b)


def spread(values, text=number):
    """Returns the median and, if there are several values, the range."""
    if not values:
        return "–"
    middle = text(statistics.median(values))
    return f"{middle} ({text(min(values))} to {text(max(values))})" if len(values) > 1 else middle


def effects(ratios):
    """Returns the smallest, median and largest effect as texts."""
    return [signed(of(ratios) - 1) for of in (min, statistics.median, max)]


def concluded(ratios, conclusion, subject, each="rounds"):
    """Returns `conclusion` if the measured ratios support it, otherwise a sentence that says why they do not."""
    if conclusive(ratios):
        return conclusion
    if len(ratios) < 2:
        return f"No conclusion about {subject}: there was only one {each.removesuffix('s')}."
    low, middle, high = effects(ratios)
    return (f"No conclusion about {subject}: the range of the {each}, {low} to {high}, is larger than their median "
            f"effect, {middle}.")


# ---- figures

def panels(rows, columns, height, width=10.5, **more):
    """Returns a figure and its axes, with space for titles between the rows."""
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), **more)
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


def chapter_entry(label="chapter"):
    return entry(label, CHAPTER_COLOR, "--")


def legend_below(figure, handles, rows=1):
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // rows))


def chapter_mark(axis, x, y, half):
    """Draws the chapter's value across one bar."""
    axis.plot([x - half, x + half], [y, y], color=CHAPTER_COLOR, linestyle="--", linewidth=1.4)


def chapter_line(axis, y, text=""):
    axis.axhline(y, color=CHAPTER_COLOR, linestyle="--", linewidth=1.2)
    axis.text(0.02, y, text, transform=axis.get_yaxis_transform(), color=CHAPTER_COLOR, va="bottom", fontsize=8)


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


def loss_curves(axis, losses, title):
    """Draws losses by step, {label: values}. Later curves have smaller markers, as the curves should coincide."""
    for i, (label, values) in enumerate(losses.items()):
        axis.plot(range(1, len(values) + 1), values, marker="osD^"[i % 4], markersize=7 - 1.3 * i, linewidth=1,
                  alpha=0.8, label=label)
    axis.set(title=title, xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8)

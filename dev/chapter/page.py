"""What the report's sections share: numbers as text, tables, what a ratio leads to, how figures look."""
import html
import statistics
from dataclasses import dataclass, field

import matplotlib
matplotlib.use("Agg")       # draws into a file, needs no display
from matplotlib import pyplot

from measure import told

CHAPTER_COLOR = "#c0392b"

pyplot.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
                        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
                        "figure.dpi": 130, "figure.constrained_layout.use": True})


@dataclass
class Section:
    title: str
    figure: object              # None where there is nothing to draw
    name: str                   # of the PNG
    sees: list                  # paragraphs
    table: str                  # HTML
    rows: list = field(default_factory=list)
    caption: str = ""


# ---- Numbers and tables as text

def number(x, digits=3):
    """Three digits that count: 0.0123, 12.0, 1,230."""
    if x == 0:
        return "0"
    if abs(x) >= 10 ** (digits - 1):
        return f"{x:,.0f}"
    return f"{x:#.{digits}g}"


def size(b):
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if b >= u), (1e3, "kB"))
    return f"{number(b / unit)} {name}"


def percent(x):
    return f"{100 * x:+.1f} %"


def spread(values, text=number):
    return text(statistics.median(values)) + (f" ({text(min(values))} to {text(max(values))})" if len(values) > 1 else "")


def withheld(ratios, each="rounds", text=percent):
    """Why nothing is concluded from a ratio that is not told."""
    if len(ratios) < 2:
        return f"there was one {each.removesuffix('s')}, which says nothing of itself"
    return (f"the {each}, {text(min(ratios) - 1)} to {text(max(ratios) - 1)}, differ by more than the effect, "
            f"{text(statistics.median(ratios) - 1)} in their median")


def concluded(ratios, conclusion, question, each="rounds", text=percent):
    """The sentence that a measured ratio leads to, or that it leads to none."""
    return conclusion if told(ratios) else f"{question} is not told here: {withheld(ratios, each, text)}."


def table(head, rows):
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    return "<div class=scroll><table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table></div>"


def note_chapter_line(axis, y, text, x=0.02):
    """The chapter's figure: always a dashed red line."""
    axis.axhline(y, color=CHAPTER_COLOR, linestyle="--", linewidth=1.2)
    axis.text(x, y, text, transform=axis.get_yaxis_transform(), color=CHAPTER_COLOR, va="bottom", ha="left", fontsize=8)

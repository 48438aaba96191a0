"""The book's pictures as SVG. A function NAME(numbers) draws the picture of the line "@figure NAME" of a chapter."""
import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


# ---- drawing: coordinates in pixels; colours are classes of page.html, so that they follow the page's colour scheme

def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(str(words))}</text>'


def box(x, y, width, height, kind, words="", title=""):
    """A rectangle of class `kind` (c1 ... c6, soft, rule) with words in its centre."""
    hover = f"<title>{html.escape(title)}</title>" if title else ""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}">{hover}</rect>'
    return rect + (text(x + width / 2, y + height / 2 + 4, words, "on", "middle") if words != "" else "")


def line(points, kind="rule"):
    """A polyline of class `kind` (s1 ... s6, rule)."""
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.5g},{y:.5g}" for x, y in points)}"/>'


def picture(title, height, parts, width=760):
    return (f'<svg viewBox="0 0 {width} {height:g}" role="img"><title>{html.escape(title)}</title>'
            + "".join(parts) + "</svg>")


def constant(file, name):
    """Returns the value of `constexpr TYPE name = VALUE;` in a source."""
    found = re.search(rf"constexpr [\w:]+ {name} = (\d+)", (ROOT / file).read_text())
    if not found:
        raise KeyError(f"{file}: no constant {name}")
    return int(found[1])


# ---- kernels


# ---- memory, formats, several GPUs

"""Formats numbers and tables as text, Markdown and HTML for the reports of dev/inspect, dev/bench and dev/playbook.

    sys.path.append(DEV)        # the folder of this file
    from tables import markdown_table, number, percent
"""
import html


def number(x, digits=3):
    """Returns a number with three significant digits: 0.0123, 12.0, 1,230; "-" for None."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}"


def percent(x, form=".0f"):
    """Returns a fraction as a percentage: 42 %, or +4.2 % with form="+.1f"; "-" for None."""
    return "-" if x is None else f"{100 * x:{form}} %"


def times(x, unit=""):
    """Returns a ratio with two decimals: 1.05; "-" for None."""
    return "-" if x is None else f"{x:.2f}{unit}"


def plural(count, thing):
    """Returns a count with its noun: 1 block, 1,024 blocks."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def size(b):
    """Returns a number of bytes in kB, MB, GB or TB: 12.0 MB; "-" for None."""
    if b is None:
        return "-"
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if b >= u), (1e3, "kB"))
    return f"{number(b / unit)} {name}"


def text_table(head, rows, left=1):
    """Returns the lines of a plain-text table: the first `left` columns are left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) if i < left else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells]


def markdown_table(head, rows):
    """Returns the lines of a Markdown table, the last one empty; [] without rows."""
    if not rows:
        return []
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [head, *cells]]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def html_table(head, rows):
    """Returns an HTML table in a <div class=scroll>, with escaped cells."""
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    return "<div class=scroll><table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table></div>"

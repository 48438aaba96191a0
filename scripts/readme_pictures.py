#!/usr/bin/env python3
"""Draws README.md's pictures, data/pictures/*.svg, from the output of the commands that `make pictures` runs."""
import html
import io
import os
import re
import shutil
import sys
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path += [os.path.join(ROOT, folder) for folder in ("scripts", "dev", "dev/chapter", "dev/inspect", "dev/puzzles")]
import plot
from runs import fail, read_run

OUT, WORK = "data/pictures", "build/pictures"
MAX_BYTES = 150_000         # of all pictures together
POINTS = 450                # steps of the training run that are drawn: more would only enlarge the file
WIDTH = 800                 # pixels


def write(name, svg):
    with open(f"{OUT}/{name}.svg", "w", encoding="utf-8") as file:
        file.write(svg)


def save(name, figure, height):
    """Writes a matplotlib figure with an opaque background, without a date, and with coordinates of one decimal."""
    plot.pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "figure.titlesize": 11})
    figure.set_size_inches(WIDTH / 96, height / 96)
    for text in figure.findobj(plot.matplotlib.text.Text):
        text.set_fontsize(max(8.5, text.get_fontsize()))        # 11 pixels
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", dpi=2 * 96, facecolor="white", metadata={"Date": None})
    write(name, re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), drawn.getvalue()))


def training():
    """Loss, learning rate and throughput of `make run`."""
    run = read_run(f"{WORK}/shakespeare")
    every = max(1, len(run.steps) // POINTS)
    run.steps = {step: numbers for step, numbers in run.steps.items() if step % every == 0 or "val_loss" in numbers}
    run.name = "make run"
    figure = plot.plot([run])
    figure.suptitle(f"GPT with {run.record['model']['parameters']:,} parameters, trained on Shakespeare by a CPU")
    figure.align_ylabels()
    save("training", figure, 600)


def memory():
    """Live memory over a step in each recompute mode, from --trace, as in `make chapter`."""
    import measure
    import parts_single
    shutil.copy("data/shakespeare.txt", f"{WORK}/{measure.TEXT}")
    size = SimpleNamespace(model=measure.shape(6, 4, 256), micro_batch=8, seq_len=256)
    figure = parts_single.timeline_figure(measure.timeline(measure.Trainer("./train_gpt", WORK), size))
    figure.suptitle("Live memory over a training step: 6 layers, 256 channels, 8 sequences of 256 tokens (--trace)")
    for areas in (areas for axis in figure.axes for areas in axis.collections):
        areas.set_rasterized(True)      # thousands of points
    save("memory", figure, 410)


# ---- make inspect

# For each kernel of the picture, the access that is drawn.
SITES = {"transpose_naive": ("global", "store"), "transpose_tile": ("shared", "load"),
         "transpose_swizzle": ("shared", "load")}
# Columns of the table, with x of their right edge; of the first column, its left edge.
COLUMNS = {"kernel": 0, "threads": 250, "sectors": 340, "wavefr.": 430, "lanes": 510, "races": 590}


def as_xml(page):
    """Returns HTML with quotes around the values of attributes."""
    return re.sub(r"=([^'\"\s>]+)(?=[\s/>])", r"='\1'", page)


def svg(parts, height):
    """Returns a picture with the light colours of `make inspect`'s page. It has no CSS variables and no external fonts,
    because not every viewer supports them."""
    from page import STYLE
    from pictures import Gallery, lane_styles
    root, drawings = STYLE.split("@media")[0], STYLE.split("*/")[1]
    colors = dict(re.findall(r"(--\w+): (#\w+)", root))
    style = re.sub(r"var\((--\w+)\)", lambda found: colors[found[1]], f"""{lane_styles()}{drawings}
.d text {{ font-size: 10px }} text {{ font: 14px system-ui, sans-serif; fill: var(--ink) }}
.soft {{ fill: var(--soft) }} .name {{ font-weight: 600 }} .end {{ text-anchor: end }}
.mono {{ font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, monospace }}
.marked {{ fill: var(--bad); font-weight: 600 }}""")
    return (f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
            f"viewBox='0 0 {WIDTH} {height}'><style>{style}</style>"
            f"<rect width='{WIDTH}' height='{height}' fill='{colors['--paper']}'/>"
            f"{as_xml(Gallery().definitions())}{''.join(parts)}</svg>\n")


def kernel():
    """Rows of the table of `make inspect`, and for each kernel the lanes of a warp in one access."""
    from pictures import WIDTH as DRAWN, global_picture, shared_picture
    from results import Results, read_recording
    from text import COLUMNS as FIGURES
    results = Results(read_recording("build/inspect/transpose/program.json"))
    found = {kernel.name: kernel for kernel in results.kernels}
    parts, y = [], 30

    def text(x, words, kind=""):
        parts.append(f"<text x='{x}' y='{y}' class='{kind}'>{html.escape(words)}</text>")

    text(16, "make inspect FILE=dev/inspect/cases/transpose.cu", "mono name")
    y += 30
    figures = [column for column in FIGURES if column.name in COLUMNS]
    for name in (None, *SITES):
        for column in figures:
            x = COLUMNS[column.name]
            words = column.text(found[name]) if name else column.name
            excess = name and column.name in ("sectors", "wavefr.") and words not in ("1.00", "-")
            text(16 + x, words, f"mono{' end' if x else ''}{' marked' if excess else ''}{'' if name else ' soft'}")
        y += 20
    for name, (space, access) in SITES.items():
        line, site = next((line, site) for line in found[name].lines for site in line.sites
                          if (site["space"], site["access"]) == (space, access))
        drawing, height, caption = (global_picture if space == "global" else shared_picture)(site)
        y += 26
        text(16, name, "name")
        text(170, results.quoted(line.place.file, line.place.line), "mono")
        y += 19
        text(16, f"{space} {access}: {caption}", "soft")
        scale = (WIDTH - 32) / DRAWN
        parts.append(f"<g class='d' transform='translate(16 {y + 10}) scale({scale:.4f})'>{as_xml(drawing)}</g>")
        y += round(10 + scale * height)
    write("kernel", svg(parts, y + 14))


# ---- make puzzle

def verdict():
    """The verdict on a wrong solution of puzzle 7."""
    from judge import Judge, all_puzzles, failed_lines
    from test_puzzles import changed
    puzzle = next(puzzle for puzzle in all_puzzles() if puzzle.number == 7)
    code, _ = changed(puzzle.notes()["solution"], puzzle.notes()["wrong race: one array for both reductions"])
    source = puzzle.with_code(code)
    problem, _ = Judge(puzzle, puzzle.folder / "picture", source).judge()
    lines = ["make puzzle", *failed_lines(puzzle, problem, source)]
    kinds = {0: "mono name", 1: "mono marked", 3: "mono soft"}
    parts = [f"<text x='16' y='{30 + 20 * at}' class='{kinds.get(at, 'mono')}' style='white-space: pre'>"
             f"{html.escape(line)}</text>" for at, line in enumerate(lines)]
    write("verdict", svg(parts, 30 + 20 * len(lines)))


def main():
    plot.require_matplotlib()
    os.chdir(ROOT)
    os.makedirs(WORK, exist_ok=True)
    for draw in (training, memory, kernel, verdict):
        draw()
        print(f"{OUT}/{draw.__name__}.svg: {os.path.getsize(f'{OUT}/{draw.__name__}.svg'):,} bytes")
    size = sum(entry.stat().st_size for entry in os.scandir(OUT))
    if size > MAX_BYTES:
        fail(f"{OUT}: found {size:,} bytes, expected at most {MAX_BYTES:,}", 1)


if __name__ == "__main__":
    main()

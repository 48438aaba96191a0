"""The book's pictures as SVG. A function NAME(numbers) draws the picture of the line "@figure NAME" of a chapter."""
import html
import math
import re
import struct
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


# ---- kernels

REGISTER_COLOURS = ("c1", "c3", "c5", "c2")


def mma_fragment(numbers, lane=9):
    cells, w, h = [], 30, 17   # cells: x, y, width, lane, index of the colour, register
    for row in range(16):
        top, y = row // 8, 170 + row * h
        cells += [(8 + pair * w, y, w, row % 8 * 4 + pair % 4, top + pair // 4 * 2, f"a[{top + pair // 4 * 2}]")
                  for pair in range(8)]
        cells += [(272 + 2 * pair * w, y, 2 * w, row % 8 * 4 + pair, top, f"d[{2 * top}], d[{2 * top + 1}]")
                  for pair in range(4)]
    cells += [(272 + column * w, 20 + pair * h, w, column * 4 + pair % 4, pair // 4 * 2, f"b[{pair // 4}]")
              for pair in range(8) for column in range(8)]
    labels = ((8, 60, "Numbers are lanes."), (8, 78, f"Red: lane {lane}, g = {lane // 4}, t = {lane % 4}."),
              (8, 160, "A: a box is a row, 2 columns"), (530, 34, "B: a box is 2 rows, a column"),
              (530, 52, "blue b[0], violet b[1]"), (530, 184, "D: a box is a row, 2 columns"),
              (530, 202, "blue d[0], d[1]; green d[2], d[3]"), (530, 236, "A: blue a[0], green a[1],"),
              (530, 254, "violet a[2], orange a[3]"))
    return picture("The lanes that hold A (16 × 16), B (16 × 8) and D (16 × 8) of mma.m16n8k16", 450, [
        *(box(x, y, width - 2, h - 2, "c4" if own == lane else REGISTER_COLOURS[colour], own, register)
          for x, y, width, own, colour, register in cells), *(text(*label) for label in labels)])


def swizzle(numbers):
    parts = []
    for x, words, key in ((8, "plain: chunk c at position c", 0), (404, "swizzled: chunk c at position c ^ r", 7)):
        parts += [text(x, 16, words), text(x, 218, "banks 0–3", "soft"),
                  text(x + 348, 218, "banks 28–31", "soft", "end")]
        parts += [box(x + 44 * (c ^ r & key), 26 + 22 * r, 42, 20, "c2" if c == 2 else "c1", c, f"row {r}, chunk {c}")
                  for r in range(8) for c in range(8)]
    return picture("Chunk 2 of eight rows of a tile: in the same four banks, and in all banks", 226, parts)


def ring(numbers, load=6, product=2, end=44):
    source = (ROOT / "dev/kernels/matmul.cu").read_text()
    parts, y, scale = [], 16, 620 / end
    for stages in (2, int(re.search(r"STAGES = COLUMNS == 256 \? (\d+)", source)[1])):
        issued, free, released = 0, 0, [0] * stages
        names = [*(f"stage {s}" for s in range(stages)), "tensor cores"]
        parts.append(text(8, y, f"{stages} stages"))
        parts += [text(8, y + 24 + 24 * i, name, "soft") for i, name in enumerate(names)]
        for tile in range(end // product):
            s = tile % stages
            begin = max(issued, released[s])      # the producer has waited for empty[s]
            start = max(begin + load, free)       # a consumer has waited for full[s]
            issued, free = begin + 0.5, start + product
            released[s] = free
            bars = (s, begin, begin + load, "c2"), (s, start, free, "c1"), (stages, start, free, "c1")
            parts += [box(110 + scale * first, y + 8 + 24 * row, scale * (last - first) - 1, 21, kind, tile)
                      for row, first, last, kind in bars if free <= end]
        y += 24 * stages + 62
    parts.append(text(8, y - 8, "orange: load, at its end full[s] completes; blue: product, at its end empty[s] "
                      "completes; numbers: steps of K", "soft"))
    return picture("Stages of a ring over time, in a model", y, parts)


# ---- memory, formats, several GPUs

CATEGORY_CLASSES = {"weights": "c1", "gradients": "c2", "master": "c3", "adam_m": "c4", "adam_v": "c5",
                    "buffers": "c6", "activations": "c6"}
CATEGORY_WORDS = {"adam_m": "Adam m", "adam_v": "Adam v", "master": "master weights"}


def legend(x, y, entries, step=125):
    """Returns coloured squares with words, from [(class, words)]."""
    return [part for i, (kind, words) in enumerate(entries)
            for part in (box(x + i * step, y - 10, 11, 11, kind), text(x + i * step + 16, y, words))]


def stack(x, y, height, pixels, values, least=34):
    """Returns a horizontal stacked bar, from [(class, value, words)]; a part narrower than `least` has no words."""
    parts = []
    for kind, value, words in values:
        width = value * pixels
        parts.append(box(x, y, width, height, kind, words if width >= least else "", words))
        x += width
    return parts


def loss_scale(numbers):
    def half(x):
        return struct.unpack("e", struct.pack("e", x))[0]
    powers, scale = range(-36, -13, 2), 2.0 ** 16
    at = lambda x: 250 + (math.log2(x) + 38) * 12.1 if x else 200
    rows = [("gradients g", lambda g: g), ("FP16(g)", half), ("FP16(g · 2^16)", lambda g: half(g * scale)),
            ("FP16(g · 2^16) / 2^16", lambda g: half(g * scale) / scale)]
    parts = [box(at(2 ** -24), 22, at(2 ** -14) - at(2 ** -24), 156, "soft"),
             box(at(2 ** -14), 22, at(2.0 ** 3) - at(2 ** -14), 156, "soft"),
             text(at(2 ** -19), 15, "FP16 subnormal", "soft", "middle"),
             text(at(2 ** -6), 15, "normal", "soft", "middle"),
             text(200, 15, "0", "soft", "middle")]
    for i, (name, value) in enumerate(rows):
        y = 36 + 38 * i
        parts += [text(0, y + 9, name), line([(185, y + 24), (750, y + 24)])]
        for power in powers:
            g = 1.37 * 2.0 ** power
            x = value(g)
            parts.append(box(at(x) - 4, y, 8, 13, "c4" if x == 0 else "c1", title=f"{g:.4g} becomes {x:.4g}"))
    parts += [text(at(2.0 ** p), 200, f"2^{p}", "soft", "middle") for p in (-36, -24, -14, -4)]
    return picture("Gradients in FP16 without and with a loss scale", 208, parts)


def memory_step(numbers):
    traces = {mode: numbers.chapter["timeline"][mode] for mode in ("none", "full")}
    ms, most = (max(trace[key] for trace in traces.values()) for key in ("ms", "planned"))
    shown = [c for c in ("weights", "master", "adam_m", "adam_v", "gradients", "activations")
             if any(any(trace["live"].get(c, [])) for trace in traces.values())]
    passes, parts = {"forward": "c1", "recompute": "c2", "backward": "c3", "update": "c4"}, []
    for i, (mode, trace) in enumerate(traces.items()):
        x, y = (lambda t: 60 + t / ms * 690), (lambda b: 30 + 190 * i + 145 * (1 - b / most))
        live = trace["live"]
        times = [t for a, b in zip(live["ms"], live["ms"][1:] + [trace["ms"]]) for t in (a, b)]
        base = [0] * len(times)
        parts += [text(60, 18 + 190 * i, f"--recompute {mode}"),
                  text(54, y(trace["planned"]) + 4, f"{trace['planned'] / 1e6:.0f} MB", "soft", "end"),
                  text(54, y(0) + 4, "0", "soft", "end"), text(750, y(0) + 20, f"{ms:.0f} ms", "soft", "end")]
        for category in shown:
            top = [b + v for b, v in zip(base, (v for v in live[category] for _ in range(2)))]
            outline = [*zip(times, top), *reversed([*zip(times, base)])]
            points = " ".join(f"{x(t):.5g},{y(b):.5g}" for t, b in outline)
            parts.append(f'<polygon class="{CATEGORY_CLASSES[category]}" points="{points}"/>')
            base = top
        parts += [box(x(a), y(0) + 2, max(0.5, x(b) - x(a)), 5, passes[name], title=name)
                  for name, a, b in trace["passes"] if name in passes]
        parts.append(line([(60, y(trace["planned"])), (750, y(trace["planned"]))]))
    parts += legend(60, 404, [(CATEGORY_CLASSES[c], CATEGORY_WORDS.get(c, c)) for c in shown], 118)
    parts += [text(0, 424, "strip below:", "soft"), *legend(78, 424, [(k, n) for n, k in passes.items()], 118)]
    return picture("Live memory over one training step", 432, parts)


def zero(numbers):
    rows = [numbers.plan(f"--model gpt2-xl --micro-batch 1 --precision bf16 --gpu-memory 80GB --gpus 8 --zero {stage}")
            for stage in range(4)]
    shown, parts = list(CATEGORY_CLASSES)[:6], []
    pixels = 590 / max(sum(plan["bytes"][c] for c in shown) for plan in rows)
    for stage, plan in enumerate(rows):
        y, total = 6 + 36 * stage, sum(plan["bytes"][c] for c in shown)
        values = [(CATEGORY_CLASSES[c], plan["bytes"][c], f"{plan['bytes'][c] / 1e9:.2g}") for c in shown]
        parts += [text(0, y + 18, f"--zero {stage}"), *stack(70, y, 26, pixels, values),
                  text(76 + total * pixels, y + 18, f"{total / 1e9:.1f} GB")]
    parts += legend(0, 168, [(CATEGORY_CLASSES[c], CATEGORY_WORDS.get(c, c)) for c in shown])
    return picture("Bytes of the model's state on each of 8 GPUs, GPT-2 XL", 176, parts)


def tensor_parallel(numbers):
    parts, kinds = [], ["c1", "c2"]
    columns = [("ln1, ln2", 74), ("all-gather", 175), ("qkv or fc", 290), ("attention or GELU", 424),
               ("attproj or fcproj", 556), ("reduce-scatter", 690)]
    parts += [text(x, 16, name, "", "middle") for name, x in columns]
    parts += [text(x, 34, name, "soft", "middle") for x, name in
              ((74, "N/t rows, C"), (175, "N rows, C"), (290, "C × columns/t"), (424, "own heads, columns"),
               (556, "rows/t × C"), (690, "N/t rows, C"))]
    for rank, kind in enumerate(kinds):
        y, other = 50 + 130 * rank, 50 + 130 * (1 - rank)
        parts += [text(0, y + 54, f"rank {rank}"), box(52, y + 50 * rank, 44, 50, kind),
                  *[box(153, y + 50 * r, 44, 50, kinds[r]) for r in (0, 1)],
                  box(245, y + 5, 90, 90, "soft"), box(245 + 45 * rank, y + 5, 45, 90, kind),
                  box(380 + 22 * rank, y, 44, 100, kind, ("0, 1", "2, 3")[rank]),
                  box(511, y + 5, 90, 90, "soft"), box(511, y + 5 + 45 * rank, 90, 45, kind),
                  box(668, y + 50 * rank, 44, 50, kind)]
        parts += [line([(96, y + 50 * rank + 25), (153, y + 50 * rank + 25)], f"s{rank + 1}"),
                  line([(96, y + 50 * rank + 25), (153, other + 50 * rank + 25)], f"s{rank + 1}")]
        parts += [line([(601, row + 50), (668, y + 50 * rank + 25)], f"s{r + 1}") for r, row in
                  ((rank, y), (1 - rank, other))]
        parts += [line([(197, y + 50), (245, y + 50)]), line([(335, y + 50), (380 + 22 * rank, y + 50)]),
                  line([(424 + 22 * rank, y + 50), (511, y + 50)])]
    parts.append(text(380, 306, "coloured: what the rank holds; lines between ranks are communication", "soft",
                      "middle"))
    return picture("Half of a block on a tensor group of two GPUs", 314, parts)

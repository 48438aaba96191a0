"""The book's pictures as SVG. A function NAME(numbers) draws the picture of the line "@figure NAME" of a chapter."""
import functools
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


def constant(file, name):
    """Returns the value of `constexpr TYPE name = VALUE;` in a source."""
    found = re.search(rf"constexpr [\w:]+ {name} = (\d+)", (ROOT / file).read_text())
    if not found:
        raise KeyError(f"{file}: no constant {name}")
    return int(found[1])


# ---- kernels

def numbered_calls(function):
    """Returns {"1": [(function, columns of its result)], ...} of the numbered lines of a function in train_gpt.cu."""
    body = (ROOT / "train_gpt.cu").read_text().split(f"\nvoid {function}(")[1].split("\n}\n")[0]
    marks = re.split(r"/\* ([\d ]+) \*/", body)
    call = re.compile(r"\b((?:matmul|layernorm|attend)\w*)\((.*?)\);", re.S)
    return {number: [(name, re.sub(r" \* |t$", "", arguments.split(", ")[-1]))
                     for name, arguments in call.findall(part)] for number, part in zip(marks[1::2], marks[2::2])}


def step(numbers):
    outputs = ("ln1", "qkv", "att", "res2", "ln2", "fc, gelu", "next res1")
    parts = [text(8, 14, "forward_block() →", "soft"), text(752, 306, "← backward_block()", "soft", "end")]
    backward = numbered_calls("backward_block")
    for i, (number, [(name, columns)]) in enumerate(numbered_calls("forward_block").items()):
        x, rows = 8 + i * 107, [number, *name.replace("_forward", "").split("_")]
        parts += [box(x, 22, 100, 62, "c1"), box(x, 130, 100, 160, "c2")]
        parts += [text(x + 50, 38 + 16 * j, row, "on", "middle") for j, row in enumerate(rows)]
        parts += [text(x + 50, 102, outputs[i], "", "middle"),
                  text(x + 50, 118, f"(N, {'C' if columns == 'p' else columns})", "soft", "middle")]
        back = [(each, call.replace("_backward", "").split("_")) for each in reversed(number.split())
                for call, _ in backward[each]]
        rows = [row for each, (first, *rest) in back for row in (f"{each} {first}", *rest, "")]
        parts += [text(x + 50, 147 + 14 * j, row, "on", "middle") for j, row in enumerate(rows)]
    return picture("The eight lines of a block, forward and backward", 314, parts)


def butterfly(numbers):
    lanes, parts = [[i] for i in range(8)], []
    for level, distance in enumerate((0, 4, 2, 1)):
        y = 20 + 64 * level
        if distance:
            parts += [line([(60 + 90 * i, y - 36), (60 + 90 * (i ^ distance), y)]) for i in range(8)]
            lanes = [sorted(lanes[i] + lanes[i ^ distance]) for i in range(8)]
        parts += [box(20 + 90 * i, y, 80, 28, f"c{1 + level}", "+".join(map(str, own)) if level < 3 else "all")
                  for i, own in enumerate(lanes)]
    return picture("A sum over eight lanes by shuffles at distances 4, 2 and 1", 246, parts)


def packs(numbers):
    parts = []
    for r, (words, size, stride) in enumerate((("one BF16 per lane", 2, 2), ("a pack of 8 BF16 per lane", 16, 16),
                                               ("half of a pack of 8 FP32 per lane", 16, 32))):
        y, sectors = 18 + 72 * r, -(-8 * stride // 32)
        parts.append(text(8, y, f"{words}: 32 lanes use {32 * size} of {32 * stride} bytes"))
        parts += [box(8 + 2.9 * stride * i, y + 8, 2.9 * size - 1, 20, f"c{1 + i % 2}", i if size > 2 else "")
                  for i in range(8)]
        parts += [box(8 + 92.8 * s, y + 31, 91, 14, "soft", "", "a sector of 32 bytes") for s in range(sectors)]
    return picture("The loads of lanes 0 to 7, and the sectors of 32 bytes that memory transfers for them", 212, parts)


def single(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def fixed_order(numbers):
    x = [single(v) for v in (0.1, -3.7, 1000.3, 0.02, -996.9, 5.5, 0.003, -4.4)]

    def chain(values):
        return functools.reduce(lambda total, value: single(total + value), values)

    def pairs(values):
        half = len(values) // 2
        return values[0] if half == 0 else pairs([single(a + b) for a, b in zip(values, values[half:])])
    parts = [box(8 + 93 * i, 8, 88, 24, "c1", f"{v:.6g}") for i, v in enumerate(x)]
    for i, (words, total) in enumerate((("from left to right", chain(x)), ("from right to left", chain(x[::-1])),
                                        ("in pairs: 0 and 4, 1 and 5, ...", pairs(x)))):
        columns = (0, words), (250, f"{total:.9f}"), (400, f"bits {struct.pack('>f', total).hex()}")
        parts += [text(8 + place, 56 + 20 * i, what) for place, what in columns]
    for i, (words, count) in enumerate((("rows of (N, C)", 64), ("blocks: partials", 32), ("threads: some partials", 16),
                                        ("two shuffles: a sum per warp", 4), ("warps in order, old grad", 1))):
        parts += [box(250 + 500 / count * j, 118 + 30 * i, 500 / count - 2, 22, f"c{1 + i}") for j in range(count)]
        parts.append(text(8, 134 + 30 * i, words))
    return picture("The same FP32 numbers in three orders, and the tree of a column sum", 276, parts)


def online_softmax(numbers):
    scores, m, total, parts = (1.0, 3.0, 0.5, 2.0, 2.5, 4.5, 1.5, 0.0), -math.inf, 0.0, []
    for i, now in enumerate((scores[:4], scores[4:])):
        y, new = 20 + 116 * i, max(m, *now)
        rescale, p = math.exp(m - new), [math.exp(s - new) for s in now]
        rows = (f"m' = max(m, S) = max({'−∞' if i == 0 else m}, {max(now)}) = {new}",
                f"rescale = exp(m − m') = {rescale:.4f}",
                f"sum = {total:.4f} · {rescale:.4f} + {sum(p):.4f} = {total * rescale + sum(p):.4f}",
                f"O = O · {rescale:.4f} + P V")
        parts.append(text(8, y, f"tile {i}", "soft"))
        parts += [box(8 + 92 * k, y + 10, 86, 24, "c1", f"S = {s}") for k, s in enumerate(now)]
        parts += [box(8 + 92 * k, y + 40, 86, 24, "c3", f"P = {v:.4f}") for k, v in enumerate(p)]
        parts += [text(400, y + 10 + 20 * k, row) for k, row in enumerate(rows)]
        m, total = new, total * rescale + sum(p)
    direct = math.log(sum(map(math.exp, scores)))
    parts += [text(8, 246, f"lse = m + log(sum) = {m + math.log(total):.6f}"),
              text(400, 246, f"log of the sum of all exp(S) = {direct:.6f}")]
    return picture("Online softmax of eight scores in two tiles", 258, parts)


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


def wgmma_fragment(numbers, lane=9):
    g, t = divmod(lane, 4)
    parts = [text(8, 14, "D of a warpgroup (64 × 64), blocks of 8 columns"), text(400, 14, "the red part: 16 × 16")]
    for w in range(4):
        parts += [text(8, 60 + 64 * w, f"warp {w}")] + [
            box(80 + 36 * i, 24 + 64 * w, 34, 62, "c4" if w == 0 and i < 2 else "c5" if w % 2 else "c1", 8 * i,
                f"rows {16 * w} to {16 * w + 15}, columns {8 * i} to {8 * i + 7}") for i in range(8)]
    for row in range(16):
        for pair in range(8):
            d, mine = pair // 4 * 4 + row // 8 * 2, row % 8 * 4 + pair % 4 == lane
            parts.append(box(400 + 44 * pair, 24 + 16 * row, 42, 15, REGISTER_COLOURS[d // 2] if mine else "soft",
                             f"{d}, {d + 1}" if mine else "", f"lane {row % 8 * 4 + pair % 4}: d[{d}], d[{d + 1}]"))
    parts += [text(8, 300, f"Lane {lane} holds d[0] … d[7]: rows {g} and {g + 8}, columns {2 * t}, {2 * t + 1}, "
                   f"{2 * t + 8}, {2 * t + 9}. Rounded in pairs they are an A fragment:")]
    parts += [text(8 + 160 * i, 318, f"a[{i}] = d[{2 * i}], d[{2 * i + 1}]") for i in range(4)]
    return picture("The accumulator of wgmma, and how it becomes an operand", 326, parts)


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


def tile_reuse(numbers):
    square, registers = (constant("dev/kernels/matmul.cu", name) for name in ("SQUARE", "REGISTER_TILE"))
    tiles = ((1, 1, "one element"), (square, square, "step 2"), (registers, registers, "steps 3 to 5"),
             (128, 256, "step 6"), (2048, 2112, "step 7: all tiles in progress"))
    parts = [text(8, 14, "FLOPs per byte of A and B, by the part of the result that they are loaded for", "soft")]
    for i, (m, n, words) in enumerate(tiles):
        ratio = m * n / (m + n)
        width = 320 * math.log2(2 * ratio) / 11.1 + 2
        parts += [text(8, 41 + 28 * i, f"{m} × {n}, {words}"), box(260, 26 + 28 * i, width, 20, "c1"),
                  text(268 + width, 41 + 28 * i, f"{ratio:,.4g}")]
    return picture("FLOPs per byte by the size of the tile, logarithmic", 170, parts)


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


def formats(numbers):
    rows = [("E4M3", 4, 3, 1), ("E5M2", 5, 2, 0), ("FP16", 5, 10, 0), ("BF16", 8, 7, 0), ("FP32", 8, 23, 0)]
    at, parts = (lambda power: 110 + (power + 152) / 282 * 640), [text(0, 14, "range, on a log2 axis")]
    for i, (name, exponent, mantissa, finite) in enumerate(rows):     # finite: E4M3 has numbers in its last exponent
        y, bias = 28 + 34 * i, 2 ** (exponent - 1) - 1
        low, high, wide = 1 - bias, 2 ** exponent - 2 + finite - bias, exponent == 8
        largest = (2 - 2.0 ** -mantissa * (1 + finite)) * 2.0 ** high
        parts += [text(0, y + 15, name), box(at(low - mantissa), y, at(low) - at(low - mantissa), 20, "c2"),
                  box(at(low), y, at(high + 1) - at(low), 20, "c1"),
                  text(at(low - mantissa) - 4, y + 14, f"2^{low - mantissa}", "soft", "end"),
                  text(at(high + 1) + (-6 if wide else 4), y + 14, f"{largest:.2g}" if wide else f"{largest:,.0f}",
                       "on" if wide else "soft", "end" if wide else "start")]
    parts += legend(110, 214, [("c1", "normal"), ("c2", "subnormal: each power of 2 down loses a bit of mantissa")])
    parts.append(text(0, 246, "the numbers from 1 to 2, a mark for each: values between two marks are rounded"))
    for i, (name, _, mantissa, _) in enumerate(rows):
        y, steps = 258 + 24 * i, 2 ** mantissa
        parts += [text(0, y + 13, name), text(752, y + 13, f"{steps:,}", "soft", "end")]
        parts += ([line([(110 + 560 * k / steps, y), (110 + 560 * k / steps, y + 16)], "s1") for k in range(steps + 1)]
                  if steps <= 128 else [box(110, y, 560, 16, "c1", "closer than the picture can show")])
    return picture("Range and precision of the number formats", 380, parts)


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


def bytes_per_parameter(numbers):
    rows = [("FP32", "fp32", "fp32"), ("BF16, BF16 gradients", "bf16", "bf16"),
            ("BF16, FP32 gradients", "bf16", "fp32")]
    shown, parts = list(CATEGORY_CLASSES)[:5], []
    for i, (name, precision, grads) in enumerate(rows):
        plan = numbers.plan(f"--model gpt2 --precision {precision} --grad-dtype {grads} --gpu-memory 80GB")
        each = {c: plan["bytes"][c] / plan["state"] * plan["bytes_per_parameter"] for c in shown}
        parts += [text(0, 24 + 36 * i, name), text(160 + 30 * plan["bytes_per_parameter"], 24 + 36 * i,
                                                   f"{plan['bytes_per_parameter']:g} bytes")]
        parts += stack(155, 6 + 36 * i, 26, 30, [(CATEGORY_CLASSES[c], b, f"{b:g}") for c, b in each.items()], 20)
    parts += legend(155, 132, [(CATEGORY_CLASSES[c], CATEGORY_WORDS.get(c, c)) for c in shown], 118)
    return picture("Bytes of the model's state per parameter", 140, parts)


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

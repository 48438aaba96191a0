"""The book's pictures as SVG. A function NAME(numbers) draws the picture of the line "@figure NAME" of a chapter."""
import html
import itertools
import math
import struct


# ---- drawing: coordinates in pixels; colours are variables of page.html, so that they follow its colour scheme

def text(x, y, words, colour="ink", anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" fill="var(--{colour})" text-anchor="{anchor}">{html.escape(str(words))}</text>'


def box(x, y, width, height, colour, words="", title=""):
    """A rectangle with words in its centre, and a title under the mouse."""
    hover = f"<title>{html.escape(title)}</title>" if title else ""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="var(--{colour})">{hover}</rect>'
    return rect + (text(x + width / 2, y + height / 2 + 4, words, "on", "middle") if words != "" else "")


def line(x1, y1, x2, y2, colour="soft"):
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="var(--{colour})" stroke-width="1.5"/>'


def legend(x, y, colours):
    """Coloured squares with words, from {words: colour}."""
    parts = []
    for i, (words, colour) in enumerate(colours.items()):
        parts += [box(x + 120 * i, y - 10, 11, 11, colour), text(x + 120 * i + 16, y, words.replace("_", " "))]
    return "".join(parts)


def picture(title, height, parts):
    return f'<svg viewBox="0 0 760 {height:g}" role="img"><title>{html.escape(title)}</title>{"".join(parts)}</svg>'


# ---- kernels

def mma_fragment(numbers):
    colours, w, h = ("c1", "c3", "c5", "c2"), 30, 17
    parts = [text(8, 142, "A: blue a[0], green a[1],"), text(8, 160, "violet a[2], orange a[3]"),
             text(530, 34, "B: blue b[0], violet b[1]"), text(530, 184, "D: blue d[0], d[1]; green d[2], d[3]")]

    def cell(x, y, width, lane, colour, registers):
        parts.append(box(x, y, width - 2, h - 2, "c4" if lane == 9 else colours[colour], lane, registers))
    for row, pair in itertools.product(range(16), range(8)):
        i = row // 8 + pair // 4 * 2
        cell(8 + pair * w, 170 + row * h, w, row % 8 * 4 + pair % 4, i, f"a[{i}]")
    for pair, column in itertools.product(range(8), range(8)):
        i = pair // 4
        cell(272 + column * w, 20 + pair * h, w, column * 4 + pair % 4, 2 * i, f"b[{i}]")
    for row, pair in itertools.product(range(16), range(4)):
        i = row // 8
        cell(272 + pair * 2 * w, 170 + row * h, 2 * w, row % 8 * 4 + pair, i, f"d[{2 * i}], d[{2 * i + 1}]")
    return picture("The lanes that hold A (16 × 16), B (16 × 8) and D (16 × 8) of mma.m16n8k16", 450, parts)


def wgmma_fragment(numbers):
    colours, parts = ("c4", "c2", "c3", "c5"), [text(8, 14, "D of a warpgroup, in blocks of 16 × 8"),
                                                text(400, 14, "the red blocks; coloured: lane 9")]
    for w, i in itertools.product(range(4), range(8)):
        colour = "c4" if w == 0 and i < 2 else "c1" if w % 2 == 0 else "c5"
        parts.append(box(80 + 36 * i, 24 + 64 * w, 34, 62, colour, 8 * i, f"rows {16 * w} to {16 * w + 15}"))
    parts += [text(8, 60 + 64 * w, f"warp {w}") for w in range(4)]
    for row, pair in itertools.product(range(16), range(8)):
        i, lane = pair // 4 * 2 + row // 8, row % 8 * 4 + pair % 4
        parts.append(box(400 + 44 * pair, 24 + 16 * row, 42, 15, colours[i] if lane == 9 else "c6",
                         f"{2 * i}, {2 * i + 1}" if lane == 9 else "", f"lane {lane}: d[{2 * i}], d[{2 * i + 1}]"))
    return picture("The accumulator of wgmma, and the registers d of one lane", 286, parts)


def swizzle(numbers):
    parts = []
    for x, words, key in ((8, "plain: chunk c at position c", 0), (404, "swizzled: chunk c at position c ^ r", 7)):
        parts += [text(x, 16, words), text(x, 218, "banks 0–3", "soft"),
                  text(x + 348, 218, "banks 28–31", "soft", "end")]
        parts += [box(x + 44 * (c ^ r & key), 26 + 22 * r, 42, 20, "c2" if c == 2 else "c1", c, f"row {r}, chunk {c}")
                  for r in range(8) for c in range(8)]
    return picture("Chunk 2 of eight rows of a tile: in the same four banks, and in all banks", 226, parts)


def ring(numbers):
    load, product, end, parts = 6, 2, 44, []
    for y, stages in ((16, 2), (126, 4)):
        parts.append(text(8, y, f"{stages} stages"))
        parts += [text(8, y + 24 + 24 * s, f"stage {s}", "soft") for s in range(stages)]
        parts.append(text(8, y + 24 + 24 * stages, "tensor cores", "soft"))
        issued, free, released = 0, 0, [0] * stages
        for tile in range(end // product):
            s = tile % stages
            begin = max(issued, released[s])      # the producer has waited for empty[s]
            start = max(begin + load, free)       # a consumer has waited for full[s]
            issued, free = begin + 0.5, start + product
            released[s] = free
            bars = (s, begin, begin + load, "c2"), (s, start, free, "c1"), (stages, start, free, "c1")
            parts += [box(110 + 14 * first, y + 8 + 24 * row, 14 * (last - first) - 1, 21, colour, tile)
                      for row, first, last, colour in bars if free <= end]
    parts.append(text(8, 276, "orange: load, at its end full[s] completes; blue: product, at its end empty[s] "
                      "completes; numbers: steps of K", "soft"))
    return picture("Stages of a ring over time, in a model", 284, parts)


# ---- formats, memory, several GPUs

COLOURS = {"weights": "c1", "gradients": "c2", "master": "c3", "adam_m": "c4", "adam_v": "c5", "buffers": "c6"}


def formats(numbers):
    parts = [text(0, 14, "positive numbers, on a log2 axis; orange: subnormal, with fewer bits of mantissa")]
    powers = {"E4M3": (-9, -6, 9), "E5M2": (-16, -14, 16), "FP16": (-24, -14, 16), "BF16": (-133, -126, 128),
              "FP32": (-149, -126, 128)}    # of the smallest subnormal and normal number; all are below 2^(the last)

    def at(power):
        return 60 + (power + 150) / 280 * 700
    for i, (name, (lowest, normal, high)) in enumerate(powers.items()):
        y = 26 + 28 * i
        parts += [text(0, y + 15, name), box(at(lowest), y, at(normal) - at(lowest), 20, "c2"),
                  box(at(normal), y, at(high) - at(normal), 20, "c1"),
                  text(at(lowest) - 4, y + 15, f"2^{lowest}", "soft", "end") if lowest > -100 else ""]
    return picture("The range of each format", 170, parts)


def loss_scale(numbers):
    def half(x):
        return struct.unpack("e", struct.pack("e", x))[0]

    def at(x):
        return 250 + (math.log2(x) + 38) * 12.1 if x else 200
    rows = {"gradients g": lambda g: g, "FP16(g)": half, "FP16(g · 2^16)": lambda g: half(g * 2 ** 16),
            "FP16(g · 2^16) / 2^16": lambda g: half(g * 2 ** 16) / 2 ** 16}
    parts = [text(200, 15, "0", "soft", "middle")]
    for low, high, words, colour in ((-24, -14, "FP16 subnormal", "rule"), (-14, 3, "normal", "panel")):
        x, width = at(2.0 ** low), at(2.0 ** high) - at(2.0 ** low)
        parts += [box(x, 22, width, 156, colour), text(x + width / 2, 15, words, "soft", "middle")]
    for y, (name, function) in zip(range(36, 160, 38), rows.items()):
        parts += [text(0, y + 9, name), line(185, y + 24, 750, y + 24)]
        for power in range(-36, -13, 2):
            g = 1.37 * 2.0 ** power
            x = function(g)
            parts.append(box(at(x) - 4, y, 8, 13, "c1" if x else "c4", title=f"{g:.4g} becomes {x:.4g}"))
    parts += [text(at(2.0 ** power), 200, f"2^{power}", "soft", "middle") for power in (-36, -24, -14, -4)]
    return picture("Gradients in FP16 without and with a loss scale", 208, parts)


def memory_step(numbers):
    traces = {mode: numbers.chapter["timeline"][mode] for mode in ("none", "full")}
    ms, most = (max(trace[key] for trace in traces.values()) for key in ("ms", "planned"))
    colours = {"weights": "c1", "adam_m": "c4", "adam_v": "c5", "gradients": "c2", "activations": "c6"}
    passes = {"forward": "c1", "recompute": "c2", "backward": "c3", "update": "c4"}
    parts = [legend(60, 404, colours), text(0, 424, "strip:", "soft"), legend(60, 424, passes)]
    for bottom, (mode, trace) in zip((175, 365), traces.items()):
        x, y = (lambda t: 60 + 690 * t / ms), (lambda b: bottom - 145 * b / most)
        planned, live, tops, areas = trace["planned"], trace["live"], [0] * len(trace["live"]["ms"]), []
        for category, colour in colours.items():
            tops = [top + b for top, b in zip(tops, live[category])]
            steps = "".join(f"H{x(t):.5g}V{y(top):.5g}" for t, top in zip(live["ms"], tops))
            areas.append(f'<path fill="var(--{colour})" d="M60,{bottom}{steps}H{x(trace["ms"]):.5g}V{bottom}Z"/>')
        parts += reversed(areas)            # each area covers the lower part of the one before
        parts += [box(x(a), bottom + 2, max(0.5, x(b) - x(a)), 5, passes[name], title=name)
                  for name, a, b in trace["passes"]]
        parts += [text(60, bottom - 157, f"--recompute {mode}"), line(60, y(planned), 750, y(planned)),
                  text(54, y(planned) + 4, f"{planned / 1e6:.0f} MB", "soft", "end"),
                  text(54, bottom + 4, "0", "soft", "end"), text(750, bottom + 20, f"{ms:.0f} ms", "soft", "end")]
    return picture("Live memory over one training step", 432, parts)


def zero(numbers):
    parts = [legend(0, 168, COLOURS)]
    for stage in range(4):
        plan = numbers.plan("--model gpt2-xl --micro-batch 1 --precision bf16 --gpu-memory 80GB --gpus 8 "
                            f"--zero {stage}")
        x, y = 70, 6 + 36 * stage
        for category, colour in COLOURS.items():
            gb = plan["bytes"][category] / 1e9
            parts.append(box(x, y, 21 * gb, 26, colour, f"{gb:.2g}" if gb > 1.6 else "", f"{gb:.2g}"))
            x += 21 * gb
        parts += [text(0, y + 18, f"--zero {stage}"), text(x + 6, y + 18, f"{(x - 70) / 21:.1f} GB")]
    return picture("Bytes of the model's state on each of 8 GPUs, GPT-2 XL", 176, parts)

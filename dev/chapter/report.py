"""The report: for each of the eleven questions a figure, a table and a few sentences; the last three are in
report_bits.py.

Each function below takes what its namesake in measure.py returned, draws, and gives a Section.
`rows` are for the summary at the top: (what, the chapter's figure, the figure here).
"""
import base64
import html
import os
import statistics

import matplotlib
from matplotlib import pyplot
from matplotlib.patches import Patch
from matplotlib.lines import Line2D

from measure import LARGE, MODES, told
from page import CHAPTER_COLOR, Section, concluded, note_chapter_line, number, percent, size, spread, table, withheld
from report_bits import failures, formats, fp8_quality

CATEGORIES = {"weights": "#4e79a7", "master": "#86b4d8", "adam_m": "#b07aa1", "adam_v": "#d4a6c8",
              "gradients": "#f28e2b", "buffers": "#edc948", "activations": "#59a14f", "workspace": "#9c9c9c"}
MODE_COLORS = {"none": "#4e79a7", "selective": "#f28e2b", "full": "#59a14f"}
PASS_COLORS = {"forward": "#4e79a7", "recompute": "#edc948", "backward": "#e15759", "update": "#76b7b2"}
ZERO_PAPER_GB = (120, 31.4, 16.6, 1.9)      # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs
CHAPTER_GB = {"1b": (16, 20), "7b": (112, 140), "70b": (1120, 1400), "405b": (6480, 8100)}   # without, with FP32 gradients


# ---- 1

def state(results, about):
    figure, axes = pyplot.subplots(1, len(LARGE), figsize=(10.5, 3.9))
    shown = ["weights", "gradients", "master", "adam_m", "adam_v", "activations"]
    for axis, model in zip(axes, LARGE):
        for x, plan in enumerate(results[model].values()):
            bottom = 0
            for category in shown:
                height = plan["bytes"][category] / 1e9
                axis.bar(x, height, 0.7, bottom, color=CATEGORIES[category], alpha=0.55 if category == "activations" else 1)
                bottom += height
        axis.axhline(CHAPTER_GB[model][0], color=CHAPTER_COLOR, linestyle="--", linewidth=1.2)
        plan = next(iter(results[model].values()))
        axis.set_title(f"{model.upper()}: N = {number(plan['parameters'] / 1e9)} billion, T = {plan['seq_len']:,}", fontsize=9)
        axis.set_xticks(range(3), ["FP32", "BF16,\nBF16 grad.", "BF16,\nFP32 grad."], fontsize=7.5)
        axis.grid(axis="x", visible=False)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.02)
    axes[0].set_ylabel("GB")
    handles = [Patch(color=CATEGORIES[c], alpha=0.55 if c == "activations" else 1, label=c) for c in shown]
    handles.append(Line2D([], [], color=CHAPTER_COLOR, linestyle="--", label="chapter"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7)

    def state_bytes(plan):
        return sum(plan["bytes"][category] for category in shown[:-1])
    rows = []
    for model in LARGE:
        for name, plan in results[model].items():
            bytes_each, gb = (20, CHAPTER_GB[model][1]) if name == "BF16, FP32 gradients" else (16, CHAPTER_GB[model][0])
            rows.append([model.upper(), name, f"{plan['parameters']:,}", *[number(plan["bytes"][c] / 1e9) for c in shown[:-1]],
                         number(state_bytes(plan) / 1e9), f"{gb:,} ({bytes_each} N)",
                         number(plan["bytes"]["activations"] / 1e9), " / ".join(str(plan["max_micro_batch"][m]) for m in MODES)])
    plan = results["7b"]["BF16, BF16 gradients"]
    return Section(
        "Where the bytes of a model go", figure, "1_bytes.png",
        [f"A parameter's weight, gradient and two moments of Adam take {plan['bytes_per_parameter']:.0f} bytes in FP32 and in BF16 "
         "alike: BF16 halves weights and gradients, and then needs FP32 master weights beside them. Where gradients are "
         "accumulated in FP32 (the default here) it is 18; the chapter's 20 hold BF16 gradients and an FP32 accumulator at once.",
         f"The 7B shape has {number(plan['parameters'] / 1e9)} billion parameters with GPT-2's vocabulary, hence "
         f"{size(state_bytes(plan))} for the chapter's "
         "112 GB; the other sizes differ for the same reason. Not even 7B trains on one 80 GB card: from there on "
         "state must be split over GPUs (ZeRO). Activations, light green, are those of a single sequence of T tokens."],
        table(["model", "precision", "parameters", "weights GB", "gradients GB", "master GB", "Adam m GB", "Adam v GB", "state GB",
               "chapter GB", "activations GB, 1 sequence", "largest micro-batch in 80 GB: none / selective / full"], rows),
        [("State of 1B / 7B / 70B / 405B in mixed precision", " / ".join(f"{gb:,}" for gb, _ in CHAPTER_GB.values()) + " GB",
          " / ".join(number(state_bytes(results[model]["BF16, BF16 gradients"]) / 1e9) for model in LARGE) + " GB (planned)")],
        "Planned, for an 80 GB card; bars: state by category, with the activations of one sequence on top, --recompute none.")


# ---- 2

def activations(results, about):
    lengths, curves = results["lengths"], results["curves"]
    formula = [point["korthikanti"] for point in curves["naive, none"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.3))
    layers_h = formula[0] / lengths[0] / (34 + 5 * 32 * lengths[0] / results["channels"])     # L * h
    for name, points in curves.items():
        attention, mode = name.split(", ")
        style = {"color": MODE_COLORS[mode], "linestyle": "-" if attention == "flash" else ":",
                 "marker": "o" if attention == "flash" else "s", "markersize": 3.5}
        left.plot(lengths, [p["bytes"] / 1e9 for p in points], **style)
        right.plot(lengths, [p["bytes"] / T / layers_h for T, p in zip(lengths, points)], **style)
    for axis, values in ((left, [f / 1e9 for f in formula]), (right, [f / T / layers_h for T, f in zip(lengths, formula)])):
        axis.plot(lengths, values, color=CHAPTER_COLOR, linestyle="--", linewidth=1.5)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{T // 1024}k" if T >= 1024 else T for T in lengths])
        axis.set_xlabel("sequence length T (tokens)")
    state_gb = results["state"] / 1e9
    for gb, text, place in ((state_gb, f"{number(state_gb)} GB: the model's state", "bottom"), (80, "80 GB: a card", "top")):
        left.axhline(gb, color="0.5", linewidth=0.8)
        left.text(lengths[0], gb, text, color="0.35", va=place, fontsize=7.5)
    left.set(ylabel="GB", title="Activations of one sequence, 7B, BF16")
    right.set(ylabel="bytes / (T · L · h)", title="The same, for each token, layer and channel")
    handles = [Line2D([], [], color=MODE_COLORS[mode], linestyle="-" if attention == "flash" else ":",
                      marker="o" if attention == "flash" else "s", markersize=3.5, label=f"{attention}, {mode}")
               for mode in MODES for attention in ("flash", "naive")]
    handles.append(Line2D([], [], color=CHAPTER_COLOR, linestyle="--", label="34 + 5aT/h"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7)

    rows = [[f"{T:,}", number(f / 1e9), *[number(curves[name][i]["bytes"] / 1e9) for name in curves]]
            for i, (T, f) in enumerate(zip(lengths, formula))]
    at = lengths.index(2048)
    gpt3 = results["gpt3_175b"]
    above_state = {name: next((f"T = {T:,} on" for T, p in zip(lengths, points) if p["bytes"] > results["state"]), "no length here")
                   for name, points in curves.items()}
    less = 1 - gpt3["selective"]["per_token_layer"] / gpt3["none"]["per_token_layer"]
    full = 1 - curves["flash, full"][at]["bytes"] / curves["flash, none"][at]["bytes"]
    full_naive = 1 - curves["naive, full"][at]["bytes"] / curves["naive, none"][at]["bytes"]
    return Section(
        "Activations against sequence length", figure, "2_activations.png",
        [f"With naive attention the T × T scores and probabilities of each head turn a straight line into a parabola. At T = 2,048 "
         f"the whole is {size(curves['naive, none'][at]['bytes'])}, where Korthikanti's formula says {size(formula[at])}: the "
         f"formula also counts dropout's masks "
         "and outputs (2 of its 34 bytes, 3 of its 5), which this model does not have, and leaves out the head and the gradients in "
         "flight, which the plan holds. "
         f"One sequence's activations outweigh the whole state of the model from {above_state['naive, none']}; with flash attention "
         f"from {above_state['flash, none']}.",
         "Flash attention never stores the square, so its lines stay flat in the right panel (and fall a little past T = 8,192: the "
         "head takes 8,192 rows at a time). Who uses it already has most of "
         "selective recomputation. What --recompute selective still drops then is LayerNorm's and GELU's outputs; full keeps one "
         "tensor for a layer.",
         f"For the shape of GPT-3 175B with naive attention, selective recomputation keeps {100 * less:.0f} % less for each layer; "
         f"the chapter's figure is 70 %. "
         f"Full recomputation takes {100 * full_naive:.0f} % off this 7B's naive activations at T = 2,048 ({100 * full:.0f} % off "
         f"flash's); the chapter's figure is 90 % and more."],
        table(["T", "formula GB", *[name + " GB" for name in curves]], rows),
        [("Activations of a 7B at T = 2,048, nothing recomputed, naive attention", f"{size(formula[at])} (formula)",
          f"{size(curves['naive, none'][at]['bytes'])} (planned)"),
         ("Selective recomputation, GPT-3 175B: activations saved", "70 %", f"{100 * less:.0f} % (planned)"),
         ("Full recomputation: activations saved", "90 % and more",
          f"{100 * full_naive:.0f} % naive, {100 * full:.0f} % flash (7B, T = 2,048, planned)")],
        "Planned. Dashed: L·T·h (34 + 5aT/h) of Korthikanti et al., which the chapter quotes. Solid: flash attention; dotted: naive.")


# ---- 3

def timeline(results, about):
    if not results:
        return Section("Memory over a step", None, "3_timeline.png",
                       ["This build of ./train_gpt knows no --trace FILE (it is not in --help), so there is no timeline."], "")
    figure, axes = pyplot.subplots(1, 3, figsize=(10.5, 3.9), sharex=True, sharey=True)
    for axis, (mode, trace) in zip(axes, results.items()):
        live = trace["live"]
        shown = [category for category in CATEGORIES if any(live.get(category, []))]
        # A value holds until the next one.
        times = [t for now, then in zip(live["ms"], live["ms"][1:] + [trace["ms"]]) for t in (now, then)]
        steps = [[v / 1e6 for v in live[category] for _ in range(2)] for category in shown]
        axis.stackplot(times, steps, colors=[CATEGORIES[category] for category in shown], linewidth=0)
        for name, begin, end in trace["passes"]:
            axis.axvspan(begin, end, 0.965, 1, color=PASS_COLORS[name], linewidth=0, zorder=3)
            axis.axvspan(begin, end, color=PASS_COLORS[name], alpha=0.09, linewidth=0, zorder=0)
        axis.axhline(trace["planned"] / 1e6, color="0.35", linestyle=":", linewidth=1)
        axis.text(0.99, trace["planned"] / 1e6, "allocated", transform=axis.get_yaxis_transform(), ha="right", va="bottom",
                  fontsize=7.5, color="0.35")
        axis.set(title=f"--recompute {mode}", xlabel="ms")
    axes[0].set_ylabel("live memory, MB")
    axes[0].set_ylim(0, 1.15 * max(trace["planned"] for trace in results.values()) / 1e6)
    axes[0].set_xlim(0, None)
    shown = [c for c in CATEGORIES if any(any(trace["live"].get(c, [])) for trace in results.values())]
    handles = [Patch(color=CATEGORIES[c], label=c) for c in shown] + [Patch(color=PASS_COLORS[p], alpha=0.5, label=p) for p in PASS_COLORS]
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // 2))

    def peak(trace, *categories):
        return max(sum(values) for values in zip(*[trace["live"][c] for c in categories]))
    shown = [c for c in CATEGORIES if c in results["none"]["live"]]
    rows, passes = [], list(PASS_COLORS)
    for mode, trace in results.items():
        per_pass = {name: sum(end - begin for p, begin, end in trace["passes"] if p == name) for name in passes}
        rows.append([mode, size(peak(trace, "activations")), size(peak(trace, *shown)), size(trace["planned"]),
                     number(trace["ms"]), *[number(per_pass[p]) for p in passes]])
    kernels = sorted(results["none"]["kernels"].items(), key=lambda item: -item[1])
    busy = sum(ms for _, ms in kernels)
    kernel_rows = [[name, number(ms), f"{100 * ms / results['none']['ms']:.1f} %",
                    number(results["full"]["kernels"].get(name, 0))] for name, ms in kernels[:8]]
    kernel_rows.append(["nothing: gaps between kernels", number(results["none"]["ms"] - busy), f"{100 - 100 * busy / results['none']['ms']:.1f} %",
                        number(results["full"]["ms"] - sum(results["full"]["kernels"].values()))])
    none, full = results["none"], results["full"]
    return Section(
        "Memory over a step", figure, "3_timeline.png",
        [f"With nothing recomputed, activations rise through forward to a peak of {size(peak(none, 'activations'))} and fall "
         f"through backward, while "
         "gradients, layer by layer, build up below them; the update reads the gradients and frees them. With full recomputation the slope "
         f"in forward is one tensor a layer, and each layer's backward begins with a hill of its own, what its recomputation brings "
         f"back: {size(peak(full, 'activations'))} at most.",
         "Weights and optimizer state are there from the beginning: this trainer allocates all of the plan before the first step, "
         "so that, unlike in the chapter's "
         "timeline of PyTorch, the first step looks like any other. The dotted line is what it allocated; the room above the curve "
         "belongs to tensors that never live at the same time."],
        table(["recompute", "activations, peak live", "all, peak live", "allocated", "step ms", *[p + " ms" for p in passes]], rows)
        + "<p>Where the time of the traced step goes:</p>" + table(["kernel", "ms, none", "of the step", "ms, full"], kernel_rows),
        [("Recomputation and the peak of a step", "the peak at the end of forward shrinks",
          f"live activations {size(peak(none, 'activations'))} → {size(peak(full, 'activations'))} with full (measured)")],
        "Measured, from --trace: the last of three steps. The strip and the shading are the passes; all panels share both axes.")


# ---- 4

def recomputation(results, about):
    modes = results["modes"]
    peak = about["peak_flops"]
    figure, axes = pyplot.subplots(2, 3, figsize=(10.5, 6.8))
    figure.get_layout_engine().set(hspace=0.06)
    ratio_axis, bytes_axis, use_axis, time_axis, memory_axis, token_axis = axes.flat
    for x, (mode, r) in enumerate(modes.items()):
        middle = statistics.median(r["ratios"])
        sure = mode == "none" or told(r["ratios"])
        ratio_axis.bar(x, middle, 0.6, color=MODE_COLORS[mode], alpha=1 if sure else 0.3)
        if len(r["ratios"]) > 1 and mode != "none":
            ratio_axis.errorbar(x, middle, [[middle - min(r["ratios"])], [max(r["ratios"]) - middle]], color="0.2", capsize=4)
        ratio_axis.text(x, 0.03, f"{middle:.3f}" if sure else f"{middle:.3f}\nnot told", ha="center",
                        color="white" if sure else "0.2", fontweight="bold")
        flops = r["flops_per_token"]
        ratio_axis.plot([x - 0.36, x + 0.36], [flops["hardware"] / flops["model"]] * 2, color="black", linewidth=1.5)
        bytes_axis.bar(x, r["per_token_layer"] / 1e3, 0.6, color=MODE_COLORS[mode])
        bytes_axis.text(x, r["per_token_layer"] / 1e3, number(r["per_token_layer"] / 1e3), ha="center", va="bottom")
        for shift, kind, alpha in ((-0.19, "model", 1), (0.19, "hardware", 0.5)):
            use = r["tokens"] * flops[kind] / (r["median_ms"] / 1000) / peak
            use_axis.bar(x + shift, 100 * use, 0.36, color=MODE_COLORS[mode], alpha=alpha)
            use_axis.text(x + shift, 100 * use, f"{'MFU' if kind == 'model' else 'HFU'}\n{100 * use:.1f}", ha="center", va="bottom", fontsize=7.5)
    ratio_axis.axhspan(1.3, 1.4, color=CHAPTER_COLOR, alpha=0.15, linewidth=0)
    ratio_axis.text(-0.4, 1.35, "chapter, full: +30 to 40 %", color=CHAPTER_COLOR, va="center", fontsize=8)
    note_chapter_line(ratio_axis, 1.027, "chapter, selective: +2.7 %")
    highest = max(max(r["ratios"]) for r in modes.values())
    ratio_axis.set(title="Step time over that of none", ylim=(0, min(2.2, max(1.55, 1.1 * highest))))
    ratio_axis.legend(handles=[Line2D([], [], color="black", linewidth=1.5, label="FLOPs, from the plan")], loc="upper left", fontsize=7.5)
    bytes_axis.set(title="Activations kept, kB a token and layer")
    bytes_axis.margins(y=0.12)
    use_axis.set(title="% of the peak FLOP/s")
    use_axis.margins(y=0.2)
    for axis in (ratio_axis, bytes_axis, use_axis):
        axis.set_xticks(range(len(modes)), list(modes))
        axis.grid(axis="x", visible=False)

    attention = {int(T): runs for T, runs in results["attention"].items()}
    styles = {"flash": ("#4e79a7", "o"), "naive": ("#e15759", "s"), "naive, selective": ("#f28e2b", "^")}
    for name, (color, marker) in styles.items():
        timed = [(T, runs[name]["median_ms"]) for T, runs in attention.items() if runs[name]["median_ms"]]
        if timed:
            time_axis.plot(*zip(*timed), color=color, marker=marker, label=name)
        for axis, key, unit in ((memory_axis, "activations", 1e6), (token_axis, "per_token_layer", 1e3)):
            axis.plot(list(attention), [runs[name][key] / unit for runs in attention.values()], color=color, marker=marker, label=name)
    tokens = results["attention_tokens"]
    for axis, title in ((time_axis, f"Step ms, {tokens:,} tokens"), (memory_axis, f"Activations, MB, {tokens:,} tokens"),
                        (token_axis, "Activations kept, kB a token and layer")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(attention), [f"{T:,}" for T in attention])
        axis.minorticks_off()
        axis.set(xlabel="sequence length T", title=title)
        axis.set_ylim(0, None)
    time_axis.legend(loc="upper left", fontsize=8)

    rows = []
    for mode, r in modes.items():
        flops, seconds = r["flops_per_token"], r["median_ms"] / 1000
        rows.append([mode, spread(r["ms"]), spread(r["ratios"], lambda v: f"{v:.3f}"),
                     f"{min(r['ms']) / min(modes['none']['ms']):.3f}", f"{flops['hardware'] / flops['model']:.3f}",
                     {"none": "", "selective": "1.027", "full": "1.30 to 1.40"}[mode], f"{100 * r['tokens'] * flops['model'] / seconds / peak:.1f}",
                     f"{100 * r['tokens'] * flops['hardware'] / seconds / peak:.1f}", number(r["per_token_layer"]),
                     size(r["activations"]), size(r["planned"])])
    attention_rows = [[f"{T:,}", name, spread(r["ms"]) if r.get("ms") else "does not fit", number(r["per_token_layer"]), size(r["activations"])]
                      for T, runs in attention.items() for name, r in runs.items()]
    ratio = {mode: statistics.median(r["ratios"]) for mode, r in modes.items()}
    ratios = {mode: r["ratios"] for mode, r in modes.items()}
    bytes_ = {mode: r["per_token_layer"] for mode, r in modes.items()}
    less = {mode: f"{100 * (1 - bytes_[mode] / bytes_['none']):.0f} %" for mode in modes}
    first, last = min(attention), max(attention)
    flops = modes["full"]["flops_per_token"]
    flops_say = f"{flops['hardware'] / flops['model']:.2f}"
    sees = [concluded(ratios["full"], f"Full recomputation makes a step {ratio['full']:.2f} times as long (its FLOPs say {flops_say}).",
                      f"What full recomputation costs in time (its FLOPs say {flops_say})")
            + f" It keeps {less['full']} less for each layer. What it does is less than a second forward pass: the last layer's "
            "activations are still there, "
            "and the MLP's last matmul (8 of a block's 24 h² FLOPs a token) and the head are not needed again, so that with many "
            "layers it comes to about +22 %, where repeating everything would be the chapter's 30 to 40 %. "
            + concluded(ratios["selective"], f"Selective recomputation costs {percent(ratio['selective'] - 1)} of time.",
                        "What selective recomputation costs in time")
            + f" It keeps {less['selective']} less: LayerNorm and GELU again, no matmul.",
            "MFU counts the useful work, which recomputation leaves the same, over the time; HFU counts the repeated work too, and "
            "hides what it costs. The chapter's advice is to compare MFU."]
    flash, naive = attention[last]["flash"], attention[last]["naive"]
    sees.append(f"Below: the same number of tokens in longer and longer sequences. What naive attention keeps for a token grows "
                f"with T; at T = {last:,} it is "
                f"{naive['per_token_layer'] / flash['per_token_layer']:.1f} times flash attention's, at T = {first:,} "
                f"{attention[first]['naive']['per_token_layer'] / attention[first]['flash']['per_token_layer']:.1f} times. "
                "Selective recomputation takes the square out of what is kept (one copy for all layers remains): it drops scores "
                "and probabilities, and computes them a second time.")
    if naive["median_ms"] and flash["median_ms"]:
        sees[-1] += " " + concluded(
            naive["ratios"], f"A step of naive attention at T = {last:,} takes {statistics.median(naive['ratios']):.2f} times as long "
            "as flash attention's.", f"What naive attention costs in time at T = {last:,}")
    return Section(
        "What recomputation costs, and what it saves", figure, "4_recompute.png", sees,
        table(["recompute", "step ms, median (range)", "over none, median of rounds (range)", "fastest steps, over none",
               "FLOPs over none", "chapter", "MFU %", "HFU %",
               "bytes kept a token and layer", "activations", "planned in all"], rows)
        + "<p>Flash and naive attention:</p>"
        + table(["T", "attention", "step ms, median (range)", "bytes kept a token and layer", "activations"], attention_rows),
        [(f"{mode.capitalize()} recomputation: time", chapter,
          f"{percent(ratio[mode] - 1)} (measured; rounds {percent(min(ratios[mode]) - 1)} to {percent(max(ratios[mode]) - 1)})"
          if told(ratios[mode]) else f"no conclusion: {withheld(ratios[mode])} (measured)")
         for mode, chapter in (("full", "+30 to 40 %"), ("selective", "+2.7 % compute"))],
        f"Measured: runs of the three modes in turn, {about['rounds']} times around; whiskers are the rounds' "
        "extremes. A faint bar is one that they do not tell from 1. Bytes are planned.")


# ---- 5

def accumulation(results, about):
    splits = {name: r for name, r in results["splits"].items() if r}
    names = list(splits)
    common = min(len(r["losses"]) for r in splits.values())     # each ran for the time it was given
    losses = {name: r["losses"][:common] for name, r in splits.items()}
    differences = {name: max(abs(a - b) for a, b in zip(values, losses[names[-1]])) for name, values in losses.items()}
    figure, (memory_axis, time_axis, loss_axis) = pyplot.subplots(1, 3, figsize=(10.5, 3.5))
    for x, (name, r) in enumerate(splits.items()):
        memory_axis.bar(x - 0.2, r["planned"] / 1e6, 0.4, color="#4e79a7", label="planned" if x == 0 else None)
        if r["resident"] and not about["gpu"]:
            memory_axis.bar(x + 0.2, r["resident"] / 1e6, 0.4, color="#a0cbe8", label="resident, whole program" if x == 0 else None)
        time_axis.bar(x, r["median_ms"], 0.6, color="#76b7b2")
        rounds = r["round_ms"]
        time_axis.errorbar(x, r["median_ms"], [[max(0, r["median_ms"] - min(rounds))], [max(0, max(rounds) - r["median_ms"])]],
                           color="0.2", capsize=4)
        loss_axis.plot(range(1, common + 1), losses[name], marker="osD^"[x % 4], markersize=7 - 1.2 * x, linewidth=1, alpha=0.8,
                       label=name.replace(" x ", "×"))
    for axis in (memory_axis, time_axis):
        axis.set_xticks(range(len(names)), [name.replace(" x ", "×") for name in names])
        axis.set_xlabel("micro-batch × accumulation steps")
        axis.grid(axis="x", visible=False)
    memory_axis.set(title="Peak memory, MB")
    memory_axis.margins(y=0.3)
    memory_axis.legend(loc="upper left", fontsize=8)
    time_axis.set(title=f"Step ms, {results['tokens']:,} tokens")
    loss_axis.set(title="Loss: four lines, one upon the other", xlabel="step")
    loss_axis.legend(fontsize=8)
    loss_axis.xaxis.get_major_locator().set_params(integer=True)

    difference = max(differences.values())
    state_and_one = splits[names[0]]["planned"]
    rows = [[name.replace(" x ", " × "), size(r["planned"]), size(r["resident"]) if r["resident"] and not about["gpu"] else "-", spread(r["ms"]),
             f"{losses[name][0]:.6f}", f"{losses[name][-1]:.6f}", f"{differences[name]:.1e}"] for name, r in splits.items()]
    slower = [1 / ratio for ratio in splits[names[-1]]["ratios"]]       # ratios are over the first, one sequence at a time
    return Section(
        "Gradient accumulation at constant memory", figure, "5_accumulation.png",
        [f"Eight sequences a step, split four ways. Memory is that of one micro-batch: {size(state_and_one)} for one sequence at a "
         f"time, {size(splits[names[-1]]['planned'])} for all at once, "
         "and any larger batch of one sequence at a time would need no byte more.",
         f"The losses agree to {difference:.0e}: the mean of the micro-batches' gradients is the batch's gradient, and only the "
         f"order of a few sums differs. "
         "The price can be time, where a small micro-batch leaves the device waiting. "
         + concluded(slower, f"One sequence at a time takes {statistics.median(slower):.2f} times as long here as "
                     f"{names[-1].split()[0]}.", "What one sequence at a time costs here")],
        table(["micro-batch × steps", "planned", "resident, whole program", "step ms, median (range)", "loss, step 1",
               f"step {common}", f"largest difference from {names[-1].replace(' x ', ' × ')}"], rows),
        [("The same batch, accumulated 8, 4, 2 and 1 times", "the same result, memory of one micro-batch",
          f"losses within {difference:.0e}; {size(state_and_one)} to {size(splits[names[-1]]['planned'])} (measured)")],
        "Measured; bars of time are medians, whiskers the rounds' "
        "extremes." + ("" if about["gpu"] else " Resident memory has the program and its libraries in it."))


# ---- 6

def apart(faster, slower):
    """Whether rounds tell two points of the scan apart: of each, use of the device by its slowest and fastest round."""
    def use(r, ms):
        return r["mfu"] * r["ms"] / ms
    return (min(len(faster["round_ms"]), len(slower["round_ms"])) > 1
            and use(faster, max(faster["round_ms"])) > use(slower, min(slower["round_ms"])))


def extreme(ordered, which, words):
    """The first of some points in the order of their MFU, and as many more as the rounds do not tell from it."""
    first = ordered[0]
    more = [r for r in ordered[1:] if not (apart(first, r) or apart(r, first))]
    said = f"The {which} MFU here is {100 * first['mfu']:.1f} % ({words(first)})"
    return said + (f"; but rounds do not tell it from {len(more)} of the {len(ordered) - 1} others, so that which is "
                   f"{which} is no conclusion." if more else ", which the rounds tell from all others.")


def scan(results, about):
    done = [r for r in results if r["why"] is None]
    lengths = sorted({r["seq_len"] for r in results})
    batches = sorted({r["micro_batch"] for r in results})
    markers = dict(zip(lengths, "osD^v"))
    for r in done:
        r["mfu"] = r["flops"] * r["tokens_per_s"] / about["peak_flops"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2))
    for r in done:
        style = {"color": MODE_COLORS[r["recompute"]], "marker": markers[r["seq_len"]], "s": 34, "alpha": 0.8, "edgecolor": "white", "linewidth": 0.5}
        left.scatter(r["planned"] / 1e6, 100 * r["mfu"], **style)
        right.scatter(r["micro_batch"] * r["seq_len"], r["tokens_per_s"], **style)
    left.set(xscale="log", xlabel="memory planned, MB", ylabel="MFU, %", title="Utilisation against memory")
    right.set(xlabel="tokens in a micro-batch", ylabel="tokens/s", title="Throughput against the size of the micro-batch")
    for axis in (left, right):
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    right.set_xscale("log", base=2)
    right.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    products = sorted({r["micro_batch"] * r["seq_len"] for r in results})
    right.set_xticks(products, [f"{p // 1024}k" if p >= 1024 else str(p) for p in products])
    left.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:,.0f}"))
    left.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    low, high = left.get_xlim()
    ticks = [t * 10 ** e for e in range(0, 7) for t in (1, 1.5, 2, 3, 5, 7)]
    left.set_xticks([t for t in ticks if low <= t <= high])
    handles = [Patch(color=MODE_COLORS[mode], label=f"recompute {mode}") for mode in MODES]
    handles += [Line2D([], [], color="0.4", marker=markers[T], linestyle="", label=f"T = {T:,}") for T in lengths]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))

    by_point = {(r["micro_batch"], r["seq_len"], r["recompute"]): r for r in results}

    def cell(point):
        r = by_point.get(point)
        return "-" if r is None else r["why"] or f"{r['tokens_per_s']:,.0f} ({100 * r['mfu']:.1f} %)"
    rows = [[B, f"{T:,}", *[cell((B, T, mode)) for mode in MODES], size(by_point[B, T, "none"]["planned"]), size(by_point[B, T, "full"]["planned"])]
            for B in batches for T in lengths if (B, T, "none") in by_point]
    sees, summary = ["No point of the scan was measured."], []
    if done:
        done.sort(key=lambda r: -r["mfu"])
        best, worst = done[0], done[-1]
        def words(r):
            return f"micro-batch {r['micro_batch']}, T = {r['seq_len']:,}, recompute {r['recompute']}"
        sees = [f"Each point is one configuration: colour says what is recomputed, shape how long the sequences are. "
                f"{extreme(done, 'highest', words)} {extreme(done[::-1], 'lowest', words)}",
                "What to look for: a micro-batch of few tokens leaves the device waiting for launches and memory; from some size "
                "on, more tokens gain nothing and only cost memory; recomputation moves a point down and to the left: "
                "worth it where the room on the left lets a larger micro-batch in, and not otherwise."]
        summary = [("Utilisation over configurations of one device", "charts of thousands of configurations",
                    f"{len(done)} here: MFU {100 * worst['mfu']:.1f} to {100 * best['mfu']:.1f} % (measured)"
                    + ("" if apart(best, worst) else "; the rounds do not tell the two apart"))]
        left_out = [r for r in results if r["why"]]
        if left_out:
            reasons = [f"{sum(r['why'] == why for r in left_out)} {why}" for why in sorted({r["why"] for r in left_out})]
            sees.append(f"{len(left_out)} of {len(results)} points were not run: {', '.join(reasons)}.")
    return Section("Throughput and utilisation", figure, "6_scan.png", sees,
                   table(["micro-batch", "T", *[f"tokens/s (MFU), {mode}" for mode in MODES], "planned, none", "planned, full"], rows),
                   summary, "Measured: medians of rounds, of three steps each, in an order drawn at random.")


# ---- 7

def mixed_precision(results, about):
    shown = ["weights", "gradients", "master", "adam_m", "adam_v"]
    chapter = {"FP32": 16, "BF16, BF16 gradients": 16, "BF16, FP32 gradients": 18}
    figure, axis = pyplot.subplots(figsize=(8.4, 2.7))
    for y, (name, r) in enumerate(results.items()):
        left = 0
        for category in shown:
            if r[category] == 0:
                continue
            axis.barh(y, r[category], 0.6, left, color=CATEGORIES[category], edgecolor="white")
            axis.text(left + r[category] / 2, y, f"{r[category]:.0f}", ha="center", va="center", color="white", fontweight="bold")
            left += r[category]
        axis.plot([chapter[name]] * 2, [y - 0.42, y + 0.42], color=CHAPTER_COLOR, linestyle="--", linewidth=1.6)
        axis.text(left + 0.2, y, f"{r['total']:.2f}", va="center")
    axis.set_yticks(range(len(results)), list(results))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="bytes a parameter", xlim=(0, 20.5), xticks=range(0, 21, 4))
    handles = [Patch(color=CATEGORIES[c], label=c) for c in shown] + [Line2D([], [], color=CHAPTER_COLOR, linestyle="--", label="chapter")]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    rows = [[name, *[f"{r[c]:.0f}" if r[c] else "–" for c in shown], f"{r['total']:.2f}", chapter[name],
             size(r["activations"])] for name, r in results.items()]
    rows.append(["BF16, BF16 gradients with an FP32 accumulator beside them", 2, "2 + 4", 4, 4, 4, "not offered here", 20, ""])
    ratio = results["FP32"]["activations"] / results["BF16, BF16 gradients"]["activations"]
    return Section(
        "Mixed precision", figure, "7_mixed_precision.png",
        [f"BF16 moves bytes from weights and gradients into a master copy: the total stays at 16. What it saves is elsewhere: "
         f"activations, {ratio:.2f} times smaller, and faster matmuls.",
         "Gradients accumulated in FP32 cost two bytes more and lose no small addend; here they are the only gradients, where the "
         "chapter's 20 bytes keep BF16 ones beside them."],
        table(["precision", *[f"{c}" for c in shown], "total here", "chapter", "activations, 7B, one sequence of 2,048"], rows),
        [("BF16 with gradients accumulated in FP32", "18 bytes a parameter (20 with BF16 gradients too)",
          f"{results['BF16, FP32 gradients']['total']:.2f} (planned)")],
        "Planned, for the 7B shape.")


# ---- 8

STATE = ["weights", "gradients", "master", "adam_m", "adam_v"]
PLANNED = {**CATEGORIES, "cuda": "#d0d0d0"}     # the library's own is in a plan only
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LAYERS_KEPT = 2     # train_gpt.cu's WEIGHT_BUFFERS: layers whose weights ZeRO 3 has room for
# Relative: losses that differ by less are one curve. Rounding makes less of a difference within so few steps, and
# other data, or a gradient that was left out, more.
ONE_CURVE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


def to_send(results, model, run):
    """Bytes that a GPU sends in a step: by the formula, and less what need not be gathered again. With ZeRO 3 the
    last layers of forward are still there when backward begins, and the last of backward when the next micro-batch
    does; so is all that is no layer's."""
    all_, parts, gpus = results["parameters"], run["parts"], run["gpus"]
    layer = 12 * model["channels"] ** 2 + 13 * model["channels"]
    summed = [2 * all_, all_, parts * all_, parts * all_][run["zero"]]
    gathered = [0, all_, all_, 2 * parts * all_][run["zero"]]
    there = all_ - max(0, model["layers"] - LAYERS_KEPT) * layer
    again = (2 * parts - 1) * there if run["zero"] == 3 else 0
    grad, weight, ring = DTYPE_BYTES[results["grad_dtype"]], DTYPE_BYTES[results["precision"]], (gpus - 1) / gpus
    return ring * (grad * summed + weight * gathered), ring * (grad * summed + weight * (gathered - again))


def as_formula(run, bytes_):
    """To the digits that a run prints, and the small sums of losses and norms."""
    last_digit = 1e7 if bytes_ >= 1e9 else 1e5
    return abs(run["sent"] - bytes_) <= last_digit / 2 + 0.01 * bytes_


def farthest(runs, reference):
    """The largest relative difference of losses."""
    return max(abs(a / b - 1) for run in runs for a, b in zip(run["losses"], reference["losses"]))


def state_of(bytes_):
    return sum(bytes_[category] for category in STATE)


def faint(category):
    return 0.55 if category == "activations" else 1


def stack(axis, x, bytes_, categories, unit, width):
    bottom = 0
    for category in categories:
        height = bytes_[category] / unit
        axis.bar(x, height, width, bottom, color=PLANNED[category], alpha=faint(category))
        bottom += height


def paper_figure(axis, paper):
    shown = [*STATE, "buffers"]
    for zero, (bytes_, gb) in enumerate(zip(paper["bytes"], ZERO_PAPER_GB)):
        stack(axis, zero, bytes_, shown, 1e9, 0.6)
        axis.plot([zero - 0.4, zero + 0.4], [gb, gb], color=CHAPTER_COLOR, linestyle="--", linewidth=1.4)
        words = f"{number(state_of(bytes_) / 1e9)} state"
        words += f"\n+ {number(bytes_['buffers'] / 1e9)} buffers" if bytes_["buffers"] else ""
        top = max(gb, sum(bytes_[category] for category in shown) / 1e9)
        axis.text(zero, top + 2, words, ha="center", va="bottom", fontsize=7.5)
    axis.set(title="7.5 billion parameters, 64 GPUs: GB on each", ylim=(0, 1.15 * ZERO_PAPER_GB[0]))


def sent_figure(axis, results, about):
    most = results["numbers"][-1]
    colors = {1: "#4e79a7", 3: "#a0cbe8"}
    for run in (run for run in results["runs"] if run["gpus"] == most):
        x = run["zero"] + (-0.2 if run["parts"] == 1 else 0.2)
        axis.bar(x, run["sent"] / 1e6, 0.36, color=colors[run["parts"]])
        formula = to_send(results, about["model"], run)[0] / 1e6
        axis.plot([x - 0.2, x + 0.2], [formula, formula], color=CHAPTER_COLOR, linestyle="--", linewidth=1.4)
    handles = [Patch(color=color, label=f"micro-batches of each: {parts}") for parts, color in colors.items()]
    handles.append(Line2D([], [], color=CHAPTER_COLOR, linestyle="--", label="formula"))
    axis.legend(handles=handles, loc="upper left", fontsize=8)
    axis.set(title=f"MB sent in a step by each of {most}")


def loss_figure(axis, splits):
    for x, run in enumerate(splits):
        axis.plot(range(1, len(run["losses"]) + 1), run["losses"], marker="osD"[x], markersize=7 - 1.6 * x, linewidth=1,
                  alpha=0.8, label=f"{run['gpus']} × {run['parts']}")
    axis.set(title="Loss of the same batches", xlabel="step")
    axis.legend(fontsize=8, title="processes × micro-batches", title_fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)


def speed_figure(speed_axis, send_axis, speed):
    """On GPUs only: there each process has a device of its own."""
    done = {name: r for name, r in speed.items() if r}
    for x, (name, r) in enumerate(done.items()):
        sure = name == "1 GPU" or told(r["ratios"])
        each = 1000 * r["tokens"] / r["gpus"] / r["median_ms"]
        speed_axis.bar(x, each, 0.6, color="#76b7b2", alpha=1 if sure else 0.3)
        if r["sending_ms"]:
            send_axis.bar(x, r["exposed_ms"], 0.6, color="#e15759")
            send_axis.bar(x, r["sending_ms"] - r["exposed_ms"], 0.6, r["exposed_ms"], color="#76b7b2")
    if "1 GPU" in done:
        one = done["1 GPU"]
        note_chapter_line(speed_axis, 1000 * one["tokens"] / one["median_ms"], "chapter: each as fast as one")
    speed_axis.set(title="tokens/s of each GPU")
    speed_axis.margins(y=0.15)
    longest = max((r["sending_ms"] or 0 for r in done.values()), default=0)
    send_axis.set(title="ms a step between GPUs", xlim=speed_axis.get_xlim(), ylim=(0, 1.3 * longest or 1))
    handles = [Patch(color="#76b7b2", label="under kernels"), Patch(color="#e15759", label="not hidden")]
    send_axis.legend(handles=handles, loc="upper left", fontsize=8)
    for axis in (speed_axis, send_axis):
        axis.set_xticks(range(len(done)), [name.replace(", ", "\n") for name in done], fontsize=7)
        axis.grid(axis="x", visible=False)


def parallel_figure(results, about, shown):
    numbers = results["numbers"]
    figure, axes = pyplot.subplots(2, 3 if results["speed"] else 2, figsize=(10.5, 7.2))
    figure.get_layout_engine().set(hspace=0.06)
    memory_axis, paper_axis, sent_axis, loss_axis = [*axes[0][:2], *axes[1][:2]]
    bar, places = 0.8 / len(numbers), []
    for plan in results["plans"]:
        places.append(plan["zero"] + bar * (numbers.index(plan["gpus"]) - (len(numbers) - 1) / 2))
        stack(memory_axis, places[-1], plan["bytes"], shown, 1e6, 0.9 * bar)
    memory_axis.set_xticks(places, [plan["gpus"] for plan in results["plans"]])
    for zero in range(4):
        memory_axis.text(zero, -0.085, f"ZeRO {zero}", ha="center", va="top",
                         transform=memory_axis.get_xaxis_transform())
    memory_axis.set(title="Memory of each process, MB, by their number")
    paper_figure(paper_axis, results["paper"])
    sent_figure(sent_axis, results, about)
    loss_figure(loss_axis, results["splits"])
    for axis in (paper_axis, sent_axis):
        axis.set_xticks(range(4), [f"ZeRO {zero}" for zero in range(4)])
    for axis in (memory_axis, paper_axis, sent_axis):
        axis.grid(axis="x", visible=False)
    if results["speed"]:
        speed_figure(axes[0][2], axes[1][2], results["speed"])
    named = [category for category in PLANNED if category in {*shown, *STATE}]
    handles = [Patch(color=PLANNED[category], alpha=faint(category), label=category) for category in named]
    handles.append(Line2D([], [], color=CHAPTER_COLOR, linestyle="--", label="ZeRO's paper, formula"))
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // 2))
    return figure


def parallel_memory(results):
    """What is said of memory."""
    most, plans = results["numbers"][-1], {(p["gpus"], p["zero"]): p["bytes"] for p in results["plans"]}
    runs = results["runs"] + results["splits"]
    wrong = [run for run in runs
             if not run["as_planned"] or run["planned"] != plans[run["gpus"], run["zero"]]["total"]]
    sees = ("Each process takes micro-batches of its own, and gradients are summed over all of them before the update: "
            f"accumulation, but in parallel. With ZeRO 0 each holds all that one alone would, "
            f"{size(plans[most, 0]['total'])}. ZeRO 1 shares out optimizer states and master weights, ZeRO 2 gradients "
            f"too, ZeRO 3 weights too: with {most} processes "
            + ", ".join(size(plans[most, zero]["total"]) for zero in (1, 2, 3)) + " each. ")
    if wrong:
        run, total = wrong[0], plans[wrong[0]["gpus"], wrong[0]["zero"]]["total"]
        sees += (f"{len(wrong)} of {len(runs)} runs did not allocate what was planned, the first with ZeRO "
                 f"{run['zero']} and {run['gpus']} processes: {run['planned']:,} bytes, planned {total:,}.")
    else:
        sees += f"All {len(runs)} runs allocated what was planned, to the byte."
    buffers, whole = plans[most, 3]["buffers"], plans[most, 0]["weights"] + plans[most, 0]["gradients"]
    sees += (" What stages 2 and 3 share out travels through buffers, with room for the embeddings and a few layers: "
             f"{size(buffers)} with ZeRO 3, {100 * buffers / whole:.0f} % of all weights and gradients of this model. "
             "The more layers, the smaller that part.")
    more = [f"from {zero - 1} to {zero} with {gpus} processes" for gpus in results["numbers"][1:] for zero in (1, 2, 3)
            if plans[gpus, zero]["total"] > plans[gpus, zero - 1]["total"]]
    if more:
        sees += " Here some steps from a stage to the next cost more than they save: " + ", ".join(more) + "."
    return sees


def parallel_paper(paper):
    """What is said of the example in ZeRO's paper."""
    each = [state_of(bytes_) / paper["parameters"] for bytes_ in paper["bytes"]]
    last = paper["bytes"][-1]
    return ("ZeRO's paper has an example with 7.5 billion parameters in BF16 on 64 GPUs. Of 16 bytes for each "
            "parameter a GPU holds 16, 4 + 12/64, 2 + 14/64 and 16/64. The plan for such a model "
            f"({number(paper['parameters'] / 1e9)} billion) says {', '.join(f'{b:.2f}' for b in each)}. Those bytes "
            f"are without buffers, {size(last['buffers'])} with ZeRO 3 beside {size(state_of(last))} of state, and "
            f"without activations, {size(last['activations'])} for one sequence of 1,024 tokens: no stage of ZeRO "
            "makes these any smaller, nor do more GPUs.")


def parallel_traffic(results, about):
    """What is said of the bytes that are sent."""
    runs, grad, weight = results["runs"], results["grad_dtype"], results["precision"]
    expected = [to_send(results, about["model"], run)[1] for run in runs]
    off = [(run, bytes_) for run, bytes_ in zip(runs, expected) if not as_formula(run, bytes_)]
    sees = ("In a ring of R a sum over all sends each number twice, times (R - 1) / R; each of its halves, to sum "
            "slices and to gather them, once. So a step sends, in numbers of parameters, 2 with ZeRO 0, 1 + 1 with "
            "ZeRO 1; with k micro-batches k + 1 with ZeRO 2, which has no room to add gradients up before they are "
            "sent, and 3 k with ZeRO 3, which gathers weights in forward and again in backward. "
            + (f"Gradients are {grad.upper()} here, weights {weight.upper()}. " if grad != weight else ""))
    if off:
        run, bytes_ = off[0]
        return sees + (f"{len(off)} of {len(runs)} runs sent something else, the first with ZeRO {run['zero']} and "
                       f"{run['gpus']} processes × {run['parts']} micro-batches: {size(run['sent'])}, expected "
                       f"{size(bytes_)}.")
    return sees + ("All runs sent that, but for ZeRO 3, which sent less, and as much less as it should: weights that "
                   "are still there are not gathered again, those of two layers wherever forward turns into backward "
                   "or backward into the next forward. The more layers, the less it matters.")


def parallel_losses(results):
    """What is said of losses, and the largest relative difference of those of the same batches."""
    splits, limit = results["splits"], ONE_CURVE[results["precision"]]
    difference = farthest(splits[1:], splits[0])
    sees = (f"The same {len(splits[0]['losses'])} batches by one process that accumulates and by "
            f"{' and '.join(str(n) for n in results['numbers'][1:])}: losses differ by {difference:.1e} of their size "
            "at most")
    sees += (", so that the curves lie on each other." if difference <= limit else
             f". That is more than the {limit:.0e} that rounding explains: they are not one curve.")
    for gpus in results["numbers"][1:]:
        runs = [run for run in results["runs"] if run["gpus"] == gpus and run["parts"] == 1]
        equal = all(run["losses"] == runs[0]["losses"] and run["norms"] == runs[0]["norms"] for run in runs)
        sees += (f" With {gpus}, without accumulation, ZeRO 0 to 3 "
                 + ("agree bit by bit in losses and norms of all steps." if equal else
                    f"do not agree bit by bit; their losses differ by {farthest(runs[1:], runs[0]):.1e} at most."))
    return sees, difference


def parallel_speed(results, about):
    """What is said of throughput: on a CPU nothing."""
    if not results["speed"]:
        return (f"Nothing is concluded about throughput: these processes share one machine's {about['cpus']} CPUs, so "
                "that more of them get no more done. On GPUs, where each has one of its own, this part compares it.")
    sees = ("The chapter expects replicas to work in parallel, where accumulation does not, and sending to hide under "
            "backward: each GPU should stay about as fast as one alone.")
    for name, r in list(results["speed"].items())[1:]:
        if r and r["ratios"]:
            part = 100 / statistics.median(r["ratios"])
            sees += " " + concluded(r["ratios"], f"{name}: each has {part:.0f} % of the tokens/s of one alone.",
                                    f"{name}: whether each is slower than one alone")
    return sees


def parallel_tables(results, about, shown):
    memory = [[f"ZeRO {p['zero']}", p["gpus"], *[size(p["bytes"][c]) if p["bytes"][c] else "–" for c in shown],
               size(p["bytes"]["total"])] for p in results["plans"]]
    sent = [[f"ZeRO {run['zero']}", run["gpus"], run["parts"],
             *[f"{b / 1e6:,.1f}" for b in (run["sent"], *to_send(results, about["model"], run))]]
            for run in results["runs"]]
    losses = [[f"{run['gpus']} × {run['parts']}", f"{run['losses'][0]:.6f}", f"{run['losses'][-1]:.6f}",
               f"{farthest([run], results['splits'][0]):.1e}"] for run in results["splits"]]
    speed = [[name, number(1000 * r["tokens"] / r["median_ms"]), spread(r["ms"]),
              spread(r["ratios"], lambda v: f"{v:.3f}") if r["ratios"] else "–",
              *[number(r[name]) if r[name] is not None else "–" for name in ("sending_ms", "exposed_ms")]]
             for name, r in (results["speed"] or {}).items() if r]
    text = (table(["stage", "processes", *shown, "all"], memory) + "<p>Sent in a step by each:</p>"
            + table(["stage", "processes", "micro-batches of each", "sent MB", "formula MB",
                     "without what is still there MB"], sent)
            + "<p>Losses of the same batches:</p>"
            + table(["processes × micro-batches", "first step", "last step",
                     "largest relative difference from one process"], losses))
    return text if not speed else text + "<p>Throughput, with the same work for each GPU:</p>" + table(
        ["", "tokens/s", "step ms, median (range)", "over 1 GPU, median of rounds (range)", "sending ms",
         "not hidden ms"], speed)


def data_parallel(results, about):
    if "why" in results:
        return Section("Data parallelism", None, "8_data_parallel.png",
                       [f"This part is left out: {results['why']}. It needs a build for many GPUs (make MULTI=yes, "
                        "which takes MPI), mpirun, and on GPUs more than one."], "")
    shown = [c for c in PLANNED if any(plan["bytes"][c] for plan in results["plans"])]
    loss_words, difference = parallel_losses(results)
    sent = {run["zero"]: run["sent"] for run in results["runs"]
            if run["gpus"] == results["numbers"][-1] and run["parts"] == 1}
    one_type = results["grad_dtype"] == results["precision"]
    return Section(
        "Data parallelism", parallel_figure(results, about, shown), "8_data_parallel.png",
        [parallel_memory(results), parallel_paper(results["paper"]), parallel_traffic(results, about), loss_words,
         parallel_speed(results, about)],
        parallel_tables(results, about, shown),
        [("State of 7.5 billion parameters on each of 64 GPUs, ZeRO 0 / 1 / 2 / 3",
          " / ".join(str(gb) for gb in ZERO_PAPER_GB) + " GB (ZeRO's paper)",
          " / ".join(number(state_of(bytes_) / 1e9) for bytes_ in results["paper"]["bytes"]) + " GB (planned)"),
         ("Sent in a step with ZeRO 1 / 2 / 3, over ZeRO 0",
          "1 / 1 / 1.5" + ("" if one_type else ", if all is of one type"),
          " / ".join(f"{sent[zero] / sent[0]:.2f}" for zero in (1, 2, 3))
          + f" (measured, {about['model']['layers']} layers)"),
         ("The same batch on " + ", ".join(str(n) for n in results["numbers"]) + " processes", "the same result",
          f"losses within {difference:.0e} (measured)")],
        "Top: planned; below, measured, on " + ("GPUs" if about["gpu"] else "one CPU") + ": what is sent, and losses. "
        "Dashed: ZeRO's paper, and the formula for rings.")


# ---- The page

SECTIONS = [state, activations, timeline, recomputation, accumulation, scan, mixed_precision, data_parallel,
            formats, failures, fp8_quality]

STYLE = """
body { font: 16px/1.55 Georgia, serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1.2em; }
h1, h2, th, td, figcaption, summary, pre { font-family: system-ui, sans-serif; }
h1 { margin-bottom: .2em } h2 { margin-top: 2.4em; border-top: 1px solid #ddd; padding-top: .8em }
img { max-width: 100%; } figure { margin: 1em 0; } figcaption { font-size: 13px; color: #555; }
table { border-collapse: collapse; font-size: 12.5px; margin: .8em 0; } .scroll { overflow-x: auto; }
th, td { padding: .3em .65em; border-bottom: 1px solid #e3e3e3; text-align: right; vertical-align: top; }
th { background: #f5f5f3; font-weight: 600; } td { white-space: nowrap; } .summary td { white-space: normal; }
th:first-child, td:first-child, .summary td, .summary th { text-align: left; }
details { margin: .6em 0; } summary { font-size: 13px; color: #555; cursor: pointer; }
pre { font-family: monospace; font-size: 11.5px; background: #f7f7f5; padding: .8em; white-space: pre-wrap; }
.facts { font-family: system-ui, sans-serif; font-size: 14px; color: #444; }
"""


def facts(results):
    about = results["about"]
    peak = f"{number(about['peak_flops'] / 1e12)} TFLOP/s ({about['peak_source']}" + ("" if about["gpu"] else ", the best of all runs") + ")"
    cuda = f", CUDA {about['cuda_runtime'] // 1000}.{about['cuda_runtime'] % 1000 // 10}, cuBLASLt {about['cublaslt']}" if about["gpu"] else ""
    model = about["model"]
    lines = [f"Device: {about['device']}" + ("" if about["gpu"] else f", {about['cpus']} CPUs") + f". {about['build']}"
             + f"{cuda}. Peak for MFU: {peak}.",
             f"Date: {about['date']}; {about['seconds']:.0f} s" + (", --quick" if about["quick"] else "") + ".",
             f"Model of the measured runs: {model['layers']} layers, {model['heads']} heads, {model['channels']} channels, "
             f"vocabulary {model['vocab']} (bytes): "
             f"{model['parameters']:,} parameters; micro-batch {about['micro_batch']} × {about['seq_len']:,} tokens unless said otherwise."]
    rounds = results["recomputation"]["results"]["modes"]["none"]["round_ms"]
    noise = max(rounds) / min(rounds) - 1
    lines.append(f"Noise: the same run, {len(rounds)} times, took {number(min(rounds))} to {number(max(rounds))} ms a step."
                 + (" The machine had other work: differences in time smaller than that say nothing." if noise > 0.1 else ""))
    return "<br>".join(html.escape(line) for line in lines)


def write_report(results, folder):
    about, parts, summary = results["about"], [], []
    for number_, draw in enumerate((draw for draw in SECTIONS if draw.__name__ in results), 1):
        measured = results[draw.__name__]
        section = draw(measured["results"], about)
        summary += [(f"{what} ({number_})", theirs, ours) for what, theirs, ours in section.rows]
        body = [f"<h2 id=s{number_}>{number_}. {html.escape(section.title)}</h2>"]
        if section.figure:
            path = os.path.join(folder, section.name)
            section.figure.savefig(path)
            pyplot.close(section.figure)
            with open(path, "rb") as file:
                data = base64.b64encode(file.read()).decode()
            body.append(f'<figure><img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">'
                        f"<figcaption>{html.escape(section.caption)}</figcaption></figure>")
        body += [f"<p>{html.escape(text)}</p>" for text in section.sees]
        body.append(section.table)
        if measured["commands"]:
            commands = "\n".join(measured["commands"])
            body.append(f"<details><summary>{len(measured['commands'])} commands</summary><pre>{html.escape(commands)}</pre></details>")
        parts.append("\n".join(body))
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>The single-GPU chapter, on {html.escape(about['device'])}</title>
<style>{STYLE}</style></head><body>
<h1>The single-GPU chapter, on this machine</h1>
<p class=facts>{facts(results)}</p>
<p>What the Ultra-Scale Playbook's chapter on training with one GPU states, in part 8 its next, on data parallelism,
and in parts 9 to 11 what it says of formats of few bits, beside what <code>./train_gpt</code> does here.
<em>Planned</em> is what <code>./train_gpt plan</code> says, which is by construction what a run allocates; <em>measured</em> is from runs on the device above.
Red and dashed, in every figure, is the chapter's.</p>
<div class="summary">{table(["", "chapter", "here"], summary)}</div>
{chr(10).join(parts)}
</body></html>
"""
    path = os.path.join(folder, "report.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
    return path

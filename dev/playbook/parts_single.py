"""Parts of the report about one GPU: memory, recomputation, accumulation.

The function `name` takes the result of measure.py's function `name` and returns a Section.
"""
import statistics

from figures import (BLUE, CATEGORIES, CHAPTER_COLOR, MODE_COLORS, RED, TEAL, Section, category_entries,
                     chapter_entry, chapter_line, concluded, conclusive, doubling_ticks, effects, entries, entry,
                     html_table, legend_below, less, loss_curves, named_ticks, number, panels, percent,
                     signed, size, spread, stack, whiskers)
from measure import LARGE, MODES, STATE

PASS_COLORS = {"forward": BLUE, "recompute": "#edc948", "backward": RED, "update": TEAL}
# Model state in mixed precision: 16 bytes per parameter, or 20 with an FP32 gradient accumulator.
CHAPTER_GB = {"1b": (16, 20), "7b": (112, 140), "70b": (1120, 1400), "405b": (6480, 8100)}
CHAPTER_TIME = {"full": "+30 to 40 %", "selective": "+2.7 %"}


def state_of(bytes_):
    return sum(bytes_[category] for category in STATE)


# ---- memory of large models

def state_texts(plans):
    fp32, bf16, mixed = plans["7b"].values()
    each = [f"{plan['bytes_per_parameter']:.0f}" for plan in (fp32, bf16, mixed)]
    times = fp32["bytes"]["activations"] / bf16["bytes"]["activations"]
    too_large = [model.upper() for model in LARGE if not any(
        any(plan["max_micro_batch"].values()) for plan in plans[model].values())]
    return [f"Weights, gradients and Adam's two moments take {each[0]} bytes per parameter in FP32, {each[1]} in BF16: "
            "BF16 halves weights and gradients, but needs FP32 master weights. With gradients accumulated in FP32, the "
            f"default here, the sum is {each[2]}. The chapter's 20 include BF16 gradients and an FP32 accumulator. "
            f"BF16 saves memory elsewhere: activations are {times:.2f} times smaller.",
            f"The 7B model has {number(bf16['parameters'] / 1e9)} billion parameters with GPT-2's vocabulary, hence "
            f"{size(state_of(bf16['bytes']))} instead of {CHAPTER_GB['7b'][0]} GB. Models that do not fit on one GPU "
            f"of {size(bf16['gpu_memory'])} with any setting: {', '.join(too_large) or 'none'}. Their state must be "
            "sharded over several GPUs (ZeRO)."]


def state(results, about):
    figure, axes = panels(1, len(LARGE), 3.9)
    shown, rows = [*STATE, "activations"], []
    for axis, model in zip(axes, LARGE):
        for x, (name, plan) in enumerate(results[model].items()):
            stack(axis, x, plan["bytes"], shown, 1e9)
            accumulator = name == "BF16, FP32 gradients"
            rows.append([model.upper(), name, f"{plan['parameters']:,}", f"{plan['bytes_per_parameter']:.2f}",
                         number(state_of(plan["bytes"]) / 1e9),
                         f"{CHAPTER_GB[model][accumulator]:,} ({20 if accumulator else 16} N)",
                         number(plan["bytes"]["activations"] / 1e9),
                         " / ".join(str(plan["max_micro_batch"][mode]) for mode in MODES)])
        chapter_line(axis, CHAPTER_GB[model][0])
        axis.set_title(f"{model.upper()}: N = {number(plan['parameters'] / 1e9)} billion, T = {plan['seq_len']:,}",
                       fontsize=9)
        named_ticks(axis, ["FP32", "BF16,\nBF16 grad.", "BF16,\nFP32 grad."], fontsize=7.5)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.02)
    axes[0].set_ylabel("GB")
    legend_below(figure, [*category_entries(shown), chapter_entry()])
    memory = size(plan["gpu_memory"])
    planned = [number(state_of(results[model]["BF16, BF16 gradients"]["bytes"]) / 1e9) for model in LARGE]
    return Section(
        "Memory of a model", state_texts(results), figure,
        f"Planned, for a GPU with {memory}: state by category and the activations of one sequence of T tokens with "
        "--recompute none.",
        html_table(["model", "precision", "parameters", "bytes per parameter", "state GB", "chapter GB",
                    "activations GB, 1 sequence", f"largest micro-batch in {memory}: " + " / ".join(MODES)], rows),
        [("State of 1B / 7B / 70B / 405B in mixed precision",
          " / ".join(f"{gb:,}" for gb, _ in CHAPTER_GB.values()) + " GB", " / ".join(planned) + " GB (planned)"),
         ("BF16 with gradients accumulated in FP32", "18 bytes per parameter (20 with BF16 gradients beside them)",
          f"{results['7b']['BF16, FP32 gradients']['bytes_per_parameter']:.2f} (planned)")])


# ---- activations against sequence length

def activations_figure(results, formula):
    lengths, curves = results["lengths"], results["curves"]
    figure, (left, right) = panels(1, 2, 4.3)
    model = curves["flash, none"][0]["model"]
    layers_h = model["layers"] * model["channels"]
    handles = []
    for name, values in [*((name, [p["activations"] for p in points]) for name, points in curves.items()),
                         ("34 + 5aT/h", formula)]:
        attention, _, mode = name.partition(", ")
        color, line, marker = ((CHAPTER_COLOR, "--", None) if name not in curves else
                               (MODE_COLORS[mode], "-" if attention == "flash" else ":", "o"))
        handles.append(entry(name, color, line, marker))
        for axis, scaled in ((left, [v / 1e9 for v in values]),
                             (right, [v / T / layers_h for T, v in zip(lengths, values)])):
            axis.plot(lengths, scaled, color=color, linestyle=line, marker=marker, markersize=3.5)
    for axis in (left, right):
        axis.set_yscale("log")
        doubling_ticks(axis, lengths, "sequence length T (tokens)")
    for bytes_, what, place in ((results["state"], "the model's state", "bottom"),
                                (results["gpu_memory"], "memory of a GPU", "top")):
        left.axhline(bytes_ / 1e9, color="0.5", linewidth=0.8)
        left.text(lengths[0], bytes_ / 1e9, f"{size(bytes_)}: {what}", color="0.35", va=place, fontsize=7.5)
    left.set(ylabel="GB", title="Activations of one sequence, 7B, BF16")
    right.set(ylabel="bytes / (T · L · h)", title="The same per token, layer and channel")
    legend_below(figure, handles)
    return figure


def activations(results, about):
    lengths, gpt3 = results["lengths"], results["gpt3_175b"]
    formula = [point["korthikanti"] for point in results["curves"]["naive, none"]]
    bytes_ = {name: [p["activations"] for p in points] for name, points in results["curves"].items()}
    at_2048 = {name: values[lengths.index(2048)] for name, values in bytes_.items()}
    naive, formula_2048 = size(at_2048["naive, none"]), size(formula[lengths.index(2048)])
    above_state = {name: next((f"T = {T:,}" for T, b in zip(lengths, values) if b > results["state"]), "no length")
                   for name, values in bytes_.items()}
    selective = less(gpt3["selective"]["per_token_layer"], gpt3["none"]["per_token_layer"])
    full, full_naive = (less(at_2048[f"{kind}, full"], at_2048[f"{kind}, none"]) for kind in ("flash", "naive"))
    rows = [[f"{T:,}", number(formula[i] / 1e9), *[number(values[i] / 1e9) for values in bytes_.values()]]
            for i, T in enumerate(lengths)]
    return Section(
        "Activations against sequence length",
        ["Naive attention stores T × T scores and probabilities per head, so its activations grow with the square "
         f"of T. At T = 2,048 all activations take {naive}; Korthikanti's formula gives {formula_2048}. The formula "
         "includes dropout, which this model does not have, and omits the head and the activation gradients, which the "
         f"plan includes. One sequence's activations exceed the model's state from {above_state['naive, none']} with "
         f"naive attention and from {above_state['flash, none']} with flash attention.",
         "Flash attention never stores the square, so its curves in the right panel are almost flat. It recomputes "
         "scores and probabilities in backward. --recompute selective then drops the outputs of LayerNorm and GELU; "
         "full keeps one tensor per layer. For the shape of GPT-3 175B with naive attention, selective recomputation "
         f"keeps {selective} less per layer (chapter: 70 %). Full recomputation removes {full_naive} of this 7B "
         f"model's activations with naive attention at T = 2,048 and {full} with flash attention (chapter: 90 % and "
         "more)."],
        activations_figure(results, formula),
        "Planned. Dashed: L·T·h (34 + 5aT/h), Korthikanti et al. Solid: flash attention; dotted: naive attention.",
        html_table(["T", "formula GB", *[name + " GB" for name in bytes_]], rows),
        [("Activations of a 7B at T = 2,048, nothing recomputed, naive attention", f"{formula_2048} (formula)",
          f"{naive} (planned)"),
         ("Selective recomputation, GPT-3 175B: activations saved", "70 %", f"{selective} (planned)"),
         ("Full recomputation: activations saved", "90 % and more",
          f"{full_naive} naive, {full} flash (7B, T = 2,048, planned)")])


# ---- memory over a step

def peak(trace, categories):
    return size(max(sum(values) for values in zip(*[trace["live"][category] for category in categories])))


def timeline_figure(results):
    figure, axes = panels(1, len(results), 3.9, sharex=True, sharey=True)
    shown = [c for c in CATEGORIES if any(any(trace["live"].get(c, [])) for trace in results.values())]
    for axis, (mode, trace) in zip(axes, results.items()):
        live, planned = trace["live"], trace["planned"] / 1e6
        # Each value is valid until the next one.
        times = [t for now, then in zip(live["ms"], live["ms"][1:] + [trace["ms"]]) for t in (now, then)]
        values = [[v / 1e6 for v in live[category] for _ in range(2)] for category in shown]
        axis.stackplot(times, values, colors=[CATEGORIES[category] for category in shown], linewidth=0)
        for name, begin, end in trace["passes"]:
            axis.axvspan(begin, end, 0.965, 1, color=PASS_COLORS[name], linewidth=0, zorder=3)
            axis.axvspan(begin, end, color=PASS_COLORS[name], alpha=0.09, linewidth=0, zorder=0)
        axis.axhline(planned, color="0.35", linestyle=":", linewidth=1)
        axis.text(0.99, planned, "allocated", transform=axis.get_yaxis_transform(), ha="right", va="bottom",
                  fontsize=7.5, color="0.35")
        axis.set(title=f"--recompute {mode}", xlabel="ms")
    axes[0].set(ylabel="live memory, MB", xlim=(0, None),
                ylim=(0, 1.15 * max(trace["planned"] for trace in results.values()) / 1e6))
    legend_below(figure, [*category_entries(shown), *entries(PASS_COLORS, alpha=0.5)], 2)
    return figure


def timeline(results, about):
    rows = []
    for mode, trace in results.items():
        rows.append([mode, peak(trace, ["activations"]), peak(trace, [c for c in CATEGORIES if c in trace["live"]]),
                     size(trace["planned"]), number(trace["ms"])])
    none, full = (peak(results[mode], ["activations"]) for mode in ("none", "full"))
    return Section(
        "Memory over a step",
        [f"With --recompute none, activations rise through forward to {none} and fall through backward, while "
         "gradients build up layer by layer. The update reads and frees the gradients. With --recompute full, forward "
         "keeps one tensor per layer; backward recomputes the others layer by layer, so its peaks repeat, up to "
         f"{full}.",
         "Weights and optimizer state exist from the start: this trainer allocates the whole plan before the first "
         "step. In the chapter's PyTorch timeline the optimizer state appears after the first step. The dotted line is "
         "the allocated memory. The space below it belongs to tensors that are not live at that moment."],
        timeline_figure(results),
        "Measured with --trace, the last of three steps. The strip at the top and the shading show the passes. All "
        "panels have the same axes.",
        html_table(["recompute", "activations, peak live", "all, peak live", "allocated", "step ms"], rows),
        [("Recomputation and the peak of a step", "the peak at the end of forward shrinks",
          f"live activations {none} → {full} with full (measured)")])


# ---- cost and savings of recomputation

def use(result, kind, about):
    """Returns the achieved fraction of the device's peak FLOP/s: MFU for kind "model", HFU for "hardware"."""
    return (result["tokens"] * result["flops_per_token"][kind] / (result["median_ms"] / 1000) / about["peak_flops"])


def more_flops(result):
    return result["flops_per_token"]["hardware"] / result["flops_per_token"]["model"]


def modes_figure(modes, about):
    figure, axes = panels(1, 3, 3.6)
    ratio_axis, bytes_axis, use_axis = axes
    for x, (mode, r) in enumerate(modes.items()):
        middle, color, kept = statistics.median(r["ratios"]), MODE_COLORS[mode], r["per_token_layer"] / 1e3
        sure = mode == "none" or conclusive(r["ratios"])
        ratio_axis.bar(x, middle, 0.6, color=color, alpha=1 if sure else 0.3)
        if len(r["ratios"]) > 1 and mode != "none":
            whiskers(ratio_axis, x, middle, r["ratios"])
        ratio_axis.text(x, 0.03, f"{middle:.3f}" + ("" if sure else "\nunclear"), ha="center",
                        color="white" if sure else "0.2", fontweight="bold")
        ratio_axis.plot([x - 0.36, x + 0.36], [more_flops(r)] * 2, color="black", linewidth=1.5)
        bytes_axis.bar(x, kept, 0.6, color=color)
        bytes_axis.text(x, kept, number(kept), ha="center", va="bottom")
        for shift, kind, name, alpha in ((-0.19, "model", "MFU", 1), (0.19, "hardware", "HFU", 0.5)):
            part = 100 * use(r, kind, about)
            use_axis.bar(x + shift, part, 0.36, color=color, alpha=alpha)
            use_axis.text(x + shift, part, f"{name}\n{part:.1f}", ha="center", va="bottom", fontsize=7.5)
    ratio_axis.axhspan(1.3, 1.4, color=CHAPTER_COLOR, alpha=0.15, linewidth=0)
    ratio_axis.text(-0.4, 1.35, f"chapter, full: {CHAPTER_TIME['full']}", color=CHAPTER_COLOR, va="center", fontsize=8)
    chapter_line(ratio_axis, 1.027, f"chapter, selective: {CHAPTER_TIME['selective']}")
    highest = max(max(r["ratios"]) for r in modes.values())
    ratio_axis.set(title="Step time relative to none", ylim=(0, min(2.2, max(1.55, 1.1 * highest))))
    ratio_axis.legend(handles=[entry("planned FLOPs", "black", "-")], loc="upper left")
    bytes_axis.set(title="Activations kept, kB per token and layer")
    use_axis.set(title="% of the peak FLOP/s")
    for axis, margin in ((bytes_axis, 0.12), (use_axis, 0.2)):
        axis.margins(y=margin)
    for axis in axes:
        named_ticks(axis, list(modes))
    return figure


def mode_texts(modes, flops_7b):
    ratio = {mode: statistics.median(r["ratios"]) for mode, r in modes.items()}
    kept = {mode: less(r["per_token_layer"], modes["none"]["per_token_layer"]) for mode, r in modes.items()}
    flops, large = f"{more_flops(modes['full']):.2f}", signed(flops_7b["hardware"] / flops_7b["model"] - 1)
    full = concluded(modes["full"]["ratios"], f"Full recomputation makes a step {ratio['full']:.2f} times as long "
                     f"(planned FLOPs: {flops}).", f"the time of full recomputation (planned FLOPs: {flops})")
    selective = concluded(modes["selective"]["ratios"], f"Selective recomputation costs "
                          f"{signed(ratio['selective'] - 1)} of time.", "the time of selective recomputation")
    return [f"{full} It keeps {kept['full']} less per layer. It costs less than a second forward pass, as it skips the "
            f"last layer, the MLP's last matmul and the head. For the 7B model the plan has {large} FLOPs; the "
            f"chapter's 30 to 40 % repeat everything. {selective} It keeps {kept['selective']} less: it repeats "
            "LayerNorm and GELU, but no matmul.",
            "MFU counts useful work over time, and recomputation adds no useful work. HFU also counts the repeated "
            "work, so it hides the cost. The chapter advises comparing MFU."]


def recomputation(results, about):
    modes = results["modes"]
    rows = [[mode, spread(r["ms"]), spread(r["ratios"], "{:.3f}".format), f"{more_flops(r):.3f}",
             CHAPTER_TIME.get(mode, ""), percent(use(r, "model", about), ".1f"),
             percent(use(r, "hardware", about), ".1f"), number(r["per_token_layer"]), size(r["planned"])]
            for mode, r in modes.items()]
    summary = []
    for mode, chapter in CHAPTER_TIME.items():
        ratios = modes[mode]["ratios"]
        low, middle, high = effects(ratios)
        summary.append((f"{mode.capitalize()} recomputation: time", chapter,
                        f"{middle if conclusive(ratios) else 'no conclusion'} (measured; rounds {low} to {high})"))
    return Section(
        "Cost and savings of recomputation",
        mode_texts(modes, results["flops_7b"]), modes_figure(modes, about),
        f"Measured in {about['rounds']} rounds of the three modes; whiskers show the range of the rounds. A faint bar "
        "allows no conclusion. Bytes are planned.",
        html_table(["recompute", "step ms, median (range)", "relative to none, median (range)", 
                    "FLOPs relative to none", "chapter", "MFU", "HFU", "bytes kept per token and layer",
                    "planned total"], rows), summary)


# ---- gradient accumulation

def accumulation(results, about):
    splits = {name: r for name, r in results["splits"].items() if r}
    names = list(splits)
    one, all_ = names[0], names[-1]
    common = min(len(r["losses"]) for r in splits.values())     # runs have the same time, not the same steps
    losses = {name: r["losses"][:common] for name, r in splits.items()}
    difference = max(abs(a - b) for values in losses.values() for a, b in zip(values, losses[all_]))
    slower = [1 / ratio for ratio in splits[all_]["ratios"]]    # ratios are over one sequence at a time

    figure, (memory_axis, time_axis, loss_axis) = panels(1, 3, 3.5)
    for x, r in enumerate(splits.values()):
        memory_axis.bar(x, r["planned"] / 1e6, 0.6, color=BLUE)
        time_axis.bar(x, r["median_ms"], 0.6, color=TEAL)
        whiskers(time_axis, x, r["median_ms"], r["round_ms"])
    for axis in (memory_axis, time_axis):
        named_ticks(axis, names)
        axis.set_xlabel("micro-batch × accumulation steps")
    memory_axis.set(title="Memory, MB")
    time_axis.set(title=f"Step ms, {results['tokens']:,} tokens")
    loss_curves(loss_axis, losses, "Losses, which should coincide")
    return Section(
        "Gradient accumulation at constant memory",
        [f"A step of {results['sequences']} sequences is split in {len(names)} ways. It needs the memory of one "
         f"micro-batch: {size(splits[one]['planned'])} for one sequence at a time, {size(splits[all_]['planned'])} for "
         f"{all_.split()[0]} at once. The losses differ by at most {difference:.0e}: the mean of the micro-batches' "
         "gradients is the batch's gradient, and only the order of some sums differs. Small micro-batches can cost "
         "time, as they may not keep the device busy. "
         + concluded(slower, f"One sequence at a time takes {statistics.median(slower):.2f} times as long here as "
                     f"{all_.split()[0]} at once.", "the time of one sequence at a time")],
        figure, "Planned and measured; times are medians, whiskers the range of the rounds.",
        html_table(["micro-batch × steps", "planned", "step ms, median (range)", "loss, step 1", f"step {common}"],
                   [[name, size(r["planned"]), spread(r["ms"]), *[f"{losses[name][at]:.6f}" for at in (0, -1)]]
                    for name, r in splits.items()]),
        [(f"The same batch, accumulated {', '.join(name.split()[-1] for name in names)} times",
          "the same result, memory of one micro-batch",
          f"losses within {difference:.0e} (measured); {size(splits[one]['planned'])} to "
          f"{size(splits[all_]['planned'])} (planned)")])

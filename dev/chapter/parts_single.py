"""Parts 1 to 7 of the report: memory, recomputation, accumulation, throughput and precision on one GPU.

Each function named like one in measure.py takes that one's result and returns a Section.
"""
import statistics

from figures import (BLUE, CATEGORIES, CHAPTER_COLOR, MODE_COLORS, ORANGE, RED, TEAL, Section, captioned,
                     category_entries, chapter_entry, chapter_line, concluded, conclusive, doubling_ticks, entry,
                     html_table, legend_below, loss_curves, matplotlib, named_ticks, number, panels, percent,
                     ratio_text, signed, size, spread, stack, whiskers, withheld)
from measure import LARGE, MODES, STATE

PASS_COLORS = {"forward": BLUE, "recompute": "#edc948", "backward": RED, "update": TEAL}
# State in 16 bits with and without an FP32 accumulator beside the gradients; bytes per parameter.
CHAPTER_GB = {"1b": (16, 20), "7b": (112, 140), "70b": (1120, 1400), "405b": (6480, 8100)}
CHAPTER_BYTES = {"FP32": 16, "BF16, BF16 gradients": 16, "BF16, FP32 gradients": 18}
CHAPTER_TIME = {"full": "+30 to 40 %", "selective": "+2.7 %"}


def state_of(bytes_):
    return sum(bytes_[category] for category in STATE)


def less(a, b):
    """By which share a is smaller than b, as text."""
    return percent(1 - a / b)


def model_sentence(plans):
    each = {name: f"{plan['bytes_per_parameter']:.0f}" for name, plan in plans["7b"].items()}
    memory = plans["7b"]["FP32"]["gpu_memory"]
    too_large = [model.upper() for model in LARGE if not any(
        any(plan["max_micro_batch"].values()) for plan in plans[model].values())]
    plan = plans["7b"]["BF16, BF16 gradients"]
    return [f"Weight, gradient and Adam's two moments take {each['FP32']} bytes per parameter in FP32 and "
            f"{each['BF16, BF16 gradients']} in BF16: BF16 halves weights and gradients, but needs FP32 master "
            f"weights. With gradients accumulated in FP32, the default here, it takes {each['BF16, FP32 gradients']}. "
            "The chapter's 20 bytes include BF16 gradients and an FP32 accumulator.",
            f"The 7B model has {number(plan['parameters'] / 1e9)} billion parameters with GPT-2's vocabulary, hence "
            f"{size(state_of(plan['bytes']))} instead of {CHAPTER_GB['7b'][0]} GB. The other sizes differ for the same "
            f"reason. Models that do not fit on one GPU of {size(memory)} with any setting: "
            f"{', '.join(too_large) or 'none'}. Their state must be sharded over several GPUs (ZeRO)."]


def state(results, about):
    figure, axes = panels(1, len(LARGE), 3.9)
    shown, rows = [*STATE, "activations"], []
    for axis, model in zip(axes, LARGE):
        for x, (name, plan) in enumerate(results[model].items()):
            stack(axis, x, plan["bytes"], shown, 1e9)
            accumulator = name == "BF16, FP32 gradients"
            rows.append([model.upper(), name, f"{plan['parameters']:,}",
                         *[number(plan["bytes"][c] / 1e9) for c in STATE], number(state_of(plan["bytes"]) / 1e9),
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
    return Section(
        "Memory of a model", "1_bytes.png", figure, model_sentence(results),
        html_table(["model", "precision", "parameters", *[f"{name} GB" for name in STATE], "state GB", "chapter GB",
                    "activations GB, 1 sequence", f"largest micro-batch in {memory}: " + " / ".join(MODES)], rows),
        [("State of 1B / 7B / 70B / 405B in mixed precision",
          " / ".join(f"{gb:,}" for gb, _ in CHAPTER_GB.values()) + " GB",
          " / ".join(number(state_of(results[model]["BF16, BF16 gradients"]["bytes"]) / 1e9) for model in LARGE)
          + " GB (planned)")],
        f"Planned, for a GPU with {memory}: state by category and, in light green, the activations of one sequence of "
        "T tokens with --recompute none.")


# ---- 2

def activations_figure(results, formula):
    lengths, curves = results["lengths"], results["curves"]
    figure, (left, right) = panels(1, 2, 4.3)
    model = curves["flash, none"][0]["model"]
    layers_h = model["layers"] * model["channels"]
    styles = {}
    for name, points in curves.items():
        attention, mode = name.split(", ")
        styles[name] = {"color": MODE_COLORS[mode], "linestyle": "-" if attention == "flash" else ":",
                        "marker": "o" if attention == "flash" else "s"}
        left.plot(lengths, [p["activations"] / 1e9 for p in points], markersize=3.5, **styles[name])
        right.plot(lengths, [p["activations"] / T / layers_h for T, p in zip(lengths, points)], markersize=3.5,
                   **styles[name])
    left.plot(lengths, [f / 1e9 for f in formula], color=CHAPTER_COLOR, linestyle="--")
    right.plot(lengths, [f / T / layers_h for T, f in zip(lengths, formula)], color=CHAPTER_COLOR, linestyle="--")
    for axis in (left, right):
        axis.set_yscale("log")
        doubling_ticks(axis, lengths, "sequence length T (tokens)")
    for bytes_, what, place in ((results["state"], "the model's state", "bottom"),
                                (results["gpu_memory"], "memory of a GPU", "top")):
        left.axhline(bytes_ / 1e9, color="0.5", linewidth=0.8)
        left.text(lengths[0], bytes_ / 1e9, f"{size(bytes_)}: {what}", color="0.35", va=place, fontsize=7.5)
    left.set(ylabel="GB", title="Activations of one sequence, 7B, BF16")
    right.set(ylabel="bytes / (T · L · h)", title="The same per token, layer and channel")
    legend_below(figure, [*[entry(name, style["color"], style["linestyle"], style["marker"])
                            for name, style in styles.items()], chapter_entry("34 + 5aT/h")])
    return figure


def activations(results, about):
    lengths, curves, gpt3 = results["lengths"], results["curves"], results["gpt3_175b"]
    formula = [point["korthikanti"] for point in curves["naive, none"]]
    at, bytes_ = lengths.index(2048), {name: [p["activations"] for p in points] for name, points in curves.items()}
    naive, flash = bytes_["naive, none"][at], bytes_["flash, none"][at]
    head_rows = curves["flash, none"][-1]["head_rows"]
    above_state = {name: next((f"T = {T:,}" for T, b in zip(lengths, values) if b > results["state"]), "no length")
                   for name, values in bytes_.items()}
    selective = less(gpt3["selective"]["per_token_layer"], gpt3["none"]["per_token_layer"])
    full, full_naive = less(bytes_["flash, full"][at], flash), less(bytes_["naive, full"][at], naive)
    rows = [[f"{T:,}", number(formula[i] / 1e9), *[number(values[i] / 1e9) for values in bytes_.values()]]
            for i, T in enumerate(lengths)]
    return Section(
        "Activations against sequence length", "2_activations.png", activations_figure(results, formula),
        ["Naive attention stores T × T scores and probabilities for each head, so its activations grow with the square "
         f"of T. At T = 2,048 all activations take {size(naive)}; Korthikanti's formula gives {size(formula[at])}. The "
         "formula includes dropout's masks and outputs (2 of its 34 bytes, 3 of its 5), which this model does not "
         "have. It omits the head and the activation gradients, which the plan includes. One sequence's activations "
         f"exceed the model's state from {above_state['naive, none']} with naive attention and from "
         f"{above_state['flash, none']} with flash attention.",
         "Flash attention never stores the square, so its curves in the right panel are flat. "
         + (f"They fall slightly beyond T = {head_rows:,}, because the head processes {head_rows:,} rows at a time. "
            if head_rows < lengths[-1] else "")
         + "Flash attention already recomputes scores and probabilities in backward. --recompute selective then drops "
         "the outputs of LayerNorm and GELU; full keeps one tensor per layer.",
         f"For the shape of GPT-3 175B with naive attention, selective recomputation keeps {selective} less per layer "
         f"(chapter: 70 %). Full recomputation removes {full_naive} of this 7B model's activations with naive "
         f"attention at T = 2,048 and {full} with flash attention (chapter: 90 % and more)."],
        html_table(["T", "formula GB", *[name + " GB" for name in curves]], rows),
        [("Activations of a 7B at T = 2,048, nothing recomputed, naive attention", f"{size(formula[at])} (formula)",
          f"{size(naive)} (planned)"),
         ("Selective recomputation, GPT-3 175B: activations saved", "70 %", f"{selective} (planned)"),
         ("Full recomputation: activations saved", "90 % and more",
          f"{full_naive} naive, {full} flash (7B, T = 2,048, planned)")],
        "Planned. Dashed: L·T·h (34 + 5aT/h), Korthikanti et al. Solid: flash attention; dotted: naive attention.")


# ---- 3

def peak(trace, *categories):
    return max(sum(values) for values in zip(*[trace["live"][c] for c in categories]))


def timeline_figure(results):
    figure, axes = panels(1, len(results), 3.9, sharex=True, sharey=True)
    shown = [c for c in CATEGORIES if any(any(trace["live"].get(c, [])) for trace in results.values())]
    for axis, (mode, trace) in zip(axes, results.items()):
        live = trace["live"]
        # A value holds until the next one.
        times = [t for now, then in zip(live["ms"], live["ms"][1:] + [trace["ms"]]) for t in (now, then)]
        values = [[v / 1e6 for v in live[category] for _ in range(2)] for category in shown]
        axis.stackplot(times, values, colors=[CATEGORIES[category] for category in shown], linewidth=0)
        for name, begin, end in trace["passes"]:
            axis.axvspan(begin, end, 0.965, 1, color=PASS_COLORS[name], linewidth=0, zorder=3)
            axis.axvspan(begin, end, color=PASS_COLORS[name], alpha=0.09, linewidth=0, zorder=0)
        axis.axhline(trace["planned"] / 1e6, color="0.35", linestyle=":", linewidth=1)
        axis.text(0.99, trace["planned"] / 1e6, "allocated", transform=axis.get_yaxis_transform(), ha="right",
                  va="bottom", fontsize=7.5, color="0.35")
        axis.set(title=f"--recompute {mode}", xlabel="ms")
    axes[0].set(ylabel="live memory, MB", xlim=(0, None),
                ylim=(0, 1.15 * max(trace["planned"] for trace in results.values()) / 1e6))
    legend_below(figure, [entry(c, CATEGORIES[c]) for c in shown]
                 + [entry(name, color, alpha=0.5) for name, color in PASS_COLORS.items()], 2)
    return figure


def timeline(results, about):
    none, full = results["none"], results["full"]
    shown, rows = [c for c in CATEGORIES if c in none["live"]], []
    for mode, trace in results.items():
        per_pass = [sum(end - begin for p, begin, end in trace["passes"] if p == name) for name in PASS_COLORS]
        rows.append([mode, size(peak(trace, "activations")), size(peak(trace, *shown)), size(trace["planned"]),
                     number(trace["ms"]), *[number(ms) for ms in per_pass]])
    kernels = sorted(none["kernels"].items(), key=lambda item: -item[1])[:8]
    kernels.append(("gaps between kernels", none["ms"] - sum(none["kernels"].values())))
    gaps = full["ms"] - sum(full["kernels"].values())
    kernel_rows = [[name, number(ms), percent(ms / none["ms"], ".1f"),
                    number(full["kernels"].get(name, gaps if name.startswith("gaps") else 0))] for name, ms in kernels]
    peaks = {mode: size(peak(trace, "activations")) for mode, trace in results.items()}
    return Section(
        "Memory over a step", "3_timeline.png", timeline_figure(results),
        [f"With --recompute none, activations rise through forward to {peaks['none']} and fall through backward, while "
         "gradients build up layer by layer. The update reads and frees the gradients. With --recompute full, forward "
         "keeps one tensor per layer; backward recomputes the others layer by layer, so its peaks repeat, up to "
         f"{peaks['full']}.",
         "Weights and optimizer state exist from the start: this trainer allocates the whole plan before the first "
         "step. In the chapter's PyTorch timeline the optimizer state appears after the first step. The dotted line is "
         "the allocated memory. The space below it is for tensors that are not live at the same time."],
        html_table(["recompute", "activations, peak live", "all, peak live", "allocated", "step ms",
                    *[name + " ms" for name in PASS_COLORS]], rows)
        + captioned("Time of the traced step by kernel", ["kernel", "ms, none", "of the step", "ms, full"],
                    kernel_rows),
        [("Recomputation and the peak of a step", "the peak at the end of forward shrinks",
          f"live activations {peaks['none']} → {peaks['full']} with full (measured)")],
        "Measured with --trace: the last of three steps. The strips and the shading show the passes; all panels have "
        "the same axes.")


# ---- 4

def use(r, kind, about):
    """The share of the device's peak: MFU for kind "model", HFU for "hardware"."""
    return r["tokens"] * r["flops_per_token"][kind] / (r["median_ms"] / 1000) / about["peak_flops"]


def more_flops(r):
    return r["flops_per_token"]["hardware"] / r["flops_per_token"]["model"]


def modes_figure(axes, modes, about):
    ratio_axis, bytes_axis, use_axis = axes
    for x, (mode, r) in enumerate(modes.items()):
        middle, color, kept = statistics.median(r["ratios"]), MODE_COLORS[mode], r["per_token_layer"] / 1e3
        sure = mode == "none" or conclusive(r["ratios"])
        ratio_axis.bar(x, middle, 0.6, color=color, alpha=1 if sure else 0.3)
        if len(r["ratios"]) > 1 and mode != "none":
            whiskers(ratio_axis, x, middle, r["ratios"])
        ratio_axis.text(x, 0.03, ratio_text(middle) if sure else f"{middle:.3f}\nunclear", ha="center",
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
    ratio_axis.set(title="Step time over that of none", ylim=(0, min(2.2, max(1.55, 1.1 * highest))))
    ratio_axis.legend(handles=[entry("planned FLOPs", "black", "-")], loc="upper left")
    bytes_axis.set(title="Activations kept, kB per token and layer")
    use_axis.set(title="% of the peak FLOP/s")
    for axis, margin in ((bytes_axis, 0.12), (use_axis, 0.2)):
        axis.margins(y=margin)
    for axis in axes:
        named_ticks(axis, list(modes))


def attention_figure(axes, attention, tokens):
    panels_ = (("median_ms", 1, f"Step ms, {tokens:,} tokens"),
               ("activations", 1e6, f"Activations, MB, {tokens:,} tokens"),
               ("per_token_layer", 1e3, "Activations kept, kB per token and layer"))
    for axis, (key, unit, title) in zip(axes, panels_):
        for name, color, marker in (("flash", BLUE, "o"), ("naive", RED, "s"), ("naive, selective", ORANGE, "^")):
            points = [(T, runs[name][key] / unit) for T, runs in attention.items() if runs[name][key]]
            axis.plot([T for T, _ in points], [value for _, value in points], color=color, marker=marker, label=name)
        doubling_ticks(axis, list(attention), "sequence length T")
        axis.set(title=title, ylim=(0, None))
    axes[0].legend(loc="upper left")


def mode_sentences(modes, flops_7b):
    ratios = {mode: r["ratios"] for mode, r in modes.items()}
    ratio = {mode: statistics.median(values) for mode, values in ratios.items()}
    kept = {mode: less(r["per_token_layer"], modes["none"]["per_token_layer"]) for mode, r in modes.items()}
    flops = f"{more_flops(modes['full']):.2f}"
    large = signed(flops_7b["hardware"] / flops_7b["model"] - 1)
    return [concluded(ratios["full"], f"Full recomputation makes a step {ratio['full']:.2f} times as long (planned "
                      f"FLOPs: {flops}).", f"the time of full recomputation (planned FLOPs: {flops})")
            + f" It keeps {kept['full']} less per layer. It does less than a second forward pass: it skips the last "
            "layer, whose activations still exist, the MLP's last matmul (8 of a block's 24 h² FLOPs per token) and "
            f"the head. For the 7B model the plan has {large} FLOPs; the chapter's 30 to 40 % repeat everything. "
            + concluded(ratios["selective"], f"Selective recomputation costs {signed(ratio['selective'] - 1)} of time.",
                        "the time of selective recomputation")
            + f" It keeps {kept['selective']} less: it repeats LayerNorm and GELU, but no matmul.",
            "MFU counts useful work over time, and recomputation adds no useful work. HFU also counts the repeated "
            "work, so it hides the cost. The chapter advises to compare MFU."]


def attention_sentences(attention):
    first, last = min(attention), max(attention)
    flash, naive = attention[last]["flash"], attention[last]["naive"]
    times = {T: f"{runs['naive']['per_token_layer'] / runs['flash']['per_token_layer']:.1f}"
             for T, runs in attention.items()}
    text = (f"Below: the same number of tokens in sequences of different length. Naive attention keeps more per token "
            f"the larger T is: {times[first]} times flash attention's bytes at T = {first:,}, {times[last]} times at "
            f"T = {last:,}. With selective recomputation, scores and probabilities are dropped and recomputed, so that "
            "one copy for all layers remains.")
    if naive["median_ms"] and flash["median_ms"]:
        text += " " + concluded(naive["ratios"], f"A step with naive attention at T = {last:,} takes "
                                f"{statistics.median(naive['ratios']):.2f} times as long as with flash attention.",
                                f"the time of naive attention at T = {last:,}")
    return text


def recomputation(results, about):
    modes, attention = results["modes"], {int(T): runs for T, runs in results["attention"].items()}
    figure, axes = panels(2, 3, 6.8)
    modes_figure(axes[0], modes, about)
    attention_figure(axes[1], attention, results["attention_tokens"])
    rows = [[mode, spread(r["ms"]), spread(r["ratios"], ratio_text),
             ratio_text(min(r["ms"]) / min(modes["none"]["ms"])), ratio_text(more_flops(r)), CHAPTER_TIME.get(mode, ""),
             percent(use(r, "model", about), ".1f"), percent(use(r, "hardware", about), ".1f"),
             number(r["per_token_layer"]), size(r["activations"]), size(r["planned"])] for mode, r in modes.items()]
    def here(ratios):
        if not conclusive(ratios):
            return f"no conclusion: {withheld(ratios)} (measured)"
        low, middle, high = (signed(f(ratios) - 1) for f in (min, statistics.median, max))
        return f"{middle} (measured; rounds {low} to {high})"
    return Section(
        "Cost and savings of recomputation", "4_recompute.png", figure,
        [*mode_sentences(modes, results["flops_7b"]), attention_sentences(attention)],
        html_table(["recompute", "step ms, median (range)", "over none, median of rounds (range)",
                    "fastest steps, over none", "FLOPs over none", "chapter", "MFU", "HFU",
                    "bytes kept per token and layer", "activations", "planned in all"], rows),
        [(f"{mode.capitalize()} recomputation: time", chapter, here(modes[mode]["ratios"]))
         for mode, chapter in CHAPTER_TIME.items()],
        f"Measured: the three modes in turn, {about['rounds']} rounds; whiskers show the range of the rounds. A faint "
        "bar allows no conclusion. Bytes are planned.")


# ---- 5

def accumulation_figure(results, splits, losses, about):
    figure, (memory_axis, time_axis, loss_axis) = panels(1, 3, 3.5)
    resident = {name: r["resident"] for name, r in splits.items() if r["resident"] and not about["gpu"]}
    for x, (name, r) in enumerate(splits.items()):
        memory_axis.bar(x - 0.2, r["planned"] / 1e6, 0.4, color=BLUE)
        memory_axis.bar(x + 0.2, resident.get(name, 0) / 1e6, 0.4, color="#a0cbe8")
        time_axis.bar(x, r["median_ms"], 0.6, color=TEAL)
        whiskers(time_axis, x, r["median_ms"], r["round_ms"])
    for axis in (memory_axis, time_axis):
        named_ticks(axis, [name.replace(" x ", "×") for name in splits])
        axis.set_xlabel("micro-batch × accumulation steps")
    memory_axis.set(title="Peak memory, MB")
    memory_axis.margins(y=0.3)
    entries = [entry("planned", BLUE), entry("resident, whole program", "#a0cbe8")]
    memory_axis.legend(handles=entries if resident else entries[:1], loc="upper left")
    time_axis.set(title=f"Step ms, {results['tokens']:,} tokens")
    loss_curves(loss_axis, {name.replace(" x ", "×"): values for name, values in losses.items()},
                "Losses, which should coincide")
    loss_axis.legend()
    return figure


def accumulation(results, about):
    splits = {name: r for name, r in results["splits"].items() if r}
    names = list(splits)
    common = min(len(r["losses"]) for r in splits.values())     # runs have the same time, not the same steps
    losses = {name: r["losses"][:common] for name, r in splits.items()}
    apart_ = {name: max(abs(a - b) for a, b in zip(values, losses[names[-1]])) for name, values in losses.items()}
    smallest, largest = size(splits[names[0]]["planned"]), size(splits[names[-1]]["planned"])
    slower = [1 / ratio for ratio in splits[names[-1]]["ratios"]]       # ratios are over one sequence at a time
    rows = [[name.replace(" x ", " × "), size(r["planned"]),
             size(r["resident"]) if r["resident"] and not about["gpu"] else "–", spread(r["ms"]),
             f"{losses[name][0]:.6f}", f"{losses[name][-1]:.6f}", f"{apart_[name]:.1e}"] for name, r in splits.items()]
    return Section(
        "Gradient accumulation at constant memory", "5_accumulation.png",
        accumulation_figure(results, splits, losses, about),
        [f"A step of {results['sequences']} sequences, split in {len(names)} ways. The memory is that of one "
         f"micro-batch: {smallest} for one sequence at a time, {largest} for {names[-1].split()[0]} at once. A larger "
         "batch with the same micro-batch needs no more memory.",
         f"The losses differ by at most {max(apart_.values()):.0e}: the mean of the micro-batches' gradients is the "
         "batch's gradient, and only the order of some sums differs. Small micro-batches can cost time, as they may "
         "leave the device waiting. "
         + concluded(slower, f"One sequence at a time takes {statistics.median(slower):.2f} times as long here as "
                     f"{names[-1].split()[0]}.", "the time of one sequence at a time")],
        html_table(["micro-batch × steps", "planned", "resident, whole program", "step ms, median (range)",
                    "loss, step 1", f"step {common}",
                    f"largest difference from {names[-1].replace(' x ', ' × ')}"], rows),
        [(f"The same batch, accumulated {', '.join(name.split()[-1] for name in names)} times",
          "the same result, memory of one micro-batch",
          f"losses within {max(apart_.values()):.0e}; {smallest} to {largest} (measured)")],
        "Measured; times are medians, whiskers the range of the rounds."
        + ("" if about["gpu"] else " Resident memory includes the program and its libraries."))


# ---- 6

def apart(faster, slower):
    """Whether each round of one point of the scan has a higher MFU than each round of another."""
    def use_in(r, ms):
        return r["mfu"] * r["ms"] / ms
    return (min(len(faster["round_ms"]), len(slower["round_ms"])) > 1
            and use_in(faster, max(faster["round_ms"])) > use_in(slower, min(slower["round_ms"])))


def extreme(ordered, which):
    """A sentence about the first of some points in the order of their MFU."""
    first = ordered[0]
    more = [r for r in ordered[1:] if not (apart(first, r) or apart(r, first))]
    said = (f"The {which} MFU is {percent(first['mfu'], '.1f')} (micro-batch {first['micro_batch']}, "
            f"T = {first['seq_len']:,}, recompute {first['recompute']})")
    return said + (f"; its rounds overlap with those of {len(more)} of the {len(ordered) - 1} others, so it may not be "
                   f"the {which}." if more else ", in all rounds.")


def scan_figure(results, done, lengths):
    markers = dict(zip(lengths, "osD^v"))
    figure, (left, right) = panels(1, 2, 4.2)
    for r in done:
        style = {"color": MODE_COLORS[r["recompute"]], "marker": markers[r["seq_len"]], "s": 34, "alpha": 0.8,
                 "edgecolor": "white", "linewidth": 0.5}
        left.scatter(r["planned"] / 1e6, 100 * r["mfu"], **style)
        right.scatter(r["micro_batch"] * r["seq_len"], r["tokens_per_s"], **style)
    left.set(xscale="log", xlabel="memory planned, MB", ylabel="MFU, %", title="Utilisation against memory")
    right.set(ylabel="tokens/s", title="Throughput against the size of the micro-batch")
    for axis in (left, right):
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    right.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    doubling_ticks(right, sorted({r["micro_batch"] * r["seq_len"] for r in results}), "tokens in a micro-batch")
    low, high = left.get_xlim()
    ticks = [t * 10 ** e for e in range(7) for t in (1, 1.5, 2, 3, 5, 7) if low <= t * 10 ** e <= high]
    left.minorticks_off()
    left.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    legend_below(figure, [entry(f"recompute {mode}", MODE_COLORS[mode]) for mode in MODES]
                 + [entry(f"T = {T:,}", "0.4", marker=markers[T]) for T in lengths])
    return figure


def scan(results, about):
    done, lengths = [r for r in results if r["why"] is None], sorted({r["seq_len"] for r in results})
    for r in done:
        r["mfu"] = r["flops"] * r["tokens_per_s"] / about["peak_flops"]
    done.sort(key=lambda r: -r["mfu"])
    points = {(r["micro_batch"], r["seq_len"], r["recompute"]): r for r in results}

    def cell(r):
        return r["why"] or f"{r['tokens_per_s']:,.0f} ({percent(r['mfu'], '.1f')})"
    rows = [[B, f"{T:,}", *[cell(points[B, T, mode]) for mode in MODES],
             *[size(points[B, T, mode]["planned"]) for mode in ("none", "full")]]
            for B, T in sorted({(B, T) for B, T, _ in points})]
    sees, summary = ["No point of the scan was measured."], []
    if done:
        sees = ["Each point is one configuration: the colour shows the recompute mode, the shape the sequence length. "
                f"{extreme(done, 'highest')} {extreme(done[::-1], 'lowest')}",
                "A micro-batch of few tokens leaves the device waiting for launches and memory. Beyond some size, more "
                "tokens cost memory and gain nothing. Recomputation moves a point down and to the left: it is worth it "
                "where the saved memory allows a larger micro-batch."]
        low, high = percent(done[-1]["mfu"], ".1f"), percent(done[0]["mfu"], ".1f")
        summary = [("Utilisation over configurations of one device", "charts of thousands of configurations",
                    f"{len(done)} here: MFU {low} to {high} (measured)"
                    + ("" if apart(done[0], done[-1]) else "; no conclusion: their rounds overlap"))]
    skipped = [r["why"] for r in results if r["why"]]
    if skipped:
        reasons = ", ".join(f"{skipped.count(why)} {why}" for why in sorted(set(skipped)))
        sees.append(f"{len(skipped)} of {len(results)} points were not run: {reasons}.")
    return Section("Throughput and utilisation", "6_scan.png", scan_figure(results, done, lengths), sees,
                   html_table(["micro-batch", "T", *[f"tokens/s (MFU), {mode}" for mode in MODES], "planned, none",
                               "planned, full"], rows),
                   summary, "Measured: medians of rounds of three steps each, in random order.")


# ---- 7

def mixed_precision(results, about):
    # Adam's first moment is always FP32, so it counts the elements, which include the vocabulary's padding.
    each = {name: {category: 4 * plan["bytes"][category] / plan["bytes"]["adam_m"] for category in STATE}
            for name, plan in results.items()}
    figure, axis = panels(1, 1, 2.7, 8.4)
    for y, (name, values) in enumerate(each.items()):
        left = 0
        for category, value in ((c, v) for c, v in values.items() if v):
            axis.barh(y, value, 0.6, left, color=CATEGORIES[category], edgecolor="white")
            axis.text(left + value / 2, y, f"{value:.0f}", ha="center", va="center", color="white", fontweight="bold")
            left += value
        axis.plot([CHAPTER_BYTES[name]] * 2, [y - 0.42, y + 0.42], color=CHAPTER_COLOR, linestyle="--", linewidth=1.6)
        axis.text(left + 0.2, y, f"{results[name]['bytes_per_parameter']:.2f}", va="center")
    axis.set_yticks(range(len(each)), list(each))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="bytes per parameter", xlim=(0, 20.5), xticks=range(0, 21, 4))
    legend_below(figure, [*category_entries(STATE), chapter_entry()])
    total = {name: plan["bytes_per_parameter"] for name, plan in results.items()}
    memory = {name: plan["bytes"]["activations"] for name, plan in results.items()}
    rows = [[name, *[f"{v:.0f}" if v else "–" for v in each[name].values()], f"{total[name]:.2f}", CHAPTER_BYTES[name],
             size(memory[name])] for name in results]
    rows.append(["BF16, BF16 gradients with an FP32 accumulator", 2, "2 + 4", 4, 4, 4, "not offered here", 20, ""])
    length = results["FP32"]["seq_len"]
    return Section(
        "Mixed precision", "7_mixed_precision.png", figure,
        [f"BF16 moves bytes from weights and gradients to a master copy: the total is {total['FP32']:.0f} bytes in "
         f"FP32 and {total['BF16, BF16 gradients']:.0f} in BF16. It saves elsewhere: activations are "
         f"{memory['FP32'] / memory['BF16, BF16 gradients']:.2f} times smaller, and matmuls are faster.",
         f"FP32 gradients bring the total to {total['BF16, FP32 gradients']:.0f} bytes and keep small addends. Here "
         "they are the only gradients; the chapter's 20 bytes keep BF16 ones beside them."],
        html_table(["precision", *STATE, "total here", "chapter", f"activations, one sequence of {length:,}"], rows),
        [("BF16 with gradients accumulated in FP32", "18 bytes per parameter (20 with BF16 gradients beside them)",
          f"{total['BF16, FP32 gradients']:.2f} (planned)")],
        "Planned, for the 7B model.")

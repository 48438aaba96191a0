"""Parts of the report about one GPU: memory, recomputation, accumulation.

The function `name` takes the result of measure.py's function `name` and returns a Section.
"""
from figures import (BLUE, CATEGORIES, CHAPTER_COLOR, MODE_COLORS, RED, TEAL, Claim, Section, category_entries,
                     chapter_entry, chapter_mark, close, doubling_ticks, entries, entry, html_table, joined, judged,
                     legend_below, named_ticks, number, panels, percent, ratio_claim, same_losses, size, spread, stack)
from measure import LARGE, MODES, STATE

PASS_COLORS = {"forward": BLUE, "recompute": "#edc948", "backward": RED, "update": TEAL}
# Model state in mixed precision: 16 bytes per parameter, or 20 with an FP32 gradient accumulator.
CHAPTER_GB = {"1b": (16, 20), "7b": (112, 140), "70b": (1120, 1400), "405b": (6480, 8100)}
CHAPTER_TIME = {"full": "+30 to 40 %", "selective": "+2.7 %"}


def state_gb(bytes_):
    return sum(bytes_[category] for category in STATE) / 1e9


def saved(less, reference):
    """Returns the fraction of the activations of a layer that are not kept."""
    return 1 - less["per_token_layer"] / reference["per_token_layer"]


# ---- memory of large models

def state(results, about):
    figure, axes = panels(1, len(LARGE), 3.9)
    shown, rows = [*STATE, "activations"], []
    for axis, model in zip(axes, LARGE):
        for x, (name, plan) in enumerate(results[model].items()):
            stack(axis, x, plan["bytes"], shown, 1e9)
            accumulator = name == "BF16, FP32 gradients"
            rows.append([model.upper(), name, f"{plan['parameters']:,}", f"{plan['bytes_per_parameter']:.2f}",
                         number(state_gb(plan["bytes"])),
                         f"{CHAPTER_GB[model][accumulator]:,} ({20 if accumulator else 16} N)",
                         number(plan["bytes"]["activations"] / 1e9),
                         joined([plan["max_micro_batch"][mode] for mode in MODES], str)])
        chapter_mark(axis, 1, CHAPTER_GB[model][0], 1.5)
        axis.set_title(f"{model.upper()}, T = {plan['seq_len']:,}")
        named_ticks(axis, ["FP32", "BF16,\nBF16 grad.", "BF16,\nFP32 grad."], fontsize=8)
    axes[0].set_ylabel("GB")
    legend_below(figure, [*category_entries(shown), chapter_entry("playbook, BF16 gradients")])
    memory = size(plan["gpu_memory"])
    planned = [state_gb(results[model]["BF16, BF16 gradients"]["bytes"]) for model in LARGE]
    chapter = [gb for gb, _ in CHAPTER_GB.values()]
    each = [plan["bytes_per_parameter"] for plan in results["7b"].values()]
    fp32, bf16 = (results["7b"][name]["bytes"]["activations"] for name in ("FP32", "BF16, BF16 gradients"))
    return Section(
        "Memory of a model",
        [Claim("State in bytes per parameter: FP32 / BF16 / BF16 with gradients accumulated in FP32", "16 / 16 / 18",
               joined(each, "{:.2f}".format) + " (planned)", judged(close(each, (16, 16, 18), 0.01))),
         Claim("State of 1B / 7B / 70B / 405B in mixed precision", joined(chapter, "{:,}".format) + " GB",
               joined(planned) + " GB (planned)", judged(close(planned, chapter, 0.1))),
         Claim("Activations of a 7B in BF16, as a fraction of those in FP32", "half", f"{bf16 / fp32:.2f} (planned)",
               judged(close([bf16], [fp32 / 2], 0.1)))],
        ["BF16 halves weights and gradients, but needs FP32 master weights: it moves the state around and saves memory "
         "in activations. The playbook's 20 bytes per parameter include BF16 gradients and an FP32 accumulator beside "
         "them; here gradients are accumulated in FP32 only. Parameters N differ from the models' names, as the "
         "vocabulary is GPT-2's. Where the largest micro-batch is 0, no setting fits: the state must be sharded over "
         "several GPUs (ZeRO)."],
        figure, f"Planned, for a GPU with {memory}: state by category and the activations of one sequence of T tokens "
        "with --recompute none.",
        html_table(["model", "precision", "parameters", "bytes per parameter", "state GB", "playbook GB",
                    "activations GB, 1 sequence", f"largest micro-batch in {memory}: " + joined(MODES, str)], rows))


# ---- activations against sequence length

def activations_figure(results, curves):
    figure, axis = panels(1, 1, 4.3, 7)
    lengths = results["lengths"]
    for name, values in curves.items():
        attention, _, mode = name.partition(", ")
        color, line = (MODE_COLORS[mode], "-" if attention == "flash" else ":") if mode else (CHAPTER_COLOR, "--")
        axis.plot(lengths, [v / 1e9 for v in values], color=color, linestyle=line, marker=".", label=name)
    doubling_ticks(axis, lengths, "sequence length T (tokens)")
    for bytes_, what, place in ((results["state"], "the model's state", "bottom"),
                                (results["gpu_memory"], "memory of a GPU", "top")):
        axis.axhline(bytes_ / 1e9, color="0.5", linewidth=0.8)
        axis.text(lengths[0], bytes_ / 1e9, f"{size(bytes_)}: {what}", color="0.35", va=place, fontsize=8)
    axis.set(ylabel="GB", yscale="log", title="Activations of one sequence, 7B, BF16")
    axis.legend(ncols=2)
    return figure


def activations(results, about):
    lengths, gpt3 = results["lengths"], results["gpt3_175b"]
    formula = [point["korthikanti"] for point in results["curves"]["naive, none"]]
    bytes_ = {name: [p["activations"] for p in points] for name, points in results["curves"].items()}
    at_2048 = {name: values[lengths.index(2048)] for name, values in bytes_.items()}
    expected, naive = formula[lengths.index(2048)], at_2048["naive, none"]
    growth = [bytes_[f"{kind}, none"][-1] / bytes_[f"{kind}, none"][-2] for kind in ("naive", "flash")]
    above = [next((T for T, b in zip(lengths, bytes_[f"{kind}, none"]) if b > results["state"]), None)
             for kind in ("naive", "flash")]
    selective = saved(gpt3["selective"], gpt3["none"])
    full = [1 - at_2048[f"{kind}, full"] / at_2048[f"{kind}, none"] for kind in ("naive", "flash")]
    return Section(
        "Activations against sequence length",
        [Claim("Activations of one sequence of a 7B, T = 2,048, naive attention", f"{size(expected)} (formula)",
               f"{size(naive)} (planned)", judged(close([naive], [expected], 0.2))),
         Claim(f"Growth of activations from T = {lengths[-2]:,} to twice as many, naive / flash attention",
               "4 / 2 times (quadratic, linear)", joined(growth) + " times (planned)",
               judged([round(times) for times in growth] == [4, 2])),
         Claim("First T whose activations exceed the model's state, naive / flash attention",
               "after 2k to 4k tokens (naive)", joined(above, lambda T: f"{T:,}" if T else "none") + " (planned)",
               judged(above[0] is not None and 2048 < above[0] <= 8192)),
         Claim("Activations of a layer that selective recomputation saves, GPT-3 175B", "70 % (attention's)",
               f"{percent(selective)} (planned)", judged(selective >= 0.7)),
         Claim("Activations of a 7B that full recomputation saves, naive / flash attention", "90 % and more (naive)",
               joined(full, percent) + " (T = 2,048, planned)", judged(full[0] >= 0.9))],
        ["Naive attention stores T × T scores and probabilities per head; flash attention recomputes them. "
         "--recompute selective also drops the outputs of LayerNorm and GELU, full keeps one tensor per layer. "
         "Korthikanti's formula includes dropout, which this model does not have, and omits the head and the "
         "activation gradients, which the plan includes."],
        activations_figure(results, {**bytes_, "34 + 5aT/h": formula}),
        "Planned. Dashed: L·T·h (34 + 5aT/h), Korthikanti et al. Solid: flash attention; dotted: naive attention.",
        html_table(["T", "formula GB", *[name + " GB" for name in bytes_]],
                   [[f"{T:,}", number(formula[i] / 1e9), *[number(values[i] / 1e9) for values in bytes_.values()]]
                    for i, T in enumerate(lengths)]))


# ---- memory over a step

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
        axis.set(title=f"--recompute {mode}", xlabel="ms")
    axes[0].set(ylabel="live memory, MB", xlim=(0, None),
                ylim=(0, 1.15 * max(trace["planned"] for trace in results.values()) / 1e6))
    legend_below(figure, [*category_entries(shown), *entries(PASS_COLORS, alpha=0.5),
                          entry("allocated", "0.35", ":")], 2)
    return figure


def timeline(results, about):
    none, peaks = results["none"], [max(trace["live"]["activations"]) for trace in results.values()]
    kept = none["live"]["activations"]
    highest, forward = none["live"]["ms"][kept.index(max(kept))], none["passes"][0][2]
    return Section(
        "Memory over a step",
        [Claim("Time of the highest activations / end of forward", "the same: they rise through forward",
               f"{number(highest)} / {number(forward)} ms of a step of {number(none['ms'])} ms (measured)",
               judged(abs(highest - forward) < 0.1 * none["ms"])),
         Claim("Live activations at the peak, --recompute none / selective / full", "recomputation lowers the peak",
               joined(peaks, size) + " (measured)", judged(peaks[0] > peaks[1] > peaks[2])),
         Claim("Optimizer state appears", "after the first step (PyTorch)", "before the first step (planned)")],
        ["Activations fall through backward, while gradients build up layer by layer; the update reads and frees the "
         "gradients. With --recompute full, backward recomputes layer by layer, so its peaks repeat. This trainer "
         "allocates the whole plan before the first step (dotted); the space below that line belongs to tensors that "
         "are not live at that moment."],
        timeline_figure(results),
        "Measured with --trace, the last of three steps. The strip at the top and the shading show the passes.")


# ---- cost and savings of recomputation

def use(result, kind, about):
    """Returns the achieved fraction of the device's peak FLOP/s: MFU for kind "model", HFU for "hardware"."""
    return (result["tokens"] * result["flops_per_token"][kind] / (result["median_ms"] / 1000) / about["peak_flops"])


def more_flops(flops):
    return flops["hardware"] / flops["model"]


def recomputation(results, about):
    modes = results["modes"]
    none, full = modes["none"], modes["full"]
    uses = [percent(use(r, kind, about), ".1f") for kind in ("model", "hardware") for r in (none, full)]
    flops = more_flops(results["flops_7b"])
    return Section(
        "Cost and savings of recomputation",
        [ratio_claim("Time of a step with full recomputation", CHAPTER_TIME["full"], full["ratios"], "rounds",
                     lambda ratio: 1.3 <= ratio <= 1.4),
         Claim("FLOPs with full recomputation, 7B", CHAPTER_TIME["full"], f"{percent(flops - 1, '+.0f')} (planned)",
               judged(1.3 <= flops <= 1.4)),
         ratio_claim("Time of a step with selective recomputation", CHAPTER_TIME["selective"],
                     modes["selective"]["ratios"], "rounds", lambda ratio: ratio < 1.05),
         Claim("Activations of a layer that full recomputation saves", "90 % and more",
               f"{percent(saved(full, none))} (planned)", judged(saved(full, none) >= 0.9)),
         Claim("MFU without / with full recomputation; HFU", "HFU hides the cost of recomputation",
               f"{uses[0]} / {uses[1]}; {uses[2]} / {uses[3]} of the peak FLOP/s (measured)")],
        ["Full recomputation costs less than a second forward pass, as it skips the last layer, the MLP's last matmul "
         "and the head; the playbook's 30 to 40 % repeat everything. Selective recomputation repeats LayerNorm and "
         "GELU, but no matmul. MFU counts useful work over time, and recomputation adds none. HFU also counts the "
         "repeated work; the playbook advises comparing MFU."],
        tables=html_table(
            ["recompute", "step ms, median (range)", "relative to none, median (range)", "FLOPs relative to none",
             "MFU", "HFU", "bytes kept per token and layer", "saved, of none's bytes", "planned total"],
            [[mode, spread(r["ms"]), spread(r["ratios"], "{:.3f}".format), f"{more_flops(r['flops_per_token']):.3f}",
              percent(use(r, "model", about), ".1f"), percent(use(r, "hardware", about), ".1f"),
              number(r["per_token_layer"]), percent(saved(r, none)), size(r["planned"])] for mode, r in modes.items()]))


# ---- gradient accumulation

def accumulation(results, about):
    splits = {name: r for name, r in results["splits"].items() if r}
    names = list(splits)
    one, all_ = splits[names[0]], splits[names[-1]]
    common = min(len(r["losses"]) for r in splits.values())     # runs have the same time, not the same steps
    losses = {name: r["losses"][:common] for name, r in splits.items()}
    return Section(
        "Gradient accumulation at constant memory",
        [same_losses(f"The same batch, accumulated {', '.join(name.split()[-1] for name in names)} times",
                     [*losses.values()], about["build"].split()[-1]),
         Claim(f"Memory of a step, micro-batch × steps {names[0]} / {names[-1]}", "that of one micro-batch",
               joined([one["planned"], all_["planned"]], size) + " (planned)",
               judged(one["planned"] < all_["planned"])),
         ratio_claim(f"Time of a step, {names[-1]} relative to {names[0]}", "lower: sequential passes cost time",
                     all_["ratios"], "rounds")],
        ["The mean of the micro-batches' gradients is the batch's gradient; only the order of some sums differs. Small "
         "micro-batches can cost time, as they may not keep the device busy."],
        tables=html_table(
            ["micro-batch × steps", "planned", "step ms, median (range)", "loss, step 1", f"step {common}"],
            [[name, size(r["planned"]), spread(r["ms"]), *[f"{losses[name][at]:.6f}" for at in (0, -1)]]
             for name, r in splits.items()]))

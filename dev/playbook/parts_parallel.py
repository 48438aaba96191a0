"""The parts of the report about data parallelism with ZeRO and about tensor parallelism."""
from figures import (BLUE, CATEGORIES, MODE_COLORS, Claim, Section, category_entries, chapter_entry, chapter_mark,
                     close, entries, html_table, joined, judged, legend_below, named_ticks, panels, percent,
                     same_losses, size, stack)
from measure import STAGES, ZERO_PAPER_GPUS
from parts_single import state_gb

ZERO_PAPER_GB = (120, 31.4, 16.6, 1.9)      # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SKIPPED = "This part was skipped: {}. On GPUs it needs NCCL and more than one GPU."
AS_PLANNED = " Each run allocated and sent what was planned; otherwise make playbook stops with an error."


def megabytes(*values):
    return [f"{b / 1e6:,.1f}" for b in values]


# ---- data parallelism

def ring_bytes(results, run):
    """Returns the bytes that a GPU sends per step by the formula for rings of R ranks: an all-reduce sends each number
    2 (R - 1) / R times, a reduce-scatter or an all-gather (R - 1) / R times."""
    parameters, parts = results["parameters"], run["parts"]
    reduced = [2 * parameters, parameters, parts * parameters, parts * parameters][run["zero"]]
    gathered = [0, parameters, parameters, 2 * parts * parameters][run["zero"]]
    return (run["gpus"] - 1) / run["gpus"] * (DTYPE_BYTES[results["grad_dtype"]] * reduced
                                             + DTYPE_BYTES[results["precision"]] * gathered)


def plan_figure(axis, results, shown):
    numbers, places = results["numbers"], []
    bar = 0.8 / len(numbers)
    for plan in results["plans"]:
        places.append(plan["zero"] + bar * (numbers.index(plan["gpus"]) - (len(numbers) - 1) / 2))
        stack(axis, places[-1], plan["bytes"], shown, 1e6, 0.9 * bar)
    axis.set_xticks(places, [plan["gpus"] for plan in results["plans"]])
    axis.grid(axis="x", visible=False)
    for zero in STAGES:
        axis.text(zero, -0.085, f"ZeRO {zero}", ha="center", va="top", transform=axis.get_xaxis_transform())
    axis.set(title="MB of each of " + ", ".join(str(n) for n in numbers) + " processes")


def marked_bars(axis, bars, title):
    """Draws bars (label, value, formula's value, colour)."""
    for x, (_, value, formula, color) in enumerate(bars):
        axis.bar(x, value, 0.7, color=color)
        chapter_mark(axis, x, formula, 0.4)
    named_ticks(axis, [label for label, *_ in bars], fontsize=9)
    axis.set(title=title)


def data_parallel(results, about):
    title = "Data parallelism"
    if "why" in results:
        return Section(title, [], [SKIPPED.format(results["why"])])
    numbers, most = results["numbers"], results["numbers"][-1]
    plans = {(plan["gpus"], plan["zero"]): plan["bytes"] for plan in results["plans"]}
    shown = [c for c in CATEGORIES if any(bytes_[c] for bytes_ in plans.values())]
    alike = [run for run in results["runs"] if run["gpus"] == most and run["parts"] == 1]
    sent = [run["sent"] / alike[0]["sent"] for run in alike]
    totals = [plans[most, zero]["total"] for zero in STAGES]
    paper = [state_gb(bytes_) for bytes_ in results["paper"]["bytes"]]
    equal = all((run["losses"], run["norms"]) == (alike[0]["losses"], alike[0]["norms"]) for run in alike)
    buffers, whole = plans[most, 3]["buffers"], plans[most, 0]["weights"] + plans[most, 0]["gradients"]
    figure, axes = panels(1, 2, 4.2)
    plan_figure(axes[0], results, shown)
    marked_bars(axes[1], [(f"{run['zero']}\n× {run['parts']}", run["sent"] / 1e6, ring_bytes(results, run) / 1e6, BLUE)
                          for run in results["runs"] if run["gpus"] == most],
                f"MB sent by each of {most} processes, ZeRO × micro-batches")
    legend_below(figure, [*category_entries(shown), chapter_entry("formula for rings")])
    return Section(
        title,
        [Claim(f"State of 7.5 billion parameters on each of {ZERO_PAPER_GPUS} GPUs, ZeRO 0 / 1 / 2 / 3",
               joined(ZERO_PAPER_GB, str) + " GB (ZeRO's paper)", joined(paper) + " GB (planned)",
               judged(close(paper, ZERO_PAPER_GB, 0.05))),
         Claim(f"Memory of each of {most} processes, ZeRO 0 / 1 / 2 / 3", "each stage needs less than the one before",
               joined(totals, size) + " (planned)", judged(all(a > b for a, b in zip(totals, totals[1:])))),
         Claim("Bytes sent with ZeRO 1 / 2 / 3, relative to ZeRO 0", "1 / 1 / 1.5, if all numbers have one type",
               joined(sent[1:], "{:.2f}".format) + f" (measured, {about['model']['layers']} layers)",
               judged(close(sent[1:3], (1, 1), 0.05) and 1 < sent[3] <= 1.55)),
         same_losses(f"The same batch on {', '.join(str(n) for n in numbers)} processes",
                     [run["losses"] for run in results["splits"]], results["precision"]),
         same_losses("ZeRO 0 to 3", [run["losses"] for run in alike], results["precision"])._replace(
             **{"here": "the same bits in losses and norms (measured)"} if equal else {})],
        ["Each process has its own micro-batches; the gradients of all are summed before the update. ZeRO 1 shards "
         "optimizer states and master weights, ZeRO 2 also gradients, ZeRO 3 also weights." + AS_PLANNED,
         f"ZeRO 2 and 3 need buffers for the embeddings and a few whole layers: {size(buffers)} with ZeRO 3, "
         f"{percent(buffers / whole)} of all weights and gradients of this model, and less with more layers. Of R "
         "processes each sends (R - 1) / R times 2 numbers per parameter with ZeRO 0 (an all-reduce) and 1 "
         "(reduce-scatter) + 1 (all-gather) with ZeRO 1. With k micro-batches it is k + 1 with ZeRO 2, and 3 k with "
         "ZeRO 3, which gathers weights in forward and again in backward, except those of layers that are still in the "
         f"buffers. Gradients are {results['grad_dtype'].upper()} here, weights {results['precision'].upper()}."],
        figure, "Left: planned. Right: measured. Dashed: the formula for rings.",
        html_table(["stage", "processes", "micro-batches per process", "memory per process", "sent MB", "planned MB",
                    "formula for rings MB"],
                   [[f"ZeRO {run['zero']}", run["gpus"], run["parts"], size(run["planned"]),
                     *megabytes(run["sent"], run["bytes_sent"], ring_bytes(results, run))] for run in results["runs"]]))


# ---- tensor parallelism

def kept_formula(plan):
    """Returns the bytes per token that a layer keeps in 16 bits with flash attention."""
    C, heads = plan["model"]["channels"], plan["model"]["heads"]
    kept = {"none": 32 * C + 16 + 4 * heads, "selective": 20 * C + 4 * heads, "full": 2 * C}
    return kept[plan["recompute"]] / plan["gpus"]


def korthikanti(plan):
    """Returns the same by table 2 of Korthikanti et al. 2022, with naive attention and nothing recomputed: with
    sequence parallelism, and without."""
    C, square, t = plan["model"]["channels"], 5 * plan["model"]["heads"] * plan["seq_len"], plan["gpus"]
    return (34 * C + square) / t, 10 * C + (24 * C + square) / t


def link_formula(run):
    """Returns the bytes that a process sends to its tensor group per step. A layer sends 10 tensors of N C numbers, and
    3 more with full recomputation, but not the last layer."""
    layers, t = run["model"]["layers"], run["gpus"]
    tensors = 10 * layers + (3 * (layers - 1) if run["recompute"] == "full" else 0)
    return run["tokens"] * run["model"]["channels"] * tensors * DTYPE_BYTES[run["precision"]] * (t - 1) / t


def tensor_figure(plans, several):
    figure, axes = panels(1, 2, 4.2)
    marked_bars(axes[0], [(plan["gpus"], plan["per_token_layer"] / 1e3, kept_formula(plan) / 1e3,
                           MODE_COLORS[plan["recompute"]]) for plan in plans], "kB kept per token and layer, 7B, by t")
    marked_bars(axes[1], [(run["gpus"], *[b / 1e6 / run["parts"] for b in (run["sent_in_group"], link_formula(run))],
                           MODE_COLORS[run["recompute"]]) for run in several],
                "MB sent per micro-batch in the group, by t")
    legend_below(figure, [*entries(MODE_COLORS), chapter_entry("formula")])
    return figure


def tensor_parallel(results, about):
    title = "Tensor parallelism"
    if "why" in results:
        return Section(title, [], [SKIPPED.format(results["why"])])
    plans, runs = results["plans"], [{**run, "model": about["model"]} for run in results["runs"]]
    none, several = ([run for run in runs if run["recompute"] == "none"], [run for run in runs if run["gpus"] > 1])
    for run in several:     # less the planned bytes of gradients
        run["sent_in_group"] = run["sent"] - (run["bytes_sent"] - run["tensor_bytes_sent"])
    tensors = [10 * run["sent_in_group"] / link_formula(run) for run in none[1:]]
    kept, formula = zip(*[(plan["per_token_layer"] / 1e3, kept_formula(plan) / 1e3) for plan in plans[:3]])
    weights, split = plans[0]["weights"], plans[1]["weights"]
    whole = [name for name in weights if weights[name] == split[name]]
    part = sum(weights[name] for name in whole) / sum(weights.values())
    return Section(
        title,
        [Claim("Activations per token and layer of a 7B, t = 1 / 2 / 4", joined(formula) + " kB (formula / t)",
               joined(kept) + " kB, flash attention (planned)", judged(close(kept, formula, 0.01))),
         Claim("Tensors of N C numbers that a layer sends, times (t - 1) / t", "8 (all-gathers, reduce-scatters)",
               joined(tensors, "{:.0f}".format) + " (measured)", judged(close(tensors, [8] * len(tensors), 0.05))),
         same_losses(f"The same batch with t = {', '.join(str(run['gpus']) for run in none)}",
                     [run["losses"] for run in none], none[0]["precision"]),
         Claim("Weights that a tensor group does not split, 7B", "the embeddings and LayerNorms",
               f"{percent(part, '.1f')} of all weights (planned)")],
        ["The t processes of a tensor group share each micro-batch of N tokens. Each has 1/t of the NH heads and of "
         "the MLP's hidden layer and, with sequence parallelism, of the rows of everything else. In BF16 a layer with "
         "C channels keeps (32 C + 16 + 4 NH) / t bytes per token; (20 C + 4 NH) / t with selective, 2 C / t with full "
         "recomputation. Korthikanti et al. have (34 C + 5 NH T) / t, and 10 C + (24 C + 5 NH T) / t without sequence "
         "parallelism: 2 C are dropout masks, which this model does not have; 5 NH T are T × T tensors, for which "
         "flash attention keeps 4 bytes per head. Not split: "
         + ", ".join(name.removeprefix("h.%d.") for name in whole) + "." + AS_PLANNED,
         "Forward gathers the rows of two LayerNorms per layer and reduces and scatters two outputs; backward does the "
         "reverse: 8 tensors of N C numbers. Backward also gathers both LayerNorms again for gradients of weights, "
         "which makes 10; with full recomputation 13, but not in the last layer."],
        tensor_figure(plans, several),
        "Left: planned. Right: measured. Dashed: formulas.",
        html_table(["7B", "recompute", "kept bytes per token and layer", "formula", "Korthikanti, nothing recomputed",
                    "without sequence parallelism", "model state"],
                   [[f"t = {plan['gpus']}", plan["recompute"],
                     *[f"{b:,.0f}" for b in (plan["per_token_layer"], kept_formula(plan), *korthikanti(plan))],
                     size(plan["state"])] for plan in plans])
        + html_table(["measured", "recompute", "micro-batches", "memory per process", "sent MB", "planned MB",
                      "planned in the group MB", "formula MB"],
                     [[f"t = {run['gpus']}", run["recompute"], run["parts"], size(run["planned"]),
                       *megabytes(run["sent"] or 0, run["bytes_sent"], run["tensor_bytes_sent"], link_formula(run))]
                      for run in runs]))

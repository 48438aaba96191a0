"""The parts of the report about data parallelism with ZeRO and about tensor parallelism."""
from figures import (BLUE, CATEGORIES, MODE_COLORS, Section, category_entries, chapter_entry, chapter_mark, entries,
                     entry, html_table, left_out, legend_below, loss_curves, named_ticks, number, panels, percent,
                     share, size, stack)
from measure import STAGES, ZERO_PAPER_GPUS
from parts_single import state_of

ZERO_PAPER_GB = (120, 31.4, 16.6, 1.9)      # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Curves coincide if the relative difference of their losses is smaller than this. Rounding causes less within these few
# steps; different data or a missing gradient causes more.
ONE_CURVE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


def ring_bytes(results, run):
    """Returns the bytes that a GPU sends per step by the formula for rings of R ranks: an all-reduce sends each number
    2 (R - 1) / R times, a reduce-scatter or an all-gather (R - 1) / R times."""
    parameters, parts = results["parameters"], run["parts"]
    reduced = [2 * parameters, parameters, parts * parameters, parts * parameters][run["zero"]]
    gathered = [0, parameters, parameters, 2 * parts * parameters][run["zero"]]
    return (run["gpus"] - 1) / run["gpus"] * (DTYPE_BYTES[results["grad_dtype"]] * reduced
                                             + DTYPE_BYTES[results["precision"]] * gathered)


def coincide_text(difference, precision):
    limit = ONE_CURVE[precision]
    return (f"at most {difference:.1e} (relative)"
            + (", so the curves coincide." if difference <= limit else
               f". This is more than the {limit:.0e} that rounding explains: the curves do not coincide."))


def largest_difference(runs, reference):
    """Returns the largest relative difference of losses."""
    return max(abs(a / b - 1) for run in runs for a, b in zip(run["losses"], reference["losses"]))


# ---- figure

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
    axis.set(title="Memory per process with 1, 2 ... processes, MB")


def sent_figure(axis, results):
    most, colors = results["numbers"][-1], (BLUE, "#a0cbe8")
    parts = sorted({run["parts"] for run in results["runs"]})
    for run in (run for run in results["runs"] if run["gpus"] == most):
        x = run["zero"] + 0.4 * parts.index(run["parts"]) - 0.2
        axis.bar(x, run["sent"] / 1e6, 0.36, color=colors[parts.index(run["parts"])])
        chapter_mark(axis, x, ring_bytes(results, run) / 1e6, 0.2)
    axis.legend(handles=[entry(f"micro-batches per process: {count}", color) for count, color in zip(parts, colors)],
                loc="upper left")
    named_ticks(axis, [f"ZeRO {zero}" for zero in STAGES])
    axis.set(title=f"MB sent per step by each of {most} processes")


def parallel_figure(results, shown):
    figure, axes = panels(1, 3, 4.2, 12)
    plan_figure(axes[0], results, shown)
    sent_figure(axes[1], results)
    loss_curves(axes[2], {f"{run['gpus']} × {run['parts']}": run["losses"] for run in results["splits"]},
                "Losses, processes × micro-batches")
    legend_below(figure, [*category_entries(shown), chapter_entry("formula for rings")])
    return figure


# ---- texts

def memory_text(results):
    most, plans = results["numbers"][-1], {(p["gpus"], p["zero"]): p["bytes"] for p in results["plans"]}
    text = ("Each process has its own micro-batches. The gradients of all processes are summed before the update. "
            "With ZeRO 0 each process holds the whole state, "
            f"{size(plans[most, 0]['total'])} in all. ZeRO 1 shards optimizer states and master weights, ZeRO 2 also "
            f"gradients, ZeRO 3 also weights: with {most} processes "
            + ", ".join(size(plans[most, zero]["total"]) for zero in STAGES[1:]) + " each. Each run allocated what was "
            "planned, to the byte.")
    buffers, whole = plans[most, 3]["buffers"], plans[most, 0]["weights"] + plans[most, 0]["gradients"]
    text += (" Stages 2 and 3 need buffers for the embeddings and a few whole layers: "
             f"{size(buffers)} with ZeRO 3, {percent(buffers / whole)} of all weights and gradients of this model. "
             "This fraction is smaller with more layers.")
    larger = [f"from {zero - 1} to {zero} with {gpus} processes" for gpus in results["numbers"][1:]
              for zero in STAGES[1:] if plans[gpus, zero]["total"] > plans[gpus, zero - 1]["total"]]
    return text + (f" Here some stages need more memory than the one before: {', '.join(larger)}." if larger else "")


def sent_text(results):
    runs = results["runs"]
    text = ("Per parameter, each process sends (R - 1) / R times the following in a step, in a ring of R processes: 2 "
            "numbers with ZeRO 0 (an all-reduce), 1 + 1 with ZeRO 1 (reduce-scatter, all-gather). With k micro-batches "
            "it is k + 1 with ZeRO 2, which reduces gradients after each micro-batch, and 3 k with ZeRO 3, which "
            "gathers weights in forward and again in backward. ")
    if results["grad_dtype"] != results["precision"]:
        text += f"Gradients are {results['grad_dtype'].upper()} here, weights {results['precision'].upper()}. "
    saved = [1 - run["bytes_sent"] / ring_bytes(results, run) for run in runs if run["zero"] == 3]
    return text + (f"Each run sent what was planned. With ZeRO 3 this is {share(min(saved))} to {share(max(saved))} "
                   "less than the formula: layers that are still in the buffers at the turn from forward to backward, "
                   "or from backward to the next forward, are not gathered again.")


def loss_text(results, difference):
    text = (f"One process with accumulation and {' and '.join(str(n) for n in results['numbers'][1:])} processes train "
            f"on the same {len(results['splits'][0]['losses'])} batches. Their losses differ by "
            + coincide_text(difference, results["precision"]))
    for gpus in results["numbers"][1:]:
        runs = [run for run in results["runs"] if run["gpus"] == gpus and run["parts"] == 1]
        equal = all(run["losses"] == runs[0]["losses"] and run["norms"] == runs[0]["norms"] for run in runs)
        text += (f" With {gpus} processes and no accumulation, ZeRO 0 to 3 have "
                 + ("the same bits in losses and norms of all steps." if equal else
                    f"different bits; their losses differ by at most {largest_difference(runs[1:], runs[0]):.1e}."))
    return text


def data_parallel(results, about):
    title = "Data parallelism"
    if "why" in results:
        return left_out(title, results["why"] + ". On GPUs it needs NCCL and more than one GPU")
    numbers, paper = results["numbers"], results["paper"]
    shown = [c for c in CATEGORIES if any(plan["bytes"][c] for plan in results["plans"])]
    difference = largest_difference(results["splits"][1:], results["splits"][0])
    sent = {run["zero"]: run["sent"] for run in results["runs"] if run["gpus"] == numbers[-1] and run["parts"] == 1}
    one_type = results["grad_dtype"] == results["precision"]
    return Section(
        title, [memory_text(results), sent_text(results), loss_text(results, difference)],
        parallel_figure(results, shown),
        "Left: planned. The others: bytes sent and losses, measured on " + ("GPUs" if about["gpu"] else "one CPU")
        + ". Dashed: the formula for rings.",
        html_table(["stage", "processes", "micro-batches per process", "memory per process", "sent MB", "planned MB",
                    "formula for rings MB"],
                   [[f"ZeRO {run['zero']}", run["gpus"], run["parts"], size(run["planned"]),
                     *[f"{b / 1e6:,.1f}" for b in (run["sent"], run["bytes_sent"], ring_bytes(results, run))]]
                    for run in results["runs"]]),
        [(f"State of 7.5 billion parameters on each of {ZERO_PAPER_GPUS} GPUs, ZeRO 0 / 1 / 2 / 3",
          " / ".join(str(gb) for gb in ZERO_PAPER_GB) + " GB (ZeRO's paper)",
          " / ".join(number(state_of(bytes_) / 1e9) for bytes_ in paper["bytes"]) + " GB (planned)"),
         ("Bytes sent with ZeRO 1 / 2 / 3, relative to ZeRO 0",
          "1 / 1 / 1.5" + ("" if one_type else ", if weights and gradients have one type"),
          " / ".join(f"{sent[zero] / sent[0]:.2f}" for zero in STAGES[1:])
          + f" (measured, {about['model']['layers']} layers)"),
         (f"The same batch on {', '.join(str(n) for n in numbers)} processes", "the same result",
          f"losses within {difference:.0e} (measured)")])


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
    """Returns the bytes that a process sends to its tensor group per step: see group_sent_text()."""
    layers, t = run["model"]["layers"], run["gpus"]
    tensors = 10 * layers + (3 * (layers - 1) if run["recompute"] == "full" else 0)
    return run["tokens"] * run["model"]["channels"] * tensors * DTYPE_BYTES[run["precision"]] * (t - 1) / t


def tensor_figure(plans, none, several):
    figure, axes = panels(1, 3, 4.2, 12)
    for axis, bars, name, formula, unit, title in (
            (axes[0], plans, "per_token_layer", kept_formula, 1e3, "kB kept per token and layer, 7B, BF16"),
            (axes[1], several, "sent_in_group", link_formula, 1e6, "MB sent per micro-batch in the tensor group")):
        for x, bar in enumerate(bars):
            scale = unit * bar.get("parts", 1)
            axis.bar(x, bar[name] / scale, 0.7, color=MODE_COLORS[bar["recompute"]])
            chapter_mark(axis, x, formula(bar) / scale, 0.4)
        named_ticks(axis, [f"t = {bar['gpus']}" for bar in bars], fontsize=7.5)
        axis.set(title=title)
    loss_curves(axes[2], {f"t = {run['gpus']}": run["losses"] for run in none}, "Losses")
    legend_below(figure, [*entries(MODE_COLORS), chapter_entry("formula")])
    return figure


def group_memory_text(plans):
    first, other = plans[0]["weights"], plans[1]["weights"]
    whole = [name for name in first if first[name] == other[name]]
    part = sum(first[name] for name in whole) / sum(first.values())
    return [("The t processes of a tensor group share each micro-batch of N tokens. Each has 1/t of the NH heads and "
             "of the MLP's hidden layer and, with sequence parallelism, 1/t of the rows of everything else. In BF16 a "
             "layer with C channels keeps (32 C + 16 + 4 NH) / t bytes per token; (20 C + 4 NH) / t with selective, "
             "2 C / t with full recomputation (dashed on the left). Korthikanti et al. have (34 C + 5 NH T) / t, and 10 C "
             "+ (24 C + 5 NH T) / t without sequence parallelism. 2 C are dropout masks, which this model does not have. "
             "5 NH T are T × T tensors, for which flash attention keeps 4 bytes per head. 16 bytes are statistics of two "
             "LayerNorms."),
            (f"Not split: {', '.join(name.removeprefix('h.%d.') for name in whole)}. These are {share(part)} of the 7B "
             f"model's weights, so each GPU holds {share(part)} + {share(1 - part)} / t of the model state. Each run "
             "allocated what was planned, to the byte.")]


def group_sent_text():
    return ("Forward gathers the rows of two LayerNorms per layer and sums two outputs (all-gather, reduce-scatter); "
            "backward does the reverse. These are 8 tensors of N C numbers, each sent (t - 1) / t times. Backward also "
            "gathers both LayerNorms again for gradients of weights, which makes 10; with full recomputation 13, but "
            "not in the last layer (dashed in the middle). Each run sent what was planned, including gradients of what "
            "is not split.")


def tensor_parallel(results, about):
    title = "Tensor parallelism"
    if "why" in results:
        return left_out(title, results["why"] + ". On GPUs it needs NCCL and more than one GPU")
    plans, runs = results["plans"], [{**run, "model": about["model"]} for run in results["runs"]]
    none, several = ([run for run in runs if run["recompute"] == "none"], [run for run in runs if run["gpus"] > 1])
    for run in several:     # less the planned bytes of gradients
        run["sent_in_group"] = run["sent"] - (run["bytes_sent"] - run["tensor_bytes_sent"])
    difference = largest_difference(none[1:], none[0])
    return Section(
        title, [*group_memory_text(plans), group_sent_text(),
                f"The losses of different t on the same {len(none[0]['losses'])} batches differ by "
                + coincide_text(difference, none[0]["precision"])],
        tensor_figure(plans, none, several),
        "Left: planned. The others: measured on " + ("GPUs" if about["gpu"] else "one CPU") + ". Dashed: formulas.",
        html_table(["7B", "recompute", "kept bytes per token and layer", "formula", "Korthikanti, nothing recomputed",
                    "without sequence parallelism", "model state"],
                   [[f"t = {plan['gpus']}", plan["recompute"],
                     *[f"{b:,.0f}" for b in (plan["per_token_layer"], kept_formula(plan), *korthikanti(plan))],
                     size(plan["state"])] for plan in plans])
        + html_table(["measured", "recompute", "micro-batches", "memory per process", "sent MB", "planned MB",
                      "planned in the group MB", "formula MB"],
                     [[f"t = {run['gpus']}", run["recompute"], run["parts"], size(run["planned"]),
                       *[f"{b / 1e6:,.1f}" for b in (run["sent"] or 0, run["bytes_sent"], run["tensor_bytes_sent"],
                                                     link_formula(run))]] for run in runs]),
        [("Activations per token and layer of a 7B, t = 1 / 2 / 4",
          " / ".join(number(korthikanti(plan)[0] / 1e3) for plan in plans[:3]) + " kB, naive attention (Korthikanti)",
          " / ".join(number(plan["per_token_layer"] / 1e3) for plan in plans[:3]) + " kB, flash attention (planned)"),
         ("Tensors of N C numbers that a layer sends, times (t - 1) / t", "8 (all-gathers, reduce-scatters)",
          " / ".join(f"{10 * run['sent_in_group'] / link_formula(run):.0f}" for run in none[1:]) + " (measured)"),
         (f"The same batch with t = {', '.join(str(run['gpus']) for run in none)}", "the same result",
          f"losses within {difference:.0e} (measured)")])

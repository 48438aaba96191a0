"""The part of the report about data parallelism and ZeRO."""
from figures import (BLUE, CATEGORIES, Section, category_entries, chapter_entry, chapter_mark, entry,
                     html_table, left_out, legend_below, loss_curves, named_ticks, number, panels, percent, share, size,
                     stack)
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


def sent_as_planned(run):
    """Returns whether a run sent the planned bytes, up to the printed digits and the small sums of losses and norms."""
    last_digit = 1e7 if run["bytes_sent"] >= 1e9 else 1e5
    return abs(run["sent"] - run["bytes_sent"]) <= last_digit / 2 + 0.01 * run["bytes_sent"]


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
    runs = results["runs"] + results["splits"]
    text = ("Each process has its own micro-batches. The gradients of all processes are summed before the update. "
            "With ZeRO 0 each process holds the whole state, "
            f"{size(plans[most, 0]['total'])} in all. ZeRO 1 shards optimizer states and master weights, ZeRO 2 also "
            f"gradients, ZeRO 3 also weights: with {most} processes "
            + ", ".join(size(plans[most, zero]["total"]) for zero in STAGES[1:]) + " each. ")
    wrong = [(run, plans[run["gpus"], run["zero"]]["total"]) for run in runs
             if not run["as_planned"] or run["planned"] != plans[run["gpus"], run["zero"]]["total"]]
    if wrong:
        run, total = wrong[0]
        text += (f"{len(wrong)} of {len(runs)} runs did not allocate what was planned, the first with ZeRO "
                 f"{run['zero']} and {run['gpus']} processes: {run['planned']:,} bytes, planned {total:,}.")
    else:
        text += f"All {len(runs)} runs allocated what was planned, to the byte."
    buffers, whole = plans[most, 3]["buffers"], plans[most, 0]["weights"] + plans[most, 0]["gradients"]
    text += (" Stages 2 and 3 need buffers for the embeddings and a few whole layers: "
             f"{size(buffers)} with ZeRO 3, {percent(buffers / whole)} of all weights and gradients of this model. "
             "This fraction is smaller with more layers.")
    larger = [f"from {zero - 1} to {zero} with {gpus} processes" for gpus in results["numbers"][1:]
              for zero in STAGES[1:] if plans[gpus, zero]["total"] > plans[gpus, zero - 1]["total"]]
    return text + (f" Here some stages need more memory than the one before: {', '.join(larger)}." if larger else "")


def paper_text(paper):
    each = [state_of(bytes_) / paper["parameters"] for bytes_ in paper["bytes"]]
    return (f"ZeRO's paper has an example with 7.5 billion parameters in BF16 on {ZERO_PAPER_GPUS} GPUs. Each GPU "
            "holds 16, 4 + 12/64, 2 + 14/64 or 16/64 bytes per parameter. The plan of such a model "
            f"({number(paper['parameters'] / 1e9)} billion) gives {', '.join(f'{b:.2f}' for b in each)}. The buffers "
            f"are not included: {size(paper['bytes'][-1]['buffers'])} with ZeRO 3.")


def sent_text(results):
    runs = results["runs"]
    wrong = [run for run in runs if not sent_as_planned(run)]
    text = ("Per parameter, each process sends (R - 1) / R times the following in a step, in a ring of R processes: 2 "
            "numbers with ZeRO 0 (an all-reduce), 1 + 1 with ZeRO 1 (reduce-scatter, all-gather). With k micro-batches "
            "it is k + 1 with ZeRO 2, which reduces gradients after each micro-batch, and 3 k with ZeRO 3, which "
            "gathers weights in forward and again in backward. ")
    if results["grad_dtype"] != results["precision"]:
        text += f"Gradients are {results['grad_dtype'].upper()} here, weights {results['precision'].upper()}. "
    if wrong:
        run = wrong[0]
        return text + (f"{len(wrong)} of {len(runs)} runs did not send what was planned, the first with ZeRO "
                       f"{run['zero']} and {run['gpus']} processes × {run['parts']} micro-batches: "
                       f"{size(run['sent'])}, planned {size(run['bytes_sent'])}.")
    saved = [1 - run["bytes_sent"] / ring_bytes(results, run) for run in runs if run["zero"] == 3]
    return text + (f"All {len(runs)} runs sent what was planned. With ZeRO 3 this is {share(min(saved))} to "
                   f"{share(max(saved))} less than the formula: layers that are still in the buffers at the turn from "
                   "forward to backward, or from backward to the next forward, are not gathered again.")


def loss_text(results, difference):
    splits, limit = results["splits"], ONE_CURVE[results["precision"]]
    text = (f"One process with accumulation and {' and '.join(str(n) for n in results['numbers'][1:])} processes train "
            f"on the same {len(splits[0]['losses'])} batches. Their losses differ by at most {difference:.1e} "
            "(relative)")
    text += (", so the curves coincide." if difference <= limit else
             f". This is more than the {limit:.0e} that rounding explains: the curves do not coincide.")
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
        title, [memory_text(results), paper_text(paper), sent_text(results), loss_text(results, difference)],
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

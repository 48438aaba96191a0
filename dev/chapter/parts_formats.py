"""Parts 9 to 11 of the report: number formats, what goes wrong without scaling or FP32 copies, whole runs in FP8."""
import math
import statistics

from figures import (BLUE, GREEN, GREY, ORANGE, PURPLE, RED, TEAL, Section, captioned, change, concluded, conclusive,
                     doubling_ticks, entry, html_table, left_out, matplotlib, named_ticks, number, panels, pyplot,
                     share, spread)
from formats import FORMATS
from fp8_quality import AGAIN, REFERENCE

FORMAT_COLORS = {"FP32": GREY, "BF16": BLUE, "FP16": GREEN, "E4M3": ORANGE, "E5M2": RED}
LOW, HIGH = -40, 20         # powers of two in the picture
BY_NAME = {f.name: f for f in FORMATS}


def power_text(x):
    return f"2^{round(math.log2(x))}"


def loss_text(x):
    return f"{x:.4f}"


# ---- 9

def below(values, power):
    """The share of values below 2^power that are not 0."""
    return sum(part for of, part in values["powers"].items() if int(of) < power)


def underflow(values, format_):
    """The share of values that become 0: those below half of the smallest number."""
    return below(values, math.log2(format_.smallest) - 1)


def too_large(values, format_):
    return sum(part for power, part in values["powers"].items() if 2.0 ** int(power) > format_.largest)


def middle(values):
    """The power of two at or below the median of the values that are not 0."""
    so_far, half = 0, sum(values["powers"].values()) / 2
    for power in sorted(values["powers"], key=int):
        so_far += values["powers"][power]
        if so_far >= half:
            return int(power)
    return None


def precision_figure(axis):
    for f in FORMATS:
        # The envelope of the error, a point for each power of two; a format ends after its largest number.
        points = [(x, f.worst_error(x)) for x in range(LOW, HIGH + 1) if f.worst_error(x) is not None]
        axis.plot([x for x, _ in points], [math.log2(error) for _, error in points], color=FORMAT_COLORS[f.name],
                  linewidth=2, label=f"{f.name}: {f.exponent} + {f.mantissa} bits")
        last, error = points[-1]
        if last < HIGH:
            axis.plot(last, math.log2(error), marker="|", markersize=14, color=FORMAT_COLORS[f.name])
            axis.annotate(f" largest: {f.largest:,.0f}", (last, math.log2(error)), (3, -3), fontsize=7.5,
                          textcoords="offset points", color=FORMAT_COLORS[f.name])
    axis.set(xlim=(LOW, HIGH), title="Largest relative rounding error of numbers of that magnitude; 1: underflow")
    ticks = range(-24, 1, 4)
    axis.set_yticks(ticks, [f"$2^{{{t}}}$" if t else "1" for t in ticks])
    axis.set_ylim(-25, 1)
    axis.legend(loc="lower left", ncols=5, bbox_to_anchor=(0, 0.1))


def values_figure(axis, values):
    names = list(values["spread"])
    for y, name in enumerate(names):
        powers = values["spread"][name]["powers"]
        for power, part in powers.items():
            axis.bar(int(power) + 0.5, 0.85 * part / max(powers.values()), 1, y - 0.42, color=TEAL)
    for f in (f for f in FORMATS if f.smallest >= 2.0 ** LOW):
        axis.axvline(math.log2(f.smallest), color=FORMAT_COLORS[f.name], linewidth=1, linestyle=":")
        axis.text(math.log2(f.smallest), len(names) - 0.45, f"smallest {f.name}", color=FORMAT_COLORS[f.name],
                  ha="center", va="bottom", fontsize=7.5)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.5, len(names) - 0.1)
    axis.set_title(f"Magnitudes of the values of one step of {values['tokens']:,} tokens", pad=12)
    axis.grid(axis="y", visible=False)


def format_sentence():
    bf16, fp16, e5m2 = (BY_NAME[name] for name in ("BF16", "FP16", "E5M2"))
    narrowest = min(FORMATS, key=lambda f: f.normal_powers)
    return ("BF16 has FP32's exponent, and so its range. FP16 and E5M2 have the same range: normal numbers start at "
            f"{power_text(fp16.smallest_normal)} and {power_text(e5m2.smallest_normal)} and end at {fp16.largest:,.0f} "
            f"and {e5m2.largest:,.0f}. {narrowest.name} has the smallest range, {narrowest.normal_powers:.0f} powers "
            f"of two, up to {narrowest.largest:.0f}. BF16 is less precise than FP16: the distance from 1 to the next "
            f"number is {bf16.epsilon / fp16.epsilon:.0f} times as large. Values outside the range become 0 or "
            "infinity; inside it, the mantissa alone determines the precision.")


def values_sentence(values):
    gradients = values["spread"]["gradients of activations"]
    parts = ", ".join(f"{share(underflow(gradients, BY_NAME[name]))} in {name}" for name in ("FP16", "E5M2", "E4M3"))
    typical = middle(values["spread"]["weights"])
    large = max(too_large(kind, BY_NAME["E4M3"]) for kind in values["spread"].values())
    vanishing = below(values["spread"]["updates of weights"], typical - 8)
    return ("Below: the values of one real step (activations of the first layer, all weights). Gradients of "
            f"activations are the smallest: half of them are below 2^{middle(gradients) + 1}. Stored without a scale, "
            f"this share becomes 0: {parts}. These are gradients of the mean loss over {values['tokens']:,} tokens. "
            "With 1,000 times as many tokens each is 1,000 times smaller, so a format that trains a small run may fail "
            "in a large one. " + ("No value is too large for any format." if large == 0 else
                                 f"Up to {share(large)} of the values of one kind are too large for E4M3.")
            + f" The median weight lies between 2^{typical} and 2^{typical + 1}, where BF16 numbers are "
            f"2^{typical - 7} apart: {share(vanishing)} of the updates are smaller than half of that.")


def formats(results, about):
    values = results.get("values")
    if values:
        figure, (top, bottom) = panels(2, 1, 7.2, sharex=True, gridspec_kw={"height_ratios": [3, 2.4]})
        values_figure(bottom, values)
    else:
        figure, top = panels(1, 1, 4.2)
        bottom = top
    precision_figure(top)
    ticks = range(LOW, HIGH + 1, 5)
    bottom.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    bottom.set_xlabel("magnitude")
    rows = [[f.name, f.bits, f"1 + {f.exponent} + {f.mantissa}", f"{f.largest:.6g}", power_text(f.smallest_normal),
             power_text(f.smallest), power_text(f.epsilon), f"{f.digits:.1f}", f"{f.normal_powers:.0f}",
             f"{f.powers:.0f}", f.largest_exponent] for f in FORMATS]
    tables = html_table(["format", "bits", "sign + exponent + mantissa", "largest", "smallest normal", "smallest",
                         "from 1 to the next", "decimal digits", "powers of two, normal numbers", "all numbers",
                         "the largest exponent is for"], rows)
    if values:
        lost = [[name, share(kind["zeros"]), f"2^{middle(kind)}", *[share(underflow(kind, f)) for f in FORMATS]]
                for name, kind in values["spread"].items()]
        tables += captioned("Share of values that become 0 without a scale",
                            ["values", "already 0", "median in", *BY_NAME], lost)
    return Section(
        "Number formats", "9_formats.png", figure,
        [format_sentence(), values_sentence(values) if values else
         f"The values of a real run are left out: {results['why']}."], tables,
        [("Range of formats", "FP32 = BF16, FP16 = E5M2, E4M3 the smallest",
          " / ".join(f"{f.name} {f.normal_powers:.0f}" for f in FORMATS)
          + " powers of two of normal numbers (from their bits)"),
         ("Precision of BF16", "less than FP16's",
          f"{BY_NAME['BF16'].digits:.1f} decimal digits, FP16 {BY_NAME['FP16'].digits:.1f}")],
        "Top: computed from the formats' bits. " + ("Below: measured, in BF16." if values else ""))


# ---- 10

RATE_COLORS = [BLUE, ORANGE, GREEN]
KIND_COLORS = {"dynamic": BLUE, "delayed": BLUE, "none": RED, "bf16": GREY, "fp32": BLUE}
DEMOS = {"master": "Weights in BF16 without a master copy", "sums": "Gradients summed in BF16",
         "loss_scaling": "FP16 without loss scaling", "fp8_scaling": "FP8 without scales"}
GROWS = 2       # an error grows if it becomes this many times larger: rounding alone varies by some percent


def seeds_of(result):
    return f"{change(min(result['ratios']) - 1)} to {change(max(result['ratios']) - 1)}"


def ended(result, words, reference):
    """A sentence that compares the last losses of runs with a reference. `words`: such as Without scales."""
    stopped = [said for said in result["stopped"] if said]
    if stopped:
        return f"{words}, {len(stopped)} of {len(result['stopped'])} runs stopped early (\"{stopped[0]}\")."
    effect = statistics.median(result["ratios"]) - 1
    where = f"{change(abs(effect)).lstrip('+')} {'above' if effect > 0 else 'below'} {reference}"
    return concluded(result["ratios"], f"{words}, the last loss is {where} (seeds {seeds_of(result)}).",
                     f"the last loss {words[0].lower()}{words[1:]}", "seeds", change)


def worse(result):
    """Whether runs end worse than the reference; None if the seeds allow no conclusion."""
    if any(result["stopped"]):
        return True
    return statistics.median(result["ratios"]) > 1 if conclusive(result["ratios"]) else None


def verdict(outcomes, chapter):
    if any(outcomes):
        return f"This agrees with the chapter: {chapter}."
    if any(outcome is False for outcome in outcomes):
        return f"This run does not agree with the chapter ({chapter}): the loss is better without."
    return f"So there is no conclusion about the chapter's statement: {chapter}."


def curves(axis, kinds, key, title, scale=1):
    for name, result in kinds.items():
        points = result.get(key) or []
        axis.plot([step for step, _ in points], [scale * value for _, value in points], color=KIND_COLORS[name],
                  linewidth=1.4, label=name, linestyle="--" if name == "bf16" else "-")
    axis.set(title=title, xlabel="step")
    if key == "losses":     # larger losses are spikes
        axis.set_ylim(None, 1.05 * max(result[key][0][1] for result in kinds.values()))
    axis.legend(fontsize=7.5)


def unchanged(kinds):
    return statistics.median(part for _, part in kinds["none"]["unchanged"])


def master_figure(axes, part):
    share_axis, loss_axis = axes
    for color, (rate, kinds) in zip(RATE_COLORS, part["rates"].items()):
        share_axis.plot(*zip(*[(step, 100 * value) for step, value in kinds["none"]["unchanged"]]), color=color,
                        linewidth=1.2, label=f"learning rate {rate}")
        for kind, style in (("fp32", "-"), ("none", ":")):
            loss_axis.plot(*zip(*kinds[kind]["losses"]), color=color, linestyle=style, linewidth=1.4)
    loss_axis.set_ylim(None, 1.05 * kinds["fp32"]["losses"][0][1])     # larger losses are spikes
    loss_axis.set(title="Loss", xlabel="step")
    share_axis.set(title="BF16 without a master copy:\nweights unchanged by a step, %",
                   ylim=(0, 130), yticks=range(0, 101, 20))     # space for the legend above 100 %
    share_axis.legend(fontsize=7.5, loc="upper center", labelspacing=0.2)
    loss_axis.legend(handles=[entry("with a copy in FP32", "0.3", "-"), entry("without", "0.3", ":")], fontsize=7.5)


def master_words(part, sums):
    rates, copies = part["rates"], sums.get("copies")
    text = ("The chapter: updates that are too small for 16 bits vanish, so an FP32 copy of the weights is needed. In "
            "BF16 without one, a step leaves this share of the weights unchanged that it would have changed in FP32 "
            "(median over the run): " + ", ".join(f"{share(unchanged(kinds))} at a learning rate of {rate}"
                                                  for rate, kinds in rates.items()) + ". "
            + " ".join(ended(kinds["none"], f"At {rate} without a copy", "that with one")
                       for rate, kinds in rates.items()))
    if copies:
        text += (f" With a copy, the BF16 weights also often stay unchanged in a step ({share(copies[-1])} of those "
                 "whose copy changed, in the last step measured), but the copy accumulates the updates.")
    return text + " " + verdict([worse(kinds["none"]) for kinds in rates.values()],
                                "without an FP32 copy of the weights updates vanish, and training suffers")


def master_tables(part):
    rows = []
    for rate, kinds in part["rates"].items():
        none, fp32 = kinds["none"], kinds["fp32"]
        rows.append([rate, share(none["unchanged"][0][1]), share(unchanged(kinds)), share(none["unchanged"][-1][1]),
                     loss_cell(fp32), loss_cell(none), ratio_cell(none)])
    return captioned("Weights in BF16, with and without a master copy", [
        "learning rate", "unchanged, first step", "median", "last step", "last loss, with", "without",
        "ratio, median of seeds (range)"], rows)


def sums_figure(axes, part):
    axis, sums = axes[0], part["sums"]
    counts = [record["micro_batches"] for record in sums]
    axis.plot(counts, [100 * record["error"] for record in sums], color=RED, marker="o", markersize=3.5,
              label="summed in BF16")
    axis.plot(counts, [100 * record["rounded_once"] for record in sums], color=BLUE, marker="s", markersize=3,
              label="summed in FP32, then rounded")
    axis.plot(counts, [100 * sums[0]["error"] * math.sqrt(count) for count in counts], color="0.6", linewidth=0.8,
              linestyle="--", label="∝ √micro-batches")
    axis.set_yscale("log")
    doubling_ticks(axis, counts, "micro-batches")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(title="Gradients summed in BF16:\nerror against FP32, % of their norm")
    axis.legend(fontsize=7.5, loc="upper left")


def sums_words(part, _):
    first, last = part["sums"][0], part["sums"][-1]
    times = last["error"] / first["error"]
    text = ("The chapter: gradients are accumulated in FP32, as BF16 loses small values. With the same weights and "
            f"micro-batches, gradients summed in BF16 have an error of {share(first['error'])} of their norm after "
            f"{first['micro_batches']} micro-batch, from rounding once, and of {share(last['error'])} after "
            f"{last['micro_batches']}. The FP32 sum, rounded to BF16 at the end, has an error of "
            f"{share(last['rounded_once'])}. ")
    if times <= GROWS:
        return text + f"The error hardly grows here ({number(times)} times), which contradicts the chapter."
    text += f"This agrees with the chapter: each addition rounds the sum, and the error grows {number(times)} times."
    if times > math.sqrt(last["micro_batches"] / first["micro_batches"]):
        text += (" Independent rounding errors would grow with the square root of the number of micro-batches. This "
                 "error grows faster, because a large sum loses more of each small addend.")
    return text


def zeros_of(result):
    return statistics.median(part for _, part in result["zero_gradients"]) if result.get("zero_gradients") else None


def scaling_figure(axes, part):
    curves(axes[0], part["kinds"], "zero_gradients", "FP16: gradients that are 0, %,\nby --loss-scaling", 100)
    axes[0].set_ylim(0, None)
    curves(axes[1], part["kinds"], "losses", "Loss")


def scaling_words(part, _):
    kinds = part["kinds"]
    none, dynamic = zeros_of(kinds["none"]), zeros_of(kinds["dynamic"])
    text = "The chapter: gradients that are too small for FP16 become 0 unless the loss is scaled. "
    if none is not None and dynamic is not None:
        text += (f"In a step of {part['tokens']:,} tokens, {share(none)} of the gradients are 0 without scaling and "
                 f"{share(dynamic)} with it (median of the run). "
                 + ("This agrees with the chapter. " if none > dynamic else
                    "At this size scaling does not reduce the number of zeros. "))
    return (text + ended(kinds["none"], "Without scaling", "that with it") + " "
            + verdict([worse(kinds["none"])], "FP16 needs loss scaling"))


def scaling_tables(part):
    return captioned("FP16", ["loss scaling", "gradients that are 0", "last loss",
                              "over dynamic, median of seeds (range)"],
                     [[kind, share(zeros_of(r)) if zeros_of(r) is not None else "–", loss_cell(r), ratio_cell(r)]
                      for kind, r in part["kinds"].items()])


def last_fp8(kinds, kind):
    """Shares of underflow and saturation, of all layers together, by tensor, in the last step."""
    return kinds[kind]["fp8"][-1][1] if kinds[kind].get("fp8") else {}


def fp8_figure(axes, part):
    axis, kinds = axes[0], part["kinds"]
    tensors = list(last_fp8(kinds, "none"))
    for shift, kind in ((-0.2, "none"), (0.2, "delayed")):
        found = last_fp8(kinds, kind)
        for x, parts in enumerate(found.get(tensor, {"flushed": 0, "saturated": 0}) for tensor in tensors):
            axis.bar(x + shift, 100 * parts["flushed"], 0.38, color=KIND_COLORS[kind])
            axis.bar(x + shift, 100 * parts["saturated"], 0.38, 100 * parts["flushed"], color="0.2")
    named_ticks(axis, tensors, rotation=60, fontsize=7.5)
    axis.set(title="FP8: values that become 0, %,\nand values that are too large (black)")
    axis.legend(handles=[entry("no scales", KIND_COLORS["none"]), entry("delayed scales", KIND_COLORS["delayed"])],
                fontsize=7.5)
    curves(axes[1], kinds, "losses", "Loss")


def fp8_words(part, _):
    kinds, text = part["kinds"], "The chapter: FP8 diverges without care. "
    for kind, words in (("none", "Without scales"), ("delayed", "With delayed scales")):
        found = last_fp8(kinds, kind)
        if found:
            tensor = max(found, key=lambda name: found[name]["flushed"] + found[name]["saturated"])
            text += (f"{words}, {tensor} loses the most values: {share(found[tensor]['flushed'])} become 0, "
                     f"{share(found[tensor]['saturated'])} are too large. ")
        text += ended(kinds[kind], words, "BF16's") + " "
    return text + verdict([worse(kinds["none"])], "matmuls in FP8 need scales")


def fp8_tables(part):
    return captioned("Matmuls in FP8", ["scales", "last loss", "over BF16, median of seeds (range)"],
                     [["BF16" if kind == "bf16" else kind, loss_cell(r), ratio_cell(r)]
                      for kind, r in part["kinds"].items()])


def ratio_cell(result):
    stopped = sum(said is not None for said in result["stopped"])
    return spread(result["ratios"], loss_text) + (f"; {stopped} stopped" if stopped else "")


def loss_cell(result):
    losses = [loss for loss in result["last"] if loss is not None]
    return loss_text(statistics.mean(losses)) if losses else "stopped"


def failure_rows(there):
    def loss(result):
        if any(result["stopped"]):
            return "runs stop"
        return f"loss {seeds_of(result)}" + ("" if conclusive(result["ratios"]) else ", no conclusion")

    def here(name, part):
        if name == "master":
            rate, kinds = list(part["rates"].items())[-1]
            return f"at a learning rate of {rate} {share(unchanged(kinds))} do; {loss(kinds['none'])}"
        if name == "sums":
            last = part["sums"][-1]
            return f"error of {share(last['error'])} after {last['micro_batches']} micro-batches"
        zeros = [zeros_of(part["kinds"][kind]) for kind in ("none", "dynamic") if kind in part["kinds"]]
        counted = len(zeros) == 2 and None not in zeros
        return ((f"{share(zeros[0])} of gradients, with scaling {share(zeros[1])}; " if counted else "")
                + loss(part["kinds"]["none"]))
    chapter = {"master": "updates too small for 16 bits vanish", "sums": "BF16 loses small values",
               "loss_scaling": "small gradients become 0", "fp8_scaling": "diverges without care"}
    return [(DEMOS[name] + (", against BF16" if name == "fp8_scaling" else ""), chapter[name],
             here(name, part) + " (measured)") for name, part in there.items()]


DRAWN = {"master": (master_figure, master_words, master_tables), "sums": (sums_figure, sums_words, lambda part: ""),
         "loss_scaling": (scaling_figure, scaling_words, scaling_tables),
         "fp8_scaling": (fp8_figure, fp8_words, fp8_tables)}


def failures(results, about):
    there = {name: results[name] for name in DEMOS if "why" not in results[name]}
    figure = None
    if there:
        # One column for each demonstration; that of sums has one tall panel.
        mosaic = [[f"{name} 0" for name in there], [f"{name} {int(name != 'sums')}" for name in there]]
        figure, axes = pyplot.subplot_mosaic(mosaic, figsize=(max(4, 3.3 * len(there)), 6.4))
        for name, part in there.items():
            DRAWN[name][0]([axes.get(f"{name} {row}") for row in (0, 1)], part)
    sees = [DRAWN[name][1](there[name], results["sums"]) if name in there else
            f"{title}: left out, because {results[name]['why']}." for name, title in DEMOS.items()]
    return Section("What goes wrong without", "10_failures.png", figure, sees,
                   "".join(DRAWN[name][2](part) for name, part in there.items()), failure_rows(there),
                   "Measured: small models with the same data and seeds, with and without a technique. Curves are "
                   "those of the first seed, dotted without a copy. Last losses are medians of a run's last tenth.")


# ---- 11

QUALITY_COLORS = [GREY, BLUE, ORANGE, RED, GREEN, PURPLE]
NANOCHAT = ("This compares quality at equal steps. FP8 only saves time, and less than its matmuls do: attention, norms "
            "and the update stay the same, quantisation is new, and a higher loss needs longer training. The published "
            "gains at equal loss (nanochat: about 5 %) are smaller than the speed-up of the matmuls.")


def band(axis, steps, columns, color, label=None):
    """The mean over seeds; shaded: the range."""
    axis.plot(steps, [statistics.mean(column) for column in columns], color=color, linewidth=1.4, label=label)
    axis.fill_between(steps, [min(column) for column in columns], [max(column) for column in columns], color=color,
                      alpha=0.2, linewidth=0)


def quality_figure(whole, every):
    figure, (left, right) = panels(1, 2, 4.2)
    columns = {name: list(zip(*[run["losses"] for run in each])) for name, each in whole.items()}
    means = [statistics.mean(column) for column in columns[REFERENCE]]
    steps = [every * (i + 1) for i in range(len(means))]
    for color, (name, losses) in zip(QUALITY_COLORS, columns.items()):
        band(left, steps, losses, color, f"{name} ({len(whole[name])} seed{'s' * (len(whole[name]) > 1)})")
        band(right, steps, [[100 * (loss / mean - 1) for loss in each] for each, mean in zip(losses, means)], color)
    left.set(title="Validation loss; shaded: range of the seeds", xlabel="step")
    right.set(title=f"% above the mean of {REFERENCE}", xlabel="step")
    left.legend()
    return figure


def quality_sentence(name, each, ratios):
    stopped = [run["stopped"] for run in each if run["stopped"]]
    if name == REFERENCE or not (ratios or stopped):
        return ""
    if name == AGAIN and ratios:
        return (" BF16 with a step's sums in another order shows the effect of rounding alone: it ends "
                f"{change(min(ratios) - 1)} to {change(max(ratios) - 1)} from {REFERENCE}, seed by seed.")
    if stopped:
        return f" {name}: {len(stopped)} of {len(each)} runs stopped early (\"{stopped[0]}\")."
    return " " + concluded(ratios, f"{name} ends {change(statistics.median(ratios) - 1)} from {REFERENCE}.",
                           f"the last loss of {name}", "seeds", change)


def fp8_quality(results, about):
    title, name_ = "FP8 over whole runs", "11_fp8_quality.png"
    if "why" in results:
        return left_out(title, name_, f"{results['why']}, which dev/chapter/fp8_quality.py writes")
    runs, options = {}, results["options"]
    for run in sorted(results["runs"], key=lambda run: run["seed"]):
        runs.setdefault(run["format"], []).append(run)
    finished = {name: {run["seed"]: run["losses"][-1] for run in each if not run["stopped"]}
                for name, each in runs.items()}
    said, rows, means = "", [], []
    for name, each in runs.items():
        losses = finished[name]
        shared = [seed for seed in losses if seed in finished[REFERENCE]]
        ratios = [losses[seed] / finished[REFERENCE][seed] for seed in shared]
        said += quality_sentence(name, each, ratios)
        if shared and name != REFERENCE:
            mean = sum(losses[s] for s in shared) / sum(finished[REFERENCE][s] for s in shared) - 1
            means.append(f"{change(mean)} ({name})")
        rows.append([name, len(each), spread(list(losses.values()), loss_text),
                     loss_text(statistics.mean(losses.values())) if losses else "–", spread(ratios, loss_text),
                     sum(run["stopped"] is not None for run in each)])
    said += f" In the mean over seeds: {', '.join(means)}." if means else ""
    whole = {name: each for name, each in runs.items() if not any(run["stopped"] for run in each)}
    made = results["about"]
    return Section(
        title, name_, quality_figure(whole, options["eval_every"]) if REFERENCE in whole else None,
        [f"Runs of {options['steps']:,} steps of a model with {made['parameters']:,} parameters on {made['device']}, "
         f"the same seeds for each format.{said}", NANOCHAT],
        html_table(["format", "seeds", "last validation loss, median (range)", "mean",
                    f"over {REFERENCE}, seed by seed, median (range)", "stopped"], rows),
        [("Quality of FP8", "diverges without care; large runs have trained in it",
          "; ".join(f"{row[0]} {row[4].split(' ')[0]}" for row in rows if row[0] not in (REFERENCE, AGAIN))
          + f" of {REFERENCE}'s last loss (measured)")],
        f"Measured by dev/chapter/fp8_quality.py, {made['date']}.")

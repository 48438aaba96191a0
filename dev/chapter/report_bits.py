"""The report's parts 9 to 11: formats of few bits, what goes wrong without what makes them train, whole runs in FP8."""
import math
import statistics

from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from formats import Format
from fp8_quality import AGAIN
from measure import told
from page import Section, concluded, number, spread, table

FORMAT_COLORS = {"FP32": "#9c9c9c", "BF16": "#4e79a7", "FP16": "#59a14f", "E4M3": "#f28e2b", "E5M2": "#e15759"}
LOW, HIGH = -40, 20         # powers of two in the picture


def share(x):
    """A part of all, of which small ones matter."""
    return "0" if x == 0 else f"{100 * x:.{max(0, min(4, 1 - math.floor(math.log10(100 * x))))}f} %"


def change(x):
    """Also a small one."""
    return f"{100 * x:+.2g} %"


def power_text(x):
    return f"2^{round(math.log2(x))}"


# ---- 9

def below(values, power):
    """Which part of values is below 2^power, and not 0."""
    return sum(part for of, part in values["powers"].items() if int(of) < power)


def lost(values, format_):
    """Which part of values becomes 0: what is below half of the smallest number."""
    return below(values, math.log2(format_.smallest) - 1)


def too_large(values, format_):
    return sum(part for power, part in values["powers"].items() if 2.0 ** int(power) > format_.largest)


def middle(values):
    """The power of two in which the median of what is not zero lies."""
    so_far, half = 0, sum(values["powers"].values()) / 2
    for power in sorted(values["powers"], key=int):
        so_far += values["powers"][power]
        if so_far >= half:
            return int(power)
    return None


def precision_figure(axis, all_):
    for f in all_:
        # The error's envelope, a point for each power of two; a format ends behind its largest number.
        points = [(x, f.worst_error(x)) for x in range(LOW, HIGH + 1)]
        points = [(x, error) for x, error in points if error is not None]
        axis.plot([x for x, _ in points], [math.log2(error) for _, error in points], color=FORMAT_COLORS[f.name],
                  linewidth=2, label=f"{f.name}: {f.exponent} + {f.mantissa} bits")
        if points[-1][0] < HIGH:
            axis.plot(points[-1][0], math.log2(points[-1][1]), marker="|", markersize=14, color=FORMAT_COLORS[f.name])
            axis.annotate(f" largest: {f.largest:,.0f}", (points[-1][0], math.log2(points[-1][1])), (3, -3),
                          fontsize=7.5, textcoords="offset points", color=FORMAT_COLORS[f.name])
    axis.set(xlim=(LOW, HIGH), title="Largest relative error of rounding a number of that size; 1: it may become 0")
    ticks = range(-24, 1, 4)
    axis.set_yticks(ticks, [f"$2^{{{t}}}$" if t else "1" for t in ticks])
    axis.legend(loc="lower left", ncols=5, fontsize=8, bbox_to_anchor=(0, 0.1))


def values_figure(axis, values, all_):
    names = list(values["spread"])
    for y, name in enumerate(names):
        powers = values["spread"][name]["powers"]
        most = max(powers.values())
        for power, part in powers.items():
            axis.bar(int(power) + 0.5, 0.85 * part / most, 1, y - 0.42, color="#76b7b2")
    for f in all_:
        if f.smallest >= 2.0 ** LOW:
            axis.axvline(math.log2(f.smallest), color=FORMAT_COLORS[f.name], linewidth=1, linestyle=":")
            axis.text(math.log2(f.smallest), len(names) - 0.45, f"smallest {f.name}", color=FORMAT_COLORS[f.name],
                      ha="center", va="bottom", fontsize=7.5)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.5, len(names) - 0.1)
    axis.set_title(f"How the values of one step of {values['tokens']:,} tokens are spread", pad=12)
    axis.grid(axis="y", visible=False)


def values_words(values, by_name):
    gradients = values["spread"]["gradients of activations"]
    parts = ", ".join(f"{share(lost(gradients, by_name[name]))} in {name}" for name in ("FP16", "E5M2", "E4M3"))
    typical = middle(values["spread"]["weights"])
    large = max(too_large(kind, by_name["E4M3"]) for kind in values["spread"].values())
    return ("Below: where the values of a real step lie (the first layer's activations, all weights). Gradients of "
            f"activations are the smallest: half of them are below 2^{middle(gradients) + 1}. Stored without a scale, "
            f"these become 0: {parts}. They are gradients of the mean loss over {values['tokens']:,} tokens; a step "
            "of 1,000 times as many makes each 1,000 times, or 10 powers of two, smaller, which is why what trains in "
            "small may not in large. " + ("Nothing is too large for any format." if large == 0 else
                                          f"Of some kind {share(large)} are too large for E4M3.")
            + f" The median of weights lies between 2^{typical} and twice that, where BF16's numbers are "
            f"2^{typical - 7} apart: {share(below(values['spread']['updates of weights'], typical - 8))} of the "
            "updates are less than half of that.")


def formats(results, about):
    all_ = [Format(**f) for f in results["formats"]]
    by_name = {f.name: f for f in all_}
    values = results["values"]
    if values:
        figure, (top, below) = pyplot.subplots(2, 1, figsize=(10.5, 7.2), sharex=True,
                                               gridspec_kw={"height_ratios": [3, 2.4]})
        values_figure(below, values, all_)
    else:
        figure, top = pyplot.subplots(figsize=(10.5, 4.2))
        below = top
    precision_figure(top, all_)
    ticks = range(LOW, HIGH + 1, 5)
    below.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    below.set_xlabel("size of the number")
    bf16, fp16, e5m2 = (by_name[name] for name in ("BF16", "FP16", "E5M2"))
    same = bf16.smallest_normal == by_name["FP32"].smallest_normal
    narrowest = min(all_, key=lambda f: f.normal_powers)
    sees = [("BF16 has FP32's exponent, and so its range" if same else "BF16 does not have FP32's range")
            + f"; FP16 and E5M2 share theirs (normal numbers from {power_text(fp16.smallest_normal)} and "
            f"{power_text(e5m2.smallest_normal)} on, up to {fp16.largest:,.0f} and {e5m2.largest:,.0f}), "
            f"{narrowest.name} has the smallest, {narrowest.normal_powers:.0f} powers of two, up to "
            f"{narrowest.largest:.0f}: as the chapter says. "
            f"BF16 is less precise than FP16: the number after 1 is {bf16.epsilon / fp16.epsilon:.0f} times as far "
            "away. What a format's bits of exponent do not cover becomes 0 or infinity; where they cover it, precision "
            "is the mantissa's alone."]
    sees.append(values_words(values, by_name) if values else
                f"Where the values of a real run lie is left out: {results['why']}.")
    rows = [[f.name, f.bits, f"1 + {f.exponent} + {f.mantissa}", f"{f.largest:.6g}", power_text(f.smallest_normal),
             power_text(f.smallest), power_text(f.epsilon), f"{f.digits:.1f}", f"{f.normal_powers:.0f}",
             f"{f.powers:.0f}", f.largest_exponent]
            for f in all_]
    text = table(["format", "bits", "sign + exponent + mantissa", "largest", "smallest normal", "smallest",
                  "from 1 to the next", "decimal digits", "powers of two, of normal numbers", "of all",
                  "the largest exponent is for"], rows)
    if values:
        text += "<p>What becomes 0 without a scale:</p>" + table(
            ["values", "zero already", "median in", *[f.name for f in all_]],
            [[name, share(kind["zeros"]), f"2^{middle(kind)}", *[share(lost(kind, f)) for f in all_]]
             for name, kind in values["spread"].items()])
    return Section(
        "Number formats", figure, "9_formats.png", sees, text,
        [("Range of formats", "FP32 = BF16, FP16 = E5M2, E4M3 the smallest",
          " / ".join(f"{f.name} {f.normal_powers:.0f}" for f in all_)
          + " powers of two of normal numbers (from their bits)"),
         ("Precision of BF16", "less than FP16's", f"{bf16.digits:.1f} decimal digits, FP16 {fp16.digits:.1f}")],
        "Top: computed from the formats' bits. " + ("Below: measured, in BF16." if values else ""))


# ---- 10

RATE_COLORS = ["#4e79a7", "#f28e2b", "#59a14f"]
KIND_COLORS = {"dynamic": "#4e79a7", "delayed": "#4e79a7", "none": "#e15759", "bf16": "#9c9c9c", "fp32": "#4e79a7"}
LEFT_OUT = {"master": "Weights in BF16 without a master copy", "sums": "Gradients summed in BF16",
            "loss_scaling": "FP16 without loss scaling", "fp8_scaling": "FP8 without scales"}
GROWS = 2       # an error that becomes so many times as large grows; roundings alone make it differ by a few percent


def ended(result, words, than):
    """What the last losses of runs say beside those of others. `words`: such as Without scales."""
    stopped = [said for said in result["stopped"] if said]
    if stopped:
        return f"{words} {len(stopped)} of {len(result['stopped'])} runs did not get to their end (\"{stopped[0]}\")."
    ratio = statistics.median(result["ratios"])
    where = f"{change(abs(ratio - 1)).lstrip('+')} {'above' if ratio > 1 else 'below'}"
    return concluded(result["ratios"],
                     f"{words} the loss ends {where} that {than} (seeds {spread_of(result)}).",
                     f"{words} the loss may end above or below that {than}, which", "seeds", change)


def spread_of(result):
    return f"{change(min(result['ratios']) - 1)} to {change(max(result['ratios']) - 1)}"


def worse(result):
    """Whether runs end worse than those that they are compared with; None: that is not told."""
    if any(result["stopped"]):
        return True
    return statistics.median(result["ratios"]) > 1 if told(result["ratios"]) else None


def ratio_cell(result):
    stopped = sum(said is not None for said in result["stopped"])
    text = spread(result["ratios"], lambda v: f"{v:.4f}") if result["ratios"] else "–"
    return text + (f"; {stopped} stopped" if stopped else "")


def loss_cell(result):
    losses = [loss for loss in result["last"] if loss is not None]
    return f"{statistics.mean(losses):.4f}" if losses else "stopped"


def verdict(outcomes, chapter):
    """Beside the chapter: what seeds tell is said, what they do not is no conclusion."""
    if any(outcomes):
        return f"As the chapter says: {chapter}."
    if any(outcome is False for outcome in outcomes):
        return f"This run does not show what the chapter says ({chapter}): the loss is the better without."
    return f"No conclusion about the loss, then: the chapter says that {chapter}."


def master_figure(share_axis, loss_axis, rates):
    for color, (rate, kinds) in zip(RATE_COLORS, rates.items()):
        share_axis.plot(*zip(*[(step, 100 * part) for step, part in kinds["none"]["unchanged"]]), color=color,
                        linewidth=1.2, label=f"learning rate {rate}")
        for kind, style in (("fp32", "-"), ("none", ":")):
            loss_axis.plot(*zip(*kinds[kind]["losses"]), color=color, linestyle=style, linewidth=1.4)
            starts = kinds[kind]["losses"][0][1]
    loss_axis.set_ylim(None, 1.05 * starts)     # what is above is a spike
    share_axis.set(title="BF16 without a master copy:\nweights that a step leaves as they were, %",
                   ylim=(0, 130), yticks=range(0, 101, 20))     # above all of them is the legend
    share_axis.legend(fontsize=7.5, loc="upper center", labelspacing=0.2)
    loss_axis.legend(handles=[Line2D([], [], color="0.3", linestyle="-", label="with a copy in FP32"),
                              Line2D([], [], color="0.3", linestyle=":", label="without")], fontsize=7.5)


def master_words(rates, copies):
    shares = {rate: statistics.median(part for _, part in kinds["none"]["unchanged"]) for rate, kinds in rates.items()}
    words = ("The chapter: updates too small for 16 bits vanish, which is what an FP32 copy of the weights is for. In "
             "BF16 without one, in the middle of the run's steps, this part of all weights is left as it was by an "
             "update that would have moved it in FP32: "
             + ", ".join(f"{share(part)} at a learning rate of {rate}" for rate, part in shares.items()) + ". "
             + " ".join(ended(kinds["none"], f"At {rate}, without a copy,", "with one")
                        for rate, kinds in rates.items()))
    if copies:
        words += (f" With a copy, too, a step leaves BF16 weights as they were ({share(copies[-1])} of those that the "
                  "copy's moved, in the last step looked at), but what it adds is kept there until it counts.")
    return words + " " + verdict([worse(kinds["none"]) for kinds in rates.values()],
                                 "without an FP32 copy of the weights updates vanish, and training suffers")


def sums_figure(axis, sums):
    counts = [record["micro_batches"] for record in sums]
    axis.plot(counts, [100 * record["error"] for record in sums], color="#e15759", marker="o", markersize=3.5,
              label="summed in BF16")
    axis.plot(counts, [100 * record["rounded_once"] for record in sums], color="#4e79a7", marker="s", markersize=3,
              label="summed in FP32, then rounded")
    axis.plot(counts, [100 * sums[0]["error"] * math.sqrt(count) for count in counts], color="0.6", linewidth=0.8,
              linestyle="--", label="∝ √micro-batches")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(counts, counts, fontsize=7.5)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set(title="Gradients summed in BF16:\nerror against FP32, % of their norm", xlabel="micro-batches")
    axis.legend(fontsize=7.5, loc="upper left")


def sums_words(sums):
    first, last = sums[0], sums[-1]
    times = last["error"] / first["error"]
    words = ("The chapter: gradients are accumulated in FP32, as BF16 is lossy for small values. With the same weights "
             f"and the same micro-batches, gradients that are summed in BF16 are off by {share(first['error'])} of "
             f"their norm after {first['micro_batches']}, which is rounding once, and by {share(last['error'])} after "
             f"{last['micro_batches']}. The FP32 sum, rounded to BF16 at the end, is off by "
             f"{share(last['rounded_once'])}. ")
    if times <= GROWS:
        return words + f"Here the error hardly grows ({number(times)} times), which contradicts the chapter."
    words += f"As the chapter says: each addition rounds the sum, and what is lost grows, here {number(times)} times."
    if times > math.sqrt(last["micro_batches"] / first["micro_batches"]):
        words += (" That is more than the root of their number, as which independent roundings add up: the larger a "
                  "sum, the more of what is added it swallows, as weights do with small updates.")
    return words


def curves(axis, kinds, key, scale=1):
    for name, result in kinds.items():
        if result.get(key):
            axis.plot(*zip(*[(step, scale * value) for step, value in result[key]]), color=KIND_COLORS[name],
                      linewidth=1.4, label=name, linestyle="--" if name == "bf16" else "-")
    if key == "losses":     # what is above is a spike
        axis.set_ylim(None, 1.05 * max(result[key][0][1] for result in kinds.values()))
    axis.legend(fontsize=7.5)


def zeros_of(result):
    return statistics.median(part for _, part in result["zero_gradients"]) if result.get("zero_gradients") else None


def loss_scaling_words(results):
    kinds = results["kinds"]
    none, dynamic = zeros_of(kinds["none"]), zeros_of(kinds["dynamic"])
    words = ("The chapter: gradients too small for FP16 become 0, unless the loss is scaled. ")
    if none is not None and dynamic is not None:
        words += (f"Of a step of {results['tokens']:,} tokens {share(none)} of the gradients are 0 without scaling, "
                  f"{share(dynamic)} with it (the median of the run). ")
        words += ("More become 0 without: as the chapter says. " if none > dynamic else
                  "No more become 0 without: at this size the chapter's loss does not show. ")
    return (words + ended(kinds["none"], "Without scaling", "with it") + " "
            + verdict([worse(kinds["none"])], "FP16 needs loss scaling"))


def last_fp8(result):
    return result["fp8"][-1][1] if result.get("fp8") else {}


def fp8_figure(axis, kinds):
    tensors = list(last_fp8(kinds["none"]))
    for shift, kind in ((-0.2, "none"), (0.2, "delayed")):
        found = last_fp8(kinds[kind])
        for x, tensor in enumerate(tensors):
            parts = found.get(tensor, {"flushed": 0, "saturated": 0})
            axis.bar(x + shift, 100 * parts["flushed"], 0.38, color=KIND_COLORS[kind])
            axis.bar(x + shift, 100 * parts["saturated"], 0.38, 100 * parts["flushed"], color="0.2")
    axis.set_xticks(range(len(tensors)), tensors, rotation=60, fontsize=7.5)
    axis.set(title="FP8: values that become 0, %,\nand that are too large (black)")
    axis.grid(axis="x", visible=False)
    axis.legend(handles=[Patch(color=KIND_COLORS[kind], label="no scales" if kind == "none" else "delayed scales")
                         for kind in ("none", "delayed")], fontsize=7.5)


def fp8_words(results):
    kinds = results["kinds"]
    words = "The chapter: FP8 diverges without care. "
    worst = {}
    for kind in ("none", "delayed"):
        found = last_fp8(kinds[kind])
        if found:
            tensor = max(found, key=lambda name: found[name]["flushed"] + found[name]["saturated"])
            worst[kind] = (tensor, found[tensor]["flushed"], found[tensor]["saturated"])
    if len(worst) == 2:
        words += " ".join(f"{'Without scales' if kind == 'none' else 'With delayed ones'} the most is lost of "
                          f"{tensor}: {share(flushed)} become 0, {share(saturated)} are too large."
                          for kind, (tensor, flushed, saturated) in worst.items()) + " "
    return (words + ended(kinds["none"], "Without scales", "of BF16") + " "
            + ended(kinds["delayed"], "With delayed scales", "of BF16") + " "
            + verdict([worse(kinds["none"])], "matmuls in FP8 need scales"))


def failure_tables(there):
    text = ""
    if "master" in there:
        text += "<p>Weights in BF16, with a master copy and without:</p>" + table(
            ["learning rate", "unchanged, first step", "middle", "last step", "last loss, with", "without",
             "ratio, median of seeds (range)"],
            [[rate, *[share(part) for part in (kinds["none"]["unchanged"][0][1],
                                               statistics.median(p for _, p in kinds["none"]["unchanged"]),
                                               kinds["none"]["unchanged"][-1][1])],
              loss_cell(kinds["fp32"]), loss_cell(kinds["none"]), ratio_cell(kinds["none"])]
             for rate, kinds in there["master"]["rates"].items()])
    if "sums" in there:
        text += "<p>Gradients summed:</p>" + table(
            ["micro-batches", "in BF16, error", "in FP32, then rounded", "ratio"],
            [[r["micro_batches"], share(r["error"]), share(r["rounded_once"]), number(r["error"] / r["rounded_once"])]
             for r in there["sums"]["sums"]])
    if "loss_scaling" in there:
        text += "<p>FP16:</p>" + table(
            ["loss scaling", "gradients that are 0", "last loss", "over dynamic, median of seeds (range)"],
            [[kind, share(zeros_of(r)) if zeros_of(r) is not None else "–", loss_cell(r), ratio_cell(r)]
             for kind, r in there["loss_scaling"]["kinds"].items()])
    if "fp8_scaling" in there:
        kinds = there["fp8_scaling"]["kinds"]
        text += "<p>Matmuls in FP8:</p>" + table(
            ["scales", "last loss", "over BF16, median of seeds (range)"],
            [["BF16" if kind == "bf16" else kind, loss_cell(r), ratio_cell(r)] for kind, r in kinds.items()])
        text += table(["tensor", *[f"{what}, {kind}" for kind in ("none", "delayed")
                                   for what in ("become 0", "too large")]],
                      [[tensor, *[share(last_fp8(kinds[kind]).get(tensor, {}).get(what, 0))
                                  for kind in ("none", "delayed") for what in ("flushed", "saturated")]]
                       for tensor in last_fp8(kinds["none"])])
    return text


def failure_rows(there):
    rows = []

    def loss(result):
        if any(result["stopped"]):
            return "runs stop"
        return f"loss {spread_of(result)}" + ("" if told(result["ratios"]) else ", no conclusion")
    if "master" in there:
        rate, kinds = list(there["master"]["rates"].items())[-1]
        part = statistics.median(p for _, p in kinds["none"]["unchanged"])
        rows.append(("Weights in BF16 without a master copy", "updates too small for 16 bits vanish",
                     f"at a learning rate of {rate} {share(part)} do; {loss(kinds['none'])} (measured)"))
    if "sums" in there:
        last = there["sums"]["sums"][-1]
        rows.append((f"Gradients of {last['micro_batches']} micro-batches summed in BF16", "lossy for small values",
                     f"off by {share(last['error'])} (measured)"))
    if "loss_scaling" in there:
        kinds = there["loss_scaling"]["kinds"]
        zeros = [share(zeros_of(kinds[kind])) for kind in ("none", "dynamic") if zeros_of(kinds[kind]) is not None]
        rows.append(("FP16 without loss scaling", "small gradients become 0",
                     (" of gradients, with scaling ".join(zeros) + "; " if len(zeros) == 2 else "")
                     + f"{loss(kinds['none'])} (measured)"))
    if "fp8_scaling" in there:
        rows.append(("FP8 without scales, beside BF16", "diverges without care",
                     f"{loss(there['fp8_scaling']['kinds']['none'])} (measured)"))
    return rows


def failures_figure(there):
    columns = [name for name in LEFT_OUT if name in there]
    mosaic = [[f"{name} top" for name in columns],
              [f"{name} {'top' if name == 'sums' else 'loss'}" for name in columns]]
    figure, axes = pyplot.subplot_mosaic(mosaic, figsize=(max(4, 3.3 * len(columns)), 6.4))
    if "master" in there:
        master_figure(axes["master top"], axes["master loss"], there["master"]["rates"])
    if "sums" in there:
        sums_figure(axes["sums top"], there["sums"]["sums"])
    if "loss_scaling" in there:
        kinds = there["loss_scaling"]["kinds"]
        curves(axes["loss_scaling top"], kinds, "zero_gradients", 100)
        axes["loss_scaling top"].set(title="FP16: gradients that are 0, %,\nby --loss-scaling", ylim=(0, None))
        curves(axes["loss_scaling loss"], kinds, "losses")
    if "fp8_scaling" in there:
        fp8_figure(axes["fp8_scaling top"], there["fp8_scaling"]["kinds"])
        curves(axes["fp8_scaling loss"], there["fp8_scaling"]["kinds"], "losses")
    for name, axis in axes.items():
        if name.endswith(" loss"):
            axis.set(title="Loss", xlabel="step")
    return figure


def failures(results, about):
    there = {name: part for name, part in results.items() if "why" not in part}
    words = {"master": lambda part: master_words(part["rates"], results["sums"].get("copies")),
             "sums": lambda part: sums_words(part["sums"]),
             "loss_scaling": loss_scaling_words, "fp8_scaling": fp8_words}
    sees = [words[name](there[name]) if name in there else
            f"{title}: left out, because {results[name]['why']}." for name, title in LEFT_OUT.items()]
    caption = ("Measured: small models, the same data and the same seeds with a technique and without; curves are "
               "those of the first seed, dotted without a copy. A small model's loss has a spike now and then; last "
               "losses are medians of a run's last tenth.")
    return Section("What goes wrong without", failures_figure(there) if there else None, "10_failures.png", sees,
                   failure_tables(there), failure_rows(there), caption)


# ---- 11

QUALITY_COLORS = ["#9c9c9c", "#4e79a7", "#f28e2b", "#e15759", "#59a14f", "#b07aa1"]
NANOCHAT = ("That is quality at equal steps. FP8 gains time only, and less than its matmuls do: attention, the norms "
            "and the update are as before, the casts are new, and a loss that is higher must be trained for longer. "
            "The gains that have been published at equal loss (nanochat: about 5 %) are smaller than the speed-up of "
            "the matmuls.")


def band(axis, steps, columns, color, label=None):
    """The mean over seeds and, shaded, from the lowest to the highest."""
    axis.plot(steps, [statistics.mean(column) for column in columns], color=color, linewidth=1.4, label=label)
    axis.fill_between(steps, [min(column) for column in columns], [max(column) for column in columns], color=color,
                      alpha=0.2, linewidth=0)


def quality_figure(runs, reference):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2))
    steps = [step for step, _ in runs[reference][0]["curve"]]
    columns = {name: list(zip(*[[loss for _, loss in run["curve"]] for run in each])) for name, each in runs.items()}
    means = [statistics.mean(column) for column in columns[reference]]
    for color, (name, losses) in zip(QUALITY_COLORS, columns.items()):
        band(left, steps, losses, color, f"{name} ({len(runs[name])} seed{'s' * (len(runs[name]) > 1)})")
        band(right, steps, [[100 * (loss / mean - 1) for loss in each] for each, mean in zip(losses, means)], color)
    left.set(title="Validation loss; shaded: from the lowest to the highest seed", xlabel="step")
    right.set(title=f"% above the mean of {reference}", xlabel="step")
    left.legend(fontsize=8)
    return figure


def fp8_quality(results, about):
    if "why" in results:
        return Section("FP8 over whole runs", None, "11_fp8_quality.png",
                       [f"This part is left out: {results['why']}, which dev/chapter/fp8_quality.py writes."], "")
    runs = {}
    for run in sorted(results["runs"], key=lambda run: run["seed"]):
        runs.setdefault(run["format"], []).append(run)
    reference = results["reference"]
    runs = {name: runs[name] for name in results["formats"] if name in runs}
    whole = {name: each for name, each in runs.items() if not any(run["stopped"] for run in each)}
    final = {run["seed"]: run["final"] for run in runs[reference] if not run["stopped"]}
    said, rows = [], []
    for name, each in runs.items():
        stopped = [run["stopped"] for run in each if run["stopped"]]
        ended_ = [run for run in each if not run["stopped"]]
        ratios = [run["final"] / final[run["seed"]] for run in ended_ if run["seed"] in final]
        losses = [run["final"] for run in ended_]
        rows.append([name, len(each), spread(losses, lambda v: f"{v:.4f}") if losses else "–",
                     f"{statistics.mean(losses):.4f}" if losses else "–",
                     spread(ratios, lambda v: f"{v:.4f}") if ratios else "–", len(stopped)])
        if name == AGAIN and ratios:
            said.append("Chance moves a run, too: BF16 once more, with a step's sums in another order, ends "
                        f"{change(min(ratios) - 1)} to {change(max(ratios) - 1)} from itself, seed by seed.")
        elif name != reference and stopped:
            said.append(f"{name}: {len(stopped)} of {len(each)} runs did not get to their end (\"{stopped[0]}\").")
        elif name != reference and ratios:
            said.append(concluded(ratios, f"{name} ends {change(statistics.median(ratios) - 1)} from {reference}.",
                                  f"{name}: whether it ends elsewhere than {reference}", "seeds", change))
    means = [f"{change(made['over_reference'])} ({name})" for name, made in results["formats"].items()
             if name != reference and made["over_reference"] is not None]
    if means:
        said.append(f"In the mean over seeds: {', '.join(means)}.")
    made = results["about"]
    return Section(
        "FP8 over whole runs", quality_figure(whole, reference) if reference in whole else None, "11_fp8_quality.png",
        [f"Runs of {made['steps']:,} steps of a model with {made['parameters']:,} parameters on {made['device']}, each "
         "format with the same seeds. " + " ".join(said), NANOCHAT],
        table(["format", "seeds", "last validation loss, median (range)", "mean",
               f"over {reference}, seed by seed, median (range)", "stopped"], rows),
        [("Quality of FP8", "diverges without care; large runs have trained in it",
          "; ".join(f"{row[0]} {row[4].split(' ')[0]}" for row in rows if row[0] not in (reference, AGAIN))
          + f" of {reference}'s last loss (measured)")],
        f"Measured by dev/chapter/fp8_quality.py, {made['date']}.")

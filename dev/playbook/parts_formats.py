"""Parts of the report about 16-bit and 8-bit formats: their range, three demonstrations, whole FP8 runs."""
import math
import statistics
from dataclasses import dataclass
from typing import Callable, NamedTuple

from figures import (BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Section, concluded, conclusive,
                     doubling_ticks, effects, entries, entry, html_table, matplotlib, named_ticks, number,
                     panels, share, spread)
from fp8_quality import AGAIN, REFERENCE


class Format(NamedTuple):
    name: str
    exponent: int           # numbers of bits
    mantissa: int
    largest: float
    smallest_normal: float
    smallest: float         # subnormal
    epsilon: float          # distance from 1 to the next number

    @property
    def normal_powers(self):
        """Powers of two from the smallest normal number to the largest. Subnormal numbers are less precise."""
        return math.log2(self.largest / self.smallest_normal)


# IEEE 754; for FP8: Micikevicius et al. 2022, "FP8 formats for deep learning". E4M3 has no infinity.
FORMATS = [Format("FP32", 8, 23, 3.4028234663852886e38, 2**-126, 2**-149, 2**-23),
           Format("BF16", 8, 7, 3.3895313892515355e38, 2**-126, 2**-133, 2**-7),
           Format("FP16", 5, 10, 65504, 2**-14, 2**-24, 2**-10), Format("E4M3", 4, 3, 448, 2**-6, 2**-9, 2**-3),
           Format("E5M2", 5, 2, 57344, 2**-14, 2**-16, 2**-2)]
BY_NAME = {f.name: f for f in FORMATS}


def power_text(x):
    return f"2^{round(math.log2(x))}"


def loss_text(x):
    return f"{x:.4f}"


# ---- number formats

def sums_figure(axis, sums):
    counts = [record["micro_batches"] for record in sums]
    for label, color, line, errors in (
            ("summed in BF16", RED, "o-", [record["error"] for record in sums]),
            ("∝ √micro-batches", GREY, "--", [sums[0]["error"] * math.sqrt(count) for count in counts])):
        axis.plot(counts, [100 * error for error in errors], line, color=color, markersize=3.5, label=label)
    axis.set_yscale("log")
    doubling_ticks(axis, counts, "micro-batches")
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set(title="Gradients summed in BF16: error relative to FP32, % of the norm")
    axis.legend(loc="upper left")


def format_text():
    bf16, fp16, e5m2 = (BY_NAME[name] for name in ("BF16", "FP16", "E5M2"))
    narrowest = min(FORMATS, key=lambda f: f.normal_powers)
    return ("BF16 has FP32's exponent, and so its range. FP16 and E5M2 have the same range: normal numbers start at "
            f"{power_text(fp16.smallest_normal)} and {power_text(e5m2.smallest_normal)} and end at {fp16.largest:,.0f} "
            f"and {e5m2.largest:,.0f}. {narrowest.name} has the smallest range, {narrowest.normal_powers:.0f} powers "
            f"of two, up to {narrowest.largest:.0f}. BF16 is less precise than FP16: the distance from 1 to the next "
            f"number is {bf16.epsilon / fp16.epsilon:.0f} times as large.")


GROWS = 2       # an error grows if it becomes this many times larger; rounding alone changes it by a few percent


def sums_text(sums):
    first, last = sums[0], sums[-1]
    times = last["error"] / first["error"]
    text = ("The chapter: gradients are accumulated in FP32, as BF16 loses small values. With the same weights and "
            f"micro-batches, gradients summed in BF16 have an error of {share(first['error'])} of their norm after "
            f"{first['micro_batches']} micro-batch, from rounding once, and of {share(last['error'])} after "
            f"{last['micro_batches']}. ")
    if times <= GROWS:
        return text + f"The error hardly grows here ({number(times)} times), which contradicts the chapter."
    text += f"This agrees with the chapter: each addition rounds the sum, and the error grows {number(times)} times."
    if times > math.sqrt(last["micro_batches"] / first["micro_batches"]):
        text += (" Independent rounding errors would grow with the square root of the number of micro-batches. This "
                 "error grows faster, because a large sum loses more of each small addend.")
    return text


def formats(results, about):
    texts, figure, rows = [format_text()], None, [
        ("Range of formats", "FP32 = BF16, FP16 = E5M2, E4M3 the smallest",
         " / ".join(f"{f.name} {f.normal_powers:.0f}" for f in FORMATS)
         + " powers of two of normal numbers (from their bits)")]
    if "why" in results:
        texts.append(f"The sums of gradients were skipped: {results['why']}.")
    else:
        sums = results["sums"]
        figure, axis = panels(1, 1, 3.6, 6)
        sums_figure(axis, sums)
        texts.append(sums_text(sums))
        rows.append(("Gradients summed in BF16", "BF16 loses small values",
                     f"error of {share(sums[-1]['error'])} after {sums[-1]['micro_batches']} micro-batches (measured)"))
    return Section(
        "Number formats", texts, figure, "Measured. The dashed line is the growth of independent rounding errors.",
        html_table(["format", "sign + exponent + mantissa", "largest", "smallest normal", "smallest",
                    "from 1 to the next", "powers of two, normal numbers"],
                   [[f.name, f"1 + {f.exponent} + {f.mantissa}", f"{f.largest:.6g}", power_text(f.smallest_normal),
                     power_text(f.smallest), power_text(f.epsilon), f"{f.normal_powers:.0f}"] for f in FORMATS]), rows)


# ---- demonstrations: training without master weights, loss scaling or FP8 scales

RATE_COLORS = [BLUE, ORANGE, GREEN]
KIND_COLORS = {"dynamic": BLUE, "delayed": BLUE, "none": RED, "bf16": GREY, "fp32": BLUE}


def seeds_of(result):
    low, _, high = effects(result["ratios"])
    return f"{low} to {high}"


def ended(result, words, reference):
    """Returns a sentence that compares the last losses of runs with a reference. `words`: such as "Without scales"."""
    stopped = [said for said in result["stopped"] if said]
    if stopped:
        return f"{words}, {len(stopped)} of {len(result['stopped'])} runs stopped early (\"{stopped[0]}\")."
    effect = statistics.median(result["ratios"]) - 1
    where = f"{share(abs(effect))} {'above' if effect > 0 else 'below'} {reference}"
    return concluded(result["ratios"], f"{words}, the last loss is {where} (seeds {seeds_of(result)}).",
                     f"the last loss {words[0].lower()}{words[1:]}", "seeds")


def worse(result):
    """Returns whether runs end with a higher loss than the reference; None if the seeds allow no conclusion."""
    if any(result["stopped"]):
        return True
    return statistics.median(result["ratios"]) > 1 if conclusive(result["ratios"]) else None


def verdict(outcomes, chapter):
    if any(outcomes):
        return f"This agrees with the chapter: {chapter}."
    if any(outcome is False for outcome in outcomes):
        return f"This run does not agree with the chapter ({chapter}): the loss is lower without it."
    return f"This allows no conclusion about the chapter's statement: {chapter}."


def curves(axis, kinds, key, title, scale=1):
    for name, result in kinds.items():
        axis.plot(*zip(*[(step, scale * value) for step, value in result[key][0] or [(0, 0)]]),
                  color=KIND_COLORS[name], linewidth=1.4, label=name, linestyle="--" if name == "bf16" else "-")
    axis.set(title=title, xlabel="step")
    if key == "loss":     # larger losses are spikes
        axis.set_ylim(None, 1.05 * max(result[key][0][0][1] for result in kinds.values()))
    axis.legend(fontsize=7.5)


def median_of(result, key):
    """Returns the median of the fractions that the first seed's run logged, or None if it logged none."""
    values = [value for _, value in result.get(key, [[]])[0]]
    return statistics.median(values) if values else None


def master_figure(share_axis, loss_axis, part):
    for color, (rate, kinds) in zip(RATE_COLORS, part["rates"].items()):
        share_axis.plot(*zip(*[(step, 100 * value) for step, value in kinds["none"]["unchanged"][0]]), color=color,
                        linewidth=1.2, label=f"learning rate {rate}")
        for kind, style in (("fp32", "-"), ("none", ":")):
            loss_axis.plot(*zip(*kinds[kind]["loss"][0]), color=color, linestyle=style, linewidth=1.4)
    loss_axis.set_ylim(None, 1.05 * kinds["fp32"]["loss"][0][0][1])     # larger losses are spikes
    loss_axis.set(title="Loss", xlabel="step")
    share_axis.set(title="BF16 without master weights:\nupdates lost to rounding, %",
                   ylim=(0, 130), yticks=range(0, 101, 20))     # space for the legend above 100 %
    share_axis.legend(fontsize=7.5, loc="upper center", labelspacing=0.2)
    loss_axis.legend(handles=[entry("FP32 master weights", "0.3", "-"), entry("none", "0.3", ":")], fontsize=7.5)


def master_text(part):
    return ("In BF16 without master weights, rounding cancels this fraction of the updates that FP32 would apply "
            "(median over the run): "
            + ", ".join(f"{share(median_of(kinds['none'], 'unchanged'))} at a learning rate of {rate}"
                        for rate, kinds in part["rates"].items()) + ".")


def scaling_figure(zeros_axis, loss_axis, part):
    curves(zeros_axis, part["kinds"], "zero_gradients", "FP16: gradients equal to 0, %,\nby --loss-scaling", 100)
    zeros_axis.set_ylim(0, None)
    curves(loss_axis, part["kinds"], "loss", "Loss")


def scaling_text(part):
    none, dynamic = (median_of(part["kinds"][kind], "zero_gradients") for kind in ("none", "dynamic"))
    if none is None or dynamic is None:
        return "No step counted zero gradients."
    return (f"In a step of {part['tokens']:,} tokens, {share(none)} of the gradients are 0 without scaling and "
            f"{share(dynamic)} with it (median of the run). "
            + ("This agrees with the chapter." if none > dynamic else
               "At this size scaling does not reduce the number of zeros."))


def last_fp8(kinds, kind):
    """Returns the fractions of underflow and saturation in the last step, by tensor, over all layers."""
    logged = kinds[kind]["fp8"][0]
    return logged[-1][1] if logged else {}


def fp8_figure(axis, loss_axis, part):
    tensors = list(last_fp8(part["kinds"], "none"))
    for shift, kind in ((-0.2, "none"), (0.2, "delayed")):
        found = last_fp8(part["kinds"], kind)
        for x, parts in ((x, found[tensor]) for x, tensor in enumerate(tensors) if tensor in found):
            axis.bar(x + shift, 100 * parts["flushed"], 0.38, color=KIND_COLORS[kind])
            axis.bar(x + shift, 100 * parts["saturated"], 0.38, 100 * parts["flushed"], color="0.2")
    named_ticks(axis, tensors, rotation=60, fontsize=7.5)
    axis.set(title="FP8: underflow, % of values,\nand saturation (black)")
    axis.legend(handles=entries({"no scales": KIND_COLORS["none"], "delayed scales": KIND_COLORS["delayed"]}))
    curves(loss_axis, part["kinds"], "loss", "Loss")


def fp8_text(part):
    kinds, said = part["kinds"], []
    for kind, words in (("none", "Without scales"), ("delayed", "With delayed scales")):
        found = last_fp8(kinds, kind)
        if found:
            tensor = max(found, key=lambda name: found[name]["flushed"] + found[name]["saturated"])
            said.append(f"{words}, {tensor} is affected most: {share(found[tensor]['flushed'])} of its values "
                        f"underflow, {share(found[tensor]['saturated'])} saturate.")
    return " ".join([*said, ended(kinds["delayed"], "With delayed scales", "BF16's")])


@dataclass(frozen=True)
class Demonstration:
    title: str
    chapter: str            # the effect that the chapter describes
    statement: str          # the chapter's conclusion
    words: tuple            # names of the runs without the technique and of the reference runs, for sentences
    figure: Callable        # (axis, axis, part)
    text: Callable          # returns a sentence about measurements other than losses


DEMONSTRATIONS = {
    "master": Demonstration("BF16 without master weights", "updates too small for 16 bits are lost",
                            "without FP32 master weights small updates are lost, and training suffers",
                            ("At {} without master weights", "that with them"), master_figure, master_text),
    "loss_scaling": Demonstration("FP16 without loss scaling", "small gradients underflow to 0",
                                  "FP16 needs loss scaling", ("Without scaling", "that with it"), scaling_figure,
                                  scaling_text),
    "fp8_scaling": Demonstration("FP8 without scales", "training can diverge",
                                 "matmuls in FP8 need scales", ("Without scales", "BF16's"), fp8_figure, fp8_text)}


def groups(part):
    """{learning rate: results by kind}"""
    return part["rates"] if "rates" in part else {"": part["kinds"]}


def demonstration_text(demo, part):
    compared = [ended(kinds["none"], demo.words[0].format(rate), demo.words[1])
                for rate, kinds in groups(part).items()]
    return " ".join([f"The chapter: {demo.chapter}.", demo.text(part), *compared,
                     verdict([worse(kinds["none"]) for kinds in groups(part).values()], demo.statement)])


def summary_row(demo, part):
    rate, kinds = list(groups(part).items())[-1]
    none, dynamic = (median_of(kinds.get(kind, {}), "zero_gradients") for kind in ("none", "dynamic"))
    measured = (f"at a learning rate of {rate} {share(median_of(kinds['none'], 'unchanged'))} do; " if rate else
                f"{share(none)} of gradients, with scaling {share(dynamic)}; " if none is not None else "")
    loss = ("runs stop" if any(kinds["none"]["stopped"]) else f"loss {seeds_of(kinds['none'])}"
            + ("" if conclusive(kinds["none"]["ratios"]) else ", no conclusion"))
    return demo.title, demo.chapter, f"{measured}{loss} (measured)"


RESULT_HEAD = [", mean of seeds", "relative to the first row, median of seeds (range)", "runs stopped"]


def result_row(name, result):
    losses = [loss for loss in result["last"] if loss is not None]
    return [name, loss_text(statistics.mean(losses)) if losses else "–", spread(result["ratios"], loss_text),
            sum(said is not None for said in result["stopped"])]


def failures(results, about):
    there = {demo: results[name] for name, demo in DEMONSTRATIONS.items() if "why" not in results[name]}
    figure = None
    if there:
        figure, axes = panels(2, len(there), 6.4, 3.5 * len(there), squeeze=False)
        for column, (demo, part) in enumerate(there.items()):
            demo.figure(*axes[:, column], part)
    texts = [f"{demo.title}. " + (f"Skipped: {results[name]['why']}." if demo not in there else
                                  demonstration_text(demo, results[name])) for name, demo in DEMONSTRATIONS.items()]
    rows = [result_row(f"{demo.title}: {rate} {kind}".replace(":  ", ": "), result) for demo, part in there.items()
            for rate, kinds in groups(part).items() for kind, result in kinds.items()]
    return Section("Training without master weights or scaling", texts, figure,
                   "Measured on small models with the same data and seeds. Curves show the first seed; dotted: without "
                   "master weights. A last loss is the median of the last tenth of a run.",
                   html_table(["", f"last loss{RESULT_HEAD[0]}", *RESULT_HEAD[1:]], rows) if rows else "",
                   [summary_row(demo, part) for demo, part in there.items()])


# ---- whole runs in FP8

QUALITY_COLORS = [GREY, BLUE, ORANGE, RED, GREEN, PURPLE]
NANOCHAT = ("This compares quality after the same number of steps. FP8 saves time, but a step gains less than its "
            "matmuls: attention, LayerNorm and the update take the same time, quantisation is added, and a higher "
            "loss needs longer training. The published gains at equal loss (nanochat: about 5 %) are smaller than the "
            "speed-up of the matmuls.")


def quality_figure(whole):
    """Draws each format's validation loss: the mean of the seeds, with their range shaded."""
    figure, axes = panels(1, 2, 4.2)
    losses = {name: [[loss for _, loss in curve] for curve in result["val_loss"]] for name, result in whole.items()}
    reference = [statistics.mean(column) for column in zip(*losses[REFERENCE])]
    steps = [step for step, _ in whole[REFERENCE]["val_loss"][0]]
    for color, (name, each) in zip(QUALITY_COLORS, losses.items()):
        columns = list(zip(*each))
        relative = [[100 * (loss / mean - 1) for loss in column] for column, mean in zip(columns, reference)]
        for axis, shown in zip(axes, (columns, relative)):
            axis.plot(steps, [statistics.mean(column) for column in shown], color=color, linewidth=1.4, label=name)
            axis.fill_between(steps, [min(column) for column in shown], [max(column) for column in shown], color=color,
                              alpha=0.2, linewidth=0)
    axes[0].set(title="Validation loss; shaded: range of the seeds", xlabel="step")
    axes[1].set(title=f"% above the mean of {REFERENCE}", xlabel="step")
    axes[0].legend()
    return figure


def fp8_quality(results, about):
    kinds, made = results["kinds"], results["about"]
    whole = {name: result for name, result in kinds.items() if not any(result["stopped"])}
    texts = [f"Runs of {results['options']['steps']:,} steps of a model with {made['parameters']:,} parameters on "
             f"{made['device']}, the same seeds for each format."]
    if AGAIN in whole:
        texts.append("BF16 with a step's sums in another order shows the effect of rounding alone: its last losses are "
                     f"{seeds_of(kinds[AGAIN])} from {REFERENCE}'s, seed by seed.")
    formats_ = {name: result for name, result in kinds.items() if name not in (REFERENCE, AGAIN)}
    texts += [ended(result, f"With {name}", f"{REFERENCE}'s") for name, result in formats_.items()]
    return Section(
        "FP8 over whole runs", [" ".join(texts), NANOCHAT], quality_figure(whole),
        f"Measured by dev/playbook/fp8_quality.py, {made['date']}.",
        html_table(["format", f"last validation loss{RESULT_HEAD[0]}", *RESULT_HEAD[1:]],
                   [result_row(name, result) for name, result in kinds.items()]),
        [("Quality of FP8", "can diverge; large runs have used it successfully",
          "; ".join(f"{name} {spread(result['ratios'], loss_text).split(' ')[0]}" for name, result in formats_.items())
          + f" of {REFERENCE}'s last loss (measured)")])

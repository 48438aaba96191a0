"""Parts of the report about 16-bit and 8-bit formats: their range, three demonstrations, whole FP8 runs."""
import math
import statistics
from typing import NamedTuple

from figures import (BLUE, GREEN, GREY, NOT_JUDGED, ORANGE, RED, Claim, Section, html_table, joined, judged, more, panels,
                     ratio_claim, share, spread)
from measure import AGAIN, REFERENCE


class Format(NamedTuple):
    """An IEEE 754 format. For FP8: Micikevicius et al. 2022, "FP8 formats for deep learning"; E4M3 has no infinity."""
    name: str
    exponent: int           # numbers of bits
    mantissa: int
    largest: float

    @property
    def epsilon(self):
        """The distance from 1 to the next number."""
        return 2**-self.mantissa

    @property
    def smallest_normal(self):
        return 2.0**(2 - 2**(self.exponent - 1))

    @property
    def normal_powers(self):
        """Powers of two from the smallest normal number to the largest. Subnormal numbers are less precise."""
        return round(math.log2(self.largest / self.smallest_normal))


FORMATS = [Format("FP32", 8, 23, 3.4028234663852886e38), Format("BF16", 8, 7, 3.3895313892515355e38),
           Format("FP16", 5, 10, 65504), Format("E4M3", 4, 3, 448), Format("E5M2", 5, 2, 57344)]
GROWS = 2           # an error grows if it becomes this many times larger; rounding alone changes it by a few percent
LIKE_BF16 = 1.02    # a last loss up to this many times that of BF16 is as good


# ---- number formats

def power_text(x):
    return f"2^{round(math.log2(x))}"


def formats(results, about):
    powers = {f.name: f.normal_powers for f in FORMATS}
    epsilon = {f.name: f.epsilon for f in FORMATS}
    claims = [Claim("Range of normal numbers: " + " / ".join(powers), "FP32 = BF16, FP16 = E5M2, E4M3 the smallest",
                    joined(powers.values(), str) + " powers of two (from their bits)",
                    judged(powers["FP32"] == powers["BF16"] and powers["FP16"] == powers["E5M2"]
                           and min(powers, key=powers.get) == "E4M3")),
              Claim("Distance from 1 to the next number, BF16 relative to FP16", "BF16 is less precise",
                    f"{epsilon['BF16'] / epsilon['FP16']:.0f} times (from their bits)",
                    judged(epsilon["BF16"] > epsilon["FP16"]))]
    if "why" in results:
        texts = [f"The sums of gradients were skipped: {results['why']}."]
    else:
        first, last = results["sums"][0], results["sums"][-1]
        claims.append(Claim(
            f"Error of gradients summed in BF16, {first['micro_batches']} / {last['micro_batches']} micro-batches",
            "grows: BF16 loses small values", joined([first["error"], last["error"]], share)
            + " of the FP32 sum's norm (measured)", judged(last["error"] > GROWS * first["error"])))
        texts = ["The weights and micro-batches are the same. One micro-batch is rounded once; each addition rounds again. "
                 "Independent rounding errors would grow with the square root of the number of micro-batches. An error that "
                 "grows faster means that a large sum loses more of each small addend."]
    return Section(
        "Number formats", claims, texts, tables=html_table(["format", "sign + exponent + mantissa", "largest", "smallest normal", "smallest",
                    "from 1 to the next", "powers of two, normal numbers"],
                   [[f.name, f"1 + {f.exponent} + {f.mantissa}", f"{f.largest:.6g}", power_text(f.smallest_normal),
                     power_text(f.smallest_normal * f.epsilon), power_text(f.epsilon), f.normal_powers] for f in FORMATS])
        + html_table(["micro-batches summed in BF16", "error, of the FP32 sum's norm"],
                     [[record["micro_batches"], share(record["error"])] for record in results.get("sums", [])]))


# ---- demonstrations: training without master weights, loss scaling or FP8 scales

RATE_COLORS = [BLUE, ORANGE, GREEN]     # of the learning rates
STYLES = {"none": ":", "bf16": "--"}    # of the lines of runs that differ in an option


def loss_claim(what, chapter, result, holds=more):
    """Returns a claim about last losses relative to the reference's. A run that stopped counts as a higher loss."""
    stopped = [said for said in result["stopped"] if said]
    if stopped:
        return Claim(what, chapter, f"{len(stopped)} of {len(result['stopped'])} runs stopped (\"{stopped[0]}\")",
                     judged(holds(math.inf)))
    return ratio_claim(what, chapter, result["ratios"], holds, "seeds")


def as_good_claim(what, chapter, result):
    """Returns a claim that all runs end with about BF16's loss, or a lower one."""
    claim = loss_claim(what, chapter, result)
    return claim._replace(verdict=judged(not any(result["stopped"]) and max(result["ratios"]) <= LIKE_BF16))


def median_of(result, key):
    """Returns the median of the fractions that the first seed's run logged."""
    return statistics.median([value for _, value in result[key][0]] or [0])


def curves(axis, labelled, key, title):
    """Draws the first seed's losses, {label: (result, colour, line style)}."""
    for label, (result, color, line) in labelled.items():
        axis.plot(*zip(*result[key][0]), color=color, linewidth=1.4, label=label, linestyle=line)
    highest = max(result[key][0][0][1] for result, *_ in labelled.values())     # larger losses are spikes
    axis.set(title=title, xlabel="step", ylim=(None, 1.05 * highest))
    axis.legend()


def master_claims(part):
    lost = [median_of(kinds["none"], "unchanged") for kinds in part["rates"].values()]
    return [Claim("Updates lost to rounding in BF16 without master weights, learning rate "
                  + joined(part["rates"], str), "small updates vanish", joined(lost, share) + " (measured)",
                  judged(lost == sorted(lost) and lost[-1] > 0)),     # rates decrease
            *[loss_claim(f"Last loss in BF16 without master weights, learning rate {rate}, relative to with them",
                         "higher", kinds["none"]) for rate, kinds in part["rates"].items()]]


def scaling_claims(part):
    none, dynamic = (median_of(part["kinds"][kind], "zero_gradients") for kind in ("none", "dynamic"))
    return [Claim("Gradients that are 0 in FP16, without / with loss scaling", "small gradients underflow to 0",
                  f"{share(none)} / {share(dynamic)} (measured)", judged(none > dynamic)),
            loss_claim("Last loss in FP16 without loss scaling, relative to with it", "higher", part["kinds"]["none"])]


def last_fp8(part, kind):
    """Returns the fractions of underflow and saturation in the last step, by tensor, over all layers."""
    logged = part["kinds"][kind]["fp8"][0]
    return logged[-1][1] if logged else {}


def fp8_claims(part):
    worst = {kind: max([sum(parts.values()) for parts in last_fp8(part, kind).values()], default=0)
             for kind in ("none", "delayed")}
    return [Claim("Values that underflow or saturate in FP8 in the most affected tensor, without / with scales",
                  "FP8 needs scaling", joined(worst.values(), share) + " (measured)",
                  judged(worst["none"] > worst["delayed"])),
            loss_claim("Last loss in FP8 without scales, relative to BF16", "higher, can diverge", part["kinds"]["none"]),
            as_good_claim("Last loss in FP8 with delayed scales, relative to BF16", "about the same",
                          part["kinds"]["delayed"])]


# {part: (title, what the runs differ in, its function of claims)}
DEMONSTRATIONS = {"master": ("BF16 without master weights", "--master-weights", master_claims),
                  "loss_scaling": ("FP16 without loss scaling", "--loss-scaling", scaling_claims),
                  "fp8_scaling": ("FP8 without scales", "--fp8-scaling", fp8_claims)}
LOSS_HEAD = ["", "last loss, mean of seeds", "relative to the reference, median of seeds (range)", "runs stopped"]


def result_row(name, result):
    losses = [loss for loss in result["last"] if loss is not None]
    return [name, f"{statistics.mean(losses):.4f}" if losses else NOT_JUDGED,
            spread(result["ratios"], "{:.4f}".format), sum(said is not None for said in result["stopped"])]


def failures(results, about):
    there = {title: (results[name].get("rates") or {"": results[name]["kinds"]}, option, claims(results[name]))
             for name, (title, option, claims) in DEMONSTRATIONS.items() if "why" not in results[name]}
    figure, rows = None, []
    if there:
        figure, axes = panels(1, len(there), 3.9, 3.5 * len(there), squeeze=False)
        for axis, (title, (groups, option, _)) in zip(axes[0], there.items()):
            named = {f"{rate} {kind}".strip(): (result, color, STYLES.get(kind, "-"))
                     for color, (rate, kinds) in zip(RATE_COLORS, groups.items()) for kind, result in kinds.items()}
            curves(axis, named, "loss", f"{title.split()[0]}: loss by\n{option}")
            rows += [result_row(f"{title}: {label}", result) for label, (result, *_) in named.items()]
    return Section("Training without master weights or scaling",
                   [claim for *_, claims in there.values() for claim in claims],
                   ["Three techniques make 16 bits train: an FP32 copy of the weights, loss scaling and accumulation in "
                    "FP32. Each demonstration leaves one out; the runs have the same data and seeds. The mean loss over "
                    "more tokens has smaller gradients, so loss scaling and FP8 are tested with many tokens per step.",
                    *[f"{title} was skipped: {results[name]['why']}." for name, (title, *_) in DEMONSTRATIONS.items()
                      if title not in there]], figure,
                   "Measured on small models. Curves show the first seed. A last loss is the median of the last tenth of "
                   "a run.", html_table(LOSS_HEAD, rows) if rows else "")


# ---- whole runs in FP8

def fp8_quality(results, about):
    kinds, made = results["kinds"], results["about"]
    figure, axis = panels(1, 1, 4.2)
    curves(axis, {name: (result, color, "-") for color, (name, result) in zip((GREY, BLUE, ORANGE, RED, GREEN),
                                                                              kinds.items())}, "val_loss", "Validation loss")
    claims = [as_good_claim(f"Last loss with {name}, relative to {REFERENCE}",
                            "can diverge; about the same in large runs", result)
              for name, result in kinds.items() if name not in (REFERENCE, AGAIN)]
    if AGAIN in kinds:
        claims.append(loss_claim("The effect of rounding alone: BF16 with its sums in another order", NOT_JUDGED,
                                 kinds[AGAIN])._replace(verdict=NOT_JUDGED))
    return Section(
        "FP8 over whole runs", claims,
        [f"Runs of {results['options']['steps']:,} steps of a model with {made['parameters']:,} parameters on "
         f"{made['device']}, the same seeds for each format. This compares quality after the same number of steps. FP8 "
         "saves time, but a step gains less than its matmuls: attention, LayerNorm and the update take the same time, "
         "quantisation is added, and a higher loss needs longer training. The published gains at equal loss (nanochat: "
         "about 5 %) are smaller than the speed-up of the matmuls."],
        figure, f"Measured with --whole-runs, {made['date']}. Curves show the first seed.",
        html_table(LOSS_HEAD, [result_row(name, result) for name, result in kinds.items()]))

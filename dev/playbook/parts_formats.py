"""Parts of the report about 16-bit and 8-bit formats: their range, three demonstrations, whole FP8 runs."""
import math
import statistics

from figures import (BLUE, GREEN, NOT_JUDGED, ORANGE, Claim, Section, html_table, joined, judged, panels,
                     ratio_claim, share, spread)
from measure import AGAIN, REFERENCE

# Bits of exponent and mantissa, largest number. IEEE 754; for FP8: Micikevicius et al. 2022, "FP8 formats for deep
# learning". E4M3 has no infinity.
FORMATS = {"FP32": (8, 23, 3.4028234663852886e38), "BF16": (8, 7, 3.3895313892515355e38), "FP16": (5, 10, 65504),
           "E4M3": (4, 3, 448), "E5M2": (5, 2, 57344)}
GROWS = 2           # an error grows if it becomes this many times larger; rounding alone changes it by a few percent
LIKE_BF16 = 1.02    # a last loss up to this many times that of BF16 is as good


# ---- number formats

def formats(results, about):
    def power(x):
        return f"2^{round(math.log2(x))}"
    rows, powers = [], {}
    for name, (exponent, mantissa, largest) in FORMATS.items():
        normal, epsilon = 2.0**(2 - 2**(exponent - 1)), 2.0**-mantissa
        powers[name] = round(math.log2(largest / normal))   # of normal numbers: subnormal ones are less precise
        rows.append([name, f"1 + {exponent} + {mantissa}", f"{largest:.6g}", power(normal), power(normal * epsilon),
                     power(epsilon), powers[name]])
    precision = 2**(FORMATS["FP16"][1] - FORMATS["BF16"][1])
    claims = [Claim("Range of normal numbers: " + " / ".join(powers), "FP32 = BF16, FP16 = E5M2, E4M3 the smallest",
                    joined(powers.values(), str) + " powers of two (from their bits)",
                    judged(powers["FP32"] == powers["BF16"] and powers["FP16"] == powers["E5M2"]
                           and min(powers, key=powers.get) == "E4M3")),
              Claim("Distance from 1 to the next number, BF16 relative to FP16", "BF16 is less precise",
                    f"{precision} times (from their bits)", judged(precision > 1))]
    texts = [f"The sums of gradients were skipped: {results['why']}." if "why" in results else
             "The sums in BF16 and FP32 have the same weights and micro-batches. Each addition rounds. Independent "
             "rounding errors would grow with the square root of the number of micro-batches; if the error grows "
             "faster, a large sum loses more of each small addend."]
    sums = results.get("sums", [])
    if sums:
        first, last = sums[0], sums[-1]
        claims.append(Claim(
            f"Error of gradients summed in BF16, {first['micro_batches']} / {last['micro_batches']} micro-batches",
            "grows: BF16 loses small values", joined([first["error"], last["error"]], share)
            + " of the FP32 sum's norm (measured)", judged(last["error"] > GROWS * first["error"])))
    return Section(
        "Number formats", claims, texts,
        tables=html_table(["format", "sign + exponent + mantissa", "largest", "smallest normal", "smallest",
                           "from 1 to the next", "powers of two, normal numbers"], rows)
        + html_table(["micro-batches summed in BF16", "error, of the FP32 sum's norm"],
                     [[record["micro_batches"], share(record["error"])] for record in sums]))


# ---- demonstrations: training without master weights, loss scaling or FP8 scales

RATE_COLORS = [BLUE, ORANGE, GREEN]     # of the learning rates
STYLES = {"none": ":", "bf16": "--"}    # of the lines of runs that differ in an option


def loss_claim(what, chapter, result):
    """Returns a claim about last losses relative to the reference's; `chapter` begins with "higher" or "as low", up to
    LIKE_BF16. A run that stopped counts as a higher loss."""
    stopped, higher = [said for said in result["stopped"] if said], chapter.startswith("higher")
    claim = ratio_claim(what, chapter, result["ratios"], "seeds")
    if stopped:
        return claim._replace(here=f"{len(stopped)} of {len(result['stopped'])} runs stopped (\"{stopped[0]}\")",
                              verdict=judged(higher))
    return claim if higher else claim._replace(verdict=judged(max(result["ratios"]) <= LIKE_BF16))


def median_of(result, key):
    """Returns the median of the fractions that the first seed's run logged."""
    return statistics.median([value for _, value in result[key][0]] or [0])


def loss_curves(axis, labelled, title):
    """Draws the first seed's losses, {label: (result, colour, line style)}."""
    for label, (result, color, line) in labelled.items():
        axis.plot(*zip(*result["loss"][0]), color=color, linewidth=1.4, label=label, linestyle=line)
    highest = max(result["loss"][0][0][1] for result, *_ in labelled.values())     # larger losses are spikes
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
            loss_claim("Last loss in FP8 without scales, relative to BF16", "higher, can diverge",
                       part["kinds"]["none"]),
            loss_claim("Last loss in FP8 with delayed scales, relative to BF16", "as low",
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
            loss_curves(axis, named, f"{title.split()[0]}: loss by\n{option}")
            rows += [result_row(f"{title}: {label}", result) for label, (result, *_) in named.items()]
    return Section("Training without master weights or scaling",
                   [claim for *_, claims in there.values() for claim in claims],
                   ["Each demonstration leaves out one technique; the runs have the same data and seeds. The mean loss "
                    "over more tokens has smaller gradients, so loss scaling and FP8 are tested with many tokens per "
                    "step.",
                    *[f"{title} was skipped: {results[name]['why']}." for name, (title, *_) in DEMONSTRATIONS.items()
                      if title not in there]], figure,
                   "Measured on small models. Curves: the first seed. A last loss is the median of a run's last tenth.",
                   html_table(LOSS_HEAD, rows) if rows else "")


# ---- whole runs in FP8

def fp8_quality(results, about):
    kinds, made = results["kinds"], results["about"]
    claims = [loss_claim(f"Last loss with {name}, relative to {REFERENCE}", "as low in large runs, can diverge", result)
              for name, result in kinds.items() if name not in (REFERENCE, AGAIN)]
    if AGAIN in kinds:
        claims.append(loss_claim("The effect of rounding alone: BF16 with its sums in another order", NOT_JUDGED,
                                 kinds[AGAIN])._replace(verdict=NOT_JUDGED))
    return Section(
        "FP8 over whole runs", claims,
        [f"Runs of {results['options']['steps']:,} steps of a model with {made['parameters']:,} parameters on "
         f"{made['device']} ({made['date']}), the same seeds for each format. FP8 saves time, but a step "
         "gains less than its matmuls: attention, LayerNorm and the update take the same time, quantisation is added, "
         "and a higher loss needs longer training. The published gains at equal loss are smaller (nanochat: 5 %)."],
        tables=html_table(LOSS_HEAD, [result_row(name, result) for name, result in kinds.items()]))

"""Part of the report about batch size: batch_size() takes the result of measure.py's function and returns a Section."""
import math
import statistics

from figures import (UNCLEAR, Claim, Section, doubling_ticks, entry, html_table, joined, judged, legend_below,
                     matplotlib, number, panels, percent, ratio_claim, spread, whiskers)
from measure import EVALUATIONS

CLOSE = 0.01        # batches whose loss is at most this far above the best (relative) count as equally good
BROAD = 4           # the optimum is broad if the largest of them is this many times the smallest
FACTOR = 2          # the noise scale agrees with the critical batch if they differ by at most this factor
PROXY = ("The critical batch is the largest within 1 % of the lowest loss. The noise scale predicts it for SGD with a "
         "well-conditioned Hessian; AdamW divides each gradient by its magnitude. The noise scale also grows during "
         "training, while a constant batch must suit all of it. Merrill et al. (arXiv 2505.23971) instead branch a "
         "run, continue it with several batches, and take the largest that still reaches the same loss.")


# ---- runs: {"last": [loss by seed], "val_loss", "tokens", "ms", "noise_scale": [[[step, value], ...] by seed]}

def last_loss(curves):
    return curves["val_loss"][-1][1]


def seconds(curves):
    """Returns the time of a run's steps: its tokens times the median time of a token, as other load affects the sum."""
    tokens = [0, *(value for _, value in curves["tokens"])]
    each = [ms / (b - a) for (_, ms), a, b in zip(curves["ms"], tokens, tokens[1:])]
    return statistics.median(each) * tokens[-1] / 1000


def finished(run, of=dict):
    """Returns {seed: of({key: curve})} of the seeds that did not stop."""
    return {seed: of({key: run[key][seed] for key in ("val_loss", "tokens", "ms", "noise_scale")})
            for seed, last in enumerate(run["last"]) if last is not None}


def mean_loss(run):
    return statistics.mean([*finished(run, last_loss).values()] or [math.inf])


def ratios(a, b, of=last_loss):
    """Returns run a's value over run b's, seed by seed."""
    a, b = finished(a, of), finished(b, of)
    return [a[seed] / b[seed] for seed in a if seed in b]


def noise_scale(run, begin, end):
    """Returns the median estimate between two fractions of the tokens, over all seeds; None if it is not positive."""
    values = []
    for curves in finished(run).values():
        tokens = dict(curves["tokens"])
        values += [value for step, value in curves["noise_scale"] if begin < tokens[step] / max(tokens.values()) <= end]
    return max(0, statistics.median(values or [0])) or None


def batch_figure(results):
    batches = results["batches"]
    figure, (by_tokens, by_batch) = panels(1, 2, 4.6)
    colors = {str(batch): matplotlib.colormaps["viridis"](i / len(batches)) for i, batch in enumerate(batches)}
    colors["ramp"] = "black"
    for name, run in results["runs"].items():
        x, line, marker = (1.25 * results["ramp"]["to"], "--", "D") if name == "ramp" else (int(name), "-", "o")
        for curves in [*finished(run).values()][:1]:
            tokens = dict(curves["tokens"])
            by_tokens.plot(*zip(*[(tokens[step] / 1000, loss) for step, loss in curves["val_loss"]]), marker=".",
                           color=colors[name], linestyle=line, linewidth=1.4)
            by_batch.plot(x, mean_loss(run), marker, color=colors[name])
            whiskers(by_batch, x, mean_loss(run), finished(run, last_loss).values())
    doubling_ticks(by_batch, batches, "batch, tokens")
    highest = max(run["val_loss"][0][0][1] for run in results["runs"].values())   # larger losses are spikes
    by_tokens.set(title="Validation loss", xlabel="thousands of tokens", ylim=(None, 1.05 * highest))
    by_batch.set(title="Last validation loss")
    legend_below(figure, [entry(name, color, "--" if name == "ramp" else "-") for name, color in colors.items()])
    return figure


# ---- claims

def optimum_claims(batches, losses, close, noise):
    """Returns the claims about the width of the optimum and about the noise scale as a predictor of the critical
    batch. Both allow no conclusion if the optimum may lie beyond the measured batches."""
    best, critical = min(losses, key=losses.get), close[-1]
    width = (judged(True) if critical >= BROAD * close[0] else
             UNCLEAR if best in (batches[0], batches[-1]) else judged(False))
    claims = [Claim(f"Batches within {percent(CLOSE)} of the lowest loss", "broad; large models: 4 to 60 M tokens",
                    (f"{close[0]:,} to {critical:,}" if close[0] < critical else f"{critical:,}")
                    + f" tokens, the best {best:,} (measured)", width)]
    if noise:
        times = noise / critical
        beyond = critical == batches[-1] and times > FACTOR or critical == batches[0] and times < 1 / FACTOR
        claims.append(Claim("Noise scale in the last quarter, relative to the critical batch", "about 1 (OpenAI)",
                            f"{number(times)} = {number(noise)} / {critical:,} tokens (measured)",
                            UNCLEAR if beyond else judged(1 / FACTOR <= times <= FACTOR)))
    return claims


def noise_claim(scales, smallest):
    what = f"Noise in the gradient of {smallest:,} tokens, first eighth / last quarter of training"
    chapter = "small batches keep gradients noisy"
    if None in scales:
        return Claim(what, chapter, "not known, as estimates are not positive", UNCLEAR)
    early, late = (scale / (scale + smallest) for scale in scales)
    return Claim(what, chapter, f"{joined([early, late], percent)} of its squared norm (measured)", judged(late > 0.5))


def batch_size(results, about):
    runs, batches, ramp = results["runs"], results["batches"], results["ramp"]
    losses = {batch: mean_loss(runs[str(batch)]) for batch in batches}
    best, low, high = min(losses, key=losses.get), batches[0], batches[-1]
    rival = min(batches[:-1], key=losses.get)
    close = [batch for batch in batches if losses[batch] <= (1 + CLOSE) * losses[best]]
    measured = [batch for batch in batches if any(runs[str(batch)]["noise_scale"])] or [best]
    source = best if best in measured else measured[0]
    scales = [noise_scale(runs[str(source)], *part) for part in ((0, 1 / 8), (3 / 4, 1))]
    large, small, grown = runs[str(high)], runs[str(low)], runs["ramp"]

    def compared(what, a, b, other, chapter, of=last_loss):
        return ratio_claim(f"{what}, relative to {other}", chapter, ratios(a, b, of), "seeds")
    rows = [[name, max((len(curves["ms"]) for curves in finished(run).values()), default="–"),
             f"{tried[0][0]:g} ({min(tried)[0]:g} to {max(tried)[0]:g})",
             f"{mean_loss(run):.4f}", spread([*finished(run, last_loss).values()], "{:.4f}".format),
             spread([*finished(run, seconds).values()]), number(noise_scale(run, 3 / 4, 1))]
            for (name, run), tried in zip(runs.items(), [*results["rates"].values(), results["rates"][str(high)]])]
    return Section(
        "Batch size",
        [compared(f"Loss after 1/{EVALUATIONS} of the tokens, batches of {high:,}", large, small, f"{low:,}",
                  "higher: small batches move quickly early", lambda curves: curves["val_loss"][0][1]),
         noise_claim(scales, low),
         compared(f"Last loss, batches of {high:,}", large, runs[str(rival)], f"the best smaller batch, {rival:,}",
                  "higher: large batches use each token less"),
         compared(f"Time for all tokens, batches of {high:,}", large, small, f"{low:,}",
                  "lower: fewer steps save optimizer time", seconds),
         *optimum_claims(batches, losses, close, scales[1]),
         compared(f"Last loss, batches that grow from {ramp['from']:,} to {ramp['to']:,}", grown, large, f"{high:,}",
                  "lower: DeepSeek-V3's batch grew 5 times")],
        [f"The model of make run (2 layers, 128 channels, sequences of 64 bytes) trains on {results['tokens']:,} "
         "tokens of Shakespeare with each batch, with a cosine schedule and a rise of the learning rate over the first "
         "quarter. A shorter rise lets large batches stall. Each batch has the rate that ends with the lowest loss for "
         "another seed; at the edge of those tried (table), a better one may exist. The ramp takes half of the tokens, "
         f"at the rate of the largest batch. The noise scale is that of batches of {source:,}.", PROXY],
        batch_figure(results),
        "Measured. Curves: the first seed. Points: the mean of the seeds, with their range; the diamond is the ramp.",
        html_table(["batch, tokens", "steps", "learning rate (tried)", "last validation loss, mean of seeds",
                    "median (range)", "seconds of training, median (range)", "noise scale, last quarter"], rows))

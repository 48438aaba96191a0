"""Part of the report about batch size: batch_size() takes the result of measure.py's function and returns a Section."""
import itertools
import math
import statistics

from figures import (GREY, Section, concluded, conclusive, doubling_ticks, effects, entry, html_table, legend_below,
                     matplotlib, number, panels, percent, spread, whiskers)
from measure import EVALUATIONS

CLOSE = 0.01        # batches whose loss is at most this far above the best (relative) count as equally good
BROAD = 4           # the optimum is broad if the largest of them is this many times the smallest
FACTOR = 2          # the noise scale agrees with the critical batch if they differ by at most this factor
AGREES, CONTRADICTS = "This agrees with the chapter.", "This contradicts the chapter."
BEYOND = "may lie beyond the measured batches, so this allows no conclusion."
PROXY = ("The noise scale assumes SGD and a well-conditioned Hessian. AdamW instead divides each gradient by its own "
         "magnitude. The noise scale also grows during training, while a constant batch must suit all of it, and a "
         "short run needs enough steps whatever the noise. Merrill et al. (arXiv 2505.23971) instead measure the "
         "critical batch directly: they branch a run, continue it with several batches, and take the largest that "
         "still reaches the same loss. It starts near 0 and grows. Here runs differ from the first step.")


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


def batch_figure(results, critical, noise):
    batches = results["batches"]
    figure, ((by_tokens, by_time), (by_batch, scales)) = panels(2, 2, 7.2)
    colors = {str(batch): matplotlib.colormaps["viridis"](i / len(batches)) for i, batch in enumerate(batches)}
    colors["ramp"] = "black"
    for name, run in results["runs"].items():
        x, line, marker = (1.25 * results["ramp"]["to"], "--", "D") if name == "ramp" else (int(name), "-", "o")
        style = {"color": colors[name], "linestyle": line, "linewidth": 1.4}
        for curves in [*finished(run).values()][:1]:
            tokens = {step: value / 1000 for step, value in curves["tokens"]}
            time = dict(zip(tokens, itertools.accumulate(ms / 1000 for _, ms in curves["ms"])))
            for axis, at in ((by_tokens, tokens), (by_time, time)):
                axis.plot(*zip(*[(at[step], loss) for step, loss in curves["val_loss"]]), marker=".", **style)
            positive = [(tokens[step], value) for step, value in curves["noise_scale"] if value > 0]
            scales.plot(*zip(*positive or [(math.nan, 1)]), **style)
            by_batch.plot(x, mean_loss(run), marker, color=colors[name])
            whiskers(by_batch, x, mean_loss(run), finished(run, last_loss).values())
        if name != "ramp":
            scales.axhline(x, color=colors[name], linestyle=":", linewidth=1)
    for x, text in ((critical, "critical batch "), (noise, "noise scale ")):
        if x:
            by_batch.axvline(x, color=GREY, linestyle=":")
            by_batch.text(x, 0.97, text, color="0.3", rotation=90, va="top", ha="right", fontsize=8,
                          transform=by_batch.get_xaxis_transform())
    doubling_ticks(by_batch, batches, "batch, tokens")
    highest = max(run["val_loss"][0][0][1] for run in results["runs"].values())   # larger losses are spikes
    by_tokens.set(title="Validation loss against tokens", xlabel="thousands of tokens", ylim=(None, 1.05 * highest))
    by_time.set(title="Validation loss against time", xlabel="seconds of training", ylim=(None, 1.05 * highest))
    by_batch.set(title="Last validation loss")
    scales.set(title="Noise scale, tokens (dotted: the batch)", xlabel="thousands of tokens", yscale="log")
    legend_below(figure, [entry(name, color, "--" if name == "ramp" else "-") for name, color in colors.items()])
    return figure


# ---- conclusions

def effect(found):
    low, middle, high = effects(found or [1])
    return f"{middle} (seeds {low} to {high})"


def judged(found, what, reference, above=True):
    """Returns a sentence about ratios of runs, and whether it agrees with the chapter, which expects more than 1
    (above=False: less); or that the seeds allow no conclusion."""
    agrees = (statistics.median(found or [1]) > 1) == above
    return concluded(found, f"{what} differs by {effect(found)} from {reference}. {AGREES if agrees else CONTRADICTS}",
                     what[0].lower() + what[1:], "seeds")


def setup_text(results):
    steps = [results["tokens"] // batch for batch in results["batches"]]
    edges = [f"{int(batch):,} ({tried[0][0]:g})" for batch, tried in results["rates"].items()
             if tried[0][0] in (min(tried)[0], max(tried)[0])]
    return (f"The model of make run (2 layers, 128 channels, sequences of 64 bytes) trains on {results['tokens']:,} "
            f"tokens of Shakespeare in {steps[0]:,} to {steps[-1]:,} steps, with a cosine schedule. The learning rate "
            "rises over the first quarter of the tokens; a shorter rise lets large batches stall. Each batch has the "
            "rate that ends with the lowest loss for another seed; rates differ by factors of two. "
            + (f"It is at the edge of those tried for batches of {', '.join(edges)}, so a better one may exist. "
               if edges else "No best rate is at the edge of those tried. ")
            + f"A micro-batch has up to {results['micro']} sequences; larger batches accumulate.")


def noise_text(scales, source, smallest):
    if None in scales:
        return "The noise scale is not known, as its estimates are not positive."
    early, late = (scale / (scale + smallest) for scale in scales)
    return (f"By the noise scale of batches of {source:,}, noise is {percent(early)} of the squared norm of a gradient "
            f"of {smallest:,} tokens in the first eighth of training, and {percent(late)} in the last quarter. "
            + (AGREES if late > 0.5 else CONTRADICTS))


def span(batches):
    return f"{batches[0]:,} to {batches[-1]:,}" if len(batches) > 1 else f"{batches[0]:,}"


def optimum_texts(batches, losses, close, noise):
    best, critical = min(losses, key=losses.get), close[-1]
    near = [batch for batch in batches if losses[batch] <= 1.05 * losses[best]]
    at_edge = best in (batches[0], batches[-1])
    text = (f"The last loss is lowest with batches of {best:,} tokens{', the edge of the measured batches' * at_edge}. "
            f"Batches of {span(close)} are within {percent(CLOSE)} of it, {span(near)} within 5 %. "
            "The chapter: the optimum is broad. "
            + (AGREES if critical >= BROAD * close[0] else f"The optimum {BEYOND}" if at_edge else CONTRADICTS))
    if not noise:
        return [text, PROXY]
    times = noise / critical
    beyond = critical == batches[-1] and times > FACTOR or critical == batches[0] and times < 1 / FACTOR
    verdict = (f"The critical batch {BEYOND}" if beyond else
               f"The noise scale is a {'good' if 1 / FACTOR <= times <= FACTOR else 'poor'} proxy here.")
    return [text, f"The critical batch, the largest within {percent(CLOSE)} of the best loss, is {critical:,} tokens. "
            f"The noise scale in the last quarter is {number(noise)}, {number(times)} times as much. {verdict} {PROXY}"]


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
    first, time = ratios(large, small, lambda curves: curves["val_loss"][0][1]), ratios(large, small, seconds)
    last, ramped = ratios(large, runs[str(rival)]), ratios(grown, large)
    texts = [
        setup_text(results), "The chapter: small batches move quickly early in training but keep gradients noisy. "
        + judged(first, f"The loss of batches of {high:,} after 1/{EVALUATIONS} of the tokens", f"that of {low:,}")
        + " " + noise_text(scales, source, low),
        "The chapter: large batches use each token less well, but fewer steps save optimizer time. "
        + judged(last, f"The last loss of batches of {high:,}", f"that of the best smaller batch, {rival:,}") + " "
        + judged(time, f"The time of batches of {high:,} for all tokens", f"that of {low:,}", above=False),
        *optimum_texts(batches, losses, close, scales[1]),
        f"DeepSeek-V3's batch grew from 3,072 to 15,360 sequences. Here it grows from {ramp['from']:,} to "
        f"{ramp['to']:,} tokens over half of the tokens, at the rate of the largest batch. "
        + judged(ramped, "The last loss of this ramp", f"that of constant batches of {ramp['to']:,}", above=False)
        + f" From the best constant batch, {best:,}, it differs by {effect(ratios(grown, runs[str(best)]))}."]
    rows = [[name, max((len(curves["ms"]) for curves in finished(run).values()), default="–"),
             f"{tried[0][0]:g} ({min(tried)[0]:g} to {max(tried)[0]:g})",
             f"{mean_loss(run):.4f}", spread([*finished(run, last_loss).values()], "{:.4f}".format),
             spread([*finished(run, seconds).values()]), number(noise_scale(run, 3 / 4, 1))]
            for (name, run), tried in zip(runs.items(), [*results["rates"].values(), results["rates"][str(high)]])]

    def said(found):
        return effect(found) + (" (measured)" if conclusive(found) else ", no conclusion (measured)")
    return Section(
        "Batch size", texts, batch_figure(results, close[-1], scales[1]),
        "Measured. Curves: the first seed. Points: the mean of the seeds, with their range; the diamond is the ramp.",
        html_table(["batch, tokens", "steps", "learning rate (tried)", "last validation loss, mean of seeds",
                    "median (range)", "seconds of training, median (range)", "noise scale, last quarter"], rows),
        [(f"Early loss with batches of {high:,} against {low:,}", "small batches move quickly early", said(first)),
         (f"Last loss with batches of {high:,} against {rival:,}", "large batches learn less per token", said(last)),
         (f"Time with batches of {high:,} against {low:,}", "fewer steps save optimizer time", said(time)),
         (f"Batches within {percent(CLOSE)} of the best loss; noise scale", "broad; large models: 4 to 60 M tokens",
          f"{span(close)} tokens; {number(scales[1])} (measured)"),
         (f"Last loss of a ramp against constant batches of {high:,}", "DeepSeek-V3's batch grew 5 times",
          said(ramped))])

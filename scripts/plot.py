#!/usr/bin/env python3
"""Plots training runs from each run's log.jsonl: loss, HellaSwag accuracy, learning rate, gradient noise scale and
throughput.

    scripts/plot.py runs/gpt2_124M runs/gpt2_124M_wsd --out comparison.png
    scripts/plot.py --watch runs/gpt2_124M       # writes runs/gpt2_124M/plot.html and updates it during the run
    scripts/plot.py --x flops runs/gpt2_124M runs/gpt2_350M
"""
import argparse
import base64
import html
import io
import math
import os
import time

from runs import all_ended, fail, follow, parse_arguments, summary

try:
    import matplotlib
    matplotlib.use("Agg")       # draws into a file, needs no display
    import numpy                # comes with matplotlib
    from matplotlib import pyplot
except ImportError as error:
    matplotlib, missing = None, error


# Published results of GPT-2's weights, by (layers, channels): name; validation loss on OpenWebText, from nanoGPT's
# README; HellaSwag acc_norm, from llm.c's dev/data/hellaswag.py.
GPT2 = {(12, 768): ("124M", 3.12, 0.2955), (24, 1024): ("350M", 2.84, None), (36, 1280): ("774M", 2.67, None),
        (48, 1600): ("1558M", 2.54, 0.4893)}
GPT2_VOCAB = 50257
CHANCE = 0.25               # HellaSwag accuracy of random answers: each question has four endings

# ---- horizontal axis

LABELS = {"steps": "step", "tokens": "tokens", "flops": "model FLOPs"}     # time: the unit depends on the duration
TIME_UNITS = (86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")


def time_unit(seconds):
    """Returns (seconds, name) of the largest unit of which `seconds` are at least two, otherwise of seconds."""
    return next((unit for unit in TIME_UNITS if seconds >= 2 * unit[0]), TIME_UNITS[-1])


def positions(run, x):
    """Returns {step: position on the horizontal axis}; times are in seconds."""
    if x == "steps":
        return {step: step for step in run.steps}
    if x == "flops" and run.flops_per_token() is None:
        fail(f"--x flops: expected flops_per_token in the first line of {run.folder}/log.jsonl, found none")
    factor = {"tokens": 1, "time": 1, "flops": run.flops_per_token()}[x]
    return {step: factor * at[x == "time"] for step, at in run.progress().items()}


# ---- GPT-2's published results

def shape(run):
    """Returns (layers, channels) of a run with GPT-2's vocabulary, otherwise None."""
    model = run.record.get("model", {})
    return (model.get("layers"), model.get("channels")) if model.get("vocab") == GPT2_VOCAB else None


def references(runs):
    """Returns (losses, accuracies), each {name: value}, of the GPT-2 models with the same shape as one of the runs.
    Losses are comparable only for runs on OpenWebText."""
    shapes = {shape(run) for run in runs} & GPT2.keys()
    on_openwebtext = {shape(run) for run in runs if "openwebtext" in str(run.record.get("options", {}).get("data"))}
    losses = {GPT2[s][0]: GPT2[s][1] for s in GPT2 if s in on_openwebtext}
    return losses, {GPT2[s][0]: GPT2[s][2] for s in GPT2 if s in shapes and GPT2[s][2] is not None}


def draw_references(axis, values, label):
    """Draws a dashed line for each value, with its name to the right of the axis."""
    for i, (name, value) in enumerate(values.items()):
        axis.axhline(value, color="0.35", linestyle="--", linewidth=1, label=None if i else label)
        axis.annotate(f"{name}: {value:g}", (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=8, color="0.25", annotation_clip=False)


# ---- drawing

def draw(axis, x, values, color, label):
    """Draws the values as a faint line, and on top of it their moving average over 2 % of the run."""
    window = numpy.ones(max(1, len(values) // 50))
    mean = (numpy.convolve(values, window, "same")
            / numpy.convolve(numpy.ones(len(values)), window, "same"))   # the window is shorter at both ends
    axis.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
    axis.plot(x, mean, color=color, label=label, linewidth=1.5)


def draw_speeds(axis, series):
    """Draws throughput; series: (x, values, color, label) of each run. A few very fast steps would compress the axis:
    values above 1.25 times the 98th percentile are clipped and marked with a triangle."""
    finite = [value for _, values, _, _ in series for value in values if math.isfinite(value)]
    top = 1.25 * numpy.percentile(finite, 98) if finite else math.inf
    clipped = 0
    for x, values, color, label in series:
        draw(axis, x, numpy.minimum(values, top), color, label)
        above = [at for at, value in zip(x, values) if value > top]
        if above:
            axis.plot(above, [top] * len(above), "^", color=color, markersize=4, clip_on=False)
        clipped += len(above)
    if clipped:
        axis.set_ylim(top=top)
        axis.set_title(f"▲ {clipped:,} faster than {top:,.0f} tokens/s, clipped", fontsize=8, loc="right")
    axis.set_ylim(bottom=0)


def limit_losses(axis, runs, marked):
    """Ends the axis at the 98th percentile of the training losses, because the first losses would flatten the rest of
    the curve. Validation losses and the values in `marked` are always visible."""
    training, validation = ([value for run in runs for value in run.series(name).values() if math.isfinite(value)]
                            for name in ("loss", "val_loss"))
    shown = [*numpy.percentile(training, [0, 98]), *validation, *marked] if training else validation
    if not shown:
        return
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    axis.set_ylim(min(shown) - margin, max(shown) + margin)


def plot(runs, x="steps"):
    loss_lines, accuracy_lines = references(runs)
    with_accuracy = any(run.series("hellaswag") for run in runs)
    with_noise = any(run.series("noise_scale") for run in runs)
    panels = {"loss": 3, **({"hellaswag": 1.5} if with_accuracy else {}), "lr": 1,
              **({"noise": 1.5} if with_noise else {}), "speed": 1.5}
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 1.7 * sum(panels.values()) + 1.5), sharex=True,
                                   height_ratios=list(panels.values()), layout="constrained")
    axis = dict(zip(panels, axes))
    all_positions = [positions(run, x) for run in runs]
    divisor, label = time_unit(max(max(at.values()) for at in all_positions)) if x == "time" else (1, LABELS[x])
    speeds = []
    for index, (run, at) in enumerate(zip(runs, all_positions)):
        def points(name):
            values = run.series(name)
            return [at[step] / divisor for step in values], [*values.values()]
        color = f"C{index % 10}"
        if run.series("loss"):
            draw(axis["loss"], *points("loss"), color, f"{run.name}: loss")
        if val := run.series("val_loss"):
            axis["loss"].plot(*points("val_loss"), "o--", color=color, markersize=4, linewidth=1,
                              label=f"{run.name}: validation, {[*val.values()][-1]:.3f} at step {[*val][-1]:,}")
        if accuracy := run.series("hellaswag"):
            axis["hellaswag"].plot(*points("hellaswag"), "o-", color=color, markersize=4, linewidth=1,
                                   label=f"{run.name}: {[*accuracy.values()][-1]:.4f} at step {[*accuracy][-1]:,}")
        if run.series("lr"):
            axis["lr"].plot(*points("lr"), color=color)
        if run.series("noise_scale"):
            axis["noise"].plot(*points("noise_scale"), color=color, label=f"{run.name}: noise scale")
            axis["noise"].plot(*points("batch"), "--", color=color, label=f"{run.name}: batch")
        if run.series("tokens_per_s"):
            speeds.append((*points("tokens_per_s"), color, run.name))

    draw_speeds(axis["speed"], speeds)
    draw_references(axis["loss"], loss_lines, "GPT-2 on OpenWebText (nanoGPT's README)")
    limit_losses(axis["loss"], runs, loss_lines.values())
    axis["loss"].set_ylabel("loss, nats per token")
    axis["loss"].legend(fontsize=8, loc="upper right")
    if with_accuracy:
        draw_references(axis["hellaswag"], accuracy_lines, "GPT-2 (llm.c's hellaswag.py)")
        draw_references(axis["hellaswag"], {"chance": CHANCE}, None)
        axis["hellaswag"].set_ylabel("HellaSwag, acc_norm")
        axis["hellaswag"].legend(fontsize=8, loc="best")
    axis["lr"].set_ylabel("learning rate")
    axis["lr"].ticklabel_format(axis="y", scilimits=(0, 0))
    if with_noise:
        axis["noise"].set(yscale="log", ylabel="tokens")
        axis["noise"].legend(fontsize=8, loc="best")
    axis["speed"].set_ylabel("tokens per second")
    axis["speed"].yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axis["speed"].set_xlabel(f"{label} in training steps" if x == "time" else label)
    if x in ("tokens", "flops"):
        axis["speed"].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())      # 10 M
    for each in axes:
        each.grid(alpha=0.3)
    return figure


# ---- files

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}
<title>{title}</title><style>body {{ font: 15px/1.5 system-ui, sans-serif;
margin: 1.5em auto; max-width: 1080px; padding: 0 1em; }} img {{ max-width: 100%; }}</style></head><body>
{rows}<p>{status}</p>
<img alt="{title}" src="data:image/png;base64,{picture}"></body></html>
"""


def save(out, runs, options):
    """Writes the figure to a temporary file and renames it, so that readers of `out` never see an incomplete file.
    A page reloads itself only while --watch is going to update it."""
    figure = plot(runs, options.x)
    base, ending = os.path.splitext(out)
    new = f"{base}.new{ending}"
    try:
        if ending == ".html":
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=120)
            refresh, status = "", f"Drawn at {time.strftime('%H:%M:%S')}."
            if options.watch and not all_ended(runs, options):
                refresh = f'<meta http-equiv="refresh" content="{options.every:g}">'
                status += f" This page reloads itself every {options.every:g} s."
            with open(new, "w", encoding="utf-8") as file:
                file.write(PAGE.format(refresh=refresh, status=status,
                                       rows="".join(f"<p>{html.escape(summary(run))}</p>" for run in runs),
                                       title=html.escape(", ".join(run.name for run in runs)),
                                       picture=base64.b64encode(picture.getvalue()).decode()))
        else:
            figure.savefig(new, dpi=120)
        os.replace(new, out)
    except (OSError, ValueError) as error:
        fail(f"--out {out}: {error}")
    finally:
        pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--out", metavar="FILE", help="a picture (.png, .svg, .pdf) or a page (.html), which "
                        "reloads itself with --watch (default: plot.png in the first run's folder; plot.html with "
                        "--watch)")
    parser.add_argument("--x", choices=["steps", "tokens", "time", "flops"], default="steps",
                        help="horizontal axis (default: %(default)s); time counts training steps only, no evaluation")
    options = parse_arguments(parser)
    if not matplotlib:
        fail(f"{missing}; expected matplotlib: pip install -r scripts/requirements.txt")
    out = options.out or os.path.join(options.runs[0], "plot.html" if options.watch else "plot.png")
    print(out, flush=True)
    for runs in follow(options):
        save(out, runs, options)
        if options.watch:
            print("\n".join(summary(run) for run in runs), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Plots training runs from each run's log.jsonl: loss, HellaSwag where it was evaluated, learning rate, speed.

    scripts/plot.py runs/gpt2_124M runs/gpt2_124M_wsd --out comparison.png
    scripts/plot.py --watch runs/gpt2_124M       # a page that follows the run
    scripts/plot.py --x flops runs/gpt2_124M runs/gpt2_350M
"""
import argparse
import base64
import html
import io
import math
import os
import sys
import time

sys.dont_write_bytecode = True
from runs import fail, follow, parse_arguments, summary

try:
    import matplotlib
    matplotlib.use("Agg")       # draws into a file, needs no display
    import numpy                # comes with matplotlib
    from matplotlib import pyplot
except ImportError as error:
    fail(f"{error}: needs matplotlib (pip install matplotlib, or apt install python3-matplotlib)")

# GPT-2's own weights. By layers and channels: name, validation loss on OpenWebText as nanoGPT's README lists it,
# HellaSwag's acc_norm as llm.c's dev/data/hellaswag.py has it.
GPT2 = {(12, 768): ("124M", 3.12, 0.2955), (24, 1024): ("350M", 2.84, None), (36, 1280): ("774M", 2.67, None),
        (48, 1600): ("1558M", 2.54, 0.4893)}
GPT2_VOCAB = 50257
CHANCE = 0.25               # HellaSwag has four endings

# ---- what to draw against

UNITS = {"tokens": ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")),
         "time": ((86400, "days"), (3600, "hours"), (60, "minutes"))}


def scale(x, most):
    """(divisor, label) of the axis on which the largest is `most`."""
    if x == "steps":
        return 1, "step"
    if x == "flops":
        exponent = max(0, math.floor(math.log10(most))) if most > 0 else 0
        return 10.0 ** exponent, f"$10^{{{exponent}}}$ FLOPs of the model"
    smallest = "seconds" if x == "time" else ""
    divisor, unit = next((pair for pair in UNITS[x] if most >= 2 * pair[0]), (1, smallest))
    return divisor, f"{unit} tokens".strip() if x == "tokens" else f"{unit} in training steps"


def positions(run, x):
    """{step: where it is on the axis}, not yet scaled."""
    if x == "steps":
        return {step: step for step in run.steps}
    if x == "flops" and run.flops_per_token() is None:
        fail(f"--x flops: {run.folder}/log.jsonl has no flops_per_token in its first line")
    factor = {"tokens": 1, "time": 1, "flops": run.flops_per_token()}[x]
    return {step: factor * at[x == "time"] for step, at in run.progress().items()}


# ---- GPT-2's own figures

def shape(run):
    model = run.record.get("model", {})
    return (model.get("layers"), model.get("channels")) if model.get("vocab") == GPT2_VOCAB else None


def references(runs):
    """(losses, accuracies), each {name: value}: of GPT-2's models as large as the runs, losses of runs on its data."""
    shapes = {shape(run) for run in runs} & GPT2.keys()
    on_openwebtext = {shape(run) for run in runs if "openwebtext" in str(run.record.get("options", {}).get("data"))}
    losses = {GPT2[s][0]: GPT2[s][1] for s in GPT2 if s in on_openwebtext}
    return losses, {GPT2[s][0]: GPT2[s][2] for s in GPT2 if s in shapes and GPT2[s][2] is not None}


def draw_references(axis, values, label):
    """Dashed lines, each with its name at the right of the axis."""
    for i, (name, value) in enumerate(values.items()):
        axis.axhline(value, color="0.35", linestyle="--", linewidth=1, label=None if i else label)
        axis.annotate(f"{name}: {value:g}", (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=8, color="0.25", annotation_clip=False)


# ---- drawing

def draw(axis, x, values, color, label):
    """The values, faint, and over them their mean over a window of a fiftieth of the run."""
    window = numpy.ones(max(1, len(values) // 50))
    mean = (numpy.convolve(values, window, "same")
            / numpy.convolve(numpy.ones(len(values)), window, "same"))   # fewer values at the ends
    axis.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
    axis.plot(x, mean, color=color, label=label, linewidth=1.5)


def limit_losses(axis, runs, marked):
    """The loss of the first steps would flatten all the rest: the axis ends where most of it does."""
    losses = sorted(value for run in runs for value in run.series("loss").values() if math.isfinite(value))
    if not losses:
        return
    shown = [losses[0], losses[int(0.98 * (len(losses) - 1))], *marked]
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    axis.set_ylim(min(shown) - margin, max(shown) + margin)


def plot(runs, x="steps"):
    loss_lines, accuracy_lines = references(runs)
    with_accuracy = any(run.series("hellaswag") for run in runs)
    panels = {"loss": 3, **({"hellaswag": 1.5} if with_accuracy else {}), "lr": 1, "speed": 1.5}
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 1.7 * sum(panels.values()) + 1.5), sharex=True,
                                   height_ratios=list(panels.values()), layout="constrained")
    axis = dict(zip(panels, axes))
    where = [positions(run, x) for run in runs]
    divisor, x_label = scale(x, max((max(at.values(), default=0) for at in where), default=0))
    for index, (run, at) in enumerate(zip(runs, where)):
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
        if run.series("tokens_per_s"):
            draw(axis["speed"], *points("tokens_per_s"), color, run.name)

    draw_references(axis["loss"], loss_lines, "GPT-2 on OpenWebText (nanoGPT's README)")
    limit_losses(axis["loss"], runs, loss_lines.values())
    axis["loss"].set_ylabel("loss (nats a token)")
    axis["loss"].legend(fontsize=8, loc="upper right")
    if with_accuracy:
        draw_references(axis["hellaswag"], accuracy_lines, "GPT-2 (llm.c's hellaswag.py)")
        draw_references(axis["hellaswag"], {"chance": CHANCE}, None)
        axis["hellaswag"].set_ylabel("HellaSwag, acc_norm")
        axis["hellaswag"].legend(fontsize=8, loc="best")
    axis["lr"].set_ylabel("learning rate")
    axis["lr"].ticklabel_format(axis="y", scilimits=(0, 0))
    axis["speed"].set_ylabel("tokens a second")
    axis["speed"].yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axis["speed"].set_ylim(bottom=0)
    axis["speed"].set_xlabel(x_label)
    for each in axes:
        each.grid(alpha=0.3)
    return figure


# ---- files

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds:g}">
<title>{title}</title><style>body {{ font: 15px/1.5 system-ui, sans-serif;
margin: 1.5em auto; max-width: 1080px; padding: 0 1em; }} img {{ max-width: 100%; }}</style></head><body>
{rows}<p>Drawn at {time}; this page reloads itself every {seconds:g} s.</p>
<img alt="{title}" src="data:image/png;base64,{picture}"></body></html>
"""


def save(out, runs, options):
    """Draws into a temporary file and renames it, so that `out` is complete at any moment."""
    figure = plot(runs, options.x)
    base, ending = os.path.splitext(out)
    new = f"{base}.new{ending}"
    try:
        if ending == ".html":
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=120)
            with open(new, "w", encoding="utf-8") as file:
                file.write(PAGE.format(seconds=options.every, time=time.strftime("%H:%M:%S"),
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
    parser.add_argument("--out", metavar="FILE", help="a picture, or FILE.html: a page that reloads itself "
                        "(default: plot.png in the first folder; plot.html with --watch)")
    parser.add_argument("--x", choices=["steps", "tokens", "time", "flops"], default="steps",
                        help="the horizontal axis (default: %(default)s); time is that of training steps")
    options = parse_arguments(parser)
    out = options.out or os.path.join(options.runs[0], "plot.html" if options.watch else "plot.png")
    print(out, flush=True)
    for runs in follow(options):
        save(out, runs, options)
        if options.watch:
            print("\n".join(summary(run) for run in runs), flush=True)


if __name__ == "__main__":
    main()

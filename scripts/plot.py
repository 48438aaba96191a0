#!/usr/bin/env python3
"""Plots training runs: loss, learning rate and speed over steps, from each run's log.jsonl.

    scripts/plot.py runs/gpt2_124M runs/gpt2_124M_wsd --out comparison.png
"""
import argparse
import json
import math
import os
import sys

try:
    import matplotlib
    matplotlib.use("Agg")       # draws into a file, needs no display
    import numpy                # comes with matplotlib
    from matplotlib import pyplot
except ImportError as error:
    print(f"plot: {error}: needs matplotlib (pip install matplotlib, or apt install python3-matplotlib)",
          file=sys.stderr)
    sys.exit(2)

PLOTTED = {"loss", "val_loss", "lr", "tokens_per_s"}


class Mistake(Exception):
    """The user's; the message names the file or package, what was found and what was expected."""


def read_log(folder):
    """The log's numbers as {"loss": {step: value}, "val_loss": ..., ...}.

    A run that was resumed from a checkpoint logs the steps after that checkpoint a second time:
    the later line is the one that counts. JSON has no NaN: null stands for it.
    """
    path = os.path.join(folder, "log.jsonl")
    try:
        lines = open(path, encoding="utf-8").read().splitlines()
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}; expected the log of a run (its --out folder)") from None

    series = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "step" in entry:
                for name in PLOTTED & entry.keys():
                    value = math.nan if entry[name] is None else float(entry[name])
                    series.setdefault(name, {})[int(entry["step"])] = value
        except (ValueError, TypeError):
            raise Mistake(f"{path} line {number}: found {line[:60]!r}, expected a step as JSON") from None
    if not series:
        raise Mistake(f"{path}: found {len(lines)} lines and no step among them, expected at least one")
    return series


def draw(axis, values, color, label):
    """The values, faint, and over them their mean over a window of a fiftieth of the run."""
    window = numpy.ones(max(1, len(values) // 50))
    mean = (numpy.convolve([*values.values()], window, "same")
            / numpy.convolve(numpy.ones(len(values)), window, "same"))   # fewer values at the ends
    axis.plot(values.keys(), values.values(), color=color, alpha=0.25, linewidth=0.8)
    axis.plot(values.keys(), mean, color=color, label=label)


def plot(runs):
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 11), sharex=True, height_ratios=[3, 1, 1.5])
    loss_axis, lr_axis, speed_axis = axes
    for index, (name, series) in enumerate(runs):
        color = f"C{index}"
        if loss := series.get("loss"):
            draw(loss_axis, loss, color, f"{name}: loss")
        if val := series.get("val_loss"):
            loss_axis.plot(val.keys(), val.values(), "o--", color=color, markersize=4, linewidth=1,
                           label=f"{name}: validation, {[*val.values()][-1]:.3f} at the end")
        if lr := series.get("lr"):
            lr_axis.plot(lr.keys(), lr.values(), color=color)
        if speed := series.get("tokens_per_s"):
            draw(speed_axis, speed, color, name)

    # The loss of the first steps would flatten all the rest: the axis ends where most of it does.
    losses = sorted(value for _, series in runs for value in series.get("loss", {}).values()
                    if math.isfinite(value))
    if losses:
        low, high = losses[0], losses[int(0.98 * (len(losses) - 1))]
        margin = 0.05 * (high - low) or 0.1
        loss_axis.set_ylim(low - margin, high + margin)
    loss_axis.set_ylabel("loss (nats a token)")
    loss_axis.legend()
    lr_axis.set_ylabel("learning rate")
    lr_axis.ticklabel_format(axis="y", scilimits=(0, 0))
    speed_axis.set_ylabel("tokens a second")
    speed_axis.set_ylim(bottom=0)
    speed_axis.set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER", help="a run's --out folder, holding log.jsonl")
    parser.add_argument("--out", metavar="FILE.png", help="default: plot.png in the first folder")
    options = parser.parse_args()

    runs = [(os.path.basename(os.path.normpath(folder)), read_log(folder)) for folder in options.runs]
    out = options.out or os.path.join(options.runs[0], "plot.png")
    try:
        plot(runs).savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise Mistake(f"--out {out}: {error}") from None
    print(out)


if __name__ == "__main__":
    try:
        main()
    except Mistake as mistake:
        print(f"plot: {mistake}", file=sys.stderr)
        sys.exit(2)

#!/usr/bin/env python3
"""Reports the runs of experiment.sh: experiment.py FOLDER OPTIONS_A OPTIONS_B."""
import statistics
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.append(str(Path(__file__).parent))
from runs import read_run


def summary(values):
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def verdict(a, b):
    """Returns what the losses of two sets, in order of seeds, show."""
    pairs = [y / x - 1 for x, y in zip(a, b)]
    mean = f"B's loss is {100 * statistics.mean(pairs):+.2f} % relative to A's with the same seed"
    if max(a) < min(b) or max(b) < min(a):
        return f"{mean}; the ranges of the seeds do not overlap"
    return f"{mean}; no conclusion: the ranges of the seeds overlap"


def main():
    folder, losses = Path(sys.argv[1]), []
    rows = [["set", "options", "seeds", "validation loss: mean (range)", "tokens"], ["---"] * 5]
    for name, options in zip("AB", sys.argv[2:]):
        runs = [read_run(path) for path in sorted(folder.glob(f"{name}-*/"))]
        last = [next(reversed(run.series("val_loss").values()), None) for run in runs]
        if not last or None in last:
            sys.exit(f"experiment: {folder}: a run of set {name} has no validation loss; expected validation data")
        losses.append(last)
        tokens = [max(tokens for tokens, _ in run.progress().values()) for run in runs]
        rows.append([name, options or "-", len(runs), summary(last), f"{statistics.mean(tokens):,.0f}"])
    print(*(f"| {' | '.join(map(str, row))} |" for row in rows), sep="\n")
    print(verdict(*losses))
    subprocess.run([sys.executable, Path(__file__).with_name("plot.py"), *sorted(folder.glob("[AB]-*/")), "--x", "time",
                    "--out", folder / "plot.png"], check=False)


if __name__ == "__main__":
    main()

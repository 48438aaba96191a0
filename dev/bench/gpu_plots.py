"""Plots beside gpu.py's report, where matplotlib is installed; without it there are none."""
import os

from gpu_model import all_matmuls
from gpu_report import ceilings_of, floor_of, models_of, shape_of

CONTESTANTS = {"ours": ("#4e79a7", "ours"), "torch": ("#f28e2b", "PyTorch"), "llmc": ("#59a14f", "llm.c")}
OTHERS = "others"


def pyplot_or_none():
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")       # draws into a file, needs no display
    from matplotlib import pyplot
    pyplot.rcParams.update({
        "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 110,
        "figure.constrained_layout.use": True})
    return pyplot


def plot_speed(pyplot, results):
    """Shares of the peak, which are comparable between models."""
    models = models_of(results)
    if not models:
        return None
    figure, axis = pyplot.subplots(figsize=(7.5, 3.4))
    present = [kind for kind in CONTESTANTS if results[kind]]
    width = 0.8 / len(present)
    for i, kind in enumerate(present):
        color, name = CONTESTANTS[kind]
        for x, model in enumerate(models):
            run = results[kind].get(model)
            if run:
                at = x + (i - (len(present) - 1) / 2) * width
                axis.bar(at, 100 * run["mfu"], 0.92 * width, color=color)
                axis.text(at, 100 * run["mfu"], f"{run['tokens_per_s'] / 1000:,.0f}k", ha="center", va="bottom",
                          fontsize=7.5)
        axis.bar(0, 0, color=color, label=name)
    for x, model in enumerate(models):
        best, run = floor_of(results, model), results["ours"][model]
        if best and best["total"]:
            reach = 1e9 / best["total"] / run["tokens_per_s"] * run["mfu"]
            axis.plot([x - 0.42, x + 0.42], [100 * reach] * 2, color="#c0392b", linestyle="--", linewidth=1.4,
                      label="floor" if x == 0 else None)
    axis.set_xticks(range(len(models)), models)
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.12)
    axis.set(ylabel="MFU, %", title="Share of the peak; on the bars tokens/s")
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def plot_step(pyplot, results):
    """How each model's step divides among kernels."""
    models = models_of(results)
    if not models:
        return None
    shares = {model: {} for model in models}
    for model in models:
        trace = results["ours"][model]["trace"]
        for kernel in trace["kernels"]:
            shares[model][kernel["name"]] = shares[model].get(kernel["name"], 0) + kernel["ms"] / trace["period_ms"]
    large = sorted({name for share in shares.values() for name, part in share.items() if part >= 0.015},
                   key=lambda name: -sum(share.get(name, 0) for share in shares.values()))
    figure, axis = pyplot.subplots(figsize=(9, 0.9 + 0.62 * len(models)))
    colors = pyplot.get_cmap("tab20").colors
    for y, model in enumerate(models):
        left = 0
        parts = [(name, shares[model].get(name, 0)) for name in large]
        parts.append((OTHERS, sum(part for name, part in shares[model].items() if name not in large)))
        for i, (name, part) in enumerate(parts):
            axis.barh(y, 100 * part, 0.66, left, color=colors[i % 20] if name != OTHERS else "0.6",
                      label=name if y == 0 else None)
            if part > 0.04:
                axis.text(left + 50 * part, y, f"{100 * part:.0f}", ha="center", va="center", fontsize=7.5,
                          color="white")
            left += 100 * part
    axis.set_yticks(range(len(models)), models)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="% of the traced step; what is missing to 100 is idle", xlim=(0, 100))
    figure.legend(loc="outside lower center", ncols=5, fontsize=7.5)
    return figure


def plot_matmuls(pyplot, results):
    """Each matmul's rate beside its ceiling, for the first model that has both."""
    for model in models_of(results):
        shape, named = shape_of(results, model), results["ours"][model]["trace"]["matmuls"]
        best = {entry["name"]: entry["s"] for entry in ceilings_of(results, model).get("matmuls", [])}
        if named and best:
            break
    else:
        return None
    wanted = [matmul for matmul in all_matmuls(shape) if matmul.name in best]
    figure, axis = pyplot.subplots(figsize=(9, 3.6))
    for x, matmul in enumerate(wanted):
        seconds = named[matmul.name]["ms"] / 1000 / named[matmul.name]["launches"]
        axis.bar(x - 0.2, matmul.flops / seconds / 1e12, 0.38, color="#4e79a7", label="ours" if x == 0 else None)
        axis.bar(x + 0.2, matmul.flops / best[matmul.name] / 1e12, 0.38, color="#c0c0c0",
                 label="ceiling" if x == 0 else None)
    axis.set_xticks(range(len(wanted)), [matmul.name for matmul in wanted], rotation=45, ha="right")
    axis.grid(axis="x", visible=False)
    axis.set(ylabel="TFLOP/s", title=f"Matmuls of {model}")
    axis.legend()
    return figure


def plot_curve(pyplot, results):
    data = results["curve"]
    if not data or len(data["losses"]) < 1:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    styles = {"ours": "-", "PyTorch": "--", "llm.c": ":"}
    ours = data["losses"]["ours"]
    for (color, name) in CONTESTANTS.values():
        losses = data["losses"].get(name)
        if not losses:
            continue
        left.plot(range(1, len(losses) + 1), losses, color=color, linestyle=styles[name], linewidth=1.6, label=name)
        if name != "ours":
            common = min(len(losses), len(ours))
            right.plot(range(1, common + 1), [abs(a - b) for a, b in zip(losses, ours)], color=color, linewidth=1,
                       label=f"{name} and ours")
    left.set(xlabel="step", ylabel="loss", title="Losses on the same tokens, from the same weights")
    left.legend()
    right.set(xlabel="step", title="Distance from ours")
    if len(data["losses"]) > 1:
        right.set_yscale("log")
        right.legend()
    return figure


# Section of the report, file, how it is drawn, caption
PLOTS = [("Speed", "speed.png", plot_speed, "MFU of each contestant, and tokens/s"),
         ("Where a step goes", "step.png", plot_step, "How a step divides among kernels"),
         ("Matmuls", "matmuls.png", plot_matmuls, "Each matmul beside its ceiling"),
         ("Losses", "losses.png", plot_curve, "Losses of all contestants, and their distances")]


def draw_plots(results, folder):
    """[(section, file name, caption)] of what was drawn."""
    pyplot, drawn = pyplot_or_none(), []
    if pyplot is None:
        return drawn
    for section, name, draw, caption in PLOTS:
        figure = draw(pyplot, results)
        if figure is not None:
            figure.savefig(os.path.join(folder, name))
            pyplot.close(figure)
            drawn.append((section, name, caption))
    return drawn

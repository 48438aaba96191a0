"""The report of gpu.py: Markdown from the numbers in results.json, whatever of them is there.

Each function below is one section; it returns lines, none where its part was not measured. Plots are
gpu_plots.py's and lie beside the report.
"""
import os
import statistics

from gpu_model import BANDWIDTH_BOUND, Shape, all_matmuls, attention_flops, floor, kernel_bytes, matmul_launches

# What others published for one H100 (dense BF16: 989 TFLOP/s): tokens/s, MFU, and where it says so.
PUBLISHED = {
    "gpt2": (468e3, 0.38, "llm.c, first log of modded-nanogpt"),
    "gpt2-medium": (188e3, 0.43, "llm.c, modded-nanogpt's README"),
    "gpt2-xl": (47.7e3, 0.473, "llm.c, its discussion 677"),
}
# Causal attention in BF16, TFLOP/s on an H100: {(head size, T): ...}, by the papers of FlashAttention-2 and -3.
PUBLISHED_ATTENTION = {
    (64, 2048): {"forward": {"FA2": 262, "cuDNN": 334, "FA3": 371}, "both": {"FA2": 232}},
    (64, 8192): {"forward": {"FA2": 295, "cuDNN": 379, "FA3": 460}, "both": {"FA2": 273}},
    (128, 2048): {"forward": {"FA2": 298, "cuDNN": 484, "FA3": 521}, "both": {"FA2": 265}},
    (128, 8192): {"forward": {"FA2": 333, "cuDNN": 529, "FA3": 602}, "both": {"FA2": 308}},
}
BAR = 30


# ---- Numbers and tables as text

def number(x, digits=3):
    """Three digits that count: 0.0123, 12.0, 1,230."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}"


def percent(x):
    return "-" if x is None else f"{100 * x:.1f} %"


def gigabytes(b):
    return "-" if b is None else f"{b / 1e9:.2f} GB" if b >= 1e9 else f"{b / 1e6:.1f} MB"


def ratio(a, b):
    return a / b if a and b else None


def times(x):
    return "-" if x is None else f"{x:.2f}x"


def bar(share):
    return "#" * round(BAR * min(1, max(0, share)))


def table(head, rows):
    if not rows:
        return []
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in cells] + [""]


def section(title, *blocks):
    lines = [line for block in blocks for line in block]
    return [f"## {title}", "", *lines] if lines else []


def paragraph(text):
    return [text, ""]


# ---- What several sections need

def models_of(results):
    return [name for name in results["size"]["models"] if name in results["ours"]]


def shape_of(results, model):
    return Shape(**results["ours"][model]["shape"])


def ceilings_of(results, model):
    """One model's ceilings, in gpu_model's terms."""
    ceilings = results.get("ceilings") or {}
    return {"copy_bytes_per_s": ceilings.get("copy_bytes_per_s"), **(ceilings.get("models", {}).get(model, {}))}


def floor_of(results, model):
    return floor(shape_of(results, model), ceilings_of(results, model), results["size"]["total_batch"])


def bandwidth_bound(results, model):
    """Bytes that the kernels bound by bandwidth must move in a step as it was traced, and their seconds."""
    ours = results["ours"][model]
    shape, trace = shape_of(results, model), ours["trace"]
    need, moved, seconds = kernel_bytes(shape), 0.0, 0.0
    for kernel in trace["kernels"]:
        if kernel["name"] in BANDWIDTH_BOUND and kernel["pass"] != "recompute":
            moved += need[kernel["name"]] * (1 if kernel["pass"] == "update" else trace["micro_batches"])
            seconds += kernel["ms"] / 1000
    return {"bytes": moved, "seconds": seconds, "rate": ratio(moved, seconds), "copy": ceilings_of(results, model).get("copy_bytes_per_s")}


def idle_shares(ours):
    """Of the traced step, between kernels; and of the untraced ones, whatever the same kernels do not fill."""
    trace = ours["trace"]
    traced_step = ours["accumulation"] * ours["micro_batch_ms"] + ours["rest_ms"]
    return 1 - trace["busy_ms"] / trace["period_ms"], max(0.0, 1 - trace["busy_ms"] / traced_step)


def attention_rates(point, seconds):
    """FLOP/s forward, and forward + backward."""
    flops = attention_flops(point["B"], point["T"], point["NH"], point["HS"])
    both = seconds["forward_s"] + seconds["backward_s"]
    return flops["forward"] / seconds["forward_s"], (flops["forward"] + flops["backward"]) / both


def best_attention(point):
    """PyTorch's fastest forward and its fastest forward + backward, each with its name."""
    worked = {name: attention_rates(point, t) for name, t in (point.get("torch") or {}).items() if "forward_s" in t}
    if not worked:
        return None
    return tuple(max(((rates[i], name) for name, rates in worked.items())) for i in (0, 1))


# ---- Head

def head(results):
    about = results["about"]
    record = next((run["run"] for run in results["ours"].values()), None)
    device = about["smi"].get("name") or (record or {}).get("device", "an unknown device")
    dry = about["device_option"] == "cpu"
    lines = [f"# Dry run on a CPU, not a measurement: {device}" if dry else f"# gpt.cu on {device}", ""]
    if dry:
        lines += paragraph("**Every figure below is of a tiny model on a CPU. It shows that each part of the benchmark runs, and "
                           "says nothing about a GPU, nor about which contestant is faster.**")
    smi, rows = about["smi"], [["device", device]]
    if smi:
        rows.append(["memory", f"{smi['memory_mib']} MiB, {smi['memory_used_mib']} MiB in use before the first run"])
        rows.append(["clocks", f"SM {smi['sm_mhz']} MHz at the start, {smi['sm_max_mhz']} MHz at most; memory {smi['memory_mhz']} MHz; "
                               f"power limit {smi['power_limit_w']} W; {smi['temperature_c']} C at the start"])
        rows.append(["driver", smi["driver"]])
    if record:
        rows.append(["peak for MFU", f"{about.get('peak_flops', record['peak_flops']) / 1e12:,.4g} TFLOP/s, {record['precision']} ({record['peak_source']})"])
        if not dry:
            rows.append(["CUDA", f"runtime {version(record['cuda_runtime'])}, driver's {version(record['cuda_driver'])}, cuBLASLt {record['cublaslt']}"])
    rows += [["nvcc", about["nvcc"] or "not on PATH"], ["PyTorch", about["pytorch"] or "not found"], ["commit", about["commit"] or "unknown: no git repository"],
             ["date", about["date"]], ["command", f"`{about['command']}`"],
             ["time", f"{about.get('seconds', 0):.0f} s of {about['minutes']:g} minutes"]]
    return lines + table(["", ""], rows)


def version(number_):
    return f"{number_ // 1000}.{number_ % 1000 // 10}"


def missing(results):
    """What was not run, first of all."""
    left = [[part["title"], part["status"], part["why"]] for part in results["parts"] if part["status"] != "done"]
    return section("Not run", table(["part", "", "why"], left)) if left else []


# ---- Speed

def speed(results):
    rows = []
    for model in models_of(results):
        ours, torch, llmc = results["ours"][model], results["torch"].get(model), results["llmc"].get(model)
        best, published = floor_of(results, model), PUBLISHED.get(model)
        reached = best and best["total"] and best["total"] * ours["tokens_per_s"] / 1e9
        rows.append([model, number(ours["tokens_per_s"]), percent(ours["mfu"]),
                     *peer_cells(ours, torch), *peer_cells(ours, llmc), percent(reached),
                     f"{number(published[0])} ({percent(published[1])}; {published[2]})" if published else "-"])
    batch = results["size"]["total_batch"]
    precision = next((results["ours"][model]["run"]["precision"] for model in models_of(results)), "").upper()
    return section("Speed", paragraph(f"Tokens/s of a step of {batch:,} tokens, {precision}, gradients FP32, nothing recomputed. Each ratio is ours over theirs: "
                                      "above 1 we are faster. MFU counts the same FLOPs for all. The floor is explained below."),
                   table(["model", "ours", "MFU", "PyTorch", "MFU", "ours / PyTorch", "llm.c", "MFU", "ours / llm.c", "share of the floor", "published, H100"], rows))


def peer_cells(ours, peer):
    return [number(peer["tokens_per_s"]), percent(peer["mfu"]), times(ratio(ours["tokens_per_s"], peer["tokens_per_s"]))] if peer else ["-", "-", "-"]


def as_run(results):
    rows = []
    for model in models_of(results):
        for name, runs in (("ours", results["ours"]), ("PyTorch", results["torch"]), ("llm.c", results["llmc"])):
            run = runs.get(model)
            if not run:
                continue
            seq_len = results["ours"][model]["seq_len"]
            tokens = run["micro_batch"] * seq_len * run["accumulation"]
            rows.append([model, name, f"{run['micro_batch']} x {seq_len}", run["accumulation"], f"{tokens:,}", len(run["timed_ms"]),
                         f"{number(run['step_ms'], 4)} ({number(min(run['timed_ms']), 4)} to {number(max(run['timed_ms']), 4)})",
                         number(run.get("micro_batch_ms"), 4), number(run.get("rest_ms"), 4), number(run["full_step_ms"], 4),
                         "scaled" if run["scaled"] else "measured", remark_of(name, run)])
    text = ("What was run for the table above. Where steps had fewer tokens than the whole batch, the step of the table is *scaled*: as many "
            "micro-batches as the batch has, at the measured time of one, and once the time of what a step has once: clipping and the update, and for ours "
            "also what lies between two steps. Ours is taken from the trace, PyTorch's from events around it.")
    return section("As it was run", paragraph(text) if rows else [],
                   table(["model", "", "micro-batch", "micro-batches", "tokens a step", "steps timed", "ms a step, median (range)", "ms a micro-batch",
                          "ms once a step", "ms, whole step", "", "remarks"], rows))


def remark_of(name, run):
    remarks = []
    if name == "PyTorch":
        remarks.append({"whole": "torch.compile of the whole model", "blocks": "torch.compile of each block", "no": "not compiled"}[run["begin"]["compile"]])
        if run["too_large"]:
            remarks.append(f"out of memory with {', '.join(map(str, run['too_large']))}")
        if run["memory"]:
            remarks.append(f"{gigabytes(run['memory']['allocated'])} allocated at most")
    elif name == "llm.c":
        remarks.append({True: "with cuDNN", False: "without cuDNN", None: "cuDNN unknown"}[run["cudnn"]] + ", gradients BF16")
        if run["used_bytes"]:
            remarks.append(f"{gigabytes(run['used_bytes'])} of the device in use")
    elif run["used_bytes"]:
        remarks.append(f"{gigabytes(run['used_bytes'])} " + ("of the device in use" if run["run"]["peak_source"] != "measured matmul" else "in use at the end"))
    if run.get("ended"):
        remarks.append("ended at its time limit")
    return ", ".join(remarks)


# ---- The goals that README.md lists

GOALS = {   # row: goal
    "GPT-2 124M": "> 468k tokens/s, 38 % MFU",
    "GPT-2 1558M": "> 47.7k tokens/s, 47.3 % MFU",
    "attention forward, T = 2k / 8k": "≥ 262 / 295 TFLOP/s",
    "attention forward + backward, T = 2k / 8k": "≥ 232 / 273 TFLOP/s",
    "kernels bound by memory": "≥ 90 % of a copy's bandwidth",
    "idle between kernels": "≤ 1 % of a step",
}


def goals(results):
    """The same rows as README.md's table, to be copied there."""
    ours, found = results["ours"], {}
    for row, model in (("GPT-2 124M", "gpt2"), ("GPT-2 1558M", "gpt2-xl")):
        if model in ours:
            found[row] = f"{number(ours[model]['tokens_per_s'])} tokens/s, {percent(ours[model]['mfu'])} MFU"
    measured = {(p["HS"], p["T"]): attention_rates(p, p["ours"]) for p in (results["attention"] or {}).get("points", []) if "ours" in p}
    if (64, 2048) in measured and (64, 8192) in measured:
        for i, row in enumerate(("attention forward, T = 2k / 8k", "attention forward + backward, T = 2k / 8k")):
            found[row] = " / ".join(number(measured[64, T][i] / 1e12) for T in (2048, 8192)) + " TFLOP/s"
    if "gpt2" in ours:
        bound = bandwidth_bound(results, "gpt2")
        if bound["copy"] and bound["rate"]:
            found["kernels bound by memory"] = f"{percent(bound['rate'] / bound['copy'])} of a copy's bandwidth"
        found["idle between kernels"] = f"{percent(idle_shares(ours['gpt2'])[1])} of a step"
    if not found:
        return []
    when = f"{results['about']['smi'].get('name', 'unknown card')}, {results['about']['date'].split()[0]}"
    rows = [[row, goal, f"{found[row]} ({when})" if row in found else "not measured"] for row, goal in GOALS.items()]
    return section("Goals", paragraph("The rows of README.md's table; attention with heads of 64, the last two rows of GPT-2 124M."),
                   table(["", "goal", "measured here"], rows))


# ---- Where a step goes

def passes(results):
    rows = []
    for model in models_of(results):
        ours = results["ours"][model]
        trace, count = ours["trace"], ours["trace"]["micro_batches"]
        traced, untraced = idle_shares(ours)
        each = {name: ms / count for name, ms in trace["passes"].items() if name != "update"}
        rows.append([model, *[number(each.get(name)) for name in ("forward", "head", "backward", "recompute")],
                     number(trace["passes"].get("update", 0)), percent(traced), percent(untraced), number(trace["gap_us"]["median"]),
                     f"{trace['kernels_launched']:,}", number(trace["cpu_ahead_ms"])])
    text = ("Kernels' time, from `--trace`: ms of a micro-batch, and of the update once a step. *Head* is the logits' matmul, the loss, and both of their "
            "backward matmuls, which run at once. *Idle* is the part of a step in which no kernel ran: in the traced step, where the events around each kernel "
            "add to it, and in the steps that were not traced, as what the same kernels' time leaves of them. The CPU hands a kernel over so many ms before "
            "it begins; where that is near 0 the device waits for the CPU, and part of the waiting counts as the kernel's.")
    return section("Where a step goes", paragraph(text) if rows else [],
                   table(["model", "forward", "head", "backward", "recompute", "update", "idle, traced", "idle, untraced", "median gap, us", "kernels a step",
                          "CPU ahead, ms"], rows),
                   *[kernels(results, model) for model in models_of(results)])


def kernels(results, model):
    """By kernel, the largest first; with what it reached of its ceiling."""
    ours, shape, ceilings = results["ours"][model], shape_of(results, model), ceilings_of(results, model)
    trace, need, copy = ours["trace"], kernel_bytes(shape), ceilings.get("copy_bytes_per_s")
    head_size, attention = shape.channels // shape.heads, ceilings.get("attention")
    flops = attention_flops(shape.micro_batch, shape.seq_len, shape.heads, head_size)
    backward_ms = sum(k["ms"] for k in trace["kernels"] if k["name"].startswith("attention_backward"))
    rows = []
    for kernel in sorted(trace["kernels"], key=lambda k: -k["ms"]):
        share, count = kernel["ms"] / trace["busy_ms"], 1 if kernel["pass"] == "update" else trace["micro_batches"]
        if share < 0.002:
            continue
        rate, reached, name = "-", None, kernel["name"]
        if name in need and name in BANDWIDTH_BOUND and kernel["pass"] != "recompute":
            moved = need[name] * count / (kernel["ms"] / 1000)
            rate, reached = f"{number(moved / 1e9)} GB/s", ratio(moved, copy)
        elif name.startswith("matmul") and trace["matmuls"] and kernel["pass"] in ("forward", "backward"):
            own = [m for m in all_matmuls(shape) if m.name.endswith("forward" if kernel["pass"] == "forward" else ("dweight", "dinput")) == m.layers
                   and (m.layers or kernel["pass"] == "forward")]
            done = count * sum(m.flops * matmul_launches(shape, m) for m in own) / (kernel["ms"] / 1000)
            rate, reached = f"{number(done / 1e12)} TFLOP/s", ceiling_share(own, shape, ceilings, kernel["ms"] / 1000 / count)
        elif name.startswith("attention") and kernel["pass"] in flops:
            ms = backward_ms if kernel["pass"] == "backward" else kernel["ms"]
            seconds = ms / 1000 / count / shape.layers
            rate = f"{number(flops[kernel['pass']] / seconds / 1e12)} TFLOP/s"
            reached = attention and attention[f"{kernel['pass']}_s"] / seconds
        rows.append([f"{name}", kernel["pass"], number(kernel["ms"] / count), f"{kernel['launches'] // count:,}", percent(share), f"`{bar(share)}`", rate,
                     percent(reached)])
    bound = bandwidth_bound(results, model)
    text = f"{model}, micro-batch {shape.micro_batch}: ms of a micro-batch (of the update: of a step)."
    if bound["rate"]:
        text += f" The kernels bound by bandwidth move {number(bound['rate'] / 1e9)} GB/s together" + \
            (f", {percent(bound['rate'] / bound['copy'])} of a copy's {number(bound['copy'] / 1e9)} GB/s." if bound["copy"] else ".")
    return [f"### {model}", "", *paragraph(text),
            *table(["kernel", "pass", "ms", "launches", "share of kernels' time", "", "rate", "of its ceiling"], rows)]


def ceiling_share(wanted, shape, ceilings, seconds):
    """What PyTorch's matmuls of the same shapes take, over ours."""
    best = {entry["name"]: entry["s"] for entry in ceilings.get("matmuls", [])}
    if any(matmul.name not in best for matmul in wanted):
        return None
    return sum(best[m.name] * matmul_launches(shape, m) for m in wanted) / seconds


# ---- Matmuls

def matmul_table(results):
    blocks = []
    for model in models_of(results):
        ours, shape, ceilings = results["ours"][model], shape_of(results, model), ceilings_of(results, model)
        best = {entry["name"]: entry["s"] for entry in ceilings.get("matmuls", [])}
        named = ours["trace"]["matmuls"]
        rows, peak = [], results["about"]["peak_flops"]
        for matmul in all_matmuls(shape):
            if matmul.name not in best and not named:
                continue
            mine = named and named[matmul.name]["ms"] / 1000 / named[matmul.name]["launches"]
            theirs = best.get(matmul.name)
            rows.append([matmul.name, f"{matmul.M} x {matmul.N} x {matmul.K}", number(mine and 1000 * mine), number(mine and matmul.flops / mine / 1e12),
                         number(theirs and matmul.flops / theirs / 1e12), percent(mine and theirs and theirs / mine),
                         percent(mine and matmul.flops / mine / peak)])
        if rows:
            remark = [] if named else paragraph("The trace's matmuls did not come in the order or number that the model has: only the ceilings are known.")
            blocks.append([f"### {model}", "", *remark, *table(["matmul", "M x N x K", "ours, ms", "ours, TFLOP/s", "ceiling, TFLOP/s", "share",
                                                                "ours, of the peak"], rows)])
    text = ("Ours with what they do besides: bias, GELU' and, for dweight, adding into FP32 gradients. The ceiling is PyTorch's matmul (cuBLAS) of the same "
            "shape and orientation, on random numbers, with a result in the inputs' type and nothing besides: the best of five.")
    return section("Matmuls", paragraph(text) if blocks else [], *blocks)


# ---- The floor

def floors(results):
    rows = []
    for model in models_of(results):
        best = floor_of(results, model)
        if not best:
            continue
        ours = 1e9 / results["ours"][model]["tokens_per_s"]
        total = best["total"]
        rows.append([model, *[number(best[name]) for name in ("matmuls", "attention", "layernorm, residual, bias", "logits", "update")], number(total),
                     number(total and 1e9 / total), number(ours), percent(total and total / ours)])
    copy = (results.get("ceilings") or {}).get("copy_bytes_per_s")
    text = ("The time of a token, in ns, if each part of a step ran at the best rate measured above: the model's matmuls at PyTorch's speed, attention at that of "
            "PyTorch's fastest kernel, and what must be moved at the bandwidth of a device-to-device copy"
            + (f" ({number(copy / 1e9)} GB/s, bytes read and written)" if copy else "") +
            ". LayerNorms, residuals and bias gradients: 25 values of C a layer, and 11 more; logits: read and written once by the loss; GELU: free.")
    return section("The floor", paragraph(text) if rows else [],
                   table(["model", "matmuls", "attention", "LayerNorm, residual, bias", "logits", "update", "floor, ns", "floor, tokens/s", "ours, ns", "share"], rows))


# ---- Recomputation

def recomputation(results):
    rows, same = [], True
    for model, modes in results["recompute"].items():
        reference = modes.get("none")
        for mode, run in modes.items():
            used = run["used_bytes"]
            common = list(zip(run["losses"], reference["losses"]))
            same = same and all(a == b for a, b in common)
            rows.append([model, mode, number(run["tokens_per_s"]), times(run["tokens_per_s"] / reference["tokens_per_s"]), percent(run["mfu"]), percent(run["hfu"]),
                         number(run["passes"].get("recompute", 0) / run["micro_batches"]), gigabytes(run["planned_bytes"]), gigabytes(used),
                         f"{(used - run['planned_bytes']) / 1e9:+.2f} GB" if used else "-", gigabytes(run["activation_bytes"]), run["max_micro_batch"]])
    if not rows:
        return []
    text = ("The same micro-batch in all modes. *In use* is what the driver says of the whole card when the run ends, the context and other programs with it; "
            "the plan sets 600 MiB aside for the context. The losses of all modes are " + ("the same bits." if same else "NOT the same: they should be."))
    return section("Recomputation", paragraph(text if results["about"]["device_option"] == "gpu" else
                                              text.replace("what the driver says of the whole card when the run ends, the context and other programs with it; "
                                                           "the plan sets 600 MiB aside for the context", "the program's resident memory, on a CPU")),
                   table(["model", "recompute", "tokens/s", "against none", "MFU", "HFU", "ms recomputing, a micro-batch", "planned", "in use", "difference",
                          "activations, planned", "largest micro-batch"], rows))


# ---- Attention alone

def attention(results):
    data = results["attention"] or {}
    rows = []
    for point in data.get("points", []):
        published = PUBLISHED_ATTENTION.get((point["HS"], point["T"]), {})
        cells = [point["HS"], f"{point['T']:,}", point["B"], point["NH"]]
        ours = attention_rates(point, point["ours"]) if "ours" in point else (None, None)
        best = best_attention(point)
        for i, kind in ((0, "forward"), (1, "both")):
            theirs = best and best[i]
            cells += [number(ours[i] and ours[i] / 1e12), f"{number(theirs[0] / 1e12)} ({theirs[1]})" if theirs else "-",
                      times(ratio(ours[i], theirs and theirs[0])), ", ".join(f"{name} {rate}" for name, rate in published.get(kind, {}).items()) or "-"]
        rows.append(cells)
    errors = [f"Head size {p['HS']}, T = {p['T']}: {p['error']}" for p in data.get("points", []) if "error" in p]
    errors += [f"PyTorch's {name}, head size {p['HS']}, T = {p['T']}: {t['error']}" for p in data.get("points", []) for name, t in (p.get("torch") or {}).items() if "error" in t]
    text = (f"Causal, {data['tokens']:,} tokens, {data['channels']:,} channels in all; TFLOP/s, forward and then forward + backward, counted as in FlashAttention's papers "
            "(half the square; backward 2.5 times forward). Ours are the kernels in a trace of a model of one layer; PyTorch's "
            "`scaled_dot_product_attention` on views of a (B, T, 3, NH, HS) tensor, the fastest of its backends; published: H100.") if rows else ""
    return section("Attention alone", paragraph(text) if rows else [],
                   table(["head size", "T", "B", "heads", "ours", "PyTorch", "ours / PyTorch", "published", "ours, both", "PyTorch, both", "ours / PyTorch", "published"], rows),
                   *[paragraph(error) for error in errors])


# ---- Losses

def curve(results):
    data = results["curve"]
    if not data or not data["losses"]:
        return []
    names = list(data["losses"])
    steps = sorted({1, 2, 5, 10, 20, 50} | set(range(25, data["steps"] + 1, 25)) | {data["steps"]})
    ours = data["losses"]["ours"]
    rows = []
    for step in steps:
        values = [data["losses"][name][step - 1] if step <= len(data["losses"][name]) else None for name in names]
        if values[0] is None:
            continue
        rows.append([step, *[f"{value:.4f}" if value is not None else "-" for value in values],
                     *[f"{values[i] - values[0]:+.5f}" if values[i] is not None else "-" for i in range(1, len(names))],
                     f"`{bar((values[0] - min(ours)) / ((max(ours) - min(ours)) or 1))}`"])
    model = data["model"]
    llmc = (" llm.c reads the same weights in BF16, which holds them exactly; it always shuffles, so its shard is laid out such that its shuffle gives our order."
            if "llm.c" in names else "")
    text = (f"{data['steps']} steps of {data['batch']:,} tokens on the same tokens ({', '.join(data['data'])}, in file order, around and around where it is shorter; each batch "
            f"begins with the same token), from the same weights, a checkpoint of ours at step 0, rounded to BF16: {model['layers']} layers, {model['channels']} channels, "
            f"vocabulary {model['vocab']:,}, T = {data['seq_len']:,}, {data['precision'].upper()}. AdamW 0.9, 0.95, decay 0.1 of matrices, clipped at 1; warm-up over "
            f"{data['warmup']} steps to {data['lr']:g}, then a cosine to a tenth. PyTorch is not compiled here.{llmc}")
    found = [f"Ours and {name}: the losses differ by at most {d['largest']:.5f}, at step {d['step']}; by {d['first']:.6f} at step 1, by {d['mean_of_last']:.5f} on average over "
             f"the last {d['last']} of {d['steps']} steps." for name, d in data["differences"].items() if d]
    return section("Losses", paragraph(text), *[paragraph(line) for line in found], *[paragraph(remark) for remark in data["remarks"]],
                   table(["step", *names, *[f"{name} - ours" for name in names[1:]], "ours"], rows))


# ---- dev/kernels, and the end

def study_kernels(results):
    blocks = []
    for entry in results["kernels"]:
        blocks.append([f"### {entry['name']}", ""] + (entry["markdown"].rstrip().splitlines() if "markdown" in entry else [entry["error"]]) + [""])
        if entry["code"] != 0 and "markdown" in entry:
            blocks.append(paragraph(f"It ended with exit code {entry['code']}."))
    return section("The kernels of dev/kernels", *blocks)


def what_was_run(results):
    rows = []
    for part in results["parts"]:
        gpu = part.get("gpu")
        rows.append([part["title"], part["status"], f"{part['seconds']:.0f}", f"{gpu['sm_mhz']['median']:.0f} ({gpu['sm_mhz']['least']:.0f})" if gpu else "-",
                     f"{gpu['power_w']:.0f}" if gpu else "-", f"{gpu['temperature_c']:.0f}" if gpu else "-"])
    errors = (results.get("ceilings") or {}).get("errors", [])
    return section("Parts", table(["part", "", "s", "SM clock at work, MHz: median (least)", "most W", "most C"], rows),
                   *[paragraph(f"A ceiling that could not be measured: {error}") for error in errors])


def how(results):
    commands = [run["command"] for run in results["ours"].values()] + [run["command"] for run in results["llmc"].values()]
    text = (f"Contestants run one after the other, each in a process of its own. Timing is on random tokens whose frequencies fall as 1/rank, as in language. Ours is timed from the "
            "fourth step on, the first three being traced; PyTorch from the third, llm.c from the second. A figure is a median of steps.")
    return section("How it was measured", paragraph(text), ["```", *commands, "```", ""] if commands else [])


SECTIONS = [head, missing, speed, goals, as_run, passes, matmul_table, floors, recomputation, attention, curve, study_kernels, what_was_run, how]


def write_report(results, folder, plots=()):
    """report.md, whole at any moment. plots: (title of the section that it belongs to, file name, caption)."""
    lines = [line for section_ in SECTIONS for line in section_(results)]
    for title, name, caption in plots:
        at = lines.index(f"## {title}") + 2
        lines[at:at] = [f"![{caption}]({name})", ""]
    path = os.path.join(folder, "report.md")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    os.replace(path + ".new", path)
    return path

"""The report of gpu.py: Markdown from the numbers in results.json, whatever of them is there.

Each function of SECTIONS, at the end, is one section; it returns lines, none where its part was not measured.
Plots are gpu_plots.py's and lie beside the report.
"""
import os

from gpu_model import (BANDWIDTH_BOUND, Shape, all_matmuls, attention_flops, floor, kernel_bytes, matmul_launches,
                       matmuls)

# What others published for one H100 (dense BF16: 989 TFLOP/s): tokens/s, MFU, and where it says so.
PUBLISHED = {
    "gpt2": (468e3, 0.38, "llm.c, first log of modded-nanogpt"),
    "gpt2-medium": (188e3, 0.43, "llm.c, modded-nanogpt's README"),
    "gpt2-xl": (47.7e3, 0.473, "llm.c, its discussion 677"),
}
# Causal attention in BF16, TFLOP/s on an H100, for {(head size, T): ...}; both: forward + backward.
PUBLISHED_ATTENTION = {
    (64, 2048): {"forward": {"FA2": 262, "cuDNN": 334, "FA3": 371}, "both": {"FA2": 232}},
    (64, 8192): {"forward": {"FA2": 295, "cuDNN": 379, "FA3": 460}, "both": {"FA2": 273}},
    (128, 2048): {"forward": {"FA2": 298, "cuDNN": 484, "FA3": 521}, "both": {"FA2": 265}},
    (128, 8192): {"forward": {"FA2": 333, "cuDNN": 529, "FA3": 602}, "both": {"FA2": 308}},
}
# The rows that README.md lists, and their goals.
SPEED_124M, SPEED_1558M = "GPT-2 124M", "GPT-2 1558M"
ATTENTION_FORWARD = "attention forward, T = 2k / 8k"
ATTENTION_BOTH = "attention forward + backward, T = 2k / 8k"
MEMORY_BOUND, IDLE = "kernels bound by memory", "idle between kernels"
GOALS = {
    SPEED_124M: "≥ 600k tokens/s, 50 % MFU",
    SPEED_1558M: "≥ 60k tokens/s, 60 % MFU",
    ATTENTION_FORWARD: "≥ 370 / 460 TFLOP/s",
    ATTENTION_BOTH: "≥ 300 / 350 TFLOP/s",
    MEMORY_BOUND: "≥ 85 % of a copy's bandwidth",
    IDLE: "< 2 % of a step",
}
BAR = 30                # signs of a bar that is full
LEAST_SHARE = 0.002     # of a step's kernels: what takes less time is left out of the list


# ---- Numbers and Markdown as text

def number(x, digits=3):
    """Three digits that count: 0.0123, 12.0, 1,230."""
    if x is None:
        return "-"
    if x == 0:
        return "0"
    return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}"


def tera(x):
    return number(x and x / 1e12)


def giga(x):
    return number(x and x / 1e9)


def percent(x):
    return "-" if x is None else f"{100 * x:.1f} %"


def gigabytes(b):
    return "-" if b is None else f"{b / 1e9:.2f} GB" if b >= 1e9 else f"{b / 1e6:.1f} MB"


def ratio(a, b):
    return a / b if a and b else None


def times(x):
    return "-" if x is None else f"{x:.2f}x"


def bar(share):
    return "`" + "#" * round(BAR * min(1, max(0, share))) + "`"


def table(head, rows):
    if not rows:
        return []
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [head, *cells]]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def prose(text):
    """A paragraph, from however many lines."""
    return [" ".join(text.split()), ""]


def section(title, *blocks):
    lines = [line for block in blocks for line in block]
    return [f"## {title}", "", *lines] if lines else []


def section_with_table(title, text, head, rows):
    """Nothing where the table is empty."""
    return section(title, prose(text), table(head, rows)) if rows else []


# ---- What several sections need

def models_of(results):
    return [name for name in results["size"]["models"] if name in results["ours"]]


def shape_of(results, model):
    return Shape(**results["ours"][model]["shape"])


def ceilings_of(results, model):
    """One model's ceilings, in gpu_model's terms."""
    ceilings = results.get("ceilings") or {}
    return {"copy_bytes_per_s": ceilings.get("copy_bytes_per_s"), **(ceilings.get("models", {}).get(model, {}))}


def best_matmuls(results, model):
    """{matmul: seconds} of the ceilings."""
    return {entry["name"]: entry["s"] for entry in ceilings_of(results, model).get("matmuls", [])}


def floor_of(results, model):
    return floor(shape_of(results, model), ceilings_of(results, model), results["size"]["total_batch"])


def bandwidth_bound(results, model):
    """What the kernels bound by bandwidth move in a second, all together, and what a copy does."""
    ours = results["ours"][model]
    need, trace, moved, seconds = kernel_bytes(shape_of(results, model)), ours["trace"], 0.0, 0.0
    for kernel in trace["kernels"]:
        if kernel["name"] in BANDWIDTH_BOUND and kernel["pass"] != "recompute":
            moved += need[kernel["name"]] * (1 if kernel["pass"] == "update" else trace["micro_batches"])
            seconds += kernel["ms"] / 1000
    return ratio(moved, seconds), ceilings_of(results, model).get("copy_bytes_per_s")


def idle_shares(ours):
    """Of the traced step, between kernels; and of the untraced ones, whatever the same kernels do not fill."""
    trace = ours["trace"]
    untraced_ms = ours["accumulation"] * ours["micro_batch_ms"] + ours["rest_ms"]
    return 1 - trace["busy_ms"] / trace["period_ms"], max(0.0, 1 - trace["busy_ms"] / untraced_ms)


def attention_rates(point, seconds):
    """FLOP/s forward, and forward + backward."""
    flops = attention_flops(point["B"], point["T"], point["NH"], point["HS"])
    both = seconds["forward_s"] + seconds["backward_s"]
    return flops["forward"] / seconds["forward_s"], (flops["forward"] + flops["backward"]) / both


def best_attention(point):
    """PyTorch's fastest forward and its fastest forward + backward, each with its name."""
    worked = {name: attention_rates(point, t) for name, t in (point.get("torch") or {}).items() if "forward_s" in t}
    return [max((rates[i], name) for name, rates in worked.items()) for i in (0, 1)] if worked else None


# ---- Head

def head(results):
    about = results["about"]
    record = next((run["run"] for run in results["ours"].values()), None)
    device = about["smi"].get("name") or (record or {}).get("device", "an unknown device")
    dry = about["device_option"] == "cpu"
    lines = [f"# Dry run on a CPU, not a measurement: {device}" if dry else f"# gpt.cu on {device}", ""]
    if dry:
        lines += prose("""**Every figure below is of a tiny model on a CPU. It shows that each part of the benchmark
                          runs, and says nothing about a GPU, nor about which contestant is faster.**""")
    smi, rows = about["smi"], [["device", device]]
    if smi:
        rows.append(["memory", f"{smi['memory_mib']} MiB, {smi['memory_used_mib']} MiB in use before the first run"])
        rows.append(["clocks", f"SM {smi['sm_mhz']} MHz at the start, {smi['sm_max_mhz']} MHz at most; memory "
                               f"{smi['memory_mhz']} MHz; power limit {smi['power_limit_w']} W; "
                               f"{smi['temperature_c']} C at the start"])
        rows.append(["driver", smi["driver"]])
    if record:
        peak = about.get("peak_flops", record["peak_flops"])
        rows.append(["peak for MFU", f"{peak / 1e12:,.4g} TFLOP/s, {record['precision']} ({record['peak_source']})"])
        if not dry:
            rows.append(["CUDA", f"runtime {version(record['cuda_runtime'])}, the driver's "
                                 f"{version(record['cuda_driver'])}, cuBLASLt {record['cublaslt']}"])
    rows += [["nvcc", about["nvcc"] or "not on PATH"], ["PyTorch", about["pytorch"] or "not found"],
             ["commit", about["commit"] or "unknown: no git repository"], ["date", about["date"]],
             ["command", f"`{about['command']}`"],
             ["time", f"{about.get('seconds', 0):.0f} s of {about['minutes']:g} minutes"]]
    return lines + table(["", ""], rows)


def version(cuda):
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def missing(results):
    """What was not run, first of all."""
    left = [[part["title"], part["status"], part["why"]] for part in results["parts"] if part["status"] != "done"]
    return section("Not run", table(["part", "", "why"], left))


# ---- Speed

def speed(results):
    rows = []
    for model in models_of(results):
        ours, torch, llmc = results["ours"][model], results["torch"].get(model), results["llmc"].get(model)
        best, published = floor_of(results, model), PUBLISHED.get(model)
        reached = best["total"] * ours["tokens_per_s"] / 1e9 if best and best["total"] else None
        source = f"{number(published[0])} ({percent(published[1])}; {published[2]})" if published else "-"
        rows.append([model, number(ours["tokens_per_s"]), percent(ours["mfu"]), *peer_cells(ours, torch),
                     *peer_cells(ours, llmc), percent(reached), source])
    precision = next((results["ours"][model]["run"]["precision"] for model in models_of(results)), "").upper()
    text = f"""Tokens/s of a step of {results['size']['total_batch']:,} tokens, {precision}, gradients FP32, nothing
               recomputed. Each ratio is ours over theirs: above 1 we are faster. MFU counts the same FLOPs for all.
               The floor is explained below."""
    return section_with_table("Speed", text, [
        "model", "ours", "MFU", "PyTorch", "MFU", "ours / PyTorch", "llm.c", "MFU", "ours / llm.c",
        "share of the floor", "published, H100"], rows)


def peer_cells(ours, peer):
    if not peer:
        return ["-", "-", "-"]
    speeds = ours["tokens_per_s"], peer["tokens_per_s"]
    return [number(speeds[1]), percent(peer["mfu"]), times(ratio(*speeds))]


def as_run(results):
    rows = []
    for model in models_of(results):
        seq_len = results["ours"][model]["seq_len"]
        for name, runs in (("ours", results["ours"]), ("PyTorch", results["torch"]), ("llm.c", results["llmc"])):
            run = runs.get(model)
            if not run:
                continue
            timed = run["timed_ms"]
            rows.append([model, name, f"{run['micro_batch']} x {seq_len}", run["accumulation"],
                         f"{run['micro_batch'] * seq_len * run['accumulation']:,}", len(timed),
                         f"{number(run['step_ms'], 4)} ({number(min(timed), 4)} to {number(max(timed), 4)})",
                         number(run.get("micro_batch_ms"), 4), number(run.get("rest_ms"), 4),
                         number(run["full_step_ms"], 4), "scaled" if run["scaled"] else "measured",
                         ", ".join(remarks_on(name, run))])
    text = """What was run for the table above. Where steps had fewer tokens than the whole batch, the step of the
              table is *scaled*: as many micro-batches as the batch has, at the measured time of one, and once the
              time of what a step has once: clipping and the update, and for ours also what lies between two steps.
              Ours is taken from the trace, PyTorch's from events around it."""
    return section_with_table("As it was run", text, [
        "model", "", "micro-batch", "micro-batches", "tokens a step", "steps timed", "ms a step, median (range)",
        "ms a micro-batch", "ms once a step", "ms, whole step", "", "remarks"], rows)


def remarks_on(name, run):
    if name == "PyTorch":
        yield {"whole": "torch.compile of the whole model", "blocks": "torch.compile of each block",
               "no": "not compiled"}[run["begin"]["compile"]]
        if run["too_large"]:
            yield f"out of memory with {', '.join(map(str, run['too_large']))}"
        if run["memory"]:
            yield f"{gigabytes(run['memory']['allocated'])} allocated at most"
    elif name == "llm.c":
        yield {True: "with cuDNN", False: "without cuDNN", None: "cuDNN unknown"}[run["cudnn"]] + ", gradients BF16"
    if run.get("used_bytes"):
        yield f"{gigabytes(run['used_bytes'])} in use at the end"
    if run["ended"]:
        yield "ended at its time limit"


def goals(results):
    """The same rows as README.md's table, to be copied there."""
    ours, found = results["ours"], {}
    for row, model in ((SPEED_124M, "gpt2"), (SPEED_1558M, "gpt2-xl")):
        if model in ours:
            found[row] = f"{number(ours[model]['tokens_per_s'])} tokens/s, {percent(ours[model]['mfu'])} MFU"
    points = (results["attention"] or {}).get("points", [])
    rates = {(p["HS"], p["T"]): attention_rates(p, p["ours"]) for p in points if "ours" in p}
    if (64, 2048) in rates and (64, 8192) in rates:
        for i, row in enumerate((ATTENTION_FORWARD, ATTENTION_BOTH)):
            found[row] = f"{tera(rates[64, 2048][i])} / {tera(rates[64, 8192][i])} TFLOP/s"
    if "gpt2" in ours:
        rate, copy = bandwidth_bound(results, "gpt2")
        if rate and copy:
            found[MEMORY_BOUND] = f"{percent(rate / copy)} of a copy's bandwidth"
        found[IDLE] = f"{percent(idle_shares(ours['gpt2'])[1])} of a step"
    if not found:
        return []
    when = f"{results['about']['smi'].get('name', 'unknown card')}, {results['about']['date'].split()[0]}"
    rows = [[row, goal, f"{found[row]} ({when})" if row in found else "not measured"] for row, goal in GOALS.items()]
    text = "The rows of README.md's table; attention with heads of 64, the last two rows of GPT-2 124M."
    return section_with_table("Goals", text, ["", "goal", "measured here"], rows)


# ---- Where a step goes

def passes(results):
    rows = []
    for model in models_of(results):
        ours = results["ours"][model]
        trace, (traced, untraced) = ours["trace"], idle_shares(ours)
        each = {name: ms / trace["micro_batches"] for name, ms in trace["passes"].items()}
        rows.append([model, *[number(each.get(name)) for name in ("forward", "head", "backward", "recompute")],
                     number(trace["passes"].get("update", 0)), percent(traced), percent(untraced),
                     number(trace["gap_us"]["median"]), f"{trace['kernels_launched']:,}",
                     number(trace["cpu_ahead_ms"])])
    text = """Kernels' time, from `--trace`: ms of a micro-batch, and of the update once a step. *Head* is the
              logits' matmul, the loss, and both of their backward matmuls, which run at once. *Idle* is the part of
              a step in which no kernel ran: in the traced step, where the events around each kernel add to it, and
              in the steps that were not traced, as what the same kernels' time leaves of them. The CPU hands a
              kernel over so many ms before it begins; where that is near 0 the device waits for the CPU, and part
              of the waiting counts as the kernel's."""
    if not rows:
        return []
    columns = ["model", "forward", "head", "backward", "recompute", "update", "idle, traced", "idle, untraced",
               "median gap, us", "kernels a step", "CPU ahead, ms"]
    return section("Where a step goes", prose(text), table(columns, rows),
                   *[kernels(results, model) for model in models_of(results)])


def kernels(results, model):
    """By kernel, the largest first; with what it reached of its ceiling."""
    trace, shape, rows = results["ours"][model]["trace"], shape_of(results, model), []
    for kernel in sorted(trace["kernels"], key=lambda k: -k["ms"]):
        share, count = kernel["ms"] / trace["busy_ms"], 1 if kernel["pass"] == "update" else trace["micro_batches"]
        if share >= LEAST_SHARE:
            rows.append([kernel["name"], kernel["pass"], number(kernel["ms"] / count),
                         f"{kernel['launches'] // count:,}", percent(share), bar(share),
                         *rate_of(results, model, kernel, count)])
    text = f"{model}, micro-batch {shape.micro_batch}: ms of a micro-batch (of the update: of a step)."
    rate, copy = bandwidth_bound(results, model)
    if rate:
        text += f" The kernels bound by bandwidth move {giga(rate)} GB/s together"
        text += f", {percent(rate / copy)} of a copy's {giga(copy)} GB/s." if copy else "."
    columns = ["kernel", "pass", "ms", "launches", "share of kernels' time", "", "rate", "of its ceiling"]
    return [f"### {model}", "", *prose(text), *table(columns, rows)]


def rate_of(results, model, kernel, count):
    """A kernel's rate, in its own unit, and what that is of the ceiling; count: how often its group runs in a step."""
    trace, shape, ceilings = results["ours"][model]["trace"], shape_of(results, model), ceilings_of(results, model)
    name, in_pass, seconds = kernel["name"], kernel["pass"], kernel["ms"] / 1000 / count
    if name in BANDWIDTH_BOUND and in_pass != "recompute":
        rate = kernel_bytes(shape)[name] / seconds
        return f"{giga(rate)} GB/s", percent(ratio(rate, ceilings["copy_bytes_per_s"]))
    if name.startswith("matmul") and trace["matmuls"] and in_pass in ("forward", "backward"):
        groups, best = matmuls(shape), best_matmuls(results, model)
        own = groups[in_pass, True] + groups.get((in_pass, False), [])
        flops = sum(m.flops * matmul_launches(shape, m) for m in own)
        known = all(m.name in best for m in own)
        ceiling = sum(best[m.name] * matmul_launches(shape, m) for m in own) if known else None
        return f"{tera(flops / seconds)} TFLOP/s", percent(ratio(ceiling, seconds))
    if name.startswith("attention") and in_pass in ("forward", "backward"):
        # Backward's kernels share its FLOPs: the rate is that of all together.
        together = sum(k["ms"] for k in trace["kernels"] if k["name"].startswith("attention") and k["pass"] == in_pass)
        seconds = together / 1000 / count / shape.layers
        flops = attention_flops(shape.micro_batch, shape.seq_len, shape.heads, shape.channels // shape.heads)[in_pass]
        best = ceilings.get("attention")
        return f"{tera(flops / seconds)} TFLOP/s", percent(best and best[f"{in_pass}_s"] / seconds)
    return "-", "-"


# ---- Matmuls

def matmul_tables(results):
    blocks = []
    columns = ["matmul", "M x N x K", "ours, ms", "ours, TFLOP/s", "ceiling, TFLOP/s", "share", "ours, of the peak"]
    for model in models_of(results):
        named, best, rows = results["ours"][model]["trace"]["matmuls"], best_matmuls(results, model), []
        for m in all_matmuls(shape_of(results, model)):
            ours, theirs = named and named[m.name]["ms"] / 1000 / named[m.name]["launches"], best.get(m.name)
            if not ours and not theirs:
                continue
            rows.append([m.name, f"{m.M} x {m.N} x {m.K}", number(ours and 1000 * ours), tera(ours and m.flops / ours),
                         tera(theirs and m.flops / theirs), percent(ratio(theirs, ours)),
                         percent(ours and m.flops / ours / results["about"]["peak_flops"])])
        if rows:
            remark = [] if named else prose("""The trace's matmuls did not come in the order or number that the
                                               model has: only the ceilings are known.""")
            blocks.append([f"### {model}", "", *remark, *table(columns, rows)])
    text = """Ours with what they do besides: bias, GELU' and, for dweight, adding into FP32 gradients. The ceiling
              is PyTorch's matmul (cuBLAS) of the same shape and orientation, on random numbers, with a result in
              the inputs' type and nothing besides: the best of five."""
    return section("Matmuls", prose(text), *blocks) if blocks else []


# ---- The floor

def floors(results):
    rows, parts = [], ["matmuls", "attention", "layernorm, residual, bias", "logits", "update"]
    for model in models_of(results):
        best = floor_of(results, model)
        if best:
            ours, total = 1e9 / results["ours"][model]["tokens_per_s"], best["total"]
            rows.append([model, *[number(best[part]) for part in parts], number(total), number(total and 1e9 / total),
                         number(ours), percent(ratio(total, ours))])
    copy = (results.get("ceilings") or {}).get("copy_bytes_per_s")
    text = f"""The time of a token, in ns, if each part of a step ran at the best rate measured above: the model's
               matmuls at PyTorch's speed, attention at that of PyTorch's fastest kernel, and what must be moved at
               the bandwidth of a device-to-device copy ({giga(copy)} GB/s, bytes read and written). LayerNorms,
               residuals and bias gradients: 25 values of C a layer, and 11 more; logits: read and written once by
               the loss; GELU: free."""
    columns = ["model", *parts, "floor, ns", "floor, tokens/s", "ours, ns", "share"]
    return section_with_table("The floor", text, columns, rows)


# ---- Recomputation

def recomputation(results):
    rows, same = [], True
    for model, modes in results["recompute"].items():
        reference = modes["none"]
        for mode, run in modes.items():
            used, planned = run["used_bytes"], run["planned_bytes"]
            same = same and all(a == b for a, b in zip(run["losses"], reference["losses"]))
            rows.append([model, mode, number(run["tokens_per_s"]),
                         times(ratio(run["tokens_per_s"], reference["tokens_per_s"])), percent(run["mfu"]),
                         percent(run["hfu"]),
                         number(run["passes"].get("recompute", 0) / run["micro_batches"]), gigabytes(planned),
                         gigabytes(used), f"{(used - planned) / 1e9:+.2f} GB" if used else "-",
                         gigabytes(run["activation_bytes"]), run["max_micro_batch"]])
    if results["about"]["device_option"] == "gpu":
        in_use = """what the driver says of the whole card when the run ends, the context and other programs with it;
                    the plan sets 600 MiB aside for the context"""
    else:
        in_use = "the program's resident memory, on a CPU"
    text = f"""The same micro-batch in all modes. *In use* is {in_use}. The losses of all modes are
               {"the same bits." if same else "NOT the same: they should be."}"""
    return section_with_table("Recomputation", text, [
        "model", "recompute", "tokens/s", "against none", "MFU", "HFU", "ms recomputing, a micro-batch", "planned",
        "in use", "difference", "activations, planned", "largest micro-batch"], rows)


# ---- Attention alone

def attention(results):
    data, rows, errors = results["attention"] or {}, [], []
    for point in data.get("points", []):
        published = PUBLISHED_ATTENTION.get((point["HS"], point["T"]), {})
        ours = attention_rates(point, point["ours"]) if "ours" in point else (None, None)
        best = best_attention(point) or (None, None)
        cells = [point["HS"], f"{point['T']:,}", point["B"], point["NH"]]
        for kind, mine, theirs in zip(("forward", "both"), ours, best):
            cells += [tera(mine), f"{tera(theirs[0])} ({theirs[1]})" if theirs else "-",
                      times(ratio(mine, theirs and theirs[0])),
                      ", ".join(f"{name} {rate}" for name, rate in published.get(kind, {}).items()) or "-"]
        rows.append(cells)
        where = f"head size {point['HS']}, T = {point['T']}"
        errors += [f"Ours, {where}: {point['error']}"] if "error" in point else []
        errors += [f"PyTorch's {name}, {where}: {t['error']}" for name, t in (point.get("torch") or {}).items()
                   if "error" in t]
    if not rows:
        return []
    text = f"""Causal, {data['tokens']:,} tokens, {data['channels']:,} channels in all; TFLOP/s, forward and then
               forward + backward, counted as in FlashAttention's papers (half the square; backward 2.5 times
               forward). Ours are the kernels in a trace of a model of one layer; PyTorch's
               `scaled_dot_product_attention` on views of a (B, T, 3, NH, HS) tensor, the fastest of its backends;
               published: H100."""
    columns = ["head size", "T", "B", "heads", "ours", "PyTorch", "ours / PyTorch", "published", "ours, both",
               "PyTorch, both", "ours / PyTorch", "published"]
    return section("Attention alone", prose(text), table(columns, rows), *[prose(error) for error in errors])


# ---- Losses

def curve(results):
    data = results["curve"]
    if not data or not data["losses"]:
        return []
    losses, model = data["losses"], data["model"]
    ours, others = losses["ours"], [name for name in losses if name != "ours"]
    low, high, rows = min(ours), max(ours), []
    for step in sorted({1, 2, 5, 10, 20} | set(range(25, data["steps"] + 1, 25))):
        if step <= len(ours):
            mine = ours[step - 1]
            peers = [losses[name][step - 1] if step <= len(losses[name]) else None for name in others]
            rows.append([step, f"{mine:.4f}", *[f"{loss:.4f}" if loss else "-" for loss in peers],
                         *[f"{loss - mine:+.5f}" if loss else "-" for loss in peers],
                         bar((mine - low) / ((high - low) or 1))])
    text = f"""{data['steps']} steps of {data['batch']:,} tokens on the same tokens ({', '.join(data['data'])}, in
               file order, around and around where it is shorter; each batch begins with the same token), from the
               same weights, a checkpoint of ours at step 0, cut to BF16: {model['layers']} layers,
               {model['channels']} channels, vocabulary {model['vocab']:,}, T = {data['seq_len']:,},
               {data['precision'].upper()}. AdamW 0.9, 0.95, decay 0.1 of matrices, clipped at 1; warm-up over
               {data['warmup']} steps to {data['lr']:g}, then a cosine to a tenth. PyTorch is not compiled here."""
    if "llm.c" in losses:
        text += """ llm.c reads the same weights in BF16, which holds them exactly; it always shuffles, so its shard
                   is laid out such that its shuffle gives our order."""
    found = [f"""Ours and {name}: the losses differ by at most {d['largest']:.5f}, at step {d['step']}; by
                 {d['first']:.6f} at step 1, by {d['mean_of_last']:.5f} on average over the last {d['last']} of
                 {d['steps']} steps."""
             for name, d in data["differences"].items() if d]
    return section("Losses", prose(text), *[prose(line) for line in found + data["remarks"]],
                   table(["step", "ours", *others, *[f"{name} - ours" for name in others], "ours"], rows))


# ---- dev/kernels, and the end

def study_kernels(results):
    blocks = []
    for entry in results["kernels"]:
        text = entry.get("markdown", entry.get("error", ""))
        blocks.append([f"### {entry['name']}", "", *text.strip().splitlines(), ""])
        if entry["code"] != 0 and "markdown" in entry:
            blocks.append(prose(f"It ended with exit code {entry['code']}."))
    return section("The kernels of dev/kernels", *blocks)


def what_was_run(results):
    rows = []
    for part in results["parts"]:
        gpu = part.get("gpu")
        clocks = [f"{gpu['sm_mhz']['median']:.0f} ({gpu['sm_mhz']['least']:.0f})", f"{gpu['power_w']:.0f}",
                  f"{gpu['temperature_c']:.0f}"] if gpu else ["-", "-", "-"]
        rows.append([part["title"], part["status"], f"{part['seconds']:.0f}", *clocks])
    errors = (results.get("ceilings") or {}).get("errors", [])
    return section("Parts", table(["part", "", "s", "SM clock at work, MHz: median (least)", "most W", "most C"], rows),
                   *[prose(f"A ceiling that could not be measured: {error}") for error in errors])


def how(results):
    commands = [run["command"] for runs in (results["ours"], results["llmc"]) for run in runs.values()]
    text = """Contestants run one after the other, each in a process of its own. Timing is on random tokens whose
              frequencies fall as 1/rank, as in language. Ours is timed from the fourth step on, the first three
              being traced; PyTorch from the third, llm.c from the second. A figure is a median of steps."""
    return section("How it was measured", prose(text), ["```", *commands, "```", ""] if commands else [])


SECTIONS = [head, missing, speed, goals, as_run, passes, matmul_tables, floors, recomputation, attention, curve,
            study_kernels, what_was_run, how]


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

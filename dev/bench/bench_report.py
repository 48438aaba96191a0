"""Writes bench.py's report in Markdown from the contents of results.json, which may be incomplete.

Each function in SECTIONS returns the lines of one section, or no lines if nothing was measured for it.
"""
import os
import statistics
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from tables import markdown_table, number, percent, size, times

# The rows of README.md's table, with the goals for one H100 or H200.
GOALS = {
    "GPT-2 124M": "≥ 600k tokens/s, 50 % MFU",
    "GPT-2 1558M": "≥ 60k tokens/s, 60 % MFU",
    "attention forward, T = 2k / 8k": "≥ 370 / 460 TFLOP/s",
    "attention forward + backward, T = 2k / 8k": "≥ 300 / 350 TFLOP/s",
    "memory-bound kernels": "≥ 85 % of a copy's bandwidth",
    "idle time between kernels": "< 2 % of a step",
}
MIN_FRACTION = 0.002    # of the kernel time: kernels below this are not listed
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


# ---- Arithmetic

def median_ms(run):
    return statistics.median(run["ms"])


def ours_of(case):
    return {name: run for name, run in case["runs"].items() if run["kind"] == "ours"}


def best_peer(case):
    """Returns the name of the fastest peer, or None."""
    peers = [name for name, run in case["runs"].items() if run["kind"] != "ours"]
    return min(peers, key=lambda name: median_ms(case["runs"][name]), default=None)


def model_flops(case, run):
    """Returns the model's FLOP/s, with our FLOP count for all contestants."""
    plan = next(iter(ours_of(case).values()))["plan"]
    return plan["flops_per_token"]["model"] * case["tokens"] / median_ms(run) * 1000


def peak_flops(case):
    """Returns the peak FLOP/s used for all contestants: on a CPU, the best that our runs measured."""
    return max((run["record"]["peak_flops"] for run in ours_of(case).values()), default=None)


def floor_ms(case, run, ceilings):
    """Returns the minimum time of a step: the model's FLOPs at the rate of a large matmul, plus the bytes of AdamW at
    the rate of a copy. AdamW reads and writes gradients, master weights and moments, and writes the weights."""
    plan, copy = run["plan"], ceilings.get("copy_bytes_per_s")
    rate = ceilings.get("matmul_flops") or run["record"]["peak_flops"]
    if not copy:
        return None
    size_of, mixed = plan["bytes"], plan["precision"] != "fp32"     # FP32 weights have no separate master copy
    moved = 2 * sum(size_of[name] for name in ("gradients", "adam_m", "adam_v", "master" if mixed else "weights"))
    moved += size_of["weights"] if mixed else 0
    return 1000 * (plan["flops_per_token"]["model"] * case["tokens"] / rate + moved / copy)


def kernel_bytes(run, seq_len):
    """Returns {kernel: minimum bytes that its launches move} in a micro-batch without recomputation, or in a step if it
    is a kernel of the update. A LayerNorm reads and writes two tensors (N, C), N = B T, in forward, four in backward.
    """
    model, size_of, dtype = run["record"]["model"], run["plan"]["bytes"], BYTES[run["plan"]["precision"]]
    L, N = model["layers"], run["micro_batch"] * seq_len
    launches = {kernel["name"]: kernel["launches"] for kernel in run["trace"]["kernels"]}
    # In a micro-batch 2 L bias gradients, 3 C and 4 C wide, or on Hopper at most L, 4 C wide; 2 L + 1 LayerNorms.
    both = 2 * launches.get("bias_backward", 0) > launches.get("layernorm_backward", 0)
    NC, logits = N * model["channels"] * dtype, N * -(-model["vocab"] // 128) * 128 * dtype
    master = 0 if run["plan"]["precision"] == "fp32" else size_of["weights"]
    return {"layernorm_forward": 2 * (2 * L + 1) * NC, "layernorm_backward": 4 * (2 * L + 1) * NC,
            "gelu_forward": 8 * L * NC, "bias_backward": (7 if both else 4) * L * NC, "embedding_forward": 2 * NC,
            "cross_entropy": 2 * logits, "norm_partials": size_of["gradients"],
            "adamw": 2 * size_of["gradients"] + 3 * 2 * size_of["adam_m"] + master}


def repeats(case, run, kernel):
    """Returns how often kernel_bytes() are moved in a step: once per micro-batch, or once in the update."""
    return 1 if kernel["pass"] == "update" else case["tokens"] // (run["micro_batch"] * case["seq_len"])


def bandwidth(case, run, kernel):
    """Returns the bytes per second of a memory-bound kernel, or None."""
    moved = kernel_bytes(run, case["seq_len"]).get(kernel["name"])
    return moved and moved * repeats(case, run, kernel) / kernel["ms"] * 1000


def memory_bound_rate(case, run):
    """Returns the bytes per second of all memory-bound kernels together."""
    moved = kernel_bytes(run, case["seq_len"])
    kernels = [kernel for kernel in run["trace"]["kernels"] if kernel["name"] in moved]
    seconds = sum(kernel["ms"] for kernel in kernels) / 1000
    return sum(moved[k["name"]] * repeats(case, run, k) for k in kernels) / seconds if seconds else None


def idle_fractions(run):
    """Returns the fraction of time without a kernel in the traced step, and in the other steps, assuming that their
    kernels take the same time."""
    trace = run["trace"]
    return 1 - trace["busy_ms"] / trace["step_ms"], max(0.0, 1 - trace["busy_ms"] / median_ms(run))


def attention_rates(point, seconds):
    """Returns the FLOP/s of causal attention in forward, and in forward + backward, counted as in the FlashAttention
    papers: T * T / 2 pairs, backward 2.5 times forward."""
    forward = 2 * point["B"] * point["NH"] * point["T"]**2 * point["HS"]
    return forward / seconds["forward_s"], 3.5 * forward / (seconds["forward_s"] + seconds["backward_s"])


# ---- Sections

def section(title, text, *blocks):
    lines = [line for block in blocks for line in block]
    return [f"## {title}", "", " ".join(text.split()), "", *lines] if lines else []


def about(results):
    facts = results["about"]
    title = "# Dry run on a CPU, not a measurement" if facts["dry"] else f"# Benchmark: {facts['suite']}"
    records = [run["record"] for case in results["cases"].values() for run in ours_of(case).values()]
    rows = [[name, value] for name, value in facts.items() if name not in ("dry", "suite", "seconds")]
    rows += [["device", records[0]["device"]], ["peak for MFU", f"{records[0]['peak_source']}"]] if records else []
    rows += [[name, value] for name, value in (
        ("bandwidth of a large copy", giga(results["ceilings"].get("copy_bytes_per_s"))),
        ("PyTorch's large matmul", tera(results["ceilings"].get("matmul_flops")))) if value != "-"]
    warning = ["**Tiny models on a CPU: the figures show that each part runs; they say nothing about speed.**",
               ""] if facts["dry"] else []
    return [title, "", *warning, *markdown_table(["", ""], [*rows, ["seconds", f"{facts.get('seconds', 0):.0f}"]])]


def giga(x):
    return "-" if x is None else f"{number(x / 1e9)} GB/s"


def tera(x):
    return "-" if x is None else f"{number(x / 1e12)} TFLOP/s"


def not_run(results):
    return section("Not run", "Runs that failed or were skipped.",
                   markdown_table(["run", "reason"], results["not_run"]))


def speed(results):
    rows = []
    for name, case in results["cases"].items():
        if not ours_of(case):
            continue
        peer, peak = best_peer(case), peak_flops(case)
        for contestant, run in case["runs"].items():
            ms, ours, planned = median_ms(run), run["kind"] == "ours", run.get("planned_bytes")
            goal = f"{case['goal_ms']:,.0f}{'' if ms <= case['goal_ms'] else ' MISSED'}" if case["goal_ms"] else "-"
            floor = floor_ms(case, run, results["ceilings"]) if ours else None
            ratio = f"{times(median_ms(case['runs'][peer]) / ms, 'x')} {peer}" if ours and peer else "-"
            rows.append([name, contestant, f"{run['micro_batch']} x {case['seq_len']}", f"{case['tokens']:,}",
                         f"{ms:,.1f} ({min(run['ms']):,.1f} to {max(run['ms']):,.1f})",
                         f"{1000 * case['tokens'] / ms:,.0f}", percent(model_flops(case, run) / peak, ".1f"), ratio,
                         times(floor and floor / ms), goal if ours else "-", size(run["peak_bytes"]), size(planned)])
    text = """ms per step: median over the steps of all runs, with the range in parentheses. The speed-up is the fastest
              peer's time divided by ours: above 1 we are faster. MFU counts the same FLOPs for all. *Floor*, on a GPU:
              the minimum time of a step divided by ours; it is the model's FLOPs at the rate of a large matmul plus
              AdamW's bytes at the rate of a copy. Peak memory: the maximum resident set, on a GPU the memory in use at
              the end of the run."""
    return section("Speed", text, markdown_table([
        "model", "contestant", "micro-batch", "tokens per step", "ms per step", "tokens/s", "MFU", "speed-up",
        "floor", "goal, ms", "peak memory", "planned"], rows))


def goals(results):
    """The rows of README.md's table; only for a GPU."""
    if results["about"]["suite"] != "gpu" or results["about"]["dry"]:
        return []
    found, copy = dict.fromkeys(GOALS, "not measured"), results["ceilings"].get("copy_bytes_per_s")
    for row, name in (("GPT-2 124M", "gpt2"), ("GPT-2 1558M", "gpt2-xl")):
        case = results["cases"].get(name)
        for run in (ours_of(case) if case else {}).values():
            found[row] = (f"{1000 * case['tokens'] / median_ms(run):,.0f} tokens/s, "
                          f"{percent(model_flops(case, run) / peak_flops(case), '.1f')} MFU")
            if name == "gpt2":
                rate = memory_bound_rate(case, run)
                found["memory-bound kernels"] = percent(rate and copy and rate / copy, ".1f")
                found["idle time between kernels"] = percent(idle_fractions(run)[1], ".1f")
    points = [results["attention"].get(f"64/{T}", {}) for T in (2048, 8192)]
    if all("ours" in point for point in points):
        rates = [attention_rates(point, point["ours"]) for point in points]
        for i, row in enumerate(list(GOALS)[2:4]):
            found[row] = " / ".join(number(rate[i] / 1e12) for rate in rates) + " TFLOP/s"
    return section("Goals", "The rows of README.md's table.", markdown_table(
        ["", "goal", "measured"], [[row, GOALS[row], found[row]] for row in GOALS]))


def kernels(results):
    blocks = []
    for name, case in results["cases"].items():
        run = next((run for run in ours_of(case).values() if "trace" in run), None)
        if not run:
            continue
        trace, copy, idle = run["trace"], results["ceilings"].get("copy_bytes_per_s"), idle_fractions(run)
        rows = []
        for kernel in sorted(trace["kernels"], key=lambda kernel: -kernel["ms"]):
            if kernel["ms"] > MIN_FRACTION * trace["busy_ms"]:
                count, rate = repeats(case, run, kernel), bandwidth(case, run, kernel)
                rows.append([kernel["name"], kernel["pass"], number(kernel["ms"] / count), kernel["launches"] // count,
                             percent(kernel["ms"] / trace["busy_ms"], ".1f"), giga(rate),
                             percent(rate and copy and rate / copy)])
        rate = memory_bound_rate(case, run)
        blocks += [f"### {name}", "", f"{trace['launches']:,} launches per step; idle {percent(idle[0], '.1f')} of the "
                   f"traced step, {percent(idle[1], '.1f')} of the other steps; median gap "
                   f"{number(trace['gap_us'])} us. Memory-bound kernels together: {giga(rate)}, "
                   f"{percent(rate and copy and rate / copy)} of a copy's bandwidth.", "",
                   *markdown_table(["kernel", "pass", "ms", "launches", "of busy time", "rate", "of a copy"], rows)]
    text = """From `--trace`. ms and launches: per micro-batch, in the update per step. If the device waits for the CPU,
              part of the wait is counted as kernel time. Idle time of the steps without a trace: their time minus the
              kernel time of the traced step."""
    return section("Where a step goes", text, blocks)


def attention(results):
    rows, failures = [], []
    for point in results["attention"].values():
        ours = attention_rates(point, point["ours"]) if "ours" in point else (None, None)
        peers = {name: attention_rates(point, found) for name, found in point.get("torch", {}).items()
                 if "error" not in found}
        failures += [f"{name}, T = {point['T']}: {found['error']}" for name, found in point.get("torch", {}).items()
                     if "error" in found]
        cells = [point["HS"], f"{point['T']:,}", point["B"], point["NH"]]
        for i in (0, 1):
            best = max((rates[i] for rates in peers.values()), default=None)
            cells += [tera(ours[i]), ", ".join(f"{name} {tera(rates[i])}" for name, rates in peers.items()) or "-",
                      times(ours[i] and best and ours[i] / best, "x")]
        rows.append(cells)
    text = """Causal, FLOPs as in the FlashAttention papers: T * T / 2 pairs, backward 2.5 times forward. Our times are
              from the trace of a model with one layer. The peers are the backends of PyTorch's
              `scaled_dot_product_attention` on views of (B, T, 3, NH, HS)."""
    return section("Attention alone", text, markdown_table(
        ["head size", "T", "B", "heads", "ours, forward", "PyTorch", "ours / best", "ours, forward + backward",
         "PyTorch", "ours / best"], rows), [line for failure in failures for line in (failure, "")])


SECTIONS = [about, not_run, goals, speed, kernels, attention]


def report(results):
    """Returns the report as Markdown."""
    return "\n".join(line for section_ in SECTIONS for line in section_(results)).rstrip() + "\n"

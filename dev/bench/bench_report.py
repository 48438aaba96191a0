"""Writes the report of bench.py and dev/gpu/run.py in Markdown from the contents of results.json, which may be
incomplete. Each function in SECTIONS returns the lines of one section, or none if nothing was measured for it.
"""
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tables import markdown_table, number, percent, size, times

# The rows of dev/bench/README.md's table for a GPU, with the goals for one H100
GOALS = {
    "GPT-2 124M": "≥ 600k tokens/s, 50 % MFU",
    "GPT-2 1558M": "≥ 60k tokens/s, 60 % MFU",
    "attention forward, T = 2k / 8k": "≥ 370 / 460 TFLOP/s",
    "attention forward + backward, T = 2k / 8k": "≥ 300 / 350 TFLOP/s",
    "memory-bound kernels": "≥ 85 % of a copy's bandwidth",
    "idle time between kernels": "< 2 % of a step",
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


# ---- Arithmetic

def median_ms(run):
    return statistics.median(run["ms"])


def ours_of(case):
    return {name: run for name, run in case["runs"].items() if run["kind"] == "ours"}


def best_peer(case, run):
    """Returns the name of the peer that is fastest, of those in FP32 if the run is in FP32, or None."""
    peers = [name for name, peer in case["runs"].items() if peer["kind"] != "ours"
             and (run["plan"]["precision"] != "fp32" or "BF16" not in name)]
    return min(peers, key=lambda name: median_ms(case["runs"][name]), default=None)


def mfu(case, run):
    """Returns the model FLOPs utilisation of any contestant, with our FLOP count and peak; None without ours. On a CPU
    the peak is the best that our runs measured."""
    ours = ours_of(case).values()
    if not ours:
        return None
    model, peak = [*ours][0]["plan"]["flops_per_token"]["model"], max(each["record"]["peak_flops"] for each in ours)
    return model * case["tokens"] / median_ms(run) * 1000 / peak


def floor_ms(case, run, ceilings):
    """Returns the minimum time of a step: the model's FLOPs at the rate of a large matmul, plus the bytes of AdamW at
    the rate of a copy. AdamW reads and writes gradients, master weights and moments, and writes the weights."""
    plan, copy = run["plan"], ceilings.get("copy_bytes_per_s")
    rate = ceilings.get("matmul_flops") or run["record"]["peak_flops"]
    size_of, mixed = plan["bytes"], plan["precision"] != "fp32"     # FP32 weights have no separate master copy
    moved = 2 * sum(size_of[name] for name in ("gradients", "adam_m", "adam_v", "master" if mixed else "weights"))
    moved += size_of["weights"] if mixed else 0
    return copy and 1000 * (plan["flops_per_token"]["model"] * case["tokens"] / rate + moved / copy)


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
    """Returns how often a step repeats what kernel_bytes() counts: once per micro-batch, or once in the update."""
    return 1 if kernel["pass"] == "update" else case["tokens"] // (run["micro_batch"] * case["seq_len"])


def bandwidth(case, run, kernels):
    """Returns the bytes per second of those of the kernels that are memory-bound, together; None without any."""
    moved = kernel_bytes(run, case["seq_len"])
    bound = [kernel for kernel in kernels if kernel["name"] in moved]
    seconds = sum(kernel["ms"] for kernel in bound) / 1000
    return sum(moved[kernel["name"]] * repeats(case, run, kernel) for kernel in bound) / seconds if seconds else None


def idle_fraction(run):
    """Returns the fraction of a step without a kernel, if kernels take as long as in the traced step."""
    return max(0.0, 1 - run["trace"]["busy_ms"] / median_ms(run))


def attention_rates(point, seconds):
    """Returns the FLOP/s of causal attention in forward, and in forward + backward, counted as in the FlashAttention
    papers: T * T / 2 pairs, backward 2.5 times forward."""
    forward = 2 * point["B"] * point["NH"] * point["T"]**2 * point["HS"]
    return forward / seconds["forward_s"], 3.5 * forward / (seconds["forward_s"] + seconds["backward_s"])


def of_a_copy(results, rate):
    copy = results["ceilings"].get("copy_bytes_per_s")
    return rate / copy if rate and copy else None


def giga(x):
    return "-" if x is None else f"{number(x / 1e9)} GB/s"


def tera(x):
    return "-" if x is None else f"{number(x / 1e12)} TFLOP/s"


# ---- Sections

def section(title, text, table):
    return [f"## {title}", "", *([text, ""] if text else []), *table] if table else []


def about(results):
    facts, ceilings = results["about"], results["ceilings"]
    records = [run["record"] for case in results["cases"].values() for run in ours_of(case).values()][:1]
    rows = [[name, number(fact) if isinstance(fact, float) else fact] for name, fact in facts.items()
            if name not in ("dry", "suite")]
    rows += [[name, record[key]] for record in records for name, key in (("device", "device"),
                                                                         ("peak for MFU", "peak_source"))]
    rows += [["PyTorch's large copy", giga(ceilings.get("copy_bytes_per_s"))],
             ["PyTorch's large matmul", tera(ceilings.get("matmul_flops"))]]
    title = "Dry run on a CPU with tiny models: its times mean nothing" if facts["dry"] else \
        f"Benchmark: {facts['suite']}"
    return [f"# {title}", "", *markdown_table(["", ""], [row for row in rows if row[1] != "-"])]


def not_run(results):
    return section("Not run", "", markdown_table(["run", "reason"], results["not_run"]))


def speed_table(results):
    """Returns the head and the rows of the table of training steps."""
    rows = []
    for name, case in results["cases"].items():
        for contestant, run in case["runs"].items():
            ms, speedup, goal, floor, planned = median_ms(run), None, "-", None, None
            if run["kind"] == "ours":
                peer, floor = best_peer(case, run), floor_ms(case, run, results["ceilings"])
                speedup, planned = peer and median_ms(case["runs"][peer]) / ms, run["planned_bytes"]
                goal = case["goals"].get(run["plan"]["precision"], "-")
            rows.append([name, contestant, f"{run['micro_batch']} x {case['seq_len']}",
                         f"{number(ms)} ({number(min(run['ms']))} to {number(max(run['ms']))})", goal,
                         f"{number(floor)} ({times(floor / ms)})" if floor else "-", times(speedup),
                         f"{1000 * case['tokens'] / ms:,.0f}", percent(mfu(case, run), ".1f"), size(run["peak_bytes"]),
                         size(planned)])
    return ["model", "program", "batch", "ms per step (range)", "goal", "floor (÷ ours)", "PyTorch ÷ ours", "tokens/s",
            "MFU", "memory", "planned"], rows


def speed(results):
    return section("Speed", ", ".join(f"{case['tokens']:,} tokens per step of {name}"
                                      for name, case in results["cases"].items()) + ".",
                   markdown_table(*speed_table(results)))


def goals(results):
    """The rows of dev/bench/README.md's table; only for a GPU."""
    if results["about"]["suite"] != "gpu" or results["about"]["dry"]:
        return []
    found = dict.fromkeys(GOALS, "not measured")
    for row, name in (("GPT-2 124M", "gpt2"), ("GPT-2 1558M", "gpt2-xl")):
        case = results["cases"].get(name, {"runs": {}})
        for run in ours_of(case).values():
            found[row] = f"{1000 * case['tokens'] / median_ms(run):,.0f} tokens/s, {percent(mfu(case, run), '.1f')} MFU"
            if name == "gpt2":
                rate = bandwidth(case, run, run["trace"]["kernels"])
                found["memory-bound kernels"] = percent(of_a_copy(results, rate), ".1f")
                found["idle time between kernels"] = percent(idle_fraction(run), ".1f")
    points = [results["attention"].get(f"64/{T}", {}) for T in (2048, 8192)]
    if all("ours" in point for point in points):
        rates = [attention_rates(point, point["ours"]) for point in points]
        for i, row in enumerate(list(GOALS)[2:4]):
            found[row] = " / ".join(number(rate[i] / 1e12) for rate in rates) + " TFLOP/s"
    return section("Goals", "", markdown_table(["", "goal", "measured"],
                                               [[row, GOALS[row], found[row]] for row in GOALS]))


def kernels(results):
    rows = []
    for name, case in results["cases"].items():
        for run in [run for run in ours_of(case).values() if "trace" in run][:1]:
            busy = run["trace"]["busy_ms"]
            for kernel in sorted(run["trace"]["kernels"], key=lambda kernel: -kernel["ms"]):
                count, rate = repeats(case, run, kernel), bandwidth(case, run, [kernel])
                if kernel["ms"] > busy / 500:
                    rows.append([name, kernel["name"], kernel["pass"], number(kernel["ms"] / count),
                                  kernel["launches"] // count, percent(kernel["ms"] / busy, ".1f"), giga(rate),
                                  percent(of_a_copy(results, rate))])
    return section("Where a step goes", "ms and launches: of a micro-batch, in the update of a step.", markdown_table(
        ["model", "kernel", "pass", "ms", "launches", "of busy time", "rate", "of a copy"], rows))


def attention(results):
    rows = []
    for point in results["attention"].values():
        found = {"ours": point.get("ours"), **point.get("torch", {})}
        rates = {name: attention_rates(point, seconds) for name, seconds in found.items() if seconds and "error" not in
                 seconds}
        for i, pass_ in enumerate(("forward", "forward + backward")):
            best = max((rate[i] for name, rate in rates.items() if name != "ours"), default=None)
            rows.append([point["HS"], f"{point['T']:,}", point["B"], point["NH"], pass_,
                         *(tera(rates[name][i] if name in rates else None) for name in ("ours", "flash", "cuDNN")),
                         times(best and "ours" in rates and rates["ours"][i] / best or None)])
    head = ["head size", "T", "B", "heads", "pass", "ours", "flash", "cuDNN", "ours / best"]
    return section("Attention alone", "Causal; FLOPs as in the FlashAttention papers; flash and cuDNN are PyTorch's.",
                   markdown_table(head, rows))


SECTIONS = [about, not_run, goals, speed, kernels, attention]


def report(results):
    """Returns the report as Markdown."""
    return "\n".join(line for section_ in SECTIONS for line in section_(results)).rstrip() + "\n"

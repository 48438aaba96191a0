#!/usr/bin/env python3
"""Tests the report's conclusions with invented measurements of an idle and of a busy machine.

    python3 dev/playbook/test_report.py
"""
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import fp8_quality
import measure
import parts_batch
import parts_formats
import parts_parallel
import parts_single
from testing import expect, expect_equal, run_tests, write
from figures import pyplot

ABOUT = {"peak_flops": 1e12, "gpu": False, "rounds": 3, "model": {"layers": 4, "channels": 8}}


def check(part, cases):
    """Each case is (name, Section, texts that its sentences and summary contain, texts that they do not contain)."""
    for name, section, wanted, unwanted in cases:
        pyplot.close("all")
        text = " ".join([*section.texts, *(f"{what}: {here}" for what, _, here in section.rows)])
        missing, there = [w for w in wanted if w not in text], [w for w in unwanted if w in text]
        expect(not missing and not there, f"{part}: {name}", f"missing {missing}, unexpected {there} in: {text}")


# ---- one GPU

def bytes_of(state, activations, **more):
    figures = dict.fromkeys(["buffers", "workspace", "cuda"], 0)
    figures.update({name: state for name in measure.STATE}, activations=activations, **more)
    return {**figures, "total": sum(figures.values())}


def test_conclusive():
    for ratios, expected, text in (
            ([1.24, 1.25, 1.27], True, "rounds that agree on +25 % are conclusive"),
            ([0.78, 0.80, 0.81], True, "rounds that agree on -20 % are conclusive"),
            ([0.80, 1.30, 0.75], False, "rounds of -25 to +30 % are inconclusive"),
            ([1.10, 1.25, 1.40], False, "slower rounds whose range exceeds the effect are inconclusive"),
            ([1.0, 1.0, 1.0], False, "no effect is inconclusive"),
            ([1.25], False, "a single round is inconclusive")):
        expect_equal(measure.conclusive(ratios), expected, text)


def test_state():
    def made(too_large, halved=2):
        def plan(model, activations, each):
            return {"parameters": 7 * 10**9, "bytes_per_parameter": each, "seq_len": 64, "gpu_memory": 8 * 10**10,
                    "bytes": bytes_of(2 * 10**10, activations),
                    "max_micro_batch": dict.fromkeys(measure.MODES, int(model not in too_large))}
        return parts_single.state({model: dict(zip(measure.PRECISIONS, [
            plan(model, 10**9 * halved, 16), plan(model, 10**9, 16), plan(model, 10**9, 18)]))
            for model in measure.LARGE}, ABOUT)
    check("memory of a model", [
        ("state, activations, models that do not fit", made(["70b", "405b"]),
         ["16 bytes per parameter in FP32, 16 in BF16", "the sum is 18.", "activations are 2.00 times smaller",
          "hence 100 GB instead of 112", "any setting: 70B, 405B.", "405B in mixed precision: 100 / 100 / 100 / 100 GB",
          "accumulated in FP32: 18.00"], []),
        ("all models fit", made([], halved=1.5), ["any setting: none", "1.50 times smaller"], ["405B."])])


def test_activations():
    def made(naive, flash):
        def points(scale, growth):
            return [{"activations": scale * growth ** i * 10**9, "per_token_layer": 100 * scale, "korthikanti": 2e9,
                     "model": {"layers": 2, "channels": 8}} for i in range(3)]
        curves = {f"{attention}, {mode}": points(scale, growth)
                  for attention, growth in (("flash", flash), ("naive", naive))
                  for mode, scale in zip(measure.MODES, (10, 4, 1))}
        gpt3 = {mode: points(scale, 1)[0] for mode, scale in zip(measure.MODES, (10, 4, 1))}
        return parts_single.activations({"lengths": [1024, 2048, 4096], "curves": curves, "gpu_memory": 8 * 10**10,
                                         "gpt3_175b": gpt3, "state": 3 * 10**10}, ABOUT)
    check("activations", [
        ("sizes, crossings with the state, savings", made(4, 2),
         ["all activations take 40.0 GB; Korthikanti's formula gives 2.00 GB", "state from T = 2,048 with naive",
          "from T = 4,096 with flash", "keeps 60 % less per layer", "removes 90 % of this", "40.0 GB (planned)"], []),
        ("activations that never exceed the state", made(1, 1), ["from no length with naive"], [])])


def test_timeline():
    results = {mode: {"ms": 3, "planned": 10**8, "passes": [["forward", 0, 1], ["backward", 1, 2], ["update", 2, 3]],
                      "live": {"ms": [0, 1, 2], "weights": [5, 5, 5], "activations": [0, highest, 10**6]}}
               for mode, highest in zip(measure.MODES, (6 * 10**7, 4 * 10**7, 2 * 10**7))}
    check("timeline", [("peaks of activations", parts_single.timeline(results, ABOUT),
                        ["forward to 60.0 MB", "up to 20.0 MB", "60.0 MB → 20.0 MB"], [])])


def test_last_step():
    def event(name, begin, pass_):
        return {"ph": "X", "tid": 1, "name": name, "ts": begin, "dur": 1000, "args": {"pass": pass_}}
    events = [event("k", begin * 1000, pass_) for begin, pass_ in
              enumerate(["forward", "update", "forward", "forward", "backward", "update"])]
    events += [{"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "stream: kernels"}}]
    events += [{"ph": "C", "name": "live bytes", "ts": at, "args": {"weights": at}} for at in (0, 1500, 3500, 9000)]
    found = measure.last_step({"traceEvents": events[::-1]})
    expect_equal(found, {"ms": 4, "passes": [["forward", 0, 2], ["backward", 2, 3], ["update", 3, 4]],
                         "live": {"ms": [0, 1.5], "weights": [1500, 3500]}}, "the last step begins after an update")


COST = {"none": (1.0, 30), "selective": (1.0, 20), "full": (1.25, 5)}     # hardware over model FLOPs, bytes kept


def setup(times, reference, hardware=1.0, kept=30, micro_batch=4):
    """Returns a result of Trainer.compare for rounds that took these times."""
    return {"ms": times, "round_ms": times, "ratios": [a / b for a, b in zip(times, reference)], "tokens": 1024,
            "median_ms": sorted(times)[len(times) // 2], "losses": [5.0, 4.9], "planned": 10**7 * micro_batch,
            "flops_per_token": {"model": 1e6, "hardware": 1e6 * hardware}, "per_token_layer": 100 * kept}


def recomputation(*times):
    return parts_single.recomputation(
        {"modes": {mode: setup(ms, times[0], *COST[mode]) for mode, ms in zip(COST, times)},
         "flops_7b": {"model": 100.0, "hardware": 123.0}}, ABOUT)


def test_recomputation():
    busy = recomputation([100, 160, 110], [120, 105, 140], [80, 85, 150])
    check("recomputation", [
        ("idle machine: both costs", recomputation([100, 101, 99], [103, 104, 101.5], [125, 126, 124]),
         ["makes a step 1.25 times as long", "Selective recomputation costs +3.0 % of time",
          "Full recomputation: time: +25 % (measured", "the plan has +23 %"], ["o conclusion"]),
        ("busy machine: no conclusion", busy,
         ["No conclusion about the time of full recomputation (planned FLOPs: 1.25): the range of the rounds, -47 % "
          "to +36 %, is larger than their median effect, -20 %", "about the time of selective",
          "Full recomputation: time: no conclusion", "Selective recomputation: time: no conclusion",
          "It keeps 83 % less"], ["makes a step", "costs +"]),
        ("one round: no conclusion", recomputation([100], [103], [125]), ["there was only one round"],
         ["makes a step", "costs +"])])
    alphas = [patch.get_alpha() for patch in busy.figure.axes[0].patches[:3]]
    expect_equal(alphas, [1, 0.3, 0.3], "recomputation: a bar without a conclusion is faint")


def test_accumulation():
    def made(one, all_at_once):
        splits = {"1 × 8": setup(one, one, micro_batch=1), "8 × 1": setup(all_at_once, one, micro_batch=8)}
        splits["1 × 8"]["losses"] = [5.0, 4.9 + 3e-6, 4.8]
        return parts_single.accumulation({"tokens": 2048, "sequences": 8, "splits": splits}, ABOUT)
    check("accumulation", [
        ("idle machine: the cost of small micro-batches", made([150, 151, 149], [100, 101, 99]),
         ["One sequence at a time takes 1.50 times as long here as 8", "10.0 MB for one", "80.0 MB for 8"], []),
        ("busy machine: no conclusion, but losses are compared", made([150, 90, 149], [100, 140, 99]),
         ["No conclusion about the time of one sequence", "losses differ by at most 3e-06"], ["times as long"])])


# ---- batch size

def batch_part(first=(5.0, 4.0, 5.5), last=(2.2, 2.0, 2.6), grown=2.4, ms=(12, 11, 10), noise=(100, 1100), spread=1e-4,
               best=(2, 2, 2), stopped=()):
    """The section for batches of 512, 1,024 and 2,048: losses after an eighth of 8,192 tokens and at the end, the time
    of 1,024 tokens, the noise scale in the first eighth and later. The largest batch has the lowest loss and time for
    the seed for which the others have the highest."""
    def run(batch, first, last, ms):
        factors, steps = [1 - spread, 1, 1 + spread][::-1 if batch == 2048 else 1], range(1, 9)
        return {"last": [None if seed in stopped else last * factor for seed, factor in enumerate(factors)],
                "val_loss": [[[1, first * factor], [8, last * factor]] for factor in factors],
                "tokens": [[[step, 1024 * step] for step in steps]] * 3,
                "ms": [[[step, ms * factor + 100 * (step == 4)] for step in steps] for factor in factors],
                "noise_scale": [[[step, noise[step > 3]] for step in steps if noise and batch != 512]] * 3}
    runs = {str(batch): run(batch, *each) for batch, *each in zip((512, 1024, 2048), first, last, ms)}
    return parts_batch.batch_size({
        "tokens": 8192, "batches": [512, 1024, 2048], "micro": 8, "rates": {
            batch: [[rate, 2.0], *([other, 3.0] for other in (1, 2, 4) if other != rate)]
            for batch, rate in zip(runs, best)},
        "ramp": {"from": 256, "to": 2048, "tokens": 4096}, "runs": {**runs, "ramp": run(256, 5.0, grown, 10)}}, ABOUT)


def test_batch_size():
    yes, no = parts_batch.AGREES, parts_batch.CONTRADICTS
    unknown = [f"No conclusion about the {what}" for what in (
        "loss of batches of 2,048 after", "last loss of batches", "time of batches", "last loss of this ramp")]
    check("batch size", [
        ("clear effects", batch_part(),
         ["in 16 to 4 steps", "No best rate is at the edge", f"(seeds +10 % to +10 %) from that of 512. {yes}",
          f"16 % of the squared norm of a gradient of 512 tokens in the first eighth of training, and 68 % in the last "
          f"quarter. {yes}", f"by +30 % (seeds +30 % to +30 %) from that of the best smaller batch, 1,024. {yes}",
          f"by -17 % (seeds -17 % to -17 %) from that of 512. {yes}", "Batches of 1,024 are within 1 % of it, 1,024 "
          f"within 5 %. The chapter: the optimum is broad. {no}", "quarter is 1,100, 1.07 times as much. The noise scale is a good proxy here.",
          f"(seeds -7.7 % to -7.7 %) from that of constant batches of 2,048. {yes}",
          "From the best constant batch, 1,024, it differs by +20 %", "1,024 tokens; 1,100 ("], ["onclusion"]),
        ("the opposite", batch_part((5.5, 4, 5), (2.01, 2.01, 1.995), 2.2, (10, 11, 12), (300, 200), best=(1, 2, 4)),
         ["tried for batches of 512 (1), 2,048 (4), so a", f"to -9.1 %) from that of 512. {no}",
          f"and 28 % in the last quarter. {no}", f"from that of the best smaller batch, 512. {no}",
          f"+20 %) from that of 512. {no}", f"the edge of the measured batches. Batches of 512 to 2,048 are within 1 % "
          f"of it, 512 to 2,048 within 5 %. The chapter: the optimum is broad. {yes}", "200, 0.0977 times as much. The "
          f"noise scale is a poor proxy here.", f"+10 %) from that of constant batches of 2,048. {no}"], []),
        ("seeds that differ by more than the effects", batch_part(spread=0.2), unknown, []),
        ("the optimum at the edge", batch_part(last=(2.3, 2.1, 2.0), noise=(-5, 9000)),
         ["The optimum may lie beyond", "4.39 times as much. The critical batch may lie beyond", "is not known"],
         ["proxy here", "squared norm of"]),
        ("no noise scale, one seed", batch_part(noise=(), stopped=(0, 2)),
         ["noise scale is not known", "about the last loss of this ramp: there was only one seed",
          "Merrill", "+30 % (seeds +30 % to +30 %), no conclusion (measured)"], [yes, "proxy here"])])


def test_batch_runs():
    calls = []

    def log_of(data, options, may_stop):
        calls.append(options)
        rate, small = options["lr"], options["total_batch"] == 512
        stopped = "step 2: loss nan" if rate > 0.01 and small else None
        return [{"step": 1, "ms": 5, "tokens": 64, "val_loss": 9 - rate if small else 9 + rate}], "", stopped
    size = SimpleNamespace(batches=[512, 4096], batch_tokens=65536, batch_micro=16)
    found = measure.batch_size(SimpleNamespace(log_of=log_of), size)
    expect_equal(([[rate for rate, _ in found["rates"][batch]] for batch in ("512", "4096")], len(calls)),
                 ([[8e-3, 4e-3, 2e-3, 1.6e-2], [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]], 4 + 6 + 9),
                 "batches: rates are tried until the best finished one is not at the edge, or until there are six")
    expect_equal({each["lr"] for each in calls[-9::3]}, {8e-3}, "all seeds run with the best rate")
    wanted = [{"seed": 4, "micro_batch": 8, "warmup": 32, "eval_every": 16, "noise_every": None},
              {"seed": 3, "micro_batch": 16, "warmup": 4, "eval_every": 2, "noise_every": 1, "batch_ramp": None},
              {"seed": 3, "micro_batch": 16, "warmup": 14, "batch_ramp": "512:32768", "total_batch": 4096}]
    expect_equal([{key: calls[at].get(key) for key in each} for at, each in zip((0, -2, -1), wanted)], wanted,
                 "options of a batch of one micro-batch, of several, and of the ramp")


# ---- several processes

# MB that each of 4 GPUs sends in a step for a million parameters, by (stage, micro-batches): 4 bytes times 3/4 times
# 2, 1 + 1, k + 1 and 3 k. With ZeRO 3 the plan gathers less.
SENT = {(0, 1): 6.0, (0, 3): 6.0, (1, 1): 6.0, (1, 3): 6.0, (2, 1): 6.0, (2, 3): 12.0, (3, 1): 6.7, (3, 3): 15.6}
RING = {**SENT, (3, 1): 9.0, (3, 3): 27.0}


def parallel(drift=0.0, bits=0.0):
    """The section for 1 and 4 processes. drift: relative, of 4 processes' last loss; bits: added to ZeRO 3's last
    loss."""
    def planned(gpus, zero):
        sharded = {"weights": 3, "adam_m": 1, "adam_v": 1, "gradients": 2}
        return bytes_of(0, 10**6, buffers=3 * 10**6 if zero > 1 and gpus > 1 else 0, **{
            name: 4 * 10**6 // (gpus if zero >= stage else 1) for name, stage in sharded.items()})

    def run(gpus, zero, parts):
        last = 4.0 * (1 + (drift if gpus > 1 else 0)) + (bits if zero == 3 else 0)
        sent = 1e6 * SENT[zero, parts] if gpus > 1 else 0
        return {"gpus": gpus, "zero": zero, "parts": parts, "norms": [1.0, 1.0], "losses": [5.0, last],
                "sent": sent, "bytes_sent": sent, "planned": planned(gpus, zero)["total"]}
    results = {"numbers": [1, 4], "parameters": 10**6, "precision": "fp32", "grad_dtype": "fp32",
               "plans": [{"gpus": gpus, "zero": zero, "bytes": planned(gpus, zero)}
                         for zero in measure.STAGES for gpus in (1, 4)],
               "runs": [run(4, zero, parts) for zero in measure.STAGES for parts in (1, 3)],
               "splits": [{**run(1, 0, 1), "parts": 4}, run(4, 0, 1)],
               "paper": {"parameters": 10**6, "bytes": [planned(64, zero) for zero in measure.STAGES]}}
    for each in results["runs"]:
        ring = parts_parallel.ring_bytes(results, each) / 1e6
        assert abs(ring - RING[each["zero"], each["parts"]]) < 1e-9, (each, ring)
    return parts_parallel.data_parallel(results, ABOUT)


def test_data_parallel():
    check("data parallelism", [
        ("memory, communication and losses agree", parallel(),
         ["with 4 processes 11.0 MB, 11.0 MB, 8.00 MB each",
          "With ZeRO 3 this is 26 % to 42 % less",
          "so the curves coincide", "ZeRO 0 to 3 have the same bits", "1.00 / 1.00 / 1.12 (measured, 4 layers)",
          "losses within 0e+00"], ["more memory than the one before"]),
        ("curves that differ by rounding coincide", parallel(drift=5e-5),
         ["at most 5.0e-05 (relative), so the curves"], []),
        ("curves that differ by more than rounding do not coincide", parallel(drift=-1e-3),
         ["1.0e-03", "the curves do not coincide"],
         ["so the curves coincide"]),
        ("one bit that a stage changes", parallel(bits=4e-7),
         ["have different bits; their losses differ by at most 1.0e-07"], ["the same bits"]),
        ("skipped with one GPU", parts_parallel.data_parallel({"why": "this machine has one GPU"}, ABOUT),
         ["skipped: this machine has one GPU."], ["All"])])


def tensor(drift=0.0):
    """The section for t = 1, 2, 4. drift: relative, of the last loss with t = 4."""
    def planned(t, mode):
        return {"gpus": t, "recompute": mode, "model": {"heads": 32, "channels": 4096}, "seq_len": 2048,
                "per_token_layer": {"none": 131216, "selective": 82048, "full": 8192}[mode] / t,
                "weights": {"wte.weight": 100, "h.%d.mlp.c_fc.weight": 300 / t}, "state": 8 * (100 + 300 / t)}

    def ran(t, mode, parts):    # each tensor of 2 ** 18 tokens and 8 channels in FP32 has 8 MiB
        link = parts * {"none": 40, "full": 49}[mode] * 8 * 2**20 * (t - 1) / t
        return {"gpus": t, "recompute": mode, "parts": parts, "tokens": parts * 2**18, "precision": "fp32",
                "planned": 10**6, "tensor_bytes_sent": link, "sent": link + 1e6, "bytes_sent": link + 1e6,
                "losses": [5.0, 4.0 * (1 + drift * (t == 4))]}
    plans = [planned(t, mode) for mode in measure.MODES for t in measure.TENSOR]
    runs = [*(ran(t, "none", 1) for t in measure.TENSOR), ran(2, "full", 3), ran(4, "full", 3)]
    return parts_parallel.tensor_parallel({"plans": plans, "runs": runs}, ABOUT)


def test_tensor_parallel():
    check("tensor parallelism", [
        ("memory, communication and losses agree", tensor(),
         ["Not split: wte.weight. These are 25 % of", "holds 25 % + 75 % / t", "so the curves coincide",
          "131 / 65.6 / 32.8 kB, flash", "10 / 10 (measured)"], []),
        ("losses that differ by more than rounding", tensor(drift=1e-3), ["the curves do not coincide"], [])])
    plan = {"gpus": 2, "model": {"heads": 32, "channels": 4096}, "seq_len": 2048}
    expect_equal(parts_parallel.korthikanti(plan), (233472, 253952), "Korthikanti's formula for a 7B with t = 2")


def test_planned():
    plan = {"bytes": {"total": 10**6}, "bytes_sent": 15.6e6}
    for text, allocated, sent, expected in (
            ("a run as planned, up to the printed digits", 10**6, 15.5e6, None),
            ("a byte more than planned", 10**6 + 1, 15.6e6, "run: allocated 1,000,001 bytes, planned 1,000,000"),
            ("a gather more than planned", 10**6, 22.5e6, "run: sent 22,500,000 bytes a step, planned 15,600,000")):
        try:
            measure.require_planned("run", {"as_planned": True, "planned": allocated, "sent": sent}, plan)
            found = None
        except measure.Failed as error:
            found = str(error)
        expect_equal(found, expected, f"several processes: {text}")


class Made(measure.Trainer):
    """A trainer without a program: train() returns answer(**options), or raises its error."""
    def __init__(self, answer):
        self.answer = answer

    def train(self, steps, **options):
        return self.answer(steps=steps, **options)

    def fits(self, **options):
        return True


def test_why_alone():
    def fails(**options):
        raise measure.Failed("exit code 2", "the build has no NCCL")
    for text, most, answer, expected in (
            ("two processes run", 4, lambda **_: {}, None),
            ("a build without NCCL", 4, fails, "two processes do not run here (the build has no NCCL)"),
            ("one GPU", 1, fails, "this machine has one GPU")):
        expect_equal(measure.why_alone(Made(answer), most, {}), expected, f"why there is no data parallelism: {text}")


def test_compare():
    order = []

    def answer(steps, name):
        order.append(name)
        return {"ms": [{"a": 10, "b": 20}[name] * (1 + len(order) // 3)] * steps}
    results = Made(answer).compare({"a": {"name": "a"}, "b": {"name": "b"}}, 3, 0.1)
    expect_equal("".join(order), "abbaab", "each round runs all setups and starts with a different one")
    expected = [b / a for a, b in zip(results["a"]["round_ms"], results["b"]["round_ms"])]
    expect_equal((len(expected), results["b"]["ratios"]), (3, expected), "ratios compare runs of the same round")
    for text, expected in (("6.00 MB a step by each", 6e6), ("1.5 GB a step by each", 1.5e9), ("nothing", None)):
        expect_equal(measure.printed_bytes(text, "a step by each"), expected, f"bytes in '{text}'")


# ---- formats of 16 and 8 bits

def test_sums():
    def made(first, last):
        return parts_formats.formats({"sums": [{"micro_batches": count, "error": error}
                                               for count, error in ((1, first), (256, last))]}, ABOUT)
    without = parts_formats.formats({"why": "there is no such program"}, ABOUT)
    expect_equal(measure.distance([3.0, 0.0], [3.0, 5.0]), (25 / 34) ** 0.5, "relative distance of gradients")
    check("formats", [
        ("ranges, and an error that grows", made(0.0017, 0.05),
         ["FP32 254 / BF16 254 / FP16 30 / E4M3 15 / E5M2 30", "is 8 times as large", "0.17 % of their norm after 1 ",
          "5.0 % after 256", "grows 29.4 times. Independent", "error of 5.0 % after 256 micro-batches (measured)"], []),
        ("growth of independent roundings", made(0.0017, 0.017), ["grows 10.0 times."], ["Independent"]),
        ("no growth", made(0.0017, 0.002), ["hardly grows here (1.18 times), which contradicts"], ["agrees"]),
        ("skipped without a program", without, ["skipped: there is no such program."], ["error of"])])


def runs(ratios, stopped=(), **logged):
    """Returns a result of `demonstration` for runs with these ratios of last losses to the first kind's."""
    return {"last": [None if seed in stopped else 4.0 * ratio for seed, ratio in enumerate(ratios)],
            "loss": [[[step, 5.0 - 0.1 * step] for step in range(1, 11)]],
            "stopped": ["step 7: loss nan" if seed in stopped else None for seed in range(3)],
            "ratios": [ratio for seed, ratio in enumerate(ratios) if seed not in stopped],
            **{key: [[[5, value], [10, value]]] for key, value in logged.items()}}


def failures(master=(1.03, 1.031, 1.032), fp16=(1.2, 1.21, 1.19), zeros=(0.3, 0.001), fp8=(1.5, 1.51, 1.49),
             stopped=(), without=None):
    one = (1.0, 1.0, 1.0)
    lost = {"ln1": {"flushed": 0.1, "saturated": 0.0}, "dres": {"flushed": 0.4, "saturated": 0.01}}
    scaled = {"ln1": {"flushed": 0.001, "saturated": 0.0}, "dres": {"flushed": 0.002, "saturated": 0.0}}
    return parts_formats.failures({
        "master": {"rates": {"0.001": {"fp32": runs(one), "none": runs(master, unchanged=0.5)}}},
        "loss_scaling": {"tokens": 100, "kinds": {"dynamic": runs(one, zero_gradients=zeros[1]),
                                                  "none": runs(fp16, zero_gradients=zeros[0])}},
        "fp8_scaling": {"tokens": 100, "kinds": {"bf16": runs(one), "delayed": runs((1.001, 1.002, 0.999), fp8=scaled),
                                                 "none": runs(fp8, stopped, fp8=lost)}}, **(without or {})}, ABOUT)


def test_failures():
    left_out = {"loss_scaling": {"why": "no --fp16 PROGRAM was given"}, "fp8_scaling": {"why": "this GPU has no FP8"}}
    some, nothing = failures(without=left_out), failures(without={**left_out, "master": {"why": "x"}})
    check("failures", [
        ("clear effects", failures(),
         ["50 % at a learning rate of 0.001", "At 0.001 without master weights, the last loss is 3.1 % above that with "
          "them (seeds +3.0 % to +3.2 %)", "This agrees with the chapter: without FP32 master",
          "30 % of the gradients are 0 without scaling and 0.10 % with", "Without scaling, the last loss is 20 % above",
          "This agrees with the chapter: FP16 needs loss scaling",
          "Without scales, dres is affected most: 40 % of its values underflow, 1.0 % saturate",
          "No conclusion about the last loss with delayed scales: the range of the seeds",
          "master weights: at a learning rate of 0.001 50 % do; loss +3.0 % to +3.2 % (",
          "FP8 without scales: loss +49 % to +51 % ("], []),
        ("vague effects", failures(master=(1.0, 1.02, 0.99), fp16=(1.0, 1.001, 0.999)),
         ["no conclusion about the chapter's statement: without FP32 master", "loss -1.0 % to +2.0 %, no conclusion",
          "no conclusion about the chapter's statement: FP16 needs", "loss -0.10 % to +0.10 %, no conclusion"], []),
        ("a lower loss without a technique", failures(master=(0.97, 0.969, 0.968), zeros=(0.1, 0.2)),
         ["does not agree with the chapter", "the loss is lower without", "does not reduce the number of zeros"], []),
        ("a run that diverges", failures(fp8=(0.999, 1, 1.001), stopped=(1,)),
         ['Without scales, 1 of 3 runs stopped early ("step 7: loss nan").', "scales: runs stop (",
          "This agrees with the chapter: matmuls in FP8 need scales"], []),
        ("demonstrations without a program are skipped", some,
         ["FP16 without loss scaling. Skipped: no --fp16 PROGRAM was given.", "Skipped: this GPU has no FP8."], []),
        ("all demonstrations are skipped", nothing, ["master weights. Skipped: x."], ["agrees"])])
    expect(len(some.figure.axes) == 2 and len(some.rows) == 1 and nothing.figure is None and not nothing.rows,
           "failures: panels and summary only for what was measured")


def test_demonstration():
    calls = []

    def log_of(data, options, may_stop):
        seed, kind = options["seed"], options["kind"]
        calls.append(f"{seed}{kind}")
        losses = [5.0] * 27 + {"a": [2.0, 2.1, 2.2], "b": [4.2, 99.0, 3.0]}[kind]
        records = [{"step": i + 1, "loss": loss, "unchanged": seed / 10} for i, loss in enumerate(losses)]
        stops = seed == 2 and kind == "b"
        return ([{"run": {}}, *(records[:10] if stops else [*records, {"step": 30, "val_loss": seed}])], "",
                "step 11: loss nan" if stops else None)

    def results(*keys):
        return measure.demonstration(SimpleNamespace(log_of=log_of), "text", {}, {k: {"kind": k} for k in "ab"}, keys)
    found = results("loss", "unchanged")
    expect_equal(calls, ["1a", "1b", "2a", "2b", "3a", "3b"], "each kind runs with each seed")
    expect_equal((found["b"]["ratios"], found["b"]["stopped"]), ([4.2 / 2.1] * 2, [None, "step 11: loss nan", None]),
                 "ratios compare medians of the last tenth of finished runs")
    expect_equal((len(found["a"]["loss"][2]), found["a"]["unchanged"][2][3]), (30, [4, 0.3]), "curves by seed")
    expect_equal(results("val_loss")["b"]["last"], [1, None, 3], "with validation losses, the last one")


def test_quality():
    def made(stopped=(), **ratios):
        kinds = {name.replace("_", " "): runs(each, stopped if name == "fp8_all" else (), val_loss=3.0)
                 for name, each in {"bf16": (1, 1, 1), **ratios}.items()}
        return parts_formats.fp8_quality({"about": {"device": "made up", "parameters": 10**7, "date": "today"},
                                          "options": {"steps": 200}, "kinds": kinds}, ABOUT)
    check("whole runs", [
        ("FP8's last loss over BF16's, seed by seed", made(fp8=(1.01, 1.011, 1.009), fp8_all=(0.99, 1.02, 1.01)),
         ["With fp8, the last loss is 1.0 % above bf16's", "No conclusion about the last loss with fp8 all: the range",
          "nanochat: about 5 %", "fp8 1.0100; fp8 all 1.0100"], ["rounding alone"]),
        ("the effect of rounding alone", made(bf16_again=(0.99, 1.02, 1.01), fp8_all=(1, 1, 1)),
         ["are -1.0 % to +2.0 % from bf16's, seed by seed", "FP8: fp8 all"], []),
        ("a run that diverged", made((2,), fp8_all=(1.0, 1.0, 1.0)),
         ['With fp8 all, 1 of 3 runs stopped early ("step 7: loss nan")'], [])])


def test_quality_script():
    """A run that stops with a loss that is not finite is a result; any other failure is an error."""
    class Stub(measure.Trainer):
        def call(self, *arguments):
            options = dict(zip(arguments[1::2], arguments[2::2]))
            stops = "fp8" in options["--matmul"]
            run = {"device": "stub", "precision": "bf16", "peak_flops": 1, "model": {"parameters": 7}}
            records = [{"run": run}, {"step": 1, "val_loss": 2.0}, {"step": 2, "val_loss": 1.5}][:2 if stops else 3]
            write(f"{options['--out']}/log.jsonl", "\n".join(map(json.dumps, records)))
            if stops:
                raise measure.Failed("exit code 1", reason)
            return ""

    fp8_quality.Trainer = Stub
    sys.argv = ["fp8_quality", "--train-gpt", sys.executable, "--out", "all.json", "--steps", "2"]
    for reason, is_result in (("no such file", False), ("step 2: loss nan", True)):
        try:
            fp8_quality.main()
        except measure.Failed as error:
            expect_equal(error.said, reason, "the message of a failed run")
        expect_equal(os.path.exists("all.json"), is_result, f"'{reason}' is {'' if is_result else 'not '}a result")
    made = measure.read_json("all.json")
    kinds = made["kinds"]
    expect_equal((made["options"]["steps"], made["about"]["parameters"], kinds["bf16"]["last"]), (2, 7, [1.5] * 3),
                 "the file has the options, the model and the last losses")
    expect_equal((kinds["fp8-all"]["stopped"], kinds["bf16 again"]["val_loss"]),
                 (["step 2: loss nan"] * 3, [[[1, 2.0], [2, 1.5]]] * 3),
                 "the file says which runs stopped, and has all losses")


if __name__ == "__main__":
    run_tests(globals())

#!/usr/bin/env python3
"""Tests the report's conclusions with invented measurements, of a calm machine and of a busy one.

    python3 dev/chapter/test_report.py
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "tests")]
import fp8_quality
import measure
import parts_formats
import parts_parallel
import parts_single
from claims import claim, finish
from figures import pyplot
from formats import FORMATS

BY_NAME = {f.name: f for f in FORMATS}
ABOUT = {"peak_flops": 1e12, "gpu": False, "rounds": 3, "model": {"layers": 4}}


def check(part, cases):
    """cases: (name, Section, texts that its sentences and summary must contain, texts that they must not contain)."""
    for name, section, wanted, unwanted in cases:
        pyplot.close("all")
        text = " ".join([*section.sees, *(f"{what}: {here}" for what, _, here in section.rows)])
        missing, there = [w for w in wanted if w not in text], [w for w in unwanted if w in text]
        claim(not missing and not there, f"{part}: {name}", f"missing {missing}, unexpected {there} in: {text}")


# ---- parts 1 to 7

def test_conclusive():
    for ratios, expected, text in (
            ([1.24, 1.25, 1.27], True, "rounds that agree on +25 % are conclusive"),
            ([0.78, 0.80, 0.81], True, "rounds that agree on -20 % are conclusive"),
            ([0.80, 1.30, 0.75], False, "rounds of -25 to +30 % are not"),
            ([1.10, 1.25, 1.40], False, "rounds that are all slower, but differ by more than the effect, are not"),
            ([1.0, 1.0, 1.0], False, "no effect is not"),
            ([1.25], False, "a single round is not")):
        claim(measure.conclusive(ratios) == expected, text)


def test_activations():
    """The number of rows that the head processes at a time comes from the plan."""
    lengths = [1024, 2048, 4096]

    def made(head_rows):
        point = {"activations": 10**9, "per_token_layer": 100, "korthikanti": 2e9,
                 "model": {"layers": 2, "channels": 8}}
        curves = {f"{attention}, {mode}": [{**point, "head_rows": min(head_rows, T)} for T in lengths]
                  for attention in ("flash", "naive") for mode in measure.MODES}
        return parts_single.activations({"lengths": lengths, "curves": curves, "gpu_memory": 8 * 10**10,
                                         "gpt3_175b": dict.fromkeys(measure.MODES, point), "state": 10**10}, ABOUT)
    check("activations", [
        ("the head's rows are the plan's", made(2048), ["beyond T = 2,048, because the head processes 2,048 rows"], []),
        ("a head that takes all rows at once is not mentioned", made(4096), [], ["rows at a time"])])


COST = {"none": (1.0, 30), "selective": (1.0, 20), "full": (1.25, 5)}     # hardware FLOPs over the model's, bytes kept


def setup(times, reference, hardware=1.0, kept=30, micro_batch=4):
    """A result of Trainer.compare for rounds of these times."""
    return {"ms": times, "round_ms": times, "ratios": [a / b for a, b in zip(times, reference)], "tokens": 1024,
            "median_ms": sorted(times)[len(times) // 2], "losses": [5.0, 4.9], "planned": 10**7 * micro_batch,
            "resident": 10**8, "flops_per_token": {"model": 1e6, "hardware": 1e6 * hardware},
            "per_token_layer": 100 * kept, "activations": 10**6 * kept}


def recomputation(none, selective, full, naive=(200, 202, 198)):
    times, flash = {"none": none, "selective": selective, "full": full}, [100, 101, 99]
    attention = {str(T): {name: setup(list(ms), flash) for name, ms in
                          {"flash": flash, "naive": naive, "naive, selective": naive}.items()} for T in (128, 256)}
    return parts_single.recomputation(
        {"modes": {mode: setup(ms, none, *COST[mode]) for mode, ms in times.items()}, "attention": attention,
         "attention_tokens": 1024, "flops_7b": {"model": 100.0, "hardware": 123.0}}, ABOUT)


def test_recomputation():
    check("recomputation", [
        ("calm: all three costs", recomputation([100, 101, 99], [103, 104, 101.5], [125, 126, 124]),
         ["makes a step 1.25 times as long", "Selective recomputation costs +3.0 % of time",
          "takes 2.00 times as long as with flash", "Full recomputation: time: +25.0 % (measured",
          "the plan has +23.0 %"],
         ["o conclusion"]),
        ("busy: no conclusion", recomputation([100, 160, 110], [120, 105, 140], [80, 85, 150], [90, 250, 120]),
         ["No conclusion about the time of full recomputation (planned FLOPs: 1.25): the range of the rounds, -46.9 % "
          "to +36.4 %, is larger than their median effect, -20.0 %", "about the time of selective",
          "about the time of naive", "Full recomputation: time: no conclusion",
          "Selective recomputation: time: no conclusion", "It keeps 83 % less"],
         ["makes a step", "costs +", "times as long as with flash"]),
        ("one round: no conclusion", recomputation([100], [103], [125], naive=[200]), ["there was only one round"],
         ["makes a step", "costs +", "times as long as with"])])
    figure = recomputation([100, 160, 110], [103, 165, 113], [80, 85, 150]).figure
    alphas = [patch.get_alpha() for patch in figure.axes[0].patches[:3]]
    claim(alphas == [1, 1, 0.3], "recomputation: a bar without a conclusion is faint", str(alphas))


def test_accumulation():
    def made(one, all_at_once):
        splits = {"1 x 8": setup(one, one, micro_batch=1), "8 x 1": setup(all_at_once, one, micro_batch=8)}
        return parts_single.accumulation({"tokens": 2048, "sequences": 8, "splits": splits}, ABOUT)
    check("accumulation", [
        ("calm: the cost of small micro-batches", made([150, 151, 149], [100, 101, 99]),
         ["One sequence at a time takes 1.50 times as long here as 8", "10.0 MB for one", "80.0 MB for 8"], []),
        ("busy: no conclusion, but losses are compared", made([150, 90, 149], [100, 140, 99]),
         ["No conclusion about the time of one sequence", "losses differ by at most"], ["times as long"])])


def test_scan():
    def made(*rounds, whys=(None, None, None)):
        points = [{"micro_batch": 1, "seq_len": 64, "recompute": mode, "planned": 10**7, "why": why, "round_ms": ms,
                   "ms": sum(ms) / len(ms), "flops": 1e6, "tokens_per_s": 64e3 / (sum(ms) / len(ms))}
                  for mode, ms, why in zip(measure.MODES, rounds, whys)]
        return parts_single.scan(points, ABOUT)
    check("scan", [
        ("calm: highest and lowest", made([20, 20.1], [14, 14.2], [10, 10.1]),
         ["highest MFU is 0.6 % (micro-batch 1, T = 64, recompute full), in all rounds",
          "lowest MFU is 0.3 % (micro-batch 1, T = 64, recompute none), in all rounds"], ["conclusion", "not run"]),
        ("busy: the highest may not be it", made([20, 9], [14, 22], [10, 21]),
         ["overlap with those of 2 of the 2 others", "no conclusion: their rounds overlap"], ["in all rounds"]),
        ("one round: no conclusion", made([20], [10], [15]), ["may not be the highest"], ["in all rounds"]),
        ("points that were not run", made([20, 20.1], [1], [1], whys=(None, "does not fit", "no time left")),
         ["2 of 3 points were not run: 1 does not fit, 1 no time left"], [])])


# ---- part 8

# MB that each of 4 GPUs sends in a step for a million parameters, by (stage, micro-batches): 4 bytes times 3/4 times
# 2, 1 + 1, k + 1 and 3 k. With ZeRO 3 the plan gathers less.
SENT = {(0, 1): 6.0, (0, 3): 6.0, (1, 1): 6.0, (1, 3): 6.0, (2, 1): 6.0, (2, 3): 12.0, (3, 1): 6.7, (3, 3): 15.6}
RING = {**SENT, (3, 1): 9.0, (3, 3): 27.0}


def parallel(sent=None, drift=0.0, bits=0.0, surplus=0):
    """The section for 1 and 4 processes. sent: replaces parts of SENT; drift: relative, of 4 processes' last loss;
    bits: added to ZeRO 3's last loss; surplus: bytes that ZeRO 1 allocates beyond the plan."""
    def bytes_(gpus, zero):
        sharded = {"weights": 3, "adam_m": 1, "adam_v": 1, "gradients": 2}
        figures = {name: 4 * 10**6 // (gpus if zero >= stage else 1) for name, stage in sharded.items()}
        buffers = 3 * 10**6 if zero > 1 and gpus > 1 else 0
        figures.update(master=0, buffers=buffers, activations=10**6, workspace=0, cuda=0)
        return {**figures, "total": sum(figures.values())}

    def run(gpus, zero, parts):
        last = 4.0 * (1 + (drift if gpus > 1 else 0)) + (bits if zero == 3 else 0)
        return {"gpus": gpus, "zero": zero, "parts": parts, "as_planned": True, "norms": [1.0, 1.0],
                "losses": [5.0, last], "sent": 1e6 * {**SENT, **(sent or {})}[zero, parts] if gpus > 1 else None,
                "bytes_sent": 1e6 * SENT[zero, parts] if gpus > 1 else 0,
                "planned": bytes_(gpus, zero)["total"] + (surplus if zero == 1 else 0)}
    results = {"numbers": [1, 4], "parameters": 10**6, "precision": "fp32", "grad_dtype": "fp32",
               "plans": [{"gpus": gpus, "zero": zero, "bytes": bytes_(gpus, zero)}
                         for zero in measure.STAGES for gpus in (1, 4)],
               "runs": [run(4, zero, parts) for zero in measure.STAGES for parts in (1, 3)],
               "splits": [{**run(1, 0, 1), "parts": 4}, run(4, 0, 1)],
               "paper": {"parameters": 10**6, "bytes": [bytes_(64, zero) for zero in measure.STAGES]}}
    for each in results["runs"]:
        ring = parts_parallel.ring_bytes(results, each) / 1e6
        assert abs(ring - RING[each["zero"], each["parts"]]) < 1e-9, (each, ring)
    return parts_parallel.data_parallel(results, ABOUT)


def test_data_parallel():
    check("data parallelism", [
        ("memory, communication and losses agree", parallel(),
         ["All 10 runs allocated what was planned, to the byte", "with 4 processes 11.0 MB, 11.0 MB, 8.00 MB each",
          "All 8 runs sent what was planned. With ZeRO 3 this is 26 % to 42 % less", "so the curves coincide",
          "ZeRO 0 to 3 have the same bits",
          "1.00 / 1.00 / 1.12 (measured, 4 layers)", "losses within 0e+00"],
         ["more memory than the one before", "did not"]),
        ("a byte that was not planned", parallel(surplus=1),
         ["2 of 10 runs did not allocate what was planned, the first with ZeRO 1 and 4 processes: 11,000,001 bytes, "
          "planned 11,000,000"], ["to the byte"]),
        *[(f"ZeRO {zero} × {parts} must not send {sent} MB", parallel(sent={(zero, parts): sent}),
           ["1 of 8 runs did not send what was planned", f"planned {expected}"], ["sent what was planned. With"])
          for zero, parts, sent, expected in ((3, 3, 22.5, "15.6"), (0, 3, 18.0, "6.00"), (2, 3, 6.0, "12.0"))],
        ("rounding makes no other curve", parallel(drift=5e-5), ["at most 5.0e-05 of their size, so the curves"], []),
        ("losses that differ by more than rounding", parallel(drift=-1e-3), ["1.0e-03", "the curves do not coincide"],
         ["so the curves coincide"]),
        ("one bit that a stage changes", parallel(bits=4e-7),
         ["have different bits; their losses differ by at most 1.0e-07"], ["the same bits"]),
        ("left out without mpirun", parts_parallel.data_parallel({"why": "there is no mpirun on PATH"}, ABOUT),
         ["left out: there is no mpirun on PATH."], ["All"])])


class Made(measure.Trainer):
    """A trainer that runs nothing: `answer(**options)` gives the result of train, or raises."""
    def __init__(self, answer):
        self.answer, self.name, self.others, self.calls = answer, "./made", {}, []

    def train(self, steps, gpus=1, **options):
        return self.answer(steps=steps, **options)

    def fits(self, **options):
        return True


def test_why_alone():
    def fails(**options):
        raise measure.Failed("exit code 2 from mpirun", "the build is for one GPU")
    which = measure.shutil.which
    for text, found, most, answer, expected in (
            ("two processes that send to each other", "mpirun", 4, lambda **_: {"sent": 1e6}, None),
            ("a build for one GPU", "mpirun", 4, fails, "two processes do not run here (the build is for one GPU)"),
            ("two processes that are each alone", "mpirun", 4, lambda **_: {"sent": None},
             "two processes that mpirun started did not find each other"),
            ("one GPU", "mpirun", 1, fails, "this machine has one GPU"),
            ("no mpirun", None, 4, fails, "there is no mpirun on PATH")):
        measure.shutil.which = lambda name: found
        why = measure.why_alone(Made(answer), most, {})
        claim(why == expected, f"why there is no part 8: {text}", str(why))
    measure.shutil.which = which


def test_compare():
    order = []

    def answer(steps, name):
        order.append(name)
        return {"ms": [{"a": 10, "b": 20}[name] * (1 + len(order) // 3)] * steps}
    results = Made(answer).compare({"a": {"name": "a"}, "b": {"name": "b"}}, 3, 0.1)
    claim(order == ["a", "b", "b", "a", "a", "b"], "setups take turns, and turns in being first", str(order))
    expected = [b / a for a, b in zip(results["a"]["round_ms"], results["b"]["round_ms"])]
    claim(len(expected) == 3 and results["b"]["ratios"] == expected, "ratios compare runs of the same round",
          str(results["b"]["ratios"]))


# ---- parts 9 to 11

def test_formats():
    """Against known constants, Python's own FP16 and FP32, and all values of the 8-bit formats."""
    for name, expected in {"FP32": (3.4028234663852886e38, 2**-126, 2**-149, 2**-23),
                           "BF16": (3.3895313892515355e38, 2**-126, 2**-133, 2**-7),
                           "FP16": (65504, 2**-14, 2**-24, 2**-10), "E4M3": (448, 2**-6, 2**-9, 2**-3),
                           "E5M2": (57344, 2**-14, 2**-16, 2**-2)}.items():
        f = BY_NAME[name]
        found = (f.largest, f.smallest_normal, f.smallest, f.epsilon)
        claim(found == expected, f"{name}: largest, smallest normal, smallest, next to 1", str(found))
    for name, code, integer in (("FP16", "e", "H"), ("FP32", "f", "I")):
        f = BY_NAME[name]
        infinity = (2 ** f.exponent - 1) << f.mantissa
        decoded = [struct.unpack("<" + code, struct.pack("<" + integer, bits))[0]
                   for bits in (infinity - 1, 1, 1 << f.mantissa)]
        claim(decoded == [f.largest, f.smallest, f.smallest_normal], f"{name}: its bits as Python decodes them",
              str(decoded))
    for name, kept in (("E4M3", 1), ("E5M2", 4)):   # codes of NaN and infinity, at the end
        f = BY_NAME[name]
        parts = [divmod(code, 2 ** f.mantissa) for code in range(2 ** 7 - kept)]
        values = [(m if e == 0 else 2 ** f.mantissa + m) * 2.0 ** (max(e, 1) - f.bias - f.mantissa) for e, m in parts]
        claim(values == sorted(values) and values[-1] == f.largest and values[1] == f.smallest,
              f"{name}: the largest and the smallest of all its values", f"{values[1]}, {values[-1]}")
        worst = max((b - a) / 2 / a for a, b in zip(values, values[1:]) if 1 <= a < 2)
        claim(f.worst_error(0) == worst and f.worst_error(-40) == 1 and f.worst_error(20) is None,
              f"{name}: the largest rounding error", f"{worst} {f.worst_error(0)}")


def test_formats_report():
    def made(**spread):
        kinds = {"activations": {0: 1.0}, "weights": {-6: 1.0}, "gradients of weights": {-12: 1.0},
                 "gradients of activations": {-26: 0.25, -20: 0.25, -10: 0.5},
                 "updates of weights": {-15: 0.75, -14: 0.25}, **spread}
        shares = {name: {"zeros": 0.0, "powers": {str(power): part for power, part in powers.items()}}
                  for name, powers in kinds.items()}
        return parts_formats.formats({"values": {"tokens": 100, "spread": shares}}, ABOUT)
    without = parts_formats.formats({"why": "there is no such program"}, ABOUT)
    check("formats", [
        ("underflow by format, small updates, ranges", made(),
         ["25 % in FP16, 50 % in E5M2, 50 % in E4M3", "No value is too large for any format",
          "numbers are 2^-13 apart: 75 % of the updates are smaller than half of that",
          "FP32 254 / BF16 254 / FP16 30 / E4M3 15 / E5M2 30"], []),
        ("values that are too large", made(activations={0: 0.9, 9: 0.1}), ["Up to 10 % of the values of one kind"], []),
        ("left out without a program", without, ["left out: there is no such program."], ["underflow"])])
    claim(len(without.figure.axes) == 1, "formats: without a program there is one panel")


def runs(ratios, share=None, stopped=(), **more):
    """A result of `demonstration` for runs that end at these ratios to the first kind's."""
    more.update({"unchanged": [[step, share] for step in range(1, 11)]} if share is not None else {})
    return {"last": [None if seed in stopped else 4.0 * ratio for seed, ratio in enumerate(ratios)],
            "losses": [[step, 5.0 - 0.1 * step] for step in range(1, 11)],
            "stopped": ["step 7: loss nan" if seed in stopped else None for seed in range(3)],
            "ratios": [ratio for seed, ratio in enumerate(ratios) if seed not in stopped], **more}


def failures(master=(1.03, 1.031, 1.032), share=0.5, sums=(0.0017, 0.05), fp16=(1.2, 1.21, 1.19), zeros=(0.3, 0.001),
             fp8=(1.5, 1.51, 1.49), stopped=(), without=None):
    one = (1.0, 1.0, 1.0)
    lost = {"ln1": {"flushed": 0.1, "saturated": 0.0}, "dres": {"flushed": 0.4, "saturated": 0.01}}
    scaled = {"ln1": {"flushed": 0.001, "saturated": 0.0}, "dres": {"flushed": 0.002, "saturated": 0.0}}
    return parts_formats.failures({
        "master": {"rates": {"0.001": {"fp32": runs(one), "none": runs(master, share)}}},
        "sums": {"sums": [{"micro_batches": 1, "error": sums[0], "rounded_once": 0.0016},
                          {"micro_batches": 256, "error": sums[1], "rounded_once": 0.0016}], "copies": [0.1, 0.26]},
        "loss_scaling": {"tokens": 100, "kinds": {"dynamic": runs(one, zero_gradients=[[5, zeros[1]], [10, zeros[1]]]),
                                                  "none": runs(fp16, zero_gradients=[[5, zeros[0]], [10, zeros[0]]])}},
        "fp8_scaling": {"tokens": 100, "kinds": {
            "bf16": runs(one), "delayed": runs((1.001, 1.002, 0.999), fp8=[[10, scaled]]),
            "none": runs(fp8, stopped=stopped, fp8=[[10, lost]])}}, **(without or {})}, ABOUT)


def test_failures():
    left_out = {"loss_scaling": {"why": "no --fp16 PROGRAM was given"}, "fp8_scaling": {"why": "this GPU has no FP8"}}
    some = failures(without=left_out)
    nothing = failures(without={**left_out, "master": {"why": "x"}, "sums": {"why": "x"}})
    check("failures", [
        ("clear effects", failures(),
         ["50 % at a learning rate of 0.001", "At 0.001 without a copy, the last loss is 3.1 % above that with one "
          "(seeds +3 % to +3.2 %)", "This agrees with the chapter: without an FP32 copy",
          "0.17 % of their norm after 1 ", "5.0 % after 256", "grows 29.4 times. Independent",
          "30 % of the gradients are 0 without scaling and 0.10 % with", "Without scaling, the last loss is 20 % above",
          "This agrees with the chapter: FP16 needs loss scaling",
          "Without scales, dres loses the most values: 40 % become 0, 1.0 % are too large",
          "No conclusion about the last loss with delayed scales: the range of the seeds",
          "master copy: at a learning rate of 0.001 50 % do; loss +3 % to +3.2 % (",
          "FP8 without scales, against BF16: loss +49 % to +51 % ("], []),
        ("vague effects", failures(master=(1.0, 1.02, 0.99), fp16=(1.0, 1.001, 0.999), sums=(0.0017, 0.002)),
         ["no conclusion about the chapter's statement: without an FP32 copy", "loss -1 % to +2 %, no conclusion",
          "no conclusion about the chapter's statement: FP16 needs", "loss -0.1 % to +0.1 %, no conclusion",
          "hardly grows here (1.18 times), which contradicts the chapter"], []),
        ("a better loss without a technique", failures(master=(0.97, 0.969, 0.968), zeros=(0.1, 0.2)),
         ["does not agree with the chapter", "the loss is better without", "does not reduce the number of zeros"], []),
        ("growth of independent roundings", failures(sums=(0.0017, 0.017)), ["grows 10.0 times."], ["Independent"]),
        ("a run that diverges", failures(fp8=(0.999, 1, 1.001), stopped=(1,)),
         ['Without scales, 1 of 3 runs stopped early ("step 7: loss nan").', "BF16: runs stop (",
          "This agrees with the chapter: matmuls in FP8 need scales"], []),
        ("what cannot be measured is left out", some,
         ["FP16 without loss scaling: left out, because no --fp16 PROGRAM was given.", "because this GPU has no FP8"],
         []),
        ("all of it is left out", nothing, ["Gradients summed in BF16: left out"], ["agrees"])])
    claim(len(some.figure.axes) == 3 and len(some.rows) == 2 and nothing.figure is None and not nothing.rows,
          "failures: panels and summary only for what was measured")


def test_demonstration():
    calls = []

    class Program:
        few_words = "text"

        def log_of(self, data, options, may_stop):
            seed, kind = options["seed"], options["kind"]
            calls.append((seed, kind))
            losses = [5.0] * 27 + {"a": [2.0, 2.1, 2.2], "b": [4.2, 99.0, 3.0]}[kind]
            records = [{"step": i + 1, "loss": loss, "unchanged": seed / 10} for i, loss in enumerate(losses)]
            stops = seed == 2 and kind == "b"
            return ([{"run": {}}, *(records[:10] if stops else [*records, {"step": 30, "val_loss": 1}])], "",
                    "step 11: loss nan" if stops else None)
    results = measure.demonstration(Program(), measure.SIZES["quick"], {"a": {"kind": "a"}, "b": {"kind": "b"}},
                                    ["unchanged"], 30)
    claim(calls == [(seed, kind) for seed in (1, 2, 3) for kind in "ab"], "each kind runs with each seed", str(calls))
    claim(results["b"]["ratios"] == [4.2 / 2.1] * 2 and results["b"]["stopped"] == [None, "step 11: loss nan", None],
          "ratios are those of medians of the last tenth of finished runs", str(results["b"]))
    claim(len(results["a"]["losses"]) == 30 and results["a"]["unchanged"][3] == [4, 0.1], "curves: the first seed's")


def quality(over, stopped=False):
    records = [{"format": name, "seed": seed, "stopped": "step 150: loss nan" if stopped and last else None,
                "losses": [3.0] if stopped and last else [3.0, 2.0 * seed * ratios[seed - 1]], "seconds": 1,
                "device": "made up", "precision": "bf16", "parameters": 10**7}
               for seed in (1, 2, 3) for name, ratios in {"bf16": (1, 1, 1), **over}.items()
               for last in [name != "bf16" and seed == 3]]
    made = json.loads(fp8_quality.collected(records, {"steps": 200, "eval_every": 100}))
    return parts_formats.fp8_quality(made, ABOUT)


def test_quality():
    check("whole runs", [
        ("FP8's last loss over BF16's, seed by seed", quality({"fp8, delayed": (1.01, 1.011, 1.009),
                                                               "fp8-all": (0.99, 1.02, 1.01)}),
         ["fp8, delayed ends +1 % from bf16", "No conclusion about the last loss of fp8-all: the range of the seeds",
          "nanochat: about 5 %", "fp8, delayed 1.0100; fp8-all 1.0100", "+0.98 % (fp8, delayed), +1 % (fp8-all)."], []),
        ("the effect of rounding alone", quality({"bf16 again": (0.99, 1.02, 1.01), "fp8-all": (1, 1, 1)}),
         ["ends -1 % to +2 % from bf16, seed by seed", "FP8: fp8-all"], []),
        ("a run that diverged", quality({"fp8-all": (1.0, 1.0, 1.0)}, stopped=True),
         ['fp8-all: 1 of 3 runs stopped early ("step 150: loss nan")'], []),
        ("left out without its file", parts_formats.fp8_quality({"why": "there is no file"}, ABOUT),
         ["left out: there is no file"], ["ends"])])


# A trainer that only notes that it was called; the third call fails with {reason}.
STUB = """#!{python}
import json, os, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
calls = os.path.join(os.path.dirname(sys.argv[0]), "calls")
with open(calls, "a") as file: file.write(options["--matmul"] + options["--seed"] + "\\n")
third = len(open(calls).read().split()) == 3
os.makedirs(options["--out"], exist_ok=True)
with open(options["--out"] + "/log.jsonl", "w") as log:
    log.write(json.dumps({{"run": {{"device": "stub", "precision": "bf16", "model": {{"parameters": 7}}}}}}) + "\\n")
    log.write(json.dumps({{"step": 1, "val_loss": 2.0}}) + "\\n")
    if not third: log.write(json.dumps({{"step": 2, "val_loss": 1.0}}) + "\\n")
if third: sys.exit("train_gpt: {reason}")
"""


def test_quality_script():
    """Finished runs are kept; a loss that is not finite is a result, any other failure is not."""
    with tempfile.TemporaryDirectory() as folder:
        program, out, collected = (os.path.join(folder, name) for name in ("stub", "out", "all.json"))

        def call(*more, out=out, reason="step 2: loss nan"):
            with open(program, "w", encoding="utf-8") as file:
                file.write(STUB.format(python=sys.executable, reason=reason))
            os.chmod(program, 0o755)
            return subprocess.run([sys.executable, os.path.join(HERE, "fp8_quality.py"), "--train-gpt", program,
                                   "--out", out, "--collect", collected, "--steps", "2",
                                   "--formats", "bf16", "fp8-all", *more], capture_output=True, text=True)

        def found(key):
            with open(collected, encoding="utf-8") as file:
                return [run[key] for run in json.load(file)["runs"]]
        first = call("--seeds", "1", "2", reason="no such file")
        claim(first.returncode == 1 and "no such file" in first.stderr and not os.path.exists(collected)
              and sorted(os.listdir(out)) == ["bf16-seed1.json", "fp8-all-seed1.json"],
              "a failed run is no result; the runs before it are kept", first.stderr)
        again = call("--seeds", "1", "2")
        with open(os.path.join(folder, "calls"), encoding="utf-8") as file:
            calls = file.read().split()
        claim(again.returncode == 0 and calls == ["plain1", "fp8-all1", "plain2", "plain2", "fp8-all2"]
              and found("losses") == [[2.0, 1.0]] * 4, "the next call does the missing runs and collects all",
              again.stderr + str(calls))
        other = call("--seeds", "1", "--lr", "0.5")
        claim(other.returncode == 2 and "name another --out" in other.stderr, "runs with other options are rejected",
              other.stderr)
        os.remove(os.path.join(folder, "calls"))
        diverged = call("--seeds", "1", "2", out=os.path.join(folder, "diverging"))
        claim(diverged.returncode == 0 and found("stopped") == [None, None, "step 2: loss nan", None]
              and found("losses")[2] == [2.0], "a loss that is not finite is a result", diverged.stderr)
        nothing = call("--seeds", "3", "--minutes", "0")
        claim(nothing.returncode == 1 and "no run was done" in nothing.stderr, "no run starts after --minutes",
              nothing.stderr)


def test_results():
    """The committed runs: three seeds of each format, with a loss for each evaluation."""
    with open(measure.FP8_QUALITY, encoding="utf-8") as file:
        made = json.load(file)
    count = made["options"]["steps"] // made["options"]["eval_every"]
    wrong = [run for run in made["runs"] if run["stopped"] or len(run["losses"]) != count]
    seeds = {name: [run["seed"] for run in made["runs"] if run["format"] == name]
             for name in {run["format"] for run in made["runs"]}}
    claim(not wrong and fp8_quality.REFERENCE in seeds and all(each == [1, 2, 3] for each in seeds.values()),
          "fp8_quality.json has all losses of three seeds of each format", f"{wrong} {seeds}")


if __name__ == "__main__":
    for test in (test_conclusive, test_activations, test_recomputation, test_accumulation, test_scan,
                 test_data_parallel, test_why_alone, test_compare, test_formats, test_formats_report, test_failures,
                 test_demonstration, test_quality, test_quality_script, test_results):
        test()
    finish()

#!/usr/bin/env python3
"""Tests of what the report concludes, from measurements that are made up: calm ones, and a busy machine's.

    python3 dev/chapter/test_report.py
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import fp8_quality
import measure
import report
from formats import FORMATS

passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


# ---- made-up measurements

ABOUT = {"peak_flops": 1e12, "gpu": False, "rounds": 3}
# Hardware's FLOPs over the model's, bytes kept.
COST = {"none": (1.0, 30), "selective": (1.0, 20), "full": (1.25, 5)}


def setup(name, times, reference, hardware=1.0, kept=30, micro_batch=4):
    """What `compare` gives for rounds of these times."""
    return {"ms": times, "round_ms": times, "ratios": [a / b for a, b in zip(times, reference)], "tokens": 1024,
            "median_ms": sorted(times)[len(times) // 2], "losses": [5.0, 4.9], "planned": 10**7 * micro_batch,
            "resident": 10**8, "flops_per_token": {"model": 1e6, "hardware": 1e6 * hardware},
            "per_token_layer": 100 * kept, "activations": 10**6 * kept}


def recomputation(none, selective, full, naive=(200, 202, 198)):
    times = {"none": none, "selective": selective, "full": full}
    flash = [100, 101, 99]
    attention = {str(T): {name: setup(name, list(ms), flash) for name, ms in
                          {"flash": flash, "naive": naive, "naive, selective": naive}.items()} for T in (128, 256)}
    return {"modes": {mode: setup(mode, list(ms), none, *COST[mode]) for mode, ms in times.items()},
            "attention": attention, "attention_tokens": 1024}


def accumulation(one, all_at_once):
    return {"tokens": 2048, "splits": {"1 x 8": setup("1 x 8", one, one, micro_batch=1),
                                       "8 x 1": setup("8 x 1", all_at_once, one, micro_batch=8)}}


def scan(*rounds):
    """A point for each way to recompute, with the times of its rounds."""
    return [{"micro_batch": 1, "seq_len": 64, "recompute": mode, "planned": 10**7, "why": None, "round_ms": ms,
             "ms": sum(ms) / len(ms), "flops": 1e6, "tokens_per_s": 64e3 / (sum(ms) / len(ms))}
            for mode, ms in zip(measure.MODES, rounds)]


MODEL = {"layers": 4, "channels": 100}     # with 121,300 parameters in a layer
# MB that each of 4 GPUs sends for a million parameters, by (stage, micro-batches): 4 bytes times 3/4 times the numbers
# 2, 1 + 1, k + 1 and 3 k. Of ZeRO 3's gathers 2 k - 1 are without 757,400 numbers: what is no layer's, and two layers.
SENT = {(0, 1): 6.0, (0, 3): 6.0, (1, 1): 6.0, (1, 3): 6.0, (2, 1): 6.0, (2, 3): 12.0, (3, 1): 6.7, (3, 3): 15.6}


def parallel(sent=None, drift=0.0, bits=0.0, surplus=0, speed=None):
    """One process and 4. sent: instead of SENT; drift: relative, of 4 processes' last loss; bits: added to ZeRO 3's;
    surplus: bytes that ZeRO 1 allocates beyond the plan."""
    sent = {**SENT, **(sent or {})}

    def bytes_(gpus, zero):
        sliced = {"weights": 3, "adam_m": 1, "adam_v": 1, "gradients": 2}
        figures = {name: 4 * 10**6 // (gpus if zero >= stage else 1) for name, stage in sliced.items()}
        buffers = 3 * 10**6 if zero > 1 and gpus > 1 else 0
        figures.update(master=0, buffers=buffers, activations=10**6, workspace=0, cuda=0)
        return {**figures, "total": sum(figures.values())}

    def run(gpus, zero, parts):
        last = 4.0 * (1 + (drift if gpus > 1 else 0)) + (bits if zero == 3 else 0)
        return {"gpus": gpus, "zero": zero, "parts": parts, "as_planned": True, "norms": [1.0, 1.0],
                "losses": [5.0, last], "sent": 1e6 * sent[zero, parts] if gpus > 1 else None,
                "planned": bytes_(gpus, zero)["total"] + (surplus if zero == 1 else 0)}
    return {"numbers": [1, 4], "parameters": 10**6, "precision": "fp32", "grad_dtype": "fp32", "speed": speed,
            "plans": [{"gpus": gpus, "zero": zero, "bytes": bytes_(gpus, zero)}
                      for zero in range(4) for gpus in (1, 4)],
            "runs": [run(4, zero, parts) for zero in range(4) for parts in (1, 3)],
            "splits": [{**run(1, 0, 1), "parts": 4}, run(4, 0, 1)],
            "paper": {"parameters": 10**6, "bytes": [bytes_(64, zero) for zero in range(4)]}}


def text_of(section):
    report.pyplot.close("all")
    return " ".join(section.sees), " ".join(f"{what} {here}" for what, _, here in section.rows)


# ---- claims

def test_told():
    claim(measure.told([1.24, 1.25, 1.27]), "rounds that agree on +25 % tell")
    claim(measure.told([0.78, 0.80, 0.81]), "and on -20 %")
    claim(not measure.told([0.80, 1.30, 0.75]), "rounds of -25 to +30 % tell nothing")
    claim(not measure.told([1.10, 1.25, 1.40]),
          "rounds that are all slower, but differ by more than the effect, neither")
    claim(not measure.told([1.0, 1.0, 1.0]), "no effect is no conclusion")
    claim(not measure.told([1.25]), "a single round is no conclusion")


def test_recomputation():
    calm, rows = text_of(report.recomputation(recomputation([100, 101, 99], [103, 104, 101.5], [125, 126, 124]), ABOUT))
    claim("makes a step 1.25 times as long" in calm, "calm: what full recomputation costs", calm)
    claim("Selective recomputation costs +3.0 % of time" in calm, "calm: what selective costs", calm)
    claim("takes 2.00 times as long as flash" in calm, "calm: what naive attention costs", calm)
    claim("+25.3 % (measured" in rows or "+25.0 % (measured" in rows or "+24.8 % (measured" in rows,
          "calm: it is in the summary", rows)
    claim("no conclusion" not in rows and "not told" not in calm, "calm: nothing is withheld", calm + rows)

    busy, rows = text_of(report.recomputation(recomputation([100, 160, 110], [120, 105, 140], [80, 85, 150],
                                                            naive=[90, 250, 120]), ABOUT))
    claim("makes a step" not in busy and "costs +" not in busy and "times as long as" not in busy,
          "busy: no conclusion about time", busy)
    claim(busy.count("is not told here: the rounds, ") == 3, "busy: it says so, of each of the three", busy)

    claim("What full recomputation costs in time (its FLOPs say 1.25) is not told here: the rounds, -46.9 % to "
          "+36.4 %, differ by more than the effect, -20.0 % in their median" in busy, "busy: and why", busy)
    claim(rows.count("no conclusion: the rounds") == 2, "busy: so does the summary", rows)
    claim("It keeps 83 % less" in busy, "busy: what is planned is said all the same", busy)

    one, _ = text_of(report.recomputation(recomputation([100], [103], [125], naive=[200]), ABOUT))
    claim(one.count("there was one round") == 3, "one round: no conclusion", one)

    figure = report.recomputation(recomputation([100, 160, 110], [103, 165, 113], [80, 85, 150]), ABOUT).figure
    bars = [patch.get_alpha() for patch in figure.axes[0].patches[:3]]
    claim(bars == [1, 1, 0.3], "a bar that is no conclusion is faint", str(bars))


def test_accumulation():
    calm, _ = text_of(report.accumulation(accumulation([150, 151, 149], [100, 101, 99]), ABOUT))
    claim("One sequence at a time takes 1.50 times as long here as 8" in calm,
          "calm: what small micro-batches cost", calm)
    busy, _ = text_of(report.accumulation(accumulation([150, 90, 149], [100, 140, 99]), ABOUT))
    claim("takes" not in busy and "What one sequence at a time costs here is not told here" in busy,
          "busy: no conclusion, and it says so", busy)
    claim("losses agree" in busy, "busy: losses are compared all the same")


def test_scan():
    calm, rows = text_of(report.scan(scan([20, 20.1], [14, 14.2], [10, 10.1]), ABOUT))
    claim("highest MFU here" in calm and calm.count("which the rounds tell from all others") == 2,
          "calm: highest and lowest", calm)
    busy, rows = text_of(report.scan(scan([20, 9], [14, 22], [10, 21]), ABOUT))
    claim(busy.count("is no conclusion") == 2 and "from 2 of the 2 others" in busy,
          "busy: which is highest is no conclusion", busy)
    claim("do not tell the two apart" in rows, "busy: the summary says so", rows)
    once, rows = text_of(report.scan(scan([20], [10], [15]), ABOUT))
    claim(once.count("is no conclusion") == 2, "points that were measured once: no conclusion", once)


def parallel_text(gpu=False, **more):
    return text_of(report.data_parallel(parallel(**more), {"gpu": gpu, "cpus": 2, "model": MODEL}))


def test_data_parallel():
    right, rows = parallel_text()
    claim("All 10 runs allocated what was planned, to the byte" in right, "memory is as planned", right)
    claim("with 4 processes 11.0 MB, 11.0 MB, 8.00 MB each" in right, "memory of each stage", right)
    claim("more than they save" not in right, "buffers that only take what is saved are no loss", right)
    claim("All runs sent that, but for ZeRO 3, which sent less, and as much less as it should" in right,
          "what is sent is by the formula, less what is still there", right)
    claim("lie on each other" in right and "ZeRO 0 to 3 agree bit by bit" in right, "losses agree", right)
    claim("Nothing is concluded about throughput: these processes share one machine's 2 CPUs" in right,
          "nothing is concluded about throughput on a CPU", right)
    claim("1.00 / 1.00 / 1.12 (measured, 4 layers)" in rows and "losses within 0e+00" in rows,
          "they are in the summary", rows)

    wrong, _ = parallel_text(surplus=1)
    claim("2 of 10 runs did not allocate what was planned, the first with ZeRO 1 and 4 processes: 11,000,001 bytes, "
          "planned 11,000,000" in wrong and "to the byte" not in wrong, "a byte that was not planned is told", wrong)
    for run, sent, expected in (((3, 3), 22.5, "15.6 MB"), ((0, 3), 18.0, "6.00 MB"), ((2, 3), 6.0, "12.0 MB")):
        wrong, _ = parallel_text(sent={run: sent})
        claim("1 of 8 runs sent something else" in wrong and f"expected {expected}" in wrong
              and "All runs" not in wrong, f"ZeRO {run[0]} × {run[1]}: {sent} MB are not {expected}", wrong)
    near, _ = parallel_text(drift=5e-5)
    claim("differ by 5.0e-05 of their size at most, so that the curves lie" in near,
          "rounding makes no other curve", near)
    wrong, rows = parallel_text(drift=-1e-3)
    claim("differ by 1.0e-03" in wrong and "not one curve" in wrong and "lie on each other" not in wrong,
          "losses that differ by more than rounding are told", wrong)
    wrong, _ = parallel_text(bits=4e-7)
    claim("With 4, without accumulation, ZeRO 0 to 3 do not agree bit by bit; their losses differ by 1.0e-07" in wrong,
          "one bit that a stage changes is told", wrong)

    def speed(times):
        one = {**setup("1 GPU", [100, 101, 99], [100, 101, 99]), "gpus": 1, "sending_ms": None, "exposed_ms": None}
        many = {**setup("many", times, [100, 101, 99]), "gpus": 4, "tokens": 4096, "sending_ms": 8.0, "exposed_ms": 2.0}
        return {"1 GPU": one, "4 GPUs, ZeRO 0": many, "4 GPUs, ZeRO 3": None}
    calm, _ = parallel_text(gpu=True, speed=speed([125, 126, 124]))
    claim("4 GPUs, ZeRO 0: each has 80 % of the tokens/s of one alone" in calm and "Nothing is concluded" not in calm,
          "GPUs: throughput of each", calm)
    busy, _ = parallel_text(gpu=True, speed=speed([100, 160, 90]))
    claim("whether each is slower than one alone is not told here: the rounds" in busy
          and "of the tokens/s" not in busy, "GPUs, busy: no conclusion, and it says so", busy)

    left_out = report.data_parallel({"why": "there is no mpirun on PATH"}, ABOUT)
    claim(left_out.figure is None and "left out: there is no mpirun on PATH." in left_out.sees[0] and not left_out.rows,
          "without mpirun the part is left out, with why", str(left_out.sees))


def test_why_alone():
    """What keeps the trainer from running as several processes, from its words."""
    class Made(measure.Trainer):
        def __init__(self, sent=1e6, error=None):
            self.sent, self.error = sent, error

        def train(self, steps, gpus=1, **options):
            if self.error:
                raise measure.Failed("exit code 2 from mpirun", self.error)
            return {"sent": self.sent}
    which = measure.shutil.which
    measure.shutil.which = lambda name: "/usr/bin/mpirun"
    claim(measure.why_alone(Made(), 4, {}) is None, "two processes that send to each other: nothing is left out")
    why = measure.why_alone(Made(error="train_gpt: this process is one of many, but the build is for one GPU"), 4, {})
    claim(why == "two processes do not run here (this process is one of many, but the build is for one GPU)",
          "a build for one GPU", str(why))
    why = measure.why_alone(Made(sent=None), 4, {})
    claim(why and "did not find each other" in why, "two processes that are each alone", str(why))
    claim(measure.why_alone(Made(), 1, {}) == "this machine has one GPU", "one GPU")
    measure.shutil.which = lambda name: None
    claim(measure.why_alone(Made(), 4, {}) == "there is no mpirun on PATH", "no mpirun")
    measure.shutil.which = which


def test_compare():
    """Each round begins with another setup, and a round's ratio is over the first setup's time in that round."""
    class Made(measure.Trainer):
        def __init__(self):
            self.order = []

        def fits(self, **options):
            return True

        def train(self, steps, name):
            self.order.append(name)
            return {"ms": [{"a": 10, "b": 20}[name] * (1 + len(self.order) // 3)] * steps}
    made = Made()
    results = made.compare({"a": {"name": "a"}, "b": {"name": "b"}}, 3, 0.1)
    claim(made.order == ["a", "b", "b", "a", "a", "b"], "setups take turns, and turns in being first", str(made.order))
    expected = [b / a for a, b in zip(results["a"]["round_ms"], results["b"]["round_ms"])]
    claim(len(expected) == 3 and results["b"]["ratios"] == expected, "ratios are those of rounds",
          str(results["b"]["ratios"]))


# ---- few bits

BY_NAME = {f.name: f for f in FORMATS}


def test_formats():
    """Against constants that everybody knows, and numbers as Python's own FP16 and FP32 have them."""
    known = {"FP32": (3.4028234663852886e38, 2**-126, 2**-149, 2**-23),
             "BF16": (3.3895313892515355e38, 2**-126, 2**-133, 2**-7),
             "FP16": (65504, 2**-14, 2**-24, 2**-10),
             "E4M3": (448, 2**-6, 2**-9, 2**-3),
             "E5M2": (57344, 2**-14, 2**-16, 2**-2)}
    for name, expected in known.items():
        f = BY_NAME[name]
        found = (f.largest, f.smallest_normal, f.smallest, f.epsilon)
        claim(found == expected, f"{name}: largest, smallest normal, smallest, next to 1", str(found))
    for name, code, integer in (("FP16", "e", "H"), ("FP32", "f", "I")):
        f = BY_NAME[name]
        infinity = (2 ** f.exponent - 1) << f.mantissa
        decoded = [struct.unpack("<" + code, struct.pack("<" + integer, bits))[0]
                   for bits in (infinity - 1, 1, 1 << f.mantissa)]
        claim(decoded == [f.largest, f.smallest, f.smallest_normal], f"{name}: as its bits are decoded", str(decoded))
    # Each value of 8 bits, by the formula; of E4M3 the last one is NaN, of E5M2 the last four are infinity and NaNs.
    for name, kept in (("E4M3", 1), ("E5M2", 4)):
        f = BY_NAME[name]
        values = []
        for code in range(2 ** 7 - kept):
            e, m = code >> f.mantissa, code % 2 ** f.mantissa
            values.append((m if e == 0 else 2 ** f.mantissa + m) * 2.0 ** (max(e, 1) - f.bias - f.mantissa))
        claim(values == sorted(values) and values[-1] == f.largest and values[1] == f.smallest,
              f"{name}: the largest and the smallest of all its values", f"{values[1]}, {values[-1]}")
        worst = max((b - a) / 2 / a for a, b in zip(values, values[1:]) if 1 <= a < 2)
        claim(f.worst_error(0) == worst and f.worst_error(-40) == 1 and f.worst_error(20) is None,
              f"{name}: how far rounding is off", f"{worst} {f.worst_error(0)}")


def spread_values(powers, zeros=0.0):
    return {"zeros": zeros, "powers": {str(power): part for power, part in powers.items()}}


def formats_text(**spread):
    kinds = {"activations": {0: 1.0}, "weights": {-6: 1.0}, "gradients of weights": {-12: 1.0},
             "gradients of activations": {-26: 0.25, -20: 0.25, -10: 0.5}, "updates of weights": {-15: 0.75, -14: 0.25}}
    kinds.update(spread)
    made = {"formats": [vars(f) for f in FORMATS], "why": None,
            "values": {"tokens": 100, "spread": {name: spread_values(powers) for name, powers in kinds.items()}}}
    return text_of(report.formats(made, ABOUT)), made


def test_formats_report():
    (words, rows), made = formats_text()
    claim("25 % in FP16, 50 % in E5M2, 50 % in E4M3" in words, "what becomes 0, by format", words)
    claim("numbers are 2^-13 apart: 75 % of the updates are less than half of that" in words,
          "updates that are too small for the median weight", words)
    claim("Nothing is too large for any format" in words, "nothing is too large", words)
    claim("FP32 254 / BF16 254 / FP16 30 / E4M3 15 / E5M2 30" in rows, "ranges are in the summary", rows)
    (words, _), _ = formats_text(activations={0: 0.9, 9: 0.1})
    claim("Of some kind 10 % are too large for E4M3" in words, "what is too large is told", words)
    without = report.formats({**made, "values": None, "why": "there is no such program"}, ABOUT)
    claim("left out: there is no such program." in without.sees[1] and len(without.figure.axes) == 1,
          "without a program the spread is left out, with why", str(without.sees))


def runs(ratios, share=None, stopped=(), **more):
    """What `lesson` gives for runs that end at these ratios to the first kind's."""
    last = [4.0 * ratio for ratio in ratios]
    for seed in stopped:
        last[seed] = None
    curve = [[step, 5.0 - 0.1 * step] for step in range(1, 11)]
    more.update({"unchanged": [[step, share] for step in range(1, 11)]} if share is not None else {})
    return {"last": last, "losses": curve,
            "stopped": ["step 7: loss nan" if seed in stopped else None for seed in range(3)],
            "ratios": [ratio for seed, ratio in enumerate(ratios) if seed not in stopped], **more}


def failures(master=(1.03, 1.031, 1.032), share=0.5, sums=(0.0017, 0.05), fp16=(1.2, 1.21, 1.19), zeros=(0.3, 0.001),
             fp8=(1.5, 1.51, 1.49), stopped=()):
    one = (1.0, 1.0, 1.0)
    lost = {"ln1": {"flushed": 0.1, "saturated": 0.0}, "dres": {"flushed": 0.4, "saturated": 0.01}}
    scaled = {"ln1": {"flushed": 0.001, "saturated": 0.0}, "dres": {"flushed": 0.002, "saturated": 0.0}}
    return {
        "master": {"rates": {"0.001": {"fp32": runs(one), "none": runs(master, share)}}},
        "sums": {"sums": [{"micro_batches": 1, "error": sums[0], "rounded_once": 0.0016},
                          {"micro_batches": 256, "error": sums[1], "rounded_once": 0.0016}], "copies": [0.1, 0.26]},
        "loss_scaling": {"tokens": 100, "kinds": {"dynamic": runs(one, zero_gradients=[[5, zeros[1]], [10, zeros[1]]]),
                                                  "none": runs(fp16, zero_gradients=[[5, zeros[0]], [10, zeros[0]]])}},
        "fp8_scaling": {"tokens": 100, "kinds": {
            "bf16": runs(one), "delayed": runs((1.001, 1.002, 0.999), fp8=[[10, scaled]]),
            "none": runs(fp8, stopped=stopped, fp8=[[10, lost]])}}}


def test_failures():
    section = report.failures(failures(), ABOUT)
    clear, rows = text_of(section)
    claim("50 % at a learning rate of 0.001" in clear and "Without a copy" not in clear
          and "At 0.001, without a copy, the loss ends 3.1 % above that with one (seeds +3 % to +3.2 %)" in clear,
          "a master copy: updates that vanish, and the loss", clear)
    claim("without an FP32 copy of the weights updates vanish, and training suffers" in section.sees[0]
          and section.sees[0].endswith("training suffers.") and "As the chapter says" in section.sees[0],
          "and it is as the chapter says", section.sees[0])
    claim("0.17 % of their norm after 1" in clear and "5.0 % after 256" in clear and "grows, here 29.4 times" in clear
          and "more than the root" in clear, "sums in BF16: the error, and that it grows", section.sees[1])
    claim("30 % of the gradients are 0 without scaling, 0.10 % with it" in clear and "the loss ends 20 % above" in clear
          and "As the chapter says: FP16 needs loss scaling" in clear, "FP16: zeros and the loss", section.sees[2])
    claim("Without scales the most is lost of dres: 40 % become 0, 1.0 % are too large" in clear
          and "As the chapter says: matmuls in FP8 need scales" in clear, "FP8: what is lost, and the loss",
          section.sees[3])
    claim("With delayed scales the loss may end above or below that of BF16, which is not told here: the seeds"
          in clear, "FP8 with scales: seeds that do not tell give no conclusion", section.sees[3])
    claim(len(section.rows) == 4 and "no conclusion" not in rows, "all four are in the summary", rows)

    made = failures(master=(1.0, 1.02, 0.99), fp16=(1.0, 1.001, 0.999), sums=(0.0017, 0.002))
    vague, rows = text_of(report.failures(made, ABOUT))
    claim("No conclusion about the loss, then: the chapter says that without an FP32 copy" in vague
          and "No conclusion about the loss, then: the chapter says that FP16 needs" in vague,
          "seeds that differ by more than the effect: no conclusion", vague)
    claim(rows.count("no conclusion") == 2, "nor in the summary", rows)
    claim("hardly grows (1.18 times), which contradicts the chapter" in vague, "sums that lose nothing contradict it",
          vague)
    better, _ = text_of(report.failures(failures(master=(0.97, 0.969, 0.968), zeros=(0.1, 0.2)), ABOUT))
    claim("does not show what the chapter says" in better and "the loss is the better without" in better,
          "a loss that is the better without a copy is told", better)
    claim("No more become 0 without" in better, "so is scaling that saves no gradient", better)
    slow, _ = text_of(report.failures(failures(sums=(0.0017, 0.0017 * 10)), ABOUT))
    claim("grows, here 10.0 times." in slow and "more than the root" not in slow,
          "growth as of independent roundings", slow)

    stop, rows = text_of(report.failures(failures(fp8=(0.999, 1, 1.001), stopped=(1,)), ABOUT))
    claim('Without scales 1 of 3 runs did not get to their end ("step 7: loss nan").' in stop and "runs stop (m" in rows
          and "As the chapter says: matmuls in FP8 need scales" in stop, "a run that diverges is told", stop)

    some = failures()
    some["loss_scaling"] = {"why": "no --fp16 PROGRAM was given"}
    some["fp8_scaling"] = {"why": "./train_gpt knows no --fp8-scaling"}
    part = report.failures(some, ABOUT)
    claim(part.sees[2] == "FP16 without loss scaling: left out, because no --fp16 PROGRAM was given."
          and "left out, because ./train_gpt knows no --fp8-scaling" in part.sees[3] and len(part.rows) == 2
          and len(part.figure.axes) == 3, "what cannot be measured is left out, with why", str(part.sees))
    nothing = report.failures({name: {"why": "x"} for name in some}, ABOUT)
    claim(nothing.figure is None and not nothing.rows, "also all of it", str(nothing.sees))


def test_lesson():
    """Kinds take the same seeds; a run that stops has no ratio, and what it said is kept."""
    class Made(measure.Trainer):
        name = "./made"

        def __init__(self, help_=""):
            self.help, self.calls, self.others = help_, [], {"bf16": self}

        def curve(self, steps, seed, kind, **options):
            self.calls.append((seed, kind))
            losses = [5.0] * 27 + {"a": [2.0, 2.1, 2.2], "b": [4.2, 99.0, 3.0]}[kind]
            records = [{"step": i + 1, "loss": loss, "unchanged": seed / 10} for i, loss in enumerate(losses)]
            records.append({"step": 30, "val_loss": 1})
            return (records[:10], "step 11: loss nan") if seed == 2 and kind == "b" else (records, None)
    made, size = Made(), measure.SIZES["quick"]
    results = measure.lesson(made, size, {"a": {"kind": "a"}, "b": {"kind": "b"}}, ["unchanged"], 30)
    claim(made.calls == [(s, k) for s in (1, 2, 3) for k in "ab"], "each seed by each kind, in turn", str(made.calls))
    claim(results["b"]["ratios"] == [4.2 / 2.1] * 2 and results["b"]["stopped"] == [None, "step 11: loss nan", None],
          "ratios of medians of the last tenth, of runs that got there", str(results["b"]))
    claim(len(results["a"]["losses"]) == 30 and results["a"]["unchanged"][3] == [4, 0.1], "curves are the first seed's")
    whys = [f(Made(), size)["why"] for f in (measure.without_master, measure.without_fp8_scales)]
    claim(whys == ["./made knows no --master-weights", "./made knows no --fp8-scaling"], "a flag that is not there",
          str(whys))
    claim(not Made("\n  --matmul-tuning   x").knows("--matmul") and Made("\n  --matmul   x").knows("--matmul"),
          "a flag is known by its whole name")
    why = measure.without_loss_scaling(Made(), size)["why"]
    claim(why == "no --fp16 PROGRAM was given", "a program that is not there", why)


def quality(over, stopped=False):
    records = []
    for seed in (1, 2, 3):
        for name, ratios in {"bf16": (1, 1, 1), **over}.items():
            end = 2.0 * seed * ratios[seed - 1]
            stops = stopped and name != "bf16" and seed == 3
            curve = [[100, 3.0], [200, end]]
            records.append({"format": name, "seed": seed, "options": {}, "curve": curve[:1] if stops else curve,
                            "final": None if stops else end, "stopped": "step 150: loss nan" if stops else None,
                            "seconds": 1, "device": "made up", "precision": "bf16", "parameters": 10**7})
    return fp8_quality.collect(records, 200)


def test_quality():
    section = report.fp8_quality(quality({"fp8, delayed": (1.01, 1.011, 1.009), "fp8-all": (0.99, 1.02, 1.01)}), ABOUT)
    words, rows = text_of(section)
    claim("fp8, delayed ends +1 % from bf16" in words, "FP8's last loss over BF16's, seed by seed", words)
    claim("fp8-all: whether it ends elsewhere than bf16 is not told here: the seeds" in words,
          "seeds that do not tell", words)
    claim("nanochat: about 5 %" in words and "smaller than the speed-up of the matmuls" in words,
          "what FP8 gains is less than its matmuls do", words)
    claim("fp8, delayed 1.0100; fp8-all 1.0100" in rows, "medians are in the summary", rows)
    claim("In the mean over seeds: +0.98 % (fp8, delayed), +1 % (fp8-all)." in words, "means over seeds", words)
    words, rows = text_of(report.fp8_quality(quality({"bf16 again": (0.99, 1.02, 1.01), "fp8-all": (1, 1, 1)}), ABOUT))
    claim("ends -1 % to +2 % from itself, seed by seed" in words and "again" not in rows, "what chance alone does",
          words + rows)
    stopped, _ = text_of(report.fp8_quality(quality({"fp8-all": (1.0, 1.0, 1.0)}, stopped=True), ABOUT))
    claim('fp8-all: 1 of 3 runs did not get to their end ("step 150: loss nan")' in stopped, "a run that diverged",
          stopped)
    made = quality({"fp8, delayed": (1.01, 1.02, 1.03)})
    claim(abs(made["formats"]["fp8, delayed"]["over_reference"] - 0.14 / 6) < 1e-12 and "fp8-all" not in made["formats"],
          "collected: means over seeds, of formats that were run", str(made["formats"]))
    left_out = report.fp8_quality({"why": "there is no dev/chapter/fp8_quality.json"}, ABOUT)
    claim(left_out.figure is None and "left out: there is no dev/chapter/fp8_quality.json" in left_out.sees[0],
          "without the file the part is left out, with why")


# A trainer that trains nothing: it notes that it was called, and the third call fails as REASON says.
STUB = """#!{python}
import json, os, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
calls = os.path.join(os.path.dirname(sys.argv[0]), "calls")
with open(calls, "a") as file: file.write(options["--matmul"] + options["--seed"] + "\\n")
third = len(open(calls).read().split()) == 3
os.makedirs(options["--out"])
with open(options["--out"] + "/log.jsonl", "w") as log:
    log.write(json.dumps({{"run": {{"device": "stub", "precision": "bf16", "model": {{"parameters": 7}}}}}}) + "\\n")
    log.write(json.dumps({{"step": 1, "val_loss": 2.0}}) + "\\n")
    if not third: log.write(json.dumps({{"step": 2, "val_loss": 1.0}}) + "\\n")
if third: sys.exit("train_gpt: {reason}")
"""


def test_quality_script():
    """Runs that are done are kept; a loss that is not finite is a result, and any other failure none."""
    here = os.path.dirname(os.path.abspath(fp8_quality.__file__))
    with tempfile.TemporaryDirectory() as folder:
        program, out, collected = (os.path.join(folder, name) for name in ("stub", "out", "all.json"))

        def call(*more, reason="step 2: loss nan"):
            with open(program, "w", encoding="utf-8") as file:
                file.write(STUB.format(python=sys.executable, reason=reason))
            os.chmod(program, 0o755)
            return subprocess.run([sys.executable, os.path.join(here, "fp8_quality.py"), "--train-gpt", program,
                                   "--out", out, "--collect", collected, "--steps", "2",
                                   "--formats", "bf16", "fp8-all", *more], capture_output=True, text=True)

        def calls():
            with open(os.path.join(folder, "calls"), encoding="utf-8") as file:
                return file.read().split()
        first = call("--seeds", "1", "2", reason="no such file")
        claim(first.returncode == 1 and "no such file" in first.stderr and not os.path.exists(collected)
              and sorted(os.listdir(out)) == ["bf16-seed1.json", "fp8-all-seed1.json"],
              "a run that fails is no result; those before it are kept", first.stderr)
        again = call("--seeds", "1", "2")
        claim(again.returncode == 0 and calls() == ["plain1", "fp8-all1", "plain2", "plain2", "fp8-all2"],
              "called again it does those that are not there", again.stderr + str(calls()))
        with open(collected, encoding="utf-8") as file:
            found = json.load(file)
        claim([r["final"] for r in found["runs"]] == [1.0] * 4 and found["formats"]["fp8-all"]["seeds"] == [1, 2],
              "all runs are collected", str(found["formats"]))
        other = call("--seeds", "1", "--lr", "0.5")
        claim(other.returncode == 2 and "name another --out" in other.stderr, "runs with other options are no result",
              other.stderr)
        os.remove(os.path.join(folder, "calls"))
        out = os.path.join(folder, "diverging")
        diverged = call("--seeds", "1", "2")
        with open(collected, encoding="utf-8") as file:
            found = json.load(file)
        stopped = [r["stopped"] for r in found["runs"]]
        claim(diverged.returncode == 0 and stopped == [None, None, "step 2: loss nan", None]
              and found["runs"][2]["final"] is None, "a loss that is not finite is a result", diverged.stderr)
        nothing = call("--seeds", "3", "--minutes", "0")
        claim(nothing.returncode == 1 and "no run was done" in nothing.stderr, "no run is begun after --minutes",
              nothing.stderr)


def main():
    for test in (test_told, test_recomputation, test_accumulation, test_scan, test_data_parallel, test_why_alone,
                 test_compare, test_formats, test_formats_report, test_failures, test_lesson, test_quality,
                 test_quality_script):
        test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

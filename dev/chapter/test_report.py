#!/usr/bin/env python3
"""Tests of what the report concludes, from measurements that are made up: calm ones, and a busy machine's.

    python3 dev/chapter/test_report.py
"""
import sys

sys.dont_write_bytecode = True
import measure
import report

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


def main():
    for test in (test_told, test_recomputation, test_accumulation, test_scan, test_data_parallel, test_why_alone,
                 test_compare):
        test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

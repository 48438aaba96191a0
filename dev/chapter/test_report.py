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
    for test in (test_told, test_recomputation, test_accumulation, test_scan, test_compare):
        test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tests the report's verdicts in both directions, with the results in data/playbook.json and invented changes of them,
and the functions that measure.

    python3 dev/playbook/test_report.py
"""
import copy
import html
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import measure
import parts_formats
import playbook
from testing import expect, expect_equal, run_tests, write
from figures import AGREES, DISAGREES, NOT_JUDGED, UNCLEAR, pyplot, ratio_claim, same_losses

EARLIER = measure.read_json(measure.EARLIER)    # of a CPU build
ABOUT = {**EARLIER["about"], "peak_flops": 1e11}
STEADY = {"modes/none/ratios": [1, 1, 1], "modes/selective/ratios": [1.03, 1.031, 1.029],
          "modes/full/ratios": [1.35, 1.351, 1.349]}
SAME = {f"runs/*/{key}": [5.0, 4.0] for key in ("losses", "norms")}


def changed(results, changes):
    """Returns a copy of results with {path: value}. In a path such as runs/0/losses, * stands for all keys."""
    def put(at, keys, value):
        for key in (range(len(at)) if isinstance(at, list) else [*at]) if keys[0] == "*" else [keys[0]]:
            key = int(key) if isinstance(at, list) else key
            if keys[1:]:
                put(at[key], keys[1:], value)
            else:
                at[key] = value(at[key]) if callable(value) else value
    results = copy.deepcopy(results)
    for path, value in changes.items():
        put(results, path.split("/"), value)
    return results


def check(part, results, *wanted):
    """Expects claims of a section: (beginning of the claim, text in its value, verdict, text of a cell in the section's
    tables, the same number; or nothing)."""
    section = playbook.drawn(part, results, ABOUT)
    pyplot.close("all")
    for what, here, verdict, *cell in wanted:
        found = [(claim.here, claim.verdict) for claim in section.claims if claim.what.startswith(what)]
        expect(len(found) == 1 and here in found[0][0] and found[0][1] == verdict
               and all(f">{text}<" in section.tables for text in cell),
               f"{part}: {what} ... {here}: {verdict}", f"found {found}, tables {section.tables if cell else ''}")


def times(factor):
    return lambda value: value * factor


# ---- verdicts

def test_verdicts():
    for ratios, expected, text in (
            ([1.24, 1.25, 1.27], AGREES, "rounds that agree on +25 %"),
            ([0.78, 0.80, 0.81], DISAGREES, "rounds that agree on -20 %"),
            ([0.80, 1.30, 0.75], UNCLEAR, "rounds of -25 % to +30 % are inconclusive"),
            ([1.10, 1.25, 1.40], UNCLEAR, "slower rounds whose range exceeds the effect are inconclusive"),
            ([1, 1, 1], UNCLEAR, "no effect is inconclusive"), ([1.25], UNCLEAR, "a single round is inconclusive"),
            ([], UNCLEAR, "no finished run is inconclusive")):
        found = ratio_claim("time", "higher", ratios, "rounds")
        expect_equal(found.verdict, expected, text)
    for drift, precision, expected in ((5e-5, "fp32", AGREES), (1e-3, "fp32", DISAGREES), (1e-3, "bf16", AGREES)):
        found = same_losses("losses", [[5.0, 4.0], [5.0, 4.0 * (1 - drift), 3.0]], precision)
        expect_equal((found.verdict, f"within {drift:.0e}" in found.here), (expected, True),
                     f"losses that differ by {drift:.0e} in {precision}")


def test_one_gpu():
    """Each part with results that agree with the playbook, then with others."""
    state, activations, timeline, recomputation, accumulation = (EARLIER[name]["results"] for name in (
        "state", "activations", "timeline", "recomputation", "accumulation"))
    check("state", state, ("State in bytes", "16.00 / 16.00 / 18.00", AGREES, "18.00"),
          ("State of 1B", "14.6 / 107 / 1,048 / 6,530 GB", AGREES, "6,530"), ("Activations", "0.50", AGREES))
    check("state", changed(state, {"*/*/bytes_per_parameter": 20, "70b/*/bytes/adam_m": times(2),
                                   "7b/FP32/bytes/activations": times(2)}),
          ("State in bytes", "20.00", DISAGREES), ("State of 1B", "1,310", DISAGREES, "1,310"),
          ("Activations", "0.25", DISAGREES))
    check("activations", activations, ("Activations of one", "26.4 GB", AGREES, "26.4"),
          ("Growth", "3.94 / 1.99", AGREES), ("First T", "8,192 / 32,768", AGREES),
          ("Activations of a layer", "79 %", AGREES), ("Activations of a 7B", "92 % / 87 %", AGREES))
    check("activations", changed(activations, {
        "curves/*/*/activations": times(0.5), "curves/naive, none/7/activations": times(2), "state": 10**9,
        "curves/naive, full/2/activations": times(4), "gpt3_175b/selective/per_token_layer": times(2)}),
        ("Activations of one", "13.2 GB", DISAGREES, "13.2"), ("Growth", "7.88 / 1.99", DISAGREES),
        ("First T", "512 / 512", DISAGREES), ("Activations of a layer", "58 %", DISAGREES),
        ("Activations of a 7B", "70 %", DISAGREES))
    live = {f"{mode}/live/activations/*": 0 for mode in measure.MODES}
    live |= {"none/live/activations/50": 6 * 10**7, "none/live/ms/50": 299.0, "none/passes/0/2": 300.0,
             "selective/live/activations/50": 4 * 10**7, "full/live/activations/50": 2 * 10**7}
    check("timeline", changed(timeline, live), ("Time", "299 / 300 ms", AGREES),
          ("Live", "60.0 MB / 40.0 MB / 20.0 MB", AGREES))
    check("timeline", changed(timeline, {**live, "none/live/ms/50": 900.0, "full/live/activations/50": 5 * 10**7}),
          ("Time", "900 / 300 ms", DISAGREES), ("Live", "50.0 MB", DISAGREES))
    check("recomputation", changed(recomputation, {**STEADY, "flops_7b/hardware": times(1.1), "modes/*/tokens": 1000,
                                                   "modes/*/median_ms": 1000}),
          ("Time of a step with full", "+35 % (rounds +35 % to +35 %", AGREES, "1.350 (1.349 to 1.351)"),
          ("FLOPs", "+33 %", AGREES), ("Time of a step with selective", "+3.0 %", AGREES),
          ("Activations", "94 %", AGREES, "94 %"), ("MFU", "31.1 % / 31.1 %; 31.1 % / 37.0 %", NOT_JUDGED, "37.0 %"))
    check("recomputation", changed(recomputation, {**{path: [r * r for r in ratios] for path, ratios in STEADY.items()},
                                                   "modes/full/per_token_layer": times(4)}),
          ("Time of a step with full", "+82 %", DISAGREES), ("FLOPs", "+21 %", DISAGREES),
          ("Time of a step with selective", "+6.1 %", DISAGREES), ("Activations", "75 %", DISAGREES, "75 %"))
    check("accumulation", changed(accumulation, {"splits/*/losses": [5.0, 4.0], "splits/1 × 8/losses": [5.0, 4.00002],
                                                 "splits/8 × 1/ratios": [0.5, 0.51, 0.49]}),
          ("The same batch", "5e-06", AGREES), ("Memory", "107 MB / 308 MB", AGREES, "308 MB"),
          ("Time", "-50 %", AGREES))
    check("accumulation", changed(accumulation, {"splits/1 × 8/losses": [5.0, 4.0], "splits/8 × 1/planned": 10**7,
                                                 "splits/8 × 1/ratios": [2, 2.01, 1.99]}),
          ("The same batch", "1e-01", DISAGREES), ("Memory", "10.0 MB", DISAGREES, "10.0 MB"),
          ("Time", "+100 %", DISAGREES))
    check("recomputation", changed(recomputation, {"modes/full/ratios": [0.53, 0.8, 1.36]}),
          ("Time of a step with full", "-20 % (rounds -47 % to +36 %", UNCLEAR))


def test_several_processes():
    data, tensor = (EARLIER[name]["results"] for name in ("data_parallel", "tensor_parallel"))
    first, *_, last = [i for i, run in enumerate(data["runs"]) if (run["gpus"], run["parts"]) == (4, 1)]
    same = {**SAME, "splits/*/losses": [5.0, 4.0]}
    check("data_parallel", changed(data, same), ("State", "119 / 31.2 / 16.6 / 1.86 GB", AGREES),
          ("Memory", "84.3 MB / 55.4 MB / 47.6 MB / 39.8 MB", AGREES, "39.8 MB"),
          ("Bytes", "1.00 / 1.00 / 1.33", AGREES, "38.4"), ("The same batch", "0e+00", AGREES),
          ("ZeRO 0", "the same bits", AGREES))
    check("data_parallel", changed(data, {**same, f"runs/{last}/losses": [5.0, 4 + 4e-7]}), ("ZeRO 0", "1e-07", AGREES))
    check("data_parallel", changed(data, {
        "runs/*/losses": [5.0, 4.0], f"runs/{last}/losses": [5.0, 4.1], "splits/*/losses": [5.0, 4.0],
        "splits/1/losses": [5.0, 4.004], f"runs/{first + 1}/sent": times(1.2), "plans/*/bytes/total": 10**9,
        "paper/bytes/1/adam_m": times(20)}),
        ("State", "119 / 40.1", DISAGREES), ("Memory", "1.00 GB / 1.00 GB", DISAGREES),
        ("Bytes", "1.20 / 1.00", DISAGREES), ("The same batch", "1e-03", DISAGREES), ("ZeRO 0", "2e-02", DISAGREES))
    check("tensor_parallel", changed(tensor, {
        **SAME, "runs/*/bytes_sent": 0, "runs/*/tensor_bytes_sent": 0, "runs/1/sent": 6291456, "runs/2/sent": 9437184}),
        ("Activations", "131 / 65.6 / 32.8 kB", AGREES, "65,608"), ("Tensors", "8 / 8", AGREES, "9.4"),
        ("The same batch", "0e+00", AGREES), ("Weights", "3.2 % of", NOT_JUDGED))
    check("tensor_parallel", changed(tensor, {**SAME, "plans/1/per_token_layer": 10**5, "runs/2/losses": [5.0, 4.004]}),
          ("Activations", "131 / 100 / 32.8 kB", DISAGREES, "100,000"), ("Tensors", "10 / 10", DISAGREES),
          ("The same batch", "1e-03", DISAGREES))
    for part in ("data_parallel", "tensor_parallel"):
        section = playbook.drawn(part, {"why": "this machine has one GPU"}, ABOUT)
        expect("skipped: this machine has one GPU." in section.texts[0] and not section.claims, f"{part}: skipped")


def batch_results(first=(5.0, 4.0, 5.5), last=(2.2, 2.0, 2.6), grown=2.4, ms=(12, 11, 10), noise=(100, 1100),
                  spread=1e-4, stopped=()):
    """Results for batches of 512, 1,024 and 2,048: losses after an eighth of 8,192 tokens and at the end, the time of
    1,024 tokens, the noise scale in the first eighth and later. The largest batch has the seeds in reverse order."""
    def run(batch, first, last, ms):
        factors, steps = [1 - spread, 1, 1 + spread][::-1 if batch == 2048 else 1], range(1, 9)
        return {"last": [None if seed in stopped else last * factor for seed, factor in enumerate(factors)],
                "val_loss": [[[1, first * factor], [8, last * factor]] for factor in factors],
                "tokens": [[[step, 1024 * step] for step in steps]] * 3,
                "ms": [[[step, ms * factor + 100 * (step == 4)] for step in steps] for factor in factors],
                "noise_scale": [[[step, noise[step > 3]] for step in steps if noise and batch != 512]] * 3}
    runs = {str(batch): run(batch, *each) for batch, *each in zip((512, 1024, 2048), first, last, ms)}
    return {"tokens": 8192, "batches": [512, 1024, 2048], "micro": 8,
            "rates": {batch: [[2, 2.0], [1, 3.0], [4, 3.0]] for batch in runs},
            "ramp": {"from": 256, "to": 2048, "tokens": 4096}, "runs": {**runs, "ramp": run(256, 5.0, grown, 10)}}


def test_batch_size():
    unclear = [(what, "", UNCLEAR) for what in ("Loss", "Last loss, batches of", "Time", "Last loss, batches that")]
    check("batch_size", batch_results(), ("Loss after", "+10 % (seeds +10 % to +10 %", AGREES),
          ("Noise in", "16 % / 68 % of its squared norm", AGREES), ("Last loss, batches of", "+30 %", AGREES, "2.6000"),
          ("Time", "-17 %", AGREES), ("Batches within", "1,024 tokens, the best 1,024", DISAGREES),
          ("Noise scale", "1.07 = 1,100 / 1,024", AGREES, "1,100"), ("Last loss, batches that", "-7.7 %", AGREES))
    check("batch_size", batch_results((5.5, 4, 5), (2.01, 2.01, 1.995), 2.2, (10, 11, 12), (300, 200)),
          ("Loss after", "-9.1 %", DISAGREES), ("Noise in", "28 %", DISAGREES),
          ("Last loss, batches of", "-0.75 %", DISAGREES), ("Time", "+20 %", DISAGREES),
          ("Batches within", "512 to 2,048 tokens", AGREES), ("Noise scale", "0.0977", DISAGREES),
          ("Last loss, batches that", "+10 %", DISAGREES))
    check("batch_size", batch_results(spread=0.2), *unclear)
    check("batch_size", batch_results(noise=(), stopped=(0, 2)), *unclear)
    check("batch_size", batch_results(last=(2.3, 2.1, 2.0), noise=(-5, 9000)), ("Batches within", "2,048", UNCLEAR),
          ("Noise scale", "4.39", UNCLEAR), ("Noise in", "not known", UNCLEAR))


def test_formats():
    sums = EARLIER["formats"]["results"]
    check("formats", changed(sums, {"sums/0/error": 0.0017, "sums/4/error": 0.05}),
          ("Range", "254 / 254 / 30 / 15 / 30", AGREES, "15"), ("Distance", "8 times", AGREES),
          ("Error", "0.17 % / 5.0 %", AGREES, "5.0 %"))
    check("formats", changed(sums, {"sums/0/error": 0.0017, "sums/4/error": 0.002}),
          ("Error", "0.17 % / 0.20 %", DISAGREES, "0.20 %"))
    with patch.dict(parts_formats.FORMATS, {"BF16": (5, 12, 65504)}):
        check("formats", sums, ("Range", "254 / 30 / 30", DISAGREES), ("Distance", "0.25 times", DISAGREES))


def test_failures():
    """Losses relative to the reference's, and fractions of lost updates and of values that underflow."""
    def results(ratios, delayed, lost, zeros, flushed, stopped=None):
        changes = {f"{path}/ratios": ratios for path in ("master/rates/*/none", "loss_scaling/kinds/none",
                                                         "fp8_scaling/kinds/none")}
        changes |= {f"master/rates/{rate}/none/unchanged": [[[1, part]]]
                    for rate, part in zip(("0.001", "1e-05"), lost)}
        changes |= {f"loss_scaling/kinds/{kind}/zero_gradients": [[[1, part]]]
                    for kind, part in zip(("none", "dynamic"), zeros)}
        changes |= {f"fp8_scaling/kinds/{kind}/fp8": [[[1, {"dres": {"flushed": part, "saturated": 0.01}}]]]
                    for kind, part in zip(("none", "delayed"), flushed)}
        return changed(EARLIER["failures"]["results"], {
            **changes, "fp8_scaling/kinds/delayed/ratios": delayed, "master/rates/0.0001/none/unchanged": [[[1, 0.7]]],
            "fp8_scaling/kinds/none/stopped/1": stopped})
    losses = ["Last loss in BF16 without master weights, learning rate 0.001,", "Last loss in FP16",
              "Last loss in FP8 without"]
    check("failures", results([1.03, 1.031, 1.032], [1.001, 1.002, 0.999], (0.5, 0.9), (0.3, 0.001), (0.4, 0.001)),
          ("Updates", "50 % / 70 % / 90 %", AGREES), ("Gradients", "30 % / 0.10 %", AGREES),
          ("Values", "41 % / 1.1 %", AGREES), ("Last loss in FP8 with delayed", "+0.10 %", AGREES),
          *[(what, "+3.1 % (seeds +3.0 % to +3.2 %", AGREES, "1.0310 (1.0300 to 1.0320)") for what in losses])
    check("failures", results([0.97, 0.969, 0.968], [1.03, 1.031, 1.032], (0.9, 0.5), (0.1, 0.2), (0.1, 0.2)),
          ("Updates", "", DISAGREES), ("Gradients", "", DISAGREES), ("Values", "", DISAGREES),
          ("Last loss in FP8 with delayed", "", DISAGREES), *[(what, "-3.1 %", DISAGREES) for what in losses])
    check("failures", results([1.0, 1.02, 0.99], [1], (1, 1), (1, 1), (1, 1), "step 7: loss nan"),
          *[(what, "0 %", UNCLEAR) for what in losses[:2]],
          (losses[2], '1 of 3 runs stopped ("step 7: loss nan")', AGREES))
    skipped = parts_formats.failures(dict.fromkeys(parts_formats.DEMONSTRATIONS, {"why": "no program"}), ABOUT)
    expect(not skipped.claims and not skipped.figure and "FP8 without scales was skipped: no program." in skipped.texts,
           "demonstrations without a program are skipped")


def test_fp8_quality():
    results = changed(EARLIER["fp8_quality"]["results"], {"kinds/fp8, delayed/ratios": [1.01, 0.99, 1.009],
                                                          "kinds/fp8-all/ratios": [1.01, 1.03, 1.02]})
    check("fp8_quality", results, ("Last loss with fp8, delayed", "+0.90 %", AGREES, "1.0090 (0.9900 to 1.0100)"),
          ("Last loss with fp8-all", "+2.0 %", DISAGREES))
    check("fp8_quality", changed(results, {"kinds/fp8, delayed/stopped/2": "step 7: loss nan"}),
          ("Last loss with fp8, delayed", "1 of 3 runs stopped", DISAGREES, "1"))


def test_page():
    """Each claim is in the summary and in its section, with the same value."""
    page = playbook.write_report(EARLIER, Path(".")).read_text()
    claims = [claim for part in measure.SECTIONS if part.__name__ in EARLIER
              for claim in playbook.drawn(part.__name__, EARLIER[part.__name__]["results"], EARLIER["about"]).claims]
    rows = re.findall(r"<tr><td>([^<]*?)(?: \(\d+\))?</td><td>[^<]*</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page)
    lost = [claim.what for claim in claims
            if rows.count((html.escape(claim.what), html.escape(claim.here), claim.verdict)) != 2]
    expect(len(claims) > 30 and not lost, "each claim is in the summary and in its section", lost)


# ---- measurements

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
    wanted = [{"seed": 4, "micro_batch": 8, "warmup": 32, "eval_every": 16, "noise_every": None},
              {"seed": 3, "micro_batch": 16, "warmup": 4, "eval_every": 2, "noise_every": 1, "batch_ramp": None},
              {"seed": 3, "micro_batch": 16, "warmup": 14, "batch_ramp": "512:32768", "total_batch": 4096}]
    expect_equal([{key: calls[at].get(key) for key in each} for at, each in zip((0, -2, -1), wanted)], wanted,
                 "options of a batch of one micro-batch, of several, and of the ramp")


def test_planned():
    plan = {"bytes": {"total": 10**6}, "bytes_sent": 15.6e6}
    for text, allocated, sent, expected in (
            ("a run as planned, up to the printed digits", 10**6, 15.5e6, ""),
            ("a byte more than planned", 10**6 + 1, 15.6e6, "run: allocated 1,000,001 bytes, planned 1,000,000"),
            ("a gather more than planned", 10**6, 22.5e6, "run: sent 22,500,000 bytes a step, planned 15,600,000")):
        found = ""
        try:
            measure.require_planned("run", {"as_planned": True, "planned": allocated, "sent": sent}, plan)
        except measure.Failed as error:
            found = str(error)
        expect_equal(found, expected, f"several processes: {text}")


def test_compare():
    order = []

    def train(steps, name):
        order.append(name)
        return {"ms": [{"a": 10, "b": 20}[name] * (1 + len(order) // 3)] * steps}
    trainer = SimpleNamespace(train=train, fits=lambda name: True)
    results = measure.Trainer.compare(trainer, {"a": {"name": "a"}, "b": {"name": "b"}}, 3, 0.1)
    expect_equal("".join(order), "abbaab", "each round runs all setups and starts with a different one")
    expected = [b / a for a, b in zip(results["a"]["round_ms"], results["b"]["round_ms"])]
    expect_equal((len(expected), results["b"]["ratios"]), (3, expected), "ratios compare runs of the same round")


def test_stopped_run():
    def call(*arguments):
        write(f"{arguments[-1]}/log.jsonl", '{"run": {"peak_flops": 1}}')
        raise measure.Failed("exit code 1", said)
    for said, expected in (("step 2: loss nan", "step 2: loss nan"), ("no such file", "an error")):
        trainer = SimpleNamespace(folder=".", call=call, first_record=None, peak_flops=0)
        try:
            found = measure.Trainer.log_of(trainer, "text", {}, may_stop=True)[2]
        except measure.Failed:
            found = "an error"
        expect_equal(found, expected, f"a run that ends with '{said}'")


def test_demonstration():
    def log_of(data, options, may_stop):
        seed, kind = options["seed"], options["kind"]
        losses = [5.0] * 27 + {"a": [2.0, 2.1, 2.2], "b": [4.2, 99.0, 3.0]}[kind]
        records = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
        stops = seed == 2 and kind == "b"
        return ([{"run": {}}, *(records[:10] if stops else [*records, {"step": 30, "val_loss": seed}])], "",
                "step 11: loss nan" if stops else None)

    def results(*keys):
        return measure.demonstration(SimpleNamespace(log_of=log_of), "text", {}, {k: {"kind": k} for k in "ab"}, keys)
    found = results("loss")
    expect_equal((found["b"]["ratios"], found["b"]["stopped"]), ([4.2 / 2.1] * 2, [None, "step 11: loss nan", None]),
                 "ratios compare medians of the last tenth of finished runs")
    expect_equal(results("val_loss")["b"]["last"], [1, None, 3], "with validation losses, the last one")
    expect_equal(measure.distance([3.0, 0.0], [3.0, 5.0]), (25 / 34) ** 0.5, "relative distance of gradients")


if __name__ == "__main__":
    run_tests(globals())

#!/usr/bin/env python3
"""Holds the memory explorer against ./train_gpt plan.

    python3 dev/explorer/test_explorer.py --train-gpt ./train_gpt

Opens index.html in headless Chromium, sets its controls at random as a user would, runs the plan
command that the page then shows, and compares every figure on the page with plan's: the exact value
that each carries, the text that is read, and the lengths of the bars. Settings that plan refuses
must be complained of by the page. Needs playwright (pip install playwright) and a Chromium
(apt install chromium); closes with "N passed, N failed".
"""
import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

try:
    from playwright.sync_api import sync_playwright
except ImportError as error:
    sys.exit(f"test_explorer: {error}: pip install playwright")

CATEGORIES = ["weights", "gradients", "master", "adam_m", "adam_v", "buffers", "activations", "workspace", "cuda"]
SHAPE = ["layers", "heads", "channels", "context", "vocab"]
UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}

# All that the page shows, in one go.
READ_PAGE = """() => ({
    figures: [...document.querySelectorAll("data[data-key]")].map(e => [e.dataset.key, e.getAttribute("value"), e.innerHTML]),
    tensors: [...document.querySelectorAll("[data-tensor]")].map(e => ({...e.dataset, cells: [...e.cells].map(cell => cell.textContent.trim())})),
    bars: Object.fromEntries([...document.querySelectorAll(".mode")].map(mode => [mode.dataset.mode, {
        all: mode.querySelector(".stack").getBoundingClientRect().width,
        limit: mode.querySelector(".limit").getBoundingClientRect().width,
        parts: Object.fromEntries([...mode.querySelectorAll("[data-part]")].map(e => [e.dataset.part, e.getBoundingClientRect().width]))}])),
    controls: Object.fromEntries([...document.querySelectorAll("input[name], select")].filter(e => e.type !== "radio" || e.checked).map(e => [e.name, e.value])),
    error: document.querySelector("#error").textContent,
    plan: document.querySelector("#plan-command").textContent,
    train: document.querySelector("#train-command").textContent,
    width: document.documentElement.scrollWidth - innerWidth,
})"""


class Controls:
    """The page's controls, moved as a user moves them."""

    def __init__(self, page):
        self.page = page

    def select(self, name, value):
        self.page.select_option(f"#{name}", value)

    def number(self, name, value):
        self.page.fill(f"#{name}", str(value))

    def slider(self, name, exponent):
        self.page.fill(f"#{name}-slider", str(exponent))

    def choose(self, name, option):
        if not self.page.is_disabled(f"#{name}-{option}"):
            self.page.locator(f"label:has(> #{name}-{option})").click()

    def everything(self, model="gpt2", shape=(), seqlen=1024, microbatch=16, totalbatch=0, precision="bf16", grads="fp32",
                   matmul="plain", attention="flash", recompute="none", card="80", gigabytes=None,
                   gpus=1, zero=0, bandwidth=50, flops=400):
        self.select("model", model)
        for name, value in dict(shape).items():
            self.number(name, value)
        for name, value in (("seqlen", seqlen), ("microbatch", microbatch), ("totalbatch", totalbatch), ("gpus", gpus)):
            self.number(name, value)
        for name, option in (("precision", precision), ("grads", grads), ("matmul", matmul), ("attention", attention),
                             ("recompute", recompute)):
            self.choose(name, option)
        self.many(zero, bandwidth, flops)
        self.select("card", card)
        if gigabytes is not None:
            self.number("gigabytes", gigabytes)


    def many(self, zero, bandwidth, flops):
        """What is there for several GPUs only."""
        if not self.page.is_visible("#zero-field"):
            return
        self.choose("zero", zero)
        self.number("bandwidth", bandwidth)
        self.number("teraflops", flops)


def random_setting(controls, rng):
    models = controls.page.eval_on_selector_all("#model option", "options => options.map(o => o.value)")
    controls.select("model", rng.choice(models))
    if rng.random() < 0.4:
        heads, head_size = rng.choice([1, 2, 3, 5, 8, 12, 25, 64, 200]), rng.choice(range(16, 129, 16))
        controls.number("layers", rng.choice([1, 2, 3, 7, 12, 33, 96, 300, 1024]))
        controls.number("heads", heads)
        controls.number("channels", heads * head_size)
        controls.number("context", rng.choice([1, 64, 1000, 4096, 131072]))
        controls.number("vocab", rng.choice([1, 65, 256, 50257, 100277, 200000]))
    if rng.random() < 0.7:
        controls.slider("seqlen", rng.randint(6, 17))
    else:
        controls.number("seqlen", rng.choice([1, 17, 100, 333, 1000, 8191, 131072]))
    if rng.random() < 0.7:
        controls.slider("microbatch", rng.randint(0, 10))
    else:
        controls.number("microbatch", rng.choice([1, 3, 6, 48, 1000, 32768]))
    if rng.random() < 0.5:
        controls.slider("gpus", rng.randint(0, 12))
    else:
        controls.number("gpus", rng.choice([1, 2, 3, 24, 1000, 65536]))
    controls.many(rng.randint(0, 3), rng.choice([0.5, 25, 50, 450]), rng.choice([1, 27, 400.5, 1000]))
    if rng.random() < 0.3:
        controls.slider("totalbatch", rng.randint(13, 26))
    else:   # some micro-batches
        tokens = int(controls.page.input_value("#seqlen")) * int(controls.page.input_value("#microbatch")) * int(controls.page.input_value("#gpus"))
        controls.number("totalbatch", tokens * rng.choice([0, 1, 5, 32]))
    for name, options in (("precision", ["bf16", "bf16", "fp16", "fp32"]), ("grads", ["fp32", "bf16", "fp16"]),
                          ("matmul", ["plain", "fp8", "fp8-all"]), ("attention", ["flash", "naive"]),
                          ("recompute", ["none", "selective", "full"])):
        controls.choose(name, rng.choice(options))
    cards = controls.page.eval_on_selector_all("#card option", "options => options.map(o => o.value)")
    controls.select("card", rng.choice(cards + ["custom"] * 3))
    if controls.page.is_visible("#gigabytes"):
        controls.number("gigabytes", rng.choice(["0.5", "11", "22.5", "94.123456789", "288", "100000"]))
    if rng.random() < 0.2:
        button = controls.page.locator(f"#use-{rng.choice(['none', 'selective', 'full'])}")
        if button.count() and button.is_enabled() and not controls.page.text_content("#error"):
            button.click()


# Corners: what they are, and the setting.
CORNERS = [
    ("the start", {}),
    ("405b, 131072 tokens, naive", dict(model="405b", seqlen=131072, microbatch=1, attention="naive")),
    ("405b, 131072 tokens, naive, beyond 2^53 bytes", dict(model="405b", seqlen=131072, microbatch=1024, attention="naive", recompute="full")),
    ("beyond 2^56 bytes, where counting stops", dict(model="405b", seqlen=65536, microbatch=32767, attention="naive", shape={"layers": 1024})),
    ("405b fits on nothing", dict(model="405b", card="8")),
    ("405b on a huge card", dict(model="405b", card="custom", gigabytes="20000")),
    ("1 layer, 1 head, 1 token", dict(shape=dict(layers=1, heads=1, channels=16, context=1, vocab=1), seqlen=1, microbatch=1)),
    ("1 layer, full", dict(shape=dict(layers=1), recompute="full")),
    ("full, naive", dict(recompute="full", attention="naive")),
    ("selective, naive", dict(recompute="selective", attention="naive", totalbatch=524288)),
    ("more channels than any model has", dict(shape=dict(layers=1024, heads=1024, channels=65536, vocab=4194304), seqlen=4194304, microbatch=1)),
    ("fp32", dict(precision="fp32")),
    ("bf16 gradients", dict(grads="bf16", card="24")),
    ("fp16", dict(precision="fp16")),
    ("fp16 gradients", dict(precision="fp16", grads="fp16", card="16")),
    ("fp8", dict(model="gpt2-xl", matmul="fp8", microbatch=32, card="141")),
    ("fp8-all", dict(model="gpt2-xl", matmul="fp8-all", microbatch=32, card="141")),
    ("fp8-all, selective, naive", dict(matmul="fp8-all", recompute="selective", attention="naive")),
    ("fp8-all, full", dict(matmul="fp8-all", recompute="full")),
    ("8 GPUs, ZeRO 2, fp8", dict(model="7b", matmul="fp8", gpus=8, zero=2, microbatch=1, totalbatch=524288)),
    ("64 GPUs", dict(model="7b", gpus=64, microbatch=1, totalbatch=4194304)),
    ("64 GPUs, ZeRO 1", dict(model="7b", gpus=64, zero=1, microbatch=1, totalbatch=4194304, grads="bf16")),
    ("64 GPUs, ZeRO 2", dict(model="7b", gpus=64, zero=2, microbatch=1, totalbatch=4194304, recompute="full")),
    ("64 GPUs, ZeRO 3", dict(model="7b", gpus=64, zero=3, microbatch=1, totalbatch=4194304)),
    ("65536 GPUs, ZeRO 3, 1 layer of 16 channels", dict(shape=dict(layers=1, heads=1, channels=16, vocab=1), gpus=65536, zero=3)),
    ("3 GPUs, ZeRO 2, 2 layers, fp32", dict(shape=dict(layers=2), gpus=3, zero=2, precision="fp32", bandwidth=0.25, flops=27.5)),
    ("all of 2^31 - 65536 tokens", dict(seqlen=65536, microbatch=32767)),
]

# What plan must refuse and the page complain of.
REFUSED = [
    ("head size 12", dict(shape=dict(heads=64))),
    ("head size 192", dict(shape=dict(heads=4))),
    ("heads that do not divide", dict(shape=dict(heads=7))),
    ("0 layers", dict(shape=dict(layers=0))),
    ("1025 layers", dict(shape=dict(layers=1025))),
    ("65552 channels", dict(shape=dict(channels=65552, heads=4097))),
    ("a vocabulary of 2^22 + 1", dict(shape=dict(vocab=4194305))),
    ("half a head", dict(shape=dict(heads=1.5))),
    ("a sequence of 2^22 + 1", dict(seqlen=4194305, microbatch=1)),
    ("fp8 and a sum over 17 rows", dict(matmul="fp8", seqlen=17, microbatch=1)),
    ("micro-batch 0", dict(microbatch=0)),
    ("micro-batch 32769", dict(microbatch=32769)),
    ("2^31 tokens", dict(seqlen=65536, microbatch=32768)),
    ("a total batch that is no multiple", dict(totalbatch=100000)),
    ("a total batch smaller than one micro-batch", dict(totalbatch=1024)),
    ("no GPU", dict(gpus=0)),
    ("half a GPU more", dict(gpus=2.5)),
    ("65537 GPUs", dict(gpus=65537)),
    ("no bandwidth", dict(gpus=2, bandwidth=0)),
    ("a million and one TFLOP/s", dict(gpus=2, flops=1000001)),
    ("a total batch that is a multiple for fewer GPUs", dict(gpus=24, totalbatch=524288)),
    ("no memory", dict(card="custom", gigabytes="0")),
]


def run_plan(train_gpt, command):
    """The displayed command, with another path to the program and --json."""
    words = shlex.split(command)
    assert words[:2] == ["./train_gpt", "plan"], command
    done = subprocess.run([train_gpt, *words[1:], "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None, done.stderr.strip()


def number_in(text):
    """What a reader takes from a displayed figure: 1,234  4.61 GB  7.98·10<sup>8</sup>"""
    text = text.replace(",", "")
    if match := re.fullmatch(r"([\d.]+)·10<sup>(\d+)</sup>", text):
        return float(match[1]) * 10 ** int(match[2])
    number, _, unit = text.partition(" ")
    return float(number) * UNITS[unit or "B"]


def expected_figures(record):
    """plan's figures under the keys that the page gives them."""
    figures = {key: record[key] for key in ("gpu_memory", "fits", "parameters", "parameters_formula", "bytes_per_parameter",
                                            "activation_bytes_per_token_per_layer", "korthikanti_bytes")}
    for group in ("bytes", "max_micro_batch", "flops_per_token"):
        figures |= {f"{group}.{name}": value for name, value in record[group].items()}
    figures |= {f"tensor.{tensor['name']}": tensor["bytes"] for tensor in record["tensors"]}
    if record["gpus"] > 1:
        figures |= {"bytes_sent": record["bytes_sent"], **{f"step.{name}": value for name, value in record["step"].items()}}
        for stage in record["zero_stages"]:
            figures |= {f"zero.{stage['zero']}.{name}": value for name, value in (
                ("state", stage["state"]), ("bytes_per_parameter", stage["bytes_per_parameter"]),
                ("buffers", stage["bytes"]["buffers"]), ("total", stage["bytes"]["total"]))}
    return figures


def rounding_of(key, record, want):
    """Times are sums over layers, and differences of sums, of which nothing but rounding may be left."""
    if not key.startswith("step."):
        return 1e-14 * want
    return 1e-10 * want if key == "step.tokens_per_s" else max(1e-10 * record["step"]["seconds"], 1e-9)


def compare(page, record):
    """Yields what is wrong."""
    expected, shown = expected_figures(record), {}
    for key, value, text in page["figures"]:
        if key in shown:
            yield f"{key} is there twice"
        shown[key] = value
        if key == "accumulation":
            expected[key] = record[key]
        if key not in expected:
            yield f"{key} = {value}, which plan does not have"
            continue
        want = expected[key]
        if isinstance(want, bool):
            right = value == str(want).lower() and text.startswith("fits" if want else "too much by")
        elif isinstance(want, int):
            right = int(value) == want
        else:   # computed in double; the compiler may have changed the order
            right = abs(float(value) - want) <= rounding_of(key, record, want)
        if not right:
            yield f"{key} = {value} ('{text}'), plan says {want}"
        elif not isinstance(want, bool) and abs(number_in(text) - want) > max(0.00501 * want, rounding_of(key, record, 0)):
            yield f"{key}: the text '{text}' is not {want}"
    yield from (f"{key} is missing" for key in expected if key not in shown)

    rows = {row["tensor"]: row for row in page["tensors"]}
    for tensor in record["tensors"]:
        row = rows.get(tensor["name"])
        if row is None:
            continue    # reported above
        want = [",".join(map(str, tensor["shape"])), str(tensor["copies"]), tensor["dtype"], tensor["category"]]
        if [row["shape"], row["copies"], row["dtype"], row["category"]] != want:
            yield f"{tensor['name']}: {row}, plan says {want}"
        text = [" × ".join(map(str, tensor["shape"])), f"×\u2060{tensor['copies']}" if tensor["copies"] > 1 else "", tensor["dtype"]]
        if row["cells"][2:5] != text:
            yield f"{tensor['name']}: the text is {row['cells']}, expected {text}"

    bar = page["bars"][record["recompute"]]
    for name in CATEGORIES + ["limit"]:     # against the card's mark, or the total where that is longer
        of_total = record["gpu_memory"] if name == "limit" else record["bytes"][name]
        width = bar["limit"] if name == "limit" else bar["parts"].get(name, 0)
        by_limit = bar["limit"] * of_total / record["gpu_memory"]
        if abs(width - by_limit) > 0.01 * by_limit + 1 and bar["limit"] > 20:
            yield f"the bar of {name} is {width:.1f} pixels, expected {by_limit:.1f}"
    if abs(max(b["limit"] for b in page["bars"].values()) - bar["limit"]) > 0.1:
        yield "the bars have different scales"
    if max(bar["limit"], sum(bar["parts"].values())) > bar["all"] + 1:
        yield "a bar is longer than its frame"


def compare_controls(page, record):
    """plan planned what the controls are at."""
    at = page["controls"]
    number = lambda name: int(float(at[name]))
    want = {"model": {name: number(name) for name in SHAPE}, "micro_batch": number("microbatch"), "seq_len": number("seqlen"),
            "precision": at["precision"], "grad_dtype": at["grads"], "recompute": at["recompute"], "attention": at["attention"],
            "matmul": at["matmul"],
            "gpus": number("gpus"), "zero": number("zero") if number("gpus") > 1 else 0,
            "accumulation": number("totalbatch") // (number("microbatch") * number("seqlen") * number("gpus")) or 1,
            "gpu_memory": int(float(at["gigabytes"] if at["card"] == "custom" else at["card"]) * 1e9)}
    want["model"]["context"] = max(want["model"]["context"], want["seq_len"])
    for key, value in want.items():
        if record[key] != value:
            yield f"the controls are at {key} = {value}, plan was asked for {record[key]}"


def compare_commands(page):
    """The train command asks for what the plan command plans."""
    build, train = page["train"].split("\n")
    train, plan = shlex.split(train), shlex.split(page["plan"])
    gpus = plan[plan.index("--gpus") + 1] if "--gpus" in plan else "1"
    if train[0] == "mpirun":
        if train[1:3] != ["-n", gpus]:
            yield f"the train command is for {train[2]} GPUs, the plan for {gpus}"
        train = train[3:]
    elif gpus != "1":
        yield f"the train command is for one GPU, the plan for {gpus}"
    options = lambda words: dict(zip(words[2::2], words[3::2]))
    trained, planned = options(train), options(plan)
    if build != f"make PRECISION={planned['--precision']}":
        yield f"the train command is built with '{build}', planned with {planned['--precision']}"
    memory = {name: value for name, value in trained.items() if name not in ("--data", "--val-data", "--out")}
    if train[:2] != ["./train_gpt", "train"] or memory != {k: v for k, v in planned.items() if k not in ("--precision", "--gpu-memory", "--gpus", "--bandwidth", "--flops")}:
        yield f"the commands differ: {page['train']} and {page['plan']}"


def train_is_understood(page, train_gpt):
    """Where the data is missing, data is all that the displayed train command is refused for."""
    command = shlex.split(page["train"].split("\n")[1])
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run([train_gpt, *command[1:]], capture_output=True, text=True, cwd=empty, timeout=60)
    if done.returncode != 2 or "data/fineweb-edu" not in done.stderr:
        yield f"train exits with {done.returncode}: {done.stderr.strip()}"


class Tests:
    passed = failed = 0

    def check(self, name, problems):
        problems = list(problems)
        if problems:
            self.failed += 1
            print(f"FAILED {name}")
            for problem in problems[:5]:
                print(f"       {problem}")
            if len(problems) > 5:
                print(f"       and {len(problems) - 5} more")
        else:
            self.passed += 1


def one_setting(page, train_gpt, refused=False):
    """Yields what is wrong with the setting that the page is at."""
    shown = page.evaluate(READ_PAGE)
    status, record, message = run_plan(train_gpt, shown["plan"])
    if status != 0:
        if status != 2:
            yield f"plan exits with {status}: {message}"
        if not shown["error"]:
            yield f"plan refuses this, the page does not: {message}\n       {shown['plan']}"
        return
    if shown["error"] or refused:
        yield f"plan takes this, the page says '{shown['error']}': {shown['plan']}"
        return
    for problem in [*compare(shown, record), *compare_controls(shown, record), *compare_commands(shown)]:
        yield f"{problem}\n       {shown['plan']}"


def presets(page, train_gpt):
    """Each model's shape appears when it is chosen, and each slider moves its number. Yields what does not."""
    models = page.eval_on_selector_all("#model option", "options => options.map(o => o.value)")
    _, _, message = run_plan(train_gpt, "./train_gpt plan --model ?")
    if f"one of {', '.join(models)}, found" not in message:
        yield f"the page has {models}; {message}"
    for model in models:
        page.select_option("#model", model)
        _, record, _ = run_plan(train_gpt, f"./train_gpt plan --model {model}")
        shown = {name: int(page.input_value(f"#{name}")) for name in SHAPE}
        if shown != record["model"]:
            yield f"{model} is {shown}, expected {record['model']}"
    for name, exponent in (("seqlen", 7), ("microbatch", 3), ("totalbatch", 22), ("gpus", 5)):
        page.fill(f"#{name}-slider", str(exponent))
        if page.input_value(f"#{name}") != str(2**exponent):
            yield f"the slider of {name} at 2^{exponent} makes it {page.input_value(f'#{name}')}"


def one_gpu(controls):
    """What is there for several GPUs only. Yields what is not so."""
    for gpus in (8, 1):
        controls.everything(gpus=gpus)
        for name in ("#zero-field", "#bandwidth-field", "#teraflops-field", "#many"):
            if controls.page.is_visible(name) != (gpus > 1):
                yield f"{name} is {'' if gpus == 1 else 'not '}there for {gpus} GPUs"


def exclusions(controls):
    """What cannot be chosen with something else, and what takes its place. Yields what is not so."""
    controls.everything(grads="bf16", matmul="fp8", gpus=8, zero=2)
    disabled = lambda *ids: [controls.page.is_disabled(f"#{id}") for id in ids]
    if disabled("zero-3", "grads-fp16", "grads-bf16", "matmul-fp8") != [True, True, False, False]:
        yield "of BF16 with FP8, ZeRO 3 and gradients in FP16 are not all that is disabled"
    controls.choose("precision", "fp16")
    if disabled("zero-3", "grads-fp16", "grads-bf16", "matmul-fp8", "matmul-fp8-all") != [False, False, True, True, True]:
        yield "of FP16, gradients in BF16 and FP8 are not all that is disabled"
    if not controls.page.is_checked("#matmul-plain") or not controls.page.is_checked("#grads-fp32"):
        yield "what FP16 excludes does not become plain matmuls and gradients in FP32"
    controls.choose("precision", "bf16")
    controls.choose("zero", 3)
    controls.choose("matmul", "fp8-all")
    if not controls.page.is_checked("#zero-2"):
        yield "FP8 does not make ZeRO 3 ZeRO 2"


def keyboard(page):
    """What works without a mouse: sliders, choices, tooltips, the use buttons. Yields what does not."""
    page.focus("#microbatch-slider")
    page.keyboard.press("ArrowRight")
    if page.input_value("#microbatch") != "32":
        yield f"the slider's right arrow makes 16 {page.input_value('#microbatch')}"
    page.focus("#recompute-none")
    page.keyboard.press("ArrowRight")
    if not page.is_checked("#recompute-selective"):
        yield "the right arrow does not choose the next recompute mode"
    page.focus("#term-master")
    if not page.is_visible("#tip") or "AdamW" not in page.text_content("#tip"):
        yield "no tooltip at a term that has the focus"
    page.keyboard.press("Escape")
    if page.is_visible("#tip"):
        yield "Escape leaves the tooltip"
    page.focus("#use-full")
    page.keyboard.press("Enter")
    if not page.is_checked("#recompute-full") or page.input_value("#microbatch") == "32":
        yield "the use button is not used by Enter"
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    if len(set(ids)) < len(ids):
        yield f"ids that are there twice: {sorted(i for i in set(ids) if ids.count(i) > 1)}"
    unnamed = page.eval_on_selector_all("input, select", "all => all.filter(e => !e.labels.length && !e.ariaLabel).map(e => e.id)")
    if unnamed:
        yield f"controls without a label: {unnamed}"


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
# The strip, whether it is what is seen in its place, and what the full verdict says.
READ_STRIP = """() => {
    const strip = document.querySelector("#strip"), box = strip.getBoundingClientRect();
    const inside = (x, y) => strip.contains(document.elementFromPoint(x, y));
    return {top: box.top, bottom: box.bottom, height: innerHeight, text: strip.innerText.trim(), bar: strip.querySelectorAll(".stack i").length,
            seen: box.height > 0 && inside(box.left + 20, box.top + 8) && inside(box.right - 20, box.bottom - 8),
            verdict: document.querySelector(".verdict").textContent, error: document.querySelector("#error").textContent};
}"""


def in_sight(page):
    """On a phone the total, and whether it fits, stay in sight while any control is moved. Yields what does not."""
    controls = page.eval_on_selector_all("#form select, #form input:not([type=radio]), #form .choices", "all => all.map((e, i) => e.dataset.test = i)")
    for i in controls:
        place = page.locator(f"[data-test='{i}']")
        if not place.is_visible():
            continue
        for block in ("start", "center", "end"):
            place.evaluate("(e, block) => e.scrollIntoView({block})", block)
            strip, box = page.evaluate(READ_STRIP), place.bounding_box()
            name = place.get_attribute("id") or f"control {i}"
            if not strip["seen"] or strip["top"] < 0 or strip["bottom"] > strip["height"]:
                yield f"{name} at the {block} of the window: the result is not in sight: {strip}"
            if box["y"] < strip["bottom"] - 1:
                yield f"{name} at the {block} of the window: the result covers it"
            if strip["height"] / 6 < strip["bottom"] - strip["top"]:
                yield f"the result takes {strip['bottom'] - strip['top']} of {strip['height']} pixels"
    page.locator("#microbatch-slider").scroll_into_view_if_needed()
    for exponent, words in ((0, "fits"), (10, "too much by")):
        page.fill("#microbatch-slider", str(exponent))
        strip = page.evaluate(READ_STRIP)
        if words not in strip["text"] or strip["text"] != strip["verdict"] or not strip["bar"]:
            yield f"the strip says {strip['text']!r} with {strip['bar']} parts, the verdict {strip['verdict']!r}"
    page.fill("#heads", "7")
    strip = page.evaluate(READ_STRIP)
    if strip["error"] == "" or strip["text"] != strip["error"]:
        yield f"of a mistake the strip says {strip['text']!r}, the page {strip['error']!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train-gpt", required=True, help="the program to compare with")
    parser.add_argument("--settings", type=int, default=100, help="how many random ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome"))
    parser.add_argument("--page", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "index.html"))
    options = parser.parse_args()
    train_gpt = os.path.abspath(options.train_gpt)
    if not os.access(train_gpt, os.X_OK):
        parser.error(f"{options.train_gpt}: no such program; make builds it")
    if not options.chromium:
        parser.error("no chromium found: apt install chromium, or --chromium PATH")

    tests, errors, refused = Tests(), [], 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])

        def open_page(fragment="", **context):
            page = browser.new_context(**context).new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: None if request.url.startswith("file:") else errors.append(f"asks for {request.url}"))
            page.goto("file://" + os.path.abspath(options.page) + fragment)
            page.set_default_timeout(5000)
            return page

        page = open_page()
        controls = Controls(page)
        tests.check("the train command is understood", train_is_understood(page.evaluate(READ_PAGE), train_gpt))
        for name, setting in CORNERS:
            controls.everything(**setting)
            tests.check(name, one_setting(page, train_gpt))
        for name, setting in REFUSED:
            controls.everything(**setting)
            tests.check(f"refused: {name}", one_setting(page, train_gpt, refused=True))
        i = 0
        while i - refused < options.settings:   # so many that plan takes
            random_setting(controls, random.Random(options.seed * 1_000_000 + i))
            tests.check(f"random setting {i} of seed {options.seed}", one_setting(page, train_gpt))
            refused += bool(page.text_content("#error"))
            i += 1

        controls.everything(model="gpt3-2.7b", shape=dict(vocab=256), attention="naive", card="custom", gigabytes="31.5")
        first = page.evaluate(READ_PAGE)
        again = open_page("#" + page.url.partition("#")[2]).evaluate(READ_PAGE)
        tests.check("the address holds the setting", [] if again["figures"] == first["figures"] and again["plan"] == first["plan"] else [again["plan"]])

        tests.check("presets and sliders", presets(page, train_gpt))
        tests.check("controls for several GPUs", one_gpu(controls))
        tests.check("controls that exclude each other", exclusions(controls))
        controls.everything()
        tests.check("keyboard", keyboard(page))
        for width in (400, 600, 900, 1600):
            narrow = open_page(viewport={"width": width, "height": 800})
            settings = [dict(), dict(model="405b", seqlen=131072, microbatch=1024, attention="naive")]
            for setting in settings:
                Controls(narrow).everything(**setting)
                excess = narrow.evaluate(READ_PAGE)["width"]
                tests.check(f"{width} pixels wide", [f"the page is {excess} pixels wider than the window"] if excess > 0 else [])
        tests.check("the result in sight on a phone", in_sight(open_page(**PHONE)))
        wide = open_page(viewport={"width": 1600, "height": 800})
        tests.check("no strip where the result is beside the controls", ["it is there"] if wide.is_visible("#strip") else [])
        tests.check("no error in the console, no request", errors)
        browser.close()
    print(f"{i} random settings, {refused} of them refused by plan and page")
    print(f"{tests.passed} passed, {tests.failed} failed")
    return 1 if tests.failed else 0


if __name__ == "__main__":
    sys.exit(main())

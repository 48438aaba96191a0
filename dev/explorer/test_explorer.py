#!/usr/bin/env python3
"""Compares the memory explorer with ./train_gpt plan.

    python3 dev/explorer/test_explorer.py --train-gpt ./train_gpt

Opens index.html in headless Chromium with settings in its address, runs the plan command that the page shows, and
compares every number on the page with plan's: its exact value, its text, and the length of the bars; also the numbers
of the questions. The page must show an error for settings that plan rejects. Needs playwright (pip install playwright)
and a Chromium (apt install chromium).
"""
import argparse
import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import urllib.parse

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests"))
sys.dont_write_bytecode = True
from testing import expect, finish

try:
    from playwright.sync_api import sync_playwright
except ImportError as error:
    sys.exit(f"test_explorer: {error}: pip install playwright")

CATEGORIES = ["weights", "gradients", "master", "adam_m", "adam_v", "buffers", "activations", "workspace", "cuda"]
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}

READ_PAGE = """() => {
    const all = (selector, value) => [...document.querySelectorAll(selector)].map(value);
    const width = e => e.getBoundingClientRect().width, text = id => document.getElementById(id).textContent;
    return {
        figures: all("data[data-key]", e => [e.dataset.key, e.getAttribute("value"), e.innerHTML]),
        shares: all("#categories tr", e => e.cells[3].textContent),
        tensors: all("#tensors tr", e => [...e.cells].map(cell => cell.textContent.trim())),
        bars: Object.fromEntries(all(".mode", mode => [mode.dataset.mode, {
            all: width(mode.querySelector(".stack")), limit: width(mode.querySelector(".limit")),
            parts: Object.fromEntries([...mode.querySelectorAll("i")].map(e => [e.dataset.part, width(e)]))}])),
        error: text("error"), plan: text("plan-command"),
        width: document.documentElement.scrollWidth - innerWidth};
}"""


def setting(**more):
    """Returns settings for the address: values of the page's controls by name."""
    return urllib.parse.urlencode({"model": "gpt2", "seqlen": 1024, "microbatch": 16, "gpus": 1, "gigabytes": 80,
                                   **more})


def random_setting(models, rng):
    more = {"model": rng.choice(models), "seqlen": rng.choice([1, 17, 100, 333, 8191] + [2**i for i in range(6, 18)]),
            "microbatch": rng.choice([1, 3, 6, 48, 1000, 32768] + [2**i for i in range(11)]),
            "gpus": rng.choice([1, 1, 1, 2, 3, 24, 1000, 65536] + [2**i for i in range(13)]),
            "precision": rng.choice(["bf16", "bf16", "fp16", "fp32"]), "grads": rng.choice(["fp32", "bf16", "fp16"]),
            "matmul": rng.choice(["plain", "fp8", "fp8-all"]), "attention": rng.choice(["flash", "naive"]),
            "recompute": rng.choice(["none", "selective", "full"]), "zero": rng.randrange(4),
            "optimizer": rng.choice(["adamw", "adamw", "muon"]),
            "tensor": rng.choice([1, 1, 2, 4]),
            "gigabytes": rng.choice(["0.5", "8", "22.5", "24", "80", "94.123456789", "192", "100000"])}
    if rng.random() < 0.4:
        heads, head_size = rng.choice([1, 2, 3, 5, 8, 12, 25, 64, 200]), rng.choice(range(16, 129, 16))
        more |= {"layers": rng.choice([1, 2, 3, 7, 12, 33, 96, 300, 1024]), "heads": heads,
                 "channels": heads * head_size, "context": rng.choice([1, 64, 1000, 4096, 131072]),
                 "vocab": rng.choice([1, 65, 256, 50257, 100277, 200000])}
    return setting(**more)


CORNERS = {     # which random settings may miss
    "default settings": {},
    "beyond 2^53 bytes": dict(model="405b", seqlen=131072, microbatch=1024, attention="naive", recompute="full"),
    "beyond 2^56 bytes": dict(model="405b", seqlen=65536, microbatch=32767, attention="naive", layers=1024),
    "all sizes 1": dict(layers=1, heads=1, channels=16, context=1, vocab=1, seqlen=1, microbatch=1),
    "1 layer, full": dict(layers=1, recompute="full"),
    "the largest model": dict(layers=1024, heads=1024, channels=65536, vocab=4194304, seqlen=4194304, microbatch=1),
    "fp16 gradients": dict(precision="fp16", grads="fp16", gigabytes=16),
    "fp8-all, selective, naive": dict(matmul="fp8-all", recompute="selective", attention="naive"),
    "Muon": dict(optimizer="muon"),
    "Muon, 3 GPUs, fp16": dict(optimizer="muon", layers=5, gpus=3, zero=0, precision="fp16"),
    "Muon, 4 GPUs, ZeRO 1": dict(optimizer="muon", layers=6, gpus=4, zero=1),
    "65536 GPUs, ZeRO 3, small layers": dict(layers=1, heads=1, channels=16, vocab=1, gpus=65536, zero=3),
    "3 GPUs, ZeRO 2, 2 layers, fp32": dict(layers=2, gpus=3, zero=2, precision="fp32"),
    **{f"tensor parallelism {tensor}, {recompute}, {matmul}":
       dict(model="7b", gpus=4, tensor=tensor, zero=zero, microbatch=1, recompute=recompute, matmul=matmul)
       for tensor, zero in ((1, 1), (2, 2), (4, 0))
       for recompute, matmul in (("none", "fp8-all"), ("selective", "fp8"), ("full", "plain"))},
    "64 GPUs, ZeRO 3, tensor parallelism 8, naive": dict(model="70b", gpus=64, zero=3, tensor=8, attention="naive"),
    "tensor parallelism 5, fp32": dict(model="gpt2-xl", gpus=15, seqlen=1000, tensor=5, zero=1, precision="fp32"),
}
REJECTED = [dict(heads=64), dict(heads=4), dict(heads=7), dict(heads=1.5), dict(layers=0), dict(layers=1025),
            dict(channels=65552, heads=4097), dict(vocab=4194305), dict(seqlen=4194305, microbatch=1),
            dict(matmul="fp8-all", seqlen=17, microbatch=1), dict(microbatch=0), dict(microbatch=32769),
            dict(seqlen=65536, microbatch=32768), dict(gpus=0), dict(gpus=2.5), dict(gpus=65537),
            dict(gpus=4, tensor=3), dict(gpus=5, tensor=5), dict(gpus=4, tensor=4, seqlen=1022),
            dict(tensor=2), dict(gpus=128, tensor=0), dict(gpus=129, tensor=129), dict(gigabytes=0),
            dict(gpus=2, tensor=2, optimizer="muon")]


# ---- comparisons: each yields its error messages

def run_plan(train_gpt, command):
    """Runs the command that the page shows with --json. Returns the exit code, the record and the error message."""
    words = shlex.split(command)
    assert words[:2] == ["./train_gpt", "plan"], command
    done = subprocess.run([train_gpt, *words[1:], "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None, done.stderr.strip()


def number_in(text):
    """Returns the value of a displayed number such as 1,234 or 4.61 GB."""
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * UNITS[unit or "B"]


def expected_figures(record):
    """Returns plan's numbers by the page's keys."""
    figures = {key: record[key] for key in ("gpu_memory", "fits", "parameters", "bytes_per_parameter",
                                            "activation_bytes_per_token_per_layer")}
    for group in ("bytes", "max_micro_batch"):
        figures |= {f"{group}.{name}": value for name, value in record[group].items()}
    figures |= {f"tensor.{tensor['name']}": tensor["bytes"] for tensor in record["tensors"]}
    return figures


def compare_figures(page, record):
    expected, shown = expected_figures(record), {}
    for key, value, text in page["figures"]:
        if key in shown:
            yield f"{key} appears twice"
        shown[key] = value
        want = expected.get(key)
        if isinstance(want, bool):
            right = value == str(want).lower() and text.startswith("fits" if want else "too much by")
        elif isinstance(want, int):
            right = int(value) == want and abs(number_in(text) - want) <= 0.00501 * want
        else:   # a double; the compiler may have changed the order of operations
            right = want is not None and abs(float(value) - want) <= 1e-14 * want \
                and abs(number_in(text) - want) <= 0.00501 * want
        if not right:
            yield f"{key} = {value} ('{text}'), plan says {want}"
    yield from (f"{key} is missing" for key in expected if key not in shown)


def compare_tensors(page, record):
    rows = {cells[0]: cells[2:5] for cells in page["tensors"]}
    for tensor in record["tensors"]:
        want = [" × ".join(map(str, tensor["shape"])), f"× {tensor['copies']}" if tensor["copies"] > 1 else "",
                tensor["dtype"]]
        if rows.get(tensor["name"]) != want:
            yield f"{tensor['name']}: {rows.get(tensor['name'])}, plan says {want}"


def compare_shares(page, record):
    want = [f"{100 * record['bytes'][name] / record['gpu_memory']:.1f} %" for name in CATEGORIES]
    if page["shares"] != want:
        yield f"shares of the GPU's memory: {page['shares']}, plan says {want}"


def compare_bars(page, record):
    bar = page["bars"][record["recompute"]]
    for name in CATEGORIES:
        width = bar["limit"] * record["bytes"][name] / record["gpu_memory"]
        if abs(bar["parts"].get(name, 0) - width) > 0.01 * width + 1 and bar["limit"] > 20:
            yield f"the bar of {name} is {bar['parts'].get(name, 0):.1f} pixels, expected {width:.1f}"
    if max(bar["limit"], sum(bar["parts"].values())) > bar["all"] + 1:
        yield "a bar is longer than its frame"


def one_setting(page, train_gpt, rejected=False):
    """Compares the current setting with plan."""
    shown = page.evaluate(READ_PAGE)
    status, record, message = run_plan(train_gpt, shown["plan"])
    if status != 0:
        if status != 2 or not shown["error"]:
            yield f"plan exits with {status}: {message}; the page says '{shown['error']}'"
    elif shown["error"] or rejected:
        yield f"plan accepts this, the page says '{shown['error']}'"
    else:
        for compare in (compare_figures, compare_tensors, compare_shares, compare_bars):
            yield from compare(shown, record)


def presets(page, train_gpt, models):
    """Checks that the page has plan's models, and that each slider sets its number."""
    message = run_plan(train_gpt, "./train_gpt plan --model ?")[2]
    if f"expected one of {', '.join(models)}" not in message:
        yield f"the page has {models}; {message}"
    for name, exponent in (("seqlen", 7), ("microbatch", 3), ("gpus", 5), ("tensor", 2)):
        page.fill(f"#{name}-slider", str(exponent))
        if page.input_value(f"#{name}") != str(2**exponent):
            yield f"the slider of {name} at 2^{exponent} sets {page.input_value(f'#{name}')}"


def exclusions(page, show):
    """Checks that options which exclude each other are disabled, and replaced if they were selected."""
    ids = ("zero-1", "zero-2", "zero-3", "grads-fp16", "grads-bf16", "matmul-fp8", "matmul-fp8-all")
    for more, disabled, checked in (
            (dict(grads="bf16", matmul="fp8", zero=3), {"zero-3", "grads-fp16"}, {"zero-2", "grads-bf16"}),
            (dict(precision="fp16", grads="bf16", matmul="fp8"), {"grads-bf16", "matmul-fp8", "matmul-fp8-all"},
             {"matmul-plain", "grads-fp32"}),
            (dict(optimizer="muon", zero=2), {"zero-2", "zero-3", "grads-fp16"}, {"zero-1"})):
        show(setting(gpus=8, **more))
        found = {id for id in ids if page.is_disabled(f"#{id}")}
        chosen = set(page.eval_on_selector_all("input:checked", "all => all.map(e => e.id)"))
        if found != disabled or not checked <= chosen:
            yield f"{more}: {found} disabled, {chosen} chosen; expected {disabled} and {checked}"


def controls(page):
    """Checks that a click selects an option, and that each control has a label."""
    page.click("label:has(> #attention-naive)")
    if "--attention naive" not in page.text_content("#plan-command"):
        yield "a click does not choose naive attention"
    unnamed = page.eval_on_selector_all("input, select", "all => all.filter(e => !e.labels.length && !e.ariaLabel)"
                                        ".map(e => e.id)")
    if unnamed:
        yield f"controls without a label: {unnamed}"


def nine_checks(page, train_gpt):
    """Checks the questions: all numbers are plan's, one of four answers is right, and a click shows the verdict."""
    text = page.text_content("#checks")
    command = re.search(r"`(.*?)`", text)[1]
    run = functools.cache(lambda flags: run_plan(train_gpt, f"{command} {flags}")[1])

    def plan7b(name, flags=""):
        return {**run(flags), **run(flags)["bytes"], **run(flags)["flops_per_token"]}[name]
    for code, form, shown in page.eval_on_selector_all("data[data-code]", """all => all.map(e =>
            [e.dataset.code, e.dataset.format, e.textContent])"""):
        if (want := format(eval(code, {"plan7b": plan7b}), "," + form)) != shown:
            yield f"{code}: {shown}, plan says {want}"
    if typed := re.findall(r"(?<![\w.])\d[\d.,]*(?!\w)", re.sub(r"\{\{.*?\}\}|`.*?`", "", text, flags=re.S)):
        yield f"numbers without an expression: {typed}"
    questions = page.locator(".check")
    if questions.count() != 9:
        yield f"{questions.count()} questions"
    for i, question in enumerate(questions.all(), 1):
        buttons, verdict, rights = question.locator("button"), question.locator("p").last, 0
        seen = verdict.is_visible()
        for button in buttons.all():
            button.click()
            right = verdict.text_content().startswith(f"Right: {button.text_content()[:2]}")
            rights += right
            if button.get_attribute("class") != ("right" if right else "wrong"):
                yield f"question {i}: an answer has the wrong colour"
        if seen or not verdict.is_visible() or buttons.count() != 4 or rights != 1:
            yield f"question {i}: {buttons.count()} answers, {rights} right, verdict visible before a click: {seen}"


def check(page, name, problems):
    problems = list(problems)
    expect(not problems, name, "\n       ".join(["", *problems[:5], page.text_content("#plan-command")]))


def check_settings(page, show, train_gpt, count, seed):
    """Tests the corner cases, settings that plan rejects, and `count` random settings that plan accepts."""
    for name, more in CORNERS.items():
        show(setting(**more))
        check(page, name, one_setting(page, train_gpt))
    for more in REJECTED:
        show(setting(**more))
        check(page, f"rejected: {more}", one_setting(page, train_gpt, rejected=True))
    models, accepted, tried = page.eval_on_selector_all("#model option", "all => all.map(e => e.value)"), 0, 0
    for model in models:
        show(setting(model=model))
        check(page, model, one_setting(page, train_gpt))
    while accepted < count:
        show(random_setting(models, random.Random(seed * 1_000_000 + tried)))
        check(page, f"random setting {tried} of seed {seed}", one_setting(page, train_gpt))
        accepted += not page.text_content("#error")
        tried += 1
    check(page, "presets and sliders", presets(page, train_gpt, models))
    check(page, "controls that exclude each other", exclusions(page, show))
    show(setting())
    check(page, "nine checks", nine_checks(page, train_gpt))
    check(page, "controls", controls(page))
    moved = page.evaluate(READ_PAGE)
    page.reload()
    check(page, "the address contains the setting", [] if page.evaluate(READ_PAGE) == moved else [page.url])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train-gpt", required=True, help="the program to compare with")
    parser.add_argument("--settings", type=int, default=100, help="number of random settings that plan accepts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    train_gpt = os.path.abspath(options.train_gpt)
    if not os.access(train_gpt, os.X_OK):
        parser.error(f"--train-gpt {options.train_gpt}: expected a program; make builds it")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium:
        parser.error("found no chromium on PATH: apt install chromium")
    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def open_page(fragment="", **context):
            page = browser.new_context(**context).new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: None if request.url.startswith("file:") else errors.append(request.url))
            page.goto("file://" + os.path.join(HERE, "index.html") + fragment)
            return page

        page = open_page()

        def show(fragment):
            page.goto(page.url.partition("#")[0] + "#" + fragment)
            page.reload()

        check_settings(page, show, train_gpt, options.settings, options.seed)
        for width in (390, 900, 1600):
            page = open_page("#" + setting(model="405b", seqlen=131072, microbatch=1024, attention="naive"),
                             viewport={"width": width, "height": 844}, has_touch=True)
            excess = page.evaluate(READ_PAGE)["width"]
            check(page, f"{width} pixels wide", [f"the page is {excess} pixels too wide"] if excess > 0 else [])
        check(page, "no console errors and no network requests", errors)
        browser.close()
    finish()


if __name__ == "__main__":
    main()

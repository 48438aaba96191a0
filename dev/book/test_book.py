#!/usr/bin/env python3
"""Tests the book: python3 dev/book/test_book.py --train-gpt ./train_gpt. Needs playwright and a Chromium."""
import argparse
import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "dev/tests"), str(ROOT / "dev/book")]
from testing import expect, expect_equal, run_tests
try:
    from playwright.sync_api import sync_playwright
    from sources import Library
except ImportError as error:
    sys.exit(f"test_book: {error}: pip install playwright pygments markdown")

UNITS = r"(?:[kMGT]B|[mµn]?s|%|TFLOP/s|tokens/s|times|×(?! ?\d))"
LITERAL = re.compile(rf"(?<![\w.])\d[\d.,]*(?:e\d+)? ?(?:billion |million )?{UNITS}(?!\w)")
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\{\{.*?\}\}|(?<!\*)\*[^*\n]+\*(?!\*)|^@(?:at|code|let)[^\n]*", re.M | re.S)
READ_PAGE = """() => {
    const all = (selector, value) => [...document.querySelectorAll(selector)].map(value);
    return {
        lines: all(".code p", e => [e.id, e.textContent]), links: all("a[href]", e => e.getAttribute("href")),
        ids: all("[id]", e => e.id), pictures: all("figure", e => e.querySelectorAll("svg").length),
        checks: all(".check", e => [e.querySelectorAll("ol li").length, e.querySelectorAll("details").length]),
        silent: all("section", e => [e.querySelector("h2").textContent,
            [...e.querySelectorAll(".banner, .note, .text")].some(note => note.textContent.trim())])
            .filter(([title, note]) => !note).map(([title]) => title),
        loaded: performance.getEntriesByType("resource").map(each => each.name)};
}"""
# The smallest distance of a wrapped line from the left edge of the code column, in pixels.
WRAPPED = """() => Math.min(...[...document.querySelectorAll(".code p")].map(p => {
    const range = document.createRange(), box = p.getBoundingClientRect();
    range.selectNodeContents(p);
    return Math.min(...[...range.getClientRects()].filter(r => r.top > box.top + 12).map(r => r.left)) - box.left;
}))"""


def build(root=ROOT, *more, program=None, out="book.html", python=(sys.executable,)):
    return subprocess.run([*python, root / "dev/book/book.py", "--train-gpt", program or PROGRAM, "--out", out, *more],
                          capture_output=True, text=True, timeout=120)


def test_page():
    done, out, errors = build(ROOT, "--strict"), Path("book.html").resolve(), []
    expect(done.returncode == 0, "all notes, names, numbers and links match the program", done.stderr)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"file://{out}", timeout=300_000)
        for width in (390, 900, 1600):
            page.set_viewport_size({"width": width, "height": 844})
            expect(page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{width} pixels wide: it fits")
            expect(page.evaluate(WRAPPED) > 60, f"{width} pixels wide: wrapped lines of code are indented")
        found = page.evaluate(READ_PAGE)
        browser.close()
    library = Library(ROOT)
    lines = dict(found["lines"])
    wrong = [name for name, text in library.text.items() if text != "".join(
        lines.get(library.id(name, i + 1), "?") + "\n" for i in range(len(library.lines[name])))]
    expect_equal(wrong, [], f"the code column equals {len(library.text)} sources byte for byte")
    expect_equal(len(found["lines"]), sum(map(len, library.lines.values())), "each line is on the page once")
    targets = {link for link in found["links"] if not link.startswith("https://")}
    expect_equal(sorted(targets - {f"#{id_}" for id_ in found["ids"]}), [], f"{len(targets)} links have a target")
    expect_equal(len(set(found["ids"])), len(found["ids"]), "ids are unique")
    expect_equal(found["silent"], [], "each section has a note")
    expect_equal(set(found["pictures"]), {1}, "each figure has a picture")
    expect_equal(found["checks"], [[4, 1]] * 9, "nine checks have four answers and a verdict")
    expect_equal([*found["loaded"], *errors], [], "nothing is loaded from outside; no console errors")
    expect(out.stat().st_size < 3e6, "the page is smaller than 3 MB", f"{out.stat().st_size / 1e6:.2f} MB")


def test_text():
    for path in sorted((ROOT / "dev/book").glob("[0-9]*.md")):
        prose = NOT_PROSE.sub("", path.read_text())
        expect_equal(LITERAL.findall(prose), [], f"{path.name}: numbers with units come from JSON")


def test_steps():
    library = Library(ROOT)
    trainer = "".join(text for name, text in library.text.items() if not name.startswith("dev/"))
    for file in (name for name in library.text if name.startswith("dev/kernels/")):
        known = {line.strip() for line in (trainer + library.text[file]).splitlines()}
        lines = [html.unescape(line).strip() for line in re.findall(r"<td>(.*?)</td>", library.comparisons(file))]
        wrong = [line for line in lines if line not in known and not line.startswith("c.step(")]
        expect(lines and not wrong, f"{file}: steps side by side are code of the study or of the trainer", str(wrong))


def test_fork():
    """A modified program: an explained line and a section's name are gone, and a section is new."""
    fork = Path("fork")
    for name in ("Makefile", "train_gpt.cu", "test_gpt.cu", "gpt", "dev", "data/playbook.json"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (fork / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, fork / name)
    source, chapter = fork / "train_gpt.cu", fork / "dev/book/01_step.md"
    chapter.write_text(chapter.read_text() + "\n@at train_gpt.cu: no such line\nA note that lost its line.\n"
                       "\n`no_such_name` `make puzzle P=99` `make test ONLY=\"none\"` `--none` {{chapter['no key']}}\n")
    source.write_text(source.read_text().replace("// ==== update =", "// ==== renamed ="))
    done = build(fork)
    expect_equal(done.returncode, 0, "a fork's book is built although its program differs")
    for words in ("01_step.md: @at train_gpt.cu: no such line: 0 lines contain this text, expected 1", "`no_such_name`",
                  "P=99`", 'ONLY="none"`', "`--none`", "no key", "sections in no chapter: train_gpt.cu: renamed"):
        expect(words in done.stderr, f"the book reports: {words}", done.stderr)
    page = Path("book.html").read_text()
    first = page.index("<section>")
    expect(first < page.index("A note that lost its line.") < page.index("class=row", first),
           "a note without its line moves to the head of its chapter's section")
    expect("Other sections" in page and ">renamed<" in page, "a new section is on the page")
    expect_equal(build(fork, "--strict").returncode, 1, "--strict: exit code 1")


def test_mistakes():
    done = build(python=(sys.executable, "-S"))
    expect("pip install pygments markdown" in done.stderr, "a missing package is reported with a command", done.stderr)
    for bad, arguments in (("/no/such/program", {"program": "/no/such/program"}), ("/proc/x", {"out": "/proc/x"})):
        done = build(**arguments)
        expect(done.returncode == 2 and bad in done.stderr and "Traceback" not in done.stderr,
               f"{bad} is rejected with exit code 2", f"{done.returncode} {done.stderr}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-gpt", required=True, metavar="PROGRAM")
    PROGRAM = os.path.abspath(parser.parse_args().train_gpt)
    CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not CHROMIUM:
        parser.error("found no chromium on PATH: apt install chromium")
    run_tests(globals())

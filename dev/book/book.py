#!/usr/bin/env python3
"""Writes the book: one page with the program's code, line by line, next to notes and figures.

    make book           # build/book/index.html, after building ./train_gpt

Notes come from the sources' comments (sources.py) and from the chapters [0-9]*.md in this folder, which consist of
Markdown and of lines that begin with @:

    @code FILE: SECTION; SECTION    places sections of a source, named after their banners; without them the whole file
    @at FILE: TEXT                  what follows explains the only line of FILE that contains TEXT
    @figure NAME                    a picture that figures.py draws
    @question TEXT                  what follows is its folded answer
    @text                           what follows belongs to no line
    @checks                         the questions of dev/explorer/index.html with folded verdicts
    @let NAME = EXPRESSION          a name for expressions

{{expression:format}} is a number from JSON: plan("FLAGS") is the output of ./train_gpt plan --json, `chapter` is
data/playbook.json. The figures next to the lines come from runs/inspect/figures.json (make inspect JSON=...), if it is
newer than train_gpt.cu. In a modified program the book still builds: it lists what no longer matches, and the notes of
lines that are gone move to the head of their chapter's section. With --strict such problems are errors (exit code 1).
"""
import argparse
import functools
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "dev"))
try:
    import markdown
    import figures
    from sources import Library
except ImportError as error:
    sys.exit(f"book: {error}: pip install pygments markdown")
from tables import number, times

FOLDER = ROOT / "dev/book"
INSPECT = ROOT / "runs/inspect/figures.json"
NUMBER = re.compile(r"\{\{(.+?)(?::([^:{}\"\]')]*))?\}\}", re.S)
NO_FIGURES = "This copy has no figures: <code>make inspect JSON=runs/inspect/figures.json</code> writes them."


class Numbers:
    """The JSON that numbers in the text and in the pictures come from."""

    def __init__(self, program):
        self.program = program
        parts = json.loads((ROOT / "data/playbook.json").read_text())
        self.chapter = {name: part.get("results", part) for name, part in parts.items()}

    def run(self, *arguments):
        return subprocess.check_output([self.program, *arguments], text=True)

    @functools.cache
    def plan(self, flags):
        return json.loads(self.run("plan", "--json", *flags.split()))


def line_figures(library):
    """Returns {(file, line): (words, colour class)} from make inspect."""
    if not INSPECT.exists() or INSPECT.stat().st_mtime < (ROOT / "train_gpt.cu").stat().st_mtime:
        return {}
    words, colours, counts = {}, {}, {}
    for kernel in json.loads(INSPECT.read_text())["kernels"]:
        place = library.definitions.get(f"{kernel['range'].split('<')[0]}_kernel")
        if kernel["launches"] and place:
            bound = f", {kernel['ratios']['cost']:.2f}× least traffic" if kernel["ratios"].get("cost") else ""
            words.setdefault(place, []).append(f"≈ {number(kernel['estimate_us'])} µs × {kernel['launches']}{bound}")
        launch = math.prod(kernel["grid"]) / max(1, kernel["recorded_blocks"])      # a launch over what was recorded
        for space, unit in (("global", "sectors"), ("shared", "wavefronts")):
            for site in kernel[space]:
                key = (site["file"], site["line"]), site["access"], unit
                added = (site[name] * launch for name in (unit, f"least_{unit}", "dram_sectors"))
                counts[key] = [old + new for old, new in zip(counts.get(key, (0, 0, 0)), added)]
    for (place, access, unit), (count, least, dram) in counts.items():
        ratio = count / max(1, least)
        moved = f", {number(dram * 32 / 1e6)} MB" if dram else ""
        words.setdefault(place, []).append(f"{access}: {times(ratio)}× {unit}{moved}")
        colours[place] = max(colours.get(place, ""), "r2" if ratio > 2 else "r1" if ratio > 1.05 else "")
    return {place: ("\n".join(list(dict.fromkeys(rows))[:4]), colours.get(place, "")) for place, rows in words.items()}


# ---- chapters

class Book:
    def __init__(self, numbers):
        self.numbers, self.problems, self.placed, self.contents = numbers, [], set(), []
        self.names = {"plan": numbers.plan, "chapter": numbers.chapter}     # of the expressions in chapters
        self.sources = Library(ROOT)
        self.figures = line_figures(self.sources)
        self.options = self.sources.options(numbers.run("--help", "markdown"), self.markdown)

    def attempt(self, where, what, function, otherwise):
        """Returns function(), or `otherwise` after a failure, which becomes a problem: chapters belong to the program,
        but a fork's program may lack what they name."""
        try:
            return function()
        except Exception as error:      # an expression may fail in any way
            self.problems.append(f"{where}: {what}: {type(error).__name__}: {error}")
            return otherwise

    def markdown(self, text, where="options"):
        """Returns Markdown as HTML: with numbers from JSON, pictures, and names in backticks linked to definitions."""
        def value(match):
            return self.attempt(where, match[0], lambda: format(eval(match[1], self.names), match[2] or ""), "n/a")

        def picture(match):
            drawn = self.attempt(where, match[0], lambda: getattr(figures, match[1])(self.numbers), "")
            return f"\n<figure>{drawn}</figure>\n"

        def name(match):
            words = html.unescape(match[1])
            link = self.sources.link(words)
            if link is None:
                self.problems.append(f"{where}: `{words}`: no such name in the sources")
            return f"<a href=#{link}>{match[0]}</a>" if link else match[0]
        text = re.sub(r"^@figure (\w+)$", picture, NUMBER.sub(value, text), flags=re.M)
        if "{{" in text:
            self.problems.append(f"{where}: an expression lacks its end: {text[text.index('{{'):][:40]}")
        page = markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
        return re.sub(r"(?<!<pre>)<code>([^<]*)</code>", name, page)

    def text(self, body, where):
        return f"<div class=text>{self.markdown(body, where)}</div>" if body.strip() else ""

    def explain(self, notes, argument, body, where):
        """Adds an @at note to notes, {file: {line: HTML}}; line 0 if its line does not exist."""
        file, _, quoted = argument.partition(": ")
        lines = [i for i, line in enumerate(self.sources.lines.get(file, []), 1) if quoted in line]
        if len(lines) != 1:
            self.problems.append(f"{where}: {len(lines)} lines contain this text, expected 1")
            lines = [0]
        at = notes.setdefault(file, {})
        at[lines[0]] = at.get(lines[0], "") + self.text(body, where)

    def code(self, argument, notes, where):
        file, _, titles = argument.partition(": ")
        sections = {section.title: section for section in self.sources.parts.get(file, [])}
        chosen = [sections.get(title) for title in titles.split("; ")] if titles else [*sections.values()]
        if not chosen or None in chosen or self.placed.intersection(chosen):
            self.problems.append(f"{where}: no such file or section, or it is placed already")
        chosen = [section for section in chosen if section and section not in self.placed]
        self.placed.update(chosen)
        # The contents list the sections of train_gpt.cu, and the other files.
        self.contents[-1][2].extend((section.id, section.title if file == "train_gpt.cu" else file)
                                    for section in (chosen if file == "train_gpt.cu" else chosen[:1]))
        page = "".join(section.html(notes.get(file, {}), self.figures) for section in chosen)
        return page + self.attempt(where, "steps", lambda: self.sources.comparisons(file), "")

    def checks(self, where):
        page = (ROOT / "dev/explorer/index.html").read_text()
        introduction, *checks = re.search(r'id="checks">\n(.*?)\n</script>', page, re.S)[1].split("\n\n")
        command = re.search(r"`./train_gpt plan (.*?)`", introduction)[1]

        def plan7b(name, flags=""):
            record = self.numbers.plan(f"{command} {flags}")
            return {**record, **record["bytes"], **record["flops_per_token"]}[name]
        self.names["plan7b"] = plan7b
        parts = ["<h3>Nine checks</h3>", self.text(introduction, where)]
        for i, check in enumerate(checks, 1):
            question, *rest = re.split(r"^([-+=]) ", check, flags=re.M)
            *answers, verdict = rest[1::2]
            listed = "".join(f"<li>{self.markdown(answer, where)[3:-4]}" for answer in answers)
            verdict = f"**{'ABCD'[rest.index('+') // 2]}.** {verdict}"
            parts.append(f"<div class=check>{self.markdown(f'{i}&#46; {question}', where)}<ol>{listed}</ol><details>"
                         f"<summary>Answer</summary>{self.text(verdict, where)}</details></div>")
        return "".join(parts)

    def chapter(self, index, path):
        head, *rest = re.split(r"^@(?!figure)(\w+) ?(.*)\n", path.read_text(), flags=re.M)
        title, _, introduction = head.partition("\n")
        title = f"{index}. {title.lstrip('# ')}"
        self.contents.append((f"ch{index}", title, []))
        pieces, notes = [("text", "", introduction), *zip(rest[::3], rest[1::3], rest[2::3])], {}
        for kind, argument, body in pieces:
            if kind == "at":
                self.explain(notes, argument, body, f"{path.name}: @at {argument}")
            if kind == "let":
                name, _, code = argument.partition(" = ")
                self.names[name] = self.attempt(path.name, argument, lambda: eval(code, self.names), None)
        parts = [f"<h1 id=ch{index}>{html.escape(title)}</h1>"]
        for kind, argument, body in pieces:
            where = f"{path.name}: @{kind} {argument}"
            if kind == "question":
                parts.append(f"<details class=question><summary>{self.markdown(argument, where)[3:-4]}</summary>"
                             f"{self.text(body, where)}</details>")
            elif kind in ("code", "checks", "let", "text"):
                parts += [self.code(argument, notes, where) if kind == "code" else "",
                          self.checks(where) if kind == "checks" else "", self.text(body, where)]
            elif kind != "at":
                self.problems.append(f"{where}: unknown directive")
        return "".join(parts)

    def page(self):
        chapters = "".join(self.chapter(*path) for path in enumerate(sorted(FOLDER.glob("[0-9]*.md")), 1))
        rest = [section for parts in self.sources.parts.values() for section in parts if section not in self.placed]
        if rest:
            names = ", ".join(f"{section.file}: {section.title}" for section in rest)
            self.problems.append(f"sections in no chapter: {names}")
            self.contents.append(("rest", "Other sections", [(section.id, section.title) for section in rest]))
            chapters += "<h1 id=rest>Other sections</h1>" + "".join(section.html({}, self.figures) for section in rest)
        self.contents.append(("options", "Options", []))
        contents = "".join(f"<p><a href=#{id_}>{html.escape(title)}</a><small>" + " · ".join(
            f"<a href=#{at}>{html.escape(name)}</a>" for at, name in sections) + "</small></p>"
            for id_, title, sections in self.contents)
        page = (FOLDER / "page.html").read_text()
        for key, value in {"contents": contents, "chapters": chapters, "options": self.options,
                           "figures": "" if self.figures else NO_FIGURES}.items():
            page = page.replace(f"<!-- {key} -->", value)
        return page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "build/book/index.html", metavar="FILE",
                        help="the page (default: build/book/index.html)")
    parser.add_argument("--train-gpt", default=str(ROOT / "train_gpt"), metavar="PROGRAM",
                        help="the trainer, which prints the plans and options (default: ./train_gpt)")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a note, name or number does not match")
    options = parser.parse_args()
    try:
        book = Book(Numbers(options.train_gpt))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(book.page())
    except (OSError, subprocess.CalledProcessError) as error:
        parser.error(error)
    for words in book.problems:
        print(f"book: {words}", file=sys.stderr)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")
    return 1 if options.strict and book.problems else 0


if __name__ == "__main__":
    sys.exit(main())

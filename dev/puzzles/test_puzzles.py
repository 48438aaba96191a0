#!/usr/bin/env python3
"""Tests the puzzles: each one fails as delivered, its solution is accepted, and each wrong solution is rejected for the
stated reason, with the right line. `make test-puzzles` calls it.

    test_puzzles.py [NUMBER...]
"""
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import judge
from judge import BUILD, ROOT, Judge, Puzzle, all_puzzles, compare_lines
sys.path.append(str(BUILD.parents[1] / "dev/tests"))
from testing import expect, expect_equal, finish


def changed(code, edits):
    """Applies the edits of a wrong solution: runs of lines "-old" and then "+new", with a blank line between a run
    without new lines and the next one. Returns the new code and the text of the line that the verdict must name:
    "@text", else the first new line."""
    named = re.search(r"^@(.*)", edits, re.MULTILINE)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", edits, re.MULTILINE):
        old, new = (re.sub(r"^.", "", text, flags=re.MULTILINE) for text in (old, new))
        if code.count(old) != 1:
            raise ValueError(f"expected once in the solution: {old}")
        code = code.replace(old, new)
    added = re.search(r"^\+(.*)", edits, re.MULTILINE)
    return code, (named or added or [0, ""])[1].strip()


def judged(puzzle, folder, code):
    """Returns the Problem of the puzzle with this code (None: accepted), the text of its line, figures, seconds."""
    text = puzzle.with_code(code)
    begin = time.monotonic()
    problem, figures = Judge(puzzle, BUILD / "test" / puzzle.name / folder, text).judge()
    line = text.splitlines()[problem.line - 1].strip() if problem and problem.line else ""
    return problem, line, figures, time.monotonic() - begin


def test(puzzle):
    notes = puzzle.notes()
    solution = notes["solution"]
    delivered, kind = next(((notes[heading], heading[10:]) for heading in notes if heading.startswith("delivered ")),
                           ("", "unwritten"))
    problem, _, _, _ = judged(puzzle, "delivered", delivered)
    expect_equal(problem and problem.kind, kind, f"{puzzle.name}: as delivered it is rejected")
    problem, _, figures, seconds = judged(puzzle, "solution", solution)
    expect(not problem, f"{puzzle.name}: the solution is accepted", problem)
    print(f"        {seconds:.1f} s; " + ", ".join(f"{name} {found:.2f} (limit {limit:g})"
                                                   for name, (found, limit) in figures.items()))
    wrong = {heading: edits for heading, edits in notes.items() if heading.startswith("wrong ")}
    expect(len(wrong) >= 3, f"{puzzle.name}: has three wrong solutions")
    for at, (heading, edits) in enumerate(wrong.items()):
        _, kind, what = re.fullmatch(r"(wrong) (\S+): (.*)", heading).groups()
        code, named = changed(solution, edits)
        problem, line, _, _ = judged(puzzle, f"wrong-{at}", code)
        has_line = "\n@" in edits or kind in ("bounds", "race", "uninitialised", "S", "W", "T", "requests", "B")
        expect(problem and problem.kind == kind and (line == named if has_line else not problem.line),
               f"{puzzle.name}: {what}: {kind}", f"found {problem}, line `{line}`; expected line `{named}`")
        if problem:
            print(f"        {problem.text}")


def test_progress():
    """The copies and the progress are in a folder that git ignores and make clean keeps; the list has columns."""
    mine = f"/{judge.MINE.relative_to(ROOT)}/"
    expect(judge.PROGRESS.parent == judge.MINE and mine in (ROOT / ".gitignore").read_text().split()
           and not mine.startswith("/build/"), "git ignores the copies and the progress, and make clean keeps them")
    with tempfile.TemporaryDirectory() as folder:
        judge.MINE, judge.PROGRESS = Path(folder) / "mine", Path(folder) / "mine/progress.json"
        puzzle = Puzzle(all_puzzles()[15].path)
        puzzle.make_copy()
        puzzle.copy.write_text("changed", encoding="utf-8")
        puzzle.make_copy()
        expect(puzzle.copy.read_text() == "changed" != puzzle.source(), "a copy is made once, and the puzzle is kept")
        figures = {name: [123.4, 1.05] for name in ("S", "W", "T", "requests", "products", "shared")}
        judge.PROGRESS.write_text(json.dumps({
            each.name: {"figures": dict(list(figures.items())[:1 + each.number % 6]),
                        "estimate": "5 µs on an H100, ..."} for each in all_puzzles()}))
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            judge.print_list(all_puzzles())
        columns = {line.index(" 5 µs on") for line in shown.getvalue().splitlines()[1:]}
        expect(len(columns) == 1, "make puzzles: the estimates are in one column", shown.getvalue())


def main():
    numbers = [int(word) for word in sys.argv[1:]]
    for puzzle in all_puzzles():
        expect(compare_lines(puzzle), f"{puzzle.name}: the trainer has the function to compare with")
        if not numbers or puzzle.number in numbers:
            test(puzzle)
    test_progress()
    finish()


if __name__ == "__main__":
    main()

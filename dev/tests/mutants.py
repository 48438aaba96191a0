#!/usr/bin/env python3
"""Mutation testing: runs the tests with each of the one-line faults in mutants.txt and reports faults that no test
finds.

Compiles the tests once with all faults: each expression becomes `mutant(N) ? (fault) : (expression)`, and the
environment variable MUTANT selects the active N. For each mutant the tests named in its row run first; if they pass,
all tests run. The first failed test ends the run.
"""
import argparse, concurrent.futures, os, pathlib, re, shutil, subprocess, sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutants"
GPT, CARD = "build/cpu-fp32/train_gpt", "build/test/bf16-32/test_gpt"
PROGRAMS = {"fp32-1": ["build/test/fp32-1/test_gpt"], "bf16-32": [CARD],
            "many": [sys.executable, "dev/tests/test_many.py", "--card", CARD, "--ours", GPT]}
LIMIT = 900   # seconds for a program; a longer run counts as failed
HEADER = """#pragma once
#include <cstdlib>
inline const int active_mutant = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : 0;
inline bool mutant(int number) { return number == active_mutant; }
"""


def table():
    """Returns the rows of mutants.txt: (where, expression, replacement, program, --only of the tests)."""
    lines = (ROOT / "dev/tests/mutants.txt").read_text().splitlines()
    rows = [line.split("  |  ") for line in lines if line and not line.startswith("#")]
    return [(where, old, new, *tests.split(": ", 1)) for where, old, new, tests in rows]


def definitions(text, name):
    """Returns the ranges in `text` of the definitions of a function, struct or class: each ends at a brace on a line
    with the indentation of its first line, or on its first line."""
    form = r"^( *)(?:[^\n;=]*[ *&:~])?%s(?:\([^;]*?| [^\n;()]*)\{(?:[^\n]*\}$|.*?^\1\})" % name
    return [match.span() for match in re.finditer(form, text, re.MULTILINE | re.DOTALL)]


def plant(rows):
    """Returns the sources with all mutants in them, and messages about rows that do not match exactly one place."""
    paths = [ROOT / "train_gpt.cu", *sorted((ROOT / "gpt").glob("*"))]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    edits, wrong = [], []
    for number, (where, old, new, *_) in enumerate(rows, 1):
        pattern = re.compile(r"\s+".join(map(re.escape, old.split(" "))))
        found = {(path, match.span()) for path, text in sources.items()
                 for begin, end in ([(0, len(text))] if where == path else definitions(text, where))
                 for match in pattern.finditer(text, begin, end)}
        if len(found) != 1:
            wrong.append(f"{len(found)} places: {where}: {old}")
            continue
        path, (begin, end) = found.pop()
        edits.append((path, begin, end, f"(mutant({number}) ? ({new}) : ({sources[path][begin:end]}))"))
    for path, begin, end, text in sorted(edits, reverse=True):
        sources[path] = sources[path][:begin] + text + sources[path][end:]
    return sources, wrong


def copy_tree(sources):
    """Copies the repository to COPY, with these sources and mutant.h."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, COPY / name)
    for path, text in {**sources, "mutant.h": HEADER}.items():
        (COPY / path).write_text(text)


def run(program, number, only=None):
    """Runs a test program. Returns the first failed result; the exit code and last line if it failed otherwise; "" if
    all tests passed."""
    command = ["timeout", "-k", "5", str(LIMIT), *PROGRAMS[program], *(["--only", only] if only else [])]
    environment = {**os.environ, "MUTANT": str(number), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=COPY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace") as process:
        line = ""
        for line in process.stdout:
            if line.startswith("FAILED"):
                process.terminate()
                return line[8:].strip()
        return f"ended with {process.wait()} after: {line.strip()}" if process.wait() else ""


def examine(number, row, selected):
    """Runs the tests with a mutant; prints and returns whether a test finds it."""
    where, old, new, program, only = row
    found, by = run(program, number, only), f"{program}: {only}"
    for other in PROGRAMS:
        if not found:
            found, by = run(other, number, selected[other]), other
    print(f"{'found   ' if found else 'SURVIVED'}  {number:3}  {where}: {old}  ->  {new}\n"
          f"          {by}: {found[:150] or 'all tests pass'}", flush=True)
    return bool(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that each row matches exactly one place")
    parser.add_argument("--selected", default="", help="tests of bf16-32 that `make test` runs; default: all")
    parser.add_argument("--rows", default="", help="numbers of the rows to run, such as 3,17-20; default: all")
    options = parser.parse_args()
    rows = table()
    sources, wrong = plant(rows)
    print(f"{len(rows)} mutants", *wrong, sep="\n")
    if wrong or options.check:
        return bool(wrong)
    copy_tree(sources)
    targets = [words[-1] for words in PROGRAMS.values()]
    subprocess.run(["make", "-j2", "CPPFLAGS=-include $(CURDIR)/mutant.h", *targets], cwd=COPY, check=True)
    wanted = [range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1) for part in options.rows.split(",") if part]
    chosen = [n for n in range(1, len(rows) + 1) if not wanted or any(n in part for part in wanted)]
    selected = {"fp32-1": None, "bf16-32": options.selected, "many": None}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        broken = [result for result in pool.map(lambda p: run(p, 0, selected[p]), PROGRAMS) if result]
        if broken:
            print("tests fail without a mutant:", *broken)
            return 1
        found = list(pool.map(lambda n: examine(n, rows[n - 1], selected), chosen))
    print(f"{sum(found)} of {len(found)} mutants were found")
    return not all(found)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Tests that train_gpt.cu reads like the trainer of one GPU: in the sections of a training step few lines of code name
another technique, the first kernel comes early, and no function has many parameters.

    python3 dev/tests/test_core.py
"""
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
from testing import expect, run_tests

SOURCE = Path(__file__).resolve().parents[2] / "train_gpt.cu"
SECTIONS = ("linear", "forward", "backward", "update", "train")
TECHNIQUES = re.compile(r"tensor_ranks|_rows|\bCt\b|shard|zero|placement|fp8|muon|loss_scale|noise|naive|\bpast\b|_8\b|"
                        r"Groups|Layout", re.IGNORECASE)
MOST_LINES, MOST_PARAMETERS, FIRST_KERNEL, LENGTH = 12, 9, 250, 2600


def code_lines(text):
    """Returns {number: line} without comments, string literals and blank lines."""
    text = re.sub(r"/\*.*?\*/", "", text)
    lines = {n: re.sub(r"//.*", "", re.sub(r'"[^"]*"', '""', line)) for n, line in enumerate(text.split("\n"), 1)}
    return {n: line for n, line in lines.items() if line.strip()}


def named_lines(text):
    """Returns the lines of code in SECTIONS that name a technique."""
    section, found = "", []
    for number, line in enumerate(text.split("\n"), 1):
        banner = re.match(r"// ==== (.*?) =+$", line)
        section = banner.group(1) if banner else section
        code = code_lines(line).get(1, "")
        if section in SECTIONS and TECHNIQUES.search(code) and not code.startswith("#include"):
            found.append(f"{number}: {code.strip()}")
    return found


def long_lists(text):
    """Returns the functions, other than kernels, that have more than MOST_PARAMETERS parameters."""
    code = "\n" + "\n".join(code_lines(text).values()).replace("= {}", "")
    found = []
    for name, parameters in re.findall(r"\n[\w:<>*& ,]*?\b(\w+)\(([^(){};]*)\)\s*(?:const\s*)?\{", code):
        parameters = re.sub(r"<[^<>]*>", "", parameters)
        if not name.endswith("_kernel") and parameters.count(",") >= MOST_PARAMETERS:
            found.append(name)
    return found


def test_core():
    text = SOURCE.read_text()
    found = named_lines(text)
    expect(len(found) <= MOST_LINES, f"{len(found)} lines of a training step name a technique, at most {MOST_LINES}",
           "\n".join(found))
    expect(named_lines("// ==== update ====\nif (muon) x();   // fp8\n// fp8\n") == ["2: if (muon) x();"],
           "a line of code that names a technique is found, a comment is not")
    kernel = next(n for n, line in code_lines(text).items() if "__global__" in line)
    expect(kernel < FIRST_KERNEL, f"the first kernel is in line {kernel}, before {FIRST_KERNEL}")
    length = text.count("\n")
    expect(length <= LENGTH, f"train_gpt.cu has {length} lines, at most {LENGTH}")
    files = [SOURCE, *sorted(SOURCE.parent.glob("gpt/*.cuh"))]
    lists = [f"{path.name}: {name}" for path in files for name in long_lists(path.read_text())]
    expect(not lists, f"no function has more than {MOST_PARAMETERS} parameters, except kernels", ", ".join(lists))
    expect(long_lists("\nvoid f(int a, int b, int c, int d, int e, int g, int h, int i, int j, int k) {\n}") == ["f"],
           "a function with ten parameters is found")


if __name__ == "__main__":
    run_tests(globals())

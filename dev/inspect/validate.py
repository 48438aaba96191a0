#!/usr/bin/env python3
"""Compares estimates with published measurements: fetches the kernels of validation.json with git, records them on the
emulator, and writes the tables of validation.md.

    dev/inspect/validate.py                 # record all programs (10 minutes), write the tables
    dev/inspect/validate.py --keep          # use the recordings of the last run

A ladder of validation.json has the source (a key of `sources`), commit and file of a kernel; `data` and `call`: C++
that allocates its arguments and launches it; the card; {value: measurement}: `call` contains the value as $. A matmul
has its m, n, k and type instead. `unit` is a time or a rate, of the product of the numbers in `work`. `events`: each
launch was timed alone, between two events, after a memset of the size of L2: see after_memset(). `fitted`: a constant
was taken from it.

Every second ladder, in the order of the file, is held out unless it is `fitted`: the constants of estimate.py were
fitted to the others only.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, ".."))
import estimate
from cards import CARDS
from results import Results, read_json
from tables import number

ROOT = os.path.dirname(os.path.dirname(HERE))
FOLDER = os.path.join("build", "validation")
LIST, GUIDE = (os.path.join("dev", "inspect", name) for name in ("validation.json", "validation.md"))
EVENT_SECONDS = 4.1e-6      # between two events with a short kernel between them, without the kernel
UNITS = {"ms": 1e-3, "us": 1e-6, "GB/s": 1e9, "GFLOP/s": 1e9, "TFLOP/s": 1e12}
DRIVER = """#include <random>
#include <vector>
#define main main_of_source
{includes}
#undef main
#include <nvtx3/nvToolsExt.h>
std::vector<void*> arrays;   // of the current launch
// Returns n values in device memory: zeros, or random integers below `limit`.
template <class T> T* on_gpu(size_t n, unsigned limit = 0)
{{
    T* values;
    cudaMalloc(&values, n * sizeof(T));
    arrays.push_back(values);
    if (limit == 0) return values;
    std::mt19937 random;
    std::vector<T> host(n);
    for (T& value : host) value = static_cast<T>(static_cast<int>(random() % limit));
    cudaMemcpy(values, host.data(), n * sizeof(T), cudaMemcpyHostToDevice);
    return values;
}}
int main()
{{
{calls}}}
"""
CALL = """    {{
        {data}
        nvtxRangePushA("{label}");
        {call};
        nvtxRangePop();
        for (void* array : arrays) cudaFree(array);
        arrays.clear();
    }}
"""


# ---- recording

def fetch(sources, ladder):
    """Returns the folder of a ladder's source at its commit; clones it with git if necessary."""
    clone = os.path.join(FOLDER, "sources", ladder["source"])
    tree = f"{clone}-{ladder['commit']}"
    if not os.path.isdir(clone):
        subprocess.run(["git", "clone", "-q", sources[ladder["source"]], clone], check=True)
    if not os.path.isdir(tree):
        subprocess.run(["git", "-C", clone, "worktree", "add", "-f", "-q", os.path.abspath(tree), ladder["commit"]],
                       check=True)
    return tree


def program_of(ladder):
    """Returns the name of the program that a ladder is part of. Files with a main cannot share one."""
    parts = [ladder["source"], ladder["commit"], ladder["card"]]
    if ladder["file"].endswith(".cu"):
        parts.append(os.path.basename(ladder["file"])[:-3])
    return "-".join(parts).replace(".", "")


def label(number, value):
    return f"ladder {number}: {value}"


def record(sources, name, ladders):
    """Writes, builds and records a program of ladders; ladders: {number: ladder}."""
    tree = fetch(sources, next(iter(ladders.values())))
    files = dict.fromkeys(os.path.abspath(os.path.join(tree, ladder["file"])) for ladder in ladders.values())
    calls = "".join(CALL.format(data=ladder["data"], label=label(number, value),
                                call=ladder["call"].replace("$", value))
                    for number, ladder in ladders.items() for value in ladder["measured"])
    driver, card = os.path.join(FOLDER, f"{name}.cu"), next(iter(ladders.values()))["card"]
    with open(driver, "w", encoding="utf-8") as file:
        file.write(DRIVER.format(includes="\n".join(f'#include "{path}"' for path in files), calls=calls))
    made = subprocess.run(["make", "-s", "inspect", f"FILE={driver}", f"CARD={card}", "SAMPLE=yes"], check=False,
                          capture_output=True, text=True, env={**os.environ, "INSPECT_RACES": "no"})
    if made.returncode:
        print(f"{driver}: {made.stderr[-2000:]}", file=sys.stderr)


def inputs_of(name):
    """Returns {label: [arguments of estimate.launch_seconds()]} of a recorded program."""
    program = os.path.join("build", "inspect", name, "program")
    sass = f"{program}.sass"
    if not os.path.exists(f"{program}.json"):
        return {}
    results = Results(read_json(f"{program}.json", "recording"),
                      sass=read_json(sass, "sass") if os.path.exists(sass) else None)
    inputs = {}
    for kernel in results.kernels:
        inputs.setdefault(kernel.range, []).extend([kernel.inputs] * kernel.launches)
    return inputs


# ---- cases

def after_memset(card, launch, *more):
    """Returns the arguments of estimate.launch_seconds() if L2 is full of stored sectors when the launch starts: they
    are written to memory in place of the launch's own last ones."""
    moved = launch["dram_load"] + launch["dram_store"]
    first = min(moved, card.l2_bytes)
    return card, {**launch, "dram_store": first + (moved - first) * launch["dram_store"] / max(1, moved)}, *more


class Case:
    def __init__(self, number, ladder, value, inputs):
        self.number, self.ladder, self.value, self.inputs = number, ladder, value, inputs
        if ladder.get("events"):
            self.inputs = [after_memset(*launch) for launch in inputs]
        figure, unit = ladder["measured"][value], ladder["unit"]
        work = math.prod(ladder["work"]) if "work" in ladder else 2 * math.prod(ladder.get("matmul", [1])[:3])
        self.measured = work / (figure * UNITS[unit]) if unit.endswith("/s") else figure * UNITS[unit]

    @property
    def held_out(self):
        return self.number % 2 == 1 and not self.ladder.get("fitted")

    def predicted(self):
        if "matmul" not in self.ladder:
            launches = sum(estimate.launch_seconds(*inputs) for inputs in self.inputs)
            return launches + (EVENT_SECONDS if self.ladder.get("events") else 0)
        m, n, k, of = self.ladder["matmul"]
        return estimate.matmul_seconds(CARDS[self.ladder["card"]], {
            "m": m, "n": n, "k": k, "type": of, "out_bytes": estimate.ELEMENT_BYTES[of], "accumulate": False,
            "epilogue": "none"})

    def bound(self):
        """Returns the longest bound of the longest launch."""
        if "matmul" in self.ladder:
            return "matmul"
        bounds = estimate.launch_bounds(*max(self.inputs, key=lambda inputs: estimate.launch_seconds(*inputs)))
        return max(bounds, key=bounds.get)

    def ratio(self):
        return self.predicted() / self.measured


def read_cases(ladders, keep, sources, only):
    programs = {}
    for number, ladder in enumerate(ladders):
        if "matmul" not in ladder:
            programs.setdefault(program_of(ladder), {})[number] = ladder
    inputs = {}
    for name, members in programs.items():
        if only in name:
            if not keep:
                print(name, flush=True)
                record(sources, name, members)
            inputs.update(inputs_of(name))
    return [Case(number, ladder, value, inputs.get(label(number, value)))
            for number, ladder in enumerate(ladders) for value in ladder["measured"]
            if "matmul" in ladder or label(number, value) in inputs]


# ---- errors

def error_words(cases):
    """Returns the figures of a group of cases as text."""
    ratios = sorted(case.ratio() for case in cases)
    errors = [abs(ratio - 1) for ratio in ratios]
    low, _, high = statistics.quantiles(ratios, n=4)
    tenths = statistics.quantiles(ratios, n=10)
    near = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    return (f"{len(cases)} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} | {tenths[0]:.2f} to "
            f"{tenths[-1]:.2f} | {100 * statistics.median(errors):.0f} % | {near} of {len(cases)}")


def order_words(cases):
    """Returns in how many pairs of a ladder, whose measured times differ by 10 % or more, the faster one is right."""
    right = pairs = 0
    for a in cases:
        for b in cases:
            same = all(a.ladder[key] == b.ladder[key] for key in ("name", "card", "link"))
            if same and a.measured >= 1.1 * b.measured:
                pairs += 1
                right += a.predicted() > b.predicted()
    return f"{right} of {pairs}"


# ---- the guide

BEGIN, END = "<!-- validate.py: begin -->", "<!-- end -->"


def groups_of(cases):
    return [("all", cases), ("fitted", [c for c in cases if not c.held_out]),
            ("held out", [c for c in cases if c.held_out])]


def guide_table(cases):
    rows = ["| cases | number | median | quartiles | 8 in 10 | median error | within 1.5 | pairs in order |",
            "|---|---|---|---|---|---|---|---|",
            *[f"| {name} | {error_words(group)} | {order_words(group)} |" for name, group in groups_of(cases)], "",
            "| kernel | GPU | measured µs | estimated / measured time | bound by |", "|---|---|---|---|---|"]
    kernels = {}
    for case in cases:
        kernels.setdefault(tuple(case.ladder[key] for key in ("name", "link", "card")), []).append(case)
    for (name, link, card), group in kernels.items():
        times = [number(1e6 * pick(case.measured for case in group)) for pick in (min, max)]
        ratios = ", ".join(f"{case.value}: {case.ratio():.2f}{' *' * case.held_out}" for case in group)
        rows.append(f"| [{name}]({link}) | {card} | {' to '.join(dict.fromkeys(times))} | {ratios} | "
                    f"{', '.join(dict.fromkeys(case.bound() for case in group))} |")
    return "\n".join(rows)


def write_guide(cases):
    with open(GUIDE, encoding="utf-8") as file:
        before, rest = file.read().split(BEGIN)
    with open(GUIDE, "w", encoding="utf-8") as file:
        file.write(f"{before}{BEGIN}\n{guide_table(cases)}\n{END}{rest.split(END)[1]}")


# ---- the command

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="use the recordings of the last run")
    parser.add_argument("--only", default="", metavar="NAME", help="programs with this in their name; writes nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.makedirs(os.path.join(FOLDER, "sources"), exist_ok=True)
    listed = read_json(LIST, "cases")
    cases = read_cases(listed["ladders"], options.keep, listed["sources"], options.only)
    for case in cases:
        held = "held out" if case.held_out else ""
        print(f"{case.ladder['name']:24} {case.value:18} {case.ladder['card']:12} {held:9}{1e6 * case.measured:10.1f} "
              f"{1e6 * case.predicted():10.1f} {case.ratio():6.2f}  {case.bound()}")
    if not options.only:
        write_guide(cases)
    for name, group in groups_of(cases):
        if len(group) > 1:
            print(f"{name:9} {error_words(group)} | {order_words(group)}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compiles kernels with nvcc and reads their machine code (SASS): what a warp waits for, which counts cannot show.

    sass.py train_gpt.cu --card h100 -DPRECISION_BF16 --out build/inspect/sass-h100.json

Writes {mangled symbol: {"registers", "spills" (bytes), "loops"}}. Without nvdisasm there are only registers and
spills. loops[0] is the code outside loops. An inner loop has a greater depth, and its outer loop as parent. Figures
of a loop do not include its inner loops:

    lines           [file, first, last]: source lines of the loop
    bytes           that a warp loads from global memory per iteration: width x 32 lanes, for loads and cp.async
    round_trips     waits of an iteration for global memory; loads issued before the same wait share one
    tma             whether the loop has TMA copies, whose size is not in the code
    counts          {instruction, with the bits per lane of a memory access: number in the loop}; "all": their sum.
                    Instructions count once, whether their branch is taken or not

A warp issues its instructions in order. A load announces one of six scoreboards, and an instruction waits until those
of its wait mask are clear. Both are fields of the encoding: Jia et al. 2018, "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", section 2.1. The layout is the same from Volta to Blackwell.
"""
import argparse
import glob
import json
import os
import re
import shutil
import sys
import sysconfig
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from cards import CARDS, WARP
from symbols import Mistake, run_tool, short

# ---- instructions

TO_REGISTERS = {"LDG", "LD"}                # loads from global memory
TMA = re.compile(r"UTMALDG|UBLKCP\.S")     # to shared memory


@dataclass(frozen=True)
class Instruction:
    guard: str              # "@P0"; "" if unconditional
    name: str               # with modifiers
    operands: tuple
    places: tuple           # "file:line", the innermost inlined function first
    announces: int          # scoreboard of a result; 7: none
    waits: int              # mask of scoreboards

    @property
    def base(self):
        return self.name.split(".")[0]

    @property
    def width(self):
        """Bytes per lane of a memory access."""
        bits = re.search(r"\.[US]?(8|16|64|128|256)(?=\.|$)", self.name)
        return int(bits[1]) // 8 if bits else 4

    @property
    def loaded(self):
        """Bytes that a warp loads from global memory into registers or shared memory."""
        return WARP * self.width if self.base in TO_REGISTERS or self.base == "LDGSTS" else 0


def read_listing(text):
    """Returns {symbol: ([Instruction], {label: index})} of the output of nvdisasm -c -gi -hex."""
    functions, pending = {}, None
    for line in text.splitlines():
        if section := re.match(r"//-+ \.text\.(\S+)", line):
            code, labels, places, inlined = [], {}, (), None
            functions[section[1]] = code, labels
        elif place := re.match(r'\s*//## File "(.*?)", line (\d+)( inlined at)?', line):
            places, inlined = (*(places if inlined else ()), f"{short(place[1])}:{place[2]}"), place[3]
        elif label := re.match(r"(\S+):\s*$", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+ +)?([A-Z][\w.]*) ?(.*?)\s*;", line):
            pending = (found[1] or "").strip(), found[2], tuple(o.strip() for o in found[3].split(",") if o.strip())
        elif pending and (encoding := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            control = int(encoding[1], 16) >> 41
            code.append(Instruction(*pending, places, control >> 5 & 7, control >> 11 & 63))
            pending = None
    return functions


# ---- control flow

def successors(code, labels):
    """Returns the indices of the instructions that may follow each instruction. Calls return."""
    following = []
    for index, i in enumerate(code):
        always = not i.guard and len(i.operands) <= 1 and i.name != "BRA.DIV"       # BRA P0, `(.L_1) may fall through
        ends = i.base in ("EXIT", "RET", "BRA") and always or index + 1 == len(code)
        target = labels.get(i.operands[-1][2:-1]) if i.base == "BRA" else None
        following.append([index + 1] * (not ends) + [target] * (target is not None and target < len(code)))
    return following


@dataclass
class Loop:
    head: int
    nodes: set              # with inner loops
    parent: int = None      # index in the list of loops
    depth: int = 0
    own: list = field(default_factory=list)     # nodes that are in no inner loop, in order


def find_loops(following):
    """Returns the loops, outer ones first; [0] is the whole kernel. A jump backwards makes a loop of all nodes from
    which the jump is reached without passing its target, unless these include the entry. Leaves out unreachable code:
    padding, and functions that are called."""
    before, bodies, reached, todo = defaultdict(list), {}, set(), [0]
    while todo:
        index = todo.pop()
        if index not in reached:
            reached.add(index)
            for other in following[index]:
                before[other].append(index)
                todo.append(other)
    for end in reached:
        for head in (other for other in following[end] if other <= end):
            nodes, todo = {head}, [end]
            while todo:
                node = todo.pop()
                if node not in nodes:
                    nodes.add(node)
                    todo += before[node]
            if 0 not in nodes:
                bodies.setdefault(head, set()).update(nodes)
    loops = [Loop(0, reached)] + [Loop(*body) for body in sorted(bodies.items(), key=lambda b: -len(b[1]))]
    inner = dict.fromkeys(sorted(reached), 0)
    for number, loop in enumerate(loops[1:], 1):
        loop.parent = inner[loop.head]
        loop.depth = loops[loop.parent].depth + 1
        for node in loop.nodes:
            inner[node] = number
    for node, number in inner.items():
        loops[number].own.append(node)
    return loops


# ---- waits for loads

def round_trips(own):
    """Counts the waits for loads of which none has been issued before the previous wait that counts."""
    trips, issued = 0, {}           # scoreboard: the value of trips when its last load was issued
    for i in own:
        if any(i.waits >> board & 1 and at == trips for board, at in issued.items()):
            trips += 1
        issued = {board: at for board, at in issued.items() if not i.waits >> board & 1}
        if i.base in TO_REGISTERS:
            issued[i.announces] = trips
    return trips + any(at == trips for at in issued.values())


# ---- a kernel

def counted_as(i):
    """Returns the key of an instruction in counts: the name, with the width of a memory access."""
    if re.match(r"(LD|ST)[SGL]?$|LDGSTS|ATOM|RED", i.base):
        return f"{i.base}.{8 * i.width}"
    return i.base


def lines_of(instructions):
    """Returns [file, first, last] of the lines of the innermost function that contains most of the instructions."""
    chains = [i.places[::-1] for i in instructions if i.places]
    level, inlined = 0, chains
    while inlined:
        level, chains = level + 1, inlined
        place, count = Counter(chain[level - 1] for chain in chains).most_common(1)[0]
        inlined = [chain for chain in chains if chain[level - 1] == place and len(chain) > level]
        if 10 * count < 9 * len(chains):
            break
    lines = [chain[level - 1].rsplit(":", 1) for chain in chains]
    file = Counter(name for name, _ in lines).most_common(1)[0][0] if lines else ""
    numbers = [int(line) for name, line in lines if name == file] or [0]
    return [file, min(numbers), max(numbers)]


def analyse(code, labels):
    """Returns the figures of a kernel's loops."""
    following = successors(code, labels)
    loops, figures = find_loops(following), []
    for loop in loops:
        own = [code[node] for node in loop.own]
        figures.append({
            "depth": loop.depth, "parent": loop.parent, "lines": lines_of(own), "bytes": sum(i.loaded for i in own),
            "round_trips": round_trips(own), "tma": any(TMA.match(i.name) for i in own),
            "counts": {"all": len(own), **Counter(map(counted_as, own))}})
    return figures


def main_loop(loops):
    """Returns the loop with TMA copies, else the one that loads most bytes per iteration; loops[0] if no loop loads."""
    return max(loops, key=lambda loop: (loop["depth"] > 0 and (loop["tma"], loop["bytes"])) or (False, 0))


# ---- the command

def parse_log(log):
    """Parses the output of ptxas -v. Returns {mangled symbol: {"registers", "spills" (bytes)}}."""
    found, symbol = {}, None
    for line in log.splitlines():
        if named := re.search(r"Compiling entry function '(\S+)'", line):
            symbol = named[1]
            found[symbol] = {"registers": 0, "spills": 0}
        elif symbol and (spilt := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            found[symbol]["spills"] = int(spilt[1]) + int(spilt[2])
        elif symbol and (used := re.search(r"Used (\d+) registers", line)):
            found[symbol]["registers"], symbol = int(used[1]), None
    return found


def find_nvdisasm(nvcc):
    """Returns the path of nvdisasm: next to nvcc, on PATH, or of PyPI's nvidia-cuda-nvdisasm; None without any."""
    beside = os.path.join(os.path.dirname(shutil.which(nvcc) or ""), "nvdisasm")
    of_wheels = glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/bin/nvdisasm")
    return beside if os.path.exists(beside) else shutil.which("nvdisasm") or next(iter(of_wheels), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE.cu")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--card", choices=CARDS, required=True)
    parser.add_argument("--out", required=True, metavar="FILE")
    options, flags = parser.parse_known_args()      # unknown options, such as -D and -I, go to nvcc
    found, cubin, nvdisasm = {}, options.out + ".cubin", find_nvdisasm(options.nvcc)
    for source in options.sources:
        log = run_tool([options.nvcc, "-x", "cu", "-std=c++17", "-O3", "-lineinfo", "-arch", CARDS[options.card].arch,
                        *flags, "-cubin", "-Xptxas", "-v", source, "-o", cubin], "the CUDA toolkit").stderr
        kernels = parse_log(log)
        if nvdisasm:
            listing = read_listing(run_tool([nvdisasm, "-c", "-gi", "-hex", cubin], "the CUDA toolkit").stdout)
            for symbol, figures in kernels.items():
                figures["loops"] = analyse(*listing[symbol])
        found.update(kernels)
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    print(f"{options.out}: {len(found)} kernels, {sum(k['spills'] > 0 for k in found.values())} with spills"
          + ("" if nvdisasm else "; no figures of loops: nvdisasm was not found; pip install nvidia-cuda-nvdisasm"))


if __name__ == "__main__":
    try:
        main()
    except Mistake as mistake:
        sys.exit(f"sass.py: {mistake}")

#!/usr/bin/env python3
"""Registers of each kernel, as NVIDIA's assembler counts them: nvcc -Xptxas -v. Needs no GPU; train_gpt.cu takes a
minute.

    registers.py train_gpt.cu --card h100 --define PRECISION_BF16 --out build/inspect/registers.json

Writes {mangled symbol: {"registers": 90, "spills": 0}}.
"""
import argparse
import json
import re
import subprocess
import sys

from cards import CARDS


def parse(log):
    """{mangled symbol: {"registers", "spills"}} of what ptxas prints."""
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE.cu")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--card", choices=CARDS, required=True)
    parser.add_argument("-D", "--define", action="append", default=[], metavar="NAME")
    parser.add_argument("-I", action="append", default=[], dest="folders", metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FILE")
    options = parser.parse_args()
    arch, found = CARDS[options.card].arch, {}
    flags = [f"-D{name}" for name in options.define] + [f"-I{folder}" for folder in options.folders]
    for source in options.sources:
        command = [options.nvcc, "-x", "cu", "-std=c++17", "-O3", "-arch", arch, *flags, "-cubin", "-Xptxas", "-v",
                   source, "-o", options.out + ".cubin"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit(f"registers.py: {options.nvcc} was not found; registers come from CUDA's nvcc")
        if done.returncode:
            sys.exit(f"registers.py: {' '.join(command)} failed:\n{done.stderr.strip()}")
        found.update(parse(done.stderr))
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    print(f"{options.out}: {len(found)} kernels for {arch}, {sum(1 for k in found.values() if k['spills'])} spill")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes the registers of each kernel, as ptxas reports them: {mangled symbol: {"registers": 90, "spills": 0}}.

    registers.py train_gpt.cu --card h100 -DPRECISION_BF16 --out build/inspect/registers.json
"""
import argparse
import json
import re
import subprocess
import sys

from cards import CARDS


def parse(log):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE.cu")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--card", choices=CARDS, required=True)
    parser.add_argument("--out", required=True, metavar="FILE")
    options, flags = parser.parse_known_args()      # unknown options, such as -D and -I, go to nvcc
    found = {}
    for source in options.sources:
        command = [options.nvcc, "-x", "cu", "-std=c++17", "-O3", "-arch", CARDS[options.card].arch, *flags, "-cubin",
                   "-Xptxas", "-v", source, "-o", options.out + ".cubin"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit(f"registers.py: --nvcc {options.nvcc}: not found; expected the compiler of the CUDA toolkit")
        if done.returncode:
            sys.exit(f"registers.py: {' '.join(command)} failed:\n{done.stderr.strip()}")
        found.update(parse(done.stderr))
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    print(f"{options.out}: {len(found)} kernels, {sum(k['spills'] > 0 for k in found.values())} with spills")


if __name__ == "__main__":
    main()

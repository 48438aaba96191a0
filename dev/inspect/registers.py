#!/usr/bin/env python3
"""Registers of each kernel, as NVIDIA's assembler counts them: nvcc -Xptxas -v. Takes no GPU; the trainer takes a
minute.

    registers.py train_gpt.cu --arch sm_90a --define PRECISION_BF16 --out build/inspect/registers.json

Writes {mangled symbol: {"registers": 90, "spills": 0}}; the second time from a cache in build/inspect, whose key is
the source with all that it includes, compiler and flags.
"""
import argparse
import hashlib
import json
import os
import re
import subprocess
import sys

from cards import CARDS
from symbols import Mistake

CACHE = os.path.join("build", "inspect")


def parse(log):
    """{mangled symbol: {"registers", "spills"}} of what ptxas says."""
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


def run(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise Mistake(f"{command[0]} was not found; registers come from CUDA's nvcc") from None
    if done.returncode:
        raise Mistake(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done


def registers(nvcc, source, arch, flags):
    """{mangled symbol: {"registers", "spills"}}"""
    command = [nvcc, "-x", "cu", "-std=c++17", "-O3", "-arch", arch, *flags]
    text = run([*command, "-E", source]).stdout
    version = run([nvcc, "--version"]).stdout
    key = hashlib.sha256("\0".join([version, *command, text]).encode()).hexdigest()[:16]
    cached = os.path.join(CACHE, f"registers-{key}.json")
    if os.path.exists(cached):
        with open(cached, encoding="utf-8") as file:
            return json.load(file)
    os.makedirs(CACHE, exist_ok=True)
    cubin = os.path.join(CACHE, f"registers-{key}.cubin")
    try:
        found = parse(run([*command, "-cubin", "-Xptxas", "-v", source, "-o", cubin]).stderr)
    finally:
        if os.path.exists(cubin):
            os.remove(cubin)
    with open(cached, "w", encoding="utf-8") as file:
        json.dump(found, file)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="FILE.cu")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", help="such as sm_90a")
    parser.add_argument("--card", choices=CARDS, help="instead of --arch")
    parser.add_argument("-D", "--define", action="append", default=[], metavar="NAME")
    parser.add_argument("-I", action="append", default=[], dest="folders", metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FILE")
    options = parser.parse_args()
    if bool(options.arch) == bool(options.card):
        parser.error("expected one of --arch and --card")
    arch = options.arch or CARDS[options.card].capability.arch
    try:
        flags = [f"-D{name}" for name in options.define] + [f"-I{folder}" for folder in options.folders]
        found = {}
        for source in options.sources:
            found.update(registers(options.nvcc, source, arch, flags))
    except Mistake as mistake:
        print(f"registers.py: {mistake}", file=sys.stderr)
        return 2
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    spilt = sum(1 for kernel in found.values() if kernel["spills"])
    print(f"{options.out}: {len(found)} kernels for {arch}, {spilt} spill")
    return 0


if __name__ == "__main__":
    sys.exit(main())

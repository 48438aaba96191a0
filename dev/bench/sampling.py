#!/usr/bin/env python3
"""Tokens drawn per second from GPT-2 124M on this CPU: ./train_gpt sample beside transformers' generate, in turns.

    python3 dev/bench/sampling.py --ours ./train_gpt [--ours OTHER] [--lengths 64,256,512] [--json FILE]

The weights are random and the same for all; both keep keys and values of earlier tokens. A figure is that of N tokens
after the first. The first has a column of its own: seconds, for ours with starting and reading the weights, from a file
that was read before; transformers has them read already. --python names a python3 that has torch and transformers.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from common import Failed, Mistake, executable, find_torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = 3
SETTINGS = {"temperature": 0.8, "top_k": 40}
END_OF_TEXT = 50256


class Ours:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        precision = json.loads(self.run(["plan", "--from", folder, "--json"]))["precision"]
        self.name = f"ours, {precision.upper()}"

    def run(self, arguments):
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{self.program} {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def seconds(self, tokens):
        start = time.perf_counter()
        self.run(["sample", "--from", self.folder, "--prompt-tokens", str(END_OF_TEXT), "--sample-tokens", str(tokens),
                  "--temperature", str(SETTINGS["temperature"]), "--top-k", str(SETTINGS["top_k"])])
        return time.perf_counter() - start

    def close(self):
        pass


class Transformers:
    """torch_generate.py, which stays loaded and answers a line with a line."""

    def __init__(self, python, folder, dtype):
        self.name = f"transformers, {dtype.upper()}"
        self.process = subprocess.Popen([python, os.path.join(HERE, "torch_generate.py"), folder, dtype,
                                         json.dumps({**SETTINGS, "end_of_text": END_OF_TEXT})],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True)
        self.answer()   # once it is loaded

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.name}: torch_generate.py ended with exit code {self.process.wait()}")
        return line

    def seconds(self, tokens):
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self):
        self.process.kill()
        self.process.wait()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--ours", action="append", required=True, metavar="PROGRAM")
    parser.add_argument("--python", default=sys.executable, help="one that has torch and transformers (default: this)")
    parser.add_argument("--lengths", default="64,256,512", help="tokens after the first (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="all figures")
    options = parser.parse_args()
    for program in options.ours:
        if not executable(program):
            parser.error(f"--ours {program}: not a program")
    try:
        options.lengths = [int(length) for length in options.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths takes numbers such as 64,256, found '{options.lengths}'")
    if min(options.lengths) < 1 or max(options.lengths) > 1000:
        parser.error(f"--lengths takes numbers from 1 to 1000, found {min(options.lengths)} to {max(options.lengths)}")
    return options


def main():
    options = parse_arguments()
    python, version = find_torch([options.python])
    if python is None:
        raise Mistake(f"--python {options.python}: has no torch; pip install torch transformers, or name one that has it")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, os.path.join(HERE, "torch_generate.py"), folder, "write"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        contestants = [Ours(os.path.abspath(program), folder) for program in options.ours]
        contestants += [Transformers(python, folder, dtype) for dtype in ("fp32", "bf16")]
        first = {c.name: [] for c in contestants}
        rates = {c.name: {n: [] for n in options.lengths} for c in contestants}
        for _ in range(ROUNDS):
            for contestant in contestants:
                contestant.seconds(1)       # after the others its file and code are no longer at hand
                start = contestant.seconds(1)
                first[contestant.name].append(start)
                for n in options.lengths:
                    rates[contestant.name][n].append(n / (contestant.seconds(n + 1) - start))
        for contestant in contestants:
            contestant.close()
    print(f"GPT-2 124M, tokens per second, the median of {ROUNDS}; PyTorch {version}, {os.cpu_count()} cores")
    print(f"{'':24}{'first token, s':>16}" + "".join(f"{n:>10}" for n in options.lengths))
    for name in rates:
        print(f"{name:24}{statistics.median(first[name]):>16.2f}" +
              "".join(f"{statistics.median(rates[name][n]):>10.1f}" for n in options.lengths))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": version, "first": first, "rates": rates}, file, indent=2)


if __name__ == "__main__":
    try:
        main()
    except Mistake as problem:
        print(f"sampling.py: {problem}", file=sys.stderr)
        sys.exit(2)
    except Failed as problem:
        print(f"sampling.py: {problem}", file=sys.stderr)
        sys.exit(1)

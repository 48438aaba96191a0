#!/usr/bin/env python3
"""Runs a program that was built to be inspected, and says what its kernels do to memory. `make inspect` calls it.

    run.py build/inspect/train_gpt --step                 a training step of the trainer, a few blocks of each kernel
    run.py build/inspect/mine --source mine.cu            a program of one's own, as it is
    run.py ... --kernel NAME                              kernels with that in their name, line by line
    run.py ... --barriers                                 forgets each barrier in turn, to see which are needed

The program's arguments follow behind --. How it is built: Makefile, inspect.
"""
import argparse
import array
import json
import os
import random
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from cards import CARDS
from results import read_json
from symbols import Mistake, bare_name, demangled
import barriers
import report

HERE = os.path.dirname(os.path.abspath(__file__))

# ---- a step of the trainer

SHARD_HEADER = [20240520, 1]            # train_gpt.cu, token data: magic, version; then the number of tokens
HEADER_INTS = 256
NOT_OF_A_STEP = "init_normal fill round_weights compiled_for_sm_90a"
OF_PLAN = ["--model", "--layers", "--heads", "--channels", "--context", "--vocab", "--micro-batch", "--seq-len",
           "--total-batch", "--recompute", "--grad-dtype", "--attention", "--matmul"]   # options that decide about sizes
STEP = {"--model": "gpt2", "--micro-batch": "64", "--total-batch": "524288"}
# Enough to see what barriers are for: attention's blocks do two pieces of work or three, one after another.
SMALL_STEP = {"--model": "gpt2", "--layers": "1", "--micro-batch": "4", "--total-batch": "4096"}


def write_tokens(path, tokens, vocab):
    """Tokens as frequent as words are, by Zipf's law: how often one comes decides what embeddings' kernels do."""
    header = array.array("i", SHARD_HEADER + [tokens] + [0] * (HEADER_INTS - 3))
    weights = [1 / (rank + 1) for rank in range(vocab)]
    drawn = array.array("H", random.Random(1).choices(range(vocab), weights, k=tokens))
    with open(path, "wb") as file:
        file.write(header.tobytes() + drawn.tobytes())


def has_history(options):
    """Whether the second step is another one than the first, which has no scales yet: then that is the step."""
    return options.get("--matmul", "plain") != "plain"


def step_arguments(given, folder, program, step):
    """The trainer's command line for one step, and what the report wants to know of it."""
    options = {**step, **dict(zip(given[::2], given[1::2]))}
    flags = [word for pair in options.items() for word in pair]
    of_plan = [word for pair in options.items() if pair[0] in OF_PLAN for word in pair]
    said = subprocess.run([os.path.abspath(program), "plan", "--json", *of_plan], capture_output=True, text=True)
    if said.returncode != 0:
        raise Mistake(said.stderr.strip())
    plan = json.loads(said.stdout)
    model, rows = plan["model"], plan["micro_batch"] * plan["seq_len"]
    data = os.path.join(folder, "tokens.bin")
    write_tokens(data, rows * plan["accumulation"] + 1, model["vocab"])
    shape = {"B": plan["micro_batch"], "T": plan["seq_len"], "C": model["channels"], "V": model["vocab"],
             "L": model["layers"], "NH": model["heads"]}
    train = ["train", *flags, "--data", data, "--steps", "2" if has_history(options) else "1", "--eval-every", "0", "--matmul-tuning", "off",
             "--val-fraction", "0"]
    return train, shape, rows * plan["accumulation"], {"INSPECT_FROM": "set_adamw"} if has_history(options) else {}


# ---- running

def environment(options, recording, **more):
    """What the recorder reads. One worker: blocks and threads take turns in their natural order."""
    settings = {"OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": options.card, "INSPECT_OUT": recording,
                "INSPECT_MODE": "sample" if options.step else "whole", "INSPECT_KERNEL": options.kernel or "",
                "INSPECT_EXCEPT": NOT_OF_A_STEP if options.step else "", "INSPECT_SECONDS": str(options.seconds),
                "INSPECT_PROGRESS": "yes", "INSPECT_REGISTERS": options.registers or "", **more}
    return {**os.environ, **settings}


def run_program(command, settings, log, show_progress=True):
    """Its exit code. Its own words go to our output, or into a log; the recorder's, on stderr, are the progress."""
    start = time.time()
    output = open(log, "w", encoding="utf-8") if log else None
    process = subprocess.Popen(command, env=settings, stdout=output, stderr=subprocess.PIPE, text=True,
                               errors="replace")
    for line in process.stderr:
        if not line.startswith("inspect: "):
            (output or sys.stderr).write(line)
        elif show_progress:
            name = line[9:].strip()
            name = bare_name(demangled([name])[name]) if name.startswith("_Z") else name
            text = f"{time.time() - start:4.0f} s  looks at {name}"
            print(f"\r{text:<70}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n",
                  file=sys.stderr, flush=True)
    code = process.wait()
    if show_progress and sys.stderr.isatty():
        print("\r" + " " * 70, end="\r", file=sys.stderr)
    if output:
        output.close()
    return code


def complete(recording, program, sources, code, command):
    """Puts to the recording what the program itself could not know."""
    if not os.path.exists(recording):
        raise Mistake(f"{' '.join(command)} ended with exit code {code} and has launched no kernel")
    raw = read_json(recording, "recording")
    raw.update(program=program, sources=sources)
    if raw["ended"] == "at its end":
        raw["ended"] = f"exit code {code}"
    with open(recording, "w", encoding="utf-8") as file:
        json.dump(raw, file)
    return raw


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="built to be inspected")
    parser.add_argument("--step", action="store_true", help="the program is train_gpt: one step of it; only a few "
                        "blocks of each kernel are run. The arguments are options of train_gpt")
    parser.add_argument("--sources", nargs="*", default=[], metavar="BUILT=FILE",
                        help="files as compiled, and the user's")
    parser.add_argument("--card", default="h100", choices=CARDS)
    parser.add_argument("--kernel", metavar="NAME", help="only those with this in their name or range, line by line")
    parser.add_argument("--json", metavar="FILE", help="the figures for other programs")
    parser.add_argument("--html", metavar="FILE", help="the page to write")
    parser.add_argument("--registers", metavar="FILE", help="of registers.py")
    parser.add_argument("--check", action="store_true",
                        help="exit code 1 where something is worse than allowances.json")
    parser.add_argument("--barriers", action="store_true", help="forgets each barrier in turn")
    parser.add_argument("--seconds", type=int, default=0, help="then the program is ended; 0: it ends by itself")
    words = sys.argv[1:]
    mine = words[:words.index("--")] if "--" in words else words
    options = parser.parse_args(mine)
    options.arguments = words[len(mine) + 1:]
    return options


def inspect(options):
    folder = os.path.dirname(os.path.abspath(options.program))
    recording = f"{options.program}.json"
    program = os.path.relpath(options.program)
    arguments, wanted, begins = options.arguments, [], {}
    if options.step:
        arguments, shape, tokens, begins = step_arguments(options.arguments, folder, program,
                                                          SMALL_STEP if options.barriers else STEP)
        wanted = ["--shape", json.dumps(shape)]
        if not options.kernel:
            wanted += ["--tokens", str(tokens)]
    command = [os.path.abspath(program), *arguments]
    if os.path.exists(recording):
        os.remove(recording)
    log = f"{options.program}.log" if options.step else None
    code = run_program(command, environment(options, recording, **begins), log)
    sources = dict(pair.split("=", 1) for pair in options.sources)
    raw = complete(recording, program, sources, code, command)
    if options.step and code != 0:
        with open(log, encoding="utf-8") as file:
            print(file.read()[-2000:], file=sys.stderr)
    if options.barriers:
        def run_again(name, settings):
            again = f"{options.program}.{name}.json"
            if os.path.exists(again):
                os.remove(again)
            code = run_program(command, environment(options, again, **begins, **settings), f"{again}.log",
                               show_progress=False)
            if not os.path.exists(again):
                return {"kernels": [], "ended": f"exit code {code}"}
            return read_json(again, "recording")
        return barriers.report(raw, run_again)
    for name in ("kernel", "json", "html", "registers"):
        if getattr(options, name):
            wanted += [f"--{name}", getattr(options, name)]
    if options.check:
        wanted.append("--check")
    status = report.main([recording, "--card", options.card, *wanted])
    return status if code == 0 or raw["ended"].startswith("after") else status or 1


def main():
    options = parse_options()
    try:
        return inspect(options)
    except Mistake as mistake:
        print(f"inspect: {mistake}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

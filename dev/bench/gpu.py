#!/usr/bin/env python3
"""Training on this GPU, measured: ./train_gpt, PyTorch and llm.c side by side, what the machine could do
at best, and where the rest goes. One Markdown report, and all numbers as JSON, within a few minutes.

    make bench-gpu
    python3 dev/bench/gpu.py --ours ./train_gpt --minutes 8 --out runs/bench-gpu [--llmc FOLDER]

It works through parts, the most important first, until the time is up; the report is written anew after
each of them and names what was not run. --device cpu goes through all of them with tiny models: a dry run.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from common import Failed, Mistake, executable, find_torch
from gpu_measure import SIZES, Bench, Budget, NotThere, Watch, ask_smi
from gpu_plots import draw_plots
from gpu_report import write_report

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
KINDS = ["ours", "ceilings", "torch", "llmc", "recompute", "curve", "attention", "kernels"]


def parts_of(bench, kinds):
    """(kind, title, function), the most important first."""
    models, size = bench.size.models, bench.size
    first, others = models[:2], models[2:]
    parts = [("ours", f"ours, {m.name}", lambda m=m: bench.ours(m)) for m in models]
    parts.append(("ceilings", "ceilings: copy, matmuls, attention", bench.ceilings))
    parts += [("torch", f"PyTorch, {m.name}", lambda m=m: bench.pytorch(m)) for m in first]
    parts += [("llmc", f"llm.c, {m.name}", lambda m=m: bench.llmc(m)) for m in first]
    parts += [("recompute", f"recomputation, {m.name}", lambda m=m: bench.recompute(m)) for m in models
              if m.name in size.recompute]
    parts += [("curve", "losses over 200 steps", bench.curve), ("attention", "attention alone", bench.attention)]
    parts += [("torch", f"PyTorch, {m.name}", lambda m=m: bench.pytorch(m)) for m in others]
    parts += [("llmc", f"llm.c, {m.name}", lambda m=m: bench.llmc(m)) for m in others]
    parts.append(("kernels", "the kernels of dev/kernels", bench.kernels))
    return [part for part in parts if part[0] in kinds]


def commit():
    """Of the source: the commit, and whether files differ from it."""
    def git(*arguments):
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None
    try:
        head = git("rev-parse", "--short", "HEAD")
        return head and head + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:
        return None


def first_line(command, contains):
    try:
        output = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return None
    return next((line.strip() for line in output.splitlines() if contains in line), None)


def about(options):
    smi = ask_smi() if options.device == "gpu" else {}
    found = {
        "device_option": options.device, "date": time.strftime("%Y-%m-%d %H:%M"), "commit": options.commit or commit(),
        "minutes": options.minutes, "command": " ".join(["python3", "dev/bench/gpu.py", *sys.argv[1:]]), "smi": smi,
        "nvcc": first_line(["nvcc", "--version"], "release"), "pytorch": options.torch_version}
    if smi.get("memory_mib", "").isdigit():
        found["memory_bytes"] = int(smi["memory_mib"]) * 2**20
    return found


def save(results, folder, last=False):
    """JSON and report, each whole at any moment; with plots at the end."""
    path = os.path.join(folder, "results.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    os.replace(path + ".new", path)
    return report(folder, last)


def report(folder, plots):
    """From results.json, also when they were just measured: a redrawn report is the same report."""
    with open(os.path.join(folder, "results.json"), encoding="utf-8") as file:
        results = json.load(file)
    return write_report(results, folder, draw_plots(results, folder) if plots else ())


def run_parts(bench, parts, folder):
    """All parts that fit; True if none failed. Ctrl-C and SIGTERM end the part, not the report."""
    results = bench.results
    results["parts"] = [{"kind": kind, "title": title, "status": "not run", "why": "not begun", "seconds": 0}
                        for kind, title, _ in parts]
    save(results, folder)
    watch, interrupted = Watch(bench.on_gpu), False
    try:
        for entry, (kind, title, function) in zip(results["parts"], parts):
            begin, mark = time.monotonic(), watch.mark()
            needs = bench.size.limits[kind][0]
            if interrupted:
                entry["why"] = "interrupted"
                continue
            if bench.budget.left() < needs:
                entry["why"] = (f"{max(0, bench.budget.left()):.0f} s were left of {bench.options.minutes:g} minutes, "
                                f"it begins with {needs} or more")
                continue
            print(f"bench-gpu: {bench.budget.spent():4.0f} s  {title}", file=sys.stderr, flush=True)
            try:
                function()
                entry.update(status="done", why="")
            except NotThere as reason:
                entry.update(status="not run", why=str(reason))
            except KeyboardInterrupt:
                entry.update(status="not run", why="interrupted")
                interrupted = True
            except Exception as failure:    # whatever it is, the other parts' figures must not be lost
                text = str(failure) or type(failure).__name__
                known = isinstance(failure, (Failed, OSError))
                entry.update(status="failed", why=text if known else f"{type(failure).__name__}: {text}")
                print(f"bench-gpu: {title}: {entry['why']}", file=sys.stderr, flush=True)
            entry.update(seconds=time.monotonic() - begin, gpu=watch.since(mark))
            results["about"]["seconds"] = bench.budget.spent()
            save(results, folder)
    finally:
        watch.stop()
        save(results, folder, last=True)
    return not interrupted and all(entry["status"] != "failed" for entry in results["parts"])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--ours", default="./train_gpt", metavar="PROGRAM", help="the trainer (default: %(default)s)")
    parser.add_argument("--out", default="runs/bench-gpu", metavar="FOLDER",
                        help="gets report.md, results.json and plots (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=8, help="time for all parts together (default: %(default)s)")
    parser.add_argument("--models", metavar="NAMES", help="of gpt2, gpt2-medium, gpt2-large, gpt2-xl; default: all")
    parser.add_argument("--parts", metavar="NAMES", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--micro-batch", type=int, metavar="B",
                        help="for all models; default: the largest that fits, 64 at most")
    parser.add_argument("--data", default=os.path.join(ROOT, "data", "shakespeare.txt"), metavar="PATTERN",
                        help="text or .bin shards for the losses")
    parser.add_argument("--llmc", default=os.environ.get("LLMC"), metavar="FOLDER",
                        help="holds llm.c's program train_gpt2cu (default: $LLMC)")
    parser.add_argument("--python", metavar="PROGRAM", help="the python that has PyTorch (default: this one)")
    parser.add_argument("--compile", choices=["auto", "whole", "blocks", "no"], default="auto",
                        help="what PyTorch compiles; auto: the whole model up to 12 layers, else its blocks")
    parser.add_argument("--kernels", default="", metavar="NAMES",
                        help="build and run these of dev/kernels; default: run those that are built")
    parser.add_argument("--kernels-folder", default=os.path.join(ROOT, "build", "kernels"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", metavar="TEXT", help="what the report calls the source, where there is no git")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: a dry run with tiny models")
    parser.add_argument("--redraw", action="store_true",
                        help="measure nothing: write the report anew from results.json")
    return parser.parse_args()


def named(flag, text, known):
    names = [name for name in (text or "").split(",") if name]
    for name in names:
        if name not in known:
            raise Mistake(f"{flag}: found {name}, expected some of {', '.join(known)}")
    return names or known


def check(options, size):
    """Names and paths, before anything takes time."""
    if not 0 < options.minutes <= 24 * 60:
        raise Mistake(f"--minutes: found {options.minutes:g}, expected more than 0")
    options.model_names = named("--models", options.models, [model.name for model in size.models])
    options.part_names = named("--parts", options.parts, KINDS)
    options.kernels = [name for name in options.kernels.split(",") if name]
    if not executable(options.ours):
        raise Mistake(f"--ours {options.ours}: expected a program; run make")
    options.ours = os.path.abspath(options.ours)
    if options.llmc and not os.path.isdir(options.llmc):
        raise Mistake(f"--llmc {options.llmc}: expected a folder")


def require_device(bench):
    """The program must be a build for the device, and the device be there. Only a plan for a GPU sets bytes
    aside for CUDA."""
    try:
        plan = bench.plan(micro_batch=1)
        found = "gpu" if plan["bytes"].get("cuda", 0) > 0 else "cpu"
    except Failed as failure:
        if bench.on_gpu:
            raise Mistake(f"no GPU was found ({failure}); --device cpu is a dry run") from None
        found = "gpu"
    if found != bench.options.device:
        raise Mistake("no GPU: this is a CPU build of train_gpt; --device cpu is a dry run" if bench.on_gpu else
                      "--device cpu: found a GPU build of train_gpt, expected one of make DEVICE=cpu")


def main():
    options = parse_arguments()
    size = SIZES[options.device]
    path = os.path.join(options.out, "results.json")
    if options.redraw:
        try:
            print(report(options.out, plots=True))
        except (OSError, ValueError) as error:
            raise Mistake(f"--redraw: {path}: {getattr(error, 'strerror', None) or error}; "
                          "expected what an earlier run measured") from None
        return 0
    check(options, size)
    budget = Budget(options.minutes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpt_bench_") as folder:
        bench = Bench(options, folder, size, budget)
        require_device(bench)
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            raise Mistake(f"--out {options.out}: {error.strerror}; expected a folder that can be written") from None
        size.models = [model for model in size.models if model.name in options.model_names]
        options.pythons = [options.python or sys.executable]
        options.python, options.torch_version = find_torch(options.pythons)
        bench.results["about"] = about(options)
        bench.results["size"] = {"total_batch": size.total_batch, "models": [model.name for model in size.models]}
        bench.write_tokens()
        well = run_parts(bench, parts_of(bench, options.part_names), options.out)
    print(os.path.join(options.out, "report.md"))
    return 0 if well else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Mistake as mistake:
        print(f"bench-gpu: {mistake}", file=sys.stderr)
        sys.exit(2)
    except (Failed, KeyboardInterrupt) as error:
        print(f"bench-gpu: {error or 'interrupted'}", file=sys.stderr)
        sys.exit(1)

#!/usr/bin/env python3
"""Judges a puzzle by what a GPU would do: values, races, bounds, memory accesses, barriers. `make puzzle` calls it.

    judge.py [NUMBER] [--watch] [--hint] [--solution] [--next] [--list]
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "inspect"), str(HERE.parent)]
from results import HAZARDS, Results
from run import barriers_of, fault_of
from symbols import Mistake
from tables import number, plural, text_table, times

BUILD = ROOT / "build/puzzles"
MINE = HERE / "mine"        # the user's copies of the puzzles and the progress: git ignores them, make clean keeps them
PROGRESS = MINE / "progress.json"
BEGIN, END = "// ---- your code", "// ---- end"
SEEDS = (1, 2, 3)           # orders of the threads, besides the natural one
SECONDS = 10                # a run that needs more of a core's time is an endless loop
LINES, WIDTH = 12, 110      # of a verdict


# ---- puzzles

class Puzzle:
    """A puzzle. path: its file as delivered; copy: the user's, which is judged."""

    def __init__(self, path):
        self.path, self.copy, self.name = path, MINE / path.name, path.stem
        self.number = int(path.stem[:2])
        self.title = path.stem[3:].replace("_", " ")
        self.folder = BUILD / self.name

    def source(self):
        return self.path.read_text(encoding="utf-8")

    def make_copy(self):
        if not self.copy.exists():
            MINE.mkdir(exist_ok=True)
            self.copy.write_text(self.source(), encoding="utf-8")

    def statement(self):
        """Returns the comment at the top of the file."""
        lines = self.source().splitlines()
        return [line[3:] for line in lines[:next(i for i, line in enumerate(lines) if not line.startswith("//"))]]

    def notes(self):
        """Returns {heading: text} of the file with the solution."""
        text = (HERE / "solutions" / f"{self.name}.txt").read_text(encoding="utf-8")
        parts = re.split(r"^== (.*)\n", text, flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2]))

    def with_code(self, code):
        """Returns the source with other code between the lines BEGIN and END."""
        before, rest = self.source().split(BEGIN, 1)
        first, rest = rest.split("\n", 1)
        last_line = ("\n" + rest).rindex("\n", 0, rest.rindex(END) + 1)    # that of END
        return f"{before}{BEGIN}{first}\n{code}{rest[last_line:]}"


def all_puzzles():
    return [Puzzle(path) for path in sorted(HERE.glob("[0-9][0-9]_*.cu"))]


def read_progress():
    return json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}


def is_solved(puzzle, progress):
    return puzzle.name in progress


# ---- building and running

@dataclass
class Problem:
    """The first problem of a puzzle. kind selects the hint; line is 0 if no line is to blame."""
    kind: str
    line: int
    text: str


@dataclass
class Rank:
    """A process of a run: its result, the recording of dev/inspect or None, and its exit code (None: too slow)."""
    name: str           # "" if there is only one
    result: dict
    raw: dict
    code: int


@dataclass
class Run:
    ranks: list
    output: str

    def cases(self):
        """Yields (rank, case)."""
        return ((rank, case) for rank in self.ranks for case in rank.result["cases"])


def place_of(hazard):
    return hazard["accesses"][0]["file"], hazard["accesses"][0]["line"]


def read(path):
    """Returns the object in a JSON file; {} if the file does not exist."""
    return json.loads(Path(path).read_text()) if os.path.exists(path) else {}


def read_recording(path, code):
    """Returns a recording; {} if there is none. code: the program's exit code."""
    raw = read(path)
    if raw.get("ended") == "at its end":
        raw["ended"] = f"exit code {code}"
    return raw


def counted(results):
    """Returns the kernels that a solution launched, of the Results of a rank or None."""
    return [kernel for kernel in (results.kernels if results else []) if kernel.range == "counted"]


class Judge:
    """Judges the user's copy of a puzzle, or another text."""

    def __init__(self, puzzle, folder=None, text=None):
        self.puzzle, self.folder, self.text = puzzle, folder or puzzle.folder, text
        self.folder.mkdir(parents=True, exist_ok=True)
        self.program = self.folder / "program"

    def build(self):
        """Returns a Problem if the file does not compile."""
        source = self.puzzle.copy
        if self.text is not None:
            source = self.folder / self.puzzle.path.name
            source.write_text(self.text, encoding="utf-8")
        self.source = os.path.relpath(source, ROOT)
        rewritten = subprocess.run([sys.executable, "dev/cpu/rewrite.py", self.source, "-o", f"{self.program}.cpp",
                                    "-Idev/puzzles"], cwd=ROOT, capture_output=True, text=True)
        compile_words = os.environ["PUZZLE_COMPILE"].split()
        compiled = rewritten if rewritten.returncode else subprocess.run(
            [*compile_words, "-c", f"{self.program}.cpp", "-o", f"{self.program}.o"],
            cwd=ROOT, capture_output=True, text=True)
        if compiled.returncode == 0:
            objects = [f"{self.program}.o", str(BUILD / f"cases/{self.puzzle.name}.o"), str(BUILD / "judge.o")]
            words = os.environ["PUZZLE_LINK"].replace("OBJECTS", " ".join(objects)).replace(
                "PROGRAM", str(self.program)).split()
            compiled = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if compiled.returncode == 0:
            return None
        error = next((line for line in compiled.stderr.splitlines() if "error" in line or "undefined" in line),
                     compiled.stderr.strip().split("\n")[0])
        place = re.search(re.escape(Path(self.source).name) + r":(\d+)", error)
        return Problem("compile", int(place[1]) if place else 0, re.sub(r"^\S+:\d+(:\d+)?: ", "", error))

    def run(self, name, **settings):
        """Runs the program with these environment variables."""
        result, recording = self.folder / f"{name}.result", self.folder / f"{name}.json"
        for path in self.folder.glob(f"{name}.*"):
            path.unlink()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": "h100",
                       "CUDA_CPU_DEVICES": "8", "PUZZLE_OUT": str(result), "INSPECT_OUT": str(recording), **settings}
        try:
            limited = ["sh", "-c", f'ulimit -t {SECONDS}; exec "$0"', str(self.program)]
            done = subprocess.run(limited, env=environment, capture_output=True, text=True, errors="replace",
                                  timeout=10 * SECONDS, cwd=ROOT)
            output, code = done.stdout + done.stderr, done.returncode
            if code in (-signal.SIGXCPU, -signal.SIGKILL):
                code = None
        except subprocess.TimeoutExpired:
            output, code = "", None
        ends = read(result).get("ends")
        if not ends:
            return Run([Rank("", read(result), read_recording(recording, code), code)], output)
        return Run([Rank(f"Rank {number}: ", read(f"{result}.{number}"),
                         read_recording(f"{recording}.{number}", end), end)
                    for number, end in enumerate(ends)], output)

    # ---- problems, in the order in which they are reported

    def judge(self):
        """Returns the first Problem or None, and the figures {name: (found, limit)} of a solved puzzle."""
        problem = self.build()
        if problem:
            return problem, {}
        with ThreadPoolExecutor(2) as pool:
            recorded = pool.submit(self.run, "recorded")
            orders = [pool.submit(self.run, f"seed-{seed}", CUDA_CPU_SEED=str(seed), PUZZLE_RECORD="no")
                      for seed in SEEDS]
            self.recorded = recorded.result()
            self.results = [Results(rank.raw, root=str(ROOT)) if rank.raw else None for rank in self.recorded.ranks]
            problem = (self.hazard() or self.wrong_end(self.recorded) or self.wrong_values(self.recorded)
                       or self.host_work())
            if problem:
                for order in orders:
                    order.cancel()
                return problem, {}
            orders = [order.result() for order in orders]
        for seed, order in zip(SEEDS, orders):
            problem = problem or self.wrong_end(order) or self.wrong_values(
                order, f"With the threads in another order (CUDA_CPU_SEED={seed}): ")
        problem = problem or self.different_bits([self.recorded, *orders])
        if problem:
            return problem, {}
        self.limits = self.recorded.ranks[0].result["limits"]
        figures = self.figures()
        for name, (found, limit) in figures.items():
            if found > limit * (1 + 1e-9):
                return self.excess(name, found, limit), figures
            if name in ("S", "T", "requests") and found < 1 / limit:
                return Problem(name, 0, f"{times(found)} times the necessary {NAMES[name]}: the recorded launches do "
                               f"not do all of the work. At least {times(1 / limit)}."), figures
        return (self.unnecessary_barrier() if self.limits["B"] else None), figures

    def line_of(self, place_file, line):
        return line if os.path.basename(place_file) == self.puzzle.path.name else 0

    def hazard(self):
        """Returns the first access out of bounds, race or uninitialised read, in this order."""
        found = [(kind, rank, kernel, hazard) for kind in HAZARDS.values()
                 for rank, results in zip(self.recorded.ranks, self.results) if results
                 for kernel in sorted(results.kernels, key=lambda kernel: kernel.blocks)
                 for hazard in kernel.hazards if hazard["kind"] == kind]
        if not found:
            return None
        # the first one, if possible one that is attributed to a line of the puzzle
        kind, rank, kernel, hazard = next(
            (each for each in found if each[0] == found[0][0] and self.line_of(*place_of(each[3]))), found[0])
        access = hazard["accesses"][0]
        size = kernel.range if kernel.range != "counted" else rank.result["cases"][-1]["size"]
        who = f"{rank.name}Size {size}: thread {access['thread']} of block {access['block']}"
        line = self.line_of(access["file"], access["line"])
        array = array_of(hazard, kernel, rank) + ("" if line else f" at {access['file']}:{access['line']}")
        if kind == "divergent barrier":
            others = "".join(f", and thread {other['thread']} at {other['file']}:{other['line']}"
                             for other in hazard["accesses"][1:])
            return Problem("deadlock", line, f"{who} waits{others}: {hazard['why']}.")
        if kind == "access out of bounds":
            if hazard["why"]:
                kind = next((kind for kind in ("host", "misaligned") if kind in hazard["why"]), "bounds")
                return Problem(kind, line, f"{who} uses {hazard['why']}.")
            return Problem("bounds", line, f"{who} {access['access']}s {array}, which is out of bounds.")
        if kind == "uninitialised read":
            return Problem("uninitialised", line, f"{who} loads {array}, which no thread has stored.")
        other = hazard["accesses"][1]
        why, where = hazard["why"], f"{other['file']}:{other['line']}"
        if self.line_of(other["file"], other["line"]):
            where = f"line {other['line']}"
        if "cp.async" in (access["by"], other["by"]):
            why = "the copy runs at any time until cp_async_wait, and other threads see it only after a barrier"
        by = ["" if each["by"] == "thread" else f" by {each['by']}" for each in (access, other)]
        return Problem("race", line, f"{who} {access['access']}s {array}{by[0]}, and thread {other['thread']} of block "
                       f"{other['block']} {other['access']}s it{by[1]} at {where}: {why}.")

    def wrong_end(self, run):
        """Returns a Problem if the program did not run to its end."""
        rank = next((rank for rank in run.ranks if not rank.result.get("finished")), None)
        if not rank:
            return None
        if rank.raw.get("ended_at"):
            place = Results(rank.raw, root=str(ROOT)).ended_at
            return Problem("host", self.line_of(place.file, place.line) if place else 0,
                           f"{rank.name}The {rank.raw['ended']}.")
        error = rank.result.get("cuda_error")
        if error:
            return Problem("launch", 0, f"{rank.name}CUDA reports an error of {error['call']}: {error['text']}.")
        if "nccl_error" in rank.result:
            text = rank.result["nccl_error"]
            return Problem("deadlock" if "deadlock: " in text else "nccl", 0, f"{rank.name}{text}.")
        if rank.code == -signal.SIGALRM:
            return Problem("deadlock", 0, "The ranks wait for each other.")
        if rank.code is None:
            return Problem("endless", 0, f"The kernel was still running after {SECONDS} s of CPU time.")
        if rank.code < 0:
            return Problem("crash", 0, f"{rank.name}The program crashed: it used an address far from any array.")
        text = [line for line in run.output.splitlines() if line.strip()]
        start = next((i + 1 for i, line in enumerate(text) if "deadlock" in line), 0)
        place = re.search(re.escape(self.puzzle.path.name) + r":(\d+)", run.output)
        return Problem("deadlock" if "deadlock" in run.output else "stopped", int(place[1]) if place else 0,
                       "A block cannot continue: " * (start > 0) +
                       "; ".join(line.strip() for line in text[start:start + 4]))

    def wrong_values(self, run, order=""):
        for rank, case in run.cases():
            size = f"{order}{rank.name}Size {case['size']}: "
            if case["kept"]:
                return Problem("kept", 0, f"{size}{case['kept']} bytes of device memory are allocated and not freed.")
            for array in case["arrays"]:
                name, wrong, n = array["name"], array["wrong"], array["n"]
                if not wrong:
                    continue
                difference = f"{name}[{array['index']}] is {array['found']}, expected {array['expected']}"
                if array["is_input"]:
                    return Problem("input", 0, f"{size}the kernel changed its input: {difference}.")
                if array["unwritten"] and array["is_updated"]:
                    return Problem("unwritten", 0, f"{size}{array['unwritten']} of {n} elements of {name} still have "
                                   f"their first value. {difference}.")
                if array["unwritten"] == n:
                    return Problem("unwritten", 0, f"{size}nothing was written to {name}.")
                if array["unwritten"]:
                    return Problem("unwritten", 0, f"{size}{array['unwritten']} of {n} elements of {name} were not "
                                   f"written. The first wrong one: {difference}.")
                kind = "NaN" if array["found"] == "nan" else "values"
                return Problem(kind, 0, f"{size}{difference} ({wrong} of {n} elements are wrong).")
        return None

    def host_work(self):
        """Returns a Problem if the host computes the results instead of a kernel."""
        for rank, case in self.recorded.cases():
            if case["copies"]:
                return Problem("host", 0, f"{rank.name}Size {case['size']}: the solution copies between host and "
                               f"device {plural(case['copies'], 'time')}.")
        if not any(map(counted, self.results)):
            return Problem("host", 0, "No kernel was launched.")
        return None

    def different_bits(self, runs):
        if not runs[0].ranks[0].result["limits"]["D"]:
            return None
        for what, ranks in (("on another rank", runs[0].ranks),
                            ("when the threads run in another order", [run.ranks[0] for run in runs])):
            for cases in zip(*(rank.result["cases"] for rank in ranks)):
                if len({case["digest"] for case in cases}) > 1:
                    return Problem("D", 0, f"Size {cases[0]['size']}: the results have other bits {what}.")
        return None

    # ---- counts, at the last size

    def figures(self):
        """Returns {name: (found, limit)} of what the puzzle judges."""
        case, kernels = self.recorded.ranks[0].result["cases"][-1], counted(self.results[0])
        total = lambda key: sum(kernel.launches * getattr(kernel.sums, key) for kernel in kernels)
        requests = sum(kernel.launches * site["requests"] for kernel in kernels for line in kernel.lines
                       for site in line.sites if site["space"] == "global")
        found = {"S": total("sectors") / max(1, total("least_sectors")),
                 "W": total("wavefronts") / max(1, total("least_wavefronts")),
                 "T": 32 * total("sectors") / (case["minimum_bytes"] or 1),
                 "requests": requests / (case["minimum_requests"] or 1),
                 "products": sum(k.launches * k.raw["tensor_flops"] for k in kernels) / (case["minimum_flops"] or 1),
                 "shared": max((kernel.shared for kernel in kernels), default=0),
                 "time": sum(kernel.launches * kernel.us for kernel in kernels),
                 "sent": max(case["sent"] / (case["minimum_sent"] or 1) for _, case in self.recorded.cases())}
        return {name: (found[name], self.limits[name]) for name in found if self.limits[name]}

    def excess(self, name, found, limit):
        """Returns a Problem that names the line with the largest excess."""
        lines = [(kernel, line) for kernel in counted(self.results[0]) for line in kernel.lines]
        rank = {"S": lambda s: s.sectors - s.least_sectors, "W": lambda s: s.wavefronts - s.least_wavefronts,
                "T": lambda s: s.sectors, "requests": lambda s: s.requests}.get(name)
        texts = {"S": "{0} times the minimum of sectors. Most of them at this line: {1} sectors, {2} would do.",
                 "W": "{0} times the minimum of wavefronts. Most of them at this line: {3} wavefronts, {4} would do.",
                 "T": "{0} times the necessary bytes of global memory. This line accesses most: {5} bytes.",
                 "requests": "{0} times the necessary memory instructions. This line has most: {6}.",
                 "products": "{0} times the necessary products.", "shared": "{7} bytes of shared memory per block.",
                 "sent": "A rank sends {0} times the necessary bytes.",
                 "time": "An estimated {8} µs on an H100: most of its multiprocessors have nothing to do."}
        if not lines or not rank:
            shown = texts[name].format(times(found), *[""] * 6, int(found), number(found))
            return Problem(name, 0, f"{shown} Limit: {limit:g}.")
        line = max(lines, key=lambda entry: entry[0].launches * rank(entry[1].sums))[1]
        sums = line.sums
        shown = texts[name].format(times(found), sums.sectors, sums.least_sectors, sums.wavefronts,
                                   sums.least_wavefronts, 32 * sums.sectors, sums.requests)
        return Problem(name, self.line_of(line.place.file, line.place.line), f"{shown} Limit: {times(limit)}.")

    def unnecessary_barrier(self):
        """Removes each barrier in turn. A barrier is needed if that causes a fault at any size."""
        def is_needed(entry):
            at, (_, _, addresses, _) = entry
            run = self.run(f"without-{at}", INSPECT_REMOVE=" ".join(f"{address:x}" for address in addresses))
            raw = run.ranks[0].raw
            return not raw or bool(fault_of(raw)) or bool(self.wrong_end(run) or self.wrong_values(run))
        barriers = barriers_of(self.results[0])
        with ThreadPoolExecutor(2) as pool:
            needed = list(pool.map(is_needed, enumerate(barriers)))
        for (name, place, _, _), need in zip(barriers, needed):
            if not need:
                return Problem("B", self.line_of(place.file, place.line),
                               f"This {name} is not needed: without it there is no race at any size.")
        return None

    def on_gpu(self):
        """Returns lines about a run on this machine's GPU; none without one."""
        words = os.environ.get("PUZZLE_NVCC", "").split()
        if not words:
            return []
        sources = [self.source, f"dev/puzzles/cases/{self.puzzle.name}.cpp", "dev/puzzles/judge.cpp"]
        built = subprocess.run([*words[:1], *sources, *words[1:], "-o", f"{self.program}-gpu"], cwd=ROOT,
                               capture_output=True, text=True)
        if built.returncode:
            return wrap("GPU: nvcc: " + next((line for line in built.stderr.splitlines() if "error" in line), ""))
        recorded, self.program = self.program, f"{self.program}-gpu"
        run, self.program = self.run("gpu"), recorded
        needs = next((rank.result["needs"] for rank in run.ranks if "needs" in rank.result), None)
        if needs:
            return [f"  GPU: this puzzle needs {needs}"]
        problem = self.wrong_end(run) or self.wrong_values(run)
        return wrap(f"GPU: {problem.text}" if problem else
                    f"GPU: right at all sizes, {number(run.ranks[0].result['cases'][-1]['us'])} µs (median)")

    def estimate(self):
        """Returns a phrase with the estimated time of the last size on an H100."""
        kernels = counted(self.results[0])
        if not kernels:
            return "no kernel was launched"
        bound = max(kernels, key=lambda kernel: kernel.launches * kernel.us).bound
        return f"{number(sum(k.launches * k.us for k in kernels))} µs on an H100, bound by {bound} (estimated)"


def array_of(hazard, kernel, rank):
    """Returns the name of the accessed element."""
    if hazard["memory"] == "shared":
        return f"byte {hazard['address']} of {hazard['array'] or 'shared memory'}"
    cases = rank.result.get("cases", [])
    case = next((case for case in cases if case["size"] == kernel.range), cases[-1] if cases else {"names": []})
    for name, n, width, place in case["names"]:
        if place == hazard["allocation"]:
            return f"{name}[{hazard['address'] // width}] ({name} has {plural(n, 'element')})"
    return f"global memory (byte {hazard['address']})"


# ---- verdicts

NAMES = {"S": "sectors", "W": "wavefronts", "T": "bytes", "requests": "instructions", "products": "products",
         "time": "estimated µs", "shared": "shared bytes", "sent": "bytes sent"}


def figure_text(name, found, limit):
    shown = f"{int(found)}" if name == "shared" else times(found)
    return f"{NAMES[name]} {shown} (limit {int(limit) if name == 'shared' else times(limit)})"


def wrap(text, indent="  "):
    """Breaks a text into lines of WIDTH characters."""
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)


def failed_lines(puzzle, problem, source):
    place = os.path.relpath(puzzle.copy, ROOT) + (f":{problem.line}" if problem.line else "")
    lines = [f"puzzle {puzzle.number}, {puzzle.title}: not solved: {problem.kind}", f"  {place}"]
    if problem.line:
        lines.append(f"    {source.splitlines()[problem.line - 1].strip()}")
    lines += wrap(problem.text)[:6]
    return [*lines, f"  make puzzle P={puzzle.number} HINT=yes"]


def compare_lines(puzzle):
    """Returns where the trainer has such a kernel, and what that version does better."""
    for heading, text in puzzle.notes().items():
        if not heading.startswith("compare "):
            continue
        name = heading.split()[1]
        for path in [ROOT / "train_gpt.cu", *sorted((ROOT / "gpt").glob("*.cuh"))]:
            for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.match(rf"(?!//|#)(\S.*\b)?{re.escape(name)}\(", line):     # the definition
                    return [f"  {os.path.relpath(path, ROOT)}:{at} {name}", *wrap(text, "    ")]
    return []


def solved_lines(puzzle, judge, figures):
    cases = [case for _, case in judge.recorded.cases()]
    error = max(array["error"] for case in cases for array in case["arrays"])
    judged = "".join(f", {figure_text(name, *pair)}" for name, pair in figures.items())
    also = ", every barrier needed" * judge.limits["B"] + ", equal bits in every order" * judge.limits["D"]
    return [f"puzzle {puzzle.number}, {puzzle.title}: SOLVED",
            *wrap(f"{plural(len(judge.recorded.ranks[0].result['cases']), 'size')} in {1 + len(SEEDS)} orders of the "
                  f"threads: error {error:.2f} of the limit, no race{judged}{also}"),
            f"  {judge.estimate()}", *judge.on_gpu(), *compare_lines(puzzle)]


def verdict(puzzle):
    """Judges a puzzle, prints the verdict, stores the progress; returns whether it is solved."""
    puzzle.make_copy()
    source = puzzle.copy.read_text(encoding="utf-8")
    judge = Judge(puzzle)
    problem, figures = judge.judge()
    progress = read_progress()
    if problem:
        lines = failed_lines(puzzle, problem, source)
        (puzzle.folder / "problem").write_text(problem.kind)
    else:
        lines = solved_lines(puzzle, judge, figures)
        progress[puzzle.name] = {"figures": figures, "estimate": judge.estimate()}
        (puzzle.folder / "problem").unlink(missing_ok=True)
    PROGRESS.write_text(json.dumps(progress, indent=1))
    print("\n".join(line[:WIDTH] for line in lines[:LINES]), flush=True)
    return not problem


def watch(puzzle):
    puzzle.make_copy()
    last = None
    while True:
        now = puzzle.copy.stat().st_mtime_ns
        if now != last:
            last = now
            print("\033[2J\033[H", end="")
            verdict(puzzle)
        time.sleep(0.2)


def hint(puzzle):
    """Prints the hint for the problem of the last verdict."""
    path = puzzle.folder / "problem"
    if is_solved(puzzle, read_progress()) and not path.exists():
        raise Mistake(f"puzzle {puzzle.number}: the last verdict has no problem")
    kind = path.read_text() if path.exists() else "unwritten"
    notes = puzzle.notes()
    general = (HERE / "hints.txt").read_text(encoding="utf-8")
    others = dict(re.findall(r"^== (\S+)\n((?:(?!== ).*\n?)*)", general, re.MULTILINE))
    own = notes.get(f"hint {kind}") or kind == "NaN" and notes.get("hint values")
    print("\n".join(wrap(own or others[kind], "")))


def solution(puzzle):
    if not is_solved(puzzle, read_progress()):
        raise Mistake(f"puzzle {puzzle.number}: expected a solved puzzle; solve it first, or read "
                      f"dev/puzzles/solutions/{puzzle.name}.txt")
    print(puzzle.notes()["solution"], end="")


def print_list(puzzles):
    progress, rows = read_progress(), []
    for puzzle in puzzles:
        entry = progress.get(puzzle.name) if is_solved(puzzle, progress) else None
        figures = ", ".join(f"{NAMES[name]} {number(found) if name == 'shared' else times(found)}"
                            for name, (found, _) in entry["figures"].items()) if entry else ""
        rows.append([str(puzzle.number), puzzle.title, "solved" if entry else "", figures,
                     entry["estimate"].split(",")[0] if entry else ""])
    print("\n".join(text_table(["", "puzzle", "", "counts", "estimated time"], rows, left=4)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, help="of a puzzle; default: the first that is not solved")
    parser.add_argument("--watch", action="store_true", help="judge again whenever the file is saved")
    parser.add_argument("--hint", action="store_true", help="print a hint for the problem of the last verdict")
    parser.add_argument("--solution", action="store_true", help="print the code of the solution, of a solved puzzle")
    parser.add_argument("--next", action="store_true", help="print the number of the first puzzle that is not solved")
    parser.add_argument("--list", action="store_true", help="print the progress")
    options = parser.parse_args()
    puzzles = all_puzzles()
    try:
        if options.list:
            return print_list(puzzles)
        if options.number is None:
            progress = read_progress()
            puzzle = next((each for each in puzzles if not is_solved(each, progress)), None)
            if options.next:
                return print(puzzle.number if puzzle else "")
            if not puzzle:
                print("All puzzles are solved.")
                return 0
        else:
            puzzle = next((each for each in puzzles if each.number == options.number), None)
            if not puzzle:
                raise Mistake(f"P={options.number}: expected 1 to {len(puzzles)}")
        if options.hint or options.solution:
            return hint(puzzle) if options.hint else solution(puzzle)
        if options.watch:
            return watch(puzzle)
        print("\n".join(puzzle.statement()) + "\n")
        return 0 if verdict(puzzle) else 1
    except Mistake as mistake:
        print(f"puzzle: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # no traceback in judge.py --list | head
    sys.exit(main())

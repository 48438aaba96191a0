#!/usr/bin/env python3
"""Tests `make inspect` from a .cu file to the figures, without a GPU: the requests, sectors, wavefronts and races of
the kernels in cases/ are known.

    test_inspect.py [NAME ...]      runs only these functions, without test_: counts, caches, ...
"""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.append(os.path.join(HERE, "..", "tests"))
from testing import expect, expect_equal, finish, write
from results import read_json, read_recording
from sass import find_nvdisasm

BUILD = os.path.join("build", "inspect")
ALL = 0xffffffff


# ---- cases

def run_command(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(name, text):
    """Writes a file in the build folder; returns its path."""
    path = os.path.join(BUILD, name)
    write(path, text)
    return path


@functools.cache
class Case:
    """A program in cases/: its lines, figures and recording."""

    def __init__(self, name):
        self.name, self.file = name, f"dev/inspect/cases/{name}.cu"
        self.program = os.path.join(BUILD, name, "program")
        lines = enumerate(Path(self.file).read_text("utf-8").splitlines(), 1)
        self.comments = {number: found[1] for number, line in lines if (found := re.search(r"\S.*// (.+)$", line))}
        figures = os.path.join(BUILD, f"{name}.json")
        run = run_command("make", "-s", "inspect", f"FILE={self.file}", f"JSON={figures}")
        if run.returncode != 0:
            raise RuntimeError(f"make inspect FILE={self.file}: exit code {run.returncode}\n{run.stderr}")
        self.page = Path("runs/inspect/report.html").read_text("utf-8") if name == "races" else ""
        self.figures = read_json(figures, "figures")
        self.recording = written(f"{name}.recording.json", Path(self.program + ".json").read_text("utf-8"))
        self.raw = {kernel["symbol"]: kernel for kernel in read_recording(self.recording)["kernels"]}

    def kernels(self, name):
        return [kernel for kernel in self.figures["kernels"] if kernel["name"] == name]

    def kernel(self, name):
        return self.kernels(name)[0]

    def line(self, comment):
        """Returns the number of the first line with this comment."""
        return next(number for number, each in self.comments.items() if each == comment)

    def comment(self, access):
        """Returns the comment of an access's line; the line's number if it has none."""
        return self.comments.get(access["line"], str(access["line"]))

    def sites(self, kernel, comment, access="load"):
        return [site for space in ("global", "shared") for site in self.kernel(kernel)[space]
                if (self.comment(site), site["access"]) == (comment, access)]

    def sum(self, kernel, comment, access, *keys):
        return tuple(sum(site[key] for site in self.sites(kernel, comment, access)) for key in keys)

    def run_again(self, *words, **settings):
        """Runs run.py, with settings of the emulator or the recorder; returns the process and the figures, {} if it
        wrote none."""
        figures = Path(BUILD, f"{self.name}.again.json")
        figures.unlink(missing_ok=True)
        if settings:
            costs = f"def run(program, folder, words, small): return {{'arguments': words, 'settings': {settings}}}\n"
            words = ("--costs", written("settings.py", costs), *words)
        run = run_command(sys.executable, "dev/inspect/run.py", self.program, "--json", str(figures), *words)
        return run, read_json(figures, "figures") if figures.exists() else {}

    def report(self, *words):
        """Runs report.py on the recording; returns the process."""
        return run_command(sys.executable, "dev/inspect/report.py", self.recording, *words)


# ---- requests, sectors, wavefronts, lanes

# {(type, stride, mask, lanes): (requests, wavefronts, minimum)}, calculated by hand. 64 bits, stride 3: words 0, 6, ...
# of 16 lanes are in 16 different even banks, and the words after them in the odd banks: one wavefront per half warp.
# Stride 2: banks 0, 4, ..., 28 twice. 128 bits, stride 4: the accesses of consecutive lanes start 16 words from each
# other, in banks 0 and 16 only: 4 wavefronts per 8 lanes. A Pack of 32 bytes is two requests of 16 bytes.
SHARED = {
    **{("float", stride, 31, ALL): (1, done, 1) for stride, done in
       ((1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1))},
    **{("float2", stride, 31, ALL): (1, done, 2) for stride, done in
       ((1, 2), (2, 4), (3, 2), (4, 8), (8, 16), (16, 32), (32, 32), (33, 2))},
    **{("float4", stride, 31, ALL): (1, done, 4) for stride, done in
       ((1, 4), (2, 8), (3, 4), (4, 16), (8, 32), (16, 32), (32, 32), (33, 4))},
    ("char", 1, 31, ALL): (1, 1, 1), ("Pack", 1, 31, ALL): (2, 16, 8), ("float", 1, 0, ALL): (1, 1, 1),
    ("float", 32, 1, ALL): (1, 2, 1), ("float2", 1, 31, 0xffff): (1, 1, 1), ("float", 2, 31, 0x55555555): (1, 2, 1)}
# {(type, stride, offset, mask, lanes): (loads, stores)}, each (requests, sectors, minimum)
GLOBAL = {
    ("float", 1, 0, 31, ALL): ((1, 4, 4), (1, 4, 4)), ("float", 2, 0, 31, ALL): ((1, 8, 4), (1, 4, 4)),
    ("float", 8, 0, 31, ALL): ((1, 32, 4), (1, 4, 4)), ("float", 100, 0, 31, ALL): ((1, 32, 4), (1, 4, 4)),
    ("float", 1, 1, 31, ALL): ((1, 5, 4), (1, 5, 4)), ("float", 1, 8, 31, ALL): ((1, 4, 4), (1, 4, 4)),
    ("float", 1, 0, 0, ALL): ((1, 1, 1), (1, 4, 4)), ("float", 1, 0, 31, 0xffff): ((1, 2, 2), (1, 2, 2)),
    ("float", 1, 0, 31, 0x55555555): ((1, 4, 2), (1, 4, 2)), ("char", 1, 0, 31, ALL): ((1, 1, 1), (1, 1, 1)),
    ("float4", 1, 0, 31, ALL): ((1, 16, 16), (1, 16, 16)), ("Pack", 1, 0, 31, ALL): ((2, 64, 32), (2, 64, 32))}


def patterns(case, name, space, unit):
    """Returns {(type, *integers): (loads, stores)} of all launches of a kernel template."""
    return {(kernel["name"][len(name) + 1:-1], *kernel["integers"]): tuple(
        tuple(sum(site[key] for site in kernel[space] if case.comment(site) == comment)
              for key in ("requests", unit, f"least_{unit}")) for comment in ("loads", "stores"))
            for kernel in case.figures["kernels"] if kernel["name"].startswith(f"{name}<")}


def test_counts():
    case = Case("counts")
    expect_equal(patterns(case, "strided", "shared", "wavefronts"),
                 {key: (figures, figures if key[2] == 31 else (0, 0, 0)) for key, figures in SHARED.items()},
                 "wavefronts of shared memory equal those calculated by hand, for each type, stride, mask and lanes")
    expect_equal(patterns(case, "gather", "global", "sectors"), GLOBAL,
                 "sectors of global memory equal those calculated by hand, for each type and pattern")
    keys, lanes = ("requests", "sectors", "least_sectors"), ("requests", "lanes", "sectors")
    for kernel, comment, access, keys, expected, text in [
            ("by_function", "near", "load", keys, (1, 4, 4), "a load in an accessor is counted at its caller's line"),
            ("by_function", "far", "load", keys, (1, 32, 4), "... separately for each line that calls it"),
            ("by_function", "loads a", "load", keys, (1, 4, 4), "a function with several lines has figures at them"),
            ("by_function", "stores b", "store", keys, (1, 4, 4), "... at each of them"),
            *[("packs_by_value", comment, access, keys, (2, 64, 32), f"32-byte arguments and results: {access}")
              for comment in ("once", "again") for access in ("load", "store")],
            ("again<(Between)0>", "loads", "load", keys, (1, 4, 4), "a load in a loop without stores is counted once"),
            ("again<(Between)1>", "loads", "load", keys, (3, 12, 12), "in a loop with stores: each time"),
            ("again<(Between)2>", "loads", "load", keys, (1, 4, 4), "in a loop with stores to shared memory: once"),
            ("again<(Between)3>", "loads", "load", keys, (3, 12, 12), "in a loop with a barrier: each time"),
            ("again<(Between)4>", "loads", "load", keys, (3, 12, 12), "in a loop with a __threadfence: each time"),
            ("atomics", "whole", "store", lanes, (1, 32, 1), "an integer atomic of a warp is one request"),
            ("atomics", "sum", "store", lanes, (1, 32, 4), "a floating-point atomic of a warp is one request"),
            ("a_warp_and_a_half", "all", "store", lanes, (4, 96, 12), "48 threads: a warp of 32 lanes and one of 16"),
            ("a_warp_and_a_half", "every third", "store", lanes, (4, 32, 12), "... with every third lane active"),
            ("two_dimensions", "row by row", "store", lanes, (2, 64, 8), "8 x 8 threads are two warps of 4 rows each"),
            ("two_dimensions", "column by column", "store", lanes, (2, 64, 16), "... column by column: 8 sectors each"),
            ("two_ways", "even", "store", lanes[:2], (4, 64), "divergent lanes: 16 of them store 4 times"),
            ("two_ways", "odd", "store", lanes[:2], (4, 40), "... the others 16, 12, 8 and 4 times")]:
        expect_equal(case.sum(kernel, comment, access, *keys), expected, text)
    expect_equal([site["via"] for site in case.sites("by_function", "far")],
                 [[f"{case.file}:{case.line('of an accessor')}"]], "the accessor's own line is named too")
    expect_equal([site["by"] for site in case.sites("atomics", "sum", "store")], ["atomic"],
                 "an atomic is counted at the user's line, not at the emulator's")
    expect_equal((case.kernel("atomics")["launches"], case.kernel("atomics")["recorded_blocks"]), (3, 1),
                 "three launches with the same shape are one entry, recorded once")
    stored = [[kernel["launch"][figure] for figure in ("l2", "partial", "cycles")]
              for symbol, kernel in sorted(case.raw.items()) if "four_words" in symbol]
    expect_equal(stored, [[128, 0, 128], [128, 0, 32], [256, 256, 64], [256, 256, 32]],
                 "adjacent stores of a thread reach L2 at once; those of other warps are a partial store each; "
                 "L1 looks up 4 lines per cycle if they are in different sets")
    alone, with_idle = sorted((kernel["estimate_us"] for kernel in case.kernels("one_thread")))
    expect(150 < alone < with_idle < 1.02 * alone, "idle blocks and warps do not shorten the estimate of a serial loop",
           f"{alone:.1f} and {with_idle:.1f} us")
    raw = next(kernel for symbol, kernel in case.raw.items() if "shared_bytes" in symbol)
    expect_equal((raw["static_shared"], raw["dynamic_shared"]), (480, 128), "static and dynamic shared memory in bytes")
    case = Case("transpose")
    per_request = {name: [site[figure] / site["requests"] for space, access, figure in
                          (("global", "store", "sectors"), ("shared", "load", "wavefronts"))
                          for site in case.kernel(f"transpose_{name}")[space] if site["access"] == access]
                   for name in ("naive", "tile", "swizzle")}
    expect_equal(per_request, {"naive": [16], "tile": [4, 8], "swizzle": [4, 1]},
                 "README.md's picture: sectors of a store and wavefronts of a load from shared memory")


def test_caches():
    case = Case("counts")
    for kernel, first, second, text in [
            ("row_twice<1024u>", (128, 0, 128), (128, 128, 0), "the second read of 4 KiB hits in L1"),
            ("row_twice<131072u>", (1 << 14, 0, 1 << 14), (1 << 14, 0, 0), "the second read of 512 KiB hits in L2")]:
        expect_equal([case.sum(kernel, comment, "load", "sectors", "l1_hits", "dram_sectors")
                      for comment in ("first", "second")], [first, second], text)

    def hits_with(registers):
        symbol = next(symbol for symbol in case.raw if "row_twiceILj3072E" in symbol)
        path = written("registers.json", json.dumps({symbol: {"registers": registers, "spills": 0}}))
        _, figures = case.run_again("--sass", path)
        sites = next(kernel["global"] for kernel in figures["kernels"] if kernel["name"] == "row_twice<3072u>")
        return sum(site["l1_hits"] for site in sites if case.comment(site) == "second")

    expect_equal((hits_with(32), hits_with(255)), (0, 384),
                 "12 KiB hit in L1 with 8 resident blocks, limited by registers, and miss with 32")
    expect_equal([case.sum("stored_twice", *accesses, "dram_sectors") for accesses in (
        ("first", "store"), ("second", "store"), ("loads", "load"))], [(4,), (0,), (0,)],
                 "a sector stored twice is written to memory once; loads of stored sectors hit in L2")
    _, figures = case.run_again("--card", "t4")
    expect_equal(len(figures["kernels"]), len(case.figures["kernels"]),
                 "a GPU that reserves no shared memory runs kernels without shared memory")
    kernels = case.run_again("--sample")[1]["kernels"]
    sampled = [kernel for kernel in kernels if kernel["name"] == "copy"]
    tiles = [case.kernel("rows_and_columns"), *(each for each in kernels if each["name"] == "rows_and_columns")]
    expect_equal([(each["recorded_blocks"] < 1536, each["memory_bytes"]) for each in tiles],
                 [(False, (24 + 64) << 13), (True, (24 + 64) << 13)],
                 "blocks that share rows and columns load each of them once, also if few blocks are recorded")
    for kernels, text in ((case.kernels("copy"), "copies of 64 KiB, 2 and 4 MiB move twice as many bytes"),
                          (sampled, "... also with INSPECT_MODE=sample")):
        expect_equal(sorted(kernel["memory_bytes"] for kernel in kernels), [2 << 16, 2 << 21, 2 << 22], text)
    expect(any(kernel["recorded_blocks"] < kernel["grid"][0] for kernel in sampled), "... of which some are recorded")
    in_l2 = {kernel["blocks"]: tuple(kernel["launch"][f"resident_{access}"] for access in ("load", "store"))
             for kernel in read_recording(case.recording)["kernels"] if kernel["symbol"].startswith("_Z4copy")}
    expect_equal(in_l2, {64: (1 << 16, 1 << 16), 4096: (1 << 22, 1 << 22), 2048: (0, 0)},
                 "L2 has what earlier copies and launches accessed, but not after a memset of 64 MiB")
    floats, ints = (case.kernel(f"sum<{name}>")["estimate_us"] for name in ("float", "int"))
    expect(floats > 10 * ints, "lanes add floats to one address one after the other, integers together")


# ---- races

def pairs(case, kernel):
    """Returns the races of a kernel: {(memory, comment, comment)}."""
    return {(race["memory"], *sorted(map(case.comment, race["accesses"]))) for race in kernel["races"]}


def expect_races(case, kernel, memory, comments, text):
    """Expects exactly the races between the lines with these pairs of comments; in global memory between blocks."""
    found = case.kernel(kernel)
    expect_equal(pairs(case, found), {(memory, *sorted(pair)) for pair in comments}, text)
    for a, b in (race["accesses"] for race in found["races"]):
        is_async = not {a["by"], b["by"]} <= {"thread", "atomic"}
        expect((a["block"] != b["block"]) if memory == "global" else a["block"] == b["block"] and
               (is_async or a["thread"] != b["thread"]), "... between two blocks, or threads of a block", f"{a}, {b}")
    if not comments:
        expect_equal(found["uninitialised"], [], "... and no uninitialised read")


WRITES_READS = [("writes", "reads")]
# {kernel<is it right>: (what its wrong version lacks, the memory and the lines that race)}
RACES = {
    "neighbour<{}>": ("__syncthreads between a store and a load", "shared", WRITES_READS),
    "bytes<{}>": ("loads of single bytes: it loads a whole word", "shared", WRITES_READS),
    "product<{}>": ("atomicCAS of the value that it loads, with atomicAdd in its place", "global", [("loads", "adds")]),
    "histogram<{}>": ("__syncthreads between clearing and atomicAdd", "shared", [("clears", "adds")]),
    "updates<{}>": ("an atomic store to a variable", "global", [("writes", "writes"), ("writes", "adds")]),
    "one_word<{}>": ("one address per block", "global", [("writes", "writes")]),
    "last_block<{}, false>": ("__threadfence before the count of blocks", "global", WRITES_READS),
    "last_block<{}, true>": ("__syncthreads between fences and the count of blocks", "global", WRITES_READS),
    "copies<{}>": ("waits at a cuda::barrier and for a stage of a cuda::pipeline", "shared",
                   [*WRITES_READS, ("writes next", "reads next")]),
    "grids<{}>": ("grid.sync(), with __syncthreads in its place", "global", WRITES_READS),
    "flag<{}>": ("release order of the store to an atomic", "shared", WRITES_READS),
}


def test_races():
    case = Case("races")
    for name, (lacks, memory, comments) in RACES.items():
        expect_races(case, name.format("false"), memory, comments, f"{name} lacks {lacks}: the race is found")
        expect_races(case, name.format("true"), memory, [], "... and none in its right version")
    for version, comments, text in (
            ("0, 1", WRITES_READS, "lanes race"), ("1, 1", [], "__syncwarp orders them"), ("2, 1", [], "... a shuffle"),
            ("3, 1", [], "... a vote"), ("4, 1", [], "... __syncwarp of half a warp, if both lanes are in its mask"),
            ("4, 17", WRITES_READS, "... which does not order them with other lanes"),
            ("5, 63", WRITES_READS, "sync() of a tile does not order accesses of other warps"),
            ("6, 63", [], "... sync() of the block does")):
        expect_races(case, f"lanes<(Order){version}>", "shared", comments, text)
    expect_races(case, "two_readers", "shared", [("writes", "even"), ("writes", "odd")],
                 "two lines that load a word both race with a store to it")
    expect_equal(sorted([(a["access"], a["thread"]) for a in race["accesses"]]
                        for race in case.kernel("two_readers")["races"]),
                 [[("store", 31), ("load", 1)], [("store", 31), ("load", 2)]],
                 "a race with several readers names one that is not ordered")
    wrong, right = case.kernel("unwritten<false>"), case.kernel("unwritten<true>")
    expect_equal({case.comment(read["accesses"][0]): (read["array"], read["address"], read["count"])
                  for read in wrong["uninitialised"]}, {"reads dynamic": ("", 0, 64), "reads": ("tile", 252, 4)},
                 "64 reads of uninitialised words of dynamic shared memory and 4 of an array are found")
    expect_equal((wrong["races"], right["uninitialised"]), ([], []), "... without races; none in the right version")
    expect_equal([len(case.kernel(f"reductions<{right}>")["races"]) for right in ("false", "true")], [1, 0],
                 "cub: __syncthreads is needed before its storage is used again")
    expect_equal({kernel["name"] for kernel in case.figures["kernels"] if kernel["out_of_bounds"]},
                 {"late", "past_the_end", "past_arrays"},
                 "no right access is reported as out of bounds or of the host's memory")
    natural, *others = ({(kernel["name"], *race) for kernel in figures["kernels"] for race in pairs(case, kernel)}
                        for figures in (case.figures, *(case.run_again(CUDA_CPU_SEED=seed)[1] for seed in "12")))
    for found in others:
        expect_equal(natural ^ found, set(), "the same races are found with the threads in another order")


def test_late_faults():
    """Launch 2 of kernel `late` stores past the end in block 137, launch 3 has a race in the last of its 256 blocks."""
    case = Case("races")
    run, figures = case.run_again("--check", INSPECT_ACCESSES="8192")
    few = next(kernel for kernel in figures["kernels"] if kernel["name"] == "late")
    for kernel, text in ((case.kernel("late"), "all blocks are counted"), (few, "few blocks are counted")):
        expect_equal((pairs(case, kernel), {race["accesses"][0]["block"] for race in kernel["races"]}),
                     ({("shared", "reads", "writes")}, {255}),
                     f"a race in the last block of the third launch is found: {text}")
        expect_equal([(each["address"], each["accesses"][0]["block"]) for each in kernel["out_of_bounds"]],
                     [(1 << 16, 137)], f"an access out of bounds in a block of the second launch is found: {text}")
    checked = few["checked"]
    first, between, last = (checked[key] for key in ("first", "between", "last"))
    expect(8 <= first == few["recorded_blocks"] < 64 and 4 <= between < 64 and 2 <= last < 64,
           "checked: the first blocks of a launch, some in between and the last ones", str(checked))
    expect(3 <= checked["launches"] < 23 == checked["launches"] + checked["missed_launches"],
           "... and some of each launch, until a limit is reached", str(checked))
    for text in (f"  blocks 1 to {first}, {between} more, the last {last} of 256, launch 1 of 23; {checked['later']} "
                 f"blocks of launches 2 to {checked['launches']}\n",
                 f"late: {checked['missed_launches']} of 23 launches have other arguments than those that were "
                 "checked"):
        expect(text in run.stdout, f"the report says what was checked, --check what was not: {text}", run.stdout)
    out = case.report("--check").stdout
    expect("late: 20" not in out and re.search(r"^late +23 +256 +64 .* 1 +1 +1 +0 +all$", out, re.M),
           "... nothing if all blocks were checked", out)


# ---- variables

# The lines of kernel `loads` that load 128 consecutive bytes
ROWS = ("a row", "constant", "managed", "static", "static and never stored to", "in namespaces", "of a template",
        "by address")


def test_variables():
    case = Case("races")
    for name, comment, arrays in (("updates<false>", "writes", {"total"}),
                                  ("either", "in one instruction", {"hits", "total"})):
        expect_equal({race["array"] for race in case.kernel(name)["races"]
                      if {*map(case.comment, race["accesses"])} == {comment}}, arrays,
                     f"races name the variables: {comment}")
    keys = ("requests", "sectors", "least_sectors")
    for comment, expected in [*((row, (1, 4, 4)) for row in ROWS), ("a column", (1, 32, 4)), ("structs", (1, 8, 4))]:
        expect_equal(case.sum("loads", comment, "load", *keys), expected, f"loads of a variable are counted: {comment}")
    expect_equal([site["sectors"] for site in case.sites("tickets", "draws", "store") if site["by"] == "atomic"], [2],
                 "an atomic on a static variable of a function is counted")
    expect_equal({case.comment(each["accesses"][0]): (each["array"], each["address"])
                  for each in case.kernel("past_the_end")["out_of_bounds"]},
                 {"one too far": ("table", 8192), "stores": ("hidden", 128), "one too early": ("managed", -4),
                  "of a template": ("of_template<int>", 128)},
                 "accesses next to a variable are out of bounds, and name it")
    out = case.report().stdout
    expect("past_the_end: access out of bounds: index 2048 of an array of type 'float [2048]', byte 8192 of the 8,192 "
           "bytes of table: thread 31 of block 0 loads at" in out and
           out.count("updates<false>: ") == 2 and "updates: the same in 1 more row of the table\n" in out,
           "the same races in two launches of a kernel are reported once", out)


def test_out_of_bounds():
    case = Case("races")
    expect_equal({case.comment(each["accesses"][0]): (each["why"], each["array"], each["address"], each["bytes"])
                  for each in case.kernel("past_arrays")["out_of_bounds"]},
                 {"by index": ("index 64 of an array of type 'float [64]'", "tile", 256, 256),
                  "by address": ("", "tile", 256, 256), "dynamic": ("", "", 128, 128),
                  "local": ("index 32 of an array of type 'float [32]'", "", 0, 0)},
                 "accesses outside of shared and local arrays are found, and name the array or its type")
    run, figures = case.run_again("--", "misaligned")
    expect_equal((run.returncode, figures["ended"][:20]), (1, "a misaligned address"),
                 "a misaligned address ends the program with exit code 1")
    run, figures = case.run_again("--", "far")
    far = figures["kernels"][-1]
    ended = figures["ended"].replace("Bus error", "Segmentation fault")
    expect_equal((run.returncode, ended, far["name"], far["estimate_us"],
                  [(each["why"], case.comment(each["accesses"][0])) for each in far["out_of_bounds"]]),
                 (1, "by signal Segmentation fault", "far_away", None, [("an address far from any array", "far away")]),
                 "a store that crashes the program is named, without an estimate of the unfinished block")


# ---- PTX instructions

FIRST_READS, COPIES_READS = ("first", "reads"), ("copies", "reads")
RIGHT = ("copies<(Copies)0>", "hand_over<(Barriers)0>", "next_phase<true>", "named<true>", "ring<(Ring)0>",
         "products<(Products)0>", "products<(Products)2>")
# (kernel, what is wrong, the lines that race)
PTX_RACES = [
    ("copies<(Copies)1>", "a wait for cp.async after the read", [FIRST_READS, COPIES_READS]),
    ("copies<(Copies)2>", "a wait that leaves one group too many in flight",
     [FIRST_READS, COPIES_READS, ("first", "copies"), ("copies", "copies")]),
    ("copies<(Copies)3>", "a wait for cp.async without a __syncthreads", [FIRST_READS, COPIES_READS]),
    ("copies<(Copies)4>", "copies without cp.async.commit_group", [FIRST_READS, COPIES_READS]),
    ("hand_over<(Barriers)1>", "a wait for an mbarrier after the read", WRITES_READS),
    ("hand_over<(Barriers)2>", "an arrival before the read, which releases the tile too early", WRITES_READS),
    ("hand_over<(Barriers)4>", "no __syncthreads after the initialisation of mbarriers",
     [("sets up full", "waits for full"), ("sets up full", "arrives at full"), ("sets up empty", "waits for empty")]),
    ("next_phase<false>", "a read of a value that is stored after the awaited phase of an mbarrier", WRITES_READS),
    ("named<false>", "a missing named barrier", WRITES_READS),
    ("ring<(Ring)1>", "a wait for a TMA copy after the read", [("fills", "reads")]),
    ("ring<(Ring)3>", "a stage released to TMA too early", [("fills", "reads")]),
    ("products<(Products)1>", "no fence.proxy.async between store and wgmma", [("writes", "multiplies")]),
    ("products<(Products)3>", "no __syncthreads between store and wgmma",
     [("writes", "multiplies"), ("multiplies", "overwrites")]),
    ("products<(Products)4>", "a tile overwritten before wgmma_wait", [("multiplies", "overwrites")]),
]
# If other threads can be two phases ahead, a thread may wait for the wrong phase.
WAITS_LATE = ("waits for empty", "waits for empty")
# Programs that do not finish: (argument, how it ends, kernel, the lines that race before that)
UNFINISHED = [
    ("hand_over_without_wait", "deadlock", "hand_over<(Barriers)3>", [("writes", "reads"), WAITS_LATE]),
    ("ring_without_empty_wait", "deadlock", "ring<(Ring)2>", [("fills", "fills")]),
    ("products_without_commit", "ended without waiting for a wgmma", "products<(Products)5>",
     [("multiplies", "overwrites")]),
]


def test_ptx():
    case = Case("ptx")
    for kernel in RIGHT:
        expect_races(case, kernel, "shared", [], f"{kernel} is right: no race is found")
    for kernel, wrong, comments in PTX_RACES:
        expect_races(case, kernel, "shared", comments, f"found: {wrong}")
    expect_equal([race["why"] for version in (1, 4) for race in case.kernel(f"products<(Products){version}>")["races"]],
                 ["no fence.proxy.async between them", "no synchronisation between them"],
                 "a race message states whether only the fence is missing")
    for argument, end, kernel, comments in UNFINISHED:
        run, figures = case.run_again("--", argument)
        expect(run.returncode == 1 and end in figures["ended"], f"{argument}: exit code 1, the report names {end!r}",
               f"exit code {run.returncode}: {run.stderr}")
        case.figures["kernels"] += figures["kernels"]
        expect_races(case, kernel, "shared", comments, "... and its races")
    # A tile has 8 KiB: 256 sectors, 64 wavefronts of 128 bytes. wgmma: 4 steps; each warp reads its own 2 KiB of A, and
    # one of the four warps reads the 8 KiB of B for all.
    of_global, of_shared = ("requests", "sectors", "least_sectors"), ("requests", "wavefronts", "least_wavefronts")
    for kernel, comment, access, by, keys, expected, text in [
            ("matrices<false>", "loads", "load", "ldmatrix", of_shared, (1, 32, 4), "rows of 128 bytes: 8-way"),
            ("matrices<true>", "loads", "load", "ldmatrix", of_shared, (1, 4, 4), "... swizzled rows have none"),
            ("copies<(Copies)0>", "copies", "load", "cp.async", of_global, (6, 96, 96), "16 sectors per 32 lanes"),
            ("copies<(Copies)0>", "copies", "store", "cp.async", of_shared, (6, 24, 24), "... and 4 wavefronts"),
            ("ring<(Ring)0>", "fills", "load", "copy engine", of_global, (6, 1536, 1536), "6 boxes of 8 KiB: sectors"),
            ("ring<(Ring)0>", "fills", "store", "copy engine", of_shared, (6, 384, 384), "... and wavefronts"),
            ("products<(Products)0>", "multiplies", "load", "wgmma", ("bytes", *of_shared[1:]), (2 * 8192, 128, 128),
             "8 KiB of A and 8 KiB of B, without conflicts in a swizzled tile"),
            ("numbers", "in turn", "store", "thread", ("requests", "lanes"), (18, 18),
             "blocks with a tile scheduler get tiles in round-robin order, although they run one after another")]:
        expect_equal(case.sum(kernel, comment, access, *keys), expected, f"{by}: {text}")
        expect_equal({site["by"] for site in case.sites(kernel, comment, access)}, {by}, f"... by {by}")
    flops = {name: kernel["tensor_flops"] for symbol, kernel in case.raw.items()
             for name in ("small_product", "productsIL8Products0E") if name in symbol}
    expect_equal(flops, {"productsIL8Products0E": 2 * 64 * 64 * 64, "small_product": 2 * 2 * 2 * 16 * 8 * 16},
                 "FLOPs of wgmma and of two mma by two warps are counted")


# ---- errors on a GPU that are none on a CPU

HOST_MEMORY = "the host's memory, which a GPU cannot access"
# {argument of the program: what the report says}; it names the line with the argument as a comment, if there is one
FAULTS = {
    **dict.fromkeys(("malloc", "vector", "stack", "new", "captures"), HOST_MEMORY),
    "host-read": "host code accesses device memory, byte 0 of 4000", "host-copy": "host code accesses device memory",
    "float4": "'const struct float4' needs a multiple of 16: thread 1 of block 0 loads",
    "float2": "'const struct float2' needs a multiple of 8: thread 0 of block 0 loads",
    "int": "'int' needs a multiple of 4: thread 0 of block 0 stores", "atomic": "an atomic function needs a multiple",
    "if-else": "thread 32 of block 0 waits at", "partial": "and has ended without reaching it",
    "shuffle": "thread 8, which its mask names, has ended", "stuck": "no thread can continue",
    "forever": "after 10 s (--seconds)", "waits": "after 10 s (--seconds)"}
# {argument: what the program prints}; it is right
FAULTLESS = {"allowed": "sum 51", "aligned": "done", "uniform": "done", "atomics": "done", "spin": "done",
             "turns": "done", "early-return": "done"}


def test_faults():
    case = Case("faults")
    lines = {name: f"{case.file}:{at}" for at, comment in case.comments.items() for name in comment.split(", ")}
    run, _ = case.run_again("--", "none")
    expect("launched no kernel" in run.stderr, "without a launch there is no report", run.stderr)
    for name, words in {**FAULTS, **FAULTLESS}.items():
        begin = time.monotonic()
        run, _ = case.run_again("--seconds", "10" if "10 s" in words else "60", "--", name)
        out, place = run.stdout + run.stderr, lines.get(name, "")
        if name in FAULTS:
            found = next((line for line in out.splitlines() if words in line), "")
            expect(found and place in found, f"{name}: the report says: {words} {place}", out[-2000:])
        else:
            expect(words in out and not re.search("access out of bounds:|divergent barrier:|end of the program", out),
                   f"{name}: nothing to report", out[-2000:])
        expect(time.monotonic() - begin < 120, "... and the program ends in time")


# ---- machine code

# {kernel: (bytes that a warp loads, round trips)} of an iteration
ROUND_TRIPS = {"copy_in_turn": (2048, 4), **{f"copy_unrolled<{unroll}>": (512 * unroll, 1) for unroll in (1, 8)}}


def test_round_trips():
    case = Case("counts")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"       # as in Makefile
    if not os.path.exists(nvcc) or not find_nvdisasm(nvcc):
        print("skipped: round trips: nvcc or nvdisasm is not installed")
        return
    for name, expected in ROUND_TRIPS.items():
        loop = case.kernel(name)["main_loop"]
        expect_equal((loop["bytes"], loop["round_trips"]), expected,
                     f"{name}: bytes that a warp loads, round trips of an iteration")
    out = case.report("--kernel", "copy_unrolled<8>", "--sass", case.program + ".sass").stdout
    expect("a warp loads 4,096 bytes in 1 round trip" in out, "the report has the main loop", out)
    for of, text in ({}, "regs: unknown without nvcc"), ({"k": {}}, "loops: unknown without nvdisasm"):
        out = case.report("--sass", written("empty.json", json.dumps(of))).stdout
        expect(f"\n{text}\n" in out, f"the report says what is missing: {text}", out)


# ---- the command

def test_command():
    case = Case("counts")
    run, figures = case.run_again("--kernel", "two_ways")
    expect("program (its times are the emulator's, not a GPU's):\n" in run.stdout, "the program's output is marked")
    expect_equal((run.returncode, [kernel["name"] for kernel in figures["kernels"]]), (0, ["two_ways"]),
                 "--kernel two_ways reports that kernel only")
    run, figures = case.run_again("--seconds", "5", "--", "long")
    expect((run.returncode, figures["ended"]) == (0, "after 5 s (--seconds)") and len(figures["kernels"]) > 6,
           "--seconds 5 ends a program of 30 s and reports on it", f"exit code {run.returncode}: {run.stderr}")
    costs = written("barriers_costs.py",
                    "UNNECESSARY_BARRIERS = {'if (threadIdx.x < 32) __syncwarp();': 'to be counted'}\n")
    for words, code, wrong in (([], 0, ""), (["--costs", costs], 1, "; 2 not as expected")):
        run, _ = case.run_again("--kernel", "bar", "--barriers", *words)
        expect(run.returncode == code and run.stdout.endswith(f"3 barriers: 0 needed, 3 without a fault{wrong}\n") and
               run.stdout.count("  barriers  NO FAULT") >= 2,
               f"--barriers {' '.join(words[:1])}: kernel barriers needs none of its 3{wrong}: exit code {code}",
               run.stdout + run.stderr)
    run, _ = case.run_again("--kernel", "shared_bytes", "--barriers")
    expect_equal((run.returncode, {line.split()[0] for line in run.stdout.splitlines() if "shared memory: " in line}),
                 (0, {f"{case.file}:{case.line(barrier)}" for barrier in ("of floats", "of doubles")}),
                 "--barriers: kernel shared_bytes needs both, because without either there is a race")


# ---- the report

def test_report():
    case = Case("counts")
    out = case.report().stdout
    row = next(line for line in out.splitlines() if line.startswith("row_twice<131072u>"))
    expect(row.split()[1:4] == ["1", "1", "256"] and row.split()[-7:] == ["-", "32.0", *"0000", "all"],
           "a row of the table has launches, blocks, threads, no wavefronts, lanes, races, what was checked", row)
    rows = [tuple(re.split(" {2,}", line)[:4]) for line in out.split("sectors, wavefr.:")[0].splitlines()]
    expect(len(rows) == len(set(rows)) and "strided<float> (1, 31, 4294967295)  " in out and re.search(
        r"^two_dimensions +1 +1 +8x8 ", out, re.M), "launches that differ have different rows", out)
    expect("estimated on NVIDIA H100" in out and "tokens/s" not in out,
           "the sum of the estimates is printed, without tokens/s if the number of tokens is unknown")
    out = case.report("--card", "a100", "--kernel", "by_function").stdout
    far = next(line for line in out.splitlines() if "// far" in line)
    expect("8.00*" in far and far.startswith("global load") and "row_twice" not in out,
           "--kernel shows source lines next to their figures; * marks ratios above 1", far)
    races = Case("races")
    out = races.report("--kernel", "neighbour").stdout
    writes, reads = (f"{races.file}:{races.line(comment)}" for comment in ("writes", "reads"))
    sentence = (f"race in shared memory, byte 4 of tile: thread 1 of block 0 stores at {writes}  `tile[",
                f"thread 0 of block 0 loads at {reads}  `out[", "no synchronisation between them (100 ")
    expect(all(part in out for part in sentence), "a race message names address, lines and threads", out[-500:])
    out = races.report("--kernel", "reduces").stdout
    found = [line for line in out.splitlines() if line.startswith("reduces: ")]
    expect(len(found) == 4 and "race in shared memory, byte 64 of tile: thread 16 " in found[0] and
           re.fullmatch(r"reduces: 11 more races of tile: lines \d+ and .*", found[1]),
           "12 races around missing barriers are one sentence, and one about the lines of the others", "\n".join(found))
    expect_equal(races.page.count("reduces: race in shared memory"), 12, "the page has all races")
    out = races.report().stdout
    expect("unwritten<false>: uninitialised read of byte 252 of tile: thread 0 of block 0 loads" in out and
           "one_word<false>: race in global memory, byte 0 of the 65,536 bytes allocated at line " in out,
           "a message on an uninitialised read names the address, thread and line")
    symbol = next(symbol for symbol in case.raw if "two_ways" in symbol)
    for name, text in ((symbol, "by its symbol"), (symbol.replace("Pf", "Pv"), "by its name, with other types")):
        path = written("registers.json", json.dumps({name: {"registers": 128, "spills": 8}}))
        expect("128!" in case.report("--sass", path).stdout, f"registers are looked up {text}; ! marks spills")
    raw = read_recording(case.recording)
    raw["kernels"] = [kernel for kernel in raw["kernels"] if "two_ways" in kernel["symbol"]]
    raw["kernels"][0]["sites"][0]["stack"] = [4]
    changed = written("changed.json", json.dumps({**raw, "sequence": []}))
    run = run_command(sys.executable, "dev/inspect/report.py", changed, "--kernel", "two_ways")
    expect(run.returncode == 0 and re.search(r"^global .* 0$", run.stdout, re.M), "an unknown line is shown as 0")


def test_page():
    text = Case("races").page
    expect(not re.search(r"https?://|<link|src=", text), "the page loads no other file")
    ids, used = re.findall(r"\bid=\"?([\w]+)", text), set(re.findall(r'href="?#(\w+)', text))
    expect(len(ids) == len(set(ids)) and used <= set(ids) and {"k0", "p0"} <= used,
           "every link and picture on the page has a target", ", ".join(used - set(ids)))
    expect("<b>neighbour&lt;false&gt;</b>" in text and "race in shared memory" in text and "// reads</code>" in text,
           "the page has escaped kernel names, races and source lines")
    open_ = [tag for tag in ("details", "summary", "g", "div", "span", "svg", "table", "p", "code")
             if len(re.findall(rf"<{tag}\b", text)) != text.count(f"</{tag}>")]
    expect(not open_, "all tags of the page are closed", " ".join(open_))
    tables = re.findall(r"(<div class=[^<>]*scroll[^<>]*>)?<table", text)
    expect(all(tables) and text.count("<svg class=pic") == text.count("<div class=scroll><svg"),
           "tables and pictures scroll in their own containers, so a narrow page does not scroll sideways")


# ---- user errors

def test_mistakes():
    case = Case("counts")
    wrong, broken, other = written("wrong.cu", 9 * "wrong;\n"), written("broken.json", "{"), written("other.json", "[]")
    raw, missing = read_recording(case.recording), os.path.join(BUILD, "nothing.json")
    old_card, moved = (written(f"changed-{key}.json", json.dumps({**raw, key: "gone"})) for key in ("card", "program"))
    inspect, run = ["make", "-s", "inspect"], [sys.executable, "dev/inspect/run.py", case.program]
    report_py = [sys.executable, "dev/inspect/report.py"]
    for command, error in (
            ([*inspect, "FILE=missing.cu"], "missing.cu"), ([*inspect, f"FILE={wrong}"], f"{wrong}:1:1: error: "),
            ([*run, "--card", "h9000"], "invalid choice: 'h9000'"),
            ([*run, "--kernel", "nothing"], "--kernel nothing: no such kernel was launched; found a_warp_and"),
            ([*report_py, case.recording, "--sass", missing], f"sass {missing}: No such file"),
            ([*report_py, case.recording, "--sass", broken], "not JSON"),
            ([*report_py, case.recording, "--html", BUILD], "Is a directory"),
            ([*report_py, case.recording, "--costs", missing], f"--costs {missing}: No such file"),
            ([*report_py, missing], "No such file"), ([*report_py, broken], "not JSON"),
            ([*report_py, other], "expected a JSON object with"),
            ([*report_py, old_card], "card 'gone': expected one of h100"),
            ([*report_py, moved], "gone: No such file")):
        found = run_command(*command)
        expect(found.returncode == 2 and error in found.stderr and found.stderr.count("error:") < 2,
               f"{' '.join(command[-2:])} is rejected: {error}, one error, exit code 2",
               f"exit code {found.returncode}: {found.stderr}")


# ---- the check

def test_check():
    """Checks a recording of two kernels: by_function, with unnecessary sectors, and a copy of 4 MiB."""
    case = Case("counts")
    raw = read_recording(case.recording)
    kernels = [kernel for kernel in raw["kernels"] if "by_function" in kernel["symbol"] or
               "copy" in kernel["symbol"] and kernel["blocks"] == 4096]
    ratio = case.kernel("by_function")["ratios"]["sectors"]

    def check(allowances, more="", share=1.0, **hazards):
        for kernel in kernels:
            if "copy" in kernel["symbol"]:
                kernel["launch"].update(dram_load=share * (4 << 20), dram_store=share * (4 << 20))
                kernel.update(hazards)
        path = written("checked.json", json.dumps({**raw, "kernels": kernels, "sequence": []}))
        costs = written("costs.py", f"ALLOWANCES = {[(*entry, 'reason')[:4] for entry in allowances]}\n{more}")
        run = run_command(sys.executable, "dev/inspect/report.py", path, "--check", "--costs", costs)
        return run.returncode, run.stdout + run.stderr

    exact, other = ("by_function", "sectors", ratio), ("other_kernel", "sectors", 9)
    cost = "def cost(launch, shape):\n    if launch.name == 'copy': return 'bytes', 8 << 20, 'reads and writes n'"
    race = next(kernel for symbol, kernel in Case("races").raw.items() if "neighbourILb0E" in symbol)["races"][0]
    race = {**race, "accesses": [{**access, "stack": [4]} for access in race["accesses"]]}
    where = f"by_function: {case.file}:{case.line('far')}: sectors are {ratio:.3f} times the minimum"
    for text, arguments, hazards, code, words in [
            ("a ratio above the default is a finding with line, ratio and limit", ([],), {}, 1,
             f"{where}; allowed: 1.000"),
            ("an allowed ratio is no finding, nor is an allowance for a kernel that was not recorded",
             ([exact, other],), {}, 0,
             "0 findings"),
            ("an allowance looser than necessary is a finding", ([("by_function", "sectors", ratio * 1.04)],), {}, 1,
             "allowance looser than necessary"),
            ("a ratio above its allowance is a finding", ([("by_function", "sectors", ratio - 0.01)],), {}, 1,
             "1 finding"),
            ("a race cannot be allowed", ([exact],), {"races": [race]}, 1, "race in shared memory"),
            ("an allowance of unknown kind is rejected", ([("copy", "speed", 1)],), {}, 2, "sectors or wave"),
            ("an allowance without a reason is rejected", ([("copy", "sectors", 1, "")],), {}, 2, "reason"),
            ("4.5 % more traffic than the cost line is no finding", ([exact], cost, 1.045), {"races": []}, 0,
             "0 findings"),
            ("10 % more is a finding", ([exact], cost, 1.1), {}, 1,
             "bytes to and from memory are 1.100 times the cost line (reads and writes n)"),
            ("an allowance equal to the default of 1.05 is a finding",
             ([exact, ("copy", "cost", 1.05)], cost, 1.045), {}, 1, "looser than necessary"),
            ("an unknown unit is rejected", ([], cost.replace("'bytes'", "'bits'")), {}, 2,
             "found unit 'bits'; expected bytes or FLOPs"),
            ("a formula with other arguments than the kernel's is rejected",
             ([], "def cost(launch, shape):\n    (lambda n: n)(*launch.integers)"), {}, 2, "cost() of "),
            ("a --costs file that raises an exception is rejected", ([], "1 / 0"), {}, 2, "ZeroDivisionError")]:
        found, out = check(*arguments, **hazards)
        expect(found == code and words in out, f"{text}: exit code {code}", f"exit code {found}: {out[-300:]}")


# ---- all of them

def main():
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    os.chdir(ROOT)
    for name in sys.argv[1:] or tests:
        try:
            tests[name]()
        except (LookupError, StopIteration, TypeError) as error:
            expect(False, f"test_{name} finishes", repr(error))
    finish()


if __name__ == "__main__":
    main()

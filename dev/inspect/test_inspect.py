#!/usr/bin/env python3
"""Tests `make inspect` from a .cu file to the figures, without a GPU: the requests, sectors, wavefronts and races of
the kernels in cases/ are known.

    test_inspect.py [PART ...]      runs only these parts: counts, caches, races, variables, ptx, in_flight, command,
                                    report, check
"""
import json
import os
import re
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.append(os.path.join(HERE, "..", "tests"))
import report
from testing import expect, expect_equal, finish
from results import Results, read_json, read_recording
from sass import find_nvdisasm

BUILD = os.path.join("build", "inspect")
ALL = 0xffffffff


# ---- cases

def run_command(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def written(name, text):
    """Writes a file in the build folder; returns its path."""
    path = os.path.join(BUILD, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


class Case:
    """A program in cases/: its lines, figures and recording."""

    def __init__(self, name):
        self.name, self.file = name, f"dev/inspect/cases/{name}.cu"
        self.program = os.path.join(BUILD, name, "program")
        self.lines, function = {}, ""       # {(function, comment after a line): line number}
        for number, line in enumerate(read(self.file).splitlines(), 1):
            begin = re.search(r"^(?:template <.*> )?__(?:global|device)__ .*?(\w+)\(\w* ?\w*[*&]", line)
            function = begin[1] if begin else function
            comment = re.search(r"\S.*// (.+?)\s*$", line)
            if comment:
                self.lines[function, comment[1]] = number
        figures = os.path.join(BUILD, f"{name}.json")
        run = run_command("make", "-s", "inspect", f"FILE={self.file}", f"JSON={figures}")
        if run.returncode != 0:
            raise RuntimeError(f"make inspect FILE={self.file}: exit code {run.returncode}\n{run.stderr}")
        self.page = read("runs/inspect/report.html") if name == "races" else ""
        self.figures = read_json(figures, "figures")
        self.recording = written(f"{name}.recording.json", read(self.program + ".json"))
        self.raw = {kernel["symbol"]: kernel for kernel in read_recording(self.recording)["kernels"]}

    def kernels(self, name):
        return [kernel for kernel in self.figures["kernels"] if kernel["name"] == name]

    def kernel(self, name):
        return self.kernels(name)[0]

    def line(self, kernel, comment):
        return self.lines[kernel.split("<")[0], comment]

    def sites(self, kernel, comment, access="load", function=None):
        line = self.line(function or kernel, comment)
        return [site for space in ("global", "shared") for site in self.kernel(kernel)[space]
                if (site["line"], site["access"]) == (line, access)]

    def sum(self, kernel, comment, access, *keys, function=None):
        sites = self.sites(kernel, comment, access, function)
        return tuple(sum(site[key] for site in sites) for key in keys)

    def run_again(self, *words):
        """Runs run.py as the Makefile does; returns the process and the figures (None if it wrote none)."""
        figures = os.path.join(BUILD, f"{self.name}.again.json")
        if os.path.exists(figures):
            os.remove(figures)
        run = run_command(sys.executable, "dev/inspect/run.py", self.program, "--json", figures, *words)
        return run, read_json(figures, "figures") if os.path.exists(figures) else None

    def report(self, *words):
        """Runs report.py on the recording; returns the process."""
        return run_command(sys.executable, "dev/inspect/report.py", self.recording, *words)

    def recorded_with(self, name, value):
        """Records with one setting of the emulator or the recorder changed; returns the kernels' figures."""
        recording = f"{self.program}.{name.lower()}-{os.path.basename(value)}.json"
        settings = {"OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": "h100", "INSPECT_OUT": recording,
                    "INSPECT_MODE": "whole", name: value}
        subprocess.run([self.program], env={**os.environ, **settings}, check=True, capture_output=True)
        return report.as_json(Results(read_recording(recording)))["kernels"]


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
    """Yields ((type, *integers), loads, stores) of each launch of a kernel template."""
    for kernel in case.figures["kernels"]:
        kind = re.fullmatch(rf"{name}<(\w+)>", kernel["name"])
        if kind:
            yield (kind[1], *kernel["integers"]), *(
                tuple(sum(site[key] for site in kernel[space] if site["line"] == case.line(name, comment))
                      for key in ("requests", unit, f"least_{unit}")) for comment in ("loads", "stores"))


def test_counts():
    case = CASES["counts"]
    found = {key: (loads, stores) for key, loads, stores in patterns(case, "strided", "shared", "wavefronts")}
    expect_equal(found, {key: (figures, figures if key[2] == 31 else (0, 0, 0)) for key, figures in SHARED.items()},
                 "wavefronts of shared memory equal those calculated by hand, for each type, stride, mask and lanes")
    found = {key: (loads, stores) for key, loads, stores in patterns(case, "gather", "global", "sectors")}
    expect_equal(found, GLOBAL, "sectors of global memory equal those calculated by hand, for each type and pattern")
    keys, lanes = ("requests", "sectors", "least_sectors"), ("requests", "lanes", "sectors")
    for kernel, comment, access, keys, expected, text in [
            ("by_function", "near", "load", keys, (1, 4, 4), "a load in an accessor is counted at its caller's line"),
            ("by_function", "far", "load", keys, (1, 32, 4), "... separately for each line that calls it"),
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
    loads = next(number for number, line in enumerate(read(case.file).splitlines(), 1) if "float load(" in line)
    expect_equal([site["via"] for site in case.sites("by_function", "far")], [[f"{case.file}:{loads}"]],
                 "the accessor's own line is named too")
    expect_equal([case.sum("by_function", *line, "requests", function="exchange") for line in
                  (("loads a", "load"), ("stores b", "store"))], [(1,), (1,)],
                 "accesses in a function with several lines are counted at those lines")
    expect_equal([site["by"] for site in case.sites("atomics", "sum", "store")], ["atomic"],
                 "an atomic is counted at the user's line, not at the emulator's")
    expect_equal((case.kernel("atomics")["launches"], case.kernel("atomics")["recorded_blocks"]), (3, 1),
                 "three launches with the same shape are one entry, recorded once")
    stored = [[kernel["launch"][figure] for figure in ("l2", "partial", "cycles")]
              for symbol, kernel in sorted(case.raw.items()) if "four_words" in symbol]
    expect_equal(stored, [[128, 0, 128], [128, 0, 32], [256, 256, 64], [256, 256, 32]],
                 "adjacent stores of a thread reach L2 at once; those of other warps are a partial store each; L1 looks "
                 "up 4 lines per cycle if they are in different sets")
    alone, with_idle = sorted((kernel["estimate_us"] for kernel in case.kernels("one_thread")))
    expect(150 < alone < with_idle < 1.02 * alone, "idle blocks and warps do not shorten the estimate of a serial loop",
           f"{alone:.1f} and {with_idle:.1f} us")
    raw = next(kernel for symbol, kernel in case.raw.items() if "shared_bytes" in symbol)
    expect_equal((raw["static_shared"], raw["dynamic_shared"]), (480, 128), "static and dynamic shared memory in bytes")


def test_caches():
    case = CASES["counts"]
    for kernel, first, second, text in [
            ("row_twice<1024u>", (128, 0, 128), (128, 128, 0), "the second read of 4 KiB hits in L1"),
            ("row_twice<131072u>", (1 << 14, 0, 1 << 14), (1 << 14, 0, 0), "the second read of 512 KiB hits in L2")]:
        expect_equal([case.sum(kernel, comment, "load", "sectors", "l1_hits", "dram_sectors")
                      for comment in ("first", "second")], [first, second], text)

    def hits_with(registers):
        symbol = next(symbol for symbol in case.raw if "row_twiceILj3072E" in symbol)
        path = written(f"{registers}-registers", json.dumps({symbol: {"registers": registers, "spills": 0}}))
        kernels = case.recorded_with("INSPECT_REGISTERS", os.path.abspath(path))
        sites = next(kernel["global"] for kernel in kernels if kernel["name"] == "row_twice<3072u>")
        return sum(site["l1_hits"] for site in sites if site["line"] == case.line("row_twice", "second"))

    expect_equal((hits_with(32), hits_with(255)), (0, 384),
                 "12 KiB hit in L1 with 8 resident blocks, limited by registers, and miss with 32")
    for kernel, comment, access, keys, expected, text in [
            ("shared_by_blocks", "loads", "load", ("sectors", "dram_sectors"), (8 * 128, 128),
             "4 KiB that 8 blocks read are loaded from memory once"),
            ("stored_twice", "first", "store", ("dram_sectors",), (4,), "a sector stored twice is written to memory"),
            ("stored_twice", "second", "store", ("dram_sectors",), (0,), "... once"),
            ("stored_twice", "loads", "load", ("dram_sectors",), (0,), "loads of stored sectors hit in L2")]:
        expect_equal(case.sum(kernel, comment, access, *keys), expected, text)
    expect(len(case.recorded_with("CUDA_CPU_CARD", "t4")) == len(case.figures["kernels"]),
           "a GPU that reserves no shared memory runs kernels without shared memory")
    figures = case.recorded_with("INSPECT_MODE", "sample")
    sampled = [kernel for kernel in figures if kernel["name"] == "copy"]
    tiles = next(kernel for kernel in figures if kernel["name"] == "rows_and_columns")
    expect_equal((tiles["recorded_blocks"] < 1536, tiles["memory_bytes"]), (True, (24 + 64) << 13),
                 "blocks that share rows and columns load each of them once, also if few blocks are recorded")
    for kernels, text in ((case.kernels("copy"), "copies of 64 KiB and 4 MiB move twice as many bytes"),
                          (sampled, "... also with INSPECT_MODE=sample")):
        expect_equal(sorted(kernel["memory_bytes"] for kernel in kernels), [2 << 16, 2 << 22], text)
    expect(any(kernel["recorded_blocks"] < kernel["grid"][0] for kernel in sampled), "... of which some are recorded")


# ---- races

def pairs(kernel):
    """Returns the races of a kernel: {(memory, line, line)}."""
    return {(race["memory"], *sorted(access["line"] for access in race["accesses"])) for race in kernel["races"]}


def pairs_of(case, name, memory, *comments):
    return {(memory, *sorted((case.line(name, a), case.line(name, b)))) for a, b in comments}


WRITES_READS = [("writes", "reads")]
# {kernel: (what its wrong version lacks, the memory and the lines that race)}
RACES = {
    "neighbour": ("__syncthreads between a store and a load", "shared", WRITES_READS),
    "end_of_loop": ("__syncthreads at the end of a loop", "shared", WRITES_READS),
    "leaves_early": ("__syncthreads after some threads have exited", "shared", WRITES_READS),
    "warps": ("__syncthreads, with __syncwarp in its place", "shared", WRITES_READS),
    "half_a_warp": ("__syncwarp of all lanes, with one of half the lanes in its place", "shared", WRITES_READS),
    "bytes": ("loads of single bytes: it loads a whole word", "shared", WRITES_READS),
    "histogram": ("__syncthreads between clearing and atomicAdd", "shared", [("clears", "adds")]),
    "atomic_and_store": ("an atomic store", "global", [("writes", "writes"), ("writes", "adds")]),
    "product": ("atomicCAS of the value that it loads, with atomicAdd in its place", "global", [("loads", "adds")]),
    "one_word": ("one address per block", "global", [("writes", "writes")]),
    "next_block": ("a new launch between blocks that write and read", "global", WRITES_READS),
    "last_block": ("__threadfence before the count of blocks", "global", WRITES_READS),
    "last_block_of_fences": ("__syncthreads between fences and the count of blocks", "global", WRITES_READS),
    "groups": ("sync() of the block, with that of a tile in its place", "shared", WRITES_READS),
    "copies": ("a wait at a cuda::barrier", "shared", WRITES_READS),
    "stages": ("consumer_wait() of a cuda::pipeline", "shared", WRITES_READS),
    "grids": ("grid.sync(), with __syncthreads in its place", "global", WRITES_READS),
    "flag": ("release order of the store to an atomic", "shared", WRITES_READS),
}
OF_BLOCKS = ("grids", "one_word", "next_block", "last_block", "last_block_of_fences")


def test_races():
    case = CASES["races"]
    for name, (lacks, memory, comments) in RACES.items():
        wrong, right = case.kernel(f"{name}<false>"), case.kernel(f"{name}<true>")
        expect_equal(pairs(wrong), pairs_of(case, name, memory, *comments), f"{name} lacks {lacks}: the race is found")
        sides = [race["accesses"] for race in wrong["races"]]
        expect(all((a["block"] != b["block"]) if name in OF_BLOCKS else
                   a["block"] == b["block"] and a["thread"] != b["thread"] for a, b in sides),
               "... between two " + ("blocks" if name in OF_BLOCKS else "threads of one block"), str(sides))
        expect_equal((right["races"], right["uninitialised"]), ([], []), "... and none in its right version")
    expect_equal([pairs(case.kernel(f"lanes<(Order){n}>")) for n in range(4)],
                 [pairs_of(case, "lanes", "shared", *WRITES_READS), set(), set(), set()],
                 "__syncwarp, a shuffle and a vote each order the accesses of lanes")
    expect_equal([pairs(kernel) for kernel in case.kernels("launches")], [set(), set()], "launches are ordered")
    race = case.kernel("neighbour<false>")["races"][0]
    expect_equal((race["array"], race["address"], race["count"],
                  [(a["access"], a["thread"], a["block"]) for a in race["accesses"]]),
                 ("tile", 4, 2 * 63, [("store", 1, 0), ("load", 0, 0)]),
                 "a race names address, threads, blocks and accesses: thread 1 stores tile[1], thread 0 loads it")
    expect_equal(pairs(case.kernel("two_readers")),
                 pairs_of(case, "two_readers", "shared", ("writes", "even"), ("writes", "odd")),
                 "two lines that load a word both race with a store to it")
    expect_equal([[(a["access"], a["thread"]) for a in race["accesses"]]
                  for race in case.kernel("two_lanes_met")["races"]], [[("store", 31), ("load", 1)]],
                 "a race with several readers names one that is not ordered")
    for name, array, word, count in (("unwritten", "tile", 63, 4), ("unwritten_dynamic", "", 0, 64)):
        wrong, right = case.kernel(f"{name}<false>"), case.kernel(f"{name}<true>")
        expect_equal([(read["accesses"][0]["line"], read["array"], read["address"], read["count"])
                      for read in wrong["uninitialised"]], [(case.line(name, "reads"), array, 4 * word, count)],
                     f"{name}: {count} reads of uninitialised words of shared memory are found")
        expect_equal((wrong["races"], right["uninitialised"]), ([], []), "... without races; none in the right version")
    expect_equal([len(case.kernel(f"reductions<{right}>")["races"]) for right in ("false", "true")], [1, 0],
                 "cub: __syncthreads is needed before its storage is used again")
    expect_equal([kernel["name"] for kernel in case.figures["kernels"] if kernel["out_of_bounds"]], ["late"],
                 "no right access is reported as out of bounds or of the host's memory")
    run, figures = case.run_again("--", "misaligned")
    expect((run.returncode, figures["ended"][:20]) == (1, "a misaligned address"),
           "a misaligned address ends the program with exit code 1", figures["ended"])
    test_late_faults(case)
    natural = {kernel["name"]: pairs(kernel) for kernel in case.figures["kernels"]}
    for seed in "12":
        found = {kernel["name"]: pairs(kernel) for kernel in case.recorded_with("CUDA_CPU_SEED", seed)}
        differ = {name: (found.get(name), natural[name]) for name in natural if found.get(name) != natural[name]}
        expect(not differ, f"the same races are found with the thread order of seed {seed}", str(differ))


def test_late_faults(case):
    """Launch 2 of kernel `late` stores past the end in block 137, launch 3 has a race in the last of its 256 blocks."""
    few = next(kernel for kernel in case.recorded_with("INSPECT_ACCESSES", "8192") if kernel["name"] == "late")
    for kernel, text in ((case.kernel("late"), "all blocks are counted"), (few, "few blocks are counted")):
        expect_equal((pairs(kernel), {race["accesses"][0]["block"] for race in kernel["races"]}),
                     (pairs_of(case, "late", "shared", *WRITES_READS), {255}),
                     f"a race in the last block of the third launch is found: {text}")
        expect_equal([(each["address"], each["accesses"][0]["block"]) for each in kernel["out_of_bounds"]],
                     [(1 << 16, 137)], f"an access out of bounds in a block of the second launch is found: {text}")
    checked = few["checked"]
    first, between, last = (checked[key] for key in ("first", "between", "last"))
    expect(8 <= first == few["recorded_blocks"] < 64 and 4 <= between < 64 and 2 <= last < 64,
           "checked: the first blocks of a launch, some in between and the last ones", str(checked))
    expect(3 <= checked["launches"] < 23 == checked["launches"] + checked["missed_launches"],
           "... and some of each launch, until a limit is reached", str(checked))
    path = f"{case.program}.inspect_accesses-8192.json"
    run = run_command(sys.executable, "dev/inspect/report.py", path, "--check")
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


BOTH = {"hits", "total"}


def test_variables():
    case = CASES["variables"]
    for name, memory, comments in (("updates", "global", [("adds", "adds")]), ("last_block", "global", WRITES_READS)):
        expect_equal([pairs(case.kernel(f"{name}<{right}>")) for right in ("false", "true")],
                     [pairs_of(case, name, memory, *comments), set()],
                     f"{name}: the race is found, and none in the right version with an atomic on a variable")
    for name, comment, arrays in (("updates<false>", "adds", {"total"}), ("two_variables", "on one line", BOTH),
                                  ("either", "in one instruction", BOTH)):
        expect_equal({race["array"] for race in case.kernel(name)["races"]
                      if {access["line"] for access in race["accesses"]} == {case.line(name, comment)}}, arrays,
                     f"races name the variables: {comment}")
    keys = ("requests", "sectors", "least_sectors")
    for comment, expected in [*((row, (1, 4, 4)) for row in ROWS), ("a column", (1, 32, 4)), ("structs", (1, 8, 4))]:
        expect_equal(case.sum("loads", comment, "load", *keys), expected, f"loads of a variable are counted: {comment}")
    expect_equal([site["sectors"] for site in case.sites("tickets", "draws", "store") if site["by"] == "atomic"], [2],
                 "an atomic on a static variable of a function is counted")
    outside = [(each["array"], each["address"], each["accesses"][0]["line"])
               for each in case.kernel("past_the_end")["out_of_bounds"]]
    expect_equal(outside, [(name, at, case.line("past_the_end", comment)) for name, at, comment in (
        ("table", 8192, "one too far"), ("hidden", 128, "stores"), ("managed", -4, "one too early"),
        ("of_template<int>", 128, "of a template"))], "accesses next to a variable are out of bounds, and name it")
    test_out_of_bounds(case)
    out = case.report().stdout
    expect("past_the_end: access out of bounds: index 2048 of an array of type 'float [2048]', byte 8192 of the 8,192 "
           "bytes of table: thread 31 of block 0 loads at" in out and
           out.count("updates<false>: ") == 2 and "updates: the same in 1 more row of the table\n" in out,
           "the same races in two launches of a kernel are reported once", out)


def test_out_of_bounds(case):
    outside = [(each["why"], each["array"], each["address"], each["bytes"], each["accesses"][0]["line"])
               for each in case.kernel("past_arrays")["out_of_bounds"]]
    expect_equal(sorted(outside), sorted((why, array, at, size, case.line("past_arrays", comment))
                                         for why, array, at, size, comment in (
        ("index 64 of an array of type 'float [64]'", "tile", 256, 256, "by index"),
        ("", "tile", 256, 256, "by address"),
        ("", "", 128, 128, "dynamic"), ("index 32 of an array of type 'float [32]'", "", 0, 0, "local"))),
                 "accesses outside of shared and local arrays are found, and name the array or its type")
    run, figures = case.run_again("--", "far")
    far = figures["kernels"][-1]
    ended = figures["ended"].replace("Bus error", "Segmentation fault")
    expect_equal((run.returncode, ended, far["name"], far["estimate_us"],
                  [(each["why"], each["accesses"][0]["line"]) for each in far["out_of_bounds"]]),
                 (1, "by signal Segmentation fault", "far_away", None,
                  [("an address far from any array", case.line("far_away", "far away"))]),
                 "a store that crashes the program is named, without an estimate of the unfinished block")


# ---- PTX instructions

FIRST_READS, COPIES_READS = ("first", "reads"), ("copies", "reads")
# (kernel, version, what is wrong or None, the lines that race)
PTX_RACES = [
    ("copies", "(Copies)0", None, []),
    ("copies", "(Copies)1", "a wait for cp.async after the read", [FIRST_READS, COPIES_READS]),
    ("copies", "(Copies)2", "a wait that leaves one group too many in flight",
     [FIRST_READS, COPIES_READS, ("first", "copies"), ("copies", "copies")]),
    ("copies", "(Copies)3", "a wait for cp.async without a __syncthreads", [FIRST_READS, COPIES_READS]),
    ("hand_over", "(Barriers)0", None, []),
    ("hand_over", "(Barriers)1", "a wait for an mbarrier after the read", WRITES_READS),
    ("hand_over", "(Barriers)2", "an arrival before the read, which releases the tile too early", WRITES_READS),
    ("hand_over", "(Barriers)4", "no __syncthreads after the initialisation of mbarriers",
     [("sets up full", "waits for full"), ("sets up full", "arrives at full"), ("sets up empty", "waits for empty")]),
    ("next_phase", "true", None, []),
    ("next_phase", "false", "a read of a value that is stored after the awaited phase of an mbarrier", WRITES_READS),
    ("named", "true", None, []),
    ("named", "false", "a missing named barrier", WRITES_READS),
    ("ring", "(Ring)0", None, []),
    ("ring", "(Ring)1", "a wait for a TMA copy after the read", [("fills", "reads")]),
    ("ring", "(Ring)3", "a stage released to TMA too early", [("fills", "reads")]),
    ("products", "(Products)0", None, []),
    ("products", "(Products)2", None, []),
    ("products", "(Products)1", "no fence.proxy.async between store and wgmma", [("writes", "multiplies")]),
    ("products", "(Products)3", "no __syncthreads between store and wgmma",
     [("writes", "multiplies"), ("multiplies", "overwrites")]),
    ("products", "(Products)4", "a tile overwritten before wgmma_wait", [("multiplies", "overwrites")]),
]
# If other threads can be two phases ahead, a thread may wait for the wrong phase.
WAITS_LATE = ("waits for empty", "waits for empty")
# Programs that do not finish: (argument, how it ends, kernel, the lines that race before that)
UNFINISHED = [
    ("copies_without_wait", "", "copies<(Copies)4>", [FIRST_READS, COPIES_READS]),
    ("copies_without_commit", "", "copies<(Copies)5>", [FIRST_READS, COPIES_READS]),
    ("hand_over_without_wait", "deadlock", "hand_over<(Barriers)3>", [("writes", "reads"), WAITS_LATE]),
    ("ring_without_empty_wait", "deadlock", "ring<(Ring)2>", [("fills", "fills")]),
    ("products_without_commit", "ended without waiting for a wgmma", "products<(Products)5>",
     [("multiplies", "overwrites")]),
]


def test_ptx():
    case = CASES["ptx"]
    for name, version, wrong, comments in PTX_RACES:
        kernel = case.kernel(f"{name}<{version}>")
        expect_equal(pairs(kernel), pairs_of(case, name, "shared", *comments),
                     f"found: {wrong}" if wrong else f"{name}<{version}> is right: no race is found")
        expect(wrong or not kernel["uninitialised"], "... and no uninitialised read")
    expect_equal([race["why"] for version in (1, 4) for race in case.kernel(f"products<(Products){version}>")["races"]],
                 ["no fence.proxy.async between them", "no synchronisation between them"],
                 "a race message states whether only the fence is missing")
    for argument, end, kernel, comments in UNFINISHED:
        run, figures = case.run_again("--", argument)
        code = 1 if end else 0
        expect(run.returncode == code and end in figures["ended"],
               f"{argument}: exit code {code}, the report names {end!r}",
               f"exit code {run.returncode}: {run.stderr}")
        expect_equal([pairs(each) for each in figures["kernels"] if each["name"] == kernel],
                     [pairs_of(case, kernel.split("<")[0], "shared", *comments)], "... and its races")
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


# ---- machine code

# {kernel: (bytes in flight of a warp, round trips of an iteration)}
IN_FLIGHT = {"chase<int>": (32 * 4, 1), "chase<long long>": (32 * 8, 1), "copy_in_turn": (512, 4),
             "copy_ahead": (512, 1), **{f"copy<{unroll}>": (512 * unroll, 1) for unroll in (1, 2, 4, 8)}}


def test_in_flight():
    case = CASES["in_flight"]
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"       # as in Makefile
    if not os.path.exists(nvcc) or not find_nvdisasm(nvcc):
        print("skipped: loads in flight: nvcc or nvdisasm is not installed")
        return
    for name, expected in IN_FLIGHT.items():
        loop = case.kernel(name)["main_loop"]
        expect_equal((loop["in_flight"], loop["round_trips"]), expected,
                     f"{name}: bytes in flight of a warp, round trips of an iteration")
    for words, found in (
            ([], "<1 of 32 KB"),
            (["--kernel", "copy<8>"], "a warp loads 4,096 bytes in 1 round trip, at most 4,096 in flight")):
        out = case.report(*words, "--sass", case.program + ".sass").stdout
        expect(found in out, f"report.py {' '.join(words)} shows {found}", out)
    for of, text in ({}, "regs, in flight: unknown without nvcc"), ({"k": {}}, "in flight: unknown without nvdisasm"):
        out = case.report("--sass", written("empty.json", json.dumps(of))).stdout
        expect(f"\n{text}\n" in out, f"the report says what is missing: {text}", out)


# ---- the command

LIBRARY = "int main() {}\n#include <thrust/sort.h>\n" + "wrong;\n" * 9


def test_command():
    case = CASES["counts"]
    library = written("library.cu", LIBRARY)
    for file, error in (("missing.cu", "missing.cu"), (library, f"{library}:2:2: error: ")):
        run = run_command("make", "-s", "inspect", f"FILE={file}")
        expect(run.returncode == 2 and "Error 2" in run.stderr and error in run.stderr,
               f"make inspect FILE={file} is rejected with the file's name, exit code 2", run.stderr)
    expect(run.stderr.count("error:") == 1 and "thrust/sort.h: this part of CUB, Thrust, libcu++ or CUTLASS is not" in
           run.stderr, "a library that is not emulated is one error", run.stderr)
    for words, error in ((["--card", "h9000"], "invalid choice: 'h9000'"),
                         (["--kernel", "nothing"], "--kernel nothing: no such kernel was launched; found a_warp_and"),
                         (["--", "nothing"], "launched no kernel")):
        run, _ = case.run_again(*words)
        expect(run.returncode == 2 and error in run.stderr, f"{' '.join(words)} is rejected: {error}, exit code 2",
               f"exit code {run.returncode}: {run.stderr}")
    run, figures = case.run_again("--kernel", "two_ways")
    expect("program (its times are the emulator's, not a GPU's):\n" in run.stdout, "the program's output is marked")
    expect_equal((run.returncode, [kernel["name"] for kernel in figures["kernels"]]), (0, ["two_ways"]),
                 "--kernel two_ways reports that kernel only")
    run, figures = case.run_again("--seconds", "5", "--", "for_long")
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
    lines = read(case.file).splitlines()
    begin = next(i for i, line in enumerate(lines) if "shared_bytes(" in line)
    expect_equal((run.returncode, {line.split()[0] for line in run.stdout.splitlines() if "shared memory: " in line}),
                 (0, {f"{case.file}:{i + 1}" for i in range(begin, begin + 11) if "__syncthreads" in lines[i]}),
                 "--barriers: kernel shared_bytes needs both, because without either there is a race")


# ---- the report

def test_report():
    case = CASES["counts"]
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
    races = CASES["races"]
    out = races.report("--kernel", "neighbour").stdout
    writes, reads = (races.line("neighbour", comment) for comment in ("writes", "reads"))
    sentence = (f"race in shared memory, byte 4 of tile: thread 1 of block 0 stores at {races.file}:{writes}  `tile[",
                f"thread 0 of block 0 loads at {races.file}:{reads}  `out[", "no synchronisation between them (126 ")
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
    test_page(races.page)
    test_mistakes(case)


def test_page(text):
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


def test_mistakes(case):
    missing, broken = os.path.join(BUILD, "nothing.json"), written("broken.json", "{")
    other = written("other.json", "[]")
    for words, error in ((["--sass", missing], f"sass {missing}: No such file"),
                         (["--sass", broken], "not JSON"), (["--html", BUILD], "Is a directory"),
                         (["--costs", missing], f"--costs {missing}: No such file")):
        run = case.report(*words)
        expect(run.returncode == 2 and error in run.stderr, f"{words[0]} is rejected: {error}, exit code 2", run.stderr)
    for path, error in ((missing, "No such file"), (broken, "not JSON"), (other, 'expected a JSON object with')):
        run = run_command(sys.executable, "dev/inspect/report.py", path)
        expect(run.returncode == 2 and error in run.stderr, f"recording {path} is rejected: {error}", run.stderr)
    raw = read_recording(case.recording)
    for key, value, error in (("card", "voodoo", "card 'voodoo': expected one of h100"),
                              ("program", "gone", "gone: No such file")):
        run = run_command(sys.executable, "dev/inspect/report.py",
                          written("changed.json", json.dumps({**raw, key: value})))
        expect(run.returncode == 2 and error in run.stderr, f"a recording with {error} is rejected", run.stderr)
    raw["kernels"] = [kernel for kernel in raw["kernels"] if "two_ways" in kernel["symbol"]]
    raw["kernels"][0]["sites"][0]["stack"] = [4]
    changed = written("changed.json", json.dumps({**raw, "sequence": []}))
    run = run_command(sys.executable, "dev/inspect/report.py", changed, "--kernel", "two_ways")
    expect(run.returncode == 0 and re.search(r"^global .* 0$", run.stdout, re.M), "an unknown line is shown as 0")


# ---- the check

def test_check():
    """Checks a recording of two kernels: by_function, with unnecessary sectors, and a copy of 4 MiB."""
    case = CASES["counts"]
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
    race = next(kernel for symbol, kernel in CASES["races"].raw.items() if "neighbourILb0E" in symbol)["races"][0]
    race = {**race, "accesses": [{**access, "stack": [4]} for access in race["accesses"]]}
    where = f"by_function: {case.file}:{case.line('by_function', 'far')}: sectors are {ratio:.3f} times the minimum"
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
            ("an unnecessary allowance is a finding", ([exact, ("copy", "sectors", 1.5)],), {}, 1, "looser"),
            ("a race cannot be allowed", ([exact],), {"races": [race]}, 1, "race in shared memory"),
            ("an uninitialised read cannot be allowed", ([exact],), {"races": [], "uninitialised": [
                {**race, "accesses": race["accesses"][:1]}]}, 1, "uninitialised read"),
            ("an allowance of unknown kind is rejected", ([("copy", "speed", 1)],), {}, 2, "sectors or wave"),
            ("an allowance without a reason is rejected", ([("copy", "sectors", 1, "")],), {}, 2, "reason"),
            ("traffic equal to the cost line is no finding", ([exact], cost), {"uninitialised": []}, 0, "0 findings"),
            ("4.5 % more is no finding", ([exact], cost, 1.045), {}, 0, "0 findings"),
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


# ---- all parts

PARTS = {"counts": (test_counts, ["counts"]), "caches": (test_caches, ["counts"]), "races": (test_races, ["races"]),
         "variables": (test_variables, ["variables"]), "ptx": (test_ptx, ["ptx"]),
         "in_flight": (test_in_flight, ["in_flight"]), "command": (test_command, ["counts"]),
         "report": (test_report, ["counts", "races"]), "check": (test_check, ["counts", "races"])}
CASES = {}


def main():
    chosen = sys.argv[1:] or list(PARTS)
    os.chdir(ROOT)
    for name in sorted({name for part in chosen for name in PARTS[part][1]}):
        CASES[name] = Case(name)
    for part in chosen:
        try:
            PARTS[part][0]()
        except (LookupError, StopIteration, TypeError) as error:
            expect(False, f"part {part} finishes", repr(error))
    finish()


if __name__ == "__main__":
    main()

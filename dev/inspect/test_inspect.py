#!/usr/bin/env python3
"""Tests of `make inspect`, from a .cu file to the figures: the kernels in cases/ access memory in ways whose requests,
sectors, wavefronts and races are known. No GPU. Closes with "N passed, N failed".

    test_inspect.py [PART ...]      only those parts: shared, global, races, ptx, counts, command
"""
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
import report
from results import Results, recorded_only

BUILD = os.path.join("build", "inspect")
passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


def claim_equal(found, expected, text):
    claim(found == expected, text, f"found {found}, expected {expected}")


# ---- cases

def make_inspect(*words):
    return subprocess.run(["make", "-s", "inspect", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def named_lines(path):
    """{(kernel, the comment behind a line): its number}"""
    names, kernel = {}, ""
    with open(path, encoding="utf-8") as source:
        for number, line in enumerate(source, 1):
            begin = re.search(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(", line)
            kernel = begin[1] if begin else kernel
            comment = re.search(r"\S.*// (.+?)\s*$", line)
            if comment:
                names[kernel, comment[1]] = number
    return names


class Case:
    """A file in cases/, inspected."""

    def __init__(self, name, *words):
        self.name, self.file = name, f"dev/inspect/cases/{name}.cu"
        self.program = os.path.join(BUILD, name, "program")
        self.lines = named_lines(os.path.join(ROOT, self.file))
        figures = os.path.join(BUILD, f"{name}.json")
        self.run = make_inspect(f"FILE={self.file}", f"JSON={figures}", *words)
        if self.run.returncode != 0:
            raise RuntimeError(f"make inspect FILE={self.file}: exit code {self.run.returncode}\n{self.run.stderr}")
        with open(os.path.join(ROOT, figures), encoding="utf-8") as file:
            self.figures = json.load(file)
        with open(os.path.join(ROOT, self.program + ".json"), encoding="utf-8") as file:
            self.raw = recorded_only(json.load(file))

    def kernel(self, name, nth=0):
        return [kernel for kernel in self.figures["kernels"] if kernel["name"] == name][nth]

    def raw_kernel(self, name, nth=0):
        return self.raw["kernels"][self.figures["kernels"].index(self.kernel(name, nth))]

    def line(self, kernel, comment):
        return self.lines[kernel.split("<")[0], comment]

    def sites(self, kernel, comment, access, nth=0):
        """Sites of all memory in the line with that comment."""
        kernel_figures = self.kernel(kernel, nth)
        return [site for space in ("global", "shared") for site in kernel_figures[space]
                if (site["file"], site["line"], site["access"]) == (self.file, self.line(kernel, comment), access)]

    def sum(self, kernel, comment, access, *keys, nth=0):
        sites = self.sites(kernel, comment, access, nth)
        return tuple(sum(site.get(key, 0) for site in sites) for key in keys)

    def with_seed(self, seed):
        """The figures when fibers take their turns in another order."""
        recording = f"{self.program}.seed{seed}.json"
        settings = {"OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": str(seed), "CUDA_CPU_CARD": "h100",
                    "INSPECT_OUT": recording, "INSPECT_MODE": "whole"}
        subprocess.run([self.program], cwd=ROOT, env={**os.environ, **settings}, check=True, capture_output=True)
        with open(os.path.join(ROOT, recording), encoding="utf-8") as file:
            raw = json.load(file)
        raw.update(program=self.raw["program"], sources=self.raw["sources"])
        return report.as_json(Results(recorded_only(raw), root=ROOT))


# ---- shared memory

STRIDES = (1, 2, 3, 4, 8, 16, 32, 33)
WIDTHS = {"float": 4, "float2": 8, "float4": 16}
# Worked out by hand. 64 bits, 3 elements apart: words 0, 6, 12, ... of 16 lanes, in 16 different even banks, and their
# neighbours in the odd ones: a wavefront for each half. 2 apart: banks 0, 4, ..., 28 twice. 128 bits, 4 apart: lanes'
# words begin 16 apart, in banks 0 and 16 only: 4 wavefronts for each quarter of 8 lanes.
BY_HAND = {(4, 1): 1, (4, 2): 2, (4, 3): 1, (4, 4): 4, (4, 8): 8, (4, 16): 16, (4, 32): 32, (4, 33): 1,
           (8, 1): 2, (8, 2): 4, (8, 3): 2, (8, 4): 8, (8, 16): 32, (8, 32): 32,
           (16, 1): 4, (16, 2): 8, (16, 3): 4, (16, 4): 16, (16, 8): 32, (16, 33): 4}


def wavefronts(addresses, size):
    """Of a request: banks are 4 bytes wide and 32; each gives one word at a time, to all that ask for it."""
    count = 0
    lanes_at_once = {4: 32, 8: 16, 16: 8}[max(size, 4)]
    for first in range(0, len(addresses), lanes_at_once):
        words = {word for address in addresses[first:first + lanes_at_once]
                 for word in range(address // 4, (address + size - 1) // 4 + 1)}
        count += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return count


def test_shared():
    case = CASES["shared"]

    def found(kernel, comment="loads", access="load"):
        return case.sum(kernel, comment, access, "requests", "wavefronts", "least_wavefronts")

    claim(all(wavefronts([lane * stride * size for lane in range(32)], size) == count
              for (size, stride), count in BY_HAND.items()), "the rule of banks gives what was worked out by hand")
    for kind, size in WIDTHS.items():
        for stride in STRIDES:
            expected = (1, wavefronts([lane * stride * size for lane in range(32)], size), size // 4)
            kernel = f"strided<{kind}, {stride}>"
            claim_equal((found(kernel, "stores", "store"), found(kernel)), (expected, expected),
                        f"{8 * size} bits, {stride} elements apart: {expected[1]} wavefronts, {expected[2]} at least")
    claim_equal(found("bytes_side_by_side"), (1, 1, 1), "32 bytes side by side: one")
    claim_equal(found("column<32>"), (1, 32, 1), "a column of a tile of 32 x 32 floats: 32-way")
    claim_equal(found("column<33>"), (1, 1, 1), "... of 32 x 33: none")
    claim_equal(found("column<34>"), (1, 2, 1), "... of 32 x 34: 2-way")
    claim_equal(found("column<32>", "stores", "store"), (32, 32, 32), "... and its rows: none, 32 requests")
    claim_equal((found("swizzled_column", "stores", "store"), found("swizzled_column")), ((32, 32, 32), (1, 1, 1)),
                "a tile of 32 x 32 whose columns are at column ^ row: none, neither rows nor columns")
    claim_equal((found("transpose<32>", "stores", "store"), found("transpose<32>")), ((32, 32, 32), (32, 1024, 32)),
                "a transpose of 32 x 32 by 8 warps: 32-way where columns are read")
    claim_equal((found("transpose<33>", "stores", "store"), found("transpose<33>")), ((32, 32, 32), (32, 32, 32)),
                "... with rows padded by one: none")
    claim_equal(found("broadcast"), (1, 1, 1), "all lanes read one word: one")
    claim_equal(found("multicast<1>"), (1, 1, 1), "two words in two banks, each for half of the lanes: one")
    claim_equal(found("multicast<32>"), (1, 2, 1), "two words in one bank: 2-way")
    claim_equal((found("pack", "stores", "store"), found("pack")), ((2, 16, 8), (2, 16, 8)),
                "a pack of 32 bytes: two requests of 128 bits, each 2-way")
    claim_equal(sorted((site["part"], site["bytes_per_lane"], site["wavefronts"]) for site in
                       case.sites("pack", "loads", "load") if "wavefronts" in site), [(0, 16, 8), (1, 16, 8)],
                "... which are told apart")
    claim_equal(found("first_half"), (1, 1, 1), "64 bits by the first 16 lanes: one, and one at least")
    claim_equal(found("even_lanes"), (1, 2, 1), "every other lane, 4 words apart: 2-way")


# ---- global memory

def test_global():
    case = CASES["global"]

    def found(kernel, comment="loads", access="load"):
        return case.sum(kernel, comment, access, "requests", "sectors", "least_sectors")

    claim_equal((found("aligned"), found("aligned", "stores", "store")), ((1, 4, 4), (1, 4, 4)),
                "32 floats side by side, aligned: 4 sectors")
    claim_equal((found("misaligned"), found("misaligned", "stores", "store")), ((1, 5, 4), (1, 5, 4)),
                "... one float further: 5")
    claim_equal(found("strided<2>"), (1, 8, 4), "every second float: 8")
    claim_equal(found("strided<8>"), (1, 32, 4), "every 8th: 32, one for each lane")
    claim_equal(found("strided<32>"), (1, 32, 4), "every 32nd: 32")
    claim_equal(found("reversed"), (1, 4, 4), "in reversed order: 4")
    claim_equal(found("scattered"), (1, 32, 4), "scattered: 32")
    claim_equal(found("broadcast"), (1, 1, 1), "all lanes the same: 1")
    claim_equal(found("packs"), (1, 16, 16), "packs of 128 bits: 16")
    claim_equal(found("wide_packs"), (2, 64, 32), "packs of 256 bits: two requests, each of 32 half sectors")
    claim_equal(found("bytes"), (1, 1, 1), "32 bytes: 1")
    claim_equal(found("first_half"), (1, 2, 2), "the first 16 lanes: 2")
    claim_equal(found("even_lanes"), (1, 4, 2), "every other lane: 4, where 2 would do")
    claim_equal(found("left_early"), (1, 1, 1), "5 lanes, the others have left: 1")
    claim_equal((found("by_accessor", "near"), found("by_accessor", "far")), ((1, 4, 4), (1, 32, 4)),
                "a function that only loads: its callers' lines are told apart")
    claim_equal([site["via"] for site in case.sites("by_accessor", "far", "load")],
                [[f"{case.file}:{line_of(case, 'float load(')}"]],
                "... and its own line is named beside")
    claim_equal((found("sum_of_packs", "adds"), found("sum_of_packs", "adds", "store")), ((2, 32, 32), (1, 16, 16)),
                "a + b of packs, by a function that takes them by value: two loads, a store")
    claim_equal([found("packs_by_value", comment, access) for comment in ("once", "again")
                 for access in ("load", "store")], [(2, 64, 32)] * 4, "a longer function that takes and gives packs: all")
    test_sgemm(found)
    test_registers(case, found)
    test_caches(case)
    claim_equal((case.sum("counted", "whole", "store", "requests", "lanes", "sectors"),
                 case.sum("counted", "sum", "store", "requests", "lanes", "sectors")), ((1, 32, 1), (1, 32, 4)),
                "atomics of whole and of floating-point numbers: one request each")
    claim_equal([site["by"] for site in case.sites("counted", "sum", "store")], ["atomic"], "... by atomic")
    claim_equal((case.kernel("counted")["launches"], case.kernel("counted")["recorded_blocks"]), (3, 1),
                "three launches of one kernel are one, recorded once")


def line_of(case, text):
    with open(os.path.join(ROOT, case.file), encoding="utf-8") as source:
        return next(number for number, line in enumerate(source, 1) if text in line)


def test_sgemm(found):
    """32 x 32 x 32. By rows: each of 32 warps has 32 requests for a column of a, and for one element of b."""
    claim_equal((found("sgemm_by_rows", "of a"), found("sgemm_by_rows", "of b"),
                 found("sgemm_by_rows", "of c", "store")), ((1024, 32 * 1024, 4096), (1024, 1024, 1024), (32, 1024, 128)),
                "a product where lanes have a row each: 32 sectors a request of a, 1 of b, 32 of c")
    claim_equal((found("sgemm_by_columns", "of a"), found("sgemm_by_columns", "of b"),
                 found("sgemm_by_columns", "of c", "store")), ((1024, 1024, 1024), (1024, 4096, 4096), (32, 128, 128)),
                "... a column each: 1 of a, 4 of b, 4 of c")
    # 4 blocks of 8 warps, 2 tiles each; a warp has two rows of 16 floats, each of 2 sectors.
    claim_equal((found("sgemm_tiled", "of a"), found("sgemm_tiled", "of b"), found("sgemm_tiled", "of c", "store")),
                ((64, 256, 256), (64, 256, 256), (32, 128, 128)), "... by tiles of 16 x 16: each element twice")


def test_registers(case, found):
    claim_equal(found("square"), (1, 4, 4), "a[i] * a[i]: loaded once")
    claim_equal(found("again_in_a_loop"), (1, 4, 4), "loaded in a loop that stores nothing: once")
    claim_equal(found("again_after_stores"), (3, 12, 12), "in a loop that stores: each time")
    claim_equal((found("again_after_a_store", "before"), found("again_after_a_store", "after")), ((1, 4, 4), (1, 4, 4)),
                "in two lines with a store between: in both")
    claim_equal(found("again_after_a_barrier"), (3, 12, 12), "in a loop with a barrier: each time")


def test_caches(case):
    claim_equal((case.sum("row_twice", "first", "load", "sectors", "l1_hits", "dram_sectors"),
                 case.sum("row_twice", "second", "load", "sectors", "l1_hits", "dram_sectors")),
                ((128, 0, 128), (128, 128, 0)),
                "a row of 4 KiB, read again: from L1")
    claim_equal((case.sum("long_row_twice", "first", "load", "sectors", "l1_hits", "dram_sectors"),
                 case.sum("long_row_twice", "second", "load", "sectors", "l1_hits", "dram_sectors")),
                ((1 << 14, 0, 1 << 14), (1 << 14, 0, 0)), "512 KiB, read again: from L2")
    claim_equal(case.sum("shared_by_blocks", "loads", "load", "sectors", "dram_sectors"), (8 * 128, 128),
                "4 KiB that 8 blocks read come from memory once")
    for nth, elements in enumerate((64 * 256, 4096 * 256)):
        claim_equal(case.kernel("copy", nth)["memory_bytes"], 8 * elements,
                    f"a copy of {4 * elements} bytes moves {4 * elements} + {4 * elements}")
    claim(case.kernel("copy", 1)["recorded_blocks"] < 4096, "... the large one as its first blocks tell")
    traffic = case.raw_kernel("broadcast")["traffic"]
    claim_equal((traffic["asked_load"], traffic["distinct_load"], traffic["l2_load"]), (128, 4, 32),
                "all lanes the same word: 128 bytes asked for, 4 different ones, 32 moved")
    traffic = case.raw_kernel("shared_by_blocks")["traffic"]
    claim_equal((traffic["asked_load"], traffic["distinct_load"], traffic["distinct_store"]), (8 * 4096, 4096, 8192),
                "bytes that differ are counted over all blocks")
    claim_equal((case.sum("stored_twice", "first", "store", "dram_sectors"),
                 case.sum("stored_twice", "second", "store", "dram_sectors")), ((4,), (0,)),
                "what is stored twice goes to memory once")
    claim_equal(case.sum("stored_then_loaded", "loads", "load", "dram_sectors"), (0,),
                "what was stored is loaded from L2")


# ---- races

def pairs(kernel):
    """The races of a kernel's figures: memory and the two lines."""
    return {(race["memory"], *sorted((race["line"], race["other_line"]))) for race in kernel["races"]}


# What each wrong version lacks, the lines that race, whether threads of different blocks do, and accesses by name.
RACES = {
    "neighbour": ("__syncthreads between store and load", "shared", "writes", "reads"),
    "end_of_loop": ("__syncthreads at the end of a loop", "shared", "writes", "reads"),
    "double_buffer": ("a turn of the barrier of a double buffer", "shared", "writes", "reads"),
    "flag": ("__syncthreads behind a __shared__ flag", "shared", "writes", "reads"),
    "leaves_early": ("__syncthreads where some threads have left", "shared", "writes", "reads"),
    "halves": ("__syncthreads in the last steps of a reduction", "shared", "adds", "reads"),
    "lanes": ("__syncwarp", "shared", "writes", "reads"),
    "warps": ("__syncthreads where there is a __syncwarp", "shared", "writes", "reads"),
    "half_a_warp": ("__syncwarp of all lanes where there is one of half", "shared", "writes", "reads"),
    "one_word": ("a place for each block", "global", "writes", "writes"),
    "within_block": ("__syncthreads between store and load of global memory", "global", "writes", "reads"),
    "next_block": ("a kernel of its own for what other blocks have written", "global", "writes", "reads"),
    "histogram": ("__syncthreads between clearing and atomicAdd", "shared", "clears", "adds"),
    "last_block": ("__threadfence before the count of blocks", "global", "writes", "reads"),
    "last_block_of_fences": ("__syncthreads between fences and the count of blocks", "global", "writes", "reads"),
}
OF_BLOCKS = ("one_word", "next_block", "last_block", "last_block_of_fences")


def test_races():
    case = CASES["races"]
    for name, (lacks, memory, *comments) in RACES.items():
        wrong, right = case.kernel(f"{name}<false>"), case.kernel(f"{name}<true>")
        claim_equal(pairs(wrong), {(memory, *sorted(case.line(name, comment) for comment in comments))},
                    f"it is found that {name} lacks {lacks}")
        races = wrong["races"]
        claim(all(race["file"] == race["other_file"] == case.file and
                  (race["blocks"][0] != race["blocks"][1]) == (name in OF_BLOCKS) and
                  (name in OF_BLOCKS or race["threads"][0] != race["threads"][1]) for race in races),
              "... between two " + ("blocks" if name in OF_BLOCKS else "threads of one block"))
        claim_equal((right["races"], right["uninitialised"]), ([], []), "... and nothing where it does not")
    test_single_races(case)
    test_without_races(case)
    test_unwritten(case)
    test_seeds(case)


def test_single_races(case):
    race = case.kernel("neighbour<false>")["races"][0]
    claim_equal((race["threads"], race["blocks"], race["accesses"], race["count"]),
                ([1, 0], [0, 0], ["store", "load"], 2 * 63),
                "a race names threads, blocks, accesses, and how often: thread 1 stores what thread 0 has loaded")
    lines = case.line("atomic_and_store", "writes"), case.line("atomic_and_store", "adds")
    claim_equal(pairs(case.kernel("atomic_and_store<false>")),
                {("global", lines[0], lines[0]), ("global", *lines)}, "a plain store races with atomics, and with itself")
    claim_equal(case.kernel("atomic_and_store<true>")["races"], [], "... an atomic one does not")
    claim_equal(pairs(case.kernel("byte_in_a_word")),
                {("shared", case.line("byte_in_a_word", "writes"), case.line("byte_in_a_word", "reads"))},
                "a byte races with the word that it is in")
    write = case.line("two_readers", "writes")
    claim_equal(pairs(case.kernel("two_readers")), {("shared", case.line("two_readers", "even"), write),
                                                    ("shared", case.line("two_readers", "odd"), write)},
                "two lines that read a word both race with a store to it")


def test_without_races(case):
    for name, text in (("by_shuffle", "a shuffle orders what its lanes do"), ("by_vote", "a vote does"),
                       ("bytes_of_a_word", "bytes side by side do not race"),
                       ("halves_of_a_word", "nor do 16 bits beside 16 bits"),
                       ("first_kernel", "a kernel that writes"),
                       ("second_kernel", "... and the next one, which reads it in other blocks, do not race"),
                       ("only_atomics", "atomics do not race with each other"),
                       ("last_block_of_many", "one thread's fence behind a barrier stands for all threads of its block")):
        claim_equal(pairs(case.kernel(name)), set(), text)


def test_unwritten(case):
    def reads(kernel):
        return [(read["file"], read["line"], read["count"]) for read in case.kernel(kernel)["uninitialised"]]

    for name, count, text in (("unwritten", 4, "4 words of shared memory that nobody wrote are read"),
                              ("unwritten_dynamic", 64, "... 64 of dynamic shared memory")):
        claim_equal(reads(f"{name}<false>"), [(case.file, case.line(name, "reads"), count)], text)
        claim_equal(reads(f"{name}<true>"), [], "... and nothing is said where they were written")
    claim_equal(case.kernel("unwritten<false>")["races"], [], "... which is no race")


def test_seeds(case):
    natural = {kernel["name"]: pairs(kernel) for kernel in case.figures["kernels"]}
    for seed in (1, 2, 3):
        found = {kernel["name"]: pairs(kernel) for kernel in case.with_seed(seed)["kernels"]}
        differ = {name: (found[name], natural[name]) for name in natural if found.get(name) != natural[name]}
        claim(not differ, f"the same races when threads take turns in the order of seed {seed}", str(differ))


# ---- all of it

PARTS = {"shared": (test_shared, ["shared"]), "global": (test_global, ["global"]), "races": (test_races, ["races"])}
CASES = {}


def main():
    chosen = sys.argv[1:] or list(PARTS)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        print(f"test_inspect.py: no part {unknown[0]}; expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    subprocess.run(["make", "-s", os.path.join(BUILD, "recorder.o")], cwd=ROOT, check=True)
    names = sorted({name for part in chosen for name in PARTS[part][1]})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        CASES.update(zip(names, pool.map(Case, names)))
    for part in chosen:
        PARTS[part][0]()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

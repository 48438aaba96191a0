#!/usr/bin/env python3
"""Tests of `make inspect`, from a .cu file to the figures: the kernels in cases/ access memory in ways whose requests,
sectors, wavefronts and races are known. No GPU.

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
sys.path.append(os.path.join(HERE, "..", "tests"))
import report
from claims import claim, claim_equal, finish
from results import Results, read_json, read_recording

BUILD = os.path.join("build", "inspect")


# ---- cases

def run_command(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def make_inspect(*words):
    return run_command("make", "-s", "inspect", *words)


def named_lines(path):
    """{(kernel, the comment after a line): its number}"""
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

    def __init__(self, name):
        self.name, self.file = name, f"dev/inspect/cases/{name}.cu"
        self.program = os.path.join(BUILD, name, "program")
        self.lines = named_lines(self.file)
        figures = os.path.join(BUILD, f"{name}.json")
        run = make_inspect(f"FILE={self.file}", f"JSON={figures}")
        if run.returncode != 0:
            raise RuntimeError(f"make inspect FILE={self.file}: exit code {run.returncode}\n{run.stderr}")
        self.figures = read_json(figures, "figures")
        self.raw = read_recording(self.program + ".json")

    def kernel(self, name, nth=0):
        return [kernel for kernel in self.figures["kernels"] if kernel["name"] == name][nth]

    def raw_kernel(self, name):
        return self.raw["kernels"][self.figures["kernels"].index(self.kernel(name))]

    def line(self, kernel, comment):
        return self.lines[kernel.split("<")[0], comment]

    def sites(self, kernel, comment, access):
        """Accesses to all memory in the line with that comment."""
        line = self.line(kernel, comment)
        return [site for space in ("global", "shared") for site in self.kernel(kernel)[space]
                if (site["file"], site["line"], site["access"]) == (self.file, line, access)]

    def sum(self, kernel, comment, access, *keys):
        sites = self.sites(kernel, comment, access)
        return tuple(sum(site.get(key, 0) for site in sites) for key in keys)

    def run_again(self, *words):
        """run.py, as the Makefile calls it, and the figures that it writes, if it does."""
        figures = os.path.join(BUILD, f"{self.name}.again.json")
        if os.path.exists(figures):
            os.remove(figures)
        run = run_command(sys.executable, "dev/inspect/run.py", self.program, "--json", figures, *words)
        return run, read_json(figures, "figures") if os.path.exists(figures) else None

    def recorded_with(self, name, value):
        """The figures under another setting of the emulator or of the recorder."""
        recording = f"{self.program}.{name.lower()}-{os.path.basename(value)}.json"
        settings = {"OMP_NUM_THREADS": "1", "CUDA_CPU_SEED": "0", "CUDA_CPU_CARD": "h100", "INSPECT_OUT": recording,
                    "INSPECT_MODE": "whole", name: value}
        subprocess.run([self.program], env={**os.environ, **settings}, check=True, capture_output=True)
        return report.as_json(Results(read_recording(recording)))


# ---- patterns of accesses, with the rules of banks and sectors

SIZES = {"char": 1, "float": 4, "float2": 8, "float4": 16, "Pack": 32}
# Worked out by hand: (bytes, stride): wavefronts. 64 bits, stride 3: words 0, 6, 12, ... of 16 lanes, in 16 different
# even banks, and their neighbours in the odd ones: a wavefront for each half. Stride 2: banks 0, 4, ..., 28 twice. 128
# bits, stride 4: lanes' words begin 16 words from each other, in banks 0 and 16 only: 4 wavefronts for each 8 lanes.
BY_HAND = {(4, 1): 1, (4, 2): 2, (4, 3): 1, (4, 4): 4, (4, 8): 8, (4, 16): 16, (4, 32): 32, (4, 33): 1,
           (8, 1): 2, (8, 2): 4, (8, 3): 2, (8, 4): 8, (8, 16): 32, (8, 32): 32,
           (16, 1): 4, (16, 2): 8, (16, 3): 4, (16, 4): 16, (16, 8): 32, (16, 33): 4}
# stride, offset, flip, mask and lanes of a gather of floats: its sectors, and the least.
SECTORS_BY_HAND = {
    (1, 0, 0, 31, 0xffffffff): (4, 4), (1, 1, 0, 31, 0xffffffff): (5, 4), (1, 8, 0, 31, 0xffffffff): (4, 4),
    (2, 0, 0, 31, 0xffffffff): (8, 4), (8, 0, 0, 31, 0xffffffff): (32, 4), (100, 0, 0, 31, 0xffffffff): (32, 4),
    (1, 0, 31, 31, 0xffffffff): (4, 4), (1, 0, 0, 0, 0xffffffff): (1, 1), (1, 0, 0, 31, 0x0000ffff): (2, 2),
    (1, 0, 0, 31, 0x55555555): (4, 2)}


def parts(addresses, size):
    """The requests of lanes' addresses: what is wider than 16 bytes is several."""
    return [({lane: at + part for lane, at in addresses.items()}, min(size, 16)) for part in range(0, size, 16)]


def wavefronts(addresses, size):
    """(done, least) of a request: banks are 4 bytes wide and 32; each gives one word at a time, to all that ask for it.
    Lanes go together as far as 128 bytes reach."""
    done, least, together = 0, 0, {4: 32, 8: 16, 16: 8}[max(size, 4)]
    for first in range(0, 32, together):
        words = {word for lane, at in addresses.items() if first <= lane < first + together
                 for word in range(at // 4, (at + size - 1) // 4 + 1)}
        done += max(sum(word % 32 == bank for word in words) for bank in range(32))
        least += bool(words)
    return done, least


def sectors(addresses, size):
    touched = {sector for at in addresses.values() for sector in range(at // 32, (at + size - 1) // 32 + 1)}
    return len(touched), -(-len(set(addresses.values())) * size // 32)


def expected_of(rule, elements, size):
    """(requests, done, least). elements: {lane: element of so many bytes}"""
    requests = [rule(*request) for request in parts({lane: at * size for lane, at in elements.items()}, size)]
    return len(requests), sum(done for done, _ in requests), sum(least for _, least in requests)


def active(lanes):
    return [lane for lane in range(32) if lanes >> lane & 1]


def patterns(case, name):
    """(type, bytes, integers, figures of a comment and access) of each launch of a template."""
    for nth, kernel in enumerate(case.figures["kernels"]):
        kind = re.fullmatch(rf"{name}<(\w+)>", kernel["name"])
        if kind:
            def found(comment, access, kernel=kernel):
                line, space = case.line(name, comment), "shared" if name == "strided" else "global"
                unit = "wavefronts" if space == "shared" else "sectors"
                sites = [site for site in kernel[space] if (site["line"], site["access"]) == (line, access)]
                return tuple(sum(site[key] for site in sites) for key in ("requests", unit, f"least_{unit}"))
            yield kind[1], SIZES[kind[1]], tuple(kernel["integers"]), found


def test_shared():
    case = CASES["shared"]
    claim(all(wavefronts({lane: lane * stride * size for lane in range(32)}, size)[0] == count
              for (size, stride), count in BY_HAND.items()), "the rule of banks gives what was worked out by hand")
    launches = list(patterns(case, "strided"))
    claim_equal(len(launches), 3 * 9 + 7, "patterns of shared memory")
    for kind, size, (stride, mask, lanes), found in launches:
        expected = expected_of(wavefronts, {lane: (lane & mask) * stride for lane in active(lanes)}, size)
        claim_equal([found("loads", "load"), found("stores", "store")],
                    [expected, expected if mask == 31 else (0, 0, 0)],
                    f"{kind}, stride {stride}, lane & {mask}, lanes {lanes:08x}: {expected[1]} wavefronts, {expected[2]} "
                    "at least")

    def transposed(kernel, comment, access):
        return case.sum(kernel, comment, access, "requests", "wavefronts", "least_wavefronts")

    for kernel, loads, text in (("transpose<32u, false>", 1024, "a transpose of 32 x 32: columns are 32-way"),
                                ("transpose<33u, false>", 32, "... with rows padded by one: no conflicts"),
                                ("transpose<32u, true>", 32, "... swizzled: no conflicts")):
        claim_equal((transposed(kernel, "stores", "store"), transposed(kernel, "loads", "load")),
                    ((32, 32, 32), (32, loads, 32)), text)


# ---- global memory

def test_global():
    case = CASES["global"]

    def found(kernel, comment="loads", access="load"):
        return case.sum(kernel, comment, access, "requests", "sectors", "least_sectors")

    launches = list(patterns(case, "gather"))
    floats = {integers: figures("loads", "load") for kind, _, integers, figures in launches if kind == "float"}
    claim_equal({integers: floats.get(integers) for integers in SECTORS_BY_HAND},
                {integers: (1, *expected) for integers, expected in SECTORS_BY_HAND.items()}, "sectors worked out by hand")
    claim_equal(len(launches), 17, "patterns of global memory")
    for kind, size, (stride, offset, flip, mask, lanes), figures in launches:
        expected = [expected_of(sectors, {lane: at(lane) for lane in active(lanes)}, size)
                    for at in (lambda lane: ((lane & mask) ^ flip) * stride + offset, lambda lane: lane + offset)]
        claim_equal([figures("loads", "load"), figures("stores", "store")], expected,
                    f"{kind}, stride {stride}, offset {offset}, (lane & {mask}) ^ {flip}, lanes {lanes:08x}: "
                    f"{expected[0][1]} sectors, {expected[0][2]} at least")
    for kernel, comment, access, expected, text in [
            ("left_early", "loads", "load", (1, 1, 1), "5 lanes, the others have ended: 1 sector"),
            ("by_accessor", "near", "load", (1, 4, 4), "a function that only loads: its callers' lines are told apart"),
            ("by_accessor", "far", "load", (1, 32, 4), "... the other line"),
            ("sum_of_packs", "adds", "load", (2, 32, 32), "a + b of packs, by a function that takes values: two loads"),
            ("sum_of_packs", "adds", "store", (1, 16, 16), "... and a store"),
            # 32 x 32 x 32: 4 blocks of 8 warps have 2 tiles each; a warp has two rows of 16 floats, each of 2 sectors.
            ("sgemm_tiled", "of a", "load", (64, 256, 256), "a product by tiles of 16 x 16, each element twice: a"),
            ("sgemm_tiled", "of b", "load", (64, 256, 256), "... b"),
            ("sgemm_tiled", "of c", "store", (32, 128, 128), "... c"),
            ("square", "loads", "load", (1, 4, 4), "a[i] * a[i]: loaded once"),
            ("again<(Between)0>", "loads", "load", (1, 4, 4), "loaded in a loop that stores nothing: once"),
            ("again<(Between)1>", "loads", "load", (3, 12, 12), "in a loop that stores: each time"),
            ("again<(Between)2>", "loads", "load", (1, 4, 4), "in a loop that stores to shared memory: once"),
            ("again<(Between)3>", "loads", "load", (3, 12, 12), "in a loop with a barrier: each time"),
            ("again<(Between)4>", "loads", "load", (3, 12, 12), "... with a __threadfence: each time"),
            ("again_after_a_store", "before", "load", (1, 4, 4), "in two lines with a store between: in the first"),
            ("again_after_a_store", "after", "load", (1, 4, 4), "... and in the second")]:
        claim_equal(found(kernel, comment, access), expected, text)
    claim_equal([site["via"] for site in case.sites("by_accessor", "far", "load")],
                [[f"{case.file}:{line_of(case, 'float load(')}"]], "an accessor's own line is named too")
    claim_equal([found("packs_by_value", comment, access) for comment in ("once", "again")
                 for access in ("load", "store")], [(2, 64, 32)] * 4, "a longer function, of packs of 32 bytes: all")
    test_caches(case)
    claim_equal((case.sum("counted", "whole", "store", "requests", "lanes", "sectors"),
                 case.sum("counted", "sum", "store", "requests", "lanes", "sectors")), ((1, 32, 1), (1, 32, 4)),
                "atomics of integers and of floating-point numbers: one request each")
    claim_equal([site["by"] for site in case.sites("counted", "sum", "store")], ["atomic"], "... by atomic")
    claim_equal((case.kernel("counted")["launches"], case.kernel("counted")["recorded_blocks"]), (3, 1),
                "three launches of one kernel are one, recorded once")


def line_of(case, text):
    with open(case.file, encoding="utf-8") as source:
        return next(number for number, line in enumerate(source, 1) if text in line)


def test_caches(case):
    for kernel, first, second, text in [
            ("row_twice<1024u>", (128, 0, 128), (128, 128, 0), "a row of 4 KiB, read again: from L1"),
            ("row_twice<131072u>", (1 << 14, 0, 1 << 14), (1 << 14, 0, 0), "512 KiB, read again: from L2")]:
        claim_equal([case.sum(kernel, comment, "load", "sectors", "l1_hits", "dram_sectors")
                     for comment in ("first", "second")], [first, second], text)

    def hits_with(registers):
        path = os.path.join(BUILD, f"{registers}-registers")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({case.raw_kernel("row_twice<3072u>")["symbol"]: {"registers": registers, "spills": 0}}, file)
        kernels = case.recorded_with("INSPECT_REGISTERS", path)["kernels"]
        sites = next(kernel["global"] for kernel in kernels if kernel["name"] == "row_twice<3072u>")
        return sum(site["l1_hits"] for site in sites if site["line"] == case.line("row_twice", "second"))

    claim_equal((hits_with(32), hits_with(255)), (0, 384),
                "one of 12 KiB: from L1 where registers leave room for 8 blocks, not for 32")
    for kernel, comment, access, keys, expected, text in [
            ("shared_by_blocks", "loads", "load", ("sectors", "dram_sectors"), (8 * 128, 128),
             "4 KiB that 8 blocks read come from memory once"),
            ("stored_twice", "first", "store", ("dram_sectors",), (4,), "what is stored twice goes to memory once"),
            ("stored_twice", "second", "store", ("dram_sectors",), (0,), "... not again"),
            ("stored_then_loaded", "loads", "load", ("dram_sectors",), (0,), "what was stored is loaded from L2")]:
        claim_equal(case.sum(kernel, comment, access, *keys), expected, text)
    claim_equal([case.kernel("copy", nth)["memory_bytes"] for nth in (0, 1)], [2 << 16, 2 << 22],
                "copies of 64 KiB and of 4 MiB move twice that")
    sampled = [kernel for kernel in case.recorded_with("INSPECT_MODE", "sample")["kernels"] if kernel["name"] == "copy"]
    claim([kernel["memory_bytes"] for kernel in sampled] == [2 << 16, 2 << 22] and
          sampled[1]["recorded_blocks"] < sampled[1]["grid"][0], "... also if only a few of the blocks run")


# ---- races

def pairs(kernel):
    """The races of a kernel's figures: memory and the two lines."""
    return {(race["memory"], *sorted((race["line"], race["other_line"]))) for race in kernel["races"]}


# What each wrong version lacks, and which memory and lines then race.
RACES = {
    "neighbour": ("__syncthreads between store and load", "shared", "writes", "reads"),
    "end_of_loop": ("__syncthreads at the end of a loop", "shared", "writes", "reads"),
    "leaves_early": ("__syncthreads where some threads have left", "shared", "writes", "reads"),
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
    claim_equal((race["array"], race["address"], race["threads"], race["blocks"], race["accesses"], race["count"]),
                ("tile", 4, [1, 0], [0, 0], ["store", "load"], 2 * 63),
                "a race names the place, threads, blocks, accesses: thread 1 stores tile[1], which thread 0 has loaded")
    lines = case.line("atomic_and_store", "writes"), case.line("atomic_and_store", "adds")
    claim_equal(pairs(case.kernel("atomic_and_store<false>")),
                {("global", lines[0], lines[0]), ("global", *lines)},
                "a plain store races with atomics, and with itself")
    claim_equal(case.kernel("atomic_and_store<true>")["races"], [], "... an atomic one does not")
    claim_equal(pairs(case.kernel("byte_in_a_word")),
                {("shared", case.line("byte_in_a_word", "writes"), case.line("byte_in_a_word", "reads"))},
                "a byte races with the word that it is in")
    write = case.line("two_readers", "writes")
    claim_equal(pairs(case.kernel("two_readers")), {("shared", case.line("two_readers", "even"), write),
                                                    ("shared", case.line("two_readers", "odd"), write)},
                "two lines that read a word both race with a store to it")
    claim_equal([(race["accesses"], race["threads"]) for race in case.kernel("two_lanes_met")["races"]],
                [(["store", "load"], [31, 1])], "of many readers one is named that is not ordered")


def test_without_races(case):
    for name, text in (("by_shuffle", "a shuffle orders what its lanes do"), ("by_vote", "a vote does"),
                       ("bytes_of_a_word", "bytes side by side do not race"),
                       ("first_kernel", "a kernel that writes"),
                       ("second_kernel", "... and the next one, which reads it in other blocks, do not race"),
                       ("only_atomics", "atomics do not race with each other"),
                       ("last_block_of_many", "one thread's fence after a barrier covers its block's threads")):
        claim_equal(pairs(case.kernel(name)), set(), text)


def test_unwritten(case):
    def reads(kernel):
        return [(read["file"], read["line"], read["array"], read["address"], read["count"])
                for read in case.kernel(kernel)["uninitialised"]]

    for name, array, word, count, text in (
            ("unwritten", "tile", 63, 4, "4 uninitialised words of shared memory are read"),
            ("unwritten_dynamic", "", 0, 64, "... 64 of dynamic shared memory")):
        claim_equal(reads(f"{name}<false>"), [(case.file, case.line(name, "reads"), array, 4 * word, count)], text)
        claim_equal(reads(f"{name}<true>"), [], "... and nothing is said where they were written")
    claim_equal(case.kernel("unwritten<false>")["races"], [], "... which is no race")


def test_seeds(case):
    natural = {kernel["name"]: pairs(kernel) for kernel in case.figures["kernels"]}
    for seed in "123":
        found = {kernel["name"]: pairs(kernel) for kernel in case.recorded_with("CUDA_CPU_SEED", seed)["kernels"]}
        differ = {name: (found[name], natural[name]) for name in natural if found.get(name) != natural[name]}
        claim(not differ, f"the same races when threads take turns in the order of seed {seed}", str(differ))


# ---- instructions of PTX

def ptx_lines(case, kernel, *comments):
    return {("shared", *sorted((case.line(kernel, a), case.line(kernel, b)))) for a, b in comments}


# Kernels, their versions by number, what is wrong, and which lines then race.
PTX_RACES = [
    ("copies", "(Copies)1", "cp.async waited for after the read", [("first", "reads"), ("copies", "reads")]),
    ("copies", "(Copies)2", "a wait that leaves one group too many under way",
     [("first", "reads"), ("copies", "reads"), ("first", "copies"), ("copies", "copies")]),
    ("copies", "(Copies)3", "cp.async waited for by its thread only: no __syncthreads",
     [("first", "reads"), ("copies", "reads")]),
    ("hand_over", "(Barriers)1", "an mbarrier waited for after the read", [("writes", "reads")]),
    ("hand_over", "(Barriers)2", "an arrival before the read: the tile is given back too early", [("writes", "reads")]),
    ("hand_over", "(Barriers)4", "no __syncthreads after the set-up of mbarriers",
     [("sets up full", "waits for full"), ("sets up full", "arrives at full"), ("sets up empty", "waits for empty")]),
    ("next_phase", "false", "a read of what is stored only after the phase of an mbarrier that is waited for",
     [("writes", "reads")]),
    ("named", "false", "a named barrier that is missing", [("writes", "reads")]),
    ("ring", "(Ring)1", "the copy engine's barrier waited for after the read", [("fills", "reads")]),
    ("ring", "(Ring)3", "a stage given back to the copy engine too early", [("fills", "reads")]),
    ("products", "(Products)1", "no fence.proxy.async between store and wgmma", [("writes", "multiplies")]),
    ("products", "(Products)3", "no __syncthreads between store and wgmma", [("writes", "multiplies"),
                                                                             ("multiplies", "overwrites")]),
    ("products", "(Products)4", "a tile overwritten before wgmma_wait", [("multiplies", "overwrites")]),
]
RIGHT_PTX = [("copies<(Copies)0>", "cp.async in two stages"),
             ("hand_over<(Barriers)0>", "a tile handed over by mbarriers"),
             ("next_phase<true>", "what is stored before a phase of an mbarrier ends"),
             ("named<true>", "a named barrier of two warps of four"),
             ("ring<(Ring)0>", "the copy engine's ring"),
             ("products<(Products)0>", "store, fence, barrier, wgmma, wait, store")]
# A thread that lets others go two phases further may wait for the wrong one.
WAITS_LATE = ("waits for empty", "waits for empty")
# The program's argument, how it ends, the kernel, and the lines that race nevertheless.
UNFINISHED = [
    ("copies_without_wait", "ended without waiting for a copy_async", "copies<(Copies)4>",
     [("first", "reads"), ("copies", "reads")]),
    ("copies_without_commit", "ended without waiting for a copy_async", "copies_without_commit", [("copies", "reads")]),
    ("hand_over_without_wait", "deadlock", "hand_over<(Barriers)3>", [("writes", "reads"), WAITS_LATE]),
    ("ring_without_empty_wait", "deadlock", "ring<(Ring)2>", [("fills", "fills")]),
    ("products_without_commit", "ended without waiting for a wgmma", "products<(Products)5>",
     [("multiplies", "overwrites")]),
]


def test_ptx():
    case = CASES["ptx"]
    keys = "requests", "wavefronts", "least_wavefronts"
    claim_equal(case.sum("matrices<false>", "loads", "load", *keys), (1, 32, 4),
                "ldmatrix of rows with stride 128 bytes: 8-way")
    claim_equal(case.sum("matrices<true>", "loads", "load", *keys), (1, 4, 4), "... swizzled: none")
    for kernel, text in RIGHT_PTX:
        claim_equal((pairs(case.kernel(kernel)), case.kernel(kernel)["uninitialised"]), (set(), []), f"clean: {text}")
    claim_equal(pairs(case.kernel("products<(Products)2>")), set(), "clean: ... or the fence after the barrier")
    for name, version, text, comments in PTX_RACES:
        claim_equal(pairs(case.kernel(f"{name}<{version}>")), ptx_lines(case, name, *comments), f"it is found: {text}")
    claim_equal([race["why"] for version in (1, 4) for race in case.kernel(f"products<(Products){version}>")["races"]],
                ["no fence.proxy.async between", "nothing orders them"],
                "... and it is said whether it is the fence that is missing")
    claim_equal(case.sum("numbers", "in turn", "store", "requests", "lanes"), (18, 18),
                "blocks that take numbers from a counter get them in turn, though they run one after another")
    for argument, end, kernel, comments in UNFINISHED:
        run, figures = case.run_again("--", argument)
        claim(run.returncode == 1 and end in figures["ended"], f"{argument}: the program ends with it, exit code 1",
              f"exit code {run.returncode}: {run.stderr}")
        found = [pairs(each) for each in figures["kernels"] if each["name"] == kernel]
        claim_equal(found, [ptx_lines(case, kernel.split("<")[0], *comments)], "... and its races are reported")
    test_ptx_figures(case)


def test_ptx_figures(case):
    """Tiles are 8 KiB: 256 sectors, 64 wavefronts of 128 bytes."""
    def by(kernel, comment, access, *keys):
        return [(site["by"], *(site[key] for key in keys if key in site))
                for site in case.sites(kernel, comment, access)]

    keys = "bytes_per_lane", "requests", "sectors", "least_sectors", "wavefronts", "least_wavefronts"
    claim_equal((by("copies<(Copies)0>", "copies", "load", *keys), by("copies<(Copies)0>", "copies", "store", *keys)),
                ([("cp.async", 16, 6, 96, 96)], [("cp.async", 16, 6, 24, 24)]),
                "cp.async: 16 sectors and 4 wavefronts for 32 lanes of 16 bytes")
    claim_equal((by("ring<(Ring)0>", "fills", "load", *keys), by("ring<(Ring)0>", "fills", "store", *keys)),
                ([("copy engine", 16, 6, 6 * 256, 6 * 256)], [("copy engine", 16, 6, 6 * 64, 6 * 64)]),
                "the copy engine: 6 boxes of 8 KiB")
    # 4 steps; a warp reads its own 2 KiB of A, one warp B's 8 KiB for all four.
    claim_equal([site[0] for site in by("products<(Products)0>", "multiplies", "load")], ["wgmma"], "wgmma reads")
    claim_equal(case.sum("products<(Products)0>", "multiplies", "load", "bytes", "wavefronts", "least_wavefronts"),
                (2 * 8192, 128, 128), "... 8 KiB of A and of B, without conflicts in a swizzled tile")
    claim_equal(case.raw_kernel("products<(Products)0>")["tensor_flops"], 2 * 64 * 64 * 64,
                "... 2 x 64 x 64 x 64 FLOPs")
    claim_equal(case.raw_kernel("small_product")["tensor_flops"], 2 * 2 * 2 * 16 * 8 * 16,
                "mma: 2 x 16 x 8 x 16 FLOPs each, by two warps two times")


# ---- counts

def test_counts():
    case = CASES["counts"]

    def counts(kernel):
        return {name: count for name, count in case.raw_kernel(kernel)["counts"].items() if name[0] == "_"}

    claim_equal(counts("barriers"), {"__syncthreads": 6, "__syncwarp": 3},
                "3 blocks: 2 __syncthreads each, and a __syncwarp of one warp")
    claim_equal(counts("collectives"), {"__shfl_xor_sync": 10, "__shfl_down_sync": 2, "__ballot_sync": 2},
                "two warps: 5 shuffles, one more and a vote each")
    raw = case.raw_kernel("shared_bytes")
    claim_equal((raw["static_shared"], raw["dynamic_shared"]), (480, 128), "static and dynamic shared memory, in bytes")
    keys = "requests", "lanes"
    claim_equal((case.kernel("a_warp_and_a_half")["block"], case.raw_kernel("a_warp_and_a_half")["threads"],
                 case.sum("a_warp_and_a_half", "all", "store", *keys),
                 case.sum("a_warp_and_a_half", "every third", "store", *keys)), ([48, 1, 1], 48, (4, 96), (4, 32)),
                "blocks of 48 threads: two warps, of 32 and of 16 lanes; every third is active")
    claim_equal((case.sum("two_dimensions", "row by row", "store", *keys, "sectors"),
                 case.sum("two_dimensions", "column by column", "store", *keys, "sectors")), ((2, 64, 8), (2, 64, 16)),
                "8 x 8 threads are two warps of 4 rows: 4 sectors row by row, 8 column by column")
    claim_equal((case.sum("two_ways", "even", "store", *keys), case.sum("two_ways", "odd", "store", *keys)),
                ((4, 64), (4, 40)), "lanes that part: 16 of them 4 times; 16, 12, 8 and 4 of the others")


# ---- the command

def test_command():
    case = CASES["counts"]
    for words, error in ((["FILE=missing.cu"], "missing.cu"),
                         (["FILE=dev/inspect/cases/inline_ptx.cu"], "dev/inspect/cases/inline_ptx.cu:5: asm")):
        run = make_inspect(*words)
        claim(run.returncode == 2 and "Error 2" in run.stderr and error in run.stderr,
              f"make inspect {words[0]}: exit code 2 and a sentence", run.stderr)
    for words, error in ((["--card", "h9000"], "invalid choice: 'h9000'"),
                         (["--kernel", "nothing"], "--kernel nothing: no such kernel was launched; found a_warp_and"),
                         (["--", "nothing"], "launched no kernel")):
        run, _ = case.run_again(*words)
        claim(run.returncode == 2 and error in run.stderr, f"{' '.join(words)}: exit code 2 and a sentence",
              f"exit code {run.returncode}: {run.stderr}")
    run, figures = case.run_again("--kernel", "two_ways")
    claim_equal((run.returncode, [kernel["name"] for kernel in figures["kernels"]]), (0, ["two_ways"]),
                "--kernel two_ways: that one, and no other")
    run, figures = case.run_again("--seconds", "1", "--", "for_long")
    claim((run.returncode, figures["ended"]) == (0, "after 1 s, as asked") and len(figures["kernels"]) == 6,
          "--seconds 1 ends a program of 30 s, with a report", f"exit code {run.returncode}: {run.stderr}")
    test_barriers(case)


def test_barriers(case):
    """Of kernel barriers none of the three is needed, of shared_bytes both are."""
    costs = os.path.join(BUILD, "barriers_costs.py")
    with open(costs, "w", encoding="utf-8") as file:
        file.write("UNNECESSARY_BARRIERS = {'if (threadIdx.x < 32) __syncwarp();': 'to be counted'}\n")
    for words, wrong in ((["--barriers"], 3), (["--barriers", "--costs", costs], 2)):
        run, _ = case.run_again(*words)
        claim(run.returncode == 1 and
              run.stdout.endswith(f"5 barriers, 2 needed, 3 not found to be; {wrong} not as expected\n"),
              f"{' '.join(words[:3:2])}: 2 of 5 barriers are needed, {wrong} not as expected", run.stdout + run.stderr)
    found = {line.split()[0] for line in run.stdout.splitlines() if "shared memory: " in line}
    with open(case.file, encoding="utf-8") as source:
        lines = source.read().splitlines()
    begin = next(i for i, line in enumerate(lines) if "shared_bytes(" in line)
    claim_equal(found, {f"{case.file}:{i + 1}" for i in range(begin, begin + 11) if "__syncthreads" in lines[i]},
                "... those whose removal is a race, with their lines")


# ---- all of it

PARTS = {"shared": (test_shared, ["shared"]), "global": (test_global, ["global"]), "races": (test_races, ["races"]),
         "ptx": (test_ptx, ["ptx"]), "counts": (test_counts, ["counts"]), "command": (test_command, ["counts"])}
CASES = {}


def main():
    chosen = sys.argv[1:] or list(PARTS)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        print(f"test_inspect.py: no part {unknown[0]}; expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    subprocess.run(["make", "-s", os.path.join(BUILD, "recorder.o"), os.path.join(BUILD, "cublasLt.o")], check=True)
    names = sorted({name for part in chosen for name in PARTS[part][1]})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        CASES.update(zip(names, pool.map(Case, names)))
    for part in chosen:
        try:
            PARTS[part][0]()
        except (LookupError, StopIteration) as error:
            claim(False, f"{part} runs to its end", repr(error))
    return finish()


if __name__ == "__main__":
    sys.exit(main())

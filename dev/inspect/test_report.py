#!/usr/bin/env python3
"""Tests of report.py: a small program is compiled with debug information, as if recorded, and reported on."""
import contextlib
import copy
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "tests"))
import report       # first: it adds dev/ to sys.path
from cards import CARDS
from claims import claim, claim_equal, finish
from estimate import (GAP_SECONDS, KERNEL_SECONDS, L2_PORT, MEMORY_SHARE, PIECE_SECONDS, TENSOR_SHARE, TURNS_OVERLAP,
                      Softmax, estimate_launch, estimate_step, matmul_seconds, occupancy)
from expectations import Expectations
from pictures import Gallery, global_picture, shared_picture
from registers import parse as parse_registers
from results import Results
from symbols import Symbols, bare_name
from text import kernel_text


def near(a, b, tolerance=1e-6):
    return math.isclose(a, b, rel_tol=tolerance)


# ---- a program with debug information, and the addresses of its accesses

SOURCE = """\
#include "system.h"

template <typename T> inline __attribute__((always_inline)) float load(const T* from) {
    return *from;
}
inline __attribute__((always_inline)) float load_pack(const float* from) {
    return load(from);
}
inline __attribute__((always_inline)) void exchange(float* tile, int a, int b) {
    const float first = tile[a];
    tile[a] = tile[b] + 1;
    tile[b] = first;
}
__attribute__((noinline)) void outside(float* x) { x[7] = 3; }

namespace study {
template <int N> __attribute__((noinline)) void sum_kernel(float* out, const float* in, float* tile) {
    const float x = load_pack(in);
    out[0] = x;
    exchange(tile, 1, 2);
    outside(out);
    system_store(out + 9);
}
}
inline __attribute__((always_inline)) void copy_kernel(float* out, const float* in) { out[0] = in[0]; }
int main() {
    static float out[16], in[16], tile[16];
    study::sum_kernel<64>(out, in, tile);
    copy_kernel(out, in);       // inlined: main() is its caller
}
"""
SYSTEM = "inline __attribute__((always_inline)) void system_store(float* x) { *x = 1; }\n"
# ThreadSanitizer's callbacks, ours: each prints its return address.
CALLBACKS = """\
#include <cstdio>
#define CALLBACK(name) extern "C" void name(void*) { printf("%zu\\n", (size_t)__builtin_return_address(0)); }
CALLBACK(__tsan_read4) CALLBACK(__tsan_write4)
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
"""


def line_of(text):
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line)


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class Program:
    """SOURCE, compiled; `pcs` of its accesses in the order in which they happen."""

    def __init__(self, folder):
        for name, text in (("mine.cu", SOURCE), ("build/mine.cpp", SOURCE), ("dev/cpu/system.h", SYSTEM),
                           ("callbacks.cpp", CALLBACKS)):
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            write(os.path.join(folder, name), text)
        for command in ("g++ -g -O1 -fsanitize=thread -Idev/cpu -c build/mine.cpp -o mine.o",
                        "g++ -O1 -c callbacks.cpp -o callbacks.o", "g++ -no-pie mine.o callbacks.o -o program"):
            subprocess.run(command.split(), cwd=folder, check=True, timeout=60)
        self.path = os.path.join(folder, "program")
        self.pcs = [int(pc) for pc in subprocess.run([self.path], capture_output=True, text=True).stdout.split()]
        symbols = subprocess.run(["nm", "-S", self.path], capture_output=True, text=True).stdout
        sum_kernel = next(symbol for symbol in symbols.split() if "sum_kernel" in symbol)
        begin, size = (int(figure, 16) for figure in re.search(r"(\w+) (\w+) T \w*outside", symbols).groups())
        self.end_of_outside = begin + size
        self.symbols = {"sum_kernel": sum_kernel, "copy_kernel": "_Z11copy_kernelPfPKf"}


# ---- a recording

LANES = range(32)


def site(pc, space="global", access="load", done=None, least=None, **more):
    """A site with 64 requests of 32 lanes."""
    size = more.get("bytes_per_lane", 4)
    least = 64 * size if least is None else least
    done = least if done is None else done
    unit, other = ("sectors", "wavefronts") if space == "global" else ("wavefronts", "sectors")
    return {"stack": [pc], "part": 0, "space": space, "access": access, "by": "thread", "bytes_per_lane": size,
            "requests": 64, "lanes": 64 * 32, "bytes": 64 * 32 * size, unit: done, f"least_{unit}": least, other: 0,
            f"least_{other}": 0, "l1_hits": 0, "dram_sectors": done if space == "global" else 0,
            "picture": {"base": 0, "offsets": [size * lane for lane in LANES]}, **more}


def traffic(**launch):
    keys = ("dram_load", "dram_store", "l2", "shared_wavefronts", "tensor_flops")
    return {f"launch_{key}": launch.get(key, 0) for key in keys}


def kernel(symbol, sites, grid=(1024, 1, 1), threads=256, **more):
    blocks = math.prod(grid)
    return {"symbol": symbol, "range": "", "grid": list(grid), "block": [threads, 1, 1], "dynamic_shared": 0,
            "static_shared": 0, "integers": [], "launches": 1, "recorded_blocks": 8, "blocks": blocks,
            "threads": threads, "counts": {"__syncthreads": 8}, "tensor_flops": 0, "traffic": traffic(), "sites": sites,
            "races": [], "uninitialised": [], **more}


def recording(program):
    """Two kernels: one that is fine, one with conflicts, a race and an uninitialised read."""
    p = program.pcs
    load, store, read_a, read_b, write_a, write_b = p[:6]
    conflicts = {"base": 0, "offsets": [128 * lane for lane in LANES]}
    strided = {"base": 16, "offsets": [64 * lane for lane in LANES]}
    race = {"memory": "shared", "address": 128, "stack": [read_b], "access": "load", "by": "thread", "thread": 5,
            "block": 0, "other_stack": [write_b], "other_access": "store", "other_by": "thread", "other_thread": 37,
            "other_block": 0, "count": 64, "why": "no barrier orders them"}
    faulty = kernel(program.symbols["sum_kernel"], [
        site(load, done=2048, least=256, picture=strided), site(store, access="store"),
        site(read_a, "shared", done=64, least=64), site(read_b, "shared", done=2048, least=64, picture=conflicts),
        site(write_a, "shared", "store", done=64, least=64), site(write_b, "shared", "store", done=64, least=64)],
        races=[race, {**race, "address": 132}], range="sum", launches=3, dynamic_shared=49152,
        uninitialised=[{"stack": [read_a], "thread": 3, "block": 1, "address": 64, "count": 2}],
        traffic=traffic(dram_load=400e6, dram_store=100e6, l2=600e6, shared_wavefronts=3e6))
    fine = kernel(program.symbols["copy_kernel"], [site(p[-2]), site(p[-1], access="store")], range="copy",
                  traffic=traffic(dram_load=40e6, dram_store=40e6, l2=80e6))
    return {"program": program.path, "sources": {"build/mine.cpp": "mine.cu"}, "card": "h100",
            "ended": "exit code 0", "kernels": [faulty, fine],
            "matmuls": [{"m": 65536, "n": 2304, "k": 768, "type": "bf16", "out_bytes": 2, "accumulate": False,
                         "epilogue": "bias", "launches": 1}],
            "sequence": [["kernel", 0], ["kernel", 0], ["kernel", 0], ["matmul", 0], ["kernel", 1]]}


class Case:
    """A program, its recording, and report.py run on variations of it."""

    def __init__(self, folder):
        self.folder, self.program = folder, Program(folder)
        self.raw = recording(self.program)

    def results(self, raw=None, **options):
        return Results(raw or self.raw, root=self.folder, **options)

    def run(self, *options, raw=None):
        """(exit code, standard output, standard error)"""
        path, out, err = os.path.join(self.folder, "raw.json"), io.StringIO(), io.StringIO()
        write(path, json.dumps(raw or self.raw))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = report.main([path, "--source-root", self.folder, *options])
        return code, out.getvalue(), err.getvalue()

    def file(self, name, text=""):
        """A path in the case's folder, and what is written there if it is not empty."""
        path = os.path.join(self.folder, name)
        if text:
            write(path, text)
        return path

    def changed(self, change):
        raw = copy.deepcopy(self.raw)
        change(raw)
        return raw


# ---- which line an access belongs to

def lines_of_source(case):
    program, kernel_name = case.program, "void study::sum_kernel<64>(float*, float const*, float*)"
    symbols = Symbols(program.path, [[pc] for pc in program.pcs], case.raw["sources"], case.folder)
    places = [symbols.place([pc], kernel_name) for pc in program.pcs]
    claim(len(places) == 10 and all(place.file == "mine.cu" for place in places),
          "every access has a line, in the user's file", f"{len(places)}")
    for i, text, why in [
            (0, "load_pack(in)", "an access in load(), called by load_pack(), belongs to the kernel's line"),
            (1, "out[0] = x", "the kernel's own access belongs to its line"),
            (2, "first = tile[a]", "a function with several accessing lines keeps its own lines"),
            (3, "tile[b] + 1", "... the second"), (4, "tile[b] + 1", "... its store"),
            (5, "tile[b] = first", "... the third"),
            (6, "x[7] = 3", "a function that was not inlined keeps its line"),
            (7, "system_store(out + 9)", "frames in dev/cpu are skipped: the line that calls them counts")]:
        claim_equal(places[i].line, line_of(text), why)
    claim_equal(places[0].via, (f"mine.cu:{line_of('return *from')}", f"mine.cu:{line_of('return load(from)')}"),
                "both accessors' lines are kept, innermost first")
    claim_equal([place.via for place in places[1:8]], [()] * 7, "... and no others")
    copies = [symbols.place([pc], "copy_kernel(float*, float const*)") for pc in program.pcs[8:]]
    claim({place.line for place in copies} == {line_of("out[0] = in[0]")} and not copies[0].via,
          "a kernel with one accessing line is not skipped, though main() calls it")
    end = program.end_of_outside
    claim(Symbols(program.path, [[end]], {}, case.folder).place([end]).line == line_of("x[7] = 3"),
          "an address is a return address: the call is before it")
    claim(symbols.place([12345]).file == "?", "an address without debug information has no line, and no exception")


def names():
    for function, name in [
            ("layernorm_backward_kernel(float*)", "layernorm_backward_kernel"),
            ("void attention_forward_wgmma_kernel<64>(float*, TensorMap)", "attention_forward_wgmma_kernel<64>"),
            ("void study::detail::k<study::Pair<int, float>, 3>(study::Pair<int, float>)",
             "k<study::Pair<int, float>, 3>"),
            ("void cross_entropy_kernel<(Want)1>(float*, float*)", "cross_entropy_kernel<(Want)1>"),
            ("(anonymous namespace)::hidden(int)", "hidden"),
            ("study::k(void (*)(int))", "k")]:
        claim(bare_name(function) == name, f"{function} is called {name}", bare_name(function))


# ---- cards

def cards():
    """Multiprocessors, L2 cache in MiB, capability, and dense BF16 FLOPs a clock of a multiprocessor (white papers)."""
    for key, *expected, a_clock in [
            ("h100", 132, 50, 90, 4096), ("h200", 132, 60, 90, 4096), ("a100", 108, 40, 80, 2048),
            ("4090", 128, 72, 89, 512), ("l40s", 142, 96, 89, 1024), ("t4", 40, 4, 75, 1024),
            ("b200", 148, 126.5, 100, 8192)]:
        card = CARDS[key]
        claim_equal([card.multiprocessors, card.l2_bytes / (1 << 20), 10 * card.major + card.minor], expected,
                    f"{key}: multiprocessors, L2 cache and capability")
        claim(near(card.tensor, card.multiprocessors * a_clock * card.clock, 0.02),
              f"{key}: the data sheet's tensor FLOP/s are multiprocessors x {a_clock} x clock")
    claim_equal([CARDS[key].arch for key in ("h100", "4090", "b200")], ["sm_90a", "sm_89", "sm_100"], "nvcc's -arch")
    claim_equal(len(CARDS), 7, "cards of dev/cpu/card.h")


# ---- estimates

def occupancies():
    h100, rtx = CARDS["h100"], CARDS["4090"]
    for text, card, arguments, blocks, bound in [
            ("256 threads", h100, (1024, 256, 0), 8, "threads"),
            ("32 threads", h100, (1024, 32, 0), 32, "blocks"),
            ("1024 threads where 1536 fit", rtx, (1024, 1024, 0), 1, "threads"),
            ("33 threads count as 64", h100, (1024, 33, 0), 32, "threads"),
            ("48 KiB of shared memory, 1 KiB of CUDA's besides", h100, (1024, 256, 48 << 10), 4, "shared memory"),
            ("104 KiB: two blocks", h100, (1024, 256, 104 << 10), 2, "shared memory"),
            ("227 KiB: one block", h100, (1024, 256, 227 << 10), 1, "shared memory"),
            ("168 registers x 384 threads", h100, (132, 384, 0, 168), 1, "registers"),
            ("33 registers count as 40", h100, (1024, 256, 0, 33), 6, "registers"),
            ("228 KiB are more than a block can have", h100, (1, 256, 228 << 10), 0, "shared memory")]:
        room = occupancy(card, *arguments)
        claim((room.blocks, room.bound) == (blocks, bound), f"{text}: {blocks} blocks, bound by {bound}",
              f"{room.blocks}, {room.bound}")
    room = occupancy(h100, 1024, 256, 104 << 10)
    claim((room.per_wave, room.waves, room.share) == (264, 1024 / 264, 16 / 64), "waves and share of warps")


NOTHING = {"blocks": 1024, "dram_load": 0, "dram_store": 0, "l2": 0, "wavefronts": 0, "tensor_flops": 0, "special": 0}


def launches():
    h100 = CARDS["h100"]
    def estimated(threads=256, shared=0, softmax=Softmax(), **launch):
        return estimate_launch(h100, {**NOTHING, **launch}, threads, shared, None, softmax)
    for bound, launch in [("memory", {"dram_load": 6e8, "dram_store": 4e8}), ("L2", {"l2": 1e10}),
                          ("L1 and shared", {"wavefronts": 1e8}), ("special functions", {"special": 1e10}),
                          ("tensor cores", {"tensor_flops": 1e12}), ("a launch", {})]:
        claim(estimated(**launch).bound == bound, f"a launch that has mostly to do with {bound} is bound by it")
    memory = estimated(dram_load=6e8, dram_store=4e8).seconds
    claim(near(memory, 1e9 / (MEMORY_SHARE * 3.35e12)), "a gigabyte takes what the attainable bandwidth says")
    claim(near(estimated().seconds, KERNEL_SECONDS), "no kernel is shorter than a launch")
    claim(near(estimated(blocks=4, dram_load=1e8).seconds, 1e8 / (4 * L2_PORT * h100.clock)),
          "four blocks draw no more than four multiprocessors can")
    whole, more = (estimated(blocks=blocks, wavefronts=1e8).seconds for blocks in (1056, 1057))
    claim(near(more, 2 * 1056 / 1057 * whole, 1e-3), "one block more than a wave has takes another wave")
    alone = estimated(tensor_flops=1e12)
    between = Softmax(1e12 / (2 * 3 * 64), 2.5)
    soft = estimated(tensor_flops=1e12, softmax=between)
    claim(soft.seconds > 1.3 * alone.seconds, "a softmax between products costs time",
          f"{alone.seconds * 1e6:.0f} and {soft.seconds * 1e6:.0f} us")
    turns = estimated(tensor_flops=1e12, softmax=replace(between, turns=True)).seconds
    claim(near(soft.seconds - turns, TURNS_OVERLAP * (soft.seconds - alone.seconds)),
          "where groups take turns a part of it is hidden", f"{turns * 1e6:.0f} us")
    pieces = estimated(tensor_flops=1e12, softmax=replace(between, pieces=1320)).seconds
    claim(near(pieces - soft.seconds, 10 * PIECE_SECONDS), "each work tile of a block begins and ends alone")


# FlashAttention-3's forward, causal, H100, B * T = 16384, 2048 channels: TFLOP/s by (head size, T), as published.
FLASH3 = {(64, 1024): 265, (64, 2048): 371, (64, 8192): 460, (64, 16384): 473,
          (128, 1024): 423, (128, 2048): 521, (128, 8192): 602, (128, 16384): 616}


def attention():
    """Tiles on the diagonal are multiplied whole: (1 + 96 / T) of the FLOPs that papers count."""
    for (head_size, T), published in FLASH3.items():
        flops = 2 * 16384 * T * 2048
        done = flops * (1 + 96 / T)
        rows = 192 if head_size == 64 else 128
        softmax = Softmax(done / (4 * head_size), 2.5, True, 16384 // T * (2048 // head_size) * -(-T // rows))
        launch = {**NOTHING, "blocks": 132, "tensor_flops": done}
        rate = flops / estimate_launch(CARDS["h100"], launch, 384, 200 << 10, 168, softmax).seconds / 1e12
        claim(0.8 * published < rate < 1.05 * published,
              f"attention, heads of {head_size}, T = {T}: near FlashAttention-3's, at most 5 % above it",
              f"{rate:.0f} and {published} TFLOP/s")


def product(m, n, k, out_bytes=2, accumulate=False, of="bf16"):
    return {"m": m, "n": n, "k": k, "type": of, "out_bytes": out_bytes, "accumulate": accumulate,
            "epilogue": "none"}


def matmuls():
    h100 = CARDS["h100"]
    def share(card, *sizes, **more):
        return 2 * math.prod(sizes) / matmul_seconds(card, product(*sizes, **more)) / card.tensor
    large = share(h100, 8192, 8448, 8192)
    claim(0.95 * TENSOR_SHARE < large <= TENSOR_SHARE, "a large matmul reaches what is attainable", f"{large:.3f}")
    claim(share(h100, 768, 2304, 65536, out_bytes=4) > 0.85 * TENSOR_SHARE, "a long sum with few tiles is split",
          f"{share(h100, 768, 2304, 65536, out_bytes=4):.3f}")
    claim(share(h100, 5888, 896, 4096) < 0.75 * TENSOR_SHARE,
          "161 tiles of 128 x 256 on 132 multiprocessors are two waves", f"{share(h100, 5888, 896, 4096):.3f}")
    thin = product(1 << 20, 64, 64)
    claim(near(matmul_seconds(h100, thin), 2 * (2 * (1 << 26) + 64 * 64) / (MEMORY_SHARE * 3.35e12)),
          "a thin one takes what its bytes take")
    claim(near(share(h100, 8192, 8448, 8192, of="fp8"), 2 * large), "in FP8 a large one is twice as fast")
    thin = product(1 << 20, 64, 64, of="fp8")
    claim(near(matmul_seconds(h100, thin), (3 * (1 << 26) + 64 * 64) / (MEMORY_SHARE * 3.35e12)),
          "an element of FP8 is a byte")
    claim([CARDS[key].fp8 for key in ("h100", "4090", "a100", "t4")] == [1978.8e12, 330.4e12, 0, 0],
          "FP8 is there from capability 8.9 on, at twice the rate")
    claim(matmul_seconds(h100, product(16, 16, 16)) == KERNEL_SECONDS, "a tiny one takes a launch")


def steps():
    raw = {"sequence": [["kernel", 1], ["matmul", 0], ["kernel", 0]], "matmuls": [product(16, 16, 16)]}
    step = estimate_step(CARDS["h100"], raw, [1e-3, 2e-3])
    claim(near(step.parts["kernels"], 3e-3) and near(step.parts["matmuls"], KERNEL_SECONDS),
          "a step is the sum of what it launches")
    claim(near(step.parts["gaps"], 2 * GAP_SECONDS), "with a gap between any two")
    claim(near(step.tokens_per_second(1000), 1000 / sum(step.parts.values())), "and tokens a second follow")


def registers():
    log = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_90a'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers"""
    figures = {"_Z1kv": {"registers": 255, "spills": 84}, "_Z5otherv": {"registers": 24, "spills": 0}}
    claim(parse_registers(log) == figures, "registers and spills are read from what ptxas says")


# ---- the report

def terminal(case):
    code, out, _ = case.run()
    rows = [line for line in out.split("\n\n")[0].splitlines() if line.startswith(("sum_kernel<64>", "copy_kernel"))]
    claim(code == 0 and len(rows) == 2 and rows[0].split()[:4] == ["sum_kernel<64>", "3", "1,024", "256"],
          "a row for each kernel, the longest first")
    claim_equal(rows[0].split()[6:], ["memory", "4.50", "8.75", "-", "32.0", "-", "50", "%", "1"],
                "with what bounds it, ratios, lanes, occupancy and races")
    claim("tokens/s" not in out, "no tokens a second without --tokens")
    _, out, _ = case.run("--tokens", "65536", "--card", "a100")
    claim("tokens/s, estimated for 65,536 tokens" in out and "A100" in out, "--tokens and --card are taken")
    expensive = out[out.index("the most expensive lines"):].splitlines()[1]
    claim(f"mine.cu:{line_of('load_pack(in)')}" in expensive and "load_pack(in);" in expensive,
          "the most expensive line is that of most sectors from memory, where memory bounds the kernel")


def one_kernel(case):
    code, out, _ = case.run("--kernel", "sum")
    marked = [line for line in out.splitlines() if "*" in line and line.startswith(("global", "shared"))]
    claim(code == 0 and len(marked) == 2 and "8.00*" in marked[1] and "const float x = load_pack(in);" in marked[1],
          "--kernel shows lines of source with figures beside them, the bad ones marked")
    claim("32.00*" in marked[0] and "tile[a] = tile[b] + 1;" in marked[0], "and conflicts of banks")
    race = next((line for line in out.splitlines() if "race in shared" in line), "")
    parts = ["byte 128", "thread 5 of block 0 loads", f"mine.cu:{line_of('tile[b] + 1')}", "tile[a] = tile[b] + 1;",
             "thread 37 of block 0 stores", f"mine.cu:{line_of('tile[b] = first')}", "tile[b] = first;",
             "no barrier orders them", "128 times"]
    claim(all(part in race for part in parts), "a race is a sentence: memory, both lines with their text, both threads",
          ", ".join(part for part in parts if part not in race))
    claim(out.count("race in shared") == 1, "races between the same two lines are one")
    claim("uninitialised read of byte 64 of shared memory: thread 3 of block 1 loads at mine.cu" in out,
          "an uninitialised read is a sentence")
    claim("copy_kernel" not in out, "other kernels are left out")


def users_json(case):
    path = case.file("out.json")
    case.run("--json", path, "--tokens", "1024")
    found = json.loads(read(path))
    sum_kernel = next(kernel for kernel in found["kernels"] if kernel["name"] == "sum_kernel<64>")
    load = next(entry for entry in sum_kernel["global"] if entry["access"] == "load")
    claim({key: load[key] for key in ("file", "line", "requests", "sectors", "least_sectors", "bytes")} ==
          {"file": "mine.cu", "line": line_of("load_pack(in)"), "requests": 64, "sectors": 2048, "least_sectors": 256,
           "bytes": 8192}, "JSON: a global access")
    worst = max(sum_kernel["shared"], key=lambda entry: entry["wavefronts"])
    claim((worst["line"], worst["access"], worst["wavefronts"], worst["least_wavefronts"]) ==
          (line_of("tile[b] + 1"), "load", 2048, 64), "JSON: a shared access")
    race = sum_kernel["races"][0]
    claim((race["memory"], race["line"], race["other_line"], race["threads"]) ==
          ("shared", line_of("tile[b] + 1"), line_of("tile[b] = first"), [5, 37]), "JSON: a race")
    claim(sum_kernel["launches"] == 3 and near(sum_kernel["estimate_us"], 1e6 * 5e8 / (MEMORY_SHARE * 3.35e12)),
          "JSON: launches and estimate")
    claim(len(sum_kernel["uninitialised"]) == 1 and found["estimate_tokens_per_s"] > 0, "JSON: the rest")


def registers_in_the_report(case):
    symbol = case.program.symbols["sum_kernel"]
    path = case.file("registers.json", json.dumps({symbol: {"registers": 128, "spills": 8}}))
    results = case.results(registers={symbol: {"registers": 128, "spills": 8}})
    kernel_ = results.matching("sum")[0]
    claim((kernel_.registers, kernel_.estimate.occupancy.bound, kernel_.estimate.occupancy.blocks) ==
          (128, "registers", 2), "registers bound how many blocks there are")
    claim("128!" in case.run("--registers", path)[1], "and a kernel that spills is marked")
    other = symbol.replace("PfPKfS", "PvPKfS") if "PfPKfS" in symbol else symbol[:-2] + "Pv"
    kernel_ = case.results(registers={other: {"registers": 77, "spills": 0}}).matching("sum")[0]
    claim(kernel_.registers == 77, "a kernel whose parameters have other types on a GPU is found by its name", other)


# ---- the check

def without_hazards(raw):
    raw["kernels"][0].update(races=[], uninitialised=[])


def checks(case):
    def check(allowances, raw=None, more=""):
        costs = case.file("costs.py", f"ALLOWANCES = {[(*entry, 'reason')[:4] for entry in allowances]}\n{more}")
        code, out, err = case.run("--check", "--costs", costs, raw=raw)
        return code, out.splitlines()[-1] if out else "", out + err

    def worsen(raw):
        without_hazards(raw)
        raw["kernels"][1]["sites"][0]["sectors"] += 1

    def copy_moves(share):
        """The copy as the only kernel, which moves `share` of the 80 MB that its arguments say."""
        def change(raw):
            without_hazards(raw)
            raw["kernels"] = [{**raw["kernels"][1], "integers": [10**7], "traffic": traffic(dram_load=share * 80e6)}]
            raw["sequence"] = []
        return case.changed(change)

    code, last, out = check([])
    claim((code, last) == (1, "4 findings"), "a race, an uninitialised read, sectors and wavefronts are found", last)
    where = f"sum_kernel<64>: mine.cu:{line_of('load_pack(in)')}"
    claim(f"{where}: sectors are 4.500 times the least; allowed: 1.000" in out,
          "a finding names kernel, file and line, what was found and what is allowed")
    clean = case.changed(without_hazards)
    exact = [("sum_kernel<64>", "sectors", 4.5), ("sum_kernel", "wavefronts", 8.75)]
    formula = "def cost(launch, shape):\n    return 'bytes', 8 * launch.integers[0], 'copy: reads and writes n'\n"
    for text, arguments, code, words in [
            ("what is allowed, by name or for all of a template, is no finding", (exact, clean), 0, "0 findings"),
            ("races and uninitialised reads cannot be allowed", (exact,), 1, "2 findings"),
            ("an allowance looser than needed is a finding", ([("sum_kernel<64>", "sectors", 4.7), exact[1]], clean), 1,
             "allowance no longer needed"),
            ("one of a kernel that was not recorded is none", (exact + [("other_kernel", "sectors", 9)], clean), 0,
             "0 findings"),
            ("one of a kernel that needs none is a finding", ([("copy_kernel", "sectors", 1.5), *exact], clean), 1,
             "no longer needed"),
            ("one sector more than the least is a finding", (exact, case.changed(worsen)), 1, "copy_kernel"),
            ("an allowance of an unknown ratio is refused", ([("sum_kernel", "speed", 1)],), 2, "sectors or wavefronts"),
            ("an allowance without a reason is refused", ([("sum_kernel", "sectors", 1, "")],), 2, "reason"),
            ("memory traffic as in the cost line is no finding", ([], copy_moves(1.0), formula), 0, "0 findings"),
            ("5 % more is allowed", ([], copy_moves(1.045), formula), 0, "0 findings"),
            ("10 % more is a finding", ([], copy_moves(1.1), formula), 1,
             "bytes to and from memory are 1.100 times the cost line (copy: reads and writes n)"),
            ("an allowance of 1.05, which all kernels have, is a finding",
             ([("copy_kernel", "cost", 1.05)], copy_moves(1.045), formula), 1, "no longer needed"),
            ("an unknown unit is refused", ([], copy_moves(1.0), formula.replace("'bytes'", "'bits'")), 2,
             "found unit 'bits'; expected bytes or FLOPs"),
            ("a formula with other arguments than the kernel is refused",
             ([], clean, "def cost(launch, shape):\n    (lambda n: n)(*launch.integers)"), 2, "cost() of sum_kernel"),
            ("a file that does not run is refused", ([], clean, "1 / 0"), 2, "ZeroDivisionError")]:
        found, _, out = check(*arguments)
        claim(found == code and words in out, f"{text}: exit code {code}", f"exit code {found}: {out[-300:]}")
    claim_equal(Expectations(case.file("costs.py", "def run(*given): return {'arguments': given[2] + ['-x']}")).run(
        "program", "folder", ["a"], False)["arguments"], ["a", "-x"], "--costs may give the run's arguments")
    costs = case.file("costs.py", "def softmax(launch, shape): return {'scores': shape['T'], 'turns': True}")
    softmax = Expectations(costs, {"T": 5}).softmax(None)
    claim_equal((softmax.scores, softmax.turns, softmax.pieces), (5, True, 0), "... a softmax, from the run's shape")


# ---- the page

def page_of(case):
    path = case.file("report.html")
    code, _, err = case.run("--html", path, "--tokens", "65536")
    text = read(path)
    claim(code == 0 and not re.search(r"https?://|<link|src=", text), "the page is one file and asks for no other", err)
    claim("<b>sum_kernel&lt;64&gt;</b>" in text and "<b>copy_kernel</b>" in text, "it has every kernel, escaped")
    ids = re.findall(r"\bid=\"?([\w]+)", text)
    used = set(re.findall(r'href="?#(\w+)', text))
    claim(len(ids) == len(set(ids)) and used <= set(ids) and "p0" in used, "every link and picture leads somewhere",
          ", ".join(used - set(ids)))
    claim("const float x = load_pack(in);" in text and "8.00 × sectors" in text, "source lines have their figures")
    claim("race in shared memory" in text and "tokens/s" in text, "races and tokens a second are in it")
    open_ = [tag for tag in ("details", "summary", "g", "div", "span", "svg", "table", "p", "code")
             if len(re.findall(rf"<{tag}\b", text)) != text.count(f"</{tag}>")]
    claim(not open_, "tags are closed", " ".join(open_))


def drawn(space, size, offsets, base=0):
    """(caption, drawing)"""
    one = site(0, space, bytes_per_lane=size, picture={"base": base, "offsets": offsets})
    drawing, _, caption = (global_picture if space == "global" else shared_picture)(one)
    return caption, drawing


def pictures():
    for space, size, stride, base, caption in [
            ("global", 4, 4, 0, "4 sectors fetched, 128 of their 128"), ("global", 4, 4, 4, "5 sectors fetched, 128"),
            ("global", 4, 256, 0, "32 sectors fetched, 128 of"), ("global", 4, 0, 0, "1 sector fetched, 4 of their 32"),
            ("global", 16, 16, 0, "16 sectors fetched, 512 of"), ("shared", 4, 4, 0, "1 wavefront for"),
            ("shared", 4, 128, 0, "32 wavefronts"), ("shared", 4, 8, 0, "2 wavefronts"),
            ("shared", 4, 0, 0, "1 wavefront for"), ("shared", 16, 16, 0, "4 wavefronts"),
            ("shared", 16, 64, 0, "16 wavefronts"), ("shared", 8, 8, 0, "2 wavefronts"),
            ("shared", 2, 2, 0, "1 wavefront for")]:
        found = drawn(space, size, [stride * lane for lane in LANES], base)[0]
        claim(found.startswith(caption), f"{space}, {size} bytes, stride {stride}, from {base}: {caption}", found)
    claim(drawn("global", 4, [4 * lane if lane < 16 else -1 for lane in LANES])[0].startswith("2 sectors"),
          "half of the lanes: 2 sectors")
    _, spread = drawn("global", 4, [256 * lane for lane in LANES])
    claim(spread.count("z") == 32 and spread.count("<path class=l") == 32, "each sector and each lane is drawn")
    _, conflict = drawn("shared", 4, [128 * (lane // 16) + 4 * (lane % 16) for lane in LANES])
    claim(conflict.count(" bad'") == 32, "lanes in conflict are framed")
    _, quarters = drawn("shared", 16, [16 * lane for lane in LANES])
    claim(quarters.count(" bad'") == 0 and "lanes 24–31" in quarters, "quarters of a warp do not conflict")
    gallery = Gallery()
    figures = {gallery.figure(site(0, picture={"base": base, "offsets": [4 * lane for lane in LANES]}))
               for base in (0, 1 << 20)}
    claim(len(figures) == 1 and len(gallery.drawings) == 1, "equal pictures are kept once")
    claim(gallery.figure(site(0, picture=None)) == "", "a site without a picture has none")


def unknown_lines(case):
    """An address without debug information, a program without its source, a kernel of which no block was recorded."""
    def strange(raw):
        raw["kernels"][0]["sites"][0]["stack"] = [4]
        raw["kernels"][1].update(recorded_blocks=0, sites=[])
    path = case.file("strange.html")
    code, out, err = case.run("--kernel", "_kernel", "--html", path, raw=case.changed(strange))
    claim(code == 0 and re.search(r"8\.00\*.* 0$", out, re.M), "an access that has no line is shown as line 0", err)
    claim("8.00 × sectors" in read(path), "on the page too")
    results = case.results({**case.raw, "sources": {"build/mine.cpp": "gone.cu"}})
    text = "\n".join(kernel_text(results, results.kernels[0]))
    claim("32.00*" in text and "gone.cu" in text and "tile[a]" not in text, "figures without the source")


# ---- mistakes

def mistakes(case):
    missing, broken, other = case.file("nothing.json"), case.file("broken.json", "{"), case.file("other.json", "[1]")
    for text, options, changes, words in [
            ("no registers", ["--registers", missing], {}, f"registers {missing}: No such file"),
            ("registers that are not JSON", ["--registers", broken], {}, "is not JSON"),
            ("no costs", ["--costs", missing], {}, f"--costs {missing}: No such file"),
            ("a kernel that was not recorded", ["--kernel", "nothing"], {}, "found copy_kernel, sum_kernel<64>"),
            ("an unknown card", [], {"card": "voodoo"}, "'voodoo'; expected one of h100"),
            ("a program that is gone", [], {"program": "gone"}, "gone does not exist"),
            ("a file that cannot be written", ["--html", case.folder], {}, "Is a directory")]:
        code, _, err = case.run(*options, raw={**case.raw, **changes})
        claim(code == 2 and words in err, f"{text}: exit code 2 and {words}", err.strip())
    for path, words in ((missing, "No such file"), (broken, "is not JSON"), (other, 'it has no "kernels"')):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = report.main([path])
        claim(code == 2 and words in said.getvalue(), f"a recording {os.path.basename(path)}: {words}", said.getvalue())


TESTS = [names, cards, occupancies, launches, attention, matmuls, steps, registers, pictures]
WITH_PROGRAM = [lines_of_source, terminal, one_kernel, users_json, registers_in_the_report, checks, page_of,
                unknown_lines, mistakes]


def main():
    with tempfile.TemporaryDirectory() as folder:
        case = Case(os.path.realpath(folder))
        for test, arguments in [(test, []) for test in TESTS] + [(test, [case]) for test in WITH_PROGRAM]:
            print(f"== {test.__name__.replace('_', ' ')}")
            try:
                test(*arguments)
            except Exception:
                claim(False, f"{test.__name__} runs to its end", traceback.format_exc())
    finish()


if __name__ == "__main__":
    main()

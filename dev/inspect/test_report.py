#!/usr/bin/env python3
"""Tests of report.py: a small program is compiled with debug information, as if recorded, and reported on. No GPU, no
nvcc. Closes with "N passed, N failed".

    test_report.py [--keep DIR]     DIR: where recording, JSON and page are left to look at
"""
import argparse
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
from types import SimpleNamespace

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.append(os.path.join(ROOT, "dev", "bench"))
import gpu_model
import report
from cards import CARDS
from claims import COSTS, Launch, claim_of, scores_of
from estimate import (GAP_SECONDS, KERNEL_SECONDS, L2_PORT, MEMORY_SHARE, TENSOR_SHARE, estimate_launch, estimate_step,
                      matmul_seconds, occupancy)
from registers import parse as parse_registers
from results import Results
from symbols import Mistake, Symbols, bare_name

passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail else ""), flush=True)


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


class Program:
    """SOURCE, compiled; `pcs` of its accesses in the order in which they happen."""

    def __init__(self, folder):
        def write(name, text):
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        write("mine.cu", SOURCE)
        write("build/mine.cpp", SOURCE)
        write("dev/cpu/system.h", SYSTEM)
        write("callbacks.cpp", CALLBACKS)
        for command in ("g++ -g -O1 -fsanitize=thread -Idev/cpu -c build/mine.cpp -o mine.o",
                        "g++ -O1 -c callbacks.cpp -o callbacks.o", "g++ -no-pie mine.o callbacks.o -o program"):
            subprocess.run(command.split(), cwd=folder, check=True, timeout=60)
        self.path = os.path.join(folder, "program")
        self.pcs = [int(pc) for pc in subprocess.run([self.path], capture_output=True, text=True).stdout.split()]
        symbols = subprocess.run(["nm", self.path], capture_output=True, text=True).stdout
        sum_kernel = next(symbol for symbol in symbols.split() if "sum_kernel" in symbol)
        self.symbols = {"sum_kernel": sum_kernel, "copy_kernel": "_Z11copy_kernelPfPKf"}


# ---- a recording

LANES = range(32)


def site(pc, space="global", access="load", done=None, least=None, **more):
    """A site with 64 requests of 32 lanes."""
    size = more.get("bytes_per_lane", 4)
    least = 64 * size if least is None else least
    done = least if done is None else done
    unit, other = ("sectors", "wavefronts") if space == "global" else ("wavefronts", "sectors")
    return {"pc": pc, "part": 0, "space": space, "access": access, "by": "thread", "bytes_per_lane": size,
            "requests": 64, "lanes": 64 * 32, "bytes": 64 * 32 * size, unit: done, f"least_{unit}": least, other: 0,
            f"least_{other}": 0, "l1_hits": 0, "dram_sectors": done if space == "global" else 0,
            "picture": {"base": 0, "offsets": [size * lane for lane in LANES]}, **more}


def traffic(**launch):
    keys = ("dram_load", "dram_store", "l2", "shared_wavefronts", "tensor_flops")
    return {f"launch_{key}": launch.get(key, 0) for key in keys}


def kernel(symbol, sites, grid=(1024, 1, 1), threads=256, **more):
    blocks = math.prod(grid)
    return {"symbol": symbol, "range": "", "grid": list(grid), "block": [threads, 1, 1], "dynamic_shared": 0,
            "static_shared": 0, "launch_bound": 0, "launches": 1, "recorded_blocks": 8, "blocks": blocks,
            "threads": threads, "counts": {"__syncthreads": 8}, "tensor_flops": 0, "traffic": traffic(), "sites": sites,
            "races": [], "uninitialised": [], **more}


def recording(program):
    """Two kernels: one that is fine, one with conflicts, a race and an uninitialised read."""
    p = program.pcs
    load, store, read_a, read_b, write_a, write_b = p[:6]
    conflicts = {"base": 0, "offsets": [128 * lane for lane in LANES]}
    strided = {"base": 16, "offsets": [64 * lane for lane in LANES]}
    race = {"memory": "shared", "address": 128, "pc": read_b, "access": "load", "by": "thread", "thread": 5, "block": 0,
            "other_pc": write_b, "other_access": "store", "other_by": "thread", "other_thread": 37, "other_block": 0,
            "count": 64, "why": "no barrier orders them"}
    faulty = kernel(program.symbols["sum_kernel"], [
        site(load, done=2048, least=256, picture=strided), site(store, access="store"),
        site(read_a, "shared", done=64, least=64), site(read_b, "shared", done=2048, least=64, picture=conflicts),
        site(write_a, "shared", "store", done=64, least=64), site(write_b, "shared", "store", done=64, least=64)],
        races=[race, {**race, "address": 132}], range="sum", launches=3, dynamic_shared=49152,
        uninitialised=[{"pc": read_a, "thread": 3, "block": 1, "address": 64, "count": 2}],
        traffic=traffic(dram_load=400e6, dram_store=100e6, l2=600e6, shared_wavefronts=3e6))
    fine = kernel(program.symbols["copy_kernel"], [site(p[-2]), site(p[-1], access="store")], range="copy",
                  traffic=traffic(dram_load=40e6, dram_store=40e6, l2=80e6))
    return {"program": program.path, "sources": {"build/mine.cpp": "mine.cu"}, "card": "h100",
            "ended": "exit code 0", "kernels": [faulty, fine],
            "matmuls": [{"m": 65536, "n": 2304, "k": 768, "type": "bf16", "out_bytes": 2, "accumulate": False,
                         "epilogue": "bias", "launches": 1}],
            "copies": [{"kind": "memset", "bytes": 1 << 20, "launches": 1}],
            "sequence": [["kernel", 0], ["kernel", 0], ["kernel", 0], ["matmul", 0], ["copy", 0], ["kernel", 1]]}


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
        with open(path, "w", encoding="utf-8") as file:
            json.dump(raw or self.raw, file)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = report.main([path, "--source-root", self.folder, *options])
        return code, out.getvalue(), err.getvalue()

    def file(self, name, value):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file)
        return path

    def changed(self, change):
        raw = copy.deepcopy(self.raw)
        change(raw)
        return raw


# ---- which line an access belongs to

def lines_of_source(case):
    program, kernel_name = case.program, "void study::sum_kernel<64>(float*, float const*, float*)"
    symbols = Symbols(program.path, program.pcs, case.raw["sources"], case.folder)
    places = [symbols.place(pc, kernel_name) for pc in program.pcs]
    claim(len(places) == 10 and all(place.file == "mine.cu" for place in places),
          "every access has a line, in the file that the user wrote", f"{len(places)}")
    first = places[0]
    claim(first.line == line_of("load_pack(in)") and bare_name(first.function) == "sum_kernel<64>",
          "an access in load(), called by load_pack(), belongs to the kernel's line that calls that", str(first))
    claim(first.via == (f"mine.cu:{line_of('return *from')}", f"mine.cu:{line_of('return load(from)')}"),
          "and both accessors' lines are kept, innermost first", ", ".join(first.via))
    claim(places[1].line == line_of("out[0] = x") and not places[1].via, "the kernel's own line is its own")
    swap = [line_of(text) for text in ("first = tile[a]", "tile[b] + 1", "tile[b] + 1", "tile[b] = first")]
    claim([place.line for place in places[2:6]] == swap, "a function with several accessing lines names its own lines")
    claim(places[6].line == line_of("x[7] = 3"), "a function that was not inlined has no caller in its chain: it names "
          "the access")
    claim(places[7].line == line_of("system_store(out + 9)") and not places[7].via,
          "frames in dev/cpu are skipped: the line that calls them counts")
    copies = [symbols.place(pc, "copy_kernel(float*, float const*)") for pc in program.pcs[8:]]
    claim({place.line for place in copies} == {line_of("out[0] = in[0]")} and not copies[0].via,
          "a kernel with one accessing line is not skipped, though main() calls it")
    claim(symbols.place(12345).file == "?", "an address that was not looked up has no line, and no exception")


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


TESTS = [lines_of_source]
NO_PROGRAM = [names]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="DIR")
    options = parser.parse_args()
    if options.keep:
        os.makedirs(options.keep, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        case = Case(os.path.realpath(options.keep or temporary))
        for test, arguments in [(test, []) for test in NO_PROGRAM] + [(test, [case]) for test in TESTS]:
            print(f"== {test.__name__.replace('_', ' ')}")
            try:
                test(*arguments)
            except Exception:
                claim(False, f"{test.__name__} runs to its end", traceback.format_exc())
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

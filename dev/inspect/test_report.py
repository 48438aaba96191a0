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
from dataclasses import replace

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.append(os.path.join(ROOT, "dev", "bench"))
import gpu_model
import report
from cards import CARDS
from claims import COSTS, Launch, Softmax, claim_of, softmax_of
from estimate import (GAP_SECONDS, KERNEL_SECONDS, L2_PORT, MEMORY_SHARE, PIECE_SECONDS, TENSOR_SHARE, TURNS_OVERLAP,
                      estimate_launch, estimate_step, matmul_seconds, occupancy)
from gpu_report import PUBLISHED_ATTENTION
from pictures import Gallery, global_picture, shared_picture
from registers import parse as parse_registers
from results import Results
from symbols import Symbols, bare_name
from text import kernel_text

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
            "static_shared": 0, "launch_bound": 0, "launches": 1, "recorded_blocks": 8, "blocks": blocks,
            "threads": threads, "counts": {"__syncthreads": 8}, "tensor_flops": 0, "traffic": traffic(), "sites": sites,
            "races": [], "uninitialised": [], **more}


def recording(program):
    """Two kernels: one that is fine, one with conflicts, a race and an uninitialised read."""
    p = program.pcs
    load, store, read_a, read_b, write_a, write_b = p[:6]
    conflicts = {"base": 0, "offsets": [128 * lane for lane in LANES]}
    strided = {"base": 16, "offsets": [64 * lane for lane in LANES]}
    race = {"memory": "shared", "address": 128, "stack": [read_b], "access": "load", "by": "thread", "thread": 5, "block": 0,
            "other_stack": [write_b], "other_access": "store", "other_by": "thread", "other_thread": 37, "other_block": 0,
            "count": 64, "why": "no barrier orders them"}
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
    symbols = Symbols(program.path, [[pc] for pc in program.pcs], case.raw["sources"], case.folder)
    places = [symbols.place([pc], kernel_name) for pc in program.pcs]
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
    copies = [symbols.place([pc], "copy_kernel(float*, float const*)") for pc in program.pcs[8:]]
    claim({place.line for place in copies} == {line_of("out[0] = in[0]")} and not copies[0].via,
          "a kernel with one accessing line is not skipped, though main() calls it")
    end = program.end_of_outside
    claim(Symbols(program.path, [[end]], {}, case.folder).place([end]).line == line_of("x[7] = 3"),
          "an address is a return address: the call is before it")
    claim(symbols.place([12345]).file == "?", "an address that was not looked up has no line, and no exception")


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

def cards_of_the_stand_in():
    """{key: figures} and {name of a capability: figures} of dev/cpu/card.h"""
    with open(os.path.join(ROOT, "dev", "cpu", "card.h"), encoding="utf-8") as file:
        text = file.read()
    def value(expression):
        return eval(expression, {"kib": 1 << 10, "mib": 1 << 20, "__builtins__": {}}) // 1
    capabilities = {}
    for name, figures in re.findall(r"(\w+)\{(\d+, \d+, [^}]*)\}", text):
        capabilities[name] = [value(figure) for figure in figures.split(",")]
    cards = {}
    for key, capability, rest in re.findall(r'\{"(\w+)", "[^"]*", (\w+), ([^}]*)\}', text):
        cards[key] = (capabilities[capability], [value(figure.replace("/ 2", "// 2")) for figure in rest.split(",")])
    return cards


def cards():
    stand_in = cards_of_the_stand_in()
    claim(set(stand_in) == set(CARDS), "the cards are those of dev/cpu/card.h", " ".join(stand_in))
    for key, (capability, (multiprocessors, l2, _, _)) in stand_in.items():
        card = CARDS[key]
        has = card.capability
        ours = [has.major, has.minor, has.threads, has.blocks, has.shared, has.reserved_shared]
        claim([*capability[:-1], multiprocessors, l2] == [*ours, card.multiprocessors, card.l2_bytes],
              f"{key}: capability, multiprocessors and L2 cache are card.h's")
    a_clock = {"h100": 4096, "h200": 4096, "a100": 2048, "4090": 512, "l40s": 1024, "t4": 1024, "b200": 8192}
    for key, flops in a_clock.items():
        card = CARDS[key]
        claim(near(card.tensor, card.multiprocessors * flops * card.clock, 0.02),
              f"{key}: the data sheet's tensor FLOP/s are multiprocessors x {flops} x clock")


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
                          ("L1 and shared", {"wavefronts": 1e8}), ("special functions", {"special": 1e10}), ("tensor cores", {"tensor_flops": 1e12}),
                          ("a launch", {})]:
        claim(estimated(**launch).bound == bound, f"a launch that has mostly to do with {bound} is bound by it")
    memory = estimated(dram_load=6e8, dram_store=4e8).seconds
    claim(near(memory, 1e9 / (MEMORY_SHARE * 3.35e12)), "a gigabyte takes what the attainable bandwidth says")
    claim(near(estimated().seconds, KERNEL_SECONDS), "no kernel is shorter than a launch")
    claim(near(estimated(blocks=4, dram_load=1e8).seconds, 1e8 / (4 * L2_PORT * h100.clock)),
          "four blocks draw no more than four multiprocessors can")
    whole, more = (estimated(blocks=blocks, wavefronts=1e8).seconds for blocks in (1056, 1057))
    claim(near(more, 2 * 1056 / 1057 * whole, 1e-3), "one block more than a wave has takes another wave")
    alone = estimated(tensor_flops=1e12)
    between = softmax_of("attention_backward_dq_wgmma_kernel<64>", 1e12)
    soft = estimated(tensor_flops=1e12, softmax=between)
    claim(soft.seconds > 1.3 * alone.seconds, "a softmax between products costs time",
          f"{alone.seconds * 1e6:.0f} and {soft.seconds * 1e6:.0f} us")
    turns = estimated(tensor_flops=1e12, softmax=replace(between, turns=True)).seconds
    claim(near(soft.seconds - turns, TURNS_OVERLAP * (soft.seconds - alone.seconds)),
          "where groups take turns a part of it is hidden", f"{turns * 1e6:.0f} us")
    pieces = estimated(tensor_flops=1e12, softmax=replace(between, pieces=1320)).seconds
    claim(near(pieces - soft.seconds, 10 * PIECE_SECONDS), "and each piece of a block's work begins and ends alone")
    counted = softmax_of("attention_forward_wgmma_kernel<64>", 1e12, {"B": 3, "T": 1000, "C": 128}).pieces
    claim(counted == 3 * 2 * 6, "pieces are rows of a head by the 192 or 128", f"{counted}")


# FlashAttention-3, causal, H100, B * T = 16384, 2048 channels: TFLOP/s by (head size, T), as published.
FLASH3_FORWARD = {(64, 1024): 265, (64, 2048): 371, (64, 8192): 460, (64, 16384): 473,
                  (128, 1024): 423, (128, 2048): 521, (128, 8192): 602, (128, 16384): 616}
FLASH3_BACKWARD = {(128, 2048): 316, (128, 8192): 539}


def attention_rate(head_size, T, kernels, paper_flops, **changed):
    """TFLOP/s as papers count them, estimated. kernels: {name: FLOPs that are done}"""
    shape, seconds = {"B": 16384 // T, "T": T, "C": 2048}, 0
    for name, done in kernels.items():
        softmax = replace(softmax_of(f"attention_{name}_wgmma_kernel<{head_size}>", done, shape), **changed)
        launch = {**NOTHING, "blocks": 132, "tensor_flops": done}
        seconds += estimate_launch(CARDS["h100"], launch, 384, 200 << 10, 168, softmax).seconds
    return paper_flops / seconds / 1e12


def attention():
    """Against published figures of an H100, causal; of the diagonal's tiles more is multiplied than counts."""
    def forward_flops(head_size, T):
        return gpu_model.attention_flops(16384 // T, T, 2048 // head_size, head_size)["forward"]
    for (head_size, T), published in PUBLISHED_ATTENTION.items():
        flops, cudnn = forward_flops(head_size, T), published["forward"]["cuDNN"]
        rate = attention_rate(head_size, T, {"forward": flops * (1 + 128 / T)}, flops, turns=False, pieces=0)
        claim(0.75 * cudnn < rate < 1.15 * cudnn, f"without turns, heads of {head_size}, T = {T}: near cuDNN's",
              f"{rate:.0f} and {cudnn} TFLOP/s")
    for (head_size, T), published in FLASH3_FORWARD.items():
        flops = forward_flops(head_size, T)
        rate = attention_rate(head_size, T, {"forward": flops * (1 + 96 / T)}, flops)
        claim(0.8 * published < rate < 1.05 * published,
              f"with them, heads of {head_size}, T = {T}: near FlashAttention-3's, hardly above it",
              f"{rate:.0f} and {published} TFLOP/s")
    for (head_size, T), published in FLASH3_BACKWARD.items():
        flops = forward_flops(head_size, T)
        done = {"backward_dq": 1.5 * flops * (1 + 64 / T), "backward_dkv": 2 * flops * (1 + 64 / T)}
        rate = attention_rate(head_size, T, done, 2.5 * flops)
        claim(0.6 * published < rate < 1.05 * published,
              f"backward, heads of {head_size}, T = {T}: near FlashAttention-3's, hardly above it",
              f"{rate:.0f} and {published} TFLOP/s")


def product(m, n, k, out_bytes=2, accumulate=False, of="bf16"):
    return {"m": m, "n": n, "k": k, "type": of, "out_bytes": out_bytes, "accumulate": accumulate,
            "epilogue": "none"}


def matmuls():
    h100, h200 = CARDS["h100"], CARDS["h200"]
    def share(card, *sizes, **more):
        return 2 * math.prod(sizes) / matmul_seconds(card, product(*sizes, **more)) / card.tensor
    large = share(h100, 8192, 8448, 8192)
    claim(0.95 * TENSOR_SHARE < large <= TENSOR_SHARE, "a large matmul reaches what is attainable", f"{large:.3f}")
    claim(share(h100, 768, 2304, 65536, out_bytes=4) > 0.85 * TENSOR_SHARE, "a long sum with few tiles is split",
          f"{share(h100, 768, 2304, 65536, out_bytes=4):.3f}")
    claim(share(h100, 5888, 896, 4096) < 0.75 * TENSOR_SHARE, "161 tiles of 128 x 256 on 132 multiprocessors are two waves",
          f"{share(h100, 5888, 896, 4096):.3f}")
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
    shape = gpu_model.Shape(12, 12, 768, 1024, 50257, 64, 1024)
    seconds = sum(gpu_model.matmul_launches(shape, m) * matmul_seconds(h200, product(m.M, m.N, m.K))
                  for m in gpu_model.all_matmuls(shape))
    flops = sum(gpu_model.matmul_launches(shape, m) * m.flops for m in gpu_model.all_matmuls(shape))
    claim(600e12 < flops / seconds < 700e12, "all matmuls of a GPT-2 124M run at 600 to 700 TFLOP/s on an H200",
          f"{flops / seconds / 1e12:.0f}")


def steps():
    raw = {"sequence": [["kernel", 1], ["matmul", 0], ["kernel", 0], ["copy", 0], ["copy", 1]],
           "matmuls": [product(16, 16, 16)],
           "copies": [{"kind": "memset", "bytes": 10**9}, {"kind": "host to device", "bytes": 10**9}]}
    step = estimate_step(CARDS["h100"], raw, [1e-3, 2e-3])
    claim(near(step.parts["kernels"], 3e-3) and near(step.parts["matmuls"], KERNEL_SECONDS),
          "a step is the sum of what it launches")
    claim(near(step.parts["gaps"], 4 * GAP_SECONDS), "with a gap between any two")
    claim(3e-4 < step.parts["copies"] - 0.04 < 4e-4,
          "a memset goes at the memory's speed, a copy from the host at PCIe's", f"{step.parts['copies']:.4f} s")
    claim(near(step.tokens_per_second(1000), 1000 / sum(step.parts.values())), "and tokens a second follow")


def attention_launches(model):
    """Of a layer: tiles on the diagonal, 128 x 128 at T = 1024, are multiplied whole."""
    paper = gpu_model.attention_flops(model.micro_batch, model.seq_len, model.heads, model.channels // model.heads)
    for name, products in (("attention_forward", 2), ("attention_backward_dq", 3), ("attention_backward_dkv", 4)):
        done = products / 2 * paper["forward"] * (1 + 128 / model.seq_len)
        softmax = softmax_of(f"{name}_wgmma_kernel<{model.channels // model.heads}>", done, shape_of(model))
        launch = {**NOTHING, "blocks": 132, "tensor_flops": done}
        yield estimate_launch(CARDS["h200"], launch, 384, 200 << 10, 168, softmax)


def hand_counted_steps():
    """From gpu_model.py's bytes and matmuls, beside counts by hand from machine code and schedules."""
    h200 = CARDS["h200"]
    for name, by_hand, model in [("124M", 608e3, gpu_model.Shape(12, 12, 768, 1024, 50257, 64, 1024)),
                                 ("1558M", 58e3, gpu_model.Shape(48, 25, 1600, 1024, 50257, 16, 1024))]:
        need = gpu_model.kernel_bytes(model)
        update = sum(need.pop(kernel_name) for kernel_name in ("norm_partials", "adamw"))
        products = sum(gpu_model.matmul_launches(model, m) * matmul_seconds(h200, product(
            m.M, m.N, m.K, *((4, True) if "dweight" in m.name else ()))) for m in gpu_model.all_matmuls(model))
        memory = MEMORY_SHARE * h200.memory
        attention_ = model.layers * sum(launch.seconds for launch in attention_launches(model))
        gaps = 32 * model.layers * GAP_SECONDS
        step = 524288 / model.rows * (products + sum(need.values()) / memory + attention_ + gaps) + update / memory
        claim(near(524288 / step, by_hand, 0.1), f"GPT-2 {name}, H200: the parts add up to what was counted by hand",
              f"{524288 / step:,.0f} and {by_hand:,.0f} tokens/s")


# ---- cost lines

def shape_of(model):
    return {"B": model.micro_batch, "T": model.seq_len, "C": model.channels, "V": model.vocab, "L": model.layers}


def cost_lines():
    with open(os.path.join(ROOT, "train_gpt.cu"), encoding="utf-8") as file:
        trainer = file.read()
    missing = [name for name in COSTS if not re.search(rf"\b{name}\(", trainer)]
    claim(not missing, "every kernel of the table is in train_gpt.cu", ", ".join(missing))
    model = gpu_model.Shape(12, 12, 768, 1024, 50257, 64, 1024)
    shape, need, N = shape_of(model), gpu_model.kernel_bytes(model), model.rows
    def amount(name, grid, given=shape):
        found = claim_of(Launch(name, f"void {name}(__nv_bfloat16*, float*)", [*grid, 1, 1], given))
        return found and found.amount
    rows, C, L = N // 8, 768, 12
    bias = [amount("bias_backward_kernel", (3 * k, 1024)) for k in (3, 4)]      # 768 = 3 x 256 columns
    for kernel_name, total in [
            ("layernorm_forward", (2 * L + 1 - 0.5) * amount("layernorm_forward_kernel", (rows,))),
            ("layernorm_backward", (2 * L + 1) * amount("layernorm_backward_kernel", (1024,))),
            ("gelu_forward", L * amount("gelu_forward_kernel", (4 * N * C // 4096,))),
            ("bias_backward", L * sum(bias)),
            ("cross_entropy", 4 * amount("cross_entropy_kernel<(Want)1>", (16384,))),
            ("norm_partials", amount("norm_partials_kernel<float>", (1024,))),
            ("adamw", amount("adamw_kernel<float, float>", (-(-model.elements // 4096),)))]:
        claim(near(total, need[kernel_name], 1e-4),
              f"{kernel_name}: its launches' cost lines add up to gpu_model.py's", f"{total / need[kernel_name]:.5f}")
    in_16_bits = amount("adamw_kernel<__nv_bfloat16, __nv_bfloat16>", (1,))
    claim(in_16_bits == 4096 * (4 + 8 + 8 + 4), "adamw without a master copy: weight, moments and gradient, both ways")
    flops = [claim_of(Launch(f"{name}_wgmma_kernel<64>", "", [132, 1, 1], shape))
             for name in ("attention_forward", "attention_backward_dq", "attention_backward_dkv")]
    paper = gpu_model.attention_flops(64, 1024, 12, 64)
    claim(near(flops[0].amount, paper["forward"]) and near(flops[1].amount + flops[2].amount, 3.5 * paper["forward"]),
          "attention: 2 products forward, 7 backward, in FLOPs")
    claim(amount("layernorm_forward_kernel", (rows,), {}) is None and amount("somebodys_kernel", (1,)) is None,
          "no claim where sizes or the kernel are unknown")
    claim(amount("gelu_forward_kernel", (2,), {}) == 2 * 2 * 4096 * 2, "an elementwise kernel's grid says its size")


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
    claim(rows[0].split()[5:] == ["memory", "4.50", "8.75", "-", "32.0", "-", "50", "%", "1"],
          "with what bounds it, ratios, lanes, occupancy and races", " ".join(rows[0].split()[5:]))
    claim("tokens/s" not in out, "no tokens a second where nobody said how many")
    _, out, _ = case.run("--tokens", "65536", "--card", "a100")
    claim("tokens/s at 65,536 tokens" in out and "A100" in out, "--tokens and --card are taken")
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
    claim("thread 3 of block 1 loads byte 64 of shared memory" in out and "nobody has written" in out,
          "an uninitialised read is a sentence")
    claim("copy_kernel" not in out, "other kernels are left out")


def users_json(case):
    path = os.path.join(case.folder, "out.json")
    case.run("--json", path, "--tokens", "1024")
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
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
    path = case.file("registers.json", {symbol: {"registers": 128, "spills": 8}})
    results = case.results(registers={symbol: {"registers": 128, "spills": 8}})
    kernel_ = results.matching("sum")[0]
    claim((kernel_.registers, kernel_.estimate.occupancy.bound, kernel_.estimate.occupancy.blocks) ==
          (128, "registers", 2), "registers bound how many blocks there are")
    claim("128!" in case.run("--registers", path)[1], "and a kernel that spills is marked")
    other = symbol.replace("PfPKfS", "PvPKfS") if "PfPKfS" in symbol else symbol[:-2] + "Pv"
    kernel_ = case.results(registers={other: {"registers": 77, "spills": 0}}).matching("sum")[0]
    claim(kernel_.registers == 77, "a kernel whose parameters have other types on a GPU is found by its name", other)


# ---- the check

def allow(kernel_name, what, allowed, reason="as it must be"):
    return {"kernel": kernel_name, "what": what, "allowed": allowed, "reason": reason}


def without_hazards(raw):
    raw["kernels"][0].update(races=[], uninitialised=[])


def checks(case):
    def check(table, raw=None):
        code, out, err = case.run("--check", "--allowances", case.file("allowances.json", table), raw=raw)
        return code, out.splitlines()[-1] if out else "", out + err
    code, last, out = check([])
    claim(code == 1 and last == "4 findings", "a race, an uninitialised read, sectors and wavefronts are found", last)
    where = f"sum_kernel<64>: mine.cu:{line_of('load_pack(in)')}"
    claim(f"{where}: sectors are 4.500 times the least; allowed: 1.000" in out,
          "a finding names kernel, file and line, what was found and what is allowed")
    clean = case.changed(without_hazards)
    exact = [allow("sum_kernel<64>", "sectors", 4.5), allow("sum_kernel", "wavefronts", 8.75)]
    claim(check(exact, clean)[:2] == (0, "0 findings"), "what is allowed is none, by name or for all of a template")
    claim(check(exact)[:2] == (1, "2 findings"), "races and uninitialised reads cannot be allowed")
    loose = [allow("sum_kernel<64>", "sectors", 4.7), exact[1]]
    code, last, out = check(loose, clean)
    claim(code == 1 and "allowance no longer needed" in out, "an allowance that is looser than needed is a finding")
    claim(check(exact + [allow("unrecorded_kernel", "sectors", 9)], clean)[0] == 0,
          "the allowance of a kernel that was not recorded is none")
    claim(check([allow("copy_kernel", "sectors", 1.5), *exact], clean)[0] == 1, "one for a kernel that needs none is")
    def worsen(raw):
        without_hazards(raw)
        raw["kernels"][1]["sites"][0]["sectors"] += 1
    claim(check(exact, case.changed(worsen))[0] == 1, "one sector more than the least is a finding")
    code, _, out = check([{"kernel": "sum_kernel", "what": "speed", "allowed": 1, "reason": "x"}])
    claim(code == 2 and "sectors, wavefronts, cost" in out, "an entry of another form is refused: what was expected")
    claim(check([allow("sum_kernel", "sectors", 4.5, "")])[0] == 2, "and one without a reason")
    with open(os.path.join(HERE, "allowances.json"), encoding="utf-8") as file:
        claim(isinstance(json.load(file), list), "the project's own table is a list")


def check_of_costs(case):
    """A recording whose second kernel is a trainer's, of which grid and cost line are known."""
    blocks, name = 512, "_Z19gelu_forward_kernelP13__nv_bfloat16PKS_m"
    def gelu(raw, share):
        without_hazards(raw)
        raw["kernels"] = [raw["kernels"][1]]
        raw["kernels"][0].update(symbol=name, grid=[blocks, 1, 1], blocks=blocks,
                                 traffic=traffic(dram_load=share * 2 * blocks * 4096, dram_store=2 * blocks * 4096))
        raw["sequence"] = []
    for share, code in ((1.0, 0), (1.09, 0), (1.2, 1)):
        raw = case.changed(lambda raw: gelu(raw, share))
        found, out, _ = case.run("--check", "--allowances", case.file("allowances.json", []), raw=raw)
        claim(found == code, f"memory moved {(1 + share) / 2:.3f} times the cost line: exit code {code}")
    claim("bytes to and from memory are 1.100 times the cost line" in out, "and the finding says so")
    table = case.file("allowances.json", [allow("gelu_forward_kernel", "cost", 1.06)])
    found = case.run("--check", "--allowances", table, raw=case.changed(lambda raw: gelu(raw, 1.09)))[0]
    claim(found == 1, "an allowance where 1.05, which all are allowed, would do is a finding")


# ---- the page

def page_of(case):
    path = os.path.join(case.folder, "report.html")
    code, _, err = case.run("--html", path, "--tokens", "65536")
    with open(path, encoding="utf-8") as file:
        text = file.read()
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


def large_page(case):
    def grow(raw):
        first, sites = raw["kernels"][0], []
        for n in range(20):
            sites.append(site(case.program.pcs[n % 6], "global" if n % 2 else "shared", bytes_per_lane=4 << n % 3))
        raw["kernels"] = []
        for k in range(30):
            spread = [{**s, "picture": {"base": 0, "offsets": [(k + 2) * (n + 3) * 4 * lane for lane in LANES]}}
                      for n, s in enumerate(sites)]
            raw["kernels"].append({**first, "sites": spread})
        raw["sequence"] = []
    path = os.path.join(case.folder, "large.html")
    case.run("--html", path, raw=case.changed(grow))
    claim(os.path.getsize(path) < 3e6, "30 kernels of 20 different pictures each take less than 3 MB",
          f"{os.path.getsize(path) / 1e6:.2f} MB")


def drawn(space, size, offsets, base=0):
    """(caption, drawing)"""
    one = site(0, space, bytes_per_lane=size, picture={"base": base, "offsets": offsets})
    drawing, _, caption = (global_picture if space == "global" else shared_picture)(one)
    return caption, drawing


def pictures():
    for text, arguments, caption in [
            ("neighbouring words", ("global", 4, [4 * lane for lane in LANES]), "4 sectors fetched, 128 of their 128"),
            ("words that begin off a sector", ("global", 4, [4 * lane for lane in LANES], 4), "5 sectors fetched, 128"),
            ("words far apart", ("global", 4, [256 * lane for lane in LANES]), "32 sectors fetched, 128 of"),
            ("all the same word", ("global", 4, [0] * 32), "1 sector fetched, 4 of their 32"),
            ("half of the lanes", ("global", 4, [4 * lane if lane < 16 else -1 for lane in LANES]), "2 sectors"),
            ("packs of 16 bytes", ("global", 16, [16 * lane for lane in LANES]), "16 sectors fetched, 512 of"),
            ("a word for each bank", ("shared", 4, [4 * lane for lane in LANES]), "1 wavefront for"),
            ("one bank", ("shared", 4, [128 * lane for lane in LANES]), "32 wavefronts"),
            ("two words apart", ("shared", 4, [8 * lane for lane in LANES]), "2 wavefronts"),
            ("the same word", ("shared", 4, [64] * 32), "1 wavefront for"),
            ("16 bytes, by quarters", ("shared", 16, [16 * lane for lane in LANES]), "4 wavefronts"),
            ("16 bytes, 64 apart", ("shared", 16, [64 * lane for lane in LANES]), "16 wavefronts"),
            ("8 bytes, by halves", ("shared", 8, [8 * lane for lane in LANES]), "2 wavefronts"),
            ("2 bytes: two lanes a word", ("shared", 2, [2 * lane for lane in LANES]), "1 wavefront for")]:
        found = drawn(*arguments)[0]
        claim(found.startswith(caption), f"{text}: {caption}", found)
    _, apart = drawn("global", 4, [256 * lane for lane in LANES])
    claim(apart.count("z") == 32 and apart.count("<path class=l") == 32, "each sector and each lane is drawn")
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
    path = os.path.join(case.folder, "strange.html")
    code, out, err = case.run("--kernel", "_kernel", "--html", path, raw=case.changed(strange))
    claim(code == 0 and re.search(r"8\.00\*.* 0$", out, re.M), "an access that has no line is shown as line 0", err)
    with open(path, encoding="utf-8") as file:
        claim("8.00 × sectors" in file.read(), "on the page too")
    results = case.results({**case.raw, "sources": {"build/mine.cpp": "gone.cu"}})
    text = "\n".join(kernel_text(results, results.kernels[0]))
    claim("32.00*" in text and "gone.cu" in text and "tile[a]" not in text, "without the source there are the figures alone")


# ---- mistakes

def mistakes(case):
    missing = os.path.join(case.folder, "nothing.json")
    broken = os.path.join(case.folder, "broken.json")
    with open(broken, "w", encoding="utf-8") as file:
        file.write("{")
    other = case.file("other.json", {"a": 1})
    for text, options, changes, words in [
            ("no registers", ["--registers", missing], {}, f"registers {missing}: No such file"),
            ("registers that are no JSON", ["--registers", broken], {}, "is no JSON"),
            ("a kernel that was not recorded", ["--kernel", "nobody"], {}, "found copy_kernel, sum_kernel<64>"),
            ("a shape that is none", ["--shape", "[1]"], {}, "whole numbers, found [1]"),
            ("a card that is none", [], {"card": "voodoo"}, "'voodoo'; expected one of h100"),
            ("a program that is gone", [], {"program": "gone"}, "gone does not exist"),
            ("a file that cannot be written", ["--html", case.folder], {}, "Is a directory")]:
        code, _, err = case.run(*options, raw={**case.raw, **changes})
        claim(code == 2 and words in err, f"{text}: exit code 2, and what was found: {words}", err.strip())
    for path, words in ((missing, "No such file"), (broken, "is no JSON"), (other, 'found no "kernels"')):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            code = report.main([path])
        said = err.getvalue().strip()
        claim(code == 2 and words in said, f"a recording {os.path.basename(path)}: {words}", said)


NO_PROGRAM = [names, cards, occupancies, launches, attention, matmuls, steps, hand_counted_steps, cost_lines, registers,
              pictures]
TESTS = [lines_of_source, terminal, one_kernel, users_json, registers_in_the_report, checks, check_of_costs, page_of,
         large_page, unknown_lines, mistakes]


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

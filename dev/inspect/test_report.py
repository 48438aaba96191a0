#!/usr/bin/env python3
"""Tests the parts of the report that need no recording: names, cards, estimates, machine code, pictures, colours.
test_inspect.py tests reports on recordings."""
import math
import os
import sys
from collections import Counter
from types import SimpleNamespace

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, ".."), os.path.join(HERE, "..", "tests")]
from cards import CARDS
from testing import expect, expect_equal, run_tests, write
from estimate import (FP8_SHARE, GAP_SECONDS, KERNEL_SECONDS, L2_PORT, MEMORY_SHARE, PIECE_SECONDS, SHARPNESS,
                      TENSOR_SHARE, TURNAROUND, TURNS_OVERLAP, Softmax, combined, launch_bounds, matmul_seconds,
                      resident_blocks, step_seconds)
from executions import executions
from page import glossary, level
from pictures import Gallery, global_picture, shared_picture
from results import Expectations
from sass import analyse, main_loop, parse_log, read_listing, successors
from symbols import Sources, bare_name
from text import facts

H100 = CARDS["h100"]


def near(a, b, tolerance=1e-6):
    return math.isclose(a, b, rel_tol=tolerance)


def test_names():
    for function, name in [
            ("layernorm_backward_kernel(float*)", "layernorm_backward_kernel"),
            ("void attention_forward_wgmma_kernel<64>(float*, TensorMap)", "attention_forward_wgmma_kernel<64>"),
            ("void study::detail::k<study::Pair<int, float>, 3>(study::Pair<int, float>)",
             "k<study::Pair<int, float>, 3>"),
            ("void cross_entropy_kernel<(Want)1>(float*, float*)", "cross_entropy_kernel<(Want)1>"),
            ("(anonymous namespace)::hidden(int)", "hidden"),
            ("study::k(void (*)(int))", "k")]:
        expect_equal(bare_name(function), name, f"the name of {function} is {name}")


# ---- cards and estimates

def test_cards():
    """Dense BF16 FLOPs per clock of a multiprocessor, from the white papers."""
    for key, a_clock in [("h100", 4096), ("h200", 4096), ("a100", 2048), ("4090", 512), ("l40s", 1024), ("t4", 1024),
                         ("b200", 8192), ("h100-pcie", 4096), ("a6000", 1024), ("a4000", 1024), ("3090", 512),
                         ("3070", 512), ("3070-laptop", 512), ("3050-laptop", 512), ("2080ti", 512), ("2070s", 512)]:
        card = CARDS[key]
        expect(near(card.tensor, card.multiprocessors * a_clock * card.clock, 0.02),
               f"{key}: the data sheet's tensor FLOP/s equal multiprocessors x {a_clock} x clock within 2 %")
    expect_equal([CARDS[key].arch for key in ("h100", "4090", "b200")], ["sm_90a", "sm_89", "sm_100"],
                 "nvcc's -arch of h100, 4090 and b200")
    expect_equal([CARDS[key].fp8 for key in ("h100", "4090", "a100", "t4")], [1978.8e12, 330.4e12, 0, 0],
                 "FP8 has twice the BF16 rate from capability 8.9 on, and 0 below")
    expect_equal(round(CARDS["t4"].bandwidth / 1e9), 256, "a T4 attains 80 % of its data sheet's bandwidth")
    expect_equal(len(CARDS), 16, "all 16 cards of dev/cpu/card.h are read")


def test_resident_blocks():
    for text, card, arguments, blocks in [
            ("256 threads", H100, (256, 0), 8), ("32 threads", H100, (32, 0), 32),
            ("1024 of 1536 threads", CARDS["4090"], (1024, 0), 1), ("33 threads count as 64", H100, (33, 0), 32),
            ("48 KiB of shared memory and 1 KiB reserved by CUDA", H100, (256, 48 << 10), 4),
            ("104 KiB", H100, (256, 104 << 10), 2), ("227 KiB", H100, (256, 227 << 10), 1),
            ("168 registers x 384 threads", H100, (384, 0, 168), 1),
            ("33 registers count as 40", H100, (256, 0, 33), 6),
            ("228 KiB, above the maximum of a block", H100, (256, 228 << 10), 0)]:
        expect_equal(resident_blocks(card, *arguments), blocks, f"{text}: {blocks} blocks per multiprocessor")


def estimated(blocks=1024, softmax=Softmax(), resident=8, card=H100, **launch):
    """Returns the longest bound and its seconds; figures that `launch` does not have are 0."""
    bounds = launch_bounds(card, Counter(launch), blocks, resident, softmax)
    return max(bounds.items(), key=lambda item: item[1])


def test_launches():
    for bound, launch in [("memory", {"dram_load": 6e8, "dram_store": 4e8}), ("L2", {"l2": 1e9}),
                          ("L2", {"partial": 1e9}), ("L1 and shared", {"cycles": 1e8}),
                          ("special functions", {"special": 1e10}),
                          ("instructions", {"instructions": 1e9}), ("instructions", {"requests": 1e9, "cycles": 1e9}),
                          ("tensor cores", {"tensor_flops": 1e12}),
                          ("latency", {"waits_memory": 1e5}), ("atomics", {"hot_atomics": 1e7}),
                          ("block starts", {"blocks": 1 << 24, "resident": 32})]:
        expect_equal(estimated(**launch)[0], bound, f"a launch whose work is mostly for {bound} is bound by it")
    expect(near(estimated(dram_load=1e9)[1], 1e9 / (MEMORY_SHARE * 3.35e12)),
           "a gigabyte takes its bytes divided by the attainable bandwidth")
    expect(near(estimated(dram_load=5e8, dram_store=5e8)[1], (1 + TURNAROUND) * estimated(dram_load=1e9)[1]),
           "... and longer if half of them are stored")
    expect(near(estimated(dram_load=2e9, resident_load=1e9)[1], estimated(dram_load=1e9)[1]),
           "... without those that L2 has when the launch begins")
    expect(near(estimated(blocks=4, dram_load=1e8)[1], 1e8 / (4 * L2_PORT * H100.clock)),
           "four blocks are limited by the L2 bandwidth of four multiprocessors")
    whole, more = (estimated(blocks=blocks, cycles=1e8)[1] for blocks in (1056, 1057))
    expect(near(more, 2 * 1056 / 1057 * whole, 1e-3), "one block more than a full wave takes another wave")
    expect(near(estimated(cycles_of_16=1e8, card=CARDS["3070"])[1] * 46 * 1.725,
                estimated(cycles=1e8, blocks=1056)[1] * 132 * 1.83, 0.1),
           "multiprocessors with 16 load/store units take the cycles of such")
    few, many = (estimated(blocks=1 << 14, waits_memory=1 << 18, resident=resident)[1] for resident in (2, 8))
    expect(near(few, 4 * many), "a quarter of the resident blocks takes four times as many waves of latency")
    for figure, amount in (("cycles", 1e6), ("waits_l2", 1e4), ("instructions", 1e6), ("warp_instructions", 1e6),
                           ("special", 1e7), ("warp_special", 1e7), ("dram_load", 1e8)):
        of_block = Counter({figure: amount})
        expect(near(estimated(**{figure: amount}, longest_block=of_block)[1], estimated(blocks=1, **of_block)[1], 0.02),
               f"{figure}: a launch takes as long as its longest block")
    fma = estimated(instructions=1e9, fp32=1e9, card=CARDS["a100"])[1] / estimated(instructions=1e9,
                                                                                   card=CARDS["a100"])[1]
    expect(near(fma, 2, 0.01), "FP32 instructions take twice as long on an A100, which has lanes for half of the slots")
    launch = {"memory": 3e-6, "L2": 3e-6, "latency": 0.0}
    expect(near(combined(launch), KERNEL_SECONDS + 3e-6 * 2 ** (1 / SHARPNESS)),
           "two equal bounds take longer than one of them, and a launch takes at least KERNEL_SECONDS")
    expect_equal(combined({"memory": 0.0}), KERNEL_SECONDS, "a kernel without work takes KERNEL_SECONDS")
    between = {"scores": 1e12 / (2 * 3 * 64), "instructions": 2.5}
    alone, soft, ping_pong, tiles = (estimated(tensor_flops=1e12, softmax=softmax)[1] for softmax in (
        Softmax(), Softmax(**between), Softmax(**between, turns=True), Softmax(**between, pieces=1320)))
    expect(soft > 1.3 * alone, "a softmax between products adds time", f"{alone * 1e6:.0f} and {soft * 1e6:.0f} us")
    expect(near(soft - ping_pong, TURNS_OVERLAP * (soft - alone)), "ping-pong scheduling hides a part of the softmax")
    expect(near(tiles - soft, 10 * PIECE_SECONDS), "each work tile of a block adds PIECE_SECONDS")


# {(head size, T): measured TFLOP/s of the trainer's causal forward}: data/gpu/2026-11-26.md, B * T = 16384, 2048
# channels
FORWARD = {(64, 1024): 338, (64, 2048): 431, (64, 8192): 525, (128, 1024): 412, (128, 2048): 516, (128, 8192): 625}


def test_attention():
    """Tiles on the diagonal are multiplied completely: (1 + 96 / T) times the FLOPs that papers count."""
    for (head_size, T), measured in FORWARD.items():
        flops = 2 * 16384 * T * 2048
        done = flops * (1 + 96 / T)
        rows = 192 if head_size == 64 else 128
        softmax = Softmax(done / (4 * head_size), 2.5, True, 16384 // T * (2048 // head_size) * -(-T // rows))
        rate = flops / estimated(blocks=132, tensor_flops=done, softmax=softmax)[1] / 1e12
        expect(0.85 * measured < rate < 1.1 * measured,
               f"attention, head size {head_size}, T = {T}: the rate is 15 % below to 10 % above the measured one",
               f"{rate:.0f} and {measured} TFLOP/s")


def product(m, n, k, out_bytes=2, of="bf16"):
    return {"m": m, "n": n, "k": k, "type": of, "out_bytes": out_bytes, "accumulate": False, "epilogue": "none"}


def test_matmuls():
    def share(*sizes, **more):
        return 2 * math.prod(sizes) / matmul_seconds(H100, product(*sizes, **more)) / H100.tensor

    large = share(8192, 8448, 8192)
    expect(0.95 * TENSOR_SHARE < large <= TENSOR_SHARE, "a large matmul attains TENSOR_SHARE", f"{large:.3f}")
    expect(near(share(8192, 8448, 8192, of="fp8"), 2 * FP8_SHARE / TENSOR_SHARE * large),
           "a large matmul in FP8 attains FP8_SHARE of twice the rate")
    split, waves = share(768, 2304, 65536, out_bytes=4), share(5888, 896, 4096)
    expect(split > 0.85 * TENSOR_SHARE, "a matmul with few tiles and a large K uses split-K", f"{split:.3f}")
    thin = product(1 << 20, 64, 64)
    more = matmul_seconds(H100, {**thin, "epilogue": "gelu_aux"}) / matmul_seconds(H100, thin)
    expect(near(more, 1.5, 0.01), "a GELU epilogue that stores its input moves a third matrix", f"{more:.3f}")
    expect(waves < 0.75 * TENSOR_SHARE, "161 tiles of 128 x 256 take two waves of 132 multiprocessors", f"{waves:.3f}")
    for of, moved in (("bf16", 2 * (2 * (1 << 26) + 64 * 64)), ("fp8", 3 * (1 << 26) + 64 * 64)):
        expect(near(matmul_seconds(H100, product(1 << 20, 64, 64, of=of)),
                    (1 + TURNAROUND) * moved / (MEMORY_SHARE * 3.35e12)),
               f"a thin matmul in {of} is bound by memory bandwidth")
    expect_equal(matmul_seconds(H100, product(16, 16, 16)), KERNEL_SECONDS, "a tiny matmul takes KERNEL_SECONDS")
    raw = {"sequence": [["kernel", 1], ["matmul", 0], ["kernel", 0]], "matmuls": [product(16, 16, 16)]}
    expect_equal(step_seconds(H100, raw, [1e-3, 2e-3]),
                 {"kernels": 3e-3, "matmuls": KERNEL_SECONDS, "gaps": 2 * GAP_SECONDS},
                 "the time of a step is the sum of its launches and of a gap between each two")


def test_executions():
    """A kernel of 2 warps with a loop, unrolled 4 times, and its remainder; the loop runs 100 times."""
    loops = [{"depth": 0, "parent": None, "lines": ["a.cu", 1, 9], "round_trips": 0,
              "counts": {"all": 20, "STG.32": 1}},
             {"depth": 1, "parent": 0, "lines": ["a.cu", 4, 5], "round_trips": 1,
              "counts": {"all": 16, "LDG.32": 4, "FADD": 4}},
             {"depth": 1, "parent": 0, "lines": ["a.cu", 4, 5], "round_trips": 1,
              "counts": {"all": 7, "LDG.32": 1, "FADD": 1}}]
    sites = [([("b.h", 30), ("a.cu", 4)], ("global", "load"), 2 * 400 * 128, (700, 80, 20)),
             ([("a.cu", 8)], ("global", "store"), 2 * 128, (0, 0, 0))]
    expect_equal({name: round(figure) for name, figure in executions(loops, sites, 2).items()},
                 {"busy": 2 * (20 + 100 * 16), "instructions": 2 * (20 + 100 * 16), "fp32": 2 * 400, "waits_l1": 100,
                  "waits_l2": 80, "waits_memory": 20},
                 "loops run as often as their accesses say; a remainder with the same lines does not run; a round trip "
                 "of four loads waits for the slowest of them")
    loops[2] = {**loops[2], "lines": ["a.cu", 6, 7], "counts": {"all": 7}, "round_trips": 0, "depth": 2, "parent": 1}
    expect_equal(executions(loops, sites, 2)["instructions"], 2 * (20 + 100 * 16 + 100 * 7),
                 "an inner loop without accesses counts once per iteration of the outer one")


def test_registers():
    log = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_90a'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers"""
    figures = {"_Z1kv": {"registers": 255, "spills": 84}, "_Z5otherv": {"registers": 24, "spills": 0}}
    expect_equal(parse_log(log), figures, "registers and spills are read from ptxas's output")


# ---- machine code

LISTING = """//--------------------- .text._Z5scalePfPKfi     --------------------------
	.section	.text._Z5scalePfPKfi,"ax",@progbits
_Z5scalePfPKfi:
.text._Z5scalePfPKfi:
	//## File "t.cu", line 14 inlined at "t.cu", line 16
	//## File "t.cu", line 16
        /*0660*/                   LDG.E R10, desc[UR6][R6.64] ;                  /* 0x00000006060a7981 */
                                                                                  /* 0x000ea2000c1e1900 */
	//## File "t.cu", line 17
.L_x_2:
        /*0700*/                   FMUL R15, R10, R15 ;                           /* 0x0000000f0a0f7220 */
                                                                                  /* 0x004fca0000400000 */
        /*0730*/               @P0 BRA `(.L_x_2) ;                                /* 0xfffffffc00b00947 */
                                                                                  /* 0x000fea000383ffff */
"""


def instructions(text):
    """Returns the parsed instructions and labels of lines like "FADD R2, R2, R3 !1 ?0": ! announces scoreboard 1,
    ? waits for scoreboard 0. The source line is the number of the instruction."""
    lines = ["//---- .text.k ----"]
    for number_, line in enumerate(text.splitlines()):
        if line.endswith(":"):
            lines.append(line)
            continue
        words = line.split()
        announces = next((int(word[1:]) for word in words if word[0] == "!" and word[1:].isdigit()), 7)
        control = announces << 5 | sum(1 << 11 + int(word[1:]) for word in words if word[0] == "?")
        code = " ".join(word for word in words if word[0] not in "!?")
        lines += [f'\t//## File "k.cu", line {number_}', f"        /*{16 * number_:04x}*/  {code} ; /* 0x0 */",
                  f"   /* 0x{control << 41:016x} */"]
    return read_listing("\n".join(lines))["k"]


def test_listing():
    code, labels = read_listing(LISTING)["_Z5scalePfPKfi"]
    expect_equal([(i.guard, i.name, i.operands[0], i.places, i.announces, i.waits) for i in code],
                 [("", "LDG.E", "R10", ("t.cu:14", "t.cu:16"), 2, 0), ("", "FMUL", "R15", ("t.cu:17",), 7, 4),
                  ("@P0", "BRA", "`(.L_x_2)", ("t.cu:17",), 7, 0)],
                 "nvdisasm's listing: guards, names, inlined lines, scoreboards")
    expect_equal((labels[".L_x_2"], successors(code, labels)), (1, [[1], [2], [1]]), "labels and branch targets")


def analysed(text):
    """Returns the figures of the main loop."""
    return main_loop(analyse(*instructions(text)))


SHARED_WAIT = """S2R R0, SR_TID.X
.L_1:
LDG.E.128 R4, desc[UR4][R2.64] !0
LDG.E.128 R8, desc[UR4][R2.64+0x200] !1
FADD R0, R0, R4 ?0
FADD R0, R0, R8 ?1
LDG.E R12, desc[UR4][R2.64+0x400] !0
FADD R0, R0, R12 ?0
@P0 BRA `(.L_1)
EXIT"""
NESTED = """S2R R0, SR_TID.X
.L_1:
IADD3 R1, R1, 0x1, RZ
.L_2:
LDG.E R4, desc[UR4][R2.64] !0
@P0 BRA `(.L_2)
@P1 BRA `(.L_1)
EXIT"""


def test_loops():
    loop = analysed(SHARED_WAIT)
    expect_equal((loop["bytes"], loop["round_trips"], loop["lines"]),
                 (2 * 512 + 128, 2, ["k.cu", 2, 8]),
                 "two loads of 16 bytes per lane before a wait, then one of 4 bytes: 1,024 bytes and 2 round trips")
    expect_equal(loop["counts"], {"all": 7, "LDG.128": 2, "FADD": 3, "LDG.32": 1, "BRA": 1}, "instructions are counted")
    outer, inner = analyse(*instructions(NESTED))[1:]
    expect_equal((outer["depth"], inner["depth"], inner["parent"], outer["counts"]["all"]), (1, 2, 1, 2),
                 "a loop in a loop: its instructions do not count in the outer one")


def test_expectations():
    found = Expectations(shape={"T": 5})
    found.names = {"softmax": lambda launch, shape: {"scores": shape["T"], "turns": True}}
    expect_equal(found.softmax(SimpleNamespace(name="")), Softmax(5, turns=True),
                 "--costs: softmax() gets the run's shape")


# ---- the page

def test_colours():
    levels = [level(ratio) for ratio in (None, 1.0, 1.01, 1.05, 1.06, 2.0, 2.1, 4.1, 8.1, 16.5)]
    expect_equal(levels, ["", "", "", "", "r1", "r1", "r2", "r3", "r4", "r4"],
                 "1.01 is neutral and 16.50 red; between them the colour changes with each doubling")
    expect(all(f"<dt>{term}</dt>" in glossary() for term in ("sector", "wavefront", "bank conflict", "race")) and
           not any(mark in glossary() for mark in ("**", "`", "](")), "the page defines README.md's terms, as HTML")
    loop = {"depth": 0, "tma": False}
    kernel = SimpleNamespace(bounds={}, grid=[1], block=[8, 8, 1], raw={"recorded_blocks": 1}, blocks=1, shared=0,
                             cost=0, moved_bytes=0, main_loop=loop)
    expect("main loop" not in dict(facts(kernel)), "a kernel without a loop has no main loop")


LANES = range(32)


def drawn(space, size, offsets, base=0):
    """Returns (caption, drawing)."""
    site = {"access": "load", "bytes_per_lane": size, "picture": {"base": base, "offsets": offsets}}
    drawing, _, caption = (global_picture if space == "global" else shared_picture)(site)
    return caption, drawing


def test_pictures():
    for space, size, stride, base, caption in [
            ("global", 4, 4, 0, "4 sectors loaded; 128 of their 128"), ("global", 4, 4, 4, "5 sectors loaded; 128"),
            ("global", 4, 256, 0, "32 sectors loaded; 128 of"), ("global", 4, 0, 0, "1 sector loaded; 4 of their 32"),
            ("global", 16, 16, 0, "16 sectors loaded; 512 of"), ("shared", 4, 4, 0, "1 wavefront for"),
            ("shared", 4, 128, 0, "32 wavefronts"), ("shared", 4, 8, 0, "2 wavefronts"),
            ("shared", 4, 0, 0, "1 wavefront for"), ("shared", 16, 16, 0, "4 wavefronts"),
            ("shared", 16, 64, 0, "16 wavefronts"), ("shared", 8, 8, 0, "2 wavefronts"),
            ("shared", 2, 2, 0, "1 wavefront for")]:
        found = drawn(space, size, [stride * lane for lane in LANES], base)[0]
        expect(found.startswith(caption), f"{space}, {size} bytes, stride {stride}, offset {base}: {caption}", found)
    caption, half = drawn("global", 4, [4 * lane if lane < 16 else -1 for lane in LANES])
    expect_equal((caption[:9], half.count("<path"), half.count("'grid'")), ("2 sectors", 16, 16),
                 "16 active lanes: 2 sectors; inactive lanes are drawn empty")
    _, spread = drawn("global", 4, [256 * lane for lane in LANES])
    expect_equal((spread.count("'unused'"), spread.count("<path class=l")), (32, 32), "all sectors and lanes are drawn")
    _, conflict = drawn("shared", 4, [128 * (lane // 16) + 4 * (lane % 16) for lane in LANES])
    expect_equal(conflict.count(" bad' />"), 32, "lanes in a bank conflict are framed")
    _, quarters = drawn("shared", 16, [16 * lane for lane in LANES])
    expect(" bad'" not in quarters and "lanes 24–31" in quarters, "quarter warps do not conflict with each other")
    gallery = Gallery()
    site = {"space": "global", "access": "load", "bytes_per_lane": 4}
    figures = {gallery.figure({**site, "picture": {"base": base, "offsets": [4 * lane for lane in LANES]}})
               for base in (0, 1 << 20)}
    expect_equal((len(figures), len(gallery.drawings)), (1, 1), "equal pictures are stored once")
    expect_equal(gallery.figure(site), "", "a site without a recorded request has no picture")


def test_sources():
    write("marked.cu", b"\xef\xbb\xbf// first\r\nint a;\x0c\r\nint b;\r\n")
    expect_equal([Sources().text("marked.cu", line) for line in (1, 2, 3, 9)], ["// first", "int a;\x0c", "int b;", ""],
                 "source lines of a file with a byte order mark, CRLF and a form feed")


if __name__ == "__main__":
    run_tests(globals())

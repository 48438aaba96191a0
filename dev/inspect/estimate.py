"""Estimates a launch's time from its work and a GPU's data sheet. Nothing here is measured; validation.md compares the
estimates with published measurements.

A launch takes KERNEL_SECONDS plus a smooth maximum of these bounds, (sum of bound^SHARPNESS)^(1 / SHARPNESS), because
none of them overlaps the others fully:

    memory              bytes / bandwidth, a little more if loads and stores alternate; a sector that is only stored in
                        part is loaded as well; without what earlier work has left in L2
    L2                  bytes / L2's bandwidth, or the bandwidth of the multiprocessors that have a block; a partial
                        store of a sector costs as much as PARTIAL_BYTES
    L1 and shared       cycles: one memory, which delivers 128 bytes and looks up one line of each of 4 sets per clock,
                        for the lanes that the load/store units process per clock
    instructions        warp instructions / 4 schedulers, or FP32 instructions / lanes, or those of a block's longest
                        warp, one after another. Without machine code: INSTRUCTIONS per request of memory
    special functions   exp2 and similar functions: 16 per clock
    tensor cores        FLOPs / rate; plus the instructions of a softmax between products, if the kernel has one
    latency             waves of blocks x the time that a block waits for loads, shuffles and barriers, in turn
    atomics             atomics on the same region of L2, one sector at a time
    block starts        the GPU starts about one block per clock

Blocks may differ: each bound is at least that of the longest recorded block on a multiprocessor of its own.

Latency is Little's law: the fewer warps are resident and the fewer loads each has in flight, the more waves and waits.
With nvcc, the number of waits for global memory and the instructions are those of the machine code (sass.py), times the
executions of its loops (executions.py); a loop waits for the memories that its own loads go to. Without, the recorder
assumes that loops are unrolled four times, and kernels that are limited by arithmetic are estimated too fast.

A warp does not multiply during its softmax, and other warps fill that gap only partly. The model adds the times of
products and softmax, which is within 15 % of cuDNN's causal forward on an H100. With ping-pong scheduling of
warpgroups (FlashAttention-3), part of the shorter time is hidden. Each work tile of a block starts and ends with
products and stores that nothing overlaps. TURNS_OVERLAP and PIECE_SECONDS are fitted to the trainer's kernels on an
H100, whose forward attains 338 to 625 TFLOP/s (FORWARD in test_report.py; FlashAttention-3's published: 265 to 602).
"""
import math
from dataclasses import dataclass

from cards import (FP32_LANES, L2_PORT, REGISTER_GRANULARITY, REGISTERS, SCHEDULERS, SECTOR, SPECIAL_FUNCTIONS, WARP,
                   WARP_GRANULARITY)

# From data sheets, microbenchmarks; MEMORY_SHARE, TURNAROUND, L1_SHARE, ISSUE_SHARE, MEMORY_LATENCY, INSTRUCTIONS and
# KERNEL_SECONDS are fitted to half of the measurements in validation.md.
MEMORY_SHARE = 0.97         # of the bandwidth, of loads alone: the rest is refresh
TURNAROUND = 0.08           # longer if half of the bytes are stores: the bus changes its direction
L2_SHARE = 0.65
L1_SHARE = 0.95             # of the cycles
ISSUE_SHARE = 0.70          # of the issue slots
SHARPNESS = 3.0
MEMORY_LATENCY = 400e-9     # seconds from a load to its value, under load
BLOCK_CLOCKS = 600          # from the start of a block to its first load, and from its last store to the next block
PARTIAL_BYTES = 100
INSTRUCTIONS = 5            # per request, median of tiled products in validation.md; most other kernels have more
RANGE = (0.8, 1.25)         # measured time / estimate, of 8 in 10 held-out cases in validation.md
KERNEL_SECONDS = 1.0e-6     # start and end of a kernel, as profilers measure it; between two events it is 4 µs more

# Published elsewhere.
L2_CLOCKS, L1_CLOCKS, SHARED_CLOCKS, BARRIER_CLOCKS = 250, 35, 28, 40   # microbenchmarks; SHARED: also shuffles
ATOMICS_PER_CLOCK = 1.4     # of a region of L2: a histogram of 256 bins on an H100
WARP_CLOCKS = 2             # between two instructions of a warp; an arithmetic result takes 4, but few wait for one
BLOCKS_PER_CLOCK = 0.9      # llm.c's residual_forward with 196,608 blocks (pull request 299)
TENSOR_SHARE = 0.73         # large BF16 products by cuBLASLt on an H100, whose power limit of 700 W lowers the clock:
                            # 0.72 and 0.80 (fast.cu), 0.73 (nanochat)
FP8_SHARE = 0.59            # the same with FP8: nanochat, without its casts
FP32_SHARE = 0.85           # large FP32 products by cuBLASLt: 0.98 on an A100, 0.77 on an H200
FP32_SHARE_OF_16 = 0.62     # the same where half of the FP32 lanes also execute integer instructions (GA10x, Ada)
TURNS_OVERLAP = 0.55        # ping-pong scheduling: hidden part of the shorter of products and softmax; see above
PIECE_SECONDS = 2.0e-6      # overhead per work tile of attention, in a block; see above
GAP_SECONDS = 1e-6          # between two dependent kernels of a CUDA graph


@dataclass(frozen=True)
class Softmax:
    """A softmax between the products of a launch (attention)."""
    scores: float = 0
    instructions: float = 0     # per score
    turns: bool = False         # ping-pong scheduling of the products of two warpgroups
    pieces: int = 0             # work tiles; a block's pipeline is empty at the start and end of each; 0: unknown


# ---- a launch

def rounded_up(x, unit):
    return -(-x // unit) * unit


def resident_blocks(card, threads, shared, registers=None):
    """Returns how many blocks are resident on a multiprocessor, as in the occupancy calculator; 0 if none fits.
    shared: bytes per block; registers: per thread, None if unknown."""
    warps = -(-threads // WARP)
    limits = [card.threads // (warps * WARP), card.blocks]
    if shared:
        limits.append(card.shared // rounded_up(shared + card.reserved_shared, card.shared_granularity))
    if registers:
        of_warp = rounded_up(registers * WARP, REGISTER_GRANULARITY)
        limits.append(REGISTERS // of_warp // WARP_GRANULARITY * WARP_GRANULARITY // warps)
    return min(limits)


def launch_bounds(card, launch, blocks, resident, softmax=Softmax()):
    """Returns {bound: seconds}. launch: the totals of one launch, from a recording; with "instructions" and "fp32", the
    warp instructions from the machine code, if it is known. resident: see resident_blocks(). A launch takes at least as
    long as its longest block (launch["longest_block"]) on a multiprocessor of its own."""
    bounds, longest = bounds_of(card, launch, blocks, resident, softmax), launch.get("longest_block")
    alone = bounds_of(card, longest, 1, 1) if longest else {}
    return {name: max(bound, alone.get(name, 0)) for name, bound in bounds.items()}


def bounds_of(card, launch, blocks, resident, softmax=Softmax()):
    """Returns {bound: seconds} of blocks that all do the same work: launch has their totals."""
    busy = min(blocks, card.multiprocessors)
    # All blocks do the same work, so multiprocessors without a block are idle during the last wave.
    waves = blocks / (max(1, resident) * card.multiprocessors)
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    turns = max(1, math.ceil(waves) if waves < 8 else waves) / blocks       # of a sum over blocks: the average x waves
    clocks = card.clock * busy
    l2 = min(L2_SHARE * card.l2_bytes_per_clock * card.clock, L2_PORT * clocks)
    products = tail * launch["tensor_flops"] / (TENSOR_SHARE * card.tensor * busy / card.multiprocessors)
    scores = tail * softmax.scores * (1 / SPECIAL_FUNCTIONS + softmax.instructions / FP32_LANES) / clocks
    hidden = TURNS_OVERLAP * min(products, scores) if softmax.turns else 0
    pieces = softmax.pieces / busy * PIECE_SECONDS
    loaded = max(0, launch["dram_load"] - launch["resident_load"]) + launch["partial_fetched"]
    stored = max(0, launch["dram_store"] - launch["resident_store"])
    moved = loaded + stored + 2 * TURNAROUND * min(loaded, stored)
    cycles = launch["cycles" if card.load_store_units == WARP else "cycles_of_16"]
    special = SPECIAL_FUNCTIONS * card.clock
    assumed = INSTRUCTIONS * min(launch["requests"], launch["cycles"])
    fp32 = card.fp32 / card.multiprocessors / card.clock / 2 / WARP      # warp instructions per clock
    waits = (blocks * BLOCK_CLOCKS + launch["waits_l2"] * L2_CLOCKS + launch["waits_l1"] * L1_CLOCKS +
             (launch["waits_shared"] + launch["exchanges"]) * SHARED_CLOCKS +
             launch["barriers"] * BARRIER_CLOCKS) / card.clock + launch["waits_memory"] * MEMORY_LATENCY
    return {"memory": moved / min(MEMORY_SHARE * card.bandwidth, L2_PORT * clocks),
            "L2": (launch["l2"] * SECTOR + launch["partial"] * PARTIAL_BYTES) / l2,
            "L1 and shared": tail * cycles / (L1_SHARE * clocks),
            "instructions": max(tail * launch.get("instructions", assumed) / SCHEDULERS / busy,
                                tail * launch.get("fp32", 0) / fp32 / busy,
                                turns * launch.get("warp_instructions", 0) * WARP_CLOCKS) / (ISSUE_SHARE * card.clock),
            "special functions": 0 if softmax.scores else max(
                tail * launch["special"] / busy, turns * launch["warp_special"] * SCHEDULERS) / special,
            "softmax" if scores > products else "tensor cores": products + scores - hidden + pieces,
            "latency": turns * waits,
            "atomics": launch["hot_atomics"] / (ATOMICS_PER_CLOCK * card.clock),
            "block starts": blocks / (BLOCKS_PER_CLOCK * card.clock)}


def combined(bounds):
    """Returns the time of a launch: a smooth maximum of its bounds, because none of them overlaps the others fully."""
    longest = max(bounds.values())
    if longest == 0:
        return KERNEL_SECONDS
    return KERNEL_SECONDS + longest * sum((b / longest) ** SHARPNESS for b in bounds.values()) ** (1 / SHARPNESS)


# ---- a matmul

# Tile sizes of cuBLASLt's BF16 kernels for Hopper, from kernel names in published profiles: nvjet_tst_320x128_64x3_...
# The list may be incomplete. The choice matters for widths that tiles do not divide, such as 1600.
TILES = ((128, 256), (256, 128), (320, 128), (192, 192), (128, 272), (128, 248), (128, 128))
SMALL_TILE_SHARE = 0.87     # relative rate of 128 x 128 tiles, which read more shared memory per product
SPLITS = 16                 # maximum split-K factor, for products with few tiles
WORKSPACE = 128 << 20       # bytes for the partial sums of split-K: the trainer's limit
ELEMENT_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def matmul_rate(card, of):
    """Returns the FLOP/s that a large product attains; of: the type of its operands."""
    if of == "fp32":
        return (FP32_SHARE_OF_16 if (card.major, card.minor) in ((8, 6), (8, 9)) else FP32_SHARE) * card.fp32
    return FP8_SHARE * card.fp8 if of == "fp8" else TENSOR_SHARE * card.tensor


def matmul_seconds(card, matmul):
    """Returns the time with the best tile size and split-K factor. Tiles run in waves, one per multiprocessor; a
    partial wave takes as long as a full one. Partial sums of split-K are written to the workspace in FP32 and read
    again. Epilogues with a second matrix load it (dgelu) or store it (gelu_aux); the products do not hide that: on an
    H100, cuBLASLt 13.1 takes 640 us with either of them and 440 us without, at (65536, 768) x (768, 3072)."""
    m, n, k, of = matmul["m"], matmul["n"], matmul["k"], matmul["type"]
    rate, bandwidth = matmul_rate(card, of), MEMORY_SHARE * card.bandwidth / (1 + TURNAROUND)
    element, results = ELEMENT_BYTES[of], m * n * matmul["out_bytes"]
    moved = (m * k + k * n) * element + results * (2 if matmul["accumulate"] else 1)
    has_second = "dgelu" in matmul["epilogue"] or "aux" in matmul["epilogue"]
    second = m * n * element / bandwidth if has_second else 0.0
    best = math.inf
    for tile_m, tile_n in TILES:
        share = 1.0 if tile_m * tile_n > 128 * 128 else SMALL_TILE_SHARE    # others differ by at most 3 %
        for split in range(1, SPLITS + 1):
            if split > 1 and split * m * n * 4 > WORKSPACE:
                break
            tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * split
            tile_flops = 2 * tile_m * tile_n * math.ceil(k / split)
            waves = math.ceil(tiles / card.multiprocessors)
            partials = 2 * split * m * n * 4 / bandwidth if split > 1 else 0.0
            best = min(best, waves * tile_flops / (share * rate / card.multiprocessors) + partials)
    return max(best, moved / bandwidth, KERNEL_SECONDS) + second


# ---- all launches

def step_seconds(card, raw, kernel_seconds):
    """Returns {"kernels", "matmuls", "gaps": seconds} of the launches in a recording's `sequence`, without overlap.
    kernel_seconds: the time of each of raw["kernels"]."""
    seconds = {"kernel": kernel_seconds, "matmul": [matmul_seconds(card, matmul) for matmul in raw["matmuls"]]}
    parts = {"kernels": 0.0, "matmuls": 0.0}
    for kind, index in raw["sequence"]:
        parts[kind + "s"] += seconds[kind][index]
    return {**parts, "gaps": GAP_SECONDS * max(0, len(raw["sequence"]) - 1)}

"""Estimated times: what a launch moves and multiplies over what a GPU can move and multiply. Nothing here is measured.

Rates are the share of the data sheet's that good kernels attain; each says why. A launch takes the longest of

    memory              bytes / bandwidth
    L2                  bytes / L2's bandwidth, or what the multiprocessors with a block can take
    L1 and shared       wavefronts: they are one memory, which delivers 128 bytes a clock
    special functions   exp2 and its like: 16 a clock
    tensor cores        FLOPs / rate; plus the instructions of a softmax between products, if the kernel has one
    a launch            no kernel is shorter than its start and its end

A warp does not multiply during its softmax, and other warps fill the gap only in part: products and softmax add up,
which is within 15 % of cuDNN's causal forward on an H100. Where warpgroups take turns at products (as in
FlashAttention-3) a part of the shorter one is hidden; and each work tile of a block begins and ends with products and
stores that nothing overlaps. Both numbers are fitted to FlashAttention-3's forward, at T = 1024, 2048, 8192, 16384
(TFLOP/s):

    heads of 64    published 265 371 460 473    estimated 266 353 447 468
    heads of 128   published 423 521 602 616    estimated 342 429 529 551

Estimates are optimistic where a kernel waits for latency: too few loads in flight, long chains of dependent
instructions, barriers. Other arithmetic is not counted.
"""
import math
from dataclasses import dataclass

from cards import (FP32_LANES, L2_PORT, REGISTER_GRANULARITY, REGISTERS, SPECIAL_FUNCTIONS, WARP,
                   WARP_GRANULARITY)

MEMORY_SHARE = 0.92         # a large copy on HBM or GDDR6X: the rest is refresh and switching from reads to writes
L2_SHARE = 0.65             # microbenchmarks of A100 and H100 read 5 to 6 TB/s of about 9
L1_SHARE = 0.9              # wavefronts: bubbles between instructions that depend on each other
TENSOR_SHARE = 0.70         # large BF16 products by cuBLASLt on an H100 of 700 W: at full load power lowers the clock;
                            # taken for FP8 as well
FP32_SHARE = 0.85           # large FP32 products by cuBLASLt
TURNS_OVERLAP = 0.55        # of products and softmax, whichever is shorter: how much of it is hidden; see above
PIECE_SECONDS = 4.5e-6      # of a block, for each work tile of attention; see above
KERNEL_SECONDS = 2.5e-6     # of the shortest kernel: start of its blocks, a load, a store, the end
GAP_SECONDS = 1e-6          # between two kernels of a CUDA graph, of which the later one needs the earlier one's result


@dataclass(frozen=True)
class Softmax:
    """Between the products of a launch."""
    scores: float = 0
    instructions: float = 0     # for each score
    turns: bool = False         # warpgroups take turns at the products
    pieces: int = 0             # work tiles, at whose begin and end a block's pipeline is empty; 0: unknown


# ---- a launch

def rounded_up(x, unit):
    return -(-x // unit) * unit


def resident_blocks(card, threads, shared, registers=None):
    """Returns how many blocks are on a multiprocessor at a time, as the occupancy calculator counts; 0: none fits.
    registers: of a thread, None where unknown."""
    warps = -(-threads // WARP)
    limits = [card.threads // (warps * WARP), card.blocks]
    if shared:
        limits.append(card.shared // rounded_up(shared + card.reserved_shared, card.shared_granularity))
    if registers:
        of_warp = rounded_up(registers * WARP, REGISTER_GRANULARITY)
        limits.append(REGISTERS // of_warp // WARP_GRANULARITY * WARP_GRANULARITY // warps)
    return min(limits)


def launch_bounds(card, launch, blocks, resident, softmax=Softmax()):
    """Returns {bound: seconds}. launch: of one launch, as in a recording; resident: blocks of a multiprocessor."""
    busy = min(blocks, card.multiprocessors)
    # Blocks do the same work: in the last wave, multiprocessors without a block do nothing.
    waves = blocks / (resident * card.multiprocessors) if resident else 0
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    clocks = card.clock * busy
    l2 = min(L2_SHARE * card.l2_bytes_per_clock * card.clock, L2_PORT * clocks)
    products = tail * launch["tensor_flops"] / (TENSOR_SHARE * card.tensor * busy / card.multiprocessors)
    scores = tail * softmax.scores * (1 / SPECIAL_FUNCTIONS + softmax.instructions / FP32_LANES) / clocks
    hidden = TURNS_OVERLAP * min(products, scores) if softmax.turns else 0
    pieces = softmax.pieces / busy * PIECE_SECONDS
    moved = launch["dram_load"] + launch["dram_store"]
    return {"memory": moved / min(MEMORY_SHARE * card.bandwidth, L2_PORT * clocks),
            "L2": launch["l2"] / l2,
            "L1 and shared": tail * launch["wavefronts"] / (L1_SHARE * clocks),
            "special functions": 0 if softmax.scores else tail * launch["special"] / SPECIAL_FUNCTIONS / clocks,
            "softmax" if scores > products else "tensor cores": products + scores - hidden + pieces,
            "a launch": KERNEL_SECONDS}


# ---- a matmul

# Of cuBLASLt's Hopper kernels for BF16, as published profiles of H100s name them: nvjet_tst_320x128_64x3_... and so on.
# There may be more. A width that they do not divide, such as 1600, is why the choice matters.
TILES = ((128, 256), (256, 128), (320, 128), (192, 192), (128, 272), (128, 248), (128, 128))
SMALL_TILE_SHARE = 0.87     # of the rate with 128 x 128, which reads more of shared memory for a product
SPLITS = 16                 # parts, at most, into which a sum over K is split where tiles are few
ELEMENT_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def matmul_seconds(card, matmul):
    """Returns the time with cuBLASLt's best tile and split. Tiles go in waves, a tile to a multiprocessor, and a wave
    that is not full takes as long as a full one; parts of split sums are written in FP32 and read again."""
    m, n, k, of = matmul["m"], matmul["n"], matmul["k"], matmul["type"]
    rate = {"fp32": FP32_SHARE * card.fp32, "fp8": TENSOR_SHARE * card.fp8}.get(of, TENSOR_SHARE * card.tensor)
    bandwidth = MEMORY_SHARE * card.bandwidth
    element, results = ELEMENT_BYTES[of], m * n * matmul["out_bytes"]
    moved = (m * k + k * n) * element + results * (2 if matmul["accumulate"] else 1)
    if matmul["epilogue"] == "dgelu":
        moved += m * n * element
    best = math.inf
    for tile_m, tile_n in TILES:
        share = 1.0 if tile_m * tile_n > 128 * 128 else SMALL_TILE_SHARE    # the others are within 3 % of each other
        for split in range(1, SPLITS + 1):
            tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * split
            tile_flops = 2 * tile_m * tile_n * math.ceil(k / split)
            waves = math.ceil(tiles / card.multiprocessors)
            partials = 2 * split * m * n * 4 / bandwidth if split > 1 else 0.0
            best = min(best, waves * tile_flops / (share * rate / card.multiprocessors) + partials)
    return max(best, moved / bandwidth, KERNEL_SECONDS)


# ---- all launches

def step_seconds(card, raw, kernel_seconds):
    """Returns {"kernels", "matmuls", "gaps": seconds} of a recording's `sequence`, one launch after the other.
    kernel_seconds: of each of raw["kernels"]."""
    seconds = {"kernel": kernel_seconds, "matmul": [matmul_seconds(card, matmul) for matmul in raw["matmuls"]]}
    parts = {"kernels": 0.0, "matmuls": 0.0}
    for kind, index in raw["sequence"]:
        parts[kind + "s"] += seconds[kind][index]
    return {**parts, "gaps": GAP_SECONDS * max(0, len(raw["sequence"]) - 1)}

"""Estimated times: what a launch moves and multiplies over what a card can move and multiply. Nothing here is measured.

Rates are the share of the data sheet's that good kernels attain; each says why. A launch takes the longest of

    memory              bytes / bandwidth
    L2                  bytes / L2's bandwidth, or what its blocks' multiprocessors can take
    L1 and shared       wavefronts: they are one memory, which hands over 128 bytes a clock
    special functions   exp2 and its like: 16 a clock
    tensor cores        FLOPs / rate; and behind them, where the kernel has scores, the softmax's instructions
    a launch            no kernel is shorter than its start and its end

Attention's rests on published figures, of an H100 and causal. A warp does not multiply while it takes a softmax, and
others fill the gap only in part: products and softmax add up, which comes within 15 % of cuDNN's forward. Where groups
take turns at products (Hopper's forward) a part of the shorter one is hidden; and each piece of work of a block begins
and ends with products and stores that nothing runs beside. Both numbers, for forward and backward, are fitted to
FlashAttention-3's forward, at T = 1024, 2048, 8192, 16384 (TFLOP/s):

    heads of 64    published 265 371 460 473    estimated 266 353 447 468
    heads of 128   published 423 521 602 616    estimated 342 429 529 551

and stay at or below it. Backward has no turns: at heads of 128 it is estimated at
283, 328, 372 for T = 1024, 2048, 8192, where FlashAttention-3 has 182, 316, 539 with 5 products for our 7. Kernels that
take pieces from a counter end 1 to 4 % later than evenly shared work would, which is in the published figures too.

It is optimistic where a kernel waits for latency: too few loads under way, long chains of dependent instructions,
barriers. What is not counted is other arithmetic outside of tensor cores, scores apart.
"""
import math
from dataclasses import dataclass

from cards import (FP32_LANES, L2_PORT, REGISTER_GRANULARITY, REGISTERS, SPECIAL_FUNCTIONS, WARP,
                   WARP_GRANULARITY)
from claims import Softmax

MEMORY_SHARE = 0.92         # a large copy on HBM or GDDR6X: the rest is refresh and turning from reads to writes
L2_SHARE = 0.65             # microbenchmarks of A100 and H100 read 5 to 6 TB/s of about 9
L1_SHARE = 0.9              # wavefronts: bubbles between instructions that depend on each other
TENSOR_SHARE = 0.70         # large BF16 products by cuBLASLt on an H100 of 700 W: at full load power lowers the clock;
                            # taken for FP8 as well
FP32_SHARE = 0.85           # large FP32 products by cuBLASLt
TURNS_OVERLAP = 0.55        # of products and softmax, whichever is shorter: how much of it is hidden; see above
PIECE_SECONDS = 4.5e-6      # of a block, for each piece of attention's work; see above
KERNEL_SECONDS = 2.5e-6     # of the shortest kernel: start of its blocks, a load, a store, the end
GAP_SECONDS = 1e-6          # between two kernels of a CUDA graph, of which the later one needs the earlier one's result
COPY_SECONDS = 2e-6         # of the shortest memset or copy on the device
HOST_SHARE = 25e9           # bytes/s between host and device: PCIe 4.0 x 16, pinned memory

# ---- occupancy


@dataclass
class Occupancy:
    blocks: int             # of a multiprocessor at a time
    bound: str              # what bounds them
    share: float            # of the warps that a multiprocessor can hold
    per_wave: int           # blocks of the whole card at a time
    waves: float


def rounded_up(x, unit):
    return -(-x // unit) * unit


def occupancy(card, blocks, threads, shared, registers=None):
    """How many blocks are on a multiprocessor at a time, as the occupancy calculator counts. registers: of a thread,
    None where unknown."""
    has, warps = card.capability, -(-threads // WARP)
    limits = {"threads": has.threads // (warps * WARP), "blocks": has.blocks}
    if shared:
        limits["shared memory"] = has.shared // rounded_up(shared + has.reserved_shared, has.shared_granularity)
    if registers:
        of_warp = rounded_up(registers * WARP, REGISTER_GRANULARITY)
        limits["registers"] = REGISTERS // of_warp // WARP_GRANULARITY * WARP_GRANULARITY // warps
    bound = min(limits, key=limits.get)
    most, slots = limits[bound], has.threads // WARP
    if not most:
        return Occupancy(0, bound, 0.0, 0, math.inf)
    per_wave = most * card.multiprocessors
    return Occupancy(most, bound, most * warps / slots, per_wave, blocks / per_wave)


# ---- a launch

@dataclass
class Estimate:
    seconds: float
    bound: str              # the longest of `bounds`
    bounds: dict            # {what: seconds}
    occupancy: Occupancy


def launch_bounds(card, launch, room, softmax=Softmax()):
    """{what: seconds}. launch: traffic of one launch, the keys of raw.json; softmax: the one between products."""
    busy = min(launch["blocks"], card.multiprocessors)
    # Blocks do the same work: in the last wave, multiprocessors without a block do nothing.
    tail = math.ceil(room.waves) / room.waves if math.isfinite(room.waves) and room.waves > 1 else 1.0
    clocks = card.clock * busy
    l2 = min(L2_SHARE * card.l2_bytes_per_clock * card.clock, L2_PORT * clocks)
    products = tail * launch["tensor_flops"] / (TENSOR_SHARE * card.tensor * busy / card.multiprocessors)
    scores = tail * softmax.scores * (1 / SPECIAL_FUNCTIONS + softmax.instructions / FP32_LANES) / clocks
    hidden = TURNS_OVERLAP * min(products, scores) if softmax.turns else 0
    pieces = softmax.pieces / busy * PIECE_SECONDS
    return {"memory": (launch["dram_load"] + launch["dram_store"]) / min(MEMORY_SHARE * card.memory, L2_PORT * clocks),
            "L2": launch["l2"] / l2,
            "L1 and shared": tail * launch["wavefronts"] / (L1_SHARE * clocks),
            "special functions": 0 if softmax.scores else tail * launch["special"] / SPECIAL_FUNCTIONS / clocks,
            "softmax" if scores > products else "tensor cores": products + scores - hidden + pieces,
            "a launch": KERNEL_SECONDS}


def estimate_launch(card, launch, threads, shared, registers=None, softmax=Softmax()):
    room = occupancy(card, launch["blocks"], threads, shared, registers)
    bounds = launch_bounds(card, launch, room, softmax)
    bound = max(bounds, key=bounds.get)
    return Estimate(bounds[bound], bound, bounds, room)


# ---- a matmul

# Of cuBLASLt's Hopper kernels for BF16, as published profiles of H100s name them: nvjet_tst_320x128_64x3_... and so on.
# There may be more. A width that they do not divide, such as 1600, is why the choice matters.
TILES = ((128, 256), (256, 128), (320, 128), (192, 192), (128, 272), (128, 248), (128, 128))
SMALL_TILE_SHARE = 0.87     # of the rate with 128 x 128, which reads more of shared memory for a product
SPLITS = 16                 # parts, at most, into which a sum over K is split where tiles are few
ELEMENT_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def matmul_seconds(card, matmul):
    """cuBLASLt's best tile and split. Tiles go in waves, a tile to a multiprocessor, and a wave that is not full takes
    as long as a full one; parts of split sums are written in FP32 and read again."""
    m, n, k, of = matmul["m"], matmul["n"], matmul["k"], matmul["type"]
    rate = {"fp32": FP32_SHARE * card.fp32, "fp8": TENSOR_SHARE * card.fp8}.get(of, TENSOR_SHARE * card.tensor)
    bandwidth = MEMORY_SHARE * card.memory
    element, results = ELEMENT_BYTES[of], m * n * matmul["out_bytes"]
    moved = (m * k + k * n) * element + results * (2 if matmul.get("accumulate") else 1)
    if matmul.get("epilogue") == "dgelu":
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


def copy_seconds(card, copy):
    """A copy on the device reads and writes, a memset writes; others go over the bus."""
    kind = copy["kind"]
    if "host" in kind:
        return COPY_SECONDS + copy["bytes"] / HOST_SHARE
    moved = copy["bytes"] * (1 if kind == "memset" else 2)
    return max(COPY_SECONDS, moved / (MEMORY_SHARE * card.memory))


# ---- all of it

@dataclass
class Step:
    seconds: float
    parts: dict             # {"kernels": s, "matmuls": s, "copies": s, "gaps": s}
    matmul_seconds: list    # of each of raw["matmuls"]

    def tokens_per_second(self, tokens):
        return tokens / self.seconds if self.seconds else 0.0


def estimate_step(card, raw, kernel_seconds):
    """Everything in `sequence`, one after the other. kernel_seconds: of each of raw["kernels"]."""
    seconds = {"kernel": kernel_seconds,
               "matmul": [matmul_seconds(card, matmul) for matmul in raw.get("matmuls", [])],
               "copy": [copy_seconds(card, copy) for copy in raw.get("copies", [])]}
    parts = {"kernels": 0.0, "matmuls": 0.0, "copies": 0.0}
    for kind, index in raw.get("sequence", []):
        parts[kind + "s" if kind != "copy" else "copies"] += seconds[kind][index]
    parts["gaps"] = GAP_SECONDS * max(0, len(raw.get("sequence", [])) - 1)
    return Step(sum(parts.values()), parts, seconds["matmul"])

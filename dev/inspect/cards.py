"""What the cards can do, by the key that CARD= takes. dev/cpu/card.h has the same cards for the stand-in, with what a
program may ask of them; test_report.py holds the two tables together.

    multiprocessors, cache      NVIDIA's white papers (Turing, A100, Ada, H100, Blackwell) and data sheets
    memory, FP32, tensor cores  data sheets: bytes/s; FLOP/s of FP32; dense FP16 or BF16 products, summed in FP32
    FP8                         twice that, from capability 8.9 on: data sheets of H100 and B200; Ada's white paper, where
                                it is the rate with sums in FP32 (in FP16 they are twice as fast again)
    clock                       the one that the data sheet's tensor FLOP/s stand for: they are multiprocessors x
                                FLOPs a clock (white papers) x clock
    per multiprocessor          CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and
                                "Throughput of Native Arithmetic Instructions"; granularities: the occupancy
                                calculator of Nsight Compute
    l2_bytes_per_clock          A100: its white paper, 5120. The others are estimates: Hopper as A100, Blackwell two
                                halves of that, Ada and Turing 64 bytes for each 2 or 4 multiprocessors
"""
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
WARP = 32
SECTOR = 32                         # bytes: the least that L1 asks of L2, and L2 of memory
WAVEFRONT = 128                     # bytes that L1, shared memory included, hands over in a clock: 32 banks of 4
REGISTERS = 64 * 1024               # of 32 bits, of a multiprocessor
REGISTER_GRANULARITY = 256          # a warp's registers come in units of so many
WARP_GRANULARITY = 4                # and are dealt to four quarters
L2_PORT = 64                        # bytes a clock between L2 and one multiprocessor (A100 white paper)
SPECIAL_FUNCTIONS = 16              # results a clock of a multiprocessor: exp2, reciprocal, square root ...
FP32_LANES = 128                    # results a clock that its four schedulers can issue


@dataclass(frozen=True)
class Capability:
    major: int
    minor: int
    threads: int                    # of a multiprocessor, at most
    blocks: int
    shared: int                     # bytes
    reserved_shared: int            # bytes that CUDA keeps of each block's
    shared_granularity: int
    arch: str                       # what nvcc compiles for


TURING = Capability(7, 5, 1024, 16, 64 * KIB, 0, 256, "sm_75")
AMPERE = Capability(8, 0, 2048, 32, 164 * KIB, KIB, 128, "sm_80")
ADA = Capability(8, 9, 1536, 24, 100 * KIB, KIB, 128, "sm_89")
HOPPER = Capability(9, 0, 2048, 32, 228 * KIB, KIB, 128, "sm_90a")
BLACKWELL = Capability(10, 0, 2048, 32, 228 * KIB, KIB, 128, "sm_100")


@dataclass(frozen=True)
class Card:
    key: str
    name: str
    capability: Capability
    multiprocessors: int
    l2_bytes: int
    memory: float                   # bytes/s
    clock: float                    # Hz
    tensor: float                   # FLOP/s
    fp32: float                     # FLOP/s
    l2_bytes_per_clock: int

    @property
    def fp8(self):                  # FLOP/s; 0: not there
        return 2 * self.tensor if (self.capability.major, self.capability.minor) >= (8, 9) else 0.0


CARDS = {card.key: card for card in [
    Card("h100", "NVIDIA H100 SXM 80 GB", HOPPER, 132, 50 * MIB, 3.35e12, 1.83e9, 989.4e12, 66.9e12, 5120),
    Card("h200", "NVIDIA H200 SXM", HOPPER, 132, 60 * MIB, 4.8e12, 1.83e9, 989.4e12, 66.9e12, 5120),
    Card("a100", "NVIDIA A100 SXM 80 GB", AMPERE, 108, 40 * MIB, 2.039e12, 1.41e9, 312e12, 19.5e12, 5120),
    Card("4090", "NVIDIA GeForce RTX 4090", ADA, 128, 72 * MIB, 1.008e12, 2.52e9, 165.2e12, 82.6e12, 2048),
    Card("l40s", "NVIDIA L40S", ADA, 142, 96 * MIB, 864e9, 2.52e9, 362.05e12, 91.6e12, 2048),
    Card("t4", "NVIDIA T4", TURING, 40, 4 * MIB, 320e9, 1.59e9, 65e12, 8.1e12, 1280),
    Card("b200", "NVIDIA B200 SXM", BLACKWELL, 148, 126 * MIB + MIB // 2, 7.7e12, 1.85e9, 2.25e15, 75e12, 10240),
]}

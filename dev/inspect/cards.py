"""The emulated GPUs: the table of dev/cpu/card.h, and constants that are the same for all of them.

Throughputs are from the CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"; the granularities
of registers and warps from the occupancy calculator of Nsight Compute.
"""
import math
import os
import re
from dataclasses import dataclass

WARP = 32
SECTOR = 32                         # bytes: the least that L1 asks of L2, and L2 of memory
WAVEFRONT = 128                     # bytes that L1, shared memory included, delivers in a clock: 32 banks of 4
REGISTERS = 64 * 1024               # of 32 bits, of a multiprocessor
REGISTER_GRANULARITY = 256          # a warp's registers are a multiple of this
WARP_GRANULARITY = 4                # warps are distributed over four schedulers
L2_PORT = 64                        # bytes a clock between L2 and one multiprocessor (A100 white paper)
SPECIAL_FUNCTIONS = 16              # results a clock of a multiprocessor: exp2, reciprocal, square root ...
FP32_LANES = 128                    # results a clock that its four schedulers can issue
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cpu", "card.h")


@dataclass(frozen=True)
class Card:
    """The fields of card.h's Capability and Card, in its order, with shorter names."""
    major: int
    minor: int
    threads: int                    # of a multiprocessor, at most
    blocks: int
    shared: int                     # bytes of a multiprocessor
    reserved_shared: int            # bytes that CUDA keeps of each block's
    l1_and_shared: int
    shared_granularity: int
    key: str
    name: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    bus_bits: int
    bandwidth: float                # bytes/s
    clock: float                    # Hz
    tensor: float                   # FLOP/s
    fp32: float                     # FLOP/s
    l2_bytes_per_clock: int

    @property
    def fp8(self):
        """FLOP/s of FP8: twice BF16's, from capability 8.9 on (data sheets of H100 and B200; Ada's white paper, with
        sums in FP32); 0 on older cards."""
        return 2 * self.tensor if (self.major, self.minor) >= (8, 9) else 0.0

    @property
    def arch(self):
        """nvcc's -arch."""
        return f"sm_{self.major}{self.minor}" + ("a" if self.major == 9 else "")


def number_of(product):
    """50 * mib"""
    units = {"kib": 1 << 10, "mib": 1 << 20}
    return int(math.prod(units.get(factor) or float(factor) for factor in product.replace("*", " ").split()))


def read_cards():
    """{key: Card}"""
    with open(TABLE, encoding="utf-8") as file:
        text = file.read()
    capabilities = {name: [number_of(figure) for figure in figures.split(",")]
                    for name, figures in re.findall(r"constexpr Capability (\w+)\{([^}]*)\}", text)}
    rows = re.findall(r'\{"(\w+)", "([^"]*)", (\w+),([^}]*)\}', text)
    return {key: Card(*capabilities[capability], key, name, *[number_of(figure) for figure in figures.split(",")])
            for key, name, capability, figures in rows}


CARDS = read_cards()

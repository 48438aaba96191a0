"""The emulated GPUs: the table of dev/cpu/card.h, and constants that all of them share.

Throughputs are from the CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"; the granularities
of registers and warps are from Nsight Compute's occupancy calculator.
"""
import math
import os
import re
from collections import namedtuple

WARP = 32
SECTOR = 32                         # bytes: the unit of transfer between L1, L2 and memory
WAVEFRONT = 128                     # bytes per clock of L1 and shared memory: 32 banks of 4
REGISTERS = 64 * 1024               # 32-bit registers of a multiprocessor
REGISTER_GRANULARITY = 256          # a warp's registers are a multiple of this
WARP_GRANULARITY = 4                # warps are distributed over four schedulers
L2_PORT = 64                        # bytes per clock between L2 and one multiprocessor (A100 white paper)
SCHEDULERS = 4                      # of a multiprocessor; each issues an instruction of a warp per clock
SPECIAL_FUNCTIONS = 16              # results per clock of a multiprocessor: exp2, reciprocal, square root ...
FP32_LANES = 128                    # results per clock of a multiprocessor's four schedulers
# The attained part of the data sheet's clock and bandwidth, where it is known to be low. T4: a power limit of 70 W, and
# ECC takes bandwidth: published times were 12 to 35 % longer than estimates by the data sheet.
ATTAINED = {"t4": 0.8}
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cpu", "card.h")


class Card(namedtuple("Card", """major minor threads blocks shared reserved_shared l1_and_shared shared_granularity
        load_store_units key name multiprocessors l2_bytes memory_bytes bus_bits bandwidth clock tensor fp32
        l2_bytes_per_clock""")):
    """The fields of card.h's Capability and Card, which has their units, in the same order, with shorter names."""

    @property
    def fp8(self):
        """FP8 FLOP/s: twice BF16's from capability 8.9 on, else 0. Sources: data sheets of H100 and B200; Ada's white
        paper, with FP32 accumulation."""
        return 2 * self.tensor if (self.major, self.minor) >= (8, 9) else 0.0

    @property
    def arch(self):
        """The value of nvcc's -arch."""
        return f"sm_{self.major}{self.minor}" + ("a" if self.major == 9 else "")


def number_of(product):
    """Evaluates a product as in card.h, such as "50 * mib"."""
    units = {"kib": 1 << 10, "mib": 1 << 20}
    return int(math.prod(units.get(factor) or float(factor) for factor in product.replace("*", " ").split()))


def read_cards():
    """Returns {key: Card}."""
    with open(TABLE, encoding="utf-8") as file:
        text = file.read()
    capabilities = {name: [number_of(figure) for figure in figures.split(",")]
                    for name, figures in re.findall(r"constexpr Capability (\w+)\{([^}]*)\}", text)}
    rows = re.findall(r'\{"([\w-]+)", "([^"]*)", (\w+),([^}]*)\}', text)
    found = {key: Card(*capabilities[capability], key, name, *[number_of(figure) for figure in figures.split(",")])
             for key, name, capability, figures in rows}
    rates = ("bandwidth", "clock", "tensor", "fp32")
    return {key: card._replace(**{rate: ATTAINED.get(key, 1) * getattr(card, rate) for rate in rates})
            for key, card in found.items()}


CARDS = read_cards()

"""What train_gpt.cu's `cost` lines predict for a launch, as formulas of the model's shape; and the products for each
score of attention's kernels, from which their softmax's work follows.

A formula takes a Launch and gives bytes between memory and the card, or tensor cores' FLOPs. What it asks for comes
from the grid where that tells it, else from --shape: {"B": 64, "T": 1024, "C": 768, "V": 50257, ...}.
"""
import re
from dataclasses import dataclass

BLOCK_WARPS = 8         # train_gpt.cu: kernels that give a warp to a row
SPAN = 4096             # elements of a block of elementwise kernels
BIAS_COLUMNS = 256      # columns of a block of bias_backward


class Unknown(Exception):
    """A formula asked for a size that neither the grid nor --shape tells."""


class Launch:
    """Sizes of one launch, in the letters of train_gpt.cu."""

    def __init__(self, name, demangled, grid, shape=None):
        self.name, self.demangled, self.grid, self.given = name, demangled, grid, shape or {}

    def __getattr__(self, size):
        if size not in self.given:
            raise Unknown(size)
        return self.given[size]

    @property
    def x(self):            # bytes of a floatX
        return 2 if any(half in self.demangled for half in ("__nv_bfloat16", "__half")) else 4

    @property
    def g(self):            # bytes of a gradient: the kernel's first template argument
        return 2 if any(half in self.name for half in ("<__nv_bfloat16", "<__half")) else 4

    @property
    def master(self):       # bytes of a weight that AdamW updates: its second one
        return 2 if any(half in self.name for half in (", __nv_bfloat16>", ", __half>")) else 4

    @property
    def N(self):
        return self.given["B"] * self.T if "B" in self.given else self.warp_rows

    @property
    def warp_rows(self):
        return self.grid[0] * BLOCK_WARPS

    @property
    def span(self):
        return self.grid[0] * self.grid[1] * SPAN

    @property
    def Vp(self):
        return -(-self.V // 128) * 128

    @property
    def OC(self):
        """bias_backward's: of 3C and 4C the one that has so many blocks of columns."""
        widths = [k * self.C for k in (3, 4) if -(-k * self.C // BIAS_COLUMNS) == self.grid[0]]
        if len(widths) != 1:
            raise Unknown("OC")
        return widths[0]

    @property
    def parameters(self):
        C = self.C
        return (self.Vp + self.T) * C + self.L * (12 * C * C + 13 * C) + 2 * C


BYTES, FLOPS = "bytes", "FLOPs"


@dataclass(frozen=True)
class Claim:
    unit: str
    amount: float
    cost: str               # the line, in short


def product_flops(s, products):
    """Causal: T * T / 2 scores for a head, and for each score HS multiplications and additions."""
    return products * 2 * s.B * s.T * s.T / 2 * s.C


# {kernel without template arguments: (unit, formula, the cost line)}
COSTS = {
    "embedding_forward_kernel": (BYTES, lambda s: 3 * s.N * s.C * s.x, "reads 2 and writes 1 of N*C"),
    "embedding_backward_wpe_kernel": (BYTES, lambda s: s.N * s.C * s.x + 2 * s.T * s.C * s.g, "reads N*C, adds to T*C"),
    "layernorm_forward_kernel": (BYTES, lambda s: 4 * s.N * s.C * s.x, "reads 2, writes 2 of N*C"),
    "layernorm_backward_kernel": (BYTES, lambda s: 4 * s.N * s.C * s.x, "reads 3, writes 1 of N*C"),
    "bias_forward_kernel": (BYTES, lambda s: 2 * s.span * s.x, "reads and writes N*OC"),
    "bias_backward_kernel": (BYTES, lambda s: s.N * s.OC * s.x, "N*OC once"),
    "gelu_forward_kernel": (BYTES, lambda s: 2 * s.span * s.x, "reads 1, writes 1"),
    "gelu_backward_kernel": (BYTES, lambda s: 3 * s.span * s.x, "reads 2, writes 1"),
    "cross_entropy_kernel": (BYTES, lambda s: 2 * s.grid[0] * s.Vp * s.x,
                             "reads and writes N*Vp once"),
    "norm_partials_kernel": (BYTES, lambda s: s.parameters * s.g, "n once"),
    "adamw_kernel": (BYTES, lambda s: s.span * (16 + 2 * s.master + 2 * s.g + (s.x if s.x < s.master else 0)),
                     "reads and writes master, m, v and gradient, writes the weight"),
}
# Products of attention on tensor cores, (for the cost line, for each score): forward S and PV; dQ: S, dP, dQ; dK/dV:
# S, dP, dV, dK. And the instructions of a score outside of the special functions' time: its maximum or (dP - D) P, the
# conversion of P and of dS to BF16, the output's rescaling.
ATTENTION = {"attention_forward": (2, 2.5), "attention_backward_dq": (3, 2.5), "attention_backward_dkv": (4, 3.0)}


def attention_of(name):
    """(products, instructions of a score, head size) of a kernel on tensor cores, or None."""
    found = re.fullmatch(r"(attention_\w+)_w?g?mma_kernel<(\d+)>", name)
    return (*ATTENTION[found[1]], int(found[2])) if found and found[1] in ATTENTION else None


def claim_of(launch):
    """What the cost line says of this launch, or None where there is none or its sizes are unknown."""
    kernel, attention = launch.name.split("<")[0], attention_of(launch.name)
    try:
        if attention:
            products = attention[0]
            return Claim(FLOPS, product_flops(launch, products), f"{products} products of T*T/2*HS per head")
        if kernel in COSTS:
            unit, formula, cost = COSTS[kernel]
            return Claim(unit, formula(launch), cost)
    except Unknown:
        pass
    return None


@dataclass(frozen=True)
class Softmax:
    """Between the products of a launch. turns: whether groups of warps take turns at products; pieces: of work, that
    blocks which stay take one after another; 0 where sizes are unknown."""
    scores: float = 0
    instructions: float = 0     # for each score
    turns: bool = False
    pieces: int = 0


def softmax_of(name, tensor_flops, shape=None):
    """What a launch with so many FLOPs on tensor cores takes the softmax of."""
    attention = attention_of(name)
    if not attention:
        return Softmax()
    products, instructions, head_size = attention
    hopper, forward, pieces = "_wgmma_" in name, name.startswith("attention_forward"), 0
    if hopper and shape and {"B", "T", "C"} <= shape.keys():
        rows = 192 if forward and head_size == 64 else 128      # attention_wgmma.cuh: of a piece
        pieces = shape["B"] * (shape["C"] // head_size) * -(-shape["T"] // rows)
    return Softmax(tensor_flops / (2 * products * head_size), instructions, hopper and forward, pieces)

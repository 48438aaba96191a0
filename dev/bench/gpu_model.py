"""Arithmetic of a GPT-2's training step: its matmuls, the FLOPs of attention, the bytes that each
kernel cannot avoid, and the floor: the time that a step would take if every part ran at the best
rate measured for it.

A Shape counts in the units of train_gpt.cu: B sequences of T tokens, N = B T rows, C channels, NH
heads of HS channels, L layers, V words, padded to Vp.
"""
from dataclasses import asdict, dataclass

HEAD_ROWS = 16384       # rows of logits that train_gpt.cu has at a time


@dataclass
class Shape:
    layers: int
    heads: int
    channels: int
    context: int
    vocab: int
    micro_batch: int
    seq_len: int
    precision: str = "bf16"
    grad_dtype: str = "fp32"

    @property
    def rows(self):
        return self.micro_batch * self.seq_len

    @property
    def padded_vocab(self):
        return -(-self.vocab // 128) * 128

    @property
    def value_bytes(self):
        return {"bf16": 2, "fp32": 4}[self.precision]

    @property
    def grad_bytes(self):
        return {"bf16": 2, "fp32": 4}[self.grad_dtype]

    @property
    def elements(self):
        """Of each block of parameters in memory, the vocabulary's padding included."""
        L, C = self.layers, self.channels
        return (self.padded_vocab + self.context) * C + L * (12 * C * C + 13 * C) + 2 * C

    def as_dict(self):
        return asdict(self)


# ---- Matmuls

@dataclass
class Matmul:
    """out (M, N) = A (M, K) B (K, N); a and b: whether A and B lie transposed in memory."""
    name: str
    M: int
    N: int
    K: int
    a: bool = False
    b: bool = False
    layers: bool = True     # in every layer, or once, in the head
    launches: int = 1       # for a layer or the head, in a micro-batch

    @property
    def flops(self):
        return 2 * self.M * self.N * self.K


def head_parts(shape):
    """How many rows of the head go at a time, and in how many parts."""
    rows = min(shape.rows, HEAD_ROWS)
    return rows, -(-shape.rows // rows)


def matmuls(shape):
    """All of a micro-batch, as {(pass, whether in a layer): [in the order in which they run]}."""
    N, C, Vp = shape.rows, shape.channels, shape.padded_vocab
    widths = {"qkv": (C, 3 * C), "attproj": (C, C), "fc": (C, 4 * C), "fcproj": (4 * C, C)}
    forward = [Matmul(f"{name} forward", N, out, inp) for name, (inp, out) in widths.items()]
    backward = []
    for name, (inp, out) in reversed(widths.items()):
        weight = Matmul(f"{name} dweight", inp, out, N, a=True)
        inputs = Matmul(f"{name} dinput", N, inp, out, b=True)
        backward += [weight, inputs]
    rows, parts = head_parts(shape)
    head = [Matmul("head logits", rows, Vp, C, b=True, layers=False, launches=parts),
            Matmul("head dinput", rows, C, Vp, layers=False, launches=parts),
            Matmul("head dweight", Vp, C, rows, a=True, layers=False, launches=parts)]
    return {("forward", True): forward, ("backward", True): backward, ("forward", False): head}


def all_matmuls(shape):
    return [matmul for group in matmuls(shape).values() for matmul in group]


def matmul_launches(shape, matmul):
    """In a micro-batch."""
    return matmul.launches * (shape.layers if matmul.layers else 1)


# ---- Attention, causal: query t needs t + 1 keys

def attention_flops(B, T, NH, HS):
    """Forward and backward, as FlashAttention's papers count: 4 B NH T^2 HS / 2, and 2.5 times that."""
    forward = 2 * B * NH * T * T * HS
    return {"forward": forward, "backward": 2.5 * forward}


# ---- Bytes

def update_bytes(shape):
    """Of the update, for an element: the gradient is read twice (norm, AdamW) and zeroed, master and
    moments are read and written, the weight is written."""
    weight = 0 if shape.precision == "fp32" else shape.value_bytes      # in FP32 it is its own master
    return {"norm_partials": shape.grad_bytes, "adamw": 2 * shape.grad_bytes + 24 + weight}


def kernel_bytes(shape):
    """{kernel: bytes that a micro-batch's launches of it must move}, without recomputation; of the
    update's kernels: a step's. What is not here moves little, or is no matter of bandwidth."""
    L, NC = shape.layers, shape.rows * shape.channels * shape.value_bytes
    return {
        # (inp, add -> res, ln) before attention and MLP and at the end; at the start nothing to add
        "layernorm_forward": (4 * (2 * L + 1) - 2) * NC,
        "layernorm_backward": 4 * (2 * L + 1) * NC,         # (dln, res, dres -> dres)
        "gelu_forward": 8 * L * NC,                         # 4C in, 4C out
        "bias_backward": 7 * L * NC,                        # reads 4C and 3C; the LayerNorms sum the others
        "embedding_forward": 2 * NC,
        "cross_entropy": 2 * shape.rows * shape.padded_vocab * shape.value_bytes,
        **{name: per_element * shape.elements for name, per_element in update_bytes(shape).items()},
    }


# Kernels that are bound by bandwidth, by which we judge how near to it we are.
BANDWIDTH_BOUND = ["layernorm_forward", "layernorm_backward", "gelu_forward", "bias_backward", "embedding_forward",
                   "cross_entropy", "norm_partials", "adamw"]


# ---- The floor

def floor(shape, ceilings, total_batch):
    """Nanoseconds a token for each part of a step, were it as fast as the best measured here, or None
    where a ceiling was not measured.

    GELU counts as part of the matmul before it, dropout does not exist, the residual stream is
    stored in the weights' type. In C values a token: each layer's two LayerNorms read and write 4
    forward and 4 backward, and bias gradients read 9: 25; the last LayerNorm 8; the embedding 3. The
    loss reads and writes the logits; what matmuls move is part of their measured time.
    """
    times = {entry["name"]: entry["s"] for entry in ceilings.get("matmuls", [])}
    wanted = all_matmuls(shape)
    copy = ceilings.get("copy_bytes_per_s")
    attention = ceilings.get("attention")
    if not copy or any(matmul.name not in times for matmul in wanted):
        return None
    def bandwidth(amount):
        return 1e9 * amount / copy
    parts = {
        "matmuls": 1e9 * sum(matmul_launches(shape, m) * times[m.name] for m in wanted) / shape.rows,
        "attention": attention and 1e9 * shape.layers * (attention["forward_s"] + attention["backward_s"]) / shape.rows,
        "layernorm, residual, bias": bandwidth((25 * shape.layers + 11) * shape.channels * shape.value_bytes),
        "logits": bandwidth(2 * shape.padded_vocab * shape.value_bytes),
        "update": bandwidth(sum(update_bytes(shape).values()) * shape.elements) / total_batch,
    }
    return {**parts, "total": sum(parts.values())} if attention else {**parts, "total": None}

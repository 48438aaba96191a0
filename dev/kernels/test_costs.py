#!/usr/bin/env python3
"""Tests costs.py: the formulas for GPT-2 124M, and that the kernels it names exist. Run in the repository's root."""
import glob
import os
import re
import sys
from inspect import signature
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "tests"))
import costs
from testing import expect, finish

B, T, C, Vp, L = 64, 1024, 768, 50304, 12
N, SHAPE = B * T, {"B": B, "T": T, "C": C}


def launch(name, integers=(), grid=(1, 1, 1), threads=256, flops=0.0):
    return SimpleNamespace(name=name, demangled=f"void {name}(__nv_bfloat16*, float*)", grid=list(grid),
                           integers=list(integers), threads=threads, tensor_flops=flops)


def formulas():
    gib = 1 << 30
    for name, integers, grid, expected in [
            ("embedding_forward_kernel", (N, 0, T, C), (1, 1), 3 * N * C * 2),
            ("embedding_backward_wpe_kernel<float>", (N, 0, T, C), (1, 1), N * C * 2 + 2 * T * C * 4),
            ("layernorm_forward_kernel", (N, C), (1, 1), 0.1875 * gib),
            ("layernorm_backward_kernel", (N, C), (1, 1), 0.375 * gib),
            ("bias_backward_kernel", (N, 4 * C), (1, 1), 0.375 * gib),
            ("gelu_forward_kernel", (4 * N * C,), (1, 1), 0.75 * gib),
            ("gelu_backward_kernel", (4 * N * C,), (1, 1), 1.125 * gib),
            ("fp8_gelu_backward_kernel<true>", (N, 4 * C), (1, 1), 1.125 * gib),
            ("cross_entropy_kernel<(Want)1>", (50257, Vp), (16384, 1), 2 * 16384 * Vp * 2),
            ("norm_partials_kernel<float>", (1000, 10, L, 99), (1, 1), 4 * 1120),
            ("adamw_kernel<float, float>", (5, 100), (9, L), 100 * L * 34),
            ("adamw_kernel<__nv_bfloat16, __nv_bfloat16>", (5, 100), (9, 1), 100 * (4 + 16 + 4))]:
        unit, amount, line = costs.cost(launch(name, integers, grid), {})
        expect((unit, amount) == ("bytes", expected) and line, f"{name} moves {expected:.4g} bytes",
               f"{amount:.4g} {unit}")
    forward = 2 * 2 * B * T * T / 2 * C
    amounts = [costs.cost(launch(f"attention_{name}_wgmma_kernel<64>"), SHAPE)
               for name in ("forward", "backward_dq", "backward_dkv")]
    expect([amount for _, amount, _ in amounts] == [forward, 1.5 * forward, 2 * forward],
           "attention has 2 products in forward, 3 in dQ and 4 in dK/dV")
    expect(costs.cost(launch("other_kernel", (1,)), SHAPE) is None and
           costs.cost(launch("attention_forward_wgmma_kernel<64>"), {}) is None,
           "a launch without a formula or shape has no cost")
    for name, threads, turns, tiles in [("attention_forward_wgmma_kernel<64>", 512, True, B * 12 * 6),
                                        ("attention_backward_dq_wgmma_kernel<64>", 384, True, B * 12 * 8),
                                        ("attention_forward_mma_kernel<64>", 128, False, 0)]:
        found = costs.softmax(launch(name, threads=threads, flops=12e9), SHAPE)
        expect((found["turns"], found["pieces"]) == (turns, tiles), f"{name} has {tiles} work tiles", str(found))
    expect(costs.softmax(launch("gelu_forward_kernel"), SHAPE) is None, "only attention has a softmax")


def sources():
    """Compares the formulas' parameters with the kernels' integer parameters, which finds changed signatures."""
    text = "".join(open(path, encoding="utf-8").read() for path in ["train_gpt.cu", *sorted(glob.glob("gpt/*.cuh"))])
    for name, (_, formula) in costs.BYTES.items():
        found = re.search(rf"\b{name}\(([^{{]*)\)\s*{{", text)
        parameters = re.findall(r"(?<![*\w] )\b(?:size_t|int|unsigned)\s+(?!long)(\w+)", found[1]) if found else None
        expect(parameters == list(signature(formula).parameters)[1:], f"{name}'s integer parameters are the formula's",
               f"found {parameters}, formula {list(signature(formula).parameters)[1:]}")
    kernels = set(re.findall(r"\b(\w+_kernel)\(", text))
    unknown = {kernel for kernel, *_ in costs.ALLOWANCES} - kernels
    expect(not unknown, "each kernel in ALLOWANCES exists", ", ".join(unknown))
    lines = {line.strip() for line in text.splitlines()}
    gone = [line for line in costs.UNNECESSARY_BARRIERS if not any(other.startswith(line) for other in lines)]
    expect(not gone, "each barrier in UNNECESSARY_BARRIERS exists", "; ".join(gone))


formulas()
sources()
finish()

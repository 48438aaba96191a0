"""What dev/inspect is to expect of the trainer's kernels: its --costs FILE. See dev/inspect/README.md, "--costs".

The formulas are the `cost` lines of train_gpt.cu. They take the kernel's whole-number arguments under the names of its
parameters, and the model's shape, which `train_gpt plan --json` prints.
"""
import array
import json
import os
import random
import re
import subprocess


# ---- bytes and FLOPs

def x(launch):
    """Bytes of a floatX."""
    return 2 if any(half in launch.demangled for half in ("__nv_bfloat16", "__half")) else 4


def gradient(launch):
    """Bytes of a gradient: the kernel's first template argument."""
    return 2 if any(half in launch.name for half in ("<__nv_bfloat16", "<__half")) else 4


def adamw(launch, decayed, n):
    """Bytes of a step of AdamW: moments both ways, gradient, master weight, and the weight where that is another."""
    master = 2 if any(half in launch.name for half in (", __nv_bfloat16>", ", __half>")) else 4
    weight = x(launch) if x(launch) < master else 0
    return n * launch.grid[1] * (16 + 2 * master + 2 * gradient(launch) + weight)


# {kernel without template arguments: (the cost line, bytes between memory and the card)}
BYTES = {
    "embedding_forward_kernel": ("reads 2 and writes 1 of N*C", lambda k, N, T, C: 3 * N * C * x(k)),
    "embedding_backward_wpe_kernel": ("reads N*C, adds to T*C",
                                      lambda k, B, T, C: B * T * C * x(k) + 2 * T * C * gradient(k)),
    "layernorm_forward_kernel": ("reads 2, writes 2 of N*C", lambda k, N, C: 4 * N * C * x(k)),
    "layernorm_backward_kernel": ("reads 3, writes 1 of N*C", lambda k, N, C: 4 * N * C * x(k)),
    "bias_backward_kernel": ("N*OC once", lambda k, N, OC: N * OC * x(k)),
    "gelu_forward_kernel": ("reads 1, writes 1", lambda k, n: 2 * n * x(k)),
    "gelu_backward_kernel": ("reads 2, writes 1", lambda k, n: 3 * n * x(k)),
    "cross_entropy_kernel": ("reads and writes N*Vp once", lambda k, V, Vp: 2 * k.grid[0] * Vp * x(k)),
    "norm_partials_kernel": ("n once", lambda k, n_outside, n, layers, stride: (n_outside + n * layers) * gradient(k)),
    "adamw_kernel": ("reads and writes master, m, v and gradient, writes the weight", adamw),
}
# Attention on tensor cores: products for the cost line (forward S and PV; dQ: S, dP, dQ; dK/dV: S, dP, dV, dK), and
# instructions of a score besides exp2: its maximum or (dP - D) P, the conversion of P and dS to BF16, the rescaling of
# the output.
ATTENTION = {"attention_forward": (2, 2.5), "attention_backward_dq": (3, 2.5), "attention_backward_dkv": (4, 3.0)}


def attention_of(name):
    """(products, instructions of a score, head size) of a kernel on tensor cores, or None."""
    found = re.fullmatch(r"(attention_\w+)_w?g?mma_kernel<(\d+)>", name)
    return (*ATTENTION[found[1]], int(found[2])) if found and found[1] in ATTENTION else None


def cost(launch, shape):
    """(unit, amount, cost line) of a launch; None where there is no formula. Causal attention has T * T / 2 scores a
    head, and for each score and product HS multiplications and additions."""
    attention = attention_of(launch.name)
    if attention and shape:
        products = attention[0]
        flops = products * 2 * shape["B"] * shape["T"] * shape["T"] / 2 * shape["C"]
        return "FLOPs", flops, f"{products} products of T*T/2*HS per head"
    line, formula = BYTES.get(launch.name.split("<")[0], ("", None))
    return ("bytes", formula(launch, *launch.integers), line) if formula else None


def softmax(launch, shape):
    """The softmax between the products of a launch, None if it has none: scores, instructions of each, whether
    warpgroups take turns at the products, and work tiles that a block's pipeline begins and ends alone with."""
    attention = attention_of(launch.name)
    if not attention:
        return None
    products, instructions, head_size = attention
    hopper, tiles = "_wgmma_" in launch.name, 0
    if hopper and shape:
        rows = (launch.threads // 128 - 1) * 64     # one warpgroup loads; each of the others has 64 rows, as wgmma
        tiles = shape["B"] * (shape["C"] // head_size) * -(-shape["T"] // rows)
    return {"scores": launch.tensor_flops / (2 * products * head_size), "instructions": instructions,
            "turns": hopper and launch.name.startswith("attention_forward"), "pieces": tiles}


# ---- what `make inspect CHECK=yes` and BARRIERS=yes allow

ROWS_OF_A = "the portable kernels are written to be read: rows of A have stride HS floats, so four lanes share a bank"
DIAGONAL = "tiles on the diagonal are multiplied whole, though half of their scores are masked"
ALLOWANCES = [
    ("layernorm_backward_kernel", "sectors", 1.02,
     "partial sums are stored in packs of 8 floats, two accesses that each use half of a sector: one row in 64"),
    ("attention_forward_wgmma_kernel", "cost", 1.11, DIAGONAL + ": 64 queries x 128 keys"),
    ("attention_backward_dq_wgmma_kernel", "cost", 1.15, DIAGONAL + ": 128 x 128"),
    ("attention_backward_dkv_wgmma_kernel", "cost", 1.15, DIAGONAL + ": 128 keys x 64 queries"),
    ("attention_forward_kernel", "wavefronts", 2.26, ROWS_OF_A),
    ("attention_backward_kernel", "wavefronts", 2.34, ROWS_OF_A),
    ("head_product_kernel", "sectors", 7.0,
     "naive attention reads transposed matrices in place, to show what that costs"),
    ("head_product_kernel", "wavefronts", 2.50, ROWS_OF_A),
]
# Barriers without which nothing goes wrong, by the beginning of their line.
UNNECESSARY_BARRIERS = {
    "wait_full(shared.v, next);": "V was waited for above; as a branch it keeps ptxas from moving the wgmma_wait "
                                  "after it, see wgmma_wait",
    "wait_full(shared.v, v);                   // it is: a branch": "the same in dQ",
    "wait_full(shared.v, v);   // K was loaded before V":
        "in forward, whose groups are kept together by their turns; dQ with heads above 64, which this run does not "
        "have, needs it",
    "wait_full(shared.q, q);                   // it is full: a branch": "the same in dK and dV",
}


# ---- the run that is recorded: one training step

SHARD_HEADER = [20240520, 1]            # README.md, token shards: magic, version; then the number of tokens
HEADER_INTS = 256
NOT_OF_A_STEP = "init_normal fill round_weights compiled_for_sm_90a"
OF_PLAN = ["--model", "--layers", "--heads", "--channels", "--context", "--vocab", "--micro-batch", "--seq-len",
           "--total-batch", "--recompute", "--grad-dtype", "--attention", "--matmul"]   # options that plan takes
STEP = {"--model": "gpt2", "--micro-batch": "64", "--total-batch": "524288"}
# Enough work that each barrier is needed: a block of attention has two work tiles or three.
SMALL_STEP = {"--model": "gpt2", "--layers": "1", "--micro-batch": "4", "--total-batch": "4096"}


def write_tokens(path, tokens, vocab):
    """Writes a shard whose tokens are as frequent as words (Zipf's law): the embedding's kernels depend on that."""
    header = array.array("i", SHARD_HEADER + [tokens] + [0] * (HEADER_INTS - 3))
    weights = [1 / (rank + 1) for rank in range(vocab)]
    drawn = array.array("H", random.Random(1).choices(range(vocab), weights, k=tokens))
    with open(path, "wb") as file:
        file.write(header.tobytes() + drawn.tobytes())


def run(program, folder, given, small):
    """The run to record: the command line's arguments, the model's shape, its tokens, and settings of the recorder.
    given: options of train_gpt; small: for BARRIERS=yes, which repeats it for every barrier."""
    options = {**(SMALL_STEP if small else STEP), **dict(zip(given[::2], given[1::2]))}
    of_plan = [word for pair in options.items() if pair[0] in OF_PLAN for word in pair]
    planned = subprocess.run([program, "plan", "--json", *of_plan], capture_output=True, text=True)
    if planned.returncode != 0:
        raise ValueError(planned.stderr.strip())
    plan = json.loads(planned.stdout)
    model, tokens = plan["model"], plan["micro_batch"] * plan["seq_len"] * plan["accumulation"]
    data = os.path.join(folder, "tokens.bin")
    write_tokens(data, tokens + 1, model["vocab"])
    # In FP8 the first step has no scales yet: the second one is recorded, from the update before it on.
    in_fp8 = options.get("--matmul", "plain") != "plain"
    arguments = ["train", *[word for pair in options.items() for word in pair], "--data", data,
                 "--steps", "2" if in_fp8 else "1", "--eval-every", "0", "--matmul-tuning", "off",
                 "--val-fraction", "0"]
    return {"arguments": arguments, "tokens": tokens,
            "shape": {"B": plan["micro_batch"], "T": plan["seq_len"], "C": model["channels"]},
            "settings": {"INSPECT_EXCEPT": NOT_OF_A_STEP, "INSPECT_FROM": "set_adamw" if in_fp8 else ""}}

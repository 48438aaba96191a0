"""Expected costs of the trainer's kernels, for dev/inspect's --costs FILE; see dev/inspect/README.md, "--costs".

The formulas are those of the `cost` lines in train_gpt.cu. Their parameters are the kernel's integer parameters, with
the same names, and the model's shape as printed by `train_gpt plan --json`.
"""
import json
import os
import re
import subprocess
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts"))
from tokens import write_random_shard


# ---- bytes and FLOPs

def x(launch):
    """Returns the bytes of a floatX."""
    return 2 if any(half in launch.demangled for half in ("__nv_bfloat16", "__half")) else 4


def gradient(launch):
    """Returns the bytes of a gradient: the size of the kernel's first template argument."""
    return 2 if any(half in launch.name for half in ("<__nv_bfloat16", "<__half")) else 4


def adamw(launch, decayed, n):
    """Returns the bytes of an AdamW step: reads and writes m, v, gradient and master weight, writes the BF16 weight."""
    master = 2 if any(half in launch.name for half in (", __nv_bfloat16>", ", __half>")) else 4
    weight = x(launch) if x(launch) < master else 0
    return n * launch.grid[1] * (16 + 2 * master + 2 * gradient(launch) + weight)


# {kernel without template arguments: (cost line, bytes transferred from and to memory)}
BYTES = {
    "embedding_forward_kernel": ("reads 2 and writes 1 of N*C", lambda k, N, first, T, C: 3 * N * C * x(k)),
    "embedding_backward_wpe_kernel": ("reads N*C, adds to T*C",
                                      lambda k, N, first, T, C: N * C * x(k) + 2 * T * C * gradient(k)),
    "layernorm_forward_kernel": ("reads 1, writes 1 of N*C", lambda k, N, C: 2 * N * C * x(k)),
    "layernorm_backward_kernel": ("reads 3, writes 1 of N*C; with FP8 (<1>) 1 byte per element more",
                                  lambda k, N, C: N * C * (4 * x(k) + ("<1>" in k.name))),
    "bias_backward_kernel": ("N*OC once", lambda k, N, OC: N * OC * x(k)),
    "gelu_forward_kernel": ("reads 1, writes 1", lambda k, n: 2 * n * x(k)),
    "gelu_backward_kernel": ("reads 2, writes 1", lambda k, n: 3 * n * x(k)),
    "fp8_gelu_backward_kernel": ("reads 2 of N*OC; writes 1 and, per element, 1 byte; ONLY_FP8: 2 bytes",
                                 lambda k, N, OC: N * OC * (6 if "<true>" in k.name else 7)),
    "cross_entropy_kernel": ("reads and writes N*Vp once", lambda k, V, Vp: 2 * k.grid[0] * Vp * x(k)),
    "norm_partials_kernel": ("n once",
                             lambda k, n_common, n, layers, stride: (n_common + n * layers) * gradient(k)),
    "adamw_kernel": ("reads and writes master, m, v and gradient, writes the weight", adamw),
}
# Attention on tensor cores: number of products (forward: S, PV; dQ: S, dP, dQ; dK/dV: S, dP, dV, dK), and instructions
# per score in addition to exp2: maximum or (dP - D) P, conversion of P and dS to BF16, rescaling of the output.
ATTENTION = {"attention_forward": (2, 2.5), "attention_backward_dq": (3, 2.5), "attention_backward_dkv": (4, 3.0)}


def attention_of(name):
    """Returns (products, instructions per score, head size) of an attention kernel on tensor cores, or None."""
    found = re.fullmatch(r"(attention_\w+)_w?g?mma_kernel<(\d+)>", name)
    return (*ATTENTION[found[1]], int(found[2])) if found and found[1] in ATTENTION else None


def cost(launch, shape):
    """Returns (unit, amount, cost line) of a launch, or None without a formula. Causal attention has T * T / 2 scores
    per head; each product does HS multiply-adds per score."""
    attention = attention_of(launch.name)
    if attention and shape:
        products = attention[0]
        flops = products * 2 * shape["B"] * shape["T"] * shape["T"] / 2 * shape["C"]
        return "FLOPs", flops, f"{products} products of T*T/2*HS per head"
    line, formula = BYTES.get(launch.name.split("<")[0], ("", None))
    return ("bytes", formula(launch, *launch.integers), line) if formula else None


def softmax(launch, shape):
    """Returns the softmax work between the products of a launch, or None: number of scores, instructions per score,
    whether warpgroups alternate between products and softmax ("turns"), and work tiles at whose beginning and end a
    block's pipeline is not full ("pieces")."""
    attention = attention_of(launch.name)
    if not attention:
        return None
    products, instructions, head_size = attention
    hopper, tiles = "_wgmma_" in launch.name, 0
    if hopper and shape:
        rows = (launch.threads // 128 - 1) * 64     # one producer warpgroup; each consumer has the 64 rows of a wgmma
        tiles = shape["B"] * (shape["C"] // head_size) * -(-shape["T"] // rows)
    return {"scores": launch.tensor_flops / (2 * products * head_size), "instructions": instructions,
            "turns": hopper, "pieces": tiles}


# ---- what `make inspect CHECK=yes` and BARRIERS=yes allow

ROWS_OF_A = "simple portable kernels: rows of A have a stride of HS floats, so there are 4-way bank conflicts"
DIAGONAL = "tiles on the diagonal are computed entirely, although half of their scores are masked"
ALLOWANCES = [
    ("layernorm_backward_kernel", "sectors", 1.02,
     "partial sums, 1 row in 64, are stored in packs of 8 floats: two accesses that each use half of a sector"),
    ("embedding_backward_join_kernel", "sectors", 1.06,
     "to find where a run ends, the lanes of a warp read the tokens of 32 chunks"),
    ("attention_forward_wgmma_kernel", "cost", 1.11, DIAGONAL + ": 64 queries x 128 keys"),
    ("attention_backward_dq_wgmma_kernel", "cost", 1.15, DIAGONAL + ": 128 x 128"),
    ("attention_backward_dkv_wgmma_kernel", "cost", 1.15, DIAGONAL + ": 128 keys x 64 queries"),
    ("attention_backward_dq_wgmma_kernel", "wavefronts", 1.03, "two rows of dO share banks where D is computed"),
    ("attention_forward_kernel", "wavefronts", 2.26, ROWS_OF_A),
    ("attention_backward_kernel", "wavefronts", 2.34, ROWS_OF_A),
    ("head_product_kernel", "sectors", 7.0,
     "naive attention reads transposed matrices in place, to show what that costs"),
    ("head_product_kernel", "wavefronts", 2.50, ROWS_OF_A),
]
# {beginning of a line: reason} of barriers whose removal causes no fault in the recorded run.
UNNECESSARY_BARRIERS = {
    "wait_full(shared.v, next);": "a later wait covers this V before it is read; the branch keeps ptxas from moving "
                                  "the wgmma_wait after it, see wgmma_wait",
    "wait_full(shared.v, v);                   // already full: the branch": "the same in dQ",
    "wait_full(shared.v, v);   // K was loaded before V":
        "not needed in forward, where OrderedBarrier synchronises the warpgroups; needed in dQ with heads above 64, "
        "which this run does not have",
    "wait_full(shared.q, q);                   // already full: the branch": "the same in dK and dV",
    "wait_empty(shared.k, k);":
        "the producer has the index of work tile n + 2 only after the consumers have received that of tile n + 1, and "
        "so have finished tile n, whose stage it loads",
    "wait_empty(shared.q, q);   // released before": "the same in forward and dQ",
    "__syncwarp();   // all lanes have read the rows that were staged here":
        "the shuffles of column_sums come before the stores, and the recorder takes them for barriers; on a GPU they "
        "do not order memory accesses",
}


# ---- the run that is recorded: one training step

NOT_OF_A_STEP = "init_normal fill round_weights add_residual gelu_difference compiled_for_sm_90a"
OF_PLAN = ["--model", "--layers", "--heads", "--channels", "--context", "--vocab", "--micro-batch", "--seq-len",
           "--total-batch", "--recompute", "--grad-dtype", "--attention", "--matmul"]   # plan's options
STEP = {"--model": "gpt2", "--micro-batch": "64", "--total-batch": "524288"}
# Enough work that each barrier is needed: an attention block has two or three work tiles.
SMALL_STEP = {"--model": "gpt2", "--layers": "1", "--micro-batch": "4", "--total-batch": "4096"}


def run(program, folder, words, small):
    """Returns the run to record: arguments of the program, the model's shape, number of tokens, and environment
    variables of the recorder. words: options of train_gpt; small: for BARRIERS=yes, which repeats the run for every
    barrier."""
    options = {**(SMALL_STEP if small else STEP), **dict(zip(words[::2], words[1::2]))}
    of_plan = [word for pair in options.items() if pair[0] in OF_PLAN for word in pair]
    printed = subprocess.run([program, "plan", "--json", *of_plan], capture_output=True, text=True)
    if printed.returncode != 0:
        raise ValueError(printed.stderr.strip())
    plan = json.loads(printed.stdout)
    model, tokens = plan["model"], plan["micro_batch"] * plan["seq_len"] * plan["accumulation"]
    data = os.path.join(folder, "tokens.bin")
    write_random_shard(data, model["vocab"], tokens + 1)
    # In FP8 the first step has no scales yet; matmul tuning precedes it. Then the second step is recorded, starting
    # with the update before it. With --matmul-tuning on, which times nothing here, the optional epilogues are used.
    tuned = options.setdefault("--matmul-tuning", "off") == "on"
    is_second = tuned or options.get("--matmul", "plain") != "plain"
    arguments = ["train", *[word for pair in options.items() for word in pair], "--data", data,
                 "--steps", "2" if is_second else "1", "--eval-every", "0", "--val-fraction", "0"]
    return {"arguments": arguments, "tokens": tokens,
            "shape": {"B": plan["micro_batch"], "T": plan["seq_len"], "C": model["channels"]},
            "settings": {"INSPECT_EXCEPT": NOT_OF_A_STEP, "INSPECT_FROM": "set_step" if is_second else "",
                         **({"CUDA_CPU_MATMULS": "fast,plain", "XDG_CACHE_HOME": folder} if tuned else {})}}

"""Measures PyTorch for bench.py, which runs it as a separate process. Its last line of output is one JSON object.

    torch_side.py train --layers 12 ... --data TOKENS.bin    times of dev/reference/model.py's training steps in ms
    torch_side.py ceilings --device cuda                     rates of a copy and a large matmul, times of attention
"""
import argparse
import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "reference"))
from model import GPT, Config

SIZES = "layers", "heads", "channels", "context", "vocab"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def now(device):
    """Returns the time in seconds, after all queued work of the device has completed."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- Training

def make_model(o):
    """Returns the model and the function to call, the model itself or its compiled form. The vocabulary is padded to a
    multiple of 128, as in nanoGPT: matmuls with an odd number of columns are slow on GPUs. In models with more than 12
    layers each block is compiled, with the same code for all."""
    sizes = {name: getattr(o, name) for name in SIZES}
    sizes["vocab"] = -(-o.vocab // 128) * 128
    model = GPT(Config(**sizes), fused=hasattr(F, "scaled_dot_product_attention")).to(o.device)
    if not o.compile:
        return model, model
    if o.layers <= 12:
        return model, torch.compile(model)
    for block in model.h:
        block.compile()
    return model, model


def make_optimizer(model, fused):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                             lr=1e-6, betas=(0.9, 0.95), **({"fused": True} if fused else {}))


def random_batch(tokens, o):
    """Returns inputs and targets (B, T): windows at random positions of the shard."""
    starts = torch.randint(len(tokens) - o.seq_len, (o.micro_batch,))
    rows = torch.stack([tokens[start:start + o.seq_len + 1] for start in starts]).to(o.device)
    return rows[:, :-1], rows[:, 1:]


def train(o):
    """Times steps as ./train_gpt does: forward and backward of each micro-batch, gradient clipping, AdamW."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high" if o.bf16 else "highest")
    model, forward = make_model(o)
    optimizer = make_optimizer(model, o.fused)
    content = bytearray(pathlib.Path(o.data).read_bytes())
    tokens = torch.frombuffer(content, dtype=torch.int16, offset=1024).to(torch.int64) & 0xffff
    times = []
    for _ in range(o.steps):
        start = now(o.device)
        for _ in range(o.accumulation):
            inputs, targets = random_batch(tokens, o)
            with torch.autocast(o.device, dtype=torch.bfloat16, enabled=o.bf16):
                loss = forward(inputs, targets)[1] / o.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1000 * (now(o.device) - start))
    peak = torch.cuda.max_memory_reserved() if o.device == "cuda" else None
    return {"version": torch.__version__, "ms": times, "peak_bytes": peak}


# ---- Ceilings

def best_seconds(function, device, min_seconds=0.05):
    """Returns the seconds of a call: the minimum of five means, each over calls that take `min_seconds` together."""
    function()
    start = now(device)
    function()
    calls = max(1, min(200, int(min_seconds / max(now(device) - start, 1e-6))))
    means = []
    for _ in range(5):
        start = now(device)
        for _ in range(calls):
            function()
        means.append((now(device) - start) / calls)
    return min(means)


def attention_backends(device):
    """Returns {name of an attention backend: function that returns its context manager}. Needs PyTorch 2.3."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    names = {"flash": "FLASH_ATTENTION", **({"cuDNN": "CUDNN_ATTENTION"} if device == "cuda" else {})}
    return {name: (lambda backend=getattr(SDPBackend, member): sdpa_kernel([backend]))
            for name, member in names.items() if hasattr(SDPBackend, member)}


def time_attention(device, dtype, B, T, NH, HS):
    """Times causal attention on views of (B, T, 3, NH, HS). Returns {backend: {forward_s, backward_s} or {error}}."""
    results = {}
    for name, choose in attention_backends(device).items():
        try:
            with choose():
                qkv = torch.randn(B, T, 3, NH, HS, device=device, dtype=dtype, requires_grad=True)
                q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                dout = torch.randn_like(out)
                with torch.no_grad():
                    forward = best_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
                backward = best_seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device)
            results[name] = {"forward_s": forward, "backward_s": backward}
        except (RuntimeError, AttributeError) as error:
            results[name] = {"error": str(error).splitlines()[0][:200]}
    return results


def ceilings(o):
    """Measures bytes read and written per second by a copy, FLOP/s of an n x n matmul of random numbers (zeros would
    draw less power, which allows higher clocks), and the times of attention at each given size."""
    dtype = DTYPES[o.precision]
    source = torch.zeros(o.copy_bytes // 4, device=o.device)
    target = torch.empty_like(source)
    copy = 2 * o.copy_bytes / best_seconds(lambda: target.copy_(source), o.device)
    a, b = (torch.randn(o.matmul, o.matmul, device=o.device, dtype=dtype) for _ in range(2))
    matmul = 2 * o.matmul**3 / best_seconds(lambda: a @ b, o.device)
    points = [{**point, "torch": time_attention(o.device, dtype, **point)} for point in json.loads(o.attention)]
    return {"version": torch.__version__, "copy_bytes_per_s": copy, "matmul_flops": matmul, "attention": points}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("what", choices=["train", "ceilings"])
    for name in *SIZES, "micro-batch", "seq-len", "accumulation", "steps", "threads", "copy-bytes", "matmul":
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=[*DTYPES], default="fp32", help="for ceilings")
    parser.add_argument("--data", metavar="SHARD")
    parser.add_argument("--attention", default="[]", help='JSON, such as [{"B": 8, "T": 2048, "NH": 32, "HS": 64}]')
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--bf16", action="store_true", help="forward pass with autocast to bfloat16")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    o = parser.parse_args()
    if o.threads:
        torch.set_num_threads(o.threads)
    print(json.dumps({"train": train, "ceilings": ceilings}[o.what](o)))


if __name__ == "__main__":
    main()

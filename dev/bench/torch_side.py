"""Measures PyTorch for bench.py, which runs it as a separate process. Its last line of output is one JSON object.

    torch_side.py train OPTIONS       times of dev/reference/model.py's training steps in ms
    torch_side.py ceilings OPTIONS    rates of a copy and a large matmul, times of attention

OPTIONS is a JSON object with the attributes of `o` below.
"""
import json
import pathlib
import resource
import sys
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "reference"))
from model import GPT, Config

BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


def now(device):
    """Returns the time in seconds, after all queued work of the device has completed."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(o):
    """Times steps as ./train_gpt does: forward and backward of each micro-batch, gradient clipping, AdamW."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high" if o.bf16 else "highest")
    # The vocabulary is padded as in nanoGPT: matmuls with an odd number of columns are slow on GPUs.
    model = GPT(Config(**{**o.model, "vocab": -(-o.model["vocab"] // 128) * 128}), fused=True).to(o.device)
    forward = torch.compile(model) if o.compile else model
    groups = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == decayed], "weight_decay": decay}
              for decayed, decay in ((True, 0.1), (False, 0.0))]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), fused=o.fused or None)
    content = bytearray(pathlib.Path(o.data).read_bytes())
    tokens = torch.frombuffer(content, dtype=torch.int16, offset=1024).to(torch.int64) & 0xffff
    times = []
    for _ in range(o.steps):
        start = now(o.device)
        for _ in range(o.accumulation):
            starts = torch.randint(len(tokens) - o.seq_len, (o.micro_batch,))
            rows = torch.stack([tokens[start:start + o.seq_len + 1] for start in starts]).to(o.device)
            with torch.autocast(o.device, dtype=torch.bfloat16, enabled=o.bf16):
                loss = forward(rows[:, :-1], rows[:, 1:])[1] / o.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1000 * (now(o.device) - start))
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ms": times, "peak_bytes": torch.cuda.max_memory_reserved() if o.device == "cuda" else resident}


def best_seconds(function, device):
    """Returns the seconds of a call: the minimum of five means, each over calls that take about 0.05 s together."""
    def mean(calls):
        start = now(device)
        for _ in range(calls):
            function()
        return (now(device) - start) / calls
    mean(1)
    calls = max(1, min(200, int(0.05 / max(mean(1), 1e-6))))
    return min(mean(calls) for _ in range(5))


def time_attention(device, B, T, NH, HS):
    """Times causal attention in BF16 on views of (B, T, 3, NH, HS). Returns {backend: {forward_s, backward_s}}, or
    {error} of a backend that failed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel      # PyTorch 2.3
    results = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                qkv = torch.randn(B, T, 3, NH, HS, device=device, dtype=torch.bfloat16, requires_grad=True)
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
    """Measures bytes read and written per second by a copy of 1 GiB, on a GPU FLOP/s of an n x n matmul of random
    numbers (zeros would draw less power, which allows higher clocks), and the times of attention at each given size."""
    source = torch.zeros(1 << 28, device=o.device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_s": 2 * (1 << 30) / best_seconds(lambda: target.copy_(source), o.device)}
    if o.device == "cuda":
        n = 8192
        a, b = (torch.randn(n, n, device=o.device, dtype=torch.bfloat16) for _ in range(2))
        found["matmul_flops"] = 2 * n**3 / best_seconds(lambda: a @ b, o.device)
    return {**found, "attention": [time_attention(o.device, **size) for size in o.attention]}


if __name__ == "__main__":
    options = SimpleNamespace(**json.loads(sys.argv[2]))
    print(json.dumps({"train": train, "ceilings": ceilings}[sys.argv[1]](options)))

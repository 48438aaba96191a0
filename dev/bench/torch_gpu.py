"""The PyTorch side of gpu.py, in a process of its own: a GPT-2 that is trained as nanoGPT trains it, and
the ceilings of the machine. What it measures it prints as JSON, an object a line, as soon as it has it.

    python3 dev/bench/torch_gpu.py train --layers 12 ... --data TOKENS.bin
    python3 dev/bench/torch_gpu.py ceilings < what.json

The model: BF16 autocast over FP32 weights, scaled_dot_product_attention, torch.compile, fused AdamW; head
and embedding tied, the vocabulary padded to 50304 for the matmul's sake and cut off again before the loss.
"""
import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def say(**record):
    print(json.dumps(record), flush=True)


def padded(vocab):
    return -(-vocab // 128) * 128


# ---- The model

class Attention(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(C, dim=2))
        return self.c_proj(attend(q, k, v).transpose(1, 2).reshape(B, T, C))


def attend(q, k, v):
    """Causal attention; PyTorch before 2.0 has only the plain formula."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    T = q.shape[2]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


class MLP(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.c_fc = nn.Linear(C, 4 * C)
        self.c_proj = nn.Linear(4 * C, C)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = Attention(C, heads), MLP(C)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, C, context, vocab):
        super().__init__()
        self.vocab = vocab
        self.wte, self.wpe = nn.Embedding(padded(vocab), C), nn.Embedding(context, C)
        self.h = nn.ModuleList(Block(C, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(C)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if name.endswith("c_proj.weight") else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)[..., :self.vocab]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def load_folder(self, folder):
        """Weights of a Hugging Face folder, FP32. Its matrices are stored (in, out), Linear's (out, in)."""
        with open(os.path.join(folder, "model.safetensors"), "rb") as file:
            content = bytearray(file.read())
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                first, last = entry["data_offsets"]
                values = torch.frombuffer(content, dtype=torch.float32, count=(last - first) // 4,
                                          offset=begin + first).view(entry["shape"])
                if ".c_" in name and values.dim() == 2:
                    values = values.t()
                if name == "wte.weight":
                    own[name].zero_()
                    own[name][:self.vocab] = values
                else:
                    own.pop(name).copy_(values)
        left = set(own) - {"wte.weight"}
        if left:
            raise SystemExit(f"{folder}: model.safetensors lacks {', '.join(sorted(left))}")


# ---- Training

class Tokens:
    """Micro-batches in the file's order, around and around."""

    def __init__(self, path, B, T, device):
        with open(path, "rb") as file:
            content = bytearray(file.read())
        tokens = torch.frombuffer(content, dtype=torch.int16, offset=1024).to(torch.int64) & 0xffff
        windows = (len(tokens) - 1) // T
        self.inputs, self.targets = tokens[:windows * T].view(windows, T), tokens[1:windows * T + 1].view(windows, T)
        self.B, self.device, self.next = B, device, 0

    def batch(self):
        rows = [(self.next + i) % len(self.inputs) for i in range(self.B)]
        self.next += self.B
        pair = [source[rows] for source in (self.inputs, self.targets)]
        if self.device == "cuda":
            pair = [part.pin_memory().to(self.device, non_blocking=True) for part in pair]
        return pair


def learning_rate(o, step):
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    progress = (step - o.warmup) / max(1, o.steps - o.warmup)
    return o.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (o.lr - o.min_lr)


class Clock:
    """Milliseconds on the device's stream, or on the wall."""

    def __init__(self, device):
        self.cuda = device == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin, end):
        if not self.cuda:
            return 1000 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)


def make_model(o):
    with torch.device(o.device) if hasattr(torch.device, "__enter__") else contextlib.nullcontext():
        model = GPT(o.layers, o.heads, o.channels, o.context, o.vocab).to(o.device)
    if o.from_:
        model.load_folder(o.from_)
    compiled = model
    if o.compile == "whole":
        compiled = torch.compile(model, dynamic=False)
    elif o.compile == "blocks":
        for block in model.h:
            block.compile(dynamic=False)
    return model, compiled


def make_optimizer(model, o):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    fused = {"fused": True} if o.device == "cuda" else {}
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                             lr=o.lr, betas=(0.9, 0.95), eps=1e-8, **fused)


def train(o):
    torch.manual_seed(1)
    if o.threads:
        torch.set_num_threads(o.threads)
    torch.backends.cuda.matmul.allow_tf32 = o.precision == "bf16"   # what autocast leaves in FP32 is no matmul
    model, compiled = make_model(o)
    optimizer = make_optimizer(model, o)
    tokens, clock = Tokens(o.data, o.micro_batch, o.seq_len, o.device), Clock(o.device)
    autocast = torch.autocast(o.device, torch.bfloat16) if o.precision == "bf16" else contextlib.nullcontext()
    say(begin={"version": torch.__version__, "cuda": torch.version.cuda, "micro_batch": o.micro_batch,
               "accumulation": o.accumulation, "compile": o.compile})
    for step in range(o.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step)
        start, loss = time.perf_counter(), 0
        for _ in range(o.accumulation):
            inputs, targets = tokens.batch()
            with autocast:
                part = compiled(inputs, targets) / o.accumulation
            part.backward()
            loss = loss + part.detach()
        before = clock.now()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ms = clock.ms(before, clock.now())
        loss = loss.item()
        say(step=step + 1, ms=1000 * (time.perf_counter() - start), update_ms=update_ms, loss=loss, norm=float(norm))
    if o.device == "cuda":
        say(memory={"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()})


def out_of_memory(error):
    kind = getattr(torch.cuda, "OutOfMemoryError", None)
    return (kind and isinstance(error, kind)) or "out of memory" in str(error).lower()


def train_within_memory(o):
    """Halves the micro-batch, and doubles the accumulation, until it fits."""
    while True:
        try:
            return train(o)
        except RuntimeError as error:
            if not out_of_memory(error) or o.micro_batch == 1:
                raise
        say(out_of_memory=o.micro_batch)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        o.micro_batch //= 2
        o.accumulation *= 2


# ---- Ceilings

def best_seconds(run, device, least_seconds):
    """The best of five means, each over enough runs to take `least_seconds`."""
    clock = Clock(device)
    for _ in range(2):
        run()
    begin = clock.now()
    run()
    once = clock.ms(begin, clock.now()) / 1000
    runs, best = max(1, min(200, math.ceil(least_seconds / max(once, 1e-6)))), math.inf
    for _ in range(5):
        begin = clock.now()
        for _ in range(runs):
            run()
        best = min(best, clock.ms(begin, clock.now()) / 1000 / runs)
    return best


def measure_copy(what, device, dtype, seconds):
    source = torch.zeros(what["bytes"] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    s = best_seconds(lambda: target.copy_(source), device, seconds)
    return {"bytes_per_s": 2 * what["bytes"] / s}


def measure_matmul(what, device, dtype, seconds):
    """On random numbers: zeros would draw less power, and clock higher. The result is in the inputs' type."""
    M, N, K = what["M"], what["N"], what["K"]
    a = torch.randn(*((K, M) if what["a"] else (M, K)), device=device, dtype=dtype)
    b = torch.randn(*((N, K) if what["b"] else (K, N)), device=device, dtype=dtype)
    a, b = a.t() if what["a"] else a, b.t() if what["b"] else b
    out = torch.empty(M, N, device=device, dtype=dtype)
    return {"s": best_seconds(lambda: torch.mm(a, b, out=out), device, seconds)}


def backends(device):
    """Ways to compute attention, as context managers by name."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {"default": contextlib.nullcontext}
    names = {"flash": "FLASH_ATTENTION", **({"cudnn": "CUDNN_ATTENTION"} if device == "cuda" else {})}
    found = {name: getattr(SDPBackend, value) for name, value in names.items() if hasattr(SDPBackend, value)}
    return {name: (lambda backend=backend: sdpa_kernel([backend])) for name, backend in found.items()}


def measure_attention(what, device, dtype, seconds):
    """As in the model: q, k and v are views into (B, T, 3, NH, HS)."""
    B, T, NH, HS = what["B"], what["T"], what["NH"], what["HS"]
    results = {}
    for name, choose in backends(device).items():
        try:
            with choose():
                qkv = torch.randn(B, T, 3, NH, HS, device=device, dtype=dtype, requires_grad=True)
                q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
                out = attend(q, k, v)
                dout = torch.randn_like(out)
                with torch.no_grad():
                    forward = best_seconds(lambda: attend(q, k, v), device, seconds)
                backward = best_seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device,
                                        seconds)
            results[name] = {"forward_s": forward, "backward_s": backward}
        except RuntimeError as error:
            results[name] = {"error": str(error).splitlines()[0][:200]}
    return {"backends": results}


def ceilings(device, precision):
    request = json.load(sys.stdin)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    measures = {"copy": measure_copy, "matmul": measure_matmul, "attention": measure_attention}
    say(begin={"version": torch.__version__, "cuda": torch.version.cuda})
    for what in request["what"]:
        try:
            say(**what, **measures[what["kind"]](what, device, dtype, request["seconds"]))
        except RuntimeError as error:
            say(**what, error=str(error).splitlines()[0][:200])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("verb", choices=["train", "ceilings"])
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    for name in "layers", "heads", "channels", "context", "vocab", "micro-batch", "seq-len", "accumulation", "steps":
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--data", metavar="SHARD")
    parser.add_argument("--compile", choices=["whole", "blocks", "no"], default="no")
    parser.add_argument("--from", dest="from_", metavar="FOLDER")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--min-lr", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--threads", type=int)
    o = parser.parse_args()
    if o.verb == "ceilings":
        ceilings(o.device, o.precision)
    else:
        train_within_memory(o)


if __name__ == "__main__":
    main()

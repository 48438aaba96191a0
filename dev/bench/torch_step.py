"""Times training steps of dev/reference/model.py with PyTorch on the CPU; cpu.py runs it.

Prints one JSON object: {"version": ..., "ms": [each step's time]}. A step is what ./train_gpt
counts as one: forward, backward, clipping, AdamW. Untuned unless options say otherwise.
"""
import argparse
import json
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "reference"))
from model import GPT, Config

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in "layers", "heads", "channels", "context", "vocab", "micro-batch", "seq-len", "steps", "threads":
    parser.add_argument("--" + name, type=int, required=True)
parser.add_argument("--fused", action="store_true", help="AdamW as one kernel for all parameters")
parser.add_argument("--bf16", action="store_true", help="forward under autocast to bfloat16")
parser.add_argument("--compile", action="store_true", help="the model by torch.compile")
options = parser.parse_args()

torch.set_num_threads(options.threads)
torch.manual_seed(1)
config = Config(options.layers, options.heads, options.channels, options.context, options.vocab)
model = GPT(config, fused=hasattr(torch.nn.functional, "scaled_dot_product_attention"))
matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                              lr=1e-4, betas=(0.9, 0.95), **({"fused": True} if options.fused else {}))
forward = torch.compile(model) if options.compile else model

times = []
for step in range(options.steps):
    tokens = torch.randint(options.vocab, (options.micro_batch, options.seq_len + 1))
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
        loss = forward(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    times.append(1000 * (time.perf_counter() - start))
print(json.dumps({"version": torch.__version__, "ms": times}))

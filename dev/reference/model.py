"""GPT-2 in plain PyTorch: the reference model for train_gpt.cu, written to be simple rather than fast.

Parameters have Hugging Face's names, without the prefix "transformer.", and layout: matrices are stored (inputs,
outputs), so a layer computes x @ weight + bias. The output head is the token embedding (tied weights).

Sizes: B sequences, T tokens per sequence, C channels, V vocabulary, NH heads, HS = C / NH.
"""
import json
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import Config, plain_name


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (inputs, outputs), as in OpenAI's GPT-2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, config, fused):
        super().__init__()
        self.heads, self.fused = config.heads, fused
        self.c_attn = Conv1D(config.channels, 3 * config.channels)  # queries, keys, values
        self.c_proj = Conv1D(config.channels, config.channels)

    def forward(self, x):
        B, T, C = x.shape
        # (B, T, 3C) -> three of (B, NH, T, HS)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(C, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # (B, NH, T, T)
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(diagonal=1)
            y = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Conv1D(config.channels, 4 * config.channels)
        self.c_proj = Conv1D(4 * config.channels, config.channels)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, fused):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.channels, eps=1e-5)
        self.attn = Attention(config, fused)
        self.ln_2 = nn.LayerNorm(config.channels, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """fused=True uses torch.nn.functional.scaled_dot_product_attention (PyTorch 2), for timing. The reference values
    use the explicit formula."""

    def __init__(self, config, fused=False):
        super().__init__()
        if fused and not hasattr(F, "scaled_dot_product_attention"):
            raise ValueError(f"fused attention needs PyTorch 2.0 or later, found {torch.__version__}")
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.channels)
        self.wpe = nn.Embedding(config.context, config.channels)
        self.h = nn.ModuleList(Block(config, fused) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=1e-5)
        # GPT-2's initialisation: normal with std 0.02. The two layers per block that add to the residual stream have a
        # smaller std, so that the stream does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers if residual else 1))

    def forward(self, tokens, targets=None):
        """Returns logits (B, T, V), and with targets also the mean loss over the B*T targets."""
        T = tokens.shape[1]
        if T > self.config.context:
            raise ValueError(f"expected at most {self.config.context} tokens per sequence, found {T}")
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        if targets is None:
            return logits
        # The loss is computed in at least FP32.
        at_least_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits, F.cross_entropy(at_least_fp32.flatten(0, 1), targets.flatten())

    @staticmethod
    def from_folder(folder):
        """Returns the model in a Hugging Face folder with config.json and model.safetensors."""
        from safetensors.numpy import load_file  # imported here, so that timing needs only PyTorch
        folder = Path(folder)
        model = GPT(Config.from_huggingface(json.loads((folder / "config.json").read_text())))
        model.load_state_dict({plain_name(name): torch.from_numpy(value)
                               for name, value in load_file(folder / "model.safetensors").items()})
        return model

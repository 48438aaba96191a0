"""The sizes of a GPT-2, and the names and shapes of its parameters.

Separate from model.py, so that a checkpoint can be checked without PyTorch.
"""
from dataclasses import dataclass


def plain_name(name):
    """Returns a parameter's name without the prefix that Hugging Face's GPT2LMHeadModel adds."""
    prefix = "transformer."
    return name[len(prefix):] if name.startswith(prefix) else name


@dataclass
class Config:
    layers: int = 12
    heads: int = 12
    channels: int = 768
    context: int = 1024
    vocab: int = 50257

    def __post_init__(self):
        if self.channels % self.heads:
            raise ValueError(f"channels: expected a multiple of the {self.heads} heads, found {self.channels}")

    @staticmethod
    def from_huggingface(entries):
        """Returns the Config of a config.json. Raises ValueError if it is not the GPT-2 of model.py."""
        sizes = [entries.get(key) for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError("config.json: n_layer, n_head, n_embd, n_positions, vocab_size: expected five positive "
                             f"integers, found {sizes}")
        config = Config(*sizes)
        # None: the key may be absent.
        allowed = {"model_type": ("gpt2",), "layer_norm_epsilon": (None, 1e-5),
                   "activation_function": (None, "gelu_new", "gelu_pytorch_tanh"),
                   "n_inner": (None, 4 * config.channels), "tie_word_embeddings": (None, True),
                   "scale_attn_weights": (None, True), "scale_attn_by_inverse_layer_idx": (None, False)}
        for key, values in allowed.items():
            found = entries.get(key)
            if found not in values:
                raise ValueError(f"config.json: {key}: expected {' or '.join(map(repr, values))}, found {found!r}")
        return config

    def shapes(self):
        """Returns {name: shape} of all parameters, in the order of the forward pass."""
        C = self.channels
        block = {"ln_1.weight": (C,), "ln_1.bias": (C,),
                 "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
                 "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,),
                 "ln_2.weight": (C,), "ln_2.bias": (C,),
                 "mlp.c_fc.weight": (C, 4 * C), "mlp.c_fc.bias": (4 * C,),
                 "mlp.c_proj.weight": (4 * C, C), "mlp.c_proj.bias": (C,)}
        shapes = {"wte.weight": (self.vocab, C), "wpe.weight": (self.context, C)}
        for layer in range(self.layers):
            shapes.update({f"h.{layer}.{name}": shape for name, shape in block.items()})
        shapes.update({"ln_f.weight": (C,), "ln_f.bias": (C,)})
        return shapes

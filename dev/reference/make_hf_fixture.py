"""Writes a GPT-2 folder with Hugging Face's transformers, data/reference/hf_tiny/, and the logits that transformers
computes, hf_tiny_expected.safetensors. train_gpt.cu must open the folder and compute the same logits.

Needs transformers, PyTorch, safetensors and NumPy.
"""
import numpy as np
import safetensors.numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from config import Config
from make_reference import REFERENCE, draw_parameters
from model import GPT


def main():
    config = Config(layers=2, heads=4, channels=64, context=32, vocab=211)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=config.layers, n_head=config.heads, n_embd=config.channels, n_positions=config.context,
        vocab_size=config.vocab, bos_token_id=config.vocab - 1, eos_token_id=config.vocab - 1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    # transformers initialises biases with 0 and LayerNorm weights with 1, which would hide errors in their use.
    drawn = draw_parameters(config, seed=20)
    with torch.no_grad():
        for name, parameter in model.transformer.named_parameters():
            parameter.copy_(drawn[name])
    path = REFERENCE / "hf_tiny"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink()  # sampling options, not part of the model
    (path / "model.safetensors").chmod(0o644)   # transformers makes it readable by its owner only

    ids = torch.from_numpy(np.random.RandomState(21).randint(config.vocab, size=(2, config.context)))
    with torch.no_grad():
        expected = model.double()(ids).logits
        difference = (GPT.from_folder(path).double()(ids) - expected).abs().max().item()
    assert difference < 1e-5, f"logits of model.py and transformers: expected difference < 1e-5, found {difference:.1e}"
    (REFERENCE / "hf_tiny_expected.safetensors").write_bytes(safetensors.numpy.save(
        {"input_ids": ids.numpy().astype(np.int32), "logits": expected.numpy().astype(np.float32)}))
    print(f"{path}, {path}_expected.safetensors: model.py differs by at most {difference:.1e}")


if __name__ == "__main__":
    main()

"""Writes a GPT-2 folder as Hugging Face's transformers writes it, and the logits it computes:
data/reference/hf_tiny/ and data/reference/hf_tiny_expected.safetensors. train_gpt.cu must open the
one and arrive at the other."""
import argparse
import sys
from pathlib import Path

try:
    import numpy as np
    import safetensors.numpy
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    MISSING = None
except ImportError as error:
    MISSING = error


def make(folder):
    from config import Config
    from make_reference import draw_parameters
    from model import GPT

    config = Config(layers=2, heads=4, channels=64, context=32, vocab=211)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=config.layers, n_head=config.heads, n_embd=config.channels, n_positions=config.context,
        vocab_size=config.vocab, bos_token_id=config.vocab - 1, eos_token_id=config.vocab - 1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    # transformers starts biases at 0 and LayerNorm weights at 1, which would hide mistakes in them.
    drawn = draw_parameters(config, seed=20)
    with torch.no_grad():
        for name, parameter in model.transformer.named_parameters():
            parameter.copy_(drawn[name])
    path = folder / "hf_tiny"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink()  # how to sample is not part of the model
    (path / "model.safetensors").chmod(0o644)  # transformers leaves it readable by its owner only

    ids = torch.from_numpy(np.random.RandomState(21).randint(config.vocab, size=(2, config.context)))
    with torch.no_grad():
        expected = model.double()(ids).logits
        ours = GPT.from_folder(path).double()(ids)
    difference = (ours - expected).abs().max().item()
    assert difference < 1e-5, f"model.py's logits differ from transformers' by {difference:.1e}, expected < 1e-5"
    (folder / "hf_tiny_expected.safetensors").write_bytes(safetensors.numpy.save(
        {"input_ids": ids.numpy().astype(np.int32), "logits": expected.numpy().astype(np.float32)}))
    print(f"{path}, {path}_expected.safetensors: model.py agrees to {difference:.1e}")


def main():
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=root / "data" / "reference", metavar="DIR",
                        help="folder to write to (default: data/reference)")
    parser.add_argument("--if-available", action="store_true",
                        help="leave everything as it is, without failing, where a package is missing")
    options = parser.parse_args()
    if MISSING:
        kept = f"; {options.out / 'hf_tiny'} is left as it is" if options.if_available else ""
        print(f"make_hf_fixture.py needs transformers, PyTorch, safetensors and NumPy: {MISSING}{kept}", file=sys.stderr)
        sys.exit(0 if options.if_available else 2)
    options.out.mkdir(parents=True, exist_ok=True)
    make(options.out)


if __name__ == "__main__":
    main()

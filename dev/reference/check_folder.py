"""Checks that a folder which train_gpt.cu wrote is a Hugging Face GPT-2 folder, as others read it: the safetensors
package, PyTorch (model.py) and transformers.

DIR holds config.json and model.safetensors, and may hold logits.safetensors, with input_ids I32 (B, T) and the logits
F32 (B, T, V) that the program computed for them. A check whose package is not installed is skipped. Exit status: 0 all
checks pass, 1 one fails, 2 bad usage.
"""
import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path

from config import Config, plain_name

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from testing import expect, expect_equal, finish

TOLERANCE = 1e-3  # of the largest logit: room for FP32 summed in another order, not for an error


def check_tensors(folder, config):
    """Names, shapes, dtype and values in model.safetensors."""
    import numpy as np
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = list(file.keys())
        expect_equal((file.metadata() or {}).get("format"), "pt", "metadata: format")
        found = {plain_name(name): (file.get_slice(name).get_dtype(), file.get_tensor(name)) for name in names}
    expect_equal(len(found), len(names), "no name occurs twice, with and without transformer.")
    shapes = {name: value.shape for name, (_, value) in found.items()}
    expected = config.shapes()
    differing = {name: (shapes.get(name), expected.get(name)) for name in shapes.keys() | expected.keys()
                 if shapes.get(name) != expected.get(name)}
    expect_equal(differing, {}, f"the {len(expected)} parameters and their shapes, and no other tensor")
    expect_equal({name: dtype for name, (dtype, _) in found.items() if dtype != "F32"}, {}, "every parameter is F32")
    expect_equal([name for name, (_, value) in found.items() if not np.isfinite(value).all()], [],
                 "every value is finite")


def expect_logits(folder, config, compute, name):
    """Compares the program's logits, where DIR has them, with those of compute(input_ids)."""
    import torch
    from safetensors.torch import load_file
    if not (folder / "logits.safetensors").exists():
        print(f"skip  logits against {name}: there is no logits.safetensors")
        return
    stored = load_file(folder / "logits.safetensors")
    ids, found = stored["input_ids"].long(), stored["logits"]
    expect_equal(found.shape, (*ids.shape, config.vocab), "logits.safetensors: shape")
    with torch.no_grad():
        expected = compute(ids).float()
    difference, limit = (found - expected).abs().max().item(), TOLERANCE * expected.abs().max().item()
    expect(difference <= limit, f"logits equal {name}", f"largest difference {difference:.2e}, allowed {limit:.2e}")


def check_pytorch(folder, config):
    from model import GPT
    expect_logits(folder, config, GPT.from_folder(folder), "model.py's")


def check_transformers(folder, config):
    from transformers import GPT2LMHeadModel
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    for what in ("missing", "unexpected", "mismatched"):
        expect_equal([str(key) for key in info[f"{what}_keys"]], [], f"transformers finds no {what} parameter")
    expect_logits(folder, config, lambda ids: model.eval()(ids).logits, "transformers'")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--require", action="append", default=[], choices=("safetensors", "torch", "transformers"),
                        help="fail, instead of skipping, where this package is missing (may be repeated)")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    config = Config.from_huggingface(json.loads((options.folder / "config.json").read_text()))
    for check, packages in ((check_tensors, ["safetensors"]), (check_pytorch, ["torch", "safetensors"]),
                            (check_transformers, ["transformers", "torch", "safetensors"])):
        try:
            for package in packages:
                importlib.import_module(package)
        except ImportError as error:
            expect(packages[0] not in options.require, f"{check.__name__} skipped: {error}")
            continue
        try:
            check(options.folder, config)
        except Exception:       # the folder may hold anything, and these packages may raise anything
            expect(False, check.__name__, traceback.format_exc())
    finish()


if __name__ == "__main__":
    main()

"""Checks that a folder written by train_gpt.cu is a Hugging Face GPT-2 folder: opens it with the safetensors package
and transformers.

DIR has config.json and model.safetensors, and optionally logits.safetensors: input_ids I32 (B, T) and the program's
logits F32 (B, T, V) for them. Checks whose packages are not installed are skipped. Exit status: 0 all checks pass, 1 a
check fails, 2 bad usage.
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

TOLERANCE = 1e-3  # relative to the largest logit: allows another order of FP32 sums, but no error


def check_tensors(folder, config):
    """Checks names, shapes, dtype and values in model.safetensors."""
    import numpy as np
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = list(file.keys())
        expect_equal((file.metadata() or {}).get("format"), "pt", "the metadata's format is pt")
        found = {plain_name(name): (file.get_slice(name).get_dtype(), file.get_tensor(name)) for name in names}
    expect_equal(len(found), len(names), "no parameter occurs twice, with and without the prefix transformer.")
    shapes = {name: value.shape for name, (_, value) in found.items()}
    expected = config.shapes()
    differing = {name: (shapes.get(name), expected.get(name)) for name in shapes.keys() | expected.keys()
                 if shapes.get(name) != expected.get(name)}
    expect_equal(differing, {}, f"exactly the {len(expected)} expected parameters, with their shapes")
    expect_equal({name: dtype for name, (dtype, _) in found.items() if dtype != "F32"}, {}, "every parameter is F32")
    expect_equal([name for name, (_, value) in found.items() if not np.isfinite(value).all()], [],
                 "every value is finite")


def check_transformers(folder, config):
    """Checks the parameters and, if DIR has them, the program's logits."""
    import torch
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    for what in ("missing", "unexpected", "mismatched"):
        expect_equal([str(key) for key in info[f"{what}_keys"]], [], f"transformers finds no {what} parameter")
    if not (folder / "logits.safetensors").exists():
        print("skip  logits: no logits.safetensors")
        return
    stored = load_file(folder / "logits.safetensors")
    ids, found = stored["input_ids"].long(), stored["logits"]
    expect_equal(found.shape, (*ids.shape, config.vocab), "logits.safetensors has the shape (B, T, V)")
    with torch.no_grad():
        expected = model.eval()(ids).logits.float()
    difference, limit = (found - expected).abs().max().item(), TOLERANCE * expected.abs().max().item()
    expect(difference <= limit, "logits equal transformers'", f"maximum difference {difference:.2e}, limit {limit:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--require", action="append", default=[], choices=("safetensors", "transformers"),
                        help="fail if this package is not installed (may be repeated)")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: expected a folder")
    config = Config.from_huggingface(json.loads((options.folder / "config.json").read_text()))
    for check, packages in ((check_tensors, ["safetensors"]),
                            (check_transformers, ["transformers", "torch", "safetensors"])):
        try:
            for package in packages:
                importlib.import_module(package)
        except ImportError as error:
            expect(packages[0] not in options.require, f"{check.__name__} skipped: {error}")
            continue
        try:
            check(options.folder, config)
        except Exception:       # a damaged folder may raise anything in these packages
            expect(False, check.__name__, traceback.format_exc())
    finish()


if __name__ == "__main__":
    main()

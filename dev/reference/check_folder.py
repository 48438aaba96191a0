"""Checks that a folder which train_gpt.cu wrote is a Hugging Face GPT-2 folder, as others read it:
the safetensors package, PyTorch (model.py) and transformers.

DIR holds config.json and model.safetensors, and may hold logits.safetensors, with input_ids I32
(B, T) and the logits F32 (B, T, V) that the program computed for them. A check whose package is
not installed is skipped. Exit status: 0 all well, 1 something failed, 2 bad usage.
"""
import argparse
import importlib
import json
import sys
from collections import Counter
from pathlib import Path

from config import Config, plain_name

TOLERANCE = 1e-3  # of the largest logit: room for FP32 summed in another order, not for a mistake


class Report:
    """Prints each claim as it is decided, and counts."""

    def __init__(self):
        self.count = Counter(passed=0, failed=0, skipped=0)

    def claim(self, true, text):
        self.count["passed" if true else "failed"] += 1
        print(f"{'ok  ' if true else 'FAIL'}  {text}")

    def skip(self, text):
        self.count["skipped"] += 1
        print(f"skip  {text}")

    def claim_close(self, who, found, expected):
        """found are the program's logits, expected those of another implementation."""
        difference, limit = abs(found - expected).max(), TOLERANCE * abs(expected).max()
        # Written so that a NaN fails.
        self.claim(difference <= limit, f"logits equal {who}: largest difference {difference:.2e}, "
                                        f"allowed {limit:.2e}")


def listed(names):
    """A few of many names, enough to find the mistake."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_tensors(report, folder, config):
    """Needs only safetensors and NumPy: names, shapes, dtype and values in model.safetensors."""
    import numpy as np
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", framework="np") as file:
        metadata = file.metadata() or {}
        names = set(file.keys())
        dtypes = {plain_name(name): file.get_slice(name).get_dtype() for name in names}
        found = {plain_name(name): file.get_tensor(name) for name in names}
    expected = config.shapes()

    missing = expected.keys() - found.keys()
    twice = {name for name in names - found.keys() if plain_name(name) in names}  # with and without prefix
    extra = (found.keys() - expected.keys()) | twice
    report.claim(not missing, f"no parameter is missing of {len(expected)}" if not missing else f"missing: {listed(missing)}")
    report.claim(not extra, "nothing else is in the file" if not extra else f"not a parameter: {listed(extra)}")
    common = expected.keys() & found.keys()
    for what, good, wrong in (
            ("every shape is as config.json says",
             lambda name: found[name].shape == expected[name],
             lambda name: f"{name} has shape {found[name].shape}, expected {expected[name]}"),
            ("every parameter is F32",
             lambda name: dtypes[name] == "F32",
             lambda name: f"{name} is {dtypes[name]}, expected F32"),
            ("every value is finite",
             lambda name: np.isfinite(found[name]).all(),
             lambda name: f"{name} has {np.count_nonzero(~np.isfinite(found[name]))} values that are not finite")):
        bad = [name for name in expected if name in common and not good(name)]
        report.claim(not bad, what if not bad else "; ".join(wrong(name) for name in bad[:3]))
    report.claim(metadata.get("format") == "pt", f"metadata format is {metadata.get('format')!r}, expected 'pt'")


def load_logits(report, folder, config):
    """The program's own logits, or None where they are not usable."""
    import numpy as np
    from safetensors.numpy import load_file
    stored = load_file(folder / "logits.safetensors")
    found = {name: (str(value.dtype), value.shape) for name, value in stored.items()}
    B, T = stored["input_ids"].shape if np.ndim(stored.get("input_ids")) == 2 else ("B", "T")
    expected = {"input_ids": ("int32", (B, T)), "logits": ("float32", (B, T, config.vocab))}
    report.claim(found == expected, "logits.safetensors has the tensors it should" if found == expected
                 else f"logits.safetensors holds {found}, expected {expected}")
    if found != expected:
        return None
    ids = stored["input_ids"]
    inside = T <= config.context and 0 <= ids.min() and ids.max() < config.vocab
    report.claim(inside, f"input_ids: {T} tokens from {ids.min()} to {ids.max()}, "
                         f"context {config.context}, vocabulary {config.vocab}")
    return (ids.astype(np.int64), stored["logits"]) if inside else None


def check_pytorch(report, folder, logits):
    import torch
    from model import GPT
    ids, found = logits
    with torch.no_grad():
        report.claim_close("model.py's", found, GPT.from_folder(folder)(torch.from_numpy(ids)).numpy())


def check_transformers(report, folder, logits):
    import torch
    from transformers import GPT2LMHeadModel
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    for what in ("missing", "unexpected", "mismatched"):
        keys = [str(key) for key in info[f"{what}_keys"]]
        report.claim(not keys, f"transformers finds no {what} parameter" if not keys
                     else f"transformers finds {what}: {listed(keys)}")
    if logits is not None:
        ids, found = logits
        with torch.no_grad():
            report.claim_close("transformers'", found, model.eval()(torch.from_numpy(ids)).logits.float().numpy())


def import_error(packages):
    """Why one of these packages cannot be had, or None."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return error
    return None


def check(report, folder, required):
    def guarded(what, function, *arguments):
        # The folder may hold anything, and then these packages may raise anything: that too is a finding.
        try:
            return function(*arguments)
        except Exception as error:
            report.claim(False, f"{what}: {type(error).__name__}: {error}")

    def available(what, name, *needs):
        reason = import_error((name, *needs))
        if reason and name in required:
            report.claim(False, f"{what}: required, but {reason}")
        elif reason:
            report.skip(f"{what}: {reason}")
        return not reason

    config = guarded("config.json", lambda: Config.from_huggingface(json.loads((folder / "config.json").read_text())))
    if config is None:
        return
    report.claim(True, f"config.json describes a GPT-2: {config}")

    logits = None
    has_logits = (folder / "logits.safetensors").exists()
    if available("tensors", "safetensors", "numpy"):
        guarded("model.safetensors", check_tensors, report, folder, config)
        if has_logits:
            logits = guarded("logits.safetensors", load_logits, report, folder, config)
    if available("logits against model.py", "torch", "safetensors", "numpy"):
        if logits is not None:
            guarded("model.py", check_pytorch, report, folder, logits)
        else:
            report.skip(f"logits against model.py: {'no usable' if has_logits else 'there is no'} logits.safetensors")
    if available("opened by transformers", "transformers", "torch", "safetensors", "numpy"):
        guarded("transformers", check_transformers, report, folder, logits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--require", action="append", default=[], choices=("safetensors", "torch", "transformers"),
                        help="fail, instead of skipping, where this package is missing (may be repeated)")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    report = Report()
    check(report, options.folder, options.require)
    skipped = f", {report.count['skipped']} skipped" if report.count["skipped"] else ""
    print(f"{report.count['passed']} passed, {report.count['failed']} failed{skipped}")
    sys.exit(1 if report.count["failed"] else 0)


if __name__ == "__main__":
    main()

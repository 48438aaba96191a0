#!/usr/bin/env python3
"""Trains in BF16 and FP8 with several seeds and writes the validation losses into one file, for make playbook.

    python3 dev/playbook/fp8_quality.py --train-gpt build/gpu-bf16/train_gpt --out fp8_quality.json
"""
import argparse
import json
import re
import tempfile
import time

from measure import FP8_QUALITY, Failed, Trainer, demonstration, fail

REFERENCE, AGAIN = "bf16", "bf16 again"
# AGAIN differs from REFERENCE only in the order of a step's sums: it measures the effect of rounding alone.
FORMATS = {REFERENCE: {"matmul": "plain"},
           AGAIN: {"matmul": "plain", "micro_batch": 4, "total_batch": 1024},
           "fp8, delayed": {"matmul": "fp8", "fp8_scaling": "delayed"},
           "fp8, current": {"matmul": "fp8", "fp8_scaling": "current"},
           "fp8-all": {"matmul": "fp8-all"}}
# Ten million parameters, bytes as tokens. The schedule is that of make run, with a lower learning rate, as the model is
# three times as wide.
OPTIONS = {"layers": 6, "heads": 6, "channels": 384, "context": 128, "micro_batch": 8, "steps": 1500, "eval_every": 100,
           "lr": 1e-3, "min_lr": 1e-4, "warmup": 50, "beta2": 0.99, "eval_sequences": 0, "checkpoint_every": 0}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--train-gpt", default="./train_gpt", metavar="PROGRAM",
                        help="built with PRECISION=bf16 (default: %(default)s)")
    parser.add_argument("--data", default="data/shakespeare.txt", metavar="FILE", help="text (default: %(default)s)")
    parser.add_argument("--out", default=FP8_QUALITY, metavar="FILE", help="file to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=OPTIONS["steps"], help="(default: %(default)s)")
    o = parser.parse_args()
    options = {**OPTIONS, "steps": o.steps}
    with tempfile.TemporaryDirectory(prefix="fp8_quality_") as folder:
        trainer = Trainer(o.train_gpt, folder)
        kinds = demonstration(trainer, o.data, options, FORMATS, ["val_loss"])
    run = trainer.first_record
    about = {"device": run["device"], "precision": run["precision"], "parameters": run["model"]["parameters"],
             "date": time.strftime("%Y-%m-%d")}
    text = json.dumps({"about": about, "options": options, "kinds": kinds}, separators=(",", ":"))
    with open(o.out, "w", encoding="utf-8") as file:    # in lines of at most 120 columns
        file.write(re.sub(r"(.{80,119}?,)(?=[\[{\"])", r"\1\n", text) + "\n")
    print(o.out)


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        fail(str(error), 1)

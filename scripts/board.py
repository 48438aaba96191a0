#!/usr/bin/env python3
"""Shows training runs in TensorBoard, or in Weights & Biases, from each run's log.jsonl.

    scripts/board.py runs/gpt2_124M runs/gpt2_350M      # then: tensorboard --logdir runs
    scripts/board.py --watch runs/gpt2_124M             # and follows the run until it has done its steps
    scripts/board.py --watch --wandb gpt2 runs/gpt2_124M    # project gpt2; WANDB_MODE=offline: into RUN/wandb only

Needs the package tensorboard, or wandb. Of a run that resumed from a checkpoint TensorBoard shows each step once;
Weights & Biases keeps both.
"""
import argparse
import os
import shutil
import sys
import time

sys.dont_write_bytecode = True
from runs import Mistake, add_watch_flags, main_with, read_run, stamp

TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "hellaswag": "hellaswag/acc_norm",
        "norm": "optimizer/norm", "lr": "optimizer/lr", "ms": "speed/ms", "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu", "hfu": "speed/hfu"}


class TensorBoard:
    """Event files in a run's folder board/gpt.cu, which is replaced; the log has no dates, only durations."""

    def __init__(self, run, options):
        from tensorboard.summary import Writer
        folder = os.path.join(run.folder, "board", "gpt.cu")
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = Writer(folder)

    def write(self, step, numbers):
        for name, value in numbers.items(): self.writer.add_scalar(TAGS[name], value, step)

    def flush(self): self.writer.flush()

    def close(self): self.writer.close()


class WeightsAndBiases:
    def __init__(self, run, options):
        import wandb
        try:
            self.run = wandb.init(project=options.wandb, name=run.name, dir=run.folder, config=run.record,
                                  reinit="create_new", settings=wandb.Settings(console="off"))
        except wandb.Error as error:
            raise Mistake(f"--wandb {options.wandb}: {error}; expected a login (wandb login) or "
                          "WANDB_MODE=offline") from None
        self.run.define_metric("*", step_metric="step")

    def write(self, step, numbers):
        self.run.log({"step": step, **{TAGS[name]: value for name, value in numbers.items()}})

    def flush(self): pass

    def close(self): self.run.finish()


class Export:
    """One run on one board: what was written, and what is still to be."""

    def __init__(self, kind, options):
        self.kind, self.options, self.board, self.written = kind, options, None, {}

    def update(self, run):
        """Writes new numbers. Where the log has changed, TensorBoard's files are written again."""
        kept = all(numbers.items() <= run.steps.get(step, {}).items() for step, numbers in self.written.items())
        if self.board is None or not kept and self.kind is TensorBoard:
            if self.board: self.board.close()
            self.board, self.written = self.kind(run, self.options), {}
        for step, numbers in run.steps.items():
            old = self.written.get(step, {})
            new = {name: value for name, value in numbers.items() if (name, value) not in old.items()}   # NaN is NaN
            if new: self.board.write(step, new)
        self.written = {step: dict(numbers) for step, numbers in run.steps.items()}
        self.board.flush()


def export(options):
    kind = TensorBoard if options.wandb is None else WeightsAndBiases
    package = "tensorboard" if kind is TensorBoard else "wandb"
    try:
        __import__("tensorboard.summary" if kind is TensorBoard else "wandb")     # now, not when a run begins
    except ImportError as error:
        raise Mistake(f"{error}: pip install {package}") from None
    exports, seen = {folder: Export(kind, options) for folder in options.runs}, {}
    try:
        while True:
            ended = 0
            for folder in options.runs:
                now = stamp(folder)
                if options.watch and now is None: continue      # it has not begun
                run = read_run(folder)
                ended += run.ended()
                if not run.steps and not options.watch:
                    raise Mistake(f"{folder}/log.jsonl: found no step in it, expected at least one")
                if not run.steps or now == seen.get(folder): continue
                seen[folder] = now
                exports[folder].update(run)
                print(f"{run.name}: up to step {run.last():,}", flush=True)
            if not options.watch or ended == len(options.runs): break
            time.sleep(options.every)
    except OSError as error:
        raise Mistake(f"{error.filename}: {error.strerror}; expected a folder that can be written") from None
    finally:
        for each in exports.values():
            if each.board: each.board.close()
    if options.wandb is None:
        shown = os.path.commonpath([os.path.abspath(folder) for folder in options.runs])
        print(f"tensorboard --logdir {os.path.relpath(shown)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--wandb", metavar="PROJECT", help="to a project of Weights & Biases instead of TensorBoard")
    export(add_watch_flags(parser, "look again for what is new, until all runs have done their steps"))


if __name__ == "__main__":
    main_with("board", main)

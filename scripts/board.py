#!/usr/bin/env python3
"""Shows training runs in TensorBoard, or in Weights & Biases, from each run's log.jsonl.

    scripts/board.py runs/gpt2_124M runs/gpt2_350M      # then: tensorboard --logdir runs
    scripts/board.py --watch runs/gpt2_124M             # follows the run until its end
    scripts/board.py --watch --wandb gpt2 runs/gpt2_124M    # project gpt2; WANDB_MODE=offline: writes RUN/wandb only

Needs the package tensorboard, or wandb with --wandb. If a run resumed from a checkpoint, TensorBoard shows only the
later of two equal steps; Weights & Biases keeps both.
"""
import argparse
import os
import shutil

from runs import TAGS, follow, parse_arguments, summary
from tokens import fail, load_package


class TensorBoard:
    """Writes event files to RUN/board/gpt.cu, which is replaced."""
    package, keeps_old = "tensorboard.summary", False

    def __init__(self, module, run, options):
        folder = os.path.join(run.folder, "board", "gpt.cu")
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = module.Writer(folder)
        self.flush, self.close = self.writer.flush, self.writer.close

    def write(self, step, numbers):
        for name, value in numbers:
            self.writer.add_scalar(TAGS[name], value, step)


class WeightsAndBiases:
    """Writes to a project on wandb.ai, or to RUN/wandb with WANDB_MODE=offline."""
    package, keeps_old = "wandb", True

    def __init__(self, module, run, options):
        try:
            self.run = module.init(project=options.wandb, name=run.name, dir=run.folder, config=run.record,
                                   reinit="create_new", settings=module.Settings(console="off"))
        except module.Error as error:
            fail(f"--wandb {options.wandb}: {error}; log in with `wandb login` or set WANDB_MODE=offline")
        self.run.define_metric("*", step_metric="step")
        self.flush, self.close = lambda: None, self.run.finish

    def write(self, step, numbers):
        self.run.log({"step": step, **{TAGS[name]: value for name, value in numbers}})


def export(kind, options):
    """Writes the new numbers of each run's log to its board. If numbers changed because the run resumed, the board is
    replaced, unless the service keeps old numbers."""
    module = load_package(kind.package, "board.py")     # a missing package is an error before any run starts
    boards, written = {}, {}
    for runs in follow(options):
        for run in runs:
            found = {(step, name, repr(value)) for step, numbers in run.steps.items()
                     for name, value in numbers.items()}
            before = written.get(run.folder, set())
            if run.folder not in boards or not (before <= found or kind.keeps_old):
                if run.folder in boards:
                    boards[run.folder].close()
                boards[run.folder], before = kind(module, run, options), set()
            for step, numbers in run.steps.items():
                new = [item for item in numbers.items() if (step, item[0], repr(item[1])) not in before]
                if new:
                    boards[run.folder].write(step, new)
            boards[run.folder].flush()
            written[run.folder] = found
            print(summary(run), flush=True)
    for board in boards.values():
        board.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--wandb", metavar="PROJECT", help="write to this Weights & Biases project, not to TensorBoard")
    options = parse_arguments(parser)
    try:
        export(WeightsAndBiases if options.wandb else TensorBoard, options)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; expected a writable folder")
    if not options.wandb:
        print("tensorboard --logdir", os.path.commonpath([os.path.abspath(folder) for folder in options.runs]))


if __name__ == "__main__":
    main()

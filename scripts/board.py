#!/usr/bin/env python3
"""Shows training runs in TensorBoard, or in Weights & Biases, from each run's log.jsonl.

    scripts/board.py runs/gpt2_124M runs/gpt2_350M      # then: tensorboard --logdir runs
    scripts/board.py --watch runs/gpt2_124M             # and follows the run until it has done its steps
    scripts/board.py --watch --wandb gpt2 runs/gpt2_124M    # project gpt2; WANDB_MODE=offline: into RUN/wandb only

Needs the package tensorboard, or wandb. A run that went on from a checkpoint loses the steps that it did again: in
TensorBoard; Weights & Biases keeps both.
"""
import argparse
import glob
import math
import os
import sys
import time

sys.dont_write_bytecode = True
from runs import Mistake, read_run, stamp

TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "hellaswag": "hellaswag/acc_norm",
        "norm": "optimizer/norm", "lr": "optimizer/lr", "ms": "speed/ms", "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu", "hfu": "speed/hfu"}
OURS = ".gpt_cu"        # at the end of event files' names: these are written anew, others stay


def load(kind):
    """The package, which is optional: now, not when a run that is waited for begins."""
    global event_file_writer, event_pb2, summary_pb2, wandb
    try:
        if kind is TensorBoard:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        else:
            import wandb
    except ImportError as error:
        raise Mistake(f"{error}: pip install {'tensorboard' if kind is TensorBoard else 'wandb'}") from None


class TensorBoard:
    """Event files in a run's folder `board`."""

    def __init__(self, run, options):
        self.folder = os.path.join(run.folder, "board")
        try:
            for old in glob.glob(os.path.join(glob.escape(self.folder), f"events.out.tfevents.*{OURS}")):
                os.remove(old)
            self.writer = event_file_writer.EventFileWriter(self.folder, filename_suffix=OURS)
        except OSError as error:
            raise Mistake(f"{self.folder}: {error.strerror}; expected a folder that can be written") from None
        # The log has durations but no dates: the last step was when the file was written.
        self.began = os.stat(os.path.join(run.folder, "log.jsonl")).st_mtime - run.progress()[run.last()][1]

    def write(self, step, numbers, seconds):
        values = [summary_pb2.Summary.Value(tag=TAGS[name], simple_value=value) for name, value in numbers.items()]
        summary = summary_pb2.Summary(value=values)
        self.writer.add_event(event_pb2.Event(step=step, wall_time=self.began + seconds, summary=summary))

    def restart(self, step, seconds):
        """Whoever reads drops what it has from this step on."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self.writer.add_event(event_pb2.Event(step=step, wall_time=self.began + seconds, session_log=start))

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run, options):
        try:
            self.run = wandb.init(project=options.wandb, name=run.name, dir=run.folder, config=run.record,
                                  reinit="create_new", settings=wandb.Settings(console="off"))
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        except wandb.Error as error:
            raise Mistake(f"--wandb {options.wandb}: {error}; expected a login (wandb login) or "
                          "WANDB_MODE=offline") from None

    def write(self, step, numbers, seconds):
        self.run.log({"step": step, "seconds": seconds, **{TAGS[name]: value for name, value in numbers.items()}})

    def restart(self, step, seconds):
        pass

    def flush(self):
        pass

    def close(self):
        self.run.finish()


def still_so(written, numbers):
    """NaN is NaN here."""
    return all(name in numbers and (value == numbers[name] or math.isnan(value) and math.isnan(numbers[name]))
               for name, value in written.items())


class Export:
    """One run on one board: what was written, and what is still to be."""

    def __init__(self, board):
        self.board, self.written = board, {}

    def update(self, run):
        progress = run.progress()
        changed = [step for step, numbers in run.steps.items() if not still_so(self.written.get(step, {}), numbers)]
        if changed:
            self.board.restart(changed[0], progress[changed[0]][1])
            self.written = {step: numbers for step, numbers in self.written.items() if step < changed[0]}
        for step, numbers in run.steps.items():
            new = {name: value for name, value in numbers.items() if name not in self.written.get(step, {})}
            if new:
                self.board.write(step, new, progress[step][1])
                self.written[step] = numbers
        self.board.flush()


def export(options):
    kind = TensorBoard if options.wandb is None else WeightsAndBiases
    load(kind)
    exports, seen = {}, {}
    try:
        while True:
            ended = 0
            for folder in options.runs:
                now = stamp(folder)
                if options.watch and now is None:
                    continue    # has not begun yet
                run = read_run(folder)
                ended += run.ended()
                if not run.steps:
                    if not options.watch:
                        raise Mistake(f"{folder}/log.jsonl: found no step in it, expected at least one")
                    continue
                if now == seen.get(folder):
                    continue
                seen[folder] = now
                if folder not in exports:
                    exports[folder] = Export(kind(run, options))
                exports[folder].update(run)
                print(f"{run.name}: up to step {run.last():,}", flush=True)
            if not options.watch or ended == len(options.runs):
                break
            time.sleep(options.every)
    finally:
        for each in exports.values():
            each.board.close()
    if options.wandb is None:
        shown = os.path.commonpath([os.path.abspath(folder) for folder in options.runs])
        print(f"tensorboard --logdir {os.path.relpath(shown)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER", help="a run's --out folder, holding log.jsonl")
    parser.add_argument("--watch", action="store_true", help="look again for what is new, until all runs have done "
                        "their steps")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="with --watch: how often to look (default: 10)")
    parser.add_argument("--wandb", metavar="PROJECT", help="to a project of Weights & Biases instead of TensorBoard")
    options = parser.parse_args()
    if options.every is not None and not (options.watch and options.every > 0):
        parser.error("--every takes seconds, more than 0, and goes with --watch")
    options.every = options.every or 10
    export(options)


if __name__ == "__main__":
    try:
        main()
    except Mistake as mistake:
        print(f"board: {mistake}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

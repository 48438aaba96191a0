#!/usr/bin/env python3
"""Holds gpt/hellaswag.cuh against a plain loop in PyTorch, on made-up questions of many lengths.

    make build/test/fp32-1/test_gpt
    dev/tests/check_hellaswag.py compare --program build/test/fp32-1/test_gpt
    dev/tests/check_hellaswag.py sample

compare draws a small model at random and questions for it, writes both, and has the program answer: each ending's
losses must add up to the loop's sum within rounding, both choices must be the loop's, unless the loop's own two best
differ by less than that; at several sizes of batch. sample writes data/reference/hellaswag.bin, questions for
data/reference/hf_tiny, and hellaswag.json: the loop's sums in float64.

They need PyTorch, NumPy and safetensors. Exit status: 0 all equal, 1 something differs, 2 bad usage.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev" / "reference"), str(ROOT / "scripts")]

import safetensors.numpy
import torch

from config import Config
from make_reference import draw_parameters
from model import GPT
from tokens import Example, write_examples

REFERENCE = ROOT / "data" / "reference"


def draw_questions(count, longest, vocab, seed):
    """Questions of all lengths that a model of `longest` inputs takes, the shortest and the longest among them."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(vocab) for _ in range(n)]
    questions = [Example(0, tokens(1), [tokens(1) for _ in range(4)]),
                 Example(3, tokens(1), [tokens(n) for n in (1, 2, longest - 1, longest)]),
                 Example(1, tokens(longest), [tokens(1) for _ in range(4)])]
    while len(questions) < count:
        context = draw.randrange(1, longest)
        lengths = [draw.randint(1, longest + 1 - context) for _ in range(4)]
        questions.append(Example(draw.randrange(4), tokens(context), [tokens(n) for n in lengths]))
    return questions


def sums(model, questions):
    """Each ending's sum of losses, one ending after the other."""
    result = []
    with torch.no_grad():
        for question in questions:
            result.append([])
            for ending in question.endings:
                tokens = torch.tensor([question.context + ending])
                logits = model.double()(tokens[:, :-1])[0, len(question.context) - 1:]
                losses = torch.nn.functional.cross_entropy(logits, tokens[0, len(question.context):], reduction="none")
                assert len(losses) == len(ending)
                result[-1].append(losses.sum().item())
    return result


def choices(question, losses):
    """By sum and by mean."""
    means = [loss / len(ending) for loss, ending in zip(losses, question.endings)]
    return [losses.index(min(losses)), means.index(min(means))]


def gap(question, losses):
    """How much the two best differ, by sum or by mean, relative to the best."""
    means = [loss / len(ending) for loss, ending in zip(losses, question.endings)]
    return min((sorted(values)[1] - min(values)) / min(values) for values in (losses, means))


def write_sample():
    model = GPT.from_folder(REFERENCE / "hf_tiny")
    # Of many the ones that BF16 answers alike: their two best differ by more than its roundings.
    drawn = draw_questions(400, model.config.context, model.config.vocab, seed=30)
    questions, expected = [], []
    for question, losses in zip(drawn, sums(model, drawn)):
        if gap(question, losses) > 0.03 and len(questions) < 16:
            questions.append(question)
            expected.append({"sums": losses, "choices": choices(question, losses)})
    write_examples(str(REFERENCE / "hellaswag.bin"), questions)
    (REFERENCE / "hellaswag.json").write_text("[" + ",\n ".join(map(json.dumps, expected)) + "]\n")
    for which, name in enumerate(("accuracy", "acc_norm")):
        right = sum(answer["choices"][which] == question.label for question, answer in zip(questions, expected))
        print(f"{REFERENCE / 'hellaswag.bin'}: {len(questions)} questions, {name} {right / len(questions):.4f}")


def compare(options):
    config = Config(layers=3, heads=2, channels=64, context=200, vocab=1000)
    model = GPT(config)
    questions = draw_questions(options.questions, config.context, config.vocab, seed=31)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        drawn = draw_parameters(config, seed=32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(drawn[name])
        safetensors.numpy.save_file({name: p.detach().numpy().copy() for name, p in model.named_parameters()},
                                    folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(
            {"model_type": "gpt2", "n_layer": config.layers, "n_head": config.heads, "n_embd": config.channels,
             "n_positions": config.context, "vocab_size": config.vocab}))
        write_examples(str(folder / "questions.bin"), questions)
        expected, wrong = sums(model, questions), 0
        for batch in options.micro_batch:
            command = [options.program, "--hellaswag", str(folder), str(folder / "questions.bin"), str(batch)]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            assert len(found) == len(questions)
            error, differ, close = 0, 0, 0
            for question, ours, answer in zip(questions, expected, found):
                distance = max(abs(a - b) / b for a, b in zip(answer["sums"], ours))
                error = max(error, distance)
                if answer["choices"] != choices(question, ours):
                    if gap(question, ours) > 2 * distance: differ += 1
                    else: close += 1
            wrong += differ + (not error < options.tolerance)
            print(f"micro-batch {batch}: {len(questions)} questions, sums differ by {error:.1e} of themselves at most, "
                  f"{differ} other choices and {close} within rounding")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("sample")
    comparison = verbs.add_parser("compare")
    comparison.add_argument("--program", required=True, metavar="TEST_GPT")
    comparison.add_argument("--questions", type=int, default=300, metavar="N")
    comparison.add_argument("--micro-batch", type=int, nargs="*", default=[1, 3, 16], metavar="B")
    comparison.add_argument("--tolerance", type=float, default=2e-6, metavar="X",
                            help="what sums may differ by, of themselves (default 2e-6, for FP32)")
    options = parser.parse_args()
    if options.verb == "sample":
        write_sample()
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())

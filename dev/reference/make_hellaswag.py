#!/usr/bin/env python3
"""Writes data/reference/hellaswag.bin, random questions for data/reference/hf_tiny, and hellaswag.json: for each
question the endings' sums of losses from a simple loop in PyTorch in float64, and the endings chosen by sum and mean.

    python3 dev/reference/make_hellaswag.py      # needs PyTorch and safetensors; takes about 3 minutes on 2 CPU cores
"""
import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import torch

from model import GPT
from tokens import Example, write_examples

REFERENCE = ROOT / "data" / "reference"


def draw_questions(count, max_inputs, vocab, seed):
    """Returns random questions of all lengths from the minimum up to `max_inputs` input tokens, including both ends."""
    draw = random.Random(seed)
    tokens = lambda n: [draw.randrange(vocab) for _ in range(n)]
    questions = [Example(0, tokens(1), [tokens(1) for _ in range(4)]),
                 Example(3, tokens(1), [tokens(n) for n in (1, 2, max_inputs - 1, max_inputs)]),
                 Example(1, tokens(max_inputs), [tokens(1) for _ in range(4)])]
    while len(questions) < count:
        context = draw.randrange(1, max_inputs)
        lengths = [draw.randint(1, max_inputs + 1 - context) for _ in range(4)]
        questions.append(Example(draw.randrange(4), tokens(context), [tokens(n) for n in lengths]))
    return questions


def sums(model, questions):
    """Returns each ending's sum of losses, computed separately for each ending. Prints its progress."""
    result = []
    with torch.no_grad():
        for number, question in enumerate(questions):
            if number % 20 == 0:
                print(f"{number} of {len(questions)} questions", flush=True)
            result.append([])
            for ending in question.endings:
                tokens = torch.tensor([question.context + ending])
                logits = model.double()(tokens[:, :-1])[0, len(question.context) - 1:]
                losses = torch.nn.functional.cross_entropy(logits, tokens[0, len(question.context):], reduction="none")
                assert len(losses) == len(ending)
                result[-1].append(losses.sum().item())
    return result


def write_sample():
    model = GPT.from_folder(REFERENCE / "hf_tiny")
    # Keeps questions whose two best endings differ, by sum and by mean, by more than BF16's rounding errors.
    drawn = draw_questions(400, model.config.context, model.config.vocab, seed=30)
    questions, expected = [], []
    for question, losses in zip(drawn, sums(model, drawn)):
        means = [loss / len(ending) for loss, ending in zip(losses, question.endings)]
        gap = min((sorted(values)[1] - min(values)) / min(values) for values in (losses, means))
        if gap > 0.03 and len(questions) < 16:
            questions.append(question)
            expected.append({"sums": losses, "choices": [values.index(min(values)) for values in (losses, means)]})
    write_examples(str(REFERENCE / "hellaswag.bin"), questions)
    (REFERENCE / "hellaswag.json").write_text("[" + ",\n ".join(map(json.dumps, expected)) + "]\n")
    for which, name in enumerate(("accuracy", "acc_norm")):
        right = sum(answer["choices"][which] == question.label for question, answer in zip(questions, expected))
        print(f"{REFERENCE / 'hellaswag.bin'}: {len(questions)} questions, {name} {right / len(questions):.4f}")


if __name__ == "__main__":
    write_sample()

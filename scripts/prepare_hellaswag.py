#!/usr/bin/env python3
"""Turns HellaSwag's questions into tokens: one file in llm.c's format, which data/README.md describes.

    scripts/prepare_hellaswag.py --tokenizer gpt2 hellaswag_val.jsonl hellaswag_val.bin

A question is a context and four endings, of which one is right. As in llm.c the tokens of "ctx" are the context's, and
those of a space and the ending an ending's; a model's answer is the ending with the lowest mean loss.
"""
import argparse
import json
import os

from tokens import Example, Mistake, load_tokenizer, run, write_examples


def read_question(line, place):
    """Context, endings, label."""
    try:
        question = json.loads(line)
        context, endings, label = question["ctx"], question["endings"], int(question["label"])
        whole = len(endings) == 4 and 0 <= label < 4 and all(isinstance(text, str) for text in [context, *endings])
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole: raise Mistake(f"{place}: found {line[:60]!r}, expected a JSON object with ctx, 4 endings and label")
    return context, endings, label


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("questions", metavar="FILE.jsonl", help="HellaSwag's, such as hellaswag_val.jsonl")
    parser.add_argument("out", metavar="FILE.bin")
    parser.add_argument("--tokenizer", required=True, metavar="NAME",
                        help="gpt2 (the package tiktoken), bytes, or a folder with tokenizer.json")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    try:
        with open(options.questions, encoding="utf-8") as file: lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{options.questions}: {error}; scripts/download.sh hellaswag fetches it") from None
    examples = []
    for number, line in enumerate(lines, 1):
        context, endings, label = read_question(line, f"{options.questions} line {number}")
        parts = [list(tokens) for tokens in tokenizer.encode([context, *(" " + ending for ending in endings)])]
        examples.append(Example(label, parts[0], parts[1:]))
    if not 1 <= len(examples) < 1 << 16:
        raise Mistake(f"{options.questions}: found {len(examples)} questions, expected 1 to {(1 << 16) - 1}")
    try:
        os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
        write_examples(options.out, examples)
    except OSError as error:
        raise Mistake(f"{options.out}: {error}", 1) from None
    print(f"{options.out}: {len(examples):,} questions")


if __name__ == "__main__":
    run(main)

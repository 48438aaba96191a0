#!/usr/bin/env python3
"""Converts HellaSwag's questions to tokens: one file in llm.c's format (data/README.md).

    scripts/prepare_hellaswag.py --tokenizer gpt2 hellaswag_val.jsonl hellaswag_val.bin

A question has a context and four endings, one of them correct. As in llm.c, "ctx" is tokenized unchanged, and each
ending with a space before it. A model's answer is the ending with the lowest mean loss.
"""
import argparse
import json
import os

from tokens import Example, encode, fail, load_tokenizer, write_examples


def read_question(line, place):
    """Returns (context, endings, label). place: file and line, for the error message."""
    try:
        question = json.loads(line)
        context, endings, label = question["ctx"], question["endings"], int(question["label"])
        if len(endings) == 4 and 0 <= label < 4 and all(isinstance(text, str) for text in [context, *endings]):
            return context, endings, label
    except (ValueError, TypeError, KeyError):
        pass
    fail(f"{place}: expected a JSON object with ctx, 4 endings and label, found {line[:60]!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("questions", metavar="FILE.jsonl", help="questions, such as hellaswag_val.jsonl")
    parser.add_argument("out", metavar="FILE.bin", help="the file to write")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="gpt2, or a folder with a tokenizer")
    options = parser.parse_args()
    tokenizer, examples = load_tokenizer(options.tokenizer), []
    try:
        with open(options.questions, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                context, endings, label = read_question(line, f"{options.questions} line {number}")
                parts = encode(tokenizer, [context, *(" " + ending for ending in endings)])
                examples.append(Example(label, parts[0], parts[1:]))
        os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{options.questions}: {error}; scripts/download.sh hellaswag downloads it")
    if not 1 <= len(examples) < 1 << 16:
        fail(f"{options.questions}: expected 1 to {(1 << 16) - 1} questions, found {len(examples)}")
    write_examples(options.out, examples)
    print(f"{options.out}: {len(examples):,} questions")


if __name__ == "__main__":
    main()

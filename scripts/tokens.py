#!/usr/bin/env python3
"""Text to GPT-2 token numbers and back, for `train_gpt sample` with models whose tokens are not bytes:

    python3 scripts/tokens.py encode "Hello, world" | ./train_gpt sample --from DIR --prompt-tokens - \\
        | python3 scripts/tokens.py decode

The tokenizer is tiktoken's (pip install tiktoken); it downloads GPT-2's vocabulary on first use.
"""
import argparse
import sys


def gpt2():
    try:
        import tiktoken
    except ImportError:
        sys.exit("tokens.py: needs the package tiktoken: pip install tiktoken")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever its download raised
        sys.exit(f"tokens.py: tiktoken could not load GPT-2's vocabulary, which it downloads on first use: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("text", nargs="?", help="text or token numbers; standard input when left out")
    args = parser.parse_args()
    text = sys.stdin.read() if args.text is None else args.text
    if args.direction == "encode":
        print(" ".join(map(str, gpt2().encode(text, allowed_special="all"))))
        return
    try:
        tokens = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        parser.error(f"decode takes token numbers: {error}")
    print(gpt2().decode(tokens))


if __name__ == "__main__":
    main()

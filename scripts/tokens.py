#!/usr/bin/env python3
"""Converts text to GPT-2 token ids and back, for `train_gpt sample` with models whose tokens are not bytes:

    python3 scripts/tokens.py encode "Hello, world" | ./train_gpt sample --from DIR --prompt-tokens - \\
        | python3 scripts/tokens.py decode

The scripts that prepare data import the tokenizer and the file formats from this module; data/README.md describes the
formats. All files are little-endian, like every machine that this program supports.
"""
import argparse
import array
import collections
import os
import random
import struct
import sys

END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 1 << 16            # tokens are stored as uint16
SHARD_MAGIC, EXAMPLES_MAGIC = 20240520, 20240522
Example = collections.namedtuple("Example", "label context endings")


def fail(message, code=2):
    """Prints one line and exits. code: 2 for bad usage or bad input, 1 for network and disk errors."""
    print(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}: {message}", file=sys.stderr)
    sys.exit(code)


def load_tokenizer(name):
    """Returns the tokenizers.Tokenizer in the tokenizer.json of a folder. The name "gpt2" stands for GPT-2's tokenizer,
    which is downloaded on first use."""
    try:
        from huggingface_hub import hf_hub_download
        from tokenizers import Tokenizer
    except ImportError as error:
        fail(f"{error}; --tokenizer needs tokenizers and huggingface_hub: pip install -r scripts/requirements.txt")
    path = os.path.join(name, "tokenizer.json")
    if name == "gpt2" and not os.path.exists(path):
        try:
            path = hf_hub_download("openai-community/gpt2", "tokenizer.json")
        except Exception as error:      # which classes depends on the HTTP library
            fail(f"--tokenizer gpt2: could not download tokenizer.json from huggingface.co/openai-community/gpt2 "
                 f"({type(error).__name__}); download it to models/gpt2 by hand and use --tokenizer models/gpt2", 1)
    if not os.path.exists(path):
        fail(f"--tokenizer {name}: expected gpt2 or a folder with tokenizer.json, found no '{path}'; "
             "scripts/download.sh gpt2 downloads one")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:          # the package raises plain Exception
        fail(f"{path}: {error}")
    if tokenizer.get_vocab_size() > MAX_VOCABULARY:
        fail(f"{path}: found a vocabulary of {tokenizer.get_vocab_size()}, expected at most {MAX_VOCABULARY} (uint16)")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer, texts):
    """Returns the list of token ids of each text. The package tokenizers uses all cores."""
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


# ---- files

def write_file(path, magic, numbers, tokens):
    """Writes a header (256 int32: magic, version 1, numbers, zeros) and uint16 tokens to PATH.part, then renames it to
    PATH, so that a file named PATH is always complete."""
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<256i", magic, 1, *numbers, *[0] * (254 - len(numbers))))
        array.array("H", tokens).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def write_shard(path, tokens):
    write_file(path, SHARD_MAGIC, [len(tokens)], tokens)


def write_random_shard(path, vocab, count):
    """Writes random tokens with frequencies proportional to 1/rank, as in language: the time of the embedding's
    backward pass depends on how often tokens repeat."""
    weights = [1 / (rank + 2.7) for rank in range(vocab)]
    write_shard(path, random.Random(1).choices(range(vocab), weights, k=count))


def write_examples(path, examples):
    """Writes multiple-choice questions. The header holds the number of examples and the size of the longest in bytes.
    An example is 65535, its size in bytes, its index, the label and the number of endings, then the context and each
    ending, both preceded by their number of tokens."""
    stream, longest = array.array("H"), 0
    for index, example in enumerate(examples):
        words = [0xffff, 0, index, example.label, len(example.endings)]
        for part in [example.context, *example.endings]:
            words += [len(part), *part]
        words[1] = 2 * len(words)
        if words[1] >= 1 << 16 or max(words[2:]) >= 0xffff:
            fail(f"example {index}: expected fewer than 65536 bytes and tokens below 65535, found {words[1]} bytes and "
                 f"token {max(words[2:])}")
        longest = max(longest, words[1])
        stream.extend(words)
    write_file(path, EXAMPLES_MAGIC, [len(examples), longest], stream)


# ---- command line

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("text", nargs="?", help="text or token ids (default: standard input)")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                        help="gpt2 (default; downloaded on first use), or a folder with tokenizer.json")
    options = parser.parse_intermixed_args()
    tokenizer = load_tokenizer(options.tokenizer)
    text = sys.stdin.read() if options.text is None else options.text
    if options.direction == "encode":
        print(*encode(tokenizer, [text])[0])
        return
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        fail(f"decode: {error}; expected token ids")
    print(tokenizer.decode(ids, skip_special_tokens=False))


if __name__ == "__main__":
    main()

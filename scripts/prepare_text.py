#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt, in llm.c's .bin format.

A shard is a header of 256 int32 (20240520, version 1, number of tokens, zeros) followed by the
tokens, a uint16 each, all little-endian.

    scripts/prepare_text.py --tokenizer gpt2 --out-prefix data/books/books data/books/*.txt
    zcat big.txt.gz | scripts/prepare_text.py --tokenizer bytes --out-prefix data/big/big

With gpt2 every file is a document, and <|endoftext|> inside a file starts another one; each
document begins with that token, as in llm.c's data. With bytes a token is a byte of the text.
"""
import argparse
import glob
import itertools
import os
import re
import struct
import sys
import tempfile

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
END_OF_TEXT, END_OF_TEXT_TOKEN = "<|endoftext|>", 50256
PIECE = 1 << 20     # characters (or bytes) handled at a time


class Mistake(Exception):
    """The user's; the message names the flag or the file, what was found and what was expected."""


def read(stream, name):
    try:
        return stream.read(PIECE)
    except UnicodeDecodeError as error:
        raise Mistake(f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x}); "
                      "convert it, or use --tokenizer bytes") from None


def split_marks(text):
    return filter(None, re.split(f"({re.escape(END_OF_TEXT)})", text))


def pieces(stream, name):
    """The stream's text in pieces of about PIECE characters, cut where that changes no token.

    GPT-2 splits text into words before it looks for tokens, and a word may begin with a space
    but never goes on to one: before a space or line break that ends a word is a place to cut.
    The marks <|endoftext|> come out as pieces of their own.
    """
    pending = ""
    while block := read(stream, name):
        pending += block
        if last := re.match(r".*\S(?=[ \n])", pending, re.DOTALL):
            yield from split_marks(last.group())
            pending = pending[last.end():]
    yield from split_marks(pending)


def gpt2_tokens(paths):
    """Packed tokens of all files, a bytes object at a time."""
    try:
        import tiktoken
    except ImportError:
        raise Mistake("--tokenizer gpt2: needs the Python package tiktoken (pip install tiktoken); "
                      "--tokenizer bytes needs none") from None
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:      # whatever its HTTP library raises
        raise Mistake(f"--tokenizer gpt2: tiktoken downloads the vocabulary on first use, and that failed "
                      f"({type(error).__name__}). Run this once with a network, or copy another machine's "
                      "cache and name it in TIKTOKEN_CACHE_DIR") from None

    threads = os.cpu_count() or 1
    mark = struct.pack("<H", END_OF_TEXT_TOKEN)
    for path in paths:
        with open_input(path, text=True) as stream:
            yield mark
            texts = pieces(stream, path)
            # A leading mark would begin the document twice.
            texts = itertools.dropwhile(lambda text: text == END_OF_TEXT, texts)
            while batch := list(itertools.islice(texts, 4 * threads)):
                words = iter(encoding.encode_ordinary_batch([text for text in batch if text != END_OF_TEXT],
                                                            num_threads=threads))
                for text in batch:
                    tokens = [END_OF_TEXT_TOKEN] if text == END_OF_TEXT else next(words)
                    yield struct.pack(f"<{len(tokens)}H", *tokens)


def byte_tokens(paths):
    for path in paths:
        with open_input(path, text=False) as stream:
            while block := stream.read(PIECE):
                packed = bytearray(2 * len(block))
                packed[0::2] = block        # the low byte of each uint16
                yield packed


def open_input(path, text):
    how = {"mode": "r", "encoding": "utf-8", "newline": ""} if text else {"mode": "rb"}
    try:
        return open(sys.stdin.fileno() if path == "-" else path, **how)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}, expected a text file") from None


def write_shards(prefix, split, source, tokens, shard_tokens):
    """Copies the next tokens of the source into as many shards of nearly equal size as it takes:
    a last shard of a few tokens would be shorter than a training sequence."""
    shards = -(-tokens // shard_tokens)
    for i in range(shards):
        count = tokens * (i + 1) // shards - tokens * i // shards
        path = f"{prefix}_{split}_{i:06d}.bin"
        with open(path, "wb") as file:
            file.write(struct.pack("<256i", MAGIC, VERSION, count, *[0] * 253))
            remaining = 2 * count
            while remaining:
                remaining -= file.write(source.read(min(remaining, 2 * PIECE)))
        print(f"{path}: {count:,} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("inputs", nargs="*", default=["-"], metavar="FILE", help="text; stdin when none is named")
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"], required=True)
    parser.add_argument("--out-prefix", required=True, metavar="PREFIX",
                        help="writes PREFIX_train_000000.bin ... and PREFIX_val_000000.bin ...")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="at most (default 100M)")
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F",
                        help="this share, from the end of the text, goes to PREFIX_val_*.bin (default 0)")
    options = parser.parse_args()

    if not 1 <= options.shard_tokens < 2**31:
        raise Mistake(f"--shard-tokens: found {options.shard_tokens}, expected 1 to {2**31 - 1} "
                      "(the header counts them in an int32)")
    if not 0 <= options.val_fraction < 1:
        raise Mistake(f"--val-fraction: found {options.val_fraction}, expected at least 0 and less than 1")
    # Shards left over from a longer run would match PREFIX_train_*.bin too, and be trained on.
    for split in ("train", "val"):
        for old in glob.glob(f"{glob.escape(options.out_prefix)}_{split}_*.bin"):
            raise Mistake(f"--out-prefix {options.out_prefix}: found {old} from before; "
                          "delete the old shards or choose another prefix")

    folder = os.path.dirname(options.out_prefix) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        spool = tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise Mistake(f"--out-prefix {options.out_prefix}: cannot write to {folder}: {error.strerror}") from None

    # How many tokens there are, and so where validation begins, is known only at the end: all
    # tokens go to one file first and from there to the shards.
    with spool:
        tokenize = gpt2_tokens if options.tokenizer == "gpt2" else byte_tokens
        for packed in tokenize(options.inputs):
            spool.write(packed)
        total = spool.tell() // 2
        val = int(total * options.val_fraction)
        if total - val < 2:
            raise Mistake(f"{' '.join(options.inputs)}: found {total} tokens, expected at least 2 to train on")
        spool.seek(0)
        write_shards(options.out_prefix, "train", spool, total - val, options.shard_tokens)
        write_shards(options.out_prefix, "val", spool, val, options.shard_tokens)


if __name__ == "__main__":
    try:
        main()
    except Mistake as mistake:
        print(f"prepare_text: {mistake}", file=sys.stderr)
        sys.exit(2)

#!/usr/bin/env python3
"""Text to GPT-2 token numbers and back, for `train_gpt sample` with models whose tokens are not bytes:

    python3 scripts/tokens.py encode "Hello, world" | ./train_gpt sample --from DIR --prompt-tokens - \\
        | python3 scripts/tokens.py decode

The scripts that prepare data import their tokenizers and file formats from here; data/README.md describes the formats.
All files are little-endian, as is every machine that this is written for.
"""
import argparse
import array
import collections
import hashlib
import os
import struct
import sys

END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 1 << 16            # tokens are stored as uint16


class Mistake(Exception):
    """The user's (code 2), or one of network and disk (code 1); the message names what was found and expected."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# ---- tokenizers: encode(texts) takes <|endoftext|> as ordinary text; `end` is its token, None for bytes; `identity`
# differs between tokenizers that give different tokens.

class Bytes:
    """A token is a byte of the text."""
    identity, end = "bytes", None

    def encode(self, texts):
        return [text if isinstance(text, bytes) else text.encode() for text in texts]

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


class Tiktoken:
    """GPT-2's tokenizer, from the package tiktoken."""
    identity, end = "gpt2", 50256
    URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise Mistake("--tokenizer gpt2 needs the package tiktoken: pip install tiktoken") from None
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:      # whatever its HTTP library raises
            # tiktoken keeps each file under the SHA-1 of its address.
            by_hand = " and ".join(f"{self.URL}{name} as {hashlib.sha1((self.URL + name).encode()).hexdigest()}"
                                   for name in ("vocab.bpe", "encoder.json"))
            raise Mistake(f"--tokenizer gpt2: tiktoken could not fetch GPT-2's vocabulary ({type(error).__name__}); "
                          f"by hand, put {by_hand} into a folder and name that in TIKTOKEN_CACHE_DIR", 1) from None

    def encode(self, texts):
        return [self.encoding.encode_ordinary(text) for text in texts]

    def decode(self, tokens):
        return self.encoding.decode(tokens)


class Folder:
    """A tokenizer.json as Hugging Face models have it, read by the package tokenizers. prepare_text.py cuts long texts
    where a tokenizer that splits into words as GPT-2's does gives the same tokens."""

    def __init__(self, folder):
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(path):
            raise Mistake(f"--tokenizer: found '{folder}', expected gpt2, bytes, or a folder with tokenizer.json, "
                          "such as scripts/download.sh gpt2 makes")
        try:
            import tokenizers
        except ImportError:
            raise Mistake("--tokenizer DIR needs the package tokenizers: pip install tokenizers") from None
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:      # the package raises plain Exception
            raise Mistake(f"{path}: {error}") from None
        with open(path, "rb") as file: self.identity = "sha256:" + hashlib.sha256(file.read()).hexdigest()
        self.end, size = self.tokenizer.token_to_id(END_OF_TEXT), self.tokenizer.get_vocab_size()
        if self.end is None: raise Mistake(f"{path}: has no token {END_OF_TEXT}, which separates documents")
        if size > MAX_VOCABULARY:
            raise Mistake(f"{path}: found a vocabulary of {size}, expected at most {MAX_VOCABULARY} (uint16)")
        self.tokenizer.encode_special_tokens = True     # <|endoftext|> within a text is text
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def load_tokenizer(name):
    return Bytes() if name == "bytes" else Tiktoken() if name == "gpt2" else Folder(name)


# ---- files

SHARD_MAGIC, EXAMPLES_MAGIC = 20240520, 20240522
HEADER_BYTES = 1024                 # 256 int32: magic, version 1, ...
Example = collections.namedtuple("Example", "label context endings")


def write_file(path, magic, numbers, tokens):
    """Header and uint16 tokens, by way of PATH.part: a file under its own name is never cut off."""
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<256i", magic, 1, *numbers, *[0] * (254 - len(numbers))))
        array.array("H", tokens).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def write_shard(path, tokens):
    write_file(path, SHARD_MAGIC, [len(tokens)], tokens)


def read_shard(path):
    """A shard's tokens; Mistake if it is none or was cut off."""
    with open(path, "rb") as file: content = file.read()
    magic, version, count = struct.unpack("<3i", content[:12]) if len(content) >= HEADER_BYTES else (0, 0, 0)
    if (magic, version) != (SHARD_MAGIC, 1) or len(content) != HEADER_BYTES + 2 * count:
        raise Mistake(f"{path}: {len(content)} bytes with magic {magic}, version {version}, {count} tokens in the "
                      f"header; expected {SHARD_MAGIC}, 1 and 2 bytes a token after {HEADER_BYTES}")
    return array.array("H", content[HEADER_BYTES:])


def write_examples(path, examples):
    """Multiple choice: after the header (number of examples, bytes of the longest) each example is 65535, its bytes,
    its index, label, number of endings, and context and endings, each preceded by its length."""
    stream, longest = array.array("H"), 0
    for index, example in enumerate(examples):
        parts = [example.context, *example.endings]
        words = [0xffff, 0, index, example.label, len(example.endings)]
        for part in parts: words += [len(part), *part]
        words[1] = 2 * len(words)
        if words[1] >= 1 << 16 or max(max(part, default=0) for part in parts) >= 0xffff:
            raise Mistake(f"example {index}: found {words[1]} bytes, expected fewer than 65536, and tokens below 65535")
        longest = max(longest, words[1])
        stream.extend(words)
    write_file(path, EXAMPLES_MAGIC, [len(examples), longest], stream)


# ---- the command line

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("text", nargs="?", help="text or token numbers; standard input when left out")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                        help="gpt2 (default; the package tiktoken, which downloads GPT-2's vocabulary on first use), "
                             "bytes, or a folder with tokenizer.json (the package tokenizers)")
    options = parser.parse_intermixed_args()
    tokenizer = load_tokenizer(options.tokenizer)
    text = sys.stdin.read() if options.text is None else options.text
    if options.direction == "encode":
        numbers = []
        for i, part in enumerate(text.split(END_OF_TEXT) if tokenizer.end is not None else [text]):
            numbers += ([tokenizer.end] if i else []) + list(tokenizer.encode([part])[0])
        print(" ".join(map(str, numbers)))
        return
    try:
        tokens = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        parser.error(f"decode takes token numbers: {error}")
    print(tokenizer.decode(tokens))


def run(main):
    """Calls main(); a Mistake becomes one line and its exit code."""
    try:
        main()
    except Mistake as mistake:
        print(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}: {mistake}", file=sys.stderr)
        sys.exit(mistake.code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run(main)

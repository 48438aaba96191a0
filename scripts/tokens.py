#!/usr/bin/env python3
"""Text to GPT-2 token numbers and back, for `train_gpt sample` with models whose tokens are not bytes:

    python3 scripts/tokens.py encode "Hello, world" | ./train_gpt sample --from DIR --prompt-tokens - \\
        | python3 scripts/tokens.py decode

The scripts that prepare data take their tokenizers and file formats from here; data/README.md describes the formats.
"""
import argparse
import array
import collections
import hashlib
import os
import struct
import sys

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 1 << 16        # tokens are stored as uint16


class Mistake(Exception):
    """The user's, code 2, or of network and disk, code 1; the message names what was found and what was expected."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# ---- tokenizers. Each has encode(texts), which knows no special tokens, decode(tokens), and `end`, the number of
# <|endoftext|>, or None if documents are not set apart. `identity` tells two of them apart.

class Bytes:
    """A token is a byte of the text."""
    identity, end = "bytes", None

    def encode(self, texts):
        return [text.encode() for text in texts]

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


class Tiktoken:
    """GPT-2's, from the package tiktoken."""
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
    """A tokenizer.json as Hugging Face models have it, read by the package tokenizers. Where prepare_text.py may cut
    a long text is known of tokenizers that split into words as GPT-2's does."""

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
            with open(path, "rb") as file:
                self.identity = "sha256:" + hashlib.sha256(file.read()).hexdigest()
        except Exception as error:      # the package raises plain Exception
            raise Mistake(f"{path}: {error}") from None
        self.end = self.tokenizer.token_to_id(END_OF_TEXT)
        if self.end is None:
            raise Mistake(f"{path}: has no token {END_OF_TEXT}, which sets documents apart")
        size = self.tokenizer.get_vocab_size()
        if size > LARGEST_VOCABULARY:
            raise Mistake(f"{path}: found a vocabulary of {size}, expected at most {LARGEST_VOCABULARY} (uint16)")
        self.tokenizer.encode_special_tokens = True     # <|endoftext|> within a text is text
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def load_tokenizer(name):
    return Bytes() if name == "bytes" else Tiktoken() if name == "gpt2" else Folder(name)


# ---- files. All numbers are little-endian.

SHARD_MAGIC, EXAMPLES_MAGIC, VERSION = 20240520, 20240522, 1
HEADER_BYTES = 1024                 # 256 int32
START_OF_EXAMPLE = 0xffff
Example = collections.namedtuple("Example", "label context endings")


def packed(tokens):
    numbers = array.array("H", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(content):
    numbers = array.array("H", content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def header(magic, *numbers):
    return struct.pack("<256i", magic, VERSION, *numbers, *[0] * (254 - len(numbers)))


class NewFile:
    """Written as PATH.part and renamed when it is whole: what has its own name is never cut off."""

    def __init__(self, path):
        self.path = path
        self.file = open(path + ".part", "w+b")

    def finish(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.path + ".part", self.path)


def read_checked(path, magic, what):
    """Header and content of a file."""
    try:
        with open(path, "rb") as file:
            head, content = file.read(HEADER_BYTES), file.read()
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None
    found = struct.unpack("<256i", head) if len(head) == HEADER_BYTES else (0, 0)
    if found[:2] != (magic, VERSION):
        raise Mistake(f"{path}: found magic {found[0]}, version {found[1]}; expected {magic}, {VERSION}: not {what}")
    return found, content


def read_shard(path):
    head, content = read_checked(path, SHARD_MAGIC, "a shard of tokens")
    if len(content) != 2 * head[2]:
        raise Mistake(f"{path}: found {len(content)} bytes of tokens, expected {2 * head[2]}")
    return unpacked(content)


def write_examples(path, examples):
    """Multiple choice: after the header (magic, version, number of examples, bytes of the longest) each example is
    65535, its bytes, its index, label, number of endings, and context and endings, each led by its length."""
    stream, longest = array.array("H"), 0
    for index, example in enumerate(examples):
        parts = [example.context, *example.endings]
        words = [START_OF_EXAMPLE, 0, index, example.label, len(example.endings)]
        for part in parts:
            words += [len(part), *part]
        words[1] = 2 * len(words)
        if words[1] >= 1 << 16 or max(max(part, default=0) for part in parts) >= START_OF_EXAMPLE:
            raise Mistake(f"example {index}: found {words[1]} bytes, expected fewer than 65536, and tokens below 65535")
        longest = max(longest, words[1])
        stream.extend(words)
    file = NewFile(path)
    file.file.write(header(EXAMPLES_MAGIC, len(examples), longest))
    file.file.write(packed(stream))
    file.finish()


def read_examples(path):
    head, content = read_checked(path, EXAMPLES_MAGIC, "a file of examples")
    damaged = Mistake(f"{path}: its examples do not add up: cut off or damaged")
    if len(content) % 2:
        raise damaged
    words, examples, at = unpacked(content), [], 0
    for index in range(head[2]):
        start = at
        if words[at:at + 1] != array.array("H", [START_OF_EXAMPLE]) or len(words) < at + 5 or words[at + 2] != index:
            raise damaged
        size, _, label, endings = words[at + 1:at + 5]
        at += 5
        parts = []
        for _ in range(1 + endings):
            length = words[at] if at < len(words) else len(words)
            parts.append(list(words[at + 1:at + 1 + length]))
            at += 1 + length
        if at > len(words) or 2 * (at - start) != size or label >= endings:
            raise damaged
        examples.append(Example(label, parts[0], parts[1:]))
    if at != len(words):
        raise damaged
    return examples


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
    """main(), with the user's mistakes as one line and an exit code."""
    try:
        main()
    except Mistake as mistake:
        print(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}: {mistake}", file=sys.stderr)
        sys.exit(mistake.code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run(main)

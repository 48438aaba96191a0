#!/usr/bin/env python3
"""Compares gpt/tokenizer.h with tokenizers and tiktoken, and writes the files that its tests read.

    make build/test/text/test_tokenizer
    dev/tests/check_tokenizer.py compare --megabytes 10
    dev/tests/check_tokenizer.py sample

compare trains byte-level BPE vocabularies with `tokenizers` on this repository's files and on fuzzed text, encodes real
and fuzzed text in many scripts with each, and counts the texts on which the program's tokens differ from those of
tokenizers and of a tiktoken.Encoding with the same ranks. Both refuse broken UTF-8: there the reference is the pattern
on Python's surrogateescape, and tiktoken's merges in each word. Needs tokenizers, tiktoken and regex. Characters unknown
to Python's own tables are left out, as libraries differ in their version of Unicode.

sample writes data/reference/tokenizer: a vocabulary of 500 merges of data/shakespeare.txt, as tokenizer.json and as
vocab.json with merges.txt; cases.json: texts (in hexadecimal) and their tokens.

Exit status: 0 all equal, 1 something differs, 2 bad usage.
"""
import argparse
import glob
import json
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"
ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "reference" / "tokenizer"
SAMPLE_MERGES = 500

SPACES = [" ", " ", " ", "\n", "\n\n", "\t", "  ", "   ", "\r\n", "\u00a0", "\u3000", "\u2028", "\u0085", "\u180e",
          "\v", "\x1c", "\u200b", "\ufeff", "\u202f"]
SCRAPS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "’s", "'", "''", "don't", " I'll", "e\u0301", "1st", "½",
          "²", "Ⅷ", "٣", "👩\u200d👩\u200d👧", "🇫🇷", "❤\ufe0f", "\u0000", "\u007f", "\x1b[2J", "\uffff", "\ufffd", "\U0010ffff",
          "a" * 40, "-" * 40, " " * 40, "\n" * 20, "漢" * 30, "0123456789" * 3, "...", "http://a.b/c?d=e&f", "_x_", "ß"]
BROKEN = [b"\x80", b"\xbf", b"\xc0\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
          b"\xf8\x88", b"\xff", b"\xfe\xff", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xc3(", b"\xe2\x28\xa1"]


def known(character):
    return unicodedata.category(character) != "Cn" or ord(character) & 0xFFFE == 0xFFFE


def fuzz_text(draw, pieces):
    """Words of a script or two, white space of every kind, and what is known to be difficult."""
    out = []
    for _ in range(pieces):
        kind = draw.random()
        if kind < 0.55:     # a word of one script: characters of a block of 128, in the planes that have scripts
            first = draw.randrange(0, 0x20000, 0x80)
            codes = (first + draw.randrange(0x80) for _ in range(draw.randint(1, 9)))
            out.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000 and known(chr(code))))
        elif kind < 0.75:
            out.append("".join(draw.choice("etaoinshrdlucmfw'") for _ in range(draw.randint(1, 12))))
        elif kind < 0.9:
            out.append(draw.choice(SCRAPS))
        else:
            code = draw.randrange(0x110000)
            if not 0xD800 <= code < 0xE000 and known(chr(code)):
                out.append(chr(code))
        if draw.random() < 0.6:
            out.append(draw.choice(SPACES))
    return "".join(out)


def fuzz_bytes(draw, pieces):
    """Text with broken UTF-8 in it."""
    while True:
        out = bytearray()
        for _ in range(pieces):
            out += fuzz_text(draw, draw.randint(0, 3)).encode()
            out += draw.choice(BROKEN) if draw.random() < 0.6 else draw.randbytes(draw.randint(1, 6))
            del out[len(out) - draw.randint(0, 1):]     # often within a character
        # Random bytes may be a character that is not known.
        if all(map(known, out.decode("utf-8", "surrogateescape"))):
            return bytes(out)


def real_texts():
    paths = [p for pattern in ("*.md", "*.cu", "Makefile", "dev/**/*.*", "scripts/*", "data/shakespeare.txt")
             for p in glob.glob(str(ROOT / pattern), recursive=True)]
    for path in sorted(p for p in paths if Path(p).is_file()):
        try:
            yield Path(path).read_bytes().decode()
        except UnicodeDecodeError:
            pass


def train(texts, vocab):
    """A tokenizers.Tokenizer: all bytes first, then what the merges make, then <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def save(tokenizer, folder):
    """tokenizer.json, vocab.json and merges.txt, the latter with <|endoftext|> in the vocabulary as GPT-2 has it."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.loads(tokenizer.to_str())
    vocab = {**whole["model"]["vocab"], END_OF_TEXT: whole["added_tokens"][0]["id"]}
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n")
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False, separators=(",", ":")) + "\n")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in whole["model"]["merges"]))
    return whole


def byte_alphabet():
    """character of the files -> byte"""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in prints]
    return {chr(b): b for b in prints} | {chr(0x100 + i): b for i, b in enumerate(others)}


def tiktoken_of(whole):
    """The same vocabulary as a tiktoken.Encoding: its ranks are the ids, which stand in the order of the merges."""
    import tiktoken
    byte_of = byte_alphabet()
    ranks = {bytes(byte_of[c] for c in token): id for token, id in whole["model"]["vocab"].items()}
    special = {END_OF_TEXT: whole["added_tokens"][0]["id"]}
    return tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def reference_of_bytes(encoding, text):
    """Tokens of bytes that may be broken: the words by the pattern, each broken byte a lone surrogate in it."""
    import regex
    words = regex.findall(PATTERN, text.decode("utf-8", "surrogateescape"))
    tokens = []
    for word in words:
        tokens += encoding._encode_single_piece(word.encode("utf-8", "surrogateescape"))
    return tokens


def run_program(program, folder, texts):
    """The program's tokens of each text. It also decodes them, and fails where the bytes do not come back."""
    packed = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    done = subprocess.run([program, "--encode", folder], input=packed, stdout=subprocess.PIPE, check=True)
    out, at = [], 0
    for _ in texts:
        count = struct.unpack_from("<I", done.stdout, at)[0]
        out.append(list(struct.unpack_from(f"<{count}i", done.stdout, at + 4)))
        at += 4 + 4 * count
    return out


def differing(what, texts, ours, theirs):
    """Prints on how many texts the tokens differ; returns that number."""
    wrong = [i for i in range(len(texts)) if list(theirs[i]) != ours[i]]
    print(f"{'FAILED' if wrong else 'ok    '}  {what}: {len(texts):,} texts, {sum(map(len, texts)):,} bytes, "
          f"{sum(map(len, ours)):,} tokens, {len(wrong)} texts differ", flush=True)
    if wrong:
        i = min(wrong, key=lambda i: len(texts[i]))
        print(f"        such as {texts[i]!r}: {ours[i][:20]}, expected {list(theirs[i])[:20]}")
    return len(wrong)


def compare(options):
    draw = random.Random(options.seed)
    real = list(real_texts())
    fuzzed, size = [], 0
    while size < options.megabytes * 1e6:
        fuzzed.append(fuzz_text(draw, draw.choice([3, 30, 300])))
        size += len(fuzzed[-1].encode())
    valid = real + fuzzed + [END_OF_TEXT.join(real[:3]), END_OF_TEXT * 3, f"a{END_OF_TEXT} b <|endoftext|", ""]
    broken = [fuzz_bytes(draw, draw.choice([1, 10, 100])) for _ in range(options.broken)]
    encoded = [t.encode() for t in valid]
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for vocab in options.vocab:
            tokenizer = train(real + fuzzed[:len(fuzzed) // 4], vocab)
            whole = save(tokenizer, Path(folder))
            encoding = tiktoken_of(whole)
            name = f"vocabulary of {tokenizer.get_vocab_size():,}"
            ours = run_program(options.program, folder, encoded)
            different += differing(f"{name}, tokenizers", encoded, ours, [tokenizer.encode(t).ids for t in valid])
            different += differing(f"{name}, tiktoken", encoded, ours,
                                   [encoding.encode(t, allowed_special="all") for t in valid])
            different += differing(f"{name}, broken UTF-8", broken, run_program(options.program, folder, broken),
                                   [reference_of_bytes(encoding, t) for t in broken])
            (Path(folder) / "tokenizer.json").unlink()
            different += differing(f"{name}, vocab.json and merges.txt", encoded,
                                   run_program(options.program, folder, encoded), ours)
    return 1 if different else 0


def sample(options):
    draw = random.Random(options.seed)
    tokenizer = train([(ROOT / "data" / "shakespeare.txt").read_text()], 256 + SAMPLE_MERGES)
    encoding = tiktoken_of(save(tokenizer, options.out))
    texts = ["", "To be, or not to be", "First Citizen:\nWe're  not\t resolved,\r\n\n rather to die ",
             f"a{END_OF_TEXT} b", "naïve café — 12 ½ Ⅷ ٣٤", "Привет, мир! 你好，世界。 שלום العالم नमस्ते", "👩\u200d👩\u200d👧 🇫🇷 ❤\ufe0f",
             "aaaaaaaaaaaaaaaaaaaaaaa  ", "\u180e\u0085\u00a0\u3000x\u2028\u200b \x1c", "'s's'S ’s 'll'LL", *SCRAPS,
             *(fuzz_text(draw, 12) for _ in range(60))]
    cases = [{"hex": t.encode().hex(), "tokens": tokenizer.encode(t).ids} for t in texts]
    for _ in range(40):
        broken = fuzz_bytes(draw, 4)
        cases.append({"hex": broken.hex(), "tokens": reference_of_bytes(encoding, broken)})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (options.out / "cases.json").write_text(f"[\n{lines}\n]\n")
    print(f"{options.out}: {tokenizer.get_vocab_size()} tokens, {len(cases)} cases")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["compare", "sample"])
    parser.add_argument("--program", default=str(ROOT / "build/test/text/test_tokenizer"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of fuzzed text (default 1)")
    parser.add_argument("--megabytes", type=float, default=10, help="of compare: fuzzed text (default 10)")
    parser.add_argument("--broken", type=int, default=20000, help="of compare: texts with broken UTF-8 (default 20000)")
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 4000, 20000], help="of compare: their sizes")
    parser.add_argument("--out", type=Path, default=SAMPLE, help="of sample (default data/reference/tokenizer)")
    options = parser.parse_args()
    return compare(options) if options.mode == "compare" else sample(options)


if __name__ == "__main__":
    sys.exit(main())

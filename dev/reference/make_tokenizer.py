#!/usr/bin/env python3
"""Writes data/reference/tokenizer: tokenizer.json, a vocabulary with 500 merges learned from data/shakespeare.txt, and
cases.json, texts in hexadecimal with the tokens that the package tokenizers computes. That package rejects invalid
UTF-8. For invalid texts, GPT-2's pattern splits the text decoded with Python's surrogateescape, and tiktoken merges
each word. Needs tokenizers, tiktoken and regex.

    python3 dev/reference/make_tokenizer.py
    python3 dev/reference/make_tokenizer.py --texts 20000 --merges 4000 --seed 2 --out DIR     # many more texts
    build/test/text/test_tokenizer --reference DIR                                             # compares the program

Characters unknown to Python's Unicode tables are omitted, because libraries have different versions of Unicode.
"""
import argparse
import json
import random
import unicodedata
from pathlib import Path

PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"
ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "reference" / "tokenizer"

SPACES = [" ", " ", " ", "\n", "\n\n", "\t", "  ", "   ", "\r\n", "\u00a0", "\u3000", "\u2028", "\u0085", "\u180e",
          "\v", "\x1c", "\u200b", "\ufeff", "\u202f"]
SCRAPS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "’s", "'", "''", "don't", " I'll", "e\u0301", "1st", "½",
          "²", "Ⅷ", "٣", "👩\u200d👩\u200d👧", "🇫🇷", "❤\ufe0f", "\u0000", "\u007f", "\x1b[2J", "\uffff", "\ufffd",
          "\U0010ffff", "a" * 40, "-" * 40, " " * 40, "\n" * 20, "漢" * 30, "0123456789" * 3, "...",
          "http://a.b/c?d=e&f", "_x_", "ß"]
BROKEN = [b"\x80", b"\xbf", b"\xc0\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
          b"\xf8\x88", b"\xff", b"\xfe\xff", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xc3(", b"\xe2\x28\xa1"]


def known(character):
    return unicodedata.category(character) != "Cn" or ord(character) & 0xFFFE == 0xFFFE


def fuzz_text(draw, pieces):
    """Returns random words of several scripts, white space of every kind, and known difficult strings."""
    out = []
    for _ in range(pieces):
        kind = draw.random()
        if kind < 0.55:     # a word of one script: characters from a block of 128, in the first two planes
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
    """Returns random text that contains invalid UTF-8."""
    while True:
        out = bytearray()
        for _ in range(pieces):
            out += fuzz_text(draw, draw.randint(0, 3)).encode()
            out += draw.choice(BROKEN) if draw.random() < 0.6 else draw.randbytes(draw.randint(1, 6))
            del out[len(out) - draw.randint(0, 1):]     # often splits a character
        # Random bytes may form an unknown character.
        if all(map(known, out.decode("utf-8", "surrogateescape"))):
            return bytes(out)


def train(texts, vocab):
    """Returns a tokenizers.Tokenizer. Token ids: first all bytes, then the merges' results, then <|endoftext|>."""
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


def byte_alphabet():
    """Returns {character in tokenizer.json: byte}."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in prints]
    return {chr(b): b for b in prints} | {chr(0x100 + i): b for i, b in enumerate(others)}


def tiktoken_of(whole):
    """Returns the same vocabulary as a tiktoken.Encoding. Its ranks are the ids, which have the order of the merges."""
    import tiktoken
    byte_of = byte_alphabet()
    ranks = {bytes(byte_of[c] for c in token): id for token, id in whole["model"]["vocab"].items()}
    special = {END_OF_TEXT: whole["added_tokens"][0]["id"]}
    return tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def reference_of_bytes(encoding, text):
    """Returns the tokens of bytes that may be invalid UTF-8: the pattern sees each invalid byte as a lone surrogate."""
    import regex
    words = regex.findall(PATTERN, text.decode("utf-8", "surrogateescape"))
    tokens = []
    for word in words:
        tokens += encoding._encode_single_piece(word.encode("utf-8", "surrogateescape"))
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the random texts (default 1)")
    parser.add_argument("--merges", type=int, default=500, help="default 500")
    parser.add_argument("--texts", type=int, default=60,
                        help="random texts (default 60), plus 2/3 as many with invalid UTF-8")
    parser.add_argument("--out", type=Path, default=SAMPLE, help="default data/reference/tokenizer")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    tokenizer = train([(ROOT / "data" / "shakespeare.txt").read_text()], 256 + options.merges)
    whole = json.loads(tokenizer.to_str())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n")
    encoding = tiktoken_of(whole)
    texts = ["", "To be, or not to be", "First Citizen:\nWe're  not\t resolved,\r\n\n rather to die ",
             f"a{END_OF_TEXT} b", "naïve café — 12 ½ Ⅷ ٣٤", "Привет, мир! 你好，世界。 שלום العالم नमस्ते",
             "👩\u200d👩\u200d👧 🇫🇷 ❤\ufe0f", "aaaaaaaaaaaaaaaaaaaaaaa  ", "\u180e\u0085\u00a0\u3000x\u2028\u200b \x1c",
             "'s's'S ’s 'll'LL", *SCRAPS,
             *(fuzz_text(draw, 12) for _ in range(options.texts))]
    cases = [{"hex": t.encode().hex(), "tokens": tokenizer.encode(t).ids} for t in texts]
    for _ in range(options.texts * 2 // 3):
        broken = fuzz_bytes(draw, 4)
        cases.append({"hex": broken.hex(), "tokens": reference_of_bytes(encoding, broken)})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (options.out / "cases.json").write_text(f"[\n{lines}\n]\n")
    print(f"{options.out}: {tokenizer.get_vocab_size()} tokens, {len(cases)} cases")


if __name__ == "__main__":
    main()

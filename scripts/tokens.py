#!/usr/bin/env python3
"""Converts text to GPT-2 token ids and back, for `train_gpt sample` with models whose tokens are not bytes:

    python3 scripts/tokens.py encode "Hello, world" | ./train_gpt sample --from DIR --prompt-tokens - \\
        | python3 scripts/tokens.py decode

The scripts that prepare data import the tokenizer and the file formats from this module; data/README.md describes the
formats. All files are little-endian, like every machine that this program supports.
"""
import argparse
import array
import collections
import importlib
import json
import os
import random
import struct
import sys

END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 1 << 16            # tokens are stored as uint16
SPECIAL_TOKENS = (*(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
                  "additional_special_tokens", "extra_special_tokens")      # new ones get ids in this order
SHARD_MAGIC, EXAMPLES_MAGIC = 20240520, 20240522
NPY, PARQUET = "a .npy file, which --tokenizer nanogpt reads", "a parquet file, whose name must end with .parquet"
# What a file is that begins with these bytes, and what to do with it; llm.c's files begin with a number as int32.
KINDS = {b"version https://git-lfs": "a git-lfs pointer; `git lfs pull` downloads the file",
         b"\x93NUMPY": NPY, b"PAR1\x15": PARQUET, b"PK\3\4": "a zip archive, such as a .pt or .npz file",
         b"\x80\2\x8a\n": "a .pt file", b"\x80\4\x95": "a pickle", b"\x80\5\x95": "a pickle",
         b"\x1f\x8b\x08": "a gzip archive", b"\x28\xb5\x2f\xfd": "a zstd archive", b"\xfd7zXZ\0": "an xz archive",
         b"BZh91AY&SY": "a bzip2 archive", **{magic.to_bytes(4, "little"): kind for magic, kind in {
             20240326: "llm.c's model weights", 20240327: "llm.c's debug state", 20240328: "llm.c's tokenizer",
             SHARD_MAGIC: "a shard of tokens, which train_gpt reads",
             EXAMPLES_MAGIC: "questions for train_gpt --hellaswag", 20240527: "llm.c's optimizer state",
             20240801: "llm.c's Llama 3 tokens (uint32)", 20240803: "llm.c's Llama 3 weights"}.items()}}
Example = collections.namedtuple("Example", "label context endings")


def fail(message, code=2):
    """Prints one line and exits. code: 2 for bad usage or bad input, 1 for network and disk errors."""
    print(f"{os.path.basename(sys.argv[0]).removesuffix('.py')}: {message}", file=sys.stderr)
    sys.exit(code)


def load_package(name, user):
    """Returns a module. user: the file or flag that needs its package, which may be missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fail(f"{user} needs the package {name.split('.')[0]} ({error}): pip install -r scripts/requirements.txt")


def kind_of(path):
    """Returns what a file is according to its first bytes, or None for text and for bytes without a known format."""
    with open(path, "rb") as file:
        start = file.read(64)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < os.path.getsize(path):
        return "a safetensors file"
    return next((kind for prefix, kind in KINDS.items() if start.startswith(prefix)), None)


def read_text(path):
    if kind := kind_of(path):
        fail(f"{path}: expected text, found {kind}")
    with open(path, encoding="utf-8") as file:
        return file.read()


def read_json(path):
    """Returns the object in a file, {} if the file does not exist."""
    try:
        return dict(json.loads(read_text(path))) if os.path.exists(path) else {}
    except (ValueError, TypeError) as error:
        fail(f"{path}: expected a JSON object: {error}")


def join_files(folder):
    """Returns the content of vocab.json and merges.txt as one tokenizer.json."""
    lines = [line.rstrip("\r") for line in read_text(f"{folder}/merges.txt").split("\n")]
    merges = [line for line in lines if line and not line.startswith("#version")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "model": {"type": "BPE", "vocab": read_json(f"{folder}/vocab.json"), "merges": merges},
            "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level}


def texts_of(token):
    """Returns the text of a token, which may be an object with "content", or of each in a list or object of tokens."""
    if isinstance(token, dict):
        return [token["content"]] if "content" in token else texts_of([*token.values()])
    return sum(map(texts_of, token), []) if isinstance(token, list) else [token] * bool(token)


def declare_tokens(tokenizer, folder, config):
    """Adds the tokens that the other files of a folder declare to a tokenizer, as train_gpt does. An
    added_tokens_decoder in tokenizer_config.json replaces special_tokens_map.json and added_tokens.json."""
    from tokenizers import AddedToken
    if "added_tokens_decoder" in config:
        named, entries = config, {int(id): entry for id, entry in config["added_tokens_decoder"].items()}
    else:
        named = {**config, **read_json(f"{folder}/special_tokens_map.json")}
        entries = {id: {"content": text} for text, id in read_json(f"{folder}/added_tokens.json").items()}
    special = texts_of([named.get(name) for name in SPECIAL_TOKENS])
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        special.append(END_OF_TEXT)
    for id, entry in sorted(entries.items()):
        options = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        text, is_special = entry["content"], entry.get("special", False) or entry["content"] in special
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([AddedToken(text, **options)])
        if tokenizer.token_to_id(text) != id:
            fail(f"--tokenizer {folder}: the added token '{text}' has the id {id}, expected "
                 f"{tokenizer.token_to_id(text)}")
    tokenizer.add_special_tokens(special)


def load_tokenizer(name):
    """Returns the tokenizers.Tokenizer of a folder with tokenizer.json, or with vocab.json and merges.txt. The name
    "gpt2" stands for GPT-2's tokenizer, which is downloaded on first use."""
    tokenizers = load_package("tokenizers", f"--tokenizer {name}")
    path = next(filter(os.path.exists, (f"{name}/tokenizer.json", f"{name}/vocab.json")), None)
    if name == "gpt2" and not path:
        hub = load_package("huggingface_hub", "--tokenizer gpt2")
        try:
            path = hub.hf_hub_download("openai-community/gpt2", "tokenizer.json")
        except Exception as error:      # which classes depends on the HTTP library
            fail(f"--tokenizer gpt2: could not download tokenizer.json from huggingface.co/openai-community/gpt2 "
                 f"({type(error).__name__}); download it to models/gpt2 by hand and use --tokenizer models/gpt2", 1)
    if not path:
        fail(f"--tokenizer {name}: expected gpt2 or a folder with tokenizer.json, or with vocab.json and merges.txt, "
             "found neither; scripts/download.sh gpt2 downloads one")
    config = read_json(f"{name}/tokenizer_config.json")
    try:
        content = join_files(name) if path.endswith("vocab.json") else read_json(path)
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        declare_tokens(tokenizer, name, config)
    except Exception as error:          # the package raises plain Exception
        fail(f"--tokenizer {name}: {type(error).__name__}: {error}")
    if config.get("add_prefix_space") or '"add_prefix_space": true' in json.dumps(content.get("pre_tokenizer")):
        fail(f"--tokenizer {name}: add_prefix_space is true, expected false: texts are tokenized in pieces, each of "
             "which would get a space")
    if tokenizer.get_vocab_size() > MAX_VOCABULARY:
        fail(f"{path}: found a vocabulary of {tokenizer.get_vocab_size()}, expected at most {MAX_VOCABULARY} (uint16)")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer, texts):
    """Returns the list of token ids of each text. The package tokenizers uses all cores."""
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


# ---- files

def write_file(path, magic, numbers, tokens):
    """Writes a header (256 int32: magic, version 1, numbers, zeros) and uint16 tokens to PATH.part, then renames it to
    PATH, so that a file named PATH is always complete."""
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<256i", magic, 1, *numbers, *[0] * (254 - len(numbers))))
        array.array("H", tokens).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def write_shard(path, tokens):
    write_file(path, SHARD_MAGIC, [len(tokens)], tokens)


def write_random_shard(path, vocab, count):
    """Writes random tokens with frequencies proportional to 1/rank, as in language: the time of the embedding's
    backward pass depends on how often tokens repeat."""
    weights = [1 / (rank + 2.7) for rank in range(vocab)]
    write_shard(path, random.Random(1).choices(range(vocab), weights, k=count))


def write_examples(path, examples):
    """Writes multiple-choice questions. The header holds the number of examples and the size of the longest in bytes.
    An example is 65535, its size in bytes, its index, the label and the number of endings, then the context and each
    ending, both preceded by their number of tokens."""
    stream, longest = array.array("H"), 0
    for index, example in enumerate(examples):
        words = [0xffff, 0, index, example.label, len(example.endings)]
        for part in [example.context, *example.endings]:
            words += [len(part), *part]
        words[1] = 2 * len(words)
        if words[1] >= 1 << 16 or max(words[2:]) >= 0xffff:
            fail(f"example {index}: expected fewer than 65536 bytes and tokens below 65535, found {words[1]} bytes and "
                 f"token {max(words[2:])}")
        longest = max(longest, words[1])
        stream.extend(words)
    write_file(path, EXAMPLES_MAGIC, [len(examples), longest], stream)


# ---- command line

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("text", nargs="?", help="text or token ids (default: standard input)")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                        help="gpt2 (default; downloaded on first use), or a folder with a tokenizer")
    options = parser.parse_intermixed_args()
    tokenizer = load_tokenizer(options.tokenizer)
    text = sys.stdin.read() if options.text is None else options.text
    if options.direction == "encode":
        print(*encode(tokenizer, [text])[0])
        return
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        fail(f"decode: {error}; expected token ids")
    print(tokenizer.decode(ids, skip_special_tokens=False))


if __name__ == "__main__":
    main()

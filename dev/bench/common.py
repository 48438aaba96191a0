"""What the benchmarks share: errors, where PyTorch is, token files, and weights as llm.c reads them."""
import array
import os
import random
import struct
import subprocess
import sys

# Little-endian machines only, as everything that is measured here.
assert sys.byteorder == "little"


class Mistake(Exception):
    """The user's; the message names the flag, what was found and what was expected."""


class Failed(Exception):
    """A program that was started did not do its work."""


def find_torch(pythons):
    """The first of these pythons that has PyTorch, and which version."""
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0:
            return python, done.stdout.strip()
    return None, None


# ---- Tokens, in llm.c's format: 256 int32 (magic, version, count), then uint16

SHARD_HEADER = struct.Struct("<256i")


def write_shard(path, tokens):
    """tokens: an array of uint16."""
    with open(path, "wb") as file:
        file.write(SHARD_HEADER.pack(20240520, 1, len(tokens), *[0] * 253))
        tokens.tofile(file)


def read_shard_header(path):
    """(magic, version, count)."""
    with open(path, "rb") as file:
        return SHARD_HEADER.unpack(file.read(SHARD_HEADER.size))[:3]


# ---- Weights as llm.c's programs read them: 256 int32, then each parameter for all layers

PADDED_VOCAB = 50304
MILLION = 1_000_003         # a prime: repeated, it starts at another place in each row
VERSIONS = {"fp32": 3, "bf16": 5}


def top_halves(floats):
    """The upper 16 bits of each float: itself in BF16, rounded towards zero."""
    source, halves = memoryview(floats).cast("B"), bytearray(2 * len(floats))
    halves[0::2], halves[1::2] = source[2::4], source[3::4]
    return array.array("H", bytes(halves))


def llmc_header(file, layers, heads, channels, context, vocab, precision):
    header = [20240326, VERSIONS[precision], context, vocab, layers, heads, channels, PADDED_VOCAB]
    file.write(SHARD_HEADER.pack(*header, *[0] * (256 - len(header))))


def write_random_llmc_weights(path, layers, heads, channels, context, vocab, precision):
    """The time a step takes does not depend on weights: random ones will do."""
    L, C = layers, channels
    generator = random.Random(1)
    noise = array.array("f", [generator.gauss(0, 0.02) for _ in range(MILLION)])
    ones, zeros = array.array("f", [1.0]) * MILLION, array.array("f", [0.0]) * MILLION
    if precision == "bf16":
        noise, ones, zeros = top_halves(noise), top_halves(ones), top_halves(zeros)
    tensors = [(PADDED_VOCAB * C, noise), (context * C, noise),     # token and position embeddings
               (L * C, ones), (L * C, zeros),                       # LayerNorm before attention
               (L * 3 * C * C, noise), (L * 3 * C, zeros),          # queries, keys, values
               (L * C * C, noise), (L * C, zeros),                  # attention's projection
               (L * C, ones), (L * C, zeros),                       # LayerNorm before the MLP
               (L * 4 * C * C, noise), (L * 4 * C, zeros),          # MLP, up
               (L * 4 * C * C, noise), (L * C, zeros),              # MLP, down
               (C, ones), (C, zeros)]                               # LayerNorm before the head
    with open(path, "wb") as file:
        llmc_header(file, layers, heads, channels, context, vocab, precision)
        for count, values in tensors:
            for start in range(0, count, MILLION):
                values[:min(MILLION, count - start)].tofile(file)


def executable(path):
    return os.access(path, os.X_OK) and not os.path.isdir(path)

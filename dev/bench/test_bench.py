#!/usr/bin/env python3
"""Tests of gpu.py: what it reads from text and traces, its arithmetic, and that no trouble loses a report; of cpu.py:
which peer it takes, the floor, and that a peer that fails is named.

    python3 dev/bench/test_bench.py --ours ./train_gpt

--ours is a CPU build. PyTorch and llm.c are played by scripts that print what those programs print.
"""
import argparse
import array
import contextlib
import io
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
import cpu
import gpu_measure as measure
import gpu_report as report
from common import Failed, read_shard_header, top_halves, write_shard
from gpu_model import BANDWIDTH_BOUND, Shape, all_matmuls, attention_flops, floor, kernel_bytes, matmul_launches

HERE = os.path.dirname(os.path.abspath(__file__))
passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail else ""), flush=True)


def near(a, b, tolerance=1e-9):
    return a is not None and abs(a - b) <= tolerance * max(1, abs(b))


# ---- llm.c. The lines are as its train_gpt2.cu prints them.

LLMC_OUTPUT = """| device                | NVIDIA H100 80GB HBM3                              |
| num_parameters        | 124475904                                          |
allocating 237 MiB for parameter gradients
device memory usage: 40409 MiB / 81075 MiB
val loss 11.009463
step    1/4 | loss 11.009463 (+nanz)| norm 15.3632 (+nanz)| lr 6.00e-06 | 1342.50 ms | 33.1% bf16 MFU | 390530 tok/s
step    2/4 | loss 10.929188 (-1.25z)| norm 13.0471 (+0.31z)| lr 1.20e-05 | 1120.25 ms | 41.0% bf16 MFU | 468010 tok/s
step    3/4 | loss 10.612345 (+0.00z)| norm 9.1000 (+0.10z)| lr 1.80e-05 | 1119.75 ms | 41.0% bf16 MFU | 468100 tok/s
                  compute 99.0% | memory: 40.1% | fan:  0% | 1980 MHz / 1980 MHz | 690 W / 700 W | 60C / 87C | no cap
"""


def test_llmc_lines():
    got = measure.read_llmc(LLMC_OUTPUT)
    claim([step["ms"] for step in got["steps"]] == [1342.50, 1120.25, 1119.75], "llm.c: the time of each step is read")
    claim([step["loss"] for step in got["steps"]] == [11.009463, 10.929188, 10.612345],
          "llm.c: and its loss, also where a z-score is not a number")
    claim(got["used_bytes"] == 40409 * 2**20 and not got["out_of_memory"], "llm.c: the device's memory in use")
    full = measure.read_llmc("[CUDA ERROR] at file train_gpt2.cu:265:\nout of memory\n")
    managed = measure.read_llmc(
        "WARNING: Fell back to cudaMallocManaged when initializing m,v,master_weights on 1 GPUs\n" + LLMC_OUTPUT)
    claim(full["out_of_memory"] and managed["out_of_memory"],
          "llm.c: it does not fit when it says so, nor when its state went to the host")
    claim(full["steps"] == [] and full["last_line"] == "out of memory", "llm.c: the last line of a run without steps")


def test_llmc_order():
    generator = measure.mersenne_twister(137)
    claim([generator.getrandbits(32) for _ in range(3)] == [4053805790, 2173880614, 380293709],
          "the Mersenne twister is seeded as llm.c's")
    # As the C++ library's mt19937 shuffles, from seed 42.
    claim(measure.llmc_order(12) == [1, 0, 9, 10, 5, 8, 3, 2, 4, 11, 7, 6], "llm.c's order of 12 batches is known")
    order = measure.llmc_order(9)
    batch, count = 4, 9
    tokens = measure.curve_tokens(array.array("H", range(100, 100 + batch * count + 1)), batch)
    laid_out = measure.shuffled_for_llmc(tokens, batch)
    # As its loader reads: batch number order[i], and one token more for the last target.
    same = all(laid_out[at * batch:at * batch + batch + 1] == tokens[i * batch:i * batch + batch + 1]
               for i, at in enumerate(order))
    claim(same, "llm.c's shuffle of what was laid out for it gives our batches, targets and all")


def write_safetensors(path, tensors):
    header, content = {}, b""
    for name, (shape, values) in tensors.items():
        data = array.array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + content)


def test_llmc_weights(scratch):
    C, V, T, L = 4, 7, 6, 2
    shapes = {"wte.weight": [V, C], "wpe.weight": [T, C], "ln_f.weight": [C], "ln_f.bias": [C]}
    block = {"ln_1.weight": [C], "ln_1.bias": [C], "attn.c_attn.weight": [C, 3 * C], "attn.c_attn.bias": [3 * C],
             "attn.c_proj.weight": [C, C], "attn.c_proj.bias": [C], "ln_2.weight": [C], "ln_2.bias": [C],
             "mlp.c_fc.weight": [C, 4 * C], "mlp.c_fc.bias": [4 * C], "mlp.c_proj.weight": [4 * C, C],
             "mlp.c_proj.bias": [C]}
    for layer in range(L):
        shapes.update({f"h.{layer}.{name}": shape for name, shape in block.items()})
    tensors, value = {}, 0
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        # Neighbours differ in the seven bits that BF16 keeps, and each has something more, to be cut.
        tensors[name] = (shape, [1 + (value + i) * 37 % 128 / 128 + 1e-3 for i in range(count)])
        value += count
    write_safetensors(os.path.join(scratch, "model.safetensors"), tensors)
    folder = measure.Folder(scratch)
    folder.truncate()
    fits = all(struct.pack("<f", x)[:2] == b"\0\0" for name in shapes for x in folder.values(name))
    close = all(0 <= y - x < y / 128 for name in shapes for x, y in zip(folder.values(name), tensors[name][1]))
    claim(fits and close, "weights are cut to what BF16 holds, and by less than its last bit")
    path = os.path.join(scratch, "llmc.bin")
    folder.write_for_llmc(path, Shape(L, 1, C, T, V, 1, T))
    with open(path, "rb") as file:
        header, words = struct.unpack("<256i", file.read(1024)), array.array("H", file.read())
    claim(header[:8] == (20240326, 5, T, V, L, 1, C, 50304), "llm.c's weights: the header says BF16, sizes and padding")
    claim(len(words) == 50304 * C + sum(len(v) for n, (_, v) in tensors.items() if n != "wte.weight"),
          "llm.c's weights: as many as it reads")
    at = 50304 * C + T * C + 2 * L * C      # where c_attn begins, after both of LayerNorm's
    matrix = top_halves(folder.values("h.1.attn.c_attn.weight"))
    there = words[at + 3 * C * C:at + 2 * 3 * C * C]    # (out, in); (in, out) here
    claim(all(there[column * C + row] == matrix[row * 3 * C + column] for row in range(C) for column in range(3 * C)),
          "llm.c's weights: matrices are transposed, layer after layer")


# ---- Our own output

def test_our_output():
    gpu = "done  5 steps in 0:12, 1.2M tok/s; memory: 31.72 GB allocated as planned, 33.10 GB in use on the device\n"
    cpu = "done  5 steps in 0:12, 36.5k tok/s; memory: 55.2 MB allocated as planned, 86.2 MB resident at most\n"
    claim(measure.closing_memory(gpu) == 33.10e9 and measure.closing_memory(cpu) == 86.2e6,
          "the closing line's memory is read, on a GPU and on a CPU")
    claim(measure.closing_memory("killed") is None, "a run that was ended has none")
    run, steps = measure.read_log(
        '{"run":{"device":"x"}}\n{"step":1,"loss":4.5,"ms":10.0}\n{"step":1,"val_loss":3}\n{"step":2,"lo')
    claim(run == {"device": "x"} and [s["ms"] for s in steps] == [10.0], "log.jsonl is read up to a line that was cut")


def test_torch_records():
    text = "\n".join([
        '{"begin": {"micro_batch": 8, "accumulation": 2}}', '{"out_of_memory": 8}', "a warning",
        '{"begin": {"micro_batch": 4, "accumulation": 4}}', '{"step": 1, "ms": 5.0, "update_ms": 1.0, "loss": 3.0}',
        '{"memory": {"allocated": 7}}', '{"step": 2, "m'])
    got = measure.read_torch_training(text)
    claim(got["begin"]["micro_batch"] == 4 and got["too_large"] == [8] and len(got["steps"]) == 1
          and got["memory"] == {"allocated": 7}, "PyTorch: the steps are those of the micro-batch that fitted")


def test_smi():
    got = measure.read_smi("NVIDIA H100 80GB HBM3, 580.1, 81559, 4, 345, 1980, 2619, 700.00, 30\n")
    claim(got["name"] == "NVIDIA H100 80GB HBM3" and got["memory_mib"] == "81559" and got["temperature_c"] == "30",
          "nvidia-smi's line is read")
    claim(measure.read_smi("") == {} and measure.read_smi("No devices were found\n") == {},
          "where it finds no device there is nothing")


# ---- Traces

SHAPE = Shape(layers=2, heads=2, channels=8, context=16, vocab=200, micro_batch=2, seq_len=16)


def made_up_trace(steps=3, micro_batches=2, gap=1.0, between=100.0, leave_out=None):
    """A trace of SHAPE in which each kernel takes 10 us and a matmul 20, with `gap` us between kernels and
    `between` us between steps."""
    head = [("matmul", "forward", None), ("cross_entropy", "forward", None), ("matmul", "forward", None),
            ("matmul", "forward", None)]
    micro = [("embedding_forward", "forward", None)]
    micro += [("matmul", "forward", layer) for layer in (0, 1) for _ in range(4)] + [
        ("layernorm_forward", "forward", None)] + head
    micro += [("matmul", "backward", layer) for layer in (1, 0) for _ in range(8)]
    kernels = micro * micro_batches + [("norm", "update", None), ("adamw", "update", None)]
    if leave_out is not None:
        kernels = kernels[:leave_out] + kernels[leave_out + 1:]
    events = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
              for tid, name in enumerate(["CPU: launches", "stream: kernels", "stream: copies"])]
    now = 1000.0
    for _ in range(steps):
        for name, pass_, layer in kernels:
            args = {"pass": pass_, **({} if layer is None else {"layer": layer})}
            duration = 20.0 if name == "matmul" else 10.0
            events.append({"ph": "X", "name": name, "pid": 1, "tid": 0, "ts": now - 500, "dur": 2, "args": args})
            events.append({"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": now, "dur": duration, "args": args})
            now += duration + gap
        now += between
        events.append({
            "ph": "X", "name": "copy to device", "pid": 1, "tid": 0, "ts": now, "dur": 1, "args": {"pass": "update"}})
        events.append({
            "ph": "X", "name": "copy to device", "pid": 1, "tid": 2, "ts": now, "dur": 1, "args": {"pass": "update"}})
    events.append({"ph": "C", "name": "live bytes", "pid": 1, "ts": 0, "args": {"activations": 0}})
    return {"traceEvents": events}


def test_trace():
    got = measure.read_trace(made_up_trace(), SHAPE)
    micro = 3 * 10 + 27 * 20            # us of one micro-batch's kernels
    count = 2 * 30 + 2
    busy = (2 * micro + 20) / 1000
    claim(got["steps"] == 3 and got["which"] == 2 and got["micro_batches"] == 2 and got["kernels_launched"] == count,
          "a trace parts into steps and micro-batches")
    claim(near(got["busy_ms"], busy) and near(got["period_ms"], busy + (count * 1 + 100) / 1000),
          "a step lasts until the next one, gaps and all", f"{got['busy_ms']:.3f} of {got['period_ms']:.3f} ms")
    claim(near(got["rest_ms"], (20 + 2 + 100) / 1000)
          and near(got["micro_batches_ms"] + got["rest_ms"], got["period_ms"]),
          "what a step has once: the update and what is between steps")
    expected = {"forward": 2 * (8 * 20 + 20), "head": 2 * 70, "backward": 2 * 16 * 20, "update": 20}
    claim(all(near(got["passes"][name], us / 1000) for name, us in expected.items()) and len(got["passes"]) == 4,
          "time by pass, the head apart from forward")
    claim(near(got["gap_us"]["median"], 1) and near(got["gap_us"]["largest"][0][0], 101)
          and got["gap_us"]["largest"][0][1] == "adamw -> (next step)",
          "gaps: the median, and the largest with what is around it")
    claim(near(got["cpu_ahead_ms"], 0.5), "how far the CPU is ahead of the stream")
    kernels = {k["name"]: k for k in got["kernels"] if k["pass"] == "backward"}
    claim(kernels["matmul"]["launches"] == 32 and near(kernels["matmul"]["ms"], 0.64),
          "time and launches by kernel and pass")
    names = {m.name for m in all_matmuls(SHAPE)}
    each = {name: entry["launches"] for name, entry in got["matmuls"].items()}
    claim(set(each) == names and all(n == (2 if name.startswith("head") else 4) for name, n in each.items()),
          "each matmul of the model is told by its order")
    claim(measure.read_trace(made_up_trace(leave_out=3), SHAPE)["matmuls"] is None,
          "matmuls that are not as many as expected are not guessed at")
    one = measure.read_trace(made_up_trace(steps=1), SHAPE)
    claim(one["which"] == 1 and near(one["period_ms"], busy + (count - 1) / 1000),
          "a trace of one step ends with its last kernel")
    try:
        measure.read_trace({"traceEvents": []}, SHAPE)
        claim(False, "a trace without kernels is refused")
    except measure.Failed as failure:
        claim("stream: kernels" in str(failure), "a trace without kernels is refused", str(failure))


# ---- Arithmetic

def test_arithmetic():
    scaled = measure.full_step([110, 90, 100], 20, 4, 32)
    claim(scaled["step_ms"] == 100 and scaled["micro_batch_ms"] == 20 and scaled["full_step_ms"] == 32 * 20 + 20
          and scaled["scaled"], "a step is scaled by its micro-batches, and what comes once is counted once")
    whole = measure.full_step([110, 90, 100], 20, 4, 4)
    claim(whole["full_step_ms"] == 100 and not whole["scaled"], "a whole step is not scaled")
    d = measure.largest_difference({1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, {1: 5.0, 2: 4.25, 3: 3.0, 4: 2.125, 5: 1.0})
    claim((d["largest"], d["step"], d["first"], d["steps"], d["mean_of_last"]) == (0.25, 2, 0, 4, 0.125),
          "the largest difference of two curves, and where")
    backends = {"a": {"forward_s": 2, "backward_s": 3}, "b": {"forward_s": 1, "backward_s": 3.5}, "c": {"error": "no"}}
    claim(measure.best_backend(backends)["backend"] == "b", "the fastest attention of those that worked")

    ceilings = {"copy_bytes_per_s": 1e12, "matmuls": [{"name": m.name, "s": 1e-3} for m in all_matmuls(SHAPE)],
                "attention": {"forward_s": 1e-3, "backward_s": 2e-3}}
    got = floor(SHAPE, ceilings, total_batch=1000)
    launches = 12 * SHAPE.layers + 3
    claim(near(got["matmuls"], 1e9 * launches * 1e-3 / 32) and near(got["attention"], 1e9 * 2 * 3e-3 / 32),
          "the floor: matmuls and attention at measured times")
    claim(near(got["layernorm, residual, bias"], 1e-3 * (25 * 2 + 11) * 8 * 2)
          and near(got["logits"], 1e-3 * 2 * 256 * 2), "the floor: bytes over bandwidth")
    claim(near(got["update"], 1e-3 * (8 + 4 + 24 + 2 - 0) * SHAPE.elements / 1000),
          "the floor: the update's bytes, shared by the tokens of a step")
    claim(near(got["total"], sum(v for k, v in got.items() if k != "total")), "the floor is their sum")
    claim(floor(SHAPE, {**ceilings, "copy_bytes_per_s": None}, 1000) is None
          and floor(SHAPE, {**ceilings, "matmuls": []}, 1000) is None, "without a ceiling there is no floor")
    claim(floor(SHAPE, {**ceilings, "attention": None}, 1000)["total"] is None, "nor a sum without attention's")
    forward = attention_flops(2, 2048, 32, 64)["forward"]
    claim(forward == 4 * 2 * 32 * 2048**2 * 64 / 2, "attention's FLOPs are half of the square's")


def test_tokens(scratch):
    tokens = measure.zipf_tokens(20000, 500)
    counts = [tokens.count(i) for i in (0, 1, 100)]
    claim(max(tokens) < 500 and counts[0] > counts[1] > 3 * counts[2], "random tokens fall in frequency as in language",
          str(counts))
    text, shard = os.path.join(scratch, "a.txt"), os.path.join(scratch, "b.bin")
    with open(text, "wb") as file:
        file.write(b"abc")
    write_shard(shard, array.array("H", [40000, 2, 3]))
    claim(read_shard_header(shard) == (20240520, 1, 3), "a shard's header is llm.c's")
    claim(list(measure.read_tokens(text, 7)[0]) == [97, 98, 99, 97, 98, 99, 97], "text gives bytes, around and around")
    claim(list(measure.read_tokens(shard, 4)[0]) == [40000, 2, 3, 40000], "shards give tokens, up to 65535")


def test_readme():
    with open(os.path.join(HERE, "..", "..", "README.md"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    missing = [
        row for row, goal in report.GOALS.items() if not any(line.startswith(f"| {row} | {goal} |") for line in lines)]
    claim(not missing, "README.md's table has the report's rows and goals", ", ".join(missing))


# ---- ./train_gpt itself

def test_against_the_program(ours, scratch):
    """What is known here of the program, held against what it says of itself."""
    sizes = {"layers": 3, "heads": 2, "channels": 64, "context": 64, "vocab": 300, "micro_batch": 4, "seq_len": 64}
    plan = json.loads(
        subprocess.run([ours, "plan", *measure.flags(sizes), "--json"], check=True, capture_output=True,
                       text=True).stdout)
    shape = Shape(**sizes, precision=plan["precision"], grad_dtype=plan["grad_dtype"])
    claim(shape.elements * 4 == plan["bytes"]["adam_m"], "as many elements as the plan says", f"{shape.elements}")
    unpadded = sum(m.flops * matmul_launches(shape, m) * (1 if m.layers else shape.vocab / shape.padded_vocab)
                   for m in all_matmuls(shape)) / shape.rows
    causal = 3 * 4 * shape.channels * (shape.seq_len + 1) / 2 * shape.layers
    claim(near(unpadded + causal, plan["flops_per_token"]["model"]), "the matmuls and attention make the model's FLOPs",
          f"{unpadded + causal:.0f}")

    text, trace, log = (os.path.join(scratch, name) for name in ("text.txt", "trace.json", "run"))
    with open(text, "w", encoding="ascii") as file:
        file.write("to be or not to be " * 200)
    done = subprocess.run([
        ours, "train", *measure.flags({
            **sizes, "data": text, "total_batch": 512, "steps": 4, "trace": trace, "out": log, "eval_every": 0,
            "checkpoint_every": 0, "val_fraction": 0})], capture_output=True, text=True)
    with open(trace, encoding="utf-8") as file:
        got = measure.read_trace(json.load(file), shape)
    with open(os.path.join(log, "log.jsonl"), encoding="utf-8") as file:
        run, steps = measure.read_log(file.read())
    claim(len(steps) == 4 and run["precision"] == plan["precision"] and measure.closing_memory(done.stdout),
          "its log and closing line are read")
    claim(got["steps"] == 3 and got["micro_batches"] == 2 and got["matmuls"],
          "its trace is read, and its matmuls are told apart")
    missing = [name for name in BANDWIDTH_BOUND if name not in {k["name"] for k in got["kernels"]}]
    claim(not missing and set(BANDWIDTH_BOUND) <= set(kernel_bytes(shape)),
          "every kernel whose bytes we count is there under its name", ", ".join(missing))


# ---- cpu.py

class Contestant:
    """Each run's steps take so long; a string is what it fails with."""

    def __init__(self, kind, name, *runs):
        self.kind, self.name, self.runs, self.turns = kind, name, list(runs), 0
        self.peak_flops, self.peak_bytes = {"made up": 2e9}, {"made up": 300e6}

    def step_times(self, _):
        self.turns += 1
        times = self.runs[self.turns - 1]
        if isinstance(times, str):
            raise Failed(times)
        return times

    def plan(self, _):
        bytes_of = {"weights": 2e6, "gradients": 4e6, "master": 4e6, "adam_m": 4e6, "adam_v": 4e6, "total": 50e6}
        return {"precision": "bf16", "flops_per_token": {"model": 1e6}, "bytes": bytes_of}


def cpu_configuration(**steps):
    return cpu.Configuration("made up", 10, layers=1, heads=1, channels=16, context=16, vocab=256, micro_batch=2,
                             seq_len=8, steps=steps)


def test_cpu_comparison():
    quiet = contextlib.redirect_stderr(io.StringIO())
    ours = Contestant("ours", "ours, BF16", [90, 10, 10], [90, 20, 20])
    slow = Contestant("PyTorch", "PyTorch untuned", [1, 50, 50])
    tuned = Contestant("PyTorch", "PyTorch BF16", [90, 30, 31], [90, 29, 30])
    close = Contestant("PyTorch", "PyTorch fused", [1, 40, 40], [1, 40, 40])
    broken = Contestant("PyTorch", "PyTorch compiled", "exit code 1: no C++ compiler")
    elsewhere = Contestant("llm.c", "llm.c")
    everyone, remarks = [ours, slow, tuned, close, broken, elsewhere], []
    with quiet:
        result = cpu.measure(cpu_configuration(ours=3, PyTorch=3), everyone, 34e6, remarks)
    claim(result["ms"] == {"ours, BF16": 15, "PyTorch untuned": 50, "PyTorch BF16": 30, "PyTorch fused": 40},
          "cpu.py: a figure is the median of all steps but each run's first", str(result["ms"]))
    claim(result["best_peer"] == "PyTorch BF16", "the fastest peer is the one compared with, not ours")
    claim((ours.turns, slow.turns, close.turns, broken.turns, elsewhere.turns) == (2, 1, 2, 1, 0),
          "a hopeless peer has one run, one that failed as well, one without the configuration none")
    claim(remarks == ["made up: no figure for PyTorch compiled: exit code 1: no C++ compiler"],
          "a tuning that fails is named with its reason", str(remarks))
    # 16 tokens of 1 MFLOP at 2 GFLOP/s; 32 MB of FP32 read and written and 2 MB of weights written, at 34 MB/s
    floor_ms = result["ours"]["ours, BF16"]["floor_ms"]
    claim(near(floor_ms, 8 + 1000), "the floor: FLOPs at the peak, AdamW's bytes at a copy's rate", str(floor_ms))
    with contextlib.redirect_stdout(io.StringIO()) as table:
        cpu.report([result], everyone, remarks)
    row = [cell.strip() for cell in table.getvalue().splitlines()[-3].split("|")[1:-1]]
    claim(row[:9] == ["made up", "BF16", "15.0", "10 MISSED", "PyTorch BF16", "30.0", "2.00x", "1,008.0", "0.01x"],
          "the table names the best peer and holds ours against it and the floor", str(row))
    claim("peak memory is 100 MB more" in table.getvalue(), "memory beyond the plan is told")
    alone = {**result, "best_peer": cpu.best_peer({"ours, BF16": 15}, everyone)}
    with contextlib.redirect_stdout(io.StringIO()) as table:
        cpu.report([alone], [ours], [])
    claim(alone["best_peer"] is None and "| -         | -  | -     |" in table.getvalue(),
          "without peers there is no ratio")


def test_cpu_trouble():
    broken = Contestant("ours", "ours, BF16", "exit code 1")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            cpu.compare(cpu_configuration(ours=3), [broken], [])
        claim(False, "a run of ours that fails ends the benchmark")
    except Failed:
        claim(True, "a run of ours that fails ends the benchmark")


FAKE_TORCH_STEP = """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "-c":
    print("0.0.fake")
    sys.exit()
assert sys.argv[2].endswith("torch_step.py"), sys.argv
if "--compile" in sys.argv:
    sys.exit("no C++ compiler")
print("a line of PyTorch's own")
ms = 500 / (1 + ("--fused" in sys.argv) + 2 * ("--bf16" in sys.argv))
print(json.dumps({"version": "0.0.fake", "ms": [ms] * int(sys.argv[sys.argv.index("--steps") + 1])}))
"""


def test_cpu_program(ours, scratch):
    python, figures = os.path.join(scratch, "python-cpu"), os.path.join(scratch, "cpu.json")
    write_program(python, FAKE_TORCH_STEP)
    done = subprocess.run([sys.executable, "-B", os.path.join(HERE, "cpu.py"), "--ours", ours, "--only", "shakespeare",
                           "--python", python, "--json", figures], capture_output=True, text=True)
    with open(figures, encoding="utf-8") as file:
        got = json.load(file)["configurations"][0]
    best = got["best_peer"]
    claim(done.returncode == 0 and best == "PyTorch fused, BF16" and got["ms"][best] == 125,
          "cpu.py asks PyTorch for every tuning", done.stderr)
    claim(all(f"no figure for PyTorch {name}: " in done.stdout and "no C++ compiler" in done.stdout
              for name in ("fused, compiled", "fused, BF16, compiled")), "and names those that fail", done.stdout)
    our, = got["ours"].values()
    claim(0 < our["floor_ms"] and our["peak_bytes"] < our["planned_bytes"] + cpu.PLAN_SLACK,
          "it knows our floor and our own peak memory", str(our))


# ---- gpu.py as a whole

FAKE_LLMC = """#!/usr/bin/env python3
import sys, time, os
open(os.environ["FAKE_LLMC_PID"], "w").write(str(os.getpid()))
time.sleep(float(os.environ.get("FAKE_LLMC_SLEEP", "0")))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.path.exists(flags["-i"]) and os.path.exists(flags["-e"]) and flags["-r"] == "0", flags
if int(flags["-b"]) > 2 and flags["-x"] == "4":
    sys.exit("[CUDA ERROR] at file x:1:\\nout of memory") if print("out of memory") is None else 0
print("device memory usage: 100 MiB / 200 MiB")
for i in range(int(flags["-x"])):
    print(f"step {i + 1:4d}/{flags['-x']} | loss {6 - i / 100:7.6f} (+nanz)| norm 1.0000 (+nanz)| "
          "lr 1.00e-04 | 12.50 ms | -100.0% bf16 MFU | 1000 tok/s")
"""

FAKE_PYTHON = """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "-c":
    print("0.0.fake")
    sys.exit()
assert sys.argv[2].endswith("torch_gpu.py"), sys.argv
flags = dict(zip(sys.argv[4::2], sys.argv[5::2]))
def say(**record): print(json.dumps(record), flush=True)
say(begin={"micro_batch": int(flags.get("--micro-batch", 0)), "accumulation": int(flags.get("--accumulation", 0)),
           "compile": "no"})
if sys.argv[3] == "train":
    for i in range(int(flags["--steps"])):
        say(step=i + 1, ms=10.0, update_ms=2.0, loss=6 - i / 100, norm=1.0)
else:
    for what in json.load(sys.stdin)["what"]:
        attention = {"backends": {"flash": {"forward_s": 1e-3, "backward_s": 2e-3}}}
        say(**what, **{"copy": {"bytes_per_s": 1e10}, "matmul": {"s": 1e-4}, "attention": attention}[what["kind"]])
"""


def write_program(path, text):
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)


class World:
    """A folder with stand-ins for llm.c and for a python that has PyTorch."""

    def __init__(self, scratch, ours):
        self.scratch, self.ours, self.llmc, self.python = scratch, ours, os.path.join(scratch, "llmc"), os.path.join(
            scratch, "python")
        os.makedirs(self.llmc)
        write_program(os.path.join(self.llmc, "train_gpt2cu"), FAKE_LLMC)
        write_program(self.python, FAKE_PYTHON)
        self.data, self.pid_file = os.path.join(scratch, "text.txt"), os.path.join(scratch, "pid")
        with open(self.data, "w", encoding="ascii") as file:
            file.write("It was the best of times, it was the worst of times. " * 100)

    def command(self, out, *options):
        folders = {"--kernels-folder": os.path.join(self.scratch, "none"), "--out": os.path.join(self.scratch, out)}
        return [sys.executable, "-B", os.path.join(HERE, "gpu.py"), "--ours", self.ours, "--data", self.data,
                "--python", self.python, *(text for pair in folders.items() for text in pair), *options]

    def environment(self, **more):
        return {**os.environ, "OMP_WAIT_POLICY": "passive", "FAKE_LLMC_PID": self.pid_file, **more}

    def run(self, out, *options):
        return subprocess.run(self.command(out, *options), env=self.environment(), capture_output=True, text=True)

    def read(self, out, name="report.md"):
        path = os.path.join(self.scratch, out, name)
        return open(path, encoding="utf-8").read() if os.path.exists(path) else ""


def test_dry_run(world):
    done = world.run("whole", "--device", "cpu", "--llmc", world.llmc)
    text, results = world.read("whole"), json.loads(world.read("whole", "results.json") or "{}")
    statuses = {part["title"]: part["status"] for part in results.get("parts", [])}
    claim(done.returncode == 0
          and all(status == "done" for title, status in statuses.items() if "dev/kernels" not in title),
          "a dry run does every part",
          done.stderr.strip().splitlines()[-1] if done.returncode else "")
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    claim(titles == [
            "Not run", "Speed", "As it was run", "Where a step goes", "Matmuls", "The floor", "Recomputation",
            "Attention alone", "Losses", "Parts", "How it was measured"], "its report has every section",
          ", ".join(titles))
    claim(text.startswith("# Dry run on a CPU, not a measurement"), "and says first that it is a dry run")
    claim("| the kernels of dev/kernels | not run | no program" in text, "and what was not run, and why")
    llmc = results["llmc"]["tiny-2"]
    claim(llmc["micro_batch"] == 2 and llmc["step_ms"] == 12.5 and not llmc["scaled"],
          "llm.c's micro-batch is halved until it fits")
    claim(results["curve"]["differences"].keys() == {"PyTorch", "llm.c"}
          and len(results["curve"]["losses"]["ours"]) == 200, "the curve has all contestants")
    modes = results["recompute"]["tiny-2"]
    claim("the same bits" in text
          and modes["full"]["planned_bytes"] < modes["selective"]["planned_bytes"] < modes["none"]["planned_bytes"],
          "recomputation: less memory, the same losses")
    try:
        import matplotlib  # noqa: F401
        drawn = all(
            os.path.getsize(os.path.join(world.scratch, "whole", name)) > 5000 and name in text
            for name in ("speed.png", "step.png", "matmuls.png", "losses.png"))
        claim(drawn, "plots lie beside it")
    except ImportError:
        claim(".png" not in text, "without matplotlib it has no plots")
    redrawn = world.run("whole", "--redraw")
    claim(redrawn.returncode == 0 and world.read("whole") == text, "--redraw writes the same report again")

    # The goals' rows, from the same numbers under other names.
    results["ours"] = {"gpt2": results["ours"]["tiny-2"], "gpt2-xl": results["ours"]["tiny-4"]}
    results["ceilings"]["models"] = {"gpt2": results["ceilings"]["models"]["tiny-2"]}
    for point, (HS, T) in zip(results["attention"]["points"], [(64, 2048), (64, 8192), (128, 2048), (128, 8192)]):
        point.update(HS=HS, T=T)
    rows = [line for line in report.goals(results) if line.startswith("| ")][1:]
    claim(len(rows) == len(report.GOALS) and not any("not measured" in row for row in rows),
          "every goal has its figure where all was measured", rows[0] if rows else "")


def test_trouble(world):
    done = world.run("none", "--device", "gpu")
    claim(done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "no GPU" in done.stderr
          and not os.path.exists(os.path.join(world.scratch, "none")), "without a GPU: exit 2 and one line",
          done.stderr.strip())
    for options, expected in ((["--parts", "ours,speed"], "--parts: found speed"),
                              (["--models", "gpt2"], "--models: found gpt2"),
                              (["--minutes", "0"], "--minutes: found 0"),
                              (["--llmc", "/nowhere"], "--llmc /nowhere")):
        done = world.run("bad", "--device", "cpu", *options)
        claim(done.returncode == 2 and expected in done.stderr, f"{' '.join(options)}: exit 2, named",
              done.stderr.strip())
    done = world.run("empty", "--redraw")
    claim(done.returncode == 2 and "--redraw" in done.stderr, "--redraw without an earlier run: exit 2",
          done.stderr.strip())

    write_program(os.path.join(world.scratch, "broken"),
                  "#!/bin/sh\n[ \"$1\" = -c ] && echo 0.0.fake && exit\necho it broke >&2\nexit 3\n")
    done = world.run("broken-peer", "--device", "cpu", "--models", "tiny-2", "--parts", "ours,torch,curve", "--python",
                     os.path.join(world.scratch, "broken"))
    text = world.read("broken-peer")
    claim(done.returncode == 1 and "| PyTorch, tiny-2 | failed | exit code 3" in text and "it broke" in text
          and "| tiny-2 | ours |" in text, "a peer that fails: exit 1, named, and our figures stay")
    claim("\nPyTorch: exit code 3" in text and "\n| 200 | " in text, "and so do our losses")

    done = world.run("unbuilt", "--device", "cpu", "--models", "tiny-2", "--parts", "llmc", "--llmc", world.scratch)
    claim(done.returncode == 0 and "'make train_gpt2cu' there makes it" in world.read("unbuilt"),
          "llm.c without its program: said so, and no failure")

    done = world.run("late", "--device", "cpu", "--models", "tiny-2", "--parts", "ours,attention", "--minutes", "0.01")
    claim(done.returncode == 0 and "of 0.01 minutes, it begins with" in world.read("late"),
          "what the time does not suffice for is named")

    if os.path.exists(world.pid_file):
        os.remove(world.pid_file)
    command = world.command("interrupted", "--device", "cpu", "--models", "tiny-2", "--parts", "ours,llmc,curve",
                            "--llmc", world.llmc)
    # Ctrl-C counts there also where whoever runs these tests ignores it, as a shell's background jobs do.
    process = subprocess.Popen(command, env=world.environment(FAKE_LLMC_SLEEP="120"), stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    until = time.monotonic() + 60
    while not (os.path.exists(world.pid_file) and open(world.pid_file).read()) and time.monotonic() < until:
        time.sleep(0.1)
    before = world.read("interrupted")
    process.send_signal(signal.SIGINT)
    process.communicate()
    text, child = world.read("interrupted"), int(open(world.pid_file).read())
    claim("| tiny-2 | ours |" in before, "the report is there while the second part runs")
    claim(process.returncode == 1 and text.count("| interrupted |") == 2 and "| tiny-2 | ours |" in text,
          "Ctrl-C: exit 1, and the report keeps what was measured", f"exit code {process.returncode}")
    claim(not os.path.exists(f"/proc/{child}"), "and the program that was running is gone")


def test(name, function, *arguments):
    """An exception fails a part of the tests, not the rest of them."""
    print(name)
    try:
        function(*arguments)
    except Exception:
        claim(False, f"{name}: ended by an exception", traceback.format_exc())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--ours", required=True, metavar="PROGRAM", help="a CPU build of train_gpt")
    ours = os.path.abspath(parser.parse_args().ours)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with tempfile.TemporaryDirectory(prefix="gpt_test_bench_") as scratch:
        test("llm.c: lines", test_llmc_lines)
        test("llm.c: order of batches", test_llmc_order)
        test("llm.c: weights", test_llmc_weights, scratch)
        test("train_gpt: output", test_our_output)
        test("PyTorch: records", test_torch_records)
        test("nvidia-smi", test_smi)
        test("traces", test_trace)
        test("arithmetic", test_arithmetic)
        test("tokens", test_tokens, scratch)
        test("README", test_readme)
        test("cpu.py: comparison", test_cpu_comparison)
        test("cpu.py: trouble", test_cpu_trouble)
        test("cpu.py: with the program", test_cpu_program, ours, scratch)
        test("train_gpt itself", test_against_the_program, ours, scratch)
        world = World(os.path.join(scratch, "world"), ours)
        test("a dry run", test_dry_run, world)
        test("trouble", test_trouble, world)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The runs behind gpu.py's report: programs are started, and what they print and write is read.

Reading is apart from running: functions that take text or parsed JSON and return plain numbers come
first. Every run has a limit in seconds, and what it had said by then still counts.
"""
import array
import glob
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from common import Failed, executable, llmc_header, top_halves, write_random_llmc_weights, write_shard, PADDED_VOCAB
from gpu_model import Shape, all_matmuls, head_parts, matmuls

HERE = os.path.dirname(os.path.abspath(__file__))
TRACED_STEPS = 3        # --trace holds the first three steps: they do not count as timed
MODES = ["none", "selective", "full"]


class NotThere(Exception):
    """Something that is optional: its part is left out, and the report says why."""


# ==== Reading: the trainer ====================================================

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def closing_memory(output):
    """Bytes in use at the end, from the line '..., 33.10 GB in use on the device' or '... resident at most'."""
    found = re.search(r"([0-9.]+) (\w+) (?:in use on the device|resident at most)", output)
    return float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else None


def read_log(text):
    """log.jsonl: the run's record, and its steps. A run that was ended may have left half a line."""
    run, steps = None, []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        run = entry.get("run", run)
        if "ms" in entry:
            steps.append(entry)
    return run, steps


def stream_steps(trace):
    """The kernels of a trace, in order, as a list of steps: each begins where forward follows update."""
    events = trace["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
    if "stream: kernels" not in rows:
        raise Failed("--trace: found no row 'stream: kernels' in its file")
    steps, handed_over = [], 0
    for event in events:
        if event["ph"] != "X":
            continue
        if event["tid"] == rows.get("CPU: launches"):
            handed_over = event["ts"]       # the event of the stream comes right behind it
        elif event["tid"] == rows["stream: kernels"]:
            name = event["args"]["pass"]
            if not steps or (name == "forward" and steps[-1][-1]["pass"] == "update"):
                steps.append([])
            steps[-1].append({
                "name": event["name"], "pass": name, "layer": event["args"].get("layer"), "begin": event["ts"],
                "end": event["ts"] + event["dur"], "ahead": event["ts"] - handed_over})
    if not steps:
        raise Failed("--trace: found no kernel in its file, expected at least one step")
    return steps


def micro_batches(kernels):
    """A step's kernels without the update's, split where forward begins anew."""
    parts = []
    for kernel in kernels:
        if kernel["pass"] == "update":
            break
        if not parts or (kernel["pass"] == "forward" and parts[-1][-1]["pass"] != "forward"):
            parts.append([])
        parts[-1].append(kernel)
    return parts


def name_matmuls(micro_batch, shape):
    """Time and launches of each matmul of the model: all are called "matmul", and come in a known order.
    None if they do not come as many as expected."""
    groups = defaultdict(list)
    for kernel in micro_batch:
        if kernel["name"].startswith("matmul") and kernel["pass"] in ("forward", "backward"):
            groups[kernel["pass"], kernel["layer"]].append(kernel)
    expected, parts = matmuls(shape), head_parts(shape)[1]
    named = defaultdict(lambda: {"ms": 0.0, "launches": 0})
    for (name, layer), kernels in groups.items():
        wanted = expected.get((name, layer is not None), [])
        wanted = wanted * (1 if layer is not None else parts)
        if len(kernels) != len(wanted):
            return None
        for kernel, matmul in zip(kernels, wanted):
            named[matmul.name]["ms"] += (kernel["end"] - kernel["begin"]) / 1000
            named[matmul.name]["launches"] += 1
    return dict(named) if len(named) == len(all_matmuls(shape)) else None


def add_matmuls(micro_batch_matmuls):
    """Of all micro-batches of a step; None if one could not be told."""
    if not micro_batch_matmuls or None in micro_batch_matmuls:
        return None
    total = defaultdict(lambda: {"ms": 0.0, "launches": 0})
    for named in micro_batch_matmuls:
        for name, entry in named.items():
            total[name]["ms"] += entry["ms"]
            total[name]["launches"] += entry["launches"]
    return dict(total)


def read_trace(trace, shape):
    """One step of a trace: the second, which no set-up delays and whose end the third one shows.

    period: from the step's first kernel to the next one's; of it micro_batches_ms, and the rest, the
    update and what is between steps. A kernel's time here is from the event before it to the one
    behind it on the stream: where the device waits for the CPU, part of the wait is in it.
    """
    steps = stream_steps(trace)
    which = min(1, len(steps) - 1)
    kernels = steps[which]
    begin, last = kernels[0]["begin"], kernels[-1]["end"]
    end = steps[which + 1][0]["begin"] if which + 1 < len(steps) else last
    update = next((k["begin"] for k in kernels if k["pass"] == "update"), last)

    passes, by_kernel, gaps = defaultdict(float), {}, []
    following = kernels[1:] + [{"name": "(next step)", "begin": end}]
    for kernel, after in zip(kernels, following):
        ms = (kernel["end"] - kernel["begin"]) / 1000
        in_head = (kernel["pass"] == "forward" and kernel["layer"] is None
                   and not kernel["name"].startswith(("embedding", "layernorm")))
        passes["head" if in_head else kernel["pass"]] += ms
        entry = by_kernel.setdefault(f"{kernel['pass']}/{kernel['name']}",
                                     {"pass": kernel["pass"], "name": kernel["name"], "ms": 0.0, "launches": 0})
        entry["ms"] += ms
        entry["launches"] += 1
        gaps.append((max(0.0, after["begin"] - kernel["end"]), f"{kernel['name']} -> {after['name']}"))
    parts = micro_batches(kernels)
    return {
        "steps": len(steps),
        "which": which + 1,
        "micro_batches": len(parts),
        "kernels_launched": len(kernels),
        "period_ms": (end - begin) / 1000,
        "micro_batches_ms": (update - begin) / 1000,
        "rest_ms": (end - update) / 1000,
        "busy_ms": sum(passes.values()),
        "gap_us": {"median": statistics.median(g for g, _ in gaps), "largest": sorted(gaps, reverse=True)[:5]},
        "cpu_ahead_ms": statistics.median(k["ahead"] for k in kernels) / 1000,
        "passes": dict(passes),
        "kernels": list(by_kernel.values()),
        "matmuls": add_matmuls([name_matmuls(part, shape) for part in parts]),
    }


# ==== Reading: the peers ======================================================

LLMC_STEP = re.compile(r"step\s+(\d+)/(\d+) \| loss\s+(\S+) \(\S+z\)\| norm\s+(\S+) \(\S+z\)\| lr (\S+) "
                       r"\| (\S+) ms \| (\S+)% bf16 MFU \| (\S+) tok/s")
LLMC_MEMORY = re.compile(r"device memory usage: (\d+) MiB / (\d+) MiB")


def read_llmc(text):
    """What llm.c's train_gpt2cu prints."""
    steps = [{"step": int(m[1]), "loss": float(m[3]), "norm": float(m[4]), "ms": float(m[6])}
             for m in LLMC_STEP.finditer(text)]
    memory = LLMC_MEMORY.search(text)
    lines = text.strip().splitlines()
    # Where it turns to cudaMallocManaged, its state is on the host, and slow.
    return {"steps": steps, "used_bytes": int(memory[1]) * 2**20 if memory else None,
            "out_of_memory": "out of memory" in text or "cudaMallocManaged" in text,
            "last_line": lines[-1] if lines else "it printed nothing"}


def read_records(text):
    """Lines of JSON objects; others, and half a line at the end, are left out."""
    records = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            records.append(entry)
    return records


def read_torch_training(text):
    """torch_gpu.py train: after each start that ran out of memory, another one follows."""
    result = {"begin": None, "steps": [], "memory": None, "too_large": []}
    for entry in read_records(text):
        if "begin" in entry:
            result.update(begin=entry["begin"], steps=[])
        elif "out_of_memory" in entry:
            result["too_large"].append(entry["out_of_memory"])
        elif "memory" in entry:
            result["memory"] = entry["memory"]
        elif "step" in entry:
            result["steps"].append(entry)
    return result


def full_step(step_ms, rest_ms, accumulation, full_accumulation):
    """Milliseconds of a step of `full_accumulation` micro-batches, from steps of `accumulation`: what comes
    once in a step (the update) is counted once."""
    measured = statistics.median(step_ms)
    micro = (measured - rest_ms) / accumulation
    full = measured if accumulation == full_accumulation else full_accumulation * micro + rest_ms
    return {"step_ms": measured, "rest_ms": rest_ms, "micro_batch_ms": micro, "full_step_ms": full,
            "scaled": accumulation != full_accumulation}


def largest_difference(a, b):
    """Of two curves, {step: loss}: the largest distance, where, and the mean over the last quarter."""
    common = sorted(set(a) & set(b))
    if not common:
        return None
    distance = {step: abs(a[step] - b[step]) for step in common}
    where = max(common, key=lambda step: distance[step])
    tail = common[-max(1, len(common) // 4):]
    return {"largest": distance[where], "step": where, "first": distance[common[0]], "steps": len(common),
            "mean_of_last": statistics.mean(distance[step] for step in tail), "last": len(tail)}


# ==== Inputs ==================================================================

GPT2_VOCAB = 50257


def zipf_tokens(count, vocab):
    """Random tokens, few of them frequent, as in language: how often a token repeats is what the
    embedding's backward pass takes its time from."""
    total, cumulative = 0.0, []
    for rank in range(vocab):
        total += 1 / (rank + 2.7)
        cumulative.append(total)
    return array.array("H", random.Random(1).choices(range(vocab), cum_weights=cumulative, k=count))


def read_tokens(pattern, count):
    """The first `count` tokens of text files (bytes) or shards, once more from the start if they are fewer."""
    tokens = array.array("H")
    paths = sorted(glob.glob(pattern))
    for path in paths:
        with open(path, "rb") as file:
            if path.endswith(".bin"):
                file.seek(1024)
                tokens.frombytes(file.read(2 * (count - len(tokens))))
            else:
                tokens.extend(file.read(count - len(tokens)))
        if len(tokens) >= count:
            break
    if not tokens:
        raise NotThere(f"no data: {pattern} names no file with anything in it")
    return (tokens * -(-count // len(tokens)))[:count], paths


FIRST_TOKEN = 10


def curve_tokens(tokens, batch):
    """Every batch begins with the same token. So the target of a batch's last token, which is the first
    token of whatever batch comes next in the file, does not depend on the order of batches."""
    for start in range(0, len(tokens), batch):
        tokens[start] = FIRST_TOKEN
    return tokens


def mersenne_twister(seed):
    """As C programs seed it, by one 32-bit number (Matsumoto and Nishimura's init_genrand)."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + i) & 0xffffffff)
    generator = random.Random()
    generator.setstate((3, (*state, 624), None))
    return generator


def llmc_order(batches):
    """In which order llm.c takes the batches of its only shard: it always shuffles, from seed 42."""
    generator, order = mersenne_twister(42), list(range(batches))
    for i in range(batches - 1, 0, -1):
        j = generator.getrandbits(32) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


def shuffled_for_llmc(tokens, batch):
    """The same batches laid out so that llm.c comes upon them in our order. See curve_tokens."""
    count = (len(tokens) - 1) // batch
    laid_out = array.array("H", tokens)
    for ours, theirs in enumerate(llmc_order(count)):
        laid_out[theirs * batch:(theirs + 1) * batch] = tokens[ours * batch:(ours + 1) * batch]
    return laid_out


class Folder:
    """A Hugging Face folder's model.safetensors, all FP32."""

    def __init__(self, path):
        self.path = os.path.join(path, "model.safetensors")
        with open(self.path, "rb") as file:
            size, = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(size))
        self.begin = 8 + size

    def truncate(self):
        """Makes every weight one that BF16 can hold: so all contestants begin with the same numbers."""
        with open(self.path, "rb") as file:
            content = bytearray(file.read())
        count = (len(content) - self.begin) // 4
        content[self.begin::4] = content[self.begin + 1::4] = bytes(count)
        with open(self.path, "wb") as file:
            file.write(content)

    def values(self, name):
        first, last = self.header[name]["data_offsets"]
        values = array.array("f")
        with open(self.path, "rb") as file:
            file.seek(self.begin + first)
            values.frombytes(file.read(last - first))
        return values

    def write_for_llmc(self, path, shape):
        """As llm.c reads it: BF16, each tensor for all layers, matrices (out, in), vocabulary padded."""
        C, layers = shape.channels, range(shape.layers)

        def transposed(values, columns):
            result = array.array("H")
            for column in range(columns):
                result.extend(values[column::columns])
            return result

        with open(path, "wb") as file:
            llmc_header(file, shape.layers, shape.heads, C, shape.context, shape.vocab, "bf16")
            top_halves(self.values("wte.weight")).tofile(file)
            file.write(bytes(2 * C * (PADDED_VOCAB - shape.vocab)))
            top_halves(self.values("wpe.weight")).tofile(file)
            for name, columns in (("ln_1.weight", 0), ("ln_1.bias", 0), ("attn.c_attn.weight", 3 * C),
                                  ("attn.c_attn.bias", 0), ("attn.c_proj.weight", C), ("attn.c_proj.bias", 0),
                                  ("ln_2.weight", 0), ("ln_2.bias", 0), ("mlp.c_fc.weight", 4 * C),
                                  ("mlp.c_fc.bias", 0), ("mlp.c_proj.weight", C), ("mlp.c_proj.bias", 0)):
                for layer in layers:
                    values = top_halves(self.values(f"h.{layer}.{name}"))
                    (transposed(values, columns) if columns else values).tofile(file)
            for name in ("ln_f.weight", "ln_f.bias"):
                top_halves(self.values(name)).tofile(file)


# ==== Running =================================================================

class Budget:
    def __init__(self, minutes):
        self.begin = time.monotonic()
        self.deadline = self.begin + 60 * minutes

    def left(self):
        return self.deadline - time.monotonic()

    def spent(self):
        return time.monotonic() - self.begin


@dataclass
class Done:
    output: str
    errors: str
    code: int
    seconds: float
    ended: bool         # by us, at its limit

    def last_line(self):
        return (self.errors.strip() or self.output.strip() or "it printed nothing").splitlines()[-1]


def run(command, limit, text_in=None, cwd=None, environment=None):
    """Runs a command for at most `limit` seconds, itself and what it starts; gives what it said until then."""
    begin = time.monotonic()
    files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(3)]
    with files[0] as given, files[1] as output, files[2] as errors:
        given.write(text_in or "")
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=output, stderr=errors, cwd=cwd,
                                   env={**os.environ, **(environment or {})}, start_new_session=True)
        ended = False
        try:
            process.wait(timeout=max(1, limit))
        except subprocess.TimeoutExpired:
            ended = True
        finally:        # Ctrl-C too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors.seek(0)
        return Done(output.read(), errors.read(), process.returncode, time.monotonic() - begin, ended)


def flags(options):
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


# ---- What is measured, for which device

@dataclass
class Model:
    name: str
    options: dict           # of ./train_gpt


@dataclass
class Size:
    models: list            # the most important first
    recompute: list         # names of those measured in all recompute modes
    most_sequences: int     # a micro-batch is never larger: beyond it nothing is gained
    total_batch: int        # tokens of a step
    step_flops: float       # a timing run's step has as many micro-batches as make about so many FLOPs, two at least
    timed_steps: int        # after those that are traced
    copy_bytes: int
    attention: dict         # of attention alone: channels, tokens, lengths, head sizes
    curve: dict             # model, micro_batch, seq_len, steps, lr, warmup
    ceiling_seconds: float  # for each mean of a ceiling
    limits: dict            # seconds: of a part, (to begin with, at most)


GPT2_MODELS = [Model(name, {"model": name}) for name in ("gpt2", "gpt2-xl", "gpt2-medium", "gpt2-large")]
TINY = {"heads": 2, "channels": 64, "context": 64, "vocab": 512}
SIZES = {
    "gpu": Size(
        GPT2_MODELS, recompute=["gpt2", "gpt2-xl"], most_sequences=64, total_batch=524288, step_flops=450e12,
        timed_steps=4, copy_bytes=1 << 30, ceiling_seconds=0.02,
        attention={"channels": 2048, "tokens": 16384, "lengths": [2048, 8192], "head_sizes": [64, 128]},
        curve={"model": {"model": "gpt2"}, "micro_batch": 16, "seq_len": 1024, "steps": 200, "lr": 6e-4, "warmup": 20},
        limits={"ours": (15, 60), "ceilings": (20, 60), "torch": (45, 110), "llmc": (20, 70), "recompute": (15, 60),
                "curve": (25, 70), "attention": (10, 40), "kernels": (20, 120)}),
    # Goes through everything, and says nothing about speed.
    "cpu": Size(
        [Model("tiny-2", {"layers": 2, **TINY}), Model("tiny-4", {"layers": 4, **TINY})],
        recompute=["tiny-2", "tiny-4"], most_sequences=4, total_batch=1024, step_flops=1e9,
        timed_steps=3, copy_bytes=1 << 20, ceiling_seconds=0.001,
        attention={"channels": 64, "tokens": 512, "lengths": [128, 256], "head_sizes": [16, 32]},
        curve={"model": {"layers": 2, **TINY}, "micro_batch": 4, "seq_len": 64, "steps": 200, "lr": 2e-3, "warmup": 20},
        limits=dict.fromkeys(["ours", "ceilings", "torch", "llmc", "recompute", "curve", "attention", "kernels"],
                             (2, 60))),
}


def shape_of_run(record):
    """What a run's record in its log says of its shape."""
    sizes, options = dict(record["model"]), record["options"]
    del sizes["parameters"]
    return Shape(**sizes, micro_batch=options["micro-batch"], seq_len=options["seq-len"] or sizes["context"],
                 precision=record["precision"], grad_dtype=options["grad-dtype"])


class Bench:
    """What all parts share: programs, inputs, budget, and the results so far."""

    def __init__(self, options, folder, size, budget):
        self.options, self.folder, self.size, self.budget = options, folder, size, budget
        self.on_gpu = options.device == "gpu"
        self.environment = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        self.results = {
            "ours": {}, "torch": {}, "llmc": {}, "ceilings": {}, "recompute": {}, "attention": {}, "curve": {},
            "kernels": []}
        self.tokens_file = os.path.join(folder, "tokens.bin")

    def limit(self, part):
        return min(self.size.limits[part][1], self.budget.left() - 3)

    def shown(self, command):
        """A command line as a reader would type it: without our folder of temporary files."""
        program = os.path.relpath(command[0])
        program = program if "/" in program else "./" + program
        return re.sub(re.escape(self.folder) + r"/(\S*/)?", "", shlex.join([program, *command[1:]]))

    # ---- Inputs

    def write_tokens(self):
        """For timing: a million Zipf-distributed tokens, and enough for one step of the largest batch."""
        vocab = self.size.models[0].options.get("vocab", GPT2_VOCAB)
        write_shard(self.tokens_file, zipf_tokens((1 << 20) + 1 if self.on_gpu else (1 << 14) + 1, vocab))

    # ---- Ours

    def plan(self, **options):
        command = [self.options.ours, "plan", *flags(options), "--json"]
        done = run(command, min(60, self.budget.left()), environment=self.environment)
        if done.code != 0:
            raise Failed(f"exit code {done.code} from {self.shown(command)}: {done.last_line()}")
        return json.loads(done.output)

    def train(self, part, steps, traced=True, seconds=None, **options):
        """A run of ./train_gpt: its record, steps, memory and the traced step."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            trace = os.path.join(scratch, "trace.json")
            options = {"data": self.tokens_file, "val_fraction": 0, "schedule": "constant", "lr": 1e-4, "eval_every": 0,
                       "sample_every": 0, "checkpoint_every": 0, **options, "steps": steps,
                       **({"trace": trace} if traced else {}), "out": os.path.join(scratch, "run")}
            command = [self.options.ours, "train", *flags(options)]
            done = run(command, seconds or self.limit(part), environment=self.environment)
            log = os.path.join(scratch, "run", "log.jsonl")
            record, lines = read_log(open(log, encoding="utf-8").read()) if os.path.exists(log) else (None, [])
            result = {
                "command": self.shown(command), "run": record, "steps": lines,
                "used_bytes": closing_memory(done.output), "ended": done.ended, "seconds": done.seconds}
            if not record or (done.code != 0 and not done.ended):
                raise Failed(f"exit code {done.code} from {result['command']}: {done.last_line()}")
            if traced and os.path.exists(trace):
                shape = shape_of_run(record)
                with open(trace, encoding="utf-8") as file:
                    result["trace"] = read_trace(json.load(file), shape)
                result["shape"] = shape.as_dict()
            return result

    def timing_options(self, model):
        """Micro-batch and accumulation of a model's timing runs: the largest micro-batch that fits and divides
        the step, up to most_sequences; of the step as many micro-batches as time allows, two at least."""
        plan = self.plan(**model.options, **self.sequence(model), micro_batch=self.options.micro_batch or "auto",
                         total_batch=self.size.total_batch)
        sequences, micro_batch = self.size.total_batch // plan["seq_len"], plan["micro_batch"]
        if not self.options.micro_batch:
            micro_batch = min(micro_batch, self.size.most_sequences)
            while sequences % micro_batch:
                micro_batch -= 1
        full = sequences // micro_batch
        micro_flops = plan["flops_per_token"]["model"] * micro_batch * plan["seq_len"]
        accumulation = min(full, max(2, int(self.size.step_flops / micro_flops)))
        return {
            "micro_batch": micro_batch, "seq_len": plan["seq_len"], "accumulation": accumulation,
            "full_accumulation": full}

    def sequence(self, model):
        return {"seq_len": 1024} if "model" in model.options else {}

    def time_ours(self, part, model, timing, timed_steps, **more):
        """The figures of a timing run."""
        tokens = timing["micro_batch"] * timing["seq_len"]
        result = self.train(part, TRACED_STEPS + timed_steps, **model.options, seq_len=timing["seq_len"],
                            micro_batch=timing["micro_batch"], total_batch=timing["accumulation"] * tokens, **more)
        timed = [line["ms"] for line in result["steps"][TRACED_STEPS:]]
        if not timed or "trace" not in result:
            raise Failed(f"{model.name}: {len(result['steps'])} steps in {result['seconds']:.0f} s, "
                         f"expected more than {TRACED_STEPS}")
        record = result["run"]
        result.update(
            timing, timed_ms=timed,
            **full_step(timed, result["trace"]["rest_ms"], timing["accumulation"], timing["full_accumulation"]))
        self.rate(result, record)
        return result

    def rate(self, result, record):
        """Tokens/s of the full step, and the shares of the peak, by our count of FLOPs. One peak for all:
        the first run's; where no data sheet says it, each run measures its own."""
        peak = self.results["about"].setdefault("peak_flops", record["peak_flops"])
        result["tokens_per_s"] = 1000 * self.size.total_batch / result["full_step_ms"]
        for name, share in (("model", "mfu"), ("hardware", "hfu")):
            result[share] = result["tokens_per_s"] * record["flops_per_token"][name] / peak

    def ours(self, model):
        timing = self.timing_options(model)
        while True:
            try:
                self.results["ours"][model.name] = self.time_ours("ours", model, timing, self.size.timed_steps)
                return
            except Failed as failure:   # the plan knows of the whole card, not of what others hold
                if "out of device memory" not in str(failure) or timing["micro_batch"] == 1 or self.options.micro_batch:
                    raise
            timing["micro_batch"] //= 2
            timing["accumulation"] *= 2
            timing["full_accumulation"] *= 2

    def ours_of(self, model):
        """What was measured of ours for this model: the peers' runs have its shape and count its FLOPs."""
        if model.name not in self.results["ours"]:
            raise NotThere(f"our own run of {model.name} was not measured")
        return self.results["ours"][model.name]

    # ---- PyTorch

    def torch(self, arguments, limit, text_in=None):
        if not self.options.python:
            raise NotThere(f"no PyTorch in {' or '.join(self.options.pythons)}; --python names a python that has it")
        threads = ["--threads", str(len(os.sched_getaffinity(0)))] if not self.on_gpu and "train" in arguments else []
        device = ["--device", "cuda" if self.on_gpu else "cpu", *threads]
        # The second name is the first one's in newer versions.
        environment = {**self.environment, **dict.fromkeys(["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"],
                                                           "expandable_segments:True")}
        command = [self.options.python, "-B", os.path.join(HERE, "torch_gpu.py"), *arguments, *device]
        return run(command, limit, text_in, environment=environment)

    def torch_training(self, limit, **options):
        done = self.torch(["train", *flags(options)], limit)
        result = read_torch_training(done.output)
        if done.code != 0 and not done.ended:
            raise Failed(f"exit code {done.code} from torch_gpu.py train: {done.last_line()}")
        return {**result, "seconds": done.seconds, "ended": done.ended}

    def torch_micro_batch(self, shape, sequences):
        """Where to begin: what our estimate of PyTorch's memory says will fit. An FP32 residual stream and
        what autocast keeps make about 40 C bytes a token and layer; FP32 weights, gradients and moments
        and BF16 copies 18 a parameter; logits exist in BF16 and FP32, and so do their gradients."""
        state = 18 * shape.elements
        per_sequence = shape.seq_len * (40 * shape.layers * shape.channels + 12 * shape.padded_vocab)
        micro_batch = shape.micro_batch
        memory = self.results["about"].get("memory_bytes")
        while memory and micro_batch > 1 and (micro_batch * per_sequence + state > 0.92 * memory
                                              or sequences % micro_batch):
            micro_batch -= 1
        return micro_batch

    def pytorch(self, model):
        ours = self.ours_of(model)
        shape = Shape(**ours["shape"])
        sequences = self.size.total_batch // shape.seq_len
        micro_batch = self.torch_micro_batch(shape, sequences)
        accumulation = max(1, ours["accumulation"] * ours["micro_batch"] // micro_batch)
        # torch.compile of a whole model takes longer the deeper it is; of its block, the same for all.
        compile_ = self.options.compile
        if compile_ == "auto":
            compile_ = "whole" if shape.layers <= 12 else "blocks"
        result = self.torch_training(self.limit("torch"), **self.sizes_of(shape), precision=shape.precision,
                                     micro_batch=micro_batch, accumulation=accumulation, data=self.tokens_file,
                                     compile=compile_ if self.on_gpu else "no", steps=2 + self.size.timed_steps)
        timed = result["steps"][2:]         # the first compiles, the second may do so again for its optimizer
        if not timed:
            raise Failed(f"PyTorch, {model.name}: {len(result['steps'])} steps in {result['seconds']:.0f} s, expected "
                         f"more than 2; out of memory with micro-batches {result['too_large']}")
        begin, timed_ms = result["begin"], [step["ms"] for step in timed]
        result.update(micro_batch=begin["micro_batch"], accumulation=begin["accumulation"], timed_ms=timed_ms,
                      **full_step(timed_ms, statistics.median(step["update_ms"] for step in timed),
                                  begin["accumulation"], sequences // begin["micro_batch"]))
        self.rate(result, ours["run"])
        self.results["torch"][model.name] = result

    @staticmethod
    def sizes_of(shape):
        return {key: getattr(shape, key) for key in ("layers", "heads", "channels", "context", "vocab", "seq_len")}

    def ceilings(self):
        """The best this machine does with each model's matmuls and attention, and a copy."""
        measured = [(model, Shape(**self.results["ours"][model.name]["shape"])) for model in self.size.models
                    if model.name in self.results["ours"]]
        if not measured:
            raise NotThere("no run of ours to take the shapes from")
        what = [{"kind": "copy", "bytes": self.size.copy_bytes}]
        for model, shape in measured:
            for m in all_matmuls(shape):
                what.append({"kind": "matmul", "model": model.name, "name": m.name, "M": m.M, "N": m.N, "K": m.K,
                             "a": m.a, "b": m.b})
            what.append({"kind": "attention", "model": model.name, "B": shape.micro_batch, "T": shape.seq_len,
                         "NH": shape.heads, "HS": shape.channels // shape.heads})
        precision = measured[0][1].precision
        done = self.torch(["ceilings", "--precision", precision], self.limit("ceilings"),
                          json.dumps({"what": what, "seconds": self.size.ceiling_seconds}))
        records = read_records(done.output)
        self.results["ceilings"] = read_ceilings(records)
        expected = len(what) + 1
        if len(records) < expected:
            raise Failed(f"{len(records)} of {expected} ceilings: {done.last_line()}")

    # ---- llm.c

    def llmc_program(self):
        if not self.options.llmc:
            raise NotThere("no LLMC=FOLDER")
        program = os.path.join(os.path.abspath(self.options.llmc), "train_gpt2cu")
        if not executable(program):
            raise NotThere(f"no program {program}: 'make train_gpt2cu' there makes it")
        return program

    def llmc_run(self, limit, micro_batch, **options):
        """Until a micro-batch fits, halved each time; options by the letters that it gives them."""
        program, lines, begin = self.llmc_program(), shutil.which("stdbuf"), time.monotonic()
        # Evaluation (v, m): a batch at the start and one at the end; no samples, no HellaSwag, nothing recomputed.
        options = {**options, "c": 0.1, "v": 1000000, "m": 1, "s": 0, "h": 0, "r": 0}
        while True:
            command = [program, *(text for name, value in {**options, "b": micro_batch}.items()
                                  for text in ("-" + name, str(value)))]
            done = run(([lines, "-oL"] if lines else []) + command, limit - (time.monotonic() - begin), cwd=self.folder)
            result = {**read_llmc(done.output), "micro_batch": micro_batch, "command": self.shown(command),
                      "ended": done.ended, "seconds": done.seconds, "cudnn": self.llmc_uses_cudnn(program)}
            if not result["out_of_memory"] or micro_batch == 1:
                break
            micro_batch //= 2
        if not result["steps"]:
            raise Failed(f"exit code {done.code} from {result['command']}: {result['last_line']}")
        return result

    @staticmethod
    def llmc_uses_cudnn(program):
        done = subprocess.run(["ldd", program], capture_output=True, text=True) if shutil.which("ldd") else None
        return "libcudnn" in done.stdout if done and done.returncode == 0 else None

    def llmc(self, model):
        self.llmc_program()
        ours = self.ours_of(model)
        shape = Shape(**ours["shape"])
        weights = os.path.join(self.folder, "llmc_weights.bin")
        write_random_llmc_weights(weights, shape.layers, shape.heads, shape.channels, shape.context, shape.vocab,
                                  "bf16")
        try:
            # It says only what a whole step takes: so its steps are whole ones, and few.
            result = self.llmc_run(self.limit("llmc"), shape.micro_batch, i=self.tokens_file, j=self.tokens_file,
                                   e=weights, t=shape.seq_len, d=self.size.total_batch, x=4)
        finally:
            os.remove(weights)
        timed = [step["ms"] for step in result["steps"][1:]]
        if not timed:
            raise Failed(f"llm.c, {model.name}: {len(result['steps'])} steps in {result['seconds']:.0f} s, "
                         "expected at least 2")
        full = self.size.total_batch // (result["micro_batch"] * shape.seq_len)
        result.update(timed_ms=timed, accumulation=full, step_ms=statistics.median(timed),
                      full_step_ms=statistics.median(timed), scaled=False)
        self.rate(result, ours["run"])
        self.results["llmc"][model.name] = result

    # ---- Recomputation

    def recompute(self, model):
        """All modes with the micro-batch of the run without recomputation, which is measured already."""
        ours = self.ours_of(model)
        timing = {key: ours[key] for key in ("micro_batch", "seq_len", "accumulation", "full_accumulation")}
        results = self.results["recompute"].setdefault(model.name, {})
        begin = time.monotonic()
        for mode in MODES:
            left = self.limit("recompute") - (time.monotonic() - begin)
            if mode != "none" and left < 3:
                raise Failed(f"{model.name}, {mode}: no time left")
            run_ = ours if mode == "none" else self.time_ours(
                "recompute", model, timing, max(2, self.size.timed_steps - 1), recompute=mode, seconds=left)
            plan = self.plan(**model.options, micro_batch=timing["micro_batch"], seq_len=timing["seq_len"],
                             recompute=mode)
            figures = ("tokens_per_s", "mfu", "hfu", "full_step_ms", "scaled", "used_bytes", "command")
            results[mode] = {
                **{key: run_[key] for key in figures},
                "passes": run_["trace"]["passes"], "micro_batches": run_["trace"]["micro_batches"],
                "planned_bytes": plan["bytes"]["total"], "activation_bytes": plan["bytes"]["activations"],
                "losses": [line["loss"] for line in run_["steps"]], "max_micro_batch": plan["max_micro_batch"][mode]}

    # ---- Attention alone

    def attention(self):
        """One layer of attention at the papers' sizes, from the trace of a model of one layer; and PyTorch's."""
        sizes, begin, precision = self.size.attention, time.monotonic(), "bf16" if self.on_gpu else "fp32"
        points = [{"HS": HS, "NH": sizes["channels"] // HS, "T": T, "B": sizes["tokens"] // T}
                  for HS in sizes["head_sizes"] for T in sizes["lengths"]]
        results = self.results["attention"] = {"points": points, **sizes}
        for point in points:
            # A run that fails (too little memory, say) leaves the other points.
            try:
                done = self.train("attention", TRACED_STEPS, layers=1, heads=point["NH"], channels=sizes["channels"],
                                  context=point["T"], seq_len=point["T"], micro_batch=point["B"],
                                  seconds=self.limit("attention") - (time.monotonic() - begin),
                                  **({} if self.on_gpu else {"vocab": TINY["vocab"]}))
            except Failed as failure:
                point["error"] = str(failure)
                continue
            if "trace" not in done:
                point["error"] = "no time left"
                continue
            point["ours"], precision = attention_times(done["trace"]), done["run"]["precision"]
        if self.options.python:
            what = [{"kind": "attention", "model": f"{p['HS']}/{p['T']}", **p} for p in points]
            done = self.torch(["ceilings", "--precision", precision], self.limit("attention"),
                              json.dumps({"what": what, "seconds": self.size.ceiling_seconds}))
            for record in read_records(done.output):
                for point in points:
                    if record.get("model") == f"{point['HS']}/{point['T']}":
                        point["torch"] = record.get("backends", {"default": {"error": record.get("error")}})
        if all("error" in point for point in points):
            raise Failed(points[0]["error"])

    # ---- Losses

    def curve(self):
        """200 steps of each contestant, on the same tokens from the same weights."""
        c = self.size.curve
        batch = c["micro_batch"] * c["seq_len"]
        tokens, paths = read_tokens(self.options.data, c["steps"] * batch + 1)
        tokens = curve_tokens(tokens, batch)
        data = os.path.join(self.folder, "curve.bin")
        write_shard(data, tokens)
        start, shape = self.initial_folder(c)
        results = self.results["curve"] = {
            "steps": c["steps"], "batch": batch, "seq_len": c["seq_len"], "micro_batch": c["micro_batch"],
            "lr": c["lr"], "warmup": c["warmup"], "data": [os.path.basename(path) for path in paths],
            "tokens": len(tokens), "model": self.sizes_of(shape), "precision": shape.precision, "losses": {},
            "remarks": [], "differences": {}}
        schedule = {"lr": c["lr"], "min_lr": c["lr"] / 10, "warmup": c["warmup"]}
        contestants = {
            "ours": lambda: self.curve_ours(c, data, start, schedule),
            "PyTorch": lambda: self.curve_torch(c, shape, data, start, schedule),
            "llm.c": lambda: self.curve_llmc(c, shape, tokens, start, schedule)}
        for name, follow in contestants.items():
            try:
                losses = follow()
            except (NotThere, Failed) as reason:
                if name == "ours":
                    raise
                results["remarks"].append(f"{name}: {reason}")
                continue
            results["losses"][name] = losses
            if len(losses) < c["steps"]:
                results["remarks"].append(f"{name}: {len(losses)} of {c['steps']} steps in the time there was")
        for name, losses in results["losses"].items():
            if name != "ours":
                results["differences"][name] = largest_difference(dict(enumerate(results["losses"]["ours"], 1)),
                                                                  dict(enumerate(losses, 1)))

    def initial_folder(self, c):
        """A checkpoint of the model as it is initialised: a step with learning rate 0 changes nothing."""
        out = os.path.join(self.folder, "start")
        shutil.rmtree(out, ignore_errors=True)
        options = {"data": self.tokens_file, **c["model"], "micro_batch": 1, "seq_len": 64, "steps": 1, "lr": 0,
                   "eval_every": 0, "val_fraction": 0, "checkpoint_every": 1, "out": out}
        command = [self.options.ours, "train", *flags(options)]
        done = run(command, self.limit("curve"), environment=self.environment)
        if done.code != 0:
            raise Failed(f"exit code {done.code} from {self.shown(command)}: {done.last_line()}")
        start = os.path.join(out, "step_000001")
        os.remove(os.path.join(start, "optimizer.safetensors"))
        Folder(start).truncate()
        with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
            shape = shape_of_run(read_log(file.read())[0])
        shape.micro_batch, shape.seq_len = c["micro_batch"], c["seq_len"]
        return start, shape

    def curve_ours(self, c, data, start, schedule):
        done = self.train("curve", c["steps"], traced=False, **{"from": start}, data=data, shuffle="no",
                          micro_batch=c["micro_batch"], seq_len=c["seq_len"], schedule="cosine", **schedule)
        return [line["loss"] for line in done["steps"]]

    def curve_torch(self, c, shape, data, start, schedule):
        result = self.torch_training(self.limit("curve"), **self.sizes_of(shape), precision=shape.precision,
                                     micro_batch=c["micro_batch"], accumulation=1, steps=c["steps"], data=data,
                                     **{"from": start}, **schedule)
        return [step["loss"] for step in result["steps"]]

    def curve_llmc(self, c, shape, tokens, start, schedule):
        self.llmc_program()
        weights, data = os.path.join(self.folder, "start.bin"), os.path.join(self.folder, "curve_llmc.bin")
        Folder(start).write_for_llmc(weights, shape)
        write_shard(data, shuffled_for_llmc(tokens, c["micro_batch"] * c["seq_len"]))
        result = self.llmc_run(self.limit("curve"), c["micro_batch"], i=data, j=data, e=weights, t=c["seq_len"],
                               d=c["micro_batch"] * c["seq_len"], x=c["steps"], k="cosine", l=schedule["lr"],
                               u=schedule["warmup"], q=0.1)
        if result["micro_batch"] != c["micro_batch"]:
            raise Failed(f"micro-batch {c['micro_batch']} does not fit")
        return [step["loss"] for step in result["steps"]]

    # ---- dev/kernels

    def kernels(self):
        """The study programs of dev/kernels: those that are built, or those that --kernels names, built now."""
        for name in self.options.kernels:
            done = run(["make", "kernels", f"KERNEL={name}"], self.limit("kernels"), cwd=os.path.join(HERE, "..", ".."))
            if done.code != 0:
                raise Failed(f"make kernels KERNEL={name}: " + ("no time left" if done.ended else done.last_line()))
        folder, other = self.options.kernels_folder, "cpu" if self.on_gpu else "gpu"
        programs = [path for path in sorted(glob.glob(os.path.join(folder, "**", "*"), recursive=True))
                    if executable(path) and (not self.options.kernels or os.path.basename(path) in self.options.kernels)
                    and not any(name.startswith(other) for name in os.path.relpath(path, folder).split(os.sep)[:-1])]
        if not programs:
            raise NotThere(f"no program in {os.path.relpath(folder)}; --kernels attention,matmul makes them")
        for program in programs:
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                table = os.path.join(scratch, "table.md")
                done = run([program, "--markdown", table], self.limit("kernels"), environment=self.environment)
                entry = {"name": os.path.basename(program), "code": done.code, "ended": done.ended}
                if os.path.exists(table):
                    entry["markdown"] = open(table, encoding="utf-8").read()
                else:
                    entry["error"] = f"exit code {done.code}, no table: {done.last_line()}"
                self.results["kernels"].append(entry)


def attention_times(trace):
    """Seconds of attention forward and backward, from a trace of a model of one layer and one micro-batch."""
    ms = defaultdict(float)
    for kernel in trace["kernels"]:
        if kernel["name"].startswith("attention"):
            ms[kernel["pass"]] += kernel["ms"]
    return {"forward_s": ms["forward"] / 1000, "backward_s": ms["backward"] / 1000}


def best_backend(backends):
    """The fastest way to compute attention that worked, forward + backward, and its seconds."""
    worked = {name: times for name, times in (backends or {}).items() if "forward_s" in times}
    if not worked:
        return None
    name = min(worked, key=lambda n: worked[n]["forward_s"] + worked[n]["backward_s"])
    return {"backend": name, **worked[name]}


def read_ceilings(records):
    """{copy_bytes_per_s, models: {name: {matmuls: [...], attention: {...}}}} from torch_gpu.py ceilings."""
    result = {"copy_bytes_per_s": None, "models": {}, "errors": []}
    for record in records:
        if "begin" in record:
            result.update(record["begin"])
        elif "error" in record:
            result["errors"].append(
                f"{record.get('model', '')} {record.get('name', record['kind'])}: {record['error']}")
        elif record["kind"] == "copy":
            result["copy_bytes_per_s"] = record["bytes_per_s"]
        else:
            model = result["models"].setdefault(record["model"], {"matmuls": [], "attention": None})
            if record["kind"] == "matmul":
                model["matmuls"].append({key: record[key] for key in ("name", "M", "N", "K", "s")})
            else:
                model["attention"], model["backends"] = best_backend(record["backends"]), record["backends"]
    return result


# ==== The machine =============================================================

SMI_FIELDS = {
    "name": "name", "driver": "driver_version", "memory_mib": "memory.total", "memory_used_mib": "memory.used",
    "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem", "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu"}


def ask_smi():
    """Of the first GPU, by nvidia-smi; empty where it does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return read_smi(done.stdout) if done.returncode == 0 else {}


def read_smi(text):
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")] if text.strip() else []
    return dict(zip(SMI_FIELDS, values)) if len(values) == len(SMI_FIELDS) else {}


class Watch:
    """Clock, power and temperature of the GPU, four times a second, while parts run."""

    def __init__(self, on_gpu):
        self.samples, self.process = [], None
        if not on_gpu or not shutil.which("nvidia-smi"):
            return
        self.process = subprocess.Popen([
            "nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw,temperature.gpu",
            "--format=csv,noheader,nounits", "-lms", "250"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append([float(value) for value in line.split(",")])
            except ValueError:
                continue

    def mark(self):
        return len(self.samples)

    def since(self, mark):
        """Of the time in which the GPU was at work: drew more than half of the most that it drew."""
        samples = [sample for sample in self.samples[mark:] if len(sample) == 3]
        if not samples:
            return None
        most = max(power for _, power, _ in samples)
        clocks = [clock for clock, power, _ in samples if power > most / 2]
        return {
            "sm_mhz": {"median": statistics.median(clocks), "least": min(clocks)}, "power_w": most,
            "temperature_c": max(t for _, _, t in samples)}

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

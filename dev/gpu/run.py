#!/usr/bin/env python3
"""Tests and measures gpt.cu on this machine's GPU, most valuable results first. Needs the programs beside it, which
`make gpu-kit` builds, an NVIDIA driver, cuBLAS (of the toolkit or PyPI's wheels), Python 3.9, and a glibc and libstdc++
that are not much older than those of the machine that built the kit: step env names what is missing.

    run.sh [BUDGET=480] [LIMIT=SECONDS] [OUT=gpu-out] [TESTS=NAMES] [STEP...]

A step that fails, hangs or exceeds its time limit is reported, and the next one runs. The summary is printed last. OUT
gets report.md, logs.tgz and matmul.json, the tuned matmuls: copied into the kit, it saves the next run their timing.
BUDGET: seconds for all steps. LIMIT: seconds for a step, at most. TESTS: comma-separated beginnings of names of tests.
In the environment, PYTHON: the python that has PyTorch; LLMC: a folder with llm.c's train_gpt2cu. Steps, in this order:
"""
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
KIT = Path(__file__).resolve().parents[2]
sys.path.append(str(KIT / "dev" / "bench"))
import bench
import bench_report
from bench import Case, Failed, LlmC, Ours, PyTorch, run
from tables import markdown_table, number, percent, text_table, times
from trainer import flags

TEST_S, STUDY_S = 200, 60   # seconds for a test and a study
CPU_TIMES = 10              # factor of time limits with CPU programs: on a slow machine, with all cores busy
SANITIZERS = ("memcheck", "racecheck", "synccheck")
ARITHMETIC = ("kernels: attention", "kernels: matmul", "tensor cores", "graphs", "kernels", "model", "loss scaling",
              "spikes")
IN_FP32 = ("kernels", "model against", "graphs")
LOSS_TOLERANCE = 0.03       # of the smoke runs: BF16 rounds differently on a GPU, and 60 steps amplify that
SMOKE_STEPS = {"gpu": 60, "cpu": 6}
STUDIES = {"attention": ["--steps", "mma", "--lengths"], "matmul": [], "cross_entropy": []}
LENGTHS = "1024,8192"
SMOKE = {"hs32": {"heads": 4, "context": 64}, "hs64": {"heads": 2}, "hs128-full": {"heads": 1, "recompute": "full"},
         "hs64-accumulate": {"heads": 2, "total_batch": 4096}}
SMALL = {"data": "data/shakespeare.txt", "layers": 2, "channels": 128, "context": 128, "sample_every": 0,
         "checkpoint_every": 0, "eval_every": 0, "seed": 5}


class Skipped(Exception):
    """A step cannot run on this machine; the message is the reason."""


def device():
    """Returns the device of the kit's programs: "gpu" or "cpu"."""
    return (KIT / "device").read_text().strip()


class Machine:
    """The state of a run: time limits, logs, and what the steps have found."""

    def __init__(self, budget, limit, out, tests):
        self.out, self.tests, self.limit = Path(out).resolve(), tests, limit
        self.end, self.deadline = time.monotonic() + budget, 0.0
        self.dry = device() == "cpu"
        self.slower = CPU_TIMES if self.dry else 1
        self.scratch = tempfile.TemporaryDirectory(prefix="gpt_kit_")
        self.logs = Path(self.scratch.name, "logs")
        self.tuning = self.logs / "cache" / "gpt.cu" / "matmul.json"
        self.steps, self.tables = [], []
        self.facts = {"suite": "gpu", "dry": self.dry, "date": time.strftime("%Y-%m-%d %H:%M"),
                      "commit": (KIT / "commit").read_text().strip()}
        self.results = {"about": self.facts, "cases": {}, "ceilings": {}, "attention": {}, "not_run": []}
        self.bench = bench.Context("dry" if self.dry else "gpu", self.scratch.name,
                                   os.environ.get("PYTHON", sys.executable))

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, name, command, limit=None):
        """Runs a command in the kit's folder, with its output in logs/NAME.txt. Returns a bench.Done."""
        if self.left() < 1:
            raise Failed(f"{name}: no time was left")
        done = run(command, min(self.left(), (limit or self.left()) * self.slower), KIT)
        (self.logs / f"{name}.txt").write_text(done.output + done.errors)
        return done

    def ours(self):
        if not self.bench.reference:
            self.bench.reference = Ours(self.bench, KIT / "train_gpt")
        return self.bench.reference

    def collect(self, jobs):
        """Calls each of {title: function of a time limit} while there is time. Returns those that failed."""
        bench.kept = self.logs
        reasons = {title: bench.attempt(self.results, self.bench, title, function, self.left())
                   for title, function in jobs.items()}
        bench.kept = None
        return [f"{title}: {reason}" for title, reason in reasons.items() if reason]


def require_none(failed):
    """Raises Failed if something failed."""
    if failed:
        raise Failed("; ".join(failed))


# ==== Steps: each returns its result in one line, or raises Failed or Skipped ====

def step_env(m):
    """the card, driver and libraries; missing ones by name"""
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit,compute_cap"
    card = bench.output_of("nvidia-smi", "-i", "0", "--format=csv,noheader", f"--query-gpu={query}")
    m.facts.update({f"GPU: {query.replace('_', ' ').replace(',', ', ')}": card or "nvidia-smi found none",
                    "machine": f"{os.cpu_count()} CPUs, glibc {platform.libc_ver()[1]}, Python "
                               f"{platform.python_version()}", "PyTorch": torch_version(m) or "not installed",
                    "compute-sanitizer": sanitizer() or "not installed"})
    missing = missing_libraries()
    if missing:     # the toolkit's, or those of PyPI's wheels
        folders = [*glob.glob("/usr/local/cuda*/lib64"),
                   *glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib")]
        folders = [folder for folder in folders if any(os.path.exists(f"{folder}/{name}") for name in missing)]
        os.environ["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        missing = missing_libraries()
    require_none([f"{name} was not found" for name in missing])
    m.run("plan", ["./train_gpt", "plan"], 10).check()
    require_none([] if card or m.dry else ["no GPU was found"])
    return card or "a CPU"


def torch_version(m):
    return bench.output_of(m.bench.python, "-c", "import torch; print(torch.__version__)")


def missing_libraries():
    found = subprocess.run(["ldd", KIT / "train_gpt"], capture_output=True, text=True).stdout
    return re.findall(r"(\S+) => not found", found)


def sanitizer():
    toolkit = "/usr/local/cuda/bin/compute-sanitizer"
    return shutil.which("compute-sanitizer") or (toolkit if os.path.exists(toolkit) else None)


def smoke_losses(run_command, program):
    """Returns {run: losses of its steps} of four small runs; an empty list for a run that failed."""
    def losses(name):
        with tempfile.TemporaryDirectory() as out:
            options = {**SMALL, "micro_batch": 8, "steps": SMOKE_STEPS[device()], "lr": 1e-3, "warmup": 10,
                       **SMOKE[name], "out": out + "/run"}
            run_command(f"smoke-{name}", [program, "train", *flags(options)])
            log = Path(out, "run", "log.jsonl")
            lines = map(json.loads, log.read_text().splitlines() if log.exists() else [])
            return [line["loss"] for line in lines if "loss" in line]
    with ThreadPoolExecutor(len(SMOKE)) as pool:
        return dict(zip(SMOKE, pool.map(losses, SMOKE)))


def step_smoke(m):
    """four small runs, whose losses must be the CPU's"""
    expected, failed, good = json.loads((KIT / "expected.json").read_text()), [], []
    for name, found in smoke_losses(m.run, "./train_gpt").items():
        if len(found) != len(expected[name]):
            failed.append(f"{name}: {len(found)} of {len(expected[name])} steps")
            continue
        differences = [abs(a - b) / b for a, b in zip(found, expected[name])]
        text = f"{name}: losses differ by up to {percent(max(differences), '.2f')} from the CPU's"
        (good if all(each < LOSS_TOLERANCE for each in differences) else failed).append(text)
    require_none(failed)
    return "; ".join(good)


def named(names, beginnings):
    return [name for name in names if any(name.startswith(begin) for begin in beginnings)]


def step_tests(m):
    """all tests in BF16 and those of arithmetic in FP32, in parallel"""
    jobs = []
    for precision in ("bf16", "fp32"):
        program = f"./test_{precision}"
        listed = m.run(f"tests-{precision}", [program, "--list"], 20)
        names = listed.output.splitlines()
        if listed.code or not names:
            jobs.append((precision, program, "--list"))
            continue
        # --only selects all names with this beginning
        names = [name for name in names if not any(name != other and name.startswith(other) for other in names)]
        names = named(names, m.tests or [""]) if precision == "bf16" else named(names, m.tests or IN_FP32)
        names.sort(key=lambda name: next((i for i, begin in enumerate(ARITHMETIC) if name.startswith(begin)), 99))
        jobs += [(precision, program, name) for name in names]
    alone = [job for job in jobs if job[2].startswith("memory")]      # it compares the device's free memory

    def test(job):
        precision, program, name = job
        try:
            done = m.run(f"tests-{precision}-{re.sub('[^A-Za-z0-9]+', '_', name)}", [program, "--only", name], TEST_S)
        except Failed:
            return job, 0, [], "not started"
        results = re.findall(r"^(ok|FAILED) +(.*)$", done.output, re.MULTILINE)
        bad = [text[:200] for word, text in results if word == "FAILED"]
        how = f"not finished after {done.seconds:.0f} s" if done.timed_out else \
            f"exit code {done.code}" if done.code != (1 if bad else 0) else ""
        return job, len(results) - len(bad), bad, how
    with ThreadPoolExecutor(max(1, min(12, os.cpu_count() - 1))) as pool:
        tested = [*pool.map(test, [job for job in jobs if job not in alone]), *map(test, alone)]
    failed = [f"{precision} {name}: {text}" for (precision, _, name), _, bad, _ in tested for text in bad]
    stopped = [f"{precision} {name}: {how}" for (precision, _, name), _, _, how in tested if how]
    m.tables += [f"- {text}" for text in failed + stopped]
    good = f"{sum(ok for _, ok, _, _ in tested)} results hold"
    require_none([] if tested else ["no test has such a name"])
    if len(failed + stopped) > 3:
        raise Failed(f"{len(failed)} results and {len(stopped)} tests, listed in report.md; {good}")
    require_none(failed + stopped)
    return good


def step_speed(m):
    """GPT-2 124M and 1558M in BF16 and FP8: tokens/s, MFU, memory; attention alone"""
    suite, ours = m.bench.suite, m.ours()

    def steps_of(cases):
        return {case.name: lambda limit, case=case: bench.measure_step(m.results, case, ours, limit)
                for case in cases}
    attention = {f"attention of {point['NH']} heads of {point['HS']}, T = {point['T']}":
                 lambda limit, point=point: bench.measure_our_attention(m.results, m.bench, limit, point)
                 for point in suite.attention}
    in_fp8 = [Case(**{**vars(case), "name": f"{case.name} {matmul}", "model": {**case.model, "matmul": matmul}})
              for matmul in ("fp8-all", "fp8") for case in suite.cases]
    require_none(m.collect({**steps_of(suite.cases), **attention, **steps_of(in_fp8)}))
    return "; ".join(f"{name} {case['tokens'] / bench_report.median_ms(run):,.1f}k tokens/s"
                     for name, case in m.results["cases"].items() for run in bench_report.ours_of(case).values())


def step_trace(m):
    """time of each kernel, next to the estimate of make inspect"""
    first = m.bench.suite.cases[0]
    if first.name not in m.results["cases"]:
        require_none(m.collect({
            first.name: lambda limit: bench.measure_step(m.results, first, m.ours(), limit)}))
    if not (KIT / "estimates.json").exists():
        raise Skipped("the kit has no estimates")
    estimates = json.loads((KIT / "estimates.json").read_text())
    case = m.results["cases"][first.name]
    traced = next(iter(bench_report.ours_of(case).values()))
    rows = compare_kernels(traced, case["tokens"] // (traced["micro_batch"] * case["seq_len"]), estimates)
    m.tables += ["", "## Kernels of a micro-batch of GPT-2 124M, and of the update", "",
                 f"Measured by `--trace`; estimated by `make inspect CARD={estimates['card']}`, range "
                 f"{' to '.join(map(str, estimates['estimate_range']))}. Sorted by difference.", "",
                 *markdown_table(["kernel", "launches", "us", "estimated us", "measured / estimated"],
                                 [[name, n, number(us), number(estimate), times(us / estimate if estimate else None)]
                                  for name, n, us, estimate in rows])]
    worst = next((row for row in rows if row[3]), None)
    return f"{len(rows)} kernels; the largest difference from the estimate: {worst[0]}, {times(worst[2] / worst[3])}" \
        if worst else f"{len(rows)} kernels"


def compare_kernels(traced, repeats, estimates):
    """Returns [(name, launches, us of a micro-batch or update, estimated us or None)], by decreasing difference."""
    found, expected = {}, {}
    for kernel in traced["trace"]["kernels"]:
        count = 1 if kernel["pass"] == "update" else repeats
        if kernel["name"] != "matmul":
            n, us = found.get(kernel["name"], (0, 0))
            found[kernel["name"]] = n + kernel["launches"] // count, us + 1000 * kernel["ms"] / count
    for kernel in estimates["kernels"]:
        expected[kernel["range"]] = expected.get(kernel["range"], 0) + kernel["launches"] * kernel["estimate_us"]
    # cuBLASLt's products have no names; those of a micro-batch are in the same order in both
    products, us = estimates["matmuls"], traced["trace"]["matmuls_us"]
    if not products or len(us) != repeats * len(products):
        found["matmul"] = len(us) // repeats, sum(us) / repeats
        expected["matmul"] = sum(product["estimate_us"] for product in products)
        products = []
    for i, product in enumerate(products):
        name = "matmul {m} x {n} x {k}".format(**product) + \
            (" + C" if product["accumulate"] else "") + f", {product['epilogue']}" * (product["epilogue"] != "none")
        n, total = found.get(name, (0, 0))
        found[name] = n + 1, total + sum(us[i::len(products)]) / repeats
        expected[name] = expected.get(name, 0) + product["estimate_us"]
    rows = [(name, n, us, expected.get(name)) for name, (n, us) in found.items()]
    return sorted(rows, key=lambda row: -abs(row[2] - (row[3] or 0)))


def step_peers(m):
    """PyTorch on the same card: compiled 124M, attention backends, a copy and a large matmul; llm.c if LLMC is set"""
    version, llmc = torch_version(m), os.environ.get("LLMC")
    if not version and not llmc:
        raise Skipped("PyTorch is not installed")
    m.ours()    # whose plan gives the micro-batch
    first, jobs = m.bench.suite.cases[0], {}
    peers = [PyTorch(m.bench, tuning) for tuning in m.bench.suite.tunings if version]
    if version:
        jobs["ceilings"] = lambda limit: bench.measure_ceilings(m.results, m.bench, limit)
    for peer in peers + ([LlmC(m.bench, llmc)] if llmc else []):
        jobs[peer.name] = lambda limit, peer=peer: bench.measure_step(m.results, first, peer, limit)
    require_none(m.collect(jobs))
    if not version:
        return "PyTorch is not installed, llm.c is measured"
    ceilings = m.results["ceilings"]
    return f"PyTorch {version}: copy {bench_report.giga(ceilings['copy_bytes_per_s'])}, matmul " \
           f"{bench_report.tera(ceilings['matmul_flops'])}"


def step_sanitize(m):
    """memcheck, racecheck and synccheck of a step of small models, in parallel"""
    tool = sanitizer()
    if not tool:
        raise Skipped("compute-sanitizer is not installed")
    options = {**SMALL, "layers": 1, "heads": 2, "context": 256, "micro_batch": 2, "steps": 1, "matmul_tuning": "off"}
    cases = {name: (name, options) for name in SANITIZERS}
    cases["memcheck-fp8"] = "memcheck", {**options, "steps": 2, "matmul": "fp8-all"}

    def check(name):
        which, chosen = cases[name]
        with tempfile.TemporaryDirectory() as out:
            done = m.run(name, [tool, "--tool", which, "--error-exitcode", "9", "./train_gpt", "train",
                                *flags({**chosen, "out": out + "/run"})])
        summary = re.findall(r"SUMMARY: (.*)", done.output + done.errors)
        good = not done.code and summary and re.match(r"0 (errors|hazards)", summary[-1])
        return "" if good else f"{name}: " + ("not finished" if done.timed_out else f"exit code {done.code}, "
                                              f"{summary[-1] if summary else 'no summary'}")
    with ThreadPoolExecutor(len(cases)) as pool:
        require_none([*filter(None, pool.map(check, cases))])
    return f"0 errors in {', '.join(cases)}"


def step_studies(m):
    """dev/kernels' studies of attention, matmul and cross-entropy"""
    failed = []
    for name, arguments in STUDIES.items():
        arguments = arguments + ["64" if m.dry else LENGTHS] * bool(arguments)
        os.environ.update(INSPECT_MODE="few", INSPECT_OUT=str(Path(m.scratch.name, "inspect.json")))    # without a GPU
        try:
            done = m.run(f"study-{name}", [f"./study_{name}", *arguments], STUDY_S)
        except Failed as failure:
            failed.append(str(failure))
            continue
        m.tables += ["", f"## Study: {name}", *done.output.splitlines()] if "| ---" in done.output else []
        if done.code:
            failed.append(f"{name}: " + (f"not finished after {done.seconds:.0f} s" if done.timed_out else
                                         f"exit code {done.code}"))
    require_none(failed)
    return f"{', '.join(STUDIES)}: all results are right"


LIMITS = {"env": 20, "smoke": 60, "tests": 220, "speed": 240, "trace": 40, "peers": 180, "sanitize": 120,
          "studies": 120}
STEPS = {name: globals()[f"step_{name}"] for name in LIMITS}


# ==== Report and command line ====

def write_report(m):
    """Writes report.md and logs.tgz, after each step. Returns the summary."""
    summary = [[name, result, f"{seconds:.0f}"] for name, result, seconds in m.steps]
    m.facts["seconds"] = sum(seconds for _, _, seconds in m.steps)
    lines = [*bench_report.about(m.results), *markdown_table(["step", "result", "seconds"], summary), *m.tables, ""]
    lines += [line for part in bench_report.SECTIONS[1:] for line in part(m.results)]
    (m.out / "report.md").write_text("\n".join(lines).rstrip() + "\n")
    (m.logs / "results.json").write_text(json.dumps(m.results, indent=1))
    with tarfile.open(m.out / "logs.tgz", "w:gz") as archive:
        archive.add(m.logs, "logs")
    if m.tuning.exists():
        shutil.copy(m.tuning, m.out / "matmul.json")
    return text_table(["step", "seconds", "result"], [[name, seconds, result] for name, result, seconds in summary], 3)


def run_steps(m, names):
    """Returns whether no step failed."""
    good = True
    for name in names:
        begin = time.monotonic()
        m.deadline = min(m.end, begin + (m.limit or LIMITS[name] * m.slower))
        print(f"==== {name}: {STEPS[name].__doc__}; {m.end - begin:.0f} s left", flush=True)
        try:
            result = STEPS[name](m) if m.end - begin > 5 else "FAILED: no time was left"
        except Skipped as reason:
            result = f"skipped: {reason}"
        except Exception as error:      # a fault of this file must not end the other steps
            result = f"FAILED: {error}" if isinstance(error, Failed) else f"FAILED: {type(error).__name__}: {error}"
        good = good and not result.startswith("FAILED")
        m.steps.append((name, result, time.monotonic() - begin))
        print(result, flush=True)
        summary = write_report(m)
    print("==== summary, also in", m.out / "report.md")
    print("\n".join(summary))
    return good


def usage(problem=""):
    steps = "\n".join(f"  {name:9} {step.__doc__}; at most {LIMITS[name]} s" for name, step in STEPS.items())
    if problem:
        print(f"run.sh: {problem}; run.sh --help lists settings and steps", file=sys.stderr)
        sys.exit(2)
    print(__doc__ + steps)
    sys.exit()


def main():
    words = sys.argv[1:]
    if {"--help", "-h"} & {*words}:
        usage()
    settings = {"BUDGET": "480", "LIMIT": "0", "OUT": "gpu-out", "TESTS": ""}
    settings.update({key: os.environ[key] for key in settings if key in os.environ})
    for word in list(words):
        key, equals, value = word.partition("=")
        if equals and key in settings:
            settings[key] = value
            words.remove(word)
    for word in words:
        if word not in STEPS:
            usage(f"{word}: expected a step ({', '.join(STEPS)}) or {'=, '.join(settings)}=")
    for key, least in (("BUDGET", 1), ("LIMIT", 0)):
        if not settings[key].isdigit() or int(settings[key]) < least:
            usage(f"{key}={settings[key]}: expected seconds")
    m = Machine(int(settings["BUDGET"]), int(settings["LIMIT"]), settings["OUT"],
                [name for name in settings["TESTS"].split(",") if name])
    m.tuning.parent.mkdir(parents=True)
    try:
        m.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        usage(f"OUT={settings['OUT']}: {error.strerror}")
    os.environ["XDG_CACHE_HOME"] = str(m.logs / "cache")
    if (KIT / "matmul.json").exists():
        shutil.copy(KIT / "matmul.json", m.tuning)
    sys.exit(0 if run_steps(m, words or list(STEPS)) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--losses"]:       # make gpu-kit: the losses of the CPU
        print(json.dumps(smoke_losses(lambda _, command: run(command, 600, KIT).check(), os.path.abspath(sys.argv[2]))))
    else:
        main()

#!/usr/bin/env python3
"""Runs .vscode/launch.json's first configuration in gdb as VS Code's C++ extension does: that F5 stops where it says.

    make debug PRECISION=fp32 && python3 dev/tests/test_debug.py

Over gdb's machine interface (MI), in the extension's order: its set-up commands, the program, a breakpoint at main.
Needs gdb.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = "make debug PRECISION=fp32"      # numbers that gdb can print: a BF16 it shows as bits
LONGEST = 120       # seconds that gdb may take for an answer
passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail and not holds else ""), flush=True)


def in_folder(text):
    return text.replace("${workspaceFolder}", ROOT)


class Gdb:
    def __init__(self):
        command = ["timeout", str(LONGEST), "gdb", "--interpreter=mi", "--quiet", "--nx"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def until(self, pattern):
        """The line that has it."""
        for line in self.process.stdout:
            if re.search(pattern, line):
                return line
        raise RuntimeError(f"gdb ended before {pattern}")

    def command(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.until(r"^\^")

    def stopped(self):
        return self.until(r"^\*stopped")

    def value(self, expression):
        found = re.search(r'value="(.*)"', self.command(f'-data-evaluate-expression "{expression}"'))
        return found[1] if found else None


def main():
    if len(sys.argv) > 1:
        print(__doc__.strip())
        return 0 if sys.argv[1:] == ["--help"] else 2
    with open(os.path.join(ROOT, ".vscode", "launch.json"), encoding="utf-8") as file:
        launch = json.load(file)["configurations"][0]
    with open(os.path.join(ROOT, ".vscode", "tasks.json"), encoding="utf-8") as file:
        tasks = {task["label"]: task["command"] for task in json.load(file)["tasks"]}
    claim(tasks.get(launch["preLaunchTask"]) == BUILD, f"F5 builds first: {BUILD}", str(tasks))
    program = in_folder(launch["program"])
    for what, there in (("gdb", shutil.which("gdb")), (f"{program}: run {BUILD}", os.access(program, os.X_OK))):
        if not there:
            print(f"test_debug: there is no {what}", file=sys.stderr)
            return 2

    began, gdb = time.monotonic(), Gdb()
    for setup in launch["setupCommands"]:
        claim(gdb.command(in_folder(setup["text"])).startswith("^done"), f"gdb takes: {setup['text']}")
    for command in (f"-environment-cd {in_folder(launch['cwd'])}", f"-file-exec-and-symbols {program}",
                    f"-exec-arguments {' '.join(launch['args'])}", "-break-insert main",
                    *(f"-gdb-set env {variable['name']} = {variable['value']}" for variable in launch["environment"])):
        answer = gdb.command(command)
        claim(answer.startswith("^done"), f"gdb takes: {command.replace(ROOT, '.')}", answer)
    gdb.command("-exec-run")
    claim('func="main"' in gdb.stopped(), "it starts, and stops in main, from where the extension lets it go on")
    gdb.command("-exec-continue")
    stop = gdb.stopped()
    claim('reason="breakpoint-hit"' in stop and 'func="layernorm_backward_kernel"' in stop
          and re.search(r'fullname="[^"]*/train_gpt\.cu"', stop),
          "then in layernorm_backward_kernel, in train_gpt.cu", stop)
    where = [gdb.value(name) for name in ("blockIdx.x", "threadIdx.x", "blockIdx.y", "threadIdx.y")]
    claim(where == ["1", "3", "0", "0"], "at block 1, thread 3", str(where))
    seconds = time.monotonic() - began
    gdb.command("-exec-next")
    step = gdb.stopped()
    claim('reason="end-stepping-range"' in step and 'func="layernorm_backward_kernel"' in step,
          "next goes on in it", step)
    gdb.command("-exec-next")
    gdb.stopped()
    numbers = gdb.value("inp[first]@4") or ""
    claim(re.fullmatch(r"\{(-?[\d.e-]+(, )?){4}\}", numbers), "inp[first]@4 prints numbers", numbers)
    claim(gdb.value("threadIdx.x") == "3" and gdb.value("first") is not None,
          "in the same thread; its locals can be read")
    gdb.process.kill()
    print(f"{passed} passed, {failed} failed; {seconds:.1f} s from gdb's start to the kernel")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Runs .vscode/launch.json's first configuration in gdb as VS Code's C++ extension does: F5 stops where it says.

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

sys.dont_write_bytecode = True
from claims import claim, claim_equal, finish

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMEOUT = 120       # seconds


class Gdb:
    def __init__(self):
        command = ["timeout", str(TIMEOUT), "gdb", "--interpreter=mi", "--quiet", "--nx"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def until(self, pattern):
        """Returns the next line that matches."""
        for line in self.process.stdout:
            if re.search(pattern, line):
                return line
        raise RuntimeError(f"gdb ended before {pattern}")

    def command(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.until(r"^\^")

    def stop_after(self, command):
        self.command(command)
        return self.until(r"^\*stopped")

    def value(self, expression):
        found = re.search(r'value="(.*)"', self.command(f'-data-evaluate-expression "{expression}"'))
        return found[1] if found else ""


def read(name):
    with open(os.path.join(ROOT, ".vscode", name), encoding="utf-8") as file:
        return json.loads(file.read().replace("${workspaceFolder}", ROOT))


launch = read("launch.json")["configurations"][0]
tasks = {task["label"]: task["command"] for task in read("tasks.json")["tasks"]}
claim_equal(tasks.get(launch["preLaunchTask"]), "make debug PRECISION=fp32", "F5 builds first")
if not shutil.which("gdb") or not os.access(launch["program"], os.X_OK):
    sys.exit(f"test_debug needs gdb, and {launch['program']}: run make debug PRECISION=fp32")
gdb = Gdb()
for text in (*(setup["text"] for setup in launch["setupCommands"]), f"-environment-cd {launch['cwd']}",
             f"-file-exec-and-symbols {launch['program']}", f"-exec-arguments {' '.join(launch['args'])}",
             "-break-insert main",
             *(f"-gdb-set env {variable['name']} = {variable['value']}" for variable in launch["environment"])):
    answer = gdb.command(text)
    claim(answer.startswith("^done"), f"gdb accepts: {text.replace(ROOT, '.')}", answer)
stop = gdb.stop_after("-exec-run")
claim('func="main"' in stop, "the program stops in main, from where the extension continues", stop)
stop = gdb.stop_after("-exec-continue")
claim('reason="breakpoint-hit"' in stop and 'func="layernorm_backward_kernel"' in stop
      and re.search(r'fullname="[^"]*/train_gpt\.cu"', stop), "then in layernorm_backward_kernel", stop)
where = [gdb.value(name) for name in ("blockIdx.x", "threadIdx.x", "blockIdx.y", "threadIdx.y")]
claim_equal(where, ["1", "3", "0", "0"], "at block 1, thread 3")
for _ in range(2):
    stop = gdb.stop_after("-exec-next")
claim("layernorm_backward_kernel" in stop and "end-stepping-range" in stop, "next stays in the kernel", stop)
claim(re.fullmatch(r"\{(-?[\d.e-]+(, )?){4}\}", gdb.value("inp[first]@4")), "inp[first]@4 prints numbers")
claim_equal(gdb.value("threadIdx.x"), "3", "in the same thread")
gdb.process.kill()
finish()

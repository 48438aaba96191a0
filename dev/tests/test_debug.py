#!/usr/bin/env python3
"""Tests that F5 in VS Code stops in the kernel that .vscode/launch.json names. Needs gdb.

    make debug PRECISION=fp32 && python3 dev/tests/test_debug.py

Runs the first configuration of launch.json over gdb's machine interface (MI), with the commands of VS Code's C++
extension in its order: set-up commands, the program, a breakpoint at main.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testing import expect, expect_equal, finish

ROOT = str(Path(__file__).resolve().parents[2])
TIMEOUT = 120       # seconds


def read(name):
    """Returns the JSON of a file in .vscode, with ${workspaceFolder} replaced."""
    return json.loads(Path(ROOT, ".vscode", name).read_text().replace("${workspaceFolder}", ROOT))


launch = read("launch.json")["configurations"][0]
tasks = {task["label"]: task["command"] for task in read("tasks.json")["tasks"]}
expect_equal(tasks.get(launch["preLaunchTask"]), "make debug PRECISION=fp32", "F5 first builds the debug program")
if not shutil.which("gdb") or not os.access(launch["program"], os.X_OK):
    sys.exit(f"test_debug needs gdb and {launch['program']}: run make debug PRECISION=fp32")
setup = [*(step["text"] for step in launch["setupCommands"]), f"-environment-cd {launch['cwd']}",
         f"-file-exec-and-symbols {launch['program']}", f"-exec-arguments {' '.join(launch['args'])}",
         "-break-insert main",
         *(f"-gdb-set env {variable['name']} = {variable['value']}" for variable in launch["environment"])]
places = [f"-data-evaluate-expression {name}" for name in ("blockIdx.x", "threadIdx.x", "blockIdx.y", "threadIdx.y")]
commands = [*setup, "-exec-run", "-exec-continue", *places, "-exec-next", "-exec-next",
            "-data-evaluate-expression inp[first]@4", places[1], "-gdb-exit"]
answers = subprocess.run(["gdb", "--interpreter=mi", "--quiet", "--nx"], input="\n".join(commands), text=True,
                         capture_output=True, timeout=TIMEOUT).stdout
for command, answer in zip(setup, re.findall(r"^\^.*", answers, re.MULTILINE)):
    expect(answer.startswith("^done"), f"gdb accepts: {command.replace(ROOT, '.')}", answer)
in_main, in_kernel, *_, stepped = re.findall(r"^\*stopped.*", answers, re.MULTILINE)
values = re.findall(r'^\^done,value="(.*)"', answers, re.MULTILINE)
expect('func="main"' in in_main, "the program first stops in main, where the extension continues it", in_main)
expect('reason="breakpoint-hit"' in in_kernel and 'func="layernorm_backward_kernel<3>"' in in_kernel
       and re.search(r'fullname="[^"]*/train_gpt\.cu"', in_kernel),
       "the program then stops in layernorm_backward_kernel of train_gpt.cu", in_kernel)
expect_equal(values[:4], ["1", "3", "0", "0"], "it stops at block 1, thread 3")
expect("layernorm_backward_kernel" in stepped and "end-stepping-range" in stepped,
       "gdb's next stays in the kernel", stepped)
expect(re.fullmatch(r"\{(-?[\d.e-]+(, )?){4}\}", values[4]), "inp[first]@4 prints four numbers")
expect_equal(values[5], "3", "gdb's next stays in the same thread")
finish()

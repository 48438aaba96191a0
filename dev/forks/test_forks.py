#!/usr/bin/env python3
"""Tests of forks.py on a small tree: copies, patches that no longer apply, new patches, and counted lines.

    python3 dev/forks/test_forks.py
"""
import contextlib
import io
import sys
from pathlib import Path

import forks
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from testing import expect, expect_equal, run_tests, write

LINES = [f"line {n}\n" for n in range(1, 41)]
CHANGED = {1: "first\n", 20: "twenty\ntwenty more\n", 39: ""}


def run(*arguments):
    """Runs a command of forks.py; returns its exit code and its output."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            forks.main(*arguments)
        except SystemExit as end:
            code = end.code
    return code, output.getvalue()


def test_forks():
    forks.ROOT = Path.cwd()
    copy, patch = Path("build/forks/mine"), Path("dev/forks/mine.patch")
    write("train_gpt.cu", "".join(LINES))
    write("build/host/data.o", "object")
    code, output = run("copy", "mine")
    expect(code == 2 and "F=mine" in output, "a fork without a patch is an error", output)
    write(patch, "what it changes\n")
    expect_equal(run("copy", "mine"), (0, ""), "a description begins a fork")
    expect((copy / "build/host/data.o").exists(), "the copy has the compiled host modules")

    write(copy / "train_gpt.cu", "".join(CHANGED.get(n, line) for n, line in enumerate(LINES)))
    write(copy / "gpt/new.h", "1\n2\n")
    write(copy / "gpt/new.h.orig", "a backup\n")
    write(copy / "data/text.bin", "data")
    write("gpt/later.h", "a file that the tree got after the copy was made\n")
    run("patch", "mine")
    written = patch.read_text()
    expect_equal(forks.changes(written), {"gpt/new.h": [2, 2, 0], "train_gpt.cu": [4, 3, 3]},
                 "a patch has a fork's own sources; a hunk counts as max(added, removed)")
    expect(written.startswith("what it changes\n--- /dev/null\n+++ b/gpt/new.h\n@@"), "it has no time stamps", written)
    code, output = run("copy", "mine")
    expect("exists" in output and not (copy / "gpt/later.h").exists(), "an existing copy is used as it is", output)
    run("copy", "mine", "again")
    again = Path("again/mine")
    expect(all((again / name).read_bytes() == (copy / name).read_bytes() for name in ("train_gpt.cu", "gpt/new.h")),
           "a new copy has the changes")
    again.rename("build/forks/mine.new")
    copy.rename("build/forks/old")
    Path("build/forks/mine.new").rename(copy)
    run("patch", "mine")
    expect_equal(patch.read_text(), written, "the patch of an unchanged copy is the same file")

    stale = LINES[:19] + ["another\n"] + LINES[20:]
    write("train_gpt.cu", "".join(stale))
    code, output = run("copy", "mine", "stale")
    expect(code == 1 and "train_gpt.cu: hunk 2, line 18" in output and "hunk 1" not in output,
           "a hunk that does not apply is named with its file and line", output)
    expect(not Path("stale/mine").exists() and Path("build/forks/mine.rejected/train_gpt.cu.rej").exists(),
           "the copy is renamed to mine.rejected")
    Path("train_gpt.cu").unlink()
    expect("train_gpt.cu: does not exist" in run("copy", "mine", "stale")[1], "a missing file is named")

    write("dev/forks/README.md", f"before\n{forks.MARKERS[0]}\n{forks.MARKERS[1]}\nafter\n")
    expect_equal(run("check")[0], 1, "a table without the fork is found")
    run("table")
    expect("| `mine` | 6 | +5 −3 | 2 | 6 | 0 | 0 | 0 | – |" in Path("dev/forks/README.md").read_text(), "the table")
    expect_equal(run("check")[0], 0, "the table fits the patches")
    write(patch, written.replace("+first", "+first\n+second").replace("@@ -1,5 +1,5 @@", "@@ -1,5 +1,6 @@"))
    expect_equal(run("check")[0], 1, "a table that does not fit a patch is found")


if __name__ == "__main__":
    run_tests(globals())

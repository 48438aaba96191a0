#!/usr/bin/env python3
"""Forks of this program: each is a patch in this folder, which is applied to a copy of the tree. `make fork`,
`make fork-patch` and `make test-forks` use this script; README.md shows how to write a fork.

    forks.py list                lists the forks
    forks.py copy NAME [FOLDER]  makes FOLDER/NAME, unless it exists; FOLDER: build/forks
    forks.py patch NAME          writes NAME.patch from build/forks/NAME
    forks.py train NAME FOLDER   trains in FOLDER/NAME, whose test program is built, and checks the validation loss
    forks.py table [--time]      writes the table of README.md; --time: also builds each program, for the last column
    forks.py check               fails if README.md's table does not fit the patches
"""
import fnmatch
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("Makefile", "README.md", "train_gpt.cu", "test_gpt.cu", "gpt", "dev", "scripts")
IGNORED = ("__pycache__", "*.orig", "*.rej", "*~", ".*.sw?", "mine")
# The unpatched program reaches 2.25. A model that uses only the last token cannot reach less than 2.48, the
# conditional entropy of this text's characters; an untrained model has 5.5.
LIMIT = 2.4
TRAIN = ("train --data data/shakespeare.txt --layers 2 --heads 4 --channels 64 --context 32 --micro-batch 16 "
         "--steps 200 --min-lr 1e-4 --warmup 10 --beta2 0.99 --eval-every 200 --eval-sequences 200 ")
# Llama has no Muon. On two GPUs AdamW has twice the tokens, and reaches 2.25 too.
OPTIMIZERS = {"llama": "--lr 0.006 --gpus 2 --zero 3 --recompute selective"}
MUON = "--optimizer muon --lr 0.02"
PARTS = {"program": r"train_gpt\.cu|gpt/", "reference": "dev/reference/", "tests": r"test_gpt\.cu|dev/tests/",
         "other": ""}
MARKERS = "<!-- written by forks.py table -->", "<!-- end of the table -->"


def fail(message, code=1):
    print(message, file=sys.stderr)
    sys.exit(code)


def patch_file(name):
    return ROOT / f"dev/forks/{name}.patch"


def names():
    return sorted(path.stem for path in (ROOT / "dev/forks").glob("*.patch"))


def description(name):
    """Returns the text before the first file in a patch."""
    return re.split(r"^--- ", patch_file(name).read_text(), maxsplit=1, flags=re.M)[0]


def listing():
    return "\n".join(f"  {name:<8} {description(name).split(chr(10))[0]}" for name in names())


# ---- copies and patches

def copy_tree(to, sources):
    for source in (ROOT / name for name in sources):
        if source.is_dir():
            shutil.copytree(source, to / source.name, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
        elif source.exists():
            shutil.copy2(source, to / source.name)


def make_copy(name, folder, host=True):
    """Makes folder/name: the tree with a patch applied. Its build/base has the sources without the patch, so that a
    later patch has only the fork's own changes. host: with the compiled host modules."""
    new = folder / f".{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    (new / "build/base").mkdir(parents=True)
    copy_tree(new, (*SOURCES, "data"))
    copy_tree(new / "build/base", SOURCES)
    if host and (ROOT / "build/host").exists():
        shutil.copytree(ROOT / "build/host", new / "build/host")
    if (ROOT / "build/deps").exists():
        (new / "build/deps").symlink_to(ROOT / "build/deps")
    if name in names():
        apply(name, new)
    new.rename(folder / name)


def apply(name, new):
    """Applies a patch in the folder `new`. If a hunk fails, renames the folder, prints what to do, and exits."""
    if not changes(patch_file(name).read_text()):
        return    # a new fork: a description without changes
    if not shutil.which("patch"):
        fail("make fork needs the program `patch`, from the package of the same name", 2)
    result = subprocess.run(["patch", "-p1", "--force", "--no-backup-if-mismatch", "-i", patch_file(name)], cwd=new,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    file, hunks = "", []
    for line in result.stdout.splitlines():
        header = re.match(r"patching file (.*)|\|--- a/(.*)", line)
        hunk = re.match(r"Hunk #(\d+) (?:FAILED at (\d+)|succeeded at (\d+) (with fuzz))", line)
        if header:
            file = header[1] or header[2]
        elif hunk:
            hunks.append(f"  {file}: hunk {hunk[1]}, line {hunk[2] or hunk[3] + ', applied: its context has changed'}")
        elif line.startswith("No file to patch"):
            hunks.append(f"  {file}: does not exist")
    if hunks or result.returncode:
        print(f"{name}.patch does not fit this tree:", *(hunks or [result.stdout]), sep="\n")
    if result.returncode:
        rejected = ROOT / f"build/forks/{name}.rejected"
        shutil.rmtree(rejected, ignore_errors=True)
        rejected.parent.mkdir(parents=True, exist_ok=True)
        new.rename(rejected)
        fail(f"To update it: make the changes of the .rej files in build/forks/{name}.rejected by hand, rename that "
             f"folder to {name}, and run `make fork-patch F={name}`.")


def source_files(folder):
    """Returns the paths of the files that a patch may change."""
    paths = [path.relative_to(folder) for name in SOURCES for path in [folder / name, *(folder / name).rglob("*")]
             if path.is_file()]
    return {path for path in paths if not any(fnmatch.fnmatch(part, i) for part in path.parts for i in IGNORED)}


def write_patch(name):
    """Writes NAME.patch: its description, and how build/forks/NAME differs from the tree that it is a copy of."""
    copy, lines = ROOT / f"build/forks/{name}", [description(name)]
    base = copy / "build/base"
    if not base.exists():
        fail(f"build/forks/{name} does not exist; `make fork F={name}` makes it", 2)
    for path in sorted(source_files(base) | source_files(copy)):
        sides = {f"a/{path}": base / path, f"b/{path}": copy / path}
        sides = [(label, file) if file.exists() else ("/dev/null", "/dev/null") for label, file in sides.items()]
        result = subprocess.run(["diff", "-u", *(f"--label={label}" for label, _ in sides), *(f for _, f in sides)],
                                stdout=subprocess.PIPE, text=True)
        if result.returncode > 1:
            fail(f"{path}: a patch cannot hold binary files")
        lines.append(result.stdout)
    patch_file(name).write_text("".join(lines))


# ---- test and table

def train(name, folder):
    program = [folder / name / "build/test/fp32-1/test_gpt", "--as-train-gpt"]
    options = (TRAIN + OPTIMIZERS.get(name, MUON)).split()
    output = subprocess.run(program + options, cwd=folder / name, stdout=subprocess.PIPE, text=True).stdout
    loss = re.search(r"^step 200: validation loss ([\d.]+)", output, re.M)
    if not loss or not float(loss[1]) < LIMIT:
        fail(f"{output}\nFAILED  {name}: expected a validation loss below {LIMIT} after 200 steps")
    print(f"ok      {name}: validation loss {loss[1]} after 200 steps, below {LIMIT}")


def changes(text):
    """Returns {path: [lines, added, removed]} of a patch. A hunk counts as max(added, removed) lines, as in
    `diffstat -m`."""
    found, path, old, new = {}, "", 0, 0
    for line in text.splitlines():
        header = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
        if old + new > 0:
            if line[:1] != "\\":    # not "\ No newline at end of file"
                old, new = old - (line[:1] != "+"), new - (line[:1] != "-")
                hunk[line[:1] == "-"] += line[:1] in ("+", "-")
            if old + new == 0:
                found[path] = [a + b for a, b in zip(found.get(path, [0] * 3), [max(hunk), *hunk])]
        elif header:
            old, new = (int(n or 1) for n in header.groups())
            hunk = [0, 0]
        elif line.startswith(("--- a/", "+++ b/")):
            path = line[6:]
    return found


def build_seconds(name):
    """Returns the CPU time to build train_gpt in a new copy, with all host modules."""
    folder = ROOT / "build/forks-time"
    shutil.rmtree(folder / name, ignore_errors=True)
    make_copy(name, folder, host=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["make", "-C", folder / name, "DEVICE=cpu", "build/cpu-fp32/train_gpt"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(readme, time=False):
    """Returns README.md's text with a new table; without `time`, the build times are kept."""
    before, _, rest = readme.partition(MARKERS[0])
    old, _, after = rest.partition(MARKERS[1])
    builds = dict(re.findall(r"^\| `(.*?)` .*\| (.*?) \|$", old, re.M))
    base = build_seconds("unpatched") if time else 0
    lines = ["", f"| fork | lines | added, removed | files | {' | '.join(PARTS)} | build |", f"|---{'|--:' * 8}|"]
    for name in names():
        found = changes(patch_file(name).read_text())
        parts = dict.fromkeys(PARTS, 0)
        for path, (changed, _, _) in found.items():
            parts[next(part for part, pattern in PARTS.items() if re.match(pattern, path))] += changed
        total, added, removed = map(sum, zip([0, 0, 0], *found.values()))
        if time:
            seconds = build_seconds(name)
            builds[name] = f"{seconds:.0f} s, {seconds / base:.2f} ×"
        cells = [f"`{name}`", total, f"+{added} −{removed}", len(found), *parts.values(), builds.get(name, "–")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([before + MARKERS[0], *lines, MARKERS[1] + after])


def main(command="", name="", folder="build/forks"):
    readme, folder = ROOT / "dev/forks/README.md", ROOT / folder
    if command in ("copy", "patch", "train") and name not in names():
        fail(f"F={name}: expected one of these forks, or a new one: "
             f"echo 'what it changes' > dev/forks/NAME.patch\n{listing()}", 2)
    if command == "list":
        print(f"make fork F=NAME trains a fork of this program:\n{listing()}")
    elif command == "copy" and (folder / name).exists():
        print(f"build/forks/{name} exists and is used as it is; for a new copy: rm -r build/forks/{name}")
    elif command == "copy":
        make_copy(name, folder)
    elif command == "patch":
        write_patch(name)
    elif command == "train":
        train(name, folder)
    elif command == "table":
        readme.write_text(table(readme.read_text(), time=name == "--time"))
    elif command == "check" and table(readme.read_text()) != readme.read_text():
        fail("dev/forks/README.md: the table does not fit the patches: run `python3 dev/forks/forks.py table`")
    elif command != "check":
        fail(__doc__, 2)


if __name__ == "__main__":
    main(*sys.argv[1:])

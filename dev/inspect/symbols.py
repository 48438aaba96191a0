"""Lines of source and kernels' names for a program's addresses, from its debug information."""
import os
import re
import subprocess
from dataclasses import dataclass


class Mistake(Exception):
    """The user's; the message names the flag or file, what was found and what was expected."""


@dataclass(frozen=True)
class Place:
    """A line: one that an instruction was compiled from, or the one that an access belongs to."""
    function: str       # demangled, with parameters
    file: str           # relative to the root where it lies below that
    line: int
    via: tuple = ()     # the accessors' lines between it and the instruction, innermost first, as "file:line"

    def __str__(self):
        return f"{self.file}:{self.line}"


def run_tool(command, text):
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise Mistake(f"{command[0]} was not found on PATH; it comes with binutils") from None
    except subprocess.CalledProcessError as error:
        raise Mistake(f"{' '.join(command)} failed: {error.stderr.strip()}") from None


# ---- names

def demangled(symbols):
    """Returns {mangled symbol: the function with its parameters}."""
    symbols = sorted(set(filter(None, symbols)))
    names = run_tool(["c++filt"], "\n".join(symbols)).splitlines() if symbols else []
    return dict(zip(symbols, names))


def outside_brackets(text):
    """Yields the positions in text that lie in no brackets."""
    depth = 0
    for i, sign in enumerate(text):
        depth -= sign in ">)"
        if depth == 0:
            yield i
        depth += sign in "<("


def bare_name(function):
    """Returns a function's name without parameters, return type and namespace; template arguments stay."""
    text = function.replace("(anonymous namespace)::", "")
    text = text[:next((i for i in outside_brackets(text) if text[i] == "(" and i > 0), len(text))]
    return text[max((i + 1 for i in outside_brackets(text) if text[i] in " :"), default=0):]


# ---- lines

def is_ours(path):
    """Whether a file is the emulator's, the recorder's or the system's: not where the user's code accesses memory."""
    return bool(re.search(r"(^|/)dev/cpu/|(^|/)dev/inspect/[^/]*\.h$|^/usr/|^\?\?$", path))


class Symbols:
    """The lines of call stacks: a stack is a list of return addresses, the access itself first."""

    def __init__(self, program, stacks, root="."):
        self.root = os.path.realpath(root)
        pcs = sorted({pc for stack in stacks for pc in stack})
        self.frames = dict(zip(pcs, self.look_up(program, pcs)))
        lines = {}
        for pc in pcs:
            for frame in self.frames[pc]:
                lines.setdefault(frame.function, set()).add((frame.file, frame.line))
        # Functions that access memory in one line only, such as load() and store().
        self.accessors = {function for function, places in lines.items() if len(places) == 1}

    def look_up(self, program, pcs):
        """Returns the frames of each address, innermost first. The byte before a return address lies in the call."""
        program = os.path.join(self.root, program)
        if not os.path.exists(program):
            raise Mistake(f"the recorded program {program} does not exist; its debug information names the lines")
        if not pcs:
            return []
        addresses = "\n".join(f"{pc - 1:x}" for pc in pcs) + "\n"
        frames = []
        lines = iter(run_tool(["addr2line", "-i", "-f", "-C", "-a", "-e", program], addresses).splitlines())
        for line in lines:
            if re.fullmatch(r"0x[0-9a-f]+", line):
                frames.append([])
                continue
            place = re.match(r"(.*):(\d+|\?)", next(lines))
            frames[-1].append(Place(line, self.short(place[1]), int(place[2]) if place[2] != "?" else 0))
        return [[frame for frame in chain if not is_ours(frame.file)] for chain in frames]

    def short(self, path):
        path = os.path.realpath(os.path.join(self.root, path)) if path != "??" else path
        return os.path.relpath(path, self.root) if path.startswith(self.root + os.sep) else path

    def place(self, stack, kernel=""):
        """Returns the line that an access belongs to: the innermost one that is not in an accessor. kernel: the
        demangled name of a function that is not skipped, and whose callers do not count."""
        chain = [frame for pc in stack for frame in self.frames[pc]]
        if not chain:
            return Place("", "?", 0)
        end = next((i for i, frame in enumerate(chain) if frame.function == kernel), len(chain) - 1)
        via = []
        for frame in chain[:end]:
            if frame.function not in self.accessors:
                break
            via.append(str(frame))
        frame = chain[len(via)]
        return Place(frame.function, frame.file, frame.line, tuple(via))


class Sources:
    """Lines of source files, read once each."""

    def __init__(self, root="."):
        self.root, self.files = root, {}

    def lines(self, file):
        if file not in self.files:
            try:
                with open(os.path.join(self.root, file), encoding="utf-8", errors="replace") as text:
                    self.files[file] = text.read().splitlines()
            except OSError:
                self.files[file] = []
        return self.files[file]

    def text(self, file, line):
        lines = self.lines(file)
        return lines[line - 1] if 0 < line <= len(lines) else ""

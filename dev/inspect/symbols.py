"""Maps the addresses of a program to source lines and function names, by its debug information."""
import functools
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile


class Mistake(Exception):
    """A user error. The message names the flag or file, what was expected and what was found."""


@dataclass(frozen=True)
class Place:
    """A source line: the origin of an instruction, or the line that an access is attributed to."""
    function: str       # demangled, with parameters
    file: str           # relative to the root if below it
    line: int
    via: tuple = ()     # lines of skipped accessors (see Symbols), innermost first, as "file:line"

    def __str__(self):
        return f"{self.file}:{self.line}"


def run_tool(command, package, text=""):
    """Runs a program of a package with `text` as its input; returns the process."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Mistake(f"{command[0]}: not found; install {package}") from None
    except subprocess.CalledProcessError as error:
        raise Mistake(f"{' '.join(command)} failed: {error.stderr.strip()}") from None


# ---- names

def demangled(symbols):
    """Returns {mangled symbol: demangled name with parameters}."""
    symbols = sorted(set(filter(None, symbols)))
    names = run_tool(["c++filt"], "binutils", "\n".join(symbols)).stdout.splitlines() if symbols else []
    return dict(zip(symbols, names))


def outside_brackets(text):
    """Yields the positions in text that are outside all brackets."""
    depth = 0
    for i, sign in enumerate(text):
        depth -= sign in ">)"
        if depth == 0:
            yield i
        depth += sign in "<("


def bare_name(function):
    """Returns a function's name without parameters, return type and namespace, but with template arguments."""
    text = function.replace("(anonymous namespace)::", "")
    text = text[:next((i for i in outside_brackets(text) if text[i] == "(" and i > 0), len(text))]
    return text[max((i + 1 for i in outside_brackets(text) if text[i] in " :"), default=0):]


# ---- lines

def is_internal(path):
    """Returns whether a file belongs to the emulator, the recorder or the system, not to the user's program."""
    return bool(re.search(r"(^|/)dev/cpu/|(^|/)dev/inspect/[^/]*\.h$|^/usr/|^\?\?$", path))


@functools.cache
def short(path):
    """Returns a path relative to the working directory, if it is below that."""
    path = os.path.realpath(path) if path != "??" else path
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


class Symbols:
    """Source lines of call stacks. A stack is a list of return addresses, innermost (the access) first."""

    def __init__(self, program, stacks):
        pcs = sorted({pc for stack in stacks for pc in stack})
        self.frames = dict(zip(pcs, self.look_up(program, pcs)))
        lines = Counter(frame.function for frame in {frame for chain in self.frames.values() for frame in chain})
        # Functions with a single line that accesses memory, such as load() and store().
        self.accessors = {function for function, count in lines.items() if count == 1}

    @staticmethod
    def look_up(program, pcs):
        """Returns the (inlined) frames of each address, innermost first. Looks up the byte before a return address,
        which belongs to the call instruction."""
        if not os.path.exists(program):
            raise Mistake(f"recorded program {program}: No such file; its debug information is needed")
        if not pcs:
            return []
        addresses = "\n".join(f"{pc - 1:x}" for pc in pcs) + "\n"
        frames = []
        found = run_tool(["addr2line", "-i", "-f", "-C", "-a", "-e", program], "binutils", addresses)
        lines = iter(found.stdout.splitlines())
        for line in lines:
            if re.fullmatch(r"0x[0-9a-f]+", line):
                frames.append([])
                continue
            place = re.match(r"(.*):(\d+|\?)", next(lines))
            frames[-1].append(Place(line, short(place[1]), int(place[2]) if place[2] != "?" else 0))
        return [[frame for frame in chain if not is_internal(frame.file)] for chain in frames]

    def chain(self, stack, kernel):
        """Returns the frames of a stack from the innermost one to the kernel's."""
        frames = [frame for pc in stack for frame in self.frames[pc]]
        return frames[:1 + next((i for i, frame in enumerate(frames) if frame.function == kernel), len(frames))]

    def place(self, stack, kernel=""):
        """Returns the line that an access is attributed to: the innermost one outside accessors. kernel: demangled name
        of the kernel; it is never skipped as an accessor, and its callers are ignored."""
        chain = self.chain(stack, kernel)
        if not chain:
            return Place("", "?", 0)
        via = [str(frame) for frame in takewhile(lambda frame: frame.function in self.accessors, chain[:-1])]
        return replace(chain[len(via)], via=tuple(via))

    def lines_within(self, stack, kernel):
        """Returns [(file, line)] of an access and of the calls to it, from the innermost one to that in the kernel."""
        return [(frame.file, frame.line) for frame in self.chain(stack, kernel)]


class Sources:
    """Lines of source files, cached."""

    def __init__(self):
        self.files = {}

    def lines(self, file):
        if file not in self.files:
            try:
                with open(file, encoding="utf-8-sig", errors="replace") as text:
                    self.files[file] = text.read().split("\n")      # a form feed ends no line
            except OSError:
                self.files[file] = []
        return self.files[file]

    def text(self, file, line):
        lines = self.lines(file)
        return lines[line - 1] if 0 < line <= len(lines) else ""

"""From a program's addresses to lines of source, through its debug information; and kernels' names."""
import os
import re
import subprocess
from dataclasses import dataclass


class Mistake(Exception):
    """The user's; the message names the flag or file, what was found and what was expected."""


@dataclass(frozen=True)
class Frame:
    function: str       # demangled, with parameters
    file: str           # from the source's root where it lies below that
    line: int


@dataclass(frozen=True)
class Place:
    """The line that an access belongs to."""
    function: str
    file: str
    line: int
    via: tuple = ()     # "file:line" of the accessors between it and the instruction, innermost first

    def __str__(self):
        return f"{self.file}:{self.line}"


UNKNOWN = Place("", "?", 0)


def run_tool(command, text):
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise Mistake(f"{command[0]} was not found on PATH; it comes with binutils") from None
    except subprocess.CalledProcessError as error:
        raise Mistake(f"{' '.join(command)} failed: {error.stderr.strip()}") from None


# ---- names

def demangled(symbols):
    """{mangled symbol: with parameters}"""
    symbols = sorted(set(filter(None, symbols)))
    names = run_tool(["c++filt"], "\n".join(symbols)).splitlines() if symbols else []
    return dict(zip(symbols, names))


def outside_brackets(text, opening="<(", closing=">)"):
    """The places in text that lie in no brackets."""
    depth = 0
    for i, sign in enumerate(text):
        if sign in closing:
            depth -= 1
        if depth == 0:
            yield i
        if sign in opening:
            depth += 1


def bare_name(function):
    """Without parameters, return type and namespace; template arguments stay: "kernel<64>"."""
    text = function.replace("(anonymous namespace)::", "")
    end = next((i for i in outside_brackets(text) if text[i] == "(" and i > 0), len(text))
    text = text[:end]
    begin = max((i + 1 for i in outside_brackets(text) if text[i] in " :"), default=0)
    return text[begin:]


def without_arguments(name):
    """kernel<64> -> kernel"""
    return name.split("<")[0]


# ---- lines

def is_ours(path):
    """Whether a frame is in the emulator, the recorder or the system: not where the user's code accesses memory."""
    return bool(re.search(r"(^|/)dev/cpu/|(^|/)dev/inspect/[^/]*\.h$|^/usr/|^\?\?$", path))


class Symbols:
    """What the debug information of a program says about calls: a stack is a tuple of return addresses, the access
    itself first. sources: {file that was compiled: the user's file, with the same lines}"""

    def __init__(self, program, stacks, sources=None, root="."):
        self.root, self.sources = os.path.realpath(root), sources or {}
        self.stacks = {tuple(stack) for stack in stacks}
        pcs = sorted({pc for stack in self.stacks for pc in stack})
        self.frames = dict(zip(pcs, self.look_up(program, pcs)))
        self.accessors = self.find_accessors()

    def look_up(self, program, pcs):
        """Frames of each address, innermost first. A return address is after its call: one byte before it lies in the call."""
        if not pcs:
            return []
        program = os.path.join(self.root, program)
        if not os.path.exists(program):
            raise Mistake(f"the recorded program {program} does not exist; its debug information names the lines")
        addresses = "\n".join(f"{pc - 1:x}" for pc in pcs) + "\n"
        frames = []
        lines = iter(run_tool(["addr2line", "-i", "-f", "-C", "-a", "-e", program], addresses).splitlines())
        for line in lines:
            if re.fullmatch(r"0x[0-9a-f]+", line):
                frames.append([])
                continue
            place = re.match(r"(.*):(\d+|\?)", next(lines))
            frames[-1].append(Frame(line, self.short(place[1]), int(place[2]) if place[2] != "?" else 0))
        return [[frame for frame in chain if not is_ours(frame.file)] for chain in frames]

    def short(self, path):
        """As the user writes it."""
        if path == "??":
            return path
        path = os.path.realpath(os.path.join(self.root, path))
        short = os.path.relpath(path, self.root) if path.startswith(self.root + os.sep) else path
        return self.sources.get(short, self.sources.get(path, short))

    def find_accessors(self):
        """Functions that access memory in one line only, such as load() and store()."""
        lines = {}
        for stack in self.stacks:
            for pc in stack:
                for frame in self.frames[pc]:
                    lines.setdefault(frame.function, set()).add((frame.file, frame.line))
        return {function for function, places in lines.items() if len(places) == 1}

    def chain(self, stack, kernel):
        """The frames of a stack, innermost first, as far as the kernel, without what launched it."""
        frames = [frame for pc in stack for frame in self.frames.get(pc, [])]
        end = next((i for i, frame in enumerate(frames) if frame.function == kernel), len(frames) - 1)
        return frames[:end + 1]

    def place(self, stack, kernel=""):
        """The line that an access belongs to. kernel: demangled, which is never skipped."""
        chain = self.chain(stack, kernel)
        if not chain:
            return UNKNOWN
        via = []
        for frame, caller in zip(chain, chain[1:] + [None]):
            if frame.function not in self.accessors or frame.function == kernel or caller is None:
                break
            via.append(f"{frame.file}:{frame.line}")
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

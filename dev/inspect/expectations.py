"""What a program's author expects of its kernels: a Python file, given by --costs. README.md lists what it may have."""
import importlib.util
import os
from dataclasses import dataclass

from estimate import Softmax
from symbols import Mistake

UNITS = ("bytes", "FLOPs")
RATIOS = ("sectors", "wavefronts", "cost")


@dataclass(frozen=True)
class Launch:
    """One launch, as formulas see it."""
    name: str               # with template arguments: "kernel<64>"
    demangled: str          # with the types of its parameters
    grid: list
    block: list
    threads: int            # of a block
    integers: list          # its arguments that are whole numbers, in order
    tensor_flops: float     # that tensor cores did


@dataclass(frozen=True)
class Cost:
    unit: str               # of UNITS
    amount: float
    line: str               # where it comes from, in short


@dataclass(frozen=True)
class Allowance:
    kernel: str             # its name; without template arguments for all of them
    what: str               # of RATIOS
    allowed: float
    reason: str


class Expectations:
    """Those of a file; without one nothing is expected."""

    def __init__(self, path=None, shape=None):
        self.path, self.shape, self.module = path, shape or {}, None
        if path:
            self.module = self.load(path)
        self.allowances = [self.allowance(entry) for entry in self.get("ALLOWANCES", [])]
        self.unnecessary_barriers = self.get("UNNECESSARY_BARRIERS", {})

    @staticmethod
    def load(path):
        if not os.path.exists(path):
            raise Mistake(f"--costs {path}: No such file")
        spec = importlib.util.spec_from_file_location("costs", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise Mistake(f"--costs {path}: {type(error).__name__}: {error}") from None
        return module

    def get(self, name, otherwise=None):
        return getattr(self.module, name, otherwise)

    def call(self, name, *arguments):
        """What the file's function returns; None if it has no such function."""
        function = self.get(name)
        try:
            return function(*arguments) if function else None
        except (LookupError, TypeError, ValueError) as error:
            of = f" of {arguments[0].name}" if isinstance(arguments[0], Launch) else ""
            raise Mistake(f"--costs {self.path}: {name}(){of}: {error}") from None

    def allowance(self, entry):
        if len(entry) != 4 or entry[1] not in RATIOS or not entry[3]:
            raise Mistake(f"--costs {self.path}: ALLOWANCES: found {entry}; expected (kernel, {' or '.join(RATIOS)}, "
                          "ratio, reason)")
        return Allowance(*entry)

    def cost(self, launch):
        """What the launch has to move or multiply at least, or None."""
        found = self.call("cost", launch, self.shape)
        if found and found[0] not in UNITS:
            raise Mistake(f"--costs {self.path}: cost() of {launch.name}: found unit {found[0]!r}; expected "
                          f"{' or '.join(UNITS)}")
        return Cost(*found) if found else None

    def softmax(self, launch):
        return Softmax(**(self.call("softmax", launch, self.shape) or {}))

    def run(self, program, folder, arguments, small):
        """The run to record: arguments, and, if the file has a run(), shape, tokens and settings."""
        return self.call("run", program, folder, arguments, small) or {"arguments": arguments}

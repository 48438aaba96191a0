"""Figures of a recording by kernel and line, with names and estimates; expectations from a --costs file."""
import json
import os
import runpy
from dataclasses import dataclass
from types import SimpleNamespace

from cards import CARDS, WARP
from estimate import Softmax, combined, launch_bounds, resident_blocks, step_seconds
from executions import WAITS, executions
from sass import main_loop
from symbols import Mistake, Place, Sources, Symbols, bare_name, demangled

SUMS = ("requests", "lanes", "bytes", "sectors", "least_sectors", "wavefronts", "least_wavefronts", "l1_hits",
        "dram_sectors")
HAZARDS = {"out_of_bounds": "access out of bounds", "races": "race", "uninitialised": "uninitialised read",
           "divergent": "divergent barrier"}
DEFAULTS = {"sectors": 1.0, "wavefronts": 1.0, "cost": 1.05}    # largest ratios allowed, if ALLOWANCES has no other


# ---- --costs

class Expectations:
    """The definitions of a --costs FILE (README.md lists them); all empty without a file."""

    def __init__(self, path=None, shape=None):
        self.path, self.shape = path, shape or {}
        self.names = self.load() if path else {}
        self.unnecessary_barriers = self.names.get("UNNECESSARY_BARRIERS", {})
        self.allowances = self.names.get("ALLOWANCES", [])
        for entry in self.allowances:
            if len(entry) != 4 or entry[1] not in DEFAULTS or not entry[3]:
                raise Mistake(f"--costs {path}: ALLOWANCES: found {entry}; expected (kernel, {' or '.join(DEFAULTS)}, "
                              "ratio, reason)")

    def load(self):
        if not os.path.exists(self.path):
            raise Mistake(f"--costs {self.path}: No such file")
        try:
            return runpy.run_path(self.path)
        except Exception as error:
            raise Mistake(f"--costs {self.path}: {type(error).__name__}: {error}") from None

    def call(self, name, subject, *arguments):
        """Calls a function of the file; returns None if the file does not define it."""
        try:
            return self.names[name](*arguments) if name in self.names else None
        except (LookupError, TypeError, ValueError) as error:
            raise Mistake(f"--costs {self.path}: {name}(){subject}: {error}") from None

    def cost(self, launch):
        """Returns (unit, amount, cost line): the bytes or FLOPs that the launch needs at least; None if unknown."""
        found = self.call("cost", f" of {launch.name}", launch, self.shape)
        if found and found[0] not in ("bytes", "FLOPs"):
            raise Mistake(f"--costs {self.path}: cost() of {launch.name}: found unit {found[0]!r}; expected "
                          "bytes or FLOPs")
        return found

    def softmax(self, launch):
        return Softmax(**(self.call("softmax", f" of {launch.name}", launch, self.shape) or {}))

    def run(self, program, folder, arguments, small):
        """Returns the run to record: a dict of arguments and, if the file defines run(), shape, tokens and settings."""
        return self.call("run", "", program, folder, arguments, small) or {"arguments": arguments}


# ---- lines

def ratio(a, b):
    return a / b if b else None


class Sums:
    """Sums over sites, and their ratios."""

    def __init__(self, sites):
        for key in SUMS:
            setattr(self, key, sum(site[key] for site in sites))
        threads = [site for site in sites if site["by"] in ("thread", "atomic")]
        self.active_lanes = ratio(sum(site["lanes"] for site in threads), sum(site["requests"] for site in threads))
        self.ratios = {unit: ratio(getattr(self, unit), getattr(self, f"least_{unit}"))
                       for unit in ("sectors", "wavefronts")}


@dataclass
class Line:
    """A source line of one kernel and the sites that belong to it."""
    place: Place
    sites: list             # of the recording
    sums: Sums


# ---- kernels

class Kernel:
    """A kernel, launched with one shape."""

    def __init__(self, raw, card, symbols, names, expectations, sass):
        self.raw, self.launches, self.names = raw, raw["launches"], names
        self.demangled = names.get(raw["symbol"], "")
        self.name = bare_name(self.demangled) or raw["range"] or "unknown kernel"
        self.range, self.grid, self.block = raw["range"], raw["grid"], raw["block"]
        self.blocks, self.threads = raw["blocks"], raw["threads"]
        self.shared = raw["dynamic_shared"] + raw["static_shared"]
        self.sums = Sums(raw["sites"])
        self.code = self.find_code(sass)
        self.registers, self.spills = self.code.get("registers"), self.code.get("spills")
        self.resident = resident_blocks(card, self.threads, self.shared, self.registers)
        self.main_loop = main_loop(self.code["loops"]) if "loops" in self.code else None
        moved = raw["launch"]
        self.moved_bytes = moved["dram_load"] + moved["dram_store"]
        self.is_complete = raw["recorded_blocks"] > 0       # else the program ended in its first block
        launch = SimpleNamespace(name=self.name, demangled=self.demangled, grid=self.grid, block=self.block,
                                 threads=self.threads, integers=raw["integers"], tensor_flops=moved["tensor_flops"])
        self.bounds = launch_bounds(card, self.with_machine_code(symbols), self.blocks, self.resident,
                                    expectations.softmax(launch)) if self.is_complete else {}
        self.bound = max(self.bounds, key=self.bounds.get, default=None)
        self.us = 1e6 * combined(self.bounds) if self.is_complete else None
        self.cost = expectations.cost(launch)
        done = self.moved_bytes if self.cost and self.cost[0] == "bytes" else launch.tensor_flops
        self.ratios = {**self.sums.ratios, "cost": ratio(done, self.cost[1]) if self.cost else None}
        self.lines = self.find_lines(symbols)
        self.hazards = [hazard for key in HAZARDS for hazard in self.find_hazards(symbols, key)]

    def find_code(self, sass):
        """Looks a kernel up by symbol, else by name: the emulator's types may change the symbol."""
        same = [figures for symbol, figures in sass.items() if bare_name(self.names[symbol]) == self.name]
        return sass.get(self.raw["symbol"]) or (same[0] if len(same) == 1 else {})

    def with_machine_code(self, symbols):
        """Returns the totals of a launch, with what the machine code adds if it is known: instructions, and waits for
        global memory in place of the recorder's assumption."""
        launch, recorded, loops = self.raw["launch"], self.raw["recorded_blocks"], self.code.get("loops")
        if not loops or not recorded:
            return launch
        warps = recorded * -(-self.threads // WARP)
        sites = [(symbols.lines_within(site["stack"], self.demangled), (site["space"], site["access"]),
                  site["requests"] * WARP * site["bytes_per_lane"], site["slowest"])
                 for site in self.raw["sites"] if site["by"] in ("thread", "atomic", "cp.async")]
        found = {name: figure * self.blocks / recorded for name, figure in executions(loops, sites, warps).items()}
        busy = found.pop("busy")
        longest, waits = launch["longest_block"], sum(launch[name] for name in WAITS)
        share = {name: longest[name] / max(1, launch["requests"]) for name in ("requests", "warp_requests")}
        # The recorder knows what part of all warps' waits the warp of each block that waits longest has.
        found.update({name: found[name] * waits / max(1, launch["rounds"]) for name in WAITS})
        found["warp_instructions"] = busy * launch["warp_requests"] / max(1, launch["requests"])
        of_block = {name: found[name] * share["requests"] for name in ("instructions", "fp32")}
        of_block["warp_instructions"] = busy * share["warp_requests"]
        of_block.update({name: found[name] * sum(longest[each] for each in WAITS) / max(1, waits) for name in WAITS})
        return {**launch, **found, "longest_block": {**longest, **of_block}}

    def find_lines(self, symbols):
        groups = {}
        for site in self.raw["sites"]:
            place = symbols.place(site["stack"], self.demangled)
            groups.setdefault((place.file, place.line), (place, []))[1].append(site)
        return [Line(place, sites, Sums(sites)) for _, (place, sites) in sorted(groups.items(), key=lambda g: g[0])]

    def find_hazards(self, symbols, key):
        """Returns a recording's races (two accesses, the later one first) or other hazards, with source lines instead
        of stacks. Hazards of an array between the same lines are merged, and an index with the access that it is of."""
        found = {}
        for raw in self.raw[key]:
            if key == "divergent" and len({tuple(symbols.lines_within(access["stack"], self.demangled))
                                           for access in raw["accesses"]}) < len(raw["accesses"]):
                continue        # copies of one barrier, which the compiler made
            accesses = []
            for access in raw["accesses"]:
                place = symbols.place(access["stack"], self.demangled)
                accesses.append({"file": place.file, "line": place.line,
                                 **{key: access[key] for key in ("access", "by", "thread", "block")}})
            if raw["why"].endswith("without reaching it"):
                wait, end = accesses
                if end["file"] == wait["file"] and end["line"] < wait["line"]:
                    continue    # an early return
            array = self.names.get(raw["array"], "").split("::")[-1]        # kernel<64>(float*)::tile
            lines = sorted((access["file"], access["line"], access["access"]) for access in accesses)
            place = symbols.place(raw["allocated"])
            allocated = (place.file, place.line) if place.line else None
            same = found.setdefault((raw["memory"], raw["array"], raw["allocation"], raw["why"], *lines),
                                    {**raw, "kind": HAZARDS[key], "array": array, "accesses": accesses, "count": 0,
                                     "allocated": allocated})
            same["count"] += raw["count"]
        outside = {(hazard["accesses"][0]["file"], hazard["accesses"][0]["line"]): hazard
                   for hazard in found.values() if not hazard["why"]}
        for names, hazard in [*found.items()]:
            access = hazard["accesses"][0]
            if access["access"] == "index" and (same := outside.get((access["file"], access["line"]))):
                same["why"] = found.pop(names)["why"]
        return list(found.values())


def add_labels(kernels):
    """Sets each kernel's label: its name and, if others have the same name, grid and block, what it differs in."""
    for kernel in kernels:
        alike = [other.raw for other in kernels if (other.name, other.grid, other.block) ==
                 (kernel.name, kernel.grid, kernel.block)]
        kernel.label = kernel.name
        for key, word in (("integers", f"({', '.join(map(str, kernel.raw['integers']))})"), ("range", kernel.range),
                          ("dynamic_shared", f"{kernel.raw['dynamic_shared']} bytes")):
            same = [raw for raw in alike if raw[key] == kernel.raw[key]]
            kernel.label += f" {word}" * (len(same) < len(alike))
            alike = same


class Results:
    def __init__(self, raw, card=None, expectations=None, sass=None, tokens=None):
        key = card or raw["card"]
        if key not in CARDS:
            raise Mistake(f"card {key!r}: expected one of {', '.join(CARDS)}")
        self.raw, self.card, self.tokens = raw, CARDS[key], tokens
        self.expectations, self.sass = expectations or Expectations(), sass or {}
        hazards = [hazard for kernel in raw["kernels"] for kind in HAZARDS for hazard in kernel[kind]]
        stacks = [each["stack"] for kernel in raw["kernels"] for each in kernel["sites"] + kernel["barriers"]]
        stacks += [raw["ended_at"], *(access["stack"] for hazard in hazards for access in hazard["accesses"])]
        stacks += [hazard["allocated"] for hazard in hazards]
        names = demangled([*(kernel["symbol"] for kernel in raw["kernels"]), *(hazard["array"] for hazard in hazards),
                           *self.sass])
        self.symbols, self.sources = Symbols(raw["program"], stacks), Sources()
        # where host code ended the program; None: elsewhere
        self.ended_at = next((frame for pc in raw["ended_at"] for frame in self.symbols.frames[pc]), None)
        # Kernels without recorded blocks have no figures, except for hazards in the block in which the program ended.
        kernels = [Kernel(kernel, self.card, self.symbols, names, self.expectations, self.sass)
                   if kernel["recorded_blocks"] or any(kernel[kind] for kind in HAZARDS) else None
                   for kernel in raw["kernels"]]
        self.launched = sorted({bare_name(names[kernel["symbol"]]) for kernel in raw["kernels"]})
        seconds = [(kernel.us or 0) / 1e6 if kernel else 0 for kernel in kernels]
        sequence = [[kind, number] for kind, number in raw["sequence"] if kind == "matmul" or kernels[number]]
        self.step = step_seconds(self.card, {**raw, "sequence": sequence}, seconds)     # {part: seconds}
        self.kernels = sorted(filter(None, kernels), key=lambda kernel: -kernel.launches * (kernel.us or 0))
        add_labels(self.kernels)

    def quoted(self, file, line):
        return self.sources.text(file, line).strip()


def read_json(path, what):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise Mistake(f"{what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise Mistake(f"{what} {path}: not JSON: {error}") from None


def read_recording(path):
    raw = read_json(path, "recording")
    if not isinstance(raw, dict) or "kernels" not in raw or "program" not in raw:
        raise Mistake(f'recording {path}: expected a JSON object with "kernels" and "program"')
    return raw

"""A recording by kernel and by line: raw.json with names, lines of source and estimates added."""
import json
from dataclasses import dataclass

from cards import CARDS, SECTOR, WAVEFRONT
from estimate import estimate_launch, estimate_step
from expectations import Expectations, Launch
from symbols import Mistake, Place, Sources, Symbols, bare_name, demangled

SUMS = ("requests", "lanes", "bytes", "sectors", "least_sectors", "wavefronts", "least_wavefronts", "l1_hits",
        "dram_sectors")


def ratio(a, b):
    return a / b if b else None


class Sums:
    """Figures that add up, over sites."""

    def __init__(self, sites):
        for key in SUMS:
            setattr(self, key, sum(site.get(key, 0) for site in sites))
        threads = [site for site in sites if site["by"] in ("thread", "atomic")]
        self.active_lanes = ratio(sum(site["lanes"] for site in threads), sum(site["requests"] for site in threads))

    @property
    def sector_ratio(self):
        return ratio(self.sectors, self.least_sectors)

    @property
    def wavefront_ratio(self):
        return ratio(self.wavefronts, self.least_wavefronts)


@dataclass
class Line:
    """A line of source in one kernel, and the accesses that belong to it."""
    place: Place
    sites: list             # of raw.json
    sums: Sums
    time_share: float       # of its kernel's estimated time

    def of(self, space):
        return [site for site in self.sites if site["space"] == space]


@dataclass
class Access:
    """One side of a race, or an uninitialised read."""
    place: Place
    what: str               # load or store
    by: str
    thread: int
    block: int


@dataclass
class Hazard:
    """A race of two accesses, the later one first; or an uninitialised read."""
    memory: str
    array: str              # of shared memory, "" where it is dynamic
    address: int            # in the array, or in the block of memory
    accesses: list
    count: int
    why: str


def l1_wavefronts(site):
    """Of a site: global accesses by threads pass the memory that shared memory is a part of."""
    if site["space"] == "shared":
        return site["wavefronts"]
    if site["by"] not in ("thread", "atomic", "cp.async"):
        return 0
    return max(site["requests"], site["sectors"] * SECTOR / WAVEFRONT)


# What a site adds to each bound of a kernel's time.
WEIGHTS = {
    "memory": lambda site: site.get("dram_sectors", 0),
    "L2": lambda site: max(0, site["sectors"] - site.get("l1_hits", 0)),
    "L1 and shared": l1_wavefronts,
    "tensor cores": lambda site: site["requests"] if site["by"] in ("wgmma", "ldmatrix") else 0,
    "softmax": lambda site: site["requests"] if site["by"] in ("wgmma", "ldmatrix") else 0,
    "special functions": lambda site: site["requests"],
    "a launch": lambda site: site["requests"],
}


class Kernel:
    """A kernel with one shape of launch."""

    def __init__(self, raw, card, symbols, names, expectations, registers):
        self.raw, self.launches, self.names = raw, raw["launches"], names
        self.demangled = names.get(raw["symbol"], "")
        self.name = bare_name(self.demangled) if self.demangled else raw["range"] or "unknown kernel"
        self.range, self.grid, self.block = raw["range"], raw["grid"], raw["block"]
        self.blocks, self.threads = raw["blocks"], raw["threads"]
        self.shared = raw["dynamic_shared"] + raw["static_shared"]
        self.sites = raw["sites"]
        self.sums = Sums(self.sites)
        self.registers, self.spills = self.find_registers(registers)
        traffic = raw["traffic"]
        self.moved_bytes = traffic["launch_dram_load"] + traffic["launch_dram_store"]
        launch = Launch(self.name, self.demangled, self.grid, self.block, self.threads, raw.get("integers", []),
                        traffic["launch_tensor_flops"])
        self.estimate = self.make_estimate(card, traffic, expectations.softmax(launch))
        self.cost = expectations.cost(launch)
        done = self.moved_bytes if self.cost and self.cost.unit == "bytes" else launch.tensor_flops
        self.cost_ratio = ratio(done, self.cost.amount) if self.cost else None
        self.lines = self.find_lines(symbols)
        self.races = self.find_hazards(symbols, "races")
        self.uninitialised = self.find_hazards(symbols, "uninitialised")

    @property
    def us(self):
        return 1e6 * self.estimate.seconds

    def find_registers(self, registers):
        """By symbol; where the emulator's types made another one of it, by name if that is one kernel's only."""
        found = registers.get(self.raw["symbol"])
        if not found:
            same = [figures for symbol, figures in registers.items() if registers.names.get(symbol) == self.name]
            found = same[0] if len(same) == 1 else None
        return (found["registers"], found["spills"]) if found else (None, None)

    def make_estimate(self, card, traffic, softmax):
        scale = self.blocks / max(1, self.raw["recorded_blocks"])
        of_global = scale * sum(l1_wavefronts(site) for site in self.sites if site["space"] == "global")
        launch = {"blocks": self.blocks, "dram_load": traffic["launch_dram_load"],
                  "dram_store": traffic["launch_dram_store"], "l2": traffic["launch_l2"],
                  "wavefronts": traffic["launch_shared_wavefronts"] + of_global,
                  "tensor_flops": traffic["launch_tensor_flops"], "special": traffic.get("launch_special", 0)}
        return estimate_launch(card, launch, self.threads, self.shared, self.registers, softmax)

    def find_lines(self, symbols):
        groups = {}
        for site in self.sites:
            place = symbols.place(site["stack"], self.demangled)
            groups.setdefault((place.file, place.line), (place, []))[1].append(site)
        weigh = WEIGHTS[self.estimate.bound]
        if not sum(map(weigh, self.sites)):
            weigh = WEIGHTS["a launch"]
        total = sum(map(weigh, self.sites))
        return [Line(place, sites, Sums(sites), sum(map(weigh, sites)) / total if total else 0.0)
                for _, (place, sites) in sorted(groups.items(), key=lambda item: item[0])]

    def find_hazards(self, symbols, kind):
        """One for all hazards between the same lines."""
        found = {}
        for raw in self.raw.get(kind, []):
            accesses = [Access(symbols.place(raw[side + "stack"], self.demangled), raw.get(side + "access", "load"),
                               raw.get(side + "by", "thread"), raw[side + "thread"], raw[side + "block"])
                        for side in ("", "other_") if side + "stack" in raw]
            array = self.names.get(raw.get("array"), "").split("::")[-1]        # kernel<64>(float*)::tile
            hazard = Hazard(raw.get("memory", "shared"), array, raw["address"], accesses, raw["count"],
                            raw.get("why", ""))
            lines = sorted((access.place.file, access.place.line, access.what) for access in accesses)
            same = found.setdefault((hazard.memory, hazard.why, *lines), hazard)
            if same is not hazard:
                same.count += hazard.count
        return list(found.values())


class Registers(dict):
    """{mangled symbol: {"registers", "spills"}}, and what they are called."""

    def __init__(self, figures):
        super().__init__(figures)
        self.names = {symbol: bare_name(name) for symbol, name in demangled(figures).items()}


@dataclass
class CostlyLine:
    kernel: Kernel
    line: Line
    us: float               # of all launches


class Results:
    def __init__(self, raw, card=None, expectations=None, registers=None, root=".", tokens=None):
        key = card or raw.get("card")
        if key not in CARDS:
            raise Mistake(f"the card is {key!r}; expected one of {', '.join(CARDS)}")
        self.raw, self.card, self.tokens = raw, CARDS[key], tokens
        names = demangled(all_names(raw))
        self.symbols = Symbols(raw["program"], all_stacks(raw), raw.get("sources"), root)
        self.sources = Sources(root)
        registers, self.expectations = Registers(registers or {}), expectations or Expectations()
        self.kernels = [Kernel(kernel, self.card, self.symbols, names, self.expectations, registers)
                        for kernel in raw["kernels"]]
        self.step = estimate_step(self.card, raw, [kernel.estimate.seconds for kernel in self.kernels])

    def matching(self, text):
        """Kernels whose name or range contains a text."""
        return [kernel for kernel in self.kernels if text in kernel.name or text in kernel.range]

    def costly_lines(self, count):
        found = [CostlyLine(kernel, line, kernel.launches * kernel.us * line.time_share)
                 for kernel in self.kernels for line in kernel.lines]
        return sorted(found, key=lambda costly: -costly.us)[:count]


def all_names(raw):
    for kernel in raw["kernels"]:
        yield kernel["symbol"]
        yield from (hazard.get("array") for key in ("races", "uninitialised") for hazard in kernel.get(key, []))


def all_stacks(raw):
    for kernel in raw["kernels"]:
        yield from (site["stack"] for site in kernel["sites"])
        yield from (race[key] for race in kernel.get("races", []) for key in ("stack", "other_stack"))
        yield from (read["stack"] for read in kernel.get("uninitialised", []))


def read_json(path, what):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise Mistake(f"{what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise Mistake(f"{what} {path} is not JSON: {error}") from None


def read_recording(path):
    raw = read_json(path, "recording")
    if not isinstance(raw, dict) or "kernels" not in raw or "program" not in raw:
        raise Mistake(f'{path} is not a recording: it has no "kernels" and "program"')
    return recorded_only(raw)


def recorded_only(raw):
    """Without the kernels that were launched and not recorded."""
    numbers = [i for i, kernel in enumerate(raw["kernels"]) if kernel["recorded_blocks"] > 0]
    place = {number: i for i, number in enumerate(numbers)}
    sequence = [(kind, place.get(number) if kind == "kernel" else number) for kind, number in raw.get("sequence", [])]
    return {**raw, "kernels": [raw["kernels"][i] for i in numbers],
            "launched": [kernel["symbol"] for kernel in raw["kernels"]],
            "sequence": [entry for entry in sequence if entry[1] is not None]}

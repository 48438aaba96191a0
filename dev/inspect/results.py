"""What a recording says, by kernel and by line: raw.json with names, lines of source and estimates put to it."""
import json
from dataclasses import dataclass

from cards import CARDS, SECTOR, WAVEFRONT
from claims import BYTES, Launch, claim_of, softmax_of
from estimate import estimate_launch, estimate_step
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
class Race:
    memory: str
    array: str              # of shared memory, "" where it is dynamic
    address: int            # in the array, or in the block of memory
    later: Access
    earlier: Access
    count: int
    why: str


@dataclass
class Uninitialised:
    access: Access
    array: str
    address: int
    count: int


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

    def __init__(self, raw, card, symbols, names, shape, registers):
        self.raw, self.launches, self.names = raw, raw["launches"], names
        self.demangled = names.get(raw["symbol"], "")
        self.name = bare_name(self.demangled) if self.demangled else raw["range"] or "unknown kernel"
        self.range, self.grid, self.block = raw["range"], raw["grid"], raw["block"]
        self.blocks, self.threads = raw["blocks"], raw["threads"]
        self.shared = raw["dynamic_shared"] + raw["static_shared"]
        self.sites = raw["sites"]
        self.sums = Sums(self.sites)
        self.registers, self.spills = self.find_registers(registers)
        self.estimate = self.make_estimate(card, shape)
        self.find_claim(shape)
        self.lines = self.find_lines(symbols)
        self.races = self.find_races(symbols)
        self.uninitialised = self.find_uninitialised(symbols)

    @property
    def us(self):
        return 1e6 * self.estimate.seconds

    def find_registers(self, registers):
        """By symbol; where the stand-in's types made another one of it, by name if that is one kernel's only."""
        found = registers.get(self.raw["symbol"])
        if not found:
            same = [figures for symbol, figures in registers.items() if registers.names.get(symbol) == self.name]
            found = same[0] if len(same) == 1 else None
        return (found["registers"], found["spills"]) if found else (None, None)

    def make_estimate(self, card, shape):
        traffic = self.raw["traffic"]
        scale = self.blocks / max(1, self.raw["recorded_blocks"])
        of_global = scale * sum(l1_wavefronts(site) for site in self.sites if site["space"] == "global")
        launch = {"blocks": self.blocks, "dram_load": traffic["launch_dram_load"],
                  "dram_store": traffic["launch_dram_store"], "l2": traffic["launch_l2"],
                  "wavefronts": traffic["launch_shared_wavefronts"] + of_global,
                  "tensor_flops": traffic["launch_tensor_flops"], "special": traffic.get("launch_special", 0)}
        softmax = softmax_of(self.name, launch["tensor_flops"], shape)
        return estimate_launch(card, launch, self.threads, self.shared, self.registers, softmax)

    def find_claim(self, shape):
        """What the cost line predicts, and how much more is moved or multiplied."""
        traffic = self.raw["traffic"]
        self.moved_bytes = traffic["launch_dram_load"] + traffic["launch_dram_store"]
        self.claim = claim_of(Launch(self.name, self.demangled, self.grid, shape))
        found = self.moved_bytes if self.claim and self.claim.unit == BYTES else traffic["launch_tensor_flops"]
        self.claim_ratio = ratio(found, self.claim.amount) if self.claim else None

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

    def array_of(self, hazard):
        return self.names.get(hazard.get("array"), "").split("::")[-1]      # kernel<64>(float*)::tile

    def find_races(self, symbols):
        races = {}
        for raw in self.raw.get("races", []):
            sides = [Access(symbols.place(raw[prefix + "stack"], self.demangled), raw[prefix + "access"],
                            raw.get(prefix + "by", "thread"), raw[prefix + "thread"], raw[prefix + "block"])
                     for prefix in ("", "other_")]
            race = Race(raw["memory"], self.array_of(raw), raw["address"], *sides, raw["count"], raw["why"])
            lines = [(side.place.file, side.place.line, side.what) for side in sides]
            same = races.setdefault((race.memory, race.why, *sorted(lines)), race)
            if same is not race:
                same.count += race.count
        return list(races.values())

    def find_uninitialised(self, symbols):
        reads = {}
        for raw in self.raw.get("uninitialised", []):
            access = Access(symbols.place(raw["stack"], self.demangled), "load", "thread", raw["thread"], raw["block"])
            read = Uninitialised(access, self.array_of(raw), raw["address"], raw["count"])
            same = reads.setdefault((access.place.file, access.place.line), read)
            if same is not read:
                same.count += read.count
        return list(reads.values())


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
    def __init__(self, raw, card=None, shape=None, registers=None, root=".", tokens=None):
        key = card or raw.get("card")
        if key not in CARDS:
            raise Mistake(f"the card is {key!r}; expected one of {', '.join(CARDS)}")
        self.raw, self.card, self.tokens = raw, CARDS[key], tokens
        names = demangled(all_names(raw))
        self.symbols = Symbols(raw["program"], all_stacks(raw), raw.get("sources"), root)
        self.sources = Sources(root)
        registers = Registers(registers or {})
        self.kernels = [Kernel(kernel, self.card, self.symbols, names, shape, registers) for kernel in raw["kernels"]]
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
        raise Mistake(f"{what} {path} is no JSON: {error}") from None


def read_recording(path):
    raw = read_json(path, "recording")
    if not isinstance(raw, dict) or "kernels" not in raw or "program" not in raw:
        raise Mistake(f"{path} is no recording: found no \"kernels\" and \"program\" in it")
    return recorded_only(raw)


def recorded_only(raw):
    """Without the kernels that were launched and not looked at."""
    numbers = [i for i, kernel in enumerate(raw["kernels"]) if kernel["recorded_blocks"] > 0]
    place = {number: i for i, number in enumerate(numbers)}
    sequence = [(kind, place.get(number) if kind == "kernel" else number) for kind, number in raw.get("sequence", [])]
    return {**raw, "kernels": [raw["kernels"][i] for i in numbers],
            "launched": [kernel["symbol"] for kernel in raw["kernels"]],
            "sequence": [entry for entry in sequence if entry[1] is not None]}

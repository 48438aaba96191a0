"""The check: no races, no uninitialised reads, and nothing worse than the least or than an allowance of --costs.

An allowance that is looser than what was found is a finding too, so that the table says how good the kernels are.
"""
from symbols import without_arguments
from tables import number
from text import hazards

DEFAULTS = {"sectors": 1.0, "wavefronts": 1.0, "cost": 1.05}
SLACK = 0.03            # an allowance may be so much looser than what was found
ROUNDING = 1e-9


def found_ratio(kernel, what):
    return {"sectors": kernel.sums.sector_ratio, "wavefronts": kernel.sums.wavefront_ratio,
            "cost": kernel.cost_ratio}[what]


def worst_place(kernel, what):
    """The line with most of what is unnecessary."""
    if what == "cost":
        return max(kernel.lines, key=lambda line: line.sums.dram_sectors).place if kernel.lines else "?"
    return max(kernel.lines, key=lambda line: getattr(line.sums, what) - getattr(line.sums, f"least_{what}")).place


def too_much(kernel, what, ratio, allowed):
    counted, of = what, "the least"
    if what == "cost":
        counted = "bytes to and from memory" if kernel.cost.unit == "bytes" else "FLOPs on tensor cores"
        of = f"the cost line ({kernel.cost.line})"
    return (f"{kernel.name}: {worst_place(kernel, what)}: {counted} are {ratio:.3f} times {of}; allowed: "
            f"{number(allowed, 4)}")


def findings(results):
    """Yields a line for each."""
    allowances = {(entry.kernel, entry.what): entry for entry in results.expectations.allowances}
    largest = {}            # of each allowance that was used, over all kernels that it is for
    for kernel in results.kernels:
        yield from hazards(results, kernel)
        for what, default in DEFAULTS.items():
            ratio = found_ratio(kernel, what)
            allowance = allowances.get((kernel.name, what)) or allowances.get((without_arguments(kernel.name), what))
            if ratio is None:
                continue
            if allowance:
                largest[allowance] = max(ratio, largest.get(allowance, 0.0))
            allowed = allowance.allowed if allowance else default
            if ratio > allowed + ROUNDING:
                yield too_much(kernel, what, ratio, allowed)
    for allowance, ratio in largest.items():
        if ratio <= DEFAULTS[allowance.what] + ROUNDING or allowance.allowed > ratio * (1 + SLACK):
            yield (f"{allowance.kernel}: allowance no longer needed: {allowance.what} may be {allowance.allowed:g}, "
                   f"found {ratio:.3f} ({allowance.reason})")

"""The check: nothing races, nothing is read that nobody wrote, and nothing is worse than allowed.

allowances.json is a list of

    {"kernel": "layernorm_backward_kernel", "what": "wavefronts", "allowed": 2.0, "reason": "why it must be so"}

kernel: its name, template arguments included; without them it stands for all of them. what: sectors, wavefronts or
cost. What is not in the table is allowed DEFAULTS. An entry that is looser than what was found is a finding too, so
that the table says how good the kernels are.
"""
import os
from dataclasses import dataclass

from results import read_json
from symbols import Mistake, without_arguments
from text import hazards, number

DEFAULTS = {"sectors": 1.0, "wavefronts": 1.0, "cost": 1.05}
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "allowances.json")
SLACK = 0.03            # an allowance may be so much looser than what was found
ROUNDING = 1e-9


@dataclass(frozen=True)
class Allowance:
    kernel: str
    what: str
    allowed: float
    reason: str


def read_allowances(path=TABLE):
    allowances = {}
    for entry in read_json(path, "allowances"):
        complete = set(entry) == {"kernel", "what", "allowed", "reason"}
        if not complete or entry["what"] not in DEFAULTS or not entry["reason"]:
            raise Mistake(f"{path}: found {entry}; expected kernel, what ({', '.join(DEFAULTS)}), allowed and reason")
        allowances[entry["kernel"], entry["what"]] = Allowance(**entry)
    return allowances


def allowance_for(allowances, kernel, what):
    return allowances.get((kernel.name, what)) or allowances.get((without_arguments(kernel.name), what))


def found_ratio(kernel, what):
    return {"sectors": kernel.sums.sector_ratio, "wavefronts": kernel.sums.wavefront_ratio,
            "cost": kernel.claim_ratio}[what]


def worst_place(kernel, what):
    """The line that does most of what need not be done."""
    if what == "cost":
        return max(kernel.lines, key=lambda line: line.sums.dram_sectors).place if kernel.lines else "?"
    return max(kernel.lines, key=lambda line: getattr(line.sums, what) - getattr(line.sums, f"least_{what}")).place


def too_much(kernel, what, ratio, allowed):
    of = f"the cost line ({kernel.claim.cost})" if what == "cost" else "the least"
    counted = "bytes to and from memory" if what == "cost" and kernel.claim.unit == "bytes" else what
    counted = "FLOPs on tensor cores" if what == "cost" and kernel.claim.unit != "bytes" else counted
    return (f"{kernel.name}: {worst_place(kernel, what)}: {counted} are {ratio:.3f} times {of}; allowed: "
            f"{number(allowed, 4)}")


def findings(results, allowances):
    """A line for each."""
    largest = {}            # of each allowance that was used, over all kernels that it stands for
    for kernel in results.kernels:
        yield from hazards(results, kernel)
        for what, default in DEFAULTS.items():
            ratio, allowance = found_ratio(kernel, what), allowance_for(allowances, kernel, what)
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

"""How often the loops of a kernel's machine code run, and what they execute: sass.py counts instructions per iteration,
the recording counts memory accesses per source line."""
import re

from cards import WARP

# Memory instructions of sass.py's counts, by (space, access) of a recorded site.
KINDS = {("global", "load"): r"(LDG|LD|LDGSTS)\.", ("global", "store"): r"(STG|ST|RED|ATOM|ATOMG)\.",
         ("shared", "load"): r"LDS\.", ("shared", "store"): r"(STS|ATOMS)\."}
FP32 = ("FFMA", "FADD", "FMUL")


def static_bytes(loop):
    """Returns {(space, access): bytes that a warp accesses per iteration}."""
    return {kind: sum(count * int(name.split(".")[1]) // 8 * WARP for name, count in loop["counts"].items()
                      if re.match(pattern, name)) for kind, pattern in KINDS.items()}


def loop_of(loops, static, lines, kind):
    """Returns the index of the loop that an access belongs to: the innermost one with such accesses that contains one
    of the lines; of loops with the same lines (an unrolled one and its remainder) the one with most. None if there is
    none."""
    found = []
    for number, loop in enumerate(loops):
        name, first, last = loop["lines"]
        is_inside = number == 0 or any(name == file and first <= line <= last for file, line in lines)
        if static[number][kind] and is_inside:
            found.append((loop["depth"], static[number][kind], number))
    return max(found)[2] if found else None


def executions(loops, sites, warps):
    """Returns {"instructions", "fp32", "round_trips"}: totals of the recorded warps. sites: [(lines of the access and
    of the calls to it, (space, access), bytes accessed)], of the recorded blocks. A loop without memory accesses is
    assumed to run once per iteration of its outer loop."""
    static = [static_bytes(loop) for loop in loops]
    done, of_iteration = [0.0] * len(loops), [sum(kinds.values()) for kinds in static]
    for lines, kind, size in sites:
        number = loop_of(loops, static, lines, kind)
        if number is not None:
            done[number] += size
    trips = [float(warps)]
    for number, loop in enumerate(loops[1:], 1):
        trips.append(done[number] / of_iteration[number] if of_iteration[number] else trips[loop["parent"]])
    return {"instructions": sum(trip * loop["counts"]["all"] for trip, loop in zip(trips, loops)),
            "fp32": sum(trip * sum(loop["counts"].get(name, 0) for name in FP32) for trip, loop in zip(trips, loops)),
            "round_trips": sum(trip * loop["round_trips"] for trip, loop in zip(trips, loops))}

"""How often the loops of a kernel's machine code run, and what they execute: sass.py counts instructions per iteration,
the recording counts memory accesses per source line."""
import re

from cards import WARP

# Memory instructions of sass.py's counts, by (space, access) of a recorded site.
KINDS = {("global", "load"): r"(LDG|LD|LDGSTS)\.", ("global", "store"): r"(STG|ST|RED|ATOM|ATOMG)\.",
         ("shared", "load"): r"LDS\.", ("shared", "store"): r"(STS|ATOMS)\."}
FP32 = ("FFMA", "FADD", "FMUL")
WAITS = ("waits_l1", "waits_l2", "waits_memory")


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


def levels_of(loop, slowest):
    """Returns the shares of a loop's round trips that wait for L1, L2 and memory. slowest: how many of its loads go to
    each. A round trip waits for the slowest of its loads; it is assumed that they rarely go to the same memory."""
    loads = sum(count for name, count in loop["counts"].items() if re.match(KINDS["global", "load"], name))
    of_trip, all_loads = loads / max(1, loop["round_trips"]), max(1, sum(slowest))
    memory = min(1, of_trip * slowest[2] / all_loads)
    l2 = min(1 - memory, of_trip * slowest[1] / all_loads)
    return 1 - memory - l2, l2, memory


def executions(loops, sites, warps):
    """Returns {"instructions", "fp32", "waits_l1", "waits_l2", "waits_memory"}: totals of the recorded warps; "busy":
    the instructions without those of warps that return at once. sites: [(lines of the access and of the calls to it,
    (space, access), bytes accessed, loads by the slowest memory that they go to: L1, L2, memory)], of the recorded
    blocks. A loop without memory accesses is assumed to run once per iteration
    of its outer loop."""
    static = [static_bytes(loop) for loop in loops]
    done, of_iteration = [0.0] * len(loops), [sum(kinds.values()) for kinds in static]
    slowest = [[0, 0, 0] for _ in loops]
    for lines, kind, size, levels in sites:
        number = loop_of(loops, static, lines, kind)
        if number is not None:
            done[number] += size
            slowest[number] = [a + b for a, b in zip(slowest[number], levels)]
    trips = [float(warps)]
    for number, loop in enumerate(loops[1:], 1):
        trips.append(done[number] / of_iteration[number] if of_iteration[number] else trips[loop["parent"]])
    # Outside of loops, warps that return at once wait for nothing.
    waiting = [min(trips[0], done[0] / of_iteration[0] if of_iteration[0] else 0), *trips[1:]]
    waits = [[trip * loop["round_trips"] * share for share in levels_of(loop, levels)]
             for trip, loop, levels in zip(waiting, loops, slowest)]
    return {"busy": sum(trip * loop["counts"]["all"] for trip, loop in zip(waiting, loops)),
            "instructions": sum(trip * loop["counts"]["all"] for trip, loop in zip(trips, loops)),
            "fp32": sum(trip * sum(loop["counts"].get(name, 0) for name in FP32) for trip, loop in zip(trips, loops)),
            **dict(zip(WAITS, map(sum, zip(*waits))))}

#!/usr/bin/env python3
"""Simulates Hopper's attention kernels (gpt/attention_wgmma.cuh) and prints cycles per head; heads of 64, T = 1024.

Modelled is one of the four sub-partitions of a multiprocessor, with a warp of each consumer warpgroup. A warp issues an
instruction to a pipe, which is then busy; one per cycle. The tensor core executes products in the order of issue, and a
warp that waits for a product resumes LATENCY cycles after its end. OrderedBarrier passes from warpgroup to warpgroup.
A block's own rows arrive TMA cycles after all its warpgroups have released the stage; the mean of three is printed.

Not modelled: shared memory, waits for tiles of the other side and for the next work tile's index, instruction fetch.
NVIDIA does not document which of several ready warps issues, so there are two policies: "in turn" starts with the warp
after the last one, "greedy" stays with a warp while it is ready. Differences between variants say more than the cycles.
"""
from collections import defaultdict

T, HEADS = 1024, 2
PIPES = {"exp": 8, "alu": 2, "fma": 1}   # cycles for the 32 threads of a warp: 4, 16 and 32 lanes
LATENCY, QUEUE = 30, 64                  # a product is issued at most QUEUE cycles before the previous one ends
TMA = 700, 1000, 1300


# ---- programs of a warp: lists of operations. ("issue", pipe, cycles, accumulators or None)

def pipe(name, count):
    return [("issue", name, PIPES[name], None)] * int(count)


def product(name, k, columns):    # k steps of 16 of a product with 64 rows, into the accumulators `name`
    return [("issue", "tensor core", columns // 2, name)] * k


def exponentials(count, after):   # after: FP32 instructions that follow each exp2
    return (pipe("fma", 1) + pipe("exp", 1) + pipe("fma", after)) * count


def ordered(program):
    return [("turn",)] + program + [("pass turn",)]


SHUFFLE = [("sleep", 35)] + pipe("alu", 2)
SOFTMAX = pipe("fma", 30) + pipe("alu", 64) + 2 * SHUFFLE + pipe("exp", 2) + [("sleep", 30)] + exponentials(64, 1)
STORE = pipe("fma", 32) + pipe("alu", 16) + pipe("fma", 90) + [("sleep", 60)] + pipe("fma", 30)


def forward(group, _):
    last = [("sleep", 60), ("wait", "O")]
    for first in reversed(range(0, T, 192)):
        rows, loaded = first + 64 * group, -(-min(first + 192, T) // 128)
        tiles = -(-(rows + 64) // 128) if rows < T else 1
        for j in range(tiles):
            S = product("S", 4, 128)
            yield ordered(S + product("O", 8, 64)) if j else [("own",)] + S
            yield [("wait", "S")] + [("release",)] * (j + 1 == tiles) + SOFTMAX + [("sleep", 30), ("wait", "O")]
            yield pipe("alu", 32) + pipe("fma", 52 if j else 0)
        yield product("O", 8 if rows % 128 else 4, 64) + pipe("fma", 40) + pipe("exp", 4) + last
        yield (loaded - tiles) * ordered([]) + STORE


def dq(group, half):
    for tiles in reversed(range(1, T // 128 + 1)):
        columns = [128] * (tiles - 1) + [64 if half and group == 0 else 128]
        start = [product("S", 4, n) + product("dP", 4, n) for n in columns]
        yield [("own",)] + ordered(start[0]) + pipe("fma", 60) + [("sleep", 500)] + pipe("fma", 30) + [("sleep", 60)]
        for j, n in enumerate(columns):
            yield [("wait", "S")] + pipe("fma", 20) + exponentials(n // 2, 0) + [("sleep", 30), ("wait", "dP")]
            yield [("release",)] * (j + 1 == tiles) + pipe("fma", n) + pipe("alu", n // 4) + pipe("fma", 20)
            dQ = product("dQ", n // 16, 64)
            yield dQ if j + 1 == tiles else ordered(dQ + start[j + 1])
        yield [("wait", "dQ")] + STORE


def dkv(group, half):
    for tiles in range(T // 128, 0, -1):
        columns = [64 if half and group == 1 else 128] + [128] * (tiles - 1)
        S = [product("S", 4, n) for n in columns]
        yield [("own",)] + ordered(S[0])
        for j, n in enumerate(columns):
            yield [("wait", "dKV")] + pipe("fma", 20) + product("dP", 4, n) + [("wait", "S")] + exponentials(n // 2, 0)
            yield [("sleep", 30)] + pipe("alu", n // 4) + [("wait", "dP")] + pipe("fma", 1.25 * n) + pipe("alu", n // 4)
            dKV = product("dKV", n // 8, 64)
            yield pipe("fma", 20) + (dKV if j + 1 == tiles else ordered(dKV + S[j + 1]))
        yield [("release",), ("wait", "dKV")] + STORE + STORE


# ---- simulation

def simulate(programs, in_order, stages, greedy, tma):
    """Returns the cycles until all programs have ended."""
    groups = range(len(programs))
    at, ready, owned, released = [[0 for _ in groups] for _ in range(3)] + [[[] for _ in groups]]
    ends, free, turn, last, cycle = [defaultdict(int) for _ in groups], defaultdict(int), 0, 0, 0

    def possible_from(g):
        """Returns the cycle from which group g can execute its operation; infinity if that depends on another group."""
        kind, *arguments = programs[g][at[g]]
        if kind == "own" and owned[g] >= stages:
            releases = [times[owned[g] - stages:][:1] for times in released]
            return max(map(sum, releases)) + tma if all(releases) else float("inf")
        if kind == "turn" and in_order and turn != g:
            return float("inf")
        if kind == "issue":
            return max(ready[g], free[arguments[0]] - (QUEUE if arguments[0] == "tensor core" else 0))
        return max(ready[g], ends[g][arguments[0]] if kind == "wait" else 0)

    while running := [g for g in groups if at[g] < len(programs[g])]:
        issued = changed = False
        for g in sorted(running, key=lambda g: (g != last, g) if greedy else (g - last - 1) % len(groups)):
            while at[g] < len(programs[g]) and possible_from(g) <= cycle:
                kind, *arguments = programs[g][at[g]]
                if kind == "issue":
                    if issued:
                        break
                    unit, busy, name = arguments
                    free[unit] = max(free[unit], cycle) + busy
                    ends[g][name] = free[unit] + LATENCY
                    issued, last, ready[g] = True, g, cycle + 1
                ready[g] = cycle + arguments[0] if kind == "sleep" else ready[g]
                turn = (turn + (kind == "pass turn")) % len(groups)
                owned[g] += kind == "own"
                released[g] += [cycle] * (kind == "release")
                changed = True
                at[g] += 1
        later = [possible_from(g) for g in groups if at[g] < len(programs[g])]
        cycle = cycle + 1 if changed or not later else max(cycle + 1, min(later))
    return cycle


if __name__ == "__main__":
    print("| kernel | stages of own rows | products | in turn | greedy |\n|---|---|---|---|---|")
    variants = [(1, 0, "in any order"), (1, 1, "ordered"), (2, 0, "in any order"), (2, 1, "ordered"),
                (2, 1, "ordered, without masked halves")]
    for kernel, group_count in ((forward, 3), (dq, 2), (dkv, 2)):
        for count, order, label in variants[:4 if kernel == forward else 5]:
            warps = [sum(kernel(g, "halves" in label), []) * HEADS for g in range(group_count)]
            cycles = [sum(simulate(warps, order, count, policy, tma) for tma in TMA) // (len(TMA) * HEADS)
                      for policy in (False, True)]
            print(f"| {kernel.__name__} | {count} | {label} | {cycles[0]} | {cycles[1]} |", flush=True)

#!/usr/bin/env python3
"""Checks the machine code (SASS) of kernels with wgmma: ptxas must not use registers of a product in flight.

    check_sass.py LISTING [--expect KERNEL ...]     LISTING: the output of `cuobjdump -sass` for sm_90a

wgmma (HGMMA in SASS) is asynchronous. From its issue until a wait (WARPGROUP.DEPBAR) for its group, the tensor cores
read and write its registers. ptxas decides which other instructions use registers in that time, and it has made
mistakes without a warning. A kernel is sound if, on every path through it,

  1. only wgmma uses the registers of a product in flight: its accumulators and its operand A;
  2. every register of an operand A was last written by a conversion to BF16;
  3. no product is in flight when the kernel ends, and local memory is not used.

Shared memory is not checked, nor whether a conversion is the right one. An unknown instruction, jump or wait is an
error, because it might hide a fault.
Exit status: 0 all kernels are sound, 1 a kernel is not sound, 2 the listing lacks a kernel.
"""
import argparse
import re
import sys
from collections import defaultdict, namedtuple
from pathlib import Path

INSTRUCTION_BYTES = 16
MAX_GROUPS = 8   # in flight; more: a loop without a wait
JUMPS = {"BRA", "BSSY", "CALL", "RET"}
PREDICATE = r"!?U?P(\d|T)"

# name: with modifiers; target: index of the instruction that a jump goes to, or None
Instruction = namedtuple("Instruction", "address text guard name operands target")


class Unknown(Exception):
    """Code whose meaning this program does not know."""


# ---- listings -----------------------------------------------------------------------------------

def read_listing(lines):
    """Returns {kernel: [Instruction]} of a listing."""
    raw, kernel = {}, None
    for line in lines:
        start = re.match(r"\s+Function : (\S+)", line)
        code = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", line)
        if start:
            kernel = start[1]
            raw[kernel] = []
        elif kernel and code:
            raw[kernel].append((int(code[1], 16), code[2]))
    return {kernel: [parse(address, text, len(code)) for address, text in code] for kernel, code in raw.items()}


def parse(address, text, count):
    guard, name, rest = re.match(r"(@!?U?P\w+\s+)?([\w.]+)\s*(.*)", text).groups()
    operands = [o.strip() for o in re.split(r",\s*|\s+(?=0x)", rest) if o.strip()]
    target = None
    if operands and base(name) in JUMPS and operands[-1].startswith("0x"):
        place = int(operands[-1], 16)
        if place % INSTRUCTION_BYTES == 0 and place < count * INSTRUCTION_BYTES:
            target = place // INSTRUCTION_BYTES
    return Instruction(address, text, (guard or "").strip(), name, operands, target)


def base(name):
    return name.split(".")[0]


# ---- registers ----------------------------------------------------------------------------------
# Patterns of instruction names with modifiers, and the number of registers of each plain operand. The first operand
# after predicates is the result; 0: no result.

WIDE = r"(?!.*\.(64|128|256|WIDE|[USF]64)\b)"   # none of the modifiers for several registers
ACCESS = r"(\.(E|[US](8|16)|64|128|CONSTANT|STRONG|CTA|GPU|SYS|BYPASS|EF|EL|LU))*"
SINGLE = """BMSK BREV F2F F2FP FADD FFMA FLO FMNMX FMUL FRND FSEL FSET HADD2 HFMA2 HMUL2 HSET2 I2FP IABS IADD3 IMNMX LEA
    LOP3 MATCH MOV MUFU P2R POPC PRMT S2R SEL SGXT SHFL VIADD VIADDMNMX VIMNMX VOTE""".split()
WIDTHS = [   # the first pattern that matches counts; N: 1, with .64 2, with .128 4
    (rf"LD[CGLS]{ACCESS}", ("N",)),
    (rf"ST[GLS]{ACCESS}", (0, "N")),
    (r"ATOMG\.E\.INC\.STRONG\.GPU", (1, 1)),
    (r"REDG\.E\.(MAX|ADD)(?!.*F64).*", (0, "N")),
    (r"IMAD\.WIDE(\.(U32|X))*", (2, 1, 1, 2)),
    (rf"{WIDE}IMAD\.HI(\.\w+)*", (1, 1, 1, 2)),
    (rf"{WIDE}IMAD(\.\w+)*", (1, 1, 1, 1)),
    (r"CS2R\.32", (1,)),
    (r"CS2R", (2,)),
    (r"F2I(\.\w+)*\.[US]64(\.\w+)*", (2, 1)),
    (r"I2F(\.\w+)*\.[US]64(\.\w+)*", (1, 2)),
    (rf"{WIDE}(F2I|I2F)(\.\w+)*", (1, 1)),
    (r"RET(\.\w+)*", (0, 2)),
    (r"SYNCS\.ARRIVE(\.\w+)*", (2, 1)),
    (r"SYNCS\.PHASECHK(\.\w+)*", (0, 1)),
    (r"SHF(\.\w+)*", (1, 1, 1, 1, 1)),   # 64-bit values are two operands
    (rf"{WIDE}({'|'.join(SINGLE)})(\.\w+)*", (1, 1, 1, 1, 1)),
    (rf"{WIDE}(BAR|FCHK|FSETP|HSETP2|ISETP|R2P|R2UR|REDUX)(\.\w+)*", (0, 1, 1, 1, 1)),
]
WITHOUT_REGISTERS = """BRA BSSY BSYNC CALL ELECT ERRBAR EXIT FENCE MEMBAR NANOSLEEP NOP PLOP3 S2UR SYNCS VOTEU WARPGROUP
    WARPSYNC YIELD""".split()   # also all names that begin with U


def widths(i):
    for pattern, sizes in WIDTHS:
        if re.fullmatch(pattern, i.name):
            n = 4 if ".128" in i.name else 2 if ".64" in i.name else 1
            return [n if size == "N" else size for size in sizes]
    raise Unknown("unknown instruction")


def plain_register(operand):
    """Returns 12 for R12, -R12, |R12| and R12.reuse; None if the operand is not a register."""
    named = re.fullmatch(r"[-~|]*R(\d+)\|?(\.(reuse|H[01](_H[01])?|B[0-3]))*\|?", operand)
    return int(named[1]) if named else None


def registers(i):
    """Returns (read, written): the registers that an instruction other than HGMMA uses."""
    named = len(re.findall(r"(?<!\w)R\d", ", ".join(i.operands)))
    if named == 0:
        if base(i.name) not in WITHOUT_REGISTERS and i.name[0] != "U" and not i.text.startswith("DEPBAR.LE SB"):
            widths(i)
        return frozenset(), frozenset()
    sizes = widths(i)
    has_result = sizes[0] > 0
    sizes = sizes if has_result else sizes[1:]
    read, written, position = set(), set(), 0
    for operand in i.operands:
        if re.fullmatch(PREDICATE, operand):
            continue
        if "[" in operand and re.match(r"(LD|ST)[CGLS]|SYNCS|ATOMG|REDG", i.name):
            is_global = base(i.name) in ("ATOMG", "LDG", "REDG", "STG")   # 64-bit addresses
            for number, suffix in re.findall(r"(?<!\w)R(\d+)(\.\w+)?", operand):
                wide = suffix == ".64" or (is_global and suffix != ".U32")
                read |= set(range(int(number), int(number) + (2 if wide else 1)))
                named -= 1
            continue
        number = plain_register(operand)
        if number is not None:
            if position == len(sizes):
                raise Unknown("more operands than expected")
            to = written if has_result and position == 0 else read
            to |= set(range(number, number + sizes[position]))
            named -= 1
        position += 1
    if named:
        raise Unknown("unknown form of a register")
    return frozenset(read), frozenset(written)


# ---- products and waits -------------------------------------------------------------------------

# sums, a: registers of the accumulators and of operand A; commits: whether it is the last of its group
Product = namedtuple("Product", "sums a commits")


def product(i):
    """Returns the Product of HGMMA.64xNx16.F32.BF16 D, A, [B,] C or RZ, ...: D and C have N / 2 registers, A four, or
    none if it is a descriptor."""
    shape = re.fullmatch(r"HGMMA\.64x(\d+)x16\.F32\.BF16", i.name)
    rest = [o for o in i.operands if o != "gsb0" and not re.fullmatch(PREDICATE, o)]
    known = all("R" not in o or re.fullmatch(r"RZ|R\d+(\.reuse)?|gdesc\[UR\d+\](\.tnsp[AB])*", o) for o in rest)
    if not shape or i.guard or len(rest) not in (3, 4) or not known:
        raise Unknown("unknown form of a product")
    d, a, c = plain_register(rest[0]), plain_register(rest[1]), rest[-1]
    if d is None or (a is None) != (len(rest) == 3) or (c != "RZ" and plain_register(c) != d):
        raise Unknown("unknown form of a product")
    return Product(frozenset(range(d, d + int(shape[1]) // 2)),
                   frozenset() if a is None else frozenset(range(a, a + 4)), "gsb0" in i.operands)


def groups_left(i):
    """Returns how many groups may still be in flight after a wait: 1 for `WARPGROUP.DEPBAR.LE gsb0, 0x1`."""
    wait = re.fullmatch(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", i.text)
    if not wait:
        raise Unknown("unknown form of a wait")
    return int(wait[1], 16)


def is_conversion(i):
    return i.name.startswith("F2FP.BF16.F32")


# ---- control flow -------------------------------------------------------------------------------
# A place in the program is (index of an instruction, return indices of the calls that led to it).

START = (0, ())


def successors(code, place):
    index, returns = place
    i, name = code[index], base(code[index].name)
    after = [(index + 1, returns)]
    if name in JUMPS and name != "RET" and i.target is None:
        raise Unknown("a jump to an unknown target")
    if name == "EXIT":
        return after if i.guard else []
    if name == "BRA":
        always = not i.guard and i.name == "BRA" and len(i.operands) == 1
        return ([] if always else after) + [(i.target, returns)]
    if name == "CALL":   # one of the previous instructions loads the return address into a register
        address = hex(i.address + INSTRUCTION_BYTES)
        if i.guard or not any(address in before.operands for before in code[max(0, index - 4):index]):
            raise Unknown("a call that does not return to the next instruction")
        return [(i.target, returns + (index + 1,))]
    if name == "RET":
        if i.guard or not returns:
            raise Unknown("a return to an unknown target")
        return [(returns[-1], returns[:-1])]
    if name == "BSYNC" and not any(base(b.name) == "BSSY" and b.operands[0] == i.operands[0] and b.target == index + 1
                                   for b in code):
        raise Unknown("threads reconverge elsewhere than at the next instruction")
    if name == "WARPSYNC" and i.name != "WARPSYNC.ALL":
        raise Unknown("unknown jump")
    return after


def control_flow(code, report):
    """Returns {place: [possible next places]} of all places that can be reached from the start."""
    flow, todo = {}, [START]
    while todo:
        place = todo.pop()
        if place in flow:
            continue
        try:
            flow[place] = successors(code, place)
            if any(index >= len(code) for index, _ in flow[place]):
                raise Unknown("the program runs past its end")
        except Unknown as unknown:
            report(place[0], str(unknown))
            flow[place] = []
        todo += flow[place]
    reached = {index for index, _ in flow}
    for index, i in enumerate(code):
        if index not in reached and i.name != "NOP" and i.target != index:   # padding: NOP, and BRA to itself
            report(index, "unreachable: control flow is not what this program assumes")
    return flow


# ---- checks -------------------------------------------------------------------------------------

def check_flight(code, flow, products, touched, report):
    """Follows every path with its groups in flight. A group is a tuple of indices of products; the last group is not
    yet committed. Returns the maximum number of groups in flight."""
    seen, todo, max_groups = set(), [(START, ((),))], 0
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        place, groups = state
        index, i = place[0], code[place[0]]
        in_flight = [j for group in groups for j in group]
        if index in products:
            new = products[index]
            for j in in_flight:
                old = products[j]
                if new.a & old.sums or new.sums & old.a or (new.sums != old.sums and new.sums & old.sums):
                    report(index, f"uses registers of the product in flight at {code[j].address:04x}")
            groups = groups[:-1] + (groups[-1] + (index,),) + (((),) if new.commits else ())
            max_groups = max(max_groups, len(groups) - 1)
            if len(groups) > MAX_GROUPS:
                report(index, f"more than {MAX_GROUPS} groups are in flight: a wait is missing")
                continue
        elif base(i.name) == "WARPGROUP" and i.name != "WARPGROUP.ARRIVE":   # ARRIVE: the fence
            try:
                groups = groups[-1 - groups_left(i):]
            except Unknown as unknown:
                report(index, str(unknown))
        for j in in_flight:
            for what, theirs in (("accumulator", products[j].sums), ("operand A", products[j].a)):
                for r in sorted(touched[index] & theirs):
                    report(index, f"R{r} is the {what} of the product in flight at {code[j].address:04x}")
        if i.name == "EXIT" and in_flight:
            report(index, f"the product at {code[in_flight[-1]].address:04x} is still in flight when the kernel ends")
        todo += [(following, groups) for following in flow[place]]
    return max_groups


def check_operands(code, flow, products, written, report):
    """Searches backwards from each product for the instructions that may have written its operand A last."""
    before = defaultdict(list)
    for place, following in flow.items():
        for other in following:
            before[other].append(place)
    for place, r in [(place, r) for place in flow if place[0] in products for r in products[place[0]].a]:
        seen, todo = set(), list(before[place])
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            i = code[at[0]]
            if r in written[at[0]]:
                if not is_conversion(i):
                    report(place[0], f"R{r} of operand A: expected a conversion to BF16, found the result of "
                                     f"{i.address:04x}: {i.text}")
                if not i.guard:
                    continue
            if at == START:
                report(place[0], f"R{r} of operand A may be uninitialised")
            todo += before[at]


Result = namedtuple("Result", "instructions products groups errors")


def check_kernel(code):
    errors = set()   # (index, message)

    def report(index, message):
        errors.add((index, message))

    products, touched, written = {}, {}, {}
    for index, i in enumerate(code):
        touched[index] = written[index] = frozenset()
        try:
            if base(i.name) == "HGMMA":
                products[index] = product(i)
                written[index] = products[index].sums
                continue
            if base(i.name) in ("LDL", "STL"):
                report(index, "local memory: a register is spilled or an array is indexed")
            read, written[index] = registers(i)
            touched[index] = read | written[index]
        except Unknown as unknown:
            report(index, str(unknown))
    flow = control_flow(code, report)
    max_groups = check_flight(code, flow, products, touched, report)
    check_operands(code, flow, products, written, report)
    lines = [f"{code[index].address:04x}  {code[index].text}: {message}" for index, message in sorted(errors)]
    return Result(len(code), len(products), max_groups, lines)


# ---- main ---------------------------------------------------------------------------------------

def short_name(kernel):
    """Returns attention_forward_wgmma_kernel<64> for _Z30attention_forward_wgmma_kernelILi64EEv..."""
    name = re.match(r"_Z\d+(\w+?_kernel)(?:ILi(\d+)E)?", kernel)
    return kernel if not name else name[1] + (f"<{name[2]}>" if name[2] else "")


def kernels_with_products(lines):
    """Returns {kernel: [Instruction]} of the kernels that contain wgmma or have it in their name."""
    return {kernel: code for kernel, code in read_listing(lines).items()
            if "wgmma" in kernel or any(base(i.name) == "HGMMA" for i in code)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listing", type=Path, metavar="LISTING")
    parser.add_argument("--expect", nargs="*", default=[], metavar="KERNEL", help="kernels that LISTING must contain")
    options = parser.parse_args()
    if not options.listing.is_file():
        parser.error(f"{options.listing}: no such file")
    kernels = kernels_with_products(options.listing.read_text(errors="replace").splitlines())
    missing = [name for name in options.expect if not any(name in kernel for kernel in kernels)]
    if not kernels or missing:
        parser.error(f"{options.listing}: no kernel {' or '.join(missing) or 'with wgmma'}")
    unsound = 0
    for kernel in sorted(kernels):
        result = check_kernel(kernels[kernel])
        errors = result.errors if result.products else ["it contains no wgmma: was it compiled for sm_90a?"]
        print(f"{short_name(kernel)}: {result.instructions} instructions, {result.products} products, "
              f"at most {result.groups} groups in flight: {'NOT SOUND' if errors else 'sound'}")
        for error in errors:
            print(f"    {error}")
        unsound += bool(errors)
    print(f"{len(kernels)} kernels, {unsound or 'none'} unsound")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())

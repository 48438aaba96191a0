#!/usr/bin/env python3
"""Reads the machine code that the assembler made of kernels with wgmma, and says whether it is sound.

    check_sass.py OBJECT [--expect KERNEL ...]     OBJECT: what nvcc made for sm_90a (.o, .cubin), or a listing

wgmma ("HGMMA" in machine code) runs on while the program goes on: from its start until a wait ("WARPGROUP.DEPBAR")
covers its group, its registers belong to the tensor cores. What the compiler may do with them then is up to the
assembler, and it has been wrong without a word. A kernel is sound if, on every path through it,

  1. nothing but wgmma names a register of a product in flight: neither of its sums nor of its operand A;
  2. every register that wgmma takes as operand A was last written by a conversion to BF16;
  3. nothing is in flight when the program ends, and nothing lies in local memory.

Not seen: whether it is the right conversion, and what lies in shared memory. The operands' descriptors are in uniform
registers (UR), which a product reads when it starts.

OBJECT is taken apart with cuobjdump; a listing is the output of `cuobjdump -sass`. What this program does not know, be it an instruction, a way to jump or a wait, is an error, as it might hide a fault.
Exits with 0 if all is sound, with 1 if it is not, with 2 if there is nothing to read.
"""
import argparse
import re
import shutil
import subprocess
import sys
from collections import defaultdict, namedtuple
from pathlib import Path

# ---- listings -----------------------------------------------------------------------------------

INSTRUCTION_BYTES = 16
MAX_GROUPS = 8   # in flight: more says that a loop never waits

# target: the index of the instruction that the operands name; None without one
Instruction = namedtuple("Instruction", "address text guard name modifiers operands target")


class Unknown(Exception):
    """Something in the code that this program would have to guess at."""


def read_listing(lines):
    """{kernel: [Instruction]} of a listing."""
    raw, kernel = {}, None
    for line in lines:
        start = re.match(r"\s+Function : (\S+)", line)
        code = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", line)
        if start:
            kernel = start[1]
            raw[kernel] = []
        elif line.startswith("Fatbin"):
            kernel = None
        elif kernel and code:
            raw[kernel].append((int(code[1], 16), code[2]))
    return {kernel: [parse(address, text, len(code)) for address, text in code] for kernel, code in raw.items()}


def parse(address, text, count):
    guard, name, rest = re.match(r"(@!?U?P\w+\s+)?([\w.]+)\s*(.*)", text).groups()
    name, *modifiers = name.split(".")
    operands = [o.strip() for o in re.split(r",\s*|\s+(?=0x)", rest) if o.strip()]
    target = None
    if operands and name in JUMPS and operands[-1].startswith("0x"):
        place = int(operands[-1], 16)
        if place % INSTRUCTION_BYTES == 0 and place < count * INSTRUCTION_BYTES:
            target = place // INSTRUCTION_BYTES
    return Instruction(address, text, (guard or "").strip(), name, modifiers, operands, target)


# ---- registers ----------------------------------------------------------------------------------
# What an instruction does with the registers R0 ... R254. The result comes first, behind predicates.

JUMPS = {"BRA", "BSSY", "CALL", "RET"}
# Result and sources are a register each.
SINGLE = set("""BMSK BREV F2F F2FP FADD FFMA FLO FMNMX FMUL FRND FSEL FSET HADD2 HFMA2 HMUL2 HSET2 I2FP IABS IADD3 IMNMX LEA
                LOP3 MATCH MOV MUFU P2R POPC PRMT S2R SEL SGXT SHF SHFL VIADD VIADDMNMX VIMNMX VOTE""".split())
# The result, if there is one, is a predicate or uniform; sources are a register each.
WITHOUT_RESULT = set("BAR FCHK FSETP HSETP2 ISETP R2P R2UR REDUX".split())
LOADS, STORES = {"LDC", "LDG", "LDL", "LDS", "LDSM"}, {"STG", "STL", "STS"}
MEMORY = LOADS | STORES
WITH_ADDRESS = MEMORY | {"SYNCS", "ATOMG", "REDG"}
MEMORY_MODIFIERS = set("E U8 S8 U16 S16 64 128 CONSTANT STRONG CTA GPU SYS BYPASS EF EL LU 16 M88 MT88 2 4".split())
LOCAL_MEMORY = {"LDL", "STL"}
WIDE = {"64", "128", "256", "WIDE", "U64", "S64", "F64"}   # modifiers that mean more than one register somewhere
# What may name no register at all; and all that begins with U.
KNOWN = SINGLE | WITHOUT_RESULT | WITH_ADDRESS | JUMPS | set("""BSYNC CS2R ELECT ERRBAR EXIT F2I FENCE I2F IMAD
                MEMBAR NANOSLEEP NOP PLOP3 S2UR VOTEU WARPGROUP WARPSYNC YIELD""".split())


def widths(i):
    """Registers that each plain operand of an instruction takes, the result first; 0: it has no result."""
    wide = WIDE & set(i.modifiers)
    if i.name in MEMORY and MEMORY_MODIFIERS.issuperset(i.modifiers):
        size = 4 if "128" in i.modifiers else 2 if "64" in i.modifiers else 1
        if i.name == "LDSM":
            size = int(i.modifiers[-1]) if i.modifiers[-1] in ("2", "4") else 1
        return (size,) if i.name in LOADS else (0, size)
    if i.name == "ATOMG" and i.modifiers == ["E", "INC", "STRONG", "GPU"]:
        return (1, 1)
    if i.name == "REDG" and i.modifiers[:2] in (["E", "MAX"], ["E", "ADD"]):   # an atomic whose result nobody wants
        return (0, 2 if wide else 1)
    if i.name == "IMAD" and wide <= {"WIDE"}:
        return (2, 1, 1, 2) if wide else (1, 1, 1, 2) if "HI" in i.modifiers else (1, 1, 1, 1)
    if i.name == "CS2R":
        return (1,) if "32" in i.modifiers else (2,)
    if i.name == "F2I" and wide <= {"U64", "S64"}:
        return (2, 1) if wide else (1, 1)
    if i.name == "I2F" and wide <= {"U64", "S64"}:
        return (1, 2) if wide else (1, 1)
    if i.name == "RET":
        return (0, 2)
    if i.name == "SYNCS" and i.modifiers[0] in ("ARRIVE", "PHASECHK"):   # the former's result: 64 bits
        return (2, 1) if i.modifiers[0] == "ARRIVE" else (0, 1)
    if i.name in SINGLE | WITHOUT_RESULT and (not wide or i.name == "SHF"):   # SHF takes 64 bits as two operands
        return (0 if i.name in WITHOUT_RESULT else 1, 1, 1, 1, 1)
    raise Unknown("an instruction that this program does not know")


def is_predicate(operand):
    return re.fullmatch(r"!?U?P(\d|T)", operand)


def plain_register(operand):
    """The number in R12, -R12, |R12|, R12.reuse; None if the operand is something else."""
    named = re.fullmatch(r"[-~|]*R(\d+)\|?(\.(reuse|H[01](_H[01])?|B[0-3]))*\|?", operand)
    return int(named[1]) if named else None


def registers(i):
    """(read, written): the registers that an instruction other than HGMMA names."""
    named = len(re.findall(r"(?<!\w)R\d", ", ".join(i.operands)))
    if named == 0:
        if i.name not in KNOWN and not i.name.startswith("U") and not i.text.startswith("DEPBAR.LE SB"):
            raise Unknown("an instruction that this program does not know")
        return frozenset(), frozenset()
    result, *sources = widths(i)
    sizes = ([result] if result else []) + sources
    read, written, position = set(), set(), 0
    for operand in i.operands:
        if is_predicate(operand):
            continue
        if "[" in operand and i.name in WITH_ADDRESS:
            for number, suffix in re.findall(r"(?<!\w)R(\d+)(\.\w+)?", operand):
                is_global = i.name in ("ATOMG", "LDG", "REDG", "STG")   # addresses of 64 bits
                wide = suffix == ".64" or (is_global and suffix != ".U32")
                read |= set(range(int(number), int(number) + (2 if wide else 1)))
                named -= 1
            continue
        number = plain_register(operand)
        if number is not None:
            if position == len(sizes):
                raise Unknown("more operands than this program expects")
            to = written if result and position == 0 else read
            to |= set(range(number, number + sizes[position]))
            named -= 1
        position += 1
    if named:
        raise Unknown("a register in a form that this program does not know")
    return frozenset(read), frozenset(written)


# ---- products -----------------------------------------------------------------------------------

# sums, a: sets of registers; commits: it is the last of its group
Product = namedtuple("Product", "sums a commits")


def product(i):
    """What HGMMA.64xNx16.F32.BF16 D, A, [B,] C or RZ, ... takes: D and C are N / 2 registers, A four or in gdesc."""
    shape = re.fullmatch(r"64x(\d+)x16\.F32\.BF16", ".".join(i.modifiers))
    rest = [o for o in i.operands if o != "gsb0" and not is_predicate(o)]
    if not shape or i.guard or len(rest) not in (3, 4) or any("R" in o and not re.fullmatch(
            r"RZ|R\d+(\.reuse)?|gdesc\[UR\d+\](\.tnsp[AB])*", o) for o in rest):
        raise Unknown("a product in a form that this program does not know")
    d, a, c = plain_register(rest[0]), plain_register(rest[1]), rest[-1]
    if d is None or (a is None) != (len(rest) == 3) or (c != "RZ" and plain_register(c) != d):
        raise Unknown("a product in a form that this program does not know")
    return Product(frozenset(range(d, d + int(shape[1]) // 2)),
                   frozenset() if a is None else frozenset(range(a, a + 4)), "gsb0" in i.operands)


def groups_left(i):
    """Of `WARPGROUP.DEPBAR.LE gsb0, 0x1`: how many groups may still be in flight behind it."""
    wait = re.fullmatch(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", i.text)
    if not wait:
        raise Unknown("a wait in a form that this program does not know")
    return int(wait[1], 16)


# ---- control flow -------------------------------------------------------------------------------
# A place is (index of an instruction, where the calls that led there return to).

def successors(code, place):
    index, returns = place
    i = code[index]
    after = [(index + 1, returns)]
    if i.name in JUMPS and i.name != "RET" and i.target is None:
        raise Unknown("a jump to somewhere that this program does not find")
    if i.name == "EXIT":
        return after if i.guard else []
    if i.name == "BRA":
        always = not i.guard and not i.modifiers and len(i.operands) == 1
        return ([] if always else after) + [(i.target, returns)]
    if i.name == "CALL":   # where it returns to was put into a register just before
        address = hex(i.address + INSTRUCTION_BYTES)
        if i.guard or not any(address in before.operands for before in code[max(0, index - 4):index]):
            raise Unknown("a call that does not return to the next instruction")
        return [(i.target, returns + (index + 1,))]
    if i.name == "RET":
        if i.guard or not returns:
            raise Unknown("a return to somewhere that this program does not find")
        return [(returns[-1], returns[:-1])]
    if i.name == "BSYNC" and not any(b.name == "BSSY" and b.operands[0] == i.operands[0] and b.target == index + 1
                                     for b in code):
        raise Unknown("a meeting of threads elsewhere than at the next instruction")
    if i.name == "WARPSYNC" and i.modifiers != ["ALL"]:
        raise Unknown("a jump that this program does not know")
    return after


def control_flow(code, report):
    """{place: [places that may follow]} of all that can be reached from the start."""
    flow, todo = {}, [(0, ())]
    while todo:
        place = todo.pop()
        if place in flow:
            continue
        try:
            flow[place] = successors(code, place)
        except Unknown as unknown:
            report(place[0], str(unknown))
            flow[place] = []
        for index, _ in flow[place]:
            if index >= len(code):
                report(place[0], "the program runs on behind its end")
                flow[place] = []
        todo += flow[place]
    reached = {index for index, _ in flow}
    for index, i in enumerate(code):
        if index not in reached and i.name != "NOP" and i.target != index:   # padding: NOP, and BRA to itself
            report(index, "no path leads here: control flow is not what this program takes it for")
    return flow


# ---- what must hold -----------------------------------------------------------------------------

def check_flight(code, flow, products, touched, report):
    """Follows every path with the groups in flight, each the indices of its products, the last one still open.
    Gives how many were in flight at most."""
    seen, todo, most = set(), [((0, ()), ((),))], 0
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
                    report(index, f"takes registers of the product in flight at {code[j].address:04x}")
            groups = groups[:-1] + (groups[-1] + (index,),) + (((),) if new.commits else ())
            most = max(most, len(groups) - 1)
            if len(groups) > MAX_GROUPS:
                report(index, f"more than {MAX_GROUPS} groups are in flight: a wait is missing")
                continue
        elif i.name == "WARPGROUP" and i.modifiers != ["ARRIVE"]:   # that is the fence
            try:
                groups = groups[-1 - groups_left(i):]
            except Unknown as unknown:
                report(index, str(unknown))
        elif touched[index] and in_flight:
            for j in in_flight:
                for what, theirs in (("sum", products[j].sums), ("operand A", products[j].a)):
                    for r in sorted(touched[index] & theirs):
                        report(index, f"R{r} is {what} of the product in flight at {code[j].address:04x}")
        if i.name == "EXIT" and in_flight:
            report(index, f"the product at {code[in_flight[-1]].address:04x} is still in flight when the program ends")
        todo += [(following, groups) for following in flow[place]]
    return most


def is_conversion(i):
    return i.name == "F2FP" and i.modifiers[:2] == ["BF16", "F32"]


def check_operands(code, flow, products, written, report):
    """Which instructions may have written an operand A last: the classical reaching definitions."""
    wanted = frozenset().union(*(p.a for p in products.values()))
    START = -1
    reaching = defaultdict(lambda: defaultdict(set))   # place: {register: indices of instructions, START: none}
    for r in wanted:
        reaching[(0, ())][r] = {START}
    todo = [(0, ())]
    visited = set()
    while todo:
        place = todo.pop()
        visited.add(place)
        index = place[0]
        leaving = {r: set(by) for r, by in reaching[place].items()}
        for r in written[index] & wanted:
            leaving[r] = {index} | (leaving[r] if code[index].guard else set())
        for following in flow[place]:
            there, grew = reaching[following], following not in visited
            for r, by in leaving.items():
                grew |= not by <= there[r]
                there[r] |= by
            if grew:
                todo.append(following)
    for place, at in list(reaching.items()):
        if place[0] in products:
            for r in sorted(products[place[0]].a):
                for j in sorted(at[r]):
                    if j == START:
                        report(place[0], f"R{r} of operand A may never have been written")
                    elif not is_conversion(code[j]):
                        report(place[0], f"R{r} of operand A is not a conversion to BF16 but what "
                                         f"{code[j].address:04x} wrote: {code[j].text}")


Result = namedtuple("Result", "instructions products groups errors")


def check_kernel(code):
    errors = {}   # {(index, message): None}: in order, once each

    def report(index, message):
        errors[index, message] = None

    products, touched, written = {}, {}, {}
    for index, i in enumerate(code):
        touched[index] = written[index] = frozenset()
        try:
            if i.name == "HGMMA":
                products[index] = product(i)
                written[index] = products[index].sums
            else:
                if i.name in LOCAL_MEMORY:
                    report(index, "local memory: a register was spilled, or an array is indexed")
                read, written[index] = registers(i)
                touched[index] = read | written[index]
        except Unknown as unknown:
            report(index, str(unknown))
    flow = control_flow(code, report)
    most = check_flight(code, flow, products, touched, report)
    check_operands(code, flow, products, written, report)
    lines = [f"{code[index].address:04x}  {code[index].text}: {message}" for index, message in sorted(errors)]
    return Result(len(code), len(products), most, lines)


# ---- main ---------------------------------------------------------------------------------------

def short_name(kernel):
    """attention_forward_wgmma_kernel<64> of _Z30attention_forward_wgmma_kernelILi64EEv...; else as it is."""
    name = re.match(r"_Z(\d+)", kernel)
    if not name:
        return kernel
    begin, end = name.end(), name.end() + int(name[1])
    size = re.match(r"ILi(\d+)E", kernel[end:])
    return kernel[begin:end] + (f"<{size[1]}>" if size else "")


def quit_saying(message):
    print(f"check_sass: {message}", file=sys.stderr)
    sys.exit(2)


def is_listing(path):
    return path.read_bytes()[:4] != b"\x7fELF"   # what nvcc wrote begins like this


def listing_of(path, cuobjdump):
    """The lines of a listing, made of what nvcc wrote if it is none yet."""
    if not path.is_file():
        quit_saying(f"no file {path}")
    if is_listing(path):
        return path.read_text(errors="replace").splitlines()
    if not shutil.which(cuobjdump):
        quit_saying(f"found no {cuobjdump}: it comes with the CUDA toolkit, where it may be a package of its own")
    run = subprocess.run([cuobjdump, "-sass", str(path)], capture_output=True, text=True)
    if run.returncode:
        quit_saying(f"{cuobjdump} -sass {path}: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout.splitlines()


def kernels_with_products(lines):
    """{kernel: [Instruction]} of those that have wgmma or are named after it."""
    return {kernel: code for kernel, code in read_listing(lines).items()
            if "wgmma" in kernel or any(i.name == "HGMMA" for i in code)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("object", type=Path, metavar="OBJECT")
    parser.add_argument("--expect", nargs="*", default=[], metavar="KERNEL", help="kernels that must be there")
    parser.add_argument("--cuobjdump", default="cuobjdump", metavar="PROGRAM", help="default: the one on PATH")
    options = parser.parse_args()
    kernels = kernels_with_products(listing_of(options.object, options.cuobjdump))
    missing = [name for name in options.expect if not any(name in kernel for kernel in kernels)]
    if not kernels or missing:
        quit_saying(f"{options.object}: no kernel {' or '.join(missing) or 'with wgmma'}")
    unsound = 0
    for kernel in sorted(kernels):
        result = check_kernel(kernels[kernel])
        errors = result.errors if result.products else ["no wgmma in it: was it compiled for sm_90a?"]
        print(f"{short_name(kernel)}: {result.instructions} instructions, {result.products} products, "
              f"{result.groups} groups at most in flight: {'NOT SOUND' if errors else 'sound'}")
        for error in errors:
            print(f"    {error}")
        unsound += bool(errors)
    print(f"{len(kernels)} kernels, {unsound or 'none'} unsound")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Tests check_sass.py: the real kernels are sound, and every fault planted in their machine code is found.

    test_check_sass.py LISTING     LISTING: the output of `cuobjdump -sass` for train_gpt.cu compiled for sm_90a
"""
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "tests"))
from check_sass import (check_kernel, groups_left, is_conversion, kernels_with_products, plain_register, product,
                        read_listing, short_name)
from testing import expect, finish


class Kernel:
    """A kernel's lines in a listing, its instructions, and places where a fault can be planted."""

    def __init__(self, symbol, lines):
        self.symbol, self.lines = symbol, lines
        self.code = read_listing(lines)[symbol]
        self.products = [n for n, i in enumerate(self.code) if i.name.startswith("HGMMA")]
        self.waits = [n for n, i in enumerate(self.code) if i.text.startswith("WARPGROUP.DEPBAR")]
        # A product with operand A in registers that is still in flight at the next instruction, which writes a uniform
        # register.
        self.product = next(n for n in self.products
                            if product(self.code[n]).a and self.code[n + 1].name.startswith(("U", "R2UR")))
        self.sum, self.a = min(product(self.code[self.product]).sums), max(product(self.code[self.product]).a)

    def errors_with(self, edits):
        """Returns check_sass's errors for the kernel after replacing instructions by {index: text}."""
        lines = list(self.lines)
        for n, text in edits.items():
            place = f"/*{self.code[n].address:04x}*/"
            line = next(k for k, line in enumerate(lines) if line.strip().startswith(place))
            lines[line] = f"        {place}   {text} ;"
        return check_kernel(read_listing(lines)[self.symbol]).errors


def faults(k):
    """Yields (fault, {index: text}, words of the expected error)."""
    yield from faults_anywhere(k)
    after, a_sum = k.product + 1, f"R{k.sum} is the accumulator"
    for fault, text, words in (   # right after a product that is in flight
            ("an accumulator is read before the wait", f"FADD R0, R{k.sum}, R0", a_sum),
            ("an accumulator is written before the wait", f"MOV R{k.sum}, 0x0", a_sum),
            ("an accumulator is written under a predicate", f"@!P3 FMUL R{k.sum}, R0, R0", a_sum),
            ("operand A is written before the wait", f"MOV R{k.a}, 0x0", f"R{k.a} is the operand A"),
            ("only the last of four registers is in flight", f"LDS.128 R{k.sum - 3}, [UR4]", a_sum),
            ("only half of an address is in flight", f"LDG.E R0, desc[UR4][R{k.sum - 1}.64]", a_sum),
            ("only half of an addend is in flight", f"IMAD.WIDE R0, R0, R0, R{k.sum - 1}", a_sum),
            ("local memory is read", "LDL R0, [R1]", "local memory"),
            ("local memory is written", "STL.64 [R1+0x8], R2", "local memory"),
            ("an unknown instruction with registers", "FROB R2, R3", "unknown instruction"),
            ("an unknown instruction without registers", "FROB 0x1", "unknown instruction"),
            ("an unknown width", "IADD3.64 R2, R4, R6, RZ", "unknown instruction"),
            ("a register in an unknown form", "FADD R2, R3.X7, R4", "unknown form of a register"),
            ("an operand too many", "MOV R2, R3, R4, R5, R6, R7", "more operands"),
            ("an unknown wait", "WARPGROUP.WAIT 0x0", "unknown form of a wait"),
            ("a jump to an unknown address", "BRA 0x123450", "a jump to an unknown target"),
            ("an indirect jump", "BRX R2 -0x10", "unknown instruction"),
            ("a call to an unknown address", "CALL.REL.NOINC 0x123450", "a jump to an unknown target"),
            ("a call that returns elsewhere", "CALL.REL.NOINC 0x0", "does not return to the next"),
            ("a return without a call", "RET.REL.NODEC R2 0x0", "a return to an unknown target"),
            ("threads that reconverge elsewhere", "BSYNC B9", "threads reconverge elsewhere")):
        yield fault, {after: text}, f"{k.code[after].address:04x}  {text}: ", words


def faults_anywhere(k):
    code, text = k.code, k.code[k.product].text
    next_product = next(n for n in k.products if n > k.product)
    wrong_a = text.replace(f"R{k.a - 3},", f"R{k.sum},", 1)
    yield "operand A is an accumulator in flight", {next_product: wrong_a}, "uses registers"
    yield "a product of another type", {k.product: text.replace("BF16", "TF32")}, "unknown form of a product"
    yield "unreachable code", {0: "EXIT"}, "unreachable"
    yield "the kernel ends before its products do", {n: "EXIT" for n in k.waits}, "in flight when the kernel ends"
    yield "a loop without waits", {n: "NOP" for n in k.waits}, "a wait is missing"
    for n in k.waits:
        wait, left = code[n].text, groups_left(code[n])
        yield f"the wait at {code[n].address:04x} is removed", {n: "NOP"}, "in flight"
        yield "a wait leaves one more group in flight", {n: wait.replace(hex(left), hex(left + 1))}, "in flight"
        yield "a wait under a predicate", {n: f"@P0 {wait}"}, "unknown form of a wait"
        yield "a wait for another barrier", {n: wait.replace("gsb0", "gsb1")}, "unknown form of a wait"
    makers = [n for n, i in enumerate(code) if is_conversion(i) and i.operands[0] == f"R{k.a}"]
    maker = max(n for n in makers if n < k.product)
    fence = max(n for n in range(k.product) if code[n].text == "WARPGROUP.ARRIVE")
    for fault, edits in (
            ("operand A is not a conversion", {maker: f"FADD R{k.a}, R0, R0"}),
            ("operand A is converted to another type", {maker: code[maker].text.replace("BF16", "F16")}),
            ("operand A is written again on one of two paths", {fence: f"@P0 MOV R{k.a}, 0x0"}),
            ("operand A is the last of four registers loaded", {fence: f"LDS.128 R{k.a - 3}, [UR4]"}),
            ("operand A was converted on one of two paths", {n: f"@P0 {code[n].text}" for n in makers})):
        yield fault, edits, f"{text}: R{k.a} of operand A"
    # Arithmetic that overlaps with a product: it follows a wait that leaves one group in flight.
    def arithmetic_after(wait):
        return next(n for n in range(wait, len(code)) if code[n].name in ("FMUL", "FFMA", "FADD", "FMNMX")
                    and plain_register(code[n].operands[1]) is not None)
    wait, n = next((wait, arithmetic_after(wait)) for wait in k.waits if groups_left(code[wait]) == 1 and
                   not any(wait < other < arithmetic_after(wait) for other in k.waits + k.products))
    other = min(product(code[max(p for p in k.products if p < wait)]).sums)
    edit = re.sub(r"^(\S+ R\d+, \S*?)R\d+", rf"\g<1>R{other}", code[n].text)
    fault = "arithmetic that overlaps with a product reads its accumulator"
    yield fault, {n: edit}, f"{edit}: R{other} is the accumulator"


def test_program(lines):
    def run(text, *expected):
        with tempfile.NamedTemporaryFile("w", suffix=".sass") as file:
            file.write(text)
            file.flush()
            return subprocess.run([sys.executable, f"{HERE}/check_sass.py", file.name, "--expect", *expected],
                                  capture_output=True, text=True)

    text, kernel = "\n".join(lines), "attention_forward_wgmma_kernel"
    for case, result, status, words in (
            ("all kernels are sound", run(text, kernel), 0, "none unsound"),
            ("a kernel is missing", run(text, kernel, "no_such_kernel"), 2, "no_such_kernel"),
            ("the listing is empty", run(""), 2, "no kernel with wgmma"),
            ("a kernel has no products", run(re.sub(r"HGMMA[^;]*", "NOP", text)), 1, "contains no wgmma")):
        expect(result.returncode == status and words in result.stdout + result.stderr, f"status {status} if {case}")


def main():
    with open(sys.argv[1], errors="replace") as file:
        lines = file.read().splitlines()
    blocks, symbol = {}, None
    for line in lines:
        start = re.match(r"\s+Function : (\S+)", line)
        symbol = start[1] if start else symbol
        blocks.setdefault(symbol, []).append(line)
    one_of_each = {}   # the first instance of each template
    for symbol, code in sorted(kernels_with_products(lines).items()):
        result, name = check_kernel(code), short_name(symbol)
        expect(not result.errors and result.groups > 1, f"{name} is sound and its products overlap", result.errors[:1])
        one_of_each.setdefault(name.split("<")[0], symbol)
    expect(len(one_of_each) == 3, f"three kernels contain products: {', '.join(one_of_each)}")
    for name, symbol in one_of_each.items():
        k = Kernel(symbol, blocks[symbol])
        for fault, edits, *words in faults(k):
            expect(any(all(w in e for w in words) for e in k.errors_with(edits)), f"{name}: found: {fault}")
    test_program(lines)
    finish()


main()

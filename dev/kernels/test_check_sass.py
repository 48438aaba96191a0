#!/usr/bin/env python3
"""Tests of check_sass.py: it finds the real kernels sound, and every fault that is put into their machine code.

    test_check_sass.py OBJECT     what nvcc made of train_gpt.cu for sm_90a; or a listing
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

sys.dont_write_bytecode = True
import check_sass
from check_sass import check_kernel, groups_left, is_conversion, plain_register, product, read_listing, short_name

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_sass.py")
passed = failed = 0


def claim(holds, text, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'}  {text}" + (f" ({detail})" if detail else ""), flush=True)


# ---- one kernel, and what can be put into it

class Kernel:
    """The lines of a kernel in a listing of cuobjdump's, its instructions, and places where a fault can be put."""

    def __init__(self, name, lines):
        self.symbol, self.name, self.lines = name, short_name(name), lines
        self.code = self.parse(lines)
        self.products = [n for n, i in enumerate(self.code) if i.name == "HGMMA"]
        self.waits = [n for n, i in enumerate(self.code) if i.text.startswith("WARPGROUP.DEPBAR")]
        # A product with operand A in registers, with something else right behind it: the product is in flight there.
        self.product = next(n for n in self.products if product(self.code[n]).a and self.code[n + 1].name[0] == "U")
        self.behind = self.product + 1
        self.sum, self.a = min(product(self.code[self.product]).sums), max(product(self.code[self.product]).a)
        self.fence = max(n for n in range(self.product) if self.code[n].text == "WARPGROUP.ARRIVE")

    def parse(self, lines):
        return read_listing(lines)[self.symbol]

    def errors_with(self, edits):
        """What check_sass says of the kernel when {index: text} stands there instead."""
        texts = {f"/*{self.code[n].address:04x}*/": text for n, text in edits.items()}
        lines = []
        for line in self.lines:
            place = re.match(r"\s+(/\*[0-9a-f]{4,}\*/)", line)
            new = texts.pop(place[1], None) if place else None
            lines.append(line if new is None else f"        {place[1]}   {new} ;")
        assert not texts, f"no such places: {texts}"
        return check_kernel(self.parse(lines)).errors

    def claim_found(self, fault, index, text, message):
        errors = self.errors_with({index: text})
        at = f"{self.code[index].address:04x}  {text}: "
        claim(any(e.startswith(at) and message in e for e in errors), f"{self.name}: {fault}: {text}",
              "" if errors else "it found the kernel sound")


def kernels_of(lines):
    """The first kernel of each name."""
    blocks, name = {}, None
    for line in lines:
        start = re.match(r"\s+Function : (\S+)", line)
        name = start[1] if start else name
        if name:
            blocks.setdefault(name, []).append(line)
    by_name = {}
    for name in sorted(name for name in blocks if "wgmma" in name):
        by_name.setdefault(short_name(name).split("<")[0], Kernel(name, blocks[name]))
    return list(by_name.values())


# ---- faults

def test_registers_in_flight(k):
    k.claim_found("a sum is read before the wait", k.behind, f"FADD R0, R{k.sum}, R0", f"R{k.sum} is sum")
    k.claim_found("a sum is written before the wait", k.behind, f"MOV R{k.sum}, 0x0", f"R{k.sum} is sum")
    k.claim_found("operand A is written before the wait", k.behind, f"MOV R{k.a}, 0x0", f"R{k.a} is operand A")
    for what, text in (("the last of four registers", f"LDS.128 R{k.sum - 3}, [UR4]"),
                       ("the second half of an address", f"LDG.E R0, desc[UR4][R{k.sum - 1}.64]"),
                       ("the second half of what is added", f"IMAD.WIDE R0, R0, R0, R{k.sum - 1}")):
        k.claim_found(f"only {what} is in flight", k.behind, text, f"R{k.sum} is sum")
    k.claim_found("only if a predicate holds", k.behind, f"@!P3 FMUL R{k.sum}, R0, R0", f"R{k.sum} is sum")


def test_swapped_register(k):
    """Arithmetic that overlaps with a product, behind a wait that leaves one in flight."""
    def arithmetic_behind(wait):
        return next(n for n in range(wait, len(k.code)) if k.code[n].name in ("FMUL", "FFMA", "FADD", "FMNMX")
                    and plain_register(k.code[n].operands[1]) is not None)
    wait, victim = next((n, arithmetic_behind(n)) for n in k.waits if groups_left(k.code[n]) == 1 and
                        not any(n < other < arithmetic_behind(n) for other in [*k.waits, *k.products]))
    last = max(n for n in k.products if n < wait)
    theirs = min(product(k.code[last]).sums)
    text = re.sub(r"^(\S+ R\d+, \S*?)R\d+", rf"\g<1>R{theirs}", k.code[victim].text)
    k.claim_found("one register of what overlaps with a product is another", victim, text, f"R{theirs} is sum")


def test_products(k):
    text = k.code[k.product].text
    k.claim_found("operand A is a sum in flight", k.product + next(
        n for n in range(1, 99) if k.code[k.product + n].name == "HGMMA"),
        text.replace(f"R{k.a - 3},", f"R{k.sum},", 1), "takes registers of the product in flight")
    k.claim_found("a product of another type", k.product, text.replace("BF16", "TF32"), "a product in a form")


def test_waits(k):
    for wait in k.waits:
        at = f"the wait at {k.code[wait].address:04x}"
        claim(any("in flight" in e for e in k.errors_with({wait: "NOP"})), f"{k.name}: {at} is dropped")
        left = groups_left(k.code[wait])
        text = k.code[wait].text.replace(hex(left), hex(left + 1))
        claim(any("in flight" in e for e in k.errors_with({wait: text})), f"{k.name}: {at} leaves one group more")
        k.claim_found("a wait is under a condition", wait, f"@P0 {k.code[wait].text}", "a wait in a form")
        k.claim_found("a wait for something else", wait, k.code[wait].text.replace("gsb0", "gsb1"), "a wait in a form")
    claim(any("in flight when the program ends" in e for e in k.errors_with({wait: "EXIT" for wait in k.waits})),
          f"{k.name}: it ends before its products do")
    no_waits = {n: "NOP" for n in k.waits}
    claim(any("a wait is missing" in e for e in k.errors_with(no_waits)), f"{k.name}: a loop never waits")


def test_operand_a(k):
    k_text = k.code[k.product].text

    def found(fault, edits):
        errors = k.errors_with(edits)
        claim(any(f"R{k.a} of operand A" in e and k_text in e for e in errors), f"{k.name}: {fault}")

    makers = [n for n, i in enumerate(k.code) if is_conversion(i) and i.operands[0] == f"R{k.a}"]
    maker = max(n for n in makers if n < k.product)
    found("operand A is not a conversion", {maker: f"FADD R{k.a}, R0, R0"})
    found("operand A is converted to another type", {maker: k.code[maker].text.replace("BF16", "F16")})
    found("operand A is written again on one of two paths", {k.fence: f"@P0 MOV R{k.a}, 0x0"})
    found("operand A is the last of four registers loaded", {k.fence: f"LDS.128 R{k.a - 3}, [UR4]"})
    found("operand A was converted on one of two paths", {n: f"@P0 {k.code[n].text}" for n in makers})


def test_what_is_unknown(k):
    for what, text, message in (
            ("local memory is read", "LDL R0, [R1]", "local memory"),
            ("local memory is written", "STL.64 [R1+0x8], R2", "local memory"),
            ("an instruction with registers", "FROB R2, R3", "does not know"),
            ("an instruction without registers", "FROB 0x1", "does not know"),
            ("a width", "IADD3.64 R2, R4, R6, RZ", "does not know"),
            ("a register in an unknown form", "FADD R2, R3.X7, R4", "form that this program does not know"),
            ("an operand too many", "MOV R2, R3, R4, R5, R6, R7", "more operands"),
            ("a wait", "WARPGROUP.WAIT 0x0", "a wait in a form"),
            ("a jump to nowhere", "BRA 0x123450", "a jump to somewhere"),
            ("a jump by a register", "BRX R2 -0x10", "does not know"),
            ("a call to nowhere", "CALL.REL.NOINC 0x123450", "a jump to somewhere"),
            ("a call that returns elsewhere", "CALL.REL.NOINC 0x0", "does not return to the next"),
            ("a return out of nothing", "RET.REL.NODEC R2 0x0", "a return to somewhere"),
            ("a meeting of threads", "BSYNC B9", "a meeting of threads elsewhere")):
        k.claim_found(what, k.behind, text, message)
    claim(any("no path leads here" in e for e in k.errors_with({0: "EXIT"})), f"{k.name}: code that no path leads to")


# ---- the real kernels

def test_real_kernels(lines):
    kernels = check_sass.kernels_with_products(lines)
    claim(kernels, f"{len(kernels)} kernels with products are there")
    for name, code in sorted(kernels.items()):
        result = check_kernel(code)
        claim(not result.errors and result.groups > 1, f"{short_name(name)} is sound, and products overlap",
              ", ".join(result.errors[:1]))


def test_program(lines):
    def run(text, *expected):
        with tempfile.NamedTemporaryFile("w", suffix=".sass") as file:
            file.write(text)
            file.flush()
            return subprocess.run([sys.executable, PROGRAM, file.name, "--expect", *expected], capture_output=True,
                                  text=True)

    text = "\n".join(lines)
    whole = run(text, "attention_forward_wgmma_kernel")
    claim(whole.returncode == 0 and "none unsound" in whole.stdout, "the program exits with 0 if all is sound")
    missing = run(text, "attention_forward_wgmma_kernel", "no_such_kernel")
    claim(missing.returncode == 2 and "no_such_kernel" in missing.stderr, "with 2 if a kernel is not there, by name")
    claim(run("").returncode == 2, "with 2 if nothing is")
    without = run(re.sub(r"HGMMA[^;]*", "NOP", text))
    claim(without.returncode == 1 and "no wgmma in it" in without.stdout, "with 1 if a kernel lost its products")


def test(name, function, *arguments):
    """An exception fails a part of the tests, not the rest of them."""
    print(name)
    try:
        function(*arguments)
    except Exception:
        claim(False, f"{name}: ended by an exception", traceback.format_exc())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("object", type=Path, metavar="OBJECT")
    parser.add_argument("--cuobjdump", default="cuobjdump", metavar="PROGRAM", help="default: the one on PATH")
    options = parser.parse_args()
    lines = check_sass.listing_of(options.object, options.cuobjdump)
    test("the real kernels", test_real_kernels, lines)
    for kernel in kernels_of(lines):
        for function in (test_registers_in_flight, test_swapped_register, test_products, test_waits, test_operand_a,
                         test_what_is_unknown):
            test(f"{kernel.name}: {function.__name__[5:].replace('_', ' ')}", function, kernel)
    test("the program", test_program, lines)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

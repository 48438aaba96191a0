"""Translates inline PTX to C++ statements that call the functions of inline_ptx.h. Used by rewrite.py.

    asm volatile("add.u32 %0, %1, 5;" : "=r"(x) : "r"(y));      becomes
    do { auto&& ptx_0 = (x); const auto ptx_1 = (y); put(ptx_0, add<unsigned>(ptx_1, 5)); } while (0)

PTX registers become variables, labels local labels, and predicates conditions. The text must be a string literal.
"""
import re

TYPES = {"b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t",
         "b32": "unsigned", "u32": "unsigned", "s32": "int", "b64": "unsigned long long", "u64": "unsigned long long",
         "s64": "long long", "f16": "half", "bf16": "__nv_bfloat16", "f32": "float", "f64": "double", "pred": "bool",
         "f16x2": "half2", "bf16x2": "__nv_bfloat162", "tf32": "tf32"}
SPECIAL = {"laneid": "lane()", "warpid": "this_thread() / 32", "smid": "0u", "nsmid": "1u", "WARP_SZ": "32u",
           "clock": "static_cast<unsigned>(clock64())", "clock64": "clock64()", "globaltimer": "clock64() / 2",
           "lanemask_eq": "1u << lane()", "lanemask_lt": "(1u << lane()) - 1", "lanemask_le": "(2u << lane()) - 1",
           "lanemask_gt": "~((2u << lane()) - 1)", "lanemask_ge": "~((1u << lane()) - 1)",
           **{f"{ptx}.{axis}": f"{name}.{axis}" for axis in "xyz" for ptx, name in (
               ("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))}}
# instructions of one type: {opcode: types of its arguments, None: that of the instruction}
SAME = {name: [None] * count for count, names in {
    1: "abs neg not popc clz ex2 lg2 rcp rsqrt sqrt sin cos tanh", 2: "add sub min max and or xor div rem",
    3: "fma prmt"}.items() for name in names.split()}
SAME |= {"shl": [None, "b32"], "shr": [None, "b32"], "bfe": [None, "b32", "b32"], "selp": [None, None, "pred"],
         "lop3": [None, None, None, "b32"]}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
           "hs": ">="}


class Unknown(Exception):
    """PTX that is not emulated; the text names it."""


def split(text, separator):
    """Splits at separators outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


class Instruction:
    def __init__(self, text):
        words = text.split(None, 1)
        self.name, *self.modifiers = words[0].split(".")
        self.text = words[0]
        self.arguments = split(words[1], ",") if len(words) > 1 else []
        self.types = [m for m in self.modifiers if m in TYPES]

    def has(self, *modifiers):
        return any(m in self.modifiers for m in modifiers)

    def one_of(self, pattern, otherwise=None):
        """Returns the first modifier that the pattern matches."""
        found = next((m for m in self.modifiers if re.fullmatch(pattern, m)), otherwise)
        if found is None:
            raise Unknown(self.text)
        return found

    def type(self, place=-1):
        if not self.types:
            raise Unknown(self.text)
        return TYPES[self.types[place]]


def value(text):
    """Returns the C++ expression of a scalar argument."""
    text = text.strip()
    if text == "_":
        return "ptx_sink"
    if re.fullmatch(r"%\d+", text):
        return "ptx_" + text[1:]
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        number = int(text.rstrip("U"), 0)
        return f"{number}ll" if number < 1 << 63 else f"{number}ull"
    if match := re.fullmatch(r"0([fd])([0-9a-fA-F]+)", text):
        return f"bits<float>(0x{match[2]}u)" if match[1] == "f" else f"bits<double>(0x{match[2]}ull)"
    if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
        return text
    if text.lstrip("%") in SPECIAL:
        return f"({SPECIAL[text.lstrip('%')]})"
    if text.startswith("!"):
        return "!" + value(text[1:])
    if match := re.fullmatch(r"[%$A-Za-z_][\w$]*", text):
        return "ptx_r_" + re.sub(r"\W", "_", text)
    raise Unknown(text)


def values(text):
    """Returns the expressions of a vector {a, b} or of one argument."""
    return [value(part) for part in split(text[1:-1], ",")] if text.startswith("{") else [value(text)]


def typed(kind, text):
    return f"as<{kind}>({value(text)})"


def pointer(i, text, kind="void", space=None):
    """Returns the expression of an address [a + offset], as a pointer."""
    inside = re.fullmatch(r"\[(.*)\]", text)
    if not inside:
        raise Unknown(f"{i.text} {text}")
    base, _, offset = inside[1].partition("+")
    shared = space == "shared" or space is None and any(m.startswith("shared") for m in i.modifiers)
    return f"{'shared_' if shared else ''}pointer<{kind}>({value(base)}, {int(offset.strip() or '0', 0)})"


def put(target, result):
    return f"static_cast<void>({result});" if target.strip() == "_" else f"put({value(target)}, {result});"


def memory_order(i, statement):
    fence = "__threadfence_block();" if i.has("cta") else "__threadfence();"
    before, after = (fence if i.has(order, "acq_rel") else "" for order in ("release", "acquire"))
    return f"{before} {statement} {after}"


def load_store(i):
    vector, address = (i.arguments[0], i.arguments[1]) if i.name != "st" else (i.arguments[1], i.arguments[0])
    kind = i.type()
    at = pointer(i, address, kind if i.name == "st" else f"const {kind}")
    if i.has("acquire", "release", "relaxed") and not vector.startswith("{"):
        is_store = i.name == "st"
        return memory_order(i, f"atomic_store({at}, {typed(kind, vector)});" if is_store else
                            put(vector, f"atomic_load({at})"))
    return f"{'store' if i.name == 'st' else 'load'}({at}, {', '.join(values(vector))});"


def atomic(i):
    operation = i.one_of("add|min|max|and|or|xor|exch|cas|inc|dec")
    target, arguments = ("_", i.arguments) if i.name == "red" else (i.arguments[0], i.arguments[1:])
    kind = "unsigned long long" if operation == "add" and i.type() == "long long" else i.type()
    function = "atomic" + {"cas": "CAS"}.get(operation, operation.capitalize())
    passed = "".join(", " + typed(kind, a) for a in arguments[1:])
    return memory_order(i, put(target, f"{function}({pointer(i, arguments[0], kind)}{passed})"))


def move(i):
    target, source = i.arguments
    if target.startswith("{"):
        return f"unpack(as<{i.type()}>({value(source)}), {', '.join(values(target))});"
    if source.startswith("{"):
        return put(target, f"pack<{i.type()}>({', '.join(values(source))})")
    return put(target, typed(i.type(), source))


def convert(i):
    if len(i.types) != 2 or i.has("sat"):
        raise Unknown(i.text)
    passed = ", ".join(typed(i.type(), a) for a in i.arguments[1:])
    return put(i.arguments[0], f"convert<{i.type(0)}, Rounding::{i.one_of('r[nzmp]i', 'rn')}>({passed})")


def set_predicate(i):
    compare = i.one_of("(eq|ne|lt|le|gt|ge)u?|lo|ls|hi|hs")
    if len(i.arguments) != 3:
        raise Unknown(i.text)
    left, right = (typed(i.type(), a) for a in i.arguments[1:])
    target, otherwise = (split(i.arguments[0], "|") + ["_"])[:2]
    return (f"{{ const bool holds = {left} {COMPARE[compare.rstrip('u')]} {right}; {put(target, 'holds')} "
            f"{put(otherwise, '!holds')} }}")


def shuffle(i):
    target, in_range = (split(i.arguments[0], "|") + ["_"])[:2]
    a, *rest = i.arguments[1:]
    passed = ", ".join([typed(i.type(), a), *(typed("unsigned", r) for r in rest), "in_range"])
    shuffled = f"shfl_{i.one_of('up|down|bfly|idx')}({passed})"
    return (f"{{ bool in_range = false; {put(target, shuffled)} "
            f"{put(in_range, 'in_range')} }}")


def copy_async(i):
    mods, a = i.modifiers, i.arguments
    if "tensor" in mods and "4d" in mods and "shared::cluster" in mods:
        tensor, coordinates = split(a[1][1:-1], ",")
        numbers = ", ".join(typed("int", c) for c in split(coordinates[1:-1], ","))
        return (f"tma_load({pointer(i, a[0])}, pointer<const CUtensorMap>({value(tensor)}, 0), "
                f"{pointer(i, a[2], 'uint64_t')}, {numbers});")
    if not (i.has("ca", "cg") and len(a) >= 3):
        raise Unknown(i.text)
    a = a[:-1] if any("cache_hint" in m for m in mods) else a
    filled = value(a[3]) if len(a) > 3 else value(a[2])
    return (f'start_copy("cp.async", {pointer(i, a[0])}, {pointer(i, a[1], "const void", "global")}, {value(a[2])}, '
            f"{filled}, watch::call_site());")


def ldmatrix(i):
    to, count = values(i.arguments[0]), int(i.one_of("x[124]")[1:])
    if count != len(to) or not i.has("m8n8"):
        raise Unknown(i.text)
    assign = " ".join(f"put({target}, ptx_m[{n}]);" for n, target in enumerate(to))
    return (f"{{ uint32_t ptx_m[4]; ldmatrix_of_lane<{'true' if i.has('trans') else 'false'}>(ptx_m, "
            f"{pointer(i, i.arguments[1], 'const void', 'shared')}, watch::call_site(), {count}); {assign} }}")


def mma(i):
    shape = i.one_of(r"m16n8k\d+")
    if len(i.types) != 4 or not i.has("row"):
        raise Unknown(i.text)
    d, a, b, c = (values(text) for text in i.arguments[:4])
    fragments = ", ".join(f"{{{', '.join(f'as<uint32_t>({x})' for x in f)}}}" for f in (a, b, c))
    assign = " ".join(f"put({target}, ptx_d[{n}]);" for n, target in enumerate(d))
    return (f"{{ uint32_t ptx_d[4]; mma<{TYPES[i.types[1]]}, {TYPES[i.types[3]]}, {shape[6:]}>(ptx_d, {fragments}); "
            f"{assign} }}")


def wgmma(i):
    count, a = i.one_of("m64n(64|128|256)k16")[4:-3], i.arguments
    if i.types[0] != "f32" or i.types[1] not in ("f16", "bf16"):
        raise Unknown(i.text)
    sums = values(a[0])
    left = f"{{{', '.join(values(a[1]))}}}" if a[1].startswith("{") else value(a[1])
    return (f"static_assert(products_are_fp16 == {'true' if i.types[1] == 'f16' else 'false'}, "
            f'"wgmma: FP16 operands need -DPRECISION_FP16, BF16 operands none"); '
            f"wgmma<{count}, Major({value(a[-1])})>(consecutive<{len(sums)}>(&{sums[0]}, &{sums[-1]}), {left}, "
            f"{value(a[2])}, {value(a[3])});")


HANDLERS = {"ld": load_store, "ldu": load_store, "st": load_store, "atom": atomic, "red": atomic, "mov": move,
            "cvt": convert, "setp": set_predicate, "shfl": shuffle, "cp": copy_async, "ldmatrix": ldmatrix, "mma": mma,
            "wgmma": wgmma}

# Other instructions: patterns of the opcode with its arguments, and the code; the first that matches counts. {0} is the
# value of the first argument, {0.unsigned} and {0.typed} the value as unsigned and as the instruction's type,
# {0.barrier} an address in shared memory; {op} is a part of the pattern.
CALLS = [(re.compile(pattern, re.DOTALL), code) for pattern, code in (
    (r"trap", "__trap();"),
    (r"bra\S* (?P<op>\S+)", "goto ptx_l_{op};"),
    (r"nanosleep.*", "__nanosleep({0});"),
    (r"createpolicy.*", "put({0}, 0);"),
    (r"setmaxnreg\.(?P<op>inc|dec).*", "setmaxnreg_{op}<{0}>();"),
    (r"mul(\.\S+)?\.(?P<op>hi|wide)\..*", "put({0}, mul_{op}({1.typed}, {2.typed}));"),
    (r"mul\..*", "put({0}, mul_lo({1.typed}, {2.typed}));"),
    (r"mad(\.\S+)?\.(?P<op>hi|wide)\..*", "put({0}, plus(mul_{op}({1.typed}, {2.typed}), {3}));"),
    (r"mad\..*", "put({0}, plus(mul_lo({1.typed}, {2.typed}), {3}));"),
    (r"activemask.*", "put({0}, __activemask());"),
    (r"redux\S*\.(?P<op>add|min|max|and|or|xor)\..*", "put({0}, __reduce_{op}_sync({2.unsigned}, {1.typed}));"),
    (r"vote\.sync\.(?P<op>any|all|ballot)\..*", "put({0}, __{op}_sync({2.unsigned}, {1}));"),
    (r"bar(rier)?\.warp\.sync.*", "__syncwarp({0});"),
    (r"bar(rier)?(\.cta)?\.sync(\.aligned)?( 0(x0)?)?", "__syncthreads();"),
    (r"bar(rier)?(\.cta)?\.(?P<op>sync|arrive)\S* [^,]+", "named_barrier_{op}({0}, threads_of_block());"),
    (r"bar(rier)?(\.cta)?\.(?P<op>sync|arrive)\S* .*", "named_barrier_{op}({0}, {1});"),
    (r"fence\.proxy\.async(\..*)?", "async_fence();"),
    (r"fence\.mbarrier_init.*", "fence_mbarrier_init();"),
    (r"(fence\.proxy|mbarrier\.inval|prefetchu?|griddepcontrol|discard)\b.*", ""),
    (r"(fence|membar)\S*\.cta(\.\S+)?", "__threadfence_block();"),
    (r"(fence|membar)\b.*", "__threadfence();"),
    (r"wgmma\.fence.*", "wgmma_fence();"),
    (r"wgmma\.commit_group.*", "wgmma_commit();"),
    (r"wgmma\.wait_group.*", "wgmma_wait<{0}>();"),
    (r"cp\S*\.commit_group", "cp_async_commit();"),
    (r"cp\S*\.wait_all", "wait_for_copies(0);"),
    (r"cp\S*\.wait_group.*", "wait_for_copies({0});"),
    (r"mbarrier\.init.*", "mbarrier_init({0.barrier}, {1});"),
    (r"mbarrier\.(try|test)_wait\S*\.parity.*", "mbarrier_wait({1.barrier}, {2.unsigned}); put({0}, true);"),
    (r"mbarrier\.arrive\.(\S+\.)?expect_tx\S* _,.*", "mbarrier_arrive_expect_tx({1.barrier}, {2});"),
    (r"mbarrier\.arrive(\.\S+)? _,.*", "mbarrier_arrive_expect_tx({1.barrier}, 0);"),
    (r"cvta\.to\.shared.*", "put({0}, __cvta_generic_to_shared(pointer<void>({1}, 0)));"),
    (r"cvta\.shared.*", "put({0}, reinterpret_cast<size_t>(__cvta_shared_to_generic({1})));"),
    (r"cvta.*", "put({0}, {1});"))]


class Argument:
    """An argument of an instruction, in the code of CALLS."""

    def __init__(self, i, text):
        self.i, self.text = i, text

    def __str__(self):
        return value(self.text)

    unsigned = property(lambda self: typed("unsigned", self.text))
    typed = property(lambda self: typed(self.i.type(), self.text))
    barrier = property(lambda self: pointer(self.i, self.text, "uint64_t", "shared"))


def qualified(code):
    """Adds the namespace to the names of inline_ptx.h: the program may have functions with the same names."""
    return re.sub(r"(?<![\w:.])(?:(?!if\b|goto\b|decltype\b|sizeof\b|static_|reinterpret_|atomic[A-Z]|clock64|__|ptx_)"
                  r"[a-z]\w*(?=[<(])|Rounding|Major|watch|launched|products_are_fp16|tf32)\b",
                  lambda match: "::cuda_cpu::inline_ptx::" + match[0], code)


def statement(text):
    """Returns the C++ statement of one PTX instruction."""
    if match := re.match(r"@(!?)([%$\w]+)\s+(.*)", text, re.DOTALL):
        return f"if ({match[1]}{value(match[2])}) {{ {statement(match[3])} }}"
    if match := re.match(r"\.reg\s+\.\w+\s+(.*)", text, re.DOTALL):
        names = []
        for name in split(match[1], ","):
            stem, _, count = name.rstrip(">").partition("<")
            names += [f"{stem}{n}" for n in range(int(count))] if count else [name]
        return "unsigned long long " + ", ".join(value(name) for name in names) + ";"
    i = Instruction(text)
    for pattern, code in CALLS:
        if found := pattern.fullmatch(f"{i.text} {', '.join(i.arguments)}".strip()):
            return code.format(*(Argument(i, a) for a in i.arguments), **found.groupdict())
    if i.name in HANDLERS:
        return HANDLERS[i.name](i)
    if i.name not in SAME or len(i.arguments) != 1 + len(SAME[i.name]) or i.has("cc"):
        raise Unknown(i.text)
    passed = (typed(TYPES[kind] if kind else i.type(), a) for kind, a in zip(SAME[i.name], i.arguments[1:]))
    return put(i.arguments[0], f"{i.name}_<{i.type()}>({', '.join(passed)})")


def translate(text, operands, is_extended):
    """Returns the C++ of an asm statement. operands: [(constraint, expression)]."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    if is_extended:
        text = text.replace("%%", "%")
    code = []
    for n, (constraint, expression) in enumerate(operands):
        kind = "auto&&" if constraint[0] in "=+" else "constexpr auto" if constraint == "n" else "const auto"
        code.append(f"{kind} ptx_{n} = ({expression});")
    labels = re.findall(r"(?:^|[;{}\s])([$A-Za-z_][\w$]*):(?!:)", text)
    if labels:
        code.insert(0, "__label__ " + ", ".join("ptx_l_" + label for label in labels) + ";")
    at = 0
    while at < len(text):
        if text[at] in "{}":
            code.append(text[at])
        elif label := re.compile(r"([$A-Za-z_][\w$]*):(?!:)").match(text, at):
            code.append(f"ptx_l_{label[1]}:;")
            at = label.end() - 1
        elif not text[at].isspace() and text[at] != ";":
            end = text.find(";", at)
            end = len(text) if end < 0 else end
            code.append(qualified(statement(text[at:end].strip())))
            at = end
        at += 1
    if any("ptx_sink" in part for part in code):
        code.insert(1 if labels else 0, "unsigned long long ptx_sink;")
    return "do { " + " ".join(filter(None, code)) + " } while (0)"

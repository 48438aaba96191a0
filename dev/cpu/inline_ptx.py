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
NOTHING = {"prefetch", "prefetchu", "griddepcontrol", "discard"}


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
    if "commit_group" in mods:
        return "cp_async_commit();"
    if "wait_all" in mods or "wait_group" in mods:
        return f"wait_for_copies({'0' if 'wait_all' in mods else value(a[0])});"
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
    if not i.has("mma_async"):
        return {"fence": "wgmma_fence();", "commit_group": "wgmma_commit();"}.get(i.modifiers[0]) or \
            f"wgmma_wait<{value(i.arguments[0])}>();"
    count, a = i.one_of("m64n(64|128|256)k16")[4:-3], i.arguments
    if i.types[0] != "f32" or i.types[1] not in ("f16", "bf16"):
        raise Unknown(i.text)
    sums = values(a[0])
    left = f"{{{', '.join(values(a[1]))}}}" if a[1].startswith("{") else value(a[1])
    return (f"static_assert(products_are_fp16 == {'true' if i.types[1] == 'f16' else 'false'}, "
            f'"wgmma: FP16 operands need -DPRECISION_FP16, BF16 operands none"); '
            f"wgmma<{count}, Major({value(a[-1])})>(consecutive<{len(sums)}>(&{sums[0]}, &{sums[-1]}), {left}, "
            f"{value(a[2])}, {value(a[3])});")


def mbarrier(i):
    a, first = i.arguments, i.modifiers[0]
    if first == "init":
        return f"mbarrier_init({pointer(i, a[0], 'uint64_t', 'shared')}, {value(a[1])});"
    if first == "inval":
        return ""
    if first in ("try_wait", "test_wait") and i.has("parity"):
        place = pointer(i, a[1], "uint64_t", "shared")
        return f"mbarrier_wait({place}, {typed('unsigned', a[2])}); {put(a[0], 'true')}"
    if first == "arrive" and a[0] == "_":
        bytes_ = f"{value(a[2])}" if i.has("expect_tx") else "0"
        return f"mbarrier_arrive_expect_tx({pointer(i, a[1], 'uint64_t', 'shared')}, {bytes_});"
    raise Unknown(i.text)


def barrier(i):
    a = [value(text) for text in i.arguments]
    if i.modifiers[:2] == ["warp", "sync"]:
        return f"__syncwarp({a[0]});"
    if i.has("sync") and (len(a) < 2 and a[0] in ("0ll", "0") if a else True):
        return "__syncthreads();"
    if i.has("sync", "arrive"):
        threads = a[1] if len(a) > 1 else "threads_of_block()"
        return f"named_barrier_{'sync' if i.has('sync') else 'arrive'}({a[0]}, {threads});"
    raise Unknown(i.text)


def fence(i):
    if i.has("proxy"):
        return "async_fence();" if i.has("async") else ""
    if i.has("mbarrier_init"):
        return "fence_mbarrier_init();"
    return "__threadfence_block();" if i.has("cta") else "__threadfence();"


def to_address(i):
    if not any(m.startswith("shared") for m in i.modifiers):
        return put(i.arguments[0], value(i.arguments[1]))
    convert_ = "__cvta_generic_to_shared(pointer<void>({}, 0))" if i.has("to") else \
        "reinterpret_cast<size_t>(__cvta_shared_to_generic({}))"
    return put(i.arguments[0], convert_.format(value(i.arguments[1])))


def multiply(i):
    passed = ", ".join(typed(i.type(), a) for a in i.arguments[1:3])
    product = f"mul_{i.one_of('hi|wide', 'lo')}<{i.type()}>({passed})"
    added = f" + as<decltype({product})>({value(i.arguments[3])})" if i.name == "mad" else ""
    return put(i.arguments[0], f"static_cast<decltype({product})>({product}{added})")


def of_warp(i):
    target, *arguments = i.arguments
    passed = [typed("unsigned", a) for a in arguments]
    if i.name == "activemask":
        return put(target, "__activemask()")
    if i.name == "redux":
        operation = i.one_of("add|min|max|and|or|xor")
        return put(target, f"__reduce_{operation}_sync({passed[1]}, {typed(i.type(), arguments[0])})")
    return put(target, f"__{i.one_of('any|all|ballot')}_sync({passed[1]}, {value(arguments[0])})")


HANDLERS = {"ld": load_store, "ldu": load_store, "st": load_store, "atom": atomic, "red": atomic, "mov": move,
            "cvt": convert, "setp": set_predicate, "shfl": shuffle, "cp": copy_async, "ldmatrix": ldmatrix, "mma": mma,
            "wgmma": wgmma, "mbarrier": mbarrier, "bar": barrier, "barrier": barrier, "fence": fence, "membar": fence,
            "cvta": to_address, "mul": multiply, "mad": multiply, "vote": of_warp, "redux": of_warp,
            "activemask": of_warp, "trap": lambda i: "__trap();", "bra": lambda i: f"goto ptx_l_{i.arguments[0]};",
            "nanosleep": lambda i: f"__nanosleep({value(i.arguments[0])});",
            "createpolicy": lambda i: put(i.arguments[0], "0"),
            "setmaxnreg": lambda i: f"setmaxnreg_{i.modifiers[0]}<{value(i.arguments[0])}>();"}


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
    if i.name in NOTHING:
        return ""
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

#!/usr/bin/env python3
"""Translates the CUDA syntax of a .cu file to C++, so that g++ can compile it with dev/cpu.

    python3 dev/cpu/rewrite.py mine.cu -o build/mine.cpp
    python3 dev/cpu/rewrite.py main.cu src/kernels.cu -o build/main.cpp -I src

prints the names of the files to compile, one for each .cu file: the first is the argument of -o, the others are in the
same folder. Included files that are found, in the folder of the including file or a folder of -I, are translated too,
into build/main.includes/. Lines keep their numbers, and #line keeps the file's name, so compiler messages, debuggers
and __FILE__ refer to mine.cu.

    kernel<<<grid, block, shared, stream>>>(x, n);    becomes a call of cuda_cpu::launch
    extern __shared__ float tile[];                   becomes a pointer to dynamic_shared_memory
    asm("add.u32 %0, %1, 5;" : "=r"(x) : "r"(y));     becomes C++ statements (inline_ptx.py)
    __noinline__                                      becomes g++'s attribute (a macro would break g++'s headers)
    cudaLaunchKernel((const void*)kernel, ...)        loses the cast, so that the parameters' types are known
    #include <thrust/sort.h>                          becomes #error, as do others that dev/cpu does not emulate

#if is left to the preprocessor: launches in all its branches are translated. If several branches define a
template kernel with the same signature, its launcher is inserted after the first.
"""
import argparse
import ast
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import inline_ptx

# ---- what dev/cpu does not emulate; code that #if excludes may use it

NOT_EMULATED = "{}: {} not emulated; dev/cpu/README.md lists the limits"


def error(name, feature):
    """Returns C++ that is an error unless #if excludes it."""
    return f'_Pragma("GCC error \\"{NOT_EMULATED.format(name, feature)}\\"") '


# included files
HEADERS = {r"(cub|thrust|cuda|nv|cutlass|cute|cccl)/.*": "this part of CUB, Thrust, libcu++ or CUTLASS is",
           r"(cublas(_api|Xt)?|cu(rand|fft|sparse|solver|dnn|pti|file)\w*|np+\w*|nvrtc|nv[jJ]\w+|nvml|nvblas|nvperf\w*"
           r"|cudalibxt|cuComplex)\.h": "this library is",
           r"cuda_awbarrier\w*\.h": "experimental barriers are",
           r"cuda_fp[46]\.h": "FP6 and FP4 are",
           r"(cuda_)?(texture|surface)_\w*\.h": "textures and surfaces are",
           r"(cuda_\w+_interop|cuda(EGL|GL|VDPAU)\w*)\.h": "graphics libraries are"}
# names
NAMES = {"__cluster_dims__": "clusters are", "this_cluster": "clusters are",
         "cudaLaunchAttributeClusterDimension": "clusters are", "cudaMemPool_t": "memory pools are",
         **dict.fromkeys("cudaTextureObject_t cudaSurfaceObject_t cudaResourceDesc cudaTextureDesc cudaArray "
                         "cudaArray_t cudaMipmappedArray_t cudaChannelFormatDesc tex1D tex1Dfetch tex2D tex3D".split(),
                         "textures, surfaces and CUDA arrays are"),
         **dict.fromkeys("cudaExtent cudaPitchedPtr cudaMemcpy3DParms".split(), "3D copies are"),
         **dict.fromkeys("cudaKernelNodeParams cudaMemcpyNodeParams cudaGraphAddKernelNode".split(),
                         "graphs that are not captured are"),
         **dict.fromkeys("cudaIpcMemHandle_t cudaIpcEventHandle_t".split(), "memory of other processes is"),
         **dict.fromkeys("CUcontext CUdevice CUmodule CUfunction CUmemGenericAllocationHandle".split(),
                         "most of the driver API is"),
         **dict.fromkeys("DeviceAdjacentDifference DeviceFor DeviceHistogram DeviceMemcpy DeviceMergeSort "
                         "DevicePartition DeviceRadixSort DeviceReduce DeviceRunLengthEncode DeviceScan "
                         "DeviceSegmentedReduce DeviceSegmentedRadixSort DeviceSegmentedSort DeviceSelect".split(),
                         "device-wide CUB is"),
         **dict.fromkeys("BlockAdjacentDifference BlockDiscontinuity BlockExchange BlockHistogram BlockLoad "
                         "BlockMergeSort BlockRadixSort BlockShuffle BlockStore WarpExchange WarpMergeSort".split(),
                         "this part of CUB is"),
         **dict.fromkeys("labeled_partition binary_partition".split(), "groups of threads with the same label are")}

# included files of dev/cpu whose names a pattern of HEADERS includes
PROVIDED = {"cub/cub.cuh", "cuda/atomic", "cuda/pipeline"}
# included files whose contents are in another file of dev/cpu; NVIDIA's own, if installed, would clash with it
ELSEWHERE = {r"cooperative_groups/(scan|memcpy_async)\.h": "cooperative_groups/reduce.h",
             r"cub/(cub/cub|(block|warp|thread|util)\w*(/\w+)?)\.cuh": "cub/cub.cuh",
             r"cuda/std/atomic": "cuda/atomic", r"cuda/(std/)?barrier": "cuda/pipeline",
             r"cuda_pipeline_\w+\.h": "cuda_pipeline.h",
             r"(crt/.*|(builtin|device|driver|library|vector)_types|(math|vector|device|driver|common)_functions"
             r"|device_(atomic|double)_functions|device_launch_parameters|cudaProfiler"
             r"|cuda_((device_)?runtime_api|occupancy|profiler_api|stdint)"
             r"|channel_descriptor|host_(config|defines)|math_constants|sm_\d+_\w+)\.h(pp)?": "cuda_runtime.h",
             r"(nvtx3/)?nv(Tools|tx)\w+\.h(pp)?": "nvtx3/nvToolsExt.h"}

# ---- tokens

TOKEN = re.compile(r"""
    (?P<space>[ \t\r\f\v]+|\\\r?\n)
  | (?P<newline>\n)
  | (?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
  | (?P<string>(?:u8|u|U|L)?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)"|(?:u8|u|U|L)?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|u|U|L)?'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z_]|[0-9A-Za-z_.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<punctuator>::|->|.)
""", re.VERBOSE | re.DOTALL)


class Token:
    def __init__(self, kind, text, at, line, directive):
        self.kind, self.text, self.at, self.line, self.directive = kind, text, at, line, directive
        self.end = at + len(text)


def tokenize(text):
    """Returns the tokens of a file. `directive` is the number of a token's preprocessor directive, or None."""
    tokens, line, directive, line_is_fresh, count = [], 1, None, True, 0
    for match in TOKEN.finditer(text):
        kind, word = match.lastgroup, match.group()
        if kind == "fence":
            kind = "string"
        if kind == "newline":
            directive, line_is_fresh = None, True
        elif kind not in ("space", "comment"):
            if word == "#" and line_is_fresh:
                count, directive = count + 1, count
            tokens.append(Token(kind, word, match.start(), line, directive))
            line_is_fresh = False
        line += word.count("\n")
    return tokens


OPENING, CLOSING = {"(": ")", "[": "]", "{": "}"}, {")": "(", "]": "[", "}": "{"}


class Tokens(list):
    """A list of tokens, with the queries of a parser. Positions are indices in the list."""

    def is_run(self, i, punctuator):
        """Returns whether <<< or >>> begins at i. (Some formatters put spaces in between, which nvcc accepts.)"""
        return all(self.text(i + k) == punctuator for k in range(3))

    def text(self, i):
        return self[i].text if 0 <= i < len(self) else ""

    def partner(self, places, begin, end):
        """Returns the position of the bracket that matches the one at places[0], or None. `places`: positions in the
        order of the search. `begin` maps each bracket that opens a pair in this order to its partner; `end` lists the
        partners. An angle bracket within other brackets is a comparison."""
        stack = []
        for j in places:
            word = self[j].text
            if self[j].kind != "punctuator":
                continue
            if word in begin and not (word == ">" and stack and stack[-1] != "<"):
                stack.append(begin[word])
            elif word in end and not (word == "<" and stack[-1] != "<"):
                if word != stack.pop():
                    return None
                if not stack:
                    return j
        return None

    def match(self, i):
        """Returns the position of the bracket that closes the one at i, or None."""
        return self.partner(range(i, len(self)), OPENING, CLOSING)

    def match_back(self, i):
        """Returns the position of the bracket that matches a closing one at i, or None. < counts only if i is >."""
        angles = {">": "<"} if self[i].text == ">" else {}
        return self.partner(range(i, -1, -1), {**CLOSING, **angles}, [*OPENING, *angles.values()])

    def match_angle(self, i):
        """Returns the position of the > that closes template arguments opened at i, or None if < is less-than."""
        j = i + 1
        while j < len(self):
            word = self[j].text
            if self[j].kind == "punctuator":
                if word == ">":
                    return j
                if word in OPENING:
                    j = self.match(j)
                elif word == "<" and self[j - 1].kind == "name":
                    j = self.match_angle(j) or j
                elif word in CLOSING or word == ";":
                    return None
                if j is None:
                    return None
            j += 1
        return None

    def split(self, first, last):
        """Splits [first, last) at the commas outside of brackets of any kind."""
        parts, begin, j = [], first, first
        while j < last:
            if self[j].text in OPENING:
                j = self.match(j) or last
            elif self[j].text == "<":
                j = self.match_angle(j) or j
            elif self[j].text == ",":
                parts.append(self[begin:j])
                begin = j + 1
            j += 1
        return parts + [self[begin:last]] if begin < last or parts else []


# ---- declarations of kernels

WORDS_BEFORE_PARENTHESES = {"__launch_bounds__", "__attribute__", "__align__", "alignas", "__cluster_dims__",
                            "__maxnreg__", "decltype", "__declspec"}
TYPE_WORDS = {"void", "bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "auto"}
NOT_A_TYPE = {"const", "volatile", "struct", "class", "enum", "typename", "__restrict__", "__restrict",
              "__grid_constant__", "::"}


def spell(tokens):
    return " ".join(t.text for t in tokens)


def place_of_name(part):
    """Returns the position of a parameter's name in its declaration, and whether there is a name. Without one, the
    position is where it would be."""
    for j in range(len(part) - 2):
        if part[j].text in ("*", "&") and part[j - 1].text == "(":
            while part[j + 1].text in NOT_A_TYPE:
                j += 1
            if part[j + 1].kind == "name":
                return j + 1, True
    end = next((j for j, t in enumerate(part) if t.text == "["), len(part))
    has_type = any(t.kind == "name" and t.text not in NOT_A_TYPE for t in part[:end - 1])
    last = part[end - 1]
    after_class = part[end - 2].text in ("class", "typename", ".")   # of a template: class T, typename... T
    named = (last.kind == "name" and last.text not in TYPE_WORDS | NOT_A_TYPE and (has_type or after_class)
             and part[end - 2].text != "::")
    return (end - 1, True) if named else (end, False)


class Parameter:
    """A parameter of a function or a template: its type and its name, generated if the declaration has none."""

    def __init__(self, part, number):
        self.pack = any(t.text == "." for t in part)
        equals = next((j for j, t in enumerate(part) if t.text == "="), len(part))
        declared, default = part[:equals], part[equals:]
        place, named = place_of_name(declared) if len(declared) > 1 else (len(declared), False)
        self.name = declared[place].text if named else f"cuda_cpu_{number}"
        self.type = spell(declared[:place]).replace(". . .", "...")
        self.after = spell(declared[place + named:])
        self.default = spell(default)

    def declaration(self):
        return " ".join(filter(None, [self.type, self.name, self.after, self.default]))

    def signature(self):
        """Returns the type, without a const of the parameter itself: const T x declares the same function as T x."""
        words = self.type.split()
        is_value = not {"*", "&"} & set(words)
        kept = (w for i, w in enumerate(words) if w != "const" or not (is_value or "*" in words[:i]))
        return " ".join(kept) + self.after

    def use(self):
        return self.name + ("..." if self.pack else "")


class Kernel:
    """A declaration or definition of a kernel. Its launcher is inserted at `end`, the offset at which it ends."""

    def __init__(self, name, template, parameters, is_static, end):
        self.name, self.template, self.parameters, self.end = name, template, parameters, end
        self.is_static = is_static   # it may be a member of a class

    def signature(self):
        template = None if self.template is None else [t.signature() for t in self.template]
        return str((template, [p.signature() for p in self.parameters]))

    def launcher(self):
        """Returns the text of a function whose parameters are a configuration and the kernel's parameters. Overloads,
        template arguments, conversions and default arguments of a launch then work as in any call."""
        head = ""
        kernel = self.name
        if self.template is not None:
            head = "template <" + ", ".join(t.declaration() for t in self.template) + "> "
            kernel += "<" + ", ".join(t.use() for t in self.template) + ">"
        declared = "".join(", " + p.declaration() for p in self.parameters)
        types = ", ".join(f"::cuda_cpu::ParameterType<decltype({p.name})>" + ("..." if p.pack else "")
                          for p in self.parameters)
        used = ", ".join(p.use() for p in self.parameters)
        return (f" {head}{'static ' if self.is_static else ''}inline void cuda_cpu_launch_{self.name}"
                f"(::cuda_cpu::Configuration cuda_cpu_configuration{declared}) {{ "
                f"::cuda_cpu::launch(static_cast<void (*)({types})>({kernel}), cuda_cpu_configuration)({used}); }}")


def start_of_specifiers(tokens, i):
    """Returns the position of the first specifier (static, __launch_bounds__(256), ...) of the declaration that
    contains the token at i."""
    while i > 0 and (tokens[i - 1].kind in ("name", "string") and tokens[i - 1].text != "template"
                     or tokens[i - 1].text in (")", "]")):
        i = i - 1 if tokens[i - 1].kind != "punctuator" else tokens.match_back(i - 1) or 0
    return i


def find_template(tokens, i):
    """Returns the template parameters of the declaration whose specifiers begin at i, or None if it is not a template;
    [] for template <>."""
    j = i - 1
    if tokens.text(j) != ">":
        return None
    begin = tokens.match_back(j)
    if begin is None or tokens.text(begin - 1) != "template":
        return None
    return [Parameter(part, n) for n, part in enumerate(tokens.split(begin + 1, j))]


def find_parameters(tokens, i):
    """Returns the positions of a function's name and of the parentheses around its parameters. i: the position of its
    qualifier. Returns None if no function follows."""
    j = i + 1
    while j < len(tokens) and tokens[j].text not in (";", "{", "}", "="):
        if tokens[j].text == "(":
            close = tokens.match(j)
            if close is None:
                return None
            if tokens[j - 1].text not in WORDS_BEFORE_PARENTHESES:
                return j - 1, j, close
            j = close
        j += 1
    return None


# ---- one file


class InvalidLaunch(Exception):
    """A <<< that does not begin a launch. The text names file and line."""


class File:
    """A file's tokens, the kernels, functions and includes found in them, and the edits to make."""

    def __init__(self, text, name, open_include=lambda spelled, quoted: None):
        self.source, self.name = text, name
        self.edits, self.kernels, self.includes, self.device_code = [], [], [], []
        directives, self.tokens = {}, Tokens()
        for token in tokenize(text):
            line = self.tokens if token.directive is None else directives.setdefault(token.directive, Tokens())
            line.append(token)
        self.conditions = [t for line in directives.values() if line.text(1).startswith(("if", "elif")) for t in line]
        self.bodies = [line for line in directives.values() if line.text(1) == "define"]
        for line in directives.values():
            if line.text(1) == "include" and len(line) > 2:
                self.include(line[1], Tokens(line[2:]), open_include)
        self.find_functions()

    def include(self, directive, rest, open_include):
        quoted = rest[0].kind == "string"
        spelled = rest[0].text[1:-1] if quoted else self.source[rest[0].end:rest[-1].at].strip()
        place = open_include(spelled, quoted)
        elsewhere, feature = (next((value for header, value in table.items() if re.fullmatch(header, spelled)), None)
                              for table in (ELSEWHERE, HEADERS))
        if place is not None:
            self.includes.append((rest[0].at, rest[-1].end, place))
        elif spelled in PROVIDED:
            return
        elif elsewhere:
            self.edit(rest[0].at, rest[-1].end, f"<{elsewhere}>")
        elif feature:
            self.edit(directive.at, rest[-1].end, "error " + NOT_EMULATED.format(spelled, feature))

    def find_functions(self):
        """Finds the kernels, the names of all other functions, and the bodies of functions that only kernels call.
        There, and outside of functions, __CUDA_ARCH__ is that of an H100."""
        tokens, own_places, device_code = self.tokens, set(), []
        for i, token in enumerate(tokens):
            found = find_parameters(tokens, i) if token.text in ("__global__", "__device__") else None
            if found is None:
                continue
            name, open_, close = found
            end = close + 1
            while end < len(tokens) and tokens[end].text not in ("{", ";", "}", "=", ","):
                end = (tokens.match(end) or end) + 1 if tokens[end].text == "(" else end + 1
            if tokens.text(end) == "{":
                begin, end = end, tokens.match(end)
            is_kernel = token.text == "__global__"
            if is_kernel:
                own_places.add(name)
            if end is None or tokens.text(end) not in ("}", ";"):
                continue
            if is_kernel:
                self.add_kernel(i, name, open_, close, end)
            if is_kernel or "__host__" not in {t.text for t in tokens[start_of_specifiers(tokens, i):name]}:
                device_code.append((tokens[open_].at, tokens[end].at))
                if tokens.text(end) == "}":
                    self.device_code.append(range(begin, end))
        for word in self.conditions:
            if word.text == "__CUDA_ARCH__":
                i = next((i for i, t in enumerate(tokens) if t.at > word.at), len(tokens))
                if any(begin < word.at < end for begin, end in device_code) or not self.is_in_function(i):
                    self.edit(word.at, word.end, "CUDA_CPU_ARCH")
        self.functions = {tokens[i].text for i in range(len(tokens) - 1)
                          if tokens[i].kind == "name" and tokens[i + 1].text == "(" and i not in own_places}

    def add_kernel(self, i, name, open_, close, end):
        tokens = self.tokens
        begin = start_of_specifiers(tokens, i)
        template = find_template(tokens, begin)
        if template == [] or tokens[name].kind != "name":
            return  # a specialisation, or a name that a macro generates
        parts = tokens.split(open_ + 1, close)
        if len(parts) == 1 and spell(parts[0]) == "void":
            parts = []
        parameters = [Parameter(part, n) for n, part in enumerate(parts)]
        for token in (t for part, p in zip(parts, parameters) if p.pack for t in part):
            if token.text.startswith("__restrict"):   # in a pack g++ keeps it in the type of the function
                self.edit(token.at, token.end, "")
        is_static = any(t.text == "static" for t in tokens[begin:name])
        self.kernels.append(Kernel(tokens[name].text, template, parameters, is_static, tokens[end].end))

    # -- rewriting

    def edit(self, begin, end, text):
        self.edits.append((begin, end, text))

    def rewrite(self, with_launcher):
        """Returns the text as C++. Kernels in with_launcher are launched by their launchers, the others by address."""
        for kernel in self.kernels:
            if kernel in with_launcher.get(kernel.name, ()):
                self.edit(kernel.end, kernel.end, kernel.launcher())
        for tokens in [self.tokens] + [Tokens(body[3:]) for body in self.bodies]:
            is_file = tokens is self.tokens
            for i, token in enumerate(tokens):
                if tokens.is_run(i, "<") and tokens.text(i - 1) not in ("operator", "<"):
                    self.rewrite_launch(tokens, i, with_launcher)
                elif token.text == "__shared__":
                    self.rewrite_shared(tokens, i, is_file)
                elif token.text == "__noinline__" and tokens.text(i - 1) != "(":
                    self.edit(token.at, token.end, "__attribute__((noinline))")
                elif token.text in ("asm", "__asm__", "__asm"):
                    self.rewrite_asm(tokens, i)
                elif token.text in ("cudaLaunchKernel", "cudaLaunchCooperativeKernel") and tokens.text(i + 1) == "(":
                    self.remove_cast(tokens, i + 2)
        pieces, at = [], 0
        for begin, end, text in sorted(self.edits, key=lambda e: (e[0], e[1])):
            pieces += [self.source[at:begin], text, "\n" * (self.source.count("\n", begin, end) - text.count("\n"))]
            at = end
        return "".join(pieces) + self.source[at:]

    def rewrite_launch(self, tokens, i, with_launcher):
        close = end_of_configuration(tokens, i + 3)
        first, name = start_of_callee(tokens, i)
        if close is None or first is None:
            raise InvalidLaunch(f"{self.name}:{tokens[i].line}: <<<: expected a launch, "
                                "kernel<<<grid, block>>>(arguments)")
        (open_, end), arguments = (tokens[i].at, tokens[close + 2].end), tokens[close + 3]
        if tokens is self.tokens and any(i in body for body in self.device_code):
            launch = tokens.text(i - 1) + "<<<>>>"
            self.edit(tokens[first].at, tokens[first].at, error(launch, "launches by kernels are"))
        if name is not None and with_launcher.get(tokens[name].text):
            self.edit(tokens[name].at, tokens[name].at, "cuda_cpu_launch_")
            self.edit(open_, tokens[i + 2].end, "(::cuda_cpu::Configuration(")
            self.edit(tokens[close].at, end, ")")
            self.edit(arguments.at, arguments.end, "" if tokens.text(close + 4) == ")" else ", ")
        else:
            self.edit(tokens[first].at, tokens[first].at, "::cuda_cpu::launch(")
            self.edit(open_, tokens[i + 2].end, ", ::cuda_cpu::Configuration(")
            self.edit(tokens[close].at, end, "))")

    def rewrite_asm(self, tokens, i):
        """Translates asm volatile("text" : outputs : inputs : clobbers)."""
        open_ = next((j for j in range(i + 1, min(i + 4, len(tokens))) if tokens[j].text == "("), None)
        end = tokens.match(open_) if open_ is not None else None
        if end is None:
            return
        sections, j = [[]], open_ + 1
        while j < end:
            if tokens[j].text in (":", "::") and tokens[j].kind == "punctuator":
                sections += [[] for _ in tokens[j].text]
            else:
                close = (tokens.match(j) if tokens[j].text in OPENING else None) or j
                sections[-1] += range(j, close + 1)
                j = close
            j += 1
        operands = []
        for section in sections[1:3]:
            for j, k in enumerate(section):
                if tokens[k].text == "(" and tokens[k - 1].kind == "string":
                    close = tokens.match(k)
                    expression = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n|\n", " ", self.source[tokens[k].end:tokens[close].at])
                    operands.append((tokens[k - 1].text[1:-1], expression))
        try:
            if any(tokens[k].kind != "string" for k in sections[0]):
                raise inline_ptx.Unknown("a text that is not a string")
            text = "".join(ast.literal_eval(re.sub(r"\\\n", "", tokens[k].text)) for k in sections[0])
            code = inline_ptx.translate(text, operands, len(sections) > 1)
        except (inline_ptx.Unknown, ValueError, SyntaxError, IndexError) as error:
            what = "inline PTX: " + str(error).replace("\\", "").replace('"', "'").replace("\n", " ")
            code = f'_Pragma("GCC error \\"{NOT_EMULATED.format(what, "this is")}\\"")'
        lines = self.source.count("\n", tokens[i].at, tokens[end].end)
        self.edit(tokens[i].at, tokens[end].end, code + ("\\\n" * lines if tokens is not self.tokens else ""))

    def remove_cast(self, tokens, i):
        """Removes a cast to void* at i: (const void*) or reinterpret_cast<const void*>, whose operand keeps its ()."""
        end = tokens.match(i) if tokens.text(i) == "(" else tokens.match_angle(i + 1)
        inside = [token.text for token in tokens[i:end]] if end is not None else []
        if "void" in inside and inside[-1] == "*":
            self.edit(tokens[i].at, tokens[end].end, "")

    def rewrite_shared(self, tokens, i, is_file):
        """Translates extern __shared__ T name[]. (Other __shared__ variables become thread_local by the macro.)"""
        begin = i
        while begin > 0 and tokens[begin - 1].kind == "name":
            begin -= 1
        end = next((j for j in range(i, len(tokens)) if tokens[j].text == ";"), len(tokens))
        if "extern" not in {t.text for t in tokens[begin:end]}:
            return
        words, j = Tokens(), begin
        while j < end:
            if tokens[j].text in ("__align__", "alignas", "__attribute__") and tokens.text(j + 1) == "(":
                j = tokens.match(j + 1) or end
            elif tokens[j].text not in ("extern", "__shared__", "static"):
                words.append(tokens[j])
            j += 1
        if spell(words) == "float4 dynamic_shared_memory [ ]":
            return  # as dev/cpu declares it
        keep = "" if not is_file or self.is_in_function(i) else "static thread_local "
        place = next((n for n, t in enumerate(words) if t.text == "["), len(words)) - 1
        kind = spell(words[:place])
        self.edit(tokens[begin].at, tokens[end - 1].end,
                  f"{keep}{kind}* const {words[place].text} = reinterpret_cast<{kind}*>(dynamic_shared_memory)")

    def is_in_function(self, i):
        """Returns whether i is within braces other than those of a namespace."""
        stack = []
        for j, token in enumerate(self.tokens[:i]):
            if token.text == "{" and token.kind == "punctuator":
                k = j - 1
                while self.tokens.text(k) == "::" or (k >= 0 and self.tokens[k].kind == "name"
                                                      and self.tokens[k].text != "namespace"):
                    k -= 1
                namespace = self.tokens.text(k) == "namespace" or (
                    k >= 0 and self.tokens[k].kind == "string" and self.tokens.text(k - 1) == "extern")
                stack.append(namespace)
            elif token.text == "}" and token.kind == "punctuator" and stack:
                stack.pop()
        return not all(stack)


def end_of_configuration(tokens, i):
    """Returns the position of the >>> that closes a configuration beginning at i, or None. A "(" must follow it, and
    template arguments in between must be closed. A < after a name is tried as the start of template arguments, and if
    that finds no >>>, as less-than."""
    while i < len(tokens):
        word = tokens[i].text
        if tokens.is_run(i, ">") and tokens.text(i + 3) == "(":
            return i
        if tokens[i].kind == "punctuator" and word in OPENING:
            i = tokens.match(i)
            if i is None:
                return None
        elif word == "<" and tokens[i - 1].kind == "name":
            close = tokens.match_angle(i)
            found = end_of_configuration(tokens, close + 1) if close is not None else None
            if found is not None:
                return found
        elif word in CLOSING or word == ";":
            return None
        i += 1
    return None


def start_of_callee(tokens, i):
    """Returns the positions of the start of the expression before <<<, and of the kernel's name if it ends with one."""
    j, name = i - 1, None
    if tokens.text(j) == ">":
        j = tokens.match_back(j)
        if j is None or tokens[j - 1].kind != "name":
            return None, None
        j -= 1
    if j >= 0 and tokens[j].kind == "name":
        name = j
    while True:
        while tokens.text(j) in (")", "]", ">"):
            j = tokens.match_back(j)
            if j is None:
                return None, None
            if tokens[j - 1].kind != "name" and tokens.text(j - 1) not in (")", "]"):
                break
            j -= 1
        j -= tokens.text(j - 1) == "template"
        before, scope = tokens.text(j - 1), tokens.text(j - 2)
        if before == scope == "#":      # a name that a macro concatenates
            name, j = None, j - 3
        elif before == "::" and not re.fullmatch(r"\w+|>", scope):
            return j - 1, name
        elif before in (".", "->", "::"):
            j -= 2
        else:
            return j, name


# ---- programs of several files

# The names become errors.
PROLOGUE = ("#include <cuda_runtime.h>\n#define __CUDACC__ 1\n#define __CUDACC_VER_MAJOR__ 13\n"
            "#define CUDA_CPU_ARCH 900\n" +
            "".join(f"#define {name} {error(name, feature)}\n" for name, feature in NAMES.items()))


def needing_launchers(files):
    """Returns by name the kernel declarations that need a launcher: templates, overloaded kernels (also if a host
    function has the same name), and kernels with default arguments. All others can be launched by address. The launcher
    is inserted after the first declaration of each signature."""
    by_name = {}
    for kernel in (kernel for file in files for kernel in file.kernels):
        by_name.setdefault(kernel.name, {}).setdefault(kernel.signature(), kernel)
    functions = {name for file in files for name in file.functions}
    return {name: list(group.values()) for name, group in by_name.items()
            if len(group) > 1 or name in functions
            or any(k.template or any(p.default for p in k.parameters) for k in group.values())}


class Program:
    """A .cu file and the files that it includes. Each is written once."""

    def __init__(self, folders=()):
        # The headers of a CUDA toolkit are replaced by the emulator's.
        self.folders = [folder for folder in folders if not os.path.isfile(os.path.join(folder, "cuda_runtime.h"))]
        self.files = {}

    def read(self, path):
        if path in self.files:
            return
        self.files[path] = None
        # Editors on Windows begin a file with a byte order mark, which g++ accepts at the begin of a file only.
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            text = file.read()

        def open_include(spelled, quoted):
            for folder in ([os.path.dirname(path)] if quoted else []) + self.folders:
                place = os.path.normpath(os.path.join(folder, spelled))
                if os.path.isfile(place):
                    self.read(place)
                    return place
            return None

        self.files[path] = File(text, path, open_include)

    def write(self, main, output):
        """Writes main to output and the included files to a folder beside it."""
        self.read(main)
        with_launcher = needing_launchers(self.files.values())
        folder = os.path.splitext(output)[0] + ".includes"
        base = os.path.dirname(main) or "."
        places = {path: os.path.join(folder, os.path.relpath(path, base).replace(os.pardir + os.sep, "up/"))
                  for path in self.files}
        places[main] = output
        texts = {}
        for path, file in self.files.items():
            for begin, end, included in file.includes:
                target = os.path.relpath(places[included], os.path.dirname(places[path]) or ".")
                file.edit(begin, end, f'"{target}"')
            text = f"#line 1 {json.dumps(path, ensure_ascii=False)}\n{file.rewrite(with_launcher)}"
            if path == main:
                uses_ptx = any(re.search(r"\b(asm|__asm|__asm__|__cvta_\w+|__is(Shared|Global))\b", each.source)
                               for each in self.files.values())
                text = PROLOGUE + ("#include <inline_ptx.h>\n" if uses_ptx else "") + (
                    "#undef WARP_SIZE\n" if self.declares("WARP_SIZE") else "") + text
            texts[places[path]] = text
        for place, text in texts.items():
            os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
            with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(text)

    def declares(self, name):
        """Returns whether the program defines this name, which the build defines as a macro."""
        return any(
            any(body.text(2) == name for body in file.bodies) or
            any(token.text == name and file.tokens[i - 1].kind == "name" and file.tokens[i - 1].text != "return"
                for i, token in enumerate(file.tokens) if i > 0)
            for file in self.files.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.cu")
    parser.add_argument("-o", required=True, dest="output", metavar="FILE.cpp")
    parser.add_argument("-I", action="append", default=[], dest="folders", metavar="FOLDER")
    arguments = parser.parse_args()
    stem, extension = os.path.splitext(arguments.output)
    outputs = []
    for n, path in enumerate(arguments.files):
        if not os.path.isfile(path):
            print(f"{path}: no such file; expected a .cu file", file=sys.stderr)
            return 2
        name = os.path.splitext(os.path.basename(path))[0]
        outputs.append(arguments.output if n == 0 else f"{stem}-{n}-{name}{extension}")
        try:
            Program(arguments.folders).write(os.path.normpath(path), outputs[-1])
        except InvalidLaunch as error:
            print(error, file=sys.stderr)
            return 2
    print("\n".join(outputs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

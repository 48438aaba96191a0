#!/usr/bin/env python3
"""Tests of rewrite.py: translates small .cu files, compiles them with dev/cpu and runs them.

    python3 dev/cpu/test_rewrite.py
"""
import os
import re
import subprocess
import sys
import textwrap

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "tests"))
from testing import expect, expect_equal, run_tests, write


class World:
    """A folder with a program's files. Commands run in it, as a user's would."""

    def __init__(self, folder, files):
        self.folder = folder
        for path, text in files.items():
            write(f"{folder}/{path}", textwrap.dedent(text))

    def run(self, *command):
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "2"})

    def rewrite(self, *arguments):
        return self.run(sys.executable, os.path.join(HERE, "rewrite.py"), *arguments, "-o", "build/program.cpp")

    def compile(self, *files, warnings=()):
        return self.run("g++", "-x", "c++", "-std=c++17", "-O0", "-g", *warnings, "-fopenmp", "-I" + HERE,
                        "-DWARP_SIZE=32", *files, "-o", "program", "-lboost_context")

    def build_and_run(self, *arguments):
        """Returns what the program prints: for each line, the first word as key and the rest as value."""
        rewritten = self.rewrite(*arguments)
        if rewritten.returncode != 0:
            raise RuntimeError(rewritten.stderr)
        compiled = self.compile(*rewritten.stdout.split())
        if compiled.returncode != 0:
            raise RuntimeError(compiled.stderr[:2000])
        result = self.run("./program")
        return dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)


# Programs call is(what, found, expected), which prints wrong values and counts right ones.
IS = r"""
#include <cstdio>
static int right = 0;
inline void is(const char* what, double found, double expected) {
    if (found == expected) right++;
    else printf("wrong %s: %g; expected %g\n", what, found, expected);
}
"""


# ---- launches

LAUNCHES = IS + r"""
#include <vector>
namespace outer { namespace {
template <class T, int N = 2, typename = void>
__global__ void __launch_bounds__(256) fill(T* out, const T value, size_t n)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = value * N;
} } }
template <class T> __global__ void forward_declared(T*, const T*, int = 7);
__global__ void which(float* x, const float* y = nullptr) { x[0] = y ? 11 : 12; }
__global__ void which(double* x, int) { x[0] = 13; }
static __global__ void simple(const float* x, size_t n, float* y) { *y = x[0] + float(n); }
template <class F> __global__ void call(F f) { f(threadIdx.x); }
template <class... Numbers> __global__ void sum(float* out, Numbers... numbers) { *out = float((numbers + ... + 0)); }
template <int N> __global__ void by_number(float (*rows)[N]) { rows[1][0] = N; }
template <> __global__ void by_number<5>(float (*rows)[5]) { rows[1][0] = 55; }
__global__ void same_name(float* x) { *x += 1; }
void same_name(float* x, int block) { same_name<<<1, block>>>(x); }
__global__ void grid_size(float* x) { *x = gridDim.x * 100 + gridDim.y * 10 + blockDim.x; }
__device__ __noinline__ float one() { return 1; }
__global__ void calls(float* x) { *x = one(); }
template <int A, int B> struct Sum { static constexpr int value = A + B; };
template <class K> void by_parameter(K kernel, float* x) { kernel<<<dim3(1), 1>>>(x, 4, x); }
#define LAUNCH(kernel, ...) do { kernel<<<1, \
    1>>>(__VA_ARGS__); /* <<< */ \
} while (0)
#define CHECK(...) do { __VA_ARGS__; if (cudaGetLastError() != cudaSuccess) printf("check failed\n"); } while (0)
struct Owner {
    float* x;
    int blocks = 2;
    void run() { grid_size<<<this->blocks, 3>>>(x); }
};
int main()
{
    float *x; double *d; float (*rows)[5]; cudaStream_t stream;
    cudaMalloc(&x, 1024); cudaMalloc(&d, 8); cudaMalloc((void**)&rows, 1024); cudaStreamCreate(&stream);
    const int n = 256;
    const char* text = "simple<<<1, 2>>>(3) // \" no";
    const char* raw = R"x(simple<<<1, 2>>>(3))" )x"; const char quote = '"'; const int million = 1'000'000;
    // simple<<<1, 2>>>(x, 3, x); \
       simple<<<1, 2>>>(x, 3, x);
    printf("text %s %s %c %d\n", text, raw, quote, million);
    outer::fill<float, 3><<<n / 64, 64,
                            64 * sizeof(char), stream>>>(x, 2,
                                                         n);
    printf("line %d %s\n", __LINE__, __FILE__);
    is("explicit template arguments and a configuration over three lines", x[0] + x[255], 12);
    outer::fill<<<Sum<1, Sum<1, 1>::value>::value, [&](int a) { return a > 2 ? 32 : 64; }(n), 0>>>(x, 1.5f, 256);
    is("deduced template arguments; templates, commas and lambdas in a configuration", x[0] + x[255], 6);
    forward_declared<<<1, 1>>>(x, x); is("a template that is defined later, with a default argument", x[0], 7);
    which<<<1, 1>>>(x); is("an overload with a default argument", x[0], 12);
    which<<<1, 1>>>(x, x + 1); is("the same overload with the argument", x[0], 11);
    which<<<1, 1>>>(d, NULL); is("an overload for another type; NULL converts to int as in C++", d[0], 13);
    x[0] = 1; simple<<<1, n < 3 ? 2 : 1>>>(x, n, x); is("conversions of arguments; < as less-than", x[0], 257);
    x[0] = 1; LAUNCH(simple, x, 5, x); is("a launch in a macro's body", x[0], 6);
    x[0] = 1; CHECK(simple<<<1, 1>>>(x, 6, x)); is("a launch in a macro's argument", x[0], 7);
    x[0] = 1; by_parameter(simple, x); is("a kernel passed as a parameter", x[0], 5);
    void (*all[])(const float*, size_t, float*) = {simple};
    x[0] = 0; all[0]<<<1, 1>>>(x, 1, x); (*all)<<<1, 1>>>(x, 1, x); is("kernels in an array of pointers", x[0], 2);
    call<<<1, 4>>>([=] __device__ (int i) { x[i] = 10 + i; }); is("a lambda as argument", x[3], 13);
    sum<<<1, 1>>>(x, 1, 2.5, 3u); is("a parameter pack", x[0], 6.5);
    by_number<4><<<1, 1>>>((float (*)[4])x); is("an explicit integer template argument", x[4], 4);
    by_number<<<1, 1>>>(rows); is("a deduced specialisation", rows[1][0], 55);
    x[0] = 1; simple<< <1, 1 >> >(x, 2, x); is("<< < and >> >", x[0], 3);
    x[0] = 1; same_name(x, 1); is("a host function with the kernel's name", x[0], 2);
    grid_size<<<{2, 3}, {4}>>>(x); is("a configuration in braces", x[0], 234);
    Owner{x}.run(); is("a launch in a member function", x[0], 213);
    calls<<<1, 1>>>(x); is("__noinline__", x[0], 1);
    simple<<<0, 1>>>(x, n, x); is("a launch's error", cudaGetLastError(), cudaErrorInvalidConfiguration);
    cudaGraph_t graph; cudaGraphExec_t executable;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    x[0] = 0; simple<<<1, 1, 0, stream>>>(x, 2, x); const float in_capture = x[0];
    cudaStreamEndCapture(stream, &graph); cudaGraphInstantiate(&executable, graph);
    for (int i = 0; i < 3; i++) cudaGraphLaunch(executable, stream);
    cudaStreamSynchronize(stream); is("a launch into a captured stream", 10 * in_capture + x[0], 6);
    printf("right %d\n", right);
}
template <class T> __global__ void forward_declared(T* x, const T* y, int z) { *x = z; }
"""


def test_launches():
    world = World("launches", {"mine.cu": LAUNCHES})
    got = world.build_and_run("mine.cu")
    line = next(n for n, text in enumerate(LAUNCHES.split("\n"), 1) if "__LINE__" in text)
    expect_equal(got, {"right": "22", "line": f"{line} mine.cu",
                       "text": 'simple<<<1, 2>>>(3) // " no simple<<<1, 2>>>(3))"  " 1000000'},
                 "all forms of launches; strings are not changed; __LINE__ and __FILE__ refer to the user's file")
    with open(os.path.join(world.folder, "build/program.cpp")) as file:
        text = file.read()
    lines = text[text.index('#line 1 "mine.cu"\n'):].split("\n")[1:]
    words = [re.findall(r"\w+", line) for line in LAUNCHES.replace("__noinline__", "noinline").split("\n")]
    moved = [n for n, line in enumerate(words, 1) if any(word not in lines[n - 1] for word in line)]
    expect(len(lines) == len(words) and not moved, "every word stays in its line", str(moved))


# ---- signatures of template kernels, shared memory

DECLARATIONS = IS + r"""
template <typename T> __global__ void copy(const T* __restrict__ in, T* __restrict__ out, const int n)
{
    if (threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x] + 1;
}
template <typename T, int N = 4> __launch_bounds__(128, 2) __global__
void rows(T* const __restrict__ out, T (*__restrict__ in)[N]) { out[0] = N + in[1][0]; }
template <template <class> class F, class T> __global__ void apply(T* __restrict__ out, F<T> f) { out[0] = f(3); }
template <class T> struct Twice { __device__ T operator()(T x) const { return 2 * x; } };
namespace outer::inner {
template <class T, unsigned SIZE> static __global__ void __launch_bounds__(SIZE) size(T* __restrict__ x) { *x = SIZE; }
}
namespace outer { template <class T> void run(T* x) { inner::size<T, 32u><<<1, 32>>>(x); } }
template <class T> struct Owner {
    template <int N> static __global__ void number(T* __restrict__ out) { out[0] = N; }
    static __global__ void triple(const T* __restrict__ in, T* __restrict__ out) { out[0] = in[0] * 3; }
    void run(T* in, T* out) { number<7><<<1, 1>>>(out); Owner<T>::template number<8><<<1, 1>>>(out + 1); }
};
template <class T, class... A> __global__ void sum(T* out, const A* __restrict__... in) { out[0] = (in[0] + ...); }
template <typename T> using Out = T* __restrict__;
template <typename T> __global__ void alias(Out<T> out, T value = 9) { out[0] = value; }
template <typename T> __global__ void overload(const T* __restrict__, T* __restrict__ out) { out[0] = 1; }
template <typename T> __global__ void overload(const T* __restrict__, T* __restrict__ out, int n) { out[0] = n; }
template <> __global__ void overload<double>(const double* __restrict__, double* __restrict__ out) { out[0] = 11; }
template __global__ void copy<double>(const double* __restrict__, double* __restrict__, const int);
template <class T> __global__ void add(T* const x, T);
template <class T> __global__ void add(T* x, const T y) { *x += y; }
__global__ void add_floats(float* x, float y) { *x += y; }
template <typename K, typename... A> void generic(K kernel, A... arguments) { kernel<<<1, 4>>>(arguments...); }
extern __shared__ float everywhere[];
template <class T> struct Shared {
    __device__ operator T*() { extern __shared__ int of_a_struct[]; return (T*)of_a_struct; }
};
struct Point { float x, y; __device__ Point() {} };
template <class T> __global__ void types(float* out)
{
    extern __shared__ __align__(16) unsigned char bytes[];
    extern __shared__ volatile T numbers[];
    alignas(8) extern __shared__ double
        doubles[];
    extern __shared__ char* pointers[];
    __shared__ Point points[4];
    bytes[0] = 1; numbers[1] = 5; doubles[8] = 8; pointers[9] = (char*)&bytes[40];
    everywhere[20] = 9;
    T* again = Shared<T>();
    points[1].x = 4;
    out[0] = bytes[0]; out[1] = again[1]; out[2] = numbers[1]; out[3] = size_t(bytes) % 16; out[4] = doubles[8];
    out[5] = float(pointers[9] - (char*)again); out[6] = everywhere[20]; out[7] = points[1].x;
    atomicAdd(&out[9], again[20] == 9 ? 1.0f : 0.0f);
}
static constexpr int WARP_SIZE = 32;
__global__ void width(float* out) { out[8] = WARP_SIZE; }
int main()
{
    float *x, *y; double* d; cudaMalloc(&x, 64); cudaMalloc(&y, 64); cudaMalloc(&d, 64);
    for (int i = 0; i < 16; i++) x[i] = i;
    const auto print = [&](const char* name) { printf("%s %g %g %g\n", name, y[0], y[1], y[2]); cudaMemset(y, 0, 64); };
    cudaMemset(y, 0, 64);
    copy<float><<<1, 4>>>(x, y, 2); print("explicit");
    copy<<<1, 4>>>(x, y, 3); print("deduced");
    rows<float><<<1, 1>>>(y, (float (*)[4])x); print("array");
    rows<<<1, 1>>>(y, (float (*)[5])x); print("length");
    apply<<<1, 1>>>(y, Twice<float>()); print("template");
    outer::run(y); print("namespace");
    Owner<float>().run(x, y); print("member");
    Owner<float>::triple<<<1, 1>>>(x + 2, y); Owner<float>::number<6><<<1, 1>>>(y + 1); print("static");
    sum<<<1, 1>>>(y, x + 1, x + 2, x + 3); print("pack");
    alias<float><<<1, 1>>>(y); print("alias");
    overload<<<1, 1>>>(x, y); overload<float><<<1, 1>>>(x, y + 1, 5); print("overload");
    overload<<<1, 1>>>(d, d); printf("specialised %g\n", d[0]);
    generic(copy<float>, x, y, 1); print("passed");
    add<<<1, 1>>>(y, 3.0f); print("declared");
    float two = 2; void* arguments[] = {&y, &two};
    cudaLaunchKernel((const void*)add_floats, dim3(1), dim3(1), arguments, 0, 0);
    cudaLaunchKernel((void*)add<float>, 1, 1, arguments);
    cudaLaunchKernel(reinterpret_cast<const void*>(&add_floats), 1, 1, arguments, 0, nullptr);
    cudaLaunchKernel(add<float>, 1, 1, arguments); print("address");
    float* out; cudaMalloc(&out, 256);
    cudaMemset(out, 0, 256);
    types<float><<<8, 1, 1024>>>(out);
    width<<<1, 1>>>(out);
    is("an array of aligned bytes", out[0], 1); is("the same memory through a struct's array of ints", out[1], 5);
    is("a volatile array", out[2], 5); is("alignment", out[3], 0); is("a declaration on two lines", out[4], 8);
    is("an array of pointers", out[5], 40); is("an array declared outside of functions", out[6], 9);
    is("a static array of a type with a constructor", out[7], 4); is("a program may define WARP_SIZE", out[8], 32);
    is("each block has its own array, also outside of functions", out[9], 8);
    printf("right %d\nline %d\n", right, __LINE__);
}
"""


def test_declarations():
    got = World("declarations", {"mine.cu": DECLARATIONS}).build_and_run("mine.cu")
    line = next(n for n, text in enumerate(DECLARATIONS.split("\n"), 1) if "__LINE__" in text)
    expect_equal((got.pop("right", ""), got.pop("line", "")), ("10", str(line)),
                 "shared memory in all forms; lines keep their numbers")
    expect_equal(got, {
        "explicit": "1 2 0", "deduced": "1 2 3", "array": "8 0 0", "length": "10 0 0",
        "template": "6 0 0", "namespace": "32 0 0", "member": "7 8 0", "static": "6 6 0", "pack": "6 0 0",
        "alias": "9 0 0", "overload": "1 5 0", "specialised": "11", "passed": "1 0 0", "declared": "3 0 0",
        "address": "8 0 0"},
        "template kernels with __restrict__ parameters, in all forms of declaration and launch; a declaration may "
        "differ by const; cudaLaunchKernel, also through a cast")


# ---- files

NVIDIA = ("cuda_runtime.h", "driver_types.h", "cuda_profiler_api.h", "nvtx3/nvToolsExtCudaRt.h")
FILES = {
    **{f"toolkit/{name}": "#error NVIDIA's header\n" for name in NVIDIA},
    "main.cu": """
        #include "cuda_runtime.h"
        #include <driver_types.h>
        #include <cuda_profiler_api.h>
        #include <nvtx3/nvToolsExtCudaRt.h>
        #include "src/all.cuh"
        #include "src/all.cuh"
        #include <host.h>
        int main()
        {
            float* x; cudaMallocManaged(&x, 4, cudaMemAttachGlobal);
            cudaProfilerStart(); nvtxRangePush("range"); twice<<<1, 1>>>(x, 4); nvtxRangePop(); cudaProfilerStop();
            printf("header %g\\n", x[0]);
            printf("other %g %s\\n", of_other_file(), where());
        }
        """,
    "src/all.cuh": '#pragma once\n#include <cstdio>\n#include "../up/kernels.cuh"\nfloat of_other_file();\n',
    "src/other.cu": """
        #include "all.cuh"
        float of_other_file() {
            float* x; cudaMalloc(&x, 4);
            twice<<<1,
                    1>>>(x, \\
                         5.5f);
            printf("line %d\\n", __LINE__);
            return x[0];
        }
        """,
    "up/kernels.cuh": """
        #pragma once
        template <class T> __global__ void twice(float* x, T y) { extern __shared__ T unused[]; *x = float(y + y); }
        static inline const char* where() { return __FILE__; }
        """,
    "include/host.h": "inline int host() { return 1; }\n"}


def test_files():
    world = World("files", FILES)
    for name in ("src/other.cu", "up/kernels.cuh"):     # as editors on Windows write them
        write(f"{world.folder}/{name}", "\ufeff" + textwrap.dedent(FILES[name]).lstrip().replace("\n", "\r\n"))
    os.environ["CPLUS_INCLUDE_PATH"] = os.path.join(world.folder, "toolkit")
    got = world.build_and_run("main.cu", "src/other.cu", "-I", "include", "-I", "toolkit")
    del os.environ["CPLUS_INCLUDE_PATH"]
    expect(got.get("header") == "8", "a kernel in a nested include file that is included twice can be launched; "
           "NVIDIA's headers, installed or in a folder of -I, are replaced by the emulator's")
    expect(got.get("other") == "11 up/kernels.cuh" and got.get("line") == "7", "a second .cu file is translated, also "
           "with a byte order mark and CRLF; files keep their names and lines their numbers", str(got))
    where = world.run("sh", "-c", "nm -C -l program | grep 'void twice<float>'").stdout
    expect("up/kernels.cuh:2" in where, "the debug information has a kernel's file and line", where)
    World("files", {"wrong.cu": "__global__ void k() {}\nint main() {\n  k<<<1,\n   1>>>();\n  wrong;\n}\n"})
    errors = world.compile(*world.rewrite("wrong.cu").stdout.split()).stderr
    expect("wrong.cu:5:3: error" in errors, "compiler errors name the user's file and line", errors[:200])
    missing = world.rewrite("nowhere.cu")
    expect(missing.returncode == 2 and missing.stderr == "nowhere.cu: no such file; expected a .cu file\n",
           "a missing file is rejected", missing.stderr)


# ---- inline PTX

INLINE_PTX = IS + r"""
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define LANE(x) asm volatile("mov.u32 %0, %%laneid;" \
                             : "=r"(x))
__device__ unsigned shared_of(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void ldmatrix(unsigned (&r)[4], const void* row) {   // not the emulator's
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_of(row)) : "memory");
}
template <int N> __device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N)); }
template <class T> __global__ void numbers(T* out, const unsigned* in)
{
    unsigned a = 7, b = 0, lane; int s = -5; float f = 2.5f, g; unsigned long long wide; uint64_t address; half2 h;
    LANE(lane); out[0] = lane;
    asm("add.u32 %0, %1, 5;" : "=r"(b) : "r"(a)); out[1] = b;
    asm("{ .reg .u32 t<2>; mul.lo.u32 t0, %1, %1; // a comment\n\t mad.lo.u32 t1, t0, 2, %2;\n mov.u32 %0, t1; }"
        : "=r"(b) : "r"(a), "r"(1)); out[2] = b;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(wide) : "r"(0x80000000u), "r"(6u)); out[3] = wide >> 32;
    asm("fma.rn.f32 %0, %1, 0f40000000, %2;" : "=f"(g) : "f"(f), "f"(1.0f)); out[4] = g;
    asm("{.reg .pred p; setp.lt.s32 p, %1, 0; @p neg.s32 %0, %1; @!p mov.s32 %0, 0;}" : "=r"(s) : "r"(s)); out[5] = s;
    asm("{ .reg .pred p, q; setp.gt.f32 p|q, %1, 3.0; selp.b32 %0, 1, 2, q; }" : "=r"(b) : "f"(f)); out[6] = b;
    asm("mov.b64 %0, {%1, %2};" : "=l"(wide) : "r"(1), "r"(3)); out[7] = wide == (3ull << 32 | 1);
    asm("mov.b64 {%0, %1}, %2;" : "=r"(a), "=r"(b) : "l"(wide)); out[8] = a * 10 + b;
    asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(s) : "f"(-2.7f)); out[9] = s;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*(unsigned*)&h) : "f"(3.0f), "f"(4.0f)); out[10] = __low2float(h);
    asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(b) : "r"(0x1111), "r"(0x2222)); out[11] = b == 0x22221111;
    asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(b) : "r"(1), "r"(3), "r"(8)); out[12] = b;
    asm("bfe.u32 %0, %1, 4, 8;" : "=r"(b) : "r"(0xabcde)); out[13] = b == 0xcd;
    asm("bfe.s32 %0, %1, 4, 4;" : "=r"(s) : "r"(0xf5)); out[14] = s;
    asm("{ .reg .f32 x; ex2.approx.f32 x, %1; rcp.approx.f32 %0, x; }" : "=f"(g) : "f"(1.0f)); out[15] = 2 * g;
    asm("clz.b32 %0, %1;" : "=r"(b) : "r"(16)); out[16] = b;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(g) : "f"(3.0f)); out[17] = g;
    asm("max.s32 %0, %1, %2;" : "=r"(s) : "r"(-3), "r"(-8)); out[18] = s;
    asm("{\n.reg .u32 i;\nmov.u32 i, 0;\nmov.u32 %0, 0;\nLOOP:\nadd.u32 %0, %0, i;\nadd.u32 i, i, 1;\n"
        ".reg .pred p;\nsetp.le.u32 p, i, %1;\n@p bra LOOP;\n}" : "=r"(b) : "r"(4)); out[19] = b;
    asm("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;" : "=r"(b) : "r"(lane)); out[20] = b;
    asm("{.reg .pred p; setp.eq.u32 p, %1, 4; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(b) : "r"(lane));
    out[21] = b;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1+8];" : "=r"(b) : "l"(in)); out[22] = b;
    asm volatile("ld.global.v4.u32 {%0, _, _, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(in)); out[23] = a * 10 + b;
    asm volatile("st.global.cs.f32 [%0], %1;" :: "l"((float*)out + 24), "f"(24.0f) : "memory");
    asm volatile("cvta.to.global.u64 %0, %1;" : "=l"(address) : "l"(in)); out[25] = address == (uint64_t)in;
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"((float*)out + 26), "f"(0.5f));
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(b) : "l"((unsigned*)out + 60)); out[27] = b < 32;
    asm volatile("membar.gl; fence.acq_rel.gpu;" ::: "memory");
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b)); out[28] = b;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(b) : "l"(in + 3)); out[29] = b;
    asm volatile("" : "+f"(f)); asm volatile("// nothing"); out[30] = f;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(wide) : "r"(0x80000000u), "r"(6u), "l"(5ull));
    out[31] = wide == (3ull << 32 | 5);
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(b) : "r"(lane)); out[32] = b;
    asm volatile("activemask.b32 %0;" : "=r"(b)); out[33] = b >> lane & 1;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(wide)); out[34] = wide;
    asm volatile("bar.warp.sync 0xffffffff; nanosleep.u32 20; fence.acq_rel.cta; prefetch.global.L2 [%0];" :: "l"(in));
}
// Row r of the tile has r + column / 100.
__global__ void tiles(float* out, const half* in)
{
    __shared__ __align__(16) half tile[16 * 16];
    const unsigned t = threadIdx.x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_of(tile + t * 8)), "l"(in + t * 8));
    asm volatile("cp.async.commit_group;\n" ::);
    cp_async_wait<0>();
    asm volatile("cp.async.wait_all; bar.sync 0;");
    uint64_t address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(tile));
    unsigned a[4], b[2]; float d[4] = {1, 1, 1, 1}; uint32_t half_sums[2] = {0, 0};
    ldmatrix(a, tile + t % 16 * 16 + t / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(shared_of(tile + t % 16 * 16)));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(half_sums[0]), "+r"(half_sums[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    int sums[4], ones = 0x01010101, twos = 0x02020202;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%6,%6,%6,%6};"
        : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3]) : "r"(ones), "r"(twos), "r"(-1));
    const float one = 1;
    float tf[4];
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%5,%5,%5,%5};"
        : "=f"(tf[0]), "=f"(tf[1]), "=f"(tf[2]), "=f"(tf[3]) : "r"(__float_as_uint(one)), "f"(0.5f));
    bool right = address == shared_of(tile);
    for (int i = 0; i < 4; i++) {
        const unsigned row = t / 4 + i / 2 * 8, column = t % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += __half2float(in[row * 16 + k]) * __half2float(in[k * 16 + column]);
        const float of_halves = __half2float(((half*)half_sums)[i]);
        right = right && d[i] == sum + 1 && of_halves == sum && sums[i] == 63 && tf[i] == 8.5f;
    }
    out[t] = right;
}
// A product of 64 x 16 ones, which TMA loads, and 16 x 64 twos.
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__global__ void multiply(float* out, const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    uint64_t* barrier = (uint64_t*)(memory + 16384);
    const unsigned t = threadIdx.x;
    for (int i = t; i < 4096; i += 128) ((__nv_bfloat16*)(memory + 8192))[i] = __float2bfloat16(2);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
    if (t == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_of(barrier)), "r"(1) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(shared_of(barrier)), "r"(8192) : "memory");
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_of(memory)),
                     "l"(&map), "r"(shared_of(barrier)), "r"(0), "r"(0), "r"(0), "r"(0) : "memory");
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(128) : "memory");
    asm volatile("{\n.reg .pred P1;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n@P1 bra DONE;\n"
                 "bra WAIT;\nDONE:\n}" :: "r"(shared_of(barrier)), "r"(0));
    asm volatile("fence.proxy.async;");
    const auto descriptor = [](const void* tile) {
        return (uint64_t)(shared_of(tile) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
    };
    float d[32];
    wgmma_fence();
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {NUMBERS}, %32, %33, p, 1, 1, 0, %35;\n}"
                 : SUMS : "l"(descriptor(memory)), "l"(descriptor(memory + 8192)), "r"(0), "n"(0));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(0) : "memory");
    float sum = 0;
    for (float x : d) sum += x;
    out[t] = sum;
}
int main()
{
    // Lanes store one after another: the last lane's results remain.
    const float expected[] = {31, 12, 99, 3, 6, 5, 1, 1, 13, -2, 4, 1, 10, 1, -1, 1, 27, 8, -3, 10, 30, 16, 3, 14, 24,
                              1, 16, 1, 0, 4, 2.5f, 1, 31, 1, 0};
    float* out; unsigned* in; half* matrix; __nv_bfloat16* ones; CUtensorMap map;
    cudaMalloc(&out, 512); cudaMemset(out, 0, 512); cudaMalloc(&in, 16); cudaMalloc(&matrix, 512);
    cudaMalloc(&ones, 8192);
    for (int i = 0; i < 4; i++) in[i] = i + 1;
    for (int i = 0; i < 256; i++) matrix[i] = __float2half(i * 7 % 5 - 2);
    for (int i = 0; i < 4096; i++) ones[i] = __float2bfloat16(1);
    numbers<<<1, 32>>>(out, in);
    for (int i = 0; i < 35; i++) is(std::to_string(i).c_str(), out[i], expected[i]);
    tiles<<<1, 32>>>(out, matrix);
    for (int i = 0; i < 32; i++) is("tiles", out[i], 1);
    const cuuint64_t extents[] = {64, 64, 1, 1}, strides[] = {128, 8192, 8192};
    const cuuint32_t box[] = {64, 64, 1, 1}, steps[] = {1, 1, 1, 1};
    if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, ones, extents, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return 1;
    multiply<<<1, 128, 32768>>>(out, map);
    for (int i = 0; i < 128; i++) is("wgmma", out[i], 32 * 32);
    printf("right %d\n", right);
}
""".replace("NUMBERS", ", ".join(f"%{n}" for n in range(32))).replace(
    "SUMS", ", ".join(f'"+f"(d[{n}])' for n in range(32)))


def test_inline_ptx():
    expect_equal(World("inline_ptx", {"mine.cu": INLINE_PTX}).build_and_run("mine.cu"), {"right": str(35 + 32 + 128)},
                 "inline PTX: arithmetic, registers, predicates, loops, loads, atomics; cp.async, ldmatrix, and mma of "
                 "FP16, INT8, TF32; mbarrier, TMA, wgmma, setmaxnreg, bar, fence")


# ---- features that are not translated

OTHERS = {"ptx.cu": """
    #define FENCE() asm("fence;")
    #if 0
    __global__ void out() { asm("x"); }
    #elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    #include <thrust/sort.h>
    __global__ void out(cudaTextureObject_t texture) { __activemask(); }
    #endif
    __global__ void k(float* x)
    {
        *x = 2; // asm("y")
    #if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        *x += 1;
    #endif
    }
    int main() { float* x; cudaMalloc(&x, 4); k<<<1, 1>>>(x); printf("ptx %g\\n", *x); }
    """, "launch.cu": "\nint main() { k<<<1, 2; }\n"}
# {feature: (its use in line 2, the message)}
NOT_EMULATED = {
    "inline PTX": ('__global__ void k() { asm("tcgen05.fence::before_thread_sync;"); }',
                   "inline PTX: tcgen05.fence::before_thread_sync: this is not emulated; dev/cpu/README.md lists"),
    "libcu++": ('#  include "cuda/std/array" // needed',
                "cuda/std/array: this part of CUB, Thrust, libcu++ or CUTLASS is"),
    "device-wide CUB": ("void* p = (void*)cub::DeviceReduce::Sum;",
                        "DeviceReduce: device-wide CUB is not emulated"),
    "a library": ("#include <cufft.h>", "cufft.h: this library is not emulated"),
    "dynamic parallelism": ("__global__ void k(); __device__ void f() { if (threadIdx.x == 0) k<<<1, 1>>>(); }",
                            "k<<<>>>: launches by kernels are not emulated"),
    "clusters": ("__global__ void __cluster_dims__(2, 1, 1) k() {}", "__cluster_dims__: clusters are not emulated"),
    "random numbers": ("#include <curand_kernel.h>", "curand_kernel.h: this library is not emulated"),
    "textures": ("__global__ void k(cudaTextureObject_t t) {}",
                 "cudaTextureObject_t: textures, surfaces and CUDA arrays are not")}


def test_others():
    world = World("others", OTHERS)
    expect(world.build_and_run("ptx.cu").get("ptx") == "3",
           "inline PTX in code that #if excludes, or in an unused macro, is accepted; a kernel has __CUDA_ARCH__")
    for feature, (line, message) in NOT_EMULATED.items():
        World("others", {"feature.cu": f"\n{line}\nint main() {{}}\n"})
        errors = world.compile(*world.rewrite("feature.cu").stdout.split(), warnings=["-Wfatal-errors"]).stderr
        expect(re.match(r"feature.cu:2:\d+: error: ", errors) and message in errors and errors.count("error:") == 1,
               f"{feature}: one error, which names it and the line", errors)
    World("others", {"mma.h": "inline int own() { return 1; }\n", "feature.cu": """
        #include "mma.h"
        int main() { printf("own %d\\n", own()); }"""})
    expect_equal(world.build_and_run("feature.cu"), {"own": "1"}, "a program's own file may have the same name")
    result = world.rewrite("launch.cu")
    expect(result.returncode == 2 and
           result.stderr == "launch.cu:2: <<<: expected a launch, kernel<<<grid, block>>>(arguments)\n",
           "an incomplete launch is rejected with its file and line", result.stderr)


if __name__ == "__main__":
    run_tests(globals())

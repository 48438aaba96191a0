// Device functions for arithmetic, conversions and bits, which are one or two instructions on a GPU.
#pragma once

#include <fenv.h>
#include <limits.h>

namespace cuda_cpu {
// Returns 2^n 2^f for an integer n and |f| <= 1/2: 2^n by adding to the exponent bits, 2^f by a polynomial. (Fused
// multiply-adds, FMAs, are explicit because the build's flags allow reordering of plain sums.)
__attribute__((always_inline)) inline float exp2_of_sum(float n, float f) {
    float p = 1.535336207e-4f;
    p = __builtin_fmaf(p, f, 1.339887439e-3f);
    p = __builtin_fmaf(p, f, 9.618437357e-3f);
    p = __builtin_fmaf(p, f, 5.550332471e-2f);
    p = __builtin_fmaf(p, f, bits<float>(math_rounding.exp2_2));
    p = __builtin_fmaf(p, f, bits<float>(math_rounding.exp2_1));
    p = __builtin_fmaf(p, f, 1.0f);
    return bits<float>(bits<unsigned>(p) + (static_cast<unsigned>(static_cast<int>(n)) << 23));
}

// Returns the result x of a special function, perturbed by CUDA_CPU_ROUNDING.
__attribute__((always_inline)) inline float special(float x) {
    watch::special_function();
    return math_rounding.last_bit(x);
}

// Returns x, rounded before any further operation, so that __fadd_rn(__fmul_rn(a, b), c) does not become an FMA. With a
// compiler that lacks __builtin_assoc_barrier it still may.
template <class Float> inline Float rounded(Float x) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(x);
#else
    return x;
#endif
}

// Converts an integral x to an integer type, clamped to its range. NaN gives 0, or the highest bit if one of the types
// has 64 bits (PTX manual, "cvt").
template <class Integer, class Float> inline Integer to_integer(Float x) {
    using Limits = std::numeric_limits<Integer>;
    if (x != x) return std::max(sizeof(x), sizeof(Integer)) < 8 ? 0 : Integer(1ull << (8 * sizeof(Integer) - 1));
    if (x <= static_cast<Float>(Limits::min())) return Limits::min();
    return x >= static_cast<Float>(Limits::max()) ? Limits::max() : static_cast<Integer>(x);
}

// Returns operation(x...), computed with a rounding mode of fenv.h. (The compiler may move an operation across
// fesetround, but not a call through a volatile pointer.)
template <class T, class... Parameters, class... X> T rounded_to(int mode, T (*operation)(Parameters...), X... x) {
    T (*const volatile called)(Parameters...) = operation;
    const int before = fegetround();
    fesetround(mode);
    const T result = called(x...);
    fesetround(before);
    return result;
}
}  // namespace cuda_cpu

// Returns e^x to 2 ULP (units in the last place). Subnormal results are flushed to 0, as on a GPU. It has no branch and
// no call, so loops around it can be vectorised. (extern "C" and noexcept because glibc declares these names too.)
extern "C" inline float __expf(float x) noexcept {
    cuda_cpu::watch::special_function();
    const float n = nearbyintf(x * 1.44269502f);
    float f = __builtin_fmaf(x, 1.44269502f, -n);  // log2(e) in two parts: with one, the error would grow with x
    f = __builtin_fmaf(x, cuda_cpu::bits<float>(cuda_cpu::math_rounding.log2_e_low), f);
    float result = cuda_cpu::exp2_of_sum(n, f);
    result = x < -87.33654f ? 0.0f : result;
    return x > 88.72283f ? std::numeric_limits<float>::infinity() : result;
}
extern "C" inline float __logf(float x) noexcept { return cuda_cpu::special(logf(x)); }
extern "C" inline float __log2f(float x) noexcept { return cuda_cpu::special(log2f(x)); }
extern "C" inline float __powf(float x, float y) noexcept { return cuda_cpu::special(powf(x, y)); }
extern "C" inline float __sinf(float x) noexcept { return cuda_cpu::special(sinf(x)); }
extern "C" inline float __cosf(float x) noexcept { return cuda_cpu::special(cosf(x)); }
extern "C" inline float __log10f(float x) noexcept { return cuda_cpu::special(log10f(x)); }
extern "C" inline float __exp10f(float x) noexcept { return cuda_cpu::special(exp10f(x)); }
extern "C" inline float __tanhf(float x) noexcept { return cuda_cpu::special(tanhf(x)); }
extern "C" inline float __tanf(float x) noexcept { return cuda_cpu::special(tanf(x)); }
extern "C" inline void __sincosf(float x, float* sine, float* cosine) noexcept {
    *sine = __sinf(x);
    *cosine = __cosf(x);
}
inline float rsqrtf(float x) { return cuda_cpu::special(1.0f / sqrtf(x)); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
// Functions with and without a suffix f, which double computes. (sin(M_PI x) is not exactly 0 at integers x > 0.)
#define CUDA_CPU_FUNCTIONS(T, f)                                                                                 \
    inline T rcbrt##f(T x) { return static_cast<T>(1 / cbrt(double{x})); }                                       \
    inline T normcdf##f(T x) { return static_cast<T>(0.5 * erfc(-M_SQRT1_2 * x)); }                              \
    inline T cospi##f(T x) { return static_cast<T>(sin(M_PI * (0.5 - fabs(remainder(x, 2))))); }                 \
    inline T sinpi##f(T x) {                                                                                     \
        const double rest = remainder(x, 2);                                                                     \
        return static_cast<T>(sin(M_PI * (fabs(rest) > 0.5 ? copysign(1, rest) - rest : rest)));                 \
    }                                                                                                            \
    inline void sincospi##f(T x, T* sine, T* cosine) { *sine = sinpi##f(x), *cosine = cospi##f(x); }             \
    inline T norm3d##f(T x, T y, T z) { return static_cast<T>(std::hypot(double{x}, double{y}, double{z})); }    \
    inline T norm4d##f(T x, T y, T z, T w) { return static_cast<T>(hypot(norm3d##f(x, y, z), w)); }              \
    inline T rnorm3d##f(T x, T y, T z) { return 1 / norm3d##f(x, y, z); }                                        \
    inline T rnorm4d##f(T x, T y, T z, T w) { return 1 / norm4d##f(x, y, z, w); }                                \
    inline T rhypot##f(T x, T y) { return static_cast<T>(1 / hypot(double{x}, double{y})); }
CUDA_CPU_FUNCTIONS(float, f)
CUDA_CPU_FUNCTIONS(double, )
#undef CUDA_CPU_FUNCTIONS
inline unsigned umin(unsigned x, unsigned y) { return std::min(x, y); }
inline unsigned umax(unsigned x, unsigned y) { return std::max(x, y); }
inline long long llmin(long long x, long long y) { return std::min(x, y); }
inline long long llmax(long long x, long long y) { return std::max(x, y); }
inline unsigned long long ullmin(unsigned long long x, unsigned long long y) { return std::min(x, y); }
inline unsigned long long ullmax(unsigned long long x, unsigned long long y) { return std::max(x, y); }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? fminf(x, 1.0f) : 0.0f; }   // NaN gives 0

// Functions with suffixes: _rn rounds to nearest even, _rz towards zero, _ru up, _rd down.
#define CUDA_CPU_ROUNDED(T, name, mode, result, ...)                                                             \
    template <class... X> inline T name(X... x) {                                                                \
        return cuda_cpu::rounded_to(mode, +[](__VA_ARGS__) -> T { return result; }, x...);                       \
    }
#define CUDA_CPU_ROUNDINGS(T, name, result, ...)                                                                 \
    inline T name##_rn(__VA_ARGS__) { return cuda_cpu::rounded(result); }                                        \
    CUDA_CPU_ROUNDED(T, name##_rz, FE_TOWARDZERO, result, __VA_ARGS__)                                           \
    CUDA_CPU_ROUNDED(T, name##_ru, FE_UPWARD, result, __VA_ARGS__)                                               \
    CUDA_CPU_ROUNDED(T, name##_rd, FE_DOWNWARD, result, __VA_ARGS__)
#define CUDA_CPU_ARITHMETIC(T, letter, fma_name, fused, root)                                                    \
    CUDA_CPU_ROUNDINGS(T, __##letter##add, x + y, T x, T y)                                                      \
    CUDA_CPU_ROUNDINGS(T, __##letter##sub, x - y, T x, T y)                                                      \
    CUDA_CPU_ROUNDINGS(T, __##letter##mul, x * y, T x, T y)                                                      \
    CUDA_CPU_ROUNDINGS(T, __##letter##div, x / y, T x, T y)                                                      \
    CUDA_CPU_ROUNDINGS(T, __##letter##rcp, 1 / x, T x)                                                           \
    CUDA_CPU_ROUNDINGS(T, __##letter##sqrt, root(x), T x)                                                        \
    CUDA_CPU_ROUNDINGS(T, fma_name, fused(x, y, z), T x, T y, T z)
CUDA_CPU_ARITHMETIC(float, f, __fmaf, fmaf, sqrtf)
CUDA_CPU_ARITHMETIC(double, d, __fma, fma, sqrt)
#undef CUDA_CPU_ARITHMETIC
inline float __frsqrt_rn(float x) { return static_cast<float>(1 / sqrt(static_cast<double>(x))); }
inline float __fdividef(float x, float y) { return x / y; }

// Conversions of floats to integers, clamped to their range, and of integers and doubles to floats.
#define CUDA_CPU_TO_INTEGER(from, From, to, To)                                                                  \
    inline To __##from##2##to##_rn(From x) { return cuda_cpu::to_integer<To>(nearbyint(x)); }                    \
    inline To __##from##2##to##_rz(From x) { return cuda_cpu::to_integer<To>(trunc(x)); }                        \
    inline To __##from##2##to##_ru(From x) { return cuda_cpu::to_integer<To>(ceil(x)); }                         \
    inline To __##from##2##to##_rd(From x) { return cuda_cpu::to_integer<To>(floor(x)); }
#define CUDA_CPU_CONVERSIONS(name, Integer)                                                                      \
    CUDA_CPU_TO_INTEGER(float, float, name, Integer)                                                             \
    CUDA_CPU_TO_INTEGER(double, double, name, Integer)                                                           \
    CUDA_CPU_ROUNDINGS(float, __##name##2float, static_cast<float>(x), Integer x)                                \
    CUDA_CPU_ROUNDINGS(double, __##name##2double, static_cast<double>(x), Integer x)
CUDA_CPU_CONVERSIONS(int, int)
CUDA_CPU_CONVERSIONS(uint, unsigned)
CUDA_CPU_CONVERSIONS(ll, long long)
CUDA_CPU_CONVERSIONS(ull, unsigned long long)
CUDA_CPU_ROUNDINGS(float, __double2float, static_cast<float>(x), double x)
#undef CUDA_CPU_CONVERSIONS

inline int __float_as_int(float x) { return cuda_cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bits<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

// Unless NaNs are disabled, g++ calls the library for fmaxf and fminf, which prevents vectorisation. These functions
// return the same results without a call. (gnu_inline: the definitions are only for inlining, not for linking.)
extern "C" {
extern inline __attribute__((always_inline, gnu_inline)) float fmaxf(float x, float y) noexcept {
    return x > y || y != y ? x : y;
}
extern inline __attribute__((always_inline, gnu_inline)) float fminf(float x, float y) noexcept {
    return x < y || y != y ? x : y;
}
}

// As in CUDA, min and max accept arguments of different types, with the usual arithmetic conversions.
template <class X, class Y, class T = std::common_type_t<X, Y>>
constexpr std::enable_if_t<std::is_arithmetic_v<X> && std::is_arithmetic_v<Y>, T> max(X a, Y b) {
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    return x > y || y != y ? x : y;
}
template <class X, class Y, class T = std::common_type_t<X, Y>>
constexpr std::enable_if_t<std::is_arithmetic_v<X> && std::is_arithmetic_v<Y>, T> min(X a, Y b) {
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    return x < y || y != y ? x : y;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int bit = 0; bit < 64; bit++) reversed |= (x >> bit & 1) << (63 - bit);
    return reversed;
}
inline unsigned __brev(unsigned x) { return static_cast<unsigned>(__brevll(x) >> 32); }
// Returns four bytes of the eight of y and x (the lower ones), which the lower 3 bits of each digit of `select` number.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) result |= static_cast<uint8_t>(bytes >> (select >> 4 * i & 7) * 8) << 8 * i;
    return result;
}
// Funnel shifts of high:low. The shift counts modulo 32, or (c) at most 32. l returns the upper word, r the lower one.
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << std::min(shift, 32u) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> std::min(shift, 32u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned s) { return __funnelshift_lc(low, high, s % 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned s) { return __funnelshift_rc(low, high, s % 32); }

inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
inline long long __mul64hi(long long x, long long y) {
    return static_cast<long long>(static_cast<__int128>(x) * y >> 64);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
// Products of the lower 24 bits.
inline int __mul24(int x, int y) {
    const auto lower = [](int v) { return static_cast<int>(static_cast<unsigned>(v) << 8) >> 8; };
    return static_cast<int>(static_cast<int64_t>(lower(x)) * lower(y));
}
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffff) * (y & 0xffffff); }
// Averages, without overflow: rounded down, and (r) up.
inline int __hadd(int x, int y) { return static_cast<int>((int64_t{x} + y) >> 1); }
inline int __rhadd(int x, int y) { return static_cast<int>((int64_t{x} + y + 1) >> 1); }
inline unsigned __uhadd(unsigned x, unsigned y) { return static_cast<unsigned>((uint64_t{x} + y) >> 1); }
inline unsigned __urhadd(unsigned x, unsigned y) { return static_cast<unsigned>((uint64_t{x} + y + 1) >> 1); }
// |x - y| + z
inline unsigned __usad(unsigned x, unsigned y, unsigned z) { return (x < y ? y - x : x - y) + z; }
inline unsigned __sad(int x, int y, unsigned z) {
    return (x < y ? static_cast<unsigned>(y) - static_cast<unsigned>(x)
                  : static_cast<unsigned>(x) - static_cast<unsigned>(y)) + z;
}

namespace cuda_cpu {
// Returns z + the sum of the products of four bytes of x and y, with their sign if T is signed.
template <class Byte, class T> inline T dot_of_bytes(unsigned x, unsigned y, T z) {
    for (unsigned i = 0; i < 32; i += 8)
        z += static_cast<T>(static_cast<Byte>(x >> i)) * static_cast<T>(static_cast<Byte>(y >> i));
    return z;
}
// Applies an operation to each part, of the type Part, of two words.
template <class Part, class Operation> inline unsigned by_part(unsigned x, unsigned y, Operation operation) {
    constexpr unsigned bits = 8 * sizeof(Part), mask = (1u << bits) - 1;
    unsigned result = 0;
    for (unsigned i = 0; i < 32; i += bits)
        result |= (static_cast<unsigned>(operation(static_cast<Part>(x >> i), static_cast<Part>(y >> i))) & mask) << i;
    return result;
}
}  // namespace cuda_cpu

inline int __dp4a(int x, int y, int z) {
    return cuda_cpu::dot_of_bytes<int8_t>(static_cast<unsigned>(x), static_cast<unsigned>(y), z);
}
inline unsigned __dp4a(unsigned x, unsigned y, unsigned z) { return cuda_cpu::dot_of_bytes<uint8_t>(x, y, z); }

// Operations on the four bytes or the two halves of a word; s: signed, u: unsigned.
#define CUDA_CPU_BY_PART(name, sign, operation)                                                                  \
    inline unsigned __v##name##4(unsigned x, unsigned y) {                                                       \
        return cuda_cpu::by_part<sign##int8_t>(x, y, [](int a, int b) { return operation; });                    \
    }                                                                                                            \
    inline unsigned __v##name##2(unsigned x, unsigned y) {                                                       \
        return cuda_cpu::by_part<sign##int16_t>(x, y, [](int a, int b) { return operation; });                   \
    }
CUDA_CPU_BY_PART(add, u, a + b)
CUDA_CPU_BY_PART(sub, u, a - b)
CUDA_CPU_BY_PART(absdiffu, u, abs(a - b))
CUDA_CPU_BY_PART(absdiffs, , abs(a - b))
CUDA_CPU_BY_PART(avgu, u, (a + b + 1) / 2)
CUDA_CPU_BY_PART(maxu, u, std::max(a, b))
CUDA_CPU_BY_PART(maxs, , std::max(a, b))
CUDA_CPU_BY_PART(minu, u, std::min(a, b))
CUDA_CPU_BY_PART(mins, , std::min(a, b))
CUDA_CPU_BY_PART(cmpeq, u, a == b ? -1 : 0)
#undef CUDA_CPU_BY_PART

// Loads and stores with a cache hint, which has no effect here.
#define CUDA_CPU_HINTS(load, store)                                                                              \
    template <class T> inline T __ld##load(const T* address) { return *address; }                                \
    template <class T> inline void __st##store(T* address, T value) { *address = value; }
CUDA_CPU_HINTS(ca, wb)
CUDA_CPU_HINTS(cg, cg)
CUDA_CPU_HINTS(cs, cs)
CUDA_CPU_HINTS(cv, wt)
#undef CUDA_CPU_HINTS
template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldlu(const T* address) { return *address; }

inline void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    cuda_cpu::watch::fence(false);
}
inline void __threadfence_system() { __threadfence(); }
inline void __threadfence_block() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    cuda_cpu::watch::fence(true);
}

// Returns the ticks of a 2 GHz clock.
inline long long clock64() {
    return 2 * std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

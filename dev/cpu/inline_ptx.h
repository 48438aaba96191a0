// Functions that inline PTX becomes: inline_ptx.py. Addresses in the shared state space are 32-bit offsets from
// dynamic_shared_memory, as __cvta_generic_to_shared returns them.
#pragma once

#include "cuda/atomic"
#include "ptx.h"

inline size_t __cvta_generic_to_shared(const void* p) {
    return static_cast<uint32_t>(static_cast<const char*>(p) - cuda_cpu::shared_base());
}
inline void* __cvta_shared_to_generic(size_t address) {
    return cuda_cpu::shared_base() + static_cast<int32_t>(static_cast<uint32_t>(address));
}
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
inline unsigned __isShared(const void* p) { return cuda_cpu::is_shared(p); }
inline unsigned __isGlobal(const void* p) { return !cuda_cpu::is_shared(p); }

namespace cuda_cpu::inline_ptx {
using namespace cuda_cpu;   // for the names that inline_ptx.py qualifies: inline_ptx::wgmma and others
using namespace cuda_cpu::ptx;
constexpr bool products_are_fp16 = std::is_same_v<Operand16, half>;

// ---- values

// Converts between a register and a type: numbers by value if both are integers, otherwise the lower bits.
template <class T, class X> T as(X x) {
    if constexpr (std::is_same_v<T, X>) return x;
    else if constexpr (std::is_pointer_v<X>) return static_cast<T>(reinterpret_cast<uintptr_t>(x));
    else if constexpr (std::is_floating_point_v<T> && std::is_floating_point_v<X>) return static_cast<T>(x);
    else if constexpr ((std::is_integral_v<T> || std::is_enum_v<T>) && (std::is_integral_v<X> || std::is_enum_v<X>))
        return static_cast<T>(x);
    else {
        T result{};
        memcpy(static_cast<void*>(&result), &x, std::min(sizeof(T), sizeof(X)));
        return result;
    }
}
template <class To, class X> void put(To& to, X x) { to = as<To>(x); }

template <class T, class X> T* pointer(X x, int64_t offset) {
    const auto address = static_cast<uintptr_t>(as<unsigned long long>(x)) + static_cast<uintptr_t>(offset);
    if (!std::is_void_v<T> && address % alignof(std::conditional_t<std::is_void_v<T>, char, T>) != 0)
        die("thread ", this_thread(), " uses an address in inline PTX that is not a multiple of its type's size");
    return reinterpret_cast<T*>(address);
}
template <class T, class X> T* shared_pointer(X x, int64_t offset) {
    return pointer<T>(__cvta_shared_to_generic(static_cast<size_t>(as<unsigned long long>(x))), offset);
}

// Vectors of 2 or 4 are one access.
template <class T, unsigned N> struct alignas(N * sizeof(T)) Vector { T x[N]; };
template <class T, class... To> void load(const T* from, To&... to) {
    const auto v = *pointer<const Vector<T, sizeof...(To)>>(from, 0);
    unsigned n = 0;
    (put(to, v.x[n++]), ...);
}
template <class T, class... X> void store(T* to, X... x) {
    *pointer<Vector<T, sizeof...(X)>>(to, 0) = {as<T>(x)...};
}
template <class T> std::remove_const_t<T> atomic_load(T* from) {
    using Value = std::remove_const_t<T>;
    return cuda::atomic_ref<Value>(const_cast<Value&>(*from)).load(cuda::memory_order_relaxed);
}
template <class T> void atomic_store(T* to, T x) { cuda::atomic_ref<T>(*to).store(x, cuda::memory_order_relaxed); }

// A 32- or 64-bit word of 2 or 4 parts.
template <class T, class... X> T pack(X... x) {
    constexpr unsigned width = 8 * sizeof(T) / sizeof...(X);
    uint64_t word = 0;
    unsigned n = 0;
    ((word |= (as<unsigned long long>(x) & ((uint64_t{1} << width) - 1)) << width * n++), ...);
    return as<T>(word);
}
template <class T, class... To> void unpack(T x, To&... to) {
    constexpr unsigned width = 8 * sizeof(T) / sizeof...(To);
    unsigned n = 0;
    (put(to, as<unsigned long long>(x) >> width * n++ & ((uint64_t{1} << width) - 1)), ...);
}

// ---- arithmetic

#define CUDA_CPU_PTX(name, result)                                                                                    \
    template <class T> T name##_(T x, T y) { return static_cast<T>(result); }
CUDA_CPU_PTX(add, x + y)
CUDA_CPU_PTX(sub, x - y)
CUDA_CPU_PTX(div, x / y)
CUDA_CPU_PTX(rem, x % y)
CUDA_CPU_PTX(min, y < x || x != x ? y : x)
CUDA_CPU_PTX(max, x < y || x != x ? y : x)
CUDA_CPU_PTX(and, x & y)
CUDA_CPU_PTX(or, x | y)
CUDA_CPU_PTX(xor, x ^ y)
#undef CUDA_CPU_PTX
template <> inline bool and_(bool x, bool y) { return x && y; }
#define CUDA_CPU_PTX(name, result)                                                                                    \
    template <class T> auto name##_(T x) { return result; }
CUDA_CPU_PTX(abs, static_cast<T>(x < T(0) ? T(0) - x : x))
CUDA_CPU_PTX(neg, static_cast<T>(T(0) - x))
CUDA_CPU_PTX(popc, static_cast<unsigned>(__popcll(x)))
CUDA_CPU_PTX(clz, static_cast<unsigned>(__clzll(static_cast<long long>(x))) - (64 - 8 * unsigned{sizeof(T)}))
CUDA_CPU_PTX(rcp, special(1 / x))
CUDA_CPU_PTX(rsqrt, special(1 / sqrt(x)))
CUDA_CPU_PTX(sqrt, static_cast<T>(::sqrt(x)))
CUDA_CPU_PTX(lg2, special(log2f(x)))
CUDA_CPU_PTX(sin, special(sinf(x)))
CUDA_CPU_PTX(cos, special(cosf(x)))
CUDA_CPU_PTX(tanh, special(tanhf(x)))
#undef CUDA_CPU_PTX
template <class T> T not_(T x) {
    if constexpr (std::is_same_v<T, bool>) return !x;
    else return static_cast<T>(~x);
}
template <class T> T ex2_(T x) {
    if constexpr (std::is_same_v<T, float>) return exp2_approx(x);
    else return T(exp2f(x));
}
// Shifts by the width or more give 0, or the sign.
template <class T> T shl_(T x, unsigned by) { return by < 8 * sizeof(T) ? static_cast<T>(x << by) : T(0); }
template <class T> T shr_(T x, unsigned by) {
    return static_cast<T>(by < 8 * sizeof(T) ? x >> by : x < T(0) ? T(-1) : T(0));
}
template <class T> T selp_(T x, T y, bool first) { return first ? x : y; }
template <class T> T fma_(T x, T y, T z) {
    if constexpr (std::is_floating_point_v<T>) return std::fma(x, y, z);
    else if constexpr (sizeof(T) == 2) return __hfma(x, y, z);
    else return __hfma2(x, y, z);
}
template <class T> T prmt_(T x, T y, T select) { return __byte_perm(x, y, select); }
template <class T> T lop3_(T x, T y, T z, unsigned table) {
    T result = 0;
    for (unsigned i = 0; i < 8; i++)
        if (table >> i & 1) result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
    return result;
}
// A bit field: `length` bits from bit `first`.
template <class T> T bfe_(T x, unsigned first, unsigned length) {
    constexpr unsigned width = 8 * sizeof(T);
    if ((length &= 255) == 0) return 0;
    const unsigned top = std::min((first &= 255) + length, width);
    return shr_(shl_(x, width - top), width - std::min(top, length));
}

template <class T> T mul_lo(T x, T y) { return static_cast<T>(x * y); }
template <class T, class X> T plus(T product, X x) { return static_cast<T>(product + as<T>(x)); }
template <class T> using Wider =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int, unsigned>,
                       std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>>;
template <class T> Wider<T> mul_wide(T x, T y) { return static_cast<Wider<T>>(x) * y; }
template <class T> T mul_hi(T x, T y) {
    return static_cast<T>(static_cast<std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>(x) * y >>
                          8 * sizeof(T));
}

enum class Rounding { rn, rni, rzi, rmi, rpi };
template <class T> T rounded_by(Rounding mode, T x) {
    return mode == Rounding::rni ? nearbyint(x) : mode == Rounding::rmi ? floor(x) : mode == Rounding::rpi ? ceil(x)
                                                                                                           : trunc(x);
}
template <class To, Rounding MODE, class X> auto convert(X x) {
    if constexpr (std::is_same_v<To, tf32>) return (bits<unsigned>(x) + 0x1000) & 0xffffe000u;
    else if constexpr (std::is_integral_v<X> && std::is_integral_v<To>) return static_cast<To>(x);
    else if constexpr (std::is_integral_v<X>) return To(static_cast<double>(x));
    else if constexpr (std::is_integral_v<To>) return to_integer<To>(rounded_by(MODE, static_cast<double>(x)));
    else if constexpr (MODE != Rounding::rn) return To(rounded_by(MODE, static_cast<double>(x)));
    else if constexpr (std::is_same_v<X, double>) return To(x);
    else return To(static_cast<float>(x));
}
template <class To, Rounding MODE, class X> To convert(X upper, X lower) { return {lower, upper}; }

// ---- warps

// c: the segments' width and the last lane, encoded as in PTX.
#define CUDA_CPU_PTX(name, shuffle, reached)                                                                          \
    template <class T> T shfl_##name(T x, unsigned by, unsigned c, unsigned mask, bool& in_range) {                   \
        const unsigned width = 32 - (c >> 8 & 31), place = lane() % width;                                            \
        in_range = reached;                                                                                           \
        return shuffle(mask, x, static_cast<int>(by), static_cast<int>(width));                                       \
    }
CUDA_CPU_PTX(up, __shfl_up_sync, place >= by)
CUDA_CPU_PTX(down, __shfl_down_sync, place + by < width)
CUDA_CPU_PTX(bfly, __shfl_xor_sync, (place ^ by) < width)
CUDA_CPU_PTX(idx, __shfl_sync, by < width || place < width)
#undef CUDA_CPU_PTX

// ---- tensor cores

// Returns accumulators that are one array. A wgmma writes them later, so they cannot be copied.
template <int N> float (&consecutive(float* first, float* last))[N] {
    if (last - first != N - 1) die("wgmma: the accumulators are not consecutive elements of one array");
    return reinterpret_cast<float(&)[N]>(*first);
}

// mma.m16n8kK
template <class T, class Sum, unsigned K> void mma(uint32_t* d, std::vector<uint32_t> a, std::vector<uint32_t> b,
                                                   std::vector<uint32_t> c) {
    constexpr unsigned registers = K / (4 * mma_elements<T>);   // of b
    if (a.size() != 2 * registers || b.size() != registers || c.size() != sizeof(Sum))
        die("inline PTX: mma with fragments of ", a.size(), ", ", b.size(), " and ", c.size(), " registers");
    require_capability("mma", mma_elements<T> != 2 || K == 16 ? 80 : 75);
    MmaOperand mine{"mma", d, a.data(), b.data(), c.data()};
    full_warp_collective("mma", &mine, mma_of_warp<T, Sum, K>);
}
}  // namespace cuda_cpu::inline_ptx

// Device functions for arithmetic, conversions and bits, which are one or two instructions on a GPU.
#pragma once

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
inline float rounded(float x) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(x);
#else
    return x;
#endif
}

// Converts an integral x to int, clamped to int's range; NaN gives 0.
inline int to_int(float x) {
    if (x != x) return 0;
    if (x <= static_cast<float>(INT_MIN)) return INT_MIN;
    return x >= static_cast<float>(INT_MAX) ? INT_MAX : static_cast<int>(x);
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
inline float rsqrtf(float x) { return cuda_cpu::special(1.0f / sqrtf(x)); }

inline float __fadd_rn(float x, float y) { return cuda_cpu::rounded(x + y); }
inline float __fsub_rn(float x, float y) { return cuda_cpu::rounded(x - y); }
inline float __fmul_rn(float x, float y) { return cuda_cpu::rounded(x * y); }
inline float __fdiv_rn(float x, float y) { return cuda_cpu::rounded(x / y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

// Conversions to integers: _rn rounds to nearest even, _rz towards zero.
inline int __float2int_rn(float x) { return cuda_cpu::to_int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return cuda_cpu::to_int(truncf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

inline int __float_as_int(float x) { return cuda_cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bits<float>(x); }

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
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }

// Loads and stores with a cache hint, which has no effect here.
template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline void __stcs(T* address, T value) { *address = value; }

inline void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    cuda_cpu::watch::fence();
}
inline void __threadfence_block() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Returns the ticks of a 2 GHz clock.
inline long long clock64() {
    return 2 * std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

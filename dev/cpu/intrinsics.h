// Device functions for numbers and bits that are an instruction or two on the GPU.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

// A result that is rounded before anything else is done with it: __fadd_rn(__fmul_rn(a, b), c) is no fma. Compilers
// that have no such barrier may still make one of it.
template <class T>
inline T rounded(T x)
{
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(x);
#else
    return x;
#endif
}

// A whole number from x, clamped to what To holds; not a number gives 0.
template <class To, class From>
inline To to_whole(From x)
{
    using Limits = std::numeric_limits<To>;
    if (x != x) return 0;
    if (x <= static_cast<From>(Limits::min())) return Limits::min();
    return x >= static_cast<From>(Limits::max()) ? Limits::max() : static_cast<To>(x);
}

}  // namespace cuda_cpu

inline float __fadd_rn(float x, float y) { return cuda_cpu::rounded(x + y); }
inline float __fsub_rn(float x, float y) { return cuda_cpu::rounded(x - y); }
inline float __fmul_rn(float x, float y) { return cuda_cpu::rounded(x * y); }
inline float __fdiv_rn(float x, float y) { return cuda_cpu::rounded(x / y); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1 / sqrt(static_cast<double>(x))); }
inline double __dadd_rn(double x, double y) { return cuda_cpu::rounded(x + y); }
inline double __dsub_rn(double x, double y) { return cuda_cpu::rounded(x - y); }
inline double __dmul_rn(double x, double y) { return cuda_cpu::rounded(x * y); }
inline double __ddiv_rn(double x, double y) { return cuda_cpu::rounded(x / y); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline double rsqrt(double x) { return 1 / sqrt(x); }
extern "C" inline float __exp10f(float x) noexcept { return powf(10, x); }
extern "C" inline float __log10f(float x) noexcept { return log10f(x); }
extern "C" inline float __tanf(float x) noexcept { return tanf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }

// To whole numbers: to the nearest, towards zero, up, down.
inline int __float2int_rn(float x) { return cuda_cpu::to_whole<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return cuda_cpu::to_whole<int>(truncf(x)); }
inline int __float2int_ru(float x) { return cuda_cpu::to_whole<int>(ceilf(x)); }
inline int __float2int_rd(float x) { return cuda_cpu::to_whole<int>(floorf(x)); }
inline unsigned __float2uint_rn(float x) { return cuda_cpu::to_whole<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_cpu::to_whole<unsigned>(truncf(x)); }
inline unsigned __float2uint_ru(float x) { return cuda_cpu::to_whole<unsigned>(ceilf(x)); }
inline unsigned __float2uint_rd(float x) { return cuda_cpu::to_whole<unsigned>(floorf(x)); }
inline int __double2int_rn(double x) { return cuda_cpu::to_whole<int>(nearbyint(x)); }
inline int __double2int_rz(double x) { return cuda_cpu::to_whole<int>(trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }

inline long long __double_as_longlong(double x) { return cuda_cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bits<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(cuda_cpu::bits<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(cuda_cpu::bits<uint64_t>(x)); }

inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffff) * (y & 0xffffff); }
inline int __mul24(int x, int y)
{
    const int64_t low_x = x << 8 >> 8, low_y = y << 8 >> 8;
    return static_cast<int>(low_x * low_y);
}
// A word of four bytes, each chosen from the eight of x and y by a hexadecimal digit of the selector.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

inline void __threadfence_system() { __threadfence(); }

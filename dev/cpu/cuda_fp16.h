// Half precision, with CUDA's names: 1 bit of sign, 5 of exponent, 10 of mantissa. Arithmetic is a float's, rounded,
// which is exact, as a float has more than twice the digits.
#pragma once

#include "short_floats.h"

namespace cuda_cpu {

// Rounds to nearest, ties to even. A half's last bit is worth 2^-10 of its power of two, and no less than 2^-24.
inline unsigned short half_bits(float x)
{
    const unsigned all = bits<unsigned>(x), sign = all >> 16 & 0x8000, magnitude = all & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;                                       // NaN
    if (magnitude >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);  // from 65520 on: infinity
    if (magnitude < 0x38800000) {  // below 2^-14. A float as large as 1/2 has 2^-24 as its last bit, and rounds to it.
        const float rounded = bits<float>(magnitude) + 0.5f;
        return static_cast<unsigned short>(sign | (bits<unsigned>(rounded) - bits<unsigned>(0.5f)));
    }
    const unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<unsigned short>(sign | (rounded - 0x38000000) >> 13);
}

// A double is cut off to a float whose last bit is set if anything was lost, so that nothing is rounded twice.
inline float rounded_to_odd(double x)
{
    const float nearest = static_cast<float>(x);
    const double back = nearest;
    if (back == x || x != x || back - back != 0) return nearest;
    const unsigned larger = fabs(back) > fabs(x);
    return bits<float>((bits<unsigned>(nearest) - larger) | 1);
}
inline unsigned short half_bits(double x) { return half_bits(rounded_to_odd(x)); }

inline float float_of_half(unsigned short half)
{
    const unsigned sign = static_cast<unsigned>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return bits<float>(sign | 0x7f800000 | magnitude << 13);
    if (magnitude >= 0x0400) return bits<float>(sign | ((magnitude << 13) + 0x38000000));
    return bits<float>(sign | bits<unsigned>(static_cast<float>(magnitude) * 0x1p-24f));
}

}  // namespace cuda_cpu

CUDA_CPU_SHORT_FLOAT(__half, __half2, __half_raw, cuda_cpu::half_bits, cuda_cpu::float_of_half)
using half = __half;
using half2 = __half2;

// The same conversions of a pack of 16: all cases are computed and the right one chosen. They do not use the
// processor's own instruction (F16C's), which keeps the payload of a NaN that a GPU drops.
inline void to_floats(float (&x)[16], const __half (&v)[16])
{
    using namespace cuda_cpu;
    Halves halves;
    load_pack(halves, v);
    const Bits all = __builtin_convertvector(halves, Bits), magnitude = all & 0x7fff;
    const Bits small =
        reinterpret_cast<Bits>(__builtin_convertvector(reinterpret_cast<Ints>(magnitude), Floats) * 0x1p-24f);
    const Bits large = (magnitude << 13) + (magnitude >= 0x7c00 ? Bits{} + 0x70000000 : Bits{} + 0x38000000);
    const Bits bits = (all & 0x8000) << 16 | (magnitude < 0x0400 ? small : large);
    memcpy(x, &bits, sizeof(bits));
}
inline void from_floats(__half (&v)[16], const float (&x)[16])
{
    using namespace cuda_cpu;
    Bits all;
    load_pack(all, x);
    const Bits magnitude = all & 0x7fffffff, sign = all >> 16 & 0x8000;
    const Bits half_of_one = reinterpret_cast<Bits>(Floats{} + 0.5f);
    const Bits small = reinterpret_cast<Bits>(reinterpret_cast<Floats>(magnitude) + 0.5f) - half_of_one;
    const Bits large = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    Bits bits = magnitude < 0x38800000 ? small : large;
    bits = magnitude >= 0x477ff000 ? Bits{} + 0x7c00 : bits;
    bits = magnitude > 0x7f800000 ? Bits{} + 0x7fff : (sign | bits);
    const Halves halves = __builtin_convertvector(bits, Halves);
    memcpy(static_cast<void*>(v), &halves, sizeof(halves));
}

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __half_as_ushort(__half x) { return static_cast<__half_raw>(x).x; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }

// Half precision for the CPU, with CUDA's names: 1 bit of sign, 5 of exponent, 10 of mantissa. Arithmetic is a float's,
// rounded: which is exact, as a float has more than twice the digits.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

// To nearest, ties to even. A half's last bit is worth 2^-10 of its power of two, and no less than 2^-24.
inline unsigned short half_bits(float x)
{
    const unsigned all = bits<unsigned>(x), sign = all >> 16 & 0x8000, magnitude = all & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;                                     // not a number
    if (magnitude >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);  // from 65520 on: infinity
    if (magnitude < 0x38800000) {  // below 2^-14. A float as large as 1/2 has 2^-24 as its last bit, and rounds to it.
        const float rounded = bits<float>(magnitude) + 0.5f;
        return static_cast<unsigned short>(sign | (bits<unsigned>(rounded) - bits<unsigned>(0.5f)));
    }
    const unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<unsigned short>(sign | (rounded - 0x38000000) >> 13);
}

// A double as a float for that: cut off, and its last bit set where something was lost, so that a half rounds rightly.
inline float rounded_to_odd(double x)
{
    const float nearest = static_cast<float>(x);
    const double back = nearest;
    if (back == x || x != x || back - back != 0) return nearest;
    const unsigned larger = fabs(back) > fabs(x);
    return bits<float>((bits<unsigned>(nearest) - larger) | 1);
}

inline float float_of_half(unsigned short half)
{
    const unsigned sign = static_cast<unsigned>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return bits<float>(sign | 0x7f800000 | magnitude << 13);
    if (magnitude >= 0x0400) return bits<float>(sign | ((magnitude << 13) + 0x38000000));
    return bits<float>(sign | bits<unsigned>(static_cast<float>(magnitude) * 0x1p-24f));
}

}  // namespace cuda_cpu

struct __half_raw { unsigned short x; };

struct __align__(2) __half {
    __half() = default;
    __half(float x) : bits_(cuda_cpu::half_bits(x)) {}
    __half(double x) : bits_(cuda_cpu::half_bits(cuda_cpu::rounded_to_odd(x))) {}
    __half(int x) : bits_(cuda_cpu::half_bits(static_cast<float>(x))) {}
    __half(__half_raw raw) : bits_(raw.x) {}
    operator float() const { return cuda_cpu::float_of_half(bits_); }
    operator __half_raw() const { return {bits_}; }

private:
    unsigned short bits_;
};
using half = __half;

// For code that converts packs: the same two conversions of 16 elements at once, in vector registers, all cases worked
// out side by side and the right one chosen. Each is a vector's, whatever the processor: its own instruction for it
// (F16C's) keeps what a GPU drops of a number that is none.
inline void to_floats(float (&x)[16], const __half (&v)[16])
{
    typedef float Floats __attribute__((vector_size(64)));
    typedef unsigned Bits __attribute__((vector_size(64)));
    typedef int Ints __attribute__((vector_size(64)));   // of whose conversion to floats processors have an instruction
    typedef unsigned short Halves __attribute__((vector_size(32)));
    Halves halves;
    memcpy(&halves, v, sizeof(halves));
    const Bits all = __builtin_convertvector(halves, Bits), magnitude = all & 0x7fff;
    const Bits small =
        reinterpret_cast<Bits>(__builtin_convertvector(reinterpret_cast<Ints>(magnitude), Floats) * 0x1p-24f);
    const Bits large = (magnitude << 13) + (magnitude >= 0x7c00 ? Bits{} + 0x70000000 : Bits{} + 0x38000000);
    const Bits bits = (all & 0x8000) << 16 | (magnitude < 0x0400 ? small : large);
    memcpy(x, &bits, sizeof(bits));
}
inline void from_floats(__half (&v)[16], const float (&x)[16])
{
    typedef float Floats __attribute__((vector_size(64)));
    typedef unsigned Bits __attribute__((vector_size(64)));
    typedef unsigned short Halves __attribute__((vector_size(32)));
    Bits all;
    memcpy(&all, x, sizeof(all));
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

struct __align__(4) __half2 { __half x, y; };
using half2 = __half2;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __half_as_ushort(__half x) { return static_cast<__half_raw>(x).x; }

inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }

inline __half operator+(__half x, __half y) { return static_cast<float>(x) + static_cast<float>(y); }
inline __half operator-(__half x, __half y) { return static_cast<float>(x) - static_cast<float>(y); }
inline __half operator*(__half x, __half y) { return static_cast<float>(x) * static_cast<float>(y); }
inline __half operator/(__half x, __half y) { return static_cast<float>(x) / static_cast<float>(y); }
inline __half& operator+=(__half& x, __half y) { return x = x + y; }
inline __half& operator-=(__half& x, __half y) { return x = x - y; }
inline __half& operator*=(__half& x, __half y) { return x = x * y; }
inline __half& operator/=(__half& x, __half y) { return x = x / y; }
inline __half operator-(__half x) { return __ushort_as_half(__half_as_ushort(x) ^ 0x8000); }
inline __half __hadd(__half x, __half y) { return x + y; }
inline __half __hsub(__half x, __half y) { return x - y; }
inline __half __hmul(__half x, __half y) { return x * y; }
inline __half __hdiv(__half x, __half y) { return x / y; }
inline __half __hneg(__half x) { return -x; }
inline bool __hlt(__half x, __half y) { return static_cast<float>(x) < static_cast<float>(y); }
inline bool __hgt(__half x, __half y) { return static_cast<float>(x) > static_cast<float>(y); }
inline bool __heq(__half x, __half y) { return static_cast<float>(x) == static_cast<float>(y); }
inline __half __hmax(__half x, __half y) { return fmaxf(x, y); }
inline __half __hmin(__half x, __half y) { return fminf(x, y); }
// A product of halves has 22 bits, so in double the sum loses only what is too far below its last bit to matter.
inline __half __hfma(__half x, __half y, __half z)
{
    return static_cast<double>(static_cast<float>(x)) * static_cast<float>(y) + static_cast<float>(z);
}

inline __half2 operator+(__half2 v, __half2 w) { return {v.x + w.x, v.y + w.y}; }
inline __half2 operator-(__half2 v, __half2 w) { return {v.x - w.x, v.y - w.y}; }
inline __half2 operator*(__half2 v, __half2 w) { return {v.x * w.x, v.y * w.y}; }
inline __half2 __hadd2(__half2 v, __half2 w) { return v + w; }
inline __half2 __hsub2(__half2 v, __half2 w) { return v - w; }
inline __half2 __hmul2(__half2 v, __half2 w) { return v * w; }
inline __half2 __hfma2(__half2 u, __half2 v, __half2 w) { return {__hfma(u.x, v.x, w.x), __hfma(u.y, v.y, w.y)}; }

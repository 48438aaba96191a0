// FP8 for the CPU, with CUDA's names, in its two kinds: E4M3, 1 bit of sign, 4 of exponent, 3 of mantissa, without
// infinity; and E5M2, 1, 5 and 2, the upper half of a half. Conversions to FP8 round to nearest, ties to even, and what is
// too large becomes the largest number (saturation) or, where the program asks for that, infinity or not a number.
// (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; PTX, cvt.rn.satfinite.)
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned int;

namespace cuda_cpu {

struct Fp8 {
    int mantissa, bias;   // bits; what is taken off the exponent
    unsigned largest;     // the code of the largest number
    unsigned infinity;    // what is too large and does not saturate
    unsigned nan;
};
constexpr Fp8 e4m3 = {3, 7, 0x7e, 0x7f, 0x7f}, e5m2 = {2, 15, 0x7b, 0x7c, 0x7f};
constexpr const Fp8& fp8(__nv_fp8_interpretation_t kind) { return kind == __NV_E4M3 ? e4m3 : e5m2; }

inline float float_of_fp8(unsigned char code, __nv_fp8_interpretation_t kind)
{
    const Fp8& f = fp8(kind);
    const unsigned magnitude = code & 0x7f, exponent = magnitude >> f.mantissa;
    const unsigned sign = static_cast<unsigned>(code & 0x80) << 24;
    if (kind == __NV_E5M2 && magnitude == f.infinity) return bits<float>(sign | 0x7f800000);
    if (magnitude > f.largest) return bits<float>(0x7fffffff);
    const float fraction = static_cast<float>(magnitude & ((1u << f.mantissa) - 1)) / static_cast<float>(1 << f.mantissa);
    const float value = exponent == 0 ? ldexpf(fraction, 1 - f.bias)
                                      : ldexpf(1 + fraction, static_cast<int>(exponent) - f.bias);
    return sign != 0 ? -value : value;
}

// A number whose last bit is worth `unit` rounds to whole units as integers do, ties to even: and codes of positive
// numbers are in their order, a unit apart.
inline unsigned char fp8_of_float(float x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind)
{
    const Fp8& f = fp8(kind);
    const unsigned all = bits<unsigned>(x), sign = all >> 24 & 0x80;
    const float magnitude = fabsf(x);
    if (x != x) return static_cast<unsigned char>(f.nan);
    int exponent = 1 - f.bias;   // of subnormals, and the least of others
    const unsigned too_large = saturation == __NV_SATFINITE ? f.largest : f.infinity;
    if (magnitude >= 0x1p16f) return static_cast<unsigned char>(sign | too_large);   // infinity too
    if (magnitude >= ldexpf(1, exponent)) exponent = ilogbf(magnitude);
    const float units = rintf(ldexpf(magnitude, f.mantissa - exponent));
    const unsigned code = static_cast<unsigned>(units) + (static_cast<unsigned>(exponent - (1 - f.bias)) << f.mantissa);
    return static_cast<unsigned char>(sign | (code > f.largest ? too_large : code));
}

// A double, cut off so that no rounding happens twice.
inline unsigned char fp8_of_double(double x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind)
{
    return fp8_of_float(rounded_to_odd(x), saturation, kind);
}

template <__nv_fp8_interpretation_t KIND> struct Fp8Number {
    __nv_fp8_storage_t __x;

    Fp8Number() = default;
    explicit Fp8Number(float x) : __x(fp8_of_float(x, __NV_SATFINITE, KIND)) {}
    explicit Fp8Number(double x) : __x(fp8_of_double(x, __NV_SATFINITE, KIND)) {}
    explicit Fp8Number(__half x) : Fp8Number(static_cast<float>(x)) {}
    explicit Fp8Number(__nv_bfloat16 x) : Fp8Number(static_cast<float>(x)) {}
    explicit Fp8Number(int x) : Fp8Number(static_cast<double>(x)) {}
    explicit operator float() const { return float_of_fp8(__x, KIND); }
    explicit operator double() const { return float_of_fp8(__x, KIND); }
    explicit operator __half() const { return float_of_fp8(__x, KIND); }
    explicit operator __nv_bfloat16() const { return float_of_fp8(__x, KIND); }
};

}  // namespace cuda_cpu

struct __nv_fp8_e4m3 : cuda_cpu::Fp8Number<__NV_E4M3> { using Fp8Number::Fp8Number; };
struct __nv_fp8_e5m2 : cuda_cpu::Fp8Number<__NV_E5M2> { using Fp8Number::Fp8Number; };

// The first of two or four is in the lowest bits.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind)
{
    return cuda_cpu::fp8_of_float(x, saturation, kind);
}
inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind)
{
    return cuda_cpu::fp8_of_double(x, saturation, kind);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturation,
                                                      __nv_fp8_interpretation_t kind)
{
    return cuda_cpu::fp8_of_float(__nv_bfloat16(x), saturation, kind);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturation,
                                                  __nv_fp8_interpretation_t kind)
{
    return cuda_cpu::fp8_of_float(__half(x), saturation, kind);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation,
                                                     __nv_fp8_interpretation_t kind)
{
    return static_cast<__nv_fp8x2_storage_t>(cuda_cpu::fp8_of_float(x.x, saturation, kind) |
                                             cuda_cpu::fp8_of_float(x.y, saturation, kind) << 8);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind)
{
    return __half(cuda_cpu::float_of_fp8(x, kind));
}

// FP8, with CUDA's names, of both kinds: E4M3 has 1 bit of sign, 4 of exponent, 3 of mantissa, and no infinity; E5M2
// has 1, 5 and 2, the upper half of a half. Conversions to FP8 round to nearest, ties to even; too large numbers
// become the largest (saturation). (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; PTX, cvt.rn.satfinite.)
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_saturation_t { __NV_SATFINITE = 1 };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;

namespace cuda_cpu {

struct Fp8 {
    unsigned mantissa, bias;   // bits; what is taken off the exponent
    unsigned largest;          // the code of the largest number
    unsigned infinity;         // which E4M3 does not have: NaN
    unsigned nan;

    constexpr unsigned lost() const { return 23 - mantissa; }                   // bits of a float's mantissa
    constexpr unsigned bias_of_float() const { return 127 - bias; }             // what a float takes off besides
    constexpr unsigned normal() const { return (bias_of_float() + 1) << 23; }   // the least normal, as a float
    constexpr unsigned unit() const { return normal() + (lost() << 23); }       // whose last bit is the least number
};
constexpr Fp8 e4m3 = {3, 7, 0x7e, 0x7f, 0x7f}, e5m2 = {2, 15, 0x7b, 0x7c, 0x7f};
constexpr const Fp8& fp8(__nv_fp8_interpretation_t kind) { return kind == __NV_E4M3 ? e4m3 : e5m2; }

// Of a number, or of a vector of numbers. Both directions take exponent and mantissa as one whole number, in which
// neighbours are 1 apart, and have no branch. A subnormal is added to `unit`, or taken from there.
template <class Floats, class Bits> inline void fp8_decode(Floats& x, const Bits& code, const Fp8& f)
{
    const Bits none = {}, magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    const Bits normal = (magnitude << f.lost()) + (f.bias_of_float() << 23), raised = magnitude + f.unit();
    Floats number;
    memcpy(&number, &raised, sizeof(x));
    number = number - bits<float>(f.unit());
    Bits subnormal;
    memcpy(&subnormal, &number, sizeof(x));
    const Bits finite = sign | (magnitude >> f.mantissa == 0u ? subnormal : normal);
    const Bits nan = none + 0x7fffffffu, infinity = f.infinity == f.nan ? nan : sign | 0x7f800000u;
    const Bits special = magnitude == f.infinity ? infinity : nan;
    const Bits all = magnitude > f.largest ? special : finite;
    memcpy(&x, &all, sizeof(x));
}

// To nearest, ties to even: a normal number as an integer, a subnormal by the addition.
template <class Floats, class Bits>
inline void fp8_encode(Bits& code, const Floats& x, const Fp8& f)
{
    Bits all, raised;
    memcpy(&all, &x, sizeof(x));
    const Bits none = {}, magnitude = all & 0x7fffffffu;
    const Bits half = ((1u << (f.lost() - 1)) - 1) + (magnitude >> f.lost() & 1u);
    const Bits normal = ((magnitude + half) >> f.lost()) - (f.bias_of_float() << f.mantissa);
    Floats number;
    memcpy(&number, &magnitude, sizeof(x));
    number = number + bits<float>(f.unit());
    memcpy(&raised, &number, sizeof(x));
    const Bits rounded = magnitude < f.normal() ? raised - f.unit() : normal;
    const Bits signed_code = (all >> 24 & 0x80u) | (rounded > f.largest ? none + f.largest : rounded);
    code = magnitude > 0x7f800000u ? none + f.nan : signed_code;
}

inline float float_of_fp8(unsigned char code, __nv_fp8_interpretation_t kind)
{
    float x;
    fp8_decode(x, static_cast<unsigned>(code), fp8(kind));
    return x;
}
inline unsigned char fp8_of_float(float x, __nv_fp8_interpretation_t kind)
{
    unsigned code;
    fp8_encode(code, x, fp8(kind));
    return static_cast<unsigned char>(code);
}

template <__nv_fp8_interpretation_t KIND> struct Fp8Number {
    __nv_fp8_storage_t __x;

    Fp8Number() = default;
    explicit Fp8Number(float x) : __x(fp8_of_float(x, KIND)) {}
    explicit operator float() const { return float_of_fp8(__x, KIND); }
};

}  // namespace cuda_cpu

struct __nv_fp8_e4m3 : cuda_cpu::Fp8Number<__NV_E4M3> { using Fp8Number::Fp8Number; };
struct __nv_fp8_e5m2 : cuda_cpu::Fp8Number<__NV_E5M2> { using Fp8Number::Fp8Number; };

// The same conversions of a pack of 16.
namespace cuda_cpu {

template <class T> inline void decode_pack(float (&x)[16], const T (&v)[16], const Fp8& f)
{
    Codes codes;
    load_pack(codes, v);
    Floats floats;
    fp8_decode(floats, __builtin_convertvector(__builtin_convertvector(codes, Halves), Bits), f);
    memcpy(x, &floats, sizeof(floats));
}
template <class T> inline void encode_pack(T (&v)[16], const float (&x)[16], const Fp8& f)
{
    Floats floats;
    load_pack(floats, x);
    Bits bits;
    fp8_encode(bits, floats, f);
    const Codes codes = __builtin_convertvector(bits, Codes);
    memcpy(static_cast<void*>(v), &codes, sizeof(codes));
}

}  // namespace cuda_cpu

inline void to_floats(float (&x)[16], const __nv_fp8_e4m3 (&v)[16]) { cuda_cpu::decode_pack(x, v, cuda_cpu::e4m3); }
inline void to_floats(float (&x)[16], const __nv_fp8_e5m2 (&v)[16]) { cuda_cpu::decode_pack(x, v, cuda_cpu::e5m2); }
inline void from_floats(__nv_fp8_e4m3 (&v)[16], const float (&x)[16]) { cuda_cpu::encode_pack(v, x, cuda_cpu::e4m3); }
inline void from_floats(__nv_fp8_e5m2 (&v)[16], const float (&x)[16]) { cuda_cpu::encode_pack(v, x, cuda_cpu::e5m2); }

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t kind)
{
    return cuda_cpu::fp8_of_float(x, kind);
}
// The first of the two is in the lower bits.
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t kind)
{
    return static_cast<__nv_fp8x2_storage_t>(cuda_cpu::fp8_of_float(x.x, kind) |
                                             cuda_cpu::fp8_of_float(x.y, kind) << 8);
}

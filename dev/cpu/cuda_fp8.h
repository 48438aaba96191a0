// Both FP8 formats, with CUDA's names. E4M3 has 1 sign bit, 4 exponent bits, 3 mantissa bits, and no infinity. E5M2 has
// 1, 5 and 2: the upper byte of half precision. Conversions to FP8 round to nearest even and saturate: larger values
// become the largest finite one. (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; PTX, cvt.rn.satfinite.)
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_saturation_t { __NV_SATFINITE = 1 };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;

namespace cuda_cpu {
constexpr ShortFormat e4m3 = {8, 3, 7, 0x7e, 0x7f, 0x7f, 0x7e}, e5m2 = {8, 2, 15, 0x7b, 0x7c, 0x7f, 0x7b};
constexpr const ShortFormat& fp8(__nv_fp8_interpretation_t kind) { return kind == __NV_E4M3 ? e4m3 : e5m2; }

template <__nv_fp8_interpretation_t KIND> struct Fp8Number {
    __nv_fp8_storage_t __x;

    Fp8Number() = default;
    explicit Fp8Number(float x) : __x(static_cast<__nv_fp8_storage_t>(encoded(x, fp8(KIND)))) {}
    explicit operator float() const { return decoded(__x, fp8(KIND)); }
};
}  // namespace cuda_cpu

struct __nv_fp8_e4m3 : cuda_cpu::Fp8Number<__NV_E4M3> { using Fp8Number::Fp8Number; };
struct __nv_fp8_e5m2 : cuda_cpu::Fp8Number<__NV_E5M2> { using Fp8Number::Fp8Number; };

inline void to_floats(float (&x)[16], const __nv_fp8_e4m3 (&v)[16]) { cuda_cpu::decode_pack(x, v, cuda_cpu::e4m3); }
inline void to_floats(float (&x)[16], const __nv_fp8_e5m2 (&v)[16]) { cuda_cpu::decode_pack(x, v, cuda_cpu::e5m2); }
inline void from_floats(__nv_fp8_e4m3 (&v)[16], const float (&x)[16]) { cuda_cpu::encode_pack(v, x, cuda_cpu::e4m3); }
inline void from_floats(__nv_fp8_e5m2 (&v)[16], const float (&x)[16]) { cuda_cpu::encode_pack(v, x, cuda_cpu::e5m2); }

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
    return static_cast<__nv_fp8_storage_t>(cuda_cpu::encoded(x, cuda_cpu::fp8(kind)));
}
// The lower byte is x.x, the upper byte x.y.
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
    const auto& f = cuda_cpu::fp8(kind);
    return static_cast<__nv_fp8x2_storage_t>(cuda_cpu::encoded(x.x, f) | cuda_cpu::encoded(x.y, f) << 8);
}

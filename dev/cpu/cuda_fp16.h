// Half precision with CUDA's names: 1 sign bit, 5 exponent bits, 10 mantissa bits. Arithmetic is computed in float and
// rounded. The result is correctly rounded, because float has more than twice the significand bits.
#pragma once

#include "short_floats.h"

namespace cuda_cpu {
constexpr ShortFormat half_format = {16, 10, 15, 0x7bff, 0x7c00, 0x7fff, 0x7c00};
inline unsigned short half_bits(float x) { return static_cast<unsigned short>(encoded(x, half_format)); }
inline float float_of_half(unsigned short half) { return decoded(half, half_format); }
}  // namespace cuda_cpu

CUDA_CPU_SHORT_FLOAT(__half, half, cuda_cpu::half_bits, cuda_cpu::float_of_half)
using half = __half;
using half2 = __half2;

inline void to_floats(float (&x)[16], const __half (&v)[16]) { cuda_cpu::decode_pack(x, v, cuda_cpu::half_format); }
inline void from_floats(__half (&v)[16], const float (&x)[16]) { cuda_cpu::encode_pack(v, x, cuda_cpu::half_format); }

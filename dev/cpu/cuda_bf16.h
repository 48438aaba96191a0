// bfloat16 with CUDA's names: the upper 16 bits of a float; conversions round to nearest even.
#pragma once

#include "short_floats.h"

namespace cuda_cpu {
// Returns x as bfloat16. Every NaN becomes 0x7fff, as on a GPU. It has no branch, so loops can be vectorised.
inline unsigned short bf16_bits(float x) {
    const unsigned bits = cuda_cpu::bits<unsigned>(x);
    const unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<unsigned short>(x != x ? 0x7fff : rounded);
}
inline float float_of_bf16(unsigned short x) { return bits<float>(static_cast<unsigned>(x) << 16); }
}  // namespace cuda_cpu

CUDA_CPU_SHORT_FLOAT(__nv_bfloat16, bfloat16, cuda_cpu::bf16_bits, cuda_cpu::float_of_bf16)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// The same conversions for a pack of 16.
inline void to_floats(float (&x)[16], const __nv_bfloat16 (&v)[16]) {
    using namespace cuda_cpu;
    Halves halves;
    load_pack(halves, v);
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    memcpy(x, &bits, sizeof(bits));
}
inline void from_floats(__nv_bfloat16 (&v)[16], const float (&x)[16]) {
    using namespace cuda_cpu;
    Floats floats;
    load_pack(floats, x);
    const Bits bits = reinterpret_cast<Bits>(floats), is_nan = reinterpret_cast<Bits>(floats != floats);
    const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fff), Halves);
    memcpy(static_cast<void*>(v), &halves, sizeof(halves));
}

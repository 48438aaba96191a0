// bfloat16 for the CPU, with CUDA's names: the upper half of a float, rounded to nearest, ties to even.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

// Not a number has one representation here, as on the GPU. No branch, so that loops become vector code.
inline unsigned short bf16_bits(float x)
{
    const unsigned bits = cuda_cpu::bits<unsigned>(x);
    const unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<unsigned short>(x != x ? 0x7fff : rounded);
}

}  // namespace cuda_cpu

struct __nv_bfloat16_raw { unsigned short x; };

struct __align__(2) __nv_bfloat16 {
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) : bits_(cuda_cpu::bf16_bits(x)) {}
    __nv_bfloat16(double x) : bits_(cuda_cpu::bf16_bits(static_cast<float>(x))) {}
    __nv_bfloat16(int x) : bits_(cuda_cpu::bf16_bits(static_cast<float>(x))) {}
    __nv_bfloat16(__nv_bfloat16_raw raw) : bits_(raw.x) {}
    operator float() const { return cuda_cpu::bits<float>(static_cast<unsigned>(bits_) << 16); }
    operator __nv_bfloat16_raw() const { return {bits_}; }

private:
    unsigned short bits_;
};
using nv_bfloat16 = __nv_bfloat16;

// For code that converts packs: 16 elements at once, in vector registers. (g++ makes vector code of a conversion in a
// loop over an array, but not of one in straight code.)
inline void to_floats(float (&x)[16], const __nv_bfloat16 (&v)[16])
{
    typedef unsigned Bits __attribute__((vector_size(64)));
    typedef unsigned short Halves __attribute__((vector_size(32)));
    Halves halves;
    memcpy(&halves, v, sizeof(halves));
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    memcpy(x, &bits, sizeof(bits));
}
inline void from_floats(__nv_bfloat16 (&v)[16], const float (&x)[16])
{
    typedef float Floats __attribute__((vector_size(64)));
    typedef unsigned Bits __attribute__((vector_size(64)));
    typedef unsigned short Halves __attribute__((vector_size(32)));
    Floats floats;
    Bits bits;
    memcpy(&floats, x, sizeof(floats));
    memcpy(&bits, x, sizeof(bits));
    const Bits is_nan = reinterpret_cast<Bits>(floats != floats);
    const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fff), Halves);
    memcpy(static_cast<void*>(v), &halves, sizeof(halves));
}

struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return static_cast<__nv_bfloat16_raw>(x).x; }

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline float __low2float(__nv_bfloat162 v) { return v.x; }
inline float __high2float(__nv_bfloat162 v) { return v.y; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }

// Arithmetic gives a bfloat16, as on the GPU: without these, x + y would silently be a float here.
inline __nv_bfloat16 operator+(__nv_bfloat16 x, __nv_bfloat16 y)
{
    return static_cast<float>(x) + static_cast<float>(y);
}
inline __nv_bfloat16 operator-(__nv_bfloat16 x, __nv_bfloat16 y)
{
    return static_cast<float>(x) - static_cast<float>(y);
}
inline __nv_bfloat16 operator*(__nv_bfloat16 x, __nv_bfloat16 y)
{
    return static_cast<float>(x) * static_cast<float>(y);
}
inline __nv_bfloat16 operator/(__nv_bfloat16 x, __nv_bfloat16 y)
{
    return static_cast<float>(x) / static_cast<float>(y);
}
inline __nv_bfloat16& operator+=(__nv_bfloat16& x, __nv_bfloat16 y) { return x = x + y; }
inline __nv_bfloat16& operator-=(__nv_bfloat16& x, __nv_bfloat16 y) { return x = x - y; }
inline __nv_bfloat16& operator*=(__nv_bfloat16& x, __nv_bfloat16 y) { return x = x * y; }
inline __nv_bfloat16& operator/=(__nv_bfloat16& x, __nv_bfloat16 y) { return x = x / y; }
inline __nv_bfloat162 operator+(__nv_bfloat162 v, __nv_bfloat162 w) { return {v.x + w.x, v.y + w.y}; }
inline __nv_bfloat162 operator-(__nv_bfloat162 v, __nv_bfloat162 w) { return {v.x - w.x, v.y - w.y}; }
inline __nv_bfloat162 operator*(__nv_bfloat162 v, __nv_bfloat162 w) { return {v.x * w.x, v.y * w.y}; }

inline __nv_bfloat16 atomicAdd(__nv_bfloat16* address, __nv_bfloat16 value)
{
    return cuda_cpu::atomic_sum(address, value);
}
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* address, __nv_bfloat162 value)
{
    return cuda_cpu::atomic_sum(address, value);
}

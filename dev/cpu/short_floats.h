// Common code of the 8- and 16-bit floats: conversions, also of packs of 16. For __nv_bfloat16 and __half also the
// types, pairs, and arithmetic, which is computed in float and rounded.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {
// Vectors of 16 elements, for packs. Without them g++ vectorises conversions only in loops over arrays.
typedef float Floats __attribute__((vector_size(64)));
typedef unsigned Bits __attribute__((vector_size(64)));
typedef unsigned short Halves __attribute__((vector_size(32)));
typedef unsigned char Codes __attribute__((vector_size(16)));

// Copies a pack to a vector. (Returning a vector wider than the processor's would change the calling convention.)
template <class Vector, class T> inline void load_pack(Vector& to, const T& array) {
    static_assert(sizeof(to) == sizeof(array), "a pack must have 16 elements");
    memcpy(&to, &array, sizeof(to));
}

// ---- half precision and FP8 (bfloat16, which has the exponent of a float, is simpler: cuda_bf16.h)

struct ShortFormat {
    unsigned width, mantissa, bias;  // bits of a value and of its mantissa; exponent bias
    unsigned largest;                // code of the largest finite value
    unsigned infinity, nan;          // codes; equal if the format has no infinity
    unsigned too_large;              // code of values that overflow

    constexpr unsigned sign() const { return 1u << (width - 1); }
    constexpr unsigned dropped() const { return 23 - mantissa; }                // float's additional mantissa bits
    constexpr unsigned bias_difference() const { return 127 - bias; }           // float's exponent bias minus this one
    constexpr unsigned normal() const { return (bias_difference() + 1) << 23; } // the smallest normal, as float bits
    // The float whose ULP is the smallest subnormal.
    constexpr unsigned unit() const { return normal() + (dropped() << 23); }
};

// Converts codes to floats; Floats and Bits are scalars or vectors. decode and encode have no branch. They treat
// exponent and mantissa as one integer, which differs by 1 between adjacent values. To convert a subnormal, encode adds
// `unit`, and decode subtracts it.
template <class Floats, class Bits> inline void decode(Floats& x, const Bits& code, const ShortFormat& f) {
    const Bits none = {}, magnitude = code & (f.sign() - 1), sign = (code & f.sign()) << (32 - f.width);
    const Bits normal = (magnitude << f.dropped()) + (f.bias_difference() << 23), raised = magnitude + f.unit();
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

// Converts floats to codes, rounded to nearest even: normals by integer arithmetic, subnormals by adding `unit`.
template <class Floats, class Bits> inline void encode(Bits& code, const Floats& x, const ShortFormat& f) {
    Bits all, raised;
    memcpy(&all, &x, sizeof(x));
    const Bits none = {}, magnitude = all & 0x7fffffffu;
    const Bits half = ((1u << (f.dropped() - 1)) - 1) + (magnitude >> f.dropped() & 1u);
    const Bits normal = ((magnitude + half) >> f.dropped()) - (f.bias_difference() << f.mantissa);
    Floats number;
    memcpy(&number, &magnitude, sizeof(x));
    number = number + bits<float>(f.unit());
    memcpy(&raised, &number, sizeof(x));
    const Bits rounded = magnitude < f.normal() ? raised - f.unit() : normal;
    const Bits signed_code =
        (all >> (32 - f.width) & f.sign()) | (rounded > f.largest ? none + f.too_large : rounded);
    code = magnitude > 0x7f800000u ? none + f.nan : signed_code;
}

inline float decoded(unsigned code, const ShortFormat& f) {
    float x;
    decode(x, code, f);
    return x;
}
inline unsigned encoded(float x, const ShortFormat& f) {
    unsigned code;
    encode(code, x, f);
    return code;
}

// The same conversions for a pack of 16.
template <class T> inline void decode_pack(float (&x)[16], const T (&v)[16], const ShortFormat& f) {
    std::conditional_t<sizeof(T) == 1, Codes, Halves> codes;
    load_pack(codes, v);
    Floats floats;
    decode(floats, __builtin_convertvector(__builtin_convertvector(codes, Halves), Bits), f);
    memcpy(x, &floats, sizeof(floats));
}
template <class T> inline void encode_pack(T (&v)[16], const float (&x)[16], const ShortFormat& f) {
    Floats floats;
    load_pack(floats, x);
    Bits bits;
    encode(bits, floats, f);
    const auto codes = __builtin_convertvector(bits, std::conditional_t<sizeof(T) == 1, Codes, Halves>);
    memcpy(static_cast<void*>(v), &codes, sizeof(codes));
}

// Returns x truncated to float, with the last bit set if x was not exact (round to odd). Rounding the result to a
// 16-bit float then equals rounding x once.
template <class Wide> inline float rounded_to_odd(Wide x) {
    const float nearest = static_cast<float>(x);
    const Wide back = nearest;
    if (back == x || x != x || back - back != 0) return nearest;
    const unsigned larger = fabs(back) > fabs(x);
    return bits<float>((bits<unsigned>(nearest) - larger) | 1);
}
}  // namespace cuda_cpu

// Defines the type T, its raw form T##_raw and its pair T##2 from Encode (float to bits) and Decode (bits to float).
// Name: the type's name in CUDA's conversion functions, half or bfloat16.
#define CUDA_CPU_SHORT_FLOAT(T, Name, Encode, Decode)                                                                 \
    struct T##_raw { unsigned short x; };                                                                             \
    struct __align__(2) T {                                                                                           \
        T() = default;                                                                                                \
        T(float x) : bits_(Encode(x)) {}                                                                              \
        T(double x) : bits_(Encode(cuda_cpu::rounded_to_odd(x))) {}                                                   \
        T(int x) : T(static_cast<double>(x)) {}                                                                       \
        T(T##_raw raw) : bits_(raw.x) {}                                                                              \
        operator float() const { return Decode(bits_); }                                                              \
        operator T##_raw() const { return {bits_}; }                                                                  \
                                                                                                                      \
    private:                                                                                                          \
        unsigned short bits_;                                                                                         \
    };                                                                                                                \
    struct __align__(4) T##2 {                                                                                        \
        T x, y;                                                                                                       \
        T##2() = default;                                                                                             \
        T##2(T x_, T y_) : x(x_), y(y_) {}                                                                            \
    };                                                                                                                \
    CUDA_CPU_SHORT_OPERATOR(T, +, __hadd, __hadd2)                                                                    \
    CUDA_CPU_SHORT_OPERATOR(T, -, __hsub, __hsub2)                                                                    \
    CUDA_CPU_SHORT_OPERATOR(T, *, __hmul, __hmul2)                                                                    \
    CUDA_CPU_SHORT_OPERATOR(T, /, __hdiv, __h2div)                                                                    \
    CUDA_CPU_SHORT_COMPARISON(T, eq, a == b)                                                                          \
    CUDA_CPU_SHORT_COMPARISON(T, ne, a < b || a > b)                                                                  \
    CUDA_CPU_SHORT_COMPARISON(T, lt, a < b)                                                                           \
    CUDA_CPU_SHORT_COMPARISON(T, le, a <= b)                                                                          \
    CUDA_CPU_SHORT_COMPARISON(T, gt, a > b)                                                                           \
    CUDA_CPU_SHORT_COMPARISON(T, ge, a >= b)                                                                          \
    inline T __hmax(T x, T y) { return fmaxf(x, y); }                                                                 \
    inline T __hmin(T x, T y) { return fminf(x, y); }                                                                 \
    inline T##2 __hmax2(T##2 v, T##2 w) { return {__hmax(v.x, w.x), __hmax(v.y, w.y)}; }                              \
    inline T##2 __hmin2(T##2 v, T##2 w) { return {__hmin(v.x, w.x), __hmin(v.y, w.y)}; }                              \
    inline bool __hisnan(T x) { return x != x; }                                                                      \
    inline int __hisinf(T x) { return isinf(static_cast<float>(x)) ? (x > 0 ? 1 : -1) : 0; }                          \
    CUDA_CPU_SHORT_FUNCTION(T, __hneg, __hneg2, -x)                                                                   \
    CUDA_CPU_SHORT_FUNCTION(T, __habs, __habs2, fabsf(x))                                                             \
    CUDA_CPU_SHORT_FUNCTION(T, hceil, h2ceil, ceilf(x))                                                               \
    CUDA_CPU_SHORT_FUNCTION(T, hfloor, h2floor, floorf(x))                                                            \
    CUDA_CPU_SHORT_FUNCTION(T, hrint, h2rint, nearbyintf(x))                                                          \
    CUDA_CPU_SHORT_FUNCTION(T, htrunc, h2trunc, truncf(x))                                                            \
    CUDA_CPU_SHORT_FUNCTION(T, hcos, h2cos, cosf(x))                                                                  \
    CUDA_CPU_SHORT_FUNCTION(T, hsin, h2sin, sinf(x))                                                                  \
    CUDA_CPU_SHORT_FUNCTION(T, htanh, h2tanh, tanhf(x))                                                               \
    CUDA_CPU_SHORT_FUNCTION(T, hexp, h2exp, expf(x))                                                                  \
    CUDA_CPU_SHORT_FUNCTION(T, hexp2, h2exp2, exp2f(x))                                                               \
    CUDA_CPU_SHORT_FUNCTION(T, hexp10, h2exp10, exp10f(x))                                                            \
    CUDA_CPU_SHORT_FUNCTION(T, hlog, h2log, logf(x))                                                                  \
    CUDA_CPU_SHORT_FUNCTION(T, hlog2, h2log2, log2f(x))                                                               \
    CUDA_CPU_SHORT_FUNCTION(T, hlog10, h2log10, log10f(x))                                                            \
    CUDA_CPU_SHORT_FUNCTION(T, hsqrt, h2sqrt, sqrtf(x))                                                               \
    CUDA_CPU_SHORT_FUNCTION(T, hrsqrt, h2rsqrt, 1 / sqrtf(x))                                                         \
    CUDA_CPU_SHORT_FUNCTION(T, hrcp, h2rcp, 1 / x)                                                                    \
    CUDA_CPU_SHORT_INTEGER(T, Name, int, int)                                                                         \
    CUDA_CPU_SHORT_INTEGER(T, Name, uint, unsigned)                                                                   \
    CUDA_CPU_SHORT_INTEGER(T, Name, short, short)                                                                     \
    CUDA_CPU_SHORT_INTEGER(T, Name, ushort, unsigned short)                                                           \
    CUDA_CPU_SHORT_INTEGER(T, Name, ll, long long)                                                                    \
    CUDA_CPU_SHORT_INTEGER(T, Name, ull, unsigned long long)                                                          \
    /* The product is exact in double. A z that the sum drops still decides which way a tie is rounded. */            \
    inline T __hfma(T x, T y, T z) {                                                                                  \
        const float addend = z;                                                                                       \
        const double product = double{static_cast<float>(x)} * static_cast<float>(y), sum = product + addend;         \
        return sum != product || addend == 0 ? sum : nextafter(product, addend > 0 ? INFINITY : -INFINITY);           \
    }                                                                                                                 \
    inline T##2 __hfma2(T##2 u, T##2 v, T##2 w) { return {__hfma(u.x, v.x, w.x), __hfma(u.y, v.y, w.y)}; }            \
    inline T atomicAdd(T* address, T value) { return cuda_cpu::atomic_sum(address, value); }                          \
    inline T##2 atomicAdd(T##2* address, T##2 value) { return cuda_cpu::atomic_sum(address, value); }                 \
    inline T __float2##Name(float x) { return x; }                                                                    \
    inline T __float2##Name##_rn(float x) { return x; }                                                               \
    inline T __double2##Name(double x) { return x; }                                                                  \
    inline float __##Name##2float(T x) { return x; }                                                                  \
    inline T __ushort_as_##Name(unsigned short bits) { return T##_raw{bits}; }                                        \
    inline unsigned short __##Name##_as_ushort(T x) { return static_cast<T##_raw>(x).x; }                             \
    inline T##2 __floats2##Name##2_rn(float x, float y) { return {x, y}; }                                            \
    inline T##2 __float2##Name##2_rn(float x) { return {x, x}; }                                                      \
    inline T##2 __halves2##Name##2(T x, T y) { return {x, y}; }                                                       \
    inline T##2 make_##Name##2(T x, T y) { return {x, y}; }                                                           \
    inline T##2 __##Name##2##Name##2(T x) { return {x, x}; }                                                          \
    inline T##2 __low2##Name##2(T##2 v) { return {v.x, v.x}; }                                                        \
    inline T##2 __high2##Name##2(T##2 v) { return {v.y, v.y}; }                                                       \
    inline T##2 __lows2##Name##2(T##2 v, T##2 w) { return {v.x, w.x}; }                                               \
    inline T##2 __highs2##Name##2(T##2 v, T##2 w) { return {v.y, w.y}; }                                              \
    inline T##2 __lowhigh2highlow(T##2 v) { return {v.y, v.x}; }                                                      \
    inline T##2 __float22##Name##2_rn(float2 v) { return {v.x, v.y}; }                                                \
    inline float2 __##Name##22float2(T##2 v) { return {v.x, v.y}; }                                                   \
    inline T __low2##Name(T##2 v) { return v.x; }                                                                     \
    inline T __high2##Name(T##2 v) { return v.y; }                                                                    \
    inline float __low2float(T##2 v) { return v.x; }                                                                  \
    inline float __high2float(T##2 v) { return v.y; }

// Comparisons of floats a and b, and of pairs: name2 gives 1 or 0 for each, and bname2 whether both hold. All, also ne,
// are false if a number is NaN.
#define CUDA_CPU_SHORT_COMPARISON(T, name, holds)                                                                     \
    inline bool __h##name(T x, T y) {                                                                                 \
        const float a = x, b = y;                                                                                     \
        return holds;                                                                                                 \
    }                                                                                                                 \
    inline T##2 __h##name##2(T##2 v, T##2 w) { return {__h##name(v.x, w.x), __h##name(v.y, w.y)}; }                   \
    inline bool __hb##name##2(T##2 v, T##2 w) { return __h##name(v.x, w.x) && __h##name(v.y, w.y); }

// A function of a number x, computed in float, and of a pair.
#define CUDA_CPU_SHORT_FUNCTION(T, name, name2, result)                                                               \
    inline T name(T number) {                                                                                         \
        const float x = number;                                                                                       \
        return result;                                                                                                \
    }                                                                                                                 \
    inline T##2 name2(T##2 v) { return {name(v.x), name(v.y)}; }

// Conversions to an integer type (nearest, to zero, up, down), clamped to its range, and from it.
#define CUDA_CPU_SHORT_INTEGER(T, Name, name, Integer)                                                                \
    CUDA_CPU_TO_INTEGER(Name, T, name, Integer)                                                                       \
    inline T __##name##2##Name##_rn(Integer x) { return cuda_cpu::rounded_to_odd(static_cast<long double>(x)); }

// Arithmetic operators with a result of type T, as on a GPU. Without them, x + y would be a float.
#define CUDA_CPU_SHORT_OPERATOR(T, operation, name, name2)                                                            \
    inline T operator operation(T x, T y) { return static_cast<float>(x) operation static_cast<float>(y); }           \
    inline T& operator operation##=(T& x, T y) { return x = x operation y; }                                          \
    inline T##2 operator operation(T##2 v, T##2 w) { return {v.x operation w.x, v.y operation w.y}; }                 \
    inline T name(T x, T y) { return x operation y; }                                                                 \
    inline T##2 name2(T##2 v, T##2 w) { return v operation w; }

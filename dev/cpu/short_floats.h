// What __nv_bfloat16 and __half have in common: a storage class, pairs, arithmetic, which is a float's and then
// rounded, and the conversion of packs of 16.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

// Vectors of 16, for packs. g++ makes vector code of a conversion in a loop over an array, but not of one in straight
// code.
typedef float Floats __attribute__((vector_size(64)));
typedef unsigned Bits __attribute__((vector_size(64)));
typedef int Ints __attribute__((vector_size(64)));
typedef unsigned short Halves __attribute__((vector_size(32)));
typedef unsigned char Codes __attribute__((vector_size(16)));

// Copies a pack to a vector. (By reference: to return a vector that the processor has no register for would be another
// calling convention.)
template <class Vector, class T>
inline void load_pack(Vector& to, const T& array)
{
    static_assert(sizeof(to) == sizeof(array), "a pack of 16");
    memcpy(&to, &array, sizeof(to));
}

}  // namespace cuda_cpu

// Defines the type T, its raw form and its pair T2, from Encode (float or double to bits) and Decode (bits to float).
#define CUDA_CPU_SHORT_FLOAT(T, T2, Raw, Encode, Decode)                                                              \
    struct Raw { unsigned short x; };                                                                                 \
    struct __align__(2) T {                                                                                           \
        T() = default;                                                                                                \
        T(float x) : bits_(Encode(x)) {}                                                                              \
        T(double x) : bits_(Encode(x)) {}                                                                             \
        T(int x) : bits_(Encode(static_cast<float>(x))) {}                                                            \
        T(Raw raw) : bits_(raw.x) {}                                                                                  \
        operator float() const { return Decode(bits_); }                                                              \
        operator Raw() const { return {bits_}; }                                                                      \
                                                                                                                      \
    private:                                                                                                          \
        unsigned short bits_;                                                                                         \
    };                                                                                                                \
    struct __align__(4) T2 { T x, y; };                                                                               \
    CUDA_CPU_SHORT_OPERATOR(T, T2, +, __hadd, __hadd2)                                                                \
    CUDA_CPU_SHORT_OPERATOR(T, T2, -, __hsub, __hsub2)                                                                \
    CUDA_CPU_SHORT_OPERATOR(T, T2, *, __hmul, __hmul2)                                                                \
    CUDA_CPU_SHORT_OPERATOR(T, T2, /, __hdiv, __h2div)                                                                \
    inline bool __hlt(T x, T y) { return static_cast<float>(x) < static_cast<float>(y); }                             \
    inline bool __hgt(T x, T y) { return static_cast<float>(x) > static_cast<float>(y); }                             \
    inline T __hmax(T x, T y) { return fmaxf(x, y); }                                                                 \
    inline T __hmin(T x, T y) { return fminf(x, y); }                                                                 \
    inline T __hneg(T x) { return -static_cast<float>(x); }                                                           \
    /* The product is exact in double, where the sum loses only what is too far below its last bit to matter. */      \
    inline T __hfma(T x, T y, T z)                                                                                    \
    {                                                                                                                 \
        return static_cast<double>(static_cast<float>(x)) * static_cast<float>(y) + static_cast<float>(z);            \
    }                                                                                                                 \
    inline T2 __hfma2(T2 u, T2 v, T2 w) { return {__hfma(u.x, v.x, w.x), __hfma(u.y, v.y, w.y)}; }                     \
    inline float __low2float(T2 v) { return v.x; }                                                                    \
    inline float __high2float(T2 v) { return v.y; }                                                                   \
    inline T atomicAdd(T* address, T value) { return cuda_cpu::atomic_sum(address, value); }                          \
    inline T2 atomicAdd(T2* address, T2 value) { return cuda_cpu::atomic_sum(address, value); }

// An arithmetic operator has a short result, as on a GPU: without it, x + y would be a float.
#define CUDA_CPU_SHORT_OPERATOR(T, T2, operation, name, name2)                                                        \
    inline T operator operation(T x, T y) { return static_cast<float>(x) operation static_cast<float>(y); }           \
    inline T& operator operation##=(T& x, T y) { return x = x operation y; }                                          \
    inline T2 operator operation(T2 v, T2 w) { return {v.x operation w.x, v.y operation w.y}; }                       \
    inline T name(T x, T y) { return x operation y; }                                                                 \
    inline T2 name2(T2 v, T2 w) { return v operation w; }

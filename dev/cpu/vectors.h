// The vector types that cuda_runtime.h itself has no use for, with CUDA's alignments.
#pragma once

#include "cuda_runtime.h"

// Names of T: of two, three and four, and how the first and the last of them are aligned.
#define CUDA_CPU_VECTORS(name, T, two, four)                                                                 \
    struct name##1 { T x; };                                                                                 \
    struct name##2 { T x, y; } __align__(two);                                                               \
    struct name##3 { T x, y, z; };                                                                           \
    struct name##4 { T x, y, z, w; } __align__(four);                                                        \
    inline name##1 make_##name##1(T x) { return {x}; }                                                       \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                               \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                       \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTORS(char, signed char, 2, 4)
CUDA_CPU_VECTORS(uchar, unsigned char, 2, 4)
CUDA_CPU_VECTORS(short, short, 4, 8)
CUDA_CPU_VECTORS(ushort, unsigned short, 4, 8)
CUDA_CPU_VECTORS(long, long, 16, 16)
CUDA_CPU_VECTORS(ulong, unsigned long, 16, 16)
CUDA_CPU_VECTORS(longlong, long long, 16, 16)
CUDA_CPU_VECTORS(ulonglong, unsigned long long, 16, 16)
CUDA_CPU_VECTORS(double, double, 16, 16)
#undef CUDA_CPU_VECTORS

struct int1 { int x; };
struct uint1 { unsigned x; };
struct float1 { float x; };
inline int1 make_int1(int x) { return {x}; }
inline uint1 make_uint1(unsigned x) { return {x}; }
inline float1 make_float1(float x) { return {x}; }

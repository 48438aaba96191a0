// CUDA's vector types, with CUDA's alignments, and dim3.
#pragma once

#define __align__(bytes) __attribute__((aligned(bytes)))

// Defines name1 to name4, vectors of T. `two` and `four`: alignment of name2 and name4 in bytes.
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
CUDA_CPU_VECTORS(int, int, 8, 16)
CUDA_CPU_VECTORS(uint, unsigned, 8, 16)
CUDA_CPU_VECTORS(longlong, long long, 16, 16)
CUDA_CPU_VECTORS(ulonglong, unsigned long long, 16, 16)
CUDA_CPU_VECTORS(float, float, 8, 16)
CUDA_CPU_VECTORS(double, double, 16, 16)
#undef CUDA_CPU_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// Atomic functions, with relaxed memory order as on a GPU.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {
// For operations without a processor instruction: atomically replaces *address by change(*address), in a loop of
// compare-and-swap on the bits. Returns the old value. Always writes, so that dev/inspect records the same accesses.
template <class T, class Change> inline T atomic_update(T* address, Change change) {
    T seen, next;
    __atomic_load(address, &seen, __ATOMIC_RELAXED);
    do {
        next = change(seen);
    } while (!__atomic_compare_exchange(address, &seen, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
}

template <class T> inline T atomic_sum(T* address, T value) {
    watch::adds_floats();
    return atomic_update(address, [=](T seen) { return seen + value; });
}
}  // namespace cuda_cpu

// For the same types as in CUDA, which do not include `unsigned long` (size_t).
#define CUDA_CPU_EXTREMES(T)                                                                                          \
    inline T atomicMin(T* address, T value) {                                                                         \
        return cuda_cpu::atomic_update(address, [=](T seen) { return std::min(seen, value); });                       \
    }                                                                                                                 \
    inline T atomicMax(T* address, T value) {                                                                         \
        return cuda_cpu::atomic_update(address, [=](T seen) { return std::max(seen, value); });                       \
    }
#define CUDA_CPU_ATOMICS(T)                                                                                           \
    inline T atomicAdd(T* address, T value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }          \
    inline T atomicSub(T* address, T value) { return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED); }          \
    inline T atomicAnd(T* address, T value) { return __atomic_fetch_and(address, value, __ATOMIC_RELAXED); }          \
    inline T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }            \
    inline T atomicXor(T* address, T value) { return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED); }          \
    inline T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }        \
    CUDA_CPU_EXTREMES(T)                                                                                              \
    inline T atomicCAS(T* address, T compare, T value) {                                                              \
        __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);             \
        return compare;                                                                                               \
    }
CUDA_CPU_ATOMICS(int)
CUDA_CPU_ATOMICS(unsigned)
CUDA_CPU_ATOMICS(unsigned long long)
CUDA_CPU_EXTREMES(long long)
#undef CUDA_CPU_ATOMICS
#undef CUDA_CPU_EXTREMES

inline float atomicAdd(float* address, float value) { return cuda_cpu::atomic_sum(address, value); }
inline double atomicAdd(double* address, double value) { return cuda_cpu::atomic_sum(address, value); }
inline float atomicExch(float* address, float value) {
    float before;
    __atomic_exchange(address, &value, &before, __ATOMIC_RELAXED);
    return before;
}

// Increments *address; after the bound it wraps to 0. Returns the old value.
inline unsigned atomicInc(unsigned* address, unsigned bound) {
    return cuda_cpu::atomic_update(address, [=](unsigned seen) { return seen >= bound ? 0 : seen + 1; });
}
// Decrements *address; from 0, or above the bound, it wraps to the bound. Returns the old value.
inline unsigned atomicDec(unsigned* address, unsigned bound) {
    return cuda_cpu::atomic_update(address, [=](unsigned seen) { return seen - 1 < bound ? seen - 1 : bound; });
}

// Atomics of the block, and of the system, are those of the GPU here.
#define CUDA_CPU_SCOPES(name)                                                                                         \
    template <class T, class... V> inline T name##_block(T* address, V... values) { return name(address, values...); } \
    template <class T, class... V> inline T name##_system(T* address, V... values) { return name(address, values...); }
CUDA_CPU_SCOPES(atomicAdd)
CUDA_CPU_SCOPES(atomicSub)
CUDA_CPU_SCOPES(atomicAnd)
CUDA_CPU_SCOPES(atomicOr)
CUDA_CPU_SCOPES(atomicXor)
CUDA_CPU_SCOPES(atomicExch)
CUDA_CPU_SCOPES(atomicMin)
CUDA_CPU_SCOPES(atomicMax)
CUDA_CPU_SCOPES(atomicCAS)
CUDA_CPU_SCOPES(atomicInc)
CUDA_CPU_SCOPES(atomicDec)
#undef CUDA_CPU_SCOPES

// Atomic functions: read-modify-write in one piece, without an order on other accesses, as on the GPU.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

// For what the processor has no instruction: repeats until no other thread wrote between the read and the write. (It
// writes also where nothing changes, so that dev/inspect sees the same accesses for each.) Compares bits, not values.
template <class T, class Change>
inline T atomic_update(T* address, Change change)
{
    T seen, next;
    __atomic_load(address, &seen, __ATOMIC_RELAXED);
    do {
        next = change(seen);
    } while (!__atomic_compare_exchange(address, &seen, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
}

template <class T>
inline T atomic_sum(T* address, T value)
{
    return atomic_update(address, [=](T seen) { return seen + value; });
}
template <class T>
inline T atomic_min(T* address, T value)
{
    return atomic_update(address, [=](T seen) { return seen < value ? seen : value; });
}
template <class T>
inline T atomic_max(T* address, T value)
{
    return atomic_update(address, [=](T seen) { return seen < value ? value : seen; });
}
template <class T>
inline T atomic_compare_and_swap(T* address, T compare, T value)
{
    __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return compare;
}

}  // namespace cuda_cpu

// The types are those of CUDA, which takes no others: `unsigned long`, so size_t, is none of them.
inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* address, unsigned value)
{
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value)
{
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline float atomicAdd(float* address, float value) { return cuda_cpu::atomic_sum(address, value); }
inline double atomicAdd(double* address, double value) { return cuda_cpu::atomic_sum(address, value); }

inline int atomicSub(int* address, int value) { return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicSub(unsigned* address, unsigned value)
{
    return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}

inline int atomicExch(int* address, int value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicExch(unsigned* address, unsigned value)
{
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicExch(unsigned long long* address, unsigned long long value)
{
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline float atomicExch(float* address, float value)
{
    float before;
    __atomic_exchange(address, &value, &before, __ATOMIC_RELAXED);
    return before;
}

inline int atomicMin(int* address, int value) { return cuda_cpu::atomic_min(address, value); }
inline unsigned atomicMin(unsigned* address, unsigned value) { return cuda_cpu::atomic_min(address, value); }
inline long long atomicMin(long long* address, long long value) { return cuda_cpu::atomic_min(address, value); }
inline unsigned long long atomicMin(unsigned long long* address, unsigned long long value)
{
    return cuda_cpu::atomic_min(address, value);
}
inline int atomicMax(int* address, int value) { return cuda_cpu::atomic_max(address, value); }
inline unsigned atomicMax(unsigned* address, unsigned value) { return cuda_cpu::atomic_max(address, value); }
inline long long atomicMax(long long* address, long long value) { return cuda_cpu::atomic_max(address, value); }
inline unsigned long long atomicMax(unsigned long long* address, unsigned long long value)
{
    return cuda_cpu::atomic_max(address, value);
}

// Up to the bound and then from 0 again; and down to 0 and then from the bound.
inline unsigned atomicInc(unsigned* address, unsigned bound)
{
    return cuda_cpu::atomic_update(address, [=](unsigned seen) { return seen >= bound ? 0 : seen + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned bound)
{
    const auto next = [=](unsigned seen) { return seen == 0 || seen > bound ? bound : seen - 1; };
    return cuda_cpu::atomic_update(address, next);
}

inline int atomicCAS(int* address, int compare, int value)
{
    return cuda_cpu::atomic_compare_and_swap(address, compare, value);
}
inline unsigned atomicCAS(unsigned* address, unsigned compare, unsigned value)
{
    return cuda_cpu::atomic_compare_and_swap(address, compare, value);
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long compare, unsigned long long value)
{
    return cuda_cpu::atomic_compare_and_swap(address, compare, value);
}
inline unsigned short atomicCAS(unsigned short* address, unsigned short compare, unsigned short value)
{
    return cuda_cpu::atomic_compare_and_swap(address, compare, value);
}

inline int atomicAnd(int* address, int value) { return __atomic_fetch_and(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicAnd(unsigned* address, unsigned value)
{
    return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAnd(unsigned long long* address, unsigned long long value)
{
    return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
inline int atomicOr(int* address, int value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* address, unsigned value)
{
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicOr(unsigned long long* address, unsigned long long value)
{
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline int atomicXor(int* address, int value) { return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicXor(unsigned* address, unsigned value)
{
    return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicXor(unsigned long long* address, unsigned long long value)
{
    return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}

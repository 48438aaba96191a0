// Asynchronous copies from global to shared memory, as cp.async makes them. (rewrite.py includes this file for
// cuda_pipeline_primitives.h too.)
#pragma once

#include "ptx.h"

// Copies `bytes` bytes (4, 8 or 16), the last `zeros` of which become 0.
CUDA_CPU_INSTRUCTION void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
    cuda_cpu::start_copy("__pipeline_memcpy_async", to, from, static_cast<unsigned>(bytes),
                         static_cast<unsigned>(bytes - zeros), cuda_cpu::watch::call_site());
}
inline void __pipeline_commit() { cuda_cpu::ptx::cp_async_commit(); }
// Blocks until all but the last `pending` commits' copies of this thread are complete.
CUDA_CPU_INSTRUCTION void __pipeline_wait_prior(size_t pending) {
    if (!cuda_cpu::watch::is_removed("__pipeline_wait_prior", cuda_cpu::watch::call_site()))
        cuda_cpu::wait_for_copies(static_cast<unsigned>(pending));
}

namespace cuda_cpu {
// Copies this thread's part of an array, as number `rank` of `threads` threads: with cp.async to shared memory if the
// alignment allows it, and otherwise by loads and stores.
CUDA_CPU_INSTRUCTION void copy_part(unsigned rank, unsigned threads, void* to, const void* from, size_t bytes) {
    const size_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes, fit = all & -all;
    const bool is_asynchronous = fit >= 4 && is_shared(to) && !is_shared(from);
    const size_t width = std::min<size_t>(fit, is_asynchronous ? 16 : 1);
    for (size_t at = rank * width; at < bytes; at += threads * width) {
        char* const target = static_cast<char*>(to) + at;
        const char* const source = static_cast<const char*>(from) + at;
        if (is_asynchronous) __pipeline_memcpy_async(target, source, width);
        else *target = *source;
    }
}
}  // namespace cuda_cpu

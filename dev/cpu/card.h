// The GPUs that can be emulated. With CUDA_CPU_CARD=h100 the emulator reports the properties of an H100 and returns its
// errors, which README.md lists. dev/inspect/cards.py reads the two tables for its estimates.
#pragma once

#include <stddef.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace cuda_cpu {

constexpr size_t kib = 1 << 10, mib = 1 << 20;

// Properties of all GPUs of a compute capability. Sources: CUDA C++ Programming Guide, "Technical Specifications per
// Compute Capability"; shared memory that CUDA reserves per block: tuning guides of Turing, Ampere, Ada, Hopper and
// Blackwell; granularity: occupancy calculator of Nsight Compute.
struct Capability {
    int major, minor;
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t shared_per_multiprocessor, reserved_shared_per_block;
    size_t l1_and_shared;    // bytes of the memory that L1 cache and shared memory divide
    int shared_granularity;  // bytes: a block's shared memory is rounded up to a multiple of this

    size_t shared_per_block() const { return shared_per_multiprocessor - reserved_shared_per_block; }  // with opt-in
    int number() const { return 10 * major + minor; }
};
constexpr Capability turing{7, 5, 1024, 16, 64 * kib, 0, 96 * kib, 256};
constexpr Capability ampere{8, 0, 2048, 32, 164 * kib, kib, 192 * kib, 128};
constexpr Capability ada{8, 9, 1536, 24, 100 * kib, kib, 128 * kib, 128};
constexpr Capability hopper{9, 0, 2048, 32, 228 * kib, kib, 256 * kib, 128};
constexpr Capability blackwell{10, 0, 2048, 32, 228 * kib, kib, 256 * kib, 128};

// Multiprocessors, cache and bus are from NVIDIA's white papers and data sheets. Memory, names and the B200's bus are
// what the runtime reports. (It reports less memory than the data sheet; the difference depends on the driver.)
struct Card {
    const char *key, *name;
    const Capability& capability;
    int multiprocessors;
    size_t l2_bytes, memory_bytes;
    int bus_bits;
    // For dev/inspect's estimates, from data sheets: memory bandwidth in bytes/s; clock in Hz for which FLOP/s hold;
    // dense FP16 or BF16 FLOP/s with FP32 accumulation; FP32 FLOP/s; L2 bytes per clock (A100: white paper; estimates:
    // Hopper as A100, Blackwell twice that, Ada and Turing 64 for every 2 or 4 multiprocessors).
    double bandwidth, clock, tensor_flops, fp32_flops;
    int l2_bytes_per_clock;
};
constexpr Card cards[] = {
    {"h100", "NVIDIA H100 80GB HBM3", hopper, 132, 50 * mib, 81009 * mib, 5120,
     3.35e12, 1.83e9, 989.4e12, 66.9e12, 5120},
    {"h200", "NVIDIA H200", hopper, 132, 60 * mib, 143071 * mib, 6144,
     4.8e12, 1.83e9, 989.4e12, 66.9e12, 5120},
    {"a100", "NVIDIA A100-SXM4-80GB", ampere, 108, 40 * mib, 81050 * mib, 5120,
     2.039e12, 1.41e9, 312e12, 19.5e12, 5120},
    {"4090", "NVIDIA GeForce RTX 4090", ada, 128, 72 * mib, 24217 * mib, 384,
     1.008e12, 2.52e9, 165.2e12, 82.6e12, 2048},
    {"l40s", "NVIDIA L40S", ada, 142, 96 * mib, 45589 * mib, 384,
     864e9, 2.52e9, 362.05e12, 91.6e12, 2048},
    {"t4", "Tesla T4", turing, 40, 4 * mib, 15102 * mib, 256,
     320e9, 1.59e9, 65e12, 8.1e12, 1280},
    {"b200", "NVIDIA B200", blackwell, 148, 129536 * kib, 182630 * mib, 7680,
     7.7e12, 1.85e9, 2.25e15, 75e12, 10240},
};

// 32-bit registers per multiprocessor and per block, for all GPUs of the table.
constexpr int registers_per_block = 64 * 1024;
// Memory of a CUDA context with its kernels and those of cuBLASLt; the actual size depends on the driver.
constexpr size_t context_bytes = 500 * mib;

// Returns the entry of a GPU; ends the program if the table has no such GPU.
inline const Card* find_card(const std::string& key)
{
    const Card* found = std::find_if(std::begin(cards), std::end(cards), [&](const Card& c) { return key == c.key; });
    if (found != std::end(cards)) return found;
    std::string keys;
    for (const Card& c : cards) keys += std::string(keys.empty() ? "" : ", ") + c.key;
    fprintf(stderr, "CUDA_CPU_CARD is \"%s\"; expected one of %s\n", key.c_str(), keys.c_str());
    exit(2);
}

// The GPU that CUDA_CPU_CARD names; tests change it.
inline const Card*& chosen_card()
{
    static const Card* value = [] {
        const char* key = getenv("CUDA_CPU_CARD");
        return key == nullptr || *key == 0 ? nullptr : find_card(key);
    }();
    return value;
}

// Returns the GPU that is emulated, or null: then the device reports the properties of the CPU.
inline const Card* card() { return chosen_card(); }

}  // namespace cuda_cpu

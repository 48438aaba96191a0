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
    int load_store_units;    // lanes per clock of instructions that access memory; from white papers

    size_t shared_per_block() const { return shared_per_multiprocessor - reserved_shared_per_block; }  // with opt-in
    int number() const { return 10 * major + minor; }
};
constexpr Capability turing{7, 5, 1024, 16, 64 * kib, 0, 96 * kib, 256, 16};
constexpr Capability ampere{8, 0, 2048, 32, 164 * kib, kib, 192 * kib, 128, 32};
constexpr Capability ga10x{8, 6, 1536, 16, 100 * kib, kib, 128 * kib, 128, 16};
constexpr Capability ada{8, 9, 1536, 24, 100 * kib, kib, 128 * kib, 128, 16};
constexpr Capability hopper{9, 0, 2048, 32, 228 * kib, kib, 256 * kib, 128, 32};
constexpr Capability blackwell{10, 0, 2048, 32, 228 * kib, kib, 256 * kib, 128, 32};

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
    // Hopper as A100, Blackwell twice that, Ada 64 for every 4 multiprocessors of an RTX 4090, others 64 for every 2).
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
    // The GPUs below were added for published measurements (dev/inspect/validation.md). Memory: data sheet.
    {"h100-pcie", "NVIDIA H100 PCIe", hopper, 114, 50 * mib, 81920 * mib, 5120,
     2.039e12, 1.62e9, 756e12, 51.2e12, 5120},
    {"a6000", "NVIDIA RTX A6000", ga10x, 84, 6 * mib, 49152 * mib, 384,
     768e9, 1.80e9, 154.8e12, 38.7e12, 2688},
    {"3090", "NVIDIA GeForce RTX 3090", ga10x, 82, 6 * mib, 24576 * mib, 384,
     936e9, 1.695e9, 71.2e12, 35.6e12, 2624},
    {"3070", "NVIDIA GeForce RTX 3070", ga10x, 46, 4 * mib, 8192 * mib, 256,
     448e9, 1.725e9, 40.6e12, 20.3e12, 1472},
    {"3070-laptop", "NVIDIA GeForce RTX 3070 Laptop GPU", ga10x, 40, 4 * mib, 8192 * mib, 256,
     448e9, 1.62e9, 33.2e12, 16.6e12, 1280},
    {"3050-laptop", "NVIDIA GeForce RTX 3050 Laptop GPU", ga10x, 16, 1536 * kib, 4096 * mib, 128,
     192e9, 1.5e9, 12.3e12, 6.14e12, 512},
    {"a4000", "NVIDIA RTX A4000", ga10x, 48, 4 * mib, 16384 * mib, 256,
     448e9, 1.56e9, 76.7e12, 19.2e12, 1536},
    {"2080ti", "NVIDIA GeForce RTX 2080 Ti", turing, 68, 5632 * kib, 11264 * mib, 352,
     616e9, 1.545e9, 53.8e12, 13.4e12, 2176},
    {"2070s", "NVIDIA GeForce RTX 2070 SUPER", turing, 40, 4 * mib, 8192 * mib, 256,
     448e9, 1.77e9, 36.25e12, 9.06e12, 1280},
};

// 32-bit registers per multiprocessor and per block, for all GPUs of the table.
constexpr int registers_per_block = 64 * 1024;
// Memory of a CUDA context with its kernels and those of cuBLASLt; the actual size depends on the driver.
constexpr size_t context_bytes = 500 * mib;

// Returns the entry of a GPU; ends the program if the table has no such GPU.
inline const Card* find_card(const std::string& key) {
    const Card* found = std::find_if(std::begin(cards), std::end(cards), [&](const Card& c) { return key == c.key; });
    if (found != std::end(cards)) return found;
    std::string keys;
    for (const Card& c : cards) keys += std::string(keys.empty() ? "" : ", ") + c.key;
    fprintf(stderr, "CUDA_CPU_CARD is \"%s\"; expected one of %s\n", key.c_str(), keys.c_str());
    exit(2);
}

// The GPU that CUDA_CPU_CARD names; tests change it.
inline const Card*& chosen_card() {
    static const Card* value = [] {
        const char* key = getenv("CUDA_CPU_CARD");
        return key == nullptr || *key == 0 ? nullptr : find_card(key);
    }();
    return value;
}

// Returns the GPU that is emulated, or null: then the device reports the properties of the CPU.
inline const Card* card() { return chosen_card(); }
}  // namespace cuda_cpu

// What a program may ask about a kernel, or wish for it, before it launches it.
#pragma once

#include "cuda_runtime.h"

enum cudaFuncCache {
    cudaFuncCachePreferNone = 0,
    cudaFuncCachePreferShared = 1,
    cudaFuncCachePreferL1 = 2,
    cudaFuncCachePreferEqual = 3,
};
enum cudaSharedCarveout {
    cudaSharedmemCarveoutDefault = -1,
    cudaSharedmemCarveoutMaxL1 = 0,
    cudaSharedmemCarveoutMaxShared = 100,
};
template <class Kernel>
inline cudaError_t cudaFuncSetCacheConfig(Kernel*, cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }

// Banks are of 4 bytes on every card since Maxwell.
enum cudaSharedMemConfig {
    cudaSharedMemBankSizeDefault = 0,
    cudaSharedMemBankSizeFourByte = 1,
    cudaSharedMemBankSizeEightByte = 2,
};
inline cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* config)
{
    *config = cudaSharedMemBankSizeFourByte;
    return cudaSuccess;
}

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs;  // 0 registers: not known
    int maxDynamicSharedSizeBytes;
};
template <class... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...))
{
    const void* const address = reinterpret_cast<const void*>(kernel);
    *attributes = {};
    attributes->sharedSizeBytes = cuda_cpu::StaticShared::of_program().bytes_of(address);
    attributes->maxThreadsPerBlock = static_cast<int>(cuda_cpu::most_threads(address));
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(cuda_cpu::default_shared_bytes);
    return cudaSuccess;
}

// As many blocks as threads, shared memory and the number of blocks allow; registers are not counted. Without a card, a
// multiprocessor is a core with the most threads that a block may have.
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Parameters...),
                                                                 int threads, size_t dynamic_bytes)
{
    cudaDeviceProp device;
    if (const cudaError_t error = cudaGetDeviceProperties(&device, 0); error != cudaSuccess) return error;
    if (threads < 1 || threads > device.maxThreadsPerBlock) return cuda_cpu::report(cudaErrorInvalidValue);
    const void* const address = reinterpret_cast<const void*>(kernel);
    const size_t shared = dynamic_bytes + device.reservedSharedMemPerBlock +
                          cuda_cpu::StaticShared::of_program().bytes_of(address);
    const int whole_warps = (threads + warpSize - 1) / warpSize * warpSize;
    *blocks = device.maxThreadsPerMultiProcessor / whole_warps;
    if (shared > 0) *blocks = std::min(*blocks, static_cast<int>(device.sharedMemPerMultiprocessor / shared));
    if (device.maxBlocksPerMultiProcessor > 0) *blocks = std::min(*blocks, device.maxBlocksPerMultiProcessor);
    return cudaSuccess;
}

// The block size with which most threads are there at a time, the largest of those that are equal, and how many such
// blocks fill the device.
template <class... Parameters>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, void (*kernel)(Parameters...),
                                                      size_t dynamic_bytes = 0, int limit = 0)
{
    cudaDeviceProp device;
    if (const cudaError_t error = cudaGetDeviceProperties(&device, 0); error != cudaSuccess) return error;
    int most = static_cast<int>(cuda_cpu::most_threads(reinterpret_cast<const void*>(kernel)));
    if (limit > 0) most = std::min(most, limit);
    *grid = *block = 0;
    int resident = 0;
    for (int threads = most / warpSize * warpSize; threads > 0; threads -= warpSize) {
        int blocks = 0;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, dynamic_bytes);
        if (blocks * threads <= resident) continue;
        resident = blocks * threads;
        *block = threads;
        *grid = blocks * device.multiProcessorCount;
    }
    return *block > 0 ? cudaSuccess : cuda_cpu::report(cudaErrorInvalidValue);
}

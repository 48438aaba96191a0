// Memory that has a name (__device__ and __constant__ variables), that host and device share, that is ordered by a
// stream, or that has rows. Here they are all the process's own memory.
#pragma once

#include "cuda_runtime.h"

// ---- variables. A kernel reads them where they are, so a copy has to wait for its turn only.

template <class T>
inline cudaError_t cudaGetSymbolAddress(void** address, const T& symbol)
{
    *address = const_cast<void*>(static_cast<const void*>(&symbol));
    return cudaSuccess;
}
template <class T>
inline cudaError_t cudaGetSymbolSize(size_t* bytes, const T&)
{
    *bytes = sizeof(T);
    return cudaSuccess;
}

namespace cuda_cpu {

// A copy between a variable and the program's memory, in the order of the stream, and done when this returns.
template <class T>
inline cudaError_t copy_symbol(const T& symbol, size_t offset, size_t bytes, const void* from, void* to,
                               cudaStream_t stream)
{
    if (offset > sizeof(T) || bytes > sizeof(T) - offset) return report(cudaErrorInvalidValue);
    void* const place = const_cast<char*>(reinterpret_cast<const char*>(&symbol)) + offset;
    if (from != nullptr) to = place;
    else from = place;
    if (in_capture(stream)) return note(stream, [=] { return copy_bytes(to, from, bytes); });
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    if (!asynchronous()) return copy_bytes(to, from, bytes);
    return run_until_reached(put_off(stream, [=] { return copy_bytes(to, from, bytes); }));
}

}  // namespace cuda_cpu

template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t bytes, size_t offset,
                                           cudaMemcpyKind, cudaStream_t stream = nullptr)
{
    return cuda_cpu::copy_symbol(symbol, offset, bytes, from, nullptr, stream);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, size_t bytes, size_t offset, cudaMemcpyKind,
                                             cudaStream_t stream = nullptr)
{
    return cuda_cpu::copy_symbol(symbol, offset, bytes, nullptr, to, stream);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyHostToDevice)
{
    return cudaMemcpyToSymbolAsync(symbol, from, bytes, offset, kind);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                        cudaMemcpyKind kind = cudaMemcpyDeviceToHost)
{
    return cudaMemcpyFromSymbolAsync(to, symbol, bytes, offset, kind);
}

// ---- managed memory: where it is, and advice about that, changes nothing

constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2;
constexpr int cudaCpuDeviceId = -1;
enum cudaMemoryAdvise {
    cudaMemAdviseSetReadMostly = 1,
    cudaMemAdviseUnsetReadMostly = 2,
    cudaMemAdviseSetPreferredLocation = 3,
    cudaMemAdviseUnsetPreferredLocation = 4,
    cudaMemAdviseSetAccessedBy = 5,
    cudaMemAdviseUnsetAccessedBy = 6,
};
template <class T>
inline cudaError_t cudaMallocManaged(T** address, size_t bytes, unsigned = cudaMemAttachGlobal)
{
    return cudaMalloc(address, bytes);
}
inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }

// ---- ordered by a stream: freed no earlier than cudaFree would

template <class T>
inline cudaError_t cudaMallocAsync(T** address, size_t bytes, cudaStream_t)
{
    return cudaMalloc(address, bytes);
}
inline cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

// ---- rows

template <class T>
inline cudaError_t cudaMallocPitch(T** address, size_t* pitch, size_t width, size_t height)
{
    constexpr size_t alignment = 512;
    *pitch = (width + alignment - 1) / alignment * alignment;
    return cudaMalloc(address, *pitch * height);
}
inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                size_t height, cudaMemcpyKind kind)
{
    if (width > to_pitch || width > from_pitch) return cuda_cpu::report(cudaErrorInvalidValue);
    for (size_t row = 0; row < height; row++) {
        const cudaError_t error = cudaMemcpy(static_cast<char*>(to) + row * to_pitch,
                                             static_cast<const char*>(from) + row * from_pitch, width, kind);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
inline cudaError_t cudaMemset2D(void* to, size_t pitch, int byte, size_t width, size_t height)
{
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && error == cudaSuccess; row++)
        error = cudaMemset(static_cast<char*>(to) + row * pitch, byte, width);
    return error;
}

// ---- pinned memory under the device's address, which is the same

inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned)
{
    *device = host;
    return cudaSuccess;
}
template <class T>
inline cudaError_t cudaHostGetDevicePointer(T** device, void* host, unsigned flags)
{
    return cudaHostGetDevicePointer(reinterpret_cast<void**>(device), host, flags);
}

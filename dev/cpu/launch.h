// kernel<<<grid, block, shared, stream>>>(arguments), as dev/cpu/rewrite.py spells it in C++:
//
//     cuda_cpu::launch(kernel, cuda_cpu::Configuration(grid, block, shared, stream))(arguments);
//
// The arguments become the kernel's parameters as in any call. An error is for cudaGetLastError, as it is in CUDA.
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {

struct Configuration : cudaLaunchConfig_t {
    Configuration(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr)
        : cudaLaunchConfig_t{grid, block, shared_bytes, stream, nullptr, 0}
    {
    }
};

template <class... Parameters>
struct ConfiguredKernel {
    void (*kernel)(Parameters...);
    Configuration configuration;
    void operator()(Parameters... arguments) const
    {
        cudaLaunchKernelEx(&configuration, kernel, std::move(arguments)...);
    }
};

template <class... Parameters>
inline ConfiguredKernel<Parameters...> launch(void (*kernel)(Parameters...), const Configuration& configuration)
{
    return {kernel, configuration};
}

}  // namespace cuda_cpu

namespace cuda_cpu {
template <class... Parameters, size_t... i>
inline cudaError_t launch_from(void (*kernel)(Parameters...), const Configuration& configuration, void** arguments,
                               std::index_sequence<i...>)
{
    return cudaLaunchKernelEx(&configuration, kernel, *static_cast<Parameters*>(arguments[i])...);
}
}  // namespace cuda_cpu

// A launch with the places of its arguments, as many as the kernel has parameters.
template <class... Parameters>
inline cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t stream)
{
    return cuda_cpu::launch_from(kernel, {grid, block, shared_bytes, stream}, arguments,
                                 std::index_sequence_for<Parameters...>());
}

// ---- functions of the host, in a stream's order

#define CUDART_CB
using cudaHostFn_t = void (*)(void*);
using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);

namespace cuda_cpu {
inline cudaError_t call_in_order(cudaStream_t stream, Deed deed)
{
    return waits(stream) ? hand_over(stream, std::move(deed)) : deed();
}
}  // namespace cuda_cpu

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data)
{
    return cuda_cpu::call_in_order(stream, [=] { return function(data), cudaSuccess; });
}
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned)
{
    if (const cudaError_t error = cuda_cpu::refuse_captured(stream); error != cudaSuccess) return error;
    return cuda_cpu::call_in_order(stream, [=] { return callback(stream, cudaSuccess, data), cudaSuccess; });
}

// kernel<<<grid, block, shared, stream>>>(arguments), as dev/inspect/rewrite.py spells it in C++:
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

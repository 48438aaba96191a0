// rewrite.py translates kernel<<<grid, block, shared, stream>>>(arguments) to:
//
//     cuda_cpu::launch(kernel, cuda_cpu::Configuration(grid, block, shared, stream))(arguments);
#pragma once

#include "cuda_runtime.h"

namespace cuda_cpu {
struct Configuration : cudaLaunchConfig_t {
    Configuration(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr)
        : cudaLaunchConfig_t{grid, block, shared_bytes, stream, nullptr, 0} {}
};

// A parameter's type as in the type of its function, which has no qualifiers: g++ keeps __restrict__ in decltype(x).
template <class T> struct Unqualified { using type = T; };
template <class T> struct Unqualified<T* __restrict__> { using type = T*; };
template <class T> using ParameterType = typename Unqualified<std::remove_cv_t<T>>::type;

// Returns a function that launches the kernel. Its arguments are converted to the kernel's parameters as in any call.
// cudaGetLastError returns a launch's error, as in CUDA.
template <class... Parameters> inline auto launch(void (*kernel)(Parameters...), const Configuration& configuration) {
    return [=](Parameters... arguments) {
        cudaLaunchKernelEx(&configuration, kernel, std::forward<Parameters>(arguments)...);
    };
}
}  // namespace cuda_cpu

// What a puzzle may use besides CUDA C++.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef __NVCC_DIAG_PRAGMA_SUPPORT__
#pragma nv_diag_suppress 177   // names that only the solution uses
#endif

#ifndef WARP_SIZE
constexpr int WARP_SIZE = 32;
#endif
constexpr unsigned FULL_WARP = 0xffffffff;   // the mask of all lanes
using bf16 = __nv_bfloat16;

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

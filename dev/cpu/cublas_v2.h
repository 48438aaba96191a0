// cuBLAS on a CPU: matrix products, computed by cublasLt.h. Matrices are column-major; alpha and beta are in host
// memory. Unsupported products, such as half-precision sums, return CUBLAS_STATUS_NOT_SUPPORTED.
#pragma once

#include "cublasLt.h"

struct cublasContext { cudaStream_t stream = nullptr; };
using cublasHandle_t = cublasContext*;

enum cublasMath_t { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return cuda_cpu::create(handle); }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return cuda_cpu::destroy(handle); }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}
// FP32 products are computed in FP32 in every mode.
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

namespace cuda_cpu {
// A matrix operand, or a batch of matrices.
struct Matrix {
    const void* data;
    cudaDataType_t type;
    int ld;
    long long stride;  // elements between the matrices of a batch

    cublasLtMatrixLayoutOpaque_t layout(int rows, int columns) const {
        return {static_cast<uint32_t>(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), ld};
    }
    void* member(int i) const {
        return static_cast<char*>(const_cast<void*>(data)) + i * stride * static_cast<long long>(bytes_of(type));
    }
};

// Computes C = alpha op(A) op(B) + beta C for every matrix of a batch.
inline cublasStatus_t gemm(cublasHandle_t handle, cublasOperation_t operation_a, cublasOperation_t operation_b, int m,
                           int n, int k, float alpha, const Matrix& a, const Matrix& b, float beta, const Matrix& c,
                           int batch) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || batch < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
    const bool ta = operation_a != CUBLAS_OP_N, tb = operation_b != CUBLAS_OP_N;
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F, operation_a, operation_b};
    auto layout_a = a.layout(ta ? k : m, ta ? m : k), layout_b = b.layout(tb ? n : k, tb ? k : n);
    auto layout_c = c.layout(m, n);
    cublasLtContext lt;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < batch && status == CUBLAS_STATUS_SUCCESS; i++)
        status = cublasLtMatmul(&lt, &desc, &alpha, a.member(i), &layout_a, b.member(i), &layout_b, &beta, c.member(i),
                                &layout_c, c.member(i), &layout_c, nullptr, nullptr, 0, handle->stream);
    return status;
}
}  // namespace cuda_cpu

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t operation_a, cublasOperation_t operation_b,
                                  int m, int n, int k, const float* alpha, const float* A, int lda, const float* B,
                                  int ldb, const float* beta, float* C, int ldc) {
    return cuda_cpu::gemm(handle, operation_a, operation_b, m, n, k, *alpha, {A, CUDA_R_32F, lda, 0},
                          {B, CUDA_R_32F, ldb, 0}, *beta, {C, CUDA_R_32F, ldc, 0}, 1);
}

inline cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t operation_a,
                                                cublasOperation_t operation_b, int m, int n, int k, const float* alpha,
                                                const float* A, int lda, long long stride_a, const float* B, int ldb,
                                                long long stride_b, const float* beta, float* C, int ldc,
                                                long long stride_c, int batch) {
    return cuda_cpu::gemm(handle, operation_a, operation_b, m, n, k, *alpha, {A, CUDA_R_32F, lda, stride_a},
                          {B, CUDA_R_32F, ldb, stride_b}, *beta, {C, CUDA_R_32F, ldc, stride_c}, batch);
}

inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t operation_a,
                                                 cublasOperation_t operation_b, int m, int n, int k, const void* alpha,
                                                 const void* A, cudaDataType_t type_a, int lda, long long stride_a,
                                                 const void* B, cudaDataType_t type_b, int ldb, long long stride_b,
                                                 const void* beta, void* C, cudaDataType_t type_c, int ldc,
                                                 long long stride_c, int batch, cublasComputeType_t compute,
                                                 cublasGemmAlgo_t) {
    if (compute == CUBLAS_COMPUTE_16F) return CUBLAS_STATUS_NOT_SUPPORTED;  // alpha and beta would be half precision
    return cuda_cpu::gemm(handle, operation_a, operation_b, m, n, k, *static_cast<const float*>(alpha),
                          {A, type_a, lda, stride_a}, {B, type_b, ldb, stride_b}, *static_cast<const float*>(beta),
                          {C, type_c, ldc, stride_c}, batch);
}

inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t operation_a, cublasOperation_t operation_b,
                                   int m, int n, int k, const void* alpha, const void* A, cudaDataType_t type_a,
                                   int lda, const void* B, cudaDataType_t type_b, int ldb, const void* beta, void* C,
                                   cudaDataType_t type_c, int ldc, cublasComputeType_t compute,
                                   cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx(handle, operation_a, operation_b, m, n, k, alpha, A, type_a, lda, 0, B, type_b,
                                      ldb, 0, beta, C, type_c, ldc, 0, 1, compute, algorithm);
}

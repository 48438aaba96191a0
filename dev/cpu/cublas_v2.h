// cuBLAS on a CPU: its most used functions. Matrix products of float and shorter types are cuBLASLt's (link
// cublasLt.cpp); the others are plain loops. All matrices are column-major. Work runs in the handle's stream.
#pragma once

#define CUBLAS_API_H_  // as CUDA's header defines it: cuda-samples' helper_cuda.h asks for it

#include "cublasLt.h"

enum cublasMath_t {
    CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_PEDANTIC_MATH, CUBLAS_TF32_TENSOR_OP_MATH,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};
enum cublasGemmAlgo_t : int { CUBLAS_GEMM_DFALT = -1, CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };

struct cublasContext { cudaStream_t stream = nullptr; };
using cublasHandle_t = cublasContext*;

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return cuda_cpu::create(handle); }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return cuda_cpu::destroy(handle); }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    if (handle != nullptr) handle->stream = stream;
    return handle != nullptr ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
// Sums are always float.
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

namespace cuda_cpu {
// Copies between host and device: `size` bytes an element, distances in elements.
template <cudaMemcpyKind KIND>
cublasStatus_t copy_matrix(int rows, int columns, int size, const void* from, int from_ld, void* to, int to_ld) {
    const auto bytes = static_cast<size_t>(size);
    const auto error = cudaMemcpy2D(to, to_ld * bytes, from, from_ld * bytes, rows * bytes, columns, KIND);
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_MAPPING_ERROR;
}
template <cudaMemcpyKind KIND>
cublasStatus_t copy_vector(int n, int size, const void* from, int from_step, void* to, int to_step) {
    return copy_matrix<KIND>(1, n, size, from, from_step, to, to_step);
}

// ---- operands

// Element (i, j) of a matrix or of its transposed matrix, or element i of a vector.
template <class T> struct Elements {
    T* data;
    int64_t row_step, column_step;
    T& operator()(int64_t i, int64_t j = 0) const { return data[i * row_step + j * column_step]; }
};
template <class T> Elements<T> matrix(T* data, int ld, cublasOperation_t operation = CUBLAS_OP_N) {
    return operation == CUBLAS_OP_N ? Elements<T>{data, 1, ld} : Elements<T>{data, ld, 1};
}
// With a negative step the first element is the last one in memory.
template <class T> Elements<T> vector(T* data, int n, int step) {
    return {step < 0 ? data + int64_t{1 - n} * step : data, step, 0};
}

// ---- work in the handle's stream

// Calls f(i, j) for each element of a matrix.
template <class F> inline cublasStatus_t for_each(cublasHandle_t handle, int m, int n, F f) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    const auto operation = [=] {
        const DeviceWork on_device;
#pragma omp parallel for
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < m; i++) f(i, j);
        return cudaSuccess;
    };
    return submit(handle->stream, operation) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
// c (m, n) = alpha a (m, k) b (k, n) + beta c. c may be NaN if beta is 0.
template <class T>
cublasStatus_t plain_product(cublasHandle_t handle, int m, int n, int k, const T* alpha_, Elements<const T> a,
                             Elements<const T> b, const T* beta_, Elements<T> c) {
    return for_each(handle, m, n, [=, alpha = *alpha_, beta = *beta_](int64_t i, int64_t j) {
        double sum = 0;
        for (int64_t e = 0; e < k; e++) sum += double{a(i, e)} * b(e, j);
        c(i, j) = static_cast<T>(alpha * sum) + (beta == 0 ? T{} : beta * c(i, j));
    });
}

// ---- matrix products

struct ComputeType {   // older programs pass a data type
    cublasComputeType_t value;
    ComputeType(cublasComputeType_t type) : value(type) {}
    ComputeType(cudaDataType_t type)
        : value(type == CUDA_R_16F   ? CUBLAS_COMPUTE_16F
                : type == CUDA_R_64F ? CUBLAS_COMPUTE_64F
                                     : CUBLAS_COMPUTE_32F) {}
};
struct Operand {
    cublasOperation_t operation;
    const void* data;
    cudaDataType_t type;
    int ld;
};
// C (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C
struct Gemm {
    int m, n, k;
    const void* alpha;
    Operand a, b;
    const void* beta;
    Operand c;
    ComputeType compute;
};

inline cublasStatus_t double_product(cublasHandle_t handle, const Gemm& g) {
    if (g.a.type != CUDA_R_64F || g.b.type != CUDA_R_64F || g.c.type != CUDA_R_64F) return CUBLAS_STATUS_NOT_SUPPORTED;
    const auto input = [](const Operand& x) { return matrix(static_cast<const double*>(x.data), x.ld, x.operation); };
    return plain_product(handle, g.m, g.n, g.k, static_cast<const double*>(g.alpha), input(g.a), input(g.b),
                         static_cast<const double*>(g.beta),
                         matrix(static_cast<double*>(const_cast<void*>(g.c.data)), g.c.ld));
}

inline cublasStatus_t product(cublasHandle_t handle, const Gemm& g) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    const auto layout = [](const Operand& x, int m, int n) {
        if (x.operation != CUBLAS_OP_N) std::swap(m, n);
        return cublasLtMatrixLayoutOpaque_t{x.type, static_cast<uint64_t>(m), static_cast<uint64_t>(n), x.ld};
    };
    auto a = layout(g.a, g.m, g.k), b = layout(g.b, g.k, g.n), c = layout(g.c, g.m, g.n);
    const auto is_short = [](const auto& x) { return x.ld < std::max<int64_t>(1, static_cast<int64_t>(x.rows)); };
    if (g.m < 0 || g.n < 0 || g.k < 0 || is_short(a) || is_short(b) || is_short(c)) return CUBLAS_STATUS_INVALID_VALUE;
    if (g.m == 0 || g.n == 0) return CUBLAS_STATUS_SUCCESS;
    if (g.compute.value == CUBLAS_COMPUTE_64F) return double_product(handle, g);
    const auto number = [=](const void* value) {
        return g.compute.value == CUBLAS_COMPUTE_16F ? static_cast<float>(*static_cast<const __half*>(value))
                                                     : *static_cast<const float*>(value);
    };
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F, g.a.operation, g.b.operation};
    const float alpha = number(g.alpha), beta = number(g.beta);
    cublasLtContext lt;
    return cublasLtMatmul(&lt, &desc, &alpha, g.a.data, &a, g.b.data, &b, &beta, g.c.data, &c,
                          const_cast<void*>(g.c.data), &c, nullptr, nullptr, 0, handle->stream);
}

// `count` products whose operands are `steps` elements apart.
inline cublasStatus_t products(cublasHandle_t handle, Gemm g, const int64_t (&steps)[3], int count) {
    const auto advance = [](Operand& x, int64_t step) {
        x.data = static_cast<const char*>(x.data) + step * static_cast<int64_t>(bytes_of(x.type));
    };
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = product(handle, g);
        advance(g.a, steps[0]);
        advance(g.b, steps[1]);
        advance(g.c, steps[2]);
    }
    return status;
}
}  // namespace cuda_cpu

inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                                                 int m, int n, int k, const void* alpha, const void* A,
                                                 cudaDataType_t type_a, int lda, long long step_a, const void* B,
                                                 cudaDataType_t type_b, int ldb, long long step_b, const void* beta,
                                                 void* C, cudaDataType_t type_c, int ldc, long long step_c, int count,
                                                 cuda_cpu::ComputeType compute, cublasGemmAlgo_t) {
    return cuda_cpu::products(handle, {m, n, k, alpha, {ta, A, type_a, lda}, {tb, B, type_b, ldb}, beta,
                                       {CUBLAS_OP_N, C, type_c, ldc}, compute}, {step_a, step_b, step_c}, count);
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                   int k, const void* alpha, const void* A, cudaDataType_t type_a, int lda,
                                   const void* B, cudaDataType_t type_b, int ldb, const void* beta, void* C,
                                   cudaDataType_t type_c, int ldc, cuda_cpu::ComputeType compute,
                                   cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, A, type_a, lda, 0, B, type_b, ldb, 0, beta, C,
                                      type_c, ldc, 0, 1, compute, algorithm);
}

// ---- functions for float, double and, in products, half precision

namespace cuda_cpu {
template <class T>
constexpr cudaDataType_t data_type = sizeof(T) == 8 ? CUDA_R_64F : sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_16F;
template <class T>
cublasStatus_t gemm_batches(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const T* alpha, const T* A, int lda, long long step_a, const T* B, int ldb,
                            long long step_b, const T* beta, T* C, int ldc, long long step_c, int count) {
    constexpr cudaDataType_t type = data_type<T>;
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, A, type, lda, step_a, B, type, ldb, step_b, beta,
                                      C, type, ldc, step_c, count, type, CUBLAS_GEMM_DEFAULT);
}
template <class T>
cublasStatus_t gemm(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                    const T* alpha, const T* A, int lda, const T* B, int ldb, const T* beta, T* C, int ldc) {
    return gemm_batches(handle, ta, tb, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);
}
template <class T>
cublasStatus_t geam(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, const T* alpha_,
                    const T* A, int lda, const T* beta_, const T* B, int ldb, T* C, int ldc) {
    return for_each(handle, m, n, [alpha = *alpha_, beta = *beta_, a = matrix(A, lda, ta),
                                   b = matrix(B, ldb, tb), c = matrix(C, ldc)](int64_t i, int64_t j) {
        c(i, j) = (alpha == 0 ? T{} : alpha * a(i, j)) + (beta == 0 ? T{} : beta * b(i, j));
    });
}
template <class T>
cublasStatus_t gemv(cublasHandle_t handle, cublasOperation_t ta, int m, int n, const T* alpha, const T* A, int lda,
                    const T* x, int dx, const T* beta, T* y, int dy) {
    if (ta != CUBLAS_OP_N) std::swap(m, n);
    return plain_product(handle, m, 1, n, alpha, matrix(A, lda, ta), vector(x, n, dx), beta, vector(y, m, dy));
}
template <class T>
cublasStatus_t axpy(cublasHandle_t handle, int n, const T* alpha_, const T* x, int dx, T* y, int dy) {
    return for_each(handle, n, 1, [alpha = *alpha_, v = vector(x, n, dx),
                                   w = vector(y, n, dy)](int64_t i, int64_t) { w(i) += alpha * v(i); });
}
template <class T> cublasStatus_t scal(cublasHandle_t handle, int n, const T* alpha_, T* x, int dx) {
    return for_each(handle, n, 1, [alpha = *alpha_, v = vector(x, n, dx)](int64_t i, int64_t) {
        v(i) *= alpha;
    });
}
}  // namespace cuda_cpu

inline constexpr auto& cublasSetMatrix = cuda_cpu::copy_matrix<cudaMemcpyHostToDevice>;
inline constexpr auto& cublasGetMatrix = cuda_cpu::copy_matrix<cudaMemcpyDeviceToHost>;
inline constexpr auto& cublasSetVector = cuda_cpu::copy_vector<cudaMemcpyHostToDevice>;
inline constexpr auto& cublasGetVector = cuda_cpu::copy_vector<cudaMemcpyDeviceToHost>;
#define CUDA_CPU_BLAS(name, function)                                 \
    inline constexpr auto& cublasS##name = cuda_cpu::function<float>; \
    inline constexpr auto& cublasD##name = cuda_cpu::function<double>;
CUDA_CPU_BLAS(axpy, axpy)
CUDA_CPU_BLAS(scal, scal)
CUDA_CPU_BLAS(gemv, gemv)
CUDA_CPU_BLAS(gemm, gemm)
CUDA_CPU_BLAS(gemmStridedBatched, gemm_batches)
CUDA_CPU_BLAS(geam, geam)
inline constexpr auto& cublasHgemm = cuda_cpu::gemm<__half>;
inline constexpr auto& cublasHgemmStridedBatched = cuda_cpu::gemm_batches<__half>;

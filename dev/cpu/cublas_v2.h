// cuBLAS on a CPU: its most used functions. Matrix products of float and shorter types are cuBLASLt's (link
// cublasLt.cpp); the others are plain loops. All matrices are column-major. Work runs in the handle's stream.
#pragma once

#define CUBLAS_API_H_  // as CUDA's header defines it: cuda-samples' helper_cuda.h asks for it

#include "cublasLt.h"

enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE };
enum cublasMath_t {
    CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_PEDANTIC_MATH, CUBLAS_TF32_TENSOR_OP_MATH,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};
enum cublasGemmAlgo_t : int { CUBLAS_GEMM_DFALT = -1, CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };

struct cublasContext {
    cudaStream_t stream = nullptr;
    cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;  // has no effect: sums are float
};
using cublasHandle_t = cublasContext*;

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return cuda_cpu::create(handle); }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return cuda_cpu::destroy(handle); }
inline cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
    *version = static_cast<int>(cublasLtGetVersion());
    return CUBLAS_STATUS_SUCCESS;
}

namespace cuda_cpu {
template <class T> inline cublasStatus_t set(cublasHandle_t handle, T cublasContext::*member, T value) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->*member = value;
    return CUBLAS_STATUS_SUCCESS;
}
template <class T> inline cublasStatus_t get(cublasHandle_t handle, T cublasContext::*member, T* value) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    *value = handle->*member;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t status_of(cudaError_t error) {
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_MAPPING_ERROR;
}
}  // namespace cuda_cpu

inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    return cuda_cpu::set(handle, &cublasContext::stream, stream);
}
inline cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
    return cuda_cpu::get(handle, &cublasContext::stream, stream);
}
inline cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
    return cuda_cpu::set(handle, &cublasContext::pointer_mode, mode);
}
inline cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t* mode) {
    return cuda_cpu::get(handle, &cublasContext::pointer_mode, mode);
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    return cuda_cpu::set(handle, &cublasContext::math, mode);
}
inline cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
    return cuda_cpu::get(handle, &cublasContext::math, mode);
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }

// ---- copies between host and device: `size` bytes an element, distances in elements

inline cublasStatus_t cublasSetMatrix(int rows, int columns, int size, const void* from, int from_ld, void* to,
                                      int to_ld) {
    const auto bytes = static_cast<size_t>(size);
    return cuda_cpu::status_of(cudaMemcpy2D(to, to_ld * bytes, from, from_ld * bytes, rows * bytes, columns,
                                            cudaMemcpyHostToDevice));
}
inline cublasStatus_t cublasGetMatrix(int rows, int columns, int size, const void* from, int from_ld, void* to,
                                      int to_ld) {
    const auto bytes = static_cast<size_t>(size);
    return cuda_cpu::status_of(cudaMemcpy2D(to, to_ld * bytes, from, from_ld * bytes, rows * bytes, columns,
                                            cudaMemcpyDeviceToHost));
}
inline cublasStatus_t cublasSetVector(int n, int size, const void* from, int from_step, void* to, int to_step) {
    return cublasSetMatrix(1, n, size, from, from_step, to, to_step);
}
inline cublasStatus_t cublasGetVector(int n, int size, const void* from, int from_step, void* to, int to_step) {
    return cublasGetMatrix(1, n, size, from, from_step, to, to_step);
}

namespace cuda_cpu {

// ---- operands

// Element i of a vector. With a negative step the first element is the last one in memory.
template <class T> struct Vector {
    T* data;
    int64_t step;
    Vector(T* x, int n, int step_) : data(step_ < 0 ? x + int64_t{1 - n} * step_ : x), step(step_) {}
    T& operator[](int64_t i) const { return data[i * step]; }
};

// Element (i, j) of a matrix, or of its transposed matrix.
template <class T> struct Matrix {
    T* data;
    int64_t ld;
    bool transposed = false;
    T& operator()(int64_t i, int64_t j) const { return transposed ? data[i * ld + j] : data[j * ld + i]; }
};
template <class T> Matrix(T*, int, bool) -> Matrix<T>;
template <class T> Matrix(T*, int) -> Matrix<T>;

// Returns a value in device memory, and alpha or beta, which may be in host memory.
template <class T> inline T fetched(cublasHandle_t handle, const T* place) {
    T value;
    cudaMemcpyAsync(&value, place, sizeof(T), cudaMemcpyDeviceToHost, handle->stream);
    cudaStreamSynchronize(handle->stream);
    return value;
}
template <class T> inline T scalar(cublasHandle_t handle, const T* place) {
    if (handle == nullptr) return {};   // the call returns an error
    return handle->pointer_mode == CUBLAS_POINTER_MODE_HOST ? *place : fetched(handle, place);
}

// ---- work in the handle's stream

template <class Work> inline cublasStatus_t run(cublasHandle_t handle, Work work) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    const auto operation = [work] {
        const DeviceWork on_device;
        work();
        return cudaSuccess;
    };
    const cudaError_t error = is_deferred(handle->stream) ? submit(handle->stream, operation) : operation();
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
// Calls f(i) for each element of a vector, or f(i, j) for each of a matrix.
template <class F> inline cublasStatus_t for_each(cublasHandle_t handle, int n, F f) {
    return run(handle, [=] {
        for (int64_t i = 0; i < n; i++) f(i);
    });
}
template <class F> inline cublasStatus_t for_each(cublasHandle_t handle, int m, int n, F f) {
    return run(handle, [=] {
#pragma omp parallel for
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < m; i++) f(i, j);
    });
}
// Sets *result, in host or device memory, to f().
template <class T, class F> inline cublasStatus_t evaluate(cublasHandle_t handle, T* result, F f) {
    const cublasStatus_t status = run(handle, [=] { *result = static_cast<T>(f()); });
    if (status != CUBLAS_STATUS_SUCCESS || handle->pointer_mode == CUBLAS_POINTER_MODE_DEVICE) return status;
    return status_of(cudaStreamSynchronize(handle->stream));
}
// Returns the sum of f(k) for k < n.
template <class F> inline double sum(int64_t n, F f) {
    double total = 0;
    for (int64_t k = 0; k < n; k++) total += f(k);
    return total;
}
// Returns alpha x + beta y. y may be NaN if beta is 0.
template <class T> inline T combined(T alpha, double x, T beta, T y) {
    return static_cast<T>(alpha * x) + (beta == 0 ? T{} : beta * y);
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
    const auto number = [=](const void* value) { return scalar(handle, static_cast<const double*>(value)); };
    const auto matrix = [](const Operand& x) {
        return Matrix{static_cast<const double*>(x.data), x.ld, x.operation != CUBLAS_OP_N};
    };
    const double alpha = number(g.alpha), beta = number(g.beta);
    const Matrix c{static_cast<double*>(const_cast<void*>(g.c.data)), g.c.ld};
    return for_each(handle, g.m, g.n, [=, k = g.k, a = matrix(g.a), b = matrix(g.b)](int64_t i, int64_t j) {
        c(i, j) = combined(alpha, sum(k, [&](int64_t e) { return a(i, e) * b(e, j); }), beta, c(i, j));
    });
}

inline cublasStatus_t product(cublasHandle_t handle, const Gemm& g) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    const auto rows = [](const Operand& x, int m, int n) { return x.operation == CUBLAS_OP_N ? m : n; };
    if (g.m < 0 || g.n < 0 || g.k < 0 || g.a.ld < std::max(1, rows(g.a, g.m, g.k)) ||
        g.b.ld < std::max(1, rows(g.b, g.k, g.n)) || g.c.ld < std::max(1, g.m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (g.m == 0 || g.n == 0) return CUBLAS_STATUS_SUCCESS;
    if (g.compute.value == CUBLAS_COMPUTE_64F) return double_product(handle, g);
    const auto number = [=](const void* value) {
        return g.compute.value == CUBLAS_COMPUTE_16F
                   ? static_cast<float>(scalar(handle, static_cast<const __half*>(value)))
                   : scalar(handle, static_cast<const float*>(value));
    };
    const auto layout = [&](const Operand& x, int m, int n) {
        const bool plain = x.operation == CUBLAS_OP_N;
        return cublasLtMatrixLayoutOpaque_t{x.type, static_cast<uint64_t>(plain ? m : n),
                                            static_cast<uint64_t>(plain ? n : m), x.ld};
    };
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F, g.a.operation, g.b.operation};
    auto a = layout(g.a, g.m, g.k), b = layout(g.b, g.k, g.n), c = layout(g.c, g.m, g.n);
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

// ---- functions for float, double and half precision

namespace cuda_cpu {
template <class T> constexpr cudaDataType_t data_type = std::is_same_v<T, double> ? CUDA_R_64F
                                                        : std::is_same_v<T, float> ? CUDA_R_32F
                                                                                   : CUDA_R_16F;
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
cublasStatus_t geam(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, const T* alpha,
                    const T* A, int lda, const T* beta, const T* B, int ldb, T* C, int ldc) {
    return for_each(handle, m, n, [alpha = scalar(handle, alpha), beta = scalar(handle, beta),
                                   a = Matrix{A, lda, ta != CUBLAS_OP_N}, b = Matrix{B, ldb, tb != CUBLAS_OP_N},
                                   c = Matrix{C, ldc}](int64_t i, int64_t j) {
        c(i, j) = (alpha == 0 ? T{} : alpha * a(i, j)) + (beta == 0 ? T{} : beta * b(i, j));
    });
}
template <class T>
cublasStatus_t gemv(cublasHandle_t handle, cublasOperation_t ta, int m, int n, const T* alpha, const T* A, int lda,
                    const T* x, int dx, const T* beta, T* y, int dy) {
    const bool transposed = ta != CUBLAS_OP_N;
    const int rows = transposed ? n : m, columns = transposed ? m : n;
    return for_each(handle, rows, [=, alpha = scalar(handle, alpha), a = Matrix{A, lda, transposed},
                                   v = Vector(x, columns, dx), beta = scalar(handle, beta),
                                   w = Vector(y, rows, dy)](int64_t i) {
        w[i] = combined(alpha, sum(columns, [&](int64_t k) { return double{a(i, k)} * v[k]; }), beta, w[i]);
    });
}
template <class T>
cublasStatus_t axpy(cublasHandle_t handle, int n, const T* alpha, const T* x, int dx, T* y, int dy) {
    return for_each(handle, n, [alpha = scalar(handle, alpha), v = Vector(x, n, dx),
                                w = Vector(y, n, dy)](int64_t i) { w[i] += alpha * v[i]; });
}
template <class T> cublasStatus_t scal(cublasHandle_t handle, int n, const T* alpha, T* x, int dx) {
    return for_each(handle, n, [alpha = scalar(handle, alpha), v = Vector(x, n, dx)](int64_t i) { v[i] *= alpha; });
}
template <class T> cublasStatus_t copy(cublasHandle_t handle, int n, const T* x, int dx, T* y, int dy) {
    return for_each(handle, n, [v = Vector(x, n, dx), w = Vector(y, n, dy)](int64_t i) { w[i] = v[i]; });
}
template <class T>
cublasStatus_t dot(cublasHandle_t handle, int n, const T* x, int dx, const T* y, int dy, T* result) {
    return evaluate(handle, result, [=, v = Vector(x, n, dx), w = Vector(y, n, dy)] {
        return sum(n, [&](int64_t i) { return double{v[i]} * w[i]; });
    });
}
template <class T> cublasStatus_t nrm2(cublasHandle_t handle, int n, const T* x, int dx, T* result) {
    return evaluate(handle, result, [=, v = Vector(x, n, dx)] {
        return std::sqrt(sum(n, [&](int64_t i) { return double{v[i]} * v[i]; }));
    });
}
}  // namespace cuda_cpu

#define CUDA_CPU_BLAS(name, function)                                 \
    inline constexpr auto& cublasS##name = cuda_cpu::function<float>; \
    inline constexpr auto& cublasD##name = cuda_cpu::function<double>;
CUDA_CPU_BLAS(axpy, axpy)
CUDA_CPU_BLAS(scal, scal)
CUDA_CPU_BLAS(copy, copy)
CUDA_CPU_BLAS(dot, dot)
CUDA_CPU_BLAS(nrm2, nrm2)
CUDA_CPU_BLAS(gemv, gemv)
CUDA_CPU_BLAS(gemm, gemm)
CUDA_CPU_BLAS(gemmStridedBatched, gemm_batches)
CUDA_CPU_BLAS(geam, geam)
inline constexpr auto& cublasHgemm = cuda_cpu::gemm<__half>;
inline constexpr auto& cublasHgemmStridedBatched = cuda_cpu::gemm_batches<__half>;

// cuBLASLt on a CPU: D = epilogue(alpha op(A) op(B) + beta C) with cuBLASLt's names and conventions; all matrices are
// column-major. Compile cublasLt.cpp once with the program's flags and link it. It uses oneDNN (define HAVE_ONEDNN and
// link -ldnnl), or else a correct plain loop, several times slower. Only one host thread may call these functions.
//
// Supported: A and B both float, both bfloat16, both half precision or both FP8. C and D have the same type: float, the
// type of A and B, or either 16-bit type if A and B are FP8. Sums, alpha and beta are float. C is D or a matrix that
// does not overlap it. Epilogues: BIAS, GELU_AUX_BIAS, DGELU. For everything else, such as batches,
// cublasLtMatmulAlgoGetHeuristic returns no algorithm, as in cuBLASLt.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

enum cudaDataType_t {
    CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, CUDA_R_8F_E5M2 = 29
};
using cudaDataType = cudaDataType_t;
using cublasDataType_t = cudaDataType_t;
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_64F = 70, CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77
};

#define CUBLAS_STATUSES(STATUS)                                                                               \
    STATUS(CUBLAS_STATUS_SUCCESS, 0, "success")                                                               \
    STATUS(CUBLAS_STATUS_NOT_INITIALIZED, 1, "the library was not initialized")                               \
    STATUS(CUBLAS_STATUS_ALLOC_FAILED, 3, "the resource allocation failed")                                   \
    STATUS(CUBLAS_STATUS_INVALID_VALUE, 7, "an unsupported value or parameter was passed to the function")    \
    STATUS(CUBLAS_STATUS_ARCH_MISMATCH, 8, "a feature is absent from the device architecture")                \
    STATUS(CUBLAS_STATUS_MAPPING_ERROR, 11, "an access to GPU memory space failed")                           \
    STATUS(CUBLAS_STATUS_EXECUTION_FAILED, 13, "the program failed to execute")                               \
    STATUS(CUBLAS_STATUS_INTERNAL_ERROR, 14, "an internal operation failed")                                  \
    STATUS(CUBLAS_STATUS_NOT_SUPPORTED, 15, "the requested functionality is not supported")                   \
    STATUS(CUBLAS_STATUS_LICENSE_ERROR, 16, "the functionality requested requires some license")
enum cublasStatus_t { CUBLAS_STATUSES(CUDA_CPU_ENUMERATOR) };
inline const char* cublasGetStatusName(cublasStatus_t error) {
    CUBLAS_STATUSES(CUDA_CPU_NAME)
    return "unknown cuBLAS status";
}
inline const char* cublasGetStatusString(cublasStatus_t error) {
    CUBLAS_STATUSES(CUDA_CPU_TEXT)
    return "unknown cuBLAS status";
}
inline size_t cublasLtGetVersion() {
    const char* version = getenv("CUDA_CPU_CUBLASLT");
    return version != nullptr ? strtoul(version, nullptr, 10) : 130000;
}

// CUDA's numbers, and the members of cublasLtMatmulDescOpaque_t.
#define CUDA_CPU_DESC_ATTRIBUTES(A)                                                                           \
    A(TRANSA, 3, transpose_a) A(TRANSB, 4, transpose_b) A(EPILOGUE, 7, epilogue) A(BIAS_POINTER, 8, bias)     \
    A(EPILOGUE_AUX_POINTER, 11, aux) A(EPILOGUE_AUX_LD, 12, aux_ld) A(A_SCALE_POINTER, 17, scale_a)           \
    A(B_SCALE_POINTER, 18, scale_b) A(FAST_ACCUM, 25, fast_accumulation) A(BIAS_DATA_TYPE, 26, bias_type)
#define CUDA_CPU_ATTRIBUTE(name, number, member) CUBLASLT_MATMUL_DESC_##name = number,
enum cublasLtMatmulDescAttributes_t { CUDA_CPU_DESC_ATTRIBUTES(CUDA_CPU_ATTRIBUTE) };
#undef CUDA_CPU_ATTRIBUTE

// Bits: 4 adds the bias, 16 computes the bias gradient, the sums of D's rows, 32 applies GELU, 64 multiplies by its
// derivative, 128 writes or reads a second matrix (aux), GELU's input.
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU = 32,
    CUBLASLT_EPILOGUE_GELU_BIAS = 32 | 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_DGELU_BGRAD = 64 | 128 | 16,
    CUBLASLT_EPILOGUE_BGRADA = 256,
    CUBLASLT_EPILOGUE_BGRADB = 512
};

enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

// A bit mask: how partial sums are added.
enum cublasLtReductionScheme_t {
    CUBLASLT_REDUCTION_SCHEME_INPLACE = 1, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_MASK = 7
};

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute;
    cudaDataType_t scale_type;
    int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void* bias = nullptr;
    int32_t bias_type = -1;  // -1: the type of D
    void* aux = nullptr;
    int64_t aux_ld = 0;
    const float *scale_a = nullptr, *scale_b = nullptr;  // device pointers; null: 1
    int8_t fast_accumulation = 0;                        // ignored: sums are float
};
struct cublasLtMatrixLayoutOpaque_t {
    uint32_t type;
    uint64_t rows, columns;
    int64_t ld;
};
struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace_bytes = 0;
    uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignments[4] = {256, 256, 256, 256};  // bytes: minimum alignment of A, B, C and D
};

using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulAlgo_t { uint64_t data[8]; };
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};

namespace cuda_cpu {
extern const char* const no_onednn_notice;  // printed once if the plain loop runs because oneDNN is missing

// The values of algo.data[0]. By default each product has one algorithm, `fast`. To test a program that chooses among
// several, CUDA_CPU_MATMULS lists those that cublasLtMatmulAlgoGetHeuristic returns, in this order.
enum class Algorithm : uint64_t {
    fast,      // oneDNN if available, otherwise the plain loop
    plain,     // the plain loop, summing over k in two halves: equals `fast` up to rounding
    slow,      // `plain` after a sleep of 2 ms
    in_place,  // `plain`; offered if the preference allows CUBLASLT_REDUCTION_SCHEME_INPLACE
    refused,   // offered with state CUBLAS_STATUS_NOT_SUPPORTED; cublasLtMatmul rejects it
    failing,   // cublasLtMatmul returns CUBLAS_STATUS_EXECUTION_FAILED
    coarse,    // `plain` with the last 4 bits of each sum cleared: differs from `fast` on every processor
};

// CUDA_CPU_FP8_BITS: fraction bits of the sums of FP8 products, 13 as on Hopper. 0: FP32. Tests change it.
inline int fp8_bits = static_cast<int>(number_of_environment("CUDA_CPU_FP8_BITS", 0));

inline bool is_fp8(uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
inline size_t bytes_of(cudaDataType_t type) {
    return is_fp8(type) ? 1 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : type == CUDA_R_64F ? 8 : 4;
}

// Copies an attribute's value; `bytes` must be its size.
template <class T> inline cublasStatus_t set_attribute(T& attribute, const void* value, size_t bytes) {
    if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Handle, class... Arguments> inline cublasStatus_t create(Handle* handle, Arguments... arguments) {
    *handle = new std::remove_pointer_t<Handle>{arguments...};
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object> inline cublasStatus_t destroy(const Object* object) {
    delete object;
    return CUBLAS_STATUS_SUCCESS;
}
}  // namespace cuda_cpu

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return cuda_cpu::create(handle); }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return cuda_cpu::destroy(handle); }

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                               cudaDataType_t scale_type) {
    return cuda_cpu::create(desc, compute, scale_type);
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return cuda_cpu::destroy(desc); }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute, const void* value,
                                                     size_t bytes) {
    switch (attribute) {
#define CUDA_CPU_ATTRIBUTE(name, number, member)                                                              \
    case CUBLASLT_MATMUL_DESC_##name: return cuda_cpu::set_attribute(desc->member, value, bytes);
        CUDA_CPU_DESC_ATTRIBUTES(CUDA_CPU_ATTRIBUTE)
#undef CUDA_CPU_ATTRIBUTE
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
    return cuda_cpu::create(layout, static_cast<uint32_t>(type), rows, columns, ld);
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return cuda_cpu::destroy(layout); }

enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
};
// Supports one batch only.
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t,
                                                       cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                       size_t bytes) {
    int32_t count = 1;
    if (attribute != CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return CUBLAS_STATUS_SUCCESS;
    const cublasStatus_t status = cuda_cpu::set_attribute(count, value, bytes);
    return status != CUBLAS_STATUS_SUCCESS || count == 1 ? status : CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return cuda_cpu::create(preference);
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return cuda_cpu::destroy(preference);
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void* value, size_t bytes) {
    const auto set = [=](auto& member) { return cuda_cpu::set_attribute(member, value, bytes); };
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(preference->workspace_bytes);
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return set(preference->reduction_schemes);
    const unsigned operand = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    return operand < 4 ? set(preference->alignments[operand]) : CUBLAS_STATUS_INVALID_VALUE;
}

// Returns the algorithms that CUDA_CPU_MATMULS lists (README.md), at most `wanted`.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found);
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream);

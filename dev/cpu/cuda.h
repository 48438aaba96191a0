// The driver API's tensor maps for TMA, the Tensor Memory Accelerator (tma_load in ptx.h), with CUDA's checks.
#pragma once

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_SUPPORTED = 801 };

// Not aligned to 128 bytes as in CUDA: g++ warns about parameters with a larger alignment than the processor's vectors.
struct CUtensorMap { cuuint64_t opaque[16]; };

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

namespace cuda_cpu {
// The contents of a CUtensorMap in the emulator. Dimension 0 is contiguous; its stride is the element size.
struct TensorLayout {
    static constexpr uint32_t known = 0x7e45082b, max_rank = 5;
    uint32_t magic;  // `known` in an encoded map
    uint16_t rank, swizzled, element_bytes;
    uint16_t box[max_rank];
    const char* data;
    int64_t extents[max_rank];
    int64_t strides[max_rank];  // in bytes

    int64_t box_bytes() const {
        int64_t bytes = element_bytes;
        for (unsigned i = 0; i < rank; i++) bytes *= box[i];
        return bytes;
    }
};
static_assert(sizeof(TensorLayout) <= sizeof(CUtensorMap));
}  // namespace cuda_cpu

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                       const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    using cuda_cpu::TensorLayout;
    constexpr uint64_t alignment = 16, max_extent = uint64_t{1} << 32, max_stride = uint64_t{1} << 40,
                       swizzle_bytes = 128;
    constexpr uint32_t max_box = 256, max_step = 8;
    // "Tensor map objects are only supported on devices of compute capability 9.0 or higher"; only this error fits.
    if (cuda_cpu::card() != nullptr && cuda_cpu::card()->capability.major < 9) return CUDA_ERROR_INVALID_VALUE;
    if (map == nullptr || rank == 0 || rank > TensorLayout::max_rank) return CUDA_ERROR_INVALID_VALUE;
    if (data == nullptr || reinterpret_cast<uintptr_t>(data) % alignment != 0) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++) {
        if (extents[i] == 0 || extents[i] > max_extent || box[i] == 0 || box[i] > max_box || steps[i] == 0 ||
            steps[i] > max_step)
            return CUDA_ERROR_INVALID_VALUE;
        if (i > 0 && (strides[i - 1] % alignment != 0 || strides[i - 1] >= max_stride)) return CUDA_ERROR_INVALID_VALUE;
    }
    if ((type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) ||
        (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B))
        return CUDA_ERROR_NOT_SUPPORTED;
    for (unsigned i = 1; i < rank; i++)
        if (steps[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    const uint64_t row_bytes = box[0] * sizeof(uint16_t);
    if (row_bytes % alignment != 0 || (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && row_bytes > swizzle_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && row_bytes != swizzle_bytes) return CUDA_ERROR_NOT_SUPPORTED;

    TensorLayout layout{};
    layout.magic = TensorLayout::known;
    layout.rank = static_cast<uint16_t>(rank);
    layout.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    layout.element_bytes = sizeof(uint16_t);
    layout.data = static_cast<const char*>(data);
    for (unsigned i = 0; i < rank; i++) {
        layout.box[i] = static_cast<uint16_t>(box[i]);
        layout.extents[i] = static_cast<int64_t>(extents[i]);
        layout.strides[i] = i == 0 ? layout.element_bytes : static_cast<int64_t>(strides[i - 1]);
    }
    *map = {};
    memcpy(map->opaque, &layout, sizeof(layout));
    return CUDA_SUCCESS;
}

// Lookup of driver functions by name.
constexpr unsigned long long cudaEnableDefault = 0;
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    const bool has = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *function = has ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    *result = has ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

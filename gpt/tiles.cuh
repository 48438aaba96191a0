// What tensor-core kernels build from the instructions of ptx.cuh: tiles in shared memory, fragments in registers,
// pipelines. Used by attention_mma.cuh, attention_wgmma.cuh and dev/kernels/matmul.cu; uses floatX, PACK, FULL_WARP,
// check and launch of train_gpt.cu.
//
// A tile in shared memory has blocks of 64 columns: a row of a block is 128 bytes. The 16-byte chunk c of row r is
// stored at position c ^ (r % 8) (128-byte swizzle), so that the same chunk of eight rows lies in different banks. A
// tile is aligned to 1024 bytes.
#pragma once

#include "ptx.cuh"

constexpr int TILE_COLUMNS = 64;

__global__ void compiled_for_sm_90a_kernel(int* answer) { *answer = HAS_WGMMA; }

// Returns whether the code that this device executes was compiled for sm_90a.
bool compiled_with_wgmma() {
    int answer = 0, *on_device = nullptr;
    check(cudaMalloc(&on_device, sizeof(answer)), "cudaMalloc");
    launch("compiled_for_sm_90a", compiled_for_sm_90a_kernel, 1, 1, 0, on_device);
    download(&answer, on_device, sizeof(answer));
    check(cudaFree(on_device), "cudaFree");
    return answer != 0;
}

// ==== tiles =================================================================

constexpr int TILE_ALIGNMENT = 1024;   // bytes; the 128-byte swizzle of TMA and wgmma repeats after 1024

// Return the number of 64-column blocks in a tile, and the bytes of a tile of `rows` rows.
__host__ __device__ constexpr int column_blocks(int HS) { return (HS + TILE_COLUMNS - 1) / TILE_COLUMNS; }
__host__ __device__ constexpr int tile_bytes(int rows, int HS) { return rows * column_blocks(HS) * TILE_ROW_BYTES; }

// Returns the address of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows: block of columns chunk / 8.
__device__ __forceinline__ char* tile_chunk(void* tile, int rows, int row, int chunk) {
    return static_cast<char*>(tile) + (chunk / 8 * rows + row) * TILE_ROW_BYTES + ((chunk ^ row) % 8) * 16;
}

// ==== fragments =============================================================
// (16, N) of a warp, N / 2 elements per lane; layout at the top of this file.

// Returns two floats rounded to floatX in 32 bits, x in the lower half.
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
#ifdef PRECISION_FP16
    const __half2 pair = __floats2half2_rn(x, y);
#else
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
#endif
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// Return the row and the column of this lane's element e.
__device__ __forceinline__ int fragment_row(int e) { return threadIdx.x % 32 / 4 + e / 2 % 2 * 8; }
__device__ __forceinline__ int fragment_column(int e) { return e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2; }

template <int N> __device__ __forceinline__ void multiply_rows(float (&x)[N], const float (&factor)[2]) {
    for (int e = 0; e < N; e++) x[e] *= factor[e / 2 % 2];
}

// Rounds an accumulator fragment to A fragments, one for each 16 columns.
template <int N> __device__ __forceinline__ void to_operands(uint32_t (&a)[N / 8][4], const float (&x)[N]) {
    for (int i = 0; i < N / 2; i++) a[i / 4][i % 4] = pack_pair(x[2 * i], x[2 * i + 1]);
}

// Returns whether a tile's row is one of the T rows of a head.
__device__ __forceinline__ bool is_row(int row, int T) { return row >= 0 && row < T; }

// Stores a fragment (16, HS) to rows row0 ... row0 + 15 of x, except out-of-range rows. The warp stages it in its own
// rows of `tile`, so that neighbouring lanes write neighbouring 16-byte chunks.
template <int HS, typename F8>
__device__ __forceinline__ void store_rows(const Out<F8>& x, size_t stride, int row0, int T, const float* fragment,
                                           char* tile, int tile_rows, int tile_row) {
    uint32_t lane = threadIdx.x % 32;
    // With these head sizes nvcc 12.4 would compute all addresses before a caller's loop and spill them.
    if (HS % TILE_COLUMNS != 0) fence_operand(lane);
    Writer<F8, Reach::WARP> writer(x);
    __syncwarp();   // all lanes have read the old contents of the rows
    for (int i = 0; i < HS / 4; i++) {
        const uint32_t pair = pack_pair(fragment[2 * i], fragment[2 * i + 1]);
        memcpy(tile_chunk(tile, tile_rows, tile_row + fragment_row(2 * i), i / 2) + lane % 4 * 4, &pair, sizeof(pair));
    }
    __syncwarp();
    for (int e = static_cast<int>(lane); e < 16 * (HS / PACK); e += 32) {
        const int row = e / (HS / PACK), chunk = e % (HS / PACK);
        if (!is_row(row0 + row, T)) continue;
        const void* from = tile_chunk(tile, tile_rows, tile_row + row, chunk);
        writer.put((row0 + row) * stride + chunk * PACK, *static_cast<const RawPack<floatX, PACK>*>(from));
    }
    writer.finish();
}

// Returns the sums of columns 2 lane and 2 lane + 1 over the 16 rows of 64 columns of a fragment. The 8 lanes with the
// same columns exchange half of their sums, then a quarter, then an eighth: 14 shuffles instead of 3 for each of 16.
__device__ __forceinline__ void column_sums(float (&sum)[2], const float* fragment) {
    constexpr int COLUMNS = TILE_COLUMNS / 4;   // of a lane
    float s[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) s[c] = fragment[c / 2 * 4 + c % 2] + fragment[c / 2 * 4 + c % 2 + 2];
#pragma unroll
    for (int kept = COLUMNS / 2; kept >= 2; kept /= 2) {   // with lanes at distance 16, 8 and 4
        const bool upper = threadIdx.x & 2 * kept;
        for (int c = 0; c < kept; c++) {
            const float mine = upper ? s[c + kept] : s[c], other = upper ? s[c] : s[c + kept];
            s[c] = mine + __shfl_xor_sync(FULL_WARP, other, 2 * kept);
        }
    }
    sum[0] = s[0];
    sum[1] = s[1];
}

// ==== pipelines =============================================================
// Hopper: a producer warpgroup loads tiles, consumer warpgroups multiply them.

constexpr int WARPGROUP = 128, WGMMA_M = 64;   // threads; rows of a product

// The mbarriers of a ring buffer. The producer fills stage s and arrives at full[s], for which consumers wait. Each
// consumer warp arrives at empty[s] after its last read, for which the producer waits.
template <int STAGES, int PRODUCERS = 1> struct Ring {   // PRODUCERS: threads that arrive at full
    uint64_t full[STAGES], empty[STAGES];

    __device__ void init(int consumer_warps) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], PRODUCERS);
            mbarrier_init(&empty[s], consumer_warps);
        }
    }
};

template <typename... Rings> __device__ __forceinline__ void init_rings(int consumer_warps, Rings&... rings) {
    if (threadIdx.x == 0) {
        (rings.init(consumer_warps), ...);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// A position in a ring: the stage, and the phase bit (parity) of its barriers (CUTLASS: PipelineState).
template <int STAGES> struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        stage = (stage + 1) % STAGES;
        phase ^= stage == 0;
    }
};

// Consumers: blocks until the stage is filled.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void wait_full(Ring<STAGES, PRODUCERS>& ring, const PipelineState<STAGES>& state) {
    mbarrier_wait(&ring.full[state.stage], state.phase);
}
// Producer: blocks until all consumer warps have released the stage; returns at once for a stage of a new ring.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void wait_empty(Ring<STAGES, PRODUCERS>& ring, const PipelineState<STAGES>& state) {
    mbarrier_wait(&ring.empty[state.stage], state.phase ^ 1);
}
// A consumer warp: tells the producer that the warp has finished reading the stage, and advances.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void release(Ring<STAGES, PRODUCERS>& ring, PipelineState<STAGES>& state) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[state.stage]);
    state.advance();
}

// Returns the descriptor of an address that is `bytes` higher: a descriptor's low bits are an address / 16.
__device__ __forceinline__ uint64_t offset_by(uint64_t descriptor, int bytes) { return descriptor + bytes / 16; }
// Returns the descriptor with this stride between blocks of 64 columns, for Major::MN (wgmma_descriptor sets 16 bytes).
__device__ __forceinline__ uint64_t mn_major(uint64_t descriptor, int column_block_bytes) {
    return descriptor + (static_cast<uint64_t>(column_block_bytes / 16 - 1) << 16);
}

// Warpgroups of a block: one producer and COUNT consumers. A launch gives all threads the same number of registers; the
// producer needs few, so setmaxnreg moves the rest of the 65536 to the consumers.
template <int COUNT> struct Warpgroups {
    static constexpr int CONSUMERS = COUNT;
    static constexpr int BLOCK = WARPGROUP * (1 + CONSUMERS);
    static constexpr int WARPS = 4 * CONSUMERS;      // consumer warps
    static constexpr int ROWS = WGMMA_M * CONSUMERS; // of a work tile
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
};

// Returns the first row of this consumer warp in the block's work tile.
__device__ __forceinline__ int consumer_row() { return (threadIdx.x - WARPGROUP) / 32 * 16; }

// Makes the consumer warpgroups issue their products in cyclic order (CUTLASS: OrderedSequenceBarrier), so that one
// warpgroup's products run during another's arithmetic. Each warpgroup has a named barrier, whose phase completes when
// the warpgroup waits and the one before it has arrived. Nothing waits for the last arrive() of a block.
template <int CONSUMERS> struct OrderedBarrier {
    int group;

    __device__ __forceinline__ explicit OrderedBarrier(int g) : group(g) {
        if (group == CONSUMERS - 1) arrive();   // group 0 starts
    }
    __device__ __forceinline__ void wait() const { named_barrier_sync(1 + group, 2 * WARPGROUP); }
    __device__ __forceinline__ void arrive() const { named_barrier_arrive(1 + (group + 1) % CONSUMERS, 2 * WARPGROUP); }
};

// Returns the first row of this consumer warpgroup in the work tile. The broadcast from lane 0 tells the compiler that
// the row is uniform: wgmma needs descriptors in uniform registers.
__device__ __forceinline__ int warpgroup_row() {
    return __shfl_sync(FULL_WARP, consumer_row() / WGMMA_M * WGMMA_M, 0);
}

// ==== tensor maps ===========================================================

// TMA's description of a tensor (n3, n2, n1, n0) in global memory, n0 contiguous; passed to kernels by value. One load
// copies a box of 64 columns of n0 by `rows` of n2.
struct TensorMap {
    CUtensorMap map;
    const void* data;   // for the trace
};

// Returns a tensor map. extents: n0 to n3; strides: of n1 to n3, in bytes; rows: of the box
TensorMap make_tensor_map(const floatX* data, const uint64_t (&extents)[4], const uint64_t (&strides)[3],
                          uint32_t rows) {
    static const auto encode = [] {   // driver function, looked up at run time: build machines may have no driver
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#else   // looks up the toolkit's version of the function, which is the same
        check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#endif
        if (found != cudaDriverEntryPointSuccess) throw Failure("the driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const uint32_t box[] = {TILE_COLUMNS, 1, rows, 1}, steps[] = {1, 1, 1, 1};
    TensorMap result = {{}, data};
    constexpr auto TYPE = FLOATX == DType::FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult status = encode(&result.map, TYPE, 4, const_cast<floatX*>(data), extents, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) throw Failure("cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
    return result;
}

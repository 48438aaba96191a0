// Matmul, step by step: from one thread per element to a kernel that keeps Hopper's tensor cores busy, compared with
// cuBLASLt. out (M,N) = A (M,K) B (K,N), row-major, as in the trainer's forward pass: A holds activations, B weights
// (in, out).
//
// Topics:
//   - reuse: each element of A serves N outputs. Each step holds it closer to the arithmetic and loads it less often:
//     in shared memory, in registers, as fragments of a warp, as operands of a warpgroup;
//   - tensor cores, which multiply tiles: fragments, swizzled tiles and ldmatrix;
//   - asynchrony: copies run ahead of the products, first with two buffers (cp.async), then with a producer and
//     consumers that share a ring buffer (TMA, mbarrier). On Hopper the products are asynchronous too;
//   - tiles: their size, their order, and the overlap of the epilogue with the next tile.
//
// Bound by arithmetic: 2 M N K FLOPs. Per clock, a multiprocessor of an H100 does 4096 FLOPs in BF16 on its tensor
// cores or 256 on its FP32 units, and moves 128 bytes to or from shared memory. One wgmma of a warpgroup reads
//     64 x  64 x 16    32 clocks   2 KiB of A + 2 KiB of B   128 bytes per clock: all of shared memory's bandwidth
//     64 x 128 x 16    64 clocks   2 KiB      + 4 KiB         96
//     64 x 256 x 16   128 clocks   2 KiB      + 8 KiB         80
// A tile of two warpgroups, loaded from the L2 cache in stages of 64 columns of K, needs
//    128 x 128        512 clocks  16 KiB      + 16 KiB        64 bytes per clock and multiprocessor
//    128 x 256       1024 clocks  16 KiB      + 32 KiB        48
// Reads and copies share the 128 bytes per clock. Tiles of 128 x 128 need 96 + 64, so tensor cores wait for a fifth of
// the time. Tiles of 128 x 256 need 80 + 48, exactly the bandwidth. Larger tiles are impossible: the accumulators of a
// tile twice as large would fill all registers.

#include "study.h"

struct Size { int M, N, K; };   // M any, N and K multiples of 8

// Returns the index of an element of a row-major matrix.
__device__ __forceinline__ size_t at(int row, int column, int columns) {
    return static_cast<size_t>(row) * columns + column;
}

// ==== FP32 units =============================================================

// ---- 1: one thread per element ----
// Neighbouring threads read neighbouring elements of B and the same element of A: coalesced, but each multiply-add
// needs two loads from memory or a cache.

__global__ void element_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= s.N) return;
    float sum = 0;
    for (int k = 0; k < s.K; k++) sum += f32(A[at(m, k, s.K)]) * f32(B[at(k, n, s.N)]);
    out[at(m, n, s.N)] = static_cast<floatX>(sum);
}

// ---- 2: tiles in shared memory ----
// A block computes 32 x 32 elements and uses each element that it loads from global memory 32 times. Each multiply-add
// still needs two loads, now from shared memory, which limit it.

constexpr int SQUARE = 32;

__global__ void __launch_bounds__(SQUARE * SQUARE, 1)
shared_tiles_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    __shared__ float a[SQUARE][SQUARE], b[SQUARE][SQUARE];
    const int row = threadIdx.x / SQUARE, column = threadIdx.x % SQUARE;
    const int m = blockIdx.y * SQUARE + row, n = blockIdx.x * SQUARE + column;
    float sum = 0;
    for (int k0 = 0; k0 < s.K; k0 += SQUARE) {
        a[row][column] = m < s.M && k0 + column < s.K ? f32(A[at(m, k0 + column, s.K)]) : 0.0f;
        b[row][column] = k0 + row < s.K && n < s.N ? f32(B[at(k0 + row, n, s.N)]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < SQUARE; k++) sum += a[row][k] * b[k][column];
        __syncthreads();   // before a and b are loaded again
    }
    if (m < s.M && n < s.N) out[at(m, n, s.N)] = static_cast<floatX>(sum);
}

// ---- 3: tiles in registers, 128 bits per load ----
// A thread computes 8 x 8 elements: 64 multiply-adds for 16 numbers from shared memory, loaded 4 at a time. That is 4
// loads instead of step 2's 128, and 64 independent sums hide the latency of the arithmetic. A is stored transposed, so
// that a column of A is read like a row of B. Each thread has 4 consecutive rows (columns) in each half of the tile:
// then 16 neighbouring threads read 256 consecutive bytes, without bank conflicts. (Storing A transposed has conflicts:
// 1.2 times the minimum number of wavefronts.)

constexpr int REGISTER_TILE = 128, REGISTER_DEPTH = 16, REGISTER_BLOCK = 256;

// Returns the i-th of a thread's 8 rows or columns.
__device__ __forceinline__ int in_halves(int first, int i) { return first + i % 4 + i / 4 * (REGISTER_TILE / 2); }

__device__ __forceinline__ void load_halves(float (&x)[8], const float* from) {
    for (int half = 0; half < 2; half++) {
        const float4 v = *reinterpret_cast<const float4*>(from + half * (REGISTER_TILE / 2));
        x[4 * half] = v.x, x[4 * half + 1] = v.y, x[4 * half + 2] = v.z, x[4 * half + 3] = v.w;
    }
}

__global__ void __launch_bounds__(REGISTER_BLOCK, 2)
register_tiles_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    __shared__ __align__(16) float a[REGISTER_DEPTH][REGISTER_TILE], b[REGISTER_DEPTH][REGISTER_TILE];
    const int m0 = blockIdx.y * REGISTER_TILE, n0 = blockIdx.x * REGISTER_TILE;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < s.K; k0 += REGISTER_DEPTH) {
        for (int e = threadIdx.x * PACK; e < REGISTER_TILE * REGISTER_DEPTH; e += REGISTER_BLOCK * PACK) {
            const int m = e / REGISTER_DEPTH, a_k = e % REGISTER_DEPTH, b_k = e / REGISTER_TILE, n = e % REGISTER_TILE;
            float v[PACK] = {}, w[PACK] = {};
            if (m0 + m < s.M && k0 + a_k < s.K) load(v, A + at(m0 + m, k0 + a_k, s.K));
            if (k0 + b_k < s.K && n0 + n < s.N) load(w, B + at(k0 + b_k, n0 + n, s.N));
            for (int i = 0; i < PACK; i++) a[a_k + i][m] = v[i];
            for (int i = 0; i < PACK; i++) b[b_k][n + i] = w[i];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < REGISTER_DEPTH; k++) {
            float x[8], y[8];
            load_halves(x, &a[k][row]);
            load_halves(y, &b[k][column]);
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            const int m = m0 + in_halves(row, i), n = n0 + in_halves(column, j);
            if (m < s.M && n < s.N) out[at(m, n, s.N)] = static_cast<floatX>(sum[i][j]);
        }
}

#if (defined(PRECISION_BF16) || defined(PRECISION_FP16)) && WARP_SIZE == 32
#define ON_TENSOR_CORES

// ==== tensor cores, Ampere and later =========================================
// See ptx.cuh for fragments, tiles.cuh for tiles and their swizzle.

constexpr int DEPTH = TILE_COLUMNS;   // elements of K per stage

// Rounds a warp's accumulator fragment (16, columns) and stores it at row m0, column n0 of out, 4 bytes per lane.
template <int N>
__device__ __forceinline__ void store_fragment(floatX* out, const float (&x)[N], int m0, int n0, Size s) {
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        const int m = m0 + fragment_row(e), n = n0 + fragment_column(e);
        if (m < s.M && n < s.N) *reinterpret_cast<uint32_t*>(out + at(m, n, s.N)) = pack_pair(x[e], x[e + 1]);
    }
}

// ---- 4: mma ----
// An H100's tensor cores do 16 times the FLOPs of its FP32 units. A block has four warps, each with 64 x 64 elements.
// cp.async copies tiles to shared memory without passing through registers, and the next stage is copied while this one
// is multiplied. A warp reads 4 KiB per product of 64 x 64 x 16. The swizzle avoids 8-way bank conflicts: without it,
// the eight rows that ldmatrix reads would be in the same 4 banks.

constexpr int WARP_TILE = 64, MMA_TILE = 2 * WARP_TILE;

struct MmaStage {
    alignas(TILE_ALIGNMENT) char A[tile_bytes(MMA_TILE, DEPTH)], B[tile_bytes(DEPTH, MMA_TILE)];
};

__global__ void __launch_bounds__(MMA_BLOCK, 2) mma_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    MmaStage* stages = reinterpret_cast<MmaStage*>(dynamic_shared());   // two: one multiplied, one loaded
    const int m0 = blockIdx.y * MMA_TILE, n0 = blockIdx.x * MMA_TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 2 * WARP_TILE, column = warp % 2 * WARP_TILE;
    auto load_stage = [&](int k0) {
        MmaStage& stage = stages[k0 / DEPTH % 2];
        load_tile<DEPTH, MMA_TILE>(stage.A, A + k0, m0, s.M, s.K, s.K - k0);
        load_tile<MMA_TILE, DEPTH>(stage.B, B + n0, k0, s.K, s.N, s.N - n0);
    };
    float sum[WARP_TILE / 16][WARP_TILE / 2] = {};   // fragments (16, 64)
    load_stage(0);
    cp_async_commit();
    for (int k0 = 0; k0 < s.K; k0 += DEPTH) {
        MmaStage& stage = stages[k0 / DEPTH % 2];
        if (k0 + DEPTH < s.K) load_stage(k0 + DEPTH);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();   // all threads' copies are complete
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[WARP_TILE / 16][4], b[4];
            for (int i = 0; i < WARP_TILE / 16; i++)
                ldmatrix(a[i], tile_chunk(stage.A, MMA_TILE, row + 16 * i + lane % 16, 2 * k + lane / 16));
            for (int j = 0; j < WARP_TILE / 16; j++) {   // 16 columns of B: two operands
                const int chunk = column / PACK + 2 * j + lane / 16;
                ldmatrix_transposed(b, tile_chunk(stage.B, DEPTH, 16 * k + lane % 16, chunk));
                for (int i = 0; i < WARP_TILE / 16; i++) {
                    mma_m16n8k16(sum[i] + 8 * j, a[i], b[0], b[1]);
                    mma_m16n8k16(sum[i] + 8 * j + 4, a[i], b[2], b[3]);
                }
            }
        }
        __syncthreads();   // before the stage is overwritten
    }
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; i++) store_fragment(out, sum[i], m0 + row + 16 * i, n0 + column, s);
}

// ==== tensor cores, Hopper ===================================================
// One kernel for three steps. A block has a producer warpgroup, which loads, and two consumer warpgroups, which
// multiply 64 rows each. A ring buffer connects them; a stage is DEPTH columns of A and DEPTH rows of B. B is the
// operand with Major::MN, so weights are read as they are stored. Products are asynchronous: a group of wgmma runs
// while the next group is issued. wgmma_wait<1> then waits for the older group, and its stage is released.
//
// 5  Tiles of 128 x 128, one block each. Compared with mma, a wgmma reads both operands from shared memory, so no
//    instructions and registers go to ldmatrix. One thread issues TMA copies, which compute the addresses and the
//    swizzle and fill out-of-range elements with 0. Copies are up to 6 stages ahead.
// 6  Tiles of 128 x 256, the widest wgmma: fewer bytes per FLOP, see the table at the top. Accumulators take half of
//    the registers.
// 7  Persistent blocks: one block per multiprocessor processes tile after tile, and the loads of the next tile begin
//    while the epilogue stores this one. Tiles are scheduled in groups of 16 rows of tiles, column by column, so that
//    the 132 tiles in progress form a near square of 2048 x 2112 elements, which minimises the bytes read from memory.
//    (Row by row, the logits' matmul, N = 50304, would read all of B for every 128 rows: 77 MB, more than L2 holds.)

template <int COLUMNS> struct MatmulTile : Warpgroups<2> {
    static constexpr int STAGES = COLUMNS == 256 ? 4 : 6;
    struct Shared {
        alignas(TILE_ALIGNMENT) char A[STAGES][tile_bytes(MatmulTile::ROWS, DEPTH)];
        alignas(TILE_ALIGNMENT) char B[STAGES][tile_bytes(DEPTH, COLUMNS)];
        Ring<STAGES> ring;
    };
};

// Issues the wgmma of one stage, sum (64, COLUMNS) += A B, as one group. With add == false, sum = A B.
template <int COLUMNS>
__device__ __forceinline__ void start_products(float (&sum)[COLUMNS / 2], uint64_t A, uint64_t B, bool add) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        const uint64_t a = offset_by(A, k * static_cast<int>(sizeof(floatX))), b = offset_by(B, k * TILE_ROW_BYTES);
        wgmma<COLUMNS, Major::MN>(sum, a, b, k > 0 || add);
    }
    wgmma_commit();
}

template <int COLUMNS>
__device__ __forceinline__ void matmul_producer(typename MatmulTile<COLUMNS>::Shared& shared, const TensorMap& A,
                                                const TensorMap& B, const TileOrder& order, Size s) {
    using Tile = MatmulTile<COLUMNS>;
    PipelineState<Tile::STAGES> state;
    for (unsigned i = blockIdx.x; i < order.count(); i += gridDim.x) {
        const TileOrder::Place place = order.place(i);
        const int m = place.row * Tile::ROWS, n = place.column * COLUMNS;
        for (int k = 0; k < s.K; k += DEPTH, state.advance()) {
            uint64_t* full = &shared.ring.full[state.stage];
            wait_empty(shared.ring, state);
            mbarrier_arrive_expect_tx(full, sizeof(shared.A[0]) + sizeof(shared.B[0]));
            tma_load(shared.A[state.stage], &A.map, full, k, 0, m, 0);
            for (int c = 0; c < COLUMNS; c += TILE_COLUMNS)
                tma_load(shared.B[state.stage] + tile_bytes(DEPTH, c), &B.map, full, n + c, 0, k, 0);
        }
    }
}

template <int COLUMNS>
__device__ __forceinline__ void matmul_consumer(floatX* out, typename MatmulTile<COLUMNS>::Shared& shared,
                                                const TileOrder& order, Size s) {
    using Tile = MatmulTile<COLUMNS>;
    const uint64_t A = wgmma_descriptor(shared.A[0] + warpgroup_row() * TILE_ROW_BYTES);
    const uint64_t B = wgmma_descriptor(shared.B[0], tile_bytes(DEPTH, TILE_COLUMNS));
    PipelineState<Tile::STAGES> now, read;   // read: the stage that the previous group may still read
    for (unsigned i = blockIdx.x; i < order.count(); i += gridDim.x) {
        const TileOrder::Place place = order.place(i);
        float sum[COLUMNS / 2];
        for (int k = 0; k < s.K; k += DEPTH, now.advance()) {
            wait_full(shared.ring, now);
            wgmma_fence();
            const uint64_t a = offset_by(A, now.stage * sizeof(shared.A[0])),
                           b = offset_by(B, now.stage * sizeof(shared.B[0]));
            start_products<COLUMNS>(sum, a, b, k > 0);
            wgmma_wait<1>();
            if (k > 0) release(shared.ring, read);
        }
        wgmma_wait<0>(sum);
        release(shared.ring, read);
        store_fragment(out, sum, place.row * Tile::ROWS + consumer_row(), place.column * COLUMNS, s);
    }
}

template <int COLUMNS>
__global__ void __launch_bounds__(MatmulTile<COLUMNS>::BLOCK, 1)
wgmma_kernel(floatX* out, const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, TileOrder order,
             Size s) {
    if constexpr (HAS_WGMMA) {
        using Tile = MatmulTile<COLUMNS>;
        auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic_shared());
        init_rings(Tile::WARPS, shared.ring);
        specialise_warpgroups<Tile>(
            [&] { if (threadIdx.x == 0) matmul_producer<COLUMNS>(shared, A, B, order, s); },
            [&, out] { matmul_consumer<COLUMNS>(out, shared, order, s); });
    }
}

enum class Blocks { ONE_TILE, PERSISTENT };

template <int COLUMNS, Blocks BLOCKS> void matmul_wgmma(floatX* out, const floatX* A, const floatX* B, const Size& s) {
    using Tile = MatmulTile<COLUMNS>;
    auto map_of = [](const floatX* x, uint64_t rows, uint64_t columns, uint32_t box_rows) {   // boxes: box_rows x 64
        const uint64_t row = columns * sizeof(floatX);
        return make_tensor_map(x, {columns, 1, rows, 1}, {row, row, row * rows}, box_rows);
    };
    constexpr bool PERSISTENT = BLOCKS == Blocks::PERSISTENT;
    const unsigned rows = ceil_div(s.M, Tile::ROWS), columns = ceil_div(s.N, COLUMNS),
                   multiprocessors = device.properties.multiProcessorCount;
    const TileOrder order = {rows, columns, PERSISTENT ? 16u : 1u};   // of attention_wgmma.cuh
    const unsigned blocks = PERSISTENT ? std::min(order.count(), multiprocessors) : order.count();
    launch("matmul_wgmma", wgmma_kernel<COLUMNS>, blocks, Tile::BLOCK, sizeof(typename Tile::Shared), out,
           map_of(A, s.M, s.K, Tile::ROWS), map_of(B, s.K, s.N, DEPTH), order, s);
}

#endif

// ==== the study ==============================================================
// All steps compute the same product; cuBLASLt's is the last one.

void study_matmul(Study& study, const char* title, const Size& s) {
    const size_t M = s.M, N = s.N, K = s.K;
    Case c(study, title, format("M %zu, N %zu, K %zu", M, N, K), flops(2.0 * M * N * K));
    const auto A = c.input<floatX>(M * K), B = c.input<floatX>(K * N), out = c.output<floatX>("out", M * N);
    out.memory.from_first_step = study.timing && !device.is_cpu();   // the loop would take minutes
    for (size_t m = 0; m < M && !out.memory.from_first_step; m++)
        for (size_t k = 0; k < K; k++)
            for (size_t n = 0; n < N; n++) out.expected[m * N + n] += A.host[m * K + k] * B.host[k * N + n];
    auto tiles = [&](int side) { return dim3(ceil_div(N, side), ceil_div(M, side)); };
    c.step("one thread per element", [&] {
        launch("step 1", element_kernel, dim3(ceil_div(N, BLOCK), M), BLOCK, 0, out, A, B, s);
    });
    c.step("tiles in shared memory", [&] {
        launch("step 2", shared_tiles_kernel, tiles(SQUARE), SQUARE * SQUARE, 0, out, A, B, s);
    });
    c.step("tiles in registers, 128 bits per load", [&] {
        launch("step 3", register_tiles_kernel, tiles(REGISTER_TILE), REGISTER_BLOCK, 0, out, A, B, s);
    });
#ifdef ON_TENSOR_CORES
    constexpr Blocks ONE_TILE = Blocks::ONE_TILE, PERSISTENT = Blocks::PERSISTENT;
    if (has_tensor_cores(TensorCores::MMA))
        c.step("mma: tensor cores, asynchronous copies", [&] {
            launch("step 4", mma_kernel, tiles(MMA_TILE), MMA_BLOCK, 2 * sizeof(MmaStage), out, A, B, s);
        });
    if (has_tensor_cores(TensorCores::WGMMA)) {
        c.step("wgmma, TMA: producer and two consumers", [&] { matmul_wgmma<128, ONE_TILE>(out, A, B, s); });
        c.step("tiles of 128 x 256", [&] { matmul_wgmma<256, ONE_TILE>(out, A, B, s); });
        c.step("persistent blocks, tiles ordered for L2", [&] { matmul_wgmma<256, PERSISTENT>(out, A, B, s); });
    }
#endif
    c.step("train_gpt.cu: cuBLASLt", [&] {
        matmul({out, A, B, {M, N, K, Op::AS_IS, Op::AS_IS, FLOATX, Into::ASSIGN, Epilogue::NONE}});
    });
}

void run_study(Study& study) {
    auto at = [&](const char* title, const Size& timed, const Size& counted, std::initializer_list<Size> odd = {}) {
        study.at_sizes(odd, timed, counted, [&](Study&, const Size& size) { study_matmul(study, title, size); });
    };
    at("matmul", {4096, 4096, 4096}, {136, 264, 200},
       {{1, 8, 8}, {64, 256, 64}, {130, 264, 72}, {257, 520, 456}, {2200, 264, 24}});
    at("matmul, QKV: C to 3C", {32768, 2304, 768}, {136, 216, 72});
    at("matmul, first of the MLP: C to 4C", {32768, 3072, 768}, {136, 288, 72});
    at("matmul, second of the MLP: 4C to C", {32768, 768, 3072}, {136, 72, 288});
}

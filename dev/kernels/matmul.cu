// Matmul, step by step: from a thread per element to a kernel that stays on Hopper's tensor cores, beside cuBLASLt.
// out (M,N) = A (M,K) B (K,N), row-major: the trainer's forward pass, A its activations and B its weights (in, out).
//
// To learn here:
//   - reuse: each element of A serves N outputs. Each step brings it closer to where it is used, and brings it less
//     often: from shared memory, from registers, as fragments of a warp, then of four warps at once;
//   - tensor cores: multiply tiles, not numbers; fragments, swizzled tiles and ldmatrix;
//   - asynchrony: copies run ahead of the products, first two tiles deep (cp.async), then as producer and consumers
//     around a ring of buffers (TMA, mbarrier), and on Hopper the products themselves run on while a warp goes on;
//   - tiles: how large, in what order, and who is busy while results are stored.
//
// The floor is arithmetic, 2 M N K FLOPs. In each clock a multiprocessor of an H100 does 4096 of them in BF16 on
// tensor cores, 256 on its FP32 units, and moves 128 bytes to or from shared memory. So a warpgroup's product reads
//     64 x  64 x 16    32 clocks   2 KiB of A + 2 KiB of B   128 bytes a clock: shared memory is all used
//     64 x 128 x 16    64 clocks   2 KiB      + 4 KiB         96
//     64 x 256 x 16   128 clocks   2 KiB      + 8 KiB         80
// and a tile of two warpgroups, 64 columns of K at a time, has to be brought from the L2 cache
//    128 x 128        512 clocks  16 KiB      + 16 KiB        64 bytes a clock, for each multiprocessor
//    128 x 256       1024 clocks  16 KiB      + 32 KiB        48
// If reads and copies share the 128 bytes, tiles of 128 x 128 wait for a fifth of the time, those of 128 x 256 just
// fit: 80 + 48. Twice that tile is not to be had: its sums would fill all registers. From L2 it takes 11.6 TB/s at
// the full 989 TFLOP/s, 8.2 at 700: more than anything else here, so this is what would be next (clusters, whose
// two blocks share what they load: 32 bytes a clock; dev/cpu has none, so neither have we).
//
// Predicted, not measured, for an H100 as parts of cuBLASLt: step 1 and 2 1 %, both bounded by one load per product;
// 3 5 %, by the FP32 units; 4 50 %, as mma.sync drives Hopper's tensor cores at little over half of their rate;
// 5 75 %, 6 85 %, 7 88 %, 8 90 to 95 %, the last ones more where K is small: there are more results per product.

#include "study.h"

#include <thread>

struct Size { int M, N, K; };   // M any, N and K multiples of 8

// Where an element is in a matrix of so many columns.
__device__ __forceinline__ size_t at(int row, int column, int columns) {
    return static_cast<size_t>(row) * columns + column;
}

// ==== on ordinary cores ======================================================

// ---- 1: a thread per element ----
// Neighbouring threads read neighbours in B, and the same element of A. Each product takes two loads.

__global__ void element_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= s.N) return;
    float sum = 0;
    for (int k = 0; k < s.K; k++) sum += static_cast<float>(A[at(m, k, s.K)]) * static_cast<float>(B[at(k, n, s.N)]);
    out[at(m, n, s.N)] = static_cast<floatX>(sum);
}

// ---- 2: tiles in shared memory ----
// A block computes 32 x 32 elements: what it loads serves 32 times. Global memory rests, but each product still takes
// two loads, now from shared memory.

constexpr int SQUARE = 32;

__global__ void __launch_bounds__(SQUARE * SQUARE, 1)
shared_tiles_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    __shared__ float a[SQUARE][SQUARE], b[SQUARE][SQUARE];
    const int row = threadIdx.x / SQUARE, column = threadIdx.x % SQUARE;
    const int m = blockIdx.y * SQUARE + row, n = blockIdx.x * SQUARE + column;
    float sum = 0;
    for (int k0 = 0; k0 < s.K; k0 += SQUARE) {
        a[row][column] = m < s.M && k0 + column < s.K ? static_cast<float>(A[at(m, k0 + column, s.K)]) : 0.0f;
        b[row][column] = k0 + row < s.K && n < s.N ? static_cast<float>(B[at(k0 + row, n, s.N)]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < SQUARE; k++) sum += a[row][k] * b[k][column];
        __syncthreads();   // before a and b are loaded again
    }
    if (m < s.M && n < s.N) out[at(m, n, s.N)] = static_cast<floatX>(sum);
}

// ---- 3: tiles in registers, 128 bits a load ----
// A thread computes 8 x 8 elements: 16 numbers from shared memory, 4 at a time, make 64 products. A is stored
// transposed, so that its column is read like B's row. Of rows and columns a thread has 4 here and 4 half a tile
// away: then the 16 threads side by side read 256 bytes without a gap.

constexpr int REGISTER_TILE = 128, REGISTER_DEPTH = 16, REGISTER_BLOCK = 256;

// The i-th of a thread's 8 rows or columns.
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

// ==== on tensor cores, Ampere and up =========================================
// See ptx.cuh for fragments, tiles and their swizzle.

constexpr int DEPTH = TILE_COLUMNS;   // of K, per step

// A warp's fragment (16, columns), rounded, straight to where its corner is (m0, n0): lanes write 4 bytes each.
template <int N>
__device__ __forceinline__ void store_fragment(floatX* out, const float (&x)[N], int m0, int n0, Size s) {
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        const int m = m0 + fragment_row(e), n = n0 + fragment_column(e);
        if (m < s.M && n < s.N) *reinterpret_cast<uint32_t*>(out + at(m, n, s.N)) = pack_pair(x[e], x[e + 1]);
    }
}

// ---- 4: mma ----
// Four warps of 64 x 64 each. Tiles are copied to shared memory past the registers, the next ones while these are
// multiplied. A warp reads 4 KiB for a product of 64 x 64 x 16; without the swizzle, eight rows of a chunk would come
// from the same 4 banks, one after another.

constexpr int WARP_TILE = 64, MMA_TILE = 2 * WARP_TILE;

struct MmaStage {
    alignas(TILE_ALIGNMENT) char A[tile_bytes(MMA_TILE, DEPTH)], B[tile_bytes(DEPTH, MMA_TILE)];
};

// Starts to load a tile (ROWS, COLUMNS) of x (rows, columns), from (row0, column0) on; what lies outside becomes 0.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_part(char* tile, const floatX* x, int row0, int column0, int rows, int columns) {
    constexpr int CHUNKS = COLUMNS / PACK;
    for (int e = threadIdx.x; e < ROWS * CHUNKS; e += MMA_BLOCK) {
        const int row = row0 + e / CHUNKS, column = column0 + e % CHUNKS * PACK;
        const bool valid = row < rows && column < columns;
        copy_async(tile_chunk(tile, ROWS, e / CHUNKS, e % CHUNKS), valid ? x + at(row, column, columns) : x, valid);
    }
}

__global__ void __launch_bounds__(MMA_BLOCK, 2) mma_kernel(floatX* out, const floatX* A, const floatX* B, Size s) {
    MmaStage* stages = reinterpret_cast<MmaStage*>(dynamic_shared());   // two: in use, on its way
    const int m0 = blockIdx.y * MMA_TILE, n0 = blockIdx.x * MMA_TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 2 * WARP_TILE, column = warp % 2 * WARP_TILE;
    auto load_stage = [&](int k0) {
        MmaStage& stage = stages[k0 / DEPTH % 2];
        load_part<MMA_TILE, DEPTH>(stage.A, A, m0, k0, s.M, s.K);
        load_part<DEPTH, MMA_TILE>(stage.B, B, k0, n0, s.K, s.N);
    };
    float sum[WARP_TILE / 16][WARP_TILE / 2] = {};   // fragments (16, 64)
    load_stage(0);
    copy_async_commit();
    for (int k0 = 0; k0 < s.K; k0 += DEPTH) {
        MmaStage& stage = stages[k0 / DEPTH % 2];
        if (k0 + DEPTH < s.K) load_stage(k0 + DEPTH);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();   // everybody's part of the stage is there
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[WARP_TILE / 16][4], b[4];
            for (int i = 0; i < WARP_TILE / 16; i++)
                ldmatrix(a[i], tile_chunk(stage.A, MMA_TILE, row + 16 * i + lane % 16, 2 * k + lane / 16));
            for (int j = 0; j < WARP_TILE / 16; j++) {   // 16 columns of B are two right operands
                const int chunk = column / PACK + 2 * j + lane / 16;
                ldmatrix_transposed(b, tile_chunk(stage.B, DEPTH, 16 * k + lane % 16, chunk));
                for (int i = 0; i < WARP_TILE / 16; i++) {
                    mma_m16n8k16(sum[i] + 8 * j, a[i], b[0], b[1]);
                    mma_m16n8k16(sum[i] + 8 * j + 4, a[i], b[2], b[3]);
                }
            }
        }
        __syncthreads();   // before it is loaded again
    }
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; i++) store_fragment(out, sum[i], m0 + row + 16 * i, n0 + column, s);
}

// ==== on Hopper's tensor cores ===============================================
// One kernel, four steps. A block is a warpgroup that loads and two that multiply, 64 rows each; between them is a ring
// of stages, a stage being DEPTH columns of A and as many rows of B. B's rows are what is summed over (Major::MN), so
// weights are read as they lie. Products are asynchronous: one group of them runs while the next is started, and a
// stage is given back when the group after its own is under way.
//
// 5  Tiles of 128 x 128, a block for each. TMA does the addresses, the swizzle and what lies outside; loads are up to 6
//    stages ahead.
// 6  Tiles of 128 x 256, the widest product there is: see the table at the top. Half of the registers are sums.
// 7  Blocks stay: one per multiprocessor takes tile after tile, and the loads of the next tile begin while the results
//    of this one are stored. Tiles go in groups of 16 rows of tiles, column by column, so that the 132 tiles at work
//    form a near square of 2048 x 2112 elements, which reads the least from memory. (Row by row, the logits' N = 50304
//    would bring all of B, 77 MB and more than the L2 cache, for every 128 rows.)
// 8  Results go through shared memory: whole lines of 128 bytes to global memory, 16 bytes a lane, a quarter of the
//    stores. A TMA store would save instructions, not bytes; the tensor cores are what is short.

enum class Stores { FRAGMENTS, LINES };

template <int COLUMNS> struct MatmulTile : Warpgroups<2> {
    static constexpr int STAGES = COLUMNS == 256 ? 4 : 6, LINE_COLUMNS = 128;   // LINE_COLUMNS: stored at once
    struct Shared {
        alignas(TILE_ALIGNMENT) char A[STAGES][tile_bytes(MatmulTile::ROWS, DEPTH)],
            B[STAGES][tile_bytes(DEPTH, COLUMNS)], out[tile_bytes(MatmulTile::ROWS, LINE_COLUMNS)];
        Ring<STAGES> ring;
    };
};

// The order of tiles: groups of `together` rows of tiles, and in a group column by column.
struct TileOrder {
    int rows, columns, together;

    __host__ __device__ int count() const { return rows * columns; }
};

struct TilePlace { int row, column; };

__device__ __forceinline__ TilePlace tile_place(const TileOrder& order, int i) {
    const int first = i / (order.together * order.columns) * order.together, rest = i - first * order.columns;
    const int rows = min(order.together, order.rows - first);
    return {first + rest % rows, rest / rows};
}

// d (64 x 256) = a (64 x 16) b (16 x 256), or += if `add`: ptx.cuh's wgmma, as wide as it can be.
#ifdef CUDA_ON_CPU
void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, int add) { wgmma<256, Major::MN>(d, a, b, add); }
#else
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_64(i) SUMS_16(i), SUMS_16(i + 16), SUMS_16(i + 32), SUMS_16(i + 48)
__device__ __forceinline__ void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." PTX_OPERANDS " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
                 "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
                 "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
                 "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, "
                 "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, "
                 "p, 1, 1, 0, 1;\n}"
                 : SUMS_64(0), SUMS_64(64) : "l"(a), "l"(b), "r"(add));
}
#undef SUMS_4
#undef SUMS_16
#undef SUMS_64
#endif

// Starts sum (64, COLUMNS) += A B over one stage. `add` is false where the sum begins.
template <int COLUMNS>
__device__ __forceinline__ void start_products(float (&sum)[COLUMNS / 2], uint64_t A, uint64_t B, bool add) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        const uint64_t a = moved(A, k * static_cast<int>(sizeof(floatX))), b = moved(B, k * TILE_ROW_BYTES);
        if constexpr (COLUMNS == 256) wgmma_256(sum, a, b, k > 0 || add);
        else wgmma<COLUMNS, Major::MN>(sum, a, b, k > 0 || add);
    }
    wgmma_commit();
}

template <int COLUMNS>
__device__ __forceinline__ void matmul_producer(typename MatmulTile<COLUMNS>::Shared& shared, const TensorMap& A,
                                                const TensorMap& B, const TileOrder& order, Size s) {
    using Tile = MatmulTile<COLUMNS>;
    Turn<Tile::STAGES> turn;
    for (int i = blockIdx.x; i < order.count(); i += gridDim.x) {
        const TilePlace place = tile_place(order, i);
        const int m = place.row * Tile::ROWS, n = place.column * COLUMNS;
        for (int k = 0; k < s.K; k += DEPTH, turn.next()) {
            uint64_t* full = &shared.ring.full[turn.stage];
            wait_empty(shared.ring, turn);
            barrier_arrive_expect(full, sizeof(shared.A[0]) + sizeof(shared.B[0]));
            tensor_load(shared.A[turn.stage], &A.map, full, k, 0, m, 0);
            for (int c = 0; c < COLUMNS; c += TILE_COLUMNS)
                tensor_load(shared.B[turn.stage] + tile_bytes(DEPTH, c), &B.map, full, n + c, 0, k, 0);
        }
    }
}

// A warp's sums by way of its own rows of a tile, LINE_COLUMNS at a time.
template <int COLUMNS>
__device__ __forceinline__ void store_lines(floatX* out, const float (&sum)[COLUMNS / 2], char* tile, int tile_row,
                                            int m0, int n0, Size s) {
    using Tile = MatmulTile<COLUMNS>;
    constexpr int LINES = Tile::LINE_COLUMNS, CHUNKS = LINES / PACK;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += LINES) {
        __syncwarp();   // what was here has been read
#pragma unroll
        for (int e = 0; e < LINES / 2; e += 2) {
            char* chunk = tile_chunk(tile, Tile::ROWS, tile_row + fragment_row(e), e / 4);
            reinterpret_cast<uint32_t*>(chunk)[lane % 4] = pack_pair(sum[c / 2 + e], sum[c / 2 + e + 1]);
        }
        __syncwarp();
        constexpr int ROWS = 32 / CHUNKS;   // that the warp moves at once
        uint4 line[16 / ROWS];
        const int row = lane / CHUNKS, chunk = lane % CHUNKS, n = n0 + c + chunk * PACK;
#pragma unroll
        for (int i = 0; i < 16; i += ROWS)
            line[i / ROWS] = *reinterpret_cast<const uint4*>(tile_chunk(tile, Tile::ROWS, tile_row + row + i, chunk));
#pragma unroll
        for (int i = 0; i < 16; i += ROWS) {
            const int m = m0 + row + i;
            if (m < s.M && n < s.N) *reinterpret_cast<uint4*>(out + at(m, n, s.N)) = line[i / ROWS];
        }
    }
}

template <int COLUMNS, Stores STORES>
__device__ __forceinline__ void matmul_consumer(floatX* out, typename MatmulTile<COLUMNS>::Shared& shared,
                                                const TileOrder& order, Size s) {
    using Tile = MatmulTile<COLUMNS>;
    const int row = consumer_row();
    // From lane 0, which lets the compiler know that it is the same in all: descriptors are in uniform registers.
    const int group_row = __shfl_sync(FULL_WARP, row / GROUP_ROWS * GROUP_ROWS, 0);
    const uint64_t A = wgmma_operand(shared.A[0] + group_row * TILE_ROW_BYTES);
    const uint64_t B = wgmma_operand(shared.B[0], tile_bytes(DEPTH, TILE_COLUMNS));
    Turn<Tile::STAGES> now, read;   // read: the stage that the products before these may still read
    for (int i = blockIdx.x; i < order.count(); i += gridDim.x) {
        const TilePlace place = tile_place(order, i);
        float sum[COLUMNS / 2];
        for (int k = 0; k < s.K; k += DEPTH, now.next()) {
            wait_full(shared.ring, now);
            wgmma_fence();
            const uint64_t a = moved(A, now.stage * sizeof(shared.A[0])), b = moved(B, now.stage * sizeof(shared.B[0]));
            start_products<COLUMNS>(sum, a, b, k > 0);
            wgmma_wait<1>();
            if (k > 0) release(shared.ring, read);
        }
        wgmma_wait<0>(sum);
        release(shared.ring, read);
        const int m = place.row * Tile::ROWS + row, n = place.column * COLUMNS;
        if constexpr (STORES == Stores::FRAGMENTS) store_fragment(out, sum, m, n, s);
        else store_lines<COLUMNS>(out, sum, shared.out, row, m, n, s);
    }
}

template <int COLUMNS, Stores STORES>
__global__ void __launch_bounds__(MatmulTile<COLUMNS>::BLOCK, 1)
wgmma_kernel(floatX* out, const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, TileOrder order,
             Size s) {
    if constexpr (HAS_WGMMA) {
        using Tile = MatmulTile<COLUMNS>;
        auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic_shared());
        init_rings(Tile::WARPS, shared.ring);
        if (threadIdx.x < WARPGROUP) {
            keep_registers<Tile::PRODUCER_REGISTERS>();
            if (threadIdx.x == 0) matmul_producer<COLUMNS>(shared, A, B, order, s);
        } else {
            take_registers<Tile::CONSUMER_REGISTERS>();
            matmul_consumer<COLUMNS, STORES>(out, shared, order, s);
        }
    }
}

// A matrix (rows, columns) for the copy engine, in boxes of box_rows x 64.
TensorMap matrix_tensor_map(const floatX* x, uint64_t rows, uint64_t columns, uint32_t box_rows) {
    const uint64_t row = columns * sizeof(floatX);
    return make_tensor_map(x, {columns, 1, rows, 1}, {row, row, row * rows}, box_rows);
}

enum class Blocks { ONE_TILE, STAY };

template <int COLUMNS, Blocks BLOCKS, Stores STORES>
void matmul_wgmma(floatX* out, const floatX* A, const floatX* B, const Size& s) {
    using Tile = MatmulTile<COLUMNS>;
    constexpr bool STAY = BLOCKS == Blocks::STAY;
    const int rows = ceil_div(s.M, Tile::ROWS), columns = ceil_div(s.N, COLUMNS);
    const TileOrder order = {rows, columns, STAY ? 16 : 1};
    const int blocks = STAY ? std::min(order.count(), device.properties.multiProcessorCount) : order.count();
    launch("matmul_wgmma", wgmma_kernel<COLUMNS, STORES>, blocks, Tile::BLOCK, sizeof(typename Tile::Shared), out,
           matrix_tensor_map(A, s.M, s.K, Tile::ROWS), matrix_tensor_map(B, s.K, s.N, DEPTH), order, s);
}

typedef const Array<floatX> Matrix;

void steps_on_tensor_cores(Case& c, Matrix& out, Matrix& A, Matrix& B, const Size& s) {
    constexpr Blocks ONE_TILE = Blocks::ONE_TILE, STAY = Blocks::STAY;
    constexpr Stores FRAGMENTS = Stores::FRAGMENTS, LINES = Stores::LINES;
    if (has_tensor_cores(TensorCores::MMA))
        c.step("mma: tensor cores, copies run ahead", [&] {
            const dim3 tiles(ceil_div(s.N, MMA_TILE), ceil_div(s.M, MMA_TILE));
            launch("step 4", mma_kernel, tiles, MMA_BLOCK, 2 * sizeof(MmaStage), out, A, B, s);
        });
    if (!has_tensor_cores(TensorCores::WGMMA)) return;
    c.step("wgmma, TMA: a producer, two consumers", [&] { matmul_wgmma<128, ONE_TILE, FRAGMENTS>(out, A, B, s); });
    c.step("tiles of 128 x 256", [&] { matmul_wgmma<256, ONE_TILE, FRAGMENTS>(out, A, B, s); });
    c.step("blocks stay, tiles in an order for L2", [&] { matmul_wgmma<256, STAY, FRAGMENTS>(out, A, B, s); });
    c.step("results by way of shared memory", [&] { matmul_wgmma<256, STAY, LINES>(out, A, B, s); });
}

#else

typedef const Array<floatX> Matrix;

void steps_on_tensor_cores(Case&, Matrix&, Matrix&, Matrix&, const Size&) {}

#endif

// ==== the study ==============================================================

// The plain loop, a part of the rows for each of the host's cores: at full size it takes 10^11 products.
void matmul_loop(Values& out, const Values& A, const Values& B, size_t M, size_t N, size_t K) {
    const size_t workers = std::min<size_t>(M, std::max(1u, std::thread::hardware_concurrency()));
    std::vector<std::thread> threads;
    for (size_t w = 0; w < workers; w++)
        threads.emplace_back([&, w] {
            for (size_t m = w; m < M; m += workers)
                for (size_t k = 0; k < K; k++)
                    for (size_t n = 0; n < N; n++) out[m * N + n] += A[m * K + k] * B[k * N + n];
        });
    for (std::thread& thread : threads) thread.join();
}

void forward(Study& study, const char* title, const Size& s) {
    const size_t M = s.M, N = s.N, K = s.K;
    Case c(study, title, format("M %zu, N %zu, K %zu", M, N, K), flops(2.0 * M * N * K));
    Matrix A = c.input<floatX>(M * K), B = c.input<floatX>(K * N), out = c.output<floatX>("out", M * N);
    matmul_loop(out.expected, A.host, B.host, M, N, K);
    c.step("a thread per element", [&] {
        launch("step 1", element_kernel, dim3(ceil_div(N, BLOCK), M), BLOCK, 0, out, A, B, s);
    });
    c.step("tiles in shared memory", [&] {
        const dim3 tiles(ceil_div(N, SQUARE), ceil_div(M, SQUARE));
        launch("step 2", shared_tiles_kernel, tiles, SQUARE * SQUARE, 0, out, A, B, s);
    });
    c.step("tiles in registers, 128 bits a load", [&] {
        const dim3 tiles(ceil_div(N, REGISTER_TILE), ceil_div(M, REGISTER_TILE));
        launch("step 3", register_tiles_kernel, tiles, REGISTER_BLOCK, 0, out, A, B, s);
    });
    steps_on_tensor_cores(c, out, A, B, s);
    c.step("train_gpt.cu: cuBLASLt", [&] {
        matmul({out, A, B, {M, N, K, Op::AS_IS, Op::AS_IS, FLOATX, Into::ASSIGN, Epilogue::NONE}});
    });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        auto at = [&](const char* title, const Size& timed, const Size& counted, std::initializer_list<Size> odd = {}) {
            study.at_sizes(odd, timed, counted, [&](const Size& size) { forward(study, title, size); });
        };
        at("matmul", {4096, 4096, 4096}, {136, 264, 200},
           {{1, 8, 8}, {64, 256, 64}, {130, 264, 72}, {257, 520, 456}, {2200, 264, 24}});
        at("matmul to q, k and v: C to 3C", {32768, 2304, 768}, {136, 216, 72});
        at("matmul into the MLP: C to 4C", {32768, 3072, 768}, {136, 288, 72});
        at("matmul out of the MLP: 4C to C", {32768, 768, 3072}, {136, 72, 288});
    });
}

// Attention on Hopper's tensor cores (sm_90a): the function of train_gpt.cu's section "attention" (formulas and shapes
// there), with wgmma, the Tensor Memory Accelerator (TMA) and specialised warpgroups.
//
// Map: tile scheduler · warpgroups, loads, products · forward · dQ (dq_consumer) · dK and dV (dkv_consumer) · launchers
//
// from      Shah et al. 2024, "FlashAttention-3", algorithms 1 and 2; Dao 2023, "FlashAttention-2"
// mapping   Persistent blocks, one per multiprocessor. A work tile is TILE_Q queries of a head in forward and dQ, and
//           TILE_K keys in dK/dV. Each block fetches the index of its next work tile from a counter in device memory,
//           which balances the load. Warpgroup 0 is the producer: one thread starts TMA loads into rings of stages in
//           shared memory. The others are consumers: warpgroup 1 owns rows 0..63 of a work tile, its warp 0 rows 0..15.
//           Forward with 2 stages and 2 consumers (heads of 64 have 3 of each):
//
//  time         -------------------------------------------------------------------------------------------->
//  producer     K0 Q V0 K1 V1 K2   waits until v.empty[0]                         V2 K3   waits until v.empty[1]
//                       ^ k.full[0]                                               ^ v.empty[0]: both have released V0
//  warpgroup 1          |S0 |softmax 0  |S1, O+=P0 V0 |  softmax 1  |S2, O+=P1 V1 |  softmax 2  |
//                                             arrive \            / arrive
//  warpgroup 2          |S0 |softmax 0  |    wait     |S1, O+=P0 V0 |  softmax 1  |S2, O+=P1 V1 |  ...
//  tensor cores         |S0 |           |warpgroup 1  |warpgroup 2  |warpgroup 1  |warpgroup 2  |  ...
//
//           K and V each have a ring. Two mbarriers guard stage s. Consumers wait for full[s], which completes when the
//           bytes of a load have arrived. The producer waits for empty[s], which completes when all consumer warps have
//           called release(): for K after S, for V after O. An OrderedBarrier makes the warpgroups issue their products
//           in a fixed cyclic order, so that the products of one overlap with the softmax of another. A warp's 16 rows
//           of scores are a fragment in its registers, so P and dS become operands of the next product without leaving
//           them.
//           The rows that a block owns have a ring, too: those of the next work tile are loaded during the current one
// sums      dQ and dK/dV also sum the columns of each 64 rows that they write, in a fixed order: 14 shuffles per 64
//           columns of a warp, then 4 warps in shared memory. add_partials adds them to the gradient of qkv's bias
// cost      compute: 2 products forward, 7 backward, of T*T/2*HS per head (dev/kernels/attention.cu estimates a
//           backward of 5, whose results depend on the order of blocks)
// needs     the counter is 0 before each launch; the kernels leave it at 0
// shared    at most 227 KiB. Rings of tiles: 3 stages for heads of 64, 2 for larger ones. Forward, dQ and dK/dV use
//           169, 177 and 180 KiB for heads of 64, and 225, 225 and 226 KiB for larger ones
#pragma once

#include "attention_mma.cuh"   // softmax_step(), probabilities(), ... of a fragment of scores

// ---- tile scheduler

// The order in which a matrix of tiles is processed: in groups of `group_rows` rows, and each group column by column.
struct TileOrder {
    struct Place { unsigned row, column; };
    unsigned rows, columns, group_rows;

    __host__ __device__ unsigned count() const { return rows * columns; }
    __device__ Place place(unsigned i) const {
        const unsigned first = i / (group_rows * columns) * group_rows, rest = i - first * columns;
        const unsigned rows_in_group = min(group_rows, rows - first);
        return {first + rest % rows_in_group, rest / rows_in_group};
    }
};

// Hands out work tiles. The longest tiles come first, and a block that has finished fetches the next one, so all blocks
// end at about the same time. Heads are processed in groups whose tensors fit in the L2 cache.
struct TileScheduler {
    TileOrder order;   // rows are heads, columns the tiles of a head from long to short
    unsigned NH;
    int* counter;      // in device memory; 0 between launches

    __host__ __device__ unsigned count() const { return order.count(); }

    // Indices of a block's first and next work tiles; an index of count() or more ends the block. The blocks together
    // call fetch_next() count() times, once for each work tile, after which the counter has wrapped to 0.
    __device__ unsigned first() const { return blockIdx.x; }
    __device__ unsigned fetch_next() const { return gridDim.x + atomic_inc(counter, count() - 1); }
};

struct WorkTile { int tile, h, b; };   // tile 0 is the longest of head h in batch b

__device__ __forceinline__ WorkTile work_tile(const TileScheduler& scheduler, unsigned i) {
    const TileOrder::Place place = scheduler.order.place(i);
    return {int(place.column), int(place.row % scheduler.NH), int(place.row / scheduler.NH)};
}

// Shared memory through which the producer passes the index of the block's next work tile to the consumers.
struct NextTile {
    unsigned index;
    Ring<1> ring;
};

// Fetches, publishes and returns the next index. The producer calls it after it has started all loads of a work tile:
// earlier, a busy block would reserve a tile that another block could start.
__device__ __forceinline__ unsigned publish_next(NextTile& next, PipelineState<1>& state,
                                                 const TileScheduler& scheduler) {
    const unsigned index = scheduler.fetch_next();
    wait_empty(next.ring, state);
    next.index = index;
    mbarrier_arrive(&next.ring.full[0]);
    state.advance();
    return index;
}
// Returns the next index; called by consumers. The broadcast from lane 0 makes sure that all lanes have read the index
// before the release, and tells the compiler that it is uniform.
__device__ __forceinline__ unsigned receive_next(NextTile& next, PipelineState<1>& state) {
    wait_full(next.ring, state);
    const unsigned index = __shfl_sync(FULL_WARP, next.index, 0);
    release(next.ring, state);
    return index;
}

// ---- warpgroups, loads, products

constexpr int BOX_ROWS = 64;   // rows that one TMA load copies

// Stages of a ring: as many as fit in shared memory (227 KiB for a block) in all three kernels.
constexpr int stages(int HS) { return HS == 64 ? 3 : 2; }

// Runs produce() in warpgroup 0 and consume() in the others. consume must capture outputs by value: with captures by
// reference, nvcc 12.4 emits generic stores instead of global ones.
template <typename Shape, typename Produce, typename Consume>
__device__ __forceinline__ void specialise_warpgroups(Produce produce, Consume consume) {
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<Shape::PRODUCER_REGISTERS>();
        produce();
    } else {
        setmaxnreg_inc<Shape::CONSUMER_REGISTERS>();
        consume();
    }
}

// Starts to load rows [row0, row0 + rows) of a head into a tile; `full` counts the bytes. In qkv, the first NH heads
// belong to q, the next NH to k, the last NH to v.
template <int HS>
__device__ __forceinline__ void tma_load_tile(char* tile, int rows, const TensorMap& from, uint64_t* full, int head,
                                              int row0, int b) {
    for (int c = 0; c < column_blocks(HS); c++)
        for (int r = 0; r < rows; r += BOX_ROWS)
            tma_load(tile + (c * rows + r) * TILE_ROW_BYTES, &from.map, full, c * TILE_COLUMNS, head, row0 + r, b);
}

// The accumulator of a warpgroup's (64, HS) output, in whole blocks of 64 columns.
__host__ __device__ constexpr int output_columns(int HS) { return column_blocks(HS) * TILE_COLUMNS; }
template <int HS> using HeadAccumulator = float[output_columns(HS) / 2];

// Starts S (64, N) = A B^T. A is the descriptor of 64 rows in a tile of a_rows rows, B that of a tile (N, HS).
template <int HS, int N>
__device__ __forceinline__ void start_scores(float (&S)[N / 2], uint64_t A, int a_rows, uint64_t B) {
    constexpr int STEP_BYTES = 32;   // 16 columns, the k of one instruction
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
        wgmma<N, Major::K>(S, offset_by(A, k / 4 * a_rows * TILE_ROW_BYTES + k % 4 * STEP_BYTES),
                           offset_by(B, k / 4 * N * TILE_ROW_BYTES + k % 4 * STEP_BYTES), k > 0);
    wgmma_commit();
}

// Starts O (64, HS) += P (64, N) B, with P in registers and the descriptor B of a tile (N, HS). Only the first COLUMNS
// columns of P, and rows of B, are multiplied.
template <int HS, int N, int COLUMNS = N>
__device__ __forceinline__ void start_outputs(HeadAccumulator<HS>& O, const uint32_t (&P)[N / 16][4], uint64_t B) {
    const uint64_t rows = HS > TILE_COLUMNS ? mn_major(B, N * TILE_ROW_BYTES) : B;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        wgmma<output_columns(HS), Major::MN>(O, P[k], offset_by(rows, k * 16 * TILE_ROW_BYTES), 1);
    wgmma_commit();
}

// ---- forward

template <int HS> struct ForwardShape : Warpgroups<HS == 64 ? 3 : 2> {
    static constexpr int TILE_Q = ForwardShape::ROWS, TILE_K = 128, STAGES = stages(HS), OWN_STAGES = 2;
    struct Shared {
        alignas(TILE_ALIGNMENT) char Q[OWN_STAGES][tile_bytes(TILE_Q, HS)], K[STAGES][tile_bytes(TILE_K, HS)],
            V[STAGES][tile_bytes(TILE_K, HS)], O[tile_bytes(TILE_Q, HS)];
        Ring<OWN_STAGES> q;
        Ring<STAGES> k, v;
        NextTile next;
    };
};

// Returns the first query of a work tile (forward, dQ). Tile 0 has the last queries and so most keys. Tiles are aligned
// to the end of the sequence: the one with out-of-range rows, which are before query 0, has the fewest keys.
__device__ __forceinline__ int first_query(const WorkTile& work, int rows, int T) { return T - (work.tile + 1) * rows; }

// Returns the number of key tiles (of tile_k keys) that queries [query0, query0 + rows) attend to; at least 1.
__device__ __forceinline__ int key_tiles(int query0, int rows, int tile_k) {
    return max(1, (query0 + rows + tile_k - 1) / tile_k);
}

// Releases `count` tiles of K and V that only other warpgroups read.
template <typename Shared, int STAGES, int CONSUMERS>
__device__ __forceinline__ void release_tiles(Shared& shared, PipelineState<STAGES>& k, PipelineState<STAGES>& v,
                                              int count, const OrderedBarrier<CONSUMERS>& order) {
    for (; count > 0; count--) {
        order.wait();             // the other warpgroups wait for one arrival per tile
        order.arrive();
        wait_full(shared.v, v);   // K was loaded before V
        __syncwarp();             // all lanes have seen this phase: after the release, the next one may complete
        release(shared.k, k);
        release(shared.v, v);
    }
}

// The producer of forward and dQ. For each work tile it calls load_queries() and streams all tiles of K and V.
template <int HS, typename Shape, typename LoadQueries>
__device__ __forceinline__ void forward_dq_producer(typename Shape::Shared& shared, const TensorMap& qkv,
                                                    const TileScheduler& scheduler, int T, LoadQueries load_queries) {
    PipelineState<1> next_work;
    PipelineState<Shape::OWN_STAGES> q;
    PipelineState<Shape::STAGES> kv;   // position in shared.k and shared.v
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = publish_next(shared.next, next_work, scheduler)) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(work, Shape::TILE_Q, T), tiles = key_tiles(query0, Shape::TILE_Q, Shape::TILE_K);
        auto load = [&](Ring<Shape::STAGES>& ring, char* tile, int head, int j) {
            uint64_t* full = &ring.full[kv.stage];
            wait_empty(ring, kv);
            mbarrier_arrive_expect_tx(full, sizeof(shared.K[0]));
            tma_load_tile<HS>(tile, Shape::TILE_K, qkv, full, head, j * Shape::TILE_K, work.b);
        };
        load(shared.k, shared.K[kv.stage], scheduler.NH + work.h, 0);
        wait_empty(shared.q, q);   // released before the consumers asked for the work tile before this one
        load_queries(work, query0, q.stage);
        q.advance();
        for (int j = 0;;) {
            load(shared.v, shared.V[kv.stage], 2 * scheduler.NH + work.h, j);
            kv.advance();
            if (++j == tiles) break;
            load(shared.k, shared.K[kv.stage], scheduler.NH + work.h, j);
        }
    }
}

// A consumer warpgroup of forward. O += P V of tile j - 1 starts after S of tile j and overlaps with softmax j.
template <int HS>
__device__ __forceinline__ void forward_consumer(const Out<e4m3>& out, float* lse,
                                                 typename ForwardShape<HS>::Shared& shared,
                                                 const TileScheduler& scheduler, int T) {
    using Shape = ForwardShape<HS>;
    constexpr int TILE_K = Shape::TILE_K;
    const int row = consumer_row(), wg_row = warpgroup_row();   // first rows of this warp and this warpgroup
    const uint64_t Q = wgmma_descriptor(shared.Q[0] + wg_row * TILE_ROW_BYTES);
    const uint64_t K = wgmma_descriptor(shared.K[0]), V = wgmma_descriptor(shared.V[0]);
    const float scale = rsqrtf(static_cast<float>(HS)) * LOG2E;
    const OrderedBarrier<Shape::CONSUMERS> order(wg_row / WGMMA_M);
    PipelineState<1> next_work;
    PipelineState<Shape::OWN_STAGES> q;
    PipelineState<Shape::STAGES> k, v;
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = receive_next(shared.next, next_work)) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(work, Shape::TILE_Q, T), wg_query0 = query0 + wg_row;
        const int loaded = key_tiles(query0, Shape::TILE_Q, TILE_K), tiles = key_tiles(wg_query0, WGMMA_M, TILE_K);
        const bool half_of_last_tile = wg_query0 + WGMMA_M <= tiles * TILE_K - TILE_K / 2;   // the rest is masked
        float S[TILE_K / 2], rescale[2];
        HeadAccumulator<HS> O = {};
        uint32_t P[TILE_K / 16][4];
        RowState rows;
        auto start_tile = [&] {
            wgmma_fence(S);
            start_scores<HS, TILE_K>(S, offset_by(Q, q.stage * sizeof(shared.Q[0])), Shape::TILE_Q,
                                     offset_by(K, k.stage * sizeof(shared.K[0])));                       // S = Q K^T
        };
        auto softmax = [&](int j) {
            release(shared.k, k);
            if (j + 1 == tiles) release(shared.q, q);
            const bool crosses_diagonal = (j + 1) * TILE_K > query0 + row + 1;
            if (crosses_diagonal) mask_scores<Queries::ROWS>(S, query0 + row, j * TILE_K);
            softmax_step(S, rows, rescale, scale);
        };
        wait_full(shared.q, q);
        wait_full(shared.k, k);
        start_tile();
        wgmma_wait<0>(S);
        softmax(0);
        to_operands(P, S);
        for (int j = 1; j < tiles; j++) {
            wait_full(shared.k, k);
            wait_full(shared.v, v);
            order.wait();
            start_tile();
            wgmma_fence(O, P);
            start_outputs<HS, TILE_K>(O, P, offset_by(V, v.stage * sizeof(shared.V[0])));   // O += P V of tile j - 1
            order.arrive();
            wgmma_wait<1>(S);
            softmax(j);
            PipelineState<Shape::STAGES> next = v;
            next.advance();
            wait_full(shared.v, next);   // V of tile j; this branch holds the next wait in place, see wgmma_wait
            wgmma_wait<0>(O);
            release(shared.v, v);
            multiply_rows(O, rescale);
            to_operands(P, S);
        }
        wait_full(shared.v, v);
        const uint64_t last_V = offset_by(V, v.stage * sizeof(shared.V[0]));
        wgmma_fence(O, P);
        if (half_of_last_tile) start_outputs<HS, TILE_K, TILE_K / 2>(O, P, last_V);
        else start_outputs<HS, TILE_K>(O, P, last_V);
        const float sum[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])},
                    inverse[2] = {reciprocal_approx(sum[0]), reciprocal_approx(sum[1])};
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        store_lse(lse + head.rows, rows, sum, query0 + row, T, scale);
        wgmma_wait<0>(O);
        release(shared.v, v);
        release_tiles(shared, k, v, loaded - tiles, order);
        multiply_rows(O, inverse);
        store_rows<HS>(out.from(head.out), head.C, query0 + row, T, O, shared.O, Shape::TILE_Q, row);
    }
}

template <int HS>
__global__ void __launch_bounds__(ForwardShape<HS>::BLOCK, 1)
attention_forward_wgmma_kernel(Out<e4m3> out, float* lse, const __grid_constant__ TensorMap qkv,
                               TileScheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = ForwardShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.q, shared.k, shared.v, shared.next.ring);
        auto load_queries = [&](const WorkTile& work, int query0, int stage) {
            uint64_t* full = &shared.q.full[stage];
            mbarrier_arrive_expect_tx(full, sizeof(shared.Q[0]));
            tma_load_tile<HS>(shared.Q[stage], Shape::TILE_Q, qkv, full, work.h, query0, work.b);
        };
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x == 0) forward_dq_producer<HS, Shape>(shared, qkv, scheduler, T, load_queries); },
            [&, out] { forward_consumer<HS>(out, lse, shared, scheduler, T); });
    }
}

// ---- backward: shared by dQ and dK/dV

// Stores the column sums of each of a warpgroup's outputs x (64, HS) to `sums` (HS), sums + stride, ...: partial sums
// of the gradient of qkv's bias. Out-of-range rows of x are 0, because TMA has loaded zeros. A warp stages the sums of
// its 16 rows in its own rows of `tile`. The next work tile's OrderedBarrier::wait() is after all reads of them.
template <int HS, typename Shape, typename... Outputs>
__device__ __forceinline__ void store_column_sums(float* sums, size_t stride, char* tile, int wg_row,
                                                  const Outputs&... x) {
    const int lane = threadIdx.x % 32, column = threadIdx.x % WARPGROUP;
    auto staged = [tile](int row, int c, int output) {   // row: the warp's first
        char* const rows = tile + (c / TILE_COLUMNS * Shape::ROWS + row) * TILE_ROW_BYTES;
        return reinterpret_cast<float*>(rows) + output * TILE_COLUMNS + c % TILE_COLUMNS;
    };
    auto stage = [&](const HeadAccumulator<HS>& fragment, int output) {
        for (int c = 0; c < output_columns(HS); c += TILE_COLUMNS) {
            float sum[2];
            column_sums(sum, fragment + c / 2);
            memcpy(staged(consumer_row(), c + 2 * lane, output), sum, sizeof(sum));
        }
    };
    int output = 0;
    __syncwarp();   // all lanes have read the rows that were staged here
    (stage(x, output++), ...);
    named_barrier_sync(1 + Shape::CONSUMERS + wg_row / WGMMA_M, WARPGROUP);   // OrderedBarrier uses those before
    for (int i = 0; i < static_cast<int>(sizeof...(x)) && column < HS; i++) {
        float sum = 0;
        for (int row = 0; row < WGMMA_M; row += 16) sum += *staged(wg_row + row, column, i);
        sums[i * stride + column] = sum;
    }
}

// Returns the first partial sum of head h for rows [row0, row0 + 64) of sequence b, in row b * ceil(T / 64) +
// ceil(row0 / 64) of `partials`. part: 0 for dQ, 1 for dK
__device__ __forceinline__ float* partial_sums(float* partials, const Head& head, const WorkTile& work, int part,
                                               int row0, int T, int HS) {
    const size_t row = static_cast<size_t>(work.b) * ((T + WGMMA_M - 1) / WGMMA_M) + (row0 + WGMMA_M - 1) / WGMMA_M;
    return partials + row * head.stride + part * head.C + work.h * HS;
}

// The descriptors of a ring's tiles, by stage: of rows from `row` on.
template <int BYTES> struct RingDescriptors {
    uint64_t first;
    template <int STAGES>
    __device__ __forceinline__ explicit RingDescriptors(const char (&tiles)[STAGES][BYTES], int row = 0)
        : first(wgmma_descriptor(tiles[0] + row * TILE_ROW_BYTES)) {}
    __device__ __forceinline__ uint64_t operator[](int stage) const { return offset_by(first, stage * BYTES); }
};

// ---- dQ

template <int HS> struct DqShape : Warpgroups<2> {
    static constexpr int TILE_Q = DqShape::ROWS, TILE_K = HS == 64 ? 128 : 64, STAGES = stages(HS), OWN_STAGES = 2;
    struct Shared {
        alignas(TILE_ALIGNMENT) char Q[OWN_STAGES][tile_bytes(TILE_Q, HS)], dO[OWN_STAGES][tile_bytes(TILE_Q, HS)],
            K[STAGES][tile_bytes(TILE_K, HS)], V[STAGES][tile_bytes(TILE_K, HS)], dQ[tile_bytes(TILE_Q, HS)];
        Ring<OWN_STAGES> q;   // Q and dO
        Ring<STAGES> k, v;
        NextTile next;
    };
};

// A consumer warpgroup of dQ. dQ += dS K of tile j - 1 overlaps with S and dP of tile j. A warpgroup takes its turn in
// `order` once per tile, for these three products.
template <int HS>
__device__ __forceinline__ void dq_consumer(const Out<e5m2>& dqkv, float* partials, float* D_out, const floatX* out,
                                            const float* lse_in, typename DqShape<HS>::Shared& shared,
                                            const TileScheduler& scheduler, int T) {
    using Shape = DqShape<HS>;
    constexpr int TILE_K = Shape::TILE_K;
    const RingDescriptors Q(shared.Q, warpgroup_row()), dO(shared.dO, warpgroup_row());
    const RingDescriptors K(shared.K), V(shared.V);
    const float scale = rsqrtf(static_cast<float>(HS));
    const OrderedBarrier<Shape::CONSUMERS> order(warpgroup_row() / WGMMA_M);
    const int row = consumer_row(), wg_row = order.group * WGMMA_M;   // first rows of this warp and this warpgroup
    PipelineState<1> next_work;
    PipelineState<Shape::OWN_STAGES> q;
    PipelineState<Shape::STAGES> k, v;
    QueryStatistics<HS> statistics;
    auto load_statistics = [&](unsigned i) {
        const WorkTile work = work_tile(scheduler, i);
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        statistics.load(lse_in + head.rows, out + head.out, first_query(work, Shape::TILE_Q, T) + row, T, head.C);
    };
    load_statistics(scheduler.first());
    for (unsigned i = scheduler.first(), next; i < scheduler.count(); i = next) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(work, Shape::TILE_Q, T);
        const int loaded = key_tiles(query0, Shape::TILE_Q, TILE_K),
                  tiles = key_tiles(query0 + wg_row, WGMMA_M, TILE_K);
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        float S[TILE_K / 2], dP[TILE_K / 2], lse[2], D[2];
        HeadAccumulator<HS> dQ = {};
        uint32_t dS[TILE_K / 16][4];
        PipelineState<Shape::STAGES> now = k;   // K of tile j; k is one tile behind: dQ still reads that one
        auto start_tile = [&] {
            wait_full(shared.k, now);
            wait_full(shared.v, v);
            wgmma_fence(S, dP);
            start_scores<HS, TILE_K>(S, Q[q.stage], Shape::TILE_Q, K[now.stage]);    // S = Q K^T
            start_scores<HS, TILE_K>(dP, dO[q.stage], Shape::TILE_Q, V[v.stage]);    // dP = dO V^T
            order.arrive();
        };
        wgmma_fence(dQ);                              // dQ is 0 before the first product starts
        wait_full(shared.q, q);
        order.wait();
        start_tile();
        for (int h = 0; h < 2; h++) lse[h] = statistics.lse[h] * LOG2E;
        statistics.dot(D, D_out + head.rows, query0 + row, T, [&](int r, int chunk) {
            return reinterpret_cast<const floatX*>(tile_chunk(shared.dO[q.stage], Shape::TILE_Q, row + r, chunk));
        });
        for (int j = 0;;) {
            wgmma_wait<1>(S);                         // and dQ of tile j - 1
            if (j > 0) release(shared.k, k);
            const bool crosses_diagonal = (j + 1) * TILE_K > query0 + row + 1;
            if (crosses_diagonal) mask_scores<Queries::ROWS>(S, query0 + row, j * TILE_K);
            probabilities(S, scale * LOG2E, [&](int e) { return lse[e / 2 % 2]; });
            wait_full(shared.v, v);                   // already full: the branch holds the next wait, see wgmma_wait
            wgmma_wait<0>(dP);
            release(shared.v, v);
            if (j + 1 == tiles) release(shared.q, q);
            score_gradients(dP, S, [&](int e) { return D[e / 2 % 2]; });
            to_operands(dS, dP);
            const bool last = ++j == tiles;
            if (!last) order.wait();
            wgmma_fence(dQ, dS);
            start_outputs<HS, TILE_K>(dQ, dS, K[now.stage]);                         // dQ += dS K
            now.advance();
            if (last) break;
            start_tile();
        }
        wgmma_wait<0>(dQ);
        release(shared.k, k);
        release_tiles(shared, k, v, loaded - tiles, order);
        next = receive_next(shared.next, next_work);
        if (next < scheduler.count()) load_statistics(next);   // during the stores
        const float factor[2] = {scale, scale};
        multiply_rows(dQ, factor);
        store_rows<HS>(dqkv.from(head.qkv), head.stride, query0 + row, T, dQ, shared.dQ, Shape::TILE_Q, row);
        if (partials && query0 + wg_row > -WGMMA_M)
            store_column_sums<HS, Shape>(partial_sums(partials, head, work, 0, query0 + wg_row, T, HS), 0, shared.dQ,
                                         wg_row, dQ);
    }
}

// Writes dQ, its column sums unless partials is null, and D for attention_backward_dkv_wgmma_kernel.
template <int HS>
__global__ void __launch_bounds__(DqShape<HS>::BLOCK, 1)
    attention_backward_dq_wgmma_kernel(Out<e5m2> dqkv, float* partials, float* D_out,
                                       const __grid_constant__ TensorMap qkv,
                                       const __grid_constant__ TensorMap dout, const floatX* out, const float* lse,
                                       TileScheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = DqShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.q, shared.k, shared.v, shared.next.ring);
        auto load_queries = [&](const WorkTile& work, int query0, int stage) {
            uint64_t* full = &shared.q.full[stage];
            mbarrier_arrive_expect_tx(full, sizeof(shared.Q[0]) + sizeof(shared.dO[0]));
            tma_load_tile<HS>(shared.Q[stage], Shape::TILE_Q, qkv, full, work.h, query0, work.b);
            tma_load_tile<HS>(shared.dO[stage], Shape::TILE_Q, dout, full, work.h, query0, work.b);
        };
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x == 0) forward_dq_producer<HS, Shape>(shared, qkv, scheduler, T, load_queries); },
            [&, dqkv, partials] { dq_consumer<HS>(dqkv, partials, D_out, out, lse, shared, scheduler, T); });
    }
}

// ---- dK and dV

template <int HS> struct DkvShape : Warpgroups<2> {
    static constexpr int TILE_K = DkvShape::ROWS, TILE_Q = HS == 64 ? 128 : 64, STAGES = stages(HS), OWN_STAGES = 2;
    struct Shared {
        alignas(TILE_ALIGNMENT) char K[OWN_STAGES][tile_bytes(TILE_K, HS)], V[OWN_STAGES][tile_bytes(TILE_K, HS)],
            Q[STAGES][tile_bytes(TILE_Q, HS)], dO[STAGES][tile_bytes(TILE_Q, HS)], out[tile_bytes(TILE_K, HS)];
        float lse[STAGES][TILE_Q], D[STAGES][TILE_Q];
        Ring<OWN_STAGES> k;       // K and V
        Ring<STAGES, 1 + 32> q;   // Q and dO by TMA, lse and D by the 32 lanes of a warp
        NextTile next;
    };
};

// The producer of dK and dV: warp 0. Lane 0 starts the TMA loads. All lanes copy lse and D, because TMA needs rows that
// start at a multiple of 16 bytes.
template <int HS>
__device__ __forceinline__ void dkv_producer(typename DkvShape<HS>::Shared& shared, const TensorMap& qkv,
                                             const TensorMap& dout, const float* lse, const float* D,
                                             const TileScheduler& scheduler, int T) {
    using Shape = DkvShape<HS>;
    const int lane = threadIdx.x;
    PipelineState<1> next_work;
    PipelineState<Shape::OWN_STAGES> k;
    PipelineState<Shape::STAGES> q;
    auto next_of_warp = [&] {
        return __shfl_sync(FULL_WARP, lane == 0 ? publish_next(shared.next, next_work, scheduler) : 0, 0);
    };
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = next_of_warp()) {
        const WorkTile work = work_tile(scheduler, i);
        const int key0 = work.tile * Shape::TILE_K;
        const size_t first = head_of(work.b, work.h, scheduler.NH, T, HS).rows;
        wait_empty(shared.k, k);
        if (lane == 0) {
            uint64_t* full = &shared.k.full[k.stage];
            const int head = scheduler.NH + work.h;
            mbarrier_arrive_expect_tx(full, sizeof(shared.K[0]) + sizeof(shared.V[0]));
            tma_load_tile<HS>(shared.K[k.stage], Shape::TILE_K, qkv, full, head, key0, work.b);
            tma_load_tile<HS>(shared.V[k.stage], Shape::TILE_K, qkv, full, head + scheduler.NH, key0, work.b);
        }
        k.advance();
        for (int query0 = key0; query0 < T; query0 += Shape::TILE_Q, q.advance()) {
            uint64_t* full = &shared.q.full[q.stage];
            float my_lse[Shape::TILE_Q / 32], my_D[Shape::TILE_Q / 32];   // loaded during the wait for the stage
            for (int r = 0; r < Shape::TILE_Q / 32; r++) {
                const int query = query0 + r * 32 + lane;
                my_lse[r] = query < T ? lse[first + query] : 0.0f;
                my_D[r] = query < T ? D[first + query] : 0.0f;
            }
            wait_empty(shared.q, q);
            if (lane == 0) {
                mbarrier_arrive_expect_tx(full, sizeof(shared.Q[0]) + sizeof(shared.dO[0]));
                tma_load_tile<HS>(shared.Q[q.stage], Shape::TILE_Q, qkv, full, work.h, query0, work.b);
                tma_load_tile<HS>(shared.dO[q.stage], Shape::TILE_Q, dout, full, work.h, query0, work.b);
            }
            for (int r = 0; r < Shape::TILE_Q / 32; r++) {
                shared.lse[q.stage][r * 32 + lane] = my_lse[r] * LOG2E;
                shared.D[q.stage][r * 32 + lane] = my_D[r];
            }
            mbarrier_arrive(full);
        }
    }
}

// A consumer warpgroup of dK and dV. dV += P dO and dK += dS Q of one tile overlap with S of the next; the warpgroup
// issues them in one turn of `order`.
template <int HS>
__device__ __forceinline__ void dkv_consumer(const Out<e5m2>& dqkv, float* partials,
                                             typename DkvShape<HS>::Shared& shared, const TileScheduler& scheduler,
                                             int T) {
    using Shape = DkvShape<HS>;
    constexpr int TILE_Q = Shape::TILE_Q;
    const RingDescriptors K(shared.K, warpgroup_row()), V(shared.V, warpgroup_row());
    const RingDescriptors Q(shared.Q), dO(shared.dO);
    const float scale = rsqrtf(static_cast<float>(HS));
    const OrderedBarrier<Shape::CONSUMERS> order(warpgroup_row() / WGMMA_M);
    const int row = consumer_row(), wg_row = order.group * WGMMA_M;   // first rows of this warp and this warpgroup
    PipelineState<1> next_work;
    PipelineState<Shape::OWN_STAGES> k;
    PipelineState<Shape::STAGES> q, read;   // read: one tile behind q; dV and dK still read it
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = receive_next(shared.next, next_work)) {
        const WorkTile work = work_tile(scheduler, i);
        const int key0 = work.tile * Shape::TILE_K;
        float S[TILE_Q / 2], dP[TILE_Q / 2];
        HeadAccumulator<HS> dK = {}, dV = {};
        uint32_t P[TILE_Q / 16][4], dS[TILE_Q / 16][4];
        auto start_tile = [&] {
            wait_full(shared.q, q);
            wgmma_fence(S);
            start_scores<HS, TILE_Q>(S, K[k.stage], Shape::TILE_K, Q[q.stage]);      // S = K Q^T
            order.arrive();
        };
        // Queries do not attend to later keys. A warpgroup skips the first tile if all queries in it precede the
        // warpgroup's keys, unless it is the only tile.
        const bool may_skip = TILE_Q == WGMMA_M && key0 + WGMMA_M < T;
        const int first_query0 = key0 + (may_skip ? wg_row : 0);
        if (first_query0 > key0) {
            order.wait();
            order.arrive();
            wait_full(shared.q, q);
            __syncwarp();
            release(shared.q, read);
            q.advance();
        }
        wait_full(shared.k, k);
        order.wait();
        start_tile();
        for (int query0 = first_query0;;) {
            wgmma_wait<1>(dK, dV);                    // of the previous tile; S is still in flight
            if (query0 > first_query0) release(shared.q, read);   // order.wait(): all lanes have read lse and D
            wgmma_fence(dP);
            start_scores<HS, TILE_Q>(dP, V[k.stage], Shape::TILE_K, dO[q.stage]);    // dP = V dO^T
            wgmma_wait<1>(S);
            const bool crosses_diagonal = key0 + row + 15 > query0;
            if (crosses_diagonal) mask_scores<Queries::COLUMNS>(S, key0 + row, query0);
            probabilities(S, scale * LOG2E, [&](int e) { return shared.lse[q.stage][fragment_column(e)]; });
            to_operands(P, S);
            wait_full(shared.q, q);                   // already full: the branch holds the next wait, see wgmma_wait
            wgmma_wait<0>(dP);
            score_gradients(dP, S, [&](int e) { return shared.D[q.stage][fragment_column(e)]; });
            to_operands(dS, dP);
            query0 += TILE_Q;
            const bool last = query0 >= T;
            if (!last) order.wait();
            wgmma_fence(dV, dK, P, dS);
            start_outputs<HS, TILE_Q>(dV, P, dO[q.stage]);                           // dV += P dO
            start_outputs<HS, TILE_Q>(dK, dS, Q[q.stage]);                           // dK += dS Q
            q.advance();
            if (last) break;
            start_tile();
        }
        release(shared.k, k);
        wgmma_wait<0>(dK, dV);
        __syncwarp();
        release(shared.q, read);
        const float factor[2] = {scale, scale};
        multiply_rows(dK, factor);
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        const size_t to_k = head.qkv + head.C, to_v = to_k + head.C;
        store_rows<HS>(dqkv.from(to_k), head.stride, key0 + row, T, dK, shared.out, Shape::TILE_K, row);
        store_rows<HS>(dqkv.from(to_v), head.stride, key0 + row, T, dV, shared.out, Shape::TILE_K, row);
        if (partials && key0 + wg_row < T)
            store_column_sums<HS, Shape>(partial_sums(partials, head, work, 1, key0 + wg_row, T, HS), head.C,
                                         shared.out, wg_row, dK, dV);
    }
}

// Writes dK and dV, and their column sums unless partials is null.
template <int HS>
__global__ void __launch_bounds__(DkvShape<HS>::BLOCK, 1)
    attention_backward_dkv_wgmma_kernel(Out<e5m2> dqkv, float* partials, const __grid_constant__ TensorMap qkv,
                                        const __grid_constant__ TensorMap dout, const float* lse, const float* D,
                                        TileScheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = DkvShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.k, shared.q, shared.next.ring);
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x < 32) dkv_producer<HS>(shared, qkv, dout, lse, D, scheduler, T); },
            [&, dqkv, partials] { dkv_consumer<HS>(dqkv, partials, shared, scheduler, T); });
    }
}

// ---- launchers

// Returns the tensor map of x (B, T, heads, HS); qkv has 3 NH heads.
TensorMap head_tensor_map(const floatX* x, uint64_t B, uint64_t T, uint64_t heads, uint64_t HS) {
    const uint64_t head_bytes = HS * sizeof(floatX), row_bytes = heads * head_bytes;
    return make_tensor_map(x, {HS, heads, T, B}, {head_bytes, row_bytes, T * row_bytes}, BOX_ROWS);
}

// Bytes of the L2 cache (50 MB on an H100) for the tensors that a group of heads reads repeatedly.
constexpr size_t L2_BUDGET = 24 << 20;

TileScheduler make_scheduler(const Heads& h, int rows) {
    const size_t head_bytes = static_cast<size_t>(h.T) * 2 * h.HS * sizeof(floatX);   // K and V, or Q and dO
    const unsigned tiles = ceil_div(h.T, rows), heads = static_cast<unsigned>(h.B) * h.NH;
    const size_t group = std::min(size_t{heads}, std::max(size_t{1}, L2_BUDGET / head_bytes));
    return {{heads, tiles, static_cast<unsigned>(group)}, static_cast<unsigned>(h.NH), h.counter};
}

unsigned scheduler_blocks(const TileScheduler& scheduler) {
    return std::min(static_cast<unsigned>(device.properties.multiProcessorCount), scheduler.count());
}

template <int HS> void attention_forward_wgmma(const Tensor& out, const floatX* qkv, const Heads& h) {
    using Shape = ForwardShape<HS>;
    const TileScheduler scheduler = make_scheduler(h, Shape::TILE_Q);
    launch("attention_forward", attention_forward_wgmma_kernel<HS>, scheduler_blocks(scheduler), Shape::BLOCK,
           sizeof(typename Shape::Shared), out.to<e4m3>(), h.lse, head_tensor_map(qkv, h.B, h.T, 3 * h.NH, HS),
           scheduler, h.T);
}

// Returns the rows of partial column sums: one for each 64 rows of a sequence.
size_t wgmma_partials(size_t B, size_t T) { return B * ceil_div(T, WGMMA_M); }

// partials (wgmma_partials(B, T), 3C) fp32: see attention_backward
template <int HS>
void attention_backward_wgmma(const Tensor& dqkv, Grad dbias, const floatX* dout, const floatX* qkv, const floatX* out,
                              const Heads& h) {
    float* const partials = dbias.data ? h.partials : nullptr;
    using Dq = DqShape<HS>;
    using Dkv = DkvShape<HS>;
    const TensorMap qkv_map = head_tensor_map(qkv, h.B, h.T, 3 * h.NH, HS),
                    dout_map = head_tensor_map(dout, h.B, h.T, h.NH, HS);
    const TileScheduler dq = make_scheduler(h, Dq::TILE_Q), dkv = make_scheduler(h, Dkv::TILE_K);
    launch("attention_backward_dq", attention_backward_dq_wgmma_kernel<HS>, scheduler_blocks(dq), Dq::BLOCK,
           sizeof(typename Dq::Shared), dqkv.to<e5m2>(), partials, h.D, qkv_map, dout_map, out, h.lse, dq, h.T);
    launch("attention_backward_dkv", attention_backward_dkv_wgmma_kernel<HS>, scheduler_blocks(dkv), Dkv::BLOCK,
           sizeof(typename Dkv::Shared), dqkv.to<e5m2>(), partials, qkv_map, dout_map, h.lse, h.D, dkv, h.T);
    if (partials) add_partials({dbias}, partials, wgmma_partials(h.B, h.T), dqkv.columns);
}

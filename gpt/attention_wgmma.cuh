// Attention on Hopper's tensor cores: the function of train_gpt.cu's section "attention" (formulas and shapes there),
// with wgmma, the copy engine (TMA) and specialised warps.
//
// from      Shah et al. 2024, "FlashAttention-3", algorithms 1 and 2; Dao 2023, "FlashAttention-2"
// mapping   Persistent blocks, one per multiprocessor. A work tile is a range of rows of a head, queries in forward and
//           dQ, keys in dK/dV; blocks take the number of their next one from a counter in device memory, which balances
//           the load. A block's first warpgroup only loads, the others multiply and compute the softmax; tiles pass
//           from producer to consumers through rings of buffers:
//
//           warpgroup 0   one thread: copy engine -> K Q V | K V | K V ...        stages of a ring in shared memory
//           warpgroup 1   rows   0.. 63 of the work tile   S = Q K^T, softmax, O += P V     its warp 0: rows 0..15
//           warpgroup 2   rows  64..127                    the same, with the same K and V
//           warpgroup 3   rows 128..191                    (forward, heads of 64 only)
//
//           A warp's 16 rows of scores are a fragment in its registers: P and dS go from one product into the next
//           without leaving them. Products are asynchronous: while those of one tile run, another's softmax is
//           computed. Forward's warpgroups start their products in turn, so that softmax and products overlap
// backward  dQ and dK/dV are kernels of their own, which form S and dP twice: 7 products for 5, but no sum that depends
//           on the order of blocks (dev/kernels/attention.cu estimates the alternative)
// cost      compute: 2 products forward, 7 backward, of T*T/2*HS each
// needs     the counter at 0, and leaves it there
// shared    of 227 KiB: 3 stages for heads of 64, 2 for larger ones
#pragma once

#include "attention_mma.cuh"   // softmax_step(), probabilities(), ... of a fragment of scores

constexpr int BOX_ROWS = 64;   // of one copy by the copy engine

// The order of a matrix of tiles: groups of `together` rows of tiles, and in a group column by column.
struct TileOrder {
    struct Place { unsigned row, column; };
    unsigned rows, columns, together;

    __host__ __device__ unsigned count() const { return rows * columns; }
    __device__ Place place(unsigned i) const {
        const unsigned first = i / (together * columns) * together, rest = i - first * columns;
        const unsigned group_rows = min(together, rows - first);
        return {first + rest % group_rows, rest / group_rows};
    }
};

// The tile scheduler. Work tiles go from long to short, and a block that is done takes the next one, so that all blocks
// end at about the same time. `together` heads, whose tensors fit in the L2 cache, are processed at a time.
struct Scheduler {
    TileOrder order;   // a row is a head, a column a tile's rank in it
    unsigned NH;
    int* counter;      // in device memory; 0 between launches

    __host__ __device__ unsigned count() const { return order.count(); }

    // A block's first work tile is its own number; it takes others until one is out of range. All blocks together take
    // count() times, after which the counter is 0 again.
    __device__ unsigned first() const { return blockIdx.x; }
    __device__ unsigned take() const { return gridDim.x + atomic_inc(counter, count() - 1); }
};

struct WorkTile { int rank, h, b; };   // rank 0 is the head's longest tile

__device__ __forceinline__ WorkTile work_tile(const Scheduler& scheduler, unsigned i) {
    const TileOrder::Place place = scheduler.order.place(i);
    return {static_cast<int>(place.column), static_cast<int>(place.row % scheduler.NH),
            static_cast<int>(place.row / scheduler.NH)};
}

// The number of the block's next work tile, from the producer to the consumers.
struct NextTile {
    unsigned number;
    Ring<1> ring;
};

// Called by the producer once all loads of a work tile have started: earlier, a busy block would hold a tile that
// another block could start.
__device__ __forceinline__ unsigned publish_next(NextTile& next, PipelineState<1>& turn, const Scheduler& scheduler) {
    const unsigned number = scheduler.take();
    wait_empty(next.ring, turn);
    next.number = number;
    mbarrier_arrive(&next.ring.full[0]);
    turn.advance();
    return number;
}
// Read by way of lane 0: so all lanes have read it when it is released, and the compiler knows that it is uniform.
__device__ __forceinline__ unsigned next_tile(NextTile& next, PipelineState<1>& turn) {
    wait_full(next.ring, turn);
    const unsigned number = __shfl_sync(FULL_WARP, next.number, 0);
    release(next.ring, turn);
    return number;
}

// Runs produce() in the first warpgroup and consume() in the others. The caller captures outputs by value: for those
// captured by reference, nvcc 12.4 emits generic stores instead of global ones.
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

// Starts to load rows [row0, row0 + rows) of a head into a tile; the heads of q, k and v are numbered consecutively.
template <int HS>
__device__ __forceinline__ void load_boxes(char* tile, int rows, const TensorMap& from, uint64_t* barrier, int head,
                                           int row0, int b) {
    for (int c = 0; c < column_blocks(HS); c++)
        for (int r = 0; r < rows; r += BOX_ROWS)
            tma_load(tile + (c * rows + r) * TILE_ROW_BYTES, &from.map, barrier, c * TILE_COLUMNS, head, row0 + r,
                        b);
}

// The output of (64, HS) is accumulated in whole blocks of 64 columns.
__host__ __device__ constexpr int output_columns(int HS) { return column_blocks(HS) * TILE_COLUMNS; }
template <int HS> using HeadFragment = float[output_columns(HS) / 2];

// Starts S (64, N) = A B^T, of rows of two tiles: A of a_rows, B (N, HS).
template <int HS, int N>
__device__ __forceinline__ void start_scores(float (&S)[N / 2], uint64_t A, int a_rows, uint64_t B) {
    constexpr int STEP_BYTES = 32;   // 16 columns
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
        wgmma<N, Major::K>(S, offset_by(A, k / 4 * a_rows * TILE_ROW_BYTES + k % 4 * STEP_BYTES),
                           offset_by(B, k / 4 * N * TILE_ROW_BYTES + k % 4 * STEP_BYTES), k > 0);
    wgmma_commit();
}

// Starts O (64, HS) += P (64, N) B, P from registers, B (N, HS) a tile; of P only the first COLUMNS.
template <int HS, int N, int COLUMNS = N>
__device__ __forceinline__ void start_outputs(HeadFragment<HS>& O, const uint32_t (&P)[N / 16][4], uint64_t B) {
    const uint64_t rows = HS > TILE_COLUMNS ? mn_major(B, N * TILE_ROW_BYTES) : B;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        wgmma<output_columns(HS), Major::MN>(O, P[k], offset_by(rows, k * 16 * TILE_ROW_BYTES), 1);
    wgmma_commit();
}

// Buffers of a ring: as many as fit in shared memory (227 KiB for a block) in all three kernels.
constexpr int stages(int HS) { return HS == 64 ? 3 : 2; }

// ---- forward

template <int HS> struct ForwardShape : Warpgroups<HS == 64 ? 3 : 2> {
    static constexpr int KEYS = 128, STAGES = stages(HS);
    struct Shared {
        alignas(TILE_ALIGNMENT) char Q[tile_bytes(ForwardShape::ROWS, HS)], K[STAGES][tile_bytes(KEYS, HS)],
            V[STAGES][tile_bytes(KEYS, HS)], O[tile_bytes(ForwardShape::ROWS, HS)];
        Ring<1> q;
        Ring<STAGES> k, v;
        NextTile next;
    };
};

// The first query of a work tile in forward and dQ; the last queries have most keys.
__device__ __forceinline__ int first_query(const Scheduler& scheduler, const WorkTile& work, int rows) {
    return (scheduler.order.columns - 1 - work.rank) * rows;
}
// The number of tiles of keys that queries [query0, query0 + rows) attend to.
__device__ __forceinline__ int key_tiles(int query0, int rows, int T, int keys) {
    return (min(query0 + rows, T) + keys - 1) / keys;
}

// Of the tiles that are loaded for the block, those that one group's queries attend to; 1 if it has no queries.
__device__ __forceinline__ int group_tiles(int group0, int T, int keys) {
    return group0 < T ? key_tiles(group0, WGMMA_M, T, keys) : 1;
}

// Releases tiles that only other groups use; calls before_each() before each.
template <typename Shared, int STAGES, typename BeforeEach>
__device__ __forceinline__ void release_tiles(Shared& shared, PipelineState<STAGES>& k, PipelineState<STAGES>& v,
                                              int count, BeforeEach before_each) {
    for (; count > 0; count--) {
        before_each();
        wait_full(shared.v, v);   // K was loaded before V
        __syncwarp();             // all lanes have seen them full: once released, they are soon refilled
        release(shared.k, k);
        release(shared.v, v);
    }
}

// The producer of forward and dQ: loads K and V of each work tile, and its own rows by load_own().
template <int HS, typename Shape, typename LoadOwn>
__device__ __forceinline__ void produce_keys(typename Shape::Shared& shared, const TensorMap& qkv,
                                             const Scheduler& scheduler, int T, LoadOwn load_own) {
    PipelineState<1> each_tile;        // of q and next
    PipelineState<Shape::STAGES> kv;   // K and V have rings of their own, in step
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = publish_next(shared.next, each_tile, scheduler)) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(scheduler, work, Shape::ROWS),
                  tiles = key_tiles(query0, Shape::ROWS, T, Shape::KEYS);
        auto load = [&](Ring<Shape::STAGES>& ring, char* tile, int head, int j) {
            uint64_t* full = &ring.full[kv.stage];
            wait_empty(ring, kv);
            mbarrier_arrive_expect_tx(full, sizeof(shared.K[0]));
            load_boxes<HS>(tile, Shape::KEYS, qkv, full, head, j * Shape::KEYS, work.b);
        };
        // K comes first: its ring has room before the last work tile is done with its own rows.
        load(shared.k, shared.K[kv.stage], scheduler.NH + work.h, 0);
        wait_empty(shared.q, each_tile);
        load_own(work, query0, &shared.q.full[0]);
        for (int j = 0;;) {
            load(shared.v, shared.V[kv.stage], 2 * scheduler.NH + work.h, j);
            kv.advance();
            if (++j == tiles) break;
            load(shared.k, shared.K[kv.stage], scheduler.NH + work.h, j);
        }
    }
}

// While the products of one tile run, the softmax of the next one is computed: S of tile j + 1 is started before
// O += P V of tile j.
template <int HS>
__device__ __forceinline__ void forward_consumer(const Out<e4m3>& out, float* lse,
                                                 typename ForwardShape<HS>::Shared& shared, const Scheduler& scheduler,
                                                 int T) {
    using Shape = ForwardShape<HS>;
    constexpr int KEYS = Shape::KEYS;
    const int row = consumer_row();
    const int first_row_of_group = warpgroup_row();
    const uint64_t Q = wgmma_descriptor(shared.Q + first_row_of_group * TILE_ROW_BYTES);
    const uint64_t K = wgmma_descriptor(shared.K[0]), V = wgmma_descriptor(shared.V[0]);
    const float scale = rsqrtf(static_cast<float>(HS)) * LOG2E;
    const OrderedBarrier<Shape::CONSUMERS> order(first_row_of_group / WGMMA_M);
    PipelineState<1> q, turn;
    PipelineState<Shape::STAGES> k, v;
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = next_tile(shared.next, turn)) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(scheduler, work, Shape::ROWS), group0 = query0 + first_row_of_group;
        const int loaded = key_tiles(query0, Shape::ROWS, T, KEYS), tiles = group_tiles(group0, T, KEYS);
        const bool sees_half = group0 + WGMMA_M <= tiles * KEYS - KEYS / 2;   // of the last tile, at most
        float S[KEYS / 2], rescale[2];
        HeadFragment<HS> O = {};
        uint32_t P[KEYS / 16][4];
        RowState rows;
        auto start_tile = [&] {
            wgmma_fence(S);
            start_scores<HS, KEYS>(S, Q, Shape::ROWS, offset_by(K, k.stage * sizeof(shared.K[0])));         // S = Q K^T
        };
        auto softmax = [&](int j) {
            release(shared.k, k);
            if (j + 1 == tiles) release(shared.q, q);
            if ((j + 1) * KEYS > query0 + row + 1) mask_scores<Queries::ROWS>(S, query0 + row, j * KEYS);
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
            start_outputs<HS, KEYS>(O, P, offset_by(V, v.stage * sizeof(shared.V[0]))); // O += P V, of the last tile
            order.arrive();
            wgmma_wait<1>(S);
            softmax(j);
            PipelineState<Shape::STAGES> next = v;
            next.advance();
            wait_full(shared.v, next);   // of this tile; and a branch, see wgmma_wait
            wgmma_wait<0>(O);
            release(shared.v, v);
            multiply_rows(O, rescale);
            to_operands(P, S);
        }
        wait_full(shared.v, v);
        const uint64_t values = offset_by(V, v.stage * sizeof(shared.V[0]));
        wgmma_fence(O, P);
        if (sees_half) start_outputs<HS, KEYS, KEYS / 2>(O, P, values);
        else start_outputs<HS, KEYS>(O, P, values);
        const float sum[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])},
                    inverse[2] = {reciprocal_approx(sum[0]), reciprocal_approx(sum[1])};
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        store_lse(lse + head.rows, rows, sum, query0 + row, T, scale);
        wgmma_wait<0>(O);
        release(shared.v, v);
        release_tiles(shared, k, v, loaded - tiles, [&] {
            order.wait();
            order.arrive();
        });
        multiply_rows(O, inverse);
        store_rows<HS>(out.from(head.out), head.C, query0 + row, T, O, shared.O, Shape::ROWS, row);
    }
}

template <int HS>
__global__ void __launch_bounds__(ForwardShape<HS>::BLOCK, 1)
attention_forward_wgmma_kernel(Out<e4m3> out, float* lse, const __grid_constant__ TensorMap qkv,
                               Scheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = ForwardShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.q, shared.k, shared.v, shared.next.ring);
        auto load_own = [&](const WorkTile& work, int query0, uint64_t* full) {
            mbarrier_arrive_expect_tx(full, sizeof(shared.Q));
            load_boxes<HS>(shared.Q, Shape::ROWS, qkv, full, work.h, query0, work.b);
        };
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x == 0) produce_keys<HS, Shape>(shared, qkv, scheduler, T, load_own); },
            [&, out] { forward_consumer<HS>(out, lse, shared, scheduler, T); });
    }
}

// ---- backward: shared by dQ and dK/dV

// The scores S = X A^T and dP = Y B^T: X and Y are this group's rows of the two tiles that the block owns, A and B
// tiles of N rows from the two rings.
template <int HS, int N> struct BackwardScores {
    uint64_t X, Y, A, B;   // the group's rows, and the first tile of each ring

    __device__ __forceinline__ BackwardScores(const char* x, const char* y, const char* a, const char* b)
        : X(wgmma_descriptor(x + warpgroup_row() * TILE_ROW_BYTES)),
          Y(wgmma_descriptor(y + warpgroup_row() * TILE_ROW_BYTES)),
          A(wgmma_descriptor(a)), B(wgmma_descriptor(b)) {}

    __device__ __forceinline__ uint64_t a(int stage) const { return offset_by(A, stage * tile_bytes(N, HS)); }
    __device__ __forceinline__ uint64_t b(int stage) const { return offset_by(B, stage * tile_bytes(N, HS)); }
};

// ---- dQ

template <int HS> struct QueryGradientShape : Warpgroups<2> {
    static constexpr int KEYS = HS == 64 ? 128 : 64, STAGES = stages(HS);
    struct Shared {
        alignas(TILE_ALIGNMENT) char Q[tile_bytes(QueryGradientShape::ROWS, HS)],
            dO[tile_bytes(QueryGradientShape::ROWS, HS)], K[STAGES][tile_bytes(KEYS, HS)],
            V[STAGES][tile_bytes(KEYS, HS)], dQ[tile_bytes(QueryGradientShape::ROWS, HS)];
        Ring<1> q;   // and dO
        Ring<STAGES> k, v;
        NextTile next;
    };
};

// dQ of a tile is computed while the scores of the next one are.
template <int HS>
__device__ __forceinline__ void dq_consumer(const Out<e5m2>& dqkv, float* D_out, const floatX* dout, const floatX* out,
                                            const float* lse_in,
                                            typename QueryGradientShape<HS>::Shared& shared, const Scheduler& scheduler,
                                            int T) {
    using Shape = QueryGradientShape<HS>;
    constexpr int KEYS = Shape::KEYS;
    const int row = consumer_row();
    const BackwardScores<HS, KEYS> scores(shared.Q, shared.dO, shared.K[0], shared.V[0]);
    const float scale = rsqrtf(static_cast<float>(HS));
    PipelineState<1> q, turn;
    PipelineState<Shape::STAGES> k, v;
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = next_tile(shared.next, turn)) {
        const WorkTile work = work_tile(scheduler, i);
        const int query0 = first_query(scheduler, work, Shape::ROWS);
        const int loaded = key_tiles(query0, Shape::ROWS, T, KEYS),
                  tiles = group_tiles(query0 + warpgroup_row(), T, KEYS);
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        float S[KEYS / 2], dP[KEYS / 2], lse[2], D[2];
        HeadFragment<HS> dQ = {};
        uint32_t dS[KEYS / 16][4];
        PipelineState<Shape::STAGES> now = k;         // k is behind: dQ of the last tile still reads its stage
        auto start_tile = [&] {
            wait_full(shared.k, now);
            wait_full(shared.v, v);
            wgmma_fence(S, dP);
            start_scores<HS, KEYS>(S, scores.X, Shape::ROWS, scores.a(now.stage));                      // S = Q K^T
            start_scores<HS, KEYS>(dP, scores.Y, Shape::ROWS, scores.b(v.stage));                       // dP = dO V^T
        };
        wgmma_fence(dQ);                              // it is clear before the first product starts
        wait_full(shared.q, q);
        start_tile();
        query_statistics<HS>(lse, D, D_out + head.rows, lse_in + head.rows, dout + head.out, out + head.out,
                             query0 + row, T, head.C);
        for (int j = 0;;) {
            wgmma_wait<1>(S);                         // and dQ of the last tile is done
            if (j > 0) release(shared.k, k);
            if ((j + 1) * KEYS > query0 + row + 1) mask_scores<Queries::ROWS>(S, query0 + row, j * KEYS);
            probabilities(S, scale * LOG2E, [&](int e) { return lse[e / 2 % 2]; });
            wait_full(shared.v, v);                   // it is: a branch, see wgmma_wait
            wgmma_wait<0>(dP);
            release(shared.v, v);
            if (j + 1 == tiles) release(shared.q, q);
            score_gradients(dP, S, [&](int e) { return D[e / 2 % 2]; });
            to_operands(dS, dP);
            wgmma_fence(dQ, dS);
            start_outputs<HS, KEYS>(dQ, dS, scores.a(now.stage));                                       // dQ += dS K
            now.advance();
            if (++j == tiles) break;
            start_tile();
        }
        wgmma_wait<0>(dQ);
        release(shared.k, k);
        release_tiles(shared, k, v, loaded - tiles, [] {});
        const float factor[2] = {scale, scale};
        multiply_rows(dQ, factor);
        store_rows<HS>(dqkv.from(head.qkv), head.stride, query0 + row, T, dQ, shared.dQ, Shape::ROWS, row);
    }
}

// Also leaves D for attention_backward_dkv_wgmma_kernel.
template <int HS>
__global__ void __launch_bounds__(QueryGradientShape<HS>::BLOCK, 1)
    attention_backward_dq_wgmma_kernel(Out<e5m2> dqkv, float* D_out, const __grid_constant__ TensorMap qkv,
                                       const __grid_constant__ TensorMap dout_map, const floatX* dout,
                                       const floatX* out, const float* lse, Scheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = QueryGradientShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.q, shared.k, shared.v, shared.next.ring);
        auto load_own = [&](const WorkTile& work, int query0, uint64_t* full) {
            mbarrier_arrive_expect_tx(full, sizeof(shared.Q) + sizeof(shared.dO));
            load_boxes<HS>(shared.Q, Shape::ROWS, qkv, full, work.h, query0, work.b);
            load_boxes<HS>(shared.dO, Shape::ROWS, dout_map, full, work.h, query0, work.b);
        };
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x == 0) produce_keys<HS, Shape>(shared, qkv, scheduler, T, load_own); },
            [&, dqkv] { dq_consumer<HS>(dqkv, D_out, dout, out, lse, shared, scheduler, T); });
    }
}

// ---- dK and dV

template <int HS> struct KeyGradientShape : Warpgroups<2> {
    static constexpr int QUERIES = HS == 64 ? 128 : 64, STAGES = stages(HS);
    struct Shared {
        alignas(TILE_ALIGNMENT) char K[tile_bytes(KeyGradientShape::ROWS, HS)],
            V[tile_bytes(KeyGradientShape::ROWS, HS)], Q[STAGES][tile_bytes(QUERIES, HS)],
            dO[STAGES][tile_bytes(QUERIES, HS)], out[tile_bytes(KeyGradientShape::ROWS, HS)];
        float lse[STAGES][QUERIES], D[STAGES][QUERIES];
        Ring<1> k;                // and V
        Ring<STAGES, 1 + 32> q;   // dO, lse and D: filled by the copy engine and a warp
        NextTile next;
    };
};

// The first warp of the producers. Lane 0 runs the copy engine; lse and D, whose rows begin anywhere,
// are copied by all lanes.
template <int HS>
__device__ __forceinline__ void dkv_producer(typename KeyGradientShape<HS>::Shared& shared, const TensorMap& qkv,
                                             const TensorMap& dout, const float* lse, const float* D,
                                             const Scheduler& scheduler, int T) {
    using Shape = KeyGradientShape<HS>;
    const int lane = threadIdx.x;
    PipelineState<1> k, turn;
    PipelineState<Shape::STAGES> q;
    auto next_of_warp = [&] {
        return __shfl_sync(FULL_WARP, lane == 0 ? publish_next(shared.next, turn, scheduler) : 0, 0);
    };
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = next_of_warp()) {
        const WorkTile work = work_tile(scheduler, i);
        const int key0 = work.rank * Shape::ROWS;
        const size_t first = head_of(work.b, work.h, scheduler.NH, T, HS).rows;
        wait_empty(shared.k, k);
        if (lane == 0) {
            mbarrier_arrive_expect_tx(&shared.k.full[0], sizeof(shared.K) + sizeof(shared.V));
            load_boxes<HS>(shared.K, Shape::ROWS, qkv, &shared.k.full[0], scheduler.NH + work.h, key0, work.b);
            load_boxes<HS>(shared.V, Shape::ROWS, qkv, &shared.k.full[0], 2 * scheduler.NH + work.h, key0, work.b);
        }
        k.advance();
        for (int query0 = key0; query0 < T; query0 += Shape::QUERIES, q.advance()) {
            uint64_t* full = &shared.q.full[q.stage];
            float my_lse[Shape::QUERIES / 32], my_D[Shape::QUERIES / 32];   // they come while the buffer is waited for
            for (int r = 0; r < Shape::QUERIES / 32; r++) {
                const int query = query0 + r * 32 + lane;
                my_lse[r] = query < T ? lse[first + query] : 0.0f;
                my_D[r] = query < T ? D[first + query] : 0.0f;
            }
            wait_empty(shared.q, q);
            if (lane == 0) {
                mbarrier_arrive_expect_tx(full, sizeof(shared.Q[0]) + sizeof(shared.dO[0]));
                load_boxes<HS>(shared.Q[q.stage], Shape::QUERIES, qkv, full, work.h, query0, work.b);
                load_boxes<HS>(shared.dO[q.stage], Shape::QUERIES, dout, full, work.h, query0, work.b);
            }
            for (int r = 0; r < Shape::QUERIES / 32; r++) {
                shared.lse[q.stage][r * 32 + lane] = my_lse[r] * LOG2E;
                shared.D[q.stage][r * 32 + lane] = my_D[r];
            }
            mbarrier_arrive(full);
        }
    }
}

// While dV and dK of one tile are computed, S of the next one is already under way.
template <int HS>
__device__ __forceinline__ void dkv_consumer(const Out<e5m2>& dqkv,
                                             typename KeyGradientShape<HS>::Shared& shared, const Scheduler& scheduler,
                                             int T) {
    using Shape = KeyGradientShape<HS>;
    constexpr int QUERIES = Shape::QUERIES;
    const int row = consumer_row();
    const BackwardScores<HS, QUERIES> scores(shared.K, shared.V, shared.Q[0], shared.dO[0]);
    const float scale = rsqrtf(static_cast<float>(HS));
    PipelineState<1> k, turn;
    PipelineState<Shape::STAGES> q, done;   // done is behind: dV and dK still read its buffers
    for (unsigned i = scheduler.first(); i < scheduler.count(); i = next_tile(shared.next, turn)) {
        const WorkTile work = work_tile(scheduler, i);
        const int key0 = work.rank * Shape::ROWS;
        float S[QUERIES / 2], dP[QUERIES / 2];
        HeadFragment<HS> dK = {}, dV = {};
        uint32_t P[QUERIES / 16][4], dS[QUERIES / 16][4];
        auto start_tile = [&] {
            wait_full(shared.q, q);
            wgmma_fence(S);
            start_scores<HS, QUERIES>(S, scores.X, Shape::ROWS, scores.a(q.stage));   // S = K Q^T
        };
        // Queries before a group's keys do not see them. Where those are a whole tile, and not all, it is left out.
        const int first_query = key0 + (QUERIES == WGMMA_M && key0 + WGMMA_M < T ? warpgroup_row() : 0);
        if (first_query > key0) {
            wait_full(shared.q, q);
            __syncwarp();
            release(shared.q, done);
            q.advance();
        }
        wait_full(shared.k, k);
        start_tile();
        for (int query0 = first_query;;) {
            wgmma_wait<1>(dK, dV);                    // of the last tile; S is under way
            if (query0 > first_query) {
                __syncwarp();                         // all lanes have read lse and D
                release(shared.q, done);
            }
            wgmma_fence(dP);
            start_scores<HS, QUERIES>(dP, scores.Y, Shape::ROWS, scores.b(q.stage));  // dP = V dO^T
            wgmma_wait<1>(S);
            if (key0 + row + 15 > query0) mask_scores<Queries::COLUMNS>(S, key0 + row, query0);
            probabilities(S, scale * LOG2E, [&](int e) { return shared.lse[q.stage][fragment_column(e)]; });
            to_operands(P, S);
            wait_full(shared.q, q);                   // it is full: a branch, see wgmma_wait
            wgmma_wait<0>(dP);
            score_gradients(dP, S, [&](int e) { return shared.D[q.stage][fragment_column(e)]; });
            to_operands(dS, dP);
            wgmma_fence(dV, dK, P, dS);
            start_outputs<HS, QUERIES>(dV, P, scores.b(q.stage));                     // dV += P dO
            start_outputs<HS, QUERIES>(dK, dS, scores.a(q.stage));                    // dK += dS Q
            q.advance();
            query0 += QUERIES;
            if (query0 >= T) break;
            start_tile();
        }
        release(shared.k, k);
        wgmma_wait<0>(dK, dV);
        __syncwarp();
        release(shared.q, done);
        const float factor[2] = {scale, scale};
        multiply_rows(dK, factor);
        const Head head = head_of(work.b, work.h, scheduler.NH, T, HS);
        const size_t to_k = head.qkv + head.C, to_v = to_k + head.C;
        store_rows<HS>(dqkv.from(to_k), head.stride, key0 + row, T, dK, shared.out, Shape::ROWS, row);
        store_rows<HS>(dqkv.from(to_v), head.stride, key0 + row, T, dV, shared.out, Shape::ROWS, row);
    }
}

template <int HS>
__global__ void __launch_bounds__(KeyGradientShape<HS>::BLOCK, 1)
    attention_backward_dkv_wgmma_kernel(Out<e5m2> dqkv, const __grid_constant__ TensorMap qkv,
                                        const __grid_constant__ TensorMap dout, const float* lse, const float* D,
                                        Scheduler scheduler, int T) {
    if constexpr (HAS_WGMMA) {
        using Shape = KeyGradientShape<HS>;
        auto& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic_shared());
        init_rings(Shape::WARPS, shared.k, shared.q, shared.next.ring);
        specialise_warpgroups<Shape>(
            [&] { if (threadIdx.x < 32) dkv_producer<HS>(shared, qkv, dout, lse, D, scheduler, T); },
            [&, dqkv] { dkv_consumer<HS>(dqkv, shared, scheduler, T); });
    }
}

// ---- launchers

// A tensor (B, T, heads, HS), of which q, k and v count as 3 NH heads, for the copy engine.
TensorMap head_tensor_map(const floatX* x, int B, int T, int heads, int HS) {
    const uint64_t row = static_cast<uint64_t>(heads) * HS * sizeof(floatX);
    return make_tensor_map(
        x,
        {static_cast<uint64_t>(HS), static_cast<uint64_t>(heads), static_cast<uint64_t>(T), static_cast<uint64_t>(B)},
        {HS * sizeof(floatX), row, row * T}, BOX_ROWS);
}

// A part of the L2 cache (50 MB on an H100) for the tensors that `together` heads read repeatedly.
constexpr size_t L2_SHARE = 24 << 20;

Scheduler make_scheduler(int* counter, int B, int T, int NH, int HS, int rows) {
    const size_t head_bytes = static_cast<size_t>(T) * 2 * HS * sizeof(floatX);   // K and V, or Q and dO
    const unsigned tiles = ceil_div(T, rows), heads = static_cast<unsigned>(B) * NH;
    const size_t together = std::min(size_t{heads}, std::max(size_t{1}, L2_SHARE / head_bytes));
    return {{heads, tiles, static_cast<unsigned>(together)}, static_cast<unsigned>(NH), counter};
}

unsigned scheduler_blocks(const Scheduler& scheduler) {
    return std::min(static_cast<unsigned>(device.properties.multiProcessorCount), scheduler.count());
}

template <int HS>
void attention_forward_wgmma(const Operand& out, float* lse, int* counter, const floatX* qkv, int B, int T, int NH) {
    using Shape = ForwardShape<HS>;
    const Scheduler scheduler = make_scheduler(counter, B, T, NH, HS, Shape::ROWS);
    launch("attention_forward", attention_forward_wgmma_kernel<HS>, scheduler_blocks(scheduler), Shape::BLOCK,
           sizeof(typename Shape::Shared), out.to<e4m3>(), lse, head_tensor_map(qkv, B, T, 3 * NH, HS), scheduler,
           T);
}

template <int HS>
void attention_backward_wgmma(const Operand& dqkv, float* D, int* counter, const floatX* dout, const floatX* qkv,
                              const floatX* out, const float* lse, int B, int T, int NH) {
    using Queries = QueryGradientShape<HS>;
    using Keys = KeyGradientShape<HS>;
    const TensorMap qkv_map = head_tensor_map(qkv, B, T, 3 * NH, HS), dout_map = head_tensor_map(dout, B, T, NH, HS);
    const Scheduler queries = make_scheduler(counter, B, T, NH, HS, Queries::ROWS),
                 keys = make_scheduler(counter, B, T, NH, HS, Keys::ROWS);
    launch("attention_backward_dq", attention_backward_dq_wgmma_kernel<HS>, scheduler_blocks(queries), Queries::BLOCK,
           sizeof(typename Queries::Shared), dqkv.to<e5m2>(), D, qkv_map, dout_map, dout, out, lse, queries,
           T);
    launch("attention_backward_dkv", attention_backward_dkv_wgmma_kernel<HS>, scheduler_blocks(keys), Keys::BLOCK,
           sizeof(typename Keys::Shared), dqkv.to<e5m2>(), qkv_map, dout_map, lse, D, keys, T);
}

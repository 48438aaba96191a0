// Attention on the tensor cores of Ampere and later GPUs: the function of train_gpt.cu's section "attention" (formulas
// and shapes there), with mma.sync, ldmatrix and cp.async.
//
// Map: operations on score fragments (also used by attention_wgmma.cuh) · kernels: forward, backward · launchers
//
// from      Dao 2023, "FlashAttention-2", algorithms 1 and 2; fragments as in ptx.cuh, tiles as in tiles.cuh
// mapping   A block of 4 warps owns 64 rows of one head: queries in forward and dQ, keys in dK/dV. It loops over tiles
//           of 64 rows of the other side, double-buffered: cp.async loads the next tiles during the products:
//
//                          keys  0..63    64..127  128..191
//           queries   0.. 63      masked                        forward and dQ: a block owns a row of this picture and
//                    64..127      whole    masked               loops from the left to the diagonal.
//                   128..191      whole    whole    masked      dK/dV: it owns a column, from the diagonal down
//
//           Warp w owns rows 16w to 16w + 15 of the 64. Its scores (16 x 64) are an accumulator fragment; P and dS,
//           computed in place, are the left operands of the next products without leaving registers
// cost      compute: 2 products forward, 7 backward, of T*T/2*HS per head
// shared    5 tiles of 64 x HS forward (Q; K and V twice), 6 backward (X, Y; A and B twice)
#pragma once

#include "tiles.cuh"

// ---- operations on a warp's 16 rows of scores, an accumulator fragment (ptx.cuh); also used by attention_wgmma.cuh

// Causal mask: sets S to -infinity where the key comes after the query. (row0, column0): the fragment's first element.
template <Queries QUERIES, int N> __device__ __forceinline__ void mask_scores(float (&S)[N], int row0, int column0) {
    for (int e = 0; e < N; e++) {
        const int row = row0 + fragment_row(e), column = column0 + fragment_column(e);
        const bool key_after_query = QUERIES == Queries::ROWS ? column > row : row > column;
        if (key_after_query) S[e] = -INFINITY;
    }
}

// Online softmax of a lane's two rows: the maxima so far, and sums over this lane's columns only.
struct RowState {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Return the sum, and the maximum, of x over the four lanes that hold a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// One step of the online softmax: S becomes P = 2^(scale (S - max)), with the maximum so far. Updates the sums and
// returns in `rescale` the factors for earlier outputs. Every row has an unmasked key in its first step.
template <int N>
__device__ __forceinline__ void softmax_step(float (&S)[N], RowState& rows, float (&rescale)[2], float scale) {
    // Two maxima and two sums per row: one chain of dependent operations would be as slow as its latency.
    float max[4] = {rows.max[0], rows.max[1], rows.max[0], rows.max[1]}, sum[4] = {};
    for (int e = 0; e < N; e++) max[e / 2 % 4] = fmaxf(max[e / 2 % 4], S[e]);
    for (int h = 0; h < 2; h++) {
        max[h] = row_max(fmaxf(max[h], max[h + 2]));
        rescale[h] = exp2_approx((rows.max[h] - max[h]) * scale);   // first step: 2^-inf = 0
        rows.max[h] = max[h];
        max[h] *= scale;
    }
    for (int e = 0; e < N; e++) {
        S[e] = exp2_approx(S[e] * scale - max[e / 2 % 2]);
        sum[e / 2 % 4] += S[e];
    }
    for (int h = 0; h < 2; h++) rows.sum[h] = rows.sum[h] * rescale[h] + (sum[h] + sum[h + 2]);
}

// Stores lse, the log-sum-exp of each row. sum is reduced over the row.
__device__ __forceinline__ void store_lse(float* lse, const RowState& rows, const float (&sum)[2], int row0, int T,
                                          float scale) {
    for (int h = 0; h < 2; h++)
        if (threadIdx.x % 4 == 0 && is_row(row0 + fragment_row(2 * h), T))
            lse[row0 + fragment_row(2 * h)] = (rows.max[h] * scale + log2f(sum[h])) / LOG2E;
}

// lse and D = sum of dout * out of a warp's 16 queries, row0 ... row0 + 15 of a head. load() only starts to read, so
// that other work can hide the latency. Lanes 2i and 2i + 1 compute the D of query row0 + i.
template <int HS> struct QueryStatistics {
    StoredPack out[HS / PACK / 2];
    float lse[2];   // of this lane's two queries

    __device__ __forceinline__ void load(const float* lse_in, const floatX* from, int row0, int T, size_t stride) {
        for (int h = 0; h < 2; h++) {
            const int r = row0 + fragment_row(2 * h);
            lse[h] = is_row(r, T) ? lse_in[r] : 0.0f;
        }
        const floatX* row = from + max(0, min(row0 + static_cast<int>(threadIdx.x) % 32 / 2, T - 1)) * stride;
        for (int i = 0; i < HS / PACK / 2; i++) out[i].load(row + (2 * i + threadIdx.x % 2) * PACK);
    }
    // Returns D of this lane's two queries, and writes it for the kernel of dK and dV. dout(r, c) returns the address
    // of chunk c of row row0 + r.
    template <typename Chunk>
    __device__ __forceinline__ void dot(float (&D)[2], float* D_out, int row0, int T, Chunk dout) const {
        const int lane = threadIdx.x % 32, row = row0 + lane / 2;
        float sum = 0;
        for (int i = 0; i < HS / PACK / 2; i++) {
            float x[PACK], y[PACK];
            ::load(x, dout(lane / 2, 2 * i + lane % 2));
            out[i].unpack(y);
            for (int k = 0; k < PACK; k++) sum += x[k] * y[k];
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        if (is_row(row, T) && lane % 2 == 0) D_out[row] = sum;
        for (int h = 0; h < 2; h++) D[h] = __shfl_sync(FULL_WARP, sum, 2 * fragment_row(2 * h));
    }
};

// In place: S becomes P = 2^(scale S - lse), and dP becomes dS = P * (dP - D). lse(e) and D(e) return the values of
// element e's query. (dQ and dK are multiplied by 1 / sqrt(HS) at the end: in FP16, a smaller dS would underflow.)
template <int N, typename Lse> __device__ __forceinline__ void probabilities(float (&S)[N], float scale, Lse lse) {
    for (int e = 0; e < N; e++) S[e] = exp2_approx(S[e] * scale - lse(e));
}
template <int N, typename Dot>
__device__ __forceinline__ void score_gradients(float (&dP)[N], const float (&P)[N], Dot D) {
    for (int e = 0; e < N; e++) dP[e] = P[e] * (dP[e] - D(e));
}

// ---- kernels

constexpr int MMA_BLOCK = 128;
constexpr int MMA_ROWS = 16 * MMA_BLOCK / 32;   // rows of a tile: owned rows, or rows of the other side

// Starts to load rows [row0, row0 + ROWS) of a head (or of any matrix) into a tile. Out-of-range rows (>= T) and
// columns (>= columns) become 0.
template <int COLUMNS, int ROWS = MMA_ROWS>
__device__ __forceinline__ void load_tile(char* tile, const floatX* x, int row0, int T, size_t stride,
                                          int columns = COLUMNS) {
    constexpr int CHUNKS = COLUMNS / PACK;
    for (int e = threadIdx.x; e < ROWS * CHUNKS; e += MMA_BLOCK) {
        const int row = e / CHUNKS, chunk = e % CHUNKS;
        const bool valid = row0 + row < T && chunk * PACK < columns;
        cp_async(tile_chunk(tile, ROWS, row, chunk), valid ? x + (row0 + row) * stride + chunk * PACK : x, valid);
    }
}

// S (16, MMA_ROWS) = A B^T. A is rows row ... row + 15 of a tile, B a whole tile.
template <int HS> __device__ __forceinline__ void mma_scores(float (&S)[MMA_ROWS / 2], char* A, int row, char* B) {
    const int lane = threadIdx.x % 32;
    uint32_t a[4], b[4];
    for (float& s : S) s = 0;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        ldmatrix(a, tile_chunk(A, MMA_ROWS, row + lane % 16, 2 * k + lane / 16));
        for (int j = 0; j < MMA_ROWS / 16; j++) {   // 16 rows of B: two B fragments
            ldmatrix(b, tile_chunk(B, MMA_ROWS, 16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma_m16n8k16(S + 8 * j, a, b[0], b[1]);
            mma_m16n8k16(S + 8 * j + 4, a, b[2], b[3]);
        }
    }
}

// O (16, HS) += P (16, MMA_ROWS) B, with P as A fragments and B a tile.
template <int HS>
__device__ __forceinline__ void mma_outputs(float (&O)[HS / 2], const uint32_t (&P)[MMA_ROWS / 16][4], char* B) {
    const int lane = threadIdx.x % 32;
    uint32_t b[4];
#pragma unroll
    for (int k = 0; k < MMA_ROWS / 16; k++)
        for (int j = 0; j < HS / 16; j++) {
            ldmatrix_transposed(b, tile_chunk(B, MMA_ROWS, 16 * k + lane % 16, 2 * j + lane / 16));
            mma_m16n8k16(O + 8 * j, P[k], b[0], b[1]);
            mma_m16n8k16(O + 8 * j + 4, P[k], b[2], b[3]);
        }
}

template <int HS>
__global__ void __launch_bounds__(MMA_BLOCK, 1)
attention_forward_mma_kernel(Out<e4m3> out, float* lse, const floatX* qkv, int T) {
    if (!HAS_MMA) return;
    constexpr int TILE = tile_bytes(MMA_ROWS, HS);
    const Head head = my_head(T, HS);
    const int own_tile = gridDim.x - 1 - blockIdx.x;      // the longest blocks, with most keys, start first
    const int query0 = own_tile * MMA_ROWS, row = threadIdx.x / 32 * 16;
    const float scale = rsqrtf(static_cast<float>(HS)) * LOG2E;
    char* Q = reinterpret_cast<char*>(dynamic_shared());
    char *K = Q + TILE, *V = K + 2 * TILE;                // two of each: in use, being loaded
    const floatX* q = qkv + head.qkv;

    load_tile<HS>(Q, q, query0, T, head.stride);
    load_tile<HS>(K, q + head.C, 0, T, head.stride);
    load_tile<HS>(V, q + 2 * head.C, 0, T, head.stride);
    cp_async_commit();
    float O[HS / 2] = {};
    RowState rows;
    for (int j = 0; j <= own_tile; j++) {
        const int now = j % 2 * TILE, next = TILE - now;
        if (j < own_tile) {
            load_tile<HS>(K + next, q + head.C, (j + 1) * MMA_ROWS, T, head.stride);
            load_tile<HS>(V + next, q + 2 * head.C, (j + 1) * MMA_ROWS, T, head.stride);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();   // the copies of all threads have completed
        float S[MMA_ROWS / 2], rescale[2];
        uint32_t P[MMA_ROWS / 16][4];
        mma_scores<HS>(S, Q, row, K + now);                                             // S = Q K^T
        if (j == own_tile) mask_scores<Queries::ROWS>(S, query0 + row, j * MMA_ROWS);
        softmax_step(S, rows, rescale, scale);
        multiply_rows(O, rescale);
        to_operands(P, S);
        mma_outputs<HS>(O, P, V + now);                                                 // O += P V
        __syncthreads();   // all warps have read K and V; the next iteration overwrites them
    }
    const float sum[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])}, inverse[2] = {1 / sum[0], 1 / sum[1]};
    multiply_rows(O, inverse);
    store_lse(lse + head.rows, rows, sum, query0 + row, T, scale);
    store_rows<HS>(out.from(head.out), head.C, query0 + row, T, O, Q, MMA_ROWS, row);
}

// Computes dQ, or dK and dV, as attention_backward_kernel does; X, Y, A and B are named as there. The owned tile gives
// the rows of the score fragments. Neither form has registers for FP8 outputs.
template <int HS, Owns OWNS>
__global__ void __launch_bounds__(MMA_BLOCK, 1)
attention_backward_mma_kernel(floatX* dqkv, float* D_all, const floatX* dout, const floatX* qkv, const floatX* out,
                              const float* lse_all, int T) {
    if (!HAS_MMA) return;
    constexpr bool OWNS_QUERIES = OWNS == Owns::QUERIES;
    constexpr int TILE = tile_bytes(MMA_ROWS, HS);
    const Head head = my_head(T, HS);
    const int tiles = gridDim.x, own_tile = OWNS_QUERIES ? tiles - 1 - blockIdx.x : blockIdx.x;   // longest first
    const int first = OWNS_QUERIES ? 0 : own_tile, end = OWNS_QUERIES ? own_tile + 1 : tiles;
    const int own0 = own_tile * MMA_ROWS, row = threadIdx.x / 32 * 16;
    const float scale = rsqrtf(static_cast<float>(HS));
    char* X = reinterpret_cast<char*>(dynamic_shared());
    char *Y = X + TILE, *A = Y + TILE, *B = A + 2 * TILE;
    float *lse_tile = reinterpret_cast<float*>(B + 2 * TILE), *D_tile = lse_tile + MMA_ROWS;   // dK and dV only
    const floatX *q = qkv + head.qkv, *k = q + head.C, *v = k + head.C, *d = dout + head.out;
    auto load_other = [&](int i, int buffer) {
        load_tile<HS>(A + buffer, OWNS_QUERIES ? k : q, i * MMA_ROWS, T, head.stride);
        load_tile<HS>(B + buffer, OWNS_QUERIES ? v : d, i * MMA_ROWS, T, OWNS_QUERIES ? head.stride : head.C);
    };

    load_tile<HS>(X, OWNS_QUERIES ? q : k, own0, T, head.stride);
    load_tile<HS>(Y, OWNS_QUERIES ? d : v, own0, T, OWNS_QUERIES ? head.C : head.stride);
    load_other(first, 0);
    cp_async_commit();
    float lse[2], D[2], dX[HS / 2] = {}, dY[HS / 2] = {};   // lse, D: dQ only, of owned queries
    if (OWNS_QUERIES) {
        QueryStatistics<HS> statistics;
        statistics.load(lse_all + head.rows, out + head.out, own0 + row, T, head.C);
        statistics.dot(D, D_all + head.rows, own0 + row, T, [&](int r, int chunk) {
            return d + min(own0 + row + r, T - 1) * head.C + chunk * PACK;
        });
        for (int h = 0; h < 2; h++) lse[h] = statistics.lse[h] * LOG2E;
    }
    for (int i = first; i < end; i++) {
        const int now = (i - first) % 2 * TILE;
        if (i + 1 < end) load_other(i + 1, TILE - now);
        cp_async_commit();
        for (int r = threadIdx.x; !OWNS_QUERIES && r < MMA_ROWS; r += MMA_BLOCK) {
            const int query = i * MMA_ROWS + r;
            lse_tile[r] = query < T ? lse_all[head.rows + query] * LOG2E : 0.0f;
            D_tile[r] = query < T ? D_all[head.rows + query] : 0.0f;
        }
        cp_async_wait<1>();
        __syncthreads();
        float S[MMA_ROWS / 2], dP[MMA_ROWS / 2];
        uint32_t P[MMA_ROWS / 16][4];
        mma_scores<HS>(S, X, row, A + now);                                             // S = Q K^T, or K Q^T
        mma_scores<HS>(dP, Y, row, B + now);                                            // dP = dO V^T, or V dO^T
        if (i == own_tile) mask_scores<OWNS_QUERIES ? Queries::ROWS : Queries::COLUMNS>(S, own0 + row, i * MMA_ROWS);
        probabilities(S, scale * LOG2E, [&](int e) {
            return OWNS_QUERIES ? lse[e / 2 % 2] : lse_tile[fragment_column(e)];
        });
        score_gradients(dP, S, [&](int e) { return OWNS_QUERIES ? D[e / 2 % 2] : D_tile[fragment_column(e)]; });
        if (!OWNS_QUERIES) {
            to_operands(P, S);
            mma_outputs<HS>(dY, P, B + now);                                            // dV += P dO
        }
        to_operands(P, dP);
        mma_outputs<HS>(dX, P, A + now);                                                // dQ += dS K, or dK += dS Q
        __syncthreads();
    }
    const float factor[2] = {scale, scale};
    multiply_rows(dX, factor);
    floatX* to = dqkv + head.qkv + (OWNS_QUERIES ? 0 : head.C);
    store_rows<HS>(Out<e5m2>{to}, head.stride, own0 + row, T, dX, X, MMA_ROWS, row);
    if (!OWNS_QUERIES) store_rows<HS>(Out<e5m2>{to + head.C}, head.stride, own0 + row, T, dY, Y, MMA_ROWS, row);
}

// ---- launchers

template <int HS> void attention_forward_mma(const Tensor& out, const floatX* qkv, const Heads& h) {
    launch("attention_forward", attention_forward_mma_kernel<HS>, dim3(ceil_div(h.T, MMA_ROWS), h.NH, h.B), MMA_BLOCK,
           5 * tile_bytes(MMA_ROWS, HS), out.to<e4m3>(), h.lse, qkv, h.T);
}

template <int HS>
void attention_backward_mma(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const Heads& h) {
    constexpr size_t tiles = 6 * tile_bytes(MMA_ROWS, HS), statistics = 2 * MMA_ROWS * sizeof(float);
    const dim3 grid(ceil_div(h.T, MMA_ROWS), h.NH, h.B);
    launch("attention_backward_dq", attention_backward_mma_kernel<HS, Owns::QUERIES>, grid, MMA_BLOCK, tiles, dqkv, h.D,
           dout, qkv, out, h.lse, h.T);
    launch("attention_backward_dkv", attention_backward_mma_kernel<HS, Owns::KEYS>, grid, MMA_BLOCK, tiles + statistics,
           dqkv, h.D, dout, qkv, out, h.lse, h.T);
}

// What a warp does with 16 rows of attention's scores while they are a fragment in its registers (see ptx.cuh): the
// mask, a step of the online softmax forward, P and dS backward. Both attention_mma.cuh and attention_wgmma.cuh put it
// between two products; formulas are in train_gpt.cu, section "attention".
#pragma once

#include "ptx.cuh"

// A key counts for its own query and those after it. Where (row0, column0) is a fragment's corner.
template <Queries QUERIES, int N> __device__ __forceinline__ void mask_scores(float (&S)[N], int row0, int column0) {
    for (int e = 0; e < N; e++) {
        const int row = row0 + fragment_row(e), column = column0 + fragment_column(e);
        if (QUERIES == Queries::ROWS ? column > row : row > column) S[e] = -INFINITY;
    }
}

// The softmax of a lane's two rows so far. `sum` is over this lane's columns only.
struct RowState {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// Four lanes share a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// One step of the online softmax: S becomes P = 2^(scale (S - max)), with the maximum so far; older
// sums and outputs must be multiplied by `rescale`. Every row has a key in its first step.
template <int N>
__device__ __forceinline__ void softmax_step(float (&S)[N], RowState& rows, float (&rescale)[2], float scale) {
    float max[2] = {rows.max[0], rows.max[1]}, sum[2] = {};
    for (int e = 0; e < N; e++) max[e / 2 % 2] = fmaxf(max[e / 2 % 2], S[e]);
    for (int h = 0; h < 2; h++) {
        max[h] = row_max(max[h]);
        rescale[h] = exp2_approx((rows.max[h] - max[h]) * scale);   // first step: 2^-inf = 0
        rows.max[h] = max[h];
        max[h] *= scale;
    }
    for (int e = 0; e < N; e++) {
        S[e] = exp2_approx(S[e] * scale - max[e / 2 % 2]);
        sum[e / 2 % 2] += S[e];
    }
    for (int h = 0; h < 2; h++) rows.sum[h] = rows.sum[h] * rescale[h] + sum[h];
}

// lse of a lane's two rows.
__device__ __forceinline__ void store_lse(float* lse, const RowState& rows, const float (&sum)[2], int row0, int T,
                                          float scale) {
    for (int h = 0; h < 2; h++)
        if (threadIdx.x % 4 == 0 && row0 + fragment_row(2 * h) < T)
            lse[row0 + fragment_row(2 * h)] = (rows.max[h] * scale + log2f(sum[h])) / LOG2E;
}

// lse (in powers of 2) and D of a lane's two queries; D = sum of dout * out is left in memory for the
// kernel of dK and dV. Two lanes share a query.
template <int HS>
__device__ __forceinline__ void query_statistics(float (&lse)[2], float (&D)[2], float* D_out, const float* lse_in,
                                                 const floatX* dout, const floatX* out, int row0, int T, size_t apart) {
    const int lane = threadIdx.x % 32, row = row0 + lane / 2;
    float sum = 0;
    if (row < T)
        for (int i = lane % 2 * PACK; i < HS; i += 2 * PACK) {
            float x[PACK], y[PACK];
            load(x, dout + row * apart + i);
            load(y, out + row * apart + i);
            for (int k = 0; k < PACK; k++) sum += x[k] * y[k];
        }
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    if (row < T && lane % 2 == 0) D_out[row] = sum;
    for (int h = 0; h < 2; h++) {
        const int mine = fragment_row(2 * h);
        D[h] = __shfl_sync(FULL_WARP, sum, 2 * mine);
        lse[h] = row0 + mine < T ? lse_in[row0 + mine] * LOG2E : 0.0f;
    }
}

// P = 2^(scale S - lse) in place of S;  dS = P * (dP - D) in place of dP. lse(e) and D(e) belong to
// element e's query.
template <int N, typename Lse> __device__ __forceinline__ void probabilities(float (&S)[N], float scale, Lse lse) {
    for (int e = 0; e < N; e++) S[e] = exp2_approx(S[e] * scale - lse(e));
}
template <int N, typename Dot>
__device__ __forceinline__ void score_gradients(float (&dP)[N], const float (&P)[N], Dot D) {
    for (int e = 0; e < N; e++) dP[e] = P[e] * (dP[e] - D(e));
}

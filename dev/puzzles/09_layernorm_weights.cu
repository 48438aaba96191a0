// Puzzle 9: gradients of LayerNorm's weights
//
//     dw[c] = sum over n of dout[n, c] * (inp[n, c] - mean[n]) * rstd[n]
//     db[c] = sum over n of dout[n, c]
//
// dout, inp: (N, C); mean, rstd: (N); dw, db: (C); all float. A block of WARPS warps computes WARP_SIZE columns.
//
// Judged: D, the results have the same bits in whatever order the threads run. T, each element of dout and inp is
// loaded once, mean and rstd of a row once for each block. W, accesses to shared memory have no bank conflicts. The
// estimated time: all warps have work.
#include "puzzle.h"

constexpr int WARPS = 16;

__global__ void layernorm_weights_kernel(float* dw, float* db, const float* dout, const float* inp, const float* mean,
                                         const float* rstd, int N, int C) {
    // ---- your code: about 20 lines
    // ---- end
}

void layernorm_weights(float* dw, float* db, const float* dout, const float* inp, const float* mean, const float* rstd,
                       int N, int C) {
    layernorm_weights_kernel<<<ceil_div(C, WARP_SIZE), WARPS * WARP_SIZE>>>(dw, db, dout, inp, mean, rstd, N, C);
}

// Puzzle 8: residual addition and LayerNorm in one kernel
//
//     residual[n, c] = inp1[n, c] + inp2[n, c]
//     out[n, c] = (residual[n, c] - mean[n]) * rstd[n] * w[c] + b[c]
//     mean[n]: average of row n of residual      rstd[n] = 1 / sqrt(average of (residual[n, c] - mean[n])^2 + EPS)
//
// inp1, inp2, residual, out: (N, C); mean, rstd: (N); w, b: (C); all float. C is any number up to 1024. One warp per
// row. The mean may be much larger than the deviations from it: subtract it before you multiply.
//
// Judged: S, each request of a warp needs as few sectors as possible. T, each element of inp1 and inp2 is loaded once,
// each of residual and out is stored once, and each row loads w and b once.
#include "puzzle.h"

constexpr int WARPS = 4;   // of a block
constexpr int MAX_C = 1024;
constexpr float EPS = 1e-5f;

__global__ void residual_layernorm_kernel(float* out, float* residual, float* mean, float* rstd, const float* inp1,
                                          const float* inp2, const float* w, const float* b, int N, int C) {
    // ---- your code: about 30 lines
    // ---- end
}

void residual_layernorm(float* out, float* residual, float* mean, float* rstd, const float* inp1, const float* inp2,
                        const float* w, const float* b, int N, int C) {
    residual_layernorm_kernel<<<ceil_div(N, WARPS), WARPS * WARP_SIZE>>>(out, residual, mean, rstd, inp1, inp2, w, b,
                                                                         N, C);
}

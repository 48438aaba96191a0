// Puzzle 19: one step with a sharded optimizer (ZeRO-1)
//
// R ranks train one model by data parallelism. Each has all n weights w and the gradients g of its own part of the
// batch, but only its shard of AdamW's moments m and v: n / R elements, for the weights from rank * n / R on (R divides
// n). The step: sum the gradients over the ranks; find the squared norm of all n sums, for clipping; update the own
// shard with adamw_kernel; give every rank all new weights. The contents of g do not matter afterwards.
//
// sum_squares_kernel<<<1, 256>>>(norm, x, count) assigns the sum of count squares to *norm (undefined before).
// adamw_kernel(w, m, v, g, count, norm, 1.0f / R) needs the sums and their squared norm; it divides by R and clips.
//
// NCCL's collectives work in place if a rank's part is at its position in the whole.
//
// Judged: bytes sent, as in one all-reduce of n floats and one of a single float; no device memory is left allocated.
#include "puzzle.h"
#include <nccl.h>

__global__ void sum_squares_kernel(float* norm, const float* x, int count) {
    __shared__ float sums[256];
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += 256) sum += x[i] * x[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int t = 1; t < 256; t++) sum += sums[t];
    *norm = sum;
}

__global__ void adamw_kernel(float* w, float* m, float* v, const float* g, int count, const float* norm, float scale) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float clipped = g[i] * scale / fmaxf(1.0f, sqrtf(*norm) * scale);   // to a norm of at most 1
    m[i] = 0.9f * m[i] + 0.1f * clipped;
    v[i] = 0.95f * v[i] + 0.05f * clipped * clipped;
    w[i] -= 1e-2f * (m[i] / (sqrtf(v[i]) + 1e-8f) + 0.1f * w[i]);
}

void step(float* w, float* m, float* v, float* g, float* norm, int n, int rank, int R, ncclComm_t comm) {
    // ---- your code: about 8 lines
    // ---- end
}

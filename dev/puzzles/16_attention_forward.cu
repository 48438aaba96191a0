// Puzzle 16: flash attention, forward
//
//     s[i, j] = dot(q[i], k[j]) * SCALE        p[i, j] = exp(s[i, j]) / sum over j' <= i of exp(s[i, j'])
//     out[i] = sum over j <= i of p[i, j] * v[j]
//
// q, k, v, out: (heads, T, HS), float. A block has TILE queries of one head, each warp ROWS of them, and loops over
// tiles of TILE keys. The maximum and the sum of a row are not known before its last tile (online softmax): keep those
// of the tiles so far. When a tile raises the maximum from m to m', multiply the sum and out by exp(m - m'). Scores may
// be far from 0.
//
// Judged: T, a block loads its queries once, and once the keys and values up to its last query; W, no bank conflicts;
// B, no unnecessary barrier.
#include "puzzle.h"

constexpr int HS = WARP_SIZE, TILE = 32, WARPS = 8, ROWS = TILE / WARPS;
constexpr float SCALE = 0.1767767f;   // 1 / sqrt(HS)

// Return the sum and the maximum of x over a warp, in all lanes.
__device__ float warp_sum(float x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}
__device__ float warp_max(float x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    return x;
}

__global__ void attention_kernel(float* out, const float* q, const float* k, const float* v, int T) {
    const size_t head = static_cast<size_t>(blockIdx.y) * T * HS;
    const int query0 = blockIdx.x * TILE, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    // ---- your code: about 30 lines
    // ---- end
}

void attention(float* out, const float* q, const float* k, const float* v, int heads, int T) {
    attention_kernel<<<dim3(ceil_div(T, TILE), heads), WARPS * WARP_SIZE>>>(out, q, k, v, T);
}

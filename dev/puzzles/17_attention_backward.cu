// Puzzle 17: flash attention, backward
//
//     P[i, j]  = exp(SCALE * dot(q[i], k[j]) - lse[i]), 0 if j > i     dv[j] = sum over i of P[i, j] * dout[i]
//     dP[i, j] = dot(dout[i], v[j])                                    dq[i] = SCALE * sum over j of dS[i, j] * k[j]
//     dS[i, j] = P[i, j] * (dP[i, j] - D[i])                           dk[j] = SCALE * sum over i of dS[i, j] * q[i]
//
// q, k, v, dout: (heads, T, HS), bf16; dq, dk, dv: the same, float; lse, D: (heads, T), float. dq is 0 before the
// launch. Block (x, head, 0) computes dq of tile x of 32 queries, block (x, head, 1) dk and dv of tile x of keys. Both
// compute P and dS, tile by tile. tile_products.h has tiles and their products.
//
// Judged: D; T, a block loads its own rows once, and once the rows of the other side that it needs, each with lse and
// D; products of tiles: 7 for each pair of tiles that is not masked entirely.
#include "tile_products.h"

constexpr int HS = TILE;
constexpr float SCALE = 0.1767767f;   // 1 / sqrt(HS)

__global__ void backward_kernel(float* dq, float* dk, float* dv, const bf16* q, const bf16* k, const bf16* v,
                                const bf16* dout, const float* lse, const float* D, int T) {
    const size_t row0 = static_cast<size_t>(blockIdx.y) * T, head = row0 * HS;   // of this head
    const int own = blockIdx.x, tiles = gridDim.x;
    const bool owns_queries = blockIdx.z == 0;
    // ---- your code: about 50 lines
    // ---- end
}

void attention_backward(float* dq, float* dk, float* dv, const bf16* q, const bf16* k, const bf16* v, const bf16* dout,
                        const float* lse, const float* D, int heads, int T) {
    backward_kernel<<<dim3(ceil_div(T, TILE), heads, 2), TILE_BLOCK>>>(dq, dk, dv, q, k, v, dout, lse, D, T);
}

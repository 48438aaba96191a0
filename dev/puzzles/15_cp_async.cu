// Puzzle 15: repair a ring of asynchronous copies
//
//     out[i] = sum over j of exp(dot(queries[i], keys[j]))
//
// queries: (N, 4), keys: (T, 4), out: (N), float. One thread per query. The keys pass through a ring of STAGES tiles of
// BLOCK keys in shared memory. While a tile is read, the copies of the next STAGES - 1 tiles are in progress. cp_async,
// cp_async_commit and cp_async_wait: gpt/ptx.cuh.
//
// The code between the lines often gives the right results, but reads keys that may not have arrived: two mistakes.
// Judged: no race; B, no barrier that can be removed: one in each iteration is enough. Waiting for more copies than
// necessary is not judged.
#include "puzzle.h"

#include "../../gpt/ptx.cuh"

constexpr int BLOCK = 128, STAGES = 3;

__global__ void sum_exp_kernel(float* out, const float4* queries, const float4* keys, int N, int T) {
    extern __shared__ float4 ring[];   // (STAGES, BLOCK)
    const int i = blockIdx.x * BLOCK + threadIdx.x, tiles = (T + BLOCK - 1) / BLOCK;
    const float4 q = queries[i < N ? i : 0];
    auto load = [&](int tile) {   // starts to copy this thread's key of the tile; 0 after the last key
        const int j = tile * BLOCK + threadIdx.x;
        cp_async(&ring[tile % STAGES * BLOCK + threadIdx.x], &keys[j < T ? j : 0], j < T);
    };
    float sum = 0;
    // ---- your code: about 15 lines
    for (int tile = 0; tile < STAGES - 1; tile++) {
        if (tile < tiles) load(tile);
        cp_async_commit();
    }
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        if (tile + STAGES - 1 < tiles) {
            load(tile + STAGES - 1);
            cp_async_commit();
        }
        for (int j = 0; j < BLOCK && tile * BLOCK + j < T; j++) {
            const float4 k = ring[tile % STAGES * BLOCK + j];
            sum += expf(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
        }
    }
    // ---- end
    if (i < N) out[i] = sum;
}

void sum_exp(float* out, const float* queries, const float* keys, int N, int T) {
    sum_exp_kernel<<<ceil_div(N, BLOCK), BLOCK, STAGES * BLOCK * sizeof(float4)>>>(
        out, reinterpret_cast<const float4*>(queries), reinterpret_cast<const float4*>(keys), N, T);
}

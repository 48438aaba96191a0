// Puzzle 14: tensor cores, with operands from shared memory by ldmatrix
//
//     out[m, n] = sum over k of A[m, k] * B[n, k]
//
// A: (M, K), B: (N, K), bf16; out: (M, N), float. K is a multiple of 8. A block computes 64 x 64 elements of out, warp
// w rows 16w to 16w + 15 of them. It loads tiles (64 x 64) of A and B, whose rows have 8 chunks of 16 bytes. cp_async
// copies a chunk (or zeros); a lane of ldmatrix reads one. These functions and the fragments: gpt/ptx.cuh.
//
// Judged: W, no bank conflicts: choose where in a row each chunk is stored; bytes of shared memory: tiles without
// padding.
#include "puzzle.h"

#include "../../gpt/ptx.cuh"

constexpr int BLOCK = 128, TILE = 64, ROW_BYTES = 128, CHUNKS = 8;

__global__ void matmul_kernel(float* out, const bf16* A, const bf16* B, int M, int N, int K) {
    extern __shared__ __align__(1024) char a[];   // tile of A, then tile of B
    char* b = a + TILE * ROW_BYTES;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[TILE / 8][4] = {};   // accumulator fragments (16 x 8)
    // ---- your code: about 22 lines
    // ---- end
    for (int j = 0; j < TILE / 8; j++)
        for (int e = 0; e < 4; e++) {
            const int m = m0 + 16 * warp + lane / 4 + e / 2 * 8, n = n0 + 8 * j + lane % 4 * 2 + e % 2;
            if (m < M && n < N) out[static_cast<size_t>(m) * N + n] = sum[j][e];
        }
}

void matmul(float* out, const bf16* A, const bf16* B, int M, int N, int K) {
    matmul_kernel<<<dim3(ceil_div(N, TILE), ceil_div(M, TILE)), BLOCK, 2 * TILE * ROW_BYTES>>>(out, A, B, M, N, K);
}

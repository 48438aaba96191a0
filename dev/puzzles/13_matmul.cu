// Puzzle 13: matrix multiplication with tiles in shared memory
//
//     out[m, n] = sum over k of A[m, k] * B[k, n]
//
// A: (M, K), B: (K, N), out: (M, N), float, row-major. M, N and K need not be multiples of TILE.
// A block has TILE x TILE threads and computes a tile of TILE x TILE elements of out, one per thread. It loops over k
// in steps of TILE: each step loads a tile of A and a tile of B into shared memory, once.
//
// Judged: T, a block loads each element of its rows of A and of its columns of B once; S, loads and stores are
// coalesced; W, no bank conflicts; B, no unnecessary barrier.
#include "puzzle.h"

constexpr int TILE = 32;

__global__ void matmul_kernel(float* out, const float* A, const float* B, int M, int N, int K) {
    __shared__ float a[TILE][TILE], b[TILE][TILE];
    // ---- your code: about 12 lines
    // ---- end
}

void matmul(float* out, const float* A, const float* B, int M, int N, int K) {
    matmul_kernel<<<dim3(ceil_div(N, TILE), ceil_div(M, TILE)), dim3(TILE, TILE)>>>(out, A, B, M, N, K);
}

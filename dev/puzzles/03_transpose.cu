// Puzzle 3: transpose a matrix
//
//     out[c, r] = inp[r, c]
//
// inp: (rows, C), out: (C, rows), float. A block transposes a tile of TILE x TILE elements, which begins at row
// blockIdx.y * TILE and column blockIdx.x * TILE of inp. Tiles on the right and lower edges are incomplete. Its threads
// are TILE x BLOCK_ROWS: threadIdx.x is from 0 to 31, and the 32 threads with equal threadIdx.y are a warp.
//
// Judged: S, warps access neighbouring elements of both inp and out; W, no bank conflicts in shared memory;
//         B, no unnecessary __syncthreads().
#include "puzzle.h"

constexpr int TILE = 32, BLOCK_ROWS = 8;

__global__ void transpose_kernel(float* out, const float* inp, int rows, int C) {
    // ---- your code: about 13 lines
    // ---- end
}

void transpose(float* out, const float* inp, int rows, int C) {
    const dim3 grid(ceil_div(C, TILE), ceil_div(rows, TILE)), block(TILE, BLOCK_ROWS);
    transpose_kernel<<<grid, block>>>(out, inp, rows, C);
}

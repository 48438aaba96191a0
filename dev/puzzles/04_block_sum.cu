// Puzzle 4: sum of each row
//
//     out[r] = sum of inp[r, c] over c from 0 to C - 1
//
// inp: (rows, C), out: (rows), float. One block per row, THREADS threads per block; C is any number.
// Each thread adds some elements of the row. The 32 threads of a warp then add their sums by shuffles, for example
// __shfl_xor_sync(FULL_WARP, x, offset), which returns x of the thread whose number in the warp is this one's ^ offset.
// The sums of the warps are added by shared memory. out contains NaN before the launch.
//
// Judged: T, each element is loaded once; shared memory, one float per warp; D, the same bits in every order of the
//         threads; B, no unnecessary __syncthreads().
#include "puzzle.h"

constexpr int THREADS = 256;

__global__ void row_sum_kernel(float* out, const float* inp, int C) {
    // ---- your code: about 13 lines
    // ---- end
}

void row_sum(float* out, const float* inp, int rows, int C) { row_sum_kernel<<<rows, THREADS>>>(out, inp, C); }

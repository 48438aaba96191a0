// Puzzle 5: squared norm of a gradient
//
//     out[0] = sum of grad[i]^2 over i from 0 to n - 1
//
// grad: (n), bf16. out: (1), float. partial: (BLOCKS), float, is free for your use; it contains NaN, as does out. Write
// the kernels and their launches: many blocks compute partial sums (one block would use one of the GPU's 132
// multiprocessors), and a second launch adds them. The judge does not follow __threadfence() and counters: to it,
// blocks of one launch have no order. `const float g = grad[i];` converts from bf16; compute in float.
//
// Judged: D, the bits of the result do not depend on the order in which blocks run; T, grad is loaded once; the
//         estimated time.
#include "puzzle.h"

constexpr int THREADS = 256, BLOCKS = 32;

// Returns the sum of x over the block's THREADS threads to all of them, as in puzzle 4. All threads of the block must
// call it, once in a kernel.
__device__ float block_sum(float x) {
    __shared__ float warp_sums[THREADS / WARP_SIZE];
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = 0;
    for (float each : warp_sums) x += each;
    return x;
}

// ---- your code: about 20 lines
void squared_norm(float* out, float partial[BLOCKS], const bf16* grad, int n) {}
// ---- end

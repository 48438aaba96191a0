// Puzzle 2: multiply each element by a number, four elements at a time
//
//     out[i] = a * inp[i]          for i from 0 to n - 1
//
// inp, out: (n), float, aligned to 16 bytes. A thread can load or store a float4 (fields x, y, z, w), four neighbouring
// floats, with one instruction. Its address must be a multiple of 16 bytes. n is any number: the last 0 to 3 elements
// do not fill a float4. There is at least one thread for each float4, the incomplete one included.
//
// Judged: S and the number of instructions (of warps) that access memory.
#include "puzzle.h"

constexpr int THREADS = 256;

__global__ void packs_kernel(float* out, const float* inp, float a, int n) {
    // ---- your code: about 10 lines
    // ---- end
}

void packs(float* out, const float* inp, float a, int n) {
    packs_kernel<<<ceil_div(n, 4 * THREADS), THREADS>>>(out, inp, a, n);
}

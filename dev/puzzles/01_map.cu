// Puzzle 1: multiply each element by a number
//
//     out[i] = a * inp[i]          for i from 0 to n - 1
//
// inp, out: (n), float. A kernel is a function that many threads run at the same time. Here each thread computes one
// element. Threads are grouped in blocks of THREADS. Thread threadIdx.x of block blockIdx.x knows its place by these
// two numbers, which count from 0. All blocks are full, so there can be more threads than elements: the last threads
// of the last block must then do nothing.
//
// Judged: S, neighbouring threads of a block access neighbouring elements; the estimated time, as in most puzzles.
#include "puzzle.h"

constexpr int THREADS = 256;

__global__ void map_kernel(float* out, const float* inp, float a, int n) {
    // ---- your code: about 2 lines
    // ---- end
}

void map(float* out, const float* inp, float a, int n) {
    const int blocks = ceil_div(n, THREADS);   // n / THREADS, rounded up
    map_kernel<<<blocks, THREADS>>>(out, inp, a, n);
}

// Puzzle 10: backward of the token embedding
//
//     dwte[inp[n], c] += dout[n, c]      for each position n
//
// inp, order: (N), int; dout: (N, C), dwte: (V, C), float; tokens inp[n] are from 0 to V - 1. The same token occurs at
// many positions. `order` lists the positions 0 ... N - 1 sorted by token, so that equal tokens are neighbours:
// inp[order[0]] <= inp[order[1]] <= ...
// There are N blocks of THREADS threads.
//
// Judged: D, the results have the same bits in whatever order the threads run; S, accesses are coalesced.
#include "puzzle.h"

constexpr int THREADS = 128;

__global__ void embedding_backward_kernel(float* dwte, const float* dout, const int* inp, const int* order, int N,
                                          int C) {
    // ---- your code: about 10 lines
    // ---- end
}

void embedding_backward(float* dwte, const float* dout, const int* inp, const int* order, int N, int C) {
    embedding_backward_kernel<<<N, THREADS>>>(dwte, dout, inp, order, N, C);
}

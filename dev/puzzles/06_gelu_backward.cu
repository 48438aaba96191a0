// Puzzle 6: backward of GELU, in place
//
//     forward:   out = 0.5 x (1 + tanh(u)),   u = sqrt(2/pi) (x + 0.044715 x^3)            x: an element of inp
//     backward:  dinp[i] = dout[i] * (the derivative of out with respect to x, at x = inp[i])
//
// inp, dinp: (n), bf16; inp is between -12 and 12. sqrt(2/pi) is 0.7978845608. Before the launch dinp contains dout,
// which the kernel overwrites: that saves memory. Compute in float: `const float x = inp[i];` converts, and
// `dinp[i] = y;` rounds y to bf16.
//
// Judged: T, each element is loaded once and stored once.
#include "puzzle.h"

constexpr int THREADS = 256;

__global__ void gelu_backward_kernel(bf16* dinp, const bf16* inp, int n) {
    // ---- your code: about 8 lines
    // ---- end
}

void gelu_backward(bf16* dinp, const bf16* inp, int n) {
    gelu_backward_kernel<<<ceil_div(n, THREADS), THREADS>>>(dinp, inp, n);
}

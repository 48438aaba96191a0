// Puzzle 6: backward of GELU, in place
//
//     forward:   out = 0.5 x (1 + tanh(u)),   u = GELU_SCALE (x + GELU_CUBIC x^3)          x: an element of inp
//     backward:  dinp[i] = dout[i] * (the derivative of out with respect to x, at x = inp[i])
//
// inp, dinp: (n), bf16. Before the launch dinp contains dout, which dinp overwrites: that saves memory.
// inp is between -12 and 12. Compute in float: `const float x = inp[i];` converts, and `dinp[i] = y;` rounds y to bf16.
//
// Judged: T, each element is loaded once and stored once.
#include "puzzle.h"

constexpr int THREADS = 256;
constexpr float GELU_SCALE = 0.7978845608f;   // sqrt(2/pi)
constexpr float GELU_CUBIC = 0.044715f;

__global__ void gelu_backward_kernel(bf16* dinp, const bf16* inp, int n) {
    // ---- your code: about 8 lines
    // ---- end
}

void gelu_backward(bf16* dinp, const bf16* inp, int n) {
    gelu_backward_kernel<<<ceil_div(n, THREADS), THREADS>>>(dinp, inp, n);
}

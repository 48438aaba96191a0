// GELU, step by step: an elementwise kernel, whose arithmetic should be hidden behind its memory traffic.
//
// Topics:
//   - roofline: an H100 executes 20 FP32 operations in the time in which it moves one byte from or to memory. GELU in
//     BF16 moves 4 bytes per element, so 80 operations are free: 40 instructions if all are multiply-adds;
//   - special function unit: one instruction computes 2^x to within a few units in the last place. The formula can be
//     rewritten in terms of 2^x;
//   - packs: the 8 elements (4 in FP32) of 16 bytes share the instructions that compute addresses, load and store;
//   - spans: a block that processes many consecutive elements pays its start-up cost once.
// Bound by memory bandwidth: forward reads inp and writes out; backward reads dout and inp and writes dinp.
//
// n is a multiple of 16, like all sizes of the model.

#include "study.h"

// ==== two formulas ===========================================================
// GELU is x s with s = 0.5 (1 + tanh(u)), between 0 and 1, and u = sqrt(2/pi) (x + 0.044715 x^3). Its derivative is
// s + x ds/dx, with ds/dx = 2 s (1 - s) du/dx.

// The usual formula. The library function tanhf evaluates a polynomial for small |x|, and an exponential and a division
// for large |x|. A warp whose lanes diverge executes both branches.
__device__ __forceinline__ float by_tanh(float x) {
    return 0.5f * (1 + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// The same value: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)). __expf is a multiplication and the special function unit's
// 2^x, without branches. If exp overflows to infinity, 1 / infinity gives 0, the correct limit.
__device__ __forceinline__ float by_exp(float x) {
    return 1.0f / (1.0f + __expf(-2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// ==== kernels ================================================================
// ---- 1, 2, 3: one thread per element, without tanhf, packs ----
// 1  S = by_tanh, WIDTH 1: neighbouring threads read neighbouring elements, so accesses are coalesced from the start.
// 2  S = by_exp: fewer instructions and no divergence; the memory accesses are those of step 1.
// 3  WIDTH = PACK: each thread loads 128 bits. One load instruction of a warp moves 512 bytes, in step 2 only 64 (BF16)
//    or 128 (FP32), and each thread computes one address for the whole pack.
//
// Backward recomputes forward's s: storing and reading it would cost another 2 or 4 bytes per element. dinp overwrites
// dout, which saves the model an array (N, 4C) but no time.
//
// ---- 4: train_gpt.cu ----
// Each block processes a span of consecutive elements, and each of its threads several packs: fewer blocks are started
// than in step 3, and a thread loads its next pack while it processes the current one. 2^x and 1/x are single
// instructions of the special function unit. In step 3 a correctly rounded division takes ten instructions and a branch
// for denormals, and __expf takes three more: half of the instructions, with 8 elements per pack.

template <float (*S)(float), int WIDTH> __global__ void forward_kernel(floatX* out, const floatX* inp, size_t n) {
    const size_t i = my_index(WIDTH);
    if (i >= n) return;
    float x[WIDTH];
    load(x, inp + i);
    for (int k = 0; k < WIDTH; k++) x[k] *= S(x[k]);
    store(out + i, x);
}

template <float (*S)(float), int WIDTH>
__global__ void backward_kernel(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    const size_t i = my_index(WIDTH);
    if (i >= n) return;
    float x[WIDTH], d[WIDTH];
    load(x, inp + i);
    load(d, dout + i);
    for (int k = 0; k < WIDTH; k++) {
        const float s = S(x[k]), du = GELU_SCALE * (1 + 3 * GELU_CUBIC * x[k] * x[k]);
        d[k] *= s + x[k] * 2 * s * (1 - s) * du;
    }
    store(dinp + i, d);
}

constexpr const char* STEPS[] = {"one thread per element, tanhf", "special function unit instead of tanhf",
                                 "128 bits per thread", "train_gpt.cu: spans, no division"};

void study_forward(Study& study, size_t n) {
    Case c(study, "gelu forward", format("n %zu", n), bytes(2.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4), out = c.output<floatX>("out", n);
    for (size_t i = 0; i < n; i++) out.expected[i] = gelu_loop(inp.host[i]);
    c.step(STEPS[0], [&] { launch_threads(forward_kernel<by_tanh, 1>, n, out, inp, n); });
    c.step(STEPS[1], [&] { launch_threads(forward_kernel<by_exp, 1>, n, out, inp, n); });
    c.step(STEPS[2], [&] { launch_threads(forward_kernel<by_exp, PACK>, n / PACK, out, inp, n); });
    c.step(STEPS[3], [&] { gelu_forward(view(out, 1, n), view(inp, 1, n)); });
}

void study_backward(Study& study, size_t n) {
    Case c(study, "gelu backward, in place", format("n %zu", n), bytes(3.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4);
    const auto dinp = c.updated<floatX>("dinp", n);   // initially dout
    for (size_t i = 0; i < n; i++) dinp.expected[i] *= gelu_derivative_loop(inp.host[i]);
    c.step(STEPS[0], [&] { launch_threads(backward_kernel<by_tanh, 1>, n, dinp, dinp, inp, n); });
    c.step(STEPS[1], [&] { launch_threads(backward_kernel<by_exp, 1>, n, dinp, dinp, inp, n); });
    c.step(STEPS[2], [&] { launch_threads(backward_kernel<by_exp, PACK>, n / PACK, dinp, dinp, inp, n); });
    c.step(STEPS[3], [&] { gelu_backward(view(dinp, 1, n), dinp, view(inp, 1, n)); });
}

void run_study(Study& study) {
    study.at_sizes<size_t>({16, 4112, 12304}, 8192 * 6400, 64 * 1024, study_forward, study_backward);
}

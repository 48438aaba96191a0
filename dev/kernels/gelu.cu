// GELU, step by step: a kernel with so little to do that its arithmetic must not cost time.
//
// To learn here:
//   - the roofline: an H100 can do 20 FP32 operations for each byte that it moves from memory. GELU in BF16 moves
//     4 bytes an element: 80 operations are free, which is 40 instructions where all are multiply-adds;
//   - the special function unit: one instruction returns 2^x to within a few units in the last place. The formula can
//     be rewritten until it needs just that;
//   - packs: what is left are instructions for addresses, loads and stores, which 8 elements can share;
//   - spans: a block that owns many consecutive elements starts once for all of them.
// Memory is the bound: forward reads inp and writes out; backward reads dout and inp and writes dinp.
//
// n is a multiple of 16, as all sizes of the model are.

#include "study.h"

// ==== two formulas ===========================================================
// GELU is x s with s = 0.5 (1 + tanh(u)), which goes from 0 to 1, and u = sqrt(2/pi) (x + 0.044715 x^3). Its derivative
// is s + x ds/dx, with ds/dx = 2 s (1 - s) du/dx.

// As it is usually written. tanhf is a library function: a polynomial for small |x|, an exponential and a division for
// large |x|. Where the lanes of a warp differ, all of them take the time of both.
__device__ __forceinline__ float by_tanh(float x) {
    return 0.5f * (1 + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// The same, as 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)): __expf is a multiplication and the special function unit's
// 2^x, without branches. exp may overflow to infinity, and 1 / infinity is 0, which is right.
__device__ __forceinline__ float by_exp(float x) {
    return 1.0f / (1.0f + __expf(-2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// ==== kernels ================================================================
// ---- 1, 2, 3: a thread per element, without tanhf, packs ----
// 1  S = by_tanh, WIDTH 1: neighbouring threads read neighbouring elements, so memory is used well from the start.
// 2  S = by_exp: fewer instructions.
// 3  WIDTH = PACK: a warp's load is 512 bytes instead of 64 or 128, and needs one address per thread.
//
// Backward computes forward's s again: reading it back would cost 2 or 4 bytes an element. dinp is written in the place
// of dout, which saves a model an array (N, 4C) but no time.
//
// ---- 4: train_gpt.cu ----
// A block owns a span of consecutive elements and its threads take packs of it in turn: fewer blocks to start, and a
// thread has its next load in flight when the last one is done. It uses the special function unit's 2^x and 1/x
// directly: a correctly rounded division takes ten instructions and a branch for denormals, and __expf takes three more
// for denormals. At 8 elements a pack that is half of the kernel.

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

constexpr const char* STEPS[] = {"a thread per element, tanhf", "the same by the special function unit",
                                 "128 bits a thread", "train_gpt.cu: spans, no division"};

void study_forward(Study& study, size_t n) {
    Case c(study, "gelu forward", format("n %zu", n), bytes(2.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4), out = c.output<floatX>("out", n);
    for (size_t i = 0; i < n; i++) {
        const double x = inp.host[i];
        out.expected[i] = 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
    c.step(STEPS[0], [&] { launch_threads(forward_kernel<by_tanh, 1>, n, out, inp, n); });
    c.step(STEPS[1], [&] { launch_threads(forward_kernel<by_exp, 1>, n, out, inp, n); });
    c.step(STEPS[2], [&] { launch_threads(forward_kernel<by_exp, PACK>, n / PACK, out, inp, n); });
    c.step(STEPS[3], [&] { gelu_forward(out, inp, n); });
}

void study_backward(Study& study, size_t n) {
    Case c(study, "gelu backward, in place", format("n %zu", n), bytes(3.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4);
    const auto dinp = c.updated<floatX>("dinp", n);   // at first dout
    for (size_t i = 0; i < n; i++) {
        const double x = inp.host[i], t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
        const double du = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
        dinp.expected[i] *= 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du;
    }
    c.step(STEPS[0], [&] { launch_threads(backward_kernel<by_tanh, 1>, n, dinp, dinp, inp, n); });
    c.step(STEPS[1], [&] { launch_threads(backward_kernel<by_exp, 1>, n, dinp, dinp, inp, n); });
    c.step(STEPS[2], [&] { launch_threads(backward_kernel<by_exp, PACK>, n / PACK, dinp, dinp, inp, n); });
    c.step(STEPS[3], [&] { gelu_backward(dinp, dinp, inp, n); });
}

void run_study(Study& study) {
    study.at_sizes<size_t>({16, 4112, 12304}, 8192 * 6400, 64 * 1024, study_forward, study_backward);
}

// GELU, step by step: when a kernel has so little to do that its arithmetic must not be seen.
//
// To learn here:
//   - the roofline: an H100 has time for 20 FP32 operations for each byte that it moves from memory. GELU in BF16
//     moves 4 bytes an element: 80 operations are free, 40 instructions where all are multiply-adds. Not many, with
//     tanhf, an address, a load and a store among them;
//   - the special function unit: one instruction gives 2^x to within a few units in the last place. Rewrite the
//     formula until it needs just that;
//   - packs: what is left are instructions for addresses, loads and stores, which 8 elements can share;
//   - spans: a block that owns many consecutive elements starts once for all of them.
// Memory is the bound: forward reads inp and writes out; backward reads dout and inp and writes dinp, for which
// dout's place will do, as nobody asks for it again.
//
// n is a multiple of 16, as all sizes of the model are.

#include "study.h"

// The element, or the first of WIDTH, of this thread, where each thread has no others.
template <int WIDTH> __device__ __forceinline__ size_t my_first() {
    return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH;
}
template <int WIDTH> unsigned blocks_for(size_t n) { return ceil_div(n, static_cast<size_t>(BLOCK) * WIDTH); }

// ==== two ways to write it ===================================================
// GELU is x s with s = 0.5 (1 + tanh(u)) and u = sqrt(2/pi) (x + 0.044715 x^3): s goes from 0 to 1, a switch that
// the element's own value turns. Its derivative is s + x ds/dx, and ds/dx = 2 s (1 - s) du/dx in either form.

// As it is usually written. tanhf is a function of the library: it tells small |x| from large ones, has a polynomial
// for these and an exponential and a division for those; where the lanes of a warp differ, all wait for both.
__device__ __forceinline__ float by_tanh(float x) {
    return 0.5f * (1 + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// The same, as 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)): __expf is a multiplication and the special function unit's
// 2^x. No branches. exp may overflow to infinity, and 1 / infinity is the 0 that it should be.
__device__ __forceinline__ float by_exp(float x) {
    return 1.0f / (1.0f + __expf(-2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
}

// ==== forward ================================================================

// ---- 1, 2, 3: an element per thread, without tanhf, then by packs ----
// 1  S = by_tanh, WIDTH 1: neighbouring threads read neighbours, so memory is used well from the start.
// 2  S = by_exp: less is computed in the shadow of the loads.
// 3  WIDTH = PACK: a warp's load is 512 bytes, not 64 or 128, and for each a thread computes its address once.

template <float (*S)(float), int WIDTH> __global__ void forward_kernel(floatX* out, const floatX* inp, size_t n) {
    const size_t i = my_first<WIDTH>();
    if (i >= n) return;
    float x[WIDTH];
    load(x, inp + i);
    for (int k = 0; k < WIDTH; k++) x[k] *= S(x[k]);
    store(out + i, x);
}

// ---- 4: train_gpt.cu ----
// A block owns a span of consecutive elements and its threads take packs of it in turn: fewer blocks to start, and a
// thread has its next load to wait for when the last one is done. And two instructions by name: 2^x and 1/x of the
// special function unit. A division rounds correctly, for which it needs some ten instructions and a branch for
// denormals; __expf keeps denormals, for which it needs three more. At 8 elements a pack that is half of the kernel.

void forward(Study& study, size_t n) {
    Case c(study, "gelu forward", format("n %zu", n), bytes(2.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4);
    const auto out = c.output<floatX>("out", n);
    for (size_t i = 0; i < n; i++) {
        const double x = inp.host[i];
        out.expected[i] = 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
    c.step("an element per thread, tanhf", [&] {
        launch("step 1", forward_kernel<by_tanh, 1>, blocks_for<1>(n), BLOCK, 0, out, inp, n);
    });
    c.step("the same by the special function unit", [&] {
        launch("step 2", forward_kernel<by_exp, 1>, blocks_for<1>(n), BLOCK, 0, out, inp, n);
    });
    c.step("128 bits a thread", [&] {
        launch("step 3", forward_kernel<by_exp, PACK>, blocks_for<PACK>(n), BLOCK, 0, out, inp, n);
    });
    c.step("train_gpt.cu: spans, no division", [&] { gelu_forward(out, inp, n); });
}

// ==== backward ===============================================================

// ---- 1, 2, 3: as forward ----
// Forward's s is not stored: to read it back would cost 2 or 4 bytes an element, to compute it again costs nothing, as
// memory is what all wait for. dinp is dout: each thread has read its elements when it writes them, and no other
// thread wants them. Not faster, as many bytes move; but a model has one array (N, 4C) less to find memory for.

template <float (*S)(float), int WIDTH>
__global__ void backward_kernel(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    const size_t i = my_first<WIDTH>();
    if (i >= n) return;
    float x[WIDTH], d[WIDTH];
    load(x, inp + i);
    load(d, dout + i);
    for (int k = 0; k < WIDTH; k++) {
        const float s = S(x[k]), slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * x[k] * x[k]);   // slope: du/dx
        d[k] *= s + x[k] * 2 * s * (1 - s) * slope;
    }
    store(dinp + i, d);
}

void backward(Study& study, size_t n) {
    Case c(study, "gelu backward, in place", format("n %zu", n), bytes(3.0 * n * sizeof(floatX)));
    const auto inp = c.input<floatX>(n, -4, 4);
    const auto dinp = c.updated<floatX>("dinp", n);   // dout at first
    for (size_t i = 0; i < n; i++) {
        const double x = inp.host[i], t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
        const double slope = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
        dinp.expected[i] *= 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope;
    }
    c.step("an element per thread, tanhf", [&] {
        launch("step 1", backward_kernel<by_tanh, 1>, blocks_for<1>(n), BLOCK, 0, dinp, dinp, inp, n);
    });
    c.step("the same by the special function unit", [&] {
        launch("step 2", backward_kernel<by_exp, 1>, blocks_for<1>(n), BLOCK, 0, dinp, dinp, inp, n);
    });
    c.step("128 bits a thread", [&] {
        launch("step 3", backward_kernel<by_exp, PACK>, blocks_for<PACK>(n), BLOCK, 0, dinp, dinp, inp, n);
    });
    c.step("train_gpt.cu: spans, no division", [&] { gelu_backward(dinp, dinp, inp, n); });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        study.at_sizes<size_t>({16, 4112, 12304}, 8192 * 6400, 64 * 1024, [&](size_t n) {
            forward(study, n);
            backward(study, n);
        });
    });
}

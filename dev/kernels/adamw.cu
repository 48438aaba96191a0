// AdamW, step by step: many small operations on large arrays, which become one kernel.
//
// To learn here:
//   - fusing: a kernel per operation reads and writes arrays for each line of the formula; one kernel for all lines
//     reads and writes each array once;
//   - launches: a GPU runs through a bias of 2 KB faster than a CPU can ask for it. GPT-2 has 148 tensors, and
//     580 with 48 layers; if all of them lie in one array, one launch does;
//   - who knows the norm: gradients are scaled by a number that the device has just computed. A host that asks for it
//     waits for all that runs, and then has the GPU wait for it.
// Memory is the bound, per parameter, with FP32 gradients:
//     reads   master 4, gradient 4, m 4, v 4                                16 bytes
//     writes  master 4, m 4, v 4, the gradient's zero 4, the weight 2       18 bytes, in FP32 16: weights are master
//
//     g = grad * min(1, clip / (norm + 1e-6))
//     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//     w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w),   grad = 0

#include "study.h"

// ==== tensors ================================================================

struct Size { int layers, C; };
// Their sizes. Matrices decay; vectors, biases and those of two LayerNorms a layer, do not.
struct Tensors { std::vector<size_t> matrices, vectors; };

Tensors tensors_of(const Size& size) {
    const size_t C = size.C;
    Tensors all;
    for (int l = 0; l < size.layers; l++) {
        for (size_t n : {3 * C * C, C * C, 4 * C * C, 4 * C * C}) all.matrices.push_back(n);
        for (size_t n : {3 * C, C, 4 * C, C, C, C, C, C}) all.vectors.push_back(n);
    }
    return all;
}

size_t sum_of(const std::vector<size_t>& sizes) {
    size_t sum = 0;
    for (size_t n : sizes) sum += n;
    return sum;
}

// What an update changes, of one tensor or of all. In FP32 weights and master are the same memory.
struct State {
    floatX* weights;
    float *master, *grads, *m, *v;
    __host__ __device__ State from(size_t i) const { return {weights + i, master + i, grads + i, m + i, v + i}; }
};

// Calls update(state, settings, n) for each tensor. The host asks the device by how much to scale gradients.
template <typename F>
void for_each_tensor(const Tensors& tensors, const State& all, const float* norm, AdamW a, F update) {
    const float scale = std::min(1.0f, a.clip / (fetch(norm) + 1e-6f));
    size_t i = 0;
    for (size_t n : tensors.matrices) update(all.from(i), a, scale, n), i += n;
    a.weight_decay = 0;
    for (size_t n : tensors.vectors) update(all.from(i), a, scale, n), i += n;
}

// ==== steps ==================================================================

// ---- 1: a kernel per line of the formula, for each tensor ----
// Five or six launches a tensor. Together they move 58 bytes a parameter in BF16, not 34: 8 to scale the gradient, 12
// for each of m and v, 16 for the weights, 6 to round them, 4 to zero the gradient.

template <int WIDTH> __device__ __forceinline__ size_t my_first() {
    return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH;
}

__global__ void scale_kernel(float* grads, float scale, size_t n) {
    const size_t i = my_first<1>();
    if (i < n) grads[i] *= scale;
}
__global__ void first_moment_kernel(float* m, const float* grads, float beta1, size_t n) {
    const size_t i = my_first<1>();
    if (i < n) m[i] = beta1 * m[i] + (1 - beta1) * grads[i];
}
__global__ void second_moment_kernel(float* v, const float* grads, float beta2, size_t n) {
    const size_t i = my_first<1>();
    if (i < n) v[i] = beta2 * v[i] + (1 - beta2) * grads[i] * grads[i];
}
__global__ void weights_kernel(float* w, const float* m, const float* v, AdamW a, size_t n) {
    const size_t i = my_first<1>();
    if (i >= n) return;
    w[i] -= a.lr * (m[i] / a.correction1 / (sqrtf(v[i] / a.correction2) + a.eps) + a.weight_decay * w[i]);
}

void by_operations(const State& s, const AdamW& a, float scale, size_t n) {
    const unsigned blocks = ceil_div(n, BLOCK);
    launch("scale", scale_kernel, blocks, BLOCK, 0, s.grads, scale, n);
    launch("m", first_moment_kernel, blocks, BLOCK, 0, s.m, s.grads, a.beta1, n);
    launch("v", second_moment_kernel, blocks, BLOCK, 0, s.v, s.grads, a.beta2, n);
    launch("weights", weights_kernel, blocks, BLOCK, 0, s.master, s.m, s.v, a, n);
    if (SEPARATE_MASTER) round_weights(s.weights, s.master, n);
    clear(s.grads, n * sizeof(float));
}

// ---- 2, 3: a kernel per tensor, then by packs ----
// 2  WIDTH 1: what one line leaves for the next stays in a register.
// 3  WIDTH = PACK: with four arrays read and five written, a thread has 64 bytes on their way at once, or 128 in BF16,
//    where packs are 8 elements, here of FP32.

template <int WIDTH> __global__ void fused_kernel(State all, AdamW a, float scale, size_t n) {
    const size_t i = my_first<WIDTH>();
    if (i >= n) return;
    const State s = all.from(i);
    float w[WIDTH], g[WIDTH], m[WIDTH], v[WIDTH], zero[WIDTH] = {};
    load(w, s.master);
    load(g, s.grads);
    load(m, s.m);
    load(v, s.v);
    for (int k = 0; k < WIDTH; k++) {
        g[k] *= scale;
        m[k] = a.beta1 * m[k] + (1 - a.beta1) * g[k];
        v[k] = a.beta2 * v[k] + (1 - a.beta2) * g[k] * g[k];
        w[k] -= a.lr * (m[k] / a.correction1 / (sqrtf(v[k] / a.correction2) + a.eps) + a.weight_decay * w[k]);
    }
    store(s.m, m);
    store(s.v, v);
    store(s.master, w);
    if (SEPARATE_MASTER) store(s.weights, w);
    store(s.grads, zero);
}

template <int WIDTH> void fused(const State& s, const AdamW& a, float scale, size_t n) {
    launch("fused", fused_kernel<WIDTH>, ceil_div(n, static_cast<size_t>(BLOCK) * WIDTH), BLOCK, 0, s, a, scale, n);
}

// ---- 4: train_gpt.cu ----
// All tensors lie one after another, those that decay first, so that an element's index says whether it does: one
// launch. It reads norm and settings on the device: nothing waits, and a CUDA graph can replay it.

void update(Study& study, const Size& size) {
    const Tensors tensors = tensors_of(size);
    const size_t decayed = sum_of(tensors.matrices), n = decayed + sum_of(tensors.vectors);
    const double bytes_each = SEPARATE_MASTER ? 34 : 32;
    Case c(study, "adamw", format("%zu parameters in %zu tensors", n, tensors.matrices.size() + tensors.vectors.size()),
           bytes(bytes_each * n));
    // A large step and decay, so that what is wrong with either shows in the weights.
    const AdamW a = {0.1f, 0.9f, 0.95f, 1e-8f, 0.5f, 1.0f, 1 - powf(0.9f, 3), 1 - powf(0.95f, 3)};
    const auto norm = c.input<float>(std::vector<int>{2}), loss_scale = c.input<float>(SCALE_OF_ONE);
    const auto master = c.updated<float>("master", n), grads = c.updated<float>("grads", n);
    const auto m = c.updated<float>("m", n), v = c.updated<float>("v", n, 0.1, 1);
    const auto weights = c.output<floatX>("weights", n);
    const auto settings = c.scratch<float>(sizeof(AdamW) / sizeof(float));
    for (size_t i = 0; i < n; i++) {
        const double g = grads.host[i] * a.clip / (norm.host[0] + 1e-6), w = master.host[i];
        const double new_m = a.beta1 * m.host[i] + (1.0 - a.beta1) * g;
        const double new_v = a.beta2 * v.host[i] + (1.0 - a.beta2) * g * g;
        const double step = new_m / a.correction1 / (sqrt(new_v / a.correction2) + a.eps);
        m.expected[i] = new_m;
        v.expected[i] = new_v;
        master.expected[i] = weights.expected[i] = w - a.lr * (step + (i < decayed ? a.weight_decay : 0) * w);
        grads.expected[i] = 0;
    }
    if (FLOATX == DType::FP32) weights.expected.clear();   // master's memory has them
    const auto all = [&] {
        float* const w = master;
        return State{FLOATX == DType::FP32 ? reinterpret_cast<floatX*>(w) : weights, w, grads, m, v};
    };
    c.step("a kernel per operation, for each tensor", [&] { for_each_tensor(tensors, all(), norm, a, by_operations); });
    c.step("a kernel per tensor", [&] { for_each_tensor(tensors, all(), norm, a, fused<1>); });
    c.step("128 bits of weights a thread", [&] { for_each_tensor(tensors, all(), norm, a, fused<PACK>); });
    c.step("train_gpt.cu: one launch, nothing waits", [&] {
        AdamW* const on_device = reinterpret_cast<AdamW*>(static_cast<float*>(settings));
        set_adamw(on_device, a);
        adamw(all().weights, master, grad(grads), m, v, norm, loss_scale_in(loss_scale), on_device, decayed, n);
    });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        study.at_sizes<Size>({{1, 16}, {3, 48}}, {12, 512}, {1, 64}, [&](const Size& size) { update(study, size); });
    });
}

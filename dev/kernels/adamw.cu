// Step, step by step: many elementwise operations on large arrays become one kernel.
//
// Topics:
//   - fusion: with one kernel per operation, each line of the formula reads and writes arrays. One kernel for all lines
//     reads and writes each array once;
//   - launch overhead: a GPU updates a bias of 2 KB faster than a CPU launches the kernel. GPT-2 has 148 tensors, with
//     48 layers 580. If all tensors are in one array, one launch is enough;
//   - synchronisation: the gradients are scaled by their norm, which the device has just computed. If the host reads
//     the norm, it waits for all queued work, and then the GPU idles until the host launches the next kernel.
// Bound by memory bandwidth. Traffic per parameter with FP32 gradients:
//     reads   master 4, gradient 4, m 4, v 4                        16 bytes
//     writes  master 4, m 4, v 4, zero gradient 4, weight 2         18 bytes; in FP32 16: master is the weight
//
//     g = grad * min(1, clip / (norm + 1e-6))
//     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//     w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w),   grad = 0

#include "study.h"

// ==== tensors ================================================================

struct Size { int layers, C; };

// Sizes of a model's tensors. Matrices have weight decay, vectors do not.
struct Tensors {
    std::vector<size_t> matrices, vectors;

    explicit Tensors(const Size& size) {
        const size_t C = size.C;
        for (int l = 0; l < size.layers; l++) {
            for (size_t n : {3 * C * C, C * C, 4 * C * C, 4 * C * C}) matrices.push_back(n);
            for (size_t n : {3 * C, C, 4 * C, C, C, C, C, C}) vectors.push_back(n);
        }
    }
};

// The arrays that an update changes, for one tensor or for all. In FP32, weights and master are the same memory.
struct State {
    floatX* weights;
    float *master, *grads, *m, *v;
    __host__ __device__ State from(size_t i) const { return {weights + i, master + i, grads + i, m + i, v + i}; }
};

// Calls update(state, settings, gradient scale, n) for each tensor. Synchronises, to read the norm from the device.
template <typename F>
void for_each_tensor(const Tensors& tensors, const State& all, const float* norm, Step a, F update) {
    const float scale = std::min(1.0f, a.clip / (fetch(norm) + 1e-6f));
    size_t i = 0;
    for (size_t n : tensors.matrices) update(all.from(i), a, scale, n), i += n;
    a.weight_decay = 0;
    for (size_t n : tensors.vectors) update(all.from(i), a, scale, n), i += n;
}

// ==== steps ==================================================================

// ---- 1: one kernel per operation, for each tensor ----
// Five or six launches per tensor. In BF16 they move 58 bytes per parameter instead of 34: 8 to scale the gradient, 12
// for m, 12 for v, 16 for the weights, 6 to round them, 4 to zero the gradient.

__global__ void scale_kernel(float* grads, float scale, size_t n) {
    const size_t i = my_index();
    if (i < n) grads[i] *= scale;
}
__global__ void first_moment_kernel(float* m, const float* grads, float beta1, size_t n) {
    const size_t i = my_index();
    if (i < n) m[i] = beta1 * m[i] + (1 - beta1) * grads[i];
}
__global__ void second_moment_kernel(float* v, const float* grads, float beta2, size_t n) {
    const size_t i = my_index();
    if (i < n) v[i] = beta2 * v[i] + (1 - beta2) * grads[i] * grads[i];
}
__global__ void weights_kernel(float* w, const float* m, const float* v, Step a, size_t n) {
    const size_t i = my_index();
    if (i < n) w[i] -= a.lr * (m[i] / a.correction1 / (sqrtf(v[i] / a.correction2) + a.eps) + a.weight_decay * w[i]);
}

void by_operations(const State& s, const Step& a, float scale, size_t n) {
    launch_threads(scale_kernel, n, s.grads, scale, n);
    launch_threads(first_moment_kernel, n, s.m, s.grads, a.beta1, n);
    launch_threads(second_moment_kernel, n, s.v, s.grads, a.beta2, n);
    launch_threads(weights_kernel, n, s.master, s.m, s.v, a, n);
    if (SEPARATE_MASTER) round_weights(s.weights, s.master, n);
    clear(s.grads, n * sizeof(float));
}

// ---- 2, 3: one kernel per tensor, packs ----
// 2  WIDTH 1: intermediate results stay in registers, so each array is read once and written once: 34 bytes.
// 3  WIDTH = PACK: the same bytes in a quarter of the instructions. A thread has 64 bytes in flight (128 in BF16)
//    instead of 16. In BF16 a pack of 8 floats is two accesses, each with a stride of 32 bytes between lanes, which use
//    half of each sector: the table shows 1.9 times the minimum number of sectors.

template <int WIDTH> __global__ void fused_kernel(State all, Step a, float scale, size_t n) {
    const size_t i = my_index(WIDTH);
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

template <int WIDTH> void fused(const State& s, const Step& a, float scale, size_t n) {
    launch_threads(fused_kernel<WIDTH>, n / WIDTH, s, a, scale, n);
}

// ---- 4: train_gpt.cu ----
// Packs of 4 floats, so that each access uses whole sectors. One launch instead of one per tensor: all tensors are in
// one array, those with weight decay first, so an element's index says whether it has weight decay. The kernel reads
// the norm and the settings from device memory: the host does not wait, and a CUDA graph can replay the launch.

void study_update(Study& study, const Size& size) {
    const Tensors tensors(size);
    const size_t decayed = std::accumulate(tensors.matrices.begin(), tensors.matrices.end(), size_t{0});
    const size_t n = std::accumulate(tensors.vectors.begin(), tensors.vectors.end(), decayed);
    Case c(study, "adamw", format("%zu parameters in %zu tensors", n, tensors.matrices.size() + tensors.vectors.size()),
           bytes((SEPARATE_MASTER ? 34.0 : 32.0) * n));
    // A large learning rate and weight decay, so that an error in either changes the weights visibly.
    Step a = {0.1f, 0.9f, 0.95f, 1e-8f, 0.5f, 1.0f, 1 - powf(0.9f, 3), 1 - powf(0.95f, 3)};
    const auto norm = c.input<float>(std::vector<int>{2});
    const auto master = c.updated<float>("master", n), grads = c.updated<float>("grads", n);
    const auto m = c.updated<float>("m", n), v = c.updated<float>("v", n, 0.1, 1);
    const auto weights = c.output<floatX>("weights", n);
    const auto settings = c.scratch<float>(sizeof(Step) / sizeof(float));
    a.factor = a.clip / (norm.host[0] + 1e-6f);   // as the kernel of the norm computes it
    for (size_t i = 0; i < n; i++) {
        const double g = grads.host[i] * a.clip / (norm.host[0] + 1e-6), w = master.host[i];
        m.expected[i] = a.beta1 * m.host[i] + (1.0 - a.beta1) * g;
        v.expected[i] = a.beta2 * v.host[i] + (1.0 - a.beta2) * g * g;
        const double step = m.expected[i] / a.correction1 / (sqrt(v.expected[i] / a.correction2) + a.eps);
        master.expected[i] = weights.expected[i] = w - a.lr * (step + (i < decayed ? a.weight_decay : 0) * w);
        grads.expected[i] = 0;
    }
    if (!SEPARATE_MASTER) weights.expected.clear();
    const auto all = [&] {
        float* const w = master;
        return State{SEPARATE_MASTER ? weights : reinterpret_cast<floatX*>(w), w, grads, m, v};
    };
    c.step("one kernel per operation and tensor", [&] { for_each_tensor(tensors, all(), norm, a, by_operations); });
    c.step("one kernel per tensor", [&] { for_each_tensor(tensors, all(), norm, a, fused<1>); });
    c.step("128 bits of weights per thread", [&] { for_each_tensor(tensors, all(), norm, a, fused<PACK>); });
    c.step("train_gpt.cu: one launch, no synchronisation", [&] {
        Step* const on_device = reinterpret_cast<Step*>(static_cast<float*>(settings));
        set_step(on_device, a);
        adamw({all().weights, master, grad(grads), m, v, n, decayed}, on_device, nullptr);
    });
}

void run_study(Study& study) { study.at_sizes<Size>({{1, 16}, {3, 48}}, {12, 512}, {1, 64}, study_update); }

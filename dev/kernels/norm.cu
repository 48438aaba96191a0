// The gradients' norm, step by step: one number from an array as large as the model.
//
// To learn here:
//   - reductions: lanes add up by shuffles, warps in shared memory, blocks through an array of partial sums that a
//     second kernel adds. Blocks cannot wait for each other, but a kernel waits for the one before it;
//   - how many blocks: enough to fill the GPU, and not more, as each leaves a number that somebody has to add;
//   - why no atomics: atomicAdd would save the second kernel, but blocks end in another order each time, floating-point
//     sums depend on the order, and then the same command would not give the same bits;
//   - sums of many numbers: thousands of threads, and several sums in each, add few numbers each. That is also more
//     exact than one long sum, whose last additions find it so large that small squares vanish.
// Memory is the bound: n gradients, of 4 bytes or of 2, are read once.
//
// n is a multiple of 16, as all sizes of the model are.

#include "study.h"

// ---- 1, 2, 3: one block, many blocks, many blocks by packs ----
// 1  One block of 1024 threads: as simple as can be, on one of an H100's 132 multiprocessors.
// 2  Blocks stride over the array together: in each round neighbouring threads read neighbours, and all of them
//    as many elements as there are threads. A second kernel, of one block, adds the blocks' sums.
// 3  WIDTH > 1: 128 bits a load, and a sum for each place in the pack, so that no addition waits for the one before.

template <int WIDTH, typename G> __global__ void squares_kernel(float* partials, const G* grads, size_t n) {
    float x[WIDTH], sums[WIDTH] = {}, sum = 0;
    const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = first * WIDTH; i < n; i += threads * WIDTH) {
        load(x, grads + i);
        for (int k = 0; k < WIDTH; k++) sums[k] += x[k] * x[k];
    }
    for (int k = 0; k < WIDTH; k++) sum += sums[k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void root_kernel(float* norm, const float* partials, int count) {
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrtf(sum);
}

template <int WIDTH, typename G>
void norm_by(int blocks, int threads, float* norm, float* partials, const G* grads, size_t n) {
    launch("squares", squares_kernel<WIDTH, G>, blocks, threads, 0, partials, grads, n);
    launch("root", root_kernel, 1, BLOCK, 0, norm, partials, blocks);
}

// ---- 4: train_gpt.cu ----
// The same, but a block owns spans of consecutive elements and walks from one to the next.

// Gradients of type G, which --grad-dtype chooses: half the bytes in 16 bits.
template <typename G> void norm_of(Study& study, const char* title, DType dtype, size_t n) {
    Case c(study, title, format("n %zu", n), bytes(1.0 * n * sizeof(G)));
    const auto grads = c.input<G>(n, -1, 3);
    const auto norm = c.output<float>("norm", 1);
    const auto loss_scale = c.input<float>(SCALE_OF_ONE);
    // Of a multiprocessor's 2048 threads a block takes 256.
    const int many = device.is_cpu() ? 8 : 8 * device.properties.multiProcessorCount;
    const auto partials = c.scratch<float>(std::max<size_t>(many, NORM_BLOCKS));
    double squares = 0;
    for (double g : grads.host) squares += g * g;
    norm.expected[0] = sqrt(squares);
    constexpr int WIDTH = 16 / sizeof(G);
    c.step("one block", [&] { norm_by<1, G>(1, WIDE_BLOCK, norm, partials, grads, n); });
    c.step("as many blocks as fit, partial sums", [&] { norm_by<1, G>(many, BLOCK, norm, partials, grads, n); });
    c.step("128 bits a load", [&] { norm_by<WIDTH, G>(many, BLOCK, norm, partials, grads, n); });
    c.step("train_gpt.cu: spans", [&] {
        norm_partials(partials, {static_cast<G*>(grads), dtype}, n, {nullptr, dtype}, 0, 0, 0);
        gradient_norm(norm, loss_scale_in(loss_scale), partials, norm_blocks(n, 0, 0));
    });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        study.at_sizes<size_t>({16, 4112, 20000}, 48 << 20, 64 << 10, [&](size_t n) {
            norm_of<float>(study, "gradient norm, FP32 gradients", DType::FP32, n);
            if (FLOATX == DType::FP16) norm_of<grad16>(study, "gradient norm, FP16 gradients", DType::FP16, n);
            else norm_of<grad16>(study, "gradient norm, BF16 gradients", DType::BF16, n);
        });
    });
}

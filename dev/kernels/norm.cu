// The gradients' norm, step by step: one number from an array as large as the model.
//
// To learn here:
//   - reductions: lanes add up by shuffles, warps in shared memory, blocks through an array of partial sums that a
//     second kernel adds. Blocks cannot wait for each other, but a kernel waits for the one before it;
//   - how many blocks: enough to fill the GPU and no more, as each leaves a partial sum to be added;
//   - why no atomics: atomicAdd would save the second kernel, but blocks end in another order each time, floating-point
//     sums depend on the order, and then the same command would not give the same bits;
//   - sums of many numbers: thousands of threads, and several sums in each, add few numbers each. That is also more
//     accurate than one long sum, which soon is so large that small squares vanish.
// Memory is the bound: n gradients, of 4 bytes or of 2, are read once.
//
// n is a multiple of 16, as all sizes of the model are.

#include "study.h"

// ---- 1, 2, 3: one block, many blocks, packs ----
// 1  One block of 1024 threads: as simple as can be, on one of an H100's 132 multiprocessors.
// 2  Blocks stride over the array together: in each round neighbouring threads read neighbouring elements. A second
//    kernel, of one block, adds the blocks' sums.
// 3  WIDTH > 1: 128 bits a load, and a sum for each place in the pack, so that no addition waits for the one before.
//
// ---- 4: train_gpt.cu ----
// The same, but a block owns spans of consecutive elements and goes from one to the next.

template <int WIDTH, typename G> __global__ void squares_kernel(float* partials, const G* grads, size_t n) {
    float x[WIDTH], sums[WIDTH] = {}, sum = 0;
    for (size_t i = my_index(WIDTH); i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x * WIDTH) {
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

// Gradients of type G, which --grad-dtype chooses.
template <typename G, DType DTYPE> void norm_of(Study& study, size_t n) {
    const std::string title = format("gradient norm, %s gradients", name_of(DTYPE));
    Case c(study, title, format("n %zu", n), bytes(1.0 * n * sizeof(G)));
    const auto grads = c.input<G>(n, -1, 3);
    const auto norm = c.output<float>("norm", 1);
    const auto loss_scale = c.input<float>(SCALE_OF_ONE);
    // A block takes 256 of the 2048 threads of a multiprocessor.
    const int many = device.is_cpu() ? 8 : 8 * device.properties.multiProcessorCount;
    const auto partials = c.scratch<float>(std::max<size_t>(many, NORM_BLOCKS));
    double squares = 0;
    for (double g : grads.host) squares += g * g;
    norm.expected[0] = sqrt(squares);
    c.step("one block", [&] { norm_by<1, G>(1, WIDE_BLOCK, norm, partials, grads, n); });
    c.step("as many blocks as fit, partial sums", [&] { norm_by<1, G>(many, BLOCK, norm, partials, grads, n); });
    c.step("128 bits a load", [&] { norm_by<16 / sizeof(G), G>(many, BLOCK, norm, partials, grads, n); });
    c.step("train_gpt.cu: spans", [&] {
        norm_partials(partials, {static_cast<G*>(grads), DTYPE}, n, {nullptr, DTYPE}, 0, 0, 0);
        gradient_norm(norm, loss_scale_in(loss_scale), partials, norm_blocks(n, 0, 0));
    });
}

void run_study(Study& study) {
    constexpr DType GRAD16 = FLOATX == DType::FP16 ? DType::FP16 : DType::BF16;
    study.at_sizes<size_t>({16, 4112, 20000}, 48 << 20, 64 << 10, norm_of<float, DType::FP32>, norm_of<grad16, GRAD16>);
}

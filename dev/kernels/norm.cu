// Gradient norm, step by step: a reduction of an array as large as the model to one number.
//
// Topics:
//   - reductions: lanes add by shuffles, warps through shared memory, and blocks through an array of partial sums,
//     which a second kernel adds. Blocks cannot wait for each other, but a kernel waits for the previous kernel;
//   - number of blocks: enough to fill the GPU and no more, because each block adds a partial sum to the second kernel;
//   - no atomics: atomicAdd would save the second kernel. But the order in which blocks finish varies, floating-point
//     sums depend on the order, and the same command would no longer give the same bits;
//   - accuracy: thousands of threads have several sums each, and each sum adds few numbers. One long sum would be less
//     accurate: it becomes so large that small squares are rounded away.
// Bound by memory bandwidth: n gradients, of 4 bytes or of 2, are read once.
//
// n is a multiple of 16, like all sizes of the model.

#include "study.h"

// ---- 1, 2, 3: one block, many blocks, packs ----
// 1  One block of 1024 threads: the simplest kernel, which uses one of an H100's 132 multiprocessors.
// 2  Enough blocks to fill the GPU, with a grid-stride loop: in each iteration neighbouring threads read neighbouring
//    elements. A second kernel, of one block, adds the blocks' partial sums.
// 3  WIDTH > 1: 128 bits per load, so more bytes in flight, and one sum per position in the pack. These sums are
//    independent, so an addition does not wait for the previous one: instruction-level parallelism.
//
// ---- 4: train_gpt.cu ----
// The accesses of step 3, but each block processes spans of consecutive elements.

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

// G: the type of the gradients, which --grad-dtype selects.
template <typename G, DType DTYPE> void norm_of(Study& study, size_t n) {
    const std::string title = format("gradient norm, %s gradients", name_of(DTYPE));
    Case c(study, title, format("n %zu", n), bytes(1.0 * n * sizeof(G)));
    const auto grads = c.input<G>(n, -1, 3);
    const auto norm = c.output<float>("norm", 1);
    const auto loss_scale = c.input<float>(SCALE_OF_ONE), step = c.input<float>(std::vector<int>(sizeof(Step) / 4));
    // 8 blocks of 256 threads fill a multiprocessor, which holds 2048 threads.
    const int many = device.is_cpu() ? 8 : 8 * device.properties.multiProcessorCount;
    const auto partials = c.scratch<float>(std::max<size_t>(many, NORM_BLOCKS));
    double squares = 0;
    for (double g : grads.host) squares += g * g;
    norm.expected[0] = sqrt(squares);
    c.step("one block", [&] { norm_by<1, G>(1, WIDE_BLOCK, norm, partials, grads, n); });
    c.step("blocks fill the GPU, partial sums", [&] { norm_by<1, G>(many, BLOCK, norm, partials, grads, n); });
    c.step("128 bits per load", [&] { norm_by<16 / sizeof(G), G>(many, BLOCK, norm, partials, grads, n); });
    c.step("train_gpt.cu: spans", [&] {
        const size_t count = norm_blocks(n, 0, 0);
        norm_partials(partials, {{static_cast<G*>(grads), DTYPE}, n, {nullptr, DTYPE}, 0, 0, 0, count});
        Step* const on_device = reinterpret_cast<Step*>(static_cast<float*>(step));
        gradient_norm(on_device, loss_scale_in(loss_scale), partials, count);
        check(cudaMemcpyAsync(norm, &on_device->norm, sizeof(float), cudaMemcpyDeviceToDevice, device.stream), "copy");
    });
}

void run_study(Study& study) {
    constexpr DType GRAD16 = FLOATX == DType::FP16 ? DType::FP16 : DType::BF16;
    study.at_sizes<size_t>({16, 4112, 20000}, 48 << 20, 64 << 10, norm_of<float, DType::FP32>, norm_of<grad16, GRAD16>);
}

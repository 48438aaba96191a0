// Cross-entropy, step by step: a softmax over long rows, the last operation of forward and the first of backward.
//
// Topics:
//   - mapping: one thread, one warp or one block per row. A row of GPT-2's logits is 100 KB in BF16. With one thread
//     per row most of the GPU is idle, and the rows evict each other from the L1 cache before they are read again;
//   - online softmax: a numerically safe softmax first needs the maximum and then the sum, which seems to take two
//     passes. One pass suffices if the sum is rescaled whenever the maximum grows:
//     sum exp(x - new) = sum exp(x - old) * exp(old - new);
//   - fusion: the loss is a mean over a known number of tokens, so its gradient does not depend on the loss. Forward
//     and backward are one kernel, and probabilities are never stored.
// Bound by memory bandwidth: the logits are read once and overwritten by their gradient, which has the same size. A
// kernel that reads them three times reaches at most 1/2 of this speed, one that reads them twice 2/3, unless a cache
// holds them for the next pass.
//
//     lse = max + log(sum exp(x - max)),   loss[n] = lse - x[target]        lse: log-sum-exp
//     dlogits[v] = (exp(x[v] - lse) - (v == target)) * scale
// Rows hold Vp elements, of which V are logits. The rest is padding for the matmul, with gradient 0. A row with target
// -1 is ignored: its loss and gradient are 0.

#include "study.h"

struct Size { size_t N; int V, Vp; };

// ==== one team per row =======================================================
// The same kernels for three mappings. A team is the thread, warp or block that processes a row: its threads read packs
// of the row with a stride of one pack per thread and then reduce their results.

enum class Team { THREAD, WARP, BLOCK };

template <Team TEAM> __device__ __forceinline__ int members() {
    return TEAM == Team::THREAD ? 1 : TEAM == Team::WARP ? WARP_SIZE : blockDim.x;
}
template <Team TEAM> __device__ __forceinline__ size_t my_row() { return my_index() / members<TEAM>(); }
template <Team TEAM> __device__ __forceinline__ float team_max(float x) {
    return TEAM == Team::THREAD ? x : TEAM == Team::WARP ? warp_max(x) : block_max(x);
}
template <Team TEAM> __device__ __forceinline__ float team_sum(float x) {
    return TEAM == Team::THREAD ? x : TEAM == Team::WARP ? warp_sum(x) : block_sum(x);
}

// Calls f(x) for each pack x of the row that this thread processes. Padding is LOWEST.
template <Team TEAM, int WIDTH, typename F>
__device__ __forceinline__ void for_my_packs(const floatX* row, int V, F f) {
    for (int i = threadIdx.x % members<TEAM>() * WIDTH; i < V; i += members<TEAM>() * WIDTH) {
        float x[WIDTH];
        load(x, row + i);
        for (int k = 0; k < WIDTH; k++) x[k] = i + k < V ? x[k] : LOWEST;
        f(x);
    }
}

// Overwrites this thread's packs of the row with the gradient.
template <Team TEAM, int WIDTH>
__device__ __forceinline__ void write_gradient(floatX* row, float lse, int target, float scale, Size s) {
    const float factor = target < 0 ? 0 : scale;
    for (int i = threadIdx.x % members<TEAM>() * WIDTH; i < s.Vp; i += members<TEAM>() * WIDTH) {
        float x[WIDTH];
        load(x, row + i);
        for (int k = 0; k < WIDTH; k++) {
            x[k] = i + k < s.V ? __expf(x[k] - lse) * factor : 0;
            if (i + k == target) x[k] -= scale;
        }
        store(row + i, x);
    }
}

__device__ __forceinline__ float loss_of(const floatX* row, float lse, int target) {
    return target < 0 ? 0 : lse - f32(row[target]);
}

// ---- 1, 2, 3: three kernels: maximum, sum, gradient ----
// 1  THREAD: neighbouring threads read with a stride of 100 KB, one sector per thread and load, and there are only N
//    threads.
// 2  WARP: the lanes read neighbouring elements, so a load transfers 2 sectors (4 in FP32), and there are 32 N threads.
// 3  BLOCK, WIDTH = PACK: 1024 threads per row and 128 bits per load fill the GPU with few rows. All three kernels
//    still read the logits from memory.

template <Team TEAM, int WIDTH> __global__ void max_kernel(float* max, const floatX* logits, Size s) {
    const size_t n = my_row<TEAM>();
    if (n >= s.N) return;
    float row_max = LOWEST;
    for_my_packs<TEAM, WIDTH>(logits + n * s.Vp, s.V, [&](const float (&x)[WIDTH]) {
        for (int k = 0; k < WIDTH; k++) row_max = fmaxf(row_max, x[k]);
    });
    row_max = team_max<TEAM>(row_max);
    if (threadIdx.x % members<TEAM>() == 0) max[n] = row_max;
}

template <Team TEAM, int WIDTH>
__global__ void sum_kernel(float* lse, float* losses, const float* max, const floatX* logits, const int* targets,
                           Size s) {
    const size_t n = my_row<TEAM>();
    if (n >= s.N) return;
    const float m = max[n];
    float sum = 0;
    for_my_packs<TEAM, WIDTH>(logits + n * s.Vp, s.V, [&](const float (&x)[WIDTH]) {
        for (int k = 0; k < WIDTH; k++) sum += __expf(x[k] - m);
    });
    sum = team_sum<TEAM>(sum);
    if (threadIdx.x % members<TEAM>() > 0) return;
    lse[n] = m + logf(sum);
    losses[n] = loss_of(logits + n * s.Vp, lse[n], targets[n]);
}

template <Team TEAM, int WIDTH>
__global__ void gradient_kernel(floatX* logits, const float* lse, const int* targets, float scale, Size s) {
    const size_t n = my_row<TEAM>();
    if (n < s.N) write_gradient<TEAM, WIDTH>(logits + n * s.Vp, lse[n], targets[n], scale, s);
}

template <Team TEAM, int WIDTH>
void three_kernels(floatX* logits, float* losses, float* max, float* lse, const int* targets, float scale, Size s) {
    const size_t block = TEAM == Team::BLOCK ? WIDE_BLOCK : BLOCK;
    const size_t rows = TEAM == Team::THREAD ? block : TEAM == Team::WARP ? block / WARP_SIZE : 1;   // per block
    const unsigned blocks = ceil_div(s.N, rows);
    launch("max", max_kernel<TEAM, WIDTH>, blocks, block, 0, max, logits, s);
    launch("sum", sum_kernel<TEAM, WIDTH>, blocks, block, 0, lse, losses, max, logits, targets, s);
    launch("gradient", gradient_kernel<TEAM, WIDTH>, blocks, block, 0, logits, lse, targets, scale, s);
}

// ---- 4: online softmax, one kernel ----
// One pass computes maximum and sum, so the logits are read twice instead of three times. Each thread has a maximum
// and a sum for each position in the pack: PACK independent chains of compare, rescale and add hide their latency
// (instruction-level parallelism). The pass takes two exponentials per element instead of one.

// Returns log(sum exp(x)) of the block's row to all its threads.
__device__ __forceinline__ float online_lse(const floatX* row, int V) {
    float max[PACK], sum[PACK] = {}, my_max = LOWEST, my_sum = 0;
    for (int k = 0; k < PACK; k++) max[k] = LOWEST;
    for_my_packs<Team::BLOCK, PACK>(row, V, [&](const float (&x)[PACK]) {
        for (int k = 0; k < PACK; k++) {
            const float old = max[k];
            max[k] = fmaxf(old, x[k]);
            sum[k] = sum[k] * __expf(old - max[k]) + __expf(x[k] - max[k]);
        }
    });
    for (int k = 0; k < PACK; k++) my_max = fmaxf(my_max, max[k]);
    const float row_max = block_max(my_max);
    for (int k = 0; k < PACK; k++) my_sum += sum[k] * __expf(max[k] - row_max);
    return row_max + logf(block_sum(my_sum));
}

// Loss and gradient in one kernel: a block reads its row for the second time right after the first. With three blocks
// per multiprocessor, an H100 processes 396 rows of 100 KB at a time: 40 MB, most of which L2 (50 MB) still holds.
//
// ---- 5: train_gpt.cu ----
// Step 4 is bound by instructions: three exponentials per element, and a multiprocessor's special function units
// compute 16 per clock. Here a pack has one maximum. Sums are rescaled only when it grows, which is rare, so an element
// takes two exponentials. exp(x - max) = 2^(x log2(e) - max log2(e)) is a multiply-add and one special function
// instruction. The row stays in shared memory, which fits two rows of 100 KB: the second pass does not depend on L2.
// cp.async copies it there, eight packs ahead of a thread's sums: 64 KiB per block are in flight (BF16). A load into
// registers per thread would keep 8 KiB in flight, about a third of what an H100's memory needs.

__global__ void __launch_bounds__(CROSS_ENTROPY_BLOCK, 3)
one_kernel(floatX* logits, float* losses, const int* targets, float scale, Size s) {
    floatX* const row = logits + static_cast<size_t>(blockIdx.x) * s.Vp;
    const int target = targets[blockIdx.x];
    const float lse = online_lse(row, s.V);
    if (threadIdx.x == 0) losses[blockIdx.x] = loss_of(row, lse, target);
    __syncthreads();   // row[target] has been read
    write_gradient<Team::BLOCK, PACK>(row, lse, target, scale, s);
}

void loss_and_gradient(Study& study, const Size& s) {
    const size_t N = s.N, Vp = s.Vp;
    Case c(study, "cross-entropy, loss and gradient", format("N %zu, V %d, Vp %zu", N, s.V, Vp),
           bytes(2.0 * N * Vp * sizeof(floatX)));
    const float scale = 1.0f / N;
    std::vector<int> target(N);
    for (size_t n = 0; n < N; n++) target[n] = n % 5 == 3 ? -1 : static_cast<int>(splitmix64(n) % s.V);
    const auto targets = c.input<int>(target);
    const auto logits = c.updated<floatX>("dlogits", N * Vp, 90, 106);   // exp overflows in FP32
    const auto losses = c.output<float>("losses", N);
    const auto max = c.scratch<float>(N), lse = c.scratch<float>(N);
    const auto expected = cross_entropy_loop<double>(logits.host, target, scale, s.V, s.Vp);
    losses.expected = expected.losses;
    logits.expected = expected.dlogits;
    const auto loss_scale = c.input<float>(SCALE_OF_ONE);
    c.step("three kernels, one thread per row", [&] {
        three_kernels<Team::THREAD, 1>(logits, losses, max, lse, targets, scale, s);
    });
    c.step("one warp per row", [&] { three_kernels<Team::WARP, 1>(logits, losses, max, lse, targets, scale, s); });
    c.step("one block per row, 128 bits per load", [&] {
        three_kernels<Team::BLOCK, PACK>(logits, losses, max, lse, targets, scale, s);
    });
    c.step("online softmax, one kernel", [&] {
        launch("one kernel", one_kernel, N, CROSS_ENTROPY_BLOCK, 0, logits, losses, targets, scale, s);
    });
    c.step("train_gpt.cu: one maximum per pack, cp.async", [&] {
        cross_entropy<Want::LOSS_AND_GRADIENT>(view(logits, N, s.Vp), losses, targets, scale, loss_scale_in(loss_scale),
                                               s.V);
    });
}

void run_study(Study& study) {
    // In the last odd size each thread of a wide block processes several packs, so its maximum grows.
    study.at_sizes<Size>({{1, 5, 16}, {37, 61, 128}, {9, 1029, 1152}, {2, 20011, 20096}}, {4096, 50257, 50304},
                         {8, 2000, 2048}, loss_and_gradient);
}

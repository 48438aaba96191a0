// Cross-entropy, step by step: a softmax over long rows, the last operation of forward and the first of backward.
//
// To learn here:
//   - mapping: a thread, a warp or a block per row. A row of GPT-2's vocabulary is 100 KB in BF16, so a thread per row
//     leaves most of the GPU idle, and what warps read is no longer in the L1 cache when they read it again;
//   - online softmax: the maximum, for safety, and then the sum seem to need two passes. One is enough, if a sum is
//     corrected whenever its maximum grows: sum exp(x - new) = sum exp(x - old) * exp(old - new);
//   - fusing: the loss is a mean over a known number of tokens, so its gradient does not need the loss. Forward and
//     backward are one kernel, and probabilities are never stored.
// Memory is the bound: logits are read once and their gradient, as large, is written in their place. A kernel that
// reads them three times can reach half of the floor's speed, twice two thirds, unless a cache holds them the next
// time.
//
//     lse = max + log(sum exp(x - max)),   loss[n] = lse - x[target]
//     dlogits = (exp(x - lse) - (v == target)) * scale
// Rows hold Vp elements, of which V are real: the rest is padding for the matmul, whose gradient is 0. A row whose
// target is -1 does not count.

#include "study.h"

struct Size { size_t N; int V, Vp; };

// ==== a team per row =========================================================
// The same kernels for all three mappings: a team's threads take packs of the row in turn, and then combine results.

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

// Calls f(x) with the packs x of the row that this thread reads. Padding is LOWEST.
template <Team TEAM, int WIDTH, typename F>
__device__ __forceinline__ void for_my_packs(const floatX* row, int V, F f) {
    for (int i = threadIdx.x % members<TEAM>() * WIDTH; i < V; i += members<TEAM>() * WIDTH) {
        float x[WIDTH];
        load(x, row + i);
        for (int k = 0; k < WIDTH; k++) x[k] = i + k < V ? x[k] : LOWEST;
        f(x);
    }
}

// Replaces this thread's packs of the row by the gradient.
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

// ---- 1, 2, 3: maximum, sum, gradient: three kernels ----
// 1  THREAD: neighbours read addresses 100 KB apart, and there are only N threads.
// 2  WARP: the lanes read neighbours, and there are 32 times as many of them.
// 3  BLOCK, WIDTH = PACK: 1024 threads on one row, 128 bits each. Whatever N is, the GPU is full.

template <Team TEAM, int WIDTH> __global__ void max_kernel(float* max, const floatX* logits, Size s) {
    const size_t n = my_row<TEAM>();
    if (n >= s.N) return;
    float largest = LOWEST;
    for_my_packs<TEAM, WIDTH>(logits + n * s.Vp, s.V, [&](const float (&x)[WIDTH]) {
        for (int k = 0; k < WIDTH; k++) largest = fmaxf(largest, x[k]);
    });
    largest = team_max<TEAM>(largest);
    if (threadIdx.x % members<TEAM>() == 0) max[n] = largest;
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
    const size_t rows = TEAM == Team::THREAD ? block : TEAM == Team::WARP ? block / WARP_SIZE : 1;   // of a block
    const unsigned blocks = ceil_div(s.N, rows);
    launch("max", max_kernel<TEAM, WIDTH>, blocks, block, 0, max, logits, s);
    launch("sum", sum_kernel<TEAM, WIDTH>, blocks, block, 0, lse, losses, max, logits, targets, s);
    launch("gradient", gradient_kernel<TEAM, WIDTH>, blocks, block, 0, logits, lse, targets, scale, s);
}

// ---- 4: online softmax, in one kernel ----
// A maximum and a sum for each place in the pack: the chain "compare, correct, add" is long, and PACK of them side by
// side hide its latency. It takes two exponentials an element where one pass each took one, but memory is the bound.

// log(sum exp(x)) of a block's row, for all of its threads.
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

// Loss and gradient together: a block reads its row for the second time right after the first. With three blocks on
// each multiprocessor of an H100, 396 rows of 100 KB are in use at a time, 40 MB: most of them are still in L2 (50 MB).
//
// ---- 5: train_gpt.cu ----
// Now instructions are the bound: three exponentials an element, of which the special function unit computes 16 a
// clock. A pack has one maximum: if it does not grow, which is the usual case, nothing is corrected, and an element
// takes two. exp(x - max) is 2^(x log2(e) - max log2(e)): a multiply-add and the special function unit. And the row is
// kept in shared memory, which has room for two rows of 100 KB: nothing depends on what L2 keeps.

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
    const auto logits = c.updated<floatX>("dlogits", N * Vp, 90, 106);   // their exponentials overflow in FP32
    const auto losses = c.output<float>("losses", N);
    const auto max = c.scratch<float>(N), lse = c.scratch<float>(N);
    for (size_t n = 0; n < N; n++) {
        const double* const x = &logits.host[n * Vp];
        double* const d = &logits.expected[n * Vp];
        const double largest = *std::max_element(x, x + s.V);
        double sum = 0;
        for (int v = 0; v < s.V; v++) sum += d[v] = exp(x[v] - largest);
        for (size_t v = 0; v < Vp; v++) d[v] = target[n] < 0 || v >= static_cast<size_t>(s.V) ? 0 : d[v] / sum * scale;
        losses.expected[n] = 0;
        if (target[n] < 0) continue;
        d[target[n]] -= scale;
        losses.expected[n] = largest + log(sum) - x[target[n]];
    }
    const auto loss_scale = c.input<float>(SCALE_OF_ONE);
    c.step("maximum, sum, gradient: a thread per row", [&] {
        three_kernels<Team::THREAD, 1>(logits, losses, max, lse, targets, scale, s);
    });
    c.step("a warp per row", [&] { three_kernels<Team::WARP, 1>(logits, losses, max, lse, targets, scale, s); });
    c.step("a block per row, 128 bits a thread", [&] {
        three_kernels<Team::BLOCK, PACK>(logits, losses, max, lse, targets, scale, s);
    });
    c.step("maximum and sum in one read, all in one kernel", [&] {
        launch("one kernel", one_kernel, N, CROSS_ENTROPY_BLOCK, 0, logits, losses, targets, scale, s);
    });
    c.step("train_gpt.cu: one maximum a pack, one read", [&] {
        cross_entropy<Want::LOSS_AND_GRADIENT>(logits, losses, targets, scale, loss_scale_in(loss_scale), N, s.V, s.Vp);
    });
}

void run_study(Study& study) {
    // In the last of the odd sizes each thread of a wide block has several packs, and so a maximum that grows.
    study.at_sizes<Size>({{1, 5, 16}, {37, 61, 128}, {9, 1029, 1152}, {2, 20011, 20096}}, {4096, 50257, 50304},
                         {8, 2000, 2048}, loss_and_gradient);
}

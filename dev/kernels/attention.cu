// Attention, step by step: from T x T matrices in memory to wgmma; forward, and forward with backward. Most steps are
// the trainer's kernels: train_gpt.cu and gpt/attention_*.cuh explain formulas, shapes and mappings; this study
// compares them.
//
// Topics:
//   - fusion: scores and probabilities stay on the chip. In BF16, naive attention's forward pass moves 8 bytes for each
//     pair of query and key: scores and probabilities, each written once and read once. The other steps move none;
//   - online softmax: a running maximum, and results that are rescaled when it grows;
//   - reuse, as in matmul.cu: each key that is loaded should serve many queries;
//   - tensor cores: scores stay in registers, as a fragment that is the left operand of the next product;
//   - asynchrony: products, copies and softmax overlap, in different warps and within a warp.
//
// Bound by arithmetic. Causal attention has pairs with key <= query, T * T / 2 of them. For each pair, forward does 4
// HS FLOPs in two products and backward 10 HS in five. (The trainer's backward computes two of them twice, 14 HS, so
// that no sum depends on the order of blocks. For TFLOP/s the tables count 10 HS.) Per clock, a multiprocessor of an
// H100 does 4096 FLOPs on its tensor cores and 16 exponentials. A pair's exponential takes half as long as its products
// with heads of 128, and as long with heads of 64. So a kernel in which softmax and products alternate is limited to
// 2/3 or 1/2 of the peak. Only kernels that overlap them can be faster.
//
// Published results for an H100 to compare with: causal, B * T = 16384, NH * HS = 2048, TFLOP/s at T = 1k / 2k / 8k /
// 16k, the sizes that are timed here:
//                           head 64                  head 128
//     forward               FA2 229 262 295 299      FA2 260 298 333 335      FlashAttention-2
//                           FA3 265 371 460 473      FA3 423 521 602 616      FlashAttention-3
//     forward + backward    FA2 192 232 273 284      FA2 221 265 308 328
// The last step of this study, measured (data/gpu/2026-11-26.md) at T = 1k / 2k / 8k:
//     forward                   338 431 525              412 516 625
//     forward + backward        309 391 476              323 393 443
//
// The wgmma kernels do not skip the masked half of tiles on the diagonal: with products of 64 and 128 columns on the
// same accumulators, ptxas 13.0 waits after each product of dQ.
//
// One backward kernel instead of two would need 5 products instead of 7. It would add dS K to dQ in memory, in FP32,
// once per tile of keys, in a fixed order to give the same bits. Estimate for an H100: 12 to 33 % less time if the L2
// cache does these additions while products run, up to 19 % more if products wait for them. That is no clear gain at
// the sequence lengths of GPT-2 and GPT-3.

#include "study.h"

// Intermediate results are also rounded to BF16 or FP16: probabilities and score gradients on tensor cores, the T x T
// matrices of naive attention. Where the terms of a sum cancel, their rounding errors remain, so the limit is eight
// times the usual one. (In FP32 the usual limit holds.)
template <> constexpr double LIMIT<__nv_bfloat16> = 1.0 / (1 << 4);
template <> constexpr double LIMIT<__half> = 1.0 / (1 << 7);

// ==== one warp per query =====================================================
// The simplest online softmax. The lanes of a warp hold the query and its output; the warp reads one key and value
// after another from global memory. Unlike in naive attention, no T x T matrix is stored. But each key and value that
// is loaded serves only one query: 4 HS bytes (BF16) for 4 HS FLOPs.

template <int HS> __global__ void warp_per_query_kernel(floatX* out, float* lse, const floatX* qkv, int T) {
    constexpr int ELEMENTS = HS / WARP_SIZE;   // per lane, with a stride of WARP_SIZE
    const int query = warp_row(), lane = threadIdx.x % WARP_SIZE;
    if (query >= T) return;
    const Head head = my_head(T, HS);
    const floatX *q = qkv + head.qkv + query * head.stride + lane, *k = qkv + head.qkv + head.C + lane, *v = k + head.C;
    const float scale = rsqrtf(static_cast<float>(HS));
    float my_q[ELEMENTS], O[ELEMENTS] = {}, max = -INFINITY, sum = 0;
    for (int d = 0; d < ELEMENTS; d++) my_q[d] = f32(q[d * WARP_SIZE]) * scale;
    for (int key = 0; key <= query; key++, k += head.stride, v += head.stride) {
        float score = 0;
        for (int d = 0; d < ELEMENTS; d++) score += my_q[d] * f32(k[d * WARP_SIZE]);
        score = warp_sum(score);
        const float new_max = fmaxf(max, score), rescale = __expf(max - new_max), p = __expf(score - new_max);
        for (int d = 0; d < ELEMENTS; d++) O[d] = O[d] * rescale + p * f32(v[d * WARP_SIZE]);
        sum = sum * rescale + p;
        max = new_max;
    }
    floatX* to = out + head.out + query * head.C + lane;
    for (int d = 0; d < ELEMENTS; d++) to[d * WARP_SIZE] = static_cast<floatX>(O[d] / sum);
    if (lane == 0) lse[head.rows + query] = max + logf(sum);
}

void warp_per_query(floatX* out, float* lse, const floatX* qkv, const AttentionSize& s) {
    const dim3 grid(row_blocks(s.T), s.NH, s.B);
    auto run = [&](auto kernel) { launch("warp per query", kernel, grid, BLOCK, 0, out, lse, qkv, s.T); };
    if (s.HS == 32) run(warp_per_query_kernel<32>);
    if (s.HS == 64) run(warp_per_query_kernel<64>);
    if (s.HS == 96) run(warp_per_query_kernel<96>);
    if (s.HS == 128) run(warp_per_query_kernel<128>);
}

// ==== the study ==============================================================

// The steps that run the trainer's kernels. mma and wgmma are skipped if the build, device or head size does not
// support them.
template <typename F> void trainer_steps(Case& c, int HS, F attention) {
    for (const TensorCores kind : {TensorCores::NONE, TensorCores::MMA, TensorCores::WGMMA}) {
        const Temporarily tensor_cores(device.tensor_cores, kind);
        const bool runs = has_tensor_cores(kind) && (kind == TensorCores::NONE || on_tensor_cores(HS));
        const char* const name = kind == TensorCores::NONE ? "tiles in shared memory"
                                 : kind == TensorCores::MMA ? "mma" : "wgmma, TMA";
        if (runs) c.step(format("train_gpt.cu: %s", name), attention);
    }
}

enum class Pass { FORWARD, FORWARD_AND_BACKWARD };

template <Pass PASS> void attention(Study& study, const std::string& at, const AttentionSize& s) {
    constexpr bool BACKWARD = PASS == Pass::FORWARD_AND_BACKWARD;
    const int B = s.B, T = s.T, NH = s.NH, HS = s.HS;
    Case c(study, (BACKWARD ? "attention forward + backward" : "attention forward") + at,
           format("B %d, T %d, NH %d, HS %d", B, T, NH, HS), flops((BACKWARD ? 14 : 4) * HS * 0.5 * B * NH * T * T));
    const size_t qkv_size = s.N() * 3 * s.C(), out_size = s.N() * s.C();
    const auto qkv = c.input<floatX>(qkv_size), dout = c.input<floatX>(BACKWARD ? out_size : 1);
    const auto out = c.output<floatX>("out", out_size);
    const auto dqkv = BACKWARD ? c.output<floatX>("dqkv", qkv_size) : c.scratch<floatX>(1);
    const auto lse = c.scratch<float>(s.N() * NH), D = c.scratch<float>(s.N() * NH);
    const auto counter = c.input<int>(std::vector<int>{0});
    const bool naive_fits = T <= 2048;   // the T x T matrices of all heads fit in memory
    const auto scores = c.scratch<floatX>(naive_fits ? s.N() * NH * T : 1);
    const auto probs = c.scratch<floatX>(naive_fits ? s.N() * NH * T : 1);
    if (study.timing && !device.is_cpu()) {
        out.memory.from_first_step = true;
        dqkv.memory.from_first_step = BACKWARD;
    } else {
        const auto expected = attention_loop<double>(qkv.host, s);
        out.expected = expected.out;
        if (BACKWARD)
            dqkv.expected = attention_backward_loop<double>(dout.host, qkv.host, expected.out, expected.lse, s);
    }
    const auto heads = [&] { return Heads{B, T, NH, HS, lse, D, nullptr, counter}; };   // in a step, which allocates
    if (naive_fits)
        c.step("train_gpt.cu: naive, T x T in memory", [&] {
            Heads naive = heads();
            naive.scores = naive.dprobs = scores, naive.probs = probs;
            naive_attention_forward(out, qkv, naive);
            if (BACKWARD) naive_attention_backward(dqkv, dout, qkv, naive);
        });
    if (!BACKWARD) c.step("one warp per query, online softmax", [&] { warp_per_query(out, lse, qkv, s); });
    trainer_steps(c, HS, [&] {
        const Heads h = heads();
        const Tensor inp = view(qkv, s.N(), 3 * s.C()), att = view(out, s.N(), s.C());
        attention_forward(att, inp, h);
        if (BACKWARD) attention_backward(view(dqkv, s.N(), 3 * s.C()), Grad{}, view(dout, s.N(), s.C()), inp, att, h);
    });
}

void run_study(Study& study) {
    for (auto kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (!has_tensor_cores(kind)) printf("%s: skipped, not supported by this build or device\n", name_of(kind));
    constexpr int TOKENS = 16384, CHANNELS = 2048;
    const auto lengths =
        study.lengths_or(device.is_cpu() ? std::vector<int>{70} : std::vector<int>{1024, 2048, 8192, 16384});
    for (int HS : {64, 128})
        for (int T : lengths) {
            const std::string at = format(", heads of %d, T %d", HS, T);
            std::initializer_list<AttentionSize> odd = {{1, 1, 1, HS}, {2, 65, 3, HS}, {1, 200, 2, HS - 32}}, none = {};
            auto forward = [&](Study&, const AttentionSize& s) { attention<Pass::FORWARD>(study, at, s); };
            auto both = [&](Study&, const AttentionSize& s) { attention<Pass::FORWARD_AND_BACKWARD>(study, at, s); };
            const AttentionSize timed = {std::max(1, TOKENS / T), T, CHANNELS / HS, HS}, counted = {1, T, 2, HS};
            study.at_sizes(T == lengths.front() ? odd : none, timed, counted, forward, both);
        }
}

// Attention, step by step: from the T x T matrices in memory to wgmma, forward, and forward with backward. Formulas,
// shapes and mappings are in train_gpt.cu, whose kernels most steps are; here they stand side by side.
//
// To learn here:
//   - fusing: scores and probabilities that are never written need not be read. Naive attention moves 8 bytes for each
//     pair of query and key forward (scores and probabilities, each written and read, in BF16); the others none;
//   - online softmax: a maximum that is only known so far, and results that are rescaled when it rises;
//   - reuse, as in matmul.cu: a key is worth loading for many queries, not for one;
//   - tensor cores: scores stay in registers, as a fragment that is the next product's left operand;
//   - asynchrony: products, copies and the softmax at the same time, in different warps and within a warp.
//
// The floor is arithmetic. Causal attention counts pairs with key <= query, T * T / 2 of them; for each, forward does
// 4 HS FLOPs in two products, backward 10 HS in five. (The trainer's backward forms two of them twice, 14 HS, so as to
// add nothing up in an order that changes; TFLOP/s here count 10.) In a clock a multiprocessor of an H100 does 4096
// FLOPs on tensor cores and 16 exponentials: for heads of 128 an exponential is half the time of its pair's products,
// for heads of 64 all of it. So half the peak is what is to be had where softmax and products take turns, and what
// is above that comes of doing both at once.
//
// To compare with, published for an H100, causal, B * T = 16384, NH * HS = 2048, TFLOP/s at T = 1k / 2k / 8k / 16k:
//                           head 64                  head 128
//     forward               FA2 229 262 295 299      FA2 260 298 333 335      FlashAttention-2
//                           FA3 265 371 460 473      FA3 423 521 602 616      FlashAttention-3
//     forward + backward    FA2 192 232 273 284      FA2 221 265 308 328
// The sizes timed here are the same.
//
// Backward in one kernel. Hopper's backward is two kernels and 7 products. One kernel of keys can do it in 5: dS, once
// it is there, also goes through shared memory to dQ += dS K, whose sum over tiles of keys stays in memory, in FP32,
// and is added to in a fixed order (a number for each tile of queries says whose turn it is) to give the same bits.
// Estimated for B * T = 16384, NH * HS = 2048 on an H100, with the rates of dev/inspect/estimate.py, in microseconds:
//
//                               heads of 64, T = 1k / 2k / 8k     heads of 128, T = 1k / 2k / 8k
//     two kernels                   880   1414   4617                 608   1048   3692
//       of that products            391    738   2822                 369    716   2800
//     one kernel, without dQ's sum  526    870   2931                 384    680   2455
//       of that products            279    527   2015                 264    512   2000
//     dQ's sum in L2: read and written for each 128 keys, 8 HS bytes for 1280 HS FLOPs
//                                   198    375   1432                 187    364   1421
//     dQ's sum in memory: cleared, written, read and rounded, 14 bytes an element
//                                   152    152    152                 152    152    152
//
// If L2 does its part beside the products, one kernel takes 23, 28, 33 % less time with heads of 64 and 12, 21, 29 %
// with heads of 128; if products wait for it, 0 to 2 % less and 9 to 19 % more. Waiting for turns adds little where
// pieces are taken as they are here, tiles of keys in order and heads in between: whose turn is before a tile's has
// started earlier. It takes 4 bytes an element of dQ (201 MB for GPT-2 124M, 64 x 1024). Registers: with heads of 128
// dK and dV take 128 of 240, S and dP 64, P 16, dQ's part 32, so dS would have to leave by way of shared memory only:
// it fits, barely. Shared memory, of 227 KiB: K and V 64, two stages of Q and dO 64, dS 16, dQ 32: it fits. What there
// is to compare with, FlashAttention-3's backward, one kernel with sums in any order, reaches 182, 316, 539 TFLOP/s at
// T = 1k, 2k, 8k and heads of 128; two kernels are estimated at 283, 328, 372. So at the lengths of GPT-2 and GPT-3 it
// does not clearly win; at 8k it would. Two kernels, until a GPU has timed them.

#include "study.h"

#include <thread>

// Here BF16, or FP16, also holds what goes from one product into the next: probabilities and score gradients on tensor cores, the
// T x T matrices of naive attention. An element whose terms cancel has the roundings of them all: eight times the usual
// limit. (In FP32 the usual one holds, and test_gpt.cu counts each rounding.)
template <> constexpr double LIMIT<__nv_bfloat16> = 1.0 / (1 << 4);
template <> constexpr double LIMIT<__half> = 1.0 / (1 << 7);

// ==== the plain loop =========================================================

struct Size {
    int B, T, NH, HS;

    size_t C() const { return static_cast<size_t>(NH) * HS; }
    size_t N() const { return static_cast<size_t>(B) * T; }
    double pairs() const { return 0.5 * B * NH * T * T; }
};

// One head: q, k, v, out, and where there is dout gradients, all (T,HS).
struct HeadLoop {
    size_t T, HS;
    Values q, k, v, out, dout, dq, dk, dv;

    HeadLoop(size_t seq, size_t size) : T(seq), HS(size) {
        for (Values* x : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) x->resize(T * HS);
    }

    double dot(const Values& a, size_t i, const Values& b, size_t j) const {
        double sum = 0;
        for (size_t d = 0; d < HS; d++) sum += a[i * HS + d] * b[j * HS + d];
        return sum;
    }

    // Row i of out; returns its probabilities.
    Values forward(size_t i) {
        const double scale = 1 / std::sqrt(static_cast<double>(HS));
        Values p(i + 1);
        double max = -INFINITY, sum = 0;
        for (size_t j = 0; j <= i; j++) max = std::max(max, p[j] = scale * dot(q, i, k, j));
        for (double& x : p) sum += x = std::exp(x - max);
        for (size_t j = 0; j <= i; j++) {
            p[j] /= sum;
            for (size_t d = 0; d < HS; d++) out[i * HS + d] += p[j] * v[j * HS + d];
        }
        return p;
    }

    // Row i of dq; its part of the gradients of keys and values.
    void backward(size_t i, const Values& p, Values& dk_part, Values& dv_part) {
        const double scale = 1 / std::sqrt(static_cast<double>(HS)), D = dot(dout, i, out, i);
        for (size_t j = 0; j <= i; j++) {
            const double ds = scale * p[j] * (dot(dout, i, v, j) - D);
            for (size_t d = 0; d < HS; d++) {
                dq[i * HS + d] += ds * k[j * HS + d];
                dk_part[j * HS + d] += ds * q[i * HS + d];
                dv_part[j * HS + d] += p[j] * dout[i * HS + d];
            }
        }
    }

    // A part of the queries for each of the host's cores, which add up gradients of keys and values apart.
    void run(bool with_backward) {
        const size_t workers = std::max(1u, std::thread::hardware_concurrency());
        std::vector<Values> dk_parts(workers, Values(T * HS)), dv_parts(workers, Values(T * HS));
        std::vector<std::thread> threads;
        for (size_t w = 0; w < workers; w++)
            threads.emplace_back([&, w] {
                for (size_t i = w; i < T; i += workers) {
                    const Values p = forward(i);
                    if (with_backward) backward(i, p, dk_parts[w], dv_parts[w]);
                }
            });
        for (std::thread& thread : threads) thread.join();
        for (size_t w = 0; w < workers; w++)
            for (size_t i = 0; i < T * HS; i++) dk[i] += dk_parts[w][i], dv[i] += dv_parts[w][i];
    }
};

enum class Heads { DIFFERENT, ROTATED };

// What to expect of out (B,T,NH,HS) and, unless there is no dout, of dqkv (B,T,3,NH,HS). ROTATED, for large sizes: head
// n is given the first one's inputs, their columns rotated by a number of its own, and so are its results, as products
// of rows do not change. So the loop has to run for one head only, and yet a kernel that takes a wrong head shows.
void attention_loop(Values& out, Values* dqkv, Values* dout, Values& qkv, const Size& s, Heads heads) {
    const size_t C = s.C(), T = s.T, HS = s.HS;
    HeadLoop head(T, HS);
    for (size_t n = 0; n < static_cast<size_t>(s.B) * s.NH; n++) {
        const size_t rotated = heads == Heads::ROTATED ? n + n / HS : 0;   // head n + HS is not head n
        auto for_each = [&](auto visit) {   // visit(element of the head, of qkv, of out)
            for (size_t i = 0; i < T * HS; i++) {
                const size_t row = n / s.NH * T + i / HS, column = n % s.NH * HS + (i + rotated) % HS;
                visit(i, row * 3 * C + column, row * C + column);
            }
        };
        if (n == 0 || heads == Heads::DIFFERENT) {
            head = HeadLoop(T, HS);
            for_each([&](size_t i, size_t q, size_t o) {
                head.q[i] = qkv[q], head.k[i] = qkv[q + C], head.v[i] = qkv[q + 2 * C];
                if (dout) head.dout[i] = (*dout)[o];
            });
            head.run(dout);
        }
        for_each([&](size_t i, size_t q, size_t o) {
            qkv[q] = head.q[i], qkv[q + C] = head.k[i], qkv[q + 2 * C] = head.v[i];
            out[o] = head.out[i];
            if (!dout) return;
            (*dout)[o] = head.dout[i];
            (*dqkv)[q] = head.dq[i], (*dqkv)[q + C] = head.dk[i], (*dqkv)[q + 2 * C] = head.dv[i];
        });
    }
}

// ==== a warp per query =======================================================
// Online softmax in its barest form: the query and its output are spread over the lanes of a warp; keys come one by
// one, straight from global memory. Nothing of the size of T is kept. Each key and value serves one query and is
// loaded again for the next: 4 HS bytes (BF16) for 4 HS FLOPs.

template <int HS> __global__ void warp_per_query_kernel(floatX* out, float* lse, const floatX* qkv, int T) {
    constexpr int MINE = HS / WARP_SIZE;   // elements of a lane, WARP_SIZE apart
    const int query = warp_row(), lane = threadIdx.x % WARP_SIZE;
    if (query >= T) return;
    const Head head = my_head(T, HS);
    const floatX *q = qkv + head.qkv + query * head.stride + lane, *k = qkv + head.qkv + head.C + lane, *v = k + head.C;
    const float scale = rsqrtf(static_cast<float>(HS));
    float mine[MINE], O[MINE] = {}, max = -INFINITY, sum = 0;
    for (int d = 0; d < MINE; d++) mine[d] = static_cast<float>(q[d * WARP_SIZE]) * scale;
    for (int key = 0; key <= query; key++, k += head.stride, v += head.stride) {
        float score = 0;
        for (int d = 0; d < MINE; d++) score += mine[d] * static_cast<float>(k[d * WARP_SIZE]);
        score = warp_sum(score);
        const float larger = fmaxf(max, score), rescale = __expf(max - larger), p = __expf(score - larger);
        for (int d = 0; d < MINE; d++) O[d] = O[d] * rescale + p * static_cast<float>(v[d * WARP_SIZE]);
        sum = sum * rescale + p;
        max = larger;
    }
    floatX* to = out + head.out + query * head.C + lane;
    for (int d = 0; d < MINE; d++) to[d * WARP_SIZE] = static_cast<floatX>(O[d] / sum);
    if (lane == 0) lse[head.rows + query] = max + logf(sum);
}

void warp_per_query(floatX* out, float* lse, const floatX* qkv, const Size& s) {
    const dim3 grid(row_blocks(s.T), s.NH, s.B);
    auto run = [&](auto kernel) { launch("warp per query", kernel, grid, BLOCK, 0, out, lse, qkv, s.T); };
    if (s.HS == 32) run(warp_per_query_kernel<32>);
    if (s.HS == 64) run(warp_per_query_kernel<64>);
    if (s.HS == 96) run(warp_per_query_kernel<96>);
    if (s.HS == 128) run(warp_per_query_kernel<128>);
}

// ==== the study ==============================================================

// Whether there is room for the T x T matrices of all heads.
bool naive_fits(const Size& s) { return s.T <= 2048; }

// The trainer's attention on one kind of tensor cores, or none.
template <typename F> void on(TensorCores kind, F attention) {
    const TensorCores usual = std::exchange(device.tensor_cores, kind);
    attention();
    device.tensor_cores = usual;
}

// The steps by the trainer's own kernels: mma and wgmma where this build, device and head size have them.
template <typename F> void trainer_steps(Case& c, int HS, F attention) {
    const std::pair<TensorCores, const char*> steps[] = {{TensorCores::NONE, "train_gpt.cu: tiles in shared memory"},
        {TensorCores::MMA, "train_gpt.cu: mma"}, {TensorCores::WGMMA, "train_gpt.cu: wgmma, TMA"}};
    for (const auto& [kind, name] : steps) {
        const TensorCores on_these = kind;
        bool runs = has_tensor_cores(kind);
        on(kind, [&] { runs = runs && (on_these == TensorCores::NONE || on_tensor_cores(HS)); });
        if (runs) c.step(name, [&] { on(on_these, attention); });
    }
}

std::string size_text(const Size& s) { return format("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS); }

void forward(Study& study, const std::string& title, const Size& s) {
    Case c(study, title.c_str(), size_text(s), flops(4 * s.HS * s.pairs()));
    const auto qkv = c.input<floatX>(s.N() * 3 * s.C()), out = c.output<floatX>("out", s.N() * s.C());
    const auto lse = c.scratch<float>(s.N() * s.NH);
    const auto counter = c.input<int>(std::vector<int>{0});
    const size_t squares = naive_fits(s) ? s.N() * s.NH * s.T : 1;
    const auto scores = c.scratch<floatX>(squares), probs = c.scratch<floatX>(squares);
    attention_loop(out.expected, nullptr, nullptr, qkv.host, s, study.timing ? Heads::ROTATED : Heads::DIFFERENT);
    if (naive_fits(s))
        c.step("train_gpt.cu: naive, T x T in memory", [&] {
            naive_attention_forward(out, scores, probs, qkv, s.B, s.T, s.NH, s.HS);
        });
    c.step("a warp per query, online softmax", [&] { warp_per_query(out, lse, qkv, s); });
    trainer_steps(c, s.HS, [&] { attention_forward(out, lse, counter, qkv, s.B, s.T, s.NH, s.HS); });
}

void forward_and_backward(Study& study, const std::string& title, const Size& s) {
    Case c(study, title.c_str(), size_text(s), flops(3.5 * 4 * s.HS * s.pairs()));
    const auto qkv = c.input<floatX>(s.N() * 3 * s.C()), dout = c.input<floatX>(s.N() * s.C());
    const auto out = c.output<floatX>("out", s.N() * s.C()), dqkv = c.output<floatX>("dqkv", s.N() * 3 * s.C());
    const auto lse = c.scratch<float>(s.N() * s.NH), D = c.scratch<float>(s.N() * s.NH);
    const auto counter = c.input<int>(std::vector<int>{0});
    const size_t squares = naive_fits(s) ? s.N() * s.NH * s.T : 1;
    const auto scores = c.scratch<floatX>(squares), probs = c.scratch<floatX>(squares);
    const Heads heads = study.timing ? Heads::ROTATED : Heads::DIFFERENT;
    attention_loop(out.expected, &dqkv.expected, &dout.host, qkv.host, s, heads);
    if (naive_fits(s))
        c.step("train_gpt.cu: naive, T x T in memory", [&] {
            naive_attention_forward(out, scores, probs, qkv, s.B, s.T, s.NH, s.HS);
            naive_attention_backward(dqkv, scores, dout, qkv, probs, s.B, s.T, s.NH, s.HS);
        });
    trainer_steps(c, s.HS, [&] {
        attention_forward(out, lse, counter, qkv, s.B, s.T, s.NH, s.HS);
        attention_backward(dqkv, D, counter, dout, qkv, out, lse, s.B, s.T, s.NH, s.HS);
    });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        for (auto kind : {TensorCores::MMA, TensorCores::WGMMA})
            if (!has_tensor_cores(kind))
                printf("%s: not in this build or on this device\n", name_of(kind));
        constexpr int TOKENS = 16384, CHANNELS = 2048;
        const auto lengths = device.is_cpu() ? std::vector<int>{70} : std::vector<int>{1024, 2048, 8192, 16384};
        for (int HS : {64, 128})
            for (int T : lengths) {
                const Size timed = {TOKENS / T, T, CHANNELS / HS, HS}, counted = {1, T, 2, HS};
                const std::string at = format(", heads of %d, T %d", HS, T);
                auto both = [&](const Size& s) {
                    forward(study, "attention forward" + at, s);
                    forward_and_backward(study, "attention forward + backward" + at, s);
                };
                std::initializer_list<Size> odd = {{1, 1, 1, HS}, {2, 65, 3, HS}, {1, 200, 2, HS - 32}}, none = {};
                study.at_sizes(T == lengths.front() ? odd : none, timed, counted, both);
            }
    });
}

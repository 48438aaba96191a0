// Attention, step by step: from the T x T matrices in memory to wgmma, forward, and forward with backward. Formulas,
// shapes and mappings are in train_gpt.cu, whose kernels most steps are; here they are compared.
//
// To learn here:
//   - fusing: scores and probabilities that are never written need not be read. Naive attention moves 8 bytes for each
//     pair of query and key forward (scores and probabilities, each written and read, in BF16); the others none;
//   - online softmax: a running maximum, and results that are rescaled when it rises;
//   - reuse, as in matmul.cu: a key is worth loading for many queries, not for one;
//   - tensor cores: scores stay in registers, as a fragment that is the next product's left operand;
//   - asynchrony: products, copies and the softmax at the same time, in different warps and within a warp.
//
// The floor is arithmetic. Causal attention counts pairs with key <= query, T * T / 2 of them; for each, forward does
// 4 HS FLOPs in two products, backward 10 HS in five. (The trainer's backward computes two of them twice, 14 HS, so
// that no sum depends on the order of blocks; TFLOP/s here count 10.) In a clock a multiprocessor of an H100 does 4096
// FLOPs on tensor cores and 16 exponentials: for heads of 128 an exponential takes half the time of its pair's
// products, for heads of 64 all of it. So half the peak is the limit where softmax and products alternate; more needs
// both at once.
//
// To compare with, published for an H100, causal, B * T = 16384, NH * HS = 2048, TFLOP/s at T = 1k / 2k / 8k / 16k, the
// sizes that are timed here:
//                           head 64                  head 128
//     forward               FA2 229 262 295 299      FA2 260 298 333 335      FlashAttention-2
//                           FA3 265 371 460 473      FA3 423 521 602 616      FlashAttention-3
//     forward + backward    FA2 192 232 273 284      FA2 221 265 308 328
//
// One backward kernel instead of two would need 5 products instead of 7: it also adds dS K to dQ, whose sum over tiles
// of keys stays in memory in FP32 and, to give the same bits, is added to in a fixed order. Estimated for an H100 it
// takes 12 to 33 % less time if the L2 cache does these sums beside the products, and up to 19 % more if products wait
// for them: no clear gain at the lengths of GPT-2 and GPT-3.

#include "study.h"

// BF16, or FP16, also holds what passes from one product to the next: probabilities and score gradients on tensor
// cores, the T x T matrices of naive attention. An element whose terms cancel has the rounding errors of them all:
// eight times the usual limit. (In FP32 the usual one holds.)
template <> constexpr double LIMIT<__nv_bfloat16> = 1.0 / (1 << 4);
template <> constexpr double LIMIT<__half> = 1.0 / (1 << 7);

// ==== the plain loop =========================================================

struct Size {
    int B, T, NH, HS;

    size_t C() const { return static_cast<size_t>(NH) * HS; }
    size_t N() const { return static_cast<size_t>(B) * T; }
    double pairs() const { return 0.5 * B * NH * T * T; }
};

// One head: q, k, v, out, and with backward dout and gradients, all (T,HS).
struct HeadLoop {
    size_t T, HS;
    Values q, k, v, out, dout, dq, dk, dv, lse, D;

    HeadLoop(size_t seq, size_t size) : T(seq), HS(size), lse(seq), D(seq) {
        for (Values* x : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) x->resize(T * HS);
    }

    double dot(const Values& a, size_t i, const Values& b, size_t j) const {
        double sum = 0;
        for (size_t d = 0; d < HS; d++) sum += a[i * HS + d] * b[j * HS + d];
        return sum;
    }
    void add(Values& to, size_t i, double factor, const Values& from, size_t j) {
        for (size_t d = 0; d < HS; d++) to[i * HS + d] += factor * from[j * HS + d];
    }
    double score(size_t i, size_t j) const { return dot(q, i, k, j) / std::sqrt(static_cast<double>(HS)); }
    double probability(size_t i, size_t j) const { return std::exp(score(i, j) - lse[i]); }
    double score_gradient(size_t i, size_t j) const {
        return probability(i, j) * (dot(dout, i, v, j) - D[i]) / std::sqrt(static_cast<double>(HS));
    }

    void run(bool with_backward) {
        in_parallel(T, [&](size_t i) {
            Values scores(i + 1);
            for (size_t j = 0; j <= i; j++) scores[j] = score(i, j);
            const double max = *std::max_element(scores.begin(), scores.end());
            double sum = 0;
            for (double s : scores) sum += std::exp(s - max);
            lse[i] = max + std::log(sum);
            for (size_t j = 0; j <= i; j++) add(out, i, probability(i, j), v, j);
            if (!with_backward) return;
            D[i] = dot(dout, i, out, i);
            for (size_t j = 0; j <= i; j++) add(dq, i, score_gradient(i, j), k, j);
        });
        if (!with_backward) return;
        in_parallel(T, [&](size_t j) {
            for (size_t i = j; i < T; i++) {
                add(dk, j, score_gradient(i, j), q, i);
                add(dv, j, probability(i, j), dout, i);
            }
        });
    }
};

enum class Heads { DIFFERENT, ROTATED };

// Computes what to expect of out (B,T,NH,HS) and, unless dout is null, of dqkv (B,T,3,NH,HS). ROTATED, for large sizes:
// head n is given the first one's inputs, their columns rotated by a number of its own, and its results are rotated in
// the same way, as products of rows do not change. So the loop has to run for one head only, and yet a kernel that
// takes a wrong head shows.
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
// Online softmax in its simplest form: the query and its output are spread over the lanes of a warp; keys come one by
// one, straight from global memory. Nothing of size T is kept. Each key and value serves one query and is loaded again
// for the next: 4 HS bytes (BF16) for 4 HS FLOPs.

template <int HS> __global__ void warp_per_query_kernel(floatX* out, float* lse, const floatX* qkv, int T) {
    constexpr int MINE = HS / WARP_SIZE;   // elements of a lane, with a stride of WARP_SIZE
    const int query = warp_row(), lane = threadIdx.x % WARP_SIZE;
    if (query >= T) return;
    const Head head = my_head(T, HS);
    const floatX *q = qkv + head.qkv + query * head.stride + lane, *k = qkv + head.qkv + head.C + lane, *v = k + head.C;
    const float scale = rsqrtf(static_cast<float>(HS));
    float mine[MINE], O[MINE] = {}, max = -INFINITY, sum = 0;
    for (int d = 0; d < MINE; d++) mine[d] = f32(q[d * WARP_SIZE]) * scale;
    for (int key = 0; key <= query; key++, k += head.stride, v += head.stride) {
        float score = 0;
        for (int d = 0; d < MINE; d++) score += mine[d] * f32(k[d * WARP_SIZE]);
        score = warp_sum(score);
        const float larger = fmaxf(max, score), rescale = __expf(max - larger), p = __expf(score - larger);
        for (int d = 0; d < MINE; d++) O[d] = O[d] * rescale + p * f32(v[d * WARP_SIZE]);
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

// Calls f with the trainer's attention on one kind of tensor cores, or none.
template <typename F> void on(TensorCores kind, F f) {
    const TensorCores usual = std::exchange(device.tensor_cores, kind);
    f();
    device.tensor_cores = usual;
}

// The steps by the trainer's own kernels: mma and wgmma where this build, device and head size have them.
template <typename F> void trainer_steps(Case& c, int HS, F attention) {
    for (const TensorCores kind : {TensorCores::NONE, TensorCores::MMA, TensorCores::WGMMA}) {
        bool runs = has_tensor_cores(kind);
        on(kind, [&] { runs = runs && (kind == TensorCores::NONE || on_tensor_cores(HS)); });
        const char* const name = kind == TensorCores::NONE ? "tiles in shared memory"
                                 : kind == TensorCores::MMA ? "mma" : "wgmma, TMA";
        if (runs) c.step(format("train_gpt.cu: %s", name), [&] { on(kind, attention); });
    }
}

enum class Pass { FORWARD, FORWARD_AND_BACKWARD };

template <Pass PASS> void attention(Study& study, const std::string& at, const Size& s) {
    constexpr bool BACKWARD = PASS == Pass::FORWARD_AND_BACKWARD;
    const int B = s.B, T = s.T, NH = s.NH, HS = s.HS;
    Case c(study, (BACKWARD ? "attention forward + backward" : "attention forward") + at,
           format("B %d, T %d, NH %d, HS %d", B, T, NH, HS), flops((BACKWARD ? 14 : 4) * HS * s.pairs()));
    const size_t qkv_size = s.N() * 3 * s.C(), out_size = s.N() * s.C();
    const auto qkv = c.input<floatX>(qkv_size), dout = c.input<floatX>(BACKWARD ? out_size : 1);
    const auto out = c.output<floatX>("out", out_size);
    const auto dqkv = BACKWARD ? c.output<floatX>("dqkv", qkv_size) : c.scratch<floatX>(1);
    const auto lse = c.scratch<float>(s.N() * NH), D = c.scratch<float>(s.N() * NH);
    const auto counter = c.input<int>(std::vector<int>{0});
    const bool naive_fits = T <= 2048;   // memory holds the T x T matrices of all heads
    const auto scores = c.scratch<floatX>(naive_fits ? s.N() * NH * T : 1);
    const auto probs = c.scratch<floatX>(naive_fits ? s.N() * NH * T : 1);
    attention_loop(out.expected, &dqkv.expected, BACKWARD ? &dout.host : nullptr, qkv.host, s,
                   study.timing ? Heads::ROTATED : Heads::DIFFERENT);
    if (naive_fits)
        c.step("train_gpt.cu: naive, T x T in memory", [&] {
            naive_attention_forward(out, scores, probs, qkv, B, T, NH, HS);
            if (BACKWARD) naive_attention_backward(dqkv, scores, dout, qkv, probs, B, T, NH, HS);
        });
    if (!BACKWARD) c.step("a warp per query, online softmax", [&] { warp_per_query(out, lse, qkv, s); });
    trainer_steps(c, HS, [&] {
        attention_forward(out, lse, counter, qkv, B, T, NH, HS);
        if (BACKWARD) attention_backward(dqkv, D, counter, dout, qkv, out, lse, B, T, NH, HS);
    });
}

void run_study(Study& study) {
    for (auto kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (!has_tensor_cores(kind)) printf("%s: not in this build or on this device\n", name_of(kind));
    constexpr int TOKENS = 16384, CHANNELS = 2048;
    const auto lengths = device.is_cpu() ? std::vector<int>{70} : std::vector<int>{1024, 2048, 8192, 16384};
    for (int HS : {64, 128})
        for (int T : lengths) {
            const std::string at = format(", heads of %d, T %d", HS, T);
            std::initializer_list<Size> odd = {{1, 1, 1, HS}, {2, 65, 3, HS}, {1, 200, 2, HS - 32}}, none = {};
            auto forward = [&](Study&, const Size& s) { attention<Pass::FORWARD>(study, at, s); };
            auto both = [&](Study&, const Size& s) { attention<Pass::FORWARD_AND_BACKWARD>(study, at, s); };
            const Size timed = {TOKENS / T, T, CHANNELS / HS, HS}, counted = {1, T, 2, HS};
            study.at_sizes(T == lengths.front() ? odd : none, timed, counted, forward, both);
        }
}

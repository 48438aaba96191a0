// Embeddings, step by step: forward looks rows up in a table; backward adds many rows to one row of the table.
//
// To learn here:
//   - gather: each row of the result copies a row from anywhere in a table. Memory needs only that a row's elements are
//     neighbours; where the row is does not matter;
//   - index arithmetic: a division by C costs more instructions than the addition that it serves;
//   - scatter: a token that is in the batch a thousand times has a thousand rows of dout to add to one row of dwte.
//     Atomics would do it, in another order each time, and so with other bits. A warp that owns a row of dwte needs
//     none;
//   - sorting: the owner of a row must know that row's positions. The host sorts them while the GPU does other work;
//   - balance: words of a text are very unevenly distributed: the most frequent one is at every twentieth position. A
//     kernel that gives each run of positions to one warp waits for the longest run.
// Memory is the bound. Forward reads wpe and the rows of wte that occur, once, and writes out; backward reads dout, and
// reads and writes dwpe and the rows of dwte that occur.
//
//     out[b,t] = wte[inp[b,t]] + wpe[t]
//     dwte[v] += sum of dout[b,t] where inp[b,t] = v,   dwpe[t] += sum over b of dout[b,t]

#include "study.h"

struct Size {
    int B, T, C, V;
    __host__ __device__ size_t N() const { return static_cast<size_t>(B) * T; }
};

// ==== tokens =================================================================

// About Zipf's law, as in text: token v has a probability of about 1 / v. The last token always occurs.
std::vector<int> tokens_of(const Size& s) {
    std::vector<int> tokens(s.N());
    for (size_t n = 0; n < s.N(); n++)
        tokens[n] = std::min(s.V, static_cast<int>(pow(s.V + 1, std::ldexp(splitmix64(n) >> 11, -53)))) - 1;
    tokens.back() = s.V - 1;
    return tokens;
}

// Positions by token, as the trainer sorts them: run r is order[first[r]] ... order[first[r + 1] - 1].
struct Positions {
    std::vector<int> order, first;
    size_t runs;

    Positions(const std::vector<int>& tokens, int V) : order(tokens.size()), first(tokens.size() + 1) {
        runs = sort_positions(order.data(), first.data(), tokens.data(), tokens.size(), V);
    }
};

std::string text_of(const Size& s) { return format("B %d, T %d, C %d, V %d", s.B, s.T, s.C, s.V); }

// ==== forward ================================================================

// ---- 1: a thread per row ----
// Neighbouring threads read and write a row apart.

__global__ void thread_per_row_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, Size s) {
    const size_t n = my_index(), C = s.C;
    if (n >= s.N()) return;
    for (size_t i = 0; i < C; i++)
        out[n * C + i] = static_cast<floatX>(f32(wte[inp[n] * C + i]) + f32(wpe[n % s.T * C + i]));
}

// ---- 2, 3: a thread per element, a thread per pack ----
// 2  WIDTH 1: neighbours read neighbours, but each element takes a division by C and one by T, of 64 bits, for which
//    a GPU has no instruction.
// 3  WIDTH = PACK: as many divisions serve eight elements, or four, and loads are 128 bits.
//
// ---- 4: train_gpt.cu ----
// A warp per row: its token is looked up once, and lanes walk along the row without a division.

template <int WIDTH>
__global__ void forward_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, Size s) {
    const size_t at = my_index(WIDTH), C = s.C, n = at / C, i = at % C;
    if (n >= s.N()) return;
    float x[WIDTH], y[WIDTH];
    load(x, wte + inp[n] * C + i);
    load(y, wpe + n % s.T * C + i);
    for (int k = 0; k < WIDTH; k++) x[k] += y[k];
    store(out + at, x);
}

void study_forward(Study& study, const Size& s) {
    const size_t N = s.N(), C = s.C;
    const std::vector<int> tokens = tokens_of(s);
    const double rows = N + s.T + Positions(tokens, s.V).runs;
    Case c(study, "embedding forward", text_of(s), bytes(rows * C * sizeof(floatX)));
    const auto inp = c.input<int>(tokens);
    const auto wte = c.input<floatX>(s.V * C), wpe = c.input<floatX>(s.T * C);
    const auto out = c.output<floatX>("out", N * C);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < C; i++)
            out.expected[n * C + i] = wte.host[tokens[n] * C + i] + wpe.host[n % s.T * C + i];
    c.step("a thread per row", [&] { launch_threads(thread_per_row_kernel, N, out, inp, wte, wpe, s); });
    c.step("a thread per element", [&] { launch_threads(forward_kernel<1>, N * C, out, inp, wte, wpe, s); });
    c.step("a thread per 128 bits", [&] { launch_threads(forward_kernel<PACK>, N * C / PACK, out, inp, wte, wpe, s); });
    c.step("train_gpt.cu: a warp per row", [&] { embedding_forward(out, inp, wte, wpe, s.B, s.T, s.C); });
}

// ==== backward ===============================================================

// ---- 1: a thread per column ----
// A thread owns its column of dwte and dwpe and goes over all positions in order. But there are only C threads, and
// each addition waits for a load that waits for the store before it, which may be to the same address.

__global__ void columns_kernel(float* dwte, float* dwpe, const floatX* dout, const int* inp, Size s) {
    const size_t i = my_index(), C = s.C;
    if (i >= C) return;
    for (size_t n = 0; n < s.N(); n++) {
        const float d = f32(dout[n * C + i]);
        dwte[inp[n] * C + i] += d;
        dwpe[n % s.T * C + i] += d;
    }
}

// A thread per element of dwpe: enough of them, and neighbours read neighbours. For step 2.
__global__ void wpe_kernel(float* dwpe, const floatX* dout, Size s) {
    const size_t at = my_index(), size = static_cast<size_t>(s.T) * s.C;
    if (at >= size) return;
    float sum = 0;
    for (int b = 0; b < s.B; b++) sum += f32(dout[b * size + at]);
    dwpe[at] += sum;
}

// x += a pack of the array
template <typename T> __device__ __forceinline__ void add_pack(float (&x)[PACK], const T* from) {
    float y[PACK];
    load(y, from);
    for (int k = 0; k < PACK; k++) x[k] += y[k];
}

// ---- 2: a warp per run of sorted positions ----
// The host has sorted the positions, which it knows before the step begins. The sum is formed in registers, a pack of
// columns a lane, and only rows of dwte whose token occurs are read and written.

__global__ void runs_kernel(float* dwte, const floatX* dout, const int* inp, const int* order, const int* first,
                            size_t runs, size_t C) {
    const size_t r = warp_row();
    if (r >= runs) return;
    const int begin = first[r], end = first[r + 1];
    float* const row = dwte + inp[order[begin]] * C;
    for (size_t i = lane_start(); i < C; i += LANE_STRIDE) {
        float sum[PACK] = {};
        for (int p = begin; p < end; p++) add_pack(sum, dout + order[p] * C + i);
        add_pack(sum, row + i);
        store(row + i, sum);
    }
}

// ---- 3: train_gpt.cu ----
// The same runs, and dwpe by packs; packs of 4 columns, as gradients are FP32 and then move in whole sectors. A token
// that is 4 % of a text has a run of thousands of positions, one load after the other, when other warps have long
// ended: the warps of a block share such a run.

void study_backward(Study& study, const Size& s) {
    const size_t N = s.N(), C = s.C;
    const std::vector<int> tokens = tokens_of(s);
    const Positions positions(tokens, s.V);
    const size_t runs = positions.runs;
    Case c(study, "embedding backward", text_of(s),
           bytes(1.0 * N * C * sizeof(floatX) + 2.0 * (s.T + runs) * C * sizeof(float)));
    const auto inp = c.input<int>(tokens), order = c.input<int>(positions.order), first = c.input<int>(positions.first);
    const auto dout = c.input<floatX>(N * C);
    const auto dwte = c.updated<float>("dwte", s.V * C), dwpe = c.updated<float>("dwpe", s.T * C);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < C; i++) {
            dwte.expected[tokens[n] * C + i] += dout.host[n * C + i];
            dwpe.expected[n % s.T * C + i] += dout.host[n * C + i];
        }
    c.step("a thread per column, all positions", [&] { launch_threads(columns_kernel, C, dwte, dwpe, dout, inp, s); });
    c.step("a warp per run of sorted positions", [&] {
        launch_threads(runs_kernel, runs * WARP_SIZE, dwte, dout, inp, order, first, runs, C);
        launch_threads(wpe_kernel, s.T * C, dwpe, dout, s);
    });
    c.step("train_gpt.cu: long runs shared, dwpe by packs", [&] {
        embedding_backward(grad(dwte), grad(dwpe), dout, inp, order, first, runs, s.B, s.T, s.C);
    });
}

void run_study(Study& study) {
    const Size on_a_gpu = {16, 1024, 768, 50257}, on_a_cpu = {2, 64, 128, 100};
    study.at_sizes<Size>({{1, 1, 16, 5}, {3, 7, 48, 33}, {2, 150, 272, 50}}, on_a_gpu, on_a_cpu, study_forward,
                         study_backward);
}

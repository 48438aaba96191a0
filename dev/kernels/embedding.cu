// Embeddings, step by step: a lookup forward, and backward the same lookup turned round, where many add to one.
//
// To learn here:
//   - gather: each row of the result copies a row from anywhere in a table. That a row's elements are neighbours is
//     all that memory asks for; where the row is does not matter;
//   - index arithmetic: a division by C costs more instructions than the addition that it serves;
//   - scatter: a token that is in the batch a thousand times has a thousand rows of dout to add to one row of dwte.
//     Atomics would do it, in another order each time, and so with other bits. Who owns a row of dwte needs none;
//   - sorting: to own a row one must know whose positions it has. A host sorts them while the GPU does other things;
//   - balance: words of a text are as uneven as can be, with the first in every twentieth place. The longest run of
//     positions is what a kernel waits for that gives each run to one warp.
// Memory is the bound. Forward reads wpe and the rows of wte that occur, once, and writes out; backward reads dout, and
// reads and writes dwpe and the rows of dwte that occur.
//
//     out[b,t] = wte[inp[b,t]] + wpe[t]
//     dwte[v] += sum of dout[b,t] where inp[b,t] = v,   dwpe[t] += sum over b of dout[b,t]

#include "study.h"

struct Size { int B, T, C, V; size_t N() const { return static_cast<size_t>(B) * T; } };

// ==== tokens =================================================================

// Zipf's law, roughly, as in text: token v comes with a probability of about 1 / v. The last one always comes.
std::vector<int> tokens_of(const Size& s) {
    std::vector<int> tokens(s.N());
    for (size_t n = 0; n < s.N(); n++)
        tokens[n] = std::min(s.V, static_cast<int>(pow(s.V + 1, std::ldexp(splitmix64(n) >> 11, -53)))) - 1;
    tokens.back() = s.V - 1;
    return tokens;
}

// Positions by token: run r is order[first[r]] ... order[first[r + 1] - 1]. The longest runs come first.
struct Positions { std::vector<int> order, first; };

Positions sorted_by_token(const std::vector<int>& tokens) {
    std::map<int, std::vector<int>> positions;
    for (size_t n = 0; n < tokens.size(); n++) positions[tokens[n]].push_back(static_cast<int>(n));
    std::vector<std::vector<int>> sorted;
    for (auto& [token, list] : positions) sorted.push_back(list);
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.size() > b.size(); });
    Positions runs = {{}, {0}};
    for (auto& list : sorted) {
        runs.order.insert(runs.order.end(), list.begin(), list.end());
        runs.first.push_back(static_cast<int>(runs.order.size()));
    }
    return runs;
}

// ==== forward ================================================================

// ---- 1: a thread per row ----
// Neighbours read and write a row apart, as nobody should.

__global__ void thread_per_row_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, Size s) {
    const size_t n = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, C = s.C;
    if (n >= static_cast<size_t>(s.B) * s.T) return;
    for (size_t i = 0; i < C; i++)
        out[n * C + i] = static_cast<floatX>(static_cast<float>(wte[inp[n] * C + i]) +
                                             static_cast<float>(wpe[n % s.T * C + i]));
}

// ---- 2, 3: a thread per element, a thread per pack ----
// 2  WIDTH 1: neighbours do read neighbours now, but each element takes a division by C and one by T, of 64 bits,
//    which a GPU has no instruction for.
// 3  WIDTH = PACK: as many divisions serve eight elements, or four, and loads are of 128 bits.

template <int WIDTH>
__global__ void forward_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, Size s) {
    const size_t at = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH, C = s.C;
    const size_t n = at / C, i = at % C;
    if (n >= static_cast<size_t>(s.B) * s.T) return;
    float x[WIDTH], y[WIDTH];
    load(x, wte + inp[n] * C + i);
    load(y, wpe + n % s.T * C + i);
    for (int k = 0; k < WIDTH; k++) x[k] += y[k];
    store(out + at, x);
}

// ---- 4: train_gpt.cu ----
// A warp per row: its token is looked up once and division by C is gone, as lanes walk along the row.

void forward(Study& study, const Size& s) {
    const size_t N = s.N(), C = s.C;
    const std::vector<int> tokens = tokens_of(s);
    const size_t distinct = sorted_by_token(tokens).first.size() - 1;
    Case c(study, "embedding forward", format("B %d, T %d, C %d, V %d", s.B, s.T, s.C, s.V),
           bytes(1.0 * (N + s.T + distinct) * C * sizeof(floatX)));
    const auto inp = c.input<int>(tokens);
    const auto wte = c.input<floatX>(s.V * C), wpe = c.input<floatX>(s.T * C);
    const auto out = c.output<floatX>("out", N * C);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < C; i++)
            out.expected[n * C + i] = wte.host[tokens[n] * C + i] + wpe.host[n % s.T * C + i];
    c.step("a thread per row", [&] {
        launch("step 1", thread_per_row_kernel, ceil_div(N, BLOCK), BLOCK, 0, out, inp, wte, wpe, s);
    });
    c.step("a thread per element", [&] {
        launch("step 2", forward_kernel<1>, ceil_div(N * C, BLOCK), BLOCK, 0, out, inp, wte, wpe, s);
    });
    c.step("a thread per 128 bits", [&] {
        launch("step 3", forward_kernel<PACK>, ceil_div(N * C / PACK, BLOCK), BLOCK, 0, out, inp, wte, wpe, s);
    });
    c.step("train_gpt.cu: a warp per row", [&] { embedding_forward(out, inp, wte, wpe, s.B, s.T, s.C); });
}

// ==== backward ===============================================================

// ---- 1: a thread per column ----
// It owns its column of dwte and dwpe, so nobody is in its way, and walks over all positions in order. But there are
// only C threads, and each addition waits for a load that waits for the store before it, which may be to its place.

__global__ void columns_kernel(float* dwte, float* dwpe, const floatX* dout, const int* inp, Size s) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, C = s.C;
    if (i >= C) return;
    for (size_t n = 0; n < static_cast<size_t>(s.B) * s.T; n++) {
        const float d = static_cast<float>(dout[n * C + i]);
        dwte[inp[n] * C + i] += d;
        dwpe[n % s.T * C + i] += d;
    }
}

// A thread per element of dwpe: enough of them, and neighbours read neighbours. For steps 2 and 3.
__global__ void wpe_kernel(float* dwpe, const floatX* dout, Size s) {
    const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, size = static_cast<size_t>(s.T) * s.C;
    if (at >= size) return;
    float sum = 0;
    for (int b = 0; b < s.B; b++) sum += static_cast<float>(dout[b * size + at]);
    dwpe[at] += sum;
}

__device__ __forceinline__ void add_pack(float* grad, const float (&sum)[PACK]) {
    float x[PACK];
    load(x, grad);
    for (int k = 0; k < PACK; k++) x[k] += sum[k];
    store(grad, x);
}

// ---- 2: a warp per row of the table looks for its token ----
// In each round the lanes look at a position each, and a ballot tells all of them where the token was. The sum is made
// in registers, a pack of columns a lane; where C is larger the grid's y has more warps. Parallel, but V warps and more
// read all of inp each, and most find nothing.

__global__ void search_kernel(float* dwte, const floatX* dout, const int* inp, Size s) {
    const size_t v = warp_row(), N = static_cast<size_t>(s.B) * s.T, C = s.C;
    if (v >= static_cast<size_t>(s.V)) return;
    const size_t lane = threadIdx.x % WARP_SIZE, i = blockIdx.y * static_cast<size_t>(LANE_STRIDE) + lane * PACK;
    float sum[PACK] = {}, x[PACK];
    for (size_t begin = 0; begin < N; begin += WARP_SIZE) {
        const size_t mine = begin + lane;
        unsigned found = __ballot_sync(FULL_WARP, mine < N && inp[mine < N ? mine : 0] == static_cast<int>(v));
        for (size_t n = begin; found; n++, found >>= 1) {
            if (i >= C || !(found & 1)) continue;
            load(x, dout + n * C + i);
            for (int k = 0; k < PACK; k++) sum[k] += x[k];
        }
    }
    if (i < C) add_pack(dwte + v * C + i, sum);
}

// ---- 3: a warp per run of sorted positions ----
// No one searches: the host has sorted the positions, which it knows before the step begins. Only rows of dwte whose
// token occurs are read and written.

__global__ void runs_kernel(float* dwte, const floatX* dout, const int* inp, const int* order, const int* first,
                            size_t runs, size_t C) {
    const size_t r = warp_row();
    if (r >= runs) return;
    const int begin = first[r], end = first[r + 1];
    for (size_t i = lane_start(); i < C; i += LANE_STRIDE) {
        float sum[PACK] = {}, x[PACK];
        for (int p = begin; p < end; p++) {
            load(x, dout + order[p] * C + i);
            for (int k = 0; k < PACK; k++) sum[k] += x[k];
        }
        add_pack(dwte + inp[order[begin]] * C + i, sum);
    }
}

// ---- 4: train_gpt.cu ----
// The same runs, and dwpe by packs; packs of 4 columns, as gradients are FP32 and move in whole sectors then. A token
// that is 4 % of a text has a run of thousands of positions, one load after the other, while other warps have long
// ended: such runs are shared by the warps of a block.

void backward(Study& study, const Size& s) {
    const size_t N = s.N(), C = s.C;
    const std::vector<int> tokens = tokens_of(s);
    const Positions runs = sorted_by_token(tokens);
    const size_t count = runs.first.size() - 1;
    Case c(study, "embedding backward", format("B %d, T %d, C %d, V %d", s.B, s.T, s.C, s.V),
           bytes(1.0 * N * C * sizeof(floatX) + 2.0 * (s.T + count) * C * sizeof(float)));
    const auto inp = c.input<int>(tokens), order = c.input<int>(runs.order), first = c.input<int>(runs.first);
    const auto dout = c.input<floatX>(N * C);
    const auto dwte = c.updated<float>("dwte", s.V * C), dwpe = c.updated<float>("dwpe", s.T * C);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < C; i++) {
            dwte.expected[tokens[n] * C + i] += dout.host[n * C + i];
            dwpe.expected[n % s.T * C + i] += dout.host[n * C + i];
        }
    const auto wpe = [&] { launch("wpe", wpe_kernel, ceil_div(s.T * C, BLOCK), BLOCK, 0, dwpe, dout, s); };
    c.step("a thread per column, all positions", [&] {
        launch("step 1", columns_kernel, ceil_div(C, BLOCK), BLOCK, 0, dwte, dwpe, dout, inp, s);
    });
    c.step("a warp per token looks for its positions", [&] {
        launch("step 2", search_kernel, dim3(row_blocks(s.V), ceil_div(C, LANE_STRIDE)), BLOCK, 0, dwte, dout, inp, s);
        wpe();
    });
    c.step("a warp per run of sorted positions", [&] {
        launch("step 3", runs_kernel, row_blocks(count), BLOCK, 0, dwte, dout, inp, order, first, count, C);
        wpe();
    });
    c.step("train_gpt.cu: long runs shared, dwpe by packs", [&] {
        embedding_backward(grad(dwte), grad(dwpe), dout, inp, order, first, count, s.B, s.T, s.C);
    });
}

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        const Size on_a_gpu = {16, 1024, 768, 50257}, on_a_cpu = {2, 64, 128, 100};
        const auto both = [&](const Size& s) {
            forward(study, s);
            backward(study, s);
        };
        study.at_sizes<Size>({{1, 1, 16, 5}, {3, 7, 48, 33}, {2, 150, 272, 50}}, on_a_gpu, on_a_cpu, both);
    });
}

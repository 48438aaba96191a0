// Embeddings, step by step: forward looks up rows of a table; backward adds many rows to one row of the table.
//
// Topics:
//   - gather: each output row copies a row of the table. Accesses are coalesced if a warp reads neighbouring elements
//     of a row; the location of the row does not matter;
//   - index arithmetic: a division by C costs more instructions than the addition that it serves;
//   - scatter: a token that occurs a thousand times in the batch has a thousand rows of dout to add to one row of dwte.
//     Atomics would add them in a different order in each run of the program, with different bits. A warp that owns a
//     row of dwte needs no atomics;
//   - sorting: the owner of a row needs the list of its positions. The host sorts them while the GPU does other work;
//   - load balance: word frequencies are very uneven. The most frequent token has about 4 % of all positions. A kernel
//     that assigns all positions of a token to one warp waits for the warp of that token.
// Bound by memory bandwidth. Forward reads wpe and each row of wte whose token occurs, and writes out; backward reads
// dout, and reads and writes dwpe and the rows of dwte whose tokens occur.
//
//     out[b,t] = wte[inp[b,t]] + wpe[t]
//     dwte[v] += sum of dout[b,t] where inp[b,t] = v,   dwpe[t] += sum over b of dout[b,t]

#include "study.h"

struct Size {
    int B, T, C, V;
    __host__ __device__ size_t N() const { return static_cast<size_t>(B) * T; }
};

// ==== tokens =================================================================

// The positions of a batch sorted by token. All positions of one token form a run: run r is order[first[r]] ...
// order[first[r + 1] - 1].
struct Positions {
    std::vector<int> order, first;
    size_t runs = 0;

    Positions(const std::vector<int>& tokens, int vocab) : order(sorted_positions(tokens, vocab)) {
        for (size_t p = 0; p < order.size(); p++)
            if (p == 0 || tokens[order[p]] != tokens[order[p - 1]]) first.push_back(p);
        runs = first.size();
        first.push_back(order.size());
    }
};

// Returns random tokens with word frequencies as in text (Zipf's law): the probability of token v is about proportional
// to 1 / (v + 1). The last token always occurs.
std::vector<int> tokens_of(const Size& s) {
    std::vector<int> tokens(s.N());
    for (size_t n = 0; n < s.N(); n++)
        tokens[n] = std::min(s.V, static_cast<int>(pow(s.V + 1, std::ldexp(splitmix64(n) >> 11, -53)))) - 1;
    tokens.back() = s.V - 1;
    return tokens;
}

std::string text_of(const Size& s) { return format("B %d, T %d, C %d, V %d", s.B, s.T, s.C, s.V); }

// ==== forward ================================================================

// ---- 1: one thread per row ----
// Neighbouring threads access memory with a stride of a row: each access of a warp transfers 32 sectors.

__global__ void thread_per_row_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, Size s) {
    const size_t n = my_index(), C = s.C;
    if (n >= s.N()) return;
    for (size_t i = 0; i < C; i++)
        out[n * C + i] = static_cast<floatX>(f32(wte[inp[n] * C + i]) + f32(wpe[n % s.T * C + i]));
}

// ---- 2, 3: one thread per element, one thread per pack ----
// 2  WIDTH 1: neighbouring threads access neighbouring elements, 2 sectors per access (4 in FP32). But each element
//    takes 64-bit divisions by C and by T, which are sequences of many instructions on a GPU.
// 3  WIDTH = PACK: the same divisions serve eight elements (four in FP32), and loads are 128 bits.
//
// ---- 4: train_gpt.cu ----
// One warp per row: the token is looked up once, and the lanes step along the row without divisions.

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
    c.step("one thread per row", [&] { launch_threads(thread_per_row_kernel, N, out, inp, wte, wpe, s); });
    c.step("one thread per element", [&] { launch_threads(forward_kernel<1>, N * C, out, inp, wte, wpe, s); });
    c.step("128 bits per thread", [&] { launch_threads(forward_kernel<PACK>, N * C / PACK, out, inp, wte, wpe, s); });
    c.step("train_gpt.cu: one warp per row", [&] { embedding_forward(view(out, N, s.C), inp, wte, wpe, 0, s.T); });
}

// ==== backward ===============================================================

// ---- 1: one thread per column ----
// Each thread owns a column of dwte and dwpe and loops over all positions in order, without atomics. But there are only
// C threads, and each addition waits for a load, which waits for the previous store: the address may be the same.

__global__ void columns_kernel(float* dwte, float* dwpe, const floatX* dout, const int* inp, Size s) {
    const size_t i = my_index(), C = s.C;
    if (i >= C) return;
    for (size_t n = 0; n < s.N(); n++) {
        const float d = f32(dout[n * C + i]);
        dwte[inp[n] * C + i] += d;
        dwpe[n % s.T * C + i] += d;
    }
}

// Step 2's dwpe: one thread per element gives enough threads and coalesced accesses.
__global__ void wpe_kernel(float* dwpe, const floatX* dout, Size s) {
    const size_t at = my_index(), size = static_cast<size_t>(s.T) * s.C;
    if (at >= size) return;
    float sum = 0;
    for (int b = 0; b < s.B; b++) sum += f32(dout[b * size + at]);
    dwpe[at] += sum;
}

// Adds a pack of the array to x.
template <typename T> __device__ __forceinline__ void add_pack(float (&x)[PACK], const T* from) {
    float y[PACK];
    load(y, from);
    for (int k = 0; k < PACK; k++) x[k] += y[k];
}

// ---- 2: one warp per run of sorted positions ----
// The host knows the tokens before the step begins and has sorted their positions. Each lane sums a pack of columns in
// registers, so the warp reads and writes a row of dwte once per run instead of once per position, and rows whose
// tokens do not occur are not accessed.

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
// A token with 4 % of 65,536 positions has a run of 2,600, and in step 2 one warp still sums them when all others have
// finished. Here a warp sums a chunk of 32 sorted positions, whatever their tokens, so all warps have equal work. A
// second kernel adds the sums of a run that crosses chunks. A warp has four rows of dout in flight, and with them the
// rows of dwte to which it will add. dwpe is computed in packs, with eight loads in flight per lane. Packs have 4
// columns because gradients are FP32: then each access transfers whole sectors.

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
    const auto partials = c.scratch<float>(2 * ceil_div(N, chunk_size(N)) * C);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < C; i++) {
            dwte.expected[tokens[n] * C + i] += dout.host[n * C + i];
            dwpe.expected[n % s.T * C + i] += dout.host[n * C + i];
        }
    c.step("one thread per column", [&] { launch_threads(columns_kernel, C, dwte, dwpe, dout, inp, s); });
    c.step("one warp per run of sorted positions", [&] {
        launch_threads(runs_kernel, runs * WARP_SIZE, dwte, dout, inp, order, first, runs, C);
        launch_threads(wpe_kernel, s.T * C, dwpe, dout, s);
    });
    c.step("train_gpt.cu: chunks of positions, dwpe in packs", [&] {
        embedding_backward(grad(dwte), grad(dwpe), partials, view(dout, N, s.C), inp, order, 0, s.T);
    });
}

void run_study(Study& study) {
    const Size on_a_gpu = {16, 1024, 768, 50257}, on_a_cpu = {2, 64, 128, 100};
    study.at_sizes<Size>({{1, 1, 16, 5}, {3, 7, 48, 33}, {2, 150, 272, 50}}, on_a_gpu, on_a_cpu, study_forward,
                         study_backward);
}

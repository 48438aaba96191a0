// LayerNorm, step by step: a kernel that is bound by memory bandwidth and uses each row several times, but should read
// it from memory only once.
//
// Topics:
//   - coalescing: the lanes of a warp should read neighbouring elements, because memory is transferred in sectors of 32
//     bytes;
//   - packs: with 128 bits per load, the same bytes take fewer instructions;
//   - column sums: a gradient summed over all rows, in a fixed order and without atomics;
//   - Little's law: bandwidth = bytes in flight / latency. More loads in flight make the kernel faster.
// Minimum traffic: forward reads inp, writes out; backward reads dout, inp, dinp, writes dinp.

#include "study.h"

struct Size { size_t N; int C; };
std::string text_of(const Size& s) { return format("N %zu, C %d", s.N, s.C); }

// ==== forward ================================================================

// ---- 1: one thread per row ----
// The formula as written. Neighbouring threads read with a stride of a whole row: each load of a warp transfers 32
// sectors and uses 2 (BF16) or 4 (FP32) bytes of each: see `sectors` in the table.

__global__ void thread_per_row_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* w,
                                      const floatX* b, Size s) {
    const size_t n = my_index(), C = s.C;
    if (n >= s.N) return;
    const floatX* x = inp + n * C;
    float sum = 0, squares = 0;
    for (size_t i = 0; i < C; i++) sum += f32(x[i]);
    const float m = sum / C;
    for (size_t i = 0; i < C; i++) squares += (f32(x[i]) - m) * (f32(x[i]) - m);
    const float r = rsqrtf(squares / C + LAYERNORM_EPS);
    for (size_t i = 0; i < C; i++) out[n * C + i] = static_cast<floatX>((f32(x[i]) - m) * r * f32(w[i]) + f32(b[i]));
    mean[n] = m;
    rstd[n] = r;
}

// ---- 2, 3: one warp per row, packs ----
// 2  WIDTH 1: the lanes of a warp read neighbouring elements, so a load transfers 2 sectors (4 in FP32) instead of 32.
//    Shuffles add the lanes' sums. The second and third pass over the row hit the L1 cache.
// 3  WIDTH = PACK: 128 bits per load. An eighth of the instructions (a quarter in FP32) and 8 (4) times the bytes in
//    flight per thread.
//
// ---- 4: train_gpt.cu ----
// Step 3 relies on the L1 cache for its second and third pass, in which other warps' rows may replace the row. This
// kernel keeps the row in shared memory. A lane loads up to four packs before it adds the first: with C = 768 and BF16
// it has three, and the row waits for memory once. nvcc unrolls step 3's loop by four, but runs a remainder one pack at
// a time.

template <int WIDTH>
__global__ void warp_per_row_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* w,
                                    const floatX* b, Size s) {
    const size_t n = warp_row(), C = s.C;
    if (n >= s.N) return;
    const size_t first = threadIdx.x % WARP_SIZE * WIDTH, step = WARP_SIZE * WIDTH;
    const floatX* x = inp + n * C;
    float v[WIDTH], u[WIDTH], bias[WIDTH], sum = 0, squares = 0;
    for (size_t i = first; i < C; i += step) {
        load(v, x + i);
        for (int k = 0; k < WIDTH; k++) sum += v[k];
    }
    const float m = warp_sum(sum) / C;
    for (size_t i = first; i < C; i += step) {
        load(v, x + i);
        for (int k = 0; k < WIDTH; k++) squares += (v[k] - m) * (v[k] - m);
    }
    const float r = rsqrtf(warp_sum(squares) / C + LAYERNORM_EPS);
    for (size_t i = first; i < C; i += step) {
        load(v, x + i);
        load(u, w + i);
        load(bias, b + i);
        for (int k = 0; k < WIDTH; k++) v[k] = (v[k] - m) * r * u[k] + bias[k];
        store(out + n * C + i, v);
    }
    if (threadIdx.x % WARP_SIZE == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

void study_forward(Study& study, const Size& s) {
    const size_t N = s.N, C = s.C;
    Case c(study, "layernorm forward", text_of(s), bytes(2.0 * N * C * sizeof(floatX)));
    const auto inp = c.input<floatX>(N * C, -1, 3), w = c.input<floatX>(C), b = c.input<floatX>(C);
    const auto out = c.output<floatX>("out", N * C);
    const auto mean = c.output<float>("mean", N), rstd = c.output<float>("rstd", N);
    const auto expected = layernorm_loop<double>(inp.host, w.host, b.host);
    out.expected = expected.out;
    mean.expected = expected.mean;
    rstd.expected = expected.rstd;
    c.step("one thread per row", [&] { launch_threads(thread_per_row_kernel, N, out, mean, rstd, inp, w, b, s); });
    c.step("one warp per row: coalesced loads", [&] {
        launch_threads(warp_per_row_kernel<1>, N * WARP_SIZE, out, mean, rstd, inp, w, b, s);
    });
    c.step("128 bits per load", [&] {
        launch_threads(warp_per_row_kernel<PACK>, N * WARP_SIZE, out, mean, rstd, inp, w, b, s);
    });
    c.step("train_gpt.cu: row in shared memory", [&] {
        layernorm_forward(view(out, N, C), {mean, rstd}, view(inp, N, C), w, b);
    });
}

// ==== backward ===============================================================

// ---- 1: one thread per row for dinp, one thread per column for dw and db ----
// Two kernels, which both read dout and inp. The column kernel's loads are coalesced, but it has only C threads, each
// of which loops over all N rows. An H100 holds 2,048 threads on each of 132 multiprocessors.

__global__ void rows_kernel(floatX* dinp, const floatX* dout, const floatX* inp, const floatX* w, const float* mean,
                            const float* rstd, Size s) {
    const size_t n = my_index(), C = s.C;
    if (n >= s.N) return;
    const float m = mean[n], r = rstd[n];
    float sum_g = 0, sum_gx = 0;
    for (size_t i = 0; i < C; i++) {
        const float g = f32(dout[n * C + i]) * f32(w[i]);
        sum_g += g;
        sum_gx += g * (f32(inp[n * C + i]) - m) * r;
    }
    for (size_t i = 0; i < C; i++) {
        const float g = f32(dout[n * C + i]) * f32(w[i]), xhat = (f32(inp[n * C + i]) - m) * r;
        dinp[n * C + i] = static_cast<floatX>(f32(dinp[n * C + i]) + r * (g - sum_g / C - xhat * (sum_gx / C)));
    }
}

__global__ void columns_kernel(float* partials, const floatX* dout, const floatX* inp, const float* mean,
                               const float* rstd, Size s) {
    const size_t i = my_index(), C = s.C;
    if (i >= C) return;
    float dw = 0, db = 0;
    for (size_t n = 0; n < s.N; n++) {
        const float d = f32(dout[n * C + i]);
        dw += d * (f32(inp[n * C + i]) - mean[n]) * rstd[n];
        db += d;
    }
    partials[i] = dw;
    partials[C + i] = db;
}

// ---- 2: one warp per row, one kernel ----
// One kernel computes dinp, dw and db, so dout and inp are read from memory once. Each warp loops over rows and has its
// own sums dw and db in shared memory; each lane adds to its own columns, so there are no races. At the end the warps
// of a block add their sums into a row of `partials`, and add_partials adds these rows: many threads, a fixed order, no
// atomics. Two limits remain. The packs of 8 floats of neighbouring lanes have a stride of 32 bytes, so every
// shared-memory access of 128 bits has a 2-way bank conflict: see `wavefronts` in the table. And two rows of floats per
// warp limit occupancy: 16 warps per multiprocessor at C = 1600.

// Processes one row: adds to dw and db, then computes dinp.
__device__ __forceinline__ void warp_backward(floatX* dinp, float* dw, float* db, const floatX* dout, const floatX* inp,
                                              const floatX* w, float m, float r, int C) {
    float d[PACK], x[PACK], g[PACK], y[PACK], sum_g[PACK] = {}, sum_gx[PACK] = {};
    for (int i = lane_start(); i < C; i += LANE_STRIDE) {
        load(d, dout + i);
        load(x, inp + i);
        load(g, w + i);
        for (int k = 0; k < PACK; k++) {
            x[k] = (x[k] - m) * r;
            sum_g[k] += g[k] * d[k];
            sum_gx[k] += g[k] * d[k] * x[k];
        }
        load(y, dw + i);
        for (int k = 0; k < PACK; k++) y[k] += d[k] * x[k];
        store(dw + i, y);
        load(y, db + i);
        for (int k = 0; k < PACK; k++) y[k] += d[k];
        store(db + i, y);
    }
    const float avg_g = warp_sum(sum_g) / C, avg_gx = warp_sum(sum_gx) / C;
    for (int i = lane_start(); i < C; i += LANE_STRIDE) {
        load(d, dout + i);
        load(x, inp + i);
        load(g, w + i);
        load(y, dinp + i);
        for (int k = 0; k < PACK; k++) y[k] += r * (g[k] * d[k] - avg_g - (x[k] - m) * r * avg_gx);
        store(dinp + i, y);
    }
}

__global__ void warp_per_row_backward_kernel(floatX* dinp, float* partials, const floatX* dout, const floatX* inp,
                                     const floatX* w, const float* mean, const float* rstd, Size s) {
    const int warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE, C = s.C;
    float *dw = dynamic_shared() + warp * 2 * C, *db = dw + C, y[PACK];   // this warp's sums
    const float zero[PACK] = {};
    for (int i = lane_start(); i < 2 * C; i += LANE_STRIDE) store(dw + i, zero);
    __syncwarp();
    const size_t stride = static_cast<size_t>(gridDim.x) * warps;
    for (size_t n = static_cast<size_t>(blockIdx.x) * warps + warp; n < s.N; n += stride) {
        const size_t row = n * C;
        warp_backward(dinp + row, dw, db, dout + row, inp + row, w, mean[n], rstd[n], C);
    }
    __syncthreads();
    for (int i = threadIdx.x * PACK; i < 2 * C; i += blockDim.x * PACK) {   // dw, then db
        float sum[PACK] = {};
        for (int other = 0; other < warps; other++) {
            load(y, dynamic_shared() + other * 2 * C + i);
            for (int k = 0; k < PACK; k++) sum[k] += y[k];
        }
        const size_t row = i < C ? blockIdx.x : static_cast<size_t>(gridDim.x) + blockIdx.x;
        store(partials + row * C + i % C, sum);
    }
}

// ---- 3: train_gpt.cu ----
// A block processes one row at a time, and a thread owns one pack of it. Then the row and the column sums fit in
// registers: the sums need no shared memory (12 accesses of 128 bits per row and thread if they were there), and dinp
// is loaded together with dout and inp, although only the second pass needs it. So a row waits for memory once. The
// cost is one barrier per row. The kernel also computes the column sums of dinp, the gradient of a bias: no other
// kernel has to read dinp for it.
//
// Little's law on an H200: 4.8 TB/s * 700 ns / 132 multiprocessors = 25 KB in flight on each. At C = 1600, 4 blocks
// of 200 threads with a pack fit. Loading dinp in the second pass has 4 * 200 * 32 = 25.6 KB in flight, then, after a
// second latency, 12.8 KB; loading it in the first has 38.4 KB in flight, once.

void study_backward(Study& study, const Size& s) {
    const size_t N = s.N, C = s.C;
    Case c(study, "layernorm backward", text_of(s), bytes(4.0 * N * C * sizeof(floatX)));
    const auto dout = c.input<floatX>(N * C), inp = c.input<floatX>(N * C, -1, 3), w = c.input<floatX>(C);
    const auto mean = c.input<float>(N, 0.5, 1.5), rstd = c.input<float>(N, 0.5, 1.5);   // arbitrary, not inp's
    const auto dinp = c.updated<floatX>("dinp", N * C);
    const auto dw = c.updated<float>("dw", C), db = c.updated<float>("db", C);
    const auto partials = c.scratch<float>(3 * partial_blocks(N) * C);
    layernorm_backward_loop(dinp.expected, dw.expected, db.expected, dout.host, inp.host, w.host, mean.host, rstd.host);
    c.step("one thread per row, one thread per column", [&] {
        launch_threads(columns_kernel, C, partials, dout, inp, mean, rstd, s);
        add_partials({grad(dw), grad(db)}, partials, 1, C);
        launch_threads(rows_kernel, N, dinp, dout, inp, w, mean, rstd, s);
    });
    c.step("one warp per row, one set of sums per warp", [&] {
        const size_t limit = 104 << 10;   // two blocks then fit on a Hopper multiprocessor
        const size_t size = std::min(device.properties.sharedMemPerBlockOptin, limit), per_warp = 2 * C * sizeof(float);
        const size_t warps = std::clamp(size / per_warp, size_t{1}, size_t{BLOCK_WARPS}), blocks = partial_blocks(N);
        launch("one kernel", warp_per_row_backward_kernel, blocks, warps * WARP_SIZE, warps * per_warp, dinp, partials,
               dout, inp, w, mean, rstd, s);
        add_partials({grad(dw), grad(db)}, partials, blocks, C);
    });
    c.step("train_gpt.cu: one block per row", [&] {
        layernorm_backward(view(dinp, N, C), grad(dw), grad(db), Grad{}, partials, view(dout, N, C), view(inp, N, C), w,
                           {mean, rstd});
    });
}

void run_study(Study& study) {
    study.at_sizes<Size>({{1, 16}, {37, 272}, {130, 784}}, {16384, 1600}, {64, 768}, study_forward, study_backward);
}

// FP8 quantisation, step by step: how to quantise a tensor, and how many elements should share a scale.
//
// E4M3 (4 bits of exponent, 3 of mantissa) has a range of 18 powers of 2: tensors are scaled to fit it. Two recipes:
//     per tensor   one scale from the amax of this step or of earlier ones (Transformer Engine, train_gpt.cu)
//     per tile     DeepSeek-V3 (arXiv 2412.19437, section 3.3): one scale for each 1 x 128 of activations
// Topics:
//   - bytes: quantisation reads 2 bytes per element and writes 1. A tensor's amax is known only after the whole tensor
//     has been read. So either the tensor is read twice (current scaling), or the scale comes from earlier steps
//     (delayed scaling). The lanes that load a tile compute its amax by shuffles, so the tile is read once;
//   - both directions: tensor cores require FP8 operands with K contiguous, so a tensor that two products sum over in
//     different directions is needed twice, once transposed. With one scale per tensor the transposed copy has the same
//     FP8 values. Tiles of 1 x 128 become 128 x 1, with other scales and other FP8 values: both copies must be computed
//     from BF16.
// The trainer uses one scale per tensor: its kernels quantise their outputs (delayed scaling) without reading them
// again, and transposing reads and writes one byte per element. (The kernel of GELU's backward writes both copies, so
// nothing is read again.) Both recipes have the rounding error of a 3-bit mantissa; with one scale per tile, fewer
// small values underflow. Scales are powers of 2: scaling causes no rounding error, and uses up at most one of the 18
// powers of 2.
//
// N and C are multiples of 16.

#include "study.h"

#if defined(PRECISION_BF16) && WARP_SIZE == 32

struct Size { size_t N, C; };   // rows, columns

constexpr size_t QUANTUM = 128;                  // elements along K that share a scale
constexpr int TILE_LANES = QUANTUM / PACK;       // lanes that hold a tile of 1 x 128, 16 bytes each

__device__ __forceinline__ float scale_for(float amax) { return fp8_scale_for(amax, FP8_MAX<e4m3>); }

template <int COUNT> __device__ __forceinline__ RawPack<e4m3, COUNT> in_fp8(const float (&x)[COUNT], float scale) {
    float v[COUNT];
    RawPack<e4m3, COUNT> pack = {};
    for (int k = 0; k < COUNT; k++) v[k] = x[k] * scale;
    if constexpr (WRITES_FP8) to_fp8(pack.v, v);
    return pack;
}

// Returns the scale of the tile of 1 x 128 whose packs x are held by TILE_LANES neighbouring lanes.
__device__ __forceinline__ float tile_scale(const float (&x)[PACK]) {
    float amax = 0;
    for (int k = 0; k < PACK; k++) amax = fmaxf(amax, fabsf(x[k]));
    for (int lane = TILE_LANES / 2; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(FULL_WARP, amax, lane));
    return scale_for(amax);
}

// ==== one scale per tensor ===================================================
// 1  One thread per element: one kernel computes the amax, a second one reads x again and quantises it.
// 2  train_gpt.cu, current scaling: the same traffic, with 128 bits per load and spans, as in gelu.cu.
// 3  train_gpt.cu, delayed scaling: the scale is known, so x is read once. In training the kernel that computes x
//    writes x and its FP8 copy, and x is not read at all.

__global__ void amax_kernel(Fp8Scale* scale, const floatX* x, size_t n) {
    const size_t i = my_index();
    const float amax = block_max(i < n ? fabsf(f32(x[i])) : 0.0f);
    if (threadIdx.x == 0) atomicMax(&scale->amax, __float_as_uint(amax));
}

__global__ void tensor_kernel(e4m3* out, const Fp8Scale* scale, const floatX* x, size_t n) {
    const size_t i = my_index();
    if (i >= n) return;
    const float v[1] = {f32(x[i])};
    out[i] = in_fp8(v, scale_for(__uint_as_float(scale->amax))).v[0];
}

// ==== one scale per tile =====================================================
// 1  One block of threads per tile: one element per thread; the amax is reduced through shared memory, with barriers.
// 2  16 lanes per tile: 16 bytes per lane, and the amax is reduced by four shuffles without a barrier.

__global__ void __launch_bounds__(QUANTUM) tile_block_kernel(e4m3* out, float* inverse, const floatX* x, Size s) {
    const size_t n = blockIdx.y, c = my_index();
    const bool valid = c < s.C;
    const float v[1] = {valid ? f32(x[n * s.C + c]) : 0.0f};
    const float scale = scale_for(block_max(fabsf(v[0])));
    if (valid) out[n * s.C + c] = in_fp8(v, scale).v[0];
    if (threadIdx.x == 0) inverse[n * gridDim.x + blockIdx.x] = 1 / scale;
}

__global__ void tile_lanes_kernel(e4m3* out, float* inverse, const floatX* x, Size s) {
    const size_t tiles = (s.C + QUANTUM - 1) / QUANTUM, tile = my_index() / TILE_LANES;
    const size_t n = tile / tiles, c = tile % tiles * QUANTUM + threadIdx.x % TILE_LANES * PACK;
    const bool valid = n < s.N && c < s.C;
    float v[PACK] = {};
    if (valid) load(v, x + n * s.C + c);
    const float scale = tile_scale(v);
    if (valid) *reinterpret_cast<RawPack<e4m3, PACK>*>(out + n * s.C + c) = in_fp8(v, scale);
    if (n < s.N && threadIdx.x % TILE_LANES == 0) inverse[tile] = 1 / scale;
}

// Both directions: out (N, C) with one scale for each 1 x 128 of x, transposed (C, N) with one scale for each 128 x 1.
// A block of threads holds 128 x 128 elements of x in shared memory, so x is read once. For `transposed`, each thread
// quantises one column.
__global__ void __launch_bounds__(QUANTUM)
tiles_both_directions_kernel(e4m3* out, float* inverse, e4m3* transposed, float* transposed_inverse, const floatX* x,
                       Size s) {
    __shared__ __align__(16) floatX tile[QUANTUM][QUANTUM];
    const size_t row0 = blockIdx.y * QUANTUM, column0 = blockIdx.x * QUANTUM;
    const size_t rows = min(size_t{QUANTUM}, s.N - row0), c = threadIdx.x % TILE_LANES * PACK;
    for (size_t r = threadIdx.x / TILE_LANES; r < QUANTUM; r += blockDim.x / TILE_LANES) {
        const size_t at = (row0 + r) * s.C + column0 + c;
        const bool valid = r < rows && column0 + c < s.C;
        float v[PACK] = {};
        if (valid) load(v, x + at);
        store(&tile[r][c], v);
        const float scale = tile_scale(v);
        if (valid) *reinterpret_cast<RawPack<e4m3, PACK>*>(out + at) = in_fp8(v, scale);
        if (valid && c == 0) inverse[(row0 + r) * gridDim.x + blockIdx.x] = 1 / scale;
    }
    __syncthreads();
    const size_t column = column0 + threadIdx.x;
    if (column >= s.C) return;
    float amax = 0;
    for (size_t r = 0; r < rows; r++) amax = fmaxf(amax, fabsf(f32(tile[r][threadIdx.x])));
    const float scale = scale_for(amax);
    transposed_inverse[column * gridDim.y + blockIdx.y] = 1 / scale;
    constexpr int BYTES = 16;   // per store
    for (size_t first = 0; first < rows; first += BYTES) {
        float v[BYTES];
        for (int k = 0; k < BYTES; k++) v[k] = f32(tile[first + k][threadIdx.x]);
        e4m3* to = transposed + column * s.N + row0 + first;
        *reinterpret_cast<RawPack<e4m3, BYTES>*>(to) = in_fp8(v, scale);
    }
}

// ==== reference loops ========================================================

double plain_scale(double amax) { return amax > 0 ? std::exp2(std::floor(std::log2(FP8_MAX<e4m3> / amax))) : 1; }

// Computes out and the inverse of each scale, for x (rows, columns) in tiles of 1 x `width`.
void quantise_loop(Values& out, Values& inverse, const Values& x, size_t columns, size_t width) {
    size_t tile = 0;
    for (size_t row = 0; row < x.size(); row += columns)
        for (size_t c = 0; c < columns; c += width) {
            const size_t begin = row + c, end = row + std::min(columns, c + width);
            const double scale = plain_scale(amax_of(Values(x.begin() + begin, x.begin() + end)));
            for (size_t i = begin; i < end; i++) out[i] = stored_as<e4m3>(x[i] * scale);
            inverse[tile++] = 1 / scale;
        }
}

// ==== the study ==============================================================

std::string text_of(const Size& s) { return format("N %zu, C %zu", s.N, s.C); }

// The scale of per-tensor quantisation, on the device.
Fp8Scale* the_scale() {
    static Fp8Scale* const scale = device_memory<Fp8Scale>(1);
    return scale;
}
void set_the_scale(double value) {
    Fp8Scale scale;
    scale.scale = value;
    scale.inverse = 1 / value;
    upload(the_scale(), &scale, sizeof(scale));
}
void reset_amax() { fp8_scales<Fp8Step::RESET_AMAX>(the_scale(), 1); }

// Returns the tensor x (n) whose E4M3 copy is `out`.
Tensor in_fp8(const floatX* x, e4m3* out, size_t n, bool current_scaling) {
    Tensor tensor = view(x, 1, n);
    tensor.fp8 = {out, nullptr, the_scale(), DType::E4M3, current_scaling};
    return tensor;
}

void per_tensor(Study& study, const Size& s) {
    const size_t n = s.N * s.C;
    Case c(study, "quantise, one scale per tensor", text_of(s), bytes(3.0 * n));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n);
    Values inverse(1);
    quantise_loop(out.expected, inverse, x.host, n, n);
    set_the_scale(1 / inverse[0]);
    c.step("read twice, one thread per element", [&] {
        reset_amax();
        launch_threads(amax_kernel, n, updated(the_scale()), x, n);
        launch_threads(tensor_kernel, n, out, the_scale(), x, n);
    });
    c.step("train_gpt.cu, current: read twice, in spans", [&] {
        reset_amax();
        fp8_amax(the_scale(), x, n);
        in_fp8(x, out, n, true).finish();
    });
    c.step("train_gpt.cu, delayed: the scale is known", [&] { in_fp8(x, out, n, false).quantise(); });
}

void per_tile(Study& study, const Size& s) {
    const size_t n = s.N * s.C, tiles = ceil_div(s.C, QUANTUM);
    Case c(study, "quantise, one scale per 1 x 128", text_of(s), bytes(3.0 * n + 4.0 * s.N * tiles));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n);
    const auto inverse = c.output<float>("inverse", s.N * tiles);
    quantise_loop(out.expected, inverse.expected, x.host, s.C, QUANTUM);
    c.step("one block of threads per tile", [&] {
        launch("step 1", tile_block_kernel, dim3(tiles, s.N), QUANTUM, 0, out, inverse, x, s);
    });
    c.step("16 lanes per tile", [&] {
        launch_threads(tile_lanes_kernel, s.N * tiles * TILE_LANES, out, inverse, x, s);
    });
}

void both_directions_per_tensor(Study& study, const Size& s) {
    const size_t n = s.N * s.C;
    Case c(study, "both directions, one scale per tensor", text_of(s), bytes(4.0 * n));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n), t_out = c.output<e4m3>("transposed", n);
    Values inverse(1);
    quantise_loop(out.expected, inverse, x.host, n, n);
    t_out.expected = transposed_values(out.expected, s.N, s.C);
    c.step("train_gpt.cu: read twice, then transposed", [&] {
        reset_amax();
        fp8_amax(the_scale(), x, n);
        in_fp8(x, out, n, true).finish();
        fp8_transpose(t_out, out, s.N, s.C);
    });
}

void both_directions_per_tile(Study& study, const Size& s) {
    const size_t n = s.N * s.C, tiles = ceil_div(s.C, QUANTUM), row_tiles = ceil_div(s.N, QUANTUM);
    Case c(study, "both directions, one scale per 1 x 128 and 128 x 1", text_of(s), bytes(4.0 * n));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n), t_out = c.output<e4m3>("transposed", n);
    const auto inverse = c.output<float>("inverse", s.N * tiles);
    const auto transposed_inverse = c.output<float>("transposed inverse", s.C * row_tiles);
    quantise_loop(out.expected, inverse.expected, x.host, s.C, QUANTUM);
    quantise_loop(t_out.expected, transposed_inverse.expected, transposed_values(x.host, s.N, s.C), s.N, QUANTUM);
    c.step("read once into shared memory", [&] {
        launch("step 1", tiles_both_directions_kernel, dim3(tiles, row_tiles), QUANTUM, 0, out, inverse, t_out,
               transposed_inverse, x, s);
    });
}

// With fp8-all, GELU's backward writes a matrix that two FP8 products read in different directions, and whose column
// sums are the gradient of a bias. One kernel for GELU', the column sums and both copies moves 6 bytes per element;
// three kernels move 11: the matrix in BF16 is written and read once more, its FP8 copy is read once more.
void gelu_backward_in_fp8(Study& study, const Size& s) {
    const size_t n = s.N * s.C;
    Case c(study, "GELU's backward in FP8, both directions, with column sums", text_of(s), bytes(6.0 * n));
    const auto inp = c.input<floatX>(n, -4, 4), dout = c.input<floatX>(n);
    const auto x = c.scratch<floatX>(n);
    const auto out = c.output<e5m2>("out", n), t_out = c.output<e5m2>("transposed", n);
    const auto db = c.updated<floatX>("db", s.C);
    const auto partials = c.scratch<float>(partial_blocks(s.N) * s.C);
    auto grad = [&] { return Grad{static_cast<floatX*>(db), FLOATX}; };
    const double scale = 1 << 13;   // |dinp| < 2, and E5M2 represents 57344
    for (size_t i = 0; i < n; i++) {
        const double d = stored_as<floatX>(dout.host[i] * gelu_derivative_loop(inp.host[i]));
        out.expected[i] = stored_as<e5m2>(d * scale);
        db.expected[i % s.C] += d;
    }
    t_out.expected = transposed_values(out.expected, s.N, s.C);
    set_the_scale(scale);
    auto tensor = [&](bool only_fp8) {
        Tensor t = view(x, s.N, s.C);
        t.fp8 = {static_cast<e5m2*>(out), static_cast<e5m2*>(t_out), the_scale(), DType::E5M2, false, only_fp8};
        return t;
    };
    c.step("three kernels", [&] {
        gelu_backward(tensor(false), dout, view(inp, s.N, s.C));
        bias_backward(grad(), partials, view(x, s.N, s.C));
        fp8_transpose(t_out, out, s.N, s.C);
    });
    c.step("train_gpt.cu: one kernel", [&] {
        fp8_gelu_backward(tensor(true), grad(), partials, dout, inp);
        if (fp8_in_any_layout()) fp8_transpose(t_out, out, s.N, s.C);
    });
}

void run_study(Study& study) {
    const cudaDeviceProp& p = device.properties;
    if (!device.is_cpu() && 10 * p.major + p.minor < 89) {
        printf("FP8 needs a GPU of compute capability 8.9 or later; found %d.%d (%s)\n", p.major, p.minor, p.name);
        return;
    }
    study.at_sizes<Size>({{16, 16}, {48, 272}, {144, 144}}, {32768, 3072}, {128, 384}, per_tensor, per_tile,
                         both_directions_per_tensor, both_directions_per_tile, gelu_backward_in_fp8);
}

#else

void run_study(Study&) { printf("FP8 needs a build with PRECISION=bf16 and warps of 32 threads\n"); }

#endif

// Formats of eight bits: how to quantise, and what share of a tensor a scale should be for.
//
// FP8 has a range of 2^18 (E4M3, 4 bits of exponent and 3 of mantissa), so a tensor is scaled to fit. Two recipes:
//     per tensor   one scale from the largest |x|, now or of steps before (Transformer Engine; train_gpt.cu's)
//     blocks       DeepSeek-V3 (arXiv 2412.19437, section 3.3): a scale for each 1 x 128 of activations and each
//                  128 x 128 of weights, E4M3 for gradients too, and sums that are promoted to FP32 every 128 of K
// To learn here:
//   - bytes: to quantise reads 2 bytes an element and writes 1. The largest |x| of a tensor is known only after all of
//     it has been read: so it is read twice, or the scale is a guess. A tile's largest is known to the warp that holds
//     it, so tiles need neither;
//   - both ways: tensor cores take FP8 along K only, so what two products read in two directions is needed twice, once
//     transposed. A scale for the tensor is the same both ways, and codes are just moved; tiles of 1 x 128 become
//     128 x 1, with other scales and so other codes: x has to be there in BF16 for both.
// Scales are powers of 2, as in the trainer: they round nothing, and cost at most one of the range's 18 bits.
//
// Errors, on a small model's own activations and gradients (the last table): E4M3 is off by 2.7 % rms whichever share
// of a tensor has a scale, and a product by 0.5 to 1.2 %: that is the mantissa's doing, and a scale that fits changes
// none of its bits. E5M2 is off by twice as much. What tiles do is flush less to 0, 3 % of dqkv where a scale for the
// tensor flushes 8 %; those are too small to show in the product. A scale from 16 steps ago is as good until the tensor
// has grown since, and then cuts off its largest: a run that rounded otherwise had dqkv off by 39 %.
//
// So by these numbers block scaling earns no place in the trainer: the same error, for activations that are read in
// BF16 twice and for products whose scales differ along K. (cuBLASLt has those for Hopper from CUDA 12.9 on.) What they
// cannot say: in models of billions of parameters a few activations are far larger than the rest. E4M3 has all its
// digits from the amax down to 1/28672 of it, so what else matters has to be smaller than that before a tensor's scale
// costs accuracy. The recipe's other half, sums that are promoted to FP32 every 128 of K, is what cuBLASLt does unless
// CUBLASLT_MATMUL_DESC_FAST_ACCUM is set.
//
// N and C are multiples of 16.

#include "study.h"

constexpr int QUANTUM = 128;   // elements along K that share a scale

#if defined(PRECISION_BF16) && WARP_SIZE == 32

// ==== to quantise ============================================================

struct Size { size_t N, C; };   // rows, columns

constexpr int QUANTISE_BLOCK = 256;
constexpr int TILE_LANES = QUANTUM / PACK;   // that hold a tile of 1 x 128, 16 bytes each

// The scale for a largest |x|, and what undoes it.
__device__ __forceinline__ float scale_for(float largest) { return fp8_scale_for(largest, FP8_MAX<e4m3>); }

template <int COUNT> __device__ __forceinline__ RawPack<e4m3, COUNT> in_fp8(const float (&x)[COUNT], float scale) {
    float v[COUNT];
    RawPack<e4m3, COUNT> pack = {};
    for (int k = 0; k < COUNT; k++) v[k] = x[k] * scale;
    if constexpr (WRITES_FP8) from_floats(pack.v, v);
    return pack;
}

__device__ __forceinline__ float largest_of_pack(const float (&x)[PACK], float largest = 0) {
    for (int k = 0; k < PACK; k++) largest = fmaxf(largest, fabsf(x[k]));
    return largest;
}

template <int LANES> __device__ __forceinline__ float lanes_max(float x) {
    for (int lane = LANES / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// ---- the tensor: 1, an element per thread ----

__global__ void tensor_max_kernel(Fp8Scale* scale, const floatX* x, size_t n) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const float largest = block_max(i < n ? fabsf(static_cast<float>(x[i])) : 0.0f);
    if (threadIdx.x == 0) atomicMax(&scale->amax, __float_as_uint(largest));
}

__global__ void tensor_kernel(e4m3* out, const Fp8Scale* scale, const floatX* x, size_t n) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v[1] = {static_cast<float>(x[i])};
    out[i] = in_fp8(v, scale_for(__uint_as_float(scale->amax))).v[0];
}

// ---- tiles of 1 x 128: 1, a block for each ----

__global__ void __launch_bounds__(QUANTUM) tile_block_kernel(e4m3* out, float* inverse, const floatX* x, Size s) {
    const size_t n = blockIdx.y, c = static_cast<size_t>(blockIdx.x) * QUANTUM + threadIdx.x;
    const bool valid = c < s.C;
    const float v[1] = {valid ? static_cast<float>(x[n * s.C + c]) : 0.0f};
    const float scale = scale_for(block_max(fabsf(v[0])));
    if (valid) out[n * s.C + c] = in_fp8(v, scale).v[0];
    if (threadIdx.x == 0) inverse[n * gridDim.x + blockIdx.x] = 1 / scale;
}

// ---- 2, 16 lanes for each: no shared memory, 16 bytes a lane ----

__global__ void __launch_bounds__(QUANTISE_BLOCK)
tile_lanes_kernel(e4m3* out, float* inverse, const floatX* x, Size s) {
    const size_t tiles = (s.C + QUANTUM - 1) / QUANTUM;
    const size_t tile = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / TILE_LANES;
    const size_t n = tile / tiles, c = tile % tiles * QUANTUM + threadIdx.x % TILE_LANES * PACK;
    const bool valid = n < s.N && c < s.C;
    float v[PACK] = {};
    if (valid) load(v, x + n * s.C + c);
    const float scale = scale_for(lanes_max<TILE_LANES>(largest_of_pack(v)));
    if (valid) *reinterpret_cast<RawPack<e4m3, PACK>*>(out + n * s.C + c) = in_fp8(v, scale);
    if (n < s.N && threadIdx.x % TILE_LANES == 0) inverse[tile] = 1 / scale;
}

// ---- blocks of 128 x 128, both ways ----
// A block of threads holds a block of x in its registers, 8 packs a thread, so it is read once; the other direction
// goes through shared memory, in FP8. A thread has columns 8 l to 8 l + 7, l = thread % 16, of rows thread / 16 + 16 i.

constexpr int BLOCK_ROWS = QUANTISE_BLOCK / TILE_LANES, BLOCK_PACKS = QUANTUM / BLOCK_ROWS;
constexpr int QUANTUM_PITCH = QUANTUM + 4;   // bytes of a row: columns lie in different banks

struct BlockPart {
    size_t row0, column0;
    int rows, columns;   // of the block, that are in the matrix
    __device__ explicit BlockPart(const Size& s)
        : row0(static_cast<size_t>(blockIdx.y) * QUANTUM), column0(static_cast<size_t>(blockIdx.x) * QUANTUM),
          rows(min(size_t{QUANTUM}, s.N - row0)), columns(min(size_t{QUANTUM}, s.C - column0)) {}
};

__device__ __forceinline__ int my_row(int i) { return threadIdx.x / TILE_LANES + i * BLOCK_ROWS; }
__device__ __forceinline__ int my_column() { return threadIdx.x % TILE_LANES * PACK; }

__device__ __forceinline__ void load_block(RawPack<floatX, PACK> (&v)[BLOCK_PACKS], const floatX* x,
                                           const BlockPart& part, const Size& s) {
#pragma unroll
    for (int i = 0; i < BLOCK_PACKS; i++) {
        v[i] = {};
        if (my_row(i) >= part.rows || my_column() >= part.columns) continue;
        const floatX* from = x + (part.row0 + my_row(i)) * s.C + part.column0 + my_column();
        v[i] = *reinterpret_cast<const RawPack<floatX, PACK>*>(from);
    }
}

typedef uint8_t QuantumTile[QUANTUM][QUANTUM_PITCH];

__device__ __forceinline__ void keep(QuantumTile& tile, int i, const RawPack<e4m3, PACK>& q) {
    for (int k = 0; k < PACK; k += WORD)
        *reinterpret_cast<uint32_t*>(&tile[my_row(i)][my_column() + k]) = *reinterpret_cast<const uint32_t*>(&q.v[k]);
}

// turned (C, N) = the tile, columns as rows
__device__ __forceinline__ void store_columns_of(e4m3* turned, const QuantumTile& tile, const BlockPart& part,
                                                 const Size& s) {
    for (int e = threadIdx.x; e < QUANTUM * (QUANTUM / TRANSPOSE_PACK); e += QUANTISE_BLOCK) {
        const int column = e % QUANTUM, first = e / QUANTUM * TRANSPOSE_PACK;
        if (column >= part.columns || first >= part.rows) continue;
        RawPack<uint8_t, TRANSPOSE_PACK> pack;
        for (int k = 0; k < TRANSPOSE_PACK; k++) pack.v[k] = tile[first + k][column];
        e4m3* to = turned + (part.column0 + column) * s.N + part.row0 + first;
        *reinterpret_cast<RawPack<uint8_t, TRANSPOSE_PACK>*>(to) = pack;
    }
}

__global__ void __launch_bounds__(QUANTISE_BLOCK)
block_kernel(e4m3* out, e4m3* turned, float* inverse, const floatX* x, Size s) {
    __shared__ __align__(16) QuantumTile tile;
    const BlockPart part(s);
    RawPack<floatX, PACK> v[BLOCK_PACKS];
    load_block(v, x, part, s);
    float largest = 0, y[PACK];
#pragma unroll
    for (int i = 0; i < BLOCK_PACKS; i++) {
        to_floats(y, v[i].v);
        largest = largest_of_pack(y, largest);
    }
    const float scale = scale_for(block_max(largest));
    if (threadIdx.x == 0) inverse[blockIdx.y * gridDim.x + blockIdx.x] = 1 / scale;
#pragma unroll
    for (int i = 0; i < BLOCK_PACKS; i++) {
        to_floats(y, v[i].v);
        const RawPack<e4m3, PACK> q = in_fp8(y, scale);
        keep(tile, i, q);
        if (my_row(i) >= part.rows || my_column() >= part.columns) continue;
        *reinterpret_cast<RawPack<e4m3, PACK>*>(out + (part.row0 + my_row(i)) * s.C + part.column0 + my_column()) = q;
    }
    __syncthreads();
    store_columns_of(turned, tile, part, s);
}

// ---- activations both ways: tiles of 1 x 128, and of 128 x 1 transposed ----
// inverse (N, C/128), transposed_inverse (C, N/128). A row's largest is known to its 16 lanes; a column's is gathered from
// the 16 threads that have it, first in pairs within a warp.

__global__ void __launch_bounds__(QUANTISE_BLOCK)
tiles_both_ways_kernel(e4m3* out, float* inverse, e4m3* turned, float* transposed_inverse, const floatX* x, Size s) {
    __shared__ __align__(16) QuantumTile tile;
    __shared__ float largest[QUANTISE_BLOCK / 32][PACK][TILE_LANES];   // lanes side by side: in different banks
    const int tile_lane = threadIdx.x % TILE_LANES;
    const BlockPart part(s);
    RawPack<floatX, PACK> v[BLOCK_PACKS];
    load_block(v, x, part, s);
    float columns[PACK] = {}, y[PACK];
#pragma unroll
    for (int i = 0; i < BLOCK_PACKS; i++) {
        to_floats(y, v[i].v);
        for (int k = 0; k < PACK; k++) columns[k] = fmaxf(columns[k], fabsf(y[k]));
        const float scale = scale_for(lanes_max<TILE_LANES>(largest_of_pack(y)));
        const size_t row = part.row0 + my_row(i);
        if (my_row(i) >= part.rows || my_column() >= part.columns) continue;
        if (my_column() == 0) inverse[row * gridDim.x + blockIdx.x] = 1 / scale;
        *reinterpret_cast<RawPack<e4m3, PACK>*>(out + row * s.C + part.column0 + my_column()) = in_fp8(y, scale);
    }
    for (int k = 0; k < PACK; k++) {
        columns[k] = fmaxf(columns[k], __shfl_xor_sync(FULL_WARP, columns[k], TILE_LANES));
        if (threadIdx.x % 32 < TILE_LANES) largest[threadIdx.x / 32][k][tile_lane] = columns[k];
    }
    __syncthreads();
    for (int k = 0; k < PACK; k++) {
        columns[k] = 0;
        for (int w = 0; w < QUANTISE_BLOCK / 32; w++) columns[k] = fmaxf(columns[k], largest[w][k][tile_lane]);
        columns[k] = scale_for(columns[k]);
        if (threadIdx.x < TILE_LANES && my_column() < part.columns)
            transposed_inverse[(part.column0 + my_column() + k) * gridDim.y + blockIdx.y] = 1 / columns[k];
    }
#pragma unroll
    for (int i = 0; i < BLOCK_PACKS; i++) {
        to_floats(y, v[i].v);
        for (int k = 0; k < PACK; k++) y[k] *= columns[k];
        keep(tile, i, in_fp8(y, 1));
    }
    __syncthreads();
    store_columns_of(turned, tile, part, s);
}

// ---- the plain loops

double plain_scale(double largest) {
    return largest > 0 ? std::exp2(std::floor(std::log2(FP8_MAX<e4m3> / largest))) : 1;
}

// out (rows, columns) and the inverse of each part's scale, of parts height x width.
void quantise_loop(Values& out, Values* inverse, const Values& x, size_t columns, size_t height, size_t width) {
    const size_t rows = x.size() / columns;
    size_t number = 0;
    for (size_t r = 0; r < rows; r += height)
        for (size_t c = 0; c < columns; c += width) {
            const size_t last_row = std::min(rows, r + height), last_column = std::min(columns, c + width);
            auto each = [&](auto f) {
                for (size_t n = r; n < last_row; n++)
                    for (size_t i = n * columns + c; i < n * columns + last_column; i++) f(i);
            };
            double largest = 0;
            each([&](size_t i) { largest = std::max(largest, std::abs(x[i])); });
            const double scale = plain_scale(largest);
            each([&](size_t i) { out[i] = stored_as<e4m3>(x[i] * scale); });
            if (inverse) (*inverse)[number++] = 1 / scale;
        }
}

Values transposed(const Values& x, size_t columns) {
    const size_t rows = x.size() / columns;
    Values y(x.size());
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) y[c * rows + r] = x[r * columns + c];
    return y;
}

// ---- the tables

std::string name_of_size(const Size& s) { return format("N %zu, C %zu", s.N, s.C); }
dim3 quantum_grid(const Size& s) { return dim3(ceil_div(s.C, QUANTUM), ceil_div(s.N, QUANTUM)); }

// A scale on the device.
Fp8Scale* the_scale() {
    static Fp8Scale* scale = [] {
        Fp8Scale* p = nullptr;
        check(cudaMalloc(&p, sizeof(Fp8Scale)), "cudaMalloc of a scale");
        return p;
    }();
    return scale;
}
void set_the_scale(double scale) {
    Fp8Scale s;
    s.scale = scale;
    s.inverse = 1 / scale;
    upload(the_scale(), &s, sizeof(s));
}

// x, which the trainer is to write to out in E4M3.
Operand in_fp8(const floatX* x, e4m3* out, Fp8Scaling scaling) {
    Operand operand = x;
    operand.fp8 = out;
    operand.scale = the_scale();
    operand.format = DType::E4M3;
    operand.current_scaling = scaling == Fp8Scaling::CURRENT;
    return operand;
}

void per_tensor(Study& study, const Size& s) {
    const size_t n = s.N * s.C;
    Case c(study, "quantise, a scale for the tensor", name_of_size(s), bytes(3.0 * n));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n);
    quantise_loop(out.expected, nullptr, x.host, s.C, s.N, s.C);
    double largest = 0;
    for (double v : x.host) largest = std::max(largest, std::abs(v));
    set_the_scale(plain_scale(largest));
    c.step("read twice, an element per thread", [&] {
        fp8_scales<Fp8Step::FORGET>(the_scale(), 1);
        launch("step 1", tensor_max_kernel, ceil_div(n, BLOCK), BLOCK, 0, updated(the_scale()), x, n);
        launch("step 1", tensor_kernel, ceil_div(n, BLOCK), BLOCK, 0, out, the_scale(), x, n);
    });
    c.step("train_gpt.cu, current: read twice, in spans", [&] {
        fp8_scales<Fp8Step::FORGET>(the_scale(), 1);
        fp8_amax(the_scale(), x, n);
        in_fp8(x, out, Fp8Scaling::CURRENT).finish(n);
    });
    c.step("train_gpt.cu, delayed: the scale is known", [&] {
        in_fp8(x, out, Fp8Scaling::DELAYED).quantise(n);
    });
}

void per_tile(Study& study, const Size& s) {
    const size_t n = s.N * s.C, tiles = ceil_div(s.C, static_cast<size_t>(QUANTUM));
    Case c(study, "quantise, a scale for 1 x 128", name_of_size(s), bytes(3.0 * n + 4.0 * s.N * tiles));
    const auto x = c.input<floatX>(n, -4, 4);
    const auto out = c.output<e4m3>("out", n);
    const auto inverse = c.output<float>("inverse", s.N * tiles);
    quantise_loop(out.expected, &inverse.expected, x.host, s.C, 1, QUANTUM);
    c.step("a block of threads per tile", [&] {
        launch("step 1", tile_block_kernel, dim3(tiles, s.N), QUANTUM, 0, out, inverse, x, s);
    });
    c.step("16 lanes per tile", [&] {
        launch("step 2", tile_lanes_kernel, ceil_div(s.N * tiles * TILE_LANES, static_cast<size_t>(QUANTISE_BLOCK)),
               QUANTISE_BLOCK, 0, out, inverse, x, s);
    });
}

void both_ways(Study& study, const Size& s) {
    const size_t n = s.N * s.C, tiles = ceil_div(s.C, static_cast<size_t>(QUANTUM));
    const size_t row_tiles = ceil_div(s.N, static_cast<size_t>(QUANTUM));
    auto weights = [&](const char* title, auto body) {
        Case c(study, title, name_of_size(s), bytes(4.0 * n));
        const auto x = c.input<floatX>(n, -4, 4);
        const auto out = c.output<e4m3>("out", n), turned = c.output<e4m3>("transposed", n);
        body(c, x, out, turned);
    };
    weights("both ways, a scale for the tensor", [&](Case& c, auto& x, auto& out, auto& turned) {
        quantise_loop(out.expected, nullptr, x.host, s.C, s.N, s.C);
        turned.expected = transposed(out.expected, s.C);
        c.step("read twice, then transposed", [&] {
            fp8_scales<Fp8Step::FORGET>(the_scale(), 1);
            fp8_amax(the_scale(), x, n);
            in_fp8(x, out, Fp8Scaling::CURRENT).finish(n);
            fp8_transpose(turned, out, s.N, s.C);
        });
        c.step("train_gpt.cu: read twice, written both ways", [&] {
            fp8_scales<Fp8Step::FORGET>(the_scale(), 1);
            fp8_amax(the_scale(), x, n);
            fp8_weights<Fp8Scaling::CURRENT>(out, turned, the_scale(), x, s.N, s.C, 1, {1, n, n});
        });
    });
    weights("both ways, a scale for 128 x 128", [&](Case& c, auto& x, auto& out, auto& turned) {
        const auto inverse = c.output<float>("inverse", row_tiles * tiles);
        quantise_loop(out.expected, &inverse.expected, x.host, s.C, QUANTUM, QUANTUM);
        turned.expected = transposed(out.expected, s.C);
        c.step("read once, kept in registers", [&] {
            launch("step 1", block_kernel, quantum_grid(s), QUANTISE_BLOCK, 0, out, turned, inverse, x, s);
        });
    });
    weights("both ways, a scale for 1 x 128 and 128 x 1", [&](Case& c, auto& x, auto& out, auto& turned) {
        const auto inverse = c.output<float>("inverse", s.N * tiles);
        const auto transposed_inverse = c.output<float>("transposed_inverse", s.C * row_tiles);
        quantise_loop(out.expected, &inverse.expected, x.host, s.C, 1, QUANTUM);
        quantise_loop(turned.expected, &transposed_inverse.expected, transposed(x.host, s.C), s.N, 1, QUANTUM);
        c.step("read once, kept in registers", [&] {
            launch("step 1", tiles_both_ways_kernel, quantum_grid(s), QUANTISE_BLOCK, 0, out, inverse, turned,
                   transposed_inverse, x, s);
        });
    });
}

bool has_fp8() {
    const cudaDeviceProp& p = device.properties;
    return device.is_cpu() || 10 * p.major + p.minor >= 89;
}

void kernels(Study& study) {
    if (!has_fp8()) {
        printf("FP8 takes a card of compute capability 8.9: %s is none\n", device.properties.name);
        return;
    }
    study.at_sizes<Size>({{16, 16}, {48, 272}, {144, 144}}, {32768, 3072}, {128, 384}, [&](const Size& s) {
        per_tensor(study, s);
        per_tile(study, s);
        both_ways(study, s);
    });
}

#else

void kernels(Study&) {}

#endif

#ifdef PRECISION_BF16

// ==== what it costs in accuracy ==============================================
// A small model, trained for a while; then each tensor that FP8 would hold, and the product it goes into, held against
// BF16's. Products are the trainer's own, of operands rounded to FP8 and back: all of FP8, times a power of 2, is in
// BF16 as well, and the sums are in FP32.

constexpr size_t MODEL_STEPS = 200;

// What shares a scale; BEFORE: the largest |x| of the FP8_HISTORY steps before this one, THEN: of the first of those.
enum class Units { TENSOR, TENSOR_BEFORE, TENSOR_THEN, TILES, BLOCKS };

struct Quantised { Values x; double flushed, saturated; };   // x: as FP8 has it; shares of all

template <typename F8> void quantise_part(Quantised& q, const Values& x, size_t columns, double largest, size_t row0,
                                          size_t rows, size_t column0, size_t width) {
    const double scale = largest > 0 ? std::exp2(std::floor(std::log2(FP8_MAX<F8> / largest))) : 1;
    for (size_t r = row0; r < row0 + rows; r++)
        for (size_t i = r * columns + column0; i < r * columns + column0 + width; i++) {
            const float scaled = static_cast<float>(x[i] * scale);
            q.x[i] = stored_as<F8>(scaled) / scale;
            q.flushed += x[i] != 0 && q.x[i] == 0;
            q.saturated += std::abs(scaled) > FP8_MAX<F8>;
        }
}

double largest_of(const Values& x, size_t columns, size_t row0, size_t rows, size_t column0, size_t width) {
    double largest = 0;
    for (size_t r = row0; r < row0 + rows; r++)
        for (size_t i = r * columns + column0; i < r * columns + column0 + width; i++)
            largest = std::max(largest, std::abs(x[i]));
    return largest;
}

// history: the largest |x| of the tensor, of steps before.
template <typename F8> Quantised quantised(const Values& x, size_t columns, Units units, const Values& history) {
    const size_t rows = x.size() / columns;
    const bool whole = units != Units::TILES && units != Units::BLOCKS;
    const size_t height = whole ? rows : units == Units::TILES ? 1 : static_cast<size_t>(QUANTUM);
    const size_t width = whole ? columns : static_cast<size_t>(QUANTUM);
    Quantised q = {Values(x.size()), 0, 0};
    for (size_t r = 0; r < rows; r += height)
        for (size_t c = 0; c < columns; c += width) {
            const size_t h = std::min(height, rows - r), w = std::min(width, columns - c);
            const double largest = units == Units::TENSOR_THEN     ? history[0]
                                   : units == Units::TENSOR_BEFORE ? *std::max_element(history.begin(), history.end())
                                                                   : largest_of(x, columns, r, h, c, w);
            quantise_part<F8>(q, x, columns, largest, r, h, c, w);
        }
    q.flushed /= x.size();
    q.saturated /= x.size();
    return q;
}

double relative_error(const Values& got, const Values& wanted) {
    double off = 0, all = 0;
    for (size_t i = 0; i < got.size(); i++) {
        off += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        all += wanted[i] * wanted[i];
    }
    return std::sqrt(off / all);
}

// Device memory for as long as it is in scope.
template <typename T> struct Buffer {
    T* data;
    size_t n;
    explicit Buffer(size_t count) : n(count) { check(cudaMalloc(&data, n * sizeof(T)), "cudaMalloc"); }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
};

template <typename T> Values values_of(const T* x, size_t n) {
    std::vector<T> typed(n);
    download(typed.data(), x, n * sizeof(T));
    return Values(typed.begin(), typed.end());
}
void fill(const Buffer<floatX>& to, const Values& x) {
    std::vector<floatX> typed(x.size());
    for (size_t i = 0; i < x.size(); i++) typed[i] = static_cast<floatX>(static_cast<float>(x[i]));
    upload(to.data, typed.data(), x.size() * sizeof(floatX));
}

// x (rows, K) w, w (K, columns) or, for a gradient, (columns, K)
struct Subject {
    const char* name;
    const floatX *x, *w;
    size_t K, columns;
    Op op_w;
};

struct Trained {
    Model m;
    std::vector<Subject> subjects;
    std::vector<Values> history;   // of each subject, the largest |x| of the FP8_HISTORY steps before the last
    double loss = 0;
};

// Gradients are those of layer 0, the last that backward has in its hands; activations are layer 0's too.
void train_small_model(Trained& t) {
    const Config c = {2, 4, QUANTUM, 64, 256};
    Setup s = {c, 4, 64, Recompute::NONE, DType::FP32, Purpose::TRAINING};
    s.attention = Attention::NAIVE;
    Model& m = t.m;
    allocate(m, s);
    init_parameters(m, 1);
    const size_t C = c.channels, N = s.N();
    const auto& a = m.a;
    t.subjects = {{"ln1", a.ln1(0), m.w.qkvw(0), C, 3 * C, Op::AS_IS},
                  {"att", a.att(0), m.w.attprojw(0), C, C, Op::AS_IS},
                  {"ln2", a.ln2(0), m.w.fcw(0), C, 4 * C, Op::AS_IS},
                  {"gelu", a.gelu(0), m.w.fcprojw(0), 4 * C, C, Op::AS_IS},
                  {"dqkv", a.dqkv(), m.w.qkvw(0), 3 * C, C, Op::TRANSPOSED},
                  {"dfc", a.dfc(), m.w.fcw(0), 4 * C, C, Op::TRANSPOSED}};
    t.history.resize(t.subjects.size());
    const Tokens tokens("README.md");
    Loader loader(m, tokens, Shuffle::YES, 7, 0);
    Options o;
    o.lr = 3e-3;
    o.warmup = 20;
    for (size_t step = 0; step < MODEL_STEPS; step++) {
        micro_step(m, loader.current(), N);
        loader.advance();
        t.loss = take_loss(m) / N;
        if (step + 1 == MODEL_STEPS) break;
        for (size_t i = 0; i < t.subjects.size() && step + 1 + FP8_HISTORY >= MODEL_STEPS; i++) {
            const size_t K = t.subjects[i].K;
            t.history[i].push_back(largest_of(values_of(t.subjects[i].x, N * K), K, 0, N, 0, K));
        }
        update(m, adamw_settings(o, step));
    }
}

struct Way { const char* name; DType format; Units x, w; };
const std::vector<Way> WAYS = {
    {"E4M3, the tensor's largest", DType::E4M3, Units::TENSOR, Units::TENSOR},
    {"E5M2, the tensor's largest", DType::E5M2, Units::TENSOR, Units::TENSOR},
    {"E4M3, the largest of 16 steps before", DType::E4M3, Units::TENSOR_BEFORE, Units::TENSOR},
    {"E4M3, that of 16 steps ago", DType::E4M3, Units::TENSOR_THEN, Units::TENSOR},
    {"E4M3, tiles 1 x 128, weights 128 x 128", DType::E4M3, Units::TILES, Units::BLOCKS}};

Values product_of(const Values& x, const Values& w, const Subject& s, size_t N) {
    const Buffer<floatX> a(x.size()), b(w.size());
    const Buffer<float> out(N * s.columns);
    fill(a, x);
    fill(b, w);
    matmul({out.data, a.data, b.data,
            {N, s.columns, s.K, Op::AS_IS, s.op_w, DType::FP32, Into::ASSIGN, Epilogue::NONE}});
    return values_of(out.data, out.n);
}

std::string errors() {
    count_traffic(false);
    Trained t;
    train_small_model(t);
    const size_t N = t.m.setup.N();
    std::string text = format("\nErrors of FP8, relative rms: layer 0 of a model of %d layers, %d channels, after %zu "
                              "steps, loss %.2f\n\n", t.m.config.layers, t.m.config.channels, MODEL_STEPS, t.loss);
    text += format("| %-6s | %-38s | %9s | %9s | %9s | %9s |\n", "tensor", "in FP8, by", "of x", "of x w", "flushed",
                   "saturated");
    text += "|" + std::string(8, '-') + "|" + std::string(40, '-');
    for (int i = 0; i < 4; i++) text += "|" + std::string(10, '-') + ":";
    text += "|\n";
    for (size_t i = 0; i < t.subjects.size(); i++) {
        const Subject& s = t.subjects[i];
        const Values x = values_of(s.x, N * s.K), w = values_of(s.w, s.K * s.columns), exact = product_of(x, w, s, N);
        for (const Way& way : WAYS) {
            const auto quantise = way.format == DType::E5M2 ? quantised<e5m2> : quantised<e4m3>;
            const Quantised q = quantise(x, s.K, way.x, t.history[i]);
            const Values qw = quantised<e4m3>(w, s.op_w == Op::AS_IS ? s.columns : s.K, way.w, {}).x;
            text += format("| %-6s | %-38s | %7.2f %% | %7.2f %% | %7.3f %% | %7.3f %% |\n", s.name, way.name,
                           100 * relative_error(q.x, x), 100 * relative_error(product_of(q.x, qw, s, N), exact),
                           100 * q.flushed, 100 * q.saturated);
        }
    }
    return text;
}

#endif

int main(int argc, char** argv) {
    return study_main(argc, argv, [](Study& study) {
        if (!MAY_USE_FP8) printf("FP8 is for a build in bf16\n");
        kernels(study);
#if defined(PRECISION_BF16) && !defined(CUDA_CPU_INSPECT)   // which would make hours of it
        fputs(errors().c_str(), stdout);
#endif
    });
}

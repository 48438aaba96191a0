// Kernels of --matmul fp8: scales, separate quantising, transposed copies, GELU's backward. See fp8.cuh.
#pragma once

// Whether cuBLASLt multiplies FP8 matrices of any layout: on compute capability 10. On Ada, Hopper and 12.x both
// operands must be contiguous along K, as a (M,K) and b (N,K).
bool fp8_in_any_layout() { return device.properties.major == 10; }

// Makes p, the product of a and b, read their FP8 copies, transposed where the layout requires it.
void read_fp8(Product& p, const Tensor& a, const Tensor& b) {
    MatmulShape& s = p.shape;
    const bool any = fp8_in_any_layout();
    s.fast_accumulation = s.a == Op::AS_IS && a.fp8.fast_accumulation;
    p.a = s.a == Op::TRANSPOSED && !any ? a.fp8.transposed : a.fp8.x;
    p.b = s.b == Op::AS_IS && !any ? b.fp8.transposed : b.fp8.x;
    if (!any) s.a = Op::AS_IS, s.b = Op::TRANSPOSED;
    s.a_type = a.fp8.format;
    s.b_type = b.fp8.format;
    p.a_factor = &a.fp8.scale->inverse;
    p.b_factor = &b.fp8.scale->inverse;
}

// ---- scales

// Returns the largest power of 2 that maps amax to at most fp8_max; 1 if amax is 0 or not finite.
__device__ __forceinline__ float fp8_scale_for(float amax, float fp8_max) {
    constexpr float HIGHEST = 0x1p60f;   // above all scales that occur; the product of two scales stays finite
    if (!(amax > 0 && amax <= FLT_MAX)) return 1;
    return __uint_as_float(__float_as_uint(fminf(fp8_max / amax, HIGHEST)) & 0xff800000u);   // a power of 2
}

__device__ __forceinline__ void set_scale(Fp8Scale& s, float scale) {
    s.scale = scale;
    s.inverse = 1 / scale;
}

// Operations on all scales:
//   RESET_AMAX                      clears this step's amax
//   PUSH_HISTORY                    moves this step's amax into the history, then sets the scale from the history. A
//                                   step whose amax is not finite changes neither
//   RESCALE                         sets the scale from the history, which has been read from a checkpoint
//   START_COUNTING, STOP_COUNTING   starts, stops the counts of values, saturation and underflow, for the log
//   READ_AMAX, WRITE_AMAX           copies this step's amaxes to or from an array, for the all-reduce
enum class Fp8Step { RESET_AMAX, PUSH_HISTORY, RESCALE, START_COUNTING, STOP_COUNTING, READ_AMAX, WRITE_AMAX };

// One thread per scale. amaxes: (count) fp32, used by READ_AMAX and WRITE_AMAX only.
template <Fp8Step STEP> __global__ void fp8_scales_kernel(Fp8Scale* scales, float* amaxes, size_t count) {
    const size_t n = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= count) return;
    Fp8Scale& s = scales[n];
    if (STEP == Fp8Step::READ_AMAX) amaxes[n] = __uint_as_float(s.amax);
    if (STEP == Fp8Step::WRITE_AMAX) s.amax = __float_as_uint(amaxes[n]);
    if (STEP == Fp8Step::START_COUNTING || STEP == Fp8Step::STOP_COUNTING) s.counting = STEP == Fp8Step::START_COUNTING;
    if (STEP == Fp8Step::START_COUNTING) s.values = s.saturated = s.underflow = 0;
    const bool finite = __uint_as_float(s.amax) <= FLT_MAX;
    if (STEP == Fp8Step::PUSH_HISTORY && finite) {
        for (int i = FP8_HISTORY - 1; i > 0; i--) s.history[i] = s.history[i - 1];
        s.history[0] = __uint_as_float(s.amax);
    }
    if (STEP == Fp8Step::RESET_AMAX || STEP == Fp8Step::PUSH_HISTORY) s.amax = 0;
    if (STEP == Fp8Step::PUSH_HISTORY || STEP == Fp8Step::RESCALE) {
        float amax = 0;
        for (int i = 0; i < FP8_HISTORY; i++) amax = fmaxf(amax, s.history[i]);
        set_scale(s, fp8_scale_for(amax, n % FP8_TENSORS < FP8_E4M3S ? FP8_MAX<e4m3> : FP8_MAX<e5m2>));
    }
}

template <Fp8Step STEP> void fp8_scales(Fp8Scale* scales, size_t count, float* amaxes = nullptr) {
    launch("fp8_scales", fp8_scales_kernel<STEP>, row_blocks(count), BLOCK, 0, updated(scales), updated(amaxes), count);
}

// ---- separate quantising kernels, run after the kernel that wrote x

// scale->amax = max(scale->amax, amax of x (n))
__global__ void fp8_amax_kernel(Fp8Scale* scale, const floatX* x, size_t n) {
    const Span span = my_span(n);
    float amax = 0, v[PACK];
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        load(v, x + i);
        for (int k = 0; k < PACK; k++) amax = fmaxf(amax, fabsf(v[k]));
    }
    amax = block_max(amax);
    if (threadIdx.x == 0) atomicMax(&scale->amax, __float_as_uint(amax));
}

// Quantises x (n). CURRENT: computes the scale from the recorded amax, and one thread stores that scale for matmuls.
// DELAYED: uses the stored scale and records the amax of x.
template <Fp8Scaling SCALING, typename F8> __global__ void fp8_quantise_kernel(Out<F8> out, const floatX* x, size_t n) {
    Writer<F8> writer(out);
    if (SCALING == Fp8Scaling::CURRENT) {
        writer.scale = fp8_scale_for(__uint_as_float(out.scale->amax), FP8_MAX<F8>);
        if (blockIdx.x == 0 && threadIdx.x == 0) set_scale(*out.scale, writer.scale);
    }
    const Span span = my_span(n);
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        const RawPack<floatX, PACK> pack = *reinterpret_cast<const RawPack<floatX, PACK>*>(x + i);   // one load
        writer.put_fp8(i, pack);
    }
    if (SCALING == Fp8Scaling::CURRENT) writer.amax = 0;   // already recorded, so no atomicMax is needed
    writer.finish();
}

void fp8_amax(Fp8Scale* scale, const floatX* x, size_t n) {
    launch("fp8_amax", fp8_amax_kernel, span_blocks(n), BLOCK, 0, updated(scale), x, n);
}

template <Fp8Scaling SCALING> void fp8_quantise(const Tensor& t) {
    auto quantise = [&](auto* x8) {
        using F8 = std::remove_pointer_t<decltype(x8)>;
        launch("fp8_quantise", fp8_quantise_kernel<SCALING, F8>, span_blocks(t.size()), BLOCK, 0,
               Out<F8>{nullptr, x8, t.fp8.scale}, static_cast<const floatX*>(t.x), t.size());
    };
    if (t.fp8.format == DType::E5M2) quantise(static_cast<e5m2*>(t.fp8.x));
    else quantise(static_cast<e4m3*>(t.fp8.x));
}

void Tensor::finish() const {
    if (fp8.x && fp8.current_scaling && !whole) fp8_quantise<Fp8Scaling::CURRENT>(*this);
}

void Tensor::quantise() const {
    if (!fp8.x || whole) return;
    if (!fp8.current_scaling) return fp8_quantise<Fp8Scaling::DELAYED>(*this);
    fp8_amax(fp8.scale, x, size());
    fp8_quantise<Fp8Scaling::CURRENT>(*this);
}

// ---- transposed copies
// With fp8_in_any_layout() their memory is unused. Forward and the input gradient sum over different dimensions of a
// weight, so both layouts of it are needed. The weight gradient sums over the rows of the batch, so both its operands
// are transposed.

constexpr int TRANSPOSE_TILE = 64;                       // a block transposes tiles of 64 x 64
constexpr int TRANSPOSE_BLOCK = WARP_SIZE == 1 ? 1 : 256;
constexpr int TRANSPOSE_PACK = 16;                       // bytes per access to memory

// A tile in shared memory.
struct TransposeTile {
    uint8_t bytes[TRANSPOSE_TILE * TRANSPOSE_TILE];

    // Rows that are 16 apart have their columns in another order, in chunks of 16: then both rows that a warp reads at
    // once in store() are in different banks.
    __device__ __forceinline__ uint8_t* at(int row, int column) {
        return bytes + row * TRANSPOSE_TILE + (column ^ (row / TRANSPOSE_PACK * TRANSPOSE_PACK));
    }
    // Writes the transposed tile, whose first element is `row0`, `column0` of the matrix (rows, columns), to out
    // (columns, rows).
    __device__ __forceinline__ void store(uint8_t* out, size_t row0, size_t column0, size_t rows, size_t columns) {
        for (int e = threadIdx.x; e < TRANSPOSE_TILE * (TRANSPOSE_TILE / TRANSPOSE_PACK); e += blockDim.x) {
            // Two neighbouring threads fill a sector of 32 bytes.
            const int column = e / 2 % TRANSPOSE_TILE, row = (e / (2 * TRANSPOSE_TILE) * 2 + e % 2) * TRANSPOSE_PACK;
            if (column0 + column >= columns || row0 + row >= rows) continue;
            const uint8_t* from = at(row, column);   // the rows of a pack have their columns in the same order
            RawPack<uint8_t, TRANSPOSE_PACK> pack;
            for (int k = 0; k < TRANSPOSE_PACK; k++) pack.v[k] = from[k * TRANSPOSE_TILE];
            *reinterpret_cast<RawPack<uint8_t, TRANSPOSE_PACK>*>(out + (column0 + column) * rows + row0 + row) = pack;
        }
    }
};

// out (columns, rows) = inp (rows, columns) transposed; rows and columns are multiples of TRANSPOSE_PACK
__global__ void __launch_bounds__(TRANSPOSE_BLOCK)
fp8_transpose_kernel(uint8_t* out, const uint8_t* inp, size_t rows, size_t columns) {
    __shared__ __align__(16) TransposeTile tile;
    typedef RawPack<uint8_t, TRANSPOSE_PACK> Pack;
    constexpr int ROW_PACKS = TRANSPOSE_TILE / TRANSPOSE_PACK;
    const size_t row0 = static_cast<size_t>(blockIdx.y) * TRANSPOSE_TILE;
    const size_t column0 = static_cast<size_t>(blockIdx.x) * TRANSPOSE_TILE;
    for (int e = threadIdx.x; e < TRANSPOSE_TILE * ROW_PACKS; e += blockDim.x) {
        const int row = e / ROW_PACKS, column = e % ROW_PACKS * TRANSPOSE_PACK;
        if (row0 + row >= rows || column0 + column >= columns) continue;
        *reinterpret_cast<Pack*>(tile.at(row, column)) =
            *reinterpret_cast<const Pack*>(inp + (row0 + row) * columns + column0 + column);
    }
    __syncthreads();
    tile.store(out, row0, column0, rows, columns);
}

void fp8_transpose(void* out, const void* inp, size_t rows, size_t columns) {
    launch("fp8_transpose", fp8_transpose_kernel,
           dim3(ceil_div(columns, TRANSPOSE_TILE), ceil_div(rows, TRANSPOSE_TILE)), TRANSPOSE_BLOCK, 0,
           static_cast<uint8_t*>(out), static_cast<const uint8_t*>(inp), rows, columns);
}

// Returns a matmul's input as the gradient of the weight reads it: without FP8, unless it has memory for a transposed
// copy (fp8-all).
Tensor for_weights(Tensor inp) {
    if (!inp.fp8.transposed) inp.fp8 = {};
    return inp;
}

// Transposes the FP8 copies of a weight gradient's operands.
void transpose_fp8(const Tensor& inp, const Tensor& dout) {
    if (!inp.fp8.x || fp8_in_any_layout()) return;
    fp8_transpose(inp.fp8.transposed, inp.fp8.x, inp.rows, inp.columns);
    if (!dout.fp8.only) fp8_transpose(dout.fp8.transposed, dout.fp8.x, dout.rows, dout.columns);
}

// ---- GELU's backward
// dinp = dout * GELU'(inp), with dinp's FP8 copy and the partial column sums of dinp for the gradient of a bias.
// ONLY_FP8 (fp8-all): dinp is not written in floatX, which nothing reads, but in 8 bits and transposed. That saves
// writing 2 bytes and reading 3 of each element: the bias's gradient and fp8_transpose would read dinp and its copy.
//
// shapes    dinp, dout, inp (N,OC) floatX, dinp.transposed (OC,N) | partials (gridDim.y, OC) fp32
// mapping   a block owns 64 columns and every gridDim.y-th tile of 64 rows; a thread owns a pack of the columns, and
//           every GELU_ROWS-th row of a tile
// cost      bandwidth: reads 2 of N*OC; writes 1 and, per element, 1 byte; ONLY_FP8: 2 bytes

constexpr int GELU_ROW_PACKS = TRANSPOSE_TILE / PACK;                                        // of a tile's row
constexpr int GELU_ROWS = WARP_SIZE == 1 ? 1 : TRANSPOSE_BLOCK / GELU_ROW_PACKS;             // processed at once
constexpr int GELU_PACKS = WARP_SIZE == 1 ? GELU_ROW_PACKS : 1;                              // of a thread, in a row

// dinp may be dout
template <bool ONLY_FP8> __global__ void __launch_bounds__(TRANSPOSE_BLOCK)
fp8_gelu_backward_kernel(Out<e5m2> dinp, uint8_t* transposed, float* partials, const floatX* dout, const floatX* inp,
                         size_t N, size_t OC) {
    __shared__ __align__(16) TransposeTile tile;
    __shared__ __align__(16) float sums[GELU_ROWS][TRANSPOSE_TILE];
    const int thread_row = threadIdx.x / GELU_ROW_PACKS, thread_column = threadIdx.x % GELU_ROW_PACKS * PACK;
    const size_t column0 = static_cast<size_t>(blockIdx.x) * TRANSPOSE_TILE, stride = gridDim.y * TRANSPOSE_TILE;
    float sum[GELU_PACKS][PACK] = {};
    Writer<e5m2> writer(dinp);
    for (size_t row0 = blockIdx.y * size_t{TRANSPOSE_TILE}; row0 < N; row0 += stride) {
        for (int row = thread_row; row < TRANSPOSE_TILE && row0 + row < N; row += GELU_ROWS)
            for (int p = 0; p < GELU_PACKS; p++) {
                const int column = thread_column + p * PACK;
                if (column0 + column >= OC) continue;
                const size_t i = (row0 + row) * OC + column0 + column;
                float x[PACK], d[PACK];
                load(x, inp + i);
                load(d, dout + i);
                for (int k = 0; k < PACK; k++) d[k] *= activation_derivative(x[k]);
                RawPack<floatX, PACK> rounded;
                from_floats(rounded.v, d);
                to_floats(d, rounded.v);
                for (int k = 0; k < PACK; k++) sum[p][k] += d[k];
                if (!ONLY_FP8) *reinterpret_cast<RawPack<floatX, PACK>*>(dinp.x + i) = rounded;
                const RawPack<e5m2, PACK> pack = writer.put_fp8(i, rounded);
                if (ONLY_FP8) *reinterpret_cast<RawPack<e5m2, PACK>*>(tile.at(row, column)) = pack;
            }
        if (!ONLY_FP8 || !transposed) continue;
        __syncthreads();
        tile.store(transposed, row0, column0, N, OC);
        __syncthreads();   // the next tile overwrites this one
    }
    writer.finish();
    for (int p = 0; p < GELU_PACKS; p++)
        store_pieces(sums[thread_row], sum[p], thread_column + p * PACK, TRANSPOSE_TILE);
    __syncthreads();
    constexpr int PIECES = PACK / PACK_FP32, PIECE_COLUMNS = TRANSPOSE_TILE / PIECES;   // see piece_of()
    for (int at = threadIdx.x * PACK_FP32; at < TRANSPOSE_TILE; at += blockDim.x * PACK_FP32) {
        const size_t column = column0 + at % PIECE_COLUMNS * PIECES + at / PIECE_COLUMNS * PACK_FP32;
        if (column >= OC) continue;
        float total[PACK_FP32] = {}, x[PACK_FP32];
        for (int row = 0; row < GELU_ROWS; row++) {
            load(x, &sums[row][at]);
            for (int k = 0; k < PACK_FP32; k++) total[k] += x[k];
        }
        store(partials + blockIdx.y * OC + column, total);
    }
}

// partials (partial_blocks(N), OC) fp32 scratch
void fp8_gelu_backward(const Tensor& dinp, Grad db, float* partials, const floatX* dout, const floatX* inp) {
    const auto [N, OC] = std::pair(dinp.rows, dinp.columns);
    const size_t blocks = std::min(MAX_PARTIALS, ceil_div(N, TRANSPOSE_TILE));
    auto* const transposed = fp8_in_any_layout() ? nullptr : static_cast<uint8_t*>(dinp.fp8.transposed);
    launch("fp8_gelu_backward", dinp.fp8.only ? fp8_gelu_backward_kernel<true> : fp8_gelu_backward_kernel<false>,
           dim3(ceil_div(OC, TRANSPOSE_TILE), blocks), TRANSPOSE_BLOCK, 0, updated(dinp.to<e5m2>()), transposed,
           partials, dout, inp, N, OC);
    dinp.finish();
    add_partials({db}, partials, blocks, OC);
}

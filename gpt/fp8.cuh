// --matmul fp8 and fp8-all: writes operands of matmuls in FP8, keeps their scales, and records both in the log and in
// checkpoints. Included by train_gpt.cu, whose section "fp8" introduces it.
//
// Map: conversions · Writer (records amaxes, writes FP8) · scales · separate quantising kernels · transposed copies ·
// GELU's backward · weights · amax history · log and checkpoints · FP16 underflow
//
// quantise  q = fp8(x * scale), with x already rounded to floatX; to nearest, ties to even; overflow saturates at the
//           format's maximum. Scales are powers of 2, so scaling is exact: q / scale is x to the format's precision
// delayed   scale = 2^floor(log2(FP8_MAX / amax of the last FP8_HISTORY steps)): the kernel that writes x also writes q
//           and records x's amax (naive attention and the mma backward kernels leave both to fp8_quantise)
// current   scale from the amax of the tensor itself: the kernel that writes x records its amax (fp8_amax does for
//           weights, naive attention and mma backward), fp8_quantise writes q. Weights and the first step use it too
// source    Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; delayed and current scaling as in NVIDIA's
//           Transformer Engine
// variants  dev/kernels/quantize.cu
#pragma once

// Largest finite value of a format, and its smallest positive value (a subnormal).
template <typename F8> constexpr float FP8_MAX = std::is_same_v<F8, e4m3> ? 448.0f : 57344.0f;
template <typename F8> constexpr float FP8_MIN = std::is_same_v<F8, e4m3> ? 0x1p-9f : 0x1p-16f;

constexpr bool MAY_USE_FP8 = FLOATX == DType::BF16;

// Ada and later have instructions that convert to FP8. Older GPUs are rejected; code for them contains no conversion.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool WRITES_FP8 = false;
#else
constexpr bool WRITES_FP8 = MAY_USE_FP8;
#endif

#ifdef __CUDACC__   // one instruction converts two values
template <typename F8, int N> __device__ __forceinline__ void pairs_from_floats(F8 (&v)[N], const float (&x)[N]) {
    constexpr auto KIND = std::is_same_v<F8, e4m3> ? __NV_E4M3 : __NV_E5M2;
    for (int k = 0; k < N; k += 2) {
        const auto pair = __nv_cvt_float2_to_fp8x2(make_float2(x[k], x[k + 1]), __NV_SATFINITE, KIND);
        v[k].__x = static_cast<__nv_fp8_storage_t>(pair);
        v[k + 1].__x = static_cast<__nv_fp8_storage_t>(pair >> 8);
    }
}
template <int N> __device__ __forceinline__ void from_floats(e4m3 (&v)[N], const float (&x)[N]) {
    pairs_from_floats(v, x);
}
template <int N> __device__ __forceinline__ void from_floats(e5m2 (&v)[N], const float (&x)[N]) {
    pairs_from_floats(v, x);
}
#endif

// ---- Writer (declared in train_gpt.cu)
// Every kernel that writes an FP8 operand constructs a Writer. Its destructor merges the amax into Fp8Scale::amax. The
// atomics are on integers, so their results do not depend on the order of blocks.

template <typename F8, Reach REACH>
__device__ __forceinline__ Writer<F8, REACH>::Writer(const Out<F8>& out) : to(out) {
    if constexpr (WRITES_FP8) {
        if (!to.scale) return;
        scale = to.scale->scale;
        counting = to.scale->counting;
    }
}

template <typename F8, Reach REACH>
template <int N>
__device__ __forceinline__ void Writer<F8, REACH>::put(size_t i, float (&v)[N]) {
    RawPack<floatX, N> rounded;
    from_floats(rounded.v, v);
    put(i, rounded);
    to_floats(v, rounded.v);
}

template <typename F8, Reach REACH>
template <int N>
__device__ __forceinline__ void Writer<F8, REACH>::put(size_t i, const RawPack<floatX, N>& rounded) {
    // dres always has an x: LayerNorm's backward, the only block that writes a gradient, saves a register.
    constexpr bool HAS_X = !WRITES_FP8 || (std::is_same_v<F8, e5m2> && REACH == Reach::BLOCK);
    if (HAS_X || to.x) *reinterpret_cast<RawPack<floatX, N>*>(to.x + i) = rounded;
    put_fp8(i, rounded);
}

template <typename F8, Reach REACH>
template <int N>
__device__ __forceinline__ RawPack<F8, N> Writer<F8, REACH>::put_fp8(size_t i, const RawPack<floatX, N>& rounded) {
    RawPack<F8, N> pack = {};
    if constexpr (WRITES_FP8) {
        if (!to.scale) return pack;
        float v[N];
        to_floats(v, rounded.v);
        for (int k = 0; k < N; k++) amax = fmaxf(amax, fabsf(v[k]));
        if (!to.x8) return pack;
        pack = quantise(v);
        *reinterpret_cast<RawPack<F8, N>*>(to.x8 + i) = pack;
    }
    return pack;
}

template <typename F8, Reach REACH>
template <int N>
__device__ __forceinline__ RawPack<F8, N> Writer<F8, REACH>::quantise(float (&v)[N]) {
    RawPack<F8, N> pack = {};
    for (int k = 0; k < N; k++) v[k] *= scale;
    if constexpr (WRITES_FP8) from_floats(pack.v, v);
    if (!counting) return pack;
    values += N;
    for (int k = 0; k < N; k++) {
        saturated += fabsf(v[k]) > FP8_MAX<F8>;
        underflow += v[k] != 0 && fabsf(v[k]) <= FP8_MIN<F8> / 2;   // FP8_MIN / 2 is a tie: rounds to even, 0
    }
    return pack;
}

template <typename F8, Reach REACH> __device__ __forceinline__ Writer<F8, REACH>::~Writer() {
    if constexpr (WRITES_FP8) {
        if (!to.scale) return;
        const float reduced = REACH == Reach::BLOCK ? block_max(amax) : warp_max(amax);
        const int thread = REACH == Reach::BLOCK ? threadIdx.x : threadIdx.x % WARP_SIZE;
        if (thread == 0 && reduced > 0) atomicMax(&to.scale->amax, __float_as_uint(reduced));
        if (!counting || values == 0) return;
        atomicAdd(&to.scale->values, static_cast<unsigned long long>(values));
        if (saturated) atomicAdd(&to.scale->saturated, static_cast<unsigned long long>(saturated));
        if (underflow) atomicAdd(&to.scale->underflow, static_cast<unsigned long long>(underflow));
    }
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
}

void fp8_amax(Fp8Scale* scale, const floatX* x, size_t n) {
    launch("fp8_amax", fp8_amax_kernel, span_blocks(n), BLOCK, 0, updated(scale), x, n);
}

template <Fp8Scaling SCALING> void fp8_quantise(const Operand& operand, size_t n) {
    auto quantise = [&](auto* x8) {
        using F8 = std::remove_pointer_t<decltype(x8)>;
        launch("fp8_quantise", fp8_quantise_kernel<SCALING, F8>, span_blocks(n), BLOCK, 0,
               Out<F8>{nullptr, x8, operand.scale}, static_cast<const floatX*>(operand.x), n);
    };
    if (operand.format == DType::E5M2) quantise(static_cast<e5m2*>(operand.fp8));
    else quantise(static_cast<e4m3*>(operand.fp8));
}

void Operand::finish(size_t n) const {
    if (fp8 && current_scaling) fp8_quantise<Fp8Scaling::CURRENT>(*this, n);
}

void Operand::quantise(size_t n) const {
    if (!fp8) return;
    if (!current_scaling) return fp8_quantise<Fp8Scaling::DELAYED>(*this, n);
    fp8_amax(scale, x, n);
    fp8_quantise<Fp8Scaling::CURRENT>(*this, n);
}

// ---- transposed copies
// cuBLASLt's FP8 matmuls need both operands contiguous along the dimension that is summed over, except on compute
// capability 10, which leaves the memory of transposed copies unused. Forward and the input gradient sum over different
// dimensions of a weight, so both layouts of it are needed. The weight gradient sums over the rows of the batch, so
// both its operands are transposed.

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
    {
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
                    for (int k = 0; k < PACK; k++) d[k] *= gelu_slope(x[k]);
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
    }
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
void fp8_gelu_backward(const Operand& dinp, Grad db, float* partials, const floatX* dout, const floatX* inp, size_t N,
                       size_t OC) {
    const size_t blocks = std::min(MAX_PARTIALS, ceil_div(N, TRANSPOSE_TILE));
    auto* const transposed = fp8_in_any_layout() ? nullptr : static_cast<uint8_t*>(dinp.transposed);
    launch("fp8_gelu_backward", dinp.only_fp8 ? fp8_gelu_backward_kernel<true> : fp8_gelu_backward_kernel<false>,
           dim3(ceil_div(OC, TRANSPOSE_TILE), blocks), TRANSPOSE_BLOCK, 0, updated(dinp.to<e5m2>()), transposed,
           partials, dout, inp, N, OC);
    dinp.finish(N * OC);
    add_partials({db}, partials, blocks, OC);
}

// ---- weights, once per step

// Writes layer l's weights in FP8, both as stored and transposed.
void quantise_weights(Model& m, size_t l) {
    const size_t C = m.config.channels, Ct = C / m.setup.tensor;
    const Operands x = operands(m, l);
    recorder.at("update", NO_LAYER);
    fp8_scales<Fp8Step::RESET_AMAX>(m.a.fp8_scales(l), FP8_TENSORS);
    auto quantise = [](const Operand& w, size_t rows, size_t columns) {
        w.quantise(rows * columns);
        if (!fp8_in_any_layout()) fp8_transpose(w.transposed, w.fp8, rows, columns);
    };
    quantise(x.qkvw, C, 3 * Ct);
    quantise(x.attprojw, Ct, C);
    quantise(x.fcw, C, 4 * Ct);
    quantise(x.fcprojw, 4 * Ct, C);
}

// Quantises layer l's weights unless that has been done since they last changed.
void need_fp8_weights(Model& m, size_t l) {
    if (!has_fp8(m) || m.fp8_weights[l]) return;
    quantise_weights(m, l);
    m.fp8_weights[l] = true;
}

// Called after the weights have changed. Quantises all layers, but with ZeRO only marks them: need_fp8_weights
// quantises a layer once its weights have been gathered.
void fp8_weights_changed(Model& m) {
    if (!has_fp8(m)) return;
    const size_t L = m.config.layers;
    m.fp8_weights.assign(L, m.setup.zero == 0);
    if (m.setup.zero > 0) return;
    m.graphs.run("weights in FP8", [&] { for (size_t l = 0; l < L; l++) quantise_weights(m, l); });
}

// ---- amax history

std::vector<Fp8Scale> download_scales(const Model& m) {
    std::vector<Fp8Scale> scales(scale_count(m));
    download(scales.data(), m.a.fp8_scales(), scales.size() * sizeof(Fp8Scale));
    return scales;
}
// Called after each step: all-reduces the amaxes (maximum), so that all GPUs have the same scales, and adds them to the
// history.
void push_amaxes(Model& m) {
    if (!has_fp8(m) || m.setup.fp8_scaling != Fp8Scaling::DELAYED) return;
    const size_t count = scale_count(m);
    if (!world.alone()) {
        fp8_scales<Fp8Step::READ_AMAX>(m.a.fp8_scales(), count, m.a.fp8_amaxes());
        over_gpus(m.a.fp8_amaxes(), count, ncclMax);
        fp8_scales<Fp8Step::WRITE_AMAX>(m.a.fp8_scales(), count, m.a.fp8_amaxes());
    }
    fp8_scales<Fp8Step::PUSH_HISTORY>(m.a.fp8_scales(), count);
    m.fp8_history = true;
}

// ---- log and checkpoints

// Returns, for each tensor over all layers, the fractions of this GPU's counted values that saturated at the format's
// maximum and that underflowed to 0 (key "flushed"), with three digits.
json fp8_record(const Model& m) {
    auto fraction = [](double part, double all) { return all > 0 ? std::stod(format("%.3g", part / all)) : 0; };
    const std::vector<Fp8Scale> scales = download_scales(m);
    json record;
    for (size_t t = 0; t < FP8_TENSORS; t++) {
        double values = 0, saturated = 0, underflow = 0;
        for (size_t n = t; n < scales.size(); n += FP8_TENSORS) {
            values += scales[n].values;
            saturated += scales[n].saturated;
            underflow += scales[n].underflow;
        }
        record[FP8_NAMES[t]] = {{"saturated", fraction(saturated, values)}, {"flushed", fraction(underflow, values)}};
    }
    return record;
}

// Returns the amax histories of all scales, for checkpoints.
std::vector<float> fp8_history(const Model& m) {
    std::vector<float> history;
    for (const Fp8Scale& s : download_scales(m)) history.insert(history.end(), s.history, s.history + FP8_HISTORY);
    return history;
}

// Sets the histories from a checkpoint, and the scales from them.
void set_fp8_history(Model& m, const std::vector<float>& history) {
    std::vector<Fp8Scale> scales = download_scales(m);
    for (size_t n = 0; n < scales.size(); n++)
        std::copy_n(history.begin() + n * FP8_HISTORY, FP8_HISTORY, scales[n].history);
    upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
    fp8_scales<Fp8Step::RESCALE>(m.a.fp8_scales(), scales.size());
    m.fp8_history = true;
    fp8_weights_changed(m);   // RESCALE has overwritten their scales, which come from current scaling
}

// ---- FP16 underflow, for the log

// Returns the fraction of zeros in the first layer's activation gradients after the last micro-batch on this GPU. These
// gradients have passed through all layers, so the fraction measures FP16 underflow. About 1 / (10 T) of them are 0 in
// any format: the first query of a sequence has a single key, so its gradient is 0.
double zero_gradients(const Model& m) {
    const Activations& a = m.a;
    const size_t own = m.setup.rows() * m.config.channels;   // elements of R rows, and of N rows of Ct columns
    double zeros = 0, all = 0;
    const std::pair<const floatX*, size_t> gradients[] = {
        {own_rows(a.dres(), own), own}, {own_rows(a.dln(), own), own}, {a.datt(), own}, {a.dqkv(), 3 * own},
        {a.dfc(), 4 * own}};
    for (const auto& [x, n] : gradients) {
        std::vector<floatX> values(n);
        download(values.data(), x, values.size() * sizeof(floatX));
        zeros += std::count_if(values.begin(), values.end(), [](floatX v) { return static_cast<float>(v) == 0; });
        all += n;
    }
    return zeros / all;
}

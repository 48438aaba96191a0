// Matmuls' operands in FP8: how kernels write them, and the scales they need (train_gpt.cu, section "fp8").
//
// quantise  q = fp8(x * scale) of what x is in floatX, to nearest, ties to even; what is too large becomes the largest
//           number. Scales are powers of 2, so that scaling rounds nothing: q / scale is x to the format's own precision
// delayed   scale = 2^floor(log2(MOST / the largest |x| of the last FP8_HISTORY steps)): known before x is, so that the
//           kernel that writes x writes q on the way, and takes the largest |x| of this step
//           (naive attention and mma's backward leave both to fp8_quantise)
// current   scale from the largest |x| of this very tensor: the kernel takes it, and another one quantises
// source    Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; both kinds of scaling as in NVIDIA's Transformer
//           Engine
// variants  dev/kernels/quantize.cu
#pragma once

typedef __nv_fp8_e4m3 e4m3;   // 4 bits of exponent, 3 of mantissa: activations and weights
typedef __nv_fp8_e5m2 e5m2;   // 5 and 2: gradients, whose range is wide

// The largest number, and the least above 0.
template <typename F8> constexpr float MOST = std::is_same_v<F8, e4m3> ? 448.0f : 57344.0f;
template <typename F8> constexpr float LEAST = std::is_same_v<F8, e4m3> ? 0x1p-9f : 0x1p-16f;

constexpr bool MAY_USE_FP8 = FLOATX == DType::BF16;
constexpr int FP8_HISTORY = 16;   // steps

// Of one tensor of one layer.
struct Fp8Scale {
    float scale, inverse;         // the inverse is what matmuls multiply by
    unsigned largest;             // |x| up to now, as bits: in the order of the numbers
    unsigned counting;            // whether the counts below are kept
    unsigned long long values, saturated, flushed;   // flushed: to 0, which they were not
    float history[FP8_HISTORY];   // the largest |x| of past steps, the last one first; 0: none yet
};

// By the scale that there is, or by the tensor's own largest |x|.
enum class ScaleBy { HISTORY, ITSELF };

// Where a kernel that writes a tensor in floatX leaves it in FP8.
template <typename F8> struct Fp8Out {
    F8* data = nullptr;            // none: not here, but the largest |x| is wanted
    Fp8Scale* scale = nullptr;     // none: nothing is wanted
    __device__ Fp8Out from(size_t i) const { return {data ? data + i : nullptr, scale}; }
};

// FP8's conversions are instructions from Ada on; older cards are refused, and their code has none.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool WRITES_FP8 = false;
#else
constexpr bool WRITES_FP8 = MAY_USE_FP8;
#endif

#ifdef __CUDACC__   // two at once, as the instruction has it
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

// A thread's part of it: put() each pack; then all lanes of the warp, or all threads of the block, leave what they found.
template <typename F8> struct Fp8Writer {
    Fp8Out<F8> out;
    float scale = 1, largest = 0;
    bool counting = false;
    unsigned values = 0, saturated = 0, flushed = 0;

    __device__ __forceinline__ explicit Fp8Writer(const Fp8Out<F8>& to) : out(to) {
        if constexpr (WRITES_FP8) {
            if (!out.scale) return;
            scale = out.scale->scale;
            counting = out.scale->counting;
        }
    }

    // x is element i and those after it, before they are rounded to floatX.
    template <int N> __device__ __forceinline__ void put(size_t i, const float (&x)[N]) {
        if constexpr (WRITES_FP8) {
            if (!out.scale) return;
            float v[N];
            for (int k = 0; k < N; k++) v[k] = x[k];
            round_pack(v);
            put_rounded(i, v);
        }
    }
    // The same of what is in floatX already; spoils v.
    template <int N> __device__ __forceinline__ void put_rounded(size_t i, float (&v)[N]) {
        if constexpr (WRITES_FP8) {
            if (!out.scale) return;
            for (int k = 0; k < N; k++) largest = fmaxf(largest, fabsf(v[k]));
            if (out.data) *reinterpret_cast<RawPack<F8, N>*>(out.data + i) = quantised(v);
        }
    }

    template <int N> __device__ __forceinline__ RawPack<F8, N> quantised(float (&v)[N]) {
        RawPack<F8, N> pack = {};
        for (int k = 0; k < N; k++) v[k] *= scale;
        if constexpr (WRITES_FP8) from_floats(pack.v, v);
        if (!counting) return pack;
        values += N;
        for (int k = 0; k < N; k++) {
            saturated += fabsf(v[k]) > MOST<F8>;
            flushed += v[k] != 0 && fabsf(v[k]) <= LEAST<F8> / 2;   // half of it is a tie, and 0 is even
        }
        return pack;
    }

    __device__ __forceinline__ void leave_warp() {
        if constexpr (WRITES_FP8)
            if (out.scale) leave(warp_max(largest), threadIdx.x % WARP_SIZE == 0);
    }
    __device__ __forceinline__ void leave_block() {
        if constexpr (WRITES_FP8)
            if (out.scale) leave(block_max(largest), threadIdx.x == 0);
    }

private:
    __device__ __forceinline__ void leave(float largest_of_all, bool mine) {
        if (mine && largest_of_all > 0) atomicMax(&out.scale->largest, __float_as_uint(largest_of_all));
        if (!counting || values == 0) return;
        atomicAdd(&out.scale->values, static_cast<unsigned long long>(values));
        if (saturated) atomicAdd(&out.scale->saturated, static_cast<unsigned long long>(saturated));
        if (flushed) atomicAdd(&out.scale->flushed, static_cast<unsigned long long>(flushed));
    }
};

// ---- scales

// 1 where there is nothing to go by: all zeros, or not finite.
__device__ __forceinline__ float fp8_scale_for(float largest, float most) {
    constexpr float HIGHEST = 0x1p60f;   // far above all that occurs, and so that products of two are finite
    if (!(largest > 0 && largest <= FLT_MAX)) return 1;
    return __uint_as_float(__float_as_uint(fminf(most / largest, HIGHEST)) & 0xff800000u);   // a power of 2
}

__device__ __forceinline__ void set_scale(Fp8Scale& s, float scale) {
    s.scale = scale;
    s.inverse = 1 / scale;
}

// A thread per scale. Of each layer's `of_layer` the first e4m3s are E4M3's, the others E5M2's.
enum class Maxima { FORGET, REMEMBER, LEAVE };

template <Maxima MAXIMA> __global__ void fp8_scales_kernel(Fp8Scale* scales, size_t count, int of_layer, int e4m3s) {
    const size_t n = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= count) return;
    Fp8Scale& s = scales[n];
    if (MAXIMA == Maxima::REMEMBER) {
        for (int i = FP8_HISTORY - 1; i > 0; i--) s.history[i] = s.history[i - 1];
        s.history[0] = __uint_as_float(s.largest);
    }
    if (MAXIMA != Maxima::LEAVE) s.largest = 0;
    if (MAXIMA == Maxima::FORGET) return;
    float largest = 0;
    for (int i = 0; i < FP8_HISTORY; i++) largest = fmaxf(largest, s.history[i]);
    set_scale(s, fp8_scale_for(largest, static_cast<int>(n % of_layer) < e4m3s ? MOST<e4m3> : MOST<e5m2>));
}

void fp8_forget(Fp8Scale* scales, size_t count) {
    launch("fp8_forget", fp8_scales_kernel<Maxima::FORGET>, row_blocks(count), BLOCK, 0, updated(scales), count, 1, 1);
}

// The largest |x| of a step joins the history, and makes the next step's scales.
void fp8_remember(Fp8Scale* scales, size_t count, int of_layer, int e4m3s) {
    launch("fp8_remember", fp8_scales_kernel<Maxima::REMEMBER>, row_blocks(count), BLOCK, 0, updated(scales), count,
           of_layer, e4m3s);
}

// Scales as the history, which was read from a checkpoint, has them.
void fp8_recall(Fp8Scale* scales, size_t count, int of_layer, int e4m3s) {
    launch("fp8_recall", fp8_scales_kernel<Maxima::LEAVE>, row_blocks(count), BLOCK, 0, updated(scales), count,
           of_layer, e4m3s);
}

enum class Counting { OFF, ON };

__global__ void fp8_count_kernel(Fp8Scale* scales, size_t count, Counting counting) {
    const size_t n = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= count) return;
    scales[n].counting = counting == Counting::ON;
    if (counting == Counting::ON) scales[n].values = scales[n].saturated = scales[n].flushed = 0;
}

// From now on, what is quantised is counted anew; or no longer.
void fp8_count(Fp8Scale* scales, size_t count, Counting counting) {
    launch("fp8_count", fp8_count_kernel, row_blocks(count), BLOCK, 0, updated(scales), count, counting);
}

// To and from an array, in which they can be sent.
enum class Largest { TAKE, GIVE };

template <Largest WHICH> __global__ void fp8_largest_kernel(float* all, Fp8Scale* scales, size_t count) {
    const size_t n = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= count) return;
    if (WHICH == Largest::TAKE) all[n] = __uint_as_float(scales[n].largest);
    else scales[n].largest = __float_as_uint(all[n]);
}

template <Largest WHICH> void fp8_largest(float* all, Fp8Scale* scales, size_t count) {
    launch("fp8_largest", fp8_largest_kernel<WHICH>, row_blocks(count), BLOCK, 0, updated(all), updated(scales), count);
}

// ---- what the kernel that wrote it could not quantise

// The largest |x| of (n); or of a weight of each layer, a stride apart (grid.y).
__global__ void fp8_max_kernel(Fp8Scale* scales, size_t of_layer, const floatX* x, size_t n, size_t stride) {
    x += blockIdx.y * stride;
    const Span span = my_span(n);
    float largest = 0, v[PACK];
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        load(v, x + i);
        for (int k = 0; k < PACK; k++) largest = fmaxf(largest, fabsf(v[k]));
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) atomicMax(&scales[blockIdx.y * of_layer].largest, __float_as_uint(largest));
}

template <ScaleBy BY, typename F8> __global__ void fp8_quantise_kernel(Fp8Out<F8> out, const floatX* x, size_t n) {
    Fp8Writer<F8> writer(out);
    if (BY == ScaleBy::ITSELF) {
        writer.scale = fp8_scale_for(__uint_as_float(out.scale->largest), MOST<F8>);
        if (blockIdx.x == 0 && threadIdx.x == 0) set_scale(*out.scale, writer.scale);
    }
    const Span span = my_span(n);
    float v[PACK];
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        load(v, x + i);
        writer.put_rounded(i, v);
    }
    if (BY == ScaleBy::ITSELF) writer.largest = 0;   // it is known, and others read it
    writer.leave_block();
}

void fp8_max(Fp8Scale* scales, const floatX* x, size_t n, size_t of_layer = 0, unsigned layers = 1, size_t stride = 0) {
    launch("fp8_max", fp8_max_kernel, dim3(span_blocks(n), layers), BLOCK, 0, updated(scales), of_layer, x, n, stride);
}

template <ScaleBy BY, typename F8> void fp8_quantise(const Fp8Out<F8>& out, const floatX* x, size_t n) {
    launch("fp8_quantise", fp8_quantise_kernel<BY, F8>, span_blocks(n), BLOCK, 0, out, x, n);
}

// ---- the other way around
// cuBLASLt multiplies FP8 only where both operands' rows lie along the dimension that is summed over. Weights are
// needed both ways; for the gradient of weights the batch's rows are, and activations are turned around.

constexpr int TURN = 64;                            // a block turns TURN x TURN elements around
constexpr int TURN_BLOCK = WARP_SIZE == 1 ? 1 : 256;
constexpr int TURN_PITCH = TURN + 4;                // bytes of a row in shared memory: columns lie in different banks
constexpr int TURN_PACK = 16;                       // bytes that a thread stores at once
constexpr int WORD = sizeof(uint32_t);

// tile (TURN, TURN), of which `rows` and `columns` count, to out (.., leading) transposed
__device__ __forceinline__ void store_turned(uint8_t* out, const uint8_t (&tile)[TURN][TURN_PITCH], int rows,
                                             int columns, size_t leading) {
    for (int e = threadIdx.x; e < TURN * (TURN / TURN_PACK); e += blockDim.x) {
        // Two threads fill the 32 bytes that memory moves at once.
        const int column = e / 2 % TURN, first = (e / (2 * TURN) * 2 + e % 2) * TURN_PACK;
        if (column >= columns || first >= rows) continue;
        RawPack<uint8_t, TURN_PACK> pack;
        for (int k = 0; k < TURN_PACK; k++) pack.v[k] = tile[first + k][column];
        *reinterpret_cast<RawPack<uint8_t, TURN_PACK>*>(out + column * leading + first) = pack;
    }
}

// out (columns, rows) = inp (rows, columns) transposed; both are multiples of TURN_PACK
__global__ void __launch_bounds__(TURN_BLOCK)
fp8_transpose_kernel(uint8_t* out, const uint8_t* inp, size_t rows, size_t columns) {
    __shared__ __align__(16) uint8_t tile[TURN][TURN_PITCH];
    const size_t row0 = static_cast<size_t>(blockIdx.y) * TURN, column0 = static_cast<size_t>(blockIdx.x) * TURN;
    const int valid_rows = min(size_t{TURN}, rows - row0), valid_columns = min(size_t{TURN}, columns - column0);
    for (int e = threadIdx.x; e < TURN * (TURN / WORD); e += blockDim.x) {
        const int row = e / (TURN / WORD), column = e % (TURN / WORD) * WORD;
        if (row >= valid_rows || column >= valid_columns) continue;
        *reinterpret_cast<uint32_t*>(&tile[row][column]) =
            *reinterpret_cast<const uint32_t*>(inp + (row0 + row) * columns + column0 + column);
    }
    __syncthreads();
    store_turned(out + column0 * rows + row0, tile, valid_rows, valid_columns, rows);
}

// A weight of each layer (grid.z), a stride apart, scaled by its own largest |x|: out (rows, columns) as it is, and
// turned (columns, rows). Strides of FP8 and of w are in elements.
struct WeightStrides { size_t scales, fp8, w; };

template <ScaleBy BY>
__global__ void __launch_bounds__(TURN_BLOCK)
fp8_weights_kernel(e4m3* out, e4m3* turned, Fp8Scale* scales, const floatX* w, size_t rows, size_t columns,
                   WeightStrides strides) {
    __shared__ __align__(16) uint8_t tile[TURN][TURN_PITCH];
    const size_t layer = blockIdx.z;
    out += layer * strides.fp8;
    turned += layer * strides.fp8;
    w += layer * strides.w;
    Fp8Writer<e4m3> writer({out, &scales[layer * strides.scales]});
    if (BY == ScaleBy::ITSELF) {
        writer.scale = fp8_scale_for(__uint_as_float(writer.out.scale->largest), MOST<e4m3>);
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) set_scale(*writer.out.scale, writer.scale);
    }
    const size_t row0 = static_cast<size_t>(blockIdx.y) * TURN, column0 = static_cast<size_t>(blockIdx.x) * TURN;
    const int valid_rows = min(size_t{TURN}, rows - row0), valid_columns = min(size_t{TURN}, columns - column0);
    for (int e = threadIdx.x * PACK; e < TURN * TURN; e += blockDim.x * PACK) {
        const int row = e / TURN, column = e % TURN;
        if (row >= valid_rows || column >= valid_columns) continue;
        float v[PACK];
        load(v, w + (row0 + row) * columns + column0 + column);
        const RawPack<e4m3, PACK> q = writer.quantised(v);
        *reinterpret_cast<RawPack<e4m3, PACK>*>(out + (row0 + row) * columns + column0 + column) = q;
        for (int k = 0; k < PACK; k += WORD)
            *reinterpret_cast<uint32_t*>(&tile[row][column + k]) = *reinterpret_cast<const uint32_t*>(&q.v[k]);
    }
    writer.leave_warp();
    __syncthreads();
    store_turned(reinterpret_cast<uint8_t*>(turned) + column0 * rows + row0, tile, valid_rows, valid_columns, rows);
}

dim3 turn_grid(size_t rows, size_t columns, unsigned layers = 1) {
    return dim3(ceil_div(columns, TURN), ceil_div(rows, TURN), layers);
}

void fp8_transpose(void* out, const void* inp, size_t rows, size_t columns) {
    launch("fp8_transpose", fp8_transpose_kernel, turn_grid(rows, columns), TURN_BLOCK, 0, static_cast<uint8_t*>(out),
           static_cast<const uint8_t*>(inp), rows, columns);
}

// The scales' largest |x| are those of w already: see fp8_max.
template <ScaleBy BY>
void fp8_weights(e4m3* out, e4m3* turned, Fp8Scale* scales, const floatX* w, size_t rows, size_t columns,
                 unsigned layers, WeightStrides strides) {
    launch("fp8_weights", fp8_weights_kernel<BY>, turn_grid(rows, columns, layers), TURN_BLOCK, 0, out, turned,
           updated(scales), w, rows, columns, strides);
}

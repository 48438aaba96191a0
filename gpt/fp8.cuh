// --matmul fp8 and fp8-all: the formats, and how kernels write a tensor in 8 bits. Included by train_gpt.cu before its
// kernels; fp8_kernels.cuh has kernels of its own, fp8_training.cuh what a training step does.
//
// With --matmul fp8 the matmuls of a block read 8-bit operands, which Hopper multiplies twice as fast as 16-bit ones:
//           q = fp8(x * scale),   out = (q_inp q_w) / (scale_inp * scale_w) + b,   sums in FP32: --fp8-accumulation
// fp8 does so in forward and for gradients of inputs, fp8-all also for gradients of weights. Activations and weights
// are E4M3, gradients E5M2. Master weights, weight gradients, attention, LayerNorm and the head stay in their formats.
// A scale is a power of two that maps the tensor's amax, its largest |x|, close to the format's largest number:
//
//     delayed   amax of the last 16 steps -> scale -> the kernel that computes x writes x and q, and records the amax
//     current   the kernel that computes x writes x and records the amax -> scale -> another kernel reads x, writes q
//
// The kernel that computes x rounds in Writer::quantise() and records its amax in Writer::finish(). Three kinds of x
// have kernels of their own: weights, which use current scaling in both modes, fp8_amax_kernel; the outputs of naive
// attention and of mma backward fp8_quantise_kernel (delayed) or fp8_amax_kernel (current).
//
// quantise  q = fp8(x * scale), with x already rounded to floatX; to nearest, ties to even; overflow saturates at the
//           format's maximum. Scales are powers of 2, so scaling is exact: q / scale is x to the format's precision
// source    Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; delayed and current scaling as in NVIDIA's
//           Transformer Engine
// variants  dev/kernels/quantize.cu
#pragma once

typedef __nv_fp8_e4m3 e4m3;   // 4 bits of exponent, 3 of mantissa: activations and weights
typedef __nv_fp8_e5m2 e5m2;   // 5 and 2: gradients, whose range is wide

constexpr int FP8_HISTORY = 16;   // steps

// The tensors of a layer that have an FP8 scale: first those in E4M3, then gradients (E5M2). dattproj and dfcproj: the
// gradients of the outputs of attproj and fcproj, equal to the residual stream's after that output is added.
enum Fp8Tensor {
    FP8_LN1, FP8_ATT, FP8_LN2, FP8_GELU, FP8_QKVW, FP8_ATTPROJW, FP8_FCW, FP8_FCPROJW,
    FP8_DQKV, FP8_DATTPROJ, FP8_DFC, FP8_DFCPROJ, FP8_TENSORS
};
constexpr const char* FP8_NAMES[] = {"ln1", "att", "ln2", "gelu", "qkvw", "attprojw", "fcw", "fcprojw",
                                     "dqkv", "dattproj", "dfc", "dfcproj"};
constexpr size_t FP8_E4M3S = FP8_DQKV;

// The factor by which a tensor is multiplied before it is rounded to 8 bits, one for each tensor of a layer, with the
// statistics from which the next factor is computed. In device memory.
struct Fp8Scale {
    float scale = 1;
    alignas(16) float inverse = 1;     // what matmuls multiply by; cuBLASLt 13 rejects other alignments
    unsigned amax = 0;                 // maximum |x| of this step so far: a float's bits, which compare like integers
    unsigned counting = 0;             // whether the three counts below are kept, for the log
    unsigned long long values = 0, saturated = 0, underflow = 0;   // underflow: non-zero values rounded to 0
    float history[FP8_HISTORY] = {};   // amax of past steps, the latest first; 0: none yet
};

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

// v = x, rounded to nearest and saturated.
template <typename F8, int N> __device__ __forceinline__ void to_fp8(F8 (&v)[N], const float (&x)[N]) {
#ifdef __CUDACC__   // one instruction converts two values
    constexpr auto KIND = std::is_same_v<F8, e4m3> ? __NV_E4M3 : __NV_E5M2;
    for (int k = 0; k < N; k += 2) {
        const auto pair = __nv_cvt_float2_to_fp8x2(make_float2(x[k], x[k + 1]), __NV_SATFINITE, KIND);
        v[k].__x = static_cast<__nv_fp8_storage_t>(pair);
        v[k + 1].__x = static_cast<__nv_fp8_storage_t>(pair >> 8);
    }
#else
    from_floats(v, x);
#endif
}

// Destination of a tensor that matmuls read.
template <typename F8> struct Out {
    floatX* x;                   // null: only x8 is read (--matmul fp8-all)
    F8* x8 = nullptr;            // null: the kernel writes x only
    Fp8Scale* scale = nullptr;   // null: no FP8; otherwise the kernel records the tensor's amax in it

    __device__ Out from(size_t i) const { return {x ? x + i : nullptr, x8 ? x8 + i : nullptr, scale}; }
};

enum class Reach { WARP, BLOCK };   // the threads that call finish() together

template <typename F8, Reach REACH = Reach::BLOCK> struct Writer {
    Out<F8> to;
    float scale = 1, amax = 0;   // amax: of what this thread has put
    bool counting = false;       // Fp8Scale::counting
    unsigned values = 0, saturated = 0, underflow = 0;

    __device__ __forceinline__ explicit Writer(const Out<F8>& out) : to(out) {
        if constexpr (WRITES_FP8) {
            if (!to.scale) return;
            scale = to.scale->scale;
            counting = to.scale->counting;
        }
    }

    // Stores v as elements i ... i + N - 1 of the tensor, and rounds v itself to floatX.
    template <int N> __device__ __forceinline__ void put(size_t i, float (&v)[N]) {
        RawPack<floatX, N> rounded;
        from_floats(rounded.v, v);
        put(i, rounded);
        to_floats(v, rounded.v);
    }

    // Stores a pack that is already rounded.
    template <int N> __device__ __forceinline__ void put(size_t i, const RawPack<floatX, N>& rounded) {
        // Gradients that a block puts always have an x; the check would cost LayerNorm's backward a register.
        constexpr bool HAS_X = !WRITES_FP8 || (std::is_same_v<F8, e5m2> && REACH == Reach::BLOCK);
        if (HAS_X || to.x) *reinterpret_cast<RawPack<floatX, N>*>(to.x + i) = rounded;
        put_fp8(i, rounded);
    }

    // Stores only the 8-bit copy, and returns it (zeros if there is none).
    template <int N> __device__ __forceinline__ RawPack<F8, N> put_fp8(size_t i, const RawPack<floatX, N>& rounded) {
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

    // Returns v in 8 bits; multiplies v itself by the scale.
    template <int N> __device__ __forceinline__ RawPack<F8, N> quantise(float (&v)[N]) {
        RawPack<F8, N> pack = {};
        for (int k = 0; k < N; k++) v[k] *= scale;
        if constexpr (WRITES_FP8) to_fp8(pack.v, v);
        if (!counting) return pack;
        values += N;
        for (int k = 0; k < N; k++) {
            saturated += fabsf(v[k]) > FP8_MAX<F8>;
            underflow += v[k] != 0 && fabsf(v[k]) <= FP8_MIN<F8> / 2;   // FP8_MIN / 2 is a tie: rounds to even, 0
        }
        return pack;
    }

    // Merges the threads' amax and counts into the scale's. The atomics are on integers, so their results do not depend
    // on the order of blocks.
    __device__ __forceinline__ void finish() {
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
};

// The copy in 8 bits of a tensor that matmuls read.
struct Fp8Copy {
    void* x = nullptr;              // null: none, matmuls read floatX
    void* transposed = nullptr;     // memory for (columns, rows): of weights always, of others with fp8-all
    Fp8Scale* scale = nullptr;
    DType format = FLOATX;          // of x
    bool current_scaling = false;   // quantised after the tensor's kernel, when its amax is known
    bool only = false;              // the kernel writes x and `transposed`, but not floatX
    bool fast_accumulation = false; // in the forward product of this input
};

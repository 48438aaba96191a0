// train_gpt.cu trains GPT-2 and GPT-3 models on one GPU or many. Built with g++, the same file trains on a CPU.
//
// This file is the trainer of one GPU in one precision: the kernels of each layer, forward and backward, the model made
// of them, mixed precision, gradient accumulation, recomputation, the optimizer and the training loop. It reads from
// top to bottom. Every other technique is one word where it attaches, and a header in gpt/ that a first reading can
// skip: kernels for tensor cores, FP8, loss scaling, Muon, many GPUs; also cuBLASLt, files and options. Each #include
// has the main names of its header.
//
// Map: the sections, in order
//    1  basics                precision, packs and warps, tensors, threads and elements
//    2  kernels               gelu, column sums, bias, embedding, layernorm, attention (and: other kernels),
//                             cross-entropy, gradient norm, adamw. Each begins with formulas and the least bytes or
//                             FLOPs (cost)
//    3  linear                layers out = inp w + b, by matmuls (gpt/matmul.cuh)
//    4  model                 sizes; one table of parameters and one of activations (name, shape, copies), from which
//                             memory, init, checkpoints and the plan follow; the tensors of a layer
//    5  training step         forward, which also recomputes, backward, update
//    6  run                   schedule, train: the training loop (train_loop); main
//
// Names   B batch, T sequence, N = B*T rows, C channels, NH heads, HS = C / NH head size, L layers,
//         V vocabulary, Vp padded vocabulary; inp, out: a layer's input, output; dinp, dout: their gradients.
//         Tensor parallelism (gpt/distributed.cuh): groups of t GPUs, R = N / t, Ct = C / t; without it t = 1.
// Layout  row-major; a tensor (B, T, C) is N rows of C; weights are (in, out) as in GPT-2's files.
// Types   floatX is the type in which weights and activations are stored: BF16, FP16 or FP32 (make PRECISION=...).
//         Arithmetic is FP32, and matmuls accumulate in FP32. Every reduction has one fixed order, and no kernel uses
//         floating-point atomics, so the same command gives the same bits.
// Global  device (its matmul_workspace is the Model's memory), activity, recorder (--trace), matmul_plans, world,
//         data_ranks, tensor_ranks (the processes of many GPUs), bytes_read, and two that signal handlers set:
//         stop_requested (Ctrl-C) and page_lost (a mapped file was truncated).
//
// GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
// GPT-3: Brown et al. 2020, table 2.1.

#include "gpt/files.h"        // format(), UserError, Failure; files, JSON, Log, signals
#include "gpt/options.h"      // Config, Options, flags: parse_options(), help_text(), describe()
#include "gpt/tokenizer.h"    // Tokenizer, Text: tokens to text and back
#include "gpt/checkpoint.h"   // Safetensors, WeightFiles, read_config(), run folders, --resume, Start
#include "gpt/data.h"         // Tokens: data files and their windows
#include "gpt/terminal.h"     // numbers as text, Progress, Printer, print_next()
#include "gpt/device.cuh"     // check(), device, launch(), upload(), download(), Graphs

// ==== precision ==============================================================

#if defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
constexpr DType FLOATX = DType::BF16;
#elif defined(PRECISION_FP16)
typedef __half floatX;
constexpr DType FLOATX = DType::FP16;
#else
typedef float floatX;
constexpr DType FLOATX = DType::FP32;
#endif

// The 16-bit type of --grad-dtype.
typedef std::conditional_t<FLOATX == DType::FP16, __half, __nv_bfloat16> grad16;

constexpr size_t DTYPE_SIZES[] = {4, 2, 2, 1, 1};
constexpr const char* DTYPE_NAMES[] = {"fp32", "bf16", "fp16", "e4m3", "e5m2"};
size_t size_of(DType dtype) { return DTYPE_SIZES[static_cast<int>(dtype)]; }
const char* name_of(DType dtype) { return DTYPE_NAMES[static_cast<int>(dtype)]; }

// ==== packs and warps ========================================================
// A thread loads and stores packs: 128 bits of floatX at once, the widest access of a GPU. On a CPU the compiler turns
// a loop over a pack into vector instructions. Elements are T in memory and float in registers. C is a multiple of 16,
// so a row is a whole number of packs.
//
// WARP_SIZE is 32 on a GPU. The CPU build sets it to 1: then a warp is one thread, a block is one warp, shuffles and
// barriers disappear, and each row is a plain loop over wider packs. Kernels are written for both: lanes stride by
// WARP_SIZE, threads by blockDim.x.
//
// Data that is always FP32 (gradients, optimizer states, partial sums) has packs of its own, also 128 bits wide. With
// PACK = 8 floats a lane would need two accesses, each of which uses half of every 32-byte sector.

#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif

constexpr int PACK = WARP_SIZE == 1 ? 16 : 16 / sizeof(floatX);
constexpr int PACK_FP32 = WARP_SIZE == 1 ? 16 : 16 / sizeof(float);
constexpr int BLOCK_WARPS = WARP_SIZE == 1 ? 1 : 8;
constexpr int BLOCK = BLOCK_WARPS * WARP_SIZE;          // threads of a block, unless a launcher says otherwise
constexpr int WIDE_BLOCK = WARP_SIZE == 1 ? 1 : 1024;   // threads of a block that reduces many rows or a whole array

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) RawPack { T v[N]; };

// dev/cpu overloads these two for BF16 with vector instructions.
template <typename T, int N> __device__ __forceinline__ void to_floats(float (&x)[N], const T (&v)[N]) {
    for (int k = 0; k < N; k++) x[k] = static_cast<float>(v[k]);
}
template <typename T, int N> __device__ __forceinline__ void from_floats(T (&v)[N], const float (&x)[N]) {
    for (int k = 0; k < N; k++) v[k] = static_cast<T>(x[k]);
}

template <typename T, int N> __device__ __forceinline__ void load(float (&x)[N], const T* from) {
    const RawPack<T, N> raw = *reinterpret_cast<const RawPack<T, N>*>(from);
    to_floats(x, raw.v);
}

template <typename T, int N> __device__ __forceinline__ void store(T* to, const float (&x)[N]) {
    RawPack<T, N> raw;
    from_floats(raw.v, x);
    *reinterpret_cast<RawPack<T, N>*>(to) = raw;
}

// The start of a running maximum: below every logit but finite, because (-inf) - (-inf) is NaN.
constexpr float LOWEST = -3.0e38f;
constexpr float LOG2E = 1.4426950408889634f;   // e^x = 2^(x LOG2E); a GPU has an instruction for powers of 2

constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
    for (int lane = WARP_SIZE / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

// The sum of a pack over a warp. Kernels keep one partial sum per element of the pack and add them here: independent
// sums keep a GPU's pipelines and a CPU's vector units busy.
template <int N> __device__ __forceinline__ float warp_sum(const float (&x)[N]) {
    float sum = 0;
    for (int k = 0; k < N; k++) sum += x[k];
    return warp_sum(sum);
}

__device__ __forceinline__ float warp_max(float x) {
    for (int lane = WARP_SIZE / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// Returns the sum, or maximum, over a block to all of its threads. Each warp writes its result to shared memory, and
// every thread combines those in the same order. Two sums, or two maxima, in one kernel need a barrier in between: some
// threads may still read the first call's results.
template <float (*WARP)(float), float (*COMBINE)(float, float)>
__device__ __forceinline__ float block_reduce(float x) {
    __shared__ float partial[32];
    const int warps = blockDim.x / WARP_SIZE;
    x = WARP(x);
    if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = partial[0];
    for (int w = 1; w < warps; w++) x = COMBINE(x, partial[w]);
    return x;
}

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float block_sum(float x) { return block_reduce<warp_sum, add>(x); }
__device__ __forceinline__ float block_max(float x) { return block_reduce<warp_max, larger>(x); }

// Dynamic shared memory, whose size the launch chooses.
__device__ __forceinline__ float* dynamic_shared() {
    extern __shared__ __align__(1024) float4 dynamic_shared_memory[];
    return reinterpret_cast<float*>(dynamic_shared_memory);
}

// ==== tensors ================================================================
// Kernels get a tensor as a view of a matrix in device memory, and write those that matmuls read through a Writer:
// `Writer<e4m3> w(out); w.put(i, v); w.finish()`. Without --matmul fp8 that is store(out.x + i, v).

#include "gpt/fp8.cuh"   // Out, Writer, Fp8Copy; e4m3 (activations, weights) and e5m2 (gradients)

struct Tensor {
    floatX* x = nullptr;         // (rows, columns), row-major; null: not stored, matmuls read only its FP8 copy
    size_t rows = 0, columns = 0;
    bool kept = true;            // from forward to backward, which otherwise recomputes it
    Fp8Copy fp8 = {};
    floatX* whole = nullptr;     // tensor parallelism: of a tensor of this GPU's rows, memory for all rows

    size_t size() const { return rows * columns; }

    // The destination for a kernel that writes this tensor. An FP8 copy is of all ranks' rows.
    template <typename F8> Out<F8> to() const {
        if (whole) return {x};
        return {x, fp8.current_scaling ? nullptr : static_cast<F8*>(fp8.x), fp8.scale};
    }
    void finish() const;     // called after that kernel: with current scaling, quantises x
    void quantise() const;   // called after a kernel that has no FP8 output: quantises x
};

// ==== threads and elements ===================================================
// Which elements a thread of a kernel owns.

__host__ __device__ constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// The number of blocks of a kernel that gives a warp to each of `rows`.
unsigned row_blocks(size_t rows) { return static_cast<unsigned>(ceil_div(rows, BLOCK_WARPS)); }

// In these kernels: the row of this thread's warp, and the first element of this lane.
__device__ __forceinline__ size_t warp_row() {
    return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP_SIZE;
}
__device__ __forceinline__ int lane_start() { return threadIdx.x % WARP_SIZE * PACK; }
constexpr int LANE_STRIDE = WARP_SIZE * PACK;

// First element and stride of a lane that accesses packs of FP32.
__device__ __forceinline__ int fp32_lane_start() { return threadIdx.x % WARP_SIZE * PACK_FP32; }
constexpr int FP32_STRIDE = WARP_SIZE * PACK_FP32;

// Elementwise kernels: a block owns SPAN consecutive elements, its threads stride over its packs.
constexpr size_t SPAN = 4096;
unsigned span_blocks(size_t n) { return static_cast<unsigned>(ceil_div(n, SPAN)); }

struct Span { size_t begin, end, stride; };
__device__ __forceinline__ Span my_span(size_t n, size_t pack = PACK) {
    const size_t first = blockIdx.x * SPAN, last = first + SPAN;
    return {first + threadIdx.x * pack, min(last, n), blockDim.x * pack};
}

#include "gpt/tiles.cuh"   // by ptx.cuh exp2_approx(), reciprocal_approx(); for tensor cores: instructions, tiles

// ==== gelu ===================================================================
// forward   out = activation(inp), here GELU: 0.5 * x * (1 + tanh(u)),   u = sqrt(2/pi) * (x + 0.044715 x^3)
// backward  dinp = dout * activation_derivative(inp)
// shapes    all (n) floatX, any shape flattened
// mapping   one thread per pack
// cost      bandwidth: forward reads 1, writes 1; backward reads 2, writes 1
// used      where no matmul's epilogue computes them (section "linear"); with FP8, fp8_gelu_backward
//           (gpt/fp8_kernels.cuh) computes the backward
// variants  dev/kernels/gelu.cu

constexpr float GELU_SCALE = 0.7978845608028654f;   // sqrt(2/pi)
constexpr float GELU_CUBIC = 0.044715f;

// Returns s = 1 / (1 + exp(-2u)), which is 0.5 * (1 + tanh(u)): GELU is x * s. GPT-2's approximation by tanh: Hendrycks
// and Gimpel 2016, "Gaussian Error Linear Units", section 2.
__device__ __forceinline__ float gelu_sigmoid(float x) {
    constexpr float LINEAR = -2 * LOG2E * GELU_SCALE, CUBIC = LINEAR * GELU_CUBIC;   // -2u, for a power of 2
    return reciprocal_approx(1.0f + exp2_approx(x * (LINEAR + CUBIC * (x * x))));
}

// The activation function and its derivative: another model changes these two. `make test ONLY=derivatives` compares
// them with each other.
__device__ __forceinline__ float activation(float x) { return x * gelu_sigmoid(x); }

__device__ __forceinline__ float activation_derivative(float x) {
    const float s = gelu_sigmoid(x);
    const float slope = GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);   // du/dx
    return s + 2.0f * x * s * (1.0f - s) * slope;
}

__global__ void gelu_forward_kernel(Out<e4m3> out, const floatX* inp, size_t n) {
    const Span span = my_span(n);
    Writer<e4m3> writer(out);
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        float x[PACK];
        load(x, inp + i);
        for (int k = 0; k < PACK; k++) x[k] = activation(x[k]);
        writer.put(i, x);
    }
    writer.finish();
}

__global__ void gelu_backward_kernel(Out<e5m2> dinp, const floatX* dout, const floatX* inp, size_t n) {
    const Span span = my_span(n);
    Writer<e5m2> writer(dinp);
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        float x[PACK], d[PACK];
        load(x, inp + i);
        load(d, dout + i);
        for (int k = 0; k < PACK; k++) d[k] *= activation_derivative(x[k]);
        writer.put(i, d);
    }
    writer.finish();
}

void gelu_forward(const Tensor& out, const Tensor& inp) {
    launch("gelu_forward", gelu_forward_kernel, span_blocks(inp.size()), BLOCK, 0, out.to<e4m3>(), inp.x, inp.size());
    out.finish();
}

// dinp may be dout
void gelu_backward(const Tensor& dinp, const floatX* dout, const Tensor& inp) {
    launch("gelu_backward", gelu_backward_kernel, span_blocks(inp.size()), BLOCK, 0, dinp.to<e5m2>(), dout, inp.x,
           inp.size());
    dinp.finish();
}

// Writes the maximum of |activation(x) - GELU(x)| for x from -8 to 8. One block.
__global__ void gelu_difference_kernel(float* maximum) {
    float difference = 0;
    for (int i = threadIdx.x; i <= 1024; i += blockDim.x) {
        const float x = i / 64.0f - 8;
        const float gelu = 0.5f * x * (1 + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));   // not gelu_sigmoid(x)
        difference = fmaxf(difference, fabsf(activation(x) - gelu));
    }
    difference = block_max(difference);
    if (threadIdx.x == 0) *maximum = difference;
}

// Returns whether activation() is GELU, the only function that a matmul's epilogue can compute. Measured once, so that
// a changed activation() is used everywhere. scratch (1) fp32
bool activation_is_gelu(float* scratch) {
    static const bool is_gelu = [=] {
        float maximum;
        launch("gelu_difference", gelu_difference_kernel, 1, BLOCK, 0, scratch);
        download(&maximum, scratch, sizeof(maximum));
        return maximum < 1e-4f;   // of GELU with erf: 5e-4
    }();
    return is_gelu;
}

// ==== column sums ============================================================
// Bias and LayerNorm gradients are sums over all N rows. A fixed order without atomics takes two steps:
//
//     rows 0, blocks, 2 blocks, ...     ->  block 0 sums them  ->  partials[0]  \                      (grid of rows)
//     rows 1, blocks + 1, ...           ->  block 1 sums them  ->  partials[1]   >  grad += their sum  (add_partials)
//     ...                                   ...                    ...          /
//
// order     add_partials adds in a fixed tree: a thread sums every (blockDim.x / ACROSS)-th partial, shuffles add the
//           threads of a warp, and the warps are added to the old gradient in the order 0, 1, ... The number of
//           partials depends only on N, in Hopper's attention on B and T
// mapping   add_partials: a block owns PARTIAL_COLUMNS columns; ACROSS neighbouring threads read one row of partials
// used      layernorm_backward (w, b, and the biases attprojb, fcprojb); fcb: bias_backward, with FP8
//           fp8_gelu_backward; qkvb: bias_backward, or on Hopper the attention kernels that write dqkv, one partial for
//           each 64 rows
// cost      the partials, MAX_PARTIALS rows of FP32 for 65536 rows, stay in the L2 cache

// Blocks of one warp that own SUM_COLUMNS columns, for the sums over rows in bias_backward and embedding_backward.
constexpr int SUM_COLUMNS = 256;
constexpr int SUM_PACKS = SUM_COLUMNS / FP32_STRIDE;    // of a lane
constexpr int SUM_ROWS = WARP_SIZE == 1 ? 1 : 4;        // loaded before the first of them is added

// Adds ROWS rows of a lane's columns, `stride` rows apart. On a GPU out-of-range lanes load the last columns again:
// without an `if`, all loads are in flight at once.
template <int ROWS, typename X>
__device__ __forceinline__ void add_rows(float (&sum)[SUM_PACKS][PACK_FP32], const X* row, size_t stride,
                                         int column, int columns) {
    float x[ROWS][SUM_PACKS][PACK_FP32] = {};
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < SUM_PACKS; p++)
            if (WARP_SIZE > 1 || column + p * FP32_STRIDE < columns)
                load(x[r][p], row + r * stride * columns + min(column + p * FP32_STRIDE, columns - PACK_FP32));
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < SUM_PACKS; p++)
            for (int k = 0; k < PACK_FP32; k++) sum[p][k] += x[r][p][k];
}

// Adds rows n, n + stride, ... of x (N, columns).
template <typename X>
__device__ __forceinline__ void add_rows(float (&sum)[SUM_PACKS][PACK_FP32], const X* x, size_t n, size_t N,
                                         size_t stride, int column, int columns) {
    for (; n + (SUM_ROWS - 1) * stride < N; n += SUM_ROWS * stride)
        add_rows<SUM_ROWS>(sum, x + n * columns, stride, column, columns);
    for (; n < N; n += stride) add_rows<1>(sum, x + n * columns, stride, column, columns);
}

// A position in the gradients, which are FP32 or 16-bit (--grad-dtype).
struct Grad {
    void* data;
    DType dtype;
};

// Calls f with the gradient as a typed pointer.
template <typename F> void with_type(Grad grad, F f) {
    if (grad.dtype == DType::FP32) f(static_cast<float*>(grad.data));
    else f(static_cast<grad16*>(grad.data));
}

constexpr size_t MAX_PARTIALS = 1024;
constexpr size_t ROWS_PER_PARTIAL = 16;   // with fewer rows, partials cost more than the additional blocks gain

size_t partial_blocks(size_t rows) { return std::min(MAX_PARTIALS, ceil_div(rows, ROWS_PER_PARTIAL)); }

constexpr int PARTIAL_COLUMNS = WARP_SIZE == 1 ? PACK_FP32 : 32;   // 128 bytes: a cache line
constexpr int ACROSS = PARTIAL_COLUMNS / PACK_FP32;
constexpr int MAX_GRADS = 3;

template <typename G>
__global__ void __launch_bounds__(WIDE_BLOCK)
add_partials_kernel(G* grad0, G* grad1, G* grad2, const float* partials, size_t count, size_t columns) {
    __shared__ __align__(16) float warp_sums[WIDE_BLOCK / WARP_SIZE][PARTIAL_COLUMNS];
    G* grad = blockIdx.y == 0 ? grad0 : blockIdx.y == 1 ? grad1 : grad2;
    partials += blockIdx.y * count * columns;
    const int thread = threadIdx.x, warps = blockDim.x / WARP_SIZE;
    const size_t first = static_cast<size_t>(blockIdx.x) * PARTIAL_COLUMNS, column = thread % ACROSS * PACK_FP32;
    float sum[PACK_FP32] = {}, x[PACK_FP32];
    if (first + column < columns)
        for (size_t p = thread / ACROSS; p < count; p += blockDim.x / ACROSS) {
            load(x, partials + p * columns + first + column);
            for (int k = 0; k < PACK_FP32; k++) sum[k] += x[k];
        }
    for (int k = 0; k < PACK_FP32; k++)
        for (int lane = ACROSS; lane < WARP_SIZE; lane *= 2) sum[k] += __shfl_xor_sync(FULL_WARP, sum[k], lane);
    if (thread % WARP_SIZE < ACROSS) store(&warp_sums[thread / WARP_SIZE][column], sum);
    __syncthreads();
    for (int c = thread; c < PARTIAL_COLUMNS && first + c < columns; c += blockDim.x) {
        float total = static_cast<float>(grad[first + c]);
        for (int w = 0; w < warps; w++) total += warp_sums[w][c];
        grad[first + c] = static_cast<G>(total);
    }
}

// Adds to each of up to MAX_GRADS grads (columns), all of one dtype, the sum of its partials (count, columns).
void add_partials(std::initializer_list<Grad> grads, const float* partials, size_t count, size_t columns) {
    with_type(*grads.begin(), [&](auto* first) {
        decltype(first) to[MAX_GRADS] = {};
        std::transform(grads.begin(), grads.end(), to, [&](Grad g) { return static_cast<decltype(first)>(g.data); });
        launch("add_partials", add_partials_kernel<std::remove_pointer_t<decltype(first)>>,
               dim3(ceil_div(columns, PARTIAL_COLUMNS), grads.size()), WIDE_BLOCK, 0, updated(to[0]), updated(to[1]),
               updated(to[2]), partials, count, columns);
    });
}

// ==== bias ===================================================================
// forward   out[n] += b, an epilogue of the matmul
// backward  db += sum of dout[n] over rows
// shapes    dout (N,OC) floatX | db (OC) in the type of --grad-dtype
// mapping   a block of one warp owns SUM_COLUMNS columns and every gridDim.y-th row; a lane owns packs of the columns,
//           and loads SUM_ROWS rows of them at once: with 32 blocks, 64 KiB are in flight on a multiprocessor (BF16)
// cost      bandwidth: reads N*OC once

__global__ void __launch_bounds__(WARP_SIZE)
bias_backward_kernel(float* partials, const floatX* dout, size_t N, int OC) {
    const int column = blockIdx.x * SUM_COLUMNS + fp32_lane_start();
    float sum[SUM_PACKS][PACK_FP32] = {};
    add_rows(sum, dout, blockIdx.y, N, gridDim.y, column, OC);
    for (int p = 0; p < SUM_PACKS; p++)
        if (column + p * FP32_STRIDE < OC)
            store(partials + blockIdx.y * static_cast<size_t>(OC) + column + p * FP32_STRIDE, sum[p]);
}

// partials (partial_blocks(N), OC) fp32 scratch
void bias_backward(Grad db, float* partials, const Tensor& dout) {
    const size_t N = dout.rows, OC = dout.columns, blocks = partial_blocks(N);
    launch("bias_backward", bias_backward_kernel, dim3(ceil_div(OC, SUM_COLUMNS), blocks), WARP_SIZE, 0, partials,
           dout.x, N, OC);
    add_partials({db}, partials, blocks, OC);
}

// ==== embedding ==============================================================
// forward   out[n] = wte[inp[n]] + wpe[t],   t the position of row n
// backward  dwte[v] += sum of dout[n] where inp[n] = v;   dwpe[t] += sum of dout[n] at position t
// shapes    inp (N) int32 | out, dout (N,C) floatX | wte (V,C), wpe (T,C) floatX. Row n has position (first + n) % T
// mapping   forward: one warp per row. For dwte the loader sorts the batch's positions by token: `order` lists them.
//           One token's positions, a run, may be a tenth of all, so a warp sums a chunk of chunk_size(N) sorted
//           positions (on a GPU FP32_STRIDE columns of them), whatever their tokens. It adds the runs within the chunk
//           to dwte; embedding_backward_join adds the parts of the others. All sums are in the order of `order`,
//           without atomics. dwpe: a block of one warp owns one position and SUM_COLUMNS columns
// cost      bandwidth: forward reads 2 and writes 1 of N*C, backward reads 2
// variants  dev/kernels/embedding.cu

__global__ void embedding_forward_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe,
                                         size_t N, size_t first, int T, int C) {
    const size_t n = warp_row();
    if (n >= N) return;
    const floatX* token = wte + static_cast<size_t>(inp[n]) * C;
    const floatX* position = wpe + (first + n) % T * C;
    for (int i = lane_start(); i < C; i += LANE_STRIDE) {
        float x[PACK], y[PACK];
        load(x, token + i);
        load(y, position + i);
        for (int k = 0; k < PACK; k++) x[k] += y[k];
        store(out + n * C + i, x);
    }
}

template <typename G> __device__ __forceinline__ void add_to(G* grad, const float (&x)[PACK_FP32]) {
    float old[PACK_FP32];
    load(old, grad);
    for (int k = 0; k < PACK_FP32; k++) old[k] += x[k];
    store(grad, old);
}

// Returns the positions per chunk. The plan's `partials` has room for two sums each of 2 * MAX_PARTIALS chunks.
size_t chunk_size(size_t N) { return std::max<size_t>(32, ceil_div(N, 2 * MAX_PARTIALS)); }

// Returns the token at sorted position p, -1 if p is out of range, as begin - 1 is in the first chunk.
__device__ __forceinline__ int token_at(const int* inp, const int* order, size_t p, size_t N) {
    return p < N ? inp[order[p]] : -1;
}

// Adds the runs that lie within a chunk to dwte. Of a run that crosses chunks it writes the sum of each chunk's part:
// partials[2 c + 1] where the run begins in chunk c, partials[2 c] where it began before.
template <typename G>
__global__ void __launch_bounds__(BLOCK)
embedding_backward_wte_kernel(G* dwte, float* partials, const floatX* dout, const int* inp, const int* order, size_t N,
                              size_t size, int C) {
    const size_t chunk = blockIdx.y * static_cast<size_t>(BLOCK_WARPS) + threadIdx.x / WARP_SIZE;
    const size_t begin = chunk * size, end = min(begin + size, N);
    if (begin >= N) return;
    const int before = token_at(inp, order, begin - 1, N), after = token_at(inp, order, end, N);
    for (int i = blockIdx.x * FP32_STRIDE + fp32_lane_start(); i < C; i += gridDim.x * FP32_STRIDE) {
        float sum[PACK_FP32] = {};
        int tokens[SUM_ROWS + 1];
        tokens[SUM_ROWS] = inp[order[begin]];
        for (size_t p = begin; p < end; p += SUM_ROWS) {
            float x[SUM_ROWS][PACK_FP32], old[SUM_ROWS][PACK_FP32];
            tokens[0] = tokens[SUM_ROWS];
            for (int r = 1; r <= SUM_ROWS; r++) tokens[r] = token_at(inp, order, p + r, end);   // -1: chunk's end
            for (int r = 0; r < SUM_ROWS; r++)
                load(x[r], dout + static_cast<size_t>(order[min(p + r, end - 1)]) * C + i);
            auto ends = [&](int r) { return tokens[r] != tokens[r + 1]; };
            auto crosses = [&](int r) { return tokens[r] == before || tokens[r] == after; };
#pragma unroll
            for (int r = 0; r < SUM_ROWS; r++)   // loaded together with dout
                if (ends(r) && !crosses(r)) load(old[r], dwte + static_cast<size_t>(tokens[r]) * C + i);
#pragma unroll
            for (int r = 0; r < SUM_ROWS; r++) {
                for (int k = 0; k < PACK_FP32; k++) sum[k] += x[r][k];
                if (!ends(r)) continue;
                if (crosses(r)) store(partials + (2 * chunk + (tokens[r] != before)) * C + i, sum);
                else {
                    for (int k = 0; k < PACK_FP32; k++) old[r][k] += sum[k];
                    store(dwte + static_cast<size_t>(tokens[r]) * C + i, old[r]);
                }
                for (int k = 0; k < PACK_FP32; k++) sum[k] = 0;
            }
        }
    }
}

// If a run begins in the block's chunk and crosses its end, adds the sums of the run's parts to dwte.
template <typename G>
__global__ void __launch_bounds__(WARP_SIZE)
embedding_backward_join_kernel(G* dwte, const float* partials, const int* inp, const int* order, size_t N, size_t size,
                               int C) {
    const size_t chunk = blockIdx.y, next = (chunk + 1) * size;
    const int token = token_at(inp, order, next, N);
    if (next >= N || token_at(inp, order, next - 1, N) != token ||
        token_at(inp, order, chunk * size - 1, N) == token) return;
    size_t last = chunk, found = WARP_SIZE;   // the last chunk of the run: each lane looks at another chunk
    for (; found == WARP_SIZE; last += found)
        found = __popc(__ballot_sync(FULL_WARP, token_at(inp, order, (last + 1 + threadIdx.x) * size, N) == token));
    const int column = blockIdx.x * SUM_COLUMNS + fp32_lane_start();
    float sum[SUM_PACKS][PACK_FP32] = {};
    add_rows<1>(sum, partials + (2 * chunk + 1) * C, 0, column, C);
    add_rows(sum, partials, 2 * (chunk + 1), 2 * last + 1, 2, column, C);
    for (int p = 0; p < SUM_PACKS; p++)
        if (column + p * FP32_STRIDE < C)
            add_to(dwte + static_cast<size_t>(token) * C + column + p * FP32_STRIDE, sum[p]);
}

template <typename G>
__global__ void __launch_bounds__(WARP_SIZE)
embedding_backward_wpe_kernel(G* dwpe, const floatX* dout, size_t N, size_t first, int T, int C) {
    const int column = blockIdx.x * SUM_COLUMNS + fp32_lane_start();
    const size_t t = blockIdx.y;
    float sum[SUM_PACKS][PACK_FP32] = {};
    add_rows(sum, dout, (t + T - first % T) % T, N, T, column, C);
    for (int p = 0; p < SUM_PACKS; p++)
        if (column + p * FP32_STRIDE < C) add_to(dwpe + t * C + column + p * FP32_STRIDE, sum[p]);
}

void embedding_forward(const Tensor& out, const int* inp, const floatX* wte, const floatX* wpe, size_t first, int T) {
    launch("embedding_forward", embedding_forward_kernel, row_blocks(out.rows), BLOCK, 0, out.x, inp, wte, wpe,
           out.rows, first, T, out.columns);
}

// dwte and dwpe have one dtype. order (N): see mapping. partials (chunks, 2, C) fp32 scratch
void embedding_backward(Grad dwte, Grad dwpe, float* partials, const Tensor& dout, const int* inp, const int* order,
                        size_t first, int T) {
    const size_t N = dout.rows, C = dout.columns, size = chunk_size(N), chunks = ceil_div(N, size);
    with_type(dwte, [&](auto* g) {
        using G = std::remove_pointer_t<decltype(g)>;
        launch("embedding_backward_wte", embedding_backward_wte_kernel<G>,
               dim3(WARP_SIZE == 1 ? 1 : ceil_div(C, FP32_STRIDE), row_blocks(chunks)), BLOCK, 0, updated(g), partials,
               dout.x, inp, order, N, size, C);
        launch("embedding_backward_join", embedding_backward_join_kernel<G>, dim3(ceil_div(C, SUM_COLUMNS), chunks),
               WARP_SIZE, 0, updated(g), partials, inp, order, N, size, C);
        launch("embedding_backward_wpe", embedding_backward_wpe_kernel<G>, dim3(ceil_div(C, SUM_COLUMNS), T), WARP_SIZE,
               0, updated(static_cast<G*>(dwpe.data)), dout.x, N, first, T, C);
    });
}

// ==== layernorm ==============================================================
// forward   out = xhat * w + b,   xhat = (inp - mean) * rstd,   rstd = 1 / sqrt(var + 1e-5)  per row
// backward  g = dout * w;  dinp += rstd * (g - avg(g) - xhat * avg(g * xhat))
//           dw += sum of dout * xhat,   db += sum of dout, over rows
//           dbias += sum of the new dinp over rows: the gradient of the bias of the matmul whose output was `inp`.
//           Computing it here saves reading dinp once more
// shapes    inp, out (N,C) floatX | mean, rstd (N) fp32 | w, b (C) floatX
// mapping   forward: one warp per row; a lane owns packs lane, lane + WARP_SIZE, ... and loads LAYERNORM_PACKS of them
//           at once. The row stays in shared memory for the variance and the output. Backward: a block processes rows
//           blockIdx.x, blockIdx.x + gridDim.x, ...; a thread owns packs of columns, and their sums over the block's
//           rows. If a thread has one pack (on a GPU with C up to LAYERNORM_BLOCK * PACK), all loads of a row are
//           issued at once, and the row and the sums stay in registers. Otherwise the sums are in shared memory, and
//           the second pass over a row reads it again
// cost      bandwidth: forward reads 1, writes 1 of N*C elements; backward reads 3 (dout, inp, dinp), writes 1
// source    Ba et al. 2016, "Layer Normalization"
// variants  dev/kernels/layernorm.cu

constexpr float LAYERNORM_EPS = 1e-5f;
constexpr int LAYERNORM_PACKS = WARP_SIZE == 1 ? 1 : 4;   // of a lane in forward, loaded before the first is added

// A pack as it is stored, which needs fewer registers than floats. Of words, because nvcc would keep each element of an
// array of 16-bit elements in a register of its own.
struct StoredPack {
    RawPack<uint32_t, PACK * sizeof(floatX) / sizeof(uint32_t)> words = {};

    __device__ __forceinline__ void load(const floatX* from) {
        words = *reinterpret_cast<const decltype(words)*>(from);
    }
    __device__ __forceinline__ void store(floatX* to) const { *reinterpret_cast<decltype(words)*>(to) = words; }
    __device__ __forceinline__ void unpack(float (&x)[PACK]) const {
        RawPack<floatX, PACK> pack;
        memcpy(&pack, &words, sizeof(pack));
        to_floats(x, pack.v);
    }
};

__global__ void layernorm_forward_kernel(Out<e4m3> out, float* mean, float* rstd, const floatX* inp, const floatX* w,
                                         const floatX* b, size_t N, int C) {
    const size_t n = warp_row();
    if (n >= N) return;
    Writer<e4m3, Reach::WARP> writer(out);
    floatX* row = reinterpret_cast<floatX*>(dynamic_shared()) + threadIdx.x / WARP_SIZE * C;
    float v[PACK], u[PACK], s[PACK], sum[PACK] = {}, squares[PACK] = {};
    for (int first = lane_start(); first < C; first += LAYERNORM_PACKS * LANE_STRIDE) {
        StoredPack packs[LAYERNORM_PACKS];
        for (int p = 0, i = first; p < LAYERNORM_PACKS; p++, i += LANE_STRIDE)
            if (i < C) packs[p].load(inp + n * C + i);
        for (int p = 0, i = first; p < LAYERNORM_PACKS && i < C; p++, i += LANE_STRIDE) {
            packs[p].store(row + i);   // a lane reads back only its own packs: no barrier
            packs[p].unpack(v);
            for (int k = 0; k < PACK; k++) sum[k] += v[k];
        }
    }
    const float m = warp_sum(sum) / C;
    for (int i = lane_start(); i < C; i += LANE_STRIDE) {
        load(v, row + i);
        for (int k = 0; k < PACK; k++) squares[k] += (v[k] - m) * (v[k] - m);
    }
    const float r = rsqrtf(warp_sum(squares) / C + LAYERNORM_EPS);
    for (int i = lane_start(); i < C; i += LANE_STRIDE) {
        load(v, row + i);
        load(u, w + i);
        load(s, b + i);
        for (int k = 0; k < PACK; k++) v[k] = (v[k] - m) * r * u[k] + s[k];
        writer.put(n * C + i, v);
    }
    writer.finish();
    if (threadIdx.x % WARP_SIZE == 0) mean[n] = m, rstd[n] = r;
}

constexpr int LAYERNORM_BLOCK = WARP_SIZE == 1 ? 1 : 512;   // threads of backward's block, at most

// Access to a row of C floats in shared memory by packs. The pack at column i is stored in PACK / PACK_FP32 pieces.
// Pieces of equal index are contiguous across lanes, so there are no bank conflicts.
__device__ __forceinline__ float* piece_of(float* row, int piece, int i, int C) {
    constexpr int PIECES = PACK / PACK_FP32;
    return row + piece * (C / PIECES) + i / PIECES;
}
__device__ __forceinline__ void load_pieces(float (&x)[PACK], float* row, int i, int C) {
    for (int first = 0; first < PACK; first += PACK_FP32) {
        float piece[PACK_FP32];
        load(piece, piece_of(row, first / PACK_FP32, i, C));
        for (int k = 0; k < PACK_FP32; k++) x[first + k] = piece[k];
    }
}
__device__ __forceinline__ void store_pieces(float* row, const float (&x)[PACK], int i, int C) {
    for (int first = 0; first < PACK; first += PACK_FP32) {
        float piece[PACK_FP32];
        for (int k = 0; k < PACK_FP32; k++) piece[k] = x[first + k];
        store(piece_of(row, first / PACK_FP32, i, C), piece);
    }
}

// The sums over a block's rows of a thread's columns. The first OWN are in registers, which needs a thread with one
// pack. The others are in dynamic shared memory.
enum { DW, DB, DBIAS, SUMS };
template <int OWN> struct ColumnSums {
    int C;
    float own[SUMS][PACK] = {};

    __device__ __forceinline__ float* row(int which) const { return dynamic_shared() + (which - OWN) * C; }
    __device__ __forceinline__ void clear(int i) const {
        const float zero[PACK] = {};
        for (int which = OWN; which < SUMS; which++) store_pieces(row(which), zero, i, C);
    }
    __device__ __forceinline__ void get(float (&x)[PACK], int which, int i) const {
        if (which >= OWN) return load_pieces(x, row(which), i, C);
        for (int k = 0; k < PACK; k++) x[k] = own[which][k];
    }
    __device__ __forceinline__ void add(int which, const float (&x)[PACK], int i) {
        float sum[PACK];
        get(sum, which, i);
        for (int k = 0; k < PACK; k++) sum[k] += x[k];
        if (which >= OWN) return store_pieces(row(which), sum, i, C);
        for (int k = 0; k < PACK; k++) own[which][k] = sum[k];
    }
};

// OWN: the number of column sums in registers.
//  SUMS   a thread has one pack, which stays in registers for the second pass
//     1   the same with FP8, whose amax and counts need the other registers
//     0   a thread has several packs
template <int OWN>
__global__ void __launch_bounds__(LAYERNORM_BLOCK, 2)
layernorm_backward_kernel(Out<e5m2> dinp, float* partials, const floatX* dout, const floatX* inp, const floatX* w,
                          const float* mean, const float* rstd, size_t N, int C, float inverse_C) {
    constexpr bool ONE_PACK = OWN > 0;
    __shared__ float2 warp_sums[2][LAYERNORM_BLOCK / WARP_SIZE];
    const int first = threadIdx.x * PACK, warps = blockDim.x / WARP_SIZE;
    // With ONE_PACK the compiler sees that the loops over packs have one iteration.
    const int end = ONE_PACK ? first + 1 : C, stride = ONE_PACK ? 1 : blockDim.x * PACK;
    const bool out_of_range = ONE_PACK && first >= C;
    StoredPack dout_pack, inp_pack, dinp_pack, w_pack;   // out-of-range threads add these zeros
    ColumnSums<OWN> sums{C};
    float g[PACK], x[PACK], y[PACK], d[PACK];
    for (int i = first; i < end && !out_of_range; i += stride) sums.clear(i);
    Writer<e5m2> writer(OWN == SUMS ? Out<e5m2>{dinp.x} : dinp);
    int parity = 0;
    for (size_t n = blockIdx.x; n < N; n += gridDim.x, parity ^= 1) {
        auto load_row = [&](int i) {
            if (out_of_range) return;
            dout_pack.load(dout + n * C + i);
            inp_pack.load(inp + n * C + i);
            w_pack.load(w + i);
            dinp_pack.load(dinp.x + n * C + i);
        };
        float m = 0, r = 0, sum_g[PACK] = {}, sum_gx[PACK] = {};
        for (int i = first; i < end; i += stride) {
            load_row(i);
            m = mean[n];   // after the row's loads, because nvcc's code waits at once for loads of a single address
            r = rstd[n];
            dout_pack.unpack(d);
            inp_pack.unpack(x);
            w_pack.unpack(g);
            for (int k = 0; k < PACK; k++) {
                x[k] = (x[k] - m) * r;
                g[k] *= d[k];
                sum_g[k] += g[k];
                sum_gx[k] += g[k] * x[k];
            }
            for (int k = 0; k < PACK; k++) x[k] *= d[k];
            if (OWN < SUMS && out_of_range) break;   // it has no columns in shared memory
            sums.add(DW, x, i);
            sums.add(DB, d, i);
        }
        const float2 own_sums = {warp_sum(sum_g), warp_sum(sum_gx)};
        if (threadIdx.x % WARP_SIZE == 0) warp_sums[parity][threadIdx.x / WARP_SIZE] = own_sums;
        __syncthreads();   // one per row is enough: the next row writes the other half of warp_sums
        if (ONE_PACK && !out_of_range) w_pack.load(w + first);   // from the L1 cache: there is no register for it
        float avg_g = 0, avg_gx = 0;
        for (int other = 0; other < warps; other++) {
            avg_g += warp_sums[parity][other].x;
            avg_gx += warp_sums[parity][other].y;
        }
        avg_g *= inverse_C;
        avg_gx *= inverse_C;
        for (int i = first; i < end; i += stride) {
            if (!ONE_PACK) load_row(i);
            dout_pack.unpack(d);
            inp_pack.unpack(x);
            w_pack.unpack(g);
            dinp_pack.unpack(y);
            for (int k = 0; k < PACK; k++) y[k] += r * (g[k] * d[k] - avg_g - (x[k] - m) * r * avg_gx);
            if (out_of_range) break;
            writer.put(n * C + i, y);
            sums.add(DBIAS, y, i);
        }
    }
    writer.finish();
    for (int i = first; i < end && !out_of_range; i += stride)
        for (int which = 0; which < SUMS; which++) {
            sums.get(y, which, i);
            store(partials + (static_cast<size_t>(which) * gridDim.x + blockIdx.x) * C + i, y);
        }
}

// Returns the bytes of shared memory of a block of backward. Forward needs one row of floatX for each warp.
size_t layernorm_shared(int C) { return SUMS * C * sizeof(float); }
constexpr size_t LAYERNORM_ROWS = 48 << 10;   // bytes of the rows of a block of forward, unless one row is larger

// The statistics of rows, (N) each.
struct Stats { float *mean, *rstd; };

void layernorm_forward(const Tensor& out, Stats stats, const Tensor& inp, const floatX* w, const floatX* b) {
    const size_t N = inp.rows, C = inp.columns, row_bytes = C * sizeof(floatX), fit = LAYERNORM_ROWS / row_bytes;
    const size_t warps = std::clamp(fit, size_t{1}, size_t{BLOCK_WARPS});
    launch("layernorm_forward", layernorm_forward_kernel, ceil_div(N, warps), warps * WARP_SIZE, warps * row_bytes,
           out.to<e4m3>(), stats.mean, stats.rstd, inp.x, w, b, N, C);
    out.finish();
}

// Adds to dinp, because the gradient of the residual stream flows both past the LayerNorm and through it. Without
// dbias.data it does not compute dbias. partials (3, partial_blocks(N), C) fp32 scratch
void layernorm_backward(const Tensor& dinp, Grad dw, Grad db, Grad dbias, float* partials, const Tensor& dout,
                        const Tensor& inp, const floatX* w, Stats stats) {
    const size_t N = inp.rows, C = inp.columns;
    const size_t blocks = partial_blocks(N), threads = ceil_div(C, LANE_STRIDE) * WARP_SIZE;
    auto run = [&](auto kernel, int own) {
        launch("layernorm_backward", kernel, blocks, std::min(threads, size_t{LAYERNORM_BLOCK}),
               layernorm_shared(C) / SUMS * (SUMS - own), updated(dinp.to<e5m2>()), partials, dout.x, inp.x,
               w, stats.mean, stats.rstd, N, C, 1.0f / C);
    };
    if (WARP_SIZE == 1 || threads > LAYERNORM_BLOCK) run(layernorm_backward_kernel<0>, 0);
    else if (dinp.fp8.scale && !dinp.whole) run(layernorm_backward_kernel<1>, 1);
    else run(layernorm_backward_kernel<SUMS>, SUMS);
    dinp.finish();
    if (dbias.data) add_partials({dw, db, dbias}, partials, blocks, C);
    else add_partials({dw, db}, partials, blocks, C);
}

// ==== attention ==============================================================
// forward   S = Q K^T / sqrt(HS), key j <= query i;  P = softmax(S) per query;  out = P V
//           lse = log(sum(exp(S))) is kept, from which backward recomputes P = exp(S - lse)
// backward  D = sum over d of dout * out;  dP = dout V^T;  dS = P * (dP - D)
//           dQ = dS K / sqrt(HS),   dK = dS^T Q / sqrt(HS),   dV = P^T dout
//           gradient of qkv's bias += column sums of dqkv, by bias_backward; Hopper's kernels include it
// shapes    qkv, dqkv (B,T,3,NH,HS) floatX | out, dout (B,T,NH,HS) floatX | lse, D (B,NH,T) fp32
// mapping   The T x T matrices are never stored. A block owns BLOCK_M rows (queries in forward and for dQ, keys for dK
//           and dV) and loops over the rows of the other side, BLOCK_N at a time, in shared memory:
//
//                            keys 0..15   16..31    32..47                after each tile, per query:
//               queries     +----------+----------+----------+            m'   = max(m, row maximum of S)
//               of a block  | S = QK^T |  next    |  masked  |            P    = exp(S - m')
//               (32 rows)   +----------+----------+----------+            sum  = sum * exp(m - m') + row sum of P
//                            ------ the block's loop ----->               O    = O * exp(m - m') + P V
//
//           The last division, O / sum, makes this the softmax over all keys (online softmax). In shared memory the
//           owned row is the fast index, so neighbouring threads work on neighbouring elements
// cost      compute: 2 products of T*T/2*HS per head forward, 7 backward: S and dP are computed twice, by the block
//           that owns the queries and by the one that owns the keys, which avoids atomics
// source    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax";
//           Dao 2023, "FlashAttention-2", algorithms 1 and 2
// needs     no tensor cores. This is the version to read; the next section has the fast ones

constexpr int BLOCK_M = 32;                          // rows that a block owns
constexpr int BLOCK_N = WARP_SIZE == 1 ? 32 : 16;    // rows of the other side per step
#ifdef __AVX512F__
constexpr int TILE_M = WARP_SIZE == 1 ? 8 : 4;   // a thread computes TILE_M x TILE_N elements of a product:
#else
constexpr int TILE_M = 4;                        // 4 x 4, or on a CPU as many as its vector registers hold
#endif
constexpr int TILE_N = WARP_SIZE == 1 ? 32 : 4;
constexpr int LANES = WARP_SIZE == 1 ? 32 : 1;   // neighbouring rows that a thread processes in the softmax
constexpr int ATTENTION_BLOCK = WARP_SIZE == 1 ? 1 : 128;

// The operand of one multiply-add: a float, or on a CPU a vector of floats.
#if WARP_SIZE == 1
typedef float Lane __attribute__((vector_size(PACK * sizeof(float)), aligned(sizeof(float)), may_alias));
#else
typedef float Lane;
#endif

enum class Old { DROP, ADD, RESCALE };
enum class Stored { AS_M_K, AS_K_M };

// C (M, BLOCK_M) = old C + A (M, K) * B (K, BLOCK_M), all in shared memory. A is stored as (M, K) or as (K, M), with
// row stride lda. Old::RESCALE first multiplies column n of the old C by scale[n].
template <Old OLD, Stored STORED>
__device__ void tile_matmul(float* C, const float* A, const float* B, const float* scale, int M, int K, int lda) {
    constexpr int PER_ROW = BLOCK_M / TILE_N, WIDTH = sizeof(Lane) / sizeof(float), N = TILE_N / WIDTH;
    for (int e = threadIdx.x; e < M / TILE_M * PER_ROW; e += blockDim.x) {
        const int m0 = e / PER_ROW * TILE_M, n0 = e % PER_ROW * TILE_N;
        auto row = [n0](auto* x, int r) { return reinterpret_cast<const Lane*>(x + r * BLOCK_M + n0); };
        Lane acc[TILE_M][N];
        for (int m = 0; m < TILE_M; m++)
            for (int n = 0; n < N; n++) {
                if (OLD == Old::DROP) acc[m][n] = Lane{};
                if (OLD == Old::ADD) acc[m][n] = row(C, m0 + m)[n];
                if (OLD == Old::RESCALE) acc[m][n] = row(C, m0 + m)[n] * row(scale, 0)[n];
            }
        for (int k = 0; k < K; k++) {
            Lane b[N];
            for (int n = 0; n < N; n++) b[n] = row(B, k)[n];
            for (int m = 0; m < TILE_M; m++) {
                const float a = STORED == Stored::AS_M_K ? A[(m0 + m) * lda + k] : A[k * lda + m0 + m];
                for (int n = 0; n < N; n++) acc[m][n] += a * b[n];
            }
        }
        for (int m = 0; m < TILE_M; m++)
            for (int n = 0; n < N; n++) reinterpret_cast<Lane*>(C + (m0 + m) * BLOCK_M + n0)[n] = acc[m][n];
    }
}

// load_rows loads rows [row, row + BLOCK_N) of x into tile (BLOCK_N, HS), load_columns rows [row, row + BLOCK_M) into
// tile (HS, BLOCK_M), both times scale. Out-of-range rows become 0. x is the first row of one head, `stride` its row
// stride in elements.
__device__ void load_rows(float* tile, const floatX* x, int row, int T, size_t stride, int HS, float scale) {
    for (int e = threadIdx.x * PACK; e < BLOCK_N * HS; e += blockDim.x * PACK) {
        const int r = row + e / HS;
        float v[PACK] = {};
        if (r < T) load(v, x + r * stride + e % HS);
        for (int k = 0; k < PACK; k++) tile[e + k] = v[k] * scale;
    }
}

__device__ void load_columns(float* tile, const floatX* x, int row, int T, size_t stride, int HS, float scale) {
    for (int e = threadIdx.x; e < BLOCK_M * (HS / PACK); e += blockDim.x) {
        const int r = e / (HS / PACK), d = e % (HS / PACK) * PACK;
        float v[PACK] = {};
        if (row + r < T) load(v, x + (row + r) * stride + d);
        for (int k = 0; k < PACK; k++) tile[(d + k) * BLOCK_M + r] = v[k] * scale;
    }
}

// Stores tile (HS, BLOCK_M) to rows [row, row + BLOCK_M) of x, times scale and, if per_row is given, per_row[r].
template <typename F8>
__device__ void store_columns(const Out<F8>& x, const float* tile, const float* per_row, int row, int T, size_t stride,
                              int HS, float scale) {
    Writer<F8, Reach::WARP> writer(x);
    for (int e = threadIdx.x; e < BLOCK_M * (HS / PACK); e += blockDim.x) {
        const int r = e / (HS / PACK), d = e % (HS / PACK) * PACK;
        if (row + r >= T) continue;
        const float factor = per_row ? scale * per_row[r] : scale;
        float v[PACK];
        for (int k = 0; k < PACK; k++) v[k] = tile[(d + k) * BLOCK_M + r] * factor;
        writer.put((row + r) * stride + d, v);
    }
    writer.finish();
}

__device__ void fill(float* x, float value, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}

// The first elements of a head.
struct Head {
    size_t C, stride;   // channels of the model; row stride of qkv in elements
    size_t qkv, out;    // first element of this head in (B,T,3,NH,HS) and in (B,T,NH,HS)
    size_t rows;        // first element of this head in (B,NH,T)
};

__device__ Head head_of(size_t b, size_t h, size_t NH, int T, int HS) {
    const size_t C = NH * HS;
    return {C, 3 * C, b * T * 3 * C + h * HS, b * T * C + h * HS, (b * NH + h) * T};
}
// This block's head, for grids (ceil(T / BLOCK_M), NH, B).
__device__ Head my_head(int T, int HS) {
    const size_t NH = gridDim.y, h = blockIdx.y, b = blockIdx.z;
    return head_of(b, h, NH, T, HS);
}

size_t attention_forward_shared(int HS) {
    return sizeof(float) * (2 * HS * BLOCK_M + 2 * BLOCK_N * HS + BLOCK_N * BLOCK_M + 3 * BLOCK_M);
}
size_t attention_backward_shared(int HS) {
    return sizeof(float) * (4 * HS * BLOCK_M + 2 * BLOCK_N * HS + 2 * BLOCK_N * BLOCK_M + 2 * BLOCK_M);
}

// One step of the online softmax. S (BLOCK_N keys, BLOCK_M queries) becomes P = exp(S - max) with the maximum so far.
// rescale is the factor exp(old max - new max) of earlier results; sum includes this tile.
__device__ void online_softmax(float* S, float* max, float* sum, float* rescale, int key0, int query0) {
    for (int i = threadIdx.x * LANES; i < BLOCK_M; i += blockDim.x * LANES) {
        float m[LANES], s[LANES] = {};
        for (int n = 0; n < LANES; n++) m[n] = max[i + n];
        for (int j = 0; j < BLOCK_N; j++)
            for (int n = 0; n < LANES; n++) {
                const float score = key0 + j <= query0 + i + n ? S[j * BLOCK_M + i + n] : -INFINITY;
                S[j * BLOCK_M + i + n] = score;
                m[n] = fmaxf(m[n], score);
            }
        for (int j = 0; j < BLOCK_N; j++)
            for (int n = 0; n < LANES; n++) {
                const float p = __expf(S[j * BLOCK_M + i + n] - m[n]);
                S[j * BLOCK_M + i + n] = p;
                s[n] += p;
            }
        for (int n = 0; n < LANES; n++) {
            rescale[i + n] = __expf(max[i + n] - m[n]);   // first step: exp(-inf) = 0
            sum[i + n] = sum[i + n] * rescale[i + n] + s[n];
            max[i + n] = m[n];
        }
    }
}

__global__ void attention_forward_kernel(Out<e4m3> out, float* lse, const floatX* qkv, int T, int HS) {
    const Head head = my_head(T, HS);
    const int query0 = (gridDim.x - 1 - blockIdx.x) * BLOCK_M;   // blocks with the most keys, so the longest, first
    float* Q = dynamic_shared();    // (HS, BLOCK_M)
    float* O = Q + HS * BLOCK_M;    // (HS, BLOCK_M)
    float* K = O + HS * BLOCK_M;    // (BLOCK_N, HS)
    float* V = K + BLOCK_N * HS;    // (BLOCK_N, HS)
    float* S = V + BLOCK_N * HS;    // (BLOCK_N, BLOCK_M)
    float *max = S + BLOCK_N * BLOCK_M, *sum = max + BLOCK_M, *rescale = sum + BLOCK_M;   // (BLOCK_M)

    load_columns(Q, qkv + head.qkv, query0, T, head.stride, HS, rsqrtf(static_cast<float>(HS)));
    fill(O, 0, HS * BLOCK_M);
    fill(max, -INFINITY, BLOCK_M);
    fill(sum, 0, BLOCK_M);
    for (int key0 = 0; key0 < T && key0 < query0 + BLOCK_M; key0 += BLOCK_N) {
        load_rows(K, qkv + head.qkv + head.C, key0, T, head.stride, HS, 1);
        load_rows(V, qkv + head.qkv + 2 * head.C, key0, T, head.stride, HS, 1);
        __syncthreads();
        tile_matmul<Old::DROP, Stored::AS_M_K>(S, K, Q, nullptr, BLOCK_N, HS, HS);      // S = K Q
        __syncthreads();
        online_softmax(S, max, sum, rescale, key0, query0);
        __syncthreads();
        tile_matmul<Old::RESCALE, Stored::AS_K_M>(O, V, S, rescale, HS, BLOCK_N, HS);   // O += V^T P
        __syncthreads();   // before K and V are loaded again
    }
    for (int i = threadIdx.x; i < BLOCK_M; i += blockDim.x) {
        if (query0 + i < T) lse[head.rows + query0 + i] = max[i] + logf(sum[i]);
        sum[i] = 1 / sum[i];
    }
    __syncthreads();
    store_columns(out.from(head.out), O, sum, query0, T, head.C, HS, 1);
}

// Overwrites S and dP (BLOCK_N rows, BLOCK_M columns) with P and dS. QUERIES: whether queries are rows or columns; lse
// and D are indexed by query.
enum class Queries { ROWS, COLUMNS };
template <Queries QUERIES>
__device__ void scores_backward(float* S, float* dP, const float* lse, const float* D, int row0, int column0, int T) {
    for (int e = threadIdx.x * LANES; e < BLOCK_N * BLOCK_M; e += blockDim.x * LANES) {
        float p[LANES], dS[LANES];
        for (int n = 0; n < LANES; n++) {
            const int row = e / BLOCK_M, column = e % BLOCK_M + n;   // LANES divides BLOCK_M
            const int q = QUERIES == Queries::ROWS ? row : column;
            const int query = QUERIES == Queries::ROWS ? row0 + row : column0 + column;
            const int key = QUERIES == Queries::ROWS ? column0 + column : row0 + row;
            const float all = __expf(S[e + n] - lse[q]);
            p[n] = key <= query && query < T ? all : 0.0f;
            dS[n] = p[n] * (dP[e + n] - D[q]);
        }
        for (int n = 0; n < LANES; n++) {
            S[e + n] = p[n];
            dP[e + n] = dS[n];
        }
    }
}

// Computes dQ if each block owns queries and loops over keys, or dK and dV if it owns keys and loops over queries. The
// owned ones are the columns of its tiles. X and Y are the owned rows of Q and dO, or of K and V; A and B those of the
// other side. The form for dQ runs first and computes D for both.
enum class Owns { QUERIES, KEYS };
template <Owns OWNS>
__global__ void attention_backward_kernel(Out<e5m2> dqkv, float* D_all, const floatX* dout, const floatX* qkv,
                                          const floatX* out, const float* lse_all, int T, int HS) {
    constexpr bool OWNS_QUERIES = OWNS == Owns::QUERIES;
    const Head head = my_head(T, HS);
    const int own0 = (OWNS_QUERIES ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_M;   // longest blocks first
    float* X = dynamic_shared();          // (HS, BLOCK_M)
    float* Y = X + HS * BLOCK_M;          // (HS, BLOCK_M)
    float* dX = Y + HS * BLOCK_M;         // (HS, BLOCK_M); in the form for dQ it first holds the output O
    float* dY = dX + HS * BLOCK_M;        // (HS, BLOCK_M); unused in the form for dQ
    float* A = dY + HS * BLOCK_M;         // (BLOCK_N, HS)
    float* B = A + BLOCK_N * HS;          // (BLOCK_N, HS)
    float* S = B + BLOCK_N * HS;          // (BLOCK_N, BLOCK_M)
    float* dP = S + BLOCK_N * BLOCK_M;    // (BLOCK_N, BLOCK_M)
    float *lse = dP + BLOCK_N * BLOCK_M, *D = lse + BLOCK_M;   // per query: (BLOCK_M) or (BLOCK_N)

    const float scale = rsqrtf(static_cast<float>(HS));
    const floatX *q = qkv + head.qkv, *k = q + head.C, *v = k + head.C, *dO = dout + head.out;
    auto load_statistics = [&](int query0, int count) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            lse[i] = query0 + i < T ? lse_all[head.rows + query0 + i] : 0;
            D[i] = query0 + i < T ? D_all[head.rows + query0 + i] : 0;
        }
    };
    if (OWNS_QUERIES) {
        load_columns(X, q, own0, T, head.stride, HS, scale);
        load_columns(Y, dO, own0, T, head.C, HS, 1);
        load_columns(dX, out + head.out, own0, T, head.C, HS, 1);
        __syncthreads();
        for (int i = threadIdx.x; i < BLOCK_M && own0 + i < T; i += blockDim.x) {
            float sum = 0;
            for (int d = 0; d < HS; d++) sum += Y[d * BLOCK_M + i] * dX[d * BLOCK_M + i];
            D_all[head.rows + own0 + i] = sum;   // the same thread reads it in load_statistics
        }
        load_statistics(own0, BLOCK_M);
        __syncthreads();
    } else {
        load_columns(X, k, own0, T, head.stride, HS, 1);
        load_columns(Y, v, own0, T, head.stride, HS, 1);
    }
    fill(dX, 0, 2 * HS * BLOCK_M);   // dX and dY
    const int first = OWNS_QUERIES ? 0 : own0 / BLOCK_N * BLOCK_N, end = OWNS_QUERIES ? min(T, own0 + BLOCK_M) : T;
    for (int row0 = first; row0 < end; row0 += BLOCK_N) {
        load_rows(A, OWNS_QUERIES ? k : q, row0, T, head.stride, HS, OWNS_QUERIES ? 1 : scale);
        load_rows(B, OWNS_QUERIES ? v : dO, row0, T, OWNS_QUERIES ? head.stride : head.C, HS, 1);
        if (!OWNS_QUERIES) load_statistics(row0, BLOCK_N);
        __syncthreads();
        tile_matmul<Old::DROP, Stored::AS_M_K>(S, A, X, nullptr, BLOCK_N, HS, HS);     // S = K Q, or Q K
        tile_matmul<Old::DROP, Stored::AS_M_K>(dP, B, Y, nullptr, BLOCK_N, HS, HS);    // dP = V dO, or dO V
        __syncthreads();
        scores_backward<OWNS_QUERIES ? Queries::COLUMNS : Queries::ROWS>(S, dP, lse, D, row0, own0, T);
        __syncthreads();
        tile_matmul<Old::ADD, Stored::AS_K_M>(dX, A, dP, nullptr, HS, BLOCK_N, HS);    // dQ += K^T dS, or dK += Q^T dS
        if (!OWNS_QUERIES)
            tile_matmul<Old::ADD, Stored::AS_K_M>(dY, B, S, nullptr, HS, BLOCK_N, HS);                // dV += dO^T P
        __syncthreads();
    }
    const size_t to = head.qkv + (OWNS_QUERIES ? 0 : head.C);
    store_columns(dqkv.from(to), dX, nullptr, own0, T, head.stride, HS, OWNS_QUERIES ? scale : 1);
    if (!OWNS_QUERIES) store_columns(dqkv.from(to + head.C), dY, nullptr, own0, T, head.stride, HS, 1);
}

// The shape of attention, and the memory that it needs besides inputs and outputs.
struct Heads {
    int B, T, NH, HS;
    float* lse = nullptr;              // (B,NH,T): from forward to backward
    float *D = nullptr, *partials = nullptr;   // fp32 scratch of backward: (B,NH,T), (attention_partials(B, T), 3C)
    int* counter = nullptr;            // (1), 0 before and after: of the wgmma kernels' tile scheduler
    floatX *scores = nullptr, *probs = nullptr, *dprobs = nullptr;   // (B,NH,T,T): --attention naive
    size_t past = 0;                   // sampling: earlier tokens, whose keys and values are before qkv

    bool naive() const { return probs; }
};

void attention_forward_portable(const Tensor& out, const floatX* qkv, const Heads& h) {
    launch("attention_forward", attention_forward_kernel, dim3(ceil_div(h.T, BLOCK_M), h.NH, h.B), ATTENTION_BLOCK,
           attention_forward_shared(h.HS), out.to<e4m3>(), h.lse, qkv, h.T, h.HS);
}

void attention_backward_portable(const Tensor& dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                 const Heads& h) {
    const size_t shared = attention_backward_shared(h.HS);
    const dim3 grid(ceil_div(h.T, BLOCK_M), h.NH, h.B);
    launch("attention_backward_dq", attention_backward_kernel<Owns::QUERIES>, grid, ATTENTION_BLOCK, shared,
           dqkv.to<e5m2>(), h.D, dout, qkv, out, h.lse, h.T, h.HS);
    launch("attention_backward_dkv", attention_backward_kernel<Owns::KEYS>, grid, ATTENTION_BLOCK, shared,
           dqkv.to<e5m2>(), h.D, dout, qkv, out, h.lse, h.T, h.HS);
}

// ==== attention: other kernels ===============================================
// The same function, up to rounding, in headers that a first reading can skip.
// dQ, dK    above and on Ampere: attention_backward_kernel and attention_backward_mma_kernel with Owns::QUERIES,
//           Owns::KEYS; Hopper: dq_consumer(), dkv_consumer(). dV is computed with dK
// needs     tensor cores, BF16 or FP16, and head size 64, 80, 96 or 128; otherwise the kernels above run
// variants  dev/kernels/attention.cu

#include "gpt/attention_mma.cuh"      // attention_forward_mma(), attention_backward_mma(): Ampere and later
#include "gpt/attention_wgmma.cuh"    // attention_forward_wgmma(), attention_backward_wgmma(): Hopper
#include "gpt/attention_naive.cuh"    // naive_attention_forward(), naive_attention_backward(): --attention naive
#include "gpt/attention_decode.cuh"   // attention_decode(): the last query alone, with keys and values cached

constexpr bool MAY_USE_TENSOR_CORES = FLOATX != DType::FP32 && WARP_SIZE == 32;

bool on_tensor_cores(int HS) {
    return device.tensor_cores != TensorCores::NONE && (HS == 64 || HS == 80 || HS == 96 || HS == 128);
}
bool on_wgmma(int HS) { return on_tensor_cores(HS) && device.tensor_cores == TensorCores::WGMMA; }

// Calls f with the head size as a compile-time constant. Builds without tensor cores do not compile the kernels.
template <typename F> void with_head_size(int HS, F f) {
    if constexpr (MAY_USE_TENSOR_CORES) {
        if (HS == 64) f(std::integral_constant<int, 64>());
        if (HS == 80) f(std::integral_constant<int, 80>());
        if (HS == 96) f(std::integral_constant<int, 96>());
        if (HS == 128) f(std::integral_constant<int, 128>());
    }
}

// out (N,C) = attention of qkv (N,3C), which is kept for backward with h.lse (naive: h.probs)
void attention_forward(const Tensor& out, const Tensor& qkv, const Heads& h) {
    if (h.past) return attention_decode(out.x, qkv.x - h.past * qkv.columns, h.past + 1, h.NH, h.HS);
    if (h.naive()) {
        naive_attention_forward(out.x, qkv.x, h);
        return out.quantise();
    }
    if (!on_tensor_cores(h.HS)) attention_forward_portable(out, qkv.x, h);
    else with_head_size(h.HS, [&](auto size) {
        constexpr int HEAD_SIZE = decltype(size)::value;
        if (on_wgmma(HEAD_SIZE)) attention_forward_wgmma<HEAD_SIZE>(out, qkv.x, h);
        else attention_forward_mma<HEAD_SIZE>(out, qkv.x, h);
    });
    out.finish();
}

// Returns the rows of `partials` that any kernels need: those of bias_backward, or of the wgmma kernels.
size_t attention_partials(size_t B, size_t T) { return std::max(partial_blocks(B * T), wgmma_partials(B, T)); }

// Writes dqkv and, unless dbias.data is null, adds its column sums to dbias, the gradient of qkv's bias.
void attention_backward(const Tensor& dqkv, Grad dbias, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                        const Heads& h) {
    const bool by_wgmma = !h.naive() && on_wgmma(h.HS);
    const bool by_mma = !h.naive() && on_tensor_cores(h.HS) && !by_wgmma;
    if (h.naive()) naive_attention_backward(dqkv.x, dout.x, qkv.x, h);
    else if (!on_tensor_cores(h.HS)) attention_backward_portable(dqkv, dout.x, qkv.x, out.x, h);
    else with_head_size(h.HS, [&](auto size) {
        constexpr int HEAD_SIZE = decltype(size)::value;
        if (by_wgmma) attention_backward_wgmma<HEAD_SIZE>(dqkv, dbias, dout.x, qkv.x, out.x, h);
        else attention_backward_mma<HEAD_SIZE>(dqkv.x, dout.x, qkv.x, out.x, h);
    });
    if (h.naive() || by_mma) dqkv.quantise();   // these kernels have no FP8 output
    else dqkv.finish();
    if (dbias.data && !by_wgmma) bias_backward(dbias, h.partials, dqkv);
}

#include "gpt/loss_scale.cuh"   // LossScale, the factor of all gradients: 1 unless --loss-scaling is given

// ==== cross-entropy ==========================================================
// forward   loss = log(sum over v of exp(logits[v])) - logits[target]                   per row
// backward  dlogits = (exp(logits - lse) - (v == target)) * scale, written over the logits
//           scale = loss scale / (tokens of the whole step). The loss is a mean whose divisor is known in advance, so
//           forward and backward are one kernel
// shapes    logits (N,Vp) floatX, of which V are real | targets (N) int32 | losses (N) fp32
//           a target of -1 marks a row without one: its loss and gradient are 0
// mapping   one block per row: a running maximum per thread, a running sum per element of its pack, then a reduction.
//           If the rows of two blocks fit in shared memory, cp.async copies them there, FETCH_AHEAD packs of a thread
//           ahead of its sums: 64 KiB per block are in flight (BF16). The second pass then reads shared memory
// cost      bandwidth: reads and writes N*Vp once; reads it twice where rows do not fit
// variants  dev/kernels/cross_entropy.cu

enum class Want { LOSS, LOSS_AND_GRADIENT };

constexpr int CROSS_ENTROPY_BLOCK = WARP_SIZE == 1 ? 1 : 512;
constexpr int FETCH_AHEAD = 8;

// Sets logits of the vocabulary's padding, among i ... i + PACK - 1, to -infinity: their exp is 0.
__device__ __forceinline__ void mask_padding(float (&x)[PACK], int i, int V) {
    if (i + PACK <= V) return;
    for (int k = 0; k < PACK; k++) x[k] = i + k < V ? x[k] : -INFINITY;
}

enum class SecondPass { FROM_SHARED, FROM_MEMORY };   // where the gradient's pass over the logits reads them

template <Want WANT>
__global__ void __launch_bounds__(CROSS_ENTROPY_BLOCK, 2)
cross_entropy_kernel(floatX* logits, float* losses, const int* targets, float inverse_tokens,
                     const LossScale* loss_scale, int V, int Vp, SecondPass from) {
    const bool keep = HAS_MMA && WANT == Want::LOSS_AND_GRADIENT && from == SecondPass::FROM_SHARED;
    const size_t n = blockIdx.x;
    const int target = targets[n], first = threadIdx.x * PACK, stride = blockDim.x * PACK;
    floatX *row = logits + n * Vp, *kept = reinterpret_cast<floatX*>(dynamic_shared());
    auto fetch = [&](int i) {   // a thread reads back only its own packs: no barrier
        if (i < Vp) cp_async(kept + i, row + i, true);
        cp_async_commit();
    };
    for (int p = 0; keep && p < FETCH_AHEAD; p++) fetch(first + p * stride);
    // Loaded here, so that no thread waits for them between the passes.
    const float scale = WANT == Want::LOSS ? 0 : inverse_tokens * loss_scale->scale;
    const floatX target_logit = row[target < 0 ? 0 : target];
    float x[PACK], max = LOWEST, sum[PACK] = {};   // max: times LOG2E
    for (int i = first; i < Vp; i += stride) {
        if (keep) {
            fetch(i + FETCH_AHEAD * stride);
            cp_async_wait<FETCH_AHEAD>();
            load(x, kept + i);
        } else load(x, row + i);
        mask_padding(x, i, V);
        float pack_max = x[0];
        for (int k = 1; k < PACK; k++) pack_max = fmaxf(pack_max, x[k]);
        if (pack_max * LOG2E > max) {   // rare after the first packs
            const float shrink = exp2_approx(max - pack_max * LOG2E);
            for (int k = 0; k < PACK; k++) sum[k] *= shrink;
            max = pack_max * LOG2E;
        }
        for (int k = 0; k < PACK; k++) sum[k] += exp2_approx(x[k] * LOG2E - max);
    }
    float my_sum = 0;
    for (int k = 0; k < PACK; k++) my_sum += sum[k];
    const float row_max = block_max(max), row_sum = block_sum(my_sum * exp2_approx(max - row_max));
    if (threadIdx.x == 0)
        losses[n] = target < 0 ? 0.0f : row_max / LOG2E + logf(row_sum) - static_cast<float>(target_logit);
    if (WANT == Want::LOSS) return;
    const float factor = target < 0 ? 0.0f : scale / row_sum;
    for (int i = first; i < Vp; i += stride) {
        load(x, keep ? kept + i : row + i);
        mask_padding(x, i, V);
        for (int k = 0; k < PACK; k++) x[k] = exp2_approx(x[k] * LOG2E - row_max) * factor;
        if (target >= i && target < i + PACK)
            for (int k = 0; k < PACK; k++) x[k] -= i + k == target ? scale : 0.0f;
        store(row + i, x);
    }
}

// total (fp64) += sum of losses (n), by one block in FP32 and in a fixed order
__global__ void __launch_bounds__(WIDE_BLOCK) add_losses_kernel(double* total, const float* losses, size_t n) {
    float sum = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

template <Want WANT>
void cross_entropy(const Tensor& logits, float* losses, const int* targets, float inverse_tokens,
                   const LossScale* loss_scale, int V) {
    const size_t Vp = logits.columns, row_bytes = Vp * sizeof(floatX), reduction_bytes = 2 * 32 * sizeof(float);
    const size_t block_bytes = row_bytes + reduction_bytes + device.properties.reservedSharedMemPerBlock;
    // Two blocks fit on a multiprocessor: one loads while the other stores. cp.async needs compute capability 8.0. On a
    // CPU the row is in the cache.
    const bool fits = WARP_SIZE > 1 && WANT == Want::LOSS_AND_GRADIENT && device.properties.major != 7 &&
                      2 * block_bytes <= device.properties.sharedMemPerMultiprocessor;
    launch("cross_entropy", cross_entropy_kernel<WANT>, logits.rows, CROSS_ENTROPY_BLOCK, fits ? row_bytes : 0,
           updated(logits.x), losses, targets, inverse_tokens, loss_scale, V, Vp,
           fits ? SecondPass::FROM_SHARED : SecondPass::FROM_MEMORY);
}

void add_losses(double* total, const float* losses, size_t n) {
    launch("add_losses", add_losses_kernel, 1, WIDE_BLOCK, 0, updated(total), losses, n);
}

// ==== gradient norm ==========================================================
// forward   norm = sqrt(sum of grad^2) / loss scale, over all gradients; then Step::factor
// shapes    grads fp32 or 16 bits, see GradientRanges | partials (blocks) fp32
// mapping   blocks stride over spans of SPAN elements, and each writes a partial sum; one block adds those
// cost      bandwidth: reads each gradient once
// source    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks"; clipping as in PyTorch's
//           clip_grad_norm_
// variants  dev/kernels/norm.cu

// What a step of the optimizer needs, in device memory, where a replayed CUDA graph finds the current step's.
struct Step {                           // floats only
    float lr, beta1, beta2, eps, weight_decay;
    float clip;                          // largest norm; 0: no clipping
    float correction1, correction2;      // 1 - beta^t
    float norm = 0;                      // of the gradients
    float factor = 0;                    // of the gradients: clipping and 1 / loss scale; 0 skips the step
    float max_z = 0;                     // --skip-spikes; 0: off
    float tokens = 0;                    // of the step
};

// Sets *step by a kernel, whose arguments are copied at launch. A copy from host memory might synchronise.
__global__ void set_step_kernel(Step* step, Step values) { *step = values; }
void set_step(Step* step, const Step& values) { launch("set_step", set_step_kernel, 1, 1, 0, step, values); }

#include "gpt/spikes.cuh"   // skip_spike(): --skip-spikes; z-scores of loss and norm

// Gradients whose squares are summed by `blocks` blocks: n_common, and n of each of `layers` layers, `stride` elements
// from layer to layer.
struct GradientRanges {
    Grad common;
    size_t n_common;
    Grad layer0 = {};
    size_t n = 0;
    unsigned layers = 0;
    size_t stride = 0, blocks = 1;
};

constexpr size_t NORM_BLOCKS = 1024;   // of a launch, at most

template <typename G>
__global__ void norm_partials_kernel(float* partials, const G* common, size_t n_common, const G* layer0, size_t n,
                                     unsigned layers, size_t stride) {
    float sums[PACK_FP32] = {}, x[PACK_FP32];
    const unsigned outer = ceil_div(n_common, SPAN), each = ceil_div(n, SPAN);   // spans: of `common`, of a layer
    for (unsigned span = blockIdx.x; span < outer + each * layers; span += gridDim.x) {
        const bool in_layer = span >= outer;
        const G* range = in_layer ? layer0 + (span - outer) / each * stride : common;
        const size_t first = (in_layer ? (span - outer) % each : span) * SPAN, end = in_layer ? n : n_common;
        const size_t last = first + SPAN < end ? first + SPAN : end;
        for (size_t i = first + threadIdx.x * PACK_FP32; i < last; i += static_cast<size_t>(blockDim.x) * PACK_FP32) {
            load(x, range + i);
            for (int k = 0; k < PACK_FP32; k++) sums[k] += x[k] * x[k];
        }
    }
    float sum = 0;
    for (int k = 0; k < PACK_FP32; k++) sum += sums[k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void norm_kernel(Step* step, LossScale* loss_scale, const float* partials, int count) {
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x > 0) return;
    const float scaled = sqrtf(sum), norm = scaled / loss_scale->scale;
    const float clipping = step->clip > 0 ? fminf(1.0f, step->clip / (norm + 1e-6f)) : 1.0f;
    step->norm = norm;
    step->factor = update_loss_scale(loss_scale, scaled) * clipping;
}

size_t norm_blocks(size_t n_common, size_t n, size_t layers) {
    return std::min(NORM_BLOCKS, ceil_div(n_common, SPAN) + layers * ceil_div(n, SPAN));
}

void norm_partials(float* partials, const GradientRanges& r) {
    with_type(r.common, [&](auto* g) {
        launch("norm_partials", norm_partials_kernel<std::remove_pointer_t<decltype(g)>>, r.blocks, BLOCK, 0, partials,
               g, r.n_common, static_cast<decltype(g)>(r.layer0.data), r.n, r.layers, r.stride);
    });
}

// spikes: only with --skip-spikes; then partials (count + 1) ends with the loss.
void gradient_norm(Step* step, LossScale* loss_scale, const float* partials, size_t count, Spikes* spikes = nullptr) {
    launch("norm", norm_kernel, 1, BLOCK, 0, updated(step), updated(loss_scale), partials, count);
    if (spikes) skip_spike(step, loss_scale, spikes, partials + count);
}

// ==== adamw ==================================================================
// update    g = grad * Step::factor, which is 1 / loss scale * min(1, clip / (norm + 1e-6))
//           m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//           w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w)
// shapes    (n): master = w, m, v fp32 | weights = w rounded to floatX | grads fp32 or 16 bits | (1): unchanged
// mapping   one launch for all tensors of all layers: grid.y is the layer, at a constant stride. In a layer the first
//           `decayed` elements have weight decay
// cost      bandwidth. BF16 with FP32 gradients: reads 16, writes 18 bytes per parameter; FP32: 16 and 16. The kernel
//           also sets the gradients to 0, as the next step adds to them
// source    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2
// variants  dev/kernels/adamw.cu

// Elements from one layer to the next.
struct Strides { size_t weights, master, grads, m, v; };

struct MatrixView { size_t rows, columns, stride; };   // stride: elements from one row to the next

// Parameters that one update changes: n of each of `layers` layers, the first `decayed` with weight decay.
struct Slice {
    floatX* weights;
    float* master;               // in FP32 builds the weights; null without master weights
    Grad grads;
    float *m, *v;                // v: null for Muon
    size_t n, decayed;
    unsigned layers = 1;
    Strides strides = {};
    MatrixView matrix = {};      // Muon: one matrix of one layer
};

// M is float. Without master weights it is floatX, and `master` is the weights; then the kernel adds to *unchanged the
// number of weights that changed in FP32 but not after rounding to floatX.
template <typename G, typename M>
__global__ void adamw_kernel(floatX* weights, M* master, G* grads, float* m, float* v, const Step* step, size_t decayed,
                             size_t n, Strides strides, unsigned long long* unchanged) {
    constexpr bool MASTER_IS_FP32 = std::is_same_v<M, float>;
    float lost = 0;   // updates lost to rounding: a count of at most SPAN, exact in FP32
    const size_t layer = blockIdx.y;
    weights += layer * strides.weights;
    master += layer * strides.master;
    grads += layer * strides.grads;
    m += layer * strides.m;
    v += layer * strides.v;
    const Step a = *step;
    const float zero[PACK_FP32] = {};
    const Span span = my_span(n, PACK_FP32);
    if (a.factor == 0) {   // the step is skipped
        for (size_t i = span.begin; i < span.end; i += span.stride) store(grads + i, zero);
        return;
    }
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        const float decay = i < decayed ? a.weight_decay : 0.0f;
        float w[PACK_FP32], g[PACK_FP32], m1[PACK_FP32], m2[PACK_FP32];
        load(w, master + i);
        load(g, grads + i);
        load(m1, m + i);
        load(m2, v + i);
        for (int k = 0; k < PACK_FP32; k++) {
            const float before = w[k];
            g[k] *= a.factor;
            m1[k] = a.beta1 * m1[k] + (1 - a.beta1) * g[k];
            m2[k] = a.beta2 * m2[k] + (1 - a.beta2) * g[k] * g[k];
            w[k] -= a.lr * (m1[k] / a.correction1 / (sqrtf(m2[k] / a.correction2) + a.eps) + decay * w[k]);
            if (!MASTER_IS_FP32) lost += w[k] != before && static_cast<float>(static_cast<M>(w[k])) == before;
        }
        store(m + i, m1);
        store(v + i, m2);
        store(master + i, w);
        if (static_cast<const void*>(weights) != master) store(weights + i, w);   // rounded to floatX
        store(grads + i, zero);
    }
    if (MASTER_IS_FP32) return;
    lost = block_sum(lost);
    if (threadIdx.x == 0) atomicAdd(unchanged, static_cast<unsigned long long>(lost));
}

void adamw(const Slice& s, const Step* step, unsigned long long* unchanged) {
    with_type(s.grads, [&](auto* g) {
        auto update = [&](auto* exact) {
            launch("adamw", adamw_kernel<std::remove_pointer_t<decltype(g)>, std::remove_pointer_t<decltype(exact)>>,
                   dim3(span_blocks(s.n), s.layers), BLOCK, 0, s.weights, exact, g, s.m, s.v, step, s.decayed, s.n,
                   s.strides, unchanged);
        };
        if (s.master) update(s.master);
        else update(s.weights);
    });
}

#include "gpt/matmul.cuh"        // Product, matmul(), matmul_or(): cuBLASLt, with bias and GELU as epilogues
#include "gpt/fp8_kernels.cuh"   // Tensor::finish(), Tensor::quantise(), read_fp8(), fp8_gelu_backward()
#include "gpt/launch.cuh"        // the processes of many GPUs: world, sum_of_all(), start_processes(), WatchdogPause
#include "gpt/collectives.cuh"   // over_gpus(); tensor parallelism: whole(), gather(), start_sum(), add_residual()

// ==== linear =================================================================
// forward   out = inp w + b, or out = inp w + b + add: the residual addition, rounded once
// backward  dinp = dout w^T,   dw += inp^T dout,   db += sum of dout over rows
// shapes    inp (N,C), w (C,OC), out, add (N,OC) floatX | b (OC) floatX | dw, db as --grad-dtype says
// many GPUs gather(), start_sum() and their neighbours do something only with tensor parallelism
// cost      compute: 2*N*C*OC FLOPs each
// variants  dev/kernels/matmul.cu

// out = A B, in FP8 if both have such copies
Product product_of(void* out, const Tensor& a, Op a_op, const Tensor& b, Op b_op, DType type = FLOATX,
                   Into into = Into::ASSIGN) {
    const auto [M, K] = a_op == Op::AS_IS ? std::pair(a.rows, a.columns) : std::pair(a.columns, a.rows);
    const size_t N = b_op == Op::AS_IS ? b.columns : b.rows;
    Product p = {out, a.x, b.x, {M, N, K, a_op, b_op, type, into, Epilogue::NONE}};
    if (a.fp8.x && b.fp8.x) read_fp8(p, a, b);
    return p;
}

// out = inp w + b + add. b and add may be null; add must not be out.
void matmul_forward(const Tensor& out, const Tensor& inp, const Tensor& w, const floatX* b, const floatX* add) {
    Product p = product_of(out.x, inp, Op::AS_IS, w, Op::AS_IS);
    p.shape.epilogue = b ? Epilogue::BIAS : Epilogue::NONE;
    p.bias = b;
    p.shape.into = add ? Into::ADD : Into::ASSIGN;
    p.add = add;
    matmul(p);
}

void matmul_backward_input(const Tensor& dinp, const Tensor& dout, const Tensor& w) {
    matmul(product_of(dinp.x, dout, Op::AS_IS, w, Op::TRANSPOSED));
}

void matmul_backward_weight(Grad dw, const Tensor& dout, const Tensor& inp) {
    transpose_fp8(inp, dout);
    matmul(product_of(dw.data, inp, Op::TRANSPOSED, dout, Op::AS_IS, dw.dtype, Into::ADD));
}

// out = inp w + b + add. With tensor parallelism, a sum needs both b and add.
void linear_forward(const Tensor& out, const Tensor& inp, const Tensor& w, const floatX* b, const Tensor& add = {}) {
    const Tensor all = gather(inp);
    if (!out.whole) return matmul_forward(out, all, w, b, add.x);
    matmul_forward(whole(out), all, w, nullptr, nullptr);   // this GPU's summand
    start_sum(out);
    await_sum(out);
    add_residual(out, add, b);
}

// pre = inp w + b,  out = GELU(pre). One matmul computes both if tuning has found that faster and nothing is
// recomputed: a recomputed GELU must get the same bits.
void linear_gelu_forward(const Tensor& out, const Tensor& pre, const Tensor& inp, const Tensor& w, const floatX* b) {
    const Tensor all = gather(inp);
    auto separate = [=] {
        matmul_forward(pre, all, w, b, nullptr);
        gelu_forward(out, pre);
    };
    if (!out.kept) return separate();
    Product p = product_of(out.x, all, Op::AS_IS, w, Op::AS_IS);
    p.shape.epilogue = Epilogue::BIAS_GELU;
    p.bias = b;
    p.second_out = pre.x;
    matmul_or(p, separate);
}

// dinp = dout w^T,  dw += inp^T dout. The communication of tensor parallelism overlaps one product each.
void linear_backward(const Tensor& dinp, Grad dw, const Tensor& dout, const Tensor& inp, const Tensor& w) {
    const Tensor all = gather(dout), all_inp = start_gather(for_weights(inp));
    matmul_backward_input(whole(dinp), all, w);
    await_gather(all_inp, inp);
    start_sum(dinp);
    matmul_backward_weight(dw, all, all_inp);
    await_sum(dinp);
}

// The same for inp = GELU(pre): dpre = dout w^T * GELU'(pre),  dw += inp^T dout,  db += sum of dpre over rows, as pre
// includes this bias. partials (partial_blocks(N), C) fp32 scratch
void linear_gelu_backward(const Tensor& dpre, Grad dw, Grad db, float* partials, const Tensor& dout, const Tensor& inp,
                          const Tensor& w, const Tensor& pre) {
    const Tensor all = gather(dout);
    matmul_backward_weight(dw, all, for_weights(inp));
    if (dpre.fp8.x) {   // cuBLASLt's epilogue cannot write it
        matmul_backward_input(dpre, all, w);
        return fp8_gelu_backward(dpre, db, partials, dpre.x, pre.x);
    }
    auto separate = [=] {
        matmul_backward_input(dpre, all, w);
        gelu_backward(dpre, dpre.x, pre);
    };
    Product p = product_of(dpre.x, all, Op::AS_IS, w, Op::TRANSPOSED);
    p.shape.epilogue = Epilogue::GELU_BACKWARD;
    p.pre_activation = pre.x;
    matmul_or(p, separate);
    bias_backward(db, partials, dpre);
}

#include "gpt/muon.cuh"   // muon(): --optimizer muon

// ==== model: sizes ===========================================================

struct Preset { const char* name; Config config; };

constexpr int GPT2_VOCAB = 50257;

// GPT-2: Radford et al. 2019, table 2. GPT-3: Brown et al. 2020, table 2.1, with numbers of heads that divide the
// channels. The last four are for `plan`: GPT-2 models with the sizes of Llama.
const Preset PRESETS[] = {
    {"gpt2",        {12, 12, 768, 1024, GPT2_VOCAB}},   {"gpt2-medium", {24, 16, 1024, 1024, GPT2_VOCAB}},
    {"gpt2-large",  {36, 20, 1280, 1024, GPT2_VOCAB}},  {"gpt2-xl",     {48, 25, 1600, 1024, GPT2_VOCAB}},
    {"gpt3-125m",   {12, 12, 768, 2048, GPT2_VOCAB}},   {"gpt3-350m",   {24, 16, 1024, 2048, GPT2_VOCAB}},
    {"gpt3-760m",   {24, 16, 1536, 2048, GPT2_VOCAB}},  {"gpt3-1.3b",   {24, 16, 2048, 2048, GPT2_VOCAB}},
    {"gpt3-2.7b",   {32, 32, 2560, 2048, GPT2_VOCAB}},  {"gpt3-6.7b",   {32, 32, 4096, 2048, GPT2_VOCAB}},
    {"gpt3-13b",    {40, 40, 5120, 2048, GPT2_VOCAB}},  {"1b",          {16, 16, 2048, 2048, GPT2_VOCAB}},
    {"7b",          {32, 32, 4096, 2048, GPT2_VOCAB}},  {"70b",         {80, 64, 8192, 4096, 128256}},
    {"405b",        {126, 128, 16384, 8192, 128256}},
};

enum class Purpose { TRAINING, INFERENCE, SAMPLING };

// The head (lnf times wte) processes this many rows at a time, which bounds the memory of the logits. Each part reads
// and writes the whole gradient of wte; with fewer rows that would take longer than the matmul, which hides it. In
// training all rows are processed at once if the GPU has enough memory: training_head_rows() in gpt/plan.cuh.
constexpr size_t HEAD_ROWS = 16384;

constexpr size_t MAX_ROWS = size_t{1} << 31;   // row indices are int32, and a grid has at most 2^31 - 1 blocks

// Everything that the memory of a run depends on.
struct Setup {
    Config config;
    int B, T;   // micro-batch
    Recompute recompute;
    DType grad_dtype;
    Purpose purpose;
    size_t head_rows = HEAD_ROWS;
    Attention attention = Attention::FLASH;
    DType precision = FLOATX;   // `plan` may assume one that is not the build's
    bool on_gpu = !device.is_cpu();
    MatmulIn matmul = MatmulIn::FLOATX;
    Fp8Scaling fp8_scaling = Fp8Scaling::DELAYED;
    Fp8Accumulation fp8_accumulation = Fp8Accumulation::FP32;
    MasterWeights master_weights = MasterWeights::FP32;
    Optimizer optimizer = Optimizer::ADAMW;

    int gpus = 1, tensor = 1, zero = 0;   // see gpt/distributed.cuh
    size_t rank = 0;                      // no size depends on it

    size_t N() const { return static_cast<size_t>(B) * T; }
    size_t rows() const { return N() / tensor; }       // R
    int data() const { return gpus / tensor; }         // tensor groups, each with micro-batches of its own
    int heads() const { return config.heads / tensor; }
    size_t logits_rows() const { return std::min(rows(), head_rows); }
};

// ==== model: parameters ======================================================
// One row per parameter tensor, under Hugging Face's names. Weights, gradients, master weights and the two moments are
// five blocks of memory with the same layout (gpt/sharding.cuh).

// Storage of a tensor of all layers. Layer l uses copy l % copies.
struct BufferBase {
    char* data = nullptr;
    size_t copies = 1, layer_bytes = 0;
    bool kept = true;   // an activation, from forward to backward
    char* of(size_t layer) const { return data + layer % copies * layer_bytes; }
};

template <typename T> struct Buffer : BufferBase {
    T* operator()(size_t layer = 0) const { return reinterpret_cast<T*>(of(layer)); }
};

struct GradBuffer : BufferBase {
    DType dtype = DType::FP32;
    Grad operator()(size_t layer = 0) const { return {of(layer), dtype}; }
};

template <typename Kind> struct Parameters {
    Kind wte, wpe, qkvw, attprojw, fcw, fcprojw;
    Kind ln1w, ln1b, qkvb, attprojb, ln2w, ln2b, fcb, fcprojb, lnfw, lnfb;
};

// A tensor rank's part of a tensor: of each sequence of `ranks` runs of `run` elements, the run number `rank`.
struct TensorPart {
    size_t run = 1, ranks = 1, rank = 0;
    // The index in the whole tensor of the part's element i.
    __host__ __device__ size_t whole(size_t i) const { return (i / run * ranks + rank) * run + i % run; }
    // Calls visit(i, n) for the contiguous pieces of elements first ... first + count - 1: n elements from i on.
    template <typename F> void for_each_run(size_t first, size_t count, F visit) const {
        for (size_t i = first, end = first + count, n; i < end; i += n) {
            n = std::min(end - i, run - i % run);
            visit(i, n);
        }
    }
};

enum class Init { ZERO, ONE, NORMAL, NORMAL_RESIDUAL };   // NORMAL_RESIDUAL: std / sqrt(2L)
constexpr float INIT_STD = 0.02f;

struct ParameterRow {
    BufferBase* tensor;
    const char* name;            // of Hugging Face; %d is the layer
    std::vector<size_t> shape;   // in files; in memory wte has padded_vocab() rows
    size_t copies;               // layers, or 1
    Init init;
    size_t strips = 0;           // contiguous pieces that are each divided among the tensor ranks; 0: not split
    size_t elements = 0;         // of one copy, in this rank's memory
    TensorPart part = {};        // which ones
    size_t offset = 0;           // elements from the start of its group; in group 0 the copies are contiguous
    size_t number = 0;           // elements of all rows before this one: seeds init

    bool is_split() const { return strips > 0; }
    bool decays() const { return shape.size() >= 2; }
    size_t file_elements() const { return shape[0] * (shape.size() > 1 ? shape[1] : 1); }
    std::string name_of_layer(size_t layer) const { return format(name, static_cast<int>(layer)); }
};

template <typename Kind>
std::vector<ParameterRow> parameter_table(Parameters<Kind>& p, const Config& c, size_t tensor = 1, size_t rank = 0) {
    const size_t C = c.channels, L = c.layers, V = c.vocab, T = c.context;
    std::vector<ParameterRow> rows = {
        {&p.wte,      "wte.weight",              {V, C},     1, Init::NORMAL},
        {&p.wpe,      "wpe.weight",              {T, C},     1, Init::NORMAL},
        {&p.qkvw,     "h.%d.attn.c_attn.weight", {C, 3 * C}, L, Init::NORMAL, 3 * C},      // columns of Q, of K, of V
        {&p.attprojw, "h.%d.attn.c_proj.weight", {C, C},     L, Init::NORMAL_RESIDUAL, 1}, // rows
        {&p.fcw,      "h.%d.mlp.c_fc.weight",    {C, 4 * C}, L, Init::NORMAL, C},          // columns
        {&p.fcprojw,  "h.%d.mlp.c_proj.weight",  {4 * C, C}, L, Init::NORMAL_RESIDUAL, 1}, // rows
        {&p.ln1w,     "h.%d.ln_1.weight",        {C},        L, Init::ONE},
        {&p.ln1b,     "h.%d.ln_1.bias",          {C},        L, Init::ZERO},
        {&p.qkvb,     "h.%d.attn.c_attn.bias",   {3 * C},    L, Init::ZERO, 3},
        {&p.attprojb, "h.%d.attn.c_proj.bias",   {C},        L, Init::ZERO},
        {&p.ln2w,     "h.%d.ln_2.weight",        {C},        L, Init::ONE},
        {&p.ln2b,     "h.%d.ln_2.bias",          {C},        L, Init::ZERO},
        {&p.fcb,      "h.%d.mlp.c_fc.bias",      {4 * C},    L, Init::ZERO, 1},
        {&p.fcprojb,  "h.%d.mlp.c_proj.bias",    {C},        L, Init::ZERO},
        {&p.lnfw,     "ln_f.weight",             {C},        1, Init::ONE},
        {&p.lnfb,     "ln_f.bias",               {C},        1, Init::ZERO},
    };
    size_t whole = 0, split = 0, number = 0;
    for (ParameterRow& row : rows) {
        const size_t all = row.tensor == &p.wte ? c.padded_vocab() * C : row.file_elements();
        row.elements = row.is_split() ? all / tensor : all;
        row.part = {row.elements};
        if (row.is_split() && tensor > 1) row.part = {row.elements / row.strips, tensor, rank % tensor};
        size_t& end = row.is_split() ? split : whole;
        row.offset = end;
        end += row.elements * (row.is_split() ? 1 : row.copies);
        row.number = number;
        number += all * row.copies;
    }
    return rows;
}

// The table alone, whose tensors have no memory.
std::vector<ParameterRow> parameter_table(const Config& c, size_t tensor = 1, size_t rank = 0) {
    static Parameters<BufferBase> nowhere;
    return parameter_table(nowhere, c, tensor, rank);
}

struct ParameterCount {
    size_t real;       // without the vocabulary's padding, as in the model's name
    size_t matmul;     // of those, the weights that every token is multiplied by: all matrices but wpe
};

ParameterCount count_parameters(const Config& c) {
    ParameterCount n = {};
    for (const ParameterRow& row : parameter_table(c)) {
        n.real += row.file_elements() * row.copies;
        if (row.decays() && strcmp(row.name, "wpe.weight") != 0) n.matmul += row.file_elements() * row.copies;
    }
    return n;
}

#include "gpt/sharding.cuh"   // Layout: where each parameter is in a block of memory, and each GPU's part of it

// ==== model: activations and workspace =======================================
// One row per tensor: the shape of one copy, and the number of copies (one for each layer, or one for all).

struct Activations {
    // Kept from forward to backward, or recomputed. res1, res2: the residual stream before attention, before the MLP.
    Buffer<floatX> res1, ln1, qkv, att, res2, ln2, fc, gelu, scores, probs;
    Buffer<float> ln1_mean, ln1_rstd, lse, ln2_mean, ln2_rstd;
    // One copy for the model. resf: the residual stream after the last layer.
    Buffer<floatX> resf, lnf, logits;
    Buffer<float> lnf_mean, lnf_rstd, losses;
    // Tensor parallelism: all rows of ln1 or ln2; this rank's summand of all rows of attproj or fcproj.
    Buffer<floatX> gathered, summand;
    // Gradients of activations, of one layer at a time.
    Buffer<floatX> dres, dln, dqkv, datt, dfc, dprobs;
    Buffer<float> att_d;
    // Copies in FP8: see add_fp8(). `transposed` holds the two operands of a weight's gradient.
    Buffer<char> ln1_8, att_8, ln2_8, gelu_8, dqkv_8, dres_8, dfc_8, weights_8, transposed;
    Buffer<Fp8Scale> fp8_scales;
    Buffer<float> fp8_amaxes;
    // Workspace. Muon also uses norm_partials, whose last element is for the loss, checkpoints of several GPUs
    // partials. Batches: one in use, one in transfer, one for evaluation and sampling.
    Buffer<float> partials, norm_partials;
    Buffer<Step> step;
    Buffer<floatX> muon;
    Buffer<LossScale> loss_scale;
    Buffer<Spikes> spikes;
    Buffer<double> loss;
    Buffer<int> inputs, targets, order, counter;
    Buffer<unsigned long long> unchanged;
    Buffer<char> matmul_workspace;
};

enum class Category { WEIGHTS, GRADIENTS, MASTER, ADAM_M, ADAM_V, BUFFERS, ACTIVATIONS, WORKSPACE, CUDA };
constexpr const char* CATEGORY_NAMES[] = {"weights", "gradients",   "master",    "adam_m", "adam_v",
                                          "buffers", "activations", "workspace", "cuda"};

// Returns a * b, or BEYOND_MEMORY if 64 bits cannot hold it.
size_t product(size_t a, size_t b) {
    size_t result;
    return __builtin_mul_overflow(a, b, &result) ? BEYOND_MEMORY : std::min(result, BEYOND_MEMORY);
}

struct ActivationRow {
    BufferBase* tensor;
    const char* name;
    std::vector<size_t> shape;
    const char* dtype;
    size_t element_bytes;
    size_t copies;
    Category category;

    size_t copy_bytes() const {
        size_t bytes = element_bytes;
        for (size_t extent : shape) bytes = product(bytes, extent);
        return bytes;
    }
    size_t bytes() const { return product(copy_bytes(), copies); }
};

template <typename T>
ActivationRow row(Buffer<T>& tensor, const char* name, std::vector<size_t> shape, size_t copies,
                  Category category = Category::ACTIVATIONS) {
    constexpr bool IS_FLOAT = std::is_same_v<T, float>, IS_DOUBLE = std::is_same_v<T, double>;
    const char* type = IS_FLOAT ? "fp32" : IS_DOUBLE ? "fp64" : std::is_same_v<T, int> ? "int32" : "bytes";
    return {&tensor, name, std::move(shape), type, sizeof(T), copies, category};
}

ActivationRow row_of(BufferBase& tensor, const char* name, DType dtype, std::vector<size_t> shape, size_t copies,
                     Category category = Category::ACTIVATIONS) {
    return {&tensor, name, std::move(shape), name_of(dtype), size_of(dtype), copies, category};
}

std::vector<ActivationRow> fp8_table(Activations& a, const Setup& s, size_t only_none, size_t except_full);

std::vector<ActivationRow> activation_table(Activations& a, const Setup& s) {
    const Config& c = s.config;
    const size_t B = s.B, T = s.T, N = s.N(), R = s.rows(), NH = s.heads();
    const size_t C = c.channels, Ct = C / s.tensor, Vp = c.padded_vocab();
    const bool training = s.purpose == Purpose::TRAINING;
    // A copy for each layer in recompute modes up to `last`, otherwise one for all layers: see section "forward".
    auto copies_up_to = [&](Recompute last) {
        return training && s.recompute <= last ? static_cast<size_t>(c.layers) : 1;
    };
    const size_t always = copies_up_to(Recompute::FULL), except_full = copies_up_to(Recompute::SELECTIVE);
    const size_t only_none = copies_up_to(Recompute::NONE);   // only --recompute none keeps these tensors
    const size_t cached = s.purpose == Purpose::SAMPLING ? c.layers : except_full;
    const size_t in_floatX = s.matmul == MatmulIn::FP8_ALL ? 1 : only_none;   // with fp8-all backward reads FP8
    const size_t ln = s.tensor > 1 ? only_none : in_floatX;
    auto rowX = [&](Buffer<floatX>& tensor, const char* name, std::vector<size_t> shape, size_t copies) {
        return row_of(tensor, name, s.precision, std::move(shape), copies);
    };
    std::vector<ActivationRow> rows = {
        rowX(a.res1,     "res1",     {R, C},      always),
        rowX(a.ln1,      "ln1",      {R, C},      ln),
        row (a.ln1_mean, "ln1_mean", {R},         only_none),
        row (a.ln1_rstd, "ln1_rstd", {R},         only_none),
        rowX(a.qkv,      "qkv",      {N, 3 * Ct}, cached),
        rowX(a.att,      "att",      {N, Ct},     except_full),
        rowX(a.res2,     "res2",     {R, C},      except_full),
        rowX(a.ln2,      "ln2",      {R, C},      ln),
        row (a.ln2_mean, "ln2_mean", {R},         only_none),
        row (a.ln2_rstd, "ln2_rstd", {R},         only_none),
        rowX(a.fc,       "fc",       {N, 4 * Ct}, except_full),
        rowX(a.gelu,     "gelu",     {N, 4 * Ct}, in_floatX),
        rowX(a.resf,     "resf",     {R, C},      1),
        rowX(a.lnf,      "lnf",      {R, C},      1),
        row (a.lnf_mean, "lnf_mean", {R},         1),
        row (a.lnf_rstd, "lnf_rstd", {R},         1),
        rowX(a.logits,   "logits",   {s.logits_rows(), Vp}, 1),
        row (a.losses,   "losses",   {R},         1),
        row (a.loss,     "loss",     {1},         1, Category::WORKSPACE),
        row (a.inputs,   "inputs",   {R},         3, Category::WORKSPACE),
        row (a.targets,  "targets",  {R},         3, Category::WORKSPACE),
        row (a.counter,  "counter",  {1},         1, Category::WORKSPACE),
    };
    auto append = [&](const std::vector<ActivationRow>& more) { rows.insert(rows.end(), more.begin(), more.end()); };
    if (s.tensor > 1) append({rowX(a.gathered, "gathered", {N, C}, 1), rowX(a.summand, "summand", {N, C}, 1)});
    if (s.matmul != MatmulIn::FLOATX) append(fp8_table(a, s, only_none, except_full));
    if (s.attention == Attention::FLASH) append({row(a.lse, "lse", {B, NH, T}, except_full)});
    else append({rowX(a.scores, "scores", {B, NH, T, T}, only_none), rowX(a.probs, "probs", {B, NH, T, T}, only_none)});
    if (training) {
        const size_t columns = 4 * C;   // of fc's bias, the widest
        append({
            rowX(a.dres, "dres", {N, C},      1),
            rowX(a.dln,  "dln",  {N, C},      1),
            rowX(a.dqkv, "dqkv", {N, 3 * Ct}, 1),
            rowX(a.datt, "datt", {N, Ct},     1),
            rowX(a.dfc,  "dfc",  {N, 4 * Ct}, 1),
            row(a.partials,      "partials",      {attention_partials(B, T), columns}, 1, Category::WORKSPACE),
            row(a.norm_partials, "norm_partials", {NORM_BLOCKS + 1},            1, Category::WORKSPACE),
            row_of(a.step, "step", DType::FP32, {sizeof(Step) / sizeof(float)}, 1, Category::WORKSPACE),
            row_of(a.loss_scale, "loss_scale", DType::FP32, {sizeof(LossScale) / sizeof(float)}, 1,
                   Category::WORKSPACE),
            row_of(a.spikes, "spikes", DType::FP32, {sizeof(Spikes) / sizeof(float)}, 1, Category::WORKSPACE),
            row(a.order,         "order",         {R},                          2, Category::WORKSPACE),
        });
        if (s.attention == Attention::FLASH) append({row(a.att_d, "att_d", {B, NH, T}, 1)});
        else append({rowX(a.dprobs, "dprobs", {B, NH, T, T}, 1)});
        if (s.optimizer == Optimizer::MUON)
            append({row_of(a.muon, "muon", s.precision, {10, C, C}, 1, Category::WORKSPACE)});
        if (s.master_weights == MasterWeights::NONE)
            append({{&a.unchanged, "unchanged", {1}, "int64", sizeof(unsigned long long), 1, Category::WORKSPACE}});
    }
    if (s.on_gpu) append({row(a.matmul_workspace, "matmul_workspace", {MATMUL_WORKSPACE}, 1, Category::WORKSPACE)});
    return rows;
}

#include "gpt/memory.cuh"       // plan(), memory_now(), require_memory()

// ==== model ==================================================================

enum class MicroBatch { ONE_OF_SEVERAL, LAST };   // of a step

struct Model {
    Setup setup;
    Config config;
    Layout layout;              // of the five blocks of parameters
    Parameters<Buffer<floatX>> w;
    Parameters<GradBuffer> g;   // w, g: the tensors that kernels use: in the blocks or, if sharded, in the buffers
    floatX *weights = nullptr, *weight_buffers = nullptr;   // the same memory unless sharded
    Grad grads = {}, grad_buffers = {};                     // as for weights
    float *master = nullptr, *adam_m = nullptr, *adam_v = nullptr;   // master: null with --master-weights none
    Activations a;
    bool fp8_history = false;          // whether scales have a history
    std::vector<bool> fp8_weights;     // for each layer: whether weights_8 is up to date
    size_t allocated = 0;
    std::vector<void*> blocks;
    Graphs graphs;
    std::shared_ptr<class Communication> communication;   // with several GPUs
    std::vector<Slice> slices;         // what this GPU updates

    Model() = default;
    Model(const Model&) = delete;
    ~Model() { for (void* block : blocks) cudaFree(block); }
};

Grad grad_at(const Model& m, size_t element) {
    return {static_cast<char*>(m.grads.data) + element * size_of(m.grads.dtype), m.grads.dtype};
}

void* allocate_block(Model& m, size_t bytes, const char* name) {
    void* block = nullptr;
    check(cudaMalloc(&block, bytes), format("cudaMalloc of %s for %s", size_text(bytes).c_str(), name).c_str());
    m.blocks.push_back(block);
    m.allocated += bytes;
    return block;
}

template <typename Kind>
void bind(Parameters<Kind>& p, const Config& c, const Layout& y, void* block, DType dtype, size_t copies) {
    for (const ParameterRow& row : parameter_table(p, c, y.tensor, y.rank)) {
        row.tensor->data = static_cast<char*>(block) + y.place(row, 0) * size_of(dtype);
        row.tensor->copies = row.is_split() ? copies : row.copies;
        row.tensor->layer_bytes = (row.is_split() ? y.layer : row.elements) * size_of(dtype);
        if constexpr (std::is_same_v<Kind, GradBuffer>) static_cast<GradBuffer*>(row.tensor)->dtype = dtype;
    }
}

// Allocates blocks and buffers as plan() counts them.
void allocate_parameters(Model& m, const Setup& s) {
    const Layout& y = m.layout = layout_of(s);
    auto block = [&](const char* name, size_t elements, size_t size) {
        void* memory = allocate_block(m, elements * size, name);
        clear(memory, elements * size);   // the padding stays 0
        return memory;
    };
    const size_t grad_size = size_of(s.grad_dtype), states = y.elements(states_placement(s));
    m.weights = static_cast<floatX*>(block("weights", y.elements(weights_placement(s)), sizeof(floatX)));
    m.weight_buffers = m.weights;
    if (weights_placement(s) == Placement::SHARDED)
        m.weight_buffers = static_cast<floatX*>(block("layers' weights", buffer_elements(y), sizeof(floatX)));
    bind(m.w, s.config, y, m.weight_buffers, FLOATX, weight_copies(s.zero, y.layers));
    if (s.purpose != Purpose::TRAINING) return;
    m.grads = m.grad_buffers = {block("gradients", y.elements(grads_placement(s)), grad_size), s.grad_dtype};
    if (grads_placement(s) == Placement::SHARDED)
        m.grad_buffers.data = block("layers' gradients", buffer_elements(y), grad_size);
    bind(m.g, s.config, y, m.grad_buffers.data, s.grad_dtype, grad_copies(s.zero, y.layers));
    if (has_master(s)) m.master = static_cast<float*>(block("master", states, sizeof(float)));
    else if (!SEPARATE_MASTER) m.master = reinterpret_cast<float*>(m.weights);
    m.adam_m = static_cast<float*>(block("Adam's m", states, sizeof(float)));
    m.adam_v = static_cast<float*>(block("Adam's v", layout_of_v(s).elements(states_placement(s)), sizeof(float)));
}

void connect(Model& m);   // of gpt/distributed.cuh
std::vector<Slice> update_slices(Model& m);

void set_loss_scale(Model& m, const LossScale& scale) { upload(m.a.loss_scale(), &scale, sizeof(scale)); }
void set_spikes(Model& m, const Spikes& spikes) { upload(m.a.spikes(), &spikes, sizeof(spikes)); }

void allocate(Model& m, const Setup& s) {
    require_memory(s);
    m.setup = s;
    m.config = s.config;
    allocate_parameters(m, s);
    for (const ActivationRow& row : activation_table(m.a, s)) {
        row.tensor->data = static_cast<char*>(allocate_block(m, row.bytes(), row.name));
        row.tensor->copies = row.copies;
        row.tensor->layer_bytes = row.copy_bytes();
        row.tensor->kept = s.purpose != Purpose::TRAINING || row.copies == static_cast<size_t>(s.config.layers);
    }
    device.matmul_workspace = m.a.matmul_workspace();
    clear(m.a.loss(), sizeof(double));
    clear(m.a.counter(), sizeof(int));
    if (s.purpose == Purpose::TRAINING) set_loss_scale(m, {}), set_spikes(m, {});
    if (s.matmul != MatmulIn::FLOATX) {   // scales of 1 without history
        const std::vector<Fp8Scale> scales(s.config.layers * FP8_TENSORS);
        upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
    }
    if (s.purpose == Purpose::TRAINING) m.slices = update_slices(m);
    connect(m);
}

// ==== model: the tensors of a layer ==========================================
// What a layer's kernels get: views of its matrices and activations, and of the activations' gradients. Model::w and
// Model::g have its vectors and the gradients of its parameters.

bool has_fp8(const Model& m) { return m.setup.matmul != MatmulIn::FLOATX; }

// A pass through the layers: a micro-batch, or fewer tokens for sampling and HellaSwag.
struct ForwardPass {
    int B, T;
    size_t past = 0;           // sampling with B = 1: the tokens before these T, whose keys and values are in qkv
    bool in_fp8 = false;       // FP8 pays only with many rows
    bool recomputes = false;   // computes only what was not kept

    size_t N() const { return static_cast<size_t>(B) * T; }
};

ForwardPass whole_batch(const Model& m) { return {m.setup.B, m.setup.T, 0, has_fp8(m)}; }

struct Block {
    // Inputs and outputs, in order. res1, res2, res3: the residual stream before attention, before the MLP, after it.
    Tensor res1, ln1, qkv, att, res2, ln2, fc, gelu, res3;
    Stats stats1, stats2;   // of the LayerNorms
    Heads heads;
    Tensor qkvw, attprojw, fcw, fcprojw;
};

struct Gradients {
    Tensor res3, fc, ln, res2, att, qkv, res1;   // memory that all layers share; res1, res2 and res3 are the same
    float* partials;                             // scratch
};

#include "gpt/fp8_training.cuh"   // add_fp8(), need_fp8_weights(), push_amaxes(); log and checkpoints
#include "gpt/distributed.cuh"    // send_gradients(), which sums gradients over GPUs; need_weights(), end_step()

Block block(const Model& m, size_t l, const ForwardPass& p) {
    const Activations& a = m.a;
    const auto& w = m.w;
    const size_t N = p.N(), C = m.config.channels, R = N / m.setup.tensor, Ct = C / m.setup.tensor;
    const bool last = l + 1 == static_cast<size_t>(m.config.layers);
    Block b;
    b.res1 = {a.res1(l), R, C, a.res1.kept};
    b.ln1 = {a.ln1(l), R, C, a.ln1.kept, {}, a.gathered()};
    b.qkv = {a.qkv(l) + p.past * 3 * Ct, N, 3 * Ct, a.qkv.kept};
    b.att = {a.att(l), N, Ct, a.att.kept && a.probs.kept};   // naive attention recomputes probs with att
    b.res2 = {a.res2(l), R, C, a.res2.kept, {}, a.summand()};
    b.ln2 = {a.ln2(l), R, C, a.ln2.kept, {}, a.gathered()};
    b.fc = {a.fc(l), N, 4 * Ct, a.fc.kept};
    b.gelu = {a.gelu(l), N, 4 * Ct, a.gelu.kept};
    b.res3 = {last ? a.resf() : a.res1(l + 1), R, C, true, {}, a.summand()};
    b.stats1 = {a.ln1_mean(l), a.ln1_rstd(l)};
    b.stats2 = {a.ln2_mean(l), a.ln2_rstd(l)};
    b.heads = {p.B, p.T, m.setup.heads(), m.config.head_size(), a.lse(l), a.att_d(), a.partials(), a.counter(),
               a.scores(l), a.probs(l), a.dprobs(), p.past};
    b.qkvw = {w.qkvw(l), C, 3 * Ct};
    b.attprojw = {w.attprojw(l), Ct, C};
    b.fcw = {w.fcw(l), C, 4 * Ct};
    b.fcprojw = {w.fcprojw(l), 4 * Ct, C};
    if (p.in_fp8) add_fp8(b, m, l);
    return b;
}

Gradients gradients(const Model& m, size_t l) {
    const Activations& a = m.a;
    const size_t N = m.setup.N(), C = m.config.channels, R = m.setup.rows(), Ct = C / m.setup.tensor;
    Gradients d;
    auto shared = [&](const Buffer<floatX>& t) {   // this rank's rows of the memory for all rows
        return Tensor{own_rows(t(), R * C), R, C, true, {}, R < N ? t() : nullptr};
    };
    d.res1 = d.res2 = d.res3 = shared(a.dres);
    d.ln = shared(a.dln);
    d.qkv = {a.dqkv(), N, 3 * Ct};
    d.att = {a.datt(), N, Ct};
    d.fc = {a.dfc(), N, 4 * Ct};
    d.partials = a.partials();
    if (has_fp8(m)) add_fp8(d, m, l);
    return d;
}

#include "gpt/init.cuh"          // init_parameters(), master_changed()

// ==== forward ================================================================
// A block adds twice to the residual stream: res2 = res1 + attproj(attention(qkv(ln1))), and
// res3 = res2 + fcproj(gelu(fc(ln2))). The matmuls attproj and fcproj compute these sums. res3 is res1 of the next
// block, or resf after the last.
//
// Backward needs the activations. Those that forward did not keep are recomputed, by the same lines from the same
// values, so with the same bits. --recompute selective drops ln1, ln2, their statistics, gelu and naive attention's
// scores and probs; full drops all but res1. activation_table() sets the numbers of copies. Nothing else depends on
// --recompute, except that GELU can be a matmul's epilogue, with other rounding, only if it is kept.

void forward_block(Model& m, size_t l, const ForwardPass& pass) {
    recorder.at(pass.recomputes ? "recompute" : "forward", l);
    const Block b = block(m, l, pass);
    const auto& w = m.w;
    auto want = [&](const Tensor& t) { return !pass.recomputes || !t.kept; };
    if (want(b.ln1))  /* 1 */ layernorm_forward(b.ln1, b.stats1, b.res1, w.ln1w(l), w.ln1b(l));
    if (want(b.qkv))  /* 2 */ linear_forward(b.qkv, b.ln1, b.qkvw, w.qkvb(l));
    if (want(b.att))  /* 3 */ attention_forward(b.att, b.qkv, b.heads);
    if (want(b.res2)) /* 4 */ linear_forward(b.res2, b.att, b.attprojw, w.attprojb(l), b.res1);
    if (want(b.ln2))  /* 5 */ layernorm_forward(b.ln2, b.stats2, b.res2, w.ln2w(l), w.ln2b(l));
    if (want(b.fc))   /* 6, 7 */ linear_gelu_forward(b.gelu, b.fc, b.ln2, b.fcw, w.fcb(l));
    else if (want(b.gelu)) /* 7 */ gelu_forward(b.gelu, b.fc);
    if (!pass.recomputes)  /* 8 */ linear_forward(b.res3, b.gelu, b.fcprojw, w.fcprojb(l), b.res2);
}

// Computes R rows of lnf, the output of the last LayerNorm, from their tokens inp (R) int32 on the device.
void forward(Model& m, const int* inp, const ForwardPass& pass) {
    const Activations& a = m.a;
    const size_t L = m.config.layers, C = m.config.channels, R = pass.N() / m.setup.tensor;
    const Tensor res1 = {a.res1(), R, C}, resf = {a.resf(), R, C}, lnf = {a.lnf(), R, C};
    recorder.at("forward", NO_LAYER);
    begin_forward(m, pass);
    embedding_forward(res1, inp, m.w.wte(), m.w.wpe() + pass.past * C, first_row(R), pass.T);
    for (size_t l = 0; l < L; l++) {
        need_weights(m, 1 + l, 2 + l, pass);
        forward_block(m, l, pass);
    }
    recorder.at("forward", NO_LAYER);
    layernorm_forward(lnf, {a.lnf_mean(), a.lnf_rstd()}, resf, m.w.lnfw(), m.w.lnfb());
}
void forward(Model& m, const int* inp) { forward(m, inp, whole_batch(m)); }

// Returns the head's product: the logits (rows,Vp) of `rows` rows from `first` on.
Product logits_product(const Model& m, size_t first, size_t rows) {
    const size_t C = m.config.channels, Vp = m.config.padded_vocab();
    const Tensor lnf = {m.a.lnf() + first * C, rows, C}, wte = {m.w.wte(), Vp, C};
    return product_of(m.a.logits(), lnf, Op::AS_IS, wte, Op::TRANSPOSED);
}

// Computes logits and losses of this rank's R rows, head_rows rows at a time, and adds to the sum of losses. With
// LOSS_AND_GRADIENT it also computes dln (the gradient of lnf) and adds to dwte, part by part, while the part's logits
// exist. inverse_tokens is 1 / (tokens of the whole step).
template <Want WANT> void head(Model& m, const int* targets, float inverse_tokens, size_t R) {
    const Activations& a = m.a;
    const size_t C = m.config.channels, Vp = m.config.padded_vocab(), most = m.setup.head_rows;
    const Tensor wte = {m.w.wte(), Vp, C};
    floatX* const dln = WANT == Want::LOSS ? nullptr : gradients(m, 0).ln.x;   // of all layers
    for (size_t first = 0; first < R; first += most) {
        const size_t rows = std::min(most, R - first);
        const Tensor logits = {a.logits(), rows, Vp}, lnf = {a.lnf() + first * C, rows, C};
        matmul(logits_product(m, first, rows));
        cross_entropy<WANT>(logits, a.losses() + first, targets + first, inverse_tokens, a.loss_scale(),
                            m.config.vocab);
        if (WANT == Want::LOSS) continue;   // otherwise logits now holds its gradient
        matmul(product_of(dln + first * C, logits, Op::AS_IS, wte, Op::AS_IS));
        matmul_backward_weight(m.g.wte(), lnf, logits);   // logits^T lnf: wte is stored as (Vp,C)
    }
    add_losses(a.loss(), a.losses(), R);
}

// ==== backward ===============================================================
// Forward's numbered lines in reverse. res1, res2 and res3 are one gradient of the residual stream. It and the
// gradients of parameters are added to; all others are assigned. Activations do not change.
// The gradients of the biases attprojb and fcprojb are column sums of the residual stream's, which the LayerNorm's
// backward that writes it computes; that of qkvb is computed with dqkv.
//
// Many GPUs: send_gradients() is where gradients are summed over GPUs, one group while backward computes the next: in
// the step's last micro-batch, with ZeRO 2 and 3 in each (gpt/distributed.cuh: Communication::reduce()). Group 1 + l is
// layer l, group 0 everything else.

void backward_block(Model& m, size_t l) {
    ForwardPass pass = whole_batch(m);
    const Block b = block(m, l, pass);
    pass.recomputes = true;
    if (l + 1 < static_cast<size_t>(m.config.layers)) forward_block(m, l, pass);   // the last layer's are still there
    recorder.at("backward", l);
    const Gradients d = gradients(m, l);
    const auto& w = m.w;
    const auto& g = m.g;
    const Grad below = l > 0 ? g.fcprojb(l - 1) : Grad{};   // the bias of the layer below, whose output is res1
    /* 8, 7 */ linear_gelu_backward(d.fc, g.fcprojw(l), g.fcb(l), d.partials, d.res3, b.gelu, b.fcprojw, b.fc);
    /* 6 */ linear_backward(d.ln, g.fcw(l), d.fc, b.ln2, b.fcw);
    /* 5 */ layernorm_backward(d.res2, g.ln2w(l), g.ln2b(l), g.attprojb(l), d.partials, d.ln, b.res2, w.ln2w(l),
                               b.stats2);
    /* 4 */ linear_backward(d.att, g.attprojw(l), d.res2, b.att, b.attprojw);
    /* 3 */ attention_backward(d.qkv, g.qkvb(l), d.att, b.qkv, b.att, b.heads);
    /* 2 */ linear_backward(d.ln, g.qkvw(l), d.qkv, b.ln1, b.qkvw);
    /* 1 */ layernorm_backward(d.res1, g.ln1w(l), g.ln1b(l), below, d.partials, d.ln, b.res1, w.ln1w(l), b.stats1);
}

// One micro-batch in device memory. order: see section "embedding".
struct Batch { const int *inputs, *targets, *order; };

// Computes all gradients from dln, the gradient of lnf that head() has computed.
void backward(Model& m, const Batch& batch, MicroBatch which) {
    const Activations& a = m.a;
    const size_t L = m.config.layers;
    const Gradients d = gradients(m, L - 1);
    recorder.at("backward", NO_LAYER);
    clear(d.res3.x, d.res3.size() * sizeof(floatX));
    layernorm_backward(d.res3, m.g.lnfw(), m.g.lnfb(), m.g.fcprojb(L - 1), d.partials, d.ln,
                       {a.resf(), d.res3.rows, d.res3.columns}, m.w.lnfw(), {a.lnf_mean(), a.lnf_rstd()});
    for (size_t l = L; l-- > 0;) {
        need_weights(m, 1 + l, l, whole_batch(m));
        begin_gradients(m, 1 + l);
        backward_block(m, l);
        send_gradients(m, 1 + l, which);   // starts their sum over GPUs, which update() awaits
    }
    recorder.at("backward", NO_LAYER);
    embedding_backward(m.g.wte(), m.g.wpe(), d.partials, d.res1, batch.inputs, batch.order, first_row(d.res1.rows),
                       m.setup.T);
    send_gradients(m, 0, which);
}

// Forward and backward of one micro-batch. Gradients are of the mean loss over `tokens_per_step` tokens, so their sum
// over the micro-batches of a step does not depend on how the step is split.
void micro_step(Model& m, const Batch& batch, size_t tokens_per_step, MicroBatch which = MicroBatch::LAST) {
    // A graph's name has everything that its kernels depend on.
    const std::string name = format("micro-step of inputs %p, targets %p, order %p, %zu tokens a step%s", batch.inputs,
                                    batch.targets, batch.order, tokens_per_step, scales_text(m));
    m.graphs.run(name, [&] {
        forward(m, batch.inputs);
        begin_gradients(m, 0);
        head<Want::LOSS_AND_GRADIENT>(m, batch.targets, 1.0f / tokens_per_step, m.setup.rows());
        backward(m, batch, which);
    });
}

// ==== update =================================================================

// The gradient norm, then AdamW, or Muon for the matrices of layers. Their kernels also set the gradients to 0.
void update(Model& m, const Step& step) {
    const Activations& a = m.a;
    recorder.at("update", NO_LAYER);
    set_step(a.step(), step);
    await_gradients(m);
    const bool skips = step.max_z > 0;   // --skip-spikes: also sums the loss over GPUs
    m.graphs.run(skips ? "update, skipping spikes" : "update", [&] {
        const GradientRanges own = own_gradients(m);   // each GPU sums the squares of its own
        norm_partials(a.norm_partials(), own);
        if (skips) loss_partial(a.norm_partials() + own.blocks, a.loss(), a.step());
        over_gpus(a.norm_partials(), own.blocks + skips);
        gradient_norm(a.step(), a.loss_scale(), a.norm_partials(), own.blocks, skips ? a.spikes() : nullptr);
        if (!m.master) clear(a.unchanged(), sizeof(unsigned long long));
        for (const Slice& s : m.slices) {
            if (s.v) adamw(s, a.step(), a.unchanged());
            else muon(s, a.step(), a.muon(), a.norm_partials());
        }
        clear_gradients(m);
    });
    end_step(m);
}

template <typename T> T fetch(const T* from) {
    T value;
    download(&value, from, sizeof(T));
    return value;
}

// Returns the sum of losses since the last call, and resets it.
double take_loss(Model& m) {
    const double sum = fetch(m.a.loss());
    clear(m.a.loss(), sizeof(double));
    return sum;
}

#include "gpt/model_files.cuh"   // read_weights(), write_checkpoint(), find_start(), load_start()
#include "gpt/loader.cuh"        // TrainData, open_data(), divide_data(), Loader
#include "gpt/evaluation.cuh"    // evaluate(), sample()
#include "gpt/hellaswag.cuh"     // hellaswag()

// ==== schedule ===============================================================

constexpr double WSD_DECAY = 0.2;   // fraction of steps in which `wsd` decays (Hu et al. 2024, "MiniCPM", section 4)

// Returns the learning rate of a step, counted from 0, in a run of `steps` steps, or --steps if 0.
double learning_rate(const Options& o, long step, long steps = 0) {
    if (steps == 0) steps = o.steps;
    const double warmup = o.warmup < 1 ? o.warmup * steps : o.warmup;
    if (step < warmup) return std::min(o.lr, o.lr * (step + 1) / warmup);
    const double low = o.min_lr < 0 ? o.lr / 10 : o.min_lr;
    const double progress = steps > warmup ? std::min(1.0, (step - warmup) / (steps - warmup)) : 1;
    double fraction = 1;   // 0: low, 1: lr
    switch (o.schedule) {
        case Schedule::COSINE:   fraction = 0.5 * (1 + cos(M_PI * progress)); break;
        case Schedule::LINEAR:   fraction = 1 - progress; break;
        case Schedule::WSD:      fraction = std::clamp((steps - step) / (WSD_DECAY * steps), 0.0, 1.0); break;
        case Schedule::CONSTANT: break;
    }
    return low + fraction * (o.lr - low);
}

// A skipped step does not advance AdamW's t.
Step adamw_settings(const Options& o, long step, long skipped = 0, long steps = 0) {
    const double t = step + 1 - skipped;
    return {float(learning_rate(o, step, steps)), float(o.beta1), float(o.beta2), float(o.eps), float(o.weight_decay),
            float(o.grad_clip), float(1 - pow(o.beta1, t)), float(1 - pow(o.beta2, t))};
}

#include "gpt/noise.cuh"           // own_squared_norm(): --noise-every
#include "gpt/matmul_tuning.cuh"   // tune_matmuls()
#include "gpt/plan.cuh"            // find_peak(), make_setup(), accumulation_steps(), print_run(), run_record()
#include "gpt/training_run.cuh"    // TrainingRun, load_run(), step_result(), step_record(), print_end()

// ==== train ==================================================================

// Sets the batch of the next step, whose micro-batches --batch-ramp determines.
void begin_step(TrainingRun& run) {
    const Setup& s = run.m.setup;
    const long micro_steps = micro_batches_after(run.tokens, run.o, s);
    if (micro_steps != run.micro_steps) run.m.graphs.clear();   // frees those of other tokens_per_step
    run.micro_steps = micro_steps;
    run.tokens_per_step = static_cast<double>(micro_steps) * s.N() * s.data();
}

// Forward and backward of a step: gradients add up over micro-batches. Returns own_squared_norm() if the step measures
// the noise scale: on one GPU of the first micro-batch, on several of each GPU's whole part.
std::optional<double> accumulate_gradients(TrainingRun& run, Loader& loader) {
    const long every = run.o.noise_every, micro_steps = run.micro_steps;
    const bool measures = every > 0 && (run.step + 1) % every == 0 && micro_steps * world.size > 1;
    std::optional<double> squared;
    for (long micro = 1; micro <= micro_steps; micro++) {
        micro_step(run.m, loader.current(), static_cast<size_t>(run.tokens_per_step),
                   micro < micro_steps || measures ? MicroBatch::ONE_OF_SEVERAL : MicroBatch::LAST);
        loader.advance();
        if (!measures || micro != (world.alone() ? 1 : micro_steps)) continue;
        squared = own_squared_norm(run.m);
        send_all_gradients(run.m);
    }
    return squared;
}

void validate(TrainingRun& run) {
    run.progress.end_line();
    if (run.data.val.windows(Windows::COVERING, run.m.setup.T) > 0) {
        const Evaluation e = evaluate(run.m, run.data.val, run.o.eval_sequences, run.data.text);
        json record = {{"step", run.step}, {"val_loss", e.loss}};
        if (e.bytes) record["bits_per_byte"] = e.bits_per_byte();
        printf("step %ld: validation loss %.4f over %s tokens%s\n", run.step, e.loss, grouped(e.tokens).c_str(),
               e.bytes ? format(", %.4f bits per byte", e.bits_per_byte()).c_str() : "");
        run.log.write(record);
    }
    if (!run.questions.empty()) {
        const Score score = hellaswag(run.m, run.questions);
        printf("step %ld: %s\n", run.step, score.text.c_str());
        run.log.write({{"step", run.step}, {"hellaswag", score.acc_norm}});
    }
    fflush(stdout);
}

void show_sample(TrainingRun& run) {
    run.progress.end_line();
    std::string shown;
    const int first = run.data.text.first(run.data.bos);
    sample(run.m, {first}, run.o, static_cast<uint64_t>(run.o.seed) + run.step, [&](int token) {
        shown += run.data.text.decode(token);
        return true;
    });
    printf("---- sample ----\n%s\n----------------\n", readable(shown).c_str());
    fflush(stdout);
}

void save_checkpoint(TrainingRun& run) {
    if (run.o.out.empty()) return;
    run.tried = run.step;
    progress(WRITING);
    try {
        run.log.sync();   // so that a checkpoint is never ahead of the log
    } catch (const Failure& error) {
        throw not_written(run.step, error);
    }
    run.last_checkpoint = write_checkpoint(run.o.out, run.m, run.text_files, run.step, trainer_record(run), run.o.keep);
    wait_for_all(WRITING);
    run.progress.end_line();
    printf("step %ld: checkpoint %s\n", run.step, run.last_checkpoint.c_str());
}

// After an error: writes a checkpoint of the last step if its weights are good, and logs the end. With several ranks it
// writes no checkpoint, because other ranks may have ended.
void rescue(TrainingRun& run) {
    run.progress.end_line();
    try {
        if (run.step > run.tried && world.alone()) save_checkpoint(run);
    } catch (const std::exception& error) {
        fprintf(stderr, "train_gpt: %s\n", error.what());
    }
    try {
        run.log.write({{"end", "error"}});
    } catch (const Failure&) {}   // the log may be what failed
}

// One step: forward and backward of its micro-batches, update, log. evaluates: validation follows; FP8 is logged, too.
StepResult train_step(TrainingRun& run, Loader& loader, bool evaluates) {
    const double began = seconds_now(), sent_before = world.bytes_sent;
    if (evaluates) start_counting(run.m);
    const std::optional<double> squared = accumulate_gradients(run, loader);
    Step settings = adamw_settings(run.o, run.step, run.scale.skipped, expected_steps(run));
    settings.max_z = float(run.o.skip_spikes);
    settings.tokens = float(run.tokens_per_step);
    update(run.m, settings);

    const StepResult result = step_result(run, began, settings.lr);
    run.step++;
    run.tokens += static_cast<uint64_t>(run.tokens_per_step);
    run.next_window += static_cast<uint64_t>(run.tokens_per_step) / run.m.setup.T;
    run.bytes_sent += world.bytes_sent - sent_before;
    if (!result.is_finite) {
        run.tried = run.step;   // no checkpoint of these weights
        const bool unscaled = FLOATX == DType::FP16 && run.scale.interval == 0;
        const std::string& last = run.last_checkpoint;
        throw Failure("step %ld: loss %f, gradient norm %f: stopped; %s%s; try %s", run.step, result.loss, result.norm,
                      last.empty() ? "no checkpoint was saved" : "the last good checkpoint is ", last.c_str(),
                      unscaled ? "--loss-scaling dynamic" : "a lower --lr, a longer --warmup, a smaller --grad-clip");
    }
    json record = step_record(run, result, evaluates);
    if (squared) add_noise(record, run, result, *squared);
    run.log.write(record);
    if (evaluates) log_counts(run);
    return result;
}

// What the training loop does after every `every` steps, and after the last one. 0: never.
struct Event {
    long every;
    void (*run)(TrainingRun&);
};

// The training loop of a run that load_run() has prepared.
void train_loop(TrainingRun& run) {
    const Options& o = run.o;
    Model& m = run.m;
    const Event events[] = {{o.eval_every, validate}, {o.sample_every, show_sample},
                            {o.checkpoint_every, save_checkpoint}};
    const double start = seconds_now(), tokens_before = run.tokens, seconds_before = run.seconds;
    Loader loader(m, run.data.train, o.shuffle, o.seed, run.start.window);
    world.overlap = o.overlap;
    if (o.matmul_tuning)
        tune_matmuls(m, stdout, o.verbose, [&] { micro_step(m, loader.current(), 1, MicroBatch::ONE_OF_SEVERAL); });
    m.graphs.on = use_graphs(o);
    if (o.sample_every > 0 && run.step == 0) show_sample(run);   // the untrained model, for comparison
    run.progress.start();
    if (!o.trace.empty() && world.first()) start_recording();
    bool stopping = false;
    try {
        while (!is_complete(run) && !stopping) {
            const long step = *world.step = run.step + 1;   // for the watchdog and the supervisor
            begin_step(run);
            // With --minutes the step decides whether it is the last one.
            bool last = o.tokens > 0 ? run.tokens + run.tokens_per_step >= o.tokens : o.minutes == 0 && step == o.steps;
            auto due = [&](long every) { return every > 0 && (step % every == 0 || last); };
            const StepResult result = train_step(run, loader, due(o.eval_every));
            if (o.minutes > 0) run.seconds = seconds_before + sum_of_all(world.first() ? seconds_now() - start : 0);
            last = is_complete(run);
            stopping = sum_of_all(stop_requested) > 0;   // read once a step, so that all ranks agree
            const bool trace_complete = step - run.start.step == TRACED_STEPS || last || stopping;
            if (recorder.on && trace_complete)
                write_trace(o.trace, live_places(m), bytes_record(plan(m.setup)), step - run.start.step);
            run.progress.show(step, last ? step : expected_steps(run), result);
            for (const Event& event : events)
                if (due(event.every) || (stopping && event.run == save_checkpoint)) event.run(run);
            if (stopping) {
                run.progress.end_line();
                printf("stopped by a signal after step %ld\n", step);
            }
        }
    } catch (const std::exception&) {
        rescue(run);
        throw;
    }
    print_end(run, run.tokens - tokens_before, seconds_now() - start);
}

void train(const Options& o) {
    const Start start = find_start(o);
    TrainData data = open_data(o);
    const Config config = start.dir.empty() ? config_from_options(o, data.train.bytes_only() ? BYTE_VOCAB : 0)
                                            : config_of_folder(o, start.dir);
    divide_data(data, o, start.dir, config);
    print_changes(o, start.trainer, start.dir, data.train.count());
    require_device(o);
    const Memory memory = memory_now();
    const Memory least = {size_t(least_of_all(memory.available)), size_t(least_of_all(memory.all))};   // of all GPUs
    const Setup setup = make_setup(o, config, Purpose::TRAINING, least);
    require_window(data.train, setup.T);
    print_head_rows(setup, start);
    find_peak(o);
    print_run(setup, o, data, accumulation_steps(o, setup), start);
    // Find errors before training: a trace that cannot be written, no validation data, tokens outside the vocabulary.
    if (!o.trace.empty() && !std::ofstream(o.trace, std::ios::app))
        throw UserError("--trace %s: cannot be written: %s", o.trace.c_str(), strerror(errno));
    const bool validates = o.eval_every > 0 && data.val.windows(Windows::COVERING, setup.T) > 0;
    if (o.eval_every > 0 && !o.val_data.empty() && !validates)
        throw UserError("--val-data %s: expected a file with at least 2 tokens", o.val_data.c_str());
    if (validates) {
        std::vector<int> inputs(setup.T), targets(setup.T);
        data.val.read(inputs.data(), targets.data(), Windows::COVERING, 0, setup.T, config.vocab);
    }
    TrainingRun run(o, data, start);
    load_run(run, setup);
    catch_signals();
    train_loop(run);
}

#include "gpt/inference.cuh"       // eval(), sample_subcommand()

// ==== main ===================================================================

void run_subcommand(Subcommand subcommand, Options options) {
    if (options.resume == AUTO && !options.out.empty() && !holds_run(options.out)) options.resume = 0;
    if (options.resume && !options.out.empty()) restore_options(options);
    // Without auto, --from is the folder's name in the run's options.
    const std::string from = options.resume == 1 ? options.from : model_folder(options.from);
    if (from != options.from && world.first() && subcommand != TRAIN)   // train prints it in its line "model"
        fprintf(stderr, "from       %s, the last checkpoint there\n", from.c_str());
    options.from = from;
    catch_lost_pages();
    if (!world.alone() && subcommand != TRAIN && subcommand != EVAL)
        throw UserError("%s: expected one process, found %s=%zu", subcommand == PLAN ? "plan" : "sample",
                        world.launcher->size, world.size);
    begin_ranks(options);
    if (subcommand != PLAN || no_device().empty()) open_device(options.tensor_cores, options.threads);
    connect_ranks(options.timeout, options.tensor_parallel);
    switch (subcommand) {
        case TRAIN:  train(options); break;
        case EVAL:   eval(options); break;
        case SAMPLE: sample_subcommand(options); break;
        case PLAN:   plan_subcommand(options); break;
    }
}

int run_command(const std::vector<std::string>& args) {
    const bool has_subcommand = !args.empty() && args[0][0] != '-';
    const auto [name, subcommand] = has_subcommand ? parse_subcommand(args[0]) : SUBCOMMANDS[0];
    const auto topic = help_topic(args);
    if (args.empty() || topic) {
        fputs(help_text(has_subcommand ? int(subcommand) : ALL, topic.value_or("")).c_str(), stdout);
        return args.empty() ? 2 : 0;
    }
    const Options options = parse_options(subcommand, name, {args.begin() + has_subcommand, args.end()});
    if (subcommand == TRAIN || subcommand == EVAL)
        if (const int code = start_processes(options); code >= 0) return code;   // the parent; each rank continues
    try {
        run_subcommand(subcommand, options);
    } catch (const UserError& error) {
        if (!options.resume) throw;
        throw UserError("%s%s", error.what(), resume_hint(options.out, error.what()).c_str());
    }
    return 0;
}

// Prints one line on stderr and returns the exit code. Only rank 0 reports an error that all ranks find: the others
// first wait a second, in which the launcher ends them. A rank that has received SIGTERM prints nothing.
int report_error(int code, const std::exception& error) {
    fflush(stdout);
    if (!world.first()) {
        const WatchdogPause until_ended;
        signal(SIGTERM, SIG_DFL);
        if (stop_requested) _exit(code);
        sleep(1);
    }
    const std::string rank = world.first() ? "" : format("[rank %zu] ", world.rank);
    fprintf(stderr, "%strain_gpt: %s\n", rank.c_str(), one_line(error.what()).c_str());
    if (!world.alone()) _exit(code);   // other ranks may be gone, and NCCL's destructors would wait for them
    return code;
}

int guarded_main(int argc, char** argv) {
    try {
        setvbuf(stdout, nullptr, _IOLBF, 0);   // keeps the order of lines if stderr goes to the same file
        find_rank();
        const int code = run_command({argv + 1, argv + argc});
        require_output();
        leave_ranks();
        return code;
    } catch (const UserError& error) {
        return report_error(2, error);
    } catch (const std::exception& error) {
        return report_error(1, error);
    }
}

#ifndef TESTING   // test_gpt.cu has a main of its own
int main(int argc, char** argv) {
    // If a standard stream is closed (>&-), the next file opened would get its number, and receive what is printed.
    for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDWR);
    return guarded_main(argc, argv);
}
#endif

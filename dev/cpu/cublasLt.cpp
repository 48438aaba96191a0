// The matrix products of cuBLASLt (cublasLt.h), by oneDNN or a plain loop.
//
// Map: algorithms · product (plain loop, single column) · epilogue · oneDNN · supported cases · cublasLtMatmul, FP8
#include "cublasLt.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <tuple>

#ifdef HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#include <oneapi/dnnl/dnnl_version.h>
#endif

namespace cuda_cpu {
const char* const no_onednn_notice =
    "matrix products run in a slow plain loop. For fast ones install oneDNN (Debian, Ubuntu: apt install libdnnl-dev) "
    "and rebuild with -DHAVE_ONEDNN and -ldnnl";

namespace {

// ==== the algorithms ====================================================================================

constexpr const char* algorithm_names[] = {"fast", "plain", "slow", "in_place", "refused", "failing", "coarse"};

// Returns the algorithms that CUDA_CPU_MATMULS lists.
const std::vector<Algorithm>& offered_algorithms() {
    static const std::vector<Algorithm> value = [] {
        const char* text = getenv("CUDA_CPU_MATMULS");
        std::vector<Algorithm> offered;
        std::istringstream list(text == nullptr ? "fast" : text);
        for (std::string name; std::getline(list, name, ',');) {
            const auto known = std::find(std::begin(algorithm_names), std::end(algorithm_names), name);
            if (known == std::end(algorithm_names)) {
                fprintf(stderr, "CUDA_CPU_MATMULS: unknown algorithm \"%s\"; expected some of", name.c_str());
                for (const char* expected : algorithm_names) fprintf(stderr, " %s", expected);
                fprintf(stderr, "\n");
                exit(2);
            }
            offered.push_back(static_cast<Algorithm>(known - std::begin(algorithm_names)));
        }
        return offered;
    }();
    return value;
}

// On an emulated GPU an algorithm requires the alignment that the preference promised: algo.data[1] is the smallest of
// the four, at most 16 bytes. 0: no requirement. (cublasLtMatmulPreferenceAttributes_t, MIN_ALIGNMENT)
constexpr uint32_t full_alignment = 16;
bool all_aligned(uint64_t bytes, std::initializer_list<const void*> operands) {
    return bytes == 0 || std::all_of(operands.begin(), operands.end(),
                                     [=](const void* x) { return reinterpret_cast<uintptr_t>(x) % bytes == 0; });
}

// Returns whether cublasLtMatmul accepts the algorithm.
bool usable(const cublasLtMatmulAlgo_t& algorithm) {
    return algorithm.data[0] < std::size(algorithm_names) && algorithm.data[1] <= full_alignment &&
           algorithm.data[0] != static_cast<uint64_t>(Algorithm::refused) &&
           std::all_of(algorithm.data + 2, std::end(algorithm.data), [](uint64_t word) { return word == 0; });
}

// ==== the product =======================================================================================

// A product of column-major matrices: D (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta D. Where C is not D, `finish`
// adds it.
struct Product {
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    cudaDataType_t type_a, type_b;  // they differ only in FP8
    int64_t lda, ldb;
    float alpha, beta;
};

// The output of a product: the caller's memory, or scratch memory.
struct Target {
    void* data;
    cudaDataType_t type;
    int64_t ld;
};

// The matrix C, of D's type.
struct Source {
    const void* data;
    int64_t ld;
};

// Returns the address of element `index`.
template <class Void> Void* at(Void* base, cudaDataType_t type, int64_t index) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(base) + index * static_cast<int64_t>(bytes_of(type));
}

// Convert `count` contiguous elements of any type to floats, and back.
template <class T> void load(float* to, const T* from, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        to_floats(reinterpret_cast<float(&)[16]>(to[i]), reinterpret_cast<const T(&)[16]>(from[i]));
    for (; i < count; i++) to[i] = static_cast<float>(from[i]);
}
template <class T> void store(T* to, const float* from, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        from_floats(reinterpret_cast<T(&)[16]>(to[i]), reinterpret_cast<const float(&)[16]>(from[i]));
    for (; i < count; i++) to[i] = from[i];
}
void load(float* to, const void* from, cudaDataType_t type, int64_t count) {
    switch (type) {
    case CUDA_R_16F: return load(to, static_cast<const __half*>(from), count);
    case CUDA_R_16BF: return load(to, static_cast<const __nv_bfloat16*>(from), count);
    case CUDA_R_8F_E4M3: return load(to, static_cast<const __nv_fp8_e4m3*>(from), count);
    case CUDA_R_8F_E5M2: return load(to, static_cast<const __nv_fp8_e5m2*>(from), count);
    default: std::copy_n(static_cast<const float*>(from), count, to);
    }
}
void store(void* to, const float* from, cudaDataType_t type, int64_t count) {
    switch (type) {
    case CUDA_R_16F: return store(static_cast<__half*>(to), from, count);
    case CUDA_R_16BF: return store(static_cast<__nv_bfloat16*>(to), from, count);
    default: std::copy_n(from, count, static_cast<float*>(to));
    }
}

// ---- scratch memory of a worker, which it keeps for its next product: float sums, copies of operands

enum class Scratch { sums, a, b, panels_a, panels_b };
float* scratch(Scratch kind, int64_t count) {
    static thread_local std::vector<float> memory[5];
    auto& numbers = memory[static_cast<int>(kind)];
    if (numbers.size() < static_cast<size_t>(count)) numbers = std::vector<float>(count);
    return numbers.data();
}

// Copies a matrix, which may be stored transposed, to contiguous columns of bfloat16 or float.
const void* expanded(Scratch kind, cudaDataType_t to_type, const void* from, cudaDataType_t type, int64_t ld,
                     int64_t rows, int64_t columns, bool transposed = false) {
    void* const to = scratch(kind, rows * columns);
    constexpr int64_t piece = 256;
#pragma omp parallel for
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = 0; r < rows; r += piece) {
            float x[piece];
            const int64_t count = std::min(piece, rows - r);
            if (!transposed) load(x, at(from, type, c * ld + r), type, count);
            for (int64_t e = 0; transposed && e < count; e++) load(&x[e], at(from, type, (r + e) * ld + c), type, 1);
            store(at(to, to_type, c * rows + r), x, to_type, count);
        }
    return to;
}

// ---- the plain loop. Every sum runs over k in ascending order, for any number of workers.

constexpr int64_t panel = 64, group = 4;  // rows and columns of a register tile of D

// Packs a matrix of rows x k elements, contiguous along k or along rows, into panels [k][width], padded with zeros.
float* packed(Scratch kind, const void* from, cudaDataType_t type, int64_t ld, bool k_is_contiguous, int64_t rows,
              int64_t k, int64_t width) {
    const int64_t panels = (rows + width - 1) / width;
    float* const to = scratch(kind, panels * width * k);
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++) {
        float* const out = to + p * width * k;
        const int64_t first = p * width, count = std::min(width, rows - first);
        std::fill_n(out, width * k, 0.0f);
        if (!k_is_contiguous) {
            for (int64_t i = 0; i < k; i++) load(out + i * width, at(from, type, i * ld + first), type, count);
            continue;
        }
        std::vector<float> line(k);
        for (int64_t r = 0; r < count; r++) {
            load(line.data(), at(from, type, (first + r) * ld), type, k);
            for (int64_t i = 0; i < k; i++) out[i * width + r] = line[i];
        }
    }
    return to;
}

typedef float Vector __attribute__((vector_size(64), aligned(sizeof(float)), may_alias));
constexpr int64_t vector_size = sizeof(Vector) / sizeof(float);

// Computes rows x columns of D from panel `a` [k][panel] and panel `b` [k][group].
void multiply_panels(const Product& p, const float* a, const float* b, float* d, int64_t ldd, int64_t rows,
                     int64_t columns) {
    Vector sum[group][panel / vector_size] = {};
    for (int64_t k = 0; k < p.k; k++) {
        const Vector* column = reinterpret_cast<const Vector*>(a + k * panel);
        for (int64_t j = 0; j < group; j++)
            for (int64_t v = 0; v < panel / vector_size; v++) sum[j][v] += column[v] * b[k * group + j];
    }
    for (int64_t j = 0; j < columns; j++) {
        const float* column = reinterpret_cast<const float*>(sum[j]);
        float* out = d + j * ldd;
        for (int64_t i = 0; i < rows; i++) out[i] = p.alpha * column[i] + (p.beta != 0 ? p.beta * out[i] : 0);
    }
}

void plain_product(const Product& p, const void* a, const void* b, const Target& d) {
    const float* A = packed(Scratch::panels_a, a, p.type_a, p.lda, p.transpose_a, p.m, p.k, panel);
    const float* B = packed(Scratch::panels_b, b, p.type_b, p.ldb, !p.transpose_b, p.n, p.k, group);
    float* const out = static_cast<float*>(d.data);
#pragma omp parallel for collapse(2)
    for (int64_t i = 0; i < p.m; i += panel)
        for (int64_t j = 0; j < p.n; j += group)
            multiply_panels(p, A + i * p.k, B + j * p.k, out + j * d.ld + i, d.ld, std::min(panel, p.m - i),
                            std::min(group, p.n - j));
}

// ---- 16-bit matrix times a single column, as for one sampled token. Its time is that of reading A once. (oneDNN
// would first copy A to its own tile layout.) Each sum runs over k in the same order for any number of workers.

// Computes rows [begin, begin + count) of op(A) x.
void multiply_rows(float* sums, const Product& p, const void* a, const float* x, int64_t begin, int64_t count) {
    constexpr int64_t piece = 256;
    float y[piece];
    if (p.transpose_a) {  // rows of op(A) are contiguous
        for (int64_t i = begin; i < begin + count; i++) {
            float sum = 0;
            for (int64_t k = 0; k < p.k; k += piece) {
                const int64_t length = std::min(piece, p.k - k);
                load(y, at(a, p.type_a, i * p.lda + k), p.type_a, length);
                for (int64_t e = 0; e < length; e++) sum += y[e] * x[k + e];
            }
            sums[i] = sum;
        }
        return;
    }
    for (int64_t i = begin; i < begin + count; i += piece) {
        const int64_t length = std::min(piece, begin + count - i);
        std::fill_n(sums + i, length, 0.0f);
        for (int64_t k = 0; k < p.k; k++) {
            load(y, at(a, p.type_a, k * p.lda + i), p.type_a, length);
            for (int64_t e = 0; e < length; e++) sums[i + e] += y[e] * x[k];
        }
    }
}

void vector_product(const Product& p, const void* a, const void* b, float* d) {
    constexpr int64_t min_parallel = 1 << 16, unit = 64;  // min. elements of A for several workers; rows per unit
    std::vector<float> x(p.k), sums(p.m);
    for (int64_t k = 0; k < p.k; k++) load(&x[k], at(b, p.type_b, p.transpose_b ? k * p.ldb : k), p.type_b, 1);
    const int64_t workers = p.m * p.k < min_parallel ? 1 : omp_get_max_threads();
    const int64_t rows = ((p.m + workers - 1) / workers + unit - 1) / unit * unit;  // per worker
#pragma omp parallel for schedule(static, 1) if (workers > 1)
    for (int64_t i = 0; i < p.m; i += rows) multiply_rows(sums.data(), p, a, x.data(), i, std::min(rows, p.m - i));
    for (int64_t i = 0; i < p.m; i++) d[i] = p.alpha * sums[i] + (p.beta != 0 ? p.beta * d[i] : 0);
}

// Clears the last 4 of the 24 significand bits of each sum.
void coarsen(const Product& p, const Target& sums) {
    constexpr uint32_t cleared = 0xf;
    for (int64_t column = 0; column < p.n; column++) {
        float* const begin = static_cast<float*>(sums.data) + column * sums.ld;
        for (float* sum = begin; sum < begin + p.m; sum++) *sum = bits<float>(bits<uint32_t>(*sum) & ~cleared);
    }
}

// ==== the epilogue ======================================================================================

// GELU in its tanh form, x/2 (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
float gelu_gate(float x) { return 1 / (1 + __expf(-1.5957691216f * (x + 0.044715f * x * x * x))); }
float gelu(float x) { return x * gelu_gate(x); }
float gelu_derivative(float x) {
    const float gate = gelu_gate(x);
    return gate + x * gate * (1 - gate) * 1.5957691216f * (1 + 3 * 0.044715f * x * x);
}

// Bits of epilogues: a bias vector is added, GELU or its derivative is computed, a second matrix is read or written.
constexpr uint32_t has_bias = 4, has_gelu = 32, has_derivative = 64, has_aux = 128;

cudaDataType_t type_of_bias(const cublasLtMatmulDescOpaque_t& desc, const Product& p, cudaDataType_t type_of_d) {
    if (desc.bias_type >= 0) return static_cast<cudaDataType_t>(desc.bias_type);
    return is_fp8(p.type_a) && type_of_d == CUDA_R_32F ? CUDA_R_16BF : type_of_d;
}

// Computes D = epilogue(alpha sums + beta C), a piece of a column at a time.
void finish(const cublasLtMatmulDescOpaque_t& desc, const Product& p, const Target& sums, float alpha, float beta,
            const Source& c, const Target& d) {
    constexpr int64_t piece = 256;
    if (sums.data == d.data && desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT && alpha == 1 && beta == 0) return;
    const auto bias_type = type_of_bias(desc, p, d.type);
#pragma omp parallel for if (!omp_in_parallel())
    for (int64_t j = 0; j < p.n; j++)
        for (int64_t i = 0; i < p.m; i += piece) {
            const int64_t count = std::min(piece, p.m - i);
            void* const out = at(d.data, d.type, j * d.ld + i);
            float x[piece], y[piece] = {};
            load(x, at(sums.data, sums.type, j * sums.ld + i), sums.type, count);
            for (int64_t e = 0; e < count; e++) x[e] *= alpha;
            if (beta != 0) {
                load(y, at(c.data, d.type, j * c.ld + i), d.type, count);
                for (int64_t e = 0; e < count; e++) x[e] += beta * y[e];
            }
            if (desc.epilogue & has_bias) {
                load(y, at(desc.bias, bias_type, i), bias_type, count);
                for (int64_t e = 0; e < count; e++) x[e] += y[e];
            }
            void* const aux = desc.epilogue & has_aux ? at(desc.aux, d.type, j * desc.aux_ld + i) : nullptr;
            if (desc.epilogue & has_derivative) {
                load(y, aux, d.type, count);
                for (int64_t e = 0; e < count; e++) x[e] *= gelu_derivative(y[e]);
            } else if (desc.epilogue & has_gelu) {
                store(aux, x, d.type, count);
                for (int64_t e = 0; e < count; e++) x[e] = gelu(x[e]);
            }
            store(out, x, d.type, count);
        }
}

// ==== oneDNN ============================================================================================

// oneDNN is row-major: to it every matrix is transposed, so it computes D^T (n, m) = op(B)^T op(A)^T.

#ifdef HAVE_ONEDNN
// Uses oneDNN's sgemm, which is faster than its matmul primitive on nearly all shapes of a GPT, up to 2.5 times where a
// leading dimension is a multiple of 1024.
bool onednn_float(const Product& p, const void* a, const void* b, const Target& d) {
    return dnnl_sgemm(p.transpose_b ? 'T' : 'N', p.transpose_a ? 'T' : 'N', p.n, p.m, p.k, p.alpha,
                      static_cast<const float*>(b), p.ldb, static_cast<const float*>(a), p.lda, p.beta,
                      static_cast<float*>(d.data), d.ld) == dnnl_success;
}

// A bfloat16 matmul primitive with its memory objects. It is cached, because generating its code takes milliseconds.
struct Primitive {
    dnnl::matmul matmul;
    std::unordered_map<int, dnnl::memory> arguments;
};

dnnl::engine& onednn_engine() {
    static dnnl::engine value(dnnl::engine::kind::cpu, 0);
    return value;
}

dnnl::memory::data_type onednn_type(cudaDataType_t type) {
    return type == CUDA_R_16BF ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

Primitive make_primitive(const Product& p, const Target& d, bool has_bias, cudaDataType_t bias_type) {
    using dims = dnnl::memory::dims;
    const auto matrix = [](int64_t rows, int64_t columns, cudaDataType_t type, bool transposed, int64_t ld) {
        const int64_t size = ld * (transposed ? columns : rows);
        return dnnl::memory::desc({1, rows, columns}, onednn_type(type),
                                  transposed ? dims{size, 1, ld} : dims{size, ld, 1});
    };
    const dnnl::memory::desc src = matrix(p.n, p.k, p.type_b, p.transpose_b, p.ldb),
                             weights = matrix(p.k, p.m, p.type_a, p.transpose_a, p.lda),
                             dst = matrix(p.n, p.m, d.type, false, d.ld),
                             bias = has_bias ? matrix(1, p.m, bias_type, false, p.m) : dnnl::memory::desc();
    // alpha times the product, plus beta times the old value. The API differs between oneDNN 2 and 3.
    dnnl::primitive_attr attributes;
    dnnl::post_ops then;
#if DNNL_VERSION_MAJOR < 3
    if (p.alpha != 1) attributes.set_output_scales(0, {p.alpha});
#else
    if (p.alpha != 1) then.append_eltwise(dnnl::algorithm::eltwise_linear, p.alpha, 0);
#endif
    if (p.beta != 0) then.append_sum(p.beta);
    attributes.set_post_ops(then);
#if DNNL_VERSION_MAJOR < 3
    const dnnl::matmul::primitive_desc operation(has_bias ? dnnl::matmul::desc(src, weights, bias, dst)
                                                          : dnnl::matmul::desc(src, weights, dst),
                                                 attributes, onednn_engine());
#else
    const auto operation = has_bias ? dnnl::matmul::primitive_desc(onednn_engine(), src, weights, bias, dst, attributes)
                                    : dnnl::matmul::primitive_desc(onednn_engine(), src, weights, dst, attributes);
#endif
    Primitive primitive{dnnl::matmul(operation), {}};
    const auto add = [&](int argument, const dnnl::memory::desc& desc) {
        primitive.arguments.emplace(argument, dnnl::memory(desc, onednn_engine(), DNNL_MEMORY_NONE));
    };
    add(DNNL_ARG_SRC, src);
    add(DNNL_ARG_WEIGHTS, weights);
    add(DNNL_ARG_DST, dst);
    if (has_bias) add(DNNL_ARG_BIAS, bias);
    return primitive;
}

// D = C, because oneDNN's bfloat16 product adds to D.
void copy_to_d(const Source& c, const Target& d, int64_t rows, int64_t columns) {
    if (c.data == d.data) return;
#pragma omp parallel for if (!omp_in_parallel())
    for (int64_t j = 0; j < columns; j++)
        memcpy(at(d.data, d.type, j * d.ld), at(c.data, d.type, j * c.ld), rows * bytes_of(d.type));
}

// Returns false if oneDNN cannot compute the product: bfloat16 needs a processor with AVX-512.
bool onednn_bfloat16(const Product& p, const void* a, const void* b, const Source& c, const Target& d,
                     const void* bias, cudaDataType_t bias_type) {
    const std::tuple key{p.m,     p.n,    p.k,    p.transpose_a, p.transpose_b,   p.lda,    p.ldb,
                         p.alpha, p.beta, d.type, d.ld,          bias != nullptr, bias_type};
    // One cache per worker, because the calls below change the memory objects.
    static thread_local std::map<std::remove_const_t<decltype(key)>, Primitive> primitives;
    static thread_local const dnnl::stream stream(onednn_engine());
    try {
        auto found = primitives.find(key);
        if (found == primitives.end())
            found = primitives.emplace(key, make_primitive(p, d, bias != nullptr, bias_type)).first;
        if (p.beta != 0) copy_to_d(c, d, p.m, p.n);
        auto& arguments = found->second.arguments;
        arguments[DNNL_ARG_SRC].set_data_handle(const_cast<void*>(b));
        arguments[DNNL_ARG_WEIGHTS].set_data_handle(const_cast<void*>(a));
        arguments[DNNL_ARG_DST].set_data_handle(d.data);
        if (bias != nullptr) arguments[DNNL_ARG_BIAS].set_data_handle(const_cast<void*>(bias));
        found->second.matmul.execute(stream, arguments);
        return true;
    } catch (const dnnl::error&) {
        return false;
    }
}

// Computes a product by oneDNN. 16-bit operands for which the processor has no instructions (on most, half precision)
// are first converted to contiguous floats.
bool onednn_product(const Product& p, const void* a, const void* b, const Target& d) {
    if (p.type_a == CUDA_R_32F) return onednn_float(p, a, b, d);
    if (p.type_a == CUDA_R_16BF && onednn_bfloat16(p, a, b, {d.data, d.ld}, d, nullptr, CUDA_R_32F)) return true;
    Product wide = p;
    wide.lda = p.transpose_a ? p.k : p.m;
    wide.ldb = p.transpose_b ? p.n : p.k;
    const int64_t columns_a = p.transpose_a ? p.m : p.k, columns_b = p.transpose_b ? p.k : p.n;
    a = expanded(Scratch::panels_a, CUDA_R_32F, a, p.type_a, p.lda, wide.lda, columns_a);
    b = expanded(Scratch::panels_b, CUDA_R_32F, b, p.type_b, p.ldb, wide.ldb, columns_b);
    return onednn_float(wide, a, b, d);
}

// Computes an FP32 product whose A fits in each core's cache (2 MB), as the weights of a small model do; returns false
// for others. Each worker computes a part of the columns, adds beta C and applies the epilogue while they are in its
// cache.
bool small_product(const cublasLtMatmulDescOpaque_t& desc, const Product& p, const void* a, const void* b, float beta,
                   const Source& c, const Target& d) {
    constexpr int64_t max_elements = 1 << 19, min_columns = 64;  // of A; per worker
    const int64_t workers = omp_get_max_threads();
    if (p.m * p.k > max_elements || p.n < workers * min_columns || workers == 1) return false;
    bool done = true;
#pragma omp parallel for schedule(static, 1) reduction(&& : done)
    for (int64_t w = 0; w < workers; w++) {
        const int64_t first = p.n * w / workers, last = p.n * (w + 1) / workers;
        Product columns = p;
        columns.n = last - first;
        cublasLtMatmulDescOpaque_t epilogue = desc;
        const Target part{at(d.data, d.type, first * d.ld), d.type, d.ld};
        done = onednn_float(columns, a, at(b, p.type_b, first * (p.transpose_b ? 1 : p.ldb)), part) && done;
        if (desc.epilogue & has_aux) epilogue.aux = at(desc.aux, d.type, first * desc.aux_ld);
        finish(epilogue, columns, part, 1, beta, {at(c.data, d.type, first * c.ld), c.ld}, part);
    }
    return done;
}

bool has_bfloat16() {
    const auto bits = [](dnnl::cpu_isa isa) { return static_cast<unsigned>(isa); };
    static const unsigned needed = bits(dnnl::cpu_isa::avx512_core_bf16), found = bits(dnnl::get_effective_cpu_isa());
    return (found & needed) == needed;
}

#else
bool has_bfloat16() { return false; }
#endif

// ==== what is supported =================================================================================

// Returns whether a GPU's cuBLASLt supports the epilogue's type, leading dimension and pointer alignment. (NVIDIA's
// cublasLt.h at CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE and _EPILOGUE_AUX_LD.)
bool has_epilogue(const cublasLtMatmulDescOpaque_t& desc, uint32_t type_of_d) {
    constexpr int64_t aux_ld_unit = 8;
    constexpr uintptr_t aux_alignment = 16;
    if (desc.epilogue & has_bias && desc.bias_type >= 0 && static_cast<uint32_t>(desc.bias_type) != type_of_d)
        return false;
    return !(desc.epilogue & has_aux) ||
           (desc.aux_ld % aux_ld_unit == 0 && reinterpret_cast<uintptr_t>(desc.aux) % aux_alignment == 0);
}

// Returns whether cuBLASLt supports this FP8 product. It requires that A is transposed and B is not (so that both are
// contiguous along k), except on compute capability 10; columns whose length and stride are multiples of 16 bytes (the
// number of columns is free); at least one operand in E4M3, an output of 16 or 32 bits, and a 16-bit bias.
// (Documentation of cublasLtMatmul, "To use FP8 kernels", and its table of types; "Tensor Core Usage".)
using Layout = const cublasLtMatrixLayoutOpaque_t&;
bool has_fp8(const cublasLtMatmulDescOpaque_t& desc, Layout a, Layout b, Layout d) {
    constexpr uint64_t unit = 16;
    constexpr int first_capability = 89;
    const bool any_layout = card() != nullptr && card()->capability.number() / 10 == 10;
    if (card() != nullptr && card()->capability.number() < first_capability) return false;
    if (!is_fp8(a.type) || !is_fp8(b.type) || (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2)) return false;
    if (d.type != CUDA_R_32F && d.type != CUDA_R_16BF && d.type != CUDA_R_16F) return false;
    if (desc.compute != CUBLAS_COMPUTE_32F) return false;
    if (!any_layout && (desc.transpose_a == CUBLAS_OP_N || desc.transpose_b != CUBLAS_OP_N)) return false;
    for (const auto* layout : {&a, &b, &d}) {
        const size_t bytes = bytes_of(static_cast<cudaDataType_t>(layout->type));
        if ((layout->rows | static_cast<uint64_t>(layout->ld)) * bytes % unit != 0) return false;
    }
    const int32_t bias_type = d.type == CUDA_R_32F ? CUDA_R_16BF : static_cast<int32_t>(d.type);
    return desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT ||
           (desc.epilogue == CUBLASLT_EPILOGUE_BIAS && (desc.bias_type < 0 || desc.bias_type == bias_type));
}

// Returns the status of a product: an error if it is invalid or not supported. The epilogue's pointers may be null.
cublasStatus_t check_product(const cublasLtMatmulDescOpaque_t& desc, Layout a, Layout b, Layout c, Layout d) {
    const bool ta = desc.transpose_a != CUBLAS_OP_N, tb = desc.transpose_b != CUBLAS_OP_N;
    const uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns, n = tb ? b.rows : b.columns;
    if ((tb ? b.columns : b.rows) != k || d.rows != m || d.columns != n || c.rows != m || c.columns != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const auto* layout : {&a, &b, &c, &d})
        if (layout->rows == 0 || layout->columns == 0 || layout->ld < static_cast<int64_t>(layout->rows))
            return CUBLAS_STATUS_INVALID_VALUE;
    const bool eight_bits = is_fp8(a.type) || is_fp8(b.type);
    if (!eight_bits && (desc.scale_a != nullptr || desc.scale_b != nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
    if (c.type != d.type || desc.scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const float* scale : {desc.scale_a, desc.scale_b})   // cuBLASLt 13.1 on an H100
        if (reinterpret_cast<uintptr_t>(scale) % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (eight_bits) return has_fp8(desc, a, b, d) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    const bool known = a.type == CUDA_R_32F || a.type == CUDA_R_16BF || a.type == CUDA_R_16F;
    if (!known || a.type != b.type || (d.type != CUDA_R_32F && d.type != a.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (card() != nullptr && !has_epilogue(desc, d.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const auto known_epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                      CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU}) {
        if (desc.epilogue != known_epilogue) continue;
        const bool is_short = desc.epilogue & has_aux && desc.aux_ld < static_cast<int64_t>(m);
        return is_short ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

// ==== cublasLtMatmul ====================================================================================

// A call of cublasLtMatmul, with a copy of the descriptor at that time.
struct MatmulCall {
    cublasLtMatmulDescOpaque_t desc;
    Product p;
    const void *A, *B;
    Source c;
    Target result;
    Algorithm algorithm;
};

#ifdef CUDA_CPU_INSPECT
// Reports the product to dev/inspect.
void report_product(const MatmulCall& call) {
    const auto& [desc, p, A, B, c, result, algorithm] = call;
    const bool has_two = desc.epilogue & has_aux;
    const char* epilogue = desc.epilogue & has_bias ? (has_two ? "gelu_aux" : "bias") : has_two ? "dgelu" : "none";
    watch::product({static_cast<size_t>(p.m), static_cast<size_t>(p.n), static_cast<size_t>(p.k),
                    p.type_a == CUDA_R_32F   ? "fp32"
                    : p.type_a == CUDA_R_16F ? "fp16"
                    : is_fp8(p.type_a)       ? "fp8"
                                             : "bf16",
                    static_cast<unsigned>(bytes_of(result.type)), p.beta != 0, epilogue});
}
#endif

bool is_vector(const Product& p) { return p.n == 1 && bytes_of(p.type_a) == 2; }

// Computes the product in float by the fast algorithm. Without oneDNN it prints a notice once and uses the plain loop.
void fast_product(const Product& p, const void* A, const void* B, const Target& sums) {
    if (is_vector(p)) return vector_product(p, A, B, static_cast<float*>(sums.data));
#ifdef HAVE_ONEDNN
    if (onednn_product(p, A, B, sums)) return;
#endif
    static const bool printed = fprintf(stderr, "%s\n", no_onednn_notice) > 0;
    static_cast<void>(printed);
    plain_product(p, A, B, sums);
}

// Computes the product in float. Algorithms other than `fast` sum over k in two halves, so their rounding differs.
void sum_up(const Product& p, const void* A, const void* B, const Target& sums, Algorithm algorithm) {
    const bool is_fast = algorithm == Algorithm::fast;
    const int64_t split = rounding.split(p.k), begin = split == 0 && !is_fast ? p.k / 2 : split;
    const auto multiply = is_fast ? fast_product : plain_product;
    Product first = p, second = p;
    first.k = begin;
    second.k = p.k - begin;
    if (begin > 0) {
        multiply(first, A, B, sums);
        second.beta = 1;
    }
    multiply(second, at(A, p.type_a, begin * (p.transpose_a ? 1 : p.lda)),
             at(B, p.type_b, begin * (p.transpose_b ? p.ldb : 1)), sums);
    if (algorithm == Algorithm::coarse) coarsen(p, sums);
}

// ---- FP8: bfloat16 represents every FP8 value exactly, and float every product of two. So FP8 operands are converted
// to bfloat16, or to float if the processor has no bfloat16 instructions, and multiplied in that type.

// Converted FP8 operands: contiguous matrices whose columns run along k.
struct Expanded {
    const void *a, *b;
    cudaDataType_t type;
    float scale;  // of the product
};

// Computes sums as Hopper's tensor cores: in each group of 32 products along k, the products and the sum of earlier
// groups are truncated to fp8_bits fraction bits of the largest of them, then added, and their sum is truncated.
void truncated_sums(const float* a, const float* b, float* sums, int64_t m, int64_t n, int64_t k) {
    constexpr int64_t group = 32;
    const auto unit_of = [](float x) { return std::ldexp(1.0f, std::ilogb(x) - fp8_bits); };
    for (int64_t at = 0; at < m * n; at++) {
        const float *x = a + at % m * k, *y = b + at / m * k;
        float sum = 0;
        for (int64_t begin = 0; begin < k; begin += group) {
            const int64_t end = std::min(begin + group, k);
            float largest = std::abs(sum);
            for (int64_t e = begin; e < end; e++) largest = std::max(largest, std::abs(x[e] * y[e]));
            if (largest == 0) continue;
            const float unit = unit_of(largest);
            float units = std::trunc(sum / unit);  // exact: below 2^24
            for (int64_t e = begin; e < end; e++) units += std::trunc(x[e] * y[e] / unit);
            sum = units == 0 ? 0 : std::trunc(units / unit_of(units)) * unit_of(units) * unit;
        }
        sums[at] = sum;
    }
}

// Computes the tile of D that begins at row i, column j.
void multiply_fp8_tile(const MatmulCall& call, const Expanded& x, int64_t i, int64_t j, int64_t rows, int64_t columns) {
    const Target& d = call.result;
    Product p = call.p;
    p.m = rows;
    p.n = columns;
    p.type_a = p.type_b = x.type;
    p.lda = p.ldb = p.k;
    p.transpose_a = true;
    p.transpose_b = false;
    p.alpha = 1;  // oneDNN generates code for each alpha, and scales change from call to call
    p.beta = 0;
    const Target part = {at(d.data, d.type, j * d.ld + i), d.type, d.ld};
    const Source c = {at(call.c.data, d.type, j * call.c.ld + i), call.c.ld};
    const Target sums = {scratch(Scratch::sums, rows * columns), CUDA_R_32F, rows};
    const void *a = at(x.a, x.type, i * p.k), *b = at(x.b, x.type, j * p.k);
    if (fp8_bits == 0) sum_up(p, a, b, sums, call.algorithm);
    else
        truncated_sums(static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(sums.data), p.m,
                       p.n, p.k);
    cublasLtMatmulDescOpaque_t epilogue = call.desc;
    epilogue.bias_type = type_of_bias(call.desc, call.p, d.type);
    if (epilogue.epilogue & has_bias)
        epilogue.bias = at(call.desc.bias, static_cast<cudaDataType_t>(epilogue.bias_type), i);
    finish(epilogue, p, sums, x.scale, call.p.beta, c, part);
}

// Computes an FP8 product in tiles of a fixed size. One worker computes each tile, so the sums do not depend on the
// number of workers. (oneDNN would split sums over k among workers.)
void multiply_fp8(const MatmulCall& call) {
    constexpr int64_t tile = 256;
    const Product& p = call.p;
    const float *scale_a = call.desc.scale_a, *scale_b = call.desc.scale_b;
    const float scale = p.alpha * (scale_a == nullptr ? 1 : *scale_a) * (scale_b == nullptr ? 1 : *scale_b);
    const cudaDataType_t type = has_bfloat16() && fp8_bits == 0 ? CUDA_R_16BF : CUDA_R_32F;
    const Expanded x = {expanded(Scratch::a, type, call.A, p.type_a, p.lda, p.k, p.m, !p.transpose_a),
                        expanded(Scratch::b, type, call.B, p.type_b, p.ldb, p.k, p.n, p.transpose_b), type, scale};
#pragma omp parallel
    {
        omp_set_num_threads(1);  // for parallel regions that this worker starts, such as oneDNN's
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t j = 0; j < p.n; j += tile)
            for (int64_t i = 0; i < p.m; i += tile)
                multiply_fp8_tile(call, x, i, j, std::min(tile, p.m - i), std::min(tile, p.n - j));
    }
}

// Computes D, and aux if the epilogue writes it.
void compute_d(const MatmulCall& call) {
    const auto& [desc, product, A, B, c, result, algorithm] = call;
    Product p = product;
    if (algorithm == Algorithm::slow) usleep(2000);
    if (is_fp8(p.type_a)) return multiply_fp8(call);

    float beta_left = 0;   // for `finish`, which adds beta C
#ifdef HAVE_ONEDNN
    const bool fused = algorithm == Algorithm::fast && rounding.seed == 0;  // product and epilogue in one step
    if (fused && p.type_a == CUDA_R_32F) {
        if (c.data != result.data) beta_left = std::exchange(p.beta, 0.0f);
        if (small_product(desc, p, A, B, beta_left, c, result)) return;
        if (onednn_float(p, A, B, result)) return finish(desc, p, result, 1, beta_left, c, result);
    }
    // oneDNN can add the bias, but before it multiplies by alpha, so alpha must be 1.
    if (fused && p.type_a == CUDA_R_16BF && !is_vector(p) &&
        (desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT || (desc.epilogue == CUBLASLT_EPILOGUE_BIAS && p.alpha == 1))) {
        void* const bias = desc.epilogue == CUBLASLT_EPILOGUE_BIAS ? desc.bias : nullptr;
        if (onednn_bfloat16(p, A, B, c, result, bias, type_of_bias(desc, p, result.type))) return;
    }
#endif
    // The product is computed in float; the epilogue converts it to D.
    Target sums = result;
    if (result.type != CUDA_R_32F) sums = {scratch(Scratch::sums, p.m * p.n), CUDA_R_32F, p.m};
    if (c.data != sums.data) beta_left += std::exchange(p.beta, 0.0f);
    sum_up(p, A, B, sums, algorithm);
    finish(desc, p, sums, 1, beta_left, c, result);
}

void multiply(const MatmulCall& call) {
    const DeviceWork work;
#ifdef CUDA_CPU_INSPECT
    report_product(call);
    if (watch::only_counts()) return;
#endif
    compute_d(call);
}
}  // namespace
}  // namespace cuda_cpu

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t* results, int* found) {
    *found = 0;
    if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (const cublasStatus_t status = cuda_cpu::check_product(*desc, *a, *b, *c, *d)) return status;
    const cublasLtMatmulPreferenceOpaque_t defaults, &wishes = preference == nullptr ? defaults : *preference;
    const uint64_t alignment =
        std::min(cuda_cpu::full_alignment, *std::min_element(wishes.alignments, std::end(wishes.alignments)));
    if (cuda_cpu::is_fp8(a->type) && alignment < cuda_cpu::full_alignment) return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool in_place = wishes.reduction_schemes & CUBLASLT_REDUCTION_SCHEME_INPLACE;
    for (const cuda_cpu::Algorithm algorithm : cuda_cpu::offered_algorithms()) {
        if (*found == wanted) break;
        if (algorithm == cuda_cpu::Algorithm::in_place && !in_place) continue;
        cublasLtMatmulHeuristicResult_t& result = results[(*found)++] = {};
        result.algo.data[0] = static_cast<uint64_t>(algorithm);
        result.algo.data[1] = cuda_cpu::card() == nullptr ? 0 : alignment;
        result.state = algorithm == cuda_cpu::Algorithm::refused ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
        result.wavesCount = 1;
    }
    return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
    if (const cublasStatus_t status = cuda_cpu::check_product(*desc, *a, *b, *c, *d)) return status;
    if (!cuda_cpu::usable(*algorithm)) return CUBLAS_STATUS_NOT_SUPPORTED;
    const auto copy = *algorithm;  // *algorithm may be a part of *result
    *result = {};
    result->algo = copy;
    result->wavesCount = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* chosen, void* workspace, size_t, cudaStream_t stream) {
    using namespace cuda_cpu;
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (const cublasStatus_t status = check_product(*desc, *a, *b, *c, *d)) return status;
    if (A == nullptr || B == nullptr || D == nullptr ||
        (desc->epilogue & has_bias && desc->bias == nullptr) ||
        (desc->epilogue & has_aux && desc->aux == nullptr))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (chosen != nullptr && !usable(*chosen)) return CUBLAS_STATUS_INVALID_VALUE;
    const uint64_t alignment = is_fp8(a->type) ? full_alignment : chosen != nullptr ? chosen->data[1] : 0;
    if (!all_aligned(alignment, {A, B, C, D})) return CUBLAS_STATUS_INVALID_VALUE;
    // "Must be 256B aligned (i.e. lowest 8 bits of address must be 0)"
    if (card() != nullptr && reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    const auto algorithm = chosen == nullptr ? Algorithm::fast : static_cast<Algorithm>(chosen->data[0]);
    if (algorithm == Algorithm::failing) return CUBLAS_STATUS_EXECUTION_FAILED;

    const bool ta = desc->transpose_a != CUBLAS_OP_N, tb = desc->transpose_b != CUBLAS_OP_N;
    const auto m = static_cast<int64_t>(d->rows), n = static_cast<int64_t>(d->columns);
    const auto k = static_cast<int64_t>(ta ? a->rows : a->columns);
    const auto type_a = static_cast<cudaDataType_t>(a->type), type_b = static_cast<cudaDataType_t>(b->type);
    const Product p{m,  n,     k,     ta,    tb, type_a, type_b, a->ld, b->ld, *static_cast<const float*>(alpha),
                    *static_cast<const float*>(beta)};
    if (p.beta == 0) C = D, c = d;  // C is not read and may be null
    if (C == nullptr || (C == D && c->ld != d->ld)) return CUBLAS_STATUS_INVALID_VALUE;
    const MatmulCall call{*desc, p, A, B, {C, c->ld}, {D, static_cast<cudaDataType_t>(d->type), d->ld}, algorithm};
    const cudaError_t error = submit(stream, [call] { return multiply(call), cudaSuccess; });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

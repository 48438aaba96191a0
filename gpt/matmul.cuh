// Matrix products by cuBLASLt: matmul(). Included by train_gpt.cu, whose section "linear" calls it.
//
// out (M,N) = A (M,K) B (K,N), all row-major; A and B may be stored transposed
// mapping   cuBLASLt, which is column-major. A row-major matrix is the transpose of a column-major one, so swapping the
//           operands gives out^T = B^T A^T. FP8: see fp8_in_any_layout()
// epilogue  bias, always. If activation() is GELU, on Hopper and later, and on a CPU, also GELU', unless
//           --matmul-tuning has found separate kernels faster; and bias with GELU, if it has found that faster, with
//           --recompute none: the other modes compute GELU again from the stored pre-activation and must get the same
//           bits. With FP8 only the bias is an epilogue, because kernels write the 8-bit copies
// choice    cuBLASLt offers several algorithms for a shape, best first by its own estimate. The program takes the
//           first, or the fastest (--matmul-tuning). Each algorithm gives the same bits at every call; two algorithms
//           may round differently
// cost      compute: 2*M*N*K FLOPs
// variants  dev/kernels/matmul.cu
#pragma once

constexpr size_t MATMUL_WORKSPACE = 128 << 20;   // for partial sums: more algorithms fit than in the usual 32 MiB
constexpr uint32_t MATMUL_ALIGNMENT = 16;        // bytes, at least, of every operand
constexpr int MATMUL_CANDIDATES = 64;            // algorithms requested from cuBLASLt

enum class Op { AS_IS, TRANSPOSED };
enum class Into { ASSIGN, ADD };
enum class Epilogue { NONE, BIAS, GELU_BACKWARD, BIAS_GELU };   // BIAS_GELU also stores the pre-activation

struct MatmulShape {
    size_t M, N, K;
    Op a, b;
    DType out;
    Into into;
    Epilogue epilogue;
    DType a_type = FLOATX, b_type = FLOATX;
    bool fast_accumulation = false;   // of FP8 operands

    auto key() const {
        return std::make_tuple(M, N, K, a, b, out, into, epilogue, a_type, b_type, fast_accumulation);
    }
    bool operator<(const MatmulShape& other) const { return key() < other.key(); }
    std::string name() const {
        constexpr const char* EPILOGUES[] = {"", " + bias", " * gelu'", " + bias, gelu"};
        const std::string both = format("%s x %s", name_of(a_type), name_of(b_type));
        const std::string types = a_type == b_type ? name_of(a_type) : both;
        return format("%s%s %zu x %zu x %zu %c%c %s %s%s", types.c_str(), fast_accumulation ? " fast" : "",
                      M, N, K, a == Op::AS_IS ? 'N' : 'T', b == Op::AS_IS ? 'N' : 'T',
                      into == Into::ADD ? "added to" : "into", name_of(out), EPILOGUES[static_cast<int>(epilogue)]);
    }
};

size_t matmul_workspace_bytes() { return device.matmul_workspace ? MATMUL_WORKSPACE : 0; }

cudaDataType_t cuda_type(DType dtype) {
    constexpr cudaDataType_t TYPES[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return TYPES[static_cast<int>(dtype)];
}

template <typename T> void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
    check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
}

// cuBLASLt's layout of a row-major matrix (rows, columns), which may be stored transposed.
cublasLtMatrixLayout_t matrix_layout(DType dtype, size_t rows, size_t columns, Op op) {
    if (op == Op::TRANSPOSED) std::swap(rows, columns);
    cublasLtMatrixLayout_t layout;
    check(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), columns, rows, columns), "cublasLtMatrixLayoutCreate");
    return layout;
}

struct Product {
    void* out;
    const void *a, *b;
    MatmulShape shape;
    const float *a_factor = nullptr, *b_factor = nullptr;   // for FP8 operands: 1 / scale, in device memory
    const void* add = nullptr;   // (M,N), as out, for Into::ADD: what is added; null: the old out
    float alpha = 1, beta = 1;   // out = alpha A B + beta add
    // Of the epilogue, floatX: its inputs, a bias (N) and a pre-activation (M,N), and its second output (M,N).
    const void *bias = nullptr, *pre_activation = nullptr;
    void* second_out = nullptr;
};

// cuBLASLt's description of one shape, created once and kept until the program ends.
struct MatmulPlan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;   // in cuBLASLt's order: a and b are swapped
    std::vector<cublasLtMatmulAlgo_t> algorithms;   // the first is used; empty: the shape is not used
    // For matmul tuning: the last product of this shape; what it competes with, if it is optional.
    Product last = {};
    std::function<void()> alternative;
};

// Sets the pointers that differ from call to call: the epilogue's and FP8 scales.
void set_pointers(const MatmulPlan& plan, const Product& p) {
    const void* aux = p.second_out ? p.second_out : p.pre_activation;
    // cuBLASLt offers algorithms for the alignment of the first call's pointer.
    if (reinterpret_cast<uintptr_t>(aux) % MATMUL_ALIGNMENT)
        throw Failure("%s: expected a pre-activation aligned to %u bytes", p.shape.name().c_str(), MATMUL_ALIGNMENT);
    if (p.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (aux) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    if (p.b_factor) set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_factor);
    if (p.a_factor) set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_factor);
}

// Returns the algorithms that cuBLASLt offers for a plan, best first by its own estimate.
std::vector<cublasLtMatmulAlgo_t> offered_algorithms(const MatmulPlan& plan) {
    cublasLtMatmulPreference_t preference;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{matmul_workspace_bytes()});
    // cuBLASLt may split a long sum among blocks if the parts stay FP32 and a separate kernel adds them. Adding the
    // parts in the output would round each time to the output's type, in an order that cuBLASLt does not specify.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(operand, MATMUL_ALIGNMENT);
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES] = {};
    int count = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(device.matmul, plan.operation, plan.a, plan.b, plan.out,
                                                       plan.out, preference, MATMUL_CANDIDATES, results, &count);
    check(cublasLtMatmulPreferenceDestroy(preference), "cublasLtMatmulPreferenceDestroy");
    std::vector<cublasLtMatmulAlgo_t> offered;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) offered.push_back(results[i].algo);
    return offered;
}

MatmulPlan make_matmul_plan(const Product& p) {
    const MatmulShape& s = p.shape;
    MatmulPlan plan;
    check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, s.b == Op::TRANSPOSED ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, s.a == Op::TRANSPOSED ? CUBLAS_OP_T : CUBLAS_OP_N);
    constexpr cublasLtEpilogue_t EPILOGUES[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                                CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_GELU_AUX_BIAS};
    set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, EPILOGUES[static_cast<int>(s.epilogue)]);
    if (p.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(FLOATX));
    if (s.epilogue == Epilogue::GELU_BACKWARD || s.epilogue == Epilogue::BIAS_GELU)
        set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(s.N));
    if (s.fast_accumulation) set(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
    set_pointers(plan, p);
    plan.a = matrix_layout(s.b_type, s.K, s.N, s.b);
    plan.b = matrix_layout(s.a_type, s.M, s.K, s.a);
    plan.out = matrix_layout(s.out, s.M, s.N, Op::AS_IS);
    if (s.epilogue != Epilogue::BIAS_GELU) plan.algorithms = offered_algorithms(plan);
    return plan;
}

// The plan of every shape that has occurred.
static std::map<MatmulShape, MatmulPlan> matmul_plans;

MatmulPlan& matmul_plan(const Product& p) {
    const auto known = matmul_plans.find(p.shape);
    if (known != matmul_plans.end()) return known->second;
    return matmul_plans.emplace(p.shape, make_matmul_plan(p)).first->second;
}

cublasStatus_t multiply(const MatmulPlan& plan, const Product& p, const cublasLtMatmulAlgo_t& algorithm) {
    const float beta = p.shape.into == Into::ADD ? p.beta : 0;
    const void* added = p.add ? p.add : p.out;
    set_pointers(plan, p);
    return cublasLtMatmul(device.matmul, plan.operation, &p.alpha, p.b, plan.a, p.a, plan.b, &beta, added, plan.out,
                          p.out, plan.out, &algorithm, device.matmul_workspace, matmul_workspace_bytes(),
                          device.stream);
}

// Returns false if cuBLASLt has no kernel for this shape, or if matmul tuning has not chosen it.
bool try_matmul(const Product& p) {
    MatmulPlan& plan = matmul_plan(p);
    plan.last = p;
    if (plan.algorithms.empty()) return false;
    auto work = [&] { check(multiply(plan, p, plan.algorithms[0]), "cublasLtMatmul"); };
    const bool updates = p.shape.into == Into::ADD && !p.add;
    if (updates) on_stream("matmul", device.stream, work, updated(p.out), p.a, p.b);
    else on_stream("matmul", device.stream, work, p.out, p.second_out, p.a, p.b, p.add, p.bias, p.pre_activation);
    return true;
}

// Returns the first cuBLASLt with FP8 kernels for this GPU, as cublasLtGetVersion() numbers them: that of CUDA 12.1
// Update 1 for Ada, of CUDA 11.8 for Hopper and of CUDA 12.8 for Blackwell.
size_t first_cublaslt_with_fp8() {
    const int major = device.properties.major;
    return major >= 10 ? 120800 : major == 9 ? 111103 : 120103;
}

std::string cublaslt_text(size_t version) {
    return format("cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
}

void matmul(const Product& p) {
    if (try_matmul(p)) return;
    const bool fp8 = p.shape.a_type != FLOATX;
    throw Failure("%s has no kernel for a matmul of %s%s", cublaslt_text(cublasLtGetVersion()).c_str(),
                  p.shape.name().c_str(),
                  fp8 ? format("; FP8 needs %s", cublaslt_text(first_cublaslt_with_fp8()).c_str()).c_str() : "");
}

// Runs p, whose epilogue with GELU is optional, or alternative(), which computes the same in more launches. Matmul
// tuning chooses, and calls alternative() later: it must own what it captures.
template <typename F> void matmul_or(const Product& p, F alternative) {
    constexpr size_t BIAS_GELU_VERSION = 120500;   // of cuBLASLt, at least
    const bool missing = p.shape.epilogue == Epilogue::BIAS_GELU && cublasLtGetVersion() < BIAS_GELU_VERSION;
    const bool slow = device.properties.major < 9 && !device.is_cpu();   // before Hopper, slower than the kernels
    if (missing || slow || p.shape.a_type != FLOATX) return alternative();
    if (!activation_is_gelu(static_cast<float*>(p.out))) return alternative();   // which then overwrites p.out
    matmul_plan(p).alternative = alternative;
    if (!try_matmul(p)) alternative();
}

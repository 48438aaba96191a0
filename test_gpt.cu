// Tests of train_gpt.cu. Each result is one line: "ok" or "FAILED", the expectation, and the measured numbers.
//
// The same file runs on a GPU and on a CPU. Each kernel is called through its launcher and compared with a reference: a
// plain loop in double, which also computes the error that rounding allows (section "numbers").
//
// Map
//    arrays · numbers · trials   tools, in addition to dev/tests/testing.h
//    one section per kernel, in the order of train_gpt.cu: the reference, then the comparison
//    files for the tests · models for the tests
//    against PyTorch · shards · memory · Hugging Face · data · HellaSwag · graphs · loss scaling · schedule and
//    sampling · text
//    main
// Included from dev/tests/
//    test_fp8.cuh         FP8
//    test_derivatives.cuh gradients against differences of forward (FP32)
//    test_plan.cuh        memory and time that `plan` predicts
//    test_runs.cuh        whole command lines: reproducibility, files, signals
//    test_bad_input.cuh   user errors, each rejected with a message of one line

#define TESTING
#include "train_gpt.cu"

#include "dev/tests/reference.h"
#include "dev/tests/testing.h"

#include <poll.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <set>

// ==== arrays =================================================================
// Each device array is an allocation of exactly its size, so that AddressSanitizer reports out-of-bounds accesses, and
// is initialised with NaN.

typedef std::vector<Values> Outputs;   // all output arrays of one launch

static uint64_t random_calls = 0;

// Returns n uniform random values between low and high, rounded to T. They differ between calls, not between runs.
template <typename T> Values random_values(size_t n, double low = -1, double high = 1) {
    const uint64_t seed = splitmix64(++random_calls);
    Values values(n);
    for (size_t i = 0; i < n; i++) {
        const double uniform = std::ldexp(splitmix64(seed ^ splitmix64(i)) >> 11, -53);   // [0, 1)
        values[i] = stored_as<T>(low + (high - low) * uniform);
    }
    return values;
}

template <typename T> std::vector<T> from_device(const T* from, size_t n) {
    std::vector<T> values(n);
    download(values.data(), from, n * sizeof(T));
    return values;
}

template <typename T> class DeviceArray {
public:
    explicit DeviceArray(size_t n) : size_(n) {
        check(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)), "cudaMalloc");
        check(cudaMemsetAsync(data_, 0xff, n * sizeof(T), device.stream), "cudaMemset");   // NaN, or -1
    }
    template <typename X> explicit DeviceArray(const std::vector<X>& values) : DeviceArray(values.size()) {
        const std::vector<T> typed(values.begin(), values.end());
        upload(data_, typed.data(), size_ * sizeof(T));
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    operator T*() const { return data_; }

    Values values() const {
        Values values;
        for (const T& x : from_device(data_, size_)) {
            if constexpr (std::is_class_v<T>) values.push_back(static_cast<float>(x));
            else values.push_back(x);
        }
        return values;
    }

private:
    T* data_ = nullptr;
    size_t size_;
};

// Returns the memory of `values` as a string, so that == compares bits.
template <typename T> std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
bool same_bits(const Values& a, const Values& b) { return bytes_of(a) == bytes_of(b); }   // true for equal NaNs

// Returns copies of the arrays.
template <typename... Arrays> Outputs outputs(const Arrays&... arrays) { return {arrays.values()...}; }

constexpr DType GRAD16 = FLOATX == DType::FP16 ? DType::FP16 : DType::BF16;
template <typename G> Grad grad(const DeviceArray<G>& array) {
    return {static_cast<G*>(array), std::is_same_v<G, float> ? DType::FP32 : GRAD16};
}

// Calls f(float()) and f(grad16()): parameter gradients are stored in FP32 or in 16 bits.
template <typename F> void for_each_gradient_type(F f) {
    f(float());
    f(grad16());
}

// ==== numbers ================================================================
// A Number is a double with a bound of the error that the same operations make in FP32. Each operation adds half an
// ulp, U times its result, to the propagated errors of its operands. A kernel's error may be ORDER times this bound,
// because it adds in another order than the reference, plus one rounding to the type in which the result is stored.
// source    Higham 2002, "Accuracy and Stability of Numerical Algorithms", 3.3: running error analysis

constexpr double U = 1.0 / (1 << 24);   // unit roundoff of FP32
constexpr double ORDER = 2;

struct Number {
    double value = 0, error = 0;

    Number() = default;
    Number(double exact) : value(exact) {}
    Number(double v, double e) : value(v), error(e) {}
    // U times the larger of terms and sum: another order may add the larger term before the terms that cancel it.
    Number& operator+=(const Number& b) {
        const double larger_term = std::max(std::abs(value), std::abs(b.value));
        value += b.value;
        error += b.error + U * std::max(larger_term, std::abs(value));
        return *this;
    }
};

typedef std::vector<Number> Numbers;

double value_of(const Number& x) { return x.value; }
Number operator+(Number a, const Number& b) { return a += b; }
Number operator-(const Number& a, const Number& b) { return a + Number(-b.value, b.error); }
Number operator*(const Number& a, const Number& b) {
    const double value = a.value * b.value;
    return {value, std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error + U * std::abs(value)};
}
// Two roundings: a compiler may multiply by the reciprocal.
Number operator/(const Number& a, const Number& b) {
    const double value = a.value / b.value;
    return {value, (a.error + std::abs(value) * b.error) / std::abs(b.value) + 2 * U * std::abs(value)};
}
Number sqrt(const Number& a) {
    const double low = std::max(0.0, a.value - a.error);
    return {std::sqrt(a.value), std::sqrt(a.value + a.error) - std::sqrt(low) + U * std::sqrt(a.value)};
}
// Maximum errors by the CUDA Programming Guide: __expf 2 + |1.173 x| ulps, and subnormal results may be flushed to 0;
// logf 1 ulp; tanhf 2 ulps.
Number exp(const Number& a) {
    const double value = std::exp(a.value);
    return {value, value * (a.error + 2 * U * (2 + 1.173 * std::abs(a.value))) + std::numeric_limits<float>::min()};
}
Number log(const Number& a) { return {std::log(a.value), a.error / a.value + 2 * U * std::abs(std::log(a.value))}; }
// cuBLASLt's epilogues with GELU and GELU' approximate tanh with an error that NVIDIA does not document. With cuBLASLt
// 13.1 it was up to 7.5e-6 on an H100, in FP32 and in BF16. Tests of these epilogues add EPILOGUE_TANH_ERROR.
constexpr double EPILOGUE_TANH_ERROR = 0x1p-16;
static double tanh_error = 0;
Number tanh(const Number& a) {
    const double value = std::tanh(a.value);
    return {value, (1 - value * value) * a.error + 4 * U * std::abs(value) + tanh_error};
}

// Returns half an ulp of T at x: the maximum error of rounding to T.
template <typename T> double half_ulp(double x) {
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    constexpr int DIGITS = std::is_same_v<T, double> ? 53 : std::is_same_v<T, float> ? 24 : IS_HALF ? 11 : 8;
    if (x == 0) return 0;
    return std::ldexp(1.0, std::max(std::ilogb(x) - DIGITS, IS_HALF ? -25 : -1000));   // FP16's smallest value: 2^-24
}

// Returns x with the error bound that it has after rounding to T.
template <typename T> Number stored_as(const Number& x) {
    return {x.value, x.error + half_ulp<T>(std::abs(x.value) + x.error)};
}

Numbers numbers(const Values& values) { return Numbers(values.begin(), values.end()); }

// Returns the values rounded to T, without their errors.
template <typename T> Values values_stored_as(const Numbers& numbers) {
    Values values;
    for (const Number& x : numbers) values.push_back(stored_as<T>(x.value));
    return values;
}

// ==== trials =================================================================

#ifdef CUDA_ON_CPU
// Seed 0 runs blocks and threads in their natural order. Another seed draws a random order, which changes the results
// of a kernel that lacks a barrier, and fills new memory with NaN.
void set_thread_order(uint64_t seed) { cuda_cpu::set_seed(seed); }
constexpr int THREAD_ORDERS = WARP_SIZE == 1 ? 2 : 3;
#else
void set_thread_order(uint64_t) {}   // a GPU's order varies between launches
constexpr int THREAD_ORDERS = 2;
#endif

// Compares one kernel with its reference at several sizes. The destructor reports two results for all sizes.
class Trial {
public:
    explicit Trial(const std::string& kernel) : kernel_(kernel) {}
    Trial(const Trial&) = delete;
    ~Trial() {
        const std::string worst = format("at most %.2f of the error that rounding allows, %s", worst_, where_.c_str());
        expect(compared_ > 0 && worst_ <= 1, kernel_ + ": results equal the double-precision reference within rounding",
               format("%zu values, %s", compared_, where_.empty() ? "exact" : worst.c_str()));
        expect(differing_.empty(), kernel_ + ": thread order does not change the results", differing_);
    }

    // Sets the text that describes the sizes of the following runs and comparisons.
    void at(const std::string& size) { size_ = size; }

    // Calls launch_once() in each thread order. Checks that all outputs are equal; returns the first order's outputs.
    // launch_once() prepares inputs, launches the kernel and returns all outputs.
    template <typename Launch> Outputs run(Launch launch_once) {
        Outputs first;
        for (int order = 0; order < THREAD_ORDERS; order++) {
            set_thread_order(order);
            Outputs found = launch_once();
            if (order == 0) first = std::move(found);
            else if (!std::equal(first.begin(), first.end(), found.begin(), found.end(), same_bits)) differing_ = size_;
        }
        set_thread_order(0);
        return first;
    }

    // Compares `got`, which is stored as T, with `expected` to ORDER times its error and half an ulp of T.
    template <typename T> void compare(const char* what, const Values& got, const Numbers& expected) {
        if (got.size() != expected.size()) return note(INFINITY, what, 0, got.size(), expected.size());
        for (size_t i = 0; i < got.size(); i++) {
            const Number& e = expected[i];
            const double allowed = ORDER * e.error + half_ulp<T>(std::abs(e.value) + e.error);
            const double error = std::abs(got[i] - e.value);
            note(error == 0 ? 0 : std::isnan(error) ? INFINITY : error / allowed, what, i, got[i], e.value);
        }
    }
    // Compares exactly: values of at most 24 bits that differ do so by more than the tolerance, half an ulp of double.
    void equal(const char* what, const Values& got, const Values& expected) {
        compare<double>(what, got, numbers(expected));
    }

private:
    void note(double ratio, const char* what, size_t i, double got, double expected) {
        compared_++;
        if (ratio <= worst_) return;
        worst_ = ratio;
        where_ = format("%s[%zu] with %s: found %.9g, expected %.9g", what, i, size_.c_str(), got, expected);
    }

    std::string kernel_, size_, where_, differing_;
    double worst_ = 0;
    size_t compared_ = 0;
};

constexpr int CHANNELS[] = {16, 48, 80, 272, 768};
// (rows, columns)
constexpr std::pair<size_t, int> SHAPES[] = {{1, 16}, {1, 768}, {3, 48}, {37, 80}, {37, 768}, {130, 16}, {130, 272}};

// ==== embedding ==============================================================

constexpr int TEST_VOCAB = 11;

// Returns n random tokens. Most occur several times; the last token of the vocabulary never does.
Values random_tokens(size_t n) {
    Values tokens = random_values<float>(n, 0, TEST_VOCAB - 2);
    for (double& token : tokens) token = std::floor(token);
    return tokens;
}

TEST("kernels: embedding forward") {
    Trial trial("embedding_forward");
    for (int C : CHANNELS)
        for (auto [B, T] : {std::pair{1, 1}, {3, 5}, {2, 33}}) {
            trial.at(format("B %d, T %d, C %d", B, T, C));
            const int n = B * T * C, first = T / 2;
            const Values wte = random_values<floatX>(TEST_VOCAB * C), wpe = random_values<floatX>(T * C);
            const Values tokens = random_tokens(B * T);
            const auto out = trial.run([&, B = B, T = T] {
                const DeviceArray<floatX> out(n), d_wte(wte), d_wpe(wpe);
                embedding_forward(view(out, B * T, C), DeviceArray<int>(tokens), d_wte, d_wpe, first, T);
                return outputs(out);
            });
            Numbers expected(n);
            for (int i = 0; i < n; i++)
                expected[i] = Number(wte[tokens[i / C] * C + i % C]) + wpe[(first + i / C) % T * C + i % C];
            trial.compare<floatX>("out", out[0], expected);
        }
}

template <typename G>
void try_embedding_backward(Trial& trial, int B, int T, int C, const Values& tokens) {
    trial.at(format("B %d, T %d, C %d", B, T, C));
    const Values dout = random_values<floatX>(B * T * C);
    const Values dwte = random_values<G>(TEST_VOCAB * C), dwpe = random_values<G>(T * C);
    const size_t first = 2 * T / 3;
    const auto out = trial.run([&] {
        const DeviceArray<G> d_dwte(dwte), d_dwpe(dwpe);
        const DeviceArray<floatX> d_dout(dout);
        const DeviceArray<int> inp(tokens), order(sorted_positions({tokens.begin(), tokens.end()}, TEST_VOCAB));
        const DeviceArray<float> partials(partial_blocks(B * T) * 4 * C);   // as in the plan
        embedding_backward(grad(d_dwte), grad(d_dwpe), partials, view(d_dout, B * T, C), inp, order,
                           first, T);
        return outputs(d_dwte, d_dwpe);
    });
    Numbers wte = numbers(dwte), wpe = numbers(dwpe);
    for (int i = 0; i < B * T * C; i++) {
        wte[tokens[i / C] * C + i % C] += dout[i];
        wpe[(first + i / C) % T * C + i % C] += dout[i];
    }
    trial.compare<G>("dwte", out[0], wte);
    trial.compare<G>("dwpe", out[1], wpe);
}

TEST("kernels: embedding backward") {
    Trial trial("embedding_backward");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (int C : CHANNELS)
            for (auto [B, T] : {std::pair{1, 1}, {1, 33}, {3, 5}})
                try_embedding_backward<G>(trial, B, T, C, random_tokens(B * T));
        // Lengths of runs that lie within chunks of 32, are one, or cross chunks
        for (const std::vector<int>& runs : {std::vector{16}, {32, 32, 6}, {1, 31, 33, 5}, {20, 150, 40}}) {
            Values tokens;
            for (int length : runs) tokens.insert(tokens.end(), length, tokens.empty() ? 2 : tokens.back() + 1);
            for (int C : {16, 272}) try_embedding_backward<G>(trial, 2, tokens.size() / 2, C, tokens);
        }
        try_embedding_backward<G>(trial, 41, 1600, 16, random_tokens(41 * 1600));   // a chunk has 33 positions
    });
}

// ==== layernorm ==============================================================

// Returns random x (N, C). If N > 1 the first row is constant: its variance is 0, so rstd is 1 / sqrt(epsilon).
Values layernorm_inputs(size_t N, int C) {
    Values x = random_values<floatX>(N * C, -1, 3);
    if (N > 1) std::fill(x.begin(), x.begin() + C, x[0]);
    return x;
}

void try_layernorm_forward(Trial& trial, size_t N, int C) {
    trial.at(format("N %zu, C %d", N, C));
    const Values inp = layernorm_inputs(N, C), w = random_values<floatX>(C), b = random_values<floatX>(C);
    const auto out = trial.run([&] {
        const DeviceArray<floatX> out(N * C), d_inp(inp), d_w(w), d_b(b);
        const DeviceArray<float> mean(N), rstd(N);
        layernorm_forward(view(out, N, C), {mean, rstd}, view(d_inp, N, C), d_w, d_b);
        return outputs(out, mean, rstd);
    });
    const auto expected = layernorm_loop<Number>(inp, w, b);
    trial.compare<floatX>("out", out[0], expected.out);
    trial.compare<float>("mean", out[1], expected.mean);
    trial.compare<float>("rstd", out[2], expected.rstd);
}

// The kernel adds to dinp, dw, db and, if `biased`, to dbias. Otherwise dbias must not change.
template <typename G> void try_layernorm_backward(Trial& trial, size_t N, int C, bool biased) {
    trial.at(format("N %zu, C %d%s", N, C, biased ? ", dbias" : ""));
    const Values inp = layernorm_inputs(N, C), w = random_values<floatX>(C), dout = random_values<floatX>(N * C);
    const auto forward = layernorm_loop<Number>(inp, w, w);
    const Values mean = values_stored_as<float>(forward.mean), rstd = values_stored_as<float>(forward.rstd);
    const Values dinp = random_values<floatX>(N * C), dw = random_values<G>(C), db = random_values<G>(C);
    const Values dbias = random_values<G>(C);
    const auto out = trial.run([&] {
        const DeviceArray<floatX> d_dinp(dinp), d_dout(dout), d_inp(inp), d_w(w);
        const DeviceArray<G> d_dw(dw), d_db(db), d_dbias(dbias);
        const DeviceArray<float> d_mean(mean), d_rstd(rstd), partials(3 * partial_blocks(N) * C);
        layernorm_backward(view(d_dinp, N, C), grad(d_dw), grad(d_db), biased ? grad(d_dbias) : Grad{}, partials,
                           view(d_dout, N, C), view(d_inp, N, C), d_w, {d_mean, d_rstd});
        return outputs(d_dinp, d_dw, d_db, d_dbias);
    });
    Numbers expected_dinp = numbers(dinp), expected_dw = numbers(dw), expected_db = numbers(db);
    layernorm_backward_loop(expected_dinp, expected_dw, expected_db, dout, inp, w, mean, rstd);
    trial.compare<floatX>("dinp", out[0], expected_dinp);
    trial.compare<G>("dw", out[1], expected_dw);
    trial.compare<G>("db", out[2], expected_db);
    Numbers sums = numbers(dbias);
    for (size_t i = 0; biased && i < N * C; i++) sums[i % C] += out[0][i];   // the kernel's own dinp, rounded to floatX
    trial.compare<G>("dbias", out[3], sums);
}

TEST("kernels: layernorm") {
    Trial forward("layernorm_forward"), backward("layernorm_backward");
    for (const auto& [N, C] : SHAPES) {
        try_layernorm_forward(forward, N, C);
        for_each_gradient_type([&, N = N, C = C](auto type) {   // each of the two types with and without dbias
            try_layernorm_backward<decltype(type)>(backward, N, C, N % 2 == (sizeof(type) == sizeof(float)));
        });
    }
    // C = 4096 needs 48 KiB of shared memory. C = 4112: several packs per thread. C = 16384: a row takes most of the
    // shared memory, so a block has fewer warps.
    for (auto [N, C] : {std::pair<size_t, int>{9, 4096}, {3, 4112}, {2, 16384}}) {
        try_layernorm_forward(forward, N, C);
        if (layernorm_shared(C) <= device.properties.sharedMemPerBlockOptin)
            try_layernorm_backward<float>(backward, N, C, true);
    }
}

// ==== bias ===================================================================

TEST("kernels: bias") {
    Trial backward("bias_backward");
    std::vector<std::pair<size_t, int>> sizes(std::begin(SHAPES), std::end(SHAPES));
    sizes.push_back({2720, 16});   // more partial sums than add_partials has thread rows
    for (const auto& size : sizes) {
        const size_t N = size.first, C = size.second;
        backward.at(format("N %zu, OC %zu", N, C));
        const Values x = random_values<floatX>(N * C);
        for_each_gradient_type([&](auto type) {
            using G = decltype(type);
            const Values db = random_values<G>(C);
            const auto sums = backward.run([&] {
                const DeviceArray<G> d_db(db);
                const DeviceArray<floatX> d_x(x);
                bias_backward(grad(d_db), DeviceArray<float>(partial_blocks(N) * C), view(d_x, N, C));
                return outputs(d_db);
            });
            Numbers expected_sums = numbers(db);
            for (size_t i = 0; i < N * C; i++) expected_sums[i % C] += x[i];
            backward.compare<G>("db", sums[0], expected_sums);
        });
    }
}

// ==== gelu ===================================================================

// Returns values in [-4, 4), where GELU is curved, and a few at which tanh is 1 in FP32 or exp overflows.
Values gelu_inputs(size_t n) {
    Values x = random_values<floatX>(n, -4, 4);
    const double far[] = {-30, 30, -10, 10, -6, 6, 0};
    std::copy(std::begin(far), std::end(far), x.begin());
    return x;
}

TEST("kernels: gelu") {
    Trial forward("gelu_forward"), backward("gelu_backward");
    for (size_t n : {size_t{16}, size_t{48}, SPAN - 16, SPAN + 16, 3 * SPAN}) {
        for (Trial* trial : {&forward, &backward}) trial->at(format("n %zu", n));
        const Values inp = gelu_inputs(n), dout = random_values<floatX>(n);
        const auto out = forward.run([&] {
            const DeviceArray<floatX> out(n), d_inp(inp);
            gelu_forward(view(out, 1, n), view(d_inp, 1, n));
            return outputs(out);
        });
        const auto gradients = backward.run([&] {
            const DeviceArray<floatX> dinp(n), in_place(dout), d_dout(dout), d_inp(inp);
            gelu_backward(view(dinp, 1, n), d_dout, view(d_inp, 1, n));
            gelu_backward(view(in_place, 1, n), in_place, view(d_inp, 1, n));
            return outputs(dinp, in_place);
        });
        Numbers expected, expected_gradient;
        for (size_t i = 0; i < n; i++) {
            expected.push_back(gelu_loop<Number>(inp[i]));
            expected_gradient.push_back(gelu_derivative_loop<Number>(inp[i]) * dout[i]);
        }
        forward.compare<floatX>("out", out[0], expected);
        backward.compare<floatX>("dinp", gradients[0], expected_gradient);
        backward.equal("dinp in place of dout", gradients[1], gradients[0]);
    }
}

// ==== attention ==============================================================

// Returns a random qkv: large enough that some probabilities are near 1, with the maximum score at early and late keys.
Values attention_inputs(const AttentionSize& s) { return random_values<floatX>(s.N() * 3 * s.C(), -2, 2); }

void try_attention(Trial& forward, Trial& backward, const AttentionSize& s, bool naive = false) {
    for (Trial* trial : {&forward, &backward}) trial->at(format("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS));
    const size_t n_probs = naive ? s.N() * s.NH * s.T : 1;
    const Values qkv = attention_inputs(s), dout = random_values<floatX>(s.N() * s.C());
    const auto got = forward.run([&] {
        const DeviceArray<floatX> out(s.N() * s.C()), scores(n_probs), probs(n_probs), d_qkv(qkv);
        const DeviceArray<float> lse(s.N() * s.NH);
        const DeviceArray<int> counter(Values{0});
        Heads h = {s.B, s.T, s.NH, s.HS, lse};
        h.counter = counter;
        if (naive) h.scores = scores, h.probs = probs;
        attention_forward(view(out, s.N(), s.C()), view(d_qkv, s.N(), 3 * s.C()), h);
        return outputs(out, counter, lse, probs);
    });
    const auto expected = attention_loop<Number>(qkv, s, naive);
    forward.compare<floatX>("out", got[0], expected.out);
    forward.equal("counter", got[1], {0});
    if (!naive) forward.compare<float>("lse", got[2], expected.lse);

    const Values out = values_stored_as<floatX>(expected.out), lse = values_stored_as<float>(expected.lse);
    const size_t columns = 3 * s.C();
    const Values dbias = random_values<float>(columns);   // gradients accumulate
    const auto gradients = backward.run([&] {
        const DeviceArray<floatX> dqkv(qkv.size()), dscores(n_probs), d_dout(dout), d_qkv(qkv), d_out(out),
            probs(got[3]);
        const DeviceArray<float> D(s.N() * s.NH), d_lse(lse), d_dbias(dbias),
            partials(attention_partials(s.B, s.T) * columns);
        const DeviceArray<int> counter(Values{0});
        Heads h = {s.B, s.T, s.NH, s.HS, d_lse, D, partials, counter};
        if (naive) h.probs = probs, h.dprobs = dscores;
        attention_backward(view(dqkv, s.N(), columns), grad(d_dbias), view(d_dout, s.N(), s.C()),
                           view(d_qkv, s.N(), columns), view(d_out, s.N(), s.C()), h);
        return outputs(dqkv, counter, d_dbias);
    });
    const Values* const probs = naive ? &got[3] : nullptr;
    const Numbers dqkv = attention_backward_loop<Number>(dout, qkv, out, lse, s, probs);
    backward.compare<floatX>("dqkv", gradients[0], dqkv);
    backward.equal("counter", gradients[1], {0});
    // The wgmma kernels sum dqkv in FP32, the others as it is stored.
    const bool in_fp32 = !naive && on_tensor_cores(s.HS) && device.tensor_cores == TensorCores::WGMMA;
    Numbers sums = numbers(dbias);
    for (size_t i = 0; i < dqkv.size(); i++) sums[i % columns] += in_fp32 ? dqkv[i] : Number(gradients[0][i]);
    backward.compare<float>("dbias", gradients[2], sums);
}

// Tests the kernels that --tensor-cores KIND selects. Lengths are parts of a tile, whole tiles and several tiles. Batch
// size and number of heads vary from case to case; with six lengths, both are 1 for the first.
void test_attention_kernels(TensorCores kind, const std::vector<int>& head_sizes, const std::vector<int>& lengths) {
    const Temporarily tensor_cores(device.tensor_cores, kind);
    const std::string suffix = format(", --tensor-cores %s, %d multiprocessors", name_of(kind),
                                      device.properties.multiProcessorCount);
    Trial forward("attention_forward" + suffix), backward("attention_backward" + suffix);
    int n = 0;
    for (int HS : head_sizes)
        for (int T : lengths) {
            const int heads[] = {1, 2, 3, 1, 5};
            try_attention(forward, backward, {1 + n % 2, T, T > 50 ? 1 + n % 3 : heads[n % 5], HS});
            n++;
        }
}

TEST("kernels: attention") {
    std::vector<int> head_sizes = {16, 32, 48, 64, 80, 96, 112, 128};
    const size_t most = device.properties.sharedMemPerBlockOptin;
    while (attention_backward_shared(head_sizes.back()) > most) head_sizes.pop_back();
    test_attention_kernels(TensorCores::NONE, head_sizes, {1, 5, 16, 23, 33, 64, 100});
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (has_tensor_cores(kind)) test_attention_kernels(kind, {64, 80, 96, 128}, {270, 1, 15, 64, 65, 150});
    if (!device.is_cpu()) test_attention_kernels(device.tensor_cores, {64}, {2050});   // too slow on a CPU
    // A persistent Hopper kernel computes several work tiles per block and carries its ring buffers and phase bits from
    // one to the next. With few multiprocessors small sizes have several tiles per block, too. 650 queries have more
    // key tiles than a ring buffer has stages, and leave one warpgroup of the last query tile without rows.
    if (!has_tensor_cores(TensorCores::WGMMA)) return;
    for (int multiprocessors : {1, 3}) {
        const Temporarily few(device.properties.multiProcessorCount, multiprocessors);
        test_attention_kernels(TensorCores::WGMMA, {64, 128}, {65, 650});
    }
}

// ==== decode attention =======================================================

// T: fewer keys than a block has warps, as many, and more.
TEST("kernels: decode attention") {
    const Temporarily tensor_cores(device.tensor_cores, TensorCores::NONE);   // operand() must not round
    Trial trial("attention_decode");
    int n = 0;
    for (int HS : {16, 32, 48, 64, 80, 96, 112, 128})
        for (int T : {1, 2, 7, 32, 33, 150}) {
            const AttentionSize s = {1, T, 1 + n++ % 3, HS};
            trial.at(format("T %d, NH %d, HS %d", T, s.NH, HS));
            const Values qkv = attention_inputs(s);
            const auto got = trial.run([&] {
                const DeviceArray<floatX> out(s.C()), d_qkv(qkv);
                attention_decode(out, d_qkv, T, s.NH, HS);
                return outputs(out);
            });
            const Numbers all = attention_loop<Number>(qkv, s).out;
            trial.compare<floatX>("out", got[0], {all.end() - s.C(), all.end()});
        }
}

// ==== naive attention ========================================================

TEST("kernels: naive attention") {
    Trial forward("naive_attention_forward"), backward("naive_attention_backward");
    for (const AttentionSize& s :
         {AttentionSize{1, 1, 1, 16}, {2, 5, 3, 48}, {1, 33, 2, 128}, {2, 32, 1, 64}, {1, 70, 3, 80}})
        try_attention(forward, backward, s, true);
}

// ==== cross-entropy ==========================================================

template <Want WANT>
Outputs run_cross_entropy(const Values& logits, const Values& targets, float scale, int V, int Vp) {
    const DeviceArray<LossScale> loss_scale(std::vector<LossScale>{{4}});
    const DeviceArray<float> losses(targets.size());
    const DeviceArray<floatX> d_logits(logits);
    const DeviceArray<int> d_targets(targets);
    cross_entropy<WANT>(view(d_logits, targets.size(), Vp), losses, d_targets, scale / 4, loss_scale, V);
    return outputs(losses, d_logits);
}

// Rows have several magnitudes, and some have no target. The padding holds values that must not affect the results.
void try_cross_entropy(Trial& trial, size_t N, int V, int Vp) {
    trial.at(format("N %zu, V %d, Vp %d", N, V, Vp));
    Values logits = random_values<floatX>(N * Vp), targets(N);
    for (size_t n = 0; n < N; n++) {
        const double magnitude[] = {4, 0.01, 30, 1000}, padding[] = {1e30, INFINITY, NAN, -INFINITY};
        for (int v = 0; v < Vp; v++)
            logits[n * Vp + v] = stored_as<floatX>(v < V ? logits[n * Vp + v] * magnitude[n % 4] : padding[v % 4]);
        targets[n] = n % 3 == 0 ? V - 1 : n % 3 == 1 ? 0 : n * 7 % V;
        if (n % 5 == 2) targets[n] = -1;
    }
    const float scale = 1.0f / 3;
    constexpr Want BOTH = Want::LOSS_AND_GRADIENT;
    const auto got = trial.run([&] { return run_cross_entropy<BOTH>(logits, targets, scale, V, Vp); });
    const auto loss_only = trial.run([&] { return run_cross_entropy<Want::LOSS>(logits, targets, scale, V, Vp); });
    const auto expected = cross_entropy_loop<Number>(logits, {targets.begin(), targets.end()}, scale, V, Vp);
    trial.compare<float>("losses", got[0], expected.losses);
    trial.compare<floatX>("dlogits", got[1], expected.dlogits);
    trial.equal("losses without gradient", loss_only[0], got[0]);
    for (size_t i = 0; i < logits.size(); i++)   // without the padding: NaN != NaN
        if (static_cast<int>(i % Vp) < V) trial.equal("logits without gradient", {loss_only[1][i]}, {logits[i]});
}

TEST("kernels: cross entropy") {
    Trial trial("cross_entropy"), sums("add_losses");
    for (size_t N : {1, 13})
        for (auto [V, Vp] : {std::pair{1, 128}, {65, 128}, {256, 256}, {1000, 1024}})
            try_cross_entropy(trial, N, V, Vp);
    try_cross_entropy(trial, 3, 50257, 50304);
    const int row = (48 << 10) / sizeof(floatX);   // fills what a block may have without asking, but for its arrays
    try_cross_entropy(trial, 3, row - 76, row);
    try_cross_entropy(trial, 3, 60000, 60032);   // a row is larger than any GPU's shared memory

    for (size_t n : {1, 37, 5000}) {
        sums.at(format("n %zu", n));
        const Values losses = random_values<float>(n, 0, 10);
        const auto got = sums.run([&] {
            const DeviceArray<double> total(Values{1e6 + 0.125});
            add_losses(total, DeviceArray<float>(losses), n);
            return outputs(total);
        });
        const Number sum_of_losses = sum(numbers(losses), WIDE_BLOCK);
        sums.compare<double>("total", got[0], {{1e6 + 0.125 + sum_of_losses.value, sum_of_losses.error}});
    }
}

// ==== gradient norm ==========================================================

// n_common common gradients and n of each layer. Gaps of large values between them must not be read.
template <typename G> void try_gradient_norm(Trial& trial, size_t n_common, size_t n, size_t layers) {
    const size_t gap = 16, stride = n + gap, layer0 = gap + n_common + gap,
                 count = norm_blocks(n_common, n, layers);
    trial.at(format("%zu and %zu x %zu gradients of %zu bytes", n_common, layers, n, sizeof(G)));
    Values g(layer0 + layers * stride, 0x1p15);
    Numbers squares;
    auto fill = [&](size_t begin, size_t size, double factor) {
        const Values values = random_values<G>(size);
        for (size_t i = 0; i < size; i++) {
            g[begin + i] = values[i] * (i + 16 < size ? 1 : factor);
            squares.push_back(Number(g[begin + i]) * g[begin + i]);
        }
    };
    fill(gap, n_common, 1024);   // large last values: the norm is wrong if a kernel omits them
    for (size_t l = 0; l < layers; l++) fill(layer0 + l * stride, n, 1);
    const auto got = trial.run([&] {
        const DeviceArray<G> grads(g);
        const DeviceArray<float> partials(count);
        const DeviceArray<LossScale> loss_scale(std::vector<LossScale>{{0.5f}});
        const DeviceArray<Step> step(1);
        const DType dtype = grad(grads).dtype;
        norm_partials(partials, {{grads + gap, dtype}, n_common, {grads + layer0, dtype}, n, unsigned(layers), stride,
                                 count});
        Outputs norm_and_factors(2);
        for (float clip : {3.0f, 1e30f, 0.0f}) {   // the norm is above 3
            Step settings = {};
            settings.clip = clip;
            set_step(step, settings);
            gradient_norm(step, loss_scale, partials, count);
            const Step after = fetch<Step>(step);
            norm_and_factors[0] = {after.norm};
            norm_and_factors[1].push_back(after.factor);
        }
        return norm_and_factors;
    });
    const Number norm = sqrt(sum(squares, count * BLOCK * PACK)) * 2;
    trial.compare<float>("norm", got[0], {norm});
    trial.compare<float>("factor", got[1], {Number(3) / (norm + 1e-6) * 2, 2, 2});
}

TEST("kernels: gradient norm") {
    Trial trial("gradient_norm");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t n : {size_t{16}, SPAN + 16}) {
            try_gradient_norm<G>(trial, n, 0, 0);
            try_gradient_norm<G>(trial, 2 * SPAN + 48, n, 3);
        }
    });
    try_gradient_norm<grad16>(trial, NORM_BLOCKS * SPAN + SPAN + 16, 0, 0);   // a block has several spans
}

// ==== adamw ==================================================================

// Two layers of n elements; the gaps between them must not change. Without master weights a tenth of the gradients and
// moments are 0, and the kernel counts the weights that a nonzero gradient leaves unchanged. factor 0 skips the step:
// it only clears the gradients.
struct AdamWCase { size_t n, decayed; float factor, lr; };

// has_master: AdamW updates master weights in FP32, otherwise the weights themselves.
template <typename G> void try_adamw(Trial& trial, const AdamWCase& c, bool has_master) {
    trial.at(format("n %zu, decayed %zu, factor %g, lr %g", c.n, c.decayed, c.factor, c.lr));
    const bool separate = has_master && SEPARATE_MASTER;
    const Step a = {c.lr, 0.9f, 0.95f, 1e-3f, has_master ? 0.25f : 0, 0, 1 - 0.9f * 0.9f * 0.9f,
                    1 - 0.95f * 0.95f * 0.95f, 0, c.factor};
    const size_t layers = 2;
    const Strides strides = {c.n + 32, c.n + 32, c.n + 48, c.n + 16, c.n + 16};
    const size_t all = layers * strides.master;
    const Values w0 = has_master ? random_values<float>(all) : random_values<floatX>(all);
    Values g0 = random_values<G>(layers * strides.grads, has_master ? -3 : 0.25, 3),
        m0 = random_values<float>(layers * strides.m, 0.25, 1);
    const Values v0 = random_values<float>(layers * strides.m, 0, 1);
    for (size_t l = 0; l < layers && !has_master; l++)
        for (size_t i = 0; i < c.n; i += 10) g0[l * strides.grads + i] = m0[l * strides.m + i] = 0;
    const auto got = trial.run([&] {
        const DeviceArray<float> master(has_master ? w0 : Values{0}), m(m0), v(v0);
        const DeviceArray<Step> step(1);
        const DeviceArray<floatX> weights(w0);
        const DeviceArray<G> grads(g0);
        const DeviceArray<unsigned long long> count(Values{5});
        void* const same = static_cast<void*>(master);   // in FP32 the weights are the master weights
        set_step(step, a);
        adamw({separate || !has_master ? static_cast<floatX*>(weights) : static_cast<floatX*>(same),
               has_master ? static_cast<float*>(master) : nullptr, grad(grads), m, v, c.n, c.decayed, unsigned(layers),
               strides}, step, count);
        return Outputs{has_master ? master.values() : weights.values(), m.values(), v.values(), grads.values(),
                       count.values(), weights.values()};
    });
    Numbers w = numbers(w0), m = numbers(m0), v = numbers(v0);
    Values grads = g0, rounded = w0;
    double unchanged = 5;
    const Number scale = c.factor;
    for (size_t l = 0; l < layers; l++)
        for (size_t i = 0; i < c.n; i++) {
            const size_t at_w = l * strides.master + i, at_m = l * strides.m + i;
            const double raw = std::exchange(grads[l * strides.grads + i], 0);
            const Number g = scale * raw;
            if (c.factor == 0) continue;
            m[at_m] = Number(a.beta1) * m[at_m] + Number(1 - a.beta1) * g;
            v[at_m] = Number(a.beta2) * v[at_m] + Number(1 - a.beta2) * g * g;
            const Number step = m[at_m] / a.correction1 / (sqrt(v[at_m] / a.correction2) + a.eps);
            w[at_w] = w[at_w] - Number(a.lr) * (step + Number(i < c.decayed ? a.weight_decay : 0) * w[at_w]);
            rounded[at_w] = got[0][at_w];
            unchanged += !has_master && raw != 0 && got[0][at_w] == w0[at_w];
        }
    if (has_master) trial.compare<float>("master", got[0], w);
    else trial.compare<floatX>("weights", got[0], w);
    trial.compare<float>("m", got[1], m);
    trial.compare<float>("v", got[2], v);
    trial.equal("gradients", got[3], grads);
    trial.equal("unchanged", got[4], {unchanged});
    if (separate) trial.equal("weights", got[5], values_stored_as<floatX>(numbers(rounded)));
}

TEST("kernels: adamw") {
    const size_t sizes[] = {16, SPAN - 16, 2 * SPAN + 48};
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        Trial trial(format("adamw, gradients of %zu bytes", sizeof(G)));
        for (size_t n : sizes) {
            for (size_t decayed : {size_t{0}, n / 32 * 16, n})
                for (float factor : {1.0f / 24, 1.0f}) try_adamw<G>(trial, {n, decayed, factor, 3e-2f}, true);
            try_adamw<G>(trial, {n, n, 0, 3e-2f}, true);   // skipped
        }
    });
    if (!SEPARATE_MASTER) return;
    Trial trial("adamw without master weights");
    for (size_t n : sizes)
        for (float lr : {1e-1f, 1e-3f, 1e-5f})   // leaves few, some and almost all weights unchanged
            for_each_gradient_type([&](auto type) { try_adamw<decltype(type)>(trial, {n, 0, 1, lr}, false); });
}

// ==== muon ===================================================================

template <typename T> T* pointer(const DeviceArray<T>& array) { return array; }

struct MuonCase { size_t rows, columns, gap; float factor; };   // gap: elements between rows

// The gaps between rows must not change. factor 0 skips the step: it only clears the gradients.
template <typename G> void try_muon_kernels(Trial& trial, const MuonCase& c) {
    const MatrixView x = {c.rows, c.columns, c.columns + c.gap};
    trial.at(format("%zu x %zu, stride %zu, factor %g", x.rows, x.columns, x.stride, c.factor));
    const Step a = {3e-2f, 0.9f, 0.95f, 1e-3f, 0.25f, 1, 1, 1, 0, c.factor};
    const size_t all = x.rows * x.stride, n = x.rows * x.columns, blocks = std::min(NORM_BLOCKS, x.rows);
    const Values w0 = random_values<float>(all), g0 = random_values<G>(all, -3, 3), m0 = random_values<float>(all),
                 step0 = random_values<floatX>(n);
    const auto got = trial.run([&] {
        const DeviceArray<float> master(w0), m(m0), partials(blocks);
        const DeviceArray<Step> step(1);
        const DeviceArray<floatX> weights(w0), out(n), direction(step0);
        const DeviceArray<G> grads(g0);
        floatX* const rounded = SEPARATE_MASTER ? weights : reinterpret_cast<floatX*>(static_cast<float*>(master));
        set_step(step, a);
        for (auto [name, kernel] : {std::pair{"muon_momentum", &muon_kernel<MuonPass::MOMENTUM, G>},
                                    {"muon_normalise", &muon_kernel<MuonPass::NORMALISE, G>}})
            launch(name, kernel, blocks, BLOCK, 0, pointer(out), pointer(partials), pointer(m), pointer(grads),
                   pointer<Step>(step), x);
        launch("muon_update", muon_update_kernel, blocks, BLOCK, 0, rounded, pointer(master), pointer(direction),
               pointer<Step>(step), 0.5f, x);
        return Outputs{master.values(), m.values(), grads.values(), out.values(), weights.values()};
    });
    Numbers w = numbers(w0), m = numbers(m0), u(n);
    Values grads = g0, rounded = values_stored_as<floatX>(w);
    const Number scale = c.factor;
    const Number mu = MUON_MOMENTUM, rest = 1 - MUON_MOMENTUM;
    Number squares = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = i / x.columns * x.stride + i % x.columns;
        const Number g = rest * scale * std::exchange(grads[at], 0);
        if (c.factor == 0) continue;
        m[at] = mu * m[at] + g;
        u[i] = mu * m[at] + g;
        squares += u[i] * u[i];
        w[at] = w[at] - Number(a.lr) * (Number(0.5) * step0[i] + Number(a.weight_decay) * w[at]);
        rounded[at] = stored_as<floatX>(got[0][at]);
    }
    trial.compare<float>("master", got[0], w);
    trial.compare<float>("m", got[1], m);
    trial.equal("gradients", got[2], grads);
    if (SEPARATE_MASTER) trial.equal("weights", got[4], rounded);
    if (c.factor == 0) return;
    for (Number& v : u) v = v / sqrt(squares);
    trial.compare<floatX>("X", got[3], u);
}

TEST("kernels: muon") {
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        Trial trial(format("muon, gradients of %zu bytes", sizeof(G)));
        for (auto [rows, columns] : {std::pair<size_t, size_t>{48, 48}, {16, 80}, {1100, 16}, {37, 272}})
            for (size_t gap : {0, 32})
                for (float factor : {1.0f / 24, 1.0f, 0.0f}) try_muon_kernels<G>(trial, {rows, columns, gap, factor});
    });
}

// ==== init ===================================================================

// Compares each element with the Box-Muller transform of the random bits for its index and the seed.
TEST("kernels: init normal") {
    const uint64_t seed = 7;
    const float std = 0.02f;
    Trial trial("init_normal");
    for (auto [first, n] : {std::pair<size_t, size_t>{0, 3 * SPAN + 16}, {5, 16}, {SPAN - 1, 100}}) {
        trial.at(format("first %zu, n %zu", first, n));
        const auto got = trial.run([&, first = first, n = n] {
            const DeviceArray<float> out(n);
            init_normal(static_cast<float*>(out), std, seed, 0, {}, first, n);
            return outputs(out);
        });
        Numbers expected;
        for (size_t i = first; i < first + n; i++) {
            const uint64_t bits = splitmix64(seed ^ splitmix64(i));
            const double u1 = ((bits >> 40) + 1) / double(1 << 24), u2 = (bits & 0xffffff) / double(1 << 24),
                angle = 2 * M_PI * u2;
            const Number radius = sqrt(Number(-2) * log(Number(u1)));
            const Number cosine(std::cos(angle), U * (4 + 2 * angle));   // cosf's 2 ulps; rounding 2 pi and angle
            expected.push_back(Number(std) * radius * cosine);
        }
        trial.compare<float>("out", got[0], expected);
    }
}

// ==== matmul =================================================================

struct MatmulSize { size_t N, C, OC; };

std::vector<MatmulSize> matmul_sizes() {
    std::vector<MatmulSize> sizes;
    for (size_t N : {1, 7, 33})
        for (auto [C, OC] : {std::pair<size_t, size_t>{16, 48}, {80, 272}, {272, 80}, {16, 768}})
            sizes.push_back({N, C, OC});
    return sizes;
}

// A random matrix on the host, on the device and as a tensor. Fp8Matrix in test_fp8.cuh has the same members.
struct Matrix {
    Values values;
    DeviceArray<floatX> array;
    Tensor tensor;

    Matrix(size_t rows, size_t columns, double)
        : values(random_values<floatX>(rows * columns)), array(values), tensor(view(array, rows, columns)) {}

    // Returns the error of a sum of products beyond that of FP32.
    static double sum_error(const Numbers&) { return 0; }
};

// Returns a (rows, K) times the transpose of b (columns, K), as a matmul of matrices of type M computes it.
template <typename M> Numbers product(const Values& a, const Values& b, size_t K) {
    const size_t columns = b.size() / K;
    Numbers out(a.size() / K * columns), terms(K);
    for (size_t i = 0; i < out.size(); i++) {
        for (size_t k = 0; k < K; k++) out[i] += terms[k] = Number(a[i / columns * K + k]) * b[i % columns * K + k];
        out[i].error += M::sum_error(terms);
    }
    return out;
}

// Returns whether GELU and GELU' may be epilogues.
bool may_fuse() { return activation_is_gelu(DeviceArray<float>(1)); }

// Returns run() as on Hopper after matmul tuning that has chosen all optional epilogues, or their alternatives.
enum class Tuned { FUSED, SEPARATE };
template <typename F> auto with_choice(Tuned choice, F run) {
    const Temporarily hopper(device.properties.major, std::max(device.properties.major, 9));
    matmul_plans.clear();
    run();   // creates the plans
    size_t optional = 0;
    for (auto& [shape, plan] : matmul_plans) {
        if (!plan.alternative) continue;
        optional++;
        plan.algorithms.clear();
        if (choice == Tuned::FUSED) plan.algorithms = offered_algorithms(plan);
    }
    const auto result = run();
    matmul_plans.clear();
    if (optional == 0 && may_fuse()) throw Failure("no epilogue is optional");
    return result;
}

// A, W, G: matrix types of activations, of weights and of activation gradients. The expected product is rounded before
// bias or GELU': without an epilogue for them in cuBLASLt, a second kernel reads the stored product.
template <typename A, typename W>
void try_linear_forward(const std::string& name, const std::vector<MatmulSize>& sizes) {
    Trial plain(name), residual(name + " with a residual");
    for (const MatmulSize& s : sizes) {
        const size_t N = s.N, C = s.C, OC = s.OC;
        for (Trial* trial : {&plain, &residual}) trial->at(format("N %zu, C %zu, OC %zu", N, C, OC));
        const A inp(N, C, 64);
        const W w(C, OC, 0.5);
        const Values b = random_values<floatX>(OC), add = random_values<floatX>(N * OC);
        const auto run = [&](bool adds) {
            const DeviceArray<floatX> out(N * OC), d_b(b), d_add(add);
            floatX* const none = nullptr;
            linear_forward(view(out, N, OC), inp.tensor, w.tensor, d_b, view(adds ? d_add : none, N, OC));
            return outputs(out);
        };
        Numbers expected = product<A>(inp.values, transposed_values(w.values, C, OC), C), with_add(N * OC);
        for (size_t i = 0; i < N * OC; i++) {
            expected[i] = stored_as<floatX>(expected[i]) + b[i % OC];
            with_add[i] = expected[i] + add[i];
        }
        plain.compare<floatX>("out", plain.run([&] { return run(false); })[0], expected);
        residual.compare<floatX>("out", residual.run([&] { return run(true); })[0], with_add);
    }
}

// The epilogue may compute GELU before or after the pre-activation is rounded.
void try_linear_gelu_forward(const std::vector<MatmulSize>& sizes) {
    Trial separate("linear_gelu_forward"), fused("linear_gelu_forward as one matmul");
    for (const MatmulSize& s : sizes) {
        const size_t N = s.N, C = s.C, OC = s.OC;
        for (Trial* trial : {&separate, &fused}) trial->at(format("N %zu, C %zu, OC %zu", N, C, OC));
        const Matrix inp(N, C, 1), w(C, OC, 1);
        const Values b = random_values<floatX>(OC);
        const auto run = [&] {
            const DeviceArray<floatX> out(N * OC), pre_activation(N * OC), d_b(b);
            linear_gelu_forward(view(out, N, OC), view(pre_activation, N, OC), inp.tensor, w.tensor, d_b);
            return outputs(pre_activation, out);
        };
        Numbers before = product<Matrix>(inp.values, transposed_values(w.values, C, OC), C);
        for (size_t i = 0; i < N * OC; i++) before[i] = stored_as<floatX>(before[i]) + b[i % OC];
        for (Trial* trial : {&separate, &fused}) {
            const Temporarily epilogue(tanh_error, trial == &fused ? EPILOGUE_TANH_ERROR : 0);
            Numbers after;
            for (const Number& x : before) after.push_back(gelu_loop(stored_as<floatX>(x)));
            const auto tried = [&] { return trial->run(run); };
            const Outputs got = with_choice(trial == &fused ? Tuned::FUSED : Tuned::SEPARATE, tried);
            trial->compare<floatX>("pre_activation", got[0], before);
            trial->compare<floatX>("out", got[1], after);
        }
    }
}

// GELU' is an epilogue of cuBLASLt or, always with FP8, a kernel. db: the gradient of the bias.
template <typename G, typename W>
void try_linear_backward(const std::string& name, const std::vector<MatmulSize>& sizes) {
    Trial plain(name), separate(name + " with GELU'"), fused(name + " with GELU' as one matmul");
    for (const MatmulSize& s : sizes) {
        const size_t N = s.N, C = s.C, OC = s.OC;
        for (Trial* trial : {&plain, &separate, &fused}) trial->at(format("N %zu, C %zu, OC %zu", N, C, OC));
        const G dout(N, OC, 1024);
        const W w(C, OC, 8), inp(N, C, 8);
        const Values pre = gelu_inputs(N * C), db = random_values<float>(C);
        const auto run = [&](bool through_gelu) {
            const DeviceArray<floatX> dinp(N * C), d_pre(pre);
            const DeviceArray<float> d_db(db), partials(partial_blocks(N) * C);
            const DeviceArray<float> dw(C * OC);   // tested by try_matmul_backward_weight
            const Tensor to = view(dinp, N, C);
            if (through_gelu)
                linear_gelu_backward(to, grad(dw), grad(d_db), partials, dout.tensor, inp.tensor, w.tensor,
                                     view(d_pre, N, C));
            else linear_backward(to, grad(dw), dout.tensor, inp.tensor, w.tensor);
            return outputs(dinp, d_db);
        };
        const Numbers expected = product<G>(dout.values, w.values, OC);
        plain.compare<floatX>("dinp", plain.run([&] { return run(false); })[0], expected);
        for (Trial* trial : {&separate, &fused}) {
            const bool fuses = trial == &fused && !dout.tensor.fp8.x;
            const Temporarily epilogue(tanh_error, fuses ? EPILOGUE_TANH_ERROR : 0);
            Numbers through_gelu(N * C), sums = numbers(db);
            for (size_t i = 0; i < N * C; i++) {
                through_gelu[i] = stored_as<floatX>(expected[i]) * gelu_derivative_loop<Number>(pre[i]);
                sums[i % C] += stored_as<floatX>(through_gelu[i]);
            }
            const auto tried = [&] { return trial->run([&] { return run(true); }); };
            const Outputs got = dout.tensor.fp8.x ? tried() : with_choice(fuses ? Tuned::FUSED : Tuned::SEPARATE, tried);
            trial->compare<floatX>("dinp", got[0], through_gelu);
            trial->compare<float>("db", got[1], sums);
        }
    }
}

// cuBLASLt may round the product to dw's type before it adds the old dw.
template <typename A, typename G>
void try_matmul_backward_weight(const std::string& name, const std::vector<MatmulSize>& sizes) {
    Trial trial(name);
    for (const MatmulSize& s : sizes)
        for_each_gradient_type([&](auto type) {
            using T = decltype(type);
            const size_t N = s.N, C = s.C, OC = s.OC;
            if (FLOATX == DType::FP32 && std::is_same_v<T, grad16>) return;   // FP32 matmuls have no BF16 output
            trial.at(format("N %zu, C %zu, OC %zu", N, C, OC));
            const A inp(N, C, 2);
            const G dout(N, OC, 256);
            const Values dw = random_values<T>(C * OC);
            const auto got = trial.run([&] {
                const DeviceArray<T> d_dw(dw);
                matmul_backward_weight(grad(d_dw), dout.tensor, inp.tensor);
                return outputs(d_dw);
            });
            const Values inp_columns = transposed_values(inp.values, N, C);
            Numbers expected = product<A>(inp_columns, transposed_values(dout.values, N, OC), N);
            for (size_t i = 0; i < C * OC; i++) expected[i] = stored_as<T>(expected[i]) + dw[i];
            trial.compare<T>("dw", got[0], expected);
        });
}

TEST("kernels: matmul") {
    try_linear_forward<Matrix, Matrix>("linear_forward", matmul_sizes());
    try_linear_gelu_forward(matmul_sizes());
    try_linear_backward<Matrix, Matrix>("linear_backward", matmul_sizes());
    try_matmul_backward_weight<Matrix, Matrix>("matmul_backward_weight", matmul_sizes());
}

// The alternative takes 0.1 s, far longer than the matmul even on a busy machine, or no time.
TEST("kernels: matmul tuning of epilogues") {
    if (!may_fuse()) return;
    constexpr size_t N = 32, C = 16;
    const Temporarily hopper(device.properties.major, std::max(device.properties.major, 9));
#ifdef CUDA_ON_CPU
    const Temporarily measured(cuda_cpu::times, cuda_cpu::Random{0});
#endif
    matmul_plans.clear();
    const Matrix inp(N, C, 1), w(C, C, 1);
    const DeviceArray<floatX> out(N * C), pre_activation(N * C), b(random_values<floatX>(C));
    linear_gelu_forward(view(out, N, C), view(pre_activation, N, C), inp.tensor, w.tensor, b);
    for (auto& [shape, plan] : matmul_plans)
        for (bool slow : {true, false}) {
            if (!plan.alternative || offered_algorithms(plan).empty()) continue;
            MatmulTuning tuning;
            plan.alternative = [=] { if (slow) launch("hold", hold_kernel, 1, 1, 0, 500 * HOLD_CYCLES); };
            choose_algorithm(tuning, plan);
            MatmulTuning known = {json(tuning.known).get<Choices>()};
            const bool first = !plan.algorithms.empty();
            plan.algorithms.clear();
            plan.alternative = [] { throw Failure("timed again"); };
            choose_algorithm(known, plan);
            expect(first == slow && tuning.timed == 1 && tuning.used == slow && known.timed == 0 &&
                       known.from_file == 1 && plan.algorithms.empty() != slow,
                   format("an epilogue that is %s than its alternative is %s, and its choice is known afterwards",
                          slow ? "faster" : "slower", slow ? "used" : "not used"));
        }
    const std::string error = error_of([&] {
        const DeviceArray<float> dw(C * C), db(C), partials(partial_blocks(N) * C);
        const Tensor pre = view(pre_activation + 1, N - 1, C), dout = view(inp.array, N - 1, C);
        linear_gelu_backward(view(out, N - 1, C), grad(dw), grad(db), partials, dout, dout, w.tensor, pre);
    });
    expect(contains(error, "expected a pre-activation aligned to 16 bytes"),
           "an epilogue's pre-activation must be as aligned as its algorithm requires", error);
    matmul_plans.clear();
}

// ==== files for the tests ====================================================

// Copies a file or a folder; replaces `to` if it exists.
void copy_files(const std::string& from, const std::string& to) {
    fs::remove_all(scratch(to));
    fs::copy(scratch(from), scratch(to), fs::copy_options::recursive);
}

// Returns the contents of a token shard.
std::string shard(const std::vector<uint16_t>& tokens, int magic = SHARD_MAGIC, int version = SHARD_VERSION) {
    std::vector<int> header(SHARD_HEADER, 0);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int>(tokens.size());
    return bytes_of(header) + bytes_of(tokens);
}

// A tensor of a safetensors file as any program might write it: dtype, shape and bytes need not match.
struct RawTensor {
    std::string name, dtype;
    std::vector<size_t> shape;
    std::string bytes;
};

std::string safetensors(const std::vector<RawTensor>& tensors) {
    json header;
    std::string data;
    for (const RawTensor& tensor : tensors) {
        header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape},
                               {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
        data += tensor.bytes;
    }
    std::string text = header.dump();
    text.resize(ceil_div(text.size(), 8) * 8, ' ');
    return bytes_of(std::vector<uint64_t>{text.size()}) + text + data;
}

std::vector<RawTensor> raw_tensors(const std::string& path) {
    const Safetensors file(scratch(path));
    std::vector<RawTensor> tensors;
    for (const auto& [name, entry] : file.entries())
        tensors.push_back({name, entry.dtype, entry.shape, std::string(entry.data, entry.bytes)});
    return tensors;
}

RawTensor& tensor_named(const std::string& name, std::vector<RawTensor>& tensors) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const RawTensor& tensor) { return tensor.name == name; });
}

std::vector<int> read_ints(const Safetensors& file, const std::string& name) {
    std::vector<int> values(file.at(name).elements);
    memcpy(values.data(), file.at(name).data, values.size() * sizeof(int));
    return values;
}

typedef std::vector<float> Floats;

Floats read_floats(const Safetensors& file, const std::string& name) {
    return file.floats(name, file.at(name).shape);
}

// ==== models for the tests ===================================================

// Returns a setup without recomputation, with FP32 gradients.
Setup small_setup(const Config& config, int B, int T, Purpose purpose = Purpose::TRAINING) {
    return {config, B, T, Recompute::NONE, DType::FP32, purpose};
}

template <typename T> Floats floats_from_device(const T* from, size_t n) {
    const std::vector<T> values = from_device(from, n);
    return {values.begin(), values.end()};
}

// Returns the gradients, divided by the loss scale.
Floats gradients(const Model& m) {
    Floats values;
    with_type(m.grads, [&](auto* g) { values = floats_from_device(g, m.layout.elements()); });
    const float scale = fetch(m.a.loss_scale()).scale;
    for (float& value : values) value /= scale;
    return values;
}

// Returns one parameter, without padding, of a block such as m.master.
Floats part(const Floats& block, const Config& c, const ParameterRow& row, size_t l) {
    const auto begin = block.begin() + layout_of(c).place(row, l);
    return {begin, begin + row.file_elements()};
}

std::vector<int> random_batch(const Setup& s, uint64_t seed = 0) {
    std::vector<int> tokens(s.B * (s.T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = splitmix64(seed + i) % s.config.vocab;
    return tokens;
}

// A model with initial weights or with those of a folder.
struct TestModel : Model {
    explicit TestModel(const Setup& s) {
        allocate(*this, s);
        init_parameters(*this, 1);
    }
    TestModel(const Setup& s, const std::string& dir) {
        allocate(*this, s);
        read_weights(*this, scratch(dir));
    }
    TestModel(const std::string& dir, Purpose purpose, int B, int T)
        : TestModel(small_setup(read_config(scratch(dir + "/config.json")), B, T, purpose), dir) {}
};

// Copies a batch, tokens (B, T+1), to the device buffers that Loader uses.
Batch upload_batch(const Model& m, const std::vector<int>& tokens) {
    const size_t T = m.setup.T, N = m.setup.N();
    std::vector<int> inputs(N), targets(N);
    for (size_t n = 0; n < N; n++) {
        inputs[n] = tokens[n / T * (T + 1) + n % T];
        targets[n] = tokens[n / T * (T + 1) + n % T + 1];
    }
    upload(m.a.inputs(0), inputs.data(), N * sizeof(int));
    upload(m.a.targets(0), targets.data(), N * sizeof(int));
    if (m.setup.purpose == Purpose::INFERENCE) return {m.a.inputs(0), m.a.targets(0), nullptr};
    upload(m.a.order(0), sorted_positions(inputs, m.config.vocab).data(), N * sizeof(int));
    return {m.a.inputs(0), m.a.targets(0), m.a.order(0)};
}

// Returns logits (N, V), without the vocabulary's padding. N must be at most head_rows: the head runs in one chunk.
Floats logits_of(Model& m, const int* inputs) {
    const size_t N = m.setup.N(), V = m.config.vocab, Vp = m.config.padded_vocab();
    forward(m, inputs);
    matmul(logits_product(m, 0, N));
    const Floats padded = floats_from_device(m.a.logits(), N * Vp);
    Floats logits;
    for (size_t n = 0; n < N; n++) logits.insert(logits.end(), padded.begin() + n * Vp, padded.begin() + n * Vp + V);
    return logits;
}

// The results of forward and backward of one micro-batch.
struct Pass {
    double loss;   // mean over tokens
    Floats logits, losses, gradients;

    bool operator==(const Pass& other) const {   // compares bits
        return loss == other.loss && bytes_of(logits) == bytes_of(other.logits) &&
               bytes_of(losses) == bytes_of(other.losses) && bytes_of(gradients) == bytes_of(other.gradients);
    }
};

Pass forward_backward(Model& m, const std::vector<int>& tokens) {
    const Batch batch = upload_batch(m, tokens);
    Pass pass;
    if (m.setup.N() <= m.setup.head_rows) pass.logits = logits_of(m, batch.inputs);
    take_loss(m);
    micro_step(m, batch, m.setup.N());
    pass.loss = take_loss(m) / m.setup.N();
    pass.losses = from_device(m.a.losses(), m.setup.N());
    pass.gradients = gradients(m);
    return pass;
}

// Returns ||found - truth|| / ||truth - origin||; infinity if a value is not finite.
double relative_l2(const Floats& found, const Floats& truth, const Floats& origin = {}) {
    double error = 0, size = 0;
    for (size_t i = 0; i < truth.size() && i < found.size(); i++) {
        error += pow(double(found[i]) - truth[i], 2);
        size += pow(double(truth[i]) - (origin.empty() ? 0 : origin[i]), 2);
    }
    return found.size() == truth.size() && std::isfinite(error) && size > 0 ? sqrt(error / size) : INFINITY;
}

// Expects that errors are within their limits. The destructor prints the one with the largest error / limit.
class Near {
public:
    explicit Near(const std::string& text) : text_(text) {}
    Near(const std::string& text, double error, double limit) : text_(text) { see("error", error, limit); }
    Near(const Near&) = delete;
    ~Near() {
        expect(ratio_ >= 0 && ratio_ <= 1, text_, format("%s: %.2e, limit %.2e", key_.c_str(), error_, limit_));
    }
    void see(const std::string& key, double error, double limit) {
        const double ratio = std::isnan(error / limit) ? INFINITY : error / limit;
        if (ratio <= ratio_) return;
        ratio_ = ratio;
        error_ = error;
        limit_ = limit;
        key_ = key;
    }

private:
    std::string text_, key_;
    double ratio_ = -1, error_ = 0, limit_ = 0;
};

// ==== Newton-Schulz ==========================================================

// X (rows, columns) by Newton-Schulz iterations in double precision.
Values newton_schulz_reference(Values x, size_t rows, size_t columns) {
    const auto [a, b, c] = NEWTON_SCHULZ;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        const Values gram = values_stored_as<double>(product<Matrix>(x, x, columns));   // symmetric
        Values p = values_stored_as<double>(product<Matrix>(gram, gram, rows));
        for (size_t i = 0; i < p.size(); i++) p[i] = b * gram[i] + c * p[i];
        const Numbers px = product<Matrix>(p, transposed_values(x, rows, columns), rows);
        for (size_t i = 0; i < x.size(); i++) x[i] = a * x[i] + px[i].value;
    }
    return x;
}

TEST("kernels: Newton-Schulz") {
    Near near("Newton-Schulz iterations equal the double-precision reference's");
    for (auto [rows, columns] : {std::pair<size_t, size_t>{48, 48}, {16, 80}, {80, 48}}) {
        Values unit = random_values<floatX>(rows * columns, -0.5, 0.5);
        const double norm = std::sqrt(std::inner_product(unit.begin(), unit.end(), unit.begin(), 0.0));
        for (double& v : unit) v = stored_as<floatX>(v / norm);
        Values all(2 * (rows * columns + std::pow(std::min(rows, columns), 2)));
        std::copy(unit.begin(), unit.end(), all.begin());
        const DeviceArray<floatX> scratch(all);
        const Floats found = floats_from_device(newton_schulz(scratch, rows, columns), rows * columns);
        const Values expected = newton_schulz_reference(unit, rows, columns);
        near.see(format("%zu x %zu", rows, columns), relative_l2(found, {expected.begin(), expected.end()}),
                 FLOATX == DType::FP32 ? 1e-5 : FLOATX == DType::FP16 ? 1e-2 : 5e-2);
    }
}

// ==== against PyTorch ========================================================
// data/reference holds a model, tokens and PyTorch's results in float64, and for each result the relative errors of
// PyTorch's own FP32, BF16 and FP16 results: dev/reference/README.md.

struct Reference {
    Safetensors file;
    Config config = {};
    int B, T;
    long steps, accumulation;
    Options options;

    explicit Reference(const std::string& name)
        : file("data/reference/" + name + ".safetensors"), B(number("B")), T(number("T")),
          steps(number("steps")), accumulation(number("accumulation")) {
        config = {int(number("layers")), int(number("heads")), int(number("channels")), int(number("context")),
                  int(number("vocab"))};
        Options& o = options;
        for (auto [key, to] : {std::pair{"lr", &o.lr}, {"beta1", &o.beta1}, {"beta2", &o.beta2}, {"eps", &o.eps},
                               {"weight_decay", &o.weight_decay}, {"grad_clip", &o.grad_clip}})
            *to = number(key);
        options.schedule = Schedule::CONSTANT;
    }

    double number(const char* key) const { return std::stod(file.metadata().at(key).get<std::string>()); }
    Floats values(const std::string& key) const { return read_floats(file, key); }
    std::vector<int> tokens(long step, long micro) const {
        const std::vector<int> all = read_ints(file, "tokens");
        const size_t size = static_cast<size_t>(B) * (T + 1);
        const auto begin = all.begin() + (step * accumulation + micro) * size;
        return {begin, begin + size};
    }

    // Returns the maximum relative error that is allowed. BF16 and FP16: twice PyTorch's own error, the rule of the
    // FlashAttention papers. 16-bit gradients also round the sum at each accumulation: a few times half an ulp, which
    // is 2^-9 in BF16 and 2^-12 in FP16. FP32: three times PyTorch's own error, at least 2e-6. PyTorch's error is a few
    // roundings of 6e-8 that partly cancel; another order of additions and __expf, accurate to 2 ulps, may triple it.
    // On a GPU at least 1e-5: random errors of 7.5e-6 in tanh, as in cuBLASLt's epilogues, change results by 8e-6.
    double limit(const std::string& key, DType grad_dtype) const {
        const float least = device.is_cpu() ? 2e-6f : 1e-5f;
        if (FLOATX == DType::FP32) return std::max(3 * values("fp32_error/" + key)[0], least);
        const bool loss = key == "loss" || key == "logits";
        const double rounded_sums = grad_dtype == DType::FP32 || loss ? 0 : FLOATX == DType::BF16 ? 0x1p-8 : 0x1p-11;
        return 2 * values(name_of(FLOATX) + ("_error/" + key))[0] + rounded_sums;
    }
    Setup setup(DType grad_dtype = DType::FP32) const {
        Setup s = small_setup(config, B, T);
        s.grad_dtype = grad_dtype;
        if (file.metadata().contains("optimizer")) s.optimizer = Optimizer::MUON;
        return s;
    }
    void load(Model& m, const Setup& s) const {
        allocate(m, s);
        if (FLOATX == DType::FP16) set_loss_scale(m, {float(number("fp16_loss_scale"))});   // the one that PyTorch used
        read_block(m.master, Placement::WHOLE, file, m, "param/");
        master_changed(m);
    }
    Pass pass(const Setup& s) const {
        Model m;
        load(m, s);
        return forward_backward(m, tokens(0, 0));
    }
};

void expect_pytorchs(const Reference& r, const Setup& s, const Pass& pass, const std::string& heading) {
    auto near = [&](const char* key, const char* text, const Floats& found) {
        Near(heading + text, relative_l2(found, r.values(key)), r.limit(key, s.grad_dtype));
    };
    if (s.N() <= s.head_rows) near("logits", "logits equal PyTorch's", pass.logits);
    near("loss", "the loss equals PyTorch's", {float(pass.loss)});
    Near grads(heading + "gradients of all parameters equal PyTorch's");
    for_each_parameter(s, [&](const ParameterRow& row, size_t l, const std::string& name) {
        const std::string key = "grad/" + name;
        const double error = relative_l2(part(pass.gradients, r.config, row, l), r.values(key));
        grads.see(key, error, r.limit(key, s.grad_dtype));
    });
}

void test_gradients(const Reference& r, Setup s, const std::string& heading) {
    const Pass pass = r.pass(s);
    expect_pytorchs(r, s, pass, heading);
    bool same = true;
    for (Recompute mode : {Recompute::SELECTIVE, Recompute::FULL}) {
        s.recompute = mode;
        same = same && r.pass(s) == pass;
    }
    expect(same, heading + "--recompute does not change a bit of logits, losses and gradients");
}

void test_steps(const Reference& r, DType grad_dtype, const std::string& heading) {
    Model m;
    r.load(m, r.setup(grad_dtype));
    Floats losses, norms;
    for (long step = 0; step < r.steps; step++) {
        for (long micro = 0; micro < r.accumulation; micro++)
            micro_step(m, upload_batch(m, r.tokens(step, micro)), r.accumulation * m.setup.N());
        update(m, adamw_settings(r.options, step));
        losses.push_back(take_loss(m) / (r.accumulation * m.setup.N()));
        norms.push_back(fetch(m.a.step()).norm);
    }
    Near(heading + format("losses of %ld steps equal PyTorch's", r.steps),
         relative_l2(losses, r.values("step_loss")), r.limit("step_loss", grad_dtype));
    Near(heading + "gradient norms equal PyTorch's, in steps with and without clipping",
         relative_l2(norms, r.values("step_norm")), r.limit("step_norm", grad_dtype));
    const Floats master = from_device(m.master, m.layout.elements());
    {
        Near change(heading + "the change of each parameter in these steps equals PyTorch's");
        for_each_parameter(m.setup, [&](const ParameterRow& row, size_t l, const std::string& name) {
            const std::string key = "final/" + name;
            const double error = relative_l2(part(master, r.config, row, l), r.values(key), r.values("param/" + name));
            change.see(key, error, r.limit(key, grad_dtype));
        });
    }
    const ParameterRow wte = parameter_table(r.config)[0];
    const auto padding = master.begin() + wte.file_elements(), end = master.begin() + wte.elements;
    expect(std::count(padding, end, 0.0f) == end - padding, heading + "the padding of the vocabulary stays 0");
    const std::vector<floatX> rounded(master.begin(), master.end());
    expect(floats_from_device(m.weights, m.layout.elements()) == Floats(rounded.begin(), rounded.end()),
           heading + "the weights are the rounded master weights");
}

TEST("model against PyTorch") {
    for (const char* name : {"tiny", "odd", "muon"}) {   // muon: ten steps of torch.optim.Muon
        const Reference r(name);
        for (DType grad_dtype : {DType::FP32, GRAD16}) {
            if (FLOATX == DType::FP32 && grad_dtype == GRAD16) continue;
            const std::string heading = format("%s, gradients in %s: ", name, name_of(grad_dtype));
            test_gradients(r, r.setup(grad_dtype), heading);
            test_steps(r, grad_dtype, heading);
        }
        if (device.properties.major != 7)   // as on Hopper, cross-entropy would use cp.async
            expect_pytorchs(r, r.setup(), with_choice(Tuned::FUSED, [&] { return r.pass(r.setup()); }),
                            format("%s, GELU and its gradients as epilogues: ", name));
        Setup naive = r.setup(), chunked = r.setup();
        naive.attention = Attention::NAIVE;
        chunked.head_rows = 7;
        test_gradients(r, naive, format("%s, naive attention: ", name));
        test_gradients(r, chunked, format("%s, head in chunks of 7 rows: ", name));
    }
}

// Compares with the portable attention kernels to one ulp of 1.0 in floatX.
TEST("tensor cores in the model") {
    const Setup s = small_setup({1, 2, 128, 200, 300}, 1, 193);
    auto pass = [&](TensorCores kind) {
        const Temporarily tensor_cores(device.tensor_cores, kind);
        TestModel m(s);
        return forward_backward(m, random_batch(s));
    };
    const Pass portable = pass(TensorCores::NONE);
    const double limit = FLOATX == DType::BF16 ? 0x1p-7 : 0x1p-10;
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA}) {
        if (!has_tensor_cores(kind)) continue;
        const std::string name = name_of(kind);
        const Pass got = pass(kind);
        expect(got.logits != portable.logits, name + ": other kernels run than the portable ones");
        Near(name + ": logits equal the portable kernels'", relative_l2(got.logits, portable.logits), limit);
        Near(name + ": gradients equal the portable kernels'", relative_l2(got.gradients, portable.gradients), limit);
    }
}

// ==== initial weights, shards ================================================

// GPT-2's initial weights: matrices have mean 0 and standard deviation 0.02 (residual projections: 0.02 /
// sqrt(2 layers)); LayerNorm weights are 1, biases 0. Mean and deviation may differ by 5 standard errors.
TEST("initial weights") {
    const TestModel m(small_setup({4, 2, 64, 32, 300}, 1, 32));
    const Floats weights = from_device(m.master, m.layout.elements());
    std::string wrong;
    std::set<Floats> beginnings;
    size_t matrices = 0;
    for (const ParameterRow& row : parameter_table(m.config))
        for (size_t l = 0; l < row.copies; l++) {
            const auto first = weights.begin() + m.layout.place(row, l), end = first + row.file_elements();
            const double n = row.file_elements(), mean = std::accumulate(first, end, 0.0) / n;
            const double variance = std::inner_product(first, end, first, 0.0) / n - mean * mean;
            const bool residual = ends_with(row.name, "c_proj.weight"), matrix = row.shape.size() == 2;
            const double expected = !matrix ? 0 : residual ? 0.02 / std::sqrt(2 * 4) : 0.02;
            const double expected_mean = ends_with(row.name, ".weight") && !matrix ? 1 : 0;
            if (std::abs(mean - expected_mean) > 5 * expected / std::sqrt(n) ||
                std::abs(std::sqrt(variance) - expected) > 5 * expected / std::sqrt(2 * n) ||
                std::count(end, first + row.elements, 0.0f) != std::ptrdiff_t(row.elements - row.file_elements()))
                wrong += format("%s: mean %.3g, std %.3g; ", row.name_of_layer(l).c_str(), mean, std::sqrt(variance));
            if (matrix) beginnings.insert({first, first + 16});
            matrices += matrix;
        }
    expect(wrong.empty(), "initial weights: mean and deviation of each tensor are GPT-2's, padding is 0", wrong);
    expect(beginnings.size() == matrices, "initial weights: no two matrices begin with the same values");
}

// Each element of a tensor is in the shard of one rank, and a rank's shards do not overlap. Tensor rank i has columns i
// of Q, of K, of V and of fc, and rows i of attproj and fcproj. --optimizer muon: layer l is on rank l % ranks.
TEST("shards") {
    const Config config = {3, 6, 96, 24, 300};
    const size_t C = config.channels;
    bool right = true;
    auto try_shards = [&](size_t data, size_t tensor, bool by_layer) {
        const size_t gpus = data * tensor;
        Layout y = layout_of(config, gpus, tensor);
        y.by_layer = by_layer;
        auto owner = [&](const ParameterRow& row, size_t i) {   // tensor rank of element i
            const size_t rows = row.shape[0], columns = row.shape.back(), column = i % columns;
            return strstr(row.name, "c_proj") ? i / columns / (rows / tensor)
                   : strstr(row.name, "c_attn") ? column % C / (C / tensor) : column / (columns / tensor);
        };
        std::map<std::string, std::vector<int>> held;   // by tensor: the number of ranks that hold an element
        for (size_t rank = 0; rank < gpus; rank++) {
            std::vector<int> used(y.elements(Placement::SHARDED));
            for (const ParameterRow& row : parameter_table(config, tensor, rank))
                for (size_t l = 0; l < row.copies; l++) {
                    const bool split = row.is_split();
                    const Shard shard = shard_of(y, row, l, Placement::SHARDED, rank);
                    std::vector<int>& ranks = held[row.name_of_layer(l)];
                    ranks.resize(row.elements * (split ? tensor : 1));
                    if (by_layer && split) right = right && shard.count == (l % gpus == rank ? row.elements : 0);
                    for (size_t i = 0; i < shard.count; i++) {
                        const size_t whole = row.part.whole(shard.first + i);
                        right = right && ++used.at(shard.at + i) == 1 && ++ranks.at(whole) == 1 &&
                                (!split || owner(row, whole) == rank % tensor);
                    }
                }
        }
        for (const auto& [name, ranks] : held) right = right && std::count(ranks.begin(), ranks.end(), 0) == 0;
    };
    for (size_t data = 1; data <= 5; data++)
        for (bool by_layer : {false, true}) try_shards(data, 1, by_layer);
    for (auto [data, tensor] : {std::pair{1, 2}, {3, 2}, {2, 3}}) try_shards(data, tensor, false);
    expect(right, "the shards of 1 to 6 ranks in tensor groups of 1 to 3 hold each element of each tensor once");
}

// ==== memory =================================================================

size_t free_memory() {
    size_t available = 0, all = 0;
    check(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return available;
}

// Allocates a model and expects plan()'s bytes. A GPU rounds each block up to at most 2 MiB more.
void expect_planned(const std::string& text, const Setup& setup) {
    const size_t granularity = device.is_cpu() ? 0 : 2 << 20;
    const Plan p = plan(setup);
    const size_t planned = p.total - p.bytes[static_cast<int>(Category::CUDA)];   // the CUDA context exists already
    const size_t before = free_memory();
    Model m;
    allocate(m, setup);
    const size_t taken = before - free_memory(), slack = m.blocks.size() * granularity;
    expect(m.allocated == planned && taken <= planned + slack && taken + slack >= planned,
           "allocated bytes equal planned bytes: " + text,
           format("planned %zu, allocated %zu, taken from the device %zu", planned, m.allocated, taken));
}

// A member without a row has no memory. Some members are used only on a GPU, or only with several ranks.
TEST("memory: tables") {
    Activations a;
    Parameters<BufferBase> p;
    std::set<BufferBase*> activations, parameters;
    for (const ParameterRow& row : parameter_table(p, {1, 1, 16, 4, 16})) parameters.insert(row.tensor);
    Setup s = small_setup({1, 2, 32, 16, 256}, 2, 16);
    s.tensor = s.gpus = 2;
    s.matmul = MatmulIn::FP8_ALL;
    s.master_weights = MasterWeights::NONE;
    s.optimizer = Optimizer::MUON;
    s.on_gpu = true;
    for (Attention attention : {Attention::FLASH, Attention::NAIVE}) {
        s.attention = attention;
        for (const ActivationRow& row : activation_table(a, s)) activations.insert(row.tensor);
    }
    expect(sizeof(a) == activations.size() * sizeof(BufferBase) && sizeof(p) == parameters.size() * sizeof(BufferBase),
           "each member of Activations and of Parameters has a row in its table");
}

// Calls f with each combination of the alternatives {a|b} in a text.
template <typename F> void for_each_alternative(const std::string& text, F f) {
    const size_t open = text.find('{'), end = text.find('}');
    if (open == text.npos) return f(text);
    for (const std::string& choice : split(text.substr(open + 1, end - open - 1), "|"))
        for_each_alternative(text.substr(0, open) + choice + text.substr(end + 1), f);
}

TEST("memory") {
    const Setup base = small_setup({3, 2, 32, 20, 300}, 3, 17);
    std::vector<std::string> all = {
        "--seq-len 17 --attention {flash|naive} --recompute {none|selective|full}",
        "--seq-len 17 --optimizer muon --gpus {1|5}", "--seq-len 17 --optimizer muon --gpus {2|5} --zero 1",
        "--seq-len 17 --gpus 5 --zero {0|1|2|3}"};
    if (SEPARATE_MASTER)
        all.insert(all.end(), {"--seq-len 17 --master-weights none", "--seq-len 17 --attention {flash|naive} "
                               "--recompute {none|selective|full} --grad-dtype " + std::string(name_of(FLOATX))});
    if (FLOATX == DType::BF16) all.push_back("--seq-len 16 --matmul {fp8|fp8-all} --recompute {none|selective|full}");
    for (const std::string& options : all)
        for_each_alternative("--micro-batch 3 " + options, [&](const std::string& flags) {
            const Options o = parse_options(PLAN, "plan", split(flags, " "));
            expect_planned(flags, make_setup(o, base.config, Purpose::TRAINING, {}));
        });
    for (auto [name, purpose] : {std::pair{"eval", Purpose::INFERENCE}, {"sample", Purpose::SAMPLING}})
        expect_planned(name, small_setup(base.config, 3, 17, purpose));
    Setup s = base;
    bool exact = true;
    for (int B : {1, 5, 1000}) {
        s.B = B;
        const size_t bytes = plan(s).total;
        exact = exact && largest_micro_batch(s, bytes) == B && largest_micro_batch(s, bytes - 1) == B - 1;
    }
    expect(exact, "largest_micro_batch() is exact to one byte of memory");

    // Without this check CUDA reports only "invalid argument" if a kernel needs too much shared memory.
    const size_t most = device.properties.sharedMemPerBlockOptin;
    auto launch_error = [&](size_t bytes) {
        return error_of([&] { launch("hold", hold_kernel, 1, 1, bytes, 1LL); });
    };
    const std::string error = launch_error(most + 16);
    expect(contains(error, format("hold: expected at most %zu bytes", most)) &&
               contains(error, format("found %zu", most + 16)) && launch_error(most).empty(),
           "a kernel that needs more shared memory than a block may have is rejected with both sizes", error);
}

// ==== Hugging Face ===========================================================

// Rewrites hf_tiny's weights as other versions of transformers and other tools do, and reads them.
TEST("folders: weights of other tools") {
    const std::string TINY = "data/reference/hf_tiny", dir = "@/variant";
    const std::vector<RawTensor> tensors = raw_tensors(TINY + "/model.safetensors");
    auto master_of = [&](const std::string& folder) {
        const TestModel m(folder, Purpose::TRAINING, 1, 8);
        return from_device(m.master, m.layout.elements());
    };
    const Floats expected = master_of(TINY);
    fs::create_directory(scratch(dir));
    copy_files(TINY + "/config.json", dir + "/config.json");
    auto read_as = [&](const std::vector<RawTensor>& changed) {
        write_bytes(dir + "/model.safetensors", safetensors(changed));
        return master_of(dir);
    };
    for (const std::string prefix : {"", "model.", "_orig_mod.transformer."}) {
        std::vector<RawTensor> renamed = tensors;
        for (RawTensor& tensor : renamed) tensor.name = prefix + tensor.name.substr(strlen("transformer."));
        renamed.push_back(tensor_named(prefix + "wte.weight", renamed));
        renamed.back().name = (prefix[0] == '_' ? "_orig_mod." : "") + std::string("lm_head.weight");
        expect(read_as(renamed) == expected, "weights named '" + prefix + "...' with a copy of the tied head are read");
    }
    std::vector<RawTensor> masks = tensors;
    masks.push_back({"transformer.h.0.attn.bias", "U8", {1, 1, 4, 4}, std::string(16, 1)});
    masks.push_back({"transformer.h.0.attn.masked_bias", "F32", {}, std::string(4, 0)});
    expect(read_as(masks) == expected, "stored causal masks are ignored");
    std::vector<RawTensor> rounded = tensors;
    for (RawTensor& tensor : rounded) {
        std::string halves;
        for (size_t i = 2; i < tensor.bytes.size(); i += 4) halves += tensor.bytes.substr(i, 2);
        tensor.dtype = "BF16";
        tensor.bytes = halves;
    }
    const Floats in_bf16 = read_as(rounded);
    expect(in_bf16 != expected && relative_l2(in_bf16, expected) < 0.01, "weights stored in BF16 are read");
    const std::vector<uint16_t> bf16 = {0x3f80, 0xc000}, fp16 = {0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x83ff, 0};
    write_bytes("@/odd.safetensors", safetensors({{"a", "U8", {1}, "x"}, {"b", "BF16", {2}, bytes_of(bf16)},
                                                  {"c", "F16", {7}, bytes_of(fp16)}}));
    const Safetensors odd(scratch("@/odd.safetensors"));
    expect(odd.floats("b", {2}) == Floats{1, -2} &&
               odd.floats("c", {7}) == Floats{1, -2, 65504, 0x1p-14f, 0x1p-24f, -1023 * 0x1p-24f, 0},
           "normal, subnormal and negative BF16 and FP16 values at odd addresses are converted exactly");

    std::vector<RawTensor> shards[2];
    json places;
    for (size_t i = 0; i < tensors.size(); i++) {
        shards[i % 2].push_back(tensors[i]);
        places[tensors[i].name] = format("shard-%zu.safetensors", i % 2);
    }
    for (int i : {0, 1}) write_bytes(dir + format("/shard-%d.safetensors", i), safetensors(shards[i]));
    write_json(scratch(dir + "/model.safetensors.index.json"), {{"weight_map", places}});
    fs::remove(scratch(dir + "/model.safetensors"));
    expect(master_of(dir) == expected, "weights in two files with an index are read");
}

// Loads the weights of the reference `odd` and writes them as a folder.
void write_our_folder(const std::string& dir, Model& m) {
    const Reference r("odd");
    fs::create_directories(scratch(dir));
    r.load(m, r.setup());
    write_model(scratch(dir), m, text_files("", config_json("", m.config, INIT_STD, 0), m.config, false));
}

// Writes these weights to @/ours unless @/ours exists.
void need_our_folder() {
    Model m;
    if (!fs::exists(scratch("@/ours"))) write_our_folder("@/ours", m);
}

TEST("folders: round trip") {
    const Reference r("odd");
    Model m;
    write_our_folder("@/ours", m);
    const TestModel training("@/ours", Purpose::TRAINING, r.B, r.T), inference("@/ours", Purpose::INFERENCE, r.B, r.T);
    auto same = [&](const auto* a, const auto* b) {
        return bytes_of(from_device(a, m.layout.elements())) == bytes_of(from_device(b, m.layout.elements()));
    };
    expect(same(training.master, m.master) && same(training.weights, m.weights),
           "a written folder is read for training with the same bits");
    expect(same(inference.weights, m.weights), "a written folder is read for inference with the same rounded weights");
    const Safetensors file(scratch("@/ours/model.safetensors"));
    size_t tensors = 0;
    bool right = true;
    for_each_parameter(r.setup(), [&](const ParameterRow& row, size_t, const std::string& name) {
        tensors++;
        right = right && read_floats(file, name) == r.values("param/" + name) && file.at(name).shape == row.shape;
    });
    expect(right && file.entries().size() == tensors,
           "a written folder holds each parameter once, without padding, with its Hugging Face name and shape");
    const uint64_t header = *reinterpret_cast<const uint64_t*>(read_bytes("@/ours/model.safetensors").data());
    expect(header % 8 == 0, "the tensors of a written file begin at a multiple of 8 bytes");
}

// ==== data ===================================================================

const std::vector<size_t> FILE_SIZES = {12, 25, 7};

// Writes and opens three files of these sizes. Token i of file f is 100 f + i.
Tokens three_shards() {
    for (size_t f = 0; f < FILE_SIZES.size(); f++) {
        std::vector<uint16_t> tokens(FILE_SIZES[f]);
        std::iota(tokens.begin(), tokens.end(), 100 * f);
        write_bytes(format("@/shard_%zu.bin", f), shard(tokens));
    }
    return Tokens(scratch("@/shard_*.bin"));
}

struct Window { std::vector<int> inputs, targets; };

Window read_window(const Tokens& tokens, Windows kind, size_t index, size_t T, int vocab = 1000) {
    Window w = {std::vector<int>(T, -2), std::vector<int>(T, -2)};
    tokens.read(w.inputs.data(), w.targets.data(), kind, index, T, vocab);
    return w;
}

TEST("windows") {
    Tokens tokens = three_shards();
    const size_t T = 4;
    expect(tokens.count() == 44 && !tokens.bytes_only(), "a pattern matches all shards");
    std::vector<int> starts, expected_starts, covered, expected_covered;
    bool shifted = true;
    for (Windows kind : {Windows::WHOLE, Windows::ANYWHERE})
        for (size_t w = 0; w < tokens.windows(kind, T); w++) {
            const Window window = read_window(tokens, kind, w, T);
            starts.push_back(window.inputs[0]);
            for (int t = 0; t < int(T); t++)
                shifted = shifted && window.inputs[t] == starts.back() + t &&
                          window.targets[t] == window.inputs[t] + 1;
        }
    for (size_t step : {T, size_t(1)})
        for (size_t f = 0; f < FILE_SIZES.size(); f++)
            for (size_t i = 0; i + T < FILE_SIZES[f]; i += step) expected_starts.push_back(100 * f + i);
    expect(starts == expected_starts, "windows start every T tokens, or anywhere, and do not cross the end of a file");
    expect(shifted, "the targets of a window are the inputs shifted by one token");

    for (size_t w = 0; w < tokens.windows(Windows::COVERING, T); w++)
        for (int target : read_window(tokens, Windows::COVERING, w, T).targets)
            if (target != -1) covered.push_back(target);
    for (size_t f = 0; f < FILE_SIZES.size(); f++)
        for (size_t i = 1; i < FILE_SIZES[f]; i++) expected_covered.push_back(100 * f + i);
    expect(covered == expected_covered, "in covering windows each token but a file's first is a target exactly once");

    expect(tokens.windows(Windows::ANYWHERE, 12) == 13, "only the file of 25 tokens has windows of 12 tokens");

    const std::string error = error_of([&] {
        read_window(tokens, Windows::WHOLE, 0, T, 5);   // tokens 0 to 4
        read_window(tokens, Windows::WHOLE, 0, T, 4);
    });
    expect(contains(error, "token 4 at position 4"), "a token that equals the vocabulary size is rejected", error);

    const Tokens tail = tokens.split_tail(0.3);   // 13 of 44: the last file and 6 tokens of the second
    expect(tokens.count() == 31 && tail.count() == 13 && read_window(tail, Windows::WHOLE, 0, 4).inputs[0] == 119 &&
               read_window(tail, Windows::WHOLE, 1, 4).inputs[0] == 200 && tokens.windows(Windows::WHOLE, 18) == 1,
           "the validation split is the last tokens, across files");
    const std::string of_tail = error_of([&] { read_window(tail, Windows::WHOLE, 0, T, 119); });
    expect(contains(of_tail, "token 119 at position 19"), "an error names the position in the file", of_tail);
}

// Returns the first inputs of `count` windows that a Loader loads, B at a time.
std::vector<int> loaded_starts(int B, Shuffle shuffle, uint64_t seed, uint64_t first_window, size_t count, int gpus = 1,
                               size_t rank = 0) {
    const Tokens tokens(scratch("@/shard_*.bin"));
    Model m;
    Setup s = small_setup({1, 1, 16, 4, 1000}, B, 4);
    s.gpus = gpus;
    s.rank = rank;
    allocate(m, s);
    Loader loader(m, tokens, shuffle, seed, first_window);
    std::vector<int> starts;
    for (; starts.size() < count; loader.advance()) {
        const std::vector<int> inputs = from_device(loader.current().inputs, m.setup.N());
        for (int b = 0; b < B; b++) starts.push_back(inputs[b * 4]);
    }
    return starts;
}

TEST("loader") {
    three_shards();
    const std::vector<int> twice = {0, 4, 100, 104, 108, 112, 116, 120, 200, 0, 4, 100, 104, 108, 112, 116, 120, 200};
    expect(loaded_starts(3, Shuffle::NO, 1, 0, 18) == twice && loaded_starts(1, Shuffle::NO, 1, 0, 18) == twice,
           "--shuffle no loads the windows in order, and restarts after the last one");
    const std::vector<int> one = loaded_starts(1, Shuffle::YES, 7, 0, 24);
    expect(loaded_starts(4, Shuffle::YES, 7, 0, 24) == one, "shuffled windows do not depend on the micro-batch size");
    expect(loaded_starts(2, Shuffle::YES, 7, 10, 14) == std::vector<int>(one.begin() + 10, one.end()),
           "a loader that starts at window 10 loads the same windows from there");
    std::vector<int> of_ranks(24);
    for (size_t rank = 0; rank < 3; rank++) {   // micro-batches of 2 on 3 GPUs
        const std::vector<int> starts = loaded_starts(2, Shuffle::YES, 7, 0, 8, 3, rank);
        for (size_t i = 0; i < 8; i++) of_ranks[i / 2 * 6 + rank * 2 + i % 2] = starts[i];
    }
    expect(of_ranks == one, "3 ranks load disjoint windows, together the same as one GPU");
    expect(loaded_starts(4, Shuffle::YES, 8, 0, 24) != one, "another seed loads other windows");
    // 24 draws from 32 windows give 32 (1 - (31/32)^24) = 17.1 different ones on average.
    expect(std::set<int>(one.begin(), one.end()).size() > 10, "more than 10 of 24 shuffled windows are different");
}

// Returns the mean of the losses of logits (N, V), without those of targets that are -1.
double mean_loss(const Floats& logits, const std::vector<int>& targets) {
    const int V = logits.size() / targets.size();
    const Values losses = cross_entropy_loop<double>({logits.begin(), logits.end()}, targets, 1, V, V).losses;
    const double sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    return sum / (targets.size() - std::count(targets.begin(), targets.end(), -1));
}

// Returns mean_loss() of these windows, computed in one batch.
double plain_loss(const std::string& dir, const Tokens& tokens, int T, const std::vector<size_t>& windows) {
    TestModel m(dir, Purpose::INFERENCE, windows.size(), T);
    std::vector<int> inputs, targets;
    for (size_t w : windows) {
        const Window window = read_window(tokens, Windows::COVERING, w, T);
        inputs.insert(inputs.end(), window.inputs.begin(), window.inputs.end());
        targets.insert(targets.end(), window.targets.begin(), window.targets.end());
    }
    return mean_loss(logits_of(m, send_spare(m.a.inputs, inputs)), targets);
}

// Between two ways to compute a mean loss: logits may differ by one rounding, 2^-8 near 1 in BF16.
constexpr double LOSS_TOLERANCE = FLOATX == DType::FP32 ? 2e-6 : 1e-3;

// Writes files of 50, 1 and 23 tokens below 101, the vocabulary size of the reference `odd`.
void write_eval_shards() {
    size_t n = 0;
    for (size_t size : {50, 1, 23}) {
        std::vector<uint16_t> values(size);
        for (uint16_t& value : values) value = splitmix64(n++) % 101;
        write_bytes(format("@/eval_%zu.bin", size), shard(values));
    }
}

// Windows of 11 tokens: the last one of each file is shorter, and a file of one token has no window.
TEST("evaluation") {
    need_our_folder();
    write_eval_shards();
    const Tokens tokens(scratch("@/eval_*.bin"));
    const double of_all = plain_loss("@/ours", tokens, 11, {0, 1, 2, 3, 4, 5, 6});
    const double of_three = plain_loss("@/ours", tokens, 11, {0, 2, 4});
    Near all("the mean loss of all 7 windows equals the reference");
    Near three("the mean loss of 3 evenly spaced windows equals the reference");
    for (int B : {1, 3, 16}) {
        TestModel m("@/ours", Purpose::INFERENCE, B, 11);
        const Evaluation e = evaluate(m, tokens, 0, Text("", m.config.vocab));
        all.see(format("micro-batch %d", B), e.tokens == 71 ? fabs(e.loss / of_all - 1) : INFINITY, LOSS_TOLERANCE);
        const double loss = evaluate(m, tokens, 3, Text("", m.config.vocab)).loss;
        three.see(format("micro-batch %d", B), fabs(loss / of_three - 1), LOSS_TOLERANCE);
    }
}

// ==== HellaSwag ==============================================================
// data/reference/hellaswag.json holds for each question the sum of losses of each ending, by PyTorch in float64, and
// the endings chosen by sum and by mean.

const std::string QUESTIONS = "data/reference/hellaswag.bin";

TEST("HellaSwag: losses of endings") {
    const json expected = json::parse(read_file("data/reference/hellaswag.json"));
    for (int B : {1, 3, 64}) {
        TestModel m("data/reference/hf_tiny", Purpose::INFERENCE, B, 32);
        const std::vector<Question> questions = read_questions(QUESTIONS, m.config.vocab, 32);
        const EndingLosses losses = ending_losses(m, questions);
        double error = questions.size() == expected.size() ? 0 : INFINITY;
        bool same = true;
        for (size_t q = 0; q < std::min(questions.size(), expected.size()); q++) {
            const json choices = {answer(questions[q], losses[q], By::SUM),
                                  answer(questions[q], losses[q], By::MEAN)};
            same = same && choices == expected[q]["choices"];
            for (size_t e = 0; e < expected[q]["sums"].size(); e++)
                error = std::max(error, fabs(losses[q][e] / double(expected[q]["sums"][e]) - 1));
        }
        Near(format("losses of endings equal PyTorch's, in batches of %d", B), error,
             FLOATX == DType::FP32 ? 2e-6 : 1e-2);   // endings of one token: rounding errors do not average out
        expect(same, "the endings chosen by sum and by mean are PyTorch's");
        expect(m.setup.B == B && m.setup.T == 32 && take_loss(m) == 0, "the model's setup and loss are restored");
    }
    const Question three = {0, {1}, {{1, 1, 1}, {1}, {1, 1}}};
    expect(answer(three, {3, 2, 3}, By::SUM) == 1 && answer(three, {3, 2, 3}, By::MEAN) == 0 &&
               answer(three, {3, 1, 2}, By::MEAN) == 0,
           "the mean is over the tokens of an ending; the first of equal endings is chosen");
}

// ==== graphs =================================================================

// Returns the bits of all results of three steps of three micro-batches, with an evaluation after all but the first.
// Graphs runs work the first time, captures it the second time and replays it from the third time on.
std::string bytes_of_steps(const Setup& s, bool graphs, size_t& captured) {
    const Tokens tokens("README.md");
    Options o;
    o.lr = 1e-2;
    o.warmup = 3;   // the learning rate changes in each step
    TestModel m(s);
    set_loss_scale(m, {1 << 10, 0, 0, 2});   // doubles after the second step
    m.graphs.on = graphs;
    Loader loader(m, tokens, Shuffle::YES, 7, 0);
    std::vector<double> results;
    for (long step = 0; step < 3; step++) {
        for (int micro = 0; micro < 3; micro++, loader.advance()) micro_step(m, loader.current(), 3 * s.N());
        update(m, adamw_settings(o, step));
        results.push_back(take_loss(m));
        results.push_back(fetch(m.a.step()).norm);
        if (step > 0) results.push_back(evaluate(m, tokens, 2 * s.B, Text("", m.config.vocab)).loss);
    }
    std::string bytes = bytes_of(results);
    for (const float* block : {m.master, m.adam_m, m.adam_v})
        bytes += bytes_of(from_device(block, m.layout.elements()));
    captured = m.graphs.captured();
    const LossScale scale = fetch(m.a.loss_scale());
    return bytes + bytes_of(gradients(m)) + bytes_of(Floats{scale.scale, scale.good_steps, scale.skipped});
}

TEST("graphs") {
    Setup s = small_setup({2, 2, 32, 16, 256}, 2, 16);
    s.head_rows = 24;   // the head runs in two chunks
    s.grad_dtype = FLOATX == DType::FP32 ? DType::FP32 : GRAD16;
    for (auto [recompute, attention] : {std::pair{Recompute::NONE, Attention::FLASH},
                                        {Recompute::NONE, Attention::NAIVE},
                                        {Recompute::FULL, Attention::FLASH}}) {
        s.recompute = recompute;
        s.attention = attention;
        size_t none = 1, captured = 0;
        const bool same = bytes_of_steps(s, false, none) == bytes_of_steps(s, true, captured);
        // graphs: a micro-step for each of the loader's two slots, the update, the evaluation
        expect(same && none == 0 && captured == 4,
               format("graphs change no bit of losses, norms, weights and moments: --recompute %s, %s attention",
                      RECOMPUTE_NAMES[static_cast<int>(recompute)].first,
                      attention == Attention::FLASH ? "flash" : "naive"),
               format("%zu graphs", captured));
    }
    Graphs graphs;
    graphs.on = true;
    auto work = [] { check(cudaStreamSynchronize(device.stream), "waiting"); };
    graphs.run("something", work);
    const std::string error = error_of([&] { graphs.run("something", work); });
    cudaGetLastError();
    const DeviceArray<float> after(Values{1, 2});   // the stream still works
    expect(contains(error, "cudaErrorStreamCaptureUnsupported") && after.values() == Values{1, 2} &&
           graphs.captured() == 0,
           "capturing work that synchronises is reported as an error", error);

    const TrainData data = {};
    const Start start = {};
    Options o;
    o.total_batch = 2 * s.N();
    o.batch_ramp = {long(s.N()), 100};
    TrainingRun run(o, data, start);
    allocate(run.m, s);
    run.m.graphs.on = true;
    auto captured_at = [&](uint64_t tokens) {
        run.tokens = tokens;
        begin_step(run);
        return run.m.graphs.captured();
    };
    auto uses_graphs = [&](UseGraph graph) { return o.graph = graph, use_graphs(o); };
    expect(uses_graphs(UseGraph::ON) && !uses_graphs(UseGraph::OFF) && uses_graphs(UseGraph::AUTO) != device.is_cpu(),
           "--graph turns graphs on or off; auto: on a GPU only");
    captured_at(0);
    for (int i = 0; i < 2; i++) run.m.graphs.run("some work", [&] { clear(run.m.a.loss(), sizeof(double)); });
    expect(captured_at(99) == 1 && captured_at(100) == 0, "graphs are freed when the batch grows, and only then");
}

// ==== loss scaling ===========================================================

LossScale dynamic_scale(float scale) { return {scale, 0, 0, GROWTH_INTERVAL}; }

// Returns the scale after steps with these norms of the scaled gradients and, with `spikes`, this loss.
struct ScaleAndFactor : LossScale { float factor; };   // factor: Step::factor of the last step
ScaleAndFactor after_norms(const LossScale& s, const Values& norms, double loss = 0, Spikes* spikes = nullptr) {
    Step settings = {};
    settings.max_z = 4;
    const DeviceArray<Step> step(std::vector<Step>{settings});
    const DeviceArray<LossScale> loss_scale(std::vector<LossScale>{s});
    for (double scaled : norms) {
        const DeviceArray<float> partials(Values{scaled * scaled, loss});
        gradient_norm(step, loss_scale, partials, 1, spikes);
    }
    return {fetch<LossScale>(loss_scale), fetch<Step>(step).factor};
}
bool is(const ScaleAndFactor& s, float scale, float factor, float good, float skipped) {
    return s.scale == scale && s.factor == factor && s.good_steps == good && s.skipped == skipped;
}

TEST("loss scaling: the scale") {
    const LossScale first = dynamic_scale(FIRST_LOSS_SCALE);
    const ScaleAndFactor once = after_norms(first, {3, INFINITY}), nan = after_norms(first, {NAN});
    expect(is(once, 32768, 0, 0, 1) && is(nan, 32768, 0, 0, 1) && is(after_norms(once, {5}), 32768, 1 / 32768.0f, 1, 1),
           "an infinite or NaN norm skips the step, halves the scale and resets the count of good steps");
    expect(is(after_norms(dynamic_scale(1), {INFINITY}), 1, 0, 0, 1), "the scale is at least 1");
    const ScaleAndFactor before = after_norms(first, Values(GROWTH_INTERVAL - 1, 7));
    expect(GROWTH_INTERVAL == 2000 && is(before, 65536, 1 / 65536.0f, 1999, 0) &&
               is(after_norms(before, {7}), 131072, 1 / 65536.0f, 0, 0),
           "2000 good steps in a row double the scale, from the next step on");
    LossScale largest = dynamic_scale(MAX_LOSS_SCALE);
    largest.good_steps = GROWTH_INTERVAL - 1;
    expect(is(after_norms(largest, {7}), 1 << 24, 1.0f / (1 << 24), 0, 0), "the scale is at most 2^24");
    expect(is(after_norms({8}, {INFINITY}), 8, 0.125f, 0, 0),
           "with a fixed scale an infinite norm neither changes the scale nor skips the step");
    const Step late = adamw_settings({}, 9, 4), early = adamw_settings({}, 5);
    expect(late.correction1 == early.correction1 && late.correction2 == early.correction2 &&
               late.lr == adamw_settings({}, 9).lr && late.lr != early.lr,
           "skipped steps advance the learning rate, not AdamW's t");
}

TEST("loss scaling: the end of a run") {
    const TrainData data = {};
    const Start start = {};
    const Options o;
    TrainingRun run(o, data, start);
    allocate(run.m, small_setup({1, 1, 16, 4, 256}, 1, 4));
    run.tokens_per_step = 4;
    run.micro_steps = 2;
    auto result = [&](const LossScale& scale, double norm) {   // of a step with this norm of the scaled gradients
        set_loss_scale(run.m, run.scale = scale);
        const DeviceArray<float> partials(Values{norm * norm});
        gradient_norm(run.m.a.step(), run.m.a.loss_scale(), partials, 1);
        return step_result(run, 0, 0);
    };
    const StepResult skipped = result(dynamic_scale(2), INFINITY);
    expect(skipped.is_finite && skipped.loss_scale == 2 && run.scale.scale == 1 && result({}, 1).is_finite &&
               !result({}, INFINITY).is_finite && !result(dynamic_scale(1), INFINITY).is_finite,
           "a norm that is not finite ends the run, unless loss scaling skips the step and halves the scale");
    json record;
    add_noise(record, run, skipped, 1);
    expect(record.is_null() && run.noise.gradient == 0, "a skipped step does not change the gradient noise scale");
}

void run_micro_batch(Model& m, const LossScale& scale) {
    set_loss_scale(m, scale);
    micro_step(m, upload_batch(m, random_batch(m.setup)), m.setup.N());
}

std::vector<Floats> weights_and_moments(const Model& m) {
    const size_t n = m.layout.elements();
    return {floats_from_device(m.weights, n), from_device(m.master, n), from_device(m.adam_m, n),
            from_device(m.adam_v, layout_of_v(m.setup).elements())};
}

Setup loss_scaling_setup(DType grad_dtype = DType::FP32) {
    Setup s = small_setup({2, 2, 32, 16, 256}, 3, 16);
    s.recompute = Recompute::FULL;
    s.grad_dtype = grad_dtype;
    s.head_rows = 24;
    return s;
}

// In FP32 and BF16 a power of 2 changes no bit. In FP16, small unscaled gradients are subnormal and lose precision.
TEST("loss scaling: gradients") {
    const Setup s = loss_scaling_setup();
    TestModel plain(s), scaled(s);
    run_micro_batch(plain, {});
    run_micro_batch(scaled, {65536});
    const Floats truth = gradients(plain), found = gradients(scaled);
    if (FLOATX == DType::FP16) Near("a scale of 2^16 changes gradients by rounding", relative_l2(found, truth), 1e-3);
    else {
        update(plain, adamw_settings({}, 0));
        update(scaled, adamw_settings({}, 0));
        expect(bytes_of(found) == bytes_of(truth) && weights_and_moments(plain) == weights_and_moments(scaled) &&
                   fetch(plain.a.step()).norm == fetch(scaled.a.step()).norm,
               "a scale of 2^16 changes no bit of gradients, norm, weights and moments");
    }
    const size_t N = s.N(), C = s.config.channels;
    const auto& a = plain.a;
    double zeros = 0;
    for (auto [x, columns] : {std::pair{a.dres(), C}, {a.dln(), C}, {a.datt(), C}, {a.dqkv(), 3 * C},
                              {a.dfc(), 4 * C}}) {
        std::vector<floatX> values(N * columns, static_cast<floatX>(1.0f));
        for (size_t i = 0; i < values.size(); i += columns / C + 2, zeros++) values[i] = static_cast<floatX>(0.0f);
        upload(x, values.data(), values.size() * sizeof(floatX));
    }
    expect(zero_gradients(plain) == zeros / (10 * N * C), "the fraction of zeros in the activation gradients is exact");
}

// ==== loss spikes ============================================================

// Returns the z-score of the last value by its definition, over the last 128 finite values; NaN without a full window
// before it.
double z_of_last(const Values& values) {
    Values window;
    for (double x : values) if (std::isfinite(x)) window.push_back(x);
    if (!std::isfinite(values.back()) || window.size() <= 128) return NAN;
    window.erase(window.begin(), window.end() - 128);
    double mean = 0, variance = 0;
    for (double x : window) mean += x / 128;
    for (double x : window) variance += (x - mean) * (x - mean) / 128;
    return variance > 0 ? (values.back() - mean) / sqrt(variance) : 0;
}

// Compares z-scores and decisions with z_of_last() after each step. skipped: the expected ones, counted from 0.
void try_spikes(const std::string& text, const Values& losses, const Values& norms, const std::set<size_t>& skipped) {
    const DeviceArray<LossScale> loss_scale(std::vector<LossScale>{{}});
    const DeviceArray<Spikes> spikes(std::vector<Spikes>{{}});
    double error = 0;
    bool right = true;
    for (size_t i = 0; i < losses.size(); i++) {
        Step s = {};
        s.norm = float(norms[i]), s.factor = 0.5f, s.max_z = 4;
        const DeviceArray<Step> step(std::vector<Step>{s});
        skip_spike(step, loss_scale, spikes, DeviceArray<float>(Values{losses[i]}));
        const Spikes found = fetch<Spikes>(spikes);
        for (auto [values, z] : {std::pair<const Values*, double>{&losses, found.loss.z}, {&norms, found.norm.z}}) {
            const double expected = z_of_last({values->begin(), values->begin() + i + 1});
            right = right && std::isnan(z) == std::isnan(expected);
            if (!std::isnan(z)) error = std::max(error, fabs(z - expected));
        }
        right = right && fetch<Step>(step).factor == (skipped.count(i) ? 0 : 0.5f);
    }
    Near(text + ": z-scores equal those of a loop in FP64", error, 1e-5);
    expect(right && fetch<LossScale>(loss_scale).skipped == skipped.size(),
           text + ": z-scores exist from step 129 on; steps above the limit are skipped and counted");
}

TEST("spikes: z-scores") {
    Values losses = random_values<float>(400, 2.9, 3.1), norms = random_values<float>(400, 0.9, 1.1);
    try_spikes("no spike", losses, norms, {});
    losses[100] = 6;                // before the window is full, and in it for the spikes at first
    losses[128] = norms[129] = 9;   // the first steps with a z-score
    losses[250] = norms[251] = 0;   // low values
    losses[260] = norms[260] = NAN;
    losses[261] = 9, norms[261] = INFINITY;   // loss scaling or the end of the run is responsible
    norms[262] = 5;
    losses[263] = INFINITY;
    try_spikes("spikes", losses, norms, {128, 129, 262});
    Values level(400, 2), constant(400, 0.1f);
    std::fill(level.begin() + 300, level.end(), 5);
    try_spikes("a change of level, accepted after 7 steps, and a constant norm", level, constant,
               {300, 301, 302, 303, 304, 305, 306});
}

TEST("spikes: with a loss scale") {
    Spikes full;
    for (int i = 0; i < SPIKE_STEPS; i++) full.push(1, 1);
    auto after = [&](const LossScale& s, double loss, double scaled_norm) {
        return after_norms(s, {scaled_norm}, loss, DeviceArray<Spikes>(std::vector<Spikes>{full}));
    };
    const LossScale dynamic = {64, 5, 2, GROWTH_INTERVAL}, fixed = {64, 0, 2};
    expect(is(after(dynamic, 1, 64), 64, 1 / 64.0f, 6, 2), "a normal step is not skipped");
    expect(is(after(dynamic, 9, 64), 64, 0, 6, 3) && is(after(dynamic, 1, 640), 64, 0, 6, 3) &&
               is(after(fixed, 9, 64), 64, 0, 0, 3),
           "a spike of the loss or of the unscaled norm is skipped and does not halve the scale");
    expect(is(after(dynamic, 9, INFINITY), 32, 0, 0, 3), "an overflow halves the scale and is counted once");
    expect(is(after(fixed, 9, INFINITY), 64, 1 / 64.0f, 0, 2),
           "with a fixed scale an infinite norm is not skipped, whatever the loss is");
}

// A step is skipped for a spike of the norm, or because one gradient overflows. The windows hold losses near 5.5, as
// the model's, and norms far below the model's, or far above.
TEST("spikes: a skipped step") {
    for (auto [optimizer, grad_dtype] : {std::pair{Optimizer::ADAMW, DType::FP32}, {Optimizer::MUON, DType::FP32},
                                         {Optimizer::ADAMW, FLOATX == DType::FP32 ? DType::FP32 : GRAD16}}) {
        Setup s = loss_scaling_setup(grad_dtype);
        s.optimizer = optimizer;
        TestModel m(s);
        // Returns weights and moments before and after a step.
        auto step_after_norms = [&](float norm, bool overflow = false) {
            Spikes spikes;
            for (int i = 0; i < SPIKE_STEPS; i++) spikes.push(5.5f + i % 2, norm * (1 + i % 3));
            set_spikes(m, spikes);
            take_loss(m);
            run_micro_batch(m, dynamic_scale(1024));
            if (overflow)
                with_type(m.grads, [&](auto* g) {
                    const auto bad = static_cast<std::remove_pointer_t<decltype(g)>>(float(INFINITY));
                    upload(g + m.layout.elements() / 2, &bad, sizeof(bad));
                });
            Step step = adamw_settings({}, 0);
            step.max_z = 4, step.tokens = float(s.N());
            const std::vector<Floats> before = weights_and_moments(m);
            update(m, step);
            return std::pair{before, weights_and_moments(m)};
        };
        const auto [start, updated] = step_after_norms(1e4f);
        bool all_changed = fetch(m.a.loss_scale()).skipped == 0;
        for (size_t i = 0; i < start.size(); i++) all_changed = all_changed && start[i] != updated[i];
        expect(all_changed, "a norm below those of the window is not skipped");
        for (bool overflow : {false, true}) {
            const auto [before, after] = step_after_norms(overflow ? 1e4f : 1e-4f, overflow);
            const LossScale scale = fetch(m.a.loss_scale());
            const Floats left = gradients(m);
            const double loss = take_loss(m) / s.N(), newest = fetch(m.a.spikes()).loss.values[SPIKE_STEPS - 1];
            expect(before == after && scale.skipped == 1 && scale.scale == (overflow ? 512 : 1024) &&
                       std::isfinite(fetch(m.a.step()).norm) != overflow && left == Floats(left.size(), 0) &&
                       (overflow || fabs(newest / loss - 1) < 1e-6),
                   format("%s leaves weights and moments unchanged: %s, gradients in %s",
                          overflow ? "an overflow halves the scale and" : "a spike of the norm",
                          optimizer == Optimizer::MUON ? "muon" : "adamw", name_of(grad_dtype)));
        }
    }
}

// ==== schedule and sampling ==================================================

TEST("schedule") {
    Options o;
    o.lr = 1;
    o.min_lr = 0.1;
    o.warmup = 10;
    o.steps = 110;
    struct Corners { Schedule schedule; const char* name; std::vector<std::pair<long, double>> points; };
    const std::vector<Corners> CORNERS = {
        {Schedule::COSINE,   "cosine",   {{10, 1}, {35, 0.1 + 0.9 * (2 + sqrt(2)) / 4}, {60, 0.55}, {110, 0.1}}},
        {Schedule::LINEAR,   "linear",   {{10, 1}, {35, 0.775}, {60, 0.55}, {110, 0.1}}},
        {Schedule::WSD,      "wsd",      {{10, 1}, {60, 1}, {88, 1}, {99, 0.55}, {110, 0.1}}},
        {Schedule::CONSTANT, "constant", {{0, 0.1}, {4, 0.5}, {9, 1}, {10, 1}, {60, 1}, {109, 1}}},   // with warm-up
    };
    for (const Corners& corners : CORNERS) {
        o.schedule = corners.schedule;
        double error = 0;
        for (auto [step, expected] : corners.points) error = std::max(error, fabs(learning_rate(o, step) - expected));
        Near(format("--schedule %s: the learning rate is exact at its corner points", corners.name), error, 1e-12);
    }
    o.schedule = Schedule::LINEAR;
    o.min_lr = 0;
    expect(learning_rate(o, 110) == 0, "with --min-lr 0 the learning rate ends at 0");
    o.min_lr = -1;
    Near("without --min-lr the learning rate ends at a tenth of --lr", fabs(learning_rate(o, 110) - 0.1), 1e-12);
    o.warmup = 0.05;
    double error = 0;
    for (auto [step, expected] : {std::pair{0, 0.1}, {9, 1.0}, {10, 1.0}, {200, 0.1}})
        error = std::max(error, fabs(learning_rate(o, step, 200) - expected));
    Near("--warmup below 1 is a fraction of the expected steps", error, 1e-12);
    o.beta1 = 0.5, o.beta2 = 0.75, o.weight_decay = 0.25;
    const Step step = adamw_settings(o, 1);
    expect(step.beta1 == 0.5f && step.beta2 == 0.75f && step.weight_decay == 0.25f && step.correction1 == 0.75f &&
               step.correction2 == 0.4375f,
           "AdamW gets the options' settings and corrects the bias of its moments by 1 - beta^t");

    const TrainData data = {};
    const Start start = {};
    TrainingRun run(o, data, start);
    o.tokens = 300;
    run.tokens_per_step = 32;   // 300 / 32 = 9.4 steps
    bool right = expected_steps(run) == 10;
    for (run.step = 1; run.step <= 9; run.step++) {
        run.tokens = run.step * 32;
        right = right && expected_steps(run) == 10;
    }
    expect(right, "--tokens 300 expects 10 steps of 32 tokens from the first step to the last");
}

// Probabilities 0.5, 0.25, 0.125, 0.125. The random numbers are evenly spaced in [0, 1), so a count may differ
// by one at each of the two ends of its interval.
TEST("sampling: a token") {
    const Floats logits = {logf(0.125f), logf(0.5f), logf(0.25f), logf(0.125f), -INFINITY};
    const int draws = 1000;
    struct Case { double temperature; int top_k; double top_p; Values fractions; };
    const Case CASES[] = {
        {1, 0, 1, {0.125, 0.5, 0.25, 0.125}},         {1, 0, 0.9, {0.125, 0.5, 0.25, 0.125}},
        {1, 0, 0.87, {1 / 7.0, 4 / 7.0, 2 / 7.0, 0}}, {1, 0, 0.6, {0, 2 / 3.0, 1 / 3.0, 0}},
        {1, 0, 0.49, {0, 1, 0, 0}},                   {1, 2, 0.7, {0, 2 / 3.0, 1 / 3.0, 0}},
        {1, 2, 0.6, {0, 1, 0, 0}},                    {1, 2, 1, {0, 2 / 3.0, 1 / 3.0, 0}},
        {0, 0, 1, {0, 1, 0, 0}},                      {1, 1, 1, {0, 1, 0, 0}},
        {1, 0, 0, {0, 1, 0, 0}},                      {0.5, 0, 1, {1 / 22.0, 16 / 22.0, 4 / 22.0, 1 / 22.0}}};
    Near near("frequencies of tokens are the probabilities by temperature, top-k and top-p");
    for (const Case& c : CASES) {
        Values counts(logits.size(), 0);
        for (int i = 0; i < draws; i++)
            counts[pick_token(logits, c.temperature, c.top_k, c.top_p, (i + 0.5) / draws)]++;
        for (size_t v = 0; v < logits.size(); v++)
            near.see(format("temperature %g, top-k %d, top-p %g", c.temperature, c.top_k, c.top_p),
                     fabs(counts[v] - draws * (v < 4 ? c.fractions[v] : 0)), 2);
    }
    const Floats equal(4, 0);   // four weights of exactly 1
    bool exact = pick_token(equal, 0, 0, 1, 0.9) == 0 && pick_token(equal, 1, 1, 1, 0.9) == 0;
    for (int quarter = 0; quarter < 4; quarter++)
        exact = exact && pick_token(equal, 1, 0, 1, quarter / 4.0) == quarter &&
                pick_token(equal, 1, 0, 0.5, quarter / 4.0) == quarter / 2;
    expect(exact, "no token is added once the sum is exactly top-p; of equal tokens the first is kept");
}

// Compares next_logits() of a single token, which uses the KV cache, with next_logits() of the whole sequence. The
// tolerance allows for the roundings of each layer to floatX.
void test_next_logits(const Setup& s) {
    TestModel m(s, "@/ours");
    const std::vector<int> tokens = random_batch(s);
    Near near("a token computed with the KV cache has the logits of the whole sequence");
    for (size_t first = 1; first < 4; first++) {   // length of the prompt
        std::vector<int> some(tokens.begin(), tokens.begin() + first);
        next_logits(m, some, 0, m.setup.T);
        std::vector<Floats> found;
        while (some.size() < size_t(s.T)) {
            some.push_back(tokens[some.size()]);
            found.push_back(next_logits(m, some, some.size() - 1, m.setup.T));
        }
        for (size_t i = 0; i < found.size(); i++) {   // afterwards, because this overwrites the KV cache
            some.assign(tokens.begin(), tokens.begin() + first + 1 + i);
            near.see(format("token %zu", some.size()), relative_l2(found[i], next_logits(m, some, 0, m.setup.T)),
                     FLOATX == DType::FP32 ? 1e-5 : 2e-2);
        }
    }
}

// Draws a long sample and compares each token with a draw from the logits of all tokens in the window. Rounding may
// change some draws.
void expect_sample(const std::string& text, const Setup& setup) {
    TestModel m(setup, "@/ours");
    Options o;
    o.sample_tokens = 3 * setup.T;
    std::vector<int> tokens = {7, 3}, drawn;
    const uint64_t seed = 1;
    sample(m, tokens, o, seed, [&](int token) { drawn.push_back(token); return true; });
    size_t differing = 0;
    for (size_t i = 0; i < drawn.size(); i++) {
        if (tokens.size() > static_cast<size_t>(setup.T)) tokens.erase(tokens.begin(), tokens.end() - setup.T / 2);
        const double random = (splitmix64(splitmix64(seed) + i) >> 11) * 0x1p-53;
        const int expected = pick_token(next_logits(m, tokens, 0, setup.T), o.temperature, o.top_k, o.top_p, random);
        differing += drawn[i] != expected;
        tokens.push_back(drawn[i]);
    }
    expect(drawn.size() == static_cast<size_t>(o.sample_tokens) &&
               differing <= (FLOATX == DType::FP32 ? 1 : drawn.size() / 4),
           text, format("%zu tokens, %zu of them differ", drawn.size(), differing));
}

TEST("sampling: one token at a time") {
    need_our_folder();
    const Config config = read_config(scratch("@/ours/config.json"));
    Setup s = small_setup(config, 1, config.context, Purpose::SAMPLING);
    s.head_rows = 1;
    test_next_logits(s);
    expect_sample("a sample longer than the context continues from the context's second half", s);
    s.attention = Attention::NAIVE;
    expect_sample("a sample with --attention naive draws from the same logits", s);
    s.attention = Attention::FLASH;
    s.purpose = Purpose::TRAINING;
    s.B = 2;
    for (const auto& [name, recompute] : RECOMPUTE_NAMES) {
        s.recompute = recompute;
        expect_sample(format("a sample during training with --recompute %s draws from the same logits", name), s);
    }
}

// ==== text ===================================================================

// Returns what a Printer prints for a prompt and the parts of a sample, with a bar after each.
std::string printed(const std::string& stop, const std::string& prompt, const std::vector<std::string>& parts) {
    FILE* to = fopen(scratch("@/printed").c_str(), "wb");
    Printer printer(to);
    printer.add(prompt);
    printer.stop_at(stop);
    fputc('|', to);
    bool more = true;
    for (size_t i = 0; more && i < parts.size(); i++) {
        more = printer.add(parts[i]);
        fputc('|', to);
    }
    printer.end();
    fclose(to);
    return read_bytes("@/printed");
}

TEST("samples as text") {
    expect(printed("", "a\xc3", {"\xa9", "b", "\xf0\x9f", "\x98", "\x80", "\xe2", "(", "\xff", "\xe2\x82"}) ==
               "a|\xc3\xa9|b|||\xf0\x9f\x98\x80||\xe2(|\xff||\xe2\x82",
           "a UTF-8 character is printed when it is complete, invalid bytes once no character can follow from them");
    expect(printed("END", "END.", {"a", "E", "N", "b", "xEN", "D", "never"}) == "END.|a|||ENb|x||" &&
               printed("END", "", {"aENDb", "c"}) == "||a" && printed("\xc3\xa9", "", {"e\xc3", "\xa9"}) == "|e||",
           "--stop ends a sample before its text, which may span tokens and may occur in the prompt");
    const std::string text = "To be,\n\tor caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8c\x8d";
    expect(readable(text) == text &&
               readable(std::string("\x1b[2J\x07|\0|\xff\xc3(\xc2\x9b|\xe2\x82", 16)) == ".[2J.|.|..(.|..",
           "readable() replaces control characters and invalid UTF-8, and keeps all other characters");
    std::string command = "printf '%s|'", expected;
    for (const std::string word : {"", "it's", "two words", "$HOME `x` \"y\" \\ *", "~", "caf\xc3\xa9", "a\nb"}) {
        command += " " + shell_word(word);
        expected += word + "|";
    }
    const bool ran = system((command + " >" + scratch("@/words_read")).c_str()) == 0;
    expect(ran && read_bytes("@/words_read") == expected && shell_word("runs/a-b_1.c") == "runs/a-b_1.c",
           "shell_word() quotes words that a shell then reads unchanged", read_bytes("@/words_read"));
}

// Writes to one end of a pseudo-terminal and reads from the other. O_NOCTTY: it must not become this process's
// controlling terminal, because closing that would end the process with SIGHUP.
TEST("samples as text: on a terminal") {
    const int outside = posix_openpt(O_RDWR | O_NOCTTY);
    const bool opened = outside >= 0 && grantpt(outside) == 0 && unlockpt(outside) == 0;
    FILE* inside = opened ? fdopen(open(ptsname(outside), O_RDWR | O_NOCTTY), "r+") : nullptr;
    if (!inside) return expect(true, "skipped: no pseudo-terminal", strerror(errno));
    Printer printer(inside);
    for (const char* part : {"\tcaf\xc3\xa9 \x1b[2J", "\x07\x7f", "\xc2\x9b|", "\x9b", "\n", "\xe2\x82"})
        printer.add(part);
    printer.end();
    fflush(inside);
    const std::string expected = replaced("\tcaf\xc3\xa9 R[2JRRR|R\r\nRR", "R", REPLACEMENT_CHARACTER);
    std::string text;
    pollfd ready = {outside, POLLIN, 0};
    char part[200];
    for (ssize_t n = 0; n >= 0 && text.size() < expected.size() && poll(&ready, 1, 1000) > 0;) {
        n = read(outside, part, sizeof(part));
        text.append(part, std::max<ssize_t>(n, 0));
    }
    expect(text == expected, "a terminal gets valid UTF-8, no control characters but line breaks and tabs", text);
    fclose(inside);
    close(outside);
}

#include "dev/tests/test_derivatives.cuh"
#include "dev/tests/test_plan.cuh"
#include "dev/tests/test_runs.cuh"
#ifndef TESTS_OF_FORK
#include "dev/tests/test_fp8.cuh"
#include "dev/tests/test_bad_input.cuh"
#endif

// ==== main ===================================================================

// Writes a folder and logits, which dev/reference/check_folder.py checks with safetensors and transformers.
void export_folder(const std::string& dir) {
    const Reference r("odd");
    Model m;
    write_our_folder(dir, m);
    const Batch batch = upload_batch(m, r.tokens(0, 0));
    const std::vector<int> inputs = from_device(batch.inputs, m.setup.N());
    const Floats logits = logits_of(m, batch.inputs);
    const size_t B = r.B, T = r.T, V = r.config.vocab;
    write_bytes(dir + "/logits.safetensors", safetensors({{"input_ids", "I32", {B, T}, bytes_of(inputs)},
                                                          {"logits", "F32", {B, T, V}, bytes_of(logits)}}));
    printf("%s: config.json, model.safetensors, logits.safetensors\n", dir.c_str());
}

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "--as-train-gpt") return guarded_main(argc - 1, argv + 1);
    open_device(TensorCores::AUTO);
    write_text();
    if (what != "--export" || argc != 3) return run_tests(argc, argv, "--export DIR | --as-train-gpt ...");
    export_folder(argv[2]);
    return 0;
}

// Tests of gpt.cu, as a list of claims: "ok" or "FAILED", what is claimed, and the numbers it rests on.
//
// The same file runs on a GPU and on a CPU. Every kernel is called through its launcher and held
// against a plain loop in double, from which the allowed error follows as well: see "numbers".
//
// Map
//    claims · arrays · numbers    the tools: what holds, memory on the device, and what FP32 may lose
//    trials                       a kernel's runs, in several orders of threads, and its errors
//    one section per kernel, in the order of train_gpt.cu; each has the loop, then its trial
//    all kernels                  test_kernels()
//    files and models for the tests
//    against PyTorch · memory · Hugging Face · data · graphs · schedule and sampling
//    plan · naive against flash
//    running train_gpt            command lines as a whole: the same bits, matmul tuning, what runs
//                                 write, runs that end badly, trace, bad input

#define TESTING
#include "train_gpt.cu"

#include <poll.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <fstream>
#include <iterator>
#include <set>

// ==== claims =================================================================

static int passed = 0, failed = 0;

// A claim and whether it holds. A line for each; `detail` (numbers) is appended.
void claim(bool holds, const std::string& text, const std::string& detail = "") {
    (holds ? passed : failed)++;
    const std::string numbers = detail.empty() ? "" : " (" + detail + ")";
    printf("%s  %s%s\n", holds ? "ok    " : "FAILED", text.c_str(), numbers.c_str());
    fflush(stdout);
}

// ==== arrays =================================================================
// On the host everything is double, which holds each value of float, BF16, FP16 and int exactly. On the
// device every array is an allocation of its own and of exactly its size, so that AddressSanitizer
// sees a kernel that goes too far; and outputs are NaN before a kernel writes them.

typedef std::vector<double> Values;
typedef std::vector<Values> Outputs;   // of one launch

// What x becomes when it is stored as T.
template <typename T> double stored_as(double x) { return static_cast<float>(static_cast<T>(static_cast<float>(x))); }

// Values from `low` to `high` that T can hold: others at each call, but the same in every run.
static uint64_t random_calls = 0;

template <typename T> Values random_values(size_t n, double low = -1, double high = 1) {
    const uint64_t seed = splitmix64(++random_calls);
    Values values(n);
    for (size_t i = 0; i < n; i++) {
        const double uniform = std::ldexp(splitmix64(seed ^ splitmix64(i)) >> 11, -53);   // [0, 1)
        values[i] = stored_as<T>(low + (high - low) * uniform);
    }
    return values;
}

template <typename T> class DeviceArray {
public:
    explicit DeviceArray(size_t n) : size_(n) {
        check(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)), "cudaMalloc");
        check(cudaMemsetAsync(data_, 0xff, n * sizeof(T), device.stream), "cudaMemset");   // NaN, or -1
    }
    explicit DeviceArray(const Values& values) : DeviceArray(values.size()) {
        std::vector<T> typed(size_);
        for (size_t i = 0; i < size_; i++) typed[i] = static_cast<T>(values[i]);
        copy(data_, typed.data(), cudaMemcpyHostToDevice);
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    operator T*() const { return data_; }

    Values download() const {
        std::vector<T> typed(size_);
        copy(typed.data(), data_, cudaMemcpyDeviceToHost);
        Values values(size_);
        for (size_t i = 0; i < size_; i++) {
            if constexpr (std::is_class_v<T>) values[i] = static_cast<float>(typed[i]);
            else values[i] = typed[i];
        }
        return values;
    }

private:
    // In the kernels' order, and done when it returns.
    void copy(T* to, const T* from, cudaMemcpyKind kind) const {
        check(cudaMemcpyAsync(to, from, size_ * sizeof(T), kind, device.stream), "cudaMemcpy");
        check(cudaStreamSynchronize(device.stream), "a kernel or a copy");
    }

    T* data_ = nullptr;
    size_t size_;
};

Grad grad(const DeviceArray<float>& array) { return {static_cast<float*>(array), DType::FP32}; }
constexpr DType GRAD16 = FLOATX == DType::FP16 ? DType::FP16 : DType::BF16;
Grad grad(const DeviceArray<grad16>& array) { return {static_cast<grad16*>(array), GRAD16}; }

// Calls f with a value of each type that gradients can have.
template <typename F> void for_each_gradient_type(F f) {
    f(float());
    f(grad16());
}

// ==== numbers ================================================================
// The loops compute in double with numbers that carry along how far off the same arithmetic could
// be in FP32: half an ulp, U of the result, for each operation, and what the operands' errors make
// of it. So no tolerance below is a guess: a kernel may be as wrong as its own formula in FP32,
// times ORDER, since it adds in another order than the loop and rescales as it goes; and its
// result is then rounded once to the type that it is stored in.
// source    Higham 2002, "Accuracy and Stability of Numerical Algorithms", 3.3: running errors

constexpr double U = 1.0 / (1 << 24);
constexpr double ORDER = 2;

struct Number {
    double value = 0, error = 0;

    Number() = default;
    Number(double exact) : value(exact) {}
    Number(double v, double e) : value(v), error(e) {}
    // A term larger than the sum counts as itself: in another order it meets others before those
    // that cancel it.
    Number& operator+=(const Number& b) {
        const double larger_term = std::max(std::abs(value), std::abs(b.value));
        value += b.value;
        error += b.error + U * std::max(larger_term, std::abs(value));
        return *this;
    }
};

typedef std::vector<Number> Numbers;

Number operator+(Number a, const Number& b) { return a += b; }
Number operator-(const Number& a, const Number& b) { return a + Number(-b.value, b.error); }
Number operator*(const Number& a, const Number& b) {
    const double value = a.value * b.value;
    return {value, std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error + U * std::abs(value)};
}
// Two roundings, as a compiler may multiply by the reciprocal.
Number operator/(const Number& a, const Number& b) {
    const double value = a.value / b.value;
    return {value, (a.error + std::abs(value) * b.error) / std::abs(b.value) + 2 * U * std::abs(value)};
}
Number sqrt(const Number& a) {
    const double low = std::max(0.0, a.value - a.error);
    return {std::sqrt(a.value), std::sqrt(a.value + a.error) - std::sqrt(low) + U * std::sqrt(a.value)};
}
// The CUDA Programming Guide grants __expf 2 + |1.173 x| ulps, and what is below the normal range
// may become 0; logf 1 ulp; tanhf 2.
Number exp(const Number& a) {
    const double value = std::exp(a.value);
    return {value, value * (a.error + 2 * U * (2 + 1.173 * std::abs(a.value))) + std::numeric_limits<float>::min()};
}
Number log(const Number& a) { return {std::log(a.value), a.error / a.value + 2 * U * std::abs(std::log(a.value))}; }
Number tanh(const Number& a) {
    const double value = std::tanh(a.value);
    return {value, (1 - value * value) * a.error + 4 * U * std::abs(value)};
}

// Half the distance of neighbours in T near x: what rounding to T may change.
template <typename T> double half_ulp(double x) {
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    const int digits = std::is_same_v<T, double> ? 53 : std::is_same_v<T, float> ? 24 : IS_HALF ? 11 : 8;
    if (x == 0) return 0;
    return std::ldexp(1.0, IS_HALF ? std::max(std::ilogb(x) - digits, -25) : std::ilogb(x) - digits);   // FP16's last: 2^-24
}

// x, stored as T on the way: exact but for another rounding.
template <typename T> Number passed_through(const Number& x) {
    return {x.value, x.error + half_ulp<T>(std::abs(x.value) + x.error)};
}

// A long sum as a GPU forms it: `chains` running sums take terms in turn, and are then added in
// halves. What may be lost grows with the length of a chain, not with n.
Number sum_of_halves(const Number* terms, size_t n) {
    return n == 1 ? terms[0] : sum_of_halves(terms, n / 2) + sum_of_halves(terms + n / 2, n - n / 2);
}

Number sum(const Numbers& terms, size_t chains) {
    Numbers partial(chains);
    for (size_t i = 0; i < terms.size(); i++) partial[i % chains] += terms[i];
    return sum_of_halves(partial.data(), chains);
}

Numbers numbers(const Values& values) { return Numbers(values.begin(), values.end()); }

Values values_of(const Numbers& numbers) {
    Values values;
    for (const Number& x : numbers) values.push_back(x.value);
    return values;
}

// As they are after a kernel stored them as T.
template <typename T> Values values_stored_as(const Numbers& numbers) {
    Values values = values_of(numbers);
    for (double& x : values) x = stored_as<T>(x);
    return values;
}

// ==== trials =================================================================

#ifdef CUDA_ON_CPU
// 0 is the natural order of blocks and threads. Others draw it, which changes what a kernel
// computes where a barrier is missing, and fill memory that was never written with NaN.
void set_thread_order(uint64_t seed) { cuda_cpu::set_seed(seed); }
constexpr int THREAD_ORDERS = 4;
#else
void set_thread_order(uint64_t) {}   // a GPU draws one each time
constexpr int THREAD_ORDERS = 2;
#endif

// What is found out about one kernel over all its sizes, and the two claims that come of it.
class Trial {
public:
    explicit Trial(const char* kernel) : kernel_(kernel) {}

    // What the following runs and comparisons are about.
    __attribute__((format(printf, 2, 3))) void at(const char* text, ...) {
        char buffer[200];
        va_list args;
        va_start(args, text);
        vsnprintf(buffer, sizeof(buffer), text, args);
        va_end(args);
        size_ = buffer;
    }

    // Calls once(), which prepares inputs, launches and returns all outputs, in each order of
    // threads; returns the first's outputs.
    template <typename Once> Outputs run(Once once) {
        Outputs first;
        for (int order = 0; order < THREAD_ORDERS; order++) {
            set_thread_order(order);
            Outputs outputs = once();
            if (order == 0) first = std::move(outputs);
            else if (!same_bits(first, outputs)) differing_ = size_;
        }
        set_thread_order(0);
        return first;
    }

    // Results stored as T against the loop's.
    template <typename T> void compare(const char* what, const Values& got, const Numbers& expected) {
        if (got.size() != expected.size()) return note(INFINITY, what, 0, got.size(), expected.size());
        for (size_t i = 0; i < got.size(); i++) {
            const Number& e = expected[i];
            const double allowed = ORDER * e.error + half_ulp<T>(std::abs(e.value) + e.error);
            const double error = std::abs(got[i] - e.value);
            note(error == 0 ? 0 : std::isnan(error) ? INFINITY : error / allowed, what, i, got[i], e.value);
        }
    }
    // Results that must be exactly these.
    void equal(const char* what, const Values& got, const Values& expected) {
        if (got.size() != expected.size()) return note(INFINITY, what, 0, got.size(), expected.size());
        for (size_t i = 0; i < got.size(); i++)
            note(got[i] == expected[i] ? 0 : INFINITY, what, i, got[i], expected[i]);
    }

    void report(const char* outputs) const {
        const std::string worst = format("at worst %.2f of what rounding allows, %s", worst_, where_.c_str());
        claim(compared_ > 0 && worst_ <= 1, format("%s: %s as the plain loop has it", kernel_, outputs),
              format("%zu values, %s", compared_, where_.empty() ? "exact" : worst.c_str()));
        claim(differing_.empty(), format("%s: the same bits in every order of threads", kernel_), differing_);
    }

private:
    static bool same_bits(const Outputs& a, const Outputs& b) {
        bool same = a.size() == b.size();
        for (size_t i = 0; same && i < a.size(); i++)
            same = a[i].size() == b[i].size() && memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double)) == 0;
        return same;
    }
    void note(double ratio, const char* what, size_t i, double got, double expected) {
        compared_++;
        if (ratio <= worst_) return;
        worst_ = ratio;
        where_ = format("%s[%zu] with %s: %.9g for %.9g", what, i, size_.c_str(), got, expected);
    }

    const char* kernel_;
    std::string size_, where_, differing_;
    double worst_ = 0;
    size_t compared_ = 0;
};

// The slope of f at x in a direction, by central differences: right to about DIFFERENCE^2.
constexpr double DIFFERENCE = 1e-4;
template <typename F> double slope(F f, Values x, const Values& direction) {
    for (size_t i = 0; i < x.size(); i++) x[i] += DIFFERENCE * direction[i];
    const double ahead = f(x);
    for (size_t i = 0; i < x.size(); i++) x[i] -= 2 * DIFFERENCE * direction[i];
    return (ahead - f(x)) / (2 * DIFFERENCE);
}

double dot(const Values& a, const Values& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

// Claims that a backward loop is the derivative of its forward loop: what a kernel is held against
// must itself be right. Third derivatives here are of the order of 10, relative to the slope.
void claim_derivative(const char* layer, double by_differences, double by_loop) {
    const double allowed = 100 * DIFFERENCE * DIFFERENCE * std::max(1.0, std::abs(by_loop));
    claim(std::abs(by_differences - by_loop) <= allowed,
          format("%s: the backward loop is the forward loop's derivative", layer),
          format("%.9f, by differences %.9f", by_loop, by_differences));
}

constexpr size_t ROWS[] = {1, 3, 37, 130};
constexpr int CHANNELS[] = {16, 48, 80, 272, 768};

// ==== column sums ============================================================

void test_add_partials() {
    Trial trial("add_partials");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (int C : CHANNELS)
            for (size_t count : {1, 2, 9, 170}) {   // fewer and more than a block has rows of threads
                trial.at("%zu partials of %d columns", count, C);
                const Values old = random_values<G>(3 * C), partials = random_values<float>(3 * count * C);
                const auto out = trial.run([&] {
                    const DeviceArray<G> g(old);
                    const DeviceArray<float> p(partials);
                    G* to = g;
                    add_partials({{to + C, grad(g).dtype}}, p + count * C, count, C);
                    add_partials({{to + 2 * C, grad(g).dtype}, grad(g)}, p, count, C);
                    return Outputs{g.download()};
                });
                Numbers expected = numbers(old);
                for (size_t i = 0; i < count * C; i++) {
                    expected[C + i % C] += partials[count * C + i];
                    expected[2 * C + i % C] += partials[i];
                    expected[i % C] += partials[count * C + i];
                }
                trial.compare<G>("grads", out[0], expected);
            }
    });
    trial.report("one or several grads += sums");
}

// ==== embedding ==============================================================

constexpr int TEST_VOCAB = 11;

// Tokens of which some occur often and some never.
Values random_tokens(size_t n) {
    Values tokens = random_values<float>(n, 0, TEST_VOCAB - 2);
    for (double& token : tokens) token = std::floor(token);
    return tokens;
}

void test_embedding_forward() {
    Trial trial("embedding_forward");
    for (int C : CHANNELS)
        for (int T : {1, 5, 33})
            for (int B : {1, 3}) {
                trial.at("B %d, T %d, C %d", B, T, C);
                const Values wte = random_values<floatX>(TEST_VOCAB * C), wpe = random_values<floatX>(T * C);
                const Values tokens = random_tokens(B * T);
                const auto out = trial.run([&] {
                    const DeviceArray<floatX> out(B * T * C), d_wte(wte), d_wpe(wpe);
                    const DeviceArray<int> inp(tokens);
                    embedding_forward(out, inp, d_wte, d_wpe, B, T, C);
                    return Outputs{out.download()};
                });
                Numbers expected(B * T * C);
                for (int i = 0; i < B * T * C; i++)
                    expected[i] = Number(wte[tokens[i / C] * C + i % C]) + wpe[i / C % T * C + i % C];
                trial.compare<floatX>("out", out[0], expected);
            }
    trial.report("out");
}

// The sorted positions of a batch, as the loader sends them.
struct Positions {
    std::vector<int> order, first;
    size_t runs;

    explicit Positions(const Values& tokens) : order(tokens.size()), first(tokens.size() + 1) {
        const std::vector<int> inputs(tokens.begin(), tokens.end());
        runs = sort_positions(order.data(), first.data(), inputs.data(), inputs.size(), TEST_VOCAB);
    }
};

void test_sort_positions() {
    const Values tokens = random_tokens(100);
    const Positions p(tokens);
    std::vector<int> expected(100), starts;
    for (int n = 0; n < 100; n++) expected[n] = n;
    auto before = [&](int a, int b) { return std::pair(tokens[a], a) < std::pair(tokens[b], b); };
    std::sort(expected.begin(), expected.end(), before);
    for (int n = 0; n < 100; n++)
        if (n == 0 || tokens[expected[n]] != tokens[expected[n - 1]]) starts.push_back(n);
    claim(p.order == expected, "sort_positions: positions by token, those of one token in their order");
    const size_t runs = starts.size();
    starts.resize(101, 100);
    claim(p.runs == runs && p.first == starts, "sort_positions: where each run begins, and empty runs to the end");
}

template <typename G>
void try_embedding_backward(Trial& trial, int B, int T, int C, const Values& tokens, bool padded) {
    trial.at("B %d, T %d, C %d", B, T, C);
    const Values dout = random_values<floatX>(B * T * C);
    const Values dwte = random_values<G>(TEST_VOCAB * C), dwpe = random_values<G>(T * C);
    const Positions p(tokens);
    const Values sorted(p.order.begin(), p.order.end()), starts(p.first.begin(), p.first.end());
    const size_t runs = padded ? B * T : p.runs;   // empty runs at the end are as good as none
    const auto out = trial.run([&] {
        const DeviceArray<G> d_dwte(dwte), d_dwpe(dwpe);
        const DeviceArray<floatX> d_dout(dout);
        const DeviceArray<int> inp(tokens), order(sorted), first(starts);
        embedding_backward(grad(d_dwte), grad(d_dwpe), d_dout, inp, order, first, runs, B, T, C);
        return Outputs{d_dwte.download(), d_dwpe.download()};
    });
    Numbers wte = numbers(dwte), wpe = numbers(dwpe);
    for (int i = 0; i < B * T * C; i++) {
        wte[tokens[i / C] * C + i % C] += dout[i];
        wpe[i / C % T * C + i % C] += dout[i];
    }
    trial.compare<G>("dwte", out[0], wte);
    trial.compare<G>("dwpe", out[1], wpe);
}

void test_embedding_backward() {
    Trial trial("embedding_backward");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (int C : CHANNELS)
            for (int T : {1, 5, 33})
                for (int B : {1, 3}) try_embedding_backward<G>(trial, B, T, C, random_tokens(B * T), B == 1);
        try_embedding_backward<G>(trial, 2, 8, 48, Values(16, TEST_VOCAB - 1), false);   // one run
        Values tokens = random_tokens(3 * 70);   // and runs that a block's warps share, one of exactly as many
        std::fill(tokens.begin(), tokens.begin() + LONG_RUN, TEST_VOCAB - 1);
        for (size_t n = LONG_RUN; n < tokens.size(); n += 2) tokens[n] = n % 3;
        for (int C : {16, 272}) try_embedding_backward<G>(trial, 3, 70, C, tokens, true);
    });
    trial.report("dwte and dwpe += sums");
}

// ==== layernorm ==============================================================

struct LayerNormResult { Numbers out, mean, rstd; };

// x (N,C), each row by itself.
LayerNormResult layernorm_loop(const Values& x, const Values& w, const Values& b) {
    const size_t C = w.size(), N = x.size() / C;
    LayerNormResult r = {Numbers(N * C), Numbers(N), Numbers(N)};
    for (size_t n = 0; n < N; n++) {
        Number sum, squares;
        for (size_t i = 0; i < C; i++) sum += x[n * C + i];
        const Number mean = sum / double(C);
        for (size_t i = 0; i < C; i++) squares += (Number(x[n * C + i]) - mean) * (Number(x[n * C + i]) - mean);
        const Number rstd = Number(1) / sqrt(squares / double(C) + 1e-5);
        for (size_t i = 0; i < C; i++) r.out[n * C + i] = (Number(x[n * C + i]) - mean) * rstd * w[i] + b[i];
        r.mean[n] = mean;
        r.rstd[n] = rstd;
    }
    return r;
}

struct LayerNormGradients { Numbers dinp, dw, db; };

// All three are added to.
void layernorm_backward_loop(LayerNormGradients& g, const Values& dout, const Values& inp, const Values& w,
                             const Values& mean, const Values& rstd) {
    const size_t C = w.size(), N = mean.size();
    for (size_t n = 0; n < N; n++) {
        Number sum, sum_x;
        for (size_t c = 0; c < C; c++) {
            const Number d = dout[n * C + c], xhat = (Number(inp[n * C + c]) - mean[n]) * rstd[n];
            sum += d * w[c];
            sum_x += d * w[c] * xhat;
            g.dw[c] += d * xhat;
            g.db[c] += d;
        }
        for (size_t c = 0; c < C; c++) {
            const Number d = dout[n * C + c], xhat = (Number(inp[n * C + c]) - mean[n]) * rstd[n];
            g.dinp[n * C + c] += Number(rstd[n]) * (d * w[c] - sum / double(C) - xhat * (sum_x / double(C)));
        }
    }
}

void test_layernorm_derivative() {
    const size_t N = 2, C = 16;
    const Values x = random_values<float>(N * C, 0, 2), w = random_values<float>(C), b = random_values<float>(C);
    // Directions to go in.
    const Values dx = random_values<float>(N * C), dw = random_values<float>(C), db = random_values<float>(C);
    const Values dout = random_values<float>(N * C);
    const auto loss = [&](const Values& x, const Values& w, const Values& b) {
        return dot(values_of(layernorm_loop(x, w, b).out), dout);
    };
    const double differences = slope([&](const Values& v) { return loss(v, w, b); }, x, dx)
                             + slope([&](const Values& v) { return loss(x, v, b); }, w, dw)
                             + slope([&](const Values& v) { return loss(x, w, v); }, b, db);
    const LayerNormResult r = layernorm_loop(x, w, b);
    LayerNormGradients g = {Numbers(N * C), Numbers(C), Numbers(C)};
    layernorm_backward_loop(g, dout, x, w, values_of(r.mean), values_of(r.rstd));
    claim_derivative("layernorm", differences,
                     dot(values_of(g.dinp), dx) + dot(values_of(g.dw), dw) + dot(values_of(g.db), db));
}

// A row of which all elements are equal has no variance: only epsilon keeps it finite.
Values layernorm_inputs(size_t N, int C) {
    Values x = random_values<floatX>(N * C, -1, 3);
    if (N > 1) std::fill(x.begin(), x.begin() + C, x[0]);
    return x;
}

void try_layernorm_forward(Trial& trial, size_t N, int C, bool adds) {
    trial.at("N %zu, C %d%s", N, C, adds ? ", add" : "");
    const Values inp = layernorm_inputs(N, C), add = random_values<floatX>(N * C);
    const Values w = random_values<floatX>(C), b = random_values<floatX>(C);
    const auto out = trial.run([&] {
        const DeviceArray<floatX> res(N * C), out(N * C), d_inp(inp), d_add(add), d_w(w), d_b(b);
        const DeviceArray<float> mean(N), rstd(N);
        floatX* const none = nullptr;
        layernorm_forward(adds ? res : none, out, mean, rstd, d_inp, adds ? d_add : none, d_w, d_b, N, C);
        return Outputs{res.download(), out.download(), mean.download(), rstd.download()};
    });
    Values x = inp;
    if (adds)
        for (size_t i = 0; i < x.size(); i++) x[i] = stored_as<floatX>(x[i] + add[i]);
    if (adds) trial.equal("res", out[0], x);
    const LayerNormResult expected = layernorm_loop(x, w, b);
    trial.compare<floatX>("out", out[1], expected.out);
    trial.compare<float>("mean", out[2], expected.mean);
    trial.compare<float>("rstd", out[3], expected.rstd);
}

// What comes in as dinp, dw, db and dbias is added to; dbias is left out where there is no such bias.
template <typename G> void try_layernorm_backward(Trial& trial, size_t N, int C, bool biased) {
    trial.at("N %zu, C %d%s", N, C, biased ? ", dbias" : "");
    const Values inp = layernorm_inputs(N, C), w = random_values<floatX>(C), dout = random_values<floatX>(N * C);
    const LayerNormResult forward = layernorm_loop(inp, w, w);
    const Values mean = values_stored_as<float>(forward.mean), rstd = values_stored_as<float>(forward.rstd);
    const Values dinp = random_values<floatX>(N * C), dw = random_values<G>(C), db = random_values<G>(C);
    const Values dbias = random_values<G>(C);
    const auto out = trial.run([&] {
        const DeviceArray<floatX> d_dinp(dinp), d_dout(dout), d_inp(inp), d_w(w);
        const DeviceArray<G> d_dw(dw), d_db(db), d_dbias(dbias);
        const DeviceArray<float> d_mean(mean), d_rstd(rstd), partials(3 * partial_blocks(N) * C);
        layernorm_backward(d_dinp, grad(d_dw), grad(d_db), biased ? grad(d_dbias) : Grad{}, partials, d_dout, d_inp,
                           d_w, d_mean, d_rstd, N, C);
        return Outputs{d_dinp.download(), d_dw.download(), d_db.download(), d_dbias.download()};
    });
    LayerNormGradients expected = {numbers(dinp), numbers(dw), numbers(db)};
    layernorm_backward_loop(expected, dout, inp, w, mean, rstd);
    trial.compare<floatX>("dinp", out[0], expected.dinp);
    trial.compare<G>("dw", out[1], expected.dw);
    trial.compare<G>("db", out[2], expected.db);
    if (!biased) return trial.equal("dbias", out[3], dbias);
    Numbers sums = numbers(dbias);
    for (size_t i = 0; i < N * C; i++) sums[i % C] += out[0][i];   // dinp as it was stored
    trial.compare<G>("dbias", out[3], sums);
}

void test_layernorm() {
    test_layernorm_derivative();
    Trial forward("layernorm_forward"), backward("layernorm_backward");
    for (size_t N : ROWS)
        for (int C : CHANNELS) {
            try_layernorm_forward(forward, N, C, false);
            try_layernorm_forward(forward, N, C, true);
            for (bool biased : {false, true})
                for_each_gradient_type([&](auto type) { try_layernorm_backward<decltype(type)>(backward, N, C, biased); });
        }
    // Several packs to a thread, and as many as shared memory has room for, where a card has so much; in forward,
    // shared memory for fewer warps to a block, and for one only.
    const std::pair<size_t, int> wide[] = {{70, 4112}, {35, 16384}};
    for (const auto& [N, C] : wide) {
        try_layernorm_forward(forward, N, C, true);
        if (layernorm_shared(C) <= device.properties.sharedMemPerBlockOptin)
            try_layernorm_backward<float>(backward, N, C, true);
    }
    forward.report("res, out, mean and rstd, with and without add,");
    backward.report("dinp, dw, db and dbias, each added to,");
}

// ==== bias ===================================================================

void test_bias_forward() {
    Trial trial("bias_forward");
    for (size_t N : ROWS)
        for (int C : CHANNELS) {
            trial.at("N %zu, OC %d", N, C);
            const Values x = random_values<floatX>(N * C), b = random_values<floatX>(C);
            const auto out = trial.run([&] {
                const DeviceArray<floatX> out(x), d_b(b);
                bias_forward(out, d_b, N, C);
                return Outputs{out.download()};
            });
            Numbers expected = numbers(x);
            for (size_t i = 0; i < N * C; i++) expected[i] += b[i % C];
            trial.compare<floatX>("out", out[0], expected);
        }
    trial.report("out += b");
}

void test_bias_backward() {
    Trial trial("bias_backward");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t N : ROWS)
            for (int C : CHANNELS) {
                trial.at("N %zu, OC %d", N, C);
                const Values dout = random_values<floatX>(N * C), db = random_values<G>(C);
                const auto out = trial.run([&] {
                    const DeviceArray<G> d_db(db);
                    const DeviceArray<floatX> d_dout(dout);
                    const DeviceArray<float> partials(partial_blocks(N) * C);
                    bias_backward(grad(d_db), partials, d_dout, N, C);
                    return Outputs{d_db.download()};
                });
                Numbers expected = numbers(db);
                for (size_t i = 0; i < N * C; i++) expected[i % C] += dout[i];
                trial.compare<G>("db", out[0], expected);
            }
    });
    trial.report("db += sums");
}

// ==== gelu ===================================================================

// tanh(u), u = sqrt(2/pi) (x + 0.044715 x^3)
Number gelu_tanh(const Number& x) { return tanh(Number(std::sqrt(2 / M_PI)) * (x + Number(0.044715) * x * x * x)); }

Number gelu_loop(const Number& x) { return Number(0.5) * x * (Number(1) + gelu_tanh(x)); }

Number gelu_derivative_loop(const Number& x) {
    const Number t = gelu_tanh(x), slope = Number(std::sqrt(2 / M_PI)) * (Number(1) + Number(3 * 0.044715) * x * x);
    return Number(0.5) * (Number(1) + t) + Number(0.5) * x * (Number(1) - t * t) * slope;
}

// From the curved middle, and some where tanh is 1 in FP32, and exp overflows.
Values gelu_inputs(size_t n) {
    Values x = random_values<floatX>(n, -4, 4);
    const double far[] = {-30, 30, -10, 10, -6, 6, 0};
    for (size_t i = 0; i < std::size(far); i++) x[i] = far[i];
    return x;
}

void test_gelu() {
    const Values points = random_values<float>(64, -4, 4), dout = random_values<float>(64);
    const Values direction = random_values<float>(64);
    const double differences = slope([&](const Values& x) {
        double sum = 0;
        for (size_t i = 0; i < x.size(); i++) sum += gelu_loop(x[i]).value * dout[i];
        return sum;
    }, points, direction);
    double by_loop = 0;
    for (size_t i = 0; i < points.size(); i++)
        by_loop += gelu_derivative_loop(points[i]).value * dout[i] * direction[i];
    claim_derivative("gelu", differences, by_loop);

    Trial forward("gelu_forward"), backward("gelu_backward");
    for (size_t n : {size_t{16}, size_t{48}, SPAN - 16, SPAN + 16, 3 * SPAN}) {
        forward.at("n %zu", n);
        backward.at("n %zu", n);
        const Values inp = gelu_inputs(n), dout = random_values<floatX>(n);
        const auto out = forward.run([&] {
            const DeviceArray<floatX> out(n), d_inp(inp);
            gelu_forward(out, d_inp, n);
            return Outputs{out.download()};
        });
        const auto gradients = backward.run([&] {
            const DeviceArray<floatX> dinp(n), in_place(dout), d_dout(dout), d_inp(inp);
            gelu_backward(dinp, d_dout, d_inp, n);
            gelu_backward(in_place, in_place, d_inp, n);
            return Outputs{dinp.download(), in_place.download()};
        });
        Numbers expected, expected_gradient;
        for (size_t i = 0; i < n; i++) {
            expected.push_back(gelu_loop(inp[i]));
            expected_gradient.push_back(gelu_derivative_loop(inp[i]) * dout[i]);
        }
        forward.compare<floatX>("out", out[0], expected);
        backward.compare<floatX>("dinp", gradients[0], expected_gradient);
        backward.equal("dinp in dout's place", gradients[1], gradients[0]);
    }
    forward.report("out");
    backward.report("dinp");
}

// ==== attention ==============================================================

struct AttentionSize {
    int B, T, NH, HS;

    int C() const { return NH * HS; }
    size_t N() const { return static_cast<size_t>(B) * T; }
    // Where rows begin: `part` 0, 1, 2 for query, key, value.
    size_t qkv(int b, int t, int part, int h) const { return ((size_t(b) * T + t) * 3 + part) * C() + h * HS; }
    size_t out(int b, int t, int h) const { return (size_t(b) * T + t) * C() + h * HS; }
    size_t lse(int b, int t, int h) const { return (size_t(b) * NH + h) * T + t; }

    // Calls visit(b, h, i) for every query.
    template <typename Visit> void for_each_query(Visit visit) const {
        for (int b = 0; b < B; b++)
            for (int h = 0; h < NH; h++)
                for (int i = 0; i < T; i++) visit(b, h, i);
    }
};

struct AttentionResult { Numbers out, lse; };

// scale * (a . b)
Number score(const double* a, const double* b, int HS) {
    Number sum;
    for (int d = 0; d < HS; d++) sum += Number(a[d]) * b[d];
    return sum * (1 / std::sqrt(double(HS)));
}

// P and dS on their way into the next product: tensor cores take floatX.
Number operand(const Number& x, int HS) { return on_tensor_cores(HS) ? passed_through<floatX>(x) : x; }

AttentionResult attention_loop(const Values& qkv, const AttentionSize& s) {
    AttentionResult r = {Numbers(s.N() * s.C()), Numbers(s.N() * s.NH)};
    s.for_each_query([&](int b, int h, int i) {
        Numbers S(i + 1), O(s.HS);
        double max = -INFINITY;
        for (int j = 0; j <= i; j++) {
            S[j] = score(&qkv[s.qkv(b, i, 0, h)], &qkv[s.qkv(b, j, 1, h)], s.HS);
            max = std::max(max, S[j].value);
        }
        Number sum;
        for (int j = 0; j <= i; j++) {
            const Number p = exp(S[j] - max), p_operand = operand(p, s.HS);
            sum += p;
            for (int d = 0; d < s.HS; d++) O[d] += p_operand * qkv[s.qkv(b, j, 2, h) + d];
        }
        for (int d = 0; d < s.HS; d++) r.out[s.out(b, i, h) + d] = O[d] / sum;
        r.lse[s.lse(b, i, h)] = log(sum) + max;
    });
    return r;
}

// The gradient of qkv, from what forward stored.
Numbers attention_backward_loop(const Values& dout, const Values& qkv, const Values& out, const Values& lse,
                                const AttentionSize& s) {
    Numbers dqkv(s.N() * 3 * s.C());
    const double scale = 1 / std::sqrt(double(s.HS));
    s.for_each_query([&](int b, int h, int i) {
        const size_t row = s.out(b, i, h), q = s.qkv(b, i, 0, h);
        Number D;
        for (int d = 0; d < s.HS; d++) D += Number(dout[row + d]) * out[row + d];
        for (int j = 0; j <= i; j++) {
            const size_t k = s.qkv(b, j, 1, h), v = s.qkv(b, j, 2, h);
            const Number p = exp(score(&qkv[q], &qkv[k], s.HS) - lse[s.lse(b, i, h)]);
            Number dp;
            for (int d = 0; d < s.HS; d++) dp += Number(dout[row + d]) * qkv[v + d];
            const Number ds = operand(p * (dp - D), s.HS) * scale, p_operand = operand(p, s.HS);
            for (int d = 0; d < s.HS; d++) {
                dqkv[q + d] += ds * qkv[k + d];
                dqkv[k + d] += ds * qkv[q + d];
                dqkv[v + d] += p_operand * dout[row + d];
            }
        }
    });
    return dqkv;
}

void test_attention_derivative() {
    const AttentionSize s = {1, 5, 2, 16};
    const Values qkv = random_values<float>(s.N() * 3 * s.C()), direction = random_values<float>(s.N() * 3 * s.C());
    const Values dout = random_values<float>(s.N() * s.C());
    const auto loss = [&](const Values& x) { return dot(values_of(attention_loop(x, s).out), dout); };
    const AttentionResult r = attention_loop(qkv, s);
    const Numbers dqkv = attention_backward_loop(dout, qkv, values_of(r.out), values_of(r.lse), s);
    claim_derivative("attention", slope(loss, qkv, direction), dot(values_of(dqkv), direction));
}

// Queries and keys so large that some probabilities are near 1 and the largest score comes late
// as well as early.
Values attention_inputs(const AttentionSize& s) { return random_values<floatX>(s.N() * 3 * s.C(), -2, 2); }

void try_attention(Trial& forward, Trial& backward, const AttentionSize& s) {
    forward.at("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS);
    backward.at("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS);
    const Values qkv = attention_inputs(s), dout = random_values<floatX>(s.N() * s.C());
    const auto got = forward.run([&] {
        const DeviceArray<floatX> out(s.N() * s.C()), d_qkv(qkv);
        const DeviceArray<float> lse(s.N() * s.NH);
        const DeviceArray<int> counter(Values{0});
        attention_forward(out, lse, counter, d_qkv, s.B, s.T, s.NH, s.HS);
        return Outputs{out.download(), lse.download(), counter.download()};
    });
    const AttentionResult expected = attention_loop(qkv, s);
    forward.compare<floatX>("out", got[0], expected.out);
    forward.compare<float>("lse", got[1], expected.lse);
    forward.equal("counter", got[2], {0});

    const Values out = values_stored_as<floatX>(expected.out), lse = values_stored_as<float>(expected.lse);
    const auto gradients = backward.run([&] {
        const DeviceArray<floatX> dqkv(qkv.size()), d_dout(dout), d_qkv(qkv), d_out(out);
        const DeviceArray<float> D(s.N() * s.NH), d_lse(lse);
        const DeviceArray<int> counter(Values{0});
        attention_backward(dqkv, D, counter, d_dout, d_qkv, d_out, d_lse, s.B, s.T, s.NH, s.HS);
        return Outputs{dqkv.download(), counter.download()};
    });
    backward.equal("counter", gradients[1], {0});
    backward.compare<floatX>("dqkv", gradients[0], attention_backward_loop(dout, qkv, out, lse, s));
}

// The kernels that one choice of --tensor-cores runs, over sizes that are parts of its tiles, whole
// ones and several of them.
void test_attention_kernels(TensorCores kind, const std::vector<int>& head_sizes, const std::vector<int>& lengths) {
    const TensorCores usual = std::exchange(device.tensor_cores, kind);
    const std::string on = format("%s with %d multiprocessors", name_of(kind), device.properties.multiProcessorCount);
    const std::string names[] = {"attention_forward on " + on, "attention_backward on " + on};
    Trial forward(names[0].c_str()), backward(names[1].c_str());
    int n = 0;   // batch and heads change with every case; the first of six lengths has one of each
    for (int HS : head_sizes)
        for (int T : lengths) {
            const int heads[] = {1, 2, 3, 1, 5};
            try_attention(forward, backward, {1 + n % 2, T, T > 50 ? 1 + n % 3 : heads[n % 5], HS});
            n++;
        }
    forward.report("out and lse");
    backward.report("dqkv");
    device.tensor_cores = usual;
}

void test_attention() {
    test_attention_derivative();
    std::vector<int> head_sizes = {16, 32, 48, 64, 80, 96, 112, 128};
    while (attention_backward_shared(head_sizes.back()) > device.properties.sharedMemPerBlockOptin) head_sizes.pop_back();
    test_attention_kernels(TensorCores::NONE, head_sizes, {1, 5, 16, 23, 33, 64, 100});
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (has_tensor_cores(kind)) test_attention_kernels(kind, {64, 80, 96, 128}, {270, 1, 15, 64, 65, 150});
    if (!device.is_cpu()) test_attention_kernels(device.tensor_cores, {64}, {2050});   // too long for an imitation
    // On Hopper blocks stay for several pieces of work: their rings go round, their phases carry on. With fewer
    // multiprocessors than there are pieces even small sizes have them do so. 650 queries are more tiles of keys than a
    // ring has room for, and leave a group of the last piece without any.
    if (!has_tensor_cores(TensorCores::WGMMA)) return;
    const int usual = device.properties.multiProcessorCount;
    for (int multiprocessors : {1, 3}) {
        device.properties.multiProcessorCount = multiprocessors;
        test_attention_kernels(TensorCores::WGMMA, {64, 128}, {65, 650});
    }
    device.properties.multiProcessorCount = usual;
}

// ==== attention of one token =================================================

// Fewer keys than a block has warps, as many, and more.
void test_attention_of_last() {
    const TensorCores usual = std::exchange(device.tensor_cores, TensorCores::NONE);   // for attention_loop
    Trial trial("attention_of_last");
    int n = 0;
    for (int HS : {16, 32, 48, 64, 80, 96, 112, 128})
        for (int T : {1, 2, 7, 32, 33, 150}) {
            const AttentionSize s = {1, T, 1 + n++ % 3, HS};
            trial.at("T %d, NH %d, HS %d", T, s.NH, HS);
            const Values qkv = attention_inputs(s);
            const auto got = trial.run([&] {
                const DeviceArray<floatX> out(s.C()), d_qkv(qkv);
                attention_of_last(out, d_qkv, T, s.NH, HS);
                return Outputs{out.download()};
            });
            const Numbers all = attention_loop(qkv, s).out;
            trial.compare<floatX>("out", got[0], {all.end() - s.C(), all.end()});
        }
    trial.report("out");
    device.tensor_cores = usual;
}

// ==== naive attention ========================================================
// Each product and each softmax against the loop, on what the kernels before it stored.

// Of (B,NH,T,T): key j of query i.
size_t square(const AttentionSize& s, int b, int h, int i, int j) { return s.lse(b, i, h) * s.T + j; }

// Returns the probabilities. Scores of keys that come after the query are nobody's business.
Values try_naive_attention_forward(Trial& trial, const AttentionSize& s, const Values& qkv) {
    const size_t squares = s.N() * s.NH * s.T;
    const auto got = trial.run([&] {
        const DeviceArray<floatX> out(s.N() * s.C()), scores(squares), probs(squares), d_qkv(qkv);
        naive_attention_forward(out, scores, probs, d_qkv, s.B, s.T, s.NH, s.HS);
        return Outputs{scores.download(), probs.download(), out.download()};
    });
    Numbers scores = numbers(got[0]), probs(squares), out(s.N() * s.C());
    s.for_each_query([&](int b, int h, int i) {
        const double* row = &got[0][square(s, b, h, i, 0)];
        const double max = *std::max_element(row, row + i + 1);
        Number sum;
        for (int j = 0; j <= i; j++) sum += exp(Number(row[j]) - max);
        for (int j = 0; j <= i; j++) {
            const size_t at = square(s, b, h, i, j);
            scores[at] = score(&qkv[s.qkv(b, i, 0, h)], &qkv[s.qkv(b, j, 1, h)], s.HS);
            probs[at] = exp(Number(row[j]) - max) / sum;
            for (int d = 0; d < s.HS; d++) out[s.out(b, i, h) + d] += Number(got[1][at]) * qkv[s.qkv(b, j, 2, h) + d];
        }
    });
    trial.compare<floatX>("scores", got[0], scores);
    trial.compare<floatX>("probs", got[1], probs);
    trial.compare<floatX>("out", got[2], out);
    return got[1];
}

void try_naive_attention_backward(Trial& trial, const AttentionSize& s, const Values& qkv, const Values& probs) {
    const Values dout = random_values<floatX>(s.N() * s.C());
    const auto got = trial.run([&] {
        const DeviceArray<floatX> dqkv(qkv.size()), dscores(probs.size()), d_dout(dout), d_qkv(qkv), d_probs(probs);
        naive_attention_backward(dqkv, dscores, d_dout, d_qkv, d_probs, s.B, s.T, s.NH, s.HS);
        return Outputs{dscores.download(), dqkv.download()};
    });
    Numbers dscores(probs.size()), dqkv(qkv.size());
    s.for_each_query([&](int b, int h, int i) {
        const size_t row = s.out(b, i, h), q = s.qkv(b, i, 0, h), first = square(s, b, h, i, 0);
        Numbers dprobs(i + 1);
        Number sum;
        for (int j = 0; j <= i; j++) {
            for (int d = 0; d < s.HS; d++) dprobs[j] += Number(dout[row + d]) * qkv[s.qkv(b, j, 2, h) + d];
            dprobs[j] = passed_through<floatX>(dprobs[j]);
            sum += dprobs[j] * probs[first + j];
        }
        for (int j = 0; j <= i; j++) {
            const size_t k = s.qkv(b, j, 1, h), v = s.qkv(b, j, 2, h);
            dscores[first + j] = (dprobs[j] - sum) * probs[first + j] * (1 / std::sqrt(double(s.HS)));
            for (int d = 0; d < s.HS; d++) {
                dqkv[q + d] += Number(got[0][first + j]) * qkv[k + d];
                dqkv[k + d] += Number(got[0][first + j]) * qkv[q + d];
                dqkv[v + d] += Number(probs[first + j]) * dout[row + d];
            }
        }
    });
    trial.compare<floatX>("dscores", got[0], dscores);
    trial.compare<floatX>("dqkv", got[1], dqkv);
}

void test_naive_attention() {
    Trial forward("naive_attention_forward"), backward("naive_attention_backward");
    const AttentionSize sizes[] = {{1, 1, 1, 16}, {2, 5, 3, 48}, {1, 33, 2, 128}, {2, 32, 1, 64}, {1, 70, 3, 80}};
    for (const AttentionSize& s : sizes) {
        for (Trial* trial : {&forward, &backward}) trial->at("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS);
        const Values qkv = attention_inputs(s);
        try_naive_attention_backward(backward, s, qkv, try_naive_attention_forward(forward, s, qkv));
    }
    forward.report("scores, probs and out");
    backward.report("dscores and dqkv");
}

// ==== cross-entropy ==========================================================

struct CrossEntropyResult { Numbers losses, dlogits; };

CrossEntropyResult cross_entropy_loop(const Values& logits, const Values& targets, double scale, int V, int Vp) {
    const size_t N = targets.size();
    CrossEntropyResult r = {Numbers(N), Numbers(N * Vp)};
    for (size_t n = 0; n < N; n++) {
        if (targets[n] < 0) continue;
        const double* row = &logits[n * Vp];
        const double max = *std::max_element(row, row + V);
        Numbers p;
        for (int v = 0; v < V; v++) p.push_back(exp(Number(row[v]) - max));
        const Number total = sum(p, WIDE_BLOCK * PACK);
        r.losses[n] = log(total) + max - row[static_cast<int>(targets[n])];
        for (int v = 0; v < V; v++) r.dlogits[n * Vp + v] = (p[v] / total - (v == targets[n] ? 1.0 : 0.0)) * scale;
    }
    return r;
}

void test_cross_entropy_derivative() {
    const int V = 10, Vp = 16;
    const Values logits = random_values<float>(2 * Vp), direction = random_values<float>(2 * Vp), targets = {3, 9};
    const auto loop = [&](const Values& x) { return cross_entropy_loop(x, targets, 0.5, V, Vp); };
    const auto loss = [&](const Values& x) { return dot(values_of(loop(x).losses), {0.5, 0.5}); };
    claim_derivative("cross-entropy", slope(loss, logits, direction), dot(values_of(loop(logits).dlogits), direction));
}

// On the device, as floats.
DeviceArray<float> scale_on_device(const LossScale& s) {
    return DeviceArray<float>(Values{s.scale, s.unscale, s.good_steps, s.skipped, s.interval});
}
LossScale* loss_scale_in(const DeviceArray<float>& array) {
    return reinterpret_cast<LossScale*>(static_cast<float*>(array));
}

template <Want WANT>
Outputs run_cross_entropy(const Values& logits, const Values& targets, float scale, int V, int Vp) {
    const DeviceArray<float> loss_scale = scale_on_device({4});
    const DeviceArray<floatX> d_logits(logits);
    const DeviceArray<float> losses(targets.size());
    const DeviceArray<int> d_targets(targets);
    cross_entropy<WANT>(d_logits, losses, d_targets, scale / 4, loss_scale_in(loss_scale), targets.size(), V, Vp);
    return {losses.download(), d_logits.download()};
}

// Rows of many magnitudes; a row that does not count; and in the padding what must not be looked at.
void try_cross_entropy(Trial& trial, size_t N, int V, int Vp) {
    trial.at("N %zu, V %d, Vp %d", N, V, Vp);
    Values logits = random_values<floatX>(N * Vp), targets(N);
    const double padding[] = {1e30, INFINITY, NAN, -INFINITY};
    for (size_t n = 0; n < N; n++) {
        const double magnitude[] = {4, 0.01, 30, 1000};
        for (int v = 0; v < Vp; v++)
            logits[n * Vp + v] = stored_as<floatX>(v < V ? logits[n * Vp + v] * magnitude[n % 4] : padding[v % 4]);
        targets[n] = n % 3 == 0 ? V - 1 : n % 3 == 1 ? 0 : n * 7 % V;
        if (n % 5 == 2) targets[n] = -1;
    }
    const float scale = 1.0f / 3;
    constexpr Want BOTH = Want::LOSS_AND_GRADIENT;
    const auto got = trial.run([&] { return run_cross_entropy<BOTH>(logits, targets, scale, V, Vp); });
    const auto loss_only = trial.run([&] { return run_cross_entropy<Want::LOSS>(logits, targets, scale, V, Vp); });
    const CrossEntropyResult expected = cross_entropy_loop(logits, targets, scale, V, Vp);
    trial.compare<float>("losses", got[0], expected.losses);
    trial.compare<floatX>("dlogits", got[1], expected.dlogits);
    trial.equal("losses without gradient", loss_only[0], got[0]);
    for (size_t i = 0; i < logits.size(); i++)   // NaN is equal to nothing: only the real columns
        if (static_cast<int>(i % Vp) < V) trial.equal("logits without gradient", {loss_only[1][i]}, {logits[i]});
}

void test_cross_entropy() {
    test_cross_entropy_derivative();
    Trial trial("cross_entropy");
    for (size_t N : {1, 13}) {
        try_cross_entropy(trial, N, 1, 128);
        try_cross_entropy(trial, N, 65, 128);
        try_cross_entropy(trial, N, 256, 256);
        try_cross_entropy(trial, N, 1000, 1024);
    }
    try_cross_entropy(trial, 3, 50257, 50304);
    try_cross_entropy(trial, 3, 60000, 60032);   // a row that no card keeps in shared memory
    trial.report("losses and dlogits, none of it from or in the padding,");

    Trial sums("add_losses");
    for (size_t n : {1, 37, 5000}) {
        sums.at("n %zu", n);
        const Values losses = random_values<float>(n, 0, 10);
        const auto got = sums.run([&] {
            const DeviceArray<float> d_losses(losses);
            const DeviceArray<double> total(Values{1e6 + 0.125});
            add_losses(total, d_losses, n);
            return Outputs{total.download()};
        });
        const Number sum_of_losses = sum(numbers(losses), WIDE_BLOCK);
        sums.compare<double>("total", got[0], {{1e6 + 0.125 + sum_of_losses.value, sum_of_losses.error}});
    }
    sums.report("total += sum");
}

// ==== gradient norm ==========================================================

// n_outside gradients and n of each layer, among others that do not count.
template <typename G> void try_gradient_norm(Trial& trial, size_t n_outside, size_t n, size_t layers) {
    const size_t gap = 16, stride = n + gap, layer0 = gap + n_outside + gap, count = norm_blocks(n_outside, n, layers);
    trial.at("%s, %zu and %zu x %zu", name_of(std::is_same_v<G, float> ? DType::FP32 : GRAD16), n_outside, layers, n);
    Values g = random_values<G>(layer0 + layers * stride);
    std::vector<bool> counts(g.size(), false);
    std::fill_n(counts.begin() + gap, n_outside, true);
    for (size_t l = 0; l < layers; l++) std::fill_n(counts.begin() + layer0 + l * stride, n, true);
    for (size_t i = n_outside - 16; i < n_outside; i++) g[gap + i] *= 1024;   // what comes last must not be lost
    for (size_t i = 0; i < g.size(); i++)
        if (!counts[i]) g[i] = 0x1p15;
    const auto got = trial.run([&] {
        const DeviceArray<G> grads(g);
        const DeviceArray<float> norm(1), partials(count), loss_scale = scale_on_device({0.5f});
        const DType dtype = grad(grads).dtype;
        norm_partials(partials, {grads + gap, dtype}, n_outside, {grads + layer0, dtype}, n, layers, stride);
        gradient_norm(norm, loss_scale_in(loss_scale), partials, count);
        return Outputs{norm.download()};
    });
    Numbers squares;
    for (size_t i = 0; i < g.size(); i++)
        if (counts[i]) squares.push_back(Number(g[i]) * g[i]);
    trial.compare<float>("norm", got[0], {sqrt(sum(squares, count * BLOCK * PACK)) * 2});
}

void test_gradient_norm() {
    Trial trial("gradient_norm");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t n : {size_t{16}, SPAN + 16, NORM_BLOCKS * SPAN + SPAN + 16}) try_gradient_norm<G>(trial, n, 0, 0);
        for (size_t n : {size_t{16}, SPAN + 16}) try_gradient_norm<G>(trial, 2 * SPAN + 48, n, 3);
    });
    trial.report("norm, of what belongs to no layer and of layers a stride apart,");
}

// ==== adamw ==================================================================

struct AdamWState { Values weights, grads, m, v; };   // the weights are the master's

// In FP32, master and weights are one.
template <typename G>
Outputs run_adamw(const AdamWState& s, double norm, const AdamW& a, size_t decayed, float unscale) {
    const size_t n = s.weights.size();
    const DeviceArray<float> master(s.weights), m(s.m), v(s.v), d_norm(Values{norm});
    const DeviceArray<G> grads(s.grads);
    const DeviceArray<floatX> separate(n);
    const DeviceArray<float> settings(sizeof(AdamW) / sizeof(float)), loss_scale = scale_on_device({1, unscale});
    AdamW* const d_settings = reinterpret_cast<AdamW*>(static_cast<float*>(settings));
    void* const weights = SEPARATE_MASTER ? static_cast<void*>(separate) : static_cast<void*>(master);
    set_adamw(d_settings, a);
    adamw(static_cast<floatX*>(weights), master, grad(grads), m, v, d_norm, loss_scale_in(loss_scale), d_settings,
          decayed, n);
    return {master.download(), m.download(), v.download(), grads.download(), separate.download()};
}

template <typename G> void try_adamw(Trial& trial, size_t n, size_t decayed, float clip, double norm) {
    trial.at("n %zu, decayed %zu, clip %g, norm %g", n, decayed, clip, norm);
    const AdamW a = {3e-2f, 0.9f, 0.95f, 1e-3f, 0.25f, clip, 1 - 0.9f * 0.9f * 0.9f, 1 - 0.95f * 0.95f * 0.95f};
    const AdamWState s = {random_values<float>(n), random_values<G>(n, -3, 3), random_values<float>(n),
                          random_values<float>(n, 0, 1)};
    const float unscale = 1.0f / 3;
    const auto got = trial.run([&] { return run_adamw<G>(s, norm, a, decayed, unscale); });
    const Number scale = (clip > 0 && norm > clip ? Number(clip) / (Number(norm) + 1e-6) : Number(1)) * unscale;
    Numbers w(n), m(n), v(n);
    for (size_t i = 0; i < n; i++) {
        const Number g = scale * s.grads[i];
        m[i] = Number(a.beta1) * s.m[i] + Number(1 - a.beta1) * g;
        v[i] = Number(a.beta2) * s.v[i] + Number(1 - a.beta2) * g * g;
        const Number step = m[i] / a.correction1 / (sqrt(v[i] / a.correction2) + a.eps);
        w[i] = Number(s.weights[i]) - Number(a.lr) * (step + Number(i < decayed ? a.weight_decay : 0) * s.weights[i]);
    }
    trial.compare<float>("master", got[0], w);
    trial.compare<float>("m", got[1], m);
    trial.compare<float>("v", got[2], v);
    trial.equal("gradients", got[3], Values(n, 0));
    if (SEPARATE_MASTER) trial.equal("weights", got[4], values_stored_as<floatX>(numbers(got[0])));
}

// Of each layer n elements, of which the blocks keep more: all are updated as one by one, and nothing else is.
void test_adamw_of_layers() {
    const size_t n = SPAN + 16, layers = 3, decayed = 48;
    const Strides strides = {n + 16, n + 32, n + 48, n};
    const AdamW a = {3e-2f, 0.9f, 0.95f, 1e-3f, 0.25f, 1, 1 - 0.9f, 1 - 0.95f};
    const Values all = random_values<float>(layers * (n + 48), 0, 1);
    auto run = [&](auto go_over) {
        const DeviceArray<floatX> weights(layers * strides.weights);
        const DeviceArray<float> master(all), grads(all), m(all), v(all), norm(Values{2});
        const DeviceArray<float> settings(sizeof(AdamW) / sizeof(float)), loss_scale = scale_on_device({1, 1});
        AdamW* const on_device = reinterpret_cast<AdamW*>(static_cast<float*>(settings));
        set_adamw(on_device, a);
        round_weights(weights, master, layers * strides.weights);
        go_over([&](size_t l, unsigned count) {
            adamw(weights + l * strides.weights, master + l * strides.master,
                  {grads + l * strides.grads, DType::FP32}, m + l * n, v + l * n, norm,
                  loss_scale_in(loss_scale), on_device, decayed, n, count, strides);
        });
        return Outputs{weights.download(), master.download(), grads.download(), m.download(), v.download()};
    };
    const Outputs at_once = run([&](auto update) { update(0, layers); });
    const Outputs one_by_one = run([&](auto update) { for (size_t l = 0; l < layers; l++) update(l, 1); });
    Values outside;
    for (size_t l = 0; l < layers; l++)
        for (size_t i = n; i < strides.master && l * strides.master + i < all.size(); i++)
            outside.push_back(at_once[1][l * strides.master + i] - all[l * strides.master + i]);
    claim(at_once == one_by_one && outside == Values(outside.size(), 0),
          "adamw: layers a stride apart are updated as each alone, and nothing between them is");
}

// Weights of which AdamW has no copy: each is what the loop has, rounded to 16 bits. A tenth of the updates are zero;
// of the others those that round back are counted, in two layers at once.
template <typename G> void try_adamw_without_master(Trial& trial, size_t n, float lr) {
    trial.at("n %zu, lr %g", n, lr);
    const AdamW a = {lr, 0.9f, 0.95f, 1e-3f, 0, 0, 1 - 0.9f, 1 - 0.95f};
    Values weights = random_values<floatX>(2 * n), grads = random_values<G>(2 * n, 0.25, 3), m = random_values<float>(2 * n, 0.25, 1);
    for (size_t i = 0; i < 2 * n; i += 10) grads[i] = m[i] = 0;
    const Values v = random_values<float>(2 * n, 0, 1);
    const auto got = trial.run([&] {
        const DeviceArray<floatX> d_weights(weights);
        const DeviceArray<float> d_m(m), d_v(v), settings(sizeof(AdamW) / sizeof(float)), scale = scale_on_device({1, 1});
        const DeviceArray<G> d_grads(grads);
        const DeviceArray<unsigned long long> count(Values{5});
        AdamW* const on_device = reinterpret_cast<AdamW*>(static_cast<float*>(settings));
        set_adamw(on_device, a);
        adamw(d_weights, nullptr, grad(d_grads), d_m, d_v, nullptr, loss_scale_in(scale), on_device, 0, n, 2,
              {n, n, n, n}, count);
        return Outputs{d_weights.download(), d_m.download(), d_v.download(), d_grads.download(), count.download()};
    });
    Numbers w(2 * n), m1(2 * n), v1(2 * n);
    double lost = 5;
    for (size_t i = 0; i < 2 * n; i++) {
        m1[i] = Number(a.beta1) * m[i] + Number(1 - a.beta1) * grads[i];
        v1[i] = Number(a.beta2) * v[i] + Number(1 - a.beta2) * grads[i] * grads[i];
        w[i] = Number(weights[i]) - Number(a.lr) * (m1[i] / a.correction1 / (sqrt(v1[i] / a.correction2) + a.eps));
        lost += grads[i] != 0 && got[0][i] == weights[i];
    }
    trial.compare<floatX>("weights", got[0], w);
    trial.compare<float>("m", got[1], m1);
    trial.compare<float>("v", got[2], v1);
    trial.equal("gradients", got[3], Values(2 * n, 0));
    trial.equal("count", got[4], {lost});
}

void test_adamw() {
    Trial trial("adamw");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t n : {size_t{16}, SPAN - 16, 2 * SPAN + 48})
            for (size_t decayed : {size_t{0}, n / 32 * 16, n}) {
                try_adamw<G>(trial, n, decayed, 1, 8);    // clipped
                try_adamw<G>(trial, n, decayed, 1, 0.5);  // short enough
                try_adamw<G>(trial, n, decayed, 0, NAN);  // not clipped, so of no interest
            }
    });
    trial.report("master, m, v, gradients back at 0, and weights, which are master rounded,");
    const AdamWState s = {random_values<float>(48), random_values<float>(48), random_values<float>(48), random_values<float>(48, 0, 1)};
    const Outputs skipped = run_adamw<float>(s, INFINITY, {3e-2f, 0.9f, 0.95f, 1e-3f, 0.25f, 1, 0.1f, 0.05f}, 16, 0);
    const bool weights = !SEPARATE_MASTER || std::all_of(skipped[4].begin(), skipped[4].end(), [](double w) { return std::isnan(w); });
    claim(skipped[0] == s.weights && skipped[1] == s.m && skipped[2] == s.v && skipped[3] == Values(48, 0) && weights,
          "adamw: of a step that is skipped nothing is written but that gradients are 0");
    test_adamw_of_layers();
    if (!SEPARATE_MASTER) return;
    Trial without("adamw without a master copy");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (float lr : {1e-1f, 1e-3f, 1e-5f})   // few are lost, some, almost all
            for (size_t n : {size_t{16}, SPAN - 16, 2 * SPAN + 48}) try_adamw_without_master<G>(without, n, lr);
    });
    without.report("weights, m, v, gradients back at 0, and how many weights stay as they were");
}

// ==== init ===================================================================

Values run_init_normal(double std, uint64_t seed, size_t n) {
    const DeviceArray<float> out(n);
    init_normal(static_cast<float*>(out), std, seed, 0, n);
    return out.download();
}

// Each bound is 5 standard deviations of what is claimed: once in two million for a fair generator.
void test_init_normal() {
    const size_t n = 3 * SPAN + 16;
    const float std = 0.02f;
    Trial trial("init_normal");
    trial.at("n %zu", n);
    const Values x = trial.run([&] { return Outputs{run_init_normal(std, 7, n)}; })[0];
    Numbers expected;
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = splitmix64(7 ^ splitmix64(i));
        const double u1 = ((bits >> 40) + 1) / double(1 << 24), turn = 2 * M_PI * (bits & 0xffffff) / double(1 << 24);
        const Number radius = sqrt(Number(-2) * log(Number(u1)));
        const Number cosine(std::cos(turn), U * (4 + 2 * turn));   // 2 ulps, and the angle's: 2 pi, the product
        expected.push_back(Number(std) * radius * cosine);
    }
    trial.compare<float>("out", x, expected);
    trial.report("Box and Muller's normal of (seed, i)");

    double mean = 0, variance = 0, next = 0;
    for (size_t i = 0; i < n; i++) {
        mean += x[i] / std / n;
        variance += x[i] * x[i] / std / std / n;
        next += x[i] * x[(i + 1) % n] / std / std / n;
    }
    const double deviations = 5 / std::sqrt(double(n));
    const long beyond = std::count_if(x.begin(), x.end(), [&](double v) { return std::abs(v) > 2 * std; });
    claim(std::abs(mean) < deviations && std::abs(variance - 1) < deviations * std::sqrt(2.0),
          "init_normal: mean 0 and the standard deviation asked for",
          format("%.4f, %.4f of it", mean, std::sqrt(variance)));
    claim(std::abs(next) < deviations, "init_normal: neighbours have nothing to do with each other",
          format("correlation %.4f", next));
    claim(std::abs(beyond / double(n) - 0.0455) < deviations * std::sqrt(0.0455),
          "init_normal: 4.55 % lie beyond two standard deviations", format("%.2f %%", 100.0 * beyond / n));

    Values sorted = x;
    std::sort(sorted.begin(), sorted.end());
    const size_t distinct = std::unique(sorted.begin(), sorted.end()) - sorted.begin();
    const Values other = run_init_normal(std, 8, n), fewer = run_init_normal(std, 7, 16);
    size_t same = 0;
    for (size_t i = 0; i < n; i++) same += x[i] == other[i];
    claim(distinct > n - n / 100 && same < n / 100, "init_normal: elements and seeds differ",
          format("%zu of %zu distinct, %zu shared with the next seed", distinct, n, same));
    claim(std::equal(fewer.begin(), fewer.end(), x.begin()),
          "init_normal: an element depends on seed and place, not on how many there are");
}

void test_fill_and_round() {
    Trial fill("fill_with"), round("round_weights");
    for (size_t n : {size_t{16}, SPAN - 16, 2 * SPAN + 48}) {
        fill.at("n %zu", n);
        round.at("n %zu", n);
        const auto filled = fill.run([&] {
            const DeviceArray<float> out(n);
            fill_with(static_cast<float*>(out), 1.25f, n);
            return Outputs{out.download()};
        });
        fill.equal("out", filled[0], Values(n, 1.25));
        const Values master = random_values<float>(n);
        const auto weights = round.run([&] {
            const DeviceArray<floatX> out(n);
            const DeviceArray<float> d_master(master);
            round_weights(out, d_master, n);
            return Outputs{out.download()};
        });
        round.equal("weights", weights[0], values_stored_as<floatX>(numbers(master)));
    }
    fill.report("out");
    round.report("weights");
}

// ==== matmul =================================================================

struct MatmulSize { size_t N, C, OC; };

std::vector<MatmulSize> matmul_sizes() {
    std::vector<MatmulSize> sizes;
    for (size_t N : {1, 7, 33})
        for (auto [C, OC] : {std::pair<size_t, size_t>{16, 48}, {48, 16}, {80, 272}, {272, 80}, {16, 768}})
            sizes.push_back({N, C, OC});
    return sizes;
}

// Where cuBLASLt has no epilogue, the product is stored before a second kernel takes it up.
void test_matmul_forward() {
    Trial trial("matmul_forward");
    for (const auto& [N, C, OC] : matmul_sizes()) {
        trial.at("N %zu, C %zu, OC %zu", N, C, OC);
        const Values inp = random_values<floatX>(N * C), w = random_values<floatX>(C * OC);
        const Values b = random_values<floatX>(OC);
        const auto got = trial.run([&, N = N, C = C, OC = OC] {
            const DeviceArray<floatX> out(N * OC), d_inp(inp), d_w(w), d_b(b);
            matmul_forward(out, d_inp, d_w, d_b, N, C, OC);
            return Outputs{out.download()};
        });
        Numbers expected(N * OC);
        for (size_t i = 0; i < N * OC; i++) {
            for (size_t c = 0; c < C; c++) expected[i] += Number(inp[i / OC * C + c]) * w[c * OC + i % OC];
            expected[i] = passed_through<floatX>(expected[i]) + b[i % OC];
        }
        trial.compare<floatX>("out", got[0], expected);
    }
    trial.report("out");
}

void test_matmul_backward_input() {
    Trial plain("matmul_backward_input"), gelu("matmul_backward_input_gelu");
    for (const auto& [N, C, OC] : matmul_sizes()) {
        for (Trial* trial : {&plain, &gelu}) trial->at("N %zu, C %zu, OC %zu", N, C, OC);
        const Values dout = random_values<floatX>(N * OC), w = random_values<floatX>(C * OC), pre = gelu_inputs(N * C);
        const auto run = [&, N = N, C = C, OC = OC](bool through_gelu) {
            const DeviceArray<floatX> dinp(N * C), d_dout(dout), d_w(w), d_pre(pre);
            if (through_gelu) matmul_backward_input_gelu(dinp, d_dout, d_w, d_pre, N, C, OC);
            else matmul_backward_input(dinp, d_dout, d_w, N, C, OC);
            return Outputs{dinp.download()};
        };
        Numbers expected(N * C), through_gelu(N * C);
        for (size_t i = 0; i < N * C; i++) {
            for (size_t o = 0; o < OC; o++) expected[i] += Number(dout[i / C * OC + o]) * w[i % C * OC + o];
            through_gelu[i] = passed_through<floatX>(expected[i]) * gelu_derivative_loop(pre[i]);
        }
        plain.compare<floatX>("dinp", plain.run([&] { return run(false); })[0], expected);
        gelu.compare<floatX>("dinp", gelu.run([&] { return run(true); })[0], through_gelu);
    }
    plain.report("dinp");
    gelu.report("dinp");
}

template <typename G> void try_matmul_backward_weight(Trial& trial, size_t N, size_t C, size_t OC) {
    trial.at("N %zu, C %zu, OC %zu", N, C, OC);
    const Values dout = random_values<floatX>(N * OC), inp = random_values<floatX>(N * C), dw = random_values<G>(C * OC);
    const auto got = trial.run([&] {
        const DeviceArray<G> d_dw(dw);
        const DeviceArray<floatX> d_dout(dout), d_inp(inp);
        matmul_backward_weight(grad(d_dw), d_dout, d_inp, N, C, OC);
        return Outputs{d_dw.download()};
    });
    Numbers w = numbers(dw);
    for (size_t i = 0; i < C * OC; i++)
        for (size_t n = 0; n < N; n++) w[i] += Number(inp[n * C + i / OC]) * dout[n * OC + i % OC];
    trial.compare<G>("dw", got[0], w);
}

void test_matmul_backward_weight() {
    Trial trial("matmul_backward_weight");
    for (const auto& [N, C, OC] : matmul_sizes()) {
        for_each_gradient_type([&, N = N, C = C, OC = OC](auto type) {
            // A product of FP32 matrices has no BF16 result.
            if (FLOATX == DType::FP32 && std::is_same_v<decltype(type), grad16>) return;
            try_matmul_backward_weight<decltype(type)>(trial, N, C, OC);
        });
    }
    trial.report("dw, added to,");
}

// ==== all kernels ============================================================


// Processor time of this program and of the runs that it has started and seen end.
double processor_seconds() {
    double seconds = 0;
    for (int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
        rusage used;
        getrusage(who, &used);
        for (const timeval& t : {used.ru_utime, used.ru_stime}) seconds += t.tv_sec + 1e-6 * t.tv_usec;
    }
    return seconds;
}

// ==== files for the tests ====================================================
// Everything that the tests write lies in one folder, which is removed at the end. In paths and
// commands below, @ stands for it.

class ScratchFolder {
public:
    ScratchFolder() {
        const char* parent = getenv("TMPDIR");
        path_ = std::string(parent && *parent ? parent : "/tmp") + "/test_gpt.XXXXXX";
        if (!mkdtemp(path_.data())) throw Failure("%s: mkdtemp: %s", path_.c_str(), strerror(errno));
    }
    ~ScratchFolder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

std::string scratch(std::string text) {
    static const ScratchFolder folder;
    for (size_t at = 0; (at = text.find('@', at)) != text.npos; at += folder.path().size())
        text.replace(at, 1, folder.path());
    return text;
}

std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

template <typename T> std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The contents of a shard of tokens.
std::string shard(const std::vector<uint16_t>& tokens, int magic = SHARD_MAGIC, int version = SHARD_VERSION) {
    std::vector<int> header(SHARD_HEADER, 0);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int>(tokens.size());
    return bytes_of(header) + bytes_of(tokens);
}

// Safetensors as others may write them: any dtype, any shape, any mistake.
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
    const Safetensors file(path);
    std::vector<RawTensor> tensors;
    for (const auto& [name, entry] : file.entries()) {
        const size_t element = entry.dtype == "F32" || entry.dtype == "I32" ? 4 : 2;
        tensors.push_back({name, entry.dtype, entry.shape, std::string(entry.data, entry.elements * element)});
    }
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

template <typename T> std::vector<T> from_device(const T* from, size_t n) {
    std::vector<T> values(n);
    download(values.data(), from, n * sizeof(T));
    return values;
}

template <typename T> Floats floats_from_device(const T* from, size_t n) {
    const std::vector<T> values = from_device(from, n);
    return {values.begin(), values.end()};
}

// Without the loss scale.
Floats gradients(const Model& m) {
    Floats values;
    with_type(m.grads, [&](auto* g) { values = floats_from_device(g, m.layout.elements()); });
    const float scale = fetch(m.a.loss_scale()).scale;
    for (float& value : values) value /= scale;
    return values;
}

// The values that a file would hold, of a parameter in a block like m.master.
Floats part(const Floats& block, const Config& c, const ParameterRow& row, size_t l) {
    const auto begin = block.begin() + layout_of(c).place(row, l);
    return {begin, begin + row.file_elements()};
}

// Brings a batch to the device: tokens (B, T+1), where Loader would put it.
Batch send_batch(const Model& m, const int* tokens) {
    const size_t B = m.setup.B, T = m.setup.T, N = B * T;
    std::vector<int> inputs(N), targets(N), order(N), first(N + 1);
    for (size_t n = 0; n < N; n++) {
        inputs[n] = tokens[n / T * (T + 1) + n % T];
        targets[n] = tokens[n / T * (T + 1) + n % T + 1];
    }
    sort_positions(order.data(), first.data(), inputs.data(), N, m.config.vocab);
    upload(m.a.inputs(0), inputs.data(), N * sizeof(int));
    upload(m.a.targets(0), targets.data(), N * sizeof(int));
    if (m.setup.purpose == Purpose::INFERENCE) return {m.a.inputs(0), m.a.targets(0), nullptr, nullptr};
    upload(m.a.order(0), order.data(), N * sizeof(int));
    upload(m.a.first(0), first.data(), (N + 1) * sizeof(int));
    return {m.a.inputs(0), m.a.targets(0), m.a.order(0), m.a.first(0)};
}

// Logits (N, V), without the vocabulary's padding. All rows must fit: N <= head_rows.
Floats logits_of(Model& m, const int* inputs) {
    const size_t N = m.setup.N(), V = m.config.vocab, Vp = m.config.padded_vocab();
    forward(m, inputs);
    head_logits(m, 0, N);
    const Floats padded = floats_from_device(m.a.logits(), N * Vp);
    Floats logits;
    for (size_t n = 0; n < N; n++) logits.insert(logits.end(), padded.begin() + n * Vp, padded.begin() + n * Vp + V);
    return logits;
}

// What one micro-batch leaves behind.
struct Pass {
    double loss;   // the mean
    Floats logits, losses, gradients;

    bool operator==(const Pass& other) const {   // the same bits
        return loss == other.loss && bytes_of(logits) == bytes_of(other.logits) &&
               bytes_of(losses) == bytes_of(other.losses) && bytes_of(gradients) == bytes_of(other.gradients);
    }
};

Pass pass_through(Model& m, const int* tokens) {
    const Batch batch = send_batch(m, tokens);
    Pass pass;
    if (m.setup.N() <= m.setup.head_rows) pass.logits = logits_of(m, batch.inputs);
    take_loss(m);
    micro_step(m, batch, m.setup.N());
    pass.loss = take_loss(m) / m.setup.N();
    pass.losses = from_device(m.a.losses(), m.setup.N());
    pass.gradients = gradients(m);
    return pass;
}

// ||found - truth|| / ||truth - origin||; infinite when anything is not a number.
double relative_l2(const Floats& found, const Floats& truth, const Floats& origin = {}) {
    double error = 0, size = 0;
    for (size_t i = 0; i < truth.size() && i < found.size(); i++) {
        error += pow(double(found[i]) - truth[i], 2);
        size += pow(double(truth[i]) - (origin.empty() ? 0 : origin[i]), 2);
    }
    return found.size() == truth.size() && std::isfinite(error) && size > 0 ? sqrt(error / size) : INFINITY;
}

// Of several tensors, the one that is farthest from the truth for what it may be.
struct Farthest {
    double share = -1, error = 0, limit = 0;
    std::string key;

    void see(const std::string& name, double its_error, double its_limit) {
        if (its_error / its_limit > share) *this = {its_error / its_limit, its_error, its_limit, name};
    }
    void claim_near(const std::string& text) const {
        claim(share >= 0 && share <= 1, text, format("%s: error %.2e, limit %.2e", key.c_str(), error, limit));
    }
};

// ==== against PyTorch ========================================================
// data/reference holds a model, tokens, and what PyTorch makes of them in float64; beside each
// value the relative error of PyTorch's own FP32, BF16 and FP16. dev/reference/README.md has the details.

struct Reference {
    std::string name;
    Safetensors file;
    Config config = {};
    int B, T;
    long steps, accumulation;
    Options options;

    explicit Reference(const std::string& which)
        : name(which), file("data/reference/" + which + ".safetensors"), B(number("B")), T(number("T")),
          steps(number("steps")), accumulation(number("accumulation")) {
        for (auto [key, to] : {std::pair{"layers", &config.layers}, {"heads", &config.heads}, {"channels", &config.channels},
                               {"context", &config.context}, {"vocab", &config.vocab}})
            *to = number(key);
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

    // How far from the truth we may be. In BF16 and FP16 twice as far as PyTorch is: the rule of the
    // FlashAttention papers. Gradients that are themselves kept in BF16 are rounded once more for
    // each time that something is added to them: a few times half a unit in the last place, 2^-9;
    // in FP16 2^-12.
    // In FP32 PyTorch's errors are a few roundings of 2^-24 = 6e-8 that partly cancel; sums in
    // another order, and __expf, which is good to 2 units, deserve a few times that.
    double limit(const std::string& key, DType grad_dtype) const {
        if (FLOATX == DType::FP32) return std::max(3 * values("fp32_error/" + key)[0], 2e-6f);
        const bool loss = key == "loss" || key == "logits";
        const double rounded_sums = grad_dtype == DType::FP32 || loss ? 0 : FLOATX == DType::BF16 ? 0x1p-8 : 0x1p-11;
        return 2 * values(name_of(FLOATX) + ("_error/" + key))[0] + rounded_sums;
    }
    Setup setup(DType grad_dtype = DType::FP32) const {
        return {config, B, T, Recompute::NONE, grad_dtype, Purpose::TRAINING};
    }
    void load(Model& m, const Setup& s) const {
        allocate(m, s);
        if (FLOATX == DType::FP16) set_loss_scale(m, {float(number("fp16_loss_scale"))});   // PyTorch's there
        read_block(m.master, Kept::WHOLE, file, m, "param/");
        master_changed(m);
    }
};

void test_gradients(const Reference& r, Setup s, const std::string& heading) {
    const DType grad_dtype = s.grad_dtype;
    Model m;
    r.load(m, s);
    const Pass pass = pass_through(m, r.tokens(0, 0).data());
    Farthest logits, loss, grads;
    logits.see("logits", relative_l2(pass.logits, r.values("logits")), r.limit("logits", grad_dtype));
    logits.claim_near(heading + "logits");
    loss.see("loss", relative_l2({float(pass.loss)}, r.values("loss")), r.limit("loss", grad_dtype));
    loss.claim_near(heading + "loss");
    size_t tensors = 0;
    for_each_parameter(r.config, [&](const ParameterRow& row, size_t l, const std::string& name) {
        const std::string key = "grad/" + name;
        grads.see(key, relative_l2(part(pass.gradients, r.config, row, l), r.values(key)), r.limit(key, grad_dtype));
        tensors++;
    });
    grads.claim_near(heading + format("gradients of all %zu parameters", tensors));

    bool same = true;
    for (Recompute mode : {Recompute::SELECTIVE, Recompute::FULL}) {
        Model other;
        s.recompute = mode;
        r.load(other, s);
        same = same && pass_through(other, r.tokens(0, 0).data()) == pass;
    }
    claim(same, heading + "no bit of logits, losses or gradients depends on --recompute");
}

void test_steps(const Reference& r, DType grad_dtype, const std::string& heading) {
    Model m;
    r.load(m, r.setup(grad_dtype));
    Floats losses, norms;
    for (long step = 0; step < r.steps; step++) {
        for (long micro = 0; micro < r.accumulation; micro++)
            micro_step(m, send_batch(m, r.tokens(step, micro).data()), r.accumulation * m.setup.N());
        update(m, adamw_settings(r.options, step));
        losses.push_back(take_loss(m) / (r.accumulation * m.setup.N()));
        norms.push_back(fetch(m.a.norm()));
    }
    Farthest loss, norm, change;
    loss.see("step_loss", relative_l2(losses, r.values("step_loss")), r.limit("step_loss", grad_dtype));
    loss.claim_near(heading + format("losses of %ld AdamW steps", r.steps));
    norm.see("step_norm", relative_l2(norms, r.values("step_norm")), r.limit("step_norm", grad_dtype));
    norm.claim_near(heading + "gradient norms of those steps, some of which are clipped");
    const Floats master = from_device(m.master, m.layout.elements());
    for_each_parameter(r.config, [&](const ParameterRow& row, size_t l, const std::string& name) {
        const std::string key = "final/" + name;
        const double error = relative_l2(part(master, r.config, row, l), r.values(key), r.values("param/" + name));
        change.see(key, error, r.limit(key, grad_dtype));
    });
    change.claim_near(heading + "how far those steps have moved each parameter");
    const ParameterRow wte = parameter_table(r.config)[0];
    const auto padding = master.begin() + wte.file_elements(), end = master.begin() + wte.elements;
    if (padding != end)
        claim(std::count(padding, end, 0.0f) == end - padding, heading + "the vocabulary's padding is still zero");
    const double rounding = FLOATX == DType::FP32 ? 0 : FLOATX == DType::BF16 ? 0x1p-9 : 0x1p-12;
    claim(relative_l2(floats_from_device(m.weights, m.layout.elements()), master) <= rounding,
          heading + "the weights are the master weights, rounded");
}

// In another order of addition only gradients of the embedding change, by a rounding; a GPU's matmul
// may also round a few BF16 logits the other way where it takes another kernel for another shape.
void test_head_parts(const Reference& r) {
    const double limit = FLOATX == DType::FP32 ? 2e-6 : 0x1p-9;   // as in Reference::limit
    Model whole;
    r.load(whole, r.setup());
    const Pass expected = pass_through(whole, r.tokens(0, 0).data());
    for (size_t rows : {1, 7, 64}) {
        Model m;
        Setup s = r.setup();
        s.head_rows = rows;
        r.load(m, s);
        const Pass found = pass_through(m, r.tokens(0, 0).data());
        Farthest farthest;
        farthest.see("losses", relative_l2(found.losses, expected.losses), limit);
        farthest.see("gradients", relative_l2(found.gradients, expected.gradients), limit);
        farthest.claim_near(format("%s: losses and gradients with the head in parts of %zu rows", r.name.c_str(), rows));
    }
}

void test_reference() {
    for (const char* name : {"tiny", "odd"}) {
        const Reference r(name);
        for (DType grad_dtype : {DType::FP32, GRAD16}) {
            if (FLOATX == DType::FP32 && grad_dtype == GRAD16) continue;
            const std::string heading = format("%s, gradients in %s: ", name, name_of(grad_dtype));
            test_gradients(r, r.setup(grad_dtype), heading);
            test_steps(r, grad_dtype, heading);
        }
        Setup naive = r.setup();
        naive.attention = Attention::NAIVE;
        test_gradients(r, naive, format("%s, naive attention: ", name));
        test_head_parts(r);
    }
}

// ==== memory =================================================================

size_t free_memory() {
    size_t available = 0, all = 0;
    check(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
    return available;
}

// On a card with less shared memory than a row's gradients take, a sentence stands where CUDA would say "invalid
// argument"; one with just enough is taken. (What a card has is what the program was told.)
void test_shared_memory_of_cards() {
    const size_t usual = device.properties.sharedMemPerBlockOptin;
    const Setup s = {{1, 128, 16384, 16, 256}, 1, 16, Recompute::NONE, DType::FP32, Purpose::TRAINING};
    auto refusal = [&](size_t most) -> std::string {
        device.properties.sharedMemPerBlockOptin = most;
        try {
            require_shared_memory(s);
            return "";
        } catch (const UserError& error) {
            return error.what();
        }
    };
    const size_t needed = layernorm_shared(s.config.channels);
    const std::string less = refusal(needed - 1), enough = refusal(needed);
    device.properties.sharedMemPerBlockOptin = usual;
    claim(less.find("16384 channels") == 0 && less.find(format("%zu", needed - 1)) != less.npos && enough.empty(),
          "channels for which a block has too little shared memory are refused, with what it has", less + enough);
}

void test_memory() {
    const std::pair<const char*, size_t> COUNTS[] = {   // the sum over transformers' own tensors
        {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200}};
    for (const auto& [name, expected] : COUNTS) {
        Options o;
        o.model = name;
        const size_t found = count_parameters(config_from_options(o, 0)).real;
        claim(found == expected, format("%s has %zu parameters", name, expected), format("%zu counted", found));
    }

    // A GPU hands out memory in pieces of at most 2 MiB, so its own count may be off by that per block.
    const size_t granularity = device.is_cpu() ? 0 : 2 << 20;
    auto claim_exact = [&](const std::string& text, Recompute recompute, DType grad_dtype, Purpose purpose,
                           Attention attention = Attention::FLASH, int gpus = 1, int zero = 0,
                           MatmulIn matmul = MatmulIn::FLOATX, MasterWeights master = MasterWeights::FP32) {
        Setup setup = {{3, 2, 32, 20, 300}, 3, 17, recompute, grad_dtype, purpose, HEAD_ROWS, attention};
        setup.gpus = gpus;
        setup.zero = zero;
        setup.matmul = matmul;
        setup.master_weights = master;
        const Plan p = plan(setup);
        const size_t planned = p.total - p.bytes[static_cast<int>(Category::CUDA)];   // which CUDA has taken already
        const size_t before = free_memory();
        Model m;
        allocate(m, setup);
        const size_t taken = before - free_memory(), slack = m.blocks.size() * granularity;
        claim(m.allocated == planned && taken <= planned + slack && taken + slack >= planned,
              "planned bytes are allocated bytes: " + text,
              format("planned %zu, allocated %zu, taken from the device %zu", planned, m.allocated, taken));
    };
    for (DType grad_dtype : {DType::FP32, GRAD16})
        for (const auto& [name, recompute] : RECOMPUTE_NAMES)
            for (Attention attention : {Attention::FLASH, Attention::NAIVE})
                claim_exact(format("--recompute %s --grad-dtype %s --attention %s", name, name_of(grad_dtype),
                                   attention == Attention::FLASH ? "flash" : "naive"),
                            recompute, grad_dtype, Purpose::TRAINING, attention);
    for (int zero : {0, 1, 2, 3})
        claim_exact(format("--zero %d, 5 GPUs", zero), Recompute::NONE, DType::FP32, Purpose::TRAINING,
                    Attention::FLASH, 5, zero);
    if (FLOATX == DType::BF16)
        for (MatmulIn matmul : {MatmulIn::FP8, MatmulIn::FP8_ALL})
            for (const auto& [name, recompute] : RECOMPUTE_NAMES)
                claim_exact(format("--matmul %s --recompute %s", MATMUL_NAMES[static_cast<int>(matmul)], name), recompute,
                            DType::FP32, Purpose::TRAINING, Attention::FLASH, 1, 0, matmul);
    if (SEPARATE_MASTER)
        claim_exact("--master-weights none", Recompute::NONE, DType::FP32, Purpose::TRAINING, Attention::FLASH, 1, 0,
                    MatmulIn::FLOATX, MasterWeights::NONE);
    claim_exact("eval", Recompute::NONE, DType::FP32, Purpose::INFERENCE);
    claim_exact("sample", Recompute::NONE, DType::FP32, Purpose::SAMPLING);
    Setup s = {{3, 2, 32, 20, 300}, 1, 20, Recompute::NONE, DType::FP32, Purpose::TRAINING};
    bool exact = true;
    for (int B : {1, 5, 1000}) {
        s.B = B;
        const size_t bytes = plan(s).total;
        exact = exact && largest_micro_batch(s, bytes) == B && largest_micro_batch(s, bytes - 1) == B - 1;
    }
    claim(exact, "the largest micro-batch is the last whose plan fits, to the byte");
    test_shared_memory_of_cards();
}

// ==== Hugging Face ===========================================================

// A model of tiny's size may be as far from the truth as tiny.
double logits_limit() { return Reference("tiny").limit("logits", DType::FP32); }

void load_folder(Model& m, const std::string& dir, Purpose purpose, int B, int T) {
    allocate(m, {read_config(dir + "/config.json"), B, T, Recompute::NONE, DType::FP32, purpose});
    read_weights(m, dir);
}

// The same weights under other names, in shards and in halves.
void test_weight_files(const std::vector<RawTensor>& tensors, const Floats& expected) {
    const std::string dir = scratch("@/otherwise");
    auto same = [&](double tolerance = 0) {
        Model m;
        load_folder(m, dir, Purpose::TRAINING, 1, 8);
        return relative_l2(from_device(m.master, m.layout.elements()), expected) <= tolerance;
    };
    fs::create_directory(dir);
    fs::copy_file("data/reference/hf_tiny/config.json", dir + "/config.json");
    std::string different;
    for (const std::string prefix : {"", "model.", "_orig_mod.transformer."}) {
        std::vector<RawTensor> renamed = tensors;
        for (RawTensor& tensor : renamed) tensor.name = prefix + tensor.name.substr(strlen("transformer."));
        renamed.push_back(tensor_named(prefix + "wte.weight", renamed));
        renamed.back().name = (prefix[0] == '_' ? "_orig_mod." : "") + std::string("lm_head.weight");
        write_bytes(dir + "/model.safetensors", safetensors(renamed));
        if (!same()) different += " '" + prefix + "'";
    }
    claim(different.empty(), "names may share any prefix, and the tied head may stand beside it", different);

    std::vector<RawTensor> rounded = tensors;
    for (RawTensor& tensor : rounded) {
        std::string halves;
        for (size_t i = 2; i < tensor.bytes.size(); i += 4) halves += tensor.bytes.substr(i, 2);
        tensor.dtype = "BF16";
        tensor.bytes = halves;
    }
    write_bytes(dir + "/model.safetensors", safetensors(rounded));
    claim(same(0.01) && !same(), "weights in BF16 are read");

    std::vector<RawTensor> shards[2];
    json places;
    for (size_t i = 0; i < tensors.size(); i++) {
        shards[i % 2].push_back(tensors[i]);
        places[tensors[i].name] = format("shard-%zu.safetensors", i % 2);
    }
    for (int i : {0, 1}) write_bytes(dir + format("/shard-%d.safetensors", i), safetensors(shards[i]));
    write_json(dir + "/model.safetensors.index.json", {{"metadata", {{"total_size", 1}}}, {"weight_map", places}});
    fs::remove(dir + "/model.safetensors");
    claim(same(), "and weights in two shards, as their index says");
}

void test_folder_of_transformers() {
    const std::string dir = "data/reference/hf_tiny";
    const Safetensors file("data/reference/hf_tiny_expected.safetensors");
    const std::vector<size_t> shape = file.at("input_ids").shape;
    const std::vector<int> ids = read_ints(file, "input_ids");
    for (Purpose purpose : {Purpose::TRAINING, Purpose::INFERENCE}) {
        Model m;
        load_folder(m, dir, purpose, shape[0], shape[1]);
        upload(m.a.inputs(0), ids.data(), ids.size() * sizeof(int));
        Farthest logits;
        logits.see("logits", relative_l2(logits_of(m, m.a.inputs(0)), read_floats(file, "logits")), logits_limit());
        logits.claim_near(format("a folder that transformers wrote gives its logits, for %s",
                                 purpose == Purpose::TRAINING ? "training" : "inference"));
    }

    // The masks and the second copy of the tied head that older versions of transformers write; and
    // weights in half precision.
    std::vector<RawTensor> tensors = raw_tensors(dir + "/model.safetensors");
    tensors.push_back({"transformer.h.0.attn.bias", "U8", {1, 1, 4, 4}, std::string(16, 1)});
    tensors.push_back({"transformer.h.0.attn.masked_bias", "F32", {}, std::string(4, 0)});
    tensors.push_back(tensor_named("transformer.wte.weight", tensors));
    tensors.back().name = "lm_head.weight";
    fs::create_directory(scratch("@/old"));
    fs::copy_file(dir + "/config.json", scratch("@/old/config.json"));
    write_bytes(scratch("@/old/model.safetensors"), safetensors(tensors));
    Model plain, old;
    load_folder(plain, dir, Purpose::TRAINING, 1, 8);
    load_folder(old, scratch("@/old"), Purpose::TRAINING, 1, 8);
    claim(from_device(old.master, old.layout.elements()) == from_device(plain.master, plain.layout.elements()),
          "causal masks and a copy of the tied head in a file change nothing");
    test_weight_files(raw_tensors(dir + "/model.safetensors"), from_device(plain.master, plain.layout.elements()));
    const std::pair<uint16_t, float> HALVES[] = {{0x3c00, 1.0f}, {0xc000, -2.0f}, {0x7bff, 65504.0f}, {0x0400, 0x1p-14f},
                                                 {0x0001, 0x1p-24f}, {0x83ff, -1023 * 0x1p-24f}, {0, 0.0f}};
    claim(std::all_of(std::begin(HALVES), std::end(HALVES), [](auto& h) { return half_to_float(h.first) == h.second; }),
          "weights in FP16 are read: normal, subnormal and negative values");
}

// A model with the reference's weights, in the folder `dir`.
void write_folder(const std::string& dir, const Reference& r, Model& m) {
    fs::create_directories(dir);
    r.load(m, r.setup());
    write_model(dir, m, text_files("", m.config, TokensAre::OTHERS));
}

// Several parts of the tests need @/ours, which holds odd's weights: the first one of them writes it.
void need_our_folder() {
    Model m;
    if (!fs::exists(scratch("@/ours"))) write_folder(scratch("@/ours"), Reference("odd"), m);
}

void test_folder_of_ours() {
    const Reference r("odd");
    Model m, training, inference;
    write_folder(scratch("@/ours"), r, m);
    load_folder(training, scratch("@/ours"), Purpose::TRAINING, r.B, r.T);
    load_folder(inference, scratch("@/ours"), Purpose::INFERENCE, r.B, r.T);
    auto same = [&](const auto* a, const auto* b) { return bytes_of(from_device(a, m.layout.elements())) == bytes_of(from_device(b, m.layout.elements())); };
    claim(same(training.master, m.master), "a folder that we wrote reads back with the same bits");
    claim(same(inference.weights, m.weights), "for inference the weights are rounded as for training");
    const Safetensors file(scratch("@/ours/model.safetensors"));
    size_t tensors = 0;
    bool right = true;
    for_each_parameter(r.config, [&](const ParameterRow& row, size_t, const std::string& name) {
        tensors++;
        right = right && read_floats(file, name) == r.values("param/" + name) && file.at(name).shape == row.shape;
    });
    claim(right && file.entries().size() == tensors, "it holds each parameter once, unpadded, by Hugging Face's name");
}

// ==== data ===================================================================

// Three files of 10, 25 and 7 tokens: token i of file f is 100 f + i.
const std::vector<size_t> FILE_SIZES = {10, 25, 7};

std::string write_shards() {
    for (size_t f = 0; f < FILE_SIZES.size(); f++) {
        std::vector<uint16_t> tokens(FILE_SIZES[f]);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = 100 * f + i;
        write_bytes(scratch(format("@/shard_%zu.bin", f)), shard(tokens));
    }
    return scratch("@/shard_*.bin");
}

struct Window { std::vector<int> inputs, targets; };

Window read_window(const Tokens& tokens, Windows kind, size_t index, size_t T) {
    Window w = {std::vector<int>(T, -2), std::vector<int>(T, -2)};
    tokens.read(w.inputs.data(), w.targets.data(), kind, index, T, 1000);
    return w;
}

void test_windows() {
    const Tokens tokens(write_shards());
    const size_t T = 4;
    claim(tokens.count() == 42 && !tokens.bytes_only(), "a pattern finds all shards");

    std::vector<int> starts, expected_starts, covered, expected_covered;
    bool followed = true;
    for (Windows kind : {Windows::WHOLE, Windows::ANYWHERE})
        for (size_t w = 0; w < tokens.windows(kind, T); w++) {
            const Window window = read_window(tokens, kind, w, T);
            starts.push_back(window.inputs[0]);
            for (size_t t = 0; t < T; t++)
                followed = followed && window.inputs[t] == starts.back() + int(t) && window.targets[t] == starts.back() + int(t) + 1;
        }
    for (size_t step : {T, size_t(1)})
        for (size_t f = 0; f < FILE_SIZES.size(); f++)
            for (size_t i = 0; i + T < FILE_SIZES[f]; i += step) expected_starts.push_back(100 * f + i);
    claim(starts == expected_starts, "windows begin every T tokens, or anywhere, and do not cross a file's end");
    claim(followed, "a window's targets are its inputs, one further");

    for (size_t w = 0; w < tokens.windows(Windows::COVERING, T); w++)
        for (int target : read_window(tokens, Windows::COVERING, w, T).targets)
            if (target != -1) covered.push_back(target);
    for (size_t f = 0; f < FILE_SIZES.size(); f++)
        for (size_t i = 1; i < FILE_SIZES[f]; i++) expected_covered.push_back(100 * f + i);
    claim(covered == expected_covered, "covering windows have every token but each file's first as a target once");

    Tokens rest(scratch("@/shard_*.bin"));
    const Tokens tail = rest.split_tail(0.3);   // 12 of 42: the last file and 5 of the second
    claim(rest.count() == 30 && tail.count() == 12 && read_window(tail, Windows::WHOLE, 0, 4).inputs[0] == 120 &&
              read_window(tail, Windows::WHOLE, 1, 4).inputs[0] == 200 && rest.windows(Windows::WHOLE, 19) == 1,
          "validation takes the last tokens away, across files");
    write_bytes(scratch("@/bytes.txt"), "a\xff\n");
    const Tokens text(scratch("@/bytes.txt"));
    claim(text.bytes_only() && read_window(text, Windows::WHOLE, 0, 2).targets == std::vector<int>{255, '\n'},
          "a text's bytes are its tokens");
}

// The first inputs of the next `count` windows that a loader brings, B at a time.
std::vector<int> loaded_starts(int B, Shuffle shuffle, uint64_t seed, uint64_t first_window, size_t count) {
    const Tokens tokens(scratch("@/shard_*.bin"));
    Model m;
    allocate(m, {{1, 1, 16, 4, 1000}, B, 4, Recompute::NONE, DType::FP32, Purpose::TRAINING});
    Loader loader(m, tokens, shuffle, seed, first_window);
    std::vector<int> starts;
    for (; starts.size() < count; loader.advance()) {
        const std::vector<int> inputs = from_device(loader.current().inputs, m.setup.N());
        for (int b = 0; b < B; b++) starts.push_back(inputs[b * 4]);
    }
    return starts;
}

void test_loader() {
    write_shards();
    const std::vector<int> order = {0, 4, 100, 104, 108, 112, 116, 120, 200};
    std::vector<int> twice = order;
    twice.insert(twice.end(), order.begin(), order.end());
    claim(loaded_starts(3, Shuffle::NO, 1, 0, 18) == twice && loaded_starts(1, Shuffle::NO, 1, 0, 18) == twice,
          "with --shuffle no batches bring the windows in order, and begin anew at the end");
    const std::vector<int> one = loaded_starts(1, Shuffle::YES, 7, 0, 24);
    claim(loaded_starts(4, Shuffle::YES, 7, 0, 24) == one, "shuffled windows are the same for every micro-batch size");
    claim(loaded_starts(2, Shuffle::YES, 7, 10, 14) == std::vector<int>(one.begin() + 10, one.end()),
          "a loader that begins at window 10 goes on as one that came there");
    claim(loaded_starts(4, Shuffle::YES, 8, 0, 24) != one, "another seed brings other windows");
    // 24 draws from 30 places: 30 (1 - (29/30)^24) = 16.7 different ones are to be expected, 10 is far out.
    claim(std::set<int>(one.begin(), one.end()).size() > 10, "shuffled windows come from all over the data");
}

// The mean loss over all tokens, from one window after the other and in double.
double loss_by_hand(const std::string& dir, const Tokens& tokens, int T) {
    Model m;
    load_folder(m, dir, Purpose::INFERENCE, 1, T);
    const size_t V = m.config.vocab;
    double sum = 0;
    size_t counted = 0;
    for (size_t w = 0; w < tokens.windows(Windows::COVERING, T); w++) {
        const Window window = read_window(tokens, Windows::COVERING, w, T);
        const Floats logits = logits_of(m, send_spare(m.a.inputs, window.inputs));
        for (int t = 0; t < T; t++) {
            if (window.targets[t] < 0) continue;
            double total = 0;
            for (size_t v = 0; v < V; v++) total += exp(double(logits[t * V + v]));
            sum += log(total) - logits[t * V + window.targets[t]];
            counted++;
        }
    }
    return sum / counted;
}

// Files of 50, 1 and 23 tokens of odd's vocabulary.
void write_eval_shards() {
    size_t n = 0;
    for (size_t size : {50, 1, 23}) {
        std::vector<uint16_t> values(size);
        for (uint16_t& value : values) value = splitmix64(n++) % 101;
        write_bytes(scratch(format("@/eval_%zu.bin", size)), shard(values));
    }
}

// In windows of 11: each file's last one is cut short, and a file of one token predicts nothing.
void test_evaluation() {
    need_our_folder();
    write_eval_shards();
    const Tokens tokens(scratch("@/eval_*.bin"));
    const double expected = loss_by_hand(scratch("@/ours"), tokens, 11);
    // The same logits up to a rounding (2^-8 of those near 1 in BF16), of which a mean is taken.
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;
    for (int B : {1, 3, 16}) {
        Model m;
        load_folder(m, scratch("@/ours"), Purpose::INFERENCE, B, 11);
        const Evaluation e = evaluate(m, tokens, 0, Text("", m.config.vocab));
        claim(e.tokens == 71 && fabs(e.loss - expected) < tolerance * expected,
              format("an evaluation in micro-batches of %d counts each token once: as by hand", B),
              format("loss %.7f over %zu tokens, expected %.7f over 71", e.loss, e.tokens, expected));
    }
}

// ==== HellaSwag ==============================================================
// data/reference/hellaswag.json: for each question the sums of the losses of its endings in float64, by a plain loop in
// PyTorch, and the choices by sum and by mean.

const std::string QUESTIONS = "data/reference/hellaswag.bin";

json answers(Model& m, const std::vector<Question>& questions) {
    json all = json::array();
    const EndingLosses losses = ending_losses(m, questions);
    for (size_t q = 0; q < questions.size(); q++) {
        const Question& question = questions[q];
        all.push_back({{"sums", losses.sums[q]}, {"choices", {answer(question, losses.sums[q], By::SUM),
                                                              answer(question, losses.sums[q], By::MEAN)}}});
    }
    return all;
}

void test_hellaswag() {
    const json expected = read_json("data/reference/hellaswag.json");
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-2;   // of sums, of which some are of one token only
    for (const auto& [B, T] : {std::pair{1, 32}, {3, 32}, {64, 32}}) {
        Model m;
        load_folder(m, "data/reference/hf_tiny", Purpose::INFERENCE, B, T);
        const std::vector<Question> questions = read_questions(QUESTIONS, m.config.vocab, T);
        const json found = answers(m, questions);
        double error = found.size() == expected.size() ? 0 : INFINITY;
        bool same = true;
        for (size_t q = 0; q < std::min(found.size(), expected.size()); q++) {
            same = same && found[q]["choices"] == expected[q]["choices"];
            for (size_t e = 0; e < expected[q]["sums"].size(); e++)
                error = std::max(error, fabs(double(found[q]["sums"][e]) / double(expected[q]["sums"][e]) - 1));
        }
        claim(error < tolerance,
              format("in batches of %d x %d tokens the losses of endings are those of PyTorch", B, T),
              format("error %.1e, limit %.1e", error, tolerance));
        claim(same, "and so are the choices, by sum and by mean");
        claim(m.setup.B == B && m.setup.T == T && take_loss(m) == 0, "the model is left as it was");
    }
    const Question three = {0, {1}, {{1, 1, 1}, {1}, {1, 1}}};
    claim(answer(three, {3, 2, 3}, By::SUM) == 1 && answer(three, {3, 2, 3}, By::MEAN) == 0 &&
              answer(three, {3, 1, 2}, By::MEAN) == 0,
          "a mean is one over an ending's tokens; of equals the first is chosen");
}

// Sequences of 1 to 32 inputs, batches of up to 128 tokens: longer than need be by less than a step, or beside longer.
void test_padding() {
    Model m;
    load_folder(m, "data/reference/hf_tiny", Purpose::INFERENCE, 4, 32);
    std::vector<Question> questions;
    size_t needed = 0;
    for (int n = 0; n < 256; n++) {
        const size_t ending = 1 + n % 31;
        questions.push_back({0, {1}, {std::vector<int>(ending, 2)}});
        needed += ending;
    }
    const EndingLosses losses = ending_losses(m, questions);
    const double share = double(losses.padding) / losses.tokens;
    claim(losses.tokens - losses.padding == needed && share < 0.25,
          "endings of many lengths are batched by length: little is padding", format("%.1f %%", 100 * share));
}

// ==== graphs =================================================================

// All that three steps of three micro-steps leave behind, with an evaluation after all but the first. (The first time
// work is only done, the second time it is captured as well, the third time replayed.)
std::string bytes_of_steps(const Setup& s, bool graphs, size_t& captured) {
    const Tokens tokens("README.md");
    Options o;
    o.lr = 1e-2;
    o.warmup = 3;   // another learning rate in each
    Model m;
    allocate(m, s);
    set_loss_scale(m, {1 << 10, 0, 0, 0, 2});   // which doubles after the second step
    init_parameters(m, 1);
    m.graphs.on = graphs;
    Loader loader(m, tokens, Shuffle::YES, 7, 0);
    std::string bytes;
    for (long step = 0; step < 3; step++) {
        for (int micro = 0; micro < 3; micro++) {
            micro_step(m, loader.current(), 3 * s.N());
            loader.advance();
        }
        update(m, adamw_settings(o, step));
        bytes += bytes_of(std::vector<double>{take_loss(m), fetch(m.a.norm())});
        if (step == 0) continue;
        const Evaluation e = evaluate(m, tokens, 2 * s.B, Text("", m.config.vocab));
        bytes += bytes_of(std::vector<double>{e.loss});
    }
    for (const float* block : {m.master, m.adam_m, m.adam_v}) bytes += bytes_of(from_device(block, m.layout.elements()));
    captured = m.graphs.captured();
    const LossScale scale = fetch(m.a.loss_scale());
    return bytes + bytes_of(gradients(m)) + bytes_of(Floats{scale.scale, scale.good_steps, scale.skipped});
}

void test_graphs() {
    for (DType grad_dtype : {DType::FP32, GRAD16}) {
        if (FLOATX == DType::FP32 && grad_dtype == GRAD16) continue;
        std::vector<std::pair<Recompute, Attention>> kinds = {{Recompute::NONE, Attention::NAIVE}};
        for (const auto& [name, recompute] : RECOMPUTE_NAMES) kinds.push_back({recompute, Attention::FLASH});
        for (const auto& [recompute, attention] : kinds) {
            Setup s = {{2, 2, 32, 16, 256}, 2, 16, recompute, grad_dtype, Purpose::TRAINING, 24};   // the head in two parts
            s.attention = attention;
            size_t none = 1, captured = 0;
            const bool same = bytes_of_steps(s, false, none) == bytes_of_steps(s, true, captured);
            // A micro-step for each of the loader's two slots, the update and the evaluation.
            claim(same && none == 0 && captured == 4,
                  format("with graphs the same bits of losses, norms, weights and moments: --recompute %s, %s attention, gradients in %s",
                         RECOMPUTE_NAMES[static_cast<int>(recompute)].first, attention == Attention::FLASH ? "flash" : "naive", name_of(grad_dtype)),
                  format("%zu graphs", captured));
        }
    }
    const std::pair<const char*, std::function<void()>> WAITING[] = {
        {"cudaErrorStreamCaptureUnsupported", [] { check(cudaStreamSynchronize(device.stream), "waiting"); }},
        {"capture of something", [] { static_cast<void>(cudaStreamSynchronize(device.stream)); }}};
    for (const auto& [named, work] : WAITING) {
        Graphs graphs;
        graphs.on = true;
        std::string said;
        graphs.run("something", work);
        try {
            graphs.run("something", work);
        } catch (const Failure& error) {
            said = error.what();
        }
        cudaGetLastError();
        const DeviceArray<float> after(Values{1, 2});   // the stream is to be used again
        claim(said.find(named) != said.npos && after.download() == Values{1, 2} && graphs.captured() == 0,
              format("work that waits is no graph, but an error that says so (%s)", named), said);
    }
}

// ==== loss scaling ===========================================================

LossScale dynamic_scale(float scale) { return {scale, 0, 0, 0, GROWTH_INTERVAL}; }

// What becomes of a scale by steps whose gradients' norm, with the scale, is this.
LossScale after_norms(const LossScale& s, const Values& norms) {
    const DeviceArray<float> norm(1), loss_scale = scale_on_device(s);
    for (double scaled : norms) {
        const DeviceArray<float> partials(Values{scaled * scaled});
        gradient_norm(norm, loss_scale_in(loss_scale), partials, 1);
    }
    const Values v = loss_scale.download();
    return {float(v[0]), float(v[1]), float(v[2]), float(v[3]), float(v[4])};
}

void test_loss_scale() {
    auto is = [](const LossScale& s, float scale, float unscale, float good, float skipped) {
        return s.scale == scale && s.unscale == unscale && s.good_steps == good && s.skipped == skipped;
    };
    const LossScale first = dynamic_scale(FIRST_LOSS_SCALE), once = after_norms(first, {3, INFINITY}), nan = after_norms(first, {NAN});
    claim(is(once, 32768, 0, 0, 1) && is(nan, 32768, 0, 0, 1) && is(after_norms(once, {5}), 32768, 1 / 32768.0f, 1, 1),
          "a norm that is infinite or no number: the step is skipped, the scale halved, its good steps forgotten");
    claim(is(after_norms(dynamic_scale(1), {INFINITY}), 1, 0, 0, 1), "no scale is below 1");
    const LossScale before = after_norms(first, Values(GROWTH_INTERVAL - 1, 7));
    claim(GROWTH_INTERVAL == 2000 && is(before, 65536, 1 / 65536.0f, 1999, 0) && is(after_norms(before, {7}), 131072, 1 / 65536.0f, 0, 0),
          "after 2000 good steps in a row the scale is doubled: from the next step on");
    LossScale most = dynamic_scale(MOST_LOSS_SCALE);
    most.good_steps = GROWTH_INTERVAL - 1;
    claim(is(after_norms(most, {7}), 1 << 24, 1.0f / (1 << 24), 0, 0), "up to 2^24");
    claim(is(after_norms({8}, {INFINITY}), 8, 0.125f, 0, 0), "a fixed scale stays, and its step is not skipped");
    const AdamW late = adamw_settings({}, 9, 4), early = adamw_settings({}, 5);
    claim(late.correction1 == early.correction1 && late.correction2 == early.correction2 &&
              late.lr == adamw_settings({}, 9).lr && late.lr != early.lr,
          "AdamW's t counts the steps that were not skipped; the learning rate is that of all steps");
}

// A model after one micro-batch, whose loss's gradient is divided by so many tokens.
void after_micro_batch(Model& m, Setup s, const LossScale& scale, size_t tokens_per_step) {
    s.head_rows = 24;
    allocate(m, s);
    set_loss_scale(m, scale);
    init_parameters(m, 1);
    std::vector<int> tokens(s.B * (s.T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = splitmix64(i) % s.config.vocab;
    micro_step(m, send_batch(m, tokens.data()), tokens_per_step);
}

std::vector<Floats> weights_and_moments(const Model& m) {
    std::vector<Floats> all = {floats_from_device(m.weights, m.layout.elements())};
    for (const float* block : {m.master, m.adam_m, m.adam_v}) all.push_back(from_device(block, m.layout.elements()));
    return all;
}

void test_skipped_step(const Setup& s) {
    Model m;
    after_micro_batch(m, s, dynamic_scale(1024), s.N());
    update(m, adamw_settings({}, 0));
    const std::vector<Floats> before = weights_and_moments(m);
    micro_step(m, {m.a.inputs(0), m.a.targets(0), m.a.order(0), m.a.first(0)}, s.N());
    const float overflown = INFINITY;
    with_type(m.grads, [&](auto* g) {   // one of them
        const auto bad = static_cast<std::remove_pointer_t<decltype(g)>>(overflown);
        upload(g + m.layout.elements() / 2, &bad, sizeof(bad));
    });
    update(m, adamw_settings({}, 1));
    const LossScale after = fetch(m.a.loss_scale());
    const Floats left = gradients(m);
    claim(weights_and_moments(m) == before && !std::isfinite(fetch(m.a.norm())) && after.scale == 512 && after.skipped == 1 &&
              std::count(left.begin(), left.end(), 0.0f) == std::ptrdiff_t(left.size()),
          format("a gradient that overflows, in %s: no bit of weights and moments changes, the scale is halved, gradients are 0",
                 name_of(s.grad_dtype)));
}

// In FP32 and BF16 a power of two changes no bit, if nothing leaves their range; FP16's ends soon.
void test_scaled_gradients(const Setup& s) {
    Model plain, scaled;
    after_micro_batch(plain, s, {}, s.N());
    after_micro_batch(scaled, s, {65536}, s.N());
    const Floats truth = gradients(plain), found = gradients(scaled);
    if (FLOATX == DType::FP16) {
        const double error = relative_l2(found, truth);
        claim(error > 0 && error < 1e-3, "gradients by a loss scale of 65536 and of 1 are the same to FP16's rounding", format("error %.2e", error));
    } else {
        update(plain, adamw_settings({}, 0));
        update(scaled, adamw_settings({}, 0));
        claim(bytes_of(found) == bytes_of(truth) && weights_and_moments(plain) == weights_and_moments(scaled) &&
                  fetch(plain.a.norm()) == fetch(scaled.a.norm()),
              "a loss scale of 2^16 changes no bit of gradients, norm, weights and moments");
    }
    Model lost, kept;   // of a step of so many tokens that FP16 holds little of the loss's gradient
    const size_t times = 1 << 12;
    after_micro_batch(lost, s, {}, times * s.N());
    after_micro_batch(kept, s, {65536}, times * s.N());
    Floats tiny = truth;
    for (float& x : tiny) x /= times;
    const double without = relative_l2(gradients(lost), tiny), with = relative_l2(gradients(kept), tiny);
    const double zeros_without = zero_gradients(lost), zeros_with = zero_gradients(kept);
    const std::string numbers = format("errors %.2e and %.2e, zeros %.4f and %.4f", without, with, zeros_without, zeros_with);
    if (FLOATX == DType::FP16)
        claim(with < 1e-2 && without > 30 * with && zeros_without > 0.2 && zeros_with < 0.01, "without it gradients of a large step are lost", numbers);
    else claim(without < 1e-6 && with < 1e-6 && zeros_without == zeros_with, "gradients of a large step need none", numbers);
    double zeros = 0, all = 0;
    const size_t N = s.N(), C = s.config.channels;
    for (const auto& [x, columns] : {std::pair{lost.a.dres(), C}, {lost.a.dln(), C}, {lost.a.datt(), C}, {lost.a.dqkv(), 3 * C},
                                     {lost.a.dfc(), 4 * C}}) {
        const Floats values = floats_from_device(x, N * columns);
        zeros += std::count(values.begin(), values.end(), 0.0f);
        all += values.size();
    }
    claim(zeros_without == zeros / all && zeros_with >= 1 / (11.0 * s.T), "the share of zeros is counted right, that of first queries among them", numbers);
}

void test_loss_scaling() {
    test_loss_scale();
    Setup s = {{2, 2, 32, 16, 256}, 3, 16, Recompute::FULL, DType::FP32, Purpose::TRAINING};
    test_scaled_gradients(s);
    test_skipped_step(s);
    s.grad_dtype = FLOATX == DType::FP32 ? DType::FP32 : GRAD16;
    if (s.grad_dtype != DType::FP32) test_skipped_step(s);
}

// ==== schedule and sampling ==================================================

void test_schedule() {
    Options o;
    o.lr = 1;
    o.min_lr = 0.1;
    o.warmup = 10;
    o.steps = 110;
    struct Corner { Schedule schedule; const char* name; std::vector<std::pair<long, double>> points; };
    const std::vector<Corner> CORNERS = {
        {Schedule::COSINE,   "cosine",   {{10, 1}, {35, 0.1 + 0.9 * (2 + sqrt(2)) / 4}, {60, 0.55}, {110, 0.1}}},
        {Schedule::LINEAR,   "linear",   {{10, 1}, {35, 0.775}, {60, 0.55}, {110, 0.1}}},
        {Schedule::WSD,      "wsd",      {{10, 1}, {60, 1}, {88, 1}, {99, 0.55}, {110, 0.1}}},
        {Schedule::CONSTANT, "constant", {{10, 1}, {60, 1}, {109, 1}}},
    };
    for (const Corner& corner : CORNERS) {
        o.schedule = corner.schedule;
        std::string wrong;
        auto expect = [&](long step, double expected) {
            const double found = learning_rate(o, step);
            if (!(fabs(found - expected) < 1e-12)) wrong += format("step %ld: %g, expected %g; ", step, found, expected);
        };
        for (auto [step, expected] : {std::pair{0, 0.1}, {4, 0.5}, {9, 1.0}}) expect(step, expected);   // warm-up
        for (auto [step, expected] : corner.points) expect(step, expected);
        claim(wrong.empty(), format("learning rate of warm-up, then %s, at its corner points", corner.name), wrong);
    }
    o.schedule = Schedule::LINEAR;
    o.min_lr = -1;
    claim(fabs(learning_rate(o, 110) - 0.1) < 1e-12, "without --min-lr the learning rate ends at a tenth");
}

void test_pick_token() {
    const Floats logits = {0, 2, 1, 2, -INFINITY};
    bool greedy = true;
    std::vector<double> counts(5, 0), top2(5, 0);
    const int draws = 1000;
    for (int i = 0; i < draws; i++) {
        const double random = (i + 0.5) / draws;
        greedy = greedy && pick_token(logits, 0, 0, 1, random) == 1 && pick_token(logits, 1, 1, 1, random) == 1 &&
                 pick_token(logits, 1, 0, 0, random) == 1;
        counts[pick_token(logits, 0.5, 0, 1, random)]++;
        top2[pick_token(logits, 1, 2, 1, random)]++;
    }
    claim(greedy, "temperature 0, top-k 1, and top-p 0, always take the likeliest token, the first of equals");
    claim(top2 == std::vector<double>{0, draws / 2.0, 0, draws / 2.0, 0}, "top-k 2 takes the two likeliest tokens only");
    // The draws are spread evenly, so each count is off by one at each of its two ends at most.
    double total = 0, off = 0;
    for (float x : logits) total += exp(x / 0.5);
    for (size_t v = 0; v < logits.size(); v++)
        off = std::max(off, fabs(counts[v] - draws * exp(logits[v] / 0.5) / total));
    claim(off <= 2, "temperature 0.5 draws from the softmax of twice the logits",
          format("a count of %d is off by %.2g", draws, off));
}

// Probabilities 0.5, 0.25, 0.125, 0.125: which tokens are drawn, and how often.
void test_top_p() {
    const Floats logits = {logf(0.125f), logf(0.5f), logf(0.25f), logf(0.125f)};
    const int draws = 1000;
    struct Case { int top_k; double top_p; Values shares; };
    const std::vector<Case> CASES = {{0, 1, {0.125, 0.5, 0.25, 0.125}}, {0, 0.9, {0.125, 0.5, 0.25, 0.125}},
                                     {0, 0.87, {1 / 7.0, 4 / 7.0, 2 / 7.0, 0}}, {0, 0.6, {0, 2 / 3.0, 1 / 3.0, 0}},
                                     {0, 0.49, {0, 1, 0, 0}}, {2, 0.7, {0, 2 / 3.0, 1 / 3.0, 0}}, {2, 0.6, {0, 1, 0, 0}}};
    double off = 0;
    for (const Case& c : CASES) {
        Values counts(logits.size(), 0);
        for (int i = 0; i < draws; i++) counts[pick_token(logits, 1, c.top_k, c.top_p, (i + 0.5) / draws)]++;
        for (size_t v = 0; v < logits.size(); v++) off = std::max(off, fabs(counts[v] - draws * c.shares[v]));
    }
    claim(off <= 2, "top-p takes the fewest tokens that are as likely, and after top-k: of those that it leaves",
          format("a count of %d is off by %.2g", draws, off));
}

// Logits of what follows, from one token after those that went through before, against all of them at once. A rounding
// of floatX in each layer moves them by so much of their size.
constexpr double SAMPLING_TOLERANCE = FLOATX == DType::FP32 ? 1e-5 : 2e-2;

void test_next_logits(Model& m, const std::vector<int>& tokens) {
    double off = 0;
    for (size_t first = 1; first < 4; first++) {   // of the prompt
        std::vector<int> some(tokens.begin(), tokens.begin() + first);
        next_logits(m, some, 0, m.setup.T);
        std::vector<Floats> found;
        while (some.size() < tokens.size()) {
            some.push_back(tokens[some.size()]);
            found.push_back(next_logits(m, some, some.size() - 1, m.setup.T));
        }
        for (size_t i = 0; i < found.size(); i++) {   // afterwards, as these overwrite what the former go on from
            some.assign(tokens.begin(), tokens.begin() + first + 1 + i);
            off = std::max(off, relative_l2(found[i], next_logits(m, some, 0, m.setup.T)));
        }
    }
    claim(off < SAMPLING_TOLERANCE, "a token alone, after those before it, gives the logits of the whole sequence",
          format("relative error %.2e, limit %.2e", off, SAMPLING_TOLERANCE));
}

// A long sample, each token against the logits of all that was not forgotten then: with a temperature of 0 it has the
// largest of them, or one that is as large to rounding.
void claim_sample(const std::string& text, const Setup& setup, const std::string& dir) {
    Model m;
    allocate(m, setup);
    read_weights(m, dir);
    Options o;
    o.temperature = 0;
    o.sample_tokens = 3 * setup.T;
    std::vector<int> tokens = {7, 3}, drawn;
    sample(m, tokens, o, 1, [&](int token) { drawn.push_back(token); return true; });
    double off = 0;
    for (int token : drawn) {
        if (tokens.size() > static_cast<size_t>(setup.T)) tokens.erase(tokens.begin(), tokens.end() - setup.T / 2);
        const Floats logits = next_logits(m, tokens, 0, setup.T);
        const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
        off = std::max(off, double(*high - logits[token]) / (*high - *low));
        tokens.push_back(token);
    }
    claim(drawn.size() == static_cast<size_t>(o.sample_tokens) && off < SAMPLING_TOLERANCE, text,
          format("%zu tokens; one is off by %.2e of the logits' range, limit %.2e", drawn.size(), off,
                 SAMPLING_TOLERANCE));
}

void test_sampling() {
    need_our_folder();
    const std::string dir = scratch("@/ours");
    const Config config = read_config(dir + "/config.json");
    Setup setup = {config, 1, config.context, Recompute::NONE, DType::FP32, Purpose::SAMPLING, 1};
    {
        Model m;
        allocate(m, setup);
        read_weights(m, dir);
        std::vector<int> tokens(config.context);
        for (size_t n = 0; n < tokens.size(); n++) tokens[n] = splitmix64(n) % config.vocab;
        test_next_logits(m, tokens);
    }
    claim_sample("past the context a sample goes on from the younger half of it", setup, dir);
    setup.attention = Attention::NAIVE;
    claim_sample("a sample with --attention naive is of the same logits", setup, dir);
    setup.attention = Attention::FLASH;
    setup.purpose = Purpose::TRAINING;
    setup.B = 2;
    for (const auto& [name, recompute] : RECOMPUTE_NAMES) {
        setup.recompute = recompute;
        claim_sample(format("a sample while training with --recompute %s is of the same logits", name), setup, dir);
    }
}

// What a Printer prints to a file of a prompt and the parts of a sample, each followed by a bar.
std::string printed(const std::string& stop, const std::string& prompt, const std::vector<std::string>& parts) {
    const std::string path = scratch("@/printed");
    FILE* to = fopen(path.c_str(), "wb");
    Printer printer(to, stop);
    printer.prompt(prompt);
    fputc('|', to);
    bool more = true;
    for (size_t i = 0; more && i < parts.size(); i++) {
        more = printer.add(parts[i]);
        fputc('|', to);
    }
    printer.end();
    fclose(to);
    return read_bytes(path);
}

void test_printer() {
    claim(printed("", "a\xc3", {"\xa9", "b", "\xf0\x9f", "\x98", "\x80", "\xe2", "(", "\xff", "\xe2\x82"}) ==
              "a|\xc3\xa9|b|||\xf0\x9f\x98\x80||\xe2(|\xff||\xe2\x82",
          "a character is held back until it is whole, what is none only until that is clear");
    claim(printed("END", "END.", {"a", "E", "N", "b", "xEN", "D", "never"}) == "END.|a|||ENb|x||",
          "the text that ends a sample is not printed, nor looked for in the prompt; its beginnings are printed late");
    claim(printed("END", "", {"aENDb", "c"}) == "||a",
          "what a token has behind that text is not printed");
    claim(printed("\xc3\xa9", "", {"e\xc3", "\xa9"}) == "|e||", "that text may be a character in two tokens");
}

// A terminal that is none: what is written to its one end comes out at the other.
void test_terminal() {
    const int outside = posix_openpt(O_RDWR | O_NOCTTY);
    const bool there = outside >= 0 && grantpt(outside) == 0 && unlockpt(outside) == 0;
    // O_NOCTTY: else it would be the terminal of this process, which its end would hang up.
    FILE* inside = there ? fdopen(open(ptsname(outside), O_RDWR | O_NOCTTY), "r+") : nullptr;
    if (!inside) {
        printf("        no pseudo-terminal can be had here: %s\n", strerror(errno));
        return;
    }
    Printer printer(inside, "");
    printer.prompt("\tcaf\xc3\xa9 \x1b[2J");
    for (const char* part : {"\x07\x7f", "\xc2\x9b|", "\x9b", "\n", "\xe2\x82"}) printer.add(part);
    printer.end();
    fflush(inside);
    std::string text, expected = "\tcaf\xc3\xa9 R[2JRRR|R\r\nRR";
    for (size_t at; (at = expected.find('R')) != expected.npos;) expected.replace(at, 1, REPLACEMENT_CHARACTER);
    pollfd ready = {outside, POLLIN, 0};
    char part[200];
    for (ssize_t n = 0; n >= 0 && text.size() < expected.size() && poll(&ready, 1, 1000) > 0;) {
        n = read(outside, part, sizeof(part));
        text.append(part, std::max<ssize_t>(n, 0));
    }
    claim(text == expected, "a terminal gets no control byte but line breaks and tabs, and UTF-8 only", text);
    fclose(inside);
    close(outside);
}

void test_fitted() {
    const std::vector<LinePart> parts = {{0, "step 1"}, {3, " [####]"}, {1, " loss 2"}, {2, " speed"}};
    claim(fitted(parts, 26) == "step 1 [####] loss 2 speed" && fitted(parts, 25) == "step 1 loss 2 speed" &&
              fitted(parts, 18) == "step 1 loss 2" && fitted(parts, 12) == "step 1" && fitted(parts, 3) == "ste",
          "a line that is too long loses its least important parts first");
}

void test_shell_word() {
    std::string wrong;
    for (const std::string text :
         {"runs/a-b_1.c", "", "it's", "two words", "$HOME `x` \"y\" \\ *", "~", "caf\xc3\xa9", "a\nb"}) {
        FILE* shell = popen(("printf '%s.' " + shell_word(text)).c_str(), "r");
        std::string read;
        for (int c; shell && (c = getc(shell)) != EOF;) read += static_cast<char>(c);
        if (shell) pclose(shell);
        if (read != text + ".") wrong += text + " became " + read;
    }
    claim(wrong.empty() && shell_word("runs/a-b_1.c") == "runs/a-b_1.c" && shell_word("it's") == "'it'\\''s'",
          "a shell reads a quoted word as it was; plain paths need no quotes", wrong);
}

void test_readable() {
    const std::string text = "To be,\n\tor caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8c\x8d";
    claim(readable(text) == text, "samples show text as it is, in any script");
    claim(readable(std::string("\x1b[2J\x07|\0|\xff\xc3(\xc2\x9b|\xe2\x82", 16)) == ".[2J.|.|..(.|..",
          "and dots for control bytes and for what is no UTF-8", readable("\x1b[2J"));
}

// ==== running train_gpt ======================================================
// `test_gpt --as-train-gpt ...` is train_gpt itself, so that a command line can be tested as a whole.

struct Outcome {
    int code;   // exit status, or -signal
    std::string out, err;
};

// What eval printed, but for its last line, the speed.
std::string but_for_speed(const Outcome& e) {
    return e.out.size() < 2 ? "" : e.out.substr(0, e.out.rfind('\n', e.out.size() - 2) + 1);
}

// What the program itself has said: on some processors the stand-in excuses itself for slow products.
std::string without_excuse(std::string text) {
#ifdef CUDA_ON_CPU
    const std::string excuse = cuda_cpu::excuse + std::string("\n");
    if (const size_t at = text.find(excuse); at != text.npos) text.erase(at, excuse.size());
#endif
    return text;
}

class Run {
public:
    // Words, of the command and of the environment, are separated by blanks; '' is an empty one; <FILE is standard
    // input, >FILE standard output. Files may be limited in size, like on a full disk. What runs keep for later runs
    // stays in the tests' folder.
    explicit Run(const std::string& command, const std::string& environment = "", size_t file_limit = RLIM_INFINITY) {
        std::vector<std::string> args = {"test_gpt", "--as-train-gpt"};
        std::istringstream words(command);
        std::string input = "/dev/null", output;
        for (std::string word; words >> word;) {
            if (word[0] == '<') input = scratch(word.substr(1));
            else if (word[0] == '>') output = scratch(word.substr(1));
            else args.push_back(word == "''" ? "" : scratch(word));
        }
        std::vector<std::string> variables;   // of two of a name the first counts
        std::istringstream own_variables(environment);
        for (std::string variable; own_variables >> variable;) variables.push_back(scratch(variable));
        variables.push_back("OMP_NUM_THREADS=1");   // tiny models: threads would only wait
        variables.push_back(scratch("XDG_CACHE_HOME=@/cache"));
        for (char** variable = environ; *variable; variable++)
            if (strncmp(*variable, "OMP_NUM_THREADS=", 16) != 0 && strncmp(*variable, "XDG_CACHE_HOME=", 15) != 0) variables.push_back(*variable);
        static int runs = 0;
        out_ = output.empty() ? scratch(format("@/stdout_%d", runs)) : output;
        own_out_ = output.empty();
        err_ = scratch(format("@/stderr_%d", runs++));
        const std::vector<char*> argv = pointers(args), envp = pointers(variables);
        pid_ = fork();
        if (pid_ < 0) throw Failure("fork: %s", strerror(errno));
        if (pid_ > 0) return;
        // Until exec nothing but system calls: OpenMP's and CUDA's threads have not come along.
        for (auto [path, number] : {std::pair{&out_, STDOUT_FILENO}, {&err_, STDERR_FILENO}})
            dup2(open(path->c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), number);
        dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
        const rlimit limit = {file_limit, file_limit};
        setrlimit(RLIMIT_FSIZE, &limit);
        signal(SIGXFSZ, SIG_IGN);   // then write() fails instead
        signal(SIGHUP, SIG_DFL);    // under nohup it would be ignored
        execve("/proc/self/exe", argv.data(), envp.data());
        _exit(127);
    }
    Run(const Run&) = delete;
    ~Run() {
        if (pid_ > 0) end(SIGKILL);
    }

    void send_signal(int number) const { kill(pid_, number); }
    // Whether the run has mapped a file.
    bool maps(const std::string& path) const {
        return read_bytes(format("/proc/%d/maps", pid_)).find(scratch(path)) != std::string::npos;
    }
    Outcome end(int number = 0) {
        if (number) send_signal(number);
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {}
        pid_ = 0;
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        const Outcome outcome = {code, own_out_ ? read_bytes(out_) : "", without_excuse(read_bytes(err_))};
        if (own_out_) fs::remove(out_);
        fs::remove(err_);
        return outcome;
    }

private:
    static std::vector<char*> pointers(std::vector<std::string>& texts) {
        std::vector<char*> found;
        for (std::string& text : texts) found.push_back(text.data());
        found.push_back(nullptr);
        return found;
    }

    pid_t pid_ = 0;
    std::string out_, err_;
    bool own_out_;
};

Outcome run(const std::string& command, const std::string& environment = "") { return Run(command, environment).end(); }

// A claim about a run; what the run printed matters when the claim fails.
void claim_run(bool holds, const std::string& text, const Outcome& run, const std::string& detail = "") {
    claim(holds, text, holds ? "" : format("exit code %d; %s%s%s", run.code, run.out.c_str(), run.err.c_str(), detail.c_str()));
}

// In place of the C library's: a run under test may be asked to write down what it flushes to disk, a line each, with the
// number of lines of the log and the checkpoints that are there at that moment.
extern "C" int fsync(int file) {
    if (const char* to = getenv("TEST_FSYNCS")) {
        const fs::path path = fs::read_symlink(format("/proc/self/fd/%d", file));
        const std::string bytes = fs::is_regular_file(path) ? read_bytes(path) : "";
        std::ofstream(to, std::ios::app) << path.filename().string() << ' ' << std::count(bytes.begin(), bytes.end(), '\n')
                                         << ' ' << list_checkpoints(path.parent_path()).size() << '\n';
    }
    return static_cast<int>(syscall(SYS_fsync, file));
}

// Waits for something that a run will do; false: it has not within a minute.
bool wait_until(const std::function<bool()>& true_now) {
    for (int i = 0; i < 60000; i++) {
        if (true_now()) return true;
        usleep(1000);
    }
    return false;
}

// A log without what differs from run to run: the first record (it names --out) and the times.
// Numbers stay as they were printed: 17 digits, so equal text is equal bits.
std::vector<std::string> log_of(const std::string& out) {
    std::vector<std::string> records;
    std::istringstream lines(read_bytes(scratch(out + "/log.jsonl")));
    for (std::string line; std::getline(lines, line);) {
        json record = json::parse(line, nullptr, false);
        if (!record.is_object() || record.contains("run")) continue;   // no object: it is just being written
        for (const char* key : {"ms", "tokens_per_s", "mfu", "hfu"}) record.erase(key);
        records.push_back(record.dump());
    }
    return records;
}

bool same_file(const std::string& a, const std::string& b) {
    const std::string bytes = read_bytes(scratch(a));
    return !bytes.empty() && bytes == read_bytes(scratch(b));
}

// What is wrong with a checkpoint, read as a whole; empty: nothing.
std::string damage(const std::string& dir) {
    try {
        const Config c = read_config(dir + "/config.json");
        const Safetensors model(dir + "/model.safetensors"), optimizer(dir + "/optimizer.safetensors");
        read_json(dir + "/trainer.json").at("next_window");
        for_each_parameter(c, [&](const ParameterRow& row, size_t, const std::string& name) {
            model.floats(name, row.shape);
            optimizer.floats("m/" + name, row.shape);
            optimizer.floats("v/" + name, row.shape);
        });
        return "";
    } catch (const std::exception& error) {
        return error.what();
    }
}

// Text to train on: three words in an order that is not quite random, so that there is something to learn.
const std::string SMALL = " --layers 2 --heads 2 --channels 32 --context 16 --data @/text.txt ";

void write_text() {
    std::string text;
    for (uint64_t i = 0, word = 0; text.size() < 3000; i++) {
        word = (word + splitmix64(i) % 2) % 3;
        text += word == 0 ? "the cat " : word == 1 ? "sat on " : "a mat\n";
    }
    write_bytes(scratch("@/text.txt"), text);
}

// A run that never ends by itself.
const std::string ENDLESS = "train" + SMALL + "--micro-batch 1 --steps 1000000 --schedule constant --eval-every 0 ";

const std::string TOKENIZER = "data/reference/tokenizer";

// @/words: a model of 800 tokens with the tokenizer of the reference, which has 757. @/numbers: the same without.
void need_words() {
    if (fs::exists(scratch("@/words"))) return;
    const std::string text = read_bytes(scratch("@/text.txt"));
    write_bytes(scratch("@/numbers.bin"), shard({text.begin(), text.end()}));
    run("train --layers 1 --heads 1 --channels 16 --context 64 --vocab 800 --steps 1 --data @/numbers.bin "
        "--eval-every 0 --out @/of_numbers");
    fs::rename(scratch("@/of_numbers/step_000001"), scratch("@/numbers"));
    fs::copy(scratch("@/numbers"), scratch("@/words"));
    fs::copy(TOKENIZER + "/tokenizer.json", scratch("@/words/tokenizer.json"));
}

// ==== runs: the same bits ====================================================

const std::string TEN = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 10 --lr 1e-2 --warmup 3 "
                        "--eval-every 5 --eval-sequences 4 --checkpoint-every 5 ";

// Several parts of the tests need @/first, this run's folder: the first one of them runs it.
void need_first_run() {
    if (!fs::exists(scratch("@/first"))) run(TEN + "--out @/first");
}

void test_repeated_runs() {
    const Outcome first = run(TEN + "--out @/first");
    const std::vector<std::string> log = log_of("@/first");
    claim_run(first.code == 0 && log.size() == 12, "a run of 10 steps logs 10 steps and 2 evaluations", first);
    if (log.size() != 12) return;
    auto loss = [&](size_t record) { return double(json::parse(log[record])["loss"]); };
    claim(loss(11 - 1) < loss(0) - 1, "its loss falls", format("from %f to %f", loss(0), loss(10)));

    auto same = [&](const std::string& command, const std::string& environment, const std::string& text) {
        const Outcome outcome = run(command + " --out @/other", environment);
        bool same_files = true;
        for (const std::string file : {"/step_000010/model.safetensors", "/step_000010/optimizer.safetensors"})
            same_files = same_files && same_file("@/first" + file, "@/other" + file);
        claim_run(outcome.code == 0 && log_of("@/other") == log && same_files, text, outcome);
        fs::remove_all(scratch("@/other"));
    };
    same(TEN, "", "the same command gives the same bits");
    same(TEN + "--recompute selective", "", "--recompute selective gives the same bits");
    same(TEN + "--recompute full", "", "--recompute full gives the same bits");
    same(TEN + "--sample-every 3 --sample-tokens 5", "", "sampling on the way changes no bit");
    same(TEN + "--graph off", "", "--graph off gives the same bits");
    same(TEN + "--graph on --sample-every 3 --sample-tokens 5", "", "--graph on gives the same bits");
#ifdef CUDA_ON_CPU
    if (WARP_SIZE > 1)
        for (const char* seed : {"CUDA_CPU_SEED=1", "CUDA_CPU_SEED=2"})
            for (const char* graph : {"", "--graph on"})
                same(TEN + graph, seed, format("another order of threads gives the same bits (%s%s)", seed, graph));
#endif
    fs::create_directory(scratch("@/other"));
    fs::copy(scratch("@/first/step_000005"), scratch("@/other/step_000005"));
    const std::string cut_short = "{\"step\": 11, \"lo";   // by a crash
    write_bytes(scratch("@/other/log.jsonl"), read_bytes(scratch("@/first/log.jsonl")) + cut_short);
    same(TEN + "--resume --graph on", "", "stopped and resumed at step 5 it logs and saves the same bits as never stopped");

    fs::create_directory(scratch("@/other"));
    fs::copy(scratch("@/first/step_000005"), scratch("@/other/step_000005"));
    write_bytes(scratch("@/other/log.jsonl"), read_bytes(scratch("@/first/log.jsonl")));
    same("train --resume", "", "so it does with --resume and --out alone: the options are the run's");

    const json trainer = read_json(scratch("@/first/step_000010/trainer.json"));
    claim(trainer.at("step") == 10 && trainer.at("next_window") == 40 && damage(scratch("@/first/step_000010")).empty(),
          "a checkpoint knows its step and the next window");
}

// What a run without a master copy keeps are its weights, exactly; of updates that are too small nothing is left.
void test_runs_without_master() {
    if (!SEPARATE_MASTER) return;
    const std::string command = TEN + "--master-weights none ";
    const Outcome whole = run(command + "--out @/no_master");
    auto record = [&](const std::string& out, size_t line) { return json::parse(log_of(out)[line]); };
    bool logged = whole.code == 0;
    for (size_t line : {0, 4, 9}) logged = logged && record("@/no_master", line).value("unchanged", -1.0) > 0;
    claim_run(logged, "--master-weights none logs the share of weights that a step left as they were", whole);
    fs::create_directory(scratch("@/half_master"));
    fs::rename(scratch("@/no_master/step_000005"), scratch("@/half_master/step_000005"));
    fs::copy(scratch("@/no_master/log.jsonl"), scratch("@/half_master/log.jsonl"));
    run(command + "--resume --out @/half_master");
    bool same = log_of("@/no_master") == log_of("@/half_master");
    for (const std::string file : {"/step_000010/model.safetensors", "/step_000010/optimizer.safetensors"})
        same = same && same_file("@/no_master" + file, "@/half_master" + file);
    claim(same, "stopped and resumed it logs and saves the same bits as never stopped");
    bool exact = true;
    const Safetensors file(scratch("@/no_master/step_000010/model.safetensors"));
    for (const auto& [name, entry] : file.entries())
        for (float x : file.floats(name, entry.shape)) exact = exact && static_cast<float>(floatX(x)) == x;
    claim(exact, "the model in its checkpoint is in 16 bits, exactly");

    // LayerNorm's weights begin at 1, whose neighbours in BF16 are 2^-8 below and 2^-7 above.
    const std::string slow = "train" + SMALL + "--micro-batch 2 --eval-every 0 --schedule constant --lr 1e-4 --steps 3 ";
    const Outcome without = run(slow + "--master-weights none --out @/slow"), with = run(slow + "--out @/slow_copy");
    auto ones = [&](const std::string& out) {
        const Floats values = read_floats(Safetensors(scratch(out + "/step_000003/model.safetensors")), "ln_f.weight");
        return std::count(values.begin(), values.end(), 1.0f);
    };
    claim_run(without.code == 0 && ones("@/slow") == 32 && record("@/slow", 2).value("unchanged", 0.0) > 0.1,
              "updates that are too small change no weight without a copy, and are counted", without);
    claim_run(with.code == 0 && ones("@/slow_copy") < 32, "and change the copy where there is one", with);
}

void test_resume_options() {
    need_first_run();
    fs::copy(scratch("@/first"), scratch("@/longer"), fs::copy_options::recursive);
    const Outcome longer = run("train --resume --out @/longer --steps 12 --lr 0.005 --eval-every 0");
    const std::vector<std::string> log = log_of("@/longer");
    const json options = read_json(scratch("@/longer/step_000012/trainer.json"))["options"];
    claim_run(longer.code == 0 && log.size() == 14 && options["lr"] == 0.005 && options["warmup"] == 3 &&
                  longer.out.find("resume     --lr was 0.01, is now 0.005\n") != std::string::npos &&
                  longer.out.find("resume     --steps was 10, is now 12\n") != std::string::npos &&
                  longer.out.find("--warmup") == std::string::npos,
              "what is given beside --resume replaces the run's option, and is said", longer);
    const Outcome equal = run("train --resume --out @/longer --steps 13 --layers 2 --heads 2 --vocab 256");
    claim_run(equal.code == 0, "the model's own sizes may be given beside --resume", equal);
    write_bytes(scratch("@/less.txt"), read_bytes(scratch("@/text.txt")).substr(0, 2000));
    const Outcome less = run("train --resume --out @/longer --steps 14 --data @/less.txt");
    claim_run(less.code == 0 && equal.out.find("tokens to train on, now") == std::string::npos &&
                  less.out.find("resume     there were 3004 tokens to train on, now there are 2000\n") != std::string::npos,
              "going on with other data is said", less);
    const std::string path = scratch("@/longer/step_000014/trainer.json");
    json older = read_json(path);
    older["options"]["eval-batches"] = 20;   // an option that there was
    older.erase("train_tokens");
    write_json(path, older);
    const Outcome of_older = run("train --resume --out @/longer --steps 15");
    claim_run(of_older.code == 0 &&
                  of_older.out.find("resume     --eval-batches was 20, is no option any more\n") != std::string::npos,
              "a checkpoint with an option that is gone can be gone on from, and it is said", of_older);
    fs::remove_all(scratch("@/longer"));
}

// The beginning of a run that goes on from step 5 of @/scaled, whose checkpoint there is given this scale.
void resume_scaled(const std::string& to, long scale, long skipped = 0) {
    fs::create_directory(scratch(to));
    fs::copy(scratch("@/scaled/step_000005"), scratch(to + "/step_000005"));
    write_bytes(scratch(to + "/log.jsonl"), read_bytes(scratch("@/scaled/log.jsonl")));
    const std::string path = scratch(to + "/step_000005/trainer.json");
    json trainer = read_json(path);
    trainer["loss_scaling"]["scale"] = scale;
    trainer["loss_scaling"]["skipped_steps"] = skipped;
    write_json(path, trainer);
}

void test_loss_scaling_runs() {
    const Outcome scaled = run(TEN + "--loss-scaling dynamic --out @/scaled");
    const std::vector<std::string> log = log_of("@/scaled");
    auto state = [](const std::string& dir) { return read_json(scratch(dir + "/trainer.json")).value("loss_scaling", json()).dump(); };
    const std::string expected = "{\"scale\":65536,\"good_steps\":10,\"skipped_steps\":0}";
    claim_run(scaled.code == 0 && scaled.out.find("loss scale 65536 at first, dynamic\n") != scaled.out.npos && state("@/scaled/step_000010") == expected &&
                  json::parse(log[0])["loss_scale"] == 65536 && json::parse(log[4]).contains("zero_gradients"),
              "--loss-scaling dynamic: the log and checkpoints have the scale", scaled, state("@/scaled/step_000010"));
    resume_scaled("@/scaled_again", 65536);
    const Outcome again = run("train --resume --out @/scaled_again");
    claim_run(again.code == 0 && log_of("@/scaled_again") == log && state("@/scaled_again/step_000010") == expected &&
                  same_file("@/scaled/step_000010/model.safetensors", "@/scaled_again/step_000010/model.safetensors"),
              "stopped and resumed it gives the same bits, and the same scale", again);

    resume_scaled("@/skipped_all", 65536, 5);
    const Outcome skipped_all = run("train --resume --out @/skipped_all");
    claim_run(skipped_all.code == 0 && json::parse(log_of("@/skipped_all")[7])["skipped_steps"] == 5 &&
                  !same_file("@/scaled/step_000010/model.safetensors", "@/skipped_all/step_000010/model.safetensors"),
              "AdamW does not count the steps that the checkpoint says were skipped", skipped_all);

    // A run without, gone on with by default as a build of another precision would.
    need_first_run();
    const bool by_default = FLOATX == DType::FP16;
    claim((state("@/first/step_000010") == expected) == by_default && (json::parse(log_of("@/first")[0]).contains("loss_scale")) == by_default,
          "by default gradients are scaled in FP16, and not otherwise");
    fs::copy(scratch("@/first"), scratch("@/unscaled"), fs::copy_options::recursive);
    json trainer = read_json(scratch("@/unscaled/step_000010/trainer.json"));
    trainer.erase("loss_scaling");
    write_json(scratch("@/unscaled/step_000010/trainer.json"), trainer);
    const Outcome other = run("train --resume --out @/unscaled --steps 11 --loss-scaling dynamic");
    claim_run(other.code == 0 && state("@/unscaled/step_000011") == "{\"scale\":65536,\"good_steps\":1,\"skipped_steps\":0}",
              "from a checkpoint without a scale a run goes on with the first one", other);

    const Outcome fixed = run(TEN + "--loss-scaling 128 --out @/fixed"), none = run(TEN + "--loss-scaling none --out @/none");
    bool same_bits = true;
    for (const std::string file : {"/step_000010/model.safetensors", "/step_000010/optimizer.safetensors"})
        same_bits = same_bits && same_file("@/fixed" + file, "@/none" + file);
    claim_run(fixed.code == 0 && none.code == 0 && same_bits == (FLOATX != DType::FP16) && state("@/fixed/step_000010") == "null",
              "--loss-scaling 128 and none: in BF16 and FP32 the same bits, in FP16 others", fixed, none.err);

    if (FLOATX != DType::FP16) return;   // for what overflows
    resume_scaled("@/overflows", 1 << 24);
    const Outcome overflows = run("train --resume --out @/overflows --graph on --steps 15");
    long skipped = 0;
    double scale = 1 << 24;
    bool right = overflows.code == 0;
    for (const std::string& line : log_of("@/overflows")) {
        const json record = json::parse(line);
        if (record["step"] <= 5 || !record.contains("norm")) continue;
        right = right && record["loss_scale"] == scale;
        if (record["norm"].is_null()) {
            scale /= 2;
            skipped++;
        }
        right = right && record["skipped_steps"] == skipped;
    }
    claim_run(right && skipped > 0 && skipped < 10 &&
                  state("@/overflows/step_000015") == format("{\"scale\":%.0f,\"good_steps\":%ld,\"skipped_steps\":%ld}", scale, 10 - skipped, skipped),
              "a scale that is too large: steps are skipped until it is not", overflows, format("%ld skipped", skipped));
    const Outcome ends = run(TEN + "--loss-scaling 16777216");
    claim_run(ends.code == 1 && ends.err.find("gradient norm") != ends.err.npos, "where it is fixed the run ends", ends);
}

// Weights that stay what they are, with a learning rate of 0.
void test_eval_sequences() {
    std::vector<double> losses;
    bool right = true;
    for (int B : {1, 3, 4}) {
        const std::string out = format("@/sequences_%d", B);
        const Outcome outcome = run("train" + SMALL + format("--micro-batch %d --steps 1 --lr 0 --min-lr 0 ", B) +
                                    "--eval-every 1 --eval-sequences 7 --checkpoint-every 0 --out " + out);
        right = right && outcome.out.find(format(" over %d tokens\n", 7 * 16)) != std::string::npos;
        const std::vector<std::string> log = log_of(out);
        losses.push_back(log.empty() ? NAN : json::parse(log.back()).value("val_loss", NAN));
    }
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;   // as in test_evaluation
    const double most = std::max(fabs(losses[1] / losses[0] - 1), fabs(losses[2] / losses[0] - 1));
    claim(right && most < tolerance, "--eval-sequences 7 is the same loss by micro-batches of 1, 3 and 4",
          format("%.9f %.9f %.9f", losses[0], losses[1], losses[2]));
}

// The same tokens in the same order, split differently: sums in another order. In BF16 a matmul of
// another shape may round now and then the other way, and AdamW's first steps carry that on.
void test_accumulation() {
    const double tolerance = FLOATX == DType::FP32 ? 1e-5 : 2e-3;
    std::vector<Floats> losses;
    for (int B : {8, 4, 1}) {
        const std::string out = format("@/split_%d", B);
        run("train" + SMALL + format("--micro-batch %d --total-batch 128 --shuffle no --steps 5 --lr 3e-3 ", B) +
            "--eval-every 0 --checkpoint-every 0 --out " + out);
        losses.emplace_back();
        for (const std::string& record : log_of(out)) losses.back().push_back(json::parse(record)["loss"]);
    }
    Farthest farthest;
    farthest.see("2 x 4", relative_l2(losses[1], losses[0]), tolerance);
    farthest.see("8 x 1", relative_l2(losses[2], losses[0]), tolerance);
    farthest.claim_near("losses of 1 x 8, 2 x 4 and 8 x 1 sequences a step agree");
}

// ==== runs: threads ==========================================================

// Large enough that a matmul is shared by the CPU's threads.
const std::string SHARED = "train --layers 1 --heads 2 --channels 64 --context 64 --micro-batch 8 --data @/text.txt "
                           "--steps 3 --lr 1e-2 --eval-every 0 --checkpoint-every 3 ";

void test_threads() {
    if (!device.is_cpu()) return;
    // libgomp names each thread of a team.
    const std::string names = "OMP_DISPLAY_AFFINITY=true OMP_AFFINITY_FORMAT=%n_of_%N";
    const Outcome one = run(SHARED + "--threads 1 --out @/threads_1", names);
    const Outcome two = run(SHARED + "--threads 2 --out @/threads_2", names);
    claim_run(two.err.find("1_of_2") != std::string::npos && one.err.find("1_of_") == std::string::npos,
              "--threads 2 runs on 2 threads, --threads 1 on 1", two, one.err);
    bool same_files = true;
    for (const std::string file : {"/step_000003/model.safetensors", "/step_000003/optimizer.safetensors"})
        same_files = same_files && same_file("@/threads_1" + file, "@/threads_2" + file);
    claim_run(same_files && log_of("@/threads_1") == log_of("@/threads_2"), "both give the same bits", two, one.err);
}

// Programs that want every core twice over.
class Load {
public:
    Load() {
        for (long i = 0; i < 2 * sysconf(_SC_NPROCESSORS_ONLN); i++) {
            const pid_t child = fork();
            if (child > 0) children_.push_back(child);
            if (child != 0) continue;
            alarm(120);   // should nobody be left to end it
            for (volatile bool forever = true; forever;) {}
        }
    }
    ~Load() {
        for (pid_t child : children_) {
            kill(child, SIGKILL);
            waitpid(child, nullptr, 0);
        }
    }

private:
    std::vector<pid_t> children_;
};

void test_busy_machine() {
    claim(busy_text(0).empty() && busy_text(0.09).empty(), "nothing is said of a quiet machine");
    claim(busy_text(0.344).find("34 %") != std::string::npos,
          "of a busy one, which share of their time threads waited for a core", busy_text(0.344));
    if (!device.is_cpu()) return;
    const Load load;
    const Outcome trained = run(SHARED + "--out @/busy");
    const Outcome sampled = run("sample --from @/busy/step_000003 --sample-tokens 200");
    const std::string line = "machine    busy: ";
    claim_run(trained.out.find(line) != std::string::npos, "a run beside other programs says so at its start", trained);
    claim_run(sampled.err.find(line) == 0 && sampled.out.find(line) == std::string::npos,
              "so does a sample, beside the text", sampled);
}

// ==== runs: matmul tuning ====================================================
// A GPU has a choice of its own. On a CPU the stand-in offers one where it is asked to: algorithms that
// cannot be used, that fail, that must not be used, and slow ones, before the good ones.

const std::string CHOICE = "CUDA_CPU_MATMULS=refused,slow,in_place,failing,plain,fast ";
const std::string OF_TWO = "CUDA_CPU_MATMULS=plain,fast ";   // where it does not matter which: sooner timed
const std::string KEPT = "@/tuning/gpt.cu/matmul.json";
const std::string TUNED = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 4 --lr 1e-2 --eval-every 2 --checkpoint-every 0 ";

struct TunedRun {
    Outcome outcome;
    std::string line;                // what it says of matmuls
    std::vector<std::string> log;
    Floats losses;
};

TunedRun tuned_run(const std::string& flags, const std::string& environment) {
    TunedRun r = {run(TUNED + flags + " --out @/tuned", environment + " XDG_CACHE_HOME=@/tuning"), "", log_of("@/tuned"), {}};
    for (const std::string& record : r.log) r.losses.push_back(json::parse(record).value("loss", 0.0));
    std::istringstream lines(r.outcome.out);
    for (std::string line; std::getline(lines, line);)
        if (line.rfind("matmul ", 0) == 0) r.line += line + "\n";
    fs::remove_all(scratch("@/tuned"));
    return r;
}

std::string tuned_shapes(size_t timed, size_t known) {
    return timed == 0 ? format(" %zu shapes known from ", known) : format(" %zu shapes timed in ", timed);
}

// Files with which nothing can be done, and what is said of each.
void test_damaged_choices(const std::string& intact, const Floats& expected, double tolerance) {
    const json file = json::parse(intact);
    const std::string here = tuning_device(), algorithm = file["devices"][here].begin().value();
    auto replaced = [&](const std::string& part, const std::string& by) {
        std::string text = intact;
        return text.replace(text.find(part), part.size(), by);
    };
    const std::pair<std::string, const char*> DAMAGED[] = {
        {intact.substr(0, intact.size() / 2), "not valid JSON"}, {"", "the file is empty"}, {"[1, 2]", "type"},
        {replaced("\"format\": 1", "\"format\": 2"), "not of format 1"}, {replaced(algorithm, algorithm.substr(1)), "is no algorithm"},
        {replaced(algorithm, "x" + algorithm.substr(1)), "is no algorithm"}, {R"({"format": 1, "devices": [{}]})", "is no object"},
        {"{\"format\": 1, \"devices\": {\"" + here + "\": \"" + algorithm + "\"}}", "is no object"}, {R"({"format": 1})", "devices"},
        {"", "not a regular file"}};
    std::string wrong;
    for (const auto& [bytes, why] : DAMAGED) {
        write_bytes(scratch(KEPT), bytes);
        if (why == std::string("not a regular file")) {   // a pipe, into which nobody writes
            fs::remove(scratch(KEPT));
            mkfifo(scratch(KEPT).c_str(), 0600);
        }
        const TunedRun r = tuned_run("", OF_TWO);
        const bool told = r.line.find(scratch("matmul     " + KEPT)) == 0 && r.line.find(why) != r.line.npos &&
                          std::count(r.line.begin(), r.line.end(), '\n') == 2 && r.outcome.err.empty();
        const json after = json::parse(read_bytes(scratch(KEPT)), nullptr, false);
        const bool mended = after.is_object() && after["devices"][here].size() == file["devices"][here].size();
        if (r.outcome.code != 0 || !told || !mended || !(relative_l2(r.losses, expected) <= tolerance)) wrong += why + std::string(": ") + r.line + r.outcome.err;
    }
    claim(wrong.empty(), format("%zu damaged files of choices are told of in a line, ignored and replaced", std::size(DAMAGED)), wrong);
}

#ifdef CUDA_ON_CPU
// GELU' of the product before it: a kernel's name in the trace tells where it was.
void test_forced_fusion(json file) {
    auto kernels = [&](const char* choice) {
        for (auto& [shape, text] : file["devices"][tuning_device()].items())
            if (ends_with(shape, FUSION)) text = choice;
        write_bytes(scratch(KEPT), file.dump());
        tuned_run("--trace @/fusion.json", CHOICE);
        const std::string trace = read_bytes(scratch("@/fusion.json"));
        size_t count = 0;
        for (size_t at = 0; (at = trace.find("\"gelu_backward\"", at)) != trace.npos; at++) count++;
        return count;
    };
    const size_t fused = kernels(FUSED), apart = kernels(APART);
    claim(fused == 0 && apart > 0, "GELU' is in the product or behind it, as the file says",
          format("%zu and %zu launches of gelu_backward", fused, apart));
}

// That a choice is really taken shows in the rounding of one that clears the last bits of its sums.
void test_forced_choice(json file, double tolerance) {
    test_forced_fusion(file);
    auto all = [&](cuda_cpu::Algorithm algorithm) {
        for (auto& [shape, text] : file["devices"][tuning_device()].items())
            text = ends_with(shape, FUSION) ? FUSED : algorithm_text({{static_cast<uint64_t>(algorithm)}});
        write_bytes(scratch(KEPT), file.dump());
        return tuned_run("", CHOICE);
    };
    const TunedRun plain = all(cuda_cpu::Algorithm::plain), coarse = all(cuda_cpu::Algorithm::coarse);
    const TunedRun fast = all(cuda_cpu::Algorithm::fast);
    const double error = relative_l2(plain.losses, coarse.losses);
    claim(plain.log != coarse.log && error <= tolerance, "the algorithms of the file are those that multiply",
          format("error %.2e, limit %.2e", error, tolerance));
    const TunedRun ruled_out = tuned_run("", "CUDA_CPU_MATMULS=slow,in_place"), usable = tuned_run("--matmul-tuning off", "CUDA_CPU_MATMULS=refused,plain");
    claim(ruled_out.outcome.code == 0 && ruled_out.line.empty(), "sums in the output's place are no choice", ruled_out.line);
    claim_run(usable.log == plain.log, "with --matmul-tuning off the first algorithm that can be used multiplies", usable.outcome);
    const TunedRun none = tuned_run("", "");
    claim(none.line.empty() && none.log == fast.log, "where there is one algorithm only, none is chosen and no file is read", none.line);
    const std::string EVAL_TUNED = "eval --from @/first/step_000010 --data @/text.txt --micro-batch 3 ";
    const Outcome tuned = run(EVAL_TUNED, OF_TWO), first = run(EVAL_TUNED + "--matmul-tuning off");
    double losses[2] = {NAN, NAN};
    sscanf(tuned.out.c_str(), "loss %lf", &losses[0]);
    sscanf(first.out.c_str(), "loss %lf", &losses[1]);
    claim_run(tuned.code == 0 && tuned.err.find("shapes timed") != tuned.err.npos && fabs(losses[0] - losses[1]) <= tolerance * losses[1],
              "eval tunes as well, and prints its result alone on standard output", tuned);
}
#else
void test_forced_choice(json, double) {}
#endif

void test_matmul_tuning() {
    need_first_run();
    const double tolerance = FLOATX == DType::FP32 ? 1e-5 : 2e-3;   // as in test_accumulation
    const TunedRun off = tuned_run("--matmul-tuning off", "");
    // Under a seed all memory begins as NaN: a gradient that tuning has left behind would show.
    const TunedRun on = tuned_run("", CHOICE + "CUDA_CPU_SEED=1");
    const std::string intact = read_bytes(scratch(KEPT));
    const json file = json::parse(intact, nullptr, false);
    const size_t shapes = file.is_object() ? file["devices"][tuning_device()].size() : 0;
    claim(off.line.empty() && off.losses.size() == 6, "with --matmul-tuning off nothing is timed", off.line);
    // A block's four matmuls and the head: once forward, twice backward; one of them with GELU' in it and without, and
    // which of both. On a GPU some may have one algorithm only.
    claim_run(on.outcome.code == 0 && (device.is_cpu() ? shapes == 17 : shapes > 0) &&
                  on.line.find(tuned_shapes(shapes, 0)) != on.line.npos,
              "with it each shape is timed once, and kept in a file", on.outcome);
    if (shapes == 0) return;
    const double error = relative_l2(on.losses, off.losses);
    claim(error <= tolerance, "losses with the fastest algorithms are those with the first ones, up to rounding", format("error %.2e, limit %.2e", error, tolerance));
#ifdef CUDA_ON_CPU
    bool sensible = true;
    for (const auto& [shape, text] : file["devices"][tuning_device()].items()) {
        if (ends_with(shape, FUSION)) continue;
        const auto algorithm = static_cast<cuda_cpu::Algorithm>(parse_algorithm(text).data[0]);
        sensible = sensible && (algorithm == cuda_cpu::Algorithm::plain || algorithm == cuda_cpu::Algorithm::fast);
    }
    claim(sensible, "none is slow, fails, cannot be used, or sums in the output's place", sensible ? "" : intact);
#endif
    const TunedRun again = tuned_run("", CHOICE);
    claim_run(again.log == on.log && again.line.find(tuned_shapes(0, shapes)) != again.line.npos && read_bytes(scratch(KEPT)) == intact,
              "a second run times nothing, takes what is kept, and gives the same bits", again.outcome);

    test_damaged_choices(intact, off.losses, tolerance);

    // Of another version, and of this one but for an algorithm that this one does not have.
    json other = file, foreign = file;
    foreign["devices"]["another, 9.0, cuBLASLt 1"] = foreign["devices"][tuning_device()];
    foreign["devices"].erase(tuning_device());
    write_bytes(scratch(KEPT), foreign.dump());
    const TunedRun anew = tuned_run("", OF_TWO);
    const json both = json::parse(read_bytes(scratch(KEPT)));
    claim_run(anew.line.find("matmul.json: holds nothing for " + tuning_device() + ": ignored\n") != anew.line.npos &&
                  anew.line.find(tuned_shapes(shapes, 0)) != anew.line.npos && relative_l2(anew.losses, off.losses) <= tolerance,
              "choices of another device or version are told of, and not taken", anew.outcome);
    claim(both["devices"].size() == 2 && both["devices"]["another, 9.0, cuBLASLt 1"] == foreign["devices"]["another, 9.0, cuBLASLt 1"],
          "and are still there when this device's have joined them");
    other["devices"][tuning_device()].begin().value() = std::string(128, 'f');
    write_bytes(scratch(KEPT), other.dump());
    const TunedRun one = tuned_run("", CHOICE);
    claim_run(one.line.find(tuned_shapes(1, 0)) != one.line.npos && one.line.find(format("%zu known", shapes - 1)) != one.line.npos &&
                  relative_l2(one.losses, off.losses) <= tolerance, "an algorithm that the device does not have is timed for anew", one.outcome);

    const std::string text = read_bytes(scratch("@/text.txt"));
    const Outcome unkept = run(TUNED, OF_TWO + "XDG_CACHE_HOME=@/text.txt");
    claim_run(unkept.code == 0 && unkept.err.empty() && unkept.out.find("the choice is not kept\n") != unkept.out.npos && read_bytes(scratch("@/text.txt")) == text,
              "where the file cannot be written a line says so, and the run goes on", unkept);
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(scratch("@/tuning/gpt.cu"))) files += entry.is_regular_file();
    claim(files == 1, "nothing unfinished is left beside the file");
    test_forced_choice(file, tolerance);
}

// ==== runs: what they write ==================================================

void test_auto_micro_batch() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch auto --total-batch 112 --steps 1");
    claim_run(outcome.code == 0 && outcome.out.find("7 x 16 tokens x 1 micro-batches = 112 tokens") != outcome.out.npos,
              "--micro-batch auto takes as many sequences as fit and divide the step", outcome);
}

void test_log() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch 2 --steps 3 --eval-every 3 --checkpoint-every 1 --keep 1 --out @/log");
    std::istringstream lines(read_bytes(scratch("@/log/log.jsonl")));
    std::vector<json> records;
    for (std::string line; std::getline(lines, line);) records.push_back(json::parse(line, nullptr, false));
    bool right = outcome.code == 0 && records.size() == 5;
    auto has = [](const json& record, std::vector<const char*> keys) {
        bool all = record.is_object();
        for (const char* key : keys) all = all && record.contains(key);
        return all;
    };
    right = right && has(records[0], {"run"});
    right = right && has(records[0]["run"], {"options", "model", "device", "cuda_runtime", "cuda_driver", "cublaslt"});
    for (size_t i = 1; right && i < 4; i++)
        right = has(records[i], {"step", "loss", "norm", "lr", "ms", "tokens_per_s", "mfu", "hfu"}) && records[i]["step"] == i;
    right = right && has(records[4], {"step", "val_loss"}) && records[4]["step"] == 3;
    claim_run(right, "log.jsonl holds the run, its steps and its evaluations, an object a line", outcome);
    claim(right && records[0]["run"]["options"]["micro-batch"] == 2 && records[0]["run"]["model"]["vocab"] == 256,
          "its first object holds options and model as they were");
    const auto kept = list_checkpoints(scratch("@/log"));
    claim(kept.size() == 1 && kept.count(3), "--keep 1 keeps the last checkpoint");
}

// A log into which a disk or a hand has written what no run did.
void test_damaged_log() {
    need_first_run();
    fs::create_directory(scratch("@/scarred"));
    fs::copy(scratch("@/first/step_000005"), scratch("@/scarred/step_000005"));
    const std::string log = read_bytes(scratch("@/first/log.jsonl"));
    const size_t first_end = log.find('\n') + 1;
    const std::string deep(1000000, '[');
    const std::vector<std::string> damaged = {"{\"step\": \"3\"}", "{\"step\": -1}", "{\"step\": 1e300}", "{\"step\": 2.5}", "[4]", deep,
                           "{\"\xff\": 1}", "{\"step\": 1, \"step\": 2}", "", "{\"step\": 18446744073709551617}"};
    std::string lines;
    for (const std::string& line : damaged) lines += line + "\n";
    write_bytes(scratch("@/scarred/log.jsonl"), log.substr(0, first_end) + lines + log.substr(first_end) + "{\"st");
    const Outcome resumed = run("train --resume --out @/scarred");
    claim_run(resumed.code == 0 && log_of("@/scarred") == log_of("@/first") &&
                  resumed.out.find(scratch("resume     @/scarred/log.jsonl: 10 damaged lines are left out, line 2: ")) !=
                      std::string::npos,
              "--resume leaves out of the log what is damaged, and says so", resumed);
    fs::remove_all(scratch("@/scarred/step_000010"));
    write_bytes(scratch("@/scarred/log.jsonl"), "{\"run\": " + log.substr(first_end));
    const Outcome headless = run("train --resume --out @/scarred");
    const std::string mended = read_bytes(scratch("@/scarred/log.jsonl"));
    claim_run(headless.code == 0 && json::parse(mended.substr(0, mended.find('\n')), nullptr, false).contains("run"),
              "a log whose first line is damaged has one again that holds the run", headless);
    for (const std::string& line : damaged) {
        fs::create_directory(scratch("@/no_run_yet"));
        write_bytes(scratch("@/no_run_yet/log.jsonl"), line + "\n");
        const Outcome refused = run("train --resume --data @/text.txt --out @/no_run_yet --steps 1");
        claim_run(refused.code == 2 && refused.err.find(scratch("@/no_run_yet/log.jsonl: line 1")) != std::string::npos &&
                      read_bytes(scratch("@/no_run_yet/log.jsonl")) == line + "\n",
                  format("a first line that holds no options (%s) is named, and nothing is touched",
                         one_line(line.substr(0, 10)).c_str()), refused);
    }
}

// The power may fail at any time: what a checkpoint's steps logged must be on disk before it is a checkpoint.
void test_log_on_disk() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch 1 --steps 2 --eval-every 0 --checkpoint-every 1 --out @/synced",
                                "TEST_FSYNCS=@/fsyncs");
    std::istringstream lines(read_bytes(scratch("@/fsyncs")));
    std::vector<std::string> of_log;
    for (std::string line; std::getline(lines, line);)
        if (line.rfind("log.jsonl ", 0) == 0) of_log.push_back(line);
    claim_run(outcome.code == 0 && of_log == std::vector<std::string>{"log.jsonl 2 0", "log.jsonl 3 1"},
              "the log is flushed to disk before each checkpoint is there", outcome,
              read_bytes(scratch("@/fsyncs")));
}

// The lines of steps that a run draws on a terminal of so many columns; empty where no terminal can be had.
std::vector<std::string> drawn_steps(const std::string& command, unsigned short columns) {
    const int outside = posix_openpt(O_RDWR | O_NOCTTY);
    const winsize size = {24, columns, 0, 0};
    const bool there = outside >= 0 && grantpt(outside) == 0 && unlockpt(outside) == 0 &&
                       ioctl(outside, TIOCSWINSZ, &size) == 0;
    const int inside = there ? open(ptsname(outside), O_RDWR | O_NOCTTY) : -1;   // so that it is open until the end
    std::vector<std::string> lines;
    if (inside < 0) return lines;
    Run run(command + " >" + ptsname(outside));
    std::string text;
    pollfd ready = {outside, POLLIN, 0};
    char part[4096];
    while (text.find("next ") == text.npos && poll(&ready, 1, 60000) > 0) {
        const ssize_t n = read(outside, part, sizeof(part));
        if (n <= 0) break;
        text.append(part, n);
    }
    run.end();
    close(inside);
    close(outside);
    std::istringstream drawn(text);
    for (std::string line; std::getline(drawn, line, '\r');) {
        const size_t end = line.find("\033[K");
        if (end != line.npos && line.rfind("step", 0) == 0) lines.push_back(line.substr(0, end));
    }
    return lines;
}

void test_terminal_width() {
    const std::string COMMAND = "train" + SMALL + "--micro-batch 2 --steps 4 --eval-every 0";
    for (const auto& [columns, least, shown, gone] :
         {std::tuple{200, 80, "left", "\n"}, {80, 60, "tok/s", "[#"}, {40, 25, "loss", "MFU"}, {12, 5, "step", "loss"}}) {
        const std::vector<std::string> lines = drawn_steps(COMMAND, columns);
        if (lines.empty()) {
            printf("        no pseudo-terminal can be had here: %s\n", strerror(errno));
            return;
        }
        std::string wrong;
        for (const std::string& line : lines)
            if (line.size() >= static_cast<size_t>(columns) || line.size() < static_cast<size_t>(least) ||
                line.find(shown) == line.npos || line.find(gone) != line.npos)
                wrong += "'" + line + "' ";
        claim(wrong.empty() && lines.size() >= 2, format("the line of steps fits a terminal of %d columns", columns),
              wrong);
    }
    const Outcome piped = run(COMMAND);
    claim_run(piped.out.find("step 1/4 [#####...............] loss") != piped.out.npos &&
                  piped.out.find("left\n") != piped.out.npos && piped.out.find('\r') == piped.out.npos,
              "elsewhere it is whole, a line at a time", piped);
}

// The commands that a run names at its end, by the first word of their lines.
std::map<std::string, std::string> next_commands(const std::string& out) {
    std::map<std::string, std::string> commands;
    std::istringstream lines(out.substr(std::min(out.size(), out.find("\ndone "))));
    for (std::string line; std::getline(lines, line);)
        if (line.size() > 11) commands[line.substr(0, line.find("  "))] = line.substr(11);
    return commands;
}

void test_next_commands() {
    fs::create_directory(scratch("@/my"));
    Run interrupted(ENDLESS + "--checkpoint-every 0 --beta2 0.99 --out @/my/it's");
    wait_until([] { return log_of("@/my/it's").size() >= 3; });
    const Outcome stopped = interrupted.end(SIGINT);
    auto next = next_commands(stopped.out);
    const std::string checkpoint = scratch(format("@/my/it's/step_%06zu", log_of("@/my/it's").size()));
    claim_run(stopped.code == 0 && next.size() == 5 &&
                  next["sample"] == "test_gpt sample --from " + shell_word(checkpoint) &&
                  next["plot"] == "python3 scripts/plot.py " + shell_word(scratch("@/my/it's")) &&
                  next["open"].rfind("python3 ", 0) == 0 &&
                  next["open"].find(shell_word(checkpoint)) != std::string::npos,
              "a run that was stopped names the commands that sample, plot and open its last checkpoint", stopped);
    // The shell reads the command; the program is this one, the number of steps one that can be reached.
    const std::string go_on = next["go on"], words = go_on.substr(std::min(go_on.size(), strlen("test_gpt ")));
    const size_t steps = log_of("@/my/it's").size() + 2;
    const std::string command = format("XDG_CACHE_HOME=%s /proc/%d/exe --as-train-gpt %s --steps %zu > %s 2>&1",
                                       scratch("@/cache").c_str(), getpid(), words.c_str(), steps,
                                       scratch("@/went_on").c_str());
    const int status = system(command.c_str());
    const Outcome went_on = {status, read_bytes(scratch("@/went_on")), go_on};
    claim_run(status == 0 && log_of("@/my/it's").size() == steps && go_on.find("--resume") != go_on.npos &&
                  went_on.out.find("resume     --steps was") != std::string::npos &&
                  went_on.out.find("resume     --beta2 was") == std::string::npos,
              "and the one that goes on with it does, by the same options", went_on);
    claim_run(next_commands(went_on.out).count("go on") == 0, "a run that is done is not gone on with", went_on);
    const Outcome nowhere = run("train" + SMALL + "--steps 1");
    claim_run(next_commands(nowhere.out).size() == 2 && next_commands(nowhere.out).count("next"),
              "without --out a line says what it would have made possible", nowhere);
    need_words();
    const Outcome numbers = run("train --from @/numbers --data @/numbers.bin --steps 1 --out @/more_numbers");
    const std::string sample = next_commands(numbers.out)["sample"];
    const std::string options = sample.substr(std::min(sample.size(), strlen("test_gpt sample ")));
    const Outcome sampled = run("sample --sample-tokens 2 " + options);
    claim_run(sampled.code == 0 && sample.find("--prompt-tokens 799") != sample.npos,
              "of a model without text the sample's prompt is a token", sampled, sample);
}

void test_plan_json() {
    const Outcome outcome = run("plan --model gpt2 --micro-batch 4 --recompute full --gpu-memory 80GB --json");
    const json plan = json::parse(outcome.out, nullptr, false);
    bool right = outcome.code == 0 && plan.is_object() && plan.value("parameters", 0) == 124439808;
    const json leaves = plan.flatten();
    for (const char* path : {"/bytes/weights", "/bytes/gradients", "/bytes/master", "/bytes/adam_m", "/bytes/adam_v",
                             "/bytes/activations", "/bytes/workspace", "/bytes/total", "/bytes_per_parameter",
                             "/flops_per_token/model", "/flops_per_token/hardware", "/max_micro_batch/none",
                             "/max_micro_batch/selective", "/max_micro_batch/full", "/tensors/0/name",
                             "/tensors/0/shape/0", "/tensors/0/dtype", "/tensors/0/bytes"})
        right = right && leaves.contains(path);
    claim_run(right, "plan --json has the keys that it promises", outcome);
    if (!right) return;
    const json &bytes = plan["bytes"], &most = plan["max_micro_batch"];
    size_t sum = 0, tensors = 0;
    for (const auto& [name, n] : bytes.items())
        if (name != "total") sum += size_t(n);
    claim(sum == bytes["total"], "its bytes add up to the total");
    for (const json& tensor : plan["tensors"]) tensors += size_t(tensor["bytes"]);
    claim(tensors == size_t(bytes["weights"]) + size_t(bytes["activations"]) + size_t(bytes["workspace"]),
          "and its tensors' bytes to weights, activations and workspace");
    const std::string HUGE = "plan --gpu-memory 80GB --layers 1024 --heads 4096 --channels 65536 --context 4194304 "
                             "--micro-batch 511 --attention naive";
    const Outcome table = run(HUGE), record = run(HUGE + " --json");
    claim_run(plan.value("bytes_are_exact", false) && record.out.find("\"bytes_are_exact\": false") != record.out.npos &&
                  table.code == 0 && table.out.find("\nmemory     more than 72 PB of 80.00 GB\n") != std::string::npos &&
                  table.out.find("without flash attention: more than 72 PB in all\n") != std::string::npos,
              "what is too large to be counted is said to be more than what is counted", table, record.err);
    claim(plan["precision"] == "bf16", "with --gpu-memory it plans in BF16, as a card builds");
    claim(0 < most["none"] && most["none"] < most["selective"] && most["selective"] < most["full"],
          "the more is recomputed, the larger the micro-batch that fits", most.dump());
}

void test_plan_without_master() {
    const std::string command = "plan --model gpt2 --gpu-memory 80GB --json";
    const Outcome with = run(command), without = run(command + " --master-weights none");
    const json a = json::parse(with.out, nullptr, false), b = json::parse(without.out, nullptr, false);
    const bool planned = with.code == 0 && without.code == 0 && a.is_object() && b.is_object();
    claim_run(planned && b["bytes"]["master"] == 0 && b["master_weights"] == "none" && a["master_weights"] == "fp32" &&
                  size_t(a["bytes"]["total"]) - size_t(b["bytes"]["total"]) ==
                      size_t(a["bytes"]["master"]) - sizeof(unsigned long long) &&
                  double(a["bytes_per_parameter"]) - double(b["bytes_per_parameter"]) == 4,
              "plan --master-weights none has 4 bytes a parameter less, but for a count", without, with.err);
}

// What the recipes train with fits where they say that it does.
void test_recipes() {
    int recipes = 0;
    for (const auto& entry : fs::directory_iterator("scripts")) {
        const std::string name = entry.path().filename(), text = read_bytes(entry.path());
        const size_t options = text.rfind("--model "), end = text.find(" --lr");
        if (name.rfind("gpt2_", 0) != 0 || options == text.npos || end == text.npos) continue;
        recipes++;
        const Outcome planned = run("plan --gpu-memory 80GB " + text.substr(options, end - options));
        const size_t at = planned.out.find("memory "), number = planned.out.find_first_of("0123456789", at);
        const std::string total = planned.out.substr(number, planned.out.find(" of ", number) - number);
        claim_run(planned.code == 0 && planned.out.find("\n  fits") != planned.out.npos &&
                      text.find(total) != text.npos,
                  name + " trains with what plan says fits into 80GB, and says so", planned, total);
    }
    claim(recipes == 4, "so do all recipes for GPT-2", std::to_string(recipes));
}

// Both sequences of hf_tiny_expected in a shard of their own; the loss from transformers' logits.
void test_verbs_on_folder() {
    need_first_run();
    const Safetensors file("data/reference/hf_tiny_expected.safetensors");
    const std::vector<int> ids = read_ints(file, "input_ids");
    const Floats logits = read_floats(file, "logits");
    const size_t B = file.at("logits").shape[0], T = file.at("logits").shape[1], V = file.at("logits").shape[2];
    double expected = 0;
    for (size_t b = 0; b < B; b++) {
        write_bytes(scratch(format("@/hf_%zu.bin", b)), shard({ids.begin() + b * T, ids.begin() + (b + 1) * T}));
        for (size_t n = b * T; n + 1 < (b + 1) * T; n++) {
            double sum = 0;
            for (size_t v = 0; v < V; v++) sum += exp(double(logits[n * V + v]));
            expected += (log(sum) - logits[n * V + ids[n + 1]]) / (B * (T - 1));
        }
    }
    const Outcome e = run("eval --from data/reference/hf_tiny --data @/hf_*.bin");
    double loss = 0;
    size_t tokens = 0;
    const int fields = sscanf(e.out.c_str(), "loss %lf over %zu tokens", &loss, &tokens);
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;   // as in test_evaluation
    claim_run(e.code == 0 && fields == 2 && tokens == B * (T - 1) && fabs(loss - expected) < tolerance * expected,
              "eval prints the loss that transformers' logits have", e, format("expected %.6f", expected));

    const std::string SAMPLE = "sample --from data/reference/hf_tiny --sample-tokens 40 --prompt-tokens 1,2,3 ";
    const Outcome greedy = run(SAMPLE + "--temperature 0"), top_1 = run(SAMPLE + "--top-k 1 --seed 3");
    const Outcome random = run(SAMPLE + "--seed 3"), again = run(SAMPLE + "--seed 3");
    std::istringstream words(greedy.out);
    const size_t count = std::distance(std::istream_iterator<int>(words), {});
    claim_run(greedy.code == 0 && count == 43 && greedy.out.rfind("1 2 3 ", 0) == 0,
              "sample goes on from a prompt, past the context", greedy);
    claim(top_1.out == greedy.out && random.out != greedy.out && random.out == again.out,
          "top-k 1 is temperature 0; a seed gives the same sample again");
    const Outcome of_run = run("eval --from @/first --data @/text.txt --matmul-tuning off");
    const Outcome of_last = run("eval --from @/first/step_000010 --data @/text.txt --matmul-tuning off");
    claim_run(of_run.code == 0 && but_for_speed(of_run) == but_for_speed(of_last) &&
                  of_run.err.find("/first/step_000010") != std::string::npos,
              "--from RUN is the run's last checkpoint, and says so", of_run, of_last.out);
    const Outcome bytes = run("sample --from @/first/step_000010 --prompt cat --sample-tokens 4");
    claim_run(bytes.code == 0 && bytes.out.rfind("cat", 0) == 0 && bytes.out.size() == 8,
              "a model of bytes goes on from a text", bytes);
    const Outcome train = run("train --from data/reference/hf_tiny --data @/hf_*.bin --val-fraction 0 --seq-len 31 "
                              "--shuffle no --micro-batch 2 --steps 1 --checkpoint-every 0 --out @/from_hf");
    const std::vector<std::string> log = log_of("@/from_hf");
    const double start = log.empty() ? NAN : double(json::parse(log[0])["loss"]);
    claim_run(train.code == 0 && fabs(start - expected) < tolerance * expected, "train --from begins with that loss",
              train);
}

// What eval prints after the loss, by hand.
void test_eval_lines() {
    need_words();
    need_first_run();
    const Tokenizer tokenizer(TOKENIZER);
    const int end = tokenizer.added("<|endoftext|>");
    std::vector<uint16_t> tokens;
    size_t bytes = 0;
    for (const char* text : {"Once upon a time", "caf\xc3\xa9, and nothing more"}) {
        tokens.push_back(end);
        for (int token : tokenizer.encode(text)) tokens.push_back(token);
        bytes += strlen(text);
    }
    tokens.push_back(790);   // of the 800, one that the tokenizer does not have
    write_bytes(scratch("@/words.bin"), shard(tokens));
    auto read = [](const Outcome& e, double (&x)[4], size_t (&n)[2]) {
        const char* lines = "loss %lf over %zu tokens\nperplexity %lf\nbits per byte %lf over %zu bytes";
        return sscanf(e.out.c_str(), lines, &x[0], &n[0], &x[1], &x[2], &n[1]);
    };
    double x[4];
    size_t n[2];
    const Outcome words = run("eval --from @/words --data @/words.bin");
    claim_run(words.code == 0 && read(words, x, n) == 5 && n[0] == tokens.size() - 1 && n[1] == bytes &&
                  fabs(x[1] - exp(x[0])) < 1e-3 * x[1] && fabs(x[2] - x[0] * n[0] / (log(2) * bytes)) < 1e-3 &&
                  words.out.find(" tok/s\n") != words.out.npos,
              "eval prints perplexity, bits per byte of the text without <|endoftext|>, and speed", words);
    const Outcome of_bytes = run("eval --from @/first/step_000010 --data @/text.txt");
    claim_run(of_bytes.code == 0 && read(of_bytes, x, n) == 5 && n[0] == n[1] && fabs(x[2] - x[0] / log(2)) < 1e-3,
              "of a model of bytes they are the loss over ln 2", of_bytes);
    const Outcome numbers = run("eval --from @/numbers --data @/words.bin");
    claim_run(numbers.code == 0 && numbers.out.find("perplexity") != numbers.out.npos &&
                  numbers.out.find("per byte") == numbers.out.npos,
              "without a tokenizer no bits per byte are printed", numbers);
    fs::copy(scratch("@/words"), scratch("@/other_words"));
    write_bytes(scratch("@/other_words/tokenizer.json"), "{}");
    const Outcome other = run("eval --from @/other_words --data @/words.bin");
    claim_run(other.code == 0 && other.out.rfind(numbers.out.substr(0, 20), 0) == 0 &&
                  other.err.find(scratch("@/other_words/tokenizer.json")) != other.err.npos,
              "nor with one that cannot be read, which is named", other);

    // Weights that make the loss overflow.
    fs::copy(scratch("@/numbers"), scratch("@/overflow"));
    std::vector<RawTensor> tensors = raw_tensors(scratch("@/overflow/model.safetensors"));
    RawTensor& last = tensor_named("ln_f.weight", tensors);
    last.bytes = bytes_of(Floats(16, 3e38f));
    write_bytes(scratch("@/overflow/model.safetensors"), safetensors(tensors));
    const Outcome overflow = run("eval --from @/overflow --data @/words.bin");
    claim_run(overflow.code == 1 && overflow.out.find("loss") == overflow.out.npos &&
                  overflow.err.find("mean loss") != overflow.err.npos,
              "a loss that is not finite is an error, with exit code 1", overflow);
    const Outcome answers = run("eval --from @/overflow --hellaswag " + QUESTIONS);
    claim_run(answers.code == 1 && answers.err.find("HellaSwag") != answers.err.npos, "likewise of HellaSwag", answers);
}

void test_hellaswag_runs() {
    const json expected = read_json("data/reference/hellaswag.json");
    const std::vector<Question> questions = read_questions(QUESTIONS, 211, 32);
    double right[2] = {};   // by sum, by mean
    for (size_t q = 0; q < questions.size(); q++)
        for (int by : {0, 1})
            right[by] += (expected[q]["choices"][by] == questions[q].label) / double(questions.size());
    const std::string text = format("HellaSwag acc_norm %.4f, accuracy %.4f over %zu questions\n", right[1], right[0],
                                    questions.size());
    const Outcome e = run("eval --from data/reference/hf_tiny --hellaswag " + QUESTIONS);
    claim_run(e.code == 0 && right[0] != right[1] && e.out.rfind(text, 0) == 0,
              "eval --hellaswag prints the share of right choices", e, text);

    std::vector<uint16_t> tokens(400);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = splitmix64(i) % 211;
    write_bytes(scratch("@/of_211.bin"), shard(tokens));
    const std::string COMMAND = "train --from data/reference/hf_tiny --data @/of_211.bin --val-fraction 0 --steps 2 "
                                "--lr 1e-9 --eval-every 1 --checkpoint-every 0 --out @/";
    const Outcome with = run(COMMAND + "asked --hellaswag " + QUESTIONS), without = run(COMMAND + "unasked");
    std::vector<double> scores;
    std::string steps, expected_steps;
    for (const std::string& record : log_of("@/asked")) {
        if (json::parse(record).contains("hellaswag")) scores.push_back(json::parse(record)["hellaswag"]);
        else steps += record;
    }
    for (const std::string& record : log_of("@/unasked")) expected_steps += record;
    claim_run(with.code == 0 && scores == std::vector<double>{right[1], right[1]} &&
                  with.out.find("step 1: " + text) != with.out.npos,
              "train --hellaswag does with every validation, and logs acc_norm", with);
    claim_run(!steps.empty() && steps == expected_steps, "and goes on with the same bits as without", without);
}

// ==== runs: text =============================================================

void test_text_of_tokens() {
    need_words();
    const std::string prompt = "Once upon a time, caf\xc3\xa9", WORDS = "sample --from @/words --sample-tokens 40 ";
    const Tokenizer tokenizer(TOKENIZER);
    std::string numbers, expected = prompt;
    for (int token : tokenizer.encode(prompt)) numbers += format("%d,", token);
    const Outcome plain = run("sample --from @/numbers --sample-tokens 40 --prompt-tokens " + numbers);
    std::istringstream tokens(plain.out.substr(std::min(plain.out.size(), numbers.size())));
    for (int token; tokens >> token;) expected += tokenizer.decode(token);
    write_bytes(scratch("@/prompt.txt"), prompt);
    const Outcome words = run(WORDS + "--prompt - <@/prompt.txt"), by_number = run(WORDS + "--prompt-tokens " + numbers);
    claim_run(words.code == 0 && expected.size() > prompt.size() + 20 && words.out == expected + "\n",
              "--prompt - reads a text, whose tokens are the tokenizer's, and so is the sample", words, expected);
    claim_run(by_number.out == words.out, "with a tokenizer a prompt of token numbers is shown as text too", by_number);
    const Outcome one = run(WORDS + "--prompt Once");
    claim_run(one.code == 0 && one.out.rfind("Once", 0) == 0, "--prompt TEXT does", one);

    // The first two letters that stand together, but not at the front.
    const std::string generated = expected.substr(prompt.size());
    size_t at = 1;
    auto letter = [&](size_t i) { return isalpha(static_cast<unsigned char>(generated[i])) != 0; };
    while (at + 2 < generated.size() && !(letter(at) && letter(at + 1))) at++;
    const std::string stop = generated.substr(at, 2);
    const Outcome stopped = run(WORDS + "--prompt - --stop " + stop + " <@/prompt.txt");
    claim_run(stopped.code == 0 && stopped.out == prompt + generated.substr(0, generated.find(stop)) + "\n",
              "--stop ends a sample where the text appears", stopped, stop);
    const Outcome two = run(WORDS + "--prompt x --samples 2 --seed 5");
    claim_run(two.out == "---- sample 1, seed 5 ----\n" + run(WORDS + "--prompt x --seed 5").out +
                             "---- sample 2, seed 6 ----\n" + run(WORDS + "--prompt x --seed 6").out,
              "--samples 2 draws with the seed and the next one", two);
    const Outcome top_p = run(WORDS + "--prompt x --top-p 0"), greedy = run(WORDS + "--prompt x --temperature 0");
    claim_run(top_p.code == 0 && top_p.out == greedy.out, "--top-p 0 takes the likeliest token", top_p);
}

void test_text_while_training() {
    need_words();
    const std::string TRAIN_ON = "train --from @/words --data @/text.txt --eval-every 0 --sample-every 2 "
                                 "--sample-tokens 30 --checkpoint-every 0 --steps 1 ";
    const Outcome trained = run(TRAIN_ON);
    const Tokenizer tokenizer(TOKENIZER);
    const Outcome plain = run(format("sample --from @/numbers --sample-tokens 30 --prompt-tokens %d",
                                     tokenizer.added("<|endoftext|>")));
    std::istringstream tokens(plain.out);
    std::string expected;
    int token;
    for (tokens >> token; tokens >> token;) expected += tokenizer.decode(token);
    claim_run(trained.code == 0 && expected.size() > 20 &&
                  trained.out.find("---- sample ----\n" + readable(expected) + "\n----") != std::string::npos,
              "samples while training are text by the tokenizer of --from", trained, expected);
}

void test_text_as_data() {
    need_words();
    const Tokenizer tokenizer(TOKENIZER);
    const std::string text = read_bytes(scratch("@/text.txt"));
    const std::vector<int> tokens = tokenizer.encode(text);
    write_bytes(scratch("@/words.bin"), shard({tokens.begin(), tokens.end()}));
    const std::string EVAL = "eval --matmul-tuning off --from @/words --data ";
    const Outcome of_text = run(EVAL + "@/text.txt"), of_shard = run(EVAL + "@/words.bin");
    claim_run(of_text.code == 0 && but_for_speed(of_text) == but_for_speed(of_shard),
              "eval takes a text's tokens from the tokenizer of --from", of_text, of_shard.out);
    const std::string TRAIN_ON = "train --from @/words --steps 3 --eval-every 3 --eval-sequences 8 --checkpoint-every 2 "
                                 "--out ";
    const Outcome trained = run(TRAIN_ON + "@/on_text --data @/text.txt");
    const Outcome same = run(TRAIN_ON + "@/on_shard --data @/words.bin");
    const std::string said = format("made of %zu bytes by the tokenizer in ", text.size());
    claim_run(trained.code == 0 && log_of("@/on_text") == log_of("@/on_shard") && log_of("@/on_text").size() == 4 &&
                  trained.out.find(said) != std::string::npos,
              "so does train, which says so", trained, same.err);
    run("train --from @/words --steps 3 --eval-every 0 --checkpoint-every 3 --val-data @/text.txt --data @/words.bin "
        "--eval-every 3 --out @/val_text");
    run("train --from @/words --steps 3 --eval-every 0 --checkpoint-every 3 --val-data @/words.bin --data @/words.bin "
        "--eval-every 3 --out @/val_shard");
    claim(log_of("@/val_text") == log_of("@/val_shard") && log_of("@/val_text").size() == 4, "and so is --val-data");
    const std::vector<std::string> log = log_of("@/on_text");
    fs::remove_all(scratch("@/on_text/step_000003"));
    const Outcome resumed = run("train --resume --out @/on_text");
    claim_run(resumed.code == 0 && log_of("@/on_text") == log && resumed.out.find(said) != std::string::npos,
              "a run on text resumes with the same tokens", resumed);

    const Outcome wide = run("train --layers 1 --heads 1 --channels 16 --context 64 --vocab 800 --steps 1 "
                             "--eval-every 0 --data @/text.txt --out @/wide");
    std::vector<uint16_t> bytes(text.begin(), text.end());
    write_bytes(scratch("@/bytes.bin"), shard(bytes));
    const std::string WIDE = "eval --matmul-tuning off --from @/wide --data ";
    const Outcome of_bytes = run(WIDE + "@/text.txt"), of_numbers = run(WIDE + "@/bytes.bin");
    claim_run(wide.code == 0 && of_bytes.code == 0 && but_for_speed(of_bytes) == but_for_speed(of_numbers),
              "a model of 800 tokens that was trained on bytes goes on with bytes", of_bytes, of_numbers.out);
}

// What must go with a model.
const std::vector<std::string> TOKENIZER_FILES = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
                                                  "special_tokens_map.json", "generation_config.json"};

// The files of a model of bytes, as JSON. What transformers makes of them dev/text/check_tokenizer.py says.
void test_byte_tokenizer() {
    need_first_run();
    const std::string dir = scratch("@/first/step_000010");
    const json file = read_json(dir + "/tokenizer.json"), &model = file["model"];
    std::string bytes;
    std::vector<int> tokens(BYTE_VOCAB);
    std::iota(tokens.begin(), tokens.end(), 0);
    for (int token : tokens) bytes += static_cast<char>(token);
    int in_order = 0;
    for (int token : tokens) in_order += model["vocab"].value(byte_alphabet()[token], -1) == token;
    claim(in_order == BYTE_VOCAB && model["vocab"].size() == BYTE_VOCAB && model["type"] == "BPE" &&
              model["merges"].empty() && file["added_tokens"].empty() &&
              file["pre_tokenizer"]["type"] == "ByteLevel" && file["decoder"]["type"] == "ByteLevel",
          "a model of bytes has a tokenizer.json of 256 byte tokens, numbered as the bytes, without merges");
    const Tokenizer tokenizer(dir);
    claim(tokenizer.encode(bytes) == tokens && tokenizer.decode(tokens) == bytes, "by which a token is its byte");
    claim(read_json(dir + "/tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast" &&
              read_json(dir + "/tokenizer_config.json")["model_max_length"] == 16 &&
              read_json(dir + "/generation_config.json")["eos_token_id"] == 255 &&
              read_json(dir + "/config.json")["eos_token_id"] == 255 &&
              read_json(dir + "/tokenizer_config.json")["eos_token"] == byte_alphabet()[255] &&
              read_json(dir + "/tokenizer_config.json")["bos_token"] == byte_alphabet()[255],
          "tokenizer_config.json names the class; the end of text is byte 255, for lm-evaluation-harness too");
    fs::copy(dir, scratch("@/only_bytes"));
    for (const std::string& name : TOKENIZER_FILES) fs::remove(scratch("@/only_bytes/" + name));
    const std::string options = " --prompt cat --sample-tokens 20 --seed 4";
    const Outcome with = run("sample --from @/first/step_000010" + options);
    const Outcome without = run("sample --from @/only_bytes" + options);
    claim_run(with.code == 0 && with.out == without.out, "samples are the same with it and without", with, without.out);
}

void test_tokenizer_travels() {
    need_words();
    const std::string from = scratch("@/all_words");
    fs::copy(scratch("@/words"), from);
    for (const std::string& name : TOKENIZER_FILES) {
        fs::remove(from + "/" + name);
        if (fs::exists(TOKENIZER + "/" + name)) fs::copy(TOKENIZER + "/" + name, from + "/" + name);
        else write_bytes(from + "/" + name, "{\"file\": \"" + name + "\"}");
    }
    const std::string COMMAND = "--data @/text.txt --eval-every 0 --checkpoint-every 1 --keep 1 --out @/travel ";
    auto differing = [&](const std::string& dir) {
        std::string names;
        for (const std::string& name : TOKENIZER_FILES)
            if (!fs::exists(scratch(dir + "/" + name)) ||
                read_bytes(from + "/" + name) != read_bytes(scratch(dir + "/" + name)))
                names += " " + name;
        return names;
    };
    const Outcome first = run("train --from @/all_words --steps 2 " + COMMAND);
    const std::string wrong = differing("@/travel/step_000002");
    claim_run(first.code == 0 && wrong.empty(), "a tokenizer's files go from --from DIR to checkpoints", first, wrong);
    const Outcome second = run("train --resume --from @/all_words --steps 4 " + COMMAND);   // the same --from
    const std::string wrong_later = differing("@/travel/step_000004");
    claim_run(second.code == 0 && wrong_later.empty() && !fs::exists(scratch("@/travel/step_000002")),
              "and on, though the checkpoint that --resume began with is no longer kept", second, wrong_later);
    std::string others;
    for (const std::string& name : TOKENIZER_FILES)
        if (fs::exists(scratch("@/numbers/" + name))) others += name + " ";
    claim(others == "generation_config.json ", "a model of other tokens has no tokenizer made up for it", others);
}

// ==== runs: that end badly ===================================================

// What is in a run folder besides checkpoints and the log.
size_t unfinished(const std::string& out) {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(scratch(out)))
        count += entry.path().filename().string().rfind("step_", 0) != 0;
    return count - fs::exists(scratch(out + "/log.jsonl"));
}

void test_signals() {
    Run interrupted(ENDLESS + "--checkpoint-every 0 --out @/interrupted");
    const bool began = wait_until([] { return log_of("@/interrupted").size() >= 3; });
    const Outcome outcome = interrupted.end(SIGINT);
    const std::vector<std::string> log = log_of("@/interrupted");
    const auto found = list_checkpoints(scratch("@/interrupted"));
    const bool right = began && outcome.code == 0 && found.size() == 1 && found.begin()->first == long(log.size());
    claim_run(right && damage(found.begin()->second).empty(),
              "SIGINT ends a run with exit code 0 and a checkpoint of its last step", outcome);
    const Outcome resumed = run(ENDLESS + format("--resume --steps %zu --out @/interrupted", log.size() + 2));
    claim_run(resumed.code == 0 && log_of("@/interrupted").size() == log.size() + 2, "and can be resumed from there", resumed);

    // Killed at different moments of writing one checkpoint after the other, and resumed each time.
    std::string wrong;
    long last = 0;
    for (int kills = 0; kills < 8 && wrong.empty(); kills++) {
        Run killed(ENDLESS + "--checkpoint-every 1 --keep 2 --out @/killed" + (kills ? " --resume" : ""));
        auto newest = [] {
            const auto all = list_checkpoints(scratch("@/killed"));
            return all.empty() ? 0 : all.rbegin()->first;
        };
        if (!wait_until([&] { return newest() > last + 1; })) wrong += "no checkpoint; ";
        usleep(1000 * (7 * kills % 11));
        const Outcome end = killed.end(SIGKILL);
        if (end.code != -SIGKILL) wrong += end.err;
        last = newest();
        for (const auto& [step, dir] : list_checkpoints(scratch("@/killed"))) wrong += damage(dir);
    }
    claim(wrong.empty(), "whenever a run is killed, each checkpoint that is there is whole, and the last one resumes", wrong);
    const Outcome after = run(ENDLESS + format("--checkpoint-every 1 --out @/killed --resume --steps %ld", last + 2));
    claim_run(after.code == 0 && unfinished("@/killed") == 0, "what was unfinished then is cleared away", after);
}

// Runs that nobody sees any more: the terminal is gone, which says so twice, or output is no longer read.
void test_unseen() {
    Run hung_up(ENDLESS + "--checkpoint-every 0 --out @/hung_up");
    wait_until([] { return log_of("@/hung_up").size() >= 3; });
    for (int i = 0; i < 100; i++) {
        hung_up.send_signal(SIGHUP);
        usleep(100);   // or else they would be one
    }
    const Outcome after_hangup = hung_up.end();
    const auto kept = list_checkpoints(scratch("@/hung_up"));
    claim_run(after_hangup.code == 0 && kept.size() == 1 && damage(kept.begin()->second).empty(),
              "SIGHUP, even many times, ends a run with a checkpoint", after_hangup);

    const std::string pipe = scratch("@/pipe");
    mkfifo(pipe.c_str(), 0600);
    const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    Run unread(ENDLESS + "--eval-every 1 --eval-sequences 1 --checkpoint-every 0 --out @/unread >@/pipe");
    wait_until([] { return log_of("@/unread").size() >= 3; });
    close(reader);
    const Outcome outcome = unread.end();
    const auto found = list_checkpoints(scratch("@/unread"));
    claim_run(outcome.code == 0 && found.size() == 1 && damage(found.begin()->second).empty(),
              "so does output that nobody reads", outcome);
}

// A full disk behind standard output.
void test_full_output() {
    need_first_run();
    const std::string SAID = "standard output: writing failed";
    auto ends_so = [&](const Outcome& o) { return o.code == 1 && o.err.find(SAID) != std::string::npos; };
    for (const char* command : {"--help", "plan --gpu-memory 1GB", "plan --gpu-memory 1GB --json",
                                "eval --from @/first --data @/text.txt --matmul-tuning off",
                                "sample --from @/first --sample-tokens 2000000000 --samples 9"}) {
        const Outcome outcome = run(command + std::string(" >/dev/full"));
        claim_run(ends_so(outcome), format("output that cannot be written is an error: %s", command), outcome);
    }
    const Outcome trained = run("train" + SMALL + "--steps 3 --sample-every 1 --sample-tokens 3 --out @/mute >/dev/full");
    claim_run(ends_so(trained) && log_of("@/mute").size() == 4 && damage(scratch("@/mute/step_000003")).empty(),
              "a run goes on to its end and its checkpoint without it", trained);
    // The shell has SIGPIPE ignored.
    auto unread = [&](const std::string& command) {
        const std::string line = format("(trap '' PIPE; XDG_CACHE_HOME=%s /proc/%d/exe --as-train-gpt %s; echo $? > %s) "
                                        "2> %s | true", scratch("@/cache").c_str(), getpid(), scratch(command).c_str(),
                                        scratch("@/code").c_str(), scratch("@/said").c_str());
        const int status = system(line.c_str());
        return Outcome{status == 0 ? atoi(read_bytes(scratch("@/code")).c_str()) : -1, "", read_bytes(scratch("@/said"))};
    };
    const Outcome sampled = unread("sample --from @/first --sample-tokens 2000000000");
    claim_run(sampled.code == 1 && sampled.err.find("standard output: writing failed: Broken pipe") != std::string::npos,
              "so is output that nobody reads where SIGPIPE is ignored", sampled);
    const Outcome endless = unread(ENDLESS + "--eval-every 1 --eval-sequences 1 --checkpoint-every 0 --out @/deaf");
    const auto kept = list_checkpoints(scratch("@/deaf"));
    claim_run(endless.code == 0 && kept.size() == 1 && damage(kept.begin()->second).empty(),
              "which ends a run after its step with a checkpoint, too", endless);
}

void test_second_run() {
    Run first(ENDLESS + "--checkpoint-every 0 --out @/live");
    wait_until([] { return log_of("@/live").size() >= 3; });
    fs::create_directory(scratch("@/live/unfinished_step_000001"));   // as if it were just being written
    for (const char* resume : {"", " --resume"}) {
        const Outcome second = run(ENDLESS + "--out @/live" + resume);
        claim_run(second.code == 2 && second.err.find(scratch("--out @/live: another run")) != second.err.npos &&
                      fs::exists(scratch("@/live/unfinished_step_000001")),
                  format("a second run in a folder is refused, and touches nothing there%s", resume), second);
    }
    const Outcome outcome = first.end(SIGINT);
    const auto found = list_checkpoints(scratch("@/live"));
    claim_run(outcome.code == 0 && found.size() == 1 && found.begin()->first == long(log_of("@/live").size()),
              "the first one does not notice", outcome);
}

void test_leftovers() {
    const std::vector<std::string> theirs = {"unfinished_thesis", "unfinished_step_12", "unfinished_step_000012.old",
                                             "unfinished_old_letters", "my_unfinished_step_000012"},
                                   ours = {"unfinished_step_000012", "unfinished_old_step_000003"};
    for (const auto& names : {theirs, ours})
        for (const std::string& name : names) fs::create_directories(scratch("@/mixed/" + name + "/within"));
    auto left = [](const std::vector<std::string>& names) {
        long count = 0;
        for (const std::string& name : names) count += fs::exists(scratch("@/mixed/" + name));
        return count;
    };
    const std::string COMMAND = "train" + SMALL + "--steps 1 --checkpoint-every 0 --out @/mixed ";
    const Outcome refused = run(COMMAND + "--context 8192 --micro-batch 32768");
    claim_run(refused.code == 2 && left(ours) == 2, "a run that is refused removes nothing", refused);
    const Outcome outcome = run(COMMAND);
    claim_run(outcome.code == 0 && left(ours) == 0 && left(theirs) == long(theirs.size()),
              "what a crash has left is removed, and nothing whose name only looks like it", outcome);
}

// Killed before its first checkpoint.
void test_early_death() {
    const std::string COMMAND = "train --data @/of_211.bin --val-fraction 0 --micro-batch 1 --seq-len 16 "
                                "--eval-every 0 ";
    write_bytes(scratch("@/of_211.bin"), shard(std::vector<uint16_t>(400, 210)));
    Run killed(COMMAND + "--from data/reference/hf_tiny --steps 1000000 --checkpoint-every 0 --out @/early");
    wait_until([] { return log_of("@/early").size() >= 3; });
    killed.end(SIGKILL);
    const Outcome resumed = run(COMMAND + "--steps 3 --out @/early --resume");
    const Outcome fresh = run(COMMAND + "--from data/reference/hf_tiny --steps 3 --out @/late");
    claim_run(resumed.code == 0 && resumed.out.find("begins anew from data/reference/hf_tiny") != resumed.out.npos &&
                  log_of("@/early").size() == 3 && log_of("@/early") == log_of("@/late"),
              "--resume of a run without a checkpoint begins as that did, and says so", resumed, fresh.err);
}

// What fails only after some steps.
void test_late_failure() {
    const std::string COMMAND = "train --layers 1 --heads 1 --channels 16 --context 16 --vocab 256 "
                                "--val-fraction 0 --shuffle no --micro-batch 1 --schedule constant --lr 1e-3 "
                                "--checkpoint-every 0 --data ";
    std::vector<uint16_t> tokens(161, 5);
    write_bytes(scratch("@/all_well.bin"), shard(tokens));
    tokens[100] = 300;   // in the window of the seventh step, which is fetched during the sixth
    write_bytes(scratch("@/late_bad.bin"), shard(tokens));
    const Outcome bad = run(COMMAND + "@/late_bad.bin --steps 10 --out @/bad_data");
    run(COMMAND + "@/all_well.bin --steps 5 --checkpoint-every 5 --out @/good_data");
    const auto kept = list_checkpoints(scratch("@/bad_data"));
    claim_run(bad.code == 2 && bad.err.find("token 300 at position 100") != bad.err.npos && kept.size() == 1 &&
                  kept.count(5) && same_file("@/bad_data/step_000005/optimizer.safetensors",
                                             "@/good_data/step_000005/optimizer.safetensors"),
              "a token outside the vocabulary that comes late ends a run with a checkpoint of the last good step", bad);
    write_bytes(scratch("@/cut_off.bin"), shard(std::vector<uint16_t>(100000, 5)));
    Run cut(ENDLESS + "--shuffle yes --val-fraction 0 --checkpoint-every 0 --data @/cut_off.bin --out @/cut_off");
    wait_until([] { return log_of("@/cut_off").size() >= 3; });
    fs::resize_file(scratch("@/cut_off.bin"), 5000);
    const Outcome cut_off = cut.end();
    const auto last = list_checkpoints(scratch("@/cut_off"));
    claim_run(cut_off.code == 1 && cut_off.err.find(scratch("@/cut_off.bin: was cut off")) != cut_off.err.npos &&
                  last.size() == 1 && last.begin()->first == long(log_of("@/cut_off").size()) &&
                  damage(last.begin()->second).empty(),
              "so does a shard that is cut off meanwhile, which is named", cut_off);
    write_bytes(scratch("@/shrinks.bin"), shard(std::vector<uint16_t>(3000000, 5)));
    Run evaluates("eval --from @/good_data --micro-batch 1 --matmul-tuning off --data @/shrinks.bin");
    const bool mapped = wait_until([&] { return evaluates.maps("@/shrinks.bin"); });
    fs::resize_file(scratch("@/shrinks.bin"), 5000);
    const Outcome evaluated = evaluates.end();
    claim_run(mapped && evaluated.code == 1 &&
                  evaluated.err.find(scratch("@/shrinks.bin: was cut off while it was in use")) != std::string::npos,
              "and so says eval", evaluated);
    const Outcome full = Run(COMMAND + "@/all_well.bin --steps 1000 --out @/full_log", "", 4096).end();
    claim_run(full.code == 1 && full.err.find("log.jsonl: writing failed") != full.err.npos &&
                  full.err.find("train_gpt: checkpoint of step") != full.err.npos &&
                  list_checkpoints(scratch("@/full_log")).empty(),
              "a disk that is full at the log: it says why there is no checkpoint either", full);
}

// A checkpoint that --keep no longer keeps must go as a whole: of a run that is killed meanwhile, the
// rest would look like one. Here it holds so many files that its going can be watched.
void test_removal() {
    const std::string COMMAND = ENDLESS + "--checkpoint-every 1 --keep 1 --out @/kept ", old = scratch("@/kept/step_000001");
    run(COMMAND + "--steps 1");
    for (int folder = 0; folder < 10; folder++) {
        const std::string path = format("%s/more_%d", old.c_str(), folder);
        fs::create_directory(path);
        for (int file = 0; file < 300; file++) write_bytes(format("%s/%d", path.c_str(), file), "");
    }
    Run removes(COMMAND + "--resume --steps 2");
    bool whole = true;
    const bool gone = wait_until([&] {
        for (const char* file : {"/config.json", "/model.safetensors", "/optimizer.safetensors", "/trainer.json",
                                 "/tokenizer.json", "/tokenizer_config.json", "/generation_config.json"})
            whole = whole && (fs::exists(old + file) || !fs::exists(old));
        return !whole || !fs::exists(old);
    });
    const Outcome outcome = removes.end();
    claim_run(outcome.code == 0 && gone && whole, "a checkpoint that is not kept any longer goes as a whole", outcome);
}

void test_full_disk() {
    const std::string COMMAND = "train" + SMALL + "--micro-batch 1 --schedule constant --eval-every 0 --checkpoint-every 2 "
                                "--out @/full ";
    const std::string model = scratch("@/full/step_000002/model.safetensors");
    run(COMMAND + "--steps 2");
    const std::string before = read_bytes(model);
    // Enough for the log and config.json, not for the weights.
    const Outcome full = Run(COMMAND + "--resume --steps 4", "", 16 << 10).end();
    const auto left = list_checkpoints(scratch("@/full"));
    claim_run(full.code == 1 && full.err.rfind("train_gpt: checkpoint of step 4 not written", 0) == 0,
              "a full disk is an error that names the step", full);
    claim(left.size() == 1 && damage(left.begin()->second).empty() && !before.empty() && read_bytes(model) == before &&
              unfinished("@/full") == 0,
          "it leaves the checkpoint before as it was, and nothing unfinished");
    const Outcome resumed = run(COMMAND + "--resume --steps 4");
    claim_run(resumed.code == 0 && damage(scratch("@/full/step_000004")).empty(),
              "from which the run goes on when there is room again", resumed);
}

void test_nan() {
    const Outcome outcome = run("train" + SMALL + "--steps 20 --lr 1e30 --grad-clip 0 --checkpoint-every 1 --out @/nan");
    const auto good = list_checkpoints(scratch("@/nan"));
    const long step = good.empty() ? 0 : good.rbegin()->first;
    const std::string last = good.empty() ? "none" : good.rbegin()->second;
    claim_run(outcome.code == 1 && outcome.err.find(format("step %ld: loss", step + 1)) != outcome.err.npos &&
                  outcome.err.find(last) != outcome.err.npos,
              "a loss that is not finite stops the run and names step and last good checkpoint", outcome);
    claim(damage(last).empty(), "which is whole", damage(last));

    // Weights overflow in the very step whose loss was the last finite one.
    const Outcome overflow = run("train" + SMALL + "--steps 2 --lr 3e38 --weight-decay 1000 --checkpoint-every 1 --out @/inf");
    claim_run(overflow.code == 1 && list_checkpoints(scratch("@/inf")).empty(),
              "weights that are not finite are not written as a checkpoint", overflow);
}

// Too little memory; and a token outside the vocabulary in the first batch.
void test_failed_start() {
    const std::string COMMAND = "train" + SMALL + "--steps 1 --out @/again ";
    for (const char* mistake : {"--context 8192 --micro-batch 32768", "--vocab 100"}) {
        const Outcome refused = run(COMMAND + mistake), again = run(COMMAND);
        claim_run(refused.code == 2 && again.code == 0,
                  format("a run that ended before its first step leaves --out free (%s)", mistake), again);
        fs::remove_all(scratch("@/again"));
    }
}

// ==== bad input ==============================================================
// Each is a mistake that people make. The program must say in one line what is wrong: the file or the
// flag, what was found and what was expected; and exit with 2.

typedef std::vector<std::string> Texts;

void refuse(const std::string& what, const std::string& command, const Texts& named) {
    const Outcome outcome = run(command);
    const bool one_line = std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1 && outcome.err.back() == '\n';
    std::string missing;
    for (const std::string& text : named)
        if (outcome.err.find(scratch(text)) == outcome.err.npos) missing += " lacks '" + scratch(text) + "'";
    claim_run(outcome.code == 2 && one_line && outcome.err.rfind("train_gpt: ", 0) == 0 && missing.empty(), "refused: " + what,
              outcome, missing);
}

const std::string TINY = "train --layers 1 --heads 1 --channels 16 --context 16 --steps 1 --data @/text.txt ";

// What --help and the log show must be something that can be given; null is nothing.
void test_defaults() {
    Options defaults;
    std::string refused;
    for (const Flag& flag : flag_table(defaults)) {
        const json value = flag.value();
        if (flag.is_switch || value == "" || value.is_null()) continue;
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        if (!flag.parse(text)) refused += format(" %s %s", flag.name, text.c_str());
    }
    claim(refused.empty(), "every flag takes its own default", refused);
}

void test_readme() {
    const std::string readme = read_bytes("README.md");
    std::string missing;
    Options defaults;
    for (const Flag& flag : flag_table(defaults))
        if (readme.find(flag.name) == readme.npos) missing += std::string(" ") + flag.name;
    claim(missing.empty(), "README.md names every flag", missing);
}

// Of plan, for many GPUs.
void test_bad_numbers_of_gpus() {
    for (const char* counts : {"0", "-1", "65537", "two", "8..", "..8", "8..4", "5..7", "8,", ",8", "8,,9", "8.5", "8..64,3", "''"})
        refuse(format("--gpus %s", counts), format("plan --gpu-memory 8GB --gpus %s", counts),
               {"--gpus", "from 1 to 65536", "8..512", "8,24,64"});
    refuse("several numbers of GPUs for one plan", "plan --gpu-memory 8GB --gpus 8..64", {"--gpus", "--scan", "found 4"});
    const std::string SCAN = "plan --scan ", BATCH = "--total-batch 4096 ", MEMORY = "--gpu-memory 8GB ", LINK = "--bandwidth 9";
    refuse("a scan without anything", SCAN, {"--scan", "--total-batch TOKENS, --gpu-memory SIZE, --bandwidth GB/s"});
    refuse("a scan without a total batch", SCAN + MEMORY + LINK, {"--scan needs --total-batch TOKENS\n"});
    refuse("a scan without a memory", SCAN + BATCH + LINK, {"--scan needs --gpu-memory SIZE\n"});
    refuse("a scan without a bandwidth", SCAN + BATCH + MEMORY, {"--scan needs --bandwidth GB/s\n"});
    for (const std::string flag : {"--bandwidth", "--flops"})
        for (const std::string number : {"0", "-1", "nan", "1e7", "fast"})
            refuse(flag + " " + number, "plan " + MEMORY + flag + " " + number, {flag, "a number from 0.001", "'" + number + "'"});
    refuse("a total batch that many GPUs cannot share", "plan --gpus 3 --gpu-memory 8GB --micro-batch 1 --total-batch 4096",
           {"--total-batch 4096", "x GPUs = 1 x 1024 x 3 = 3072"});
}

void test_bad_flags() {
    need_our_folder();
    refuse("an unknown verb", "trian --steps 1", {"trian", "train, eval, sample or plan"});
    refuse("an unknown flag", TINY + "--step 1", {"--step"});
    refuse("a flag of another verb", "eval --from @/ours --data @/text.txt --lr 1", {"--lr", "eval"});
    refuse("a flag without its value", TINY + "--lr", {"--lr", "a number", "nothing"});
    refuse("a flag's name for a value", TINY + "--lr --keep", {"--lr", "'--keep'"});
    for (const char* number : {"12x", "1e", "''", "0.5", "0x10", "-", "0", "-3", "99999999999"})
        refuse(format("--micro-batch %s", number), TINY + "--micro-batch " + number, {"--micro-batch", "a whole number from 1"});
    for (const char* number : {"12x", "1e", "''", "nan", "inf", "1e999", "-1", "1,5"})
        refuse(format("--lr %s", number), TINY + "--lr " + number, {"--lr", "a number"});
    refuse("a number above its range", TINY + "--val-fraction 0.95", {"--val-fraction", "from 0 to 0.9", "0.95"});
    refuse("beta1 of 1", TINY + "--beta1 1", {"--beta1", "'1'"});
    refuse("--matmul-tuning yes", TINY + "--matmul-tuning yes", {"--matmul-tuning", "off|on", "'yes'"});
    for (const std::string number : {"0", "1025", "two"})
        refuse("--threads " + number, TINY + "--threads " + number,
               {"--threads", "from 1 to 1024", "'" + number + "'"});
    for (const char* flag : {"--total-batch", "--steps", "--warmup"})
        for (const char* number : {"1000000000001", "9223372036854775807", "9223372036854775808"})
            refuse(format("%s %s", flag, number), TINY + format("%s %s", flag, number), {flag, "to 1e+12", number});
    const Outcome most = run(TINY + "--seed 9223372036854775807 --sample-every 1 --sample-tokens 2 --warmup 1000000000000 "
                             "--eval-sequences 9223372036854775807 --eval-every 9223372036854775807 --steps 2");
    claim_run(most.code == 0, "the ends of ranges are within them: train", most);
    const Outcome planned = run("plan --gpu-memory 80GB --total-batch 1000000000000");
    claim_run(planned.code == 0 && planned.out.find("accumulated 244140625 times") != std::string::npos,
              "the ends of ranges are within them: plan", planned);
    refuse("--seed beyond its range", TINY + "--seed 9223372036854775808", {"--seed", "9223372036854775808"});
    if (!device.is_cpu()) refuse("--threads on a GPU", TINY + "--threads 2", {"--threads 2", device.properties.name});
    refuse("--graph yes", TINY + "--graph yes", {"--graph", "auto|off|on", "'yes'"});
    refuse("an unknown choice", TINY + "--schedule cosin", {"--schedule", "cosine|linear|wsd|constant", "'cosin'"});
    refuse("an unknown model", "plan --model gpt5", {"--model", "gpt2-medium", "'gpt5'"});
    refuse("a head size of 20", TINY + "--heads 3 --channels 60", {"60 channels", "3 heads", "16, 32, ... 128"});
    refuse("a head size of 144", TINY + "--channels 144", {"144 channels", "1 heads"});
    refuse("heads that do not divide the channels", TINY + "--heads 3 --channels 64", {"64 channels", "3 heads"});
    refuse("a sequence longer than the context", TINY + "--seq-len 17", {"--seq-len 17", "context of 16"});
    refuse("a total batch that does not divide", TINY + "--micro-batch 2 --total-batch 100",
           {"--total-batch 100", "2 x 16", "96 and 128"});
    refuse("a total batch below one micro-batch", TINY + "--micro-batch 2 --total-batch 10", {"--total-batch 10", ": 32"});
    refuse("a model of no layers", TINY + "--layers 0", {"--layers", "'0'"});
    refuse("sequences of no tokens", TINY + "--seq-len 0", {"--seq-len", "'0'"});
    refuse("a size in an unknown unit", "plan --gpu-memory 80QB", {"--gpu-memory", "80GB", "'80QB'"});
    refuse("a size without a unit", "plan --gpu-memory 80", {"--gpu-memory", "80GB", "'80'"});
    refuse("train without --data", "train --steps 1", {"--data"});
    refuse("eval without --data", "eval --from @/ours", {"--data"});
    refuse("eval without --from", "eval --data @/text.txt", {"--from"});
    refuse("a text prompt for a model that is not of bytes", "sample --from @/ours --prompt x",
           {"--prompt", "101", "--prompt-tokens"});
    refuse("a prompt with a token outside the vocabulary", "sample --from @/ours --prompt-tokens 1,101",
           {"--prompt-tokens", "0 to 100", "'101'"});
    need_first_run();
    const std::vector<std::string> SIZES = {"--layers 3", "--heads 1", "--channels 16", "--context 8", "--vocab 257",
                                            "--model gpt2"};
    for (const std::string& size : SIZES) {
        const Texts named = {size.substr(0, size.find(' ')), "@/first/step_000010"};
        refuse(size + " beside --from", "train --data @/text.txt --from @/first/step_000010 " + size, named);
        refuse(size + " beside --resume", "train --out @/first --resume " + size, named);
    }
    refuse("--layers beside plan --from", "plan --from @/ours --gpu-memory 1GB --layers 9", {"--layers 9", "@/ours"});
    for (const char* other : {"bf16", "fp16"})
        if (name_of(FLOATX) != std::string(other))
            refuse("gradients of 16 bits that are not the weights'", TINY + "--grad-dtype " + other,
                   {std::string("--grad-dtype ") + other, std::string("PRECISION=") + other});
    for (const char* scale : {"0", "0.5", "16777217", "nan", "static"})
        refuse(std::string("a loss scale of ") + scale, TINY + "--loss-scaling " + scale,
               {"--loss-scaling", "dynamic|none", format("'%s'", scale)});
    const Texts no_copy = {"--master-weights none", "fp32", "PRECISION=bf16"};
    if (FLOATX == DType::FP32) refuse("FP32 weights without a master copy", TINY + "--master-weights none", no_copy);
    refuse("a plan of that", "plan --precision fp32 --master-weights none", no_copy);
    refuse("many GPUs without master weights", "plan --precision bf16 --gpus 2 --master-weights none",
           {"--master-weights none", "one GPU"});
    if (!has_tensor_cores(TensorCores::WGMMA))
        refuse("tensor cores that are not there", TINY + "--tensor-cores wgmma", {"--tensor-cores wgmma", name_of(FLOATX)});
    refuse("a micro-batch that does not fit", "train" + SMALL + "--context 8192 --micro-batch 32768",
           {"memory", "needs", "free", "--micro-batch"});
    refuse("a model that does not fit", "train --model 405b --data @/text.txt", {"memory", "needs", "free", "--model"});
    // Sizes in bytes that 64 bits cannot hold, and a vocabulary that 32 bits cannot hold once it is padded.
    refuse("a model beyond all bounds", TINY + "--layers 2147483647 --channels 2147483520 --heads 16777215", {"2147483647 layers"});
    refuse("a vocabulary beyond all bounds", TINY + "--vocab 2147483647", {"vocabulary 2147483647"});
}

void test_bad_text() {
    need_words();
    need_our_folder();
    refuse("an empty prompt on standard input", "sample --from @/words --prompt -", {"--prompt -", "empty"});
    fs::copy(scratch("@/words"), scratch("@/broken_words"));
    write_bytes(scratch("@/broken_words/tokenizer.json"), "{}");
    refuse("a broken tokenizer.json", "sample --from @/broken_words --prompt x",
           {"@/broken_words/tokenizer.json", "ByteLevel"});
    fs::copy(scratch("@/ours"), scratch("@/few_words"));
    fs::copy(TOKENIZER + "/tokenizer.json", scratch("@/few_words/tokenizer.json"));
    refuse("a tokenizer of more tokens than the model has", "sample --from @/few_words --prompt x",
           {"@/few_words", "757", "101"});
    for (const char* bad : {"--top-p 1.5", "--top-p -0.1", "--samples 0", "--stop ''"})
        refuse(bad, std::string("sample --from @/words --prompt x ") + bad, {std::string(bad).substr(0, 6)});
}

// Folders that others may not look into. Root may: the system is asked as if for somebody else.
void test_unreadable_data() {
    fs::create_directory(scratch("@/locked"));
    write_bytes(scratch("@/locked/text.txt"), "some text");
    fs::permissions(scratch("@/locked"), fs::perms::none);
    const int nobody = 65534, own = setfsuid(geteuid() == 0 ? nobody : geteuid());
    for (const char* path : {"@/locked/text.txt", "@/locked/*.txt", "@/locked/"}) {
        std::string said = "taken";
        try {
            Tokens tokens(scratch(path));
        } catch (const UserError& error) {
            said = error.what();
        }
        claim(said.find(scratch(path)) == 0 && said.find("Permission denied") != said.npos,
              format("refused: a folder that may not be looked into, %s", path), said);
    }
    setfsuid(own);
    fs::permissions(scratch("@/locked"), fs::perms::owner_all);
}

// Names that are not UTF-8, which JSON cannot hold.
void test_names_in_other_bytes() {
    need_first_run();
    write_bytes(scratch("@/caf\xe9.txt"), read_bytes(scratch("@/text.txt")));
    fs::create_directory_symlink(scratch("@/first"), scratch("@/mod\xe8le"));
    const std::string MODEL = scratch("@/first/step_000010");
    for (const std::string wrong : {"--data @/caf\xe9.txt --out @/latin", "--val-data @/caf\xe9.txt --out @/latin",
                                    "--out @/latin\xe9", "--out @/latin --trace @/\xe9"}) {
        const std::string flag = wrong.find("latin\xe9") != wrong.npos ? "--out" : wrong.substr(0, wrong.find(' '));
        refuse("a name that is not UTF-8 in a run that is kept, " + one_line(wrong), TINY + wrong,
               {flag == "--out" && wrong.find("--trace") != wrong.npos ? "--trace" : flag, "not UTF-8"});
        claim(!fs::exists(scratch("@/latin")) && !fs::exists(scratch("@/latin\xe9")), "before anything is written");
    }
    const Outcome trained = run(TINY + "--data @/caf\xe9.txt");
    claim_run(trained.code == 0, "a run that is not kept takes such a name", trained);
    const Outcome evaluated = run("eval --matmul-tuning off --from @/mod\xe8le --data @/caf\xe9.txt");
    claim_run(evaluated.code == 0, "so does eval", evaluated);
}

void test_bad_data() {
    need_our_folder();
    write_bytes(scratch("@/empty.txt"), "");
    write_bytes(scratch("@/short.bin"), std::string(100, 'x'));
    const std::vector<uint16_t> tokens(50, 7);
    write_bytes(scratch("@/magic.bin"), shard(tokens, 7));
    write_bytes(scratch("@/version.bin"), shard(tokens, SHARD_MAGIC, 2));
    write_bytes(scratch("@/cut.bin"), shard(tokens).substr(0, 1024 + 80));
    write_bytes(scratch("@/none.bin"), shard({}));
    write_bytes(scratch("@/ten.txt"), "ten bytes.");
    std::vector<uint16_t> large = tokens;
    large[12] = 300;
    write_bytes(scratch("@/large.bin"), shard(large));
    refuse("a data file that is not there", TINY + "--data @/nowhere.txt", {"@/nowhere.txt"});
    refuse("a pattern that matches nothing", TINY + "--data @/nowhere*.bin", {"@/nowhere*.bin: no file matches"});
    refuse("a folder for a data file", TINY + "--data @/ours", {"@/ours: a folder, not a regular file"});
    for (const char* path : {"@/nowhere/text.txt", "@/nowhere/*.bin"})
        refuse(std::string("a folder that is not there, ") + path, TINY + "--data " + path,
               {path, ": @/nowhere: No such file or directory"});
    for (const char* path : {"@/text.txt/more.txt", "@/text.txt/*.bin"})
        refuse(std::string("a file where a folder should be, ") + path, TINY + "--data " + path,
               {path, ": @/text.txt: Not a directory"});
    fs::create_symlink(scratch("@/gone.txt"), scratch("@/dangling.txt"));
    for (const char* path : {"@/dangling.txt", "@/dang*.txt"})
        refuse(std::string("a link to nothing, ") + path, TINY + "--data " + path,
               {"@/dangling.txt: a link to @/gone.txt, which is not there"});
    write_bytes(scratch("@/a[1].txt"), read_bytes(scratch("@/text.txt")));
    const Outcome brackets = run(TINY + "--data @/a[1].txt");
    claim_run(brackets.code == 0, "a file whose name looks like a pattern is found", brackets);
    test_unreadable_data();
    test_names_in_other_bytes();
    write_bytes(scratch("@/odd.bin"), shard(tokens) + "x");
    refuse("a shard with an odd byte at its end", TINY + "--data @/odd.bin", {"@/odd.bin", "50", "odd byte"});
    refuse("an empty data file", TINY + "--data @/empty.txt", {"@/empty.txt", "empty"});
    refuse("a shard shorter than its header", TINY + "--data @/short.bin", {"@/short.bin", "100", "1024"});
    refuse("a shard with another magic number", TINY + "--data @/magic.bin", {"@/magic.bin", "7", "20240520"});
    refuse("a shard of another version", TINY + "--data @/version.bin", {"@/version.bin", "2", "expected 1"});
    refuse("a shard that is cut short", TINY + "--data @/cut.bin", {"@/cut.bin", "50", "40"});
    refuse("a shard without tokens", TINY + "--data @/none.bin", {"@/none.bin"});
    refuse("a token outside the vocabulary", TINY + "--vocab 256 --shuffle no --data @/large.bin",
           {"@/large.bin", "token 300", "position 12", "256"});
    refuse("a token outside the vocabulary, in eval", "eval --from @/ours --data @/large.bin",
           {"@/large.bin", "token 300", "101"});
    refuse("fewer tokens than a sequence", TINY + "--val-fraction 0 --data @/ten.txt", {"@/ten.txt", "10 tokens", "16"});
    write_bytes(scratch("@/mixed_1.txt"), "some text");
    write_bytes(scratch("@/mixed_2.bin"), shard(tokens));
    refuse("text and shards in one pattern", TINY + "--data @/mixed_*", {"@/mixed_1.txt", "@/mixed_2.bin"});
    refuse("text for a model of 101 tokens without a tokenizer", "eval --from @/ours --data @/text.txt",
           {"@/text.txt", "@/ours", "101 tokens", "tokenizer.json", "prepare_text.py"});
    refuse("text for a vocabulary below 256", TINY + "--vocab 255", {"@/text.txt", "--vocab", "255"});
    write_bytes(scratch("@/nano.bin"), bytes_of(std::vector<uint16_t>(4000, 50256)));
    refuse("nanoGPT's tokens", TINY + "--data @/nano.bin",
           {"@/nano.bin", "nanoGPT", "4000 tokens", "--tokenizer nanogpt --out-prefix @/nano @/nano.bin"});
    const std::pair<const char*, std::string> FORMATS[] = {
        {"gzip", "\x1f\x8b\b"}, {"zstd", "\x28\xb5\x2f\xfd"}, {"bzip2", "BZh91AY&SY"},
        {"xz", std::string("\xfd" "7zXZ\0", 6)}, {"zip", "PK\x03\x04"}, {"Parquet", "PAR1"}, {"NumPy", "\x93NUMPY"},
        {"safetensors", read_bytes(scratch("@/ours/model.safetensors"))}};
    for (const auto& [what, begin] : FORMATS)
        for (const char* name : {"@/foreign.txt", "@/foreign.bin"}) {
            write_bytes(scratch(name), begin + std::string(2000, 'x'));
            refuse(std::string(what) + " for data, " + name, TINY + "--data " + name, {name, what});
        }
    mkfifo(scratch("@/pipe").c_str(), 0600);
    refuse("a pipe for data", TINY + "--data @/pipe", {"@/pipe", "not a regular file"});
    write_bytes(scratch("@/one_token.bin"), shard({7}));
    refuse("validation data of which nothing can be predicted", TINY + "--val-data @/one_token.bin",
           {"--val-data", "@/one_token.bin", "2 tokens"});
    refuse("a trace that cannot be written", TINY + "--trace @/nowhere/trace.json",
           {"--trace", "@/nowhere/trace.json"});
    refuse("validation data that is not there", TINY + "--val-data @/nowhere.txt", {"@/nowhere.txt"});
}

void test_bad_questions() {
    need_our_folder();
    const std::string good = read_bytes(QUESTIONS), EVAL = "eval --from data/reference/hf_tiny --hellaswag @/q.bin ";
    // Words of 16 bits from the first question on: 65535, bytes, index, label, endings, tokens of the context.
    auto with = [&](size_t word, uint16_t value) {
        std::string bytes = good;
        memcpy(&bytes[sizeof(int) * QUESTIONS_HEADER + 2 * word], &value, 2);
        return bytes;
    };
    auto with_header = [&](size_t number, int value) {
        std::string bytes = good;
        memcpy(&bytes[sizeof(int) * number], &value, sizeof(int));
        return bytes;
    };
    const std::tuple<const char*, std::string, Texts> CASES[] = {
        {"questions without a header", good.substr(0, 1000), {"1000", "1024"}},
        {"questions with another magic number", with_header(0, SHARD_MAGIC), {"20240520", "20240522"}},
        {"questions of another version", with_header(1, 2), {"version 2", "20240522, 1"}},
        {"no questions", with_header(2, 0), {"0 questions"}},
        {"questions that are cut short", good.substr(0, good.size() - 2), {"question 15", "truncated"}},
        {"fewer questions than the header says", with_header(2, 17), {"question 16", "17", "truncated"}},
        {"more questions than the header says", good + "ab", {"2 bytes", "16 questions"}},
        {"a question that begins with another number", with(0, 7), {"question 0", "65535", "7"}},
        {"a question of another size", with(1, 9), {"question 0", "bytes", "9"}},
        {"a question with another index", with(2, 5), {"question 0", "index", "5"}},
        {"a label that is no ending's", with(3, 4), {"question 0", "label 4", "4 endings"}},
        {"a context without tokens", with(5, 0), {"question 0", "context"}},
        {"a token outside the vocabulary in a question", with(6, 211), {"question 0", "token 211", "context", "211"}}};
    for (const auto& [what, bytes, named] : CASES) {
        write_bytes(scratch("@/q.bin"), bytes);
        Texts texts = named;
        texts.push_back("@/q.bin");
        refuse(what, EVAL, texts);
    }
    write_bytes(scratch("@/q.bin"), good);
    refuse("a question that is longer than a sequence", EVAL + "--seq-len 31",
           {"@/q.bin", "question", "33 tokens", "32", "--seq-len"});
    refuse("questions that are not there", "eval --from data/reference/hf_tiny --hellaswag @/nowhere.bin",
           {"@/nowhere.bin"});
    refuse("questions that are not there, in training", TINY + "--hellaswag @/nowhere.bin", {"@/nowhere.bin"});
    refuse("eval of nothing", "eval --from data/reference/hf_tiny", {"--data", "--hellaswag"});
}

// @/damaged is a run of two checkpoints, the last of which is damaged.
void test_way_around() {
    const std::string COMMAND = "train --data @/text.txt --out @/damaged --resume --steps 12", MOVE = "mv ";
    fs::create_directory(scratch("@/damaged/damaged_step_000010"));   // from an earlier time
    const Outcome refused = run(COMMAND);
    const size_t begin = refused.err.find(MOVE), end = refused.err.find(", and the same command", begin);
    claim_run(refused.code == 2 && refused.err.find(scratch("; before it there is @/damaged/step_000005: mv ")) != refused.err.npos &&
                  end != refused.err.npos && list_checkpoints(scratch("@/damaged")).size() == 2,
              "of a damaged checkpoint --resume names the one before it, and touches nothing", refused);
    if (end == refused.err.npos) return;
    const int moved = system(refused.err.substr(begin, end - begin).c_str());
    const Outcome resumed = run(COMMAND);
    claim_run(moved == 0 && resumed.code == 0 && log_of("@/damaged").size() == 15 &&
                  fs::exists(scratch("@/damaged/damaged_step_000010_/optimizer.safetensors")),
              "and the command that takes it", resumed, refused.err);
    fs::remove_all(scratch("@/damaged/step_000005"));
    fs::remove_all(scratch("@/damaged/step_000010"));
    fs::remove(scratch("@/damaged/step_000012/config.json"));
    const Outcome only = run(COMMAND);
    claim_run(only.code == 2 && only.err.find("there is no checkpoint before it") != only.err.npos,
              "or says that there is none", only);
}

void test_bad_folders() {
    need_our_folder();
    need_first_run();
    write_bytes(scratch("@/in_the_way"), "a file");
    fs::create_directory(scratch("@/no_run"));
    refuse("--out where a file is in the way", TINY + "--out @/in_the_way", {"--out", "@/in_the_way"});
    refuse("--out below a file", TINY + "--out @/in_the_way/below", {"--out", "@/in_the_way/below"});
    refuse("--out that already holds a run", TINY + "--out @/first", {"--out", "@/first", "--resume"});
    refuse("--resume without --out", TINY + "--resume", {"--resume", "--out"});
    refuse("--resume without a checkpoint", TINY + "--out @/no_run --resume", {"--resume", "@/no_run"});
    refuse("--resume with --from", TINY + "--out @/first --resume --from @/ours", {"--resume", "--from"});
    for (const std::string name : {"gpt2", "models/gpt2-xl"})
        refuse("--from " + name + " where there is none", "eval --data @/text.txt --from @/" + name,
               {"@/" + name, "scripts/download.sh " + name.substr(name.find("gpt2")), "--from models/gpt2"});
    refuse("--from a folder that is not there", "eval --data @/text.txt --from @/nowhere", {"@/nowhere/config.json"});

    // A run whose last checkpoint is damaged.
    auto refuse_resume = [](const std::string& what, const std::string& file, const std::string& bytes, Texts named) {
        fs::remove_all(scratch("@/damaged"));
        fs::copy(scratch("@/first"), scratch("@/damaged"), fs::copy_options::recursive);
        write_bytes(scratch("@/damaged/step_000010/" + file), bytes);
        named.push_back("@/damaged/step_000010/" + file);
        refuse("--resume with " + what, "train --data @/text.txt --out @/damaged --resume --steps 20", named);
    };
    refuse_resume("a trainer.json that is not JSON", "trainer.json", "{\"step\": 10", {"JSON"});
    refuse_resume("a trainer.json without the next window", "trainer.json", "{\"step\": 10}", {"next_window"});
    const std::string optimizer = read_bytes(scratch("@/first/step_000010/optimizer.safetensors"));
    for (const char* step : {"-1", "9", "10.5", "true", "1e300", "18446744073709551626", "\"10\""})
        refuse_resume(format("step %s in trainer.json", step), "trainer.json",
                      format("{\"step\": %s, \"next_window\": 1}", step), {"step"});
    for (const char* window : {"-1", "0.5", "false"})
        refuse_resume(format("next_window %s in trainer.json", window), "trainer.json",
                      format("{\"step\": 10, \"next_window\": %s}", window), {"next_window", window});
    for (const char* scale : {"0", "33554432", "1.5", "null"})
        refuse_resume(format("a loss scale of %s in trainer.json", scale), "trainer.json",
                      format("{\"step\": 10, \"next_window\": 1, \"options\": {\"loss-scaling\": \"dynamic\"}, "
                             "\"loss_scaling\": {\"scale\": %s, \"good_steps\": 0, \"skipped_steps\": 0}}", scale), {"scale", scale});
    refuse_resume("an option in trainer.json that is none", "trainer.json",
                  "{\"step\": 10, \"next_window\": 1, \"options\": {\"lr\": \"fast\"}}", {"lr", "fast", "a number"});
    const std::string moments = scratch("@/first/step_000010/optimizer.safetensors");
    std::vector<RawTensor> negative = raw_tensors(moments), more = negative;
    tensor_named("v/wpe.weight", negative).bytes.replace(8, 4, bytes_of(Floats{-1e-9f}));
    refuse_resume("a negative second moment", "optimizer.safetensors", safetensors(negative),
                  {"v/wpe.weight", "-1e-09", "element 2"});
    more.push_back({"w/wpe.weight", "F32", {1}, std::string(4, 0)});
    refuse_resume("a tensor that is no moment", "optimizer.safetensors", safetensors(more), {"w/wpe.weight"});
    refuse_resume("half an optimizer.safetensors", "optimizer.safetensors", optimizer.substr(0, optimizer.size() / 2), {"truncated"});
    test_way_around();
}

// eval --from a copy of @/ours in which one file has other contents; the message names it, or `blamed`.
void refuse_folder(const std::string& what, const std::string& file, const std::string& bytes, Texts named,
                   const std::string& blamed = "") {
    fs::remove_all(scratch("@/bad"));
    fs::copy(scratch("@/ours"), scratch("@/bad"));
    write_bytes(scratch("@/bad/" + file), bytes);
    named.push_back("@/bad/" + (blamed.empty() ? file : blamed));
    refuse(what, "eval --from @/bad --data @/eval_50.bin", named);
}

// An index of shards that is wrong. @/sharded is what @/ours is, its weights in two shards.
void test_bad_shards(const std::vector<RawTensor>& tensors) {
    const std::string dir = scratch("@/sharded"), index = dir + "/model.safetensors.index.json";
    fs::copy(scratch("@/ours"), dir);
    fs::remove(dir + "/model.safetensors");
    json map;
    for (const RawTensor& tensor : tensors)
        map[tensor.name] = tensor.name[0] == 'h' ? "h.safetensors" : "rest.safetensors";
    auto write_shard = [&](const std::string& name, const std::string& without) {
        std::vector<RawTensor> part;
        for (const RawTensor& tensor : tensors)
            if (map[tensor.name] == name && tensor.name != without) part.push_back(tensor);
        write_bytes(dir + "/" + name, safetensors(part));
    };
    auto refuse_sharded = [&](const std::string& what, const json& content, const Texts& named) {
        write_json(index, content);
        refuse(what, "eval --from @/sharded --data @/eval_50.bin", named);
    };
    write_shard("rest.safetensors", "");
    refuse_sharded("a shard that is missing", {{"weight_map", map}}, {index, dir + "/h.safetensors", "missing"});
    write_shard("h.safetensors", "h.1.ln_1.bias");
    refuse_sharded("a tensor that its shard lacks", {{"weight_map", map}},
                   {"@/sharded/h.safetensors", "h.1.ln_1.bias", "missing"});
    write_shard("h.safetensors", "");
    for (const char* path : {"../ours/model.safetensors", "/etc/passwd", "sub/h.safetensors", ""}) {
        json away = map;
        away["h.1.ln_1.bias"] = path;
        refuse_sharded(format("a shard in '%s'", path), {{"weight_map", away}},
                       {index, "h.1.ln_1.bias", format("'%s'", path)});
    }
    refuse_sharded("an index without a map", {{"metadata", 1}}, {index, "weight_map"});
    json fewer = map;
    fewer.erase("h.1.ln_1.bias");
    refuse_sharded("a tensor that the index lacks", {{"weight_map", fewer}},
                   {"@/sharded/h.safetensors", "h.1.ln_1.bias"});
    fs::remove(index);
    write_bytes(dir + "/pytorch_model.bin", "PK");
    refuse("a folder of PyTorch's own", "eval --from @/sharded --data @/eval_50.bin",
           {"@/sharded", "pytorch_model.bin", "python3 -c \"import sys, transformers",
            "safe_serialization=True)\" " + dir});
}

// Safetensors whose header is JSON, but not what the format allows.
void test_bad_headers() {
    auto file = [](const std::string& header, size_t bytes) {
        return bytes_of(std::vector<uint64_t>{header.size()}) + header + std::string(bytes, '\0');
    };
    auto refuse_header = [&](const std::string& what, const std::string& header, size_t bytes, const Texts& named) {
        refuse_folder(what, "model.safetensors", file(header, bytes), named);
    };
    auto entry = [](const std::string& name, const std::string& shape, const std::string& offsets) {
        return format("\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%s]}", name.c_str(), shape.c_str(),
                      offsets.c_str());
    };
    auto two = [](const std::string& a, const std::string& b) { return "{" + a + "," + b + "}"; };
    refuse_header("a hole between tensors", two(entry("a", "1", "0,4"), entry("b", "1", "8,12")), 12,
                  {"b", "byte 8", "expected 4", "hole"});
    refuse_header("a hole before the first", "{" + entry("a", "1", "4,8") + "}", 8, {"a", "byte 4"});
    refuse_header("tensors that overlap", two(entry("a", "2", "0,8"), entry("b", "1", "4,8")), 8, {"b", "overlap"});
    refuse_header("bytes behind the last tensor", "{" + entry("a", "1", "0,4") + "}", 7, {"3 bytes"});
    refuse_header("a name that occurs twice", two(entry("a", "1", "0,4"), entry("a", "1", "4,8")), 8,
                  {"\"a\"", "twice"});
    refuse_header("an offset that is no whole number", "{" + entry("a", "1", "0,4.5") + "}", 4, {"a", "4.5"});
    refuse_header("a negative offset", "{" + entry("a", "1", "-4,0") + "}", 4, {"a", "-4"});
    refuse_header("a shape that is no whole number", "{" + entry("a", "true", "0,4") + "}", 4, {"a", "true"});
    refuse_header("a shape beyond 64 bits", "{" + entry("a", "4611686018427387905,4", "0,16") + "}", 16,
                  {"a", "4611686018427387905", "memory"});
    refuse_header("a header that is a list", "[1]", 0, {"header"});
    refuse_header("a header of a million brackets", "{\"a\":" + std::string(1000000, '['), 0, {"levels deep"});

    // A header of more than 100 MB: a hole in a file takes no space on the disk.
    fs::copy(scratch("@/ours"), scratch("@/huge"));
    const uint64_t length = (100 << 20) + 1;
    write_bytes(scratch("@/huge/model.safetensors"), bytes_of(std::vector<uint64_t>{length}));
    fs::resize_file(scratch("@/huge/model.safetensors"), 8 + length);
    refuse("a header of more than 100 MB", "eval --from @/huge --data @/eval_50.bin",
           {"@/huge/model.safetensors", "104857601"});
    fs::resize_file(scratch("@/huge/config.json"), length);
    refuse("a config.json of more than 100 MB", "eval --from @/huge --data @/eval_50.bin",
           {"@/huge/config.json", "104857601"});

    // Halves at odd addresses; and very many names.
    write_bytes(scratch("@/odd.safetensors"),
                safetensors({{"a", "U8", {1}, "x"}, {"b", "BF16", {2}, bytes_of(std::vector<uint16_t>{0x3f80, 0xc000})},
                             {"c", "F16", {1}, bytes_of(std::vector<uint16_t>{0x3c00})}}));
    const Safetensors odd(scratch("@/odd.safetensors"));
    claim(odd.floats("b", {2}) == Floats{1, -2} && odd.floats("c", {1}) == Floats{1},
          "halves are read at odd addresses");
    constexpr int NAMES = 100000;
    std::string many = "{";
    for (int i = 0; i < NAMES; i++) many += (i ? "," : "") + entry(format("model.layers.%d.weight", i), "0", "0,0");
    write_bytes(scratch("@/many.safetensors"), file(many + "}", 0));
    const double began = processor_seconds();
    const Safetensors names(scratch("@/many.safetensors"));
    const double seconds = processor_seconds() - began;
    claim(names.entries().size() == NAMES && seconds < 10, "a header of 100,000 names is read in a second or so",
          format("%.2f s", seconds));
}

void test_bad_checkpoints() {
    need_our_folder();
    write_eval_shards();
    const std::string path = scratch("@/ours/model.safetensors"), whole = read_bytes(path);
    const size_t header = 8 + *reinterpret_cast<const uint64_t*>(whole.data());
    const size_t most = whole.size();
    for (size_t length : {size_t(0), size_t(7), size_t(8), size_t(100), header, header + 4, most / 2, most - 1})
        refuse_folder(format("model.safetensors cut to %zu of %zu bytes", length, most), "model.safetensors",
                      whole.substr(0, length), {});
    refuse_folder("a header that is not JSON", "model.safetensors", whole.substr(0, 8) + "?" + whole.substr(9), {"header"});

    const std::string name = "h.1.mlp.c_fc.bias";
    const size_t n = 4 * read_config(scratch("@/ours/config.json")).channels;   // its elements
    auto refuse_tensor = [&](const std::string& what, const std::function<void(RawTensor&)>& change, const Texts& named) {
        std::vector<RawTensor> tensors = raw_tensors(path);
        change(tensor_named(name, tensors));
        refuse_folder("a tensor " + what, "model.safetensors", safetensors(tensors), named);
    };
    auto put = [](float value) { return [=](RawTensor& t) { t.bytes.replace(40, 4, bytes_of(Floats{value})); }; };
    auto text = [](size_t number) { return std::to_string(number); };
    refuse_tensor("under another name", [](RawTensor& t) { t.name = "h.1.mlp.c_fc.offset"; }, {"h.1.mlp.c_fc.offset"});
    std::vector<RawTensor> fewer = raw_tensors(path);
    fewer.erase(std::find_if(fewer.begin(), fewer.end(), [&](const RawTensor& tensor) { return tensor.name == name; }));
    refuse_folder("a tensor that is missing", "model.safetensors", safetensors(fewer), {name, "missing"});
    refuse_tensor("of another shape", [&](RawTensor& t) { t.shape = {2, n / 2}; }, {name, "(2, " + text(n / 2), "(" + text(n)});
    refuse_tensor("that is too short", [&](RawTensor& t) { t.bytes.resize(4 * n - 4); }, {name, text(4 * n - 4), text(4 * n)});
    refuse_tensor("of another type", [](RawTensor& t) { t.dtype = "I32"; }, {name, "I32", "F32"});
    test_bad_shards(raw_tensors(path));
    test_bad_headers();
    std::vector<RawTensor> untied = raw_tensors(path);
    untied.push_back(tensor_named("wte.weight", untied));
    untied.back().name = "lm_head.weight";
    untied.back().bytes.replace(40, 4, bytes_of(Floats{1}));
    refuse_folder("a head of its own", "model.safetensors", safetensors(untied), {"lm_head.weight", "wte.weight"});
    for (const char* mask : {"h.9.attn.bias", "attn.bias", "h.0.attn.bias.attn.masked_bias", "x\x1b[31mred\ny"}) {
        std::vector<RawTensor> tensors = raw_tensors(path);
        tensors.push_back({mask, "U8", {4}, "1111"});
        refuse_folder("a tensor " + one_line(mask) + ", which is no mask", "model.safetensors", safetensors(tensors),
                      {"tensor " + one_line(mask) + " does not belong"});
    }
    refuse_tensor("with a NaN", put(NAN), {name, "nan", "element 10"});
    refuse_tensor("with an infinity", put(INFINITY), {name, "inf", "element 10"});
}

void test_bad_configs() {
    need_our_folder();
    write_eval_shards();
    const json config = read_json(scratch("@/ours/config.json"));
    auto with = [&](const char* key, const json& value) {
        json changed = config;
        changed[key] = value;
        return changed.dump();
    };
    auto refuse_config = [&](const std::string& what, const char* key, const json& value, const Texts& named) {
        refuse_folder("config.json with " + what, "config.json", with(key, value), named);
    };
    json incomplete = config;
    incomplete.erase("n_layer");
    refuse_folder("config.json that is not JSON", "config.json", "{\"n_layer\": ", {"JSON"});
    refuse_folder("config.json that is a list", "config.json", "[1, 2]", {});
    refuse_folder("config.json without n_layer", "config.json", incomplete.dump(), {"n_layer"});
    refuse_config("text for n_head", "n_head", "three", {});
    for (const json& value : {json(true), json(2.9), json(4294967298), json(-4294967295), json("3"), json(nullptr)})
        for (const char* key : {"n_head", "n_layer", "vocab_size"})
            refuse_config(value.dump() + " for " + key, key, value, {key, value.dump(), "a whole number"});
    refuse_folder("config.json a million levels deep", "config.json", std::string(1000000, '['), {"levels deep"});
    refuse_folder("config.json with a name that occurs twice", "config.json", "{\"n_head\": 1, \"n_head\": 2}",
                  {"n_head", "twice"});
    fs::copy(scratch("@/ours"), scratch("@/of_pipes"));
    fs::remove(scratch("@/of_pipes/config.json"));
    mkfifo(scratch("@/of_pipes/config.json").c_str(), 0600);
    refuse("a pipe for config.json", "eval --from @/of_pipes --data @/eval_50.bin",
           {"@/of_pipes/config.json", "not a regular file"});
    refuse_config("no heads", "n_head", 0, {"0 heads"});
    refuse_config("a negative number of layers", "n_layer", -1, {"-1 layers"});
    const int C = config.at("n_embd");
    refuse_config("a head size of 8", "n_head", C / 8, {format("%d channels over %d heads", C, C / 8), "16, 32"});
    refuse_config("another activation", "activation_function", "relu", {"activation_function", "relu", "gelu_new"});
    refuse_config("another kind of model", "model_type", "llama", {"model_type", "llama", "gpt2"});
    refuse_config("an untied head", "tie_word_embeddings", false, {"tie_word_embeddings"});
    refuse_config("an MLP of another width", "n_inner", 100, {"n_inner", "100", std::to_string(4 * C)});
    refuse_folder("fewer layers than config.json says", "config.json", with("n_layer", 9), {"h.3.", "missing"}, "model.safetensors");
    refuse_folder("more layers than config.json says", "config.json", with("n_layer", 2), {"h.2.", "2 layers"}, "model.safetensors");
}

// ==== plan ===================================================================

Setup planned(const std::string& model, int B, int T, DType precision, DType grad_dtype) {
    Options o;
    o.model = model;
    Config c = config_from_options(o, 0);
    c.context = std::max(c.context, T);
    return {c, B, T, Recompute::NONE, grad_dtype, Purpose::TRAINING, HEAD_ROWS, Attention::FLASH, precision, true};
}

// The chapter's table of bytes per parameter, which gives 16, 112, 1120 and 6480 GB for 1, 7, 70 and 405 billion.
void test_chapter_table() {
    struct Kind { const char* name; DType precision, grad_dtype; double per_parameter; };
    const std::pair<double, double> TABLE[] = {{1e9, 16e9}, {7e9, 112e9}, {70e9, 1120e9}, {405e9, 6480e9}};
    for (const Kind& kind : {Kind{"fp32", DType::FP32, DType::FP32, 16}, Kind{"bf16, gradients bf16", DType::BF16, DType::BF16, 16},
                             Kind{"bf16, gradients fp32", DType::BF16, DType::FP32, 18}}) {
        bool exact = true;
        for (const char* model : {"1b", "7b", "70b", "405b"}) {
            const Setup s = planned(model, 1, 1024, kind.precision, kind.grad_dtype);
            exact = exact && state_bytes(plan(s)) == kind.per_parameter * layout_of(s.config).elements();
        }
        for (const auto& [parameters, bytes] : TABLE)
            exact = exact && (kind.per_parameter != 16 || parameters * kind.per_parameter == bytes);
        claim(exact, format("%s: %g bytes of state per parameter, as in the chapter's table", kind.name, kind.per_parameter));
    }
}

// The formulas written out once more, in 128 bits, for random models.
void test_closed_forms() {
    typedef unsigned __int128 Big;
    bool parameters = true, activations = true;
    for (uint64_t i = 0; i < 200; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return 1 + splitmix64(splitmix64(i) + at++) % most; };
        const Big L = draw(200), NH = draw(64), HS = 16 * draw(8), C = NH * HS, V = draw(200000), T = draw(131072), B = draw(64);
        const Config c = {int(L), int(NH), int(C), int(T), int(V)};
        const Setup s = {c, int(B), int(T), Recompute::NONE, DType::FP32, Purpose::TRAINING, HEAD_ROWS, Attention::FLASH, DType::BF16, true};
        if (B * T >= MOST_ROWS) continue;
        parameters = parameters && count_parameters(c).real == C * V + L * (12 * C * C + 13 * C) + 2 * C + T * C;
        const Big N = B * T, Vp = c.padded_vocab(), rows = std::min<Big>(N, HEAD_ROWS);
        const Big layers = L * N * (32 * C + 16 + 4 * NH);        // ln1 to gelu, and mean, rstd, lse
        const Big others = N * (6 * C + 8) + 2 * rows * Vp + 4 * N;   // branch, resf, lnf and their statistics; logits; losses
        const Big gradients = N * (20 * C + 4 * NH);              // dres, dln, dqkv, datt, dfc, att_d
        activations = activations && plan(s).bytes[static_cast<int>(Category::ACTIVATIONS)] == layers + others + gradients;
    }
    claim(parameters, "200 random models: parameters are hV + L(12h^2 + 13h) + 2h and positions");
    claim(activations, "200 random models: activations are 32C + 16 + 4 NH bytes per token and layer and what is there once");
    for (const auto& [mode, most] : {std::pair{Recompute::NONE, 33.0}, {Recompute::SELECTIVE, 20.1}, {Recompute::FULL, 2.0}}) {
        Setup s = planned("gpt2", 8, 1024, DType::BF16, DType::FP32);
        s.recompute = mode;
        Activations nowhere;
        double kept = 0;
        for (const ActivationRow& row : activation_table(nowhere, s)) kept += row.copies == 12 ? row.copy_bytes() : 0;
        kept /= s.N() * s.config.channels;
        claim(kept <= most, format("recompute %s keeps at most %.1f C bytes per token and layer", RECOMPUTE_NAMES[int(mode)].first, most),
              format("%.2f C", kept));
    }
    const Setup huge = planned("405b", 1, 131072, DType::BF16, DType::BF16);
    const size_t fc = size_t{131072} * 4 * 16384 * 2 * 126;
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, huge))
        if (std::string(row.name) == "fc") claim(row.bytes() == fc, "405b with T = 131072: fc takes 2.165e12 bytes", format("%zu", row.bytes()));
}

void test_auto_fits() {
    bool fits = true, largest = true;
    for (size_t memory : {size_t(4e9), size_t(24e9), size_t(80e9)})
        for (const auto& [name, mode] : RECOMPUTE_NAMES) {
            Setup s = planned("gpt2", 1, 1024, DType::BF16, DType::FP32);
            s.recompute = mode;
            s.B = auto_micro_batch(s, memory, 512 * 1024);
            fits = fits && plan(s).total <= memory && 512 % s.B == 0;
            s.B *= 2;
            largest = largest && (512 % s.B != 0 || plan(s).total > 0.95 * memory);
        }
    claim(fits, "--micro-batch auto fits in 4, 24 and 80 GB, and divides the total batch");
    claim(largest, "twice that micro-batch would not fit with the margin");
}

// Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 GPUs.
void test_zero_stages() {
    Setup s = planned("7b", 1, 1024, DType::BF16, DType::BF16);
    s.config = {36, 32, 4096, 1024, 60000};
    s.gpus = 64;
    const size_t P = layout_of(s).elements(), stages[] = {16 * P, 4 * P + 12 * P / 64, 2 * P + 14 * P / 64, 16 * P / 64};
    const char* figures[] = {"120.0", "31.4", "16.6", "1.9"};
    bool figure = true, formula = true, record = true;
    const json records = stage_records(s, size_t(80e9));
    for (s.zero = 0; s.zero <= 3; s.zero++) {
        const Plan p = plan(s);
        const json& r = records[s.zero];
        formula = formula && state_bytes(p) == stages[s.zero];
        figure = figure && format("%.1f", state_bytes(p) / 1e9) == figures[s.zero];
        record = record && r["zero"] == s.zero && r["chosen"] == (s.zero == 0) && r["state"] == state_bytes(p) &&
                 r["bytes"]["total"] == p.total && r["fits"] == (p.total <= 80e9) &&
                 r["bytes"]["buffers"] == p.bytes[static_cast<int>(Category::BUFFERS)];
    }
    claim(formula, "ZeRO 0 to 3 on R GPUs: 16P, 4P + 12P/R, 2P + 14P/R and 16P/R bytes of state, to the byte");
    claim(figure, "7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB of state, as in the ZeRO paper");
    claim(record && records.size() == 4, "the record of each stage is its plan", records.dump());
    s.gpus = 1;
    s.zero = 0;
    claim(stage_records(s, 1).size() == 1, "one GPU has one stage");
}

// Steps small enough to be followed by hand. All sends by the link in its time, in brackets; G: gradients, W: weights.
void test_timeline() {
    auto is = [](const StepTime& t, double seconds, double computing, double bytes, double sending) {
        return t.seconds == seconds && t.computing == computing && t.bytes == bytes && t.sending == sending;
    };
    auto text = [](const StepTime& t) { return format("%g s, %g computing, %g bytes", t.seconds, t.computing, t.bytes); };
    StepWork w = {2, 0, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // forward to 20, head to 40, backward to 60 [2 G2 to 68], backward to 80 [2 G1 to 88, 2 G0 to 94]
    StepTime t = step_time(w, 1);
    claim(is(t, 94, 80, 22, 22) && t.exposed() == 14 && t.hidden() == 8, "by hand: a step of ZeRO 0", text(t));
    w.again = 5;   // in the first layer's backward
    t = step_time(w, 2);
    claim(is(t, 85 + 85 + 14, 170, 22, 22), "by hand: of two micro-batches the last one sends", text(t));
    w = {2, 0, 1, 0, 2, {1, 2}, {3, 4}, 0.5};
    // forward to 2, head to 4, backward to 6 [2 G2 to 22], backward to 8 [2 G1 to 38, 2 G0 to 50]
    t = step_time(w, 1);
    claim(is(t, 50, 8, 22, 44) && t.hidden() == 2, "by hand: what is sent waits for what was sent before", text(t));
    w = {2, 1, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 23, head to 43, backward to 63 [G2 to 67] and 83 [G1 to 87, G0 to 90]
    t = step_time(w, 1);
    claim(is(t, 90, 80, 16, 16), "by hand: ZeRO 1 waits for the first weights, and gathers the next ones meanwhile", text(t));
    w.zero = 2;
    t = step_time(w, 2);   // the same, and forward from 83, which does not wait: to 163 [G2, G1 to 167, G0 to 170]
    claim(is(t, 170, 160, 27, 27), "by hand: ZeRO 2 sends gradients of each micro-batch", text(t));
    w = {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 13 [W3 to 15] to 33, head to 53, backward to 73 [G3 to 77, W1 to 79],
    // 93 [G2 to 97], 113 [G1 to 117, G0 to 120]; forward to 123 [W3 to 125], 143, head to 163, backward to 183 [G3, W1], 203
    // [G2], 223 [G1 to 227, G0 to 230]
    t = step_time(w, 2);
    claim(is(t, 230, 220, 43, 43), "by hand: ZeRO 3 gathers again what its two buffers do not hold", text(t));
    t = step_time(w, 5);
    claim(is(t, 230 + 3 * 110, 5 * 110, 43 + 3 * 19, 43 + 3 * 19), "by hand: each further micro-batch takes as long", text(t));
    w = {1, 2, 1, 0, 2, {1, 2}, {3, 4}, 0.5};
    // [W0 to 2, W1 to 6] forward to 7, head to 9, backward to 11 [G1 to 19, G0 to 25]; forward to 12, and the head waits for
    // G0's buffer: from 25 to 27, backward to 29 [G1 to 37, G0 to 43]
    t = step_time(w, 2);
    claim(is(t, 43, 10, 17, 34), "by hand: gradients wait for their buffer", text(t));
}

// Any step: the shortcut for many micro-batches, and what no order of events can change.
void test_timeline_at_random() {
    bool shortcut = true, bounds = true;
    for (uint64_t i = 0; i < 2000; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return splitmix64(splitmix64(i) + at++) % most; };
        StepWork w = {1 + draw(7), int(draw(4)), 1.0 + draw(9), 1.0 * draw(5), 1.0 * draw(30), {}, {}, 0.25 * (1 + draw(40))};
        for (double* bytes : {w.weights, w.gradients}) {
            bytes[0] = draw(20);
            bytes[1] = draw(20);
        }
        const long A = 1 + draw(12);
        const StepTime fast = step_time(w, A), all = simulate(w, A);
        auto near = [&](double a, double b) { return std::abs(a - b) <= 1e-9 * (all.seconds + all.bytes); };
        shortcut = shortcut && near(fast.seconds, all.seconds) && near(fast.computing, all.computing) &&
                   near(fast.sending, all.sending) && near(fast.bytes, all.bytes);
        const double computing = A * (3 * w.forward * w.layers + w.again * (w.layers - 1) + w.head);
        bounds = bounds && near(all.computing, computing) && all.seconds >= std::max(all.computing, all.sending) - 1e-9 &&
                 all.seconds <= all.computing + all.sending + 1e-9 && near(all.bytes / w.bandwidth, all.sending);
    }
    claim(shortcut, "2000 random steps: many micro-batches take what simulating all of them says");
    claim(bounds, "2000 random steps: no shorter than computing or sending, no longer than both");
}

// What the comment of "many GPUs" says that is sent, with group 0 and the buffers in mind; and FLOPs.
void test_sent() {
    bool bytes = true, flops = true;
    for (const auto& [name, mode] : RECOMPUTE_NAMES)
        for (const int gpus : {1, 2, 3, 64}) {
            Setup s = planned("gpt2", 2, 512, DType::BF16, DType::FP32);
            s.gpus = gpus;
            s.recompute = mode;
            s.attention = gpus == 3 ? Attention::NAIVE : Attention::FLASH;
            const Layout y = layout_of(s);
            const double part = double(gpus - 1) / gpus, P = y.elements(), A = 6, L = 12;
            const double gathers = y.outside + y.layer * (L + (L - 2) + (A - 1) * 2 * (L - 2));   // two layers are there
            const double sent[] = {2 * 4 * P, 4 * P + 2 * P, 4 * P * A + 2 * P, 4 * P * A + 2 * gathers};
            for (s.zero = 0; s.zero <= 3; s.zero++) {
                const StepTime t = step_time(step_work(s, 1e12, 1e9), 6);
                bytes = bytes && std::abs(t.bytes - sent[s.zero] * part) <= 1e-12 * sent[s.zero];
                const double computing = flops_per_token(s).hardware * s.N() * 6 / 1e12;
                flops = flops && std::abs(t.computing - computing) <= 1e-12 * computing;
            }
        }
    claim(bytes, "bytes sent: 2G; G + W; A G + W; A G + W, and layers again, each (R - 1) / R times");
    claim(flops, "computing takes the hardware FLOPs of all micro-batches");
}

const std::string PLAN_7B = "plan --model 7b --gpu-memory 80GB --total-batch 4194304 --bandwidth 50 ";

void test_plan_of_many() {
    const std::string command = PLAN_7B + "--gpus 64 --zero 2 --grad-dtype bf16 --micro-batch 2 --flops 300";
    const Outcome outcome = run(command + " --json"), table = run(command), silent = run("plan --gpus 2 --gpu-memory 8GB --json");
    const json record = json::parse(outcome.out, nullptr, false), other = json::parse(silent.out, nullptr, false);
    Setup s = planned("7b", 2, 2048, DType::BF16, DType::BF16);
    s.gpus = 64;
    s.zero = 2;
    bool right = record.is_object() && other.is_object();
    const json leaves = record.flatten();
    for (const char* path : {"/gpus", "/zero", "/bytes/buffers", "/bytes_sent", "/flops_per_s", "/flops_assumed", "/bandwidth",
                             "/zero_stages/3/state", "/zero_stages/3/bytes/total", "/zero_stages/3/bytes_per_parameter",
                             "/zero_stages/3/fits", "/zero_stages/3/chosen", "/step/seconds", "/step/computing",
                             "/step/sending", "/step/hidden", "/step/exposed", "/step/tokens_per_s"})
        right = right && leaves.contains(path);
    claim_run(right, "plan --gpus --json has the keys that it promises", outcome, silent.err);
    if (!right) return;
    const StepTime t = step_time(step_work(s, 300e12, 50e9), 16);
    claim_run(record["bytes"] == record["zero_stages"][2]["bytes"] && record["bytes"]["total"] == plan(s).total &&
                  record["zero_stages"][2]["chosen"] == true && record["zero_stages"].size() == 4 &&
                  record["accumulation"] == 16 && record["bytes_sent"] == t.bytes &&
                  record["step"]["seconds"] == t.seconds && record["step"]["exposed"] == t.exposed() &&
                  std::abs(double(record["step"]["tokens_per_s"]) * t.seconds - 4194304) < 1,
              "its figures are the plan's and the timeline's", outcome);
    claim_run(other["step"].is_null() && other["bandwidth"].is_null() && other["flops_assumed"] == true &&
                  double(other["bytes_sent"]) > 0,
              "without --bandwidth it says what is sent, and not how long that takes", silent);
    bool marked = true;
    for (const char* line : {"\n     0 ", "\n     1 ", "\n  -> 2 ", "\n     3 ", "300 TFLOP/s\n", "ms of sending at 50 GB/s"})
        marked = marked && table.out.find(line) != table.out.npos;
    claim_run(marked && table.out.find("assumed") == table.out.npos, "its table has the four stages, one of them marked", table);
    const size_t steps = table.out.find("  3  largest   --micro-batch ");
    long B = 0, A = 0, tokens[4] = {};
    const bool read = steps != table.out.npos &&
                      sscanf(table.out.c_str() + steps, "  3  largest   --micro-batch %ld --recompute none --zero 2\n  4  the "
                             "rest  on 64 GPUs (mpirun -n 64), accumulated over %ld micro-batches of each: %ld x %ld x %ld x %ld",
                             &B, &A, &tokens[0], &tokens[1], &tokens[2], &tokens[3]) == 6;
    s.B = static_cast<int>(B);
    const bool fits = plan(s).total <= 80e9;
    s.B *= 2;
    claim_run(read && tokens[0] == B && tokens[2] == A && B * 2048 * A * 64 == 4194304 && fits && plan(s).total > 80e9,
              "from a total batch to micro-batch, accumulation and GPUs", table);
}

void test_scan() {
    const Outcome outcome = run(PLAN_7B + "--scan --gpus 8..512 --json"), table = run(PLAN_7B + "--scan --gpus 8,24");
    const json record = json::parse(outcome.out, nullptr, false);
    if (!record.is_object() || record["scan"].size() != 7)
        return claim_run(false, "--gpus 8..512 are seven numbers", outcome);
    bool sorted = true, planned_so = true, fits = true, all = true;
    int gpus = 8;
    for (const json& scan : record["scan"]) {
        sorted = sorted && scan["gpus"] == gpus && !scan["layouts"].empty();
        std::set<std::tuple<int, std::string, int>> listed;
        for (const json& one : scan["layouts"]) {
            Setup s = planned("7b", one["micro_batch"], 2048, DType::BF16, DType::FP32);
            s.gpus = gpus;
            s.zero = one["zero"];
            for (const auto& [name, mode] : RECOMPUTE_NAMES)
                if (one["recompute"] == name) s.recompute = mode;
            const long A = one["accumulation"];
            const StepTime t = step_time(step_work(s, 400e12, 50e9), A);
            listed.emplace(s.zero, one["recompute"], s.B);
            planned_so = planned_so && one["bytes"] == plan(s).total && one["seconds"] == t.seconds &&
                         one["bytes_sent"] == t.bytes && A * s.B * 2048 * gpus == 4194304;
            fits = fits && size_t(one["bytes"]) <= 0.95 * 80e9;
            sorted = sorted && double(one["tokens_per_s"]) <= double(scan["layouts"][0]["tokens_per_s"]) * (1 + 2e-6);
        }
        // One after the other, none left out.
        for (int zero = 0; zero <= 3; zero++)
            for (const auto& [name, mode] : RECOMPUTE_NAMES)
                for (int B = 1; B * 2048 * gpus <= 4194304; B *= 2) {
                    Setup s = planned("7b", B, 2048, DType::BF16, DType::FP32);
                    s.gpus = gpus;
                    s.zero = zero;
                    s.recompute = mode;
                    all = all && listed.count({zero, name, B}) == (plan(s).total <= size_t(80e9 * 0.95));
                }
        gpus *= 2;
    }
    claim(sorted, "scan: for each number of GPUs no layout is faster than the first");
    claim(planned_so, "scan: bytes, time and what is sent are those of the plan, of all tokens");
    claim(fits, "scan: all fit, with a margin");
    claim(all, "scan: nothing that fits is left out");
    claim_run(table.code == 0 && table.out.find("\n     8     2  ") != table.out.npos &&
                  table.out.find("\n    24  --total-batch 4194304 is no multiple of --seq-len 2048 x 24 GPUs\n") != table.out.npos,
              "scan: where the batch cannot be shared out it says so", table);
}

// What bounds a layout, and flags that hold something fixed.
void test_scan_bounds() {
    auto first = [](const std::string& command) {
        return json::parse(run("plan --scan --json " + command).out)["scan"][0];
    };
    const std::string BIG = "--gpu-memory 80GB --total-batch 4194304 --bandwidth 50 ";
    const json small = first("--model gpt2 --gpus 8 --gpu-memory 24GB --total-batch 524288 --bandwidth 5");
    const json best = first("--model 7b --gpus 64 " + BIG)["layouts"][0];
    const json large = first("--model 70b --gpus 64 " + BIG)["layouts"];
    const json none = first("--model 70b --gpus 8 " + BIG), odd = first("--model gpt2 --gpus 3 --micro-batch 7 --gpu-memory 80GB "
                                                                       "--total-batch 98304 --bandwidth 5");
    if (small["layouts"].empty() || best.is_null() || large.size() < 2)
        return claim(false, "scan: these models fit on these GPUs", small.dump() + best.dump() + large.dump());
    claim(best["bound"] == "compute" && double(best["exposed"]) < 0.1 * double(best["seconds"]),
          "scan: bound by compute where little is lost", best.dump());
    claim(small["layouts"][0]["bound"] == "bandwidth", "scan: bound by bandwidth where sending is exposed", small["layouts"][0].dump());
    claim(large[0]["bound"] == "memory" && large[0]["recompute"] == "full" && large.back()["bound"] == "bandwidth",
          "scan: bound by memory where more of it would need no recomputation; not so where a faster one fits", large.dump());
    claim(none["layouts"].empty() && none["problem"].get<std::string>().find("no layout fits: the smallest takes ") == 0,
          "scan: where nothing fits it says what the smallest needs", none.dump());
    claim(odd["problem"] == "--micro-batch 7 does not divide 32 sequences of each GPU", "scan: and why else there is nothing", odd.dump());
    bool kept = true;
    const json held = first("--model 7b --gpus 64 --zero 3 --recompute selective --micro-batch 4 " + BIG)["layouts"];
    const json chosen = first("--model 7b --gpus 64 --zero 1 --recompute full " + BIG)["layouts"];
    for (const json& one : chosen)
        kept = kept && one["zero"] == 1 && one["recompute"] == "full";
    claim(kept && held.size() == 1 && held[0]["zero"] == 3 && held[0]["recompute"] == "selective" && held[0]["micro_batch"] == 4,
          "scan: what the command line gives stays", held.dump());
    std::vector<int> counts;
    claim(parse_gpu_counts("8..512", counts) && counts == std::vector<int>{8, 16, 32, 64, 128, 256, 512} &&
              parse_gpu_counts("5..17", counts) && counts == std::vector<int>{8, 16} &&
              parse_gpu_counts("8,24,1", counts) && counts == std::vector<int>{8, 24, 1} &&
              parse_gpu_counts("65536", counts) && counts == std::vector<int>{65536},
          "--gpus takes a number, a list, and powers of two from one number to another");
    bool divisors = micro_batches_to_try(96, 50) == std::vector<int>{1, 2, 4, 8, 16, 32, 48} &&
                    micro_batches_to_try(7, 4) == std::vector<int>{1} && micro_batches_to_try(7, 0).empty();
    claim(divisors, "scan: micro-batches are powers of two and the largest divisor");
}

// ==== naive against flash ====================================================

void test_naive_model() {
    const Reference r("odd");
    auto pass = [&](Attention attention, Recompute mode) {
        Setup s = r.setup(DType::FP32);
        s.attention = attention;
        s.recompute = mode;
        Model m;
        r.load(m, s);
        return pass_through(m, r.tokens(0, 0).data());
    };
    const Pass flash = pass(Attention::FLASH, Recompute::NONE), naive = pass(Attention::NAIVE, Recompute::NONE);
    // Both round, each in its own way: twice what one of them may be off by.
    const double limit = 2 * r.limit("logits", FLOATX);
    const double logits = relative_l2(naive.logits, flash.logits), gradient = relative_l2(naive.gradients, flash.gradients);
    claim(logits <= limit, "naive attention gives flash attention's logits", format("error %.2e, limit %.2e", logits, limit));
    claim(gradient <= 2 * limit, "and its gradients", format("error %.2e, limit %.2e", gradient, 2 * limit));
    claim(naive == pass(Attention::NAIVE, Recompute::SELECTIVE) && naive == pass(Attention::NAIVE, Recompute::FULL),
          "with naive attention, too, the three recompute modes give the same bits");
}

// The kernels of each --tensor-cores in a model with heads of 64, in sequences of several tiles.
void test_tensor_core_model() {
    if (!has_tensor_cores(TensorCores::MMA)) return;
    const Config config = {3, 2, 128, 200, 300};
    const int B = 2, T = 193;
    std::vector<int> tokens(B * (T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = splitmix64(i) % config.vocab;
    auto pass = [&](TensorCores kind, Recompute mode) {
        const TensorCores usual = std::exchange(device.tensor_cores, kind);
        Model m;
        allocate(m, {config, B, T, mode, DType::FP32, Purpose::TRAINING});
        init_parameters(m, 1);
        const Pass result = pass_through(m, tokens.data());
        device.tensor_cores = usual;
        return result;
    };
    const Pass portable = pass(TensorCores::NONE, Recompute::NONE);
    // Each layer's attention rounds to floatX a few times on its way, each kind in its own places.
    const double limit = FLOATX == DType::BF16 ? 0x1p-7 : 0x1p-10;
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA}) {
        if (!has_tensor_cores(kind)) continue;
        const char* name = name_of(kind);
        const Pass got = pass(kind, Recompute::NONE);
        const double logits = relative_l2(got.logits, portable.logits), gradient = relative_l2(got.gradients, portable.gradients);
        claim(logits <= limit && logits > 0, format("%s: logits are the portable kernels' within rounding", name), format("error %.2e, limit %.2e", logits, limit));
        claim(gradient <= limit, format("%s: and gradients", name), format("error %.2e, limit %.2e", gradient, limit));
        claim(got == pass(kind, Recompute::SELECTIVE) && got == pass(kind, Recompute::FULL),
              format("%s: the three recompute modes give the same bits", name));
    }
}

// ==== runs: trace ============================================================

void test_trace() {
    for (const char* flags : {"--recompute none", "--recompute selective", "--recompute full", "--attention naive"}) {
        const std::string setup = SMALL + "--micro-batch 2 --total-batch 64 " + flags;
        const Outcome o = run("train" + setup + " --steps 4 --eval-every 0 --graph on --trace @/trace.json");
        const json plan = json::parse(run("plan --layers 2 --heads 2 --channels 32 --context 16 --vocab 256 --micro-batch 2 --json " + std::string(flags)).out);
        const json trace = read_json(scratch("@/trace.json"));
        std::map<int, double> row_end;   // events of a row must follow on each other
        std::set<std::string> passes;
        bool ordered = true, within = true, rises = false;
        double highest = 0;
        std::map<double, double> alive;   // activations by time
        std::vector<double> updates;      // when they began
        for (const json& e : trace.at("traceEvents")) {
            if (e.at("ph") == "X" && e.at("name") == "adamw" && e.at("tid") == 1) updates.push_back(e.at("ts"));
            if (e.at("ph") == "C") alive[e.at("ts")] = e.at("args").at("activations");
            if (e.at("ph") == "X") {
                const double ts = e.at("ts"), end = ts + double(e.at("dur"));
                double& last = row_end[e.at("tid")];
                ordered = ordered && ts >= last - 1e-3 && end >= ts;   // a nanosecond: printed and read again
                last = end;
                passes.insert(e.at("args").at("pass"));
            } else if (e.at("ph") == "C") {
                for (const auto& [name, bytes] : e.at("args").items()) within = within && size_t(bytes) <= size_t(plan.at("bytes").at(name));
                highest = std::max(highest, double(e.at("args").at("activations")));
                rises = rises || e.at("args").at("gradients") > 0;
            }
        }
        const bool recomputes = std::string(flags).find("recompute none") == std::string::npos && std::string(flags).find("naive") == std::string::npos;
        claim_run(o.code == 0 && ordered && row_end.size() == 3, format("%s: the trace's rows are in order, none overlaps", flags), o);
        claim(within && rises && highest > 0.5 * double(plan.at("bytes").at("activations")), format("%s: live bytes rise, and stay within the plan", flags),
              format("%.0f of %zu bytes of activations at most", highest, size_t(plan.at("bytes").at("activations"))));
        bool dead = updates.size() == 2 * TRACED_STEPS;   // of what belongs to no layer, and of all layers
        for (double time : updates) dead = dead && std::prev(alive.upper_bound(time))->second == 0;
        claim(dead, format("%s: no activation is alive at the update", flags));
        claim(passes.count("forward") && passes.count("backward") && passes.count("update") && passes.count("recompute") == recomputes,
              format("%s: forward, %sbackward and update are told apart", flags, recomputes ? "recompute, " : ""));
    }
}

// ==== FP8 ====================================================================

#include "dev/kernels/test_fp8.cuh"

// ==== main ===================================================================

// What dev/reference/check_folder.py compares with safetensors, PyTorch and transformers.
void export_folder(const std::string& dir) {
    const Reference r("odd");
    Model m;
    write_folder(dir, r, m);
    const Batch batch = send_batch(m, r.tokens(0, 0).data());
    const std::vector<int> inputs = from_device(batch.inputs, m.setup.N());
    const Floats logits = logits_of(m, batch.inputs);
    const size_t B = r.B, T = r.T, V = r.config.vocab;
    write_bytes(dir + "/logits.safetensors", safetensors({{"input_ids", "I32", {B, T}, bytes_of(inputs)},
                                                          {"logits", "F32", {B, T, V}, bytes_of(logits)}}));
    printf("%s: config.json, model.safetensors, logits.safetensors\n", dir.c_str());
}

// With --only: how the names of tests to run begin, and how many did.
static std::vector<std::pair<std::string, int>> wanted;

bool is_wanted(const std::string& name) {
    bool found = wanted.empty();
    for (auto& [beginning, count] : wanted)
        if (name.rfind(beginning, 0) == 0) {
            count++;
            found = true;
        }
    return found;
}

// An exception fails a part of the tests, not the rest of them.
void test(const char* name, void (*function)()) {
    if (!is_wanted(name)) return;
    printf("%s\n", name);
    const double begin = processor_seconds();
    try {
        function();
    } catch (const std::exception& error) {
        claim(false, format("%s: ended by an exception", name), error.what());
    }
    printf("        %.1f s\n", processor_seconds() - begin);
    fflush(stdout);
}

void test_fp8() {
    if (!device_has_fp8()) return;
    test("kernels: fp8: layernorm", test_fp8_layernorm);
    test("kernels: fp8: gelu", test_fp8_gelu);
    test("kernels: fp8: attention", test_fp8_attention);
    test("kernels: fp8: scales", test_fp8_scales);
    test("kernels: fp8: transpose", test_fp8_transpose);
    test("kernels: fp8: weights", test_fp8_weights);
    test("kernels: fp8: matmul forward", test_fp8_matmul_forward);
    test("kernels: fp8: matmul backward input", test_fp8_matmul_backward_input);
    test("kernels: fp8: matmul backward weight", test_fp8_matmul_backward_weight);
    test("model in FP8", test_fp8_model);
    test("model in FP8: micro-batches", test_fp8_memory);
}

void test_kernels() {
    test("kernels: add partials", test_add_partials);
    test("kernels: embedding forward", test_embedding_forward);
    test("kernels: sort positions", test_sort_positions);
    test("kernels: embedding backward", test_embedding_backward);
    test("kernels: layernorm", test_layernorm);
    test("kernels: bias forward", test_bias_forward);
    test("kernels: bias backward", test_bias_backward);
    test("kernels: gelu", test_gelu);
    test("kernels: attention", test_attention);
    test("kernels: attention of one token", test_attention_of_last);
    test("kernels: naive attention", test_naive_attention);
    test("kernels: cross entropy", test_cross_entropy);
    test("kernels: gradient norm", test_gradient_norm);
    test("kernels: adamw", test_adamw);
    test("kernels: init normal", test_init_normal);
    test("kernels: fill and round", test_fill_and_round);
    test("kernels: matmul forward", test_matmul_forward);
    test("kernels: matmul backward input", test_matmul_backward_input);
    test("kernels: matmul backward weight", test_matmul_backward_weight);
    test_fp8();
}

void test_model() {
    test("model against PyTorch", test_reference);
    test("memory", test_memory);
    test("plan: the chapter's table", test_chapter_table);
    test("plan: closed forms", test_closed_forms);
    test("plan: --micro-batch auto", test_auto_fits);
    test("plan: stages of ZeRO", test_zero_stages);
    test("plan: timeline", test_timeline);
    test("plan: timeline at random", test_timeline_at_random);
    test("plan: what is sent", test_sent);
    test("naive attention in the model", test_naive_model);
    test("tensor cores in the model", test_tensor_core_model);
    test("folders that transformers wrote", test_folder_of_transformers);
    test("folders that we wrote", test_folder_of_ours);
    test("windows", test_windows);
    test("loader", test_loader);
    test("evaluation", test_evaluation);
    test("HellaSwag: losses of endings", test_hellaswag);
    test("HellaSwag: padding", test_padding);
    test("graphs", test_graphs);
    test("loss scaling", test_loss_scaling);
    test("schedule", test_schedule);
    test("sampling", test_pick_token);
    test("sampling: top-p", test_top_p);
    test("sampling: one token at a time", test_sampling);
    test("samples as text", test_readable);
    test("samples as text: as they come", test_printer);
    test("samples as text: on a terminal", test_terminal);
    test("lines that fit", test_fitted);
    test("words of a shell", test_shell_word);
}

void test_command_line() {
    write_text();
    test("runs: the same bits", test_repeated_runs);
    test("runs: without master weights", test_runs_without_master);
    test("runs: options of --resume", test_resume_options);
    if (device_has_fp8()) test("runs: FP8", test_fp8_runs);
    test("runs: loss scaling", test_loss_scaling_runs);
    test("runs: accumulation", test_accumulation);
    test("runs: sequences of an evaluation", test_eval_sequences);
    test("runs: threads", test_threads);
    test("runs: beside other programs", test_busy_machine);
    test("runs: matmul tuning", test_matmul_tuning);
    test("runs: --micro-batch auto", test_auto_micro_batch);
    test("runs: log", test_log);
    test("runs: log that is damaged", test_damaged_log);
    test("runs: log on disk", test_log_on_disk);
    test("runs: on a terminal", test_terminal_width);
    test("runs: what comes next", test_next_commands);
    test("runs: plan", test_plan_json);
    test("runs: plan of many GPUs", test_plan_of_many);
    test("runs: plan --scan", test_scan);
    test("runs: plan --scan: bounds", test_scan_bounds);
    test("runs: plan without master weights", test_plan_without_master);
    test("runs: recipes", test_recipes);
    test("runs: trace", test_trace);
    test("runs: Hugging Face", test_verbs_on_folder);
    test("runs: what eval prints", test_eval_lines);
    test("runs: HellaSwag", test_hellaswag_runs);
    test("runs: text", test_text_of_tokens);
    test("runs: text while training", test_text_while_training);
    test("runs: text as data", test_text_as_data);
    test("runs: tokenizer of bytes", test_byte_tokenizer);
    test("runs: tokenizer of --from", test_tokenizer_travels);
    test("runs: signals", test_signals);
    test("runs: that nobody sees", test_unseen);
    test("runs: output that cannot be written", test_full_output);
    test("runs: a second one", test_second_run);
    test("runs: leftovers", test_leftovers);
    test("runs: killed early", test_early_death);
    test("runs: that fail late", test_late_failure);
    test("runs: removal of a checkpoint", test_removal);
    test("runs: full disk", test_full_disk);
    test("runs: loss that is not finite", test_nan);
    test("runs: that could not begin", test_failed_start);
    test("defaults", test_defaults);
    test("README", test_readme);
    test("bad flags", test_bad_flags);
    test("bad flags: FP8", test_bad_fp8);
    test("bad flags: many GPUs", test_bad_numbers_of_gpus);
    test("bad text", test_bad_text);
    test("bad data", test_bad_data);
    test("bad questions", test_bad_questions);
    test("bad folders", test_bad_folders);
    test("bad checkpoints", test_bad_checkpoints);
    test("bad config.json", test_bad_configs);
}

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "--as-train-gpt") return guarded_main(argc - 1, argv + 1);
    if (argc > 1 && !((what == "--export" || what == "--only") && argc == 3) && !(what == "--hellaswag" && argc == 5)) {
        fprintf(stderr, "usage: test_gpt | test_gpt --only PART,PART... | test_gpt --export DIR | test_gpt --as-train-gpt ...\n"
                        "       test_gpt --hellaswag DIR FILE B: answers as JSON, in batches of B times DIR's context\n"
                        "PART: how the names of tests to run begin, such as kernels or kernels: attention\n");
        return 2;
    }
    open_device(TensorCores::AUTO);
    if (what == "--export") {
        export_folder(argv[2]);
        return 0;
    }
    if (what == "--hellaswag") {   // for dev/text/check_hellaswag.py
        Model m;
        const int T = read_config(argv[2] + std::string("/config.json")).context;
        load_folder(m, argv[2], Purpose::INFERENCE, atoi(argv[4]), T);
        printf("%s\n", answers(m, read_questions(argv[3], m.config.vocab, T)).dump().c_str());
        return 0;
    }
    if (what == "--only") {
        std::istringstream names(argv[2]);
        for (std::string name; std::getline(names, name, ',');) wanted.emplace_back(name, 0);
    }
    test_kernels();
    test_model();
    test_command_line();
    for (const auto& [beginning, count] : wanted)
        if (count == 0) {
            fprintf(stderr, "test_gpt: --only: no test is called '%s...'\n", beginning.c_str());
            return 2;
        }
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

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
//    runs: trace
//    main                         the list of all tests
// Beside it, included where they come
//    gpt/                   test_runs.cuh: command lines as a whole: the same bits, what runs write, how they end
//                                 badly; test_bad_input.cuh: what is refused
//    dev/tests/test_plan.cuh    what `plan` says of memory and time
//    dev/tests/test_fp8.cuh     FP8

#define TESTING
#include "train_gpt.cu"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>
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
    // FP16's last: 2^-24
    return std::ldexp(1.0, IS_HALF ? std::max(std::ilogb(x) - digits, -25) : std::ilogb(x) - digits);
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
    Trial forward("layernorm_forward"), backward("layernorm_backward");
    for (size_t N : ROWS)
        for (int C : CHANNELS) {
            try_layernorm_forward(forward, N, C, false);
            try_layernorm_forward(forward, N, C, true);
            for (bool biased : {false, true})
                for_each_gradient_type([&](auto type) { try_layernorm_backward<decltype(type)>(backward, N, C, biased);
                    });
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
    std::vector<int> head_sizes = {16, 32, 48, 64, 80, 96, 112, 128};
    const size_t most = device.properties.sharedMemPerBlockOptin;
    while (attention_backward_shared(head_sizes.back()) > most) head_sizes.pop_back();
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
void test_attention_decode() {
    const TensorCores usual = std::exchange(device.tensor_cores, TensorCores::NONE);   // for attention_loop
    Trial trial("attention_decode");
    int n = 0;
    for (int HS : {16, 32, 48, 64, 80, 96, 112, 128})
        for (int T : {1, 2, 7, 32, 33, 150}) {
            const AttentionSize s = {1, T, 1 + n++ % 3, HS};
            trial.at("T %d, NH %d, HS %d", T, s.NH, HS);
            const Values qkv = attention_inputs(s);
            const auto got = trial.run([&] {
                const DeviceArray<floatX> out(s.C()), d_qkv(qkv);
                attention_decode(out, d_qkv, T, s.NH, HS);
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

// Two layers of n elements in blocks with gaps between layers, which stay as they are. With MasterWeights::NONE a tenth
// of the gradients and moments are zero, and the weights that an update leaves as they were are counted. unscale 0: the
// step is skipped, and only gradients become 0.
struct AdamWCase { size_t n, decayed; float clip; double norm; float unscale, lr; };

template <typename G> void try_adamw(Trial& trial, const AdamWCase& c, MasterWeights kept) {
    trial.at("n %zu, decayed %zu, clip %g, norm %g, unscale %g, lr %g", c.n, c.decayed, c.clip, c.norm, c.unscale,
             c.lr);
    const bool copy = kept == MasterWeights::FP32, separate = copy && SEPARATE_MASTER;
    const AdamW a = {c.lr, 0.9f, 0.95f, 1e-3f, copy ? 0.25f : 0, c.clip, 1 - 0.9f * 0.9f * 0.9f,
                     1 - 0.95f * 0.95f * 0.95f};
    const size_t layers = 2;
    const Strides strides = {c.n + 32, c.n + 32, c.n + 48, c.n + 16};
    const size_t all = layers * strides.master;
    const Values w0 = copy ? random_values<float>(all) : random_values<floatX>(all);
    Values g0 = random_values<G>(layers * strides.grads, copy ? -3 : 0.25, 3),
        m0 = random_values<float>(layers * strides.moments, 0.25, 1);
    const Values v0 = random_values<float>(layers * strides.moments, 0, 1);
    for (size_t l = 0; l < layers && !copy; l++)
        for (size_t i = 0; i < c.n; i += 10) g0[l * strides.grads + i] = m0[l * strides.moments + i] = 0;
    const auto got = trial.run([&] {
        const DeviceArray<float> master(copy ? w0 : Values{0}), m(m0), v(v0), norm(Values{c.norm}),
            scale = scale_on_device({1, c.unscale});
        const DeviceArray<floatX> weights(w0);
        const DeviceArray<G> grads(g0);
        const DeviceArray<float> settings(sizeof(AdamW) / sizeof(float));
        const DeviceArray<unsigned long long> count(Values{5});
        AdamW* const d_settings = reinterpret_cast<AdamW*>(static_cast<float*>(settings));
        void* const same = static_cast<void*>(master);   // in FP32 weights and master are one
        set_adamw(d_settings, a);
        adamw(separate || !copy ? static_cast<floatX*>(weights) : static_cast<floatX*>(same),
              copy ? static_cast<float*>(master) : nullptr,
              grad(grads), m, v, norm, loss_scale_in(scale), d_settings, c.decayed, c.n, layers, strides, count);
        return Outputs{copy ? master.download() : weights.download(), m.download(), v.download(), grads.download(),
                       count.download(), weights.download()};
    });
    Numbers w = numbers(w0), m = numbers(m0), v = numbers(v0);
    Values grads = g0, rounded = w0;
    double lost = 5;
    const bool clips = c.clip > 0 && c.norm > c.clip;
    const Number scale = (clips ? Number(c.clip) / (Number(c.norm) + 1e-6) : Number(1)) * c.unscale;
    for (size_t l = 0; l < layers; l++)
        for (size_t i = 0; i < c.n; i++) {
            const size_t at_w = l * strides.master + i, at_m = l * strides.moments + i;
            const Number g = scale * g0[l * strides.grads + i];
            grads[l * strides.grads + i] = 0;
            if (c.unscale == 0) continue;
            m[at_m] = Number(a.beta1) * m[at_m] + Number(1 - a.beta1) * g;
            v[at_m] = Number(a.beta2) * v[at_m] + Number(1 - a.beta2) * g * g;
            const Number step = m[at_m] / a.correction1 / (sqrt(v[at_m] / a.correction2) + a.eps);
            w[at_w] = w[at_w] - Number(a.lr) * (step + Number(i < c.decayed ? a.weight_decay : 0) * w[at_w]);
            rounded[at_w] = got[0][at_w];
            lost += !copy && g0[l * strides.grads + i] != 0 && got[0][at_w] == w0[at_w];
        }
    if (copy) trial.compare<float>("master", got[0], w);
    else trial.compare<floatX>("weights", got[0], w);
    trial.compare<float>("m", got[1], m);
    trial.compare<float>("v", got[2], v);
    trial.equal("gradients", got[3], grads);
    trial.equal("count", got[4], {lost});
    if (separate) trial.equal("weights", got[5], values_stored_as<floatX>(numbers(rounded)));
}

void test_adamw() {
    Trial trial("adamw"), without("adamw without a master copy");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t n : {size_t{16}, SPAN - 16, 2 * SPAN + 48}) {
            for (size_t decayed : {size_t{0}, n / 32 * 16, n})
                // clipped, short, no clipping
                for (const auto& [clip, norm] : {std::pair{1.0f, 8.0}, {1.0f, 0.5}, {0.0f, double(NAN)}})
                    try_adamw<G>(trial, {n, decayed, clip, norm, 1.0f / 3, 3e-2f}, MasterWeights::FP32);
            try_adamw<G>(trial, {n, n, 1, INFINITY, 0, 3e-2f}, MasterWeights::FP32);   // skipped
            for (float lr : {1e-1f, 1e-3f, 1e-5f})   // few weights stay, some, almost all
                if (SEPARATE_MASTER) try_adamw<G>(without, {n, 0, 0, NAN, 1, lr}, MasterWeights::NONE);
        }
    });
    trial.report("master, m, v, gradients back at 0, and weights, which are master rounded; between layers nothing,");
    if (SEPARATE_MASTER) without.report("weights, m, v, gradients back at 0, and how many weights stay as they were");
}

// ==== init ===================================================================

// An element depends on the seed and its place only: a part from `first` on has the values of the whole.
void test_init_normal() {
    const uint64_t seed = 7;
    const float std = 0.02f;
    Trial trial("init_normal");
    for (const auto& [first, n] : {std::pair<size_t, size_t>{0, 3 * SPAN + 16}, {5, 16}, {SPAN - 1, 100}}) {
        trial.at("first %zu, n %zu", first, n);
        const auto got = trial.run([&, first = first, n = n] {
            const DeviceArray<float> out(n);
            init_normal(static_cast<float*>(out), std, seed, first, n);
            return Outputs{out.download()};
        });
        Numbers expected;
        for (size_t i = first; i < first + n; i++) {
            const uint64_t bits = splitmix64(seed ^ splitmix64(i));
            const double u1 = ((bits >> 40) + 1) / double(1 << 24),
                turn = 2 * M_PI * (bits & 0xffffff) / double(1 << 24);
            const Number radius = sqrt(Number(-2) * log(Number(u1)));
            const Number cosine(std::cos(turn), U * (4 + 2 * turn));   // 2 ulps, and the angle's: 2 pi, the product
            expected.push_back(Number(std) * radius * cosine);
        }
        trial.compare<float>("out", got[0], expected);
    }
    trial.report("Box and Muller's normal of (seed, first + i)");
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

// A matrix of random values, and as an operand. See Fp8Matrix, too.
struct Matrix {
    Values values;
    DeviceArray<floatX> array;
    Operand operand;

    Matrix(size_t rows, size_t columns, double)
        : values(random_values<floatX>(rows * columns)), array(values), operand(array) {}
};

// Where cuBLASLt has no epilogue, the product is stored before a second kernel reads it. A: matrix type of activations,
// W: of weights.
template <typename A, typename W> void try_matmul_forward(const char* name, const std::vector<MatmulSize>& sizes) {
    Trial trial(name);
    for (const auto& [N, C, OC] : sizes) {
        trial.at("N %zu, C %zu, OC %zu", N, C, OC);
        const A inp(N, C, 64);
        const W w(C, OC, 0.5);
        const Values b = random_values<floatX>(OC);
        const auto got = trial.run([&, N = N, C = C, OC = OC] {
            const DeviceArray<floatX> out(N * OC), d_b(b);
            matmul_forward(out, inp.operand, w.operand, d_b, N, C, OC);
            return Outputs{out.download()};
        });
        Numbers expected(N * OC);
        for (size_t i = 0; i < N * OC; i++) {
            for (size_t c = 0; c < C; c++)
                expected[i] += Number(inp.values[i / OC * C + c]) * w.values[c * OC + i % OC];
            expected[i] = passed_through<floatX>(expected[i]) + b[i % OC];
        }
        trial.compare<floatX>("out", got[0], expected);
    }
    trial.report("out");
}

// G: matrix type of gradients of activations.
template <typename G, typename W>
void try_matmul_backward_input(const char* name, const char* name_gelu, const std::vector<MatmulSize>& sizes) {
    Trial plain(name), gelu(name_gelu);
    for (const auto& [N, C, OC] : sizes) {
        for (Trial* trial : {&plain, &gelu}) trial->at("N %zu, C %zu, OC %zu", N, C, OC);
        const G dout(N, OC, 1024);
        const W w(C, OC, 8);
        const Values pre = gelu_inputs(N * C);
        const auto run = [&, N = N, C = C, OC = OC](bool through_gelu) {
            const DeviceArray<floatX> dinp(N * C), d_pre(pre);
            if (through_gelu) matmul_backward_input_gelu(dinp, dout.operand, w.operand, d_pre, N, C, OC);
            else matmul_backward_input(dinp, dout.operand, w.operand, N, C, OC);
            return Outputs{dinp.download()};
        };
        Numbers expected(N * C), through_gelu(N * C);
        for (size_t i = 0; i < N * C; i++) {
            for (size_t o = 0; o < OC; o++)
                expected[i] += Number(dout.values[i / C * OC + o]) * w.values[i % C * OC + o];
            through_gelu[i] = passed_through<floatX>(expected[i]) * gelu_derivative_loop(pre[i]);
        }
        plain.compare<floatX>("dinp", plain.run([&] { return run(false); })[0], expected);
        gelu.compare<floatX>("dinp", gelu.run([&] { return run(true); })[0], through_gelu);
    }
    plain.report("dinp");
    gelu.report("dinp");
}

template <typename A, typename G>
void try_matmul_backward_weight(const char* name, const std::vector<MatmulSize>& sizes) {
    Trial trial(name);
    for (const auto& [N, C, OC] : sizes)
        for_each_gradient_type([&, N = N, C = C, OC = OC](auto type) {
            using T = decltype(type);
            // a product of FP32 matrices has no BF16 result
            if (FLOATX == DType::FP32 && std::is_same_v<T, grad16>) return;
            trial.at("N %zu, C %zu, OC %zu", N, C, OC);
            const A inp(N, C, 2);
            const G dout(N, OC, 256);
            const Values dw = random_values<T>(C * OC);
            const auto got = trial.run([&] {
                const DeviceArray<T> d_dw(dw);
                matmul_backward_weight(grad(d_dw), dout.operand, inp.operand, N, C, OC);
                return Outputs{d_dw.download()};
            });
            Numbers expected = numbers(dw);
            for (size_t i = 0; i < C * OC; i++)
                for (size_t n = 0; n < N; n++)
                    expected[i] += Number(inp.values[n * C + i / OC]) * dout.values[n * OC + i % OC];
            trial.compare<T>("dw", got[0], expected);
        });
    trial.report("dw, added to,");
}

void test_matmul_forward() { try_matmul_forward<Matrix, Matrix>("matmul_forward", matmul_sizes()); }
void test_matmul_backward_input() {
    try_matmul_backward_input<Matrix, Matrix>("matmul_backward_input", "matmul_backward_input_gelu", matmul_sizes());
}
void test_matmul_backward_weight() {
    try_matmul_backward_weight<Matrix, Matrix>("matmul_backward_weight", matmul_sizes());
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
        for (auto [key, to] : {std::pair{"layers", &config.layers}, {"heads", &config.heads},
                               {"channels", &config.channels},
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
        farthest.claim_near(format("%s: losses and gradients with the head in parts of %zu rows", r.name.c_str(),
                                   rows));
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

// ==== first weights, shards ==================================================

// Mean and standard deviation of each tensor within 5 standard errors of GPT-2's. LayerNorm begins as the identity.
void test_first_weights() {
    Model m;
    allocate(m, {{4, 2, 64, 32, 300}, 1, 32, Recompute::NONE, DType::FP32, Purpose::TRAINING});
    init_parameters(m, 1);
    const Floats weights = from_device(m.master, m.layout.elements());
    std::string wrong;
    std::set<std::vector<float>> beginnings;
    size_t drawn = 0;
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
            if (!matrix) continue;
            beginnings.insert({first, first + 16});
            drawn++;
        }
    claim(wrong.empty(), "first weights: mean and standard deviation of every tensor are GPT-2's, padding is 0", wrong);
    claim(beginnings.size() == drawn, "first weights: no two tensors begin with the same values",
          format("%zu of %zu differ", beginnings.size(), drawn));
}

// Element i of a tensor, in group g at position p, belongs to rank p / slice, at p % slice of its shard of the group.
void test_shares() {
    const Config config = {3, 2, 48, 20, 300};
    bool right = true;
    for (size_t gpus : {1, 2, 3, 4}) {
        const Layout y = layout_of(config, gpus);
        for (const ParameterRow& row : parameter_table(config))
            for (size_t l = 0; l < row.copies; l++) {
                const size_t g = row.of_layer() ? 1 + l : 0, slice = (g ? y.layer : y.outside) / gpus;
                const size_t group_at = g ? (y.outside + (g - 1) * y.layer) / gpus : 0;
                size_t done = 0;
                for (size_t rank = 0; rank < gpus; rank++) {
                    const Shard shard = shard_of(y, row, l, Kept::SHARDED, rank);
                    if (shard.count == 0) continue;
                    const size_t position = row.offset + shard.first;
                    right = right && shard.first == done && position / slice == rank &&
                            (position + shard.count - 1) / slice == rank && shard.at == group_at + position % slice;
                    done += shard.count;
                }
                right = right && done == row.elements && slice * gpus == y.group(g);
            }
    }
    claim(right, "shards of 1 to 4 ranks: each element of each tensor in one of them, at its place");
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
                claim_exact(format("--matmul %s --recompute %s", MATMUL_NAMES[static_cast<int>(matmul)], name),
                            recompute,
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
    const std::pair<uint16_t, float> HALVES[] = {{0x3c00, 1.0f}, {0xc000, -2.0f}, {0x7bff, 65504.0f},
                                                 {0x0400, 0x1p-14f},
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
    auto bytes_at = [&](const auto* block) { return bytes_of(from_device(block, m.layout.elements())); };
    auto same = [&](const auto* a, const auto* b) { return bytes_at(a) == bytes_at(b); };
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
    std::string bytes = read_bytes(file.path());
    uint64_t header = 0;
    memcpy(&header, bytes.data(), sizeof(header));
    claim(header % 8 == 0, "tensors begin at a multiple of 8 bytes", format("a header of %zu", size_t(header)));
    std::string refusal;
    try {
        write_bytes(scratch("@/longer.safetensors"), bytes + "1234");
        Safetensors(scratch("@/longer.safetensors"));
    } catch (const UserError& error) {
        refusal = error.what();
    }
    claim(refusal.find("4 bytes follow the last tensor") != refusal.npos, "bytes after the last tensor are rejected",
          refusal);
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

Window read_window(const Tokens& tokens, Windows kind, size_t index, size_t T, int vocab = 1000) {
    Window w = {std::vector<int>(T, -2), std::vector<int>(T, -2)};
    tokens.read(w.inputs.data(), w.targets.data(), kind, index, T, vocab);
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
                followed = followed && window.inputs[t] == starts.back() + int(t) &&
                    window.targets[t] == starts.back() + int(t) + 1;
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

    std::string refusal;
    try {
        read_window(tokens, Windows::WHOLE, 0, T, 5);   // tokens 0 to 4
        read_window(tokens, Windows::WHOLE, 0, T, 4);
    } catch (const UserError& error) {
        refusal = error.what();
    }
    claim(refusal.find("token 4 at position 4") != refusal.npos,
          "a token that equals the vocabulary's size is rejected", refusal);

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
std::vector<int> loaded_starts(int B, Shuffle shuffle, uint64_t seed, uint64_t first_window, size_t count, int gpus = 1,
                               size_t rank = 0) {
    const Tokens tokens(scratch("@/shard_*.bin"));
    Model m;
    Setup s = {{1, 1, 16, 4, 1000}, B, 4, Recompute::NONE, DType::FP32, Purpose::TRAINING};
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
    std::vector<int> of_ranks(24);
    for (size_t rank = 0; rank < 3; rank++) {   // micro-batches of 2 on 3 GPUs, in turn
        const std::vector<int> starts = loaded_starts(2, Shuffle::YES, 7, 0, 8, 3, rank);
        for (size_t i = 0; i < 8; i++) of_ranks[i / 2 * 6 + rank * 2 + i % 2] = starts[i];
    }
    claim(of_ranks == one, "3 ranks load disjoint windows, together those of one GPU");
    claim(loaded_starts(4, Shuffle::YES, 8, 0, 24) != one, "another seed brings other windows");
    // 24 draws from 30 places: 30 (1 - (29/30)^24) = 16.7 different ones are to be expected, 10 is far out.
    claim(std::set<int>(one.begin(), one.end()).size() > 10, "shuffled windows come from all over the data");
}

// The mean loss over these windows, one after the other and in double.
double loss_by_hand(const std::string& dir, const Tokens& tokens, int T, const std::vector<size_t>& windows) {
    Model m;
    load_folder(m, dir, Purpose::INFERENCE, 1, T);
    const size_t V = m.config.vocab;
    double sum = 0;
    size_t counted = 0;
    for (size_t w : windows) {
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
    std::vector<size_t> windows(tokens.windows(Windows::COVERING, 11));   // 7
    std::iota(windows.begin(), windows.end(), 0);
    const double expected = loss_by_hand(scratch("@/ours"), tokens, 11, windows);
    const double of_three = loss_by_hand(scratch("@/ours"), tokens, 11, {0, 2, 4});
    // The same logits up to a rounding (2^-8 of those near 1 in BF16), of which a mean is taken.
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;
    for (int B : {1, 3, 16}) {
        Model m;
        load_folder(m, scratch("@/ours"), Purpose::INFERENCE, B, 11);
        const Evaluation e = evaluate(m, tokens, 0, Text("", m.config.vocab));
        claim(e.tokens == 71 && fabs(e.loss - expected) < tolerance * expected,
              format("an evaluation in micro-batches of %d counts each token once: as by hand", B),
              format("loss %.7f over %zu tokens, expected %.7f over 71", e.loss, e.tokens, expected));
        const double some = evaluate(m, tokens, 3, Text("", m.config.vocab)).loss;
        claim(fabs(some - of_three) < tolerance * of_three,
              format("an evaluation of 3 of 7 windows in micro-batches of %d spreads them evenly", B),
              format("loss %.7f, expected %.7f", some, of_three));
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
    for (const float* block : {m.master, m.adam_m, m.adam_v})
        bytes += bytes_of(from_device(block, m.layout.elements()));
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
            // the head in two parts
            Setup s = {{2, 2, 32, 16, 256}, 2, 16, recompute, grad_dtype, Purpose::TRAINING, 24};
            s.attention = attention;
            size_t none = 1, captured = 0;
            const bool same = bytes_of_steps(s, false, none) == bytes_of_steps(s, true, captured);
            // A micro-step for each of the loader's two slots, the update and the evaluation.
            claim(same && none == 0 && captured == 4,
                  format("with graphs the same bits of losses, norms, weights and moments: --recompute %s, "
                         "%s attention, gradients in %s",
                         RECOMPUTE_NAMES[static_cast<int>(recompute)].first,
                             attention == Attention::FLASH ? "flash" : "naive", name_of(grad_dtype)),
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
    const LossScale first = dynamic_scale(FIRST_LOSS_SCALE), once = after_norms(first, {3, INFINITY}),
        nan = after_norms(first, {NAN});
    claim(is(once, 32768, 0, 0, 1) && is(nan, 32768, 0, 0, 1) && is(after_norms(once, {5}), 32768, 1 / 32768.0f, 1, 1),
          "a norm that is infinite or no number: the step is skipped, the scale halved, its good steps forgotten");
    claim(is(after_norms(dynamic_scale(1), {INFINITY}), 1, 0, 0, 1), "no scale is below 1");
    const LossScale before = after_norms(first, Values(GROWTH_INTERVAL - 1, 7));
    claim(GROWTH_INTERVAL == 2000 && is(before, 65536, 1 / 65536.0f, 1999, 0) &&
          is(after_norms(before, {7}), 131072, 1 / 65536.0f, 0, 0),
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
    claim(weights_and_moments(m) == before && !std::isfinite(fetch(m.a.norm())) && after.scale == 512 &&
          after.skipped == 1 &&
              std::count(left.begin(), left.end(), 0.0f) == std::ptrdiff_t(left.size()),
          format("a gradient that overflows, in %s: no bit of weights and moments changes, the scale is halved, "
                 "gradients are 0",
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
        claim(error > 0 && error < 1e-3, "gradients by a loss scale of 65536 and of 1 are the same to FP16's rounding",
              format("error %.2e", error));
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
    const std::string numbers = format("errors %.2e and %.2e, zeros %.4f and %.4f", without, with, zeros_without,
                                       zeros_with);
    if (FLOATX == DType::FP16)
        claim(with < 1e-2 && without > 30 * with && zeros_without > 0.2 && zeros_with < 0.01,
              "without it gradients of a large step are lost", numbers);
    else claim(without < 1e-6 && with < 1e-6 && zeros_without == zeros_with, "gradients of a large step need none",
               numbers);
    const size_t N = s.N(), C = s.config.channels;
    double zeros = 0;
    for (const auto& [x, columns] : {std::pair{lost.a.dres(), C}, {lost.a.dln(), C}, {lost.a.datt(), C},
                                     {lost.a.dqkv(), 3 * C},
                                     {lost.a.dfc(), 4 * C}}) {
        Floats values(N * columns);   // every third, fourth, ... is zero
        const size_t every = columns / C + 2;
        for (size_t i = 0; i < values.size(); i++) values[i] = i % every == 0 ? 0 : 1;
        const std::vector<floatX> stored(values.begin(), values.end());
        upload(x, stored.data(), stored.size() * sizeof(floatX));
        zeros += std::count(values.begin(), values.end(), 0.0f);
    }
    claim(zero_gradients(lost) == zeros / (10 * N * C), "the share of zeros in the gradients of activations is exact");
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
            if (!(fabs(found - expected) < 1e-12))
                wrong += format("step %ld: %g, expected %g; ", step, found, expected);
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
    claim(top2 == std::vector<double>{0, draws / 2.0, 0, draws / 2.0, 0},
          "top-k 2 takes the two likeliest tokens only");
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
                                     {0, 0.49, {0, 1, 0, 0}}, {2, 0.7, {0, 2 / 3.0, 1 / 3.0, 0}},
                                         {2, 0.6, {0, 1, 0, 0}}};
    double off = 0;
    for (const Case& c : CASES) {
        Values counts(logits.size(), 0);
        for (int i = 0; i < draws; i++) counts[pick_token(logits, 1, c.top_k, c.top_p, (i + 0.5) / draws)]++;
        for (size_t v = 0; v < logits.size(); v++) off = std::max(off, fabs(counts[v] - draws * c.shares[v]));
    }
    claim(off <= 2, "top-p takes the fewest tokens that are as likely, and after top-k: of those that it leaves",
          format("a count of %d is off by %.2g", draws, off));
    const Floats equal(4, 0);   // four weights of exactly 1
    bool exact = true;
    for (int quarter = 0; quarter < 4; quarter++) {
        exact = exact && pick_token(equal, 1, 0, 1, quarter / 4.0) == quarter;
        exact = exact && pick_token(equal, 1, 0, 0.5, quarter / 4.0) == quarter / 2;
    }
    claim(exact, "at exactly top-p no token more is taken; a draw at exactly a sum takes the token after it");
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

// A long sample, each token against the draw from the logits of all tokens in the window then. Rounding may move a draw
// to the next token.
void claim_sample(const std::string& text, const Setup& setup, const std::string& dir) {
    Model m;
    allocate(m, setup);
    read_weights(m, dir);
    Options o;
    o.sample_tokens = 3 * setup.T;
    std::vector<int> tokens = {7, 3}, drawn;
    const uint64_t seed = 1;
    sample(m, tokens, o, seed, [&](int token) { drawn.push_back(token); return true; });
    size_t others = 0;
    for (size_t i = 0; i < drawn.size(); i++) {
        if (tokens.size() > static_cast<size_t>(setup.T)) tokens.erase(tokens.begin(), tokens.end() - setup.T / 2);
        const double random = (splitmix64(splitmix64(seed) + i) >> 11) * 0x1p-53;
        others += drawn[i] != pick_token(next_logits(m, tokens, 0, setup.T), o.temperature, o.top_k, o.top_p, random);
        tokens.push_back(drawn[i]);
    }
    claim(drawn.size() == static_cast<size_t>(o.sample_tokens) &&
          others <= (FLOATX == DType::FP32 ? 1 : drawn.size() / 4),
          text, format("%zu tokens, %zu of them others", drawn.size(), others));
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

#include "dev/tests/test_runs.cuh"
#include "dev/tests/test_bad_input.cuh"

// ==== plan ===================================================================

#include "dev/tests/test_plan.cuh"

// ==== tensor cores in a model ================================================

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
        const double logits = relative_l2(got.logits, portable.logits),
            gradient = relative_l2(got.gradients, portable.gradients);
        claim(logits <= limit && logits > 0, format("%s: logits are the portable kernels' within rounding", name),
              format("error %.2e, limit %.2e", logits, limit));
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
        const json plan = json::parse(run("plan --layers 2 --heads 2 --channels 32 --context 16 --vocab 256 "
                                          "--micro-batch 2 --json " + std::string(flags)).out);
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
                for (const auto& [name, bytes] : e.at("args").items())
                    within = within && size_t(bytes) <= size_t(plan.at("bytes").at(name));
                highest = std::max(highest, double(e.at("args").at("activations")));
                rises = rises || e.at("args").at("gradients") > 0;
            }
        }
        const bool recomputes = std::string(flags).find("recompute none") == std::string::npos &&
            std::string(flags).find("naive") == std::string::npos;
        claim_run(o.code == 0 && ordered && row_end.size() == 3,
                  format("%s: the trace's rows are in order, none overlaps", flags), o);
        claim(within && rises && highest > 0.5 * double(plan.at("bytes").at("activations")),
              format("%s: live bytes rise, and stay within the plan", flags),
              format("%.0f of %zu bytes of activations at most", highest, size_t(plan.at("bytes").at("activations"))));
        bool dead = updates.size() == 2 * TRACED_STEPS;   // of what belongs to no layer, and of all layers
        for (double time : updates) dead = dead && std::prev(alive.upper_bound(time))->second == 0;
        claim(dead, format("%s: no activation is alive at the update", flags));
        claim(passes.count("forward") && passes.count("backward") && passes.count("update") &&
              passes.count("recompute") == recomputes,
              format("%s: forward, %sbackward and update are told apart", flags, recomputes ? "recompute, " : ""));
    }
}

// ==== FP8 ====================================================================

#include "dev/tests/test_fp8.cuh"

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

// With --only: how the names of tests to run begin, and how many did. With --list: names are printed, no test runs.
static std::vector<std::pair<std::string, int>> wanted;
static bool listing = false;

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
    if (listing) return;
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
    test("kernels: decode attention", test_attention_decode);
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
    test("first weights", test_first_weights);
    test("shares", test_shares);
    test("memory", test_memory);
    test("plan: the chapter's table", test_chapter_table);
    test("plan: closed forms", test_closed_forms);
    test("plan: --micro-batch auto", test_auto_fits);
    test("plan: stages of ZeRO", test_zero_stages);
    test("plan: timeline", test_timeline);
    test("plan: timeline at random", test_timeline_at_random);
    test("plan: what is sent", test_sent);
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
    test("runs: output that cannot be written", test_full_output);
    test("runs: a second one", test_second_run);
    test("runs: leftovers", test_leftovers);
    test("runs: killed early", test_early_death);
    test("runs: that fail late", test_late_failure);
    test("runs: full disk", test_full_disk);
    test("runs: loss that is not finite", test_nan);
    test("runs: that could not begin", test_failed_start);
    test("defaults", test_defaults);
    test("README", test_readme);
    test("bad flags", test_bad_flags);
    test("bad flags: FP8", test_bad_fp8);
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
    listing = what == "--list" && argc == 2;
    if (argc > 1 && !listing && !((what == "--export" || what == "--only") && argc == 3)) {
        fprintf(stderr, "usage: test_gpt | test_gpt --list | test_gpt --only PART,PART... | test_gpt --export DIR | "
                        "test_gpt --as-train-gpt ...\n"
                        "PART: how the names of tests to run begin, such as kernels or kernels: attention\n");
        return 2;
    }
    open_device(TensorCores::AUTO);
    if (what == "--export") {
        export_folder(argv[2]);
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
    if (!listing) printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

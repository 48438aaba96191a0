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

#define TESTING
#include "train_gpt.cu"

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
// On the host everything is double, which holds each value of float, BF16 and int exactly. On the
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
            if constexpr (std::is_same_v<T, __nv_bfloat16>) values[i] = static_cast<float>(typed[i]);
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
Grad grad(const DeviceArray<__nv_bfloat16>& array) { return {static_cast<__nv_bfloat16*>(array), DType::BF16}; }

// Calls f with a value of each type that gradients can have, as --grad-dtype allows.
template <typename F> void for_each_gradient_type(F f) {
    f(float());
    if (FLOATX == DType::BF16) f(__nv_bfloat16());
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
    const int digits = std::is_same_v<T, double> ? 53 : std::is_same_v<T, float> ? 24 : 8;
    return x == 0 ? 0 : std::ldexp(1.0, std::ilogb(x) - digits);
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
            for (size_t count : {1, 2, 9}) {
                trial.at("%zu partials of %d columns", count, C);
                const Values old = random_values<G>(C), partials = random_values<float>(count * C);
                const auto out = trial.run([&] {
                    const DeviceArray<G> g(old);
                    const DeviceArray<float> p(partials);
                    add_partials(grad(g), p, count, C);
                    return Outputs{g.download()};
                });
                Numbers expected = numbers(old);
                for (size_t i = 0; i < partials.size(); i++) expected[i % C] += partials[i];
                trial.compare<G>("grad", out[0], expected);
            }
    });
    trial.report("grad += sums");
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
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
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

template <typename G> void try_layernorm_backward(Trial& trial, size_t N, int C) {
    trial.at("N %zu, C %d", N, C);
    const Values inp = layernorm_inputs(N, C), w = random_values<floatX>(C), dout = random_values<floatX>(N * C);
    const LayerNormResult forward = layernorm_loop(inp, w, w);
    const Values mean = values_stored_as<float>(forward.mean), rstd = values_stored_as<float>(forward.rstd);
    const Values dinp = random_values<floatX>(N * C), dw = random_values<G>(C), db = random_values<G>(C);
    const auto out = trial.run([&] {
        const DeviceArray<floatX> d_dinp(dinp), d_dout(dout), d_inp(inp), d_w(w);
        const DeviceArray<G> d_dw(dw), d_db(db);
        const DeviceArray<float> d_mean(mean), d_rstd(rstd), partials(2 * partial_blocks(N) * C);
        layernorm_backward(d_dinp, grad(d_dw), grad(d_db), partials, d_dout, d_inp, d_w, d_mean, d_rstd, N, C);
        return Outputs{d_dinp.download(), d_dw.download(), d_db.download()};
    });
    LayerNormGradients expected = {numbers(dinp), numbers(dw), numbers(db)};
    layernorm_backward_loop(expected, dout, inp, w, mean, rstd);
    trial.compare<floatX>("dinp", out[0], expected.dinp);
    trial.compare<G>("dw", out[1], expected.dw);
    trial.compare<G>("db", out[2], expected.db);
}

void test_layernorm() {
    test_layernorm_derivative();
    Trial forward("layernorm_forward"), backward("layernorm_backward");
    for (size_t N : ROWS)
        for (int C : CHANNELS) {
            try_layernorm_forward(forward, N, C, false);
            try_layernorm_forward(forward, N, C, true);
            for_each_gradient_type([&](auto type) { try_layernorm_backward<decltype(type)>(backward, N, C); });
        }
    forward.report("res, out, mean and rstd, with and without add,");
    backward.report("dinp, dw and db, each added to,");
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
            const Number p = exp(S[j] - max);
            sum += p;
            for (int d = 0; d < s.HS; d++) O[d] += p * qkv[s.qkv(b, j, 2, h) + d];
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
            const Number ds = p * (dp - D) * scale;
            for (int d = 0; d < s.HS; d++) {
                dqkv[q + d] += ds * qkv[k + d];
                dqkv[k + d] += ds * qkv[q + d];
                dqkv[v + d] += p * dout[row + d];
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
        attention_forward(out, lse, d_qkv, s.B, s.T, s.NH, s.HS);
        return Outputs{out.download(), lse.download()};
    });
    const AttentionResult expected = attention_loop(qkv, s);
    forward.compare<floatX>("out", got[0], expected.out);
    forward.compare<float>("lse", got[1], expected.lse);

    const Values out = values_stored_as<floatX>(expected.out), lse = values_stored_as<float>(expected.lse);
    const auto gradients = backward.run([&] {
        const DeviceArray<floatX> dqkv(qkv.size()), d_dout(dout), d_qkv(qkv), d_out(out);
        const DeviceArray<float> D(s.N() * s.NH), d_lse(lse);
        attention_backward(dqkv, D, d_dout, d_qkv, d_out, d_lse, s.B, s.T, s.NH, s.HS);
        return Outputs{dqkv.download()};
    });
    backward.compare<floatX>("dqkv", gradients[0], attention_backward_loop(dout, qkv, out, lse, s));
}

void test_attention() {
    test_attention_derivative();
    Trial forward("attention_forward"), backward("attention_backward");
    const int lengths[] = {1, 5, 16, 23, 33, 64, 100};
    int n = 0;   // batch and heads change with every case
    for (int HS = 16; HS <= 128; HS += 16)
        for (int T : lengths) {
            const int heads[] = {1, 2, 3, 1, 5};
            try_attention(forward, backward, {1 + n % 2, T, T > 50 ? 1 + n % 3 : heads[n % 5], HS});
            n++;
        }
    forward.report("out and lse");
    backward.report("dqkv");
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

template <Want WANT>
Outputs run_cross_entropy(const Values& logits, const Values& targets, float scale, int V, int Vp) {
    const DeviceArray<floatX> d_logits(logits);
    const DeviceArray<float> losses(targets.size());
    const DeviceArray<int> d_targets(targets);
    cross_entropy<WANT>(d_logits, losses, d_targets, scale, targets.size(), V, Vp);
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

void test_gradient_norm() {
    Trial trial("gradient_norm");
    for_each_gradient_type([&](auto type) {
        using G = decltype(type);
        for (size_t n : {size_t{16}, SPAN + 16, NORM_BLOCKS * SPAN + SPAN + 16}) {
            trial.at("%s, n %zu", name_of(std::is_same_v<G, float> ? DType::FP32 : DType::BF16), n);
            Values g = random_values<G>(n);
            for (size_t i = n - 16; i < n; i++) g[i] *= 1024;   // what comes last must not be lost among the rest
            const auto got = trial.run([&] {
                const DeviceArray<G> grads(g);
                const DeviceArray<float> norm(1), partials(NORM_BLOCKS);
                gradient_norm(norm, partials, grad(grads), n);
                return Outputs{norm.download()};
            });
            Numbers squares;
            for (double x : g) squares.push_back(Number(x) * x);
            trial.compare<float>("norm", got[0], {sqrt(sum(squares, NORM_BLOCKS * BLOCK * PACK))});
        }
    });
    trial.report("norm");
}

// ==== adamw ==================================================================

struct AdamWState { Values weights, grads, m, v; };   // the weights are the master's

// In FP32, master and weights are one.
template <typename G>
Outputs run_adamw(const AdamWState& s, double norm, const AdamW& a, size_t decayed) {
    const size_t n = s.weights.size();
    const DeviceArray<float> master(s.weights), m(s.m), v(s.v), d_norm(Values{norm});
    const DeviceArray<G> grads(s.grads);
    const DeviceArray<floatX> separate(n);
    void* const weights = SEPARATE_MASTER ? static_cast<void*>(separate) : static_cast<void*>(master);
    adamw(static_cast<floatX*>(weights), master, grad(grads), m, v, d_norm, a, decayed, n);
    return {master.download(), m.download(), v.download(), grads.download(), separate.download()};
}

template <typename G> void try_adamw(Trial& trial, size_t n, size_t decayed, float clip, double norm) {
    trial.at("n %zu, decayed %zu, clip %g, norm %g", n, decayed, clip, norm);
    const AdamW a = {3e-2f, 0.9f, 0.95f, 1e-3f, 0.25f, clip, 1 - 0.9f * 0.9f * 0.9f, 1 - 0.95f * 0.95f * 0.95f};
    const AdamWState s = {random_values<float>(n), random_values<G>(n, -3, 3), random_values<float>(n),
                          random_values<float>(n, 0, 1)};
    const auto got = trial.run([&] { return run_adamw<G>(s, norm, a, decayed); });
    const Number scale = clip > 0 && norm > clip ? Number(clip) / (Number(norm) + 1e-6) : Number(1);
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
}

// ==== init ===================================================================

Values run_init_normal(double std, uint64_t seed, size_t n) {
    const DeviceArray<float> out(n);
    init_normal(out, std, seed, n);
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
            fill_with(out, 1.25f, n);
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

template <typename G> void try_matmul_backward_parameters(Trial& trial, size_t N, size_t C, size_t OC) {
    trial.at("N %zu, C %zu, OC %zu", N, C, OC);
    const Values dout = random_values<floatX>(N * OC), inp = random_values<floatX>(N * C);
    const Values dw = random_values<G>(C * OC), db = random_values<G>(OC);
    const auto got = trial.run([&] {
        const DeviceArray<G> d_dw(dw), d_db(db);
        const DeviceArray<floatX> d_dout(dout), d_inp(inp);
        const DeviceArray<float> partials(partial_blocks(N) * OC);
        matmul_backward_parameters(grad(d_dw), grad(d_db), partials, d_dout, d_inp, N, C, OC);
        return Outputs{d_dw.download(), d_db.download()};
    });
    Numbers w = numbers(dw), b = numbers(db);
    for (size_t i = 0; i < C * OC; i++)
        for (size_t n = 0; n < N; n++) w[i] += Number(inp[n * C + i / OC]) * dout[n * OC + i % OC];
    for (size_t i = 0; i < N * OC; i++) b[i % OC] += dout[i];
    trial.compare<G>("dw", got[0], w);
    trial.compare<G>("db", got[1], b);
}

void test_matmul_backward_parameters() {
    Trial trial("matmul_backward_parameters");
    for (const auto& [N, C, OC] : matmul_sizes()) {
        for_each_gradient_type([&, N = N, C = C, OC = OC](auto type) {
            try_matmul_backward_parameters<decltype(type)>(trial, N, C, OC);
        });
    }
    trial.report("dw and db, both added to,");
}

// ==== all kernels ============================================================

void test_kernels() {
    test_add_partials();
    test_embedding_forward();
    test_sort_positions();
    test_embedding_backward();
    test_layernorm();
    test_bias_forward();
    test_bias_backward();
    test_gelu();
    test_attention();
    test_naive_attention();
    test_cross_entropy();
    test_gradient_norm();
    test_adamw();
    test_init_normal();
    test_fill_and_round();
    test_matmul_forward();
    test_matmul_backward_input();
    test_matmul_backward_parameters();
}

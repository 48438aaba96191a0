// Reference loops for kernels, shared by test_gpt.cu and the studies in dev/kernels. Real is double, or test_gpt.cu's
// Number, a double with an error bound. Included after train_gpt.cu.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

// Returns a tensor of x in device memory.
inline Tensor view(const floatX* x, size_t rows, size_t columns) { return {const_cast<floatX*>(x), rows, columns}; }

// Calls f(begin, end) for pieces of 0, ..., n - 1 of at most `piece` indices, on all cores.
template <typename F> void in_parallel(size_t n, size_t piece, F f) {
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t begin; (begin = next.fetch_add(piece)) < n;) f(begin, std::min(n, begin + piece));
    };
    std::vector<std::thread> others;
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    while (others.size() + 1 < std::min(cores, ceil_div(n, piece))) others.emplace_back(work);
    work();
    for (std::thread& thread : others) thread.join();
}

// ==== values =================================================================
// Host values are double, which holds every float, BF16, FP16 and int exactly.

typedef std::vector<double> Values;

// Returns x rounded to T.
template <typename T> double stored_as(double x) { return static_cast<float>(static_cast<T>(static_cast<float>(x))); }
template <> inline double stored_as<double>(double x) { return x; }

double value_of(double x) { return x; }

double amax_of(const Values& x) {
    double amax = 0;
    for (double e : x) amax = std::max(amax, std::abs(e));
    return amax;
}

Values transposed_values(const Values& x, size_t rows, size_t columns) {
    Values out(x.size());
    for (size_t i = 0; i < x.size(); i++) out[i % columns * rows + i / columns] = x[i];
    return out;
}

template <typename Real> Real tree_sum(const Real* terms, size_t n) {
    return n == 1 ? terms[0] : tree_sum(terms, n / 2) + tree_sum(terms + n / 2, n - n / 2);
}

// Returns a long sum in a GPU's order: term i is added to partial sum i % chains, then a tree adds the partial sums.
// The error grows with the length of a chain, not with the number of terms.
template <typename Real> Real sum(const std::vector<Real>& terms, size_t chains) {
    std::vector<Real> partial(chains);
    for (size_t i = 0; i < terms.size(); i++) partial[i % chains] += terms[i];
    return tree_sum(partial.data(), chains);
}

// ==== settings ===============================================================

// Gives a variable another value until the end of the scope.
template <typename T> struct Temporarily {
    T& variable;
    const T before;

    Temporarily(T& x, T value) : variable(x), before(std::exchange(x, value)) {}
    Temporarily(const Temporarily&) = delete;
    ~Temporarily() { variable = before; }
};

// ==== embedding ==============================================================

// Returns the positions of a batch sorted by token, which the loader uploads for embedding_backward.
std::vector<int> sorted_positions(const std::vector<int>& inputs, int vocab) {
    std::vector<int> order(inputs.size());
    sort_positions(order.data(), inputs.data(), inputs.size(), vocab);
    return order;
}

// ==== layernorm ==============================================================

template <typename Real> struct LayerNormResult { std::vector<Real> out, mean, rstd; };

// Returns LayerNorm of x (N, C).
template <typename Real> LayerNormResult<Real> layernorm_loop(const Values& x, const Values& w, const Values& b) {
    const size_t C = w.size(), N = x.size() / C;
    LayerNormResult<Real> r;
    for (size_t n = 0; n < N; n++) {
        const double* row = &x[n * C];
        Real sum = 0, squares = 0;
        for (size_t i = 0; i < C; i++) sum += row[i];
        const Real mean = sum / double(C);
        for (size_t i = 0; i < C; i++) squares += (Real(row[i]) - mean) * (Real(row[i]) - mean);
        const Real rstd = Real(1) / sqrt(squares / double(C) + 1e-5);
        for (size_t i = 0; i < C; i++) r.out.push_back((Real(row[i]) - mean) * rstd * w[i] + b[i]);
        r.mean.push_back(mean);
        r.rstd.push_back(rstd);
    }
    return r;
}

// Adds the gradients to dinp (N, C), dw and db (C), as the kernel does.
template <typename Real>
void layernorm_backward_loop(std::vector<Real>& dinp, std::vector<Real>& dw, std::vector<Real>& db, const Values& dout,
                             const Values& inp, const Values& w, const Values& mean, const Values& rstd) {
    const size_t C = w.size(), N = mean.size();
    std::vector<Real> xhat(C);
    for (size_t n = 0; n < N; n++) {
        Real sum = 0, sum_x = 0;
        for (size_t c = 0; c < C; c++) {
            const Real d = dout[n * C + c];
            xhat[c] = (Real(inp[n * C + c]) - mean[n]) * rstd[n];
            sum += d * w[c];
            sum_x += d * w[c] * xhat[c];
            dw[c] += d * xhat[c];
            db[c] += d;
        }
        for (size_t c = 0; c < C; c++)
            dinp[n * C + c] += Real(rstd[n]) *
                (Real(dout[n * C + c]) * w[c] - sum / double(C) - xhat[c] * (sum_x / double(C)));
    }
}

// ==== gelu ===================================================================

template <typename Real> Real gelu_tanh(Real x) { return tanh((x + x * x * x * 0.044715) * std::sqrt(2 / M_PI)); }
template <typename Real> Real gelu_loop(Real x) { return Real(0.5) * x * (Real(1) + gelu_tanh(x)); }

template <typename Real> Real gelu_derivative_loop(Real x) {
    const Real t = gelu_tanh(x), slope = Real(std::sqrt(2 / M_PI)) * (Real(1) + Real(3 * 0.044715) * x * x);
    return Real(0.5) * (Real(1) + t) + Real(0.5) * x * (Real(1) - t * t) * slope;
}

// ==== attention ==============================================================

struct AttentionSize {
    int B, T, NH, HS;

    int C() const { return NH * HS; }
    size_t N() const { return static_cast<size_t>(B) * T; }
    // Offsets of rows; `part` is 0, 1 or 2 for query, key or value.
    size_t qkv(int b, int t, int part, int h) const { return ((size_t(b) * T + t) * 3 + part) * C() + h * HS; }
    size_t out(int b, int t, int h) const { return (size_t(b) * T + t) * C() + h * HS; }
    size_t lse(int b, int t, int h) const { return (size_t(b) * NH + h) * T + t; }
    // Offset of query i, key j in (B, NH, T, T).
    size_t prob(int b, int h, int i, int j) const { return lse(b, i, h) * T + j; }

    // Calls visit(b, h, i) for each query i, in parallel if there are many.
    template <typename Visit> void for_each_query(Visit visit) const {
        constexpr size_t QUERIES = 128;   // of a piece
        in_parallel(N() * NH, QUERIES, [&](size_t begin, size_t end) {
            for (size_t n = begin; n < end; n++) visit(n / T / NH, n / T % NH, n % T);
        });
    }
};

template <typename Real> struct AttentionResult { std::vector<Real> out, lse; };

// Returns a . b / sqrt(HS).
template <typename Real> Real score(const double* a, const double* b, int HS) {
    Real sum = 0;
    for (int d = 0; d < HS; d++) sum += Real(a[d]) * b[d];
    return sum * (1 / std::sqrt(double(HS)));
}

// Returns P or dS as an operand of the next matmul, which tensor cores read as floatX.
template <typename Real> Real operand(const Real& x, int HS) {
    return on_tensor_cores(HS) ? stored_as<floatX>(x) : x;
}

// Returns attention's out and lse. naive: scores and probabilities are rounded to floatX.
template <typename Real>
AttentionResult<Real> attention_loop(const Values& qkv, const AttentionSize& s, bool naive = false) {
    AttentionResult<Real> r = {std::vector<Real>(s.N() * s.C()), std::vector<Real>(s.N() * s.NH)};
    s.for_each_query([&](int b, int h, int i) {
        std::vector<Real> S(i + 1), O(s.HS);
        double max = -INFINITY;
        for (int j = 0; j <= i; j++) {
            S[j] = score<Real>(&qkv[s.qkv(b, i, 0, h)], &qkv[s.qkv(b, j, 1, h)], s.HS);
            if (naive) S[j] = stored_as<floatX>(S[j]);
            max = std::max(max, value_of(S[j]));
        }
        Real sum = 0;
        for (int j = 0; j <= i; j++) sum += exp(S[j] - max);
        for (int j = 0; j <= i; j++) {
            const Real p = exp(S[j] - max), factor = naive ? stored_as<floatX>(p / sum) : operand(p, s.HS);
            for (int d = 0; d < s.HS; d++) O[d] += factor * qkv[s.qkv(b, j, 2, h) + d];
        }
        for (int d = 0; d < s.HS; d++) r.out[s.out(b, i, h) + d] = naive ? O[d] : O[d] / sum;
        r.lse[s.lse(b, i, h)] = log(sum) + max;
    });
    return r;
}

// Returns the gradient of qkv, given what forward stored: out and lse, or, for naive attention, the probabilities.
// Naive attention rounds the gradients of probabilities and scores to floatX.
template <typename Real>
std::vector<Real> attention_backward_loop(const Values& dout, const Values& qkv, const Values& out, const Values& lse,
                                          const AttentionSize& s, const Values* probs = nullptr) {
    std::map<std::thread::id, std::vector<Real>> parts;   // a thread's sums; it owns an entry
    std::mutex mutex;
    const double scale = 1 / std::sqrt(double(s.HS));
    s.for_each_query([&](int b, int h, int i) {
        mutex.lock();
        std::vector<Real>& dqkv = parts[std::this_thread::get_id()];
        mutex.unlock();
        dqkv.resize(s.N() * 3 * s.C());
        const size_t row = s.out(b, i, h), q = s.qkv(b, i, 0, h);
        Real D = 0;
        std::vector<Real> P(i + 1), dP(i + 1);
        for (int j = 0; j <= i; j++) {
            P[j] = probs ? Real((*probs)[s.prob(b, h, i, j)])
                         : exp(score<Real>(&qkv[q], &qkv[s.qkv(b, j, 1, h)], s.HS) - lse[s.lse(b, i, h)]);
            for (int d = 0; d < s.HS; d++) dP[j] += Real(dout[row + d]) * qkv[s.qkv(b, j, 2, h) + d];
            if (probs) dP[j] = stored_as<floatX>(dP[j]);
            if (probs) D += P[j] * dP[j];
        }
        for (int d = 0; d < s.HS && !probs; d++) D += Real(dout[row + d]) * out[row + d];
        for (int j = 0; j <= i; j++) {
            const size_t k = s.qkv(b, j, 1, h), v = s.qkv(b, j, 2, h);
            const Real ds = P[j] * (dP[j] - D), p_operand = probs ? P[j] : operand(P[j], s.HS),
                dscore = probs ? stored_as<floatX>(ds * scale) : operand(ds, s.HS) * scale;
            for (int d = 0; d < s.HS; d++) {
                dqkv[q + d] += dscore * qkv[k + d];
                dqkv[k + d] += dscore * qkv[q + d];
                dqkv[v + d] += p_operand * dout[row + d];
            }
        }
    });
    std::vector<Real> dqkv = parts.begin()->second;
    for (auto part = std::next(parts.begin()); part != parts.end(); ++part)
        for (size_t i = 0; i < dqkv.size(); i++) dqkv[i] += part->second[i];
    return dqkv;
}

// ==== cross-entropy ==========================================================

template <typename Real> struct CrossEntropyResult { std::vector<Real> losses, dlogits; };

// Returns losses (N) and gradients (N, Vp) of rows with V logits and Vp - V elements of padding. A row with target -1
// has loss and gradient 0.
template <typename Real>
CrossEntropyResult<Real> cross_entropy_loop(const Values& logits, const std::vector<int>& targets, double scale, int V,
                                            int Vp) {
    const size_t N = targets.size();
    CrossEntropyResult<Real> r = {std::vector<Real>(N), std::vector<Real>(N * Vp)};
    for (size_t n = 0; n < N; n++) {
        if (targets[n] < 0) continue;
        const double* row = &logits[n * Vp];
        const double max = *std::max_element(row, row + V);
        std::vector<Real> p;
        for (int v = 0; v < V; v++) p.push_back(exp(Real(row[v]) - max));
        const Real total = sum(p, WIDE_BLOCK * PACK);
        r.losses[n] = log(total) + max - row[targets[n]];
        for (int v = 0; v < V; v++) r.dlogits[n * Vp + v] = (p[v] / total - (v == targets[n] ? 1.0 : 0.0)) * scale;
    }
    return r;
}

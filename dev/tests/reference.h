// Reference loops for kernels, shared by test_gpt.cu and the studies in dev/kernels. Real is double, or test_gpt.cu's
// Number, a double with an error bound. Included after train_gpt.cu.
#pragma once

// ==== values =================================================================
// Host values are double, which holds every float, BF16, FP16 and int exactly.

typedef std::vector<double> Values;

// Returns x rounded to T.
template <typename T> double stored_as(double x) { return static_cast<float>(static_cast<T>(static_cast<float>(x))); }

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

// The positions of a batch sorted by token, which the loader uploads for embedding_backward. All positions of one token
// form a run: run r is order[first[r]] ... order[first[r + 1] - 1].
struct Positions {
    std::vector<int> order, first;
    size_t runs;

    Positions(const std::vector<int>& inputs, int vocab) : order(inputs.size()), first(inputs.size() + 1) {
        runs = sort_positions(order.data(), first.data(), inputs.data(), inputs.size(), vocab);
    }
};

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

// tanh(u), u = sqrt(2/pi) (x + 0.044715 x^3)
template <typename Real> Real gelu_tanh(Real x) {
    return tanh(Real(std::sqrt(2 / M_PI)) * (x + Real(0.044715) * x * x * x));
}

template <typename Real> Real gelu_loop(Real x) { return Real(0.5) * x * (Real(1) + gelu_tanh(x)); }

template <typename Real> Real gelu_derivative_loop(Real x) {
    const Real t = gelu_tanh(x), slope = Real(std::sqrt(2 / M_PI)) * (Real(1) + Real(3 * 0.044715) * x * x);
    return Real(0.5) * (Real(1) + t) + Real(0.5) * x * (Real(1) - t * t) * slope;
}

// ==== cross-entropy ==========================================================

template <typename Real> struct CrossEntropyResult { std::vector<Real> losses, dlogits; };

// Returns losses (N) and gradients (N, Vp) of rows with V logits and Vp - V elements of padding. A row with target -1 has
// loss and gradient 0.
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

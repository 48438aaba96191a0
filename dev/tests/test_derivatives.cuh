// Tests of backward kernels against central differences of the forward kernels next to them. They need no reference, so
// they also test a changed layer. Included by test_gpt.cu.
//
// The test of a new layer gives random inputs, the number of outputs, and a function that runs forward and backward:
//
//    expect_derivatives("scale", {{"inp", random_values<float>(n)}, {"w", random_values<float>(n)}}, n,
//                       [=](const Outputs& x, const Values& dout) {
//        const Array inp(x[0]), w(x[1]), d_dout(dout), out(n), dinp(n), dw(zeros(n));
//        scale_forward(out, inp, w, n);
//        scale_backward(dinp, dw, d_dout, inp, w, n);
//        return outputs(out, dinp, dw);   // the output, then one gradient for each input
//    });
#pragma once

#if !defined(PRECISION_BF16) && !defined(PRECISION_FP16)   // differences of 16-bit outputs are rounding errors
#include <numeric>

typedef DeviceArray<float> Array;
Values zeros(size_t n) { return Values(n); }   // the start of a gradient to which backward adds

// Inputs change by H. Rounding: outputs have errors of a few U, which H amplifies to 5 U / H = 1e-4 of a gradient.
// Truncation: H^2 / 6 times the third derivative, at most 3e-4 of it. A gradient with an error of 1 % fails.
constexpr double H = 0x1p-8, TOLERANCE = 0.004;
constexpr int DIRECTIONS = 8;

struct Input { const char* name; Values values; };

// Checks the gradients of L = sum of out * dout with random dout (out_size) along DIRECTIONS random directions of each
// input: (L(x + H v) - L(x - H v)) / 2H equals gradient . v, where each v[i] is 1 or -1. The standard deviation of
// gradient . v is the gradient's norm, to which the tolerance is relative.
template <typename Layer>
void expect_derivatives(const std::string& name, const std::vector<Input>& inputs, size_t out_size, Layer layer) {
    Outputs x;
    for (const Input& input : inputs) x.push_back(input.values);
    const Values dout = random_values<float>(out_size);
    const Outputs results = layer(x, dout);
    const auto loss = [&] {
        const Values out = layer(x, dout).at(0);
        return std::inner_product(out.begin(), out.end(), dout.begin(), 0.0);
    };
    for (size_t k = 0; k < inputs.size(); k++) {
        const Values &before = inputs[k].values, &gradient = results.at(k + 1);
        const double norm = std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
        Near near(name + ": the gradient of " + inputs[k].name + " equals central differences");
        for (int direction = 0; direction < DIRECTIONS; direction++) {
            const Values v = random_values<float>(before.size());
            double losses[2], by_backward = 0;
            for (int side : {0, 1}) {
                for (size_t i = 0; i < before.size(); i++) {
                    x[k][i] = stored_as<float>(before[i] + ((v[i] > 0) == side ? H : -H));
                    by_backward += (side ? 1 : -1) * gradient.at(i) * x[k][i] / (2 * H);   // steps as rounded
                }
                losses[side] = loss();
            }
            near.see(format("along random direction %d", direction),
                     std::abs(by_backward - (losses[1] - losses[0]) / (2 * H)), TOLERANCE * norm);
        }
        x[k] = before;
    }
}

// x from -8 to 8, odd multiples of 1/128: no step crosses 0, where ReLU has a kink. The tolerance tells GELU with tanh
// from GELU with erf, whose derivatives differ by up to 9e-4. Rounding errors of the activation, 1e-6, become 1.3e-4.
TEST("derivatives: activation") {
    constexpr size_t N = 1024;
    constexpr double ALLOWED = 4e-4;   // of a derivative above 1: relative
    Values x(N);
    for (size_t i = 0; i < N; i++) x[i] = (i + 0.5) / 64 - 8;
    const auto out = [&](double step) {
        Values moved = x;
        for (double& value : moved) value += step;
        const Array inp(moved), out(N);
        gelu_forward(view(out, 1, N), view(inp, 1, N));
        return out.values();
    };
    const Values below = out(-H), above = out(H);
    const Array inp(x), dout(Values(N, 1.0)), dinp(N);
    gelu_backward(view(dinp, 1, N), dout, view(inp, 1, N));
    const Values derivative = dinp.values();
    Near near("activation_derivative(x) equals central differences of activation(x)");
    for (size_t i = 0; i < N; i++)
        near.see(format("at x = %g", x[i]), std::abs(derivative[i] - (above[i] - below[i]) / (2 * H)),
                 ALLOWED * std::max(1.0, std::abs(derivative[i])));
}

TEST("derivatives: embedding") {
    constexpr size_t B = 3, T = 13, C = 48, FIRST = 5;
    const Values tokens = random_tokens(B * T);
    expect_derivatives("embedding", {{"wte", random_values<float>(TEST_VOCAB * C)},
                                     {"wpe", random_values<float>(T * C)}},
                       B * T * C, [&](const Outputs& x, const Values& dout) {
        const Array wte(x[0]), wpe(x[1]), d_dout(dout), out(B * T * C);
        const Array dwte(zeros(TEST_VOCAB * C)), dwpe(zeros(T * C));
        const DeviceArray<int> inp(tokens), order(sorted_positions({tokens.begin(), tokens.end()}, TEST_VOCAB));
        embedding_forward(view(out, B * T, C), inp, wte, wpe, FIRST, T);
        embedding_backward(grad(dwte), grad(dwpe), Array(partial_blocks(B * T) * 4 * C), view(d_dout, B * T, C), inp,
                           order, FIRST, T);
        return outputs(out, dwte, dwpe);
    });
}

// As in the model: the residual stream r = inp + bias flows through the LayerNorm and past it. The output is both.
TEST("derivatives: layernorm") {
    constexpr size_t N = 37, C = 80;
    expect_derivatives("layernorm", {{"inp", random_values<float>(N * C, 0, 1)}, {"w", random_values<float>(C)},
                                     {"b", random_values<float>(C)}, {"bias", random_values<float>(C, 0, 0.5)}},
                       2 * N * C, [](const Outputs& x, const Values& dout) {
        Values r = x[0];
        for (size_t i = 0; i < N * C; i++) r[i] += x[3][i % C];
        const Array inp(r), w(x[1]), b(x[2]), mean(N), rstd(N), out(N * C), partials(3 * partial_blocks(N) * C);
        const Array d_out(Values(dout.begin(), dout.begin() + N * C)), dinp(Values(dout.begin() + N * C, dout.end()));
        const Array dw(zeros(C)), db(zeros(C)), dbias(zeros(C));
        layernorm_forward(view(out, N, C), {mean, rstd}, view(inp, N, C), w, b);
        layernorm_backward(view(dinp, N, C), grad(dw), grad(db), grad(dbias), partials, view(d_out, N, C),
                           view(inp, N, C), w, {mean, rstd});
        Values both = out.values();
        both.insert(both.end(), r.begin(), r.end());
        return Outputs{both, dinp.values(), dw.values(), db.values(), dbias.values()};
    });
}

TEST("derivatives: linear") {
    constexpr size_t N = 37, C = 48, OC = 80;
    expect_derivatives("linear", {{"inp", random_values<float>(N * C)}, {"w", random_values<float>(C * OC)},
                                  {"b", random_values<float>(OC)}},
                       N * OC, [](const Outputs& x, const Values& dout) {
        const Array inp(x[0]), w(x[1]), b(x[2]), d_dout(dout), out(N * OC);
        const Array dinp(N * C), dw(zeros(C * OC)), db(zeros(OC));
        linear_forward(view(out, N, OC), view(inp, N, C), view(w, C, OC), b);
        linear_backward(view(dinp, N, C), grad(dw), view(d_dout, N, OC), view(inp, N, C), view(w, C, OC));
        bias_backward(grad(db), Array(partial_blocks(N) * OC), view(d_dout, N, OC));
        return outputs(out, dinp, dw, db);
    });
}

// Returns random multiples of `spacing`, plus `offset`.
Values random_multiples(size_t n, double largest, double spacing, double offset = 0) {
    Values x = random_values<float>(n, -largest, largest);
    for (double& e : x) e = std::round(e / spacing) * spacing + offset;
    return x;
}

// out = activation(inp w + b) w2. The activation and its derivative are kernels or, if they are GELU, epilogues of the
// matmuls. A kernel is tested against an epilogue, so that an epilogue with another function than activation() fails.
// inp w + b is an odd multiple of 1/16: no step crosses 0, where ReLU has a kink.
void test_mlp_derivatives(const std::string& name, Tuned forward, Tuned backward) {
    constexpr size_t N = 17, C = 32, F = 64;
    const auto as = [](Tuned choice, auto run) { return may_fuse() ? with_choice(choice, run) : run(); };
    expect_derivatives(name, {{"inp", random_multiples(N * C, 1, 0.5)}, {"w", random_multiples(C * F, 0.5, 0.25)},
                              {"b", random_multiples(F, 1, 0.125, 0.0625)}, {"w2", random_values<float>(F * C)}},
                       N * C, [&](const Outputs& x, const Values& dout) {
        const Array inp(x[0]), w(x[1]), b(x[2]), w2(x[3]), d_dout(dout), pre(N * F), act(N * F), out(N * C);
        as(forward, [&] {
            linear_gelu_forward(view(act, N, F), view(pre, N, F), view(inp, N, C), view(w, C, F), b);
            linear_forward(view(out, N, C), view(act, N, F), view(w2, F, C), nullptr);
            return 0;
        });
        return as(backward, [&] {
            const Array dinp(N * C), dpre(N * F), dw(zeros(C * F)), db(zeros(F)), dw2(zeros(F * C));
            linear_gelu_backward(view(dpre, N, F), grad(dw2), grad(db), Array(partial_blocks(N) * F),
                                 view(d_dout, N, C), view(act, N, F), view(w2, F, C), view(pre, N, F));
            linear_backward(view(dinp, N, C), grad(dw), view(dpre, N, F), view(inp, N, C), view(w, C, F));
            return outputs(out, dinp, dw, db, dw2);
        });
    });
}

TEST("derivatives: MLP") {
    test_mlp_derivatives("MLP", Tuned::SEPARATE, Tuned::SEPARATE);
    if (!may_fuse()) return;
    test_mlp_derivatives("MLP, forward's activation in an epilogue", Tuned::FUSED, Tuned::SEPARATE);
    test_mlp_derivatives("MLP, backward's activation in an epilogue", Tuned::SEPARATE, Tuned::FUSED);
}

// bias: of qkv
void test_attention_derivatives(const std::string& name, bool naive) {
    constexpr AttentionSize s = {2, 37, 2, 16};
    const size_t N = s.N(), C = s.C(), n = N * C, n_probs = naive ? N * s.NH * s.T : 1;
    expect_derivatives(name, {{"q", random_values<float>(n, -2, 2)}, {"k", random_values<float>(n, -2, 2)},
                              {"v", random_values<float>(n, -2, 2)}, {"bias", random_values<float>(3 * C)}},
                       n, [=](const Outputs& x, const Values& dout) {
        Values qkv;
        for (size_t i = 0; i < 3 * n; i++) qkv.push_back(x[i / C % 3][i / (3 * C) * C + i % C] + x[3][i % (3 * C)]);
        const Array d_qkv(qkv), d_dout(dout), out(n), dqkv(3 * n), lse(N * s.NH), D(N * s.NH), dbias(zeros(3 * C)),
            partials(attention_partials(s.B, s.T) * 3 * C), scores(n_probs), probs(n_probs), dprobs(n_probs);
        const DeviceArray<int> counter(Values{0});
        Heads h = {s.B, s.T, s.NH, s.HS, lse, D, partials, counter};
        if (naive) h.scores = scores, h.probs = probs, h.dprobs = dprobs;
        attention_forward(view(out, N, C), view(d_qkv, N, 3 * C), h);
        attention_backward(view(dqkv, N, 3 * C), grad(dbias), view(d_dout, N, C), view(d_qkv, N, 3 * C),
                           view(out, N, C), h);
        Outputs gradients(3);
        const Values all = dqkv.values();
        for (size_t i = 0; i < 3 * n; i++) gradients[i / C % 3].push_back(all[i]);
        return Outputs{out.values(), gradients[0], gradients[1], gradients[2], dbias.values()};
    });
}

TEST("derivatives: attention") {
    test_attention_derivatives("attention", false);
    test_attention_derivatives("naive attention", true);
}

// L is the sum of the losses, times dout. The kernel gets this factor, and writes the gradient over the logits.
TEST("derivatives: cross entropy") {
    constexpr int V = 65, Vp = 128;
    const Values targets = {3, 64, 0, -1, 12};
    expect_derivatives("cross entropy", {{"logits", random_values<float>(targets.size() * Vp, -4, 4)}}, 1,
                       [&](const Outputs& x, const Values& dout) {
        const Outputs got = run_cross_entropy<Want::LOSS_AND_GRADIENT>(x[0], targets, dout[0], V, Vp);
        return Outputs{{std::accumulate(got[0].begin(), got[0].end(), 0.0)}, got[1]};
    });
}

#endif

// Tests of FP8: kernels that also write FP8, scales and their history, matmuls, models trained in FP8. Included by
// test_gpt.cu.
#pragma once

// Returns whether the device supports FP8: Ada (compute capability 8.9) or later, or a CPU.
bool device_has_fp8() {
    const cudaDeviceProp& p = device.properties;
    return MAY_USE_FP8 && (device.is_cpu() || 10 * p.major + p.minor >= 89);
}

// ==== reference rounding to FP8 ===============================================

template <typename F8> constexpr bool IS_E4M3 = std::is_same_v<F8, e4m3>;

// Returns the value of an FP8 code below 0x80, a positive number.
template <typename F8> double fp8_value(int code) {
    const int mantissa_bits = IS_E4M3<F8> ? 3 : 2, bias = IS_E4M3<F8> ? 7 : 15;
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// Returns x rounded to the nearest FP8 value, ties to even, with saturation.
template <typename F8> double rounded_to_fp8(double x) {
    int code = 0;
    while (fp8_value<F8>(code) < FP8_MAX<F8> && fp8_value<F8>(code + 1) <= std::abs(x)) code++;
    const double below = fp8_value<F8>(code);
    if (below == FP8_MAX<F8>) return std::copysign(below, x);
    const double above = fp8_value<F8>(code + 1), middle = (below + above) / 2;
    const bool up = std::abs(x) > middle || (std::abs(x) == middle && code % 2 == 1);
    return std::copysign(up ? above : below, x);
}

double power_of_2_below(double x) { return std::ldexp(1.0, std::ilogb(x)); }

// ==== scales =================================================================

unsigned bits_of(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// Returns a scale that counts values, saturation and underflow, and has counted 7 values.
Fp8Scale counting_scale(double scale, double amax = 0) {
    return {float(scale), float(1 / scale), bits_of(amax), 1, 7, 0, 0, {}};
}

Values values_of(const Fp8Scale& s) {
    float amax;
    memcpy(&amax, &s.amax, sizeof(amax));
    return {s.scale, s.inverse, amax, double(s.values), double(s.saturated), double(s.underflow)};
}

// Returns x quantised with counting_scale(scale, amax), and values_of() this scale afterwards.
template <typename F8> Outputs fp8_loop(const Values& x, double scale, double amax) {
    Values q;
    double saturated = 0, underflow = 0;
    for (double e : x) {
        q.push_back(rounded_to_fp8<F8>(e * scale));
        saturated += std::abs(e * scale) > FP8_MAX<F8>;
        underflow += e != 0 && q.back() == 0;
    }
    return {q, {scale, 1 / scale, std::max(amax, amax_of(x)), 7.0 + x.size(), saturated, underflow}};
}

// ==== kernels that write FP8 =================================================

// Tests a kernel that writes FP8: launch(tensor) writes tensor.x, initially `before`, and its FP8 copy. x must
// equal the kernel's x without FP8 up to rounding, because a compiler may order the operations of the two differently;
// the copy and the scale must equal fp8_loop's exactly. Delayed scaling is tested with three scales: x fits, large
// values saturate, most values underflow. Then current scaling is tested.
template <typename F8, typename Launch> void try_writer(Trial& trial, const Values& before, Launch launch) {
    const Values x = trial.run([&] {
        const DeviceArray<floatX> alone(before);
        launch(view(alone, 1, before.size()));
        return outputs(alone);
    })[0];
    Numbers near = numbers(x);
    for (Number& e : near) e.error = half_ulp<floatX>(std::abs(e.value)) + 1e-6 * amax_of(x);
    auto compare = [&](bool current, const Fp8Scale& initial, double scale, double amax) {
        const Outputs got = trial.run([&] {
            const DeviceArray<floatX> d_x(before);
            const DeviceArray<F8> fp8(before.size());
            const DeviceArray<Fp8Scale> scale(std::vector<Fp8Scale>{initial});
            Tensor tensor = view(d_x, 1, before.size());
            tensor.fp8 = {fp8, nullptr, scale, IS_E4M3<F8> ? DType::E4M3 : DType::E5M2, current};
            launch(tensor);
            return Outputs{d_x.values(), fp8.values(), values_of(fetch<Fp8Scale>(scale))};
        });
        const Outputs expected = fp8_loop<F8>(got[0], scale, amax);
        trial.compare<floatX>("x", got[0], near);
        trial.equal("x in FP8", got[1], expected[0]);
        trial.equal("scale, inverse, amax, values, saturated, underflow", got[2], expected[1]);
    };
    const double fits = power_of_2_below(FP8_MAX<F8> / amax_of(x));
    const double underflows = power_of_2_below(fits * FP8_MIN<F8> / FP8_MAX<F8>);
    for (auto [scale, amax] : {std::pair{fits, 0.0}, {4 * fits, 1e6}, {underflows, 0.0}})
        compare(false, counting_scale(scale, amax), scale, amax);
    compare(true, counting_scale(3), fits, 0);
}

TEST("kernels: fp8: layernorm and gelu") {
    if (!device_has_fp8()) return;
    {
        Trial forward("layernorm_forward in FP8"), backward("layernorm_backward in FP8");
        for (auto [N, C] : {std::pair<size_t, int>{1, 16}, {37, 80}, {130, 272}}) {
            for (Trial* trial : {&forward, &backward}) trial->at(format("N %zu, C %d", N, C));
            const DeviceArray<floatX> inp(layernorm_inputs(N, C)), w(random_values<floatX>(C)),
                dout(random_values<floatX>(N * C));
            const DeviceArray<float> mean(N), rstd(N), dw(random_values<float>(C)), partials(3 * partial_blocks(N) * C);
            try_writer<e4m3>(forward, Values(N * C, NAN), [&, N = N, C = C](const Tensor& out) {
                layernorm_forward(out, {mean, rstd}, view(inp, N, C), w, w);
            });
            try_writer<e5m2>(backward, random_values<floatX>(N * C), [&, N = N, C = C](const Tensor& dinp) {
                layernorm_backward(dinp, grad(dw), grad(dw), Grad{}, partials, view(dout, N, C), view(inp, N, C), w,
                                   {mean, rstd});
            });
        }
    }
    Trial forward("gelu_forward in FP8"), backward("gelu_backward in FP8"), quantise("quantise");
    for (size_t n : {size_t{16}, SPAN - 16, SPAN + 16}) {
        for (Trial* trial : {&forward, &backward, &quantise}) trial->at(format("n %zu", n));
        const DeviceArray<floatX> inp(gelu_inputs(n)), dout(random_values<floatX>(n));
        try_writer<e4m3>(forward, Values(n, NAN), [&](const Tensor& out) { gelu_forward(out, view(inp, 1, n)); });
        try_writer<e5m2>(backward, Values(n, NAN), [&](const Tensor& dinp) {
            gelu_backward(dinp, dout, view(inp, 1, n));
        });
        try_writer<e4m3>(quantise, random_values<floatX>(n, -3, 1), [&](const Tensor& x) {   // amax of a negative x
            x.quantise();
        });
    }
}

// Tests fp8_gelu_backward, in place as backward calls it: x must equal the loop's, its FP8 copies and the scale
// fp8_loop's, and db the column sums of x. With only_fp8, x is not written. dout is 0 where an error of the operations
// can change the rounding of x.
void try_fp8_gelu_backward(Trial& trial, size_t N, size_t OC, bool only_fp8) {
    trial.at(format("N %zu, OC %zu, only_fp8 %d", N, OC, only_fp8));
    Values dout = random_values<floatX>(N * OC), x(N * OC);
    const Values db = random_values<float>(OC), before = gelu_inputs(N * OC);
    for (size_t i = 0; i < N * OC; i++) {
        const Number e = gelu_derivative_loop<Number>(before[i]) * dout[i];
        x[i] = stored_as<floatX>(e.value);
        if (stored_as<floatX>(e.value - ORDER * e.error) != stored_as<floatX>(e.value + ORDER * e.error))
            dout[i] = x[i] = 0;
    }
    const DeviceArray<floatX> inp(before);
    const double fits = power_of_2_below(FP8_MAX<e5m2> / amax_of(x));
    const Outputs got = trial.run([&] {
        const DeviceArray<floatX> dinp(dout);
        const DeviceArray<e5m2> fp8(N * OC), transposed(N * OC);
        const DeviceArray<Fp8Scale> scale(std::vector<Fp8Scale>{counting_scale(2 * fits)});   // some values saturate
        const DeviceArray<float> d_db(db), partials(partial_blocks(N) * OC);
        Tensor tensor = view(dinp, N, OC);
        tensor.fp8 = {fp8, transposed, scale, DType::E5M2, false, only_fp8};
        fp8_gelu_backward(tensor, grad(d_db), partials, dinp, inp);
        const bool transposes = only_fp8 && !fp8_in_any_layout();
        return Outputs{dinp.values(), fp8.values(), transposes ? transposed.values() : Values(),
                       values_of(fetch<Fp8Scale>(scale)), d_db.values()};
    });
    const Outputs expected = fp8_loop<e5m2>(x, 2 * fits, 0);
    trial.equal("x", got[0], only_fp8 ? dout : x);
    trial.equal("x in FP8", got[1], expected[0]);
    if (!got[2].empty()) trial.equal("x in FP8, transposed", got[2], transposed_values(expected[0], N, OC));
    trial.equal("scale, inverse, amax, values, saturated, underflow", got[3], expected[1]);
    Numbers sums = numbers(db);
    for (size_t i = 0; i < N * OC; i++) sums[i % OC] += x[i];
    trial.compare<float>("db", got[4], sums);
}

TEST("kernels: fp8: gelu backward") {
    if (!device_has_fp8()) return;
    Trial trial("fp8_gelu_backward");
    for (auto [N, OC] : {std::pair<size_t, size_t>{16, 16}, {64, 64}, {80, 272}, {144, 80}})
        for (bool only_fp8 : {false, true}) try_fp8_gelu_backward(trial, N, OC, only_fp8);
    try_fp8_gelu_backward(trial, 37, 80, false);
    // Some blocks have two tiles of rows.
    try_fp8_gelu_backward(trial, MAX_PARTIALS * TRANSPOSE_TILE + 80, 16, true);
}

void test_fp8_attention(TensorCores kind, const AttentionSize& s) {
    const Temporarily tensor_cores(device.tensor_cores, kind);
    const std::string suffix = format(" in FP8, --tensor-cores %s", name_of(kind));
    Trial forward("attention_forward" + suffix), backward("attention_backward" + suffix);
    const size_t n = s.N() * s.C();
    const DeviceArray<floatX> qkv(attention_inputs(s)), dout(random_values<floatX>(n)), out(n);
    const DeviceArray<float> lse(s.N() * s.NH), D(s.N() * s.NH);
    const DeviceArray<int> counter(Values{0});
    const Heads h = {s.B, s.T, s.NH, s.HS, lse, D, nullptr, counter};
    const Tensor inp = view(qkv, s.N(), 3 * s.C());
    try_writer<e4m3>(forward, Values(n, NAN), [&](const Tensor& o) {
        attention_forward(o, inp, h);
    });
    attention_forward(view(out, s.N(), s.C()), inp, h);
    try_writer<e5m2>(backward, Values(3 * n, NAN), [&](const Tensor& o) {
        attention_backward(o, Grad{}, view(dout, s.N(), s.C()), inp, view(out, s.N(), s.C()), h);
    });
}

TEST("kernels: fp8: attention") {
    if (!device_has_fp8()) return;
    test_fp8_attention(TensorCores::NONE, {2, 37, 3, 32});
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (has_tensor_cores(kind)) test_fp8_attention(kind, {2, 150, 2, 64});
}

// ==== history of scales ======================================================

TEST("kernels: fp8: scales") {
    if (!device_has_fp8()) return;
    constexpr int OF_E4M3 = FP8_TENSORS + 1, OF_E5M2 = FP8_TENSORS + FP8_DQKV;   // of the second layer
    const DeviceArray<Fp8Scale> scales(std::vector<Fp8Scale>(2 * FP8_TENSORS));
    auto get = [&](size_t at) { return fetch(scales + at); };
    auto put = [&](size_t at, const Fp8Scale& s) { upload(scales + at, &s, sizeof(s)); };
    auto step = [&](size_t at, double amax) {   // returns the scale after a step with this amax
        Fp8Scale s = get(at);
        s.amax = bits_of(amax);
        put(at, s);
        fp8_scales<Fp8Step::PUSH_HISTORY>(scales, 2 * FP8_TENSORS);
        return double(get(at).scale);
    };
    expect(step(OF_E4M3, 3.0) == 128 && get(OF_E4M3).inverse == 0x1p-7f && get(OF_E4M3).amax == 0 &&
               step(OF_E5M2, 3.0) == 16384 && step(0, 448.0) == 1 && step(1, 449.0) == 0.5,
           "FP8: the scale is the largest power of 2 for which amax * scale is at most 448 (E4M3) or 57344 (E5M2)");
    bool remembered = true;
    for (int s = 0; s < FP8_HISTORY - 4; s++) remembered = remembered && step(OF_E4M3, 1.0) == 128;
    expect(remembered && get(OF_E4M3).history[FP8_HISTORY - 1] == 3.0f && step(OF_E4M3, 1.0) == 256,
           "FP8: an amax stays in the history for 16 steps");
    expect(step(OF_E4M3, INFINITY) == 256 && get(OF_E4M3).amax == 0 && get(OF_E4M3).history[0] == 1.0f &&
               step(OF_E4M3, 2.0) == 128,
           "FP8: a step with an infinite amax changes neither the scale nor the history");
    const float before = get(0).scale;
    step(0, 0.0);
    expect(get(0).scale == before, "FP8: an amax of 0 does not change the scale");
    Fp8Scale s = get(OF_E4M3);
    const float expected = std::exchange(s.scale, 0);
    s.inverse = 0;
    put(OF_E4M3, s);
    fp8_scales<Fp8Step::RESCALE>(scales, 2 * FP8_TENSORS);
    expect(get(OF_E4M3).scale == expected && get(OF_E4M3).inverse == 1 / expected,
           "FP8: scales recomputed from the history are the same");
}

// ==== transposed copies ======================================================

TEST("kernels: fp8: transpose") {
    if (!device_has_fp8()) return;
    Trial transpose("fp8_transpose");
    for (auto [rows, columns] : {std::pair<size_t, size_t>{16, 16}, {16, 80}, {80, 16}, {64, 128}, {144, 208}}) {
        transpose.at(format("%zu x %zu", rows, columns));
        Values inp(rows * columns);
        for (size_t i = 0; i < inp.size(); i++) inp[i] = splitmix64(i) % 127;
        const auto got = transpose.run([&, rows = rows, columns = columns] {
            const DeviceArray<char> out(inp.size()), d_inp(inp);
            fp8_transpose(out, d_inp, rows, columns);
            return outputs(out);
        });
        transpose.equal("out", got[0], transposed_values(inp, rows, columns));
    }
}

// ==== matmuls ================================================================

// A random FP8 matrix, its transpose, and the values that they represent. tensor.x is null: matmuls must not read it.
template <typename F8> struct Fp8Matrix {
    Values values;
    DeviceArray<F8> fp8, fp8_transposed;
    DeviceArray<Fp8Scale> scale;
    Tensor tensor;

    Fp8Matrix(size_t rows, size_t columns, double factor)
        : Fp8Matrix(random_numbers(rows * columns), rows, columns, factor) {}

    // Hopper's tensor cores add 32 products to a sum at a time, with about 13 fraction bits of the largest of them.
    // Each product loses its bits below this unit, and each addition less than two units.
    // source: DeepSeek-V3 report, section 3.3.2
    static double sum_error(const Numbers& products) {
        double sum = 0, largest = 0, lost = 0;
        for (const Number& p : products) {
            sum += p.value;
            largest = std::max({largest, std::abs(p.value), std::abs(sum)});
        }
        const double unit = 0x1p-13 * power_of_2_below(largest);
        for (const Number& p : products) lost += std::fmod(std::abs(p.value), unit);
        return lost + 2 * unit * ceil_div(products.size(), 32);
    }

private:
    // Returns FP8 values of both signs below 2 (codes below 0x40).
    static Values random_numbers(size_t n) {
        Values q(n);
        const uint64_t seed = splitmix64(++random_calls);
        for (size_t i = 0; i < n; i++) {
            const uint64_t bits = splitmix64(seed ^ i);
            q[i] = fp8_value<F8>(bits % 0x40) * (bits >> 32 & 1 ? -1 : 1);
        }
        return q;
    }
    Fp8Matrix(const Values& q, size_t rows, size_t columns, double factor)
        : values(q), fp8(q), fp8_transposed(transposed_values(q, rows, columns)),
          scale(std::vector{counting_scale(factor)}) {
        for (double& x : values) x /= factor;
        tensor = {nullptr, rows, columns};
        tensor.fp8 = {fp8, fp8_transposed, scale, IS_E4M3<F8> ? DType::E4M3 : DType::E5M2};
    }
};

void test_fp8_matmuls(const std::string& suffix) {
    const std::vector<MatmulSize> sizes = {{16, 16, 48}, {48, 48, 16}, {32, 80, 272}, {16, 272, 80}};
    try_linear_forward<Fp8Matrix<e4m3>, Fp8Matrix<e4m3>>("linear_forward" + suffix, sizes);
    try_linear_backward<Fp8Matrix<e5m2>, Fp8Matrix<e4m3>>("linear_backward" + suffix, sizes);
    try_matmul_backward_weight<Fp8Matrix<e4m3>, Fp8Matrix<e5m2>>("matmul_backward_weight" + suffix, sizes);
}

TEST("kernels: fp8: matmul") {
    if (!device_has_fp8()) return;
    test_fp8_matmuls(" in FP8");
#ifdef CUDA_ON_CPU
    const Temporarily sums(cuda_cpu::fp8_bits, 13);
    test_fp8_matmuls(" in FP8, sums of 13 bits");
#endif
}

// ==== models =================================================================

Setup fp8_setup(MatmulIn matmul, Fp8Scaling scaling, Recompute recompute = Recompute::NONE) {
    Setup s = small_setup({3, 2, 32, 16, 300}, 2, 16);
    s.matmul = matmul;
    s.fp8_scaling = scaling;
    s.recompute = recompute;
    return s;
}

// Trains three steps of two micro-batches. Returns the results of the second micro-batch of each step.
std::vector<Pass> three_steps(const Setup& s) {
    TestModel m(s);
    Options o;
    o.schedule = Schedule::CONSTANT;
    o.lr = 1e-2;
    std::vector<Pass> passes;
    for (long step = 0; step < 3; step++) {
        forward_backward(m, random_batch(s, 1000 * step));
        passes.push_back(forward_backward(m, random_batch(s, 1000 * step + 100)));
        update(m, adamw_settings(o, step));
    }
    return passes;
}

TEST("model in FP8") {
    if (!device_has_fp8()) return;
    const std::vector<Pass> plain = three_steps(fp8_setup(MatmulIn::FLOATX, Fp8Scaling::DELAYED));
    for (MatmulIn matmul : {MatmulIn::FP8, MatmulIn::FP8_ALL})
        for (Fp8Scaling scaling : {Fp8Scaling::DELAYED, Fp8Scaling::CURRENT}) {
            const Setup s = fp8_setup(matmul, scaling);
            const std::vector<Pass> passes = three_steps(s);
            bool same = true;
            for (Recompute mode : {Recompute::SELECTIVE, Recompute::FULL})
                same = same && three_steps(fp8_setup(matmul, scaling, mode)) == passes;
            expect(same, matmul_text(s) + ": --recompute does not change a bit of three steps");
            // Relative rounding errors are up to 2^-4 in E4M3 and 2^-3 in E5M2, and so are those of a gradient's terms.
            const double first = relative_l2(passes[0].gradients, plain[0].gradients);
            expect(first > 0x1p-9, matmul_text(s) + ": gradients differ from those in bf16, so matmuls run in FP8");
            Near(matmul_text(s) + ": gradients equal those in bf16 within 2^-3", first, 0x1p-3);
            Near(matmul_text(s) + ": the loss of step 3 equals that in bf16 within 1 %",
                 fabs(passes[2].loss / plain[2].loss - 1), 0.01);
        }
    Setup naive = fp8_setup(MatmulIn::FP8_ALL, Fp8Scaling::DELAYED);
    const std::vector<Pass> with_flash = three_steps(naive);
    naive.attention = Attention::NAIVE;
    Near("fp8-all: gradients with naive attention equal those with flash attention within 2^-4",
         relative_l2(three_steps(naive)[0].gradients, with_flash[0].gradients), 0x1p-4);
    Setup full = fp8_setup(MatmulIn::FLOATX, Fp8Scaling::DELAYED);
    const size_t kept = kept_bytes_per_layer(full), N = full.N(), C = full.config.channels;
    full.matmul = MatmulIn::FP8_ALL;
    expect(kept - kept_bytes_per_layer(full) == 5 * N * C,
           "fp8-all keeps 5 C bytes less per token and layer: ln1, ln2 and gelu in FP8 only, att in bf16 and FP8");
}

TEST("model in FP8: fast accumulation") {
    if (!device_has_fp8()) return;
    auto fast_products = [](bool has_bias) {   // as only the block's four products in forward have
        return std::count_if(matmul_plans.begin(), matmul_plans.end(), [=](const auto& plan) {
            return plan.first.fast_accumulation && (plan.first.epilogue == Epilogue::BIAS) == has_bias;
        });
    };
    Setup s = fp8_setup(MatmulIn::FP8_ALL, Fp8Scaling::DELAYED);
    three_steps(s);
    const size_t by_default = fast_products(true) + fast_products(false);
    s.fp8_accumulation = Fp8Accumulation::FAST;
    three_steps(s);
    expect(by_default == 0 && fast_products(true) == 4 && fast_products(false) == 0,
           "--fp8-accumulation fast applies to the four products of a block in forward, and to no other");
}

// Sets the amax of all tensors to 1e30, as an earlier micro-batch of the first step might.
TEST("model in FP8: micro-batches") {
    if (!device_has_fp8()) return;
    for (Fp8Scaling scaling : {Fp8Scaling::CURRENT, Fp8Scaling::DELAYED}) {
        TestModel m(fp8_setup(MatmulIn::FP8, scaling));
        std::vector<Fp8Scale> scales = from_device(m.a.fp8_scales(), scale_count(m));
        for (Fp8Scale& s : scales) s.amax = bits_of(1e30);
        upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
        micro_step(m, upload_batch(m, random_batch(m.setup)), m.setup.N());
        const Fp8Scale now = fetch(m.a.fp8_scales() + FP8_LN1);
        update(m, adamw_settings(Options(), 0));
        const Fp8Scale after = fetch(m.a.fp8_scales() + FP8_LN1);
        if (scaling == Fp8Scaling::CURRENT)
            expect(now.scale > 1, "current scaling: the scale does not depend on earlier micro-batches");
        else expect(now.scale < 1 && after.amax == 0 && after.history[0] == 1e30f && after.history[1] == 0,
                    "delayed scaling: a step records one amax over all its micro-batches in the history");
        evaluate(m, Tokens("README.md"), 1, Text("", m.config.vocab));
        scales = from_device(m.a.fp8_scales(), scale_count(m));
        expect(std::all_of(scales.begin(), scales.end(), [](const Fp8Scale& s) { return s.amax == 0; }),
               "evaluation leaves no amax to be recorded by the next step");
    }
}

// ==== runs ===================================================================

TEST("runs: FP8") {
    if (!device_has_fp8()) return;
    // 8 micro-batches: graphs are captured in the first step.
    const std::string FP8 = TEN + "--matmul fp8-all --total-batch 256 ";
    const Outcome first = run(FP8 + "--out @/fp8");
    const std::vector<std::string> log = log_of("@/fp8");
    expect_run(log.size() == 14, "--matmul fp8-all is printed at the start and logged at each evaluation", first,
               {"matmul fp8-all, scaling delayed\n"});
    if (log.size() != 14) return;
    const json record = json::parse(log[12]).value("fp8", json());
    bool fractions = record.size() == FP8_TENSORS;
    for (const auto& [name, tensor] : record.items())
        for (const json& fraction : {tensor.begin().value(), std::next(tensor.begin()).value()})
            fractions = fractions && fraction >= 0 && fraction <= 1;
    expect(fractions, "the log has two fractions for each tensor: saturated and underflowed values",
           record.dump().substr(0, 99));

    // Initial weights are N(0, 0.02^2). E4M3 rounds those below 2^-10 to 0, a fraction of erf(2^-10 / 0.02 / sqrt(2)).
    const Outcome unscaled = run("train" + SMALL + "--steps 1 --eval-every 1 --matmul fp8 --fp8-scaling none "
                                 "--checkpoint-every 0 --out @/unscaled");
    double flushed = 0;
    for (const std::string& line : log_of("@/unscaled"))
        if (const json r = json::parse(line); r.contains("fp8")) flushed = r["fp8"].at("qkvw").at("flushed");
    expect_run(fabs(flushed - 0.039) < 0.01, "--fp8-scaling none: the log has the fraction of weights that underflow",
               unscaled);

    expect_same_run("@/fp8", FP8 + "--graph on --sample-every 3 --sample-tokens 5", "fp8-all: graphs and samples");
    begin_from("@/other", "@/fp8", "/step_000005");
    expect_same_run("@/fp8", "train --resume", "fp8-all: resumed at step 5 in another thread order", "CUDA_CPU_SEED=1");

    const std::string path = "@/fp8/step_000010/trainer.json";
    json file = read_json(scratch(path));
    for (const json& damaged : {json("none"), json::array({1.0, 2.0}), json::array({-1.0})}) {
        file["fp8_history"] = damaged;
        write_json(scratch(path), file);
        expect_run(true, "a checkpoint whose fp8_history is " + damaged.dump() + " is rejected",
                   run("train --resume --out @/fp8 --steps 12"), {"\"fp8_history\"", "384 numbers"}, 2);
    }
    fs::remove_all(scratch("@/fp8"));
}

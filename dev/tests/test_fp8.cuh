// Tests of FP8: what kernels write in FP8 beside floatX, scales and their history, matmuls, and models that are trained
// with --matmul fp8 and fp8-all. Included by test_gpt.cu.
//
// The plain definition is by codes: all numbers of a format, from its bits, and the nearest of them.

template <typename F8> constexpr bool IS_E4M3 = std::is_same_v<F8, e4m3>;

// The value of a code below 0x80; those past the largest number are no numbers.
template <typename F8> double fp8_value(int code) {
    const int mantissa_bits = IS_E4M3<F8> ? 3 : 2, bias = IS_E4M3<F8> ? 7 : 15;
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// The nearest number, of two equally near the one with the even code; at most the largest.
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

double largest_of(const Values& x) {
    double largest = 0;
    for (double e : x) largest = std::max(largest, std::abs(e));
    return largest;
}

class DeviceScales {
public:
    explicit DeviceScales(const std::vector<Fp8Scale>& scales) : bytes_(scales.size() * sizeof(Fp8Scale)) {
        upload(data(), scales.data(), scales.size() * sizeof(Fp8Scale));
    }
    Fp8Scale* data() const { return reinterpret_cast<Fp8Scale*>(static_cast<char*>(bytes_)); }
    Fp8Scale at(size_t i) const { return fetch(data() + i); }

private:
    DeviceArray<char> bytes_;
};

unsigned bits_of(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
float float_of(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// A scale that counts, as it may be when a kernel meets it.
Fp8Scale counting_scale(double scale, double largest = 0) {
    return {float(scale), float(1 / scale), bits_of(largest), 1, 7, 0, 0, {}};
}

Values values_of(const Fp8Scale& s) {
    return {s.scale, s.inverse, float_of(s.amax), double(s.values), double(s.saturated), double(s.underflow)};
}

// What quantising x by `scale` must leave, 7 values having been counted before.
template <typename F8> Outputs fp8_loop(const Values& x, double scale, double largest) {
    Values q;
    double saturated = 0, underflow = 0;
    for (double e : x) {
        q.push_back(rounded_to_fp8<F8>(e * scale));
        saturated += std::abs(e * scale) > FP8_MAX<F8>;
        underflow += e != 0 && q.back() == 0;
    }
    return {q, {scale, 1 / scale, std::max(largest, largest_of(x)), 7.0 + x.size(), saturated, underflow}};
}

// launch(operand) writes operand.x, whose elements are `before` until then, and what it says in FP8 beside.
template <typename F8, typename Launch> void try_writer(Trial& trial, const Values& before, Launch launch) {
    auto run = [&](Fp8Scaling scaling, const Fp8Scale& scale) {
        return trial.run([&] {
            const DeviceArray<floatX> x(before);
            const DeviceArray<F8> fp8(before.size());
            const DeviceScales scales({scale});
            Operand operand = x;
            operand.fp8 = fp8;
            operand.scale = scales.data();
            operand.format = IS_E4M3<F8> ? DType::E4M3 : DType::E5M2;
            operand.current_scaling = scaling == Fp8Scaling::CURRENT;
            launch(operand);
            return Outputs{x.download(), fp8.download(), values_of(scales.at(0))};
        });
    };
    const Values x = trial.run([&] {
        const DeviceArray<floatX> alone(before);
        launch(alone);
        return Outputs{alone.download()};
    })[0];
    auto compare = [&](const Outputs& got, double scale, double largest) {
        const Outputs expected = fp8_loop<F8>(x, scale, largest);
        trial.equal("x", got[0], x);
        trial.equal("x in FP8", got[1], expected[0]);
        trial.equal("scale, inverse, amax, values, saturated, underflow", got[2], expected[1]);
    };
    const double fits = power_of_2_below(FP8_MAX<F8> / largest_of(x));
    for (double scale : {fits, 4 * fits, power_of_2_below(fits * FP8_MIN<F8> / FP8_MAX<F8>)})   // saturated, underflow
        for (double largest : {0.0, 1e6})
            compare(run(Fp8Scaling::DELAYED, counting_scale(scale, largest)), scale, largest);
    compare(run(Fp8Scaling::CURRENT, counting_scale(3)), fits, 0);
}

void test_fp8_layernorm() {
    Trial forward("layernorm_forward in FP8"), backward("layernorm_backward in FP8");
    const std::pair<size_t, int> sizes[] = {{1, 16}, {37, 80}, {130, 272}};
    for (const auto& size : sizes) {
        const size_t N = size.first;
        const int C = size.second;
        forward.at("N %zu, C %d", N, C);
        backward.at("N %zu, C %d", N, C);
        const Values inp = layernorm_inputs(N, C), w = random_values<floatX>(C), dout = random_values<floatX>(N * C);
        const DeviceArray<floatX> d_inp(inp), d_w(w), d_dout(dout), res(N * C);
        const DeviceArray<float> mean(N), rstd(N), dw(random_values<float>(C)), partials(3 * partial_blocks(N) * C);
        floatX* const none = nullptr;
        try_writer<e4m3>(forward, Values(N * C, NAN), [&](const Operand& out) {
            layernorm_forward(none, out, mean, rstd, d_inp, none, d_w, d_w, N, C);
        });
        try_writer<e5m2>(backward, random_values<floatX>(N * C), [&](const Operand& dinp) {
            layernorm_backward(dinp, grad(dw), grad(dw), Grad{}, partials, d_dout, d_inp, d_w, mean, rstd, N, C);
        });
    }
    forward.report("out");
    backward.report("dinp");
}

void test_fp8_gelu() {
    Trial forward("gelu_forward in FP8"), backward("gelu_backward in FP8");
    for (size_t n : {size_t{16}, SPAN - 16, SPAN + 16}) {
        forward.at("n %zu", n);
        backward.at("n %zu", n);
        const DeviceArray<floatX> inp(gelu_inputs(n)), dout(random_values<floatX>(n));
        try_writer<e4m3>(forward, Values(n, NAN), [&](const Operand& out) { gelu_forward(out, inp, n); });
        try_writer<e5m2>(backward, Values(n, NAN), [&](const Operand& dinp) { gelu_backward(dinp, dout, inp, n); });
    }
    forward.report("out");
    backward.report("dinp");
}

void test_fp8_attention_of(TensorCores kind, const AttentionSize& s, Attention attention) {
    const TensorCores usual = std::exchange(device.tensor_cores, kind);
    const bool naive = attention == Attention::NAIVE;
    const std::string on = format("%s in FP8", naive ? "naive" : name_of(kind));
    const std::string names[] = {"attention forward, " + on, "attention backward, " + on};
    Trial forward(names[0].c_str()), backward(names[1].c_str());
    for (Trial* trial : {&forward, &backward}) trial->at("B %d, T %d, NH %d, HS %d", s.B, s.T, s.NH, s.HS);
    const size_t n = s.N() * s.C(), scores = static_cast<size_t>(s.B) * s.NH * s.T * s.T;
    const DeviceArray<floatX> qkv(attention_inputs(s)), dout(random_values<floatX>(n)), out(n), probs(scores),
        dprobs(scores);
    const DeviceArray<floatX> d_scores(scores);
    const DeviceArray<float> lse(s.N() * s.NH), D(s.N() * s.NH);
    const DeviceArray<int> counter(Values{0});
    try_writer<e4m3>(forward, Values(n, NAN), [&](const Operand& o) {
        if (!naive) return attention_forward(o, lse, counter, qkv, s.B, s.T, s.NH, s.HS);
        naive_attention_forward(o.x, d_scores, probs, qkv, s.B, s.T, s.NH, s.HS);
        if (o.fp8) o.quantise(n);
    });
    attention_forward(out, lse, counter, qkv, s.B, s.T, s.NH, s.HS);
    try_writer<e5m2>(backward, Values(3 * n, NAN), [&](const Operand& o) {
        if (!naive) return attention_backward(o, D, counter, dout, qkv, out, lse, s.B, s.T, s.NH, s.HS);
        naive_attention_backward(o.x, dprobs, dout, qkv, probs, s.B, s.T, s.NH, s.HS);
        if (o.fp8) o.quantise(3 * n);
    });
    forward.report("out");
    backward.report("dqkv");
    device.tensor_cores = usual;
}

void test_fp8_attention() {
    test_fp8_attention_of(TensorCores::NONE, {2, 37, 3, 32}, Attention::FLASH);
    test_fp8_attention_of(TensorCores::NONE, {1, 20, 2, 16}, Attention::NAIVE);
    for (TensorCores kind : {TensorCores::MMA, TensorCores::WGMMA})
        if (has_tensor_cores(kind)) test_fp8_attention_of(kind, {2, 150, 2, 64}, Attention::FLASH);
}

// ---- scales

void test_fp8_scales() {
    constexpr int OF_LAYER = 3, E4M3S = 2;   // of 2 layers
    const DeviceScales scales(std::vector<Fp8Scale>(2 * OF_LAYER));
    auto step = [&](size_t at, double amax) {   // a step with this amax
        Fp8Scale s = scales.at(at);
        s.amax = bits_of(amax);
        upload(scales.data() + at, &s, sizeof(s));
        fp8_scales<Fp8Step::REMEMBER>(scales.data(), 2 * OF_LAYER, nullptr, OF_LAYER, E4M3S);
        return double(scales.at(at).scale);
    };
    claim(step(4, 3.0) == 128 && scales.at(4).inverse == 0x1p-7f && scales.at(4).amax == 0,
          "FP8: the scale is the largest power of 2 by which the largest value fits: 3 becomes 384 of 448");
    claim(step(5, 3.0) == 16384, "FP8: of a gradient 49152 of 57344");
    claim(step(0, 448.0) == 1 && step(1, 449.0) == 0.5, "FP8: 448 fits as it is, 449 does not");
    bool remembered = true;
    for (int s = 0; s < FP8_HISTORY - 4; s++) remembered = remembered && step(4, 1.0) == 128;
    claim(remembered && scales.at(4).history[FP8_HISTORY - 1] == 3.0f && step(4, 1.0) == 256,
          "FP8: a value counts for the scales of 16 steps, and no longer");
    claim(step(4, INFINITY) == 1 && step(4, 1.0) == 1, "FP8: what is not finite makes no scale");
    const Fp8Scale before = scales.at(0);
    step(0, 0.0);
    claim(scales.at(0).scale == before.scale, "FP8: of zeros nothing is learnt");
    const float expected = scales.at(4).scale;
    Fp8Scale s = scales.at(4);
    s.scale = s.inverse = 0;
    upload(scales.data() + 4, &s, sizeof(s));
    fp8_scales<Fp8Step::RECALL>(scales.data(), 2 * OF_LAYER, nullptr, OF_LAYER, E4M3S);
    claim(scales.at(4).scale == expected && scales.at(4).inverse == 1 / expected,
          "FP8: a history makes the same scales when it comes back from a checkpoint");
}

// ---- transposed copies, and weights

void test_fp8_transpose() {
    Trial trial("fp8_transpose");
    const std::pair<size_t, size_t> sizes[] = {{16, 16}, {16, 80}, {80, 16}, {64, 128}, {144, 208}};
    for (const auto& size : sizes) {
        const size_t rows = size.first, columns = size.second;
        trial.at("%zu x %zu", rows, columns);
        Values inp(rows * columns), expected(rows * columns);
        for (size_t i = 0; i < inp.size(); i++) inp[i] = splitmix64(i) % 127;
        for (size_t i = 0; i < inp.size(); i++) expected[i % columns * rows + i / columns] = inp[i];
        const auto got = trial.run([&] {
            const DeviceArray<char> out(inp.size()), d_inp(inp);
            fp8_transpose(out, d_inp, rows, columns);
            return Outputs{out.download()};
        });
        trial.equal("out", got[0], expected);
    }
    trial.report("out");
}

// Of two layers, a stride apart that is more than a weight takes.
template <Fp8Scaling SCALING> void try_fp8_weights(Trial& trial, size_t rows, size_t columns, double scale) {
    constexpr size_t LAYERS = 2, OF_LAYER = 3;
    const size_t n = rows * columns, stride = n + 48, stride8 = 2 * n + 32;
    trial.at("%zu x %zu, %s", rows, columns, SCALING == Fp8Scaling::CURRENT ? "scaled" : "not scaled");
    const Values w = random_values<floatX>(LAYERS * stride, -0.05, 0.05);
    const auto got = trial.run([&] {
        const DeviceArray<floatX> d_w(w);
        const DeviceArray<e4m3> out(LAYERS * stride8);
        const DeviceScales scales(std::vector<Fp8Scale>(LAYERS * OF_LAYER, counting_scale(scale)));
        fp8_amax(scales.data(), d_w, n, OF_LAYER, LAYERS, stride);
        fp8_weights<SCALING>(out, out + n, scales.data(), d_w, rows, columns, LAYERS, {OF_LAYER, stride8, stride});
        const Values q = out.download();
        Outputs outputs;
        for (size_t l = 0; l < LAYERS; l++) {
            const auto begin = q.begin() + l * stride8;
            outputs.push_back({begin, begin + n});
            outputs.push_back({begin + n, begin + 2 * n});
            outputs.push_back(values_of(scales.at(l * OF_LAYER)));
        }
        return outputs;
    });
    for (size_t l = 0; l < LAYERS; l++) {
        const Values of_layer(w.begin() + l * stride, w.begin() + l * stride + n);
        const bool current = SCALING == Fp8Scaling::CURRENT;
        const double by = current ? power_of_2_below(FP8_MAX<e4m3> / largest_of(of_layer)) : scale;
        const Outputs expected = fp8_loop<e4m3>(of_layer, by, 0);
        Values transposed(n);
        for (size_t i = 0; i < n; i++) transposed[i % columns * rows + i / columns] = expected[0][i];
        trial.equal("as they are", got[3 * l], expected[0]);
        trial.equal("transposed", got[3 * l + 1], transposed);
        trial.equal("scale, inverse, amax, values, saturated, underflow", got[3 * l + 2], expected[1]);
    }
}

void test_fp8_weights() {
    Trial trial("fp8_weights");
    const std::pair<size_t, size_t> sizes[] = {{16, 48}, {80, 16}, {96, 288}};
    for (const auto& [rows, columns] : sizes) {
        try_fp8_weights<Fp8Scaling::CURRENT>(trial, rows, columns, 3);
        try_fp8_weights<Fp8Scaling::NONE>(trial, rows, columns, 1);
    }
    trial.report("weights in FP8, both ways,");
}

// ---- matmuls

// A matrix of FP8 numbers, its transpose, and the numbers that they stand for. Nobody may read x: it is not there.
template <typename F8> struct Fp8Matrix {
    Values values;
    DeviceArray<F8> fp8, fp8_transposed;
    DeviceScales scales;
    Operand operand = static_cast<floatX*>(nullptr);

    Fp8Matrix(size_t rows, size_t columns, double scale) : Fp8Matrix(random_codes(rows * columns), rows, columns,
                                                                     scale) {}

private:
    static Values random_codes(size_t n) {
        Values q(n);
        const uint64_t seed = splitmix64(++random_calls);
        const int codes = 0x40;   // up to 2 or so: sums of products stay apart from BF16's end
        for (size_t i = 0; i < n; i++) {
            const uint64_t bits = splitmix64(seed ^ i);
            q[i] = fp8_value<F8>(bits % codes) * (bits >> 32 & 1 ? -1 : 1);
        }
        return q;
    }
    static Values transposed(const Values& x, size_t rows, size_t columns) {
        Values out(x.size());
        for (size_t i = 0; i < x.size(); i++) out[i % columns * rows + i / columns] = x[i];
        return out;
    }
    Fp8Matrix(const Values& q, size_t rows, size_t columns, double scale)
        : values(q), fp8(q), fp8_transposed(transposed(q, rows, columns)), scales({counting_scale(scale)}) {
        for (double& x : values) x /= scale;
        operand.fp8 = fp8;
        operand.transposed = fp8_transposed;
        operand.scale = scales.data();
        operand.format = IS_E4M3<F8> ? DType::E4M3 : DType::E5M2;
    }
};

const std::vector<MatmulSize> FP8_MATMULS = {{16, 16, 48}, {48, 48, 16}, {32, 80, 272}, {16, 272, 80}};

void test_fp8_matmul_forward() {
    try_matmul_forward<Fp8Matrix<e4m3>, Fp8Matrix<e4m3>>("matmul_forward in FP8", FP8_MATMULS);
}
void test_fp8_matmul_backward_input() {
    try_matmul_backward_input<Fp8Matrix<e5m2>, Fp8Matrix<e4m3>>("matmul_backward_input in FP8",
                                                                "matmul_backward_input_gelu in FP8", FP8_MATMULS);
}
void test_fp8_matmul_backward_weight() {   // which transposes its operands
    try_matmul_backward_weight<Fp8Matrix<e4m3>, Fp8Matrix<e5m2>>("matmul_backward_weight in FP8", FP8_MATMULS);
}

// ---- models

Setup fp8_setup(MatmulIn matmul, Fp8Scaling scaling = Fp8Scaling::DELAYED, Recompute recompute = Recompute::NONE,
                Attention attention = Attention::FLASH) {
    Setup s = {{3, 2, 32, 16, 300}, 2, 16, recompute, DType::FP32, Purpose::TRAINING, HEAD_ROWS, attention};
    s.matmul = matmul;
    s.fp8_scaling = scaling;
    return s;
}

// Three steps of two micro-batches, and what the last micro-batch of each left.
std::vector<Pass> three_steps(const Setup& s) {
    Model m;
    allocate(m, s);
    init_parameters(m, 1);
    Options o;
    o.schedule = Schedule::CONSTANT;
    o.lr = 1e-2;
    std::vector<Pass> passes;
    for (long step = 0; step < 3; step++) {
        for (long micro = 0; micro < 2; micro++) {
            std::vector<int> tokens(s.B * (s.T + 1));
            for (size_t i = 0; i < tokens.size(); i++) tokens[i] =
                splitmix64(1000 * step + 100 * micro + i) % s.config.vocab;
            Pass pass = pass_through(m, tokens.data());
            if (micro == 1) passes.push_back(std::move(pass));
        }
        update(m, adamw_settings(o, step));
    }
    return passes;
}

void test_fp8_model() {
    const std::vector<Pass> plain = three_steps(fp8_setup(MatmulIn::FLOATX));
    for (MatmulIn matmul : {MatmulIn::FP8, MatmulIn::FP8_ALL})
        for (Fp8Scaling scaling : {Fp8Scaling::DELAYED, Fp8Scaling::CURRENT}) {
            const Setup s = fp8_setup(matmul, scaling);
            const std::vector<Pass> passes = three_steps(s);
            bool same = true;
            for (Recompute mode : {Recompute::SELECTIVE, Recompute::FULL})
                same = same && three_steps(fp8_setup(matmul, scaling, mode)) == passes;
            claim(same, matmul_text(s) + ": no bit of three steps depends on --recompute");
            const double first = relative_l2(passes[0].gradients, plain[0].gradients);
            // E4M3 rounds by up to 2^-4 of a value, E5M2 by 2^-3: so do the products that a gradient is made of.
            claim(first < 0x1p-3 && first > 0x1p-9 && std::abs(passes[2].loss / plain[2].loss - 1) < 0.01,
                  matmul_text(s) + ": gradients and losses near those of matmuls in bf16, and not the same",
                  format("gradients differ by %.4f, the third loss by %.5f", first,
                         passes[2].loss / plain[2].loss - 1));
        }
    const Setup naive = fp8_setup(MatmulIn::FP8_ALL, Fp8Scaling::DELAYED, Recompute::NONE, Attention::NAIVE);
    const std::vector<Pass> with_naive = three_steps(naive), with_flash = three_steps(fp8_setup(MatmulIn::FP8_ALL));
    const double apart = relative_l2(with_naive[0].gradients, with_flash[0].gradients);
    claim(apart < 0x1p-4 && apart > 0, "fp8-all: naive attention trains as flash attention does",
          format("%.4f apart", apart));
    Setup full = fp8_setup(MatmulIn::FLOATX);
    const size_t kept = kept_bytes_per_layer(full), N = full.N(), C = full.config.channels;
    full.matmul = MatmulIn::FP8_ALL;
    claim(kept - kept_bytes_per_layer(full) == 5 * N * C,
          "fp8-all keeps 5 C bytes a token and layer less: ln1, ln2 and gelu in 8 bits, att in both");
}

// Current scaling ignores earlier micro-batches; delayed scaling, whose first step has no history, resets at its end.
void test_fp8_memory() {
    for (Fp8Scaling scaling : {Fp8Scaling::CURRENT, Fp8Scaling::DELAYED}) {
        Model m;
        allocate(m, fp8_setup(MatmulIn::FP8, scaling));
        init_parameters(m, 1);
        std::vector<Fp8Scale> scales = from_device(m.a.fp8_scales(), scale_count(m));
        for (Fp8Scale& s : scales) s.amax = bits_of(1e30);   // as if an earlier micro-batch had had that
        upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
        const std::vector<int> tokens(m.setup.B * (m.setup.T + 1), 1);
        micro_step(m, send_batch(m, tokens.data()), m.setup.N());
        const Fp8Scale now = fetch(m.a.fp8_scales() + FP8_LN1);
        update(m, adamw_settings(Options(), 0));
        const Fp8Scale after = fetch(m.a.fp8_scales() + FP8_LN1);
        if (scaling == Fp8Scaling::CURRENT) claim(now.scale > 1, "current scaling: each micro-batch begins anew");
        else claim(now.scale < 1 && after.amax == 0 && after.history[0] == 1e30f && after.history[1] == 0,
                   "delayed scaling: all micro-batches of a step make one largest value, which the update takes");
    }
}

// ---- runs

void test_fp8_runs() {
    // in 8: graphs are captured in the first step
    const std::string FP8 = TEN + "--matmul fp8-all --total-batch 256 ";
    const Outcome first = run(FP8 + "--out @/fp8");
    const std::vector<std::string> log = log_of("@/fp8");
    claim_run(first.code == 0 && log.size() == 14 &&
                  first.out.find("matmul     fp8-all, scales delayed\n") != first.out.npos,
              "a run with --matmul fp8-all says so, and logs at each evaluation what FP8 did", first);
    if (log.size() != 14) return;
    const json record = json::parse(log[12]).value("fp8", json());
    bool shares = record.size() == FP8_TENSORS;
    for (const auto& [name, tensor] : record.items())
        for (const char* what : {"saturated", "flushed"})
            shares = shares && tensor[what] >= 0 && tensor[what] <= 1 && tensor["layers"][what].size() == 2;
    claim(shares, "of each tensor and layer the shares of values that were cut off, and that became 0",
          record.dump().substr(0, 99));

    auto same = [&](const std::string& command, const std::string& environment, const std::string& text) {
        const Outcome outcome = run(command + " --out @/other", environment);
        const bool files = same_file("@/fp8/step_000010/model.safetensors", "@/other/step_000010/model.safetensors") &&
                           same_file("@/fp8/step_000010/optimizer.safetensors",
                                     "@/other/step_000010/optimizer.safetensors");
        const bool evaluated_as_often = command.find("--eval-every") == command.rfind("--eval-every");
        const bool logs = !evaluated_as_often || log_of("@/other") == log;
        claim_run(outcome.code == 0 && files && logs, text, outcome);
        fs::remove_all(scratch("@/other"));
    };
    same(FP8 + "--graph on --sample-every 3 --sample-tokens 5", "",
         "fp8-all: --graph on and samples on the way change no bit");
    same(FP8 + "--eval-every 2", "", "fp8-all: evaluations on the way change no bit of what is trained");
    if (WARP_SIZE > 1 && device.is_cpu())
        same(FP8, "CUDA_CPU_SEED=1", "fp8-all: another order of threads gives the same bits");
    fs::create_directory(scratch("@/other"));
    fs::copy(scratch("@/fp8/step_000005"), scratch("@/other/step_000005"));
    write_bytes(scratch("@/other/log.jsonl"), read_bytes(scratch("@/fp8/log.jsonl")));
    same("train --resume", "", "fp8-all: stopped and resumed at step 5 the bits are those of never stopped");

    auto share_of_zeros = [&](const std::string& scaling) {
        run("train" + SMALL + "--micro-batch 32 --total-batch 8192 --steps 2 --eval-every 2 --eval-sequences 1 "
            "--checkpoint-every 0 --matmul fp8 --out @/scaling --fp8-scaling " + scaling);
        double flushed = -1;
        for (const std::string& line : log_of("@/scaling"))
            if (const json parsed = json::parse(line); parsed.contains("fp8")) flushed =
                parsed["fp8"]["dfc"]["flushed"];
        fs::remove_all(scratch("@/scaling"));
        return flushed;
    };
    const double with = share_of_zeros("delayed"), without = share_of_zeros("none");
    claim(with >= 0 && with < 0.05 && without > 0.5, "without scales most of a gradient becomes 0, with them little",
          format("%.4f of it, %.4f", without, with));

    const std::string path = scratch("@/fp8/step_000010/trainer.json");
    const json intact = read_json(path);
    for (const json& damaged : {json("none"), json::array({1.0, 2.0}), json::array({-1.0})}) {
        json file = intact;
        file["fp8_history"] = damaged;
        write_json(path, file);
        refuse("a history of scales that is " + damaged.dump(), "train --resume --out @/fp8 --steps 12",
               {"trainer.json", "\"fp8_history\"", "384 numbers"});
    }
    fs::remove_all(scratch("@/fp8"));
}

// A GPU before Ada has no FP8.
bool device_has_fp8() {
    const cudaDeviceProp& p = device.properties;
    return MAY_USE_FP8 && (device.is_cpu() || 10 * p.major + p.minor >= 89);
}

void test_bad_fp8() {
    if (FLOATX != DType::BF16) {
        refuse("FP8 in a build that is not BF16's", TINY + "--matmul fp8",
               {"--matmul fp8", "PRECISION=bf16", name_of(FLOATX)});
        return;
    }
    if (!device_has_fp8()) refuse("FP8 on a card before Ada", TINY + "--matmul fp8",
                                  {"--matmul fp8", "8.9", device.properties.name});
    else refuse("FP8 and a sum over 17 rows", TINY + "--matmul fp8 --context 17 --micro-batch 1",
                {"--matmul fp8", "16", "1 x 17"});
    refuse("--matmul fp9", TINY + "--matmul fp9", {"--matmul", "plain|fp8|fp8-all", "'fp9'"});
    refuse("--fp8-scaling later", TINY + "--fp8-scaling later", {"--fp8-scaling", "delayed|current|none", "'later'"});
    refuse("FP8 and ZeRO 3", "plan --gpu-memory 8GB --matmul fp8 --gpus 4 --zero 3", {"--zero 3", "--matmul fp8"});
}

// Tests of memory and time that `plan` predicts: bytes per parameter, closed forms, ZeRO stages, the timeline of a step
// on many GPUs. Included by test_gpt.cu.
#pragma once

Setup planned(const std::string& model, int B, int T, DType precision, DType grad_dtype, int gpus = 1, int zero = 0) {
    Options o;
    o.model = model;
    Config c = config_from_options(o, 0);
    c.context = std::max(c.context, T);
    Setup s = {c, B, T, Recompute::NONE, grad_dtype, Purpose::TRAINING, HEAD_ROWS, Attention::FLASH, precision, true};
    s.gpus = gpus;
    s.zero = zero;
    return s;
}

TEST("plan: parameters and states") {
    const std::pair<const char*, size_t> COUNTS[] = {   // the sum over transformers' tensors
        {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200}};
    for (const auto& [name, expected] : COUNTS) {
        const size_t found = count_parameters(planned(name, 1, 1, DType::BF16, DType::FP32).config).real;
        expect(found == expected, format("%s has %zu parameters", name, expected), format("%zu counted", found));
    }
    for (auto [name, precision, grad_dtype, bytes] :
         {std::tuple{"fp32", DType::FP32, DType::FP32, 16}, {"bf16, gradients bf16", DType::BF16, DType::BF16, 16},
          {"bf16, gradients fp32", DType::BF16, DType::FP32, 18}}) {
        bool exact = true;
        for (const char* model : {"1b", "7b", "70b", "405b"}) {
            const Setup s = planned(model, 1, 1024, precision, grad_dtype);
            exact = exact && state_bytes(plan(s)) == bytes * layout_of(s.config).elements();
        }
        expect(exact, format("%s: %d bytes of state per parameter", name, bytes));
    }
}

// In 128 bits, for random models.
TEST("plan: closed forms") {
    typedef unsigned __int128 Big;
    bool parameters = true, activations = true;
    for (uint64_t i = 0; i < 200; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return 1 + splitmix64(splitmix64(i) + at++) % most; };
        const Big L = draw(200), NH = draw(64), HS = 16 * draw(8), C = NH * HS, V = draw(200000), T = draw(131072),
            B = draw(64);
        if (B * T >= MAX_ROWS) continue;
        Setup s = planned("gpt2", int(B), int(T), DType::BF16, DType::FP32);
        s.config = {int(L), int(NH), int(C), int(T), int(V)};
        const Big expected = C * V + L * (12 * C * C + 13 * C) + 2 * C + T * C;
        parameters = parameters && count_parameters(s.config).real == expected;
        const Big N = B * T, Vp = s.config.padded_vocab(), rows = std::min<Big>(N, HEAD_ROWS);
        const Big layers = L * N * (32 * C + 16 + 4 * NH);             // ln1 to gelu, and mean, rstd, lse
        const Big others = N * (6 * C + 8) + 2 * rows * Vp + 4 * N;    // sub_out, resf, lnf, statistics, logits, losses
        const Big gradients = N * (20 * C + 4 * NH);                   // dres, dln, dqkv, datt, dfc, D
        const size_t planned_bytes = plan(s).bytes[static_cast<int>(Category::ACTIVATIONS)];
        activations = activations && planned_bytes == layers + others + gradients;
    }
    expect(parameters, "200 random models: parameters are C V + L (12 C^2 + 13 C) + 2 C + T C");
    expect(activations,
           "200 random models: activations are 32 C + 16 + 4 NH bytes per token and layer, and the rest once");
    Setup s = planned("gpt2", 8, 1023, DType::BF16, DType::FP32);
    for (auto [mode, most] : {std::pair{Recompute::NONE, 33.0}, {Recompute::SELECTIVE, 20.1}, {Recompute::FULL, 2.0}}) {
        s.recompute = mode;
        Activations nowhere;
        double kept = 0;
        for (const ActivationRow& row : activation_table(nowhere, s)) kept += row.copies == 12 ? row.copy_bytes() : 0;
        Near(format("--recompute %s keeps few C bytes per token and layer", RECOMPUTE_NAMES[int(mode)].first),
             kept / (s.N() * s.config.channels), most);
    }
    const Flops flops = flops_per_token(s);   // 6 per weight of a matmul, and attention; a quarter of all again
    const double block = 2.0 * 12 * 768 * 768, attention = 2.0 * 1024 * 768;
    expect(flops.hardware - flops.model == 11 * (16.0 * 768 * 768 + attention),
           "--recompute full repeats the matmuls qkv, attproj and fc, and attention, in all layers but the last");
    expect(flops.model == 3 * (12 * (block + attention) + 2.0 * 768 * 50257),
           "FLOPs per token: 6 per weight of a matmul, 6 T C per layer of causal attention",
               format("%.0f", flops.model));
}

// Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 GPUs.
TEST("plan: stages of ZeRO") {
    Setup s = planned("7b", 1, 1024, DType::BF16, DType::BF16, 64);
    s.config = {36, 32, 4096, 1024, 60000};
    const size_t P = layout_of(s).elements(),
        STAGES[] = {16 * P, 4 * P + 12 * P / 64, 2 * P + 14 * P / 64, 16 * P / 64};
    const char* FIGURES[] = {"120.0", "31.4", "16.6", "1.9"};
    for (s.zero = 0; s.zero <= 3; s.zero++) {
        const size_t state = state_bytes(plan(s));
        expect(state == STAGES[s.zero] && format("%.1f", state / 1e9) == FIGURES[s.zero],
               format("ZeRO %d: %s GB of state, as in the paper", s.zero, FIGURES[s.zero]), format("%zu bytes", state));
    }
    s.zero = 3;
    s.config.layers = 1;
    expect(plan(s).bytes[static_cast<int>(Category::BUFFERS)] == 2 * 2 * layout_of(s).elements(),
           "the buffers of weights and gradients hold no more than the model's layers");
}

// Steps small enough to compute by hand. In brackets: communication; G gradients, W weights.
TEST("plan: timeline") {
    struct Case { const char* what; StepWork work; long micro_batches; double seconds, computing, bytes; };
    const Case CASES[] = {
        // forward to 20, head to 40, backward to 60 [2 G2 to 68], backward to 80 [2 G1 to 88, 2 G0 to 94]
        {"a step of ZeRO 0", {2, 0, 10, 0, 20, {1, 2}, {3, 4}, 1}, 1, 94, 80, 22},
        // 5 more in the backward of the first layer
        {"of two micro-batches the last one sends", {2, 0, 10, 5, 20, {1, 2}, {3, 4}, 1}, 2, 85 + 85 + 14, 170, 22},
        // forward to 2, head to 4, backward to 6 [2 G2 to 22], backward to 8 [2 G1 to 38, 2 G0 to 50]
        {"communication waits for earlier one", {2, 0, 1, 0, 2, {1, 2}, {3, 4}, 0.5}, 1, 50, 8, 22},
        // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 23, head to 43, backward to 63 [G2 to 67], 83 [G1 to 87, G0 to
        // 90]
        {"ZeRO 1 waits for the initial weights only", {2, 1, 10, 0, 20, {1, 2}, {3, 4}, 1}, 1, 90, 80, 16},
        // the same, and forward from 83, which does not wait, to 163 [G2, G1 to 167, G0 to 170]
        {"ZeRO 2 sends gradients of each micro-batch", {2, 2, 10, 0, 20, {1, 2}, {3, 4}, 1}, 2, 170, 160, 27},
        // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 13 [W3 to 15] to 33, head to 53, backward to 73 [G3 to 77, W1
        // to 79], 93 [G2 to 97], 113 [G1 to 117, G0 to 120]; forward to 123 [W3 to 125], 143, head to 163, backward to
        // 183 [G3, W1], 203 [G2], 223 [G1 to 227, G0 to 230]
        {"ZeRO 3 gathers again what its two buffers do not hold", {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1}, 2, 230, 220,
         43},
        {"each further micro-batch takes as long", {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1}, 5, 560, 550, 100},
        // [W0 to 2, W1 to 6] forward to 7, head to 9, backward to 11 [G1 to 19, G0 to 25]; forward to 12, and the head
        // waits for G0's buffer: from 25 to 27, backward to 29 [G1 to 37, G0 to 43]
        {"gradients wait for their buffer", {1, 2, 1, 0, 2, {1, 2}, {3, 4}, 0.5}, 2, 43, 10, 17}};
    for (const Case& c : CASES) {
        const StepTime t = Timeline(c.work).run(c.micro_batches);
        expect(t.seconds == c.seconds && t.computing == c.computing && t.bytes == c.bytes,
               std::string("timeline by hand: ") + c.what,
               format("%g s, %g computing, %g bytes", t.seconds, t.computing, t.bytes));
    }
    bool bounds = true;
    for (uint64_t i = 0; i < 2000; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return 1.0 * (splitmix64(splitmix64(i) + at++) % most); };
        const size_t layers = 1 + size_t(draw(7));
        const StepWork w = {layers, int(draw(4)), 1 + draw(9), draw(5), draw(30), {draw(20), draw(20)},
                            {draw(20), draw(20)}, 0.25 * (1 + draw(40))};
        const long A = 1 + long(draw(12));
        const StepTime all = Timeline(w).run(A);
        auto near = [&](double a, double b) { return std::abs(a - b) <= 1e-9 * (all.seconds + all.bytes); };
        const double computing = A * (3 * w.forward * w.layers + w.again * (w.layers - 1) + w.head);
        const double sending = all.bytes / w.bandwidth;
        bounds = bounds && near(all.computing, computing) && all.seconds >= std::max(computing, sending) - 1e-9 &&
                 all.seconds <= computing + sending + 1e-9;
    }
    expect(bounds, "2000 random steps: no shorter than computing or sending, no longer than both");
}

// With two layers of weights in the buffers.
TEST("plan: bytes sent") {
    bool bytes = true, flops = true;
    for (const auto& [name, mode] : RECOMPUTE_NAMES)
        for (const int gpus : {1, 2, 3, 64}) {
            Setup s = planned("gpt2", 2, 512, DType::BF16, DType::FP32, gpus);
            s.recompute = mode;
            s.attention = gpus == 3 ? Attention::NAIVE : Attention::FLASH;
            const Layout y = layout_of(s);
            const double part = double(gpus - 1) / gpus, P = y.elements(), A = 6, L = 12;
            const double gathers = y.non_layer + y.layer * (L + (L - 2) + (A - 1) * 2 * (L - 2));
            const double sent[] = {2 * 4 * P, 4 * P + 2 * P, 4 * P * A + 2 * P, 4 * P * A + 2 * gathers};
            for (s.zero = 0; s.zero <= 3; s.zero++) {
                const StepTime t = Timeline(step_work(s, 1e12, 1e9)).run(6);
                bytes = bytes && std::abs(t.bytes - sent[s.zero] * part) <= 1e-12 * sent[s.zero];
                const double computing = flops_per_token(s).hardware * s.N() * 6 / 1e12;
                flops = flops && std::abs(t.computing - computing) <= 1e-12 * computing;
            }
        }
    expect(bytes, "bytes sent: 2G; G + W; A G + W; A G + W and layers again, each (R - 1) / R times");
    expect(flops, "computing takes the hardware FLOPs of all micro-batches");
}

// Tests of memory and time that `plan` predicts: bytes per parameter, closed forms, ZeRO stages, tensor parallelism,
// the timeline of a step on many GPUs. Included by test_gpt.cu.
#pragma once

// Returns the setup of a --model, as `plan` makes it.
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
    const std::pair<const char*, size_t> COUNTS[] = {   // elements of transformers' tensors
        {"gpt2", 124439808}, {"gpt2-medium", 354823168}, {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200}};
    for (const auto& [name, expected] : COUNTS) {
        const size_t found = count_parameters(planned(name, 1, 1, DType::BF16, DType::FP32).config).real;
        expect(found == expected, format("%s has %zu parameters", name, expected), format("%zu counted", found));
    }
    struct Case { const char* name; DType precision, grad_dtype; MasterWeights master; int bytes; };
    for (const Case& c : {Case{"fp32", DType::FP32, DType::FP32, MasterWeights::FP32, 16},
                          {"bf16, gradients bf16", DType::BF16, DType::BF16, MasterWeights::FP32, 16},
                          {"bf16, gradients fp32", DType::BF16, DType::FP32, MasterWeights::FP32, 18},
                          {"bf16 without master weights", DType::BF16, DType::FP32, MasterWeights::NONE, 14}})
        for (Optimizer optimizer : {Optimizer::ADAMW, Optimizer::MUON}) {
            const bool muon = optimizer == Optimizer::MUON;
            bool exact = true;
            for (const char* model : {"1b", "7b", "70b", "405b"}) {
                Setup s = planned(model, 1, 1024, c.precision, c.grad_dtype);
                s.master_weights = c.master;
                s.optimizer = optimizer;
                const size_t C = s.config.channels, matrices = s.config.layers * 12 * C * C;
                exact = exact && state_bytes(plan(s)) == c.bytes * layout_of(s.config).elements() - 4 * matrices * muon;
            }
            expect(exact, format("%s: model states take %d bytes per parameter%s", c.name, c.bytes,
                                 muon ? ", with --optimizer muon 4 less per element of a layer's matrices" : ""));
        }
}

// Compares the plans of random models with closed forms in 128-bit integers, which cannot overflow.
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
        const Big others = N * (4 * C + 8) + 2 * rows * Vp + 4 * N;    // resf, lnf, statistics, logits, losses
        const Big gradients = N * (20 * C + 4 * NH);                   // dres, dln, dqkv, datt, dfc, D
        const size_t planned_bytes = plan(s).bytes[static_cast<int>(Category::ACTIVATIONS)];
        activations = activations && planned_bytes == layers + others + gradients;
    }
    expect(parameters, "200 random models have C V + L (12 C^2 + 13 C) + 2 C + T C parameters");
    expect(activations,
           "200 random models: activations take 32 C + 16 + 4 NH bytes per token and layer; the rest exist once");
    Setup s = planned("gpt2", 8, 1023, DType::BF16, DType::FP32);
    s.recompute = Recompute::FULL;
    const Flops flops = flops_per_token(s);
    const double block = 2.0 * 12 * 768 * 768, attention = 2.0 * 1024 * 768;
    expect(flops.hardware - flops.model == 11 * (16.0 * 768 * 768 + attention),
           "--recompute full repeats the matmuls qkv, attproj and fc, and attention, in all layers but the last");
    expect(flops.model == 3 * (12 * (block + attention) + 2.0 * 768 * 50257),
           "FLOPs per token: 6 per matmul weight, 6 T C per layer of causal attention", format("%.0f", flops.model));
    s.recompute = Recompute::SELECTIVE;
    const double with_flash = flops_per_token(s).hardware;
    s.attention = Attention::NAIVE;
    expect(with_flash == flops.model && flops_per_token(s).hardware - flops.model == 11 * attention,
           "--recompute selective repeats naive attention in all layers but the last, and no FLOPs of flash attention");
}

TEST("plan: peak") {
    const Peak GPUS[] = {{"NVIDIA H100 PCIe", 756, 51.2}, {"NVIDIA H100 80GB HBM3", 989.5, 66.9},
                         {"NVIDIA L40S", 362, 91.6}, {"NVIDIA A100-SXM4-80GB", 312, 19.5}, {"NVIDIA L4", 121, 30.3}};
    const Temporarily properties(device.properties, device.properties);
    const Temporarily peak(device.peak_flops, 0.0);
    Options o;
    std::string wrong;
    for (const Peak& gpu : GPUS) {
        strcpy(device.properties.name, gpu.name);
        find_peak(o);
        const double expected = 1e12 * (FLOATX == DType::FP32 ? gpu.fp32 : gpu.half);
        if (fabs(device.peak_flops / expected - 1) > 1e-12) wrong += format("%s: %g ", gpu.name, device.peak_flops);
    }
    expect(wrong.empty(), "the peak of a known GPU is its data sheet's, in the build's precision", wrong);
    o.peak = PeakSource::MEASURED;
    find_peak(o);
    expect(device.peak_source == "measured matmul" && device.peak_flops > 0, "--peak measured times a matmul");
}

// Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 GPUs.
TEST("plan: ZeRO stages") {
    Setup s = planned("7b", 1, 1024, DType::BF16, DType::BF16, 64);
    s.config = {36, 32, 4096, 1024, 60000};
    const size_t P = layout_of(s).elements(),
        STAGES[] = {16 * P, 4 * P + 12 * P / 64, 2 * P + 14 * P / 64, 16 * P / 64};
    const char* FIGURES[] = {"120.0", "31.4", "16.6", "1.9"};
    for (s.zero = 0; s.zero <= 3; s.zero++) {
        const size_t state = state_bytes(plan(s));
        expect(state == STAGES[s.zero] && format("%.1f", state / 1e9) == FIGURES[s.zero],
               format("ZeRO %d: %s GB of model states, as in the paper", s.zero, FIGURES[s.zero]),
               format("%zu bytes", state));
    }
    s.zero = 3;
    s.config.layers = 1;
    expect(plan(s).bytes[static_cast<int>(Category::BUFFERS)] == 2 * 2 * layout_of(s).elements(),
           "ZeRO 3 with one layer: the buffers hold one copy of weights and gradients, not two");
}

TEST("plan: rows of the head") {
    Setup s = planned("gpt2", 64, 1024, DType::BF16, DType::FP32);
    s.head_rows = s.N();
    const size_t all = plan(s).total;
    bool right = true;
    for (const auto& [name, mode] : RECOMPUTE_NAMES)
        for (auto [gpus, zero] : {std::pair{1, 0}, {8, 0}, {8, 3}}) {
            s.recompute = mode;
            s.gpus = gpus;
            s.zero = zero;
            right = right && training_head_rows(s, all) == HEAD_ROWS &&
                    training_head_rows(s, static_cast<size_t>(all / 0.95) + 1) == s.N();
        }
    expect(right, "the head processes all rows at once if that fits with a margin, for every --recompute and --zero");
    s.on_gpu = false;
    expect(training_head_rows(s, size_t{1} << 50) == HEAD_ROWS, "the head on a CPU processes a fixed number of rows");
}

// Steps small enough to compute by hand: the comments give the time at which each task ends. In brackets: communication
// of gradients G and weights W of a group (0: common parameters, 1...: layers), and of rows in a tensor group.
TEST("plan: timeline") {
    struct Case {
        const char* what;
        StepWork work;
        long micro_batches;
        double seconds, computing, bytes, tensor_bytes = 0, waiting = 0;
    };
    const Case CASES[] = {
        // forward to 20, head to 40, backward to 60 [2 G2 to 68], backward to 80 [2 G1 to 88, 2 G0 to 94]
        {"ZeRO 0 all-reduces gradients during backward", {2, 0, 10, 0, 20, {1, 2}, {3, 4}, 1}, 1, 94, 80, 22},
        // recomputation adds 5 to the backward of the first layer
        {"ZeRO 0 communicates in the last micro-batch only", {2, 0, 10, 5, 20, {1, 2}, {3, 4}, 1}, 2, 85 + 85 + 14,
         170, 22},
        // forward to 2, head to 4, backward to 6 [2 G2 to 22], backward to 8 [2 G1 to 38, 2 G0 to 50]
        {"communication waits for earlier communication", {2, 0, 1, 0, 2, {1, 2}, {3, 4}, 0.5}, 1, 50, 8, 22},
        // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 23, head to 43, backward to 63 [G2 to 67], 83 [G1 to 87, G0 to
        // 90]
        {"ZeRO 1 gathers the weights once, at the start", {2, 1, 10, 0, 20, {1, 2}, {3, 4}, 1}, 1, 90, 80, 16},
        // the same; the next forward starts at 83 without waiting, backward to 163 [G2, G1 to 167, G0 to 170]
        {"ZeRO 2 reduces gradients in each micro-batch", {2, 2, 10, 0, 20, {1, 2}, {3, 4}, 1}, 2, 170, 160, 27},
        // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 13 [W3 to 15] to 33, head to 53, backward to 73 [G3 to 77, W1
        // to 79], 93 [G2 to 97], 113 [G1 to 117, G0 to 120]; forward to 123 [W3 to 125], 143, head to 163, backward to
        // 183 [G3, W1], 203 [G2], 223 [G1 to 227, G0 to 230]
        {"ZeRO 3 gathers again the layers that are not in its two buffers", {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1}, 2,
         230, 220, 43},
        {"ZeRO 3: micro-batches 3 to 5 take as long as the second", {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1}, 5, 560, 550,
         100},
        // [W0 to 2, W1 to 6] forward to 7, head to 9, backward to 11 [G1 to 19, G0 to 25]; forward to 12, and the head
        // waits for G0's buffer: from 25 to 27, backward to 29 [G1 to 37, G0 to 43]
        {"backward waits for a free gradient buffer", {1, 2, 1, 0, 2, {1, 2}, {3, 4}, 0.5}, 2, 43, 10, 17},
        // Rows take 4 each. Forward, 4 times rows in each layer, to 26, 52, head to 72. Backward: dres to 76, MLP to 82,
        // [ln2 to 86] fcw to 85, [dln from 86 to 90] fcw to 89; dres from 90 to 94, attention to 100, [ln1 to 104] qkvw
        // to 101, [dln from 104 to 108] qkvw to 105; at 108 [2 G2 to 116] 3 times rows to 120, again to 125, backward to
        // 161 [2 G1 to 169, 2 G0 to 175]
        {"matmuls of backward overlap transfers in tensor groups",
         {2, 0, 10, 5, 20, {1, 2}, {3, 4}, 1, 2, 0.5, 3, 12, 3, 1}, 1, 175, 85, 22, 46, 76}};
    for (const Case& c : CASES) {
        const StepTime t = Timeline(c.work).run(c.micro_batches);
        expect(t.seconds == c.seconds && t.computing == c.computing && t.bytes == c.bytes &&
                   t.tensor_bytes == c.tensor_bytes && t.waiting == c.waiting,
               std::string("timeline as computed by hand: ") + c.what,
               format("%g s, %g computing, %g + %g bytes, %g waiting", t.seconds, t.computing, t.bytes, t.tensor_bytes,
                      t.waiting));
    }
}

// 8 GPUs in tensor groups of t: G = 8, R = 8 / t. The sizes need no padding. ZeRO 3 buffers two layers of weights. It
// gathers the other L - 2 again in backward and in each further forward.
TEST("plan: tensor parallelism") {
    bool kept = true, once = true, state = true, rows = true, bytes = true, flops = true;
    for (const size_t t : {1, 2, 4})
        for (const auto& [name, mode] : RECOMPUTE_NAMES)
            for (int zero = 0; zero <= 3; zero++) {
                Setup s = planned("7b", 2, 1024, DType::BF16, DType::FP32, 8, zero);
                s.tensor = t;
                s.recompute = mode;
                const size_t N = 2048, C = 4096, NH = 32, L = 32, G = 8, R = G / t, A = 6, Vp = s.config.padded_vocab();
                const size_t per_token[] = {32 * C + 16 + 4 * NH, 20 * C + 4 * NH, 2 * C};
                kept = kept && kept_bytes_per_layer(s) == N * per_token[int(mode)] / t;
                const size_t dropped[] = {0, 12 * C + 16, 30 * C + 16 + 4 * NH};   // one copy, not one for each layer
                const size_t last = N * (8 + 4 + 2 * Vp + 4 * NH) / t;   // statistics, losses, logits; att_d
                const size_t planned_bytes = plan(s).bytes[static_cast<int>(Category::ACTIVATIONS)];
                once = once && planned_bytes == L * kept_bytes_per_layer(s) + N * dropped[int(mode)] / t +
                                                    (t > 1 ? 8 : 4) * N * C + 20 * N * C / t + last;
                const size_t P0 = Vp * C + s.config.context * C + L * 6 * C + 2 * C, Pc = L * (12 * C * C + 7 * C) / t;
                state = state && (zero != 1 || state_bytes(plan(s)) == 6 * (P0 + Pc) + 12 * (P0 / G + Pc / R));
                const StepTime time = Timeline(step_work(s, 1e12, 1e9, 1e9)).run(A);
                const size_t of_rows = 10 * L + (mode == Recompute::FULL ? 3 * (L - 1) : 0);
                rows = rows && time.tensor_bytes == A * of_rows * N * C * 2 * (t - 1) / t;
                const size_t S0 = P0 / G * (G - 1), Sc = Pc / R * (R - 1);
                const size_t gathers = L + (L - 2) + (A - 1) * 2 * (L - 2);   // of a layer
                const size_t volume[] = {2 * 4 * (S0 + Sc), (4 + 2) * (S0 + Sc), (4 * A + 2) * (S0 + Sc),
                                         4 * A * (S0 + Sc) + 2 * (S0 + Sc / L * gathers)};
                bytes = bytes && time.bytes == volume[zero];
                const double computing = flops_per_token(s).hardware * N / t * A / 1e12;
                flops = flops && std::abs(time.computing - computing) <= 1e-12 * computing;
            }
    expect(kept, "tensor ranks each keep 1 / t of 32 C + 16 + 4 NH, 20 C + 4 NH or 2 C bytes per token and layer");
    expect(once, "tensor ranks hold once 8 N C + 20 N C / t bytes and 1 / t of the head");
    expect(state, "ZeRO 1 in tensor groups: 6 (P0 + Pc) + 12 (P0 / G + Pc / R) bytes of state");
    expect(rows, "a tensor rank sends (t - 1) / t of 10 N C elements per layer and micro-batch, and of 3 N C for each "
                 "recomputed layer");
    expect(bytes, "a rank sends (G - 1) / G of group 0 and (R - 1) / R of layers: 2 g bytes (ZeRO 0), g + w (1), "
                  "A g + w (2), A g + w and each repeated gather (3); g, w: bytes of gradients, weights; A micro-batches");
    expect(flops, "tensor ranks divide the compute time of a micro-batch, that of its hardware FLOPs");
}

// Tests of what `plan` predicts: bytes per parameter, closed forms, ZeRO stages, what GPUs send. Included by
// test_gpt.cu.
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
        claim(found == expected, format("%s has %zu parameters", name, expected), format("%zu counted", found));
    }
    for (auto [name, precision, grad_dtype, bytes] :
         {std::tuple{"fp32", DType::FP32, DType::FP32, 16}, {"bf16, gradients bf16", DType::BF16, DType::BF16, 16},
          {"bf16, gradients fp32", DType::BF16, DType::FP32, 18}}) {
        bool exact = true;
        for (const char* model : {"1b", "7b", "70b", "405b"}) {
            const Setup s = planned(model, 1, 1024, precision, grad_dtype);
            exact = exact && state_bytes(plan(s)) == bytes * layout_of(s.config).elements();
        }
        claim(exact, format("%s: %d bytes of state per parameter", name, bytes));
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
    claim(parameters, "200 random models: parameters are C V + L (12 C^2 + 13 C) + 2 C + T C");
    claim(activations,
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
    claim(flops.hardware - flops.model == 11 * (16.0 * 768 * 768 + attention),
          "--recompute full repeats the matmuls qkv, attproj and fc, and attention, in all layers but the last");
    claim(flops.model == 3 * (12 * (block + attention) + 2.0 * 768 * 50257),
          "FLOPs per token: 6 per weight of a matmul, 6 T C per layer of causal attention",
              format("%.0f", flops.model));
    bool exact = false;
    const Setup huge = planned("405b", 1, 131072, DType::BF16, DType::BF16);
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, huge))
        exact = exact || (std::string(row.name) == "fc" && row.bytes() == size_t{131072} * 4 * 16384 * 2 * 126);
    claim(exact, "405b with T = 131072: fc takes 2.165e12 bytes");
}

TEST("plan: --micro-batch auto") {
    bool fits = true, largest = true;
    Options o;
    o.total_batch = 512 * 1024;
    for (size_t memory : {size_t(4e9), size_t(24e9), size_t(80e9)})
        for (const auto& [name, mode] : RECOMPUTE_NAMES) {
            Setup s = planned("gpt2", 1, 1024, DType::BF16, DType::FP32);
            s.recompute = mode;
            s.B = auto_micro_batch(o, s, memory);
            fits = fits && plan(s).total <= memory && 512 % s.B == 0;
            s.B *= 2;
            largest = largest && (512 % s.B != 0 || plan(s).total > 0.95 * memory);
        }
    claim(fits, "--micro-batch auto fits in 4, 24 and 80 GB, and divides the total batch");
    claim(largest, "twice that micro-batch does not fit with the margin");
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
        claim(state == STAGES[s.zero] && format("%.1f", state / 1e9) == FIGURES[s.zero],
              format("ZeRO %d: %s GB of state, as in the paper", s.zero, FIGURES[s.zero]), format("%zu bytes", state));
    }
    s.zero = 3;
    s.config.layers = 1;
    claim(plan(s).bytes[static_cast<int>(Category::BUFFERS)] == 2 * 2 * layout_of(s).elements(),
          "the buffers of weights and gradients hold no more than the model's layers");
}

TEST("plan: bytes sent") {
    struct Case { const char* what; int layers, zero; long micro_batches; double outside, layer; };
    // Weights and gradients that a step sends of group 0 and of a layer, in numbers of parameters.
    const Case CASES[] = {{"ZeRO 0 sums gradients for all ranks, once", 12, 0, 6, 2, 2 * 12},
                          {"ZeRO 1 sums gradients once, and gathers weights once", 12, 1, 6, 1 + 1, 12 + 12},
                          {"ZeRO 2 sums gradients of each micro-batch", 12, 2, 6, 6 + 1, 6 * 12 + 12},
                          {"ZeRO 3 gathers again what its two buffers do not hold", 12, 3, 6, 6 + 1,
                           6 * 12 + 12 + 10 + 5 * (10 + 10)},
                          {"ZeRO 3 gathers one layer once", 1, 3, 6, 6 + 1, 6 * 1 + 1}};
    for (const Case& c : CASES)
        for (const int gpus : {1, 3, 64}) {
            Setup s = planned("gpt2", 2, 512, DType::BF16, DType::BF16, gpus, c.zero);
            s.config.layers = c.layers;
            const Layout y = layout_of(s);
            const double expected = 2 * (c.outside * y.outside + c.layer * y.layer) * (gpus - 1) / gpus,
                         found = bytes_sent(s, c.micro_batches);
            claim(fabs(found - expected) <= 1e-12 * expected, format("%d GPUs: %s", gpus, c.what),
                  format("%.0f bytes, expected %.0f", found, expected));
        }
}

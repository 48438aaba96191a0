// Tests of memory and time as `plan` prints them: the chapter's table, closed forms, ZeRO stages, the timeline of many
// GPUs. Included by test_gpt.cu.
#pragma once

Setup planned(const std::string& model, int B, int T, DType precision, DType grad_dtype) {
    Options o;
    o.model = model;
    Config c = config_from_options(o, 0);
    c.context = std::max(c.context, T);
    return {c, B, T, Recompute::NONE, grad_dtype, Purpose::TRAINING, HEAD_ROWS, Attention::FLASH, precision, true};
}

// The chapter's table of bytes per parameter, which gives 16, 112, 1120 and 6480 GB for 1, 7, 70 and 405 billion.
void test_chapter_table() {
    struct Kind { const char* name; DType precision, grad_dtype; double per_parameter; };
    const std::pair<double, double> TABLE[] = {{1e9, 16e9}, {7e9, 112e9}, {70e9, 1120e9}, {405e9, 6480e9}};
    for (const Kind& kind : {Kind{"fp32", DType::FP32, DType::FP32, 16},
                             Kind{"bf16, gradients bf16", DType::BF16, DType::BF16, 16},
                             Kind{"bf16, gradients fp32", DType::BF16, DType::FP32, 18}}) {
        bool exact = true;
        for (const char* model : {"1b", "7b", "70b", "405b"}) {
            const Setup s = planned(model, 1, 1024, kind.precision, kind.grad_dtype);
            exact = exact && state_bytes(plan(s)) == kind.per_parameter * layout_of(s.config).elements();
        }
        for (const auto& [parameters, bytes] : TABLE)
            exact = exact && (kind.per_parameter != 16 || parameters * kind.per_parameter == bytes);
        claim(exact, format("%s: %g bytes of state per parameter, as in the chapter's table", kind.name,
                            kind.per_parameter));
    }
}

// The formulas written out once more, in 128 bits, for random models.
void test_closed_forms() {
    typedef unsigned __int128 Big;
    bool parameters = true, activations = true;
    for (uint64_t i = 0; i < 200; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return 1 + splitmix64(splitmix64(i) + at++) % most; };
        const Big L = draw(200), NH = draw(64), HS = 16 * draw(8), C = NH * HS, V = draw(200000), T = draw(131072),
            B = draw(64);
        const Config c = {int(L), int(NH), int(C), int(T), int(V)};
        const Setup s = {c, int(B), int(T), Recompute::NONE, DType::FP32, Purpose::TRAINING, HEAD_ROWS,
                         Attention::FLASH, DType::BF16, true};
        if (B * T >= MAX_ROWS) continue;
        parameters = parameters && count_parameters(c).real == C * V + L * (12 * C * C + 13 * C) + 2 * C + T * C;
        const Big N = B * T, Vp = c.padded_vocab(), rows = std::min<Big>(N, HEAD_ROWS);
        const Big layers = L * N * (32 * C + 16 + 4 * NH);        // ln1 to gelu, and mean, rstd, lse
        // branch, resf, lnf and their statistics; logits; losses
        const Big others = N * (6 * C + 8) + 2 * rows * Vp + 4 * N;
        const Big gradients = N * (20 * C + 4 * NH);              // dres, dln, dqkv, datt, dfc, att_d
        const size_t planned_bytes = plan(s).bytes[static_cast<int>(Category::ACTIVATIONS)];
        activations = activations && planned_bytes == layers + others + gradients;
    }
    claim(parameters, "200 random models: parameters are hV + L(12h^2 + 13h) + 2h and positions");
    claim(activations, "200 random models: activations are 32C + 16 + 4 NH bytes a token and layer, and the rest once");
    for (const auto& [mode, most] : {std::pair{Recompute::NONE, 33.0}, {Recompute::SELECTIVE, 20.1},
                                     {Recompute::FULL, 2.0}}) {
        Setup s = planned("gpt2", 8, 1024, DType::BF16, DType::FP32);
        s.recompute = mode;
        Activations nowhere;
        double kept = 0;
        for (const ActivationRow& row : activation_table(nowhere, s)) kept += row.copies == 12 ? row.copy_bytes() : 0;
        kept /= s.N() * s.config.channels;
        claim(kept <= most, format("recompute %s keeps at most %.1f C bytes per token and layer",
                                   RECOMPUTE_NAMES[int(mode)].first, most),
              format("%.2f C", kept));
    }
    Setup full = planned("gpt2", 1, 1023, DType::BF16, DType::FP32);
    full.recompute = Recompute::FULL;
    const Flops flops = flops_per_token(full);
    claim(flops.hardware - flops.model == 11 * (16.0 * 768 * 768 + 2.0 * 1024 * 768),
          "recompute full: the matmuls qkv, attproj and fc, and attention, once more in all layers but the last");
    const Setup huge = planned("405b", 1, 131072, DType::BF16, DType::BF16);
    const size_t fc = size_t{131072} * 4 * 16384 * 2 * 126;
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, huge))
        if (std::string(row.name) == "fc") claim(row.bytes() == fc, "405b with T = 131072: fc takes 2.165e12 bytes",
                                                 format("%zu", row.bytes()));
}

void test_auto_fits() {
    bool fits = true, largest = true;
    for (size_t memory : {size_t(4e9), size_t(24e9), size_t(80e9)})
        for (const auto& [name, mode] : RECOMPUTE_NAMES) {
            Setup s = planned("gpt2", 1, 1024, DType::BF16, DType::FP32);
            s.recompute = mode;
            s.B = auto_micro_batch(s, memory, 512 * 1024);
            fits = fits && plan(s).total <= memory && 512 % s.B == 0;
            s.B *= 2;
            largest = largest && (512 % s.B != 0 || plan(s).total > 0.95 * memory);
        }
    claim(fits, "--micro-batch auto fits in 4, 24 and 80 GB, and divides the total batch");
    claim(largest, "twice that micro-batch would not fit with the margin");
}

// Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 GPUs.
void test_zero_stages() {
    Setup s = planned("7b", 1, 1024, DType::BF16, DType::BF16);
    s.config = {36, 32, 4096, 1024, 60000};
    s.gpus = 64;
    const size_t P = layout_of(s).elements(), stages[] = {16 * P, 4 * P + 12 * P / 64, 2 * P + 14 * P / 64,
                                                          16 * P / 64};
    const char* figures[] = {"120.0", "31.4", "16.6", "1.9"};
    bool figure = true, formula = true, record = true;
    const json records = stage_records(s, size_t(80e9));
    for (s.zero = 0; s.zero <= 3; s.zero++) {
        const Plan p = plan(s);
        const json& r = records[s.zero];
        formula = formula && state_bytes(p) == stages[s.zero];
        figure = figure && format("%.1f", state_bytes(p) / 1e9) == figures[s.zero];
        record = record && r["zero"] == s.zero && r["chosen"] == (s.zero == 0) && r["state"] == state_bytes(p) &&
                 r["bytes"]["total"] == p.total && r["fits"] == (p.total <= 80e9) &&
                 r["bytes"]["buffers"] == p.bytes[static_cast<int>(Category::BUFFERS)];
    }
    claim(formula, "ZeRO 0 to 3 on R GPUs: 16P, 4P + 12P/R, 2P + 14P/R and 16P/R bytes of state, to the byte");
    claim(figure, "7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB of state, as in the ZeRO paper");
    claim(record && records.size() == 4, "the record of each stage is its plan", records.dump());
    s.zero = 3;
    s.config.layers = 1;
    claim(plan(s).bytes[static_cast<int>(Category::BUFFERS)] == 2 * 2 * layout_of(s).elements(),
          "the buffers of weights and gradients hold no more than the model's layers");
    s.gpus = 1;
    s.zero = 0;
    claim(stage_records(s, 1).size() == 1, "one GPU has one stage");
}

// Steps small enough to be followed by hand. All sends by the link in its time, in brackets; G: gradients, W: weights.
void test_timeline() {
    auto is = [](const StepTime& t, double seconds, double computing, double bytes, double sending) {
        return t.seconds == seconds && t.computing == computing && t.bytes == bytes && t.sending == sending;
    };
    auto text = [](const StepTime& t) { return format("%g s, %g computing, %g bytes", t.seconds, t.computing, t.bytes);
        };
    StepWork w = {2, 0, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // forward to 20, head to 40, backward to 60 [2 G2 to 68], backward to 80 [2 G1 to 88, 2 G0 to 94]
    StepTime t = step_time(w, 1);
    claim(is(t, 94, 80, 22, 22) && t.exposed() == 14 && t.hidden() == 8, "by hand: a step of ZeRO 0", text(t));
    w.again = 5;   // in the first layer's backward
    t = step_time(w, 2);
    claim(is(t, 85 + 85 + 14, 170, 22, 22), "by hand: of two micro-batches the last one sends", text(t));
    w = {2, 0, 1, 0, 2, {1, 2}, {3, 4}, 0.5};
    // forward to 2, head to 4, backward to 6 [2 G2 to 22], backward to 8 [2 G1 to 38, 2 G0 to 50]
    t = step_time(w, 1);
    claim(is(t, 50, 8, 22, 44) && t.hidden() == 2, "by hand: what is sent waits for what was sent before", text(t));
    w = {2, 1, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 23, head to 43, backward to 63 [G2 to 67], 83 [G1 to 87, G0 to 90]

    t = step_time(w, 1);
    claim(is(t, 90, 80, 16, 16), "by hand: ZeRO 1 waits for the first weights, and gathers the next ones meanwhile",
          text(t));
    w.zero = 2;
    t = step_time(w, 2);   // the same, and forward from 83, which does not wait: to 163 [G2, G1 to 167, G0 to 170]
    claim(is(t, 170, 160, 27, 27), "by hand: ZeRO 2 sends gradients of each micro-batch", text(t));
    w = {3, 3, 10, 0, 20, {1, 2}, {3, 4}, 1};
    // [W0 to 1, W1 to 3, W2 to 5] forward from 3 to 13 [W3 to 15] to 33, head to 53, backward to 73 [G3 to 77, W1 to
    // 79], 93 [G2 to 97], 113 [G1 to 117, G0 to 120]; forward to 123 [W3 to 125], 143, head to 163, backward to 183
    // [G3, W1], 203 [G2], 223 [G1 to 227, G0 to 230]
    t = step_time(w, 2);
    claim(is(t, 230, 220, 43, 43), "by hand: ZeRO 3 gathers again what its two buffers do not hold", text(t));
    t = step_time(w, 5);
    claim(is(t, 230 + 3 * 110, 5 * 110, 43 + 3 * 19, 43 + 3 * 19), "by hand: each further micro-batch takes as long",
          text(t));
    w = {1, 2, 1, 0, 2, {1, 2}, {3, 4}, 0.5};
    // [W0 to 2, W1 to 6] forward to 7, head to 9, backward to 11 [G1 to 19, G0 to 25]; forward to 12, and the head waits
    // for G0's buffer: from 25 to 27, backward to 29 [G1 to 37, G0 to 43]
    t = step_time(w, 2);
    claim(is(t, 43, 10, 17, 34), "by hand: gradients wait for their buffer", text(t));
}

// Any step: the shortcut for many micro-batches, and what no order of events can change.
void test_timeline_at_random() {
    bool shortcut = true, bounds = true;
    for (uint64_t i = 0; i < 2000; i++) {
        auto draw = [&, at = 0](uint64_t most) mutable { return splitmix64(splitmix64(i) + at++) % most; };
        StepWork w = {1 + draw(7), int(draw(4)), 1.0 + draw(9), 1.0 * draw(5), 1.0 * draw(30), {}, {},
                      0.25 * (1 + draw(40))};
        for (double* bytes : {w.weights, w.gradients}) {
            bytes[0] = draw(20);
            bytes[1] = draw(20);
        }
        const long A = 1 + draw(12);
        const StepTime fast = step_time(w, A), all = simulate(w, A);
        auto near = [&](double a, double b) { return std::abs(a - b) <= 1e-9 * (all.seconds + all.bytes); };
        shortcut = shortcut && near(fast.seconds, all.seconds) && near(fast.computing, all.computing) &&
                   near(fast.sending, all.sending) && near(fast.bytes, all.bytes);
        const double computing = A * (3 * w.forward * w.layers + w.again * (w.layers - 1) + w.head);
        bounds = bounds && near(all.computing, computing) &&
            all.seconds >= std::max(all.computing, all.sending) - 1e-9 &&
                 all.seconds <= all.computing + all.sending + 1e-9 && near(all.bytes / w.bandwidth, all.sending);
    }
    claim(shortcut, "2000 random steps: many micro-batches take what simulating all of them says");
    claim(bounds, "2000 random steps: no shorter than computing or sending, no longer than both");
}

// What the comment of "many GPUs" says that is sent, with group 0 and the buffers in mind; and FLOPs.
void test_sent() {
    bool bytes = true, flops = true;
    for (const auto& [name, mode] : RECOMPUTE_NAMES)
        for (const int gpus : {1, 2, 3, 64}) {
            Setup s = planned("gpt2", 2, 512, DType::BF16, DType::FP32);
            s.gpus = gpus;
            s.recompute = mode;
            s.attention = gpus == 3 ? Attention::NAIVE : Attention::FLASH;
            const Layout y = layout_of(s);
            const double part = double(gpus - 1) / gpus, P = y.elements(), A = 6, L = 12;
            // two layers are there
            const double gathers = y.outside + y.layer * (L + (L - 2) + (A - 1) * 2 * (L - 2));
            const double sent[] = {2 * 4 * P, 4 * P + 2 * P, 4 * P * A + 2 * P, 4 * P * A + 2 * gathers};
            for (s.zero = 0; s.zero <= 3; s.zero++) {
                const StepTime t = step_time(step_work(s, 1e12, 1e9), 6);
                bytes = bytes && std::abs(t.bytes - sent[s.zero] * part) <= 1e-12 * sent[s.zero];
                const double computing = flops_per_token(s).hardware * s.N() * 6 / 1e12;
                flops = flops && std::abs(t.computing - computing) <= 1e-12 * computing;
            }
        }
    claim(bytes, "bytes sent: 2G; G + W; A G + W; A G + W, and layers again, each (R - 1) / R times");
    claim(flops, "computing takes the hardware FLOPs of all micro-batches");
}

const std::string PLAN_7B = "plan --model 7b --gpu-memory 80GB --total-batch 4194304 --bandwidth 50 ";

void test_plan_of_many() {
    const std::string command = PLAN_7B + "--gpus 64 --zero 2 --grad-dtype bf16 --micro-batch 2 --flops 300";
    const Outcome outcome = run(command + " --json"), table = run(command),
        silent = run("plan --gpus 2 --gpu-memory 8GB --json");
    const json record = json::parse(outcome.out, nullptr, false), other = json::parse(silent.out, nullptr, false);
    Setup s = planned("7b", 2, 2048, DType::BF16, DType::BF16);
    s.gpus = 64;
    s.zero = 2;
    bool right = record.is_object() && other.is_object();
    const json leaves = record.flatten();
    for (const char* path : {"/gpus", "/zero", "/bytes/buffers", "/bytes_sent", "/flops_per_s", "/flops_assumed",
                             "/bandwidth",
                             "/zero_stages/3/state", "/zero_stages/3/bytes/total", "/zero_stages/3/bytes_per_parameter",
                             "/zero_stages/3/fits", "/zero_stages/3/chosen", "/step/seconds", "/step/computing",
                             "/step/sending", "/step/hidden", "/step/exposed", "/step/tokens_per_s"})
        right = right && leaves.contains(path);
    claim_run(right, "plan --gpus --json has the keys that it promises", outcome, silent.err);
    if (!right) return;
    const StepTime t = step_time(step_work(s, 300e12, 50e9), 16);
    claim_run(record["bytes"] == record["zero_stages"][2]["bytes"] && record["bytes"]["total"] == plan(s).total &&
                  record["zero_stages"][2]["chosen"] == true && record["zero_stages"].size() == 4 &&
                  record["accumulation"] == 16 && record["bytes_sent"] == t.bytes &&
                  record["step"]["seconds"] == t.seconds && record["step"]["exposed"] == t.exposed() &&
                  std::abs(double(record["step"]["tokens_per_s"]) * t.seconds - 4194304) < 1,
              "its figures are the plan's and the timeline's", outcome);
    claim_run(other["step"].is_null() && other["bandwidth"].is_null() && other["flops_assumed"] == true &&
                  double(other["bytes_sent"]) > 0,
              "without --bandwidth it says what is sent, and not how long that takes", silent);
    bool marked = true;
    for (const char* line : {"\n     0 ", "\n     1 ", "\n  -> 2 ", "\n     3 ", "300 TFLOP/s\n",
                             "ms of sending at 50 GB/s"})
        marked = marked && table.out.find(line) != table.out.npos;
    claim_run(marked && table.out.find("assumed") == table.out.npos,
              "its table has the four stages, one of them marked", table);
    const size_t steps = table.out.find("  3  largest   --micro-batch ");
    long B = 0, A = 0, tokens[4] = {};
    const bool read = steps != table.out.npos &&
                      sscanf(table.out.c_str() + steps, "  3  largest   --micro-batch %ld --recompute none --zero 2\n"
                             "  4  the rest  on 64 GPUs (mpirun -n 64), accumulated over %ld micro-batches of each: "
                             "%ld x %ld x %ld x %ld",
                             &B, &A, &tokens[0], &tokens[1], &tokens[2], &tokens[3]) == 6;
    s.B = static_cast<int>(B);
    const bool fits = plan(s).total <= 80e9;
    s.B *= 2;
    claim_run(read && tokens[0] == B && tokens[2] == A && B * 2048 * A * 64 == 4194304 && fits && plan(s).total > 80e9,
              "from a total batch to micro-batch, accumulation and GPUs", table);
}

void test_scan() {
    const Outcome outcome = run(PLAN_7B + "--scan --gpus 8..512 --json"), table = run(PLAN_7B + "--scan --gpus 8,24");
    const json record = json::parse(outcome.out, nullptr, false);
    if (!record.is_object() || record["scan"].size() != 7)
        return claim_run(false, "--gpus 8..512 are seven numbers", outcome);
    bool sorted = true, planned_so = true, fits = true, all = true;
    int gpus = 8;
    for (const json& scan : record["scan"]) {
        sorted = sorted && scan["gpus"] == gpus && !scan["layouts"].empty();
        std::set<std::tuple<int, std::string, int>> listed;
        for (const json& one : scan["layouts"]) {
            Setup s = planned("7b", one["micro_batch"], 2048, DType::BF16, DType::FP32);
            s.gpus = gpus;
            s.zero = one["zero"];
            for (const auto& [name, mode] : RECOMPUTE_NAMES)
                if (one["recompute"] == name) s.recompute = mode;
            const long A = one["accumulation"];
            const StepTime t = step_time(step_work(s, 400e12, 50e9), A);
            listed.emplace(s.zero, one["recompute"], s.B);
            planned_so = planned_so && one["bytes"] == plan(s).total && one["seconds"] == t.seconds &&
                         one["bytes_sent"] == t.bytes && A * s.B * 2048 * gpus == 4194304;
            fits = fits && size_t(one["bytes"]) <= 0.95 * 80e9;
            sorted = sorted && double(one["tokens_per_s"]) <= double(scan["layouts"][0]["tokens_per_s"]) * (1 + 2e-6);
        }
        // One after the other, none left out.
        for (int zero = 0; zero <= 3; zero++)
            for (const auto& [name, mode] : RECOMPUTE_NAMES)
                for (int B = 1; B * 2048 * gpus <= 4194304; B *= 2) {
                    Setup s = planned("7b", B, 2048, DType::BF16, DType::FP32);
                    s.gpus = gpus;
                    s.zero = zero;
                    s.recompute = mode;
                    all = all && listed.count({zero, name, B}) == (plan(s).total <= size_t(80e9 * 0.95));
                }
        gpus *= 2;
    }
    claim(sorted, "scan: for each number of GPUs no layout is faster than the first");
    claim(planned_so, "scan: bytes, time and what is sent are those of the plan, of all tokens");
    claim(fits, "scan: all fit, with a margin");
    claim(all, "scan: nothing that fits is left out");
    claim_run(table.code == 0 && table.out.find("\n     8     2  ") != table.out.npos &&
                  table.out.find("\n    24  --total-batch 4194304 is no multiple of --seq-len 2048 x 24 GPUs\n") !=
                      table.out.npos,
              "scan: where the batch cannot be shared out it says so", table);
}

// What bounds a layout, and flags that hold something fixed.
void test_scan_bounds() {
    auto first = [](const std::string& command) {
        return json::parse(run("plan --scan --json " + command).out)["scan"][0];
    };
    const std::string BIG = "--gpu-memory 80GB --total-batch 4194304 --bandwidth 50 ";
    const json small = first("--model gpt2 --gpus 8 --gpu-memory 24GB --total-batch 524288 --bandwidth 5");
    const json best = first("--model 7b --gpus 64 " + BIG)["layouts"][0];
    const json large = first("--model 70b --gpus 64 " + BIG)["layouts"];
    const json none = first("--model 70b --gpus 8 " + BIG), odd =
        first("--model gpt2 --gpus 3 --micro-batch 7 --gpu-memory 80GB "
                                                                       "--total-batch 98304 --bandwidth 5");
    if (small["layouts"].empty() || best.is_null() || large.size() < 2)
        return claim(false, "scan: these models fit on these GPUs", small.dump() + best.dump() + large.dump());
    claim(best["bound"] == "compute" && double(best["exposed"]) < 0.1 * double(best["seconds"]),
          "scan: bound by compute where little is lost", best.dump());
    claim(small["layouts"][0]["bound"] == "bandwidth", "scan: bound by bandwidth where sending is exposed",
          small["layouts"][0].dump());
    claim(large[0]["bound"] == "memory" && large[0]["recompute"] == "full" && large.back()["bound"] == "bandwidth",
          "scan: bound by memory where more of it would need no recomputation; not so where a faster one fits",
              large.dump());
    const std::string problem = none["problem"];
    claim(none["layouts"].empty() && problem.find("no layout fits: the smallest takes ") == 0,
          "scan: where nothing fits it says what the smallest needs", none.dump());
    claim(odd["problem"] == "--micro-batch 7 does not divide 32 sequences of each GPU",
          "scan: and why else there is nothing", odd.dump());
    bool kept = true;
    const json held = first("--model 7b --gpus 64 --zero 3 --recompute selective --micro-batch 4 " + BIG)["layouts"];
    const json chosen = first("--model 7b --gpus 64 --zero 1 --recompute full " + BIG)["layouts"];
    for (const json& one : chosen)
        kept = kept && one["zero"] == 1 && one["recompute"] == "full";
    claim(kept && held.size() == 1 && held[0]["zero"] == 3 && held[0]["recompute"] == "selective" &&
          held[0]["micro_batch"] == 4,
          "scan: what the command line gives stays", held.dump());
    std::vector<int> counts;
    claim(parse_gpu_counts("8..512", counts) && counts == std::vector<int>{8, 16, 32, 64, 128, 256, 512} &&
              parse_gpu_counts("5..17", counts) && counts == std::vector<int>{8, 16} &&
              parse_gpu_counts("8,24,1", counts) && counts == std::vector<int>{8, 24, 1} &&
              parse_gpu_counts("65536", counts) && counts == std::vector<int>{65536},
          "--gpus takes a number, a list, and powers of two from one number to another");
    bool divisors = micro_batches_to_try(96, 50) == std::vector<int>{1, 2, 4, 8, 16, 32, 48} &&
                    micro_batches_to_try(7, 4) == std::vector<int>{1} && micro_batches_to_try(7, 0).empty();
    claim(divisors, "scan: micro-batches are powers of two and the largest divisor");
}

// What `train_gpt plan` says: where memory goes, beside what the literature says of the same model. Included by
// train_gpt.cu, whose plan() (section "model: memory") does the sums.
#pragma once

#include "timeline.cuh"
#include "scan.cuh"

// Parameters without positions: h V + L (12 h^2 + 13 h) + 2 h.
double formula_parameters(const Config& c) {
    const double h = c.channels;
    return h * c.vocab + c.layers * (12 * h * h + 13 * h) + 2 * h;
}

// Activations in mixed precision without recomputation or flash attention: L s b h (34 + 5 a s / h) bytes.
// Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1
double formula_activations(const Setup& s) {
    const double h = s.config.channels;
    return double(s.config.layers) * s.T * s.B * h * (34 + 5.0 * s.config.heads * s.T / h);
}

// What a layer keeps of its activations from forward to backward.
size_t kept_bytes_per_layer(Setup s) {
    s.config.layers = 2;   // then what is kept for each layer, and only that, has two copies
    size_t kept = 0;
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s))
        if (row.category == Category::ACTIVATIONS && row.copies == 2) kept += row.copy_bytes();
    return kept;
}

json bytes_record(const Plan& p) {
    json bytes;
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++) bytes[CATEGORY_NAMES[i]] = p.bytes[i];
    bytes["total"] = p.total;
    return bytes;
}

json tensor_records(const Setup& s) {
    json tensors;
    for (const ParameterRow& row : parameter_table(s.config))
        tensors.push_back({{"name", row.name}, {"category", "weights"}, {"shape", row.shape}, {"copies", row.copies},
                           {"dtype", name_of(s.precision)},
                           {"bytes", row.elements * row.copies * size_of(s.precision)}});
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s))
        tensors.push_back({{"name", row.name}, {"category", CATEGORY_NAMES[static_cast<int>(row.category)]},
                           {"shape", row.shape}, {"copies", row.copies}, {"dtype", row.dtype},
                           {"bytes", row.bytes()}});
    return tensors;
}

// The largest micro-batch in `memory` bytes, by recomputation mode.
json largest_micro_batches(const Setup& s, size_t memory) {
    json most;
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        Setup other = s;
        other.recompute = mode;
        most[name] = largest_micro_batch(other, memory);
    }
    return most;
}

size_t bytes_of(const Plan& p, std::initializer_list<Category> categories) {
    size_t bytes = 0;
    for (Category category : categories) bytes += p.bytes[static_cast<int>(category)];
    return bytes;
}

// Weights, gradients, master weights and moments, of one GPU: what ZeRO shares out.
size_t state_bytes(const Plan& p) {
    return bytes_of(p, {Category::WEIGHTS, Category::GRADIENTS, Category::MASTER, Category::ADAM_M, Category::ADAM_V});
}

// The stages beside each other: for P parameters on R GPUs, with BF16 gradients, 16P, 4P + 12P/R, 2P + 14P/R and 16P/R
// bytes of state (figure 1 of Rajbhandari et al. 2020). One GPU has but one.
json stage_records(Setup s, size_t memory) {
    json stages;
    const int chosen = s.zero;
    for (s.zero = 0; s.zero <= (s.gpus > 1 ? last_stage(s) : 0); s.zero++) {
        const Plan p = plan(s);
        stages.push_back({{"zero", s.zero}, {"state", state_bytes(p)}, {"bytes", bytes_record(p)},
                          {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s).elements()},
                          {"fits", p.total <= memory}, {"chosen", s.zero == chosen}});
    }
    return stages;
}

// The plan as one object; memory: what must hold it.
json plan_record(const Options& o, const Setup& s, size_t memory) {
    const Plan p = plan(s);
    const ParameterCount count = count_parameters(s.config);
    const long accumulation = accumulation_steps(o, s);
    const StepTime time = step_time(o, s, accumulation);
    const double tokens = double(s.N()) * s.gpus * accumulation;
    return {{"model", model_record(s.config)},
            {"micro_batch", s.B},
            {"seq_len", s.T},
            {"precision", name_of(s.precision)},
            {"grad_dtype", name_of(s.grad_dtype)},
            {"master_weights", s.master_weights == MasterWeights::NONE ? "none" : "fp32"},
            {"recompute", RECOMPUTE_NAMES[static_cast<int>(s.recompute)].first},
            {"attention", s.attention == Attention::FLASH ? "flash" : "naive"},
            {"matmul", MATMUL_NAMES[static_cast<int>(s.matmul)]},
            {"gpus", s.gpus},
            {"zero", s.zero},
            {"accumulation", accumulation},
            {"parameters", count.real},
            {"parameters_formula", formula_parameters(s.config)},
            {"bytes", bytes_record(p)},
            {"bytes_are_exact", p.total < BEYOND_MEMORY},   // else some of them are more than that
            {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s).elements()},
            {"activation_bytes_per_token_per_layer", double(kept_bytes_per_layer(s)) / s.N()},
            {"korthikanti_bytes", formula_activations(s)},
            {"flops_per_token", flops_record(s)},
            {"gpu_memory", memory},
            {"fits", p.total <= memory},
            {"zero_stages", stage_records(s, memory)},
            {"bytes_sent", time.bytes},   // in a step, by each GPU
            {"flops_per_s", flops_of(o)},
            {"flops_assumed", o.flops == 0},
            {"bandwidth", o.bandwidth > 0 ? json(o.bandwidth * 1e9) : json()},
            {"step", o.bandwidth > 0 ? time_record(time, tokens) : json()},
            {"max_micro_batch", largest_micro_batches(s, memory)},
            {"tensors", tensor_records(s)}};
}

// The chapter's four steps from a batch in tokens to flags.
void print_steps(const Options& o, const Setup& s, const json& most) {
    if (o.total_batch == 0) return;
    const long together = long{s.T} * s.gpus, sequences = o.total_batch / together;   // of each GPU
    const std::string stage = s.gpus > 1 ? format(" --zero %d", s.zero) : "";
    printf("\nto train with %ld tokens a step\n", o.total_batch);
    printf("  1  batch     --total-batch %ld\n  2  sequence  --seq-len %d\n", o.total_batch, s.T);
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        long B = std::min(most[name].get<long>(), sequences);
        while (B > 1 && sequences % B != 0) B--;
        if (B == 0 || o.total_batch % together != 0) continue;
        printf("  3  largest   --micro-batch %ld --recompute %s%s\n", B, name, stage.c_str());
        printf("  4  the rest  %saccumulated over %ld micro-batches%s\n",
               s.gpus > 1 ? format("on %d GPUs (mpirun -n %d), ", s.gpus, s.gpus).c_str() : "", sequences / B,
               s.gpus > 1 ? format(" of each: %ld x %d x %ld x %d tokens", B, s.T, sequences / B, s.gpus).c_str() : "");
        return;
    }
    printf("  3  no micro-batch fits on one such GPU%s, whatever is recomputed\n",
           s.gpus > 1 ? format(" of %d with --zero %d", s.gpus, s.zero).c_str() : "");
}

void print_stages(const Setup& s, const json& record) {
    if (s.gpus == 1) return;
    printf("\n%d GPUs: bytes of each\n", s.gpus);
    printf("  ZeRO  weights, gradients, optimizer  a parameter       buffers         total\n");
    for (const json& stage : record["zero_stages"])
        printf("  %s %d  %29s  %11.2f  %12s  %12s  %s\n", stage["chosen"] ? "->" : "  ", int(stage["zero"]),
               size_text(stage["state"]).c_str(), double(stage["bytes_per_parameter"]),
               size_text(stage["bytes"]["buffers"]).c_str(), size_text(stage["bytes"]["total"]).c_str(),
               stage["fits"] ? "fits" : "does not fit");
}

void print_time(const Options& o, const Setup& s, const json& record) {
    const std::string rate = format("%g TFLOP/s%s", double(record["flops_per_s"]) / 1e12,
                                    record["flops_assumed"] ? ", assumed" : "");
    if (s.gpus > 1) printf("each sends  %s a step\n", size_text(double(record["bytes_sent"])).c_str());
    if (record["step"].is_null()) return;
    const json& step = record["step"];
    auto ms = [&](const char* what) { return 1e3 * double(step[what]); };
    printf("a step      %.1f ms of computing at %s\n", ms("computing"), rate.c_str());
    if (s.gpus > 1)
        printf("            %.1f ms of sending at %g GB/s: %.1f hidden under it, %.1f exposed\n", ms("sending"),
               o.bandwidth, ms("hidden"), ms("exposed"));
    printf("            %.1f ms: %s tok/s at best, estimated\n", ms("seconds"),
           short_number(double(step["tokens_per_s"])).c_str());
}

// Activations, largest first, that are half a percent of them or more.
void print_activations(const json& record) {
    const size_t all = record["bytes"]["activations"];
    std::multimap<size_t, json, std::greater<>> rows;   // by bytes, and then in the table's order
    for (const json& tensor : record["tensors"])
        if (tensor["category"] == "activations" && size_t(tensor["bytes"]) * 200 >= all)
            rows.emplace(tensor["bytes"], tensor);
    printf("\nactivations\n");
    for (const auto& [bytes, row] : rows) {
        const std::string copies = row["copies"] > 1 ? format(" x %d", int(row["copies"])) : "";
        printf("  %-11s %14s  %-28s %s\n", row["name"].get<std::string>().c_str(), size_text(bytes).c_str(),
               (shape_text(row["shape"]) + copies).c_str(), bar(double(bytes) / all).c_str());
    }
}

void print_plan(const Options& o, const Setup& s, const json& record, size_t memory) {
    auto text = [&](const char* key) { return record[key].get<std::string>(); };
    printf("model       %s\n", model_text(s.config).c_str());
    printf("parameters  %zu; by the formula hV + L(12h^2 + 13h) + 2h, without positions, %.0f\n",
           size_t(record["parameters"]), double(record["parameters_formula"]));
    const std::string gpus = s.gpus > 1 ? format("%d GPUs x ", s.gpus) : "";
    printf("a step      %s%d x %d tokens, accumulated %ld times; %s, gradients %s, recompute %s, attention %s%s\n\n",
           gpus.c_str(), s.B, s.T, long(record["accumulation"]), name_of(s.precision), name_of(s.grad_dtype),
           text("recompute").c_str(), text("attention").c_str(),
           s.matmul == MatmulIn::FLOATX ? "" : (", matmul " + text("matmul")).c_str());
    print_memory(plan(s), memory);
    printf("  %s; %.2f bytes of state per parameter\n", record["fits"] ? "fits" : "does not fit on one such GPU",
           double(record["bytes_per_parameter"]));
    print_stages(s, record);
    print_time(o, s, record);
    print_activations(record);
    const double kept = record["activation_bytes_per_token_per_layer"];
    const char* more = kept * s.N() < BEYOND_MEMORY ? "" : "more than ";
    const double formula = std::min(double(record["korthikanti_bytes"]), double(BEYOND_MEMORY));
    printf("  kept per token and layer: %s%.0f bytes = %.1f C; Korthikanti et al., without flash attention: %s in "
           "all\n", more, kept, kept / s.config.channels, size_text(formula).c_str());
    const json& flops = record["flops_per_token"];
    printf("\nFLOPs per token: %.4g model, %.4g hardware\n", double(flops["model"]), double(flops["hardware"]));
    printf("largest micro-batch:");
    for (const auto& [mode, most] : record["max_micro_batch"].items())
        printf("  %d with --recompute %s", int(most), mode.c_str());
    printf("\n");
    print_steps(o, s, record["max_micro_batch"]);
}

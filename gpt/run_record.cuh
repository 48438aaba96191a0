// What a run says of itself as it begins: on the terminal, and in the log's first object. Included by train_gpt.cu.
#pragma once

std::string matmul_text(const Setup& s) {
    const char* name = MATMUL_NAMES[static_cast<int>(s.matmul)];
    if (s.matmul == MatmulIn::FLOATX) return name;
    return format("%s, scales %s", name, FP8_SCALING_NAMES[static_cast<int>(s.fp8_scaling)]);
}

std::string attention_text(const Setup& s) {
    if (s.attention == Attention::NAIVE) return "naive";
    if (!on_tensor_cores(s.config.head_size())) return "flash, without tensor cores";
    return format("flash, on tensor cores (%s)", name_of(device.tensor_cores));
}

void print_run(const Setup& s, const Options& o, const TrainData& data, long accumulation, const Start& start) {
    const Config& c = s.config;
    const std::string from = start.dir.empty() ? "initialised at random" : "from " + start.dir;
    printf("device     %s, %s, %.2f TFLOP/s peak (%s)\n", device.properties.name, name_of(FLOATX),
           device.peak_flops / 1e12, device.peak_source.c_str());
    say_if_busy(stdout);
    printf("model      %s: %zu parameters, %s\n", model_text(c).c_str(), count_parameters(c).real, from.c_str());
    const size_t text_bytes = data.train.text_bytes() + data.val.text_bytes();
    const std::string made = format(", made of %zu bytes by the tokenizer in %s", text_bytes, start.dir.c_str());
    printf("data       %s: %zu tokens to train on, %zu to validate on%s\n", o.data.c_str(), data.train.count(),
           data.val.count(), text_bytes ? made.c_str() : "");
    const std::string gpus = s.gpus > 1 ? format(" x %d GPUs", s.gpus) : "";
    printf("step       %d x %d tokens x %ld micro-batches%s = %ld tokens\n", s.B, s.T, accumulation, gpus.c_str(),
           accumulation * long(s.N()) * s.gpus);
    printf("attention  %s\n", attention_text(s).c_str());
    if (s.matmul != MatmulIn::FLOATX) printf("matmul     %s\n", matmul_text(s).c_str());
    const LossScale scale = start_loss_scale(o, start);
    if (scale.interval > 0 || scale.scale != NO_SCALE)
        printf("loss scale %.0f%s\n", scale.scale, scale.interval > 0 ? " at first, dynamic" : "");
    print_memory(plan(s), memory_now().all);
    printf("output     %s\n", o.out.empty() ? "none: --out DIR keeps a log and checkpoints" : o.out.c_str());
    fflush(stdout);
}

// The log's first object.
json run_record(const Options& o, const Setup& s) {
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    json model = model_record(s.config);
    model["parameters"] = count_parameters(s.config).real;
    return {{"run", {{"options", describe(o, TRAIN)},
                     {"model", model},
                     {"device", device.properties.name},
                     {"precision", name_of(FLOATX)},
                     {"attention", attention_text(s)},
                     {"matmul", matmul_text(s)},
                     {"peak_flops", device.peak_flops},
                     {"peak_source", device.peak_source},
                     {"flops_per_token", flops_record(s)},
                     {"gpus", s.gpus},
                     {"zero", s.zero},
                     {"planned_bytes", plan(s).total},
                     {"cuda_runtime", runtime},
                     {"cuda_driver", driver},
                     {"cublaslt", cublasLtGetVersion()}}}};
}

// What the training loop needs around its steps: the state of a run, its log and its end. Included by train_gpt.cu.
#pragma once

// The memory of tensors that --trace follows, sorted by address.
std::vector<Place> live_places(Model& m) {
    std::vector<Place> all;
    auto add = [&](const BufferBase& tensor, size_t bytes, bool activation) {
        for (size_t l = 0; l < tensor.copies; l++) all.push_back({tensor.of(l), tensor.of(l) + bytes, activation});
    };
    for (const ActivationRow& row : activation_table(m.a, m.setup))
        if (row.category == Category::ACTIVATIONS) add(*row.tensor, row.copy_bytes(), true);
    for (const ParameterRow& row : parameter_table(m.g, m.config))
        add(*row.tensor, row.elements * size_of(m.grads.dtype), false);
    std::sort(all.begin(), all.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
    return all;
}

// The state of a training run.
struct TrainingRun {
    const Options& o;
    const TrainData& data;
    const Start& start;
    Model m;
    long micro_steps = 0;            // micro-batches of the current step, on each GPU
    double tokens_per_step = 0;      // of the current step, over all GPUs
    long step = start.step;          // steps done
    uint64_t tokens = 0;             // tokens of these steps
    double seconds = 0;              // with --minutes: time of these steps, evaluations and checkpoints
    uint64_t next_window = start.window;
    long tried = start.step;         // the last step after which a checkpoint was attempted or is forbidden
    LossScale scale = start_loss_scale(o, start);   // after the last step
    Spikes spikes = start_spikes(start);            // likewise
    NoiseScale noise = start_noise(start);
    TextFiles text_files;            // of each checkpoint
    std::vector<Question> questions;
    Progress progress{start.step, o.verbose};
    Log log;
    double bytes_sent = 0;           // by this rank, in all steps
    std::string last_checkpoint = start.dir;

    TrainingRun(const Options& o, const TrainData& data, const Start& start) : o(o), data(data), start(start) {}
};

// Loads model and moments, and opens the log.
void load_run(TrainingRun& run, const Setup& setup) {
    const Options& o = run.o;
    const bool counts_tokens = run.start.trainer.contains("tokens");   // older checkpoints do not
    run.tokens = counts_tokens ? whole_number<uint64_t>(run.start.trainer, "tokens", run.start.dir + "/trainer.json")
                               : run.start.window * setup.T;
    const json seconds = run.start.trainer.contains("seconds") ? run.start.trainer["seconds"] : json(0.0);
    if (!seconds.is_number() || seconds < 0)
        throw UserError("%s/trainer.json: \"seconds\": expected a number of seconds", run.start.dir.c_str());
    run.seconds = seconds;
    const json config = config_json(run.start.dir, setup.config, INIT_STD, run.data.bos);
    run.text_files = text_files(run.start.dir, config, setup.config, run.data.train.bytes_only());
    if (!o.hellaswag.empty()) run.questions = read_questions(o.hellaswag, setup.config.vocab, setup.T);
    allocate(run.m, setup);
    load_start(run.m, run.start, o.seed);
    const std::vector<double> bytes_read = from_all(Safetensors::bytes_read);   // all ranks have read their parts
    if (o.verbose && !world.alone() && !run.start.dir.empty()) {
        printf("read       bytes of the checkpoint, by rank:");
        for (double bytes : bytes_read) printf(" %.0f", bytes);
        printf("\n");
    }
    set_loss_scale(run.m, run.scale);
    set_spikes(run.m, run.spikes);
    if (!world.first()) return;
    run.log.open(o.out, run.step, run_record(o, setup));   // from here on the folder holds a run
    if (!o.out.empty()) remove_unfinished(o.out);
}

bool is_complete(const TrainingRun& run) {
    const Options& o = run.o;
    if (o.minutes > 0) return run.seconds >= 60 * o.minutes;
    return o.tokens > 0 ? run.tokens >= uint64_t(o.tokens) : run.step >= o.steps;
}

// Returns the expected number of steps of the whole run. With --tokens and --minutes it is the number of steps done,
// divided by the part of the budget that they took, rounded up: the last step may exceed the budget.
long expected_steps(const TrainingRun& run) {
    const Options& o = run.o;
    if (o.minutes == 0 && o.tokens == 0) return o.steps;
    const double budget = o.minutes > 0 ? 60 * o.minutes : o.tokens;
    const double done = o.minutes > 0 ? run.seconds : run.tokens;
    const double first = o.minutes > 0 ? MAX_STEPS : budget / run.tokens_per_step;
    const double steps = run.step > 0 ? run.step * budget / done : first;
    return static_cast<long>(std::ceil(std::clamp(steps, run.step + 1.0, double(MAX_STEPS))));
}

// ---- log

// Returns loss, norm, their z-scores, scale and speed of the step that started at `began`. Blocks until the device is
// done.
StepResult step_result(TrainingRun& run, double began, double lr) {
    const LossScale before = run.scale;
    StepResult r = {};
    r.loss = sum_of_all(take_loss(run.m)) / run.tokens_per_step;
    r.norm = fetch(run.m.a.step()).norm;
    const bool skips_spikes = run.o.skip_spikes > 0;
    if (before.interval > 0 || skips_spikes) run.scale = fetch(run.m.a.loss_scale());
    if (skips_spikes) run.spikes = fetch(run.m.a.spikes());
    else run.spikes.push(float(r.loss), float(r.norm));
    r.loss_z = run.spikes.loss.z;
    r.norm_z = run.spikes.norm.z;
    r.loss_scale = before.scale;
    r.skipped = run.scale.skipped > before.skipped;
    // A scale of 1 cannot be halved, so a norm that is not finite ends the run.
    r.is_finite = std::isfinite(r.loss) && (std::isfinite(r.norm) || (r.skipped && before.scale > 1));
    r.lr = lr;
    r.seconds = seconds_now() - began;
    r.tokens_per_s = run.tokens_per_step / r.seconds;
    const Flops flops = flops_per_token(run.m.setup);
    const double peak = device.peak_flops * run.m.setup.gpus;
    r.mfu = flops.model * r.tokens_per_s / peak;
    r.hfu = flops.hardware * r.tokens_per_s / peak;
    return r;
}

// Returns the log record of a step. `evaluates`: validation follows this step.
json step_record(const TrainingRun& run, const StepResult& r, bool evaluates) {
    json record = {{"step", run.step}, {"loss", r.loss}, {"norm", r.norm}, {"lr", r.lr}, {"ms", 1e3 * r.seconds},
                   {"tokens_per_s", r.tokens_per_s}, {"mfu", r.mfu}, {"hfu", r.hfu},
                   {"batch", long(run.tokens_per_step)}, {"tokens", run.tokens}};
    if (std::isfinite(r.loss_z)) record["loss_z"] = r.loss_z;
    if (std::isfinite(r.norm_z)) record["norm_z"] = r.norm_z;
    const bool scales_loss = FLOATX == DType::FP16 || run.scale.interval > 0 || r.loss_scale != NO_SCALE;
    if (scales_loss || run.o.skip_spikes > 0) record["skipped_steps"] = long(run.scale.skipped);
    if (scales_loss) {
        record["loss_scale"] = r.loss_scale;
        if (evaluates && !has_fp8(run.m)) record["zero_gradients"] = zero_gradients(run.m);   // FP8: fp8_record()
    }
    if (!run.m.master)   // the fraction of weights that the update changed in FP32 but not after rounding
        record["unchanged"] = double(fetch(run.m.a.unchanged())) / count_parameters(run.m.config).real;
    return record;
}

// Adds a step's estimates to the averages and to its log record. squared: own_squared_norm(), of gradients that are
// divided by the tokens of the whole step and multiplied by the loss scale.
void add_noise(json& record, TrainingRun& run, const StepResult& r, double squared) {
    const double B = run.tokens_per_step, b = B / (world.alone() ? run.micro_steps : world.size);
    const double factor = B / b / r.loss_scale, small = sum_of_all(squared) / world.size * factor * factor;
    const double large = r.norm * r.norm;
    if (r.skipped || !std::isfinite(small)) return;   // an overflow or a spike
    const double gradient = (B * large - b * small) / (B - b), trace = (small - large) / (1 / b - 1 / B);
    NoiseScale& average = run.noise;
    average.gradient = NOISE_DECAY * average.gradient + (1 - NOISE_DECAY) * gradient;
    average.trace = NOISE_DECAY * average.trace + (1 - NOISE_DECAY) * trace;
    record.update({{"noise_gradient", gradient}, {"noise_trace", trace}});
    if (average.gradient > 0) record["noise_scale"] = average.trace / average.gradient;
}

// Starts to count values, saturation and underflow in FP8 before a step that log_counts() logs.
void start_counting(Model& m) {
    if (has_fp8(m)) fp8_scales<Fp8Step::START_COUNTING>(m.a.fp8_scales(), scale_count(m));
}
void log_counts(TrainingRun& run) {
    if (!has_fp8(run.m)) return;
    run.log.write({{"step", run.step}, {"fp8", fp8_record(run.m)}});
    fp8_scales<Fp8Step::STOP_COUNTING>(run.m.a.fp8_scales(), scale_count(run.m));
}

// Returns a checkpoint's trainer.json, without the step.
json trainer_record(const TrainingRun& run) {
    json trainer = {{"next_window", run.next_window}, {"tokens", run.tokens}, {"train_tokens", run.data.train.count()},
                    {"head_rows", run.m.setup.logits_rows()}, {"options", describe(run.o, TRAIN)}};
    if (run.o.minutes > 0) trainer["seconds"] = run.seconds;
    if (run.o.noise_every > 0) trainer["noise"] = {run.noise.gradient, run.noise.trace};
    if (run.m.fp8_history) trainer["fp8_history"] = fp8_history(run.m);
    if (run.scale.interval > 0)
        trainer["loss_scaling"] = {{"scale", long(run.scale.scale)}, {"good_steps", long(run.scale.good_steps)}};
    if (run.scale.interval > 0 || run.scale.skipped > 0)
        trainer["loss_scaling"]["skipped_steps"] = long(run.scale.skipped);
    trainer["last_losses"] = run.spikes.loss.list();
    trainer["last_norms"] = run.spikes.norm.list();
    return trainer;
}

// ---- end

// Logs the end; prints the totals and the commands that come next.
void print_end(TrainingRun& run, double tokens, double seconds) {
    const Options& o = run.o;
    run.log.write({{"end", is_complete(run) ? "complete" : "signal"}});
    const long steps = run.step - run.start.step;
    const Memory memory = memory_now();
    const size_t used = device.is_cpu() ? peak_resident_bytes() : memory.all - memory.available;
    run.progress.end_line();
    if (steps == 0 && is_complete(run)) {
        const std::string budget = o.minutes > 0 ? format("--minutes %g", o.minutes) :
                                   o.tokens > 0 ? format("--tokens %ld", o.tokens) : format("--steps %ld", o.steps);
        printf("done       no steps: %s is at step %ld and has reached %s; a larger one continues the run\n",
               o.out.c_str(), run.step, budget.c_str());
    } else {
        const std::string sent = size_text(static_cast<size_t>(run.bytes_sent / std::max(1L, steps)));
        printf("done       %s steps in %s, %s tok/s; %s allocated as planned, %s %s%s\n", grouped(steps).c_str(),
               clock_text(seconds).c_str(), short_number(tokens / seconds).c_str(),
               size_text(run.m.allocated).c_str(), size_text(used).c_str(),
               device.is_cpu() ? "resident at most" : "in use on the device", world.alone() ? "" :
               format("; sent %s a step by each of %zu GPUs", sent.c_str(), world.size).c_str());
    }
    const auto checkpoints = list_checkpoints(o.out);   // none without --out
    const bool has_text = run.text_files.count("tokenizer.json") || run.text_files.count("vocab.json");
    print_next(o, checkpoints.empty() ? "" : checkpoints.rbegin()->second,
               has_text ? "" : format(" --prompt-tokens %d", run.data.text.first(run.data.bos)), is_complete(run));
}

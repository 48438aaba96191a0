// Where a run begins, and what it takes from there: weights, moments, histories. Included by train_gpt.cu.
#pragma once

// Where a run begins: nothing, --from or the last checkpoint.
struct Start {
    std::string dir;        // of a Hugging Face folder, or empty
    json trainer;           // null but when resuming
    long step = 0;
    uint64_t window = 0;    // of the data
    std::shared_ptr<FolderLock> lock = nullptr;   // of --out
};

Start find_start_here(const Options& o) {
    Start start = {o.from, nullptr};
    if (o.out.empty()) {
        if (o.resume) throw UserError("--resume needs --out DIR, the folder of the run to go on with");
        return start;
    }
    std::error_code error;
    if (fs::exists(o.out, error) && !fs::is_directory(o.out, error))
        throw UserError("--out %s: is a file, expected a folder", o.out.c_str());
    if (o.resume && !fs::exists(o.out, error)) throw UserError("--resume: no run in %s, no such folder", o.out.c_str());
    error.clear();
    try {
        create_folder(fs::absolute(o.out));
    } catch (const fs::filesystem_error& problem) {
        error = problem.code();
    }
    if (error || access(o.out.c_str(), R_OK | W_OK | X_OK) != 0)
        throw UserError("--out %s: cannot be read and written: %s", o.out.c_str(),
                        error ? error.message().c_str() : strerror(errno));
    start.lock = std::make_shared<FolderLock>(o.out);
    const auto checkpoints = list_checkpoints(o.out);
    if (!o.resume) {
        if (!checkpoints.empty() || fs::exists(o.out + "/log.jsonl"))
            throw UserError("--out %s already holds a run: --resume goes on with it, or name another folder",
                            o.out.c_str());
        return start;
    }
    if (checkpoints.empty()) {   // start.dir is the run's --from
        if (!fs::exists(o.out + "/log.jsonl")) throw UserError("--resume: no run in %s", o.out.c_str());
        printf("resume     %s has no checkpoint yet: the run begins anew%s%s\n", o.out.c_str(),
               start.dir.empty() ? "" : " from ", start.dir.c_str());
        return start;
    }
    start.dir = checkpoints.rbegin()->second;
    const std::string path = start.dir + "/trainer.json";
    start.trainer = read_json(path);
    start.step = whole_number<long>(start.trainer, "step", path);
    start.window = whole_number<uint64_t>(start.trainer, "next_window", path);
    if (start.step != checkpoints.rbegin()->first)
        throw UserError("%s: \"step\" is %ld, expected %ld as in the folder's name", path.c_str(), start.step,
                        checkpoints.rbegin()->first);
    return start;
}

// Of many GPUs the first one looks, and locks the folder.
Start find_start(const Options& o) {
    Start start = {o.from, nullptr};
    if (ranks.first()) start = find_start_here(o);
    const json same = json::parse(from_first(json{start.trainer, start.step, start.window}.dump()));
    start.trainer = same[0];
    start.step = same[1];
    start.window = same[2];
    if (!start.trainer.is_null()) start.dir = o.out + "/" + checkpoint_name(start.step);
    return start;
}

// Of a run that had none, such as one in BF16, scales begin anew.
void read_fp8_history(Model& m, const Start& start) {
    const char* key = "fp8_history";
    if (m.setup.fp8_scaling != Fp8Scaling::DELAYED || !start.trainer.contains(key)) return;
    const json& history = start.trainer[key];
    const size_t expected = scale_count(m) * FP8_HISTORY;
    auto is_maximum = [](const json& x) { return x.is_number() && x >= 0 && x <= double{FLT_MAX}; };
    if (!history.is_array() || history.size() != expected || !std::all_of(history.begin(), history.end(), is_maximum))
        throw UserError("%s/trainer.json: \"%s\" is no list of %zu numbers from 0 on, as %d layers have",
                        start.dir.c_str(), key, expected, m.config.layers);
    set_fp8_history(m, history.get<std::vector<float>>());
}

void load_start(Model& m, const Start& start, uint64_t seed) {
    if (start.dir.empty()) return init_parameters(m, seed);
    read_weights(m, start.dir);
    if (start.trainer.is_null()) return;
    read_moments(m, start.dir);
    if (has_fp8(m)) read_fp8_history(m, start);
}

// Goes on from a checkpoint where that has a scale that was not fixed.
LossScale start_loss_scale(const Options& o, const Start& start) {
    const bool by_precision = o.loss_scaling == SCALE_BY_PRECISION;
    const double wanted = !by_precision ? o.loss_scaling : FLOATX == DType::FP16 ? DYNAMIC_SCALE : NO_SCALE;
    const bool dynamic = wanted == DYNAMIC_SCALE;
    LossScale s = {dynamic ? FIRST_LOSS_SCALE : float(wanted), 0, 0, 0, dynamic ? GROWTH_INTERVAL : 0};
    if (!start.trainer.contains("loss_scaling")) return s;
    const std::string path = start.dir + "/trainer.json";
    const json& then = start.trainer["loss_scaling"];
    auto number = [&](const char* key, long least, long most) {
        const long value = whole_number<long>(then, key, path);
        if (value >= least && value <= most) return float(value);
        throw UserError("%s: \"%s\" is %ld, expected %ld to %ld", path.c_str(), key, value, least, most);
    };
    s.skipped = number("skipped_steps", 0, start.step);
    if (!dynamic) return s;
    s.scale = number("scale", 1, MOST_LOSS_SCALE);
    s.good_steps = number("good_steps", 0, GROWTH_INTERVAL - 1);
    return s;
}

json loss_scale_record(const LossScale& s) {
    return {{"scale", long(s.scale)}, {"good_steps", long(s.good_steps)}, {"skipped_steps", long(s.skipped)}};
}

// A model's tensors in files. Included by train_gpt.cu; gpt/checkpoint.h has what does not need the model.
//
// out/step_001000/ is a Hugging Face folder: config.json, model.safetensors and the tokenizer's files. In addition it
// has optimizer.state (m/NAME, v/NAME) and trainer.json, from which training resumes with the same bits. A
// checkpoint is written under another name, flushed to disk and renamed, so a crash leaves the last good one.
#pragma once

// Calls visit(row, l, name) for every parameter tensor, in the table's order. prefix "v/": only for those with a v.
template <typename Visit> void for_each_parameter(const Setup& s, Visit visit, const std::string& prefix = "") {
    for (const ParameterRow& row : parameter_table(s))
        for (size_t l = 0; l < row.copies && (prefix != "v/" || !on_muon(s, row)); l++)
            visit(row, l, row.name_of_layer(l));
}

// Reads this rank's part of a block of parameters, and only its bytes, from files in which names have `prefix`. T is
// float or floatX.
template <typename T, typename Files>
void read_block(T* block, Placement placement, const Files& files, const Model& m, const std::string& prefix) {
    const Layout y = prefix == "v/" ? layout_of_v(m.setup) : m.layout;
    for_each_parameter(m.setup, [&](const ParameterRow& row, size_t l, const std::string& name) {
        const Shard shard = shard_of(y, row, l, placement, y.rank);
        std::vector<float> values;
        row.part.for_each_run(shard.first, shard.count, [&](size_t i, size_t n) {
            const std::vector<float> run = files.floats(prefix + name, row.shape, row.part.whole(i), n);
            values.insert(values.end(), run.begin(), run.end());
        });
        const auto negative = std::find_if(values.begin(), values.end(), [](float v) { return v < 0; });
        if (prefix == "v/" && negative != values.end())
            files.fail(format("tensor v/%s holds %g, expected a mean of squares", name.c_str(), *negative));
        std::vector<T> mine(shard.count, T(0.0f));   // zeros are the padding
        std::copy(values.begin(), values.end(), mine.begin());
        upload(block + shard.at, mine.data(), mine.size() * sizeof(T));
    }, prefix);
}

void read_weights(Model& m, const std::string& dir) {
    std::set<std::string> names;
    for_each_parameter(m.setup, [&](const ParameterRow&, size_t, const std::string& name) { names.insert(name); });
    const WeightFiles files(dir, names, m.config.layers);
    // There are no master weights in eval and sample, and with --master-weights none.
    if (!m.master) return read_block(m.weights, weights_placement(m.setup), files, m, "");
    read_block(m.master, master_placement(m.setup), files, m, "");
    master_changed(m);
}

void read_moments(Model& m, const std::string& dir) {
    // Programs that read all *.safetensors of a folder as weights made the older name unsuitable.
    const std::string older = dir + "/optimizer.safetensors";
    const Safetensors file(exists(older) ? older : dir + "/" + OPTIMIZER_FILE);
    read_block(m.adam_m, states_placement(m.setup), file, m, "m/");
    read_block(m.adam_v, states_placement(m.setup), file, m, "v/");
}

// values (on rank 0) = a whole tensor of `block` in FP32, or of the weights if block is null.
void download_tensor(float* values, const Model& m, const float* block, Placement placement, const ParameterRow& row,
                     size_t l) {
    const Layout y = block == m.adam_v ? layout_of_v(m.setup) : m.layout;
    if (m.setup.zero > 0 || row.part.ranks > 1) return gather_tensor(values, m, y, block, placement, row, l);
    if (!block) {
        std::vector<floatX> exact(row.elements);
        download(exact.data(), m.weights + m.layout.place(row, l), row.elements * sizeof(floatX));
        std::copy(exact.begin(), exact.end(), values);
    } else if (world.first()) {
        download(values, block + y.place(row, l), row.elements * sizeof(float));
    }
}

constexpr const char* WRITING = "rank 0's checkpoint";   // for the watchdog
struct NamedBlock { std::string prefix; const float* data; Placement placement; };

// Writes a safetensors file of all blocks. All ranks call it; rank 0 writes, in chunks. All ranks synchronise after
// each chunk, so a slow disk counts as progress, and the watchdogs end the run only if rank 0 hangs.
void write_blocks(const std::string& path, const Model& m, const std::vector<NamedBlock>& blocks) {
    constexpr size_t CHUNK = SYNC_BYTES / sizeof(float);
    wait_for_all(WRITING);
    std::unique_ptr<SafetensorsWriter> file;
    if (world.first()) file = std::make_unique<SafetensorsWriter>(path);
    for (const NamedBlock& block : blocks)
        for_each_parameter(m.setup, [&](const ParameterRow& row, size_t, const std::string& name) {
            if (file) file->declare(block.prefix + name, row.shape);
        }, block.prefix);
    if (file) file->write_header();
    std::vector<float> values;
    for (const NamedBlock& block : blocks)
        for_each_parameter(m.setup, [&](const ParameterRow& row, size_t l, const std::string& name) {
            values.resize(row.elements * row.part.ranks);
            download_tensor(values.data(), m, block.data, block.placement, row, l);
            for (size_t i = 0; file && i < row.file_elements(); i++)
                if (!std::isfinite(values[i]))
                    throw Failure("%s%s: expected finite numbers, found %f at element %zu", block.prefix.c_str(),
                                  name.c_str(), values[i], i);
            for (size_t done = 0; done < row.file_elements(); done += CHUNK) {
                const size_t count = std::min(CHUNK, row.file_elements() - done);
                progress(WRITING);
                if (file) file->write(values.data() + done, count * sizeof(float));
                wait_for_all(WRITING);
            }
        }, block.prefix);
    if (file) file->finish();
    wait_for_all(WRITING);
}

// Writes the Hugging Face part of a checkpoint.
void write_model(const std::string& dir, const Model& m, const TextFiles& text_files) {
    for (const auto& [name, content] : text_files) {
        if (!world.first()) break;
        const std::string path = dir + "/" + name, folder = fs::path(path).parent_path();
        std::error_code error;
        fs::create_directory(folder, error);   // not its parents: it is an error if --out was removed
        if (error) throw Failure("%s: cannot be created: %s", folder.c_str(), error.message().c_str());
        write_file(path, content);
        if (folder != dir) sync_folder(folder);
    }
    write_blocks(dir + "/model.safetensors", m, {{"", m.master, master_placement(m.setup)}});
}

// Writes out/step_N, then removes all but the last `keep` checkpoints (0: keeps all). Returns the new one's path.
std::string write_checkpoint(const std::string& out, const Model& m, const TextFiles& text_files, long step,
                             json trainer, int keep) {
    const std::string name = checkpoint_name(step);
    const std::string target = out + "/" + name, unfinished = out + "/" + UNFINISHED + name;
    trainer["step"] = step;
    const std::vector<NamedBlock> moments = {{"m/", m.adam_m, states_placement(m.setup)},
                                             {"v/", m.adam_v, states_placement(m.setup)}};
    if (!world.first()) {   // takes part in gathering the tensors
        write_model(unfinished, m, text_files);
        write_blocks(unfinished, m, moments);
        return target;
    }
    try {
        remove_folder(unfinished);
        write_model(unfinished, m, text_files);
        write_blocks(unfinished + "/" + OPTIMIZER_FILE, m, moments);
        write_json(unfinished + "/trainer.json", trainer);
        sync_folder(unfinished);
        rename_folder(unfinished, target);
        remove_folder(unfinished);   // the same step, written before
    } catch (const std::exception& error) {
        std::error_code ignored;
        fs::remove_all(unfinished, ignored);
        throw not_written(step, error);
    }
    auto all = list_checkpoints(out);
    while (keep > 0 && all.size() > static_cast<size_t>(keep)) {
        remove_checkpoint(out, all.begin()->first);
        all.erase(all.begin());
    }
    return target;
}

// Returns where training starts. Rank 0 reads and locks the run's folder, and sends the result to all ranks.
Start find_start(const Options& o) {
    Start start = {o.from, nullptr};
    if (world.first()) start = find_start_in_folder(o);
    const std::string record = from_first(json_text({{"at", {start.trainer, start.step, start.window}}}));
    const json same = parse_json(record, "start")["at"];
    start.trainer = same[0];
    start.step = same[1];
    start.window = same[2];
    if (!start.trainer.is_null()) start.dir = o.out + "/" + checkpoint_name(start.step);
    return start;
}

// Reads the amax history of delayed scaling. A checkpoint without one, such as from BF16 training, changes nothing.
void read_fp8_history(Model& m, const Start& start) {
    const char* key = "fp8_history";
    if (m.setup.fp8_scaling != Fp8Scaling::DELAYED || !start.trainer.contains(key)) return;
    const json& history = start.trainer[key];
    const size_t expected = scale_count(m) * FP8_HISTORY;
    auto is_amax = [](const json& x) { return x.is_number() && x >= 0 && x <= double{FLT_MAX}; };
    if (!history.is_array() || history.size() != expected || !std::all_of(history.begin(), history.end(), is_amax))
        throw UserError("%s/trainer.json: \"%s\": expected a list of %zu numbers from 0 on, for %d layers",
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

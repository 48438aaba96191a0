#include "checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

// ---- safetensors --------------------------------------------------------------------------------

std::string shape_text(const std::vector<size_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); i++) text += format(i ? ", %zu" : "%zu", shape[i]);
    return text + ")";
}

static float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                            : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

using Header = nlohmann::json;   // fast lookup among many names

Safetensors::Safetensors(const std::string& path) : file_(path) {
    uint64_t length = 0;
    if (file_.size() >= sizeof(length)) memcpy(&length, file_.data(), sizeof(length));
    if (length == 0 || length > std::min(file_.size() - sizeof(length), MAX_JSON_BYTES))
        fail(format("a header of %zu bytes in a file of %zu, expected at most %zu: truncated, or not safetensors",
                    size_t(length), file_.size(), MAX_JSON_BYTES));
    const char* data = file_.data() + sizeof(length) + length;
    const size_t bytes = file_.size() - sizeof(length) - length;
    try {
        const Header header = parse_json<Header>({file_.data() + sizeof(length), length}, path + ": damaged header");
        for (const auto& [name, value] : header.items()) {
            if (name == "__metadata__") metadata_ = json(value);
            else entries_[name] = parse_entry(name, value, data, bytes);
        }
    } catch (const Header::exception& error) {
        fail(format("damaged header: %s", error.what()));
    }
    size_t sum = 0;
    for (const auto& [name, entry] : entries_) sum += entry.bytes;
    if (sum != bytes) fail(format("the tensors have %zu bytes together, but the file has %zu for them", sum, bytes));
}

std::vector<float> Safetensors::floats(const std::string& name, const std::vector<size_t>& shape, size_t first,
                                       size_t count) const {
    const Entry& entry = at(name);
    if (entry.shape != shape)
        fail(format("tensor %s has shape %s, expected %s", name.c_str(), shape_text(entry.shape).c_str(),
                    shape_text(shape).c_str()));
    const size_t begin = std::min(first, entry.elements);
    std::vector<float> values(std::min(count, entry.elements - begin));
    const size_t size = entry.bytes / std::max<size_t>(1, entry.elements);   // bytes of an element
    const char* data = entry.data + begin * size;
    bytes_read += values.size() * size;
    const bool is_half = entry.dtype == "F16", is_bf16 = entry.dtype == "BF16";
    if (entry.dtype != "F32" && !is_half && !is_bf16)
        fail(format("tensor %s has dtype %s, expected F32, F16 or BF16", name.c_str(), entry.dtype.c_str()));
    if (entry.dtype == "F32" && !values.empty()) memcpy(values.data(), data, values.size() * sizeof(float));
    for (size_t i = 0; (is_half || is_bf16) && i < values.size(); i++) {
        uint16_t bits;   // may be unaligned
        memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
        const uint32_t bf16 = static_cast<uint32_t>(bits) << 16;
        if (is_half) values[i] = half_to_float(bits);
        else memcpy(&values[i], &bf16, sizeof(bf16));
    }
    file_.require_whole();
    for (size_t i = 0; i < values.size(); i++)
        if (!std::isfinite(values[i]))
            fail(format("tensor %s holds %f at element %zu", name.c_str(), values[i], begin + i));
    return values;
}

Safetensors::Entry Safetensors::parse_entry(const std::string& name, const Header& value, const char* data,
                                            size_t bytes) const {
    static const std::map<std::string, size_t> SIZES = {
        {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},     {"I8", 1},
        {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    auto parse_size = [&](const Header& number) -> size_t {   // nlohmann::json would also convert other values
        if (!number.is_number_unsigned())
            fail(format("damaged header: tensor %s: expected a size, found %s", name.c_str(),
                        number.dump().substr(0, 40).c_str()));
        return number;
    };
    Entry entry = {value.at("dtype").get<std::string>(), {}, nullptr, 1, 0};
    const Header &shape = value.at("shape"), &offsets = value.at("data_offsets");
    if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2)
        fail(format("damaged header: tensor %s: expected a list of sizes and two offsets", name.c_str()));
    for (const Header& extent : shape) entry.shape.push_back(parse_size(extent));
    const auto size = SIZES.find(entry.dtype);
    if (size == SIZES.end()) fail(format("tensor %s has unknown dtype %s", name.c_str(), entry.dtype.c_str()));
    const size_t begin = parse_size(offsets[0]), end = parse_size(offsets[1]);
    if (begin > end || end > bytes)
        fail(format("tensor %s lies at bytes %zu to %zu of %zu: the file is truncated", name.c_str(), begin, end,
                    bytes));
    entry.bytes = size->second;
    for (size_t extent : entry.shape)
        if (__builtin_mul_overflow(entry.elements, extent, &entry.elements) ||
            __builtin_mul_overflow(entry.elements, size->second, &entry.bytes))
            fail(format("tensor %s of shape %s: the size overflows 64 bits", name.c_str(),
                        shape_text(entry.shape).c_str()));
    if (end - begin != entry.bytes)
        fail(format("tensor %s of shape %s has %zu bytes, expected %zu", name.c_str(),
                    shape_text(entry.shape).c_str(), end - begin, entry.bytes));
    entry.data = data + begin;
    return entry;
}

void SafetensorsWriter::declare(const std::string& name, const std::vector<size_t>& shape) {
    size_t bytes = sizeof(float);
    for (size_t extent : shape) bytes *= extent;
    header_[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {end_, end_ + bytes}}};
    end_ += bytes;
}

void SafetensorsWriter::write_header() {
    std::string text = header_.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');   // tensors begin at a multiple of 8
    const uint64_t length = text.size();
    write(&length, sizeof(length));
    write(text.data(), text.size());
}

// ---- weights ------------------------------------------------------------------------------------

static std::string last_part(const std::string& path) { return fs::path(path).filename(); }

// Returns whether a name is `last`, with or without a prefix that ends with a dot.
static bool is_called(const std::string& name, const std::string& last) {
    return name == last || ends_with(name, "." + last);
}

// Throws a UserError if a file of the model does not exist because the folder holds a model in another format.
static void require_format(const std::string& path) {
    const std::string dir = fs::path(path).parent_path();
    for (const std::string& other : exists(path) ? std::vector<std::string>() : paths_in(dir)) {
        const std::string name = last_part(other), file = last_part(path);
        if (begins_with(name, "adapter_"))
            throw UserError("%s: holds %s of a PEFT adapter, expected %s of a whole model, which peft's "
                            "merge_and_unload().save_pretrained(DIR) writes", dir.c_str(), name.c_str(), file.c_str());
        if (begins_with(name, "pytorch_model"))   // pickled Python objects
            throw UserError("%s: holds %s, expected %s, which transformers' save_pretrained(DIR, "
                            "safe_serialization=True) writes", dir.c_str(), name.c_str(), file.c_str());
    }
}

WeightFiles::WeightFiles(const std::string& dir, std::set<std::string> names, int layers) {
    for (int l = 0; l < layers; l++)
        for (const char* mask : {"bias", "masked_bias"}) names.insert(format("h.%d.attn.%s", l, mask));
    const std::string whole = dir + "/model.safetensors", index = whole + ".index.json";
    if (exists(whole) || !exists(index)) {
        path_ = whole;
        require_format(whole);
        for (const auto& [name, entry] : open_shard(whole).entries()) tensors_[name] = &files_.at(whole);
    } else {
        path_ = index;
        read_index(dir);
    }
    const std::string wte = "wte.weight";
    const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](auto& t) { return is_called(t.first, wte); });
    if (found == tensors_.end()) fail(format("tensor %s is missing", wte.c_str()));
    const auto& [embedding, owner] = *found;
    prefix_ = embedding.substr(0, embedding.size() - wte.size());
    for (const auto& [name, file] : tensors_) {
        if (is_called(name, "lm_head.weight")) {
            const std::vector<size_t>& shape = owner->at(embedding).shape;
            if (file->floats(name, shape) != owner->floats(embedding, shape))
                file->fail(format("tensor %s differs from %s; expected a tied head, equal to the embedding",
                                  name.c_str(), embedding.c_str()));
        } else if (!begins_with(name, prefix_) || !names.count(name.substr(prefix_.size()))) {
            file->fail(format("tensor %s does not belong to a GPT-2 of %d layers", name.c_str(), layers));
        }
    }
}

void WeightFiles::read_index(const std::string& dir) {
    const Header index = read_json<Header>(path_);
    if (!index.contains("weight_map") || !index["weight_map"].is_object())
        fail("expected a \"weight_map\" of tensors and files, found none");
    for (const auto& [name, place] : index["weight_map"].items()) {
        const std::string file = place.is_string() ? place.get<std::string>() : "";
        if (file.empty() || file.find('/') != file.npos)
            fail(format("tensor %s is in %s, expected the name of a file in the same folder", name.c_str(),
                        place.dump().c_str()));
        const Safetensors& shard = open_shard(dir + "/" + file);
        shard.at(name);
        tensors_[name] = &shard;
    }
    for (const auto& [path, shard] : files_)
        for (const auto& [name, entry] : shard.entries())
            if (!tensors_.count(name)) shard.fail(format("tensor %s is not in %s", name.c_str(), path_.c_str()));
}

// ---- config.json --------------------------------------------------------------------------------

json config_json(const std::string& dir, const Config& c, float init_std, int end_of_text) {
    if (dir.empty())
        return {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}, {"n_layer", c.layers},
                {"n_head", c.heads}, {"n_embd", c.channels}, {"n_positions", c.context}, {"n_ctx", c.context},
                {"n_inner", nullptr}, {"vocab_size", c.vocab}, {"activation_function", "gelu_new"},
                {"layer_norm_epsilon", 1e-5}, {"initializer_range", init_std}, {"attn_pdrop", 0.0},
                {"embd_pdrop", 0.0}, {"resid_pdrop", 0.0}, {"scale_attn_weights", true},
                {"tie_word_embeddings", true}, {"torch_dtype", "float32"}, {"use_cache", true},
                {"bos_token_id", end_of_text}, {"eos_token_id", end_of_text}};
    json config = read_json(dir + "/config.json");
    for (const char* key : {"torch_dtype", "dtype"})   // of transformers before and after 4.56
        if (config.contains(key)) config[key] = "float32";
    return config;
}

int bos_token(const std::string& dir, int V) {
    const json bos = read_json(dir + "/config.json").value("bos_token_id", json());
    return bos.is_number_unsigned() && bos < V ? bos.get<int>() : -1;
}

void require_supported(const Config& c, const std::string& source) {
    auto within = [](int value, int most) { return value >= 1 && value <= most; };
    if (!within(c.layers, MAX_LAYERS) || !within(c.channels, MAX_CHANNELS) || !within(c.heads, MAX_CHANNELS) ||
        !within(c.context, MAX_TOKENS) || !within(c.vocab, MAX_TOKENS))
        throw UserError("%s: %d layers, %d heads, %d channels, context %d, vocabulary %d: each must be at least 1, "
                        "at most %d layers, %d channels, %d positions and tokens", source.c_str(), c.layers, c.heads,
                        c.channels, c.context, c.vocab, MAX_LAYERS, MAX_CHANNELS, MAX_TOKENS);
    if (c.channels % c.heads != 0 || c.head_size() % 16 != 0 || c.head_size() > 128)
        throw UserError("%s: %d channels over %d heads: the head size must be 16, 32, ... 128", source.c_str(),
                        c.channels, c.heads);
}

Config read_config(const std::string& path) {
    require_format(path);
    const json file = read_json(path);
    require_value(file, "/model_type", {"gpt2"}, path);   // first: other models have other names for their sizes
    const char* context = file.contains("n_positions") ? "n_positions" : "n_ctx";
    auto size = [&](const char* key) { return whole_number<int>(file, key, path); };
    const Config c = {size("n_layer"), size("n_head"), size("n_embd"), size(context), size("vocab_size")};
    const std::pair<const char*, std::vector<json>> ACCEPTED[] = {
        {"/activation_function", {nullptr, "gelu_new", "gelu_pytorch_tanh"}}, {"/layer_norm_epsilon", {nullptr, 1e-5}},
        {"/scale_attn_weights", {nullptr, true}}, {"/scale_attn_by_inverse_layer_idx", {nullptr, false}},
        {"/tie_word_embeddings", {nullptr, true}}, {"/n_inner", {nullptr, 4 * c.channels}}};
    for (const auto& [key, values] : ACCEPTED) require_value(file, key, values, path);
    require_supported(c, path);
    return c;
}

// ---- run folder ---------------------------------------------------------------------------------

// Returns the step of a name prefix + checkpoint_name(step); -1 for other names.
static long step_in(const std::string& name, const std::string& prefix) {
    long step = -1;
    const std::string begin = prefix + "step_";
    if (begins_with(name, begin)) parse_number(name.substr(begin.size()), step);
    return step >= 0 && name == prefix + checkpoint_name(step) ? step : -1;
}

std::map<long, std::string> list_checkpoints(const std::string& out) {
    std::map<long, std::string> found;
    for (const std::string& path : paths_in(out))
        if (const long step = step_in(last_part(path), ""); step >= 0) found[step] = path;
    return found;
}

// Returns the newest model or run in a folder; "" if there is none.
static std::string newest_model(const std::string& folder) {
    std::map<fs::file_time_type, std::string> by_time;
    std::error_code ignored;
    for (const std::string& path : paths_in(folder))
        if (exists(path + "/config.json") || !list_checkpoints(path).empty())
            by_time[fs::last_write_time(path, ignored)] = path;
    return by_time.empty() ? "" : by_time.rbegin()->second;
}

std::string model_folder(const std::string& from) {
    if (from.empty() || exists(from + "/config.json")) return from;
    const auto checkpoints = list_checkpoints(from);
    if (!checkpoints.empty()) return checkpoints.rbegin()->second;
    if (const std::string newest = newest_model(from); !newest.empty())
        throw UserError("--from %s: neither a model nor a run, but holds some; the newest: --from %s", from.c_str(),
                        shell_word(newest).c_str());
    const std::string name = last_part(from);
    for (const char* released : {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"})
        if (name == released && !exists(from))
            throw UserError("--from %s: no such folder; scripts/download.sh %s downloads it, then use --from models/%s",
                            from.c_str(), released, released);
    if (!exists(from)) throw UserError("--from %s: no such folder", from.c_str());
    return from;
}

void remove_folder(const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) throw Failure("%s: cannot be removed: %s", path.c_str(), error.message().c_str());
}

void rename_folder(const std::string& from, const std::string& to) {
    const int status = exists(to) ? renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE)
                                  : rename(from.c_str(), to.c_str());
    if (status != 0)
        throw Failure("%s: cannot be renamed to %s: %s", from.c_str(), to.c_str(), strerror(errno));
    sync_folder(fs::path(to).parent_path());
}

void remove_checkpoint(const std::string& out, long step) {
    const std::string name = checkpoint_name(step), removed = out + "/" + UNFINISHED + "old_" + name;
    remove_folder(removed);
    rename_folder(out + "/" + name, removed);   // a crash during the removal leaves no incomplete step_N
    remove_folder(removed);
}

void remove_unfinished(const std::string& out) {
    for (const std::string& path : paths_in(out))
        for (const std::string& prefix : {std::string(UNFINISHED), UNFINISHED + std::string("old_")})
            if (step_in(last_part(path), prefix) >= 0) remove_folder(path);
}

// ---- options of a run ---------------------------------------------------------------------------

// Flags of a single invocation: --resume does not restore their values.
static const std::set<std::string> PER_INVOCATION = {"--resume", "--out", "--trace", "--gpus", "--timeout",
                                                     "--tensor-parallel", "--verbose"};

void restore_options(Options& o) {
    // The options with which the run was started or last resumed: in its last checkpoint or, without one, in its log.
    const auto checkpoints = list_checkpoints(o.out);
    std::string path = o.out + "/log.jsonl";
    json record;
    if (!checkpoints.empty()) {
        path = checkpoints.rbegin()->second + "/trainer.json";
        record = read_json(path);
    } else if (exists(path)) {
        const std::string log = read_file(path), source = path + ": line 1, which holds the run's options";
        record = parse_json(log.substr(0, log.find('\n')), source).value("run", json());
    }
    const bool has_options = record.contains("options") && record["options"].is_object();
    const json recorded = has_options ? record["options"] : json::object();
    if (recorded.empty() && checkpoints.empty()) return;   // the run was killed before it wrote its log
    if (o.given.count("--from") && o.resume != AUTO && recorded.value("from", json()) != json(o.from))
        throw UserError("--resume continues from the last checkpoint in %s, --from %s starts a new run; expected only "
                        "one of these options", o.out.c_str(), o.from.c_str());
    const bool new_budget = std::any_of(BUDGETS.begin(), BUDGETS.end(),
                                        [&](const std::string& flag) { return o.given.count(flag) > 0; });
    for (const Flag& flag : flag_table(o)) {
        const json value = recorded.value(flag.name + 2, json());
        if (BUDGETS.count(flag.name) && new_budget) continue;   // another budget replaces the recorded one
        if (!(flag.subcommands & TRAIN) || o.given.count(flag.name) || PER_INVOCATION.count(flag.name)) continue;
        if (value.is_null() || value == "") continue;   // keeps the default
        if (!flag.parse(value.is_string() ? value.get<std::string>() : value.dump()))
            throw UserError("%s: \"%s\" is %s, expected %s", path.c_str(), flag.name + 2, value.dump().c_str(),
                            flag.values.c_str());
    }
}

void print_changes(const Options& o, const json& trainer, const std::string& dir, size_t tokens) {
    if (trainer.is_null()) return;
    const json then = trainer.value("options", json::object()), now = describe(o, TRAIN);
    if (!then.is_object()) return;
    const json optimizer = then.value("optimizer", json("adamw"));
    if (optimizer != now["optimizer"])
        throw UserError("--optimizer %s: differs from the optimizer of the moments in %s, %s",
                        o.optimizer == Optimizer::MUON ? "muon" : "adamw", dir.c_str(), json_text(optimizer).c_str());
    for (const auto& [name, value] : then.items())
        if (!now.contains(name))
            printf("resume     --%s was %s, is not an option any more\n", one_line(name).c_str(),
                   json_text(value).c_str());
        else if (!PER_INVOCATION.count("--" + name) && now[name] != value)
            printf("resume     --%s was %s, is now %s\n", name.c_str(), json_text(value).c_str(),
                   json_text(now[name]).c_str());
    if (!trainer.contains("train_tokens")) return;
    const size_t before = whole_number<size_t>(trainer, "train_tokens", dir + "/trainer.json");
    if (before != tokens)
        printf("resume     there were %zu tokens to train on, now there are %zu\n", before, tokens);
}

std::string resume_hint(const std::string& out, const std::string& message) {
    const auto checkpoints = list_checkpoints(out);
    const bool newest = !checkpoints.empty() && begins_with(message, checkpoints.rbegin()->second);
    if (!newest || checkpoints.size() == 1) return newest ? "; there is no checkpoint before it" : "";
    return "; to resume from the checkpoint before it, rename this one's folder";
}

// ---- start of a run -----------------------------------------------------------------------------

// Creates the folder --out, and locks it until the process ends or crashes; the lock has no effect on a file system
// without locks. Throws UserError if the folder is not readable and writable, if another run has locked it, or if there
// is no run to resume.
static Descriptor open_run_folder(const std::string& out, bool resume) {
    std::error_code error;
    if (exists(out) && !fs::is_directory(out, error))
        throw UserError("--out %s: is a file, expected a folder", out.c_str());
    if (resume && !exists(out)) throw UserError("--resume: no run in %s, no such folder", out.c_str());
    error = create_folder(out);
    if (!error && access(out.c_str(), R_OK | W_OK | X_OK) != 0) error = {errno, std::generic_category()};
    if (error)
        throw UserError("--out %s: cannot be read and written: %s", out.c_str(), error.message().c_str());
    Descriptor folder(open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw UserError("--out %s: another run is writing there", out.c_str());
    return folder;
}

Start find_start_in_folder(const Options& o) {
    Start start = {o.from, nullptr};
    if (o.out.empty()) {
        if (o.resume) throw UserError("--resume needs --out DIR, the folder of the run to resume");
        return start;
    }
    const bool is_new = !exists(o.out);
    start.lock = {new Descriptor(open_run_folder(o.out, o.resume)), [is_new, out = o.out](Descriptor* lock) {
        if (is_new) rmdir(out.c_str());   // succeeds only if it is empty, after an error before the run's first record
        delete lock;
    }};
    const auto checkpoints = list_checkpoints(o.out);
    if (!o.resume && holds_run(o.out))
        throw UserError("--out %s already holds a run; add --resume to continue it, or choose another folder",
                        o.out.c_str());
    if (!o.resume) return start;
    if (checkpoints.empty()) {   // start.dir is the run's --from
        if (!holds_run(o.out)) throw UserError("--resume: no run in %s", o.out.c_str());
        printf("resume     %s has no checkpoint yet: the run restarts%s%s\n", o.out.c_str(),
               start.dir.empty() ? "" : " from ", start.dir.c_str());
        return start;
    }
    const auto& [step, dir] = *checkpoints.rbegin();
    const std::string path = dir + "/trainer.json";
    start.dir = dir;
    start.trainer = read_json(path);
    start.step = whole_number<long>(start.trainer, "step", path);
    start.window = whole_number<uint64_t>(start.trainer, "next_window", path);
    if (start.step != step)
        throw UserError("%s: \"step\" is %ld, expected %ld as in the folder's name", path.c_str(), start.step, step);
    return start;
}

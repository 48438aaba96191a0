// Fuzzes every parser of files and of the command line with libFuzzer: `make fuzz`.
// https://llvm.org/docs/LibFuzzer.html
//
// A target calls one parser with the fuzzer's bytes. The parser may succeed, or throw a UserError or a Failure that
// names the file. Anything else is a defect: another exception, a signal, a sanitizer report, a timeout.
// FUZZ_TARGET selects the target. FUZZ_SEEDS=DIR writes the seed inputs, valid files of this program, and exits.

#define TESTING
#include "../../train_gpt.cu"

#include "../tests/testing.h"

namespace {

// The smallest model.
const Config SMALL = {1, 1, 16, 8, 16};
const Setup SMALL_SETUP = {SMALL, 1, 8, Recompute::NONE, DType::FP32, Purpose::TRAINING};

const std::string folder = scratch("@");   // this process's files

std::string file_of(const std::string& name) { return folder + "/" + name; }

// Returns a safetensors file. Bytes that begin with { are its JSON header: the header's length and data are added,
// because otherwise nearly every mutation would be rejected for its length.
std::string as_safetensors(const std::string& bytes, size_t data_bytes) {
    if (bytes.empty() || bytes[0] != '{') return bytes;
    const uint64_t length = bytes.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + bytes + std::string(data_bytes, '\0');
}
std::string header_of(const std::string& safetensors) {
    uint64_t length;
    memcpy(&length, safetensors.data(), sizeof(length));
    return safetensors.substr(sizeof(length), length);
}

// A finished run of one step, created once: the folder out/ with one checkpoint.
const std::string OUT = "out", CHECKPOINT = OUT + "/step_000001";

std::vector<std::string> run_arguments(long steps) {
    return {"--data", file_of("data.txt"), "--layers", "1", "--heads", "1", "--channels", "16", "--context", "8",
            "--micro-batch", "1", "--steps", std::to_string(steps), "--eval-every", "0", "--matmul-tuning", "off",
            "--out", file_of(OUT)};
}

// Trains as train() does, without measuring the machine's peak FLOP/s.
void run_train(const std::vector<std::string>& arguments) {
    Options o = parse_options(TRAIN, "train", arguments);
    if (o.resume) restore_options(o);
    TrainData data = open_data(o);
    const Start start = find_start(o);
    const Config config = start.dir.empty() ? config_from_options(o, BYTE_VOCAB) : config_of_folder(o, start.dir);
    divide_data(data, o, start.dir, config);
    print_changes(o, start.trainer, start.dir, data.train.count());
    const Setup setup = make_setup(o, config, Purpose::TRAINING, memory_now());
    TrainingRun run(o, data, start);
    load_run(run, setup);
    train_loop(run);
}

void make_run() {
    write_bytes(file_of("data.txt"), "A text that is long enough for a few windows of eight.");
    run_train(run_arguments(1));
}

// ---- targets ------------------------------------------------------------------------------------

void config(const std::string& bytes) {
    write_bytes(file_of("config.json"), bytes);
    read_config(file_of("config.json"));
}

Model& small_model() {
    static Model m;
    if (!m.weights) allocate(m, SMALL_SETUP);
    return m;
}

void weights(const std::string& bytes) {
    const size_t data = count_parameters(SMALL).real * sizeof(float);
    write_bytes(file_of("model.safetensors"), as_safetensors(bytes, data));
    read_weights(small_model(), folder);
}

void moments(const std::string& bytes) {
    const size_t data = 2 * count_parameters(SMALL).real * sizeof(float);
    write_bytes(file_of("optimizer.state"), as_safetensors(bytes, data));
    read_moments(small_model(), folder);
}

// model.safetensors.index.json for a run's weights in one shard.
void index(const std::string& bytes) {
    const std::string dir = file_of("sharded");
    if (fs::create_directory(dir)) {
        make_run();
        fs::copy_file(file_of(CHECKPOINT + "/model.safetensors"), dir + "/shard.safetensors");
        fs::copy_file(file_of(CHECKPOINT + "/config.json"), dir + "/config.json");
    }
    write_bytes(dir + "/model.safetensors.index.json", bytes);
    static Model m;
    if (!m.weights)
        allocate(m, {read_config(dir + "/config.json"), 1, 8, Recompute::NONE, DType::FP32, Purpose::TRAINING});
    read_weights(m, dir);
}

void shard(const std::string& bytes) {
    write_bytes(file_of("shard.bin"), bytes);
    Tokens tokens(file_of("shard.bin"));
    const Tokens tail = tokens.split_tail(0.3);
    std::vector<int> inputs(4), targets(4);
    for (const Tokens* some : {static_cast<const Tokens*>(&tokens), &tail})
        for (Windows kind : {Windows::ANYWHERE, Windows::WHOLE, Windows::COVERING})
            for (size_t w = 0; w < some->windows(kind, 4); w++)
                some->read(inputs.data(), targets.data(), kind, w, 4, 300);
}

void tuning(const std::string& bytes) {
    write_bytes(file_of("matmul.json"), bytes);
    std::string problem;
    read_choices(file_of("matmul.json"), problem);
}

void prompt_tokens(const std::string& bytes) {
    Options o;
    o.prompt_tokens = bytes.empty() ? " " : bytes;
    if (o.prompt_tokens != "-") read_prompt(o, Text("", 300), 300);
}

// tokenizer.json and, after a zero byte, tokenizer_config.json.
void tokenizer(const std::string& bytes) {
    const size_t end = bytes.find('\0');
    write_bytes(file_of("tokenizer.json"), bytes.substr(0, end));
    write_bytes(file_of("tokenizer_config.json"), end < bytes.size() ? bytes.substr(end + 1) : "{}");
    const Text text(folder, GPT2_VOCAB);
    for (int token : text.encode("A few words, \xc3\xa9t\xc3\xa9 and \xff.")) text.decode(token);
}

void questions(const std::string& bytes) {
    write_bytes(file_of("questions.bin"), bytes);
    read_questions(file_of("questions.bin"), 211, 32);
}

void log_file(const std::string& bytes) {
    write_bytes(file_of("log.jsonl"), bytes);
    Log log;
    log.open(folder, 3, {{"run", {{"options", json::object()}}}});
    log.write({{"step", 4}});
}

// The command line: words separated by zero bytes.
void flags(const std::string& bytes) {
    std::vector<std::string> words;
    std::istringstream text(bytes);
    for (std::string word; std::getline(text, word, '\0');) words.push_back(word);
    const auto& [name, subcommand] = SUBCOMMANDS[bytes.size() % std::size(SUBCOMMANDS)];
    describe(parse_options(subcommand, name, words), subcommand);
}

// A run that resumes from a checkpoint in which one file, selected by the first byte, is replaced by the other bytes.
const std::string RESUMED[] = {"config.json", "model.safetensors", "optimizer.state", "trainer.json",
                               "tokenizer.json", "../log.jsonl"};

void resume(const std::string& bytes) {
    static const bool created = (make_run(), true);
    static_cast<void>(created);
    if (bytes.empty()) return;
    const std::string path = file_of(CHECKPOINT + "/" + RESUMED[bytes[0] % std::size(RESUMED)]);
    const std::string intact = read_bytes(path);
    write_bytes(path, bytes.substr(1));
    std::vector<std::string> arguments = run_arguments(2);
    arguments.push_back("--resume");
    const auto restore = [&] {
        write_bytes(path, intact);
        fs::remove_all(file_of(OUT + "/step_000002"));
    };
    try {
        run_train(arguments);
    } catch (...) {
        restore();
        throw;
    }
    restore();
}

struct Target {
    const char* name;
    void (*read)(const std::string& bytes);
};

const Target TARGETS[] = {{"config", config}, {"weights", weights}, {"moments", moments}, {"index", index},
                          {"shard", shard}, {"tuning", tuning}, {"prompt-tokens", prompt_tokens},
                          {"tokenizer", tokenizer}, {"questions", questions}, {"log", log_file}, {"flags", flags},
                          {"resume", resume}};

// ---- seeds --------------------------------------------------------------------------------------

void write_seed(const std::string& to, const std::string& target, const std::string& name, const std::string& bytes) {
    fs::create_directories(to + "/" + target);
    write_bytes(to + "/" + target + "/" + name, bytes);
}

void write_seeds(const std::string& to) {
    make_run();
    auto written = [&](const std::string& name) { return read_bytes(file_of(CHECKPOINT + "/" + name)); };
    const std::string model = written("model.safetensors"), optimizer = written("optimizer.state");
    write_seed(to, "config", "written", written("config.json"));
    write_seed(to, "weights", "header", header_of(model));
    write_seed(to, "weights", "whole", model);
    write_seed(to, "moments", "header", header_of(optimizer));
    json places;
    const Safetensors whole(file_of(CHECKPOINT + "/model.safetensors"));
    for (const auto& [name, entry] : whole.entries()) places[name] = "shard.safetensors";
    write_seed(to, "index", "one shard", json{{"weight_map", places}}.dump());
    write_seed(to, "tokenizer", "bytes", written("tokenizer.json"));
    const json added = {{"256", {{"content", "<x>"}, {"special", true}}}};
    const json config = {{"added_tokens_decoder", added}, {"add_prefix_space", true}, {"pad_token", "<pad>"}};
    write_seed(to, "tokenizer", "config", written("tokenizer.json") + '\0' + config.dump());
    write_seed(to, "log", "written", read_bytes(file_of(OUT + "/log.jsonl")));
    for (size_t i = 0; i < std::size(RESUMED); i++)
        write_seed(to, "resume", fs::path(RESUMED[i]).filename(), char(i) + written(RESUMED[i]));
    int header[SHARD_HEADER] = {SHARD_MAGIC, SHARD_VERSION, 20};
    const std::string tokens = "a few tokens, of two bytes each, twenty.";
    write_seed(to, "shard", "small", std::string(reinterpret_cast<char*>(header), sizeof(header)) + tokens);
    const std::vector<std::vector<uint64_t>> choice(1, std::vector<uint64_t>(8));
    const json choices = {{"fp32 1 x 2 x 3 NN into fp32", choice}};
    write_seed(to, "tuning", "small", json{{"format", TUNING_FORMAT}, {"devices", {{"a CPU", choices}}}}.dump());
    write_seed(to, "questions", "reference", read_bytes("data/reference/hellaswag.bin"));
    write_seed(to, "prompt-tokens", "some", "1,2,3 299\n0");
    std::string words;
    for (const std::string& word : run_arguments(3)) words += word + '\0';
    write_seed(to, "flags", "a run", words);
}

const Target* chosen_target() {
    const char* name = getenv("FUZZ_TARGET");
    for (const Target& target : TARGETS)
        if (name && strcmp(name, target.name) == 0) return &target;
    std::string names;
    for (const Target& target : TARGETS) names += std::string(" ") + target.name;
    fprintf(stderr, "fuzz: FUZZ_TARGET: expected one of%s; found '%s'\n", names.c_str(), name ? name : "");
    exit(2);
}

const Target* target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    setenv("XDG_CACHE_HOME", folder.c_str(), 1);
    if (!freopen("/dev/null", "w", stdout)) throw Failure("/dev/null: %s", strerror(errno));
    open_device(TensorCores::AUTO, 1);
    if (const char* seeds = getenv("FUZZ_SEEDS")) {
        write_seeds(seeds);
        exit(0);
    }
    target = chosen_target();
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        target->read({reinterpret_cast<const char*>(data), size});
    } catch (const UserError&) {
    } catch (const Failure&) {
    }
    return 0;
}

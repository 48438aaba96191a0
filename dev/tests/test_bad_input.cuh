// Tests of user errors: wrong flags, data and folders. The program rejects each with exit code 2 and one line that
// names the file or flag, what it found and what it expects. Also tests of --help. Included by test_gpt.cu.
#pragma once

typedef std::vector<std::string> Texts;

// Expects that `command` is rejected with one line that contains every text in `named`.
void reject(const std::string& what, const std::string& command, const Texts& named,
            const std::string& environment = "") {
    const Outcome outcome = run(command, environment);
    const bool one_line = std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1 && outcome.err.back() == '\n';
    std::string missing;
    for (const std::string& text : named)
        if (!contains(outcome.err, scratch(text))) missing += " lacks '" + scratch(text) + "'";
    expect_run(outcome.code == 2 && one_line && outcome.err.rfind("train_gpt: ", 0) == 0 && missing.empty(),
               "rejected: " + what, outcome, missing);
}

const std::string TINY = "train --layers 1 --heads 1 --channels 16 --context 16 --steps 1 --data @/text.txt ";

// Expects that every command line in a group of rejected.txt is rejected.
void reject_group(const std::string& group) {
    bool inside = false;
    size_t count = 0;
    for (const std::string& line : split(read_bytes("dev/tests/rejected.txt"), "\n")) {
        if (line.empty() || line[0] == '#') continue;
        if (line[0] == '[') inside = line == "[" + group + "]";
        if (!inside || line[0] == '[') continue;
        const size_t arrow = line.find(" => "), open = line.find('{'), close = line.find('}', open);
        const std::string command = replaced(line.substr(0, arrow), "$TRAIN ", TINY), texts = line.substr(arrow + 4);
        const std::string choices = open < arrow ? line.substr(open, close + 1 - open) : "{}";
        for (const std::string& choice : split(choices.substr(1, choices.size() - 2), "|")) {
            const std::string chosen = replaced(command, choices, choice);
            reject(chosen, chosen, split(replaced(texts, "{}", choice == "''" ? "" : choice), " ; "));
            count++;
        }
    }
    expect(count > 0, "rejected.txt has a group [" + group + "]");
}

// ==== flags ==================================================================

TEST("flags") {
    Options defaults;
    std::string rejected;
    for (const Flag& flag : flag_table(defaults)) {
        const json value = flag.value();
        if (flag.is_switch || value == "" || value.is_null()) continue;
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        if (!flag.parse(text)) rejected += format(" %s %s", flag.name, text.c_str());
    }
    expect(rejected.empty(), "every flag accepts its own default", rejected);
    const Options o = parse_options(TRAIN, "train", {"--lr=3e-4", "--data=a=b", "--resume", "--out", "--"});
    expect(o.lr == 3e-4 && o.data == "a=b" && o.resume && o.out == "--", "--flag=value equals --flag value");
    for (const auto& [size, bytes] : {std::pair("1.5GB", 1.5e9), {"2MB", 2e6}, {"2GiB", 0x1p31}, {"3MiB", 3 * 0x1p20}})
        expect(parse_options(PLAN, "plan", {"--gpu-memory", size}).gpu_memory == bytes,
               format("%s are %.0f bytes", size, bytes));
    const Outcome most = run(TINY +
                             "--seed 9223372036854775807 --sample-every 1 --sample-tokens 2 --warmup 1000000000000 "
                             "--eval-sequences 9223372036854775807 --eval-every 9223372036854775807 --steps 2");
    const Outcome planned = run("plan --gpu-memory 80GB --total-batch 1000000000000");
    expect_run(most.code == 0 && planned.code == 0 && contains(planned.out, "= 244140625 micro-batches of "),
               "flags accept both ends of their ranges", most, planned.err);
}

TEST("help") {
    Options defaults;
    const std::vector<Flag> flags = flag_table(defaults);
    std::string wide, incomplete, examples;
    json all_defaults = describe(defaults, Subcommand(ALL));
    auto check_width = [&](const std::string& text, size_t width) {
        for (const std::string& line : split(text, "\n"))
            if (line.size() > width) wide += format(" %zu: '%s'", width, line.c_str());
    };
    for (const auto& [name, subcommand] : SUBCOMMANDS) {
        for (size_t width : {60, 80, 130}) check_width(help_text(subcommand, "", width), width);
        for (const Flag& flag : flags) {
            const bool listed = contains(help_text(ALL, name, 80), format("\n  %s ", flag.name));
            if (listed != (subcommand == TRAIN || flag.subcommands & subcommand))
                incomplete += format(" %s %s", name, flag.name);
        }
    }
    for (const Flag& flag : flags) {
        const std::string help = help_text(ALL, flag.name + 2, 80), command = example_command(flag);
        check_width(help, 80);
        if (!contains(replaced(help, " \\\n             ", ""), "example:  " + command + "\n"))
            examples += " " + command;
        std::vector<std::string> words = split(command, " ");   // ./train_gpt, a subcommand or a flag, ...
        const bool named = words[1][0] != '-';
        const auto& [name, subcommand] = named ? parse_subcommand(words[1]) : SUBCOMMANDS[0];
        words.erase(words.begin(), words.begin() + 1 + named);
        const Options o = parse_options(subcommand, name, words);
        const json all = describe(o, subcommand);
        if (!o.given.count(flag.name) || all[flag.name + 2].is_null()) examples += " " + command;
        for (const auto& [other, value] : all.items())
            if (!o.given.count("--" + other) && value != all_defaults[other]) examples += " " + other + ": " + command;
    }
    expect(wide.empty(), "no line of --help is wider than the terminal", wide);
    expect(incomplete.empty(), "--help of a subcommand lists the flags that it accepts, train's lists all", incomplete);
    expect(examples.empty(), "--help FLAG shows a valid example, which sets the flag and no other option", examples);
    for (const auto& [command, expected] : std::map<std::string, std::string>{
             {"--help", help_text(ALL, "", 80)}, {"train -h", help_text(ALL, "", 80)},
             {"sample --help", help_text(SAMPLE, "", 80)}, {"--help lr", help_text(ALL, "lr", 80)},
             {"train --help=--lr", help_text(ALL, "lr", 80)}}) {
        const Outcome outcome = run(command, "COLUMNS=80");
        expect_run(outcome.code == 0 && outcome.out == expected, command + " prints help in $COLUMNS columns", outcome);
    }
    const Outcome narrow = run("--help matmul", "COLUMNS=9"), unknown = run("--help matmul", "COLUMNS=");
    expect_run(narrow.out == help_text(ALL, "matmul", 60) && unknown.out == help_text(ALL, "matmul", 100),
               "help is at least 60 columns wide, and 100 if the width is unknown", narrow, unknown.out);
}

TEST("suggestions") {
    const std::pair<const char*, const char*> CASES[] = {
        {"--learning-rate", "--lr"}, {"--learning_rate", "--lr"}, {"--batch-size", "--micro-batch"},
        {"--block_size", "--seq-len"}, {"--n-layer", "--layers"}, {"--max-iters", "--steps"},
        {"--dtype", "--precision"}, {"--output", "--out"}, {"--warmup-steps", "--warmup"}, {"--sead", "--seed"},
        {"--weight", "--weight-decay"}, {"-steps", "--steps"}, {"--max-steps", "--steps"},
        {"--Weight_Decay_Rate", "--weight-decay"}};
    for (const auto& [word, flag] : CASES) {
        const std::string error = error_of([&, word = word] { parse_options(TRAIN, "train", {word}); });
        expect(error == format("%s: no such flag; did you mean %s?", word, flag), error);
    }
}

TEST("bad flags") {
    need_our_folder();
    need_first_run();
    reject_group("flags");
    if (!device.is_cpu()) reject("--threads on a GPU", TINY + "--threads 2", {"--threads 2", device.properties.name});
    for (const char* other : {"bf16", "fp16"})
        if (name_of(FLOATX) != std::string(other))
            reject("16-bit gradients whose type differs from the weights'", TINY + "--grad-dtype " + other,
                   {std::string("--grad-dtype ") + other, std::string("PRECISION=") + other});
    if (FLOATX == DType::FP32)
        reject("FP32 weights without a master copy", TINY + "--master-weights none",
               {"--master-weights none", "fp32", "PRECISION=bf16"});
    if (!has_tensor_cores(TensorCores::WGMMA))
        reject("tensor cores that the device lacks", TINY + "--tensor-cores wgmma", {"--tensor-cores wgmma"});
    if (FLOATX != DType::BF16)
        return reject("FP8 in a build that is not BF16", TINY + "--matmul fp8", {"--matmul fp8", "PRECISION=bf16"});
    if (!device_has_fp8())
        return reject("FP8 on a GPU before Ada", TINY + "--matmul fp8", {"--matmul fp8", "8.9"});
    reject("FP8 matmuls with a sum over 17 rows", TINY + "--matmul fp8-all --context 17 --micro-batch 1",
           {"--matmul fp8-all", "1 x 17"});
#ifdef CUDA_ON_CPU
    reject("a cuBLASLt without FP8 for the GPU", TINY + "--matmul fp8", {"--matmul fp8", "found cuBLASLt 11.10.4"},
           "CUDA_CPU_CUBLASLT=111004");
#endif
}

// ==== data ===================================================================

// Root may read every folder, so as root the test accesses files as another user.
void test_unreadable_data() {
    fs::create_directory(scratch("@/locked"));
    write_bytes("@/locked/text.txt", "some text");
    fs::permissions(scratch("@/locked"), fs::perms::none);
    const int nobody = 65534, own = setfsuid(geteuid() == 0 ? nobody : geteuid());
    for (const char* path : {"@/locked/text.txt", "@/locked/*.txt", "@/locked/"}) {
        const std::string error = error_of([&] { Tokens tokens(scratch(path)); });
        expect(error.find(scratch(path)) == 0 && contains(error, "Permission denied"),
               std::string("rejected: a folder without permission: ") + path, error);
    }
    setfsuid(own);
    fs::permissions(scratch("@/locked"), fs::perms::owner_all);
}

// The content of a file in a clone without git-lfs.
const std::string POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";

TEST("bad data") {
    need_our_folder();
    need_first_run();
    need_words();
    const std::vector<uint16_t> tokens(50, 7);
    std::vector<uint16_t> large = tokens;
    large[12] = 300;
    const std::pair<const char*, std::string> FILES[] = {
        {"empty.txt", ""}, {"short.bin", std::string(100, 'x')}, {"magic.bin", shard(tokens, 7)},
        {"version.bin", shard(tokens, SHARD_MAGIC, 2)}, {"cut.bin", shard(tokens).substr(0, 1024 + 80)},
        {"none.bin", shard({})}, {"ten.txt", "ten bytes."}, {"large.bin", shard(large)},
        {"odd.bin", shard(tokens) + "x"}, {"late_zero.txt", std::string(4095, 'x') + '\0'},
        {"later_zero.txt", std::string(4096, 'x') + '\0'},
        {"mixed_1.txt", "some text"}, {"mixed_2.bin", shard(tokens)}, {"one_token.bin", shard({7})},
        {"nano.bin", bytes_of(std::vector<uint16_t>(4000, 50256))}, {"a[1].txt", read_bytes("@/text.txt")},
        {"weights.txt", read_bytes("@/ours/model.safetensors")}, {"zip.txt", std::string("PK\x03\x04\n\0\0", 7)},
        {"llama.bin", shard(tokens, 20240801, 7)}, {"questions.bin", read_bytes(QUESTIONS)},
        {"array.npy", std::string("\x93NUMPY\1\0", 8)}, {"utf16.txt", "\xff\xfe\x2d\x4e"},
        {"nul.txt", std::string("t\0e\0", 4)}, {"lfs.txt", POINTER}, {"lfs.bin", POINTER}};
    for (const auto& [name, bytes] : FILES) write_bytes(std::string("@/") + name, bytes);
    fs::create_symlink(scratch("@/gone.txt"), scratch("@/dangling.txt"));
    mkfifo(scratch("@/pipe").c_str(), 0600);
    copy_files("@/words", "@/broken_words");
    write_bytes("@/broken_words/tokenizer.json", "{}");
    copy_files("@/ours", "@/few_words");
    copy_files(TOKENIZER + "/tokenizer.json", "@/few_words/tokenizer.json");
    reject_group("data");
    test_unreadable_data();
    const Outcome brackets = run(TINY + "--data @/a[1].txt"), zero = run(TINY + "--data @/later_zero.txt");
    expect_run(brackets.code == 0, "a file whose name looks like a glob is found", brackets);
    expect_run(zero.code == 0, "a file whose first zero byte is at position 4096 is text", zero);
    write_bytes("@/caf\xe9.txt", read_bytes("@/text.txt"));
    const Outcome latin = run(TINY + "--data @/caf\xe9.txt --out @/latin\xe9 --trace @/\xe9");
    const std::string log = read_bytes("@/latin\xe9/log.jsonl");
    const std::string data = parse_json(log.substr(0, log.find('\n')), "log")["run"]["options"]["data"];
    expect_run(latin.code == 0 && data == scratch("@/caf\xef\xbf\xbd.txt"), "names in Latin-1 are accepted", latin,
               data);
}

TEST("bad questions") {
    const std::string good = read_bytes(QUESTIONS), EVAL = "eval --from data/reference/hf_tiny --hellaswag @/q.bin ";
    // 16-bit words from the first question on: 65535, bytes, index, label, number of endings, length of the context.
    auto with = [&](size_t word, uint16_t value) {
        return std::string(good).replace(sizeof(int) * QUESTIONS_HEADER + 2 * word, 2, bytes_of(std::vector{value}));
    };
    auto with_header = [&](size_t number, int value) {
        return std::string(good).replace(sizeof(int) * number, sizeof(int), bytes_of(std::vector{value}));
    };
    const std::tuple<const char*, std::string, Texts> CASES[] = {
        {"without a header", good.substr(0, 1000), {"1000", "1024"}},
        {"with another magic number", with_header(0, SHARD_MAGIC), {"20240520", "20240522"}},
        {"of another version", with_header(1, 2), {"version 2"}},
        {"that are truncated", good.substr(0, good.size() - 2), {"question 15", "truncated"}},
        {"with bytes after the last question", good + "ab", {"2 bytes", "16 questions"}},
        {"that begin with a wrong number", with(0, 7), {"question 0", "65535", "7"}},
        {"with a label that is out of range", with(3, 4), {"question 0", "label 4", "4 endings"}},
        {"without a context", with(5, 0), {"question 0", "context"}},
        {"with a token outside the vocabulary", with(6, 211), {"question 0", "token 211", "211"}}};
    for (const auto& [what, bytes, named] : CASES) {
        write_bytes("@/q.bin", bytes);
        Texts texts = named;
        texts.push_back("@/q.bin");
        reject(std::string("questions ") + what, EVAL, texts);
    }
    write_bytes("@/q.bin", good);
    reject("a question longer than a sequence", EVAL + "--seq-len 31", {"@/q.bin", "33 tokens", "32", "--seq-len"});
}

// ==== folders ================================================================

TEST("bad folders") {
    need_our_folder();
    need_first_run();
    write_bytes("@/in_the_way", "a file");
    fs::create_directory(scratch("@/no_run"));
    reject_group("folders");
    expect(!fs::exists(scratch("@/typo")), "--resume of a folder that does not exist does not create it");

    const std::string moments = "@/first/step_000010/optimizer.state", whole = read_bytes(moments);
    std::vector<RawTensor> negative = raw_tensors(moments);
    tensor_named("v/wpe.weight", negative).bytes.replace(8, 4, bytes_of(Floats{-1e-9f}));
    auto with = [](const std::string& entries) { return "{\"step\": 10, \"next_window\": 1, " + entries + "}"; };
    std::vector<std::tuple<const char*, std::string, Texts>> cases = {
        {"trainer.json", "{\"step\": 10", {"JSON"}},
        {"trainer.json", "{\"step\": 10}", {"next_window"}},
        {"trainer.json", with("\"options\": {\"lr\": \"fast\"}"), {"lr", "fast", "a number"}},
        {"trainer.json", with("\"tokens\": -1"), {"tokens", "-1"}},
        {"trainer.json", with("\"last_norms\": " + json(std::vector<int>(129)).dump()), {"last_norms", "128"}},
        {"optimizer.state", safetensors(negative), {"v/wpe.weight", "-1e-09"}},
        {"optimizer.state", whole.substr(0, whole.size() / 2), {"truncated"}}};
    for (const char* step : {"-1", "9", "10.5", "true", "1e300", "18446744073709551626", "\"10\""})
        cases.push_back({"trainer.json", format("{\"step\": %s, \"next_window\": 1}", step), {"step"}});
    for (const char* window : {"-1", "0.5", "false"})
        cases.push_back({"trainer.json", format("{\"step\": 10, \"next_window\": %s}", window),
                         {"next_window", window}});
    for (const char* noise : {"1", "[1]", "[1, null]"})
        cases.push_back({"trainer.json", with(format("\"noise\": %s", noise)), {"noise", "two numbers"}});
    for (const char* list : {"1", "[null]", "[-1e+39]", "{}"})
        for (const char* key : {"last_losses", "last_norms"})
            cases.push_back({"trainer.json", with(format("\"%s\": %s", key, list)),
                             {key, list, "at most 128 FP32 numbers"}});
    for (const char* scale : {"0", "33554432", "1.5", "null"})
        cases.push_back({"trainer.json",
                         with(format("\"options\": {\"loss-scaling\": \"dynamic\"}, \"loss_scaling\": {\"scale\": %s, "
                                     "\"good_steps\": 0, \"skipped_steps\": 0}", scale)), {"scale", scale}});
    auto damage = [](const std::string& file, const std::string& bytes) {
        copy_files("@/first", "@/damaged");
        write_bytes("@/damaged/step_000010/" + file, bytes);
    };
    for (auto& [file, bytes, named] : cases) {
        damage(file, bytes);
        named.push_back(std::string("@/damaged/step_000010/") + file);
        reject(format("--resume with %s: %s", file, bytes[0] == '{' ? bytes.c_str() : named[0].c_str()),
               "train --data @/text.txt --out @/damaged --resume --steps 20", named);
    }
    const std::string COMMAND = "train --data @/text.txt --out @/damaged --resume --steps 12";
    const Texts named = {"@/damaged/step_000010/optimizer.state", "rename this one's folder"};
    damage("optimizer.state", whole.substr(0, whole.size() / 2));
    reject("--resume with a damaged checkpoint; the message says how to resume from the one before it", COMMAND, named);
    fs::rename(scratch("@/damaged/step_000010"), scratch("@/damaged/aside"));
    const Outcome resumed = run(COMMAND);
    expect_run(resumed.code == 0 && log_of("@/damaged").size() == 15, "the checkpoint before it is resumed", resumed);
    for (const char* other : {"05", "10", "12"}) fs::remove_all(scratch(std::string("@/damaged/step_0000") + other));
    fs::rename(scratch("@/damaged/aside"), scratch("@/damaged/step_000010"));
    reject("the only checkpoint, damaged", COMMAND, {named[0], "there is no checkpoint before it"});
}

// Expects that eval --from rejects a copy of @/ours in which `file` has other contents. The message names that file, or
// `blamed`.
void reject_folder(const std::string& what, const std::string& file, const std::string& bytes, Texts named,
                   const std::string& blamed = "") {
    copy_files("@/ours", "@/bad");
    write_bytes("@/bad/" + file, bytes);
    named.push_back("@/bad/" + (blamed.empty() ? file : blamed));
    reject(what, "eval --from @/bad --data @/eval_50.bin", named);
}

// Splits the weights of @/ours into two shards; expects that a wrong index and a wrong shard are rejected.
void test_bad_shards(const std::vector<RawTensor>& tensors) {
    const std::string index = "@/sharded/model.safetensors.index.json", NAME = "h.1.ln_1.bias",
                      COMMAND = "eval --from @/sharded --data @/eval_50.bin";
    copy_files("@/ours", "@/sharded");
    fs::remove(scratch("@/sharded/model.safetensors"));
    json map;
    for (const RawTensor& tensor : tensors)
        map[tensor.name] = tensor.name[0] == 'h' ? "h.safetensors" : "rest.safetensors";
    auto write_part = [&](const std::string& name, const std::string& without) {
        std::vector<RawTensor> part;
        for (const RawTensor& tensor : tensors)
            if (map[tensor.name] == name && tensor.name != without) part.push_back(tensor);
        write_bytes("@/sharded/" + name, safetensors(part));
    };
    auto reject_index = [&](const std::string& what, const json& content, const Texts& named) {
        write_json(scratch(index), content);
        reject(what, COMMAND, named);
    };
    write_part("rest.safetensors", "");
    reject_index("a shard that is missing", {{"weight_map", map}}, {"@/sharded/h.safetensors: No such file"});
    write_part("h.safetensors", NAME);
    reject_index("a tensor missing in its shard", {{"weight_map", map}}, {"@/sharded/h.safetensors", NAME, "missing"});
    write_part("h.safetensors", "");
    for (const std::string path : {"../ours/model.safetensors", "/etc/passwd", "sub/h.safetensors", ""}) {
        json away = map;
        away[NAME] = path;
        reject_index("a shard in '" + path + "'", {{"weight_map", away}}, {index, NAME, "\"" + path + "\""});
    }
    json long_name = map, fewer = map;
    long_name[NAME] = std::string(300, 'x');   // file systems allow 255 bytes
    fewer.erase(NAME);
    reject_index("a shard with a name of 300 bytes", {{"weight_map", long_name}},
                 {"@/sharded/xxx", "File name too long"});
    reject_index("an index without weight_map", {{"metadata", 1}}, {index, "weight_map"});
    reject_index("a tensor missing in the index", {{"weight_map", fewer}}, {"@/sharded/h.safetensors", NAME});
    fs::remove(scratch(index));
    for (const std::string name : {"pytorch_model-00001-of-00002.bin", "pytorch_model.bin"}) {
        write_bytes("@/sharded/" + name, "PK");
        reject("a folder with " + name, COMMAND, {"@/sharded", name, "safe_serialization=True"});
        fs::remove(scratch("@/sharded/" + name));
    }
    fs::remove(scratch("@/sharded/config.json"));
    write_bytes("@/sharded/adapter_config.json", "{}");
    reject("a PEFT adapter", COMMAND,
           {"@/sharded", "PEFT", "adapter_config.json", "config.json of a whole model", "merge_and_unload"});
}

// Expects that safetensors files are rejected if the header is valid JSON but violates the format.
void test_bad_headers() {
    auto file = [](const std::string& header, size_t bytes) {
        return bytes_of(std::vector<uint64_t>{header.size()}) + header + std::string(bytes, '\0');
    };
    auto entry = [](const std::string& name, const std::string& shape, const std::string& offsets) {
        return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" + offsets + "]}";
    };
    const std::string A = entry("a", "1", "0,4");
    struct Case { const char* what; std::string entries; size_t bytes; Texts named; };
    const Case CASES[] = {
        {"a hole between tensors", A + "," + entry("b", "1", "8,12"), 12, {"8 bytes together", "12 for them"}},
        {"tensors that overlap", entry("a", "2", "0,8") + "," + entry("b", "1", "4,8"), 8, {"12 bytes together"}},
        {"bytes after the last tensor", A, 7, {"4 bytes together", "7 for them"}},
        {"a name that occurs twice", A + "," + entry("a", "1", "4,8"), 8, {"\"a\"", "twice"}},
        {"an offset that is not a whole number", entry("a", "1", "0,4.5"), 4, {"a", "4.5"}},
        {"a negative offset", entry("a", "1", "-4,0"), 4, {"a", "-4"}},
        {"a shape that is not a whole number", entry("a", "true", "0,4"), 4, {"a", "true"}},
        {"a shape beyond 64 bits", entry("a", "4611686018427387905,4", "0,16"), 16, {"a", "4611686018427387905"}},
        {"a header with a million nested lists", "\"a\":" + std::string(1000000, '['), 0, {"levels deep"}}};
    for (const Case& c : CASES)
        reject_folder(c.what, "model.safetensors", file("{" + c.entries + "}", c.bytes), c.named);
    reject_folder("a header that is a list", "model.safetensors", file("[1]", 0), {"header"});

    // Files of more than 100 MB. They are sparse and take no space on the disk.
    copy_files("@/ours", "@/huge");
    const uint64_t length = (100 << 20) + 1;
    write_bytes("@/huge/model.safetensors", bytes_of(std::vector<uint64_t>{length}));
    for (const char* name : {"model.safetensors", "config.json"}) {
        const std::string path = std::string("@/huge/") + name;
        fs::resize_file(scratch(path), 8 + length);
        reject(path + " of more than 100 MB", "eval --from @/huge --data @/eval_50.bin", {path, "1048576"});
    }
}

TEST("bad checkpoints") {
    need_our_folder();
    write_eval_shards();
    const std::string path = "@/ours/model.safetensors", whole = read_bytes(path);
    const std::vector<RawTensor> tensors = raw_tensors(path);
    const size_t header = 8 + *reinterpret_cast<const uint64_t*>(whole.data()), all = whole.size();
    for (size_t length : {size_t(0), size_t(7), size_t(8), size_t(100), header, header + 4, all / 2, all - 1})
        reject_folder(format("model.safetensors truncated to %zu of %zu bytes", length, all), "model.safetensors",
                      whole.substr(0, length), {});
    reject_folder("a header that is not JSON", "model.safetensors",
                  replaced(whole, "{\"__metadata__\"", "?\"__metadata__\""),
                  {"header"});
    test_bad_shards(tensors);
    test_bad_headers();
    for (const char* name : {"model.safetensors", "config.json"})
        reject_folder(std::string(name) + " of a clone without git-lfs", name, POINTER, {"git lfs pull"});

    const std::string NAME = "h.1.mlp.c_fc.bias";
    const size_t n = 4 * read_config(scratch("@/ours/config.json")).channels;   // number of elements
    typedef std::vector<RawTensor> Tensors;
    auto of = [&](const std::function<void(RawTensor&)>& change) {
        return [&, change](Tensors& all) { change(tensor_named(NAME, all)); };
    };
    auto put = [&](float value) { return of([=](RawTensor& t) { t.bytes.replace(40, 4, bytes_of(Floats{value})); }); };
    auto text = [](size_t number) { return std::to_string(number); };
    struct Case { std::string what; std::function<void(Tensors&)> change; Texts named; };
    std::vector<Case> cases = {
        {"under another name", of([](RawTensor& t) { t.name = "h.1.mlp.c_fc.offset"; }), {"h.1.mlp.c_fc.offset"}},
        {"of another shape", of([&](RawTensor& t) { t.shape = {2, n / 2}; }),
         {NAME, "(2, " + text(n / 2), "(" + text(n)}},
        {"that is too short", of([&](RawTensor& t) { t.bytes.resize(4 * n - 4); }),
         {NAME, text(4 * n - 4), text(4 * n)}},
        {"of another type", of([](RawTensor& t) { t.dtype = "I32"; }), {NAME, "I32", "F32"}},
        {"with a NaN", put(NAN), {NAME, "nan", "element 10"}},
        {"with an infinity", put(INFINITY), {NAME, "inf", "element 10"}},
        {"that is missing", [&](Tensors& all) { all.erase(all.begin() + (&tensor_named(NAME, all) - all.data())); },
         {NAME, "missing"}},
        {"for an untied head", [](Tensors& all) {
             all.push_back(tensor_named("wte.weight", all));
             all.back().name = "lm_head.weight";
             all.back().bytes.replace(40, 4, bytes_of(Floats{1}));
         }, {"lm_head.weight", "wte.weight"}}};
    for (const char* mask : {"h.9.attn.bias", "attn.bias", "h.0.attn.bias.attn.masked_bias", "x\x1b[31mred\ny"})
        cases.push_back({"that is not a causal mask", [=](Tensors& all) { all.push_back({mask, "U8", {4}, "1111"}); },
                         {"tensor " + one_line(mask)}});
    for (const Case& c : cases) {
        Tensors changed = tensors;
        c.change(changed);
        reject_folder("a tensor " + c.what, "model.safetensors", safetensors(changed), c.named);
    }
}

TEST("bad config.json") {
    need_our_folder();
    write_eval_shards();
    const json config = read_json(scratch("@/ours/config.json"));
    const int C = config.at("n_embd");
    auto with = [&](const char* key, const json& value) {
        json changed = config;
        changed[key] = value;
        return changed.dump();
    };
    std::vector<std::tuple<const char*, json, Texts>> cases = {
        {"n_head", 0, {"0 heads"}}, {"n_layer", -1, {"-1 layers"}},
        {"n_head", C / 8, {format("%d channels over %d heads", C, C / 8)}},
        {"activation_function", "relu", {"relu", "gelu_new"}}, {"model_type", "llama", {"llama", "gpt2"}},
        {"tie_word_embeddings", false, {}}, {"n_inner", 100, {"100", std::to_string(4 * C)}}};
    for (const json& value : {json(true), json(2.9), json(4294967298), json("3"), json(nullptr)})
        for (const char* key : {"n_head", "n_layer", "vocab_size"}) cases.push_back({key, value, {key, value.dump()}});
    for (const auto& [key, value, named] : cases)
        reject_folder(format("config.json with %s %s", key, value.dump().c_str()), "config.json", with(key, value),
                      named);
    json incomplete = config;
    incomplete.erase("n_layer");
    for (const auto& [text, named] : {std::pair<std::string, const char*>{"{\"n_layer\": ", "JSON"},
                                      {"[1, 2]", "config.json"},
             {"{\"model_type\": \"gpt_neo\", \"num_layers\": 2}", "\"gpt_neo\""},
             {incomplete.dump(), "n_layer"}, {std::string(1000000, '['), "levels deep"},
             {"{\"n_head\": 1, \"n_head\": 2}", "twice"}})
        reject_folder("config.json: " + text.substr(0, 30), "config.json", text, {named});
    reject_folder("fewer layers than config.json says", "config.json", with("n_layer", 9), {"h.3.", "missing"},
                  "model.safetensors");
    reject_folder("more layers than config.json says", "config.json", with("n_layer", 2), {"h.2."},
                  "model.safetensors");
    copy_files("@/ours", "@/of_pipes");
    fs::remove(scratch("@/of_pipes/config.json"));
    mkfifo(scratch("@/of_pipes/config.json").c_str(), 0600);
    reject("a pipe for config.json", "eval --from @/of_pipes --data @/eval_50.bin", {"@/of_pipes/config.json"});
}

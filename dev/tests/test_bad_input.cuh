// Tests of user errors: wrong flags, data and folders. The program rejects each with exit code 2 and one line that
// names the file or flag, what it found and what it expects. Also tests of --help. Included by test_gpt.cu.
#pragma once

// Expects that `command` is rejected with one line that contains every text in `named`.
void reject(const std::string& what, const std::string& command, const Texts& named,
            const std::string& environment = "") {
    const Outcome outcome = run(command, environment);
    const bool one_line = std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1 && outcome.err.back() == '\n';
    expect_run(one_line && outcome.err.rfind("train_gpt: ", 0) == 0, "rejected: " + what, outcome, named, 2);
}

const std::string TINY = "train --layers 1 --heads 1 --channels 16 --context 16 --steps 1 --data @/text.txt ";

// Calls test(input, texts) for each row of a group in rejected.txt, with {a|b} for each alternative.
typedef std::function<void(const std::string& input, const Texts& texts)> RowTest;

void test_row(const std::string& row, const RowTest& test) {
    const size_t arrow = row.find(" => ");
    const std::string input = row.substr(0, arrow), texts = row.substr(arrow + 4), bounded = input + "}";
    size_t open = input.find('{');
    while (open != input.npos && bounded[bounded.find_first_of("|{}\"", open + 1)] != '|')   // a brace of JSON
        open = input.find('{', open + 1);
    if (open == input.npos) return test(input, split(texts, " ; "));
    const std::string choices = input.substr(open, input.find('}', open) + 1 - open);
    for (const std::string& choice : split(choices.substr(1, choices.size() - 2), "|"))
        test_row(replaced(input, choices, choice) + " => " + replaced(texts, "{}", choice == "''" ? "" : choice), test);
}

void test_rows(const std::string& group, const RowTest& test) {
    bool inside = false;
    size_t count = 0;
    for (const std::string& line : split(read_bytes("dev/tests/rejected.txt"), "\n")) {
        if (line[0] == '[' && ends_with(line, "]")) inside = line == "[" + group + "]";
        else if (inside && contains(line, " => ")) test_row(line, test), count++;
    }
    expect(count > 0, "rejected.txt has a group [" + group + "]");
}

// Expects that the command lines of a group are rejected.
void reject_group(const std::string& group) {
    test_rows(group, [](const std::string& input, const Texts& texts) {
        reject(input, replaced(input, "$TRAIN ", TINY), texts);
    });
}

// Expects that `command` is rejected if the file `path` has these bytes, with a line that also names the file.
void reject_file(const std::string& what, const std::string& path, const std::string& bytes, const std::string& command,
                 Texts named) {
    write_bytes(path, bytes);
    named.push_back(path);
    reject(path + ": " + what, command, named);
}

// Returns a JSON file after the change in a row's input.
std::string changed(json file, const std::string& change) {
    if (change[0] == '-') file.erase(change.substr(1));
    else if (change[0] == '+') file.update(json::parse(change.substr(1)));
    else return change;
    return file.dump();
}

// ==== flags ==================================================================

TEST("flags") {
    Options defaults;
    std::string rejected, accepted;
    for (const Flag& flag : flag_table(defaults)) {
        if (flag.is_switch) continue;
        const json value = flag.value();
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        if (value != "" && !value.is_null() && !flag.parse(text)) rejected += format(" %s %s", flag.name, text.c_str());
        const bool is_text = flag.values == flag.placeholder;   // accepts any text
        for (const char* wrong : {"", "12x", "1e", "-", "-3", "0x10", "nan", "inf", "1e999", "1,5", "none such"})
            if (flag.parse(wrong) != (is_text && *wrong)) accepted += format(" %s '%s'", flag.name, wrong);
    }
    expect(rejected.empty(), "every flag accepts its own default", rejected);
    expect(accepted.empty(), "flags reject what is not a number or a name; flags of text, only empty text", accepted);
    const Options o = parse_options(TRAIN, "train", {"--lr=3e-4", "--data=a=b", "--resume", "--out", "--"});
    expect(o.lr == 3e-4 && o.data == "a=b" && o.resume && o.out == "--", "--flag=value equals --flag value");
    for (const auto& [size, bytes] : {std::pair("1.5GB", 1.5e9), {"2MB", 2e6}, {"2GiB", 0x1p31}, {"3MiB", 3 * 0x1p20}})
        expect(parse_options(PLAN, "plan", {"--gpu-memory", size}).gpu_memory == bytes,
               format("%s are %.0f bytes", size, bytes));
    const Outcome most = run(TINY + "--seed 9223372036854775807 --sample-every 1 --sample-tokens 2 --skip-spikes 11.26 "
                             "--warmup 1000000000000 --eval-sequences 9223372036854775807 "
                             "--eval-every 9223372036854775807 --steps 2");
    const Outcome planned = run("plan --gpu-memory 80GB --micro-batch 625 --total-batch 1000000000000");
    expect_run(most.code == 0, "flags accept both ends of their ranges", planned,
               {"= 1562500 micro-batches of 625 x 1024"});
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
    const std::tuple<int, const char*, int> LISTS[] = {
        {ALL, "", COMMON}, {TRAIN, "", COMMON}, {ALL, "train", COMMON}, {ALL, "all", ALL}, {TRAIN, "all", TRAIN},
        {EVAL, "", EVAL}, {EVAL, "all", EVAL}, {SAMPLE, "", SAMPLE}, {ALL, "sample", SAMPLE}, {PLAN, "", PLAN}};
    for (const auto& [subcommands, topic, expected] : LISTS) {
        for (size_t width : {60, 80, 130}) check_width(help_text(subcommands, topic, width), width);
        const std::string help = help_text(subcommands, topic, 80);
        for (const Flag& flag : flags)
            if (contains(help, format("\n  %s ", flag.name)) != ((flag.subcommands & expected) != 0))
                incomplete += format(" %d '%s' %s", subcommands, topic, flag.name);
    }
    const long common = std::count_if(flags.begin(), flags.end(), [](auto& f) { return f.subcommands & COMMON; });
    const std::string list = help_text(ALL, "all", 1000);
    expect(incomplete.empty() && common == 25,
           "--help lists 25 flags, --help all lists all; eval --help lists those of eval", incomplete);
    expect(!contains(list, "default: 0)") && !contains(list, "default: 0;"),
           "a default of 0 is named by what it means: off, never, none or all", list);
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
    expect(examples.empty(), "--help FLAG shows a valid example, which sets the flag and no other option", examples);
    for (const auto& [command, expected] : std::map<std::string, std::string>{
             {"--help", help_text(ALL, "", 80)}, {"--help all", help_text(ALL, "all", 80)},
             {"train --help all", help_text(TRAIN, "all", 80)}, {"sample -h", help_text(SAMPLE, "", 80)},
             {"--help lr", help_text(ALL, "lr", 80)}, {"train --help=--lr", help_text(ALL, "lr", 80)}}) {
        const Outcome outcome = run(command, "COLUMNS=80");
        expect_run(outcome.out == expected, command + " prints help in $COLUMNS columns", outcome);
    }
    const Outcome narrow = run("--help matmul", "COLUMNS=9"), unknown = run("--help matmul", "COLUMNS=");
    expect_run(narrow.out == help_text(ALL, "matmul", 60) && unknown.out == help_text(ALL, "matmul", 100),
               "help is at least 60 columns wide, and 100 if the width is unknown", narrow);
}

TEST("suggestions") { reject_group("suggestions"); }

TEST("bad flags") {
    need_our_folder();
    need_first_run();
    reject_group("flags");
    if (!device.is_cpu()) reject("--threads on a GPU", TINY + "--threads 2", {"--threads 2", device.properties.name});
    if (!has_tensor_cores(TensorCores::WGMMA))
        reject("tensor cores that the device lacks", TINY + "--tensor-cores wgmma", {"--tensor-cores wgmma"});
    if (FLOATX != DType::BF16) return;
    if (!device_has_fp8()) reject("FP8 on a GPU before Ada", TINY + "--matmul fp8", {"--matmul fp8", "8.9"});
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
    fs::create_directory(scratch("@/shards"));
    write_bytes("@/shards/1.bin", shard(tokens));
    reject_group("data");
    expect(!fs::exists(scratch("@/too_short")), "data that is too short leaves no folder --out");
    test_unreadable_data();
    expect_run(true, "a file whose name looks like a glob is found", run(TINY + "--data @/a[1].txt"));
    expect_run(true, "a file whose first zero byte is at position 4096 is text", run(TINY + "--data @/later_zero.txt"));
    write_bytes("@/caf\xe9.txt", read_bytes("@/text.txt"));
    const Outcome latin = run(TINY + "--data @/caf\xe9.txt --out @/latin\xe9 --trace @/\xe9");
    const std::string log = read_bytes("@/latin\xe9/log.jsonl");
    const std::string data = parse_json(log.substr(0, log.find('\n')), "log")["run"]["options"]["data"];
    expect_run(data == scratch("@/caf\xef\xbf\xbd.txt"), "names in Latin-1 are accepted", latin);
}

TEST("bad questions") {
    const std::string good = read_bytes(QUESTIONS), EVAL = "eval --from data/reference/hf_tiny --hellaswag @/q.bin ";
    const size_t words = sizeof(int) * QUESTIONS_HEADER;   // where the first question begins
    reject_file("without a header", "@/q.bin", good.substr(0, 1000), EVAL, {"1000", "1024"});
    reject_file("truncated", "@/q.bin", good.substr(0, good.size() - 2), EVAL, {"question 15", "truncated"});
    reject_file("bytes after the last question", "@/q.bin", good + "ab", EVAL, {"2 bytes", "16 questions"});
    test_rows("questions", [&](const std::string& input, const Texts& texts) {
        const std::vector<std::string> parts = split(input, " ");
        const int at = stoi(parts[1]), value = stoi(parts[2]);
        std::string bytes = good;
        if (parts[0] == "word") bytes.replace(words + 2 * at, 2, bytes_of(std::vector<uint16_t>(1, value)));
        else bytes.replace(sizeof(int) * at, sizeof(int), bytes_of(std::vector{value}));
        reject_file(input, "@/q.bin", bytes, EVAL, texts);
    });
    write_bytes("@/q.bin", good);
    reject("a question longer than a sequence", EVAL + "--seq-len 31", {"@/q.bin", "33 tokens", "32", "--seq-len"});
}

// ==== folders ================================================================

TEST("bad folders") {
    need_our_folder();
    need_first_run();
    write_bytes("@/in_the_way", "a file");
    fs::create_directory(scratch("@/no_run"));
    fs::create_directory(scratch("@/runs"));
    for (const char* name : {"older", "newer"}) copy_files("@/first", format("@/runs/%s", name));
    fs::last_write_time(scratch("@/runs/older"), fs::file_time_type::clock::now() - std::chrono::hours(1));
    reject_group("folders");
    expect(!fs::exists(scratch("@/typo")), "--resume of a folder that does not exist does not create it");

    const std::string moments = "@/first/step_000010/optimizer.state", whole = read_bytes(moments);
    std::vector<RawTensor> negative = raw_tensors(moments);
    tensor_named("v/wpe.weight", negative).bytes.replace(8, 4, bytes_of(Floats{-1e-9f}));
    copy_files("@/first", "@/damaged");
    const std::string STEP = "@/damaged/step_000010/", COMMAND = "train --data @/text.txt --out @/damaged --resume ";
    const json trainer = read_json(scratch(STEP + "trainer.json"));
    const json longer = {{"last_norms", std::vector<int>(129)}};
    test_rows("trainer.json", [&](const std::string& input, const Texts& texts) {
        reject_file(input, STEP + "trainer.json", changed(trainer, input), COMMAND + "--loss-scaling dynamic", texts);
    });
    reject_file("a list that is too long", STEP + "trainer.json", changed(trainer, "+" + longer.dump()), COMMAND,
                {"last_norms", "128"});
    write_json(scratch(STEP + "trainer.json"), trainer);
    reject_file("negative", STEP + "optimizer.state", safetensors(negative), COMMAND, {"v/wpe.weight", "-1e-09"});
    reject_file("cut; the message says how to resume from the checkpoint before it", STEP + "optimizer.state",
                whole.substr(0, whole.size() / 2), COMMAND, {"truncated", "rename this one's folder"});
    fs::rename(scratch("@/damaged/step_000010"), scratch("@/damaged/aside"));
    const Outcome resumed = run(COMMAND + "--steps 12");
    expect_run(log_of("@/damaged").size() == 15, "the checkpoint before it is resumed", resumed);
    for (const char* other : {"05", "10", "12"}) fs::remove_all(scratch(std::string("@/damaged/step_0000") + other));
    fs::rename(scratch("@/damaged/aside"), scratch("@/damaged/step_000010"));
    reject("the only checkpoint, damaged", COMMAND, {STEP + "optimizer.state", "there is no checkpoint before it"});
}

// Expects that eval --from rejects a copy of @/ours in which `file` has other contents. The message names that file, or
// `blamed`.
void reject_folder(const std::string& what, const std::string& file, const std::string& bytes, Texts named,
                   const std::string& blamed = "") {
    copy_files("@/ours", "@/bad");
    write_bytes("@/bad/" + file, bytes);
    named.push_back("@/bad/" + (blamed.empty() ? file : blamed));
    reject(file + ": " + what, "eval --from @/bad --data @/eval_50.bin", named);
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
    test_rows("model.safetensors.index.json", [&](const std::string& input, const Texts& texts) {
        const json content = json::parse(changed(map, input));
        reject_index(input, input[0] == '{' ? content : json{{"weight_map", content}}, texts);
    });
    map[NAME] = std::string(300, 'x');   // file systems allow 255 bytes
    reject_index("a shard with a name of 300 bytes", {{"weight_map", map}}, {"@/sharded/xxx", "File name too long"});
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
    test_rows("model.safetensors", [](const std::string& input, const Texts& texts) {
        std::string header = input.substr(input.find(' ') + 1);
        for (const auto& [brief, whole] : {std::pair("[[", R"({"dtype":"F32","shape":[)"),
                                           {"],[", R"(],"data_offsets":[)"}, {"]]", "]}"}})
            header = replaced(header, brief, whole);
        reject_folder(input, "model.safetensors",
                      bytes_of(std::vector<uint64_t>{header.size()}) + header + std::string(stoul(input), '\0'), texts);
    });
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
        reject_folder(format("%zu of %zu bytes", length, all), "model.safetensors", whole.substr(0, length), {});
    reject_folder("a header that is not JSON", "model.safetensors", std::string(whole).replace(8, 1, "?"), {"header"});
    test_bad_shards(tensors);
    test_bad_headers();
    for (const char* name : {"model.safetensors", "config.json"})
        reject_folder("a clone without git-lfs", name, POINTER, {"git lfs pull"});

    test_rows("tensors", [&](const std::string& input, const Texts& texts) {   // NAME CHANGE [VALUE]
        const std::vector<std::string> words = split(input + "  ", " ");
        std::vector<RawTensor> changed = tensors;
        RawTensor& tensor = tensor_named(words[0], changed);
        if (words[1] == "name") tensor.name = words[2];
        if (words[1] == "shape") tensor.shape = {stoul(words[2]), stoul(words[3])};
        if (words[1] == "dtype") tensor.dtype = words[2];
        if (words[1] == "bytes") tensor.bytes.resize(stoul(words[2]));
        if (words[1] == "value") tensor.bytes.replace(40, 4, bytes_of(Floats{stof(words[2])}));
        if (words[1] == "removed") changed.erase(changed.begin() + (&tensor - changed.data()));
        if (words[1] == "twin") changed.push_back({words[2], "F32", tensor.shape, std::string(tensor.bytes.size(), 0)});
        if (words[1] == "mask") changed.push_back({replaced(words[2], "ESC", "\x1b\n"), "U8", {4}, "1111"});
        reject_folder(input, "model.safetensors", safetensors(changed), texts);
    });
}

TEST("bad config.json") {
    need_our_folder();
    write_eval_shards();
    const json config = read_json(scratch("@/ours/config.json"));
    test_rows("config.json", [&](const std::string& input, const Texts& texts) {
        reject_folder(input, "config.json", changed(config, input), texts);
    });
    reject_folder("lists in lists", "config.json", std::string(1000000, '['), {"levels deep"});
    for (const auto& [layers, tensor] : {std::pair(9, "h.3."), {2, "h.2."}})   // the model has 3
        reject_folder(format("%d layers", layers), "config.json", changed(config, format("+{\"n_layer\": %d}", layers)),
                      {tensor}, "model.safetensors");
    copy_files("@/ours", "@/of_pipes");
    fs::remove(scratch("@/of_pipes/config.json"));
    mkfifo(scratch("@/of_pipes/config.json").c_str(), 0600);
    reject("a pipe for config.json", "eval --from @/of_pipes --data @/eval_50.bin", {"@/of_pipes/config.json"});
}

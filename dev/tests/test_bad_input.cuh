// Claims about what users get wrong, a part of test_gpt.cu: flags, data and folders that are refused, each by one line
// that names what was found and what was expected, and nothing on disk is harmed.
#pragma once

// ==== bad input ==============================================================
// Each is a mistake that people make. The program must say in one line what is wrong: the file or the
// flag, what was found and what was expected; and exit with 2.

typedef std::vector<std::string> Texts;

void refuse(const std::string& what, const std::string& command, const Texts& named) {
    const Outcome outcome = run(command);
    const bool one_line = std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1 && outcome.err.back() == '\n';
    std::string missing;
    for (const std::string& text : named)
        if (outcome.err.find(scratch(text)) == outcome.err.npos) missing += " lacks '" + scratch(text) + "'";
    claim_run(outcome.code == 2 && one_line && outcome.err.rfind("train_gpt: ", 0) == 0 && missing.empty(), "refused: " + what,
              outcome, missing);
}

const std::string TINY = "train --layers 1 --heads 1 --channels 16 --context 16 --steps 1 --data @/text.txt ";

std::string replaced(std::string text, const std::string& part, const std::string& by) {
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += by.size()) text.replace(at, part.size(), by);
    return text;
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> parts;
    for (size_t at = 0, end; at <= text.size(); at = end + separator.size()) {
        end = std::min(text.size(), text.find(separator, at));
        parts.push_back(text.substr(at, end - at));
    }
    return parts;
}

// Refuses every command line of a group of rejected.txt.
void refuse_group(const std::string& group) {
    std::istringstream lines(read_bytes("dev/tests/rejected.txt"));
    bool inside = false;
    size_t count = 0;
    for (std::string line; std::getline(lines, line);) {
        if (line.empty() || line[0] == '#') continue;
        if (line[0] == '[') inside = line == "[" + group + "]";
        else if (inside) {
            const size_t arrow = line.find(" => "), open = line.find('{'), close = line.find('}', open);
            const std::string command = replaced(line.substr(0, arrow), "$TRAIN ", TINY), texts = line.substr(arrow + 4);
            const bool has_choices = open < arrow;
            const std::string choices = has_choices ? line.substr(open, close + 1 - open) : "{}";
            for (const std::string& choice : split(choices.substr(1, choices.size() - 2), "|")) {
                const std::string chosen = replaced(command, choices, choice);
                refuse(chosen, chosen, split(replaced(texts, "{}", choice == "''" ? "" : choice), " ; "));
                count++;
            }
        }
    }
    claim(count > 0, "rejected.txt has a group [" + group + "]");
}

// What --help and the log show must be something that can be given; null is nothing.
void test_defaults() {
    Options defaults;
    std::string refused;
    for (const Flag& flag : flag_table(defaults)) {
        const json value = flag.value();
        if (flag.is_switch || value == "" || value.is_null()) continue;
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        if (!flag.parse(text)) refused += format(" %s %s", flag.name, text.c_str());
    }
    claim(refused.empty(), "every flag takes its own default", refused);
}

void test_readme() {
    const std::string readme = read_bytes("README.md");
    std::string missing;
    Options defaults;
    for (const Flag& flag : flag_table(defaults))
        if (readme.find(flag.name) == readme.npos) missing += std::string(" ") + flag.name;
    claim(missing.empty(), "README.md names every flag", missing);
}

void test_bad_flags() {
    need_our_folder();
    need_first_run();
    refuse_group("gpus");
    refuse_group("flags");
    const Outcome most = run(TINY + "--seed 9223372036854775807 --sample-every 1 --sample-tokens 2 --warmup 1000000000000 "
                             "--eval-sequences 9223372036854775807 --eval-every 9223372036854775807 --steps 2");
    claim_run(most.code == 0, "the ends of ranges are accepted: train", most);
    const Outcome planned = run("plan --gpu-memory 80GB --total-batch 1000000000000");
    claim_run(planned.code == 0 && planned.out.find("accumulated 244140625 times") != std::string::npos,
              "the ends of ranges are accepted: plan", planned);
    if (!device.is_cpu()) refuse("--threads on a GPU", TINY + "--threads 2", {"--threads 2", device.properties.name});
    for (const char* other : {"bf16", "fp16"})
        if (name_of(FLOATX) != std::string(other))
            refuse("16-bit gradients of another type than the weights", TINY + "--grad-dtype " + other,
                   {std::string("--grad-dtype ") + other, std::string("PRECISION=") + other});
    if (FLOATX == DType::FP32)
        refuse("FP32 weights without a master copy", TINY + "--master-weights none",
               {"--master-weights none", "fp32", "PRECISION=bf16"});
    if (!has_tensor_cores(TensorCores::WGMMA))
        refuse("tensor cores that the device lacks", TINY + "--tensor-cores wgmma", {"--tensor-cores wgmma", name_of(FLOATX)});
}

void test_bad_text() {
    need_words();
    need_our_folder();
    fs::copy(scratch("@/words"), scratch("@/broken_words"));
    write_bytes(scratch("@/broken_words/tokenizer.json"), "{}");
    fs::copy(scratch("@/ours"), scratch("@/few_words"));
    fs::copy(TOKENIZER + "/tokenizer.json", scratch("@/few_words/tokenizer.json"));
    refuse_group("text");
}

// Folders that others may not look into. Root may: the system is asked as if for somebody else.
void test_unreadable_data() {
    fs::create_directory(scratch("@/locked"));
    write_bytes(scratch("@/locked/text.txt"), "some text");
    fs::permissions(scratch("@/locked"), fs::perms::none);
    const int nobody = 65534, own = setfsuid(geteuid() == 0 ? nobody : geteuid());
    for (const char* path : {"@/locked/text.txt", "@/locked/*.txt", "@/locked/"}) {
        std::string said = "taken";
        try {
            Tokens tokens(scratch(path));
        } catch (const UserError& error) {
            said = error.what();
        }
        claim(said.find(scratch(path)) == 0 && said.find("Permission denied") != said.npos,
              format("refused: a folder that may not be looked into, %s", path), said);
    }
    setfsuid(own);
    fs::permissions(scratch("@/locked"), fs::perms::owner_all);
}

// Names that are not UTF-8, which JSON cannot hold.
void test_names_in_other_bytes() {
    need_first_run();
    write_bytes(scratch("@/caf\xe9.txt"), read_bytes(scratch("@/text.txt")));
    fs::create_directory_symlink(scratch("@/first"), scratch("@/mod\xe8le"));
    const std::string MODEL = scratch("@/first/step_000010");
    for (const std::string wrong : {"--data @/caf\xe9.txt --out @/latin", "--val-data @/caf\xe9.txt --out @/latin",
                                    "--out @/latin\xe9", "--out @/latin --trace @/\xe9"}) {
        const std::string flag = wrong.find("latin\xe9") != wrong.npos ? "--out" : wrong.substr(0, wrong.find(' '));
        refuse("a name that is not UTF-8 in a run that is kept, " + one_line(wrong), TINY + wrong,
               {flag == "--out" && wrong.find("--trace") != wrong.npos ? "--trace" : flag, "not UTF-8"});
        claim(!fs::exists(scratch("@/latin")) && !fs::exists(scratch("@/latin\xe9")), "before anything is written");
    }
    const Outcome trained = run(TINY + "--data @/caf\xe9.txt");
    claim_run(trained.code == 0, "a run that is not kept takes such a name", trained);
    const Outcome evaluated = run("eval --matmul-tuning off --from @/mod\xe8le --data @/caf\xe9.txt");
    claim_run(evaluated.code == 0, "so does eval", evaluated);
}

void test_bad_data() {
    need_our_folder();
    write_bytes(scratch("@/empty.txt"), "");
    write_bytes(scratch("@/short.bin"), std::string(100, 'x'));
    const std::vector<uint16_t> tokens(50, 7);
    write_bytes(scratch("@/magic.bin"), shard(tokens, 7));
    write_bytes(scratch("@/version.bin"), shard(tokens, SHARD_MAGIC, 2));
    write_bytes(scratch("@/cut.bin"), shard(tokens).substr(0, 1024 + 80));
    write_bytes(scratch("@/none.bin"), shard({}));
    write_bytes(scratch("@/ten.txt"), "ten bytes.");
    std::vector<uint16_t> large = tokens;
    large[12] = 300;
    write_bytes(scratch("@/large.bin"), shard(large));
    fs::create_symlink(scratch("@/gone.txt"), scratch("@/dangling.txt"));
    write_bytes(scratch("@/a[1].txt"), read_bytes(scratch("@/text.txt")));
    const Outcome brackets = run(TINY + "--data @/a[1].txt");
    claim_run(brackets.code == 0, "a file whose name looks like a pattern is found", brackets);
    test_unreadable_data();
    test_names_in_other_bytes();
    write_bytes(scratch("@/odd.bin"), shard(tokens) + "x");
    write_bytes(scratch("@/mixed_1.txt"), "some text");
    write_bytes(scratch("@/mixed_2.bin"), shard(tokens));
    write_bytes(scratch("@/nano.bin"), bytes_of(std::vector<uint16_t>(4000, 50256)));
    const std::pair<const char*, std::string> FORMATS[] = {
        {"gzip", "\x1f\x8b\b"}, {"zstd", "\x28\xb5\x2f\xfd"}, {"bzip2", "BZh91AY&SY"},
        {"xz", std::string("\xfd" "7zXZ\0", 6)}, {"zip", "PK\x03\x04"}, {"Parquet", "PAR1"}, {"NumPy", "\x93NUMPY"},
        {"safetensors", read_bytes(scratch("@/ours/model.safetensors"))}};
    for (const auto& [what, begin] : FORMATS)
        for (const char* name : {"@/foreign.txt", "@/foreign.bin"}) {
            write_bytes(scratch(name), begin + std::string(2000, 'x'));
            refuse(std::string(what) + " for data, " + name, TINY + "--data " + name, {name, what});
        }
    mkfifo(scratch("@/pipe").c_str(), 0600);
    write_bytes(scratch("@/one_token.bin"), shard({7}));
    refuse_group("data");
}

void test_bad_questions() {
    need_our_folder();
    const std::string good = read_bytes(QUESTIONS), EVAL = "eval --from data/reference/hf_tiny --hellaswag @/q.bin ";
    // Words of 16 bits from the first question on: 65535, bytes, index, label, endings, tokens of the context.
    auto with = [&](size_t word, uint16_t value) {
        std::string bytes = good;
        memcpy(&bytes[sizeof(int) * QUESTIONS_HEADER + 2 * word], &value, 2);
        return bytes;
    };
    auto with_header = [&](size_t number, int value) {
        std::string bytes = good;
        memcpy(&bytes[sizeof(int) * number], &value, sizeof(int));
        return bytes;
    };
    const std::tuple<const char*, std::string, Texts> CASES[] = {
        {"questions without a header", good.substr(0, 1000), {"1000", "1024"}},
        {"questions with another magic number", with_header(0, SHARD_MAGIC), {"20240520", "20240522"}},
        {"questions of another version", with_header(1, 2), {"version 2", "20240522, 1"}},
        {"no questions", with_header(2, 0), {"0 questions"}},
        {"questions that are cut short", good.substr(0, good.size() - 2), {"question 15", "truncated"}},
        {"fewer questions than the header says", with_header(2, 17), {"question 16", "17", "truncated"}},
        {"more questions than the header says", good + "ab", {"2 bytes", "16 questions"}},
        {"a question that begins with another number", with(0, 7), {"question 0", "65535", "7"}},
        {"a question of another size", with(1, 9), {"question 0", "bytes", "9"}},
        {"a question with another index", with(2, 5), {"question 0", "index", "5"}},
        {"a label that is no ending's", with(3, 4), {"question 0", "label 4", "4 endings"}},
        {"a context without tokens", with(5, 0), {"question 0", "context"}},
        {"a token outside the vocabulary in a question", with(6, 211), {"question 0", "token 211", "context", "211"}}};
    for (const auto& [what, bytes, named] : CASES) {
        write_bytes(scratch("@/q.bin"), bytes);
        Texts texts = named;
        texts.push_back("@/q.bin");
        refuse(what, EVAL, texts);
    }
    write_bytes(scratch("@/q.bin"), good);
    refuse("a question that is longer than a sequence", EVAL + "--seq-len 31",
           {"@/q.bin", "question", "33 tokens", "32", "--seq-len"});
}

// @/damaged is a run of two checkpoints, the last of which is damaged.
void test_way_around() {
    const std::string COMMAND = "train --data @/text.txt --out @/damaged --resume --steps 12", MOVE = "mv ";
    fs::create_directory(scratch("@/damaged/damaged_step_000010"));   // from an earlier time
    const Outcome refused = run(COMMAND);
    const size_t begin = refused.err.find(MOVE), end = refused.err.find(", and the same command", begin);
    claim_run(refused.code == 2 && refused.err.find(scratch("; before it there is @/damaged/step_000005: mv ")) != refused.err.npos &&
                  end != refused.err.npos && list_checkpoints(scratch("@/damaged")).size() == 2,
              "of a damaged checkpoint --resume names the one before it, and touches nothing", refused);
    if (end == refused.err.npos) return;
    const int moved = system(refused.err.substr(begin, end - begin).c_str());
    const Outcome resumed = run(COMMAND);
    claim_run(moved == 0 && resumed.code == 0 && log_of("@/damaged").size() == 15 &&
                  fs::exists(scratch("@/damaged/damaged_step_000010_/optimizer.safetensors")),
              "and the command that takes it", resumed, refused.err);
    fs::remove_all(scratch("@/damaged/step_000005"));
    fs::remove_all(scratch("@/damaged/step_000010"));
    fs::remove(scratch("@/damaged/step_000012/config.json"));
    const Outcome only = run(COMMAND);
    claim_run(only.code == 2 && only.err.find("there is no checkpoint before it") != only.err.npos,
              "or says that there is none", only);
}

void test_bad_folders() {
    need_our_folder();
    need_first_run();
    write_bytes(scratch("@/in_the_way"), "a file");
    fs::create_directory(scratch("@/no_run"));
    refuse_group("folders");

    // A run whose last checkpoint is damaged.
    auto refuse_resume = [](const std::string& what, const std::string& file, const std::string& bytes, Texts named) {
        fs::remove_all(scratch("@/damaged"));
        fs::copy(scratch("@/first"), scratch("@/damaged"), fs::copy_options::recursive);
        write_bytes(scratch("@/damaged/step_000010/" + file), bytes);
        named.push_back("@/damaged/step_000010/" + file);
        refuse("--resume with " + what, "train --data @/text.txt --out @/damaged --resume --steps 20", named);
    };
    refuse_resume("a trainer.json that is not JSON", "trainer.json", "{\"step\": 10", {"JSON"});
    refuse_resume("a trainer.json without the next window", "trainer.json", "{\"step\": 10}", {"next_window"});
    const std::string optimizer = read_bytes(scratch("@/first/step_000010/optimizer.safetensors"));
    for (const char* step : {"-1", "9", "10.5", "true", "1e300", "18446744073709551626", "\"10\""})
        refuse_resume(format("step %s in trainer.json", step), "trainer.json",
                      format("{\"step\": %s, \"next_window\": 1}", step), {"step"});
    for (const char* window : {"-1", "0.5", "false"})
        refuse_resume(format("next_window %s in trainer.json", window), "trainer.json",
                      format("{\"step\": 10, \"next_window\": %s}", window), {"next_window", window});
    for (const char* scale : {"0", "33554432", "1.5", "null"})
        refuse_resume(format("a loss scale of %s in trainer.json", scale), "trainer.json",
                      format("{\"step\": 10, \"next_window\": 1, \"options\": {\"loss-scaling\": \"dynamic\"}, "
                             "\"loss_scaling\": {\"scale\": %s, \"good_steps\": 0, \"skipped_steps\": 0}}", scale), {"scale", scale});
    refuse_resume("an option in trainer.json that is none", "trainer.json",
                  "{\"step\": 10, \"next_window\": 1, \"options\": {\"lr\": \"fast\"}}", {"lr", "fast", "a number"});
    const std::string moments = scratch("@/first/step_000010/optimizer.safetensors");
    std::vector<RawTensor> negative = raw_tensors(moments), more = negative;
    tensor_named("v/wpe.weight", negative).bytes.replace(8, 4, bytes_of(Floats{-1e-9f}));
    refuse_resume("a negative second moment", "optimizer.safetensors", safetensors(negative),
                  {"v/wpe.weight", "-1e-09", "element 2"});
    more.push_back({"w/wpe.weight", "F32", {1}, std::string(4, 0)});
    refuse_resume("a tensor that is no moment", "optimizer.safetensors", safetensors(more), {"w/wpe.weight"});
    refuse_resume("half an optimizer.safetensors", "optimizer.safetensors", optimizer.substr(0, optimizer.size() / 2), {"truncated"});
    test_way_around();
}

// eval --from a copy of @/ours in which one file has other contents; the message names it, or `blamed`.
void refuse_folder(const std::string& what, const std::string& file, const std::string& bytes, Texts named,
                   const std::string& blamed = "") {
    fs::remove_all(scratch("@/bad"));
    fs::copy(scratch("@/ours"), scratch("@/bad"));
    write_bytes(scratch("@/bad/" + file), bytes);
    named.push_back("@/bad/" + (blamed.empty() ? file : blamed));
    refuse(what, "eval --from @/bad --data @/eval_50.bin", named);
}

// An index of shards that is wrong. @/sharded is what @/ours is, its weights in two shards.
void test_bad_shards(const std::vector<RawTensor>& tensors) {
    const std::string dir = scratch("@/sharded"), index = dir + "/model.safetensors.index.json";
    fs::copy(scratch("@/ours"), dir);
    fs::remove(dir + "/model.safetensors");
    json map;
    for (const RawTensor& tensor : tensors)
        map[tensor.name] = tensor.name[0] == 'h' ? "h.safetensors" : "rest.safetensors";
    auto write_shard = [&](const std::string& name, const std::string& without) {
        std::vector<RawTensor> part;
        for (const RawTensor& tensor : tensors)
            if (map[tensor.name] == name && tensor.name != without) part.push_back(tensor);
        write_bytes(dir + "/" + name, safetensors(part));
    };
    auto refuse_sharded = [&](const std::string& what, const json& content, const Texts& named) {
        write_json(index, content);
        refuse(what, "eval --from @/sharded --data @/eval_50.bin", named);
    };
    write_shard("rest.safetensors", "");
    refuse_sharded("a shard that is missing", {{"weight_map", map}}, {index, dir + "/h.safetensors", "missing"});
    write_shard("h.safetensors", "h.1.ln_1.bias");
    refuse_sharded("a tensor that its shard lacks", {{"weight_map", map}},
                   {"@/sharded/h.safetensors", "h.1.ln_1.bias", "missing"});
    write_shard("h.safetensors", "");
    for (const char* path : {"../ours/model.safetensors", "/etc/passwd", "sub/h.safetensors", ""}) {
        json away = map;
        away["h.1.ln_1.bias"] = path;
        refuse_sharded(format("a shard in '%s'", path), {{"weight_map", away}},
                       {index, "h.1.ln_1.bias", format("'%s'", path)});
    }
    json long_name = map;
    const std::string name(300, 'x');   // file systems allow 255 bytes
    long_name["h.1.ln_1.bias"] = name;
    refuse_sharded("a shard with a name of 300 bytes", {{"weight_map", long_name}}, {index, dir + "/" + name, "missing"});
    refuse_sharded("an index without a map", {{"metadata", 1}}, {index, "weight_map"});
    json fewer = map;
    fewer.erase("h.1.ln_1.bias");
    refuse_sharded("a tensor that the index lacks", {{"weight_map", fewer}},
                   {"@/sharded/h.safetensors", "h.1.ln_1.bias"});
    fs::remove(index);
    write_bytes(dir + "/pytorch_model.bin", "PK");
    refuse("a folder of PyTorch's own", "eval --from @/sharded --data @/eval_50.bin",
           {"@/sharded", "pytorch_model.bin", "python3 -c \"import sys, transformers",
            "safe_serialization=True)\" " + dir});
}

// Safetensors whose header is JSON, but not what the format allows.
void test_bad_headers() {
    auto file = [](const std::string& header, size_t bytes) {
        return bytes_of(std::vector<uint64_t>{header.size()}) + header + std::string(bytes, '\0');
    };
    auto refuse_header = [&](const std::string& what, const std::string& header, size_t bytes, const Texts& named) {
        refuse_folder(what, "model.safetensors", file(header, bytes), named);
    };
    auto entry = [](const std::string& name, const std::string& shape, const std::string& offsets) {
        return format("\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%s]}", name.c_str(), shape.c_str(),
                      offsets.c_str());
    };
    auto two = [](const std::string& a, const std::string& b) { return "{" + a + "," + b + "}"; };
    refuse_header("a hole between tensors", two(entry("a", "1", "0,4"), entry("b", "1", "8,12")), 12,
                  {"b", "byte 8", "expected 4", "hole"});
    refuse_header("a hole before the first", "{" + entry("a", "1", "4,8") + "}", 8, {"a", "byte 4"});
    refuse_header("tensors that overlap", two(entry("a", "2", "0,8"), entry("b", "1", "4,8")), 8, {"b", "overlap"});
    refuse_header("bytes behind the last tensor", "{" + entry("a", "1", "0,4") + "}", 7, {"3 bytes"});
    refuse_header("a name that occurs twice", two(entry("a", "1", "0,4"), entry("a", "1", "4,8")), 8,
                  {"\"a\"", "twice"});
    refuse_header("an offset that is no whole number", "{" + entry("a", "1", "0,4.5") + "}", 4, {"a", "4.5"});
    refuse_header("a negative offset", "{" + entry("a", "1", "-4,0") + "}", 4, {"a", "-4"});
    refuse_header("a shape that is no whole number", "{" + entry("a", "true", "0,4") + "}", 4, {"a", "true"});
    refuse_header("a shape beyond 64 bits", "{" + entry("a", "4611686018427387905,4", "0,16") + "}", 16,
                  {"a", "4611686018427387905", "memory"});
    refuse_header("a header that is a list", "[1]", 0, {"header"});
    refuse_header("a header of a million brackets", "{\"a\":" + std::string(1000000, '['), 0, {"levels deep"});

    // A header of more than 100 MB: a hole in a file takes no space on the disk.
    fs::copy(scratch("@/ours"), scratch("@/huge"));
    const uint64_t length = (100 << 20) + 1;
    write_bytes(scratch("@/huge/model.safetensors"), bytes_of(std::vector<uint64_t>{length}));
    fs::resize_file(scratch("@/huge/model.safetensors"), 8 + length);
    refuse("a header of more than 100 MB", "eval --from @/huge --data @/eval_50.bin",
           {"@/huge/model.safetensors", "104857601"});
    fs::resize_file(scratch("@/huge/config.json"), length);
    refuse("a config.json of more than 100 MB", "eval --from @/huge --data @/eval_50.bin",
           {"@/huge/config.json", "104857601"});

    // Halves at odd addresses; and very many names.
    write_bytes(scratch("@/odd.safetensors"),
                safetensors({{"a", "U8", {1}, "x"}, {"b", "BF16", {2}, bytes_of(std::vector<uint16_t>{0x3f80, 0xc000})},
                             {"c", "F16", {1}, bytes_of(std::vector<uint16_t>{0x3c00})}}));
    const Safetensors odd(scratch("@/odd.safetensors"));
    claim(odd.floats("b", {2}) == Floats{1, -2} && odd.floats("c", {1}) == Floats{1},
          "halves are read at odd addresses");
    constexpr int NAMES = 100000;
    std::string many = "{";
    for (int i = 0; i < NAMES; i++) many += (i ? "," : "") + entry(format("model.layers.%d.weight", i), "0", "0,0");
    write_bytes(scratch("@/many.safetensors"), file(many + "}", 0));
    const double began = processor_seconds();
    const Safetensors names(scratch("@/many.safetensors"));
    const double seconds = processor_seconds() - began;
    claim(names.entries().size() == NAMES && seconds < 10, "a header of 100,000 names is read in a second or so",
          format("%.2f s", seconds));
}

void test_bad_checkpoints() {
    need_our_folder();
    write_eval_shards();
    const std::string path = scratch("@/ours/model.safetensors"), whole = read_bytes(path);
    const size_t header = 8 + *reinterpret_cast<const uint64_t*>(whole.data());
    const size_t most = whole.size();
    for (size_t length : {size_t(0), size_t(7), size_t(8), size_t(100), header, header + 4, most / 2, most - 1})
        refuse_folder(format("model.safetensors cut to %zu of %zu bytes", length, most), "model.safetensors",
                      whole.substr(0, length), {});
    refuse_folder("a header that is not JSON", "model.safetensors", whole.substr(0, 8) + "?" + whole.substr(9), {"header"});

    const std::string name = "h.1.mlp.c_fc.bias";
    const size_t n = 4 * read_config(scratch("@/ours/config.json")).channels;   // its elements
    auto refuse_tensor = [&](const std::string& what, const std::function<void(RawTensor&)>& change, const Texts& named) {
        std::vector<RawTensor> tensors = raw_tensors(path);
        change(tensor_named(name, tensors));
        refuse_folder("a tensor " + what, "model.safetensors", safetensors(tensors), named);
    };
    auto put = [](float value) { return [=](RawTensor& t) { t.bytes.replace(40, 4, bytes_of(Floats{value})); }; };
    auto text = [](size_t number) { return std::to_string(number); };
    refuse_tensor("under another name", [](RawTensor& t) { t.name = "h.1.mlp.c_fc.offset"; }, {"h.1.mlp.c_fc.offset"});
    std::vector<RawTensor> fewer = raw_tensors(path);
    fewer.erase(std::find_if(fewer.begin(), fewer.end(), [&](const RawTensor& tensor) { return tensor.name == name; }));
    refuse_folder("a tensor that is missing", "model.safetensors", safetensors(fewer), {name, "missing"});
    refuse_tensor("of another shape", [&](RawTensor& t) { t.shape = {2, n / 2}; }, {name, "(2, " + text(n / 2), "(" + text(n)});
    refuse_tensor("that is too short", [&](RawTensor& t) { t.bytes.resize(4 * n - 4); }, {name, text(4 * n - 4), text(4 * n)});
    refuse_tensor("of another type", [](RawTensor& t) { t.dtype = "I32"; }, {name, "I32", "F32"});
    test_bad_shards(raw_tensors(path));
    test_bad_headers();
    std::vector<RawTensor> untied = raw_tensors(path);
    untied.push_back(tensor_named("wte.weight", untied));
    untied.back().name = "lm_head.weight";
    untied.back().bytes.replace(40, 4, bytes_of(Floats{1}));
    refuse_folder("a head of its own", "model.safetensors", safetensors(untied), {"lm_head.weight", "wte.weight"});
    for (const char* mask : {"h.9.attn.bias", "attn.bias", "h.0.attn.bias.attn.masked_bias", "x\x1b[31mred\ny"}) {
        std::vector<RawTensor> tensors = raw_tensors(path);
        tensors.push_back({mask, "U8", {4}, "1111"});
        refuse_folder("a tensor " + one_line(mask) + ", which is no mask", "model.safetensors", safetensors(tensors),
                      {"tensor " + one_line(mask) + " does not belong"});
    }
    refuse_tensor("with a NaN", put(NAN), {name, "nan", "element 10"});
    refuse_tensor("with an infinity", put(INFINITY), {name, "inf", "element 10"});
}

void test_bad_configs() {
    need_our_folder();
    write_eval_shards();
    const json config = read_json(scratch("@/ours/config.json"));
    auto with = [&](const char* key, const json& value) {
        json changed = config;
        changed[key] = value;
        return changed.dump();
    };
    auto refuse_config = [&](const std::string& what, const char* key, const json& value, const Texts& named) {
        refuse_folder("config.json with " + what, "config.json", with(key, value), named);
    };
    json incomplete = config;
    incomplete.erase("n_layer");
    refuse_folder("config.json that is not JSON", "config.json", "{\"n_layer\": ", {"JSON"});
    refuse_folder("config.json that is a list", "config.json", "[1, 2]", {});
    refuse_folder("config.json without n_layer", "config.json", incomplete.dump(), {"n_layer"});
    refuse_config("text for n_head", "n_head", "three", {});
    for (const json& value : {json(true), json(2.9), json(4294967298), json(-4294967295), json("3"), json(nullptr)})
        for (const char* key : {"n_head", "n_layer", "vocab_size"})
            refuse_config(value.dump() + " for " + key, key, value, {key, value.dump(), "a whole number"});
    refuse_folder("config.json a million levels deep", "config.json", std::string(1000000, '['), {"levels deep"});
    refuse_folder("config.json with a name that occurs twice", "config.json", "{\"n_head\": 1, \"n_head\": 2}",
                  {"n_head", "twice"});
    fs::copy(scratch("@/ours"), scratch("@/of_pipes"));
    fs::remove(scratch("@/of_pipes/config.json"));
    mkfifo(scratch("@/of_pipes/config.json").c_str(), 0600);
    refuse("a pipe for config.json", "eval --from @/of_pipes --data @/eval_50.bin",
           {"@/of_pipes/config.json", "not a regular file"});
    refuse_config("no heads", "n_head", 0, {"0 heads"});
    refuse_config("a negative number of layers", "n_layer", -1, {"-1 layers"});
    const int C = config.at("n_embd");
    refuse_config("a head size of 8", "n_head", C / 8, {format("%d channels over %d heads", C, C / 8), "16, 32"});
    refuse_config("another activation", "activation_function", "relu", {"activation_function", "relu", "gelu_new"});
    refuse_config("another kind of model", "model_type", "llama", {"model_type", "llama", "gpt2"});
    refuse_config("an untied head", "tie_word_embeddings", false, {"tie_word_embeddings"});
    refuse_config("an MLP of another width", "n_inner", 100, {"n_inner", "100", std::to_string(4 * C)});
    refuse_folder("fewer layers than config.json says", "config.json", with("n_layer", 9), {"h.3.", "missing"}, "model.safetensors");
    refuse_folder("more layers than config.json says", "config.json", with("n_layer", 2), {"h.2.", "2 layers"}, "model.safetensors");
}

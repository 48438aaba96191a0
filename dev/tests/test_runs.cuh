// Claims about command lines as a whole, a part of test_gpt.cu: runs that give the same bits, what they write, and how
// they end badly. Each is this program again, started with the arguments of train_gpt.
#pragma once

// ==== running train_gpt ======================================================
// `test_gpt --as-train-gpt ...` is train_gpt itself, so that a command line can be tested as a whole.

struct Outcome {
    int code;   // exit status, or -signal
    std::string out, err;
};

// What eval printed, but for its last line, the speed.
std::string but_for_speed(const Outcome& e) {
    return e.out.size() < 2 ? "" : e.out.substr(0, e.out.rfind('\n', e.out.size() - 2) + 1);
}

// What the program itself has said: on some processors the stand-in excuses itself for slow products.
std::string without_excuse(std::string text) {
#ifdef CUDA_ON_CPU
    const std::string excuse = cuda_cpu::excuse + std::string("\n");
    if (const size_t at = text.find(excuse); at != text.npos) text.erase(at, excuse.size());
#endif
    return text;
}

class Run {
public:
    // Words, of the command and of the environment, are separated by blanks; '' is an empty one; <FILE is standard
    // input, >FILE standard output. Files may be limited in size, like on a full disk. What runs keep for later runs
    // stays in the tests' folder.
    explicit Run(const std::string& command, const std::string& environment = "", size_t file_limit = RLIM_INFINITY) {
        std::vector<std::string> args = {"test_gpt", "--as-train-gpt"};
        std::istringstream words(command);
        std::string input = "/dev/null", output;
        for (std::string word; words >> word;) {
            if (word[0] == '<') input = scratch(word.substr(1));
            else if (word[0] == '>') output = scratch(word.substr(1));
            else args.push_back(word == "''" ? "" : scratch(word));
        }
        std::vector<std::string> variables;   // of two of a name the first counts
        std::istringstream own_variables(environment);
        for (std::string variable; own_variables >> variable;) variables.push_back(scratch(variable));
        variables.push_back("OMP_NUM_THREADS=1");   // tiny models: threads would only wait
        variables.push_back(scratch("XDG_CACHE_HOME=@/cache"));
        for (char** variable = environ; *variable; variable++)
            if (strncmp(*variable, "OMP_NUM_THREADS=", 16) != 0 && strncmp(*variable, "XDG_CACHE_HOME=", 15) != 0) variables.push_back(*variable);
        static int runs = 0;
        out_ = output.empty() ? scratch(format("@/stdout_%d", runs)) : output;
        own_out_ = output.empty();
        err_ = scratch(format("@/stderr_%d", runs++));
        const std::vector<char*> argv = pointers(args), envp = pointers(variables);
        pid_ = fork();
        if (pid_ < 0) throw Failure("fork: %s", strerror(errno));
        if (pid_ > 0) return;
        // Until exec nothing but system calls: OpenMP's and CUDA's threads have not come along.
        for (auto [path, number] : {std::pair{&out_, STDOUT_FILENO}, {&err_, STDERR_FILENO}})
            dup2(open(path->c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), number);
        dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
        const rlimit limit = {file_limit, file_limit};
        setrlimit(RLIMIT_FSIZE, &limit);
        signal(SIGXFSZ, SIG_IGN);   // then write() fails instead
        signal(SIGHUP, SIG_DFL);    // under nohup it would be ignored
        execve("/proc/self/exe", argv.data(), envp.data());
        _exit(127);
    }
    Run(const Run&) = delete;
    ~Run() {
        if (pid_ > 0) end(SIGKILL);
    }

    void send_signal(int number) const { kill(pid_, number); }
    // Whether the run has mapped a file.
    bool maps(const std::string& path) const {
        return read_bytes(format("/proc/%d/maps", pid_)).find(scratch(path)) != std::string::npos;
    }
    Outcome end(int number = 0) {
        if (number) send_signal(number);
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {}
        pid_ = 0;
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        const Outcome outcome = {code, own_out_ ? read_bytes(out_) : "", without_excuse(read_bytes(err_))};
        if (own_out_) fs::remove(out_);
        fs::remove(err_);
        return outcome;
    }

private:
    static std::vector<char*> pointers(std::vector<std::string>& texts) {
        std::vector<char*> found;
        for (std::string& text : texts) found.push_back(text.data());
        found.push_back(nullptr);
        return found;
    }

    pid_t pid_ = 0;
    std::string out_, err_;
    bool own_out_;
};

Outcome run(const std::string& command, const std::string& environment = "") { return Run(command, environment).end(); }

// A claim about a run; what the run printed matters when the claim fails.
void claim_run(bool holds, const std::string& text, const Outcome& run, const std::string& detail = "") {
    claim(holds, text, holds ? "" : format("exit code %d; %s%s%s", run.code, run.out.c_str(), run.err.c_str(), detail.c_str()));
}

// In place of the C library's: a run under test may be asked to write down what it flushes to disk, a line each, with the
// number of lines of the log and the checkpoints that are there at that moment.
extern "C" int fsync(int file) {
    if (const char* to = getenv("TEST_FSYNCS")) {
        const fs::path path = fs::read_symlink(format("/proc/self/fd/%d", file));
        const std::string bytes = fs::is_regular_file(path) ? read_bytes(path) : "";
        std::ofstream(to, std::ios::app) << path.filename().string() << ' ' << std::count(bytes.begin(), bytes.end(), '\n')
                                         << ' ' << list_checkpoints(path.parent_path()).size() << '\n';
    }
    return static_cast<int>(syscall(SYS_fsync, file));
}

// Waits for something that a run will do; false: it has not within a minute.
bool wait_until(const std::function<bool()>& true_now) {
    for (int i = 0; i < 60000; i++) {
        if (true_now()) return true;
        usleep(1000);
    }
    return false;
}

// A log without what differs from run to run: the first record (it names --out) and the times.
// Numbers stay as they were printed: 17 digits, so equal text is equal bits.
std::vector<std::string> log_of(const std::string& out) {
    std::vector<std::string> records;
    std::istringstream lines(read_bytes(scratch(out + "/log.jsonl")));
    for (std::string line; std::getline(lines, line);) {
        json record = json::parse(line, nullptr, false);
        if (!record.is_object() || record.contains("run")) continue;   // no object: it is just being written
        for (const char* key : {"ms", "tokens_per_s", "mfu", "hfu"}) record.erase(key);
        records.push_back(record.dump());
    }
    return records;
}

bool same_file(const std::string& a, const std::string& b) {
    const std::string bytes = read_bytes(scratch(a));
    return !bytes.empty() && bytes == read_bytes(scratch(b));
}

// Whether two checkpoints hold the same weights and the same optimizer state.
bool same_checkpoint(const std::string& a, const std::string& b) {
    return same_file(a + "/model.safetensors", b + "/model.safetensors") &&
           same_file(a + "/optimizer.safetensors", b + "/optimizer.safetensors");
}

// Starts @/OUT as the run in @/FROM was at a step: its checkpoint there, and its log.
void begin_from(const std::string& out, const std::string& from, const std::string& step) {
    fs::create_directory(scratch(out));
    fs::copy(scratch(from + step), scratch(out + step));
    fs::copy(scratch(from + "/log.jsonl"), scratch(out + "/log.jsonl"));
}

// Returns what is wrong with a checkpoint, or "" if every tensor can be read.
std::string damage(const std::string& dir) {
    try {
        const Config c = read_config(dir + "/config.json");
        const Safetensors model(dir + "/model.safetensors"), optimizer(dir + "/optimizer.safetensors");
        read_json(dir + "/trainer.json").at("next_window");
        for_each_parameter(c, [&](const ParameterRow& row, size_t, const std::string& name) {
            model.floats(name, row.shape);
            optimizer.floats("m/" + name, row.shape);
            optimizer.floats("v/" + name, row.shape);
        });
        return "";
    } catch (const std::exception& error) {
        return error.what();
    }
}

// Text to train on: three words in an order that is not quite random, so that there is something to learn.
const std::string SMALL = " --layers 2 --heads 2 --channels 32 --context 16 --data @/text.txt ";

void write_text() {
    std::string text;
    for (uint64_t i = 0, word = 0; text.size() < 3000; i++) {
        word = (word + splitmix64(i) % 2) % 3;
        text += word == 0 ? "the cat " : word == 1 ? "sat on " : "a mat\n";
    }
    write_bytes(scratch("@/text.txt"), text);
}

// A run that never ends by itself.
const std::string ENDLESS = "train" + SMALL + "--micro-batch 1 --steps 1000000 --schedule constant --eval-every 0 ";

const std::string TOKENIZER = "data/reference/tokenizer";

// @/words: a model of 800 tokens with the tokenizer of the reference, which has 757. @/numbers: the same without.
void need_words() {
    if (fs::exists(scratch("@/words"))) return;
    const std::string text = read_bytes(scratch("@/text.txt"));
    write_bytes(scratch("@/numbers.bin"), shard({text.begin(), text.end()}));
    run("train --layers 1 --heads 1 --channels 16 --context 64 --vocab 800 --steps 1 --data @/numbers.bin "
        "--eval-every 0 --out @/of_numbers");
    fs::rename(scratch("@/of_numbers/step_000001"), scratch("@/numbers"));
    fs::copy(scratch("@/numbers"), scratch("@/words"));
    fs::copy(TOKENIZER + "/tokenizer.json", scratch("@/words/tokenizer.json"));
}

// ==== runs: the same bits ====================================================

const std::string TEN = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 10 --lr 1e-2 --warmup 3 "
                        "--eval-every 5 --eval-sequences 4 --checkpoint-every 5 ";

// Several parts of the tests need @/first, this run's folder: the first one of them runs it.
void need_first_run() {
    if (!fs::exists(scratch("@/first"))) run(TEN + "--out @/first");
}

void test_repeated_runs() {
    const Outcome first = run(TEN + "--out @/first");
    const std::vector<std::string> log = log_of("@/first");
    claim_run(first.code == 0 && log.size() == 12, "a run of 10 steps logs 10 steps and 2 evaluations", first);
    if (log.size() != 12) return;
    auto loss = [&](size_t record) { return double(json::parse(log[record])["loss"]); };
    claim(loss(11 - 1) < loss(0) - 1, "its loss falls", format("from %f to %f", loss(0), loss(10)));

    auto same = [&](const std::string& command, const std::string& environment, const std::string& text) {
        const Outcome outcome = run(command + " --out @/other", environment);
        const bool same_files = same_checkpoint("@/first/step_000010", "@/other/step_000010");
        claim_run(outcome.code == 0 && log_of("@/other") == log && same_files, text, outcome);
        fs::remove_all(scratch("@/other"));
    };
    same(TEN, "", "the same command gives the same bits");
    same(TEN + "--recompute selective", "", "--recompute selective gives the same bits");
    same(TEN + "--recompute full", "", "--recompute full gives the same bits");
    same(TEN + "--sample-every 3 --sample-tokens 5", "", "sampling on the way changes no bit");
    same(TEN + "--graph off", "", "--graph off gives the same bits");
    same(TEN + "--graph on --sample-every 3 --sample-tokens 5", "", "--graph on gives the same bits");
#ifdef CUDA_ON_CPU
    if (WARP_SIZE > 1)
        for (const char* seed : {"CUDA_CPU_SEED=1", "CUDA_CPU_SEED=2"})
            for (const char* graph : {"", "--graph on"})
                same(TEN + graph, seed, format("another order of threads gives the same bits (%s%s)", seed, graph));
#endif
    begin_from("@/other", "@/first", "/step_000005");
    std::ofstream(scratch("@/other/log.jsonl"), std::ios::app) << "{\"step\": 11, \"lo";   // truncated by a crash
    same(TEN + "--resume --graph on", "", "stopped and resumed at step 5 it logs and saves the same bits as never stopped");

    begin_from("@/other", "@/first", "/step_000005");
    same("train --resume", "", "so it does with --resume and --out alone: the options are the run's");

    const json trainer = read_json(scratch("@/first/step_000010/trainer.json"));
    claim(trainer.at("step") == 10 && trainer.at("next_window") == 40 && damage(scratch("@/first/step_000010")).empty(),
          "a checkpoint knows its step and the next window");
}

// What a run without a master copy keeps are its weights, exactly; of updates that are too small nothing is left.
void test_runs_without_master() {
    if (!SEPARATE_MASTER) return;
    const std::string command = TEN + "--master-weights none ";
    const Outcome whole = run(command + "--out @/no_master");
    auto record = [&](const std::string& out, size_t line) { return json::parse(log_of(out)[line]); };
    bool logged = whole.code == 0;
    for (size_t line : {0, 4, 9}) logged = logged && record("@/no_master", line).value("unchanged", -1.0) > 0;
    claim_run(logged, "--master-weights none logs the share of weights that a step left as they were", whole);
    begin_from("@/half_master", "@/no_master", "/step_000005");
    run(command + "--resume --out @/half_master");
    claim(log_of("@/no_master") == log_of("@/half_master") && same_checkpoint("@/no_master/step_000010", "@/half_master/step_000010"), "stopped and resumed it logs and saves the same bits as never stopped");
    bool exact = true;
    const Safetensors file(scratch("@/no_master/step_000010/model.safetensors"));
    for (const auto& [name, entry] : file.entries())
        for (float x : file.floats(name, entry.shape)) exact = exact && static_cast<float>(floatX(x)) == x;
    claim(exact, "the model in its checkpoint is in 16 bits, exactly");

    // LayerNorm's weights begin at 1, whose neighbours in BF16 are 2^-8 below and 2^-7 above.
    const std::string slow = "train" + SMALL + "--micro-batch 2 --eval-every 0 --schedule constant --lr 1e-4 --steps 3 ";
    const Outcome without = run(slow + "--master-weights none --out @/slow"), with = run(slow + "--out @/slow_copy");
    auto ones = [&](const std::string& out) {
        const Floats values = read_floats(Safetensors(scratch(out + "/step_000003/model.safetensors")), "ln_f.weight");
        return std::count(values.begin(), values.end(), 1.0f);
    };
    claim_run(without.code == 0 && ones("@/slow") == 32 && record("@/slow", 2).value("unchanged", 0.0) > 0.1,
              "updates that are too small change no weight without a copy, and are counted", without);
    claim_run(with.code == 0 && ones("@/slow_copy") < 32, "and change the copy where there is one", with);
}

void test_resume_options() {
    need_first_run();
    fs::copy(scratch("@/first"), scratch("@/longer"), fs::copy_options::recursive);
    const Outcome longer = run("train --resume --out @/longer --steps 12 --lr 0.005 --eval-every 0");
    const std::vector<std::string> log = log_of("@/longer");
    const json options = read_json(scratch("@/longer/step_000012/trainer.json"))["options"];
    claim_run(longer.code == 0 && log.size() == 14 && options["lr"] == 0.005 && options["warmup"] == 3 &&
                  longer.out.find("resume     --lr was 0.01, is now 0.005\n") != std::string::npos &&
                  longer.out.find("resume     --steps was 10, is now 12\n") != std::string::npos &&
                  longer.out.find("--warmup") == std::string::npos,
              "what is given beside --resume replaces the run's option, and is said", longer);
    const Outcome equal = run("train --resume --out @/longer --steps 13 --layers 2 --heads 2 --vocab 256");
    claim_run(equal.code == 0, "the model's own sizes may be given beside --resume", equal);
    write_bytes(scratch("@/less.txt"), read_bytes(scratch("@/text.txt")).substr(0, 2000));
    const Outcome less = run("train --resume --out @/longer --steps 14 --data @/less.txt");
    claim_run(less.code == 0 && equal.out.find("tokens to train on, now") == std::string::npos &&
                  less.out.find("resume     there were 3004 tokens to train on, now there are 2000\n") != std::string::npos,
              "going on with other data is said", less);
    const std::string path = scratch("@/longer/step_000014/trainer.json");
    json older = read_json(path);
    older["options"]["eval-batches"] = 20;   // an option that there was
    older.erase("train_tokens");
    write_json(path, older);
    const Outcome of_older = run("train --resume --out @/longer --steps 15");
    claim_run(of_older.code == 0 &&
                  of_older.out.find("resume     --eval-batches was 20, is no option any more\n") != std::string::npos,
              "a checkpoint with an option that is gone can be gone on from, and it is said", of_older);
    fs::remove_all(scratch("@/longer"));
}

// The beginning of a run that goes on from step 5 of @/scaled, whose checkpoint there is given this scale.
void resume_scaled(const std::string& to, long scale, long skipped = 0) {
    begin_from(to, "@/scaled", "/step_000005");
    const std::string path = scratch(to + "/step_000005/trainer.json");
    json trainer = read_json(path);
    trainer["loss_scaling"]["scale"] = scale;
    trainer["loss_scaling"]["skipped_steps"] = skipped;
    write_json(path, trainer);
}

void test_loss_scaling_runs() {
    const Outcome scaled = run(TEN + "--loss-scaling dynamic --out @/scaled");
    const std::vector<std::string> log = log_of("@/scaled");
    auto state = [](const std::string& dir) { return read_json(scratch(dir + "/trainer.json")).value("loss_scaling", json()).dump(); };
    const std::string expected = "{\"scale\":65536,\"good_steps\":10,\"skipped_steps\":0}";
    claim_run(scaled.code == 0 && scaled.out.find("loss scale 65536 at first, dynamic\n") != scaled.out.npos && state("@/scaled/step_000010") == expected &&
                  json::parse(log[0])["loss_scale"] == 65536 && json::parse(log[4]).contains("zero_gradients"),
              "--loss-scaling dynamic: the log and checkpoints have the scale", scaled, state("@/scaled/step_000010"));
    resume_scaled("@/scaled_again", 65536);
    const Outcome again = run("train --resume --out @/scaled_again");
    claim_run(again.code == 0 && log_of("@/scaled_again") == log && state("@/scaled_again/step_000010") == expected &&
                  same_file("@/scaled/step_000010/model.safetensors", "@/scaled_again/step_000010/model.safetensors"),
              "stopped and resumed it gives the same bits, and the same scale", again);

    resume_scaled("@/skipped_all", 65536, 5);
    const Outcome skipped_all = run("train --resume --out @/skipped_all");
    claim_run(skipped_all.code == 0 && json::parse(log_of("@/skipped_all")[7])["skipped_steps"] == 5 &&
                  !same_file("@/scaled/step_000010/model.safetensors", "@/skipped_all/step_000010/model.safetensors"),
              "AdamW does not count the steps that the checkpoint says were skipped", skipped_all);

    // A run without, gone on with by default as a build of another precision would.
    need_first_run();
    const bool by_default = FLOATX == DType::FP16;
    claim((state("@/first/step_000010") == expected) == by_default && (json::parse(log_of("@/first")[0]).contains("loss_scale")) == by_default,
          "by default gradients are scaled in FP16, and not otherwise");
    fs::copy(scratch("@/first"), scratch("@/unscaled"), fs::copy_options::recursive);
    json trainer = read_json(scratch("@/unscaled/step_000010/trainer.json"));
    trainer.erase("loss_scaling");
    write_json(scratch("@/unscaled/step_000010/trainer.json"), trainer);
    const Outcome other = run("train --resume --out @/unscaled --steps 11 --loss-scaling dynamic");
    claim_run(other.code == 0 && state("@/unscaled/step_000011") == "{\"scale\":65536,\"good_steps\":1,\"skipped_steps\":0}",
              "from a checkpoint without a scale a run goes on with the first one", other);

    const Outcome fixed = run(TEN + "--loss-scaling 128 --out @/fixed"), none = run(TEN + "--loss-scaling none --out @/none");
    const bool same_bits = same_checkpoint("@/fixed/step_000010", "@/none/step_000010");
    claim_run(fixed.code == 0 && none.code == 0 && same_bits == (FLOATX != DType::FP16) && state("@/fixed/step_000010") == "null",
              "--loss-scaling 128 and none: in BF16 and FP32 the same bits, in FP16 others", fixed, none.err);

    if (FLOATX != DType::FP16) return;   // for what overflows
    resume_scaled("@/overflows", 1 << 24);
    const Outcome overflows = run("train --resume --out @/overflows --graph on --steps 15");
    long skipped = 0;
    double scale = 1 << 24;
    bool right = overflows.code == 0;
    for (const std::string& line : log_of("@/overflows")) {
        const json record = json::parse(line);
        if (record["step"] <= 5 || !record.contains("norm")) continue;
        right = right && record["loss_scale"] == scale;
        if (record["norm"].is_null()) {
            scale /= 2;
            skipped++;
        }
        right = right && record["skipped_steps"] == skipped;
    }
    claim_run(right && skipped > 0 && skipped < 10 &&
                  state("@/overflows/step_000015") == format("{\"scale\":%.0f,\"good_steps\":%ld,\"skipped_steps\":%ld}", scale, 10 - skipped, skipped),
              "a scale that is too large: steps are skipped until it is not", overflows, format("%ld skipped", skipped));
    const Outcome ends = run(TEN + "--loss-scaling 16777216");
    claim_run(ends.code == 1 && ends.err.find("gradient norm") != ends.err.npos, "where it is fixed the run ends", ends);
}

// Weights that stay what they are, with a learning rate of 0.
void test_eval_sequences() {
    std::vector<double> losses;
    bool right = true;
    for (int B : {1, 3, 4}) {
        const std::string out = format("@/sequences_%d", B);
        const Outcome outcome = run("train" + SMALL + format("--micro-batch %d --steps 1 --lr 0 --min-lr 0 ", B) +
                                    "--eval-every 1 --eval-sequences 7 --checkpoint-every 0 --out " + out);
        right = right && outcome.out.find(format(" over %d tokens\n", 7 * 16)) != std::string::npos;
        const std::vector<std::string> log = log_of(out);
        losses.push_back(log.empty() ? NAN : json::parse(log.back()).value("val_loss", NAN));
    }
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;   // as in test_evaluation
    const double most = std::max(fabs(losses[1] / losses[0] - 1), fabs(losses[2] / losses[0] - 1));
    claim(right && most < tolerance, "--eval-sequences 7 is the same loss by micro-batches of 1, 3 and 4",
          format("%.9f %.9f %.9f", losses[0], losses[1], losses[2]));
}

// The same tokens in the same order, split differently: sums in another order. In BF16 a matmul of
// another shape may round now and then the other way, and AdamW's first steps carry that on.
void test_accumulation() {
    const double tolerance = FLOATX == DType::FP32 ? 1e-5 : 2e-3;
    std::vector<Floats> losses;
    for (int B : {8, 4, 1}) {
        const std::string out = format("@/split_%d", B);
        run("train" + SMALL + format("--micro-batch %d --total-batch 128 --shuffle no --steps 5 --lr 3e-3 ", B) +
            "--eval-every 0 --checkpoint-every 0 --out " + out);
        losses.emplace_back();
        for (const std::string& record : log_of(out)) losses.back().push_back(json::parse(record)["loss"]);
    }
    Farthest farthest;
    farthest.see("2 x 4", relative_l2(losses[1], losses[0]), tolerance);
    farthest.see("8 x 1", relative_l2(losses[2], losses[0]), tolerance);
    farthest.claim_near("losses of 1 x 8, 2 x 4 and 8 x 1 sequences a step agree");
}

// ==== runs: threads ==========================================================

// Large enough that a matmul is shared by the CPU's threads.
const std::string SHARED = "train --layers 1 --heads 2 --channels 64 --context 64 --micro-batch 8 --data @/text.txt "
                           "--steps 3 --lr 1e-2 --eval-every 0 --checkpoint-every 3 ";

void test_threads() {
    if (!device.is_cpu()) return;
    // libgomp names each thread of a team.
    const std::string names = "OMP_DISPLAY_AFFINITY=true OMP_AFFINITY_FORMAT=%n_of_%N";
    const Outcome one = run(SHARED + "--threads 1 --out @/threads_1", names);
    const Outcome two = run(SHARED + "--threads 2 --out @/threads_2", names);
    claim_run(two.err.find("1_of_2") != std::string::npos && one.err.find("1_of_") == std::string::npos,
              "--threads 2 runs on 2 threads, --threads 1 on 1", two, one.err);
    claim_run(same_checkpoint("@/threads_1/step_000003", "@/threads_2/step_000003") && log_of("@/threads_1") == log_of("@/threads_2"), "both give the same bits", two, one.err);
}

void test_busy_machine() {
    claim(busy_text(0).empty() && busy_text(0.09).empty(), "nothing is said of a quiet machine");
    claim(busy_text(0.344).find("34 %") != std::string::npos,
          "of a busy one, which share of their time threads waited for a core", busy_text(0.344));
}

// ==== runs: matmul tuning ====================================================
// A GPU has a choice of its own. On a CPU the stand-in offers one where it is asked to: algorithms that
// cannot be used, that fail, that must not be used, and slow ones, before the good ones.

const std::string CHOICE = "CUDA_CPU_MATMULS=refused,slow,in_place,failing,plain,fast ";
const std::string OF_TWO = "CUDA_CPU_MATMULS=plain,fast ";   // where it does not matter which: sooner timed
const std::string KEPT = "@/tuning/gpt.cu/matmul.json";
const std::string TUNED = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 4 --lr 1e-2 --eval-every 2 --checkpoint-every 0 ";

struct TunedRun {
    Outcome outcome;
    std::string line;                // what it says of matmuls
    std::vector<std::string> log;
    Floats losses;
};

TunedRun tuned_run(const std::string& flags, const std::string& environment) {
    TunedRun r = {run(TUNED + flags + " --out @/tuned", environment + " XDG_CACHE_HOME=@/tuning"), "", log_of("@/tuned"), {}};
    for (const std::string& record : r.log) r.losses.push_back(json::parse(record).value("loss", 0.0));
    std::istringstream lines(r.outcome.out);
    for (std::string line; std::getline(lines, line);)
        if (line.rfind("matmul ", 0) == 0) r.line += line + "\n";
    fs::remove_all(scratch("@/tuned"));
    return r;
}

std::string tuned_shapes(size_t timed, size_t known) {
    return timed == 0 ? format(" %zu shapes known from ", known) : format(" %zu shapes timed in ", timed);
}

// Files with which nothing can be done, and what is said of each.
void test_damaged_choices(const std::string& intact, const Floats& expected, double tolerance) {
    const json file = json::parse(intact);
    const std::string here = tuning_device(), algorithm = file["devices"][here].begin().value();
    auto replaced = [&](const std::string& part, const std::string& by) {
        std::string text = intact;
        return text.replace(text.find(part), part.size(), by);
    };
    const std::pair<std::string, const char*> DAMAGED[] = {
        {intact.substr(0, intact.size() / 2), "not valid JSON"}, {"", "the file is empty"}, {"[1, 2]", "type"},
        {replaced("\"format\": 1", "\"format\": 2"), "not of format 1"}, {replaced(algorithm, algorithm.substr(1)), "is no algorithm"},
        {replaced(algorithm, "x" + algorithm.substr(1)), "is no algorithm"}, {R"({"format": 1, "devices": [{}]})", "is no object"},
        {"{\"format\": 1, \"devices\": {\"" + here + "\": \"" + algorithm + "\"}}", "is no object"}, {R"({"format": 1})", "devices"},
        {"", "not a regular file"}};
    std::string wrong;
    for (const auto& [bytes, why] : DAMAGED) {
        write_bytes(scratch(KEPT), bytes);
        if (why == std::string("not a regular file")) {   // a pipe, into which nobody writes
            fs::remove(scratch(KEPT));
            mkfifo(scratch(KEPT).c_str(), 0600);
        }
        const TunedRun r = tuned_run("", OF_TWO);
        const bool told = r.line.find(scratch("matmul     " + KEPT)) == 0 && r.line.find(why) != r.line.npos &&
                          std::count(r.line.begin(), r.line.end(), '\n') == 2 && r.outcome.err.empty();
        const json after = json::parse(read_bytes(scratch(KEPT)), nullptr, false);
        const bool mended = after.is_object() && after["devices"][here].size() == file["devices"][here].size();
        if (r.outcome.code != 0 || !told || !mended || !(relative_l2(r.losses, expected) <= tolerance)) wrong += why + std::string(": ") + r.line + r.outcome.err;
    }
    claim(wrong.empty(), format("%zu damaged files of choices are told of in a line, ignored and replaced", std::size(DAMAGED)), wrong);
}

#ifdef CUDA_ON_CPU
// GELU' of the product before it: a kernel's name in the trace tells where it was.
void test_forced_fusion(json file) {
    auto kernels = [&](const char* choice) {
        for (auto& [shape, text] : file["devices"][tuning_device()].items())
            if (ends_with(shape, FUSION)) text = choice;
        write_bytes(scratch(KEPT), file.dump());
        tuned_run("--trace @/fusion.json", CHOICE);
        const std::string trace = read_bytes(scratch("@/fusion.json"));
        size_t count = 0;
        for (size_t at = 0; (at = trace.find("\"gelu_backward\"", at)) != trace.npos; at++) count++;
        return count;
    };
    const size_t fused = kernels(FUSED), apart = kernels(APART);
    claim(fused == 0 && apart > 0, "GELU' is in the product or behind it, as the file says",
          format("%zu and %zu launches of gelu_backward", fused, apart));
}

// That a choice is really taken shows in the rounding of one that clears the last bits of its sums.
void test_forced_choice(json file, double tolerance) {
    test_forced_fusion(file);
    auto all = [&](cuda_cpu::Algorithm algorithm) {
        for (auto& [shape, text] : file["devices"][tuning_device()].items())
            text = ends_with(shape, FUSION) ? FUSED : algorithm_text({{static_cast<uint64_t>(algorithm)}});
        write_bytes(scratch(KEPT), file.dump());
        return tuned_run("", CHOICE);
    };
    const TunedRun plain = all(cuda_cpu::Algorithm::plain), coarse = all(cuda_cpu::Algorithm::coarse);
    const TunedRun fast = all(cuda_cpu::Algorithm::fast);
    const double error = relative_l2(plain.losses, coarse.losses);
    claim(plain.log != coarse.log && error <= tolerance, "the algorithms of the file are those that multiply",
          format("error %.2e, limit %.2e", error, tolerance));
    const TunedRun ruled_out = tuned_run("", "CUDA_CPU_MATMULS=slow,in_place"), usable = tuned_run("--matmul-tuning off", "CUDA_CPU_MATMULS=refused,plain");
    claim(ruled_out.outcome.code == 0 && ruled_out.line.empty(), "sums in the output's place are no choice", ruled_out.line);
    claim_run(usable.log == plain.log, "with --matmul-tuning off the first algorithm that can be used multiplies", usable.outcome);
    const TunedRun none = tuned_run("", "");
    claim(none.line.empty() && none.log == fast.log, "where there is one algorithm only, none is chosen and no file is read", none.line);
    const std::string EVAL_TUNED = "eval --from @/first/step_000010 --data @/text.txt --micro-batch 3 ";
    const Outcome tuned = run(EVAL_TUNED, OF_TWO), first = run(EVAL_TUNED + "--matmul-tuning off");
    double losses[2] = {NAN, NAN};
    sscanf(tuned.out.c_str(), "loss %lf", &losses[0]);
    sscanf(first.out.c_str(), "loss %lf", &losses[1]);
    claim_run(tuned.code == 0 && tuned.err.find("shapes timed") != tuned.err.npos && fabs(losses[0] - losses[1]) <= tolerance * losses[1],
              "eval tunes as well, and prints its result alone on standard output", tuned);
}
#else
void test_forced_choice(json, double) {}
#endif

void test_matmul_tuning() {
    need_first_run();
    const double tolerance = FLOATX == DType::FP32 ? 1e-5 : 2e-3;   // as in test_accumulation
    const TunedRun off = tuned_run("--matmul-tuning off", "");
    // Under a seed all memory begins as NaN: a gradient that tuning has left behind would show.
    const TunedRun on = tuned_run("", CHOICE + "CUDA_CPU_SEED=1");
    const std::string intact = read_bytes(scratch(KEPT));
    const json file = json::parse(intact, nullptr, false);
    const size_t shapes = file.is_object() ? file["devices"][tuning_device()].size() : 0;
    claim(off.line.empty() && off.losses.size() == 6, "with --matmul-tuning off nothing is timed", off.line);
    // A block's four matmuls and the head: once forward, twice backward; one of them with GELU' in it and without, and
    // which of both. On a GPU some may have one algorithm only.
    claim_run(on.outcome.code == 0 && (device.is_cpu() ? shapes == 17 : shapes > 0) &&
                  on.line.find(tuned_shapes(shapes, 0)) != on.line.npos,
              "with it each shape is timed once, and kept in a file", on.outcome);
    if (shapes == 0) return;
    const double error = relative_l2(on.losses, off.losses);
    claim(error <= tolerance, "losses with the fastest algorithms are those with the first ones, up to rounding", format("error %.2e, limit %.2e", error, tolerance));
#ifdef CUDA_ON_CPU
    bool sensible = true;
    for (const auto& [shape, text] : file["devices"][tuning_device()].items()) {
        if (ends_with(shape, FUSION)) continue;
        const auto algorithm = static_cast<cuda_cpu::Algorithm>(parse_algorithm(text).data[0]);
        sensible = sensible && (algorithm == cuda_cpu::Algorithm::plain || algorithm == cuda_cpu::Algorithm::fast);
    }
    claim(sensible, "none is slow, fails, cannot be used, or sums in the output's place", sensible ? "" : intact);
#endif
    const TunedRun again = tuned_run("", CHOICE);
    claim_run(again.log == on.log && again.line.find(tuned_shapes(0, shapes)) != again.line.npos && read_bytes(scratch(KEPT)) == intact,
              "a second run times nothing, takes what is kept, and gives the same bits", again.outcome);

    test_damaged_choices(intact, off.losses, tolerance);

    // Of another version, and of this one but for an algorithm that this one does not have.
    json other = file, foreign = file;
    foreign["devices"]["another, 9.0, cuBLASLt 1"] = foreign["devices"][tuning_device()];
    foreign["devices"].erase(tuning_device());
    write_bytes(scratch(KEPT), foreign.dump());
    const TunedRun anew = tuned_run("", OF_TWO);
    const json both = json::parse(read_bytes(scratch(KEPT)));
    claim_run(anew.line.find("matmul.json: holds nothing for " + tuning_device() + ": ignored\n") != anew.line.npos &&
                  anew.line.find(tuned_shapes(shapes, 0)) != anew.line.npos && relative_l2(anew.losses, off.losses) <= tolerance,
              "choices of another device or version are told of, and not taken", anew.outcome);
    claim(both["devices"].size() == 2 && both["devices"]["another, 9.0, cuBLASLt 1"] == foreign["devices"]["another, 9.0, cuBLASLt 1"],
          "and are still there when this device's have joined them");
    other["devices"][tuning_device()].begin().value() = std::string(128, 'f');
    write_bytes(scratch(KEPT), other.dump());
    const TunedRun one = tuned_run("", CHOICE);
    claim_run(one.line.find(tuned_shapes(1, 0)) != one.line.npos && one.line.find(format("%zu known", shapes - 1)) != one.line.npos &&
                  relative_l2(one.losses, off.losses) <= tolerance, "an algorithm that the device does not have is timed for anew", one.outcome);

    const std::string text = read_bytes(scratch("@/text.txt"));
    const Outcome unkept = run(TUNED, OF_TWO + "XDG_CACHE_HOME=@/text.txt");
    claim_run(unkept.code == 0 && unkept.err.empty() && unkept.out.find("the choice is not kept\n") != unkept.out.npos && read_bytes(scratch("@/text.txt")) == text,
              "where the file cannot be written a line says so, and the run goes on", unkept);
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(scratch("@/tuning/gpt.cu"))) files += entry.is_regular_file();
    claim(files == 1, "nothing unfinished is left beside the file");
    test_forced_choice(file, tolerance);
}

// ==== runs: what they write ==================================================

void test_auto_micro_batch() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch auto --total-batch 112 --steps 1");
    claim_run(outcome.code == 0 && outcome.out.find("7 x 16 tokens x 1 micro-batches = 112 tokens") != outcome.out.npos,
              "--micro-batch auto takes as many sequences as fit and divide the step", outcome);
}

void test_log() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch 2 --steps 3 --eval-every 3 --checkpoint-every 1 --keep 1 --out @/log");
    std::istringstream lines(read_bytes(scratch("@/log/log.jsonl")));
    std::vector<json> records;
    for (std::string line; std::getline(lines, line);) records.push_back(json::parse(line, nullptr, false));
    bool right = outcome.code == 0 && records.size() == 5;
    auto has = [](const json& record, std::vector<const char*> keys) {
        bool all = record.is_object();
        for (const char* key : keys) all = all && record.contains(key);
        return all;
    };
    right = right && has(records[0], {"run"});
    right = right && has(records[0]["run"], {"options", "model", "device", "cuda_runtime", "cuda_driver", "cublaslt"});
    for (size_t i = 1; right && i < 4; i++)
        right = has(records[i], {"step", "loss", "norm", "lr", "ms", "tokens_per_s", "mfu", "hfu"}) && records[i]["step"] == i;
    right = right && has(records[4], {"step", "val_loss"}) && records[4]["step"] == 3;
    claim_run(right, "log.jsonl holds the run, its steps and its evaluations, an object a line", outcome);
    claim(right && records[0]["run"]["options"]["micro-batch"] == 2 && records[0]["run"]["model"]["vocab"] == 256,
          "its first object holds options and model as they were");
    const auto kept = list_checkpoints(scratch("@/log"));
    claim(kept.size() == 1 && kept.count(3), "--keep 1 keeps the last checkpoint");
}

// A log into which a disk or a hand has written what no run did.
void test_damaged_log() {
    need_first_run();
    fs::create_directory(scratch("@/scarred"));
    fs::copy(scratch("@/first/step_000005"), scratch("@/scarred/step_000005"));
    const std::string log = read_bytes(scratch("@/first/log.jsonl"));
    const size_t first_end = log.find('\n') + 1;
    const std::string deep(1000000, '[');
    const std::vector<std::string> damaged = {"{\"step\": \"3\"}", "{\"step\": -1}", "{\"step\": 1e300}", "{\"step\": 2.5}", "[4]", deep,
                           "{\"\xff\": 1}", "{\"step\": 1, \"step\": 2}", "", "{\"step\": 18446744073709551617}"};
    std::string lines;
    for (const std::string& line : damaged) lines += line + "\n";
    write_bytes(scratch("@/scarred/log.jsonl"), log.substr(0, first_end) + lines + log.substr(first_end) + "{\"st");
    const Outcome resumed = run("train --resume --out @/scarred");
    claim_run(resumed.code == 0 && log_of("@/scarred") == log_of("@/first") &&
                  resumed.out.find(scratch("resume     @/scarred/log.jsonl: 10 damaged lines are left out, line 2: ")) !=
                      std::string::npos,
              "--resume leaves out of the log what is damaged, and says so", resumed);
    fs::remove_all(scratch("@/scarred/step_000010"));
    write_bytes(scratch("@/scarred/log.jsonl"), "{\"run\": " + log.substr(first_end));
    const Outcome headless = run("train --resume --out @/scarred");
    const std::string mended = read_bytes(scratch("@/scarred/log.jsonl"));
    claim_run(headless.code == 0 && json::parse(mended.substr(0, mended.find('\n')), nullptr, false).contains("run"),
              "a log whose first line is damaged has one again that holds the run", headless);
    for (const std::string& line : damaged) {
        fs::create_directory(scratch("@/no_run_yet"));
        write_bytes(scratch("@/no_run_yet/log.jsonl"), line + "\n");
        const Outcome refused = run("train --resume --data @/text.txt --out @/no_run_yet --steps 1");
        claim_run(refused.code == 2 && refused.err.find(scratch("@/no_run_yet/log.jsonl: line 1")) != std::string::npos &&
                      read_bytes(scratch("@/no_run_yet/log.jsonl")) == line + "\n",
                  format("a first line that holds no options (%s) is named, and nothing is touched",
                         one_line(line.substr(0, 10)).c_str()), refused);
    }
}

// The power may fail at any time: what a checkpoint's steps logged must be on disk before it is a checkpoint.
void test_log_on_disk() {
    const Outcome outcome = run("train" + SMALL + "--micro-batch 1 --steps 2 --eval-every 0 --checkpoint-every 1 --out @/synced",
                                "TEST_FSYNCS=@/fsyncs");
    std::istringstream lines(read_bytes(scratch("@/fsyncs")));
    std::vector<std::string> of_log;
    for (std::string line; std::getline(lines, line);)
        if (line.rfind("log.jsonl ", 0) == 0) of_log.push_back(line);
    claim_run(outcome.code == 0 && of_log == std::vector<std::string>{"log.jsonl 2 0", "log.jsonl 3 1"},
              "the log is flushed to disk before each checkpoint is there", outcome,
              read_bytes(scratch("@/fsyncs")));
}

// The lines of steps that a run draws on a terminal of so many columns; empty where no terminal can be had.
std::vector<std::string> drawn_steps(const std::string& command, unsigned short columns) {
    const int outside = posix_openpt(O_RDWR | O_NOCTTY);
    const winsize size = {24, columns, 0, 0};
    const bool there = outside >= 0 && grantpt(outside) == 0 && unlockpt(outside) == 0 &&
                       ioctl(outside, TIOCSWINSZ, &size) == 0;
    const int inside = there ? open(ptsname(outside), O_RDWR | O_NOCTTY) : -1;   // so that it is open until the end
    std::vector<std::string> lines;
    if (inside < 0) return lines;
    Run run(command + " >" + ptsname(outside));
    std::string text;
    pollfd ready = {outside, POLLIN, 0};
    char part[4096];
    while (text.find("next ") == text.npos && poll(&ready, 1, 60000) > 0) {
        const ssize_t n = read(outside, part, sizeof(part));
        if (n <= 0) break;
        text.append(part, n);
    }
    run.end();
    close(inside);
    close(outside);
    std::istringstream drawn(text);
    for (std::string line; std::getline(drawn, line, '\r');) {
        const size_t end = line.find("\033[K");
        if (end != line.npos && line.rfind("step", 0) == 0) lines.push_back(line.substr(0, end));
    }
    return lines;
}

void test_terminal_width() {
    const std::string COMMAND = "train" + SMALL + "--micro-batch 2 --steps 4 --eval-every 0";
    for (const auto& [columns, least, shown, gone] :
         {std::tuple{200, 80, "left", "\n"}, {80, 60, "tok/s", "[#"}, {40, 25, "loss", "MFU"}, {12, 5, "step", "loss"}}) {
        const std::vector<std::string> lines = drawn_steps(COMMAND, columns);
        if (lines.empty()) {
            printf("        no pseudo-terminal can be had here: %s\n", strerror(errno));
            return;
        }
        std::string wrong;
        for (const std::string& line : lines)
            if (line.size() >= static_cast<size_t>(columns) || line.size() < static_cast<size_t>(least) ||
                line.find(shown) == line.npos || line.find(gone) != line.npos)
                wrong += "'" + line + "' ";
        claim(wrong.empty() && lines.size() >= 2, format("the line of steps fits a terminal of %d columns", columns),
              wrong);
    }
    const Outcome piped = run(COMMAND);
    claim_run(piped.out.find("step 1/4 [#####...............] loss") != piped.out.npos &&
                  piped.out.find("left\n") != piped.out.npos && piped.out.find('\r') == piped.out.npos,
              "elsewhere it is whole, a line at a time", piped);
}

// The commands that a run names at its end, by the first word of their lines.
std::map<std::string, std::string> next_commands(const std::string& out) {
    std::map<std::string, std::string> commands;
    std::istringstream lines(out.substr(std::min(out.size(), out.find("\ndone "))));
    for (std::string line; std::getline(lines, line);)
        if (line.size() > 11) commands[line.substr(0, line.find("  "))] = line.substr(11);
    return commands;
}

void test_next_commands() {
    fs::create_directory(scratch("@/my"));
    Run interrupted(ENDLESS + "--checkpoint-every 0 --beta2 0.99 --out @/my/it's");
    wait_until([] { return log_of("@/my/it's").size() >= 3; });
    const Outcome stopped = interrupted.end(SIGINT);
    auto next = next_commands(stopped.out);
    const std::string checkpoint = scratch(format("@/my/it's/step_%06zu", log_of("@/my/it's").size()));
    claim_run(stopped.code == 0 && next.size() == 5 &&
                  next["sample"] == "test_gpt sample --from " + shell_word(checkpoint) &&
                  next["plot"] == "python3 scripts/plot.py " + shell_word(scratch("@/my/it's")) &&
                  next["open"].rfind("python3 ", 0) == 0 &&
                  next["open"].find(shell_word(checkpoint)) != std::string::npos,
              "a run that was stopped names the commands that sample, plot and open its last checkpoint", stopped);
    // The shell reads the command; the program is this one, the number of steps one that can be reached.
    const std::string go_on = next["go on"], words = go_on.substr(std::min(go_on.size(), strlen("test_gpt ")));
    const size_t steps = log_of("@/my/it's").size() + 2;
    const std::string command = format("XDG_CACHE_HOME=%s /proc/%d/exe --as-train-gpt %s --steps %zu > %s 2>&1",
                                       scratch("@/cache").c_str(), getpid(), words.c_str(), steps,
                                       scratch("@/went_on").c_str());
    const int status = system(command.c_str());
    const Outcome went_on = {status, read_bytes(scratch("@/went_on")), go_on};
    claim_run(status == 0 && log_of("@/my/it's").size() == steps && go_on.find("--resume") != go_on.npos &&
                  went_on.out.find("resume     --steps was") != std::string::npos &&
                  went_on.out.find("resume     --beta2 was") == std::string::npos,
              "and the one that goes on with it does, by the same options", went_on);
    claim_run(next_commands(went_on.out).count("go on") == 0, "a run that is done is not gone on with", went_on);
    const Outcome nowhere = run("train" + SMALL + "--steps 1");
    claim_run(next_commands(nowhere.out).size() == 2 && next_commands(nowhere.out).count("next"),
              "without --out a line says what it would have made possible", nowhere);
    need_words();
    const Outcome numbers = run("train --from @/numbers --data @/numbers.bin --steps 1 --out @/more_numbers");
    const std::string sample = next_commands(numbers.out)["sample"];
    const std::string options = sample.substr(std::min(sample.size(), strlen("test_gpt sample ")));
    const Outcome sampled = run("sample --sample-tokens 2 " + options);
    claim_run(sampled.code == 0 && sample.find("--prompt-tokens 799") != sample.npos,
              "of a model without text the sample's prompt is a token", sampled, sample);
}

void test_plan_json() {
    const Outcome outcome = run("plan --model gpt2 --micro-batch 4 --recompute full --gpu-memory 80GB --json");
    const json plan = json::parse(outcome.out, nullptr, false);
    bool right = outcome.code == 0 && plan.is_object() && plan.value("parameters", 0) == 124439808;
    const json leaves = plan.flatten();
    for (const char* path : {"/bytes/weights", "/bytes/gradients", "/bytes/master", "/bytes/adam_m", "/bytes/adam_v",
                             "/bytes/activations", "/bytes/workspace", "/bytes/total", "/bytes_per_parameter",
                             "/flops_per_token/model", "/flops_per_token/hardware", "/max_micro_batch/none",
                             "/max_micro_batch/selective", "/max_micro_batch/full", "/tensors/0/name",
                             "/tensors/0/shape/0", "/tensors/0/dtype", "/tensors/0/bytes"})
        right = right && leaves.contains(path);
    claim_run(right, "plan --json has the keys that it promises", outcome);
    if (!right) return;
    const json &bytes = plan["bytes"], &most = plan["max_micro_batch"];
    size_t sum = 0, tensors = 0;
    for (const auto& [name, n] : bytes.items())
        if (name != "total") sum += size_t(n);
    claim(sum == bytes["total"], "its bytes add up to the total");
    for (const json& tensor : plan["tensors"]) tensors += size_t(tensor["bytes"]);
    claim(tensors == size_t(bytes["weights"]) + size_t(bytes["activations"]) + size_t(bytes["workspace"]),
          "and its tensors' bytes to weights, activations and workspace");
    const std::string HUGE = "plan --gpu-memory 80GB --layers 1024 --heads 4096 --channels 65536 --context 4194304 "
                             "--micro-batch 511 --attention naive";
    const Outcome table = run(HUGE), record = run(HUGE + " --json");
    claim_run(plan.value("bytes_are_exact", false) && record.out.find("\"bytes_are_exact\": false") != record.out.npos &&
                  table.code == 0 && table.out.find("\nmemory     more than 72 PB of 80.00 GB\n") != std::string::npos &&
                  table.out.find("without flash attention: more than 72 PB in all\n") != std::string::npos,
              "what is too large to be counted is said to be more than what is counted", table, record.err);
    claim(plan["precision"] == "bf16", "with --gpu-memory it plans in BF16, as a card builds");
    claim(0 < most["none"] && most["none"] < most["selective"] && most["selective"] < most["full"],
          "the more is recomputed, the larger the micro-batch that fits", most.dump());
}

void test_plan_without_master() {
    const std::string command = "plan --model gpt2 --gpu-memory 80GB --json";
    const Outcome with = run(command), without = run(command + " --master-weights none");
    const json a = json::parse(with.out, nullptr, false), b = json::parse(without.out, nullptr, false);
    const bool planned = with.code == 0 && without.code == 0 && a.is_object() && b.is_object();
    claim_run(planned && b["bytes"]["master"] == 0 && b["master_weights"] == "none" && a["master_weights"] == "fp32" &&
                  size_t(a["bytes"]["total"]) - size_t(b["bytes"]["total"]) ==
                      size_t(a["bytes"]["master"]) - sizeof(unsigned long long) &&
                  double(a["bytes_per_parameter"]) - double(b["bytes_per_parameter"]) == 4,
              "plan --master-weights none has 4 bytes a parameter less, but for a count", without, with.err);
}

// What the recipes train with fits where they say that it does.
void test_recipes() {
    int recipes = 0;
    for (const auto& entry : fs::directory_iterator("scripts")) {
        const std::string name = entry.path().filename(), text = read_bytes(entry.path());
        const size_t options = text.rfind("--model "), end = text.find(" --lr");
        if (name.rfind("gpt2_", 0) != 0 || options == text.npos || end == text.npos) continue;
        recipes++;
        const Outcome planned = run("plan --gpu-memory 80GB " + text.substr(options, end - options));
        const size_t at = planned.out.find("memory "), number = planned.out.find_first_of("0123456789", at);
        const std::string total = planned.out.substr(number, planned.out.find(" of ", number) - number);
        claim_run(planned.code == 0 && planned.out.find("\n  fits") != planned.out.npos &&
                      text.find(total) != text.npos,
                  name + " trains with what plan says fits into 80GB, and says so", planned, total);
    }
    claim(recipes == 4, "so do all recipes for GPT-2", std::to_string(recipes));
}

// Both sequences of hf_tiny_expected in a shard of their own; the loss from transformers' logits.
void test_verbs_on_folder() {
    need_first_run();
    const Safetensors file("data/reference/hf_tiny_expected.safetensors");
    const std::vector<int> ids = read_ints(file, "input_ids");
    const Floats logits = read_floats(file, "logits");
    const size_t B = file.at("logits").shape[0], T = file.at("logits").shape[1], V = file.at("logits").shape[2];
    double expected = 0;
    for (size_t b = 0; b < B; b++) {
        write_bytes(scratch(format("@/hf_%zu.bin", b)), shard({ids.begin() + b * T, ids.begin() + (b + 1) * T}));
        for (size_t n = b * T; n + 1 < (b + 1) * T; n++) {
            double sum = 0;
            for (size_t v = 0; v < V; v++) sum += exp(double(logits[n * V + v]));
            expected += (log(sum) - logits[n * V + ids[n + 1]]) / (B * (T - 1));
        }
    }
    const Outcome e = run("eval --from data/reference/hf_tiny --data @/hf_*.bin");
    double loss = 0;
    size_t tokens = 0;
    const int fields = sscanf(e.out.c_str(), "loss %lf over %zu tokens", &loss, &tokens);
    const double tolerance = FLOATX == DType::FP32 ? 2e-6 : 1e-3;   // as in test_evaluation
    claim_run(e.code == 0 && fields == 2 && tokens == B * (T - 1) && fabs(loss - expected) < tolerance * expected,
              "eval prints the loss that transformers' logits have", e, format("expected %.6f", expected));

    const std::string SAMPLE = "sample --from data/reference/hf_tiny --sample-tokens 40 --prompt-tokens 1,2,3 ";
    const Outcome greedy = run(SAMPLE + "--temperature 0"), top_1 = run(SAMPLE + "--top-k 1 --seed 3");
    const Outcome random = run(SAMPLE + "--seed 3"), again = run(SAMPLE + "--seed 3");
    std::istringstream words(greedy.out);
    const size_t count = std::distance(std::istream_iterator<int>(words), {});
    claim_run(greedy.code == 0 && count == 43 && greedy.out.rfind("1 2 3 ", 0) == 0,
              "sample goes on from a prompt, past the context", greedy);
    claim(top_1.out == greedy.out && random.out != greedy.out && random.out == again.out,
          "top-k 1 is temperature 0; a seed gives the same sample again");
    const Outcome of_run = run("eval --from @/first --data @/text.txt --matmul-tuning off");
    const Outcome of_last = run("eval --from @/first/step_000010 --data @/text.txt --matmul-tuning off");
    claim_run(of_run.code == 0 && but_for_speed(of_run) == but_for_speed(of_last) &&
                  of_run.err.find("/first/step_000010") != std::string::npos,
              "--from RUN is the run's last checkpoint, and says so", of_run, of_last.out);
    const Outcome bytes = run("sample --from @/first/step_000010 --prompt cat --sample-tokens 4");
    claim_run(bytes.code == 0 && bytes.out.rfind("cat", 0) == 0 && bytes.out.size() == 8,
              "a model of bytes goes on from a text", bytes);
    const Outcome train = run("train --from data/reference/hf_tiny --data @/hf_*.bin --val-fraction 0 --seq-len 31 "
                              "--shuffle no --micro-batch 2 --steps 1 --checkpoint-every 0 --out @/from_hf");
    const std::vector<std::string> log = log_of("@/from_hf");
    const double start = log.empty() ? NAN : double(json::parse(log[0])["loss"]);
    claim_run(train.code == 0 && fabs(start - expected) < tolerance * expected, "train --from begins with that loss",
              train);
}

// What eval prints after the loss, by hand.
void test_eval_lines() {
    need_words();
    need_first_run();
    const Tokenizer tokenizer(TOKENIZER);
    const int end = tokenizer.added("<|endoftext|>");
    std::vector<uint16_t> tokens;
    size_t bytes = 0;
    for (const char* text : {"Once upon a time", "caf\xc3\xa9, and nothing more"}) {
        tokens.push_back(end);
        for (int token : tokenizer.encode(text)) tokens.push_back(token);
        bytes += strlen(text);
    }
    tokens.push_back(790);   // of the 800, one that the tokenizer does not have
    write_bytes(scratch("@/words.bin"), shard(tokens));
    auto read = [](const Outcome& e, double (&x)[4], size_t (&n)[2]) {
        const char* lines = "loss %lf over %zu tokens\nperplexity %lf\nbits per byte %lf over %zu bytes";
        return sscanf(e.out.c_str(), lines, &x[0], &n[0], &x[1], &x[2], &n[1]);
    };
    double x[4];
    size_t n[2];
    const Outcome words = run("eval --from @/words --data @/words.bin");
    claim_run(words.code == 0 && read(words, x, n) == 5 && n[0] == tokens.size() - 1 && n[1] == bytes &&
                  fabs(x[1] - exp(x[0])) < 1e-3 * x[1] && fabs(x[2] - x[0] * n[0] / (log(2) * bytes)) < 1e-3 &&
                  words.out.find(" tok/s\n") != words.out.npos,
              "eval prints perplexity, bits per byte of the text without <|endoftext|>, and speed", words);
    const Outcome of_bytes = run("eval --from @/first/step_000010 --data @/text.txt");
    claim_run(of_bytes.code == 0 && read(of_bytes, x, n) == 5 && n[0] == n[1] && fabs(x[2] - x[0] / log(2)) < 1e-3,
              "of a model of bytes they are the loss over ln 2", of_bytes);
    const Outcome numbers = run("eval --from @/numbers --data @/words.bin");
    claim_run(numbers.code == 0 && numbers.out.find("perplexity") != numbers.out.npos &&
                  numbers.out.find("per byte") == numbers.out.npos,
              "without a tokenizer no bits per byte are printed", numbers);
    fs::copy(scratch("@/words"), scratch("@/other_words"));
    write_bytes(scratch("@/other_words/tokenizer.json"), "{}");
    const Outcome other = run("eval --from @/other_words --data @/words.bin");
    claim_run(other.code == 0 && other.out.rfind(numbers.out.substr(0, 20), 0) == 0 &&
                  other.err.find(scratch("@/other_words/tokenizer.json")) != other.err.npos,
              "nor with one that cannot be read, which is named", other);

    // Weights that make the loss overflow.
    fs::copy(scratch("@/numbers"), scratch("@/overflow"));
    std::vector<RawTensor> tensors = raw_tensors(scratch("@/overflow/model.safetensors"));
    RawTensor& last = tensor_named("ln_f.weight", tensors);
    last.bytes = bytes_of(Floats(16, 3e38f));
    write_bytes(scratch("@/overflow/model.safetensors"), safetensors(tensors));
    const Outcome overflow = run("eval --from @/overflow --data @/words.bin");
    claim_run(overflow.code == 1 && overflow.out.find("loss") == overflow.out.npos &&
                  overflow.err.find("mean loss") != overflow.err.npos,
              "a loss that is not finite is an error, with exit code 1", overflow);
    const Outcome answers = run("eval --from @/overflow --hellaswag " + QUESTIONS);
    claim_run(answers.code == 1 && answers.err.find("HellaSwag") != answers.err.npos, "likewise of HellaSwag", answers);
}

void test_hellaswag_runs() {
    const json expected = read_json("data/reference/hellaswag.json");
    const std::vector<Question> questions = read_questions(QUESTIONS, 211, 32);
    double right[2] = {};   // by sum, by mean
    for (size_t q = 0; q < questions.size(); q++)
        for (int by : {0, 1})
            right[by] += (expected[q]["choices"][by] == questions[q].label) / double(questions.size());
    const std::string text = format("HellaSwag acc_norm %.4f, accuracy %.4f over %zu questions\n", right[1], right[0],
                                    questions.size());
    const Outcome e = run("eval --from data/reference/hf_tiny --hellaswag " + QUESTIONS);
    claim_run(e.code == 0 && right[0] != right[1] && e.out.rfind(text, 0) == 0,
              "eval --hellaswag prints the share of right choices", e, text);

    std::vector<uint16_t> tokens(400);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = splitmix64(i) % 211;
    write_bytes(scratch("@/of_211.bin"), shard(tokens));
    const std::string COMMAND = "train --from data/reference/hf_tiny --data @/of_211.bin --val-fraction 0 --steps 2 "
                                "--lr 1e-9 --eval-every 1 --checkpoint-every 0 --out @/";
    const Outcome with = run(COMMAND + "asked --hellaswag " + QUESTIONS), without = run(COMMAND + "unasked");
    std::vector<double> scores;
    std::string steps, expected_steps;
    for (const std::string& record : log_of("@/asked")) {
        if (json::parse(record).contains("hellaswag")) scores.push_back(json::parse(record)["hellaswag"]);
        else steps += record;
    }
    for (const std::string& record : log_of("@/unasked")) expected_steps += record;
    claim_run(with.code == 0 && scores == std::vector<double>{right[1], right[1]} &&
                  with.out.find("step 1: " + text) != with.out.npos,
              "train --hellaswag does with every validation, and logs acc_norm", with);
    claim_run(!steps.empty() && steps == expected_steps, "and goes on with the same bits as without", without);
}

// ==== runs: text =============================================================

void test_text_of_tokens() {
    need_words();
    const std::string prompt = "Once upon a time, caf\xc3\xa9", WORDS = "sample --from @/words --sample-tokens 40 ";
    const Tokenizer tokenizer(TOKENIZER);
    std::string numbers, expected = prompt;
    for (int token : tokenizer.encode(prompt)) numbers += format("%d,", token);
    const Outcome plain = run("sample --from @/numbers --sample-tokens 40 --prompt-tokens " + numbers);
    std::istringstream tokens(plain.out.substr(std::min(plain.out.size(), numbers.size())));
    for (int token; tokens >> token;) expected += tokenizer.decode(token);
    write_bytes(scratch("@/prompt.txt"), prompt);
    const Outcome words = run(WORDS + "--prompt - <@/prompt.txt"), by_number = run(WORDS + "--prompt-tokens " + numbers);
    claim_run(words.code == 0 && expected.size() > prompt.size() + 20 && words.out == expected + "\n",
              "--prompt - reads a text, whose tokens are the tokenizer's, and so is the sample", words, expected);
    claim_run(by_number.out == words.out, "with a tokenizer a prompt of token numbers is shown as text too", by_number);
    const Outcome one = run(WORDS + "--prompt Once");
    claim_run(one.code == 0 && one.out.rfind("Once", 0) == 0, "--prompt TEXT does", one);

    // The first two letters that stand together, but not at the front.
    const std::string generated = expected.substr(prompt.size());
    size_t at = 1;
    auto letter = [&](size_t i) { return isalpha(static_cast<unsigned char>(generated[i])) != 0; };
    while (at + 2 < generated.size() && !(letter(at) && letter(at + 1))) at++;
    const std::string stop = generated.substr(at, 2);
    const Outcome stopped = run(WORDS + "--prompt - --stop " + stop + " <@/prompt.txt");
    claim_run(stopped.code == 0 && stopped.out == prompt + generated.substr(0, generated.find(stop)) + "\n",
              "--stop ends a sample where the text appears", stopped, stop);
    const Outcome two = run(WORDS + "--prompt x --samples 2 --seed 5");
    claim_run(two.out == "---- sample 1, seed 5 ----\n" + run(WORDS + "--prompt x --seed 5").out +
                             "---- sample 2, seed 6 ----\n" + run(WORDS + "--prompt x --seed 6").out,
              "--samples 2 draws with the seed and the next one", two);
    const Outcome top_p = run(WORDS + "--prompt x --top-p 0"), greedy = run(WORDS + "--prompt x --temperature 0");
    claim_run(top_p.code == 0 && top_p.out == greedy.out, "--top-p 0 takes the likeliest token", top_p);
}

void test_text_while_training() {
    need_words();
    const std::string TRAIN_ON = "train --from @/words --data @/text.txt --eval-every 0 --sample-every 2 "
                                 "--sample-tokens 30 --checkpoint-every 0 --steps 1 ";
    const Outcome trained = run(TRAIN_ON);
    const Tokenizer tokenizer(TOKENIZER);
    const Outcome plain = run(format("sample --from @/numbers --sample-tokens 30 --prompt-tokens %d",
                                     tokenizer.added("<|endoftext|>")));
    std::istringstream tokens(plain.out);
    std::string expected;
    int token;
    for (tokens >> token; tokens >> token;) expected += tokenizer.decode(token);
    claim_run(trained.code == 0 && expected.size() > 20 &&
                  trained.out.find("---- sample ----\n" + readable(expected) + "\n----") != std::string::npos,
              "samples while training are text by the tokenizer of --from", trained, expected);
}

void test_text_as_data() {
    need_words();
    const Tokenizer tokenizer(TOKENIZER);
    const std::string text = read_bytes(scratch("@/text.txt"));
    const std::vector<int> tokens = tokenizer.encode(text);
    write_bytes(scratch("@/words.bin"), shard({tokens.begin(), tokens.end()}));
    const std::string EVAL = "eval --matmul-tuning off --from @/words --data ";
    const Outcome of_text = run(EVAL + "@/text.txt"), of_shard = run(EVAL + "@/words.bin");
    claim_run(of_text.code == 0 && but_for_speed(of_text) == but_for_speed(of_shard),
              "eval takes a text's tokens from the tokenizer of --from", of_text, of_shard.out);
    const std::string TRAIN_ON = "train --from @/words --steps 3 --eval-every 3 --eval-sequences 8 --checkpoint-every 2 "
                                 "--out ";
    const Outcome trained = run(TRAIN_ON + "@/on_text --data @/text.txt");
    const Outcome same = run(TRAIN_ON + "@/on_shard --data @/words.bin");
    const std::string said = format("made of %zu bytes by the tokenizer in ", text.size());
    claim_run(trained.code == 0 && log_of("@/on_text") == log_of("@/on_shard") && log_of("@/on_text").size() == 4 &&
                  trained.out.find(said) != std::string::npos,
              "so does train, which says so", trained, same.err);
    run("train --from @/words --steps 3 --eval-every 0 --checkpoint-every 3 --val-data @/text.txt --data @/words.bin "
        "--eval-every 3 --out @/val_text");
    run("train --from @/words --steps 3 --eval-every 0 --checkpoint-every 3 --val-data @/words.bin --data @/words.bin "
        "--eval-every 3 --out @/val_shard");
    claim(log_of("@/val_text") == log_of("@/val_shard") && log_of("@/val_text").size() == 4, "and so is --val-data");
    const std::vector<std::string> log = log_of("@/on_text");
    fs::remove_all(scratch("@/on_text/step_000003"));
    const Outcome resumed = run("train --resume --out @/on_text");
    claim_run(resumed.code == 0 && log_of("@/on_text") == log && resumed.out.find(said) != std::string::npos,
              "a run on text resumes with the same tokens", resumed);

    const Outcome wide = run("train --layers 1 --heads 1 --channels 16 --context 64 --vocab 800 --steps 1 "
                             "--eval-every 0 --data @/text.txt --out @/wide");
    std::vector<uint16_t> bytes(text.begin(), text.end());
    write_bytes(scratch("@/bytes.bin"), shard(bytes));
    const std::string WIDE = "eval --matmul-tuning off --from @/wide --data ";
    const Outcome of_bytes = run(WIDE + "@/text.txt"), of_numbers = run(WIDE + "@/bytes.bin");
    claim_run(wide.code == 0 && of_bytes.code == 0 && but_for_speed(of_bytes) == but_for_speed(of_numbers),
              "a model of 800 tokens that was trained on bytes goes on with bytes", of_bytes, of_numbers.out);
}

// What must go with a model.
const std::vector<std::string> TOKENIZER_FILES = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
                                                  "special_tokens_map.json", "generation_config.json"};

// The files of a model of bytes, as JSON. What transformers makes of them dev/tests/check_tokenizer.py says.
void test_byte_tokenizer() {
    need_first_run();
    const std::string dir = scratch("@/first/step_000010");
    const json file = read_json(dir + "/tokenizer.json"), &model = file["model"];
    std::string bytes;
    std::vector<int> tokens(BYTE_VOCAB);
    std::iota(tokens.begin(), tokens.end(), 0);
    for (int token : tokens) bytes += static_cast<char>(token);
    int in_order = 0;
    for (int token : tokens) in_order += model["vocab"].value(byte_alphabet()[token], -1) == token;
    claim(in_order == BYTE_VOCAB && model["vocab"].size() == BYTE_VOCAB && model["type"] == "BPE" &&
              model["merges"].empty() && file["added_tokens"].empty() &&
              file["pre_tokenizer"]["type"] == "ByteLevel" && file["decoder"]["type"] == "ByteLevel",
          "a model of bytes has a tokenizer.json of 256 byte tokens, numbered as the bytes, without merges");
    const Tokenizer tokenizer(dir);
    claim(tokenizer.encode(bytes) == tokens && tokenizer.decode(tokens) == bytes, "by which a token is its byte");
    claim(read_json(dir + "/tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast" &&
              read_json(dir + "/tokenizer_config.json")["model_max_length"] == 16 &&
              read_json(dir + "/generation_config.json")["eos_token_id"] == 255 &&
              read_json(dir + "/config.json")["eos_token_id"] == 255 &&
              read_json(dir + "/tokenizer_config.json")["eos_token"] == byte_alphabet()[255] &&
              read_json(dir + "/tokenizer_config.json")["bos_token"] == byte_alphabet()[255],
          "tokenizer_config.json names the class; the end of text is byte 255, for lm-evaluation-harness too");
    fs::copy(dir, scratch("@/only_bytes"));
    for (const std::string& name : TOKENIZER_FILES) fs::remove(scratch("@/only_bytes/" + name));
    const std::string options = " --prompt cat --sample-tokens 20 --seed 4";
    const Outcome with = run("sample --from @/first/step_000010" + options);
    const Outcome without = run("sample --from @/only_bytes" + options);
    claim_run(with.code == 0 && with.out == without.out, "samples are the same with it and without", with, without.out);
}

void test_tokenizer_travels() {
    need_words();
    const std::string from = scratch("@/all_words");
    fs::copy(scratch("@/words"), from);
    for (const std::string& name : TOKENIZER_FILES) {
        fs::remove(from + "/" + name);
        if (fs::exists(TOKENIZER + "/" + name)) fs::copy(TOKENIZER + "/" + name, from + "/" + name);
        else write_bytes(from + "/" + name, "{\"file\": \"" + name + "\"}");
    }
    const std::string COMMAND = "--data @/text.txt --eval-every 0 --checkpoint-every 1 --keep 1 --out @/travel ";
    auto differing = [&](const std::string& dir) {
        std::string names;
        for (const std::string& name : TOKENIZER_FILES)
            if (!fs::exists(scratch(dir + "/" + name)) ||
                read_bytes(from + "/" + name) != read_bytes(scratch(dir + "/" + name)))
                names += " " + name;
        return names;
    };
    const Outcome first = run("train --from @/all_words --steps 2 " + COMMAND);
    const std::string wrong = differing("@/travel/step_000002");
    claim_run(first.code == 0 && wrong.empty(), "a tokenizer's files go from --from DIR to checkpoints", first, wrong);
    const Outcome second = run("train --resume --from @/all_words --steps 4 " + COMMAND);   // the same --from
    const std::string wrong_later = differing("@/travel/step_000004");
    claim_run(second.code == 0 && wrong_later.empty() && !fs::exists(scratch("@/travel/step_000002")),
              "and on, though the checkpoint that --resume began with is no longer kept", second, wrong_later);
    std::string others;
    for (const std::string& name : TOKENIZER_FILES)
        if (fs::exists(scratch("@/numbers/" + name))) others += name + " ";
    claim(others == "generation_config.json ", "a model of other tokens has no tokenizer made up for it", others);
}

// ==== runs: that end badly ===================================================

// What is in a run folder besides checkpoints and the log.
size_t unfinished(const std::string& out) {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(scratch(out)))
        count += entry.path().filename().string().rfind("step_", 0) != 0;
    return count - fs::exists(scratch(out + "/log.jsonl"));
}

void test_signals() {
    Run interrupted(ENDLESS + "--checkpoint-every 0 --out @/interrupted");
    const bool began = wait_until([] { return log_of("@/interrupted").size() >= 3; });
    const Outcome outcome = interrupted.end(SIGINT);
    const std::vector<std::string> log = log_of("@/interrupted");
    const auto found = list_checkpoints(scratch("@/interrupted"));
    const bool right = began && outcome.code == 0 && found.size() == 1 && found.begin()->first == long(log.size());
    claim_run(right && damage(found.begin()->second).empty(),
              "SIGINT ends a run with exit code 0 and a checkpoint of its last step", outcome);
    const Outcome resumed = run(ENDLESS + format("--resume --steps %zu --out @/interrupted", log.size() + 2));
    claim_run(resumed.code == 0 && log_of("@/interrupted").size() == log.size() + 2, "and can be resumed from there", resumed);

    // Killed at different moments of writing one checkpoint after the other, and resumed each time.
    std::string wrong;
    long last = 0;
    for (int kills = 0; kills < 8 && wrong.empty(); kills++) {
        Run killed(ENDLESS + "--checkpoint-every 1 --keep 2 --out @/killed" + (kills ? " --resume" : ""));
        auto newest = [] {
            const auto all = list_checkpoints(scratch("@/killed"));
            return all.empty() ? 0 : all.rbegin()->first;
        };
        if (!wait_until([&] { return newest() > last + 1; })) wrong += "no checkpoint; ";
        usleep(1000 * (7 * kills % 11));
        const Outcome end = killed.end(SIGKILL);
        if (end.code != -SIGKILL) wrong += end.err;
        last = newest();
        for (const auto& [step, dir] : list_checkpoints(scratch("@/killed"))) wrong += damage(dir);
    }
    claim(wrong.empty(), "whenever a run is killed, each checkpoint that is there is whole, and the last one resumes", wrong);
    const Outcome after = run(ENDLESS + format("--checkpoint-every 1 --out @/killed --resume --steps %ld", last + 2));
    claim_run(after.code == 0 && unfinished("@/killed") == 0, "what was unfinished then is cleared away", after);
}

// A full disk behind standard output.
void test_full_output() {
    need_first_run();
    const std::string SAID = "standard output: writing failed";
    auto ends_so = [&](const Outcome& o) { return o.code == 1 && o.err.find(SAID) != std::string::npos; };
    for (const char* command : {"--help", "plan --gpu-memory 1GB", "plan --gpu-memory 1GB --json",
                                "eval --from @/first --data @/text.txt --matmul-tuning off",
                                "sample --from @/first --sample-tokens 2000000000 --samples 9"}) {
        const Outcome outcome = run(command + std::string(" >/dev/full"));
        claim_run(ends_so(outcome), format("output that cannot be written is an error: %s", command), outcome);
    }
    const Outcome trained = run("train" + SMALL + "--steps 3 --sample-every 1 --sample-tokens 3 --out @/mute >/dev/full");
    claim_run(ends_so(trained) && log_of("@/mute").size() == 4 && damage(scratch("@/mute/step_000003")).empty(),
              "a run goes on to its end and its checkpoint without it", trained);
}

void test_second_run() {
    Run first(ENDLESS + "--checkpoint-every 0 --out @/live");
    wait_until([] { return log_of("@/live").size() >= 3; });
    fs::create_directory(scratch("@/live/unfinished_step_000001"));   // as if it were just being written
    for (const char* resume : {"", " --resume"}) {
        const Outcome second = run(ENDLESS + "--out @/live" + resume);
        claim_run(second.code == 2 && second.err.find(scratch("--out @/live: another run")) != second.err.npos &&
                      fs::exists(scratch("@/live/unfinished_step_000001")),
                  format("a second run in a folder is refused, and touches nothing there%s", resume), second);
    }
    const Outcome outcome = first.end(SIGINT);
    const auto found = list_checkpoints(scratch("@/live"));
    claim_run(outcome.code == 0 && found.size() == 1 && found.begin()->first == long(log_of("@/live").size()),
              "the first one does not notice", outcome);
}

void test_leftovers() {
    const std::vector<std::string> theirs = {"unfinished_thesis", "unfinished_step_12", "unfinished_step_000012.old",
                                             "unfinished_old_letters", "my_unfinished_step_000012"},
                                   ours = {"unfinished_step_000012", "unfinished_old_step_000003"};
    for (const auto& names : {theirs, ours})
        for (const std::string& name : names) fs::create_directories(scratch("@/mixed/" + name + "/within"));
    auto left = [](const std::vector<std::string>& names) {
        long count = 0;
        for (const std::string& name : names) count += fs::exists(scratch("@/mixed/" + name));
        return count;
    };
    const std::string COMMAND = "train" + SMALL + "--steps 1 --checkpoint-every 0 --out @/mixed ";
    const Outcome refused = run(COMMAND + "--context 8192 --micro-batch 32768");
    claim_run(refused.code == 2 && left(ours) == 2, "a run that is refused removes nothing", refused);
    const Outcome outcome = run(COMMAND);
    claim_run(outcome.code == 0 && left(ours) == 0 && left(theirs) == long(theirs.size()),
              "what a crash has left is removed, and nothing whose name only looks like it", outcome);
}

// Killed before its first checkpoint.
void test_early_death() {
    const std::string COMMAND = "train --data @/of_211.bin --val-fraction 0 --micro-batch 1 --seq-len 16 "
                                "--eval-every 0 ";
    write_bytes(scratch("@/of_211.bin"), shard(std::vector<uint16_t>(400, 210)));
    Run killed(COMMAND + "--from data/reference/hf_tiny --steps 1000000 --checkpoint-every 0 --out @/early");
    wait_until([] { return log_of("@/early").size() >= 3; });
    killed.end(SIGKILL);
    const Outcome resumed = run(COMMAND + "--steps 3 --out @/early --resume");
    const Outcome fresh = run(COMMAND + "--from data/reference/hf_tiny --steps 3 --out @/late");
    claim_run(resumed.code == 0 && resumed.out.find("begins anew from data/reference/hf_tiny") != resumed.out.npos &&
                  log_of("@/early").size() == 3 && log_of("@/early") == log_of("@/late"),
              "--resume of a run without a checkpoint begins as that did, and says so", resumed, fresh.err);
}

// What fails only after some steps.
void test_late_failure() {
    const std::string COMMAND = "train --layers 1 --heads 1 --channels 16 --context 16 --vocab 256 "
                                "--val-fraction 0 --shuffle no --micro-batch 1 --schedule constant --lr 1e-3 "
                                "--checkpoint-every 0 --data ";
    std::vector<uint16_t> tokens(161, 5);
    write_bytes(scratch("@/all_well.bin"), shard(tokens));
    tokens[100] = 300;   // in the window of the seventh step, which is fetched during the sixth
    write_bytes(scratch("@/late_bad.bin"), shard(tokens));
    const Outcome bad = run(COMMAND + "@/late_bad.bin --steps 10 --out @/bad_data");
    run(COMMAND + "@/all_well.bin --steps 5 --checkpoint-every 5 --out @/good_data");
    const auto kept = list_checkpoints(scratch("@/bad_data"));
    claim_run(bad.code == 2 && bad.err.find("token 300 at position 100") != bad.err.npos && kept.size() == 1 &&
                  kept.count(5) && same_file("@/bad_data/step_000005/optimizer.safetensors",
                                             "@/good_data/step_000005/optimizer.safetensors"),
              "a token outside the vocabulary that comes late ends a run with a checkpoint of the last good step", bad);
    write_bytes(scratch("@/cut_off.bin"), shard(std::vector<uint16_t>(100000, 5)));
    Run cut(ENDLESS + "--shuffle yes --val-fraction 0 --checkpoint-every 0 --data @/cut_off.bin --out @/cut_off");
    wait_until([] { return log_of("@/cut_off").size() >= 3; });
    fs::resize_file(scratch("@/cut_off.bin"), 5000);
    const Outcome cut_off = cut.end();
    const auto last = list_checkpoints(scratch("@/cut_off"));
    claim_run(cut_off.code == 1 && cut_off.err.find(scratch("@/cut_off.bin: was cut off")) != cut_off.err.npos &&
                  last.size() == 1 && last.begin()->first == long(log_of("@/cut_off").size()) &&
                  damage(last.begin()->second).empty(),
              "so does a shard that is cut off meanwhile, which is named", cut_off);
    write_bytes(scratch("@/shrinks.bin"), shard(std::vector<uint16_t>(3000000, 5)));
    Run evaluates("eval --from @/good_data --micro-batch 1 --matmul-tuning off --data @/shrinks.bin");
    const bool mapped = wait_until([&] { return evaluates.maps("@/shrinks.bin"); });
    fs::resize_file(scratch("@/shrinks.bin"), 5000);
    const Outcome evaluated = evaluates.end();
    claim_run(mapped && evaluated.code == 1 &&
                  evaluated.err.find(scratch("@/shrinks.bin: was cut off while it was in use")) != std::string::npos,
              "and so says eval", evaluated);
    const Outcome full = Run(COMMAND + "@/all_well.bin --steps 1000 --out @/full_log", "", 4096).end();
    claim_run(full.code == 1 && full.err.find("log.jsonl: writing failed") != full.err.npos &&
                  full.err.find("train_gpt: checkpoint of step") != full.err.npos &&
                  list_checkpoints(scratch("@/full_log")).empty(),
              "a disk that is full at the log: it says why there is no checkpoint either", full);
}

void test_full_disk() {
    const std::string COMMAND = "train" + SMALL + "--micro-batch 1 --schedule constant --eval-every 0 --checkpoint-every 2 "
                                "--out @/full ";
    const std::string model = scratch("@/full/step_000002/model.safetensors");
    run(COMMAND + "--steps 2");
    const std::string before = read_bytes(model);
    // Enough for the log and config.json, not for the weights.
    const Outcome full = Run(COMMAND + "--resume --steps 4", "", 16 << 10).end();
    const auto left = list_checkpoints(scratch("@/full"));
    claim_run(full.code == 1 && full.err.rfind("train_gpt: checkpoint of step 4 not written", 0) == 0,
              "a full disk is an error that names the step", full);
    claim(left.size() == 1 && damage(left.begin()->second).empty() && !before.empty() && read_bytes(model) == before &&
              unfinished("@/full") == 0,
          "it leaves the checkpoint before as it was, and nothing unfinished");
    const Outcome resumed = run(COMMAND + "--resume --steps 4");
    claim_run(resumed.code == 0 && damage(scratch("@/full/step_000004")).empty(),
              "from which the run goes on when there is room again", resumed);
}

void test_nan() {
    const Outcome outcome = run("train" + SMALL + "--steps 20 --lr 1e30 --grad-clip 0 --checkpoint-every 1 --out @/nan");
    const auto good = list_checkpoints(scratch("@/nan"));
    const long step = good.empty() ? 0 : good.rbegin()->first;
    const std::string last = good.empty() ? "none" : good.rbegin()->second;
    claim_run(outcome.code == 1 && outcome.err.find(format("step %ld: loss", step + 1)) != outcome.err.npos &&
                  outcome.err.find(last) != outcome.err.npos,
              "a loss that is not finite stops the run and names step and last good checkpoint", outcome);
    claim(damage(last).empty(), "which is whole", damage(last));

    // Weights overflow in the very step whose loss was the last finite one.
    const Outcome overflow = run("train" + SMALL + "--steps 2 --lr 3e38 --weight-decay 1000 --checkpoint-every 1 --out @/inf");
    claim_run(overflow.code == 1 && list_checkpoints(scratch("@/inf")).empty(),
              "weights that are not finite are not written as a checkpoint", overflow);
}

// Too little memory; and a token outside the vocabulary in the first batch.
void test_failed_start() {
    const std::string COMMAND = "train" + SMALL + "--steps 1 --out @/again ";
    for (const char* mistake : {"--context 8192 --micro-batch 32768", "--vocab 100"}) {
        const Outcome refused = run(COMMAND + mistake), again = run(COMMAND);
        claim_run(refused.code == 2 && again.code == 0,
                  format("a run that ended before its first step leaves --out free (%s)", mistake), again);
        fs::remove_all(scratch("@/again"));
    }
}

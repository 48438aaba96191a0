// Tests of whole command lines: reproducibility, output and files, exit codes and signals. Included by test_gpt.cu.
// dev/faults/test_faults.py also kills runs at many moments and makes their system calls fail.
#pragma once

// ==== running train_gpt ======================================================
// `test_gpt --as-train-gpt ...` behaves as train_gpt.

struct Outcome {
    int code;   // exit status, or -signal
    std::string out, err;
};

// Returns the text without the notice that the emulator prints if oneDNN is missing and matmuls are slow.
std::string without_hint(std::string text) {
#ifdef CUDA_ON_CPU
    text = replaced(text, cuda_cpu::no_onednn_notice + std::string("\n"), "");
#endif
    return text;
}

// The path of this program in the commands that it runs.
const std::string PROGRAM = format("/proc/%d/exe", getpid());

class Run {
public:
    // Starts `command` in a shell, so it may redirect its input and output. @ stands for the scratch folder.
    explicit Run(const std::string& command, const std::string& environment = "") {
        static int runs = 0;
        const int number = runs++;
        out_ = scratch(format("@/stdout_%d", number));
        err_ = scratch(format("@/stderr_%d", number));
        const std::string streams = "</dev/null >" + out_ + " 2>" + err_;
        // One thread, because the models are tiny.
        const std::string line = scratch("exec env OMP_NUM_THREADS=1 XDG_CACHE_HOME=@/cache " + environment + " " +
                                         streams + " " + PROGRAM + " --as-train-gpt " + command);
        pid_ = fork();
        if (pid_ < 0) throw Failure("fork: %s", strerror(errno));
        if (pid_ > 0) return;
        // Makes only system calls until exec, because fork does not copy the threads of OpenMP and CUDA.
        signal(SIGHUP, SIG_DFL);    // nohup makes this process ignore it
        execl("/bin/sh", "sh", "-fc", line.c_str(), nullptr);   // -f: the program, not the shell, expands globs
        _exit(127);
    }
    Run(const Run&) = delete;
    ~Run() {
        if (pid_ > 0) end(SIGKILL);
    }

    // Sends the signal unless it is 0, then blocks until the process ends.
    Outcome end(int signal = 0) {
        if (signal) kill(pid_, signal);
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {}
        pid_ = 0;
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        const Outcome outcome = {code, read_bytes(out_), without_hint(read_bytes(err_))};
        fs::remove(out_);
        fs::remove(err_);
        return outcome;
    }

private:
    pid_t pid_ = 0;
    std::string out_, err_;
};

Outcome run(const std::string& command, const std::string& environment = "") { return Run(command, environment).end(); }

typedef std::vector<std::string> Texts;

// Expects that a fact holds and that a run ends with this exit code and prints `texts`, an error to stderr. A text that
// begins with ! must not be printed; @ stands for the scratch folder.
void expect_run(bool holds, const std::string& text, const Outcome& run, const Texts& texts = {}, int code = 0) {
    std::string wrong = holds && run.code == code ? "" : "; ";
    for (const std::string& part : texts) {
        const bool absent = part[0] == '!';
        if (contains(code ? run.err : run.out, scratch(part.substr(absent))) == absent)
            wrong += (absent ? "has '" : "lacks '") + scratch(part.substr(absent)) + "'; ";
    }
    expect(wrong.empty(), text,
           wrong.empty() ? "" : format("exit code %d; ", run.code) + wrong + run.out + run.err);
}

// ==== results of a run =======================================================

// Returns a log's records without the first one, the end and times. Numbers round-trip: equal text means equal bits.
std::vector<std::string> log_of(const std::string& out) {
    std::vector<std::string> records;
    for (const std::string& line : split(read_bytes(out + "/log.jsonl"), "\n")) {
        json record = json::parse(line, nullptr, false);
        const bool is_whole = record.is_object();   // the last line may be incomplete
        if (!is_whole || record.contains("run") || record.contains("end")) continue;
        for (const char* key : {"ms", "tokens_per_s", "mfu", "hfu"}) record.erase(key);
        records.push_back(record.dump());
    }
    return records;
}

// Returns whether a log has one end, at its end: "complete", "signal" or "error".
bool has_end(const std::string& out, const char* end) {
    const std::string log = read_bytes(out + "/log.jsonl"), line = format("\n{\"end\":\"%s\"}\n", end);
    return log.find("\n{\"end\"") == log.size() - line.size() && ends_with(log, line);
}

json record_of(const std::string& out, size_t line) {
    const std::vector<std::string> log = log_of(out);
    return line < log.size() ? json::parse(log[line]) : json::object();
}

bool has_paths(const json& record, std::vector<const char*> paths) {
    return record.is_object() && std::all_of(paths.begin(), paths.end(), [&](const char* path) {
        return record.contains(json::json_pointer(path));
    });
}

// Blocks until `count` records are logged, for at most a minute.
void wait_for_steps(const std::string& out, size_t count = 3) {
    for (int i = 0; i < 60000 && log_of(out).size() < count; i++) usleep(1000);
}

bool same_file(const std::string& a, const std::string& b) {
    const std::string bytes = read_bytes(a);
    return !bytes.empty() && bytes == read_bytes(b);
}

// Returns whether two checkpoints hold the same weights and optimizer states.
bool same_checkpoint(const std::string& a, const std::string& b) {
    return same_file(a + "/model.safetensors", b + "/model.safetensors") &&
           same_file(a + "/optimizer.state", b + "/optimizer.state");
}

// Creates a run to be resumed in the folder `out`: copies the log and the checkpoint `step` of the run in `from`.
void begin_from(const std::string& out, const std::string& from, const std::string& step) {
    fs::create_directory(scratch(out));
    copy_files(from + step, out + step);
    copy_files(from + "/log.jsonl", out + "/log.jsonl");
}

// Expects that a command with --out @/other logs and saves the same bits as the run of 10 steps in `folder`.
void expect_same_run(const std::string& folder, const std::string& command, const std::string& text,
                     const std::string& environment = "") {
    const Outcome outcome = run(command + " --out @/other", environment);
    expect_run(log_of("@/other") == log_of(folder) && same_checkpoint(folder + "/step_000010", "@/other/step_000010"),
               text + ": the same bits", outcome);
    fs::remove_all(scratch("@/other"));
}

// Returns whether `out` has exactly one checkpoint, of the last logged step, in which every tensor can be read.
bool has_last_checkpoint(const std::string& out) {
    const auto found = list_checkpoints(scratch(out));
    if (found.size() != 1 || found.begin()->first != long(log_of(out).size())) return false;
    const std::string dir = found.begin()->second;
    return error_of([&] {
        Model m;
        allocate(m, small_setup(read_config(dir + "/config.json"), 1, 1));
        read_weights(m, dir);
        read_moments(m, dir);
        read_json(dir + "/trainer.json").at("next_window");
    }).empty();
}

// ==== inputs that several tests need =========================================

const std::string SMALL = " --layers 2 --heads 2 --channels 32 --context 16 --data @/text.txt ";

// Writes @/text.txt, 3004 bytes: three phrases in a partly predictable order, so that the loss can fall.
void write_text() {
    std::string text;
    for (uint64_t i = 0, word = 0; text.size() < 3000; i++) {
        word = (word + splitmix64(i) % 2) % 3;
        text += word == 0 ? "the cat " : word == 1 ? "sat on " : "a mat\n";
    }
    write_bytes("@/text.txt", text);
}

// A run that ends only when it receives a signal.
const std::string ENDLESS = "train" + SMALL + "--micro-batch 1 --steps 1000000 --schedule constant --eval-every 0 ";

// Without matmul tuning: it may choose another epilogue with another --recompute, and then bits differ.
const std::string TEN = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 10 --lr 1e-2 --warmup 3 "
                        "--eval-every 5 --eval-sequences 4 --checkpoint-every 5 --matmul-tuning off ";

// Runs TEN with --out @/first unless @/first exists.
void need_first_run() {
    if (!fs::exists(scratch("@/first"))) run(TEN + "--out @/first");
}

const std::string TOKENIZER = "data/reference/tokenizer";

// Creates @/words, a model with vocabulary 800 and the reference's tokenizer of 757 tokens, and @/numbers, the same
// model without a tokenizer.
void need_words() {
    if (fs::exists(scratch("@/words"))) return;
    const std::string text = read_bytes("@/text.txt");
    write_bytes("@/numbers.bin", shard({text.begin(), text.end()}));
    run("train --layers 1 --heads 1 --channels 16 --context 64 --vocab 800 --steps 1 --data @/numbers.bin "
        "--eval-every 0 --out @/of_numbers");
    fs::rename(scratch("@/of_numbers/step_000001"), scratch("@/numbers"));
    copy_files("@/numbers", "@/words");
    copy_files(TOKENIZER + "/tokenizer.json", "@/words/tokenizer.json");
}

// ==== reproducibility ========================================================

TEST("runs: the same bits") {
    const Outcome first = run(TEN + "--out @/first");
    expect_run(log_of("@/first").size() == 12, "10 steps and 2 evaluations of 4 sequences are logged", first,
               {" over 64 tokens, "});
    if (log_of("@/first").size() != 12) return;
    const double before = record_of("@/first", 0)["loss"], after = record_of("@/first", 10)["loss"];
    expect(after < before - 1, "the loss falls by more than 1", format("from %f to %f", before, after));
    expect_same_run("@/first", TEN + "--graph on --recompute full --sample-every 3 --sample-tokens 5",
            "graphs, recomputation, samples and another thread order", "CUDA_CPU_SEED=1");
    if (WARP_SIZE == 1 || !device.is_cpu()) {   // with warps of 32 threads the emulator is slow
        expect_same_run("@/first", TEN + "--graph off", "--graph off");
        begin_from("@/other", "@/first", "/step_000005");
        expect_same_run("@/first", "train --resume", "resumed at step 5 with the options of the run");
    }
    begin_from("@/other", "@/first", "/step_000005");
    std::ofstream(scratch("@/other/log.jsonl"), std::ios::app) << "{\"step\": 11, \"lo";   // as after a crash
    expect_same_run("@/first", TEN + "--resume --graph on", "resumed at step 5");
    begin_from("@/other", "@/first", "/step_000005");
    fs::rename(scratch("@/other/step_000005/optimizer.state"), scratch("@/other/step_000005/optimizer.safetensors"));
    expect_same_run("@/first", TEN + "--resume", "resumed from an older checkpoint, with optimizer.safetensors");
    const json trainer = read_json(scratch("@/first/step_000010/trainer.json"));
    expect(trainer.at("step") == 10 && trainer.at("next_window") == 40,
           "a checkpoint holds its step and the next window");

    if (!device.is_cpu()) return;
    // Large enough for parallel matmuls. libgomp prints the names of threads to stderr, libomp to stdout.
    const std::string THREADS = "train --layers 1 --heads 2 --channels 64 --context 64 --micro-batch 8 --steps 1 "
                                "--data @/text.txt --eval-every 0 --threads ";
    const std::string names = "OMP_DISPLAY_AFFINITY=true OMP_AFFINITY_FORMAT=%n_of_%N";
    const Outcome one = run(THREADS + "1", names), two = run(THREADS + "2", names);
    expect_run(contains(two.out + two.err, "1_of_2") && !contains(one.out + one.err, "1_of_"),
               "--threads N uses N threads", two);
}

// The command of a launcher that restarts it, such as torchrun --max-restarts.
TEST("runs: --resume auto") {
    need_first_run();
    const std::string COMMAND = TEN + "--resume auto ";
    fs::create_directories(scratch("@/other/unfinished_step_000005"));
    expect_same_run("@/first", COMMAND, "--resume auto after a crash before the log");
    fs::create_directory(scratch("@/other"));
    const std::string log = read_bytes("@/first/log.jsonl");
    write_bytes("@/other/log.jsonl", log.substr(0, log.find("{\"step\":4")));
    expect_same_run("@/first", COMMAND, "--resume auto after a crash at step 4");
    const std::string FROM = "train --from @/first --data @/text.txt --eval-every 0 --steps 2 --checkpoint-every 1 "
                             "--out @/restarted --resume auto";
    const Outcome first = run(FROM);
    fs::remove_all(scratch("@/restarted/step_000002"));
    const Outcome second = run(FROM), third = run(FROM);
    expect_run(first.code == 0 && log_of("@/restarted").size() == 2,
               "--resume auto starts a run with --from, and continues it", second, {"from step 2 on"});
    expect_run(true, "--resume auto of a complete run ends", third, {"no steps"});
}

TEST("runs: without master weights") {
    if (FLOATX != DType::BF16) return;   // FP16 rounds more finely: these steps change every weight
    const Outcome whole = run(TEN + "--master-weights none --out @/no_master");
    bool logged = true;
    for (size_t line : {0, 4, 9}) logged = logged && record_of("@/no_master", line).value("unchanged", -1.0) > 0;
    expect_run(logged, "--master-weights none logs the fraction of weights that a step left unchanged", whole);
    begin_from("@/other", "@/no_master", "/step_000005");
    expect_same_run("@/no_master", TEN + "--master-weights none --resume", "--master-weights none, resumed at step 5");
}

TEST("runs: muon") {
    const std::string MUON = TEN + "--optimizer muon ";
    run(MUON + "--out @/muon");
    begin_from("@/other", "@/muon", "/step_000005");
    expect_same_run("@/muon", MUON + "--resume --graph on", "--optimizer muon, resumed at step 5 with graphs");
    const Safetensors optimizer(scratch("@/muon/step_000010/optimizer.state"));
    size_t wrong = 0;
    Setup s = small_setup(read_config(scratch("@/muon/step_000010/config.json")), 1, 1);
    s.optimizer = Optimizer::MUON;
    for_each_parameter(s, [&](const ParameterRow& row, size_t, const std::string& name) {
        optimizer.floats("m/" + name, row.shape);
        const bool has_v = error_of([&] { optimizer.floats("v/" + name, row.shape); }).empty();
        wrong += has_v == on_muon(s, row);
    });
    expect(wrong == 0, "--optimizer muon: a checkpoint has v of all parameters but the matrices of layers");
    const Outcome other = run("train --resume --out @/muon --optimizer adamw");
    expect_run(true, "--resume with another --optimizer is an error that names both", other,
               {"--optimizer adamw", "\"muon\""}, 2);
}

TEST("runs: --resume with other options") {
    need_first_run();
    copy_files("@/first", "@/longer");
    const Outcome longer = run("train --resume --out @/longer --steps 12 --lr 0.005 --eval-every 0");
    const json options = read_json(scratch("@/longer/step_000012/trainer.json"))["options"];
    expect_run(log_of("@/longer").size() == 14 && options["lr"] == 0.005 && options["warmup"] == 3,
               "options given with --resume replace those of the run and are printed", longer,
               {"--lr was 0.01, is now 0.005\n", "--steps was 10, is now 12\n", "!--warmup"});
    const Outcome equal = run("train --resume --out @/longer --steps 13 --layers 2 --heads 2 --vocab 256");
    write_bytes("@/less.txt", read_bytes("@/text.txt").substr(0, 2000));
    const Outcome less = run("train --resume --out @/longer --steps 14 --data @/less.txt");
    expect_run(true, "--resume accepts the model's own sizes", equal, {"!tokens to train on, now"});
    expect_run(true, "--resume prints a change of the data", less,
               {"there were 3004 tokens to train on, now there are 2000\n"});
    const Outcome fewer = run("train --resume --out @/longer --steps 9");
    expect_run(true, "--resume with --steps below the run's step prints that step", fewer,
               {"@/longer is at step 14 and has reached --steps 9"});
    const std::string path = scratch("@/longer/step_000014/trainer.json");
    json older = read_json(path);
    older["options"]["eval-batches"] = 20;   // an option that was removed
    older.erase("train_tokens");
    older["head_rows"] = 7;
    older.erase("tokens");   // of a version that did not count them
    older["options"].update({{"trace", scratch("@/repeated.json")}, {"verbose", true}, {"timeout", 7}, {"gpus", 2},
                             {"tensor-parallel", 2}});
    write_json(path, older);
    const Outcome of_older = run("train --resume --out @/longer --steps 15");
    expect_run(true, "an unknown option of a checkpoint, and another number of rows of the head, are printed", of_older,
               {"--eval-batches was 20", "the head processed 7 rows at a time, now "});
    json now = read_json(scratch("@/longer/step_000015/trainer.json"))["options"], defaults = describe({}, TRAIN);
    bool forgotten = true;
    for (const std::string name : {"trace", "verbose", "timeout", "gpus", "tensor-parallel"})
        forgotten = forgotten && now[name] == defaults[name] && !contains(of_older.out, "--" + name + " was ");
    expect_run(forgotten, "--resume does not repeat options that concern one invocation, such as --trace", of_older);
    const Outcome shorter = run("train --resume --out @/longer --steps 20 --seq-len 8 --sample-every 100 "
                                "--sample-tokens 5 --trace @/resumed.json");
    json last = json::parse(log_of("@/longer").back());
    expect_run(last["step"] == 20 && last["tokens"] == 20 * 64 && split(shorter.out, "---- sample ----").size() == 2,
               "a run resumed with another --seq-len continues to count tokens; it prints no sample at its start",
               shorter);
    long updates = 0;
    const json trace = read_json(scratch("@/resumed.json"));
    for (const json& event : trace.at("traceEvents"))
        updates += event.value("name", "") == "adamw" && event.value("tid", 0) == 1;
    expect(updates == 2 * TRACED_STEPS, "--trace records the first steps of a resumed run", std::to_string(updates));
}

// Resumes @/scaled at step 5 in the folder `to`, after changing the checkpoint's state of loss scaling.
Outcome resume_scaled(const std::string& to, const json& changes) {
    begin_from(to, "@/scaled", "/step_000005");
    const std::string path = scratch(to + "/step_000005/trainer.json");
    json trainer = read_json(path);
    trainer["loss_scaling"].update(changes);
    write_json(path, trainer);
    return run("train --resume --out " + to);
}

TEST("runs: loss scaling") {
    auto state = [](const std::string& checkpoint) {
        return read_json(scratch(checkpoint + "/trainer.json")).value("loss_scaling", json()).dump();
    };
    const Outcome scaled = run(TEN + "--loss-scaling dynamic --out @/scaled");
    const std::string expected = "{\"scale\":65536,\"good_steps\":10,\"skipped_steps\":0}";
    expect_run(state("@/scaled/step_000010") == expected && record_of("@/scaled", 0)["loss_scale"] == 65536 &&
                   record_of("@/scaled", 4).contains("zero_gradients"),
               "--loss-scaling dynamic: log and checkpoints hold the scale", scaled);
    const Outcome again = resume_scaled("@/scaled_again", json::object());
    expect_run(log_of("@/scaled_again") == log_of("@/scaled") &&
                   same_checkpoint("@/scaled_again/step_000010", "@/scaled/step_000010") &&
                   state("@/scaled_again/step_000010") == expected,
               "--loss-scaling dynamic resumed at step 5: the same bits and the same scale", again);
    const Outcome skipped = resume_scaled("@/skipped", {{"skipped_steps", 5}, {"scale", 1024}});
    expect_run(record_of("@/skipped", 7)["skipped_steps"] == 5 &&
                   !same_file("@/skipped/step_000010/model.safetensors", "@/scaled/step_000010/model.safetensors") &&
                   record_of("@/skipped", 7)["loss_scale"] == 1024,
               "a resumed run has the checkpoint's scale, and subtracts its skipped steps from AdamW's t", skipped);

    need_first_run();
    const bool by_default = FLOATX == DType::FP16;
    expect((state("@/first/step_000010") == expected) == by_default &&
               record_of("@/first", 0).contains("loss_scale") == by_default,
           "the default of --loss-scaling is dynamic in FP16 and none otherwise");
}

// Steps of two micro-batches, 32 tokens. All are equal, but in @/spiky.txt the second half of step 141 is random. A run
// that skips step 141 of 150 ends with the bits of 149 steps without the random half.
const std::string SPIKES = "train --layers 1 --heads 2 --channels 32 --context 16 --val-fraction 0 --shuffle no "
                           "--micro-batch 1 --total-batch 32 --lr 1e-2 --schedule constant --eval-every 0 "
                           "--matmul-tuning off --checkpoint-every 70 ";

TEST("runs: loss spikes") {
    std::string text;
    while (text.size() < 150 * 32 + 1) text += "the cat sat on a";
    write_bytes("@/calm.txt", text);
    for (size_t i = 140 * 32 + 17; i < 141 * 32; i++) text[i] = static_cast<char>(splitmix64(i));
    write_bytes("@/spiky.txt", text);
    const Outcome calm = run(SPIKES + "--data @/calm.txt --steps 149 --out @/calm --optimizer muon --graph on "
                                      "--loss-scaling 128");
    begin_from("@/spiky", "@/calm", "/step_000070");   // within the first 128 steps
    const Outcome spiky =
        run("train --resume --out @/spiky --data @/spiky.txt --steps 150 --skip-spikes 6 --checkpoint-every 70");
    const json trainer = read_json(scratch("@/spiky/step_000150/trainer.json"));
    expect_run(same_checkpoint("@/calm/step_000149", "@/spiky/step_000150") &&
                   trainer["loss_scaling"]["skipped_steps"] == 1 && record_of("@/spiky", 149)["skipped_steps"] == 1,
               "--skip-spikes: weights and moments are those of a run without the step", spiky);
    expect(same_checkpoint("@/calm/step_000140", "@/spiky/step_000140") &&
               record_of("@/calm", 139)["norm_z"] == record_of("@/spiky", 139)["norm_z"],
           "before the spike, --skip-spikes changes no bit");
    begin_from("@/spiky_again", "@/spiky", "/step_000140");
    const Outcome again = run("train --resume --out @/spiky_again");
    expect_run(log_of("@/spiky_again") == log_of("@/spiky") &&
                   same_checkpoint("@/spiky_again/step_000150", "@/spiky/step_000150") &&
                   read_json(scratch("@/spiky_again/step_000150/trainer.json"))["last_norms"] == trainer["last_norms"],
               "--skip-spikes, resumed: the same bits", again);

    const json before = record_of("@/spiky", 127), first = record_of("@/spiky", 128), spike = record_of("@/spiky", 140);
    expect(!before.contains("loss_z") && !before.contains("norm_z") && has_paths(first, {"/loss_z", "/norm_z"}) &&
               spike["loss_z"] > 8 && spike["norm_z"] > 7,
           "log.jsonl has the z-scores from step 129 on", spike.dump());

    const std::string line = split(split(spiky.out, "step 141/150 loss ").back(), "\n")[0];
    const std::string z = format(" (z %.1f)  norm ", double(spike["loss_z"]));
    expect(contains(line, z) && ends_with(line, ")  skipped"), "the skipped step gets a progress line", line);
    begin_from("@/kept_spike", "@/spiky", "/step_000140");
    const Outcome kept = run("train --resume --steps 141 --out @/kept_spike --skip-spikes off");
    expect_run(!same_checkpoint("@/kept_spike/step_000141", "@/spiky/step_000140") &&
                   record_of("@/kept_spike", 140)["loss_z"] == spike["loss_z"],
               "without --skip-spikes the step has the same z-score and changes the weights", kept,
               {"--skip-spikes was 6.0, is now \"off\"\n", z, "!skipped"});
    const Outcome dynamic = run("train --resume --steps 151 --out @/spiky --loss-scaling dynamic");
    expect_run(record_of("@/spiky", 150)["loss_scale"] == FIRST_LOSS_SCALE &&
                   record_of("@/spiky", 150)["skipped_steps"] == 1,
               "a checkpoint with skipped spikes does not hold a dynamic loss scale unless the run had one", dynamic);
}

// ==== budgets ================================================================

TEST("runs: --tokens and --minutes") {
    need_first_run();
    const std::string LESS = "train" + SMALL + "--micro-batch 2 --warmup 2 --checkpoint-every 4 --eval-every 5 ";
    const Outcome steps = run(LESS + "--steps 10 --out @/ten_steps"), tokens = run(LESS + "--tokens 310 --out @/tokens");
    expect_run(steps.code == 0 && log_of("@/tokens") == log_of("@/ten_steps") &&
                   same_checkpoint("@/tokens/step_000010", "@/ten_steps/step_000010"),
               "--tokens 310 makes the 10 steps of 32 tokens that reach them, with the bits of --steps 10", tokens,
               {"\nstep  1/10 loss", "\nstep 10/10 loss"});
    begin_from("@/other", "@/tokens", "/step_000004");
    expect_same_run("@/tokens", "train --resume", "--tokens, resumed at step 4");
    const Outcome more = run("train --resume --out @/tokens --steps 12"), reached =
        run("train --resume --out @/tokens --tokens 100");
    expect_run(true, "--resume --steps replaces --tokens", more, {"done       2 steps"});
    expect_run(true, "--resume --tokens replaces --steps", reached,
               {"@/tokens is at step 12 and has reached --tokens 100"});
    const Outcome exact = run("train --resume --out @/tokens --tokens 416 --loss-scaling 128");   // 13 x 32
    const std::vector<std::string> log = log_of("@/tokens");
    expect_run(log.size() > 2 && contains(log[log.size() - 2], "zero_gradients") &&
                   contains(log.back(), "\"step\":13,\"val_loss"),
               "the step that reaches --tokens exactly is the last one and logs what an evaluation needs", exact,
               {"done       1 steps"});

    const Outcome minutes = run(LESS + "--minutes 0.02 --schedule linear --min-lr 0 --out @/minutes");
    const json last = json::parse(log_of("@/minutes").back());
    double lr = 1;
    for (const std::string& line : log_of("@/minutes")) lr = json::parse(line).value("lr", lr);
    const long step = last["step"];
    const std::string path = scratch(format("@/minutes/step_%06ld/trainer.json", step));
    json trainer = read_json(path);
    expect_run(has_end("@/minutes", "complete") && has_paths(last, {"/val_loss", "/bits_per_byte"}) &&
                   trainer.value("seconds", 0.0) >= 1.2 && lr < 0.5 * trainer["options"]["lr"].get<double>(),
               "--minutes 0.02 ends after 1.2 s with an evaluation and a checkpoint; the learning rate falls by the clock",
               minutes);
    const Outcome spent = run("train --resume --out @/minutes");
    expect_run(has_end("@/minutes", "complete"), "a run that has used its minutes is complete", spent,
               {"has reached --minutes 0.02"});
    trainer["seconds"] = 1000;
    write_json(path, trainer);
    Run longer("train --resume --out @/minutes --minutes 60");
    wait_for_steps("@/minutes", log_of("@/minutes").size() + 1);
    const Outcome resumed = longer.end(SIGTERM);
    const json later = read_json(list_checkpoints(scratch("@/minutes")).rbegin()->second + "/trainer.json");
    expect_run(later.value("step", 0L) > step && later.value("seconds", 0.0) > 1000,
               "a resumed run adds its time to the minutes that the run has used", resumed);
}

// ==== batch size =============================================================

TEST("runs: batch ramp") {
    const std::string RAMP = TEN + "--total-batch 128 --batch-ramp 32:320 ";
    const Outcome ramp = run(RAMP + "--out @/ramp");
    std::vector<long> found, expected;
    for (const std::string& line : log_of("@/ramp"))
        if (const json record = json::parse(line); record.contains("batch"))
            for (const char* key : {"batch", "tokens"}) found.push_back(record[key]);
    for (long step = 0, tokens = 0; step < 10; step++) {   // micro-batches of 2 x 16 tokens
        const long batch = 32 * (tokens < 320 ? 1 + 3 * tokens / 320 : 4);
        tokens += batch;
        expected.insert(expected.end(), {batch, tokens});
    }
    expect_run(found == expected && expected[8] > 32 && expected[8] < 128,
               "--batch-ramp grows the batch linearly with the tokens, in whole micro-batches", ramp);
    expect(read_json(scratch("@/ramp/step_000010/trainer.json")).value("next_window", 0L) == expected.back() / 16,
           "the windows of a ramp follow each other without gaps");
    expect_same_run("@/ramp", RAMP + "--graph on", "--batch-ramp and graphs");
    expect_run(true, "--micro-batch auto divides the first batch of a ramp",
               run("train" + SMALL + "--steps 1 --micro-batch auto --total-batch 144 --batch-ramp 64:99"),
               {"of 1 x 16"});
    expect_run(true, "a warm-up that ends in a ramp is not said to exceed the run",
               run("train" + SMALL + "--micro-batch 1 --total-batch 64 --batch-ramp 16:320 --tokens 320 --warmup 8"),
               {" 13/13 loss", "!longer than the run"});
    begin_from("@/other", "@/ramp", "/step_000005");
    expect_same_run("@/ramp", "train --resume", "resumed in the ramp");

    // 4 steps of 32 tokens, then 64: from there on the windows are those of steps 3 and 4 with 64 tokens.
    const std::string FIXED = "train" + SMALL + "--micro-batch 2 --lr 0 --min-lr 0 --eval-every 0 --graph on ";
    const Outcome grown = run(FIXED + "--total-batch 64 --batch-ramp 32:128 --steps 6 --out @/grown");
    for (const char* batch : {"32", "64"}) run(FIXED + "--steps 4 --total-batch " + batch + " --out @/fixed_" + batch);
    auto values = [](const std::string& out, size_t line) {
        const json record = record_of(out, line);
        return format("%s %s", record["loss"].dump().c_str(), record["norm"].dump().c_str());
    };
    bool same = true;
    for (size_t line = 0; line < 6; line++)
        same = same && values("@/grown", line) == values(line < 4 ? "@/fixed_32" : "@/fixed_64", line - line / 4 * 2);
    expect_run(same, "steps of a ramp have the loss and norm of a constant batch with the same windows", grown);
}

// The gradient of b tokens has E|G_b|^2 = |G|^2 + S / b. The first micro-batch of a step is one window of 16 tokens, of
// which another run logs the norm; the step is 16 windows.
TEST("runs: gradient noise scale") {
    const std::string NOISE = "train --layers 2 --heads 1 --channels 16 --context 16 --val-fraction 0 --shuffle no "
        "--micro-batch 1 --matmul-tuning off --data @/text.txt --schedule constant --lr 0 --min-lr 0 ";
    const std::string ALL = NOISE + "--total-batch 256 --steps 3 --noise-every 1 --out ";
    const Outcome windows = run(NOISE + "--total-batch 16 --steps 33 --out @/windows"), outcome = run(ALL + "@/noise");
    auto logged = [](const std::string& out, size_t line, const char* key) {
        return record_of(out, line).value(key, double{NAN});
    };
    const double limit = FLOATX == DType::FP32 ? 1e-4 : 1e-2;
    double gradient = 0, trace = 0, scale = 0;   // gradient, trace: moving averages
    bool right = true;
    for (size_t line = 0; line < 3; line++) {
        const double one = pow(logged("@/windows", 16 * line, "norm"), 2);
        const double all = pow(logged("@/noise", line, "norm"), 2);
        const double G = logged("@/noise", line, "noise_gradient"), S = logged("@/noise", line, "noise_trace");
        right = right && fabs(G / ((256 * all - 16 * one) / (256 - 16)) - 1) < limit &&
                fabs(S / ((one - all) / (1.0 / 16 - 1.0 / 256)) - 1) < limit;
        gradient = 0.95 * gradient + 0.05 * G;
        trace = 0.95 * trace + 0.05 * S;
        scale = logged("@/noise", line, "noise_scale");
    }
    expect_run(right && windows.code == 0,
               "--noise-every: |G|^2 and S follow from the norms of a micro-batch and of the step", outcome);
    expect(fabs(scale / (trace / gradient) - 1) < 1e-9,
           "the noise scale is the quotient of the moving averages of S and |G|^2",
           format("%.12g, expected %.12g", scale, trace / gradient));
    const Outcome scaled = run(ALL + "@/noise_scaled --loss-scaling 1024 --grad-clip 0.01 --graph on");
    expect_run(fabs(logged("@/noise_scaled", 2, "noise_scale") / scale - 1) < 1e-2,
               "the loss scale, clipping and graphs do not change the noise scale", scaled);

    const std::string SOME = TEN + "--noise-every 2 ";
    const Outcome some = run(SOME + "--recompute full --out @/some_noise");
    need_first_run();
    expect_run(same_checkpoint("@/some_noise/step_000010", "@/first/step_000010") &&
               !record_of("@/some_noise", 0).contains("noise_scale") &&
                   record_of("@/some_noise", 1).contains("noise_scale"),
               "--noise-every 2 changes no bit of training, and measures every second step", some);
    begin_from("@/other", "@/some_noise", "/step_000005");
    expect_same_run("@/some_noise", "train --resume", "--noise-every, resumed at step 5");
}

// ==== matmul tuning ==========================================================
// CUDA_CPU_MATMULS lists the algorithms that the emulator offers. Some of them are unsupported, fail, are slow, or must
// not be chosen because they add to the output in place.

const std::string ALL_MATMULS = "CUDA_CPU_TIMES=0 CUDA_CPU_MATMULS=refused,slow,in_place,failing,plain,fast ";
// `fast` first, because measuring the peak FLOP/s of a run uses the first algorithm: with `plain` it takes 2 s.
const std::string GOOD_MATMULS = "CUDA_CPU_MATMULS=fast,plain ";
const std::string TUNING_FILE = "@/tuning/gpt.cu/matmul.json";

struct TunedRun {
    Outcome outcome;
    std::vector<std::string> log;
    Floats losses;
};

TunedRun tuned_run(const std::string& flags, const std::string& environment) {
    const std::string command = "train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 4 --lr 1e-2 --eval-every 2 "
                                "--checkpoint-every 0 --verbose --out @/tuned " + flags;
    TunedRun r = {run(command, environment + " XDG_CACHE_HOME=@/tuning"), log_of("@/tuned"), {}};
    for (const std::string& record : r.log) r.losses.push_back(json::parse(record).value("loss", 0.0));
    fs::remove_all(scratch("@/tuned"));
    return r;
}

// In BF16 another algorithm rounds some products differently, which AdamW's first steps amplify.
constexpr double TUNING_TOLERANCE = FLOATX == DType::FP32 ? 1e-5 : 2e-3;

TEST("runs: matmul tuning") {
    const TunedRun off = tuned_run("--matmul-tuning off", "");
    // With a seed, the emulator fills new memory with NaN: a loss is NaN if tuning leaves its results in the gradients.
    const TunedRun on = tuned_run("", ALL_MATMULS + "CUDA_CPU_SEED=1");
    const std::string intact = read_bytes(TUNING_FILE);
    json file = json::parse(intact, nullptr, false);
    const size_t shapes = file.is_object() ? file["devices"][tuning_device()].size() : 0;
    expect_run(off.losses.size() == 6, "--matmul-tuning off times nothing", off.outcome, {"!\ntuning "});
    // A block's four matmuls and the head, once in forward, twice in backward; fc and fcproj with GELU and its
    // derivative, and without. Shapes with one algorithm are not timed.
    const size_t all = may_fuse() ? 17 : 15;
    expect_run(device.is_cpu() ? shapes == all : shapes > 0,
               format("matmul tuning times each shape once, %zu on a CPU, and writes a file", all), on.outcome,
               {format(" %zu shapes timed in ", shapes)});
    if (shapes == 0) return;
    Near("matmul tuning: losses equal those without tuning", relative_l2(on.losses, off.losses), TUNING_TOLERANCE);
#ifdef CUDA_ON_CPU
    bool allowed = true;
    for (const auto& [shape, choice] : file["devices"][tuning_device()].items()) {
        if (choice.empty()) continue;   // a kernel instead of an epilogue
        const auto algorithm = static_cast<cuda_cpu::Algorithm>(choice[0][0].get<int>());
        allowed = allowed && (algorithm == cuda_cpu::Algorithm::plain || algorithm == cuda_cpu::Algorithm::fast);
    }
    expect(allowed, "matmul tuning never chooses an algorithm that is slow, fails, or adds in place", intact);
#endif
    const TunedRun again = tuned_run("", GOOD_MATMULS);
    expect_run(again.log == on.log && read_bytes(TUNING_FILE) == intact,
               "matmul tuning: a second run reads the algorithms from the file and gives the same bits", again.outcome,
               {format(" %zu shapes known from ", shapes)});
    write_bytes(TUNING_FILE, intact.substr(0, intact.size() / 2));
    const TunedRun damaged = tuned_run("", GOOD_MATMULS);
    expect_run(read_json(scratch(TUNING_FILE))["devices"][tuning_device()].size() == shapes,
               "matmul tuning: a damaged file is reported by name, ignored and replaced", damaged.outcome,
               {TUNING_FILE, "JSON"});
    json foreign = file;
    foreign["devices"]["another, 9.0, cuBLASLt 1"] = foreign["devices"][tuning_device()];
    foreign["devices"].erase(tuning_device());
    write_bytes(TUNING_FILE, foreign.dump());
    const TunedRun retimed = tuned_run("", GOOD_MATMULS);
    const json both = read_json(scratch(TUNING_FILE));
    expect_run(both["devices"].size() == 2 &&
                   both["devices"]["another, 9.0, cuBLASLt 1"] == foreign["devices"]["another, 9.0, cuBLASLt 1"],
               "matmul tuning: the algorithms of another device are not used, but stay in the file", retimed.outcome,
               {format(" %zu shapes timed in ", shapes)});
    file["devices"][tuning_device()].begin().value()[0] = std::vector<uint64_t>(8, UINT64_MAX);
    write_bytes(TUNING_FILE, file.dump());
    expect_run(true, "matmul tuning: a shape whose algorithm the device lacks is timed again",
               tuned_run("", GOOD_MATMULS).outcome,
               {" 1 shapes timed in ", format("%zu shapes known", shapes - 1)});
    const Outcome unsaved = run("train" + SMALL + "--steps 1", GOOD_MATMULS + "XDG_CACHE_HOME=@/text.txt");
    expect_run(unsaved.err.empty(), "matmul tuning: a file that cannot be written does not end the run", unsaved,
               {"the choices are not saved\n"});
#ifdef CUDA_ON_CPU
    // The algorithm `coarse` clears the last bits of its sums.
    file = json::parse(intact);
    for (auto& choice : file["devices"][tuning_device()])
        if (!choice.empty()) choice[0][0] = static_cast<int>(cuda_cpu::Algorithm::coarse);
    write_bytes(TUNING_FILE, file.dump());
    const TunedRun coarse = tuned_run("", GOOD_MATMULS);
    expect_run(coarse.log != on.log, "matmul tuning: the algorithms in the file are used", coarse.outcome,
               {" 0 shapes timed in "});
    Near("matmul tuning: losses with another algorithm equal those without tuning",
         relative_l2(coarse.losses, off.losses), TUNING_TOLERANCE);
#endif
}

#if defined(CUDA_ON_CPU) && WARP_SIZE == 32
// On an emulated H100. The kernel tests compare results with and without the epilogues.
TEST("runs: the same bits with tuned epilogues") {
    if (!may_fuse()) return;
    const std::string card = GOOD_MATMULS + "CUDA_CPU_CARD=h100 ";
    const TunedRun off = tuned_run("--matmul-tuning off", card);
    const TunedRun selective = tuned_run("--matmul-tuning off --recompute selective", card);
    expect_run(true, "an H100 times the epilogues GELU and GELU', and what replaces them", tuned_run("", card).outcome,
               {" 17 shapes timed in ", " of 2 optional epilogues used\n"});
    expect(off.losses.size() == 6 && off.log == selective.log,
           "with --matmul-tuning off, --recompute does not change a bit");
    expect_run(true, "--recompute selective does not fuse GELU, which it computes again",
               tuned_run("--recompute selective", card).outcome, {" 1 of 1 optional epilogues used\n"});
}
#endif

// ==== output and log =========================================================

TEST("runs: log") {
    const Outcome outcome = run("train" + SMALL + "--micro-batch auto --total-batch 112 --steps 3 --eval-every 3 "
                                "--val-fraction 0.2 --recompute full --checkpoint-every 1 --keep 1 --out @/log");
    std::vector<json> records;
    for (const std::string& line : split(read_bytes("@/log/log.jsonl"), "\n"))
        if (!line.empty()) records.push_back(json::parse(line, nullptr, false));
    bool right = records.size() == 6 &&
                 has_paths(records[0], {"/run/device", "/run/cuda_runtime", "/run/cuda_driver", "/run/cublaslt",
                                        "/run/peak_flops", "/run/gpus", "/run/flops_per_token"}) &&
                 records[0]["run"]["options"]["total-batch"] == 112 && records[0]["run"]["model"]["vocab"] == 256;
    for (size_t i = 1; right && i < 4; i++)
        right = has_paths(records[i], {"/loss", "/norm", "/lr", "/ms", "/tokens_per_s", "/mfu", "/hfu"}) &&
                records[i]["step"] == i;
    expect_run(right && records[4].contains("val_loss") && records[4]["step"] == 3 && has_end("@/log", "complete"),
               "log.jsonl holds the run, each step, each evaluation and the end, one object per line", outcome);
    if (!right) return;
    const json start = records[0]["run"], flops = start["flops_per_token"];
    const double peak = double(start["peak_flops"]) * double(start["gpus"]);
    Options o;
    o.steps = 3;
    for (long step = 0; step < 3; step++) {
        const json& record = records[1 + step];
        const double unit = double(record["tokens_per_s"]) / peak;
        right = right && fabs(double(record["mfu"]) / (double(flops["model"]) * unit) - 1) < 1e-9 &&
                fabs(double(record["hfu"]) / (double(flops["hardware"]) * unit) - 1) < 1e-9 &&
                record["lr"] == adamw_settings(o, step).lr;
    }
    expect(right && flops["hardware"] > flops["model"],
           "the log has MFU by model FLOPs, HFU by hardware FLOPs, and the learning rate of each step");
    expect_run(true, "the validation loss is over the tokens of --val-fraction", outcome, {" over 599 tokens, "});
    expect_run(true, "--micro-batch auto is the largest micro-batch that fits and divides the total batch", outcome,
               {"112 tokens = 1 micro-batch of 7 x 16"});
    expect_run(true, "without a terminal each step is printed on its own line", outcome,
               {"step 1/3 loss", "left\n", "!\r"});
    const auto kept = list_checkpoints(scratch("@/log"));
    expect(kept.size() == 1 && kept.count(3), "--keep 1 keeps the last checkpoint");
}

TEST("runs: seed") {
    need_first_run();
    auto loss = [](const std::string& options) {   // of the first step
        const std::string fixed = "train --data @/text.txt --eval-every 0 --checkpoint-every 0 --steps 1 --out @/seed ";
        run(fixed + "--matmul-tuning off " + options);
        const double loss = record_of("@/seed", 0).value("loss", NAN);
        fs::remove_all(scratch("@/seed"));
        return loss;
    };
    for (const auto& [what, options] : std::map<std::string, std::string>{
             {"initial weights", SMALL + "--shuffle no --seed "}, {"order of the data", "--from @/first --seed "}}) {
        const double one = loss(options + "1"), two = loss(options + "2");
        expect(one < two || one > two, "--seed determines the " + what, format("losses %.17g and %.17g", one, two));
    }
}

TEST("runs: start and progress") {
    const Outcome brief = run("train" + SMALL + "--steps 1"), verbose = run("train" + SMALL + "--steps 1 --verbose");
    std::string labels;
    bool short_lines = true;
    for (const std::string& line : split(brief.out.substr(0, brief.out.find("step 1/1")), "\n")) {
        labels += line.substr(0, 11);
        short_lines = short_lines && line.size() <= 100 + strlen(device.properties.name) * (labels == "device     ");
    }
    expect_run(labels == "device     model      data       step       memory     " && short_lines,
               "a run starts with five lines of at most 100 columns, besides the device's name", brief,
               {"; not saved without --out\n", "!\nattention  "});
    expect_run(true, "--verbose adds kernels and memory by category", verbose,
               {"\nattention  ", "\n  activations  "});
    size_t widest = 0;
    for (const long step : {1L, 9999999L})
        for (const double speed : {0.5, 99.99e3, 99.99e6})
            for (const double left : {0.0, 359999.0, 86400 * 999.0})
                for (const double norm : {0.12, 99999.0, double(INFINITY)})
                    for (const double z : {double(NAN), 11.26})
                        for (const bool skipped : {false, true}) {
                            const StepResult r = {12.3456, norm, 6e-4, 1, speed, 0.999, 0.999, MAX_LOSS_SCALE, true,
                                                  skipped, z, z};
                            widest = std::max(widest, progress_text(step, 9999999, r, left, false).size());
                        }
    expect(widest < 80, "the progress line has less than 80 columns", std::to_string(widest));
    const StepResult usual = {3.29, 0.43, 6e-4, 1, 645.2e3, 0.512, 0.512, 1024, true};
    const std::string text = progress_text(12345, 19073, usual, 5025, false);
    expect(text == "step 12345/19073 loss 3.2900  norm 0.43  645.2k tok/s  MFU 51.2%  1:23:45 left" &&
               contains(progress_text(1, 9, usual, 25, true), "  norm 0.43  scale 1024  ") &&
               contains(progress_text(1, 9, usual, 200000, true), " 3.2900  scale 1024  ") &&
               contains(progress_text(1, 9, usual, 200000, true), "  2d 07:33 left"),
           "the progress line has the norm if it fits, and with --verbose the loss scale", text);
    StepResult spike = usual;
    spike.loss_z = 3.1, spike.norm_z = -9;
    const std::string of_loss = progress_text(12345, 19073, spike, 5025, false);
    spike.loss_z = 3, spike.norm_z = 11.2, spike.skipped = true;
    const std::string of_norm = progress_text(12345, 19073, spike, 5025, false);
    expect(of_loss == "step 12345/19073 loss 3.2900 (z 3.1)  norm 0.43" &&
               of_norm == "step 12345/19073 loss 3.2900  norm 0.43 (z 11.2)  skipped",
           "the progress line has z-scores above 3, and whether the step was skipped", of_loss + "\n" + of_norm);
}

TEST("runs: numbers") {
    std::string found;
    for (double x : {999.4, 1e3, 1e6, 12.34e9}) found += short_number(x) + " ";
    for (long n : {7L, 999L, 1000L, 1003855L}) found += grouped(n) + " ";
    for (double seconds : {59.6, 3599.0, 3600.0, 86399.0, 86400.0}) found += clock_text(seconds) + "; ";
    for (size_t bytes : {size_t(900), size_t(999000), size_t(1000000), size_t(24810000000), BEYOND_MEMORY})
        found += size_text(bytes) + "; ";
    expect(found == "999 1.0k 1.00M 12.34B 7 999 1,000 1,003,855 1:00; 59:59; 1:00:00; 23:59:59; 1d 00:00; "
                    "0.9 kB; 999.0 kB; 1.0 MB; 24.81 GB; more than 72 PB; ",
           "numbers, durations and sizes are printed in the largest unit that they reach", found);
}

TEST("runs: no device") {
    expect(device_problem(cudaSuccess, 1, 12040).empty() &&
               device_problem(cudaSuccess, 0, 12040) == "no GPU was found" &&
               contains(device_problem(cudaErrorNotSupported, 0, 0), "no NVIDIA driver responds: install") &&
               contains(device_problem(cudaErrorNotSupported, 0, 11080),
                        format("supports CUDA 11.8, this build needs %d.0: install", CUDART_VERSION / 1000)) &&
               device_problem(cudaErrorNotSupported, 0, CUDART_VERSION) == cudaGetErrorString(cudaErrorNotSupported),
           "without a device the message says whether a driver, a newer one or a GPU is missing");
}

TEST("runs: damaged log") {
    need_first_run();
    begin_from("@/damaged_log", "@/first", "/step_000005");
    const std::string log = read_bytes("@/first/log.jsonl");
    const size_t first_end = log.find('\n') + 1;
    const std::vector<std::string> DAMAGED = {
        "{\"step\": \"3\"}", "{\"step\": -1}", "{\"step\": 2.5}", "[4]", std::string(1000000, '['), "{\"\xff\": 1}",
        "{\"step\": 1, \"step\": 2}", "", "{\"step\": 18446744073709551617}"};
    std::string lines;
    for (const std::string& line : DAMAGED) lines += line + "\n";
    write_bytes("@/damaged_log/log.jsonl", log.substr(0, first_end) + lines + log.substr(first_end) + "{\"st");
    const Outcome resumed = run("train --resume --out @/damaged_log");
    expect_run(log_of("@/damaged_log") == log_of("@/first"),
               "--resume removes damaged lines from the log and prints how many", resumed,
               {"@/damaged_log/log.jsonl: 9 damaged lines"});
}

// Returns the commands that a run prints at its end. The keys are the first words of their lines.
std::map<std::string, std::string> next_commands(const std::string& out) {
    std::map<std::string, std::string> commands;
    for (const std::string& line : split(out.substr(std::min(out.size(), out.find("\ndone "))), "\n"))
        if (line.size() > 11) commands[line.substr(0, line.find("  "))] = line.substr(11);
    return commands;
}

// Runs the printed command that resumes the run in a shell, with this program and with --steps added.
TEST("runs: interrupted") {
    fs::create_directory(scratch("@/my"));
    Run interrupted(ENDLESS + "--checkpoint-every 0 --beta2 0.99 --out \"@/my/it's\"");
    wait_for_steps("@/my/it's");
    fs::create_directory(scratch("@/my/it's/unfinished_step_000001"));   // as while a checkpoint is written
    for (const char* resume : {"", " --resume", " --resume auto"}) {
        const Outcome second = run(ENDLESS + "--out \"@/my/it's\"" + resume);
        expect_run(fs::exists(scratch("@/my/it's/unfinished_step_000001")),
                   format("a second run%s in the same folder is rejected and changes nothing", resume), second,
                   {"--out @/my/it's: another run"}, 2);
    }
    const Outcome stopped = interrupted.end(SIGINT);
    const size_t steps = log_of("@/my/it's").size();
    const std::string checkpoint = scratch(format("@/my/it's/step_%06zu", steps));
    expect_run(has_last_checkpoint("@/my/it's") && has_end("@/my/it's", "signal"),
               "SIGINT ends a run with exit code 0, a checkpoint of its last step and the end in the log", stopped,
               {"stopping after this step"});
    auto next = next_commands(stopped.out);
    expect_run(next["sample"] == PROGRAM + " sample --from " + shell_word(checkpoint) &&
                   next["plot"] == "python3 scripts/plot.py " + shell_word(scratch("@/my/it's")) + " --out " +
                                       shell_word(scratch("@/my/it's/plot.png")) &&
                   !next.count("open"),
               "the run prints commands that sample from the checkpoint and plot into a named file", stopped);
    std::string resume;
    if (contains(next["resume"], PROGRAM)) resume = next["resume"].substr(PROGRAM.size());
    const Outcome resumed = run(resume + format(" --steps %zu", steps + 2));
    expect_run(log_of("@/my/it's").size() == steps + 2 && has_end("@/my/it's", "complete"),
               "the printed command with --resume resumes the run with the same options", resumed,
               {"--steps was", "!--beta2 was", "!--resume"});
    need_words();
    const Outcome numbers = run("train --from @/numbers --data @/numbers.bin --steps 1 --verbose --out @/more_numbers");
    next = next_commands(numbers.out);
    expect_run(contains(next["sample"], "--prompt-tokens 799") && !next.count("resume"),
               "the printed sample command of a model without a tokenizer has a token as its prompt", numbers);
    expect_run(contains(next["open"], scratch("@/more_numbers/step_000001")),
               "--verbose also prints a command that opens the checkpoint with transformers", numbers);
}

TEST("runs: trace") {
    for (const std::string flags : {"--recompute none", "--recompute full", "--attention naive"}) {
        const Outcome o = run("train" + SMALL + "--micro-batch 2 --total-batch 64 --steps 4 --eval-every 0 --graph on "
                              "--trace @/trace.json " + flags, "CUDA_CPU_TIMES=0");
        const json bytes = json::parse(run("plan --layers 2 --heads 2 --channels 32 --context 16 --vocab 256 "
                                           "--micro-batch 2 --json " + flags).out).at("bytes");
        std::map<int, double> row_end;         // end of the last event of each row
        std::map<double, double> activations;  // live bytes by time
        std::vector<double> updates;           // start times
        std::set<std::string> passes;
        bool ordered = true, within = true;
        double highest = 0;
        const json trace = read_json(scratch("@/trace.json"));
        for (const json& e : trace.at("traceEvents")) {
            if (e.at("ph") == "X") {
                const double ts = e.at("ts"), end = ts + double(e.at("dur"));
                double& last = row_end[e.at("tid")];
                ordered = ordered && ts >= last - 1e-3 && end >= ts;   // microseconds, printed to the nanosecond
                last = end;
                passes.insert(e.at("args").at("pass"));
                if (e.at("name") == "adamw" && e.at("tid") == 1) updates.push_back(ts);
            } else if (e.at("ph") == "C") {
                for (const auto& [name, alive] : e.at("args").items()) within = within && alive <= bytes.at(name);
                const double alive = activations[e.at("ts")] = e.at("args").at("activations");
                highest = std::max(highest, alive);
            }
        }
        expect_run(ordered && row_end.size() == 3, flags + ": events of a row do not overlap", o);
        expect(within && highest > 0.5 * double(bytes.at("activations")), flags +
               ": live bytes exceed half of the planned activations and stay within the plan");
        bool dead = updates.size() == 2 * TRACED_STEPS;   // one for group 0, one for layers
        for (double time : updates) dead = dead && std::prev(activations.upper_bound(time))->second == 0;
        expect(dead, flags + ": no activation is live at the update");
        std::set<std::string> expected = {"forward", "backward", "update"};
        if (flags == "--recompute full") expected.insert("recompute");
        expect(std::includes(passes.begin(), passes.end(), expected.begin(), expected.end()) &&
                   passes.count("recompute") == expected.count("recompute"),
               flags + ": events name the passes forward, backward, update and, where it runs, recompute");
    }
}

// ==== plan ===================================================================

const std::string BATCH = "--gpu-memory 80GB --total-batch 4194304 --bandwidth 50 ";

TEST("runs: plan") {
    const std::string GPT2 = "plan --model gpt2 --gpu-memory 80GB --json ";
    const Outcome outcome = run(GPT2 + "--micro-batch 4 --recompute full");
    const json plan = json::parse(outcome.out, nullptr, false);
    const bool right = has_paths(plan, {"/bytes/weights", "/bytes/gradients", "/bytes/master", "/bytes/adam_m",
        "/bytes/adam_v", "/bytes/activations", "/bytes/workspace", "/bytes/total", "/bytes_per_parameter",
        "/flops_per_token/model", "/flops_per_token/hardware", "/max_micro_batch/none", "/max_micro_batch/selective",
        "/max_micro_batch/full", "/tensors/0/name", "/tensors/0/shape/0", "/tensors/0/dtype", "/tensors/0/bytes"});
    expect_run(right && plan["parameters"] == 124439808 && plan["precision"] == "bf16",
               "plan --json prints the documented keys", outcome);
    if (!right) return;
    const json &bytes = plan["bytes"], &most = plan["max_micro_batch"];
    size_t sum = 0, tensors = 0;
    for (const auto& [name, n] : bytes.items()) sum += name == "total" ? 0 : size_t(n);
    for (const json& tensor : plan["tensors"]) tensors += size_t(tensor["bytes"]);
    const size_t expected = size_t(bytes["weights"]) + size_t(bytes["activations"]) + size_t(bytes["workspace"]);
    expect(sum == bytes["total"] && tensors == expected, "plan: bytes and tensors add up to the totals");
    expect(0 < most["none"] && most["none"] < most["selective"] && most["selective"] < most["full"],
           "plan: more recomputation allows a larger micro-batch", most.dump());
    expect_run(true, "plan: a model larger than the memory prints percentages above 100",
               run("plan --model gpt2-xl --gpu-memory 1GB"), {"311.5 %", "623.1 %", "does not fit"});
    int recipes = 0;   // scripts that state the memory that plan predicts
    for (const auto& entry : fs::directory_iterator("scripts")) {
        const std::string name = entry.path().filename();
        if (name.rfind("gpt2_", 0) != 0) continue;   // such as __pycache__, a folder
        const std::string text = read_bytes(entry.path());
        const size_t options = text.rfind("--model "), end = text.find(" --lr");
        if (options == text.npos || end == text.npos) continue;
        recipes++;
        const Outcome planned = run("plan --gpu-memory 80GB " + text.substr(options, end - options));
        const size_t number = planned.out.find_first_of("0123456789", planned.out.find("memory "));
        const std::string total = planned.out.substr(number, planned.out.find(" of ", number) - number);
        expect_run(contains(text, total), name + ": fits in 80GB and states the planned memory", planned, {"\n  fits"});
    }
    expect(recipes == 4, "plan: scripts/ has 4 recipes", std::to_string(recipes));
}

// Expects that the last line of plan is a train command with these flags, for which plan predicts the same memory.
void same_plan(const std::string& options, const std::string& expected_flags) {
    const std::string device = " --precision bf16 --gpu-memory 80GB ";
    const Outcome table = run("plan " + options + device);
    const std::string command = table.out.substr(table.out.rfind("\ntrain ") + 1);
    const size_t begin = command.find(PROGRAM), end = command.find(" --data PATTERN\n");
    const std::string flags = end == command.npos ? "" : command.substr(begin + PROGRAM.size(), end - begin -
                                                                                              PROGRAM.size());
    expect_run(flags == expected_flags && contains(command, "make PRECISION=bf16 && ") == (FLOATX != DType::BF16),
               "plan " + options + ": the last line is a command", table);
    const json again = json::parse(run("plan " + flags + device + "--json").out, nullptr, false),
               planned = json::parse(run("plan " + options + device + "--json").out, nullptr, false);
    if (planned["fits"]) expect(again["bytes"] == planned["bytes"] && again["micro_batch"] == planned["micro_batch"],
                                "plan " + options + ": its flags plan the same memory", again["bytes"].dump());
    else expect(again["fits"], "plan " + options + ": its flags fit");
}

TEST("runs: plan ends with a command") {
    same_plan("--model gpt2-medium --micro-batch auto --total-batch 524288 --grad-dtype bf16",
              " --model gpt2-medium --micro-batch 64 --total-batch 524288 --recompute none --grad-dtype bf16");
    same_plan("--layers 3 --gpus 4 --zero 2",
              " --model gpt2 --layers 3 --micro-batch 4 --recompute none --gpus 4 --zero 2");
    same_plan("--layers 3 --gpus 8 --zero 1 --tensor-parallel 4 --micro-batch 3000",
              " --model gpt2 --layers 3 --micro-batch 2576 --recompute none --gpus 8 --tensor-parallel 4 --zero 1");
    same_plan("--model gpt2-xl --micro-batch 256",
              " --model gpt2-xl --micro-batch 19 --recompute none");
    same_plan("--seq-len 1000 --matmul fp8-all --micro-batch auto",   // 245 sequences fit, but 245 x 1000 % 16 = 8
              " --model gpt2 --micro-batch 244 --seq-len 1000 --recompute none --matmul fp8-all");
    const Outcome scan = run("plan --scan --model 7b --gpus 8 " + BATCH);
    const std::string first = scan.out.substr(scan.out.rfind("\n->     8"));
    int tensor = 0, zero = 0, micro_batch = 0;
    char mode[16] = "";
    const bool right = sscanf(first.c_str(), "\n-> 8 %d %d %d %*d %15s", &tensor, &zero, &micro_batch, mode) == 4;
    const std::string groups = tensor > 1 ? format(" --tensor-parallel %d", tensor) : "";
    expect_run(right, "plan --scan: ends with the command of the fastest layout", scan,
               {format(" --micro-batch %d --total-batch 4194304 --recompute %s --gpus 8%s --zero %d --data PATTERN\n",
                       micro_batch, mode, groups.c_str(), zero)});
}

TEST("runs: plan of many GPUs") {
    const std::string command = "plan --model 7b " + BATCH + "--gpus 64 --zero 2 --grad-dtype bf16 --micro-batch 2 "
                                "--flops 300 --tensor-parallel 4 --tensor-bandwidth 100";
    const Outcome outcome = run(command + " --json"), table = run(command),
        silent = run("plan --gpus 2 --gpu-memory 8GB --json");
    const json record = json::parse(outcome.out), other = json::parse(silent.out);
    expect_run(has_paths(record, {"/gpus", "/zero", "/bytes/buffers", "/flops_per_s", "/step/computing",
                                  "/step/sending", "/step/exposed", "/step/tokens_per_s"}),
               "plan --gpus --json prints the documented keys", outcome);
    Setup s = planned("7b", 2, 2048, DType::BF16, DType::BF16, 64, 2);
    s.tensor = 4;
    const StepTime t = Timeline(step_work(s, 300e12, 50e9, 100e9)).run(64);
    const json& step = record["step"];
    expect_run(record["bytes"]["total"] == plan(s).total && record["bytes_sent"] == t.bytes + t.tensor_bytes &&
                   record["tensor_bytes_sent"] == t.tensor_bytes && step["seconds"] == t.seconds &&
                   step["tensor_exposed"] == t.waiting && step["tensor_sending"] == t.tensor_bytes / 100e9,
               "plan --gpus: memory, communication and time are those of plan() and Timeline", outcome);
    expect_run(other["step"].is_null() && double(other["bytes_sent"]) > 0,
               "plan --gpus: without --bandwidth bytes are printed, and no time", silent);
    expect_run(true, "plan --gpus: the table marks the given layout, and a command line follows it", table,
               {"\n->    64       4     2 ", " of it in its tensor group\n", "in a tensor group 100 GB/s",
                " --gpus 64 --tensor-parallel 4 --zero 2 --data PATTERN\n"});
}

TEST("runs: plan --scan") {
    auto scan = [&](const std::string& command) {
        return json::parse(run("plan --scan --json " + BATCH + command).out, nullptr, false)["scan"];
    };
    const json layouts = scan("--model 7b --gpus 32");
    std::set<std::tuple<int, int, int, std::string>> listed;
    bool sorted = true, exact = true, complete = true;
    const json* before = nullptr;
    for (const json& one : layouts) {
        Setup s = planned("7b", one["micro_batch"], 2048, DType::BF16, DType::FP32, one["gpus"], one["zero"]);
        s.tensor = one["tensor_parallel"];
        for (const auto& [name, mode] : RECOMPUTE_NAMES)
            if (one["recompute"] == name) s.recompute = mode;
        listed.emplace(s.gpus, s.tensor, s.zero, one["recompute"]);
        const long A = one["accumulation"];
        exact = exact && one["bytes"]["total"] == plan(s).total && A * s.N() * s.data() == 4194304 &&
                one["step"]["seconds"] == Timeline(step_work(s, 400e12, 50e9, 300e9)).run(A).seconds;
        const bool same = before && (*before)["gpus"] == s.gpus;
        sorted = sorted && (!same || (*before)["step"]["seconds"] <= double(one["step"]["seconds"]) * (1 + 2e-6));
        complete = complete && plan(s).total <= size_t(80e9 * 0.95);
        s.B *= 2;   // the next larger divisor, because the total batch is a power of two
        complete = complete && (A == 1 || plan(s).total > size_t(80e9 * 0.95));
        before = &one;
    }
    for (int gpus = 1; gpus <= 32; gpus *= 2)
        for (int i = 0; i < 4 * (gpus > 1 ? 4 : 1); i++)
            for (const auto& [name, mode] : RECOMPUTE_NAMES) {
                const int tensor = 1 << i % 4, zero = i / 4;
                Setup s = planned("7b", 1, 2048, DType::BF16, DType::FP32, gpus, zero);
                s.tensor = tensor;
                s.recompute = mode;
                const bool fits = gpus % tensor == 0 && plan(s).total <= size_t(80e9 * 0.95);
                complete = complete && listed.count({gpus, tensor, zero, name}) == fits;
            }
    expect(sorted && !layouts.empty(), "plan --scan: the layouts of each number of GPUs are sorted by time");
    expect(exact, "plan --scan: bytes and time are those of plan() and Timeline");
    expect(complete, "plan --scan lists exactly the layouts that fit, with the largest micro-batch", layouts.dump());
    const json held = scan("--model 7b --gpus 64 --tensor-parallel 1 --zero 3 --recompute selective --micro-batch 4"),
        heads = scan("--model gpt2-xl --gpus 15 --tensor-parallel 5 --context 1000 --total-batch 120000"),
        none = scan("--model 70b --gpus 8");
    expect(held.size() > 1 && held.back()["gpus"] == 64 && held.back()["zero"] == 3 &&
               held.back()["micro_batch"] == 4 &&
               held.back()["recompute"] == "selective" && held.back()["accumulation"] == 8 && none == json::array(),
           "plan --scan keeps the given --zero, --recompute and --micro-batch; it lists no layout if none fits",
           held.dump() + none.dump());
    expect(!heads.empty() && std::all_of(heads.begin(), heads.end(), [](const json& one) {
               return one["gpus"] == 15 && one["tensor_parallel"] == 5;
           }), "plan --scan keeps the given --tensor-parallel, for numbers of GPUs that it divides", heads.dump());
}

// ==== eval and sample ========================================================

struct EvalLines { double loss = 0, perplexity = 0, bits = 0; size_t tokens = 0, bytes = 0; };

EvalLines eval_lines(const Outcome& e) {
    EvalLines l;
    const char* lines = "loss %lf over %zu tokens\nperplexity %lf\nbits per byte %lf over %zu bytes";
    sscanf(e.out.c_str(), lines, &l.loss, &l.tokens, &l.perplexity, &l.bits, &l.bytes);
    return l;
}

// Compares losses with that of transformers' logits for two sequences. Each sequence is written to its own token shard.
TEST("runs: Hugging Face") {
    const Safetensors file("data/reference/hf_tiny_expected.safetensors");
    const std::vector<int> ids = read_ints(file, "input_ids");
    const Floats logits = read_floats(file, "logits");
    const size_t B = file.at("logits").shape[0], T = file.at("logits").shape[1];
    std::vector<int> targets(ids.begin() + 1, ids.end());
    targets.push_back(-1);
    for (size_t b = 0; b < B; b++) {
        write_bytes(format("@/hf_%zu.bin", b), shard({ids.begin() + b * T, ids.begin() + (b + 1) * T}));
        targets[(b + 1) * T - 1] = -1;
    }
    const double expected = mean_loss(logits, targets);
    const EvalLines e = eval_lines(run("eval --from data/reference/hf_tiny --data @/hf_*.bin"));
    expect(e.tokens == B * (T - 1), "eval counts all tokens except the first of each file");
    Near("eval prints the loss of transformers' logits", fabs(e.loss / expected - 1), LOSS_TOLERANCE);
    run("train --from data/reference/hf_tiny --data @/hf_*.bin --val-fraction 0 --seq-len 31 --shuffle no "
        "--micro-batch 2 --steps 1 --checkpoint-every 0 --out @/from_hf");
    const double start = record_of("@/from_hf", 0).value("loss", NAN);
    Near("train --from starts with the loss of transformers' logits", fabs(start / expected - 1), LOSS_TOLERANCE);

    const std::string SAMPLE = "sample --from data/reference/hf_tiny --sample-tokens 40 --prompt-tokens 1,2,3 ";
    const Outcome greedy = run(SAMPLE + "--temperature 0"), top_p = run(SAMPLE + "--top-p 0 --seed 3");
    const Outcome random = run(SAMPLE + "--seed 3"), again = run(SAMPLE + "--seed 3");
    std::istringstream words(greedy.out);
    const size_t count = std::distance(std::istream_iterator<int>(words), {});
    expect_run(count == 43 && greedy.out.rfind("1 2 3 ", 0) == 0,
               "sample continues a prompt past the context length", greedy);
    expect(top_p.out == greedy.out && run(SAMPLE + "--top-k 1").out == greedy.out && random.out != greedy.out &&
               random.out == again.out,
           "--top-p 0 and --top-k 1 equal --temperature 0; the same seed gives the same sample");
}

TEST("runs: eval and sample") {
    need_first_run();
    need_words();
    const Outcome of_run = run("eval --from @/first --data @/text.txt");
    const EvalLines bytes = eval_lines(of_run);
    expect_run(contains(of_run.err, "/first/step_000010") && bytes.tokens == bytes.bytes && bytes.tokens == 3003 &&
                   fabs(bytes.bits - bytes.loss / log(2)) < 1e-3,
               "--from RUN reads the last checkpoint and evaluates all data; bits per byte of a byte-level model are "
               "its loss / ln 2", of_run);
    run("train" + SMALL + "--steps 1 --val-fraction 0.2 --eval-every 1 --out @/validated");
    const EvalLines part = eval_lines(run("eval --from @/validated --data @/text.txt --val-fraction 0.2"));
    const double val_loss = record_of("@/validated", 1).value("val_loss", NAN);
    expect(part.tokens == 599 && fabs(part.loss / val_loss - 1) < LOSS_TOLERANCE,
           "eval --val-fraction evaluates the tokens that training validates on", format("%f %f", part.loss, val_loss));
    const Outcome text = run("sample --from @/first --prompt cat --sample-tokens 4");
    expect_run(text.out.rfind("cat", 0) == 0 && text.out.size() == 8, "a byte-level model continues a text", text);

    const Tokenizer tokenizer(TOKENIZER);
    std::vector<uint16_t> tokens;
    size_t expected_bytes = 0;
    for (const char* part : {"Once upon a time", "caf\xc3\xa9, and nothing more"}) {
        tokens.push_back(tokenizer.added("<|endoftext|>"));
        for (int token : tokenizer.encode(part)) tokens.push_back(token);
        expected_bytes += strlen(part);
    }
    tokens.push_back(790);   // a token that the tokenizer does not have
    write_bytes("@/words.bin", shard(tokens));
    const Outcome words = run("eval --from @/words --data @/words.bin"),
        numbers = run("eval --from @/numbers --data @/words.bin");
    const EvalLines l = eval_lines(words);
    expect_run(l.tokens == tokens.size() - 1 && l.bytes == expected_bytes &&
                   fabs(l.perplexity / exp(l.loss) - 1) < 1e-3 &&
                   fabs(l.bits - l.loss * l.tokens / (log(2) * l.bytes)) < 1e-3,
               "eval prints perplexity, bits per byte without the bytes of <|endoftext|>, and speed", words,
               {" tok/s\n"});
    copy_files("@/words", "@/other_words");
    write_bytes("@/other_words/tokenizer.json", "{}");
    const Outcome other = run("eval --from @/other_words --data @/words.bin");
    expect_run(true, "without a tokenizer no bits per byte are printed", numbers, {"!per byte"});
    expect_run(contains(other.err, scratch("@/other_words/tokenizer.json")), "an unreadable tokenizer is named", other,
               {"!per byte"});

    copy_files("@/numbers", "@/overflow");
    std::vector<RawTensor> tensors = raw_tensors("@/overflow/model.safetensors");
    tensor_named("ln_f.weight", tensors).bytes = bytes_of(Floats(16, 3e38f));
    write_bytes("@/overflow/model.safetensors", safetensors(tensors));
    for (const std::string what : {"--data @/words.bin", "--hellaswag data/reference/hellaswag.bin"}) {
        const Outcome overflow = run("eval --from @/overflow " + what);
        expect_run(overflow.out.empty(), "a non-finite loss ends eval with exit code 1: " + what, overflow, {}, 1);
    }
}

TEST("runs: HellaSwag") {
    const json expected = json::parse(read_file("data/reference/hellaswag.json"));
    const std::vector<Question> questions = read_questions(QUESTIONS, 211, 32);
    double accuracy[2] = {};   // choosing endings by sum, by mean
    for (size_t q = 0; q < questions.size(); q++)
        for (int by : {0, 1})
            accuracy[by] += (expected[q]["choices"][by] == questions[q].label) / double(questions.size());
    const std::string text = format("HellaSwag acc_norm %.4f, accuracy %.4f over %zu questions\n", accuracy[1],
                                    accuracy[0], questions.size());
    const Outcome e = run("eval --from data/reference/hf_tiny --hellaswag " + QUESTIONS);
    expect_run(accuracy[0] != accuracy[1] && e.out.rfind(text, 0) == 0,
               "eval --hellaswag prints the accuracies of PyTorch's choices", e);

    write_bytes("@/of_211.bin", shard(std::vector<uint16_t>(400, 210)));
    const Outcome trained = run("train --from data/reference/hf_tiny --data @/of_211.bin --val-fraction 0 --steps 1 "
                                "--lr 1e-9 --eval-every 1 --checkpoint-every 0 --out @/asked --hellaswag " + QUESTIONS);
    expect_run(record_of("@/asked", 1).value("hellaswag", 0.0) == accuracy[1],
               "train --hellaswag logs acc_norm with each validation", trained, {"step 1: " + text});
}

// ==== text ===================================================================

// Samples tokens from @/numbers, which has no tokenizer, and returns them as text without the first `skip` tokens.
std::string decoded_sample(const std::string& prompt_tokens, size_t skip, int count) {
    const Tokenizer tokenizer(TOKENIZER);
    std::istringstream tokens(run(format("sample --from @/numbers --sample-tokens %d --prompt-tokens ", count) +
                                  prompt_tokens).out);
    std::string text;
    size_t n = 0;
    for (int token; tokens >> token; n++)
        if (n >= skip) text += tokenizer.decode(token);
    return text;
}

TEST("runs: text") {
    need_words();
    const std::string prompt = "Once upon a time, caf\xc3\xa9", WORDS = "sample --from @/words --sample-tokens 40 ";
    const Tokenizer tokenizer(TOKENIZER);
    const std::vector<int> prompt_tokens = tokenizer.encode(prompt);
    std::string numbers;
    for (int token : prompt_tokens) numbers += (numbers.empty() ? "" : ",") + std::to_string(token);
    const std::string generated = decoded_sample(numbers, prompt_tokens.size(), 40);
    write_bytes("@/prompt.txt", prompt);
    write_bytes("@/prompt.numbers", replaced(numbers, ",", "\n"));
    const Outcome words = run(WORDS + "--prompt - <@/prompt.txt"),
        by_number = run(WORDS + "--prompt-tokens " + numbers),
        from_input = run(WORDS + "--prompt-tokens - <@/prompt.numbers");
    expect_run(generated.size() > 20 && words.out == prompt + generated + "\n" && by_number.out == words.out &&
                   from_input.out == words.out,
               "a prompt from standard input or given as tokens is continued as text", words);
    size_t at = 1;   // the first two consecutive letters after the first character
    while (at + 2 < generated.size() && !(isalpha(generated[at] & 0xff) && isalpha(generated[at + 1] & 0xff))) at++;
    const std::string stop = generated.substr(at, 2);
    const Outcome stopped = run(WORDS + "--prompt - --stop " + stop + " <@/prompt.txt");
    expect_run(stopped.out == prompt + generated.substr(0, generated.find(stop)) + "\n",
               "--stop TEXT ends a sample before TEXT", stopped);
    const Outcome two = run(WORDS + "--prompt x --samples 2 --seed 5");
    expect_run(two.out == "---- sample 1, seed 5 ----\n" + run(WORDS + "--prompt x --seed 5").out +
                              "---- sample 2, seed 6 ----\n" + run(WORDS + "--prompt x --seed 6").out,
               "--samples 2 draws samples with the seeds --seed and --seed + 1", two);

    const Outcome trained = run("train --from @/words --data @/text.txt --eval-every 0 --sample-every 2 --lr 0 "
                                "--min-lr 0 --sample-tokens 30 --checkpoint-every 0 --steps 1 --matmul-tuning off");
    const std::string end = std::to_string(tokenizer.added("<|endoftext|>"));
    const std::vector<std::string> parts = split(trained.out, "---- sample ----\n");   // before step 1 and after it
    auto is_sample = [&](size_t i, const char* seed) {
        const std::string sample = readable(decoded_sample(end + seed, 1, 30));
        return sample.size() > 20 && parts[i].rfind(sample + "\n----------------\n", 0) == 0;
    };
    expect_run(parts.size() == 3 && is_sample(1, " --seed 1337") && is_sample(2, " --seed 1338"),
               "samples during training are decoded with the tokenizer of --from; the seed of step N is --seed + N",
               trained);
}

TEST("runs: text as data") {
    need_words();
    const std::string text = read_bytes("@/text.txt");
    const std::vector<int> tokens = Tokenizer(TOKENIZER).encode(text);
    write_bytes("@/tokens.bin", shard({tokens.begin(), tokens.end()}));
    auto lines = [](const std::string& data) {   // eval's output without its last line, the speed
        const std::string out = run("eval --matmul-tuning off --from @/words --data " + data).out;
        return out.substr(0, out.rfind('\n', out.size() - 2) + 1);
    };
    const std::string of_text = lines("@/text.txt");
    expect(!of_text.empty() && of_text == lines("@/tokens.bin"), "eval encodes text with the tokenizer of --from");
    const std::string COMMAND = "train --from @/words --steps 3 --eval-every 3 --checkpoint-every 2 --out ";
    const Outcome trained = run(COMMAND + "@/on_text --verbose --data @/text.txt --val-data @/text.txt");
    run(COMMAND + "@/on_shard --data @/tokens.bin --val-data @/tokens.bin");
    const std::vector<std::string> log = log_of("@/on_text");
    fs::remove_all(scratch("@/on_text/step_000003"));
    const Outcome resumed = run("train --resume --out @/on_text");
    expect_run(log.size() == 4 && log == log_of("@/on_shard"),
               "train encodes --data and --val-data with the tokenizer of --from", trained,
               {" bytes, encoded by the tokenizer in "});
    expect_run(log_of("@/on_text") == log, "train --resume encodes them again", resumed);
}

const std::vector<std::string> TOKENIZER_FILES = {
    "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tools.jinja", "generation_config.json"};

TEST("runs: tokenizer files") {
    need_first_run();
    need_words();
    const std::string dir = scratch("@/first/step_000010");
    const Tokenizer tokenizer(dir);
    std::string bytes, decoded;
    std::vector<int> tokens(BYTE_VOCAB);
    std::iota(tokens.begin(), tokens.end(), 0);
    for (int token : tokens) {
        bytes += static_cast<char>(token);
        decoded += tokenizer.decode(token);
    }
    const json file = read_json(dir + "/tokenizer.json"), config = read_json(dir + "/tokenizer_config.json");
    expect(tokenizer.encode(bytes) == tokens && decoded == bytes && file["model"]["merges"].empty() &&
               file["model"]["vocab"].size() == BYTE_VOCAB && file["added_tokens"].empty(),
           "the tokenizer.json of a byte-level model has 256 tokens, one for each byte");
    expect(config["tokenizer_class"] == "PreTrainedTokenizerFast" && config["model_max_length"] == 16 &&
               config["eos_token"] == byte_alphabet()[255] && config["bos_token"] == byte_alphabet()[255] &&
               read_json(dir + "/generation_config.json")["eos_token_id"] == 255 &&
               read_json(dir + "/config.json")["eos_token_id"] == 255,
           "the end-of-text token of a byte-level model is byte 255");
    std::string others;
    for (const std::string& name : TOKENIZER_FILES)
        others += fs::exists(scratch("@/numbers/" + name)) ? name + " " : "";
    expect(others == "generation_config.json ",
           "a model trained on token shards has generation_config.json and no tokenizer file", others);

    copy_files("@/words", "@/all_words");
    fs::create_directory(scratch("@/all_words/additional_chat_templates"));
    for (const std::string& name : TOKENIZER_FILES) {
        if (fs::exists(TOKENIZER + "/" + name)) copy_files(TOKENIZER + "/" + name, "@/all_words/" + name);
        else if (name == "added_tokens.json") write_bytes("@/all_words/" + name, "{\"<added>\": 757}");
        else write_bytes("@/all_words/" + name, "{\"file\": \"" + name + "\"}");
    }
    json theirs = read_json(scratch("@/words/config.json"));
    theirs.update({{"bos_token_id", 3}, {"eos_token_id", {4, 5}}, {"pad_token_id", 6}, {"resid_pdrop", 0.1},
                   {"their_key", {{"a", 1}}}, {"torch_dtype", "bfloat16"}, {"dtype", "bfloat16"}});
    write_json(scratch("@/all_words/config.json"), theirs);
    const std::string COMMAND = "--from @/all_words --data @/text.txt --eval-every 0 --checkpoint-every 1 --keep 1 "
                                "--out @/travel ";
    run("train --steps 2 " + COMMAND);
    const Outcome second = run("train --resume --steps 4 " + COMMAND);
    theirs.update({{"torch_dtype", "float32"}, {"dtype", "float32"}});
    expect(read_json(scratch("@/travel/step_000004/config.json")) == theirs,
           "a checkpoint has the config.json of --from, with the type of its own weights");
    std::string differing;
    for (const std::string& name : TOKENIZER_FILES)
        if (!same_file("@/all_words/" + name, "@/travel/step_000004/" + name)) differing += " " + name;
    expect_run(differing.empty() && !fs::exists(scratch("@/travel/step_000002")),
               "the tokenizer files of --from are copied to each checkpoint, also after --resume", second);
    fs::remove(scratch("@/all_words/generation_config.json"));
    const Config sizes = read_config(scratch("@/all_words/config.json"));
    const json generation = json::parse(text_files(scratch("@/all_words"), theirs, sizes,
                                                   false).at("generation_config.json"));
    expect(generation["bos_token_id"] == 3 && generation["eos_token_id"] == json({4, 5}) &&
               generation["pad_token_id"] == 6,
           "without a generation_config.json in --from, it has the token ids of config.json", generation.dump());
}

TEST("runs: the end-of-text token") {
    struct Case { std::vector<uint16_t> tokens; int V, eot, expected; };
    for (const Case& c : {Case{{50256, 5, 50256, 7}, 50304, -1, 50256}, {{5, 7}, 50304, -1, 50256},
                          {{5, 50300}, 50304, -1, 50303}, {{5, 7}, 50257, -1, 50256}, {{5, 7}, 50256, -1, 50255},
                          {{5, 7}, 50304, 5, 5}}) {
        write_bytes("@/documents.bin", shard(c.tokens));
        Options o;
        o.eot = c.eot;
        const int found = end_of_text(o, Tokens(scratch("@/documents.bin")), c.V);
        expect(found == c.expected, format("shards up to token %d, vocabulary %d, --eot %d: %d",
               *std::max_element(c.tokens.begin(), c.tokens.end()), c.V, c.eot, c.expected), std::to_string(found));
    }
    write_bytes("@/documents.bin", shard(std::vector<uint16_t>(100, 5)));
    const std::string COMMAND = "train --layers 1 --heads 1 --channels 16 --context 8 --data @/documents.bin --steps 1 "
                                "--eval-every 0 --sample-every 1 --sample-tokens 5 --vocab 300 --out @/documents ";
    const Outcome guessed = run(COMMAND + "--warmup 2 --min-lr 1"),
                  given = run(replaced(COMMAND, "--out @/documents", "--out @/given --eot 7 --warmup 1"));
    const json config = read_json(scratch("@/given/step_000001/config.json"));
    expect_run(config["bos_token_id"] == 7 && config["eos_token_id"] == 7 &&
                   contains(next_commands(given.out)["sample"], "--prompt-tokens 7"),
               "--eot is in config.json and begins samples", given, {"!note"});
    expect_run(true, "notes name a guessed end-of-text token, a warm-up beyond the run and a rising learning rate",
               guessed, {"note       the end-of-text token is 299", "note       --min-lr 1 is above --lr 0.0006",
                         "note       --warmup 2 is longer than the run of 1 steps"});
}

// ==== runs that fail =========================================================

TEST("runs: leftovers") {
    const std::vector<std::string> theirs = {"unfinished_thesis", "unfinished_step_12", "unfinished_step_000012.old",
                                             "unfinished_old_letters", "my_unfinished_step_000012"},
                                   ours = {"unfinished_step_000012", "unfinished_old_step_000003"};
    for (const auto& names : {theirs, ours})
        for (const std::string& name : names) fs::create_directories(scratch("@/mixed/" + name + "/within"));
    auto remaining = [](const std::vector<std::string>& names) {
        return std::count_if(names.begin(), names.end(),
                             [](auto& name) { return fs::exists(scratch("@/mixed/" + name)); });
    };
    const std::string COMMAND = "train" + SMALL + "--steps 1 --checkpoint-every 0 --out @/mixed ";
    const Outcome rejected = run(COMMAND + "--context 2048 --channels 128 --micro-batch 32768");
    expect_run(remaining(ours) == 2, "a rejected command removes no folder", rejected, {}, 2);
    const Outcome outcome = run(COMMAND);
    expect_run(remaining(ours) == 0 && remaining(theirs) == long(theirs.size()),
               "unfinished checkpoints are removed, other folders with similar names are kept", outcome);
    const std::vector<std::string> log = log_of("@/mixed");
    const Outcome restarted = run("train --resume --out @/mixed");
    expect_run(log_of("@/mixed") == log, "a run without a checkpoint restarts with the options in its log", restarted,
               {"has no checkpoint yet"});
    const Outcome bad = run("train" + SMALL + "--steps 1 --out @/again --vocab 100");
    expect_run(!fs::exists(scratch("@/again")), "a rejected command leaves no empty folder", bad, {}, 2);
}

TEST("runs: a checkpoint written twice") {
    const Reference r("odd");
    Model m;
    r.load(m, r.setup());
    fs::create_directory(scratch("@/twice"));
    for (int i : {1, 2}) write_checkpoint(scratch("@/twice"), m, {{"config.json", "{}"}}, 7, {{"i", i}}, 1);
    const std::vector<std::string> left = paths_in(scratch("@/twice"));
    expect(left == std::vector<std::string>{scratch("@/twice/step_000007")} &&
               read_json(left[0] + "/trainer.json")["i"] == 2, "the second checkpoint of a step replaces the first");
    // A crash after rename_folder() leaves a complete checkpoint: the new one has the name, the old one still exists.
    fs::create_directories(scratch("@/renamed/new"));
    fs::create_directories(scratch("@/renamed/old/within"));
    rename_folder(scratch("@/renamed/new"), scratch("@/renamed/old"));
    expect(fs::exists(scratch("@/renamed/new/within")) && fs::exists(scratch("@/renamed/old")) &&
               !fs::exists(scratch("@/renamed/old/within")), "folders exchange their names");
}

TEST("runs: late failures") {
    const std::string COMMAND = "train --layers 1 --heads 1 --channels 16 --context 16 --vocab 256 --val-fraction 0 "
                                "--shuffle no --micro-batch 1 --schedule constant --checkpoint-every 0 --data ";
    std::vector<uint16_t> tokens(161, 5);
    tokens[100] = 300;   // in the window of step 7, which is loaded in step 6
    write_bytes("@/late_bad.bin", shard(tokens));
    const Outcome bad = run(COMMAND + "@/late_bad.bin --steps 10 --out @/bad_data");
    expect_run(has_last_checkpoint("@/bad_data") && has_end("@/bad_data", "error"),
               "a token outside the vocabulary ends a run with a checkpoint of the last good step", bad,
               {"token 300 at position 100"}, 2);
    tokens[20] = 300;   // in the window of step 2, which is loaded in step 1
    write_bytes("@/early_bad.bin", shard(tokens));
    const Outcome none = run(COMMAND + "@/early_bad.bin --steps 10 --out @/no_good");
    expect_run(log_of("@/no_good").empty() && list_checkpoints(scratch("@/no_good")).empty(),
               "an error in the first step leaves no checkpoint", none, {}, 2);
    write_bytes("@/bad_val.bin", shard({300, 300}));
    const Outcome early = run(COMMAND + "@/text.txt --val-data @/bad_val.bin --steps 1 --eval-every 1");
    expect_run(!contains(early.out, "step 1/1"),
               "validation data with tokens outside the vocabulary is rejected before the first step", early,
               {"token 300 at position 0"}, 2);
    write_bytes("@/truncated.bin", shard(std::vector<uint16_t>(100000, 5)));
    Run running(ENDLESS + "--shuffle yes --val-fraction 0 --checkpoint-every 0 --data @/truncated.bin --out @/cut");
    wait_for_steps("@/cut");
    fs::resize_file(scratch("@/truncated.bin"), 5000);
    const Outcome ended = running.end();
    expect_run(has_last_checkpoint("@/cut"),
               "a shard truncated during the run ends it with the shard's name and a checkpoint of the last good step",
               ended, {"@/truncated.bin"}, 1);
}

TEST("runs: non-finite loss") {
    const Outcome outcome = run("train" + SMALL +
                                "--steps 20 --lr 1e30 --grad-clip 0 --checkpoint-every 1 --out @/nan");
    const auto good = list_checkpoints(scratch("@/nan"));
    auto is_line = [](const std::string& text) { return std::count(text.begin(), text.end(), '\n') == 1; };
    if (good.empty()) return expect_run(false, "a checkpoint is written before the loss is not finite", outcome, {}, 1);
    expect_run(is_line(outcome.err),
               "a non-finite loss ends the run with the step, the last checkpoint and advice in the message", outcome,
               {format("step %ld: loss", good.rbegin()->first + 1), good.rbegin()->second + "; try a lower --lr"}, 1);
    // The weights overflow in the update of a step whose loss is finite.
    const Outcome overflow = run("train" + SMALL +
                                 "--steps 2 --lr 3e38 --weight-decay 1000 --checkpoint-every 1 --out @/inf");
    expect_run(list_checkpoints(scratch("@/inf")).empty() && is_line(overflow.err),
               "non-finite weights are not written to a checkpoint, which is attempted once", overflow,
               {"checkpoint of step 1 not written"}, 1);
}

// --matmul-tuning on: times cuBLASLt's algorithms for each matmul shape (matmul.cuh) and selects
// the fastest. Included by train_gpt.cu.
//
// Before a run starts, one pass through the model records the matmuls of a micro-step and fills the activations (a GPU
// multiplies zeros faster). Then each shape for which cuBLASLt offers several algorithms is timed with each of them, on
// the same tensors. After that each shape whose epilogue replaces a kernel is timed against its alternative: the tuned
// matmul without the epilogue, and the kernel. The faster one is used. Afterwards gradients and loss are cleared.
//
// The choices are saved in a file. Two algorithms may round differently, so the same command gives the same bits as
// long as the file exists; without it, or on --resume with another --matmul-tuning, results are equal up to rounding.
#pragma once

constexpr int TUNING_ROUNDS = 5;   // plus a warm-up; each round times every algorithm, because clock rates drift
constexpr int TUNING_FORMAT = 4;   // version of the file

// A short matmul runs for less time than the CPU needs to launch it. So two events enclose several launches, about
// TIMED_MS in total, and hold_kernel keeps the stream busy until all of them are queued.
constexpr float TIMED_MS = 0.5f;
constexpr int MAX_LAUNCHES = 16;
constexpr long long HOLD_CYCLES = 400000;   // 0.2 ms at 2 GHz: MAX_LAUNCHES launches of about 10 us each

// By shape: the algorithm; none if the alternative is faster.
typedef std::map<std::string, std::vector<cublasLtMatmulAlgo_t>> Choices;

struct MatmulTuning {
    Choices known;                      // from the file and from timing
    size_t timed = 0, from_file = 0;    // numbers of shapes
    double first_ms = 0, best_ms = 0;   // sums over timed shapes: cuBLASLt's first choice, the fastest algorithm
    size_t epilogues = 0, used = 0;     // shapes that have an alternative; those of them that are used
};

__global__ void hold_kernel(long long cycles) {
    const long long until = clock64() + cycles;
    while (clock64() < until) {}
}

// Returns the minimum time in milliseconds of run(0), ..., run(count - 1); INFINITY if run() returns false.
template <typename F> std::vector<float> best_times(size_t count, F run) {
    std::vector<float> best(count, INFINITY);
    std::vector<int> launches(count, 1);
    for (int round = 0; round <= TUNING_ROUNDS; round++)
        for (size_t i = 0; i < count; i++) {
            bool runs = true;
            launch("hold", hold_kernel, 1, 1, 0, HOLD_CYCLES);
            const float ms = stream_milliseconds([&] {
                for (int n = 0; n < launches[i] && runs; n++) runs = run(i);
            }) / launches[i];
            if (round == 0) launches[i] = static_cast<int>(std::clamp(TIMED_MS / ms, 1.0f, float{MAX_LAUNCHES}));
            else if (runs) best[i] = std::min(best[i], ms);
        }
    return best;
}

// Returns whether the file's choice for a plan can be used: whether the device supports it, within the workspace.
bool is_usable(const MatmulPlan& plan, const std::vector<cublasLtMatmulAlgo_t>& choice) {
    if (choice.empty()) return plan.alternative != nullptr;
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(device.matmul, plan.operation, plan.a, plan.b, plan.out,
                                                          plan.out, &choice[0], &result);
    return choice.size() == 1 && status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= matmul_workspace_bytes();
}

// Reduces the plan's algorithms to one: the known one if the device supports it, otherwise the fastest of all; to none
// if there is an alternative that is faster.
void choose_algorithm(MatmulTuning& tuning, MatmulPlan& plan) {
    const bool optional = plan.alternative != nullptr;
    const std::vector<cublasLtMatmulAlgo_t> offered = optional ? offered_algorithms(plan) : plan.algorithms;
    const size_t count = offered.size(), least = optional ? 1 : 2;
    if (count < least) return;
    const std::string name = plan.last.shape.name();
    const auto known = tuning.known.find(name);
    if (known != tuning.known.end() && is_usable(plan, known->second)) {
        tuning.from_file++;
        plan.algorithms = known->second;
    } else {
        const std::vector<float> times = best_times(count + optional, [&](size_t i) {
            if (i < count) return multiply(plan, plan.last, offered[i]) == CUBLAS_STATUS_SUCCESS;
            plan.alternative();
            return true;
        });
        const size_t best = std::min_element(times.begin(), times.end()) - times.begin();
        tuning.timed++;
        if (!optional && std::isfinite(times[0])) {
            tuning.first_ms += times[0];
            tuning.best_ms += times[best];
        }
        plan.algorithms.clear();
        if (best < count) plan.algorithms = {offered[best]};
        tuning.known[name] = plan.algorithms;
    }
    tuning.epilogues += optional;
    tuning.used += optional && !plan.algorithms.empty();
}

// ---- the file: {"format": 4, "devices": {"NAME, 9.0, cuBLASLt 130100": {"SHAPE": [[8 numbers of 64 bits]]}}}

void to_json(json& record, const cublasLtMatmulAlgo_t& algorithm) { record = algorithm.data; }
void from_json(const json& record, cublasLtMatmulAlgo_t& algorithm) { record.get_to(algorithm.data); }

// Returns the file's path; empty if neither XDG_CACHE_HOME nor HOME is an absolute path.
std::string tuning_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/') return std::string(cache) + "/gpt.cu/matmul.json";
    return home && home[0] == '/' ? std::string(home) + "/.cache/gpt.cu/matmul.json" : "";
}

// Returns the file's key for this device: algorithms depend on the GPU and on cuBLASLt's version.
std::string tuning_device() {
    const cudaDeviceProp& p = device.properties;
    return format("%s, %d.%d, cuBLASLt %zu", p.name, p.major, p.minor, cublasLtGetVersion());
}

// Returns the file's choices by device. If the file is unreadable, returns an empty map and sets `problem`.
std::map<std::string, Choices> read_choices(const std::string& path, std::string& problem) {
    if (!exists(path)) return {};
    try {
        const json file = read_json(path);
        if (file.at("format") != TUNING_FORMAT) throw Failure("expected format %d", TUNING_FORMAT);
        return file.at("devices").get<std::map<std::string, Choices>>();
    } catch (const UserError& error) {   // its message contains the path
        problem = error.what();
    } catch (const std::exception& error) {
        problem = path + ": " + error.what();
    }
    return {};
}

// Adds choices to the file, which another process may have changed since it was read, and replaces it atomically.
void write_choices(const std::string& path, const Choices& known) {
    if (path.empty()) throw Failure("neither XDG_CACHE_HOME nor HOME names a folder");
    std::string reported;
    auto devices = read_choices(path, reported);
    for (const auto& [shape, choice] : known) devices[tuning_device()][shape] = choice;
    const std::string unfinished = path + format(".%d", getpid());
    fs::create_directories(fs::path(path).parent_path());
    try {
        write_json(unfinished, {{"format", TUNING_FORMAT}, {"devices", devices}});
        fs::rename(unfinished, path);
    } catch (const std::exception&) {
        std::error_code ignored;
        fs::remove(unfinished, ignored);
        throw;
    }
}

// Tunes the matmuls that pass() launches: a forward pass or, in training, a micro-step.
template <typename F> void tune_matmuls(Model& m, FILE* out, bool verbose, F pass) {
    matmul_plans.clear();   // plans from measuring the peak FLOP/s: their tensors have been freed
    if (matmul_plan(logits_product(m, 0, 1)).algorithms.size() <= 1) return;   // on a CPU, for example
    const double began = seconds_now();
    const std::string path = tuning_file();
    std::string problem;
    MatmulTuning tuning = {read_choices(path, problem)[tuning_device()]};
    matmul_plans.clear();
    pass();
    auto choose = [&] {   // first the shapes that alternatives consist of
        for (auto& [shape, plan] : matmul_plans)
            if (plan.alternative) plan.alternative();   // records them
        for (bool optional : {false, true})
            for (auto& [shape, plan] : matmul_plans)
                if ((plan.alternative != nullptr) == optional) choose_algorithm(tuning, plan);
    };
    if (world.first()) choose();
    if (!world.alone())   // all ranks use the choices of the first one
        tuning.known = parse_json(from_first(json_text(tuning.known)), "matmul tuning").get<Choices>();
    if (!world.first()) choose();
    await_gradients(m);
    if (m.grads.data) clear(m.grads.data, m.layout.elements(grads_placement(m.setup)) * size_of(m.grads.dtype));
    clear(m.a.loss(), sizeof(double));
    if (has_fp8(m)) fp8_scales<Fp8Step::RESET_AMAX>(m.a.fp8_scales(), scale_count(m));
    if (!world.first()) return;
    if (verbose && tuning.timed + tuning.from_file > 0)
        fprintf(out, "tuning     %zu shapes timed in %.1f s: %.3f ms with cuBLASLt's first choice, %.3f ms tuned; "
                "%zu shapes known from %s; %zu of %zu optional epilogues used\n", tuning.timed, seconds_now() - began,
                tuning.first_ms, tuning.best_ms, tuning.from_file, path.c_str(), tuning.used, tuning.epilogues);
    if (tuning.timed == 0) return;
    if (!problem.empty()) fprintf(out, "tuning     %s: ignored\n", problem.c_str());
    try {
        write_choices(path, tuning.known);
    } catch (const std::exception& error) {
        fprintf(out, "tuning     %s: the choices are not saved\n", error.what());
    }
}

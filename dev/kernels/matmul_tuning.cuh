// Which of cuBLASLt's algorithms multiplies each shape fastest (train_gpt.cu, section "matmul"): --matmul-tuning on.
//
// Before a run begins, one micro-step is gone through with nothing launched: each shape of matmul that it comes to has
// cuBLASLt's candidates timed, on the very operands, and the fastest is kept. What they are and what becomes of them
// does not matter: activations are not computed yet, and gradients are cleared once more afterwards.
//
// The choices are kept in a file. Two candidates may differ in rounding and be equally fast, so the same command gives
// the same bits as long as the file is there; without it, or with --matmul-tuning changed on --resume, the same up to
// rounding. Included by train_gpt.cu.
#pragma once

constexpr int TUNING_ROUNDS = 5;   // besides the one that warms up. Candidates take turns: clocks drift
constexpr int TUNING_FORMAT = 1;   // of the file

struct MatmulTuning {
    FILE* out;                                           // for messages
    bool terminal;
    std::map<std::string, cublasLtMatmulAlgo_t> known;   // by shape: from the file, and what was timed
    size_t timed = 0, remembered = 0;                    // shapes
    double first_ms = 0, best_ms = 0;                    // of those timed: cuBLASLt's first choices, and ours

    explicit MatmulTuning(FILE* to) : out(to), terminal(isatty(fileno(to))) {}
};

// Milliseconds that the stream takes for work().
template <typename F> float stream_milliseconds(F work) {
    const cudaEvent_t begin = event_now(device.stream);
    work();
    const cudaEvent_t end = event_now(device.stream);
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    check(cudaEventDestroy(begin), "cudaEventDestroy");
    check(cudaEventDestroy(end), "cudaEventDestroy");
    return milliseconds;
}

// The best time of each algorithm; infinite for one that does not run after all.
std::vector<float> time_algorithms(const std::vector<cublasLtMatmulAlgo_t>& algorithms, const Multiply& multiply) {
    std::vector<float> best(algorithms.size(), INFINITY);
    for (int round = 0; round <= TUNING_ROUNDS; round++)
        for (size_t i = 0; i < algorithms.size(); i++) {
            cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
            const float milliseconds = stream_milliseconds([&] { status = multiply(algorithms[i]); });
            if (round > 0 && status == CUBLAS_STATUS_SUCCESS) best[i] = std::min(best[i], milliseconds);
        }
    return best;
}

// Whether the device has an algorithm that a file names.
bool has_algorithm(const MatmulPlan& plan, const cublasLtMatmulAlgo_t& algorithm) {
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(device.matmul, plan.operation, plan.a, plan.b, plan.out,
                                                          plan.out, &algorithm, &result);
    return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= matmul_workspace_bytes();
}

void choose_algorithm(MatmulTuning& tuning, MatmulPlan& plan, const MatmulShape& shape, const Multiply& multiply) {
    if (plan.algorithms.size() == 1) return;   // nothing to choose, or chosen already
    const std::string name = shape.name();
    const auto known = tuning.known.find(name);
    if (known != tuning.known.end() && has_algorithm(plan, known->second)) {
        tuning.remembered++;
        plan.algorithms = {known->second};
        return;
    }
    if (tuning.terminal)
        fprintf(tuning.out, "\rmatmul     timing %zu algorithms for %s\033[K", plan.algorithms.size(), name.c_str());
    fflush(tuning.out);
    const std::vector<float> times = time_algorithms(plan.algorithms, multiply);
    const size_t best = std::min_element(times.begin(), times.end()) - times.begin();
    tuning.timed++;
    if (std::isfinite(times[0])) {
        tuning.first_ms += times[0];
        tuning.best_ms += times[best];
    }
    plan.algorithms = {plan.algorithms[best]};
    tuning.known[name] = plan.algorithms[0];
}

// ---- the file: {"format": 1, "devices": {"NAME, 9.0, cuBLASLt 130100": {"SHAPE": "128 hexadecimal digits"}}}

// Empty where neither variable names a folder.
std::string tuning_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/') return std::string(cache) + "/gpt.cu/matmul.json";
    if (home && home[0] == '/') return std::string(home) + "/.cache/gpt.cu/matmul.json";
    return "";
}

// What an algorithm is good for: another device or version has others.
std::string tuning_device() {
    const cudaDeviceProp& p = device.properties;
    return format("%s, %d.%d, cuBLASLt %zu", p.name, p.major, p.minor, cublasLtGetVersion());
}

std::string algorithm_text(const cublasLtMatmulAlgo_t& algorithm) {
    std::string text;
    for (uint64_t word : algorithm.data) text += format("%016llx", static_cast<unsigned long long>(word));
    return text;
}

cublasLtMatmulAlgo_t parse_algorithm(const std::string& text) {
    cublasLtMatmulAlgo_t algorithm;
    constexpr size_t DIGITS = 2 * sizeof(uint64_t);
    if (text.size() != DIGITS * std::size(algorithm.data) || text.find_first_not_of("0123456789abcdef") != text.npos)
        throw Failure("'%s' is no algorithm", text.c_str());
    for (size_t i = 0; i < std::size(algorithm.data); i++)
        algorithm.data[i] = std::stoull(text.substr(i * DIGITS, DIGITS), nullptr, 16);
    return algorithm;
}

// The file's choices by device; none, and why, where it cannot be understood.
json read_choices(const std::string& path, std::string& problem) {
    const json none = json::object();
    std::error_code ignored;
    if (!fs::exists(path, ignored)) return none;
    try {
        const json file = read_json(path);
        if (file.value("format", 0) != TUNING_FORMAT) throw Failure("not of format %d", TUNING_FORMAT);
        const json& devices = file.at("devices");
        if (!devices.is_object()) throw Failure("\"devices\" is no object");
        for (const auto& [name, choices] : devices.items()) {
            if (!choices.is_object()) throw Failure("\"%s\" is no object", name.c_str());
            for (const auto& [shape, algorithm] : choices.items()) parse_algorithm(algorithm.get<std::string>());
        }
        return devices;
    } catch (const UserError& error) {   // has the path
        problem = error.what();
    } catch (const std::exception& error) {
        problem = path + ": " + error.what();
    }
    return none;
}

// Adds what was timed to the file as it is by now. Returns what went wrong, if anything.
std::string write_choices(const std::string& path, const MatmulTuning& tuning) {
    if (path.empty()) return "neither XDG_CACHE_HOME nor HOME names a folder";
    std::string damage;   // has been told of
    json devices = read_choices(path, damage);
    for (const auto& [shape, algorithm] : tuning.known) devices[tuning_device()][shape] = algorithm_text(algorithm);
    const std::string unfinished = path + format(".%d", getpid());
    std::error_code ignored;
    try {
        fs::create_directories(fs::path(path).parent_path());
        write_json(unfinished, {{"format", TUNING_FORMAT}, {"devices", devices}});
        fs::rename(unfinished, path);
        return "";
    } catch (const std::exception& error) {
        fs::remove(unfinished, ignored);
        return error.what();
    }
}

// Goes through a micro-step, or a forward pass where there is no training. The gradients must be zero.
void visit_matmuls(Model& m) {
    const Activations& a = m.a;
    if (m.setup.purpose == Purpose::TRAINING) {
        micro_step(m, {a.inputs(), a.targets(), a.order(), a.first()}, m.setup.N());
    } else {
        forward(m, a.inputs());
        head<Want::LOSS>(m, a.targets(), 0);
    }
}

void tune_matmuls(Model& m, FILE* out) {
    const double began = seconds_now();
    const std::string path = tuning_file(), here = tuning_device();
    std::string problem;
    const json devices = read_choices(path, problem), ours = devices.value(here, json::object());
    if (!devices.empty() && ours.empty()) problem = format("%s: holds nothing for %s", path.c_str(), here.c_str());
    MatmulTuning tuning(out);
    for (const auto& [shape, algorithm] : ours.items())
        tuning.known[shape] = parse_algorithm(algorithm.get<std::string>());
    device.tuning = &tuning;
    visit_matmuls(m);
    device.tuning = nullptr;
    if (m.grads.data) clear(m.grads.data, m.elements * size_of(m.grads.dtype));

    if (tuning.timed + tuning.remembered == 0) return;   // there was no choice
    const char* line = tuning.terminal ? "\r\033[Kmatmul    " : "matmul    ";
    if (tuning.timed == 0) {
        fprintf(out, "%s %zu shapes known from %s\n", line, tuning.remembered, path.c_str());
        return;
    }
    const std::string unkept = write_choices(path, tuning);
    if (!problem.empty()) fprintf(out, "%s %s: ignored\n", line, problem.c_str());
    const double share = tuning.first_ms > 0 ? tuning.best_ms / tuning.first_ms : 1;
    fprintf(out, "%s %zu shapes timed in %.1f s, which now take %.0f%% of the time; %zu known from %s\n", line,
            tuning.timed, seconds_now() - began, 100 * share, tuning.remembered, path.c_str());
    if (!unkept.empty()) fprintf(out, "%s %s: the choice is not kept\n", line, unkept.c_str());
}

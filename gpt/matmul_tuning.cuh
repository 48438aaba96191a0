// --matmul-tuning on: times cuBLASLt's algorithms for each product (train_gpt.cu, section "matmul"), keeps the fastest.
//
// Before a run begins, each product of a micro-step that cuBLASLt offers several algorithms for is timed with each of
// them, on the model's own tensors. Activations are filled with random numbers, since a GPU multiplies zeros faster;
// gradients are cleared afterwards. Where cuBLASLt offers GELU' as an epilogue, which is slow on some GPUs, the fused
// product is timed against a product followed by gelu_backward.
//
// The choices are saved in a file. Two algorithms may differ in rounding, so the same command gives the same bits as
// long as the file exists; otherwise, and on --resume with another --matmul-tuning, it is the same up to rounding.
// Included by train_gpt.cu.
#pragma once

#include <unistd.h>

#include <map>
#include <string>
#include <vector>

constexpr int TUNING_ROUNDS = 5;   // after one that warms up; candidates take turns, as clocks drift
constexpr int TUNING_FORMAT = 1;   // of the file

// A short product takes the GPU less time than its launch takes the CPU. So several launches, about TIMED_MS of them,
// lie between two events, and hold_kernel keeps the stream busy until all are queued.
constexpr float TIMED_MS = 0.5f;
constexpr int MAX_LAUNCHES = 16;
constexpr long long HOLD_CYCLES = 400000;   // 0.2 ms at 2 GHz: MAX_LAUNCHES of about 10 us each

// Whether an epilogue is fused is saved under the shape's name with this suffix.
const char* const FUSION = ", fused or apart";
const char* const FUSED = "fused";
const char* const APART = "apart";

struct MatmulTuning {
    Model& m;
    std::map<std::string, std::string> known;   // by shape: from the file, and what was timed
    bool filled = false;                        // the activations, with random numbers
    size_t timed = 0, remembered = 0;           // shapes
    double first_ms = 0, best_ms = 0;           // of those timed: cuBLASLt's first choices, and ours

    void note(const std::string& name, const std::string& choice, float first, float best) {
        timed++;
        if (std::isfinite(first)) first_ms += first, best_ms += best;
        known[name] = choice;
    }
};

__global__ void hold_kernel(long long cycles) {
    const long long until = clock64() + cycles;
    while (clock64() < until) {}
}

void fill_with_random_numbers(Model& m) {
    for (const ActivationRow& row : activation_table(m.a, m.setup)) {
        const bool here = row.category == Category::ACTIVATIONS;
        if (here && row.element_bytes == sizeof(floatX))
            init_normal(reinterpret_cast<floatX*>(row.tensor->data), 1, 0, 0, row.bytes() / sizeof(floatX));
        if (here && row.element_bytes == sizeof(e5m2))
            init_normal(reinterpret_cast<e5m2*>(row.tensor->data), 1, 0, 0, row.bytes());
    }
}

// The best time of each of `count` candidates: launch_candidate(i) returns false if candidate i cannot run.
template <typename F> std::vector<float> best_times(MatmulTuning& tuning, size_t count, F launch_candidate) {
    if (!std::exchange(tuning.filled, true)) fill_with_random_numbers(tuning.m);
    std::vector<float> best(count, INFINITY);
    std::vector<int> launches(count, 1);
    for (int round = 0; round <= TUNING_ROUNDS; round++)
        for (size_t i = 0; i < count; i++) {
            bool runs = true;
            launch("hold", hold_kernel, 1, 1, 0, HOLD_CYCLES);
            const float ms = stream_milliseconds([&] {
                for (int n = 0; n < launches[i]; n++) runs = launch_candidate(i) && runs;
            }) / launches[i];
            if (round == 0) launches[i] = static_cast<int>(std::clamp(TIMED_MS / ms, 1.0f, float{MAX_LAUNCHES}));
            else if (runs) best[i] = std::min(best[i], ms);
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

void choose_algorithm(MatmulTuning& tuning, const Product& p) {
    MatmulPlan& plan = matmul_plan(p);
    const size_t count = plan.algorithms.size();
    if (count <= 1) return;   // there is no choice
    const std::string name = p.shape.name();
    const auto known = tuning.known.find(name);
    if (known != tuning.known.end() && has_algorithm(plan, parse_algorithm(known->second))) {
        tuning.remembered++;
        plan.algorithms = {parse_algorithm(known->second)};
        return;
    }
    const auto times = best_times(tuning, count, [&](size_t i) {
        return multiply(plan, p, plan.algorithms[i]) == CUBLAS_STATUS_SUCCESS;
    });
    const size_t best = std::min_element(times.begin(), times.end()) - times.begin();
    plan.algorithms = {plan.algorithms[best]};
    tuning.note(name, algorithm_text(plan.algorithms[0]), times[0], times[best]);
}

// Chooses between a product with a fused epilogue and apart(), each by its fastest algorithm. A plan without algorithms
// makes try_matmul() return false. Without a choice of algorithms all stays as it is without tuning.
template <typename F> void choose_fusion(MatmulTuning& tuning, const Product& fused, F apart) {
    MatmulPlan& plan = matmul_plan(fused);
    if (plan.algorithms.size() <= 1) return;
    choose_algorithm(tuning, fused);
    const std::string name = fused.shape.name() + FUSION;
    if (tuning.known.count(name)) {
        tuning.remembered++;
    } else {
        const auto times = best_times(tuning, 2, [&](size_t i) {
            if (i == 0) return try_matmul(fused);
            apart();
            return true;
        });
        tuning.note(name, times[0] <= times[1] ? FUSED : APART, times[0], std::min(times[0], times[1]));
    }
    if (tuning.known.at(name) == APART) plan.algorithms.clear();
}

// ---- the file: {"format": 1, "devices": {"NAME, 9.0, cuBLASLt 130100": {"SHAPE": "128 hexadecimal digits",
//                                                                          "SHAPE, fused or apart": "fused"}}}

// Empty if neither variable names a folder.
std::string tuning_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/') return std::string(cache) + "/gpt.cu/matmul.json";
    return home && home[0] == '/' ? std::string(home) + "/.cache/gpt.cu/matmul.json" : "";
}

// Another device or version has other algorithms.
std::string tuning_device() {
    const cudaDeviceProp& p = device.properties;
    return format("%s, %d.%d, cuBLASLt %zu", p.name, p.major, p.minor, cublasLtGetVersion());
}

// Throws if a shape cannot have this choice.
void check_choice(const std::string& shape, const std::string& choice) {
    if (!ends_with(shape, FUSION)) parse_algorithm(choice);
    else if (choice != FUSED && choice != APART)
        throw Failure("'%s' is neither %s nor %s", choice.c_str(), FUSED, APART);
}

// The file's choices by device; empty, with the reason in `problem`, if it cannot be read.
json read_choices(const std::string& path, std::string& problem) {
    if (!exists(path)) return json::object();
    try {
        const json file = read_json(path);
        if (file.value("format", json()) != json(TUNING_FORMAT)) throw Failure("not of format %d", TUNING_FORMAT);
        const json& devices = file.at("devices");
        for (const auto& [name, choices] : devices.items()) {
            if (!choices.is_object()) throw Failure("\"%s\" is no object", name.c_str());
            for (const auto& [shape, choice] : choices.items()) check_choice(shape, choice.get<std::string>());
        }
        if (!devices.is_object()) throw Failure("\"devices\" is no object");
        return devices;
    } catch (const UserError& error) {   // has the path
        problem = error.what();
    } catch (const std::exception& error) {
        problem = path + ": " + error.what();
    }
    return json::object();
}

// Adds what was timed to the file as it is now. Returns the error, or an empty text.
std::string write_choices(const std::string& path, const MatmulTuning& tuning) {
    if (path.empty()) return "neither XDG_CACHE_HOME nor HOME names a folder";
    std::string damage;   // reported before
    json devices = read_choices(path, damage);
    for (const auto& [shape, choice] : tuning.known) devices[tuning_device()][shape] = choice;
    const std::string unfinished = path + format(".%d", getpid());
    std::error_code error;
    fs::create_directories(fs::path(path).parent_path(), error);
    if (error) return path + ": " + error.message();
    try {
        write_json(unfinished, {{"format", TUNING_FORMAT}, {"devices", devices}});
        fs::rename(unfinished, path, error);
    } catch (const Failure& failure) {
        fs::remove(unfinished, error);
        return failure.what();
    }
    return error ? path + ": " + error.message() : "";
}

// Chooses for each product of a micro-step, or of a forward pass when not training: those of layer 0, and the head's.
void choose_for_model(MatmulTuning& tuning, Model& m) {
    const Activations& a = m.a;
    const Operands x = operands(m, 0);
    const size_t N = m.setup.N(), C = m.config.channels;
    const bool trains = m.setup.purpose == Purpose::TRAINING;
    struct Matmul {
        floatX *out, *dinp;
        Operand inp, w, dout;
        const floatX* b;
        Grad dw;
        size_t C, OC;
    };
    const Matmul block[] = {
        {a.qkv(0), a.dln(), x.ln1, x.qkvw, x.dqkv, m.w.qkvb(0), m.g.qkvw(0), C, 3 * C},
        {a.branch(), a.datt(), x.att, x.attprojw, x.dattproj, m.w.attprojb(0), m.g.attprojw(0), C, C},
        {a.fc(0), a.dln(), x.ln2, x.fcw, x.dfc, m.w.fcb(0), m.g.fcw(0), C, 4 * C},
        {a.branch(), a.dfc(), x.gelu, x.fcprojw, x.dfcproj, m.w.fcprojb(0), m.g.fcprojw(0), 4 * C, C}};
    for (const Matmul& l : block) {
        Product forward = forward_product(l.out, l.inp, l.w, l.b, N, l.C, l.OC);
        if (matmul_plan(forward).algorithms.empty()) forward.shape.epilogue = Epilogue::NONE;
        choose_algorithm(tuning, forward);
        if (!trains) continue;
        choose_algorithm(tuning, input_product(l.dinp, l.dout, l.w, N, l.C, l.OC));
        choose_algorithm(tuning, weight_product(l.dw, l.dout, l.inp, N, l.C, l.OC));
    }
    if (trains && !has_fp8(m))
        choose_fusion(tuning, input_gelu_product(a.dfc(), x.dfcproj, x.fcprojw, a.fc(0), N, 4 * C, C), [&] {
            matmul_backward_input(a.dfc(), x.dfcproj, x.fcprojw, N, 4 * C, C);
            gelu_backward(x.dfc, a.dfc(), a.fc(0), N * 4 * C);
        });
    for (size_t rows : {std::min(N, m.setup.head_rows), N % m.setup.head_rows}) {
        if (rows == 0) continue;
        const HeadProducts head = head_products(m, 0, rows);
        choose_algorithm(tuning, head.logits);
        if (!trains) continue;
        choose_algorithm(tuning, head.dlnf);
        choose_algorithm(tuning, head.dwte);
    }
}

void tune_matmuls(Model& m, FILE* out) {
    const double began = seconds_now();
    const std::string path = tuning_file(), here = tuning_device();
    std::string problem;
    const json devices = read_choices(path, problem), ours = devices.value(here, json::object());
    if (!devices.empty() && ours.empty()) problem = format("%s: holds nothing for %s", path.c_str(), here.c_str());
    MatmulTuning tuning = {m, {}};
    for (const auto& [shape, choice] : ours.items()) tuning.known[shape] = choice.get<std::string>();
    need_weights(m, 0, 1);   // ZeRO gathers them: a GPU multiplies zeros faster
    need_weights(m, 1, 0);
    if (world.first()) choose_for_model(tuning, m);
    if (!world.alone()) {   // all ranks take what the first one has chosen
        tuning.known = json::parse(from_first(json(tuning.known).dump())).get<decltype(tuning.known)>();
        if (!world.first()) choose_for_model(tuning, m);
    }
    if (m.grads.data) clear(m.grads.data, m.layout.elements(grads_kept(m.setup)) * size_of(m.grads.dtype));
    if (!world.first()) return;
    if (tuning.timed == 0) {
        if (tuning.remembered) fprintf(out, "matmul     %zu shapes known from %s\n", tuning.remembered, path.c_str());
        return;
    }
    const std::string error = write_choices(path, tuning);
    if (!problem.empty()) fprintf(out, "matmul     %s: ignored\n", problem.c_str());
    const double share = tuning.first_ms > 0 ? tuning.best_ms / tuning.first_ms : 1;
    fprintf(out, "matmul     %zu shapes timed in %.1f s, which now take %.0f%% of the time; %zu known from %s\n",
            tuning.timed, seconds_now() - began, 100 * share, tuning.remembered, path.c_str());
    if (!error.empty()) fprintf(out, "matmul     %s: the choice is not kept\n", error.c_str());
}

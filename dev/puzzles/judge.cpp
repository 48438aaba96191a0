// Runs a puzzle at all sizes and writes what happened to the JSON file PUZZLE_OUT, which judge.py reads. On a CPU
// dev/inspect also records the memory accesses, unless PUZZLE_RECORD is "no".
#include "judge.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

using json = nlohmann::ordered_json;

bool is_counted = false;
int own_rank = 0;
static bool is_rank = false;   // one of several processes
static json result = {{"cases", json::array()}};

static void write_result() {
    if (const char* path = getenv("PUZZLE_OUT")) std::ofstream(path) << result.dump(1) << '\n';
}

static void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    result["cuda_error"] = {{"call", what}, {"text", cudaGetErrorString(error)}};
    write_result();
    _Exit(0);
}

std::string size_text(const char* names, const int* sizes, size_t count) {
    std::istringstream words(names);
    std::string text, name;
    for (size_t i = 0; i < count && words >> name; i++)
        text += (i == 0 ? "" : ", ") + name + " = " + std::to_string(sizes[i]);
    return text;
}

// ==== arrays =================================================================

static size_t bytes_of(Type type) { return type == Type::BF16 ? 2 : 4; }

static double get(const std::vector<char>& bytes, Type type, size_t i) {
    if (type == Type::INT) return reinterpret_cast<const int*>(bytes.data())[i];
    if (type == Type::FLOAT) return reinterpret_cast<const float*>(bytes.data())[i];
    return static_cast<float>(reinterpret_cast<const bf16*>(bytes.data())[i]);
}

static void set(std::vector<char>& bytes, Type type, size_t i, double value) {
    if (type == Type::INT) reinterpret_cast<int*>(bytes.data())[i] = static_cast<int>(value);
    else if (type == Type::FLOAT) reinterpret_cast<float*>(bytes.data())[i] = static_cast<float>(value);
    else reinterpret_cast<bf16*>(bytes.data())[i] = __float2bfloat16(static_cast<float>(value));
}

// ==== several processes ======================================================

// Starts a process per rank; returns the rank in each. The first process waits for the others and ends.
int fork_ranks(int size) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < size; rank++) {
        const pid_t child = fork();
        if (child == 0) {
            own_rank = rank;
            const std::string suffix = "." + std::to_string(rank);
            for (const char* name : {"PUZZLE_OUT", "INSPECT_OUT"})
                if (const char* path = getenv(name)) setenv(name, (path + suffix).c_str(), 1);
            is_rank = true;
            return rank;
        }
        children.push_back(child);
    }
    result["ranks"] = size;
    json& ends = result["ends"] = json::array();
    for (const pid_t child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        ends.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
    }
    write_result();
    _Exit(0);
}

void end_without_gpus(int expected, int found) {
    result["needs"] = std::to_string(expected) + " GPUs, found " + std::to_string(found);
    write_result();
    _Exit(0);
}

// ==== random numbers =========================================================

static uint64_t mix(uint64_t x) {   // splitmix64
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

std::vector<double> random_values(const Storage& storage, int rank) {
    std::vector<double> values(storage.n);
    std::vector<char> one(4);
    const uint64_t stream = mix(mix(static_cast<uint64_t>(rank)) + storage.number);
    for (size_t i = 0; i < storage.n; i++) {
        const double uniform = std::ldexp(static_cast<double>(mix(stream ^ i) >> 11), -53);   // [0, 1)
        const double value = storage.low + (storage.high - storage.low) * uniform;
        set(one, storage.type, 0, storage.type == Type::INT ? std::floor(value) : value);
        values[i] = get(one, storage.type, 0);
    }
    return values;
}

// ==== cases ==================================================================

Storage& Case::add(const char* name, Type type, size_t n, double low, double high, bool is_input) {
    arrays_.push_back(std::make_unique<Storage>(Storage{name, type, n, is_input, arrays_.size(), low, high}));
    arrays_.back()->initial = random_values(*arrays_.back(), own_rank);
    return *arrays_.back();
}

void Case::allocate() {
    for (auto& array : arrays_) check(cudaMalloc(&array->data, array->n * bytes_of(array->type)), array->name.c_str());
}

void Case::restore() {
    for (auto& array : arrays_) {
        std::vector<char> bytes(array->n * bytes_of(array->type), '\xff');   // NaN
        for (size_t i = 0; i < array->initial.size(); i++) set(bytes, array->type, i, array->initial[i]);
        check(cudaMemcpy(array->data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), array->name.c_str());
    }
}

Case::~Case() {
    for (auto& array : arrays_) cudaFree(array->data);
}

static bool is_filled(const char* element, Type type) {
    return std::count(element, element + bytes_of(type), '\xff') == static_cast<int>(bytes_of(type));
}

// Returns the differences of an array from its expected values. An element's error is relative to its own size plus
// the root mean square of all, and to the precision of the type.
static json compare(const Storage& array, const std::vector<char>& found) {
    const std::vector<double>& expected = array.is_input ? array.initial : array.expected;
    const double precision = array.type == Type::BF16    ? 1.0 / (1 << 7)
                             : array.type == Type::FLOAT ? 1.0 / (1 << 16)
                                                         : 0;
    double squares = 0, worst = 0;
    for (double e : expected) squares += e * e;
    const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
    const double allowed = array.is_input ? 0 : array.limit * precision;
    size_t wrong = 0, first = 0, unwritten = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        const double value = get(found, array.type, i);
        const double difference = std::abs(value - expected[i]), limit = allowed * (std::abs(expected[i]) + rms);
        const bool is_right = difference <= limit || value == expected[i];
        if (limit > 0 && is_right) worst = std::max(worst, difference / limit);
        if (is_right) continue;
        if (wrong++ == 0) first = i;
        unwritten += array.initial.empty() ? is_filled(&found[i * bytes_of(array.type)], array.type)
                                           : !array.is_input && value == array.initial[i];
    }
    json differences = {{"name", array.name}, {"is_input", array.is_input},
                        {"is_updated", !array.is_input && !array.initial.empty()}, {"n", array.n}, {"error", worst},
                        {"wrong", wrong}, {"unwritten", unwritten}};
    if (wrong > 0) {
        char text[64];
        differences["index"] = first;
        for (const auto& [key, value] : {std::pair("expected", expected[first]),
                                         std::pair("found", get(found, array.type, first))}) {
            snprintf(text, sizeof text, "%.6g", std::isnan(value) ? NAN : value);   // not -nan
            differences[key] = text;
        }
    }
    return differences;
}

// ==== a run ==================================================================

static uint64_t digest(const std::vector<char>& bytes, uint64_t hash) {
    for (char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;   // FNV-1a
    return hash;
}

#ifndef CUDA_ON_CPU
// Returns the median time of a launch in microseconds.
static double microseconds(const std::function<void()>& launch) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> times(21);
    for (float& time : times) {
        check(cudaEventRecord(begin), "cudaEventRecord");
        launch();
        check(cudaEventRecord(end), "cudaEventRecord");
        check(cudaEventSynchronize(end), "cudaEventSynchronize");
        check(cudaEventElapsedTime(&time, begin, end), "cudaEventElapsedTime");
    }
    std::nth_element(times.begin(), times.begin() + 10, times.end());
    return 1e3 * times[10];
}
#endif

// Returns the bytes of device memory that are in use.
static size_t allocated_bytes() {
#ifdef CUDA_ON_CPU
    return cuda_cpu::heap().bytes;
#else
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return total - free;
#endif
}

// Returns how often memory was copied between host and device, or allocated for both.
static size_t copies_with_host() {
#ifdef CUDA_ON_CPU
    return cuda_cpu::heap().shared_with_host;
#else
    return 0;
#endif
}

void Case::run(const std::function<void()>& launch) {
    constexpr unsigned seconds = 60;   // a case takes less; a rank that waits longer ends
    if (is_rank) alarm(seconds);
    allocate();
    restore();
    json& each = result["cases"].emplace_back(json{{"size", size_}, {"names", json::array()}});
    for (const auto& array : arrays_)
        each["names"].push_back({array->name, array->n, bytes_of(array->type),
                                 reinterpret_cast<uintptr_t>(array->data)});
    write_result();   // in case the launch ends the program
    const size_t allocated = allocated_bytes();
    size_t copies = copies_with_host();
    const double sent_before = bytes_sent();
    nvtxRangePushA(is_counted ? "counted" : size_.c_str());
    launch();
    nvtxRangePop();
    copies = copies_with_host() - copies;
    if (const std::string error = nccl_error(); !error.empty()) {
        result["nccl_error"] = error;
        write_result();
        _Exit(0);
    }
    check(cudaGetLastError(), "the launch");
    check(cudaDeviceSynchronize(), "the kernel");
    json arrays = json::array();
    uint64_t hash = 0xcbf29ce484222325;
    for (const auto& array : arrays_) {
        std::vector<char> found(array->n * bytes_of(array->type));
        check(cudaMemcpy(found.data(), array->data, found.size(), cudaMemcpyDeviceToHost), array->name.c_str());
        if (!array->expected.empty()) hash = digest(found, hash);
        if (array->is_input || !array->expected.empty()) arrays.push_back(compare(*array, found));
    }
    each.update({{"digest", std::to_string(hash)}, {"arrays", arrays}, {"minimum_bytes", minimum_bytes},
                 {"minimum_requests", minimum_requests}, {"minimum_flops", minimum_flops},
                 {"minimum_sent", minimum_sent}, {"sent", bytes_sent() - sent_before}, {"copies", copies},
                 {"kept", allocated_bytes() - std::min(allocated, allocated_bytes())}});
#ifndef CUDA_ON_CPU
    if (is_counted) each["us"] = microseconds(launch);
#endif
}

int main() {
#ifdef CUDA_CPU_INSPECT
    cuda_cpu::watch::record_launches(getenv("PUZZLE_RECORD") == nullptr);
#endif
    result["limits"] = {{"S", limits.sectors}, {"W", limits.wavefronts}, {"T", limits.traffic},
                        {"requests", limits.requests}, {"products", limits.products},
                        {"shared", limits.shared_bytes}, {"sent", limits.sent}, {"time", limits.microseconds},
                        {"B", limits.barriers},
                        {"D", limits.same_bits}};
    judge();
    result["finished"] = true;
    write_result();
}

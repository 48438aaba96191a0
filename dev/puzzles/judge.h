// The judge's side of a puzzle: inputs, expected results and limits. cases/NN_name.cpp defines `limits` and `judge()`,
// and declares the function of the puzzle that launches its kernels.
#pragma once

#include "puzzle.h"

#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

// What is judged besides values, races and bounds. Ratios are found / minimum, at the last size of for_sizes().
struct Limits {
    double sectors = 0;          // S: sectors of global memory; 0: not judged
    double wavefronts = 0;       // W: wavefronts of shared memory
    double traffic = 0;          // T: bytes of the sectors that loads and stores request, over Case::minimum_bytes
    double requests = 0;         // memory instructions of warps, over Case::minimum_requests
    double products = 0;         // FLOPs of tensor cores, over Case::minimum_flops
    int shared_bytes = 0;        // of shared memory per block
    double microseconds = 0;     // estimated time on an H100: for puzzles that must use the whole GPU
    double sent = 0;             // bytes that a rank sends to others, over Case::minimum_sent
    bool barriers = false;       // B: no unnecessary barrier
    bool same_bits = false;      // D: equal bits in any order of the threads, and on all ranks
};
extern const Limits limits;
void judge();

enum class Type { FLOAT, BF16, INT };
template <class T> constexpr Type type_of = std::is_same_v<T, bf16>    ? Type::BF16
                                            : std::is_same_v<T, float> ? Type::FLOAT
                                                                       : Type::INT;

// An array in device memory. The host's values are doubles, which represent those of all types.
struct Storage {
    std::string name;
    Type type;
    size_t n;
    bool is_input;                    // the puzzle must not change it
    size_t number;                    // of this array in the case
    double low, high;                 // of its random numbers
    double limit = 1;                 // of the error, relative to the type's precision
    std::vector<double> initial = {};      // empty: NaN
    std::vector<double> expected = {};     // empty: not checked
    void* data = nullptr;
};

std::vector<double> random_values(const Storage& storage, int rank);

template <class T> struct Array {
    Storage& storage;
    double& operator[](size_t i) const { return storage.initial[i]; }   // of an input or an updated array
    double& expected(size_t i) const { return storage.expected[i]; }
    operator T*() const { return static_cast<T*>(storage.data); }
    // The initial values on another rank.
    std::vector<double> of_rank(int rank) const { return random_values(storage, rank); }
};

// One size: arrays, expected results, one run.
class Case {
public:
    explicit Case(std::string size) : size_(std::move(size)) {}
    Case(const Case&) = delete;
    ~Case();

    // Random numbers from low to high, representable in T. Integers are from low to high - 1.
    template <class T> Array<T> input(const char* name, size_t n, double low = -1, double high = 1) {
        return {add(name, type_of<T>, n, low, high, true)};
    }
    // Read and written. `expected` begins as the initial values.
    template <class T> Array<T> updated(const char* name, size_t n, double low = -1, double high = 1) {
        Storage& storage = add(name, type_of<T>, n, low, high, false);
        storage.expected = storage.initial;
        return {storage};
    }
    // Written: NaN before the run. limit: of the error, as a multiple of what rounding to T and sums in float cause.
    template <class T> Array<T> output(const char* name, size_t n, double limit = 1) {
        Storage& storage = add(name, type_of<T>, n, 0, 0, false);
        storage.initial.clear();
        storage.expected.assign(n, 0);
        storage.limit = limit;
        return {storage};
    }
    // NaN before the run, not checked.
    template <class T> Array<T> scratch(const char* name, size_t n) {
        Array<T> array = output<T>(name, n);
        array.storage.expected.clear();
        return array;
    }

    double minimum_bytes = 0, minimum_requests = 0, minimum_flops = 0, minimum_sent = 0;
    // Of this rank since the program's start: bytes sent to others, and the text of an error of NCCL ("": none).
    std::function<double()> bytes_sent = [] { return 0.0; };
    std::function<std::string()> nccl_error = [] { return ""; };

    // Calls `launch`, waits for the device and compares. On a GPU it also measures the time of the last size.
    void run(const std::function<void()>& launch);

private:
    Storage& add(const char* name, Type type, size_t n, double low, double high, bool is_input);
    void allocate();
    void restore();

    std::string size_;
    std::vector<std::unique_ptr<Storage>> arrays_;
};

std::string size_text(const char* names, const int* sizes, size_t count);   // "N = 37, C = 1000"
extern bool is_counted;                                  // the last size runs
extern int own_rank;

// Calls f(case, sizes...) for each tuple of sizes, whose names are separated by spaces. The counts of the last one are
// judged.
template <size_t K, class F>
void for_sizes(const char* names, std::initializer_list<std::array<int, K>> all, F f) {
    for (const std::array<int, K>& sizes : all) {
        is_counted = &sizes == all.end() - 1;
        Case c(size_text(names, sizes.data(), K));
        std::apply([&](auto... size) { f(c, size...); }, sizes);
    }
}

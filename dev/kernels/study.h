// What the studies in this folder share: arrays, the comparison with a plain loop, the clock, the table.
//
// A study takes one layer from a naive kernel, step by step, to the one that train_gpt.cu trains with. It is a
// program: it holds every step, at odd sizes and at the size to be timed, against a loop in double, and then
// prints what each step gained. A file reads like this:
//
//     void forward(Study& study, size_t n) {
//         Case c(study, "gelu forward", format("n %zu", n), bytes(2 * n * sizeof(floatX)));   // the floor
//         const auto inp = c.input<floatX>(n), out = c.output<floatX>("out", n);
//         for (size_t i = 0; i < n; i++) out.expected[i] = gelu(inp.host[i]);                 // the plain loop
//         c.step("an element per thread", [&] { launch("step 1", ...); });
//         c.step("train_gpt.cu", [&] { gelu_forward(out, inp, n); });                         // included, not pasted
//     }
//     int main(int argc, char** argv) {
//         return study_main(argc, argv, [](Study& study) { study.at_sizes({...}, on_a_gpu, on_a_cpu, ...); });
//     }
//
// Map: numbers · arrays · the clock · the ceilings · steps and tables · main
#pragma once

#define TESTING   // train_gpt.cu without its main
#include "../../train_gpt.cu"

// ==== numbers ================================================================

typedef std::vector<double> Values;

// What x becomes when it is stored as T.
template <typename T> double stored_as(double x) { return static_cast<float>(static_cast<T>(static_cast<float>(x))); }

// How far a result may be off: |got - expected| / (|expected| + rms of all expected). BF16 keeps 8 bits, so
// rounding once costs 2^-9 of the value at best and 2^-8 at worst; sums of many terms in FP32 stay well below 2^-14.
// FP16 keeps 11 bits.
template <typename T> constexpr double LIMIT = std::is_same_v<T, __nv_bfloat16> ? 1.0 / (1 << 7)
                                               : std::is_same_v<T, __half>      ? 1.0 / (1 << 10) : 1.0 / (1 << 14);

// What train_gpt.cu's kernels read the loss scale from: as floats, here for a scale of 1.
const std::vector<int> SCALE_OF_ONE = {1, 1, 0, 0, 0};
LossScale* loss_scale_in(float* floats) { return reinterpret_cast<LossScale*>(floats); }

// ==== arrays =================================================================
// On the host doubles, which hold every float and BF16 exactly. On the device, for the clock, as many copies as
// it takes to be larger than the L2 cache: each launch finds data that the cache has forgotten, as in training.

struct ArrayBase {
    virtual ~ArrayBase() = default;
    virtual size_t bytes() const = 0;
    virtual void allocate(size_t copies) = 0;
    virtual void restore() = 0;   // all copies: the initial values, or poison where there are none
    // The worst of all elements, of the first copy, relative to LIMIT; and which it is.
    struct Error { double of_limit; std::string what; };
    virtual Error error() const = 0;
};

template <typename T> class ArrayMemory : public ArrayBase {
public:
    Values host;       // before the launch; empty for an output
    Values expected;   // after it; empty for an input

    ArrayMemory(const char* name, size_t n, const size_t& turn) : name_(name), n_(n), turn_(turn) {}
    ArrayMemory(const ArrayMemory&) = delete;
    ~ArrayMemory() override { cudaFree(data_); }

    T* this_turns_copy() const {
        if (!data_) throw Failure("%s: on the device only inside of a step", name_);
        return data_ + turn_ % copies_ * stride_;
    }

    size_t bytes() const override { return n_ * sizeof(T); }

    void allocate(size_t copies) override {
        copies_ = copies;
        stride_ = ceil_div(n_, 256) * 256;   // copies are aligned as cudaMalloc's are
        check(cudaMalloc(&data_, copies_ * stride_ * sizeof(T)), name_);
    }

    void restore() override {
        if (host.empty()) return check(cudaMemsetAsync(data_, 0xff, copies_ * stride_ * sizeof(T), device.stream), name_);   // NaN
        std::vector<T> typed(n_);
        for (size_t i = 0; i < n_; i++) typed[i] = static_cast<T>(static_cast<float>(host[i]));
        for (size_t c = 0; c < copies_; c++) upload(data_ + c * stride_, typed.data(), bytes());
    }

    Error error() const override {
        if (expected.empty()) return {0, ""};
        std::vector<T> typed(n_);
        download(typed.data(), data_, bytes());
        double squares = 0, worst = -1;
        for (double e : expected) squares += e * e;
        const double rms = sqrt(squares / n_) + std::numeric_limits<float>::min();
        size_t at = 0;
        for (size_t i = 0; i < n_; i++) {
            double off = std::abs(static_cast<float>(typed[i]) - expected[i]) / (std::abs(expected[i]) + rms);
            if (std::isnan(off)) off = INFINITY;
            if (off > worst) worst = off, at = i;
        }
        return {worst / LIMIT<T>, format("%s[%zu] is %.7g, the plain loop has %.7g", name_, at,
                                         static_cast<float>(typed[at]), expected[at])};
    }

private:
    const char* name_;
    size_t n_, copies_ = 1, stride_ = 0;
    const size_t& turn_;
    T* data_ = nullptr;
};

// An array by name: what launches and loops take.
template <typename T> struct Array {
    const ArrayMemory<T>& memory;
    Values &host, &expected;
    operator T*() const { return memory.this_turns_copy(); }
};

Grad grad(const Array<float>& array) { return {static_cast<float*>(array), DType::FP32}; }

// ==== the clock ==============================================================

// Seconds of one launch, by events: the median of several batches, each long beside the events' resolution. `work`
// is told by `turn` which copies to take.
double seconds_of(const std::function<void()>& work, size_t& turn) {
    const int batches = device.is_cpu() ? 3 : 11;
    auto batch = [&](int launches) {
        cudaEvent_t begin = event_now(device.stream);
        for (int i = 0; i < launches; i++, turn++) work();
        cudaEvent_t end = event_now(device.stream);
        check(cudaEventSynchronize(end), "cudaEventSynchronize");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
        return ms / 1e3 / launches;
    };
    const double first = device.is_cpu() ? batch(1) : (batch(3), batch(3));   // warms up; then tells how long one takes
    const int launches = device.is_cpu() ? 1 : std::clamp(static_cast<int>(2e-3 / first), 1, 200);
    std::vector<double> seconds(batches);
    for (double& s : seconds) s = batch(launches);
    std::nth_element(seconds.begin(), seconds.begin() + batches / 2, seconds.end());
    turn = 0;
    return seconds[batches / 2];
}

// ==== the ceilings ===========================================================
// What this device really does in this run: a copy for kernels that memory bounds, a large matmul for those that
// arithmetic does. No data sheet's figures.

// Bytes, read and written, per second of a copy from device memory to device memory.
double measure_copy() {
    const size_t n = device.is_cpu() ? 8 << 20 : 512 << 20;
    char *from, *to;
    check(cudaMalloc(&from, n), "cudaMalloc to measure a copy");
    check(cudaMalloc(&to, n), "cudaMalloc to measure a copy");
    clear(from, n);
    size_t turn = 0;
    const double seconds = seconds_of([&] {
        check(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, device.stream), "cudaMemcpyAsync");
    }, turn);
    check(cudaFree(from), "cudaFree");
    check(cudaFree(to), "cudaFree");
    return 2 * n / seconds;
}

// FLOP/s of a square matmul of floatX by cuBLASLt. Of random numbers: zeros draw less power and run faster.
double measure_matmul() {
    const size_t n = device.is_cpu() ? 256 : 8192;
    float* normal;
    floatX* matrices;   // three of them
    check(cudaMalloc(&normal, n * n * sizeof(float)), "cudaMalloc to measure a matmul");
    check(cudaMalloc(&matrices, 3 * n * n * sizeof(floatX)), "cudaMalloc to measure a matmul");
    init_normal(normal, 1, 1, 0, n * n);
    for (int i = 0; i < 3; i++) round_weights(matrices + i * n * n, normal, n * n);
    size_t turn = 0;
    const double seconds = seconds_of([&] {
        matmul({matrices, matrices + n * n, matrices + 2 * n * n,
                {n, n, n, Op::AS_IS, Op::AS_IS, FLOATX, Into::ASSIGN, Epilogue::NONE}});
    }, turn);
    check(cudaFree(normal), "cudaFree");
    check(cudaFree(matrices), "cudaFree");
    return 2.0 * n * n * n / seconds;
}

// ==== steps and tables =======================================================

// What one launch cannot do without, and so what bounds it: bytes to move, or operations.
enum class Bound { BANDWIDTH, COMPUTE };
struct Floor { Bound bound; double amount; };
Floor bytes(double n) { return {Bound::BANDWIDTH, n}; }
Floor flops(double n) { return {Bound::COMPUTE, n}; }

// Without a GPU its time means nothing, and what it does to memory is counted instead: see dev/inspect.
#ifdef CUDA_CPU_INSPECT
using Traffic = cuda_cpu::watch::Figures;
Traffic take_traffic() { return cuda_cpu::watch::take_figures(); }
void count_traffic(bool wanted) { cuda_cpu::watch::look(wanted); }
#else
struct Traffic { double sectors, least_sectors, wavefronts, least_wavefronts, memory_bytes; uint64_t hazards; };
Traffic take_traffic() { return {}; }
void count_traffic(bool) {}
#endif

struct Row { std::string step; double seconds = 0, of_limit = 0; Traffic traffic = {}; };
struct Table { std::string title, size; Floor floor; std::vector<Row> rows; };

class Study {
public:
    // Calls f at sizes that fit nothing, only to check; then at the size to be timed, of which the CPU has its own.
    template <typename Size, typename F>
    void at_sizes(std::initializer_list<Size> odd, Size on_a_gpu, Size on_a_cpu, F f) {
        timing = false;
        for (const Size& size : odd) f(size);
        timing = true;
        f(device.is_cpu() ? on_a_cpu : on_a_gpu);
    }

    Table& table(const std::string& title) {
        for (Table& table : tables) if (table.title == title) return table;
        return tables.emplace_back(Table{title, "", {}, {}});
    }

    std::string report() const;
    std::string report_of_memory() const;

    bool timing = false;
    size_t turn = 0;   // which copy of the arrays a launch takes
    int failures = 0;
    std::vector<Table> tables;
};

// One direction of a layer at one size.
class Case {
public:
    Case(Study& study, const char* title, std::string size, Floor floor) : study_(study), title_(title), size_(std::move(size)) {
        if (!study.timing) return;
        table().size = size_;
        table().floor = floor;
    }

    // Values from `low` to `high` that T can hold: the same in every run.
    template <typename T> Array<T> input(size_t n, double low = -1, double high = 1) {
        return with_values<T>("input", n, [&](size_t i) { return low + (high - low) * uniform(i); });
    }
    template <typename T> Array<T> input(const std::vector<int>& values) {
        return with_values<T>("input", values.size(), [&](size_t i) { return values[i]; });
    }
    // Poisoned before each step; what to expect is for the study to fill in.
    template <typename T> Array<T> output(const char* name, size_t n) {
        const Array<T> array = add<T>(name, n);
        array.expected.resize(n);
        return array;
    }
    // Has values, and gets others; `expected` starts as those values.
    template <typename T> Array<T> updated(const char* name, size_t n, double low = -1, double high = 1) {
        const Array<T> array = with_values<T>(name, n, [&](size_t i) { return low + (high - low) * uniform(i); });
        array.expected = array.host;
        return array;
    }
    // Memory that a step needs on the way.
    template <typename T> Array<T> scratch(size_t n) { return add<T>("scratch", n); }

    // Checks one way to do it and, at the size for that, times it.
    void step(const std::string& name, const std::function<void()>& work) {
        if (!allocated_) allocate();
        const size_t number = ++steps_;
        std::vector<Row>& rows = table().rows;
        if (rows.size() < number) rows.push_back({format("%zu %s", number, name.c_str())});
        for (auto& array : arrays_) array->restore();
        study_.turn = 0;
        count_traffic(study_.timing);   // at the size for the table
        take_traffic();                 // what came before is no matter of this step
        work();
        check(cudaStreamSynchronize(device.stream), name.c_str());
        rows[number - 1].traffic = take_traffic();
        if (const uint64_t hazards = rows[number - 1].traffic.hazards) {
            study_.failures++;
            printf("FAILED %s, step %s, %s: %zu races, or reads of what nobody wrote\n", title_,
                   rows[number - 1].step.c_str(), size_.c_str(), static_cast<size_t>(hazards));
        }
        for (auto& array : arrays_) {
            const ArrayBase::Error error = array->error();
            rows[number - 1].of_limit = std::max(rows[number - 1].of_limit, error.of_limit);
            if (error.of_limit <= 1) continue;
            study_.failures++;
            printf("FAILED %s, step %s, %s: %s, %.2g times the limit\n", title_, rows[number - 1].step.c_str(), size_.c_str(),
                   error.what.c_str(), error.of_limit);
        }
        if (study_.timing && !device.is_cpu()) rows[number - 1].seconds = seconds_of(work, study_.turn);
    }

private:
    Table& table() { return study_.table(title_); }

    template <typename T> Array<T> add(const char* name, size_t n) {
        auto memory = std::make_unique<ArrayMemory<T>>(name, n, study_.turn);
        const Array<T> array = {*memory, memory->host, memory->expected};
        arrays_.push_back(std::move(memory));
        return array;
    }
    template <typename T, typename F> Array<T> with_values(const char* name, size_t n, F value) {
        const Array<T> array = add<T>(name, n);
        array.host.resize(n);
        for (size_t i = 0; i < n; i++) array.host[i] = stored_as<T>(value(i));
        return array;
    }
    double uniform(size_t i) const { return std::ldexp(splitmix64(splitmix64(arrays_.size()) ^ i) >> 11, -53); }   // [0, 1)

    void allocate() {
        size_t one = 0;
        for (auto& array : arrays_) one += array->bytes();
        const size_t enough = 4 * static_cast<size_t>(device.properties.l2CacheSize);
        const size_t copies = study_.timing && !device.is_cpu() ? ceil_div(std::max(enough, one), one) : 1;
        for (auto& array : arrays_) array->allocate(copies);
        allocated_ = true;
    }

    Study& study_;
    const char* title_;
    std::string size_;
    std::vector<std::unique_ptr<ArrayBase>> arrays_;
    size_t steps_ = 0;
    bool allocated_ = false;
};

constexpr char ABOUT_ERRORS[] =
    "\nerror: how far the worst element of all sizes was off, over how far it may be (a part of its value + the rms of all)\n";

// The tables in Markdown, aligned so that they read as they are.
std::string Study::report() const {
    if (tables.empty()) return "";
    if (device.is_cpu()) return report_of_memory() + ABOUT_ERRORS;
    std::string text;
    const double copy = measure_copy();
    double product = 0;   // measured where a table needs it
    for (const Table& t : tables) {
        const bool moves = t.floor.bound == Bound::BANDWIDTH;
        if (!moves && !product) product = measure_matmul();
        const double unit = moves ? 1e9 : 1e12, ceiling = moves ? copy : product;
        const char* const rate = moves ? "GB/s" : "TFLOP/s";
        text += format("\n%s: %s, %s, on %s\n", t.title.c_str(), t.size.c_str(), name_of(FLOATX), device.properties.name);
        text += format("%.4g %s; %s does %.4g %s there\n\n", t.floor.amount / (moves ? 1e6 : 1e9), moves ? "MB must move" : "GFLOP",
                       moves ? "a copy" : "a large matmul", ceiling / unit, rate);
        text += format("| %-46s | %9s | %7s | %9s | %8s | %5s |\n", "step", "us", rate, moves ? "of copy" : "of matmul", "faster", "error");
        text += "|" + std::string(48, '-');
        for (int width : {10, 8, 10, 9, 6}) text += "|" + std::string(width, '-') + ":";
        text += "|\n";
        for (const Row& row : t.rows) {
            const double speed = t.floor.amount / row.seconds;
            text += format("| %-46s | %9.1f | %7.4g | %7.1f %% | %6.1f x | %5.2f |\n", row.step.c_str(), row.seconds * 1e6,
                           speed / unit, 100 * speed / ceiling, t.rows[0].seconds / row.seconds, row.of_limit);
        }
    }
    return text + ABOUT_ERRORS;
}

// On the stand-in: sectors of global memory that warps' instructions touch and wavefronts that shared memory takes,
// in thousands and over the least that would do; and what moves to and from memory, behind a model of caches.
std::string Study::report_of_memory() const {
    std::string text;
    for (const Table& t : tables) {
        const bool moves = t.floor.bound == Bound::BANDWIDTH;
        text += format("\n%s: %s, %s, counted on a CPU (no time: that means nothing here)\n%.4g %s\n\n", t.title.c_str(),
                       t.size.c_str(), name_of(FLOATX), t.floor.amount / (moves ? 1e6 : 1e9),
                       moves ? "MB must move" : "GFLOP");
        text += format("| %-46s | %9s | %8s | %10s | %8s | %9s | %5s |\n", "step", "k sectors", "of least", "k wavefr.",
                       "of least", "MB moved", "error");
        text += "|" + std::string(48, '-');
        for (int width : {10, 9, 11, 9, 10, 6}) text += "|" + std::string(width, '-') + ":";
        text += "|\n";
        for (const Row& row : t.rows) {
            const Traffic& m = row.traffic;
            auto over = [](double done, double least) { return least > 0 ? format("%.2f x", done / least) : "-"; };
            text += format("| %-46s | %9.1f | %8s | %10.1f | %8s | %9.3f | %5.2f |\n", row.step.c_str(), m.sectors / 1e3,
                           over(m.sectors, m.least_sectors).c_str(), m.wavefronts / 1e3,
                           over(m.wavefronts, m.least_wavefronts).c_str(), m.memory_bytes / 1e6, row.of_limit);
        }
    }
    return text;
}

// ==== main ===================================================================

int study_main(int argc, char** argv, void (*study)(Study&)) {
    const std::string flag = argc > 1 ? argv[1] : "";
    const bool known = argc == 1 || (argc == 3 && flag == "--markdown");
    if (!known) {
        const bool asked = argc == 2 && flag == "--help";
        fprintf(asked ? stdout : stderr, "usage: %s [--markdown FILE]\n"
                "Checks each step against a plain loop and times it; FILE gets the tables as well, at its end.\n", argv[0]);
        return asked ? 0 : 2;
    }
    try {
        FILE* const file = argc == 3 ? fopen(argv[2], "a") : nullptr;
        if (argc == 3 && !file) throw UserError("--markdown %s: %s", argv[2], strerror(errno));
        open_device(TensorCores::AUTO);
        check(cudaMalloc(&device.matmul_workspace, MATMUL_WORKSPACE), "cudaMalloc of cuBLASLt's workspace");
        Study s;
        study(s);
        const std::string report = s.report();
        fputs(report.c_str(), stdout);
        if (file) {
            fputs(report.c_str(), file);
            fclose(file);
        }
        if (s.failures) printf("\nFAILED: %d steps differ from the plain loop, or race\n", s.failures);
        return s.failures ? 1 : 0;
    } catch (const UserError& error) {
        fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 2;
    } catch (const std::exception& error) {
        fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 1;
    }
}

// What the studies in this folder share: arrays, the check against a plain loop, timing, the table, main.
//
// A study takes one layer from a naive kernel, step by step, to the kernel that train_gpt.cu trains with. It is a
// program: it compares each step with a loop in double, at odd sizes and at the size that is timed, and then prints
// what each step gained.
//
//     void study_forward(Study& study, size_t n) {
//         Case c(study, "gelu forward", format("n %zu", n), bytes(2 * n * sizeof(floatX)));   // what must move
//         const auto inp = c.input<floatX>(n), out = c.output<floatX>("out", n);
//         for (size_t i = 0; i < n; i++) out.expected[i] = gelu(inp.host[i]);                 // the plain loop
//         c.step("a thread per element", [&] { launch_threads(forward_kernel, n, out, inp, n); });
//         c.step("train_gpt.cu", [&] { gelu_forward(out, inp, n); });                         // included, not copied
//     }
//     void run_study(Study& study) { study.at_sizes<size_t>({16, 4112}, 1 << 26, 1 << 16, study_forward); }
//
// Map: kernels · arrays · timing · steps · tables · main
#pragma once

#define TESTING   // train_gpt.cu without its main
#include "../../train_gpt.cu"

#include <deque>
#include <thread>

// ==== kernels ================================================================

__device__ __forceinline__ float f32(floatX x) { return static_cast<float>(x); }

// The element, or the first of `width` elements, of a thread that has no others.
__device__ __forceinline__ size_t my_index(int width = 1) {
    return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
}

// Launches at least `threads` threads, in blocks of BLOCK.
template <typename... Params, typename... Args>
void launch_threads(void (*kernel)(Params...), size_t threads, Args... args) {
    launch("step", kernel, static_cast<unsigned>(ceil_div(threads, BLOCK)), BLOCK, 0, args...);
}

// ==== arrays =================================================================

typedef std::vector<double> Values;

// x after it has been stored as T.
template <typename T> double stored_as(double x) { return static_cast<float>(static_cast<T>(static_cast<float>(x))); }

// The largest error allowed, |got - expected| / (|expected| + rms of all expected). BF16 has a precision of 8 bits, so
// one rounding costs up to 2^-9 of the value (2^-8 for a value that is stored and read again); FP16 has 11 bits; sums
// of many terms in FP32 stay well below 2^-14.
template <typename T> constexpr double LIMIT = std::is_same_v<T, __nv_bfloat16> ? 1.0 / (1 << 7)
                                               : std::is_same_v<T, __half>      ? 1.0 / (1 << 10) : 1.0 / (1 << 14);

struct Worst { double of_limit; std::string what; };   // an array's worst element

// An array in host memory as doubles, which hold every float and BF16 exactly, and in device memory in its own type.
struct Storage {
    const char* name;
    size_t n, element_bytes;
    double limit;
    double (*get)(const void* x, size_t i);
    void (*set)(void* x, size_t i, double value);
    const size_t& launches;    // of the step that is timed
    Values host, expected;     // before the step, empty for an output; after it, empty if it is not checked
    char* data = nullptr;      // copies of the array
    size_t copies = 1, stride = 0;

    size_t bytes() const { return n * element_bytes; }

    void allocate(size_t count) {
        copies = count;
        stride = ceil_div(n, 256) * 256 * element_bytes;   // copies are aligned as cudaMalloc's memory is
        check(cudaMalloc(&data, copies * stride), name);
    }

    // Sets all copies to the initial values, or to NaN if there are none.
    void restore() {
        if (host.empty()) return check(cudaMemsetAsync(data, 0xff, copies * stride, device.stream), name);
        std::vector<char> typed(bytes());
        for (size_t i = 0; i < n; i++) set(typed.data(), i, host[i]);
        for (size_t c = 0; c < copies; c++) upload(data + c * stride, typed.data(), bytes());
    }

    Worst worst() const {
        std::vector<char> typed(bytes());
        download(typed.data(), data, bytes());
        double squares = 0, most = -1;
        for (double e : expected) squares += e * e;
        const double rms = sqrt(squares / n) + std::numeric_limits<float>::min();
        size_t at = 0;
        for (size_t i = 0; i < n; i++) {
            double error = std::abs(get(typed.data(), i) - expected[i]) / (std::abs(expected[i]) + rms);
            if (std::isnan(error)) error = INFINITY;
            if (error > most) most = error, at = i;
        }
        return {most / limit, format("%s[%zu] is %.7g, expected %.7g", name, at, get(typed.data(), at), expected[at])};
    }
};

// A reference to such an array, which converts to its device pointer for launches.
template <typename T> struct Array {
    Storage& memory;
    Values &host, &expected;

    operator T*() const {
        if (!memory.data) throw Failure("%s: has no device memory before the first step", memory.name);
        return reinterpret_cast<T*>(memory.data + memory.launches % memory.copies * memory.stride);
    }
};

Grad grad(const Array<float>& array) { return {static_cast<float*>(array), DType::FP32}; }

// A LossScale for train_gpt.cu's kernels: the values of a scale of 1, and the pointer to such an input.
const std::vector<int> SCALE_OF_ONE = {1, 1, 0, 0, 0};
LossScale* loss_scale_in(float* floats) { return reinterpret_cast<LossScale*>(floats); }

// Calls f(i) for each i below n, on all of the host's cores.
template <typename F> void in_parallel(size_t n, F f) {
    const size_t workers = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (size_t w = 0; w < workers; w++)
        threads.emplace_back([=] {
            for (size_t i = w; i < n; i += workers) f(i);
        });
    for (std::thread& thread : threads) thread.join();
}

// ==== timing =================================================================
// By events on the device. On a CPU nothing is timed: memory accesses are counted instead (dev/inspect).

// Seconds of one launch: the median of batches, each of which is long compared with the events' resolution. Counts
// `launches`, so that each launch uses the next copy of the arrays.
double seconds_of(const std::function<void()>& work, size_t& launches) {
    auto batch = [&](int count) {
        const float milliseconds = stream_milliseconds([&] {
            for (int i = 0; i < count; i++, launches++) work();
        });
        return milliseconds / 1e3 / count;
    };
    batch(3);   // warm-up
    const int count = std::clamp(static_cast<int>(2e-3 / batch(3)), 1, 200);
    std::vector<double> seconds(11);
    for (double& s : seconds) s = batch(count);
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    launches = 0;
    return seconds[seconds.size() / 2];
}

template <typename T> T* device_memory(size_t n) {
    T* memory;
    check(cudaMalloc(&memory, n * sizeof(T)), "cudaMalloc");
    return memory;
}

// Bytes, read and written, per second of a copy in device memory.
double measure_copy() {
    const size_t n = 512 << 20;
    char* const memory = device_memory<char>(2 * n);
    clear(memory, n);
    size_t launches = 0;
    const double seconds = seconds_of([&] {
        check(cudaMemcpyAsync(memory + n, memory, n, cudaMemcpyDeviceToDevice, device.stream), "cudaMemcpyAsync");
    }, launches);
    check(cudaFree(memory), "cudaFree");
    return 2 * n / seconds;
}

// ==== steps ==================================================================

// The least that a launch must do, and so what bounds it.
enum class Bound { BANDWIDTH, COMPUTE };
struct Floor { Bound bound; double amount; };   // bytes or FLOPs
Floor bytes(double n) { return {Bound::BANDWIDTH, n}; }
Floor flops(double n) { return {Bound::COMPUTE, n}; }

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

struct Study {
    // Calls each f(study, size) at odd sizes, only to check; then at the size that is timed, or counted on a CPU.
    template <typename Size, typename... F>
    void at_sizes(std::initializer_list<Size> odd, Size on_a_gpu, Size on_a_cpu, F... f) {
        timing = false;
        for (const Size& size : odd) (f(*this, size), ...);
        timing = true;
        (f(*this, device.is_cpu() ? on_a_cpu : on_a_gpu), ...);
    }

    Table& table(const std::string& title) {
        for (Table& table : tables) if (table.title == title) return table;
        return tables.emplace_back(Table{title, "", {}, {}});
    }

    bool timing = false;
    int failures = 0;
    std::vector<Table> tables;
};

// One direction of a layer at one size.
class Case {
public:
    Case(Study& study, std::string title, std::string size, Floor floor)
        : study_(study), title_(std::move(title)), size_(std::move(size)) {
        if (!study.timing) return;
        study.table(title_).size = size_;
        study.table(title_).floor = floor;
    }
    Case(const Case&) = delete;
    ~Case() {
        for (Storage& array : arrays_) cudaFree(array.data);
    }

    // Numbers between `low` and `high` that T can hold, the same in every run; or these numbers.
    template <typename T> Array<T> input(size_t n, double low = -1, double high = 1) {
        return updated<T>("input", n, low, high, false);
    }
    template <typename T> Array<T> input(const std::vector<int>& values) {
        const Array<T> array = scratch<T>(values.size());
        array.host.assign(values.begin(), values.end());
        return array;
    }
    // NaN before each step. The study fills in `expected`.
    template <typename T> Array<T> output(const char* name, size_t n) {
        const Array<T> array = scratch<T>(n, name);
        array.expected.resize(n);
        return array;
    }
    // Read and written by a step. `expected` starts as the initial values.
    template <typename T> Array<T> updated(const char* name, size_t n, double low = -1, double high = 1,
                                           bool checked = true) {
        const Array<T> array = scratch<T>(n, name);
        array.host.resize(n);
        for (size_t i = 0; i < n; i++) {
            const double uniform = std::ldexp(splitmix64(splitmix64(arrays_.size()) ^ i) >> 11, -53);   // [0, 1)
            array.host[i] = stored_as<T>(low + (high - low) * uniform);
        }
        if (checked) array.expected = array.host;
        return array;
    }
    // Memory for intermediate results.
    template <typename T> Array<T> scratch(size_t n, const char* name = "scratch") {
        Storage& memory = arrays_.emplace_back(Storage{
            name, n, sizeof(T), LIMIT<T>,
            [](const void* x, size_t i) -> double { return static_cast<float>(static_cast<const T*>(x)[i]); },
            [](void* x, size_t i, double v) { static_cast<T*>(x)[i] = static_cast<T>(static_cast<float>(v)); },
            launches_, {}, {}});
        return {memory, memory.host, memory.expected};
    }

    // Runs `work`, compares the arrays with what is expected and, at the size for that, times it.
    void step(const std::string& name, const std::function<void()>& work) {
        if (steps_++ == 0) allocate();
        std::vector<Row>& rows = study_.table(title_).rows;
        if (rows.size() < steps_) rows.push_back({format("%zu %s", steps_, name.c_str())});
        Row& row = rows[steps_ - 1];
        auto fail = [&](const std::string& what) {
            study_.failures++;
            printf("FAILED %s, step %s, %s: %s\n", title_.c_str(), row.step.c_str(), size_.c_str(), what.c_str());
        };
        for (Storage& array : arrays_) array.restore();
        count_traffic(study_.timing);
        take_traffic();   // of this step only
        work();
        check(cudaStreamSynchronize(device.stream), name.c_str());
        row.traffic = take_traffic();
        if (row.traffic.hazards)
            fail(format("%d races or reads of uninitialised shared memory", static_cast<int>(row.traffic.hazards)));
        for (const Storage& array : arrays_) {
            if (array.expected.empty()) continue;
            const Worst worst = array.worst();
            row.of_limit = std::max(row.of_limit, worst.of_limit);
            if (worst.of_limit > 1) fail(format("%s, %.2g times the limit", worst.what.c_str(), worst.of_limit));
        }
        if (study_.timing && !device.is_cpu()) row.seconds = seconds_of(work, launches_);
    }

private:
    // For timing, copies that are together larger than the L2 cache: each launch then finds data that is not in the
    // cache, as in training.
    void allocate() {
        size_t one = 0;
        for (const Storage& array : arrays_) one += array.bytes();
        const size_t enough = 4 * static_cast<size_t>(device.properties.l2CacheSize);
        const size_t copies = study_.timing && !device.is_cpu() ? ceil_div(std::max(enough, one), one) : 1;
        for (Storage& array : arrays_) array.allocate(copies);
    }

    Study& study_;
    std::string title_, size_;
    std::deque<Storage> arrays_;   // which stay where they are
    size_t steps_ = 0, launches_ = 0;
};

// ==== tables =================================================================
// In Markdown. On a GPU: time, rate and the share of what a copy reaches in the same run. On a CPU: sectors of
// global memory that warps' instructions touch and wavefronts of shared memory, in thousands and relative to the least
// possible; and the bytes that move to and from memory past a model of the caches.

std::string table_line(const std::string& first, const std::vector<std::string>& others) {
    std::string text = format("| %-46s |", first.c_str());
    for (const std::string& other : others) text += format(" %10s |", other.c_str());
    return text + "\n";
}

std::string table_of(const Table& t) {
    const bool moves = t.floor.bound == Bound::BANDWIDTH, cpu = device.is_cpu();
    const char* const rate = moves ? "GB/s" : "TFLOP/s";
    const double unit = moves ? 1e9 : 1e12;
    std::string text = format("\n%s: %s, %s, %s\n%.4g %s", t.title.c_str(), t.size.c_str(), name_of(FLOATX),
                              cpu ? "counted on a CPU" : device.properties.name, t.floor.amount / unit * 1e3,
                              moves ? "MB must move" : "GFLOP");
    static const double copy = cpu ? 0 : measure_copy();
    if (!cpu && moves) text += format("; a copy reaches %.4g GB/s", copy / unit);
    text += "\n\n";
    text += cpu ? table_line("step", {"k sectors", "of least", "k wavefr.", "of least", "MB moved", "error"})
                : table_line("step", {"us", rate, "of copy", "faster", "error"});
    text += "|" + std::string(48, '-') + "|";
    for (int i = 0; i < (cpu ? 6 : 5); i++) text += std::string(11, '-') + ":|";
    text += "\n";
    for (const Row& row : t.rows) {
        const Traffic& m = row.traffic;
        auto relative = [](double done, double least) { return least > 0 ? format("%.2f x", done / least) : "-"; };
        const double speed = t.floor.amount / row.seconds;
        const std::string error = format("%.2f", row.of_limit);
        if (cpu)
            text += table_line(row.step, {format("%.1f", m.sectors / 1e3), relative(m.sectors, m.least_sectors),
                                          format("%.1f", m.wavefronts / 1e3),
                                          relative(m.wavefronts, m.least_wavefronts),
                                          format("%.3f", m.memory_bytes / 1e6), error});
        else
            text += table_line(row.step, {format("%.1f", row.seconds * 1e6), format("%.4g", speed / unit),
                                          moves ? format("%.1f %%", 100 * speed / copy) : "-",
                                          format("%.1f x", t.rows[0].seconds / row.seconds), error});
    }
    return text;
}

// ==== main ===================================================================

void run_study(Study& study);   // which each study defines

int main() {
    try {
        open_device(TensorCores::AUTO);
        check(cudaMalloc(&device.matmul_workspace, MATMUL_WORKSPACE), "cudaMalloc of cuBLASLt's workspace");
        Study study;
        run_study(study);
        for (const Table& table : study.tables) fputs(table_of(table).c_str(), stdout);
        puts("\nerror: the worst |got - expected| / (|expected| + rms) at any size, relative to its limit");
        if (study.failures) printf("\nFAILED: %d checks\n", study.failures);
        return study.failures ? 1 : 0;
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\n", error.what());
        return dynamic_cast<const UserError*>(&error) ? 2 : 1;
    }
}

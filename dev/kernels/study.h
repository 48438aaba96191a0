// Harness of the studies in this folder: arrays, the check against a reference loop, timing, tables, main.
//
// A study develops one layer, step by step, from a naive kernel to the kernel that train_gpt.cu trains with. It is a
// program that compares each step's results with those of a loop in double precision, at irregular sizes and at the
// size that is timed, and then prints a table with the gain of each step.
//
//     void study_forward(Study& study, size_t n) {
//         Case c(study, "gelu forward", format("n %zu", n), bytes(2 * n * sizeof(floatX)));   // minimum traffic
//         const auto inp = c.input<floatX>(n), out = c.output<floatX>("out", n);
//         for (size_t i = 0; i < n; i++) out.expected[i] = gelu(inp.host[i]);                 // reference loop
//         c.step("one thread per element", [&] { launch_threads(forward_kernel, n, out, inp, n); });
//         c.step("train_gpt.cu", [&] { gelu_forward(view(out, 1, n), view(inp, 1, n)); });   // the trainer's kernel
//     }
//     void run_study(Study& study) { study.at_sizes<size_t>({16, 4112}, 1 << 26, 1 << 16, study_forward); }
//
// A study takes --steps TEXT,...: only steps whose names contain one of the texts; and, if it has sequence lengths,
// --lengths N,...
//
// Map: kernels · arrays · timing · steps · tables · main
#pragma once

#define TESTING   // train_gpt.cu without its main
#include "../../train_gpt.cu"

#include "../tests/reference.h"

#include <deque>

// ==== kernels ================================================================

__device__ __forceinline__ float f32(floatX x) { return static_cast<float>(x); }

// Returns the index of this thread's first element, when each thread processes `width` consecutive elements.
__device__ __forceinline__ size_t my_index(int width = 1) {
    return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
}

// Launches at least `threads` threads, in blocks of BLOCK.
template <typename... Params, typename... Args>
void launch_threads(void (*kernel)(Params...), size_t threads, Args... args) {
    launch("step", kernel, static_cast<unsigned>(ceil_div(threads, BLOCK)), BLOCK, 0, args...);
}

// ==== arrays =================================================================

// The largest allowed error |found - expected| / (|expected| + root mean square of all expected values). BF16 has 8
// significant bits, so one rounding changes a value by up to 2^-9 of it, and storing and rereading an intermediate
// result by up to 2^-8. FP16 has 11 significant bits, E5M2 has 3. Sums of many terms in FP32 stay well below 2^-14.
template <typename T> constexpr double LIMIT = std::is_same_v<T, __nv_bfloat16> ? 1.0 / (1 << 7)
                                               : std::is_same_v<T, __half>      ? 1.0 / (1 << 10)
                                               : std::is_same_v<T, e5m2>        ? 1.0 / (1 << 2) : 1.0 / (1 << 14);

constexpr size_t PIECE = 1 << 20;   // elements that a host thread processes at once

struct Worst { double error; std::string what; };   // the element with the largest error, as a multiple of LIMIT

// An array. The host has doubles, which represent every float and BF16 exactly; the device has the array's own type.
struct Storage {
    const char* name;
    size_t n, element_bytes;
    double limit;
    double (*get)(const void* x, size_t i);
    void (*set)(void* x, size_t i, double value);
    const size_t& launches;    // calls so far of the step being timed
    Values host, expected;     // initial values (empty for an output); expected results (empty if not checked)
    // The first step's results are the expected ones: for sizes at which a loop on the host would take too long.
    bool from_first_step = false;
    char* data = nullptr;      // on the device: `copies` copies of the array with a stride of `stride` bytes
    size_t copies = 1, stride = 0;

    size_t bytes() const { return n * element_bytes; }

    void allocate(size_t count) {
        copies = count;
        stride = ceil_div(n, 256) * 256 * element_bytes;   // each copy is aligned like memory from cudaMalloc
        check(cudaMalloc(&data, copies * stride), name);
    }

    // Sets all copies to the initial values; an output has no initial values and is set to NaN.
    void restore() {
        if (host.empty()) return check(cudaMemsetAsync(data, 0xff, copies * stride, device.stream), name);
        std::vector<char> typed(bytes());
        in_parallel(n, PIECE, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) set(typed.data(), i, host[i]);
        });
        for (size_t c = 0; c < copies; c++) upload(data + c * stride, typed.data(), bytes());
    }

    Values values() const {
        std::vector<char> typed(bytes());
        download(typed.data(), data, bytes());
        Values values(n);
        in_parallel(n, PIECE, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) values[i] = get(typed.data(), i);
        });
        return values;
    }

    Worst worst() const {
        const Values found = values();
        double squares = 0, max_error = -1;
        for (double e : expected) squares += e * e;
        const double rms = sqrt(squares / n) + std::numeric_limits<float>::min();
        size_t at = 0;
        std::mutex mutex;
        in_parallel(n, PIECE, [&](size_t begin, size_t end) {
            double largest = -1;
            size_t where = begin;
            for (size_t i = begin; i < end; i++) {
                double error = std::abs(found[i] - expected[i]) / (std::abs(expected[i]) + rms);
                if (std::isnan(error)) error = INFINITY;
                if (error > largest) largest = error, where = i;
            }
            const std::lock_guard<std::mutex> lock(mutex);
            if (largest > max_error) max_error = largest, at = where;
        });
        return {max_error / limit, format("%s[%zu]: expected %.7g, found %.7g", name, at, expected[at], found[at])};
    }
};

// A reference to a Storage. In the arguments of a launch it converts to the device pointer of the current copy.
template <typename T> struct Array {
    Storage& memory;
    Values &host, &expected;

    operator T*() const {
        if (!memory.data) throw Failure("%s: device memory is allocated by the first step", memory.name);
        return reinterpret_cast<T*>(memory.data + memory.launches % memory.copies * memory.stride);
    }
};

Grad grad(const Array<float>& array) { return {static_cast<float*>(array), DType::FP32}; }

// The members of a LossScale of 1, as an input of a study; loss_scale_in() casts this input for train_gpt.cu's kernels.
const std::vector<int> SCALE_OF_ONE = {1, 0, 0, 0};
LossScale* loss_scale_in(float* floats) { return reinterpret_cast<LossScale*>(floats); }

// ==== timing =================================================================
// With CUDA events. On a CPU, dev/inspect counts memory accesses instead, and nothing is timed.

// Returns the seconds of one step: the median over batches, each much longer than the resolution of the events.
// Increments `launches`, so that each call of `work` uses the next copy of the arrays.
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

// Returns the bandwidth of a copy within device memory: bytes read plus bytes written per second.
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

// The minimum work of a step: bytes if it is bound by memory bandwidth, FLOPs if it is bound by arithmetic.
enum class Bound { BANDWIDTH, COMPUTE };
struct MinimumWork { Bound bound; double amount; };
MinimumWork bytes(double n) { return {Bound::BANDWIDTH, n}; }
MinimumWork flops(double n) { return {Bound::COMPUTE, n}; }

#ifdef CUDA_CPU_INSPECT
using Traffic = cuda_cpu::watch::Figures;
Traffic take_traffic() { return cuda_cpu::watch::take_figures(); }
void count_traffic(bool enabled) { cuda_cpu::watch::record_launches(enabled); }
#else
struct Traffic { double sectors, least_sectors, wavefronts, least_wavefronts, memory_bytes; uint64_t hazards; };
Traffic take_traffic() { return {}; }
void count_traffic(bool) {}
#endif

struct Row { std::string step; double seconds = 0, error = 0; Traffic traffic = {}; };   // error: as in Worst
struct Table { std::string title, size; MinimumWork minimum; std::vector<Row> rows; };

struct Study {
    // Calls each f(study, size), first at the `odd` sizes to check the results, then at the size of the table:
    // `on_a_gpu` to time the steps, or on a CPU `on_a_cpu` to count their memory accesses.
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

    // Returns the values of --lengths; `otherwise` without this option.
    std::vector<int> lengths_or(const std::vector<int>& otherwise) {
        has_lengths = true;
        return lengths.empty() ? otherwise : lengths;
    }
    // Returns whether --steps selects the step: whether its name contains one of the given texts.
    bool selects(const std::string& step) const {
        return steps.empty() || std::any_of(steps.begin(), steps.end(), [&](const std::string& text) {
                   return step.find(text) != std::string::npos;
               });
    }

    bool timing = false, has_lengths = false;   // has_lengths: the study has called lengths_or()
    int failures = 0;
    std::vector<Table> tables;
    std::vector<int> lengths;
    std::vector<std::string> steps;
};

// One table: a layer's forward or backward pass at one size.
class Case {
public:
    Case(Study& study, std::string title, std::string size, MinimumWork minimum)
        : study_(study), title_(std::move(title)), size_(std::move(size)) {
        if (!study.timing) return;
        study.table(title_).size = size_;
        study.table(title_).minimum = minimum;
    }
    Case(const Case&) = delete;
    ~Case() {
        for (Storage& array : arrays_) cudaFree(array.data);
    }

    // Read by the steps: `values`, or random numbers between `low` and `high`, rounded to T and equal in every run.
    template <typename T> Array<T> input(size_t n, double low = -1, double high = 1) {
        return updated<T>("input", n, low, high, false);
    }
    template <typename T> Array<T> input(const std::vector<int>& values) {
        const Array<T> array = scratch<T>(values.size());
        array.host.assign(values.begin(), values.end());
        return array;
    }
    // Written by the steps; set to NaN before each step. The study fills in `expected`.
    template <typename T> Array<T> output(const char* name, size_t n) {
        const Array<T> array = scratch<T>(n, name);
        array.expected.resize(n);
        return array;
    }
    // Read and written by the steps. `expected` starts as the initial values.
    template <typename T> Array<T> updated(const char* name, size_t n, double low = -1, double high = 1,
                                           bool checked = true) {
        const Array<T> array = scratch<T>(n, name);
        array.host.resize(n);
        in_parallel(n, PIECE, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) {
                const double uniform = std::ldexp(splitmix64(splitmix64(arrays_.size()) ^ i) >> 11, -53);   // [0, 1)
                array.host[i] = stored_as<T>(low + (high - low) * uniform);
            }
        });
        if (checked) array.expected = array.host;
        return array;
    }
    // Intermediate results, not checked.
    template <typename T> Array<T> scratch(size_t n, const char* name = "scratch") {
        Storage& memory = arrays_.emplace_back(Storage{
            name, n, sizeof(T), LIMIT<T>,
            [](const void* x, size_t i) -> double { return static_cast<float>(static_cast<const T*>(x)[i]); },
            [](void* x, size_t i, double v) { static_cast<T*>(x)[i] = static_cast<T>(static_cast<float>(v)); },
            launches_, {}, {}});
        return {memory, memory.host, memory.expected};
    }

    // Runs `work`, which launches a step's kernels, and compares the arrays with their expected values. At the size of
    // the table it also times `work`, or on a CPU counts its memory accesses.
    void step(const std::string& name, const std::function<void()>& work) {
        const std::string label = format("%zu %s", ++steps_, name.c_str());
        if (!study_.selects(label)) return;
        if (ran_++ == 0) allocate();
        std::vector<Row>& rows = study_.table(title_).rows;
        const auto known = std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.step == label; });
        Row& row = known != rows.end() ? *known : rows.emplace_back(Row{label});
        auto fail = [&](const std::string& what) {
            study_.failures++;
            printf("FAILED %s, step %s, %s: %s\n", title_.c_str(), row.step.c_str(), size_.c_str(), what.c_str());
        };
        for (Storage& array : arrays_) array.restore();
        count_traffic(study_.timing);
        take_traffic();   // resets the counters
        work();
        check(cudaStreamSynchronize(device.stream), name.c_str());
        row.traffic = take_traffic();
        if (row.traffic.hazards)
            fail(format("%d races or reads of uninitialised shared memory", static_cast<int>(row.traffic.hazards)));
        for (Storage& array : arrays_) {
            if (array.from_first_step && ran_ == 1) array.expected = array.values();
            if (array.expected.empty()) continue;
            const Worst worst = array.worst();
            row.error = std::max(row.error, worst.error);
            if (worst.error > 1) fail(format("%s: error %.2g times the limit", worst.what.c_str(), worst.error));
        }
        if (study_.timing && !device.is_cpu()) row.seconds = seconds_of(work, launches_);
    }

private:
    // For timing, allocates copies that together exceed the L2 cache: each launch then reads memory, as in training.
    void allocate() {
        size_t size = 0;
        for (const Storage& array : arrays_) size += array.bytes();
        const size_t min_size = 4 * static_cast<size_t>(device.properties.l2CacheSize);
        const size_t copies = study_.timing && !device.is_cpu() ? ceil_div(std::max(min_size, size), size) : 1;
        for (Storage& array : arrays_) array.allocate(copies);
    }

    Study& study_;
    std::string title_, size_;
    std::deque<Storage> arrays_;   // a deque, because Array refers to its elements
    size_t steps_ = 0, ran_ = 0, launches_ = 0;   // ran_: of the steps, those that --steps selects
};

// ==== tables =================================================================
// In Markdown. README.md explains the columns.

std::string table_of(const Table& t) {
    using Cells = std::vector<std::string>;
    const bool moves = t.minimum.bound == Bound::BANDWIDTH, cpu = device.is_cpu();
    const double unit = moves ? 1e9 : 1e12;
    static const double copy = cpu ? 0 : measure_copy();
    const Cells head = cpu ? Cells{"step", "sectors", "x minimum", "wavefronts", "x minimum", "MB moved", "error"}
                           : Cells{"step", "us", moves ? "GB/s" : "TFLOP/s", "% of copy", "speed-up", "error"};
    std::vector<Cells> lines = {head, Cells(head.size(), "---------:")};
    lines[1][0] = std::string(46, '-');
    for (const Row& row : t.rows) {
        const Traffic& m = row.traffic;
        const double speed = t.minimum.amount / row.seconds;
        auto relative = [](double found, double least) { return least > 0 ? format("%.2f x", found / least) : "-"; };
        lines.push_back(cpu ? Cells{row.step, format("%.0f", m.sectors), relative(m.sectors, m.least_sectors),
                                    format("%.0f", m.wavefronts), relative(m.wavefronts, m.least_wavefronts),
                                    format("%.3f", m.memory_bytes / 1e6)}
                            : Cells{row.step, format("%.1f", row.seconds * 1e6), format("%.4g", speed / unit),
                                    moves ? format("%.1f", 100 * speed / copy) : "-",
                                    format("%.1f x", t.rows[0].seconds / row.seconds)});
        lines.back().push_back(format("%.2f", row.error));
    }
    std::string text = format("\n%s: %s, %s, %s\n%s%.4g %s", t.title.c_str(), t.size.c_str(), name_of(FLOATX),
                              cpu ? "counted on a CPU" : device.properties.name,
                              moves ? "minimum traffic: " : "", t.minimum.amount / unit * 1e3, moves ? "MB" : "GFLOP");
    if (!cpu && moves) text += format("; bandwidth of a copy: %.4g GB/s", copy / unit);
    text += "\n";
    for (const Cells& cells : lines) {
        text += format("\n| %-46s |", cells[0].c_str());
        for (size_t i = 1; i < cells.size(); i++) text += format(" %10s |", cells[i].c_str());
    }
    return text + "\n";
}

// ==== main ===================================================================

void run_study(Study& study);   // defined by each study

// Reads --steps TEXT,... and --lengths N,... into the study.
void read_arguments(Study& study, int argc, char** argv) {
    const char* const usage = "expected --steps TEXT,... or --lengths N,..., found %s";
    for (int i = 1; i < argc; i += 2) {
        const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        const bool is_steps = flag == "--steps";
        if (value.empty() || (!is_steps && flag != "--lengths")) throw UserError(usage, argv[i]);
        std::istringstream list(value);
        for (std::string word; std::getline(list, word, ',');) {
            const int length = atoi(word.c_str());
            if (is_steps) study.steps.push_back(word);
            else if (length > 0) study.lengths.push_back(length);
            else throw UserError(usage, value.c_str());
        }
    }
}

int main(int argc, char** argv) {
    try {
        Study study;
        read_arguments(study, argc, argv);
        open_device(TensorCores::AUTO);
        check(cudaMalloc(&device.matmul_workspace, MATMUL_WORKSPACE), "cudaMalloc of cuBLASLt's workspace");
        run_study(study);
        const auto is_empty = [](const Table& table) { return table.rows.empty(); };
        study.tables.erase(std::remove_if(study.tables.begin(), study.tables.end(), is_empty), study.tables.end());
        if (study.tables.empty()) throw UserError("--steps: no step's name contains such a text");
        if (!study.lengths.empty() && !study.has_lengths) throw UserError("--lengths: this study has none");
        for (const Table& table : study.tables) fputs(table_of(table).c_str(), stdout);
        puts("\nerror: maximum of |found - expected| / (|expected| + rms) over all sizes, relative to the limit");
        if (study.failures) printf("\n%d checks FAILED\n", study.failures);
        return study.failures ? 1 : 0;
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\n", error.what());
        return dynamic_cast<const UserError*>(&error) ? 2 : 1;
    }
}

// --trace: records all work on streams (kernels, copies, communication) and writes a Chrome trace for ui.perfetto.dev,
// with a row for the CPU, one for each stream, and a counter of live bytes by category. Included by train_gpt.cu.
#pragma once

constexpr long TRACED_STEPS = 3;
constexpr int NO_LAYER = -1;

// ---- recording

// How a kernel accesses an argument's memory: const pointers are read, others written, updated() pointers both.
enum class Access { READ, WRITE, UPDATE };

template <typename T> struct Updated {
    T what;
    operator T() const { return what; }
};
template <typename T> Updated<T> updated(T what) { return {what}; }

template <typename T, typename = void> constexpr bool has_data = false;
template <typename T> constexpr bool has_data<T, std::void_t<decltype(T::data)>> = true;

struct Work {
    const char *name, *pass;
    int layer;
    cudaStream_t stream;
    double called, returned;           // seconds on the CPU's clock: the launch
    cudaEvent_t begin, end;            // on the stream
    std::vector<std::pair<const void*, Access>> memory;
    double began = 0, ended = 0;       // the events' times, in microseconds since the recording started
};

template <typename F8> struct Out;   // of fp8.cuh

struct Recorder {
    bool on = false;
    const char* pass = "";
    int layer = NO_LAYER;
    double start = 0;
    cudaEvent_t start_event = nullptr;
    std::vector<Work> work;

    void at(const char* new_pass, int new_layer) {
        pass = new_pass;
        layer = new_layer;
    }
    template <typename T> void note(T* memory, Access access = std::is_const_v<T> ? Access::READ : Access::WRITE) {
        work.back().memory.push_back({memory, access});
    }
    template <typename F8> void note(const Out<F8>& out, Access access = Access::WRITE) {
        note(out.x, access);
        note(out.x8);
    }
    template <typename T> void note(const Updated<T>& memory) { note(memory.what, Access::UPDATE); }
    template <typename T> void note(const T& argument) {   // a scalar, or a struct with a pointer `data`
        if constexpr (has_data<T>) note(argument.data);
    }
};

static Recorder recorder;

// Called before and after work is enqueued on a stream: name it for profilers (NVTX) and, while recording, time it.
void begin_work(const char* name, cudaStream_t stream) {
    nvtxRangePushA(name);
    if (recorder.on)
        recorder.work.push_back({name, recorder.pass, recorder.layer, stream, seconds_now(), 0, event_now(stream),
                                 nullptr, {}});
}

void end_work(cudaStream_t stream) {
    if (recorder.on) {
        recorder.work.back().end = event_now(stream);
        recorder.work.back().returned = seconds_now();
    }
    nvtxRangePop();
}

void start_recording() {
    recorder.on = true;
    recorder.start_event = event_now(device.stream);
    check(cudaStreamSynchronize(device.stream), "cudaStreamSynchronize");
    recorder.start = seconds_now();
}

// ---- live bytes

// Memory of a tensor that is live during a part of a step: an activation, or a parameter's gradient.
struct Place { const char *begin, *end; bool activation; };

// Changes in the live bytes of gradients [0] and activations [1], by time in microseconds.
using Changes = std::map<double, std::array<long, 2>>;

// Returns when the bytes of `all`, sorted by address, become live and dead. An activation is live from a write to the
// last read before the next write; a parameter's gradient from its first write in a step to the end of the update.
Changes live_bytes(const std::vector<Place>& all) {
    struct Life { double from = -1, to = -1; };
    std::vector<Life> lives(all.size());
    Changes changes;
    auto finish = [&](size_t i) {
        if (lives[i].from >= 0) {
            changes[lives[i].from][all[i].activation] += all[i].end - all[i].begin;
            changes[lives[i].to][all[i].activation] -= all[i].end - all[i].begin;
        }
        lives[i] = {};
    };
    const std::vector<Work>& work = recorder.work;
    for (size_t w = 0; w < work.size(); w++) {
        for (const auto& [memory, access] : work[w].memory) {
            const char* address = static_cast<const char*>(memory);
            const auto after = std::upper_bound(all.begin(), all.end(), address,
                                                [](const char* a, const Place& p) { return a < p.begin; });
            if (after == all.begin() || address >= (after - 1)->end) continue;   // not in `all`
            const size_t i = after - 1 - all.begin();
            if (all[i].activation && access == Access::WRITE) finish(i);
            if (lives[i].from < 0) lives[i].from = work[w].began;
            lives[i].to = work[w].ended;
        }
        auto is_adamw = [&](size_t i) { return i < work.size() && strcmp(work[i].name, "adamw") == 0; };
        if (!is_adamw(w) || is_adamw(w + 1)) continue;
        for (size_t i = 0; i < all.size(); i++) {   // after the last kernel of an update, gradients are dead
            if (all[i].activation) continue;
            lives[i].to = work[w].ended;
            finish(i);
        }
    }
    for (size_t i = 0; i < all.size(); i++) finish(i);
    return changes;
}

// ---- writing the trace

enum TraceRow { CPU_ROW, KERNEL_ROW, COPY_ROW, COMMUNICATION_ROW, TENSOR_ROW };
constexpr const char* TRACE_ROW_NAMES[] = {"CPU: launches", "stream: kernels", "stream: copies",
                                           "stream: between GPUs", "stream: tensor parallelism"};

TraceRow row_of(const Work& w) {
    return w.stream == device.stream ? KERNEL_ROW : w.stream == device.copies ? COPY_ROW
           : w.stream == device.tensor ? TENSOR_ROW : COMMUNICATION_ROW;
}

// Returns the trace event of a bar; times in microseconds.
json trace_bar(const Work& w, TraceRow row, double begin, double end) {
    json args = {{"pass", w.pass}};
    if (w.layer != NO_LAYER) args["layer"] = w.layer;
    int priority = 0;
    check(cudaStreamGetPriority(w.stream, &priority), "cudaStreamGetPriority");
    if (priority != 0) args["priority"] = priority;   // priority of the stream
    return {{"ph", "X"}, {"name", w.name}, {"pid", 1}, {"tid", int(row)}, {"ts", begin}, {"dur", end - begin},
            {"args", args}};
}

// Returns the microseconds from the start of the recording to an event, and destroys the event.
double read_and_destroy(cudaEvent_t event) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, recorder.start_event, event), "cudaEventElapsedTime");
    cudaEventDestroy(event);
    return 1e3 * milliseconds;
}

// Ends the recording and writes the trace. bytes: the plan's by category; live bytes replace gradients and activations.
void write_trace(const std::string& path, const std::vector<Place>& places, json bytes, long steps) {
    recorder.on = false;
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    json events;
    for (int row = CPU_ROW; row <= (device.tensor ? TENSOR_ROW : COMMUNICATION_ROW); row++)
        events.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", row},
                          {"args", {{"name", TRACE_ROW_NAMES[row]}}}});
    for (Work& w : recorder.work) {
        w.began = read_and_destroy(w.begin);
        w.ended = std::max(read_and_destroy(w.end), w.began);
        events.push_back(trace_bar(w, CPU_ROW, 1e6 * (w.called - recorder.start), 1e6 * (w.returned - recorder.start)));
        events.push_back(trace_bar(w, row_of(w), w.began, w.ended));
    }
    long live[2] = {};
    for (const auto& [time, change] : live_bytes(places)) {
        bytes["gradients"] = live[0] += change[0];
        bytes["activations"] = live[1] += change[1];
        events.push_back({{"ph", "C"}, {"name", "live bytes"}, {"pid", 1}, {"ts", time}, {"args", bytes}});
    }
    write_json(path, {{"displayTimeUnit", "ms"}, {"traceEvents", events}});
    printf("trace      %s, of %ld steps: ui.perfetto.dev opens it\n", path.c_str(), steps);
    recorder.work.clear();
}

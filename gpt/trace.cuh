// The picture that --trace draws of what the recorder saw (recorder.cuh): a Chrome trace, which ui.perfetto.dev opens,
// with a row for the CPU, one for each stream, and a counter of live bytes by category. An activation lives from a
// write to the last read before the next one; a parameter's gradient from its first micro-batch to the update; the rest
// always. Included by train_gpt.cu.
#pragma once

constexpr long TRACED_STEPS = 3;

// A tensor's copy in memory.
struct Place { const char *begin, *end; Category category; };

std::vector<Place> places(Model& m) {
    std::vector<Place> all;
    auto add = [&](const TensorBase& tensor, size_t bytes, size_t copies, Category category) {
        for (size_t l = 0; l < copies; l++) {
            const char* begin = tensor.data + l * tensor.layer_bytes;
            all.push_back({begin, begin + bytes, category});
        }
    };
    for (const ActivationRow& row : activation_table(m.a, m.setup))
        if (row.category == Category::ACTIVATIONS) add(*row.tensor, row.copy_bytes(), row.copies, row.category);
    for (const ParameterRow& row : parameter_table(m.g, m.config))
        add(*row.tensor, row.elements * size_of(m.grads.dtype), row.tensor->copies, Category::GRADIENTS);
    std::sort(all.begin(), all.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
    return all;
}

// By when bytes come to life or die: time in microseconds -> bytes of activations and gradients.
using Changes = std::map<double, std::pair<long, long>>;

void add_life(Changes& changes, const Place& place, double from, double to) {
    const long bytes = place.end - place.begin;
    const bool activation = place.category == Category::ACTIVATIONS;
    (activation ? changes[from].first : changes[from].second) += bytes;
    (activation ? changes[to].first : changes[to].second) -= bytes;
}

// began, ended: of each piece of work, in microseconds.
Changes live_bytes(Model& m, const std::vector<double>& began, const std::vector<double>& ended) {
    struct Life { double from = -1, to = -1; };
    const std::vector<Place> all = places(m);
    std::vector<Life> lives(all.size());
    Changes changes;
    auto finish = [&](size_t i) {
        if (lives[i].from >= 0) add_life(changes, all[i], lives[i].from, lives[i].to);
        lives[i] = {};
    };
    for (size_t w = 0; w < recorder.work.size(); w++) {
        for (const auto& [memory, access] : recorder.work[w].memory) {
            const char* address = static_cast<const char*>(memory);
            const auto after = std::upper_bound(all.begin(), all.end(), address,
                                                [](const char* a, const Place& p) { return a < p.begin; });
            if (after == all.begin() || address >= (after - 1)->end) continue;   // not a tensor that comes and goes
            const size_t i = after - 1 - all.begin();
            if (all[i].category == Category::ACTIVATIONS && access == Access::WRITE) finish(i);
            if (lives[i].from < 0) lives[i].from = began[w];
            lives[i].to = ended[w];
        }
        auto is_adamw = [](const Work& work) { return strcmp(work.name, "adamw") == 0; };
        if (!is_adamw(recorder.work[w]) || (w + 1 < recorder.work.size() && is_adamw(recorder.work[w + 1]))) continue;
        for (size_t i = 0; i < all.size(); i++)
            if (all[i].category == Category::GRADIENTS) {
                if (lives[i].from >= 0) lives[i].to = ended[w];
                finish(i);
            }
    }
    for (size_t i = 0; i < all.size(); i++) finish(i);
    return changes;
}

void start_recording() {
    recorder.on = true;
    recorder.start_event = event_now(device.stream);
    check(cudaStreamSynchronize(device.stream), "cudaStreamSynchronize");
    recorder.start = seconds_now();
}

enum TraceRow { CPU_ROW, KERNEL_ROW, COPY_ROW, SENT_ROW };
constexpr const char* TRACE_ROW_NAMES[] = {"CPU: launches", "stream: kernels", "stream: copies", "stream: between GPUs"};

TraceRow row_of(const Work& w) {
    return w.stream == device.stream ? KERNEL_ROW : w.stream == device.copies ? COPY_ROW : SENT_ROW;
}

// A bar of the picture; times in microseconds.
json trace_bar(const Work& w, TraceRow row, double begin, double end) {
    json args = {{"pass", w.pass}};
    if (w.layer != NO_LAYER) args["layer"] = w.layer;
    return {{"ph", "X"}, {"name", w.name}, {"pid", 1}, {"tid", int(row)}, {"ts", begin}, {"dur", end - begin},
            {"args", args}};
}

// Bars of all work; leaves when each began and ended on its stream.
void add_bars(json& events, std::vector<double>& began, std::vector<double>& ended) {
    for (const Work& w : recorder.work) {
        float from = 0, to = 0;
        check(cudaEventElapsedTime(&from, recorder.start_event, w.begin), "cudaEventElapsedTime");
        check(cudaEventElapsedTime(&to, recorder.start_event, w.end), "cudaEventElapsedTime");
        began.push_back(1e3 * from);
        ended.push_back(std::max(1e3 * to, began.back()));
        events.push_back(trace_bar(w, CPU_ROW, 1e6 * (w.handed_over - recorder.start),
                                   1e6 * (w.returned - recorder.start)));
        events.push_back(trace_bar(w, row_of(w), began.back(), ended.back()));
        cudaEventDestroy(w.begin);
        cudaEventDestroy(w.end);
    }
}

void add_live_bytes(json& events, const Plan& p, const Changes& changes) {
    json bytes;
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++) bytes[CATEGORY_NAMES[i]] = p.bytes[i];
    long activations = 0, gradients = 0;
    for (const auto& [time, change] : changes) {
        bytes["activations"] = activations += change.first;
        bytes["gradients"] = gradients += change.second;
        events.push_back({{"ph", "C"}, {"name", "live bytes"}, {"pid", 1}, {"ts", time}, {"args", bytes}});
    }
}

// How long something was sent between GPUs, and how long while no kernel ran. Times in microseconds; the work of a
// stream is in order.
struct Sent { double all = 0, not_hidden = 0; };

Sent time_of_sending(const std::vector<double>& began, const std::vector<double>& ended) {
    Sent sent;
    for (size_t w = 0; w < began.size(); w++) {
        if (row_of(recorder.work[w]) != SENT_ROW) continue;
        double hidden = 0;
        for (size_t k = 0; k < began.size(); k++)
            if (row_of(recorder.work[k]) == KERNEL_ROW)
                hidden += std::max(0.0, std::min(ended[w], ended[k]) - std::max(began[w], began[k]));
        sent.all += ended[w] - began[w];
        sent.not_hidden += ended[w] - began[w] - hidden;
    }
    return sent;
}

void write_trace(const std::string& path, Model& m, long steps) {
    recorder.on = false;
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    json events;
    for (int row : {CPU_ROW, KERNEL_ROW, COPY_ROW, SENT_ROW})
        events.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", row},
                          {"args", {{"name", TRACE_ROW_NAMES[row]}}}});
    std::vector<double> began, ended;
    add_bars(events, began, ended);
    add_live_bytes(events, plan(m.setup), live_bytes(m, began, ended));
    const Sent sent = time_of_sending(began, ended);
    recorder.work.clear();
    write_json(path, {{"displayTimeUnit", "ms"}, {"traceEvents", events}});
    printf("trace      %s, of %ld steps: ui.perfetto.dev opens it\n", path.c_str(), steps);
    if (sent.all > 0)
        printf("sending    %.3g ms a step between GPUs, %.3g ms of it (%.0f %%) not hidden under kernels\n",
               1e-3 * sent.all / steps, 1e-3 * sent.not_hidden / steps, 100 * sent.not_hidden / sent.all);
}

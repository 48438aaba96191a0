// What --trace shows is recorded here: for each piece of work on a stream when the CPU handed it over, when it ran, for
// which layer and pass, and which memory it was given. trace.cuh makes a picture of it. Included by train_gpt.cu.
#pragma once

// Memory given to a kernel: to read, to write, or (const or not does not tell) to update in place.
enum class Access { READ, WRITE, UPDATE };

template <typename T> struct Updated {
    T what;
    operator T() const { return what; }
};
template <typename T> Updated<T> updated(T what) { return {what}; }

template <typename T, typename = void> constexpr bool has_data = false;
template <typename T> constexpr bool has_data<T, std::void_t<decltype(T::data)>> = true;

constexpr int NO_LAYER = -1;

struct Work {
    const char *name, *pass;
    int layer;
    cudaStream_t stream;
    double handed_over, returned;      // seconds, CPU
    cudaEvent_t begin, end;            // on the stream
    std::vector<std::pair<const void*, Access>> memory;
};

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
    template <typename T> void note(const T& argument) {   // a number, or something with memory in it
        if constexpr (has_data<T>) note(argument.data);
    }
};

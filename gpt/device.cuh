// This process's GPU, and how work gets there: launch(), which launches every kernel, copies and CUDA graphs. Included
// by train_gpt.cu.
#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <tuple>

// ---- errors
// check() throws a Failure if a CUDA or cuBLAS call failed; `what` names the call. guarded_main() prints it and
// returns 1.

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw Failure("%s: %s (%s)", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

void check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        throw Failure("%s: %s", what, cublasGetStatusString(status));
}

// ---- the device
// This process's GPU, or its emulation by dev/cpu. `stream` carries all compute, `copies` the transfer of the next
// batch, `tensor` the communication of tensor parallelism. cuBLASLt's workspace is part of the memory plan.

const char* name_of(TensorCores kind) { return TENSOR_CORE_NAMES[static_cast<int>(kind)]; }

struct Device {
    cudaDeviceProp properties;
    cudaStream_t stream, copies, tensor = nullptr;
    cublasLtHandle_t matmul;
    void* matmul_workspace = nullptr;
    TensorCores tensor_cores = TensorCores::NONE;
    double peak_flops = 0;   // dense FLOP/s in floatX: the denominator of MFU
    std::string peak_source; // where that figure comes from

    bool is_cpu() const { return properties.major == 0; }   // dev/cpu reports 0.0
};

static Device device;

// What this process is doing, for the watchdog (gpt/launch.cuh), which ends a rank that does not call progress().
struct Activity {
    std::atomic<const char*> name{"start"};
    std::atomic<long> count{0};
    std::atomic<int> paused{0};
    std::atomic<bool> connected{false};   // NCCL's communicator exists and can report errors
};
static Activity activity;

void progress(const char* name) {
    activity.name.store(name, std::memory_order_relaxed);
    activity.count.fetch_add(1, std::memory_order_relaxed);
}

// ---- recording
// All work on a stream goes through on_stream(), which names it for profilers and for the recorder of --trace.
// updated(x) marks an argument that a kernel both reads and writes.

cudaEvent_t event_now(cudaStream_t stream) {
    cudaEvent_t event;
    check(cudaEventCreate(&event), "cudaEventCreate");
    check(cudaEventRecord(event, stream), "cudaEventRecord");
    return event;
}

// Returns the time in milliseconds that device.stream takes for what work() launches.
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

#include "trace.cuh"   // recorder, updated(), begin_work(), end_work(), start_recording(), write_trace()

// Runs work(), which launches something on `stream`, under a name for profilers and the recorder.
template <typename F, typename... Memory>
void on_stream(const char* name, cudaStream_t stream, F work, const Memory&... memory) {
    progress(name);
    begin_work(name, stream);
    if (recorder.on) (recorder.note(memory), ...);
    work();
    end_work(stream);
}

// ---- launch
// launch() launches every kernel, in order on device.stream.

// Allows blocks of the kernel `bytes` of dynamic shared memory. CUDA rejects more than a block may have besides the
// arrays that the kernel declares, and would only say "invalid argument".
void request_shared_memory(const char* name, const void* kernel, size_t bytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error == cudaErrorInvalidValue)
        throw UserError("%s: expected at most %zu bytes of shared memory per block on %s, found %zu and the kernel's "
                        "own arrays: the model has too many --channels, or too large heads", name,
                        device.properties.sharedMemPerBlockOptin, device.properties.name, bytes);
    check(error, name);
}

template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
    if (shared_bytes > 0) request_shared_memory(name, reinterpret_cast<const void*>(kernel), shared_bytes);
    const cudaLaunchConfig_t config = {grid, block, shared_bytes, device.stream, nullptr, 0};   // no attributes
    auto work = [&] { check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name); };
    on_stream(name, device.stream, work, args...);
}

// Copies between host and device after all earlier work on device.stream, and blocks until the copy is done.
void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind direction) {
    check(cudaMemcpyAsync(to, from, bytes, direction, device.stream), "cudaMemcpyAsync");
    progress("wait for the device");
    check(cudaStreamSynchronize(device.stream), "a kernel or a copy");
}
void upload(void* to, const void* from, size_t bytes) { copy(to, from, bytes, cudaMemcpyHostToDevice); }
void download(void* to, const void* from, size_t bytes) { copy(to, from, bytes, cudaMemcpyDeviceToHost); }
void clear(void* block, size_t bytes) {
    auto work = [&] { check(cudaMemsetAsync(block, 0, bytes, device.stream), "cudaMemsetAsync"); };
    on_stream("clear", device.stream, work, block);
}

// ---- graphs
// Each micro-batch needs the same few hundred launches. A launch costs the CPU several microseconds, longer than short
// kernels run. A CUDA graph launches them all at once. The first run of a sequence launches its kernels directly, which
// loads them and plans its matmuls; the second run captures a graph; later runs replay it, with the same bits.
//
// A graph keeps its kernels' arguments. Values that change between replays must be in device memory at a fixed address;
// anything else that changes must be part of the sequence's name.

class Graphs {
public:
    bool on = false;

    Graphs() = default;
    Graphs(const Graphs&) = delete;
    ~Graphs() { clear(); }

    // Frees all graphs, none of which may be running.
    void clear() {
        for (const auto& [name, graph] : graphs_)
            if (graph) cudaGraphExecDestroy(graph);
        graphs_.clear();
    }

    // work() launches on device.stream and does not synchronise.
    template <typename F> void run(const std::string& name, F work) {
        if (!on || recorder.on) return work();
        const auto [place, is_new] = graphs_.try_emplace(name, nullptr);
        if (is_new) return work();
        cudaGraphExec_t& graph = place->second;
        if (!graph) graph = capture(name, work);
        on_stream(name.c_str(), device.stream, [&] { check(cudaGraphLaunch(graph, device.stream), name.c_str()); });
    }
    size_t captured() const {
        return std::count_if(graphs_.begin(), graphs_.end(), [](const auto& entry) { return entry.second != nullptr; });
    }

private:
    template <typename F> static cudaGraphExec_t capture(const std::string& name, F work) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        try {
            work();
        } catch (...) {   // ends the capture, so that the stream can be used again
            cudaStreamEndCapture(device.stream, &graph);
            if (graph) cudaGraphDestroy(graph);
            throw;
        }
        check(cudaStreamEndCapture(device.stream, &graph), ("capture of " + name).c_str());
        cudaGraphExec_t executable = nullptr;
        const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
        check(cudaGraphDestroy(graph), "cudaGraphDestroy");
        check(status, ("cudaGraphInstantiate: " + name).c_str());
        return executable;
    }

    std::map<std::string, cudaGraphExec_t> graphs_;   // null: the sequence has run once, directly
};

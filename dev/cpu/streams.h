// Streams. Without an emulated GPU, a stream's work runs when it is issued; on one, it is queued (README.md).
//
// Map: seeds · a stream's work · capture · queues
#pragma once

#include "card.h"

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "errors.h"
#include "rounding.h"
#include "watch.h"

namespace cuda_cpu {

// ==== seeds =============================================================================================

// A small pseudo-random number generator (splitmix64).
struct Random {
    uint64_t state;
    uint64_t next() { return mixed(state += 0x9e3779b97f4a7c15); }
    unsigned below(unsigned bound) { return static_cast<unsigned>((next() >> 32) * bound >> 32); }
};

// Returns CUDA_CPU_SEED. The default is 1 on an emulated GPU and 0 otherwise.
inline uint64_t seed_of_environment() { return number_of_environment("CUDA_CPU_SEED", card() != nullptr); }

// The seed of the order in which blocks and threads run; 0: natural order.
inline uint64_t& seed() {
    static uint64_t value = seed_of_environment();
    return value;
}

// The generator that selects the next stream. Seed 0, the natural order of threads, does not reseed it.
inline Random& stream_order() {
    static Random value{seed_of_environment()};
    return value;
}

inline void set_seed(uint64_t value) {
    seed() = value;
    if (value != 0) stream_order() = {value};
}

// Returns whether new memory is filled with NaN.
inline bool fills_memory() { return seed() != 0 || (card() != nullptr && !watch::on); }

// ==== a stream's work ===================================================================================

using Operation = std::function<cudaError_t()>;
using Operations = std::vector<Operation>;

// A position in a stream's queue and the time at which it was reached. An event refers to the last one recorded.
struct Marker {
    bool reached = false;
    std::chrono::steady_clock::time_point time{};

    void reach() {
        reached = true;
        time = std::chrono::steady_clock::now();
    }
};
using Place = std::shared_ptr<Marker>;

struct Task {
    Operation operation;       // if empty, the task only waits
    std::vector<Place> after;  // positions in other streams that must be reached first
    Place place;               // reached when the task has run
    uint64_t seed;             // seed() when the task was queued
    bool may_block;            // may wait for another process: runs only while the host waits for the device
};
}  // namespace cuda_cpu

// Both modes check only the calls of the capturing host thread. Relaxed mode (allocations allowed) is not emulated.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1 };

struct CUstream_st {
    enum { idle, capturing, invalidated } state = idle;  // of a capture
    cuda_cpu::Operations operations;  // recorded by a capture
    bool blocking = true;   // synchronises with the default stream (created without cudaStreamNonBlocking)
    int priority = 0;
    std::deque<cuda_cpu::Task> queue;
    cuda_cpu::Place last;   // the end of the queue
};
using cudaStream_t = CUstream_st*;

namespace cuda_cpu {

// ==== capture ===========================================================================================

// While a stream is being captured, its work is recorded with its current arguments and does not run. Calls that wait
// for work, or that may wait, are rejected and invalidate the capture, as in CUDA. (Driver API,
// cuThreadExchangeStreamCaptureMode; Programming Guide, "Prohibited and Unhandled Operations".)

// The streams that this host thread is capturing.
inline thread_local std::vector<cudaStream_t> captured_streams;

inline bool in_capture(cudaStream_t stream) { return stream != nullptr && stream->state != CUstream_st::idle; }

inline cudaError_t record(cudaStream_t stream, Operation operation) {
    if (stream->state == CUstream_st::invalidated) return report(cudaErrorStreamCaptureInvalidated);
    stream->operations.push_back(std::move(operation));
    return cudaSuccess;
}

// Returns an error if the stream is being captured, for calls that concern one stream and cannot be captured.
inline cudaError_t reject_if_captured(cudaStream_t stream, cudaError_t error = cudaErrorStreamCaptureUnsupported) {
    if (!in_capture(stream)) return cudaSuccess;
    stream->state = CUstream_st::invalidated;
    return report(error);
}

// Returns an error if any stream is captured, for calls that are unsafe during a capture: they allocate, free or block.
inline cudaError_t reject_while_capturing() {
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : captured_streams) error = reject_if_captured(stream);
    return error;
}

// Returns an error for default-stream work while a blocking stream is captured: the work would depend on the capture.
inline cudaError_t reject_implicit_dependency(cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (stream != nullptr) return error;
    for (cudaStream_t other : captured_streams)
        if (other->blocking) error = reject_if_captured(other, cudaErrorStreamCaptureImplicit);
    return error;
}

// ==== queues ============================================================================================

// Returns whether work is queued: on an emulated GPU, unless CUDA_CPU_SEED is 0.
inline bool asynchronous() {
    static const bool wanted = getenv("CUDA_CPU_SEED") == nullptr || seed_of_environment() != 0;
    return card() != nullptr && wanted;
}

// All streams. The first is the default stream (cudaStreamLegacy), which programs pass as a null pointer.
inline std::vector<cudaStream_t>& streams() {
    static auto* const value = new std::vector<cudaStream_t>{new CUstream_st};  // events may outlive main
    return *value;
}
// Returns the stream object: for a null pointer, that of the default stream.
inline cudaStream_t real(cudaStream_t stream) { return stream == nullptr ? streams()[0] : stream; }

// The first error of queued work. Calls that wait for the device return it.
inline cudaError_t& asynchronous_error() {
    static cudaError_t value = cudaSuccess;
    return value;
}

// Returns whether the stream's next task can run. host_waits: the program waits for the device.
inline bool can_run(cudaStream_t stream, bool host_waits) {
    if (stream->queue.empty() || (stream->queue.front().may_block && !host_waits)) return false;
    const auto& after = stream->queue.front().after;
    return std::all_of(after.begin(), after.end(), [](const Place& place) { return place->reached; });
}

// Runs one task, if any can run. Under an odd seed it mostly stays with one stream, which gets far ahead of the others.
inline void run_one(bool host_waits) {
    static cudaStream_t preferred = nullptr;
    std::vector<cudaStream_t> runnable;
    for (cudaStream_t stream : streams())
        if (can_run(stream, host_waits)) runnable.push_back(stream);
    if (runnable.empty()) return;
    Random& random = stream_order();
    const bool can_stay = std::count(runnable.begin(), runnable.end(), preferred) > 0;
    const bool stays = seed() % 2 == 1 && can_stay && random.below(8) != 0;
    if (!stays) preferred = runnable[random.below(static_cast<unsigned>(runnable.size()))];
    const Task task = std::move(preferred->queue.front());
    preferred->queue.pop_front();
    const uint64_t now = std::exchange(seed(), task.seed);
    const cudaError_t error = task.operation ? task.operation() : cudaSuccess;
    seed() = now;
    if (error != cudaSuccess && asynchronous_error() == cudaSuccess) asynchronous_error() = error;
    task.place->reach();
}

// Runs tasks until holds() is true. A task waits only for earlier ones, so while any is queued, one can run.
template <class Condition> inline cudaError_t run_until(Condition holds) {
    while (!holds()) run_one(true);
    return asynchronous_error() == cudaSuccess ? cudaSuccess : report(asynchronous_error());
}
inline cudaError_t run_until_reached(const Place& place) {
    return run_until([&] { return place == nullptr || place->reached; });
}
inline cudaError_t run_all() {
    return run_until([] {
        return std::all_of(streams().begin(), streams().end(), [](cudaStream_t s) { return s->queue.empty(); });
    });
}

// Runs up to 5 tasks in one of four calls, so that queues grow.
inline void run_some() {
    if (stream_order().below(4) != 0) return;
    for (unsigned pieces = stream_order().below(6); pieces > 0; pieces--) run_one(false);
}

// Appends a task to a stream's queue. `after`: the positions that it waits for. Returns the position of its end.
inline Place enqueue(cudaStream_t stream, Operation operation, std::vector<Place> after = {}, bool may_block = false) {
    constexpr size_t max_queue = 1024;  // a launch blocks while the queue is longer, as in CUDA
    CUstream_st& to = *real(stream);
    for (cudaStream_t other : streams()) {
        const bool implied =
            other != &to && (other == streams()[0] ? to.blocking : &to == streams()[0] && other->blocking);
        if (implied && other->last != nullptr && !other->last->reached) after.push_back(other->last);
    }
    to.last = std::make_shared<Marker>();
    to.queue.push_back({std::move(operation), std::move(after), to.last, seed(), may_block});
    const Place place = to.last;
    run_some();
    run_until([&] { return to.queue.size() < max_queue; });
    return place;
}

// Returns whether work issued to this stream is recorded or queued instead of run at once.
inline bool is_deferred(cudaStream_t stream) { return in_capture(stream) || asynchronous(); }

// Runs an operation, or if it is deferred, records it in the stream's capture or appends it to the stream's queue.
inline cudaError_t submit(cudaStream_t stream, Operation operation, std::vector<Place> after = {},
                          bool may_block = false) {
    if (!is_deferred(stream)) return operation();
    if (const cudaError_t error = reject_implicit_dependency(stream); error != cudaSuccess) return error;
    if (in_capture(stream)) return record(stream, std::move(operation));
    enqueue(stream, std::move(operation), std::move(after), may_block);
    return cudaSuccess;
}

// Completes all work, then selects the GPU to emulate; an empty key selects none. For tests.
inline void set_card(const std::string& key) {
    run_all();
    chosen_card() = key.empty() ? nullptr : find_card(key);
}
}  // namespace cuda_cpu

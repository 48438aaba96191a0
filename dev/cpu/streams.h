// Streams. Without a card a stream's work is done at once. On a card it waits in the stream's queue, and runs at a
// moment that the seed draws, at the latest when something waits for it; streams run in all the orders that CUDA
// allows. So a missing event, or a buffer that is reused too early, shows as a wrong result.
//
// Map: seeds · what is in a stream · capture · queues
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

// A small generator of pseudo-random numbers (splitmix64).
struct Random {
    uint64_t state;
    uint64_t next() { return mixed(state += 0x9e3779b97f4a7c15); }
    unsigned below(unsigned bound) { return static_cast<unsigned>((next() >> 32) * bound >> 32); }
};

// CUDA_CPU_SEED. A card has seed 1 by default.
inline uint64_t seed_of_environment() { return number_of_environment("CUDA_CPU_SEED", card() != nullptr); }

// The seed of the order in which blocks and threads run: 0 for the natural one.
inline uint64_t& seed()
{
    static uint64_t value = seed_of_environment();
    return value;
}

// Draws the next stream. It stays as it is while seed 0 sets the natural order of threads.
inline Random& stream_order()
{
    static Random value{seed_of_environment()};
    return value;
}

inline void set_seed(uint64_t value)
{
    seed() = value;
    if (value != 0) stream_order() = {value};
}

// Returns whether fresh memory is full of NaNs.
inline bool fills_memory() { return seed() != 0 || (card() != nullptr && !watch::on); }

// ==== a stream's work ===================================================================================

using Deed = std::function<cudaError_t()>;
using Deeds = std::vector<Deed>;

// A place in a stream's queue, and when it was reached. An event is the last place where it was recorded.
struct Marker {
    bool reached = false;
    std::chrono::steady_clock::time_point time{};

    void reach()
    {
        reached = true;
        time = std::chrono::steady_clock::now();
    }
};
using Place = std::shared_ptr<Marker>;

struct Task {
    Deed deed;                 // if empty, the task only waits
    std::vector<Place> after;  // places in other streams that come first
    Place place;               // of its end
    uint64_t seed;             // as it was when this was handed over
    bool may_block;            // on another process: runs only while the program waits for the device
};

}  // namespace cuda_cpu

// A capture is the host thread's own in each: relaxed captures, which may allocate, are not emulated.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1 };

struct CUstream_st {
    enum { free, captured, spoilt } state = free;
    cuda_cpu::Deeds deeds;  // recorded by a capture
    bool blocking = true;   // waits for the default stream, which waits for it
    int priority = 0;
    std::deque<cuda_cpu::Task> queue;
    cuda_cpu::Place last;   // the queue's end
};
using cudaStream_t = CUstream_st*;

namespace cuda_cpu {

// ==== capture ===========================================================================================

// While a stream is captured, its work is recorded with its present arguments, and not done. Calls that wait for work,
// or that might, are rejected and invalidate the capture, as in CUDA. (Driver API, cuThreadExchangeStreamCaptureMode;
// Programming Guide, "Prohibited and Unhandled Operations".)

// Of this host thread.
inline thread_local std::vector<cudaStream_t> captured_streams;

inline bool in_capture(cudaStream_t stream) { return stream != nullptr && stream->state != CUstream_st::free; }

inline cudaError_t note(cudaStream_t stream, Deed deed)
{
    if (stream->state == CUstream_st::spoilt) return report(cudaErrorStreamCaptureInvalidated);
    stream->deeds.push_back(std::move(deed));
    return cudaSuccess;
}

// Returns the error of a call that concerns one stream and cannot be captured.
inline cudaError_t refuse_captured(cudaStream_t stream, cudaError_t error = cudaErrorStreamCaptureUnsupported)
{
    if (!in_capture(stream)) return cudaSuccess;
    stream->state = CUstream_st::spoilt;
    return report(error);
}

// Returns the error of a call that CUDA counts as unsafe during a capture: one that allocates, frees, or may wait.
inline cudaError_t refuse_while_capturing()
{
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : captured_streams) error = refuse_captured(stream);
    return error;
}

// Returns the error of work for the default stream, on which a captured blocking stream would depend.
inline cudaError_t refuse_implicit(cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    if (stream != nullptr) return error;
    for (cudaStream_t other : captured_streams)
        if (other->blocking) error = refuse_captured(other, cudaErrorStreamCaptureImplicit);
    return error;
}

// ==== queues ============================================================================================

// Returns whether work waits in queues: on a card, unless CUDA_CPU_SEED is 0.
inline bool asynchronous()
{
    static const bool wanted = getenv("CUDA_CPU_SEED") == nullptr || seed_of_environment() != 0;
    return card() != nullptr && wanted;
}

// All streams, first the default stream (cudaStreamLegacy), which is the null pointer for the program.
inline std::vector<cudaStream_t>& streams()
{
    static auto* const value = new std::vector<cudaStream_t>{new CUstream_st};  // events may outlive main
    return *value;
}
inline cudaStream_t real(cudaStream_t stream) { return stream == nullptr ? streams()[0] : stream; }

// The first error of queued work, which calls that wait return.
inline cudaError_t& late_error()
{
    static cudaError_t value = cudaSuccess;
    return value;
}

inline bool can_run(cudaStream_t stream, bool host_waits)
{
    if (stream->queue.empty() || (stream->queue.front().may_block && !host_waits)) return false;
    const auto& after = stream->queue.front().after;
    return std::all_of(after.begin(), after.end(), [](const Place& place) { return place->reached; });
}

// Runs one task. Under an odd seed mostly of the same stream, so that one gets far ahead of the others.
inline void run_one(bool host_waits)
{
    static cudaStream_t favourite = nullptr;
    std::vector<cudaStream_t> able;
    for (cudaStream_t stream : streams())
        if (can_run(stream, host_waits)) able.push_back(stream);
    if (able.empty()) return;
    Random& random = stream_order();
    const bool stays = seed() % 2 == 1 && std::count(able.begin(), able.end(), favourite) > 0 && random.below(8) != 0;
    if (!stays) favourite = able[random.below(static_cast<unsigned>(able.size()))];
    const Task task = std::move(favourite->queue.front());
    favourite->queue.pop_front();
    const uint64_t now = std::exchange(seed(), task.seed);
    const cudaError_t error = task.deed ? task.deed() : cudaSuccess;
    seed() = now;
    if (error != cudaSuccess && late_error() == cudaSuccess) late_error() = error;
    task.place->reach();
}

// A task waits only for earlier ones, so there is always one that can run.
template <class Condition> inline cudaError_t run_until(Condition holds)
{
    while (!holds()) run_one(true);
    return late_error() == cudaSuccess ? cudaSuccess : report(late_error());
}
inline cudaError_t run_until_reached(const Place& place)
{
    return run_until([&] { return place == nullptr || place->reached; });
}
inline cudaError_t run_all()
{
    return run_until([] {
        return std::all_of(streams().begin(), streams().end(), [](cudaStream_t s) { return s->queue.empty(); });
    });
}

// Runs a few tasks now and then, mostly none, so that queues grow.
inline void run_some()
{
    if (stream_order().below(4) != 0) return;
    for (unsigned pieces = stream_order().below(6); pieces > 0; pieces--) run_one(false);
}

// Puts work into a stream's queue, behind the places that it waits for, and returns the place of its end.
inline Place put_off(cudaStream_t stream, Deed deed, std::vector<Place> after = {}, bool may_block = false)
{
    constexpr size_t max_queue = 1024;  // then a launch waits, as in CUDA
    CUstream_st& to = *real(stream);
    for (cudaStream_t other : streams()) {
        const bool implied =
            other != &to && (other == streams()[0] ? to.blocking : &to == streams()[0] && other->blocking);
        if (implied && other->last != nullptr && !other->last->reached) after.push_back(other->last);
    }
    to.last = std::make_shared<Marker>();
    to.queue.push_back({std::move(deed), std::move(after), to.last, seed(), may_block});
    const Place place = to.last;
    run_some();
    run_until([&] { return to.queue.size() < max_queue; });
    return place;
}

// Returns whether work for this stream is recorded or queued.
inline bool waits(cudaStream_t stream) { return in_capture(stream) || asynchronous(); }

// Records work in the stream's capture, or puts it into its queue.
inline cudaError_t hand_over(cudaStream_t stream, Deed deed, std::vector<Place> after = {}, bool may_block = false)
{
    if (const cudaError_t error = refuse_implicit(stream); error != cudaSuccess) return error;
    if (in_capture(stream)) return note(stream, std::move(deed));
    put_off(stream, std::move(deed), std::move(after), may_block);
    return cudaSuccess;
}

// Tests choose a card in a running program, after all work of the last one is done.
inline void set_card(const std::string& key)
{
    run_all();
    chosen_card() = key.empty() ? nullptr : find_card(key);
}

}  // namespace cuda_cpu

// Streams. Without a card what is handed to a stream is done at once. With one it waits in the stream's queue, and runs
// when the seed has it run, at the latest when something waits for it; streams take turns in all the orders that CUDA
// allows. So an event that is missing, or a buffer that is used again too early, shows as a wrong result.
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
#include "watch.h"

namespace cuda_cpu {

// ==== seeds =============================================================================================

// A small generator of pseudo-random numbers (splitmix64).
struct Random {
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    unsigned below(unsigned bound) { return static_cast<unsigned>((next() >> 32) * bound >> 32); }
};

// What CUDA_CPU_SEED asks for. A card has a seed where none is given.
inline uint64_t seed_of_environment()
{
    const char* text = getenv("CUDA_CPU_SEED");
    if (text == nullptr) return card() != nullptr;
    char* end = nullptr;
    const uint64_t number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != 0) {
        fprintf(stderr, "CUDA_CPU_SEED is \"%s\"; expected a whole number\n", text);
        exit(2);
    }
    return number;
}

// The seed of the order in which blocks and threads run: 0 for the natural one.
inline uint64_t& seed()
{
    static uint64_t value = seed_of_environment();
    return value;
}

// Whose turn it is among streams. It goes on where threads are put in their natural order for a while.
struct StreamOrder {
    uint64_t seed;
    Random random{seed};
};
inline StreamOrder& stream_order()
{
    static StreamOrder value{seed_of_environment()};
    return value;
}

inline void set_seed(uint64_t value)
{
    seed() = value;
    if (value != 0) stream_order() = {value};
}

// Whether fresh memory is full of NaNs.
inline bool fills_memory() { return seed() != 0 || (card() != nullptr && !watch::on); }

// ==== what is in a stream ===============================================================================

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
    Deed deed;                 // may be empty: then it only waits
    std::vector<Place> after;  // places in other streams that come first
    Place place;               // of its end
    uint64_t seed;             // as it was when this was handed over
};

}  // namespace cuda_cpu

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

struct CUstream_st {
    enum { free, captured, spoilt } state = free;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    cuda_cpu::Deeds deeds;  // that a capture has noted
    bool blocking = true;   // waits for the default stream, which waits for it
    std::deque<cuda_cpu::Task> queue;
    cuda_cpu::Place last;   // of all that was handed over
};
using cudaStream_t = CUstream_st*;

namespace cuda_cpu {

// ==== capture ===========================================================================================

// While a stream is captured, work handed to it is noted, with all its arguments as they are then, and not
// done. Calls that wait for work, or that might, are refused, and spoil the capture: as in CUDA. (Driver API,
// cuThreadExchangeStreamCaptureMode; Programming Guide, "Prohibited and Unhandled Operations".)

// Of this host thread.
inline thread_local std::vector<cudaStream_t> captured_streams;

inline bool in_capture(cudaStream_t stream) { return stream != nullptr && stream->state != CUstream_st::free; }

inline cudaError_t note(cudaStream_t stream, Deed deed)
{
    if (stream->state == CUstream_st::spoilt) return report(cudaErrorStreamCaptureInvalidated);
    stream->deeds.push_back(std::move(deed));
    return cudaSuccess;
}

// What a call that concerns one stream returns first, if it cannot be captured.
inline cudaError_t refuse_captured(cudaStream_t stream, cudaError_t error = cudaErrorStreamCaptureUnsupported)
{
    if (!in_capture(stream)) return cudaSuccess;
    stream->state = CUstream_st::spoilt;
    return report(error);
}

// Calls that CUDA counts as unsafe during a capture: those that allocate, free, or may wait for something. A relaxed
// capture lets them pass.
inline cudaError_t refuse_while_capturing()
{
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : captured_streams)
        if (stream->mode != cudaStreamCaptureModeRelaxed) error = refuse_captured(stream);
    return error;
}

// Calls that wait for all streams, the captured one too: no capture lets them pass.
inline cudaError_t refuse_in_any_capture()
{
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : captured_streams) error = refuse_captured(stream);
    return error;
}

// Work for the default stream, on which a captured stream would depend unless it was made not to.
inline cudaError_t refuse_implicit(cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    if (stream != nullptr || card() == nullptr) return error;
    for (cudaStream_t other : captured_streams)
        if (other->blocking) error = refuse_captured(other, cudaErrorStreamCaptureImplicit);
    return error;
}

// ==== queues ============================================================================================

// Whether work waits in queues: with a card, unless the environment asks for seed 0.
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

// What went wrong with work that was put off: calls that wait say so.
inline cudaError_t& late_error()
{
    static cudaError_t value = cudaSuccess;
    return value;
}

inline bool can_run(cudaStream_t stream)
{
    if (stream->queue.empty()) return false;
    const auto& after = stream->queue.front().after;
    return std::all_of(after.begin(), after.end(), [](const Place& place) { return place->reached; });
}

// Runs one piece of work. Under an odd seed mostly the same stream goes on, so that one gets far ahead of the others.
inline void run_one()
{
    static cudaStream_t favourite = nullptr;
    std::vector<cudaStream_t> able;
    for (cudaStream_t stream : streams())
        if (can_run(stream)) able.push_back(stream);
    if (able.empty()) return;
    auto& [seed_of_order, random] = stream_order();
    const bool stays =
        seed_of_order % 2 == 1 && std::count(able.begin(), able.end(), favourite) > 0 && random.below(8) != 0;
    if (!stays) favourite = able[random.below(static_cast<unsigned>(able.size()))];
    const Task task = std::move(favourite->queue.front());
    favourite->queue.pop_front();
    const uint64_t now = std::exchange(seed(), task.seed);
    const cudaError_t error = task.deed ? task.deed() : cudaSuccess;
    seed() = now;
    if (error != cudaSuccess && late_error() == cudaSuccess) late_error() = error;
    task.place->reach();
}

// Work waits only for what was handed over before it, so there is always a piece that can run.
template <class Condition> inline cudaError_t run_until(Condition holds)
{
    while (!holds()) run_one();
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

// A moment at which the device may have done some of its work: mostly none, now and then a few pieces, so that queues
// grow.
inline void run_some()
{
    if (stream_order().random.below(4) != 0) return;
    for (unsigned pieces = stream_order().random.below(6); pieces > 0; pieces--) run_one();
}

// Puts work into a stream's queue, behind what it waits for, and returns the place of its end.
inline Place put_off(cudaStream_t stream, Deed deed, std::vector<Place> after = {})
{
    constexpr size_t longest_queue = 1024;  // then a launch waits, as in CUDA
    CUstream_st& to = *real(stream);
    for (cudaStream_t other : streams()) {
        const bool implied =
            other != &to && (other == streams()[0] ? to.blocking : &to == streams()[0] && other->blocking);
        if (implied && other->last != nullptr && !other->last->reached) after.push_back(other->last);
    }
    to.last = std::make_shared<Marker>();
    to.queue.push_back({std::move(deed), std::move(after), to.last, seed()});
    const Place place = to.last;
    run_some();
    run_until([&] { return to.queue.size() < longest_queue; });
    return place;
}

// Whether work for this stream is not done at once.
inline bool waits(cudaStream_t stream) { return in_capture(stream) || asynchronous(); }

// Work that is not done at once: for the capture or for the queue.
inline cudaError_t hand_over(cudaStream_t stream, Deed deed)
{
    if (const cudaError_t error = refuse_implicit(stream); error != cudaSuccess) return error;
    if (in_capture(stream)) return note(stream, std::move(deed));
    put_off(stream, std::move(deed));
    return cudaSuccess;
}

// Tests choose a card in a running program; what was handed to the last one is done first.
inline void set_card(const std::string& key)
{
    run_all();
    chosen_card() = key.empty() ? nullptr : find_card(key);
}

}  // namespace cuda_cpu

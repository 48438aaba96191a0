// Vector clocks, which decide whether one access happens before another (Lamport 1978; Fidge 1988; Mattern 1989; used
// here as by the race detector of Flanagan and Freund 2009, "FastTrack").
//
// An actor is a thread of the block, or a source of asynchronous accesses: the TMA (Tensor Memory Accelerator) copies
// of one mbarrier, or the wgmma of one warp. Each actor counts ticks. A thread's vector clock holds for each actor the
// latest tick whose accesses happen before the thread's next access. Threads that synchronise take the maximum of their
// clocks and start a new tick, because the maximum must not cover their later accesses.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace inspect {
using Tick = uint32_t;
constexpr Tick NEVER = ~Tick{0};

constexpr unsigned LANES = 32;

// A vector clock: one tick per actor. Immutable once it is shared.
struct Ticks {
    std::vector<Tick> of;
    std::vector<Tick> least_of_warp;   // minimum over each 32 consecutive actors

    explicit Ticks(size_t actors) : of(actors, 0), least_of_warp((actors + LANES - 1) / LANES, 0) {}
    void take(const Ticks& other) {
        for (size_t i = 0; i < of.size(); i++) of[i] = std::max(of[i], other.of[i]);
    }
    void finish() {
        for (size_t w = 0; w < least_of_warp.size(); w++) {
            const size_t first = w * LANES, last = std::min(first + LANES, of.size());
            least_of_warp[w] = *std::min_element(of.begin() + first, of.begin() + last);
        }
    }
};
using Clock = std::shared_ptr<const Ticks>;   // null: all zero

// The vector clock and the own tick of an actor at one moment.
struct Moment {
    Clock clock;
    unsigned actor = 0;
    Tick own = 0;

    // Fast test: returns true only if an entry (shadow.h) happens before this moment, but not in every such case.
    template <class Entry> bool surely_covers(unsigned my_first, uint32_t my_lane, const Entry& entry) const {
        if (entry.first_actor == my_first && entry.lanes == my_lane) return true;
        return clock != nullptr && clock->least_of_warp[entry.first_actor / LANES] >= entry.tick;
    }

    // Returns whether all accesses of these actors (lanes of one warp) up to that tick happen before this moment.
    bool covers(unsigned first_actor, uint32_t lanes, Tick tick) const {
        if (clock != nullptr && clock->least_of_warp[first_actor / LANES] >= tick) return true;
        for (; lanes != 0; lanes &= lanes - 1) {
            const unsigned other = first_actor + static_cast<unsigned>(__builtin_ctz(lanes));
            const Tick seen = other == actor ? own : clock == nullptr ? 0 : clock->of[other];
            if (seen < tick) return false;
        }
        return true;
    }
};

// Returns the elementwise maximum of these clocks and own ticks.
inline Clock join(const std::vector<Moment>& moments, size_t actors) {
    auto all = std::make_shared<Ticks>(actors);
    const Ticks* last = nullptr;
    for (const Moment& moment : moments) {
        if (moment.clock.get() != nullptr && moment.clock.get() != last) all->take(*moment.clock);
        last = moment.clock.get();
    }
    for (const Moment& moment : moments) all->of[moment.actor] = std::max(all->of[moment.actor], moment.own);
    all->finish();
    return all;
}

// Returns the elementwise maximum of two clocks. Lanes of a warp usually pass the same two clocks one after another, so
// the last result is cached.
inline Clock join(const Clock& a, const Clock& b) {
    if (a == nullptr || a == b) return b;
    if (b == nullptr) return a;
    static Clock last_a, last_b, last;
    if (a == last_a && b == last_b) return last;
    auto all = std::make_shared<Ticks>(*a);
    all->take(*b);
    all->finish();
    last_a = a;
    last_b = b;
    return last = all;
}
}  // namespace inspect

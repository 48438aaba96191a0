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
constexpr uint32_t NONE = ~0u;
constexpr unsigned LANES = 32;

// A vector clock: one tick per actor. Null: all zero.
using Clock = std::shared_ptr<const std::vector<Tick>>;

// Who has made an access, and until which tick.
struct Accessors {
    Tick tick;
    uint32_t lanes;        // a bit per lane of the warp that starts at first_actor; for other actors bit 0
    uint32_t first_actor;
};

// The vector clock and the own tick of an actor at one moment.
struct Moment {
    Clock clock;
    unsigned actor = 0;
    Tick own = 0;

    // Returns one of these actors whose access does not happen before this moment; NONE if all do.
    unsigned not_covered(const Accessors& by) const {
        for (uint32_t rest = by.lanes; rest != 0; rest &= rest - 1) {
            const unsigned other = by.first_actor + static_cast<unsigned>(__builtin_ctz(rest));
            const Tick seen = other == actor ? own : clock == nullptr ? 0 : (*clock)[other];
            if (seen < by.tick) return other;
        }
        return NONE;
    }
};

// Returns the elementwise maximum of these clocks and own ticks.
inline Clock join(const std::vector<Moment>& moments, size_t actors) {
    auto all = std::make_shared<std::vector<Tick>>(actors);
    const std::vector<Tick>* last = nullptr;
    for (const Moment& moment : moments) {
        for (size_t i = 0; moment.clock.get() != last && moment.clock != nullptr && i < actors; i++)
            (*all)[i] = std::max((*all)[i], (*moment.clock)[i]);
        last = moment.clock.get();
    }
    for (const Moment& moment : moments) (*all)[moment.actor] = std::max((*all)[moment.actor], moment.own);
    return all;
}

// Returns the elementwise maximum of two clocks. Lanes of a warp usually pass the same two clocks one after another, so
// the last result is cached.
inline Clock join(const Clock& a, const Clock& b) {
    if (a == nullptr || a == b) return b;
    if (b == nullptr) return a;
    static Clock last_a, last_b, last;
    if (a == last_a && b == last_b) return last;
    last_a = a;
    last_b = b;
    return last = join({{a}, {b}}, a->size());
}
}  // namespace inspect

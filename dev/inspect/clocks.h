// Which accesses come before which: vector clocks (Lamport 1978; Fidge 1988; Mattern 1989), as race detectors use them
// (Flanagan and Freund 2009, "FastTrack").
//
// An actor is a thread of the block, or asynchronous work: the copies that one mbarrier counts, the wgmma of one warp.
// Each counts its own time in ticks. A thread's clock has for each actor the latest tick whose accesses come before the
// thread's next one. Threads that synchronise exchange clocks and begin a new tick, as what follows is not covered.
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

// A vector clock: a tick for each actor. It does not change once it is shared.
struct Ticks {
    std::vector<Tick> of;
    std::vector<Tick> least_of_warp;   // of each 32 actors in a row

    explicit Ticks(size_t actors) : of(actors, 0), least_of_warp((actors + LANES - 1) / LANES, 0) {}
    void take(const Ticks& other)
    {
        for (size_t i = 0; i < of.size(); i++) of[i] = std::max(of[i], other.of[i]);
    }
    void finish()
    {
        for (size_t w = 0; w < least_of_warp.size(); w++) {
            const size_t first = w * LANES, last = std::min(first + LANES, of.size());
            least_of_warp[w] = *std::min_element(of.begin() + first, of.begin() + last);
        }
    }
};
using Known = std::shared_ptr<const Ticks>;   // null: nothing

// An actor's clock at a moment, and its own tick.
struct Moment {
    Known known;
    unsigned actor = 0;
    Tick own = 0;

    // Whether an entry (shadow.h) comes before; false also where that would take longer to tell.
    template <class Entry> bool surely_covers(unsigned my_first, uint32_t my_lane, const Entry& entry) const
    {
        if (entry.first_actor == my_first && entry.lanes == my_lane) return true;
        return known != nullptr && known->least_of_warp[entry.first_actor / LANES] >= entry.tick;
    }

    // Whether what these actors, lanes of a warp, did until that tick comes before this moment.
    bool covers(unsigned first_actor, uint32_t lanes, Tick tick) const
    {
        if (known != nullptr && known->least_of_warp[first_actor / LANES] >= tick) return true;
        for (; lanes != 0; lanes &= lanes - 1) {
            const unsigned other = first_actor + static_cast<unsigned>(__builtin_ctz(lanes));
            const Tick seen = other == actor ? own : known == nullptr ? 0 : known->of[other];
            if (seen < tick) return false;
        }
        return true;
    }
};

// Returns the maximum of all of these clocks and own ticks.
inline Known together(const std::vector<Moment>& moments, size_t actors)
{
    auto all = std::make_shared<Ticks>(actors);
    const Ticks* last = nullptr;
    for (const Moment& moment : moments) {
        if (moment.known.get() != nullptr && moment.known.get() != last) all->take(*moment.known);
        last = moment.known.get();
    }
    for (const Moment& moment : moments) all->of[moment.actor] = std::max(all->of[moment.actor], moment.own);
    all->finish();
    return all;
}

// The maximum of two clocks. The lanes of a warp mostly ask for the same, one after another: they share the result.
inline Known together(const Known& a, const Known& b)
{
    if (a == nullptr || a == b) return b;
    if (b == nullptr) return a;
    static Known last_a, last_b, last;
    if (a == last_a && b == last_b) return last;
    auto all = std::make_shared<Ticks>(*a);
    all->take(*b);
    all->finish();
    last_a = a;
    last_b = b;
    return last = all;
}

}  // namespace inspect

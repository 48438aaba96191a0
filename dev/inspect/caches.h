// A model of a GPU's caches: fully associative, with lines of 128 bytes and LRU replacement. Each line has four sectors
// of 32 bytes, which are fetched one by one. NVIDIA does not document the real placement and replacement of lines.
//
// L1: the part of the L1/shared memory array that resident blocks do not use as shared memory, divided by their number.
// Threads, shared memory and (if known) registers limit that number. Only loads by threads go through L1. Stores,
// atomics, cp.async of 16 bytes and TMA copies go to L2.
// L2: one for the whole GPU, empty when a kernel starts. A stored sector is written to memory once, when its line is
// evicted.
#pragma once

#include "requests.h"

#include <list>
#include <unordered_map>

namespace inspect {

class Cache {
public:
    void reset(uint64_t bytes)
    {
        capacity_ = std::max<uint64_t>(1, bytes / LINE);
        lines_.clear();
        place_.clear();
    }
    // Loads a sector; returns whether it hit.
    bool load(uint64_t sector) { return set(line_of(sector).present, sector); }
    // Stores to a sector; returns whether this adds a write to memory (the sector was not dirty).
    bool store(uint64_t sector)
    {
        Line& line = line_of(sector);
        set(line.present, sector);
        return !set(line.dirty, sector);
    }

private:
    static constexpr uint64_t SECTORS = LINE / SECTOR;
    struct Line {
        uint64_t number;
        uint8_t present = 0, dirty = 0;   // one bit per sector
    };

    // Sets a sector's bit; returns its previous value.
    static bool set(uint8_t& bits, uint64_t sector)
    {
        const uint8_t bit = static_cast<uint8_t>(1 << sector % SECTORS), before = bits;
        bits |= bit;
        return before & bit;
    }
    // Returns the sector's line and makes it the most recently used one.
    Line& line_of(uint64_t sector)
    {
        const uint64_t number = sector / SECTORS;
        const auto [found, is_new] = place_.try_emplace(number);
        if (!is_new) {
            lines_.splice(lines_.begin(), lines_, found->second);
            return lines_.front();
        }
        if (lines_.size() == capacity_) {
            place_.erase(lines_.back().number);
            lines_.pop_back();
        }
        lines_.push_front({number});
        found->second = lines_.begin();
        return lines_.front();
    }

    uint64_t capacity_ = 1;
    std::list<Line> lines_;   // most recently used first
    std::unordered_map<uint64_t, std::list<Line>::iterator> place_;
};

}  // namespace inspect

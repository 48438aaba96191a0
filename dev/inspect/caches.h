// A model of a GPU's caches: lines of 128 bytes, whose sectors of 32 bytes are fetched one by one; the least recently
// used line is evicted. NVIDIA does not say how lines are really placed and replaced.
//
// L1: a block has its share of what shared memory leaves, when as many blocks are on its multiprocessor as threads,
// shared memory and (where known) registers allow. Threads' loads go through it. Stores, atomics and copies that bypass
// it (cp.async of 16 bytes, the copy engine) go to L2.
// L2: the GPU's, empty when a kernel begins. A stored sector is written to memory once, when its line is evicted.
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
    // Loads a sector; returns whether it was there.
    bool load(uint64_t sector) { return set(line_of(sector).present, sector); }
    // Stores to a sector; returns whether it has to be written to memory once more.
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
        uint8_t present = 0, dirty = 0;   // a bit for each sector
    };

    // Sets a sector's bit; returns whether it was set.
    static bool set(uint8_t& bits, uint64_t sector)
    {
        const uint8_t bit = static_cast<uint8_t>(1 << sector % SECTORS), before = bits;
        bits |= bit;
        return before & bit;
    }
    // Returns the sector's line, which is the most recently used from now on.
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
    std::list<Line> lines_;   // the most recently used first
    std::unordered_map<uint64_t, std::list<Line>::iterator> place_;
};

}  // namespace inspect

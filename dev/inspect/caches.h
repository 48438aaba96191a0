// A model of a card's caches: lines of 128 bytes, whose sectors of 32 are fetched one by one; the line that was not
// used for longest gives way. It is a model: NVIDIA does not say how lines are placed and replaced.
//
// L1: a block has its share of what shared memory leaves, when as many blocks are on its multiprocessor as threads,
// shared memory and, where they are known, registers allow. Loads of threads go through it; what is stored goes through
// to L2; copies that bypass it (cp.async of 16 bytes, the copy engine) and atomics go to L2.
// L2: all of the card's. It is empty when a kernel begins. What is stored stays until its line gives way, and counts as
// written to memory once, when the kernel ends at the latest.
#pragma once

#include "requests.h"

#include <unordered_map>

namespace inspect {

class Cache {
public:
    void reset(uint64_t bytes)
    {
        capacity_ = std::max<uint64_t>(1, bytes / LINE);
        lines_.clear();
        place_.clear();
        newest_ = oldest_ = NOWHERE;
    }

    // Loads a sector; returns whether it was there.
    bool load(uint64_t sector)
    {
        Line& line = touch(sector / SECTORS);
        const uint8_t bit = static_cast<uint8_t>(1 << sector % SECTORS);
        const bool hit = line.present & bit;
        line.present |= bit;
        return hit;
    }
    // Stores to a sector; returns whether that is one more to be written to memory.
    bool store(uint64_t sector)
    {
        Line& line = touch(sector / SECTORS);
        const uint8_t bit = static_cast<uint8_t>(1 << sector % SECTORS);
        const bool is_new = !(line.dirty & bit);
        line.present |= bit;
        line.dirty |= bit;
        return is_new;
    }

private:
    static constexpr uint64_t SECTORS = LINE / SECTOR;
    static constexpr uint32_t NOWHERE = ~0u;
    struct Line {
        uint64_t number;
        uint32_t newer, older;
        uint8_t present, dirty;
    };

    Line& touch(uint64_t number)
    {
        const auto [found, is_new] = place_.try_emplace(number, 0);
        if (!is_new) {
            const uint32_t at = found->second;
            if (at != newest_) {
                unlink(at);
                link(at);
            }
            return lines_[at];
        }
        uint32_t at = static_cast<uint32_t>(lines_.size());
        if (lines_.size() < capacity_) {
            lines_.push_back({});
        } else {
            at = oldest_;
            unlink(at);
            place_.erase(lines_[at].number);
        }
        place_[number] = at;
        lines_[at] = {number, NOWHERE, NOWHERE, 0, 0};
        link(at);
        return lines_[at];
    }
    void unlink(uint32_t at)
    {
        const Line& line = lines_[at];
        (line.newer == NOWHERE ? newest_ : lines_[line.newer].older) = line.older;
        (line.older == NOWHERE ? oldest_ : lines_[line.older].newer) = line.newer;
    }
    void link(uint32_t at)
    {
        lines_[at].newer = NOWHERE;
        lines_[at].older = newest_;
        if (newest_ != NOWHERE) lines_[newest_].newer = at;
        newest_ = at;
        if (oldest_ == NOWHERE) oldest_ = at;
    }

    uint64_t capacity_ = 1;
    std::vector<Line> lines_;
    std::unordered_map<uint64_t, uint32_t> place_;
    uint32_t newest_ = NOWHERE, oldest_ = NOWHERE;
};

}  // namespace inspect

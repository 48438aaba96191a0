// A model of a GPU's caches, with lines of 128 bytes in sectors of 32, which are fetched one by one. NVIDIA does not
// document the real placement and replacement of lines.
//
// L1: fully associative, LRU replacement. Its size is the part of the L1/shared memory array that resident blocks do
// not use as shared memory, divided by their number. Threads, shared memory and (if known) registers limit that number.
// Only loads by threads go through L1. Stores, atomics, cp.async of 16 bytes and TMA copies go to L2.
// L2: one for the whole GPU. Counts assume that it is empty when a launch begins, estimates that it has what Resident
// says. On a GPU, a wave of blocks runs at the same time; here, blocks
// run one after another. So the model estimates how many sectors the whole GPU has fetched since the last access to a
// sector; it is still there if they fit:
//     last access by this block: the sectors that this block has fetched since, times the blocks of a wave
//     by another block of this wave: none, because both blocks access it at about the same time
//     by a block of an earlier wave: the sectors that a block fetches on average, times the blocks in between
#pragma once

#include "requests.h"

#include <list>
#include <unordered_map>
#include <utility>

namespace inspect {
class L1 {
public:
    void reset(uint64_t bytes) {
        capacity_ = std::max<uint64_t>(1, bytes / LINE);
        lines_.clear();
        place_.clear();
    }
    // Loads a sector; returns whether it hit.
    bool load(uint64_t sector) {
        const auto [found, is_new] = place_.try_emplace(sector / SECTORS);
        if (is_new) {
            if (lines_.size() == capacity_) {
                place_.erase(lines_.back().number);
                lines_.pop_back();
            }
            lines_.push_front({sector / SECTORS, {}});
            found->second = lines_.begin();
        }
        lines_.splice(lines_.begin(), lines_, found->second);
        return std::exchange(lines_.front().is_present[sector % SECTORS], true);
    }

private:
    static constexpr uint64_t SECTORS = LINE / SECTOR;
    struct Line {
        uint64_t number;
        std::array<bool, SECTORS> is_present;
    };
    uint64_t capacity_ = 1;
    std::list<Line> lines_;   // most recently used first
    std::unordered_map<uint64_t, std::list<Line>::iterator> place_;
};

// The allocations that copies, memsets and recorded blocks have accessed, each assumed to be accessed as a whole. When a
// launch begins, L2 has the latest ones that fit.
class Resident {
public:
    // An allocation is accessed; returns whether L2 had it when the launch began.
    bool touch(uint64_t begin, uint64_t bytes) {
        Allocation& allocation = allocations_[begin];
        allocation.bytes = bytes;
        allocation.touched = ++now_;
        return allocation.is_present;
    }
    void begin_launch(uint64_t capacity) {
        std::vector<Allocation*> latest;
        for (auto& [begin, allocation] : allocations_) latest.push_back(&allocation);
        std::sort(latest.begin(), latest.end(), [](const auto* a, const auto* b) { return a->touched > b->touched; });
        for (Allocation* each : latest) {
            each->is_present = each->bytes <= capacity;
            capacity -= each->is_present ? each->bytes : capacity;
        }
    }

private:
    struct Allocation {
        uint64_t bytes = 0, touched = 0;
        bool is_present = false;
    };
    std::unordered_map<uint64_t, Allocation> allocations_;
    uint64_t now_ = 0;
};

class L2 {
public:
    // wave: blocks that run at the same time.
    void reset(uint64_t bytes, uint64_t wave) {
        capacity_ = bytes / SECTOR;
        wave_ = std::max<uint64_t>(1, wave);
        fetched_ = fetched_before_ = blocks_ = 0;
        sectors_.clear();
    }
    void begin_block(uint64_t number) {
        block_ = number;
        blocks_++;
        fetched_before_ += std::exchange(fetched_, 0);
    }
    // Loads a sector; returns whether it hit.
    bool load(uint64_t sector) { return touch(sectors_[sector]); }

    // A store adds `writes` (0 or 1) to the sectors written to memory: a sector is written once while it stays in L2.
    // It adds `partial` (-1, 0 or 1) to those of which only a part has been stored: the rest must be fetched.
    // is_merged: the warp has stored other bytes of the sector before, as in a loop over a thread's adjacent elements.
    struct Store { int writes, partial; bool is_merged, is_whole; };
    Store store(uint64_t sector, uint32_t bytes, uint64_t warp) {
        Sector& entry = sectors_[sector];
        const bool hits = touch(entry);
        const uint32_t before = entry.written;
        entry.written |= bytes;
        entry.is_loaded &= hits;
        const int was_partial = before != 0 && before != ~0u, is_partial = entry.written != ~0u;
        const bool is_merged = std::exchange(entry.warp, warp) == warp && before != 0 && (before & bytes) == 0;
        return {before == 0, entry.is_loaded ? 0 : is_partial - was_partial, is_merged, entry.written == ~0u};
    }

private:
    struct Sector {
        uint64_t block = ~uint64_t{0}, fetched = 0;   // last access: its block, and how many sectors that had fetched
        uint64_t warp = 0;                            // of the last store
        uint32_t written = 0;                         // one bit per byte
        bool is_loaded = true;
    };
    bool is_present(const Sector& entry) const {
        if (entry.block == ~uint64_t{0}) return false;
        if (entry.block == block_) return (fetched_ - entry.fetched) * wave_ <= capacity_;
        const uint64_t waves = block_ / wave_ - entry.block / wave_;
        return waves * wave_ * (fetched_before_ + fetched_) / blocks_ <= capacity_;
    }
    // Accesses a sector; returns whether it was present. If not, it is fetched, without stored bytes.
    bool touch(Sector& entry) {
        const bool hits = is_present(entry);
        if (!hits) entry = {};
        fetched_ += !hits;
        entry.block = block_;
        entry.fetched = fetched_;
        return hits;
    }

    uint64_t capacity_ = 0, wave_ = 1, block_ = 0, blocks_ = 0;
    uint64_t fetched_ = 0, fetched_before_ = 0;   // sectors fetched by this block, and by all recorded ones before it
    std::unordered_map<uint64_t, Sector> sectors_;
};
}  // namespace inspect

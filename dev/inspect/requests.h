// A request: the addresses that the active lanes of a warp access with one memory instruction.
//
// sectors     Global memory is transferred in sectors of 32 bytes, four to a cache line (CUDA C++ Best Practices Guide,
//             "Coalesced Access to Global Memory"). Minimum: the distinct bytes divided by 32, rounded up.
// wavefronts  Shared memory has 32 banks of 4 bytes. In one wavefront (a cycle) each bank delivers one word, to any
//             number of lanes; different words of one bank take one wavefront each (CUDA C++ Programming Guide,
//             "Compute Capability 5.x", "Shared Memory"). Wider accesses are split: 64 bits into half warps, 128 bits
//             into quarter warps. Minimum: one wavefront for each part with an active lane.
#pragma once

#include "clocks.h"

#include <array>

namespace inspect {
constexpr uint64_t SECTOR = 32, LINE = 128;
constexpr unsigned BANKS = 32, WORD = 4, TAG_SETS = 4;

// Returns the maximum number of words in one bank, or of lines in one set.
inline uint64_t most_of_a_bank(const std::vector<uint64_t>& words, unsigned banks = BANKS) {
    std::array<uint64_t, BANKS> found{};
    for (uint64_t word : words) found[word % banks]++;
    return *std::max_element(found.begin(), found.end());
}

struct Request {
    std::array<uint64_t, LANES> address{};   // 0 of inactive lanes
    uint32_t active = 0;
    unsigned bytes = 0;   // per lane

    bool equals(const Request& other) const { return active == other.active && address == other.address; }
    bool is_active(unsigned lane) const { return active >> lane & 1; }
    unsigned lanes() const { return static_cast<unsigned>(__builtin_popcount(active)); }

    // Returns the indices of the `unit`-byte units that lanes first to last - 1 access, sorted, without duplicates.
    std::vector<uint64_t> units(uint64_t unit, unsigned first = 0, unsigned last = LANES) const {
        std::vector<uint64_t> all;
        for (unsigned lane = first; lane < last; lane++)
            if (is_active(lane))
                for (uint64_t u = address[lane] / unit; u <= (address[lane] + bytes - 1) / unit; u++) all.push_back(u);
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        return all;
    }

    // Returns the minimum of sectors. All elements are aligned and of one size, so distinct ones do not overlap.
    uint64_t least_sectors() const { return (units(bytes).size() * bytes + SECTOR - 1) / SECTOR; }

    // Returns which bytes of a sector the lanes access, one bit per byte.
    uint32_t bytes_of_sector(uint64_t sector) const {
        uint32_t all = 0;
        for (unsigned lane = 0; lane < LANES; lane++)
            if (is_active(lane) && address[lane] / SECTOR == sector)
                all |= (bytes >= SECTOR ? ~0u : (1u << bytes) - 1) << address[lane] % SECTOR;
        return all;
    }
    // Returns how many lanes access an address of a sector, on average.
    double lanes_of_an_address(uint64_t sector) const {
        unsigned lanes = 0;
        for (unsigned lane = 0; lane < LANES; lane++) lanes += is_active(lane) && address[lane] / SECTOR == sector;
        return lanes * static_cast<double>(bytes) / __builtin_popcount(bytes_of_sector(sector));
    }

    // Returns the maximum of lanes whose words are in the same bank. Lanes take turns in atomics on shared memory.
    uint64_t lanes_of_a_bank() const {
        std::vector<uint64_t> words;
        for (unsigned lane = 0; lane < LANES; lane++)
            if (is_active(lane)) words.push_back(address[lane] / WORD);
        return most_of_a_bank(words);
    }

    // Returns the maximum of different words in a bank: the wavefronts if parts of a warp share those of equal words.
    uint64_t words_of_a_bank() const { return most_of_a_bank(units(WORD)); }

    // Returns the cycles that L1 takes: it looks up one line of each set of tags per cycle, and delivers one word of
    // each bank, as shared memory does.
    uint64_t l1_cycles() const {
        const std::vector<uint64_t> lines = units(LINE);
        return lines.size() == 1 ? 1 : std::max(most_of_a_bank(lines, TAG_SETS), words_of_a_bank());
    }

    struct Wavefronts { uint64_t taken, least; };
    Wavefronts wavefronts() const {
        const unsigned part = bytes <= 4 ? LANES : bytes <= 8 ? LANES / 2 : LANES / 4;
        Wavefronts result{0, 0};
        for (unsigned first = 0; first < LANES; first += part) {
            const uint64_t most = most_of_a_bank(units(WORD, first, first + part));
            result.taken += most;
            result.least += most > 0;
        }
        return result;
    }
};
}  // namespace inspect

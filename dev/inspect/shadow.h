// For each 16 bytes of memory: which of them were touched, and by which accesses that a later one may have to come
// after.
//
// Two accesses race when they touch a byte in common, are made by different actors, at least one of them writes, not
// both are atomic, and what the later one's maker knows does not cover the earlier one. An access is removed when a
// later one replaces it: if it comes before that one, all of its bytes are that one's too, and whatever would race
// with it would race with that one (a write replaces reads and writes, a read replaces reads).
#pragma once

#include "clocks.h"

#include <array>
#include <functional>
#include <unordered_map>

namespace inspect {

constexpr unsigned GRANULE = 16;
constexpr uint32_t NONE = ~0u;

enum class Kind : uint8_t { READ, WRITE, ATOMIC };

struct Entry {
    Tick tick;
    uint32_t lanes;        // of a warp: threads; else bit 0
    uint32_t first_actor;
    uint32_t block;
    uint32_t site;
    uint32_t next;
    uint16_t bytes;        // a bit for each of the 16
    Kind kind;
    bool generic;          // a thread's own store or load, which the copy engine and wgmma see after a fence only
};

// Where entries are: lists, in one array.
class Shadow {
public:
    void clear()
    {
        entries_.clear();
        free_ = NONE;
        pages_.clear();
        page_of_.clear();
        last_page_ = NONE;
    }

    // Looks at the entries of a granule, which f may have removed: it returns whether an entry is to be kept.
    template <class F> void visit(uint64_t granule, F f)
    {
        uint32_t* link = &head(granule);
        while (*link != NONE) {
            const uint32_t at = *link;
            if (f(entries_[at])) {
                link = &entries_[at].next;
                continue;
            }
            *link = entries_[at].next;
            entries_[at].next = free_;
            free_ = at;
        }
    }

    void add(uint64_t granule, Entry entry)
    {
        uint32_t at = free_;
        if (at != NONE) {
            free_ = entries_[at].next;
        } else {
            at = static_cast<uint32_t>(entries_.size());
            entries_.push_back({});
        }
        uint32_t& first = head(granule);
        entry.next = first;
        entries_[at] = entry;
        first = at;
    }

private:
    static constexpr uint64_t PAGE = 256;   // granules
    using Page = std::array<uint32_t, PAGE>;   // the first entry of each granule

    uint32_t& head(uint64_t granule)
    {
        const uint64_t number = granule / PAGE;
        if (last_page_ == NONE || number != last_page_number_) {
            const auto [place, is_new] = page_of_.try_emplace(number, static_cast<uint32_t>(pages_.size()));
            if (is_new) {
                pages_.push_back(std::make_unique<Page>());
                pages_.back()->fill(NONE);
            }
            last_page_ = place->second;
            last_page_number_ = number;
        }
        return (*pages_[last_page_])[granule % PAGE];
    }

    std::vector<Entry> entries_;
    uint32_t free_ = NONE;
    std::vector<std::unique_ptr<Page>> pages_;
    std::unordered_map<uint64_t, uint32_t> page_of_;
    uint32_t last_page_ = NONE;
    uint64_t last_page_number_ = 0;
};

}  // namespace inspect

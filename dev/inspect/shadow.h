// The shadow memory: for each 16 bytes, the accesses that a later one may have to be ordered with.
//
// Two accesses race when they touch a byte in common, are made by different actors, at least one of them writes, not
// both are atomic, and the vector clock of the later one does not cover the earlier one. An access is removed when a
// later one replaces it: if it comes before that one, all of its bytes are that one's too, and whatever would race
// with it would race with that one (a write replaces reads and writes, a read replaces reads).
#pragma once

#include "clocks.h"

#include <array>
#include <forward_list>
#include <unordered_map>

namespace inspect {

constexpr unsigned GRANULE = 16;
constexpr uint32_t NONE = ~0u;

enum class Kind : uint8_t { READ, WRITE, ATOMIC };

struct Entry {
    Tick tick;
    uint32_t lanes;        // of a warp's threads; bit 0 for other actors
    uint32_t first_actor;
    uint32_t block;
    uint32_t site;
    uint16_t bytes;        // a bit for each of the 16
    Kind kind;
    bool generic;          // a thread's own access, which the copy engine and wgmma see only after a fence
};

class Shadow {
public:
    void clear()
    {
        pages_.clear();
        last_page_ = nullptr;
    }

    // Calls f for the entries of a granule, the latest first; f returns whether the entry is kept.
    template <class F> void visit(uint64_t granule, F f)
    {
        Entries& entries = entries_of(granule);
        auto before = entries.before_begin();
        for (auto at = entries.begin(); at != entries.end();) {
            if (f(*at)) before = at++;
            else at = entries.erase_after(before);
        }
    }
    void add(uint64_t granule, const Entry& entry) { entries_of(granule).push_front(entry); }

private:
    static constexpr uint64_t PAGE = 256;   // granules
    using Entries = std::forward_list<Entry>;
    using Page = std::array<Entries, PAGE>;

    Entries& entries_of(uint64_t granule)
    {
        if (last_page_ == nullptr || granule / PAGE != last_page_number_) {
            last_page_number_ = granule / PAGE;
            last_page_ = &pages_[last_page_number_];   // unordered_map's elements stay where they are
        }
        return (*last_page_)[granule % PAGE];
    }

    std::unordered_map<uint64_t, Page> pages_;
    Page* last_page_ = nullptr;
    uint64_t last_page_number_ = 0;
};

}  // namespace inspect

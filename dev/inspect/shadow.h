// Shadow memory: for each granule of 16 bytes, the earlier accesses that a later access may race with.
//
// Two accesses race if they touch a common byte, different actors make them, at least one is a write, at least one is
// not atomic, and the vector clock of the later one does not cover the earlier one. A new access replaces an earlier
// entry if it touches all bytes of the entry, the entry happens before it, and every access that would race with the
// entry would also race with the new access (a write replaces every kind, a read or an atomic only its own).
#pragma once

#include "clocks.h"

#include <array>
#include <forward_list>
#include <unordered_map>

namespace inspect {
constexpr unsigned GRANULE = 16;

enum class Kind : uint8_t { READ, WRITE, ATOMIC, ATOMIC_READ };
inline bool is_read(Kind kind) { return kind == Kind::READ || kind == Kind::ATOMIC_READ; }
inline bool is_atomic(Kind kind) { return kind == Kind::ATOMIC || kind == Kind::ATOMIC_READ; }

struct Entry : Accessors {
    uint32_t block;
    uint32_t site;
    uint16_t bytes;        // a bit per byte of the granule
    Kind kind;
    bool generic;          // through the generic proxy (by a thread): TMA and wgmma see it only after fence.proxy.async
};

// By granule: entries, latest first.
constexpr uint64_t SHADOW_PAGE = 256;
using Shadow = std::unordered_map<uint64_t, std::array<std::forward_list<Entry>, SHADOW_PAGE>>;
}  // namespace inspect

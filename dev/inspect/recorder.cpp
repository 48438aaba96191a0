// Records the memory accesses of a program's kernels, for dev/inspect:
//
//   - The program is compiled with -fsanitize=thread but not linked with that sanitizer. This file has the functions
//     that it calls at each load, store, function entry and exit. The emulator calls the functions of dev/cpu/watch.h.
//   - The accesses of a thread are buffered until its warp synchronises. The n-th access of an instruction by each lane
//     of the warp then forms a request: requests.h counts its sectors and wavefronts, caches.h its hits.
//   - Each access is also compared with earlier accesses to the same bytes, to find races: clocks.h, shadow.h.
//   - When the program ends, the recording is written to a JSON file, which report.py reads.
//
// Map: addresses, call stacks and sites, kernels, threads, state, races, accesses, requests, launches and blocks,
// synchronisation, PTX instructions, the recording, calls by the compiler
//
// Environment: INSPECT_OUT (the output), INSPECT_MODE (sample: few blocks run; few: all run, few are recorded; whole,
// default: many are recorded), INSPECT_KERNEL (records kernels whose symbol or NVTX range contains this),
// INSPECT_EXCEPT (NVTX ranges not to record), INSPECT_SECONDS (ends the program after this time), INSPECT_REMOVE
// (addresses of barriers to skip), INSPECT_REGISTERS (output of sass.py), INSPECT_FROM (an NVTX range: its
// first launch starts the recording, its second one ends the program).
#define CUDA_CPU_INSPECT
#include "../cpu/watch.h"

#define WARP_SIZE 32
#include "../cpu/card.h"
#include "../cpu/host_memory.h"

#include "caches.h"
#include "requests.h"
#include "shadow.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <execinfo.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

namespace cuda_cpu::watch {
using namespace inspect;
using json = nlohmann::ordered_json;

constexpr const char* BY_NAMES[] = {"thread", "atomic", "ldmatrix", "cp.async", "copy engine", "wgmma"};

// How much of a launch is recorded: at least `blocks` blocks and `accesses` accesses, at most `too_many` accesses.
// In a grid with a second dimension, the work of a block may depend on blockIdx.x (as in attention). So whole rows of
// blocks are recorded until `far_too_many` accesses, in a whole program unless they are longer than MAX_ROW. If the
// limit is reached with one or two blocks, these are blocks 0 and 1, and the first one of the second row is recorded
// too: see memory_loads().
struct Limits {
    uint64_t blocks, accesses, too_many, far_too_many;
};
constexpr uint64_t MAX_ROW = 256;
constexpr Limits IN_A_STEP{8, 1 << 18, 1 << 20, 8 << 20};
constexpr Limits IN_A_PROGRAM{8, 1 << 24, 1 << 25, 1 << 26};

// ==== addresses ==========================================================================================

enum class Space : uint8_t { OTHER, SHARED, GLOBAL, GUARD, HOST };   // GUARD: next to an allocation
struct Place {
    Space space;
    uint64_t at;   // offset in shared memory, or in global memory, where allocations follow one another
};

// Translates host addresses to emulated GPU addresses. They are equal in every run, so the cache model is reproducible.
class Memory {
public:
    static constexpr uint64_t STATIC_ARRAYS = cuda_cpu::hopper.l1_and_shared;   // offset: after dynamic shared memory

    void set_dynamic(const void* place, size_t bytes) { dynamic_ = {reinterpret_cast<uintptr_t>(place), bytes}; }
    void add_array(const void* place, size_t bytes, const char* name) {
        arrays_.push_back({reinterpret_cast<uintptr_t>(place), bytes, shared_bytes(), name});
        static_bytes_ += (bytes + LINE - 1) / LINE * LINE;
    }
    void add_allocation(const void* place, size_t bytes) {
        constexpr uint64_t page = 1 << 21;   // a GPU's page size
        const uintptr_t begin = reinterpret_cast<uintptr_t>(place);
        allocations_[begin] = {begin, bytes, next_, "", guard_bytes};
        next_ += (bytes + 2 * guard_bytes + page - 1) / page * page;
        last_ = {};
        gaps_ = {};
    }
    // Variables have addresses of their own, so that those of allocations do not depend on them.
    void add_variable(const void* place, size_t bytes, const char* name, bool is_writable) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(place);
        const bool is_guarded = name[0] != '\0' && is_writable;
        variables_[begin] = {begin, bytes, next_variable_, name, is_guarded ? VARIABLE_GUARD : 0};
        next_variable_ += (bytes + 2 * VARIABLE_GUARD + LINE - 1) / LINE * LINE;
        data_ = {variables_.begin()->first, variables_.rbegin()->first - variables_.begin()->first};
    }
    void remove_allocation(const void* place) {
        allocations_.erase(reinterpret_cast<uintptr_t>(place));
        last_ = {};
        gaps_ = {};
    }
    void forget_gaps() { gaps_ = {}; }   // the host may have allocated memory there

    Place find(const void* address) {
        const uintptr_t p = reinterpret_cast<uintptr_t>(address);
        if (dynamic_.has(p)) return {Space::SHARED, p - dynamic_.begin};
        if (last_.has(p)) return {Space::GLOBAL, last_.at + (p - last_.begin)};
        if (gaps_[p / PAGE % gaps_.size()].has(p) || internal_.has(p)) return {Space::OTHER, 0};
        for (const Range& array : arrays_)
            if (array.has(p)) {
                accessed[array.at] = array.bytes;
                return {Space::SHARED, array.at + (p - array.begin)};
            }
        const auto next = allocations_.upper_bound(p + guard_bytes);
        if (next != allocations_.begin()) {
            const Range& found = std::prev(next)->second;
            const bool is_inside = found.has(p);
            if (is_inside) last_ = found;
            if (found.guarded().has(p)) return {is_inside ? Space::GLOBAL : Space::GUARD, found.at + p - found.begin};
        }
        if (data_.has(p)) return find_variable(p);
        if (HostMemory::of_program().overlaps(p, 1)) return {Space::HOST, 0};
        note_gap(p / PAGE * PAGE);
        return {Space::OTHER, 0};
    }
    uint64_t end_of_allocation() const { return last_.at + last_.bytes; }   // of the one that find() found last
    std::map<uint64_t, uint64_t> accessed;   // offset and bytes of the static arrays that have been found
    uint64_t shared_bytes() const { return STATIC_ARRAYS + static_bytes_; }

    struct Range {
        uintptr_t begin = 0;
        size_t bytes = 0;
        uint64_t at = 0;
        const char* name = "";   // mangled, of a static array or a variable of the user
        uint64_t guard = 0;      // unused bytes before and after it
        bool has(uintptr_t p) const { return p - begin < bytes; }
        Range guarded() const { return {begin - guard, bytes + 2 * guard}; }
        bool overlaps(const Range& r) const { return begin < r.begin + r.bytes && r.begin < begin + bytes; }
    };
    // Returns the static array, allocation or variable that an address is in or next to.
    Range owner(Space space, uint64_t at) const {
        Range found;
        const auto look_at = [&](const Range& range) {
            if (at + range.guard - range.at < range.bytes + 2 * range.guard) found = range;
        };
        if (space == Space::SHARED) {
            for (const Range& array : arrays_) look_at(array);
        } else {
            for (const auto& [begin, allocation] : allocations_) look_at(allocation);
            for (const auto& [begin, variable] : variables_) look_at(variable);
        }
        return found;
    }

private:
    // Returns the place of an address in data_.
    Place find_variable(uintptr_t p) {
        const auto after = variables_.upper_bound(p);
        const Range &before = std::prev(after)->second, &next = after->second;
        const bool is_users = before.name[0] != '\0', is_past = before.guarded().has(p);
        const uintptr_t offset = p - before.begin, missing = next.begin - p;
        if (before.has(p)) {
            (is_users ? last_ : internal_) = before;
            return {is_users ? Space::GLOBAL : Space::OTHER, before.at + offset};
        }
        if (!is_past && !next.guarded().has(p)) return {Space::OTHER, 0};
        const bool is_nearer = is_past && (next.guard == 0 || offset - before.bytes < missing);
        return {Space::GUARD, is_nearer ? before.at + offset : next.at - missing};
    }

    // Caches a page that contains no device memory. Most instrumented accesses are to a thread's stack or to the
    // emulator's own data, and this makes their look-up fast.
    void note_gap(uintptr_t begin) {
        const Range gap{begin, PAGE};
        for (const Range& array : arrays_)
            if (array.overlaps(gap)) return;
        const auto after = allocations_.lower_bound(begin + PAGE + guard_bytes);
        if (dynamic_.overlaps(gap) || data_.overlaps(gap) || HostMemory::of_program().overlaps(begin, PAGE)) return;
        if (after != allocations_.begin() && std::prev(after)->second.guarded().overlaps(gap)) return;
        gaps_[begin / PAGE % gaps_.size()] = gap;
    }

    static constexpr uintptr_t PAGE = 1 << 12;
    std::array<Range, 1024> gaps_{};
    Range dynamic_, last_, internal_;   // internal_: the variable of the emulator that was found last
    std::vector<Range> arrays_;
    uint64_t static_bytes_ = 0;
    std::map<uintptr_t, Range> allocations_;
    uint64_t next_ = 1 << 21;
    static constexpr uint64_t VARIABLE_GUARD = 1 << 16;   // bytes before each variable: dev/inspect/Makefile
    std::map<uintptr_t, Range> variables_;
    Range data_;   // from the first variable to the last one, which is not the user's
    uint64_t next_variable_ = uint64_t{1} << 40;
};

// ==== call stacks and sites ==============================================================================

// Call stacks as a tree: a node is the return address of a call and the node of its caller.
class Stacks {
public:
    uint32_t call(uint32_t from, uintptr_t pc) {
        const auto [place, is_new] = nodes_.try_emplace({from, pc}, static_cast<uint32_t>(list_.size()));
        if (is_new) list_.push_back({from, pc});
        return place->second;
    }
    uint32_t caller(uint32_t node) const { return list_[node].first; }
    // Returns the address of an instruction, followed by the return addresses of its callers, innermost first.
    json with_callers(uintptr_t pc, uint32_t node) const {
        json all = json::array({pc});
        for (; node != 0; node = list_[node].first) all.push_back(list_[node].second);
        return all;
    }

private:
    std::map<std::pair<uint32_t, uintptr_t>, uint32_t> nodes_;
    std::vector<std::pair<uint32_t, uintptr_t>> list_{{0, 0}};   // node 0: no call
};

// An instruction that accesses memory, in one call stack, with its counts.
struct Site {
    uintptr_t pc;
    uint32_t stack;
    unsigned part, bytes;
    Space space;
    Access access;
    By by;

    uint64_t requests = 0, lanes = 0, bytes_used = 0, sectors = 0, least_sectors = 0, wavefronts = 0,
             least_wavefronts = 0, l1_hits = 0, dram_sectors = 0;
    Request worst;
    double worst_rank = 0;

    auto key() const { return std::tuple(pc, stack, part, bytes, space, access, by); }
};

// ==== kernels ============================================================================================

struct Totals {
    uint64_t dram_load = 0, dram_store = 0, l2 = 0, flops = 0, special = 0;   // sectors; tensor cores; exp2 and similar
    uint64_t partial = 0;          // stores of a part of a sector
    uint64_t partial_fetched = 0;  // sectors of which only a part has been stored: memory must deliver the rest
    // Cycles of L1 and shared memory: a request takes its wavefronts (global memory: its lines, because one tag is
    // looked up per cycle), at least 1; or at least 2, on multiprocessors with 16 load/store units instead of 32.
    uint64_t cycles = 0, cycles_of_16 = 0;
    // Of one warp, the one that waits longest before each barrier, summed over blocks: see Waits.
    uint64_t waits_shared = 0, waits_l1 = 0, waits_l2 = 0, waits_memory = 0, exchanges = 0, barriers = 0;
    uint64_t rounds = 0;           // rounds of loads of global memory, of all warps
};

struct Side {
    uint32_t site;
    Access access;
    unsigned actor, block;   // actor: a thread, the TMA copies of an mbarrier or the wgmma of a warp (clocks.h)
};

// A race between two accesses, or an uninitialised read or an access out of bounds (`earlier` is then unused).
struct Hazard {
    Space space;
    Memory::Range owner;    // the array or allocation
    int64_t address;        // offset from its begin
    Side later, earlier;
    uint64_t count;
};
// Key: both sites, the reason, and the begin of the array or allocation, because a site may access several.
using Hazards = std::map<std::tuple<uint32_t, uint32_t, std::string, uint64_t>, Hazard>;

struct Kernel {
    LaunchShape shape;
    std::string symbol, range;
    size_t number = 0;       // index in `kernels`; `sequence` refers to it
    uint64_t launches = 0, recorded_blocks = 0, accesses = 0;
    bool recorded = false;   // one of its launches is or has been recorded
    uint64_t wave = 1;       // blocks that run at the same time
    std::vector<uint64_t> numbers;         // of the recorded blocks
    std::map<uint64_t, uint64_t> arrays;   // offset and bytes of the static arrays that recorded blocks access

    std::vector<Site> sites;
    std::map<decltype(std::declval<Site>().key()), uint32_t> site_numbers;
    std::set<std::tuple<std::string, uintptr_t, uint32_t>> syncs;   // name, pc and stack
    Totals totals;
    std::vector<Totals> after_block;
    double hot_atomics = 0;
    Hazards races, uninitialised, out_of_bounds;

    uint64_t blocks() const { return uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]; }
    unsigned threads() const { return shape.block[0] * shape.block[1] * shape.block[2]; }
    // The arrays that the kernel declares itself, or those that it accesses, also in functions that it calls.
    uint64_t static_shared() const {
        uint64_t accessed = 0;
        for (const auto& [at, bytes] : arrays) accessed += bytes;
        return std::max<uint64_t>(shape.static_shared, accessed);
    }
    size_t hazards() const { return races.size() + uninitialised.size() + out_of_bounds.size(); }
};

// Extrapolates a total to the whole launch: each block that was not recorded counts as the average of the second half
// of the recorded ones, because data that blocks share is in the cache by then.
static double of_launch(const Kernel& kernel, uint64_t Totals::*figure) {
    const auto& after = kernel.after_block;
    if (after.empty()) return 0;
    const double all = static_cast<double>(kernel.blocks()), seen = static_cast<double>(after.size());
    const double total = static_cast<double>(after.back().*figure);
    if (after.size() == kernel.blocks()) return total;
    const size_t half = after.size() / 2;
    const double before = half == 0 ? 0 : static_cast<double>(after[half - 1].*figure);
    return total + (all - seen) * (total - before) / (seen - static_cast<double>(half));
}

// Returns the sectors that a launch loads from memory. If the recorded blocks are 0, 1 and the first one of the second
// row: block 1 finds in L2 what the blocks of a row share, and the third block what those of a column share. All blocks
// of a wave that share a sector load it once.
static double memory_loads(const Kernel& kernel) {
    const auto& after = kernel.after_block;
    const uint64_t row = kernel.shape.grid[0];
    if (after.size() != 3 || kernel.numbers.back() != row || row < 3) return of_launch(kernel, &Totals::dram_load);
    const double alone = static_cast<double>(after[0].dram_load);
    const double of_row = alone - static_cast<double>(after[1].dram_load - after[0].dram_load);
    const double of_column = alone - static_cast<double>(after[2].dram_load - after[1].dram_load);
    const double wave = static_cast<double>(kernel.wave), across = std::min(wave, static_cast<double>(row));
    const double down = std::max(1.0, wave / static_cast<double>(row));
    return static_cast<double>(kernel.blocks()) * (alone - of_row * (1 - 1 / across) - of_column * (1 - 1 / down));
}

// ==== threads ============================================================================================

// Values that a compiler keeps in registers: a repeated load of an address at the same site is not counted, until the
// thread synchronises or stores to the same memory space, which may alias.
class Registers {
public:
    bool hold(Space space, uint32_t site, uint64_t address) {
        const uint64_t key = address << 20 ^ site;
        Slot& slot = slots_[(address / WORD * 7 + site * 13) % SLOTS];
        const uint64_t now = dropped_[static_cast<size_t>(space)];
        if (slot.key == key && slot.since == now) return true;
        slot = {key, now};
        return false;
    }
    void drop(Space space) { dropped_[static_cast<size_t>(space)]++; }
    void drop_all() {
        for (uint64_t& times : dropped_) times++;
    }

private:
    static constexpr size_t SLOTS = 32;
    struct Slot { uint64_t key, since; };
    std::array<Slot, SLOTS> slots_{};
    std::array<uint64_t, 3> dropped_{1, 1, 1};
};

struct Event {
    uint64_t address;
    uint32_t site, segment;
};

// Latency. A warp waits for its loads, but a compiler issues several before the first wait: it unrolls loops and moves
// loads up. Model: between two stores or synchronisations of a thread, UNROLL consecutive executions of every load are
// in flight together. They form a round; the warp waits once, for the slowest memory that a load of the round goes to.
constexpr unsigned UNROLL = 4;
enum Level : uint8_t { NO_WAIT, WAIT_SHARED, WAIT_L1, WAIT_L2, WAIT_MEMORY };

// A request of a warp that is not yet counted.
struct Queued {
    uint32_t site, round;
    unsigned merged;   // bytes per lane of the load that nvcc makes of this and the next requests; 0: in an earlier one
    Request request;
};

struct PendingCopy {
    Moment moment;
    uint64_t to;
    unsigned bytes;
    uint32_t site;
    unsigned group;
};

struct Thread {
    Clock clock, fenced;     // fenced: accesses that are visible to TMA and wgmma (after fence.proxy.async)
    // clock at the last __threadfence, or __threadfence_block; blocks or threads that see a later atomic acquire it
    Clock released, released_in_block;
    Tick own = 1;
    Clock passed;            // latest step of each thread that has certainly executed; says nothing about visibility
    Tick step = 1;
    bool is_over = false;
    uint32_t stack = 0;
    uint32_t segment = 0;    // stores and synchronisations so far: loads are not moved across them
    std::vector<Event> events;
    Registers registers;
    std::vector<PendingCopy> copies;
    unsigned copy_groups = 0;
};

// A thread that has waited for the latest completed phase of an mbarrier.
struct Waiter {
    unsigned thread;
    Tick step;
    uint32_t site;
};

// An mbarrier or a named barrier.
struct Sync {
    unsigned slot;
    std::vector<Waiter> waiters;
    Clock arriving_passed, ended_passed[2];
    Clock arriving, arriving_fenced;     // of all arrivals so far
    Clock ended[2], ended_fenced[2];     // at the end of the last phase with that parity
    Tick phases = 0;                     // completed phases
};

// A TMA load: one box of a tensor map.
struct Box {
    Moment moment;
    uint32_t store_site, load_site;
    const void* barrier;
    std::vector<uint64_t> to, from;
};

struct WgmmaProduct {
    Moment moment;
    Clock fenced;
    unsigned warp;
    uint32_t site;
    std::vector<uint64_t> a, b;
};

// ==== state ==============================================================================================

using Shape = std::tuple<const void*, std::string, std::array<unsigned, 6>, size_t, std::vector<int64_t>,
                         std::vector<bool>>;

// ---- settings
static const cuda_cpu::Card* card_;   // card() is a function of dev/cpu
static bool is_sample, is_whole;      // INSPECT_MODE
static std::string only, from;
static std::set<std::string> except;
static double seconds;
static std::set<uintptr_t> removed;
static json registers = json::object();   // the output of sass.py
static bool is_open, is_written;
static std::vector<uintptr_t> ended_at;   // the call stack of the host code that ended the program
static std::chrono::steady_clock::time_point start;

// ---- the program
static bool recording;                 // a recorded block is running
static bool records_launches = true;   // set by record_launches()
static unsigned from_launches;         // launches in the range `from`
static Memory memory;
static Stacks stacks;
static std::vector<std::unique_ptr<Kernel>> kernels;
static std::map<Shape, Kernel*> by_shape;
static std::vector<Product> products;
static std::vector<std::pair<const char*, size_t>> sequence;

// ---- the launch
static Kernel* kernel;
static uint64_t next_number;
static bool records_launch;
static Shadow global_shadow, shared_shadow;
static L1 l1;
static L2 l2;
struct Atomics {
    uint64_t requests = 0, blocks = 0;   // requests per sector; blocks with such requests
    uint64_t last_block = ~uint64_t{0};
};
static std::unordered_map<uint64_t, Atomics> atomics;            // by address / ATOMIC_REGION
static std::map<uint64_t, std::map<unsigned, Clock>> released;   // address of an atomic -> block -> clock

// ---- the block
constexpr unsigned ENGINES = 64;                 // TMA actors per block: one per mbarrier, up to this many
static unsigned block, threads_in_block, first_engine, current;   // current: the thread that runs
static std::vector<Thread> threads{1};
static std::vector<uint16_t> written;            // per granule of shared memory: one bit per byte
static std::map<const void*, Sync> syncs;
static std::map<unsigned, Clock> acquired;       // clocks of other blocks, received through atomics
static std::map<std::pair<Space, uint64_t>, Clock> released_in_block;   // by address of an atomic
static std::vector<Box> boxes;
static std::vector<WgmmaProduct> wgmmas;
static std::vector<Tick> wgmma_ticks;            // per warp: completed wgmma
static std::vector<std::vector<Queued>> queues;  // per warp: requests since the last barrier
static size_t queued_requests;                   // of all warps
static std::vector<uint32_t> rounds, exchanges;  // per warp: rounds and collectives since the last barrier

// ---- blocks of a cooperative launch
struct Suspended {
    std::vector<Thread> threads;
    std::vector<uint16_t> written;
    std::map<const void*, Sync> syncs;
    std::map<unsigned, Clock> acquired;
    Shadow shadow;
};
static std::map<unsigned, Suspended> suspended;
static std::map<unsigned, Clock> arriving, at_grid_barrier;   // by block, at the grid's next and at its last barrier

// Suspends recording in a scope: the recorder's calls to the standard library may resolve to the program's
// instrumented copies.
struct Pause {
    Pause() { recording = false; }
    ~Pause() { recording = true; }
};

static uintptr_t number_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }
static Thread& me() { return threads[current]; }
static Moment moment_of(unsigned t) { return {threads[t].clock, t, threads[t].own}; }
static unsigned warps() { return (threads_in_block + LANES - 1) / LANES; }
static unsigned actors() { return first_engine + ENGINES + warps(); }
static unsigned wgmma_actor(unsigned warp) { return first_engine + ENGINES + warp; }

static void write(const std::string& ended);
static void end_program(const std::string& ended) {
    write(ended);
    fflush(stdout);
    _Exit(0);
}

// An atomic store does not read what it replaces.
static void overwritten(const volatile void* address, size_t bytes) {
    const Place place = memory.find(const_cast<const void*>(address));
    if (recording && place.space == Space::SHARED)
        written[place.at / GRANULE] |= static_cast<uint16_t>(((1u << bytes) - 1) << place.at % GRANULE);
}

// ==== races ==============================================================================================

// CUDA C++ Programming Guide, "SIMT Architecture": which thread performs the final write is undefined.
constexpr const char* ONE_INSTRUCTION = "lanes of one instruction, in undefined order; safe if all values are equal";

// A new access, which is compared with earlier ones, and the entry that it adds to the shadow memory.
struct NewAccess {
    Moment moment;
    unsigned actor;     // of the entry
    Tick tick;          // of the entry
    Kind kind;
    bool generic;
    const Clock* fenced;   // for reads through the async proxy: the stores that it sees
    uint32_t site;
    unsigned thread;    // named in a report
};

// Returns whether the entry's access happens before the new one. If not, sets *why to the reason for the race. Accesses
// through the async proxy also need a fence.proxy.async after a thread's store.
static bool happens_before(const Entry& entry, Space space, const NewAccess& later, const char** why) {
    const auto covers = [&](const Clock& clock) {
        return clock != nullptr && Moment{clock, NONE, 0}.covers(entry.first_actor, entry.lanes, entry.tick);
    };
    if (space == Space::GLOBAL && entry.block != block) {
        *why = "blocks of one launch are not ordered";
        const auto in = [&](const std::map<unsigned, Clock>& clocks) {
            const auto found = clocks.find(entry.block);
            return found != clocks.end() && covers(found->second);
        };
        return in(acquired) || in(at_grid_barrier);
    }
    *why = "no synchronisation between them";
    if (!later.moment.covers(entry.first_actor, entry.lanes, entry.tick)) return false;
    if (later.fenced == nullptr || !entry.generic || entry.kind == Kind::READ) return true;
    *why = "no fence.proxy.async between them";
    return covers(*later.fenced);
}

static void add(Hazards& hazards, Space space, uint64_t at, const Side& later, const Side& earlier,
                const std::string& why) {
    const Memory::Range owner = memory.owner(space, at);
    const Hazard first{space, owner, static_cast<int64_t>(at - owner.at), later, earlier, 0};
    hazards.try_emplace({later.site, earlier.site, why, owner.at}, first).first->second.count++;
}

static void report_race(Space space, uint64_t at, const Entry& entry, const NewAccess& later, const char* why) {
    const Access access = is_read(later.kind) ? Access::LOAD : Access::STORE;
    const Access other = is_read(entry.kind) ? Access::LOAD : Access::STORE;
    unsigned lane = static_cast<unsigned>(__builtin_ctz(entry.lanes));
    for (uint32_t rest = entry.lanes; rest != 0; rest &= rest - 1) {   // report a lane that is not ordered
        Entry alone = entry;
        const char* unused = nullptr;
        alone.lanes = rest & -rest;
        if (happens_before(alone, space, later, &unused)) continue;
        lane = static_cast<unsigned>(__builtin_ctz(rest));
        break;
    }
    add(kernel->races, space, at, {later.site, access, later.thread, block},
             {entry.site, other, entry.first_actor + lane, entry.block}, why);
}

// Returns whether to keep a read entry of another block. Entries of two other blocks are enough: a block that writes
// there later races with at least one of them. Further reads by those two blocks are merged.
static bool keep_of_others(Entry* (&others)[2], Entry& entry) {
    for (Entry*& other : others) {
        if (other == nullptr) {
            other = &entry;
            return true;
        }
        if (other->block != entry.block) continue;
        other->bytes |= entry.bytes;
        other->tick = std::max(other->tick, entry.tick);
        return false;
    }
    return false;
}

// Marks written bytes of shared memory, and reports reads of bytes that have not been written.
static void check_written(uint64_t granule, uint16_t mask, const NewAccess& later) {
    const unsigned missing = mask & ~written[granule];
    if (later.kind != Kind::WRITE && missing != 0) {
        const uint64_t at = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(missing));
        add(kernel->uninitialised, Space::SHARED, at, {later.site, Access::LOAD, later.thread, block}, {}, "");
    }
    if (!is_read(later.kind)) written[granule] |= mask;
}

static void touch_granule(Space space, uint64_t granule, uint16_t mask, const NewAccess& later) {
    if (space == Space::SHARED) check_written(granule, mask, later);
    Shadow& shadow = space == Space::SHARED ? shared_shadow : global_shadow;
    const bool is_thread = later.actor < first_engine;
    const uint32_t first_actor = is_thread ? later.actor / LANES * LANES : later.actor;
    const uint32_t lanes = is_thread ? 1u << later.actor % LANES : 1;
    bool is_noted = false;
    Entry* others[] = {nullptr, nullptr};
    shadow.visit(granule, [&](Entry& entry) {
        if (entry.block != block && entry.kind == Kind::READ && later.kind == Kind::READ)
            return keep_of_others(others, entry);
        const bool conflict = (entry.bytes & mask) != 0 && !(is_read(entry.kind) && is_read(later.kind)) &&
                              !(is_atomic(entry.kind) && is_atomic(later.kind));
        const bool is_of_warp = entry.first_actor == first_actor && entry.block == block;
        if (is_of_warp && entry.kind == later.kind && entry.tick == later.tick) {
            const bool same_again = entry.lanes == lanes && (mask & ~entry.bytes) == 0;
            const bool another_lane = entry.kind == Kind::READ && entry.bytes == mask && entry.site == later.site;
            if (same_again || another_lane) {
                entry.lanes |= lanes;
                is_noted = true;
                return true;
            }
        }
        const char* why = nullptr;
        const bool before = conflict ? happens_before(entry, space, later, &why)
                                     : entry.block == block && later.moment.surely_covers(first_actor, lanes, entry);
        if (conflict && !before) {
            if (entry.kind == Kind::WRITE && later.kind == Kind::WRITE && is_of_warp && entry.site == later.site)
                why = ONE_INSTRUCTION;
            const uint64_t at = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(entry.bytes & mask));
            report_race(space, at, entry, later, why);
        }
        const bool replaces = later.kind == Kind::WRITE || entry.kind == later.kind;
        return !(before && replaces && (entry.bytes & ~mask) == 0);
    });
    if (is_noted) return;
    shadow.add(granule, {later.tick, lanes, first_actor, block, later.site, mask, later.kind, later.generic});
}

static void touch(Space space, uint64_t at, unsigned bytes, const NewAccess& later) {
    kernel->accesses++;
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t granule = (at + done) / GRANULE, first = (at + done) % GRANULE;
        const uint64_t count = std::min<uint64_t>(GRANULE - first, bytes - done);
        touch_granule(space, granule, static_cast<uint16_t>(((1u << count) - 1) << first), later);
        done += count;
    }
}

// ==== accesses ===========================================================================================

// Returns the site's index in kernel->sites, adding it if it is new. A small direct-mapped cache holds recent ones.
static uint32_t find_site(uintptr_t pc, unsigned part, unsigned bytes, Space space, Access access, By by) {
    struct Latest {
        const Kernel* of;
        uint32_t site;
    };
    static std::array<Latest, 4096> latest_sites{};
    Site wanted{pc, me().stack, part, bytes, space, access, by};
    Latest& latest =
        latest_sites[(pc * 31 + wanted.stack * 7 + part * 3 + static_cast<unsigned>(space)) % latest_sites.size()];
    const bool is_known = latest.of == kernel && latest.site < kernel->sites.size();
    if (is_known && kernel->sites[latest.site].key() == wanted.key()) return latest.site;
    const auto [place, is_new] =
        kernel->site_numbers.try_emplace(wanted.key(), static_cast<uint32_t>(kernel->sites.size()));
    if (is_new) kernel->sites.push_back(wanted);
    latest = {kernel, place->second};
    return place->second;
}

static void part_accessed(Place place, unsigned bytes, unsigned part, Access access, By by, uintptr_t pc) {
    Thread& t = me();
    const uint32_t number = find_site(pc, part, bytes, place.space, access, by);
    if (access == Access::LOAD && by == By::THREAD && t.registers.hold(place.space, number, place.at)) return;
    if (access == Access::STORE) {
        t.registers.drop(place.space);
        t.segment++;
    }
    t.events.push_back({place.at, number, t.segment});
    if (by == By::ATOMIC && place.space == Space::GLOBAL) {
        auto& by_block = released[place.at];
        for (const auto& [other, clock] : by_block)
            if (other != block) acquired[other] = join(acquired[other], clock);
        if (t.released != nullptr) by_block[block] = join(by_block[block], t.released);
    }
    if (by == By::ATOMIC) {
        Clock& here = released_in_block[{place.space, place.at}];
        t.clock = join(t.clock, here);
        here = join(here, t.released_in_block);
    }
    const bool is_load = access == Access::LOAD;
    const Kind kind = by == By::ATOMIC ? is_load ? Kind::ATOMIC_READ : Kind::ATOMIC : is_load ? Kind::READ : Kind::WRITE;
    touch(place.space, place.at, bytes, {moment_of(current), current, t.own, kind, true, nullptr, number, current});
}

// Reports an access outside of an allocation or of an array in shared memory.
static void add_out_of_bounds(Place place, uint32_t site, Access access, const std::string& why) {
    const Space space = place.space == Space::SHARED ? Space::SHARED : Space::GLOBAL;
    add(kernel->out_of_bounds, space, place.at, {site, access, current, block}, {}, why);
}

static struct { uintptr_t pc; size_t bytes; Access access; By by; } unknown;   // the last access outside of all arrays

// Records an access, split into parts that are as wide as size and alignment allow, at most 16 bytes each.
void access(Access access, By by, const void* address, size_t bytes, const void* pc) {
    if (!recording) return;
    const Pause pause;
    Place place = memory.find(address);
    if (place.space == Space::GLOBAL && place.at + bytes > memory.end_of_allocation())
        place = {Space::GUARD, memory.end_of_allocation()};   // a wide access that begins in the allocation
    if (place.space == Space::GUARD)
        return add_out_of_bounds(place, find_site(number_of(pc), 0, bytes, Space::GLOBAL, access, by), access, "");
    if (place.space == Space::HOST)
        return add_out_of_bounds({Space::SHARED, 0}, find_site(number_of(pc), 0, bytes, Space::SHARED, access, by),
                                 access, "the host's memory, which a GPU cannot access");
    if (place.space == Space::OTHER) {
        unknown = {number_of(pc), bytes, access, by};
        return;
    }
    uint64_t width = std::min<uint64_t>(16, bytes & -bytes);
    if (place.at % width != 0) width = place.at & -place.at;
    unsigned part = 0;
    for (uint64_t done = 0; done < bytes; done += width)
        part_accessed({place.space, place.at + done}, static_cast<unsigned>(width), part++, access, by, number_of(pc));
}

// Ends the program: an access outside of a __shared__ array would change the emulator's own data.
static void wrong_index(const char* type, int64_t index, const void* pc) {
    const std::string why = "index " + std::to_string(index) + " of an array of type " + type;
    if (!recording) end_program(why);
    const Pause pause;
    const uint32_t site = find_site(number_of(pc), 0, 0, Space::SHARED, Access::LOAD, By::THREAD);
    add_out_of_bounds({Space::SHARED, 0}, site, Access::LOAD, why);
    recording = true;
    end_program("an index out of bounds");
}

// Called at a segmentation fault. Then the access is repeated and ends the program. Device memory is protected while
// host code runs.
static void invalid_address(int signal, siginfo_t* fault, void*) {
    std::signal(signal, SIG_DFL);
    if (const auto [space, at] = memory.find(fault->si_addr); space == Space::GLOBAL && !recording) {
        const Memory::Range owner = memory.owner(space, at);
        constexpr int skipped = 2;   // the frames of this function and of the signal
        std::array<void*, 64> frames;
        const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
        for (int i = skipped; i < count; i++) ended_at.push_back(number_of(frames[static_cast<size_t>(i)]));
        if (!ended_at.empty()) ended_at[0]++;   // the others are return addresses, after their instructions
        return write("host code accesses device memory, byte " + std::to_string(at - owner.at) + " of " +
                     std::to_string(owner.bytes) + ": expected cudaMemcpy, or memory of cudaMallocManaged");
    }
    if (recording) {
        const Pause pause;
        const uint32_t site = find_site(unknown.pc, 0, unknown.bytes, Space::SHARED, unknown.access, unknown.by);
        add_out_of_bounds({Space::SHARED, 0}, site, unknown.access, "an address far from any array");
    }
    write("at a segmentation fault");
}

// ==== requests ===========================================================================================

// NVIDIA does not document how L2 distributes addresses over its slices. Model: each slice executes one atomic on a
// sector at a time, and has regions of this size.
constexpr uint64_t ATOMIC_REGION = 4096;

// Returns the slowest memory that a load of the request goes to.
static Level account_global(Site& site, const Request& request) {
    Totals& totals = kernel->totals;
    Level level = WAIT_L1;
    const bool through_l1 = site.by == By::THREAD && site.access == Access::LOAD;
    for (uint64_t sector : request.units(SECTOR)) {
        site.sectors++;
        if (site.access == Access::STORE) {
            const uint32_t bytes = request.bytes_of_sector(sector);
            const L2::Store store = l2.store(sector, bytes);
            totals.l2++;
            totals.partial += bytes != ~0u;
            totals.partial_fetched += static_cast<uint64_t>(static_cast<int64_t>(store.partial));
            totals.dram_store += static_cast<uint64_t>(store.writes);
            site.dram_sectors += static_cast<uint64_t>(store.writes);
            if (site.by != By::ATOMIC) continue;
            Atomics& of_region = atomics[sector * SECTOR / ATOMIC_REGION];
            of_region.requests++;
            of_region.blocks += std::exchange(of_region.last_block, block) != block;
            continue;
        }
        if (through_l1 && l1.load(sector)) {
            site.l1_hits++;
            continue;
        }
        totals.l2++;
        level = std::max(level, WAIT_L2);
        if (l2.load(sector)) continue;
        level = WAIT_MEMORY;
        totals.dram_load++;
        site.dram_sectors++;
    }
    site.least_sectors += request.least_sectors();
    return through_l1 ? level : NO_WAIT;
}

// Adds the cycles of the load/store units and of L1 or shared memory; see Totals.
static void add_cycles(uint64_t cycles) {
    kernel->totals.cycles += std::max<uint64_t>(1, cycles);
    kernel->totals.cycles_of_16 += std::max<uint64_t>(2, cycles);
}

// Counts a request; returns the slowest memory that its warp waits for.
static Level account(const Queued& queued) {
    Site& site = kernel->sites[queued.site];
    const Request& request = queued.request;
    site.requests++;
    site.lanes += request.lanes();
    site.bytes_used += uint64_t{request.lanes()} * request.bytes;
    double ratio = 1;
    Level level = NO_WAIT;
    if (site.space == Space::SHARED) {
        const Request::Wavefronts wavefronts = request.wavefronts();
        site.wavefronts += wavefronts.taken;
        site.least_wavefronts += wavefronts.least;
        ratio = static_cast<double>(wavefronts.taken) / wavefronts.least;
        if (site.access == Access::LOAD) level = WAIT_SHARED;
        Request merged = request;
        merged.bytes = queued.merged;
        if (site.by == By::ATOMIC) add_cycles(request.lanes_of_a_bank());
        else if (merged.bytes != 0) add_cycles(merged.words_of_a_bank());
    } else {
        const uint64_t sectors = site.sectors, least = site.least_sectors;
        level = account_global(site, request);
        ratio = static_cast<double>(site.sectors - sectors) / (site.least_sectors - least);
        add_cycles(request.units(LINE).size());
    }
    const double rank = ratio * 64 + request.lanes();   // highest ratio first, then most active lanes
    if (rank > site.worst_rank) {
        site.worst_rank = rank;
        site.worst = request;
    }
    return level;
}

// Counts accesses by TMA or wgmma: chunks of 16 bytes, assumed to be transferred in the best order.
static void account_bulk(Site& site, const std::vector<uint64_t>& chunks) {
    site.requests++;
    site.lanes++;
    site.bytes_used += chunks.size() * GRANULE;
    if (site.space == Space::SHARED) {
        std::array<uint64_t, BANKS> words{};
        for (uint64_t at : chunks)
            for (uint64_t byte = 0; byte < GRANULE; byte += WORD) words[(at + byte) / WORD % BANKS]++;
        const uint64_t taken = *std::max_element(words.begin(), words.end());
        site.wavefronts += taken;
        site.least_wavefronts += (chunks.size() * GRANULE + LINE - 1) / LINE;
        add_cycles(taken);
        return;
    }
    for (size_t i = 0; i < chunks.size(); i += LANES) {
        Request request;
        request.bytes = GRANULE;
        for (size_t j = i; j < std::min<size_t>(chunks.size(), i + LANES); j++) {
            request.address[j - i] = chunks[j];
            request.active |= 1u << (j - i);
        }
        account_global(site, request);
    }
}

// nvcc merges loads of neighbouring words of shared memory, if it knows their alignment: it often does, because tiles
// have constant sizes and loops over them are unrolled. Sets Queued::merged of one instruction's requests. indices: of
// these requests, in their order.
static void merge(std::vector<Queued>& queue, const std::vector<uint32_t>& indices) {
    constexpr size_t window = 64;   // requests
    const unsigned bytes = queue[indices[0]].request.bytes;
    std::vector<bool> is_done(indices.size());
    // Returns the next request whose lanes access the addresses of `first` + offset; the number of requests if none.
    const auto find = [&](size_t first, unsigned offset) {
        const Request& base = queue[indices[first]].request;
        for (size_t at = first + 1; at < std::min(first + window, indices.size()); at++) {
            const Request& other = queue[indices[at]].request;
            bool follows = !is_done[at] && other.active == base.active;
            for (unsigned lane = 0; follows && lane < LANES; lane++)
                follows = !(base.active >> lane & 1) || other.address[lane] == base.address[lane] + offset;
            if (follows) return at;
        }
        return indices.size();
    };
    const auto is_aligned = [&](const Request& request, unsigned width) {
        for (unsigned lane = 0; lane < LANES; lane++)
            if (request.active >> lane & 1 && request.address[lane] % width != 0) return false;
        return true;
    };
    for (size_t at = 0; at < indices.size(); at++) {
        if (is_done[at]) continue;
        for (unsigned width = 16; width > bytes; width /= 2) {
            std::vector<size_t> others;
            if (!is_aligned(queue[indices[at]].request, width)) continue;
            for (unsigned offset = bytes; offset < width; offset += bytes) others.push_back(find(at, offset));
            if (std::count(others.begin(), others.end(), indices.size()) > 0) continue;
            queue[indices[at]].merged = width;
            for (size_t other : others) {
                queue[indices[other]].merged = 0;
                is_done[other] = true;
            }
            break;
        }
    }
}

// Forms requests from the buffered accesses of a warp's lanes. Called when the warp synchronises.
static void flush(unsigned warp) {
    struct OfSite {
        std::vector<uint32_t> requests;   // [n]: index of the request of the n-th accesses
        unsigned lane = LANES, accesses = 0;
        uint32_t segment = 0, in_segment = 0;
    };
    static std::vector<OfSite> of_sites;
    std::vector<Queued>& queue = queues[warp];
    const size_t begin = queue.size();
    of_sites.resize(std::max(of_sites.size(), kernel->sites.size()));
    const unsigned first = warp * LANES, last = std::min(first + LANES, threads_in_block);
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> round_numbers;   // {segment, executions / UNROLL} -> round
    for (unsigned t = first; t < last; t++) {
        const unsigned lane = t - first;
        for (const Event& event : threads[t].events) {
            OfSite& of_site = of_sites[event.site];
            if (of_site.lane != lane) of_site.accesses = 0;
            of_site.lane = lane;
            const unsigned nth = of_site.accesses++;
            if (nth == of_site.requests.size()) {
                of_site.in_segment = nth > 0 && of_site.segment == event.segment ? of_site.in_segment + 1 : 0;
                of_site.segment = event.segment;
                const auto [place, is_new] =
                    round_numbers.try_emplace({event.segment, of_site.in_segment / UNROLL}, rounds[warp]);
                rounds[warp] += is_new;
                const unsigned bytes = kernel->sites[event.site].bytes;
                of_site.requests.push_back(static_cast<uint32_t>(queue.size()));
                queue.push_back({event.site, place->second, bytes, {}});
                queue.back().request.bytes = bytes;
            }
            Request& request = queue[of_site.requests[nth]].request;
            request.address[lane] = event.address;
            request.active |= 1u << lane;
        }
        threads[t].events.clear();
        threads[t].segment++;
    }
    queued_requests += queue.size() - begin;
    for (size_t i = begin; i < queue.size(); i++) {
        OfSite& of_site = of_sites[queue[i].site];
        const Site& site = kernel->sites[queue[i].site];
        const bool is_shared_load = site.space == Space::SHARED && site.access == Access::LOAD;
        if (is_shared_load && site.by == By::THREAD && !of_site.requests.empty()) merge(queue, of_site.requests);
        of_site.requests.clear();
        of_site.lane = LANES;
    }
}

// Counts the queued requests: the warps in turn, one request each, because they run at the same time.
static void count_queued() {
    static std::vector<std::vector<Level>> levels;
    levels.resize(std::max<size_t>(levels.size(), warps()));
    for (unsigned warp = 0; warp < warps(); warp++) levels[warp].assign(rounds[warp], NO_WAIT);
    queued_requests = 0;
    bool is_more = true;
    for (size_t n = 0; is_more; n++) {
        is_more = false;
        for (unsigned warp = 0; warp < warps(); warp++) {
            if (n >= queues[warp].size()) continue;
            is_more = true;
            const Queued& queued = queues[warp][n];
            Level& level = levels[warp][queued.round];
            level = std::max(level, account(queued));
        }
    }
    // The warp that waits longest, by rough latencies.
    std::array<uint64_t, 6> longest{};
    uint64_t most = 0;
    for (unsigned warp = 0; warp < warps(); warp++) {
        constexpr uint64_t weights[] = {0, 1, 1, 8, 20, 1};
        std::array<uint64_t, 6> waits{};
        for (Level level : levels[warp]) {
            waits[level]++;
            kernel->totals.rounds += level >= WAIT_L1;
        }
        waits[5] = exchanges[warp];
        uint64_t sum = 0;
        for (size_t i = 0; i < waits.size(); i++) sum += weights[i] * waits[i];
        if (sum > most) longest = waits;
        most = std::max(most, sum);
        queues[warp].clear();
        rounds[warp] = exchanges[warp] = 0;
    }
    Totals& totals = kernel->totals;
    totals.waits_shared += longest[WAIT_SHARED];
    totals.waits_l1 += longest[WAIT_L1];
    totals.waits_l2 += longest[WAIT_L2];
    totals.waits_memory += longest[WAIT_MEMORY];
    totals.exchanges += longest[5];
}

// Counts all requests since the last barrier.
static void drain() {
    for (unsigned warp = 0; warp < warps(); warp++) flush(warp);
    count_queued();
}

// ==== launches and blocks ================================================================================

static std::string setting(const char* name) { return getenv(name) != nullptr ? getenv(name) : ""; }
static bool counts() { return from.empty() || from_launches > 0; }

static void open() {
    if (std::exchange(is_open, true)) return;
    start = std::chrono::steady_clock::now();
    card_ = cuda_cpu::card() != nullptr ? cuda_cpu::card() : cuda_cpu::find_card("h100");
    is_sample = setting("INSPECT_MODE") == "sample";
    is_whole = !is_sample && setting("INSPECT_MODE") != "few";
    only = setting("INSPECT_KERNEL");
    from = setting("INSPECT_FROM");
    seconds = atof(setting("INSPECT_SECONDS").c_str());
    std::istringstream names(setting("INSPECT_EXCEPT"));
    for (std::string name; names >> name;) except.insert(name);
    std::istringstream addresses(setting("INSPECT_REMOVE"));
    for (uintptr_t pc; addresses >> std::hex >> pc;) removed.insert(pc);
    if (std::ifstream file(setting("INSPECT_REGISTERS")); file) registers = json::parse(file);
    atexit([] { write("at its end"); });
    void* frame = nullptr;
    backtrace(&frame, 1);   // loads libgcc, which a signal handler must not do
    struct sigaction action = {};
    action.sa_sigaction = invalid_address;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
}

static void end_if_late() {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (seconds > 0 && passed.count() > seconds)
        end_program("after " + std::to_string(static_cast<int>(seconds)) + " s (--seconds)");
}

// Returns the Kernel of a launch. Launches with the same function, NVTX range, grid, block, dynamic shared memory,
// integer arguments and null pointers share one.
static Kernel* find_kernel(const LaunchShape& shape, const std::string& range) {
    const std::array<unsigned, 6> sizes{shape.grid[0],  shape.grid[1],  shape.grid[2],
                                        shape.block[0], shape.block[1], shape.block[2]};
    const auto [place, is_new] =
        by_shape.try_emplace({shape.kernel, range, sizes, shape.dynamic_shared, shape.variant.integers,
                              shape.variant.pointers}, nullptr);
    if (is_new) {
        kernels.push_back(std::make_unique<Kernel>(Kernel{shape, shape.symbol, range, kernels.size()}));
        place->second = kernels.back().get();
    }
    return place->second;
}

// Returns how many blocks of this kernel fit into a multiprocessor's register file; no limit if the count is unknown.
static uint64_t blocks_by_registers() {
    constexpr uint64_t no_limit = std::numeric_limits<uint64_t>::max();
    const auto found = registers.find(kernel->symbol);
    if (found == registers.end()) return no_limit;
    constexpr unsigned file = 64 * 1024, granularity = 256, quarters = 4;   // as in estimate.py's resident_blocks()
    const unsigned of_thread = (*found)["registers"];
    const unsigned of_warp = (of_thread * LANES + granularity - 1) / granularity * granularity;
    const unsigned warps = (kernel->threads() + LANES - 1) / LANES;
    return of_warp == 0 ? no_limit : file / of_warp / quarters * quarters / warps;
}

static uint64_t shared_bytes_of_block() {
    const size_t bytes = kernel->shape.dynamic_shared + kernel->static_shared();
    return bytes + card_->capability.reserved_shared_per_block;
}

// Returns how many blocks are resident on a multiprocessor.
static uint64_t resident_blocks() {
    const cuda_cpu::Capability& c = card_->capability;
    const uint64_t limits[] = {c.threads_per_multiprocessor / kernel->threads(),
                               static_cast<uint64_t>(c.blocks_per_multiprocessor),
                               c.shared_per_multiprocessor / std::max<uint64_t>(1, shared_bytes_of_block()),
                               blocks_by_registers()};
    return std::max<uint64_t>(1, *std::min_element(std::begin(limits), std::end(limits)));
}

// Returns the bytes of L1 per block when as many blocks are resident on a multiprocessor as fit.
static uint64_t l1_bytes_per_block() {
    constexpr size_t least = 16 * cuda_cpu::kib;
    const size_t all = card_->capability.l1_and_shared;
    return (all - std::min(all - least, resident_blocks() * shared_bytes_of_block())) / resident_blocks();
}

bool begin_launch(const LaunchShape& shape) {
    open();
    end_if_late();
    const std::string range = strcmp(shape.range, no_range) == 0 ? "" : shape.range;
    if (!from.empty() && range == from && ++from_launches == 2)
        end_program("after one pass from " + from + " to the next");
    records_launch = false;
    next_number = 0;
    kernel = find_kernel(shape, range);
    if (!counts()) return false;
    kernel->launches++;
    sequence.push_back({"kernel", kernel->number});
    const bool is_wanted = except.count(range) == 0 && (range.find(only) != std::string::npos ||
                                                        kernel->symbol.find(only) != std::string::npos);
    records_launch = records_launches && is_wanted && !kernel->recorded;
    if (!records_launch) return false;
    kernel->recorded = true;
    global_shadow.clear();
    released.clear();
    at_grid_barrier.clear();
    atomics.clear();
    kernel->wave = std::min(kernel->blocks(), resident_blocks() * card_->multiprocessors);
    l2.reset(card_->l2_bytes, kernel->wave);
    kernel->after_block.clear();
    kernel->numbers.clear();
    return true;
}

// Returns whether the launch's next block is recorded, only run, or skipped.
Run next_block() {
    end_if_late();
    const uint64_t number = next_number++;
    // The program may depend on the result of a kernel with a single block, so such a block always runs.
    const Run otherwise = is_sample && kernel->blocks() > 1 ? Run::STOP : Run::UNRECORDED;
    if (!records_launch) return otherwise;
    if (number == 0) return Run::RECORDED;
    const LaunchShape& shape = kernel->shape;
    const bool has_rows = shape.grid[1] * shape.grid[2] > 1 && (is_sample || shape.grid[0] <= MAX_ROW);
    const uint64_t row = has_rows ? shape.grid[0] : 1;
    const Limits& limits = is_whole ? IN_A_PROGRAM : IN_A_STEP;
    const bool row_is_done = number % row == 0;
    const bool enough = number >= std::min(limits.blocks, 2 * row + 6) && row_is_done &&
                        kernel->accesses >= limits.accesses;
    const bool too_many = kernel->accesses >= (row_is_done ? limits.too_many : limits.far_too_many);
    if (!enough && !too_many) return Run::RECORDED;
    // Few blocks of a large grid: also block 1 and the first one of the second row.
    if (row < 3 || kernel->recorded_blocks > 2 || number > row) return otherwise;
    if (number == 1 || number == row) return Run::RECORDED;
    return is_sample ? Run::SKIPPED : Run::UNRECORDED;
}

void begin_block(uint64_t number) {
    block = static_cast<unsigned>(number);
    current = 0;
    threads_in_block = kernel->threads();
    first_engine = warps() * LANES;
    threads.clear();
    threads.resize(threads_in_block);
    shared_shadow.clear();
    written.assign(memory.shared_bytes() / GRANULE + 1, 0);
    syncs.clear();
    acquired.clear();
    released_in_block.clear();
    boxes.clear();
    wgmmas.clear();
    wgmma_ticks.assign(threads_in_block / LANES + 1, 0);
    queues.resize(std::max<size_t>(queues.size(), warps()));
    rounds.assign(warps(), 0);
    exchanges.assign(warps(), 0);
    l1.reset(l1_bytes_per_block());
    l2.begin_block(number);
    recording = true;
}

// Returns the requests of the launch to the region with most atomics. A region that several recorded blocks access is
// assumed to be accessed by the others as well.
static double hot_atomics() {
    const double scale = static_cast<double>(kernel->blocks()) / static_cast<double>(kernel->recorded_blocks);
    double most = 0;
    for (const auto& [region, found] : atomics)
        most = std::max(most, static_cast<double>(found.requests) * (found.blocks > 1 ? scale : 1));
    return most;
}

static void complete_copies(size_t count, Tick tick);
void end_block() {
    recording = false;
    for (current = 0; current < threads_in_block; current++) complete_copies(me().copies.size(), NEVER);
    current = 0;
    drain();
    kernel->recorded_blocks++;
    kernel->numbers.push_back(block);
    kernel->arrays.insert(memory.accessed.begin(), memory.accessed.end());
    memory.accessed.clear();
    kernel->after_block.push_back(kernel->totals);
    kernel->hot_atomics = hot_atomics();
}

void product(const Product& product) {
    if (!counts()) return;
    open();
    sequence.push_back({"matmul", products.size()});
    products.push_back(product);
}

void record_launches(bool at_launches) { records_launches = at_launches; }
bool only_counts() { return setting("INSPECT_MODE") == "sample"; }
void fatal_error(const char* why) { write(why); }

// Returns the sums over all launches since the last call, and deletes their kernels. Kernels with hazards stay, so that
// they are in the recording; their `launches` is 0 from then on.
Figures take_figures() {
    Figures all;
    for (auto& kernel : kernels) {
        const double of_all = static_cast<double>(std::exchange(kernel->launches, 0));
        if (of_all == 0) continue;
        const double recorded = static_cast<double>(std::max<uint64_t>(1, kernel->recorded_blocks));
        const double scale = of_all * static_cast<double>(kernel->blocks()) / recorded;
        for (const Site& site : kernel->sites) {
            all.sectors += scale * static_cast<double>(site.sectors);
            all.least_sectors += scale * static_cast<double>(site.least_sectors);
            all.wavefronts += scale * static_cast<double>(site.wavefronts);
            all.least_wavefronts += scale * static_cast<double>(site.least_wavefronts);
        }
        all.memory_bytes += of_all * SECTOR * (memory_loads(*kernel) +
                                               of_launch(*kernel, &Totals::dram_store));
        all.hazards += kernel->hazards();
    }
    const auto is_clean = [](const auto& kernel) { return kernel->hazards() == 0; };
    kernels.erase(std::remove_if(kernels.begin(), kernels.end(), is_clean), kernels.end());
    by_shape.clear();
    sequence.clear();
    kernel = nullptr;
    return all;
}

// ---- device memory and threads

void shared_memory(const void* dynamic, size_t bytes) { memory.set_dynamic(dynamic, bytes); }
void shared_array(const void* place, size_t bytes, const char* name) { memory.add_array(place, bytes, name); }
void variable(const void* place, size_t bytes, const char* name, bool is_writable) {
    memory.add_variable(place, bytes, name, is_writable);
}
void allocated(const void* place, size_t bytes) {
    open();
    memory.add_allocation(place, bytes);
}
void device_works(bool begins, const void* frame) {
    HostMemory::of_program().device_works(begins, frame);
    if (frame != nullptr) memory.forget_gaps();
}
void freed(const void* place) { memory.remove_allocation(place); }
void registered(const void* place, size_t bytes) { HostMemory::registered(place, bytes); }

void thread_resumed(unsigned thread) { current = thread; }
void thread_started(unsigned thread) {
    if (recording) threads[thread].stack = 0;
}
void thread_ended(unsigned thread) {
    if (recording) threads[thread].is_over = true;
}
__attribute__((noinline)) const void* call_site() { return __builtin_return_address(0); }

// ==== synchronisation ====================================================================================

bool is_removed(const char* name, const void* site) {
    if (!recording) return false;
    const Pause pause;
    kernel->syncs.insert({name, number_of(site), me().stack});
    return removed.count(number_of(site)) > 0;
}

// Records that all these threads have reached this point. Unlike meet(), this does not order their accesses: the
// lanes of a warp execute an instruction such as ldmatrix together, but it is not a memory fence.
static void pass(const std::vector<unsigned>& group) {
    std::vector<Moment> moments;
    for (unsigned t : group) moments.push_back({threads[t].passed, t, threads[t].step});
    const Clock all = join(moments, actors());
    for (unsigned t : group) {
        threads[t].passed = all;
        threads[t].step++;
    }
}

// Synchronises these threads: each gets the maximum of their clocks.
static void meet(const std::vector<unsigned>& group) {
    std::vector<Moment> moments;
    Clock fenced, released, released_in_block;
    for (unsigned t : group) {
        moments.push_back(moment_of(t));
        fenced = join(fenced, threads[t].fenced);
        released = join(released, threads[t].released);
        released_in_block = join(released_in_block, threads[t].released_in_block);
    }
    const Clock all = join(moments, actors());
    for (unsigned t : group) {
        threads[t].clock = all;
        threads[t].fenced = fenced;
        threads[t].released = released;
        threads[t].released_in_block = released_in_block;
        threads[t].own++;
        threads[t].registers.drop_all();
    }
    pass(group);
}

// __syncthreads: orders the accesses of all threads of the block, also of those that have exited.
void barrier_completed(const char*) {
    if (!recording) return;
    const Pause pause;
    std::vector<unsigned> all;
    for (unsigned t = 0; t < threads_in_block; t++) all.push_back(t);
    meet(all);
    drain();
    kernel->totals.barriers++;
}

// The block waits for the grid: as at __syncthreads, but other blocks run until it resumes.
void suspend_block() {
    if (!recording) return;
    barrier_completed("grid.sync");
    recording = false;
    arriving[block] = threads[0].clock;
    suspended[block] = {std::move(threads), written, std::move(syncs), std::move(acquired), std::move(shared_shadow)};
}
void resume_block(uint64_t number) {
    const auto found = suspended.find(static_cast<unsigned>(number));
    if (found == suspended.end()) return;
    block = found->first;
    Suspended& state = found->second;
    threads = std::move(state.threads);
    written = std::move(state.written);
    syncs = std::move(state.syncs);
    acquired = std::move(state.acquired);
    shared_shadow = std::move(state.shadow);
    suspended.erase(found);
    l1.reset(l1_bytes_per_block());
    recording = true;
}
void grid_completed() { at_grid_barrier = std::exchange(arriving, {}); }

// Shuffles, votes and __syncwarp order the accesses of the lanes; tensor-core instructions do not.
void collective_completed(unsigned first, unsigned lanes, const char* name) {
    if (!recording) return;
    const Pause pause;
    uint32_t alive = 0;
    for (unsigned lane = 0; lane < LANES && first + lane < threads_in_block; lane++)
        if (!threads[first + lane].is_over) alive |= 1u << lane;
    std::vector<unsigned> group;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1)
        group.push_back(first + static_cast<unsigned>(__builtin_ctz(rest)));
    if (name[0] == '_') meet(group);
    else pass(group);
    exchanges[first / LANES]++;
    if (lanes == alive) flush(first / LANES);
    constexpr size_t most = 1 << 16;   // a kernel without barriers must not fill the memory
    if (queued_requests > most) count_queued();
}

// __threadfence, __threadfence_block
void fence(bool of_block) {
    if (!recording) return;
    const Pause pause;
    me().released_in_block = join({moment_of(current)}, actors());
    if (!of_block) me().released = me().released_in_block;
    me().own++;
    me().registers.drop_all();
}

// fence.proxy.async
void proxy_fence() {
    if (!recording) return;
    const Pause pause;
    me().fenced = join(me().fenced, join({moment_of(current)}, actors()));
    me().own++;
    me().registers.drop_all();
}

static Sync& sync_of(const void* barrier) {
    const auto [place, is_new] = syncs.try_emplace(barrier);
    if (is_new) place->second.slot = static_cast<unsigned>(syncs.size() - 1) % ENGINES;
    return place->second;
}

// Records an access to an mbarrier, whose 8 bytes of shared memory one thread must initialise before other threads use
// them. Returns the site; NONE for a named barrier, which is not in memory.
static uint32_t touch_barrier(const void* barrier, Kind kind, const void* pc) {
    const Place place = memory.find(barrier);
    if (place.space != Space::SHARED) return NONE;
    const Access access = kind == Kind::WRITE ? Access::STORE : Access::LOAD;
    const uint32_t number = find_site(number_of(pc), 0, sizeof(uint64_t), place.space, access, By::ATOMIC);
    touch(place.space, place.at, sizeof(uint64_t),
          {moment_of(current), current, me().own, kind, false, nullptr, number, current});
    return number;
}

void mbarrier_initialised(const void* barrier, const void* site) {
    if (!recording) return;
    const Pause pause;
    syncs.erase(barrier);
    touch_barrier(barrier, Kind::WRITE, site);
}

void arrived(const void* barrier, const void* site) {
    if (!recording) return;
    const Pause pause;
    touch_barrier(barrier, Kind::ATOMIC, site);
    Sync& sync = sync_of(barrier);
    sync.arriving = join(sync.arriving, join({moment_of(current)}, actors()));
    sync.arriving_fenced = join(sync.arriving_fenced, me().fenced);
    sync.arriving_passed = join(sync.arriving_passed, join({{me().passed, current, me().step}}, actors()));
    me().own++;
    me().step++;
    me().registers.drop_all();
}

// Ends a phase of an mbarrier, and with it the TMA copies that the phase counts. A wait specifies only the parity of a
// phase, so a thread that waits for the previous phase must have seen its end by now. Otherwise the wait may begin
// after this phase: it then sees the parity from before the previous phase and blocks until the next phase ends.
void phase_completed(const void* barrier, unsigned parity) {
    if (!recording) return;
    const Pause pause;
    Sync& sync = sync_of(barrier);
    const Moment ends{sync.arriving_passed, NONE, 0};
    for (const Waiter& waiter : sync.waiters)
        if (!ends.covers(waiter.thread / LANES * LANES, 1u << waiter.thread % LANES, waiter.step))
            add(kernel->races, Space::SHARED, 0, {waiter.site, Access::LOAD, waiter.thread, block},
                {waiter.site, Access::STORE, current, block},
                "the wait may begin after the next phase too: it then sees the old parity and blocks");
    sync.waiters.clear();
    sync.phases++;
    sync.arriving = join({{sync.arriving, first_engine + sync.slot, sync.phases}}, actors());
    sync.ended[parity] = sync.arriving;
    sync.ended_fenced[parity] = sync.arriving_fenced;
    sync.ended_passed[parity] = sync.arriving_passed;
}

void waited(const void* barrier, unsigned parity, const void* site) {
    if (!recording) return;
    const Pause pause;
    const uint32_t number = touch_barrier(barrier, Kind::ATOMIC, site);
    Sync& sync = sync_of(barrier);
    me().clock = join(me().clock, sync.ended[parity]);
    me().fenced = join(me().fenced, sync.ended_fenced[parity]);
    me().passed = join(me().passed, sync.ended_passed[parity]);
    me().registers.drop_all();
    if (number != NONE) sync.waiters.push_back({current, me().step, number});
}

// ==== PTX instructions ===================================================================================

// cp.async reads and writes at an unspecified time between the instruction and the wait.
void cp_async(const void* to, size_t bytes, const void* from, size_t filled, const void* site) {
    if (!recording) return;
    const Pause pause;
    Thread& t = me();
    const auto width = static_cast<unsigned>(bytes);
    const uintptr_t pc = number_of(site);
    const uint64_t target = memory.find(to).at;
    const Moment issued = moment_of(current);
    const uint32_t store = find_site(pc, 0, width, Space::SHARED, Access::STORE, By::COPY_ASYNC);
    t.events.push_back({target, store, t.segment});
    if (filled > 0) {
        const Place source = memory.find(from);
        const uint32_t load = find_site(pc, 0, width, Space::GLOBAL, Access::LOAD, By::COPY_ASYNC);
        if (source.space == Space::GUARD) add_out_of_bounds(source, load, Access::LOAD, "");
        t.events.push_back({source.at, load, t.segment});
        touch(Space::GLOBAL, source.at, static_cast<unsigned>(filled),
              {issued, current, t.own, Kind::READ, true, nullptr, load, current});
    }
    t.own++;
    t.copies.push_back({issued, target, width, store, t.copy_groups});
}

void cp_async_commit() {
    if (recording) me().copy_groups++;
}

// Completes the thread's first `count` cp.async copies. Their writes happen before accesses after that tick.
static void complete_copies(size_t count, Tick tick) {
    Thread& t = me();
    for (size_t i = 0; i < count; i++) {
        const PendingCopy& copy = t.copies[i];
        touch(Space::SHARED, copy.to, copy.bytes,
              {copy.moment, current, tick, Kind::WRITE, true, nullptr, copy.site, current});
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(count));
}

void cp_async_wait(unsigned pending) {
    if (!recording) return;
    const Pause pause;
    const Thread& t = me();
    size_t done = 0;
    while (done < t.copies.size() && t.copies[done].group + pending < t.copy_groups) done++;
    complete_copies(done, t.own);
}

// Begins a TMA copy. The actor of its accesses is the mbarrier that counts the bytes; the tick is the current phase.
unsigned load_issued(const void* barrier, const void* site) {
    if (!recording) return 0;
    const Pause pause;
    Box box{moment_of(current), 0, 0, barrier, {}, {}};
    box.store_site = find_site(number_of(site), 0, GRANULE, Space::SHARED, Access::STORE, By::COPY_ENGINE);
    box.load_site = find_site(number_of(site), 0, GRANULE, Space::GLOBAL, Access::LOAD, By::COPY_ENGINE);
    me().own++;
    boxes.push_back(std::move(box));
    return static_cast<unsigned>(boxes.size() - 1);
}

void load_chunk(unsigned box, const void* to, const void* from) {
    if (!recording) return;
    const Pause pause;
    boxes[box].to.push_back(memory.find(to).at);
    if (from != nullptr) boxes[box].from.push_back(memory.find(from).at);
}

void load_completed(unsigned number) {
    if (!recording) return;
    const Pause pause;
    Box& box = boxes[number];
    const Sync& sync = sync_of(box.barrier);
    const unsigned engine = first_engine + sync.slot, issuer = box.moment.actor;
    const Tick tick = sync.phases + 1;
    const NewAccess store{box.moment, engine, tick, Kind::WRITE, false, nullptr, box.store_site, issuer};
    const NewAccess load{box.moment, engine, tick, Kind::READ, false, nullptr, box.load_site, issuer};
    for (uint64_t at : box.to) touch(Space::SHARED, at, GRANULE, store);
    for (uint64_t at : box.from) touch(Space::GLOBAL, at, GRANULE, load);
    account_bulk(kernel->sites[box.store_site], box.to);
    account_bulk(kernel->sites[box.load_site], box.from);
    box = {};
}

// wgmma reads its operands at an unspecified time between the instruction and the wait. It is an instruction of the
// whole warp, so it starts with the maximum of its lanes' clocks.
unsigned wgmma_issued(unsigned warp, uint64_t flops, const void* site) {
    if (!recording) return 0;
    const Pause pause;
    kernel->totals.flops += flops;
    std::vector<Moment> lanes;
    WgmmaProduct product;
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++) {
        lanes.push_back(moment_of(t));
        product.fenced = join(product.fenced, threads[t].fenced);
        threads[t].own++;
    }
    product.moment = {join(lanes, actors()), warp * LANES, lanes[0].own};
    product.warp = warp;
    product.site = find_site(number_of(site), 0, GRANULE, Space::SHARED, Access::LOAD, By::WGMMA);
    wgmmas.push_back(std::move(product));
    return static_cast<unsigned>(wgmmas.size() - 1);
}

void wgmma_reads(unsigned product, const void* address, Operand operand) {
    if (!recording) return;
    const Pause pause;
    (operand == Operand::A ? wgmmas[product].a : wgmmas[product].b).push_back(memory.find(address).at);
}

void wgmma_completed(unsigned number) {
    if (!recording) return;
    const Pause pause;
    WgmmaProduct& product = wgmmas[number];
    const Tick tick = ++wgmma_ticks[product.warp];
    const NewAccess read{product.moment, wgmma_actor(product.warp), tick, Kind::READ, false, &product.fenced,
                         product.site, product.warp * LANES};
    for (uint64_t at : product.a) touch(Space::SHARED, at, GRANULE, read);
    for (uint64_t at : product.b) touch(Space::SHARED, at, GRANULE, read);
    Site& site = kernel->sites[product.site];
    if (!product.a.empty()) account_bulk(site, product.a);
    if (product.warp % 4 == 0) account_bulk(site, product.b);   // the four warps of a warpgroup share one read of B
    product = {};
}

void wgmma_waited(unsigned warp) {
    if (!recording) return;
    const Pause pause;
    const Clock products = join({{nullptr, wgmma_actor(warp), wgmma_ticks[warp]}}, actors());
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++)
        threads[t].clock = join(threads[t].clock, products);
}

void tensor_flops(uint64_t flops) {
    if (recording) kernel->totals.flops += flops;
}
void special_function() {
    if (recording) kernel->totals.special++;
}

// Ends the block that runs when the program ends. Pending asynchronous accesses are recorded as never waited for.
static void end_unfinished_block() {
    recording = true;
    for (unsigned i = 0; i < wgmmas.size(); i++)
        if (!wgmmas[i].b.empty()) wgmma_completed(i);
    end_block();
}

// ==== the recording ==========================================================================================

static const char* name_of(Space space) { return space == Space::SHARED ? "shared" : "global"; }
static const char* name_of(Access access) { return access == Access::LOAD ? "load" : "store"; }

static json to_json(const Site& site) {
    json offsets = json::array();
    uint64_t base = ~uint64_t{0};
    const auto is_active = [&](unsigned lane) { return site.worst.active >> lane & 1; };
    for (unsigned lane = 0; lane < LANES; lane++)
        if (is_active(lane)) base = std::min(base, site.worst.address[lane] / LINE * LINE);
    for (unsigned lane = 0; lane < LANES; lane++)
        offsets.push_back(is_active(lane) ? static_cast<int64_t>(site.worst.address[lane] - base) : -1);
    json all = {{"stack", stacks.with_callers(site.pc, site.stack)}, {"part", site.part},
                {"space", name_of(site.space)}, {"access", name_of(site.access)},
                {"by", BY_NAMES[static_cast<int>(site.by)]}, {"bytes_per_lane", site.bytes},
                {"requests", site.requests}, {"lanes", site.lanes}, {"bytes", site.bytes_used},
                {"sectors", site.sectors}, {"least_sectors", site.least_sectors},
                {"wavefronts", site.wavefronts}, {"least_wavefronts", site.least_wavefronts},
                {"l1_hits", site.l1_hits}, {"dram_sectors", site.dram_sectors}};
    if (site.worst.active != 0) all["picture"] = {{"base", base}, {"offsets", offsets}};
    return all;
}

// sides: the number of accesses of each hazard.
static json to_json(const Kernel& kernel, const Hazards& hazards, size_t sides) {
    json all = json::array();
    for (const auto& [key, h] : hazards) {
        json accesses = json::array();
        for (const Side* side : {&h.later, &h.earlier}) {
            if (accesses.size() == sides) break;
            const Site& site = kernel.sites[side->site];
            accesses.push_back({{"stack", stacks.with_callers(site.pc, site.stack)}, {"block", side->block},
                                {"access", name_of(side->access)}, {"by", BY_NAMES[static_cast<int>(site.by)]},
                                {"thread", side->actor < kernel.threads() ? static_cast<int>(side->actor) : -1}});
        }
        all.push_back({{"memory", name_of(h.space)}, {"array", h.owner.name}, {"address", h.address},
                       {"allocation", h.owner.begin}, {"count", h.count}, {"why", std::get<std::string>(key)},
                       {"accesses", accesses}});
    }
    return all;
}

static json to_json(const Kernel& kernel) {
    json sites = json::array(), barriers = json::array();
    for (const Site& site : kernel.sites)
        if (site.requests > 0) sites.push_back(to_json(site));
    for (const auto& [name, pc, stack] : kernel.syncs)
        barriers.push_back({{"name", name}, {"stack", stacks.with_callers(pc, stack)}});
    const std::pair<const char*, uint64_t Totals::*> figures[] = {
        {"l2", &Totals::l2}, {"partial", &Totals::partial}, {"cycles", &Totals::cycles},
        {"cycles_of_16", &Totals::cycles_of_16}, {"tensor_flops", &Totals::flops}, {"special", &Totals::special},
        {"waits_shared", &Totals::waits_shared}, {"waits_l1", &Totals::waits_l1}, {"waits_l2", &Totals::waits_l2},
        {"waits_memory", &Totals::waits_memory}, {"exchanges", &Totals::exchanges}, {"barriers", &Totals::barriers},
        {"rounds", &Totals::rounds}};
    json launch = {{"dram_load", memory_loads(kernel) * SECTOR},
                   {"dram_store", of_launch(kernel, &Totals::dram_store) * SECTOR},
                   {"partial_fetched", of_launch(kernel, &Totals::partial_fetched) * SECTOR},
                   {"hot_atomics", kernel.hot_atomics}};
    for (const auto& [name, figure] : figures) launch[name] = of_launch(kernel, figure);
    return {{"symbol", kernel.symbol}, {"range", kernel.range}, {"grid", kernel.shape.grid},
            {"block", kernel.shape.block}, {"integers", kernel.shape.variant.integers},
            {"dynamic_shared", kernel.shape.dynamic_shared}, {"static_shared", kernel.static_shared()},
            {"launches", kernel.launches}, {"recorded_blocks", kernel.recorded_blocks}, {"blocks", kernel.blocks()},
            {"threads", kernel.threads()}, {"tensor_flops", kernel.totals.flops},
            {"launch", launch}, {"sites", sites}, {"races", to_json(kernel, kernel.races, 2)},
            {"uninitialised", to_json(kernel, kernel.uninitialised, 1)},
            {"out_of_bounds", to_json(kernel, kernel.out_of_bounds, 1)}, {"barriers", barriers}};
}

static void write(const std::string& ended) {
    if (is_written || !is_open || getenv("INSPECT_OUT") == nullptr) return;
    is_written = true;
    if (std::exchange(recording, false)) end_unfinished_block();
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    json all = {{"program", program}, {"card", card_->key}, {"ended", ended}, {"ended_at", ended_at},
                {"kernels", json::array()},
                {"matmuls", json::array()}, {"sequence", sequence}};
    for (const auto& kernel : kernels) all["kernels"].push_back(to_json(*kernel));
    for (const Product& p : products)
        all["matmuls"].push_back({{"m", p.m}, {"n", p.n}, {"k", p.k}, {"type", p.type}, {"out_bytes", p.out_bytes},
                                  {"accumulate", p.accumulate}, {"epilogue", p.epilogue}});
    std::ofstream(getenv("INSPECT_OUT")) << all.dump(1) << '\n';
}

static void entered(const void* caller) {
    if (!recording) return;
    const Pause pause;
    me().stack = stacks.call(me().stack, number_of(caller));
}
static void left() {
    if (recording) me().stack = stacks.caller(me().stack);
}
}  // namespace cuda_cpu::watch

// ==== calls by the compiler ==================================================================================

using cuda_cpu::watch::Access;
using cuda_cpu::watch::By;

#define INSPECT_ACCESS(name, kind, bytes)                                                                      \
    extern "C" void name(void* address) {                                                                      \
        cuda_cpu::watch::access(kind, By::THREAD, address, bytes, __builtin_return_address(0));                \
    }
#define INSPECT_WIDTH(bytes)                                                 \
    INSPECT_ACCESS(__tsan_read##bytes, Access::LOAD, bytes)                  \
    INSPECT_ACCESS(__tsan_write##bytes, Access::STORE, bytes)                \
    INSPECT_ACCESS(__tsan_unaligned_read##bytes, Access::LOAD, bytes)        \
    INSPECT_ACCESS(__tsan_unaligned_write##bytes, Access::STORE, bytes)      \
    INSPECT_ACCESS(__tsan_volatile_read##bytes, Access::LOAD, bytes)         \
    INSPECT_ACCESS(__tsan_volatile_write##bytes, Access::STORE, bytes)
INSPECT_WIDTH(1)
INSPECT_WIDTH(2)
INSPECT_WIDTH(4)
INSPECT_WIDTH(8)
INSPECT_WIDTH(16)

extern "C" void __tsan_read_range(void* address, size_t bytes) {
    cuda_cpu::watch::access(Access::LOAD, By::THREAD, address, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
    cuda_cpu::watch::access(Access::STORE, By::THREAD, address, bytes, __builtin_return_address(0));
}
// Called with -fsanitize=bounds: an index outside of an array with a constant size, as GCC describes it.
struct WrongIndex {
    struct Type {
        uint16_t kind, info;
        char name[];
    };
    const char* file;
    uint32_t line, column;
    const Type *array_type, *index_type;
};
extern "C" void __ubsan_handle_out_of_bounds(const WrongIndex* wrong, uintptr_t index) {
    cuda_cpu::watch::wrong_index(wrong->array_type->name, static_cast<int64_t>(index), __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void* caller) { cuda_cpu::watch::entered(caller); }
extern "C" void __tsan_func_exit() { cuda_cpu::watch::left(); }
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

static void accessed_atomically(const volatile void* place, size_t bytes, const void* pc,
                                Access access = Access::STORE) {
    cuda_cpu::watch::access(access, By::ATOMIC, const_cast<const void*>(place), bytes, pc);
}

// Relaxed loads are not recorded: dev/cpu implements some atomics by a load and a compare-and-exchange loop.
#define INSPECT_ATOMIC_OP(bits, result, name, operation, ...)                                                   \
    extern "C" result __tsan_atomic##bits##_##name(volatile uint##bits##_t* place, __VA_ARGS__, int) {          \
        accessed_atomically(place, bits / 8, __builtin_return_address(0));                                      \
        return operation;                                                                                       \
    }
#define INSPECT_ATOMIC_CHANGE(bits, name, change)                                                               \
    INSPECT_ATOMIC_OP(bits, uint##bits##_t, name, change(place, value, __ATOMIC_SEQ_CST), uint##bits##_t value)
#define INSPECT_ATOMIC_COMPARE(bits, name)                                                                      \
    INSPECT_ATOMIC_OP(bits, int, name, __atomic_compare_exchange_n(place, old, value, false, __ATOMIC_SEQ_CST,  \
                                                                   __ATOMIC_SEQ_CST),                           \
                      uint##bits##_t* old, uint##bits##_t value, int)
#define INSPECT_ATOMIC(bits)                                                                                    \
    extern "C" uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* place, int order) {     \
        if (order != __ATOMIC_RELAXED)                                                                          \
            accessed_atomically(place, bits / 8, __builtin_return_address(0), Access::LOAD);                    \
        return __atomic_load_n(place, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                           \
    extern "C" void __tsan_atomic##bits##_store(volatile uint##bits##_t* place, uint##bits##_t value, int) {    \
        cuda_cpu::watch::overwritten(place, bits / 8);                                                          \
        accessed_atomically(place, bits / 8, __builtin_return_address(0));                                      \
        __atomic_store_n(place, value, __ATOMIC_SEQ_CST);                                                       \
    }                                                                                                           \
    INSPECT_ATOMIC_COMPARE(bits, compare_exchange_strong)                                                       \
    INSPECT_ATOMIC_COMPARE(bits, compare_exchange_weak)                                                         \
    INSPECT_ATOMIC_CHANGE(bits, exchange, __atomic_exchange_n)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_add, __atomic_fetch_add)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_sub, __atomic_fetch_sub)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_and, __atomic_fetch_and)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_or, __atomic_fetch_or)                                                    \
    INSPECT_ATOMIC_CHANGE(bits, fetch_xor, __atomic_fetch_xor)
INSPECT_ATOMIC(8)
INSPECT_ATOMIC(16)
INSPECT_ATOMIC(32)
INSPECT_ATOMIC(64)
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

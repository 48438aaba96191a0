// Records the memory accesses of a program's kernels, for dev/inspect:
//
//   - The program is compiled with -fsanitize=thread but not linked with that sanitizer. This file has the functions
//     that it calls at each load, store, function entry and exit. The emulator calls the functions of dev/cpu/watch.h.
//   - The accesses of a thread are buffered until its warp synchronises. The n-th access of an instruction by each lane
//     of the warp then forms a request: requests.h counts its sectors and wavefronts, caches.h its hits.
//   - Each access is also compared with earlier accesses to the same bytes, to find races: clocks.h, shadow.h.
//   - When the program ends, the recording is written to a JSON file, which report.py reads.
#define CUDA_CPU_INSPECT
#include "../cpu/watch.h"

#define WARP_SIZE 32
#include "../cpu/card.h"
#include "../cpu/host_memory.h"

#include "caches.h"
#include "requests.h"
#include "shadow.h"

#include <chrono>
#include <cmath>
#include <csignal>
#include <sys/time.h>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

extern "C" char __executable_start, _end;   // of the program, defined by the linker

namespace cuda_cpu::watch {
using namespace inspect;
using json = nlohmann::ordered_json;

constexpr const char* ACCESS_NAMES[] = {"load", "store", "wait"};
constexpr const char* BY_NAMES[] = {"thread", "atomic", "ldmatrix", "cp.async", "copy engine", "wgmma"};

// How much of a launch is recorded: at least `blocks` blocks and `accesses` accesses, at most `too_many` accesses. With
// a second dimension, the work of a block may depend on blockIdx.x (as in attention). So whole rows of blocks, in a
// whole program of up to MAX_ROW, are recorded until `far_too_many` accesses. If one or two blocks reach the limit,
// these are blocks 0 and 1, and the first one of the second row is recorded too: see memory_loads().
struct Limits {
    uint64_t blocks, accesses, too_many, far_too_many;
};
constexpr uint64_t MAX_ROW = 256;
constexpr Limits IN_A_STEP{8, 1 << 18, 1 << 20, 8 << 20};
static Limits in_a_program{8, 1 << 24, 1 << 25, 1 << 26};   // INSPECT_ACCESSES
// In a whole program, further blocks of each launch are not counted but checked for races and uninitialised reads, with
// half as many accesses: see is_checked(). The accesses of all other blocks are only compared with the allocations.
constexpr uint64_t LEAST_CHECKED = 4;

// ==== addresses ==========================================================================================

enum class Space : uint8_t { OTHER, SHARED, GLOBAL, HOST };
struct Place {
    Space space;
    uint64_t at;   // offset in shared memory, or in global memory, where allocations follow one another
    bool is_outside = false;   // next to an array, allocation or variable
};

static uintptr_t number_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// Translates host addresses to emulated GPU addresses. They are equal in every run, so the cache model is reproducible.
extern "C" char inspect_guards __attribute__((weak));
class Memory {
public:
    // Dynamic shared memory, a static array, an allocation or a variable.
    struct Range {
        uintptr_t begin = 0;
        size_t bytes = 0;
        Space space = Space::OTHER;   // OTHER: a variable of the emulator, or no device memory
        uint64_t at = 0;
        const char* name = "";   // mangled, of a static array or a variable of the user
        uint64_t guard = 0;      // unused bytes before and after it
        uintptr_t site = 0;      // of an allocation: the call
        bool has(uintptr_t p) const { return p - begin < bytes; }
        uint64_t distance(uintptr_t p) const { return has(p) ? 0 : p < begin ? begin - p : p - begin - bytes + 1; }
        bool is_near(uintptr_t p, size_t size) const {   // overlaps with its guards
            return begin - guard < p + size && p < begin + bytes + guard;
        }
    };

    static constexpr uint64_t STATIC_ARRAYS = cuda_cpu::hopper.l1_and_shared;   // offset: after dynamic shared memory

    void set_dynamic(const void* place, size_t bytes) {
        all_dynamic_ = dynamic_ = {number_of(place), bytes, Space::SHARED};
    }
    void set_dynamic_bytes(size_t of_launch) { dynamic_.bytes = of_launch; }
    void add_array(const void* place, size_t bytes, const char* name) {
        add({number_of(place), bytes, Space::SHARED, next_array_, name, VARIABLE_GUARD}, next_array_, 0, LINE);
    }
    void add_allocation(const void* place, size_t bytes, uintptr_t site) {
        constexpr uint64_t page = 1 << 21;   // a GPU's page size
        add({number_of(place), bytes, Space::GLOBAL, next_, "", guard_bytes, site}, next_, guard_bytes, page);
    }
    // Variables have addresses of their own, so that those of allocations do not depend on them.
    void add_variable(const void* place, size_t bytes, const char* name, bool is_writable) {
        const Space space = name[0] != '\0' ? Space::GLOBAL : Space::OTHER;
        const uint64_t guard = space == Space::GLOBAL && is_writable ? VARIABLE_GUARD : 0;
        add({number_of(place), bytes, space, next_variable_, name, guard}, next_variable_, VARIABLE_GUARD, LINE);
    }
    void remove_allocation(const void* place) {
        ranges_.erase(number_of(place));
        recent_ = {};
    }
    void forget_gaps() { recent_ = {}; }   // the host may have allocated memory there

    // Fast test: returns true only if find() would find no error, but not in every such case.
    bool is_recent(uintptr_t p, size_t bytes) const {
        const Range& recent = recent_[p / PAGE % recent_.size()];
        return recent.has(p) && recent.has(p + bytes - 1);
    }
    Place find(const void* address) {
        const uintptr_t p = number_of(address), page = p / PAGE * PAGE;
        Range& recent = recent_[p / PAGE % recent_.size()];
        if (all_dynamic_.has(p)) {
            last_ = &dynamic_;
        } else if (recent.has(p)) {
            last_ = &recent;
        } else if (last_ = nearest(p, 1); last_ == nullptr) {
            HostMemory& host = HostMemory::of_program();
            if (host.overlaps(p, 1)) return {Space::HOST, 0};
            // Many instrumented accesses are to a thread's stack or to the emulator's own data.
            if (nearest(page, PAGE) == nullptr && !all_dynamic_.is_near(page, PAGE) && !host.overlaps(page, PAGE))
                recent = {page, PAGE};
            return {Space::OTHER, 0};
        } else if (last_->has(p)) {
            recent = *last_;
        }
        if (last_->space == Space::SHARED && last_->at > 0 && last_->has(p)) accessed[last_->at] = last_->bytes;
        return {last_->space, last_->at + p - last_->begin, !last_->has(p)};
    }
    const Range& found() const { return *last_; }   // the range that find() has found last, or the one next to it
    std::map<uint64_t, uint64_t> accessed;   // offset and bytes of the static arrays that have been found
    uint64_t shared_bytes() const { return next_array_; }

    // Returns the array, allocation or variable that an address is in.
    Range owner(Space space, uint64_t at) const {
        if (space == Space::SHARED && at < all_dynamic_.bytes) return dynamic_;
        for (const auto& [begin, range] : ranges_)
            if (range.space == space && at - range.at < range.bytes) return range;
        return {};
    }

private:
    // Adds a range. next: its address; becomes that of the next one, `unused` bytes before and after each.
    void add(const Range& range, uint64_t& next, uint64_t unused, uint64_t alignment) {
        ranges_[range.begin] = range;
        next += (range.bytes + 2 * unused + alignment - 1) / alignment * alignment;
        recent_ = {};
    }

    // Returns the range that overlaps these bytes, also with its guards: the nearest one; nullptr if none.
    const Range* nearest(uintptr_t p, size_t bytes) const {
        const auto next = ranges_.lower_bound(p + bytes);
        const Range* const after = next == ranges_.end() ? nullptr : &next->second;
        const Range* const before = next == ranges_.begin() ? nullptr : &std::prev(next)->second;
        const bool is_after = after != nullptr && after->is_near(p, bytes);
        if (before == nullptr || !before->is_near(p, bytes)) return is_after ? after : nullptr;
        return is_after && after->distance(p) < before->distance(p) ? after : before;
    }

    static constexpr uintptr_t PAGE = 1 << 12;
    std::array<Range, 1024> recent_{};   // by page: found last in it, or a page without any range
    Range dynamic_, all_dynamic_;
    const Range* last_ = nullptr;
    std::map<uintptr_t, Range> ranges_;   // by begin
    // Bytes before and after each variable, which dev/inspect/Makefile inserts; 0 without them.
    const uint64_t VARIABLE_GUARD = reinterpret_cast<uintptr_t>(&inspect_guards);
    uint64_t next_array_ = STATIC_ARRAYS, next_ = 1 << 21, next_variable_ = uint64_t{1} << 40;   // see add()
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
struct SiteKey {
    uintptr_t pc;
    uint32_t stack;
    unsigned part, bytes;
    Space space;
    Access access;
    By by;
    bool operator==(const SiteKey& b) const {
        return std::tie(pc, stack, part, bytes, space, access, by) ==
               std::tie(b.pc, b.stack, b.part, b.bytes, b.space, b.access, b.by);
    }
    struct Hash {
        size_t operator()(const SiteKey& k) const {
            return k.pc * 31 + k.stack * 7 + k.part * 3 + static_cast<size_t>(k.space);
        }
    };
};
struct Site : SiteKey {
    uint64_t requests = 0, lanes = 0, bytes_used = 0, sectors = 0, least_sectors = 0, wavefronts = 0,
             least_wavefronts = 0, l1_hits = 0, dram_sectors = 0;
    std::array<uint64_t, 3> slowest{};   // loads of global memory by threads, by their slowest memory: L1, L2, memory
    Request worst;
    double worst_rank = 0;
};

// ==== kernels ============================================================================================

// Counts of a block or launch. Sectors: the first three.
enum Figure {
    DRAM_LOAD, DRAM_STORE,
    PARTIAL_FETCHED,   // sectors of which only a part has been stored: memory must deliver the rest
    L2_SECTORS,
    PARTIAL,           // stores of a part of a sector
    // Cycles of L1 and shared memory: a request takes its wavefronts (global memory: Request::l1_cycles()), at least 1;
    // or at least 2, on multiprocessors with 16 load/store units instead of 32.
    CYCLES, CYCLES_OF_16,
    TENSOR_FLOPS,
    SPECIAL,           // special functions, such as exp2
    // Of one warp, the one that waits longest before each barrier, summed over blocks: see Level.
    WAITS_SHARED, WAITS_L1, WAITS_L2, WAITS_MEMORY, EXCHANGES,
    BARRIERS,
    ROUNDS,            // rounds of loads of global memory, of all warps
    REQUESTS,
    WARP_REQUESTS, WARP_SPECIAL   // of the warp with most, summed over blocks
};
constexpr const char* FIGURES[] = {
    "dram_load", "dram_store", "partial_fetched", "l2", "partial", "cycles", "cycles_of_16", "tensor_flops", "special",
    "waits_shared", "waits_l1", "waits_l2", "waits_memory", "exchanges", "barriers", "rounds", "requests",
    "warp_requests", "warp_special"};
using Totals = std::array<uint64_t, std::size(FIGURES)>;

struct Side {
    uint32_t site = NONE;
    Access access = Access::LOAD;
    unsigned actor = 0, block = 0;   // actor: a thread, the TMA copies of an mbarrier or the wgmma of a warp (clocks.h)
};

// A race between two accesses, or an uninitialised read or an access out of bounds (earlier.site is then NONE), or
// threads at different barriers (NONE if threads have ended).
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
    uint64_t recorded_launches = 0;         // of its launches: those with blocks that are recorded or checked
    uint64_t missed_launches = 0;           // launches with other arguments than those
    uint64_t between = 0, last = 0;         // blocks of the first launch that are only checked; last: at its end
    uint64_t later_blocks = 0;              // blocks of later launches that are checked
    uint64_t checked_accesses = 0;
    std::set<uint64_t> arguments;           // hashes, of the recorded launches
    uint64_t wave = 1;       // blocks that run at the same time
    std::vector<uint64_t> numbers;         // of the recorded blocks
    std::map<uint64_t, uint64_t> arrays;   // offset and bytes of the static arrays that recorded blocks access

    std::vector<Site> sites;
    std::unordered_map<SiteKey, uint32_t, SiteKey::Hash> site_numbers;
    std::set<std::tuple<std::string, uintptr_t, uint32_t>> syncs;   // name, pc and stack
    Totals totals{};
    std::vector<Totals> after_block;
    double hot_atomics = 0;
    Hazards races, uninitialised, out_of_bounds, divergent;

    uint64_t blocks() const { return uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]; }
    unsigned threads() const { return shape.block[0] * shape.block[1] * shape.block[2]; }
    // The arrays that the kernel declares itself, or those that it accesses, also in functions that it calls.
    uint64_t static_shared() const {
        uint64_t accessed = 0;
        for (const auto& [at, bytes] : arrays) accessed += bytes;
        return std::max<uint64_t>(shape.static_shared, accessed);
    }
    size_t hazards() const {
        return races.size() + uninitialised.size() + out_of_bounds.size() + divergent.size();
    }
};

// Extrapolates a total to the whole launch. Data that blocks share is in L2 after the first ones. If more than one row
// of blocks is recorded, the others are like those of the later rows: the average of their first blocks, and that of
// their other blocks, because a block often shares data with its row and with the block above it. Else, each block that
// was not recorded counts as the average of the second half of the recorded ones.
static double of_launch(const Kernel& kernel, size_t figure) {
    const auto& after = kernel.after_block;
    if (after.empty()) return 0;
    const double all = static_cast<double>(kernel.blocks()), seen = static_cast<double>(after.size());
    const double total = static_cast<double>(after.back()[figure]);
    if (after.size() == kernel.blocks()) return total;
    const auto until = [&](size_t block) { return block == 0 ? 0 : static_cast<double>(after[block - 1][figure]); };
    struct { double sum = 0, blocks = 0; } firsts, others;   // blocks of the second row and later ones
    const size_t row = kernel.shape.grid[0], half = after.size() / 2;
    for (size_t b = row; b < after.size() && kernel.numbers[b] == b; b++) {
        auto& kind = b % row == 0 ? firsts : others;
        kind.sum += until(b + 1) - until(b);
        kind.blocks++;
    }
    if (others.blocks == 0) return total + (all - seen) * (total - until(half)) / (seen - static_cast<double>(half));
    const double in_row = static_cast<double>(row - 1) * others.sum / others.blocks + firsts.sum / firsts.blocks;
    return total + (all - seen) * in_row / static_cast<double>(row);
}

// Returns the maximum of a figure over the recorded blocks.
static int64_t of_longest_block(const Kernel& kernel, size_t figure) {
    int64_t most = 0;
    uint64_t before = 0;
    for (const Totals& after : kernel.after_block)
        most = std::max(most, static_cast<int64_t>(after[figure] - std::exchange(before, after[figure])));
    return most;
}

// Returns the sectors that a launch loads from memory. If the recorded blocks are 0, 1 and the first one of the second
// row: block 1 finds in L2 what the blocks of a row share, and the third block what those of a column share. All blocks
// of a wave that share a sector load it once.
static double memory_loads(const Kernel& kernel) {
    const auto& after = kernel.after_block;
    const uint64_t row = kernel.shape.grid[0];
    if (after.size() != 3 || kernel.numbers.back() != row || row < 3) return of_launch(kernel, DRAM_LOAD);
    const double alone = static_cast<double>(after[0][DRAM_LOAD]);
    const double of_row = alone - static_cast<double>(after[1][DRAM_LOAD] - after[0][DRAM_LOAD]);
    const double of_column = alone - static_cast<double>(after[2][DRAM_LOAD] - after[1][DRAM_LOAD]);
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

// What a thread has synchronised with.
struct Clocks {
    Clock clock, fenced;   // fenced: accesses that are visible to TMA and wgmma (after fence.proxy.async)
    Clock passed;          // latest step of each thread that has certainly executed; says nothing about visibility
    void take(const Clocks& other) {
        clock = join(clock, other.clock);
        fenced = join(fenced, other.fenced);
        passed = join(passed, other.passed);
    }
};

struct Thread : Clocks {
    // clock at the last __threadfence, or __threadfence_block; blocks or threads that see a later atomic acquire it
    Clock released, released_in_block;
    Tick own = 1, step = 1;
    bool is_over = false;
    uint32_t waits_at = NONE;   // the site of the barrier or collective that it waits in
    uint32_t last_site = NONE;  // of its last access
    uint32_t stack = 0;
    uint32_t segment = 0;    // stores and synchronisations so far: loads are not moved across them
    std::vector<Event> events;
    Registers registers;
    std::vector<PendingCopy> copies;
    unsigned copy_groups = 0;
    uint64_t special = 0;    // special functions
    void synchronised() {
        own++;
        registers.drop_all();
    }
};

// An mbarrier or a named barrier.
struct Sync {
    unsigned slot;
    std::vector<std::pair<Moment, uint32_t>> waiters;   // for the latest completed phase: step and site
    Clocks arriving;      // of all arrivals so far
    Clocks ended[2];      // at the end of the last phase with that parity
    Tick phases = 0;      // completed phases
};

// Accesses that an instruction makes later: those of a TMA copy of one box of a tensor map, or of a wgmma.
struct Bulk {
    Moment moment;
    const void* barrier;   // of a TMA copy
    Clock fenced;          // of a wgmma
    struct Side {
        uint32_t site;
        std::vector<uint64_t> at;
    };
    Side first, second;    // to and from; operands A and B
};

// ==== state ==============================================================================================

using Shape = std::tuple<const void*, std::string, std::array<unsigned, 6>, size_t, std::vector<int64_t>,
                         std::vector<bool>>;

// ---- settings: environment variables. INSPECT_OUT is the path of the recording.
static std::string setting(const char* name) { return getenv(name) != nullptr ? getenv(name) : ""; }
template <class T> static std::set<T> settings(const char* name) {
    std::istringstream words(setting(name));
    std::set<T> all;
    for (T word; words >> std::hex >> word;) all.insert(word);
    return all;
}
// sample: few blocks run; few: all run, few are recorded; whole, the default: many are recorded.
static const std::string mode = setting("INSPECT_MODE");
static const bool is_sample = mode == "sample", is_whole = !is_sample && mode != "few";
static const std::string only = setting("INSPECT_KERNEL");   // in the symbol or NVTX range of kernels to record
static const std::set<std::string> except = settings<std::string>("INSPECT_EXCEPT");   // NVTX ranges not to record
static const std::string from = setting("INSPECT_FROM");     // from the first launch in this range to the second one
static const double seconds = atof(setting("INSPECT_SECONDS").c_str());   // ends the program after this time
static const std::set<uintptr_t> removed = settings<uintptr_t>("INSPECT_REMOVE");   // addresses of barriers to skip
static const auto start = std::chrono::steady_clock::now();

// ---- the program
static const cuda_cpu::Card* card_;    // card() is a function of dev/cpu
static json registers = json::object();   // INSPECT_REGISTERS: the output of sass.py
static bool is_open, is_written;
static std::vector<uintptr_t> ended_at;   // the call stack of the host code that ended the program
static bool recording;                 // a recorded block is running
static bool is_busy;                   // the recorder is running
static void (*yield)();                // lets other threads of the block run
static bool watching;                  // another block is running: only its addresses are checked
static bool in_block, is_recorded;     // a block runs; it is recorded
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
static bool records_launch, watches_launch;
static uint64_t first_checked, blocks_to_check;   // see is_checked()
static Shadow global_shadow;
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
static size_t queued_requests;                   // of all warps
static uint64_t counted_warp;                    // the warp whose requests are counted: its number in the launch
struct Block {
    bool counting = false;                         // its requests are counted
    std::vector<Thread> threads;
    std::vector<uint16_t> written;                 // per granule of shared memory: one bit per byte
    Shadow shared_shadow;
    std::map<const void*, Sync> syncs;
    std::map<unsigned, Clock> acquired;            // clocks of other blocks, received through atomics
    std::set<uint64_t> own_atomics;                // addresses in global memory of the block's atomics
    std::map<std::pair<Space, uint64_t>, Clock> released_in_block;   // by address of an atomic
    std::vector<Bulk> bulks;
    std::vector<Tick> wgmma_ticks;                 // per warp: completed wgmma
    std::vector<std::vector<Queued>> queues;       // per warp: requests since the last barrier
    std::vector<uint32_t> rounds, exchanges;       // per warp: rounds and collectives since the last barrier
};
static Block state;

// ---- blocks of a cooperative launch
static std::map<unsigned, Block> suspended;
static std::map<unsigned, Clock> arriving, at_grid_barrier;   // by block, at the grid's next and at its last barrier

// Suspends recording in a scope: the recorder's calls to the standard library may resolve to the program's
// instrumented copies.
struct Pause {
    const bool was_recording = std::exchange(recording, false), was_watching = std::exchange(watching, false);
    const bool was_busy = std::exchange(is_busy, true);
    ~Pause() { recording = was_recording, watching = was_watching, is_busy = was_busy; }
};

// Returns what an address belongs to, whether a block is recorded or not.
static Space space_of(const void* address) {
    const Pause pause;
    return memory.find(address).space;
}

static Thread& me() { return state.threads[current]; }
static Moment moment_of(unsigned t) { return {state.threads[t].clock, t, state.threads[t].own}; }
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
        state.written[place.at / GRANULE] |= static_cast<uint16_t>(((1u << bytes) - 1) << place.at % GRANULE);
}

// ==== races ==============================================================================================

// CUDA C++ Programming Guide, "SIMT Architecture": which thread performs the final write is undefined.
constexpr const char* ONE_INSTRUCTION = "lanes of one instruction, in undefined order; safe if all values are equal";

// A new access, which is compared with earlier ones, and the entry that it adds to the shadow memory. A report names
// the thread of the moment.
struct NewAccess {
    Moment moment;
    unsigned actor;     // of the entry
    Tick tick;          // of the entry
    Kind kind;
    uint32_t site;
    bool generic = true;
    const Clock* fenced = nullptr;   // for reads through the async proxy: the stores that it sees
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
        return in(state.acquired) || in(at_grid_barrier);
    }
    *why = "no synchronisation between them";
    if (!later.moment.covers(entry.first_actor, entry.lanes, entry.tick)) return false;
    if (later.fenced == nullptr || !entry.generic || entry.kind == Kind::READ) return true;
    *why = "no fence.proxy.async between them";
    return covers(*later.fenced);
}

static void add(Hazards& hazards, Space space, const Memory::Range& owner, uint64_t at, const Side& later,
                const Side& earlier, const std::string& why) {
    const Hazard first{space, owner, static_cast<int64_t>(at - owner.at), later, earlier, 0};
    hazards.try_emplace({later.site, earlier.site, why, owner.at}, first).first->second.count++;
}

static void report_race(Space space, uint64_t at, const Entry& entry, const NewAccess& later, const char* why) {
    const Access access = is_read(later.kind) ? Access::LOAD : Access::STORE;
    const Access other = is_read(entry.kind) ? Access::LOAD : Access::STORE;
    Entry lane = entry;   // one that is not ordered
    for (uint32_t rest = entry.lanes; rest != 0; rest &= rest - 1) {
        const char* unused = nullptr;
        lane.lanes = rest & -rest;
        if (!happens_before(lane, space, later, &unused)) break;
    }
    add(kernel->races, space, memory.owner(space, at), at, {later.site, access, later.moment.actor, block},
        {entry.site, other, entry.first_actor + static_cast<unsigned>(__builtin_ctz(lane.lanes)), entry.block}, why);
}

// Returns whether to keep a read or atomic entry of another block. Entries of two other blocks are enough: a block that
// writes there later races with at least one of them. Further ones of those two blocks are merged.
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
    const unsigned missing = mask & ~state.written[granule];
    if (later.kind != Kind::WRITE && missing != 0) {
        const uint64_t at = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(missing));
        add(kernel->uninitialised, Space::SHARED, memory.owner(Space::SHARED, at), at,
            {later.site, Access::LOAD, later.moment.actor, block}, {}, "");
    }
    if (!is_read(later.kind)) state.written[granule] |= mask;
}

static void touch_granule(Space space, uint64_t granule, uint16_t mask, const NewAccess& later) {
    if (space == Space::SHARED) check_written(granule, mask, later);
    Shadow& shadow = space == Space::SHARED ? state.shared_shadow : global_shadow;
    const bool is_thread = later.actor < first_engine;
    const uint32_t first_actor = is_thread ? later.actor / LANES * LANES : later.actor;
    const uint32_t lanes = is_thread ? 1u << later.actor % LANES : 1;
    bool is_noted = false;
    Entry* others[] = {nullptr, nullptr};
    shadow.visit(granule, [&](Entry& entry) {
        if (entry.block != block && entry.kind == later.kind && later.kind != Kind::WRITE)
            return keep_of_others(others, entry);
        const unsigned common = entry.bytes & mask;
        const uint64_t at = granule * GRANULE + (common == 0 ? 0 : static_cast<uint64_t>(__builtin_ctz(common)));
        // Atomics of one address have an order, so a block's own one is after those that it follows.
        const bool in_order = is_atomic(entry.kind) &&
                              (is_atomic(later.kind) || (entry.block != block && state.own_atomics.count(at) > 0));
        const bool conflict = common != 0 && !(is_read(entry.kind) && is_read(later.kind)) && !in_order;
        const bool is_of_warp = entry.first_actor == first_actor && entry.block == block;
        if (is_of_warp && entry.kind == later.kind && entry.tick == later.tick) {
            const bool same_again = entry.lanes == lanes && (mask & ~entry.bytes) == 0;
            const bool another_lane = entry.kind != Kind::WRITE && entry.bytes == mask && entry.site == later.site;
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
            report_race(space, at, entry, later, why);
        }
        const bool replaces = later.kind == Kind::WRITE || entry.kind == later.kind;
        return !(before && replaces && (entry.bytes & ~mask) == 0);
    });
    if (is_noted) return;
    shadow.add(granule, {later.tick, lanes, first_actor, block, later.site, mask, later.kind, later.generic});
}

static void touch(Space space, uint64_t at, unsigned bytes, const NewAccess& later) {
    (state.counting ? kernel->accesses : kernel->checked_accesses)++;
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t granule = (at + done) / GRANULE, first = (at + done) % GRANULE;
        const uint64_t count = std::min<uint64_t>(GRANULE - first, bytes - done);
        touch_granule(space, granule, static_cast<uint16_t>(((1u << count) - 1) << first), later);
        done += count;
    }
}

// ==== accesses ===========================================================================================

// Returns the site's index in kernel->sites, adding it if it is new.
static uint32_t find_site(uintptr_t pc, unsigned part, unsigned bytes, Space space, Access access, By by) {
    const SiteKey key{pc, is_recorded ? me().stack : 0, part, bytes, space, access, by};
    const auto [place, is_new] = kernel->site_numbers.try_emplace(key, static_cast<uint32_t>(kernel->sites.size()));
    if (is_new) kernel->sites.push_back({key});
    return place->second;
}

static void part_accessed(Place place, unsigned bytes, unsigned part, Access access, By by, uintptr_t pc) {
    Thread& t = me();
    const uint32_t number = t.last_site = find_site(pc, part, bytes, place.space, access, by);
    if (access == Access::LOAD && by == By::THREAD && t.registers.hold(place.space, number, place.at)) return;
    if (access == Access::STORE) {
        t.registers.drop(place.space);
        t.segment++;
    }
    if (state.counting) t.events.push_back({place.at, number, t.segment});
    if (by == By::ATOMIC && place.space == Space::GLOBAL) {
        state.own_atomics.insert(place.at);
        auto& by_block = released[place.at];
        for (const auto& [other, clock] : by_block)
            if (other != block) state.acquired[other] = join(state.acquired[other], clock);
        if (t.released != nullptr) by_block[block] = join(by_block[block], t.released);
    }
    if (by == By::ATOMIC) {
        Clock& here = state.released_in_block[{place.space, place.at}];
        t.clock = join(t.clock, here);
        here = join(here, t.released_in_block);
    }
    const Kind loads = by == By::ATOMIC ? Kind::ATOMIC_READ : Kind::READ;
    const Kind stores = by == By::ATOMIC ? Kind::ATOMIC : Kind::WRITE;
    const Kind kind = access == Access::LOAD ? loads : stores;
    touch(place.space, place.at, bytes, {moment_of(current), current, t.own, kind, number});
}

// Reports threads that wait at another barrier than others, or for threads that have ended.
static void add_divergence(uint32_t site, unsigned thread, const Side& other, const std::string& why) {
    const bool is_known = std::any_of(kernel->divergent.begin(), kernel->divergent.end(), [&](const auto& each) {
        return each.second.later.site == site && each.second.earlier.site == other.site;
    });   // of another thread
    if (!is_known) add(kernel->divergent, Space::SHARED, {}, 0, {site, Access::WAIT, thread, block}, other, why);
}

// Reports an access next to an allocation, a variable or an array in shared memory.
static void add_out_of_bounds(Place place, const Memory::Range& owner, uintptr_t pc, size_t bytes, Access access, By by,
                              const std::string& why) {
    const Pause pause;
    const uint32_t site = find_site(pc, 0, static_cast<unsigned>(bytes), place.space, access, by);
    add(kernel->out_of_bounds, place.space, owner, place.at, {site, access, current, block}, {}, why);
}
static void add_invalid(uintptr_t pc, size_t bytes, Access access, By by, const std::string& why) {
    add_out_of_bounds({Space::OTHER, 0}, {}, pc, bytes, access, by, why);
}

// The last access that may have an invalid address; a thread after an index out of bounds.
static struct { uintptr_t pc, address; size_t bytes; Access access; By by; } unknown;
static unsigned wrong_thread = NONE;

// Returns whether the access is in an array, an allocation or a variable, also with its last byte.
static bool is_inside(Place& place, Access access, By by, const void* address, size_t bytes, uintptr_t pc) {
    if (place.space == Space::OTHER) {
        unknown = {pc, number_of(address), bytes, access, by};
        if (access == Access::STORE && current == wrong_thread) end_program("after an index out of bounds");
        return false;
    }
    if (place.space == Space::HOST) {
        add_invalid(pc, bytes, access, by, "the host's memory, which a GPU cannot access");
        return false;
    }
    if (access == Access::STORE) wrong_thread = NONE;
    const Memory::Range& range = memory.found();
    if (!place.is_outside && place.at + bytes <= range.at + range.bytes) return true;
    if (!place.is_outside) place.at = range.at + range.bytes;   // a wide access that begins in the range
    add_out_of_bounds(place, range, pc, bytes, access, by, "");
    return false;
}

// Records an access, split into parts that are as wide as size and alignment allow, at most 16 bytes each.
void access(Access access, By by, const void* address, size_t bytes, const void* pc) {
    if (!recording && !watching) return;
    if (watching && wrong_thread == NONE && memory.is_recent(number_of(address), bytes)) {
        unknown = {number_of(pc), number_of(address), bytes, access, by};
        return;
    }
    const Pause pause;
    Place place = memory.find(address);
    if (!is_inside(place, access, by, address, bytes, number_of(pc)) || !is_recorded) return;
    uint64_t width = std::min<uint64_t>(16, bytes & -bytes);
    if (place.at % width != 0) width = place.at & -place.at;
    unsigned part = 0;
    for (uint64_t done = 0; done < bytes; done += width)
        part_accessed({place.space, place.at + done}, static_cast<unsigned>(width), part++, access, by, number_of(pc));
}

// Reports an index outside of an array with a constant size. If the thread's next store is outside of device memory,
// it would change the emulator's own data, and the program ends there.
static void wrong_index(const char* type, int64_t index, const void* pc) {
    if (!recording && !watching) return;
    const Pause pause;
    add_invalid(number_of(pc), 0, Access::LOAD, By::THREAD,
                "index " + std::to_string(index) + " of an array of type " + type);
    wrong_thread = current;
}

// Ends the program at an address that is not a multiple of the accessed type's alignment, as a GPU does. On this
// processor only some such accesses fail. (Local variables are in registers on a GPU.)
static void check_alignment(uintptr_t address, uint64_t alignment, const char* type, Access access, const void* pc) {
    if (address % alignment == 0 || !HostMemory::device_works()) return;
    if (space_of(reinterpret_cast<const void*>(address)) == Space::OTHER) return;
    const std::string why = "a misaligned address: " + std::string(type) + " needs a multiple of " +
                            std::to_string(alignment);
    if (recording || watching) add_invalid(number_of(pc), 1, access, By::THREAD, why);
    end_program(why);
}

// Called at a signal that ends the program: reports the access with the invalid address, if that is the reason. Device
// memory is protected while host code runs.
static void crashed(int signal, siginfo_t* info, void*) {
    std::signal(signal, SIG_DFL);
    const bool in_kernel = recording || watching;
    const Place place = signal == SIGSEGV && !in_kernel ? memory.find(info->si_addr) : Place{};
    if (place.space == Space::GLOBAL && !place.is_outside) {
        const Memory::Range& owner = memory.found();
        ended_at = interrupted();
        return write("host code accesses device memory, byte " + std::to_string(place.at - owner.at) + " of " +
                     std::to_string(owner.bytes) + ": expected cudaMemcpy, or memory of cudaMallocManaged");
    }
    // The kernel does not know an address that is too large; if its register is the stack's, the signal is SIGBUS.
    const bool is_it = number_of(info->si_addr) - unknown.address < unknown.bytes || info->si_code == SI_KERNEL;
    if (in_kernel && (signal == SIGSEGV || signal == SIGBUS) && is_it)
        add_invalid(unknown.pc, unknown.bytes, unknown.access, unknown.by, "an address far from any array");
    write(std::string("by signal ") + strsignal(signal));
    raise(signal);
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
            const L2::Store store = l2.store(sector, bytes, counted_warp);
            if (!store.is_merged || site.by == By::ATOMIC) {
                totals[L2_SECTORS]++;
                totals[PARTIAL] += bytes != ~0u;
            } else if (store.is_whole) {
                totals[PARTIAL]--;
            }
            totals[PARTIAL_FETCHED] += static_cast<uint64_t>(static_cast<int64_t>(store.partial));
            totals[DRAM_STORE] += static_cast<uint64_t>(store.writes);
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
        totals[L2_SECTORS]++;
        level = std::max(level, WAIT_L2);
        if (l2.load(sector)) continue;
        level = WAIT_MEMORY;
        totals[DRAM_LOAD]++;
        site.dram_sectors++;
    }
    site.least_sectors += request.least_sectors();
    if (!through_l1) return NO_WAIT;
    site.slowest[level - WAIT_L1]++;
    return level;
}

// Adds the cycles of the load/store units and of L1 or shared memory; see Totals.
static void add_cycles(uint64_t cycles) {
    kernel->totals[CYCLES] += std::max<uint64_t>(1, cycles);
    kernel->totals[CYCLES_OF_16] += std::max<uint64_t>(2, cycles);
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
        add_cycles(request.l1_cycles());
    }
    const double rank = ratio * 64 + request.lanes();   // highest ratio first, then most active lanes
    if (rank > site.worst_rank) {
        site.worst_rank = rank;
        site.worst = request;
    }
    return level;
}

// Counts accesses by TMA or wgmma: chunks of 16 bytes, assumed to be transferred in the best order.
static void account_bulk(const Bulk::Side& side) {
    if (!state.counting) return;
    Site& site = kernel->sites[side.site];
    const std::vector<uint64_t>& chunks = side.at;
    site.requests++;
    site.lanes++;
    site.bytes_used += chunks.size() * GRANULE;
    if (site.space == Space::SHARED) {
        std::vector<uint64_t> words;
        for (uint64_t at : chunks)
            for (uint64_t byte = 0; byte < GRANULE; byte += WORD) words.push_back((at + byte) / WORD);
        const uint64_t taken = most_of_a_bank(words);
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
// have constant sizes and loops over them are unrolled. Sets Queued::merged of one instruction's requests, in order.
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
    std::vector<Queued>& queue = state.queues[warp];
    const size_t begin = queue.size();
    of_sites.resize(std::max(of_sites.size(), kernel->sites.size()));
    const unsigned first = warp * LANES, last = std::min(first + LANES, threads_in_block);
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> round_numbers;   // {segment, executions / UNROLL} -> round
    for (unsigned t = first; t < last; t++) {
        const unsigned lane = t - first;
        for (const Event& event : state.threads[t].events) {
            OfSite& of_site = of_sites[event.site];
            if (of_site.lane != lane) of_site.accesses = 0;
            of_site.lane = lane;
            const unsigned nth = of_site.accesses++;
            if (nth == of_site.requests.size()) {
                of_site.in_segment = nth > 0 && of_site.segment == event.segment ? of_site.in_segment + 1 : 0;
                of_site.segment = event.segment;
                const auto [place, is_new] =
                    round_numbers.try_emplace({event.segment, of_site.in_segment / UNROLL}, state.rounds[warp]);
                state.rounds[warp] += is_new;
                const unsigned bytes = kernel->sites[event.site].bytes;
                of_site.requests.push_back(static_cast<uint32_t>(queue.size()));
                queue.push_back({event.site, place->second, bytes, {}});
                queue.back().request.bytes = bytes;
            }
            Request& request = queue[of_site.requests[nth]].request;
            request.address[lane] = event.address;
            request.active |= 1u << lane;
        }
        state.threads[t].events.clear();
        state.threads[t].segment++;
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
    std::vector<std::vector<Level>> levels(warps());
    size_t longest_queue = 0;
    for (unsigned warp = 0; warp < warps(); warp++) {
        levels[warp].resize(state.rounds[warp]);
        longest_queue = std::max(longest_queue, state.queues[warp].size());
        kernel->totals[REQUESTS] += state.queues[warp].size();
    }
    queued_requests = 0;
    for (size_t n = 0; n < longest_queue; n++)
        for (unsigned warp = 0; warp < warps(); warp++) {
            if (n >= state.queues[warp].size()) continue;
            counted_warp = uint64_t{block} * warps() + warp;
            const Queued& queued = state.queues[warp][n];
            Level& level = levels[warp][queued.round];
            level = std::max(level, account(queued));
        }
    // The warp that waits longest, by rough latencies.
    constexpr uint64_t weights[] = {0, 1, 1, 8, 20, 1};
    std::array<uint64_t, std::size(weights)> longest{};   // by Level, and collectives
    uint64_t most = 0;
    Totals& totals = kernel->totals;
    for (unsigned warp = 0; warp < warps(); warp++) {
        std::array<uint64_t, std::size(weights)> waits{};
        for (Level level : levels[warp]) {
            waits[level]++;
            totals[ROUNDS] += level >= WAIT_L1;
        }
        waits.back() = state.exchanges[warp];
        const uint64_t sum = std::inner_product(waits.begin(), waits.end(), weights, uint64_t{0});
        if (sum > most) longest = waits;
        most = std::max(most, sum);
        state.queues[warp].clear();
        state.rounds[warp] = state.exchanges[warp] = 0;
    }
    for (size_t i = WAIT_SHARED; i < longest.size(); i++) totals[WAITS_SHARED + i - WAIT_SHARED] += longest[i];
    totals[WARP_REQUESTS] += longest_queue;
}

// Counts all requests since the last barrier.
static void drain() {
    for (unsigned warp = 0; warp < warps(); warp++) flush(warp);
    count_queued();
}

// ==== launches and blocks ================================================================================

static bool counts() { return from.empty() || from_launches > 0; }

static void end_if_late() {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (seconds > 0 && passed.count() > seconds)
        end_program("after " + std::to_string(static_cast<int>(seconds)) + " s (--seconds)");
}

// Called when the time is over, and each millisecond from then on. Ends the program if it interrupts a kernel's code:
// then the recorder and malloc are in a consistent state. Between blocks, begin_launch() and next_block() end it.
static void end_in_block(int, siginfo_t*, void*) {
    const bool is_kernel = in_block && HostMemory::device_works() && !is_busy && !HostMemory::is_changing();
    const std::vector<uintptr_t> stack = is_kernel ? interrupted() : std::vector<uintptr_t>();
    if (!stack.empty() && stack[0] > number_of(&__executable_start) && stack[0] <= number_of(&_end)) end_if_late();
}

static void open() {
    if (std::exchange(is_open, true)) return;
    card_ = cuda_cpu::card() != nullptr ? cuda_cpu::card() : cuda_cpu::find_card("h100");
    if (const uint64_t n = strtoull(setting("INSPECT_ACCESSES").c_str(), nullptr, 10))
        in_a_program = {8, n, 2 * n, 4 * n};
    if (std::ifstream file(setting("INSPECT_REGISTERS")); file) registers = json::parse(file);
    atexit([] { write("at its end"); });
    void* frame = nullptr;
    backtrace(&frame, 1);   // loads libgcc, which a signal handler must not do
    static std::array<char, 1 << 18> stack;   // a thread's may be full
    const stack_t alternative{stack.data(), 0, stack.size()};
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = crashed;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
    if (seconds <= 0) return;
    action.sa_sigaction = end_in_block;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGALRM, &action, nullptr);
    const double whole = std::floor(seconds);
    const auto rest = static_cast<suseconds_t>(1e6 * (seconds - whole));
    const itimerval timer{{0, 1000}, {static_cast<time_t>(whole), rest + 1}};
    setitimer(ITIMER_REAL, &timer, nullptr);
}

// Returns the Kernel of a launch. Launches with the same function, NVTX range, grid, block, dynamic shared memory,
// integer arguments and null pointers share one.
static Kernel* find_kernel(const LaunchShape& shape, const std::string& range) {
    const auto& [g, b, variant] = std::tie(shape.grid, shape.block, shape.variant);
    const auto [place, is_new] =
        by_shape.try_emplace({shape.kernel, range, {g[0], g[1], g[2], b[0], b[1], b[2]}, shape.dynamic_shared,
                              variant.integers, variant.pointers}, nullptr);
    if (is_new) {
        kernels.push_back(std::make_unique<Kernel>(Kernel{shape, shape.symbol, range, kernels.size()}));
        place->second = kernels.back().get();
    }
    return place->second;
}

static uint64_t shared_bytes_of_block() {
    const size_t bytes = kernel->shape.dynamic_shared + kernel->static_shared();
    return bytes + card_->capability.reserved_shared_per_block;
}

// Returns how many blocks are resident on a multiprocessor: as in estimate.py's resident_blocks().
static uint64_t resident_blocks() {
    const cuda_cpu::Capability& c = card_->capability;
    uint64_t most = std::min<uint64_t>({c.threads_per_multiprocessor / kernel->threads(),
                                        static_cast<uint64_t>(c.blocks_per_multiprocessor),
                                        c.shared_per_multiprocessor / std::max<uint64_t>(1, shared_bytes_of_block())});
    if (const auto found = registers.find(kernel->symbol); found != registers.end() && (*found)["registers"] > 0) {
        constexpr unsigned file = 64 * 1024, granularity = 256, quarters = 4;
        const unsigned of_thread = (*found)["registers"], warps = (kernel->threads() + LANES - 1) / LANES;
        const unsigned of_warp = (of_thread * LANES + granularity - 1) / granularity * granularity;
        most = std::min<uint64_t>(most, file / of_warp / quarters * quarters / warps);
    }
    return std::max<uint64_t>(1, most);
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
    watches_launch = records_launches && is_wanted;
    memory.set_dynamic_bytes(shape.dynamic_shared);
    const bool is_first = kernel->recorded_launches == 0, is_spent = kernel->checked_accesses >= in_a_program.accesses;
    records_launch = watches_launch && (is_first || (is_whole && !is_spent));
    if (!records_launch) {
        kernel->missed_launches += watches_launch && is_whole && kernel->arguments.count(shape.variant.arguments) == 0;
        return false;
    }
    kernel->recorded_launches++;
    kernel->arguments.insert(shape.variant.arguments);
    global_shadow.clear();
    released.clear();
    at_grid_barrier.clear();
    first_checked = blocks_to_check = 0;
    if (!is_first) return true;
    atomics.clear();
    kernel->wave = std::min(kernel->blocks(), resident_blocks() * card_->multiprocessors);
    l2.reset(card_->l2_bytes, kernel->wave);
    return true;
}

// Returns whether the requests of the first launch's next block are counted, or it is only run, or skipped.
static Run count_block(uint64_t number, Run otherwise) {
    if (number == 0) return Run::RECORDED;
    const LaunchShape& shape = kernel->shape;
    const bool has_rows = shape.grid[1] * shape.grid[2] > 1 && (is_sample || shape.grid[0] <= MAX_ROW);
    const uint64_t row = has_rows ? shape.grid[0] : 1;
    const Limits& limits = is_whole ? in_a_program : IN_A_STEP;
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

// Returns whether a block is checked that is not counted: the last ones of the launch, where grids often extend past
// the data, and from the first one that is not counted on, in equal distances, single blocks or pairs of neighbours.
static bool is_checked(uint64_t number) {
    const uint64_t blocks = kernel->blocks();
    if (blocks_to_check == 0) {
        const uint64_t of_block = kernel->accesses / std::max<uint64_t>(1, kernel->recorded_blocks) + 1;
        const uint64_t half = in_a_program.accesses / 2, spare = half - std::min(half, kernel->checked_accesses);
        first_checked = number;
        blocks_to_check = std::min(blocks - number, std::max(LEAST_CHECKED, spare / 2 / of_block));
    }
    const uint64_t last = blocks_to_check / 2, pair = blocks_to_check < 16 ? 1 : 2;
    const uint64_t between = blocks - last - first_checked, runs = (blocks_to_check - last) / pair;
    const bool is_last = number >= blocks - last;
    if (!is_last && (number - first_checked) % (between / runs) >= pair) return false;
    if (kernel->recorded_launches > 1) kernel->later_blocks++;
    else (is_last ? kernel->last : kernel->between)++;
    return true;
}

// Returns whether the launch's next block is recorded, only run, or skipped.
Run next_block() {
    end_if_late();
    const uint64_t number = next_number++;
    // The program may depend on the result of a kernel with a single block, so such a block always runs.
    const Run otherwise = is_sample && kernel->blocks() > 1 ? Run::STOP : Run::UNRECORDED;
    if (!records_launch) return otherwise;
    const Run run = kernel->recorded_launches == 1 ? count_block(number, otherwise) : otherwise;
    state.counting = run == Run::RECORDED;
    return !state.counting && is_whole && is_checked(number) ? Run::RECORDED : run;
}

// Begins a block that runs, which is recorded or not.
void begin_block(uint64_t number, Run run) {
    block = static_cast<unsigned>(number);
    current = 0;
    wrong_thread = NONE;
    is_recorded = run == Run::RECORDED;
    watching = watches_launch && !is_recorded;
    in_block = !is_recorded;
    if (!is_recorded) return;
    threads_in_block = kernel->threads();
    first_engine = warps() * LANES;
    state = Block{state.counting};
    state.threads.resize(threads_in_block);
    state.written.resize(memory.shared_bytes() / GRANULE + 1);
    for (auto* of_warps : {&state.wgmma_ticks, &state.rounds, &state.exchanges}) of_warps->resize(warps());
    state.queues.resize(warps());
    if (state.counting) l1.reset(l1_bytes_per_block());
    if (state.counting) l2.begin_block(number);
    recording = in_block = true;
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

// Completes the thread's first `count` cp.async copies. Their writes happen before accesses after that tick.
static void complete_copies(size_t count, Tick tick) {
    Thread& t = me();
    for (size_t i = 0; i < count; i++) {
        const PendingCopy& copy = t.copies[i];
        touch(Space::SHARED, copy.to, copy.bytes, {copy.moment, current, tick, Kind::WRITE, copy.site});
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(count));
}

void end_block() {
    in_block = watching = false;
    const auto accessed = std::exchange(memory.accessed, {});
    if (!std::exchange(is_recorded, false)) return;
    recording = false;
    for (current = 0; current < threads_in_block; current++) complete_copies(me().copies.size(), NEVER);
    current = 0;
    drain();
    std::vector<uint64_t> special(warps());   // a warp takes as long for one lane as for all
    for (unsigned t = 0; t < threads_in_block; t++)
        special[t / LANES] = std::max(special[t / LANES], LANES * state.threads[t].special);
    kernel->totals[SPECIAL] += std::accumulate(special.begin(), special.end(), uint64_t{0});
    kernel->totals[WARP_SPECIAL] += *std::max_element(special.begin(), special.end());
    if (!state.counting) {
        kernel->totals = kernel->after_block.empty() ? Totals{} : kernel->after_block.back();
        return;
    }
    kernel->recorded_blocks++;
    kernel->numbers.push_back(block);
    kernel->arrays.insert(accessed.begin(), accessed.end());
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
bool only_counts() { return is_sample; }
bool is_shared(const void* place) {
    const Pause pause;
    const Place found = memory.find(place);
    return found.space == Space::SHARED && !found.is_outside;
}

// At a deadlock, also names where threads wait.
void fatal_error(const char* why) {
    if (recording && strncmp(why, "deadlock", 8) == 0) {
        const Pause pause;
        for (current = 0; current < threads_in_block; current++)
            if (me().waits_at != NONE) add_divergence(me().waits_at, current, {NONE}, "no thread can continue");
    }
    write(why);
}

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
        all.memory_bytes += of_all * SECTOR * (memory_loads(*kernel) + of_launch(*kernel, DRAM_STORE));
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
void yields_by(void (*function)()) { yield = function; }
void device_works(bool begins, const void* frame) {
    HostMemory::of_program().set_device_works(begins, frame);
    if (frame != nullptr) memory.forget_gaps();
}
void allocated(const void* place, size_t bytes, const void* site) {
    open();
    memory.add_allocation(place, bytes, number_of(site));
}
void freed(const void* place) { memory.remove_allocation(place); }
void registered(const void* place, size_t bytes) { HostMemory::registered(place, bytes); }

void thread_resumed(unsigned thread) { current = thread; }
void thread_started(unsigned thread) {
    if (recording) state.threads[thread].stack = 0;
}
void thread_ended(unsigned thread) {
    if (recording) state.threads[thread].is_over = true;
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
    std::vector<Moment> steps;
    for (unsigned t : group) steps.push_back({state.threads[t].passed, t, state.threads[t].step++});
    const Clock all = join(steps, actors());
    for (unsigned t : group) state.threads[t].passed = all;
}

// Synchronises these threads: each gets the maximum of their clocks.
static void meet(const std::vector<unsigned>& group) {
    std::vector<Moment> moments;
    Clock fenced, released, released_in_block;
    for (unsigned t : group) {
        const Thread& thread = state.threads[t];
        moments.push_back(moment_of(t));
        fenced = join(fenced, thread.fenced);
        released = join(released, thread.released);
        released_in_block = join(released_in_block, thread.released_in_block);
    }
    const Clock all = join(moments, actors());
    for (unsigned t : group) {
        Thread& thread = state.threads[t];
        std::tie(thread.clock, thread.fenced) = std::tie(all, fenced);
        std::tie(thread.released, thread.released_in_block) = std::tie(released, released_in_block);
        thread.synchronised();
    }
    pass(group);
}

void waits(const void* site) {
    if (!recording) return;
    const Pause pause;
    me().waits_at = find_site(number_of(site), 0, 0, Space::SHARED, Access::WAIT, By::THREAD);
}

// __syncthreads: orders the accesses of all threads of the block, also of those that have exited. All others must reach
// the same one. A thread that has ended without it, after an access further down, has not returned early: results.py
// compares the lines.
void barrier_completed(const char*) {
    if (!recording) return;
    const Pause pause;
    std::vector<unsigned> all(threads_in_block);
    std::iota(all.begin(), all.end(), 0u);
    const unsigned first = *std::find_if(all.begin(), all.end(), [](unsigned t) { return !state.threads[t].is_over; });
    const uint32_t site = state.threads[first].waits_at;
    for (unsigned t : all) {
        const Thread& thread = state.threads[t];
        if (const uint32_t last = thread.last_site; thread.is_over && last != NONE)
            add_divergence(site, first, {last, kernel->sites[last].access, t, block},
                           "and has ended without reaching it");
        else if (!thread.is_over && thread.waits_at != site)
            add_divergence(site, first, {thread.waits_at, Access::WAIT, t, block}, "not all at the same one");
    }
    for (Thread& t : state.threads) t.waits_at = NONE;
    meet(all);
    drain();
    kernel->totals[BARRIERS]++;
}

// The block waits for the grid: as at __syncthreads, but other blocks run until it resumes.
void suspend_block() {
    if (!recording) return;
    barrier_completed("grid.sync");
    recording = is_recorded = in_block = false;
    arriving[block] = state.threads[0].clock;
    suspended[block] = std::move(state);
}
void resume_block(uint64_t number) {
    const auto found = suspended.find(static_cast<unsigned>(number));
    if (found == suspended.end()) return;
    block = found->first;
    state = std::move(found->second);
    suspended.erase(found);
    l1.reset(l1_bytes_per_block());
    recording = is_recorded = in_block = true;
}
void grid_completed() { at_grid_barrier = std::exchange(arriving, {}); }

// Shuffles, votes and __syncwarp order the accesses of the lanes; tensor-core instructions do not.
void collective_completed(unsigned first, unsigned lanes, unsigned mask, const char* name) {
    if (!recording) return;
    const Pause pause;
    uint32_t alive = 0;
    std::vector<unsigned> group;
    for (unsigned lane = 0; lane < LANES && first + lane < threads_in_block; lane++) {
        if (!state.threads[first + lane].is_over) alive |= 1u << lane;
        if (lanes >> lane & 1) group.push_back(first + lane);
    }
    for (unsigned lane = 0; lane < LANES && first + lane < threads_in_block && strncmp(name, "__shfl", 6) == 0; lane++)
        if ((mask & ~lanes) >> lane & 1)
            add_divergence(state.threads[group[0]].waits_at, group[0], {NONE},
                           "thread " + std::to_string(first + lane) + ", which its mask names, has ended");
    for (unsigned t : group) state.threads[t].waits_at = NONE;
    if (name[0] == '_') meet(group);
    else pass(group);
    state.exchanges[first / LANES]++;
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
    me().synchronised();
}

// fence.proxy.async
void proxy_fence() {
    if (!recording) return;
    const Pause pause;
    me().fenced = join(me().fenced, join({moment_of(current)}, actors()));
    me().synchronised();
}

static Sync& sync_of(const void* barrier) {
    const auto [place, is_new] = state.syncs.try_emplace(barrier);
    if (is_new) place->second.slot = static_cast<unsigned>(state.syncs.size() - 1) % ENGINES;
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
          {moment_of(current), current, me().own, kind, number, false});
    return number;
}

void mbarrier_initialised(const void* barrier, const void* site) {
    if (!recording) return;
    const Pause pause;
    state.syncs.erase(barrier);
    touch_barrier(barrier, Kind::WRITE, site);
}

void arrived(const void* barrier, const void* site) {
    if (!recording) return;
    const Pause pause;
    touch_barrier(barrier, Kind::ATOMIC, site);
    Sync& sync = sync_of(barrier);
    sync.arriving.take({join({moment_of(current)}, actors()), me().fenced,
                        join({{me().passed, current, me().step}}, actors())});
    me().step++;
    me().synchronised();
}

// Ends a phase of an mbarrier, and with it the TMA copies that the phase counts. A wait specifies only the parity of a
// phase, so a thread that waits for the previous phase must have seen its end by now. Otherwise the wait may begin
// after this phase: it then sees the parity from before the previous phase and blocks until the next phase ends.
void phase_completed(const void* barrier, unsigned parity) {
    if (!recording) return;
    const Pause pause;
    Sync& sync = sync_of(barrier);
    const Moment ends{sync.arriving.passed, NONE, 0};
    for (const auto& [waiter, site] : sync.waiters)
        if (!ends.covers(waiter.actor / LANES * LANES, 1u << waiter.actor % LANES, waiter.own))
            add(kernel->races, Space::SHARED, {}, 0, {site, Access::LOAD, waiter.actor, block},
                {site, Access::STORE, current, block},
                "the wait may begin after the next phase too: it then sees the old parity and blocks");
    sync.waiters.clear();
    sync.phases++;
    sync.arriving.clock = join({{sync.arriving.clock, first_engine + sync.slot, sync.phases}}, actors());
    sync.ended[parity] = sync.arriving;
}

void waited(const void* barrier, unsigned parity, const void* site) {
    if (!recording) return;
    const Pause pause;
    const uint32_t number = touch_barrier(barrier, Kind::ATOMIC, site);
    Sync& sync = sync_of(barrier);
    me().take(sync.ended[parity]);
    me().registers.drop_all();
    if (number != NONE) sync.waiters.push_back({{nullptr, current, me().step}, number});
}

// ==== PTX instructions ===================================================================================

// cp.async reads and writes at an unspecified time between the instruction and the wait.
void cp_async(const void* to, size_t bytes, const void* from, size_t filled, const void* site) {
    if (!recording && !watching) return;
    const Pause pause;
    const auto width = static_cast<unsigned>(bytes);
    const uintptr_t pc = number_of(site);
    Place target = memory.find(to), source{};
    const bool is_stored = is_inside(target, Access::STORE, By::COPY_ASYNC, to, bytes, pc);
    if (filled > 0) source = memory.find(from);
    const bool is_loaded = filled > 0 && is_inside(source, Access::LOAD, By::COPY_ASYNC, from, filled, pc);
    if (!is_stored || !is_recorded) return;
    Thread& t = me();
    const Moment issued = moment_of(current);
    const uint32_t store = find_site(pc, 0, width, Space::SHARED, Access::STORE, By::COPY_ASYNC);
    if (state.counting) t.events.push_back({target.at, store, t.segment});
    if (is_loaded) {
        const uint32_t load = find_site(pc, 0, width, Space::GLOBAL, Access::LOAD, By::COPY_ASYNC);
        if (state.counting) t.events.push_back({source.at, load, t.segment});
        touch(Space::GLOBAL, source.at, static_cast<unsigned>(filled),
              {issued, current, t.own, Kind::READ, load});
    }
    t.own++;
    t.copies.push_back({issued, target.at, width, store, t.copy_groups});
}

void cp_async_commit() {
    if (recording) me().copy_groups++;
}

void cp_async_wait(unsigned pending) {
    if (!recording) return;
    const Pause pause;
    const Thread& t = me();
    size_t done = 0;
    while (done < t.copies.size() && t.copies[done].group + pending < t.copy_groups) done++;
    complete_copies(done, t.own);
}

// Makes the accesses of a TMA copy or wgmma. Their actor and tick: of the mbarrier that counts a copy's bytes, and its
// current phase; or of the warp, and the number of its wgmma.
static void complete_bulk(const Bulk& bulk, unsigned actor, Tick tick) {
    for (const Bulk::Side* side : {&bulk.first, &bulk.second}) {
        const Site& site = kernel->sites[side->site];
        const Kind kind = site.access == Access::STORE ? Kind::WRITE : Kind::READ;
        const Clock* fenced = bulk.barrier == nullptr ? &bulk.fenced : nullptr;
        for (uint64_t at : side->at)
            touch(site.space, at, GRANULE, {bulk.moment, actor, tick, kind, side->site, false, fenced});
    }
}

unsigned load_issued(const void* barrier, const void* site) {
    if (!recording) return 0;
    const Pause pause;
    const uint32_t to = find_site(number_of(site), 0, GRANULE, Space::SHARED, Access::STORE, By::COPY_ENGINE);
    const uint32_t from = find_site(number_of(site), 0, GRANULE, Space::GLOBAL, Access::LOAD, By::COPY_ENGINE);
    state.bulks.push_back({moment_of(current), barrier, nullptr, {to, {}}, {from, {}}});
    me().own++;
    return static_cast<unsigned>(state.bulks.size() - 1);
}

void load_chunk(unsigned load, const void* to, const void* from) {
    if (!recording) return;
    const Pause pause;
    state.bulks[load].first.at.push_back(memory.find(to).at);
    if (from != nullptr) state.bulks[load].second.at.push_back(memory.find(from).at);
}

void load_completed(unsigned number) {
    if (!recording) return;
    const Pause pause;
    const Bulk load = std::exchange(state.bulks[number], {});
    const Sync& sync = sync_of(load.barrier);
    complete_bulk(load, first_engine + sync.slot, sync.phases + 1);
    account_bulk(load.first);
    account_bulk(load.second);
}

// wgmma reads its operands at an unspecified time between the instruction and the wait. It is an instruction of the
// whole warp, so it starts with the maximum of its lanes' clocks.
unsigned wgmma_issued(unsigned warp, uint64_t flops, const void* pc) {
    if (!recording) return 0;
    const Pause pause;
    kernel->totals[TENSOR_FLOPS] += flops;
    std::vector<Moment> lanes;
    Clock fenced;
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++) {
        lanes.push_back(moment_of(t));
        fenced = join(fenced, state.threads[t].fenced);
        state.threads[t].own++;
    }
    const uint32_t site = find_site(number_of(pc), 0, GRANULE, Space::SHARED, Access::LOAD, By::WGMMA);
    const Moment issued{join(lanes, actors()), warp * LANES, lanes[0].own};
    state.bulks.push_back({issued, nullptr, fenced, {site, {}}, {site, {}}});
    return static_cast<unsigned>(state.bulks.size() - 1);
}

void wgmma_reads(unsigned number, const void* address, Operand operand) {
    if (!recording) return;
    const Pause pause;
    Bulk& product = state.bulks[number];
    (operand == Operand::A ? product.first : product.second).at.push_back(memory.find(address).at);
}

void wgmma_completed(unsigned number) {
    if (!recording) return;
    const Pause pause;
    const Bulk product = std::exchange(state.bulks[number], {});
    const unsigned warp = product.moment.actor / LANES;
    complete_bulk(product, wgmma_actor(warp), ++state.wgmma_ticks[warp]);
    if (!product.first.at.empty()) account_bulk(product.first);
    if (warp % 4 == 0) account_bulk(product.second);   // the four warps of a warpgroup share one read of B
}

void wgmma_waited(unsigned warp) {
    if (!recording) return;
    const Pause pause;
    const Clock products = join({{nullptr, wgmma_actor(warp), state.wgmma_ticks[warp]}}, actors());
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++)
        state.threads[t].clock = join(state.threads[t].clock, products);
}

void tensor_flops(uint64_t flops) {
    if (recording) kernel->totals[TENSOR_FLOPS] += flops;
}
void special_function() {
    if (recording) me().special++;
}

// Ends the block that runs when the program ends, which is not counted. Pending asynchronous accesses are recorded as
// never waited for.
static void end_unfinished_block() {
    state.counting = false;
    recording = true;
    for (unsigned i = 0; i < state.bulks.size(); i++)
        if (state.bulks[i].barrier == nullptr && !state.bulks[i].second.at.empty()) wgmma_completed(i);
    end_block();
}

// ==== the recording ==========================================================================================

static const char* name_of(Space space) { return space == Space::SHARED ? "shared" : "global"; }
static json to_json(const Site& site) {
    json offsets = json::array();
    uint64_t base = ~uint64_t{0};
    for (unsigned lane = 0; lane < LANES; lane++)
        if (site.worst.is_active(lane)) base = std::min(base, site.worst.address[lane] / LINE * LINE);
    for (unsigned lane = 0; lane < LANES; lane++)
        offsets.push_back(site.worst.is_active(lane) ? static_cast<int64_t>(site.worst.address[lane] - base) : -1);
    json all = {{"stack", stacks.with_callers(site.pc, site.stack)}, {"part", site.part},
                {"space", name_of(site.space)}, {"access", ACCESS_NAMES[static_cast<int>(site.access)]},
                {"by", BY_NAMES[static_cast<int>(site.by)]}, {"bytes_per_lane", site.bytes},
                {"requests", site.requests}, {"lanes", site.lanes}, {"bytes", site.bytes_used},
                {"sectors", site.sectors}, {"least_sectors", site.least_sectors},
                {"wavefronts", site.wavefronts}, {"least_wavefronts", site.least_wavefronts},
                {"l1_hits", site.l1_hits}, {"dram_sectors", site.dram_sectors}, {"slowest", site.slowest}};
    if (site.worst.active != 0) all["picture"] = {{"base", base}, {"offsets", offsets}};
    return all;
}

static json to_json(const Kernel& kernel, const Hazards& hazards) {
    json all = json::array();
    for (const auto& [key, h] : hazards) {
        json accesses = json::array();
        for (const Side* side : {&h.later, &h.earlier}) {
            if (side->site == NONE) break;
            const Site& site = kernel.sites[side->site];
            const bool is_index = site.bytes == 0 && side->access != Access::WAIT;
            accesses.push_back({{"stack", stacks.with_callers(site.pc, site.stack)}, {"block", side->block},
                                {"access", is_index ? "index" : ACCESS_NAMES[static_cast<int>(side->access)]},
                                {"by", BY_NAMES[static_cast<int>(site.by)]},
                                {"thread", side->actor < kernel.threads() ? static_cast<int>(side->actor) : -1}});
        }
        const json allocated = h.owner.site != 0 ? json::array({h.owner.site}) : json::array();
        all.push_back({{"memory", name_of(h.space)}, {"array", h.owner.name}, {"address", h.address},
                       {"allocation", h.owner.begin}, {"bytes", h.owner.bytes}, {"allocated", allocated},
                       {"count", h.count}, {"why", std::get<std::string>(key)}, {"accesses", accesses}});
    }
    return all;
}

static json to_json(const Kernel& kernel) {
    json sites = json::array(), barriers = json::array();
    for (const Site& site : kernel.sites)
        if (site.requests > 0) sites.push_back(to_json(site));
    for (const auto& [name, pc, stack] : kernel.syncs)
        barriers.push_back({{"name", name}, {"stack", stacks.with_callers(pc, stack)}});
    uint64_t first = 0;
    while (first < kernel.numbers.size() && kernel.numbers[first] == first) first++;
    const json checked = {{"first", first}, {"between", kernel.between + kernel.numbers.size() - first},
                          {"last", kernel.last}, {"launches", kernel.recorded_launches},
                          {"later", kernel.later_blocks}, {"missed_launches", kernel.missed_launches}};
    json launch = {{"hot_atomics", kernel.hot_atomics}}, longest = {{"hot_atomics", 0}};
    for (size_t i = 0; i < std::size(FIGURES); i++) {
        const uint64_t unit = i <= PARTIAL_FETCHED ? SECTOR : 1;
        launch[FIGURES[i]] = of_launch(kernel, i) * static_cast<double>(unit);
        longest[FIGURES[i]] = of_longest_block(kernel, i) * unit;
    }
    launch["dram_load"] = memory_loads(kernel) * SECTOR;
    launch["longest_block"] = longest;
    return {{"symbol", kernel.symbol}, {"range", kernel.range}, {"grid", kernel.shape.grid},
            {"block", kernel.shape.block}, {"integers", kernel.shape.variant.integers},
            {"dynamic_shared", kernel.shape.dynamic_shared}, {"static_shared", kernel.static_shared()},
            {"launches", kernel.launches}, {"recorded_blocks", kernel.recorded_blocks}, {"blocks", kernel.blocks()},
            {"checked", checked}, {"threads", kernel.threads()}, {"tensor_flops", kernel.totals[TENSOR_FLOPS]},
            {"launch", launch}, {"sites", sites}, {"races", to_json(kernel, kernel.races)},
            {"uninitialised", to_json(kernel, kernel.uninitialised)},
            {"out_of_bounds", to_json(kernel, kernel.out_of_bounds)},
            {"divergent", to_json(kernel, kernel.divergent)}, {"barriers", barriers}};
}

static void write(const std::string& ended) {
    if (is_written || !is_open || getenv("INSPECT_OUT") == nullptr) return;
    is_written = true;
    // A kernel whose first launch is not finished has no estimate.
    if (in_block && kernel->launches == 1) kernel->recorded_blocks = 0;
    if (std::exchange(recording, false)) end_unfinished_block();
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    json all = {{"program", program}, {"card", card_->key}, {"ended", ended}, {"ended_at", ended_at},
                {"kernels", json::array()}, {"matmuls", json::array()}, {"sequence", sequence}};
    for (const auto& kernel : kernels) all["kernels"].push_back(to_json(*kernel));
    for (const Product& p : products)
        all["matmuls"].push_back({{"m", p.m}, {"n", p.n}, {"k", p.k}, {"type", p.type}, {"out_bytes", p.out_bytes},
                                  {"accumulate", p.accumulate}, {"epilogue", p.epilogue}});
    std::ofstream(getenv("INSPECT_OUT")) << all.dump(1) << '\n';
}

// Called after each access by the program. Lets other threads run if this one may wait for them in a loop: it has
// accessed nothing but a few addresses for some time, or has run for long.
static void let_others_run(const void* address) {
    constexpr unsigned few = 4, some = 256, many = 1 << 20;
    static std::array<const void*, few> recent{};
    static unsigned next, repeats, accesses, thread;
    if (is_busy || !HostMemory::device_works()) return;
    if (std::exchange(thread, current) != current) accesses = 0;
    repeats = std::find(recent.begin(), recent.end(), address) != recent.end() ? repeats + 1 : 0;
    if (repeats == 0) recent[next++ % few] = address;
    if ((++accesses < many && repeats < some) || space_of(address) == Space::OTHER || yield == nullptr) return;
    accesses = repeats = 0;
    yield();
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

#include "../cpu/instrumented.h"

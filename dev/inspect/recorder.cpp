// Records the memory accesses of a program's kernels, for dev/inspect:
//
//   - The program is compiled with -fsanitize=thread but not linked with that sanitizer. This file has the functions
//     that it calls at each load, store, function entry and exit. The emulator calls the functions of dev/cpu/watch.h.
//   - The n-th accesses of an instruction by the lanes of a warp, since the warp synchronised, form a request:
//     requests.h counts its sectors and wavefronts, caches.h its hits.
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

// ==== addresses ==========================================================================================

static uintptr_t number_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }

enum class Space : uint8_t { OTHER, SHARED, GLOBAL, HOST };
// Dynamic shared memory, a static array, an allocation or a variable.
struct Range {
    uintptr_t begin = 0;
    size_t bytes = 0;
    Space space = Space::OTHER;       // OTHER: a variable of the emulator, or no device memory
    uint64_t before = 0, after = 0;   // unused bytes before and after it
    const char* name = "";            // mangled, of a static array or a variable of the user
    uintptr_t site = 0;               // of an allocation: the call
    uint64_t at = 0;                  // offset in shared memory; in global memory, allocations follow one another
    bool has(uintptr_t p) const { return p - begin < bytes; }
    uint64_t distance(uintptr_t p) const { return has(p) ? 0 : p < begin ? begin - p : p - begin - bytes + 1; }
    bool is_near(uintptr_t p, size_t size) const {   // overlaps with it or its unused bytes
        return begin - before < p + size && p < begin + bytes + after;
    }
};

struct Place {
    Space space = Space::OTHER;
    uint64_t at = 0;                // as in Range
    const Range* range = nullptr;   // that has the place or is next to it; valid until the next find()
    bool has(size_t size) const { return at - range->at < range->bytes && at - range->at + size <= range->bytes; }
};

// Translates host addresses to emulated GPU addresses. They are equal in every run, so the cache model is reproducible.
extern "C" char inspect_guards __attribute__((weak));
class Memory {
public:
    static constexpr uint64_t STATIC_ARRAYS = cuda_cpu::hopper.l1_and_shared;   // offset: after dynamic shared memory
    // Bytes before and after each variable, which dev/inspect/Makefile inserts; 0 without them.
    const uint64_t VARIABLE_GUARD = reinterpret_cast<uintptr_t>(&inspect_guards);
    // Addresses of the next ranges. Those of allocations do not depend on the number of variables.
    uint64_t next_array = STATIC_ARRAYS, next_allocation = 1 << 21, next_variable = uint64_t{1} << 40;
    std::map<uint64_t, uint64_t> accessed;   // offset and bytes of the static arrays that have been found

    // Adds a range. next: its address; becomes that of the next one, `unused` bytes before and after each.
    void add(Range range, uint64_t& next, uint64_t unused, uint64_t alignment) {
        range.at = next;
        next += (range.bytes + 2 * unused + alignment - 1) / alignment * alignment;
        ranges_[range.begin] = range;
        forget_recent();
    }
    void set_dynamic(const void* place, size_t all_bytes) {
        dynamic_ = &ranges_[number_of(place)];
        *dynamic_ = {number_of(place), all_bytes, Space::SHARED};
    }
    void set_dynamic_bytes(size_t of_launch) {
        dynamic_->after += dynamic_->bytes - of_launch;
        dynamic_->bytes = of_launch;
        forget_recent();
    }
    void remove(const void* place) {
        ranges_.erase(number_of(place));
        forget_recent();
    }
    void forget_recent() { recent_ = {}; }   // the host may have allocated memory next to a range

    // Fast test: returns true only if find() would find no error, but not in every such case.
    bool is_recent(uintptr_t p, size_t bytes) const {
        const Range& recent = recent_[p / PAGE % recent_.size()];
        return recent.has(p) && recent.has(p + bytes - 1);
    }
    Place find(const void* address) {
        const uintptr_t p = number_of(address), page = p / PAGE * PAGE;
        Range& recent = recent_[p / PAGE % recent_.size()];
        if (!recent.has(p)) {
            const Range* const range = nearest(p, 1);
            HostMemory& host = HostMemory::of_program();
            if (range == nullptr && host.overlaps(p, 1)) return {Space::HOST};
            // Many instrumented accesses are to a thread's stack or to the emulator's own data.
            const bool is_empty = range == nullptr && nearest(page, PAGE) == nullptr && !host.overlaps(page, PAGE);
            if (range == nullptr && !is_empty) return {};
            if (range != nullptr && !range->has(p)) return {range->space, range->at + p - range->begin, range};
            recent = is_empty ? Range{page, PAGE} : *range;
        }
        if (recent.space == Space::SHARED && recent.at > 0) accessed[recent.at] = recent.bytes;
        return {recent.space, recent.at + p - recent.begin, &recent};
    }

    // Returns the place of an address in an array, allocation or variable.
    Place place(Space space, uint64_t at) const {
        for (const auto& [begin, range] : ranges_)
            if (range.space == space && at - range.at < range.bytes) return {space, at, &range};
        return {space, at};
    }

private:
    // Returns the range that overlaps these bytes, also with its unused bytes: the nearest one; nullptr if none.
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
    std::map<uintptr_t, Range> ranges_;   // by begin
    Range* dynamic_ = nullptr;            // shared memory
};

// ==== call stacks and sites ==============================================================================

// Call stacks as a tree: a node is the node of the caller and the return address of a call. Node 0: no call.
static std::vector<std::pair<uint32_t, uintptr_t>> calls{{0, 0}};
static std::map<std::pair<uint32_t, uintptr_t>, uint32_t> call_numbers;   // index in `calls`

// Returns the address of an instruction, followed by the return addresses of its callers, innermost first.
static json with_callers(uintptr_t pc, uint32_t node) {
    json all = json::array({pc});
    for (; node != 0; node = calls[node].first) all.push_back(calls[node].second);
    return all;
}

// An instruction that accesses memory, in one call stack, with its counts.
struct SiteKey {
    uintptr_t pc;
    uint32_t stack;
    unsigned part, bytes;
    Space space;
    Access access;
    By by;
    bool operator<(const SiteKey& b) const {
        return std::tie(pc, stack, part, bytes, space, access, by) <
               std::tie(b.pc, b.stack, b.part, b.bytes, b.space, b.access, b.by);
    }
};
struct Site : SiteKey {
    uint64_t requests = 0, lanes = 0, bytes_used = 0, sectors = 0, least_sectors = 0, wavefronts = 0,
             least_wavefronts = 0, l1_hits = 0, dram_sectors = 0;
    std::array<uint64_t, 3> slowest{};   // loads of global memory by threads, by their slowest memory: L1, L2, memory
    Range allocation;        // that it has accessed last
    bool adds_floats = false;   // by atomics
    Request worst;
    double worst_rank = 0;
};

// ==== kernels ============================================================================================

// Counts of a block or launch. Sectors: the first five.
enum Figure {
    DRAM_LOAD, DRAM_STORE,
    RESIDENT_LOAD, RESIDENT_STORE,   // of these, the sectors that are in L2 when the launch begins
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
    "dram_load", "dram_store", "resident_load", "resident_store", "partial_fetched", "l2", "partial", "cycles",
    "cycles_of_16", "tensor_flops", "special",
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
    Range owner;            // the array or allocation
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
    uint64_t launches = 0, accesses = 0;
    uint64_t recorded_launches = 0;         // of its launches: those with blocks that are recorded or checked
    uint64_t missed_launches = 0;           // launches with other arguments than those
    uint64_t between = 0, last = 0;         // blocks of the first launch that are only checked; last: at its end
    uint64_t later_blocks = 0;              // blocks of later launches that are checked
    uint64_t checked_accesses = 0;
    std::set<uint64_t> arguments;           // hashes, of the recorded launches
    uint64_t wave = 1;       // blocks that run at the same time
    std::map<uint64_t, uint64_t> arrays;   // offset and bytes of the static arrays that recorded blocks access

    std::vector<Site> sites;
    std::map<SiteKey, uint32_t> site_numbers;
    std::set<std::tuple<std::string, uintptr_t, uint32_t>> syncs;   // name, pc and stack
    Totals totals{};     // of the block that runs
    struct Recorded {
        uint64_t block;
        Totals totals;
        double operator[](size_t figure) const { return static_cast<double>(static_cast<int64_t>(totals[figure])); }
    };
    std::vector<Recorded> recorded;
    bool is_complete = true;   // else it has no estimate, because the program ended in its first launch
    double hot_atomics = 0;    // the launch's requests to the region with most
    Hazards races, uninitialised, out_of_bounds, divergent;

    uint64_t blocks() const { return uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]; }
    unsigned threads() const { return shape.block[0] * shape.block[1] * shape.block[2]; }
    // The arrays that the kernel declares itself, or those that it accesses, also in functions that it calls.
    uint64_t static_shared() const {
        uint64_t accessed = 0;
        for (const auto& [at, bytes] : arrays) accessed += bytes;
        return std::max<uint64_t>(shape.static_shared, accessed);
    }
    // Returns the sum of a figure over the recorded blocks from this one on.
    double sum(size_t figure, size_t from = 0) const {
        return std::accumulate(recorded.begin() + static_cast<std::ptrdiff_t>(from), recorded.end(), 0.0,
                               [&](double sum, const Recorded& block) { return sum + block[figure]; });
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
    const auto& recorded = kernel.recorded;
    const double unseen = static_cast<double>(kernel.blocks() - recorded.size()), total = kernel.sum(figure);
    if (recorded.empty() || recorded.size() == kernel.blocks()) return total;
    struct { double sum = 0, blocks = 0; } firsts, others;   // blocks of the second row and later ones
    const size_t row = kernel.shape.grid[0], half = recorded.size() / 2;
    for (size_t b = row; b < recorded.size() && recorded[b].block == b; b++) {
        auto& kind = b % row == 0 ? firsts : others;
        kind.sum += recorded[b][figure];
        kind.blocks++;
    }
    const double rest = static_cast<double>(recorded.size() - half);
    if (others.blocks == 0) return total + unseen * kernel.sum(figure, half) / rest;
    const double in_row = static_cast<double>(row - 1) * others.sum / others.blocks + firsts.sum / firsts.blocks;
    return total + unseen * in_row / static_cast<double>(row);
}

// Returns the sectors that a launch loads from memory. If the recorded blocks are 0, 1 and the first one of the second
// row: block 1 finds in L2 what the blocks of a row share, and the third block what those of a column share. All blocks
// of a wave that share a sector load it once.
static double memory_loads(const Kernel& kernel) {
    const uint64_t blocks = kernel.shape.grid[0];   // of a row
    if (kernel.recorded.size() != 3 || kernel.recorded.back().block != blocks || blocks < 3)
        return of_launch(kernel, DRAM_LOAD);
    const double alone = kernel.recorded[0][DRAM_LOAD], of_row = alone - kernel.recorded[1][DRAM_LOAD];
    const double of_column = alone - kernel.recorded[2][DRAM_LOAD];
    const double wave = static_cast<double>(kernel.wave), row = static_cast<double>(blocks);
    const double across = std::min(wave, row), down = std::max(1.0, wave / row);
    return static_cast<double>(kernel.blocks()) * (alone - of_row * (1 - 1 / across) - of_column * (1 - 1 / down));
}

// ==== threads ============================================================================================

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

struct Warp {
    std::vector<Queued> open, queue;      // since the warp's last synchronisation; before it, since the last barrier
    struct OfSite {
        std::vector<size_t> requests;     // [n]: index in `open` of the request of the n-th accesses
        std::array<uint32_t, LANES> accesses{};   // by lane
        uint32_t segment = 0, in_segment = 0;   // of the last request, and the requests before it in this segment
    };
    std::vector<OfSite> of_sites;
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> open_rounds;   // {segment, executions / UNROLL} -> round
    std::vector<Level> rounds;            // in `queue`
    uint32_t exchanges = 0;               // collectives since the last barrier
    Tick wgmma = 0;                       // completed ones
};

// Accesses that an instruction makes later: the stores of cp.async, a TMA copy of one box of a tensor map, or a wgmma.
struct Bulk {
    Moment moment;
    unsigned group;        // of cp.async
    const void* barrier;   // of a TMA copy
    Clock fenced;          // of a wgmma
    struct Side {
        uint32_t site;
        std::vector<uint64_t> at;
    };
    std::vector<Side> sides;   // to and from; operands A and B
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
    // Values that a compiler keeps in registers: a repeated load of an address at the same site is not counted, until
    // the thread synchronises or stores to the same memory space, which may alias.
    using Held = std::pair<uint64_t, uint64_t>;   // address and site; `dropped` of its space
    std::array<Held, 32> registers{};
    std::array<uint64_t, 3> dropped{1, 1, 1};     // times, by space
    bool holds(Space space, uint32_t site, uint64_t address) {
        const Held now{address << 20 ^ site, dropped[static_cast<size_t>(space)]};
        return std::exchange(registers[(address / WORD * 7 + site * 13) % registers.size()], now) == now;
    }
    void drop_all() {
        for (uint64_t& times : dropped) times++;
    }

    // clock at the last __threadfence, or __threadfence_block; blocks or threads that see a later atomic acquire it
    Clock released, released_in_block;
    Tick own = 1, step = 1;
    bool is_over = false;
    uint32_t waits_at = NONE;   // the site of the barrier or collective that it waits in
    uint32_t last_site = NONE;  // of its last access
    uint32_t stack = 0;
    uint32_t segment = 0;    // stores and synchronisations so far: loads are not moved across them
    struct {
        Space space;
        uint64_t at;
        uint32_t site;
        std::vector<Hazards::iterator> races;
    } load{};                     // the latest access, if it is a load
    std::vector<Bulk> copies;     // by cp.async
    unsigned copy_groups = 0;
    uint64_t special = 0;    // special functions
    void synchronised() {
        own++;
        load = {};
        drop_all();
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

// ==== state ==============================================================================================

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
static const int seconds = atoi(setting("INSPECT_SECONDS").c_str());   // ends the program after this time; 0: never
static const std::set<uintptr_t> removed = settings<uintptr_t>("INSPECT_REMOVE");   // addresses of barriers to skip
static const auto start = std::chrono::steady_clock::now();

// How much of a launch is counted: at least so many blocks and accesses, at most a few times as many accesses. With a
// second dimension, the work of a block may depend on blockIdx.x (as in attention). So whole rows of blocks, in a whole
// program of up to MAX_ROW, may have more accesses. If one or two blocks reach the limit, these are blocks 0 and 1, and
// the first one of the second row is counted too: see count_block() and memory_loads().
constexpr uint64_t COUNTED_BLOCKS = 8, MAX_ROW = 256;
static const uint64_t all_accesses = strtoull(setting("INSPECT_ACCESSES").c_str(), nullptr, 10);
static const uint64_t counted_accesses = !is_whole ? 1 << 18 : all_accesses > 0 ? all_accesses : 1 << 24;
// In a whole program, further blocks of each launch are not counted but checked for races and uninitialised reads, with
// half as many accesses: see is_checked(). The accesses of all other blocks are only compared with the allocations.
constexpr uint64_t LEAST_CHECKED = 4;

// ---- the program
static const cuda_cpu::Card* card_;    // card() is a function of dev/cpu
static json registers = json::object();   // INSPECT_REGISTERS: the output of sass.py
static bool is_open, is_written;
static std::vector<uintptr_t> ended_at;   // the call stack of the host code that ended the program
// What runs: no block; a block; one whose addresses are compared with the allocations; one that is recorded.
static enum { NOTHING, BLOCK, WATCHED, RECORDED } running;
static bool is_busy;                   // the recorder is running
static void (*yield)();                // lets other threads of the block run
static bool records_launches = true;   // set by record_launches()
static unsigned from_launches;         // launches in the range `from`
static Memory memory;
static std::vector<std::unique_ptr<Kernel>> kernels;
// By function, NVTX range, grid, block, dynamic shared memory, integer arguments and null pointers.
static std::map<json, Kernel*> by_shape;
static std::vector<Product> products;
static std::vector<std::pair<const char*, size_t>> sequence;

// ---- of all recorded blocks of a launch
static L1 l1;
static L2 l2;
static Resident l2_before;   // the launch
struct Atomics {
    double requests = 0;                 // per sector
    uint64_t blocks = 0;                 // that have such requests
    uint64_t last_block = ~uint64_t{0};
};
static std::unordered_map<uint64_t, Atomics> atomics;   // by address / ATOMIC_REGION

// ---- the block
constexpr unsigned ENGINES = 64;                 // TMA actors per block: one per mbarrier, up to this many
static unsigned block, threads_in_block, first_engine, current;   // current: the thread that runs
static size_t queued_requests;                   // of all warps
static bool is_sum_of_floats;                    // the next atomic
static uint64_t counted_warp;                    // the warp whose requests are counted: its number in the launch
struct Block {
    bool counting = false;                         // its requests are counted
    std::vector<Thread> threads;
    Shadow shared_shadow;
    std::map<const void*, Sync> syncs;
    std::map<unsigned, Clock> acquired;            // clocks of other blocks, received through atomics
    std::map<std::pair<Space, uint64_t>, Clock> released_in_block;   // by address of each of the block's atomics
    std::vector<Bulk> bulks;
    std::vector<Warp> warps;
};
static Block state;

// ---- the launch
static Kernel* kernel;
static struct Launch {
    bool is_watched = false, is_recorded = false;
    uint64_t next_block = 0;
    uint64_t first_checked = 0, blocks_to_check = 0;          // see is_checked()
    Shadow shadow;                                            // of global memory
    std::map<uint64_t, std::map<unsigned, Clock>> released;   // address of an atomic -> block -> clock
    // Of a cooperative launch: blocks that wait for the grid, and clocks at its next and at its last barrier.
    std::map<unsigned, Block> suspended;
    std::map<unsigned, Clock> arriving, at_grid_barrier;
} launch;

static bool is_recording() { return running == RECORDED && !is_busy; }
static bool is_checking() { return running >= WATCHED && !is_busy; }

// Suspends recording in a scope: the recorder's calls to the standard library may resolve to the program's
// instrumented copies.
struct Pause {
    const bool was_busy = std::exchange(is_busy, true);
    ~Pause() { is_busy = was_busy; }
};

// Returns what an address belongs to, whether a block is recorded or not.
static Place find(const void* address) {
    const Pause pause;
    return memory.find(address);
}

static Thread& me() { return state.threads[current]; }
static Moment moment_of(unsigned t) { return {state.threads[t].clock, t, state.threads[t].own}; }
static unsigned warps() { return (threads_in_block + LANES - 1) / LANES; }
static unsigned actors() { return first_engine + ENGINES + warps(); }
static unsigned wgmma_actor(unsigned warp) { return first_engine + ENGINES + warp; }

static void write(const std::string& ended);
static void end_program(const std::string& ended, int code = 0) {
    write(ended);
    fflush(stdout);
    _Exit(code);
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

struct Unordered {
    const char* why;
    unsigned actor;   // of the entry; NONE: the entry's access happens before the new one
};
// Returns why the entry's access does not happen before the new one. Accesses through the async proxy also need a
// fence.proxy.async after a thread's store.
static Unordered unordered(const Entry& entry, Space space, const NewAccess& later) {
    if (space == Space::GLOBAL && entry.block != block) {
        const auto of = [&](const std::map<unsigned, Clock>& clocks) {
            const auto found = clocks.find(entry.block);
            return Moment{found == clocks.end() ? nullptr : found->second, NONE, 0}.not_covered(entry);
        };
        return {"blocks of one launch are not ordered", std::max(of(state.acquired), of(launch.at_grid_barrier))};
    }
    if (const unsigned actor = later.moment.not_covered(entry); actor != NONE)
        return {"no synchronisation between them", actor};
    if (later.fenced == nullptr || !entry.generic || entry.kind == Kind::READ) return {"", NONE};
    return {"no fence.proxy.async between them", Moment{*later.fenced, NONE, 0}.not_covered(entry)};
}

static Hazards::iterator add(Hazards& hazards, const Place& place, const Side& later, const Side& earlier,
                             const std::string& why) {
    const Range owner = place.range == nullptr ? Range{} : *place.range;
    const Hazard first{place.space, owner, static_cast<int64_t>(place.at - owner.at), later, earlier, 0};
    const auto hazard = hazards.try_emplace({later.site, earlier.site, why, owner.at}, first).first;
    hazard->second.count++;
    return hazard;
}

static Access access_of(Kind kind) { return is_read(kind) ? Access::LOAD : Access::STORE; }

// Returns whether to keep a read or atomic entry of another block. Entries of two other blocks are enough: a block that
// writes there later races with at least one of them. Further ones of those two blocks are merged.
static bool keep_of_others(Entry* (&others)[2], Entry& entry) {
    for (Entry*& other : others) {
        if (other == nullptr) other = &entry;
        if (other == &entry) return true;
        if (other->block != entry.block) continue;
        other->bytes |= entry.bytes;
        other->tick = std::max(other->tick, entry.tick);
        return false;
    }
    return false;
}

// Returns the bits of bytes in their granule.
static uint16_t mask_of(uint64_t at, uint64_t bytes) {
    return static_cast<uint16_t>(((1u << bytes) - 1) << at % GRANULE);
}

// Returns the entries of a granule.
static std::forward_list<Entry>& entries_at(Space space, uint64_t at) {
    Shadow& shadow = space == Space::SHARED ? state.shared_shadow : launch.shadow;
    return shadow[at / GRANULE / SHADOW_PAGE][at / GRANULE % SHADOW_PAGE];
}

// An atomic store does not read what it replaces: adds a write before all accesses.
static void overwritten(const volatile void* address, size_t bytes) {
    const Place place = find(const_cast<const void*>(address));
    const Entry entry{{0, 1, 0}, block, NONE, mask_of(place.at, bytes), Kind::ATOMIC, true};
    if (is_recording() && place.space == Space::SHARED) entries_at(place.space, place.at).push_front(entry);
}

static Accessors accessors(unsigned actor, Tick tick) {
    if (actor >= first_engine) return {tick, 1, actor};
    return {tick, 1u << actor % LANES, actor / LANES * LANES};
}

// Compares an access to bytes of one granule with earlier ones; returns its races.
static std::vector<Hazards::iterator> touch(Space space, uint64_t at, unsigned bytes, const NewAccess& later) {
    (state.counting ? kernel->accesses : kernel->checked_accesses)++;
    std::vector<Hazards::iterator> races;
    std::forward_list<Entry>& entries = entries_at(space, at);
    const uint64_t granule = at / GRANULE;
    const uint16_t mask = mask_of(at, bytes);
    const Accessors by = accessors(later.actor, later.tick);
    bool is_noted = false;
    unsigned missing = space == Space::SHARED && later.kind != Kind::WRITE ? mask : 0;   // bytes not written before
    Entry* others[] = {nullptr, nullptr};
    entries.remove_if([&](Entry& entry) {
        if (!is_read(entry.kind)) missing &= ~entry.bytes;
        if (entry.block != block && entry.kind == later.kind && later.kind != Kind::WRITE)
            return !keep_of_others(others, entry);
        const unsigned common = entry.bytes & mask;
        const uint64_t first = granule * GRANULE + (common == 0 ? 0 : static_cast<uint64_t>(__builtin_ctz(common)));
        // Atomics of one address have an order, so a block's own one is after those that it follows.
        const bool in_order = is_atomic(entry.kind) &&
                              (is_atomic(later.kind) ||
                               (entry.block != block && state.released_in_block.count({space, first}) > 0));
        const bool conflict = common != 0 && !(is_read(entry.kind) && is_read(later.kind)) && !in_order;
        const bool is_of_warp = entry.first_actor == by.first_actor && entry.block == block;
        if (is_of_warp && entry.kind == later.kind && entry.tick == later.tick) {
            const bool same_again = entry.lanes == by.lanes && (mask & ~entry.bytes) == 0;
            const bool another_lane = entry.kind != Kind::WRITE && entry.bytes == mask && entry.site == later.site;
            if (same_again || another_lane) {
                entry.lanes |= by.lanes;
                is_noted = true;
                return false;
            }
        }
        const Unordered race = conflict ? unordered(entry, space, later) : Unordered{"", NONE};
        if (race.actor != NONE) {
            const bool is_same = entry.kind == Kind::WRITE && later.kind == Kind::WRITE && is_of_warp &&
                                 entry.site == later.site;
            races.push_back(add(kernel->races, memory.place(space, first),
                                {later.site, access_of(later.kind), later.moment.actor, block},
                                {entry.site, access_of(entry.kind), race.actor, entry.block},
                                is_same ? ONE_INSTRUCTION : race.why));
        }
        const bool before = conflict ? race.actor == NONE
                                     : entry.block == block && later.moment.not_covered(entry) == NONE;
        const bool replaces = later.kind == Kind::WRITE || entry.kind == later.kind;
        return before && replaces && (entry.bytes & ~mask) == 0;
    });
    if (missing != 0) {
        const Side read{later.site, Access::LOAD, later.moment.actor, block};
        const uint64_t first = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(missing));
        add(kernel->uninitialised, memory.place(space, first), read, {}, "");
    }
    if (!is_noted) entries.push_front({by, block, later.site, mask, later.kind, later.generic});
    return races;
}

// ==== accesses ===========================================================================================

// Returns the site's index in kernel->sites, adding it if it is new.
static uint32_t find_site(const void* pc, unsigned part, unsigned bytes, Space space, Access access, By by) {
    const SiteKey key{number_of(pc), running == RECORDED ? me().stack : 0, part, bytes, space, access, by};
    const auto [place, is_new] = kernel->site_numbers.try_emplace(key, static_cast<uint32_t>(kernel->sites.size()));
    if (is_new) kernel->sites.push_back({key});
    return place->second;
}

// Adds an access to the request of the n-th accesses by each lane of the warp.
static void enqueue(uint32_t site, uint64_t address) {
    if (!state.counting) return;
    Warp& warp = state.warps[current / LANES];
    const unsigned lane = current % LANES;
    if (site >= warp.of_sites.size()) warp.of_sites.resize(kernel->sites.size());
    Warp::OfSite& of_site = warp.of_sites[site];
    const size_t nth = of_site.accesses[lane]++;
    if (nth == of_site.requests.size()) {
        of_site.in_segment = nth > 0 && of_site.segment == me().segment ? of_site.in_segment + 1 : 0;
        of_site.segment = me().segment;
        const auto round = static_cast<uint32_t>(warp.open_rounds.size());
        const auto place = warp.open_rounds.try_emplace({of_site.segment, of_site.in_segment / UNROLL}, round).first;
        of_site.requests.push_back(warp.open.size());
        const unsigned bytes = kernel->sites[site].bytes;
        warp.open.push_back({site, place->second, bytes, {}});
        warp.open.back().request.bytes = bytes;
    }
    Request& request = warp.open[of_site.requests[nth]].request;
    request.address[lane] = address;
    request.active |= 1u << lane;
}

// An access by an instruction.
struct Accessed {
    Access access;
    By by;
    const void *address, *pc;
    size_t bytes;
};
static Accessed latest;

// Records a part of the latest access.
static void part_accessed(Space space, uint64_t at, unsigned bytes, unsigned part) {
    Thread& t = me();
    const uint32_t number = t.last_site = find_site(latest.pc, part, bytes, space, latest.access, latest.by);
    const bool is_load = latest.access == Access::LOAD, is_atomic = latest.by == By::ATOMIC;
    if (is_load && latest.by == By::THREAD && t.holds(space, number, at)) return;
    if (!is_load) {
        t.dropped[static_cast<size_t>(space)]++;
        t.segment++;
    }
    enqueue(number, at);
    if (is_atomic && space == Space::GLOBAL) {
        auto& by_block = launch.released[at];
        for (const auto& [other, clock] : by_block)
            if (other != block) state.acquired[other] = join(state.acquired[other], clock);
        if (t.released != nullptr) by_block[block] = join(by_block[block], t.released);
    }
    if (is_atomic) {
        kernel->sites[number].adds_floats |= std::exchange(is_sum_of_floats, false);
        Clock& here = state.released_in_block[{space, at}];
        t.clock = join(t.clock, here);
        here = join(here, t.released_in_block);
    }
    const Kind kind = is_load ? (is_atomic ? Kind::ATOMIC_READ : Kind::READ) : is_atomic ? Kind::ATOMIC : Kind::WRITE;
    const auto races = touch(space, at, bytes, {moment_of(current), current, t.own, kind, number});
    if (kind == Kind::READ) t.load = {space, at, number, races};
    else if (!is_atomic || t.load.at != at) t.load = {};
}

// An atomicCAS that directly follows a load of the value there, as the one before a loop of them: the load is no race,
// because a change by another thread makes the atomicCAS fail.
static void compared(const volatile void* address) {
    if (!is_recording()) return;
    const Pause pause;
    const Place place = memory.find(const_cast<const void*>(address));
    const auto load = std::exchange(me().load, {});
    if (load.space != place.space || load.at != place.at) return;
    for (const Hazards::iterator& race : load.races)
        if (--race->second.count == 0) kernel->races.erase(race);
    const Accessors by = accessors(current, me().own);
    entries_at(place.space, place.at).remove_if([&](Entry& entry) {
        const bool is_it = entry.kind == Kind::READ && entry.site == load.site && entry.tick == by.tick &&
                           entry.first_actor == by.first_actor && entry.block == block;
        if (is_it && entry.bytes & mask_of(place.at, 1)) entry.lanes &= ~by.lanes;
        return entry.lanes == 0;
    });
}
void adds_floats() { is_sum_of_floats = is_recording(); }
// The emulator's own loop of atomicCAS, for other atomics, begins with an atomic load.
static void loaded_to_change() {
    if (is_recording()) me().load = {};
}

// Reports threads that wait at another barrier than others, or for threads that have ended.
static void add_divergence(uint32_t site, unsigned thread, const Side& other, const std::string& why) {
    const auto next = kernel->divergent.lower_bound({site, other.site, "", 0});   // it may be known of another thread
    if (next == kernel->divergent.end() || next->second.later.site != site || next->second.earlier.site != other.site)
        add(kernel->divergent, {Space::SHARED}, {site, Access::WAIT, thread, block}, other, why);
}

// Reports an access next to an allocation, a variable or an array in shared memory, or an invalid one, at no place.
static void add_out_of_bounds(const Accessed& a, const Place& place, const std::string& why) {
    const Pause pause;
    const uint32_t site = find_site(a.pc, 0, static_cast<unsigned>(a.bytes), place.space, a.access, a.by);
    add(kernel->out_of_bounds, place, {site, a.access, current, block}, {}, why);
}

static unsigned wrong_thread = NONE;    // after an index out of bounds

// Returns whether the latest access, at this place, is in an array, allocation or variable, also with its last byte.
static bool is_inside(Place& place) {
    if (place.space == Space::OTHER) {
        if (latest.access == Access::STORE && current == wrong_thread) end_program("by an index out of bounds", 1);
    } else if (place.space == Space::HOST) {
        add_out_of_bounds(latest, {}, "the host's memory, which a GPU cannot access");
    } else {
        if (latest.access == Access::STORE) wrong_thread = NONE;
        if (place.has(latest.bytes)) return true;
        if (place.has(1)) place.at = place.range->at + place.range->bytes;   // a wide access that begins in the range
        add_out_of_bounds(latest, place, "");
    }
    return false;
}

// Records an access, split into parts that are as wide as size and alignment allow, at most 16 bytes each.
void access(Access access, By by, const void* address, size_t bytes, const void* pc) {
    if (!is_checking()) return;
    latest = {access, by, address, pc, bytes};
    if (running == WATCHED && wrong_thread == NONE && memory.is_recent(number_of(address), bytes)) return;
    const Pause pause;
    Place place = memory.find(address);
    if (!is_inside(place) || running != RECORDED) return;
    uint64_t width = std::min<uint64_t>(16, bytes & -bytes);
    if (place.at % width != 0) width = place.at & -place.at;
    unsigned part = 0;
    for (uint64_t done = 0; done < bytes; done += width)
        part_accessed(place.space, place.at + done, static_cast<unsigned>(width), part++);
}

// Reports an index outside of an array with a constant size. If the thread's next store is outside of device memory,
// it would change the emulator's own data, and the program ends there.
static void wrong_index(const char* type, int64_t index, const void* pc) {
    if (!is_checking()) return;
    const Pause pause;
    add_out_of_bounds({Access::LOAD, By::THREAD, nullptr, pc, 0}, {},
                      "index " + std::to_string(index) + " of an array of type " + type);
    wrong_thread = current;
}

// Ends the program at an address that is not a multiple of the accessed type's alignment, as a GPU does. On this
// processor only some such accesses fail. (Local variables are in registers on a GPU.)
static void check_alignment(uintptr_t address, uint64_t alignment, const char* type, Access access, const void* pc) {
    if (address % alignment == 0 || !HostMemory::device_works()) return;
    if (find(reinterpret_cast<const void*>(address)).space == Space::OTHER) return;
    const std::string why = "a misaligned address: " + std::string(type) + " needs a multiple of " +
                            std::to_string(alignment);
    if (is_checking()) add_out_of_bounds({access, By::THREAD, nullptr, pc, 1}, {}, why);
    end_program(why, 1);
}

// Called at a signal that ends the program: reports the access with the invalid address, if that is the reason. Device
// memory is protected while host code runs.
static void crashed(int signal, siginfo_t* info, void*) {
    std::signal(signal, SIG_DFL);
    const bool in_kernel = is_checking();
    const Place place = signal == SIGSEGV && !in_kernel ? memory.find(info->si_addr) : Place{};
    if (place.space == Space::GLOBAL && place.has(1)) {
        ended_at = interrupted();
        return write("host code accesses device memory, byte " + std::to_string(place.at - place.range->at) + " of " +
                     std::to_string(place.range->bytes) + ": expected cudaMemcpy, or memory of cudaMallocManaged");
    }
    // The kernel does not know an address that is too large; if its register is the stack's, the signal is SIGBUS.
    const uintptr_t offset = number_of(info->si_addr) - number_of(latest.address);
    if (in_kernel && (signal == SIGSEGV || signal == SIGBUS) && (offset < latest.bytes || info->si_code == SI_KERNEL))
        add_out_of_bounds(latest, {}, "an address far from any array");
    write(std::string("by signal ") + strsignal(signal));
    raise(signal);
}

// ==== requests ===========================================================================================

// NVIDIA does not document how L2 distributes addresses over its slices. Model: each slice executes one atomic on a
// sector at a time, and has regions of this size.
constexpr uint64_t ATOMIC_REGION = 4096;
// Sums of integers of a warp's lanes at one address are one atomic: the compiler adds them first. Sums of floating-point
// numbers take this long for each further lane, relative to an atomic: atomic_red in validation.md.
constexpr double FURTHER_LANE = 4.4;

// Returns the slowest memory that a load of the request goes to.
static Level account_global(Site& site, const Request& request) {
    Totals& totals = kernel->totals;
    Level level = WAIT_L1;
    const bool through_l1 = site.by == By::THREAD && site.access == Access::LOAD;
    const uint64_t first = request.address[__builtin_ctz(request.active)];
    if (first - site.allocation.at >= site.allocation.bytes)
        if (const Range* const found = memory.place(Space::GLOBAL, first).range) site.allocation = *found;
    const bool is_resident = l2_before.touch(site.allocation.at, site.allocation.bytes);
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
            if (!is_resident) totals[PARTIAL_FETCHED] += static_cast<uint64_t>(static_cast<int64_t>(store.partial));
            totals[DRAM_STORE] += static_cast<uint64_t>(store.writes);
            totals[RESIDENT_STORE] += is_resident ? static_cast<uint64_t>(store.writes) : 0;
            site.dram_sectors += static_cast<uint64_t>(store.writes);
            if (site.by != By::ATOMIC) continue;
            Atomics& of_region = atomics[sector * SECTOR / ATOMIC_REGION];
            of_region.requests += site.adds_floats ? 1 + FURTHER_LANE * (request.lanes_of_an_address(sector) - 1) : 1;
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
        if (!is_resident) level = WAIT_MEMORY;
        totals[DRAM_LOAD]++;
        totals[RESIDENT_LOAD] += is_resident;
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
static void account_bulk(Site& site, const std::vector<uint64_t>& chunks) {
    if (!state.counting) return;
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
static void merge(std::vector<Queued>& queue, const std::vector<size_t>& indices) {
    constexpr size_t window = 64;   // requests
    for (size_t first = 0; first < indices.size(); first++) {
        Queued& base = queue[indices[first]];
        const unsigned bytes = base.request.bytes;
        for (unsigned width = 16; base.merged == bytes && width > bytes; width /= 2) {
            const auto& at = base.request.address;   // 0 of inactive lanes
            if (std::any_of(at.begin(), at.end(), [&](uint64_t a) { return a % width != 0; })) continue;
            std::vector<Queued*> others;             // whose lanes access the addresses after those of `base`
            for (unsigned offset = bytes; offset < width; offset += bytes) {
                Request wanted = base.request;
                for (unsigned lane = 0; lane < LANES; lane++) wanted.address[lane] += wanted.is_active(lane) * offset;
                for (size_t next = first + 1; next < std::min(first + window, indices.size()); next++) {
                    Queued& other = queue[indices[next]];
                    if (other.merged == 0 || !other.request.equals(wanted)) continue;
                    others.push_back(&other);
                    break;
                }
            }
            if (others.size() < width / bytes - 1) continue;
            base.merged = width;
            for (Queued* other : others) other->merged = 0;
        }
    }
}

// Completes the requests of a warp. Called when the warp synchronises.
static void flush(unsigned number) {
    Warp& warp = state.warps[number];
    for (Queued& queued : warp.open) {
        Warp::OfSite& of_site = warp.of_sites[queued.site];
        const Site& site = kernel->sites[queued.site];
        const bool is_shared_load = site.space == Space::SHARED && site.access == Access::LOAD;
        queued.round += static_cast<uint32_t>(warp.rounds.size());
        if (of_site.requests.empty()) continue;   // this is not the first one of the site
        if (is_shared_load && site.by == By::THREAD) merge(warp.open, of_site.requests);
        of_site.requests.clear();
        of_site.accesses = {};
    }
    warp.rounds.resize(warp.rounds.size() + warp.open_rounds.size());
    warp.open_rounds.clear();
    queued_requests += warp.open.size();
    if (warp.queue.empty()) warp.queue.swap(warp.open);
    warp.queue.insert(warp.queue.end(), warp.open.begin(), warp.open.end());
    warp.open.clear();
    for (unsigned t = number * LANES; t < std::min((number + 1) * LANES, threads_in_block); t++)
        state.threads[t].segment++;
}

// Counts the queued requests: the warps in turn, one request each, because they run at the same time.
static void count_queued() {
    Totals& totals = kernel->totals;
    size_t longest_queue = 0;
    for (const Warp& warp : state.warps) {
        longest_queue = std::max(longest_queue, warp.queue.size());
        totals[REQUESTS] += warp.queue.size();
    }
    totals[WARP_REQUESTS] += longest_queue;
    queued_requests = 0;
    for (size_t n = 0; n < longest_queue; n++)
        for (unsigned warp = 0; warp < warps(); warp++) {
            if (n >= state.warps[warp].queue.size()) continue;
            counted_warp = uint64_t{block} * warps() + warp;
            const Queued& queued = state.warps[warp].queue[n];
            Level& level = state.warps[warp].rounds[queued.round];
            level = std::max(level, account(queued));
        }
    // The warp that waits longest, by rough latencies.
    constexpr uint64_t weights[] = {0, 1, 1, 8, 20, 1};
    std::array<uint64_t, std::size(weights)> longest{};   // by Level, and collectives
    const auto sum = [&](const auto& waits) {
        return std::inner_product(waits.begin(), waits.end(), weights, uint64_t{0});
    };
    for (Warp& warp : state.warps) {
        std::array<uint64_t, std::size(weights)> waits{};
        for (Level level : warp.rounds) {
            waits[level]++;
            totals[ROUNDS] += level >= WAIT_L1;
        }
        waits.back() = std::exchange(warp.exchanges, 0);
        if (sum(waits) > sum(longest)) longest = waits;
        warp.rounds.clear();
        warp.queue.clear();
    }
    for (size_t i = WAIT_SHARED; i < longest.size(); i++) totals[WAITS_SHARED + i - WAIT_SHARED] += longest[i];
}

// Counts all requests since the last barrier.
static void drain() {
    for (unsigned warp = 0; warp < warps(); warp++) flush(warp);
    count_queued();
}

// ==== launches and blocks ================================================================================

static bool counts() { return from.empty() || from_launches > 0; }

static void end_if_late() {
    if (seconds > 0 && std::chrono::steady_clock::now() - start > std::chrono::seconds(seconds))
        end_program("after " + std::to_string(seconds) + " s (--seconds)");
}

// Called when the time is over, and each millisecond from then on. Ends the program if it interrupts a kernel's code:
// then the recorder and malloc are in a consistent state. Between blocks, begin_launch() and next_block() end it.
static void end_in_block(int, siginfo_t*, void*) {
    const bool is_kernel = running != NOTHING && HostMemory::device_works() && !is_busy && !HostMemory::is_changing();
    const std::vector<uintptr_t> stack = is_kernel ? interrupted() : std::vector<uintptr_t>();
    if (!stack.empty() && stack[0] > number_of(&__executable_start) && stack[0] <= number_of(&_end)) end_if_late();
}

static void open() {
    if (std::exchange(is_open, true)) return;
    card_ = cuda_cpu::card() != nullptr ? cuda_cpu::card() : cuda_cpu::find_card("h100");
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
    action.sa_sigaction = end_in_block;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGALRM, &action, nullptr);
    const itimerval timer{{0, 1000}, {seconds, 0}};
    setitimer(ITIMER_REAL, &timer, nullptr);
}

// How many blocks are resident on a multiprocessor, as in estimate.py's resident_blocks(), and the bytes of L1 of each.
struct Resident { uint64_t blocks, l1_bytes; };
static Resident resident() {
    const cuda_cpu::Capability& c = card_->capability;
    const uint64_t shared = kernel->shape.dynamic_shared + kernel->static_shared() + c.reserved_shared_per_block;
    uint64_t most = std::min<uint64_t>({c.threads_per_multiprocessor / kernel->threads(),
                                        static_cast<uint64_t>(c.blocks_per_multiprocessor),
                                        c.shared_per_multiprocessor / std::max<uint64_t>(1, shared)});
    if (const auto found = registers.find(kernel->symbol); found != registers.end() && (*found)["registers"] > 0) {
        constexpr unsigned file = 64 * 1024, granularity = 256, quarters = 4;
        const unsigned of_thread = (*found)["registers"], warps = (kernel->threads() + LANES - 1) / LANES;
        const unsigned of_warp = (of_thread * LANES + granularity - 1) / granularity * granularity;
        most = std::min<uint64_t>(most, file / of_warp / quarters * quarters / warps);
    }
    most = std::max<uint64_t>(1, most);
    constexpr uint64_t least = 16 * cuda_cpu::kib;
    return {most, (c.l1_and_shared - std::min<uint64_t>(c.l1_and_shared - least, most * shared)) / most};
}

bool begin_launch(const LaunchShape& shape) {
    open();
    end_if_late();
    const std::string range = strcmp(shape.range, no_range) == 0 ? "" : shape.range;
    if (!from.empty() && range == from && ++from_launches == 2)
        end_program("after one pass from " + from + " to the next");
    launch = {};
    Kernel*& found = by_shape[{number_of(shape.kernel), range, shape.grid, shape.block, shape.dynamic_shared,
                               shape.variant.integers, shape.variant.pointers}];
    if (found == nullptr) {
        kernels.push_back(std::make_unique<Kernel>(Kernel{shape, shape.symbol, range, kernels.size()}));
        found = kernels.back().get();
    }
    kernel = found;
    if (!counts()) return false;
    kernel->launches++;
    sequence.push_back({"kernel", kernel->number});
    const bool is_wanted = except.count(range) == 0 && (range.find(only) != std::string::npos ||
                                                        kernel->symbol.find(only) != std::string::npos);
    launch.is_watched = records_launches && is_wanted;
    memory.set_dynamic_bytes(shape.dynamic_shared);
    const bool is_first = kernel->recorded_launches == 0, is_spent = kernel->checked_accesses >= counted_accesses;
    launch.is_recorded = launch.is_watched && (is_first || (is_whole && !is_spent));
    if (!launch.is_recorded) {
        kernel->missed_launches += launch.is_watched && is_whole &&
                                   kernel->arguments.count(shape.variant.arguments) == 0;
        return false;
    }
    constexpr uint64_t parts = 2;   // the copies of data in the parts of a large GPU's L2 take space
    l2_before.begin_launch(card_->l2_bytes / parts);
    kernel->recorded_launches++;
    kernel->arguments.insert(shape.variant.arguments);
    if (!is_first) return true;
    atomics.clear();
    kernel->wave = std::min(kernel->blocks(), resident().blocks * card_->multiprocessors);
    l2.reset(card_->l2_bytes, kernel->wave);
    return true;
}

// Returns whether the requests of the first launch's next block are counted, or it is only run, or skipped.
static Run count_block(uint64_t number, Run otherwise) {
    if (number == 0) return Run::RECORDED;
    const LaunchShape& shape = kernel->shape;
    const bool has_rows = shape.grid[1] * shape.grid[2] > 1 && (is_sample || shape.grid[0] <= MAX_ROW);
    const uint64_t row = has_rows ? shape.grid[0] : 1;
    const bool row_is_done = number % row == 0;
    const bool enough = row_is_done && number >= std::min(COUNTED_BLOCKS, 2 * row + 6);
    const uint64_t limit = enough ? 1 : is_whole ? (row_is_done ? 2 : 4) : row_is_done ? 4 : 32;
    if (kernel->accesses < limit * counted_accesses) return Run::RECORDED;
    // Few blocks of a large grid: also block 1 and the first one of the second row.
    if (row < 3 || kernel->recorded.size() > 2 || number > row) return otherwise;
    if (number == 1 || number == row) return Run::RECORDED;
    return is_sample ? Run::SKIPPED : Run::UNRECORDED;
}

// Returns whether a block is checked that is not counted: the last ones of the launch, where grids often extend past
// the data, and from the first one that is not counted on, in equal distances, single blocks or pairs of neighbours.
static bool is_checked(uint64_t number) {
    const uint64_t blocks = kernel->blocks();
    if (launch.blocks_to_check == 0) {
        const uint64_t of_block = kernel->accesses / std::max<uint64_t>(1, kernel->recorded.size()) + 1;
        const uint64_t half = counted_accesses / 2, spare = half - std::min(half, kernel->checked_accesses);
        launch.first_checked = number;
        launch.blocks_to_check = std::min(blocks - number, std::max(LEAST_CHECKED, spare / 2 / of_block));
    }
    const uint64_t last = launch.blocks_to_check / 2, pair = launch.blocks_to_check < 16 ? 1 : 2;
    const uint64_t between = blocks - last - launch.first_checked, runs = (launch.blocks_to_check - last) / pair;
    const bool is_last = number >= blocks - last;
    if (!is_last && (number - launch.first_checked) % (between / runs) >= pair) return false;
    if (kernel->recorded_launches > 1) kernel->later_blocks++;
    else (is_last ? kernel->last : kernel->between)++;
    return true;
}

// Returns whether the launch's next block is recorded, only run, or skipped.
Run next_block() {
    end_if_late();
    const uint64_t number = launch.next_block++;
    // The program may depend on the result of a kernel with a single block, so such a block always runs.
    const Run otherwise = is_sample && kernel->blocks() > 1 ? Run::STOP : Run::UNRECORDED;
    if (!launch.is_recorded) return otherwise;
    const Run run = kernel->recorded_launches == 1 ? count_block(number, otherwise) : otherwise;
    state.counting = run == Run::RECORDED;
    return !state.counting && is_whole && is_checked(number) ? Run::RECORDED : run;
}

// Begins a block that runs, which is recorded or not.
void begin_block(uint64_t number, Run run) {
    block = static_cast<unsigned>(number);
    current = 0;
    wrong_thread = NONE;
    running = run == Run::RECORDED ? NOTHING : launch.is_watched ? WATCHED : BLOCK;
    if (run != Run::RECORDED) return;
    threads_in_block = kernel->threads();
    first_engine = warps() * LANES;
    state = Block{state.counting};
    state.threads.resize(threads_in_block);
    state.warps.resize(warps());
    if (state.counting) l1.reset(resident().l1_bytes);
    if (state.counting) l2.begin_block(number);
    running = RECORDED;
}

// Makes the accesses of an instruction. Their actor and tick: of the thread of cp.async; of the mbarrier that counts a
// TMA copy's bytes, and its current phase; or of the warp, and the number of its wgmma.
static void complete(const Bulk& bulk, unsigned actor, Tick tick) {
    for (const Bulk::Side& side : bulk.sides) {
        Site& site = kernel->sites[side.site];
        const Kind kind = site.access == Access::STORE ? Kind::WRITE : Kind::READ;
        for (uint64_t at : side.at)
            touch(site.space, at, site.bytes, {bulk.moment, actor, tick, kind, side.site, site.by == By::COPY_ASYNC,
                                               site.by == By::WGMMA ? &bulk.fenced : nullptr});
        // A may be in registers; the four warps of a warpgroup share one read of B.
        const bool is_read = &side == &bulk.sides[0] ? !side.at.empty() : bulk.moment.actor / LANES % 4 == 0;
        if (site.by == By::COPY_ENGINE || (site.by == By::WGMMA && is_read)) account_bulk(site, side.at);
    }
}

// Completes the thread's cp.async copies of earlier groups. Their stores happen before accesses after that tick.
static void complete_copies(unsigned group, Tick tick) {
    std::vector<Bulk>& copies = me().copies;
    const auto end = std::find_if(copies.begin(), copies.end(), [&](const Bulk& copy) { return copy.group >= group; });
    std::for_each(copies.begin(), end, [&](const Bulk& copy) { complete(copy, current, tick); });
    copies.erase(copies.begin(), end);
}

void end_block() {
    const auto accessed = std::exchange(memory.accessed, {});
    if (std::exchange(running, NOTHING) != RECORDED) return;
    for (current = 0; current < threads_in_block; current++) complete_copies(NONE, NEVER);
    current = 0;
    drain();
    std::vector<uint64_t> special(warps());   // a warp takes as long for one lane as for all
    for (unsigned t = 0; t < threads_in_block; t++)
        special[t / LANES] = std::max(special[t / LANES], LANES * state.threads[t].special);
    kernel->totals[SPECIAL] += std::accumulate(special.begin(), special.end(), uint64_t{0});
    kernel->totals[WARP_SPECIAL] += *std::max_element(special.begin(), special.end());
    const Totals totals = std::exchange(kernel->totals, {});
    if (!state.counting) return;
    kernel->recorded.push_back({block, totals});
    kernel->arrays.insert(accessed.begin(), accessed.end());
    // A region with atomics of several recorded blocks is assumed to be accessed by the others as well.
    const double scale = static_cast<double>(kernel->blocks()) / static_cast<double>(kernel->recorded.size());
    kernel->hot_atomics = 0;
    for (const auto& [region, found] : atomics)
        kernel->hot_atomics = std::max(kernel->hot_atomics,
                                       static_cast<double>(found.requests) * (found.blocks > 1 ? scale : 1));
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
    const Place found = find(place);
    return found.space == Space::SHARED && found.has(1);
}

// At a deadlock, also names where threads wait.
void fatal_error(const char* why) {
    if (is_recording() && strncmp(why, "deadlock", 8) == 0) {
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
        const auto recorded = static_cast<double>(std::max<size_t>(1, kernel->recorded.size()));
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
void shared_array(const void* place, size_t bytes, const char* name) {
    const uint64_t guard = memory.VARIABLE_GUARD;
    memory.add({number_of(place), bytes, Space::SHARED, guard, guard, name}, memory.next_array, 0, LINE);
}
void variable(const void* place, size_t bytes, const char* name, bool is_writable) {
    const Space space = name[0] != '\0' ? Space::GLOBAL : Space::OTHER;
    const uint64_t guard = space == Space::GLOBAL && is_writable ? memory.VARIABLE_GUARD : 0;
    memory.add({number_of(place), bytes, space, guard, guard, name}, memory.next_variable, memory.VARIABLE_GUARD, LINE);
}
void yields_by(void (*function)()) { yield = function; }
void device_works(bool begins, const void* frame) {
    HostMemory::of_program().set_device_works(begins, frame);
    if (frame != nullptr) memory.forget_recent();
}
void allocated(const void* place, size_t bytes, const void* site) {
    constexpr uint64_t page = 1 << 21;   // a GPU's page size
    open();
    memory.add({number_of(place), bytes, Space::GLOBAL, guard_bytes, guard_bytes, "", number_of(site)},
               memory.next_allocation, guard_bytes, page);
}
void copied(const void* place, size_t bytes) {
    const Place found = memory.find(place);
    if (found.space == Space::GLOBAL) l2_before.touch(found.range->at, bytes);
}
void freed(const void* place) { memory.remove(place); }
void registered(const void* place, size_t bytes) { HostMemory::registered(place, bytes); }

void thread_resumed(unsigned thread) { current = thread; }
void thread_started(unsigned thread) {
    if (is_recording()) state.threads[thread].stack = 0;
}
void thread_ended(unsigned thread) {
    if (is_recording()) state.threads[thread].is_over = true;
}
__attribute__((noinline)) const void* call_site() { return __builtin_return_address(0); }

// ==== synchronisation ====================================================================================

bool is_removed(const char* name, const void* site) {
    if (!is_recording()) return false;
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
    if (!is_recording()) return;
    const Pause pause;
    me().waits_at = find_site(site, 0, 0, Space::SHARED, Access::WAIT, By::THREAD);
}

// __syncthreads: orders the accesses of all threads of the block, also of those that have exited. All others must reach
// the same one. A thread that has ended without it, after an access further down, has not returned early: results.py
// compares the lines.
void barrier_completed(const char*) {
    if (!is_recording()) return;
    const Pause pause;
    std::vector<unsigned> all(threads_in_block);
    std::iota(all.begin(), all.end(), 0u);
    const unsigned first = *std::find_if(all.begin(), all.end(), [](unsigned t) { return !state.threads[t].is_over; });
    const uint32_t site = state.threads[first].waits_at;
    for (unsigned t : all) {
        Thread& thread = state.threads[t];
        const uint32_t other = std::exchange(thread.waits_at, NONE), last = thread.last_site;
        if (thread.is_over && last != NONE)
            add_divergence(site, first, {last, kernel->sites[last].access, t, block},
                           "and has ended without reaching it");
        else if (!thread.is_over && other != site)
            add_divergence(site, first, {other, Access::WAIT, t, block}, "not all at the same one");
    }
    meet(all);
    drain();
    kernel->totals[BARRIERS]++;
}

// The block waits for the grid: as at __syncthreads, but other blocks run until it resumes.
void suspend_block() {
    if (!is_recording()) return;
    barrier_completed("grid.sync");
    running = NOTHING;
    launch.arriving[block] = state.threads[0].clock;
    launch.suspended[block] = std::move(state);
}
void resume_block(uint64_t number) {
    const auto found = launch.suspended.find(static_cast<unsigned>(number));
    if (found == launch.suspended.end()) return;
    block = found->first;
    state = std::move(found->second);
    launch.suspended.erase(found);
    l1.reset(resident().l1_bytes);
    running = RECORDED;
}
void grid_completed() { launch.at_grid_barrier = std::exchange(launch.arriving, {}); }

// Shuffles, votes and __syncwarp order the accesses of the lanes; tensor-core instructions do not.
void collective_completed(unsigned first, unsigned lanes, unsigned mask, const char* name) {
    if (!is_recording()) return;
    const Pause pause;
    uint32_t alive = 0;
    std::vector<unsigned> group;
    const unsigned one = first + static_cast<unsigned>(__builtin_ctz(lanes));   // of the group
    const uint32_t site = state.threads[one].waits_at;
    for (unsigned t = first; t < std::min(first + LANES, threads_in_block); t++) {
        if (!state.threads[t].is_over) alive |= 1u << t % LANES;
        if (lanes >> t % LANES & 1) {
            group.push_back(t);
            state.threads[t].waits_at = NONE;
        } else if (mask >> t % LANES & 1 && strncmp(name, "__shfl", 6) == 0) {
            add_divergence(site, one, {NONE}, "thread " + std::to_string(t) + ", which its mask names, has ended");
        }
    }
    if (name[0] == '_') meet(group);
    else pass(group);
    state.warps[first / LANES].exchanges++;
    if (lanes == alive) flush(first / LANES);
    constexpr size_t most = 1 << 16;   // a kernel without barriers must not fill the memory
    if (queued_requests > most) count_queued();
}

// __threadfence, __threadfence_block
void fence(bool of_block) {
    if (!is_recording()) return;
    const Pause pause;
    me().released_in_block = join({moment_of(current)}, actors());
    if (!of_block) me().released = me().released_in_block;
    me().synchronised();
}

// fence.proxy.async
void proxy_fence() {
    if (!is_recording()) return;
    const Pause pause;
    me().fenced = join(me().fenced, join({moment_of(current)}, actors()));
    me().synchronised();
}

static Sync& sync_of(const void* barrier) {
    return state.syncs.try_emplace(barrier, Sync{static_cast<unsigned>(state.syncs.size()) % ENGINES}).first->second;
}

// Records an access to an mbarrier, whose 8 bytes of shared memory one thread must initialise before other threads use
// them. Returns the site; NONE for a named barrier, which is not in memory.
static uint32_t touch_barrier(const void* barrier, Kind kind, const void* pc) {
    const Place place = memory.find(barrier);
    if (place.space != Space::SHARED) return NONE;
    const Access access = kind == Kind::WRITE ? Access::STORE : Access::LOAD;
    const uint32_t number = find_site(pc, 0, sizeof(uint64_t), place.space, access, By::ATOMIC);
    touch(place.space, place.at, sizeof(uint64_t), {moment_of(current), current, me().own, kind, number, false});
    return number;
}

void mbarrier_initialised(const void* barrier, const void* site) {
    if (!is_recording()) return;
    const Pause pause;
    state.syncs.erase(barrier);
    touch_barrier(barrier, Kind::WRITE, site);
}

void arrived(const void* barrier, const void* site) {
    if (!is_recording()) return;
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
    if (!is_recording()) return;
    const Pause pause;
    Sync& sync = sync_of(barrier);
    const Moment ends{sync.arriving.passed, NONE, 0};
    for (const auto& [waiter, site] : sync.waiters)
        if (ends.not_covered(accessors(waiter.actor, waiter.own)) != NONE)
            add(kernel->races, {Space::SHARED}, {site, Access::LOAD, waiter.actor, block},
                {site, Access::STORE, current, block},
                "the wait may begin after the next phase too: it then sees the old parity and blocks");
    sync.waiters.clear();
    sync.phases++;
    sync.arriving.clock = join({{sync.arriving.clock, first_engine + sync.slot, sync.phases}}, actors());
    sync.ended[parity] = sync.arriving;
}

void waited(const void* barrier, unsigned parity, const void* site) {
    if (!is_recording()) return;
    const Pause pause;
    const uint32_t number = touch_barrier(barrier, Kind::ATOMIC, site);
    Sync& sync = sync_of(barrier);
    me().take(sync.ended[parity]);
    me().drop_all();
    if (number != NONE) sync.waiters.push_back({{nullptr, current, me().step}, number});
}

// ==== PTX instructions ===================================================================================

// cp.async reads and writes at an unspecified time between the instruction and the wait.
void cp_async(const void* to, size_t bytes, const void* from, size_t filled, const void* site) {
    if (!is_checking()) return;
    const Pause pause;
    const auto width = static_cast<unsigned>(bytes);
    latest = {Access::STORE, By::COPY_ASYNC, to, site, bytes};
    Place target = memory.find(to);
    const bool is_stored = is_inside(target);
    latest = {Access::LOAD, By::COPY_ASYNC, from, site, filled};
    Place source = memory.find(from);
    const bool is_loaded = filled > 0 && is_inside(source);
    if (!is_stored || running != RECORDED) return;
    Thread& t = me();
    const Moment issued = moment_of(current);
    const uint32_t store = find_site(site, 0, width, Space::SHARED, Access::STORE, By::COPY_ASYNC);
    enqueue(store, target.at);
    if (is_loaded) {
        const uint32_t load = find_site(site, 0, width, Space::GLOBAL, Access::LOAD, By::COPY_ASYNC);
        enqueue(load, source.at);
        touch(Space::GLOBAL, source.at, static_cast<unsigned>(filled), {issued, current, t.own, Kind::READ, load});
    }
    t.own++;
    t.copies.push_back({issued, t.copy_groups, nullptr, nullptr, {{store, {target.at}}}});
}

void cp_async_commit() {
    if (is_recording()) me().copy_groups++;
}

void cp_async_wait(unsigned pending) {
    if (!is_recording()) return;
    const Pause pause;
    if (me().copy_groups > pending) complete_copies(me().copy_groups - pending, me().own);
}

unsigned load_issued(const void* barrier, const void* site) {
    if (!is_recording()) return 0;
    const Pause pause;
    const uint32_t to = find_site(site, 0, GRANULE, Space::SHARED, Access::STORE, By::COPY_ENGINE);
    const uint32_t from = find_site(site, 0, GRANULE, Space::GLOBAL, Access::LOAD, By::COPY_ENGINE);
    state.bulks.push_back({moment_of(current), 0, barrier, nullptr, {{to, {}}, {from, {}}}});
    me().own++;
    return static_cast<unsigned>(state.bulks.size() - 1);
}

// wgmma reads its operands at an unspecified time between the instruction and the wait. It is an instruction of the
// whole warp, so it starts with the maximum of its lanes' clocks.
unsigned wgmma_issued(unsigned warp, uint64_t flops, const void* pc) {
    if (!is_recording()) return 0;
    const Pause pause;
    kernel->totals[TENSOR_FLOPS] += flops;
    std::vector<Moment> lanes;
    Clock fenced;
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++) {
        lanes.push_back(moment_of(t));
        fenced = join(fenced, state.threads[t].fenced);
        state.threads[t].own++;
    }
    const uint32_t site = find_site(pc, 0, GRANULE, Space::SHARED, Access::LOAD, By::WGMMA);
    const Moment issued{join(lanes, actors()), warp * LANES, lanes[0].own};
    state.bulks.push_back({issued, 0, nullptr, fenced, {{site, {}}, {site, {}}}});
    return static_cast<unsigned>(state.bulks.size() - 1);
}

void bulk_accesses(unsigned number, unsigned side, const void* address) {
    if (!is_recording()) return;
    const Pause pause;
    state.bulks[number].sides[side].at.push_back(memory.find(address).at);
}

void bulk_completed(unsigned number) {
    if (!is_recording()) return;
    const Pause pause;
    const Bulk bulk = std::exchange(state.bulks[number], {});
    const unsigned warp = bulk.moment.actor / LANES;
    if (bulk.barrier == nullptr) return complete(bulk, wgmma_actor(warp), ++state.warps[warp].wgmma);
    const Sync& sync = sync_of(bulk.barrier);
    complete(bulk, first_engine + sync.slot, sync.phases + 1);
}

void wgmma_waited(unsigned warp) {
    if (!is_recording()) return;
    const Pause pause;
    const Clock products = join({{nullptr, wgmma_actor(warp), state.warps[warp].wgmma}}, actors());
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++)
        state.threads[t].clock = join(state.threads[t].clock, products);
}

void tensor_flops(uint64_t flops) {
    if (is_recording()) kernel->totals[TENSOR_FLOPS] += flops;
}
void special_function() {
    if (is_recording()) me().special++;
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
    json all = {{"stack", with_callers(site.pc, site.stack)}, {"part", site.part},
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
            accesses.push_back({{"stack", with_callers(site.pc, site.stack)}, {"block", side->block},
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
        barriers.push_back({{"name", name}, {"stack", with_callers(pc, stack)}});
    uint64_t first = 0;
    while (first < kernel.recorded.size() && kernel.recorded[first].block == first) first++;
    const json checked = {{"first", first}, {"between", kernel.between + kernel.recorded.size() - first},
                          {"last", kernel.last}, {"launches", kernel.recorded_launches},
                          {"later", kernel.later_blocks}, {"missed_launches", kernel.missed_launches}};
    json launch = {{"hot_atomics", kernel.hot_atomics}}, longest = {{"hot_atomics", 0}};
    for (size_t i = 0; i < std::size(FIGURES); i++) {
        const uint64_t unit = i <= PARTIAL_FETCHED ? SECTOR : 1;
        launch[FIGURES[i]] = of_launch(kernel, i) * static_cast<double>(unit);
        double most = 0;
        for (const auto& block : kernel.recorded) most = std::max(most, block[i]);
        longest[FIGURES[i]] = most * static_cast<double>(unit);
    }
    const double all_loads = memory_loads(kernel) * SECTOR, loads = std::exchange(launch["dram_load"], all_loads);
    launch["resident_load"] = launch["resident_load"].get<double>() / std::max(1.0, loads) * all_loads;
    launch["longest_block"] = longest;
    return {{"symbol", kernel.symbol}, {"range", kernel.range}, {"grid", kernel.shape.grid},
            {"block", kernel.shape.block}, {"integers", kernel.shape.variant.integers},
            {"dynamic_shared", kernel.shape.dynamic_shared}, {"static_shared", kernel.static_shared()},
            {"launches", kernel.launches}, {"recorded_blocks", kernel.is_complete ? kernel.recorded.size() : 0},
            {"blocks", kernel.blocks()}, {"checked", checked}, {"threads", kernel.threads()},
            {"tensor_flops", kernel.sum(TENSOR_FLOPS)}, {"launch", launch}, {"sites", sites},
            {"races", to_json(kernel, kernel.races)}, {"uninitialised", to_json(kernel, kernel.uninitialised)},
            {"out_of_bounds", to_json(kernel, kernel.out_of_bounds)},
            {"divergent", to_json(kernel, kernel.divergent)}, {"barriers", barriers}};
}

static void write(const std::string& ended) {
    if (is_written || !is_open || getenv("INSPECT_OUT") == nullptr) return;
    is_written = true;
    if (running != NOTHING) kernel->is_complete = kernel->launches > 1;
    if (is_recording()) {
        // This block is not counted. Pending asynchronous accesses are recorded as never waited for.
        state.counting = false;
        for (unsigned i = 0; i < state.bulks.size(); i++)
            if (state.bulks[i].barrier == nullptr && !state.bulks[i].sides.empty()) bulk_completed(i);
        end_block();
    }
    running = NOTHING;
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
    if (running == NOTHING || is_busy || !HostMemory::device_works()) return;
    if (std::exchange(thread, current) != current) accesses = 0;
    repeats = std::find(recent.begin(), recent.end(), address) != recent.end() ? repeats + 1 : 0;
    if (repeats == 0) recent[next++ % few] = address;
    if ((++accesses < many && repeats < some) || find(address).space == Space::OTHER || yield == nullptr) return;
    accesses = repeats = 0;
    yield();
}

static void entered(const void* caller) {
    if (!is_recording()) return;
    const Pause pause;
    const std::pair call{me().stack, number_of(caller)};
    const auto [place, is_new] = call_numbers.try_emplace(call, static_cast<uint32_t>(calls.size()));
    if (is_new) calls.push_back(call);
    me().stack = place->second;
}
static void left() {
    if (is_recording()) me().stack = calls[me().stack].first;
}
}  // namespace cuda_cpu::watch

#include "../cpu/instrumented.h"

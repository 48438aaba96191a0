// Records what the kernels of a program do to memory, for dev/inspect. In short:
//
//   - The program is compiled with -fsanitize=thread but not linked with that sanitizer: its calls at every load and
//     store, and at functions' beginnings and ends, come here. dev/cpu/watch.h reports the rest.
//   - A thread's accesses are kept until its warp synchronises. Then the n-th ones of each instruction form a request
//     of the warp: requests.h counts its sectors and wavefronts, caches.h where it is served.
//   - At the same time each access is compared with the earlier ones to the same bytes: clocks.h, shadow.h.
//   - When the program ends, all of it goes into a file, which report.py reads.
//
// Map: places in memory · call stacks and sites · kernels · threads · races · requests · launches and blocks ·
// what orders · instructions of PTX · the file · what the compiler calls
//
// Environment: INSPECT_OUT (the file), INSPECT_MODE (sample: only a few blocks run; few: all run, a few are recorded;
// whole, the default: many are), INSPECT_KERNEL (record kernels whose name or range contains this), INSPECT_EXCEPT
// (ranges that are not recorded), INSPECT_SECONDS (end the program after them), INSPECT_REMOVE (addresses of barriers
// that have no effect), INSPECT_PROGRESS (names the kernels on stderr), INSPECT_REGISTERS (what registers.py wrote),
// INSPECT_FROM (a range: recording begins with its first launch, and its second one ends the program).
#define CUDA_CPU_INSPECT
#include "../cpu/watch.h"

#define WARP_SIZE 32
#include "../cpu/card.h"

#include "caches.h"
#include "requests.h"
#include "shadow.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

namespace inspect {

using json = nlohmann::ordered_json;
using cuda_cpu::watch::Access;
using cuda_cpu::watch::By;
using cuda_cpu::watch::Figures;
using cuda_cpu::watch::LaunchShape;
using cuda_cpu::watch::Operand;
using cuda_cpu::watch::Product;
using cuda_cpu::watch::Run;

constexpr const char* BY_NAMES[] = {"thread", "atomic", "ldmatrix", "cp.async", "copy engine", "wgmma"};

// How much of a launch is recorded: blocks from the first one on, until there are enough of them and of their accesses.
// Where a grid has a second dimension blocks may differ along the first (attention's do), so whole rows are taken.
struct Enough {
    uint64_t blocks, accesses, too_many;
    uint64_t far_too_many;   // then a row of blocks is not finished either
};
constexpr Enough IN_A_STEP{8, 1 << 18, 1 << 20, 8 << 20};            // blocks are alike, and only these run
constexpr Enough IN_A_PROGRAM{8, 1 << 24, 1 << 25, 1 << 26};         // all blocks run

// ==== places in memory ===================================================================================

enum class Space : uint8_t { OTHER, SHARED, GLOBAL };
struct Place {
    Space space;
    uint64_t at;   // in shared memory; or on the device, where blocks lie one after the other
};

// Addresses as a card would have them: the same in every run, so that caches behave the same.
class Memory {
public:
    static constexpr uint64_t STATIC_ARRAYS = cuda_cpu::hopper.l1_and_shared;   // after the dynamic part

    void set_dynamic(const void* place, size_t bytes)
    {
        dynamic_ = reinterpret_cast<uintptr_t>(place);
        dynamic_bytes_ = bytes;
    }
    void add_array(const void* place, size_t bytes, const char* name)
    {
        names_.push_back(name);
        arrays_.push_back({reinterpret_cast<uintptr_t>(place), bytes, STATIC_ARRAYS + static_bytes_});
        static_bytes_ += (bytes + LINE - 1) / LINE * LINE;
    }
    void add_block(const void* place, size_t bytes)
    {
        constexpr uint64_t unit = 1 << 21;   // a card's pages
        blocks_[reinterpret_cast<uintptr_t>(place)] = {reinterpret_cast<uintptr_t>(place), bytes, next_};
        next_ += (bytes + unit - 1) / unit * unit;
        changed();
    }
    void remove_block(const void* place)
    {
        blocks_.erase(reinterpret_cast<uintptr_t>(place));
        changed();
    }

    Place find(const void* address)
    {
        const uintptr_t p = reinterpret_cast<uintptr_t>(address);
        if (p - dynamic_ < dynamic_bytes_) return {Space::SHARED, p - dynamic_};
        if (p - last_.begin < last_.bytes) return {Space::GLOBAL, last_.at + (p - last_.begin)};
        const Range& gap = gaps_[p / PAGE % gaps_.size()];
        if (p - gap.begin < gap.bytes) return {Space::OTHER, 0};
        for (const Range& array : arrays_)
            if (p - array.begin < array.bytes) return {Space::SHARED, array.at + (p - array.begin)};
        const auto next = blocks_.upper_bound(p);
        const auto block = next == blocks_.begin() ? blocks_.end() : std::prev(next);
        if (block != blocks_.end() && p - block->second.begin < block->second.bytes) {
            last_ = block->second;
            return {Space::GLOBAL, last_.at + (p - last_.begin)};
        }
        note_gap(p, next == blocks_.end() ? ~uintptr_t{0} : next->first);
        return {Space::OTHER, 0};
    }
    uint64_t shared_bytes() const { return STATIC_ARRAYS + static_bytes_; }
    // The array of shared memory that a place is in, none where it is dynamic, and the byte there.
    std::pair<std::string, uint64_t> within_array(uint64_t at) const
    {
        for (size_t i = 0; i < arrays_.size(); i++)
            if (at - arrays_[i].at < arrays_[i].bytes) return {names_[i], at - arrays_[i].at};
        return {"", at};
    }
    // In its block of memory, for people to read.
    uint64_t within_block(uint64_t at) const
    {
        for (const auto& [begin, block] : blocks_)
            if (at - block.at < block.bytes) return at - block.at;
        return at;
    }

private:
    struct Range {
        uintptr_t begin = 0;
        size_t bytes = 0;
        uint64_t at = 0;
    };
    // Most accesses that are seen are to a thread's stack, or to dev/cpu's own things: a page in which nothing is of
    // the device's need not be looked up again.
    void note_gap(uintptr_t p, uintptr_t next_block)
    {
        const uintptr_t begin = p / PAGE * PAGE, end = begin + PAGE;
        for (const Range& array : arrays_)
            if (array.begin < end && begin < array.begin + array.bytes) return;
        if (next_block < end || (dynamic_ < end && begin < dynamic_ + dynamic_bytes_)) return;
        const auto before = blocks_.lower_bound(end);
        const Range last = before == blocks_.begin() ? Range{} : std::prev(before)->second;
        if (last.begin + last.bytes > begin) return;
        gaps_[p / PAGE % gaps_.size()] = {begin, PAGE, 0};
    }
    void changed()
    {
        last_ = {};
        gaps_ = {};
    }

    static constexpr uintptr_t PAGE = 1 << 12;
    std::array<Range, 1024> gaps_{};
    uintptr_t dynamic_ = 0;
    size_t dynamic_bytes_ = 0;
    std::vector<Range> arrays_;
    std::vector<std::string> names_;   // of the arrays, mangled
    uint64_t static_bytes_ = 0;
    std::map<uintptr_t, Range> blocks_;
    Range last_;
    uint64_t next_ = 1 << 21;
};

// ==== call stacks and sites ==============================================================================

// Stacks as a tree: a call's place, and the stack that it was made from.
class Stacks {
public:
    uint32_t call(uint32_t from, uintptr_t pc)
    {
        const auto [place, is_new] = nodes_.try_emplace({from, pc}, static_cast<uint32_t>(list_.size()));
        if (is_new) list_.push_back({from, pc});
        return place->second;
    }
    uint32_t caller(uint32_t node) const { return list_[node].first; }
    std::vector<uintptr_t> pcs(uint32_t node) const
    {
        std::vector<uintptr_t> all;
        for (; node != 0; node = list_[node].first) all.push_back(list_[node].second);
        return all;
    }

private:
    std::map<std::pair<uint32_t, uintptr_t>, uint32_t> nodes_;
    std::vector<std::pair<uint32_t, uintptr_t>> list_{{0, 0}};   // node 0: no call
};

// An instruction that accesses memory, as called from where it was.
struct Site {
    uintptr_t pc;
    uint32_t stack;
    unsigned part, bytes;
    Space space;
    Access access;
    By by;

    uint64_t requests = 0, lanes = 0, asked = 0, sectors = 0, least_sectors = 0, wavefronts = 0, least_wavefronts = 0,
             l1_hits = 0, dram_sectors = 0;
    Request worst;
    double worst_ratio = 0;

    auto key() const { return std::tuple(pc, stack, part, bytes, space, access, by); }
};

// ==== kernels ============================================================================================

struct Totals {
    uint64_t dram_load = 0, dram_store = 0, l2 = 0, wavefronts = 0, flops = 0, special = 0;
};

struct Side {
    uint32_t site;
    Access access;
    unsigned actor, block;   // actor: a thread, or what works beside the threads: clocks.h
};

// A race of two accesses, or an uninitialised read, which has no earlier side.
struct Hazard {
    Space space;
    uint64_t address;
    Side later, earlier;
    uint64_t count;
    const char* why;
};

struct Kernel {
    LaunchShape shape;
    std::string symbol, range;
    uint64_t launches = 0, recorded_blocks = 0, accesses = 0;
    bool recorded = false;   // a launch of it
    bool is_taken = false;   // its figures, see take_figures

    std::vector<Site> sites;
    std::map<decltype(std::declval<Site>().key()), uint32_t> site_numbers;
    std::map<std::string, uint64_t> counts;
    std::map<std::tuple<std::string, uintptr_t, uint32_t>, uint64_t> syncs;   // by name, pc and stack
    Totals totals;
    std::vector<Totals> after_block;
    std::map<std::tuple<uint32_t, uint32_t, const char*>, Hazard> races;
    std::map<uint32_t, Hazard> uninitialised;

    uint64_t blocks() const { return uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2]; }
    unsigned threads() const { return shape.block[0] * shape.block[1] * shape.block[2]; }
};

// What a launch would come to whose other blocks are like the second half of those that were recorded: what they share,
// they have by then in the cache.
static double of_launch(const Kernel& kernel, uint64_t Totals::*figure)
{
    const auto& after = kernel.after_block;
    if (after.empty()) return 0;
    const double all = static_cast<double>(kernel.blocks()), seen = static_cast<double>(after.size());
    const double total = static_cast<double>(after.back().*figure);
    if (after.size() == kernel.blocks()) return total;
    const size_t half = after.size() / 2;
    const double before = half == 0 ? 0 : static_cast<double>(after[half - 1].*figure);
    return total + (all - seen) * (total - before) / (seen - static_cast<double>(half));
}

// ==== threads ============================================================================================

// What a thread has just loaded at a place in the program is in a register, as a compiler would keep it: loading it
// again there is no access. Until the thread stores something to that memory, which might be the same (a compiler does
// not know better), or meets others.
class Registers {
public:
    bool hold(Space space, uint32_t site, uint64_t address)
    {
        const uint64_t key = address << 20 ^ site;
        Slot& slot = slots_[(address / WORD * 7 + site * 13) % SLOTS];
        const uint64_t now = dropped_[static_cast<size_t>(space)];
        if (slot.key == key && slot.since == now) return true;
        slot = {key, now};
        return false;
    }
    void forget(Space space) { dropped_[static_cast<size_t>(space)]++; }
    void forget_all()
    {
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
    uint32_t site;
};

struct PendingCopy {
    Moment moment;
    uint64_t to;
    uint32_t site;
    unsigned group;
};

struct Thread {
    Known known, fenced;     // fenced: what the copy engine and wgmma can see
    Known released;          // by a __threadfence: what others find who see an atomic's result
    Tick own = 1;
    Known passed;            // what has run by now, in its steps; whether its accesses are seen is another matter
    Tick step = 1;
    bool is_over = false;
    uint32_t stack = 0;
    std::vector<Event> events;
    Registers registers;
    std::vector<PendingCopy> copies;
    unsigned copy_groups = 0;
};

// A thread that waited for the phase of an mbarrier which ended last.
struct Waiter {
    unsigned thread;
    Tick step;
    uint32_t site;
};

// An mbarrier, or a named one.
struct Sync {
    unsigned slot;
    bool is_mbarrier = false;
    std::vector<Waiter> waiters;
    Known arriving_passed, ended_passed[2];
    Known arriving, arriving_fenced;     // all that has arrived, ever
    Known ended[2], ended_fenced[2];     // when the last phase of that parity ended
    Tick phases = 0;                     // that have ended
};

struct Box {                             // a load by the copy engine
    Moment moment;
    uint32_t store_site, load_site;
    const void* barrier;
    std::vector<uint64_t> to, from;
};

struct WgmmaProduct {
    Moment moment;
    Known fenced;
    unsigned warp;
    uint32_t site;
    std::vector<uint64_t> a, b;
};

// ==== the recorder =======================================================================================

class Recorder {
public:
    bool recording = false;
    bool looks = true;   // at the launches that come
    Memory memory;
    Stacks stacks;

    // ---- launches and blocks
    void begin_launch(const LaunchShape& shape);
    Run next_block();
    void begin_block(uint64_t number);
    void end_block();
    void product(const Product& product);
    bool only_counts() const { return mode_ == Mode::SAMPLE; }
    Figures take_figures();
    void write(const std::string& ended);

    // ---- threads
    void begun(unsigned t) { threads_[t].stack = 0; }
    void now(unsigned t) { current_ = t; }
    void ended(unsigned t) { threads_[t].is_over = true; }
    void entered(uintptr_t caller) { threads_[current_].stack = stacks.call(threads_[current_].stack, caller); }
    void left() { threads_[current_].stack = stacks.caller(threads_[current_].stack); }

    // ---- accesses
    void accessed(Access access, By by, const void* address, size_t bytes, uintptr_t pc);
    void copy_async(const void* to, const void* from, uintptr_t pc);
    void copy_async_commit() { threads_[current_].copy_groups++; }
    void copy_async_wait(unsigned pending);
    unsigned box_issued(const void* barrier, uintptr_t pc);
    void box_part(unsigned box, const void* to, const void* from);
    void box_landed(unsigned box);
    unsigned wgmma_issued(unsigned warp, uint64_t flops, uintptr_t pc);
    void wgmma_reads(unsigned product, const void* address, Operand operand);
    void wgmma_ended(unsigned product);
    void wgmma_waited(unsigned warp);
    void tensor_flops(uint64_t flops) { kernel_->totals.flops += flops; }
    void special_function() { kernel_->totals.special++; }

    // ---- what orders
    bool is_removed(const char* name, uintptr_t pc);
    void barrier_met(const char* name);
    void lanes_met(unsigned first, uint32_t lanes, const char* name);
    void fence();
    void proxy_fence();
    void sync_made(const void* barrier, uintptr_t pc);
    void arrived(const void* barrier, uintptr_t pc);
    void phase_ended(const void* barrier, unsigned parity);
    void waited(const void* barrier, unsigned parity, uintptr_t pc);

private:
    enum class Mode { SAMPLE, FEW, WHOLE };

    // What a moment may race with, and the entry that it adds.
    struct Made {
        Moment moment;
        unsigned actor;     // that leaves the entry, ...
        Tick tick;          // ... and until when
        Kind kind;
        bool generic;
        const Known* fenced = nullptr;   // of what reads by way of the copy engine's proxy: what it can see
        uint32_t site;
        unsigned thread;    // to name it
    };

    Moment moment_of(unsigned t) const { return {threads_[t].known, t, threads_[t].own}; }
    Thread& me() { return threads_[current_]; }
    uint32_t site(uintptr_t pc, unsigned part, unsigned bytes, Space space, Access access, By by);
    void part_accessed(Place place, unsigned bytes, unsigned part, Access access, By by, uintptr_t pc);
    void land_copies(size_t count, Tick tick);
    void give_up_block();
    void touch(Space space, uint64_t at, unsigned bytes, const Made& made);
    void touch_granule(Space space, uint64_t granule, uint16_t mask, const Made& made);
    bool comes_before(const Entry& entry, Space space, const Made& made, const char** why) const;
    static bool keep_of_others(Entry* (&others)[2], Entry& entry);
    void report_race(Space space, uint64_t at, const Entry& entry, const Made& made, const char* why);
    void flush(unsigned warp);
    void account(uint32_t site, const Request& request);
    void account_global(Site& site, const Request& request);
    void account_bulk(uint32_t site, const std::vector<uint64_t>& chunks);
    void learn(unsigned t, const Known& known, const Known& fenced);
    void meet(const std::vector<unsigned>& who);
    void pass(const std::vector<unsigned>& who);
    void touch_barrier(const void* barrier, Kind kind, uintptr_t pc);
    void check_waiters(const Sync& sync);
    unsigned actors() const { return first_engine_ + ENGINES + (threads_in_block_ + LANES - 1) / LANES; }
    unsigned wgmma_actor(unsigned warp) const { return first_engine_ + ENGINES + warp; }
    Sync& sync_of(const void* barrier);
    uint64_t blocks_by_registers() const;
    uint64_t l1_share() const;
    json to_json(const Kernel& kernel) const;
    json to_json(const Site& site) const;
    json stack_of(uintptr_t pc, uint32_t stack) const;

    static constexpr unsigned ENGINES = 64;   // barriers of a block that count copies

    const cuda_cpu::Card* card_ = nullptr;
    Mode mode_ = Mode::WHOLE;
    std::string only_;
    std::set<std::string> except_;
    std::string from_;
    unsigned turns_ = 0;   // launches of from_
    Kernel before_;        // what is launched before that
    bool counts() const { return from_.empty() || turns_ > 0; }
    double seconds_ = 0;
    std::set<uintptr_t> removed_;
    std::chrono::steady_clock::time_point start_;
    bool is_open_ = false, is_written_ = false;
    void open();

    std::vector<std::unique_ptr<Kernel>> kernels_;
    std::map<std::tuple<const void*, std::string, std::array<unsigned, 6>, size_t,
                        std::vector<int64_t>, std::vector<bool>>, Kernel*> by_shape_;
    std::vector<std::pair<Product, uint64_t>> products_;
    std::vector<std::pair<char, uint32_t>> sequence_;

    // of the launch
    Kernel* kernel_ = nullptr;
    uint64_t next_block_ = 0;
    bool records_launch_ = false;
    Shadow global_, shared_;
    Cache l1_, l2_;
    json registers_ = json::object();   // what registers.py wrote
    std::map<uint64_t, std::map<unsigned, Known>> released_;   // by atomics on an address, by block

    // of the block
    unsigned block_ = 0, threads_in_block_ = 0, first_engine_ = 0;
    unsigned current_ = 0;
    std::vector<Thread> threads_{1};
    std::vector<uint16_t> written_;             // of shared memory, a bit a byte
    std::map<const void*, Sync> syncs_;
    std::map<unsigned, Known> acquired_;        // from other blocks
    std::vector<Box> boxes_;
    std::vector<WgmmaProduct> wgmmas_;
    std::vector<Tick> wgmma_ticks_;             // of each warp's products

    // Which site was found last, by a few bits of its place.
    struct Latest {
        const Kernel* of;
        uint32_t site;
    };
    std::array<Latest, 4096> latest_{};

    // of the flush
    struct Scratch {
        std::vector<uint32_t> requests;
        unsigned lane = LANES, occurrence = 0;
    };
    std::vector<Scratch> scratch_;
    std::vector<std::pair<uint32_t, Request>> requests_;
};

static Recorder recorder;

// Calls the recorder if it is recording, and keeps its own accesses from being recorded: what it uses of the standard
// library may be the program's instrumented copy.
template <auto method, class... Arguments> static auto quietly(Arguments... arguments)
{
    struct Pause {
        Pause() { recorder.recording = false; }
        ~Pause() { recorder.recording = true; }
    };
    using Result = decltype((recorder.*method)(arguments...));
    if (!recorder.recording) return Result();
    const Pause pause;
    return (recorder.*method)(arguments...);
}

// ==== sites ==============================================================================================

uint32_t Recorder::site(uintptr_t pc, unsigned part, unsigned bytes, Space space, Access access, By by)
{
    Site wanted{pc, me().stack, part, bytes, space, access, by};
    Latest& latest = latest_[(pc * 31 + wanted.stack * 7 + part * 3 + static_cast<unsigned>(space)) % latest_.size()];
    const bool is_known = latest.of == kernel_ && latest.site < kernel_->sites.size();
    if (is_known && kernel_->sites[latest.site].key() == wanted.key()) return latest.site;
    const auto [place, is_new] =
        kernel_->site_numbers.try_emplace(wanted.key(), static_cast<uint32_t>(kernel_->sites.size()));
    if (is_new) kernel_->sites.push_back(wanted);
    latest = {kernel_, place->second};
    return place->second;
}

void Recorder::accessed(Access access, By by, const void* address, size_t bytes, uintptr_t pc)
{
    const Place place = memory.find(address);
    if (place.space == Space::OTHER) return;
    // An access is as wide as its size and its address allow, 16 bytes at most.
    uint64_t width = std::min<uint64_t>(16, bytes & -bytes);
    if (place.at % width != 0) width = place.at & -place.at;
    if (by == By::ATOMIC) kernel_->counts["atomic"]++;
    unsigned part = 0;
    for (uint64_t done = 0; done < bytes; done += width)
        part_accessed({place.space, place.at + done}, static_cast<unsigned>(width), part++, access, by, pc);
}

void Recorder::part_accessed(Place place, unsigned bytes, unsigned part, Access access, By by, uintptr_t pc)
{
    Thread& t = me();
    const uint32_t number = site(pc, part, bytes, place.space, access, by);
    if (access == Access::LOAD && by == By::THREAD && t.registers.hold(place.space, number, place.at)) return;
    if (access == Access::STORE) t.registers.forget(place.space);
    t.events.push_back({place.at, number});
    const Kind kind = by == By::ATOMIC ? Kind::ATOMIC : access == Access::STORE ? Kind::WRITE : Kind::READ;
    if (by == By::ATOMIC && place.space == Space::GLOBAL) {
        auto& released = released_[place.at];
        for (const auto& [other, known] : released)
            if (other != block_) acquired_[other] = together(acquired_[other], known);
        if (t.released != nullptr) released[block_] = together(released[block_], t.released);
    }
    touch(place.space, place.at, bytes, {moment_of(current_), current_, t.own, kind, true, nullptr, number, current_});
}

// ==== races ==============================================================================================

// (CUDA C++ Programming Guide, "SIMT Architecture": which thread performs the final write is undefined.)
constexpr const char* ONE_INSTRUCTION = "lanes of one instruction: any may be the last; sound if all store the same";

void Recorder::touch(Space space, uint64_t at, unsigned bytes, const Made& made)
{
    kernel_->accesses++;
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t granule = (at + done) / GRANULE, first = (at + done) % GRANULE;
        const uint64_t count = std::min<uint64_t>(GRANULE - first, bytes - done);
        touch_granule(space, granule, static_cast<uint16_t>(((1u << count) - 1) << first), made);
        done += count;
    }
}

// Whether the entry's access comes before, or needs not to.
bool Recorder::comes_before(const Entry& entry, Space space, const Made& made, const char** why) const
{
    if (space == Space::GLOBAL && entry.block != block_) {
        const auto found = acquired_.find(entry.block);
        *why = "blocks of one launch are not ordered";
        return found != acquired_.end() && found->second != nullptr &&
               Moment{found->second, NONE, 0}.covers(entry.first_actor, entry.lanes, entry.tick);
    }
    *why = "nothing orders them";
    if (!made.moment.covers(entry.first_actor, entry.lanes, entry.tick)) return false;
    if (made.fenced == nullptr || !entry.generic || entry.kind == Kind::READ) return true;
    *why = "no fence.proxy.async between";
    return *made.fenced != nullptr && Moment{*made.fenced, NONE, 0}.covers(entry.first_actor, entry.lanes, entry.tick);
}

void Recorder::touch_granule(Space space, uint64_t granule, uint16_t mask, const Made& made)
{
    Shadow& shadow = space == Space::SHARED ? shared_ : global_;
    const bool is_thread = made.actor < first_engine_;
    const uint32_t first_actor = is_thread ? made.actor / LANES * LANES : made.actor;
    const uint32_t lanes = is_thread ? 1u << made.actor % LANES : 1;
    if (space == Space::SHARED) {
        uint16_t& written = written_[granule];
        if (made.kind != Kind::WRITE && (mask & ~written) != 0) {
            const auto [place, is_new] = kernel_->uninitialised.try_emplace(made.site);
            const uint64_t at = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(mask & ~written));
            if (is_new) place->second = {space, at, {made.site, Access::LOAD, made.thread, block_}, {}, 0, ""};
            place->second.count++;
        }
        if (made.kind != Kind::READ) written |= mask;
    }
    bool is_noted = false;
    Entry* others[] = {nullptr, nullptr};
    shadow.visit(granule, [&](Entry& entry) {
        if (entry.block != block_ && entry.kind == Kind::READ && made.kind == Kind::READ)
            return keep_of_others(others, entry);
        const bool conflict = (entry.bytes & mask) != 0 && (entry.kind != Kind::READ || made.kind != Kind::READ) &&
                              !(entry.kind == Kind::ATOMIC && made.kind == Kind::ATOMIC);
        const char* why = nullptr;
        const bool is_twin = entry.kind == made.kind && entry.first_actor == first_actor && entry.tick == made.tick &&
                             entry.block == block_;
        if (is_twin && entry.lanes == lanes && (mask & ~entry.bytes) == 0) {   // the same again
            is_noted = true;
            return true;
        }
        if (is_twin && entry.kind == Kind::READ && entry.bytes == mask && entry.site == made.site) {   // another lane's
            entry.lanes |= lanes;
            is_noted = true;
            return true;
        }
        const bool is_neighbour = entry.site == made.site && entry.first_actor == first_actor && entry.block == block_;
        const bool before = conflict ? comes_before(entry, space, made, &why)
                                     : entry.block == block_ && made.moment.surely_covers(first_actor, lanes, entry);
        if (entry.kind == Kind::WRITE && made.kind == Kind::WRITE && is_neighbour) why = ONE_INSTRUCTION;
        if (conflict && !before) {
            const uint64_t at = granule * GRANULE + static_cast<uint64_t>(__builtin_ctz(entry.bytes & mask));
            report_race(space, at, entry, made, why);
        }
        const bool stands = made.kind == Kind::WRITE || entry.kind == made.kind;
        return !(before && stands && (entry.bytes & ~mask) == 0);
    });
    if (is_noted) return;
    shadow.add(granule, {made.tick, lanes, first_actor, block_, made.site, NONE, mask, made.kind, made.generic});
}

// Of reads by other blocks one is kept for each of two blocks: a block that writes there is not the same as both.
bool Recorder::keep_of_others(Entry* (&others)[2], Entry& entry)
{
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

void Recorder::report_race(Space space, uint64_t at, const Entry& entry, const Made& made, const char* why)
{
    const Access access = made.kind == Kind::READ ? Access::LOAD : Access::STORE;
    const Access other = entry.kind == Kind::READ ? Access::LOAD : Access::STORE;
    unsigned other_actor = entry.first_actor + static_cast<unsigned>(__builtin_ctz(entry.lanes));
    for (uint32_t rest = entry.lanes; rest != 0; rest &= rest - 1) {   // one that is really not ordered
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        Entry alone = entry;
        const char* unused = nullptr;
        alone.lanes = 1u << lane;
        if (comes_before(alone, space, made, &unused)) continue;
        other_actor = entry.first_actor + lane;
        break;
    }
    const auto [place, is_new] = kernel_->races.try_emplace({made.site, entry.site, why});
    if (is_new)
        place->second = {space, space == Space::GLOBAL ? memory.within_block(at) : at,
                         {made.site, access, made.thread, block_}, {entry.site, other, other_actor, entry.block}, 0, why};
    place->second.count++;
}

// ==== requests ===========================================================================================

// The n-th access of each instruction since the warp last met is a request, of the lanes that have made it.
void Recorder::flush(unsigned warp)
{
    requests_.clear();
    scratch_.resize(std::max(scratch_.size(), kernel_->sites.size()));
    const unsigned first = warp * LANES, last = std::min(first + LANES, threads_in_block_);
    for (unsigned t = first; t < last; t++) {
        const unsigned lane = t - first;
        for (const Event& event : threads_[t].events) {
            Scratch& scratch = scratch_[event.site];
            if (scratch.lane != lane) {
                scratch.lane = lane;
                scratch.occurrence = 0;
            }
            const unsigned nth = scratch.occurrence++;
            if (nth == scratch.requests.size()) {
                scratch.requests.push_back(static_cast<uint32_t>(requests_.size()));
                requests_.push_back({event.site, {}});
                requests_.back().second.bytes = kernel_->sites[event.site].bytes;
            }
            Request& request = requests_[scratch.requests[nth]].second;
            request.address[lane] = event.address;
            request.active |= 1u << lane;
        }
        threads_[t].events.clear();
    }
    for (const auto& [number, request] : requests_) {
        account(number, request);
        scratch_[number].requests.clear();
        scratch_[number].lane = LANES;
    }
}

void Recorder::account(uint32_t number, const Request& request)
{
    Site& site = kernel_->sites[number];
    site.requests++;
    site.lanes += request.lanes();
    site.asked += uint64_t{request.lanes()} * request.bytes;
    double ratio = 1;
    if (site.space == Space::SHARED) {
        const Request::Wavefronts wavefronts = request.wavefronts();
        site.wavefronts += wavefronts.taken;
        site.least_wavefronts += wavefronts.least;
        kernel_->totals.wavefronts += wavefronts.taken;
        ratio = static_cast<double>(wavefronts.taken) / wavefronts.least;
    } else {
        const uint64_t before = site.sectors, least = request.least_sectors();
        account_global(site, request);
        site.least_sectors += least;
        ratio = static_cast<double>(site.sectors - before) / least;
    }
    // The picture is of the worst; of those, the one with most lanes.
    const double rank = ratio * 64 + request.lanes();
    if (rank > site.worst_ratio) {
        site.worst_ratio = rank;
        site.worst = request;
    }
}

void Recorder::account_global(Site& site, const Request& request)
{
    Totals& totals = kernel_->totals;
    const bool through_l1 = site.by == By::THREAD && site.access == Access::LOAD;
    for (uint64_t sector : request.units(SECTOR)) {
        site.sectors++;
        if (site.access == Access::STORE) {
            totals.l2++;
            const bool is_new = l2_.store(sector);
            totals.dram_store += is_new;
            site.dram_sectors += is_new;
            continue;
        }
        if (through_l1 && l1_.load(sector)) {
            site.l1_hits++;
            continue;
        }
        totals.l2++;
        if (l2_.load(sector)) continue;
        totals.dram_load++;
        site.dram_sectors++;
    }
}

// What the copy engine and wgmma move: 16 bytes each, in whatever order is best.
void Recorder::account_bulk(uint32_t number, const std::vector<uint64_t>& chunks)
{
    Site& site = kernel_->sites[number];
    site.requests++;
    site.lanes++;
    site.asked += chunks.size() * GRANULE;
    if (site.space == Space::SHARED) {
        std::array<uint64_t, BANKS> words{};
        for (uint64_t at : chunks)
            for (uint64_t byte = 0; byte < GRANULE; byte += WORD) words[(at + byte) / WORD % BANKS]++;
        const uint64_t taken = *std::max_element(words.begin(), words.end());
        site.wavefronts += taken;
        site.least_wavefronts += (chunks.size() * GRANULE + LINE - 1) / LINE;
        kernel_->totals.wavefronts += taken;
        return;
    }
    Request request;
    request.bytes = GRANULE;
    for (size_t i = 0; i < chunks.size(); i += LANES) {
        request.active = 0;
        for (size_t j = i; j < std::min<size_t>(chunks.size(), i + LANES); j++) {
            request.address[j - i] = chunks[j];
            request.active |= 1u << (j - i);
        }
        account_global(site, request);
        site.least_sectors += request.least_sectors();
    }
}

// ==== launches and blocks ================================================================================

void Recorder::open()
{
    is_open_ = true;
    start_ = std::chrono::steady_clock::now();
    card_ = cuda_cpu::card() != nullptr ? cuda_cpu::card() : cuda_cpu::find_card("h100");
    const auto setting = [](const char* name) { return std::string(getenv(name) != nullptr ? getenv(name) : ""); };
    const std::string mode = setting("INSPECT_MODE");
    mode_ = mode == "sample" ? Mode::SAMPLE : mode == "few" ? Mode::FEW : Mode::WHOLE;
    only_ = setting("INSPECT_KERNEL");
    std::istringstream names(setting("INSPECT_EXCEPT"));
    for (std::string name; names >> name;) except_.insert(name);
    from_ = setting("INSPECT_FROM");
    seconds_ = atof(setting("INSPECT_SECONDS").c_str());
    if (std::ifstream file(setting("INSPECT_REGISTERS")); file) registers_ = json::parse(file);
    std::istringstream places(setting("INSPECT_REMOVE"));
    for (uintptr_t pc; places >> std::hex >> pc;) removed_.insert(pc);
    written_.assign(memory.shared_bytes() / GRANULE + 1, 0);
    atexit([] { recorder.write("at its end"); });
}

void Recorder::begin_launch(const LaunchShape& shape)
{
    if (!is_open_) open();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
    if (seconds_ > 0 && passed.count() > seconds_) {
        write("after " + std::to_string(static_cast<int>(seconds_)) + " s, as asked");
        fflush(stdout);
        _Exit(0);
    }
    const std::string range = strcmp(shape.range, cuda_cpu::watch::no_range) == 0 ? "" : shape.range;
    if (!from_.empty() && range == from_ && ++turns_ == 2) {
        write("after a turn from " + from_ + " to the next");
        fflush(stdout);
        _Exit(0);
    }
    records_launch_ = false;
    if (!counts()) {
        before_ = {shape, shape.symbol, range};
        kernel_ = &before_;
        next_block_ = 0;
        return;
    }
    const std::array<unsigned, 6> sizes{shape.grid[0],  shape.grid[1],  shape.grid[2],
                                        shape.block[0], shape.block[1], shape.block[2]};
    const auto [place, is_new] =
        by_shape_.try_emplace({shape.kernel, range, sizes, shape.dynamic_shared, shape.variant.integers,
                               shape.variant.pointers}, nullptr);
    if (is_new) {
        kernels_.push_back(std::make_unique<Kernel>());
        place->second = kernels_.back().get();
        *place->second = {shape, shape.symbol, range};
    }
    kernel_ = place->second;
    kernel_->launches++;
    const auto is_it = [&](const auto& kernel) { return kernel.get() == kernel_; };
    const auto number = std::find_if(kernels_.begin(), kernels_.end(), is_it) - kernels_.begin();
    sequence_.push_back({'k', static_cast<uint32_t>(number)});
    const bool is_excepted = except_.count(kernel_->range) > 0;
    const bool is_wanted = is_excepted ? false : only_.empty() || kernel_->range.find(only_) != std::string::npos ||
                           kernel_->symbol.find(only_) != std::string::npos;
    records_launch_ = looks && is_wanted && !kernel_->recorded;
    next_block_ = 0;
    if (!records_launch_) return;
    kernel_->recorded = true;
    global_.clear();
    released_.clear();
    l2_.reset(card_->l2_bytes);
    kernel_->after_block.clear();
    if (getenv("INSPECT_PROGRESS") != nullptr)
        fprintf(stderr, "inspect: %s\n", range.empty() ? shape.symbol : range.c_str());
}

// Blocks of a kernel that all do the same need not all be seen.
Run Recorder::next_block()
{
    const uint64_t number = next_block_++;
    // A kernel of one block may be a question that the program asks, like compiled_for_sm_90a: it needs the answer.
    const Run otherwise = mode_ == Mode::SAMPLE && kernel_->blocks() > 1 ? Run::NOT : Run::UNSEEN;
    if (!records_launch_) return otherwise;
    if (number == 0) return Run::RECORDED;
    const LaunchShape& shape = kernel_->shape;
    const uint64_t row = shape.grid[1] * shape.grid[2] > 1 ? shape.grid[0] : 1;
    const Enough& limit = mode_ == Mode::WHOLE ? IN_A_PROGRAM : IN_A_STEP;
    const bool row_is_done = number % row == 0;
    const bool enough = number >= std::min(limit.blocks, 2 * row + 6) && row_is_done &&
                        kernel_->accesses >= limit.accesses;
    const bool too_many = kernel_->accesses >= (row_is_done ? limit.too_many : limit.far_too_many);
    return enough || too_many ? otherwise : Run::RECORDED;
}

// Blocks of this kernel for whose registers a multiprocessor has room; as many as you like where those are unknown.
uint64_t Recorder::blocks_by_registers() const
{
    const auto found = registers_.find(kernel_->symbol);
    if (found == registers_.end()) return std::numeric_limits<uint64_t>::max();
    constexpr unsigned file = 64 * 1024, granularity = 256, quarters = 4;   // as in estimate.py's occupancy()
    const unsigned registers = (*found)["registers"], warps = (kernel_->threads() + LANES - 1) / LANES;
    const unsigned of_warp = (registers * LANES + granularity - 1) / granularity * granularity;
    return of_warp == 0 ? std::numeric_limits<uint64_t>::max() : file / of_warp / quarters * quarters / warps;
}

// The part of L1 that a block has, when its multiprocessor has as many of them as fit.
uint64_t Recorder::l1_share() const
{
    const cuda_cpu::Capability& c = card_->capability;
    const LaunchShape& shape = kernel_->shape;
    const size_t shared = shape.dynamic_shared + shape.static_shared + c.reserved_shared_per_block;
    uint64_t blocks = c.threads_per_multiprocessor / kernel_->threads();
    blocks = std::min<uint64_t>(blocks, c.blocks_per_multiprocessor);
    blocks = std::min<uint64_t>(blocks, c.shared_per_multiprocessor / shared);
    blocks = std::min(blocks, blocks_by_registers());
    blocks = std::max<uint64_t>(1, blocks);
    constexpr size_t least = 16 * cuda_cpu::kib;
    const size_t taken = std::min(c.l1_and_shared - least, blocks * shared);
    return (c.l1_and_shared - taken) / blocks;
}

void Recorder::begin_block(uint64_t number)
{
    recording = true;
    block_ = static_cast<unsigned>(number);
    current_ = 0;
    threads_in_block_ = kernel_->threads();
    first_engine_ = (threads_in_block_ + LANES - 1) / LANES * LANES;
    threads_.clear();
    threads_.resize(threads_in_block_);
    shared_.clear();
    std::fill(written_.begin(), written_.end(), 0);
    syncs_.clear();
    acquired_.clear();
    boxes_.clear();
    wgmmas_.clear();
    wgmma_ticks_.assign(threads_in_block_ / LANES + 1, 0);
    l1_.reset(l1_share());
    kernel_->counts["blocks"]++;
}

void Recorder::end_block()
{
    for (unsigned warp = 0; warp * LANES < threads_in_block_; warp++) flush(warp);
    recording = false;
    kernel_->recorded_blocks++;
    kernel_->after_block.push_back(kernel_->totals);
}

// The program ends within a block: what its threads have done so far counts, and what they have not waited for.
void Recorder::give_up_block()
{
    for (current_ = 0; current_ < threads_in_block_; current_++) land_copies(me().copies.size(), NEVER);
    current_ = 0;
    for (unsigned i = 0; i < wgmmas_.size(); i++)
        if (!wgmmas_[i].b.empty()) wgmma_ended(i);
    end_block();
}

void Recorder::product(const Product& product)
{
    if (!counts()) return;
    if (!is_open_) open();
    const auto same = [&](const auto& other) {
        const Product& p = other.first;
        return p.m == product.m && p.n == product.n && p.k == product.k && strcmp(p.type, product.type) == 0 &&
               p.out_bytes == product.out_bytes && p.accumulate == product.accumulate &&
               strcmp(p.epilogue, product.epilogue) == 0;
    };
    auto found = std::find_if(products_.begin(), products_.end(), same);
    if (found == products_.end()) found = products_.insert(products_.end(), {product, 0});
    found->second++;
    sequence_.push_back({'m', static_cast<uint32_t>(found - products_.begin())});
}

// ==== what orders ========================================================================================

bool Recorder::is_removed(const char* name, uintptr_t pc)
{
    kernel_->syncs[{name, pc, me().stack}]++;
    return removed_.count(pc) > 0;
}

void Recorder::learn(unsigned t, const Known& known, const Known& fenced)
{
    threads_[t].known = together(threads_[t].known, known);
    threads_[t].fenced = together(threads_[t].fenced, fenced);
}

// All of these know what each of them knows, and has done.
void Recorder::meet(const std::vector<unsigned>& who)
{
    std::vector<Moment> moments;
    Known fenced, released;
    for (unsigned t : who) {
        moments.push_back(moment_of(t));
        if (threads_[t].fenced != fenced) fenced = together(fenced, threads_[t].fenced);
        if (threads_[t].released != released) released = together(released, threads_[t].released);
    }
    const Known all = together(moments, actors());
    for (unsigned t : who) {
        threads_[t].known = all;
        threads_[t].fenced = fenced;
        threads_[t].released = released;
        threads_[t].own++;
        threads_[t].registers.forget_all();
    }
    pass(who);
}

// All of these have come as far as here. That is less than to meet: an instruction that takes all lanes brings them to
// one place, but what one has stored need not be seen by the others.
void Recorder::pass(const std::vector<unsigned>& who)
{
    std::vector<Moment> moments;
    for (unsigned t : who) moments.push_back({threads_[t].passed, t, threads_[t].step});
    const Known all = together(moments, actors());
    for (unsigned t : who) {
        threads_[t].passed = all;
        threads_[t].step++;
    }
}

void Recorder::barrier_met(const char* name)
{
    kernel_->counts[name]++;
    std::vector<unsigned> all(threads_in_block_);   // those that have ended, too: their work is done
    for (unsigned t = 0; t < threads_in_block_; t++) all[t] = t;
    meet(all);
    for (unsigned warp = 0; warp * LANES < threads_in_block_; warp++) flush(warp);
}

// Shuffles, votes and __syncwarp order what the lanes do; instructions of tensor cores only need all lanes.
void Recorder::lanes_met(unsigned first, uint32_t lanes, const char* name)
{
    kernel_->counts[name]++;
    uint32_t alive = 0;
    for (unsigned lane = 0; lane < LANES && first + lane < threads_in_block_; lane++)
        if (!threads_[first + lane].is_over) alive |= 1u << lane;
    std::vector<unsigned> who;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1)
        who.push_back(first + static_cast<unsigned>(__builtin_ctz(rest)));
    if (name[0] == '_') meet(who);
    else pass(who);
    if (lanes == alive) flush(first / LANES);
}

void Recorder::fence()
{
    me().released = together({moment_of(current_)}, actors());
    me().own++;
    me().registers.forget_all();
}

void Recorder::proxy_fence()
{
    kernel_->counts["fence.proxy.async"]++;
    me().fenced = together(me().fenced, together({moment_of(current_)}, actors()));
    me().own++;
    me().registers.forget_all();
}

Sync& Recorder::sync_of(const void* barrier)
{
    const auto [place, is_new] = syncs_.try_emplace(barrier);
    if (is_new) place->second.slot = static_cast<unsigned>(syncs_.size() - 1) % ENGINES;
    return place->second;
}

// An mbarrier is 8 bytes of shared memory, which one thread sets up before others use them.
void Recorder::touch_barrier(const void* barrier, Kind kind, uintptr_t pc)
{
    const Place place = memory.find(barrier);
    if (place.space != Space::SHARED) return;
    const Access access = kind == Kind::WRITE ? Access::STORE : Access::LOAD;
    const uint32_t number = site(pc, 0, sizeof(uint64_t), place.space, access, By::ATOMIC);
    touch(place.space, place.at, sizeof(uint64_t),
          {moment_of(current_), current_, me().own, kind, false, nullptr, number, current_});
}

void Recorder::sync_made(const void* barrier, uintptr_t pc)
{
    syncs_.erase(barrier);
    sync_of(barrier).is_mbarrier = true;
    touch_barrier(barrier, Kind::WRITE, pc);
}

void Recorder::arrived(const void* barrier, uintptr_t pc)
{
    touch_barrier(barrier, Kind::ATOMIC, pc);
    Sync& sync = sync_of(barrier);
    sync.arriving = together(sync.arriving, together({moment_of(current_)}, actors()));
    sync.arriving_fenced = together(sync.arriving_fenced, me().fenced);
    sync.arriving_passed = together(sync.arriving_passed, together({{me().passed, current_, me().step}}, actors()));
    me().own++;
    me().step++;
    me().registers.forget_all();
}

// With it the copies that the phase counts have landed.
void Recorder::phase_ended(const void* barrier, unsigned parity)
{
    Sync& sync = sync_of(barrier);
    check_waiters(sync);
    sync.waiters.clear();
    sync.phases++;
    sync.arriving = together({{sync.arriving, first_engine_ + sync.slot, sync.phases}}, actors());
    sync.ended[parity] = sync.arriving;
    sync.ended_fenced[parity] = sync.arriving_fenced;
    sync.ended_passed[parity] = sync.arriving_passed;
}

// Phases have a parity, not a number. A thread that waits for one must see it before the next one ends: else the phase
// looks as if it had not ended, and the thread waits for the one after that.
void Recorder::check_waiters(const Sync& sync)
{
    constexpr const char* why = "the wait may come when the next phase has ended too, and then not end";
    if (!sync.is_mbarrier) return;
    const Moment ends{sync.arriving_passed, NONE, 0};
    for (const Waiter& waiter : sync.waiters) {
        if (ends.covers(waiter.thread / LANES * LANES, 1u << waiter.thread % LANES, waiter.step)) continue;
        const auto [place, is_new] = kernel_->races.try_emplace({waiter.site, waiter.site, why});
        if (is_new)
            place->second = {Space::SHARED, 0, {waiter.site, Access::LOAD, waiter.thread, block_},
                             {waiter.site, Access::STORE, current_, block_}, 0, why};
        place->second.count++;
    }
}

void Recorder::waited(const void* barrier, unsigned parity, uintptr_t pc)
{
    touch_barrier(barrier, Kind::ATOMIC, pc);
    kernel_->counts["waits at barriers"]++;
    Sync& sync = sync_of(barrier);
    learn(current_, sync.ended[parity], sync.ended_fenced[parity]);
    me().passed = together(me().passed, sync.ended_passed[parity]);
    me().registers.forget_all();
    if (!sync.is_mbarrier) return;
    const uint32_t number = site(pc, 0, sizeof(uint64_t), Space::SHARED, Access::LOAD, By::ATOMIC);
    sync.waiters.push_back({current_, me().step, number});
}

// ==== instructions of PTX ================================================================================

// cp.async: it reads and writes at some moment between the instruction and the wait.
void Recorder::copy_async(const void* to, const void* from, uintptr_t pc)
{
    Thread& t = me();
    const Place target = memory.find(to);
    const Moment issued = moment_of(current_);
    const uint32_t number = site(pc, 0, GRANULE, Space::SHARED, Access::STORE, By::COPY_ASYNC);
    t.events.push_back({target.at, number});
    if (from != nullptr) {
        const Place source = memory.find(from);
        const uint32_t load = site(pc, 0, GRANULE, Space::GLOBAL, Access::LOAD, By::COPY_ASYNC);
        t.events.push_back({source.at, load});
        touch(Space::GLOBAL, source.at, GRANULE, {issued, current_, t.own, Kind::READ, true, nullptr, load, current_});
    }
    t.own++;
    t.copies.push_back({issued, target.at, number, t.copy_groups});
}

void Recorder::copy_async_wait(unsigned pending)
{
    Thread& t = me();
    size_t done = 0;
    while (done < t.copies.size() && t.copies[done].group + pending < t.copy_groups) done++;
    land_copies(done, t.own);
}

// This thread's first ones, whose writes come before what happens after that tick.
void Recorder::land_copies(size_t count, Tick tick)
{
    Thread& t = me();
    for (size_t i = 0; i < count; i++) {
        const PendingCopy& copy = t.copies[i];
        touch(Space::SHARED, copy.to, GRANULE,
              {copy.moment, current_, tick, Kind::WRITE, true, nullptr, copy.site, current_});
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(count));
}

// The copy engine: its accesses belong to the barrier that counts them, in the phase that is under way.
unsigned Recorder::box_issued(const void* barrier, uintptr_t pc)
{
    Box box{moment_of(current_), 0, 0, barrier, {}, {}};
    box.store_site = site(pc, 0, GRANULE, Space::SHARED, Access::STORE, By::COPY_ENGINE);
    box.load_site = site(pc, 0, GRANULE, Space::GLOBAL, Access::LOAD, By::COPY_ENGINE);
    me().own++;
    boxes_.push_back(std::move(box));
    return static_cast<unsigned>(boxes_.size() - 1);
}

void Recorder::box_part(unsigned box, const void* to, const void* from)
{
    boxes_[box].to.push_back(memory.find(to).at);
    if (from != nullptr) boxes_[box].from.push_back(memory.find(from).at);
}

void Recorder::box_landed(unsigned number)
{
    Box& box = boxes_[number];
    const Sync& sync = sync_of(box.barrier);
    const unsigned engine = first_engine_ + sync.slot, issuer = box.moment.actor;
    const Tick tick = sync.phases + 1;
    const Made store{box.moment, engine, tick, Kind::WRITE, false, nullptr, box.store_site, issuer};
    const Made load{box.moment, engine, tick, Kind::READ, false, nullptr, box.load_site, issuer};
    for (uint64_t at : box.to) touch(Space::SHARED, at, GRANULE, store);
    for (uint64_t at : box.from) touch(Space::GLOBAL, at, GRANULE, load);
    account_bulk(box.store_site, box.to);
    account_bulk(box.load_site, box.from);
    box = {};
}

// wgmma reads its operands at some moment between the instruction and the wait. It is the warp's: what one of its lanes
// knows counts for all.
unsigned Recorder::wgmma_issued(unsigned warp, uint64_t flops, uintptr_t pc)
{
    tensor_flops(flops);
    std::vector<Moment> lanes;
    WgmmaProduct product;
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++) {
        lanes.push_back(moment_of(t));
        if (product.fenced != threads_[t].fenced) product.fenced = together(product.fenced, threads_[t].fenced);
        threads_[t].own++;
    }
    product.moment = {together(lanes, actors()), warp * LANES, lanes[0].own};
    product.warp = warp;
    product.site = site(pc, 0, GRANULE, Space::SHARED, Access::LOAD, By::WGMMA);
    wgmmas_.push_back(std::move(product));
    return static_cast<unsigned>(wgmmas_.size() - 1);
}

void Recorder::wgmma_reads(unsigned product, const void* address, Operand operand)
{
    (operand == Operand::A ? wgmmas_[product].a : wgmmas_[product].b).push_back(memory.find(address).at);
}

// All four warps of a warpgroup read the same B, once.
void Recorder::wgmma_ended(unsigned number)
{
    WgmmaProduct& product = wgmmas_[number];
    const Tick tick = ++wgmma_ticks_[product.warp];
    const auto read = [&](const std::vector<uint64_t>& chunks) {
        for (uint64_t at : chunks)
            touch(Space::SHARED, at, GRANULE, {product.moment, wgmma_actor(product.warp), tick, Kind::READ, false,
                                               &product.fenced, product.site, product.warp * LANES});
    };
    read(product.a);
    read(product.b);
    if (!product.a.empty()) account_bulk(product.site, product.a);
    if (product.warp % 4 == 0) account_bulk(product.site, product.b);
    product = {};
}

void Recorder::wgmma_waited(unsigned warp)
{
    const Moment ended{nullptr, wgmma_actor(warp), wgmma_ticks_[warp]};
    const Known products = together({ended}, actors());
    const Known* last = nullptr;
    Known before;
    for (unsigned t = warp * LANES; t < (warp + 1) * LANES; t++) {
        if (last != nullptr && threads_[t].known == before) {
            threads_[t].known = *last;
            continue;
        }
        before = threads_[t].known;
        threads_[t].known = together(before, products);
        last = &threads_[t].known;
    }
}

// ==== the file ===========================================================================================

json Recorder::stack_of(uintptr_t pc, uint32_t stack) const
{
    json all = json::array({pc});
    for (uintptr_t caller : stacks.pcs(stack)) all.push_back(caller);
    return all;
}

json Recorder::to_json(const Site& site) const
{
    json offsets = json::array();
    uint64_t base = ~uint64_t{0};
    for (unsigned lane = 0; lane < LANES; lane++)
        if (site.worst.active >> lane & 1) base = std::min(base, site.worst.address[lane]);
    base = base / LINE * LINE;
    for (unsigned lane = 0; lane < LANES; lane++)
        offsets.push_back(site.worst.active >> lane & 1 ? static_cast<int64_t>(site.worst.address[lane] - base) : -1);
    json all = {{"stack", stack_of(site.pc, site.stack)}, {"part", site.part},
                {"space", site.space == Space::SHARED ? "shared" : "global"},
                {"access", site.access == Access::LOAD ? "load" : "store"},
                {"by", BY_NAMES[static_cast<int>(site.by)]}, {"bytes_per_lane", site.bytes},
                {"requests", site.requests}, {"lanes", site.lanes}, {"bytes", site.asked},
                {"sectors", site.sectors}, {"least_sectors", site.least_sectors},
                {"wavefronts", site.wavefronts}, {"least_wavefronts", site.least_wavefronts},
                {"l1_hits", site.l1_hits}, {"dram_sectors", site.dram_sectors}};
    if (site.worst.active != 0) all["picture"] = {{"base", base}, {"offsets", offsets}};
    return all;
}

// Kernels with hazards are kept, for the file.
Figures Recorder::take_figures()
{
    Figures all;
    for (auto& kernel : kernels_) {
        if (kernel->is_taken) continue;
        const double recorded = static_cast<double>(std::max<uint64_t>(1, kernel->recorded_blocks));
        const double scale = static_cast<double>(kernel->launches * kernel->blocks()) / recorded;
        for (const Site& site : kernel->sites) {
            all.sectors += scale * static_cast<double>(site.sectors);
            all.least_sectors += scale * static_cast<double>(site.least_sectors);
            all.wavefronts += scale * static_cast<double>(site.wavefronts);
            all.least_wavefronts += scale * static_cast<double>(site.least_wavefronts);
        }
        all.memory_bytes += static_cast<double>(kernel->launches) * SECTOR *
                            (of_launch(*kernel, &Totals::dram_load) + of_launch(*kernel, &Totals::dram_store));
        all.hazards += kernel->races.size() + kernel->uninitialised.size();
        kernel->is_taken = true;
    }
    const auto is_sound = [](const auto& kernel) { return kernel->races.empty() && kernel->uninitialised.empty(); };
    kernels_.erase(std::remove_if(kernels_.begin(), kernels_.end(), is_sound), kernels_.end());
    by_shape_.clear();
    sequence_.clear();
    kernel_ = nullptr;
    return all;
}

json Recorder::to_json(const Kernel& kernel) const
{
    json all = {{"symbol", kernel.symbol}, {"range", kernel.range}, {"grid", kernel.shape.grid},
                {"block", kernel.shape.block}, {"integers", kernel.shape.variant.integers},
                {"dynamic_shared", kernel.shape.dynamic_shared},
                {"static_shared", kernel.shape.static_shared},
                {"launches", kernel.launches}, {"recorded_blocks", kernel.recorded_blocks},
                {"blocks", kernel.blocks()}, {"threads", kernel.threads()}, {"counts", kernel.counts},
                {"tensor_flops", kernel.totals.flops}};
    all["traffic"] = {{"launch_dram_load", of_launch(kernel, &Totals::dram_load) * SECTOR},
                      {"launch_dram_store", of_launch(kernel, &Totals::dram_store) * SECTOR},
                      {"launch_l2", of_launch(kernel, &Totals::l2) * SECTOR},
                      {"launch_shared_wavefronts", of_launch(kernel, &Totals::wavefronts)},
                      {"launch_tensor_flops", of_launch(kernel, &Totals::flops)},
                      {"launch_special", of_launch(kernel, &Totals::special)}};
    json sites = json::array(), races = json::array(), unwritten = json::array(), syncs = json::array();
    for (const Site& site : kernel.sites)
        if (site.requests > 0) sites.push_back(to_json(site));
    const auto add = [&](json& to, const std::string& prefix, const Side& side) {
        const Site& site = kernel.sites[side.site];
        to.update({{prefix + "stack", stack_of(site.pc, site.stack)}, {prefix + "block", side.block},
                   {prefix + "access", side.access == Access::LOAD ? "load" : "store"},
                   {prefix + "by", BY_NAMES[static_cast<int>(site.by)]},
                   {prefix + "thread", side.actor < kernel.threads() ? static_cast<int>(side.actor) : -1}});
    };
    const auto described = [&](const Hazard& h) {
        const bool is_shared = h.space == Space::SHARED;
        const auto [array, address] = is_shared ? memory.within_array(h.address) : std::pair(std::string(), h.address);
        json all = {{"memory", is_shared ? "shared" : "global"}, {"array", array}, {"address", address},
                    {"count", h.count}, {"why", h.why}};
        add(all, "", h.later);
        return all;
    };
    for (const auto& [key, race] : kernel.races) {
        races.push_back(described(race));
        add(races.back(), "other_", race.earlier);
    }
    for (const auto& [key, read] : kernel.uninitialised) unwritten.push_back(described(read));
    for (const auto& [key, count] : kernel.syncs)
        syncs.push_back({{"name", std::get<0>(key)}, {"stack", stack_of(std::get<1>(key), std::get<2>(key))},
                         {"count", count}});
    all["sites"] = sites;
    all["races"] = races;
    all["uninitialised"] = unwritten;
    all["syncs"] = syncs;
    return all;
}

void Recorder::write(const std::string& ended)
{
    if (is_written_ || !is_open_ || getenv("INSPECT_OUT") == nullptr) return;
    is_written_ = true;
    if (std::exchange(recording, false)) give_up_block();
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    json all = {{"program", program}, {"card", card_->key}, {"ended", ended}, {"kernels", json::array()},
                {"matmuls", json::array()}, {"sequence", json::array()}};
    for (const auto& kernel : kernels_) all["kernels"].push_back(to_json(*kernel));
    for (const auto& [p, launches] : products_)
        all["matmuls"].push_back({{"m", p.m}, {"n", p.n}, {"k", p.k}, {"type", p.type}, {"in_bytes", p.in_bytes},
                                  {"out_bytes", p.out_bytes}, {"accumulate", p.accumulate}, {"epilogue", p.epilogue},
                                  {"launches", launches}});
    for (const auto& [kind, number] : sequence_)
        all["sequence"].push_back({kind == 'k' ? "kernel" : "matmul", number});
    std::ofstream(getenv("INSPECT_OUT")) << all.dump(1) << '\n';
}

}  // namespace inspect

// ==== what dev/cpu reports ===============================================================================

namespace cuda_cpu::watch {

using inspect::quietly;
using inspect::recorder;
using R = inspect::Recorder;
static uintptr_t number(const void* p) { return reinterpret_cast<uintptr_t>(p); }

void begin_launch(const LaunchShape& shape) { recorder.begin_launch(shape); }
Run next_block() { return recorder.next_block(); }
void begin_block(uint64_t block) { recorder.begin_block(block); }
void end_block() { recorder.end_block(); }
void product(const Product& product) { recorder.product(product); }
Figures take_figures() { return recorder.take_figures(); }
void look(bool at_launches) { recorder.looks = at_launches; }
bool only_counts() { return getenv("INSPECT_MODE") != nullptr && strcmp(getenv("INSPECT_MODE"), "sample") == 0; }
void dying(const char* why) { recorder.write(why); }

void shared_memory(const void* dynamic, size_t bytes) { recorder.memory.set_dynamic(dynamic, bytes); }
void shared_array(const void* place, size_t bytes, const char* name) { recorder.memory.add_array(place, bytes, name); }
void allocated(const void* place, size_t bytes) { recorder.memory.add_block(place, bytes); }
void freed(const void* place) { recorder.memory.remove_block(place); }
void global_variable(const void* place, size_t bytes) { recorder.memory.add_block(place, bytes); }

void begun(unsigned thread) { quietly<&R::begun>(thread); }
void now(unsigned thread) { recorder.now(thread); }
void ended(unsigned thread) { quietly<&R::ended>(thread); }
__attribute__((noinline)) const void* here() { return __builtin_return_address(0); }
bool is_removed(const char* name, const void* site) { return quietly<&R::is_removed>(name, number(site)); }

void barrier_met(const char* name) { quietly<&R::barrier_met>(name); }
void lanes_met(unsigned first, unsigned lanes, const char* name) { quietly<&R::lanes_met>(first, lanes, name); }
void fence() { quietly<&R::fence>(); }
void proxy_fence() { quietly<&R::proxy_fence>(); }
void sync_made(const void* barrier, const void* site) { quietly<&R::sync_made>(barrier, number(site)); }
void arrived(const void* barrier, const void* site) { quietly<&R::arrived>(barrier, number(site)); }
void phase_ended(const void* barrier, unsigned parity) { quietly<&R::phase_ended>(barrier, parity); }
void waited(const void* barrier, unsigned parity, const void* site)
{
    quietly<&R::waited>(barrier, parity, number(site));
}

void access(Access access, By by, const void* address, unsigned bytes, const void* site)
{
    quietly<&R::accessed>(access, by, address, bytes, number(site));
}
void copy_async(const void* to, const void* from, const void* site)
{
    quietly<&R::copy_async>(to, from, number(site));
}
void copy_async_commit() { quietly<&R::copy_async_commit>(); }
void copy_async_wait(unsigned pending) { quietly<&R::copy_async_wait>(pending); }
unsigned box_issued(const void* barrier, const void* site) { return quietly<&R::box_issued>(barrier, number(site)); }
void box_part(unsigned box, const void* to, const void* from) { quietly<&R::box_part>(box, to, from); }
void box_landed(unsigned box) { quietly<&R::box_landed>(box); }
unsigned wgmma_issued(unsigned warp, uint64_t flops, const void* site)
{
    return quietly<&R::wgmma_issued>(warp, flops, number(site));
}
void wgmma_reads(unsigned product, const void* address, Operand operand)
{
    quietly<&R::wgmma_reads>(product, address, operand);
}
void wgmma_ended(unsigned product) { quietly<&R::wgmma_ended>(product); }
void wgmma_waited(unsigned warp) { quietly<&R::wgmma_waited>(warp); }
void tensor_flops(uint64_t flops) { quietly<&R::tensor_flops>(flops); }
void special_function() { quietly<&R::special_function>(); }

}  // namespace cuda_cpu::watch

// ==== what the compiler calls ============================================================================

using inspect::quietly;
using inspect::Recorder;
using cuda_cpu::watch::Access;
using cuda_cpu::watch::By;

static inline void seen(Access access, By by, const void* address, size_t bytes, const void* pc)
{
    quietly<&Recorder::accessed>(access, by, address, bytes, reinterpret_cast<uintptr_t>(pc));
}

#define INSPECT_ACCESS(name, access, bytes)                                                            \
    extern "C" void name(void* address)                                                                \
    {                                                                                                  \
        seen(access, By::THREAD, address, bytes, __builtin_return_address(0));                         \
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

extern "C" void __tsan_read_range(void* address, size_t bytes)
{
    seen(Access::LOAD, By::THREAD, address, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t bytes)
{
    seen(Access::STORE, By::THREAD, address, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void* caller) { quietly<&Recorder::entered>(reinterpret_cast<uintptr_t>(caller)); }
extern "C" void __tsan_func_exit() { quietly<&Recorder::left>(); }
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

static void seen_atomic(const volatile void* place, size_t bytes, const void* pc)
{
    seen(Access::STORE, By::ATOMIC, const_cast<const void*>(place), bytes, pc);
}

// An atomic load is the look before an exchange that dev/cpu makes of some atomics: a part of it.
#define INSPECT_ATOMIC(bits, type)                                                                                     \
    extern "C" type __tsan_atomic##bits##_load(const volatile type* place, int)                                        \
    {                                                                                                                  \
        return __atomic_load_n(place, __ATOMIC_SEQ_CST);                                                               \
    }                                                                                                                  \
    extern "C" void __tsan_atomic##bits##_store(volatile type* place, type value, int)                                 \
    {                                                                                                                  \
        seen_atomic(place, bits / 8, __builtin_return_address(0));                                                     \
        __atomic_store_n(place, value, __ATOMIC_SEQ_CST);                                                              \
    }                                                                                                                  \
    INSPECT_ATOMIC_COMPARE(bits, type, strong)                                                                         \
    INSPECT_ATOMIC_COMPARE(bits, type, weak)                                                                           \
    INSPECT_ATOMIC_CHANGE(bits, type, exchange, __atomic_exchange_n)                                                   \
    INSPECT_ATOMIC_CHANGE(bits, type, fetch_add, __atomic_fetch_add)                                                   \
    INSPECT_ATOMIC_CHANGE(bits, type, fetch_sub, __atomic_fetch_sub)                                                   \
    INSPECT_ATOMIC_CHANGE(bits, type, fetch_and, __atomic_fetch_and)                                                   \
    INSPECT_ATOMIC_CHANGE(bits, type, fetch_or, __atomic_fetch_or)                                                     \
    INSPECT_ATOMIC_CHANGE(bits, type, fetch_xor, __atomic_fetch_xor)
#define INSPECT_ATOMIC_COMPARE(bits, type, kind)                                                                       \
    extern "C" int __tsan_atomic##bits##_compare_exchange_##kind(volatile type* place, type* old, type value, int,     \
                                                                 int)                                                  \
    {                                                                                                                  \
        seen_atomic(place, bits / 8, __builtin_return_address(0));                                                     \
        return __atomic_compare_exchange_n(place, old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
    }
#define INSPECT_ATOMIC_CHANGE(bits, type, name, change)                                                                \
    extern "C" type __tsan_atomic##bits##_##name(volatile type* place, type value, int)                                \
    {                                                                                                                  \
        seen_atomic(place, bits / 8, __builtin_return_address(0));                                                     \
        return change(place, value, __ATOMIC_SEQ_CST);                                                                 \
    }
INSPECT_ATOMIC(8, uint8_t)
INSPECT_ATOMIC(16, uint16_t)
INSPECT_ATOMIC(32, uint32_t)
INSPECT_ATOMIC(64, uint64_t)
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

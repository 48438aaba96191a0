// The CUDA runtime on a CPU: put this folder first on g++'s include path, and a .cu file that keeps to
// what is here builds with g++ and runs its kernels on the processor. README.md beside this file tells
// how; in short:
//
//   - An OpenMP thread (a worker) takes a block at a time and runs its CUDA threads one after another.
//   - A thread that has to wait, at a barrier or in a shuffle, is set aside as a fiber; the next one runs.
//   - Everything is synchronous: when a call returns, its work is done. But a stream that is captured only notes
//     what it is handed, for the graph that is replayed later; and with an emulated GPU (card.h) work
//     waits in queues (streams.h).
//
// Map: qualifiers and vector types · built-in variables · mathematics · fibers · the threads of a block ·
// warp and block collectives · launches · memory · streams and events · graphs · the device · functions of the
// driver
//
// WARP_SIZE, from the command line, is 32 (CUDA's) or 1: then a warp is a thread, and what a warp does
// together vanishes.
#pragma once

#define CUDA_ON_CPU 1
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif
static_assert(WARP_SIZE == 1 || WARP_SIZE == 32, "WARP_SIZE must be 1 or 32");

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if !__has_include(<boost/context/detail/fcontext.hpp>)
#error "Boost.Context was not found: kernels that synchronise need it. Debian, Ubuntu: apt install libboost-context-dev"
#endif
#include <boost/context/detail/fcontext.hpp>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "card.h"
#include "errors.h"
#include "nvtx3/nvToolsExt.h"
#include "rounding.h"
#include "static_shared.h"
#include "streams.h"
#include "threads.h"
#include "watch.h"

// ==== qualifiers and vector types =======================================================================

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ thread_local  // a worker runs one block at a time, so its thread's storage is the block's
// See launch_bound in card.h. (By way of sizeof, as g++ 12 fails on a constant's name there in a template.)
#if defined(__x86_64__) && !defined(__clang__)
#define __launch_bounds__(threads, ...) \
    __attribute__((patchable_function_entry(sizeof(char[threads]), sizeof(char[threads]))))
#else
#define __launch_bounds__(...)
#endif
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline __attribute__((always_inline))

struct int2 { int x, y; } __align__(8);
struct int3 { int x, y, z; };
struct int4 { int x, y, z, w; } __align__(16);
struct uint2 { unsigned x, y; } __align__(8);
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; } __align__(16);
struct float2 { float x, y; } __align__(8);
struct float3 { float x, y, z; };
struct float4 { float x, y, z, w; } __align__(16);

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// ==== built-in variables ================================================================================

// They start as constants and need no destructor, so that reading one is a single instruction.
inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim, gridDim;
constexpr int warpSize = WARP_SIZE;

namespace cuda_cpu {
constexpr size_t max_shared_bytes = 227 * 1024;     // what a block can have on an H100 ...
constexpr size_t default_shared_bytes = 48 * 1024;  // ... and what it can have without asking
constexpr unsigned max_threads = 1024;              // in a block
}  // namespace cuda_cpu

// What a kernel declares as `extern __shared__ float4 dynamic_shared_memory[];`
alignas(1024) inline thread_local float4 dynamic_shared_memory[cuda_cpu::max_shared_bytes / sizeof(float4)] = {};

// ==== mathematics =======================================================================================

inline int __float_as_int(float x) { return cuda_cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bits<float>(x); }

namespace cuda_cpu {
// 2^n 2^f for a whole n and |f| <= 1/2, the first by arithmetic on the exponent's bits, the second by a
// polynomial. (fma's are spelled out because the build may regroup plain sums.)
__attribute__((always_inline)) inline float exp2_of_sum(float n, float f)
{
    float p = 1.535336207e-4f;
    p = __builtin_fmaf(p, f, 1.339887439e-3f);
    p = __builtin_fmaf(p, f, 9.618437357e-3f);
    p = __builtin_fmaf(p, f, 5.550332471e-2f);
    p = __builtin_fmaf(p, f, bits<float>(math_rounding.exp2_2));
    p = __builtin_fmaf(p, f, bits<float>(math_rounding.exp2_1));
    p = __builtin_fmaf(p, f, 1.0f);
    return bits<float>(bits<unsigned>(p) + (static_cast<unsigned>(static_cast<int>(n)) << 23));
}
}  // namespace cuda_cpu

// e^x without a branch or a call, so that a loop around it becomes vector code. Within 2 units in the last
// place; like the GPU's, a result below the normal range is 0. (extern "C" and noexcept because glibc
// declares this name too.)
extern "C" inline float __expf(float x) noexcept
{
    cuda_cpu::watch::special_function();
    const float n = nearbyintf(x * 1.44269502f);
    float f = __builtin_fmaf(x, 1.44269502f, -n);  // log2(e) in two parts: with one, the error of
    // ... x log2(e) - n would grow with x
    f = __builtin_fmaf(x, cuda_cpu::bits<float>(cuda_cpu::math_rounding.log2_e_low), f);
    float result = cuda_cpu::exp2_of_sum(n, f);
    result = x < -87.33654f ? 0.0f : result;
    return x > 88.72283f ? std::numeric_limits<float>::infinity() : result;
}

extern "C" inline float __logf(float x) noexcept
{
    cuda_cpu::watch::special_function();
    return cuda_cpu::math_rounding.last_bit(logf(x));
}
extern "C" inline float __log2f(float x) noexcept
{
    cuda_cpu::watch::special_function();
    return cuda_cpu::math_rounding.last_bit(log2f(x));
}
extern "C" inline float __powf(float x, float y) noexcept { return cuda_cpu::math_rounding.last_bit(powf(x, y)); }
extern "C" inline float __sinf(float x) noexcept
{
    cuda_cpu::watch::special_function();
    return cuda_cpu::math_rounding.last_bit(sinf(x));
}
extern "C" inline float __cosf(float x) noexcept
{
    cuda_cpu::watch::special_function();
    return cuda_cpu::math_rounding.last_bit(cosf(x));
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return cuda_cpu::math_rounding.last_bit(1.0f / sqrtf(x)); }

// A clock of 2 GHz.
inline long long clock64()
{
    return 2 * std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// g++ calls the library for fmaxf and fminf as long as NaNs exist, which keeps a loop from becoming vector
// code; these say the same in the open. (gnu_inline: the definition to inline, not the one to link.)
extern "C" {
extern inline __attribute__((always_inline, gnu_inline)) float fmaxf(float x, float y) noexcept
{
    return x > y || y != y ? x : y;
}
extern inline __attribute__((always_inline, gnu_inline)) float fminf(float x, float y) noexcept
{
    return x < y || y != y ? x : y;
}
}

// CUDA's min and max take a mixture of integer types, by the usual conversions.
template <class X, class Y>
constexpr std::enable_if_t<std::is_arithmetic_v<X> && std::is_arithmetic_v<Y>, std::common_type_t<X, Y>> max(X x, Y y)
{
    using T = std::common_type_t<X, Y>;
    return static_cast<T>(x) > static_cast<T>(y) || static_cast<T>(y) != static_cast<T>(y) ? static_cast<T>(x)
                                                                                           : static_cast<T>(y);
}
template <class X, class Y>
constexpr std::enable_if_t<std::is_arithmetic_v<X> && std::is_arithmetic_v<Y>, std::common_type_t<X, Y>> min(X x, Y y)
{
    using T = std::common_type_t<X, Y>;
    return static_cast<T>(x) < static_cast<T>(y) || static_cast<T>(y) != static_cast<T>(y) ? static_cast<T>(x)
                                                                                           : static_cast<T>(y);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }

// Loads and stores with a caching hint: the hint is for a GPU.
template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline void __stcs(T* address, T value) { *address = value; }
template <class T> inline void __stcg(T* address, T value) { *address = value; }

inline void __threadfence()
{
    std::atomic_thread_fence(std::memory_order_seq_cst);
    cuda_cpu::watch::fence();
}
inline void __threadfence_block() { std::atomic_signal_fence(std::memory_order_seq_cst); }
[[noreturn]] inline void __trap() { __builtin_trap(); }

// ==== fibers ============================================================================================

namespace cuda_cpu {

// A place where execution can go on: a fiber on a stack of its own, or the worker's own stack.
struct Context {
    boost::context::detail::fcontext_t where = nullptr;  // known while it is not running
    const void* stack = nullptr;                         // its lowest address
    size_t stack_bytes = 0;
    void* sanitizer_state = nullptr;
};

inline thread_local Context* running = nullptr;

// Every switch ends here, on the side that begins to run: the one that was left learns where it can go on.
CUDA_CPU_UNSEEN inline void arrived(boost::context::detail::transfer_t from)
{
    Context& left = *static_cast<Context*>(from.data);
    left.where = from.fctx;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(running->sanitizer_state, &left.stack, &left.stack_bytes);
#endif
}

CUDA_CPU_UNSEEN inline void switch_to(Context& target)
{
    Context* left = running;
    running = &target;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&left->sanitizer_state, target.stack, target.stack_bytes);
#endif
    arrived(boost::context::detail::jump_fcontext(target.where, left));
}

#ifdef __SANITIZE_ADDRESS__
constexpr size_t fiber_stack_bytes = 256 * 1024;  // its red zones make frames larger
#else
constexpr size_t fiber_stack_bytes = 64 * 1024;
#endif

class Fiber : public Context {
public:
    // Stacks that begin at equal offsets in a page would fight for the same lines of the L1 cache, so each
    // of 64 neighbours begins at another line: 5 lines apart, as 5 has no common factor with 64.
    Fiber(unsigned number, void (*body)(boost::context::detail::transfer_t))
        : memory_(new char[slack + fiber_stack_bytes + 4096])
    {
        lowest_ = memory_.get() + slack + number * 5 % 64 * 64;
        memcpy(lowest_, &canary, sizeof(canary));
        stack = lowest_;
        stack_bytes = fiber_stack_bytes;
        where = boost::context::detail::make_fcontext(lowest_ + fiber_stack_bytes, fiber_stack_bytes, body);
    }

    // Whether a thread has used all of the stack, and so has written over its last bytes. The slack below
    // takes what a modest overflow writes, so that we live to tell.
    bool overflowed() const { return memcmp(lowest_, &canary, sizeof(canary)) != 0; }

private:
    static constexpr size_t slack = 16 * 1024;
    static constexpr uint64_t canary = 0x5afe57ac5afe57ac;
    std::unique_ptr<char[]> memory_;
    char* lowest_;
};

// ==== the threads of a block ============================================================================

// One launch, as its workers see it.
struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    void (*call)(const void* kernel_and_arguments);
    const void* kernel_and_arguments;
    const char* name;  // the innermost NVTX range
    uint64_t seed;     // 0: blocks and threads in their natural order
    const void* kernel;
    watch::Variant variant;
};

// An error from which no kernel recovers. A worker cannot return through its fibers, so the process ends here.
[[noreturn]] inline void die(const Launch& launch, const std::string& what)
{
    watch::dying(what.c_str());
    fflush(stdout);
    fprintf(stderr, "kernel %s, block (%u, %u, %u) of (%u, %u, %u), %u x %u x %u threads: %s\n",
            launch.name, blockIdx.x, blockIdx.y, blockIdx.z, launch.grid.x, launch.grid.y, launch.grid.z,
            launch.block.x, launch.block.y, launch.block.z, what.c_str());
    fflush(stderr);
    _Exit(1);
}

// The launch that this worker runs.
inline thread_local const Launch* launched = nullptr;
[[noreturn]] inline void die(const std::string& what) { die(*launched, what); }

// What goes on beside a block's threads: copies and products under way (ptx.h).
struct Background {
    virtual bool go_on() = 0;         // does one thing for which threads may be waiting, if there is one
    virtual void end_of_block() = 0;  // reports what was left under way
    virtual std::string state_of(const void* what, unsigned number) const = 0;  // of what a thread is parked at
};
inline thread_local Background* background = nullptr;  // this block's, if it has one

// Runs the threads of one block after another. The rule by which they take turns: a thread runs until it
// ends or has to wait; then goes on one that no longer waits, or else the next begins. So a kernel whose
// threads never wait needs one fiber, and never switches it. With a seed, the turn is drawn.
class Block {
public:
    // What the last thread to reach a collective of the warp does, for all lanes that take part.
    using WarpWork = void (*)(void* const* operand_of_lane, unsigned lanes);

    struct Votes { unsigned yes, all; };

    void prepare(const Launch& launch)
    {
        launch_ = &launch;
        const dim3 dim = launch.block;
        if (dim.x == dim_.x && dim.y == dim_.y && dim.z == dim_.z) return;
        dim_ = dim;
        threads_.assign(dim.x * dim.y * dim.z, {});
        unsigned t = 0;
        for (unsigned z = 0; z < dim.z; z++)
            for (unsigned y = 0; y < dim.y; y++)
                for (unsigned x = 0; x < dim.x; x++) threads_[t++].index = {x, y, z};
    }

    CUDA_CPU_UNSEEN void run(uint64_t block_number)
    {
        const unsigned count = static_cast<unsigned>(threads_.size());
        alive_ = count;
        begun_ = ready_first_ = ready_count_ = waiting_at_barrier_ = yes_ = parked_ = 0;
        for (unsigned t = 0; t < count; t += WARP_SIZE) warps_[t / WARP_SIZE].alive = first_lanes(count - t);
        if (launch_->seed != 0) shuffle_order(block_number);
        enter(pick());
        threads_[current_].fiber = idle_fiber();
        running = &home_;
        switch_to(*threads_[current_].fiber);
    }

    // A barrier of all threads that have not ended; returns how many of them said yes.
    Votes barrier(const char* name, bool yes)
    {
        threads_[current_].waits_for = name;
        yes_ += yes;
        waiting_at_barrier_++;
        try_barrier();
        wait();
        return verdict_;
    }

    // The lanes in the mask meet: each brings its operand, and once all are there (but for those whose
    // thread has ended) the last one does the work for all, which then go on.
    void meet(const char* name, unsigned mask, void* operand, WarpWork work)
    {
        const unsigned lane = current_ % WARP_SIZE;
        if ((mask >> lane & 1) == 0)
            die(*launch_,
                "thread " + std::to_string(current_) + " calls " + name + " with a mask that leaves itself out");
        Thread& me = threads_[current_];
        Warp& warp = warps_[current_ / WARP_SIZE];
        me.waits_for = name;
        me.mask = mask;
        me.work = work;
        warp.operand[lane] = operand;
        warp.waiting |= 1u << lane;
        try_meet(current_);
        wait();
    }

    // Lets others run until a thread unparks those that wait for this; the number is for the report.
    void park(const char* name, const void* what, unsigned number)
    {
        Thread& me = threads_[current_];
        me.waits_for = name;
        me.parked_at = what;
        me.number = number;
        parked_++;
        wait();
    }
    void unpark(const void* what)
    {
        for (unsigned t = 0; t < threads_.size() && parked_ > 0; t++) {
            if (threads_[t].parked_at != what) continue;
            threads_[t].parked_at = nullptr;
            parked_--;
            make_ready(t);
        }
    }

    // A moment at which another thread may run.
    void give_way()
    {
        make_ready(current_);
        wait();
    }

    unsigned current() const { return current_; }
    unsigned threads() const { return static_cast<unsigned>(threads_.size()); }
    Random& random() { return random_; }

private:
    struct Thread {
        uint3 index{};
        unsigned mask = 0;                // of the warp collective it waits in; 0: it waits for something else
        WarpWork work = nullptr;          // of that collective
        unsigned number = 0;              // see park
        const void* parked_at = nullptr;
        const char* waits_for = nullptr;  // nothing while it can run
        Fiber* fiber = nullptr;           // nothing before it begins and after it ended
    };
    struct Warp {
        unsigned alive = 0, waiting = 0;  // a bit a lane
        void* operand[WARP_SIZE] = {};
    };

    static unsigned first_lanes(unsigned count) { return count >= 32 ? ~0u : (1u << count) - 1; }

    // ---- whose turn it is

    static constexpr unsigned no_thread = ~0u;

    void make_ready(unsigned t)
    {
        threads_[t].waits_for = nullptr;
        ready_[(ready_first_ + ready_count_++) % max_threads] = static_cast<uint16_t>(t);
    }

    // Takes the thread that is to run next: one that waited and no longer does, or one that has not begun.
    unsigned pick()
    {
        const unsigned fresh = static_cast<unsigned>(threads_.size()) - begun_;
        // Under an odd seed mostly the last one to become ready, so that one warp runs ahead of the others
        // as far as barriers let it: drawing among all alone keeps warps abreast.
        if (launch_->seed % 2 == 1 && ready_count_ > 0 && random_.below(8) != 0)
            return ready_[(ready_first_ + --ready_count_) % max_threads];
        bool begin = ready_count_ == 0;
        if (launch_->seed != 0 && ready_count_ + fresh > 0) {
            const unsigned draw = random_.below(ready_count_ + fresh);
            begin = draw >= ready_count_;
            if (!begin) std::swap(ready_[ready_first_], ready_[(ready_first_ + draw) % max_threads]);
        }
        if (begin) {
            if (fresh == 0) return no_thread;
            const unsigned t = launch_->seed != 0 ? order_[begun_] : begun_;
            begun_++;
            return t;
        }
        const unsigned t = ready_[ready_first_];
        ready_first_ = (ready_first_ + 1) % max_threads;
        ready_count_--;
        return t;
    }

    // The same when no thread could run: perhaps one waits for what goes on in the background. Else it is a deadlock.
    __attribute__((noinline, cold)) unsigned pick_later()
    {
        while (background != nullptr && background->go_on())
            if (const unsigned t = pick(); t != no_thread) return t;
        deadlock();
    }

    CUDA_CPU_UNSEEN void enter(unsigned t)
    {
        current_ = t;
        threadIdx = threads_[t].index;
        watch::now(t);
    }

    // Lets others run until it is this thread's turn again.
    CUDA_CPU_UNSEEN void wait()
    {
        const unsigned me = current_;
        unsigned next = pick();
        if (next == no_thread) next = pick_later();
        if (next == me) return;
        enter(next);
        if (threads_[next].fiber == nullptr) threads_[next].fiber = idle_fiber();
        switch_to(*threads_[next].fiber);
    }

    // ---- the life of a fiber: one thread after another

    Fiber* idle_fiber()
    {
        if (idle_.empty()) {
            fibers_.push_back(std::make_unique<Fiber>(static_cast<unsigned>(fibers_.size()), fiber_body));
            idle_.push_back(fibers_.back().get());
        }
        Fiber* fiber = idle_.back();
        idle_.pop_back();
        return fiber;
    }

    CUDA_CPU_UNSEEN static void fiber_body(boost::context::detail::transfer_t from)
    {
        arrived(from);
        for (Block& block = of_this_worker();;) block.run_thread();
    }

    CUDA_CPU_UNSEEN void run_thread()
    {
        watch::begun(current_);
        launch_->call(launch_->kernel_and_arguments);
        Fiber* fiber = threads_[current_].fiber;
        if (fiber->overflowed())
            die(*launch_, "thread " + std::to_string(current_) + " needs more than the " +
                              std::to_string(fiber_stack_bytes) + " bytes of stack that a thread has");
        end_thread();
        unsigned next = pick();
        if (next == no_thread && alive_ > 0) next = pick_later();
        if (next == no_thread) {
            idle_.push_back(fiber);
            switch_to(home_);  // the block is done; the next one begins here
            return;
        }
        enter(next);
        if (threads_[next].fiber == nullptr) {
            threads_[next].fiber = fiber;
            return;
        }
        idle_.push_back(fiber);
        switch_to(*threads_[next].fiber);  // comes back when a thread is to begin on this fiber
    }

    // Threads that wait for this one need not wait any longer.
    void end_thread()
    {
        threads_[current_].fiber = nullptr;
        alive_--;
        watch::ended(current_);
        Warp& warp = warps_[current_ / WARP_SIZE];
        warp.alive &= ~(1u << current_ % WARP_SIZE);
        for (unsigned lanes = warp.waiting; lanes != 0; lanes &= warp.waiting) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
            try_meet(current_ / WARP_SIZE * WARP_SIZE + lane);
            lanes &= lanes - 1;
        }
        if (alive_ > 0) try_barrier();
    }

    // ---- when waiting ends

    // If all threads are at the barrier, they are ready, in their order.
    void try_barrier()
    {
        if (waiting_at_barrier_ < alive_) return;
        verdict_ = {yes_, alive_};
        yes_ = waiting_at_barrier_ = 0;
        watch::barrier_met("__syncthreads");
        for (unsigned t = 0; t < threads_.size(); t++)
            if (threads_[t].waits_for != nullptr) make_ready(t);
    }

    // If the collective in which thread t waits is complete, its work is done and its lanes are ready.
    void try_meet(unsigned t)
    {
        const unsigned first = t / WARP_SIZE * WARP_SIZE;
        Warp& warp = warps_[t / WARP_SIZE];
        const unsigned mask = threads_[t].mask, lanes = mask & warp.alive;
        if ((warp.waiting & lanes) != lanes) return;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            const Thread& other = threads_[first + static_cast<unsigned>(__builtin_ctz(rest))];
            if (other.mask != mask || other.work != threads_[t].work) return;
        }
        watch::lanes_met(first, lanes, threads_[t].waits_for);
        threads_[t].work(warp.operand, lanes);
        warp.waiting &= ~lanes;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            const unsigned other = first + static_cast<unsigned>(__builtin_ctz(rest));
            threads_[other].mask = 0;
            make_ready(other);
        }
    }

    // ---- seeds and reports

    void shuffle_order(uint64_t block_number)
    {
        random_.state = launch_->seed ^ (block_number + 1) * 0xd1342543de82ef95;
        order_.resize(threads_.size());
        for (unsigned i = 0; i < order_.size(); i++) {
            const unsigned j = random_.below(i + 1);
            order_[i] = order_[j];
            order_[j] = static_cast<uint16_t>(i);
        }
    }

    static std::string describe(unsigned first, unsigned last)
    {
        return std::to_string(first) + (first == last ? "" : "-" + std::to_string(last));
    }

    std::string state_of(unsigned t) const
    {
        const Thread& thread = threads_[t];
        if (thread.waits_for == nullptr) return "ended";
        if (thread.parked_at != nullptr && background != nullptr)
            return std::string("in ") + thread.waits_for + background->state_of(thread.parked_at, thread.number);
        char mask[32] = "";
        if (thread.mask != 0) snprintf(mask, sizeof(mask), " with mask 0x%08x", thread.mask);
        return std::string("in ") + thread.waits_for + mask;
    }

    // Says what each thread waits for, a line for all that wait for the same.
    [[noreturn]] void deadlock() const
    {
        std::vector<std::pair<std::string, std::string>> lines;  // a state, and the threads in it
        for (unsigned first = 0, t = 1; first < threads_.size(); first = t) {
            const std::string state = state_of(first);
            for (t = first + 1; t < threads_.size() && state_of(t) == state;) t++;
            auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return l.first == state; });
            if (line == lines.end()) line = lines.insert(line, {state, ""});
            line->second += (line->second.empty() ? "" : ", ") + describe(first, t - 1);
        }
        std::string what = "deadlock: no thread can go on";
        for (const auto& [state, threads] : lines) what += "\n  threads " + threads + ": " + state;
        die(*launch_, what);
    }

public:
    static Block& of_this_worker()
    {
        static thread_local Block block;
        return block;
    }

private:
    const Launch* launch_ = nullptr;
    dim3 dim_{0, 0, 0};
    std::vector<Thread> threads_;
    Warp warps_[max_threads / WARP_SIZE];
    unsigned current_ = 0, begun_ = 0, alive_ = 0;

    unsigned waiting_at_barrier_ = 0, yes_ = 0, parked_ = 0;
    Votes verdict_{};

    uint16_t ready_[max_threads] = {};  // a ring, first come first served
    unsigned ready_first_ = 0, ready_count_ = 0;
    std::vector<uint16_t> order_;  // in which threads begin, when there is a seed
    Random random_{};

    Context home_;  // the worker's own stack
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
};

// The block whose threads take turns on this worker; null in a block of one thread, which never waits.
inline thread_local Block* block = nullptr;

// ==== warp and block collectives ========================================================================

// For a warp's lanes to do something together: see Block::meet.
inline void meet(const char* name, unsigned mask, void* operand, Block::WarpWork work)
{
    if (block != nullptr) {
        block->meet(name, mask, operand, work);
    } else {
        work(&operand, 1);
    }
}

// Each lane gives a value and takes the one of lane `from`: what all shuffles are. A lane that is not
// there has no value to give; then one gets one's own.
template <class T>
inline T exchange(const char* name, unsigned mask, T value, unsigned from)
{
    struct Operand { T value, result; unsigned from; } mine{value, value, from};
    meet(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            Operand& taker = *static_cast<Operand*>(operands[__builtin_ctz(rest)]);
            if (lanes >> taker.from & 1) taker.result = static_cast<Operand*>(operands[taker.from])->value;
        }
    });
    return mine.result;
}

inline unsigned lane()
{
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % WARP_SIZE;
}

struct Ballot { unsigned yes, all; };  // a bit a lane

inline Ballot ballot(const char* name, unsigned mask, bool yes)
{
    if (WARP_SIZE == 1) return {yes, 1};
    struct Operand { bool yes; Ballot result; } mine{yes, {}};
    meet(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        Ballot result{0, lanes};
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
            if (static_cast<Operand*>(operands[__builtin_ctz(rest)])->yes) result.yes |= rest & -rest;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
            static_cast<Operand*>(operands[__builtin_ctz(rest)])->result = result;
    });
    return mine.result;
}

inline Block::Votes barrier(const char* name, bool yes)
{
    return block != nullptr ? block->barrier(name, yes) : Block::Votes{yes, 1};
}

}  // namespace cuda_cpu

CUDA_CPU_INSTRUCTION void __syncthreads()
{
    if (cuda_cpu::watch::is_removed("__syncthreads", cuda_cpu::watch::here())) return;
    cuda_cpu::barrier("__syncthreads", false);
}
inline int __syncthreads_count(int yes)
{
    return static_cast<int>(cuda_cpu::barrier("__syncthreads_count", yes != 0).yes);
}
inline int __syncthreads_or(int yes) { return cuda_cpu::barrier("__syncthreads_or", yes != 0).yes != 0; }
inline int __syncthreads_and(int yes)
{
    const auto votes = cuda_cpu::barrier("__syncthreads_and", yes != 0);
    return votes.yes == votes.all;
}

CUDA_CPU_INSTRUCTION void __syncwarp(unsigned mask = 0xffffffff)
{
    if (WARP_SIZE == 1 || cuda_cpu::watch::is_removed("__syncwarp", cuda_cpu::watch::here())) return;
    cuda_cpu::meet("__syncwarp", mask, nullptr, [](void* const*, unsigned) {});
}
inline unsigned __ballot_sync(unsigned mask, int yes) { return cuda_cpu::ballot("__ballot_sync", mask, yes != 0).yes; }
inline int __any_sync(unsigned mask, int yes) { return cuda_cpu::ballot("__any_sync", mask, yes != 0).yes != 0; }
inline int __all_sync(unsigned mask, int yes)
{
    const auto votes = cuda_cpu::ballot("__all_sync", mask, yes != 0);
    return votes.yes == votes.all;
}

// The four shuffles differ in whose value a lane takes. `width` cuts the warp into segments; a lane takes
// no value from another segment, but keeps its own.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = WARP_SIZE)
{
    if (WARP_SIZE == 1) return value;
    const unsigned lane = cuda_cpu::lane(), segment = static_cast<unsigned>(width);
    return cuda_cpu::exchange("__shfl_sync", mask, value,
                              lane / segment * segment + static_cast<unsigned>(from) % segment);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = WARP_SIZE)
{
    if (WARP_SIZE == 1) return value;
    const unsigned lane = cuda_cpu::lane(), segment = static_cast<unsigned>(width),
                   from = lane ^ static_cast<unsigned>(flip);
    // CUDA lets a lane reach into earlier segments here, but not into later ones.
    return cuda_cpu::exchange("__shfl_xor_sync", mask, value, from < (lane / segment + 1) * segment ? from : lane);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = WARP_SIZE)
{
    if (WARP_SIZE == 1) return value;
    const unsigned lane = cuda_cpu::lane(), segment = static_cast<unsigned>(width);
    return cuda_cpu::exchange("__shfl_up_sync", mask, value, lane % segment >= distance ? lane - distance : lane);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = WARP_SIZE)
{
    if (WARP_SIZE == 1) return value;
    const unsigned lane = cuda_cpu::lane(), segment = static_cast<unsigned>(width);
    return cuda_cpu::exchange("__shfl_down_sync", mask, value,
                              lane % segment + distance < segment ? lane + distance : lane);
}

// ==== launches ==========================================================================================

enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
    struct { unsigned x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

namespace cuda_cpu {

// How much dynamic shared memory each kernel has asked to be allowed.
inline std::unordered_map<const void*, size_t>& allowed_shared_bytes()
{
    static std::unordered_map<const void*, size_t> allowed;
    return allowed;
}

// What a block may have by opt-in.
inline size_t most_shared_bytes()
{
    return card() == nullptr ? max_shared_bytes : card()->capability.shared_per_block();
}

// How many threads a block of this kernel may have.
inline size_t most_threads(const void* kernel)
{
    static std::unordered_map<const void*, size_t> known;
    const auto [place, is_new] = known.try_emplace(kernel, max_threads);
    if (is_new) place->second = launch_bound(kernel, max_threads);
    return place->second;
}

// What it declares as __shared__ arrays. They count on a card only, as it takes a while to read the program's symbols.
inline size_t static_shared_bytes(const void* kernel)
{
    return card() == nullptr ? 0 : StaticShared::of_program().bytes_of(kernel);
}

// Clusters are not here at all, and the other attribute takes a card of capability 9.0. (CUDA's documentation does not
// say with what error a launch is refused.)
inline cudaError_t check_attributes(const cudaLaunchConfig_t& config)
{
    for (unsigned i = 0; i < config.numAttrs; i++) {
        const auto& [id, value] = config.attrs[i];
        const dim3 cluster(value.clusterDim.x, value.clusterDim.y, value.clusterDim.z);
        if (id == cudaLaunchAttributeClusterDimension && (cluster.x != 1 || cluster.y != 1 || cluster.z != 1))
            return cudaErrorNotSupported;
        const bool early =
            id == cudaLaunchAttributeProgrammaticStreamSerialization && value.programmaticStreamSerializationAllowed;
        if (early && card() != nullptr && card()->capability.major < 9) return cudaErrorNotSupported;
    }
    return cudaSuccess;
}

// Ends the program if it emulates a GPU but is built for warps of one thread. (cublasLt.cpp, which serves both widths,
// must not depend on WARP_SIZE, so this is not in card.h.)
inline void need_full_warps()
{
    if (WARP_SIZE == 32 || card() == nullptr) return;
    fprintf(stderr, "CUDA_CPU_CARD is \"%s\"; a card takes a build with -DWARP_SIZE=32\n", card()->key);
    exit(2);
}

// Programming Guide, "Technical Specifications per Compute Capability": these bounds are every card's.
inline cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel)
{
    constexpr unsigned max_blocks_x = 0x7fffffff, max_blocks_yz = 65535, max_threads_z = 64;
    const dim3 g = config.gridDim, b = config.blockDim;
    need_full_warps();
    if (kernel == nullptr) return cudaErrorInvalidValue;
    if (g.x == 0 || g.y == 0 || g.z == 0) return cudaErrorInvalidConfiguration;
    if (g.x > max_blocks_x || g.y > max_blocks_yz || g.z > max_blocks_yz) return cudaErrorInvalidConfiguration;
    if (b.x == 0 || b.y == 0 || b.z == 0) return cudaErrorInvalidConfiguration;
    if (b.x > max_threads || b.y > max_threads || b.z > max_threads_z) return cudaErrorInvalidConfiguration;
    if (b.x * b.y * b.z > max_threads) return cudaErrorInvalidConfiguration;
    if (b.x * b.y * b.z > most_threads(kernel)) return cudaErrorInvalidValue;
    if (const cudaError_t error = check_attributes(config); error != cudaSuccess) return error;
    size_t allowed = default_shared_bytes - std::min(default_shared_bytes, static_shared_bytes(kernel));
    if (const auto asked = allowed_shared_bytes().find(kernel); asked != allowed_shared_bytes().end())
        allowed = std::max(allowed, asked->second);
    return config.dynamicSmemBytes > allowed ? cudaErrorInvalidValue : cudaSuccess;
}

// Shared memory as a block finds it. AddressSanitizer is told where it ends; under a seed, and on a card, it is
// full of NaNs, so that a kernel which reads what it never wrote does not find what the last block left there.
struct SharedMemory {
    static void prepare(size_t bytes, bool fill)
    {
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(dynamic_shared_memory, bytes);
        ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(dynamic_shared_memory) + bytes, max_shared_bytes - bytes);
#endif
        if (fill) memset(static_cast<void*>(dynamic_shared_memory), 0xff, bytes);
    }
    ~SharedMemory() { prepare(max_shared_bytes, false); }  // what is the thread's no longer is not poisoned
};

// Sets the worker up for a launch.
inline void begin(const Launch& launch)
{
    static thread_local SharedMemory shared_memory;
    shared_memory.prepare(launch.shared_bytes, false);
    threadIdx = {0, 0, 0};
    blockDim = launch.block;
    gridDim = launch.grid;
    launched = &launch;
    block = nullptr;
    if (launch.block.x * launch.block.y * launch.block.z > 1) {
        block = &Block::of_this_worker();
        block->prepare(launch);
    }
}

inline void run_block(const Launch& launch, uint64_t number)
{
    if (launch.grid.y * launch.grid.z == 1) {
        blockIdx = {static_cast<unsigned>(number), 0, 0};
    } else {
        const uint64_t row = number / launch.grid.x;
        blockIdx = {static_cast<unsigned>(number % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                    static_cast<unsigned>(row / launch.grid.y)};
    }
    if (fills_memory()) {
        SharedMemory::prepare(launch.shared_bytes, true);
        StaticShared::of_program().fill(&threadIdx);
    }
    if (block != nullptr) {
        block->run(number);
    } else {
        watch::begun(0);
        launch.call(launch.kernel_and_arguments);
    }
    if (WARP_SIZE > 1 && background != nullptr) std::exchange(background, nullptr)->end_of_block();
}

#ifdef CUDA_CPU_INSPECT
inline void tell_shared_memory()
{
    watch::shared_memory(dynamic_shared_memory, max_shared_bytes);
    StaticShared::of_program().each(&threadIdx, watch::shared_array);
}

inline void run_watched_grid(const Launch& launch)
{
    static const bool told = (tell_shared_memory(), true);
    static_cast<void>(told);
    const dim3 g = launch.grid, b = launch.block;
    watch::begin_launch({launch.kernel, StaticShared::of_program().name_of(launch.kernel), launch.name, launch.variant,
                         {g.x, g.y, g.z}, {b.x, b.y, b.z}, launch.shared_bytes,
                         StaticShared::of_program().bytes_of(launch.kernel)});
    begin(launch);
    for (uint64_t i = 0, blocks = uint64_t{g.x} * g.y * g.z; i < blocks; i++) {
        const watch::Run run = watch::next_block();
        if (run == watch::Run::NOT) break;
        if (run == watch::Run::RECORDED) watch::begin_block(i);
        run_block(launch, i);
        if (run == watch::Run::RECORDED) watch::end_block();
    }
}
#endif

inline void run_grid(const Launch& launch)
{
#ifdef CUDA_CPU_INSPECT
    return run_watched_grid(launch);
#endif
    const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (blocks == 1) {
        begin(launch);
        run_block(launch, 0);
        return;
    }
    // Under a seed the i-th block to run is (stride i + start) mod blocks: each once, as the stride and the
    // number of blocks have no common factor.
    uint64_t stride = 1, start = 0;
    if (launch.seed != 0) {
        Random random{launch.seed};
        start = random.next() % blocks;
        do stride = 1 + random.next() % blocks; while (std::gcd(stride, blocks) != 1);
    }
#pragma omp parallel
    {
        begin(launch);
        // Neighbouring blocks go to the same worker, launch after launch, as do neighbouring rows of a small
        // product: so each worker's share of the activations stays in its own cache.
#pragma omp for schedule(static)
        for (uint64_t i = 0; i < blocks; i++) run_block(launch, launch.seed == 0 ? i : (stride * i + start) % blocks);
    }
}

}  // namespace cuda_cpu

namespace cuda_cpu {

template <class... Parameters> inline watch::Variant variant_of(const std::tuple<Parameters...>& parameters)
{
    watch::Variant variant;
    const auto add = [&](const auto& parameter) {
        using T = std::decay_t<decltype(parameter)>;
        if constexpr (std::is_pointer_v<T>) variant.pointers.push_back(parameter != nullptr);
        if constexpr (std::is_integral_v<T>) variant.integers.push_back(static_cast<int64_t>(parameter));
    };
    if (watch::on) std::apply([&](const auto&... each) { (add(each), ...); }, parameters);
    return variant;
}

}  // namespace cuda_cpu

template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      Arguments&&... arguments)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = check(*config, reinterpret_cast<const void*>(kernel)); error != cudaSuccess)
        return report(error);
    using Call = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
    const Call call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
    const auto run = [grid = config->gridDim, block = config->blockDim,
                      shared_bytes = config->dynamicSmemBytes](const Call& it, const char* name) {
        run_grid({grid, block, shared_bytes,
                  [](const void* data) {
                      std::apply(static_cast<const Call*>(data)->first, static_cast<const Call*>(data)->second);
                  },
                  &it, name, seed(), reinterpret_cast<const void*>(it.first), variant_of(it.second)});
        return cudaSuccess;
    };
    const auto& ranges = open_ranges();
    const char* const name = ranges.empty() ? watch::no_range : ranges.back().c_str();
    if (waits(config->stream))
        return hand_over(config->stream, [run, call, name = std::string(name)] { return run(call, name.c_str()); });
    return run(call, name);
}

template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    using namespace cuda_cpu;
    const void* const address = reinterpret_cast<const void*>(kernel);
    if (value < 0 || static_cast<size_t>(value) + static_shared_bytes(address) > most_shared_bytes())
        return report(cudaErrorInvalidValue);
    allowed_shared_bytes()[address] = static_cast<size_t>(value);
    return cudaSuccess;
}

// ==== memory ============================================================================================

namespace cuda_cpu {

struct MachineMemory {
    size_t total, available;
};

// Returns the machine's memory, or what its container may use of it; available: as it was at the first call.
inline const MachineMemory& machine_memory()
{
    // The number in a file, or behind a name in it; 0 where there is none.
    const auto number_in = [](const std::string& file, const std::string& name = "") {
        std::ifstream in(file);
        for (std::string word; !name.empty() && in >> word && word != name;) continue;
        size_t number = 0;
        return in >> number ? number : 0;
    };
    static const MachineMemory value = [&] {
        MachineMemory m{number_in("/proc/meminfo", "MemTotal:") * kib,
                        number_in("/proc/meminfo", "MemAvailable:") * kib};
        const std::string v1 = "/sys/fs/cgroup/memory/memory.", v2 = "/sys/fs/cgroup/memory.";
        for (const auto& [limit_file, usage_file, stat_file, cache] :
             {std::array{v2 + "max", v2 + "current", v2 + "stat", std::string("inactive_file")},
              std::array{v1 + "limit_in_bytes", v1 + "usage_in_bytes", v1 + "stat",
                         std::string("total_inactive_file")}}) {
            const size_t limit = number_in(limit_file), used = number_in(usage_file),
                         reclaimable = number_in(stat_file, cache);
            if (limit == 0) continue;
            m.total = std::min(m.total, limit);
            m.available = std::min(m.available, limit - std::min(limit, used - std::min(used, reclaimable)));
        }
        return m;
    }();
    return value;
}

// Blocks of memory by where they begin.
struct Blocks : std::map<const char*, size_t> {
    // Whether an address is in one of them.
    const_iterator around(const void* address) const
    {
        const char* p = static_cast<const char*>(address);
        const auto next = upper_bound(p);
        return next != begin() && p < std::prev(next)->first + std::prev(next)->second ? std::prev(next) : end();
    }
    bool hold(const void* address) const { return around(address) != end(); }
};

// What is allocated on the "device", because Linux itself would promise more than there is. A card hands it out in
// pieces of 2 MiB, which small blocks share.
struct Heap {
    static constexpr size_t piece = 2 * mib, small = 1 * mib, small_unit = 512;
    std::mutex mutex;
    Blocks blocks, pinned;  // pinned: the host's
    size_t bytes = 0, large_pieces = 0, small_bytes = 0;

    static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
    void count(size_t block, int sign)
    {
        bytes += static_cast<size_t>(sign) * block;
        if (block < small) small_bytes += static_cast<size_t>(sign) * round_up(block, small_unit);
        else large_pieces += static_cast<size_t>(sign) * (round_up(block, piece) / piece);
    }
    size_t total() const { return card() == nullptr ? machine_memory().total : card()->memory_bytes; }
    size_t available() const { return card() == nullptr ? machine_memory().available : card()->memory_bytes; }
    size_t in_use() const
    {
        return card() == nullptr ? bytes : context_bytes + large_pieces * piece + round_up(small_bytes, piece);
    }
};
inline Heap& heap()
{
    static Heap* const value = new Heap;  // never destroyed: a global's destructor may still call cudaFree
    return *value;
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool huge_pages = false;  // the block must end where its last byte does
#else
constexpr bool huge_pages = true;
#endif

// Does work(first, count) for a range of bytes, in parallel where it is long.
template <class Work>
inline void for_bytes(size_t bytes, Work work)
{
    constexpr size_t piece = 1 << 20;
    if (bytes <= piece) return work(0, bytes);
#pragma omp parallel for
    for (size_t first = 0; first < bytes; first += piece) work(first, std::min(piece, bytes - first));
}

}  // namespace cuda_cpu

namespace cuda_cpu {

// A card may have more memory than the machine, so of a block this large pages are taken as they are first touched:
// they hold zeros, not NaNs.
constexpr size_t reserved_from = size_t{1} << 30;
inline bool is_reserved(size_t bytes) { return watch::on ? bytes >= mib : card() != nullptr && bytes >= reserved_from; }

inline void* allocate(size_t bytes)
{
    constexpr size_t alignment = 256, huge_page = 2 * mib;
    if (is_reserved(bytes)) {
        void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return place == MAP_FAILED ? nullptr : place;
    }
    void* place = nullptr;
    const bool huge = huge_pages && bytes >= 2 * huge_page;
    if (posix_memalign(&place, huge ? huge_page : alignment, bytes) != 0) return nullptr;
    if (huge) madvise(place, bytes, MADV_HUGEPAGE);
    if (fills_memory())
        for_bytes(bytes, [=](size_t first, size_t count) { memset(static_cast<char*>(place) + first, 0xff, count); });
    return place;
}

}  // namespace cuda_cpu

inline cudaError_t cudaMalloc(void** address, size_t bytes)
{
    using namespace cuda_cpu;
    *address = nullptr;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    std::lock_guard lock(heap().mutex);
    heap().count(bytes, 1);
    if (heap().in_use() <= heap().available()) *address = allocate(bytes);
    if (*address == nullptr) {
        heap().count(bytes, -1);
        return report(cudaErrorMemoryAllocation);
    }
    heap().blocks[static_cast<const char*>(*address)] = bytes;
    watch::allocated(*address, bytes);
    return cudaSuccess;
}
template <class T> inline cudaError_t cudaMalloc(T** address, size_t bytes)
{
    return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}

inline cudaError_t cudaFree(void* address)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    if (address == nullptr) return cudaSuccess;
    const cudaError_t earlier = run_all();  // the device may be using it
    std::lock_guard lock(heap().mutex);
    const auto found = heap().blocks.find(static_cast<const char*>(address));
    if (found == heap().blocks.end()) return report(cudaErrorInvalidValue);
    heap().count(found->second, -1);
    watch::freed(address);
    if (is_reserved(found->second)) munmap(address, found->second);
    else free(address);
    heap().blocks.erase(found);
    return earlier;
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes)
{
    std::lock_guard lock(cuda_cpu::heap().mutex);
    *total_bytes = cuda_cpu::heap().total();
    *free_bytes = cuda_cpu::heap().available() - cuda_cpu::heap().in_use();
    return cudaSuccess;
}

constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                   cudaHostAllocWriteCombined = 4;

inline cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned)
{
    using namespace cuda_cpu;
    *address = nullptr;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    if (posix_memalign(address, 256, bytes) != 0) return report(cudaErrorMemoryAllocation);
    std::lock_guard lock(heap().mutex);
    heap().pinned[static_cast<const char*>(*address)] = bytes;
    return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** address, size_t bytes)
{
    return cudaHostAlloc(address, bytes, cudaHostAllocDefault);
}
template <class T> inline cudaError_t cudaHostAlloc(T** address, size_t bytes, unsigned flags)
{
    return cudaHostAlloc(reinterpret_cast<void**>(address), bytes, flags);
}
template <class T> inline cudaError_t cudaMallocHost(T** address, size_t bytes)
{
    return cudaMallocHost(reinterpret_cast<void**>(address), bytes);
}
inline cudaError_t cudaFreeHost(void* address)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    const cudaError_t earlier = run_all();
    std::lock_guard lock(heap().mutex);
    if (address != nullptr && heap().pinned.erase(static_cast<const char*>(address)) == 0)
        return report(cudaErrorInvalidValue);
    free(address);
    return earlier;
}

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

namespace cuda_cpu {

inline cudaError_t copy_bytes(void* to, const void* from, size_t bytes)
{
    for_bytes(bytes, [=](size_t first, size_t count) {
        if (count > 0) memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, count);
    });
    return cudaSuccess;
}

inline cudaError_t set_bytes(void* to, int byte, size_t bytes)
{
    if (watch::only_counts() && bytes > mib) return cudaSuccess;  // untouched pages are zeros already
    for_bytes(bytes, [=](size_t first, size_t count) {
        if (count > 0) memset(static_cast<char*>(to) + first, byte, count);
    });
    return cudaSuccess;
}

}  // namespace cuda_cpu

namespace cuda_cpu {

// Where a copy goes from and to, as far as a card cares.
struct Sides {
    bool from_device, to_device, from_pageable, to_pageable;
    Sides(const void* to, const void* from)
    {
        std::lock_guard lock(heap().mutex);
        from_device = heap().blocks.hold(from);
        to_device = heap().blocks.hold(to);
        from_pageable = !from_device && !heap().pinned.hold(from);
        to_pageable = !to_device && !heap().pinned.hold(to);
    }
};

// Whether a range that begins in a block of the device ends in it too.
inline bool ends_inside(const void* address, size_t bytes)
{
    const auto block = heap().blocks.around(address);
    return block == heap().blocks.end() || static_cast<const char*>(address) + bytes <= block->first + block->second;
}

// A card knows its own memory from the host's.
inline cudaError_t check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind)
{
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (card() == nullptr || bytes == 0) return cudaSuccess;
    const Sides sides(to, from);
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (sides.to_device != to_device || sides.from_device != from_device))
        return cudaErrorInvalidValue;
    return ends_inside(to, bytes) && ends_inside(from, bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

// Puts a copy into a queue. From pageable memory it is staged: the source is read now. To pageable memory, and from
// host to host, it has happened when this returns. (Runtime API, "API synchronization behavior".)
inline cudaError_t put_off_copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits_for_pinned)
{
    const Sides sides(to, from);
    Deed deed = [=] { return copy_bytes(to, from, bytes); };
    if (sides.from_pageable && sides.to_device) {
        const char* first = static_cast<const char*>(from);
        deed = [=, staged = std::vector<char>(first, first + bytes)] { return copy_bytes(to, staged.data(), bytes); };
    }
    const Place done = put_off(stream, std::move(deed));
    const bool both_host = !sides.from_device && !sides.to_device, pinned = !sides.from_device && !sides.from_pageable;
    const bool waits = sides.to_pageable || both_host || (waits_for_pinned && (pinned || !sides.to_device));
    return waits ? run_until_reached(done) : cudaSuccess;
}

}  // namespace cuda_cpu

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = check_copy(to, from, bytes, kind); error != cudaSuccess) return report(error);
    if (in_capture(stream)) return note(stream, [=] { return copy_bytes(to, from, bytes); });
    if (!asynchronous()) return copy_bytes(to, from, bytes);
    if (const cudaError_t error = refuse_implicit(stream); error != cudaSuccess) return error;
    return put_off_copy(to, from, bytes, stream, false);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = refuse_implicit(nullptr); error != cudaSuccess) return error;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    if (const cudaError_t error = check_copy(to, from, bytes, kind); error != cudaSuccess) return report(error);
    return asynchronous() ? put_off_copy(to, from, bytes, nullptr, true) : copy_bytes(to, from, bytes);
}

inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream = nullptr)
{
    using namespace cuda_cpu;
    if (card() != nullptr && bytes > 0 && (Sides(to, to).to_pageable || !ends_inside(to, bytes)))
        return report(cudaErrorInvalidValue);
    if (waits(stream)) return hand_over(stream, [=] { return set_bytes(to, byte, bytes); });
    return set_bytes(to, byte, bytes);
}
inline cudaError_t cudaMemset(void* to, int byte, size_t bytes)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = refuse_implicit(nullptr); error != cudaSuccess) return error;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    const cudaError_t error = cudaMemsetAsync(to, byte, bytes);
    const bool is_done = !asynchronous() || Sides(to, to).to_device;  // or it may be done later
    return error != cudaSuccess || is_done ? error : run_until_reached(streams()[0]->last);
}

// ==== streams and events ================================================================================

// An event is the place in a stream where it was recorded last. One that was recorded in a capture has none: it stands
// for a place among what is noted.
struct CUevent_st {
    cuda_cpu::Place place;
    bool captured = false, timed = true;
};
using cudaEvent_t = CUevent_st*;

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags)
{
    *stream = new CUstream_st;
    (*stream)->blocking = flags != cudaStreamNonBlocking;
    cuda_cpu::streams().push_back(*stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    using namespace cuda_cpu;
    const cudaError_t error = run_until_reached(stream->last);
    streams().erase(std::find(streams().begin(), streams().end(), stream));
    delete stream;
    return error;
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    if (stream == nullptr) return cuda_cpu::report(cudaErrorStreamCaptureUnsupported);
    if (cuda_cpu::in_capture(stream)) return cuda_cpu::report(cudaErrorIllegalState);
    stream->state = CUstream_st::captured;
    stream->mode = mode;
    cuda_cpu::captured_streams.push_back(stream);
    return cudaSuccess;
}

namespace cuda_cpu {

// What a call that waits for something, or asks for it, returns first. During a capture a card lets no such call pass,
// as it might wait for what is never to come.
inline cudaError_t refuse_wait(cudaStream_t stream)
{
    if (const cudaError_t error = refuse_captured(stream); error != cudaSuccess) return error;
    if (const cudaError_t error = refuse_implicit(stream); error != cudaSuccess) return error;
    return card() != nullptr ? refuse_while_capturing() : cudaSuccess;
}
inline cudaError_t refuse_wait(cudaEvent_t event)
{
    if (!event->captured) return card() != nullptr ? refuse_while_capturing() : cudaSuccess;
    refuse_in_any_capture();
    return report(cudaErrorCapturedEvent);
}

// The end of a stream's queue; of the default stream's, also of what that waits for.
inline Place end_of(cudaStream_t stream)
{
    return stream != nullptr ? stream->last : asynchronous() ? put_off(nullptr, {}) : nullptr;
}

// Answers a question for whether that place was reached. (It may come back again and again, so work has to go on.)
inline cudaError_t query(const Place& place)
{
    run_some();
    if (late_error() != cudaSuccess) return report(late_error());
    return place == nullptr || place->reached ? cudaSuccess : cudaErrorNotReady;
}

}  // namespace cuda_cpu

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    const cudaError_t error = cuda_cpu::refuse_wait(stream);
    return error != cudaSuccess ? error : cuda_cpu::run_until_reached(cuda_cpu::end_of(stream));
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    const cudaError_t error = cuda_cpu::refuse_wait(stream);
    return error != cudaSuccess ? error : cuda_cpu::query(cuda_cpu::end_of(stream));
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0)
{
    using namespace cuda_cpu;
    if (!event->captured) {
        if (const cudaError_t error = refuse_captured(stream, cudaErrorStreamCaptureIsolation); error != cudaSuccess)
            return error;
        if (asynchronous() && event->place != nullptr) put_off(stream, {}, {event->place});
        return cudaSuccess;
    }
    // A stream that waits for a captured event would join the capture: not here.
    return in_capture(stream) ? cudaSuccess : report(cudaErrorNotSupported);
}
inline cudaError_t cudaDeviceSynchronize()
{
    using namespace cuda_cpu;
    const cudaError_t error = card() != nullptr ? refuse_in_any_capture() : refuse_while_capturing();
    return error != cudaSuccess ? error : run_all();
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags)
{
    *event = new CUevent_st;
    (*event)->timed = (flags & cudaEventDisableTiming) == 0;
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr)
{
    using namespace cuda_cpu;
    if (const cudaError_t error = refuse_implicit(stream); error != cudaSuccess) return error;
    event->captured = in_capture(stream);
    event->place = nullptr;
    if (event->captured) return cudaSuccess;
    if (asynchronous()) {
        event->place = put_off(stream, {});
    } else {
        event->place = std::make_shared<Marker>();
        event->place->reach();
    }
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    const cudaError_t error = cuda_cpu::refuse_wait(event);
    return error != cudaSuccess ? error : cuda_cpu::run_until_reached(event->place);
}
inline cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const cudaError_t error = cuda_cpu::refuse_wait(event);
    return error != cudaSuccess ? error : cuda_cpu::query(event->place);
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    if (begin->captured || end->captured) return cuda_cpu::report(cudaErrorCapturedEvent);
    if (begin->place == nullptr || end->place == nullptr || !begin->timed || !end->timed)
        return cuda_cpu::report(cudaErrorInvalidResourceHandle);
    if (!begin->place->reached || !end->place->reached) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->place->time - begin->place->time).count();
    return cudaSuccess;
}

// ==== graphs ============================================================================================

// What a capture has noted, to be done again and again.
struct CUgraph_st { cuda_cpu::Deeds deeds; };
struct CUgraphExec_st { cuda_cpu::Deeds deeds; };
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;

inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph)
{
    *graph = nullptr;
    if (!cuda_cpu::in_capture(stream)) return cuda_cpu::report(cudaErrorIllegalState);
    const auto state = std::exchange(stream->state, CUstream_st::free);
    const cuda_cpu::Deeds deeds = std::exchange(stream->deeds, {});
    auto& all = cuda_cpu::captured_streams;
    all.erase(std::find(all.begin(), all.end(), stream));
    if (state == CUstream_st::spoilt) return cuda_cpu::report(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{deeds};
    return cudaSuccess;
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long = 0)
{
    *executable = new CUgraphExec_st{graph->deeds};
    return cudaSuccess;
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    const auto replay = [](const cuda_cpu::Deeds& deeds) {
        for (const auto& deed : deeds)
            if (const cudaError_t error = deed(); error != cudaSuccess) return cuda_cpu::report(error);
        return cudaSuccess;
    };
    if (!cuda_cpu::waits(stream)) return replay(executable->deeds);
    if (cuda_cpu::in_capture(stream))
        return cuda_cpu::note(stream, [replay, deeds = executable->deeds] { return replay(deeds); });
    for (const auto& deed : executable->deeds)
        if (const cudaError_t error = cuda_cpu::hand_over(stream, deed); error != cudaSuccess) return error;
    return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    delete executable;
    return cudaSuccess;
}

// ==== the device ========================================================================================

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    size_t totalConstMem;
    size_t sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, reservedSharedMemPerBlock;
    int regsPerBlock, regsPerMultiprocessor;  // 0: not known
    int warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int major, minor;  // 0.0: no GPU
    int multiProcessorCount;
    int l2CacheSize;
    int memoryBusWidth;
    int clockRate, memoryClockRate;  // 0: not known
    int concurrentKernels, unifiedAddressing, managedMemory, canMapHostMemory;
};

inline cudaError_t cudaGetDeviceCount(int* count)
{
    *count = 1;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device)
{
    if (device != 0) return cuda_cpu::report(cudaErrorInvalidDevice);
    cuda_cpu::need_full_warps();
    cuda_cpu::choose_workers();
    return cudaSuccess;
}

inline cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }

namespace cuda_cpu {

inline std::string processor_name()
{
    std::ifstream cpuinfo("/proc/cpuinfo");
    for (std::string line; std::getline(cpuinfo, line);) {
        if (line.rfind("model name", 0) != 0) continue;
        const size_t colon = line.find(':');
        if (colon != std::string::npos && colon + 2 < line.size()) return line.substr(colon + 2);
        break;
    }
    return "CPU";
}

inline void describe_processor(cudaDeviceProp& p)
{
    snprintf(p.name, sizeof(p.name), "%s", processor_name().c_str());
    p.sharedMemPerBlockOptin = p.sharedMemPerMultiprocessor = max_shared_bytes;
    p.maxThreadsPerMultiProcessor = max_threads;
    p.multiProcessorCount = omp_get_max_threads();
    p.l2CacheSize = static_cast<int>(std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE)));
}

inline void describe_card(cudaDeviceProp& p, const Card& card)
{
    const Capability& c = card.capability;
    snprintf(p.name, sizeof(p.name), "%s", card.name);
    p.major = c.major;
    p.minor = c.minor;
    p.sharedMemPerBlockOptin = c.shared_per_block();
    p.sharedMemPerMultiprocessor = c.shared_per_multiprocessor;
    p.reservedSharedMemPerBlock = c.reserved_shared_per_block;
    p.regsPerBlock = p.regsPerMultiprocessor = registers_per_block;
    p.maxThreadsPerMultiProcessor = c.threads_per_multiprocessor;
    p.maxBlocksPerMultiProcessor = c.blocks_per_multiprocessor;
    p.multiProcessorCount = card.multiprocessors;
    p.l2CacheSize = static_cast<int>(card.l2_bytes);
    p.memoryBusWidth = card.bus_bits;
}

}  // namespace cuda_cpu

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device)
{
    using namespace cuda_cpu;
    if (device != 0) return report(cudaErrorInvalidDevice);
    *properties = {};
    properties->totalGlobalMem = heap().total();
    properties->totalConstMem = 64 * kib;
    properties->sharedMemPerBlock = default_shared_bytes;
    properties->warpSize = WARP_SIZE;
    properties->maxThreadsPerBlock = max_threads;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = max_threads;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->concurrentKernels = properties->unifiedAddressing = 1;
    properties->managedMemory = properties->canMapHostMemory = 1;
    if (card() != nullptr) describe_card(*properties, *card());
    else describe_processor(*properties);
    return cudaSuccess;
}

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMaxRegistersPerBlock = 12,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106,
    cudaDevAttrReservedSharedMemoryPerBlock = 111,
};

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); return cudaSuccess;
    case cudaDevAttrWarpSize: *value = p.warpSize; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; return cudaSuccess;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; return cudaSuccess;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(p.sharedMemPerMultiprocessor);
        return cudaSuccess;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        *value = static_cast<int>(p.reservedSharedMemPerBlock);
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(p.sharedMemPerBlockOptin);
        return cudaSuccess;
    }
    return cuda_cpu::report(cudaErrorInvalidValue);
}

// The version whose names these headers speak.
#define CUDART_VERSION 13000
inline cudaError_t cudaRuntimeGetVersion(int* version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

// ==== functions of the driver ===========================================================================

namespace cuda_cpu {
// By name: cuda.h enters those that it has.
inline std::unordered_map<std::string, void*>& driver_functions()
{
    static std::unordered_map<std::string, void*> functions;
    return functions;
}
}  // namespace cuda_cpu

constexpr unsigned long long cudaEnableDefault = 0;
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2,
};

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result = nullptr)
{
    using cuda_cpu::driver_functions;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSuccess;
    if (driver_functions().count(name) == 0) status = cudaDriverEntryPointSymbolNotFound;
    else if (version > CUDART_VERSION) status = cudaDriverEntryPointVersionNotSufficent;
    *function = status == cudaDriverEntryPointSuccess ? driver_functions()[name] : nullptr;
    if (result != nullptr) *result = status;
    return result != nullptr || *function != nullptr ? cudaSuccess : cuda_cpu::report(cudaErrorSymbolNotFound);
}

// ==== the rest ==========================================================================================

#include "atomics.h"
#include "intrinsics.h"
#include "launch.h"
#include "managed.h"
#include "occupancy.h"
#include "vectors.h"

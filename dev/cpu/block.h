// Runs a block of CUDA threads on one worker: fibers, the threads that run on them, and the collectives they wait in.
//
// Map: built-in variables · fibers · the threads of a block · warp and block collectives
#pragma once

// ==== built-in variables ================================================================================

// They have constant initialisers and no destructors, so reading one takes a single instruction.
inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim, gridDim;
constexpr int warpSize = WARP_SIZE;

namespace cuda_cpu {
constexpr size_t max_shared_bytes = 227 * 1024;     // per block, as on an H100, after opt-in (cudaFuncSetAttribute)
constexpr size_t default_shared_bytes = 48 * 1024;  // per block, without opt-in
constexpr unsigned max_threads = 1024;              // per block
}  // namespace cuda_cpu

// Dynamic shared memory. Kernels declare it as `extern __shared__ float4 dynamic_shared_memory[];`
alignas(1024) inline thread_local float4 dynamic_shared_memory[cuda_cpu::max_shared_bytes / sizeof(float4)] = {};

// ==== fibers ============================================================================================

namespace cuda_cpu {
// An execution context: a fiber with its own stack, or the worker's original stack.
struct Context {
    boost::context::detail::fcontext_t where = nullptr;  // where to resume; valid while it is suspended
    const void* stack = nullptr;                         // lowest address of its stack
    size_t stack_bytes = 0;
    void* sanitizer_state = nullptr;
};

inline thread_local Context* running = nullptr;

// Completes a switch: the resumed context stores where the context that it switched from can resume.
CUDA_CPU_NO_TSAN inline void finish_switch(boost::context::detail::transfer_t from) {
    Context& left = *static_cast<Context*>(from.data);
    left.where = from.fctx;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(running->sanitizer_state, &left.stack, &left.stack_bytes);
#endif
}

// Suspends the running context and resumes target. Returns when another context switches back.
CUDA_CPU_NO_TSAN inline void switch_to(Context& target) {
    Context* left = running;
    running = &target;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&left->sanitizer_state, target.stack, target.stack_bytes);
#endif
    finish_switch(boost::context::detail::jump_fcontext(target.where, left));
}

#ifdef __SANITIZE_ADDRESS__
constexpr size_t fiber_stack_bytes = 256 * 1024;  // AddressSanitizer's red zones make stack frames larger
#else
constexpr size_t fiber_stack_bytes = 64 * 1024;
#endif

class Fiber : public Context {
public:
    // Stacks at equal offsets in a page would compete for the same sets of the L1 cache. So 64 consecutive fibers start
    // at 64 different cache lines of a page, with a stride of 5 lines (5 and 64 have no common factor).
    Fiber(unsigned number, void (*body)(boost::context::detail::transfer_t))
        : memory_(new char[slack + fiber_stack_bytes + 4096]) {
        lowest_ = memory_.get() + slack + number * 5 % 64 * 64;
        memcpy(lowest_, &canary, sizeof(canary));
        stack = lowest_;
        stack_bytes = fiber_stack_bytes;
        where = boost::context::detail::make_fcontext(lowest_ + fiber_stack_bytes, fiber_stack_bytes, body);
    }

    // Returns whether a thread has used the whole stack, which overwrites the canary at its end. The slack below the
    // stack absorbs a small overflow, so that the program can still report it.
    bool overflowed() const { return memcmp(lowest_, &canary, sizeof(canary)) != 0; }

private:
    static constexpr size_t slack = 16 * 1024;
    static constexpr uint64_t canary = 0x5afe57ac5afe57ac;
    std::unique_ptr<char[]> memory_;
    char* lowest_;
};

// ==== the threads of a block ============================================================================

// A kernel launch, as its workers need it.
struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    void (*call)(const void* kernel_and_arguments);
    const void* kernel_and_arguments;
    const char* name;  // the innermost NVTX range
    uint64_t seed;     // 0: blocks and threads run in their natural order
    const void* kernel;
    watch::Variant variant;
    bool cooperative;  // its blocks can wait for each other
};

// The launch that this worker is running.
inline thread_local const Launch* launched = nullptr;

// Reports an error in a kernel and ends the process, because a worker cannot unwind the stacks of its fibers.
template <class... Parts> [[noreturn]] void die(const Parts&... parts) {
    const Launch& launch = *launched;
    const std::string what = text_of(parts...);
    watch::fatal_error(what.c_str());
    fflush(stdout);
    fprintf(stderr, "kernel %s, block (%u, %u, %u) of (%u, %u, %u), %u x %u x %u threads: %s\n",
            launch.name, blockIdx.x, blockIdx.y, blockIdx.z, launch.grid.x, launch.grid.y, launch.grid.z,
            launch.block.x, launch.block.y, launch.block.z, what.c_str());
    fflush(stderr);
    _Exit(1);
}

// A block's pending asynchronous copies and matrix products (ptx.h).
struct Background {
    virtual bool advance() = 0;       // completes one pending copy; returns false if no copy is pending
    virtual void end_of_block() = 0;  // reports an error if work is pending
    virtual std::string state_of(const void* barrier, unsigned number) const = 0;  // for the deadlock report
};
inline thread_local Background* background = nullptr;  // of the current block; null if it has started no such work

// The block that this worker is running; null for a block of one thread, which never waits.
class Block;
inline thread_local Block* block = nullptr;

// Schedules the threads of a block on a worker's fibers. A thread runs until it ends or waits. Then the scheduler
// resumes a thread that is ready, or else starts the next one. So a kernel whose threads never wait needs one fiber and
// never switches. With a seed, the scheduler picks the next thread at random.
class Block {
public:
    // Computes a warp collective for all participating lanes. The last thread to arrive calls it.
    using WarpWork = void (*)(void* const* operand_of_lane, unsigned lanes);

    static Block& of_this_worker() {
        static thread_local Block block;
        return block;
    }
    void prepare(const Launch& launch) {
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

    // Runs one block. Returns when all its threads have ended.
    CUDA_CPU_NO_TSAN void run(uint64_t block_number) {
        const unsigned count = static_cast<unsigned>(threads_.size());
        alive_ = count;
        votes_ = started_ = ready_first_ = ready_count_ = waiting_at_barrier_ = at_grid_ = parked_ = 0;
        for (unsigned t = 0; t < count; t += WARP_SIZE) warps_[t / WARP_SIZE].alive = first_lanes(count - t);
        if (launch_->seed != 0) shuffle_order(block_number);
        enter(pick());
        threads_[current_].fiber = idle_fiber();
        running = &home_;
        switch_to(*threads_[current_].fiber);
    }

    // Suspends the thread and, if no other one can run, the block: run() then returns. resume() continues the block.
    void wait_for_grid() {
        if (!launch_->cooperative) die("grid.sync() in a launch without cudaLaunchCooperativeKernel");
        threads_[current_].waits_for = "grid.sync()";
        at_grid_++;
        wait();
    }
    bool is_suspended() const { return at_grid_ > 0; }
    CUDA_CPU_NO_TSAN void resume() {
        if (at_grid_ < alive_) deadlock();
        at_grid_ = 0;
        for (unsigned t = 0; t < threads_.size(); t++)
            if (threads_[t].waits_for != nullptr) make_ready(t);
        enter(pick());
        running = &home_;
        switch_to(*threads_[current_].fiber);
    }

    // Blocks until all threads that have not ended are at the barrier.
    void barrier(const char* name) {
        watch::waits(watch::call_site());
        threads_[current_].waits_for = name;
        waiting_at_barrier_++;
        try_barrier();
        wait();
    }

    // A barrier that returns how many threads pass true.
    unsigned count(const char* name, bool yes) {
        votes_ += yes;
        barrier(name);
        return counted_;
    }

    // Executes a collective of the lanes in the mask. Each lane passes its operand and waits. When all lanes have
    // arrived (except those whose thread has ended), the last one calls work() for all, and they resume.
    void collective(const char* name, unsigned mask, void* operand, WarpWork work) {
        watch::waits(watch::call_site());
        const unsigned lane = current_ % WARP_SIZE;
        if ((mask >> lane & 1) == 0)
            die("thread ", current_, " calls ", name, " with a mask that excludes its own lane");
        Thread& me = threads_[current_];
        Warp& warp = warps_[current_ / WARP_SIZE];
        me.waits_for = name;
        me.mask = mask;
        me.work = work;
        warp.operand[lane] = operand;
        warp.waiting |= 1u << lane;
        try_collective(current_);
        wait();
    }

    // Suspends the thread until another one calls unpark(what). The deadlock report shows the number.
    void park(const char* name, const void* what, unsigned number) {
        park_here(name, what, number);
        wait();
    }
    // Makes the threads that are parked at `what` ready.
    void unpark(const void* what) {
        for (unsigned t = 0; t < threads_.size() && parked_ > 0; t++) {
            if (threads_[t].parked_at != what) continue;
            threads_[t].parked_at = nullptr;
            parked_--;
            make_ready(t);
        }
    }

    // Lets other threads run, also one that has not started; the current thread stays ready.
    void yield() {
        make_ready(current_);
        yields_ = true;
        // This thread may wait in a loop for lanes in converged(). If lanes beside them may do so too, wait longer.
        if (parked_ > 0 && ++yields_since_release_ % 64 == 0) release_any_converged(yields_since_release_ % 65536 == 0);
        wait();
    }

    // Returns a mask of the lanes of the warp that are at this line of the program. A lane waits until all others are
    // there too, have ended, or cannot continue: a GPU makes lanes that diverged converge again.
    unsigned converged(const char* file, unsigned line) {
        const unsigned place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(file)) * lines_of_a_file + line;
        Warp& warp = warps_[current_ / WARP_SIZE];
        park_here("__activemask", &warp, place);
        if (lanes_beside(current_) == warp.alive) release_converged(current_);
        wait();
        return threads_[current_].number;
    }

    unsigned current() const { return current_; }
    unsigned threads() const { return static_cast<unsigned>(threads_.size()); }
    Random& random() { return random_; }

private:
    struct Thread {
        uint3 index{};
        unsigned mask = 0;                // of the warp collective that it waits in; 0: it does not wait in one
        WarpWork work = nullptr;          // of that collective
        unsigned number = 0;              // for the deadlock report, see park
        const void* parked_at = nullptr;
        const char* waits_for = nullptr;  // name of the function it waits in; null while it can run
        Fiber* fiber = nullptr;           // null before it starts and after it has ended
    };
    struct Warp {
        unsigned alive = 0, waiting = 0;  // one bit per lane
        void* operand[WARP_SIZE] = {};
    };

    static unsigned first_lanes(unsigned count) { return count >= 32 ? ~0u : (1u << count) - 1; }

    // ---- the next thread

    static constexpr unsigned no_thread = ~0u, lines_of_a_file = 1 << 16;

    void make_ready(unsigned t) {
        threads_[t].waits_for = nullptr;
        ready_[(ready_first_ + ready_count_++) % max_threads] = static_cast<uint16_t>(t);
    }

    // Returns the thread that runs next: a ready one or one that has not started, or no_thread if there is neither.
    unsigned pick() {
        const unsigned fresh = static_cast<unsigned>(threads_.size()) - started_;
        // Under an odd seed, mostly the last thread to become ready runs, so that one warp runs as far ahead of the
        // others as barriers allow. A uniform choice would keep the warps close together.
        if (launch_->seed % 2 == 1 && ready_count_ > 0 && random_.below(8) != 0)
            return ready_[(ready_first_ + --ready_count_) % max_threads];
        bool begin = ready_count_ == 0 || (std::exchange(yields_, false) && fresh > 0);
        if (launch_->seed != 0 && ready_count_ + fresh > 0) {
            const unsigned draw = random_.below(ready_count_ + fresh);
            begin = draw >= ready_count_;
            if (!begin) std::swap(ready_[ready_first_], ready_[(ready_first_ + draw) % max_threads]);
        }
        if (begin) {
            if (fresh == 0) return no_thread;
            const unsigned t = launch_->seed != 0 ? order_[started_] : started_;
            started_++;
            return t;
        }
        const unsigned t = ready_[ready_first_];
        ready_first_ = (ready_first_ + 1) % max_threads;
        ready_count_--;
        return t;
    }

    // Completes pending copies, then lets lanes converge, until a thread is ready and returns it, or no_thread if
    // some wait for the grid; otherwise reports a deadlock.
    __attribute__((noinline, cold)) unsigned pick_later() {
        while (background != nullptr && background->advance())
            if (const unsigned t = pick(); t != no_thread) return t;
        if (release_any_converged(true)) return pick();
        if (at_grid_ > 0) return no_thread;
        deadlock();
    }

    CUDA_CPU_NO_TSAN void enter(unsigned t) {
        current_ = t;
        threadIdx = threads_[t].index;
        watch::thread_resumed(t);
    }

    // Runs other threads until the scheduler picks this one again.
    CUDA_CPU_NO_TSAN void wait() {
        const unsigned me = current_;
        unsigned next = pick();
        if (next == no_thread) next = pick_later();
        if (next == no_thread) return switch_to(home_);   // returns after resume()
        if (next == me) return;
        enter(next);
        if (threads_[next].fiber == nullptr) threads_[next].fiber = idle_fiber();
        switch_to(*threads_[next].fiber);
    }

    // ---- lanes that wait in converged()

    void park_here(const char* name, const void* what, unsigned number) {
        Thread& me = threads_[current_];
        me.waits_for = name;
        me.parked_at = what;
        me.number = number;
        parked_++;
    }
    unsigned lanes_beside(unsigned t) const {
        unsigned lanes = 0;
        const Warp& warp = warps_[t / WARP_SIZE];
        for (unsigned rest = warp.alive; rest != 0; rest &= rest - 1) {
            const Thread& other = threads_[t / WARP_SIZE * WARP_SIZE + static_cast<unsigned>(__builtin_ctz(rest))];
            if (other.parked_at == &warp && other.number == threads_[t].number) lanes |= rest & -rest;
        }
        return lanes;
    }
    void release_converged(unsigned t) {
        const unsigned lanes = lanes_beside(t);
        yields_since_release_ = 0;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            const unsigned other = t / WARP_SIZE * WARP_SIZE + static_cast<unsigned>(__builtin_ctz(rest));
            threads_[other].parked_at = nullptr;
            threads_[other].number = lanes;
            parked_--;
            make_ready(other);
        }
    }
    // Makes the lanes ready that are at the lowest line, so that lanes in a loop or a branch reach those after it.
    // at_once: also if lanes beside them can still run. Returns whether there are any.
    bool release_any_converged(bool at_once) {
        const auto line = [&](unsigned t) { return threads_[t].number % lines_of_a_file; };
        unsigned found = no_thread;
        for (unsigned t = 0; t < threads_.size(); t++)
            if (threads_[t].parked_at == &warps_[t / WARP_SIZE] && (at_once || all_lanes_wait(t)) &&
                (found == no_thread || line(t) < line(found)))
                found = t;
        if (found != no_thread) release_converged(found);
        return found != no_thread;
    }
    bool all_lanes_wait(unsigned t) const {
        for (unsigned lanes = warps_[t / WARP_SIZE].alive; lanes != 0; lanes &= lanes - 1)
            if (threads_[t / WARP_SIZE * WARP_SIZE + static_cast<unsigned>(__builtin_ctz(lanes))].waits_for == nullptr)
                return false;
        return true;
    }

    // ---- fibers: each runs one thread after another

    Fiber* idle_fiber() {
        if (idle_.empty()) {
            fibers_.push_back(std::make_unique<Fiber>(static_cast<unsigned>(fibers_.size()), fiber_body));
            idle_.push_back(fibers_.back().get());
        }
        Fiber* fiber = idle_.back();
        idle_.pop_back();
        return fiber;
    }

    CUDA_CPU_NO_TSAN static void fiber_body(boost::context::detail::transfer_t from) {
        finish_switch(from);
        for (Block& mine = *block;;) mine.run_thread();
    }

    CUDA_CPU_NO_TSAN void run_thread() {
        watch::thread_started(current_);
        launch_->call(launch_->kernel_and_arguments);
        Fiber* fiber = threads_[current_].fiber;
        if (fiber->overflowed())
            die("thread ", current_, " overflows its stack of ", fiber_stack_bytes, " bytes");
        end_thread();
        unsigned next = pick();
        if (next == no_thread && alive_ > 0) next = pick_later();
        if (next == no_thread) {
            idle_.push_back(fiber);
            switch_to(home_);  // the block has ended; this call returns when the next block starts on this fiber
            return;
        }
        enter(next);
        if (threads_[next].fiber == nullptr) {
            threads_[next].fiber = fiber;
            return;
        }
        idle_.push_back(fiber);
        switch_to(*threads_[next].fiber);  // returns when another thread is to start on this fiber
    }

    // Ends the current thread, and completes the barriers and collectives that waited only for it.
    void end_thread() {
        threads_[current_].fiber = nullptr;
        alive_--;
        watch::thread_ended(current_);
        Warp& warp = warps_[current_ / WARP_SIZE];
        warp.alive &= ~(1u << current_ % WARP_SIZE);
        for (unsigned lanes = warp.waiting; lanes != 0; lanes &= warp.waiting) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
            try_collective(current_ / WARP_SIZE * WARP_SIZE + lane);
            lanes &= lanes - 1;
        }
        if (alive_ > 0) try_barrier();
    }

    // ---- completion of barriers and collectives

    // If all threads are at the barrier, makes them ready, in the order of their indices.
    void try_barrier() {
        if (waiting_at_barrier_ < alive_) return;
        waiting_at_barrier_ = 0;
        counted_ = std::exchange(votes_, 0);
        watch::barrier_completed("__syncthreads");
        for (unsigned t = 0; t < threads_.size(); t++)
            if (threads_[t].waits_for != nullptr) make_ready(t);
    }

    // If all lanes have arrived at the collective in which thread t waits, executes it and makes its lanes ready.
    void try_collective(unsigned t) {
        const unsigned first = t / WARP_SIZE * WARP_SIZE;
        Warp& warp = warps_[t / WARP_SIZE];
        const unsigned mask = threads_[t].mask, lanes = mask & warp.alive;
        if ((warp.waiting & lanes) != lanes) return;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            const Thread& other = threads_[first + static_cast<unsigned>(__builtin_ctz(rest))];
            if (other.mask != mask || other.work != threads_[t].work) return;
        }
        watch::collective_completed(first, lanes, mask, threads_[t].waits_for);
        threads_[t].work(warp.operand, lanes);
        warp.waiting &= ~lanes;
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            const unsigned other = first + static_cast<unsigned>(__builtin_ctz(rest));
            threads_[other].mask = 0;
            make_ready(other);
        }
    }

    // ---- seeds and reports

    void shuffle_order(uint64_t block_number) {
        random_.state = launch_->seed ^ (block_number + 1) * 0xd1342543de82ef95;
        order_.resize(threads_.size());
        for (unsigned i = 0; i < order_.size(); i++) {
            const unsigned j = random_.below(i + 1);
            order_[i] = order_[j];
            order_[j] = static_cast<uint16_t>(i);
        }
    }

    std::string state_of(unsigned t) const {
        const Thread& thread = threads_[t];
        if (thread.waits_for == nullptr) return "ended";
        if (thread.parked_at != nullptr && background != nullptr)
            return std::string("in ") + thread.waits_for + background->state_of(thread.parked_at, thread.number);
        char mask[32] = "";
        if (thread.mask != 0) snprintf(mask, sizeof(mask), " with mask 0x%08x", thread.mask);
        return std::string("in ") + thread.waits_for + mask;
    }

    // Reports the states of the threads, one line for each distinct state, and ends the process.
    [[noreturn]] void deadlock() const {
        std::vector<std::pair<std::string, std::string>> lines;  // (state, threads in that state)
        for (unsigned first = 0, t = 1; first < threads_.size(); first = t) {
            const std::string state = state_of(first);
            for (t = first + 1; t < threads_.size() && state_of(t) == state;) t++;
            auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return l.first == state; });
            if (line == lines.end()) line = lines.insert(line, {state, ""});
            line->second += (line->second.empty() ? "" : ", ") + std::to_string(first) +
                            (t == first + 1 ? "" : "-" + std::to_string(t - 1));
        }
        std::string what = "deadlock: no thread can continue";
        for (const auto& [state, threads] : lines) what += "\n  threads " + threads + ": " + state;
        die(what);
    }

    const Launch* launch_ = nullptr;
    dim3 dim_{0, 0, 0};
    std::vector<Thread> threads_;
    Warp warps_[max_threads / WARP_SIZE];
    unsigned current_ = 0, started_ = 0, alive_ = 0;

    unsigned waiting_at_barrier_ = 0, at_grid_ = 0, parked_ = 0;
    bool yields_ = false;
    unsigned yields_since_release_ = 0;
    unsigned votes_ = 0, counted_ = 0;  // of a barrier that counts: so far, and of the last one

    uint16_t ready_[max_threads] = {};  // ring buffer of ready threads, first in, first out
    unsigned ready_first_ = 0, ready_count_ = 0;
    std::vector<uint16_t> order_;  // order in which threads start under a seed
    Random random_{};

    Context home_;  // the worker's own stack
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
};

// ==== warp and block collectives ========================================================================

// Executes a warp collective; see Block::collective.
inline void warp_collective(const char* name, unsigned mask, void* operand, Block::WarpWork work) {
    if (block != nullptr) {
        block->collective(name, mask, operand, work);
    } else {
        work(&operand, 1);
    }
}

// Implements all shuffles. Returns the value of lane `from`, or the lane's own value if `from` does not take part.
template <class T> inline T shuffle(const char* name, unsigned mask, T value, unsigned from) {
    if (WARP_SIZE == 1) return value;
    struct Operand { T value, result; unsigned from; } mine{value, value, from};
    warp_collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            Operand& lane = *static_cast<Operand*>(operands[__builtin_ctz(rest)]);
            if (lanes >> lane.from & 1) lane.result = static_cast<Operand*>(operands[lane.from])->value;
        }
    });
    return mine.result;
}

// Implements reductions: returns the operation's result over the values of all lanes that take part.
template <class Operation, class T> inline T reduce(const char* name, unsigned mask, T value) {
    if (WARP_SIZE == 1) return value;
    warp_collective(name, mask, &value, [](void* const* operands, unsigned lanes) {
        T all = *static_cast<T*>(operands[__builtin_ctz(lanes)]);
        for (unsigned rest = lanes & (lanes - 1); rest != 0; rest &= rest - 1)
            all = Operation()(all, *static_cast<T*>(operands[__builtin_ctz(rest)]));
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) *static_cast<T*>(operands[__builtin_ctz(rest)]) = all;
    });
    return value;
}

// Returns a mask of the lanes that pass the same bits.
template <class T> inline unsigned match(const char* name, unsigned mask, T value) {
    if (WARP_SIZE == 1) return 1;
    struct Operand { T value; unsigned same; } mine{value, 0};
    warp_collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
            for (unsigned other = lanes; other != 0; other &= other - 1) {
                Operand& lane = *static_cast<Operand*>(operands[__builtin_ctz(rest)]);
                const T& value = static_cast<Operand*>(operands[__builtin_ctz(other)])->value;
                if (memcmp(&lane.value, &value, sizeof(T)) == 0) lane.same |= other & -other;
            }
    });
    return mine.same;
}

// Return the index of the current thread in its block and in its warp.
inline unsigned this_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline unsigned lane() { return this_thread() % WARP_SIZE; }
inline unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }

// Returns a mask of the lanes whose `yes` is true.
inline unsigned ballot(const char* name, unsigned mask, bool yes) {
    return reduce<std::bit_or<>>(name, mask, yes ? 1u << lane() : 0);
}
}  // namespace cuda_cpu

CUDA_CPU_INSTRUCTION void __syncthreads() {
    if (cuda_cpu::watch::is_removed("__syncthreads", cuda_cpu::watch::call_site())) return;
    if (cuda_cpu::block != nullptr) cuda_cpu::block->barrier("__syncthreads");
}

CUDA_CPU_INSTRUCTION void __syncwarp(unsigned mask = 0xffffffff) {
    if (WARP_SIZE == 1 || cuda_cpu::watch::is_removed("__syncwarp", cuda_cpu::watch::call_site())) return;
    cuda_cpu::warp_collective("__syncwarp", mask, nullptr, [](void* const*, unsigned) {});
}
inline unsigned __ballot_sync(unsigned mask, int yes) { return cuda_cpu::ballot("__ballot_sync", mask, yes != 0); }
inline int __any_sync(unsigned mask, int yes) { return cuda_cpu::ballot("__any_sync", mask, yes != 0) != 0; }
inline int __all_sync(unsigned mask, int yes) { return cuda_cpu::ballot("__all_sync", mask, yes == 0) == 0; }

// Barriers of the block that also return how many threads pass a true value, whether all do, and whether any does.
inline int __syncthreads_count(int yes) {
    return cuda_cpu::block == nullptr ? yes != 0
                                      : static_cast<int>(cuda_cpu::block->count("__syncthreads_count", yes != 0));
}
inline int __syncthreads_and(int yes) { return __syncthreads_count(yes == 0) == 0; }
inline int __syncthreads_or(int yes) { return __syncthreads_count(yes) != 0; }

#define CUDA_CPU_REDUCTION(name, T, result)                                                                    \
    inline T __reduce_##name##_sync(unsigned mask, T value) {                                                  \
        struct Operation { T operator()(T x, T y) const { return result; } };                                  \
        return cuda_cpu::reduce<Operation>("__reduce_" #name "_sync", mask, value);                            \
    }
CUDA_CPU_REDUCTION(add, unsigned, x + y)
CUDA_CPU_REDUCTION(add, int, static_cast<int>(static_cast<unsigned>(x) + static_cast<unsigned>(y)))
CUDA_CPU_REDUCTION(min, unsigned, std::min(x, y))
CUDA_CPU_REDUCTION(min, int, std::min(x, y))
CUDA_CPU_REDUCTION(max, unsigned, std::max(x, y))
CUDA_CPU_REDUCTION(max, int, std::max(x, y))
CUDA_CPU_REDUCTION(and, unsigned, x & y)
CUDA_CPU_REDUCTION(or, unsigned, x | y)
CUDA_CPU_REDUCTION(xor, unsigned, x ^ y)
#undef CUDA_CPU_REDUCTION

template <class T> inline unsigned __match_any_sync(unsigned mask, T value) {
    return cuda_cpu::match("__match_any_sync", mask, value);
}
// Returns the mask if all its lanes pass the same value, otherwise 0.
template <class T> inline unsigned __match_all_sync(unsigned mask, T value, int* all_same) {
    const unsigned same = cuda_cpu::match("__match_all_sync", mask, value);
    *all_same = same == __ballot_sync(mask, 1);
    return *all_same ? same : 0;
}

// Returns a mask of the lanes that execute this together: those that call it from the same line.
inline unsigned __activemask(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    if (WARP_SIZE == 1 || cuda_cpu::block == nullptr) return 1;
    return cuda_cpu::block->converged(file, line);
}

// Lets other threads run: a thread that waits for another one in a loop then makes progress.
inline void __nanosleep(unsigned) {
    if (cuda_cpu::block != nullptr) cuda_cpu::block->yield();
}
[[noreturn]] inline void __trap() { cuda_cpu::die("__trap"); }

// The four shuffles differ in the lane that a thread reads from. `width` divides the warp into segments; a lane whose
// source is in another segment keeps its own value. As in CUDA, xor can read from earlier segments, but not from later
// ones. place: of the lane in its segment.
#define CUDA_CPU_SHUFFLE(name, By, from)                                                                       \
    template <class T> inline T __shfl_##name(unsigned mask, T value, By distance, int width = WARP_SIZE) {    \
        const unsigned by = static_cast<unsigned>(distance), segment = static_cast<unsigned>(width),           \
                       lane = cuda_cpu::lane(), place = lane % segment;                                        \
        return cuda_cpu::shuffle("__shfl_" #name, mask, value, from);                                          \
    }
CUDA_CPU_SHUFFLE(sync, int, lane - place + by % segment)
CUDA_CPU_SHUFFLE(xor_sync, int, (lane ^ by) < lane - place + segment ? lane ^ by : lane)
CUDA_CPU_SHUFFLE(up_sync, unsigned, place >= by ? lane - by : lane)
CUDA_CPU_SHUFFLE(down_sync, unsigned, place + by < segment ? lane + by : lane)
#undef CUDA_CPU_SHUFFLE

// PTX instructions of tensor cores, barriers and asynchronous copies, as functions that follow the PTX ISA manual. On a
// GPU, a program wraps inline PTX under the same names. The functions are in the namespace cuda_cpu::ptx, so that they
// do not clash with a program's own.
//
// Without a seed (cuda_cpu::seed), asynchronous work completes when it is issued. Under a seed it completes at some
// moment before the wait that covers it (README.md, "Tensor cores").
//
// Map: pending work · Ampere: mma, ldmatrix, cp.async · Hopper: mbarrier · Tensor Memory Accelerator (TMA) · wgmma
//
// Addresses in shared memory are offsets into dynamic_shared_memory. The instructions need warps of 32 lanes: with
// WARP_SIZE 1 they compile, and calling one ends the program.
#pragma once

#include "atomics.h"
#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

#include <array>

namespace cuda_cpu {
namespace ptx {
// The major-ness of a wgmma operand tile. K: the sum over k runs along its columns; MN: along its rows.
enum class Major { K = 0, MN = 1 };
}  // namespace ptx
using ptx::Major;

// ==== pending work ======================================================================================

constexpr unsigned lanes_of_warp = 32, max_columns = 256;

inline char* shared_base() { return reinterpret_cast<char*>(dynamic_shared_memory); }

// Returns a swizzled address: in a row of 128 bytes, a 16-byte chunk's index is XORed with the row number modulo 8.
inline uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Asynchronous work in commit groups: cp.async per thread, wgmma per warp.
template <class Work> struct Groups {
    std::vector<Work> pending;  // in the order of issue; Work has a member `group`
    unsigned committed = 0;

    void start(Work work) {
        work.group = committed;
        pending.push_back(std::move(work));
    }
    // Calls end() for the work of all groups but the latest n. Work that was not committed belongs to no group.
    template <class End> void wait(unsigned n, End end) {
        size_t ended = 0;
        while (ended < pending.size() && pending[ended].group + n < committed) end(pending[ended++]);
        pending.erase(pending.begin(), pending.begin() + static_cast<std::ptrdiff_t>(ended));
    }
};

struct Copy {  // cp.async
    void* to;
    const void* from;
    unsigned bytes, filled;  // the bytes after the first `filled` become 0
    bool done;
    unsigned group;
    CUDA_CPU_NO_TSAN void complete() {
        memset(to, 0, bytes);
        memcpy(to, from, filled);
        done = true;
    }
};

struct Load {  // cp.async.bulk.tensor
    TensorLayout tensor;
    char* to;
    uint64_t* barrier;
    int64_t at[4];
    bool done;
    unsigned phase;     // parity of the barrier's phase in which it completed
    unsigned watch_id;  // the load's number in dev/inspect
};

struct WarpProduct {  // one warp's part of a wgmma
    float* d[lanes_of_warp];
    const uint32_t* a_registers[lanes_of_warp];  // fragments of A, or null: then `a` is its descriptor
    uint64_t a, b;                               // descriptors
    unsigned columns, row;                       // row: the first of the warp's 16 rows in the 64 of A
    bool add;
    Major b_major;
    bool saved = false;  // `old` has the accumulators, and d contains NaN
    std::vector<float> old;
    std::vector<float> result;  // empty until the operands have been read
    unsigned group, watch_id;

    bool a_in_registers() const { return a_registers[0] != nullptr; }

    using Operands = std::array<uint64_t, 6>;  // equal in all warps of a warpgroup
    Operands operands() const { return {a, b, columns, a_in_registers(), add, static_cast<uint64_t>(b_major)}; }
};

struct NamedBarrier {
    unsigned expected = 0, arrived = 0;  // threads
    std::vector<bool> has_arrived;       // by thread
};

inline unsigned this_warp() { return this_thread() / lanes_of_warp; }

// Ends the program because this thread's call of the named function is invalid.
template <class... Parts> [[noreturn]] void reject(const char* name, const Parts&... parts) {
    die("thread ", this_thread(), " calls ", name, ' ', parts...);
}

// Ends the program if the emulated GPU does not have this instruction, which needs a compute capability (90 is 9.0) of
// `least` to `most`. (PTX ISA, "Target ISA Notes" of each instruction.)
inline void require_capability(const char* name, int least, int most = 999) {
    const int number = card() == nullptr ? least : card()->capability.number();
    if (number >= least && number <= most) return;
    reject(name, "but it is an illegal instruction on ", card()->name, ", capability ", number / 10, '.', number % 10,
           "; expected ", least / 10, '.', least % 10, most == least ? "" : " or higher");
}

// The asynchronous work of the block that this worker is running.
class AsyncWork final : public Background {
public:
    bool deferred = false;             // under a seed: work completes later than it is issued
    std::vector<Groups<Copy>> copies;  // by thread
    std::vector<Load> loads;
    const void* unfenced_barrier = nullptr;  // initialised, but fence_mbarrier_init has not been called
    unsigned atomic_incs = 0;                // calls of atomic_inc by this block under dev/inspect
    NamedBarrier named[16];
    std::vector<std::vector<WarpProduct::Operands>> sequence;  // the wgmma instructions of each warpgroup
    struct Warp {
        Groups<WarpProduct> products;
        unsigned issued = 0;  // instructions of the sequence that it has issued
        bool fenced = false;  // whether it has called wgmma_fence
    };
    std::vector<Warp> warps;
    char* product_memory = nullptr;  // wgmma reads it: shared memory, or a copy as of the last async_fence

    static AsyncWork& of_this_block() {
        static thread_local AsyncWork work;
        if (warp_size != 32 || block == nullptr) die("asynchronous copies and barriers need warps of 32 threads");
        if (background == nullptr) work.begin();
        return work;
    }

    // Returns true at random, once in `one_in` calls on average; false without a seed.
    bool draw(unsigned one_in) { return deferred && block->random().below(one_in) == 0; }

    // Completes one pending load; returns false if no load is pending.
    bool advance() override {
        unsigned waiting = 0;
        for (const Load& load : loads) waiting += !load.done;
        if (waiting == 0) return false;
        unsigned n = deferred ? block->random().below(waiting) : 0;
        for (Load& load : loads)
            if (!load.done && n-- == 0) {
                complete(load);
                break;
            }
        return true;
    }
    void complete(Load& load);

    std::string state_of(const void* what, unsigned number) const override;

    // Makes all previous stores visible to wgmma. (The thread of a store is unknown, so a fence acts for all threads.)
    void publish_stores() {
        if (product_memory != shared_base()) memcpy(product_memory, shared_base(), launched->shared_bytes);
    }

    void end_of_block() override {
        for (size_t t = 0; t < copies.size() && !watch::on; t++)   // dev/inspect reports reads before a wait
            if (!copies[t].pending.empty()) die("thread ", t, " ended without waiting for a cp_async");
        for (size_t w = 0; w < warps.size(); w++) {
            if (!warps[w].products.pending.empty()) die("warp ", w, " ended without waiting for a wgmma");
            if (warps[w].issued != sequence[w / 4].size())
                die("the warps of warpgroup ", w / 4, " did not call the same wgmma instructions");
        }
        if (!loads.empty()) die("the block ended without waiting for a tma_load");
    }

private:
    std::vector<char> published_;

    void begin() {
        const unsigned threads = block->threads();
        const unsigned warp_count = (threads + lanes_of_warp - 1) / lanes_of_warp;
        copies.assign(threads, {});
        loads.clear();
        warps.assign(warp_count, {});
        sequence.assign((warp_count + 3) / 4, {});
        for (NamedBarrier& barrier : named) barrier = {};
        unfenced_barrier = nullptr;
        atomic_incs = 0;
        deferred = launched->seed != 0;
        background = this;
        product_memory = shared_base();
        if (draw(2)) {
            published_.assign(launched->shared_bytes, -1);
            product_memory = published_.data();
        }
    }
};

inline AsyncWork& async_work() { return AsyncWork::of_this_block(); }

inline void require_warps(const char* name) {
    if (warp_size != 32 || block == nullptr) reject(name, "without a full warp; expected 32 threads");
}

// Executes a collective of all 32 lanes of a warp; see Block::collective.
inline void full_warp_collective(const char* name, void* operand, Block::WarpWork work) {
    require_warps(name);
    warp_collective(name, 0xffffffff, operand, work);
}
inline void require_all_lanes(const char* name, unsigned lanes) {
    if (lanes != 0xffffffff) reject(name, "but lanes of its warp have ended; expected all 32");
}

// Returns the address of p in shared memory: its offset in dynamic_shared_memory.
inline uint32_t shared_address(const void* p) {
    const std::ptrdiff_t offset = static_cast<const char*>(p) - shared_base();
    if (offset < 0 || offset > static_cast<std::ptrdiff_t>(max_shared_bytes))
        reject("shared_address", "with an address that is not in dynamic shared memory");
    return static_cast<uint32_t>(offset);
}

// Returns whether p is in dynamic shared memory or in a __shared__ array.
inline bool is_shared(const void* p) {
    if (static_cast<uintptr_t>(static_cast<const char*>(p) - shared_base()) < max_shared_bytes) return true;
    if (watch::on) return watch::is_shared(p);
    bool found = false;
    Symbols::of_program().each_array(&threadIdx, [&](const char* place, size_t bytes, const char*) {
        found = found || static_cast<uintptr_t>(static_cast<const char*>(p) - place) < bytes;
    });
    return found;
}
inline void require_shared(const char* name, const void* p) {
    if (!is_shared(p)) reject(name, "with an address that is not in shared memory");
}
namespace ptx {
using cuda_cpu::shared_address;

// Returns 2^x; subnormal results are flushed to 0 (ex2.approx.ftz.f32).
inline float exp2_approx(float x) {
    watch::special_function();
    const float n = nearbyintf(x);
    float result = exp2_of_sum(n, x - n);
    result = x < -126.0f ? 0.0f : result;
    return x >= 128.0f ? std::numeric_limits<float>::infinity() : result;
}

inline float reciprocal_approx(float x) { return special(1.0f / x); }

// Returns the next work tile from an atomic counter. dev/inspect runs only a few blocks, one after another: the first
// would get all tiles. So under dev/inspect each block gets every gridDim.x-th tile, as on average on a GPU, and the
// counter is accessed but not changed.
inline unsigned atomic_inc(int* counter, unsigned last) {
    if (!watch::on) return atomicInc(reinterpret_cast<unsigned*>(counter), last);
    atomicOr(counter, 0);
    return async_work().atomic_incs++ * gridDim.x + blockIdx.x;
}

// ==== Ampere and up =====================================================================================
}  // namespace ptx

// Operands of matrix products are bfloat16, or half precision in a program compiled with PRECISION_FP16.
#ifdef PRECISION_FP16
using Operand16 = __half;
#else
using Operand16 = __nv_bfloat16;
#endif
inline float lower_half(uint32_t pair) { return bits<Operand16>(static_cast<uint16_t>(pair)); }

using Vector16 = float __attribute__((vector_size(64), may_alias));

// The row and the column, in blocks of 8 columns, of a lane's n-th accumulator: lane 4g + t has columns 2t and 2t + 1
// of row g, then of row g + 8.
inline unsigned fragment_row(unsigned lane, unsigned n) { return lane / 4 + n / 2 % 2 * 8; }
inline unsigned fragment_column(unsigned lane, unsigned n) { return n / 4 * 8 + lane % 4 * 2 + n % 2; }

// Unpacks the fragments of A (16 x 16), whose elements are in the order of accumulators, two in a register.
inline void read_a_fragments(float (*a)[16], const uint32_t* const* registers) {
    for (unsigned lane = 0; lane < lanes_of_warp; lane++)
        for (unsigned n = 0; n < 8; n++)
            a[fragment_row(lane, n)][fragment_column(lane, n)] = lower_half(registers[lane][n / 2] >> n % 2 * 16);
}

// Computes result (16 x columns) = a (16 x 16) b (16 x columns), 16 V columns at a time.
CUDA_CPU_NO_TSAN inline void multiply(float* result, const float (*a)[16], const float* b, unsigned columns) {
    constexpr unsigned V = 4;
    for (unsigned r = 0; r < 16; r++)
        for (unsigned n = 0; n < columns; n += 16 * V) {
            Vector16 sum[V] = {};
            for (unsigned i = 0; i < 16; i++) {
                const unsigned k = i ^ rounding.k_order;
                for (unsigned v = 0; v < V; v++)
                    sum[v] += a[r][k] * *reinterpret_cast<const Vector16*>(b + k * columns + n + 16 * v);
            }
            memcpy(result + r * columns + n, sum, sizeof(sum));
        }
}

// Adds each lane's part of result (16 x columns) to its accumulators, or overwrites them if add is false.
CUDA_CPU_NO_TSAN inline void add_to_accumulators(float* const* d_of_lane, const float* result, unsigned columns,
                                                 bool add) {
    for (unsigned lane = 0; lane < lanes_of_warp; lane++)
        for (unsigned n = 0; n < columns / 2; n++) {
            float& d = d_of_lane[lane][n];
            d = (add ? d : 0) + result[fragment_row(lane, n) * columns + fragment_column(lane, n)];
        }
}

// sums (M x N) += a (M x K) b (K x N)
template <unsigned M, unsigned N, unsigned K, class Sum, class Number>
CUDA_CPU_NO_TSAN void add_product(Sum* sums, const Number* a, const Number* b) {
    for (unsigned i = 0; i < M; i++)
        for (unsigned step = 0; step < K; step++) {
            const unsigned k = step ^ (rounding.k_order % K);
            for (unsigned j = 0; j < N; j++) sums[i * N + j] += static_cast<Sum>(a[i * K + k] * b[k * N + j]);
        }
}

// A lane's fragments of mma.m16n8kK, in registers. A register has 4 / sizeof(T) elements of T, or one tf32.
struct MmaOperand {
    const char* name;
    uint32_t* d;
    const uint32_t *a, *b, *c;
};
struct tf32 {};
template <class T> constexpr unsigned mma_elements = std::is_same_v<T, tf32> ? 1 : 4 / sizeof(T);
template <class T> using MmaNumber = std::conditional_t<std::is_integral_v<T>, int, float>;
template <class T> CUDA_CPU_NO_TSAN MmaNumber<T> mma_number(const uint32_t* registers, unsigned i) {
    const uint32_t word = registers[i / mma_elements<T>];
    if constexpr (std::is_same_v<T, tf32>) return bits<float>(word & 0xffffe000u);
    else if constexpr (sizeof(T) == 1) return static_cast<T>(word >> 8 * (i % 4));
    else return bits<T>(static_cast<uint16_t>(word >> 16 * (i % 2)));
}

// d (16 x 8) = a (16 x K) b (K x 8) + c. Sum: float, half or int.
template <class T, class Sum, unsigned K>
CUDA_CPU_NO_TSAN void mma_of_warp(void* const* operands, unsigned lanes) {
    constexpr unsigned elements = mma_elements<T>;
    require_all_lanes(static_cast<MmaOperand*>(operands[__builtin_ctz(lanes)])->name, lanes);
    watch::tensor_flops(2 * 16 * 8 * K);
    MmaNumber<T> left[16][K], right[K][8], product[16][8] = {};
    for (unsigned lane = 0; lane < lanes_of_warp; lane++) {
        const MmaOperand& mine = *static_cast<MmaOperand*>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned k = 0; k < K; k += 4 * elements)
            for (unsigned e = 0; e < elements; e++) {
                const unsigned column = k + t * elements + e, i = k / 4;   // i: of the first element in registers
                left[g][column] = mma_number<T>(mine.a, 2 * i + e);
                left[g + 8][column] = mma_number<T>(mine.a, 2 * i + elements + e);
                right[column][g] = mma_number<T>(mine.b, i + e);
            }
    }
    add_product<16, 8, K>(product[0], left[0], right[0]);
    for (unsigned lane = 0; lane < lanes_of_warp; lane++) {
        const MmaOperand& mine = *static_cast<MmaOperand*>(operands[lane]);
        Sum sums[4];
        memcpy(static_cast<void*>(sums), mine.c, sizeof(sums));
        for (unsigned n = 0; n < 4; n++)
            sums[n] = static_cast<Sum>(static_cast<MmaNumber<T>>(sums[n]) +
                                       product[fragment_row(lane, n)][fragment_column(lane, n)]);
        memcpy(mine.d, sums, sizeof(sums));
    }
}

struct LdmatrixOperand {
    uint32_t* r;
    const void* row;
};

template <bool transposed> CUDA_CPU_NO_TSAN inline void ldmatrix_of_warp(void* const* operands, unsigned lanes) {
    require_all_lanes("ldmatrix", lanes);
    alignas(16) uint16_t rows[lanes_of_warp][8];  // of 4 matrices
    for (unsigned lane = 0; lane < lanes_of_warp; lane++)
        memcpy(rows[lane], static_cast<LdmatrixOperand*>(operands[lane])->row, 16);
    for (unsigned lane = 0; lane < lanes_of_warp; lane++) {
        uint32_t* r = static_cast<LdmatrixOperand*>(operands[lane])->r;
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned m = 0; m < 4; m++) {
            const uint16_t low = transposed ? rows[8 * m + 2 * t][g] : rows[8 * m + g][2 * t];
            const uint16_t high = transposed ? rows[8 * m + 2 * t + 1][g] : rows[8 * m + g][2 * t + 1];
            r[m] = low | static_cast<uint32_t>(high) << 16;
        }
    }
}

// matrices: 1, 2 or 4, whose rows the addresses of the first 8, 16 or 32 lanes are. r: 4 registers.
template <bool transposed>
inline void ldmatrix_of_lane(uint32_t* r, const void* row, const void* site, unsigned matrices = 4) {
    const char* name = transposed ? "ldmatrix_transposed" : "ldmatrix";
    require_capability(name, 75);
    if (lane() >= 8 * matrices) row = shared_base();   // not used
    if (!aligned(row, 16)) reject(name, "with an address that is not a multiple of 16");
    require_shared(name, row);
    if (lane() < 8 * matrices) watch::access(watch::Access::LOAD, watch::By::LDMATRIX, row, 16, site);
    LdmatrixOperand mine{r, row};
    full_warp_collective(name, &mine, ldmatrix_of_warp<transposed>);
}

inline Groups<Copy>& copies_of_thread() { return async_work().copies[this_thread()]; }

inline void start_copy(const char* name, void* to, const void* from, unsigned bytes, unsigned filled,
                       const void* site) {
    require_capability(name, 80);
    if (bytes != 4 && bytes != 8 && bytes != 16) reject(name, "for ", bytes, " bytes; expected 4, 8 or 16");
    if (!aligned(to, bytes) || !aligned(from, bytes))
        reject(name, "with an address that is not a multiple of ", bytes);
    require_shared(name, to);
    watch::cp_async(to, bytes, from, filled, site);
    Copy copy{to, from, bytes, filled, false, 0};
    if (!async_work().deferred || async_work().draw(2)) copy.complete();
    copies_of_thread().start(copy);
}
inline void wait_for_copies(unsigned pending) {
    watch::cp_async_wait(pending);
    copies_of_thread().wait(pending, [](Copy& copy) {
        if (!copy.done) copy.complete();
    });
}
namespace ptx {
inline void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    require_capability("mma_m16n8k16", 80);
    const uint32_t b[2] = {b0, b1};
    auto* const sums = reinterpret_cast<uint32_t*>(d);
    MmaOperand mine{"mma_m16n8k16", sums, a, b, sums};
    full_warp_collective("mma_m16n8k16", &mine, mma_of_warp<Operand16, float, 16>);
}

CUDA_CPU_INSTRUCTION void ldmatrix(uint32_t (&r)[4], const void* row) {
    ldmatrix_of_lane<false>(r, row, watch::call_site());
}
CUDA_CPU_INSTRUCTION void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
    ldmatrix_of_lane<true>(r, row, watch::call_site());
}

CUDA_CPU_INSTRUCTION void cp_async(void* to, const void* from, bool valid) {
    start_copy("cp_async", to, from, 16, valid ? 16 : 0, watch::call_site());
}
inline void cp_async_commit() {
    copies_of_thread().committed++;
    watch::cp_async_commit();
}
template <int N> CUDA_CPU_INSTRUCTION void cp_async_wait() {
    if (!watch::is_removed("cp_async_wait", watch::call_site())) wait_for_copies(N);
}

// ==== Hopper: mbarrier, named barriers ==================================================================
}  // namespace ptx

// The 64 bits of an mbarrier: parity of the current phase, pending and expected arrival counts, tx-count.
struct Mbarrier {
    static constexpr uint64_t max_arrivals = (1 << 20) - 1;
    static constexpr int64_t max_bytes = (1 << 20) - 1;
    uint64_t parity : 1, pending : 20, expected : 20;
    int64_t tx_count : 21;  // bytes
    uint64_t mark : 2;      // 2: initialised

    static void check_address(const uint64_t* barrier, const char* caller, int least_capability) {
        require_capability(caller, least_capability);
        if (!aligned(barrier, 8)) reject(caller, "with a barrier whose address is not a multiple of 8");
    }
    CUDA_CPU_NO_TSAN static Mbarrier read(const uint64_t* barrier, const char* caller, int least_capability = 90) {
        check_address(barrier, caller, least_capability);
        const auto value = bits<Mbarrier>(*barrier);
        if (value.mark != 2) reject(caller, "with a barrier that is not initialised");
        return value;
    }
    CUDA_CPU_NO_TSAN void write(uint64_t* barrier) const { *barrier = bits<uint64_t>(*this); }

    // Subtracts `arrive` arrivals, adds `expect` bytes to the tx-count, and completes the phase if both are then 0.
    void change(uint64_t* barrier, const char* caller, uint64_t arrive, int64_t expect) {
        if (arrive > pending)
            reject(caller, "for a barrier whose phase already has all ", expected, " arrivals");
        if (std::abs(tx_count + expect) > max_bytes) reject(caller, "with a tx-count of more than 1048575 bytes");
        pending -= arrive;
        tx_count += expect;
        const bool completed = pending == 0 && tx_count == 0;
        if (completed) {
            watch::phase_completed(barrier, parity);
            parity ^= 1;
            pending = expected;
        }
        write(barrier);
        if (completed) block->unpark(barrier);
    }
};

// Counts this thread's arrival at a named barrier; returns whether it was the last.
inline bool arrive_at_named_barrier(const char* name, int number, int threads) {
    require_warps(name);
    if (number < 1 || number > 15) reject(name, "with number ", number, "; expected 1 to 15");
    if (threads <= 0 || threads % 32 != 0 || static_cast<unsigned>(threads) > block->threads())
        reject(name, "for ", threads, " threads; expected a multiple of 32, no more than the block's");
    NamedBarrier& barrier = async_work().named[number];
    if (barrier.arrived == 0) {
        barrier.expected = static_cast<unsigned>(threads);
        barrier.has_arrived.assign(block->threads(), false);
    }
    if (barrier.expected != static_cast<unsigned>(threads))
        reject(name, "for ", threads, " threads, others for ", barrier.expected, ", at barrier ", number);
    if (barrier.has_arrived[block->current()]) reject(name, "but has already arrived at barrier ", number);
    barrier.has_arrived[block->current()] = true;
    watch::arrived(&barrier, nullptr);
    if (++barrier.arrived < barrier.expected) return false;
    barrier.arrived = 0;
    watch::phase_completed(&barrier, 0);
    block->unpark(&barrier);
    return true;
}
namespace ptx {
CUDA_CPU_INSTRUCTION void mbarrier_init(uint64_t* barrier, int arrivals) {
    Mbarrier::check_address(barrier, "mbarrier_init", 90);
    if (arrivals < 1 || static_cast<uint64_t>(arrivals) > Mbarrier::max_arrivals)
        reject("mbarrier_init", "for ", arrivals, " arrivals; expected 1 to 1048575");
    const auto count = static_cast<uint64_t>(arrivals);
    Mbarrier{0, count, count, 0, 2}.write(barrier);
    async_work().unfenced_barrier = barrier;
    watch::mbarrier_initialised(barrier, watch::call_site());
}
inline void fence_mbarrier_init() {
    require_capability("fence_mbarrier_init", 90);
    async_work().unfenced_barrier = nullptr;
}

CUDA_CPU_INSTRUCTION void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes,
                                                    const char* name = "mbarrier_arrive_expect_tx") {
    watch::arrived(barrier, watch::call_site());
    Mbarrier::read(barrier, name).change(barrier, name, 1, bytes);
    if (async_work().draw(2)) block->yield();
}
CUDA_CPU_INSTRUCTION void mbarrier_arrive(uint64_t* barrier) {
    mbarrier_arrive_expect_tx(barrier, 0, "mbarrier_arrive");
}

CUDA_CPU_INSTRUCTION void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    if (parity > 1) reject("mbarrier_wait", "with parity ", parity, "; expected 0 or 1");
    if (watch::is_removed("mbarrier_wait", watch::call_site())) return;
    AsyncWork& work = async_work();
    if (work.draw(4)) work.advance();
    while (Mbarrier::read(barrier, "mbarrier_wait").parity == parity) block->park("mbarrier_wait", barrier, parity);
    watch::waited(barrier, parity, watch::call_site());
    const auto seen = [=](const Load& load) { return load.done && load.barrier == barrier && load.phase == parity; };
    work.loads.erase(std::remove_if(work.loads.begin(), work.loads.end(), seen), work.loads.end());
}

CUDA_CPU_INSTRUCTION void named_barrier_sync(int number, int threads) {
    if (watch::is_removed("named_barrier_sync", watch::call_site())) return;
    if (!arrive_at_named_barrier("named_barrier_sync", number, threads))
        block->park("named_barrier_sync", &async_work().named[number], static_cast<unsigned>(number));
    watch::waited(&async_work().named[number], 0, nullptr);
}
inline void named_barrier_arrive(int number, int threads) {
    arrive_at_named_barrier("named_barrier_arrive", number, threads);
    if (async_work().draw(2)) block->yield();
}
}  // namespace ptx

inline std::string AsyncWork::state_of(const void* what, unsigned number) const {
    for (unsigned n = 1; n < 16; n++)
        if (what == &named[n])
            return text_of(", barrier ", number, ": ", named[n].arrived, " of ", named[n].expected,
                           " threads have arrived");
    const uint64_t* word = static_cast<const uint64_t*>(what);
    const Mbarrier barrier = Mbarrier::read(word, "mbarrier_wait", 70);
    const std::ptrdiff_t at = static_cast<const char*>(what) - shared_base();
    const bool dynamic = at >= 0 && at < static_cast<std::ptrdiff_t>(max_shared_bytes);
    return text_of(", parity ", number, dynamic ? text_of(", barrier at byte ", at) : "", ": ",
                   barrier.expected - barrier.pending, " of ", barrier.expected, " threads have arrived, ",
                   barrier.tx_count, " bytes are missing");
}

// ==== Hopper: the Tensor Memory Accelerator (TMA) =======================================================

// Copies a load's box to shared memory and subtracts its bytes from the barrier's tx-count.
CUDA_CPU_NO_TSAN inline void AsyncWork::complete(Load& load) {
    const TensorLayout& t = load.tensor;
    const uint32_t to = shared_address(load.to), row_bytes = t.box[0] * t.element_bytes;
    uint32_t written = 0;
    int64_t x[4];
    for (x[3] = load.at[3]; x[3] < load.at[3] + t.box[3]; x[3]++)
        for (x[2] = load.at[2]; x[2] < load.at[2] + t.box[2]; x[2]++)
            for (x[1] = load.at[1]; x[1] < load.at[1] + t.box[1]; x[1]++, written += row_bytes) {
                bool inside = true;
                const char* row = t.data;
                for (unsigned i = 1; i < 4; i++) {
                    inside = inside && x[i] >= 0 && x[i] < t.extents[i];
                    row += x[i] * t.strides[i];
                }
                for (uint32_t chunk = 0; chunk < row_bytes; chunk += 16) {
                    char bytes[16] = {};
                    for (uint32_t b = 0; b < 16 && inside; b += t.element_bytes) {
                        const int64_t column = load.at[0] + (chunk + b) / t.element_bytes;
                        if (column >= 0 && column < t.extents[0])
                            memcpy(bytes + b, row + column * t.element_bytes, t.element_bytes);
                    }
                    const uint32_t address = t.swizzled ? swizzled_128(to + written + chunk) : to + written + chunk;
                    const int64_t first = load.at[0] + chunk / t.element_bytes;
                    const bool reads = inside && first >= 0 && first < t.extents[0];   // otherwise it writes zeros
                    watch::bulk_accesses(load.watch_id, 0, shared_base() + address);
                    if (reads) watch::bulk_accesses(load.watch_id, 1, row + first * t.element_bytes);
                    memcpy(shared_base() + address, bytes, 16);
                    memcpy(product_memory + address, bytes, 16);
                }
            }
    load.done = true;
    watch::bulk_completed(load.watch_id);
    Mbarrier barrier = Mbarrier::read(load.barrier, "tma_load");
    load.phase = barrier.parity;
    barrier.change(load.barrier, "tma_load", 0, -t.box_bytes());
}
namespace ptx {
CUDA_CPU_INSTRUCTION void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                   int c3) {
    require_capability("tma_load", 90);
    Load load{{}, static_cast<char*>(to), barrier, {c0, c1, c2, c3}, false, 0, 0};
    memcpy(&load.tensor, map, sizeof(load.tensor));
    if (load.tensor.magic != TensorLayout::known)
        reject("tma_load", "with a map that cuTensorMapEncodeTiled did not encode");
    if (load.tensor.rank != 4) reject("tma_load", "with a map of ", load.tensor.rank, " dimensions; expected 4");
    const unsigned alignment = load.tensor.swizzled ? 1024 : 128;
    if (!aligned(to, alignment)) reject("tma_load", "to an address that is not a multiple of ", alignment);
    if (shared_address(to) + load.tensor.box_bytes() > static_cast<int64_t>(launched->shared_bytes))
        reject("tma_load", "with a box that ends beyond the launch's shared memory");
    Mbarrier::read(barrier, "tma_load");
    AsyncWork& work = async_work();
    if (work.unfenced_barrier != nullptr) reject("tma_load", "before fence_mbarrier_init");
    load.watch_id = watch::load_issued(barrier, watch::call_site());
    work.loads.push_back(load);
    if (!work.deferred || work.draw(3)) work.complete(work.loads.back());
}

// ==== Hopper: wgmma =====================================================================================

// Returns the matrix descriptor of a tile in shared memory with 128-byte swizzling.
inline uint64_t wgmma_descriptor(const void* tile, int column_block_bytes = 16) {
    constexpr uint64_t eight_rows = 8 * 128 / 16, swizzle_128 = 1;
    return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(column_block_bytes / 16) << 16 |
           eight_rows << 32 | swizzle_128 << 62;
}
}  // namespace ptx

// A decoded matrix descriptor. Offsets are in bytes.
struct Descriptor {
    uint32_t start, leading, stride;
    const char* const memory = async_work().product_memory;

    const unsigned product, operand;  // for dev/inspect: the product that reads the tile; 0: as operand A, 1: as B

    Descriptor(uint64_t word, unsigned reader, unsigned as)
        : start((word & 0x3fff) << 4), leading((word >> 16 & 0x3fff) << 4), stride((word >> 32 & 0x3fff) << 4),
          product(reader), operand(as) {
        if (word >> 62 != 1)
            die("wgmma: a descriptor's swizzle is mode ", word >> 62, "; expected 1 (128 bytes)");
        if ((word >> 49 & 7) != 0) die("wgmma: a descriptor has a base offset; expected 0");
        // Without a base offset, swizzle patterns begin at multiples of 1024 bytes. Steps along K stay in row 0.
        if ((start & 0x380) != 0)
            die("wgmma: a descriptor starts at byte ", start, ", in row ", start >> 7 & 7,
                " of a swizzle pattern; expected row 0: a multiple of 1024, plus less than 128");
    }

    uint32_t row(uint32_t r) const { return r % 8 * 128 + r / 8 * stride; }

    // Reads 8 elements. offset: from the start of the tile, before swizzling.
    CUDA_CPU_NO_TSAN void read(float* to, uint32_t offset) const {
        const uint32_t address = swizzled_128(start + offset);
        if (address + 16 > launched->shared_bytes) die("wgmma reads beyond the launch's shared memory");
        watch::bulk_accesses(product, operand, shared_base() + address);
        uint16_t elements[8];
        memcpy(elements, memory + address, 16);
        for (unsigned i = 0; i < 8; i++) to[i] = lower_half(elements[i]);
    }
};

inline void read_operands_and_multiply(WarpProduct& p, float* result) {
    alignas(64) static thread_local float a[16][16], b[16 * max_columns];
    if (p.a_in_registers()) {
        read_a_fragments(a, p.a_registers);
    } else {
        const Descriptor tile(p.a, p.watch_id, 0);
        for (unsigned r = 0; r < 16; r++)
            for (unsigned k = 0; k < 16; k += 8) tile.read(&a[r][k], tile.row(p.row + r) + k * 2);
    }
    const Descriptor tile(p.b, p.watch_id, 1);
    if (p.b_major == Major::K) {
        for (unsigned n = 0; n < p.columns; n++) {
            float row[16];
            for (unsigned k = 0; k < 16; k += 8) tile.read(row + k, tile.row(n) + k * 2);
            for (unsigned k = 0; k < 16; k++) b[k * p.columns + n] = row[k];
        }
    } else {
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < p.columns; n += 8)
                tile.read(b + k * p.columns + n, tile.row(k) + n / 64 * tile.leading + n % 64 * 2);
    }
    multiply(result, a, b, p.columns);
}

// Saves the accumulators and overwrites them with NaN until the product completes.
inline void save_accumulators(WarpProduct& p) {
    p.saved = true;
    p.old.resize(lanes_of_warp * p.columns / 2);
    for (unsigned lane = 0; lane < lanes_of_warp; lane++) {
        memcpy(&p.old[lane * p.columns / 2], p.d[lane], p.columns / 2 * sizeof(float));
        std::fill(p.d[lane], p.d[lane] + p.columns / 2, std::numeric_limits<float>::quiet_NaN());
    }
}

// ---- from the instruction to the wait

// Issues a warp's part of a wgmma. Without a seed it completes at once.
inline void start_product(const WarpProduct& product) {
    AsyncWork& work = async_work();
    AsyncWork::Warp& warp = work.warps[this_warp()];
    if (!warp.fenced) die("wgmma: warp ", this_warp(), " has not called wgmma_fence");
    auto& sequence = work.sequence[this_warp() / 4];
    if (warp.issued == sequence.size()) sequence.push_back(product.operands());
    if (sequence[warp.issued++] != product.operands())
        die("wgmma: the warps of warpgroup ", this_warp() / 4, " do not call the same instruction");

    Groups<WarpProduct>& products = warp.products;
    products.start(product);
    WarpProduct& p = products.pending.back();
    if (!work.deferred) {
        static thread_local float result[16 * max_columns];
        read_operands_and_multiply(p, result);
        add_to_accumulators(p.d, result, p.columns, p.add);
        return;
    }
    bool chained = false;  // an earlier pending product has the same accumulators, which are already NaN
    for (const WarpProduct& other : products.pending) chained = chained || (&other != &p && other.d[0] == p.d[0]);
    if (!chained) save_accumulators(p);
    if (work.draw(2)) {
        p.result.resize(16 * p.columns);
        read_operands_and_multiply(p, p.result.data());
    }
}

// Completes a pending product.
inline void end_product(WarpProduct& p) {
    watch::bulk_completed(p.watch_id);
    if (!async_work().deferred) return;
    if (p.result.empty()) {
        p.result.resize(16 * p.columns);
        read_operands_and_multiply(p, p.result.data());
    }
    if (p.saved)
        for (unsigned lane = 0; lane < lanes_of_warp; lane++)
            memcpy(p.d[lane], &p.old[lane * p.columns / 2], p.columns / 2 * sizeof(float));
    add_to_accumulators(p.d, p.result.data(), p.columns, p.add);
}

// Completes all but the latest n groups of this warp's products.
inline void wait_for_products(unsigned n) {
    auto& products = async_work().warps[this_warp()].products;
    products.wait(n, end_product);
    watch::wgmma_waited(this_warp());
    if (!async_work().deferred) return;
    // Accumulators that a pending product shares with a completed one have its result now: they become NaN again.
    auto& rest = products.pending;
    for (size_t i = 0; i < rest.size(); i++) {
        bool chained = rest[i].saved;
        for (size_t j = 0; j < i; j++) chained = chained || rest[j].d[0] == rest[i].d[0];
        if (!chained) save_accumulators(rest[i]);
    }
}

struct ProductOperand {
    float* d;
    const uint32_t* a_registers;  // or null
    uint64_t a, b;
    int add;
    const void* site;
};

template <int N, Major B> inline void wgmma_of_warp(void* const* operands, unsigned lanes) {
    require_all_lanes("wgmma", lanes);
    WarpProduct p{};
    const ProductOperand& first = *static_cast<ProductOperand*>(operands[0]);
    for (unsigned lane = 0; lane < lanes_of_warp; lane++) {
        const ProductOperand& mine = *static_cast<ProductOperand*>(operands[lane]);
        if (mine.a != first.a || mine.b != first.b || (mine.add != 0) != (first.add != 0))
            die("wgmma: the lanes of a warp pass different descriptors or different values of add");
        p.d[lane] = mine.d;
        p.a_registers[lane] = mine.a_registers;
    }
    p.a = first.a;
    p.b = first.b;
    p.add = first.add != 0;
    p.columns = N;
    p.row = this_warp() % 4 * 16;
    p.b_major = B;
    p.watch_id = watch::wgmma_issued(this_warp(), 2ull * 16 * 16 * N, first.site);
    start_product(p);
}

// Executes a collective of one warp of a full warpgroup.
inline void warpgroup_collective(const char* name, void* operand, Block::WarpWork work) {
    require_capability(name, 90, 90);
    require_warps(name);
    if (block->current() / 128 * 128 + 128 > block->threads())
        reject(name, "without a full warpgroup; expected 128 threads");
    warp_collective(name, 0xffffffff, operand, work);
}
namespace ptx {
// The registers passed to a fence or a wait are for nvcc, which may move arithmetic on other registers across it.
template <class Register> inline void fence_operand(Register&) {}
template <class... Registers> inline void wgmma_fence(Registers&...) {
    warpgroup_collective("wgmma_fence", nullptr, [](void* const*, unsigned lanes) {
        require_all_lanes("wgmma_fence", lanes);
        async_work().warps[this_warp()].fenced = true;
    });
}
inline void wgmma_commit() {
    warpgroup_collective("wgmma_commit", nullptr, [](void* const*, unsigned lanes) {
        require_all_lanes("wgmma_commit", lanes);
        async_work().warps[this_warp()].products.committed++;
    });
}
template <int N, class... Registers> inline void wgmma_wait(Registers&...) {
    warpgroup_collective("wgmma_wait", nullptr, [](void* const*, unsigned lanes) {
        require_all_lanes("wgmma_wait", lanes);
        wait_for_products(N);
    });
}

CUDA_CPU_INSTRUCTION void async_fence() {
    require_capability("async_fence", 90);
    if (watch::is_removed("async_fence", watch::call_site())) return;
    watch::proxy_fence();
    async_work().publish_stores();
}

template <int N, Major B> CUDA_CPU_INSTRUCTION void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
    static_assert(N == 64 || N == 128 || N == 256);
    ProductOperand mine{d, nullptr, a, b, add, watch::call_site()};
    warpgroup_collective("wgmma", &mine, wgmma_of_warp<N, B>);
}
template <int N, Major B>
CUDA_CPU_INSTRUCTION void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
    static_assert(N == 64 || N == 128);
    ProductOperand mine{d, a, 0, b, add, watch::call_site()};
    warpgroup_collective("wgmma", &mine, wgmma_of_warp<N, B>);
}

// setmaxnreg: the emulator does not count registers.
template <int N> inline void setmaxnreg(const char* name) {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0);
    require_capability(name, 90, 90);
}
template <int N> inline void setmaxnreg_dec() { setmaxnreg<N>("setmaxnreg_dec"); }
template <int N> inline void setmaxnreg_inc() { setmaxnreg<N>("setmaxnreg_inc"); }
}  // namespace ptx
}  // namespace cuda_cpu

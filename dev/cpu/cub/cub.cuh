// CUB's primitives of warps and blocks: reductions, scans, loads and stores. (rewrite.py includes this file for the
// parts of cub, too.) They use shuffles and shared memory as CUB's default algorithms do; an algorithm that the
// template arguments name selects only the order in which BlockLoad and BlockStore access memory.
#pragma once

#include "../cuda_runtime.h"

namespace cub {
using Sum = std::plus<>;
struct Max { template <class T> T operator()(const T& x, const T& y) const { return x < y ? y : x; } };
struct Min { template <class T> T operator()(const T& x, const T& y) const { return y < x ? y : x; } };
struct NullType {};

template <class K, class V> struct KeyValuePair {
    using Key = K;
    using Value = V;
    K key;
    V value;
};
// Of equal values the one with the lower key wins.
struct ArgMax {
    template <class P> P operator()(const P& x, const P& y) const {
        return x.value < y.value || (x.value == y.value && y.key < x.key) ? y : x;
    }
};
struct ArgMin {
    template <class P> P operator()(const P& x, const P& y) const {
        return y.value < x.value || (x.value == y.value && y.key < x.key) ? y : x;
    }
};

// The result is valid in lane 0 of each logical warp.
template <class T, int LANES = 32, int = 0> class WarpReduce {
public:
    using TempStorage = NullType;
    explicit WarpReduce(TempStorage&) {}

    template <class Operation> T Reduce(T value, Operation operation, int valid = LANES) const {
        const int place = static_cast<int>(cuda_cpu::lane()) % LANES;
        const unsigned first = cuda_cpu::lane() / LANES * LANES, mask = (LANES < 32 ? (1u << LANES) - 1 : ~0u) << first;
        for (int distance = 1; distance < LANES; distance *= 2) {
            const T other = __shfl_down_sync(mask, value, static_cast<unsigned>(distance), LANES);
            if (place + distance < valid) value = operation(value, other);
        }
        return value;
    }
    T Sum(T value, int valid = LANES) const { return Reduce(value, cub::Sum(), valid); }
};

template <class T, int LANES = 32, int = 0> class WarpScan {
public:
    using TempStorage = NullType;
    explicit WarpScan(TempStorage&) {}

    template <class Operation> void InclusiveScan(T value, T& result, Operation operation) const {
        const int place = static_cast<int>(cuda_cpu::lane()) % LANES;
        for (int distance = 1; distance < LANES; distance *= 2) {
            const T other = __shfl_up_sync(mask(), value, static_cast<unsigned>(distance), LANES);
            if (place >= distance) value = operation(other, value);
        }
        result = value;
    }
    template <class Operation> void InclusiveScan(T value, T& result, Operation operation, T& aggregate) const {
        InclusiveScan(value, result, operation);
        aggregate = __shfl_sync(mask(), result, LANES - 1, LANES);
    }
    // Without an initial value the result is undefined in lane 0; here it is that of no values.
    template <class Operation, class... Aggregate>
    void ExclusiveScan(T value, T& result, T initial, Operation operation, Aggregate&... aggregate) const {
        T inclusive;
        InclusiveScan(value, inclusive, operation, aggregate...);
        const T before = __shfl_up_sync(mask(), inclusive, 1, LANES);
        result = cuda_cpu::lane() % LANES == 0 ? initial : operation(initial, before);
    }
    template <class... Aggregate> void InclusiveSum(T value, T& result, Aggregate&... aggregate) const {
        InclusiveScan(value, result, cub::Sum(), aggregate...);
    }
    template <class... Aggregate> void ExclusiveSum(T value, T& result, Aggregate&... aggregate) const {
        ExclusiveScan(value, result, T{}, cub::Sum(), aggregate...);
    }
    T Broadcast(T value, unsigned from) const { return __shfl_sync(mask(), value, static_cast<int>(from), LANES); }

private:
    static unsigned mask() { return (LANES < 32 ? (1u << LANES) - 1 : ~0u) << cuda_cpu::lane() / LANES * LANES; }
};

enum BlockReduceAlgorithm {
    BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS
};
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

namespace cuda_cpu_blocks {
inline int rank() { return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }

// Shared memory that the caller passes, or else that of the kernel.
template <class Storage> Storage& own_storage() {
    __shared__ Storage storage;
    return storage;
}
}  // namespace cuda_cpu_blocks

// The result is valid in thread 0. Each warp reduces its values by shuffles; thread 0 reduces the warps' results.
template <class T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1, int = 0>
class BlockReduce {
    static constexpr int THREADS = X * Y * Z, WARPS = (THREADS + 31) / 32;

public:
    struct TempStorage { T of_warp[WARPS]; };
    BlockReduce() : storage_(cuda_cpu_blocks::own_storage<TempStorage>()) {}
    explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

    template <class Operation> T Reduce(T value, Operation operation, int valid = THREADS) const {
        const int rank = cuda_cpu_blocks::rank(), warp = rank / 32;
        value = of_a_warp(value, operation, std::min(valid - warp * 32, 32));
        if (rank % 32 == 0) storage_.of_warp[warp] = value;
        __syncthreads();
        for (int other = 1; rank == 0 && other < WARPS && other * 32 < valid; other++)
            value = operation(value, storage_.of_warp[other]);
        return value;
    }
    template <int ITEMS, class Operation> T Reduce(T (&values)[ITEMS], Operation operation) const {
        T value = values[0];
        for (int i = 1; i < ITEMS; i++) value = operation(value, values[i]);
        return Reduce(value, operation);
    }
    template <class Values> T Sum(Values&& values) const { return Reduce(values, cub::Sum()); }
    T Sum(T value, int valid) const { return Reduce(value, cub::Sum(), valid); }

private:
    template <class Operation> static T of_a_warp(T value, Operation operation, int valid) {
        NullType none;
        constexpr int LANES = THREADS < 32 ? 1 << (31 - __builtin_clz(2 * THREADS - 1)) : 32;   // a power of 2
        return WarpReduce<T, LANES>(none).Reduce(value, operation, std::min(valid, THREADS));
    }
    TempStorage& storage_;
};

// Each warp scans its values; then each thread combines its result with those of the warps before.
template <class T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int = 0> class BlockScan {
    static constexpr int THREADS = X * Y * Z, WARPS = (THREADS + 31) / 32;

public:
    struct TempStorage { T of_warp[WARPS]; };
    BlockScan() : storage_(cuda_cpu_blocks::own_storage<TempStorage>()) {}
    explicit BlockScan(TempStorage& storage) : storage_(storage) {}

    template <int ITEMS, class Operation>
    void InclusiveScan(const T (&values)[ITEMS], T (&results)[ITEMS], Operation operation, T& aggregate) const {
        const Parts parts = scan(values, operation, aggregate);
        T running = parts.before;
        for (int i = 0; i < ITEMS; i++) {
            running = i == 0 && !parts.has_before ? values[0] : operation(running, values[i]);
            results[i] = running;
        }
    }
    template <int ITEMS, class Operation>
    void ExclusiveScan(const T (&values)[ITEMS], T (&results)[ITEMS], T initial, Operation operation,
                       T& aggregate) const {
        const Parts parts = scan(values, operation, aggregate);
        T running = parts.has_before ? operation(initial, parts.before) : initial;
        for (int i = 0; i < ITEMS; i++) {
            const T value = values[i];
            results[i] = running;
            running = operation(running, value);
        }
    }
    // One value per thread, without the total of the block, and sums.
    template <class Operation> void InclusiveScan(T value, T& result, Operation operation, T& aggregate) const {
        InclusiveScan(reinterpret_cast<T(&)[1]>(value), reinterpret_cast<T(&)[1]>(result), operation, aggregate);
    }
    template <class Operation>
    void ExclusiveScan(T value, T& result, T initial, Operation operation, T& aggregate) const {
        ExclusiveScan(reinterpret_cast<T(&)[1]>(value), reinterpret_cast<T(&)[1]>(result), initial, operation,
                      aggregate);
    }
    template <class Values, class Results, class Operation>
    void InclusiveScan(Values&& values, Results& results, Operation operation) const {
        T aggregate;
        InclusiveScan(values, results, operation, aggregate);
    }
    template <class Values, class Results, class Operation>
    void ExclusiveScan(Values&& values, Results& results, T initial, Operation operation) const {
        T aggregate;
        ExclusiveScan(values, results, initial, operation, aggregate);
    }
    template <class Values, class Results, class... Aggregate>
    void InclusiveSum(Values&& values, Results& results, Aggregate&... aggregate) const {
        InclusiveScan(values, results, cub::Sum(), aggregate...);
    }
    template <class Values, class Results, class... Aggregate>
    void ExclusiveSum(Values&& values, Results& results, Aggregate&... aggregate) const {
        ExclusiveScan(values, results, T{}, cub::Sum(), aggregate...);
    }

private:
    struct Parts {
        bool has_before;   // threads before this one
        T before;          // their total
    };
    template <int ITEMS, class Operation>
    Parts scan(const T (&values)[ITEMS], Operation operation, T& aggregate) const {
        const int rank = cuda_cpu_blocks::rank(), warp = rank / 32;
        const int last = std::min(warp * 32 + 31, THREADS - 1);
        T total = values[0];
        for (int i = 1; i < ITEMS; i++) total = operation(total, values[i]);
        for (unsigned distance = 1; distance < 32; distance *= 2) {
            const T other = __shfl_up_sync(~0u, total, distance);
            if (rank % 32 >= static_cast<int>(distance)) total = operation(other, total);
        }
        T before = __shfl_up_sync(~0u, total, 1);
        if (rank == last) storage_.of_warp[warp] = total;
        __syncthreads();
        bool has_before = rank % 32 != 0;
        aggregate = storage_.of_warp[0];
        for (int other = 0; other < WARPS; other++) {
            if (other > 0) aggregate = operation(aggregate, storage_.of_warp[other]);
            if (other + 1 != warp) continue;
            before = has_before ? operation(aggregate, before) : aggregate;
            has_before = true;
        }
        return {has_before, before};
    }
    TempStorage& storage_;
};

enum BlockLoadAlgorithm {
    BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE,
    BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED
};
enum BlockStoreAlgorithm {
    BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE,
    BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED
};

// Loads ITEMS consecutive elements per thread (striped: elements with a stride of the block). A transposition loads
// consecutive elements by consecutive threads and exchanges them in shared memory.
template <class T, int X, int ITEMS, BlockLoadAlgorithm ALGORITHM = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1, int = 0>
class BlockLoad {
    static constexpr int THREADS = X * Y * Z, ALL = THREADS * ITEMS;

public:
    static constexpr bool TRANSPOSES = ALGORITHM >= BLOCK_LOAD_TRANSPOSE;
    struct TempStorage { T items[TRANSPOSES ? ALL : 1]; };
    BlockLoad() : storage_(cuda_cpu_blocks::own_storage<TempStorage>()) {}
    explicit BlockLoad(TempStorage& storage) : storage_(storage) {}

    // Elements from `valid` on keep their value, or become the default.
    template <class Pointer, class... Default>
    void Load(Pointer from, T (&items)[ITEMS], int valid = ALL, Default... otherwise) const {
        const int rank = cuda_cpu_blocks::rank();
        ((void)std::fill_n(items, ITEMS, static_cast<T>(otherwise)), ...);
        for (int i = 0; i < ITEMS; i++) {
            const int at = TRANSPOSES || ALGORITHM == BLOCK_LOAD_STRIPED ? i * THREADS + rank : rank * ITEMS + i;
            if (at < valid) (TRANSPOSES ? storage_.items[at] : items[i]) = from[at];
        }
        if (!TRANSPOSES) return;
        __syncthreads();
        for (int i = 0; i < ITEMS; i++)
            if (rank * ITEMS + i < valid) items[i] = storage_.items[(rank * ITEMS + i) % ALL];
    }

private:
    TempStorage& storage_;
};

template <class T, int X, int ITEMS, BlockStoreAlgorithm ALGORITHM = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1, int = 0>
class BlockStore {
    static constexpr int THREADS = X * Y * Z, ALL = THREADS * ITEMS;

public:
    static constexpr bool TRANSPOSES = ALGORITHM >= BLOCK_STORE_TRANSPOSE;
    struct TempStorage { T items[TRANSPOSES ? ALL : 1]; };
    BlockStore() : storage_(cuda_cpu_blocks::own_storage<TempStorage>()) {}
    explicit BlockStore(TempStorage& storage) : storage_(storage) {}

    template <class Pointer> void Store(Pointer to, T (&items)[ITEMS], int valid = ALL) const {
        const int rank = cuda_cpu_blocks::rank();
        for (int i = 0; TRANSPOSES && i < ITEMS; i++) storage_.items[(rank * ITEMS + i) % ALL] = items[i];
        if (TRANSPOSES) __syncthreads();
        for (int i = 0; i < ITEMS; i++) {
            const int at = TRANSPOSES || ALGORITHM == BLOCK_STORE_STRIPED ? i * THREADS + rank : rank * ITEMS + i;
            if (at < valid) to[at] = TRANSPOSES ? storage_.items[at] : items[i];
        }
    }

private:
    TempStorage& storage_;
};
}  // namespace cub

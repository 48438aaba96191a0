// CUB's reductions and scans of warps and blocks. (rewrite.py includes this file for the parts of cub, too.) They use
// shuffles and shared memory as CUB's default algorithms do; an algorithm that the template arguments name is ignored.
#pragma once

#include "../cuda_runtime.h"

namespace cub {
using Sum = std::plus<>;
struct Max { template <class T> T operator()(const T& x, const T& y) const { return x < y ? y : x; } };
struct Min { template <class T> T operator()(const T& x, const T& y) const { return y < x ? y : x; } };
struct NullType {};

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

// The shared memory of a block's primitive: what the caller passes, or else the kernel's own.
template <class T, int COUNT> class cuda_cpu_primitive {
public:
    struct TempStorage { T items[COUNT]; };
    cuda_cpu_primitive() : storage_(own().items) {}
    explicit cuda_cpu_primitive(TempStorage& storage) : storage_(storage.items) {}

protected:
    static int rank() { return static_cast<int>(cuda_cpu::this_thread()); }
    T* const storage_;

private:
    static TempStorage& own() {
        __shared__ TempStorage storage;
        return storage;
    }
};

// The result is valid in thread 0. Each warp reduces its values by shuffles; thread 0 reduces the warps' results.
template <class T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1, int = 0>
class BlockReduce : public cuda_cpu_primitive<T, (X * Y * Z + 31) / 32> {
    static constexpr int THREADS = X * Y * Z, WARPS = (THREADS + 31) / 32;

public:
    using cuda_cpu_primitive<T, WARPS>::cuda_cpu_primitive;

    template <class Operation> T Reduce(T value, Operation operation, int valid = THREADS) const {
        constexpr int LANES = THREADS < 32 ? 1 << (31 - __builtin_clz(2 * THREADS - 1)) : 32;   // a power of 2
        const int rank = this->rank(), warp = rank / 32;
        NullType none;
        value = WarpReduce<T, LANES>(none).Reduce(value, operation, std::min({valid - warp * 32, 32, THREADS}));
        if (rank % 32 == 0) this->storage_[warp] = value;
        __syncthreads();
        for (int other = 1; rank == 0 && other < WARPS && other * 32 < valid; other++)
            value = operation(value, this->storage_[other]);
        return value;
    }
    template <int ITEMS, class Operation> T Reduce(T (&values)[ITEMS], Operation operation) const {
        return Reduce(std::accumulate(values + 1, values + ITEMS, values[0], operation), operation);
    }
    template <class Values> T Sum(Values&& values) const { return Reduce(values, cub::Sum()); }
    T Sum(T value, int valid) const { return Reduce(value, cub::Sum(), valid); }
};

// Each warp scans its values; then each thread combines its result with those of the warps before.
template <class T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int = 0>
class BlockScan : public cuda_cpu_primitive<T, (X * Y * Z + 31) / 32> {
    static constexpr int THREADS = X * Y * Z, WARPS = (THREADS + 31) / 32;

public:
    using cuda_cpu_primitive<T, WARPS>::cuda_cpu_primitive;

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
        const int rank = this->rank(), warp = rank / 32;
        NullType none;
        T total = std::accumulate(values + 1, values + ITEMS, values[0], operation);
        WarpScan<T>(none).InclusiveScan(total, total, operation);
        T before = __shfl_up_sync(~0u, total, 1);
        if (rank == std::min(warp * 32 + 31, THREADS - 1)) this->storage_[warp] = total;
        __syncthreads();
        bool has_before = rank % 32 != 0;
        aggregate = this->storage_[0];
        for (int other = 0; other < WARPS; other++) {
            if (other > 0) aggregate = operation(aggregate, this->storage_[other]);
            if (other + 1 != warp) continue;
            before = has_before ? operation(aggregate, before) : aggregate;
            has_before = true;
        }
        return {has_before, before};
    }
};

}  // namespace cub

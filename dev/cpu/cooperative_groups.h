// Cooperative groups: thread blocks, and tiles of up to a warp. Not emulated: coalesced groups (threads run one after
// another), clusters and grids.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {
class thread_block {
public:
    static void sync() { __syncthreads(); }
    static unsigned thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned size() { return num_threads(); }
};
inline thread_block this_thread_block() { return {}; }

// Size consecutive lanes of a warp. The meta group is the set of all tiles of the partitioned group.
template <unsigned Size, class Parent = void> class thread_block_tile {
    static_assert(Size > 0 && Size <= warpSize && (Size & (Size - 1)) == 0,
                  "a tile must have 1, 2, 4, 8, 16 or 32 threads, at most a warp");

public:
    thread_block_tile(unsigned rank, unsigned count) : rank_(rank), count_(count) {}
    template <class Other> thread_block_tile(const thread_block_tile<Size, Other>& other)
        : rank_(other.meta_group_rank()), count_(other.meta_group_size()) {}

    static unsigned thread_rank() { return cuda_cpu::lane() % Size; }
    static constexpr unsigned num_threads() { return Size; }
    static constexpr unsigned size() { return Size; }
    unsigned meta_group_rank() const { return rank_; }
    unsigned meta_group_size() const { return count_; }

    static void sync() { __syncwarp(mask()); }
    template <class T> static T shfl(T x, int from) { return __shfl_sync(mask(), x, from, Size); }
    template <class T> static T shfl_xor(T x, int flip) { return __shfl_xor_sync(mask(), x, flip, Size); }
    template <class T> static T shfl_up(T x, unsigned delta) { return __shfl_up_sync(mask(), x, delta, Size); }
    template <class T> static T shfl_down(T x, unsigned delta) { return __shfl_down_sync(mask(), x, delta, Size); }
    static int any(int yes) { return __any_sync(mask(), yes); }
    static int all(int yes) { return __all_sync(mask(), yes); }
    static unsigned ballot(int yes) { return __ballot_sync(mask(), yes) >> first_lane(); }

private:
    static unsigned first_lane() { return cuda_cpu::lane() / Size * Size; }
    static unsigned mask() { return (0xffffffffu >> (32 - Size)) << first_lane(); }
    unsigned rank_, count_;
};

template <unsigned Size, class Parent> inline thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
    return {parent.thread_rank() / Size, (parent.num_threads() + Size - 1) / Size};
}

template <class Group> inline void sync(const Group& group) { group.sync(); }
}  // namespace cooperative_groups

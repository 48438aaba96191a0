// Groups of threads: a block, and tiles of up to a warp. Groups of whichever lanes happen to run together are not here,
// as threads run one after another; nor are those of clusters and grids.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

class thread_block {
public:
    static void sync() { __syncthreads(); }
    static unsigned thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned size() { return num_threads(); }
    static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
    static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static dim3 dim_threads() { return blockDim; }
    static dim3 group_dim() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

// As many neighbouring lanes of a warp as Size says. Where the group that was cut into tiles is known, so is the
// place of a tile among its like.
template <unsigned Size, class Parent = void>
class thread_block_tile {
    static_assert(Size > 0 && Size <= warpSize && (Size & (Size - 1)) == 0,
                  "a tile has 1, 2, 4, 8, 16 or 32 threads, and no more than a warp");

public:
    thread_block_tile(unsigned rank, unsigned count) : rank_(rank), count_(count) {}
    template <class Other>
    thread_block_tile(const thread_block_tile<Size, Other>& other)
        : rank_(other.meta_group_rank()), count_(other.meta_group_size())
    {
    }

    static unsigned thread_rank() { return cuda_cpu::lane() % Size; }
    static constexpr unsigned num_threads() { return Size; }
    static constexpr unsigned size() { return Size; }
    unsigned meta_group_rank() const { return rank_; }
    unsigned meta_group_size() const { return count_; }

    static void sync() { __syncwarp(mask()); }
    template <class T> static T shfl(T value, unsigned from)
    {
        return __shfl_sync(mask(), value, static_cast<int>(from), Size);
    }
    template <class T> static T shfl_xor(T value, unsigned flip)
    {
        return __shfl_xor_sync(mask(), value, static_cast<int>(flip), Size);
    }
    template <class T> static T shfl_up(T value, unsigned distance)
    {
        return __shfl_up_sync(mask(), value, distance, Size);
    }
    template <class T> static T shfl_down(T value, unsigned distance)
    {
        return __shfl_down_sync(mask(), value, distance, Size);
    }
    static int any(int yes) { return __any_sync(mask(), yes); }
    static int all(int yes) { return __all_sync(mask(), yes); }
    static unsigned ballot(int yes) { return __ballot_sync(mask(), yes) >> first_lane(); }

private:
    static unsigned first_lane() { return cuda_cpu::lane() / Size * Size; }
    static unsigned mask() { return (0xffffffffu >> (32 - Size)) << first_lane(); }
    unsigned rank_, count_;
};

template <unsigned Size>
inline thread_block_tile<Size, thread_block> tiled_partition(const thread_block& block)
{
    return {block.thread_rank() / Size, (block.num_threads() + Size - 1) / Size};
}
template <unsigned Size, unsigned ParentSize, class Grandparent>
inline thread_block_tile<Size, thread_block_tile<ParentSize, Grandparent>>
tiled_partition(const thread_block_tile<ParentSize, Grandparent>& parent)
{
    static_assert(Size <= ParentSize, "a tile is no larger than what it is a part of");
    return {parent.thread_rank() / Size, ParentSize / Size};
}

// Any of them, its size known only when it runs.
class thread_group {
public:
    thread_group(const thread_block& block) : size_(block.num_threads()), is_block_(true) {}
    template <unsigned Size, class Parent>
    thread_group(const thread_block_tile<Size, Parent>&) : thread_group(Size) {}
    explicit thread_group(unsigned lanes) : size_(lanes), is_block_(false) {}

    unsigned size() const { return size_; }
    unsigned num_threads() const { return size_; }
    unsigned thread_rank() const { return is_block_ ? thread_block::thread_rank() : cuda_cpu::lane() % size_; }
    void sync() const
    {
        if (is_block_) __syncthreads();
        else __syncwarp((0xffffffffu >> (32 - size_)) << cuda_cpu::lane() / size_ * size_);
    }

private:
    unsigned size_;
    bool is_block_;
};
inline thread_group tiled_partition(const thread_group&, unsigned lanes) { return thread_group(lanes); }

template <class Group> inline void sync(const Group& group) { group.sync(); }
template <class Group> inline unsigned thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group> inline unsigned group_size(const Group& group) { return group.size(); }

}  // namespace cooperative_groups

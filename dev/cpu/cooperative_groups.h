// Cooperative groups with CUDA's names: blocks, tiles and coalesced threads of a warp, grids. Tiles need warps of 32
// lanes; those of more than 32 threads, and clusters, are not emulated.
#pragma once

#include "cuda_runtime.h"

#include <array>

namespace cooperative_groups {
namespace cuda_cpu_groups {
// Returns the n-th set bit of a mask, as the index of a lane; 31 if there are fewer.
inline unsigned lane_of(unsigned mask, unsigned n) {
    for (; n > 0 && (mask & (mask - 1)) != 0; n--) mask &= mask - 1;
    return static_cast<unsigned>(__builtin_ctz(mask));
}
// Returns those bits whose lanes are in the mask, next to each other.
inline unsigned packed(unsigned bits, unsigned mask) {
    unsigned result = 0;
    for (unsigned n = 0; mask != 0; mask &= mask - 1, n++) result |= (bits >> __builtin_ctz(mask) & 1) << n;
    return result;
}

// Returns the values of all threads of a group of a warp, in the order of their ranks.
template <class T> std::array<T, 32> all_values(unsigned mask, T value) {
    struct Operand { T value; std::array<T, 32> all; } mine{value, {}};
    cuda_cpu::warp_collective("__shfl_sync", mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned to = lanes; to != 0; to &= to - 1) {
            size_t n = 0;
            for (unsigned from = lanes; from != 0; from &= from - 1)
                static_cast<Operand*>(operands[__builtin_ctz(to)])->all[n++] =
                    static_cast<Operand*>(operands[__builtin_ctz(from)])->value;
        }
    });
    return mine.all;
}
}  // namespace cuda_cpu_groups

// A group of any kind: the threads of a warp in the mask, or with mask 0 the block.
class thread_group {
public:
    CUDA_CPU_INSTRUCTION void sync() const {
        if (mask_ == 0) __syncthreads();
        else __syncwarp(mask_);
    }
    unsigned size() const {
        return mask_ == 0 ? cuda_cpu::threads_of_block() : static_cast<unsigned>(__builtin_popcount(mask_));
    }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        if (mask_ == 0) return cuda_cpu::this_thread();
        return static_cast<unsigned>(__builtin_popcount(mask_ & ((1u << cuda_cpu::lane()) - 1)));
    }
    // Returns the lanes of the tile of `size` threads of this group that this thread is in.
    unsigned lanes_of_tile(unsigned size) const {
        const unsigned first = thread_rank() / size * size;
        if (mask_ == 0) return (size < 32 ? (1u << size) - 1 : ~0u) << first % 32;
        unsigned rest = mask_, lanes = 0;
        for (unsigned n = 0; rest != 0; rest &= rest - 1, n++) lanes |= n / size == first / size ? rest & -rest : 0;
        return lanes;
    }

protected:
    explicit thread_group(unsigned mask) : mask_(mask) {}
    unsigned mask_;
};

class thread_block : public thread_group {
public:
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }

private:
    thread_block() : thread_group(0) {}
    friend thread_block this_thread_block();
};
inline thread_block this_thread_block() { return {}; }

// Some threads of one warp. Ranks are those within the group.
class coalesced_group : public thread_group {
public:
    coalesced_group(unsigned mask, unsigned number, unsigned groups)
        : thread_group(mask), number_(number), groups_(groups) {}
    unsigned meta_group_rank() const { return number_; }
    unsigned meta_group_size() const { return groups_; }

    template <class T> T shfl(T value, int from) const { return read(value, static_cast<unsigned>(from) % size()); }
    template <class T> T shfl_down(T value, unsigned distance) const {
        return read(value, thread_rank() + distance < size() ? thread_rank() + distance : thread_rank());
    }
    template <class T> T shfl_up(T value, unsigned distance) const {
        return read(value, thread_rank() >= distance ? thread_rank() - distance : thread_rank());
    }
    template <class T> T shfl_xor(T value, unsigned flip) const {
        return read(value, (thread_rank() ^ flip) < size() ? thread_rank() ^ flip : thread_rank());
    }
    int any(int yes) const { return __any_sync(mask_, yes); }
    int all(int yes) const { return __all_sync(mask_, yes); }
    unsigned ballot(int yes) const { return cuda_cpu_groups::packed(__ballot_sync(mask_, yes), mask_); }
    template <class T> unsigned match_any(T value) const {
        return cuda_cpu_groups::packed(__match_any_sync(mask_, value), mask_);
    }
    template <class T> unsigned match_all(T value, int& all_same) const {
        return cuda_cpu_groups::packed(__match_all_sync(mask_, value, &all_same), mask_);
    }
    template <class T> std::array<T, 32> all_values(T value) const { return cuda_cpu_groups::all_values(mask_, value); }

private:
    template <class T> T read(T value, unsigned rank) const {
        return cuda_cpu::shuffle("__shfl_sync", mask_, value, cuda_cpu_groups::lane_of(mask_, rank));
    }
    unsigned number_, groups_;
};

template <unsigned SIZE, class Parent = void> class thread_block_tile : public coalesced_group {
    static_assert(SIZE <= 32 && (SIZE & (SIZE - 1)) == 0, "tiles of more than 32 threads are not emulated");

public:
    using coalesced_group::coalesced_group;
    template <class Other> thread_block_tile(const thread_block_tile<SIZE, Other>& other) : coalesced_group(other) {}
    static constexpr unsigned size() { return SIZE; }
    static constexpr unsigned num_threads() { return SIZE; }
};

template <unsigned SIZE, class Parent> thread_block_tile<SIZE, Parent> tiled_partition(const Parent& parent) {
    return {parent.lanes_of_tile(SIZE), parent.thread_rank() / SIZE, (parent.size() + SIZE - 1) / SIZE};
}
inline coalesced_group tiled_partition(const coalesced_group& parent, unsigned size) {
    return {parent.lanes_of_tile(size), parent.thread_rank() / size, (parent.size() + size - 1) / size};
}
inline thread_group tiled_partition(const thread_group& parent, unsigned size) {
    return coalesced_group(parent.lanes_of_tile(size), 0, 1);
}
inline coalesced_group coalesced_threads(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {__activemask(file, line), 0, 1};
}
template <class Group> CUDA_CPU_INSTRUCTION void sync(const Group& group) { group.sync(); }
template <class Group> auto thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group> auto group_size(const Group& group) { return group.size(); }

// All threads of a launch by cudaLaunchCooperativeKernel.
class grid_group {
public:
    static bool is_valid() { return cuda_cpu::launched->cooperative; }
    CUDA_CPU_INSTRUCTION static void sync() {
        if (cuda_cpu::watch::is_removed("grid.sync", cuda_cpu::watch::call_site())) return;
        if (cuda_cpu::block == nullptr) cuda_cpu::die("grid.sync() in a launch without cudaLaunchCooperativeKernel");
        cuda_cpu::block->wait_for_grid();
    }
    static dim3 group_dim() { return gridDim; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 block_index() { return blockIdx; }
    static unsigned long long num_blocks() { return uint64_t{gridDim.x} * gridDim.y * gridDim.z; }
    static unsigned long long block_rank() {
        return blockIdx.x + uint64_t{gridDim.x} * (blockIdx.y + uint64_t{gridDim.y} * blockIdx.z);
    }
    static unsigned long long size() { return num_blocks() * cuda_cpu::threads_of_block(); }
    static unsigned long long num_threads() { return size(); }
    static unsigned long long thread_rank() {
        return block_rank() * cuda_cpu::threads_of_block() + cuda_cpu::this_thread();
    }
};
inline grid_group this_grid() { return {}; }
}  // namespace cooperative_groups

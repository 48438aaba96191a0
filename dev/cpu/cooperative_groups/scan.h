// Running totals over a tile's values, in the order of its threads: with one's own value, or without.
#pragma once

#include "reduce.h"

namespace cooperative_groups {

template <unsigned Size, class Parent, class T, class Operation>
inline T inclusive_scan(const thread_block_tile<Size, Parent>& tile, T value, Operation operation)
{
    for (unsigned distance = 1; distance < Size; distance *= 2) {
        const T before = tile.shfl_up(value, distance);
        if (tile.thread_rank() >= distance) value = operation(before, value);
    }
    return value;
}
template <unsigned Size, class Parent, class T>
inline T inclusive_scan(const thread_block_tile<Size, Parent>& tile, T value)
{
    return inclusive_scan(tile, value, plus<T>());
}

// The first thread gets T{}, as CUDA's does for sums.
template <unsigned Size, class Parent, class T, class Operation>
inline T exclusive_scan(const thread_block_tile<Size, Parent>& tile, T value, Operation operation)
{
    const T before = tile.shfl_up(inclusive_scan(tile, value, operation), 1);
    return tile.thread_rank() == 0 ? T{} : before;
}
template <unsigned Size, class Parent, class T>
inline T exclusive_scan(const thread_block_tile<Size, Parent>& tile, T value)
{
    return exclusive_scan(tile, value, plus<T>());
}

}  // namespace cooperative_groups

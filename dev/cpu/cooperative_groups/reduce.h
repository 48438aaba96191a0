// Reduction over the threads of a tile; every thread gets the result.
#pragma once

#include "../cooperative_groups.h"

namespace cooperative_groups {
template <class T> struct plus { T operator()(T x, T y) const { return x + y; } };
template <class T> struct less { T operator()(T x, T y) const { return y < x ? y : x; } };
template <class T> struct greater { T operator()(T x, T y) const { return x < y ? y : x; } };

// A butterfly reduction: all threads combine the same pairs and get the same bits.
template <unsigned Size, class Parent, class T, class Operation>
__forceinline__ T reduce(const thread_block_tile<Size, Parent>& tile, T value, Operation operation) {
    for (unsigned flip = Size / 2; flip > 0; flip /= 2) value = operation(value, tile.shfl_xor(value, flip));
    return value;
}
}  // namespace cooperative_groups

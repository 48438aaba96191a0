// Reductions, scans and copies by cooperative groups. (rewrite.py includes this file for scan.h and memcpy_async.h
// too.)
#pragma once

#include "../cooperative_groups.h"
#include "../cuda_pipeline.h"

namespace cooperative_groups {
template <class T = void> using plus = std::plus<T>;
template <class T = void> using bit_and = std::bit_and<T>;
template <class T = void> using bit_or = std::bit_or<T>;
template <class T = void> using bit_xor = std::bit_xor<T>;
template <class T = void> struct less {   // the minimum
    template <class X> X operator()(const X& x, const X& y) const { return y < x ? y : x; }
};
template <class T = void> struct greater {   // the maximum
    template <class X> X operator()(const X& x, const X& y) const { return x < y ? y : x; }
};

// Reduces the values of the ranks below `end`.
template <class T, class Operation>
T reduce_first(const std::array<T, 32>& values, unsigned end, Operation& operation) {
    T result = values[0];
    for (unsigned rank = 1; rank < end; rank++) result = operation(result, values[rank]);
    return result;
}
template <class Group, class T, class Operation> T reduce(const Group& group, T value, Operation operation) {
    return reduce_first(group.all_values(value), group.size(), operation);
}
template <class Group, class T, class Operation = plus<>>
T inclusive_scan(const Group& group, T value, Operation operation = {}) {
    return reduce_first(group.all_values(value), group.thread_rank() + 1, operation);
}
template <class Group, class T, class Operation = plus<>>
T exclusive_scan(const Group& group, T value, Operation operation = {}) {
    const auto values = group.all_values(value);
    return group.thread_rank() == 0 ? T{} : reduce_first(values, group.thread_rank(), operation);
}

// ---- copies: all threads of the group copy parts of one array

template <class Group, class Shape>
CUDA_CPU_INSTRUCTION void memcpy_async(const Group& group, void* to, const void* from, const Shape& bytes) {
    cuda_cpu::copy_part(group.thread_rank(), group.size(), to, from, bytes);
    __pipeline_commit();
}
// Blocks until all threads of the group have completed their copies, or (wait_prior) all but those of the last N calls.
template <unsigned N, class Group> CUDA_CPU_INSTRUCTION void wait_prior(const Group& group) {
    __pipeline_wait_prior(N);
    group.sync();
}
template <class Group> CUDA_CPU_INSTRUCTION void wait(const Group& group) { wait_prior<0>(group); }
}  // namespace cooperative_groups

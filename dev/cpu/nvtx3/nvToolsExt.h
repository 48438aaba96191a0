// NVTX on a CPU: a stack of the open ranges' names. Error reports and dev/inspect name a kernel by the innermost one.
#pragma once

#include <string>
#include <vector>

namespace cuda_cpu {
// The names of the host thread's open ranges, innermost last.
inline std::vector<std::string>& open_ranges() {
    static thread_local std::vector<std::string> names;
    return names;
}
}  // namespace cuda_cpu

// Both return the nesting level of the range, from 0, as NVTX does. A pop without an open range returns -2.
inline int nvtxRangePushA(const char* name) {
    cuda_cpu::open_ranges().emplace_back(name);
    return static_cast<int>(cuda_cpu::open_ranges().size()) - 1;
}

inline int nvtxRangePop() {
    auto& names = cuda_cpu::open_ranges();
    if (names.empty()) return -2;
    names.pop_back();
    return static_cast<int>(names.size());
}

// NVTX for the CPU: the names of the ranges that are open, innermost last. Nothing draws them; the
// launcher quotes the innermost one when it reports an error in a kernel (see cuda_runtime.h).
#pragma once

#include <string>
#include <vector>

namespace cuda_cpu {

inline std::vector<std::string>& open_ranges()
{
    static thread_local std::vector<std::string> names;
    return names;
}

}  // namespace cuda_cpu

// Both return how many ranges were open around this one, as NVTX does; a pop too many gives -2.
inline int nvtxRangePushA(const char* name)
{
    cuda_cpu::open_ranges().emplace_back(name);
    return static_cast<int>(cuda_cpu::open_ranges().size()) - 1;
}

inline int nvtxRangePop()
{
    auto& names = cuda_cpu::open_ranges();
    if (names.empty()) return -2;
    names.pop_back();
    return static_cast<int>(names.size());
}

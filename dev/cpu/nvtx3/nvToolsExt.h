// NVTX on a CPU: a stack of the open ranges' names. Error reports and dev/inspect name a kernel by the innermost one.
#pragma once

#include <stdint.h>

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

inline int nvtxRangePush(const char* name) { return nvtxRangePushA(name); }   // a macro in NVTX

inline int nvtxRangePop() {
    auto& names = cuda_cpu::open_ranges();
    if (names.empty()) return -2;
    names.pop_back();
    return static_cast<int>(names.size());
}

// A range that may end in another thread, a mark, and names: errors and dev/inspect do not quote them.
using nvtxRangeId_t = unsigned long long;
inline nvtxRangeId_t nvtxRangeStartA(const char*) { return 0; }
inline nvtxRangeId_t nvtxRangeStart(const char*) { return 0; }
inline void nvtxRangeEnd(nvtxRangeId_t) {}
inline void nvtxMarkA(const char*) {}
inline void nvtxMark(const char*) {}

constexpr unsigned NVTX_VERSION = 2, NVTX_EVENT_ATTRIB_STRUCT_SIZE = 48;
enum { NVTX_COLOR_UNKNOWN = 0, NVTX_COLOR_ARGB = 1, NVTX_MESSAGE_UNKNOWN = 0, NVTX_MESSAGE_TYPE_ASCII = 1 };
struct nvtxEventAttributes_t {
    unsigned short version, size;
    unsigned category;
    int colorType;
    unsigned color;
    int payloadType, reserved;
    union { uint64_t ullValue; int64_t llValue; double dValue; } payload;
    int messageType;
    union { const char* ascii; } message;
};
inline int nvtxRangePushEx(const nvtxEventAttributes_t* event) {
    return nvtxRangePushA(event->messageType == NVTX_MESSAGE_TYPE_ASCII ? event->message.ascii : "");
}

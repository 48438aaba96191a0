// The host's memory, which kernels must not access: what malloc and new returned to host code, and the host's variables
// on the stack. Memory that was allocated while the device works (DeviceWork in cuda_runtime.h) belongs to a kernel, to
// the emulator, or is pinned. Included by dev/inspect/recorder.cpp only: it replaces malloc.
#pragma once

#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include <array>
#include <map>
#include <mutex>
#include <vector>

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* place, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* place);
}

namespace cuda_cpu {
class HostMemory {
public:
    static HostMemory& of_program() {
        static HostMemory* const value = new HostMemory;
        return *value;
    }

    static bool device_works() { return device_works_; }
    static bool is_changing() { return is_own_; }
    // The device begins or ends to work. frame: the host's variables on this thread's stack are above it.
    void set_device_works(bool begins, const void* frame) {
        device_works_ = begins;
        frame_ = end_of_stack_ = 0;
        pthread_attr_t attributes;
        if (frame == nullptr || pthread_getattr_np(pthread_self(), &attributes) != 0) return;
        void* stack = nullptr;
        size_t bytes = 0;
        pthread_attr_getstack(&attributes, &stack, &bytes);
        pthread_attr_destroy(&attributes);
        frame_ = reinterpret_cast<uintptr_t>(frame);
        end_of_stack_ = reinterpret_cast<uintptr_t>(stack) + bytes;
    }

    // Returns whether [begin, begin + bytes) contains the host's memory.
    bool overlaps(uintptr_t begin, size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (overlaps(registered_, begin, bytes)) return false;
        return (begin < end_of_stack_ && begin + bytes > frame_) || overlaps(blocks_, begin, bytes);
    }

    // cudaHostRegister: kernels may access a range of the host's memory until this is called with 0 bytes.
    static void registered(const void* place, size_t bytes) {
        change([=](HostMemory& memory) {
            memory.registered_.erase(number_of(place));
            if (bytes > 0) memory.registered_[number_of(place)] = bytes;
        });
    }

    // Note what malloc returns and free gets.
    static void* added(void* place, size_t bytes) {
        if (place != nullptr && !device_works_)
            change([=](HostMemory& memory) { memory.blocks_[number_of(place)] = bytes; });
        return place;
    }
    static void removed(void* place) {
        if (place != nullptr) change([=](HostMemory& memory) { memory.blocks_.erase(number_of(place)); });
    }

private:
    using Blocks = std::map<uintptr_t, size_t>;
    static bool overlaps(const Blocks& blocks, uintptr_t begin, size_t bytes) {
        const auto next = blocks.lower_bound(begin + bytes);
        return next != blocks.begin() && std::prev(next)->first + std::prev(next)->second > begin;
    }
    static uintptr_t number_of(const void* place) { return reinterpret_cast<uintptr_t>(place); }
    template <class Change> static void change(Change change) {
        if (is_own_) return;
        is_own_ = true;
        {
            HostMemory& memory = of_program();
            const std::lock_guard<std::mutex> lock(memory.mutex_);
            change(memory);
        }
        is_own_ = false;
    }

    inline static thread_local bool is_own_ = false;   // this class calls malloc
    std::mutex mutex_;
    Blocks blocks_, registered_;
    inline static bool device_works_ = false;
    uintptr_t frame_ = 0, end_of_stack_ = 0;
};

// Returns the call stack of the code that a signal interrupted, innermost first.
inline __attribute__((noinline)) std::vector<uintptr_t> interrupted() {
    constexpr size_t skipped = 3;   // the frames of this function, the handler and the signal
    std::array<void*, 64> frames;
    const auto count = static_cast<size_t>(backtrace(frames.data(), static_cast<int>(frames.size())));
    std::vector<uintptr_t> stack;
    for (size_t i = skipped; i < count; i++) stack.push_back(reinterpret_cast<uintptr_t>(frames[i]));
    if (!stack.empty()) stack[0]++;   // the others are return addresses, after their instructions
    return stack;
}
}  // namespace cuda_cpu

extern "C" {
void* malloc(size_t bytes) { return cuda_cpu::HostMemory::added(__libc_malloc(bytes), bytes); }
void* calloc(size_t count, size_t bytes) {
    return cuda_cpu::HostMemory::added(__libc_calloc(count, bytes), count * bytes);
}
void* realloc(void* place, size_t bytes) {
    cuda_cpu::HostMemory::removed(place);
    return cuda_cpu::HostMemory::added(__libc_realloc(place, bytes), bytes);
}
void* memalign(size_t alignment, size_t bytes) {
    return cuda_cpu::HostMemory::added(__libc_memalign(alignment, bytes), bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** place, size_t alignment, size_t bytes) {
    *place = memalign(alignment, bytes);
    return *place == nullptr ? ENOMEM : 0;
}
void free(void* place) {
    cuda_cpu::HostMemory::removed(place);
    __libc_free(place);
}
}

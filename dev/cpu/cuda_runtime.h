// The CUDA runtime on a CPU, for programs that g++ compiles with this folder first on its include path (README.md).
// Work is complete when the call that issues it returns. There are two exceptions: a stream in capture records work for
// a graph, and on an emulated GPU (card.h) work is queued in its stream (streams.h).
//
// Map: qualifiers · launches · memory · streams and events · graphs · the device
#pragma once

#define CUDA_ON_CPU 1
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif
static_assert(WARP_SIZE == 1 || WARP_SIZE == 32, "WARP_SIZE must be 1 or 32");

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if !__has_include(<boost/context/detail/fcontext.hpp>)
#error "Boost.Context was not found: kernels that synchronise need it. Debian, Ubuntu: apt install libboost-context-dev"
#endif
#include <boost/context/detail/fcontext.hpp>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "card.h"
#include "errors.h"
#include "nvtx3/nvToolsExt.h"
#include "rounding.h"
#include "streams.h"
#include "symbols.h"
#include "threads.h"
#include "vectors.h"
#include "watch.h"

// ==== qualifiers ========================================================================================

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ thread_local  // a worker runs one block at a time, so its thread-local storage is the block's
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#include "intrinsics.h"

#include "block.h"

// ==== launches ==========================================================================================

struct cudaLaunchAttribute;  // not emulated
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace cuda_cpu {
// The bytes of dynamic shared memory that cudaFuncSetAttribute was asked for, by kernel.
inline std::unordered_map<const void*, size_t>& asked_shared_bytes() {
    static std::unordered_map<const void*, size_t> asked;
    return asked;
}

// Returns the bytes of a kernel's __shared__ arrays; 0 without an emulated GPU, because reading the symbols is slow.
// Those of the functions that it calls are known after its first block (Symbols::note_used).
inline size_t static_shared_bytes(const void* kernel) {
    return card() == nullptr ? 0 : Symbols::of_program().bytes_of(kernel);
}

// Returns whether a block can have `dynamic` bytes besides the kernel's arrays, after cudaFuncSetAttribute(asked).
inline bool shared_memory_fits(const void* kernel, size_t dynamic, size_t asked) {
    const size_t arrays = static_shared_bytes(kernel);
    if (dynamic > asked) return arrays + dynamic <= default_shared_bytes;
    return arrays + asked <= (card() == nullptr ? max_shared_bytes : card()->capability.shared_per_block());
}

// Ends the program if it emulates a GPU but is built for warps of one thread. (This function is not in card.h because
// cublasLt.cpp, which is compiled once for both widths, must not depend on WARP_SIZE.)
inline void require_full_warps() {
    if (WARP_SIZE == 32 || card() == nullptr) return;
    fprintf(stderr, "CUDA_CPU_CARD is \"%s\"; emulating a GPU needs a build with -DWARP_SIZE=32\n", card()->key);
    exit(2);
}

// Returns the error of a launch with this configuration. The limits hold for every GPU that can be emulated.
// (Programming Guide, "Technical Specifications per Compute Capability".)
inline cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel) {
    constexpr unsigned max_blocks_x = 0x7fffffff, max_blocks_yz = 65535, max_threads_z = 64;
    const dim3 g = config.gridDim, b = config.blockDim;
    require_full_warps();
    if (kernel == nullptr) return cudaErrorInvalidValue;
    if (g.x == 0 || g.y == 0 || g.z == 0 || b.x == 0 || b.y == 0 || b.z == 0) return cudaErrorInvalidConfiguration;
    if (g.x > max_blocks_x || g.y > max_blocks_yz || g.z > max_blocks_yz) return cudaErrorInvalidConfiguration;
    if (b.x > max_threads || b.y > max_threads || b.z > max_threads_z) return cudaErrorInvalidConfiguration;
    if (b.x * b.y * b.z > max_threads) return cudaErrorInvalidConfiguration;
    if (config.numAttrs > 0) return cudaErrorNotSupported;
    return shared_memory_fits(kernel, config.dynamicSmemBytes, asked_shared_bytes()[kernel]) ? cudaSuccess
                                                                                             : cudaErrorInvalidValue;
}

// Prepares dynamic shared memory for a block. Tells AddressSanitizer where it ends. Under a seed, and on an emulated
// GPU, fills it with NaN, so that a kernel cannot use values that the previous block left there.
struct SharedMemory {
    static void prepare(size_t bytes, bool fill) {
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(dynamic_shared_memory, bytes);
        ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(dynamic_shared_memory) + bytes, max_shared_bytes - bytes);
#endif
        if (fill) memset(static_cast<void*>(dynamic_shared_memory), 0xff, bytes);
    }
    ~SharedMemory() { prepare(max_shared_bytes, false); }  // unpoisons the memory before the worker's thread ends
};

// Prepares the worker for a launch.
inline void begin(const Launch& launch) {
    static thread_local SharedMemory shared_memory;
    shared_memory.prepare(launch.shared_bytes, false);
    threadIdx = {0, 0, 0};
    blockDim = launch.block;
    gridDim = launch.grid;
    launched = &launch;
    block = nullptr;
    if (launch.block.x * launch.block.y * launch.block.z > 1) {
        block = &Block::of_this_worker();
        block->prepare(launch);
    }
}

// Runs one block; number = blockIdx.x + gridDim.x (blockIdx.y + gridDim.y blockIdx.z).
inline void run_block(const Launch& launch, uint64_t number) {
    if (launch.grid.y * launch.grid.z == 1) {
        blockIdx = {static_cast<unsigned>(number), 0, 0};
    } else {
        const uint64_t row = number / launch.grid.x;
        blockIdx = {static_cast<unsigned>(number % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                    static_cast<unsigned>(row / launch.grid.y)};
    }
    if (fills_memory()) {
        SharedMemory::prepare(launch.shared_bytes, true);
        Symbols::of_program().fill(&threadIdx);
    }
    if (block != nullptr) {
        block->run(number);
    } else {
        watch::thread_started(0);
        launch.call(launch.kernel_and_arguments);
    }
    if (WARP_SIZE > 1 && background != nullptr) std::exchange(background, nullptr)->end_of_block();
    if (!watch::on && card() != nullptr && number == 0) Symbols::of_program().note_used(launch.kernel, &threadIdx);
}

// The order in which blocks run. Under a seed, the i-th one is (stride i + start) mod blocks, with a stride that is
// coprime to blocks.
class BlockOrder {
public:
    BlockOrder(uint64_t blocks, uint64_t seed) : blocks_(blocks) {
        if (seed == 0) return;
        Random random{seed};
        start_ = random.next() % blocks;
        do stride_ = 1 + random.next() % blocks; while (std::gcd(stride_, blocks) != 1);
    }
    uint64_t operator[](uint64_t i) const { return (stride_ * i + start_) % blocks_; }

private:
    uint64_t blocks_, stride_ = 1, start_ = 0;
};

#ifdef CUDA_CPU_INSPECT
// Runs the blocks that dev/inspect selects, one after another, and calls its callbacks (watch.h). If it records some of
// them, they run in their natural order.
inline void run_inspected_grid(const Launch& launch) {
    const Symbols& symbols = Symbols::of_program();
    static const bool reported = [&] {
        watch::shared_memory(dynamic_shared_memory, max_shared_bytes);
        symbols.each_array(&threadIdx, watch::shared_array);
        for (const Symbols::Variable& v : symbols.variables())
            watch::variable(v.place, v.bytes, v.name.c_str(), v.is_writable);
        return true;
    }();
    static_cast<void>(reported);
    const dim3 g = launch.grid, b = launch.block;
    const bool is_recorded = watch::begin_launch(
        {launch.kernel, symbols.name_of(launch.kernel), launch.name, launch.variant, {g.x, g.y, g.z}, {b.x, b.y, b.z},
         launch.shared_bytes, symbols.bytes_of(launch.kernel)});
    const uint64_t blocks = uint64_t{g.x} * g.y * g.z;
    const BlockOrder order(blocks, is_recorded ? 0 : launch.seed);
    begin(launch);
    for (uint64_t i = 0; i < blocks; i++) {
        const watch::Run run = watch::next_block();
        if (run == watch::Run::STOP) break;
        if (run == watch::Run::SKIPPED) continue;
        if (run == watch::Run::RECORDED) watch::begin_block(i);
        run_block(launch, order[i]);
        if (run == watch::Run::RECORDED) watch::end_block();
    }
}
#endif

inline void run_grid(const Launch& launch) {
#ifdef CUDA_CPU_INSPECT
    return run_inspected_grid(launch);
#endif
    const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (blocks == 1) {
        begin(launch);
        run_block(launch, 0);
        return;
    }
    const BlockOrder order(blocks, launch.seed);
#pragma omp parallel
    {
        begin(launch);
        // The static schedule gives consecutive blocks to the same worker in every launch, as small matrix products do
        // with consecutive rows. So each worker's part of the activations stays in its cache.
#pragma omp for schedule(static)
        for (uint64_t i = 0; i < blocks; i++) run_block(launch, order[i]);
    }
}

// Returns the launch's variant (watch.h): its integer arguments, and which pointer arguments are not null.
template <class... Parameters> inline watch::Variant variant_of(const std::tuple<Parameters...>& parameters) {
    watch::Variant variant;
    const auto add = [&](const auto& parameter) {
        using T = std::decay_t<decltype(parameter)>;
        if constexpr (std::is_pointer_v<T>) variant.pointers.push_back(parameter != nullptr);
        if constexpr (std::is_integral_v<T>) variant.integers.push_back(static_cast<int64_t>(parameter));
    };
    if (watch::on) std::apply([&](const auto&... each) { (add(each), ...); }, parameters);
    return variant;
}
}  // namespace cuda_cpu

template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      Arguments&&... arguments) {
    using namespace cuda_cpu;
    if (const cudaError_t error = check(*config, reinterpret_cast<const void*>(kernel)); error != cudaSuccess)
        return report(error);
    using Call = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
    const Call call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
    const size_t asked = asked_shared_bytes()[reinterpret_cast<const void*>(kernel)];
    const auto run = [grid = config->gridDim, block = config->blockDim, shared_bytes = config->dynamicSmemBytes,
                      asked](const Call& it, const char* name) {
        const void* const address = reinterpret_cast<const void*>(it.first);
        run_grid({grid, block, shared_bytes,
                  [](const void* data) {
                      std::apply(static_cast<const Call*>(data)->first, static_cast<const Call*>(data)->second);
                  },
                  &it, name, seed(), address, variant_of(it.second)});
        // Again, because now the arrays of called functions are known.
        return shared_memory_fits(address, shared_bytes, asked) ? cudaSuccess : cudaErrorInvalidValue;
    };
    const auto& ranges = open_ranges();
    const char* const name = ranges.empty() ? watch::no_range : ranges.back().c_str();
    if (is_deferred(config->stream))
        return submit(config->stream, [run, call, name = std::string(name)] { return run(call, name.c_str()); });
    return report(run(call, name));
}

template <class Kernel> inline cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
    using namespace cuda_cpu;
    const void* const address = reinterpret_cast<const void*>(kernel);
    const auto bytes = static_cast<size_t>(value);
    if (value < 0 || !shared_memory_fits(address, bytes, bytes)) return report(cudaErrorInvalidValue);
    asked_shared_bytes()[address] = bytes;
    return cudaSuccess;
}

// ==== memory ============================================================================================

namespace cuda_cpu {
struct MachineMemory {
    size_t total, available;
};

// Returns the machine's memory, or the container's limit if that is lower. `available` is measured at the first call.
inline const MachineMemory& machine_memory() {
    // Returns the first number in a file, or the number after `name`; 0 if it is missing.
    const auto number_in = [](const std::string& file, const std::string& name = "") {
        std::ifstream in(file);
        for (std::string word; !name.empty() && in >> word && word != name;) continue;
        size_t number = 0;
        return in >> number ? number : 0;
    };
    static const MachineMemory value = [&] {
        MachineMemory m{number_in("/proc/meminfo", "MemTotal:") * kib,
                        number_in("/proc/meminfo", "MemAvailable:") * kib};
        const std::string cgroup = "/sys/fs/cgroup/memory.";
        const size_t limit = number_in(cgroup + "max"), used = number_in(cgroup + "current"),
                     reclaimable = number_in(cgroup + "stat", "inactive_file");
        if (limit == 0) return m;
        m.total = std::min(m.total, limit);
        m.available = std::min(m.available, limit - std::min(limit, used - std::min(used, reclaimable)));
        return m;
    }();
    return value;
}

// Allocations: the size in bytes by the first address.
struct Allocations : std::map<const char*, size_t> {
    // Returns the allocation that contains an address, or end().
    const_iterator containing(const void* address) const {
        const char* p = static_cast<const char*>(address);
        const auto next = upper_bound(p);
        return next != begin() && p < std::prev(next)->first + std::prev(next)->second ? std::prev(next) : end();
    }
    bool contain(const void* address) const { return containing(address) != end(); }
};

// Memory allocated by cudaMalloc. It is counted here because Linux lets a program allocate more than the machine has.
// A GPU allocates in pages of 2 MiB, which small allocations share.
struct Heap {
    static constexpr size_t page = 2 * mib, small = 1 * mib, small_unit = 512;
    std::mutex mutex;
    Allocations allocations, pinned;  // pinned: host memory
    size_t bytes = 0, large_pages = 0, small_bytes = 0;

    static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
    // Adds an allocation of `size` bytes to the totals (sign 1), or subtracts it (sign -1).
    void count(size_t size, int sign) {
        bytes += static_cast<size_t>(sign) * size;
        if (size < small) small_bytes += static_cast<size_t>(sign) * round_up(size, small_unit);
        else large_pages += static_cast<size_t>(sign) * (round_up(size, page) / page);
    }
    size_t total() const { return card() == nullptr ? machine_memory().total : card()->memory_bytes; }
    size_t available() const { return card() == nullptr ? machine_memory().available : card()->memory_bytes; }
    size_t in_use() const {
        return card() == nullptr ? bytes : context_bytes + large_pages * page + round_up(small_bytes, page);
    }
};
inline Heap& heap() {
    static Heap* const value = new Heap;  // never destroyed: a global's destructor may still call cudaFree
    return *value;
}

// Calls work(first, count) for a range of bytes, in parallel if it is long.
template <class Work> inline void for_bytes(size_t bytes, Work work) {
    constexpr size_t piece = 1 << 20;
    if (bytes <= piece) return work(0, bytes);
#pragma omp parallel for
    for (size_t first = 0; first < bytes; first += piece) work(first, std::min(piece, bytes - first));
}

inline cudaError_t copy_bytes(void* to, const void* from, size_t bytes) {
    for_bytes(bytes, [=](size_t first, size_t count) {
        if (count > 0) memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, count);
    });
    return cudaSuccess;
}

inline cudaError_t set_bytes(void* to, int byte, size_t bytes) {
    if (watch::only_counts() && bytes > mib) return cudaSuccess;  // untouched pages are already zero
    for_bytes(bytes, [=](size_t first, size_t count) {
        if (count > 0) memset(static_cast<char*>(to) + first, byte, count);
    });
    return cudaSuccess;
}

// An emulated GPU may have more memory than the machine. So the pages of an allocation of at least this size are
// committed when they are first accessed, and contain zeros, not NaN.
constexpr size_t reserved_from = 256 * mib;   // the buffers of an NCCL communicator, for example
inline bool is_reserved(size_t bytes) { return watch::on || (card() != nullptr && bytes >= reserved_from); }

#ifdef __SANITIZE_ADDRESS__
constexpr bool huge_pages = false;  // so that accesses past the last byte of an allocation are found
#else
constexpr bool huge_pages = true;
#endif

inline void* allocate(size_t bytes) {
    constexpr size_t alignment = 256, huge_page = 2 * mib;
    if (is_reserved(bytes)) {
        void* place = mmap(nullptr, bytes + 2 * watch::guard_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return place == MAP_FAILED ? nullptr : static_cast<char*>(place) + watch::guard_bytes;
    }
    void* place = nullptr;
    const bool huge = huge_pages && bytes >= 2 * huge_page;
    if (posix_memalign(&place, huge ? huge_page : alignment, bytes) != 0) return nullptr;
    if (huge) madvise(place, bytes, MADV_HUGEPAGE);
    // dev/inspect may run only a few blocks of each kernel. Output of the other blocks stays 0.
    if (watch::only_counts()) memset(place, 0, bytes);
    else if (fills_memory()) set_bytes(place, 0xff, bytes);
    return place;
}
}  // namespace cuda_cpu

template <class T> inline cudaError_t cudaMalloc(T** address, size_t bytes) {
    using namespace cuda_cpu;
    *address = nullptr;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    std::lock_guard lock(heap().mutex);
    heap().count(bytes, 1);
    void* const place = heap().in_use() <= heap().available() ? allocate(bytes) : nullptr;
    if (place == nullptr) {
        heap().count(bytes, -1);
        return report(cudaErrorMemoryAllocation);
    }
    heap().allocations[static_cast<const char*>(place)] = bytes;
    watch::allocated(place, bytes);
    *address = static_cast<T*>(place);
    return cudaSuccess;
}
template <class T> inline cudaError_t cudaMallocManaged(T** address, size_t bytes) {
    return cudaMalloc(address, bytes);
}

inline cudaError_t cudaFree(void* address) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    if (address == nullptr) return cudaSuccess;
    const cudaError_t earlier = run_all();  // queued work may still use the memory
    std::lock_guard lock(heap().mutex);
    const auto found = heap().allocations.find(static_cast<const char*>(address));
    if (found == heap().allocations.end()) return report(cudaErrorInvalidValue);
    heap().count(found->second, -1);
    watch::freed(address);
    if (is_reserved(found->second))
        munmap(static_cast<char*>(address) - watch::guard_bytes, found->second + 2 * watch::guard_bytes);
    else free(address);
    heap().allocations.erase(found);
    return earlier;
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard lock(cuda_cpu::heap().mutex);
    *total_bytes = cuda_cpu::heap().total();
    *free_bytes = cuda_cpu::heap().available() - cuda_cpu::heap().in_use();
    return cudaSuccess;
}

template <class T> inline cudaError_t cudaMallocHost(T** address, size_t bytes) {
    using namespace cuda_cpu;
    *address = nullptr;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    void* place = nullptr;
    if (posix_memalign(&place, 256, bytes) != 0) return report(cudaErrorMemoryAllocation);
    std::lock_guard lock(heap().mutex);
    heap().pinned[static_cast<const char*>(place)] = bytes;
    *address = static_cast<T*>(place);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* address) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    const cudaError_t earlier = run_all();
    std::lock_guard lock(heap().mutex);
    if (address != nullptr && heap().pinned.erase(static_cast<const char*>(address)) == 0)
        return report(cudaErrorInvalidValue);
    free(address);
    return earlier;
}

enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};

namespace cuda_cpu {
// DEVICE: allocated by cudaMalloc; PINNED: by cudaMallocHost; PAGEABLE: any other host memory.
enum class MemoryKind { DEVICE, PINNED, PAGEABLE };
inline MemoryKind memory_kind(const void* address) {
    std::lock_guard lock(heap().mutex);
    if (heap().allocations.contain(address)) return MemoryKind::DEVICE;
    return heap().pinned.contain(address) ? MemoryKind::PINNED : MemoryKind::PAGEABLE;
}

// Returns whether a range that begins in device memory ends in the same allocation; true for host memory.
inline bool fits_in_allocation(const void* address, size_t bytes) {
    const Allocations& all = heap().allocations;
    const auto found = all.containing(address);
    return found == all.end() || static_cast<const char*>(address) + bytes <= found->first + found->second;
}

// Returns the error of a copy on an emulated GPU: the kind must match the memory, and the ranges their allocations.
inline cudaError_t check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (card() == nullptr || bytes == 0) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    const auto is_device = [](const void* address) { return memory_kind(address) == MemoryKind::DEVICE; };
    if (kind != cudaMemcpyDefault && (is_device(to) != to_device || is_device(from) != from_device))
        return cudaErrorInvalidValue;
    return fits_in_allocation(to, bytes) && fits_in_allocation(from, bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

// Queues a copy. From pageable to device memory it is staged: the source is read now. To pageable memory and from host
// to host (waits_for_pinned: also any pinned memory) it blocks. (Runtime API, "API synchronization behavior".)
inline cudaError_t enqueue_copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits_for_pinned) {
    const MemoryKind source = memory_kind(from), target = memory_kind(to);
    Operation operation = [=] { return copy_bytes(to, from, bytes); };
    if (source == MemoryKind::PAGEABLE && target == MemoryKind::DEVICE) {
        const char* first = static_cast<const char*>(from);
        const std::vector<char> staged(first, first + bytes);
        operation = [=] { return copy_bytes(to, staged.data(), bytes); };
    }
    const Place end = enqueue(stream, std::move(operation));
    const bool host_to_host = source != MemoryKind::DEVICE && target != MemoryKind::DEVICE;
    const bool waits = target == MemoryKind::PAGEABLE || host_to_host ||
                       (waits_for_pinned && (source == MemoryKind::PINNED || target == MemoryKind::PINNED));
    return waits ? run_until_reached(end) : cudaSuccess;
}

// Returns an error during a capture, for calls that cannot be captured and that synchronise with the default stream.
inline cudaError_t reject_blocking_call(cudaStream_t stream = nullptr) {
    const cudaError_t error = reject_implicit_dependency(stream);
    return error != cudaSuccess ? error : reject_while_capturing();
}
}  // namespace cuda_cpu

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (const cudaError_t error = check_copy(to, from, bytes, kind); error != cudaSuccess) return report(error);
    if (in_capture(stream)) return record(stream, [=] { return copy_bytes(to, from, bytes); });
    if (!asynchronous()) return copy_bytes(to, from, bytes);
    if (const cudaError_t error = reject_implicit_dependency(stream); error != cudaSuccess) return error;
    return enqueue_copy(to, from, bytes, stream, false);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_blocking_call(); error != cudaSuccess) return error;
    if (const cudaError_t error = check_copy(to, from, bytes, kind); error != cudaSuccess) return report(error);
    return asynchronous() ? enqueue_copy(to, from, bytes, nullptr, true) : copy_bytes(to, from, bytes);
}
// A __device__ variable is an ordinary variable of the program, so this is a copy within host memory.
template <class T>
inline cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                      cudaMemcpyKind = cudaMemcpyHostToDevice) {
    if (offset > sizeof(T) || bytes > sizeof(T) - offset) return cuda_cpu::report(cudaErrorInvalidValue);
    return cudaMemcpy(const_cast<char*>(reinterpret_cast<const char*>(&symbol)) + offset, from, bytes,
                      cudaMemcpyDefault);
}

inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (card() != nullptr && bytes > 0 && (memory_kind(to) == MemoryKind::PAGEABLE || !fits_in_allocation(to, bytes)))
        return report(cudaErrorInvalidValue);
    if (is_deferred(stream)) return submit(stream, [=] { return set_bytes(to, byte, bytes); });
    return set_bytes(to, byte, bytes);
}
inline cudaError_t cudaMemset(void* to, int byte, size_t bytes) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_blocking_call(); error != cudaSuccess) return error;
    const cudaError_t error = cudaMemsetAsync(to, byte, bytes);
    const bool returns_at_once = !asynchronous() || memory_kind(to) == MemoryKind::DEVICE;
    return error != cudaSuccess || returns_at_once ? error : run_until_reached(streams()[0]->last);
}

// ==== streams and events ================================================================================

struct CUevent_st {
    cuda_cpu::Place place;  // where it was last recorded in a stream; null if never, or in a capture
    bool captured = false, timed = true;
};
using cudaEvent_t = CUevent_st*;

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = new CUstream_st;
    (*stream)->blocking = flags != cudaStreamNonBlocking;
    cuda_cpu::streams().push_back(*stream);
    return cudaSuccess;
}
// Priorities are stored and returned; they have no other effect.
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    const cudaError_t error = cudaStreamCreateWithFlags(stream, flags);
    (*stream)->priority = std::clamp(priority, -5, 0);
    return error;
}
inline cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return cuda_cpu::set_result(priority, stream->priority);
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    using namespace cuda_cpu;
    const cudaError_t error = run_until_reached(stream->last);
    streams().erase(std::find(streams().begin(), streams().end(), stream));
    delete stream;
    return error;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_if_captured(stream); error != cudaSuccess) return error;
    if (const cudaError_t error = reject_blocking_call(stream); error != cudaSuccess) return error;
    // An empty task at the end of the default stream waits for all blocking streams.
    if (stream == nullptr) return run_until_reached(asynchronous() ? enqueue(nullptr, {}) : nullptr);
    return run_until_reached(stream->last);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    using namespace cuda_cpu;
    if (!event->captured) {
        if (const cudaError_t error = reject_if_captured(stream, cudaErrorStreamCaptureIsolation); error != cudaSuccess)
            return error;
        if (asynchronous() && event->place != nullptr) enqueue(stream, {}, {event->place});
        return cudaSuccess;
    }
    // In CUDA a stream that waits for a captured event joins the capture; the emulator has captures of one stream.
    return in_capture(stream) ? cudaSuccess : report(cudaErrorNotSupported);
}
inline cudaError_t cudaDeviceSynchronize() {
    const cudaError_t error = cuda_cpu::reject_while_capturing();
    return error != cudaSuccess ? error : cuda_cpu::run_all();
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = new CUevent_st;
    (*event)->timed = (flags & cudaEventDisableTiming) == 0;
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return cuda_cpu::destroy_object(event); }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_implicit_dependency(stream); error != cudaSuccess) return error;
    event->captured = in_capture(stream);
    event->place = nullptr;
    if (event->captured) return cudaSuccess;
    if (asynchronous()) {
        event->place = enqueue(stream, {});
    } else {
        event->place = std::make_shared<Marker>();
        event->place->reach();
    }
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    return event->captured ? report(cudaErrorCapturedEvent) : run_until_reached(event->place);
}
namespace cuda_cpu {
inline Random times{number_of_environment("CUDA_CPU_TIMES", 0)};  // of events; state 0: measured. Tests change it.
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (begin->captured || end->captured) return cuda_cpu::report(cudaErrorCapturedEvent);
    if (begin->place == nullptr || end->place == nullptr || !begin->timed || !end->timed)
        return cuda_cpu::report(cudaErrorInvalidResourceHandle);
    if (!begin->place->reached || !end->place->reached) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->place->time - begin->place->time).count();
    if (cuda_cpu::times.state != 0) *milliseconds = static_cast<float>(1 + cuda_cpu::times.below(1 << 20)) / (1 << 20);
    return cudaSuccess;
}

// ==== graphs ============================================================================================

struct CUgraph_st { cuda_cpu::Operations operations; };   // the recorded work of a capture
struct CUgraphExec_st : CUgraph_st {};
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream == nullptr) return cuda_cpu::report(cudaErrorStreamCaptureUnsupported);
    if (cuda_cpu::in_capture(stream)) return cuda_cpu::report(cudaErrorIllegalState);
    stream->state = CUstream_st::capturing;
    cuda_cpu::captured_streams.push_back(stream);
    return cudaSuccess;
}

inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = nullptr;
    if (!cuda_cpu::in_capture(stream)) return cuda_cpu::report(cudaErrorIllegalState);
    const auto state = std::exchange(stream->state, CUstream_st::idle);
    const cuda_cpu::Operations operations = std::exchange(stream->operations, {});
    auto& all = cuda_cpu::captured_streams;
    all.erase(std::find(all.begin(), all.end(), stream));
    if (state == CUstream_st::invalidated) return cuda_cpu::report(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{operations};
    return cudaSuccess;
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long = 0) {
    return cuda_cpu::set_result(executable, new CUgraphExec_st{*graph});
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    for (const auto& operation : executable->operations) {
        const cudaError_t error = cuda_cpu::is_deferred(stream) ? cuda_cpu::submit(stream, operation) : operation();
        if (error != cudaSuccess) return cuda_cpu::report(error);
    }
    return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cuda_cpu::destroy_object(graph); }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cuda_cpu::destroy_object(executable); }

// ==== the device ========================================================================================

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, totalConstMem;
    size_t sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, reservedSharedMemPerBlock;
    int regsPerBlock;  // 0: unknown
    int warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int major, minor;  // 0.0: no GPU
    int multiProcessorCount;
    int l2CacheSize;
    int memoryBusWidth;
    int clockRate, memoryClockRate;  // 0: unknown
};

namespace cuda_cpu {
// Returns the number of devices, CUDA_CPU_DEVICES. They differ only in their ordinals. A process uses one device.
inline int device_count() {
    const char* text = getenv("CUDA_CPU_DEVICES");
    return text == nullptr ? 1 : std::max(1, atoi(text));
}
inline int current_device = 0;

inline void describe_processor(cudaDeviceProp& p) {
    std::ifstream cpuinfo("/proc/cpuinfo");
    std::string name = "CPU";
    for (std::string line; std::getline(cpuinfo, line);) {
        const size_t colon = line.find(": ");
        if (line.rfind("model name", 0) != 0 || colon == std::string::npos) continue;
        name = line.substr(colon + 2);
        break;
    }
    snprintf(p.name, sizeof(p.name), "%s", name.c_str());
    p.sharedMemPerBlockOptin = p.sharedMemPerMultiprocessor = max_shared_bytes;
    p.maxThreadsPerMultiProcessor = max_threads;
    p.multiProcessorCount = omp_get_max_threads();
    p.l2CacheSize = static_cast<int>(std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE)));
}

inline void describe_card(cudaDeviceProp& p, const Card& card) {
    const Capability& c = card.capability;
    snprintf(p.name, sizeof(p.name), "%s", card.name);
    p.major = c.major;
    p.minor = c.minor;
    p.sharedMemPerBlockOptin = c.shared_per_block();
    p.sharedMemPerMultiprocessor = c.shared_per_multiprocessor;
    p.reservedSharedMemPerBlock = c.reserved_shared_per_block;
    p.regsPerBlock = registers_per_block;
    p.maxThreadsPerMultiProcessor = c.threads_per_multiprocessor;
    p.maxBlocksPerMultiProcessor = c.blocks_per_multiprocessor;
    p.multiProcessorCount = card.multiprocessors;
    p.l2CacheSize = static_cast<int>(card.l2_bytes);
    p.memoryBusWidth = card.bus_bits;
}
}  // namespace cuda_cpu

inline cudaError_t cudaGetDeviceCount(int* count) { return cuda_cpu::set_result(count, cuda_cpu::device_count()); }
inline cudaError_t cudaGetDevice(int* device) { return cuda_cpu::set_result(device, cuda_cpu::current_device); }
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= cuda_cpu::device_count()) return cuda_cpu::report(cudaErrorInvalidDevice);
    cuda_cpu::current_device = device;
    cuda_cpu::require_full_warps();
    cuda_cpu::choose_workers();
    return cudaSuccess;
}
inline cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    using namespace cuda_cpu;
    if (device < 0 || device >= device_count()) return report(cudaErrorInvalidDevice);
    cudaDeviceProp& p = *properties = {};
    p.totalGlobalMem = heap().total();
    p.totalConstMem = 64 * kib;
    p.sharedMemPerBlock = default_shared_bytes;
    p.warpSize = WARP_SIZE;
    p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = max_threads;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    if (card() != nullptr) describe_card(p, *card());
    else describe_processor(p);
    return cudaSuccess;
}

#define CUDART_VERSION 13000  // the CUDA version whose API these headers follow
inline cudaError_t cudaRuntimeGetVersion(int* version) { return cuda_cpu::set_result(version, CUDART_VERSION); }
inline cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

#include "atomics.h"
#include "launch.h"

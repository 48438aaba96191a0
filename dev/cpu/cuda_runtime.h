// The CUDA runtime on a CPU, for programs that g++ compiles with this folder first on its include path (README.md).
// Work is complete when the call that issues it returns. There are two exceptions: a stream in capture records work for
// a graph, and on an emulated GPU (card.h) work is queued in its stream (streams.h).
//
// Map: qualifiers · launches · memory · streams and events · graphs · the device
#pragma once

#define CUDA_ON_CPU 1
// As CUDA's headers define them: other headers, such as cuda-samples' helper_cuda.h, ask for them.
#define __CUDA_RUNTIME_H__
#define __DRIVER_TYPES_H__
#define CUDART_CB
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif
static_assert(WARP_SIZE == 1 || WARP_SIZE == 32, "WARP_SIZE must be 1 or 32");
namespace cuda_cpu {
constexpr unsigned warp_size = WARP_SIZE;  // for headers that a program may include after its own WARP_SIZE
}

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
// A worker runs one block at a time, so its thread-local storage is the block's. nvcc aligns an array to 16 bytes if it
// is accessed as float4.
#define __shared__ __attribute__((aligned(16))) thread_local
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#include "intrinsics.h"

#include "block.h"

// ==== launches ==========================================================================================

enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative = 2 };   // others are not emulated
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct { int cooperative; } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaSharedCarveout {
    cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxL1 = 0, cudaSharedmemCarveoutMaxShared = 100
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;  // 0: unknown
    int preferredShmemCarveout;
};

namespace cuda_cpu {
// Exists while the device works: while a kernel, a copy or a library accesses device memory. In a program that
// dev/inspect watches, the memory is protected at other times, so that an access by host code is a segmentation fault.
// frame: the host's variables on the stack are above it; null if no kernel runs.
class DeviceWork {
public:
    explicit DeviceWork(const void* frame = nullptr) {
        if (!watch::on || depth_++ > 0) return;
        watch::device_works(true, frame);
        protect(PROT_READ | PROT_WRITE);
    }
    ~DeviceWork() {
        if (!watch::on || --depth_ > 0) return;
        protect(PROT_NONE);
        watch::device_works(false, nullptr);
    }
    DeviceWork(const DeviceWork&) = delete;
    static bool is_on() { return depth_ > 0; }

private:
    static void protect(int access);
    inline static int depth_ = 0;
};

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

inline bool is_cooperative(const cudaLaunchConfig_t& config) {
    return config.numAttrs == 1 && config.attrs->id == cudaLaunchAttributeCooperative && config.attrs->val.cooperative;
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
    if (config.numAttrs > 0 && !is_cooperative(config)) return cudaErrorNotSupported;
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

// Sets blockIdx; number = blockIdx.x + gridDim.x (blockIdx.y + gridDim.y blockIdx.z).
inline void set_block_index(const Launch& launch, uint64_t number) {
    if (launch.grid.y * launch.grid.z == 1) {
        blockIdx = {static_cast<unsigned>(number), 0, 0};
    } else {
        const uint64_t row = number / launch.grid.x;
        blockIdx = {static_cast<unsigned>(number % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                    static_cast<unsigned>(row / launch.grid.y)};
    }
}

inline void run_block(const Launch& launch, uint64_t number) {
    set_block_index(launch, number);
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

// A block of a cooperative launch: its threads, and while other blocks run the contents of its shared memory.
struct Resident {
    Block threads;
    std::vector<char> shared;
    bool is_recorded = false, is_over = false;

    // Exchanges the saved contents with those of this worker's shared memory.
    void exchange_shared(const Launch& launch) {
        size_t at = 0;
        const auto exchange = [&](const char* place, size_t bytes, const char*) {
            if (shared.size() < at + bytes) shared.resize(at + bytes);
            std::swap_ranges(const_cast<char*>(place), const_cast<char*>(place) + bytes, shared.data() + at);
            at += bytes;
        };
        exchange(reinterpret_cast<const char*>(dynamic_shared_memory), launch.shared_bytes, "");
        Symbols::of_program().each_array(&threadIdx, exchange);
    }
};

// Runs the blocks of a cooperative launch in turns, each until its threads have ended or wait for the grid, on one
// worker. starts(i): called before the i-th block starts; returns whether dev/inspect records it.
template <class Starts> inline void run_cooperative(const Launch& launch, const BlockOrder& order, Starts starts) {
    std::vector<Resident> residents(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z);
    for (uint64_t waiting = residents.size(), round = 0; waiting > 0; round++) {
        if (waiting < residents.size())
            die("deadlock: ", waiting, " blocks wait in grid.sync(), ", residents.size() - waiting, " have ended");
        waiting = 0;
        for (uint64_t i = 0; i < residents.size(); i++) {
            Resident& resident = residents[i];
            block = &resident.threads;
            if (round == 0) {
                block->prepare(launch);
                resident.is_recorded = starts(i);
                run_block(launch, order[i]);
            } else {
                resident.exchange_shared(launch);
                set_block_index(launch, order[i]);
                watch::resume_block(i);
                block->resume();
                if (background != nullptr) std::exchange(background, nullptr)->end_of_block();
            }
            waiting += block->is_suspended();
            if (block->is_suspended()) {
                watch::suspend_block();
                resident.exchange_shared(launch);
            } else if (resident.is_recorded) {
                watch::end_block();
            }
        }
        watch::grid_completed();
    }
    block = nullptr;
}

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
        watch::yields_by([] {
            if (block != nullptr) block->yield();
        });
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
    if (launch.cooperative)
        return run_cooperative(launch, order, [](uint64_t i) {
            const watch::Run run = watch::next_block();
            if (run == watch::Run::RECORDED) watch::begin_block(i, run);
            return run == watch::Run::RECORDED;
        });
    for (uint64_t i = 0; i < blocks; i++) {
        const watch::Run run = watch::next_block();
        if (run == watch::Run::STOP) break;
        if (run == watch::Run::SKIPPED) continue;
        watch::begin_block(order[i], run);
        run_block(launch, order[i]);
        watch::end_block();
    }
}
#endif

inline void run_grid(const Launch& launch) {
#ifdef CUDA_CPU_INSPECT
    return run_inspected_grid(launch);
#endif
    const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (launch.cooperative) {
        begin(launch);
        return run_cooperative(launch, BlockOrder(blocks, launch.seed), [](uint64_t) { return false; });
    }
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
        const auto* const bytes = reinterpret_cast<const unsigned char*>(&parameter);
        for (size_t i = 0; i < sizeof(T); i++) variant.arguments = (variant.arguments ^ bytes[i]) * 0x100000001b3;
    };
    if (watch::on) std::apply([&](const auto&... each) { (add(each), ...); }, parameters);
    return variant;
}
}  // namespace cuda_cpu

// (Not inlined, so that the host's variables are in frames above this one.)
template <class... Parameters, class... Arguments>
__attribute__((noinline)) cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                                                         void (*kernel)(Parameters...), Arguments&&... arguments) {
    using namespace cuda_cpu;
    if (launched != nullptr)
        die("launches by kernels (dynamic parallelism) are not emulated; dev/cpu/README.md lists the limits");
    if (const cudaError_t error = check(*config, reinterpret_cast<const void*>(kernel)); error != cudaSuccess)
        return report(error);
    using Call = std::pair<void (*)(Parameters...), std::tuple<Parameters...>>;
    const Call call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
    const size_t asked = asked_shared_bytes()[reinterpret_cast<const void*>(kernel)];
    const auto run = [grid = config->gridDim, block = config->blockDim, shared_bytes = config->dynamicSmemBytes,
                      asked, cooperative = is_cooperative(*config)](const Call& given, const char* name) {
        const DeviceWork work(__builtin_frame_address(0));
        const Call it = given;  // a graph's is in the host's memory
        const void* const address = reinterpret_cast<const void*>(it.first);
        run_grid({grid, block, shared_bytes,
                  [](const void* data) {
                      std::apply(static_cast<const Call*>(data)->first, static_cast<const Call*>(data)->second);
                  },
                  &it, name, seed(), address, variant_of(it.second), cooperative});
        launched = nullptr;
        // Again, because now the arrays of called functions are known.
        return shared_memory_fits(address, shared_bytes, asked) ? cudaSuccess : cudaErrorInvalidValue;
    };
    const auto& ranges = open_ranges();
    const char* const name = ranges.empty() ? watch::no_range : ranges.back().c_str();
    if (is_deferred(config->stream))
        return submit(config->stream, [run, call, name = std::string(name)] { return run(call, name.c_str()); });
    return report(run(call, name));
}

namespace cuda_cpu {
// arguments: the address of each argument.
template <class... Parameters, size_t... numbers>
inline cudaError_t launch_by_address(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...), void** arguments,
                                     std::index_sequence<numbers...>) {
    return cudaLaunchKernelEx(&config, kernel, *static_cast<std::decay_t<Parameters>*>(arguments[numbers])...);
}
}  // namespace cuda_cpu
template <class... Parameters>
inline cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
    return cuda_cpu::launch_by_address({grid, block, shared_bytes, stream, nullptr, 0}, kernel, arguments,
                                       std::index_sequence_for<Parameters...>());
}
// A pointer without the parameters' types is not enough here. rewrite.py removes a cast from the call's first argument.
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t = 0, cudaStream_t = nullptr) = delete;

// rewrite.py translates kernel<<<grid, block, shared, stream>>>(arguments) to:
//
//     cuda_cpu::launch(kernel, cuda_cpu::Configuration(grid, block, shared, stream))(arguments);
namespace cuda_cpu {
struct Configuration : cudaLaunchConfig_t {
    Configuration(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr)
        : cudaLaunchConfig_t{grid, block, shared_bytes, stream, nullptr, 0} {}
};

// A parameter's type as in the type of its function, which has no qualifiers: g++ keeps __restrict__ in decltype(x).
template <class T> struct Unqualified { using type = T; };
template <class T> struct Unqualified<T* __restrict__> { using type = T*; };
template <class T> using ParameterType = typename Unqualified<std::remove_cv_t<T>>::type;

// Returns a function that launches the kernel. Its arguments are converted to the kernel's parameters as in any call.
// cudaGetLastError returns a launch's error, as in CUDA.
template <class... Parameters> inline auto launch(void (*kernel)(Parameters...), const Configuration& configuration) {
    return [=](Parameters... arguments) {
        cudaLaunchKernelEx(&configuration, kernel, std::forward<Parameters>(arguments)...);
    };
}
}  // namespace cuda_cpu

template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    using namespace cuda_cpu;
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;   // a hint
    const void* const address = reinterpret_cast<const void*>(kernel);
    const auto bytes = static_cast<size_t>(value);
    if (value < 0 || !shared_memory_fits(address, bytes, bytes)) return report(cudaErrorInvalidValue);
    asked_shared_bytes()[address] = bytes;
    return cudaSuccess;
}

template <class Kernel> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
    using namespace cuda_cpu;
    const void* const address = reinterpret_cast<const void*>(kernel);
    *attributes = {};
    attributes->sharedSizeBytes = static_shared_bytes(address);
    attributes->maxThreadsPerBlock = max_threads;
    attributes->preferredShmemCarveout = cudaSharedmemCarveoutDefault;
    attributes->maxDynamicSharedSizeBytes =
        static_cast<int>(std::max(asked_shared_bytes()[address], default_shared_bytes - attributes->sharedSizeBytes));
    attributes->ptxVersion = attributes->binaryVersion = card() == nullptr ? 0 : card()->capability.number();
    return cudaSuccess;
}

// Hints, which have no effect.
enum cudaFuncCache {
    cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual
};
enum cudaSharedMemConfig {
    cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte
};
template <class... Hint> inline cudaError_t cudaFuncSetCacheConfig(Hint...) { return cudaSuccess; }
template <class... Hint> inline cudaError_t cudaFuncSetSharedMemConfig(Hint...) { return cudaSuccess; }
template <class... Hint> inline cudaError_t cudaDeviceSetCacheConfig(Hint...) { return cudaSuccess; }
template <class... Hint> inline cudaError_t cudaDeviceSetSharedMemConfig(Hint...) { return cudaSuccess; }

// ==== memory ============================================================================================

namespace cuda_cpu {
inline int current_device = 0;

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
    Allocations allocations, pinned, symbols;  // pinned: host memory; symbols: variables used as device memory
    Allocations managed;                       // those of the allocations that the host can access
    size_t bytes = 0, large_pages = 0, small_bytes = 0;
    size_t shared_with_host = 0;   // copies between host and device, and allocations that both can access, so far

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

inline void DeviceWork::protect(int access) {
    std::lock_guard lock(heap().mutex);
    for (const auto& [place, bytes] : heap().allocations)
        if (heap().managed.count(place) == 0) mprotect(const_cast<char*>(place), bytes, access);
}

// Calls work(first, count) for a range of bytes, in parallel if it is long.
template <class Work> inline void for_bytes(size_t bytes, Work work) {
    constexpr size_t piece = 1 << 20;
    const DeviceWork on_device;
    if (bytes <= piece) return work(0, bytes);
#pragma omp parallel for
    for (size_t first = 0; first < bytes; first += piece) work(first, std::min(piece, bytes - first));
}

inline cudaError_t copy_bytes(void* to, const void* from, size_t bytes) {
    watch::copied(from, bytes);
    watch::copied(to, bytes);
    for_bytes(bytes, [=](size_t first, size_t count) {
        if (count > 0) memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, count);
    });
    return cudaSuccess;
}

inline cudaError_t set_bytes(void* to, int byte, size_t bytes) {
    watch::copied(to, bytes);
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
        if (place == MAP_FAILED) return nullptr;
        place = static_cast<char*>(place) + watch::guard_bytes;
        if (watch::on && !DeviceWork::is_on()) mprotect(place, bytes, PROT_NONE);
        return place;
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

template <class T> CUDA_CPU_INSTRUCTION cudaError_t cudaMalloc(T** address, size_t bytes) {
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
    watch::allocated(place, bytes, watch::call_site());
    *address = static_cast<T*>(place);
    return cudaSuccess;
}
constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2, cudaMemAttachSingle = 4;
template <class T>
CUDA_CPU_INSTRUCTION cudaError_t cudaMallocManaged(T** address, size_t bytes, unsigned = cudaMemAttachGlobal) {
    using namespace cuda_cpu;
    const DeviceWork work;  // so that cudaMalloc does not protect the memory
    const cudaError_t error = cudaMalloc(address, bytes);
    std::lock_guard lock(heap().mutex);
    heap().shared_with_host++;
    if (*address != nullptr) heap().managed[reinterpret_cast<const char*>(*address)] = bytes;
    return error;
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
    heap().managed.erase(found->first);
    heap().allocations.erase(found);
    return earlier;
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard lock(cuda_cpu::heap().mutex);
    *total_bytes = cuda_cpu::heap().total();
    *free_bytes = cuda_cpu::heap().available() - cuda_cpu::heap().in_use();
    return cudaSuccess;
}

// Allocates rows of `width` bytes, each at an aligned address: their distance is *pitch.
template <class T>
CUDA_CPU_INSTRUCTION cudaError_t cudaMallocPitch(T** address, size_t* pitch, size_t width, size_t height) {
    *pitch = cuda_cpu::Heap::round_up(width, 512);
    return cudaMalloc(address, *pitch * height);
}
template <class T> CUDA_CPU_INSTRUCTION cudaError_t cudaMallocAsync(T** address, size_t bytes, cudaStream_t) {
    return cudaMalloc(address, bytes);
}
inline cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                   cudaHostAllocWriteCombined = 4;
// Allocates pinned memory. The flags have no effect: kernels can always access it here.
template <class T> inline cudaError_t cudaMallocHost(T** address, size_t bytes, unsigned flags = cudaHostAllocDefault) {
    using namespace cuda_cpu;
    *address = nullptr;
    if (const cudaError_t error = reject_while_capturing(); error != cudaSuccess) return error;
    if (flags > 7) return report(cudaErrorInvalidValue);
    if (bytes == 0) return cudaSuccess;
    const DeviceWork work;  // the memory is not only the host's
    void* place = nullptr;
    if (posix_memalign(&place, 256, bytes) != 0) return report(cudaErrorMemoryAllocation);
    std::lock_guard lock(heap().mutex);
    heap().shared_with_host++;
    heap().pinned[static_cast<const char*>(place)] = bytes;
    *address = static_cast<T*>(place);
    return cudaSuccess;
}
template <class T> inline cudaError_t cudaHostAlloc(T** address, size_t bytes, unsigned flags) {
    return cudaMallocHost(address, bytes, flags);
}
template <class T> inline cudaError_t cudaHostGetDevicePointer(T** address, void* host, unsigned) {
    using namespace cuda_cpu;
    std::lock_guard lock(heap().mutex);
    if (!heap().pinned.contain(host)) return report(cudaErrorInvalidValue);
    return set_result(address, static_cast<T*>(host));
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

constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2,
                   cudaHostRegisterIoMemory = 4, cudaHostRegisterReadOnly = 8;
// Makes a range of the program's memory pinned memory.
inline cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    using namespace cuda_cpu;
    std::lock_guard lock(heap().mutex);
    if (address == nullptr || bytes == 0) return report(cudaErrorInvalidValue);
    if (heap().pinned.contain(address)) return report(cudaErrorHostMemoryAlreadyRegistered);
    heap().pinned[static_cast<const char*>(address)] = bytes;
    heap().shared_with_host++;
    watch::registered(address, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* address) {
    using namespace cuda_cpu;
    const cudaError_t earlier = run_all();
    std::lock_guard lock(heap().mutex);
    const bool found = heap().pinned.erase(static_cast<const char*>(address)) > 0;
    watch::registered(address, 0);
    return found ? earlier : report(cudaErrorHostMemoryNotRegistered);
}

enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};

namespace cuda_cpu {
// DEVICE: allocated by cudaMalloc, or a symbol; PINNED: by cudaMallocHost; PAGEABLE: any other host memory.
enum class MemoryKind { DEVICE, PINNED, PAGEABLE };
inline MemoryKind memory_kind(const void* address) {
    std::lock_guard lock(heap().mutex);
    if (heap().allocations.contain(address) || heap().symbols.contain(address)) return MemoryKind::DEVICE;
    return heap().pinned.contain(address) ? MemoryKind::PINNED : MemoryKind::PAGEABLE;
}

// Returns whether a range that begins in device memory ends in the same allocation; true for host memory.
inline bool fits_in_allocation(const void* address, size_t bytes) {
    const auto fits = [=](const Allocations& all) {
        const auto found = all.containing(address);
        return found == all.end() || static_cast<const char*>(address) + bytes <= found->first + found->second;
    };
    return fits(heap().allocations) && fits(heap().symbols);
}

// Returns the error of a copy on an emulated GPU: the kind must match the memory, and the ranges their allocations.
inline cudaError_t check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (card() == nullptr || bytes == 0) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    const auto is_device = [](const void* address) { return memory_kind(address) == MemoryKind::DEVICE; };
    if (kind != cudaMemcpyDefault && (is_device(to) != to_device || is_device(from) != from_device))
        return cudaErrorInvalidValue;
    heap().shared_with_host += is_device(to) != is_device(from);
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
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (card() != nullptr && bytes > 0 && (memory_kind(to) == MemoryKind::PAGEABLE || !fits_in_allocation(to, bytes)))
        return report(cudaErrorInvalidValue);
    return submit(stream, [=] { return set_bytes(to, byte, bytes); });
}
inline cudaError_t cudaMemset(void* to, int byte, size_t bytes) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_blocking_call(); error != cudaSuccess) return error;
    const cudaError_t error = cudaMemsetAsync(to, byte, bytes);
    const bool returns_at_once = !asynchronous() || memory_kind(to) == MemoryKind::DEVICE;
    return error != cudaSuccess || returns_at_once ? error : run_until_reached(streams()[0]->last);
}

// ---- rows of a matrix; pitch: their distance in bytes

namespace cuda_cpu {
// Calls operation(row) for each row. Returns the first error.
template <class Operation> inline cudaError_t for_rows(size_t rows, Operation operation) {
    for (size_t row = 0; row < rows; row++)
        if (const cudaError_t error = operation(row); error != cudaSuccess) return error;
    return cudaSuccess;
}
// Issues work to the default stream by call(), and waits for it.
template <class Call> inline cudaError_t blocking(Call call) {
    if (const cudaError_t error = reject_blocking_call(); error != cudaSuccess) return error;
    const cudaError_t error = call();
    return error != cudaSuccess ? error : run_until_reached(streams()[0]->last);
}
// Returns whether all rows are in one allocation, if the first one begins in device memory.
inline bool rows_fit(const void* address, size_t pitch, size_t width, size_t height) {
    return card() == nullptr || width * height == 0 || fits_in_allocation(address, pitch * (height - 1) + width);
}
}  // namespace cuda_cpu

inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (width > to_pitch || width > from_pitch) return report(cudaErrorInvalidPitchValue);
    if (!rows_fit(to, to_pitch, width, height) || !rows_fit(from, from_pitch, width, height))
        return report(cudaErrorInvalidValue);
    return for_rows(height, [=](size_t row) {
        return cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                               static_cast<const char*>(from) + row * from_pitch, width, kind, stream);
    });
}
inline cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int byte, size_t width, size_t height,
                                     cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    if (width > pitch || !rows_fit(to, pitch, width, height)) return report(cudaErrorInvalidValue);
    return for_rows(height, [=](size_t row) {
        return cudaMemsetAsync(static_cast<char*>(to) + row * pitch, byte, width, stream);
    });
}
inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                size_t height, cudaMemcpyKind kind) {
    return cuda_cpu::blocking(
        [=] { return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind); });
}
inline cudaError_t cudaMemset2D(void* to, size_t pitch, int byte, size_t width, size_t height) {
    return cuda_cpu::blocking([=] { return cudaMemset2DAsync(to, pitch, byte, width, height); });
}

// ---- several devices, which share this machine's memory; where managed memory should be: hints, which have no effect

inline cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                       cudaStream_t stream = nullptr) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
inline cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice);
}
constexpr int cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2;
enum cudaMemoryAdvise {
    cudaMemAdviseSetReadMostly = 1, cudaMemAdviseUnsetReadMostly, cudaMemAdviseSetPreferredLocation,
    cudaMemAdviseUnsetPreferredLocation, cudaMemAdviseSetAccessedBy, cudaMemAdviseUnsetAccessedBy
};
enum cudaMemLocationType { cudaMemLocationTypeInvalid, cudaMemLocationTypeDevice, cudaMemLocationTypeHost };
struct cudaMemLocation {
    cudaMemLocationType type;
    int id;
};
template <class... Hint> inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, Hint...) { return cudaSuccess; }
template <class... Hint> inline cudaError_t cudaMemAdvise(const void*, size_t, Hint...) { return cudaSuccess; }
template <class... Hint> inline cudaError_t cudaStreamAttachMemAsync(cudaStream_t, Hint...) { return cudaSuccess; }

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    using namespace cuda_cpu;
    void* const pointer = const_cast<void*>(address);
    const MemoryKind kind = memory_kind(address);
    *attributes = {cudaMemoryTypeUnregistered, -1, nullptr, pointer};
    if (kind == MemoryKind::DEVICE) *attributes = {cudaMemoryTypeDevice, current_device, pointer, nullptr};
    if (kind == MemoryKind::PINNED) *attributes = {cudaMemoryTypeHost, current_device, pointer, pointer};
    return cudaSuccess;
}

// ---- symbols: __device__, __constant__ and __managed__ variables, which are variables of this program

namespace cuda_cpu {
// Sets *place to byte `offset` of a variable, which is device memory from now on. Returns the error if it is not a
// variable of the program, or if the range is not within it.
template <class T> inline cudaError_t find_symbol(char** place, const T& symbol, size_t bytes, size_t offset) {
    char* const first = const_cast<char*>(reinterpret_cast<const volatile char*>(std::addressof(symbol)));
    if (first < &__executable_start || first >= &_end) return report(cudaErrorInvalidSymbol);
    if (offset > sizeof(T) || bytes > sizeof(T) - offset) return report(cudaErrorInvalidValue);
    std::lock_guard lock(heap().mutex);
    heap().symbols[first] = sizeof(T);
    return set_result(place, first + offset);
}

// Calls copy(place) if the range is within the variable and the kind of the copy is not `wrong`.
template <class T, class Copy>
inline cudaError_t copy_symbol(const T& symbol, size_t bytes, size_t offset, cudaMemcpyKind kind, cudaMemcpyKind wrong,
                               Copy copy) {
    char* place = nullptr;
    if (const cudaError_t error = find_symbol(&place, symbol, bytes, offset); error != cudaSuccess) return error;
    return kind == wrong || kind == cudaMemcpyHostToHost ? report(cudaErrorInvalidMemcpyDirection) : copy(place);
}
}  // namespace cuda_cpu

template <class Pointer, class T> inline cudaError_t cudaGetSymbolAddress(Pointer** address, const T& symbol) {
    return cuda_cpu::find_symbol(reinterpret_cast<char**>(address), symbol, 0, 0);
}
template <class T> inline cudaError_t cudaGetSymbolSize(size_t* bytes, const T& symbol) {
    char* place = nullptr;
    *bytes = sizeof(T);
    return cuda_cpu::find_symbol(&place, symbol, 0, 0);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                           cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                           cudaStream_t stream = nullptr) {
    return cuda_cpu::copy_symbol(symbol, bytes, offset, kind, cudaMemcpyDeviceToHost,
                                 [=](char* to) { return cudaMemcpyAsync(to, from, bytes, kind, stream); });
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                             cudaMemcpyKind kind = cudaMemcpyDeviceToHost,
                                             cudaStream_t stream = nullptr) {
    return cuda_cpu::copy_symbol(symbol, bytes, offset, kind, cudaMemcpyHostToDevice,
                                 [=](const char* from) { return cudaMemcpyAsync(to, from, bytes, kind, stream); });
}
// more: offset and kind.
template <class T, class... More>
inline cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes, More... more) {
    return cuda_cpu::blocking([&] { return cudaMemcpyToSymbolAsync(symbol, from, bytes, more...); });
}
template <class T, class... More>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, More... more) {
    return cuda_cpu::blocking([&] { return cudaMemcpyFromSymbolAsync(to, symbol, bytes, more...); });
}

// ==== streams and events ================================================================================

struct CUevent_st {
    cuda_cpu::Place place;  // where it was last recorded in a stream; null if never, or in a capture
    bool captured = false, timed = true;
};
using cudaEvent_t = CUevent_st*;

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2,
                   cudaEventInterprocess = 4;
constexpr cudaStream_t cudaStreamLegacy = nullptr;

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
// Calls a function of the host when the work before it in the stream is complete.
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
    return cuda_cpu::submit(stream, [=] { return function(data), cudaSuccess; });
}
using cudaHostFn_t = void (*)(void*);
using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    const auto call = [=] { return callback(stream, cuda_cpu::asynchronous_error(), data), cudaSuccess; };
    return cuda_cpu::submit(stream, call);
}
inline cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    return cuda_cpu::set_result(flags, cuda_cpu::real(stream)->blocking ? cudaStreamDefault : cudaStreamNonBlocking);
}
// Hints about a stream's use of L2, which have no effect.
enum cudaAccessProperty { cudaAccessPropertyNormal, cudaAccessPropertyStreaming, cudaAccessPropertyPersisting };
struct cudaAccessPolicyWindow {
    void* base_ptr;
    size_t num_bytes;
    float hitRatio;
    cudaAccessProperty hitProp, missProp;
};
enum cudaStreamAttrID { cudaStreamAttributeAccessPolicyWindow = 1 };
union cudaStreamAttrValue {
    cudaAccessPolicyWindow accessPolicyWindow;
};
inline cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue*) {
    return cudaSuccess;
}
inline cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
namespace cuda_cpu {
// Returns cudaErrorNotReady until the work up to a position is complete. Each call lets some work run.
inline cudaError_t query(const Place& place) {
    if (place != nullptr && !place->reached) run_one(true);
    return place == nullptr || place->reached ? run_until_reached(place) : cudaErrorNotReady;
}
}  // namespace cuda_cpu
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    using namespace cuda_cpu;
    if (const cudaError_t error = reject_if_captured(stream); error != cudaSuccess) return error;
    if (const cudaError_t error = reject_implicit_dependency(stream); error != cudaSuccess) return error;
    return query(real(stream)->last);
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
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags = cudaEventDefault) {
    return cudaEventCreateWithFlags(event, flags);
}
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
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    return event->captured ? cuda_cpu::report(cudaErrorCapturedEvent) : cuda_cpu::query(event->place);
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
using cudaGraphNode_t = struct CUgraphNode_st*;

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

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, cudaGraphNode_t*, char*,
                                        size_t) {
    return cudaGraphInstantiate(executable, graph);
}
inline cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) { return cuda_cpu::set_result(graph, new CUgraph_st); }
// Sets *count to the number of nodes. The nodes themselves are not available.
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes != nullptr) return cuda_cpu::report(cudaErrorNotSupported);
    return cuda_cpu::set_result(count, graph->operations.size());
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    for (const auto& operation : executable->operations)
        if (const cudaError_t error = cuda_cpu::submit(stream, operation); error != cudaSuccess)
            return cuda_cpu::report(error);
    return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cuda_cpu::destroy_object(graph); }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cuda_cpu::destroy_object(executable); }

// ==== the device ========================================================================================

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, totalConstMem;
    size_t sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, reservedSharedMemPerBlock;
    int regsPerBlock, regsPerMultiprocessor;  // 0: unknown
    int warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int major, minor;  // 0.0: no GPU
    int multiProcessorCount;
    int l2CacheSize;
    int memoryBusWidth;
    int clockRate, memoryClockRate;  // kHz; 0: unknown
    size_t memPitch, textureAlignment;
    int canMapHostMemory, concurrentKernels, asyncEngineCount, deviceOverlap, unifiedAddressing, managedMemory;
    int concurrentManagedAccess, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    int computePreemptionSupported, memoryPoolsSupported, cooperativeLaunch;
    // What this device does not have: 0.
    int computeMode, integrated, ECCEnabled, kernelExecTimeoutEnabled, tccDriver, isMultiGpuBoard, multiGpuBoardGroupID;
    int pciBusID, pciDeviceID, pciDomainID, hostNativeAtomicSupported, pageableMemoryAccess;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, cooperativeMultiDeviceLaunch;
    int singleToDoublePrecisionPerfRatio, persistingL2CacheMaxSize, accessPolicyMaxWindowSize;
};

namespace cuda_cpu {
// Returns the number of devices, CUDA_CPU_DEVICES. They differ only in their ordinals. A process uses one device.
inline int device_count() {
    const char* text = getenv("CUDA_CPU_DEVICES");
    return text == nullptr ? 1 : std::max(1, atoi(text));
}

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
    p.regsPerBlock = p.regsPerMultiprocessor = registers_per_block;
    p.maxThreadsPerMultiProcessor = c.threads_per_multiprocessor;
    p.maxBlocksPerMultiProcessor = c.blocks_per_multiprocessor;
    p.multiProcessorCount = card.multiprocessors;
    p.l2CacheSize = static_cast<int>(card.l2_bytes);
    p.memoryBusWidth = card.bus_bits;
    p.clockRate = static_cast<int>(card.clock / 1e3);
    p.memoryClockRate = static_cast<int>(card.bandwidth / (2 * card.bus_bits / 8) / 1e3);  // two transfers a clock
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
    p.memPitch = 0x7fffffff;
    p.textureAlignment = 512;
    for (int* feature : {&p.canMapHostMemory, &p.concurrentKernels, &p.asyncEngineCount, &p.deviceOverlap,
                         &p.unifiedAddressing, &p.managedMemory, &p.concurrentManagedAccess,
                         &p.streamPrioritiesSupported, &p.globalL1CacheSupported, &p.localL1CacheSupported,
                         &p.computePreemptionSupported, &p.memoryPoolsSupported, &p.cooperativeLaunch})
        *feature = 1;
    if (card() != nullptr) describe_card(p, *card());
    else describe_processor(p);
    return cudaSuccess;
}

// The attributes that the emulator knows: CUDA's numbers, and the members of cudaDeviceProp with their values.
#define CUDA_CPU_ATTRIBUTES(A)                                                                                        \
    A(MaxThreadsPerBlock, 1, maxThreadsPerBlock) A(MaxBlockDimX, 2, maxThreadsDim[0])                                 \
    A(MaxBlockDimY, 3, maxThreadsDim[1]) A(MaxBlockDimZ, 4, maxThreadsDim[2]) A(MaxGridDimX, 5, maxGridSize[0])       \
    A(MaxGridDimY, 6, maxGridSize[1]) A(MaxGridDimZ, 7, maxGridSize[2])                                               \
    A(MaxSharedMemoryPerBlock, 8, sharedMemPerBlock) A(TotalConstantMemory, 9, totalConstMem)                         \
    A(WarpSize, 10, warpSize) A(MaxRegistersPerBlock, 12, regsPerBlock) A(ClockRate, 13, clockRate)                   \
    A(GpuOverlap, 15, deviceOverlap) A(MultiProcessorCount, 16, multiProcessorCount) A(Integrated, 18, integrated)    \
    A(CanMapHostMemory, 19, canMapHostMemory) A(ComputeMode, 20, computeMode)                                         \
    A(ConcurrentKernels, 31, concurrentKernels) A(MemoryClockRate, 36, memoryClockRate)                               \
    A(GlobalMemoryBusWidth, 37, memoryBusWidth) A(L2CacheSize, 38, l2CacheSize)                                       \
    A(MaxThreadsPerMultiProcessor, 39, maxThreadsPerMultiProcessor) A(AsyncEngineCount, 40, asyncEngineCount)         \
    A(UnifiedAddressing, 41, unifiedAddressing) A(ComputeCapabilityMajor, 75, major)                                  \
    A(ComputeCapabilityMinor, 76, minor) A(StreamPrioritiesSupported, 78, streamPrioritiesSupported)                  \
    A(MaxSharedMemoryPerMultiprocessor, 81, sharedMemPerMultiprocessor)                                               \
    A(MaxRegistersPerMultiprocessor, 82, regsPerMultiprocessor) A(ManagedMemory, 83, managedMemory)                   \
    A(HostNativeAtomicSupported, 86, hostNativeAtomicSupported) A(PageableMemoryAccess, 88, pageableMemoryAccess)     \
    A(ConcurrentManagedAccess, 89, concurrentManagedAccess) A(CooperativeLaunch, 95, cooperativeLaunch)               \
    A(MaxSharedMemoryPerBlockOptin, 97, sharedMemPerBlockOptin)                                                       \
    A(MaxBlocksPerMultiprocessor, 106, maxBlocksPerMultiProcessor)                                                    \
    A(ReservedSharedMemoryPerBlock, 111, reservedSharedMemPerBlock)                                                   \
    A(MemoryPoolsSupported, 115, memoryPoolsSupported)
#define CUDA_CPU_ATTRIBUTE(name, number, member) cudaDevAttr##name = number,
enum cudaDeviceAttr : int { CUDA_CPU_ATTRIBUTES(CUDA_CPU_ATTRIBUTE) };
#undef CUDA_CPU_ATTRIBUTE
enum cudaComputeMode { cudaComputeModeDefault, cudaComputeModeExclusive, cudaComputeModeProhibited };

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess) return error;
    switch (attribute) {
#define CUDA_CPU_ATTRIBUTE(name, number, member)                                                                      \
    case cudaDevAttr##name: return cuda_cpu::set_result(value, static_cast<int>(p.member));
        CUDA_CPU_ATTRIBUTES(CUDA_CPU_ATTRIBUTE)
#undef CUDA_CPU_ATTRIBUTE
    }
    return cuda_cpu::report(cudaErrorInvalidValue);
}

// Flags and limits of the device: stored and returned; they have no other effect.
constexpr unsigned cudaDeviceScheduleAuto = 0, cudaDeviceScheduleSpin = 1, cudaDeviceScheduleYield = 2,
                   cudaDeviceScheduleBlockingSync = 4, cudaDeviceBlockingSync = 4, cudaDeviceMapHost = 8,
                   cudaDeviceLmemResizeToMax = 16;
enum cudaLimit {
    cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize, cudaLimitDevRuntimeSyncDepth,
    cudaLimitDevRuntimePendingLaunchCount, cudaLimitMaxL2FetchGranularity, cudaLimitPersistingL2CacheSize
};
namespace cuda_cpu {
inline unsigned device_flags = 0;
inline std::map<cudaLimit, size_t> device_limits = {
    {cudaLimitStackSize, kib}, {cudaLimitPrintfFifoSize, mib}, {cudaLimitMallocHeapSize, 8 * mib}};
}  // namespace cuda_cpu
inline cudaError_t cudaSetDeviceFlags(unsigned flags) { return cuda_cpu::set_result(&cuda_cpu::device_flags, flags); }
inline cudaError_t cudaGetDeviceFlags(unsigned* flags) { return cuda_cpu::set_result(flags, cuda_cpu::device_flags); }
inline cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value) {
    return cuda_cpu::set_result(&cuda_cpu::device_limits[limit], value);
}
inline cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {
    return cuda_cpu::set_result(value, cuda_cpu::device_limits[limit]);
}
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Access between devices: each one can access the memory of all others.
enum cudaDeviceP2PAttr {
    cudaDevP2PAttrPerformanceRank = 1, cudaDevP2PAttrAccessSupported, cudaDevP2PAttrNativeAtomicSupported,
    cudaDevP2PAttrCudaArrayAccessSupported
};
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    return cuda_cpu::set_result(can, static_cast<int>(device != peer));
}
inline cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int device, int peer) {
    return cuda_cpu::set_result(value, static_cast<int>(attribute == cudaDevP2PAttrAccessSupported && device != peer));
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    const bool is_other = peer >= 0 && peer < cuda_cpu::device_count() && peer != cuda_cpu::current_device;
    return is_other ? cudaSuccess : cuda_cpu::report(cudaErrorInvalidDevice);
}
inline cudaError_t cudaDeviceDisablePeerAccess(int peer) { return cudaDeviceEnablePeerAccess(peer, 0); }

// Sets *blocks to how many blocks a multiprocessor can hold, by its threads, blocks and shared memory: the registers
// that a kernel needs are unknown.
template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads,
                                                                 size_t shared_bytes) {
    using namespace cuda_cpu;
    if (threads <= 0 || threads > static_cast<int>(max_threads)) return report(cudaErrorInvalidValue);
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, current_device);
    const size_t shared = static_shared_bytes(reinterpret_cast<const void*>(kernel)) + shared_bytes;
    const size_t warps = (static_cast<size_t>(threads) + WARP_SIZE - 1) / WARP_SIZE;
    size_t most = static_cast<size_t>(p.maxThreadsPerMultiProcessor) / (warps * WARP_SIZE);
    if (p.maxBlocksPerMultiProcessor > 0) most = std::min<size_t>(most, p.maxBlocksPerMultiProcessor);
    if (shared > 0) most = std::min(most, p.sharedMemPerMultiprocessor / (shared + p.reservedSharedMemPerBlock));
    return set_result(blocks, static_cast<int>(shared > p.sharedMemPerBlockOptin ? 0 : most));
}
// Sets *threads to the block size that keeps most threads on a multiprocessor, the largest one if several do, and *grid
// to the blocks that fill the GPU. shared_bytes(threads): dynamic shared memory. limit: maximum block size; 0: none.
template <class Kernel, class SharedBytes>
inline cudaError_t cudaOccupancyMaxPotentialBlockSizeVariableSMem(int* grid, int* threads, Kernel* kernel,
                                                                  SharedBytes shared_bytes, int limit = 0) {
    int best = 0, processors = 0;
    if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount,
                                                         cuda_cpu::current_device); error != cudaSuccess) return error;
    constexpr int most = static_cast<int>(cuda_cpu::max_threads);
    for (int size = limit > 0 ? std::min(limit, most) : most; size > 0; size = (size - 1) / WARP_SIZE * WARP_SIZE) {
        int blocks = 0;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, size, static_cast<size_t>(shared_bytes(size)));
        if (blocks * size <= best) continue;
        best = blocks * size;
        *threads = size;
        *grid = blocks * processors;
    }
    return best > 0 ? cudaSuccess : cuda_cpu::report(cudaErrorInvalidConfiguration);
}
template <class Kernel>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* threads, Kernel* kernel, size_t shared_bytes = 0,
                                                      int limit = 0) {
    return cudaOccupancyMaxPotentialBlockSizeVariableSMem(grid, threads, kernel, [=](int) { return shared_bytes; },
                                                          limit);
}

// Launches a kernel whose blocks can wait for each other: all must be resident at once.
template <class... Parameters>
inline cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                               void** arguments, size_t shared_bytes = 0,
                                               cudaStream_t stream = nullptr) {
    using namespace cuda_cpu;
    int blocks = 0, processors = 0;
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, static_cast<int>(block.x * block.y * block.z), shared_bytes);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, current_device);
    if (error == cudaSuccess && card() != nullptr && uint64_t{grid.x} * grid.y * grid.z > uint64_t(blocks) * processors)
        return report(cudaErrorCooperativeLaunchTooLarge);
    cudaLaunchAttribute cooperative{cudaLaunchAttributeCooperative, {1}};
    return launch_by_address({grid, block, shared_bytes, stream, &cooperative, 1}, kernel, arguments,
                             std::index_sequence_for<Parameters...>());
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t = 0, cudaStream_t = nullptr) =
    delete;

#define CUDART_VERSION 13000  // the CUDA version whose API these headers follow
inline cudaError_t cudaRuntimeGetVersion(int* version) { return cuda_cpu::set_result(version, CUDART_VERSION); }
inline cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

#include "atomics.h"

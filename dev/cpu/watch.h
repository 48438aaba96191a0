// What the emulator reports to dev/inspect, whose recorder.cpp defines these functions. Without -DCUDA_CPU_INSPECT they
// do nothing.
//
// A recorded program has one worker. Loads and stores of the program's own code are seen by instrumentation; reported
// here are the emulator's own accesses for a kernel, and what orders one thread's accesses before another's.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

// Functions with this are not instrumented: what they read and write is reported here, or is the emulator's own.
#define CUDA_CPU_UNSEEN __attribute__((no_sanitize("thread")))
// Functions that ask here() must be where they are called.
#ifdef CUDA_CPU_INSPECT
#define CUDA_CPU_INSTRUCTION inline __attribute__((always_inline))
#else
#define CUDA_CPU_INSTRUCTION inline
#endif

namespace cuda_cpu::watch {

enum class By : uint8_t { THREAD, ATOMIC, LDMATRIX, COPY_ASYNC, COPY_ENGINE, WGMMA };
enum class Access : uint8_t { LOAD, STORE };

constexpr const char* no_range = "without a name";   // what a launch is called that is in no NVTX range

// What distinguishes launches of a kernel besides their grids: its arguments that are whole numbers, and which
// pointers are not null, in the order of its parameters.
struct Variant {
    std::vector<int64_t> integers;
    std::vector<bool> pointers;
};

struct LaunchShape {
    const void* kernel;
    const char* symbol;   // mangled
    const char* range;    // the innermost NVTX range
    Variant variant;
    unsigned grid[3], block[3];
    size_t dynamic_shared, static_shared;
};

// A product as cuBLASLt was asked for it: out (m, n) = a (m, k) b (k, n).
struct Product {
    size_t m, n, k;
    const char* type;
    unsigned in_bytes, out_bytes;   // of an element
    bool accumulate;
    const char* epilogue;
};

// What launches have done to memory; of a launch's blocks that were not recorded, as much as of those that were.
struct Figures {
    double sectors = 0, least_sectors = 0, wavefronts = 0, least_wavefronts = 0, memory_bytes = 0;
    uint64_t hazards = 0;   // races, and uninitialised reads of shared memory
};

enum class Run : uint8_t { RECORDED, UNSEEN, NOT };
enum class Operand : uint8_t { A, B };

#ifdef CUDA_CPU_INSPECT
constexpr bool on = true;
#define CUDA_CPU_HOOK(T, declaration) T declaration;
#else
constexpr bool on = false;
#define CUDA_CPU_HOOK(T, declaration) inline T declaration { return static_cast<T>(0); }
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

// ---- launches and blocks
#ifdef CUDA_CPU_INSPECT
void begin_launch(const LaunchShape& shape);
Run next_block();                                  // of the launch, from 0 on; NOT: the launch is over
void begin_block(uint64_t number);
void end_block();
void product(const Product& product);
Figures take_figures();                            // since the last call
void look(bool at_launches);                       // whether to record launches from now on; at first they are
void shared_memory(const void* dynamic, size_t bytes);
void shared_array(const void* place, size_t bytes, const char* name);
#endif
CUDA_CPU_HOOK(bool, only_counts())                 // products and long operations are not done but counted
CUDA_CPU_HOOK(void, dying(const char* why))        // the program ends now
CUDA_CPU_HOOK(void, allocated(const void* place, size_t bytes))
CUDA_CPU_HOOK(void, freed(const void* place))

// ---- threads
CUDA_CPU_HOOK(void, begun(unsigned thread))
CUDA_CPU_HOOK(void, now(unsigned thread))          // this thread resumes
CUDA_CPU_HOOK(void, ended(unsigned thread))
CUDA_CPU_HOOK(const void*, here())                 // the instruction after the call
CUDA_CPU_HOOK(bool, is_removed(const char* name, const void* site))   // whether this barrier is to have no effect

// ---- order
CUDA_CPU_HOOK(void, barrier_met(const char* name))
CUDA_CPU_HOOK(void, lanes_met(unsigned first_thread, unsigned lanes, const char* name))
CUDA_CPU_HOOK(void, fence())                       // __threadfence
CUDA_CPU_HOOK(void, proxy_fence())
CUDA_CPU_HOOK(void, sync_made(const void* barrier, const void* site))   // an mbarrier; the others also named barriers
CUDA_CPU_HOOK(void, arrived(const void* barrier, const void* site))
CUDA_CPU_HOOK(void, phase_ended(const void* barrier, unsigned parity))
CUDA_CPU_HOOK(void, waited(const void* barrier, unsigned parity, const void* site))

// ---- accesses by PTX instructions
CUDA_CPU_HOOK(void, access(Access access, By by, const void* address, unsigned bytes, const void* site))
CUDA_CPU_HOOK(void, cp_async(const void* to, const void* from, const void* site))   // from may be null: zeros
CUDA_CPU_HOOK(void, cp_async_commit())
CUDA_CPU_HOOK(void, cp_async_wait(unsigned pending))
CUDA_CPU_HOOK(unsigned, box_issued(const void* barrier, const void* site))
CUDA_CPU_HOOK(void, box_part(unsigned box, const void* to, const void* from))   // 16 bytes; from null: zeros
CUDA_CPU_HOOK(void, box_landed(unsigned box))
CUDA_CPU_HOOK(unsigned, wgmma_issued(unsigned warp, uint64_t flops, const void* site))
CUDA_CPU_HOOK(void, wgmma_reads(unsigned product, const void* address, Operand operand))   // 16 bytes
CUDA_CPU_HOOK(void, wgmma_ended(unsigned product))
CUDA_CPU_HOOK(void, wgmma_waited(unsigned warp))
CUDA_CPU_HOOK(void, tensor_flops(uint64_t flops))
CUDA_CPU_HOOK(void, special_function())            // exp2, log2, sine: a multiprocessor has few units for them

#pragma GCC diagnostic pop
#undef CUDA_CPU_HOOK

}  // namespace cuda_cpu::watch

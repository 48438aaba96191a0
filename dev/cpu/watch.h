// Instrumentation callbacks, defined by dev/inspect/recorder.cpp. Without -DCUDA_CPU_INSPECT they do nothing.
//
// An inspected program has one worker. The compiler's instrumentation (-fsanitize=thread) reports the loads and stores
// of kernel code. The callbacks report the accesses that the emulator makes for a kernel, and the synchronisation that
// orders one thread's accesses before another's.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

// Excludes a function from instrumentation: its accesses are reported by callbacks, or are internal to the emulator.
#define CUDA_CPU_NO_TSAN __attribute__((no_sanitize("thread")))
// For functions that call call_site(): inlined, so that it returns an address in the kernel.
#ifdef CUDA_CPU_INSPECT
#define CUDA_CPU_INSTRUCTION inline __attribute__((always_inline))
#else
#define CUDA_CPU_INSTRUCTION inline
#endif

namespace cuda_cpu::watch {
enum class By : uint8_t { THREAD, ATOMIC, LDMATRIX, COPY_ASYNC, COPY_ENGINE, WGMMA };
enum class Access : uint8_t { LOAD, STORE, WAIT };   // WAIT: at a barrier, or in a collective

constexpr const char* no_range = "without a name";   // the name of launches outside of NVTX ranges

// Distinguishes launches of a kernel with the same grid: its integer arguments, and which pointers are not null.
struct Variant {
    std::vector<int64_t> integers;
    std::vector<bool> pointers;
    uint64_t arguments = 0;   // a hash of all arguments
};

struct LaunchShape {
    const void* kernel;
    const char* symbol;   // mangled
    const char* range;    // the innermost NVTX range
    Variant variant;
    unsigned grid[3], block[3];
    size_t dynamic_shared, static_shared;
};

// A matrix product by cuBLASLt: out (m, n) = a (m, k) b (k, n).
struct Product {
    size_t m, n, k;
    const char* type;
    unsigned out_bytes;   // per element
    bool accumulate;
    const char* epilogue;
};

// Memory traffic of launches, extrapolated from recorded blocks to all blocks. least_: the minimum for these bytes.
struct Figures {
    double sectors = 0, least_sectors = 0, wavefronts = 0, least_wavefronts = 0, memory_bytes = 0;
    uint64_t hazards = 0;   // races, and reads of uninitialised shared memory
};

// How a block runs. SKIPPED: not at all; STOP: nor do the blocks after it.
enum class Run : uint8_t { RECORDED, UNRECORDED, SKIPPED, STOP };

// Unused bytes before and after each allocation: an access to them is out of bounds. dev/inspect/Makefile inserts some
// between variables too.
#ifdef CUDA_CPU_INSPECT
constexpr bool on = true;
constexpr size_t guard_bytes = 1 << 20;
#define CUDA_CPU_CALLBACK(T, declaration) T declaration;
#else
constexpr bool on = false;
constexpr size_t guard_bytes = 0;
#define CUDA_CPU_CALLBACK(T, declaration) inline T declaration { return static_cast<T>(0); }
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

// ---- launches and blocks
#ifdef CUDA_CPU_INSPECT
bool begin_launch(const LaunchShape& shape);       // returns whether blocks of this launch are recorded
Run next_block();                                  // called before each block, in the order of their numbers
void begin_block(uint64_t number, Run run);        // of a block that runs
void product(const Product& product);
Figures take_figures();                            // traffic since the last call
void record_launches(bool enabled);                // initially enabled
void yields_by(void (*yield)());                   // lets other threads of the block run
void shared_memory(const void* dynamic, size_t bytes);                  // the range of dynamic shared memory
void shared_array(const void* place, size_t bytes, const char* name);   // a __shared__ array
// A variable of the program. name: mangled; empty: not the user's
void variable(const void* place, size_t bytes, const char* name, bool is_writable);
#endif
CUDA_CPU_CALLBACK(void, end_block())
// Blocks of a cooperative launch run in turns, each until it waits for the grid; completed: all blocks do.
CUDA_CPU_CALLBACK(void, suspend_block())
CUDA_CPU_CALLBACK(void, resume_block(uint64_t number))
CUDA_CPU_CALLBACK(void, grid_completed())
CUDA_CPU_CALLBACK(bool, only_counts())                    // long operations are counted but not executed
CUDA_CPU_CALLBACK(void, fatal_error(const char* text))    // the program is about to end
CUDA_CPU_CALLBACK(void, allocated(const void* place, size_t bytes, const void* site))
CUDA_CPU_CALLBACK(void, copied(const void* place, size_t bytes))   // by the host: to, from or memset
CUDA_CPU_CALLBACK(void, freed(const void* place))
CUDA_CPU_CALLBACK(void, registered(const void* place, size_t bytes))   // by cudaHostRegister; 0 bytes: no longer
// The device begins or ends to work (DeviceWork). frame: the host's variables on the stack are above it.
CUDA_CPU_CALLBACK(void, device_works(bool begins, const void* frame))

// ---- threads
CUDA_CPU_CALLBACK(void, thread_started(unsigned thread))
CUDA_CPU_CALLBACK(void, thread_resumed(unsigned thread))  // before it starts or continues
CUDA_CPU_CALLBACK(void, thread_ended(unsigned thread))
CUDA_CPU_CALLBACK(const void*, call_site())               // returns its return address
CUDA_CPU_CALLBACK(bool, is_shared(const void* place))     // returns whether shared memory has it
// Returns whether to skip this barrier, fence or wait, to find out if it is necessary.
CUDA_CPU_CALLBACK(bool, is_removed(const char* name, const void* site))

// ---- synchronisation
CUDA_CPU_CALLBACK(void, waits(const void* site))          // in a barrier or collective, from now on
CUDA_CPU_CALLBACK(void, barrier_completed(const char* name))
// lanes: those of the mask that have not ended
CUDA_CPU_CALLBACK(void, collective_completed(unsigned first_thread, unsigned lanes, unsigned mask, const char* name))
CUDA_CPU_CALLBACK(void, fence(bool of_block))             // __threadfence, __threadfence_block
CUDA_CPU_CALLBACK(void, proxy_fence())
CUDA_CPU_CALLBACK(void, mbarrier_initialised(const void* barrier, const void* site))
// of an mbarrier or a named barrier
CUDA_CPU_CALLBACK(void, arrived(const void* barrier, const void* site))
CUDA_CPU_CALLBACK(void, phase_completed(const void* barrier, unsigned parity))
CUDA_CPU_CALLBACK(void, waited(const void* barrier, unsigned parity, const void* site))

// ---- accesses by PTX instructions
CUDA_CPU_CALLBACK(void, access(Access access, By by, const void* address, size_t bytes, const void* site))
CUDA_CPU_CALLBACK(void, cp_async(const void* to, size_t bytes, const void* from, size_t filled, const void* site))
CUDA_CPU_CALLBACK(void, cp_async_commit())
CUDA_CPU_CALLBACK(void, cp_async_wait(unsigned pending))
// A TMA load or a wgmma: they return its number, and then report its accesses of 16 bytes. Side 0: what the load
// writes, or operand A; side 1: what it reads, or operand B.
CUDA_CPU_CALLBACK(unsigned, load_issued(const void* barrier, const void* site))
CUDA_CPU_CALLBACK(unsigned, wgmma_issued(unsigned warp, uint64_t flops, const void* site))
CUDA_CPU_CALLBACK(void, bulk_accesses(unsigned bulk, unsigned side, const void* address))
CUDA_CPU_CALLBACK(void, bulk_completed(unsigned bulk))
CUDA_CPU_CALLBACK(void, wgmma_waited(unsigned warp))
CUDA_CPU_CALLBACK(void, tensor_flops(uint64_t flops))
CUDA_CPU_CALLBACK(void, adds_floats())                    // the next atomic function
CUDA_CPU_CALLBACK(void, special_function())               // exp2, log2, sine: executed by special function units

#pragma GCC diagnostic pop
#undef CUDA_CPU_CALLBACK
}  // namespace cuda_cpu::watch

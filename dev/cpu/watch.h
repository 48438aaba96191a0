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

#ifdef CUDA_CPU_INSPECT

constexpr bool on = true;

// ---- launches and blocks
void begin_launch(const LaunchShape& shape);
Run next_block();                                  // of the launch, from 0 on; NOT: the launch is over
void begin_block(uint64_t number);
void end_block();
void product(const Product& product);
Figures take_figures();                            // since this was asked last
void look(bool at_launches);                       // records launches from now on; at first they are
bool only_counts();                                // products, and what is long, are not done but counted
void dying(const char* why);                       // the program ends now

// ---- memory that can be seen
void shared_memory(const void* dynamic, size_t bytes);
void shared_array(const void* place, size_t bytes, const char* name);
void allocated(const void* place, size_t bytes);
void freed(const void* place);
void global_variable(const void* place, size_t bytes);

// ---- threads
void begun(unsigned thread);
void now(unsigned thread);                         // that thread goes on
void ended(unsigned thread);
const void* here();                                // the instruction after the call
bool is_removed(const char* name, const void* site);   // whether this barrier is to have no effect

// ---- what orders
void barrier_met(const char* name);
void lanes_met(unsigned first_thread, unsigned lanes, const char* name);
void fence();                                      // __threadfence
void proxy_fence();
void sync_made(const void* barrier, const void* site);   // an mbarrier; the others may be named barriers too
void arrived(const void* barrier, const void* site);
void phase_ended(const void* barrier, unsigned parity);
void waited(const void* barrier, unsigned parity, const void* site);

// ---- accesses by instructions of PTX
void access(Access access, By by, const void* address, unsigned bytes, const void* site);
void copy_async(const void* to, const void* from, const void* site);   // from may be null: zeros
void copy_async_commit();
void copy_async_wait(unsigned pending);
unsigned box_issued(const void* barrier, const void* site);
void box_part(unsigned box, const void* to, const void* from);   // 16 bytes; from null: zeros
void box_landed(unsigned box);
unsigned wgmma_issued(unsigned warp, uint64_t flops, const void* site);
enum class Operand : uint8_t { A, B };
void wgmma_reads(unsigned product, const void* address, Operand operand);       // 16 bytes
void wgmma_ended(unsigned product);
void wgmma_waited(unsigned warp);
void tensor_flops(uint64_t flops);
void special_function();                           // exp2, log2, sine and so on: few of a multiprocessor's units do these

#else

constexpr bool on = false;

inline bool only_counts() { return false; }
inline void dying(const char*) {}
inline void allocated(const void*, size_t) {}
inline void freed(const void*) {}
inline void begun(unsigned) {}
inline void now(unsigned) {}
inline void ended(unsigned) {}
inline const void* here() { return nullptr; }
inline bool is_removed(const char*, const void*) { return false; }
inline void barrier_met(const char*) {}
inline void lanes_met(unsigned, unsigned, const char*) {}
inline void fence() {}
inline void proxy_fence() {}
inline void sync_made(const void*, const void*) {}
inline void arrived(const void*, const void*) {}
inline void phase_ended(const void*, unsigned) {}
inline void waited(const void*, unsigned, const void*) {}
inline void access(Access, By, const void*, unsigned, const void*) {}
inline void copy_async(const void*, const void*, const void*) {}
inline void copy_async_commit() {}
inline void copy_async_wait(unsigned) {}
inline unsigned box_issued(const void*, const void*) { return 0; }
inline void box_part(unsigned, const void*, const void*) {}
inline void box_landed(unsigned) {}
inline unsigned wgmma_issued(unsigned, uint64_t, const void*) { return 0; }
enum class Operand : uint8_t { A, B };
inline void wgmma_reads(unsigned, const void*, Operand) {}
inline void wgmma_ended(unsigned) {}
inline void wgmma_waited(unsigned) {}
inline void tensor_flops(uint64_t) {}
inline void special_function() {}

#endif

}  // namespace cuda_cpu::watch

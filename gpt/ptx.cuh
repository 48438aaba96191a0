// Wrappers for PTX instructions without a CUDA C++ function: tensor-core products (mma, wgmma), asynchronous copies
// (cp.async, TMA), mbarriers, setmaxnreg. tiles.cuh has what kernels build from these.
//
// Each wrapper is one instruction; its comment quotes the section title or instruction name to look up in the PTX ISA
// manual. dev/cpu/ptx.h implements the same functions on a CPU, from the manual, so that kernels are tested without a
// GPU. Includes nothing of the trainer.
//
// Fragment: the part of a matrix that a warp holds in registers. mma multiplies A (16 x 16) by B (16 x 8); each 32-bit
// register of A and B has two 16-bit elements. Lane 4g + t (g 0..7, t 0..3) holds
//     A  a[0], a[1]: columns 2t, 2t+1 of rows g, g+8;   a[2], a[3]: columns 2t+8, 2t+9 of the same rows
//     B  b[0]: rows 2t, 2t+1 of column g;   b[1]: rows 2t+8, 2t+9
//     D  d[0], d[1]: columns 2t, 2t+1 of row g;   d[2], d[3]: the same columns of row g+8
// wgmma: the four warps of a warpgroup multiply (64 x 16) by (16 x N). Warp w computes rows 16w to 16w+15 with the same
// fragments: d[4i] ... d[4i+3] are in columns 8i to 8i+7, so a lane holds N / 2 accumulators (32 of m64n64: two rows x
// 16 columns). B is read from shared memory, A from shared memory or registers.
//
//     accumulator of a warp             columns 0 1 | 2 3 | 4 5 | 6 7 | 8 9 ...       lane 4g + t: d[4i], d[4i+1]
//       row 0                                 lane 0    1     2     3     0
//       row 1                                      4    5     6     7     4
//       ...
//       row 7                                     28   29    30    31    28
//       row 8                                      0    1     2     3     0           d[4i+2], d[4i+3]
//
// 16 columns of D, rounded to pairs of floatX, have the layout of an A fragment: the result of one product is the left
// operand of the next without leaving registers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int TILE_ROW_BYTES = 128;   // of the tiles in tiles.cuh

// Operand types: BF16, or FP16 in an FP16 build. Accumulators are FP32.
#ifdef PRECISION_FP16
#define PTX_OPERANDS "f16.f16"
#else
#define PTX_OPERANDS "bf16.bf16"
#endif

#ifdef CUDA_ON_CPU
#include <ptx.h>
using namespace cuda_cpu::ptx;
#else

// Returns the address of p in the shared state space, which PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Returns 2^x within 2 units in the last place; subnormals become 0. "ex2"
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns 1/x within 1 unit in the last place; subnormals become 0. "rcp"
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns the counter's old value and increments it, wrapping from `last` to 0. "atom", .inc
__device__ __forceinline__ unsigned atomic_inc(int* counter, unsigned last) {
    return atomicInc(reinterpret_cast<unsigned*>(counter), last);
}

// ---- Ampere and later

// d (16 x 8) += a (16 x 16) b (16 x 8). "Matrix Fragments for mma.m16n8k16 with floating point type"
__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX_OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8. Lane 4g + t
// receives elements 2t, 2t+1 of row g of each matrix, or, transposed, rows 2t, 2t+1 of column g. "ldmatrix"
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Starts to copy 16 bytes from global to shared memory, or to write 16 zeros if not `valid`. "cp.async"
__device__ __forceinline__ void cp_async(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
}
// Commit: this thread's copies since the last commit become a group. Wait: blocks until at most N groups are pending.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- Hopper: mbarriers, which count arrivals and bytes

// Initialises a barrier in shared memory. A phase completes after `arrivals` arrivals, once all expected bytes have
// been copied; the next phase starts at once. "mbarrier"
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes mbarrier_init visible to TMA. "fence.mbarrier_init"
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives; expect_tx also adds `bytes` to those that this phase expects.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Blocks until the phase of this parity has completed: 0 for the first, third, ... phase, 1 for the others. A wait for
// parity 1 on a new barrier returns at once.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                    : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    while (!done);
}

// Named barriers 1 to 15 of a block (__syncthreads uses 0). A phase completes when `threads` threads have called sync,
// which blocks until then, or arrive, which does not. "bar"
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Hopper: Tensor Memory Accelerator (TMA)

// Starts to copy a box from coordinates (c0, c1, c2, c3) of a tensor, c0 contiguous, to shared memory. Out-of-range
// elements become 0. The barrier counts the bytes as they arrive. "cp.async.bulk.tensor"
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                         int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// ---- Hopper: wgmma. "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"

// The compiler does not know that wgmma is asynchronous, so it would move arithmetic on accumulators across the fence
// and the wait below. An empty asm that may change the registers prevents that (CUTLASS: warpgroup_fence_operand).
__device__ __forceinline__ void fence_operand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void fence_operand(uint32_t& x) { asm volatile("" : "+r"(x)); }
template <typename T, int COUNT> __device__ __forceinline__ void fence_operand(T (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) fence_operand(x[i]);
}

// Orders earlier writes to `registers` (accumulators and A fragments) before the wgmmas that follow.
template <typename... Registers> __device__ __forceinline__ void wgmma_fence(Registers&... registers) {
    (fence_operand(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Commit: the wgmmas since the last commit become a group. Wait: blocks until at most N groups are pending; `registers`
// are the accumulators of the completed groups. ptxas moves a wait up over the arithmetic that should overlap with the
// products, as far as the previous branch. Where that matters, kernels put a branch before the wait: a wait_full.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N, typename... Registers> __device__ __forceinline__ void wgmma_wait(Registers&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
    (fence_operand(registers), ...);
}

// Which dimension of a tile is contiguous: K, the one that the product sums over (columns are k), or MN (rows are k).
enum class Major { K = 0, MN = 1 };

// Returns the matrix descriptor of a tile in shared memory, in units of 16 bytes: address, stride between blocks of 64
// columns (used by MN with more than 64 columns), stride between groups of 8 rows; 128-byte swizzle.
// "Shared Memory Matrix Layout", "Matrix Descriptor"
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, int column_block_bytes = 16) {
    constexpr uint64_t EIGHT_ROWS = 8 * TILE_ROW_BYTES / 16, SWIZZLE_128 = 1;
    return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(column_block_bytes / 16) << 16 |
           EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}

// N / 2 accumulators: as asm operands "+f"(d[0]), ... and as their placeholders %0, ... in the instruction's text.
#define WGMMA_ACCS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                        "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_ACCS_32(i) WGMMA_ACCS_8(i), WGMMA_ACCS_8(i + 8), WGMMA_ACCS_8(i + 16), WGMMA_ACCS_8(i + 24)
#define WGMMA_ACCS_64(i) WGMMA_ACCS_32(i), WGMMA_ACCS_32(i + 32)
#define WGMMA_ACCS_128(i) WGMMA_ACCS_64(i), WGMMA_ACCS_64(i + 64)
#define WGMMA_TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
                        "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define WGMMA_FIFTY WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4)
#define WGMMA_32 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_64 WGMMA_FIFTY WGMMA_TEN(5) "%60, %61, %62, %63"
#define WGMMA_128 WGMMA_FIFTY WGMMA_TEN(5) WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) \
                  WGMMA_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"

// One wgmma. Arguments: N; the accumulators as operands and as placeholders; placeholders of b, `add`, Major and a; the
// operands of a.
#define WGMMA(N, ACCS, NUMBERS, B_TEXT, ADD, MAJOR, A_TEXT, ...)                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."     \
                 PTX_OPERANDS " {" NUMBERS "}, " A_TEXT ", " B_TEXT ", p, 1, 1, " MAJOR ";\n}"                       \
                 : ACCS : "l"(b), "r"(add), "n"(static_cast<int>(B)), __VA_ARGS__)

// Starts d (64 x N) = a (64 x 16) b (16 x N), or += if `add`. a and b are descriptors; a is K-major.
template <int N, Major B> __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
    static_assert(N == 64 || N == 128 || N == 256);
    if constexpr (N == 64)
        WGMMA(64, WGMMA_ACCS_32(0), WGMMA_32, "%32", "%33", "0, %34", "%35", "l"(a));
    else if constexpr (N == 128)
        WGMMA(128, WGMMA_ACCS_64(0), WGMMA_64, "%64", "%65", "0, %66", "%67", "l"(a));
    else
        WGMMA(256, WGMMA_ACCS_128(0), WGMMA_128, "%128", "%129", "0, %130", "%131", "l"(a));
}

// The same with a in registers, as an A fragment.
template <int N, Major B>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64)
        WGMMA(64, WGMMA_ACCS_32(0), WGMMA_32, "%32", "%33", "%34", "{%35, %36, %37, %38}",
              "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
    else
        WGMMA(128, WGMMA_ACCS_64(0), WGMMA_64, "%64", "%65", "%66", "{%67, %68, %69, %70}",
              "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

// Lowers (dec) or raises (inc) the registers per thread of this warpgroup from the launch's number to N. "setmaxnreg"
template <int N> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif

// mma.m16n8k16 and cp.async need sm_80, the Hopper instructions sm_90a. For other architectures the kernels that use
// them are compiled with an empty body.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool HAS_MMA = false;
#else
constexpr bool HAS_MMA = true;
#endif
#if defined(CUDA_ON_CPU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif

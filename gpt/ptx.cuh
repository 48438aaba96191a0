// Wrappers for PTX instructions without a CUDA C++ function: tensor-core products (mma, wgmma), asynchronous copies
// (cp.async, TMA), mbarriers, setmaxnreg. Below them, what kernels build from these: tiles, fragments, pipelines.
//
// Each wrapper is one instruction; its comment quotes the section title or instruction name to look up in the PTX ISA
// manual. dev/cpu/ptx.h implements the same functions on a CPU, from the manual, so that kernels are tested without a
// GPU. Used by attention_mma.cuh, attention_wgmma.cuh and dev/kernels/matmul.cu; uses floatX, PACK, FULL_WARP, check
// and launch of train_gpt.cu.
//
// Map: Ampere and later · Hopper: mbarriers, TMA, wgmma, setmaxnreg · tiles · fragments · pipelines · tensor maps
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
//
// A tile in shared memory has blocks of 64 columns: a row of a block is 128 bytes. The 16-byte chunk c of row r is
// stored at position c ^ (r % 8) (128-byte swizzle), so that the same chunk of eight rows lies in different banks. A
// tile is aligned to 1024 bytes.
#pragma once

constexpr int TILE_COLUMNS = 64;
constexpr int TILE_ROW_BYTES = 128;

// Operand types: BF16, or FP16 in an FP16 build. Accumulators are FP32.
#ifdef PRECISION_FP16
#define PTX_OPERANDS "f16.f16"
#else
#define PTX_OPERANDS "bf16.bf16"
#endif

#ifdef CUDA_ON_CPU
#include <ptx.h>
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
                 "r"(valid ? 16 : 0)
                 : "memory");
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
                 "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
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

__global__ void compiled_for_sm_90a_kernel(int* answer) { *answer = HAS_WGMMA; }

// Returns whether the code that this device executes was compiled for sm_90a.
bool compiled_with_wgmma() {
    int answer = 0, *on_device = nullptr;
    check(cudaMalloc(&on_device, sizeof(answer)), "cudaMalloc");
    launch("compiled_for_sm_90a", compiled_for_sm_90a_kernel, 1, 1, 0, on_device);
    download(&answer, on_device, sizeof(answer));
    check(cudaFree(on_device), "cudaFree");
    return answer != 0;
}

// ==== tiles =================================================================

constexpr int TILE_ALIGNMENT = 1024;   // bytes; the 128-byte swizzle of TMA and wgmma repeats after 1024

// Return the number of 64-column blocks in a tile, and the bytes of a tile of `rows` rows.
__host__ __device__ constexpr int column_blocks(int HS) { return (HS + TILE_COLUMNS - 1) / TILE_COLUMNS; }
__host__ __device__ constexpr int tile_bytes(int rows, int HS) { return rows * column_blocks(HS) * TILE_ROW_BYTES; }

// Returns the address of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows: block of columns chunk / 8.
__device__ __forceinline__ char* tile_chunk(void* tile, int rows, int row, int chunk) {
    return static_cast<char*>(tile) + (chunk / 8 * rows + row) * TILE_ROW_BYTES + ((chunk ^ row) % 8) * 16;
}

// ==== fragments =============================================================
// (16, N) of a warp, N / 2 elements per lane; layout at the top of this file.

// Returns two floats rounded to floatX in 32 bits, x in the lower half.
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
#ifdef PRECISION_FP16
    const __half2 pair = __floats2half2_rn(x, y);
#else
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
#endif
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// Return the row and the column of this lane's element e.
__device__ __forceinline__ int fragment_row(int e) { return threadIdx.x % 32 / 4 + e / 2 % 2 * 8; }
__device__ __forceinline__ int fragment_column(int e) { return e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2; }

template <int N> __device__ __forceinline__ void multiply_rows(float (&x)[N], const float (&factor)[2]) {
    for (int e = 0; e < N; e++) x[e] *= factor[e / 2 % 2];
}

// Rounds an accumulator fragment to A fragments, one for each 16 columns.
template <int N> __device__ __forceinline__ void to_operands(uint32_t (&a)[N / 8][4], const float (&x)[N]) {
    for (int i = 0; i < N / 2; i++) a[i / 4][i % 4] = pack_pair(x[2 * i], x[2 * i + 1]);
}

// Stores a fragment (16, HS) to rows row0 ... row0 + 15 of x, except rows from T on. The warp stages it in its own rows
// of `tile`, so that neighbouring lanes write neighbouring 16-byte chunks.
template <int HS, typename F8>
__device__ __forceinline__ void store_rows(const Out<F8>& x, size_t stride, int row0, int T, const float* fragment,
                                           char* tile, int tile_rows, int tile_row) {
    uint32_t lane = threadIdx.x % 32;
    // With these head sizes nvcc 12.4 would compute all addresses before a caller's loop and spill them.
    if (HS % TILE_COLUMNS != 0) fence_operand(lane);
    Writer<F8, Reach::WARP> writer(x);
    __syncwarp();   // all lanes have read the old contents of the rows
    for (int i = 0; i < HS / 4; i++) {
        const uint32_t pair = pack_pair(fragment[2 * i], fragment[2 * i + 1]);
        memcpy(tile_chunk(tile, tile_rows, tile_row + fragment_row(2 * i), i / 2) + lane % 4 * 4, &pair, sizeof(pair));
    }
    __syncwarp();
    for (int e = static_cast<int>(lane); e < 16 * (HS / PACK); e += 32) {
        const int row = e / (HS / PACK), chunk = e % (HS / PACK);
        if (row0 + row >= T) continue;
        const void* from = tile_chunk(tile, tile_rows, tile_row + row, chunk);
        writer.put((row0 + row) * stride + chunk * PACK, *static_cast<const RawPack<floatX, PACK>*>(from));
    }
}

// Returns the sums of columns 2 lane and 2 lane + 1 over the 16 rows of 64 columns of a fragment. The 8 lanes with the
// same columns exchange half of their sums, then a quarter, then an eighth: 14 shuffles instead of 3 for each of 16.
__device__ __forceinline__ void column_sums(float (&sum)[2], const float* fragment) {
    constexpr int COLUMNS = TILE_COLUMNS / 4;   // of a lane
    float s[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) s[c] = fragment[c / 2 * 4 + c % 2] + fragment[c / 2 * 4 + c % 2 + 2];
#pragma unroll
    for (int kept = COLUMNS / 2; kept >= 2; kept /= 2) {   // with lanes at distance 16, 8 and 4
        const bool upper = threadIdx.x & 2 * kept;
        for (int c = 0; c < kept; c++) {
            const float mine = upper ? s[c + kept] : s[c], other = upper ? s[c] : s[c + kept];
            s[c] = mine + __shfl_xor_sync(FULL_WARP, other, 2 * kept);
        }
    }
    sum[0] = s[0];
    sum[1] = s[1];
}

// ==== pipelines =============================================================
// Hopper: a producer warpgroup loads tiles, consumer warpgroups multiply them.

constexpr int WARPGROUP = 128, WGMMA_M = 64;   // threads; rows of a product

// The mbarriers of a ring buffer. The producer fills stage s and arrives at full[s], for which consumers wait. Each
// consumer warp arrives at empty[s] after its last read, for which the producer waits.
template <int STAGES, int PRODUCERS = 1> struct Ring {   // PRODUCERS: threads that arrive at full
    uint64_t full[STAGES], empty[STAGES];

    __device__ void init(int consumer_warps) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], PRODUCERS);
            mbarrier_init(&empty[s], consumer_warps);
        }
    }
};

template <typename... Rings> __device__ __forceinline__ void init_rings(int consumer_warps, Rings&... rings) {
    if (threadIdx.x == 0) {
        (rings.init(consumer_warps), ...);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// A position in a ring: the stage, and the phase bit (parity) of its barriers (CUTLASS: PipelineState).
template <int STAGES> struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        stage = (stage + 1) % STAGES;
        phase ^= stage == 0;
    }
};

// Consumers: blocks until the stage is filled.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void wait_full(Ring<STAGES, PRODUCERS>& ring, const PipelineState<STAGES>& state) {
    mbarrier_wait(&ring.full[state.stage], state.phase);
}
// Producer: blocks until all consumer warps have released the stage; returns at once for a stage of a new ring.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void wait_empty(Ring<STAGES, PRODUCERS>& ring, const PipelineState<STAGES>& state) {
    mbarrier_wait(&ring.empty[state.stage], state.phase ^ 1);
}
// A consumer warp: tells the producer that the warp has finished reading the stage, and advances.
template <int STAGES, int PRODUCERS>
__device__ __forceinline__ void release(Ring<STAGES, PRODUCERS>& ring, PipelineState<STAGES>& state) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[state.stage]);
    state.advance();
}

// Returns the descriptor of an address that is `bytes` higher: a descriptor's low bits are an address / 16.
__device__ __forceinline__ uint64_t offset_by(uint64_t descriptor, int bytes) { return descriptor + bytes / 16; }
// Returns the descriptor with this stride between blocks of 64 columns, for Major::MN (wgmma_descriptor sets 16 bytes).
__device__ __forceinline__ uint64_t mn_major(uint64_t descriptor, int column_block_bytes) {
    return descriptor + (static_cast<uint64_t>(column_block_bytes / 16 - 1) << 16);
}

// Warpgroups of a block: one producer and COUNT consumers. A launch gives all threads the same number of registers; the
// producer needs few, so setmaxnreg moves the rest of the 65536 to the consumers.
template <int COUNT> struct Warpgroups {
    static constexpr int CONSUMERS = COUNT;
    static constexpr int BLOCK = WARPGROUP * (1 + CONSUMERS);
    static constexpr int WARPS = 4 * CONSUMERS;      // consumer warps
    static constexpr int ROWS = WGMMA_M * CONSUMERS; // of a work tile
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
};

// Returns the first row of this consumer warp in the block's work tile.
__device__ __forceinline__ int consumer_row() { return (threadIdx.x - WARPGROUP) / 32 * 16; }

// Makes the consumer warpgroups issue their products in cyclic order (CUTLASS: OrderedSequenceBarrier), so that one
// warpgroup's products run during another's arithmetic. Each warpgroup has a named barrier, whose phase completes when
// the warpgroup waits and the one before it has arrived. Nothing waits for the last arrive() of a block.
template <int CONSUMERS> struct OrderedBarrier {
    int group;

    __device__ __forceinline__ explicit OrderedBarrier(int g) : group(g) {
        if (group == CONSUMERS - 1) arrive();   // group 0 starts
    }
    __device__ __forceinline__ void wait() const { named_barrier_sync(1 + group, 2 * WARPGROUP); }
    __device__ __forceinline__ void arrive() const { named_barrier_arrive(1 + (group + 1) % CONSUMERS, 2 * WARPGROUP); }
};

// Returns the first row of this consumer warpgroup in the work tile. The broadcast from lane 0 tells the compiler that
// the row is uniform: wgmma needs descriptors in uniform registers.
__device__ __forceinline__ int warpgroup_row() {
    return __shfl_sync(FULL_WARP, consumer_row() / WGMMA_M * WGMMA_M, 0);
}

// ==== tensor maps ===========================================================

// TMA's description of a tensor (n3, n2, n1, n0) in global memory, n0 contiguous; passed to kernels by value. One load
// copies a box of 64 columns of n0 by `rows` of n2.
struct TensorMap {
    CUtensorMap map;
    const void* data;   // for the trace
};

// Returns a tensor map. extents: n0 to n3; strides: of n1 to n3, in bytes; rows: of the box
TensorMap make_tensor_map(const floatX* data, const uint64_t (&extents)[4], const uint64_t (&strides)[3],
                          uint32_t rows) {
    static const auto encode = [] {   // driver function, looked up at run time: build machines may have no driver
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#else   // looks up the toolkit's version of the function, which is the same
        check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#endif
        if (found != cudaDriverEntryPointSuccess) throw Failure("the driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const uint32_t box[] = {TILE_COLUMNS, 1, rows, 1}, steps[] = {1, 1, 1, 1};
    TensorMap result;
    result.data = data;
    constexpr auto TYPE = FLOATX == DType::FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult status = encode(&result.map, TYPE, 4, const_cast<floatX*>(data), extents, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) throw Failure("cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
    return result;
}

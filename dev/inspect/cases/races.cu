// Kernels with a race or an uninitialised read (<false>) and their correct versions (<true>), for test_inspect.py. A
// comment after an access is its name in the test, which lists the accesses that race.
#include <cooperative_groups.h>
#include <cub/cub.cuh>
#include <cuda/atomic>
#include <cuda/pipeline>
#include <cuda_runtime.h>

constexpr unsigned ALL = 0xffffffff;

// ---- barriers

template <bool right> __global__ void neighbour(float* out) {
    __shared__ float tile[65];
    tile[threadIdx.x] = 1;                            // writes
    if (threadIdx.x == 63) tile[64] = 1;
    if (right) __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x + 1];   // reads
}
// The tile may be overwritten only after all threads have read it.
template <bool right> __global__ void end_of_loop(float* out, const float* in) {
    __shared__ float tile[64];
    float sum = 0;
    for (int i = 0; i < 3; i++) {
        tile[threadIdx.x] = in[i * 64 + threadIdx.x]; // writes
        __syncthreads();
        sum += tile[63 - threadIdx.x];                // reads
        if (right) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
// A barrier does not wait for threads that have exited; their stores are visible after it.
template <bool right> __global__ void leaves_early(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (threadIdx.x >= 50) return;
    if (right) __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
}
// __syncwarp does not order accesses of other warps.
template <bool right> __global__ void warps(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (right) __syncthreads();
    else __syncwarp();
    if (threadIdx.x >= 32) out[threadIdx.x] = tile[63 - threadIdx.x];   // reads
}

enum class Order { NOTHING, SYNCWARP, SHUFFLE, VOTE };
template <Order order> __global__ void lanes(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (order == Order::SYNCWARP) __syncwarp();
    if (order == Order::SHUFFLE) __shfl_xor_sync(ALL, 1.0f, 1);
    if (order == Order::VOTE) __any_sync(ALL, threadIdx.x == 3);
    out[threadIdx.x] = tile[threadIdx.x ^ 1];         // reads
}
// __syncwarp orders only the lanes in its mask.
template <bool right> __global__ void half_a_warp(float* out) {
    __shared__ float tile[32];
    tile[threadIdx.x] = 1;                            // writes
    if (threadIdx.x < 16) {
        __syncwarp(0x0000ffff);
    } else {
        __syncwarp(0xffff0000);
        out[threadIdx.x] = tile[threadIdx.x ^ (right ? 1 : 17)];   // reads
    }
    __syncthreads();
}

// ---- bytes

// Accesses to different bytes of a word do not race with each other, but they race with an access to the whole word.
template <bool right> __global__ void bytes(int* out) {
    __shared__ __align__(4) char tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (right) out[threadIdx.x] = tile[threadIdx.x];
    else if (threadIdx.x == 63) out[0] = *reinterpret_cast<int*>(tile);   // reads
}

// ---- global memory

template <bool right> __global__ void one_word(int* out) {
    if (threadIdx.x == 0) out[right ? blockIdx.x : 0] = 1;   // writes
}
// __syncthreads does not order accesses of other blocks.
template <bool right> __global__ void next_block(float* out) {
    out[blockIdx.x * 64 + threadIdx.x] = 1;           // writes
    __syncthreads();
    const unsigned other = right ? blockIdx.x : (blockIdx.x + 1) % gridDim.x;
    out[4096 + blockIdx.x * 64 + threadIdx.x] = out[other * 64 + 63 - threadIdx.x];   // reads
}
// One launch writes; the next launch reads the values in other blocks.
__global__ void launches(float* out, bool writes) {
    if (writes) out[blockIdx.x * 64 + threadIdx.x] = 1;
    else out[4096 + blockIdx.x * 64 + threadIdx.x] = out[(3 - blockIdx.x) * 64 + threadIdx.x];
}

template <bool right> __global__ void atomic_and_store(int* sum) {
    if (right)
        atomicExch(sum, 0);
    else
        *sum = 0;                                     // writes
    atomicAdd(sum, 1);                                // adds
}
// The CUDA C++ Programming Guide's loop of atomicCAS begins with a load.
template <bool right> __global__ void product(float* out) {
    int* const place = reinterpret_cast<int*>(out);
    int seen = *place, expected;                      // loads
    if (!right) atomicAdd(out, __int_as_float(seen)); // adds
    else do {
        expected = seen;
        seen = atomicCAS(place, expected, __float_as_int(2 * __int_as_float(expected)));
    } while (seen != expected);
}
template <bool right> __global__ void histogram(int* out, const int* in) {
    __shared__ int counts[8];
    if (threadIdx.x < 8) counts[threadIdx.x] = 0;     // clears
    if (right) __syncthreads();
    atomicAdd(&counts[in[threadIdx.x] % 8], 1);       // adds
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(out + threadIdx.x, counts[threadIdx.x]);
}

// The last block to finish adds the parts of all blocks. Order: __syncthreads, __threadfence by thread 0, atomicAdd.
template <bool right> __global__ void last_block(float* parts, unsigned* count, float* out) {
    __shared__ bool is_last;
    parts[blockIdx.x * 64 + threadIdx.x] = 1;         // writes
    __syncthreads();
    if (threadIdx.x == 0) {
        if (right) __threadfence();
        is_last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) out[threadIdx.x] = parts[threadIdx.x] + parts[64 + threadIdx.x];   // reads
    if (is_last && threadIdx.x == 0) *count = 0;      // ordered by its own atomicAdd
}
// Alternative order: __threadfence by each thread, __syncthreads, atomicAdd.
template <bool right> __global__ void last_block_of_fences(float* parts, unsigned* count, float* out) {
    __shared__ bool is_last;
    parts[blockIdx.x * 64 + threadIdx.x] = 1;         // writes
    __threadfence();
    if (right) __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(count, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last) out[threadIdx.x] = parts[threadIdx.x] + parts[64 + threadIdx.x];   // reads
}

// ---- synchronisation by libraries

namespace cg = cooperative_groups;
template <bool right> __global__ void groups(float* out) {
    __shared__ float tile[64];
    const auto block = cg::this_thread_block();
    tile[threadIdx.x] = 1;                            // writes
    if (right) block.sync();
    else cg::tiled_partition<32>(block).sync();
    if (threadIdx.x >= 32) out[threadIdx.x] = tile[63 - threadIdx.x];   // reads
}
// The storage of two reductions is the same memory.
template <bool right> __global__ void reductions(float* out) {
    using Reduce = cub::BlockReduce<float, 64>;
    __shared__ typename Reduce::TempStorage storage;
    float sum = Reduce(storage).Sum(1);
    if (right) __syncthreads();
    sum += Reduce(storage).Sum(2);
    if (threadIdx.x == 0) out[0] = sum;
}
// Blocks read what other blocks have written before the grid's barrier.
template <bool right> __global__ void grids(float* out) {
    __shared__ float own;
    const auto grid = cg::this_grid();
    if (threadIdx.x == 0) own = 1;
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        out[grid.thread_rank()] = own;                // writes
        if (right) grid.sync();
        else __syncthreads();
        const float x = out[(grid.thread_rank() + 64) % grid.size()];   // reads
        if (right) grid.sync();
        if (threadIdx.x == 0) own = x;
        __syncthreads();
    }
}
// Copies complete at a barrier, or at the end of a pipeline's stage.
template <bool right> __global__ void copies(float* out, const float* in) {
    __shared__ cuda::barrier<cuda::thread_scope_block> ready;
    __shared__ float tile[64];
    if (threadIdx.x == 0) init(&ready, 64);
    __syncthreads();
    cuda::memcpy_async(&tile[threadIdx.x], in + threadIdx.x, 4, ready);   // writes
    const auto phase = ready.arrive();
    if (right) ready.wait(phase);
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
}
template <bool right> __global__ void stages(float* out, const float* in) {
    __shared__ float tile[64];
    auto pipe = cuda::make_pipeline();
    pipe.producer_acquire();
    cuda::memcpy_async(&tile[threadIdx.x], in + threadIdx.x, 4, pipe);   // writes
    pipe.producer_commit();
    if (right) pipe.consumer_wait();
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
    pipe.consumer_release();
}
// One thread publishes a value, for which the others wait.
template <bool right> __global__ void flag(float* out) {
    constexpr auto order = right ? cuda::memory_order_release : cuda::memory_order_relaxed;
    __shared__ cuda::atomic<int, cuda::thread_scope_block> is_set;
    __shared__ float value;
    if (threadIdx.x == 0) is_set.store(0);
    __syncthreads();
    if (threadIdx.x == 33) {
        value = 1;                                    // writes
        is_set.store(1, order);
    }
    is_set.wait(0);
    out[threadIdx.x] = value;                         // reads
}

// ---- uninitialised reads

template <bool right> __global__ void unwritten(float* out) {
    __shared__ float tile[64];
    if (right || threadIdx.x < 60) tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
}
template <bool right> __global__ void unwritten_dynamic(float* out) {
    extern __shared__ float tile[];
    if (right) tile[threadIdx.x] = 0;
    __syncthreads();
    tile[threadIdx.x] += 1;                           // reads
    out[threadIdx.x] = tile[threadIdx.x];
}

// ---- two sites for one access

// Lanes read the same word in two lines; both race with the store.
__global__ void two_readers(float* out) {
    __shared__ float word;
    if (threadIdx.x == 0) word = 1;
    __syncthreads();
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = word;                      // even
    else
        out[threadIdx.x] = word + 1;                  // odd
    if (threadIdx.x == 63) word = 2;                  // writes
}
// All lanes read a word. Lane 31 synchronises only with lane 0 before it writes the word.
__global__ void two_lanes_met(float* out) {
    __shared__ float word;
    if (threadIdx.x == 0) word = 1;
    __syncwarp();
    out[threadIdx.x] = word;                          // reads
    if (threadIdx.x % 31 == 0) __syncwarp(0x80000001);
    if (threadIdx.x == 31) word = 2;                  // writes
}

// A reduction in a warp without __syncwarp: each line races with each.
__global__ void reduces(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = tile[threadIdx.x + 32] = 1;
    tile[threadIdx.x] += tile[threadIdx.x + 16];
    tile[threadIdx.x] += tile[threadIdx.x + 8];
    tile[threadIdx.x] += tile[threadIdx.x + 4];
    out[threadIdx.x] = tile[threadIdx.x];
}

// faults: the block without a barrier, and the one that stores past the end of `out`.
__global__ void late(float* out, const unsigned* faults) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (blockIdx.x != faults[0]) __syncthreads();
    const unsigned at = blockIdx.x == faults[1] ? 1 << 14 : 64 * blockIdx.x;
    out[at + threadIdx.x] = tile[63 - threadIdx.x];   // reads
}

template <bool right> static void both(float* out, const float* in, unsigned* counts) {
    int* numbers = reinterpret_cast<int*>(out);
    neighbour<right><<<2, 64>>>(out);
    end_of_loop<right><<<1, 64>>>(out, in);
    leaves_early<right><<<1, 64>>>(out);
    warps<right><<<1, 64>>>(out);
    half_a_warp<right><<<1, 32>>>(out);
    bytes<right><<<1, 64>>>(numbers);
    one_word<right><<<3, 32>>>(numbers);
    next_block<right><<<2, 64>>>(out);
    atomic_and_store<right><<<1, 64>>>(numbers);
    product<right><<<1, 64>>>(out);
    histogram<right><<<2, 64>>>(numbers, reinterpret_cast<const int*>(in));
    cudaMemset(counts, 0, 1024);
    last_block<right><<<2, 64>>>(out, counts, out + 4096);
    last_block_of_fences<right><<<2, 64>>>(out, counts + 1, out + 4096);
    groups<right><<<1, 64>>>(out);
    flag<right><<<1, 64>>>(out);
    copies<right><<<1, 64>>>(out, in);
    stages<right><<<1, 64>>>(out, in);
    reductions<right><<<1, 64>>>(out);
    void* arguments[] = {&out};
    cudaLaunchCooperativeKernel((void*)grids<right>, 3, 64, arguments);
    unwritten<right><<<1, 64>>>(out);
    unwritten_dynamic<right><<<1, 64, 256>>>(out);
}

__global__ void misaligned(float* out) { *reinterpret_cast<float4*>(out + 1) = {}; }

int main(int count, char**) {
    float *in, *out;
    unsigned* counts;
    cudaMalloc(&in, 1 << 16);
    cudaMalloc(&out, 1 << 16);
    cudaMalloc(&counts, 1024);
    cudaMemset(in, 0, 1 << 16);
    if (count > 1) misaligned<<<1, 1>>>(out);
    both<true>(out, in, counts);
    both<false>(out, in, counts);
    lanes<Order::NOTHING><<<1, 64>>>(out);
    lanes<Order::SYNCWARP><<<1, 64>>>(out);
    lanes<Order::SHUFFLE><<<1, 64>>>(out);
    lanes<Order::VOTE><<<1, 64>>>(out);
    for (bool writes : {true, false}) launches<<<4, 64>>>(out, writes);
    two_readers<<<1, 64>>>(out);
    two_lanes_met<<<1, 32>>>(out);
    reduces<<<1, 32>>>(out);
    const unsigned faults[] = {256, 256, 256, 137, 255, 256};   // in none of the first launch's 256 blocks
    cudaMemset(counts, 255, 1024);
    cudaMemcpy(counts, faults, sizeof(faults), cudaMemcpyHostToDevice);
    for (unsigned launch = 0; launch < 3; launch++) late<<<256, 64>>>(out, counts + 2 * launch);
    for (unsigned launch = 0; launch < 20; launch++) late<<<256, 64>>>(in, counts + 6 + launch);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

// Kernels with a race or an uninitialised read (<false>) and their correct versions (<true>), for test_inspect.py. A
// comment after an access is its name in the test, which lists the accesses that race.
#include <cooperative_groups.h>
#include <cub/cub.cuh>
#include <cuda/atomic>
#include <cuda/pipeline>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

// ---- barriers

// The barrier does not wait for threads that have exited; their stores are visible after it.
template <bool right> __global__ void neighbour(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (threadIdx.x >= 50) return;
    if (right) __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x + 1];   // reads
}
// __syncwarp orders only the lanes in its mask, and the barrier of a tile of 32 threads only those of a warp.
enum class Order { NOTHING, SYNCWARP, SHUFFLE, VOTE, HALVES, TILE, BLOCK };
template <Order order, int distance> __global__ void lanes(float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (order == Order::SYNCWARP) __syncwarp();
    if (order == Order::SHUFFLE) __shfl_xor_sync(0xffffffff, 1.0f, 1);
    if (order == Order::VOTE) __any_sync(0xffffffff, threadIdx.x == 3);
    if (order == Order::HALVES && threadIdx.x % 32 < 16) __syncwarp(0x0000ffff);
    if (order == Order::HALVES && threadIdx.x % 32 >= 16) __syncwarp(0xffff0000);
    if (order == Order::TILE) cg::tiled_partition<32>(cg::this_thread_block()).sync();
    if (order == Order::BLOCK) cg::this_thread_block().sync();
    out[threadIdx.x] = tile[threadIdx.x ^ distance];  // reads
}

// ---- bytes

// Accesses to different bytes of a word do not race with each other, but they race with an access to the whole word.
template <bool right> __global__ void bytes(float* out) {
    __shared__ __align__(4) char tile[64];
    tile[threadIdx.x] = 1;                            // writes
    if (right) out[threadIdx.x] = tile[threadIdx.x];
    else if (threadIdx.x == 63) out[0] = *reinterpret_cast<int*>(tile);   // reads
}

// ---- global memory

template <bool right> __global__ void one_word(float* out) {
    if (threadIdx.x == 0) out[right ? blockIdx.x : 0] = 1;   // writes
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
template <bool right> __global__ void histogram(float* out, const float* in) {
    __shared__ int counts[8];
    if (threadIdx.x < 8) counts[threadIdx.x] = 0;     // clears
    if (right) __syncthreads();
    atomicAdd(&counts[static_cast<int>(in[threadIdx.x]) % 8], 1);   // adds
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(out + threadIdx.x, static_cast<float>(counts[threadIdx.x]));
}

// The last block to finish adds the parts of all blocks, which an atomic on a variable counts. Either thread 0 has a
// __threadfence between __syncthreads and atomicInc, or each thread has one before __syncthreads.
__device__ unsigned arrived;
template <bool right, bool each_has_fence> __global__ void last_block(float* parts, float* out) {
    __shared__ bool is_last;
    parts[blockIdx.x * 64 + threadIdx.x] = 1;         // writes
    if (each_has_fence) __threadfence();
    if (right || !each_has_fence) __syncthreads();
    if (threadIdx.x == 0) {
        if (right && !each_has_fence) __threadfence();
        is_last = atomicInc(&arrived, gridDim.x) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) out[threadIdx.x] = parts[threadIdx.x] + parts[64 + threadIdx.x];   // reads
    if (is_last && threadIdx.x == 0) arrived = 0;     // ordered by its own atomicInc
}

// ---- synchronisation by libraries

// The storage of two reductions is the same memory.
template <bool right> __global__ void reductions(float* out) {
    using Reduce = cub::BlockReduce<float, 64>;
    __shared__ typename Reduce::TempStorage storage;
    float sum = Reduce(storage).Sum(1);
    if (right) __syncthreads();
    sum += Reduce(storage).Sum(2);
    if (threadIdx.x == 0) out[0] = sum;
}
// Blocks read what other blocks have written before the grid's barrier, and overwrite it after the next one.
template <bool right> __global__ void grids(float* out) {
    const auto grid = cg::this_grid();
    for (int i = 0; i < 2; i++) {
        out[grid.thread_rank()] = 1;                  // writes
        if (right) grid.sync();
        else __syncthreads();
        out[4096 + grid.thread_rank()] = out[(grid.thread_rank() + 64) % grid.size()];   // reads
        if (right) grid.sync();
    }
}
// Copies complete at a barrier, or at the end of a pipeline's stage.
template <bool right> __global__ void copies(float* out, const float* in) {
    __shared__ cuda::barrier<cuda::thread_scope_block> ready;
    __shared__ float tile[64], next[64];
    if (threadIdx.x == 0) init(&ready, 64);
    __syncthreads();
    cuda::memcpy_async(&tile[threadIdx.x], in + threadIdx.x, 4, ready);   // writes
    if (right) ready.arrive_and_wait();
    else (void)ready.arrive();
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
    auto pipe = cuda::make_pipeline();
    pipe.producer_acquire();
    cuda::memcpy_async(&next[threadIdx.x], in + threadIdx.x, 4, pipe);   // writes next
    pipe.producer_commit();
    if (right) pipe.consumer_wait();
    __syncthreads();
    out[threadIdx.x] += next[63 - threadIdx.x];       // reads next
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
    extern __shared__ float dynamic[];
    if (right || threadIdx.x < 60) tile[threadIdx.x] = 1;
    if (right) dynamic[threadIdx.x] = 0;
    __syncthreads();
    dynamic[threadIdx.x] += 1;                        // reads dynamic
    out[threadIdx.x] = tile[63 - threadIdx.x];        // reads
}

// ---- several sites or threads

// Lanes read the same word in two lines; both race with the store. Lane 31 synchronises only with lane 0 before it.
__global__ void two_readers(float* out) {
    __shared__ float word;
    if (threadIdx.x == 0) word = 1;
    __syncwarp();
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = word;                      // even
    else
        out[threadIdx.x] = word + 1;                  // odd
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

// ---- variables

struct Pair {
    float a, b;
};
__device__ int total, hits[1];
__device__ float table[2048], next_to_table[32];
__device__ Pair pairs[32];
__constant__ float weights[32];
__managed__ float managed[32];
static __device__ float hidden[32], unchanged[32] = {1, 2};
template <class T> __device__ T of_template[32];
namespace outer { namespace {
__device__ float nested[32] = {3};
} }

template <bool right> __global__ void updates() {
    if (right) atomicExch(&total, 0);
    else total = 0;                                   // writes
    atomicAdd(&total, 1);                             // adds
}
__global__ void either() {
    *(threadIdx.x % 2 == 0 ? hits : &total) = 1;      // in one instruction
}
__device__ int ticket(int* out) {
    static int next;
    return atomicAdd(&next, out != nullptr);
}
__global__ void tickets(int* out) { out[threadIdx.x] = ticket(out); }   // draws

__global__ void loads(float* out, const float* by_address) {
    const unsigned t = threadIdx.x;
    out[t] = table[32 * t];                           // a column
    out[32 + t] = table[t];                           // a row
    out[64 + t] = weights[t];                         // constant
    out[96 + t] = managed[t];                         // managed
    out[128 + t] = hidden[t];                         // static
    out[160 + t] = unchanged[t];                      // static and never stored to
    out[192 + t] = outer::nested[t];                  // in namespaces
    out[224 + t] = of_template<float>[t];             // of a template
    out[256 + t] = pairs[t].b;                        // structs
    out[288 + t] = by_address[t];                     // by address
}

// ---- accesses out of bounds

__global__ void past_the_end(float* out, int first) {
    out[threadIdx.x] = table[2017 + threadIdx.x];     // one too far
    hidden[threadIdx.x + 1] = 1;                      // stores
    (managed + first)[threadIdx.x] = 1;                // one too early
    out[threadIdx.x] = of_template<int>[threadIdx.x + 1];   // of a template
}

__global__ void past_arrays(float* out) {
    __shared__ float first[64], tile[64];
    extern __shared__ float dynamic[];
    float local[32], *middle = tile + threadIdx.x;
    for (float& value : local) value = out[0];
    first[threadIdx.x] = middle[0] = dynamic[threadIdx.x] = 1;
    tile[threadIdx.x + 33] = first[threadIdx.x];      // by index
    middle[34] = 1;                                   // by address
    dynamic[threadIdx.x + 1] = 1;                     // dynamic
    out[threadIdx.x] = local[threadIdx.x + 1];        // local
}
__global__ void far_away(float* out, size_t distance) {
    if (blockIdx.x == 1) out[distance] = 1;           // far away
}

// ---- all of them

template <bool right> static void both(float* out, const float* in) {
    neighbour<right><<<2, 64>>>(out);
    one_word<right><<<3, 32>>>(out);
    histogram<right><<<2, 64>>>(out, in);
    last_block<right, false><<<2, 64>>>(out, out + 4096);
    last_block<right, true><<<2, 64>>>(out, out + 4096);
    copies<right><<<1, 64>>>(out, in);
    product<right><<<64, 1>>>(out);
    for (auto kernel : {bytes<right>, flag<right>, reductions<right>}) kernel<<<1, 64>>>(out);
    void* arguments[] = {&out};
    cudaLaunchCooperativeKernel((void*)grids<right>, 3, 64, arguments);
    unwritten<right><<<1, 64, 256>>>(out);
}

__global__ void misaligned(float* out) { *reinterpret_cast<float4*>(out + 1) = {}; }

int main(int argc, char** argv) {
    float *in, *out, *address;
    unsigned* counts;
    cudaMalloc(&in, 1 << 16);
    cudaMalloc(&out, 1 << 16);
    cudaMalloc(&counts, 1024);
    cudaMemset(in, 0, 1 << 16);
    both<true>(out, in);
    both<false>(out, in);
    for (auto kernel : {lanes<Order::NOTHING, 1>, lanes<Order::SYNCWARP, 1>, lanes<Order::SHUFFLE, 1>,
                        lanes<Order::VOTE, 1>, lanes<Order::HALVES, 1>, lanes<Order::HALVES, 17>,
                        lanes<Order::TILE, 63>, lanes<Order::BLOCK, 63>})
        kernel<<<1, 64>>>(out);
    for (auto kernel : {two_readers, reduces}) kernel<<<1, 32>>>(out);
    const unsigned faults[] = {256, 256, 256, 137, 255, 256};   // in none of the first launch's 256 blocks
    cudaMemset(counts, 255, 1024);
    cudaMemcpy(counts, faults, sizeof(faults), cudaMemcpyHostToDevice);
    for (unsigned launch = 0; launch < 3; launch++) late<<<256, 64>>>(out, counts + 2 * launch);
    for (unsigned launch = 0; launch < 20; launch++) late<<<256, 64>>>(in, counts + 6 + launch);
    const float values[32] = {1};
    cudaMemcpyToSymbol(weights, values, sizeof(values));
    managed[0] = 1;
    cudaGetSymbolAddress(reinterpret_cast<void**>(&address), outer::nested);
    updates<true><<<2, 1>>>();
    updates<false><<<2, 1>>>();
    updates<false><<<4, 1>>>();
    either<<<1, 64>>>();
    tickets<<<1, 64>>>(reinterpret_cast<int*>(out));
    loads<<<1, 32>>>(out, address);
    past_the_end<<<1, 32>>>(out, -1);
    past_arrays<<<1, 32, 128>>>(out);
    if (argc > 1 && *argv[1] == 'f') far_away<<<2, 32>>>(out, size_t{1} << 50);
    if (argc > 1) misaligned<<<1, 1>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

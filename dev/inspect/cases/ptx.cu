// Kernels with PTX instructions (the functions of dev/cpu/ptx.h): correct, and with one part removed or moved. Kernels
// that do not finish run only if the program's argument names them. See test_inspect.py.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <ptx.h>

using namespace cuda_cpu::ptx;

#include <string>

constexpr int TILE_BYTES = 64 * 128;

extern __shared__ __align__(1024) char memory[];

// The address of a 16-byte chunk in a tile with 128-byte rows, in the 128-byte swizzle of TMA and wgmma.
__device__ char* chunk_at(char* tile, unsigned row, unsigned chunk) {
    return tile + row * 128 + (chunk ^ row % 8) * 16;
}

// ---- ldmatrix

template <bool swizzled> __global__ void matrices(float* out, const float*) {
    for (unsigned i = threadIdx.x; i < 32 * 32; i += 32) reinterpret_cast<unsigned*>(memory)[i] = i;
    __syncwarp();
    uint32_t r[4];
    char* row = swizzled ? chunk_at(memory, threadIdx.x, 3) : memory + threadIdx.x * 128 + 48;
    ldmatrix(r, row);                                 // loads
    out[threadIdx.x] = static_cast<float>(r[0] + r[3]);
}

// ---- cp.async

enum class Copies { RIGHT, WAITED_LATE, ONE_IN_FLIGHT, NO_BARRIER, NO_COMMIT };

// Two stages: one is read while the next one is loaded. cp_async_wait does not wait for copies without a commit.
template <Copies version> __global__ void copies(float* out, const float* in) {
    constexpr int count = 4;
    float* stages = reinterpret_cast<float*>(memory);
    const unsigned t = threadIdx.x;
    cp_async(stages + 4 * t, in + 4 * t, true);       // first
    if (version != Copies::NO_COMMIT) cp_async_commit();
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) cp_async(stages + (i + 1) % 2 * 256 + 4 * t, in + (i + 1) * 256 + 4 * t, true);   // copies
        if (version != Copies::NO_COMMIT) cp_async_commit();
        if (version == Copies::ONE_IN_FLIGHT)
            cp_async_wait<2>();
        else if (version != Copies::WAITED_LATE)
            cp_async_wait<1>();
        if (version != Copies::NO_BARRIER) __syncthreads();
        const float4 x = *reinterpret_cast<float4*>(stages + i % 2 * 256 + 4 * (63 - t));   // reads
        out[i * 64 + t] = x.x + x.w;
        if (version == Copies::WAITED_LATE) cp_async_wait<1>();
        __syncthreads();
    }
    cp_async_wait<0>();
}

// ---- mbarriers and named barriers

enum class Barriers { RIGHT, LATE_WAIT, EARLY, NO_WAIT, NO_SETUP };

// The first warp writes a tile; the second warp reads it and releases it.
template <Barriers version> __global__ void hand_over(float* out, const float* in) {
    float* tile = reinterpret_cast<float*>(memory);
    uint64_t *full = reinterpret_cast<uint64_t*>(memory + 1024), *empty = full + 1;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 32);                      // sets up full
        mbarrier_init(empty, 32);                     // sets up empty
        fence_mbarrier_init();
    }
    if (version != Barriers::NO_SETUP) __syncthreads();
    constexpr bool waits_first = version != Barriers::LATE_WAIT && version != Barriers::NO_WAIT;
    for (int i = 0; i < 4; i++) {
        const uint32_t parity = static_cast<uint32_t>(i % 2);
        if (warp == 0) {
            mbarrier_wait(empty, parity ^ 1);         // waits for empty
            tile[lane] = in[i * 32 + lane];           // writes
            mbarrier_arrive(full);                    // arrives at full
        } else {
            if (waits_first) mbarrier_wait(full, parity);   // waits for full
            if (version == Barriers::EARLY) mbarrier_arrive(empty);
            out[i * 32 + lane] = tile[31 - lane];     // reads
            if (version == Barriers::LATE_WAIT) mbarrier_wait(full, parity);
            if (version != Barriers::EARLY) mbarrier_arrive(empty);   // arrives at empty
        }
    }
}
// A completed phase does not order stores before an arrival at the next phase.
template <bool right> __global__ void next_phase(float* out, const float*) {
    float* tile = reinterpret_cast<float*>(memory);
    uint64_t* barrier = reinterpret_cast<uint64_t*>(memory + 256);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tile[0] = 1;
        mbarrier_arrive(barrier);
        mbarrier_arrive(barrier);
        tile[1] = 2;                                  // writes
        mbarrier_arrive(barrier);
    }
    if (threadIdx.x == 32) {
        mbarrier_wait(barrier, 0);
        out[0] = tile[right ? 0 : 1];                 // reads
    }
}
template <bool right> __global__ void named(float* out, const float*) {
    float* tile = reinterpret_cast<float*>(memory);
    tile[threadIdx.x] = 1;                            // writes
    if (threadIdx.x < 64) {
        if (right) named_barrier_sync(1, 64);
        out[threadIdx.x] = tile[63 - threadIdx.x];    // reads
    }
}

// ---- TMA

enum class Ring { RIGHT, LATE_FULL_WAIT, NO_EMPTY_WAIT, EARLY_RELEASE };

// A thread of the second warp loads boxes into a ring buffer of two stages; the first warp reads them.
template <Ring version> __global__ void ring(float* out, const __grid_constant__ CUtensorMap map, int count) {
    uint64_t *full = reinterpret_cast<uint64_t*>(memory + 2 * TILE_BYTES), *empty = full + 2;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, 32);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x > 32) return;
    for (int i = 0; i < count; i++) {
        const int stage = i % 2;
        const uint32_t parity = static_cast<uint32_t>(i / 2 % 2);
        char* tile = memory + stage * TILE_BYTES;
        if (threadIdx.x == 32) {
            if (version != Ring::NO_EMPTY_WAIT) mbarrier_wait(empty + stage, parity ^ 1);
            mbarrier_arrive_expect_tx(full + stage, TILE_BYTES);
            tma_load(tile, &map, full + stage, 0, 0, 64 * i, 0);   // fills
        } else {
            if (version != Ring::LATE_FULL_WAIT) mbarrier_wait(full + stage, parity);
            if (version == Ring::EARLY_RELEASE) mbarrier_arrive(empty + stage);
            out[threadIdx.x] = *reinterpret_cast<float*>(chunk_at(tile, threadIdx.x, 0));   // reads
            if (version == Ring::LATE_FULL_WAIT) mbarrier_wait(full + stage, parity);
            if (version != Ring::EARLY_RELEASE) mbarrier_arrive(empty + stage);
        }
    }
}

// ---- wgmma

enum class Products { RIGHT, NO_FENCE, FENCE_AFTER, NO_BARRIER, LATE_WAIT, NO_COMMIT };

// d = a a^T for a 64 x 64 tile a, which threads store before and overwrite after the product.
template <Products version> __global__ void products(float* out, const float* in) {
    const unsigned t = threadIdx.x;
    for (unsigned i = t; i < 64 * 8; i += 128)
        *reinterpret_cast<float4*>(chunk_at(memory, i / 8, i % 8)) = reinterpret_cast<const float4*>(in)[i];   // writes
    if (version != Products::NO_FENCE && version != Products::FENCE_AFTER) async_fence();
    if (version != Products::NO_BARRIER) __syncthreads();
    if (version == Products::FENCE_AFTER) async_fence();
    float d[32];
    wgmma_fence(d);
    for (int k = 0; k < 4; k++) {
        const uint64_t tile = wgmma_descriptor(memory + 32 * k);
        wgmma<64, Major::K>(d, tile, tile, k > 0);    // multiplies
    }
    if (version != Products::NO_COMMIT) wgmma_commit();
    if (version == Products::NO_COMMIT)
        wgmma_wait<0>();
    else if (version != Products::LATE_WAIT)
        wgmma_wait<0>(d);
    if (version != Products::NO_BARRIER) __syncthreads();
    for (unsigned i = t; i < 64 * 8; i += 128)
        *reinterpret_cast<float4*>(chunk_at(memory, i / 8, i % 8)) = float4{};     // overwrites
    if (version == Products::LATE_WAIT) {
        __syncthreads();
        wgmma_wait<0>(d);
    }
    out[t] = d[0];
}
__global__ void small_product(float* out, const float*) {
    const uint32_t a[4] = {threadIdx.x, 1, 2, 3};
    float d[4] = {};
    mma_m16n8k16(d, a, 4, 5);
    mma_m16n8k16(d, a, 6, 7);
    out[threadIdx.x] = d[0];
}

// ---- a tile scheduler

__global__ void numbers(float* out, int* counter, unsigned count) {
    if (threadIdx.x > 0) return;
    for (unsigned n = blockIdx.x; n < count; n = gridDim.x + atomic_inc(counter, count - 1))
        if (n % gridDim.x == blockIdx.x) out[n] = 1;   // in turn
}

// ---- all of them

int main(int argc, char** argv) {
    const std::string unfinished = argc > 1 ? argv[1] : "";
    float *in, *out;
    cudaMalloc(&in, 1 << 16);
    cudaMalloc(&out, 1 << 16);
    cudaMemset(in, 0, 1 << 16);
    const uint64_t extents[] = {64, 1, 64 * 6, 1}, strides[] = {128, 128, 64 * 6 * 128};
    const uint32_t box[] = {64, 1, 64, 1}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, in, extents, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (unfinished == "hand_over_without_wait") {
        hand_over<Barriers::NO_WAIT><<<1, 64, TILE_BYTES>>>(out, in);
    } else if (unfinished == "ring_without_empty_wait") {
        ring<Ring::NO_EMPTY_WAIT><<<1, 64, 2 * TILE_BYTES + 64>>>(out, map, 6);
    } else if (unfinished == "products_without_commit") {
        products<Products::NO_COMMIT><<<1, 128, TILE_BYTES>>>(out, in);
    } else {
        for (auto kernel : {matrices<false>, matrices<true>}) kernel<<<1, 32, TILE_BYTES>>>(out, in);
        for (auto kernel : {copies<Copies::RIGHT>, copies<Copies::WAITED_LATE>, copies<Copies::ONE_IN_FLIGHT>,
                            copies<Copies::NO_BARRIER>, copies<Copies::NO_COMMIT>, hand_over<Barriers::RIGHT>,
                            hand_over<Barriers::LATE_WAIT>, hand_over<Barriers::EARLY>, hand_over<Barriers::NO_SETUP>,
                            next_phase<true>, next_phase<false>, small_product})
            kernel<<<1, 64, TILE_BYTES>>>(out, in);
        for (auto kernel : {named<true>, named<false>, products<Products::RIGHT>, products<Products::NO_FENCE>,
                            products<Products::FENCE_AFTER>, products<Products::NO_BARRIER>,
                            products<Products::LATE_WAIT>})
            kernel<<<1, 128, TILE_BYTES>>>(out, in);
        for (auto kernel : {ring<Ring::RIGHT>, ring<Ring::LATE_FULL_WAIT>, ring<Ring::EARLY_RELEASE>})
            kernel<<<1, 64, 2 * TILE_BYTES + 64>>>(out, map, 6);
        numbers<<<4, 32>>>(out, reinterpret_cast<int*>(out) + 1024, 18);
    }
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

// Kernels whose loads in flight are known, for test_inspect.py. A comment after a load is its name in the test.
#include <cuda_runtime.h>

constexpr int BLOCK = 256, ROWS = 64;

// ---- loads in flight: one warp of 32 lanes

// Each load waits for the one before.
template <class T> __global__ void chase(T* out, const T* next, int n) {
    T at = threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < n; i++) at = next[at];
    out[threadIdx.x] = at;
}
// UNROLL loads of 16 bytes, then as many stores.
template <int UNROLL> __global__ void copy(float4* out, const float4* in, int n) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += UNROLL * blockDim.x) {
        float4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = in[i + u * blockDim.x];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) out[i + u * blockDim.x] = x[u];
    }
}
// out may be in: nvcc stores each value before it loads the next.
__global__ void copy_in_turn(float4* out, const float4* in, int n) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];
}
// The next iteration's load is in flight during the store.
__global__ void copy_ahead(float4* out, const float4* in, int n) {
    float4 next = in[threadIdx.x];
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float4 x = next;
        next = in[min(i + static_cast<int>(blockDim.x), n - 1)];
        out[i] = x;
    }
}

// ---- loads behind a barrier or a shuffle: ROWS rows of BLOCK numbers

enum class Second { ADDRESS_KNOWN, ADDRESS_FROM_TILE, BRANCH_ON_TILE, SAME_ADDRESS };

// Reverses the first row, then adds an element of the second matrix.
template <Second SECOND> __global__ void add_reversed(int* out, const int* in, const int* second) {
    __shared__ int tile[BLOCK];
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
        const int i = row * BLOCK + threadIdx.x;
        tile[threadIdx.x] = in[i];                                           // first
        __syncthreads();
        int x = tile[BLOCK - 1 - threadIdx.x];
        if (SECOND == Second::ADDRESS_KNOWN) x += second[i];                 // known
        if (SECOND == Second::ADDRESS_FROM_TILE) x += second[x];             // from tile
        if (SECOND == Second::BRANCH_ON_TILE && x == 0) x = atomicAdd(out + ROWS * BLOCK, 1) + second[i];  // branch
        if (SECOND == Second::SAME_ADDRESS) x += in[i];                      // same
        out[i] = x;
        __syncthreads();
    }
}
// Scales row b by the sum of row a, both with n columns.
__global__ void scaled_by_sum(float* out, const float* a, const float* b, int n) {
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
        float sum = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += 32) sum += a[row * n + i];                   // summed
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += 32) out[row * n + i] = sum * b[row * n + i];     // scaled
    }
}

int main() {
    const size_t bytes = ROWS * BLOCK * sizeof(float4);
    float4 *out, *in;
    cudaMalloc(&out, bytes);
    cudaMalloc(&in, bytes);
    cudaMemset(in, 0, bytes);
    int *ints = reinterpret_cast<int*>(in), *results = reinterpret_cast<int*>(out);
    float* floats = reinterpret_cast<float*>(in);
    chase<<<1, 32>>>(results, ints, 16);
    chase<<<1, 32>>>(reinterpret_cast<long long*>(out), reinterpret_cast<long long*>(in), 16);
    for (auto kernel : {copy<1>, copy<2>, copy<4>, copy<8>, copy_in_turn, copy_ahead})
        kernel<<<1, 32>>>(out, in, ROWS * 32);
    for (auto kernel : {add_reversed<Second::ADDRESS_KNOWN>, add_reversed<Second::ADDRESS_FROM_TILE>,
                        add_reversed<Second::BRANCH_ON_TILE>, add_reversed<Second::SAME_ADDRESS>})
        kernel<<<1, BLOCK>>>(results, ints, ints + ROWS * BLOCK);
    scaled_by_sum<<<1, 32>>>(reinterpret_cast<float*>(out), floats, floats + ROWS * BLOCK, 32);
    return cudaDeviceSynchronize();
}

// Kernels whose loads in flight are known, for test_inspect.py.
#include <cuda_runtime.h>

constexpr int ROWS = 64;

// ---- kernels for one warp of 32 lanes

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

int main() {
    const size_t bytes = ROWS * 32 * sizeof(float4);
    float4 *out, *in;
    cudaMalloc(&out, bytes);
    cudaMalloc(&in, bytes);
    cudaMemset(in, 0, bytes);
    chase<<<1, 32>>>(reinterpret_cast<int*>(out), reinterpret_cast<int*>(in), 16);
    chase<<<1, 32>>>(reinterpret_cast<long long*>(out), reinterpret_cast<long long*>(in), 16);
    for (auto kernel : {copy<1>, copy<2>, copy<4>, copy<8>, copy_in_turn, copy_ahead})
        kernel<<<1, 32>>>(out, in, ROWS * 32);
    return cudaDeviceSynchronize();
}

// What is counted besides accesses: barriers, shuffles, lanes, shared memory. The program's argument: "nothing", where
// no kernel is to be launched, or "for_long". See test_inspect.py.
#include <cuda_runtime.h>

#include <chrono>
#include <cstring>

constexpr unsigned ALL = 0xffffffff;

__global__ void barriers(float* out)
{
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;   // stores
    __syncthreads();
    if (threadIdx.x < 32) __syncwarp();
}

__global__ void collectives(float* out)
{
    float x = static_cast<float>(threadIdx.x);
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL, x, offset);
    x = __shfl_down_sync(ALL, x, 1);
    if (__ballot_sync(ALL, x > 0) != 0) out[threadIdx.x] = x;
}

__global__ void __launch_bounds__(64) shared_bytes(float* out)
{
    __shared__ float floats[100];
    __shared__ double doubles[10];
    extern __shared__ float more[];
    if (threadIdx.x < 10) floats[threadIdx.x] = more[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x < 10) doubles[threadIdx.x] = floats[9 - threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 10) out[threadIdx.x] = static_cast<float>(doubles[9 - threadIdx.x]) + more[threadIdx.x];
}

// 48 threads: a warp, and half of one.
__global__ void a_warp_and_a_half(float* out)
{
    out[blockIdx.x * 48 + threadIdx.x] = 1;           // all
    if (threadIdx.x % 3 == 0) out[blockIdx.x * 48 + threadIdx.x] = 2;   // every third
}
// A warp's lanes are neighbours along x, then y.
__global__ void two_dimensions(float* out)
{
    out[threadIdx.y * 8 + threadIdx.x] = 1;           // row by row
    out[64 + threadIdx.x * 8 + threadIdx.y] = 1;      // column by column
}
// Half of the lanes go one way, half the other, each with a loop of its own length.
__global__ void two_ways(float* out)
{
    const unsigned t = threadIdx.x;
    if (t % 2 == 0)
        for (unsigned i = 0; i < 4; i++) out[i * 32 + t] = 1;            // even
    else
        for (unsigned i = 0; i < t / 8 + 1; i++) out[i * 32 + t] = 1;    // odd
}

int main(int argc, char** argv)
{
    const char* how = argc > 1 ? argv[1] : "";
    if (strcmp(how, "nothing") == 0) return 0;
    float* out;
    cudaMalloc(&out, 1 << 16);
    barriers<<<3, 64>>>(out);
    collectives<<<1, 64>>>(out);
    shared_bytes<<<1, 64, 128>>>(out);
    a_warp_and_a_half<<<2, 48>>>(out);
    two_dimensions<<<1, dim3(8, 8)>>>(out);
    two_ways<<<1, 32>>>(out);
    const auto begin = std::chrono::steady_clock::now();
    while (strcmp(how, "for_long") == 0 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30))
        barriers<<<3, 64>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

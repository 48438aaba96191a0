// Accesses to shared memory whose bank conflicts can be worked out by hand: test_inspect.py.
// A comment behind an access names it: // stores, // loads.
#include <cuda_runtime.h>

template <class T>
__device__ void give(float* out, T value)
{
    out[threadIdx.x] = reinterpret_cast<const float&>(value);
}

// Lanes that are so many elements apart.
template <class T, int stride>
__global__ void strided(float* out)
{
    __shared__ T tile[31 * stride + 1];
    tile[threadIdx.x * stride] = T{};                 // stores
    __syncwarp();
    const T value = tile[threadIdx.x * stride];       // loads
    give(out, value);
}

__global__ void bytes_side_by_side(char* out)
{
    __shared__ char tile[32];
    tile[threadIdx.x] = 1;                            // stores
    __syncwarp();
    out[threadIdx.x] = tile[31 - threadIdx.x];        // loads
}

// Rows are written, columns are read. A column's words are `width` apart.
template <int width>
__global__ void column(float* out)
{
    __shared__ float tile[32][width];
    for (int row = 0; row < 32; row++) tile[row][threadIdx.x] = 1;   // stores
    __syncwarp();
    give(out, tile[threadIdx.x][5]);                  // loads
}

__global__ void swizzled_column(float* out)
{
    __shared__ float tile[32][32];
    for (unsigned row = 0; row < 32; row++) tile[row][threadIdx.x ^ row] = 1;   // stores
    __syncwarp();
    give(out, tile[threadIdx.x][5 ^ threadIdx.x]);    // loads
}

// The usual transpose: a block of 32 x 8 threads, a tile of 32 x 32.
template <int width>
__global__ void transpose(float* out, const float* in)
{
    __shared__ float tile[32][width];
    for (unsigned row = threadIdx.y; row < 32; row += 8)
        tile[row][threadIdx.x] = in[row * 32 + threadIdx.x];         // stores
    __syncthreads();
    for (unsigned row = threadIdx.y; row < 32; row += 8)
        out[row * 32 + threadIdx.x] = tile[threadIdx.x][row];        // loads
}

__device__ void fill(float* tile, int count)
{
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) tile[i] = 1;
    __syncwarp();
}

__global__ void broadcast(float* out)
{
    __shared__ float tile[32];
    fill(tile, 32);
    give(out, tile[7]);                               // loads
}

// Two words, each for half of the lanes: in banks 0 and 1, or both in bank 0.
template <int apart>
__global__ void multicast(float* out)
{
    __shared__ float tile[64];
    fill(tile, 64);
    give(out, tile[threadIdx.x % 2 * apart]);         // loads
}

// As compilers do it, a pack of 32 bytes is two accesses of 16.
struct alignas(32) Pack { float x[8]; };
__global__ void pack(Pack* out)
{
    __shared__ Pack tile[32];
    tile[threadIdx.x] = Pack{};                       // stores
    __syncwarp();
    Pack mine = tile[threadIdx.x];                    // loads
    out[threadIdx.x] = mine;
}

// Half of the lanes are off.
__global__ void first_half(float* out)
{
    __shared__ float2 tile[32];
    tile[threadIdx.x] = make_float2(1, 2);            // stores
    __syncwarp();
    if (threadIdx.x >= 16) return;
    const float2 value = tile[threadIdx.x];           // loads
    give(out, value);
}
__global__ void even_lanes(float* out)
{
    __shared__ float tile[64];
    fill(tile, 64);
    if (threadIdx.x % 2 == 0) give(out, tile[2 * threadIdx.x]);   // loads
}

template <class T>
void all_strides(float* out)
{
    strided<T, 1><<<1, 32>>>(out);
    strided<T, 2><<<1, 32>>>(out);
    strided<T, 3><<<1, 32>>>(out);
    strided<T, 4><<<1, 32>>>(out);
    strided<T, 8><<<1, 32>>>(out);
    strided<T, 16><<<1, 32>>>(out);
    strided<T, 32><<<1, 32>>>(out);
    strided<T, 33><<<1, 32>>>(out);
}

int main()
{
    float *in, *out;
    cudaMalloc(&in, 4096);
    cudaMalloc(&out, 4096);
    cudaMemset(in, 0, 4096);
    all_strides<float>(out);
    all_strides<float2>(out);
    all_strides<float4>(out);
    bytes_side_by_side<<<1, 32>>>(reinterpret_cast<char*>(out));
    column<32><<<1, 32>>>(out);
    column<33><<<1, 32>>>(out);
    column<34><<<1, 32>>>(out);
    swizzled_column<<<1, 32>>>(out);
    transpose<32><<<1, dim3(32, 8)>>>(out, in);
    transpose<33><<<1, dim3(32, 8)>>>(out, in);
    broadcast<<<1, 32>>>(out);
    multicast<1><<<1, 32>>>(out);
    multicast<32><<<1, 32>>>(out);
    pack<<<1, 32>>>(reinterpret_cast<Pack*>(out));
    first_half<<<1, 32>>>(out);
    even_lanes<<<1, 32>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

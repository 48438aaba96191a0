// Accesses to shared memory whose bank conflicts can be worked out by hand: test_inspect.py.
// A comment after an access names it: // stores, // loads.
#include <cuda_runtime.h>

struct alignas(32) Pack { float x[8]; };
extern __shared__ __align__(32) char dynamic_tile[];

// Lane t, if its bit is in `lanes`, accesses element (t & mask) * stride: stores where lanes have different ones, then
// loads.
template <class T>
__global__ void strided(T* out, unsigned stride, unsigned mask, unsigned lanes)
{
    T* tile = reinterpret_cast<T*>(dynamic_tile);
    const unsigned t = threadIdx.x;
    for (unsigned i = t; i <= 31 * stride; i += 32) tile[i] = T{};
    __syncwarp();
    if ((lanes >> t & 1) && mask == 31) tile[t * stride] = T{};      // stores
    __syncwarp();
    if (lanes >> t & 1) {
        const T value = tile[(t & mask) * stride];                   // loads
        out[t] = value;
    }
}

// The usual transpose: a block of 32 x 8 threads, a tile of 32 x 32, rows of `width`. Swizzled: the columns of a row are
// at column ^ row.
template <unsigned width, bool swizzled>
__global__ void transpose(float* out, const float* in)
{
    __shared__ float tile[32][width];
    for (unsigned row = threadIdx.y; row < 32; row += 8)
        tile[row][swizzled ? threadIdx.x ^ row : threadIdx.x] = in[row * 32 + threadIdx.x];   // stores
    __syncthreads();
    for (unsigned row = threadIdx.y; row < 32; row += 8)
        out[row * 32 + threadIdx.x] = tile[threadIdx.x][swizzled ? row ^ threadIdx.x : row];  // loads
}

template <class T>
static void launch(float* out, unsigned stride, unsigned mask = 31, unsigned lanes = 0xffffffff)
{
    strided<<<1, 32, 31 * stride * sizeof(T) + sizeof(T)>>>(reinterpret_cast<T*>(out), stride, mask, lanes);
}

int main()
{
    float *in, *out;
    cudaMalloc(&in, 4096);
    cudaMalloc(&out, 4096);
    cudaMemset(in, 0, 4096);
    for (unsigned stride : {1u, 2u, 3u, 4u, 8u, 16u, 32u, 33u, 34u}) {
        launch<float>(out, stride);
        launch<float2>(out, stride);
        launch<float4>(out, stride);
    }
    launch<char>(out, 1);
    launch<Pack>(out, 1);
    launch<float>(out, 1, 0);                    // all lanes the same word
    launch<float>(out, 1, 1);                    // two words in two banks, ...
    launch<float>(out, 32, 1);                   // ... in one bank
    launch<float2>(out, 1, 31, 0x0000ffff);      // the first half warp
    launch<float>(out, 2, 31, 0x55555555);       // every other lane
    transpose<32, false><<<1, dim3(32, 8)>>>(out, in);
    transpose<33, false><<<1, dim3(32, 8)>>>(out, in);
    transpose<32, true><<<1, dim3(32, 8)>>>(out, in);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

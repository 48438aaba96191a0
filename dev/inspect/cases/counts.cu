// Accesses, barriers and lanes whose figures can be calculated by hand, for test_inspect.py. A comment after an access
// is its name in the test. With an argument, the program runs for 30 s.
#include <cuda_runtime.h>

#include <chrono>

constexpr unsigned ALL = 0xffffffff;
struct alignas(32) Pack { float x[8]; };
extern __shared__ __align__(32) char dynamic_tile[];
constexpr unsigned TILE_BYTES = 32 * 33 * sizeof(float4);

// ---- patterns

// Lane t, if its bit in `lanes` is set, stores element t * stride (if mask is 31) and loads (t & mask) * stride.
template <class T> __global__ void strided(void* out, unsigned stride, unsigned mask = 31, unsigned lanes = ALL) {
    T* tile = reinterpret_cast<T*>(dynamic_tile);
    const unsigned t = threadIdx.x;
    for (unsigned i = t; i <= 31 * stride; i += 32) tile[i] = T{};
    __syncwarp();
    if ((lanes >> t & 1) && mask == 31) tile[t * stride] = T{};      // stores
    __syncwarp();
    if (lanes >> t & 1) {
        const T value = tile[(t & mask) * stride];                   // loads
        static_cast<T*>(out)[t] = value;
    }
}
// Loads element (t & mask) * stride + offset of global memory and stores element t + offset.
template <class T>
__global__ void gather(void* out, const void* in, unsigned stride, unsigned offset = 0, unsigned mask = 31,
                       unsigned lanes = ALL) {
    const unsigned t = threadIdx.x;
    if (lanes >> t & 1) {
        const T value = static_cast<const T*>(in)[(t & mask) * stride + offset];   // loads
        static_cast<T*>(out)[t + offset] = value;                    // stores
    }
}

// ---- lines

__device__ float load(const float* from) { return *from; }   // of an accessor
// Not an accessor: it has two lines with accesses.
__device__ void exchange(float* a, float* b) {
    const float first = *a;                           // loads a
    *a = *b;
    *b = first;                                       // stores b
}
__global__ void by_function(float* out, const float* in) {
    out[threadIdx.x] = load(in + threadIdx.x)         // near
                       + load(in + threadIdx.x * 8);  // far
    exchange(out + threadIdx.x, out + 32 + threadIdx.x);
}

// Structs by value, as arguments and results.
__device__ Pack smoothed(Pack x, float by) {
    for (int i = 0; i < 20; i++) {
        for (int j = 1; j < 8; j++) x.x[j] = fabsf(x.x[j - 1]) > by ? x.x[j] - by : x.x[j] + by * x.x[j - 1];
        for (int j = 0; j < 7; j++) x.x[j] = fabsf(x.x[j + 1]) > by ? x.x[j] - by : sqrtf(x.x[j] * x.x[j] + by);
    }
    return x;
}
__global__ void packs_by_value(Pack* out, const Pack* in) {
    out[threadIdx.x] = smoothed(in[threadIdx.x], 1);  // once
    out[threadIdx.x + 32] = smoothed(in[threadIdx.x + 32], 2);       // again
}

// ---- registers

enum class Between { NOTHING, STORE, SHARED_STORE, BARRIER, FENCE };
template <Between between> __global__ void again(float* out, const float* a, int times) {
    float* tile = reinterpret_cast<float*>(dynamic_tile);
    const unsigned i = threadIdx.x;
    float sum = 0;
    for (int n = 0; n < times; n++) {
        sum += a[i];                                  // loads
        if (between == Between::STORE) out[i] = sum;
        if (between == Between::SHARED_STORE) tile[i] = sum;
        if (between == Between::BARRIER) __syncthreads();
        if (between == Between::FENCE) __threadfence();
    }
    out[i] = sum;
}

// ---- caches

// Reads a row twice. The second read of 4 KiB hits in L1; of 12 KiB only if registers limit the number of resident
// blocks; of 512 KiB it hits in L2.
template <unsigned floats> __global__ void row_twice(float* out, const float* in) {
    float sum = 0;
    for (unsigned i = threadIdx.x; i < floats; i += blockDim.x) sum += in[i];         // first
    __syncthreads();
    for (unsigned i = threadIdx.x; i < floats; i += blockDim.x) sum -= in[i] / sum;   // second
    out[threadIdx.x] = sum;
}
__global__ void copy(float* out, const float* in) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];
}
__global__ void stored_twice(float* out) {
    out[threadIdx.x] = 1;                             // first
    __syncwarp();
    out[threadIdx.x] = 2;                             // second
    __syncwarp();
    out[threadIdx.x + 32] = out[threadIdx.x ^ 1];     // loads
}
template <class T> __global__ void sum(T* out) { atomicAdd(out, static_cast<T>(threadIdx.x)); }
__global__ void atomics(int* whole, float* sum) {
    atomicAdd(whole, 1);                              // whole
    atomicAdd(sum + threadIdx.x, 1.0f);               // sum
}

// ---- barriers and lanes

__global__ void barriers(float* out) {
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x < 32) __syncwarp();
}
__global__ void __launch_bounds__(64) shared_bytes(float* out) {
    __shared__ float floats[100];
    __shared__ double doubles[10];
    float* more = reinterpret_cast<float*>(dynamic_tile);
    if (threadIdx.x < 10) floats[threadIdx.x] = more[threadIdx.x] = 1;
    __syncthreads();                                  // of floats
    if (threadIdx.x < 10) doubles[threadIdx.x] = floats[9 - threadIdx.x];
    __syncthreads();                                  // of doubles
    if (threadIdx.x < 10) out[threadIdx.x] = static_cast<float>(doubles[9 - threadIdx.x]) + more[threadIdx.x];
}
// 48 threads: one warp and half a warp.
__global__ void a_warp_and_a_half(float* out) {
    out[blockIdx.x * 48 + threadIdx.x] = 1;           // all
    if (threadIdx.x % 3 == 0) out[blockIdx.x * 48 + threadIdx.x] = 2;   // every third
}
// Consecutive lanes of a warp differ in x first, then in y.
__global__ void two_dimensions(float* out) {
    out[threadIdx.y * 8 + threadIdx.x] = 1;           // row by row
    out[64 + threadIdx.x * 8 + threadIdx.y] = 1;      // column by column
}
// Half of the lanes take each branch; the loops have different lengths.
__global__ void two_ways(float* out) {
    const unsigned t = threadIdx.x;
    if (t % 2 == 0)
        for (unsigned i = 0; i < 4; i++) out[i * 32 + t] = 1;            // even
    else
        for (unsigned i = 0; i < t / 8 + 1; i++) out[i * 32 + t] = 1;    // odd
}
// A thread's four neighbours, stored one by one or together; or each word by another warp; or every twelfth word.
enum class Words { ONE_BY_ONE, TOGETHER, OF_OTHER_WARPS, TWELFTHS };
template <Words words> __global__ void four_words(float* out) {
    const unsigned i = threadIdx.x;
    if (words == Words::TOGETHER) reinterpret_cast<float4*>(out)[i] = make_float4(1, 2, 3, 4);
    else if (words == Words::OF_OTHER_WARPS) out[i % 32 * 8 + i / 32] = 1;
    else if (words == Words::TWELFTHS) out[12 * i] = 1;
    else for (unsigned j = 0; j < 4; j++) out[4 * i + j] = 1;
}
// One thread of the grid does all the work.
__global__ void one_thread(float* out, const float* in) {
    if (blockIdx.x + threadIdx.x > 0) return;
    float sum = 0;
    for (unsigned i = 0; i < 1 << 14; i++) sum += __expf(in[i]);
    *out = sum;
}
// As in a matrix product: the blocks of a row share 8 KiB, as do those of a column.
__global__ void rows_and_columns(float* out, const float* rows, const float* columns) {
    float sum = 0;
    for (unsigned i = threadIdx.x; i < 2048; i += blockDim.x)
        sum += rows[blockIdx.y * 2048 + i] * columns[blockIdx.x * 2048 + i];
    if (sum > 1) *out = sum;
}

// ---- round trips, of one warp of 32 lanes

// UNROLL loads of 16 bytes, then as many stores.
template <int UNROLL> __global__ void copy_unrolled(float4* out, const float4* in, int n) {
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
// ---- all of them

int main(int argc, char**) {
    constexpr size_t bytes_each = 1 << 22;
    float *in, *out, *other;
    cudaMalloc(&in, bytes_each);
    cudaMalloc(&out, bytes_each);
    cudaMemset(in, 0, bytes_each);
    cudaMemset(out, 0, bytes_each);
    for (unsigned stride : {1u, 2u, 3u, 4u, 8u, 16u, 32u, 33u}) {
        strided<float><<<1, 32, TILE_BYTES>>>(out, stride);
        strided<float2><<<1, 32, TILE_BYTES>>>(out, stride);
        strided<float4><<<1, 32, TILE_BYTES>>>(out, stride);
    }
    strided<char><<<1, 32, TILE_BYTES>>>(out, 1);
    strided<Pack><<<1, 32, TILE_BYTES>>>(out, 1);
    strided<float><<<1, 32, TILE_BYTES>>>(out, 1, 0);                 // all lanes the same word
    strided<float><<<1, 32, TILE_BYTES>>>(out, 32, 1);                // two words in one bank
    strided<float2><<<1, 32, TILE_BYTES>>>(out, 1, 31, 0x0000ffff);   // the first half warp
    strided<float><<<1, 32, TILE_BYTES>>>(out, 2, 31, 0x55555555);    // every other lane
    for (unsigned stride : {1u, 2u, 8u, 100u}) gather<float><<<1, 32>>>(out, in, stride);
    gather<float><<<1, 32>>>(out, in, 1, 1);
    gather<float><<<1, 32>>>(out, in, 1, 8);
    gather<float><<<1, 32>>>(out, in, 1, 0, 0);
    gather<float><<<1, 32>>>(out, in, 1, 0, 31, 0x0000ffff);
    gather<float><<<1, 32>>>(out, in, 1, 0, 31, 0x55555555);
    gather<char><<<1, 32>>>(out, in, 1);
    gather<float4><<<1, 32>>>(out, in, 1);
    gather<Pack><<<1, 32>>>(out, in, 1);
    by_function<<<1, 32>>>(out, in);
    packs_by_value<<<1, 32>>>(reinterpret_cast<Pack*>(out), reinterpret_cast<const Pack*>(in));
    const int times = argc > 9 ? 0 : 3;   // not a constant, so that the compiler does not unroll the loop
    for (auto kernel : {again<Between::NOTHING>, again<Between::STORE>, again<Between::SHARED_STORE>,
                        again<Between::BARRIER>, again<Between::FENCE>})
        kernel<<<1, 32, 128>>>(out, in, times);
    row_twice<1024><<<1, 32>>>(out, in);
    row_twice<3072><<<1, 32>>>(out, in);
    row_twice<131072><<<1, 256>>>(out, in);
    copy<<<64, 256>>>(out, in);
    copy<<<4096, 256>>>(out, in);
    sum<<<64, 256>>>(out);
    sum<<<64, 256>>>(reinterpret_cast<int*>(out));
    stored_twice<<<1, 32>>>(out);
    for (int i = 0; i < 3; i++) atomics<<<1, 32>>>(reinterpret_cast<int*>(out), out + 32);
    barriers<<<3, 64>>>(out);
    shared_bytes<<<1, 64, 128>>>(out);
    a_warp_and_a_half<<<2, 48>>>(out);
    two_dimensions<<<1, dim3(8, 8)>>>(out);
    two_ways<<<1, 32>>>(out);
    for (auto kernel : {four_words<Words::ONE_BY_ONE>, four_words<Words::TOGETHER>, four_words<Words::OF_OTHER_WARPS>,
                        four_words<Words::TWELFTHS>})
        kernel<<<1, 256>>>(out);
    one_thread<<<1, 32>>>(out, in);
    one_thread<<<256, 64>>>(out, in);
    rows_and_columns<<<dim3(24, 64), 256>>>(out, in, in + 64 * 2048);
    for (auto kernel : {copy_unrolled<1>, copy_unrolled<8>, copy_in_turn})
        kernel<<<1, 32>>>(reinterpret_cast<float4*>(out), reinterpret_cast<float4*>(in), 64 * 32);
    cudaMalloc(&other, 16 * bytes_each);
    cudaMemset(other, 0, 16 * bytes_each);
    copy<<<2048, 256>>>(out, in);
    const auto begin = std::chrono::steady_clock::now();
    while (argc > 1 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) barriers<<<3, 64>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

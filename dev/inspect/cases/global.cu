// Accesses to global memory whose sectors, hits and bytes can be worked out by hand: test_inspect.py.
// A comment after an access names it: // loads, // stores.
#include <cuda_runtime.h>

struct alignas(32) Pack { float x[8]; };

// Lane t, if its bit is in `lanes`, loads element ((t & mask) ^ flip) * stride + offset.
template <class T>
__global__ void gather(T* out, const T* in, unsigned stride, unsigned offset, unsigned flip, unsigned mask,
                       unsigned lanes)
{
    const unsigned t = threadIdx.x;
    if (lanes >> t & 1) {
        const T value = in[((t & mask) ^ flip) * stride + offset];   // loads
        out[t + offset] = value;                                     // stores
    }
}
// The other lanes have ended.
__global__ void left_early(float* out, const float* in)
{
    if (threadIdx.x >= 5) return;
    out[threadIdx.x] = in[threadIdx.x];               // loads
}

// Through a function that only loads: the caller's line is the access.
__device__ float load(const float* from) { return *from; }
__global__ void by_accessor(float* out, const float* in)
{
    out[threadIdx.x] = load(in + threadIdx.x)         // near
                       + load(in + threadIdx.x * 8);  // far
}

// Structures by value, as arguments and as results.
__device__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__global__ void sum_of_packs(float4* out, const float4* in)
{
    out[threadIdx.x] = in[threadIdx.x] + in[threadIdx.x + 32];   // adds
}
__device__ Pack smoothed(Pack x, float by)
{
    for (int i = 0; i < 20; i++) {
        for (int j = 1; j < 8; j++) x.x[j] = fabsf(x.x[j - 1]) > by ? x.x[j] - by : x.x[j] + by * x.x[j - 1];
        for (int j = 0; j < 7; j++) x.x[j] = fabsf(x.x[j + 1]) > by ? x.x[j] - by : sqrtf(x.x[j] * x.x[j] + by);
    }
    return x;
}
__global__ void packs_by_value(Pack* out, const Pack* in)
{
    out[threadIdx.x] = smoothed(in[threadIdx.x], 1);  // once
    out[threadIdx.x + 32] = smoothed(in[threadIdx.x + 32], 2);   // again
}

// ---- a product of matrices of 32 x 32

constexpr int N = 32;

// Tiles of 16 x 16, four blocks: each element is loaded by two of them.
__global__ void sgemm_tiled(float* c, const float* a, const float* b)
{
    __shared__ float a_tile[16][16], b_tile[16][16];
    const unsigned x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0;
    for (unsigned begin = 0; begin < N; begin += 16) {
        a_tile[y][x] = a[row * N + begin + x];        // of a
        b_tile[y][x] = b[(begin + y) * N + column];   // of b
        __syncthreads();
        for (unsigned k = 0; k < 16; k++) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    c[row * N + column] = sum;                        // of c
}

// ---- what a compiler keeps in registers

__global__ void square(float* out, const float* a)
{
    const unsigned i = threadIdx.x;
    out[i] = a[i] * a[i];                             // loads
}
enum class Between { NOTHING, STORE, SHARED_STORE, BARRIER, FENCE };
template <Between between>
__global__ void again(float* out, const float* a, int times)
{
    extern __shared__ float tile[];
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
__global__ void again_after_a_store(float* out, const float* a)
{
    const unsigned i = threadIdx.x;
    out[i] = a[i];                                    // before
    out[i + 32] = a[i];                               // after
}

// ---- caches

// A row, twice. Of 4 KiB: the second time it is in L1. Of 12 KiB: in L1 only where registers keep other blocks away. Of
// 512 KiB: in no L1, but in L2.
template <unsigned floats>
__global__ void row_twice(float* out, const float* in)
{
    float sum = 0;
    for (unsigned i = threadIdx.x; i < floats; i += blockDim.x) sum += in[i];         // first
    __syncthreads();
    for (unsigned i = threadIdx.x; i < floats; i += blockDim.x) sum -= in[i] / sum;   // second
    out[threadIdx.x] = sum;
}
// Each block reads the same 4 KiB.
__global__ void shared_by_blocks(float* out, const float* in)
{
    float sum = 0;
    for (unsigned i = threadIdx.x; i < 1024; i += blockDim.x) sum += in[i];   // loads
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
__global__ void copy(float* out, const float* in)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];                                   // loads
}
__global__ void stored_twice(float* out)
{
    out[threadIdx.x] = 1;                             // first
    __syncwarp();
    out[threadIdx.x] = 2;                             // second
}
__global__ void stored_then_loaded(float* out)
{
    out[threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x + 32] = out[threadIdx.x ^ 1];     // loads
}

__global__ void counted(int* whole, float* sum)
{
    atomicAdd(whole, 1);                              // whole
    atomicAdd(sum + threadIdx.x, 1.0f);               // sum
}

// As an argument, `times` is no constant: the compiler cannot unroll the loop.
template <Between between>
static void load_again(float* out, const float* in)
{
    again<between><<<1, 32, 128>>>(out, in, 3);
}

int main()
{
    constexpr size_t bytes_each = 1 << 22;
    float *in, *out;
    cudaMalloc(&in, bytes_each);
    cudaMalloc(&out, bytes_each);
    cudaMemset(in, 0, bytes_each);
    cudaMemset(out, 0, bytes_each);
    constexpr unsigned all = 0xffffffff;
    for (unsigned stride : {1u, 2u, 8u, 32u, 100u}) gather<<<1, 32>>>(out, in, stride, 0, 0, 31, all);
    for (unsigned offset : {1u, 8u}) gather<<<1, 32>>>(out, in, 1, offset, 0, 31, all);
    for (unsigned flip : {5u, 31u}) gather<<<1, 32>>>(out, in, 1, 0, flip, 31, all);
    for (unsigned mask : {0u, 1u}) gather<<<1, 32>>>(out, in, 1, 0, 0, mask, all);
    for (unsigned lanes : {0x0000ffffu, 0x55555555u, 0x80000001u}) gather<<<1, 32>>>(out, in, 1, 0, 0, 31, lanes);
    gather<<<1, 32>>>(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(in), 1, 0, 0, 31, all);
    gather<<<1, 32>>>(reinterpret_cast<float4*>(out), reinterpret_cast<const float4*>(in), 1, 0, 0, 31, all);
    gather<<<1, 32>>>(reinterpret_cast<Pack*>(out), reinterpret_cast<const Pack*>(in), 1, 0, 0, 31, all);
    left_early<<<1, 32>>>(out, in);
    by_accessor<<<1, 32>>>(out, in);
    sum_of_packs<<<1, 32>>>(reinterpret_cast<float4*>(out), reinterpret_cast<const float4*>(in));
    packs_by_value<<<1, 32>>>(reinterpret_cast<Pack*>(out), reinterpret_cast<const Pack*>(in));

    sgemm_tiled<<<dim3(2, 2), dim3(16, 16)>>>(out, in, in + 4096);

    square<<<1, 32>>>(out, in);
    load_again<Between::NOTHING>(out, in);
    load_again<Between::STORE>(out, in);
    load_again<Between::SHARED_STORE>(out, in);
    load_again<Between::BARRIER>(out, in);
    load_again<Between::FENCE>(out, in);
    again_after_a_store<<<1, 32>>>(out, in);

    row_twice<1024><<<1, 32>>>(out, in);
    row_twice<3072><<<1, 32>>>(out, in);
    row_twice<131072><<<1, 256>>>(out, in);
    shared_by_blocks<<<8, 256>>>(out, in);
    copy<<<64, 256>>>(out, in);
    copy<<<4096, 256>>>(out, in);
    stored_twice<<<1, 32>>>(out);
    stored_then_loaded<<<1, 32>>>(out);
    for (int i = 0; i < 3; i++) counted<<<1, 32>>>(reinterpret_cast<int*>(out), out + 32);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

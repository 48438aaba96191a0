// Accesses to global memory whose sectors, hits and bytes can be worked out by hand: test_inspect.py.
// A comment behind an access names it: // loads, // stores.
#include <cuda_runtime.h>

__global__ void aligned(float* out, const float* in)
{
    out[threadIdx.x] =                                // stores
        in[threadIdx.x];                              // loads
}
__global__ void misaligned(float* out, const float* in)
{
    out[threadIdx.x + 1] =                            // stores
        in[threadIdx.x + 1];                          // loads
}
template <int stride>
__global__ void strided(float* out, const float* in)
{
    out[threadIdx.x] = in[threadIdx.x * stride];      // loads
}
__global__ void reversed(float* out, const float* in)
{
    out[threadIdx.x] = in[31 - threadIdx.x];          // loads
}
__global__ void scattered(float* out, const float* in)
{
    out[threadIdx.x] = in[threadIdx.x * 37 % 32 * 100];   // loads
}
__global__ void broadcast(float* out, const float* in)
{
    out[threadIdx.x] = in[0];                         // loads
}
__global__ void packs(float4* out, const float4* in)
{
    out[threadIdx.x] = in[threadIdx.x];               // loads
}
struct alignas(32) Pack { float x[8]; };
__global__ void wide_packs(float* out, const Pack* in)
{
    const Pack pack = in[threadIdx.x];                // loads
    out[threadIdx.x] = pack.x[0] + pack.x[7];
}
__global__ void bytes(char* out, const char* in)
{
    out[threadIdx.x] = in[threadIdx.x];               // loads
}
__global__ void first_half(float* out, const float* in)
{
    if (threadIdx.x < 16) out[threadIdx.x] = in[threadIdx.x];      // loads
}
__global__ void even_lanes(float* out, const float* in)
{
    if (threadIdx.x % 2 == 0) out[threadIdx.x] = in[threadIdx.x];  // loads
}
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

// ---- products of matrices of 32 x 32

constexpr int N = 32;

// A row of the result for each lane: neighbours read N floats apart.
__global__ void sgemm_by_rows(float* c, const float* a, const float* b)
{
    const unsigned row = threadIdx.x, column = threadIdx.y;
    float sum = 0;
    for (unsigned k = 0; k < N; k++)
        sum += a[row * N + k]                         // of a
               * b[k * N + column];                   // of b
    c[row * N + column] = sum;                        // of c
}
__global__ void sgemm_by_columns(float* c, const float* a, const float* b)
{
    const unsigned row = threadIdx.y, column = threadIdx.x;
    float sum = 0;
    for (unsigned k = 0; k < N; k++)
        sum += a[row * N + k]                         // of a
               * b[k * N + column];                   // of b
    c[row * N + column] = sum;                        // of c
}
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
__global__ void again_in_a_loop(float* out, const float* a, int times)
{
    const unsigned i = threadIdx.x;
    float sum = 0;
    for (int n = 0; n < times; n++) sum += a[i];      // loads
    out[i] = sum;
}
__global__ void again_after_stores(float* out, const float* a, int times)
{
    const unsigned i = threadIdx.x;
    for (int n = 0; n < times; n++) out[i] = a[i];    // loads
}
__global__ void again_after_shared_stores(float* out, const float* a, int times)
{
    extern __shared__ float tile[];
    const unsigned i = threadIdx.x;
    for (int n = 0; n < times; n++) tile[n * 32 + i] = a[i];   // loads
    out[i] = tile[i];
}
__global__ void again_after_a_store(float* out, const float* a)
{
    const unsigned i = threadIdx.x;
    out[i] = a[i];                                    // before
    out[i + 32] = a[i];                               // after
}
__global__ void again_after_a_barrier(float* out, const float* a)
{
    const unsigned i = threadIdx.x;
    float sum = 0;
    for (int n = 0; n < 3; n++) {
        sum += a[i];                                  // loads
        __syncthreads();
    }
    out[i] = sum;
}
__global__ void again_after_a_fence(float* out, const float* a)
{
    const unsigned i = threadIdx.x;
    float sum = 0;
    for (int n = 0; n < 3; n++) {
        sum += a[i];                                  // loads
        __threadfence();
    }
    out[i] = sum;
}

// ---- caches

// A row of 1024 floats, twice: the second time it is in L1.
__global__ void row_twice(float* out, const float* in)
{
    float sum = 0;
    for (unsigned i = threadIdx.x; i < 1024; i += 32) sum += in[i];         // first
    __syncwarp();
    for (unsigned i = threadIdx.x; i < 1024; i += 32) sum -= in[i] / sum;   // second
    out[threadIdx.x] = sum;
}
// The same of 12 KiB: in L1 only where registers keep other blocks away.
__global__ void longer_row_twice(float* out, const float* in)
{
    float sum = 0;
    for (unsigned i = threadIdx.x; i < 3072; i += 32) sum += in[i];         // first
    __syncwarp();
    for (unsigned i = threadIdx.x; i < 3072; i += 32) sum -= in[i] / sum;   // second
    out[threadIdx.x] = sum;
}
// The same of a row of 512 KiB, which no L1 holds but L2 does.
__global__ void long_row_twice(float* out, const float* in)
{
    float sum = 0;
    for (unsigned i = threadIdx.x; i < 1 << 17; i += 256) sum += in[i];         // first
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 1 << 17; i += 256) sum -= in[i] / sum;   // second
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

int main()
{
    constexpr size_t bytes_each = 1 << 22;
    float *in, *out;
    cudaMalloc(&in, bytes_each);
    cudaMalloc(&out, bytes_each);
    cudaMemset(in, 0, bytes_each);
    cudaMemset(out, 0, bytes_each);
    aligned<<<1, 32>>>(out, in);
    misaligned<<<1, 32>>>(out, in);
    strided<2><<<1, 32>>>(out, in);
    strided<8><<<1, 32>>>(out, in);
    strided<32><<<1, 32>>>(out, in);
    reversed<<<1, 32>>>(out, in);
    scattered<<<1, 32>>>(out, in);
    broadcast<<<1, 32>>>(out, in);
    packs<<<1, 32>>>(reinterpret_cast<float4*>(out), reinterpret_cast<const float4*>(in));
    wide_packs<<<1, 32>>>(out, reinterpret_cast<const Pack*>(in));
    bytes<<<1, 32>>>(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(in));
    first_half<<<1, 32>>>(out, in);
    even_lanes<<<1, 32>>>(out, in);
    left_early<<<1, 32>>>(out, in);
    by_accessor<<<1, 32>>>(out, in);
    sum_of_packs<<<1, 32>>>(reinterpret_cast<float4*>(out), reinterpret_cast<const float4*>(in));
    packs_by_value<<<1, 32>>>(reinterpret_cast<Pack*>(out), reinterpret_cast<const Pack*>(in));

    sgemm_by_rows<<<1, dim3(32, 32)>>>(out, in, in + 4096);
    sgemm_by_columns<<<1, dim3(32, 32)>>>(out, in, in + 4096);
    sgemm_tiled<<<dim3(2, 2), dim3(16, 16)>>>(out, in, in + 4096);

    square<<<1, 32>>>(out, in);
    again_in_a_loop<<<1, 32>>>(out, in, 3);
    again_after_stores<<<1, 32>>>(out, in, 3);
    again_after_shared_stores<<<1, 32, 1024>>>(out, in, 3);
    again_after_a_store<<<1, 32>>>(out, in);
    again_after_a_barrier<<<1, 32>>>(out, in);
    again_after_a_fence<<<1, 32>>>(out, in);

    row_twice<<<1, 32>>>(out, in);
    longer_row_twice<<<1, 32>>>(out, in);
    long_row_twice<<<1, 256>>>(out, in);
    shared_by_blocks<<<8, 256>>>(out, in);
    copy<<<64, 256>>>(out, in);
    copy<<<4096, 256>>>(out, in);
    stored_twice<<<1, 32>>>(out);
    stored_then_loaded<<<1, 32>>>(out);
    for (int i = 0; i < 3; i++) counted<<<1, 32>>>(reinterpret_cast<int*>(out), out + 32);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

// Kernels that use __device__, __constant__ and __managed__ variables, for test_inspect.py. A comment after an access
// is its name in the test.
#include <cuda_runtime.h>

struct Pair {
    float a, b;
};
__device__ int total, hits[1];
__device__ float table[2048];
__device__ float next_to_table[32];
__device__ Pair pairs[32];
__device__ unsigned arrived = 0;
__constant__ float weights[32];
__managed__ float managed[32];
static __device__ float hidden[32];
static __device__ float unchanged[32] = {1, 2};
template <class T> __device__ T of_template[32];
namespace outer { namespace {
__device__ float nested[32] = {3};
} }

// ---- races

template <bool right> __global__ void updates(int*) {
    if (right) atomicAdd(&total, 1);
    else total = total + 1;                           // adds
}
__global__ void two_variables(int*) {
    hits[0] += 1; total = static_cast<int>(threadIdx.x);   // on one line
}
__global__ void either(int*) {
    *(threadIdx.x % 2 == 0 ? hits : &total) = 1;      // in one instruction
}
// The last block to finish adds the parts of all blocks, as in the CUDA C++ Programming Guide.
template <bool right> __global__ void last_block(float* parts, float* out) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = 1;                        // writes
        if (right) __threadfence();
        is_last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) *out = parts[0] + parts[1];   // reads
}
__device__ int ticket(int* out) {
    static int next;
    return atomicAdd(&next, out != nullptr);
}
__global__ void tickets(int* out) { out[threadIdx.x] = ticket(out); }   // draws

// ---- accesses

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

int main(int argc, char**) {
    float *out, *address;
    cudaMalloc(&out, 1 << 16);
    const float values[32] = {1};
    cudaMemcpyToSymbol(weights, values, sizeof(values));
    managed[0] = 1;
    cudaGetSymbolAddress(reinterpret_cast<void**>(&address), outer::nested);
    updates<true><<<2, 64>>>(nullptr);
    updates<false><<<2, 64>>>(nullptr);
    updates<false><<<4, 64>>>(nullptr);
    two_variables<<<1, 64>>>(nullptr);
    either<<<1, 64>>>(nullptr);
    last_block<true><<<2, 64>>>(out, out + 8);
    last_block<false><<<2, 64>>>(out, out + 8);
    tickets<<<1, 64>>>(reinterpret_cast<int*>(out));
    loads<<<1, 32>>>(out, address);
    past_the_end<<<1, 32>>>(out, -1);
    past_arrays<<<1, 32, 128>>>(out);
    if (argc > 1) far_away<<<2, 32>>>(out, size_t{1} << 50);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

// Transposes a matrix in three ways: make inspect FILE=dev/inspect/cases/transpose.cu
//   naive    neighbouring lanes store with a stride of N floats: a warp writes 16 sectors instead of 4
//   tile     through shared memory: global accesses are coalesced, but the column of a tile lies in only two banks
//   swizzle  element (y, x) of the tile is at (y, x ^ y): the lanes of a warp read 32 different banks
#include <cuda_runtime.h>

constexpr int N = 256, TILE = 16;

__global__ void transpose_naive(float* out, const float* in) {
    const int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    out[x * N + y] = in[y * N + x];
}

template <bool SWIZZLE> __device__ void transpose(float* out, const float* in) {
    __shared__ float tile[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y, column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    tile[y][SWIZZLE ? x ^ y : x] = in[(row + y) * N + column + x];
    __syncthreads();
    out[(column + y) * N + row + x] = tile[x][SWIZZLE ? y ^ x : y];
}
__global__ void transpose_tile(float* out, const float* in) { transpose<false>(out, in); }
__global__ void transpose_swizzle(float* out, const float* in) { transpose<true>(out, in); }

int main() {
    float *in, *out;
    cudaMalloc(&in, N * N * sizeof(float));
    cudaMalloc(&out, N * N * sizeof(float));
    cudaMemset(in, 0, N * N * sizeof(float));
    const dim3 grid(N / TILE, N / TILE), block(TILE, TILE);
    for (auto kernel : {transpose_naive, transpose_tile, transpose_swizzle}) kernel<<<grid, block>>>(out, in);
    return cudaDeviceSynchronize();
}

// Plain kernels for puzzle 20. Matrices are row-major; sizes are those of the result (M, N) and of the sum, K.
#pragma once

#include "puzzle.h"

// out[i, j] = sum over k of a[i * a_row + k * a_k] * b[k * b_k + j * b_column]
__global__ void matmul_kernel(float* out, const float* a, const float* b, int M, int N, int K, int a_row, int a_k,
                              int b_k, int b_column) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, i = at / N, j = at % N;
    if (i >= M) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += a[i * a_row + k * a_k] * b[k * b_k + j * b_column];
    out[at] = sum;
}
// a (M, K) times b (K, N)
inline void matmul(float* out, const float* a, const float* b, int M, int N, int K) {
    matmul_kernel<<<ceil_div(M * N, 64), 64>>>(out, a, b, M, N, K, K, 1, N, 1);
}
// a (K, M), transposed, times b (K, N)
inline void matmul_transposed_a(float* out, const float* a, const float* b, int M, int N, int K) {
    matmul_kernel<<<ceil_div(M * N, 64), 64>>>(out, a, b, M, N, K, 1, M, N, 1);
}
// a (M, K) times b (N, K), transposed
inline void matmul_transposed_b(float* out, const float* a, const float* b, int M, int N, int K) {
    matmul_kernel<<<ceil_div(M * N, 64), 64>>>(out, a, b, M, N, K, K, 1, 1, K);
}

// relu(x)^2 in place of GELU: h = max(p, 0)^2, with the derivative 2 max(p, 0).
__global__ void activation_kernel(float* h, const float* p, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) h[i] = fmaxf(p[i], 0) * fmaxf(p[i], 0);
}
__global__ void activation_backward_kernel(float* dp, const float* dh, const float* p, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dp[i] = dh[i] * 2 * fmaxf(p[i], 0);
}
inline void activation(float* h, const float* p, int n) { activation_kernel<<<ceil_div(n, 64), 64>>>(h, p, n); }
inline void activation_backward(float* dp, const float* dh, const float* p, int n) {
    activation_backward_kernel<<<ceil_div(n, 64), 64>>>(dp, dh, p, n);
}

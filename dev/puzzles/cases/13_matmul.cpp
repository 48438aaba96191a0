#include "judge.h"

void matmul(float* out, const float* A, const float* B, int M, int N, int K);

constexpr int TILE = 32;
const Limits limits{.sectors = 1.05, .wavefronts = 1.05, .traffic = 1.05, .microseconds = 20, .barriers = true};

void judge() {
    for_sizes<3>("M N K", {{1, 1, 1}, {31, 33, 65}, {40, 7, 100}, {65, 31, 3}, {40, 72, 64}},
                 [](Case& c, int M, int N, int K) {
        auto A = c.input<float>("A", size_t(M) * K);
        auto B = c.input<float>("B", size_t(K) * N);
        auto out = c.output<float>("out", size_t(M) * N);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                for (int k = 0; k < K; k++) out.expected(m * N + n) += A[m * K + k] * B[k * N + n];
        const size_t loads = size_t(M) * K * ceil_div(N, TILE) + size_t(K) * N * ceil_div(M, TILE);
        c.minimum_bytes = (loads + size_t(M) * N) * sizeof(float);
        c.run([&] { matmul(out, A, B, M, N, K); });
    });
}

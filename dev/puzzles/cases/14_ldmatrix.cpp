#include "judge.h"

void matmul(float* out, const bf16* A, const bf16* B, int M, int N, int K);

const Limits limits{.wavefronts = 1.05, .shared_bytes = 2 * 64 * 128, .microseconds = 25};

void judge() {
    for_sizes<3>("M N K", {{1, 1, 8}, {63, 65, 64}, {64, 64, 128}, {5, 130, 72}, {100, 72, 200}},
                 [](Case& c, int M, int N, int K) {
        auto A = c.input<bf16>("A", size_t(M) * K);
        auto B = c.input<bf16>("B", size_t(N) * K);
        auto out = c.output<float>("out", size_t(M) * N);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                for (int k = 0; k < K; k++) out.expected(m * N + n) += A[m * K + k] * B[n * K + k];
        c.run([&] { matmul(out, A, B, M, N, K); });
    });
}

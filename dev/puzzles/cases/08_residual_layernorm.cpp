#include "judge.h"

void residual_layernorm(float* out, float* residual, float* mean, float* rstd, const float* inp1, const float* inp2,
                        const float* w, const float* b, int N, int C);

const Limits limits{.sectors = 1.05, .traffic = 1.05, .microseconds = 80};

void judge() {
    for_sizes<2>("N C", {{1, 1}, {3, 31}, {9, 33}, {2, 1024}, {37, 100}, {32, 768}}, [](Case& c, int N, int C) {
        const size_t n = size_t(N) * C;
        auto inp1 = c.input<float>("inp1", n), inp2 = c.input<float>("inp2", n, 200, 202);
        auto w = c.input<float>("w", C), b = c.input<float>("b", C);
        auto out = c.output<float>("out", n, 4), residual = c.output<float>("residual", n);
        auto mean = c.output<float>("mean", N), rstd = c.output<float>("rstd", N, 4);
        for (int r = 0; r < N; r++) {
            double sum = 0, squares = 0;
            auto x = [&](int i) -> double& { return residual.expected(size_t(r) * C + i); };
            for (int i = 0; i < C; i++) sum += x(i) = float(inp1[size_t(r) * C + i] + inp2[size_t(r) * C + i]);
            const double m = mean.expected(r) = sum / C;
            for (int i = 0; i < C; i++) squares += (x(i) - m) * (x(i) - m);
            const double s = rstd.expected(r) = 1 / std::sqrt(squares / C + 1e-5);
            for (int i = 0; i < C; i++) out.expected(size_t(r) * C + i) = (x(i) - m) * s * w[i] + b[i];
        }
        c.minimum_bytes = (6.0 * n + 2 * N) * sizeof(float);
        c.run([&] { residual_layernorm(out, residual, mean, rstd, inp1, inp2, w, b, N, C); });
    });
}

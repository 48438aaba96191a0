#include "judge.h"

void layernorm_weights(float* dw, float* db, const float* dout, const float* inp, const float* mean, const float* rstd,
                       int N, int C);

const Limits limits{.wavefronts = 1.05, .traffic = 1.05, .microseconds = 6, .same_bits = true};

void judge() {
    for_sizes<2>("N C", {{1, 1}, {15, 31}, {17, 33}, {100, 65}, {37, 100}, {256, 128}}, [](Case& c, int N, int C) {
        const size_t n = size_t(N) * C;
        auto dout = c.input<float>("dout", n), inp = c.input<float>("inp", n, 10, 12);
        auto mean = c.input<float>("mean", N, 10.5, 11.5), rstd = c.input<float>("rstd", N, 0.5, 1.5);
        auto dw = c.output<float>("dw", C), db = c.output<float>("db", C);
        for (size_t i = 0; i < n; i++) {
            dw.expected(i % C) += dout[i] * (inp[i] - mean[i / C]) * rstd[i / C];
            db.expected(i % C) += dout[i];
        }
        const double groups = (C + WARP_SIZE - 1) / WARP_SIZE, sector = 32;
        c.minimum_bytes = 2.0 * (n + C) * sizeof(float) + 2 * sector * N * groups;
        c.run([&] { layernorm_weights(dw, db, dout, inp, mean, rstd, N, C); });
    });
}

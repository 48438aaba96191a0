#include "judge.h"

void softmax(float* out, const float* inp, int rows, int C);

const Limits limits{.traffic = 1.05, .microseconds = 12, .barriers = true};

void judge() {
    for_sizes<2>("rows C", {{1, 1}, {3, 33}, {5, 256}, {2, 4096}, {37, 1000}, {64, 1536}},
                 [](Case& c, int rows, int C) {
        const size_t n = size_t(rows) * C;
        auto inp = c.input<float>("inp", n, -200, 200);
        auto out = c.output<float>("out", n);
        for (int r = 0; r < rows; r++) {
            double max = -INFINITY, sum = 0;
            for (int i = 0; i < C; i++) max = std::fmax(max, inp[r * C + i]);
            for (int i = 0; i < C; i++) sum += std::exp(inp[r * C + i] - max);
            for (int i = 0; i < C; i++) out.expected(r * C + i) = std::exp(inp[r * C + i] - max) / sum;
        }
        c.minimum_bytes = 2.0 * n * sizeof(float);
        c.run([&] { softmax(out, inp, rows, C); });
    });
}

#include "judge.h"

void row_sum(float* out, const float* inp, int rows, int C);

const Limits limits{.traffic = 1.05, .shared_bytes = 32, .microseconds = 12, .barriers = true, .same_bits = true};

void judge() {
    for_sizes<2>("rows C", {{1, 1}, {3, 31}, {2, 255}, {2, 257}, {5, 1000}, {64, 1536}}, [](Case& c, int rows, int C) {
        auto inp = c.input<float>("inp", size_t(rows) * C, 0, 1);
        auto out = c.output<float>("out", rows);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < C; i++) out.expected(r) += inp[r * C + i];
        c.minimum_bytes = sizeof(float) * (double(rows) * C + rows);
        c.run([&] { row_sum(out, inp, rows, C); });
    });
}

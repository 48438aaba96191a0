#include "judge.h"

void packs(float* out, const float* inp, float a, int n);

const Limits limits{.sectors = 1.05, .requests = 1.05, .microseconds = 10};

void judge() {
    for_sizes<1>("n", {{1}, {3}, {4}, {6}, {1023}, {1024}, {1025}, {5002}, {65535}}, [](Case& c, int n) {
        const float a = 2.5f;
        auto inp = c.input<float>("inp", n);
        auto out = c.output<float>("out", n);
        for (int i = 0; i < n; i++) out.expected(i) = a * inp[i];
        c.minimum_requests = 2 * ceil_div(n, 4 * WARP_SIZE);
        c.run([&] { packs(out, inp, a, n); });
    });
}

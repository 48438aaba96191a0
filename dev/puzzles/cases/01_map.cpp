#include "judge.h"

void map(float* out, const float* inp, float a, int n);

const Limits limits{.sectors = 1.05, .microseconds = 10};

void judge() {
    for_sizes<1>("n", {{1}, {31}, {255}, {256}, {257}, {1000}, {40001}}, [](Case& c, int n) {
        const float a = 2.5f;
        auto inp = c.input<float>("inp", n);
        auto out = c.output<float>("out", n);
        for (int i = 0; i < n; i++) out.expected(i) = a * inp[i];
        c.run([&] { map(out, inp, a, n); });
    });
}

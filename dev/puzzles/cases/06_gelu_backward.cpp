#include "judge.h"

void gelu_backward(bf16* dinp, const bf16* inp, int n);

const Limits limits{.traffic = 1.05, .microseconds = 10};

void judge() {
    for_sizes<1>("n", {{1}, {31}, {255}, {257}, {1000}, {30001}}, [](Case& c, int n) {
        auto dinp = c.updated<bf16>("dinp", n);
        auto inp = c.input<bf16>("inp", n, -12, 12);
        for (int i = 0; i < n; i++) {
            const double x = inp[i], scale = std::sqrt(2 / M_PI), cubic = 0.044715;
            const double t = std::tanh(scale * (x + cubic * x * x * x)), du = scale * (1 + 3 * cubic * x * x);
            dinp.expected(i) = dinp[i] * 0.5 * (1 + t + x * (1 - t * t) * du);
        }
        c.minimum_bytes = 3.0 * n * sizeof(bf16);
        c.run([&] { gelu_backward(dinp, inp, n); });
    });
}

#include "judge.h"

void squared_norm(float* out, float* partial, const bf16* grad, int n);

const Limits limits{.traffic = 1.05, .microseconds = 8, .same_bits = true};

void judge() {
    for_sizes<1>("n", {{1}, {31}, {257}, {8191}, {8193}, {100003}}, [](Case& c, int n) {
        auto out = c.output<float>("out", 1);
        auto partial = c.scratch<float>("partial", 32);
        auto grad = c.input<bf16>("grad", n);
        for (int i = 0; i < n; i++) out.expected(0) += grad[i] * grad[i];
        c.minimum_bytes = double(n) * sizeof(bf16);
        c.run([&] { squared_norm(out, partial, grad, n); });
    });
}

#include "judge.h"

void adamw(bf16* weights, float* master, float* m, float* v, const bf16* grads, float lr, int t, int n);

const Limits limits{.traffic = 1.05, .microseconds = 10};

void judge() {
    for_sizes<2>("n t", {{1, 1}, {255, 2}, {257, 3}, {1000, 10}, {1 << 16, 100}}, [](Case& c, int n, int t) {
        const double beta1 = 0.9f, beta2 = 0.95f, lr = 0.015625;
        auto weights = c.updated<bf16>("weights", n);
        auto master = c.updated<float>("master", n), m = c.updated<float>("m", n, -0.1, 0.1);
        auto v = c.updated<float>("v", n, 0, 0.1);
        auto grads = c.input<bf16>("grads", n);
        for (int i = 0; i < n; i++) {
            if (i % 7 == 3) grads[i] = float(bf16(1e-6f)), m[i] = v[i] = 0;   // EPS is small, unless under the root
            weights[i] = float(bf16(float(master[i])));
            const double m1 = m.expected(i) = beta1 * m[i] + (1 - beta1) * grads[i];
            const double v1 = v.expected(i) = beta2 * v[i] + (1 - beta2) * grads[i] * grads[i];
            const double update = m1 / (1 - std::pow(beta1, t)) / (std::sqrt(v1 / (1 - std::pow(beta2, t))) + 1e-8);
            weights.expected(i) = master.expected(i) -= lr * (update + 0.1f * master[i]);
        }
        c.minimum_bytes = double(n) * (2 * sizeof(bf16) + 6 * sizeof(float));
        c.run([&] { adamw(weights, master, m, v, grads, lr, t, n); });
    });
}

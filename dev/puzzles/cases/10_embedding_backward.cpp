#include "judge.h"

#include <algorithm>

void embedding_backward(float* dwte, const float* dout, const int* inp, const int* order, int N, int C);

const Limits limits{.sectors = 1.1, .microseconds = 40, .same_bits = true};

void judge() {
    for_sizes<3>("N V C", {{1, 1, 1}, {5, 3, 129}, {33, 100, 31}, {64, 1, 127}, {200, 50, 300}},
                 [](Case& c, int N, int V, int C) {
        auto dwte = c.updated<float>("dwte", size_t(V) * C);
        auto dout = c.input<float>("dout", size_t(N) * C);
        auto inp = c.input<int>("inp", N, 0, V), order = c.input<int>("order", N);
        for (int n = 0; n < N; n++) inp[n] = std::floor(inp[n] * inp[n] / V);   // small tokens are frequent
        for (int n = 0; n < N; n++) order[n] = n;
        std::stable_sort(&order[0], &order[0] + N, [&](double a, double b) { return inp[a] < inp[b]; });
        for (int n = 0; n < N; n++)
            for (int i = 0; i < C; i++) dwte.expected(inp[n] * C + i) += dout[size_t(n) * C + i];
        c.run([&] { embedding_backward(dwte, dout, inp, order, N, C); });
    });
}

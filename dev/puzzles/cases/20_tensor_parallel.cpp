#include "ranks.h"

void forward(float* y, float* p, float* h, const float* x, const float* W1, const float* W2, int N, int C, int H,
             ncclComm_t comm);
void backward(float* dx, float* dW1, float* dW2, float* dp, const float* dy, const float* x, const float* p,
              const float* h, const float* W1, const float* W2, int N, int C, int H, ncclComm_t comm);

const Limits limits{.sent = 1.001};

void judge() {
    for_ranks<2>(4, "N C", {{1, 4}, {3, 7}, {17, 20}, {16, 32}}, [](Case& c, Ranks ranks, int N, int C) {
        const int H = 4 * C / ranks.size;
        auto x = c.input<float>("x", N * C), dy = c.input<float>("dy", N * C);
        x.storage.initial = x.of_rank(0);
        dy.storage.initial = dy.of_rank(0);
        auto W1 = c.input<float>("W1", C * H), W2 = c.input<float>("W2", H * C);
        auto p = c.scratch<float>("p", N * H), h = c.scratch<float>("h", N * H), dp = c.scratch<float>("dp", N * H);
        auto y = c.output<float>("y", N * C), dx = c.output<float>("dx", N * C);
        auto dW1 = c.output<float>("dW1", C * H), dW2 = c.output<float>("dW2", H * C);
        for (int r = 0; r < ranks.size; r++) {
            const auto w1 = W1.of_rank(r), w2 = W2.of_rank(r);
            const bool is_own = r == ranks.rank;
            for (int n = 0; n < N; n++)
                for (int k = 0; k < H; k++) {
                    double product = 0, gradient = 0;
                    for (int i = 0; i < C; i++) product += x[n * C + i] * w1[i * H + k];
                    for (int i = 0; i < C; i++) gradient += dy[n * C + i] * w2[k * C + i];
                    const double positive = std::fmax(product, 0), hidden = positive * positive;
                    gradient *= 2 * positive;
                    for (int i = 0; i < C; i++) {
                        y.expected(n * C + i) += hidden * w2[k * C + i];
                        dx.expected(n * C + i) += gradient * w1[i * H + k];
                        if (is_own) dW1.expected(i * H + k) += x[n * C + i] * gradient;
                        if (is_own) dW2.expected(k * C + i) += hidden * dy[n * C + i];
                    }
                }
        }
        c.minimum_sent = 2 * 2.0 * (ranks.size - 1) / ranks.size * N * C * sizeof(float);
        c.run([&] {
            forward(y, p, h, x, W1, W2, N, C, H, ranks.comm);
            backward(dx, dW1, dW2, dp, dy, x, p, h, W1, W2, N, C, H, ranks.comm);
        });
    });
}

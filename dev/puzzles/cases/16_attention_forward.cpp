#include "judge.h"

void attention(float* out, const float* q, const float* k, const float* v, int heads, int T);

constexpr int HS = 32, TILE = 32;
const Limits limits{.wavefronts = 1.05, .traffic = 1.05, .microseconds = 80, .barriers = true};

void judge() {
    for_sizes<2>("heads T", {{1, 1}, {1, 31}, {2, 33}, {1, 72}}, [](Case& c, int heads, int T) {
        const size_t n = size_t(heads) * T * HS;
        auto q = c.input<float>("q", n, -16, 16);
        auto k = c.input<float>("k", n, -8, 8);
        auto v = c.input<float>("v", n);
        for (size_t i = 0; i < n; i += HS) {   // in each second row all scores are far below 0
            k[i] = 20;
            q[i] = i / HS % 2 == 0 ? 0 : -80;
        }
        auto out = c.output<float>("out", n, 16);
        for (size_t i = 0; i < size_t(heads) * T; i++) {
            const size_t first = i / T * T;   // the head's key 0
            std::vector<double> p(i - first + 1);
            double max = -INFINITY, sum = 0;
            for (size_t j = 0; j < p.size(); j++) {
                for (int d = 0; d < HS; d++) p[j] += q[i * HS + d] * k[(first + j) * HS + d] / std::sqrt(HS);
                max = std::fmax(max, p[j]);
            }
            for (double& x : p) sum += x = std::exp(x - max);
            for (size_t j = 0; j < p.size(); j++)
                for (int d = 0; d < HS; d++) out.expected(i * HS + d) += p[j] / sum * v[(first + j) * HS + d];
        }
        size_t rows = 2 * T;   // of q and out; then of k and v for each tile of queries
        for (int query0 = 0; query0 < T; query0 += TILE) rows += 2 * std::min(query0 + TILE, T);
        c.minimum_bytes = heads * rows * HS * sizeof(float);
        c.run([&] { attention(out, q, k, v, heads, T); });
    });
}

#include "judge.h"

void attention_backward(float* dq, float* dk, float* dv, const bf16* q, const bf16* k, const bf16* v, const bf16* dout,
                        const float* lse, const float* D, int heads, int T);

constexpr int HS = 32, TILE = 32;
const Limits limits{.traffic = 1.1, .products = 1.05, .microseconds = 100, .same_bits = true};

static double dot(const Array<bf16>& a, size_t i, const Array<bf16>& b, size_t j) {
    double sum = 0;
    for (int d = 0; d < HS; d++) sum += a[i * HS + d] * b[j * HS + d];
    return sum;
}

void judge() {
    for_sizes<2>("heads T", {{1, 1}, {2, 31}, {1, 33}, {2, 104}}, [](Case& c, int heads, int T) {
        const size_t rows = size_t(heads) * T, n = rows * HS, tiles = ceil_div(T, TILE);
        const double scale = 1 / std::sqrt(HS), limit = 2048;   // of products of bf16
        auto dk = c.output<float>("dk", n, limit), dv = c.output<float>("dv", n, limit);
        auto dq = c.updated<float>("dq", n, 0, 0);
        dq.storage.limit = limit;
        auto q = c.input<bf16>("q", n, -2, 2), k = c.input<bf16>("k", n, -2, 2), v = c.input<bf16>("v", n);
        auto dout = c.input<bf16>("dout", n);
        auto lse = c.input<float>("lse", rows), D = c.input<float>("D", rows);
        for (size_t i = 0; i < rows; i++) {
            const size_t first = i / T * T;   // the head's key 0
            double sum = 0, weighted = 0;
            for (size_t j = first; j <= i; j++) {
                const double e = std::exp(scale * dot(q, i, k, j));
                sum += e;
                weighted += e * dot(dout, i, v, j);
            }
            lse[i] = static_cast<float>(std::log(sum));
            D[i] = static_cast<float>(weighted / sum);
            for (size_t j = first; j <= i; j++) {
                const double P = std::exp(scale * dot(q, i, k, j) - lse[i]), dS = P * (dot(dout, i, v, j) - D[i]);
                for (int d = 0; d < HS; d++) {
                    dv.expected(j * HS + d) += P * dout[i * HS + d];
                    dq.expected(i * HS + d) += scale * dS * k[j * HS + d];
                    dk.expected(j * HS + d) += scale * dS * q[i * HS + d];
                }
            }
        }
        size_t query_rows = T, key_rows = T;   // loaded by all blocks of a head
        for (int at = 0; at < T; at += TILE) query_rows += T - at, key_rows += std::min(at + TILE, T);
        const size_t loads = 2 * (query_rows + key_rows) * HS * sizeof(bf16) + 2 * query_rows * sizeof(float);
        c.minimum_bytes = heads * loads + 3 * n * sizeof(float);
        c.minimum_flops = 7.0 * heads * tiles * (tiles + 1) / 2 * 2 * TILE * TILE * HS;
        c.run([&] { attention_backward(dq, dk, dv, q, k, v, dout, lse, D, heads, T); });
    });
}

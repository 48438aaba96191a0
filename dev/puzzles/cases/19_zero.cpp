#include "ranks.h"

void step(float* w, float* m, float* v, float* g, float* norm, int n, int rank, int R, ncclComm_t comm);

const Limits limits{.sent = 1.001};

void judge() {
    for_ranks<1>(4, "n", {{4}, {4 * 33}, {4 * 1000}}, [](Case& c, Ranks ranks, int n) {
        const int R = ranks.size, shard = n / R;
        auto w = c.updated<float>("w", n);
        auto m = c.updated<float>("m", shard);
        auto v = c.updated<float>("v", shard, 0, 1);
        auto g = c.updated<float>("g", n);
        auto norm = c.scratch<float>("norm", 1);
        g.storage.expected.clear();   // not checked
        const auto rank_0 = w.of_rank(0);
        std::vector<double> sums(n);
        double squares = 0;
        for (int r = 0; r < R; r++) {
            const auto other = g.of_rank(r);
            for (int i = 0; i < n; i++) sums[i] += other[i];
        }
        for (double sum : sums) squares += sum * sum;
        const double scale = 1.0 / R / std::fmax(1, std::sqrt(squares) / R);
        for (int r = 0; r < R; r++) {
            const auto old_m = m.of_rank(r), old_v = v.of_rank(r);
            for (int i = 0; i < shard; i++) {
                const double x = sums[r * shard + i] * scale, old = rank_0[r * shard + i];
                const double new_m = 0.9 * old_m[i] + 0.1 * x, new_v = 0.95 * old_v[i] + 0.05 * x * x;
                w[r * shard + i] = old;   // equal on all ranks
                w.expected(r * shard + i) = old - 1e-2 * (new_m / (std::sqrt(new_v) + 1e-8) + 0.1 * old);
                if (r == ranks.rank) m.expected(i) = new_m;
                if (r == ranks.rank) v.expected(i) = new_v;
            }
        }
        c.minimum_sent = 2.0 * (R - 1) / R * (n + 1) * sizeof(float);
        c.run([&] { step(w, m, v, g, norm, n, ranks.rank, R, ranks.comm); });
    });
}

#include "ranks.h"

void all_reduce(float* x, float* scratch, int n, int rank, int R, ncclComm_t comm);

const Limits limits{.sent = 1, .same_bits = true};

void judge() {
    for_ranks<1>(4, "n", {{4}, {4 * 31}, {4 * 257}, {4 * 1024}}, [](Case& c, Ranks ranks, int n) {
        auto x = c.updated<float>("x", n);
        auto scratch = c.scratch<float>("scratch", n);
        for (int i = 0; i < n; i++) x.expected(i) = 0;
        for (int r = 0; r < ranks.size; r++) {
            const std::vector<double> other = x.of_rank(r);
            for (int i = 0; i < n; i++) x.expected(i) += other[i];
        }
        c.minimum_sent = 2.0 * (ranks.size - 1) / ranks.size * n * sizeof(float);
#ifdef CUDA_ON_CPU
        c.nccl_error = [&, before = ranks.comm->calls, other = c.nccl_error]() -> std::string {
            const std::string error = other();
            if (!error.empty() || ranks.comm->calls == before) return error;
            return "a collective was called; expected only ncclSend and ncclRecv";
        };
#endif
        c.run([&] { all_reduce(x, scratch, n, ranks.rank, ranks.size, ranks.comm); });
    });
}

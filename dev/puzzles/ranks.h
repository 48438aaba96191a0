// For the cases of puzzles on several GPUs: one process per GPU, connected by NCCL.
#pragma once

#include "judge.h"

#include <nccl.h>

int fork_ranks(int size);
[[noreturn]] void end_without_gpus(int expected, int found);

struct Ranks {
    int rank, size;
    ncclComm_t comm;
};

// Calls f(case, ranks, sizes...) in each of `size` processes, for each tuple of sizes.
template <size_t K, class F>
void for_ranks(int size, const char* names, std::initializer_list<std::array<int, K>> all, F f) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    Ranks ranks{fork_ranks(size), size, nullptr};
    int devices = 0;
    cudaGetDeviceCount(&devices);
    if (devices < size) end_without_gpus(size, devices);
    cudaSetDevice(ranks.rank);
    ncclCommInitRank(&ranks.comm, size, id, ranks.rank);
    for_sizes<K>(names, all, [&](Case& c, auto... sizes) {
#ifdef CUDA_ON_CPU
        c.bytes_sent = [&] { return ranks.comm->bytes_sent; };
#endif
        c.nccl_error = [&]() -> std::string {
            cudaDeviceSynchronize();
            ncclResult_t error = ncclSuccess;
            ncclCommGetAsyncError(ranks.comm, &error);
            return error == ncclSuccess ? "" : ncclGetLastError(ranks.comm);
        };
        f(c, ranks, sizes...);
    });
    ncclCommDestroy(ranks.comm);
}

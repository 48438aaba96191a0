// The processes of a run on many GPUs: who they are, what they tell each other besides what NCCL sends, and how they end
// together. Included by train_gpt.cu, whose section "many GPUs" says what they do.
//
// MPI starts them, tells rank and number, and carries a few bytes now and then; watch.h sees whether they live. Neither
// MPI nor NCCL is needed by a program that is made without them (MULTI=no), nor asked by one that runs alone.
#pragma once

#include <sched.h>

#ifdef MULTI
#include <mpi.h>
#include <nccl.h>
#else   // of NCCL what is named where nothing is ever sent
enum ncclResult_t { ncclSuccess, ncclInvalidUsage = 5 };
enum ncclDataType_t { ncclFloat16 = 6, ncclFloat32 = 7, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum, ncclMax };
using ncclComm_t = void*;
template <typename... Args> ncclResult_t ncclAllReduce(Args...) { return ncclInvalidUsage; }
template <typename... Args> ncclResult_t ncclReduceScatter(Args...) { return ncclInvalidUsage; }
template <typename... Args> ncclResult_t ncclAllGather(Args...) { return ncclInvalidUsage; }
template <typename... Args> ncclResult_t ncclBroadcast(Args...) { return ncclInvalidUsage; }
inline const char* ncclGetErrorString(ncclResult_t) { return "this build is for one GPU"; }
inline const char* ncclGetLastError(ncclComm_t) { return "MULTI=no"; }
#endif

#include "watch.h"

struct Ranks {
    size_t rank = 0, count = 1;
    size_t on_machine = 0, of_machine = 1;   // the same among the processes of this machine
    cudaStream_t stream = nullptr;           // what is sent
    cudaEvent_t computed = nullptr, sent = nullptr;
    Overlap overlap = Overlap::ON;
    double bytes_sent = 0;                   // by this GPU, as rings would
    long step = 0;
    Watch watch;
    ncclComm_t comm = nullptr;

    bool first() const { return rank == 0; }
    bool alone() const { return count == 1; }
    void alive() { if (!alone()) watch.alive(step); }
};

static Ranks ranks;

void check(ncclResult_t status, const char* what) {
    if (status != ncclSuccess)
        throw Failure("%s: %s (%s)", what, ncclGetErrorString(status), ncclGetLastError(ranks.comm));
}

ncclDataType_t nccl_type(DType dtype) {
    return dtype == DType::FP32 ? ncclFloat32 : dtype == DType::FP16 ? ncclFloat16 : ncclBfloat16;
}

// Between true and false, which may be nested, this process waits for others or for the device.
void waiting(bool begins) {
    static std::vector<std::unique_ptr<Watch::Wait>> waits;
    if (begins) waits.push_back(std::make_unique<Watch::Wait>(ranks.watch));
    else waits.pop_back();
}

// Bytes that the first rank has, on all.
std::string from_first(std::string text) {
#ifdef MULTI
    if (ranks.alone()) return text;
    unsigned long size = text.size();
    MPI_Bcast(&size, 1, MPI_UNSIGNED_LONG, 0, MPI_COMM_WORLD);
    text.resize(size);
    MPI_Bcast(text.data(), static_cast<int>(size), MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
    return text;
}

// A number of each rank, on all.
std::vector<double> from_all(double mine) {
    std::vector<double> all(ranks.count, mine);
#ifdef MULTI
    if (ranks.alone()) return all;
    waiting(true);
    MPI_Allgather(&mine, 1, MPI_DOUBLE, all.data(), 1, MPI_DOUBLE, MPI_COMM_WORLD);
    waiting(false);
#endif
    return all;
}
// In the ranks' order: the same bits on all.
double sum_of_all(double mine) {
    const std::vector<double> all = from_all(mine);
    return std::accumulate(all.begin(), all.end(), 0.0);
}
double least_of_all(double mine) {
    const std::vector<double> all = from_all(mine);
    return *std::min_element(all.begin(), all.end());
}

// Whether mpirun or srun has started this process as one of several.
bool is_one_of_many() {
    for (const char* count : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
        if (const char* value = getenv(count); value && atoi(value) > 1) return true;
    return false;
}

// Cores for each of the processes of this machine; 0: what dev/cpu takes by itself, which heeds the cores that mpirun
// may have bound a process to.
int threads_of_rank() {
    cpu_set_t cores;
    if (ranks.of_machine == 1 || getenv("OMP_NUM_THREADS") || sched_getaffinity(0, sizeof(cores), &cores) != 0) return 0;
    const bool bound = CPU_COUNT(&cores) < sysconf(_SC_NPROCESSORS_ONLN);
    return bound ? 0 : std::max<int>(1, CPU_COUNT(&cores) / ranks.of_machine);
}

// The watch is there before options are read, which are read once more for all else.
double timeout_in(const std::vector<std::string>& args) {
    double timeout = Options().timeout, given;
    const auto flag = std::find(args.begin(), args.end(), "--timeout");
    if (flag != args.end() && flag + 1 != args.end() && parse_number(flag[1], given) && given >= 1) timeout = given;
    return timeout;
}

// What is printed is the first rank's; errors go through the watch, which prints one.
void join_ranks(const std::vector<std::string>& args) {
    if (!is_one_of_many()) return;
#ifdef MULTI
    int rank, count, on_machine, of_machine, provided;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    MPI_Comm machine;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &on_machine);
    MPI_Comm_size(machine, &of_machine);
    MPI_Comm_free(&machine);
    ranks.rank = rank;
    ranks.count = count;
    ranks.on_machine = on_machine;
    ranks.of_machine = of_machine;
    if (ranks.alone()) return;
    if (!ranks.first() && !freopen("/dev/null", "w", stdout)) throw Failure("/dev/null: %s", strerror(errno));
    ranks.watch.start(rank, count, from_first(ranks.first() ? ranks.watch.listen() : ""), timeout_in(args));
#else
    (void)args;
    throw UserError("this process is one of many, started by mpirun or srun, but the build is for one GPU: make "
                    "MULTI=yes");
#endif
}

// After the device was opened: a stream, and NCCL's communicator.
void connect_devices() {
    if (ranks.alone()) return;
#ifdef MULTI
    check(cudaStreamCreateWithFlags(&ranks.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t* event : {&ranks.computed, &ranks.sent})
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    ncclUniqueId id = {};
    if (ranks.first()) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::string same = from_first({id.internal, sizeof(id.internal)});
    memcpy(id.internal, same.data(), sizeof(id.internal));
    check(ncclCommInitRank(&ranks.comm, ranks.count, id, ranks.rank), "ncclCommInitRank");
    device.waiting = waiting;
#ifndef __NVCC__
    cuda_cpu::while_waiting = waiting;
#endif
#endif
}

void leave_ranks() {
    if (ranks.alone()) return;
#ifdef MULTI
    ranks.watch.finish();
    if (ranks.comm) check(ncclCommDestroy(ranks.comm), "ncclCommDestroy");
    MPI_Finalize();
#endif
}

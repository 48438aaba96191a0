// The processes of a run on many GPUs, and the device of each: how they start, what they tell each other besides NCCL's
// communication, and how they end together. Included by train_gpt.cu, whose section "many GPUs" says what they do.
//
// MPI starts the processes, numbers them and carries a few bytes now and then; watch.h detects those that died or hang.
// Neither MPI nor NCCL is needed by a program built without them (MULTI=no), nor asked by one that runs alone.
#pragma once

#include <sched.h>

#ifdef MULTI
#include <mpi.h>
#include <nccl.h>
#else   // the names of NCCL that the program uses; never called
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
    std::vector<std::unique_ptr<Watch::Wait>> waits;   // of this process, those that have not ended
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

// Called before (true) and after (false) this process waits for others or for the device. Calls may be nested.
void waiting(bool begins) {
    if (begins) ranks.waits.push_back(std::make_unique<Watch::Wait>(ranks.watch));
    else ranks.waits.pop_back();
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
    if (ranks.of_machine == 1 || getenv("OMP_NUM_THREADS")) return 0;
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 0;
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

// ---- device

// Why no device can be used, in CUDA's own words; empty: one can.
std::string no_device() {
    int count = 0, runtime = 0, driver = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return "";
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);   // 0: there is none
    return format("%s (CUDA runtime %d.%d, driver for up to %d.%d)",
                  status == cudaSuccess ? "no GPU was found" : cudaGetErrorString(status), runtime / 1000,
                  runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
}

// Whether this build and this device have them. dev/cpu has both, 32 threads to the warp.
bool has_tensor_cores(TensorCores kind) {
    if (kind == TensorCores::NONE) return true;
    if (!MAY_USE_TENSOR_CORES) return false;
    const int major = device.properties.major;
    return device.is_cpu() || (kind == TensorCores::WGMMA ? major == 9 && compiled_with_wgmma() : major >= 8);
}

TensorCores choose_tensor_cores(TensorCores wanted) {
    if (wanted == TensorCores::AUTO) {
        if (device.is_cpu()) return TensorCores::NONE;   // where they are only imitated
        for (TensorCores kind : {TensorCores::WGMMA, TensorCores::MMA})
            if (has_tensor_cores(kind)) return kind;
        return TensorCores::NONE;
    }
    if (!has_tensor_cores(wanted))
        throw UserError("--tensor-cores %s: not on %s in a %s build", name_of(wanted), device.properties.name,
                        name_of(FLOATX));
    return wanted;
}

// Of those that this process sees: srun may show it only its own.
int device_of_rank() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (count == 1) return 0;
    if (ranks.on_machine < static_cast<size_t>(count)) return ranks.on_machine;
    throw UserError("%zu processes on this machine, which has %d GPUs: expected one process for each", ranks.of_machine,
                    count);
}

// threads: of dev/cpu, 0 for what it takes by itself.
void open_device(TensorCores wanted, int threads = 0) {
    const std::string problem = no_device();
    if (!problem.empty()) throw Failure("%s; make DEVICE=cpu builds for the CPU", problem.c_str());
    if (threads == 0) threads = threads_of_rank();
    if (threads > 0) setenv("CUDA_CPU_THREADS", std::to_string(threads).c_str(), 1);   // for dev/cpu's cudaSetDevice
    const int number = device_of_rank();
    check(cudaSetDevice(number), "cudaSetDevice");
    check(cudaGetDeviceProperties(&device.properties, number), "cudaGetDeviceProperties");
    const cudaDeviceProp& p = device.properties;
    if (threads > 0 && !device.is_cpu())
        throw UserError("--threads %d: these are a CPU's; this build runs on %s", threads, p.name);
    if (FLOATX == DType::BF16 && !device.is_cpu() && p.major < 8)
        throw UserError("%s has compute capability %d.%d, BF16 needs 8.0 (Ampere): make PRECISION=fp16, or fp32",
                        p.name, p.major, p.minor);
    check(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaStreamCreateWithFlags(&device.copies, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cublasLtCreate(&device.matmul), "cublasLtCreate");
    device.tensor_cores = choose_tensor_cores(wanted);
    connect_devices();
}

void leave_ranks() {
    if (ranks.alone()) return;
#ifdef MULTI
    ranks.watch.finish();
    if (ranks.comm) check(ncclCommDestroy(ranks.comm), "ncclCommDestroy");
    MPI_Finalize();
#endif
}

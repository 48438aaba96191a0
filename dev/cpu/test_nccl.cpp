// Tests of nccl.h. `test_nccl 3` runs 3 ranks, each a process.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <functional>
#include <sys/wait.h>

#include "../tests/testing.h"

static int rank = 0, size = 1;
static std::vector<ncclUniqueId> ids(30);   // created before the fork; each communicator uses the next id
static size_t next_id = 0;

// Expects a fact on this rank. Ranks above 0 print only failures.
static void expect(const std::string& what, bool holds) {
    if (rank == 0 || !holds)
        expect(holds, what, holds ? "" : "rank " + std::to_string(rank) + ": " + ncclGetLastError(nullptr));
}

// Returns whether a call failed with this result and an error text that contains all words.
static bool rejected(ncclResult_t found, ncclResult_t expected, const std::vector<std::string>& words) {
    const auto has = [](const std::string& word) { return contains(ncclGetLastError(nullptr), word); };
    return found == expected && std::all_of(words.begin(), words.end(), has);
}

// Returns a new communicator of all ranks.
static ncclComm_t communicator() {
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, ids[next_id++], rank);
    return comm;
}

// A vector in device memory.
template <class T> struct Array {
    T* data = nullptr;
    size_t count;
    explicit Array(const std::vector<T>& values) : count(values.size()) {
        cudaMalloc(&data, std::max<size_t>(1, count) * sizeof(T));
        cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice);
        cudaDeviceSynchronize();
    }
    ~Array() { cudaFree(data); }
    bool is(const std::vector<T>& expected, size_t from = 0) const {
        std::vector<T> found(expected.size());
        cudaMemcpy(found.data(), data + from, found.size() * sizeof(T), cudaMemcpyDeviceToHost);
        return memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0;
    }
};

static ncclResult_t sum(ncclComm_t comm, const int* from, int* to, size_t n = 1, cudaStream_t stream = nullptr) {
    return ncclAllReduce(from, to, n, ncclInt, ncclSum, comm, stream);
}

// ==== results ===========================================================================================

// Returns a rank's values, of many magnitudes, so that rounded sums depend on the order.
template <class T> static std::vector<T> values_of(int owner, size_t count) {
    cuda_cpu::Random random{static_cast<uint64_t>(owner + 1)};
    std::vector<T> values;
    for (size_t i = 0; i < count; i++) {
        const uint64_t bits = random.next();
        const double number = static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
        values.push_back(static_cast<T>(static_cast<float>(number * (std::is_integral_v<T> ? 100 : 1 << bits % 12))));
    }
    return values;
}

// Returns the sums of values_of() over all ranks, in the order of ranks.
template <class T> static std::vector<T> sum_of_ranks(size_t count) {
    std::vector<T> total = values_of<T>(0, count);
    for (int r = 1; r < size; r++) {
        const std::vector<T> x = values_of<T>(r, count);
        for (size_t i = 0; i < count; i++) total[i] = static_cast<T>(total[i] + x[i]);
    }
    return total;
}

// Checks the collectives with n values per rank. In place: they use one buffer.
template <class T> static bool collectives_are_right(ncclComm_t comm, ncclDataType_t type, size_t n, bool in_place) {
    const size_t own = n * static_cast<size_t>(rank), all = n * static_cast<size_t>(size);
    const std::vector<T> values = values_of<T>(rank, all), own_values = values_of<T>(rank, n);
    const std::vector<T> sums = sum_of_ranks<T>(all), first_sums = sum_of_ranks<T>(n);
    const auto begin = sums.begin() + static_cast<ptrdiff_t>(own);
    Array<T> from(values), other(values);
    const Array<T>& to = in_place ? from : other;
    T* const sum = in_place ? to.data + own : to.data;
    bool right = ncclReduceScatter(from.data, sum, n, type, ncclSum, comm, nullptr) == ncclSuccess;
    right = to.is({begin, begin + static_cast<ptrdiff_t>(n)}, in_place ? own : 0) && right;
    T* const part = in_place ? sum : from.data;
    cudaMemcpy(part, own_values.data(), n * sizeof(T), cudaMemcpyHostToDevice);
    right = ncclAllGather(part, to.data, n, type, comm, nullptr) == 0 && right;
    for (int r = 0; r < size; r++) right = to.is(values_of<T>(r, n), n * static_cast<size_t>(r)) && right;
    const auto reset = [&] { cudaMemcpy(from.data, own_values.data(), n * sizeof(T), cudaMemcpyHostToDevice); };
    for (int root = 0; root < size; root++) {
        reset();
        const T* const sent = in_place || rank == root ? from.data : nullptr;
        right = ncclBroadcast(sent, to.data, n, type, root, comm, nullptr) == 0 && right;
        right = to.is(values_of<T>(root, n)) && right;
        reset();
        T* const total = rank == root ? to.data : nullptr;
        right = ncclReduce(from.data, total, n, type, ncclSum, root, comm, nullptr) == 0 && right;
        right = (rank == root ? to.is(first_sums) : from.is(own_values)) && right;
    }
    reset();
    return ncclAllReduce(from.data, to.data, n, type, ncclSum, comm, nullptr) == 0 && to.is(first_sums) && right;
}

template <class T> static void test_type(const std::string& name, ncclDataType_t type, ncclComm_t comm) {
    bool right = true;
    for (const size_t n : {0, 1, 7, 300001})
        for (const bool in_place : {false, true}) right = collectives_are_right<T>(comm, type, n, in_place) && right;
    expect(name + ": collectives are correct, also in place; sums have the bits of sums in the order of ranks", right);
}

static void test_operations_and_sends(ncclComm_t comm) {
    const auto gives = [&](ncclRedOp_t op, float mine, float expected) {
        Array<float> x({mine});
        return ncclAllReduce(x.data, x.data, 1, ncclFloat, op, comm, nullptr) == ncclSuccess && x.is({expected});
    };
    const float r = static_cast<float>(rank), last = static_cast<float>(size - 1);
    expect("all-reduce computes maximum, minimum and product",
           gives(ncclMax, r, last) && gives(ncclMax, 1 - r, 1) && gives(ncclMin, 1 - r, 1 - last) &&
               gives(ncclProd, 2, static_cast<float>(1 << size)));
    bool right = true;
    std::vector<std::unique_ptr<Array<int>>> sent, received;
    ncclGroupStart();
    for (int peer = 0; peer < size; peer++)   // including this rank
        for (const size_t count : {0, 100003, 5}) {
            sent.push_back(std::make_unique<Array<int>>(values_of<int>(rank * 9 + peer, count)));
            received.push_back(std::make_unique<Array<int>>(std::vector<int>(count)));
            right = ncclSend(sent.back()->data, count, ncclInt, peer, comm, nullptr) == ncclSuccess && right;
            right = ncclRecv(received.back()->data, count, ncclInt, peer, comm, nullptr) == ncclSuccess && right;
        }
    right = ncclGroupEnd() == ncclSuccess && right;
    for (size_t i = 0; i < received.size(); i++)
        right = received[i]->is(values_of<int>(static_cast<int>(i / 3) * 9 + rank, received[i]->count)) && right;
    expect("sends of all ranks to all, in a group, arrive in order", right);
    Array<int> x({rank});
    if (rank > 0) ncclRecv(x.data, 1, ncclInt, rank - 1, comm, nullptr);
    if (rank < size - 1) ncclSend(x.data, 1, ncclInt, rank + 1, comm, nullptr);
    expect("a value is passed from rank to rank", x.is({0}));
}

static void test_groups(ncclComm_t comm) {
    Array<int> x({1});
    expect("ncclGroupEnd without ncclGroupStart is rejected", rejected(ncclGroupEnd(), ncclInvalidUsage, {"without"}));
    ncclGroupStart();
    sum(comm, x.data, x.data);
    ncclGroupStart();
    sum(comm, x.data, x.data);
    const bool inner = ncclGroupEnd() == ncclSuccess && x.is({1});
    expect("the outermost ncclGroupEnd issues a group's calls",
           inner && ncclGroupEnd() == ncclSuccess && x.is({size * size}));
    ncclGroupStart();
    const bool found = rejected(sum(comm, nullptr, x.data), ncclInvalidArgument, {"sendbuff is null"});
    sum(comm, x.data, x.data);
    expect("a group with an invalid call is rejected as a whole",
           found && ncclGroupEnd() == ncclInvalidArgument && x.is({size * size}));
}

// ==== errors ============================================================================================

// The last rank's calls differ from the other ranks' calls.
static void test_mismatches() {
    const bool odd = rank == size - 1;
    const std::string last = "rank " + std::to_string(size - 1) + " calls ";
    Array<float> array(std::vector<float>(64)), other(std::vector<float>(64 * static_cast<size_t>(size)));
    float *const a = array.data, *const b = other.data;
    const auto reduce = [&](size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm) {
        return ncclAllReduce(a, b, n, type, op, comm, nullptr);
    };
    const auto differs = [&](const std::string& what, const std::vector<std::string>& words, auto call) {
        ncclComm_t comm = communicator();
        ncclResult_t error = ncclSuccess;
        expect("all ranks report a mismatch of the " + what,
               rejected(call(comm), ncclInvalidUsage, words) && ncclCommGetAsyncError(comm, &error) == ncclSuccess &&
                   error == ncclInvalidUsage && reduce(1, ncclFloat, ncclSum, comm) == ncclInvalidUsage &&
                   ncclCommAbort(comm) == ncclSuccess);
    };
    differs("count", {"calls ncclAllReduce(count 8, ncclFloat32, ncclSum)", last + "ncclAllReduce(count 7,"},
            [&](ncclComm_t comm) { return reduce(odd ? 7 : 8, ncclFloat, ncclSum, comm); });
    differs("type", {last + "ncclAllReduce(count 8, ncclInt32"},
            [&](ncclComm_t comm) { return reduce(8, odd ? ncclInt : ncclFloat, ncclSum, comm); });
    differs("operation", {"ncclSum", "ncclMax"},
            [&](ncclComm_t comm) { return reduce(8, ncclFloat, odd ? ncclMax : ncclSum, comm); });
    differs("root", {"root or peer 0", last + "ncclBroadcast(count 8, ncclFloat32, root or peer 1)"},
            [&](ncclComm_t comm) { return ncclBroadcast(a, b, 8, ncclFloat, odd, comm, nullptr); });
    differs("collective", {"calls ncclAllReduce(", last + "ncclAllGather("}, [&](ncclComm_t comm) {
        return odd ? ncclAllGather(a, b, 8, ncclFloat, comm, nullptr) : reduce(8, ncclFloat, ncclSum, comm);
    });
    differs("order in a group", {"count 1,", last + "ncclAllReduce(count 2,"}, [&](ncclComm_t comm) {
        ncclGroupStart();
        for (const size_t n : {odd ? 2 : 1, odd ? 1 : 2}) reduce(n, ncclFloat, ncclSum, comm);
        return ncclGroupEnd();
    });
    differs("order of sends and receives, a deadlock", {"deadlock", "ncclSend"}, [&](ncclComm_t comm) {
        return ncclSend(a, 5, ncclFloat, (rank + 1) % size, comm, nullptr);
    });
    differs("count of a send", {"calls do not match", "count 5"}, [&](ncclComm_t comm) {
        if (rank == 0) return ncclSend(a, 5, ncclFloat, size - 1, comm, nullptr);
        return odd ? ncclRecv(a, 4, ncclFloat, 0, comm, nullptr) : reduce(1, ncclFloat, ncclSum, comm);
    });
    differs("order of sends and collectives", {last + "ncclRecv", "rank 0 calls ncclAllReduce"},
            [&](ncclComm_t comm) {
                return odd ? ncclRecv(a, 1, ncclFloat, 0, comm, nullptr) : reduce(1, ncclFloat, ncclSum, comm);
            });
}

static void test_communicators(ncclComm_t world) {
    ncclComm_t comm = nullptr;
    Array<int> x({rank});
    expect("a null communicator and a root that does not exist are rejected",
           rejected(sum(nullptr, x.data, x.data), ncclInvalidArgument, {"comm is null"}) &&
               rejected(ncclBroadcast(x.data, x.data, 1, ncclInt, size, world, nullptr), ncclInvalidArgument,
                        {"peer"}));
    const auto init = [&](int n, ncclUniqueId id, int r) { return ncclCommInitRank(&comm, n, id, r); };
    expect("an invalid unique id and an invalid rank are rejected",
           rejected(init(size, {}, rank), ncclSystemError, {"unique id"}) &&
               rejected(init(size, ids[0], size), ncclInvalidArgument, {"rank"}));
    expect("a unique id cannot be used twice", rejected(init(size, ids[0], rank), ncclInvalidUsage, {"already"}));
    if (size > 1) {
        const int odd = rank == size - 1;
        expect("all ranks report that nranks differs",
               rejected(init(size + odd, ids[next_id++], rank), ncclInvalidUsage, {"nranks is", "on another"}));
        cudaSetDevice(rank == 1 ? 0 : rank);
        expect("all ranks report a duplicate GPU",
               rejected(init(size, ids[next_id++], rank), ncclInvalidUsage, {"duplicate GPU", "use device 0"}));
        cudaSetDevice(rank);
    }
    const bool split = ncclCommSplit(world, rank % 2, -rank, &comm, nullptr) == ncclSuccess;
    const int newest = (size - 1) % 2 == rank % 2 ? size - 1 : size - 2;   // the largest rank of this color
    const bool ordered = ncclBroadcast(x.data, x.data, 1, ncclInt, 0, comm, nullptr) == ncclSuccess && x.is({newest});
    expect("ncclCommSplit groups ranks by color and orders them by key",
           split && ordered && ncclCommDestroy(comm) == ncclSuccess);
    expect("a destroyed communicator is rejected", rejected(ncclCommDestroy(comm), ncclInvalidArgument, {"destroyed"}));
    expect("a rank with NCCL_SPLIT_NOCOLOR gets no communicator",
           ncclCommSplit(world, NCCL_SPLIT_NOCOLOR, 0, &comm, nullptr) == ncclSuccess && comm == nullptr);
}

// ==== streams ===========================================================================================

static cudaStream_t streams[3];

enum class Removed { NOTHING, BEFORE, AFTER };   // the event before or after the collective

// Runs steps like those of training: compute, sum over the ranks on another stream, use the sum, in the same memory.
static bool steps_are_right(ncclComm_t comm, Removed removed) {
    const cudaStream_t compute = streams[0], communication = streams[1];
    Array<int> x({0}), all({0}), total({0});
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    const auto pass = [&](cudaStream_t from, cudaStream_t to) {
        cudaEventRecord(event, from);
        cudaStreamWaitEvent(to, event);
    };
    int expected = 0;
    for (int step = 1; step <= 12; step++) {
        cuda_cpu::submit(compute, [step, x = x.data] {
            *x = step + rank;
            return cudaSuccess;
        });
        if (removed != Removed::BEFORE) pass(compute, communication);
        sum(comm, x.data, all.data, 1, communication);
        if (removed != Removed::AFTER) pass(communication, compute);
        cuda_cpu::submit(compute, [to = total.data, x = all.data] {
            *to = *to * 3 + *x;
            return cudaSuccess;
        });
        expected = expected * 3 + size * step + size * (size - 1) / 2;
    }
    const bool done = cudaDeviceSynchronize() == cudaSuccess;
    cudaEventDestroy(event);
    return done && total.is({expected});
}

// Returns whether check() holds under 5 seeds. Each rank has its own seeds and so its own orders of streams.
static bool under_all_seeds(const std::function<bool()>& check) {
    bool right = true;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        cuda_cpu::set_seed(seed * 100 + static_cast<uint64_t>(rank));
        right = check() && right;
        cudaDeviceSynchronize();
    }
    return right;
}

static bool streams_keep_the_order(ncclComm_t comm, ncclComm_t second) {
    Array<int> x(std::vector<int>(40, 1));
    bool right = true;
    for (int i = 0; i < 40; i++)
        right = ncclAllReduce(x.data, x.data, static_cast<size_t>(i + 1), ncclInt, ncclMax, i % 3 ? comm : second,
                              streams[i % 2]) == ncclSuccess && right;
    return cudaDeviceSynchronize() == cudaSuccess && right;
}

static bool graph_replays(ncclComm_t comm) {
    Array<int> x({1});
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal);
    const bool recorded = sum(comm, x.data, x.data, 1, streams[0]) == ncclSuccess;
    cudaStreamEndCapture(streams[0], &graph);
    cudaGraphInstantiate(&executable, graph);
    const bool untouched = x.is({1});
    for (int i = 0; i < 2; i++) cudaGraphLaunch(executable, streams[0]);
    const bool done = cudaStreamSynchronize(streams[0]) == cudaSuccess && x.is({size * size});
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return recorded && untouched && done;
}

static void test_queued_mismatch() {
    Array<int> x(std::vector<int>(8));
    ncclComm_t comm = communicator();
    const bool queued = sum(comm, x.data, x.data, 4 - (rank == 0), streams[2]) == ncclSuccess;
    const bool seen = cudaStreamSynchronize(streams[2]) == cudaErrorUnknown;
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(comm, &error);
    expect("queues: after a mismatch the synchronisation fails and the communicator has the error",
           queued && seen && rejected(error, ncclInvalidUsage, {"count 4", "count 3"}));
    ncclCommAbort(comm);
    cuda_cpu::asynchronous_error() = cudaSuccess;
    cudaGetLastError();
}

static void test_card(ncclComm_t comm) {
    Array<int> x(std::vector<int>(8));
    std::vector<int> pageable(8);
    expect("pageable memory and a buffer past the end of its allocation are rejected",
           rejected(sum(comm, pageable.data(), x.data, 8), ncclInvalidArgument, {"sendbuff", "pageable"}) &&
               rejected(sum(comm, x.data, x.data, 9), ncclInvalidArgument, {"past the end"}));
    for (const char* algorithms : {"^NVLS", "Ring", "NVLS"}) {
        setenv("NCCL_ALGO", algorithms, 1);
        bool same = true;
        for (int i = 0; i < size; i++) same = collectives_are_right<float>(comm, ncclFloat, 999, false) && same;
        expect(std::string("sums with NCCL_ALGO=") + algorithms + " have the same bits, except with NVLS",
               same == (strcmp(algorithms, "NVLS") != 0 || size < 3));
    }
}

static int test_all() {
    alarm(300);   // ends ranks that wait for each other forever
    cudaSetDevice(rank);
    for (cudaStream_t& stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    ncclComm_t comm = communicator(), second = communicator();
    test_type<float>("float", ncclFloat, comm);
    test_type<__nv_bfloat16>("bf16", ncclBfloat16, comm);
    test_type<double>("double", ncclDouble, comm);
    test_type<int8_t>("int8", ncclInt8, comm);
    test_type<__half>("half", ncclHalf, comm);
    test_operations_and_sends(comm);
    test_groups(comm);
    if (size > 1) test_mismatches();
    test_communicators(comm);
    expect("a graph of collectives is replayed", graph_replays(comm));
    cuda_cpu::set_card("h100");
    setenv("NCCL_ALGO", "^NVLS", 1);
    const auto steps = [&](Removed removed) { return under_all_seeds([&] { return steps_are_right(comm, removed); }); };
    const auto on_any_rank = [&](bool holds) {
        Array<int> any({holds});
        return sum(comm, any.data, any.data) == ncclSuccess && !any.is({0});
    };
    expect("queues: with both events all steps are correct under every seed", steps(Removed::NOTHING));
    expect("queues: without the event before the collective a step is wrong", on_any_rank(!steps(Removed::BEFORE)));
    expect("queues: without the event after the collective a step is wrong", on_any_rank(!steps(Removed::AFTER)));
    expect("queues: collectives keep their order across streams and communicators",
           under_all_seeds([&] { return streams_keep_the_order(comm, second); }));
    expect("queues: a graph of collectives is replayed", under_all_seeds([&] { return graph_replays(comm); }));
    if (size > 1) test_queued_mismatch();
    test_card(comm);
    expect("communicators are destroyed", ncclCommDestroy(second) == 0 && ncclCommDestroy(comm) == 0);
    if (rank == 0) printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

int main(int argc, char** argv) {
    size = argc > 1 ? atoi(argv[1]) : 2;
    cuda_cpu::set_card("");
    setenv("CUDA_CPU_DEVICES", argc > 1 ? argv[1] : "2", 1);
    for (ncclUniqueId& id : ids) ncclGetUniqueId(&id);
    std::vector<pid_t> children;
    for (int r = 1; r < size && rank == 0; r++) {
        children.push_back(fork());
        if (children.back() == 0) rank = r;
    }
    if (rank > 0) _exit(test_all());
    int code = test_all(), status = 0;
    for (const pid_t child : children) code |= waitpid(child, &status, 0) != child || status != 0;
    if (code != 0) printf("a rank failed\n");
    return code;
}

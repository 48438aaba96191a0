// Tests of nccl.h for some number of ranks, each a process: test_nccl 3
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <functional>
#include <sys/wait.h>

// ==== the harness =======================================================================================

static int rank = 0, size = 1, passed = 0, failed = 0;
static std::vector<ncclUniqueId> ids(60);   // made before the ranks, which use them in turn
static size_t next_id = 0;

static void claim(const std::string& what, bool holds) {
    ++(holds ? passed : failed);
    if (!holds) printf("FAILED  %s (rank %d: %s)\n", what.c_str(), rank, ncclGetLastError(nullptr));
    else if (rank == 0) printf("ok      %s\n", what.c_str());
    fflush(stdout);
}

// Whether a call failed so, with words about it.
static bool refused(ncclResult_t found, ncclResult_t expected, const std::vector<std::string>& words) {
    const std::string text = ncclGetLastError(nullptr);
    const auto has = [&](const std::string& word) { return text.find(word) != std::string::npos; };
    return found == expected && std::all_of(words.begin(), words.end(), has);
}

struct Communicator {
    ncclComm_t comm = nullptr;
    Communicator() { ncclCommInitRank(&comm, size, ids[next_id++], rank); }
    explicit Communicator(ncclComm_t of) : comm(of) {}
    ~Communicator() { ncclCommDestroy(comm); }
    operator ncclComm_t() const { return comm; }
};
struct Stream {
    cudaStream_t stream = nullptr;
    Stream() { cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); }
    ~Stream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
};

// A vector on the "device".
template <class T> struct Array {
    T* data = nullptr;
    size_t count;
    explicit Array(const std::vector<T>& values) : count(values.size()) {
        cudaMalloc(&data, std::max<size_t>(1, count) * sizeof(T));
        cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice);
        cudaDeviceSynchronize();
    }
    explicit Array(size_t n) : Array(std::vector<T>(n, T(0))) {}
    ~Array() { cudaFree(data); }
    std::vector<T> values() const {
        std::vector<T> all(count);
        cudaMemcpy(all.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost);
        return all;
    }
    bool is(const std::vector<T>& expected) const {
        const std::vector<T> found = values();
        return found.size() == expected.size() && memcmp(found.data(), expected.data(), count * sizeof(T)) == 0;
    }
};

// Whether it holds on one rank at least.
static bool anywhere(ncclComm_t comm, bool holds) {
    Array<int> any(std::vector<int>{holds});
    ncclAllReduce(any.data, any.data, 1, ncclInt, ncclMax, comm, nullptr);
    return any.values()[0] != 0;
}

// ==== results ===========================================================================================

template <class T> constexpr ncclDataType_t type_of = ncclInt;
template <> constexpr ncclDataType_t type_of<float> = ncclFloat;
template <> constexpr ncclDataType_t type_of<double> = ncclDouble;
template <> constexpr ncclDataType_t type_of<int8_t> = ncclInt8;
template <> constexpr ncclDataType_t type_of<__half> = ncclHalf;
template <> constexpr ncclDataType_t type_of<__nv_bfloat16> = ncclBfloat16;

// Numbers of a rank of many magnitudes, whose sums depend on the order.
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
template <class T> static std::vector<T> sum_of_all(size_t count, int ranks = size) {
    using Short = std::conditional_t<std::is_integral_v<T>, int, float>;
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, Short>;
    std::vector<T> total = values_of<T>(0, count);
    for (int r = 1; r < ranks; r++) {
        const std::vector<T> x = values_of<T>(r, count);
        for (size_t i = 0; i < count; i++)
            total[i] = static_cast<T>(static_cast<Wide>(total[i]) + static_cast<Wide>(x[i]));
    }
    return total;
}
template <class T> static std::vector<T> part_of(const std::vector<T>& all, size_t part, size_t count) {
    const auto first = all.begin() + static_cast<ptrdiff_t>(part * count);
    return {first, first + static_cast<ptrdiff_t>(count)};
}

template <class T> static bool all_reduces(ncclComm_t comm, size_t n, bool in_place) {
    Array<T> send(values_of<T>(rank, n)), other(n);
    T* const to = in_place ? send.data : other.data;
    return ncclAllReduce(send.data, to, n, type_of<T>, ncclSum, comm, nullptr) == ncclSuccess &&
           (in_place ? send : other).is(sum_of_all<T>(n)) && (in_place || send.is(values_of<T>(rank, n)));
}
template <class T> static bool reduce_scatters(ncclComm_t comm, size_t n, bool in_place) {
    const size_t all = n * static_cast<size_t>(size), r = static_cast<size_t>(rank);
    Array<T> send(values_of<T>(rank, all)), other(n);
    T* const to = in_place ? send.data + r * n : other.data;
    const bool done = ncclReduceScatter(send.data, to, n, type_of<T>, ncclSum, comm, nullptr) == ncclSuccess;
    const std::vector<T> found = in_place ? part_of(send.values(), r, n) : other.values();
    return done && Array<T>(found).is(part_of(sum_of_all<T>(all), r, n));
}
template <class T> static bool all_gathers(ncclComm_t comm, size_t n, bool in_place) {
    Array<T> send(values_of<T>(rank, n)), recv(n * static_cast<size_t>(size));
    T* const own = recv.data + n * static_cast<size_t>(rank);
    if (in_place) cudaMemcpy(own, send.data, n * sizeof(T), cudaMemcpyDeviceToDevice);
    bool right = ncclAllGather(in_place ? own : send.data, recv.data, n, type_of<T>, comm, nullptr) == ncclSuccess;
    for (int r = 0; r < size; r++)
        right = right && Array<T>(part_of(recv.values(), static_cast<size_t>(r), n)).is(values_of<T>(r, n));
    return right;
}
template <class T> static bool broadcasts(ncclComm_t comm, size_t n, bool in_place) {
    bool right = true;
    for (int root = 0; root < size; root++) {
        Array<T> send(values_of<T>(rank, n)), other(n);
        T* const from = in_place || rank == root ? send.data : nullptr;
        T* const to = in_place ? send.data : other.data;
        right = ncclBroadcast(from, to, n, type_of<T>, root, comm, nullptr) == ncclSuccess && right;
        right = right && (in_place ? send : other).is(values_of<T>(root, n));
    }
    return right;
}
template <class T> static void test_type(const std::string& name, ncclComm_t comm) {
    const auto every = [&](const std::string& what, bool (*check)(ncclComm_t, size_t, bool)) {
        bool right = true;
        for (const size_t n : {0, 1, 7, 300001})
            for (const bool in_place : {false, true}) right = check(comm, n, in_place) && right;
        claim(name + ": " + what + ", in place or not", right);
    };
    every("all-reduce, in the order of ranks, bit for bit", all_reduces<T>);
    every("reduce-scatter, the same bits", reduce_scatters<T>);
    every("all-gather", all_gathers<T>);
    every("broadcast from every root", broadcasts<T>);
}

static void test_operations(ncclComm_t comm) {
    const auto gives = [&](ncclRedOp_t op, float mine, float expected) {
        Array<float> x(std::vector<float>{mine});
        return ncclAllReduce(x.data, x.data, 1, ncclFloat, op, comm, nullptr) == ncclSuccess && x.is({expected});
    };
    const float r = static_cast<float>(rank), last = static_cast<float>(size - 1);
    claim("maximum, minimum and product", gives(ncclMax, r, last) && gives(ncclMax, 1 - r, 1) &&
                                              gives(ncclMin, 1 - r, 1 - last) &&
                                              gives(ncclProd, 2, static_cast<float>(1 << size)));
}

// ==== messages ==========================================================================================

static void test_messages(ncclComm_t comm) {
    bool right = true;
    for (const size_t n : {0, 1, 100003}) {   // to each rank, this one too, two messages
        std::vector<std::unique_ptr<Array<int>>> sent, received;
        ncclGroupStart();
        for (int r = 0; r < size; r++)
            for (const size_t count : {n, n + 5}) {
                sent.push_back(std::make_unique<Array<int>>(values_of<int>(rank * 9 + r, count)));
                received.push_back(std::make_unique<Array<int>>(count));
                right = ncclSend(sent.back()->data, count, ncclInt, r, comm, nullptr) == ncclSuccess && right;
                right = ncclRecv(received.back()->data, count, ncclInt, r, comm, nullptr) == ncclSuccess && right;
            }
        right = ncclGroupEnd() == ncclSuccess && right;
        for (size_t i = 0; i < received.size(); i++)
            right = right && received[i]->is(values_of<int>(static_cast<int>(i / 2) * 9 + rank, received[i]->count));
    }
    claim("messages of all ranks to all, together, arrive in their order", right);
    Array<int> x(std::vector<int>{rank});
    if (rank > 0) ncclRecv(x.data, 1, ncclInt, rank - 1, comm, nullptr);
    if (rank < size - 1) ncclSend(x.data, 1, ncclInt, rank + 1, comm, nullptr);
    claim("a message along a chain", x.is({0}));
}

// ==== errors ============================================================================================

static void test_arguments(ncclComm_t comm) {
    Array<float> array(64 + 16 * static_cast<size_t>(size));
    float* const a = array.data;
    CUstream_st none;
    const auto refuses = [&](const std::string& what, const void* send, void* recv, size_t n, int type, int op,
                             const std::vector<std::string>& words, ncclComm_t to, cudaStream_t stream = nullptr) {
        const ncclResult_t result = ncclAllReduce(send, recv, n, static_cast<ncclDataType_t>(type),
                                                  static_cast<ncclRedOp_t>(op), to, stream);
        claim("refused: " + what, refused(result, ncclInvalidArgument, words));
    };
    refuses("no communicator", a, a, 1, ncclFloat, ncclSum, {"comm is null"}, nullptr);
    refuses("no sendbuff", nullptr, a, 7, ncclFloat, ncclSum, {"sendbuff is null"}, comm);
    refuses("no recvbuff", a, nullptr, 7, ncclFloat, ncclSum, {"recvbuff is null"}, comm);
    refuses("a type that does not exist", a, a, 1, 10, ncclSum, {"data type is 10"}, comm);
    refuses("an operation that does not exist", a, a, 1, ncclFloat, 4, {"operation is 4"}, comm);
    refuses("more than memory holds", a, a, ~size_t{0}, ncclFloat, ncclSum, {"count is"}, comm);
    refuses("a stream that does not exist", a, a, 1, ncclFloat, ncclSum, {"stream does not exist"}, comm, &none);
    refuses("overlap", a, a + 3, 8, ncclFloat, ncclSum, {"overlap", "12 bytes", "expected 0"}, comm);
    refuses("overlap backward", a + 3, a, 8, ncclFloat, ncclSum, {"overlap", "-12 bytes"}, comm);
    claim("refused: a root that does not exist",
          refused(ncclBroadcast(a, a, 1, ncclFloat, size, comm, nullptr), ncclInvalidArgument, {"root or peer is"}));
    float* const own = a + 8 * rank;
    claim("refused: overlap but at a rank's own part",
          refused(ncclReduceScatter(a, own + 1, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument,
                  {"expected " + std::to_string(32 * rank)}) &&
              refused(ncclAllGather(own + 1, a, 8, ncclFloat, comm, nullptr), ncclInvalidArgument,
                      {"expected " + std::to_string(-32 * rank)}));
    claim("buffers that touch do not overlap",
          ncclAllReduce(a, a + 8, 8, ncclFloat, ncclSum, comm, nullptr) == ncclSuccess);
}

// Ranks that call different things: the last one differs.
static void test_mismatches() {
    const bool odd = rank == size - 1;
    const std::string last = "rank " + std::to_string(size - 1) + " calls ";
    Array<float> array(64 * static_cast<size_t>(size)), other(64 * static_cast<size_t>(size));
    float *const a = array.data, *const b = other.data;
    const auto differs = [&](const std::string& what, const std::vector<std::string>& words, auto call) {
        ncclComm_t comm = nullptr;
        ncclCommInitRank(&comm, size, ids[next_id++], rank);
        ncclResult_t error = ncclSuccess;
        bool right = refused(call(comm), ncclInvalidUsage, words);
        right = right && ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclInvalidUsage;
        right = right && ncclAllReduce(a, b, 1, ncclFloat, ncclSum, comm, nullptr) == ncclInvalidUsage;
        claim("all ranks find a different " + what, right);
        ncclCommAbort(comm);
    };
    const auto reduce = [&](size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm) {
        return ncclAllReduce(a, b, n, type, op, comm, nullptr);
    };
    differs("count", {"rank 0 calls ncclAllReduce(count 8, ncclFloat32, ncclSum)", last + "ncclAllReduce(count 7,"},
            [&](ncclComm_t comm) { return reduce(odd ? 7 : 8, ncclFloat, ncclSum, comm); });
    differs("type", {last + "ncclAllReduce(count 8, ncclInt32"},
            [&](ncclComm_t comm) { return reduce(8, odd ? ncclInt : ncclFloat, ncclSum, comm); });
    differs("operation", {"ncclSum", "ncclMax"},
            [&](ncclComm_t comm) { return reduce(8, ncclFloat, odd ? ncclMax : ncclSum, comm); });
    differs("root", {"root 0", last + "ncclBroadcast(count 8, ncclFloat32, root 1)"},
            [&](ncclComm_t comm) { return ncclBroadcast(a, b, 8, ncclFloat, odd, comm, nullptr); });
    differs("collective", {"rank 0 calls ncclAllReduce(", last + "ncclAllGather("}, [&](ncclComm_t comm) {
        return odd ? ncclAllGather(a, b, 8, ncclFloat, comm, nullptr) : reduce(8, ncclFloat, ncclSum, comm);
    });
    differs("order in a group", {"count 1,", last + "ncclAllReduce(count 2,"}, [&](ncclComm_t comm) {
        ncclGroupStart();
        for (const size_t n : {odd ? 2 : 1, odd ? 1 : 2}) reduce(n, ncclFloat, ncclSum, comm);
        return ncclGroupEnd();
    });
    differs("length of a message", {"messages differ", "count 5"}, [&](ncclComm_t comm) {
        if (rank == 0) return ncclSend(a, 5, ncclFloat, size - 1, comm, nullptr);
        return odd ? ncclRecv(a, 4, ncclFloat, 0, comm, nullptr) : reduce(1, ncclFloat, ncclSum, comm);
    });
    differs("order of messages and collectives", {"different orders", last + "ncclRecv", "rank 0 a collective"},
            [&](ncclComm_t comm) {
                return odd ? ncclRecv(a, 1, ncclFloat, 0, comm, nullptr) : reduce(1, ncclFloat, ncclSum, comm);
            });
}

// ==== communicators and groups ==========================================================================

static void test_communicators(ncclComm_t world) {
    ncclComm_t comm = nullptr;
    const auto init = [&](int n, ncclUniqueId id, int r) { return ncclCommInitRank(&comm, n, id, r); };
    claim("refused: a wrong id, a wrong rank", refused(init(size, {}, rank), ncclInvalidArgument, {"unique id"}) &&
                                                   refused(init(size, ids[0], size), ncclInvalidArgument, {"rank"}));
    claim("refused: an id for the second time", refused(init(size, ids[0], rank), ncclInvalidUsage, {"already"}));
    if (size > 1) {
        const int odd = rank == size - 1;
        claim("all ranks find another number of ranks",
              refused(init(size + odd, ids[next_id++], rank), ncclInvalidArgument, {"nranks is", "on another"}));
        cudaSetDevice(rank == 1 ? 0 : rank);
        claim("all ranks find a duplicate GPU",
              refused(init(size, ids[next_id++], rank), ncclInvalidUsage, {"duplicate GPU", "both use device 0"}));
        cudaSetDevice(rank);
    }
    Array<int> x(std::vector<int>{rank});
    const bool split = ncclCommSplit(world, rank % 2, -rank, &comm, nullptr) == ncclSuccess;
    const int newest = (size - 1) % 2 == rank % 2 ? size - 1 : size - 2;   // the largest rank of this color
    const bool ordered = ncclBroadcast(x.data, x.data, 1, ncclInt, 0, comm, nullptr) == ncclSuccess && x.is({newest});
    claim("a split by color, ranks ordered by key", split && ordered && anywhere(comm, true));
    ncclCommDestroy(comm);
    claim("refused: a destroyed communicator", refused(ncclCommDestroy(comm), ncclInvalidArgument, {"destroyed"}));
    claim("without a color no communicator",
          ncclCommSplit(world, NCCL_SPLIT_NOCOLOR, 0, &comm, nullptr) == ncclSuccess && comm == nullptr);
}

static void test_groups(ncclComm_t comm) {
    Array<int> x(std::vector<int>{1});
    const auto sum = [&](int* from) { return ncclAllReduce(from, x.data, 1, ncclInt, ncclSum, comm, nullptr); };
    claim("refused: an end without a beginning", refused(ncclGroupEnd(), ncclInvalidUsage, {"no group"}));
    ncclGroupStart();
    sum(x.data);
    ncclGroupStart();
    sum(x.data);
    const bool inner = ncclGroupEnd() == ncclSuccess && x.is({1});
    claim("the outermost end issues a group's calls", inner && ncclGroupEnd() == ncclSuccess && x.is({size * size}));
    ncclGroupStart();
    const bool refuses = refused(sum(nullptr), ncclInvalidArgument, {"null"});
    sum(x.data);
    claim("a refused call refuses its group", refuses && ncclGroupEnd() == ncclInvalidArgument && x.is({size * size}));
}

// ==== streams ===========================================================================================

template <class... Parameters, class... Arguments>
static void launch(cudaStream_t stream, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = 1;
    config.stream = stream;
    cudaLaunchKernelEx(&config, kernel, arguments...);
}
__global__ void set(int* x, int value) { *x = value; }
__global__ void add_to(int* sum, const int* x) { *sum = *sum * 3 + *x; }

enum class Forget { NOTHING, BEFORE, AFTER };

// Steps of a training in small: compute, sum over the ranks on another stream, use the sum, all in the same memory.
static bool steps_are_right(ncclComm_t comm, Forget forget) {
    Stream compute, communication;
    Array<int> x(1), sum(1), total(1);
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    const auto pass = [&](cudaStream_t from, cudaStream_t to) {
        cudaEventRecord(event, from);
        cudaStreamWaitEvent(to, event);
    };
    int expected = 0;
    for (int step = 1; step <= 12; step++) {
        launch(compute, set, x.data, step + rank);
        if (forget != Forget::BEFORE) pass(compute, communication);
        ncclAllReduce(x.data, sum.data, 1, ncclInt, ncclSum, comm, communication);
        if (forget != Forget::AFTER) pass(communication, compute);
        launch(compute, add_to, total.data, sum.data);
        expected = expected * 3 + size * step + size * (size - 1) / 2;
    }
    const bool done = cudaDeviceSynchronize() == cudaSuccess;
    cudaEventDestroy(event);
    return done && total.is({expected});
}

// Every rank has another order of its streams.
static bool under_all_seeds(const std::function<bool()>& check) {
    bool right = true;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        cuda_cpu::set_seed(seed * 100 + static_cast<uint64_t>(rank));
        right = check() && right;
        cudaDeviceSynchronize();
    }
    return right;
}

// Different collectives on two streams in turn: all ranks do them in the order in which they were handed over.
static bool streams_keep_the_order(ncclComm_t comm, ncclComm_t second) {
    Stream streams[2];
    Array<int> x(std::vector<int>(40, 1));
    bool right = true;
    for (size_t i = 0; i < x.count; i++)
        right = ncclAllReduce(x.data, x.data, i + 1, ncclInt, ncclMax, i % 3 ? comm : second, streams[i % 2]) ==
                    ncclSuccess && right;
    return cudaDeviceSynchronize() == cudaSuccess && right;
}

static bool graph_replays(ncclComm_t comm) {
    Stream stream;
    Array<int> x(std::vector<int>{1});
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    const bool noted = ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, stream) == ncclSuccess;
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&executable, graph);
    const bool untouched = x.is({1});
    for (int i = 0; i < 2; i++) cudaGraphLaunch(executable, stream);
    const bool done = cudaStreamSynchronize(stream) == cudaSuccess && x.is({size * size});
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return noted && untouched && done;
}

static void test_late_mismatch() {
    Stream stream;
    Array<int> x(8);
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, ids[next_id++], rank);
    const bool queued = ncclAllReduce(x.data, x.data, 4 - (rank == 0), ncclInt, ncclSum, comm, stream) == ncclSuccess;
    const bool seen = cudaStreamSynchronize(stream) == cudaErrorUnknown;
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(comm, &error);
    claim("queues: a mismatch fails the synchronisation, the communicator has the error",
          queued && seen && refused(error, ncclInvalidUsage, {"count 4", "count 3"}));
    ncclCommAbort(comm);
    cuda_cpu::late_error() = cudaSuccess;
    cudaGetLastError();
}

static void test_card(ncclComm_t comm) {
    Array<float> array(8);
    std::vector<float> pageable(8);
    const auto sum = [&](const float* from, size_t n) {
        return ncclAllReduce(from, array.data, n, ncclFloat, ncclSum, comm, nullptr);
    };
    claim("refused: pageable memory, the end of an allocation",
          refused(sum(pageable.data(), 8), ncclInvalidArgument, {"sendbuff", "pageable"}) &&
              refused(sum(array.data, 9), ncclInvalidArgument, {"past the end"}));
    bool same = true;
    for (const char* algorithms : {"^NVLS", "Ring", "NVLS"}) {
        setenv("NCCL_ALGO", algorithms, 1);
        for (int i = 0; i < size; i++) same = all_reduces<float>(comm, 999, false) && same;
        if (!strcmp(algorithms, "Ring")) claim("a GPU's sums have the same bits where NVLS is excluded", same);
    }
    claim("NVLS adds up in another order in each call", same == (size < 3));
    setenv("NCCL_ALGO", "^NVLS", 1);
    const auto taken = [&] {
        size_t before, after, all;
        cudaMemGetInfo(&before, &all);
        Communicator made;
        cudaMemGetInfo(&after, &all);
        return before - after;
    };
    const bool late = taken() == 0;
    setenv("NCCL_RUNTIME_CONNECT", "0", 1);
    claim("a communicator's memory: at once with NCCL_RUNTIME_CONNECT=0",
          late && taken() == cuda_cpu::nccl::buffer_bytes);
}

static void test_streams() {
    Communicator comm, second;
    claim("a graph of collectives is replayed", graph_replays(comm));
    cuda_cpu::set_card("h100");
    setenv("NCCL_ALGO", "^NVLS", 1);
    const auto steps = [&](Forget forget) { return under_all_seeds([&] { return steps_are_right(comm, forget); }); };
    claim("queues: with its events a step is right, whatever the order", steps(Forget::NOTHING));
    claim("queues: without the event before it some step is wrong", anywhere(comm, !steps(Forget::BEFORE)));
    claim("queues: without the event after it some step is wrong", anywhere(comm, !steps(Forget::AFTER)));
    claim("queues: collectives keep their order over streams and communicators",
          under_all_seeds([&] { return streams_keep_the_order(comm, second); }));
    claim("queues: a graph of collectives is replayed", under_all_seeds([&] { return graph_replays(comm); }));
    if (size > 1) test_late_mismatch();
    test_card(comm);
}

static int test_all() {
    alarm(300);   // ranks that wait for each other forever end so
    cudaSetDevice(rank);
    {
        Communicator comm;
        test_type<float>("float", comm);
        test_type<__nv_bfloat16>("bf16", comm);
        test_type<double>("double", comm);
        test_type<int8_t>("int8", comm);
        test_type<__half>("half", comm);
        test_operations(comm);
        test_messages(comm);
        test_arguments(comm);
        test_groups(comm);
        if (size > 1) test_mismatches();
        test_communicators(comm);
    }
    test_streams();
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
    if (code != 0) printf("some rank failed\n");
    return code;
}

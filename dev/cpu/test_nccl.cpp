// Tests of nccl.h, a claim a line, for any number of ranks:
//
//   g++ -std=c++17 -O2 -march=native -fopenmp -Wno-unknown-pragmas -Idev/cpu -DWARP_SIZE=32 -DOMPI_SKIP_MPICXX
//       $(mpicxx --showme:compile) dev/cpu/test_nccl.cpp -o test_nccl $(mpicxx --showme:link) -lboost_context
//   OMP_NUM_THREADS=1 mpirun --oversubscribe -n 3 ./test_nccl
//
// "./test_nccl huge" takes 2^31 + 5 elements instead, 2 GiB in each rank.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <functional>

// ==== the harness =======================================================================================

static int rank = 0, size = 1;
static int passed = 0, failed = 0;

// Holds if it does on all ranks; of the others the first is named.
static void claim(const std::string& what, bool holds)
{
    const int mine = holds ? size : rank;
    int first = size;
    MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    ++(first == size ? passed : failed);
    if (rank == 0 && first == size) printf("ok      %s\n", what.c_str());
    if (rank == 0 && first < size) printf("FAILED  %s (on rank %d)\n", what.c_str(), first);
    fflush(stdout);
}

// Whether it holds on one rank at least.
static bool anywhere(bool holds)
{
    int mine = holds, any = 0;
    MPI_Allreduce(&mine, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return any != 0;
}

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Whether a call failed so, with words about it.
static bool refused(ncclResult_t found, ncclResult_t expected, const std::vector<std::string>& words)
{
    const std::string said = ncclGetLastError(nullptr);
    bool right = found == expected;
    for (const std::string& word : words) right = right && contains(said, word);
    if (!right) fprintf(stderr, "rank %d: %d: %s\n", rank, found, said.c_str());
    return right;
}

static ncclUniqueId shared_id()
{
    ncclUniqueId id{};
    if (rank == 0) ncclGetUniqueId(&id);
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    return id;
}

struct Communicator {
    ncclComm_t comm = nullptr;
    Communicator()
    {
        if (ncclCommInitRank(&comm, size, shared_id(), rank) != ncclSuccess) fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
    }
    ~Communicator() { ncclCommDestroy(comm); }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    operator ncclComm_t() const { return comm; }
};

// A vector on the "device".
template <class T>
struct Array {
    T* data = nullptr;
    size_t count;
    explicit Array(const std::vector<T>& values) : count(values.size())
    {
        cudaMalloc(&data, std::max<size_t>(1, count) * sizeof(T));
        cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice);
    }
    explicit Array(size_t count_) : Array(std::vector<T>(count_, T(0))) {}
    ~Array() { cudaFree(data); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    std::vector<T> values() const
    {
        std::vector<T> all(count);
        cudaMemcpy(all.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost);
        return all;
    }
};

template <class T>
static bool same_bits(const std::vector<T>& a, const std::vector<T>& b)
{
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T> struct TypeOf;
template <> struct TypeOf<float> { static constexpr ncclDataType_t value = ncclFloat; };
template <> struct TypeOf<double> { static constexpr ncclDataType_t value = ncclDouble; };
template <> struct TypeOf<int> { static constexpr ncclDataType_t value = ncclInt; };
template <> struct TypeOf<int8_t> { static constexpr ncclDataType_t value = ncclInt8; };
template <> struct TypeOf<__half> { static constexpr ncclDataType_t value = ncclHalf; };
template <> struct TypeOf<__nv_bfloat16> { static constexpr ncclDataType_t value = ncclBfloat16; };
template <class T> constexpr ncclDataType_t type_of = TypeOf<T>::value;

// ==== results ===========================================================================================

// What a rank brings to a collective: numbers of many magnitudes, whose sums depend on the order.
template <class T>
static std::vector<T> values_of(int owner, size_t count)
{
    cuda_cpu::Random random{static_cast<uint64_t>(owner + 1)};
    std::vector<T> values(count);
    for (T& value : values) {
        const uint64_t bits = random.next();
        const double number = static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
        const double magnitude = static_cast<double>(1 << bits % 12);
        if constexpr (std::is_integral_v<T>) value = static_cast<T>(number * 1000);
        else value = static_cast<T>(number * magnitude);
    }
    return values;
}

static std::vector<__nv_bfloat16>& add(std::vector<__nv_bfloat16>& total, const std::vector<__nv_bfloat16>& x)
{
    for (size_t i = 0; i < x.size(); i++) total[i] = __nv_bfloat16(static_cast<float>(total[i]) + static_cast<float>(x[i]));
    return total;
}
template <class T>
static std::vector<T>& add(std::vector<T>& total, const std::vector<T>& x)
{
    for (size_t i = 0; i < x.size(); i++) total[i] = static_cast<T>(total[i] + x[i]);
    return total;
}

template <class T>
static std::vector<T> sum_of_all(size_t count)
{
    std::vector<T> total = values_of<T>(0, count);
    for (int r = 1; r < size; r++) total = add(total, values_of<T>(r, count));
    return total;
}

template <class T>
static std::vector<T> part_of(const std::vector<T>& all, int part, size_t count)
{
    const auto first = all.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(part) * count);
    return {first, first + static_cast<ptrdiff_t>(count)};
}

enum class Place { APART, SAME };

template <class T>
static bool all_reduces(ncclComm_t comm, size_t count, Place place)
{
    Array<T> send(values_of<T>(rank, count)), other(count);
    T* const recv = place == Place::SAME ? send.data : other.data;
    const ncclResult_t result = ncclAllReduce(send.data, recv, count, type_of<T>, ncclSum, comm, nullptr);
    return result == ncclSuccess && same_bits((place == Place::SAME ? send : other).values(), sum_of_all<T>(count)) &&
           (place == Place::SAME || same_bits(send.values(), values_of<T>(rank, count)));
}

template <class T>
static bool reduce_scatters(ncclComm_t comm, size_t count, Place place)
{
    const size_t all = count * static_cast<size_t>(size), own = count * static_cast<size_t>(rank);
    Array<T> send(values_of<T>(rank, all)), other(count);
    T* const recv = place == Place::SAME ? send.data + own : other.data;
    const ncclResult_t result = ncclReduceScatter(send.data, recv, count, type_of<T>, ncclSum, comm, nullptr);
    const std::vector<T> found = place == Place::SAME ? part_of(send.values(), rank, count) : other.values();
    return result == ncclSuccess && same_bits(found, part_of(sum_of_all<T>(all), rank, count));
}

template <class T>
static bool all_gathers(ncclComm_t comm, size_t count, Place place)
{
    const size_t all = count * static_cast<size_t>(size), own = count * static_cast<size_t>(rank);
    Array<T> send(values_of<T>(rank, count)), recv(all);
    cudaMemcpy(recv.data + own, send.data, count * sizeof(T), cudaMemcpyDeviceToDevice);
    const T* const from = place == Place::SAME ? recv.data + own : send.data;
    bool right = ncclAllGather(from, recv.data, count, type_of<T>, comm, nullptr) == ncclSuccess;
    for (int r = 0; r < size; r++) right = right && same_bits(part_of(recv.values(), r, count), values_of<T>(r, count));
    return right;
}

template <class T>
static bool broadcasts(ncclComm_t comm, size_t count, Place place)
{
    bool right = true;
    for (int root = 0; root < size; root++) {
        Array<T> send(values_of<T>(rank, count)), other(count);
        const bool same = place == Place::SAME;
        const T* const from = same || rank == root ? send.data : nullptr;
        T* const to = same ? send.data : other.data;
        right = ncclBroadcast(from, to, count, type_of<T>, root, comm, nullptr) == ncclSuccess && right;
        right = right && same_bits((same ? send : other).values(), values_of<T>(root, count));
    }
    return right;
}

template <class T>
static bool reduces(ncclComm_t comm, size_t count, Place place)
{
    bool right = true;
    for (int root = 0; root < size; root++) {
        Array<T> send(values_of<T>(rank, count)), other(count);
        const bool same = place == Place::SAME;
        T* const to = same ? send.data : rank == root ? other.data : nullptr;
        right = ncclReduce(send.data, to, count, type_of<T>, ncclSum, root, comm, nullptr) == ncclSuccess && right;
        if (rank == root) right = right && same_bits((same ? send : other).values(), sum_of_all<T>(count));
        else right = right && same_bits(send.values(), values_of<T>(rank, count));
    }
    return right;
}

template <class T>
static bool two_steps_are_one(ncclComm_t comm, size_t count)
{
    const size_t all = count * static_cast<size_t>(size), own = count * static_cast<size_t>(rank);
    Array<T> one(values_of<T>(rank, all)), two(values_of<T>(rank, all));
    const bool right = ncclAllReduce(one.data, one.data, all, type_of<T>, ncclSum, comm, nullptr) == ncclSuccess &&
                       ncclReduceScatter(two.data, two.data + own, count, type_of<T>, ncclSum, comm, nullptr) == ncclSuccess &&
                       ncclAllGather(two.data + own, two.data, count, type_of<T>, comm, nullptr) == ncclSuccess;
    return right && same_bits(one.values(), two.values());
}

template <class T>
static void test_type(const std::string& name)
{
    Communicator comm;
    const auto every = [&](bool (*check)(ncclComm_t, size_t, Place)) {
        bool right = true;
        for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000003}})
            for (const Place place : {Place::APART, Place::SAME}) right = check(comm, count, place) && right;
        return right;
    };
    claim(name + ": all-reduce, in the order of ranks, bit for bit, in place or not", every(all_reduces<T>));
    claim(name + ": reduce-scatter, in place or not", every(reduce_scatters<T>));
    claim(name + ": all-gather, in place or not", every(all_gathers<T>));
    claim(name + ": broadcast, from every root, in place or not", every(broadcasts<T>));
    claim(name + ": reduce, to every root, in place or not", every(reduces<T>));
    claim(name + ": an all-reduce has the bits of a reduce-scatter and an all-gather",
          two_steps_are_one<T>(comm, 1) && two_steps_are_one<T>(comm, 7) && two_steps_are_one<T>(comm, 333333));
}

template <class T>
static bool operation_gives(ncclComm_t comm, ncclRedOp_t op, const std::vector<T>& mine, const std::vector<T>& expected)
{
    Array<T> array(mine);
    return ncclAllReduce(array.data, array.data, mine.size(), type_of<T>, op, comm, nullptr) == ncclSuccess &&
           same_bits(array.values(), expected);
}

static void test_operations()
{
    Communicator comm;
    const float r = static_cast<float>(rank), last = static_cast<float>(size - 1);
    claim("maximum and minimum", operation_gives<float>(comm, ncclMax, {r, 1 - r}, {last, 1}) &&
                                     operation_gives<float>(comm, ncclMin, {1 + r, 1 - r}, {1, 1 - last}) &&
                                     operation_gives<int>(comm, ncclMax, {-rank, rank}, {0, size - 1}));
    claim("product", operation_gives<int>(comm, ncclProd, {2, -1}, {1 << size, size % 2 == 0 ? 1 : -1}) &&
                         operation_gives<float>(comm, ncclProd, {0.5f}, {ldexpf(1, -size)}));
    const float n = static_cast<float>(size);
    claim("average: the sum, divided by the ranks", operation_gives<float>(comm, ncclAvg, {n * r, n}, {(n - 1) * n / 2, n}) &&
                                                        operation_gives<__nv_bfloat16>(comm, ncclAvg, {n}, {n}) &&
                                                        operation_gives<int>(comm, ncclAvg, {size * rank}, {size * (size - 1) / 2}));
    claim("sums of bytes wrap around", operation_gives<int8_t>(comm, ncclSum, {100}, {static_cast<int8_t>(100 * size)}));
    claim("half precision", operation_gives<__half>(comm, ncclSum, {__half(0.5f)}, {__half(0.5f * static_cast<float>(size))}));
}

// ==== errors ============================================================================================

static void test_numbers_of_names()
{
    static_assert(sizeof(ncclUniqueId) == 128 && NCCL_VERSION_CODE == NCCL_MAJOR * 10000 + NCCL_MINOR * 100 + NCCL_PATCH, "");
    static_assert(ncclInvalidArgument == 4 && ncclInvalidUsage == 5 && ncclRemoteError == 6 && ncclInProgress == 7, "");
    static_assert(ncclHalf == 6 && ncclFloat == 7 && ncclDouble == 8 && ncclBfloat16 == 9 && ncclAvg == 4, "");
    int version = 0;
    claim("the version", ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE && NCCL_VERSION(2, 7, 8) == 2708);
    claim("every result has words", ncclGetErrorString(ncclRemoteError) != std::string(ncclGetErrorString(ncclSystemError)) &&
                                        ncclGetErrorString(ncclNumResults) == std::string("unknown result code"));
    Communicator comm;
    int count = -1, number = -1;
    ncclResult_t error = ncclSystemError;
    claim("a communicator knows its ranks, which this is, and of no error",
          ncclCommCount(comm, &count) == ncclSuccess && count == size && ncclCommUserRank(comm, &number) == ncclSuccess &&
              number == rank && ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclSuccess);
    claim("questions without an address are refused", refused(ncclCommCount(comm, nullptr), ncclInvalidArgument, {"ncclCommCount", "null"}));
}

static void test_arguments()
{
    Communicator comm;
    Array<float> array(64);
    float* const a = array.data;
    const std::string me = "on rank " + std::to_string(rank) + " of " + std::to_string(size);
    const auto all_reduce = [&](const void* send, void* recv, size_t count, int type, int op, ncclComm_t to) {
        return ncclAllReduce(send, recv, count, static_cast<ncclDataType_t>(type), static_cast<ncclRedOp_t>(op), to, nullptr);
    };
    claim("no communicator", refused(all_reduce(a, a, 1, ncclFloat, ncclSum, nullptr), ncclInvalidArgument, {"ncclAllReduce", "comm is null"}));
    claim("no buffer, where there are elements",
          refused(all_reduce(nullptr, a, 7, ncclFloat, ncclSum, comm), ncclInvalidArgument, {me, "sendbuff is null", "28 bytes"}) &&
              refused(all_reduce(a, nullptr, 7, ncclFloat, ncclSum, comm), ncclInvalidArgument, {me, "recvbuff is null"}));
    claim("none is needed where there are none", all_reduce(nullptr, nullptr, 0, ncclFloat, ncclSum, comm) == ncclSuccess);
    claim("types and operations that are none",
          refused(all_reduce(a, a, 1, ncclNumTypes, ncclSum, comm), ncclInvalidArgument, {"data type is 12", "expected 0"}) &&
              refused(all_reduce(a, a, 1, -1, ncclSum, comm), ncclInvalidArgument, {"data type is -1"}) &&
              refused(all_reduce(a, a, 1, ncclFloat8e4m3, ncclSum, comm), ncclInvalidArgument, {"data type is 10"}) &&
              refused(all_reduce(a, a, 1, ncclFloat, ncclNumOps, comm), ncclInvalidArgument, {"operation is 5", "4 (ncclAvg)"}) &&
              refused(all_reduce(a, a, 1, ncclFloat, -1, comm), ncclInvalidArgument, {"operation is -1"}));
    claim("roots that are none",
          refused(ncclBroadcast(a, a, 1, ncclFloat, size, comm, nullptr), ncclInvalidArgument, {"root is " + std::to_string(size), "0 to " + std::to_string(size - 1)}) &&
              refused(ncclReduce(a, a, 1, ncclFloat, ncclSum, -1, comm, nullptr), ncclInvalidArgument, {"root is -1"}));
    claim("counts that no memory has", refused(all_reduce(a, a, ~size_t{0} / 2, ncclFloat, ncclSum, comm), ncclInvalidArgument, {"the count is"}));
    CUstream_st none;
    claim("a stream that is none", refused(ncclAllReduce(a, a, 1, ncclFloat, ncclSum, comm, &none), ncclInvalidArgument, {"no stream"}));
    ncclResult_t elsewhere = ncclSuccess;
    std::thread([&] { elsewhere = all_reduce(a, a, 1, ncclFloat, ncclSum, comm); }).join();
    claim("calls from another thread", refused(elsewhere, ncclInvalidUsage, {"another thread"}));
}

static void test_overlaps()
{
    Communicator comm;
    const size_t ranks = static_cast<size_t>(size), r = static_cast<size_t>(rank);
    Array<float> array(64 + 16 * ranks);
    float* const a = array.data;
    claim("all-reduce: overlap but in place", refused(ncclAllReduce(a, a + 3, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"overlap", "12 bytes", "expected 0"}) &&
                                                  refused(ncclAllReduce(a + 3, a, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"overlap", "-12 bytes"}));
    claim("buffers that touch do not overlap", ncclAllReduce(a, a + 8, 8, ncclFloat, ncclSum, comm, nullptr) == ncclSuccess);
    claim("reduce-scatter: overlap but at the rank's own part",
          refused(ncclReduceScatter(a, a + 8 * r + 1, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"overlap", "expected " + std::to_string(32 * rank)}) &&
              (rank == 0 || refused(ncclReduceScatter(a, a, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"overlap"})));
    claim("all-gather: overlap but at the rank's own part",
          refused(ncclAllGather(a + 8 * r + 1, a, 8, ncclFloat, comm, nullptr), ncclInvalidArgument, {"overlap", "expected " + std::to_string(-32 * rank)}) &&
              (rank == 0 || refused(ncclAllGather(a, a, 8, ncclFloat, comm, nullptr), ncclInvalidArgument, {"overlap"})));
    claim("broadcast and reduce: overlap at the root",
          (rank != 0 || refused(ncclBroadcast(a, a + 1, 8, ncclFloat, 0, comm, nullptr), ncclInvalidArgument, {"overlap"})) &&
              (rank != 0 || refused(ncclReduce(a, a + 1, 8, ncclFloat, ncclSum, 0, comm, nullptr), ncclInvalidArgument, {"overlap"})));
    claim("what is not looked at may overlap: sendbuff but of the root, recvbuff but of the root",
          ncclBroadcast(a, rank == 0 ? a : a + 1, 8, ncclFloat, 0, comm, nullptr) == ncclSuccess &&
              ncclReduce(a, rank == 0 ? a : a + 1, 8, ncclFloat, ncclSum, 0, comm, nullptr) == ncclSuccess);
}

static void test_communicators()
{
    ncclComm_t comm = nullptr;
    claim("a wrong number of ranks", refused(ncclCommInitRank(&comm, size + 1, shared_id(), rank), ncclInvalidArgument, {"rank 0", "nranks is " + std::to_string(size + 1), "expected " + std::to_string(size)}) && comm == nullptr);
    claim("a rank that is not MPI's", refused(ncclCommInitRank(&comm, size, shared_id(), size == 1 ? 1 : (rank + 1) % size), ncclInvalidArgument, {"rank is", "as MPI has it"}));
    claim("an id that nobody made", refused(ncclCommInitRank(&comm, size, ncclUniqueId{}, rank), ncclInvalidArgument, {"not one of ncclGetUniqueId"}));
    ncclUniqueId own, common = shared_id();
    ncclGetUniqueId(&own);
    if (size > 1)
        claim("an id of one's own is seen on all ranks", refused(ncclCommInitRank(&comm, size, rank == size - 1 ? own : common, rank), ncclInvalidUsage, {"on rank " + std::to_string(size - 1), "not that of rank 0"}));
    claim("no address", refused(ncclCommInitRank(nullptr, size, common, rank), ncclInvalidArgument, {"comm is null"}) &&
                            refused(ncclGetUniqueId(nullptr), ncclInvalidArgument, {"null"}));
    const bool made = ncclCommInitRank(&comm, size, common, rank) == ncclSuccess;
    ncclComm_t second = nullptr;
    claim("an id serves once", made && refused(ncclCommInitRank(&second, size, common, rank), ncclInvalidUsage, {"used before"}));
    claim("a communicator that was destroyed is none",
          ncclCommDestroy(comm) == ncclSuccess && refused(ncclCommDestroy(comm), ncclInvalidArgument, {"ncclCommDestroy", "no longer"}));
    ncclCommInitRank(&comm, size, shared_id(), rank);
    claim("nor is one that was aborted", ncclCommAbort(comm) == ncclSuccess && refused(ncclCommAbort(comm), ncclInvalidArgument, {"no longer"}));
}

// Ranks that call different things: the last one differs.
static void test_mismatches()
{
    if (size == 1) return;
    const bool odd = rank == size - 1;
    const std::string last = "rank " + std::to_string(size - 1) + " calls ";
    Array<float> array(64 * static_cast<size_t>(size)), other(64 * static_cast<size_t>(size));
    float *const a = array.data, *const b = other.data;
    const auto differs = [&](const std::string& what, const std::vector<std::string>& words, std::function<ncclResult_t(ncclComm_t)> call) {
        ncclComm_t comm = nullptr;
        ncclCommInitRank(&comm, size, shared_id(), rank);
        ncclResult_t error = ncclSuccess;
        bool right = refused(call(comm), ncclInvalidUsage, words);
        right = right && ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclInvalidUsage;
        right = right && ncclAllReduce(a, b, 1, ncclFloat, ncclSum, comm, nullptr) == ncclInvalidUsage;
        claim("ranks differ in " + what, right);
        ncclCommAbort(comm);
    };
    differs("the count", {"rank 0 calls ncclAllReduce(count 8, ncclFloat32, ncclSum)", last + "ncclAllReduce(count 7,"},
            [&](ncclComm_t comm) { return ncclAllReduce(a, b, odd ? 7 : 8, ncclFloat, ncclSum, comm, nullptr); });
    differs("the type", {"ncclFloat32", last + "ncclAllReduce(count 8, ncclInt32"},
            [&](ncclComm_t comm) { return ncclAllReduce(a, b, 8, odd ? ncclInt : ncclFloat, ncclSum, comm, nullptr); });
    differs("the operation", {"ncclSum", last + "ncclReduceScatter(count 8, ncclFloat32, ncclMax)"},
            [&](ncclComm_t comm) { return ncclReduceScatter(a, b, 8, ncclFloat, odd ? ncclMax : ncclSum, comm, nullptr); });
    differs("the root", {"rank 0 calls ncclBroadcast(count 8, ncclFloat32, root 0)", last + "ncclBroadcast(count 8, ncclFloat32, root 1)"},
            [&](ncclComm_t comm) { return ncclBroadcast(a, b, 8, ncclFloat, odd ? 1 : 0, comm, nullptr); });
    differs("the collective", {"rank 0 calls ncclAllReduce(", last + "ncclAllGather("}, [&](ncclComm_t comm) {
        return odd ? ncclAllGather(a, b, 8, ncclFloat, comm, nullptr) : ncclAllReduce(a, b, 8, ncclFloat, ncclSum, comm, nullptr);
    });
    differs("their groups' order", {"rank 0 calls ncclAllReduce(count 1,", last + "ncclAllReduce(count 2,"}, [&](ncclComm_t comm) {
        ncclGroupStart();
        for (const size_t count : {odd ? 2u : 1u, odd ? 1u : 2u}) ncclAllReduce(a, b, count, ncclFloat, ncclSum, comm, nullptr);
        return ncclGroupEnd();
    });
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, shared_id(), rank);
    const ncclResult_t result = odd ? ncclCommDestroy(comm) : ncclAllReduce(a, b, 8, ncclFloat, ncclSum, comm, nullptr);
    claim("one leaves while the others go on", refused(result, ncclInvalidUsage, {"rank 0 calls ncclAllReduce(", last + "ncclCommDestroy"}));
    if (!odd) ncclCommAbort(comm);
}

// A message that is too long for the one that is expected makes MPI fail.
static void test_mpi_errors()
{
    if (size == 1) return;
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, shared_id(), rank);
    Array<float> array(4), out(4);
    MPI_Request request = MPI_REQUEST_NULL;
    const char strange[100] = "";
    if (rank == 1) MPI_Isend(strange, 100, MPI_BYTE, 0, 0, comm->mpi, &request);
    const ncclResult_t result = ncclReduce(array.data, out.data, 4, ncclFloat, ncclSum, 0, comm, nullptr);
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(comm, &error);
    claim("an error of MPI is one of the exchange", rank == 0 ? refused(result, ncclRemoteError, {"exchange", "TRUNCATE"}) && error == ncclRemoteError : result == ncclSuccess);
    if (rank == 1) MPI_Wait(&request, MPI_STATUS_IGNORE);
    ncclCommAbort(comm);
}

// ==== groups ============================================================================================

static void test_groups()
{
    Communicator comm;
    Array<int> x(std::vector<int>{1}), y(std::vector<int>{0});
    claim("an end without a beginning", refused(ncclGroupEnd(), ncclInvalidUsage, {"ncclGroupEnd", "no group"}));
    ncclGroupStart();
    ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, nullptr);
    ncclGroupStart();
    ncclAllReduce(x.data, y.data, 1, ncclInt, ncclSum, comm, nullptr);
    const bool inner = ncclGroupEnd() == ncclSuccess && x.values()[0] == 1;
    const bool outer = ncclGroupEnd() == ncclSuccess && x.values()[0] == size && y.values()[0] == size * size;
    claim("a group's calls are issued at the outermost end, in their order", inner && outer);
    ncclGroupStart();
    const bool refused_inside = refused(ncclAllReduce(nullptr, x.data, 1, ncclInt, ncclSum, comm, nullptr), ncclInvalidArgument, {"null"});
    ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, nullptr);
    claim("a refused call refuses the group", refused_inside && ncclGroupEnd() == ncclInvalidArgument && x.values()[0] == size &&
                                                  ncclAllReduce(x.data, x.data, 1, ncclInt, ncclMax, comm, nullptr) == ncclSuccess);
    ncclGroupStart();
    ncclComm_t other = nullptr;
    claim("communicators do not come or go in a group", refused(ncclCommDestroy(comm), ncclInvalidUsage, {"group"}) &&
                                                            refused(ncclCommInitRank(&other, size, {}, rank), ncclInvalidUsage, {"group"}));
    ncclGroupEnd();
}

// ==== streams ===========================================================================================

template <class... Parameters, class... Arguments>
static void launch(cudaStream_t stream, void (*kernel)(Parameters...), Arguments... arguments)
{
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = 1;
    config.stream = stream;
    cudaLaunchKernelEx(&config, kernel, arguments...);
}

__global__ void set(int* x, int value) { *x = value; }
__global__ void add_to(int* sum, const int* x) { *sum = *sum * 3 + *x; }

struct Stream {
    cudaStream_t stream = nullptr;
    Stream() { cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); }
    ~Stream() { cudaStreamDestroy(stream); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator cudaStream_t() const { return stream; }
};

static void pass(cudaStream_t from, cudaStream_t to, cudaEvent_t event)
{
    cudaEventRecord(event, from);
    cudaStreamWaitEvent(to, event);
}

enum class Forget { NOTHING, BEFORE, AFTER };

// Steps of a training in small: compute, sum over the ranks on another stream, use the sum, all in the same memory.
static bool steps_are_right(ncclComm_t comm, Forget forget)
{
    constexpr int steps = 12;
    Stream compute, communication;
    Array<int> x(1), sum(1), total(1);
    cudaDeviceSynchronize();  // those were written by the default stream, for which these do not wait
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    int expected = 0;
    for (int step = 1; step <= steps; step++) {
        launch(compute, set, x.data, step + rank);
        if (forget != Forget::BEFORE) pass(compute, communication, event);
        ncclAllReduce(x.data, sum.data, 1, ncclInt, ncclSum, comm, communication);
        if (forget != Forget::AFTER) pass(communication, compute, event);
        launch(compute, add_to, total.data, sum.data);
        expected = expected * 3 + size * step + size * (size - 1) / 2;
    }
    const bool done = cudaDeviceSynchronize() == cudaSuccess;
    cudaEventDestroy(event);
    return done && total.values()[0] == expected;
}

// Every rank has another order of its streams.
static void seed_ranks(uint64_t seed) { cuda_cpu::set_seed(seed * 100 + static_cast<uint64_t>(rank)); }

static bool under_all_seeds(const std::function<bool()>& check)
{
    bool right = true;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        seed_ranks(seed);
        right = check() && right;
        cudaDeviceSynchronize();
    }
    return right;
}

// Collectives that differ, on two streams in turn: all ranks must do them in the order in which they were handed over.
static bool streams_keep_the_order(ncclComm_t comm, ncclComm_t second)
{
    constexpr size_t calls = 40;
    Stream streams[2];
    Array<int> x(std::vector<int>(calls, 1));
    cudaDeviceSynchronize();
    bool right = true;
    for (size_t i = 0; i < calls; i++)
        right = ncclAllReduce(x.data, x.data, i + 1, ncclInt, ncclMax, i % 3 == 0 ? second : comm, streams[i % 2]) == ncclSuccess && right;
    return cudaDeviceSynchronize() == cudaSuccess && right;
}

// Arguments are taken at the call, memory is read when it runs; a group with two streams.
static bool group_runs_late(ncclComm_t comm)
{
    Stream one, two;
    Array<int> x(2);
    cudaDeviceSynchronize();
    ncclGroupStart();
    ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, one);
    ncclAllReduce(x.data + 1, x.data + 1, 1, ncclInt, ncclSum, comm, two);
    launch(one, set, x.data, 5);  // before the group's end, so before its collectives
    launch(two, set, x.data + 1, 6);
    const bool ended = ncclGroupEnd() == ncclSuccess;
    launch(one, add_to, x.data, x.data);
    cudaDeviceSynchronize();
    return ended && x.values() == std::vector<int>({5 * size * 4, 6 * size});
}

static bool graph_replays(ncclComm_t comm)
{
    Stream stream;
    Array<int> x(std::vector<int>{1});
    cudaDeviceSynchronize();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    const bool noted = ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, stream) == ncclSuccess;
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&executable, graph);
    const bool untouched = x.values()[0] == 1;
    cudaGraphLaunch(executable, stream);
    cudaGraphLaunch(executable, stream);
    const bool done = cudaStreamSynchronize(stream) == cudaSuccess && x.values()[0] == size * size;
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return noted && untouched && done;
}

static bool destroying_finishes()
{
    Stream stream;
    Array<int> x(std::vector<int>{1});
    cudaDeviceSynchronize();
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, shared_id(), rank);
    for (int i = 0; i < 3; i++) ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, stream);
    return ncclCommDestroy(comm) == ncclSuccess && *x.data == size * size * size;
}

static bool aborting_forgets()
{
    Stream stream;
    Array<int> x(std::vector<int>{1});
    cudaDeviceSynchronize();
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, shared_id(), rank);
    // One kernel that runs late for sure would need a seed; so what was done is done by all, or by none.
    cuda_cpu::set_seed(2);
    for (int i = 0; i < 8; i++) ncclAllReduce(x.data, x.data, 1, ncclInt, ncclMax, comm, stream);
    ncclCommAbort(comm);
    return cudaDeviceSynchronize() == cudaSuccess;
}

static void test_late_mismatch()
{
    if (size == 1) return;
    Stream stream;
    Array<int> x(8);
    cudaDeviceSynchronize();
    ncclComm_t comm = nullptr;
    ncclCommInitRank(&comm, size, shared_id(), rank);
    const size_t count = rank == size - 1 ? 3 : 4;
    const bool handed = ncclAllReduce(x.data, x.data, count, ncclInt, ncclSum, comm, stream) == ncclSuccess;
    const bool seen = cudaStreamSynchronize(stream) == cudaErrorUnknown;
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(comm, &error);
    claim("a mismatch in a queue: waiting fails, the communicator has the error",
          handed && seen && refused(error, ncclInvalidUsage, {"count 4", "count 3"}));
    ncclCommAbort(comm);
    cuda_cpu::late_error() = cudaSuccess;
    cudaGetLastError();
}

static void test_card_memory()
{
    Communicator comm;
    Array<float> array(8);
    std::vector<float> pageable(8);
    claim("a card's collectives take the device's memory, and what is allocated there",
          refused(ncclAllReduce(pageable.data(), array.data, 8, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"sendbuff", "pageable"}) &&
              refused(ncclAllReduce(array.data, array.data, 9, ncclFloat, ncclSum, comm, nullptr), ncclInvalidArgument, {"past the end"}));
}

static void test_streams()
{
    Communicator comm, second;
    claim("without a card a collective is done when it returns, in any stream", steps_are_right(comm, Forget::BEFORE) && steps_are_right(comm, Forget::AFTER));
    claim("a graph of collectives is replayed", graph_replays(comm));
    if (WARP_SIZE == 1) return;
    cuda_cpu::set_card("h100");
    claim("queues: with its events a step is right, whatever the order", under_all_seeds([&] { return steps_are_right(comm, Forget::NOTHING); }));
    claim("queues: without the event before it some step is wrong", anywhere(!under_all_seeds([&] { return steps_are_right(comm, Forget::BEFORE); })));
    claim("queues: without the event after it some step is wrong", anywhere(!under_all_seeds([&] { return steps_are_right(comm, Forget::AFTER); })));
    claim("queues: collectives keep their order over streams and communicators", under_all_seeds([&] { return streams_keep_the_order(comm, second); }));
    claim("queues: a group with two streams", under_all_seeds([&] { return group_runs_late(comm); }));
    claim("queues: a graph of collectives is replayed", under_all_seeds([&] { return graph_replays(comm); }));
    claim("queues: what waits is done before a communicator is destroyed", under_all_seeds(destroying_finishes));
    claim("queues: results are the same", under_all_seeds([&] { return all_reduces<float>(comm, 1000003, Place::SAME); }));
    seed_ranks(3);
    test_late_mismatch();
    test_card_memory();
    claim("queues: after an abort nobody waits for what was not done", aborting_forgets());
    cudaDeviceSynchronize();
    cuda_cpu::set_card("");
    cuda_cpu::set_seed(0);
}

// ==== waiting ===========================================================================================

static int waits_begun = 0, waits_ended = 0;

static void test_waiting()
{
    if (size == 1) return;
    Communicator comm;
    Array<int> x(1);
    cuda_cpu::while_waiting = [](bool waits) { ++(waits ? waits_begun : waits_ended); };
    const clock_t before = clock();
    if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ncclAllReduce(x.data, x.data, 1, ncclInt, ncclSum, comm, nullptr);
    const double busy = static_cast<double>(clock() - before) / CLOCKS_PER_SEC;
    cuda_cpu::while_waiting = nullptr;
    claim("the program is told that a collective waits, and that it does no longer", rank != 0 || (waits_begun > 0 && waits_begun == waits_ended));
    claim("a rank that waits leaves its core to others", rank != 0 || busy < 0.25);
}

// More elements than an int counts.
static int test_huge()
{
    constexpr size_t count = (size_t{1} << 31) + 5;
    Communicator comm;
    int8_t* data = nullptr;
    cudaMalloc(&data, count);
    for (size_t i = 0; i < count; i++) data[i] = static_cast<int8_t>(i % 61 + static_cast<size_t>(rank));
    const bool done = ncclAllReduce(data, data, count, ncclInt8, ncclMax, comm, nullptr) == ncclSuccess;
    bool right = true;
    for (size_t i = 0; i < count; i++) right = right && data[i] == static_cast<int8_t>(i % 61 + static_cast<size_t>(size) - 1);
    claim("2^31 + 5 elements", done && right);
    cudaFree(data);
    return failed == 0 ? 0 : 1;
}

static void test_all()
{
    test_numbers_of_names();
    test_type<float>("float");
    test_type<__nv_bfloat16>("bf16");
    test_type<double>("double");
    test_type<int>("int");
    test_operations();
    test_arguments();
    test_overlaps();
    test_communicators();
    test_mismatches();
    test_mpi_errors();
    test_groups();
    test_streams();
    test_waiting();
}

int main(int argc, char** argv)
{
    constexpr unsigned longest_seconds = 300;  // ranks that wait for each other forever end so
    alarm(longest_seconds);
    cuda_cpu::set_card("");  // tests choose their own
    ncclComm_t comm = nullptr;
    const bool needs_mpi = refused(ncclCommInitRank(&comm, 1, ncclUniqueId{}, 0), ncclInvalidUsage, {"not initialized"});
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int code = 0;
    if (argc == 2 && argv[1] == std::string("huge")) {
        code = test_huge();
    } else {
        if (rank == 0) printf("WARP_SIZE %d, %d ranks\n", WARP_SIZE, size);
        claim("MPI must be initialized", needs_mpi);
        test_all();
        if (rank == 0) printf("%d passed, %d failed\n", passed, failed);
        code = failed == 0 ? 0 : 1;
    }
    MPI_Finalize();
    return code;
}

// NCCL on a CPU: the collectives of data-parallel training, over MPI, with one rank in each process. The program
// initialises MPI (MPI_Init_thread, MPI_THREAD_FUNNELED or more); a communicator is all of MPI_COMM_WORLD. Compile with
// -DOMPI_SKIP_MPICXX and what `mpicxx --showme:compile` and `--showme:link` say.
//
//   - Sums are in the order of ranks, ((x0 + x1) + x2) + ..., each rounded to the data type: every rank has the same
//     bits, every time, and an all-reduce has those of a reduce-scatter and an all-gather.
//   - A collective is handed to its stream as a kernel is. What NCCL would hang at, because ranks call different
//     things, is an error here, which names the calls.
//   - Where work waits in queues (streams.h), a rank takes part in a collective only while it waits for its device. So
//     it must do that before it waits for other ranks by MPI itself.
//
// Not here: sending and receiving between two ranks, communicators of some of the ranks, types of 8-bit floats.
//
// Map: NCCL's types · errors · calls · waiting · moving data · collectives · streams and groups · communicators
#pragma once

#if !__has_include(<mpi.h>)
#error "mpi.h was not found: compile with what mpicxx --showme:compile says. Debian, Ubuntu: apt install libopenmpi-dev"
#endif
#include <mpi.h>
#include <sched.h>

#include <array>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

// ==== NCCL's types ======================================================================================

// The version whose names are here.
#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_SUFFIX ""
#define NCCL_VERSION(X, Y, Z) ((X) * ((X) <= 2 && (Y) <= 8 ? 1000 : 10000) + (Y) * 100 + (Z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)

#define NCCL_UNIQUE_ID_BYTES 128
struct ncclUniqueId { char internal[NCCL_UNIQUE_ID_BYTES]; };

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8,
    ncclNumResults = 9,
};

enum ncclDataType_t : int {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
};

enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 };

// A communicator. What was handed to streams holds it too, so that it lives until that is done.
struct ncclComm {
    MPI_Comm mpi = MPI_COMM_NULL;
    int rank = 0, size = 1;
    std::thread::id thread{};         // whose calls they must be
    ncclResult_t error = ncclSuccess;  // once there is one, nothing more is done
    bool aborted = false;              // what still waits in queues is not done, which is no error
    std::vector<char> scratch{};
};
using ncclComm_t = ncclComm*;

// ==== errors ============================================================================================

inline const char* ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "a CUDA call failed";
    case ncclSystemError: return "a call of the system failed";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "an exchange with another rank failed, or that rank is gone";
    case ncclInProgress: return "in progress";
    case ncclTimeout: return "timeout";
    case ncclNumResults: break;
    }
    return "unknown result code";
}

namespace cuda_cpu::nccl {

// What was found and what was expected, by the last call that failed.
inline std::string last_error;

inline ncclResult_t fail(ncclResult_t result, const std::string& what)
{
    last_error = what;
    return result;
}

inline ncclResult_t fail_mpi(ncclResult_t result, const char* call, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return fail(result, std::string(call) + ": " + std::string(text, static_cast<size_t>(length)));
}

}  // namespace cuda_cpu::nccl

// NCCL takes a communicator here and does not look at it.
inline const char* ncclGetLastError(ncclComm_t) { return cuda_cpu::nccl::last_error.c_str(); }

inline ncclResult_t ncclGetVersion(int* version)
{
    if (version == nullptr)
        return cuda_cpu::nccl::fail(ncclInvalidArgument, "ncclGetVersion: version is null; expected an address");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

namespace cuda_cpu::nccl {

// ==== calls =============================================================================================

enum class Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, DESTROY };

// A call with its arguments. What its kind does not have keeps its default, so that calls can be compared.
struct Call {
    Kind kind;
    const void* send = nullptr;
    void* recv = nullptr;
    size_t count = 0;
    ncclDataType_t type = ncclInt8;
    ncclRedOp_t op = ncclSum;
    int root = 0;

    bool reduces() const { return kind != Kind::ALL_GATHER && kind != Kind::BROADCAST; }
    bool has_root() const { return kind == Kind::BROADCAST || kind == Kind::REDUCE; }
};

inline const char* name_of(Kind kind)
{
    constexpr const char* names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                     "ncclBroadcast", "ncclReduce",        "ncclCommDestroy"};
    return names[static_cast<int>(kind)];
}
inline const char* name_of(ncclDataType_t type)
{
    constexpr const char* names[] = {"ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",
                                     "ncclInt64",   "ncclUint64",  "ncclFloat16", "ncclFloat32",
                                     "ncclFloat64", "ncclBfloat16"};
    return names[type];
}
inline const char* name_of(ncclRedOp_t op)
{
    constexpr const char* names[] = {"ncclSum", "ncclProd", "ncclMax", "ncclMin", "ncclAvg"};
    return names[op];
}

inline std::string describe(const Call& call)
{
    std::string text = name_of(call.kind);
    if (call.kind == Kind::DESTROY) return text;
    text += "(count " + std::to_string(call.count) + ", " + name_of(call.type);
    if (call.reduces()) text += std::string(", ") + name_of(call.op);
    if (call.has_root()) text += ", root " + std::to_string(call.root);
    return text + ")";
}

// Does work(a value of the type's C++ type).
template <class Work>
inline void with_type(ncclDataType_t type, Work work)
{
    switch (type) {
    case ncclInt8: return work(int8_t{});
    case ncclUint8: return work(uint8_t{});
    case ncclInt32: return work(int32_t{});
    case ncclUint32: return work(uint32_t{});
    case ncclInt64: return work(int64_t{});
    case ncclUint64: return work(uint64_t{});
    case ncclFloat16: return work(__half{});
    case ncclFloat32: return work(float{});
    case ncclFloat64: return work(double{});
    case ncclBfloat16: return work(__nv_bfloat16{});
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
    case ncclNumTypes: break;
    }
}
inline size_t bytes_of(ncclDataType_t type)
{
    size_t bytes = 0;
    with_type(type, [&](auto value) { bytes = sizeof(value); });
    return bytes;
}

// ==== waiting ===========================================================================================

}  // namespace cuda_cpu::nccl

namespace cuda_cpu {
// For the program to know that a collective waits for other ranks: called with true before and with false after.
inline void (*while_waiting)(bool waits) = nullptr;
}  // namespace cuda_cpu

namespace cuda_cpu::nccl {

// Waits until test(&done), a call of MPI, says so, and returns its code. Others may need the core: for as long as most
// exchanges take it is only offered to them, then left to them.
template <class Test>
inline int wait_until(Test test)
{
    constexpr auto offered = std::chrono::microseconds(200), left = std::chrono::microseconds(50);
    int done = 0;
    int code = test(&done);
    if (done != 0 || code != MPI_SUCCESS) return code;
    if (while_waiting != nullptr) while_waiting(true);
    const auto begin = std::chrono::steady_clock::now();
    while (done == 0 && code == MPI_SUCCESS) {
        if (std::chrono::steady_clock::now() - begin < offered) sched_yield();
        else std::this_thread::sleep_for(left);
        code = test(&done);
    }
    if (while_waiting != nullptr) while_waiting(false);
    return code;
}
inline int wait_for(MPI_Request& request)
{
    return wait_until([&](int* done) { return MPI_Test(&request, done, MPI_STATUS_IGNORE); });
}

// Each rank's value, on every rank.
template <class T>
inline ncclResult_t gather_values(std::vector<T>& values, const ncclComm& comm, const T& mine)
{
    static_assert(std::is_trivially_copyable_v<T>, "it travels as bytes");
    values.resize(static_cast<size_t>(comm.size), mine);
    constexpr int bytes = static_cast<int>(sizeof(T));
    MPI_Request request;
    int code = MPI_Iallgather(&mine, bytes, MPI_BYTE, values.data(), bytes, MPI_BYTE, comm.mpi, &request);
    if (code == MPI_SUCCESS) code = wait_for(request);
    return code == MPI_SUCCESS ? ncclSuccess : fail_mpi(ncclRemoteError, "MPI_Iallgather", code);
}

// Messages under way at the same time, each of less than 2 GiB.
class Exchange {
public:
    explicit Exchange(const ncclComm& comm) : comm_(comm) {}
    void send(int to, const void* from, size_t bytes)
    {
        start([&](MPI_Request* r) { return MPI_Isend(from, static_cast<int>(bytes), MPI_BYTE, to, 0, comm_.mpi, r); });
    }
    void receive(void* to, int from, size_t bytes)
    {
        start([&](MPI_Request* r) { return MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, from, 0, comm_.mpi, r); });
    }
    ncclResult_t finish()
    {
        const int count = static_cast<int>(requests_.size());
        std::vector<MPI_Status> states(requests_.size());
        if (code_ == MPI_SUCCESS)
            code_ = wait_until([&](int* done) { return MPI_Testall(count, requests_.data(), done, states.data()); });
        if (code_ == MPI_SUCCESS) return ncclSuccess;
        for (const MPI_Status& state : states)
            if (code_ == MPI_ERR_IN_STATUS && state.MPI_ERROR != MPI_SUCCESS && state.MPI_ERROR != MPI_ERR_PENDING)
                code_ = state.MPI_ERROR;
        for (MPI_Request& request : requests_) {  // the memory may be gone when another message comes
            if (request == MPI_REQUEST_NULL) continue;
            MPI_Cancel(&request);
            MPI_Request_free(&request);
        }
        return fail_mpi(ncclRemoteError, "an exchange of messages", code_);
    }

private:
    template <class Start>
    void start(Start it)
    {
        if (code_ != MPI_SUCCESS) return;
        requests_.push_back(MPI_REQUEST_NULL);
        code_ = it(&requests_.back());
    }
    const ncclComm& comm_;
    std::vector<MPI_Request> requests_;
    int code_ = MPI_SUCCESS;
};

// ==== moving data =======================================================================================

// A collective goes through its data in pieces, so that it needs no more memory than this beside the program's, whose
// equal parts are the ranks'.
constexpr size_t scratch_bytes = 4 << 20;
inline size_t part_bytes(const ncclComm& comm)
{
    constexpr size_t largest_element = 8;
    return scratch_bytes / static_cast<size_t>(comm.size) / largest_element * largest_element;
}

// Each rank's part of a piece, in bytes: where it begins in the buffer, and how long it is.
struct Part { size_t begin, bytes; };
using Parts = std::vector<Part>;

// Every rank gives its part to all others.
inline ncclResult_t gather_parts(const ncclComm& comm, char* buffer, const Parts& parts)
{
    Exchange exchange(comm);
    const Part& own = parts[static_cast<size_t>(comm.rank)];
    for (int other = 0; other < comm.size; other++) {
        const Part& its = parts[static_cast<size_t>(other)];
        if (other == comm.rank) continue;
        if (its.bytes > 0) exchange.receive(buffer + its.begin, other, its.bytes);
        if (own.bytes > 0) exchange.send(other, buffer + own.begin, own.bytes);
    }
    return exchange.finish();
}

// An integer as unsigned, which may overflow; a short float as a float.
template <class T>
inline auto widen(T x)
{
    if constexpr (std::is_integral_v<T>) return static_cast<std::make_unsigned_t<T>>(x);
    else if constexpr (std::is_floating_point_v<T>) return x;
    else return static_cast<float>(x);
}

// total = total op x. Not inlined, so that no compiler regroups the sums of several terms.
template <class T>
__attribute__((noinline)) void add_term(T* total, const T* x, size_t count, ncclRedOp_t op)
{
    const auto each = [=](auto combine) {
        for (size_t i = 0; i < count; i++) total[i] = combine(total[i], x[i]);
    };
    switch (op) {
    case ncclSum:
    case ncclAvg: return each([](T a, T b) { return static_cast<T>(widen(a) + widen(b)); });
    case ncclProd: return each([](T a, T b) { return static_cast<T>(widen(a) * widen(b)); });
    case ncclMax: return each([](T a, T b) { return a < b ? b : a; });
    case ncclMin: return each([](T a, T b) { return b < a ? b : a; });
    case ncclNumOps: break;
    }
}

// out = the terms together, in their order. The output may be one of the terms.
template <class T>
inline void combine_terms(T* out, const std::vector<const void*>& terms, size_t count, ncclRedOp_t op)
{
    constexpr size_t tile = 1024;
    const T number = static_cast<T>(static_cast<int>(terms.size()));
#pragma omp parallel for schedule(static) if (count > 16 * tile)
    for (size_t first = 0; first < count; first += tile) {
        std::array<T, tile> total;
        const size_t now = std::min(tile, count - first);
        std::copy_n(static_cast<const T*>(terms[0]) + first, now, total.data());
        for (size_t i = 1; i < terms.size(); i++)
            add_term(total.data(), static_cast<const T*>(terms[i]) + first, now, op);
        if (op == ncclAvg)
            for (size_t i = 0; i < now; i++) total[i] = static_cast<T>(total[i] / number);
        std::copy_n(total.data(), now, out + first);
    }
}

// Every rank gets its own part of all others, and combines them to its part of the result.
inline ncclResult_t reduce_parts(ncclComm& comm, char* out, const char* in, const Parts& parts, const Call& call)
{
    const Part& own = parts[static_cast<size_t>(comm.rank)];
    comm.scratch.resize(static_cast<size_t>(comm.size) * part_bytes(comm));
    std::vector<const void*> terms;
    Exchange exchange(comm);
    for (int other = 0; other < comm.size; other++) {
        char* const place = comm.scratch.data() + static_cast<size_t>(other) * part_bytes(comm);
        const Part& its = parts[static_cast<size_t>(other)];
        terms.push_back(other == comm.rank ? in + own.begin : place);
        if (other == comm.rank) continue;
        if (own.bytes > 0) exchange.receive(place, other, own.bytes);
        if (its.bytes > 0) exchange.send(other, in + its.begin, its.bytes);
    }
    if (const ncclResult_t result = exchange.finish(); result != ncclSuccess || own.bytes == 0) return result;
    with_type(call.type, [&](auto value) {
        using T = decltype(value);
        combine_terms(reinterpret_cast<T*>(out), terms, own.bytes / sizeof(T), call.op);
    });
    return ncclSuccess;
}

// ==== collectives =======================================================================================

// Does step(done, now) for pieces of so many bytes, until one fails.
template <class Step>
inline ncclResult_t in_pieces(size_t bytes, size_t piece, Step step)
{
    ncclResult_t result = ncclSuccess;
    for (size_t done = 0; done < bytes && result == ncclSuccess; done += piece)
        result = step(done, std::min(piece, bytes - done));
    return result;
}

// A piece's parts where every rank's data lie one behind the other, so far apart.
inline Parts strided_parts(const ncclComm& comm, size_t stride, size_t done, size_t now)
{
    Parts parts;
    for (size_t r = 0; r < static_cast<size_t>(comm.size); r++) parts.push_back({r * stride + done, now});
    return parts;
}
// Where all of it is one rank's.
inline Parts root_parts(const ncclComm& comm, int root, size_t done, size_t now)
{
    Parts parts(static_cast<size_t>(comm.size), {done, 0});
    parts[static_cast<size_t>(root)].bytes = now;
    return parts;
}

// In each piece a reduce-scatter, then an all-gather.
inline ncclResult_t all_reduce(ncclComm& comm, const Call& call, char* recv, const char* send, size_t bytes)
{
    const size_t size = static_cast<size_t>(comm.size), element = bytes_of(call.type);
    return in_pieces(bytes, size * part_bytes(comm), [&](size_t done, size_t now) {
        const size_t part = (now / element + size - 1) / size * element;
        Parts parts;
        for (size_t r = 0; r < size; r++) {
            const size_t begin = std::min(now, r * part);
            parts.push_back({done + begin, std::min(part, now - begin)});
        }
        char* const own = recv + parts[static_cast<size_t>(comm.rank)].begin;
        const ncclResult_t result = reduce_parts(comm, own, send, parts, call);
        return result == ncclSuccess ? gather_parts(comm, recv, parts) : result;
    });
}

inline ncclResult_t move_data(ncclComm& comm, const Call& call)
{
    const size_t bytes = call.count * bytes_of(call.type), piece = part_bytes(comm);
    const char* const send = static_cast<const char*>(call.send);
    char* const recv = static_cast<char*>(call.recv);
    const auto keep_own = [&](char* to) {
        if (to != send) copy_bytes(to, send, bytes);
    };
    switch (call.kind) {
    case Kind::ALL_REDUCE: return all_reduce(comm, call, recv, send, bytes);
    case Kind::REDUCE_SCATTER:
        return in_pieces(bytes, piece, [&](size_t done, size_t now) {
            return reduce_parts(comm, recv + done, send, strided_parts(comm, bytes, done, now), call);
        });
    case Kind::REDUCE:
        return in_pieces(bytes, piece, [&](size_t done, size_t now) {
            return reduce_parts(comm, recv + done, send, root_parts(comm, call.root, done, now), call);
        });
    case Kind::ALL_GATHER:
        if (bytes > 0) keep_own(recv + static_cast<size_t>(comm.rank) * bytes);
        return in_pieces(bytes, piece, [&](size_t done, size_t now) {
            return gather_parts(comm, recv, strided_parts(comm, bytes, done, now));
        });
    case Kind::BROADCAST:
        if (bytes > 0 && comm.rank == call.root) keep_own(recv);
        return in_pieces(bytes, piece, [&](size_t done, size_t now) {
            return gather_parts(comm, recv, root_parts(comm, call.root, done, now));
        });
    case Kind::DESTROY: break;
    }
    return ncclSuccess;
}

// Whether all ranks call the same. Where they do not, all of them return the same error, and no data has moved.
inline ncclResult_t compare_calls(const ncclComm& comm, const Call& call)
{
    struct Message { size_t count; int kind, type, op, root; };
    const auto differ = [](const Message& a, const Message& b) {
        return a.count != b.count || a.kind != b.kind || a.type != b.type || a.op != b.op || a.root != b.root;
    };
    const auto text = [](const Message& m) {
        return describe({static_cast<Kind>(m.kind), nullptr, nullptr, m.count, static_cast<ncclDataType_t>(m.type),
                         static_cast<ncclRedOp_t>(m.op), m.root});
    };
    std::vector<Message> all;
    const Message mine{call.count, static_cast<int>(call.kind), call.type, call.op, call.root};
    if (const ncclResult_t result = gather_values(all, comm, mine); result != ncclSuccess) return result;
    for (size_t r = 1; r < all.size(); r++)
        if (differ(all[0], all[r]))
            return fail(ncclInvalidUsage, "ranks call different collectives: rank 0 calls " + text(all[0]) +
                                              ", rank " + std::to_string(r) + " calls " + text(all[r]));
    return ncclSuccess;
}

// Does it, now. After an error the ranks no longer are at the same place, so a communicator keeps it.
inline ncclResult_t perform(ncclComm& comm, const Call& call)
{
    if (comm.error != ncclSuccess) return comm.error;
    comm.error = compare_calls(comm, call);
    if (comm.error == ncclSuccess) comm.error = move_data(comm, call);
    return comm.error;
}

// ==== streams and groups ================================================================================

// Communicators that there are.
inline std::map<ncclComm_t, std::shared_ptr<ncclComm>>& communicators()
{
    static auto* const value = new std::map<ncclComm_t, std::shared_ptr<ncclComm>>;  // queues may outlive main
    return *value;
}

// The end of what was handed over last, to any communicator.
inline Place last_collective = [] {
    Place before = std::make_shared<Marker>();
    before->reach();
    return before;
}();

// As a kernel is handed to its stream, and behind all earlier collectives, whatever their streams. That NCCL does for
// one communicator; that two take turns in the same order on all ranks is up to the program there, which a GPU may
// punish with a deadlock. A graph's collectives come in the order of the stream that it is launched in; that those of
// two streams do so on all ranks is up to the program here too, and compare_calls sees when they do not.
inline ncclResult_t issue(const std::shared_ptr<ncclComm>& comm, const Call& call, cudaStream_t stream)
{
    if (comm->error != ncclSuccess) return comm->error;
    if (!waits(stream)) return perform(*comm, call);
    const auto deed = [comm, call] {
        if (comm->aborted) return cudaSuccess;
        return perform(*comm, call) == ncclSuccess ? cudaSuccess : report(cudaErrorUnknown);
    };
    cudaError_t error = refuse_implicit(stream);
    if (error == cudaSuccess && in_capture(stream)) error = note(stream, deed);
    else if (error == cudaSuccess) last_collective = put_off(stream, deed, {last_collective});
    if (error == cudaSuccess) return ncclSuccess;
    return fail(ncclUnhandledCudaError, describe(call) + ": " + cudaGetErrorString(error));
}

// What was called since ncclGroupStart.
struct Group {
    struct Member {
        std::shared_ptr<ncclComm> comm;
        Call call;
        cudaStream_t stream;
    };
    int depth = 0;
    ncclResult_t error = ncclSuccess;  // of a call inside
    std::vector<Member> members{};
};
inline thread_local Group group;

// ---- what a call is refused for

inline std::string hex(const void* address)
{
    char text[32];
    snprintf(text, sizeof(text), "%p", address);
    return text;
}

inline ncclResult_t check_communicator(const std::string& who, ncclComm_t comm)
{
    if (comm == nullptr) return fail(ncclInvalidArgument, who + ": comm is null; expected one of ncclCommInitRank");
    if (communicators().count(comm) == 0)
        return fail(ncclInvalidArgument, who + ": comm is " + hex(comm) +
                                             ", which is none, or no longer; expected one of ncclCommInitRank");
    if (comm->thread != std::this_thread::get_id())
        return fail(ncclInvalidUsage, who + ": called from another thread; expected the one of ncclCommInitRank");
    return ncclSuccess;
}

// A buffer: where it is and how many bytes of it are used.
struct Buffer {
    const char* name;
    const void* data;
    size_t bytes;
};

inline ncclResult_t check_buffer(const std::string& who, const Buffer& buffer)
{
    const std::string size = std::to_string(buffer.bytes) + " bytes";
    if (buffer.bytes == 0) return ncclSuccess;
    if (buffer.data == nullptr)
        return fail(ncclInvalidArgument, who + ": " + buffer.name + " is null; expected the address of " + size);
    if (card() == nullptr) return ncclSuccess;
    if (Sides(buffer.data, buffer.data).to_pageable)
        return fail(ncclInvalidArgument, who + ": " + buffer.name + " is " + hex(buffer.data) +
                                             ", the host's pageable memory; expected memory of the device");
    if (!ends_inside(buffer.data, buffer.bytes))
        return fail(ncclInvalidArgument, who + ": " + buffer.name + " is " + hex(buffer.data) +
                                             " and goes past the end of what was allocated there; expected " + size);
    return ncclSuccess;
}

// Buffers may lie apart, or, by bytes, exactly where NCCL wants it of a call that works in place.
inline ncclResult_t check_overlap(const std::string& who, const Buffer& send, const Buffer& recv, ptrdiff_t in_place)
{
    const char *s = static_cast<const char*>(send.data), *r = static_cast<const char*>(recv.data);
    const bool apart = send.bytes == 0 || recv.bytes == 0 || s + send.bytes <= r || r + recv.bytes <= s;
    if (apart || r - s == in_place) return ncclSuccess;
    return fail(ncclInvalidArgument, who + ": sendbuff and recvbuff overlap, recvbuff - sendbuff is " +
                                         std::to_string(r - s) + " bytes; expected " + std::to_string(in_place) +
                                         ", to work in place, or buffers that lie apart");
}

inline ncclResult_t check_numbers(const std::string& who, const Call& call, const ncclComm& comm)
{
    if (call.type < 0 || call.type >= ncclNumTypes || bytes_of(call.type) == 0)
        return fail(ncclInvalidArgument, who + ": the data type is " + std::to_string(call.type) +
                                             "; expected 0 (ncclInt8) to 9 (ncclBfloat16)");
    if (call.op < 0 || call.op >= ncclNumOps)
        return fail(ncclInvalidArgument, who + ": the operation is " + std::to_string(call.op) +
                                             "; expected 0 (ncclSum) to 4 (ncclAvg)");
    if (call.root < 0 || call.root >= comm.size)
        return fail(ncclInvalidArgument, who + ": the root is " + std::to_string(call.root) + "; expected 0 to " +
                                             std::to_string(comm.size - 1));
    if (call.count > std::numeric_limits<size_t>::max() / 2 / static_cast<size_t>(comm.size) / bytes_of(call.type))
        return fail(ncclInvalidArgument, who + ": the count is " + std::to_string(call.count) +
                                             "; expected what fits into memory");
    return ncclSuccess;
}

inline ncclResult_t check_call(const Call& call, ncclComm_t comm, cudaStream_t stream)
{
    std::string who = name_of(call.kind);
    if (const ncclResult_t result = check_communicator(who, comm); result != ncclSuccess) return result;
    who += " on rank " + std::to_string(comm->rank) + " of " + std::to_string(comm->size);
    if (const ncclResult_t result = check_numbers(who, call, *comm); result != ncclSuccess) return result;
    if (std::count(streams().begin(), streams().end(), real(stream)) == 0)
        return fail(ncclInvalidArgument, who + ": the stream is " + hex(stream) + ", which is no stream, or no longer");
    const size_t bytes = call.count * bytes_of(call.type), all = bytes * static_cast<size_t>(comm->size);
    const bool is_root = comm->rank == call.root;
    Buffer send{"sendbuff", call.send, call.kind == Kind::REDUCE_SCATTER ? all : bytes};
    Buffer recv{"recvbuff", call.recv, call.kind == Kind::ALL_GATHER ? all : bytes};
    if (call.kind == Kind::BROADCAST && !is_root) send.bytes = 0;  // not looked at
    if (call.kind == Kind::REDUCE && !is_root) recv.bytes = 0;
    const ptrdiff_t own = static_cast<ptrdiff_t>(bytes) * comm->rank;
    const ptrdiff_t in_place = call.kind == Kind::REDUCE_SCATTER ? own : call.kind == Kind::ALL_GATHER ? -own : 0;
    ncclResult_t result = check_buffer(who, send);
    if (result == ncclSuccess) result = check_buffer(who, recv);
    return result == ncclSuccess ? check_overlap(who, send, recv, in_place) : result;
}

inline ncclResult_t enqueue(const Call& call, ncclComm_t comm, cudaStream_t stream)
{
    const ncclResult_t result = check_call(call, comm, stream);
    if (group.depth == 0) return result == ncclSuccess ? issue(communicators()[comm], call, stream) : result;
    if (result == ncclSuccess) group.members.push_back({communicators()[comm], call, stream});
    else if (group.error == ncclSuccess) group.error = result;
    return result;
}

}  // namespace cuda_cpu::nccl

inline ncclResult_t ncclGroupStart()
{
    cuda_cpu::nccl::group.depth++;
    return ncclSuccess;
}

// The outermost one issues the group's calls, in their order; none, if one of them was refused.
inline ncclResult_t ncclGroupEnd()
{
    using namespace cuda_cpu::nccl;
    if (group.depth == 0)
        return fail(ncclInvalidUsage, "ncclGroupEnd: no group has begun; expected ncclGroupStart before it");
    if (--group.depth > 0) return ncclSuccess;
    const Group whole = std::exchange(group, {});
    ncclResult_t first = whole.error;
    if (first != ncclSuccess) return first;
    for (const Group::Member& member : whole.members) {
        const ncclResult_t result = issue(member.comm, member.call, member.stream);
        if (first == ncclSuccess) first = result;
    }
    return first;
}

inline ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    using namespace cuda_cpu::nccl;
    return enqueue({Kind::ALL_REDUCE, sendbuff, recvbuff, count, datatype, op}, comm, stream);
}
inline ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    using namespace cuda_cpu::nccl;
    return enqueue({Kind::REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, op}, comm, stream);
}
inline ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                                  ncclComm_t comm, cudaStream_t stream)
{
    using namespace cuda_cpu::nccl;
    return enqueue({Kind::ALL_GATHER, sendbuff, recvbuff, sendcount, datatype}, comm, stream);
}
inline ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                                  ncclComm_t comm, cudaStream_t stream)
{
    using namespace cuda_cpu::nccl;
    return enqueue({Kind::BROADCAST, sendbuff, recvbuff, count, datatype, ncclSum, root}, comm, stream);
}
inline ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    using namespace cuda_cpu::nccl;
    return enqueue({Kind::REDUCE, sendbuff, recvbuff, count, datatype, op, root}, comm, stream);
}

// ==== communicators =====================================================================================

namespace cuda_cpu::nccl {

// With this a unique id begins.
constexpr char id_mark[] = "gpt.cu dev/cpu/nccl.h ";

inline ncclResult_t check_mpi()
{
    int initialized = 0, finalized = 0, level = 0, is_main = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (initialized == 0 || finalized != 0)
        return fail(ncclInvalidUsage, std::string("ncclCommInitRank: MPI is ") +
                                          (finalized != 0 ? "finalized" : "not initialized") +
                                          "; expected MPI_Init_thread before, MPI_Finalize after all communicators");
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&is_main);
    if (level < MPI_THREAD_FUNNELED || (level == MPI_THREAD_FUNNELED && is_main == 0))
        return fail(ncclInvalidUsage, "ncclCommInitRank: MPI's level of threads is " + std::to_string(level) +
                                          (is_main != 0 ? "" : " and this is not its main thread") +
                                          "; expected MPI_THREAD_FUNNELED (" + std::to_string(MPI_THREAD_FUNNELED) +
                                          ") and the main thread, or more");
    return ncclSuccess;
}

// What a rank asks ncclCommInitRank for.
struct Wish {
    ncclUniqueId id;
    int size, rank, used;  // used: whether this id was given before
};

// All ranks see all wishes, so that they return the same error.
inline ncclResult_t check_wishes(const std::vector<Wish>& wishes)
{
    const int size = static_cast<int>(wishes.size());
    for (int r = 0; r < size; r++) {
        const Wish& wish = wishes[static_cast<size_t>(r)];
        const std::string who = "ncclCommInitRank on rank " + std::to_string(r) + " of MPI_COMM_WORLD: ";
        if (wish.size != size)
            return fail(ncclInvalidArgument, who + "nranks is " + std::to_string(wish.size) + "; expected " +
                                                 std::to_string(size) + ", as MPI has them");
        if (wish.rank != r)
            return fail(ncclInvalidArgument, who + "rank is " + std::to_string(wish.rank) + "; expected " +
                                                 std::to_string(r) + ", as MPI has it");
        if (memcmp(wish.id.internal, id_mark, sizeof(id_mark) - 1) != 0)
            return fail(ncclInvalidArgument, who + "the unique id is not one of ncclGetUniqueId");
        if (memcmp(&wish.id, &wishes[0].id, sizeof(wish.id)) != 0)
            return fail(ncclInvalidUsage, who + "its unique id is not that of rank 0; expected the same on all ranks");
        if (wish.used != 0)
            return fail(ncclInvalidUsage, who + "the unique id was used before; expected a new one for each");
    }
    return ncclSuccess;
}

}  // namespace cuda_cpu::nccl

// Random numbers, as text.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id)
{
    using namespace cuda_cpu::nccl;
    if (id == nullptr) return fail(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is null; expected an address");
    *id = {};
    std::random_device random;
    snprintf(id->internal, sizeof(id->internal), "%s%08x%08x%08x%08x", id_mark, random(), random(), random(), random());
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank)
{
    using namespace cuda_cpu::nccl;
    if (comm == nullptr) return fail(ncclInvalidArgument, "ncclCommInitRank: comm is null; expected an address");
    *comm = nullptr;
    if (const ncclResult_t result = check_mpi(); result != ncclSuccess) return result;
    if (group.depth > 0)
        return fail(ncclInvalidUsage, "ncclCommInitRank: called in a group; expected ncclGroupEnd before");
    static std::set<std::string> used_ids;
    const std::string key(id.internal, sizeof(id.internal));
    auto created = std::make_shared<ncclComm>();
    created->thread = std::this_thread::get_id();
    MPI_Comm_rank(MPI_COMM_WORLD, &created->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &created->size);
    MPI_Request request;
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &created->mpi, &request);
    if (code == MPI_SUCCESS) code = wait_for(request);
    if (code != MPI_SUCCESS) return fail_mpi(ncclSystemError, "MPI_Comm_idup", code);
    MPI_Comm_set_errhandler(created->mpi, MPI_ERRORS_RETURN);
    std::vector<Wish> wishes;
    const Wish mine{id, nranks, rank, used_ids.count(key) > 0};
    ncclResult_t result = gather_values(wishes, *created, mine);
    if (result == ncclSuccess) result = check_wishes(wishes);
    if (result != ncclSuccess) {
        MPI_Comm_free(&created->mpi);
        return result;
    }
    used_ids.insert(key);
    *comm = created.get();
    communicators()[*comm] = created;
    return ncclSuccess;
}

// Does what waits in queues first, then waits for the other ranks to come here too.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    using namespace cuda_cpu::nccl;
    if (const ncclResult_t result = check_communicator("ncclCommDestroy", comm); result != ncclSuccess) return result;
    if (group.depth > 0)
        return fail(ncclInvalidUsage, "ncclCommDestroy: called in a group; expected ncclGroupEnd before");
    const std::shared_ptr<ncclComm> last = communicators()[comm];
    cuda_cpu::run_until_reached(last_collective);  // whose error is the communicator's
    const ncclResult_t result = perform(*last, {Kind::DESTROY});
    communicators().erase(comm);
    if (result == ncclSuccess) MPI_Comm_free(&last->mpi);
    last->error = ncclInvalidUsage;  // a graph may hold it still
    return result;
}

// Does not wait: work that is not done yet is dropped. (The other ranks may wait for this one, so MPI's own
// communicator, which only all of them together can free, is left as it is.)
inline ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    using namespace cuda_cpu::nccl;
    if (const ncclResult_t result = check_communicator("ncclCommAbort", comm); result != ncclSuccess) return result;
    comm->aborted = true;
    comm->error = ncclInvalidUsage;
    communicators().erase(comm);
    return ncclSuccess;
}

namespace cuda_cpu::nccl {

// *answer = the communicator's
template <class T>
inline ncclResult_t ask(const char* who, T* answer, ncclComm_t comm, T ncclComm::*what)
{
    if (const ncclResult_t result = check_communicator(who, comm); result != ncclSuccess) return result;
    if (answer == nullptr)
        return fail(ncclInvalidArgument, std::string(who) + ": the answer's address is null; expected one");
    *answer = comm->*what;
    return ncclSuccess;
}

}  // namespace cuda_cpu::nccl

// What went wrong in a queue.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error)
{
    return cuda_cpu::nccl::ask("ncclCommGetAsyncError", error, comm, &ncclComm::error);
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count)
{
    return cuda_cpu::nccl::ask("ncclCommCount", count, comm, &ncclComm::size);
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank)
{
    return cuda_cpu::nccl::ask("ncclCommUserRank", rank, comm, &ncclComm::rank);
}

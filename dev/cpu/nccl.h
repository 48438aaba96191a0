// NCCL on a CPU: each rank is a process, and all run on one machine. The unique id names shared memory of the ranks.
// README.md, "Several processes", documents the order of sums and the errors.
//
//   - Calls are issued to a stream, as kernels are. If work is queued (streams.h), a rank runs a collective only while
//     its host waits for the device. So a launch does not block, as on a GPU, unless the queue is full.
//   - CUDA_CPU_NCCL_FAILURE=9: the process's 9th call hangs, and its communicator reports that a remote rank failed.
//   - Not emulated: several ranks in one process, 8-bit float types, averages.
//
// Map: NCCL's types · errors · shared memory · transfers · collectives · streams and groups · NCCL's functions
#pragma once

#include <fcntl.h>
#include <sched.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

// ==== NCCL's types ======================================================================================

#define NCCL_VERSION_CODE 23203   // 2.32.3
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR -1

struct ncclUniqueId { char internal[NCCL_UNIQUE_ID_BYTES]; };
struct ncclConfig_t { int blocking; };
enum ncclResult_t {
    ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage,
    ncclRemoteError, ncclInProgress,
};
enum ncclDataType_t : int {
    ncclInt8 = 0, ncclChar = 0, ncclUint8 = 1, ncclInt32 = 2, ncclInt = 2, ncclUint32 = 3, ncclInt64 = 4,
    ncclUint64 = 5, ncclFloat16 = 6, ncclHalf = 6, ncclFloat32 = 7, ncclFloat = 7, ncclFloat64 = 8, ncclDouble = 8,
    ncclBfloat16 = 9, ncclNumTypes,
};
enum ncclRedOp_t : int { ncclSum, ncclProd, ncclMax, ncclMin, ncclNumOps };

namespace cuda_cpu::nccl { struct Shared; }
namespace nccl_cpu = cuda_cpu::nccl;

// A communicator. It is never freed, so that a call with a destroyed communicator is detected.
struct ncclComm {
    int rank = 0, size = 1;
    nccl_cpu::Shared* shared = nullptr;
    int all_reduces = 0;
    double bytes_sent = 0;   // by this rank, with NCCL's ring algorithms
    int calls = 0;   // collectives that this rank has started, plus 1 while it sends or receives
    std::atomic<ncclResult_t> error{ncclSuccess};  // the first error, which all later calls return
    std::atomic<bool> gone{false};                 // destroyed or aborted
    void* buffers = nullptr;
};
using ncclComm_t = ncclComm*;

// ==== errors ============================================================================================

namespace cuda_cpu::nccl {

struct Failure { ncclResult_t result; std::string text; };
inline thread_local std::string last_text;

template <class... Parts> [[noreturn]] void fail(ncclResult_t result, const Parts&... parts) {
    throw Failure{result, text_of(parts...)};
}

// Runs work() and returns its Failure as the result of an NCCL function.
template <class Work> ncclResult_t guarded(Work work) {
    try {
        work();
        return ncclSuccess;
    } catch (const Failure& error) {
        last_text = error.text;
        return error.result;
    }
}

// ==== shared memory =====================================================================================

constexpr int max_ranks = 32;
constexpr size_t mailbox_bytes = 128 << 10;
constexpr size_t buffer_bytes = 256 << 20;    // device memory that a communicator allocates on an emulated GPU

enum Kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE, ALL_GATHER, BROADCAST, SEND, RECV };
struct Call {
    Kind kind;
    size_t count;
    int type, op, peer;   // peer: the root, or the other rank of a send or receive
    const void* send;
    void* recv;
};

// A piece of a transfer in flight from one rank to another.
struct Mailbox {
    std::atomic<bool> full;
    Call call;   // of the sender
    char data[mailbox_bytes];
};

// The memory that all ranks map. It is zero at first; pages that are never written use no memory.
struct Shared {
    std::atomic<int> size;           // nranks of the first rank that joined
    std::atomic<int> error_state;    // 1: a rank is writing error_text, 2: it has been written
    int error_at;                    // ncclComm::calls of the failed rank
    char error_text[500];
    std::atomic<bool> joined[max_ranks];
    std::atomic<uint64_t> changes;           // begins and ends of changes of mailboxes
    std::atomic<uint64_t> stuck[max_ranks];  // changes + 1 when this rank last found that it must wait; 0: it runs
    Mailbox mailbox[max_ranks][max_ranks];  // from, to
};

// Maps the memory that an id names: a path in /proc to a file descriptor of the process that created the id.
inline Shared* map_memory(const ncclUniqueId& id) {
    const int file = open(id.internal, O_RDWR | O_CLOEXEC);
    const bool is_ours = lseek(file, 0, SEEK_END) == sizeof(Shared);
    void* const memory =
        is_ours ? mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0) close(file);
    if (memory == MAP_FAILED)
        fail(ncclSystemError, "the unique id was not created by a process that runs on this machine");
    return static_cast<Shared*>(memory);
}

// Throws, also on the other ranks when they wait in the same call or a later one. They complete earlier calls first.
template <class... Parts> [[noreturn]] void fail_all(const ncclComm& comm, const Parts&... parts) {
    Shared& shared = *comm.shared;
    int none = 0;
    if (shared.error_state.compare_exchange_strong(none, 1)) {
        snprintf(shared.error_text, sizeof(shared.error_text), "%s", text_of(parts...).c_str());
        shared.error_at = comm.calls;
        shared.error_state = 2;
    }
    fail(ncclInvalidUsage, parts...);
}

// Blocks until holds() is true. Between polls it yields at first, for the time of most transfers, and later sleeps.
template <class Condition> void wait_until(const ncclComm& comm, Condition holds) {
    const auto sleeps_from = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    while (!holds()) {
        const Shared& shared = *comm.shared;
        if (shared.error_state == 2 && comm.calls >= shared.error_at) fail(ncclInvalidUsage, shared.error_text);
        if (comm.gone) fail(ncclInvalidUsage, "the communicator was aborted");
        if (std::chrono::steady_clock::now() < sleeps_from) sched_yield();
        else usleep(50);
    }
}

// ==== transfers =========================================================================================

// Computes total[i] = total[i] op x[i].
template <class T> void combine(void* total_, const void* x_, size_t bytes, int op) {
    T* const total = static_cast<T*>(total_);
    const T* const x = static_cast<const T*>(x_);
    const auto each = [=](auto combined) {
        for (size_t i = 0; i < bytes / sizeof(T); i++) total[i] = combined(total[i], x[i]);
    };
    if (op == ncclSum) each(std::plus<T>());
    if (op == ncclProd) each(std::multiplies<T>());
    if (op == ncclMax) each([](T a, T b) { return a < b ? b : a; });
    if (op == ncclMin) each([](T a, T b) { return b < a ? b : a; });
}

constexpr struct { const char* name; size_t bytes; decltype(&combine<float>) combine; } types[] = {
    {"ncclInt8", 1, combine<int8_t>},     {"ncclUint8", 1, combine<uint8_t>},
    {"ncclInt32", 4, combine<int32_t>},   {"ncclUint32", 4, combine<uint32_t>},
    {"ncclInt64", 8, combine<int64_t>},   {"ncclUint64", 8, combine<uint64_t>},
    {"ncclFloat16", 2, combine<__half>},  {"ncclFloat32", 4, combine<float>},
    {"ncclFloat64", 8, combine<double>},  {"ncclBfloat16", 2, combine<__nv_bfloat16>},
};

inline size_t bytes_of(const Call& call) { return call.count * types[call.type].bytes; }

inline bool has_peer(const Call& call) { return call.kind == REDUCE || call.kind >= BROADCAST; }

inline std::string describe(int rank, const Call& call) {
    constexpr const char* kinds[] = {"ncclAllReduce", "ncclReduceScatter", "ncclReduce", "ncclAllGather",
                                     "ncclBroadcast", "ncclSend",          "ncclRecv"};
    constexpr const char* ops[] = {", ncclSum", ", ncclProd", ", ncclMax", ", ncclMin"};
    const std::string peer = has_peer(call) ? text_of(", root or peer ", call.peer) : "";
    return text_of("rank ", rank, " calls ", kinds[call.kind], "(count ", call.count, ", ", types[call.type].name,
                   call.kind <= REDUCE ? ops[call.op] : "", peer, ")");
}

// Fails on all ranks if a call does not match the call of the peer that sends to it.
inline void check_match(const ncclComm& comm, const Call& call, int peer, const Call& other) {
    Call expected = call;
    if (call.kind == RECV) {
        expected.kind = SEND;
        expected.peer = comm.rank;
    }
    if (describe(peer, expected) != describe(peer, other))
        fail_all(comm, "the ranks' calls do not match: ", describe(comm.rank, call), ", ",
                 describe(peer, other));
}

// A transfer of at most mailbox_bytes to or from another rank. An empty one still compares the ranks' calls.
struct Transfer {
    Call call;
    bool sends;
    int peer;
    char* data;
    size_t bytes;
    bool sent = false, finished = false;
};

// Advances a transfer. Returns whether it has finished: as in NCCL, a send when the receiver has read the data.
inline bool advance(const ncclComm& comm, Transfer& t) {
    Mailbox& box = comm.shared->mailbox[t.sends ? comm.rank : t.peer][t.sends ? t.peer : comm.rank];
    if (box.full == t.sends) return false;
    if (t.sent) return true;
    comm.shared->changes++;
    if (t.sends) {
        box.call = t.call;
        std::copy_n(t.data, t.bytes, box.data);
    } else {
        check_match(comm, t.call, t.peer, box.call);
        std::copy_n(box.data, t.bytes, t.data);
    }
    box.full = t.sent = t.sends;
    comm.shared->changes++;
    return !t.sends;
}

constexpr uint64_t has_left = ~uint64_t{0};

// Fails on all ranks if none can continue: each has found that it must wait since the last change of a mailbox ended.
// changes: their count before the caller looked at its mailboxes.
inline void check_deadlock(const ncclComm& comm, uint64_t changes, const Call& call) {
    Shared& shared = *comm.shared;
    shared.stuck[comm.rank] = changes + 1;
    const auto waits = [&](const std::atomic<uint64_t>& stuck) { return stuck == changes + 1 || stuck == has_left; };
    if (std::all_of(shared.stuck, shared.stuck + comm.size, waits) && shared.changes == changes)
        fail_all(comm, "deadlock: the ranks wait for each other: ", describe(comm.rank, call));
}

// Blocks until all transfers have finished. Transfers from one rank to another run one after another.
inline void run_transfers(const ncclComm& comm, std::vector<Transfer>& transfers) {
    std::atomic<uint64_t>& stuck = comm.shared->stuck[comm.rank];
    wait_until(comm, [&] {
        const uint64_t changes = comm.shared->changes;
        bool busy[2][max_ranks] = {}, all_finished = true;   // busy: by direction and peer
        for (Transfer& t : transfers) {
            if (!busy[t.sends][t.peer]) t.finished = t.finished || advance(comm, t);
            busy[t.sends][t.peer] |= !t.finished;
            all_finished &= t.finished;
        }
        if (all_finished) stuck = 0;
        else check_deadlock(comm, changes, transfers[0].call);
        return all_finished;
    });
}

// ==== collectives =======================================================================================

// Returns whether all-reduce uses NVLS: on an emulated H100 or H200, unless NCCL_ALGO excludes it.
inline bool uses_nvls() {
    const char* algorithms = getenv("NCCL_ALGO");
    if (card() == nullptr || card()->capability.major != 9) return false;
    return algorithms == nullptr || (*algorithms == '^') != (strstr(algorithms, "NVLS") != nullptr);
}

// Runs a collective. In pieces of mailbox_bytes, every rank exchanges data with all ranks, itself included.
inline void run_collective(ncclComm& comm, const Call& call) {
    const DeviceWork work;
    const bool reduces = call.kind <= REDUCE;
    const size_t bytes = bytes_of(call);
    comm.calls++;
    const int first = call.kind == ALL_REDUCE && uses_nvls() ? comm.all_reduces++ % comm.size : 0;   // first term
    for (size_t done = 0; done == 0 || done < bytes; done += mailbox_bytes) {
        const size_t piece = std::min(mailbox_bytes, bytes - done);
        char* const send = static_cast<char*>(const_cast<void*>(call.send)) + done;
        char* const recv = static_cast<char*>(call.recv) + done;
        std::vector<char> terms(reduces ? comm.size * piece : 0);
        const auto term = [&](int r) { return terms.data() + r % comm.size * piece; };
        const auto length = [&](int sender, int receiver) {
            const bool empty = (call.kind == BROADCAST && sender != call.peer) ||
                               (call.kind == REDUCE && receiver != call.peer);
            return empty ? 0 : piece;
        };
        std::vector<Transfer> transfers;
        for (int r = 0; r < comm.size; r++) {
            char* const from = send + (call.kind == REDUCE_SCATTER ? r * bytes : 0);
            char* const to = reduces ? term(r) : recv + (call.kind == ALL_GATHER ? r * bytes : 0);
            transfers.push_back({call, true, r, from, length(comm.rank, r)});
            transfers.push_back({call, false, r, to, length(r, comm.rank)});
        }
        run_transfers(comm, transfers);
        if (!reduces || (call.kind == REDUCE && comm.rank != call.peer)) continue;
        std::copy_n(term(first), piece, recv);
        for (int r = 1; r < comm.size; r++) types[call.type].combine(recv, term(first + r), piece, call.op);
    }
}

// Returns the bytes that each rank sends if the ranks form a ring.
inline double ring_bytes(const ncclComm& comm, const Call& call) {
    const double bytes = static_cast<double>(bytes_of(call)), others = comm.size - 1;
    if (call.kind == ALL_REDUCE) return 2 * bytes * others / comm.size;   // a reduce-scatter and an all-gather
    if (call.kind == REDUCE_SCATTER || call.kind == ALL_GATHER) return bytes * others;
    return call.kind == RECV ? 0 : bytes;
}

// Runs the sends and receives of a group on one communicator, all at the same time.
inline void run_messages(ncclComm& comm, const std::vector<Call>& calls) {
    const DeviceWork work;
    std::vector<Transfer> transfers;
    for (const Call& call : calls) {
        const bool sends = call.kind == SEND;
        char* const data = static_cast<char*>(sends ? const_cast<void*>(call.send) : call.recv);
        for (size_t done = 0; done < bytes_of(call); done += mailbox_bytes)
            transfers.push_back({call, sends, call.peer, data + done, std::min(mailbox_bytes, bytes_of(call) - done)});
    }
    comm.calls++;
    run_transfers(comm, transfers);
    comm.calls--;
}

// Returns the values of all ranks, by rank (an all-gather).
template <class T> std::vector<T> gather_values(ncclComm& comm, const T& mine) {
    std::vector<T> values(static_cast<size_t>(comm.size));
    run_collective(comm, {ALL_GATHER, sizeof(T), ncclInt8, 0, 0, &mine, values.data()});
    return values;
}

// ==== streams and groups ================================================================================

struct Issued { ncclComm_t comm; std::vector<Call> calls; cudaStream_t stream; };   // a collective, or sends and recvs
inline Place last_issued;                        // the end of the last call that was queued, on any communicator
inline thread_local std::vector<Issued> group;   // calls since ncclGroupStart
inline thread_local int group_depth = 0;
inline thread_local ncclResult_t group_error = ncclSuccess;   // first error of a call in the group

inline void perform(const Issued& issued) {
    static const char* const failure = getenv("CUDA_CPU_NCCL_FAILURE");
    static int performed = 0;
    ncclComm& comm = *issued.comm;
    if (failure != nullptr && ++performed == atoi(failure)) {
        comm.error = ncclRemoteError;
        wait_until(comm, [] { return false; });
    }
    for (const Call& call : issued.calls) comm.bytes_sent += ring_bytes(comm, call);
    if (issued.calls[0].kind >= SEND) run_messages(comm, issued.calls);
    else run_collective(comm, issued.calls[0]);
}

// Issues calls to their stream, ordered after all earlier calls in any stream. (NCCL orders the calls of one
// communicator. A program with two must issue their calls in the same order on all ranks, or GPUs may deadlock.) After
// an error a communicator stays unusable, because its ranks may have stopped at different calls.
inline void issue(const Issued& issued) {
    ncclComm& comm = *issued.comm;
    const auto work = [issued, &comm] {
        if (comm.gone) comm.error = ncclInvalidUsage;
        if (comm.error == ncclSuccess) comm.error = guarded([&] { perform(issued); });
        return comm.error == ncclSuccess || comm.gone ? cudaSuccess : report(cudaErrorUnknown);
    };
    static const std::string earlier = "the communicator has failed: ";
    if (comm.error != ncclSuccess) fail(comm.error, last_text.rfind(earlier, 0) == 0 ? "" : earlier, last_text);
    if (!is_deferred(issued.stream)) {
        if (work() != cudaSuccess) fail(comm.error, last_text);
        return;
    }
    const std::vector<Place> after(last_issued != nullptr, last_issued);
    if (const cudaError_t error = submit(issued.stream, work, after, true); error != cudaSuccess)
        fail(ncclUnhandledCudaError, "issuing to the stream: ", cudaGetErrorString(error));
    if (!in_capture(issued.stream)) last_issued = real(issued.stream)->last;
}

inline void check_communicator(const ncclComm* comm) {
    if (comm == nullptr || comm->gone)
        fail(ncclInvalidArgument, "comm is null or was destroyed; expected a communicator");
}

// Fails if a buffer of the call, `parts` times its count, is null or, on an emulated GPU, not in device memory.
inline void check_buffer(const Call& call, int rank, const char* name, const void* data, int parts) {
    const size_t bytes = bytes_of(call) * static_cast<size_t>(parts);
    const char* error = nullptr;
    if (data == nullptr) error = " is null";
    else if (card() != nullptr && memory_kind(data) == MemoryKind::PAGEABLE)
        error = " is pageable memory; expected device memory";
    else if (card() != nullptr && !fits_in_allocation(data, bytes)) error = " goes past the end of its allocation";
    if (bytes > 0 && error != nullptr) fail(ncclInvalidArgument, describe(rank, call), ": ", name, error);
}

// Fails if the buffers of a reduce-scatter or an all-gather overlap, except in place: the rank's part is at its
// position in the whole.
inline void check_overlap(const Call& call, const ncclComm& comm) {
    if (call.kind != REDUCE_SCATTER && call.kind != ALL_GATHER) return;
    const char *send = static_cast<const char*>(call.send), *recv = static_cast<const char*>(call.recv);
    const char *part = call.kind == REDUCE_SCATTER ? recv : send, *whole = call.kind == REDUCE_SCATTER ? send : recv;
    const size_t bytes = bytes_of(call);
    const bool overlaps = part < whole + comm.size * bytes && whole < part + bytes;
    if (overlaps && part != whole + comm.rank * bytes)
        fail(ncclInvalidArgument, describe(comm.rank, call), ": the buffers overlap; expected the part of ", bytes,
             " bytes at its position in the whole, or outside of it");
}

// Fails if the communicator, the peer or a buffer is invalid.
inline void check_call(const Call& call, const ncclComm* comm) {
    check_communicator(comm);
    if (call.peer < 0 || call.peer >= comm->size)
        fail(ncclInvalidArgument, describe(comm->rank, call), ": expected a rank less than ", comm->size);
    const bool no_send = call.kind == RECV || (call.kind == BROADCAST && comm->rank != call.peer);
    const bool no_recv = call.kind == SEND || (call.kind == REDUCE && comm->rank != call.peer);
    const int send = no_send ? 0 : call.kind == REDUCE_SCATTER ? comm->size : 1;
    const int recv = no_recv ? 0 : call.kind == ALL_GATHER ? comm->size : 1;
    check_buffer(call, comm->rank, "sendbuff", call.send, send);
    check_buffer(call, comm->rank, "recvbuff", call.recv, recv);
    check_overlap(call, *comm);
}

// Issues a group's calls in order. If a call was invalid, issues no call and returns the error.
inline ncclResult_t issue_group() {
    const std::vector<Issued> calls = std::exchange(group, {});
    const ncclResult_t error = std::exchange(group_error, ncclSuccess);
    return error != ncclSuccess ? error : guarded([&] { for (const Issued& issued : calls) issue(issued); });
}

// Adds a call to the open group; outside of a group, issues it.
inline ncclResult_t enqueue(const Call& call, ncclComm_t comm, cudaStream_t stream) {
    const ncclResult_t result = guarded([&] {
        check_call(call, comm);
        const auto with = std::find_if(group.begin(), group.end(), [&](const Issued& other) {
            return other.comm == comm && other.calls[0].kind >= SEND && call.kind >= SEND;
        });
        if (with != group.end()) with->calls.push_back(call);
        else group.push_back({comm, {call}, stream});
    });
    if (group_error == ncclSuccess) group_error = result;
    return group_depth > 0 ? result : issue_group();
}

}  // namespace cuda_cpu::nccl

// ==== NCCL's functions ==================================================================================

inline const char* ncclGetLastError(ncclComm_t) { return nccl_cpu::last_text.c_str(); }

inline const char* ncclGetErrorString(ncclResult_t result) {
    constexpr const char* texts[] = {"no error", "a CUDA call failed", "a system call failed", "internal error",
                                     "invalid argument", "invalid usage", "a remote rank failed", "in progress"};
    const size_t number = static_cast<size_t>(result);
    return number < std::size(texts) ? texts[number] : "unknown result code";
}

inline ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

inline ncclResult_t ncclGroupStart() {
    nccl_cpu::group_depth++;
    return ncclSuccess;
}

// The outermost ncclGroupEnd issues the group's calls.
inline ncclResult_t ncclGroupEnd() {
    using namespace nccl_cpu;
    if (group_depth == 0) return guarded([] { fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"); });
    return --group_depth > 0 ? ncclSuccess : issue_group();
}

inline ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::ALL_REDUCE, count, datatype, op, 0, sendbuff, recvbuff}, comm, stream);
}
inline ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::REDUCE_SCATTER, recvcount, datatype, op, 0, sendbuff, recvbuff}, comm, stream);
}
inline ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::REDUCE, count, datatype, op, root, sendbuff, recvbuff}, comm, stream);
}
inline ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                                  ncclComm_t comm, cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::ALL_GATHER, sendcount, datatype, 0, 0, sendbuff, recvbuff}, comm, stream);
}
inline ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::BROADCAST, count, datatype, 0, root, sendbuff, recvbuff}, comm, stream);
}
inline ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::SEND, count, datatype, 0, peer, sendbuff, nullptr}, comm, stream);
}
inline ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return nccl_cpu::enqueue({nccl_cpu::RECV, count, datatype, 0, peer, nullptr, recvbuff}, comm, stream);
}

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    using namespace nccl_cpu;
    return guarded([&] {
        const int file = memfd_create("nccl", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, sizeof(Shared)) != 0)
            fail(ncclSystemError, "ncclGetUniqueId: cannot create shared memory: ", strerror(errno));
        snprintf(id->internal, sizeof(id->internal), "/proc/%d/fd/%d", getpid(), file);
    });
}

inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
    using namespace nccl_cpu;
    return guarded([&] {
        if (rank < 0 || rank >= nranks || nranks > max_ranks)
            fail(ncclInvalidArgument, "rank ", rank, " of ", nranks, "; expected at most ", max_ranks, " ranks");
        auto* const created = new ncclComm{rank, nranks, map_memory(id)};
        Shared& shared = *created->shared;
        int size = 0;
        if (!shared.size.compare_exchange_strong(size, nranks) && size != nranks)
            fail_all(*created, "nranks is ", nranks, " on rank ", rank, " and ", size, " on another");
        if (shared.joined[rank].exchange(true))
            fail(ncclInvalidUsage, "rank ", rank, " has already joined; expected a new unique id");
        int device = 0;
        cudaGetDevice(&device);
        std::vector<int> devices = gather_values(*created, device);
        std::sort(devices.begin(), devices.end());
        const auto twice = std::adjacent_find(devices.begin(), devices.end());
        if (twice != devices.end()) fail(ncclInvalidUsage, "duplicate GPU: several ranks use device ", *twice);
        if (cuda_cpu::card() != nullptr && cudaMalloc(&created->buffers, buffer_bytes) != cudaSuccess)
            fail(ncclUnhandledCudaError, "no device memory for a communicator's buffers of ", buffer_bytes, " bytes");
        *comm = created;
    });
}

// Ranks with the same color form a new communicator, ordered by key, then by rank.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t*) {
    using namespace nccl_cpu;
    struct Member { int color, key, rank; ncclUniqueId id; };
    *newcomm = nullptr;
    return guarded([&] {
        check_communicator(comm);
        cuda_cpu::run_until_reached(last_issued);
        Member own{color, key, comm->rank, {}};
        ncclGetUniqueId(&own.id);
        std::vector<Member> members = gather_values(*comm, own);
        if (color == NCCL_SPLIT_NOCOLOR) return;
        const auto end = std::remove_if(members.begin(), members.end(), [&](auto& m) { return m.color != color; });
        std::stable_sort(members.begin(), end, [](auto& a, auto& b) { return a.key < b.key; });
        const auto self = std::find_if(members.begin(), end, [&](auto& m) { return m.rank == comm->rank; });
        const int size = static_cast<int>(end - members.begin()), rank = static_cast<int>(self - members.begin());
        const ncclResult_t result = ncclCommInitRank(newcomm, size, members[0].id, rank);
        if (result != ncclSuccess) fail(result, last_text);
    });
}

// Completes queued work first.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return nccl_cpu::guarded([&] {
        nccl_cpu::check_communicator(comm);
        cuda_cpu::run_until_reached(nccl_cpu::last_issued);   // an error is stored in comm->error
        comm->gone = true;
        comm->shared->stuck[comm->rank] = nccl_cpu::has_left;
        munmap(comm->shared, sizeof(*comm->shared));
        cudaFree(comm->buffers);
        if (comm->error != ncclSuccess) nccl_cpu::fail(comm->error, nccl_cpu::last_text);
    });
}

// Does not wait; unfinished work is dropped.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return nccl_cpu::guarded([&] {
        nccl_cpu::check_communicator(comm);
        comm->gone = true;
    });
}

// Sets *error to the error of queued work.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return nccl_cpu::guarded([&] {
        nccl_cpu::check_communicator(comm);
        *error = comm->error;
    });
}

// NCCL on a CPU: one rank in each process, all on one machine. The unique id names memory that they share.
//
//   - Sums are in the order of ranks, ((x0 + x1) + x2) + ..., each rounded to the data type: every rank has the same
//     bits, every time, and an all-reduce has those of a reduce-scatter and an all-gather. The exception is NVLS, the
//     all-reduce in Hopper's NVSwitch, whose order changes from call to call: an emulated H100 uses it unless NCCL_ALGO
//     excludes it, as NCCL does.
//   - A collective is handed to its stream as a kernel is. Where NCCL would hang or corrupt memory, because ranks call
//     different things, all ranks return an error that names the calls.
//   - Where work waits in queues (streams.h), a rank takes part in a collective only while it waits for its device.
//   - CUDA_CPU_NCCL_FAILURE=9: the process's 9th call hangs, and its communicator reports that a remote rank failed.
//   - On an emulated GPU a communicator takes memory: at the first collective, or with NCCL_RUNTIME_CONNECT=0 when it
//     is created.
//
// Not here: several ranks in one process, types of 8-bit floats, averages, ncclReduce.
//
// Map: NCCL's types · shared memory · calls · messages · collectives · streams and groups · communicators
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

// ==== NCCL's types ======================================================================================

#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_VERSION_CODE (NCCL_MAJOR * 10000 + NCCL_MINOR * 100 + NCCL_PATCH)
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

inline const char* ncclGetErrorString(ncclResult_t result) {
    constexpr const char* texts[] = {"no error", "a CUDA call failed", "a system call failed", "internal error",
                                     "invalid argument", "invalid usage", "a remote rank failed", "in progress"};
    const size_t number = static_cast<size_t>(result);
    return number < std::size(texts) ? texts[number] : "unknown result code";
}

// ==== shared memory =====================================================================================

namespace cuda_cpu::nccl {

constexpr int most_ranks = 32;
constexpr size_t window_bytes = 1 << 20;    // what a rank shows the others at once
constexpr size_t mailbox_bytes = 32 << 10;  // what is on its way from one rank to another
constexpr size_t buffer_bytes = 256 << 20;  // of a communicator on an emulated GPU
constexpr char id_mark[16] = "dev/cpu/nccl.h";

struct Refusal { ncclResult_t result; std::string text; };
inline thread_local std::string last_error;

// Does work(), and turns a Refusal into the result of a call.
template <class Work> inline ncclResult_t guarded(Work work) {
    try {
        work();
        return ncclSuccess;
    } catch (const Refusal& error) {
        last_error = error.text;
        return error.result;
    }
}

struct Origin { char mark[16]; int process, file; uint64_t token; };   // a unique id: which process opened the memory
struct Arguments { size_t count; int kind, type, op, root; };          // of a call; those of all ranks are the same

// A piece of a message from one rank to another.
struct Mailbox {
    std::atomic<bool> full;
    Arguments of;   // the whole message
    size_t bytes;   // of this piece
    char data[mailbox_bytes];
};

// What all ranks map, zeros at first. Pages that are never written take no memory.
struct Shared {
    uint64_t token;
    std::atomic<int> size;                // as the first rank says
    std::atomic<int> error_state, error;  // 1: the text is being written, 2: it is there
    char error_text[500];
    std::atomic<bool> joined[most_ranks];
    std::atomic<uint64_t> arrived[most_ranks];  // at so many barriers
    Mailbox mailbox[most_ranks][most_ranks];    // from, to
    char window[most_ranks][2][window_bytes];
};

}  // namespace cuda_cpu::nccl

// A communicator. Work in queues holds it too, so that it exists until that is done.
struct ncclComm {
    int rank = 0, size = 1;
    cuda_cpu::nccl::Shared* shared = nullptr;
    uint64_t exchanges = 0, all_reduces = 0;
    std::atomic<ncclResult_t> error{ncclSuccess};  // once there is one, nothing more is done
    std::atomic<bool> aborted{false};
    void* buffers = nullptr;

    ncclComm(int rank_, int size_) : rank(rank_), size(size_) {}
    ~ncclComm() {
        if (shared != nullptr) munmap(shared, sizeof(*shared));
        cudaFree(buffers);
    }
};
using ncclComm_t = ncclComm*;

namespace cuda_cpu::nccl {

// Throws on all ranks: those that wait find the error.
[[noreturn]] inline void fail_all(Shared& shared, ncclResult_t result, const std::string& text) {
    int none = 0;
    if (shared.error_state.compare_exchange_strong(none, 1)) {
        snprintf(shared.error_text, sizeof(shared.error_text), "%s", text.c_str());
        shared.error = result;
        shared.error_state = 2;
    }
    throw Refusal{result, text};
}

// Blocks until holds(). For as long as most exchanges take, the core is only offered to others, then left to them.
template <class Condition> inline void wait_until(const ncclComm& comm, Condition holds) {
    constexpr auto offered = std::chrono::microseconds(200), left = std::chrono::microseconds(50);
    const auto begin = std::chrono::steady_clock::now();
    while (!holds()) {
        const Shared& shared = *comm.shared;
        if (shared.error_state == 2) throw Refusal{static_cast<ncclResult_t>(shared.error.load()), shared.error_text};
        if (comm.aborted) throw Refusal{ncclInvalidUsage, "the communicator was aborted"};
        if (std::chrono::steady_clock::now() - begin < offered) sched_yield();
        else std::this_thread::sleep_for(left);
    }
}

// write(window) fills this rank's window; when all ranks have done so, read(window) may look at window(r) of each. A
// rank's two windows are used in turn: before it writes one again it has passed a barrier that follows all reads of it.
template <class Write, class Read> inline void exchange(ncclComm& comm, Write write, Read read) {
    const size_t which = comm.exchanges++ % 2;
    write(comm.shared->window[comm.rank][which]);
    comm.shared->arrived[comm.rank] = comm.exchanges;
    for (int r = 0; r < comm.size; r++)
        wait_until(comm, [&] { return comm.shared->arrived[r] >= comm.exchanges; });
    read([&](int r) { return comm.shared->window[r][which]; });
}

// Each rank's value, on every rank.
template <class T> inline std::vector<T> gather_values(ncclComm& comm, const T& mine) {
    std::vector<T> values(static_cast<size_t>(comm.size));
    exchange(comm, [&](char* window) { memcpy(window, &mine, sizeof(T)); }, [&](auto window) {
        for (int r = 0; r < comm.size; r++) memcpy(&values[static_cast<size_t>(r)], window(r), sizeof(T));
    });
    return values;
}

// ==== calls =============================================================================================

enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE, MESSAGES };
constexpr const char* kind_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                                      "ncclSend",      "ncclRecv",          "ncclGroupEnd"};
constexpr const char* type_names[] = {"ncclInt8",   "ncclUint8",   "ncclInt32",   "ncclUint32",  "ncclInt64",
                                      "ncclUint64", "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16"};
constexpr const char* op_names[] = {"ncclSum", "ncclProd", "ncclMax", "ncclMin"};

struct Call {
    Arguments is;   // root: of a message the other rank
    const char* send = nullptr;
    char* recv = nullptr;
    std::vector<Call> messages{};   // of a group: they are under way at the same time

    Call(Kind kind, const void* send_, void* recv_, size_t count, int type, int op = 0, int root = 0)
        : is{count, kind, type, op, root}, send(static_cast<const char*>(send_)), recv(static_cast<char*>(recv_)) {}
    size_t bytes() const;
};

inline std::string describe(const Arguments& is) {
    std::string text = kind_names[is.kind];
    if (is.kind == MESSAGES) return text;
    text += "(count " + std::to_string(is.count) + ", " + type_names[is.type];
    if (is.kind <= REDUCE_SCATTER) text += std::string(", ") + op_names[is.op];
    if (is.kind >= BROADCAST) text += (is.kind == BROADCAST ? ", root " : ", peer ") + std::to_string(is.root);
    return text + ")";
}
inline std::string of_rank(int rank, const Arguments& is) {
    return "rank " + std::to_string(rank) + " calls " + describe(is);
}

// Does work(a value of the type's C++ type).
template <class Work> inline void with_type(int type, Work work) {
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
    }
}
inline size_t Call::bytes() const {
    size_t bytes = 0;
    with_type(is.type, [&](auto value) { bytes = is.count * sizeof(value); });
    return bytes;
}

// ==== messages ==========================================================================================

// Moves the next piece of a message, whose first `done` bytes have moved, if the mailbox is ready. `done` is more than
// the message when it has arrived: a rank that only sends waits for the one that receives, as with NCCL.
inline bool move_piece(const ncclComm& comm, const Call& call, size_t& done) {
    const bool sends = call.is.kind == SEND;
    const size_t bytes = call.bytes();
    Mailbox& box = comm.shared->mailbox[sends ? comm.rank : call.is.root][sends ? call.is.root : comm.rank];
    if (box.full == sends) return false;
    if (sends && done == bytes) return done++, true;
    if (sends) {
        box.of = call.is;
        box.bytes = std::min(mailbox_bytes, bytes - done);
        memcpy(box.data, call.send + done, box.bytes);
    } else {
        if (box.of.count != call.is.count || box.of.type != call.is.type)
            fail_all(*comm.shared, ncclInvalidUsage,
                     "messages differ: " + of_rank(comm.rank, call.is) + ", " + of_rank(call.is.root, box.of));
        memcpy(call.recv + done, box.data, box.bytes);
    }
    done += box.bytes;
    box.full = sends;
    if (!sends && done == bytes) done++;
    return true;
}

// Moves messages until all have arrived; of those between the same two ranks one after the other.
inline void move_messages(const ncclComm& comm, const std::vector<Call>& messages) {
    std::vector<size_t> done;
    for (const Call& call : messages) done.push_back(call.is.count == 0);
    wait_until(comm, [&] {
        bool moved = false;
        std::vector<std::pair<int, int>> begun;   // kind and other rank of messages that have not arrived
        int in_collective = -1;                   // a rank that waits for this one there, and moves no message
        for (size_t i = 0; i < messages.size(); i++) {
            const Arguments& is = messages[i].is;
            const auto direction = std::make_pair(is.kind, is.root);
            if (done[i] > messages[i].bytes()) continue;
            if (comm.shared->arrived[is.root] > comm.exchanges) in_collective = is.root;
            const bool is_next = std::count(begun.begin(), begun.end(), direction) == 0;
            if (is_next && move_piece(comm, messages[i], done[i])) moved = true;
            if (done[i] <= messages[i].bytes()) begun.push_back(direction);
        }
        if (in_collective >= 0 && !moved && !begun.empty())
            fail_all(*comm.shared, ncclInvalidUsage, "ranks call in different orders: " +
                     of_rank(comm.rank, messages[0].is) + ", rank " + std::to_string(in_collective) + " a collective");
        return begun.empty();
    });
}

// ==== collectives =======================================================================================

// An integer as unsigned, which may overflow; a short float as a float.
template <class T> inline auto widen(T x) {
    if constexpr (std::is_integral_v<T>) return static_cast<std::make_unsigned_t<T>>(x);
    else if constexpr (std::is_floating_point_v<T>) return x;
    else return static_cast<float>(x);
}

// total = total op x. Not inlined, so that no compiler regroups the sums of several terms.
template <class T> __attribute__((noinline)) void add_term(T* total, const T* x, size_t count, int op) {
    const auto each = [=](auto combine) {
        for (size_t i = 0; i < count; i++) total[i] = combine(total[i], x[i]);
    };
    if (op == ncclSum) each([](T a, T b) { return static_cast<T>(widen(a) + widen(b)); });
    if (op == ncclProd) each([](T a, T b) { return static_cast<T>(widen(a) * widen(b)); });
    if (op == ncclMax) each([](T a, T b) { return a < b ? b : a; });
    if (op == ncclMin) each([](T a, T b) { return b < a ? b : a; });
}

// out = the terms together, from `first` on in turn.
inline void combine(char* out, const std::vector<const char*>& terms, size_t first, size_t bytes, const Arguments& is) {
    with_type(is.type, [&](auto value) {
        using T = decltype(value);
        constexpr size_t tile = 1024;
        const size_t count = bytes / sizeof(T);
        const auto term = [&](size_t i) { return reinterpret_cast<const T*>(terms[(first + i) % terms.size()]); };
#pragma omp parallel for schedule(static) if (count > 16 * tile)
        for (size_t at = 0; at < count; at += tile) {
            std::array<T, tile> total;
            const size_t now = std::min(tile, count - at);
            std::copy_n(term(0) + at, now, total.data());
            for (size_t i = 1; i < terms.size(); i++) add_term(total.data(), term(i) + at, now, is.op);
            std::copy_n(total.data(), now, reinterpret_cast<T*>(out) + at);
        }
    });
}

inline bool uses_nvls() {
    const char* algorithms = getenv("NCCL_ALGO");
    if (card() == nullptr || card()->capability.major != 9) return false;
    return algorithms == nullptr || (*algorithms == '^') != (strstr(algorithms, "NVLS") != nullptr);
}

// In pieces: each rank combines its share of the piece, then all get all shares.
inline void all_reduce(ncclComm& comm, const Call& call) {
    const size_t bytes = call.bytes(), size = static_cast<size_t>(comm.size), element = bytes / call.is.count;
    const size_t first = uses_nvls() ? comm.all_reduces++ % size : 0;
    for (size_t done = 0; done < bytes; done += window_bytes) {
        const size_t now = std::min(window_bytes, bytes - done), share = (now / element + size - 1) / size * element;
        const auto begin = [&](int r) { return std::min(now, share * static_cast<size_t>(r)); };
        const auto length = [&](int r) { return std::min(share, now - begin(r)); };
        char *const out = call.recv + done, *const own = out + begin(comm.rank);
        exchange(comm, [&](char* to) { memcpy(to, call.send + done, now); }, [&](auto window) {
            std::vector<const char*> terms;
            for (int r = 0; r < comm.size; r++) terms.push_back(window(r) + begin(comm.rank));
            combine(own, terms, first, length(comm.rank), call.is);
        });
        exchange(comm, [&](char* to) { memcpy(to, own, length(comm.rank)); }, [&](auto window) {
            for (int r = 0; r < comm.size; r++) memcpy(out + begin(r), window(r), length(r));
        });
    }
}

inline void reduce_scatter(ncclComm& comm, const Call& call) {
    constexpr size_t largest_element = 8;
    const size_t bytes = call.bytes();
    const size_t piece = window_bytes / static_cast<size_t>(comm.size) / largest_element * largest_element;
    for (size_t done = 0; done < bytes; done += piece) {
        const size_t now = std::min(piece, bytes - done);
        const auto write = [&](char* to) {
            for (int r = 0; r < comm.size; r++) memcpy(to + r * now, call.send + r * bytes + done, now);
        };
        exchange(comm, write, [&](auto window) {
            std::vector<const char*> terms;
            for (int r = 0; r < comm.size; r++) terms.push_back(window(r) + comm.rank * now);
            combine(call.recv + done, terms, 0, now, call.is);
        });
    }
}

// recv = the data of ranks first to last.
inline void collect(ncclComm& comm, const Call& call, int first, int last) {
    const size_t bytes = call.bytes();
    for (size_t done = 0; done < bytes; done += window_bytes) {
        const size_t now = std::min(window_bytes, bytes - done);
        const auto write = [&](char* to) {
            if (comm.rank >= first && comm.rank <= last) memcpy(to, call.send + done, now);
        };
        exchange(comm, write, [&](auto window) {
            for (int r = first; r <= last; r++) memcpy(call.recv + (r - first) * bytes + done, window(r), now);
        });
    }
}

inline void allocate_buffers(ncclComm& comm) {
    if (card() == nullptr || comm.buffers != nullptr || cudaMalloc(&comm.buffers, buffer_bytes) == cudaSuccess) return;
    throw Refusal{ncclUnhandledCudaError, "no memory for a communicator's buffers"};
}

// Does it, now. Where ranks call different things, all of them throw the same, and no data has moved.
inline void perform(ncclComm& comm, const Call& call) {
    static const char* const failure = getenv("CUDA_CPU_NCCL_FAILURE");
    static int calls = 0;
    if (failure != nullptr && ++calls == atoi(failure)) {
        comm.error = ncclRemoteError;
        wait_until(comm, [] { return false; });
    }
    allocate_buffers(comm);
    if (call.is.kind >= SEND) return move_messages(comm, call.is.kind == MESSAGES ? call.messages : std::vector{call});
    const std::vector<Arguments> all = gather_values(comm, call.is);
    for (int r = 1; r < comm.size; r++) {
        const Arguments &a = all[0], &b = all[static_cast<size_t>(r)];
        if (a.count != b.count || a.kind != b.kind || a.type != b.type || a.op != b.op || a.root != b.root)
            throw Refusal{ncclInvalidUsage,
                          "ranks call different collectives: " + of_rank(0, a) + ", " + of_rank(r, b)};
    }
    if (call.is.count == 0) return;
    if (call.is.kind == ALL_REDUCE) all_reduce(comm, call);
    if (call.is.kind == REDUCE_SCATTER) reduce_scatter(comm, call);
    if (call.is.kind == ALL_GATHER) collect(comm, call, 0, comm.size - 1);
    if (call.is.kind == BROADCAST) collect(comm, call, call.is.root, call.is.root);
}

// ==== streams and groups ================================================================================

inline std::map<ncclComm_t, std::shared_ptr<ncclComm>>& communicators() {
    static auto* const value = new std::map<ncclComm_t, std::shared_ptr<ncclComm>>;  // queues may outlive main
    return *value;
}
inline std::shared_ptr<ncclComm> find(ncclComm_t comm) {
    const auto found = communicators().find(comm);
    if (found != communicators().end()) return found->second;
    throw Refusal{ncclInvalidArgument, "comm is null or was destroyed; expected a communicator"};
}

// The end of what was handed over last, to any communicator.
inline Place last_collective = [] {
    const Place before = std::make_shared<Marker>();
    before->reach();
    return before;
}();

struct Issued { std::shared_ptr<ncclComm> comm; Call call; cudaStream_t stream; };
inline thread_local std::vector<Issued> group;   // calls since ncclGroupStart
inline thread_local int group_depth = 0;
inline thread_local ncclResult_t group_error = ncclSuccess;   // of a call inside

// As a kernel is handed to its stream, and behind all earlier collectives, whatever their streams. NCCL orders those of
// one communicator; that two take turns in the same order on all ranks is up to the program there, which a GPU may
// punish with a deadlock. After an error ranks are no longer at the same place, so a communicator keeps it.
inline void issue(const Issued& issued) {
    const auto& [comm, call, stream] = issued;
    const auto work = [comm = comm, call = call] {
        if (comm->error == ncclSuccess) comm->error = guarded([&] { perform(*comm, call); });
        return comm->error == ncclSuccess || comm->aborted ? cudaSuccess : report(cudaErrorUnknown);
    };
    if (comm->error != ncclSuccess) throw Refusal{comm->error, "the communicator has failed: " + last_error};
    if (!waits(stream)) {
        if (work() != cudaSuccess) throw Refusal{comm->error, last_error};
        return;
    }
    cudaError_t error = refuse_implicit(stream);
    if (error == cudaSuccess && in_capture(stream)) error = note(stream, work);
    else if (error == cudaSuccess) last_collective = put_off(stream, work, {last_collective});
    if (error == cudaSuccess) return;
    throw Refusal{ncclUnhandledCudaError, describe(call.is) + ": " + cudaGetErrorString(error)};
}

inline void check_buffer(const std::string& name, const void* data, size_t bytes) {
    if (bytes == 0) return;
    const auto refuse = [&](const char* what) { throw Refusal{ncclInvalidArgument, name + what}; };
    if (data == nullptr) refuse(" is null");
    if (card() == nullptr) return;
    if (Sides(data, data).to_pageable) refuse(" is pageable memory of the host; expected memory of the device");
    if (!ends_inside(data, bytes)) refuse(" goes past the end of its allocation");
}

inline void check_call(const Call& call, const ncclComm& comm, cudaStream_t stream) {
    const std::string name = std::string(kind_names[call.is.kind]) + " on rank " + std::to_string(comm.rank) + ": ";
    const auto check_number = [&](const char* what, size_t value, size_t end) {
        if (value >= end) throw Refusal{ncclInvalidArgument, name + what + " is " + std::to_string(value) +
                                                               "; expected less than " + std::to_string(end)};
    };
    const size_t size = static_cast<size_t>(comm.size);
    check_number("data type", static_cast<size_t>(call.is.type), ncclNumTypes);
    check_number("operation", static_cast<size_t>(call.is.op), ncclNumOps);
    check_number("root or peer", static_cast<size_t>(call.is.root), size);
    check_number("count", call.is.count, size_t{1} << 48);
    if (std::count(streams().begin(), streams().end(), real(stream)) == 0)
        throw Refusal{ncclInvalidArgument, name + "the stream does not exist"};
    const bool no_send = call.is.kind == RECEIVE || (call.is.kind == BROADCAST && comm.rank != call.is.root);
    const size_t send = no_send ? 0 : call.bytes() * (call.is.kind == REDUCE_SCATTER ? size : 1);
    const size_t recv = call.is.kind == SEND ? 0 : call.bytes() * (call.is.kind == ALL_GATHER ? size : 1);
    check_buffer(name + "sendbuff", call.send, send);
    check_buffer(name + "recvbuff", call.recv, recv);
    const ptrdiff_t own = static_cast<ptrdiff_t>(call.bytes()) * comm.rank, distance = call.recv - call.send;
    const ptrdiff_t in_place = call.is.kind == REDUCE_SCATTER ? own : call.is.kind == ALL_GATHER ? -own : 0;
    const bool overlap = send > 0 && recv > 0 && distance < ptrdiff_t(send) && -distance < ptrdiff_t(recv);
    if (overlap && distance != in_place)
        throw Refusal{ncclInvalidArgument, name + "the buffers overlap, recvbuff - sendbuff is " +
                                             std::to_string(distance) + " bytes; expected " + std::to_string(in_place)};
}

inline ncclResult_t enqueue(const Call& call, ncclComm_t comm, cudaStream_t stream) {
    const ncclResult_t result = guarded([&] {
        const Issued issued = {find(comm), call, stream};
        check_call(call, *comm, stream);
        if (group_depth == 0) issue(issued);
        else group.push_back(issued);
    });
    if (group_error == ncclSuccess && group_depth > 0) group_error = result;
    return result;
}

}  // namespace cuda_cpu::nccl

inline const char* ncclGetLastError(ncclComm_t) { return cuda_cpu::nccl::last_error.c_str(); }

inline ncclResult_t ncclGroupStart() {
    cuda_cpu::nccl::group_depth++;
    return ncclSuccess;
}

// The outermost one issues the group's calls in their order, a communicator's messages together; none, if one of them
// was refused.
inline ncclResult_t ncclGroupEnd() {
    using namespace cuda_cpu::nccl;
    return guarded([] {
        if (group_depth == 0) throw Refusal{ncclInvalidUsage, "ncclGroupEnd: no group has begun"};
        if (--group_depth > 0) return;
        const std::vector<Issued> calls = std::exchange(group, {});
        if (const ncclResult_t error = std::exchange(group_error, ncclSuccess)) throw Refusal{error, last_error};
        std::vector<Issued> merged;
        for (const auto& [comm, call, stream] : calls) {
            const bool is_message = call.is.kind >= SEND;
            auto to = std::find_if(merged.begin(), merged.end(), [of = comm](const Issued& issued) {
                return issued.comm == of && issued.call.is.kind == MESSAGES;
            });
            if (!is_message) merged.push_back({comm, call, stream});
            if (is_message && to == merged.end())
                to = merged.insert(to, {comm, {MESSAGES, nullptr, nullptr, 0, 0}, stream});
            if (is_message) to->call.messages.push_back(call);
        }
        for (const Issued& issued : merged) issue(issued);
    });
}

inline ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({ALL_REDUCE, sendbuff, recvbuff, count, datatype, op}, comm, stream);
}
inline ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, op}, comm, stream);
}
inline ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                                  ncclComm_t comm, cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({ALL_GATHER, sendbuff, recvbuff, sendcount, datatype}, comm, stream);
}
inline ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({BROADCAST, sendbuff, recvbuff, count, datatype, 0, root}, comm, stream);
}
inline ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({SEND, sendbuff, nullptr, count, datatype, 0, peer}, comm, stream);
}
inline ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    using namespace cuda_cpu::nccl;
    return enqueue({RECEIVE, nullptr, recvbuff, count, datatype, 0, peer}, comm, stream);
}

// ==== communicators =====================================================================================

inline ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    using namespace cuda_cpu::nccl;
    return guarded([&] {
        std::random_device random;
        Origin origin{{}, getpid(), memfd_create("nccl", MFD_CLOEXEC), random() * (uint64_t{1} << 32) | random()};
        memcpy(origin.mark, id_mark, sizeof(id_mark));
        const bool made = origin.file >= 0 && ftruncate(origin.file, sizeof(Shared)) == 0;
        if (!made || pwrite(origin.file, &origin.token, sizeof(origin.token), 0) != sizeof(origin.token))
            throw Refusal{ncclSystemError, std::string("ncclGetUniqueId: shared memory: ") + strerror(errno)};
        *id = {};
        memcpy(id->internal, &origin, sizeof(origin));
    });
}

namespace cuda_cpu::nccl {

// Maps the memory that an id names.
inline void join(ncclComm& comm, const Origin& origin) {
    const std::string path = "/proc/" + std::to_string(origin.process) + "/fd/" + std::to_string(origin.file);
    const std::string rank = "rank " + std::to_string(comm.rank);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* const all = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (all != MAP_FAILED) comm.shared = static_cast<Shared*>(all);
    if (comm.shared == nullptr || comm.shared->token != origin.token)
        throw Refusal{ncclSystemError, "the unique id was made on another machine, or by a process that has ended; "
                                     "expected all ranks on one machine"};
    int size = 0;
    if (!comm.shared->size.compare_exchange_strong(size, comm.size) && size != comm.size)
        fail_all(*comm.shared, ncclInvalidArgument, "nranks is " + std::to_string(comm.size) + " on " + rank + " and " +
                                                        std::to_string(size) + " on another");
    if (comm.shared->joined[comm.rank].exchange(true))
        throw Refusal{ncclInvalidUsage, rank + " has joined already; expected a new unique id"};
    int device = 0;
    cudaGetDevice(&device);
    const std::vector<int> devices = gather_values(comm, device);
    for (size_t b = 0; b < devices.size(); b++)
        for (size_t a = 0; a < b; a++)
            if (devices[a] == devices[b])
                throw Refusal{ncclInvalidUsage, "duplicate GPU: ranks " + std::to_string(a) + " and " + std::to_string(b) +
                              " both use device " + std::to_string(devices[a])};
}

}  // namespace cuda_cpu::nccl

inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
    using namespace cuda_cpu::nccl;
    return guarded([&] {
        Origin origin;
        memcpy(&origin, id.internal, sizeof(origin));
        if (nranks < 1 || nranks > most_ranks || rank < 0 || rank >= nranks)
            throw Refusal{ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(nranks) +
                                                 "; expected at most " + std::to_string(most_ranks) + " ranks"};
        if (memcmp(origin.mark, id_mark, sizeof(id_mark)) != 0)
            throw Refusal{ncclInvalidArgument, "the unique id does not come from ncclGetUniqueId"};
        const auto created = std::make_shared<ncclComm>(rank, nranks);
        join(*created, origin);
        const char* connect_late = getenv("NCCL_RUNTIME_CONNECT");
        if (connect_late != nullptr && *connect_late == '0') allocate_buffers(*created);
        *comm = created.get();
        communicators()[*comm] = created;
    });
}

// Ranks of one color become a communicator, ordered by key, then by rank.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t*) {
    using namespace cuda_cpu::nccl;
    struct Wish { int color, key, rank; ncclUniqueId id; };
    std::vector<Wish> members;
    const ncclResult_t result = guarded([&] {
        cuda_cpu::run_until_reached(last_collective);
        Wish mine{color, key, find(comm)->rank, {}};
        ncclGetUniqueId(&mine.id);
        for (const Wish& wish : gather_values(*comm, mine))
            if (wish.color == color) members.push_back(wish);
    });
    *newcomm = nullptr;
    if (result != ncclSuccess || color == NCCL_SPLIT_NOCOLOR) return result;
    std::stable_sort(members.begin(), members.end(), [](const Wish& a, const Wish& b) { return a.key < b.key; });
    int own = 0;
    while (members[static_cast<size_t>(own)].rank != comm->rank) own++;
    return ncclCommInitRank(newcomm, static_cast<int>(members.size()), members[0].id, own);
}

// Does what waits in queues first.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    using namespace cuda_cpu::nccl;
    return guarded([&] {
        const auto last = find(comm);
        cuda_cpu::run_until_reached(last_collective);   // whose error is the communicator's
        communicators().erase(comm);
        if (const ncclResult_t error = last->error.exchange(ncclInvalidUsage)) throw Refusal{error, last_error};
    });
}

// Does not wait: work that is not done yet is dropped.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    using namespace cuda_cpu::nccl;
    return guarded([&] {
        const auto last = find(comm);
        last->aborted = true;
        last->error = ncclInvalidUsage;
        communicators().erase(comm);
    });
}

// What went wrong in a queue.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return cuda_cpu::nccl::guarded([&] { *error = cuda_cpu::nccl::find(comm)->error; });
}

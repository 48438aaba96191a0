// The processes ("ranks") of a run on several GPUs, and the device of each. Included by train_gpt.cu, whose section
// "many GPUs" describes what they compute.
//
//   start       --gpus N forks N processes before the first CUDA or OpenMP call and supervises them. Alternatively
//               torchrun, srun or mpirun starts the processes and numbers them by environment variables
//   rendezvous  rank 0 listens on MASTER_ADDR:MASTER_PORT (TCP) and sends NCCL's unique id to each rank
//   end         a watchdog thread ends its rank if it makes no progress; then the supervising process or the launcher
//               ends the others
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <thread>

#if !defined(__NVCC__) || defined(HAVE_NCCL)
#include <nccl.h>
inline bool has_nccl() { return true; }
#else   // declarations of the NCCL functions that the program uses; never called
inline bool has_nccl() { return false; }
enum ncclResult_t { ncclSuccess, ncclInvalidUsage = 5, ncclInProgress = 7 };
enum ncclDataType_t { ncclUint8 = 1, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum, ncclMax };
struct ncclUniqueId { char internal[128]; };
using ncclComm_t = void*;
constexpr auto ncclAllReduce = [](auto...) { return ncclInvalidUsage; };
constexpr auto ncclReduce = ncclAllReduce, ncclReduceScatter = ncclAllReduce, ncclAllGather = ncclAllReduce,
               ncclBroadcast = ncclAllReduce, ncclCommInitRank = ncclAllReduce, ncclCommSplit = ncclAllReduce,
               ncclGetUniqueId = ncclAllReduce, ncclCommDestroy = ncclAllReduce, ncclGetVersion = ncclAllReduce,
               ncclCommGetAsyncError = ncclAllReduce;
inline const char* ncclGetErrorString(ncclResult_t) { return "this build has no NCCL"; }
inline const char* ncclGetLastError(ncclComm_t) { return ""; }
#endif

// A set of ranks that communicate with each other, and this process's rank in it.
struct Group {
    ncclComm_t comm = nullptr;
    size_t rank = 0, size = 1;
    cudaStream_t stream = nullptr;   // carries the group's communication
    cudaEvent_t sent = nullptr;      // after communication that has no event of its own

    bool first() const { return rank == 0; }
    bool alone() const { return size == 1; }
};

// All ranks.
struct World : Group {
    size_t on_machine = 0, of_machine = 1;   // rank and size among the processes of this machine
    std::string address = "127.0.0.1", port; // of rank 0
    Descriptor listener;                     // rank 0's
    const struct Launcher* launcher = nullptr;
    std::atomic<long> own_step{0}, *step = &own_step;   // the current step; with --gpus the supervisor reads it
    cudaEvent_t computed = nullptr;
    char* staging = nullptr;                 // device memory for exchanges of host data
    bool overlap = true;
    double bytes_sent = 0;                   // by this GPU, if collectives use rings
};
static World world;

// Of this rank: the ranks with which it shares the parts of layers, and its tensor group. Rank d t + i is rank d of the
// one and i of the other; t = 1 without --tensor-parallel.
static Group data_ranks, tensor_ranks;

// Returns the groups that have a communicator of their own.
std::vector<const Group*> connected_groups() {
    if (tensor_ranks.alone()) return {&world};
    return {&tensor_ranks, &data_ranks, &world};
}

constexpr size_t STAGING_BYTES = 1 << 16;
constexpr int NCCL_WITH_LAUNCH_ORDER = 22600;   // NCCL_LAUNCH_ORDER_IMPLICIT

void check(ncclResult_t status, const char* what) {
    if (status != ncclSuccess)
        throw Failure("%s: %s (%s)", what, ncclGetErrorString(status), ncclGetLastError(world.comm));
}

int nccl_version() {   // 0 if this process is alone
    int version = 0;
    if (!world.alone()) check(ncclGetVersion(&version), "ncclGetVersion");
    return version;
}

// ---- watchdog -----------------------------------------------------------------------------------
// A thread that ends the process if it makes no progress for --timeout seconds, or if NCCL reports an asynchronous
// error. Each launch of work on a stream and each blocking call reports progress, under its name.

// Pauses the watchdog while it exists: for work of the host that may take long.
struct WatchdogPause {
    WatchdogPause() { activity.paused++; }
    ~WatchdogPause() {
        progress("resumed");
        activity.paused--;
    }
};

// Ends this process with a line that names rank, host, step and current activity.
[[noreturn]] void end_rank(const std::string& why) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    const std::string line = format("train_gpt: rank %zu on %s, step %ld, in %s: %s\n", world.rank, host,
                                    world.step->load(), activity.name.load(), why.c_str());
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) {}
    // When the first rank ends, the launcher ends the others; the delay lets them print their lines too.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    _exit(1);
}

void run_watchdog(double timeout) {
    const double interval = std::min(1.0, timeout / 10);
    double idle = 0;
    for (long last = -1;; std::this_thread::sleep_for(std::chrono::duration<double>(interval))) {
        const long now = activity.count;
        // Counts intervals instead of reading a clock, so that a suspended process does not time out when it continues.
        idle = now != last || activity.paused > 0 ? 0 : idle + interval;
        last = now;
        ncclResult_t error = ncclSuccess;
        if (activity.connected)
            for (const Group* group : connected_groups())
                if (error == ncclSuccess) ncclCommGetAsyncError(group->comm, &error);
        const bool failed = error != ncclSuccess && error != ncclInProgress;
        if (failed && idle >= 2 * interval) end_rank(format("NCCL reports: %s", ncclGetErrorString(error)));
        if (idle >= timeout) end_rank(format("no progress for %g s (--timeout)", timeout));
    }
}

// ---- exchanges of host data ---------------------------------------------------------------------

ncclDataType_t nccl_type(DType dtype) {
    return dtype == DType::FP32 ? ncclFloat32 : dtype == DType::FP16 ? ncclFloat16 : ncclBfloat16;
}

// data (n) = the sum of all ranks' data; exact if all terms but one are 0. `name` is the activity for the watchdog.
template <typename T>
void sum_over_ranks(T* data, size_t n, ncclDataType_t type, const char* name = "exchange of hosts") {
    constexpr size_t PIECE = STAGING_BYTES / sizeof(T);
    for (size_t done = 0; done < n; done += PIECE) {
        const size_t now = std::min(PIECE, n - done), bytes = now * sizeof(T);
        progress(name);
        check(cudaMemcpyAsync(world.staging, data + done, bytes, cudaMemcpyHostToDevice, world.stream), "cudaMemcpy");
        check(ncclAllReduce(world.staging, world.staging, now, type, ncclSum, world.comm, world.stream),
              "ncclAllReduce");
        check(cudaMemcpyAsync(data + done, world.staging, bytes, cudaMemcpyDeviceToHost, world.stream), "cudaMemcpy");
        check(cudaStreamSynchronize(world.stream), "an exchange between ranks");
    }
    progress("compute");
}

// Returns, on all ranks, the value of each rank.
std::vector<double> from_all(double mine) {
    std::vector<double> all(world.size, 0.0);
    all[world.rank] = mine;
    if (!world.alone()) sum_over_ranks(all.data(), all.size(), ncclFloat64);
    return all;
}
// Sums in the order of the ranks, so all ranks get the same bits.
double sum_of_all(double mine) {
    const std::vector<double> all = from_all(mine);
    return std::accumulate(all.begin(), all.end(), 0.0);
}
double least_of_all(double mine) {
    const std::vector<double> all = from_all(mine);
    return *std::min_element(all.begin(), all.end());
}

// Blocks until all ranks have called it. Each call counts as progress of every rank: while rank 0 writes a checkpoint,
// the others call it after each chunk. `name` is the activity for the watchdog, during the call and after it.
void wait_for_all(const char* name) {
    char nothing = 0;
    if (!world.alone()) sum_over_ranks(&nothing, 1, ncclUint8, name);
    progress(name);
}

// Returns rank 0's text, on all ranks.
std::string from_first(std::string text) {
    if (world.alone()) return text;
    std::string same(static_cast<size_t>(from_all(text.size())[0]), 0);
    if (world.first()) same = text;
    sum_over_ranks(same.data(), same.size(), ncclUint8);
    return same;
}

// ---- processes: variables of launchers ----------------------------------------------------------

struct Launcher { const char *name, *rank, *size, *on_machine, *of_machine; };
constexpr Launcher LAUNCHERS[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};
constexpr const Launcher &TORCHRUN = LAUNCHERS[0], &MPICH = LAUNCHERS[2], &SRUN = LAUNCHERS[3];

// Returns the whole number in one of a launcher's variables.
size_t number_in(const char* name, const Launcher& l) {
    const char* text = getenv(name);
    if (!text)
        throw UserError("%s is not set: expected all of %s, %s and %s, as %s sets them, or none", name, l.rank, l.size,
                        l.on_machine, l.name);
    long number = 0;   // SLURM_STEP_TASKS_PER_NODE may be 8(x2): only the part before the parenthesis is read
    const std::string all = text;
    if (parse_number(all.substr(0, all.find('(')), number) && number >= 0) return static_cast<size_t>(number);
    throw UserError("%s=%s: expected a whole number", name, text);
}

// Returns the first name of a list such as node[07-12,20].
std::string first_host(const std::string& list) {
    const size_t bracket = list.find('['), comma = list.find(',');
    if (bracket == list.npos || comma < bracket) return list.substr(0, comma);
    return list.substr(0, bracket) + list.substr(bracket + 1, list.find_first_of(",-]", bracket) - bracket - 1);
}

// Sets the address at which rank 0 listens: MASTER_ADDR and MASTER_PORT, or one that all ranks derive from the same
// variables.
void find_address(const Launcher& launcher) {
    const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT"), *nodes = getenv("SLURM_STEP_NODELIST");
    const bool several_machines = world.of_machine < world.size;
    const bool needs_both = &launcher == &TORCHRUN || address || port || (several_machines && !nodes);
    if (needs_both && !(address && port))
        throw UserError("%s is not set: expected both MASTER_ADDR and MASTER_PORT, where rank 0 of %zu listens",
                        address ? "MASTER_PORT" : "MASTER_ADDR", world.size);
    if (address) {
        const char* agent = getenv("TORCHELASTIC_USE_AGENT_STORE");   // if True, torchrun itself listens on MASTER_PORT
        world.address = address;
        world.port = std::to_string(number_in("MASTER_PORT", launcher) + (agent && agent == std::string("True")));
        return;
    }
    if (several_machines) world.address = first_host(nodes);
    constexpr size_t FIRST_PORT = 20000, PORTS = 10000;   // below the range of ephemeral ports
    std::string job = std::to_string(getppid());          // all ranks of a machine have the same parent
    for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"})
        if (getenv(name)) job = std::string(getenv(name)) + (job.find('.') == job.npos ? "." : job);
    world.port = std::to_string(FIRST_PORT + std::hash<std::string>()(job) % PORTS);
}

// Sets this process's rank from its launcher's variables. Without such variables the process is alone.
void find_rank() {
    for (const Launcher& l : LAUNCHERS) {
        if (!getenv(l.rank) && !getenv(l.size)) continue;
        if (&l == &MPICH && !getenv(l.on_machine) && getenv(SRUN.size)) continue;   // set by srun --mpi=pmi2
        // A batch script has a SLURM_PROCID but no step. If srun starts another launcher, srun's variables number
        // machines.
        if (&l == &SRUN && (world.launcher || !getenv(l.size))) continue;
        const size_t rank = number_in(l.rank, l), size = number_in(l.size, l), on_machine = number_in(l.on_machine, l);
        if (rank >= size)
            throw UserError("%s=%zu: expected less than %s=%zu, the number of ranks", l.rank, rank, l.size, size);
        if (const Launcher* other = world.launcher; other && (rank != world.rank || size != world.size))
            throw UserError("%s=%zu and %s=%zu, but %s=%zu and %s=%zu: expected variables of one launcher, found %s "
                            "and %s", other->rank, world.rank, other->size, world.size, l.rank, rank, l.size,
                            size, other->name, l.name);
        if (world.launcher) continue;
        world.launcher = &l;
        world.rank = rank;
        world.size = size;
        world.on_machine = on_machine;
        world.of_machine = getenv(l.of_machine) ? number_in(l.of_machine, l) : size;
    }
    if (!world.alone()) find_address(*world.launcher);
}

// ---- processes: rendezvous ----------------------------------------------------------------------

// The message from a rank to rank 0, and rank 0's answer.
struct Message {
    char magic[16] = "gpt.cu rank 2";
    uint32_t rank = world.rank, size = world.size;
    ncclUniqueId id = {};
};

bool send_message(int fd, const Message& m) { return send(fd, &m, sizeof(m), MSG_NOSIGNAL) == sizeof(m); }

// Returns false if the bytes received are not a Message, or if none arrive within the socket's time limit.
bool receive(int fd, Message& m) {
    return recv(fd, &m, sizeof(m), MSG_WAITALL) == sizeof(m) && memcmp(m.magic, Message().magic, sizeof(m.magic)) == 0;
}

// Returns a socket bound to rank 0's address, or connected to it: `attach` is bind or connect. Sending and receiving on
// it, and on connections that it accepts, block for at most `seconds` + 1. If `attach` fails, sets `problem` and
// returns a negative Descriptor.
Descriptor open_socket(decltype(connect)* attach, double seconds, std::string& problem) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_flags = attach == bind ? AI_PASSIVE : 0;
    hints.ai_socktype = SOCK_STREAM;
    if (const int unknown = getaddrinfo(world.address.c_str(), world.port.c_str(), &hints, &found)) {
        problem = gai_strerror(unknown);
        return Descriptor();
    }
    Descriptor fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    const timeval limit = {static_cast<time_t>(seconds) + 1, 0};
    for (int kind : {SO_SNDTIMEO, SO_RCVTIMEO}) setsockopt(fd, SOL_SOCKET, kind, &limit, sizeof(limit));
    const bool attached = attach(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                          (attach != bind || listen(fd, SOMAXCONN) == 0);
    problem = attached ? "" : strerror(errno);
    freeaddrinfo(found);
    return attached ? std::move(fd) : Descriptor();
}

// Opens rank 0's socket. With port 0 the system chooses a free port, which is stored in world.port.
void open_listener() {
    std::string problem;
    world.listener = open_socket(bind, 0, problem);
    if (world.listener < 0)
        throw UserError("%s port %s: rank 0 cannot listen there: %s; set MASTER_ADDR to an address of this machine and "
                        "MASTER_PORT to a free port", world.address.c_str(), world.port.c_str(), problem.c_str());
    sockaddr_in own = {};
    socklen_t size = sizeof(own);
    if (world.port == "0" && getsockname(world.listener, reinterpret_cast<sockaddr*>(&own), &size) == 0)
        world.port = std::to_string(ntohs(own.sin_port));
}

// Sends NCCL's unique id to all other ranks once all have connected. Ignores connections of other programs.
void welcome_ranks(const ncclUniqueId& id, double timeout) {
    if (world.listener < 0) open_listener();
    Message welcome;
    welcome.id = id;
    std::map<size_t, Descriptor> ranks;   // the connection of each rank
    ranks.emplace(0, std::move(world.listener));
    for (const double deadline = seconds_now() + timeout; ranks.size() < world.size;) {
        Message hello;
        Descriptor fd(accept4(ranks.at(0), nullptr, nullptr, SOCK_CLOEXEC));
        if (fd >= 0 && receive(fd, hello) &&
            (hello.size != world.size || !ranks.emplace(hello.rank, std::move(fd)).second))
            throw UserError("rank %u of %u has connected to rank 0: expected each rank of %zu once", hello.rank,
                            hello.size, world.size);
        std::string missing;
        for (size_t r = 1; r < world.size; r++)
            if (!ranks.count(r)) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
        if (!missing.empty() && seconds_now() > deadline)
            throw Failure("--timeout %g: rank 0 has waited this long at %s port %s; missing ranks: %s", timeout,
                          world.address.c_str(), world.port.c_str(), missing.c_str());
    }
    for (const auto& [rank, fd] : ranks)
        if (rank > 0) send_message(fd, welcome);   // may fail if the rank has died, which the launcher notices
}

// Returns the unique id from rank 0. Retries, because rank 0 may not listen yet.
ncclUniqueId call_rank_0(double timeout) {
    std::string problem;
    for (const double deadline = seconds_now() + timeout; seconds_now() < deadline; usleep(50000)) {
        const Descriptor fd = open_socket(connect, deadline - seconds_now(), problem);
        if (fd < 0) continue;
        Message welcome;
        if (send_message(fd, Message()) && receive(fd, welcome)) return welcome.id;
        problem = "no answer";
    }
    throw Failure("--timeout %g: rank %zu of %zu cannot connect to rank 0 at %s port %s: %s", timeout, world.rank,
                  world.size, world.address.c_str(), world.port.c_str(), problem.c_str());
}

// ---- processes: --gpus --------------------------------------------------------------------------

// Returns the number of GPUs. Asks CUDA in a child process, because CUDA must not be initialised before a fork.
int count_gpus() {
    const pid_t child = fork();
    if (child == 0) {
        int count = 0;
        _exit(cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, 255) : 0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) throw Failure("fork: %s", strerror(errno));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// Prints why the first rank failed, and the checkpoint from which the run can be resumed.
void report_death(const Options& o, size_t rank, pid_t process, int status, long step) {
    const int number = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    const std::string cause = WIFEXITED(status) ? format("exited with code %d", number)
                                                : format("was killed by signal %d (%s)", number, strsignal(number));
    const auto checkpoints = list_checkpoints(o.out);   // none without --out
    fprintf(stderr, "train_gpt: rank %zu (process %d) %s in step %ld; the last checkpoint is %s\n", rank, process,
            cause.c_str(), step, checkpoints.empty() ? "none" : checkpoints.rbegin()->second.c_str());
}

// Blocks until all ranks have ended. Forwards `signals`, which are blocked, to the ranks. When a rank fails, ends the
// others. Returns the exit code of the run.
int supervise(const Options& o, std::vector<pid_t> ranks, const std::atomic<long>* steps, const sigset_t& signals) {
    constexpr double GRACE = 2;   // seconds from SIGTERM to SIGKILL
    constexpr timespec INTERVAL = {0, 100000000};
    int code = 0, stop = 0;       // stop: the signal that the user has sent
    double failed_at = 0;
    auto signal_all = [&](int number) {
        for (pid_t process : ranks)
            if (process > 0) kill(process, number);
    };
    for (size_t alive = ranks.size(); alive > 0;) {
        siginfo_t info;
        const int number = sigtimedwait(&signals, &info, &INTERVAL);
        if (number > 0 && number != SIGCHLD) {
            stop = number;
            if (info.si_code != SI_KERNEL) signal_all(number);   // a terminal sends its signals to all ranks itself
        }
        int status;
        for (pid_t process; (process = waitpid(-1, &status, WNOHANG)) > 0;) {
            const auto found = std::find(ranks.begin(), ranks.end(), process);
            if (found == ranks.end()) continue;
            *found = 0;
            alive--;
            if (status == 0 || code != 0) continue;
            failed_at = seconds_now();
            code = WIFEXITED(status) ? WEXITSTATUS(status) : stop ? 128 + stop : 1;
            // In these cases the user knows the cause: the rank has printed it, or it is the signal that the user sent.
            const bool is_known = code == 2 || (WIFSIGNALED(status) && WTERMSIG(status) == stop);
            const size_t rank = found - ranks.begin();
            if (!is_known) report_death(o, rank, process, status, steps[rank]);
            signal_all(SIGTERM);
        }
        if (failed_at > 0 && seconds_now() - failed_at > GRACE) signal_all(SIGKILL);
    }
    return code;
}

// With --gpus N starts and supervises N ranks. Returns the run's exit code in the supervising process; returns -1 in
// each rank and without --gpus.
int start_processes(const Options& o) {
    if (o.gpus == 1) return -1;
    constexpr int MAX_EMULATED = 32;   // devices of dev/cpu, which emulates those that --gpus names: max_ranks in nccl.h
    if (o.gpus != ALL_GPUS) setenv("CUDA_CPU_DEVICES", std::to_string(std::min(o.gpus, MAX_EMULATED)).c_str(), 0);
    const size_t found = count_gpus(), count = o.gpus == ALL_GPUS ? found : o.gpus;
    if (found > 0 && count > found)   // if none is found, each rank reports why
        throw UserError("--gpus %zu: expected at most %zu, the GPUs of this machine or emulated ones", count, found);
    if (count <= 1) return -1;
    if (!world.alone())
        throw UserError("--gpus %zu: expected --gpus or a launcher, found %s=%zu, which %s has set", count,
                        world.launcher->size, world.size, world.launcher->name);
    world.port = "0";
    open_listener();
    sigset_t signals, before;
    sigemptyset(&signals);
    for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, number);
    sigprocmask(SIG_BLOCK, &signals, &before);
    void* shared = mmap(nullptr, count * sizeof(*world.step), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                        0);
    if (shared == MAP_FAILED) throw Failure("mmap: %s", strerror(errno));
    const auto steps = static_cast<std::atomic<long>*>(shared);
    std::vector<pid_t> ranks;
    const pid_t parent = getpid();
    fflush(nullptr);
    for (size_t r = 0; r < count; r++) {
        ranks.push_back(fork());
        if (ranks[r] < 0) throw Failure("fork: %s", strerror(errno));
        if (ranks[r] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent) _exit(1);
        sigprocmask(SIG_SETMASK, &before, nullptr);
        world.step = &steps[r];
        world.rank = world.on_machine = r;
        world.size = world.of_machine = count;
        if (!world.first()) world.listener = Descriptor();
        return -1;
    }
    world.listener = Descriptor();
    return supervise(o, ranks, steps, signals);
}

// ---- begin and end ------------------------------------------------------------------------------

cudaStream_t communication_stream() {
    int least, greatest;
    cudaStream_t stream;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return stream;
}

// Sets data_ranks and tensor_ranks, for tensor groups of `size` ranks. tensor_ranks has a stream of its own if NCCL
// orders the launches of several communicators; otherwise it shares the world's, as data_ranks does.
void connect_groups(size_t size) {
    data_ranks = world;
    if (size == 1) return;
    auto split = [](Group& group, size_t color, size_t rank, size_t ranks) {
        group = {nullptr, rank, ranks, world.stream, nullptr};
        check(ncclCommSplit(world.comm, int(color), int(rank), &group.comm, nullptr), "ncclCommSplit");
        check(cudaEventCreateWithFlags(&group.sent, cudaEventDisableTiming), "cudaEventCreate");
    };
    split(data_ranks, world.rank % size, world.rank / size, world.size / size);
    split(tensor_ranks, world.rank / size, world.rank % size, size);
    if (nccl_version() >= NCCL_WITH_LAUNCH_ORDER) tensor_ranks.stream = device.tensor = communication_stream();
}

// Creates the stream and NCCL's communicators, after the device has been opened. A first collective makes NCCL allocate
// its memory now. tensor: the size of a tensor group.
void connect_ranks(double timeout, size_t tensor) {
    if (world.alone()) return;
    if (world.size % tensor != 0)
        throw UserError("--tensor-parallel %zu: expected a divisor of the number of GPUs, found %zu GPUs", tensor,
                        world.size);
    if (world.of_machine % tensor != 0 || world.on_machine % tensor != world.rank % tensor)
        throw UserError("--tensor-parallel %zu: expected groups of neighbouring ranks on one machine, found rank %zu "
                        "as process %zu of %zu on its machine", tensor, world.rank, world.on_machine, world.of_machine);
    setenv("NCCL_ALGO", "^NVLS,NVLSTree", 0);       // excluded: the order of their sums varies (NVIDIA/nccl#1497)
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);         // allocates all memory now, not at the first use of each algorithm
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);   // so that communicators on different streams cannot deadlock
    world.stream = communication_stream();
    for (cudaEvent_t* event : {&world.computed, &world.sent})
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaMalloc(reinterpret_cast<void**>(&world.staging), STAGING_BYTES), "cudaMalloc");
    ncclUniqueId id = {};
    if (world.first()) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    {
        const WatchdogPause has_a_deadline_itself;
        if (world.first()) welcome_ranks(id, timeout);
        else id = call_rank_0(timeout);
    }
    progress("ncclCommInitRank");
    check(ncclCommInitRank(&world.comm, int(world.size), id, int(world.rank)), "ncclCommInitRank");
    connect_groups(tensor);
    activity.connected = true;
    wait_for_all("the first collective");
}

// Called first by each subcommand. With several ranks: silences stdout of all but rank 0 and starts the watchdog.
void begin_ranks(const Options& o) {
    if (world.alone()) return;
    if (!has_nccl())
        throw UserError("%zu processes (--gpus, or a launcher's) need NCCL, which this build lacks: pip install "
                        "nvidia-nccl-cu%d, then make", world.size, CUDART_VERSION / 1000);
    if (!world.first() && !freopen("/dev/null", "w", stdout)) throw Failure("/dev/null: %s", strerror(errno));
    setenv("CUDA_CPU_DEVICES", std::to_string(world.of_machine).c_str(), 0);   // dev/cpu: a device for each process
    std::thread(run_watchdog, o.timeout).detach();
}

void leave_ranks() {
    if (world.alone()) return;
    activity.connected = false;
    progress("ncclCommDestroy");
    for (const Group* group : connected_groups()) check(ncclCommDestroy(group->comm), "ncclCommDestroy");
}

// Returns the number of CPU threads of this rank: an equal part of the machine's cores. Returns 0, which leaves the
// choice to dev/cpu, if the process is alone or bound to some cores, or if OMP_NUM_THREADS is set.
int threads_of_rank() {
    cpu_set_t cores;
    if (world.of_machine == 1 || getenv("OMP_NUM_THREADS")) return 0;
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 0;
    const bool bound = CPU_COUNT(&cores) < sysconf(_SC_NPROCESSORS_ONLN);
    return bound ? 0 : std::max(1, CPU_COUNT(&cores) / static_cast<int>(world.of_machine));
}

// ---- device

// Returns whether this build and this device have tensor cores of a kind. dev/cpu emulates both kinds at warp size 32.
bool has_tensor_cores(TensorCores kind) {
    if (kind == TensorCores::NONE) return true;
    if (!MAY_USE_TENSOR_CORES) return false;
    const int major = device.properties.major;
    return device.is_cpu() || (kind == TensorCores::WGMMA ? major == 9 && compiled_with_wgmma() : major >= 8);
}

TensorCores choose_tensor_cores(TensorCores wanted) {
    if (wanted == TensorCores::AUTO && device.is_cpu()) return TensorCores::NONE;   // the portable kernels are faster
    for (TensorCores kind : {TensorCores::WGMMA, TensorCores::MMA, TensorCores::NONE})
        if ((wanted == TensorCores::AUTO || wanted == kind) && has_tensor_cores(kind)) return kind;
    throw UserError("--tensor-cores %s: not available on %s in %s; expected auto, which takes the best available",
                    name_of(wanted), device.properties.name, name_of(FLOATX));
}

// Returns why no device can be used; empty if one can. driver: the CUDA version that the driver supports, such as
// 12040; 0 without a driver.
std::string device_problem(cudaError_t status, int count, int driver) {
    if (status == cudaSuccess) return count > 0 ? "" : "no GPU was found";
    if (driver == 0) return "no NVIDIA driver responds: install one, so that nvidia-smi lists the GPU";
    if (driver / 1000 < CUDART_VERSION / 1000)
        return format("the NVIDIA driver supports CUDA %d.%d, this build needs %d.0: install a newer driver",
                      driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
    return cudaGetErrorString(status);
}

std::string no_device() {
    int count = 0, driver = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    return device_problem(status, count, driver);
}

// Opens this rank's device. threads: the value of --threads for dev/cpu; 0 if it is not given.
void open_device(TensorCores wanted, int threads = 0) {
    const std::string problem = no_device();
    if (!problem.empty()) throw Failure("%s; make DEVICE=cpu builds for the CPU instead", problem.c_str());
    const int workers = threads > 0 ? threads : threads_of_rank();
    if (workers > 0) setenv("CUDA_CPU_THREADS", std::to_string(workers).c_str(), 1);   // for dev/cpu's cudaSetDevice
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (world.of_machine > static_cast<size_t>(count))
        throw UserError("%zu processes on this machine: expected a GPU for each process, and that each process sees "
                        "all GPUs, found %d GPUs (with srun: --gpus-per-node, not --gpus-per-task)", world.of_machine,
                        count);
    check(cudaSetDevice(int(world.on_machine)), "cudaSetDevice");
    check(cudaGetDeviceProperties(&device.properties, int(world.on_machine)), "cudaGetDeviceProperties");
    const cudaDeviceProp& p = device.properties;
    if (threads > 0 && !device.is_cpu())
        throw UserError("--threads %d: only for a CPU build; this one runs on %s", threads, p.name);
    if (FLOATX == DType::BF16 && !device.is_cpu() && p.major < 8)
        throw UserError("%s: BF16 needs compute capability 8.0 (Ampere) or later, found %d.%d; make PRECISION=fp16, or "
                        "fp32", p.name, p.major, p.minor);
    check(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaStreamCreateWithFlags(&device.copies, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cublasLtCreate(&device.matmul), "cublasLtCreate");
    device.tensor_cores = choose_tensor_cores(wanted);
}

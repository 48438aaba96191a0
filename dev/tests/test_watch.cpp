// Tests of watch.h: processes that this one forks are the ranks of a run.
//
//   g++ -std=c++17 -O2 -Wall -Wextra dev/tests/test_watch.cpp -o test_watch -pthread && ./test_watch
#include "../../gpt/watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <functional>

constexpr int MAX_RANKS = 8;
constexpr double TIMEOUT = 0.5;          // s, of runs in which a rank hangs
constexpr double LONG_TIMEOUT = 60;      // s, of runs in which a hang must not be found
constexpr double RANKS_LIVE = 10;        // s: ranks that live longer are killed, and the test fails
constexpr int ALIVE = -1, KILLED = -2;   // in place of an exit code

// Memory that a run's ranks share with this process.
struct Shared {
    std::atomic<bool> has_address{false};
    char address[4096] = "";
    std::atomic<int> started{0};              // ranks that have returned from start()
    std::atomic<bool> noted[MAX_RANKS] = {};
    std::atomic<long> step[MAX_RANKS] = {};
};

static void pause_until(const std::function<bool()>& holds) {
    while (!holds()) watching::sleep(0.001);
}

using Body = std::function<void(Watch& watch, int rank, Shared& shared)>;

static void be_rank(int rank, int count, double timeout, Shared& shared, const Body& body) {
    Watch watch;
    try {
        if (rank == 0) {
            strcpy(shared.address, watch.listen().c_str());
            shared.has_address = true;
        }
        pause_until([&] { return bool(shared.has_address); });
        watch.start(rank, count, shared.address, timeout);
        shared.started++;
        body(watch, rank, shared);
    } catch (const std::exception& error) {
        watch.fail(1, error.what());
    }
}

// The processes of a run. A rank runs `body` and exits with 0.
struct Run {
    Shared* shared;
    std::vector<pid_t> processes;
    std::vector<int> codes;   // exit codes
    std::string said;         // on stderr, by all ranks
    int stderr_;

    Run(int count, double timeout, const Body& body) : codes(count, ALIVE) {
        shared = new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
        int ends[2];
        if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0) exit(1);
        stderr_ = ends[0];
        for (int rank = 0; rank < count; rank++) {
            const pid_t pid = fork();
            if (pid == 0) {
                dup2(ends[1], STDERR_FILENO);
                be_rank(rank, count, timeout, *shared, body);
                _exit(0);
            }
            processes.push_back(pid);
        }
        close(ends[1]);
    }
    ~Run() {
        for (size_t r = 0; r < processes.size(); r++)
            if (codes[r] == ALIVE) kill(processes[r], SIGKILL), waitpid(processes[r], nullptr, 0);
        close(stderr_);
        munmap(shared, sizeof(Shared));
    }

    // Sends a signal to a rank when all have started, and `seconds` later.
    void signal(int rank, int number, double seconds) {
        const double deadline = watching::now() + RANKS_LIVE;
        pause_until([&] { return shared->started == int(processes.size()) || watching::now() > deadline; });
        watching::sleep(seconds);
        kill(processes[rank], number);
    }

    // Waits until all ranks but `stopped` have ended.
    void await_end(int stopped = -1) {
        const double deadline = watching::now() + RANKS_LIVE;
        bool all = false;
        while (!all && watching::now() < deadline) {
            all = true;
            for (int r = 0; r < int(codes.size()); r++) {
                int status = 0;
                if (codes[r] == ALIVE && waitpid(processes[r], &status, WNOHANG) > 0)
                    codes[r] = WIFEXITED(status) ? WEXITSTATUS(status) : KILLED;
                all = all && (codes[r] != ALIVE || r == stopped);
            }
            watching::sleep(0.002);
        }
        char buffer[1 << 12];
        for (ssize_t n; (n = read(stderr_, buffer, sizeof(buffer))) > 0;) said.append(buffer, n);
        if (said[0] == '\n') said.erase(0, 1);   // ends a line of steps
    }

    std::string name(int rank) const {
        return "rank " + std::to_string(rank) + " (host " + watching::host_name() + ", process " +
               std::to_string(processes[rank]) + ")";
    }
    std::string died(int rank, const std::string& where) const {
        return "train_gpt: " + name(rank) + " died " + where + "; all others stop\n";
    }
    std::string hung(int rank, const std::string& how) const {
        return "train_gpt: " + name(rank) + " has hung in step 17: " + how + "; all others stop\n";
    }
};

static int passed = 0, failed = 0;

static void claim(const std::string& what, bool holds, const Run& run) {
    (holds ? passed : failed)++;
    printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
    if (!holds) {
        printf("        codes");
        for (int code : run.codes) printf(" %d", code);
        printf(", said: %s\n", run.said.c_str());
    }
    fflush(stdout);
}

// Claims that the ranks end with `codes` and that `said` is all that they print.
static void claim_end(const std::string& what, Run& run, const std::vector<int>& codes, const std::string& said) {
    run.await_end();
    claim(what, run.codes == codes && run.said == said, run);
}

// Works on `step` for some time.
static void work(Watch& watch, long step, double seconds) {
    for (const double end = watching::now() + seconds; watching::now() < end; watching::sleep(0.002)) watch.alive(step);
}

static void wait_long(Watch& watch) {
    const Watch::Wait wait(watch);
    watching::sleep(LONG_TIMEOUT);
}

// Runs steps as ranks do that sum gradients: no rank begins a step before all have finished the one before.
static Body steps_together(int count, long steps) {
    return [=](Watch& watch, int rank, Shared& shared) {
        watch.arm();
        for (long step = 1; step <= steps; step++) {
            watch.alive(step);
            shared.step[rank] = step;
            const Watch::Wait wait(watch);
            for (int other = 0; other < count; other++) pause_until([&] { return shared.step[other] >= step; });
        }
        watch.disarm();
        watch.finish();
    };
}

static void test_no_alarm() {
    for (const int count : {1, 2, 5}) {
        Run run(count, TIMEOUT, steps_together(count, 50));
        claim_end(std::to_string(count) + " ranks: a run that ends well prints nothing", run,
                  std::vector<int>(count, 0), "");
    }
    Run waits(3, TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        watch.arm();
        for (int worker = 0; worker < 3; worker++) {
            if (rank == worker) {
                work(watch, 5, 1.6 * TIMEOUT);
                shared.noted[worker] = true;
            }
            const Watch::Wait wait(watch);
            pause_until([&] { return bool(shared.noted[worker]); });
        }
        watch.finish();
    });
    Run disarmed(3, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        if (rank != 1) watch.arm();
        if (rank == 1) watching::sleep(2.5 * TIMEOUT);
        if (rank == 2) work(watch, 2, 2.5 * TIMEOUT);
        watch.finish();   // rank 0 leaves early
    });
    claim_end("no alarm while one rank works and others wait longer than the timeout", waits, {0, 0, 0}, "");
    claim_end("no alarm for a rank that is not armed, nor for one that leaves early", disarmed, {0, 0, 0}, "");
}

static void test_deaths() {
    for (const int victim : {0, 1, 4}) {
        Run run(5, LONG_TIMEOUT, steps_together(5, 1000000));
        run.signal(victim, SIGKILL, 0.01 * victim);
        run.await_end();
        std::vector<int> codes(5, 1);
        codes[victim] = KILLED;
        const std::string end = "; all others stop\n", begin = "train_gpt: " + run.name(victim) + " died ";
        claim("kill -9 of rank " + std::to_string(victim) + " at any moment: all others stop, one names it",
              run.codes == codes && run.said.rfind(begin, 0) == 0 &&
                  run.said.find(end) + end.size() == run.said.size(), run);
    }
    for (const int victim : {0, 2}) {
        Run run(3, LONG_TIMEOUT, [](Watch& watch, int, Shared&) {
            work(watch, 17, 0.1);
            watching::sleep(LONG_TIMEOUT);
        });
        run.signal(victim, SIGKILL, 0.2);
        claim_end("the message names the step in which rank " + std::to_string(victim) + " died", run,
                  {victim ? 1 : KILLED, 1, victim ? KILLED : 1}, run.died(victim, "in step 17"));
    }
}

static void test_hangs() {
    const std::string for_timeout = " for " + watching::short_number(TIMEOUT) + " s";
    for (const int victim : {0, 1}) {
        Run run(3, TIMEOUT, [victim](Watch& watch, int rank, Shared&) {
            watch.arm();
            watch.alive(rank == victim ? 17 : 18);
            if (rank != victim) wait_long(watch);
            watching::sleep(LONG_TIMEOUT);
        });
        claim_end("rank " + std::to_string(victim) + ", which neither moves nor waits, is named", run, {1, 1, 1},
                  run.hung(victim, "it has neither moved nor waited" + for_timeout));
    }
    const Body all_wait = [](Watch& watch, int, Shared&) {
        watch.arm();
        watch.alive(17);
        wait_long(watch);
    };
    Run run(2, TIMEOUT, all_wait);
    claim_end("ranks that all wait are found", run, {1, 1},
              "train_gpt: all ranks have waited for each other" + for_timeout + " in step 17\n");
    for (const int victim : {0, 1}) {
        Run stopped(3, TIMEOUT, all_wait);
        stopped.signal(victim, SIGSTOP, 0.2);
        stopped.await_end(victim);
        kill(stopped.processes[victim], SIGCONT);
        claim_end("a stopped rank " + std::to_string(victim) + " is named, and ends when it continues", stopped,
                  {1, 1, 1},
                  stopped.hung(victim, "nothing from it" + for_timeout +
                                           ", its process is stopped or its machine gone"));
    }
}

static void test_failures() {
    const struct { const char* what; int count, code; std::function<bool(int)> fails; const char* said; } CASES[] = {
        {"the failure of one rank is printed once, with its number", 3, 1, [](int r) { return r == 2; },
         "train_gpt: rank 2: the loss is nan\n"},
        {"rank 0's without a number", 3, 2, [](int r) { return r == 0; }, "train_gpt: the loss is nan\n"},
        {"a failure of all ranks is printed once", 5, 2, [](int) { return true; }, "train_gpt: the loss is nan\n"},
        {"one rank fails alone", 1, 2, [](int) { return true; }, "train_gpt: the loss is nan\n"}};
    for (const auto& c : CASES) {
        Run run(c.count, LONG_TIMEOUT, [&c](Watch& watch, int rank, Shared&) {
            watch.alive(3);
            if (c.fails(rank)) watch.fail(c.code, "the loss is nan");
            wait_long(watch);
        });
        claim_end(c.what, run, std::vector<int>(c.count, c.code), c.said);
    }
}

int main() {
    test_no_alarm();
    test_deaths();
    test_hangs();
    test_failures();
    printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

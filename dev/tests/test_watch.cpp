// Tests of watch.h, a claim a line: processes that this one forks are the ranks.
//
//   g++ -std=c++17 -O2 -Wall -Wextra dev/tests/test_watch.cpp -o test_watch -pthread && ./test_watch
//
// With -fsanitize=thread, set TSAN_OPTIONS=atexit_sleep_ms=0: a process would take a second to end.
#include "../../gpt/watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include <functional>
#include <memory>
#include <random>

// ==== the harness =======================================================================================

static int passed = 0, failed = 0;

static void claim(const std::string& what, bool holds, const std::string& found = "")
{
    printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
    if (!holds && !found.empty()) printf("        %s\n", found.c_str());
    fflush(stdout);
    ++(holds ? passed : failed);
}

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr int MAX_RANKS = 8;
constexpr double TIMEOUT = 0.5;          // s: when these runs' ranks are taken to hang
constexpr double LONG_TIMEOUT = 60;      // where none is to be found
constexpr double RANKS_LIVE = 10;        // s: then they are killed, and the claim fails

// What a run's ranks and this process see of each other.
struct Shared {
    std::atomic<bool> has_address{false};
    char address[4096] = "";
    std::atomic<int> started{0};              // ranks that have returned from start()
    std::atomic<bool> go{false};              // said by this process
    std::atomic<bool> noted[MAX_RANKS] = {};  // whatever a test has ranks find out
    std::atomic<long> step[MAX_RANKS] = {};
};

static void pause_until(const std::function<bool()>& holds)
{
    while (!holds()) watching::sleep(0.001);
}

// The processes of a run. A rank does its body and then exits with 0.
class Run {
public:
    using Body = std::function<void(Watch& watch, int rank, Shared& shared)>;

    Run(int count, double timeout, Body body) : Run(count, timeout, nullptr, body) {}

    // First is what ranks do after rank 0 has its port and before they connect.
    Run(int count, double timeout, Body first, Body body)
    {
        void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        shared = new (memory) Shared;
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0) exit(1);
        stderr_ = ends[0];
        for (int rank = 0; rank < count; rank++) {
            const pid_t pid = fork();
            if (pid == 0) {
                dup2(ends[1], STDERR_FILENO);
                for (int fd = 3; fd < 256; fd++) close(fd);   // other runs' pipes, whose ends we would keep open
                be_rank(rank, count, timeout, first, body);
                _exit(0);
            }
            processes.push_back(pid);
        }
        close(ends[1]);
        codes.assign(processes.size(), ALIVE);
    }
    ~Run()
    {
        for (size_t r = 0; r < processes.size(); r++)
            if (codes[r] == ALIVE) kill(processes[r], SIGKILL);
        close(stderr_);
        munmap(shared, sizeof(Shared));
    }

    static constexpr int ALIVE = -1, KILLED = -2;

    Shared* shared;
    std::vector<pid_t> processes;
    std::vector<int> codes;   // with which they have ended
    std::string said;         // on stderr, by all

    void await_start()
    {
        const double deadline = watching::now() + RANKS_LIVE;
        pause_until([&] { return shared->started == int(processes.size()) || watching::now() > deadline; });
    }

    void signal(int rank, int number) { kill(processes[size_t(rank)], number); }
    void signal_all(int number)
    {
        for (const pid_t pid : processes) kill(pid, number);
    }

    // Waits until all have ended, but for one, and until these have said all.
    void await_end(int but = -1)
    {
        const double deadline = watching::now() + RANKS_LIVE;
        while (watching::now() < deadline) {
            bool all = true;
            for (size_t r = 0; r < codes.size(); r++) {
                int status = 0;
                if (codes[r] == ALIVE && waitpid(processes[r], &status, WNOHANG) > 0)
                    codes[r] = WIFEXITED(status) ? WEXITSTATUS(status) : KILLED;
                all = all && (codes[r] != ALIVE || int(r) == but);
            }
            std::vector<pollfd> fds{{stderr_, POLLIN, 0}};
            watching::poll_until(fds, watching::now() + (all ? 0 : 0.002));
            char buffer[1 << 16];
            const ssize_t n = fds[0].revents & POLLIN ? read(stderr_, buffer, sizeof(buffer)) : 0;
            said.append(buffer, n > 0 ? size_t(n) : 0);
            if (said[0] == '\n') said.erase(0, 1);   // it ends a line of steps
            if (n <= 0 && all) return;
            if (fds[0].revents == POLLHUP) watching::sleep(0.002);
        }
        said += "[the test has waited in vain]";
    }

    std::string name(int rank) const
    {
        return "rank " + std::to_string(rank) + " (host " + watching::host_name() + ", process " +
               std::to_string(processes[size_t(rank)]) + ")";
    }

    std::string died(int rank, const std::string& where) const
    {
        return "train_gpt: " + name(rank) + " died " + where + "; all others stop\n";
    }

    std::string hung(int rank, const std::string& how) const
    {
        return "train_gpt: " + name(rank) + " has hung in step 17: " + how + "; all others stop\n";
    }

    bool all_ended_with(int code) const
    {
        return std::all_of(codes.begin(), codes.end(), [=](int c) { return c == code; });
    }

    // What was said and how they ended, for a claim that does not hold.
    std::string report() const
    {
        std::string text = "codes";
        for (const int code : codes) text += " " + std::to_string(code);
        return text + ", said: " + said.substr(0, 2000);
    }

    void claim_end(const std::string& what, int code, const std::string& message)
    {
        await_end();
        claim(what, all_ended_with(code) && said == message, report());
    }

    void claim_ends(const std::string& what, const std::vector<int>& expected, const std::string& message)
    {
        await_end();
        claim(what, codes == expected && said == message, report());
    }

private:
    int stderr_;

    void be_rank(int rank, int count, double timeout, const Body& first, const Body& body)
    {
        Watch watch;
        try {
            if (rank == 0) {
                strcpy(shared->address, watch.listen().c_str());
                shared->has_address = true;
            }
            pause_until([this] { return bool(shared->has_address); });
            if (first) first(watch, rank, *shared);
            watch.start(rank, count, shared->address, timeout);
            shared->started++;
            body(watch, rank, *shared);
        } catch (const std::exception& error) {
            watch.fail(1, error.what());
        }
    }
};

// Goes through steps as ranks do that add up gradients: nobody begins one before all have done the one before.
static void step_together(Watch& watch, int rank, int count, Shared& shared, long steps)
{
    watch.arm();
    for (long step = 1; step <= steps; step++) {
        watch.alive(step);
        watching::sleep(0.001);
        shared.step[rank] = step;
        const Watch::Wait wait(watch);
        for (int other = 0; other < count; other++) pause_until([&] { return shared.step[other] >= step; });
    }
    watch.disarm();
}

// Works, in a step, for some time.
static void work(Watch& watch, long step, double seconds)
{
    for (const double end = watching::now() + seconds; watching::now() < end; watching::sleep(0.002)) watch.alive(step);
}

static void be_stuck() { watching::sleep(LONG_TIMEOUT); }

static void wait_long(Watch& watch)
{
    const Watch::Wait wait(watch);
    be_stuck();
}

// What takes its time is begun, and while it runs others are tested; then the rest waits for it.
using Rest = std::function<void()>;

// ==== good ends =========================================================================================

static Rest begin_good_ends()
{
    for (const int count : {1, 2, 3, 5}) {
        Run run(count, TIMEOUT, [count](Watch& watch, int rank, Shared& shared) {
            step_together(watch, rank, count, shared, 50);
            watch.finish();
        });
        run.claim_end(std::to_string(count) + " ranks: a good end says nothing", 0, "");
    }
    const auto early = std::make_shared<Run>(3, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.arm();
        if (rank != 1) work(watch, 3, 2.5 * TIMEOUT);
        watch.finish();
    });
    const auto early_0 = std::make_shared<Run>(3, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.arm();
        if (rank != 0) work(watch, 3, 2.5 * TIMEOUT);
        watch.finish();
    });
    const auto late_death = std::make_shared<Run>(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        watch.alive(9);
        if (rank == 1) _exit((watch.finish(), 0));
        if (rank == 2) work(watch, 9, 0.1);
        if (rank == 2) raise(SIGKILL);
        pause_until([&] { return bool(shared.go); });
    });
    const auto death_of_0 = std::make_shared<Run>(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.alive(9);
        if (rank == 0) work(watch, 9, 0.1);
        if (rank == 0) raise(SIGKILL);
        watch.finish();
    });
    const auto together = std::make_shared<Run>(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        work(watch, 1, rank == 2 ? 0.3 : 0.01);
        if (rank == 2) shared.noted[2] = true;
        watch.finish();
        shared.noted[rank] = bool(shared.noted[2]);
    });
    return [=] {
        early->claim_end("a rank may end and leave while others go on, longer than the timeout", 0, "");
        early_0->claim_end("and so may rank 0", 0, "");
        late_death->claim_ends("a death is found when another rank has said good-bye already", {1, 1, Run::KILLED},
                               late_death->died(2, "in step 9"));
        death_of_0->claim_ends("and so is rank 0's, which had not said it", {Run::KILLED, 1, 1},
                               death_of_0->died(0, "in step 9"));
        together->await_end();
        const Shared& shared = *together->shared;
        claim("finish() returns when all have said so",
              together->all_ended_with(0) && shared.noted[0] && shared.noted[1], together->report());
    };
}

// ==== deaths ============================================================================================

// Kills a rank at a random moment; whether the others end as they should.
static bool dies_well(int count, int victim, double after, std::string& report)
{
    Run run(count, LONG_TIMEOUT, [count](Watch& watch, int rank, Shared& shared) {
        step_together(watch, rank, count, shared, 1000000);
    });
    run.await_start();
    watching::sleep(after);
    const double begin = watching::now();
    run.signal(victim, SIGKILL);
    run.await_end();
    const double seconds = watching::now() - begin;
    std::vector<int> expected(size_t(count), 1);
    expected[size_t(victim)] = Run::KILLED;
    report = std::to_string(seconds) + " s, " + run.report();
    if (run.codes != expected || seconds > 1) return false;
    // Others may be a step behind, or ahead, of what it had noted.
    const long step = run.shared->step[victim];
    for (long s = std::max(step - 1, 0L); s <= step + 1; s++) {
        const std::string where = s == 0 ? "before the first step" : "in step " + std::to_string(s);
        if (run.said == run.died(victim, where)) return true;
    }
    return false;
}

static void test_deaths()
{
    std::mt19937 random(1);
    constexpr int times = 20;
    for (int i = 0; i < times; i++) {
        const int count = i % 2 == 0 ? 3 : 5, victim = i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : count - 1;
        const double after = std::uniform_real_distribution<double>(0, 0.08)(random);
        std::string report;
        const bool well = dies_well(count, victim, after, report);
        claim("kill -9 of rank " + std::to_string(victim) + " of " + std::to_string(count) +
              ": all others stop, and one names it", well, report);
    }
    const Run::Body stay = [](Watch& watch, int, Shared& shared) {
        work(watch, 17, 0.1);
        shared.noted[0] = true;
        watching::sleep(LONG_TIMEOUT);
    };
    for (const int victim : {0, 2}) {
        Run run(3, LONG_TIMEOUT, stay);
        run.await_start();
        watching::sleep(0.15);
        run.signal(victim, SIGKILL);
        run.await_end();
        claim("the step is that in which rank " + std::to_string(victim) + " died",
              run.said == run.died(victim, "in step 17"), run.report());
    }
    Run two(5, LONG_TIMEOUT, stay);
    two.await_start();
    pause_until([&] { return bool(two.shared->noted[0]); });
    two.signal(2, SIGKILL);
    two.signal(3, SIGKILL);
    two.await_end();
    claim("two deaths at once: one of them is named",
          (two.said == two.died(2, "in step 17") || two.said == two.died(3, "in step 17")) &&
          two.codes == std::vector<int>{1, 1, Run::KILLED, Run::KILLED, 1}, two.report());
    Run starting(3, LONG_TIMEOUT, [](Watch&, int rank, Shared& shared) {
        if (rank == 1) pause_until([&] { return bool(shared.go); });
    }, [](Watch&, int, Shared&) { be_stuck(); });
    watching::sleep(0.1);
    starting.signal(2, SIGKILL);
    starting.await_end(1);
    claim("a death while others still start is found at once", starting.codes[0] == 1 &&
          starting.said == starting.died(2, "before the first step"), starting.report());
}

// ==== hangs =============================================================================================

static const std::string for_the_timeout = " for " + watching::short_number(TIMEOUT) + " s";

// One rank is stopped, while it waits or computes; the others wait for it. When it goes on, it ends as well.
static void test_stopped()
{
    constexpr int nobody = -1;
    const auto body = [](int computes) {   // that is, neither waits nor moves
        return [=](Watch& watch, int rank, Shared&) {
            watch.arm();
            watch.alive(17);
            if (rank == computes) be_stuck();
            wait_long(watch);
        };
    };
    Run runs[] = {{3, TIMEOUT, body(nobody)}, {3, TIMEOUT, body(nobody)}, {3, TIMEOUT, body(2)}};
    for (Run& run : runs) run.await_start();
    watching::sleep(0.2);   // some heartbeats, so that its silence is younger than its wait
    for (int victim = 0; victim < 3; victim++) runs[victim].signal(victim, SIGSTOP);
    for (int victim = 0; victim < 3; victim++) {
        Run& run = runs[victim];
        run.await_end(victim);
        run.signal(victim, SIGCONT);
        run.claim_end("SIGSTOP of rank " + std::to_string(victim) + " is found and named; it ends when it goes on", 1,
                      run.hung(victim, "nothing from it" + for_the_timeout +
                                       ", its process is stopped or its machine gone"));
    }
}

static void test_hangs()
{
    const auto stuck = [](int victim) {
        return [victim](Watch& watch, int rank, Shared&) {
            watch.arm();
            watch.alive(rank == victim ? 17 : 18);
            if (rank != victim) wait_long(watch);
            be_stuck();
        };
    };
    Run stuck_0(3, TIMEOUT, stuck(0)), stuck_1(3, TIMEOUT, stuck(1));
    Run all(3, TIMEOUT, [](Watch& watch, int, Shared&) {
        watch.arm();
        watch.alive(17);
        wait_long(watch);
    });
    Run apart(2, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.arm();
        watch.alive(17 + rank);
        const Watch::Wait outer(watch);
        {
            const Watch::Wait inner(watch);
        }
        be_stuck();
    });
    const std::string neither = "it has neither moved nor waited" + for_the_timeout;
    const std::string all_wait = "train_gpt: all ranks have waited for each other" + for_the_timeout;
    stuck_0.claim_end("rank 0, which neither moves nor waits, is found and named", 1, stuck_0.hung(0, neither));
    stuck_1.claim_end("and so is rank 1", 1, stuck_1.hung(1, neither));
    all.claim_end("ranks that all wait are found", 1, all_wait + " in step 17\n");
    apart.claim_end("and so in two steps; waits may be nested", 1, all_wait + " in steps 17 to 18\n");
}

static Rest begin_false_alarms()
{
    const auto waits = std::make_shared<Run>(3, TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
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
    const auto disarmed = std::make_shared<Run>(3, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.arm();
        work(watch, 1, 0.1);
        if (rank == 1) watch.disarm();
        if (rank == 1) watching::sleep(2.5 * TIMEOUT);
        if (rank == 1) watch.arm();
        else work(watch, 2, 2.5 * TIMEOUT);
        work(watch, 3, 0.1);
        watch.finish();
    });
    const auto never_armed = std::make_shared<Run>(2, TIMEOUT, [](Watch& watch, int, Shared&) {
        watching::sleep(2.5 * TIMEOUT);
        watch.finish();
    });
    const auto leaves = std::make_shared<Run>(3, TIMEOUT, [](Watch& watch, int rank, Shared&) {
        if (rank == 2) {
            watching::sleep(2 * TIMEOUT);
        } else {
            watch.arm();
            const Watch::Wait wait(watch);
            watching::sleep(2 * TIMEOUT + 0.2);
        }
        watch.finish();
    });
    const auto stopped = std::make_shared<Run>(2, TIMEOUT, [](Watch& watch, int, Shared& shared) {
        pause_until([&] { return bool(shared.go); });
        watch.finish();
    });
    stopped->await_start();
    stopped->signal(1, SIGSTOP);
    return [=] {
        stopped->signal(1, SIGCONT);
        stopped->shared->go = true;
        waits->claim_end("no alarm while some wait long and one works", 0, "");
        disarmed->claim_end("no alarm for a rank that is not armed", 0, "");
        leaves->claim_end("nor for others that have waited for it when it leaves", 0, "");
        never_armed->claim_end("none where no rank is", 0, "");
        stopped->claim_end("nor for one that is stopped then", 0, "");
    };
}

// The machine is suspended: all are stopped, and go on, some later than others.
static void test_late()
{
    const Run::Body body = [](Watch& watch, int, Shared& shared) {
        watch.arm();
        while (!shared.go) work(watch, 4, 0.01);
        watch.finish();
    };
    Run runs[] = {{3, TIMEOUT, body}, {3, TIMEOUT, body}};
    for (Run& run : runs) run.await_start();
    watching::sleep(0.12);
    for (Run& run : runs) run.signal_all(SIGSTOP);
    watching::sleep(2 * TIMEOUT);
    for (const int first : {0, 1}) runs[first].signal(first, SIGCONT);
    watching::sleep(0.4 * TIMEOUT);
    for (Run& run : runs) run.signal_all(SIGCONT);
    watching::sleep(0.6 * TIMEOUT);
    for (const int first : {0, 1}) {
        runs[first].shared->go = true;
        runs[first].claim_end("a machine that was suspended, where rank " + std::to_string(first) +
                              " wakes first, is no hang", 0, "");
    }
}

// ==== failures ==========================================================================================

static Run::Body fails(std::function<bool(int)> who, int code, std::function<std::string(int)> text)
{
    return [=](Watch& watch, int rank, Shared&) {
        watch.alive(3);
        if (who(rank)) watch.fail(code, text(rank));
        wait_long(watch);
    };
}

static void test_failures()
{
    const auto loss = [](int) { return std::string("the loss is nan"); };
    const auto everybody = [](int) { return true; };
    Run one(3, LONG_TIMEOUT, fails([](int r) { return r == 2; }, 1, loss));
    one.claim_end("what one rank fails of is said once, with its number", 1, "train_gpt: rank 2: the loss is nan\n");
    Run rank_0(3, LONG_TIMEOUT, fails([](int r) { return r == 0; }, 2, loss));
    rank_0.claim_end("rank 0's without one; its exit code is everybody's", 2, "train_gpt: the loss is nan\n");
    Run alone(1, LONG_TIMEOUT, fails(everybody, 2, loss));
    alone.claim_end("one rank fails alone", 2, "train_gpt: the loss is nan\n");
    bool same = true, different = true;
    std::string report;
    for (int i = 0; i < 5; i++) {
        Run all(5, LONG_TIMEOUT, fails(everybody, 2, loss));
        Run two(3, LONG_TIMEOUT, fails([](int r) { return r != 0; }, 1,
                                       [](int r) { return "text " + std::to_string(r); }));
        all.await_end();
        two.await_end();
        same = same && all.all_ended_with(2) && all.said == "train_gpt: the loss is nan\n";
        different = different && two.all_ended_with(1) &&
                    (two.said == "train_gpt: rank 1: text 1\n" || two.said == "train_gpt: rank 2: text 2\n");
        report += all.report() + two.report();
    }
    claim("what all fail of is said once, without a number", same, report);
    claim("of two different failures one is said", different, report);
    Run slow(3, LONG_TIMEOUT, [](Watch&, int rank, Shared&) {
        watching::sleep(rank == 2 ? 2 * watching::FOR_THE_SAME_ERROR : 0);
    }, fails(everybody, 2, loss));
    slow.claim_end("nor if one came late, as start() returns when all are there", 2, "train_gpt: the loss is nan\n");
    Run later(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watching::sleep(rank == 0 ? 0.1 : 0);
        watch.fail(2, rank == 0 ? "--flag" : "--flag, as another rank has it");
    });
    later.claim_end("rank 0's text is said though another rank's came first", 2, "train_gpt: --flag\n");
    Run cause(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared&) {
        watch.alive(3);
        if (rank == 1) watch.fail(2, "connection reset");
        watching::sleep(0.1);
        if (rank == 2) raise(SIGKILL);
        be_stuck();
    });
    cause.claim_ends("a death that comes with a failure is its cause", {1, 1, Run::KILLED},
                     "train_gpt: " + cause.name(2) +
                         " died in step 3; all others stop; rank 1 failed: connection reset\n");
}

// mpirun, which kills all when one has ended, may not find rank 0 gone before others have read what it sent.
static void test_parting()
{
    Run run(2, LONG_TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        pause_until([&] { return bool(shared.go); });
        if (rank == 0) watch.fail(2, "the end");
        wait_long(watch);
    });
    run.await_start();
    run.signal(1, SIGSTOP);
    const double begin = watching::now();
    run.shared->go = true;
    run.await_end(1);
    const double seconds = watching::now() - begin;
    run.signal(1, SIGCONT);
    run.claim_end("a rank that is stopped while rank 0 fails ends when it goes on", 2, "train_gpt: the end\n");
    claim("rank 0 waited for it, for a moment", seconds >= watching::FOR_PARTING && seconds < 2,
          std::to_string(seconds));
}

static void test_long_texts()
{
    constexpr size_t size = 64 * 1024;
    std::string text;
    for (int line = 0; text.size() < size; line++) text += "line " + std::to_string(line) + "\n";
    text.resize(size);
    for (const int failing : {0, 1}) {
        Run run(3, LONG_TIMEOUT, fails([=](int r) { return r == failing; }, 3, [=](int) { return text; }));
        run.claim_end("64 KB of lines from rank " + std::to_string(failing) + " arrive whole", 3,
                      std::string("train_gpt: ") + (failing == 1 ? "rank 1: " : "") + text + "\n");
    }
}

// Rank 0 is stopped and not armed, so nobody else says so.
static Rest begin_no_answer()
{
    const auto run = std::make_shared<Run>(3, LONG_TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        pause_until([&] { return bool(shared.go); });
        if (rank == 2) watch.fail(2, "the disk is full");
        wait_long(watch);
    });
    run->await_start();
    run->signal(0, SIGSTOP);
    run->shared->go = true;
    return [run] {
        pause_until([&] { return waitid(P_PID, id_t(run->processes[2]), nullptr, WEXITED | WNOWAIT) == 0; });
        run->signal(0, SIGCONT);
        run->claim_end("a rank that rank 0 does not answer says it itself, and once", 2,
                       "train_gpt: rank 2: the disk is full\n");
    };
}

// Without a reader of stderr a write there would raise SIGPIPE.
static void test_no_stderr()
{
    const auto body = [](int failing) {
        return [=](Watch& watch, int rank, Shared&) {
            int ends[2];
            if (pipe(ends) == 0) dup2(ends[1], STDERR_FILENO);
            close(ends[0]);
            if (rank == failing) watch.fail(3, "unheard");
            wait_long(watch);
        };
    };
    Run alone(1, LONG_TIMEOUT, body(0));
    alone.claim_end("nobody reads stderr: a failure of one rank ends all the same", 3, "");
    for (const int failing : {0, 1}) {
        Run run(2, LONG_TIMEOUT, body(failing));
        run.claim_end("nobody reads stderr: rank " + std::to_string(failing) + "'s failure ends all the same", 3, "");
    }
}

// ==== the connections ===================================================================================

static int connect_raw(const std::string& address)
{
    std::istringstream in(address);
    std::string secret, port;
    in >> secret >> port;
    return watching::connect_to("127.0.0.1", port, watching::now() + 1);
}

static int browser = -1;   // a connection

static Rest begin_strangers()
{
    const auto run = std::make_shared<Run>(3, LONG_TIMEOUT, [](Watch&, int rank, Shared& shared) {
        if (rank != 2) return;
        for (int i = 0; i < 20; i++) connect_raw(shared.address);   // more than are let in at once; they stay open
        browser = connect_raw(shared.address);
        const std::string request(100, 'G');
        shared.noted[0] = send(browser, request.data(), request.size(), 0) == 100;
        watching::Link liar(connect_raw(shared.address), LONG_TIMEOUT);
        liar.send(watching::Kind::HELLO, 1, {}, std::string(32, '0') + " 1 liar");
        watching::Link big(connect_raw(shared.address), LONG_TIMEOUT);
        big.send(watching::Kind::HELLO, 1, {}, std::string(2000, '0'));
        std::istringstream in(shared.address);
        std::string secret;
        in >> secret;
        watching::Link no_rank(connect_raw(shared.address), LONG_TIMEOUT);
        no_rank.send(watching::Kind::HELLO, 3000000, {}, secret + " 1 nobody");
        no_rank.send(watching::Kind::BEAT, 0, {});
    }, [](Watch& watch, int rank, Shared& shared) {
        step_together(watch, rank, 3, shared, 20);
        char byte;
        if (rank == 2) shared.noted[1] = recv(browser, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET;
        watch.finish();
    });
    return [run] {
        run->claim_end("strangers at the port do not disturb", 0, "");
        claim("what they say is answered by hanging up", run->shared->noted[0] && run->shared->noted[1], run->report());
    };
}

static Rest begin_starts()
{
    const auto wrong = std::make_shared<Run>(2, TIMEOUT, [](Watch&, int rank, Shared& shared) {
        if (rank == 1) shared.address[0] = shared.address[0] == 'f' ? '0' : 'f';
    }, [](Watch&, int, Shared&) { be_stuck(); });
    const auto missing = std::make_shared<Run>(3, TIMEOUT, [](Watch&, int rank, Shared&) {
        if (rank == 2) _exit(7);
    }, [](Watch&, int, Shared&) { be_stuck(); });
    return [=] {
        wrong->await_end();
        claim("a rank with a wrong secret is not let in, and says what it tried", wrong->all_ended_with(1) &&
              contains(wrong->said, "train_gpt: rank 1: this rank (host " + watching::host_name() +
                                    ") did not reach rank 0 at port ") &&
              (contains(wrong->said, "127.0.0.1: hung up") || contains(wrong->said, "127.0.0.1: Connection refused")), wrong->report());
        const std::string here = " ranks, these did not connect to rank 0 (host " + watching::host_name() + ", port ";
        claim("and rank 0 says who is missing", contains(wrong->said, "train_gpt: of 2" + here) &&
              contains(wrong->said, ") within 0.5 s: 1\n"), wrong->report());
        missing->await_end();
        claim("ranks that came end silently when one does not come", missing->codes == std::vector<int>{1, 1, 7} &&
              missing->said.rfind("train_gpt: of 3" + here, 0) == 0 &&
              std::count(missing->said.begin(), missing->said.end(), '\n') == 1, missing->report());
    };
}

static volatile sig_atomic_t handled = 0;

static void test_manners()
{
    Run run(2, TIMEOUT, [](Watch& watch, int rank, Shared& shared) {
        if (rank == 1) {
            pause_until([&] { return bool(shared.go); });
            return watch.finish();
        }
        ::signal(SIGUSR1, [](int) { handled = 1; });
        sigset_t user, before;
        sigemptyset(&user);
        sigaddset(&user, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &user, &before);
        kill(getpid(), SIGUSR1);
        watching::sleep(0.1);
        shared.noted[0] = handled == 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        shared.noted[1] = handled == 1;
        bool all_close = true;
        for (int fd = 3; fd < 256; fd++)
            all_close = all_close && (fcntl(fd, F_GETFD) < 0 || fcntl(fd, F_GETFD) & FD_CLOEXEC);
        shared.noted[2] = all_close;
        timespec begin, end;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
        watching::sleep(0.5);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        shared.noted[3] = end.tv_sec - begin.tv_sec + 1e-9 * double(end.tv_nsec - begin.tv_nsec) < 0.03;
        shared.go = true;
        watch.finish();
    });
    run.await_end();
    claim("signals are not handled on the watch's thread", run.shared->noted[0] && run.shared->noted[1], run.report());
    claim("no program that a rank starts inherits its connections", run.shared->noted[2], run.report());
    claim("a thread that has nothing to do sleeps", run.shared->noted[3], run.report());
}

int main()
{
    const Rest good_ends = begin_good_ends(), false_alarms = begin_false_alarms();
    test_late();
    test_hangs();
    test_stopped();
    false_alarms();
    good_ends();
    const Rest no_answer = begin_no_answer(), strangers = begin_strangers(), starts = begin_starts();
    test_deaths();
    no_answer();
    strangers();
    starts();
    test_failures();
    test_parting();
    test_long_texts();
    test_no_stderr();
    test_manners();
    printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

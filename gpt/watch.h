// Ends all processes ("ranks") of a run, in bounded time and with one message, when one of them dies, hangs or fails.
//
// Each rank k > 0 holds a TCP connection to rank 0. The kernel closes a dead process's connections at once, and these
// work while the library that the ranks compute with is stuck. A thread of each rank has them; it sleeps in poll().
//
//   k -> 0   HELLO     the secret, rank, process and host; others who find the port are dropped
//   0 -> k   WELCOME   the secret, process and host; then k sends a BEAT, and only then is it connected
//   0 -> k   ALL       all ranks are connected
//   both     BEAT      every second, or tenth of the timeout: how often the main thread moved, its step, whether it
//                      waits, and whether it is armed, that is whether a hang of it counts; all messages carry this
//   k -> 0   FAIL      an exit code and a text; k waits to be told to end
//   both     END       "end with this code and say nothing": whoever sends it has printed why
//   k -> 0   BYE       k is done, and its connection may close
//   0 -> k   DONE      all are done, or rank 0 waits no longer
//
// Rank 0 judges. A connection that closes without BYE or FAIL is a death. No BEAT for the timeout is a hang, and so is
// a rank that neither waits nor moves, and so are ranks that all wait. A FAIL waits a moment: if rank 0 fails as well,
// its text is printed, as errors that all ranks find are nobody's; if a rank dies, that is the cause and comes first.
// Of rank 0, others see its death and its silence; rank 1 says so. Ranks end by _exit: the main thread may be stuck.
#pragma once

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace watching {

// Seconds
constexpr double LONGEST_INTERVAL = 1;      // between two BEATs
constexpr double LONGEST_ATTEMPT = 1;       // to connect to an address and be welcomed
constexpr double STRANGERS_STAY = 2;        // how long one that connects may be silent
constexpr double FOR_THE_SAME_ERROR = 0.3;  // that rank 0 is given to fail as another rank has
constexpr double FOR_A_CAUSE = 0.1;         // that a death is given to be heard of when rank 0 fails, as it may be why
constexpr double FOR_AN_ANSWER = 3;         // that rank 0 is given to answer a FAIL
constexpr double FOR_THE_THREAD = 5;        // that fail() gives the thread
constexpr double FOR_PARTING = 0.5;         // that others are given to read END or DONE
constexpr double FOR_RANK_1 = 0.3;          // that rank 1 is given to speak: mpirun kills all when the first has ended
constexpr double FOR_STDERR = 1;            // that a full pipe is given

constexpr size_t LONGEST_TEXT = size_t(1) << 16;
constexpr size_t LONGEST_INTRODUCTION = 512;   // a secret, a process, and a host's name of at most 64 bytes
constexpr size_t SPARE_STRANGERS = 16;         // that may be connected besides all ranks

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

inline void poll_until(std::vector<pollfd>& fds, double deadline) {
    constexpr double longest = 1e6;   // in ms, as int
    poll(fds.data(), fds.size(), static_cast<int>(std::ceil(std::clamp((deadline - now()) * 1000, 0.0, longest))));
}

inline std::string host_name() {
    char name[HOST_NAME_MAX + 1] = "";
    gethostname(name, sizeof(name) - 1);
    return name;
}

inline std::string short_number(double number) {
    std::ostringstream out;
    out << number;
    return out.str();
}

// In one write where it fits a pipe's; poll() says that these do not block.
inline void write_to_stderr(const std::string& text) {
    const double deadline = now() + FOR_STDERR;
    for (size_t done = 0; done < text.size() && now() < deadline;) {
        std::vector<pollfd> err{{STDERR_FILENO, POLLOUT, 0}};
        poll_until(err, deadline);
        if (!(err[0].revents & POLLOUT)) return;
        const ssize_t n = write(STDERR_FILENO, text.data() + done, std::min<size_t>(text.size() - done, PIPE_BUF));
        if (n < 0 && errno != EINTR && errno != EAGAIN) return;
        done += n > 0 ? static_cast<size_t>(n) : 0;
    }
}

// What a rank's main thread is doing.
struct Beat {
    uint64_t moves = 0;
    int64_t step = -1;   // none yet
    uint32_t armed = 0, waiting = 0;
    bool operator==(const Beat& b) const {
        return moves == b.moves && step == b.step && armed == b.armed && waiting == b.waiting;
    }
};

enum class Kind : uint32_t { HELLO, WELCOME, ALL, BEAT, FAIL, END, BYE, DONE };

// Sent as it lies in memory, its text after it: all machines of a run have the same processors and program.
struct Header {
    Kind kind;
    int32_t code;   // the exit code; in HELLO the rank
    Beat beat;
    uint64_t length;
};

struct Message {
    Header header;
    std::string text;
};

// A connection. It never blocks: what does not go out at once goes with a later pump().
class Link {
public:
    Link() = default;
    Link(int fd, double timeout) : fd_(fd) {
        const int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
        // A machine without power closes nothing. Later than a hang is found, which says more.
        const unsigned milliseconds = static_cast<unsigned>(2000 * timeout);
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
    }
    Link(Link&& other) noexcept { *this = std::move(other); }
    Link& operator=(Link&& other) noexcept {
        std::swap(fd_, other.fd_);
        std::swap(closed_, other.closed_);
        in_.swap(other.in_);
        out_.swap(other.out_);
        return *this;
    }
    ~Link() { close(); }

    bool is_open() const { return fd_ >= 0; }
    bool is_closed_by_other() const { return closed_; }
    bool is_sending() const { return !out_.empty(); }
    pollfd interest() const { return {fd_, static_cast<short>(is_sending() ? POLLIN | POLLOUT : POLLIN), 0}; }

    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

    void send(Kind kind, int code, const Beat& beat, const std::string& text = "") {
        if (!is_open()) return;
        const Header header{kind, code, beat, text.size()};
        out_.append(reinterpret_cast<const char*>(&header), sizeof(header));
        out_ += text;
        pump();
    }

    // What poll() said of this is dealt with: sends what there is to send, receives what has come.
    void serve(const pollfd& state) {
        if (state.revents != 0) pump();
        if (state.revents & ~POLLOUT) receive();
    }

    // Whether a whole message had arrived.
    bool take(Message& message, size_t longest_text) {
        Header& header = message.header;
        if (in_.size() < sizeof(header)) return false;
        memcpy(&header, in_.data(), sizeof(header));
        if (header.length > longest_text) {
            closed_ = true;   // it does not speak our language
            in_.clear();
            return false;
        }
        if (in_.size() - sizeof(header) < header.length) return false;
        message.text = in_.substr(sizeof(header), header.length);
        in_.erase(0, sizeof(header) + header.length);
        return true;
    }

    void forget() { in_.clear(); }

private:
    int fd_ = -1;
    bool closed_ = false;
    std::string in_, out_;

    void pump() {
        const ssize_t n = out_.empty() ? 0 : ::send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) out_.erase(0, static_cast<size_t>(n));
        if (n < 0 && errno != EAGAIN && errno != EINTR) out_.clear();   // what it said last may still be to be read
    }

    void receive() {
        char buffer[LONGEST_TEXT];
        const ssize_t n = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
        if (n > 0) in_.append(buffer, static_cast<size_t>(n));
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) closed_ = true;
    }
};

// A process of the run, as the one whose thread this is knows it.
struct Member {
    Link link;   // rank 0 has one to each other, others to rank 0
    std::string host;
    long process = 0;
    Beat beat;
    double heard = 0, moved = 0;   // when last, on the clock that counts only while we are awake
    bool failed = false, left = false;
};

// One that found the port, until it has proved to be a rank.
struct Stranger {
    Link link;
    double since;
    int rank = -1;   // as which it was welcomed
    std::string introduction;
};

inline std::string numeric(const sockaddr* address) {
    char text[INET6_ADDRSTRLEN] = "";
    if (address->sa_family == AF_INET)
        inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof(text));
    if (address->sa_family == AF_INET6) {
        const in6_addr& in6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
        if (!IN6_IS_ADDR_LINKLOCAL(&in6)) inet_ntop(AF_INET6, &in6, text, sizeof(text));   // those need an interface
    }
    return text;
}

// Of this machine, as " a b c"; the loopback's last, which lead nowhere from another machine.
inline std::string all_addresses() {
    ifaddrs* list = nullptr;
    if (getifaddrs(&list) < 0) return " 127.0.0.1";
    std::string outer, loopback;
    for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
        const std::string text = i->ifa_addr != nullptr && (i->ifa_flags & IFF_UP) ? numeric(i->ifa_addr) : "";
        if (!text.empty()) (i->ifa_flags & IFF_LOOPBACK ? loopback : outer) += " " + text;
    }
    freeifaddrs(list);
    return outer + loopback;
}

// A socket that listens to all addresses of a family, at a port of the kernel's choice; -1: there is none.
inline int open_port(int family) {
    const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    sockaddr_storage any{};   // zeros are any address and any port
    any.ss_family = static_cast<sa_family_t>(family);
    const int no = 0;
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
    const socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (bind(fd, reinterpret_cast<sockaddr*>(&any), size) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
    close(fd);
    return -1;
}

inline int port_of(int fd) {
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size);
    return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port
                                           : reinterpret_cast<const sockaddr_in*>(&own)->sin_port);
}

// A connected socket; -1: none by then, and errno says why.
inline int connect_to(const std::string& address, const std::string& port, double deadline) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    errno = EINVAL;
    if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) return -1;
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) < 0 ? errno : 0;
    freeaddrinfo(found);
    if (error == EINPROGRESS) {
        std::vector<pollfd> fds{{fd, POLLOUT, 0}};
        while (fds[0].revents == 0 && now() < deadline) poll_until(fds, deadline);
        socklen_t size = sizeof(error);
        if (fds[0].revents == 0) error = ETIMEDOUT;
        else getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) return fd;
    if (fd >= 0) close(fd);
    errno = error;
    return -1;
}

}   // namespace watching

class Watch {
public:
    Watch() = default;
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {   // without finish() this is a death to others
        stop(Goal::VANISH);
        if (port_ >= 0) close(port_);
        if (wake_ >= 0) close(wake_);
    }

    // Rank 0, before start(): opens a port. What is returned, a line, is to be handed to all other ranks.
    std::string listen() {
        port_ = watching::open_port(AF_INET6);   // of both families
        if (port_ < 0) port_ = watching::open_port(AF_INET);
        if (port_ < 0) throw std::runtime_error(std::string("no port for other ranks: ") + strerror(errno));
        unsigned char random[16];
        if (getrandom(random, sizeof(random), 0) != sizeof(random))
            throw std::runtime_error(std::string("getrandom: ") + strerror(errno));
        secret_.clear();
        for (const unsigned char byte : random) {
            secret_ += "0123456789abcdef"[byte / 16];
            secret_ += "0123456789abcdef"[byte % 16];
        }
        return secret_ + " " + std::to_string(watching::port_of(port_)) + watching::all_addresses();
    }

    // All ranks: connects, and returns when all are there. To rank 0 it is a std::runtime_error if they are not within
    // the timeout, in seconds, and those that came end with code 1. So it is to a rank that cannot reach rank 0.
    void start(int rank, int count, const std::string& address, double timeout) {
        rank_ = rank;
        count_ = count;
        timeout_ = timeout;
        interval_ = std::min(watching::LONGEST_INTERVAL, timeout / 10);
        if (count == 1) return;
        members_ = std::vector<watching::Member>(static_cast<size_t>(count));
        me().host = watching::host_name();
        me().process = getpid();
        wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_ < 0) throw std::runtime_error(std::string("eventfd: ") + strerror(errno));
        if (rank != 0) connect(address);
        const int port = port_ < 0 ? 0 : watching::port_of(port_);   // the thread closes it
        begin_thread();
        if (!is_connected()) throw std::runtime_error(rank == 0 ? give_up(port) : "rank 0 does not begin");
    }

    // From when to when a hang of this rank counts; its death always does.
    void arm() {
        armed_ = true;
        move();
    }
    void disarm() {
        armed_ = false;
        move();
    }

    // The main thread is getting on.
    void alive(long step) {
        step_.store(step, std::memory_order_relaxed);
        move();
    }

    // While one of these is, the main thread waits for other ranks or the device. They may be nested.
    class Wait {
    public:
        explicit Wait(Watch& watch) : watch_(watch) {
            watch_.waits_++;
            watch_.move();
        }
        ~Wait() {
            watch_.waits_--;
            watch_.move();
        }
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;

    private:
        Watch& watch_;
    };

    // This rank ends the run. With one rank, and before start(), only itself.
    [[noreturn]] void fail(int code, const std::string& text) {
        block_signals();   // no SIGPIPE if nobody reads stderr
        outlive_mpirun();
        bool told = false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (running_ && !failed_) failure_ = {rank_, code, text.substr(0, watching::LONGEST_TEXT), 0};
            told = failed_ = running_;
        }
        if (told) {
            wake();
            fflush(stdout);
            watching::sleep(watching::FOR_THE_THREAD);   // it ends the process
        }
        say(with_rank(rank_, text));
        fflush(stdout);
        _exit(code);
    }

    // The good end. Returns when all ranks have said so, or after the timeout.
    void finish() { stop(Goal::FINISH); }

private:
    enum class Goal { WATCH, FINISH, GIVE_UP, VANISH };
    struct Failure {
        int rank, code;
        std::string text;
        double until;   // when it is printed
    };

    int rank_ = 0, count_ = 1;
    double timeout_ = 0, interval_ = 0;
    std::string secret_;
    int port_ = -1, wake_ = -1;
    std::thread thread_;

    // The main thread's state, which the thread reads
    std::atomic<uint64_t> moves_{0};
    std::atomic<int64_t> step_{-1};
    std::atomic<int> waits_{0};
    std::atomic<bool> armed_{false};

    // What they say to each other
    std::mutex mutex_;
    std::condition_variable changed_;
    bool connected_ = false, running_ = false, failed_ = false;
    Goal goal_ = Goal::WATCH;
    Failure failure_{};             // valid if failed_
    std::atomic<bool> said_{false};   // the one message

    // The thread's own
    std::vector<watching::Member> members_;
    std::vector<watching::Stranger> strangers_;
    bool failing_ = false;   // pending_ will be printed
    Failure pending_{};
    bool finishing_ = false;
    double finish_until_ = 0;
    double awake_ = 0;       // a clock that stands still while this process, or its machine, is stopped
    double any_moved_ = 0;   // by it, when some rank last did

    watching::Member& me() { return members_[static_cast<size_t>(rank_)]; }
    int rank_of(const watching::Member& m) const { return static_cast<int>(&m - members_.data()); }

    void move() { moves_.fetch_add(1, std::memory_order_relaxed); }

    watching::Beat own_beat() const {
        return {moves_.load(std::memory_order_relaxed), step_.load(std::memory_order_relaxed), armed_ ? 1u : 0u,
                waits_ > 0 ? 1u : 0u};
    }

    // ---- the main thread ------------------------------------------------------------------------

    // mpirun ends all when the first rank has ended. This one ends by itself, soon and with a code of its own. (Libraries'
    // threads do not block signals.)
    static void outlive_mpirun() { signal(SIGTERM, SIG_IGN); }

    static sigset_t block_signals() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        return before;
    }

    void begin_thread() {
        const sigset_t before = block_signals();   // the thread inherits this: handlers run on the main thread
        running_ = true;
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {
            running_ = false;
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void wake() {
        const uint64_t one = 1;
        if (write(wake_, &one, sizeof(one)) < 0) return;   // it is awake already
    }

    void stop(Goal goal) {
        if (!thread_.joinable()) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            goal_ = goal;
        }
        wake();
        thread_.join();
        members_.clear();   // closes the connections
    }

    // Whether all are, in time. Rank 0 tells the others if not, and has begun later than these.
    bool is_connected() {
        const std::chrono::duration<double> longest(rank_ == 0 ? timeout_ : 2 * timeout_);
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, longest, [this] { return connected_; });
    }

    // What is wrong when not all have come.
    std::string give_up(int port) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            goal_ = Goal::GIVE_UP;
        }
        wake();
        thread_.join();
        std::string missing;
        for (const watching::Member& m : members_)
            if (m.process == 0) missing += (missing.empty() ? "" : ", ") + std::to_string(rank_of(m));
        return "of " + std::to_string(count_) + " ranks, these did not connect to rank 0 (host " + me().host +
               ", port " + std::to_string(port) + ") within " + watching::short_number(timeout_) + " s: " + missing;
    }

    void be_connected() {
        std::lock_guard<std::mutex> lock(mutex_);
        connected_ = true;
        changed_.notify_all();
    }

    std::string introduction() { return secret_ + " " + std::to_string(me().process) + " " + me().host; }

    // Whether it has the secret; who it is goes to m.
    bool is_introduced(const std::string& text, watching::Member& m) const {
        std::istringstream in(text);
        std::string secret, host;
        long process = 0;
        if (!(in >> secret >> process >> host) || secret != secret_) return false;
        m.host = host;
        m.process = process;
        return true;
    }

    // One rank's attempt at one of rank 0's addresses: what went wrong, or nothing.
    std::string attempt(const std::string& address, const std::string& port, double deadline) {
        const int fd = watching::connect_to(address, port, deadline);
        if (fd < 0) return strerror(errno);
        watching::Link link(fd, timeout_);
        link.send(watching::Kind::HELLO, rank_, own_beat(), introduction());
        watching::Message message;
        while (!link.take(message, watching::LONGEST_INTRODUCTION)) {
            if (link.is_closed_by_other()) return "hung up";
            if (watching::now() >= deadline) return "no answer";
            std::vector<pollfd> fds{link.interest()};
            watching::poll_until(fds, deadline);
            link.serve(fds[0]);
        }
        if (message.header.kind != watching::Kind::WELCOME || !is_introduced(message.text, members_[0]))
            return "another program answers";
        link.send(watching::Kind::BEAT, 0, own_beat());
        members_[0].link = std::move(link);
        return "";
    }

    void connect(const std::string& text) {
        std::istringstream in(text);
        std::string port, address;
        in >> secret_ >> port;
        std::vector<std::string> addresses;
        while (in >> address) addresses.push_back(address);
        const double deadline = watching::now() + timeout_;
        const double longest = std::min(watching::LONGEST_ATTEMPT, timeout_ / 4);
        std::vector<std::string> problems(addresses.size(), "not tried");
        while (watching::now() < deadline) {
            for (size_t i = 0; i < addresses.size() && watching::now() < deadline; i++) {
                problems[i] = attempt(addresses[i], port, std::min(deadline, watching::now() + longest));
                if (problems[i].empty()) return;
            }
            watching::sleep(interval_ / 10);
        }
        std::string tried = addresses.empty() ? "; no addresses" : "";
        for (size_t i = 0; i < addresses.size(); i++) tried += "; " + addresses[i] + ": " + problems[i];
        throw std::runtime_error("this rank (host " + me().host + ") did not reach rank 0 at port " + port +
                                 " within " + watching::short_number(timeout_) + " s" + tried);
    }

    // ---- the thread -----------------------------------------------------------------------------

    void run() {
        double last = watching::now(), next_beat = last;
        for (;;) {
            sleep_until(failing_ ? std::min(next_beat, pending_.until) : next_beat);
            const double time = watching::now();
            // Later than this, we or the machine were stopped. That says nothing of others, so it does not count.
            if (time - last < 2 * interval_) awake_ += time - last;
            last = time;
            note(me(), own_beat());
            meet_strangers();
            if (hear_members() || obey()) break;
            if (failing_ && time >= pending_.until) {
                say(with_rank(pending_.rank, pending_.text));
                end(pending_.code);
            }
            if (!failing_) judge();
            if (time < next_beat) continue;
            next_beat = time + interval_;
            for (watching::Member& m : members_)
                if (!me().left && !m.link.is_sending()) m.link.send(watching::Kind::BEAT, 0, me().beat);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        running_ = false;
    }

    template <class Deed> void for_each_link(Deed deed) {
        for (watching::Stranger& s : strangers_) deed(s.link);
        for (watching::Member& m : members_)
            if (m.link.is_open()) deed(m.link);
    }

    // Sleeps until then, or until the main thread or another rank has something to say.
    void sleep_until(double deadline) {
        const bool accepts = port_ >= 0 && strangers_.size() < members_.size() + watching::SPARE_STRANGERS;
        std::vector<pollfd> fds{{wake_, POLLIN, 0}, {accepts ? port_ : -1, POLLIN, 0}};
        for_each_link([&](watching::Link& link) { fds.push_back(link.interest()); });
        watching::poll_until(fds, deadline);
        size_t i = 2;
        for_each_link([&](watching::Link& link) { link.serve(fds[i++]); });
        uint64_t count;
        if (fds[0].revents != 0 && read(wake_, &count, sizeof(count)) < 0) return;
        if (fds[1].revents == 0) return;
        const int fd = accept4(port_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) strangers_.push_back({watching::Link(fd, timeout_), watching::now(), -1, ""});
    }

    void note(watching::Member& m, const watching::Beat& beat) {
        m.heard = awake_;
        if (!(beat == m.beat)) m.moved = any_moved_ = awake_;
        m.beat = beat;
    }

    void leave(watching::Member& m) {
        m.left = true;
        any_moved_ = awake_;   // those who are left may have waited for this
    }

    // Whether it may stay.
    bool greet(watching::Stranger& s) {
        watching::Message message;
        while (s.link.take(message, watching::LONGEST_INTRODUCTION)) {
            const watching::Header& header = message.header;
            if (s.rank >= 0 && header.kind == watching::Kind::BEAT) {   // it has read WELCOME, so it will not try again
                watching::Member& m = members_[static_cast<size_t>(s.rank)];
                if (m.process != 0 || !is_introduced(s.introduction, m)) return false;
                m.link = std::move(s.link);
                note(m, header.beat);
                return false;
            }
            watching::Member unknown;
            if (s.rank >= 0 || header.kind != watching::Kind::HELLO) return false;
            if (!is_introduced(message.text, unknown) || header.code < 1 || header.code >= count_) return false;
            s.rank = header.code;
            s.introduction = message.text;
            s.link.send(watching::Kind::WELCOME, 0, me().beat, introduction());
        }
        return !s.link.is_closed_by_other() && watching::now() < s.since + watching::STRANGERS_STAY;
    }

    void meet_strangers() {
        if (port_ < 0) return;
        strangers_.erase(std::remove_if(strangers_.begin(), strangers_.end(),
                                        [this](watching::Stranger& s) { return !greet(s); }), strangers_.end());
        for (const watching::Member& m : members_)
            if (m.process == 0) return;
        close(std::exchange(port_, -1));
        strangers_.clear();
        for (watching::Member& m : members_) m.link.send(watching::Kind::ALL, 0, me().beat);
        be_connected();
    }

    // Whether rank 0 has said that all is done.
    bool hear_members() {
        bool done = false;
        for (watching::Member& m : members_) {
            watching::Message message;
            while (m.link.take(message, watching::LONGEST_TEXT)) done = hear(m, message) || done;
            if (done) return true;
            if (!m.link.is_open() || !m.link.is_closed_by_other()) continue;
            if (!m.failed && !m.left) end_for(m, " died" + in_step(std::max(m.beat.step, me().beat.step)));
            m.link.close();
        }
        return false;
    }

    bool hear(watching::Member& m, const watching::Message& message) {
        const watching::Header& header = message.header;
        note(m, header.beat);
        switch (header.kind) {
            case watching::Kind::ALL: be_connected(); break;
            case watching::Kind::FAIL:
                m.failed = true;
                if (!failing_)
                    pending_ = {rank_of(m), header.code, message.text, watching::now() + watching::FOR_THE_SAME_ERROR};
                failing_ = true;
                break;
            case watching::Kind::END:
                if (rank_ == 0) end(header.code);   // others are still to be told
                _exit(header.code);
            case watching::Kind::BYE: leave(m); break;
            case watching::Kind::DONE: return true;
            default: break;
        }
        return false;
    }

    // What the main thread wants. Whether that is the end of this one.
    bool obey() {
        Goal goal;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            goal = goal_;
            if (failed_ && !me().failed) {
                me().failed = failing_ = true;
                pending_ = failure_;   // rank 0's own comes before others'
                pending_.until = watching::now() + (rank_ == 0 ? watching::FOR_A_CAUSE : watching::FOR_AN_ANSWER);
                if (rank_ != 0) members_[0].link.send(watching::Kind::FAIL, pending_.code, me().beat, pending_.text);
            }
        }
        if (goal == Goal::GIVE_UP) part(watching::Kind::END, 1);
        if (goal == Goal::FINISH && !finishing_) {
            finishing_ = true;
            leave(me());
            finish_until_ = watching::now() + timeout_;
            if (rank_ != 0) members_[0].link.send(watching::Kind::BYE, 0, me().beat);
        }
        if (goal != Goal::FINISH) return goal != Goal::WATCH;
        const bool waits = watching::now() < finish_until_;
        if (rank_ != 0) return !waits;
        for (const watching::Member& m : members_)
            if (!m.left && waits) return false;
        part(watching::Kind::DONE, 0);
        return true;
    }

    // Ends the run if a rank hangs that is armed.
    void judge() {
        const std::string limit = " for " + watching::short_number(timeout_) + " s";
        bool all_wait = rank_ == 0 && awake_ - any_moved_ > timeout_;
        int64_t first = INT64_MAX, last = -1;
        for (const watching::Member& m : members_) {
            if (m.left || m.process == 0) continue;
            const bool listens = m.link.is_open() && m.beat.armed != 0;   // to it, and its silence counts
            const bool silent = listens && awake_ - m.heard > 3 * interval_;
            const double longest = timeout_ + (rank_ > 1 ? interval_ : 0);   // of rank 0's, rank 1 is to speak
            if (listens && awake_ - m.heard > longest)
                end_for(m, " has hung" + in_step(m.beat.step) + ": nothing from it" + limit +
                           ", its process is stopped or its machine gone");
            const bool still = m.beat.armed != 0 && awake_ - m.moved > timeout_;
            if (rank_ == 0 && still && !silent && m.beat.waiting == 0)
                end_for(m, " has hung" + in_step(m.beat.step) + ": it has neither moved nor waited" + limit);
            all_wait = all_wait && still && !silent && m.beat.waiting != 0;
            first = std::min(first, m.beat.step);
            last = std::max(last, m.beat.step);
        }
        if (!all_wait || first == INT64_MAX) return;
        say("all ranks have waited for each other" + limit +
            (first == last ? in_step(last) : " in steps " + std::to_string(first) + " to " + std::to_string(last)));
        end(1);
    }

    // ---- the end --------------------------------------------------------------------------------

    static std::string in_step(int64_t step) {
        return step < 0 ? " before the first step" : " in step " + std::to_string(step);
    }

    static std::string with_rank(int rank, const std::string& text) {
        return rank == 0 ? text : "rank " + std::to_string(rank) + ": " + text;
    }

    // The one message. A second one waits until the first is out.
    void say(const std::string& text) {
        if (said_.exchange(true)) return watching::sleep(watching::FOR_STDERR);
        const char* begin = armed_ ? "\n" : "";   // while steps are shown a line is begun
        watching::write_to_stderr(begin + ("train_gpt: " + text) + (text.empty() || text.back() != '\n' ? "\n" : ""));
    }

    // Because of m, which died or hangs. Where a rank has failed, this may be why.
    [[noreturn]] void end_for(const watching::Member& m, const std::string& deed) {
        const std::string who = "rank " + std::to_string(rank_of(m)) + " (host " + m.host + ", process " +
                                std::to_string(m.process) + ")";
        const std::string also = "; rank " + std::to_string(pending_.rank) + " failed: " + pending_.text;
        if (rank_ > 1) {
            watching::sleep(watching::FOR_RANK_1);
            _exit(1);
        }
        say(who + deed + "; all others stop" + (failing_ ? also : ""));
        end(1);
    }

    [[noreturn]] void end(int code) {
        outlive_mpirun();
        part(watching::Kind::END, code);
        _exit(code);
    }

    // The last word to all. A connection that closes with something unread would take it back, and mpirun is to find
    // rank 0 alive until others have ended: so it waits, for a moment, until they have closed.
    void part(watching::Kind kind, int code) {
        if (port_ >= 0) close(std::exchange(port_, -1));
        for (watching::Stranger& s : strangers_) {   // one that was welcomed may count on us
            watching::Member& m = members_[static_cast<size_t>(std::max(s.rank, 0))];
            if (s.rank > 0 && !m.link.is_open()) m.link = std::move(s.link);
        }
        strangers_.clear();
        for_each_link([&](watching::Link& link) { link.send(kind, code, me().beat); });
        const double deadline = watching::now() + watching::FOR_PARTING;
        for (bool open = true; open && watching::now() < deadline;) {
            open = false;
            sleep_until(deadline);
            for_each_link([&](watching::Link& link) {
                link.forget();
                open = open || !link.is_closed_by_other();
            });
            for (watching::Member& m : members_)
                if (m.link.is_closed_by_other()) m.link.close();
        }
    }
};

// What people see of a run besides samples: lines on a terminal that are drawn over and over, none wider than it; and,
// at its end, the commands that go on from there.

#pragma once

#include <sys/ioctl.h>

// ---- numbers ------------------------------------------------------------------------------------

std::string short_number(double x) {
    if (x >= 1e6) return format("%.2fM", x / 1e6);
    return x >= 1e3 ? format("%.1fk", x / 1e3) : format("%.0f", x);
}

std::string clock_text(double seconds) {
    const long s = lround(seconds);
    return s >= 3600 ? format("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60) : format("%ld:%02ld", s / 60, s % 60);
}

constexpr size_t BEYOND_MEMORY = size_t{1} << 56;   // more bytes than any memory has

std::string size_text(size_t bytes) {
    if (bytes >= BEYOND_MEMORY) return format("more than %.0f PB", floor(BEYOND_MEMORY / 1e15));
    if (bytes < 1e6) return format("%.1f kB", bytes / 1e3);
    return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
}

// `share` of a bar of 40 characters. More than all of it: a full bar, and how many times as much.
std::string bar(double share) {
    constexpr int WIDTH = 40;
    const std::string full(lround(WIDTH * std::min(1.0, share)), '#');
    return share <= 1 ? full : full + format("> %.3g x", share);
}

// ---- lines that fit -----------------------------------------------------------------------------

constexpr int USUAL_COLUMNS = 80;   // of a terminal that does not say

int terminal_columns(int file) {
    winsize size = {};
    return ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : USUAL_COLUMNS;
}

// A part of a line, and when it goes: the highest rank first.
struct LinePart { int rank; std::string text; };

// The parts one after the other, without as many as it takes to need no more than `width` columns. What alone is too
// long is cut.
std::string fitted(std::vector<LinePart> parts, size_t width) {
    auto lower = [](const LinePart& a, const LinePart& b) { return a.rank < b.rank; };
    for (;; parts.erase(std::max_element(parts.begin(), parts.end(), lower))) {
        std::string line;
        for (const LinePart& part : parts) line += part.text;
        if (line.size() <= width || parts.size() <= 1) return line.substr(0, width);
    }
}

// Draws a line over the last one. The last column stays free: what fills it would make some terminals wrap.
void draw_line(FILE* to, const std::vector<LinePart>& parts) {
    fprintf(to, "\r%s\033[K", fitted(parts, terminal_columns(fileno(to)) - 1).c_str());
    fflush(to);
}

constexpr double REDRAWN_AFTER = 0.1;   // seconds

// How far something is that takes a while: on standard error, where that is a terminal, and gone when it is done.
class Meter {
public:
    Meter(const char* what, size_t all) : what_(what), all_(all) {}
    Meter(const Meter&) = delete;
    ~Meter() { if (drawn_) fprintf(stderr, "\r\033[K"); }

    void show(size_t done) {
        const double now = seconds_now();
        if (!terminal_ || now - shown_ < REDRAWN_AFTER) return;
        shown_ = now;
        drawn_ = true;
        draw_line(stderr, {{1, what_}, {0, format(" %zu/%zu", done, all_)},
                           {2, format("  %s left", clock_text((now - start_) / done * (all_ - done)).c_str())}});
    }

private:
    const char* what_;
    size_t all_;
    double start_ = seconds_now(), shown_ = start_;
    bool terminal_ = isatty(STDERR_FILENO), drawn_ = false;
};

// ---- the line of a run's steps ------------------------------------------------------------------

struct StepResult {
    double loss, norm, lr, seconds, tokens_per_s, mfu, hfu, loss_scale;
    bool is_finite;   // loss and norm, or the step was skipped
};

// One line that is drawn over and over on a terminal; elsewhere a line every now and then.
class Progress {
public:
    Progress(long first_step, long steps) : first_(first_step), steps_(steps), shown_step_(first_step) {}
    void start() { start_ = shown_ = seconds_now(); }

    void show(long step, const StepResult& r) {
        const double now = seconds_now(), interval = terminal_ ? REDRAWN_AFTER : 3;
        if (step < steps_ && step > first_ + 1 && now - shown_ < interval) return;
        // Speed since the last line, not of one step.
        const double speed = (step - shown_step_) * r.seconds / (now - shown_);
        shown_ = now;
        shown_step_ = step;
        const double left = (now - start_) / (step - first_) * (steps_ - step);
        constexpr int WIDTH = 20;
        std::string bar(WIDTH, '.');
        std::fill(bar.begin(), bar.begin() + WIDTH * step / steps_, '#');
        const std::vector<LinePart> parts = {
            {0, format("step %*ld/%ld", digits(), step, steps_)},
            {7, " [" + bar + "]"},
            {1, format(" loss %.4f", r.loss)},
            {3, format("  norm %.2f", r.norm)},
            {4, format("  lr %.2e", r.lr)},
            {8, r.loss_scale == NO_SCALE ? "" : format("  scale %.0f", r.loss_scale)},
            {2, format("  %s tok/s", short_number(speed * r.tokens_per_s).c_str())},
            {6, format("  MFU %.1f%%", 100 * speed * r.mfu)},
            {5, format("  %s left", clock_text(left).c_str())}};
        if (terminal_) draw_line(stdout, parts);
        else printf("%s\n", fitted(parts, std::string::npos).c_str());
        open_ = terminal_;
        fflush(stdout);
    }
    // Before anything else is printed.
    void end_line() {
        if (std::exchange(open_, false)) printf("\n");
    }

private:
    int digits() const { return static_cast<int>(std::to_string(steps_).size()); }

    long first_, steps_, shown_step_;
    double start_ = 0, shown_ = 0;
    bool terminal_ = isatty(STDOUT_FILENO), open_ = false;
};

// ---- what can be done next ----------------------------------------------------------------------

// Lines to copy, of those that apply. `prompt`: of a sample, where the model has no text.
void print_next(const Options& o, const std::string& checkpoint, const std::string& prompt, bool is_whole) {
    if (o.out.empty()) {
        printf("next       nothing was kept: with --out DIR a run can be resumed, sampled from and plotted\n");
        return;
    }
    if (!checkpoint.empty()) {
        const std::string dir = shell_word(checkpoint), program = shell_word(program_invocation_name);
        if (!is_whole) printf("go on      %s train --resume --out %s\n", program.c_str(), shell_word(o.out).c_str());
        printf("sample     %s sample --from %s%s\n", program.c_str(), dir.c_str(), prompt.c_str());
        printf("open       python3 -i -c 'import sys, transformers; "
               "model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1])' %s\n", dir.c_str());
    }
    const char* plot = "scripts/plot.py";
    if (fs::exists(plot)) printf("plot       python3 %s %s\n", plot, shell_word(o.out).c_str());
}

// ---- other programs -----------------------------------------------------------------------------
// Other programs on this one's cores slow a run on a CPU by more than what they take, as each thread waits for the
// slowest. Linux counts, for every thread, how long it ran and how long it was ready but had no core.

double share_without_core() {
    double with = 0, without = 0;
    std::error_code none;   // where Linux does not count, the share is 0
    for (const auto& thread : fs::directory_iterator("/proc/self/task", none)) {
        double ran = 0, waited = 0;   // ns
        if (std::ifstream(thread.path() / "schedstat") >> ran >> waited) with += ran, without += waited;
    }
    return without > 0 ? without / (with + without) : 0;
}

// Empty where little was lost: on a quiet machine threads wait now and then, too.
std::string busy_text(double share) {
    constexpr double MUCH = 0.1;
    if (share < MUCH) return "";
    return format("busy: %.0f %% of their time so far, threads waited for a core", 100 * share);
}

void say_if_busy(FILE* to) {
    const std::string text = device.is_cpu() ? busy_text(share_without_core()) : "";
    if (!text.empty()) fprintf(to, "machine    %s\n", text.c_str());
}

// From Linux' /proc: what getrusage tells includes the program that started this one.
size_t peak_resident_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        size_t kib;
        if (word == "VmHWM:" && status >> kib) return kib * 1024;
    }
    return 0;
}

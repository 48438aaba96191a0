#include "terminal.h"

#include <errno.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

// ---- numbers ------------------------------------------------------------------------------------

std::string size_text(size_t bytes) {
    if (bytes >= BEYOND_MEMORY) return format("more than %.0f PB", floor(BEYOND_MEMORY / 1e15));
    if (bytes < 1e6) return format("%.1f kB", bytes / 1e3);
    return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
}

std::string short_number(double x) {
    if (x >= 1e6) return format("%.2fM", x / 1e6);
    return x >= 1e3 ? format("%.1fk", x / 1e3) : format("%.0f", x);
}

std::string clock_text(double seconds) {
    const long s = lround(seconds);
    return s >= 3600 ? format("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60) : format("%ld:%02ld", s / 60, s % 60);
}

std::string bar(double share) {
    constexpr int WIDTH = 40;
    const std::string full(lround(WIDTH * std::min(1.0, share)), '#');
    return share <= 1 ? full : full + format("> %.3g x", share);
}

// ---- lines that fit -----------------------------------------------------------------------------

int terminal_columns(int file) {
    winsize size = {};
    return ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : USUAL_COLUMNS;
}

std::string fitted(std::vector<LinePart> parts, size_t width) {
    auto lower = [](const LinePart& a, const LinePart& b) { return a.rank < b.rank; };
    for (;; parts.erase(std::max_element(parts.begin(), parts.end(), lower))) {
        std::string line;
        for (const LinePart& part : parts) line += part.text;
        if (line.size() <= width || parts.size() <= 1) return line.substr(0, width);
    }
}

// Draws a line over the last one. The last column stays free, as some terminals wrap when it is filled.
static void draw_line(FILE* to, const std::vector<LinePart>& parts) {
    fprintf(to, "\r%s\033[K", fitted(parts, terminal_columns(fileno(to)) - 1).c_str());
    fflush(to);
}

static constexpr double REDRAWN_AFTER = 0.1;   // seconds

// ---- progress -----------------------------------------------------------------------------------

Meter::Meter(const char* what, size_t all)
    : what_(what), all_(all), start_(seconds_now()), shown_(start_), terminal_(isatty(STDERR_FILENO)) {}

Meter::~Meter() {
    if (drawn_) fprintf(stderr, "\r\033[K");
}

void Meter::show(size_t done) {
    const double now = seconds_now();
    if (!terminal_ || now - shown_ < REDRAWN_AFTER) return;
    shown_ = now;
    drawn_ = true;
    draw_line(stderr, {{1, what_}, {0, format(" %zu/%zu", done, all_)},
                       {2, format("  %s left", clock_text((now - start_) / done * (all_ - done)).c_str())}});
}

Progress::Progress(long first_step, long steps)
    : first_(first_step), steps_(steps), shown_step_(first_step), terminal_(isatty(STDOUT_FILENO)) {}

void Progress::start() { start_ = shown_ = seconds_now(); }

void Progress::show(long step, const StepResult& r) {
    const double now = seconds_now(), interval = terminal_ ? REDRAWN_AFTER : 3;
    if (step < steps_ && step > first_ + 1 && now - shown_ < interval) return;
    // Speed since the last line, not of one step.
    const double speed = (step - shown_step_) * r.seconds / (now - shown_);
    shown_ = now;
    shown_step_ = step;
    const double left = (now - start_) / (step - first_) * (steps_ - step);
    const int digits = static_cast<int>(std::to_string(steps_).size());
    constexpr int WIDTH = 20;
    std::string bar(WIDTH, '.');
    std::fill(bar.begin(), bar.begin() + WIDTH * step / steps_, '#');
    const std::vector<LinePart> parts = {
        {0, format("step %*ld/%ld", digits, step, steps_)},
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

void Progress::end_line() {
    if (std::exchange(open_, false)) printf("\n");
}

// ---- samples ------------------------------------------------------------------------------------

void Printer::prompt(const std::string& bytes) {
    pending_ += bytes;
    print(pending_.size() - incomplete_end(pending_));
}

bool Printer::add(const std::string& bytes) {
    pending_ += bytes;
    const size_t end = stop_.empty() ? pending_.npos : pending_.find(stop_);
    if (end != pending_.npos) pending_.resize(end);
    else print(pending_.size() - std::max(incomplete_end(pending_), begun_stop()));
    return end == pending_.npos;
}

// How many bytes at the end may be the beginning of the text that ends the sample.
size_t Printer::begun_stop() const {
    size_t n = stop_.empty() ? 0 : std::min(stop_.size() - 1, pending_.size());
    while (n > 0 && pending_.compare(pending_.size() - n, n, stop_, 0, n) != 0) n--;
    return n;
}

// Prints the first n bytes: to a file as they are, to a terminal without control characters.
void Printer::print(size_t n) {
    std::string text = pending_.substr(0, n);
    pending_.erase(0, n);
    if (isatty(fileno(to_))) text = readable(text, REPLACEMENT_CHARACTER);
    fwrite(text.data(), 1, text.size(), to_);
    fflush(to_);
}

// ---- what comes next ----------------------------------------------------------------------------

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
    if (exists(plot)) printf("plot       python3 %s %s\n", plot, shell_word(o.out).c_str());
}

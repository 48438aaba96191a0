#include "terminal.h"

#include <errno.h>

#include <algorithm>
#include <cmath>

// ---- numbers ------------------------------------------------------------------------------------

std::string size_text(size_t bytes) {
    if (bytes >= BEYOND_MEMORY) return format("more than %.0f PB", floor(BEYOND_MEMORY / 1e15));
    if (bytes < 1e6) return format("%.1f kB", bytes / 1e3);
    return bytes < 1e9 ? format("%.1f MB", bytes / 1e6) : format("%.2f GB", bytes / 1e9);
}

std::string short_number(double x) {
    if (x >= 1e9) return format("%.2fB", x / 1e9);
    if (x >= 1e6) return format("%.2fM", x / 1e6);
    return x >= 1e3 ? format("%.1fk", x / 1e3) : format("%.0f", x);
}

std::string grouped(long n) {
    std::string digits = std::to_string(n);
    for (long at = static_cast<long>(digits.size()) - 3; at > 0; at -= 3) digits.insert(at, ",");
    return digits;
}

std::string clock_text(double seconds) {
    const long s = lround(seconds);
    if (s >= 86400) return format("%ldd %02ld:%02ld", s / 86400, s / 3600 % 24, s / 60 % 60);
    return s >= 3600 ? format("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60) : format("%ld:%02ld", s / 60, s % 60);
}

// ---- progress -----------------------------------------------------------------------------------

// Loss or norm are more than 3 standard deviations above the mean of the last steps.
constexpr double SHOWN_Z = 3;
static bool is_spike(const StepResult& r) { return r.loss_z > SHOWN_Z || r.norm_z > SHOWN_Z; }

std::string progress_text(long step, long steps, const StepResult& r, double left, bool verbose) {
    const int digits = static_cast<int>(std::to_string(steps).size());
    auto with_z = [](const std::string& text, double z) { return text + (z > SHOWN_Z ? format(" (z %.1f)", z) : ""); };
    const std::string loss = with_z(format("step %*ld/%ld loss %.4f", digits, step, steps, r.loss), r.loss_z);
    const std::string norm = with_z(format("  norm %.2f", r.norm), r.norm_z);
    const std::string speed = r.skipped ? "  skipped" : is_spike(r) ? "" :
                              format("  %s tok/s  MFU %.1f%%  %s left", short_number(r.tokens_per_s).c_str(),
                                     100 * r.mfu, clock_text(left).c_str());
    const std::string scale = verbose && r.loss_scale != NO_SCALE ? format("  scale %.0f", r.loss_scale) : "";
    for (const std::string& optional : {norm + scale, is_spike(r) ? norm : scale})
        if (loss.size() + optional.size() + speed.size() < 80) return loss + optional + speed;
    return loss + speed;
}

void Progress::show(long step, long steps, const StepResult& r) {
    const double now = seconds_now(), interval = terminal_ ? 0.1 : 3;
    if (step < steps && step > first_ + 1 && now - shown_ < interval && !r.skipped) return;
    const double relative_speed = (step - shown_step_) * r.seconds / (now - shown_);
    shown_ = now;
    shown_step_ = step;
    StepResult mean = r;   // the mean speed since the last line, not that of one step
    mean.tokens_per_s *= relative_speed;
    mean.mfu *= relative_speed;
    const double left = (now - start_) / (step - first_) * (steps - step);
    const std::string line = progress_text(step, steps, mean, left, verbose_);
    const size_t columns = terminal_columns();
    // The last column stays free, as some terminals wrap when it is filled.
    if (terminal_) printf("\r%s\033[K", line.substr(0, columns ? columns - 1 : 79).c_str());
    else printf("%s\n", line.c_str());
    open_ = terminal_;
    if (r.skipped) end_line();   // the line stays
    fflush(stdout);
}

// ---- samples ------------------------------------------------------------------------------------

bool Printer::add(const std::string& bytes) {
    pending_ += bytes;
    const size_t end = stop_.empty() ? pending_.npos : pending_.find(stop_);
    if (end != pending_.npos) {
        pending_.resize(end);
        return false;
    }
    size_t held = std::min(stop_.size(), pending_.size());   // bytes at the end that may begin the stop text
    while (held > 0 && pending_.compare(pending_.size() - held, held, stop_, 0, held) != 0) held--;
    print(pending_.size() - std::max(incomplete_end(pending_), held));
    return true;
}

// Prints the first n bytes: unchanged to a file, without control characters to a terminal.
void Printer::print(size_t n) {
    std::string text = pending_.substr(0, n);
    pending_.erase(0, n);
    if (isatty(fileno(to_))) text = readable(text, REPLACEMENT_CHARACTER);
    fwrite(text.data(), 1, text.size(), to_);
    fflush(to_);
}

// ---- next commands ------------------------------------------------------------------------------

void print_next(const Options& o, const std::string& checkpoint, const std::string& prompt, bool is_complete) {
    if (o.out.empty()) {
        printf("next       nothing was saved: --out DIR saves a log and checkpoints\n");
        return;
    }
    const std::string out = shell_word(o.out);
    if (!checkpoint.empty()) {
        const std::string dir = shell_word(checkpoint), program = shell_word(program_invocation_name);
        printf("sample     %s sample --from %s%s\n", program.c_str(), dir.c_str(), prompt.c_str());
        if (!is_complete) printf("resume     %s train --resume --out %s\n", program.c_str(), out.c_str());
        if (o.verbose)
            printf("open       python3 -i -c 'import sys, transformers; "
                   "model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1])' %s\n", dir.c_str());
    }
    if (exists("scripts/plot.py"))
        printf("plot       python3 scripts/plot.py %s --out %s\n", out.c_str(),
               shell_word(o.out + "/plot.png").c_str());
}

// What a run prints: numbers, the progress line, samples, and the commands to copy at the end.
#pragma once

#include "options.h"

constexpr size_t BEYOND_MEMORY = size_t{1} << 56;   // this size and larger ones count as infinite

std::string size_text(size_t bytes);      // 24.81 GB
std::string short_number(double x);       // 12.3k
std::string grouped(long n);              // 1,003,855
std::string clock_text(double seconds);   // 1:02:03, from a day on 2d 03:04

struct StepResult {
    double loss, norm, lr, seconds, tokens_per_s, mfu, hfu, loss_scale;   // mfu, hfu: model, hardware FLOPs utilisation
    bool is_finite;   // whether loss and norm are finite, or the step was skipped
    bool skipped = false;
    double loss_z = NAN, norm_z = NAN;   // z-scores: see spikes.cuh
};

// Returns the progress line of a step, less than 80 columns wide: the norm is omitted if it does not fit. The line of a
// spike has its z-scores, that of a skipped step "skipped", instead of speed and time. left: seconds to the end of the
// run. verbose: also prints the loss scale.
std::string progress_text(long step, long steps, const StepResult& r, double left, bool verbose);

// Prints the progress line: redrawn in place on a terminal, elsewhere a line every few seconds and at each skipped step.
class Progress {
public:
    Progress(long first_step, bool verbose) : first_(first_step), shown_step_(first_step), verbose_(verbose) {}
    void start() { start_ = shown_ = seconds_now(); }
    void show(long step, long steps, const StepResult& r);   // steps: of the whole run
    // Ends the line on a terminal: call it before printing anything else.
    void end_line() { if (std::exchange(open_, false)) printf("\n"); }

private:
    long first_, shown_step_;
    double start_ = 0, shown_ = 0;
    bool verbose_, terminal_ = isatty(STDOUT_FILENO), open_ = false;
};

// Prints a sample while it is generated, in whole UTF-8 characters.
class Printer {
public:
    explicit Printer(FILE* to) : to_(to) {}
    void stop_at(const std::string& text) { stop_ = text; }   // `text` and everything after it are not printed
    bool add(const std::string& bytes);                       // returns false once the stop text has appeared
    void end() { print(pending_.size()); }

private:
    void print(size_t n);

    FILE* to_;
    std::string stop_, pending_;
};

// Prints commands to copy. `prompt`: the options that a sample from a model without a tokenizer needs. is_complete: the
// run has made all its steps, so no command to resume it is printed.
void print_next(const Options& o, const std::string& checkpoint, const std::string& prompt, bool is_complete);

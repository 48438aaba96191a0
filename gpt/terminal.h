// The output of a run: numbers, progress, samples, and the commands that come next.
#pragma once

#include <cstdio>
#include <string>

#include "options.h"

constexpr size_t BEYOND_MEMORY = size_t{1} << 56;   // sizes from here on count as infinite

std::string size_text(size_t bytes);      // 24.81 GB
std::string short_number(double x);       // 12.3k
std::string clock_text(double seconds);   // 1:02:03

struct StepResult {
    double loss, norm, lr, seconds, tokens_per_s, mfu, hfu, loss_scale;
    bool is_finite;   // loss and norm, or the step was skipped
};

// The line of a run's steps: redrawn in place on a terminal, elsewhere a line every few seconds.
class Progress {
public:
    Progress(long first_step, long steps);
    void start();
    void show(long step, const StepResult& r);
    void end_line();   // before anything else is printed

private:
    long first_, steps_, shown_step_;
    double start_ = 0, shown_ = 0;
    bool terminal_, open_ = false;
};

// Prints a sample as it is drawn: whole characters only.
class Printer {
public:
    explicit Printer(FILE* to) : to_(to) {}
    void stop_at(const std::string& text) { stop_ = text; }   // of what follows, `text` and the rest is not printed
    bool add(const std::string& bytes);                       // false once that text has come
    void end() { print(pending_.size()); }

private:
    void print(size_t n);

    FILE* to_;
    std::string stop_, pending_;
};

// Prints commands to copy. `prompt`: the options of a sample from a model without a tokenizer.
void print_next(const Options& o, const std::string& checkpoint, const std::string& prompt, bool is_whole);

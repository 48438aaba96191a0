// Whether other programs take this one's cores. They slow a run on a CPU by more than what they take, as each thread
// waits for the slowest. Linux counts, for every thread, how long it ran and how long it was ready to but had no core.
// Included by train_gpt.cu, whose format() it uses.
#pragma once

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

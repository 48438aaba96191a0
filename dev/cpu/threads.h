// The workers: how many there are, and how they wait for each other.
//
// They are libgomp's threads, and oneDNN multiplies on the same ones. A training step makes them wait thousands of
// times, mostly for microseconds. libgomp lets a thread that waits spin, 300,000 turns of a loop, before it sleeps.
// That is best as long as every worker has a core of its own. But where other programs want the cores too, the worker
// that is waited for may itself be waiting for the core that another one spins on, and a step takes tens of times
// longer. To sleep at once (OMP_WAIT_POLICY=passive) is best there, and costs a quiet machine a third of its speed.
//
// Who does not know how long a wait will be spins for as long as sleeping and waking would cost, and then sleeps: that
// takes at most twice what it would take to know (Karlin, Li, Manasse and Owicki 1991).
#pragma once

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <system_error>
#include <vector>

namespace cuda_cpu {

// Sleeping and waking take 5 to 50 microseconds. Beside other programs each spin is mostly lost: against none at all,
// training loses up to a third with 20, sampling, which does little between its waits, half; with 50, two thirds.
constexpr double spin_ns = 20e3;

// What a turn of libgomp's loop takes: a look at memory and, on x86, a pause, which lasts 5 to 60 ns by processor.
inline double ns_of_a_turn()
{
    constexpr int tries = 5, turns = 1000;
    double best = std::numeric_limits<double>::max();  // in the others something else may have had the core
    volatile int flag = 0;
    for (int attempt = 0; attempt < tries; attempt++) {
        const auto start = std::chrono::steady_clock::now();
        for (int turn = 0; turn < turns && flag == 0; turn++) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
        best = std::min(best, time.count() / turns);
    }
    return best;
}

// libgomp takes the number of turns from GOMP_SPINCOUNT, and looks at it once: when it is loaded, before anything
// here runs. So the program sets it and starts again, as the same process with the same arguments; unless the user has
// chosen, or there is one worker, which never waits.
inline bool start_with_short_spins()
{
    const bool chosen = getenv("GOMP_SPINCOUNT") != nullptr || getenv("OMP_WAIT_POLICY") != nullptr;
    if (chosen || omp_get_max_threads() == 1) return false;
    std::error_code none;
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", none);
    std::ifstream command_line("/proc/self/cmdline", std::ios::binary);
    std::vector<std::string> words;
    for (std::string word; std::getline(command_line, word, '\0');) words.push_back(word);
    command_line.close();  // or it would stay open across execv
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    setenv("GOMP_SPINCOUNT", std::to_string(static_cast<long>(spin_ns / ns_of_a_turn())).c_str(), 1);
    if (!words.empty()) execv(self.c_str(), arguments.data());
    unsetenv("GOMP_SPINCOUNT");  // it could not: libgomp waits in its own way
    return false;
}
inline const bool started_with_short_spins = start_with_short_spins();  // before main

#ifdef KMP_VERSION_MAJOR  // LLVM's OpenMP, in programs built by clang, would spin for 200 ms; 0 ms is the next it knows
inline const bool llvm_sleeps_at_once = (kmp_set_blocktime(0), true);
#endif

// CUDA_CPU_THREADS, where it is set, says how many workers there are; else OpenMP does, by cores or OMP_NUM_THREADS.
inline void choose_workers()
{
    constexpr long most = 1024;
    const char* text = getenv("CUDA_CPU_THREADS");
    if (text == nullptr) return;
    char* end = nullptr;
    const long number = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != 0 || number < 1 || number > most) {
        fprintf(stderr, "CUDA_CPU_THREADS is \"%s\"; expected a whole number from 1 to %ld\n", text, most);
        exit(2);
    }
    omp_set_num_threads(static_cast<int>(number));
}

}  // namespace cuda_cpu

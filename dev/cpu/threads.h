// The workers: their number, and how long they spin while they wait for each other.
//
// Workers are libgomp threads, which oneDNN uses too. In a training step they wait thousands of times, mostly for
// microseconds. By default libgomp spins for 300,000 iterations before a thread sleeps. That is best if every worker
// has its own core; beside other programs a step then takes tens of times longer. Sleeping at once
// (OMP_WAIT_POLICY=passive) costs an idle machine a third of its speed. A wait that spins for as long as sleeping and
// waking would take, and then sleeps, takes at most twice the optimum (Karlin, Li, Manasse and Owicki 1991).
#pragma once

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "rounding.h"

namespace cuda_cpu {
// GOMP_SPINCOUNT, about 20 microseconds: one iteration of libgomp's loop (a load, on x86 also a pause) takes 5 to 60
// ns. Sleeping and waking take 5 to 50 microseconds. Beside other programs most spinning is wasted: compared with no
// spinning, 20 microseconds cost training up to a third and sampling half of its speed; 50 cost two thirds.
constexpr const char* spins = "800";

// Sets GOMP_SPINCOUNT and restarts the program, as the same process with the same arguments, because libgomp reads the
// variable when it is loaded, before any code of the program runs. Does nothing and returns false if the user has set
// this variable or OMP_WAIT_POLICY, or if there is only one worker.
inline bool start_with_short_spins() {
    const bool set_by_user = getenv("GOMP_SPINCOUNT") != nullptr || getenv("OMP_WAIT_POLICY") != nullptr;
    if (set_by_user || omp_get_max_threads() == 1) return false;
    std::error_code none;
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", none);
    std::ifstream command_line("/proc/self/cmdline", std::ios::binary);
    std::vector<std::string> words;
    for (std::string word; std::getline(command_line, word, '\0');) words.push_back(word);
    command_line.close();  // otherwise it would stay open across execv
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    setenv("GOMP_SPINCOUNT", spins, 1);
    if (!words.empty()) execv(self.c_str(), arguments.data());
    unsetenv("GOMP_SPINCOUNT");  // execv failed: libgomp keeps its default
    return false;
}
inline const bool started_with_short_spins = start_with_short_spins();  // runs before main

#ifdef KMP_VERSION_MAJOR  // programs built by clang: LLVM's OpenMP would spin for 200 ms; its next lower value is 0
inline const bool llvm_sleeps_at_once = (kmp_set_blocktime(0), true);
#endif

// Applies CUDA_CPU_THREADS, the number of workers. If it is 0 or unset, OpenMP chooses (OMP_NUM_THREADS or all cores).
inline void choose_workers() {
    const uint64_t workers = number_of_environment("CUDA_CPU_THREADS", 0);
    if (workers > 0) omp_set_num_threads(static_cast<int>(std::min<uint64_t>(workers, 1024)));
}
}  // namespace cuda_cpu

// The workers: how many there are, and how they wait for each other.
//
// They are libgomp's threads, and oneDNN multiplies on the same ones. A training step makes them wait thousands of
// times, mostly for microseconds. By default libgomp spins for 300,000 iterations before a thread sleeps, which is best
// if every worker has a core of its own; beside other programs a step then takes tens of times longer. To sleep at once
// (OMP_WAIT_POLICY=passive) costs a quiet machine a third of its speed. A wait that spins for as long as sleeping and
// waking would cost, and then sleeps, takes at most twice the optimum (Karlin, Li, Manasse and Owicki 1991).
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

// Sleeping and waking take 5 to 50 microseconds. Beside other programs most spins are lost: compared with none, 20
// microseconds cost training up to a third and sampling half of its speed; 50 cost two thirds. One iteration of
// libgomp's loop, a load and on x86 a pause, takes 5 to 60 ns.
constexpr const char* spins = "800";

// libgomp reads GOMP_SPINCOUNT when it is loaded, before any code of the program. So the program sets it and starts
// again, as the same process with the same arguments; unless the user has set it, or there is one worker.
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
    setenv("GOMP_SPINCOUNT", spins, 1);
    if (!words.empty()) execv(self.c_str(), arguments.data());
    unsetenv("GOMP_SPINCOUNT");  // execv failed: libgomp's default holds
    return false;
}
inline const bool started_with_short_spins = start_with_short_spins();  // before main

#ifdef KMP_VERSION_MAJOR  // LLVM's OpenMP, in programs built by clang, would spin for 200 ms; its next lower value is 0
inline const bool llvm_sleeps_at_once = (kmp_set_blocktime(0), true);
#endif

// Applies CUDA_CPU_THREADS, the number of workers; 0 or none: OpenMP chooses, by cores or OMP_NUM_THREADS.
inline void choose_workers()
{
    const uint64_t workers = number_of_environment("CUDA_CPU_THREADS", 0);
    if (workers > 0) omp_set_num_threads(static_cast<int>(std::min<uint64_t>(workers, 1024)));
}

}  // namespace cuda_cpu

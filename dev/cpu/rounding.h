// Rounding as on another machine. CUDA_CPU_ROUNDING=SEED perturbs those computations of the emulator in which
// processors, libraries and GPUs differ. The perturbation depends only on the seed, operands and shapes, so the same
// command gives the same bits. README.md lists what changes. Sums in a kernel's own loops are not perturbed (flags like
// -ffp-contract=off do).
#pragma once

#include <stdint.h>
#include <string.h>

#include <cstdio>
#include <cstdlib>

namespace cuda_cpu {
// Returns the same bits as another type.
template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "both types must have the same size");
    To to;
    memcpy(static_cast<void*>(&to), &from, sizeof(to));
    return to;
}

// The last step of splitmix64: spreads every bit of z over all bits of the result.
constexpr uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// The perturbations of a seed; seed 0 changes nothing. Coefficients are stored as bits of a float.
struct Rounding {
    uint64_t seed;
    int32_t log2_e_low;       // log2(e) - 1.44269502f
    int32_t exp2_1, exp2_2;   // coefficients of f and f^2 in the polynomial for 2^f
    unsigned k_order;         // XORed with k in tensor-core instructions

    // 1.92596299e-8f, 6.931472029e-1f and 2.402264791e-1f
    static constexpr Rounding exact() { return {0, 0x32a57060, 0x3f317218, 0x3e75fdee, 0}; }

    static Rounding of_seed(uint64_t seed) {
        Rounding r = exact();
        if (seed == 0) return r;
        r.seed = seed;
        const uint64_t z = mixed(seed * 0x9e3779b97f4a7c15);
        const float log2_e_error = 5e-10f * (1 + static_cast<float>(z % 4));
        r.log2_e_low = bits<int32_t>(1.92596299e-8f + (z & 4 ? log2_e_error : -log2_e_error));
        r.exp2_1 += z & 8 ? 1 : -1;
        r.exp2_2 += static_cast<int32_t>(z >> 8 & 7) - 4;
        r.k_order = 1 + static_cast<unsigned>(z >> 16) % 15;
        return r;
    }

    // Returns the k at which the second part of a sum begins; 0: the sum has one part.
    int64_t split(int64_t k) const {
        if (seed == 0 || k < 2) return 0;
        return 1 + static_cast<int64_t>(mixed(seed ^ static_cast<uint64_t>(k) << 32) % static_cast<uint64_t>(k - 1));
    }

    // Returns x or an adjacent float. Powers of 2, 0, infinity and NaN do not change: they are exact on all machines.
    float last_bit(float x) const {
        const uint32_t word = bits<uint32_t>(x);
        if (seed == 0 || (word & 0x7fffff) == 0 || (word >> 23 & 0xff) == 0xff) return x;
        return bits<float>(word + static_cast<uint32_t>(mixed(seed ^ static_cast<uint64_t>(word) << 32) % 3) - 1);
    }
};

// Returns the number in an environment variable, or `otherwise` if it is unset. Ends the program if it is not a number.
inline uint64_t number_of_environment(const char* variable, uint64_t otherwise) {
    const char* text = getenv(variable);
    if (text == nullptr) return otherwise;
    char* end = nullptr;
    const uint64_t number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != 0) {
        fprintf(stderr, "%s is \"%s\"; expected a whole number\n", variable, text);
        exit(2);
    }
    return number;
}

#ifdef CUDA_CPU_INSPECT
constexpr Rounding rounding = Rounding::exact();   // a constant, because instrumented kernels must not load it
#else
inline Rounding rounding = Rounding::of_seed(number_of_environment("CUDA_CPU_ROUNDING", 0));
inline void set_rounding(uint64_t seed) { rounding = Rounding::of_seed(seed); }
#endif

// Rounding of mathematical functions in kernels. At width 1, where the compiler vectorises loops around them, it is a
// constant unless the program is compiled with -DCUDA_CPU_ROUNDING_MATH: a variable would cost over 10 % of the speed.
#if WARP_SIZE == 1 && !defined(CUDA_CPU_ROUNDING_MATH)
constexpr bool perturbs_math = false;
constexpr Rounding math_rounding = Rounding::exact();
#else
constexpr bool perturbs_math = true;
static constexpr const Rounding& math_rounding = rounding;
#endif
}  // namespace cuda_cpu

// Puzzle 12: AdamW with mixed precision
//
//     m = BETA1 m + (1 - BETA1) g                 g = grads[i]; the same for each parameter i
//     v = BETA2 v + (1 - BETA2) g^2
//     master -= lr * (m / (1 - BETA1^t) / (sqrt(v / (1 - BETA2^t)) + EPS) + DECAY * master)
//     weights = master, rounded to BF16
//
// master, m, v: (n) float, updated; weights: (n) BF16, written; grads: (n) BF16. BF16 has only 8 significant bits: most
// updates are smaller than half of the last one and would be lost without the master weights.
//
// Judged: T, each byte is accessed once: grads are loaded, weights stored, master, m and v loaded and stored.
// The arrays do not overlap, but the compiler does not know that.
#include "puzzle.h"

#include <cmath>

constexpr int THREADS = 256;
constexpr float BETA1 = 0.9f, BETA2 = 0.95f, EPS = 1e-8f, DECAY = 0.1f;

// correction1 = 1 - BETA1^t, correction2 = 1 - BETA2^t
__global__ void adamw_kernel(bf16* weights, float* master, float* m, float* v, const bf16* grads, float lr,
                             float correction1, float correction2, int n) {
    // ---- your code: about 12 lines
    // ---- end
}

void adamw(bf16* weights, float* master, float* m, float* v, const bf16* grads, float lr, int t, int n) {
    adamw_kernel<<<ceil_div(n, THREADS), THREADS>>>(weights, master, m, v, grads, lr, 1 - std::pow(BETA1, t),
                                                    1 - std::pow(BETA2, t), n);
}

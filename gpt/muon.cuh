// Muon, --optimizer muon: the update of a layer's matrices. Included by train_gpt.cu.
//
// update    m = mu m + (1 - mu) g,   u = mu m + (1 - mu) g   (Nesterov momentum, mu = 0.95; g as in section "adamw")
//           X = u / max(|u|, 1e-7), the Frobenius norm; then 5 times   A = X X^T,   X = a X + (b A + c A A) X
//           w -= lr * (0.2 sqrt(max(rows, columns)) X + decay * w)
//           Newton-Schulz iterations move all singular values of X close to 1, so that rare directions change as much
//           as frequent ones. The factor 0.2 sqrt(...) gives X about the RMS of AdamW's updates
// shapes    (rows, columns): attproj, fc, fcproj, and separately Q, K and V, column blocks of qkv with row stride 3C
//           master = w, m fp32, no v | weights, X, A floatX | grads fp32 or 16 bits. AdamW updates all other parameters
// mapping   matmuls; for rows > columns A = X^T X and X = a X + X (b A + c A A), by flags. In the other kernels blocks
//           stride over rows and threads over packs. muon() launches all
// cost      compute: 10 n^2 (2 k + n) FLOPs, n the smaller and k the larger side. For a layer 300 C^3, as many as its
//           matmuls for about 4 C tokens. Bandwidth: 38 bytes per parameter in BF16 with FP32 gradients. With ZeRO 1 a
//           rank updates every G-th layer
// source    Jordan 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon with adjust_lr_fn="match_rms_adamw"
#pragma once

constexpr float MUON_MOMENTUM = 0.95f, MUON_EPS = 1e-7f, MUON_RMS = 0.2f;
constexpr float NEWTON_SCHULZ[] = {3.4445f, -4.775f, 2.0315f};   // a, b, c
constexpr int NEWTON_SCHULZ_STEPS = 5;

enum class MuonPass { MOMENTUM, NORMALISE };
// MOMENTUM updates m, and each block writes a partial sum of u^2. NORMALISE computes u again, X, and sets grads to 0.
template <MuonPass PASS, typename G>
__global__ void muon_kernel(floatX* out, float* partials, float* m, G* grads, const Step* step, MatrixView x) {
    constexpr bool FIRST = PASS == MuonPass::MOMENTUM;
    const float scale = step->factor;
    if (FIRST && scale == 0) return;   // a skipped step only sets grads to 0
    float sum = 0;
    for (unsigned i = threadIdx.x; !FIRST && i < gridDim.x; i += blockDim.x) sum += partials[i];
    const float inverse = FIRST ? 0 : 1 / fmaxf(sqrtf(block_sum(sum)), MUON_EPS);
    for (size_t row = blockIdx.x; row < x.rows; row += gridDim.x)
        for (size_t c = threadIdx.x * PACK_FP32; c < x.columns; c += blockDim.x * PACK_FP32) {
            const size_t at = row * x.stride + c;
            float g[PACK_FP32], m1[PACK_FP32], u[PACK_FP32];
            load(g, grads + at);
            load(m1, m + at);
            for (int k = 0; k < PACK_FP32; k++) {
                const float added = (1 - MUON_MOMENTUM) * scale * g[k];
                if (FIRST) m1[k] = MUON_MOMENTUM * m1[k] + added;
                u[k] = MUON_MOMENTUM * m1[k] + added;
                if (FIRST) sum += u[k] * u[k];
                u[k] *= inverse;
                g[k] = 0;
            }
            if (FIRST) store(m + at, m1);
            else store(out + row * x.columns + c, u), store(grads + at, g);
        }
    if (FIRST) sum = block_sum(sum);
    if (FIRST && threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// w -= lr * (factor * direction + decay * w)
__global__ void muon_update_kernel(floatX* weights, float* master, const floatX* direction, const Step* step,
                                   float factor, MatrixView x) {
    if (step->factor == 0) return;
    const float lr = step->lr, decay = step->weight_decay;
    for (size_t row = blockIdx.x; row < x.rows; row += gridDim.x)
        for (size_t c = threadIdx.x * PACK_FP32; c < x.columns; c += blockDim.x * PACK_FP32) {
            const size_t at = row * x.stride + c;
            float w[PACK_FP32], s[PACK_FP32];
            load(w, master + at);
            load(s, direction + row * x.columns + c);
            for (int k = 0; k < PACK_FP32; k++) w[k] -= lr * (factor * s[k] + decay * w[k]);
            store(master + at, w);
            if (static_cast<const void*>(weights) != master) store(weights + at, w);
        }
}

// Returns the last X (rows, columns). scratch: 2 (rows * columns + n^2) elements, n the smaller side; the first X.
const floatX* newton_schulz(floatX* scratch, size_t rows, size_t columns) {
    const size_t n = std::min(rows, columns), k = std::max(rows, columns);
    const bool tall = rows > columns;
    const Op ops[] = {Op::AS_IS, Op::TRANSPOSED, Op::AS_IS};
    const MatmulShape gram = {n, n, k, ops[tall], ops[tall + 1], FLOATX, Into::ASSIGN, Epilogue::NONE};
    const MatmulShape square = {n, n, n, Op::AS_IS, Op::AS_IS, FLOATX, Into::ADD, Epilogue::NONE};
    const MatmulShape whole = {rows, columns, n, Op::AS_IS, Op::AS_IS, FLOATX, Into::ADD, Epilogue::NONE};
    floatX *x = scratch, *y = x + n * k, *const A = y + n * k, *const polynomial = A + n * n;
    const auto [a, b, c] = NEWTON_SCHULZ;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++, std::swap(x, y)) {
        matmul({A, x, x, gram});
        matmul({polynomial, A, A, square, nullptr, nullptr, A, c, b});
        matmul({y, tall ? x : polynomial, tall ? polynomial : x, whole, nullptr, nullptr, x, 1, a});
    }
    return x;
}

// Updates one matrix. scratch: see newton_schulz; partials (NORM_BLOCKS) fp32
void muon(const Slice& s, const Step* step, floatX* scratch, float* partials) {
    const MatrixView& x = s.matrix;
    const size_t blocks = std::min(NORM_BLOCKS, x.rows);
    with_type(s.grads, [&](auto* grads) {
        typedef std::remove_pointer_t<decltype(grads)> G;
        launch("muon_momentum", muon_kernel<MuonPass::MOMENTUM, G>, blocks, BLOCK, 0, scratch, partials, updated(s.m),
               grads, step, x);
        launch("muon_normalise", muon_kernel<MuonPass::NORMALISE, G>, blocks, BLOCK, 0, scratch, partials, s.m,
               updated(grads), step, x);
    });
    launch("muon_update", muon_update_kernel, blocks, BLOCK, 0, s.weights, updated(s.master),
           newton_schulz(scratch, x.rows, x.columns), step,
           MUON_RMS * std::sqrt(static_cast<float>(std::max(x.rows, x.columns))), x);
}

// The gradient noise scale, --noise-every. Included by train_gpt.cu.
//
// With --noise-every: B_simple, the batch size in tokens around which larger batches begin to save few steps. The
// gradient of b tokens is the true gradient G plus noise: E|G_b|^2 = |G|^2 + S / b, where S is the trace of the
// covariance of one sequence's gradient, times its tokens. Two batch sizes b < B give unbiased estimates of both:
//
//           |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)      S = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)
//           B_simple = average of S / average of |G|^2     exponential moving averages over measured steps
//
// b         on one GPU the first micro-batch; on several a rank's whole part of the step, |G_b|^2 averaged over ranks
// cost      a measured step reads the gradients once more, and the host waits for the device. On several GPUs the
//           all-reduce or reduce-scatter of the gradients does not overlap backward
// source    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1
#pragma once

constexpr double NOISE_DECAY = 0.95;   // of the averages

// Averages of |G|^2 and S. They start at 0; as both have the same decay, this cancels in their quotient.
struct NoiseScale { double gradient = 0, trace = 0; };

// Returns |gradients|^2 of this rank, before they are summed over ranks.
double own_squared_norm(Model& m) {
    const Layout& y = m.layout;
    std::vector<float> partials(norm_blocks(y.common, y.layer, y.layers));
    norm_partials(m.a.norm_partials(), {m.grads, y.common, grad_at(m, y.common), y.layer, unsigned(y.layers), y.layer,
                                        partials.size()});
    download(partials.data(), m.a.norm_partials(), partials.size() * sizeof(float));
    return std::accumulate(partials.begin(), partials.end(), 0.0);
}

NoiseScale start_noise(const Start& start) {
    if (!start.trainer.contains("noise")) return {};
    const json& noise = start.trainer["noise"];
    if (!noise.is_array() || noise.size() != 2 || !noise[0].is_number() || !noise[1].is_number())
        throw UserError("%s/trainer.json: \"noise\": expected two numbers", start.dir.c_str());
    return {noise[0], noise[1]};
}

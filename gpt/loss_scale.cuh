// Loss scaling, --loss-scaling. Included by train_gpt.cu.
//
// FP16's smallest number is 2^-24 = 6e-8; values below half of it underflow to 0. Gradients of activations are often
// smaller, because the loss is a mean over the tokens of a step. Therefore cross-entropy multiplies the gradient of the
// loss by a scale. Backward is linear, so all gradients have that factor; the norm and the update divide by it in FP32.
// The scale is a power of two, which adds no rounding error. BF16 and FP32 reach down to 1e-38 and use a scale of 1.
// dynamic   The scale is as large as possible. If a gradient overflows, the norm is not finite: the step is skipped and
//           the scale halved. After `interval` good steps in a row the scale is doubled. A skipped step changes neither
//           weights nor moments nor AdamW's t; data and learning rate advance. All GPUs compute the same norm, so they
//           have the same scale. The decision is made on the device, so the host does not synchronise
// source    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; constants of PyTorch's GradScaler
#pragma once

struct LossScale {   // in device memory; floats only
    float scale = NO_SCALE;   // the factor of all gradients that backward computes
    float good_steps = 0;     // in a row since the scale last changed
    float skipped = 0;        // number of skipped steps of the run, also those that spikes.cuh skips
    float interval = 0;       // 0: the scale is fixed, and an overflow skips no step
};

constexpr float FIRST_LOSS_SCALE = 1 << 16, GROWTH_INTERVAL = 2000;

// Updates the scale after backward, given the norm of its gradients. Returns the factor by which the update multiplies
// them: 1 / scale, or 0, which skips the step.
__device__ float update_loss_scale(LossScale* s, float scaled_norm) {
    const bool skips = s->interval > 0 && !(scaled_norm < INFINITY);   // NaN also skips the step
    const float factor = skips ? 0 : 1 / s->scale;
    if (skips) {
        s->scale = fmaxf(s->scale / 2, 1.0f);
        s->good_steps = 0;
        s->skipped++;
    } else if (s->interval > 0 && ++s->good_steps >= s->interval) {
        s->scale = fminf(s->scale * 2, MAX_LOSS_SCALE);
        s->good_steps = 0;
    }
    return factor;
}

// Returns the loss scale of --loss-scaling. A dynamic scale continues from the checkpoint's, if that was dynamic too.
LossScale start_loss_scale(const Options& o, const Start& start) {
    const bool by_precision = o.loss_scaling == SCALE_BY_PRECISION;
    const double wanted = !by_precision ? o.loss_scaling : FLOATX == DType::FP16 ? DYNAMIC_SCALE : NO_SCALE;
    const bool dynamic = wanted == DYNAMIC_SCALE;
    LossScale s = {dynamic ? FIRST_LOSS_SCALE : float(wanted), 0, 0, dynamic ? GROWTH_INTERVAL : 0};
    if (!start.trainer.contains("loss_scaling")) return s;
    const std::string path = start.dir + "/trainer.json";
    auto number = [&](const char* key, long least, long most) {
        const long value = whole_number<long>(start.trainer["loss_scaling"], key, path);
        if (value >= least && value <= most) return float(value);
        throw UserError("%s: \"%s\" is %ld, expected %ld to %ld", path.c_str(), key, value, least, most);
    };
    s.skipped = number("skipped_steps", 0, start.step);
    if (!dynamic || !start.trainer["loss_scaling"].contains("scale")) return s;
    s.scale = number("scale", 1, MAX_LOSS_SCALE);
    s.good_steps = number("good_steps", 0, GROWTH_INTERVAL - 1);
    return s;
}

// Loss spikes: outliers of the loss and of the gradient norm, --skip-spikes. Included by train_gpt.cu.
//
// A damaged batch, or an instability, raises the loss or the norm far above those of the steps before. The z-score is
// that distance in standard deviations, over the last W = 128 steps, this one included:
//
//           z = (x - mean) / std      mean = sum of x / W,   std = sqrt(sum of (x - mean)^2 / W);   0 if std is 0
//
// z         exists from step W + 1 on. k equal outliers among equal values have z = sqrt((W - k) / k): at most 11.3
// skipping  A step is skipped if one of its two z-scores is above --skip-spikes; low values are no spikes. As after an
//           overflow in FP16 (loss_scale.cuh), weights, moments and AdamW's t do not change; data and learning rate
//           advance, and FP8's amaxes enter their history. The loss scale treats it as a good step
// window    The values of skipped steps enter, so a lasting change of level is soon accepted. Infinity and NaN do not
// cost      one all-reduce sums the loss and the norm's partial sums over GPUs, so all make the same decision; they
//           make it on the device, so the host does not synchronise
// source    OutlierDetector of llm.c
#pragma once

constexpr int SPIKE_STEPS = 128;

struct SpikeWindow {   // floats only
    float values[SPIKE_STEPS] = {};   // the oldest first, so that the sums do not depend on where a run was resumed
    float count = 0;
    float z = NAN;                    // of the last value; NaN: it has none

    __host__ __device__ void push(float x) {
        z = NAN;
        if (!(fabsf(x) < INFINITY)) return;
        const bool full = count == SPIKE_STEPS;
        for (int i = 1; full && i < SPIKE_STEPS; i++) values[i - 1] = values[i];
        if (!full) count++;
        values[static_cast<int>(count) - 1] = x;
        if (!full) return;
        double mean = 0, variance = 0;   // sums of FP32 in FP64: the mean of equal values is exact
        for (float value : values) mean += static_cast<double>(value) / SPIKE_STEPS;
        for (float value : values) variance += (value - mean) * (value - mean) / SPIKE_STEPS;
        z = variance > 0 ? static_cast<float>((x - mean) / sqrt(variance)) : 0;
    }
    std::vector<float> list() const { return {values, values + static_cast<int>(count)}; }
};

struct Spikes {   // in device memory with --skip-spikes, otherwise the host's
    SpikeWindow loss, norm;
    __host__ __device__ void push(float new_loss, float new_norm) {
        loss.push(new_loss);
        norm.push(new_norm);
    }
};

// partial (1) fp32 = the part of the step's mean loss that this GPU has computed; sum: of its losses
__global__ void loss_partial_kernel(float* partial, const double* sum, const Step* step) {
    *partial = static_cast<float>(*sum / step->tokens);
}
void loss_partial(float* partial, const double* sum, const Step* step) {
    launch("loss_partial", loss_partial_kernel, 1, 1, 0, partial, sum, step);
}

// Called after the norm. A step with an infinite norm has been skipped already, or ends the run.
__global__ void skip_spike_kernel(Step* step, LossScale* loss_scale, Spikes* spikes, const float* loss) {
    spikes->push(*loss, step->norm);
    const bool is_spike = spikes->loss.z > step->max_z || spikes->norm.z > step->max_z;
    if (!is_spike || !(step->norm < INFINITY)) return;
    step->factor = 0;
    loss_scale->skipped++;
}
void skip_spike(Step* step, LossScale* loss_scale, Spikes* spikes, const float* loss) {
    launch("skip_spike", skip_spike_kernel, 1, 1, 0, updated(step), updated(loss_scale), updated(spikes), loss);
}

// Returns the windows of a checkpoint. Older ones have none.
Spikes start_spikes(const Start& start) {
    Spikes s;
    auto read = [&](const char* key, SpikeWindow& window) {
        const json list = start.trainer.contains(key) ? start.trainer[key] : json::array();
        auto is_float = [](const json& x) { return x.is_number() && fabs(double(x)) <= double{FLT_MAX}; };
        if (!list.is_array() || list.size() > SPIKE_STEPS || !std::all_of(list.begin(), list.end(), is_float))
            throw UserError("%s/trainer.json: \"%s\" is %s, expected a list of at most %d FP32 numbers",
                            start.dir.c_str(), key, list.dump().substr(0, 40).c_str(), SPIKE_STEPS);
        for (float x : list.get<std::vector<float>>()) window.push(x);
    };
    read("last_losses", s.loss);
    read("last_norms", s.norm);
    return s;
}

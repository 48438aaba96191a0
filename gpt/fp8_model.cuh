// --matmul fp8 and fp8-all in the model: weights in FP8, once a step; the history of scales; what the log and checkpoints
// have of both. Included by train_gpt.cu, whose section "operands" says what matmuls read.
#pragma once

// ---- weights

// Once a step, after the update: weights in FP8, both ways, of `layers` from l on.
void quantise_weights(Model& m, size_t l, size_t layers) {
    const size_t C = m.config.channels, of_layer = 12 * C * C;
    recorder.at("update", NO_LAYER);
    fp8_forget(m.a.fp8_scales(l), layers * FP8_TENSORS);
    const Tensor<floatX> weights[] = {m.w.qkvw, m.w.attprojw, m.w.fcw, m.w.fcprojw};
    for (const Fp8Weight& w : fp8_weight_table(m.config)) {
        const Tensor<floatX>& tensor = weights[w.tensor - FP8_QKVW];
        const size_t stride = tensor.layer_bytes / sizeof(floatX);
        Fp8Scale* scales = m.a.fp8_scales(l) + w.tensor;
        e4m3* out = reinterpret_cast<e4m3*>(m.a.weights_8(l)) + w.first;
        fp8_max(scales, tensor(l), w.rows * w.columns, FP8_TENSORS, layers, stride);
        auto quantise = m.setup.fp8_scaling == Fp8Scaling::NONE ? fp8_weights<ScaleBy::HISTORY>
                                                                : fp8_weights<ScaleBy::ITSELF>;
        quantise(out, out + of_layer, scales, tensor(l), w.rows, w.columns, layers,
                 {FP8_TENSORS, 2 * of_layer, stride});
    }
}

// With ZeRO a layer's weights are whole when they are needed, and not before.
void fp8_weights_changed(Model& m) {
    if (!has_fp8(m)) return;
    m.fp8_weights.assign(m.config.layers, m.setup.zero == 0);
    if (m.setup.zero == 0) quantise_weights(m, 0, m.config.layers);
}
void need_fp8_weights(Model& m, size_t l) {
    if (!has_fp8(m) || m.fp8_weights[l] || device.tuning) return;
    quantise_weights(m, l, 1);
    m.fp8_weights[l] = true;
}

// ---- scales

// Of all GPUs: then these have the same scales.
void remember_maxima(Model& m) {
    if (!has_fp8(m) || m.setup.fp8_scaling != Fp8Scaling::DELAYED) return;
    const size_t count = scale_count(m);
    Fp8Scale* scales = m.a.fp8_scales();
    if (!ranks.alone()) {
        fp8_largest<Largest::TAKE>(m.a.fp8_largest(), scales, count);
        over_gpus(m.a.fp8_largest(), count, ncclMax);
        fp8_largest<Largest::GIVE>(m.a.fp8_largest(), scales, count);
    }
    fp8_remember(scales, count, FP8_TENSORS, FP8_E4M3S);
    m.fp8_history = true;
}

// ---- log and checkpoints

// As short as a log wants it.
double share(double part, double all) { return all > 0 ? std::stod(format("%.3g", part / all)) : 0; }

// What FP8 did to the values that were counted, those of the first GPU: shares that were cut off at its largest number,
// and that became 0 though they were not; over all layers, and layer by layer.
json fp8_record(const Model& m) {
    std::vector<Fp8Scale> scales(scale_count(m));
    download(scales.data(), m.a.fp8_scales(), scales.size() * sizeof(Fp8Scale));
    json record;
    for (size_t t = 0; t < FP8_TENSORS; t++) {
        double values = 0, saturated = 0, flushed = 0;
        json layers = {{"saturated", json::array()}, {"flushed", json::array()}, {"scale", json::array()}};
        for (int l = 0; l < m.config.layers; l++) {
            const Fp8Scale& s = scales[l * FP8_TENSORS + t];
            values += s.values;
            saturated += s.saturated;
            flushed += s.flushed;
            layers["saturated"].push_back(share(s.saturated, s.values));
            layers["flushed"].push_back(share(s.flushed, s.values));
            layers["scale"].push_back(s.scale);
        }
        record[FP8_NAMES[t]] = {{"saturated", share(saturated, values)}, {"flushed", share(flushed, values)},
                                {"layers", layers}};
    }
    return record;
}

// Every scale's history, for checkpoints.
std::vector<float> fp8_history(const Model& m) {
    std::vector<Fp8Scale> scales(scale_count(m));
    download(scales.data(), m.a.fp8_scales(), scales.size() * sizeof(Fp8Scale));
    std::vector<float> history;
    for (const Fp8Scale& s : scales) history.insert(history.end(), s.history, s.history + FP8_HISTORY);
    return history;
}

void set_fp8_history(Model& m, const std::vector<float>& history) {
    std::vector<Fp8Scale> scales(scale_count(m));
    download(scales.data(), m.a.fp8_scales(), scales.size() * sizeof(Fp8Scale));
    for (size_t n = 0; n < scales.size(); n++)
        std::copy_n(history.begin() + n * FP8_HISTORY, FP8_HISTORY, scales[n].history);
    upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
    fp8_recall(m.a.fp8_scales(), scales.size(), FP8_TENSORS, FP8_E4M3S);
    m.fp8_history = true;
    fp8_weights_changed(m);   // whose scales are their own
}

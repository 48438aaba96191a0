// --matmul fp8 in a training step: which tensors have 8-bit copies, weights once per step, amax history, log and
// checkpoints. See fp8.cuh.
#pragma once

size_t scale_count(const Model& m) { return static_cast<size_t>(m.config.layers) * FP8_TENSORS; }

// For the name of a CUDA graph, whose kernels depend on where scales come from.
const char* scales_text(const Model& m) { return m.fp8_history ? ", by scales of past steps" : ""; }

// ---- the FP8 copies of a layer's tensors

// Returns the copy x of a tensor of layer l, or of the current layer, with memory for its transposed copy.
Fp8Copy fp8_copy(const Model& m, size_t l, Fp8Tensor tensor, void* x, void* transposed) {
    // Delayed scaling needs a past step; the first step uses current scaling. Without scaling all scales stay 1.
    const bool current = m.setup.fp8_scaling == Fp8Scaling::CURRENT || !m.fp8_history;
    return {x, transposed, m.a.fp8_scales(l) + tensor, tensor < FP8_E4M3S ? DType::E4M3 : DType::E5M2,
            m.setup.fp8_scaling != Fp8Scaling::NONE && current};
}

// Whether matmuls read nothing but FP8 copies, which the kernels write themselves.
bool only_fp8(const Model& m, const Fp8Copy& copy) {
    return m.setup.matmul == MatmulIn::FP8_ALL && !copy.current_scaling;
}

void add_fp8(Block& b, const Model& m, size_t l) {
    const Activations& a = m.a;
    const bool all = m.setup.matmul == MatmulIn::FP8_ALL;
    struct Input { Tensor* t; Fp8Tensor which; const Buffer<char>* copies; };
    for (const auto& [t, which, copies] : {Input{&b.ln1, FP8_LN1, &a.ln1_8}, Input{&b.att, FP8_ATT, &a.att_8},
                                           Input{&b.ln2, FP8_LN2, &a.ln2_8}, Input{&b.gelu, FP8_GELU, &a.gelu_8}}) {
        t->fp8 = fp8_copy(m, l, which, (*copies)(l), all ? a.transposed() : nullptr);
        t->fp8.fast_accumulation = m.setup.fp8_accumulation == Fp8Accumulation::FAST;
        if (!all || t == &b.att || t->whole) continue;   // attention's backward reads att, gathering floatX
        t->kept = copies->kept;
        if (only_fp8(m, t->fp8)) t->x = nullptr;
    }
    char* weight = a.weights_8(l);
    struct Weight { Tensor* t; Fp8Tensor which; };
    for (const auto& [t, which] : {Weight{&b.qkvw, FP8_QKVW}, Weight{&b.attprojw, FP8_ATTPROJW},
                                   Weight{&b.fcw, FP8_FCW}, Weight{&b.fcprojw, FP8_FCPROJW}}) {
        t->fp8 = fp8_copy(m, l, which, weight, weight + a.weights_8.layer_bytes / 2);
        t->fp8.current_scaling = m.setup.fp8_scaling != Fp8Scaling::NONE;
        weight += t->size();
    }
}

void add_fp8(Gradients& d, const Model& m, size_t l) {
    const Activations& a = m.a;
    char* const transposed =
        m.setup.matmul == MatmulIn::FP8_ALL ? a.transposed() + a.transposed.layer_bytes / 2 : nullptr;
    d.qkv.fp8 = fp8_copy(m, l, FP8_DQKV, a.dqkv_8(), transposed);
    d.res2.fp8 = fp8_copy(m, l, FP8_DATTPROJ, a.dres_8(), transposed);
    d.fc.fp8 = fp8_copy(m, l, FP8_DFC, a.dfc_8(), transposed);
    d.res3.fp8 = fp8_copy(m, l, FP8_DFCPROJ, a.dres_8(), transposed);
    if (l > 0) d.res1.fp8 = fp8_copy(m, l - 1, FP8_DFCPROJ, a.dres_8(), transposed);
    d.fc.fp8.only = only_fp8(m, d.fc.fp8);   // its x holds the product that GELU' multiplies
    // The other kernels of attention's backward write FP8 from x, or sum x for the gradient of the bias.
    if (only_fp8(m, d.qkv.fp8) && m.setup.attention == Attention::FLASH && on_wgmma(m.config.head_size()))
        d.qkv.x = nullptr;
}

// ---- their memory

// With fp8-all backward reads the FP8 tensors of forward, so each layer has a copy; otherwise one copy is enough.
// only_none, except_full: see activation_table(). Weights are followed by their transposed copies.
std::vector<ActivationRow> fp8_table(Activations& a, const Setup& s, size_t only_none, size_t except_full) {
    const size_t N = s.N(), C = s.config.channels, Ct = C / s.tensor, L = s.config.layers;
    const bool all = s.matmul == MatmulIn::FP8_ALL;
    if (!all) only_none = except_full = 1;
    const size_t ln = s.tensor > 1 ? 1 : only_none;   // tensor parallelism keeps R rows in floatX instead
    std::vector<ActivationRow> rows = {
        row_of(a.ln1_8,     "ln1_8",     DType::E4M3, {N, C},      ln),
        row_of(a.att_8,     "att_8",     DType::E4M3, {N, Ct},     except_full),
        row_of(a.ln2_8,     "ln2_8",     DType::E4M3, {N, C},      ln),
        row_of(a.gelu_8,    "gelu_8",    DType::E4M3, {N, 4 * Ct}, only_none),
        row_of(a.dqkv_8,    "dqkv_8",    DType::E5M2, {N, 3 * Ct}, 1),
        row_of(a.dres_8,    "dres_8",    DType::E5M2, {N, C},      1),
        row_of(a.dfc_8,     "dfc_8",     DType::E5M2, {N, 4 * Ct}, 1),
        row_of(a.weights_8, "weights_8", DType::E4M3, {2, 12 * C * Ct}, L, Category::WEIGHTS),
        row   (a.fp8_scales,  "fp8_scales",  {FP8_TENSORS}, L, Category::WORKSPACE),
        row   (a.fp8_amaxes,  "fp8_amaxes",  {FP8_TENSORS}, L, Category::WORKSPACE),
    };
    if (all) rows.push_back(row_of(a.transposed, "transposed", DType::E5M2, {2, N, std::max(C, 4 * Ct)}, 1));
    return rows;
}

// ---- weights, once per step

Block block(const Model& m, size_t l, const ForwardPass& p);   // of train_gpt.cu

// Writes layer l's weights in FP8, both as stored and transposed.
void quantise_weights(Model& m, size_t l) {
    const Block b = block(m, l, whole_batch(m));
    recorder.at("update", NO_LAYER);
    fp8_scales<Fp8Step::RESET_AMAX>(m.a.fp8_scales(l), FP8_TENSORS);
    for (const Tensor& w : {b.qkvw, b.attprojw, b.fcw, b.fcprojw}) {
        w.quantise();
        if (!fp8_in_any_layout()) fp8_transpose(w.fp8.transposed, w.fp8.x, w.rows, w.columns);
    }
}

// Quantises layer l's weights unless that has been done since they last changed.
void need_fp8_weights(Model& m, size_t l) {
    if (m.fp8_weights[l]) return;
    quantise_weights(m, l);
    m.fp8_weights[l] = true;
}

// Called after the weights have changed. Quantises all layers, but with ZeRO only marks them: need_fp8_weights
// quantises a layer once its weights have been gathered.
void fp8_weights_changed(Model& m) {
    if (!has_fp8(m)) return;
    const size_t L = m.config.layers;
    m.fp8_weights.assign(L, m.setup.zero == 0);
    if (m.setup.zero > 0) return;
    m.graphs.run("weights in FP8", [&] { for (size_t l = 0; l < L; l++) quantise_weights(m, l); });
}

// ---- amax history

std::vector<Fp8Scale> download_scales(const Model& m) {
    std::vector<Fp8Scale> scales(scale_count(m));
    download(scales.data(), m.a.fp8_scales(), scales.size() * sizeof(Fp8Scale));
    return scales;
}
// Called after each step: all-reduces the amaxes (maximum), so that all GPUs have the same scales, and adds them to the
// history.
void push_amaxes(Model& m) {
    if (!has_fp8(m) || m.setup.fp8_scaling != Fp8Scaling::DELAYED) return;
    const size_t count = scale_count(m);
    if (!world.alone()) {
        fp8_scales<Fp8Step::READ_AMAX>(m.a.fp8_scales(), count, m.a.fp8_amaxes());
        over_gpus(m.a.fp8_amaxes(), count, ncclMax);
        fp8_scales<Fp8Step::WRITE_AMAX>(m.a.fp8_scales(), count, m.a.fp8_amaxes());
    }
    fp8_scales<Fp8Step::PUSH_HISTORY>(m.a.fp8_scales(), count);
    m.fp8_history = true;
}

// ---- log and checkpoints

// Returns, for each tensor over all layers, the fractions of this GPU's counted values that saturated at the format's
// maximum and that underflowed to 0 (key "flushed"), with three digits.
json fp8_record(const Model& m) {
    auto fraction = [](double part, double all) { return all > 0 ? std::stod(format("%.3g", part / all)) : 0; };
    const std::vector<Fp8Scale> scales = download_scales(m);
    json record;
    for (size_t t = 0; t < FP8_TENSORS; t++) {
        double values = 0, saturated = 0, underflow = 0;
        for (size_t n = t; n < scales.size(); n += FP8_TENSORS) {
            values += scales[n].values;
            saturated += scales[n].saturated;
            underflow += scales[n].underflow;
        }
        record[FP8_NAMES[t]] = {{"saturated", fraction(saturated, values)}, {"flushed", fraction(underflow, values)}};
    }
    return record;
}

// Returns the amax histories of all scales, for checkpoints.
std::vector<float> fp8_history(const Model& m) {
    std::vector<float> history;
    for (const Fp8Scale& s : download_scales(m)) history.insert(history.end(), s.history, s.history + FP8_HISTORY);
    return history;
}

// Sets the histories from a checkpoint, and the scales from them.
void set_fp8_history(Model& m, const std::vector<float>& history) {
    std::vector<Fp8Scale> scales = download_scales(m);
    for (size_t n = 0; n < scales.size(); n++)
        std::copy_n(history.begin() + n * FP8_HISTORY, FP8_HISTORY, scales[n].history);
    upload(m.a.fp8_scales(), scales.data(), scales.size() * sizeof(Fp8Scale));
    fp8_scales<Fp8Step::RESCALE>(m.a.fp8_scales(), scales.size());
    m.fp8_history = true;
    fp8_weights_changed(m);   // RESCALE has overwritten their scales, which come from current scaling
}

// ---- FP16 underflow, for the log

// Returns the fraction of zeros in the first layer's activation gradients after the last micro-batch on this GPU. These
// gradients have passed through all layers, so the fraction measures FP16 underflow. About 1 / (10 T) of them are 0 in
// any format: the first query of a sequence has a single key, so its gradient is 0.
double zero_gradients(const Model& m) {
    const Activations& a = m.a;
    const size_t own = m.setup.rows() * m.config.channels;   // elements of R rows, and of N rows of Ct columns
    double zeros = 0, all = 0;
    const std::pair<const floatX*, size_t> gradients[] = {
        {own_rows(a.dres(), own), own}, {own_rows(a.dln(), own), own}, {a.datt(), own}, {a.dqkv(), 3 * own},
        {a.dfc(), 4 * own}};
    for (const auto& [x, n] : gradients) {
        std::vector<floatX> values(n);
        download(values.data(), x, values.size() * sizeof(floatX));
        zeros += std::count_if(values.begin(), values.end(), [](floatX v) { return static_cast<float>(v) == 0; });
        all += n;
    }
    return zeros / all;
}

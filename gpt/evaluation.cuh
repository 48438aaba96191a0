// Validation loss, and sampling of text. Included by train_gpt.cu.
#pragma once

// The index of the copy of inputs and targets that evaluation and sampling use. Loader uses 0 and 1.
constexpr int SPARE = 2;

// Sends this rank's rows of `values`.
const int* send_spare(const Buffer<int>& tensor, const std::vector<int>& values) {
    const size_t R = values.size() / tensor_ranks.size;
    upload(tensor(SPARE), own_rows(values.data(), R), R * sizeof(int));
    return tensor(SPARE);
}

struct Evaluation {
    double loss;      // the mean
    size_t tokens, bytes;
    double seconds;

    double bits_per_byte() const { return loss * tokens / (M_LN2 * bytes); }   // the sum of the losses, in bits
};

// Returns the mean loss over at most `windows` windows, spread evenly over the tokens; with 0 over all tokens except
// the first of each file, which is not predicted. `text` gives the number of bytes of each predicted token.
Evaluation evaluate(Model& m, const Tokens& tokens, size_t windows, const Text& text) {
    const size_t B = m.setup.B, T = m.setup.T, N = m.setup.N();
    const size_t all = tokens.windows(Windows::COVERING, T);
    if (all == 0) throw UserError("--data: expected at least 2 tokens to evaluate");
    if (windows == 0 || windows > all) windows = all;
    take_loss(m);
    const double began = seconds_now();
    Evaluation e = {};
    for (size_t round = 0; round < windows; round += data_ranks.size * B) {
        const size_t w = round + data_ranks.rank * B;
        std::vector<int> inputs(N, 0), targets(N, -1);
        for (size_t b = 0; b < B && w + b < windows; b++)
            tokens.read(&inputs[b * T], &targets[b * T], Windows::COVERING, (w + b) * all / windows, T, m.config.vocab);
        for (int target : targets) {
            e.tokens += target >= 0;
            e.bytes += text.bytes_of(target);
        }
        const int *in = send_spare(m.a.inputs, inputs), *out = send_spare(m.a.targets, targets);
        m.graphs.run(std::string("evaluation") + scales_text(m), [&] {
            forward(m, in);
            head<Want::LOSS>(m, out, 0, m.setup.rows());
        });
    }
    if (has_fp8(m)) fp8_scales<Fp8Step::RESET_AMAX>(m.a.fp8_scales(), scale_count(m));   // amaxes of validation data
    e.tokens = sum_of_all(e.tokens) / tensor_ranks.size;   // each rank of a tensor group counts the same tokens
    e.bytes = sum_of_all(e.bytes) / tensor_ranks.size;
    e.loss = sum_of_all(take_loss(m)) / e.tokens;
    e.seconds = seconds_now() - began;
    if (!std::isfinite(e.loss)) throw Failure("the mean loss over %zu tokens is %f", e.tokens, e.loss);
    return e;
}

// ---- sampling

// Picks a token from logits (V) fp32: among the top_k most likely, and of these the smallest set whose probability
// reaches top_p. `random` is in [0, 1).
int pick_token(const std::vector<float>& logits, double temperature, int top_k, double top_p, double random) {
    const size_t V = logits.size(), most = temperature == 0 ? 1 : top_k > 0 ? std::min<size_t>(top_k, V) : V;
    std::vector<int> tokens(V);
    std::iota(tokens.begin(), tokens.end(), 0);
    std::partial_sort(tokens.begin(), tokens.begin() + most, tokens.end(), [&](int a, int b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    std::vector<double> sums(most);   // cumulative weights
    for (size_t n = 0; n < most; n++) {
        const double above = logits[tokens[n]] - logits[tokens[0]];
        sums[n] = (n > 0 ? sums[n - 1] : 0) + (temperature == 0 ? 1 : exp(above / temperature));
    }
    // top_p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration"
    const auto last_kept = std::lower_bound(sums.begin(), sums.end(), top_p * sums.back());
    return tokens[std::upper_bound(sums.begin(), last_kept, random * *last_kept) - sums.begin()];
}

constexpr int SAMPLE_STEP = 64;   // a prompt is padded to a multiple of this, so that few matmul shapes occur

// Returns the logits (V) of the token after `tokens`. Keys and values of the first `past` are in qkv already.
std::vector<float> next_logits(Model& m, const std::vector<int>& tokens, size_t past, int most) {
    std::vector<int> inputs(tokens.begin() + past, tokens.end());
    const size_t last = inputs.size() - 1, step = SAMPLE_STEP * tensor_ranks.size;
    if (past == 0) inputs.resize(std::min<size_t>(most, ceil_div(tokens.size(), step) * step), 0);
    // Attention is causal: the padding after `last` has no effect.
    forward(m, send_spare(m.a.inputs, inputs), {1, static_cast<int>(inputs.size()), past});
    const size_t R = inputs.size() / tensor_ranks.size;
    if (last / R == tensor_ranks.rank) matmul(logits_product(m, last % R, 1));
    std::vector<floatX> row(m.config.vocab);
    broadcast_logits(m.a.logits(), row.size(), last / R);
    download(row.data(), m.a.logits(), row.size() * sizeof(floatX));
    return {row.begin(), row.end()};
}

// Continues `tokens` by --sample-tokens tokens, calling show(token) for each until it returns false. The first pass
// processes all tokens, each later pass only the new one, because qkv caches keys and values (not with --recompute
// full, nor with tensor parallelism, which divides the rows of a pass among GPUs). When the context is full, the older
// half is dropped and the rest processed again. The model's buffers hold B = 1 and any T up to setup.T.
template <typename Show> void sample(Model& m, std::vector<int> tokens, const Options& o, uint64_t seed, Show show) {
    const size_t most = std::min(m.setup.T, m.config.context);
    const bool cached = m.a.qkv.copies > 1 && tensor_ranks.alone();
    size_t past = 0;
    for (int i = 0; i < o.sample_tokens; i++) {
        if (tokens.size() > most) {
            tokens.erase(tokens.begin(), tokens.end() - std::max<size_t>(1, most / 2));
            past = 0;
        }
        const std::vector<float> logits = next_logits(m, tokens, past, most);
        if (cached) past = tokens.size();
        const double random = (splitmix64(splitmix64(seed) + i) >> 11) * 0x1p-53;
        tokens.push_back(pick_token(logits, o.temperature, o.top_k, o.top_p, random));
        if (!show(tokens.back())) break;
    }
}

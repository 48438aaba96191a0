// The data of a training run. Included by train_gpt.cu.
#pragma once

// The memory of tensors that --trace follows, sorted by address.
std::vector<Place> live_places(Model& m) {
    std::vector<Place> all;
    auto add = [&](const BufferBase& tensor, size_t bytes, size_t copies, bool activation) {
        for (size_t l = 0; l < copies; l++) {
            const char* begin = tensor.data + l * tensor.layer_bytes;
            all.push_back({begin, begin + bytes, activation});
        }
    };
    for (const ActivationRow& row : activation_table(m.a, m.setup))
        if (row.category == Category::ACTIVATIONS) add(*row.tensor, row.copy_bytes(), row.copies, true);
    for (const ParameterRow& row : parameter_table(m.g, m.config))
        add(*row.tensor, row.elements * size_of(m.grads.dtype), row.tensor->copies, false);
    std::sort(all.begin(), all.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
    return all;
}

struct TrainData {
    Tokens train, val;
    Text text{"", BYTE_VOCAB};
};

TrainData open_data(const Options& o) {
    if (o.data.empty()) throw UserError("train needs --data PATTERN: text or .bin shards of tokens");
    TrainData data;
    data.train = Tokens(o.data);
    if (!o.val_data.empty()) data.val = Tokens(o.val_data);
    return data;
}

// Tokenizes text for the model in `dir`, or for a new one if dir is empty, and splits off the validation data.
void divide_data(TrainData& data, const Options& o, const std::string& dir, const Config& c) {
    const WatchdogPause tokenizing_may_take_long;
    const bool reads_text = data.train.bytes_only() || data.val.bytes_only() || o.sample_every > 0;
    data.text = reads_text ? Text(dir, c.vocab) : text_if_any(o.eval_every > 0 ? dir : "", c.vocab);   // bits per byte
    for (Tokens* tokens : {&data.train, &data.val}) tokens->tokenize(data.text);
    const bool splits = o.val_data.empty() && o.val_fraction > 0 && o.eval_every > 0;
    if (splits) data.val = data.train.split_tail(o.val_fraction);
}

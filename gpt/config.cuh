// config.json of a model's folder, in Hugging Face's words. Included by train_gpt.cu.
#pragma once

void write_config(const std::string& path, const Config& c, int end_of_text) {
    write_json(path, {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}, {"n_layer", c.layers},
                      {"n_head", c.heads}, {"n_embd", c.channels}, {"n_positions", c.context}, {"n_ctx", c.context},
                      {"n_inner", nullptr}, {"vocab_size", c.vocab}, {"activation_function", "gelu_new"},
                      {"layer_norm_epsilon", 1e-5}, {"initializer_range", INIT_STD}, {"attn_pdrop", 0.0},
                      {"embd_pdrop", 0.0}, {"resid_pdrop", 0.0}, {"scale_attn_weights", true},
                      {"tie_word_embeddings", true}, {"torch_dtype", "float32"}, {"use_cache", true},
                      {"bos_token_id", end_of_text}, {"eos_token_id", end_of_text}});
}

// Far beyond every real model, and such that no size in bytes overflows 64 bits.
constexpr int MOST_LAYERS = 1 << 10, MOST_CHANNELS = 1 << 16, MOST_TOKENS = 1 << 22;

void require_supported(const Config& c, const std::string& whose) {
    const int HS = c.heads > 0 ? c.head_size() : 0;
    auto within = [](int value, int most) { return value >= 1 && value <= most; };
    if (!within(c.layers, MOST_LAYERS) || !within(c.channels, MOST_CHANNELS) || !within(c.heads, MOST_CHANNELS) ||
        !within(c.context, MOST_TOKENS) || !within(c.vocab, MOST_TOKENS))
        throw UserError("%s: %d layers, %d heads, %d channels, context %d, vocabulary %d: each must be at least 1, "
                        "at most %d layers, %d channels, %d positions and tokens", whose.c_str(), c.layers, c.heads,
                        c.channels, c.context, c.vocab, MOST_LAYERS, MOST_CHANNELS, MOST_TOKENS);
    if (c.channels % c.heads != 0 || HS % 16 != 0 || HS < 16 || HS > 128)
        throw UserError("%s: %d channels over %d heads: the head size must be 16, 32, ... 128", whose.c_str(),
                        c.channels, c.heads);
}

Config read_config(const std::string& path) {
    const json file = read_json(path);
    auto require = [&](const char* key, const json& expected, const json& missing_means) {
        const json value = file.value(key, missing_means);
        if (value != expected)
            throw UserError("%s: \"%s\" is %s, expected %s", path.c_str(), key, value.dump().c_str(),
                            expected.dump().c_str());
    };
    try {
        const char* context = file.contains("n_positions") ? "n_positions" : "n_ctx";
        auto size = [&](const char* key) { return whole_number<int>(file, key, path); };
        const Config c = {size("n_layer"), size("n_head"), size("n_embd"), size(context), size("vocab_size")};
        require("model_type", "gpt2", nullptr);
        if (file.value("activation_function", "gelu_new") != "gelu_pytorch_tanh")   // another name of the same
            require("activation_function", "gelu_new", "gelu_new");
        require("layer_norm_epsilon", 1e-5, 1e-5);
        require("scale_attn_weights", true, true);
        require("scale_attn_by_inverse_layer_idx", false, false);
        require("tie_word_embeddings", true, true);
        if (file.contains("n_inner") && !file.at("n_inner").is_null()) require("n_inner", 4 * c.channels, nullptr);
        require_supported(c, path);
        return c;
    } catch (const json::exception& error) {
        throw UserError("%s: %s", path.c_str(), error.what());
    }
}

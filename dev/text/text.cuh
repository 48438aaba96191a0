// Text around the model: what its tokens read as, what is shown of a sample, and the files by which others read them.

#pragma once

#include "tokenizer.h"

// ---- tokens as text -----------------------------------------------------------------------------

// The tokens of a model of V, by the tokenizer in its folder; without one 256 of them are bytes, others numbers.
class Text {
public:
    Text(const std::string& dir, int V) : dir_(dir), V_(V) {
        if (dir.empty() || !Tokenizer::is_in(dir)) return;
        try {
            tokenizer_ = std::make_unique<Tokenizer>(dir);
        } catch (const TokenizerError& error) {
            throw UserError("%s", error.what());
        }
        if (tokenizer_->size() > static_cast<size_t>(V))   // fewer: a vocabulary may be padded
            throw UserError("%s: the tokenizer has %zu tokens, but config.json a vocabulary of %d", dir.c_str(),
                            tokenizer_->size(), V);
    }

    std::vector<int> encode(const std::string& text) const {
        if (tokenizer_) return tokenizer_->encode(text);
        if (V_ != BYTE_VOCAB)
            throw UserError("--prompt needs a tokenizer.json, or vocab.json and merges.txt, in %s, as its vocabulary "
                            "of %d is not of bytes; or give --prompt-tokens", dir_.c_str(), V_);
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(text.data());
        return {bytes, bytes + text.size()};
    }

    std::string decode(int token) const {
        if (tokenizer_) return tokenizer_->decode(token);
        return V_ == BYTE_VOCAB ? std::string(1, static_cast<char>(token)) : format("%d ", token);
    }

    // The bytes of a text that a token stands for: none of a special one, such as <|endoftext|>, and where nothing says
    // what tokens read as.
    size_t bytes_of(int token) const {
        if (token < 0 || (tokenizer_ && tokenizer_->is_special(token))) return 0;
        return tokenizer_ ? tokenizer_->decode(token).size() : V_ == BYTE_VOCAB;
    }

    // What a text out of nothing goes on from: GPT-2's end of text, which is the last token where nothing else says so.
    int first() const {
        if (!tokenizer_) return V_ == BYTE_VOCAB ? '\n' : V_ - 1;
        const int end_of_text = tokenizer_->added("<|endoftext|>");
        return end_of_text >= 0 ? end_of_text : tokenizer_->encode("\n")[0];
    }

private:
    std::string dir_;
    int V_;
    std::unique_ptr<Tokenizer> tokenizer_;
};

// For what can do without: a tokenizer that cannot be used is named, and left.
Text text_if_any(const std::string& dir, int V) {
    try {
        return Text(dir, V);
    } catch (const UserError& error) {
        fprintf(stderr, "tokenizer  not used: %s\n", error.what());
        return Text("", V);
    }
}

// All of standard input.
std::string read_input() {
    std::string text;
    for (int c; (c = getchar()) != EOF;) text += static_cast<char>(c);
    return text;
}

std::vector<int> read_prompt(const Options& o, const Text& text, int V) {
    if (o.prompt_tokens.empty()) {
        const std::vector<int> tokens = text.encode(o.prompt == "-" ? read_input() : o.prompt);
        if (tokens.empty()) throw UserError("--prompt -: standard input is empty");
        return tokens;
    }
    std::vector<int> tokens;
    std::string numbers = o.prompt_tokens == "-" ? read_input() : o.prompt_tokens;
    for (char& c : numbers) if (c == ',' || c == '\n') c = ' ';
    std::istringstream words(numbers);
    for (std::string word; words >> word;) {
        int token;
        if (!parse_number(word, token) || token < 0 || token >= V)
            throw UserError("--prompt-tokens takes token numbers from 0 to %d, found '%s'", V - 1, word.c_str());
        tokens.push_back(token);
    }
    if (tokens.empty()) throw UserError("--prompt-tokens: no tokens");
    return tokens;
}

// ---- what is shown ------------------------------------------------------------------------------

constexpr const char *DOT = ".", *REPLACEMENT_CHARACTER = "\xef\xbf\xbd";

// Whether a character (UTF-8) is one that a terminal may obey rather than show: ASCII's and Latin-1's control codes.
bool is_control(const std::string& c) {
    const unsigned char first = c[0];
    if (first == 0xc2) return static_cast<unsigned char>(c[1]) < 0xa0;
    return (first < ' ' && first != '\n' && first != '\t') || first == 0x7f;
}

// Text with a stand-in for control characters and for what is no UTF-8, of which a model that was hardly trained writes
// much.
std::string readable(const std::string& bytes, const char* stand_in = DOT) {
    std::string text;
    for (size_t at = 0, length; at < bytes.size(); at += std::max<size_t>(1, length)) {
        length = character_length(std::string_view(bytes).substr(at));
        const std::string character = bytes.substr(at, length);
        text += length == 0 || is_control(character) ? stand_in : character;
    }
    return text;
}

// Prints a sample as it comes: no part of a character before it is whole, nor of a text that ends the sample.
class Printer {
public:
    Printer(FILE* to, const std::string& stop) : to_(to), stop_(stop) {}

    // What is not searched for the text that ends the sample.
    void prompt(const std::string& bytes) {
        pending_ += bytes;
        print(pending_.size() - incomplete_end(pending_));
    }

    // False once the text that ends the sample has come; of it nothing is printed.
    bool add(const std::string& bytes) {
        pending_ += bytes;
        const size_t end = stop_.empty() ? pending_.npos : pending_.find(stop_);
        if (end != pending_.npos) pending_.resize(end);
        else print(pending_.size() - std::max(incomplete_end(pending_), begun_stop()));
        return end == pending_.npos;
    }

    void end() { print(pending_.size()); }

private:
    // How many bytes at the end may be the beginning of the text that ends the sample.
    size_t begun_stop() const {
        size_t n = stop_.empty() ? 0 : std::min(stop_.size() - 1, pending_.size());
        while (n > 0 && pending_.compare(pending_.size() - n, n, stop_, 0, n) != 0) n--;
        return n;
    }

    // The first n bytes: to a file as they are, to a terminal nothing that it might obey.
    void print(size_t n) {
        std::string text = pending_.substr(0, n);
        pending_.erase(0, n);
        if (isatty(fileno(to_))) text = readable(text, REPLACEMENT_CHARACTER);
        fwrite(text.data(), 1, text.size(), to_);
        fflush(to_);
    }

    FILE* to_;
    std::string stop_, pending_;
};

// ---- files --------------------------------------------------------------------------------------
// What a checkpoint holds for those who read text with it: transformers' AutoTokenizer, and this program.

using TextFiles = std::map<std::string, std::string>;   // name -> content

constexpr const char* TEXT_FILES[] = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
                                      "special_tokens_map.json", "generation_config.json"};

// A tokenizer whose tokens are the bytes, in their order, as transformers reads it.
void add_byte_tokenizer(TextFiles& files, const Config& c) {
    json vocabulary;
    for (const std::string& byte : byte_alphabet()) vocabulary[byte] = vocabulary.size();
    const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true},
                             {"use_regex", true}};
    const json model = {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr}, {"end_of_word_suffix", nullptr}, {"fuse_unk", false},
                        {"byte_fallback", false}, {"ignore_merges", false}, {"vocab", vocabulary},
                        {"merges", json::array()}};
    const json tokenizer = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr},
                            {"added_tokens", json::array()}, {"normalizer", nullptr}, {"pre_tokenizer", byte_level},
                            {"post_processor", nullptr}, {"decoder", byte_level}, {"model", model}};
    // The class that takes tokenizer.json as it is: GPT-2's own would add <|endoftext|>, a token too many.
    const json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"model_max_length", c.context},
                         {"clean_up_tokenization_spaces", false}};
    files["tokenizer.json"] = tokenizer.dump(2) + "\n";
    files["tokenizer_config.json"] = config.dump(2) + "\n";
}

// The files of a model of config c: those of the folder it comes from, where there is one, else its own. They are read
// once, at the start: a run may remove that folder, when it is a checkpoint that is no longer kept.
TextFiles text_files(const std::string& dir, const Config& c) {
    TextFiles files;
    for (const char* name : TEXT_FILES) {
        const std::string path = dir + "/" + name;
        if (dir.empty() || !fs::is_regular_file(path)) continue;
        std::ifstream file(path, std::ios::binary);
        files[name] = std::string(std::istreambuf_iterator<char>(file), {});
        if (!file || file.bad()) throw UserError("%s: cannot be read: %s", path.c_str(), strerror(errno));
    }
    const bool has_tokenizer = !dir.empty() && Tokenizer::is_in(dir);
    if (!has_tokenizer && c.vocab == BYTE_VOCAB) add_byte_tokenizer(files, c);
    const json generation = {{"_from_model_config", true}, {"bos_token_id", c.vocab - 1},
                             {"eos_token_id", c.vocab - 1}};
    files.emplace("generation_config.json", generation.dump(2) + "\n");   // where there was none
    return files;
}

void write_text_files(const std::string& dir, const TextFiles& files) {
    for (const auto& [name, content] : files) {
        OutputFile file(dir + "/" + name);
        file.write(content.data(), content.size());
        file.finish();
    }
}

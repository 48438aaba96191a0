// Text around the model: what its tokens read as, what is shown of a sample, and the files by which others read them.

#pragma once

#include "tokenizer.h"

// ---- tokens as text -----------------------------------------------------------------------------

// The tokens of a model of V, by the tokenizer in its folder; without one 256 of them are bytes, others numbers.
class Text {
public:
    Text(const std::string& dir, int V) : dir_(dir), V_(V), are_bytes_(V == BYTE_VOCAB) {
        if (dir.empty() || !Tokenizer::is_in(dir)) return;
        try {
            tokenizer_ = std::make_unique<Tokenizer>(dir);
        } catch (const TokenizerError& error) {
            throw UserError("%s", error.what());
        }
        if (tokenizer_->size() > static_cast<size_t>(V))   // fewer: a vocabulary may be padded
            throw UserError("%s: the tokenizer has %zu tokens, but config.json a vocabulary of %d", dir.c_str(),
                            tokenizer_->size(), V);
        are_bytes_ = tokenizer_->is_bytes();
        if (are_bytes_) tokenizer_.reset();
    }

    const Tokenizer* tokenizer() const { return tokenizer_.get(); }   // null: there is none, or tokens are bytes

    // Whether the bytes of a text are its tokens: in a new model, and in one that was trained so. Throws where a text
    // has no tokens.
    bool takes_bytes(const std::string& path) const {
        if (dir_.empty() && V_ < BYTE_VOCAB)
            throw UserError("%s: text, whose bytes need a vocabulary of %d; --vocab says %d", path.c_str(), BYTE_VOCAB,
                            V_);
        if (!dir_.empty() && !are_bytes_ && !tokenizer_)
            throw UserError("%s: text, but the model in %s has %d tokens and no tokenizer: put its tokenizer.json, or "
                            "vocab.json and merges.txt, there, or make shards by scripts/prepare_text.py", path.c_str(),
                            dir_.c_str(), V_);
        return !tokenizer_;
    }

    std::vector<int> encode(const std::string& text) const {
        if (tokenizer_) return tokenizer_->encode(text);
        if (!are_bytes_)
            throw UserError("--prompt needs a tokenizer.json, or vocab.json and merges.txt, in %s, as its vocabulary "
                            "of %d is not of bytes; or give --prompt-tokens", dir_.c_str(), V_);
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(text.data());
        return {bytes, bytes + text.size()};
    }

    std::string decode(int token) const {
        if (tokenizer_) return tokenizer_->decode(token);
        if (!are_bytes_) return format("%d ", token);
        return token < BYTE_VOCAB ? std::string(1, static_cast<char>(token)) : "";
    }

    // The bytes of a text that a token stands for: none of a special one, such as <|endoftext|>, and where nothing says
    // what tokens read as.
    size_t bytes_of(int token) const {
        if (token < 0 || (tokenizer_ && tokenizer_->is_special(token))) return 0;
        return tokenizer_ ? tokenizer_->decode(token).size() : are_bytes_ && token < BYTE_VOCAB;
    }

    // What a text out of nothing goes on from: GPT-2's end of text, which is the last token where nothing else says so.
    int first() const {
        if (!tokenizer_) return are_bytes_ ? '\n' : V_ - 1;
        const int end_of_text = tokenizer_->added("<|endoftext|>");
        return end_of_text >= 0 ? end_of_text : tokenizer_->encode("\n")[0];
    }

private:
    std::string dir_;
    int V_;
    bool are_bytes_;
    std::unique_ptr<Tokenizer> tokenizer_;
};

// Tokens in memory take two bytes each where the vocabulary allows, else four.
size_t token_bytes(int V) { return V <= 1 << 16 ? 2 : 4; }

// The tokens of a text, encoded piece by piece. On `out` it says how long that will take, where it takes long.
std::shared_ptr<std::vector<char>> encode_file(const Text& text, std::string_view bytes, size_t token_bytes,
                                               const std::string& path, FILE* out) {
    constexpr size_t PIECE = 1 << 20;
    constexpr double LONG = 2;   // seconds
    const auto encoded = std::make_shared<std::vector<char>>();
    const double began = seconds_now();
    bool told = false;
    for (size_t begin = 0, end; begin < bytes.size(); begin = end) {
        end = text.tokenizer()->piece_end(bytes, begin, PIECE);
        for (int token : text.tokenizer()->encode(bytes.substr(begin, end - begin))) {
            const char* number = reinterpret_cast<const char*>(&token);   // little-endian
            encoded->insert(encoded->end(), number, number + token_bytes);
        }
        const double spent = seconds_now() - began, all = spent * bytes.size() / end;
        if (told || spent < LONG || all < 2 * LONG) continue;
        fprintf(out, "data       %s: %.0f MB of text become tokens, which takes %.0f s\n", path.c_str(),
                bytes.size() / 1e6, all);
        fflush(out);
        told = true;
    }
    return encoded;
}

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

// A message that may quote names from files: in one line, which a terminal shows and does not obey.
std::string one_line(const std::string& message) {
    std::string text = readable(message, REPLACEMENT_CHARACTER);
    for (char& c : text) if (c == '\n' || c == '\t') c = ' ';
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

struct TextFiles {
    std::map<std::string, std::string> content;   // by name
    int end_of_text;                              // a token
};

enum class TokensAre { BYTES, OTHERS };

constexpr const char* TEXT_FILES[] = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
                                      "special_tokens_map.json", "generation_config.json"};

// A tokenizer whose tokens are the bytes, in their order, as transformers reads it. lm-evaluation-harness wants an end
// of text, with which it begins texts: the last byte, as no UTF-8 has that one. In these files it goes by the name of a
// letter, which split_special_tokens lets texts keep.
void add_byte_tokenizer(std::map<std::string, std::string>& files, const Config& c) {
    json vocabulary;
    const std::vector<std::string> alphabet = byte_alphabet();
    for (const std::string& byte : alphabet) vocabulary[byte] = vocabulary.size();
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
                         {"bos_token", alphabet.back()}, {"eos_token", alphabet.back()},
                         {"split_special_tokens", true}, {"clean_up_tokenization_spaces", false}};
    files["tokenizer.json"] = tokenizer.dump(2) + "\n";
    files["tokenizer_config.json"] = config.dump(2) + "\n";
}

// The files of a model of config c: those of the folder it comes from, where there is one, else its own. They are read
// once, at the start: a run may remove that folder, when it is a checkpoint that is no longer kept.
TextFiles text_files(const std::string& dir, const Config& c, TokensAre tokens) {
    TextFiles files = {{}, c.vocab - 1};
    for (const char* name : TEXT_FILES) {
        const std::string path = dir + "/" + name;
        if (dir.empty() || !fs::is_regular_file(path)) continue;
        std::ifstream file(path, std::ios::binary);
        files.content[name] = std::string(std::istreambuf_iterator<char>(file), {});
        if (!file || file.bad()) throw UserError("%s: cannot be read: %s", path.c_str(), strerror(errno));
    }
    const bool has_tokenizer = !dir.empty() && Tokenizer::is_in(dir);
    // What the folder's own config.json calls the end of text stays that.
    const json config = dir.empty() ? json::object() : read_json(dir + "/config.json");
    if (const json end = config.value("eos_token_id", json()); end.is_number_unsigned() && end < c.vocab)
        files.end_of_text = end;
    if (!has_tokenizer && (c.vocab == BYTE_VOCAB || tokens == TokensAre::BYTES)) {
        add_byte_tokenizer(files.content, c);
        files.end_of_text = BYTE_VOCAB - 1;
    }
    const json generation = {{"_from_model_config", true}, {"bos_token_id", files.end_of_text},
                             {"eos_token_id", files.end_of_text}};
    files.content.emplace("generation_config.json", generation.dump(2) + "\n");   // where there was none
    return files;
}

void write_text_files(const std::string& dir, const TextFiles& files) {
    for (const auto& [name, content] : files.content) {
        OutputFile file(dir + "/" + name);
        file.write(content.data(), content.size());
        file.finish();
    }
}

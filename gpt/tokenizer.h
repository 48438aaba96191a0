// Converts text to tokens and back: GPT-2's byte-level BPE (byte pair encoding), from transformers' files.
//
// Encoding splits a text into words with GPT-2's pattern. Each word starts as one token per byte. Then the pair of
// adjacent tokens with the lowest rank in the merge table is merged into one token; of equal pairs, the leftmost. This
// repeats until no adjacent pair is in the table. Decoding concatenates the tokens' bytes.
//
// Any bytes can be encoded. A byte outside a valid UTF-8 character is treated as a character that is neither a letter
// nor a number nor white space. Since all 256 bytes are tokens, decode(encode(bytes)) == bytes, unless the
// tokenizer's add_prefix_space adds spaces.
//
// Added tokens, such as <|endoftext|>, are matched before the split, from left to right, the longest at each position.
//
// Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2; Sennrich et al. 2016, "Neural
// Machine Translation of Rare Words with Subword Units"
#pragma once

#include <bitset>
#include <map>
#include <memory>
#include <unordered_map>

#include "options.h"

// ---- the tokenizer ------------------------------------------------------------------------------

constexpr const char* END_OF_TEXT = "<|endoftext|>";   // GPT-2's special token

// Returns the UTF-8 character for each byte in tokenizer files: the Latin-1 character if it is printable and not a
// space, otherwise the next unused character from U+0100.
std::vector<std::string> byte_alphabet();

// Splits text into words with GPT-2's pattern and calls visit(word) for each, in order. Every byte is in one word.
void for_each_word(std::string_view text, const std::function<void(std::string_view)>& visit);

class Tokenizer {
public:
    // Returns whether a folder has tokenizer.json or vocab.json.
    static bool is_in(const std::string& dir) { return exists(dir + "/tokenizer.json") || exists(dir + "/vocab.json"); }

    // A tokenizer whose token i is byte i.
    Tokenizer();
    // Reads DIR/tokenizer.json or, if it does not exist, DIR/vocab.json and DIR/merges.txt, and in both cases the
    // tokens and settings in tokenizer_config.json, special_tokens_map.json and added_tokens.json. Special tokens that
    // these name, but that have no id, get the next ids below `most`. Throws UserError.
    explicit Tokenizer(const std::string& dir, size_t most = SIZE_MAX);

    size_t size() const { return bytes_.size(); }
    // Returns whether this equals Tokenizer(). Without added tokens, before() and after() are empty.
    bool is_bytes() const { return added_.empty() && bytes_ == Tokenizer().bytes_; }
    // Returns the tokens of a text, without before() and after().
    std::vector<int> encode(std::string_view text) const;
    // The special tokens that the tokenizer's template adds before and after every text.
    const std::vector<int>& before() const { return before_; }
    const std::vector<int>& after() const { return after_; }
    // Returns the bytes of a token, which may contain parts of characters; empty if the token does not exist.
    std::string decode(int token) const { return token >= 0 && size_t(token) < size() ? bytes_[token] : ""; }
    // Returns the added token with this text, or -1.
    int added(const std::string& text) const {
        for (int token : added_)
            if (bytes_[token] == text) return token;
        return -1;
    }
    // Returns whether a token is special, such as <|endoftext|>.
    bool is_special(int token) const { return special_.count(token); }

private:
    friend class TokenizerFile;
    struct Merge { int rank, token; };

    void merge(std::vector<int>& tokens, std::string_view word) const;
    int added_at(std::string_view text) const;

    std::vector<std::string> bytes_;   // of each token
    std::vector<int> byte_tokens_, added_, before_, after_;   // added_: longest first
    std::set<int> special_;
    std::bitset<256> begins_added_;   // per byte: whether an added token begins with it
    bool adds_space_ = false;   // before a text, and after an added token, unless there is one
    std::unordered_map<uint64_t, Merge> merges_;
};

// ---- tokens as text -----------------------------------------------------------------------------

constexpr int BYTE_VOCAB = 256;   // vocabulary size of a model whose tokens are bytes

// Converts between text and the tokens of a model with vocabulary size V, using the tokenizer in the model's folder.
// Without a tokenizer, tokens are bytes if V is 256; otherwise tokens have no text.
class Text {
public:
    Text(const std::string& dir, int V);

    // Returns whether a text's bytes are its tokens. Throws UserError if the model cannot tokenize the file `path`.
    bool is_byte_level(const std::string& path) const;
    // Returns the template's tokens before(), then those of the prompt `text`.
    std::vector<int> encode(const std::string& text) const;
    // Returns the tokens of a file's text, token_bytes() bytes each, with the template's tokens before and after them.
    std::vector<char> encode_file(std::string_view text) const;
    size_t token_bytes() const { return V_ <= 1 << 16 ? 2 : 4; }
    std::string decode(int token) const { return tokenizer_ ? tokenizer_->decode(token) : format("%d ", token); }
    // Returns the number of text bytes of a token: 0 for a special token, and 0 without a tokenizer.
    size_t bytes_of(int token) const { return tokenizer_ && !tokenizer_->is_special(token) ? decode(token).size() : 0; }
    // Returns the first token of a sample without a prompt: bos, the model's token for the start of a text. If that is
    // -1 or no token of the tokenizer, and for bytes: <|endoftext|> or, if it does not exist, a line feed; without a
    // tokenizer, token V - 1.
    int first(int bos) const;

private:
    std::string dir_;
    int V_;
    std::shared_ptr<Tokenizer> tokenizer_;   // null if tokens have no text
};

// Returns Text(dir, V). If the tokenizer in `dir` is rejected, prints the error and returns Text("", V).
Text text_if_any(const std::string& dir, int V);

// Returns the tokens of --prompt or --prompt-tokens; "-" reads them from standard input.
std::vector<int> read_prompt(const Options& o, const Text& text, int V);

// ---- text files of a checkpoint -----------------------------------------------------------------

using TextFiles = std::map<std::string, std::string>;   // contents by name

// Returns a checkpoint's text files, for transformers and this program: config.json with the content `config`,
// generation_config.json, and the tokenizer's: those in `dir`, the folder from which the model was loaded, otherwise
// those of a byte tokenizer if the data is bytes. They are read once, at the start of a run, because `dir` may be a
// checkpoint that the run deletes.
TextFiles text_files(const std::string& dir, const json& config, const Config& c, bool data_is_bytes);

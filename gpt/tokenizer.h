// Text to tokens and back: byte-level BPE as in GPT-2, read from the files that transformers writes.
//
// Encoding cuts a text into words by GPT-2's pattern and merges within each word. A word starts as its bytes. Among the
// neighbours that are a pair of the merge table, the pair that comes first in the table becomes one token (of equal
// pairs the leftmost), and so on until no pair is left. Decoding concatenates the tokens' bytes.
//
// Any bytes can be encoded. A byte that is not part of a UTF-8 character counts as a character that is neither letter,
// number nor white space; as all 256 bytes are tokens, decode(encode(bytes)) == bytes.
//
// Added tokens, such as <|endoftext|>, are searched in the text first: the leftmost, of these the longest.
//
// Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2; Sennrich et al. 2016, "Neural
// Machine Translation of Rare Words with Subword Units"
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "options.h"

// ---- the tokenizer ------------------------------------------------------------------------------

// How the files write each byte: as itself in Latin-1 if that is printable, else as the next unused character from
// U+0100 on.
std::vector<std::string> byte_alphabet();

// Calls visit(word) for each word of GPT-2's pattern, in order; together they are the text.
void for_each_word(std::string_view text, const std::function<void(std::string_view)>& visit);

class Tokenizer {
public:
    // Whether a folder has the files of a tokenizer.
    static bool is_in(const std::string& dir);

    // The tokens are the 256 bytes, in their order.
    Tokenizer();
    // Reads DIR/tokenizer.json, or else DIR/vocab.json and DIR/merges.txt.
    explicit Tokenizer(const std::string& dir);

    size_t size() const { return bytes_.size(); }
    // Whether it equals Tokenizer().
    bool is_bytes() const;
    // The tokens of a text, without those of the template.
    std::vector<int> encode(std::string_view text) const;
    // The template's special tokens, which are put before and after every text.
    const std::vector<int>& before() const { return before_; }
    const std::vector<int>& after() const { return after_; }
    // A token's bytes, which need not be whole characters; empty for a number that is not a token.
    std::string decode(int token) const { return token >= 0 && size_t(token) < size() ? bytes_[token] : ""; }
    // The added token with this text; -1 if there is none.
    int added(const std::string& text) const;
    // Whether a token is special, such as an end of text.
    bool is_special(int token) const;

private:
    friend class TokenizerFile;
    struct Merge { int rank, token; };

    void merge(std::vector<int>& tokens, std::string_view word) const;
    int added_at(std::string_view text) const;

    std::vector<std::string> bytes_;   // of each token
    std::vector<int> byte_tokens_, added_, special_, before_, after_;   // added_: the longest first
    std::bitset<256> begins_added_;   // whether an added token begins with a byte
    std::unordered_map<uint64_t, Merge> merges_;
};

// ---- tokens as text -----------------------------------------------------------------------------

constexpr int BYTE_VOCAB = 256;   // the vocabulary of a model whose tokens are bytes

// The tokens of a model of V, by the tokenizer in its folder. Without one, 256 tokens are bytes, others have no text.
class Text {
public:
    Text(const std::string& dir, int V);

    // Whether a text's bytes are taken as its tokens. Throws if the text in `path` cannot become tokens.
    bool takes_bytes(const std::string& path) const;
    // The tokens of a prompt, with those of the tokenizer's template before it.
    std::vector<int> encode(const std::string& text) const;
    // The tokens of a file's text, token_bytes() each, with the template's tokens before and after them.
    std::vector<char> encode_file(std::string_view text) const;
    size_t token_bytes() const { return V_ <= 1 << 16 ? 2 : 4; }
    std::string decode(int token) const;
    // The number of bytes of text that a token stands for: 0 for a special one, or if the tokens' texts are unknown.
    size_t bytes_of(int token) const;
    // The token that a sample without a prompt starts from: the end of text.
    int first() const;

private:
    std::string dir_;
    int V_;
    std::shared_ptr<Tokenizer> tokenizer_;   // null: tokens have no text
};

// As Text(dir, V), but a tokenizer that cannot be used is reported and ignored.
Text text_if_any(const std::string& dir, int V);

// The tokens of --prompt or --prompt-tokens, from standard input if that is "-".
std::vector<int> read_prompt(const Options& o, const Text& text, int V);

// ---- files of a tokenizer in a checkpoint -------------------------------------------------------

struct TextFiles {
    std::map<std::string, std::string> content;   // by name
    int end_of_text;                              // a token
};

// Returns the tokenizer files of a checkpoint, for transformers' AutoTokenizer and this program: those in the folder
// `dir` that the model comes from, otherwise those of a byte tokenizer if the data is bytes. The program reads them
// once, at the start, because the run may remove `dir` if that is a checkpoint.
TextFiles text_files(const std::string& dir, const Config& c, bool data_is_bytes);
void write_text_files(const std::string& dir, const TextFiles& files);

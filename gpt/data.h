// Training data: files of text or of tokens, and the windows of T + 1 tokens that sequences are cut from.
//
// Shards of tokens are in llm.c's format: 256 int32 of header (magic 20240520, version 1, number of tokens), then the
// tokens, uint16. Other files are text; a file that begins with binary data is rejected.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tokenizer.h"

constexpr int SHARD_HEADER = 256, SHARD_MAGIC = 20240520, SHARD_VERSION = 1;

// Consecutive tokens of one file.
struct Piece {
    std::shared_ptr<const MappedFile> file;
    std::shared_ptr<const char> tokens;   // in the file, or encoded from its text
    size_t token_bytes;                   // 1, 2 or 4
    size_t begin, count;

    int operator[](size_t i) const {
        const char* at = tokens.get() + token_bytes * (begin + i);
        int token = 0;
        memcpy(&token, at, token_bytes);   // little-endian
        return token;
    }
};

// Windows may begin ANYWHERE (there are as many as such places), follow each other as WHOLE ones, or follow each other
// COVERING every token, in which case the last one of a file may be shorter.
enum class Windows { ANYWHERE, WHOLE, COVERING };

// The tokens of all files that a pattern names, as one list.
class Tokens {
public:
    Tokens() = default;
    explicit Tokens(const std::string& pattern);

    // Encodes text, unless the model's tokens are bytes.
    void tokenize(const Text& text);
    size_t text_bytes() const { return text_bytes_; }   // of the text that was encoded
    size_t count() const;
    bool bytes_only() const;
    const std::vector<Piece>& pieces() const { return pieces_; }

    // Removes the last `fraction` of the tokens and returns them.
    Tokens split_tail(double fraction);

    size_t windows(Windows kind, size_t T) const;
    // Reads window `index` of windows(kind, T). Targets past the end of a file are -1.
    void read(int* inputs, int* targets, Windows kind, size_t index, size_t T, int V) const;

private:
    size_t text_bytes_ = 0;
    std::vector<Piece> pieces_;
};

// Training data: text files or token shards, and windows of T + 1 tokens, which give T inputs and T targets.
//
// Shards (*.bin) have llm.c's format: a header of 256 int32 (magic 20240520, version 1, number of tokens), then the
// tokens as uint16. Other files are text; a file with a zero byte in its first 4096 bytes is rejected as binary. Files
// of other known formats are rejected with the name of the format.
#pragma once

#include <algorithm>
#include <cstring>

#include "tokenizer.h"

constexpr int SHARD_HEADER = 256, SHARD_MAGIC = 20240520, SHARD_VERSION = 1;

// A range of tokens of one file.
struct Piece {
    std::shared_ptr<const MappedFile> file;
    std::shared_ptr<const char> tokens;   // points into the mapped file, or to tokens encoded from its text
    size_t token_bytes;                   // 1, 2 or 4
    size_t begin, count;

    int operator[](size_t i) const {
        const char* at = tokens.get() + token_bytes * (begin + i);
        int token = 0;
        memcpy(&token, at, token_bytes);   // little-endian
        return token;
    }
};

// ANYWHERE: a window at each possible start. WHOLE: windows with stride T, without an incomplete last one. COVERING:
// windows with stride T that cover every token; the last window of a file may be shorter.
enum class Windows { ANYWHERE, WHOLE, COVERING };

// The concatenated tokens of all files that match a pattern.
class Tokens {
public:
    Tokens() = default;
    explicit Tokens(const std::string& pattern);

    // Replaces the bytes of text files with tokens, unless the model's tokens are bytes.
    void tokenize(const Text& text);
    size_t text_bytes() const { return text_bytes_; }   // size of the encoded text
    size_t count() const {
        size_t count = 0;
        for (const Piece& piece : pieces_) count += piece.count;
        return count;
    }
    bool bytes_only() const {
        return std::all_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.token_bytes == 1; });
    }
    const std::vector<Piece>& pieces() const { return pieces_; }
    int largest(size_t n) const;   // of the first n tokens

    // Removes the last `fraction` of the tokens and returns them.
    Tokens split_tail(double fraction);

    size_t windows(Windows kind, size_t T) const;
    // Reads window `index` of windows(kind, T) into inputs (T) and targets (T). Targets past the end of a file are -1.
    // Throws UserError if a token is not below the vocabulary size V.
    void read(int* inputs, int* targets, Windows kind, size_t index, size_t T, int V) const;

private:
    size_t text_bytes_ = 0;
    std::vector<Piece> pieces_;
};

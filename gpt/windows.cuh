// The tokens of all data files as one list, of which sequences are windows. Included by train_gpt.cu.
#pragma once

// Windows may begin ANYWHERE (as many as there are such places); or follow on each other, WHOLE ones
// only, or COVERING every token, the last one of a file cut short.
enum class Windows { ANYWHERE, WHOLE, COVERING };

class Tokens {
public:
    Tokens() = default;
    explicit Tokens(const std::string& pattern) : files_(std::make_shared<std::vector<MappedFile>>()) {
        paths_ = files_named(pattern);
        files_->reserve(paths_.size());
        for (const std::string& path : paths_) {
            files_->emplace_back(path);
            pieces_.push_back(open_piece(files_->back()));
            if (is_shard(path) != is_shard(paths_[0]))
                throw UserError("%s: %s and %s are text and shards of tokens, expected one of them", pattern.c_str(),
                                paths_[0].c_str(), path.c_str());
        }
    }

    // Makes of text the tokens that the model's are: nothing is to do where those are bytes.
    void tokenize(const Text& text, int V, FILE* out) {
        for (Piece& piece : pieces_) {
            if (piece.token_bytes != 1 || text.takes_bytes(piece.file->path())) continue;
            text_bytes_ += piece.count;
            encoded_.push_back(encode_file(text, {piece.tokens, piece.count}, token_bytes(V), piece.file->path(), out));
            piece.file->require_whole();
            piece = {piece.file, encoded_.back()->data(), token_bytes(V), 0, encoded_.back()->size() / token_bytes(V)};
            if (piece.count == 0) throw UserError("%s: no tokens", piece.file->path().c_str());
        }
    }
    size_t text_bytes() const { return text_bytes_; }   // of which tokens were made

    size_t count() const {
        size_t count = 0;
        for (const Piece& piece : pieces_) count += piece.count;
        return count;
    }
    bool bytes_only() const {
        return std::all_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.token_bytes == 1; });
    }
    TokensAre tokens_are() const { return bytes_only() ? TokensAre::BYTES : TokensAre::OTHERS; }
    const std::vector<Piece>& pieces() const { return pieces_; }

    // Takes the last `fraction` of the tokens away and returns them.
    Tokens split_tail(double fraction) {
        Tokens tail;
        tail.files_ = files_;
        tail.encoded_ = encoded_;
        size_t wanted = static_cast<size_t>(count() * fraction);
        while (wanted > 0) {
            Piece& last = pieces_.back();
            const size_t taken = std::min(wanted, last.count);
            Piece part = last;
            part.begin += last.count - taken;
            part.count = taken;
            tail.pieces_.insert(tail.pieces_.begin(), part);
            last.count -= taken;
            if (last.count == 0) pieces_.pop_back();
            wanted -= taken;
        }
        return tail;
    }

    size_t windows(Windows kind, size_t T) const {
        size_t total = 0;
        for (const Piece& piece : pieces_) total += windows_of(piece, kind, T);
        return total;
    }

    // Window number `index` of that many. Targets past the end of a file are -1.
    void read(int* inputs, int* targets, Windows kind, size_t index, size_t T, int V) const {
        for (const Piece& piece : pieces_) {
            const size_t here = windows_of(piece, kind, T);
            const size_t start = kind == Windows::ANYWHERE ? index : index * T;
            if (index < here) {
                copy_window(inputs, targets, piece, start, T, V);
                piece.file->require_whole();
                return;
            }
            index -= here;
        }
    }

private:
    static size_t windows_of(const Piece& p, Windows kind, size_t T) {
        switch (kind) {
            case Windows::ANYWHERE: return p.count > T ? p.count - T : 0;
            case Windows::WHOLE:    return (p.count - 1) / T;
            default:                return ceil_div(p.count - 1, T);
        }
    }
    static void copy_window(int* inputs, int* targets, const Piece& piece, size_t start, size_t T, int V) {
        const size_t there = std::min(T, piece.count - 1 - start);
        for (size_t t = 0; t <= there; t++) {
            const int token = piece[start + t];
            if (token >= V)
                throw UserError("%s: token %d at position %zu is outside the vocabulary of %d",
                                piece.file->path().c_str(), token, piece.begin + start + t, V);
            if (t < there) inputs[t] = token;
            if (t > 0) targets[t - 1] = token;
        }
        std::fill(inputs + there, inputs + T, 0);
        std::fill(targets + there, targets + T, -1);
    }

    std::vector<std::string> paths_;
    std::shared_ptr<std::vector<MappedFile>> files_;
    std::vector<std::shared_ptr<std::vector<char>>> encoded_;
    size_t text_bytes_ = 0;
    std::vector<Piece> pieces_;
};

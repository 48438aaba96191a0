#include "data.h"

#include <errno.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>

// The files that a pattern names, in sorted order. A folder that cannot be read is an error.
static std::vector<std::string> files_named(const std::string& pattern) {
    struct stat info;
    if (lstat(pattern.c_str(), &info) == 0) return {pattern};   // a name may contain glob()'s characters
    if (pattern.find_first_of("*?[") == pattern.npos) throw UserError("%s: %s", pattern.c_str(), strerror(errno));
    glob_t found = {};
    const int status = glob(pattern.c_str(), GLOB_ERR, nullptr, &found), error = errno;
    const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (status == GLOB_ABORTED) throw UserError("%s: %s", pattern.c_str(), strerror(error));
    if (paths.empty()) throw UserError("%s: no file matches", pattern.c_str());
    return paths;
}

static bool is_shard(const std::string& path) { return ends_with(path, ".bin"); }

// Whether a file holds neither text nor tokens, such as an archive: text has no zero byte.
static bool is_binary(const MappedFile& file) {
    return memchr(file.data(), 0, std::min<size_t>(file.size(), 4096)) != nullptr;
}

static Piece open_piece(const std::string& name) {
    const auto file = std::make_shared<const MappedFile>(name);
    const char* path = name.c_str();
    if (!is_shard(name)) {
        if (is_binary(*file)) throw UserError("%s: found zero bytes, expected text or .bin shards of tokens", path);
        return {file, {file, file->data()}, 1, 0, file->size()};
    }
    int header[SHARD_HEADER];
    if (file->size() < sizeof(header))
        throw UserError("%s: %zu bytes are too few for a shard's header of %zu", path, file->size(), sizeof(header));
    memcpy(header, file->data(), sizeof(header));
    const int magic = header[0], version = header[1];
    if (magic != SHARD_MAGIC)
        throw UserError("%s: magic number %d, expected %d: not a shard of tokens; scripts/prepare_text.py --tokenizer "
                        "nanogpt converts nanoGPT's", path, magic, SHARD_MAGIC);
    if (version != SHARD_VERSION) throw UserError("%s: shard version %d, expected %d", path, version, SHARD_VERSION);
    const size_t count = header[2] < 0 ? 0 : header[2], bytes = file->size() - sizeof(header);
    if (bytes != count * sizeof(uint16_t))
        throw UserError("%s: the header says %d tokens, the file holds %zu%s: truncated or damaged", path, header[2],
                        bytes / sizeof(uint16_t), bytes % sizeof(uint16_t) ? " and an odd byte" : "");
    if (count == 0) throw UserError("%s: the shard holds no tokens", path);
    return {file, {file, file->data() + sizeof(header)}, sizeof(uint16_t), 0, count};
}

Tokens::Tokens(const std::string& pattern) {
    const std::vector<std::string> paths = files_named(pattern);
    for (const std::string& path : paths) {
        pieces_.push_back(open_piece(path));
        if (is_shard(path) != is_shard(paths[0]))
            throw UserError("%s: %s and %s are text and shards of tokens, expected one of them", pattern.c_str(),
                            paths[0].c_str(), path.c_str());
    }
}

void Tokens::tokenize(const Text& text) {
    for (Piece& piece : pieces_) {
        if (piece.token_bytes != 1 || text.takes_bytes(piece.file->path())) continue;
        text_bytes_ += piece.count;
        const auto tokens = std::make_shared<const std::vector<char>>(
            text.encode_file({piece.tokens.get(), piece.count}));
        piece.file->require_whole();
        piece = {piece.file, {tokens, tokens->data()}, text.token_bytes(), 0, tokens->size() / text.token_bytes()};
        if (piece.count == 0) throw UserError("%s: no tokens", piece.file->path().c_str());
    }
}

size_t Tokens::count() const {
    size_t count = 0;
    for (const Piece& piece : pieces_) count += piece.count;
    return count;
}

bool Tokens::bytes_only() const {
    return std::all_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.token_bytes == 1; });
}

Tokens Tokens::split_tail(double fraction) {
    Tokens tail;
    for (size_t wanted = static_cast<size_t>(count() * fraction); wanted > 0;) {
        Piece &last = pieces_.back(), part = last;
        part.count = std::min(wanted, last.count);
        last.count -= part.count;
        part.begin += last.count;
        wanted -= part.count;
        tail.pieces_.insert(tail.pieces_.begin(), part);
        if (last.count == 0) pieces_.pop_back();
    }
    return tail;
}

static size_t windows_of(const Piece& p, Windows kind, size_t T) {
    switch (kind) {
        case Windows::ANYWHERE: return p.count > T ? p.count - T : 0;
        case Windows::WHOLE:    return (p.count - 1) / T;
        default:                return (p.count - 1 + T - 1) / T;
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

size_t Tokens::windows(Windows kind, size_t T) const {
    size_t total = 0;
    for (const Piece& piece : pieces_) total += windows_of(piece, kind, T);
    return total;
}

void Tokens::read(int* inputs, int* targets, Windows kind, size_t index, size_t T, int V) const {
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

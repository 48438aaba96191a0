#include "data.h"

#include <errno.h>
#include <glob.h>

static bool is_shard(const std::string& path) { return ends_with(path, ".bin"); }

// Returns the paths that match a pattern, sorted. A folder that cannot be read is an error.
static std::vector<std::string> files_named(const std::string& pattern) {
    std::error_code failed;
    if (fs::is_directory(pattern, failed)) {
        fs::directory_iterator(pattern, failed);
        if (failed) throw UserError("%s: %s", pattern.c_str(), failed.message().c_str());
        const auto names = paths_in(pattern);
        const bool shards = std::any_of(names.begin(), names.end(), is_shard);
        throw UserError("%s: a folder; expected files, such as \"%s\"", pattern.c_str(),
                        (fs::path(pattern) / (shards ? "*.bin" : "*.txt")).c_str());
    }
    // A file name may contain * ? [. Opening a file that does not exist reports the reason.
    if (exists(pattern) || pattern.find_first_of("*?[") == pattern.npos) return {pattern};
    glob_t found = {};
    const int status = glob(pattern.c_str(), GLOB_ERR, nullptr, &found), error = errno;
    const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (status == GLOB_ABORTED) throw UserError("%s: %s", pattern.c_str(), strerror(error));
    if (paths.empty()) throw UserError("%s: no file matches", pattern.c_str());
    return paths;
}

// Returns what a file is that is neither text nor a shard, according to its first bytes, and what to do with it; "" if
// that is unknown.
static std::string kind_of(const MappedFile& file) {
    static constexpr std::pair<int, const char*> LLM_C[] = {   // llm.c's magic numbers
        {20240326, "llm.c's model weights"}, {20240327, "llm.c's debug state"}, {20240328, "llm.c's tokenizer"},
        {20240522, "questions, which --hellaswag reads"}, {20240527, "llm.c's optimizer state"},
        {20240801, "llm.c's Llama 3 tokens (uint32)"}, {20240803, "llm.c's Llama 3 weights"}};
    static const char UTF16[] = "UTF-16 text; iconv -f UTF-16 -t UTF-8 converts it";
    static constexpr std::pair<std::string_view, const char*> STARTS[] = {
        {"\x93NUMPY", "a .npy file; scripts/prepare_text.py --tokenizer nanogpt converts it"},
        {"PAR1\x15", "a parquet file; scripts/prepare_text.py converts it"},
        {"PK\3\4", "a zip archive, such as a .pt or .npz file"}, {"\x1f\x8b\x08", "a gzip archive"},
        {"\x28\xb5\x2f\xfd", "a zstd archive"}, {"\xfd" "7zXZ", "an xz archive"}, {"BZh91AY&SY", "a bzip2 archive"},
        {"\xff\xfe", UTF16}, {"\xfe\xff", UTF16}};
    for (const auto& [start, kind] : STARTS)
        if (begins_with({file.data(), file.size()}, start)) return kind;
    int magic = 0;
    memcpy(&magic, file.data(), std::min(sizeof(magic), file.size()));
    for (const auto& [number, kind] : LLM_C)
        if (magic == number) return kind;
    return "";
}

static Piece open_piece(const std::string& name) {
    const auto file = std::make_shared<const MappedFile>(name);
    const char* path = name.c_str();
    if (const std::string kind = kind_of(*file); !kind.empty())
        throw UserError("%s: expected text or .bin shards of tokens, found %s", path, kind.c_str());
    if (!is_shard(name)) {
        if (memchr(file->data(), 0, std::min<size_t>(file->size(), 4096)))   // a binary file
            throw UserError("%s: found zero bytes, expected text or .bin shards of tokens; iconv -f UTF-16LE -t UTF-8 "
                            "converts UTF-16", path);
        return {file, {file, file->data()}, 1, 0, file->size()};
    }
    int header[SHARD_HEADER];
    if (file->size() < sizeof(header))
        throw UserError("%s: expected a shard's header of %zu bytes, found a file of %zu", path, sizeof(header),
                        file->size());
    memcpy(header, file->data(), sizeof(header));
    const int magic = header[0], version = header[1];
    if (magic != SHARD_MAGIC)
        throw UserError("%s: not a shard of tokens: expected the magic number %d, found %d; scripts/prepare_text.py "
                        "--tokenizer nanogpt converts nanoGPT's files, which have no header", path, SHARD_MAGIC, magic);
    if (version != SHARD_VERSION)
        throw UserError("%s: shard version %d, expected %d", path, version, SHARD_VERSION);
    const size_t count = header[2] < 0 ? 0 : header[2], bytes = file->size() - sizeof(header);
    if (bytes != count * sizeof(uint16_t))
        throw UserError("%s: truncated or damaged: the header says %d tokens, the file holds %zu%s", path, header[2],
                        bytes / sizeof(uint16_t), bytes % sizeof(uint16_t) ? " and an odd byte" : "");
    if (count == 0) throw UserError("%s: the shard has no tokens", path);
    return {file, {file, file->data() + sizeof(header)}, sizeof(uint16_t), 0, count};
}

Tokens::Tokens(const std::string& pattern) {
    const std::vector<std::string> paths = files_named(pattern);
    for (const std::string& path : paths) {
        pieces_.push_back(open_piece(path));
        if (is_shard(path) != is_shard(paths[0]))
            throw UserError("%s: expected either text files or shards of tokens, found both: %s and %s",
                            pattern.c_str(), paths[0].c_str(), path.c_str());
    }
}

void Tokens::tokenize(const Text& text) {
    for (Piece& piece : pieces_) {
        if (piece.token_bytes != 1 || text.is_byte_level(piece.file->path())) continue;
        text_bytes_ += piece.count;
        const auto tokens = std::make_shared<const std::vector<char>>(
            text.encode_file({piece.tokens.get(), piece.count}));
        piece.file->require_whole();
        piece = {piece.file, {tokens, tokens->data()}, text.token_bytes(), 0, tokens->size() / text.token_bytes()};
        if (piece.count == 0) throw UserError("%s: the text has no tokens", piece.file->path().c_str());
    }
}

Tokens Tokens::split_tail(double fraction) {
    Tokens tail;
    for (size_t remaining = static_cast<size_t>(count() * fraction); remaining > 0;) {
        Piece &last = pieces_.back(), part = last;
        part.count = std::min(remaining, last.count);
        last.count -= part.count;
        part.begin += last.count;
        remaining -= part.count;
        tail.pieces_.insert(tail.pieces_.begin(), part);
        if (last.count == 0) pieces_.pop_back();
    }
    return tail;
}

int Tokens::largest(size_t n) const {
    int largest = 0;
    for (const Piece& piece : pieces_) {
        const size_t count = std::min(n, piece.count);
        for (size_t i = 0; i < count; i++) largest = std::max(largest, piece[i]);
        n -= count;
    }
    return largest;
}

static size_t windows_of(const Piece& p, Windows kind, size_t T) {
    switch (kind) {
        case Windows::ANYWHERE: return p.count > T ? p.count - T : 0;
        case Windows::WHOLE:    return (p.count - 1) / T;
        default:                return (p.count - 1 + T - 1) / T;
    }
}

// Copies the window that begins at token `start` of a piece; past the end, inputs are 0 and targets -1.
static void copy_window(int* inputs, int* targets, const Piece& piece, size_t start, size_t T, int V) {
    const size_t length = std::min(T, piece.count - 1 - start);
    for (size_t t = 0; t <= length; t++) {
        const int token = piece[start + t];
        if (token >= V)
            throw UserError("%s: token %d at position %zu is outside the vocabulary of %d",
                            piece.file->path().c_str(), token, piece.begin + start + t, V);
        if (t < length) inputs[t] = token;
        if (t > 0) targets[t - 1] = token;
    }
    std::fill(inputs + length, inputs + T, 0);
    std::fill(targets + length, targets + T, -1);
}

size_t Tokens::windows(Windows kind, size_t T) const {
    size_t total = 0;
    for (const Piece& piece : pieces_) total += windows_of(piece, kind, T);
    return total;
}

void Tokens::read(int* inputs, int* targets, Windows kind, size_t index, size_t T, int V) const {
    for (const Piece& piece : pieces_) {
        const size_t n = windows_of(piece, kind, T);
        const size_t start = kind == Windows::ANYWHERE ? index : index * T;
        if (index < n) {
            copy_window(inputs, targets, piece, start, T, V);
            piece.file->require_whole();
            return;
        }
        index -= n;
    }
}

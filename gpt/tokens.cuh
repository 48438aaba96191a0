// Files of tokens: shards in llm.c's format, 256 int32 of header (magic 20240520, version 1, number of tokens), then
// uint16 tokens; and text. What is neither is told from its first bytes. Included by train_gpt.cu.

#pragma once

#include "files.cuh"

// The files that a pattern names, in sorted order. A folder that cannot be read is no reason to take fewer.
std::vector<std::string> files_named(const std::string& pattern) {
    static std::string unreadable;   // where glob()'s function can write
    unreadable.clear();
    auto note = [](const char* path, int error) {
        if (error != ENOENT && error != ENOTDIR) unreadable = format("%s: %s", path, strerror(error));
        return 0;
    };
    glob_t found = {};
    std::vector<std::string> paths;
    const int status = glob(pattern.c_str(), 0, note, &found);
    for (size_t i = 0; status == 0 && i < found.gl_pathc; i++) paths.push_back(found.gl_pathv[i]);
    globfree(&found);
    if (!unreadable.empty()) throw UserError("%s: cannot be looked for: %s", pattern.c_str(), unreadable.c_str());
    if (!paths.empty()) return paths;
    struct stat info;
    if (lstat(pattern.c_str(), &info) == 0) return {pattern};   // signs of a pattern may be part of a name
    const size_t sign = pattern.find_first_of("*?[");
    const std::string folder = fs::path(pattern.substr(0, sign)).parent_path(), to_see = folder.empty() ? "." : folder;
    const bool is_there = stat(to_see.c_str(), &info) == 0;
    if (!is_there || !S_ISDIR(info.st_mode))
        throw UserError("%s: %s: %s", pattern.c_str(), to_see.c_str(),
                        is_there ? strerror(ENOTDIR) : why_not(to_see, errno).c_str());
    throw UserError("%s: %s", pattern.c_str(), sign == pattern.npos ? "no such file" : "no file matches");
}

constexpr int SHARD_HEADER = 256, SHARD_MAGIC = 20240520, SHARD_VERSION = 1;

// Consecutive tokens of one file.
struct Piece {
    const MappedFile* file;
    const char* tokens;
    size_t token_bytes;   // 1, 2 or 4
    size_t begin, count;

    int operator[](size_t i) const {
        const char* at = tokens + token_bytes * (begin + i);
        int token = 0;
        memcpy(&token, at, token_bytes);   // little-endian
        return token;
    }
};

// What a file is that holds neither text nor tokens, by the bytes that its format begins with; empty: none of these.
std::string foreign_format(const MappedFile& file) {
    using namespace std::string_literals;
    struct Format { size_t at; std::string bytes; const char* what; };
    static const Format FORMATS[] = {
        {0, "\x1f\x8b"s, "compressed by gzip"}, {0, "\x28\xb5\x2f\xfd"s, "compressed by zstd"},
        {4, "1AY&SY"s, "compressed by bzip2"}, {0, "\xfd"s "7zXZ\0"s, "compressed by xz"},
        {0, "PK\x03\x04"s, "a zip archive"}, {0, "PAR1"s, "Parquet, which scripts/prepare_text.py reads"},
        {0, "\x93NUMPY"s, "a NumPy array"}};
    for (const auto& [at, bytes, what] : FORMATS)
        if (file.size() >= at + bytes.size() && memcmp(file.data() + at, bytes.data(), bytes.size()) == 0) return what;
    uint64_t header = 0;
    if (file.size() > sizeof(header)) memcpy(&header, file.data(), sizeof(header));
    const bool tensors = header > 0 && header < file.size() && file.data()[sizeof(header)] == '{';
    return tensors ? "safetensors" : "";
}

bool is_shard(const std::string& path) { return ends_with(path, ".bin"); }

// A .bin without a shard's magic number: nanoGPT's are uint16 tokens from the first byte on.
[[noreturn]] void refuse_headerless(const MappedFile& file, int magic) {
    constexpr size_t LOOKED_AT = 1 << 16;
    constexpr int GPT2_TOKENS = 50257;
    const Piece all = {&file, file.data(), sizeof(uint16_t), 0, file.size() / sizeof(uint16_t)};
    int largest = 0;
    for (size_t i = 0; i < std::min(all.count, LOOKED_AT); i++) largest = std::max(largest, all[i]);
    const std::string& path = file.path();
    if (file.size() % sizeof(uint16_t) != 0 || largest >= GPT2_TOKENS)
        throw UserError("%s: magic number %d, expected %d: not a shard of tokens", path.c_str(), magic, SHARD_MAGIC);
    throw UserError("%s: magic number %d, expected %d: seems to be nanoGPT's, %zu tokens without a header; python3 "
                    "scripts/prepare_text.py --tokenizer nanogpt --out-prefix %s %s makes shards of it", path.c_str(),
                    magic, SHARD_MAGIC, all.count, shell_word(path.substr(0, path.size() - strlen(".bin"))).c_str(),
                    shell_word(path).c_str());
}

Piece open_piece(const MappedFile& file) {
    const char* path = file.path().c_str();
    const std::string foreign = foreign_format(file);
    if (!foreign.empty())
        throw UserError("%s: %s, expected text or .bin shards of tokens", path, foreign.c_str());
    if (!is_shard(file.path())) return {&file, file.data(), 1, 0, file.size()};
    int header[SHARD_HEADER];
    if (file.size() < sizeof(header))
        throw UserError("%s: %zu bytes are too few for a shard's header of %zu", path, file.size(), sizeof(header));
    memcpy(header, file.data(), sizeof(header));
    const int magic = header[0], version = header[1];
    if (magic != SHARD_MAGIC) refuse_headerless(file, magic);
    if (version != SHARD_VERSION) throw UserError("%s: shard version %d, expected %d", path, version, SHARD_VERSION);
    const size_t count = header[2] < 0 ? 0 : header[2], bytes = file.size() - sizeof(header);
    if (bytes != count * sizeof(uint16_t))
        throw UserError("%s: the header says %d tokens, the file holds %zu%s: truncated or damaged", path, header[2],
                        bytes / sizeof(uint16_t), bytes % sizeof(uint16_t) ? " and an odd byte" : "");
    if (count == 0) throw UserError("%s: the shard holds no tokens", path);
    return {&file, file.data() + sizeof(header), 2, 0, count};
}

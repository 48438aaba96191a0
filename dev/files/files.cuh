// Files as a whole: read by mapping, written from start to end, JSON.

#pragma once

#include "json.h"

// A file mapped into memory, read-only: pages come from disk as they are touched, so it may be
// larger than memory.
class MappedFile {
public:
    explicit MappedFile(const std::string& path) : path_(path) {
        const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);   // of a pipe, too, it returns at once
        if (file < 0) throw UserError("%s: %s", path.c_str(), strerror(errno));
        struct stat info;
        fstat(file, &info);
        size_ = info.st_size;
        const bool regular = S_ISREG(info.st_mode);
        void* mapped = regular && size_ ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
        close(file);
        if (!regular) throw UserError("%s: not a regular file", path.c_str());
        if (size_ == 0) throw UserError("%s: the file is empty", path.c_str());
        if (mapped == MAP_FAILED) throw Failure("%s: mmap: %s", path.c_str(), strerror(errno));
        data_ = static_cast<const char*>(mapped);
    }
    MappedFile(MappedFile&& other)
        : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
    ~MappedFile() { if (data_) munmap(const_cast<char*>(data_), size_); }

    const std::string& path() const { return path_; }
    const char* data() const { return data_; }
    size_t size() const { return size_; }

private:
    std::string path_;
    const char* data_ = nullptr;
    size_t size_ = 0;
};

// A file written from start to end. What fails (a full disk, say) throws; finish() has it on disk.
class OutputFile {
public:
    explicit OutputFile(const std::string& path) : path_(path), file_(fopen(path.c_str(), "wb")) {
        if (!file_) throw Failure("%s: cannot be written: %s", path.c_str(), strerror(errno));
    }
    OutputFile(const OutputFile&) = delete;
    ~OutputFile() { if (file_) fclose(file_); }

    void write(const void* data, size_t bytes) {
        if (fwrite(data, 1, bytes, file_) != bytes) fail();
    }
    void finish() {
        if (fflush(file_) != 0 || fsync(fileno(file_)) != 0) fail();
        if (fclose(std::exchange(file_, nullptr)) != 0) fail();
    }

private:
    [[noreturn]] void fail() { throw Failure("%s: writing failed: %s", path_.c_str(), strerror(errno)); }

    std::string path_;
    FILE* file_;
};

// A file that is there, and to which text is added. What could not be written is written first the next time.
class GrowingFile {
public:
    explicit GrowingFile(const std::string& path)
        : path_(path), file_(open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC)) {
        if (file_ < 0) throw Failure("%s: cannot be written: %s", path.c_str(), strerror(errno));
    }
    GrowingFile(const GrowingFile&) = delete;
    ~GrowingFile() { close(file_); }

    void add(const std::string& text) {
        unwritten_ += text;
        flush();
    }
    // All of it is on disk.
    void sync() {
        flush();
        if (fsync(file_) != 0) fail();
    }

private:
    void flush() {
        while (!unwritten_.empty()) {
            const ssize_t written = write(file_, unwritten_.data(), unwritten_.size());
            if (written < 0) fail();
            unwritten_.erase(0, written);
        }
    }
    [[noreturn]] void fail() { throw Failure("%s: writing failed: %s", path_.c_str(), strerror(errno)); }

    std::string path_, unwritten_;
    int file_;
};

void sync_folder(const std::string& path) {
    const int folder = open(path.c_str(), O_RDONLY);
    if (folder < 0 || fsync(folder) != 0) {
        if (folder >= 0) close(folder);
        throw Failure("%s: fsync: %s", path.c_str(), strerror(errno));
    }
    close(folder);
}

// Makes a folder whose name outlives a power cut, and those above it.
void create_folder(const fs::path& path) {
    if (fs::exists(path)) return;
    create_folder(path.parent_path());
    fs::create_directory(path);
    sync_folder(path.parent_path());
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Far beyond every real file; what is larger was named by mistake.
constexpr size_t LARGEST_JSON = 100 << 20;

template <typename Json> Json read_json_as(const std::string& path) {
    const MappedFile file(path);
    if (file.size() > LARGEST_JSON)
        throw UserError("%s: %zu bytes, expected JSON of at most %zu", path.c_str(), file.size(), LARGEST_JSON);
    try {
        return parse_json<Json>(file.data(), file.data() + file.size());
    } catch (const JsonError& error) {
        throw UserError("%s: %s", path.c_str(), error.what());
    }
}

json read_json(const std::string& path) { return read_json_as<json>(path); }

// A whole number that T can hold; no other value is taken for one.
template <typename T> T whole_number(const json& file, const char* name, const std::string& path) {
    if (!file.is_object() || !file.contains(name)) throw UserError("%s: \"%s\" is missing", path.c_str(), name);
    const json& value = file.at(name);
    constexpr T LEAST = std::numeric_limits<T>::min(), MOST = std::numeric_limits<T>::max();
    bool fits = false;
    if (value.is_number_unsigned()) fits = value.get<uint64_t>() <= static_cast<uint64_t>(MOST);
    else if (value.is_number_integer()) fits = LEAST < 0 && value.get<int64_t>() >= static_cast<int64_t>(LEAST);
    if (!fits)
        throw UserError("%s: \"%s\" is %s, expected a whole number from %s to %s", path.c_str(), name,
                        value.dump().substr(0, 40).c_str(), std::to_string(LEAST).c_str(),
                        std::to_string(MOST).c_str());
    return value.get<T>();
}

void write_json(const std::string& path, const json& content) {
    OutputFile file(path);
    const std::string text = content.dump(2) + "\n";
    file.write(text.data(), text.size());
    file.finish();
}

// A text as one word of the shell's, for lines that can be copied: in quotes where it has more than a path's usual signs.
std::string shell_word(const std::string& text) {
    auto plain = [](unsigned char c) { return c >= 0x80 || (c && (isalnum(c) || strchr("_-./=+,:@%", c))); };
    if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
    std::string word = "'";
    for (char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return word + "'";
}

// Files as a whole: read by mapping, written from start to end, JSON.

#pragma once

// A file mapped into memory, read-only: pages come from disk as they are touched, so it may be
// larger than memory.
class MappedFile {
public:
    explicit MappedFile(const std::string& path) : path_(path) {
        const int file = open(path.c_str(), O_RDONLY);
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

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

json read_json(const std::string& path) {
    const MappedFile file(path);
    try {
        return json::parse(file.data(), file.data() + file.size());
    } catch (const json::exception& error) {
        throw UserError("%s: not valid JSON: %s", path.c_str(), error.what());
    }
}

void write_json(const std::string& path, const json& content) {
    OutputFile file(path);
    const std::string text = content.dump(2) + "\n";
    file.write(text.data(), text.size());
    file.finish();
}

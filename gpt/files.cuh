// Files as a whole: read by mapping, written from start to end, JSON.

#pragma once

#include "json.h"

// ---- reading ------------------------------------------------------------------------------------

// A file that is cut off while it is mapped has no pages any more where its end was. Zeros take the place of one that
// is asked for, so that who reads it can say which file it was, and a run ends well.
static volatile sig_atomic_t page_lost = 0;

void replace_lost_page(int, siginfo_t* info, void*) {
    const size_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<size_t>(info->si_addr) / page * page;
    const bool replaced = info->si_code == BUS_ADRERR &&
                          mmap(reinterpret_cast<void*>(at), page, PROT_READ,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    if (replaced) page_lost = 1;
    else signal(SIGBUS, SIG_DFL);   // something else: it comes again, and ends the program
}

// Handlers of signals have a stack of their own: on a CPU a matmul of oneDNN runs with the stack pointer inside of its
// heap buffer, where a handler's frame would do damage.
void catch_lost_pages() {
    static char signal_stack[64 << 10];
    const stack_t stack = {signal_stack, 0, sizeof(signal_stack)};
    if (sigaltstack(&stack, nullptr) != 0) throw Failure("sigaltstack: %s", strerror(errno));
    struct sigaction lost = {};
    lost.sa_sigaction = replace_lost_page;
    lost.sa_flags = SA_ONSTACK | SA_SIGINFO;
    sigaction(SIGBUS, &lost, nullptr);
}

// Why a path leads nowhere.
std::string why_not(const std::string& path, int error) {
    std::error_code ignored;
    const fs::path target = fs::read_symlink(path, ignored);
    if (error == ENOENT && !target.empty()) return format("a link to %s, which is not there", target.c_str());
    return strerror(error);
}

// A file mapped into memory, read-only: pages come from disk as they are touched, so it may be
// larger than memory.
class MappedFile {
public:
    explicit MappedFile(const std::string& path) : path_(path) {
        const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);   // of a pipe, too, it returns at once
        if (file < 0) throw UserError("%s: %s", path.c_str(), why_not(path, errno).c_str());
        struct stat info;
        fstat(file, &info);
        size_ = info.st_size;
        const bool regular = S_ISREG(info.st_mode), folder = S_ISDIR(info.st_mode);
        void* mapped = regular && size_ ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
        close(file);
        if (!regular) throw UserError("%s: %snot a regular file", path.c_str(), folder ? "a folder, " : "");
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
    // After reading from it: whether all of that was the file's.
    void require_whole() const {
        if (page_lost) throw Failure("%s: was cut off while it was in use", path_.c_str());
    }

private:
    std::string path_;
    const char* data_ = nullptr;
    size_t size_ = 0;
};

// ---- writing ------------------------------------------------------------------------------------

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

// ---- names and JSON -----------------------------------------------------------------------------

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

// A text as one word of the shell's, for lines that can be copied: in quotes where it has more than a path's signs.
std::string shell_word(const std::string& text) {
    auto plain = [](unsigned char c) { return c >= 0x80 || (c && (isalnum(c) || strchr("_-./=+,:@%", c))); };
    if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
    std::string word = "'";
    for (char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return word + "'";
}

// Error types, text helpers, files, JSON, a run's log, signals.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;   // keeps names in the file's order

// Instantiated only in files.cpp, because it takes seconds to compile.
extern template class nlohmann::basic_json<nlohmann::ordered_map>;

// ---- errors -------------------------------------------------------------------------------------
// UserError: bad usage or bad input, which the user can correct (exit code 2). Failure: any other error (exit code 1).
// The message is one line that names the file, flag or tensor, what was expected and what was found.

// Returns the text that printf would print.
__attribute__((format(printf, 1, 2))) std::string format(const char* text, ...);

template <int EXIT_CODE> struct Error : std::exception {
    std::string text;

    __attribute__((format(printf, 2, 3))) explicit Error(const char* message, ...);
    const char* what() const noexcept override { return text.c_str(); }
};
using UserError = Error<2>;
using Failure = Error<1>;

// ---- text ---------------------------------------------------------------------------------------

inline bool begins_with(std::string_view text, std::string_view begin) {
    return text.compare(0, begin.size(), begin) == 0;
}

inline bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Parses the whole text as a finite number that fits in T; returns false, with `to` unchanged, if it is anything else.
template <typename T> bool parse_number(const std::string& text, T& to) {
    std::istringstream in(text);
    T value;
    if (!(in >> value) || in.peek() != EOF || !std::isfinite(static_cast<double>(value))) return false;
    to = value;
    return true;
}

// Returns text as one word of a shell command: in single quotes if it is empty or has characters unusual in a path.
std::string shell_word(const std::string& text);

// Returns the length in bytes of the UTF-8 character at the start of text; 0 if text does not start with one.
size_t character_length(std::string_view text);
// Returns the number of bytes at the end of text that may be the start of an incomplete UTF-8 character.
size_t incomplete_end(std::string_view text);

// Returns text with `replacement` for each control character that may affect a terminal and each invalid UTF-8 byte.
std::string readable(const std::string& text, const char* replacement = ".");
constexpr const char* REPLACEMENT_CHARACTER = "\xef\xbf\xbd";   // U+FFFD
// Returns a message as one line that is safe to print, because messages may quote names from files.
std::string one_line(const std::string& message);

// Returns the seconds of a monotonic clock.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- reading ------------------------------------------------------------------------------------

// Installs a handler for SIGBUS. If a mapped file was truncated, the handler replaces the missing page by zeros, so
// that MappedFile::require_whole() can report the file.
void catch_lost_pages();

// Returns whether a path exists. Returns false also if the lookup fails, as with a name of more than 255 bytes; opening
// the path then reports the reason.
inline bool exists(const std::string& path) {
    std::error_code ignored;
    return fs::exists(path, ignored);
}

// Returns the paths in a folder, sorted; none if the folder cannot be read.
std::vector<std::string> paths_in(const std::string& folder);

// A read-only memory-mapped file. Pages are read from disk on access, so the file may be larger than memory.
class MappedFile {
public:
    explicit MappedFile(const std::string& path);

    const std::string& path() const { return path_; }
    const char* data() const { return data_.get(); }
    size_t size() const { return size_; }
    // Throws Failure if a mapped file was truncated while it was in use. Call this after reading.
    void require_whole() const;

private:
    std::string path_;
    size_t size_;
    std::shared_ptr<const char> data_;   // unmaps the file
};

inline std::string read_file(const std::string& path) {
    const MappedFile file(path);
    return {file.data(), file.size()};
}

// Owns the descriptor of an open file or folder and closes it. A negative number means that no file is open.
class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() { if (number_ >= 0) close(number_); }
    operator int() const { return number_; }

private:
    int number_;
};

// ---- writing ------------------------------------------------------------------------------------

constexpr size_t SYNC_BYTES = 64 << 20;

// Writes a file from start to end. Throws Failure on errors such as a full disk. finish() returns when the data is on
// disk. write() flushes to disk after every SYNC_BYTES, so that finish() does not have to flush a large file at once.
class OutputFile {
public:
    explicit OutputFile(const std::string& path);
    void write(const void* data, size_t bytes);
    void finish();

private:
    std::string path_;
    Descriptor file_;
    size_t unsynced_ = 0;   // bytes
};

inline void write_file(const std::string& path, const std::string& content) {
    OutputFile file(path);
    file.write(content.data(), content.size());
    file.finish();
}

// Flushes a folder's entries to disk.
void sync_folder(const std::string& path);

// Creates a folder and its missing parents, and flushes them to disk, so that they survive a power failure.
std::error_code create_folder(const std::string& path);

// ---- JSON ---------------------------------------------------------------------------------------

constexpr size_t MAX_JSON_BYTES = 100 << 20;   // far more than the files of real models have

// Parses a JSON object from an untrusted file. Throws UserError, with a message that begins with `source`, if the JSON
// is invalid or no object, has a duplicate name in an object, or has more than 100 levels. Json: nlohmann::json (fast
// lookup) or json.
template <typename Json = json> Json parse_json(std::string_view text, const std::string& source);
template <typename Json = json> Json read_json(const std::string& path);

// Returns the text of a value, with U+FFFD for invalid UTF-8. indent: spaces per level, or -1 for a single line.
inline std::string json_text(const json& value, int indent = -1) {
    return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

inline void write_json(const std::string& path, const json& content) {
    write_file(path, json_text(content, 2) + "\n");
}

// Throws UserError unless file[key] is one of the accepted values. key: "/name" or "/name/name". null in `accepted`
// stands for a missing name.
template <typename Json>
void require_value(const Json& file, const char* key, const std::vector<Json>& accepted, const std::string& path) {
    const Json found = file.value(typename Json::json_pointer(key), Json());
    std::string expected;
    for (const Json& value : accepted) {
        if (found == value) return;
        expected += (expected.empty() ? "" : " or ") + value.dump();
    }
    throw UserError("%s: \"%s\" is %s, expected %s", path.c_str(), key + 1, found.dump().substr(0, 200).c_str(),
                    expected.c_str());
}

// Returns file[name]. Throws UserError unless it is a whole number that fits in T.
template <typename T> T whole_number(const json& file, const char* name, const std::string& path) {
    if (!file.contains(name)) throw UserError("%s: \"%s\" is missing", path.c_str(), name);
    const json& value = file.at(name);
    const std::string found = value.dump();
    if (!value.is_number_integer() || found != std::to_string(value.get<T>()))
        throw UserError("%s: \"%s\" is %s, expected a whole number from %s to %s", path.c_str(), name,
                        found.substr(0, 40).c_str(), std::to_string(std::numeric_limits<T>::min()).c_str(),
                        std::to_string(std::numeric_limits<T>::max()).c_str());
    return value.get<T>();
}

// ---- log ----------------------------------------------------------------------------------------

// OUT/log.jsonl, one object per line. The last one is {"end": "complete"}, "signal" or "error", unless the program was
// killed.
class Log {
public:
    // Opens the log in folder `out`; does nothing if `out` is empty. When resuming, keeps the existing records up to
    // resumed_step. A new log is created together with its first line, `first`, from which --resume reads the options.
    void open(const std::string& out, long resumed_step, const json& first);
    // Appends a record. A record that could not be written is written before the next one.
    void write(const json& record);
    // Blocks until all records are on disk.
    void sync();

private:
    void flush();

    std::string path_, unwritten_;
    Descriptor file_;
};

// ---- signals and the machine --------------------------------------------------------------------

// Number of the signal that requested the end of the run; 0 if none did.
extern volatile sig_atomic_t stop_requested;

// Makes SIGINT, SIGTERM, SIGHUP and SIGPIPE end a run after its current step; SIGINT (Ctrl-C) also prints that. A second
// SIGINT or SIGTERM ends it immediately. Uses the signal stack of catch_lost_pages().
void catch_signals();

// Throws Failure if writing to standard output failed, unless the reason was a closed pipe, which ends a run normally.
void require_output();

// Returns the peak resident memory of this process, from /proc: getrusage() also counts memory from before exec.
size_t peak_resident_bytes();

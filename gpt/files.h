// Errors and their texts, files, JSON, a run's log, signals.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

using json = nlohmann::ordered_json;   // keeps names in the file's order

// Instantiated in files.cpp only: it takes seconds to compile.
extern template class nlohmann::basic_json<nlohmann::ordered_map>;

// ---- errors -------------------------------------------------------------------------------------
// UserError: the user can correct it (exit code 2). Failure: everything else (exit code 1). Both are one line that
// names the file, flag or tensor, what was found and what was expected.

__attribute__((format(printf, 1, 2))) std::string format(const char* text, ...);

template <int EXIT_CODE> struct Error : std::exception {
    std::string text;

    __attribute__((format(printf, 2, 3))) explicit Error(const char* message, ...);
    const char* what() const noexcept override { return text.c_str(); }
};
using UserError = Error<2>;
using Failure = Error<1>;

// ---- text ---------------------------------------------------------------------------------------

bool begins_with(const std::string& text, const std::string& begin);
bool ends_with(const std::string& text, const std::string& end);

// Parses all of text as a finite number that T can hold; false if it is anything else.
template <typename T> bool parse_number(const std::string& text, T& to);   // int, long, double

// text as one word of a shell: quoted if it has more than the characters of a path.
std::string shell_word(const std::string& text);

// The length of the UTF-8 character that text begins with; 0 if it begins with none.
size_t character_length(std::string_view text);
// How many bytes at the end of text may be the beginning of an incomplete UTF-8 character.
size_t incomplete_end(std::string_view text);

// text with `replacement` for each control character that a terminal may obey, and for each byte that is not UTF-8.
std::string readable(const std::string& text, const char* replacement = ".");
constexpr const char* REPLACEMENT_CHARACTER = "\xef\xbf\xbd";
// The same on one line: for messages that may quote names from files.
std::string one_line(const std::string& message);

// Seconds of a clock that never goes back.
double seconds_now();

// ---- reading ------------------------------------------------------------------------------------

// Handles SIGBUS: a page of a mapped file that was truncated in the meantime becomes zeros, so that
// MappedFile::require_whole() can report the file.
void catch_lost_pages();

// Whether a path leads to something. False also for a path that cannot be looked up, such as one with a name of more
// than 255 bytes; opening it then reports why.
bool exists(const std::string& path);

std::string read_file(const std::string& path);

// A file mapped into memory, read-only. Pages are read from disk on access, so it may be larger than memory.
class MappedFile {
public:
    explicit MappedFile(const std::string& path);
    MappedFile(const MappedFile&) = delete;
    ~MappedFile();

    const std::string& path() const { return path_; }
    const char* data() const { return data_; }
    size_t size() const { return size_; }
    // Called after reading: throws if a mapped file was truncated.
    void require_whole() const;

private:
    std::string path_;
    const char* data_;
    size_t size_;
};

// The descriptor of an open file or folder, which is closed with it; negative: none.
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

// A file written from start to end. Throws Failure on errors such as a full disk. finish() returns once it is on disk;
// write() waits for the disk once every SYNC_BYTES, so that no call takes as long as a large file.
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

void write_file(const std::string& path, const std::string& content);

// Flushes a folder's entries to disk.
void sync_folder(const std::string& path);

// Creates a folder, and those above it, so that they survive a power failure.
std::error_code create_folder(const std::string& path);

// ---- JSON ---------------------------------------------------------------------------------------

constexpr size_t MAX_JSON_BYTES = 100 << 20;   // far beyond every real file

// Parses JSON that may be damaged or hostile. It must be valid, with no name twice in an object and at most 100 levels;
// an error's message begins with `source`. Json: nlohmann::json (fast lookup of names) or json.
template <typename Json> Json parse_json(std::string_view text, const std::string& source);
template <typename Json = json> Json read_json(const std::string& path);

// The text of a value, with U+FFFD for what is not UTF-8. indent: spaces for each level, or -1 for a single line.
std::string json_text(const json& value, int indent = -1);
void write_json(const std::string& path, const json& content);

// file[key], "/name" or "/name/name" of an object, must be one of some values; null: it may be missing.
template <typename Json>
void require_value(const Json& file, const char* key, const std::vector<Json>& accepted, const std::string& path);
// The value of `name` in an object, which must be a whole number that T can hold.
template <typename T> T whole_number(const json& file, const char* name, const std::string& path);

// ---- log ----------------------------------------------------------------------------------------

// Parses a line of log.jsonl: an object. `source` begins an error's message.
json read_record(const std::string& line, const std::string& source);

// OUT/log.jsonl, one object per line.
class Log {
public:
    // Opens the log of folder `out`; does nothing if it is empty. Of an existing log, keeps the records up to
    // resumed_step. A new log has its first line, `first`, from the moment it exists: --resume reads the options there.
    void open(const std::string& out, long resumed_step, const json& first);
    // Adds a record. One that could not be written is written before the next one.
    void write(const json& record);
    // Returns once all of it is on disk.
    void sync();

private:
    void flush();

    std::string path_, unwritten_;
    Descriptor file_;
};

// ---- signals and the machine --------------------------------------------------------------------

// The number of the signal that asks the run to end; 0: none.
extern volatile sig_atomic_t stop_requested;

// Makes SIGINT, SIGTERM, SIGHUP and SIGPIPE end a run after its current step; a second SIGINT or SIGTERM ends it at
// once. Uses the signal stack of catch_lost_pages().
void catch_signals();

// Throws if standard output could not be written, except to a closed pipe, which ends a run normally.
void require_output();

// The largest resident memory of this process so far. From /proc: getrusage includes the program that started it.
size_t peak_resident_bytes();

#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <unordered_set>

template class nlohmann::basic_json<nlohmann::ordered_map>;

// ---- errors -------------------------------------------------------------------------------------

static std::string format_list(const char* text, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string out(vsnprintf(nullptr, 0, text, args), '\0');
    vsnprintf(out.data(), out.size() + 1, text, again);
    va_end(again);
    return out;
}

std::string format(const char* text, ...) {
    va_list args;
    va_start(args, text);
    const std::string out = format_list(text, args);
    va_end(args);
    return out;
}

template <int EXIT_CODE> Error<EXIT_CODE>::Error(const char* message, ...) {
    va_list args;
    va_start(args, message);
    text = format_list(message, args);
    va_end(args);
}
template struct Error<1>;
template struct Error<2>;

// ---- text ---------------------------------------------------------------------------------------

std::string shell_word(const std::string& text) {
    auto plain = [](unsigned char c) { return c >= 0x80 || (c && (isalnum(c) || strchr("_-./=+,:@%", c))); };
    if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
    std::string word = "'";
    for (char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return word + "'";
}

// The bounds of the second byte exclude overlong encodings, surrogates and code points above U+10FFFF.
size_t character_length(std::string_view text) {
    auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const unsigned first = byte(0);
    if (text.empty()) return 0;
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(1) < low || byte(1) > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((byte(i) & 0xc0) != 0x80) return 0;
    return length;
}

size_t incomplete_end(std::string_view text) {
    for (size_t n = 1; n <= std::min<size_t>(3, text.size()); n++) {
        const unsigned char first = text[text.size() - n];
        if ((first & 0xc0) == 0x80) continue;
        const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
        return first <= 0xf4 && n < length ? n : 0;
    }
    return 0;
}

// Returns whether a UTF-8 character is a control code of ASCII or Latin-1, except line feed and tab.
static bool is_control(const std::string& c) {
    const unsigned char first = c[0];
    if (first == 0xc2) return static_cast<unsigned char>(c[1]) < 0xa0;
    return (first < ' ' && first != '\n' && first != '\t') || first == 0x7f;
}

std::string readable(const std::string& bytes, const char* replacement) {
    std::string text;
    for (size_t at = 0, length; at < bytes.size(); at += std::max<size_t>(1, length)) {
        length = character_length(std::string_view(bytes).substr(at));
        const std::string character = bytes.substr(at, length);
        text += length == 0 || is_control(character) ? replacement : character;
    }
    return text;
}

std::string one_line(const std::string& message) {
    std::string text = readable(message, REPLACEMENT_CHARACTER);
    for (char& c : text)
        if (c == '\n' || c == '\t') c = ' ';
    return text;
}

// ---- reading ------------------------------------------------------------------------------------

static volatile sig_atomic_t page_lost = 0;   // 1 after a missing page of a mapped file was replaced

static void replace_lost_page(int, siginfo_t* info, void*) {
    const size_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<size_t>(info->si_addr) / page * page;
    const bool replaced = info->si_code == BUS_ADRERR &&
                          mmap(reinterpret_cast<void*>(at), page, PROT_READ,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    if (replaced) page_lost = 1;
    else signal(SIGBUS, SIG_DFL);   // another cause: the signal is raised again and ends the program
}

// Signal handlers need a separate stack: on a CPU, oneDNN's matmul keeps the stack pointer inside its heap buffer,
// which the handler's stack frame would overwrite.
void catch_lost_pages() {
    static char signal_stack[64 << 10];
    const stack_t stack = {signal_stack, 0, sizeof(signal_stack)};
    if (sigaltstack(&stack, nullptr) != 0) throw Failure("sigaltstack: %s", strerror(errno));
    struct sigaction lost = {};
    lost.sa_sigaction = replace_lost_page;
    lost.sa_flags = SA_ONSTACK | SA_SIGINFO;
    sigaction(SIGBUS, &lost, nullptr);
}

std::vector<std::string> paths_in(const std::string& folder) {
    std::vector<std::string> paths;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
        paths.push_back(entry->path());
    std::sort(paths.begin(), paths.end());
    return paths;
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));   // opening a pipe does not block
    if (file < 0) throw UserError("%s: %s", path.c_str(), strerror(errno));
    struct stat info;
    fstat(file, &info);
    size_ = info.st_size;
    if (!S_ISREG(info.st_mode)) throw UserError("%s: not a regular file", path.c_str());
    if (size_ == 0) throw UserError("%s: the file is empty", path.c_str());
    void* mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    if (mapped == MAP_FAILED) throw Failure("%s: mmap: %s", path.c_str(), strerror(errno));
    data_.reset(static_cast<const char*>(mapped), [mapped, size = size_](const char*) { munmap(mapped, size); });
    if (begins_with({data(), size_}, "version https://git-lfs"))
        throw UserError("%s: found a git-lfs pointer instead of the file; `git lfs pull` downloads it", path.c_str());
}

void MappedFile::require_whole() const {
    if (page_lost) throw Failure("%s: was truncated while it was in use", path_.c_str());
}

// ---- writing ------------------------------------------------------------------------------------

[[noreturn]] static void fail_writing(const std::string& path, const char* what = "writing failed") {
    throw Failure("%s: %s: %s", path.c_str(), what, strerror(errno));
}

// Opens a file for writing. flags: of open(), added to O_WRONLY | O_CLOEXEC.
static Descriptor open_to_write(const std::string& path, int flags) {
    Descriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666));
    if (file < 0) fail_writing(path, "cannot be written");
    return file;
}

// Writes to a file and returns the number of bytes that were written.
static size_t write_bytes(int file, const char* data, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t written = write(file, data + done, bytes - done);
        if (written < 0) break;
        done += written;
    }
    return done;
}

OutputFile::OutputFile(const std::string& path) : path_(path), file_(open_to_write(path, O_CREAT | O_TRUNC)) {}

void OutputFile::write(const void* data, size_t bytes) {
    if (write_bytes(file_, static_cast<const char*>(data), bytes) < bytes) fail_writing(path_);
    unsynced_ += bytes;
    if (unsynced_ < SYNC_BYTES) return;
    if (fdatasync(file_) != 0) fail_writing(path_);
    unsynced_ = 0;
}

void OutputFile::finish() {
    if (fsync(file_) != 0) fail_writing(path_);
}

void sync_folder(const std::string& path) {
    const Descriptor folder(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (folder < 0 || fsync(folder) != 0) throw Failure("%s: fsync: %s", path.c_str(), strerror(errno));
}

std::error_code create_folder(const std::string& path) {
    std::error_code error;
    const std::string whole = fs::absolute(path, error), above = fs::path(whole).parent_path();
    if (error || exists(whole)) return error;
    if (whole != above) error = create_folder(above);
    if (error) return error;
    fs::create_directory(whole, error);
    if (!error) sync_folder(above);
    return error;
}

// ---- JSON ---------------------------------------------------------------------------------------

template <typename Json> Json parse_json(std::string_view text, const std::string& source) {
    constexpr int MAX_DEPTH = 100;   // levels: limits recursion in readers; files of models have fewer than ten
    std::vector<std::unordered_set<std::string>> names(MAX_DEPTH + 1);   // of the open object at each level
    auto invalid = [&](const std::string& why) {
        return UserError("%s: not valid JSON: %s", source.c_str(), why.c_str());
    };
    auto check = [&](int depth, typename Json::parse_event_t event, const Json& parsed) {
        using Event = typename Json::parse_event_t;
        if (depth >= MAX_DEPTH) throw invalid(format("more than %d levels deep", MAX_DEPTH));
        if (event == Event::object_start) names[depth + 1].clear();
        if (event == Event::key && !names[depth].insert(parsed.template get_ref<const std::string&>()).second)
            throw invalid("the name " + parsed.dump() + " occurs twice in an object");
        return true;
    };
    try {
        Json parsed = Json::parse(text.begin(), text.end(), check);
        if (parsed.is_object()) return parsed;
        throw UserError("%s: expected a JSON object, found %s", source.c_str(), parsed.dump().substr(0, 40).c_str());
    } catch (const nlohmann::json::exception& error) {
        throw invalid(error.what());
    }
}

template <typename Json> Json read_json(const std::string& path) {
    const MappedFile file(path);
    if (file.size() > MAX_JSON_BYTES)
        throw UserError("%s: %zu bytes, expected JSON of at most %zu", path.c_str(), file.size(), MAX_JSON_BYTES);
    return parse_json<Json>({file.data(), file.size()}, path);
}
template nlohmann::json parse_json(std::string_view, const std::string&);
template json parse_json(std::string_view, const std::string&);
template nlohmann::json read_json(const std::string&);
template json read_json(const std::string&);

// ---- log ----------------------------------------------------------------------------------------

// Returns the lines of records up to a step, without the end of the run. Omits damaged lines and prints their number,
// which does not include a truncated last line.
static std::string records_until(const std::string& path, uint64_t step) {
    std::istringstream lines(exists(path) ? read_file(path) : "");
    std::string kept;
    size_t damaged = 0;
    for (std::string line; std::getline(lines, line);) {
        try {
            const json record = parse_json(line, path);
            if (record.contains("end")) continue;
            if (!record.contains("step") || whole_number<uint64_t>(record, "step", path) <= step) kept += line + "\n";
        } catch (const std::exception&) {
            damaged += !lines.eof();
        }
    }
    if (damaged) printf("resume     %s: %zu damaged lines are omitted\n", path.c_str(), damaged);
    return kept;
}

void Log::open(const std::string& out, long resumed_step, const json& first) {
    if (out.empty()) return;
    path_ = out + "/log.jsonl";
    std::string kept = resumed_step > 0 ? records_until(path_, resumed_step) : "";
    if (!begins_with(kept, "{\"run\"")) kept = json_text(first) + "\n" + kept;
    write_file(path_ + ".new", kept);
    if (rename((path_ + ".new").c_str(), path_.c_str()) != 0) fail_writing(path_);
    sync_folder(out);
    file_ = open_to_write(path_, O_APPEND);
}

void Log::write(const json& record) {
    if (file_ < 0) return;
    unwritten_ += json_text(record) + "\n";
    flush();
}

void Log::sync() {
    if (file_ < 0) return;
    flush();
    if (fsync(file_) != 0) fail_writing(path_);
}

void Log::flush() {
    unwritten_.erase(0, write_bytes(file_, unwritten_.data(), unwritten_.size()));
    if (!unwritten_.empty()) fail_writing(path_);
}

// ---- signals and the machine --------------------------------------------------------------------

volatile sig_atomic_t stop_requested = 0;

void catch_signals() {
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
        struct sigaction action = {}, before;
        action.sa_handler = [](int received) {
            static const char NOTICE[] = "\nstopping after this step; a second Ctrl-C stops at once\n";
            stop_requested = received;
            if (received == SIGINT && write(STDOUT_FILENO, NOTICE, strlen(NOTICE)) < 0) return;
        };
        // With SA_RESETHAND a second signal ends the program. Not for SIGHUP: a closed terminal may send it twice.
        action.sa_flags = SA_ONSTACK | SA_RESTART | (number == SIGINT || number == SIGTERM ? SA_RESETHAND : 0);
        sigaction(number, nullptr, &before);
        if (number != SIGHUP || before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);   // SIG_IGN: nohup
    }
    signal(SIGXFSZ, SIG_IGN);   // at the file size limit (ulimit -f), write() fails instead
}

void require_output() {
    // If an earlier write failed, its errno is no longer available.
    const std::string reason = fflush(stdout) != 0 ? format(": %s", strerror(errno)) : "";
    if (ferror(stdout) && stop_requested != SIGPIPE) throw Failure("standard output: writing failed%s", reason.c_str());
}

size_t peak_resident_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;)
        if (size_t kib; word == "VmHWM:" && status >> kib) return kib * 1024;
    return 0;
}

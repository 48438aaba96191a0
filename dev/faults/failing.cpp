// Loaded before a program (LD_PRELOAD), it writes down what the program does to the files below one folder, and makes
// one of these calls fail, stop the program or kill it.
//
//   FAULTS_UNDER=DIR          the folder, absolute; nothing else counts
//   FAULTS_TRACE=FILE         a line for each call that succeeded, tab-separated; what was written goes to FILE.data:
//                             write PATH OFFSET BYTES; fsync PATH; rename FROM TO; mkdir PATH; unlink PATH;
//                             open PATH new|emptied|kept. For each fault a line: fault CALL PATH
//   FAULTS_AT=CALL:N:WHAT     what happens at the N-th CALL, one of the above or `any`:
//                             28       it fails with errno 28
//                             28+      and so does each one after it
//                             half     a write writes half of its bytes, as it may; half+: so does each one after it
//                             full     a write writes half of its bytes, each one after it none: the disk is full
//                             kill     the program is killed before the call
//                             stop     it is stopped (SIGSTOP) before the call, until somebody lets it go on
//
// The C library's streams call write() from inside, where no other function can take its place. So a stream that writes
// below the folder is one whose bytes go through a function of ours (fopencookie), which calls it as the library does.

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

namespace {

// The library's function of this name, which ours stands before.
template <typename Function> Function* real(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

enum class Act { PASS, FAIL, HALF };

struct Plan {
    std::string under, call, what;
    long nth = 0;
    int trace = -1, data = -1;

    Plan() {
        auto text = [](const char* name) { const char* value = getenv(name); return std::string(value ? value : ""); };
        under = text("FAULTS_UNDER");
        const std::string at = text("FAULTS_AT"), file = text("FAULTS_TRACE");
        const size_t first = at.find(':'), second = at.find(':', first + 1);
        if (second != at.npos) {
            call = at.substr(0, first);
            nth = atol(at.c_str() + first + 1);
            what = at.substr(second + 1);
        }
        const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
        if (!file.empty()) trace = syscall(SYS_openat, AT_FDCWD, file.c_str(), flags, 0666);
        if (!file.empty()) data = syscall(SYS_openat, AT_FDCWD, (file + ".data").c_str(), flags, 0666);
    }
};

std::recursive_mutex one_at_a_time;
typedef std::lock_guard<std::recursive_mutex> Lock;

Plan& plan() {
    static Plan it;
    return it;
}

bool counts(const std::string& path) {
    const std::string& under = plan().under;
    return !under.empty() && path.rfind(under, 0) == 0 && (path.size() == under.size() || path[under.size()] == '/');
}

std::string path_of(int file) {
    char path[PATH_MAX];
    const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof(path));
    return length > 0 ? std::string(path, length) : "";
}

std::string path_at(int folder, const char* name) {
    if (name[0] == '/') return name;
    char here[PATH_MAX];
    const std::string base = folder != AT_FDCWD ? path_of(folder) : getcwd(here, sizeof(here)) ? here : "";
    return base + "/" + name;
}

void note(const std::string& line) {
    if (plan().trace >= 0) syscall(SYS_write, plan().trace, (line + "\n").c_str(), line.size() + 1);
}

// What is to happen to this call; errno is set where it is to fail.
Act act(const char* call, const std::string& path) {
    static long seen = 0;
    const Plan& p = plan();
    if (p.nth == 0 || (p.call != "any" && p.call != call)) return Act::PASS;
    seen++;
    const bool lasting = p.what.back() == '+' || p.what == "full";
    if (seen < p.nth || (seen > p.nth && !lasting)) return Act::PASS;
    if (seen == p.nth) note(std::string("fault\t") + call + "\t" + path);
    if (p.what == "kill") raise(SIGKILL);
    if (p.what == "stop") return raise(SIGSTOP), Act::PASS;
    if (p.what == "half" || p.what == "half+" || (p.what == "full" && seen == p.nth)) return Act::HALF;
    errno = p.what == "full" ? ENOSPC : atoi(p.what.c_str());
    return Act::FAIL;
}

// A call that returns 0, and -1 when it fails.
template <typename Call> int simple(const char* name, const std::string& path, const std::string& more, Call call) {
    const Lock lock(one_at_a_time);
    if (!counts(path)) return call();
    if (act(name, path) != Act::PASS) return -1;
    const int result = call(), error = errno;
    if (result == 0) note(std::string(name) + "\t" + path + more);
    errno = error;
    return result;
}

ssize_t write_some(int file, const void* bytes, size_t count) {
    static const auto real_write = real<ssize_t(int, const void*, size_t)>("write");
    const Lock lock(one_at_a_time);
    std::string path = plan().under.empty() ? "" : path_of(file);
    if (!counts(path)) return real_write(file, bytes, count);
    const Act what = act("write", path);
    if (what == Act::FAIL) return -1;
    if (what == Act::HALF && count > 1) count /= 2;
    const ssize_t written = real_write(file, bytes, count);
    const int error = errno;
    if (written > 0) {
        const off_t end = lseek(file, 0, SEEK_CUR);
        if (plan().data >= 0) syscall(SYS_write, plan().data, bytes, written);
        note("write\t" + path + "\t" + std::to_string(end - written) + "\t" + std::to_string(written));
    }
    errno = error;
    return written;
}

int open_at(int folder, const char* name, int flags, mode_t mode) {
    const Lock lock(one_at_a_time);
    auto open_it = [&] { return syscall(SYS_openat, folder, name, flags, mode); };
    const bool writes = (flags & O_ACCMODE) != O_RDONLY;
    const std::string path = writes && !plan().under.empty() ? path_at(folder, name) : "";
    if (!counts(path)) return open_it();
    if (act("open", path) != Act::PASS) return -1;
    const bool there = access(path.c_str(), F_OK) == 0;
    const int file = open_it(), error = errno;
    if (file >= 0) note("open\t" + path + (!there ? "\tnew" : flags & O_TRUNC ? "\temptied" : "\tkept"));
    errno = error;
    return file;
}

// ---- streams

struct Stream { FILE* self; int file; };

std::map<FILE*, int>& streams() {
    static std::map<FILE*, int> files;
    return files;
}

// As the library does it: what is written in part is gone on with.
ssize_t stream_write(void* cookie, const char* bytes, size_t count) {
    size_t done = 0;
    while (done < count) {
        const ssize_t written = write_some(static_cast<Stream*>(cookie)->file, bytes + done, count - done);
        if (written < 0) break;
        done += written;
    }
    return done;
}

int stream_close(void* cookie) {
    Stream* stream = static_cast<Stream*>(cookie);
    const int file = stream->file;
    {
        const Lock lock(one_at_a_time);
        streams().erase(stream->self);
    }
    delete stream;
    return close(file);
}

FILE* open_stream(const char* name, const char* mode) {
    static const auto real_fopen = real<FILE*(const char*, const char*)>("fopen");
    const bool writes = strpbrk(mode, "wa+");
    if (!writes || plan().under.empty() || !counts(path_at(AT_FDCWD, name))) return real_fopen(name, mode);
    const bool appends = mode[0] == 'a', reads_too = strchr(mode, '+');
    const int file = open_at(AT_FDCWD, name, (reads_too ? O_RDWR : O_WRONLY) | (mode[0] == 'r' ? 0 : O_CREAT) |
                             (appends ? O_APPEND : mode[0] == 'w' ? O_TRUNC : 0), 0666);
    if (file < 0) return nullptr;
    Stream* stream = new Stream{nullptr, file};
    stream->self = fopencookie(stream, appends ? "a" : "w", {nullptr, stream_write, nullptr, stream_close});
    const Lock lock(one_at_a_time);
    streams()[stream->self] = file;
    return stream->self;
}

mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

}  // namespace

// ---- what stands before the library's functions

extern "C" {

FILE* fopen(const char* name, const char* mode) { return open_stream(name, mode); }
FILE* fopen64(const char* name, const char* mode) { return open_stream(name, mode); }

int fileno(FILE* stream) noexcept {
    static const auto real_fileno = real<int(FILE*)>("fileno");
    const Lock lock(one_at_a_time);
    const auto found = streams().find(stream);
    return found != streams().end() ? found->second : real_fileno(stream);
}

ssize_t write(int file, const void* bytes, size_t count) { return write_some(file, bytes, count); }

ssize_t writev(int file, const iovec* parts, int count) {
    std::string all;
    for (int i = 0; i < count; i++) all.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    return write_some(file, all.data(), all.size());
}

int open(const char* name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return open_at(AT_FDCWD, name, flags, mode);
}

int openat(int folder, const char* name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return open_at(folder, name, flags, mode);
}

int fsync(int file) {
    return simple("fsync", plan().under.empty() ? "" : path_of(file), "", [&] { return syscall(SYS_fsync, file); });
}

int rename(const char* from, const char* to) noexcept {
    return simple("rename", path_at(AT_FDCWD, from), "\t" + path_at(AT_FDCWD, to), [&] {
        return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    });
}

int mkdir(const char* name, mode_t mode) noexcept {
    return simple("mkdir", path_at(AT_FDCWD, name), "", [&] { return syscall(SYS_mkdirat, AT_FDCWD, name, mode); });
}

int unlinkat(int folder, const char* name, int flags) noexcept {
    return simple("unlink", path_at(folder, name), "", [&] { return syscall(SYS_unlinkat, folder, name, flags); });
}

int unlink(const char* name) noexcept { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char* name) noexcept { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int remove(const char* name) noexcept {
    return unlink(name) == 0 ? 0 : errno == EISDIR ? rmdir(name) : -1;
}

}  // extern "C"

// The same with 64-bit offsets, which is what they have here.
extern "C" int open64(const char*, int, ...) __attribute__((alias("open")));
extern "C" int openat64(int, const char*, int, ...) __attribute__((alias("openat")));

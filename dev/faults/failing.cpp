// Preloaded library (LD_PRELOAD) that injects one fault into a program's system calls that change files in a folder.
//
//   FAULTS_UNDER=DIR          the folder, an absolute path; calls for other files are not counted
//   FAULTS_LOG=FILE           one line per counted call, "CALL PATH" separated by a tab. After the line of the call
//                             that FAULTS_AT selected there is a line "fault CALL PATH"
//   FAULTS_AT=CALL:N:ACTION   the action at the N-th call of open, write, fsync, rename, mkdir, unlink or any
//                             28       the call fails with errno 28
//                             28+      this call and all later ones fail with errno 28
//                             half     a write writes half of its bytes
//                             full     a write writes half of its bytes; all later writes fail with ENOSPC

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <string>

namespace {

enum class Act { PASS, FAIL, HALF };

std::string variable(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

struct Plan {
    std::string under = variable("FAULTS_UNDER"), call, action;
    long nth = 0;
    int log = -1;

    Plan() {
        const std::string at = variable("FAULTS_AT"), file = variable("FAULTS_LOG");
        const size_t first = at.find(':'), second = at.find(':', first + 1);
        if (second != at.npos) {
            call = at.substr(0, first);
            nth = atol(at.c_str() + first + 1);
            action = at.substr(second + 1);
        }
        const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
        if (!file.empty()) log = syscall(SYS_openat, AT_FDCWD, file.c_str(), flags, 0666);
    }
};

std::recursive_mutex mutex;

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
    if (plan().log >= 0) syscall(SYS_write, plan().log, (line + "\n").c_str(), line.size() + 1);
}

// Counts and logs a call for `path`. Returns what it must do: PASS, FAIL (errno is set) or HALF.
Act act(const std::string& call, const std::string& path) {
    static long seen = 0;
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    const Plan& p = plan();
    if (!counts(path)) return Act::PASS;
    note(call + "\t" + path);
    if (p.nth == 0 || (p.call != "any" && p.call != call)) return Act::PASS;
    seen++;
    const bool permanent = p.action.back() == '+' || p.action == "full";
    if (seen < p.nth || (seen > p.nth && !permanent)) return Act::PASS;
    if (seen == p.nth) note("fault\t" + call + "\t" + path);
    if (p.action == "half" || (p.action == "full" && seen == p.nth)) return Act::HALF;
    errno = p.action == "full" ? ENOSPC : atoi(p.action.c_str());
    return Act::FAIL;
}

template <typename Call> int simple(const char* name, const std::string& path, Call call) {
    return act(name, path) == Act::PASS ? static_cast<int>(call()) : -1;
}

}  // namespace

// ---- replacements of the C library's functions

extern "C" {

ssize_t write(int file, const void* bytes, size_t count) {
    const Act what = plan().under.empty() ? Act::PASS : act("write", path_of(file));
    if (what == Act::FAIL) return -1;
    return syscall(SYS_write, file, bytes, what == Act::HALF && count > 1 ? count / 2 : count);
}

int open(const char* name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    const bool writes = (flags & O_ACCMODE) != O_RDONLY && !plan().under.empty();
    const auto call = [&] { return syscall(SYS_openat, AT_FDCWD, name, flags, mode); };
    return writes ? simple("open", path_at(AT_FDCWD, name), call) : static_cast<int>(call());
}

int fsync(int file) {
    return simple("fsync", plan().under.empty() ? "" : path_of(file), [&] { return syscall(SYS_fsync, file); });
}

int rename(const char* from, const char* to) noexcept {
    return simple("rename", path_at(AT_FDCWD, from),
                  [&] { return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0); });
}

int mkdir(const char* name, mode_t mode) noexcept {
    return simple("mkdir", path_at(AT_FDCWD, name), [&] { return syscall(SYS_mkdirat, AT_FDCWD, name, mode); });
}

int unlinkat(int folder, const char* name, int flags) noexcept {
    return simple("unlink", path_at(folder, name), [&] { return syscall(SYS_unlinkat, folder, name, flags); });
}

int unlink(const char* name) noexcept { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char* name) noexcept { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int remove(const char* name) noexcept {
    return unlink(name) == 0 ? 0 : errno == EISDIR ? rmdir(name) : -1;
}

}  // extern "C"

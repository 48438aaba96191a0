// A run's folder: its checkpoints' names, what a crash has left there, and the lock that keeps it for one run. Included
// by train_gpt.cu.
#pragma once

std::string checkpoint_name(long step) { return format("step_%06ld", step); }

// The step in a name as checkpoint_name gives it, after `prefix`; -1: it is another name.
long step_in(const std::string& name, const std::string& prefix) {
    long step = -1;
    const bool begins = name.rfind(prefix + "step_", 0) == 0;
    if (begins) parse_number(name.substr(prefix.size() + strlen("step_")), step);
    return step >= 0 && name == prefix + checkpoint_name(step) ? step : -1;
}

// The checkpoints of a run folder, by step.
std::map<long, std::string> list_checkpoints(const std::string& out) {
    std::map<long, std::string> found;
    std::error_code ignored;   // no folder: no checkpoints
    for (const auto& entry : fs::directory_iterator(out, ignored))
        if (const long step = step_in(entry.path().filename(), ""); step >= 0) found[step] = entry.path();
    return found;
}

// The folder that --from means: itself or, of a run's, its last checkpoint.
std::string folder_meant(const std::string& from) {
    std::error_code ignored;   // what cannot be looked at is not there
    if (from.empty() || fs::exists(from + "/config.json", ignored)) return from;
    const auto checkpoints = list_checkpoints(from);
    if (!checkpoints.empty()) return checkpoints.rbegin()->second;
    const std::string name = fs::path(from).filename();
    for (const char* released : {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"})
        if (name == released && !fs::exists(from, ignored))
            throw UserError("--from %s: no such folder; scripts/download.sh %s fetches it, and then: --from models/%s",
                            from.c_str(), released, released);
    return from;
}

// What is being written or removed goes by this name, so that a step_N is always whole.
const char* const UNFINISHED = "unfinished_";

void remove_checkpoint(const std::string& out, long step) {
    const std::string name = checkpoint_name(step), dying = out + "/" + UNFINISHED + "old_" + name;
    fs::remove_all(dying);
    if (!fs::exists(out + "/" + name)) return;
    fs::rename(out + "/" + name, dying);
    sync_folder(out);   // before its files go
    fs::remove_all(dying);
}

// What a crash has left: folders that go by names of ours, and no others.
void remove_unfinished(const std::string& out) {
    for (const auto& entry : fs::directory_iterator(out)) {
        const std::string name = entry.path().filename();
        if (step_in(name, UNFINISHED) >= 0 || step_in(name, UNFINISHED + std::string("old_")) >= 0)
            fs::remove_all(entry.path());
    }
}

// Keeps a run folder for one run, which may end in whatever way. Where a file system knows no locks, nothing does.
class FolderLock {
public:
    explicit FolderLock(const std::string& out) : folder_(open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        if (folder_ < 0 || flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
        close(folder_);
        throw UserError("--out %s: another run is writing there", out.c_str());
    }
    FolderLock(const FolderLock&) = delete;
    ~FolderLock() { if (folder_ >= 0) close(folder_); }

private:
    int folder_;
};

Failure not_written(long step, const std::exception& error) {
    return Failure("checkpoint of step %ld not written, earlier ones are untouched: %s", step, error.what());
}

// What a run's log.jsonl holds when the run is gone on with: a crash, a disk or a hand may have damaged it. Included by
// train_gpt.cu.

#pragma once

// A line as an object. What else it may be throws JsonError.
json read_record(const std::string& line) {
    const json record = parse_json<json>(line.data(), line.data() + line.size());
    if (!record.is_object()) throw JsonError("no JSON object");
    return record;
}

// The records up to a step, a line each. Damaged lines are left out, which is said of all but a last one that was cut.
std::string records_until(const std::string& path, uint64_t step) {
    if (!fs::exists(path) || fs::file_size(path) == 0) return "";
    const MappedFile file(path);
    std::istringstream lines(std::string(file.data(), file.size()));
    std::string kept, problem;
    size_t number = 1, damaged = 0;
    for (std::string line; std::getline(lines, line); number++) {
        try {
            const json record = read_record(line);
            if (!record.contains("step") || whole_number<uint64_t>(record, "step", path) <= step) kept += line + "\n";
        } catch (const std::exception& error) {
            if (lines.eof()) break;
            if (damaged++ == 0) problem = format("line %zu: %s", number, one_line(error.what()).c_str());
        }
    }
    if (damaged)
        printf("resume     %s: %zu damaged line%s left out, %s\n", path.c_str(), damaged, damaged > 1 ? "s are" : " is",
               problem.c_str());
    return kept;
}

// OUT/log.jsonl, one object a line. Resuming drops what came after the checkpoint. A new one has its first line from
// the moment it is there: --resume takes from it what the run began with.
class Log {
public:
    void open(const std::string& out, long resumed_step, const json& first) {
        if (out.empty()) return;
        const std::string path = out + "/log.jsonl";
        std::string kept = resumed_step > 0 ? records_until(path, resumed_step) : "";
        if (kept.rfind("{\"run\"", 0) != 0) kept = first.dump() + "\n" + kept;
        {
            OutputFile rewritten(path + ".new");
            rewritten.write(kept.data(), kept.size());
            rewritten.finish();
        }
        fs::rename(path + ".new", path);
        sync_folder(out);
        file_ = std::make_unique<GrowingFile>(path);
    }
    void write(const json& record) { if (file_) file_->add(record.dump() + "\n"); }
    void sync() { if (file_) file_->sync(); }

private:
    std::unique_ptr<GrowingFile> file_;
};

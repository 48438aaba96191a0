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

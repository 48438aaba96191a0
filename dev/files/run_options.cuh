// --resume goes on with the options of the run: what its last checkpoint or its log says of them. Included by
// train_gpt.cu.

#pragma once

// What belongs to a command, not to the run.
bool is_of_command(const std::string& flag) { return flag == "--resume" || flag == "--out" || flag == "--trace"; }

// The options with which a run was begun or last gone on: of its last checkpoint or, before there is one, of its log.
json options_of_run(const std::string& out, std::string& path) {
    const auto checkpoints = list_checkpoints(out);
    json record;
    if (!checkpoints.empty()) {
        path = checkpoints.rbegin()->second + "/trainer.json";
        record = read_json(path);
    } else {
        path = out + "/log.jsonl";
        if (fs::is_regular_file(path)) {
            std::ifstream log(path);
            std::string line;
            std::getline(log, line);
            const json first = json::parse(line, nullptr, false);   // a crash may have cut it
            if (first.is_object() && first.contains("run")) record = first["run"];
        }
    }
    const json none = json::object();
    if (!record.is_object() || !record.contains("options")) return none;
    return record["options"].is_object() ? record["options"] : none;
}

// --resume: the run's options hold where none is given.
void take_options_of_run(Options& o) {
    std::string path;
    const json recorded = options_of_run(o.out, path);
    if (recorded.empty() && list_checkpoints(o.out).empty()) return;   // killed before it could say anything
    if (o.given.count("--from") && recorded.value("from", json()) != json(o.from))
        throw UserError("--resume goes on from the last checkpoint in %s, --from %s would begin anew: expected one of "
                        "them", o.out.c_str(), o.from.c_str());
    for (const Flag& flag : flag_table(o)) {
        const json value = recorded.value(flag.name + 2, json());
        if (!(flag.verbs & TRAIN) || o.given.count(flag.name) || is_of_command(flag.name)) continue;
        if (value.is_null() || value == "") continue;   // by default
        if (!flag.parse(value.is_string() ? value.get<std::string>() : value.dump()))
            throw UserError("%s: \"%s\" is %s, expected %s", path.c_str(), flag.name + 2, value.dump().c_str(),
                            flag.takes.c_str());
    }
}

// Resuming with other options is allowed, but never silent.
void note_changes(const Options& o, const Start& start) {
    if (start.trainer.is_null()) return;
    const json then = start.trainer.value("options", json::object()), now = describe(o, TRAIN);
    for (const auto& [name, value] : now.items())
        if (!is_of_command("--" + name) && then.contains(name) && then[name] != value)
            printf("resume     --%s was %s, is now %s\n", name.c_str(), then[name].dump().c_str(),
                   value.dump().c_str());
}

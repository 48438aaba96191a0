// --resume goes on with the options of the run: what its last checkpoint or its log says of them; and what is said
// where they or the data are others now, or a checkpoint is damaged. Included by train_gpt.cu.

#pragma once

// What belongs to a command, not to the run.
bool is_of_command(const std::string& flag) { return flag == "--resume" || flag == "--out" || flag == "--trace"; }

// What is recorded is JSON, and so UTF-8. An option that is not could not be taken again.
void require_recordable(const Options& o) {
    if (o.out.empty()) return;
    const json options = describe(o, TRAIN);
    for (const auto& [name, value] : options.items()) {
        try {
            value.dump();
        } catch (const json::exception&) {
            throw UserError("--%s %s: not UTF-8, which what --out keeps is: rename it, or give a link to it",
                            name.c_str(), value.get<std::string>().c_str());
        }
    }
}

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
            if (log.eof()) return json::object();   // cut by a crash
            try {
                record = read_record(line).value("run", json());
                if (!record.is_object()) throw JsonError("no \"run\"");
            } catch (const JsonError& error) {
                throw UserError("%s: line 1, which holds the run's options: %s; --resume needs it", path.c_str(),
                                error.what());
            }
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
    if (!then.is_object()) return;
    for (const auto& [name, value] : then.items())
        if (!now.contains(name))
            printf("resume     --%s was %s, is no option any more\n", one_line(name).c_str(), value.dump().c_str());
    for (const auto& [name, value] : now.items())
        if (!is_of_command("--" + name) && then.contains(name) && then[name] != value)
            printf("resume     --%s was %s, is now %s\n", name.c_str(), then[name].dump().c_str(),
                   value.dump().c_str());
}

// So is going on with other data. The tokens are those to train on.
void note_data(const Start& start, size_t tokens) {
    if (!start.trainer.contains("train_tokens")) return;
    const size_t then = whole_number<size_t>(start.trainer, "train_tokens", start.dir + "/trainer.json");
    if (then != tokens) printf("resume     there were %zu tokens to train on, now there are %zu\n", then, tokens);
}

// What can be done where the newest checkpoint in `out` is damaged, as a message says that begins with its name. It is
// not done here: only the run's owner knows what the steps since the one before are worth.
std::string way_around(const std::string& out, const std::string& message) {
    const auto checkpoints = list_checkpoints(out);
    if (checkpoints.empty()) return "";
    const std::string newest = checkpoints.rbegin()->second;
    if (message.rfind(newest + "/", 0) != 0 && message.rfind(newest + ":", 0) != 0) return "";
    if (checkpoints.size() == 1) return "; there is no checkpoint before it";
    std::string aside = out + "/damaged_" + checkpoint_name(checkpoints.rbegin()->first);
    while (fs::exists(aside)) aside += "_";
    return format("; before it there is %s: mv %s %s, and the same command goes on from there",
                  std::prev(checkpoints.end(), 2)->second.c_str(), shell_word(newest).c_str(),
                  shell_word(aside).c_str());
}

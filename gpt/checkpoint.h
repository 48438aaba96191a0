// Checkpoints: safetensors files, weights and config.json of a Hugging Face folder, run folders, --resume.
#pragma once

#include <map>
#include <memory>

#include "options.h"

// ---- safetensors --------------------------------------------------------------------------------
// Format: 8 bytes with the length of the header; the header, JSON that maps each name to dtype, shape and data_offsets
// (begin and end in bytes); the tensors, contiguous and little-endian. https://github.com/huggingface/safetensors

std::string shape_text(const std::vector<size_t>& shape);

class Safetensors {
public:
    struct Entry {
        std::string dtype;
        std::vector<size_t> shape;
        const char* data;
        size_t elements, bytes;
    };

    explicit Safetensors(const std::string& path);

    const std::map<std::string, Entry>& entries() const { return entries_; }
    const json& metadata() const { return metadata_; }
    const std::string& path() const { return file_.path(); }
    const Entry& at(const std::string& name) const {
        const auto found = entries_.find(name);
        if (found == entries_.end()) fail(format("tensor %s is missing", name.c_str()));
        return found->second;
    }
    // Returns up to `count` elements of a tensor, from element `first`, as floats, and reads only these. Throws
    // UserError if the tensor's shape is not `shape` or if a value is not finite.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape, size_t first = 0,
                              size_t count = ~size_t{0}) const;
    static inline size_t bytes_read = 0;   // by floats(), from all files
    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path().c_str(), what.c_str()); }

private:
    Entry parse_entry(const std::string& name, const nlohmann::json& value, const char* data, size_t bytes) const;

    MappedFile file_;
    json metadata_;
    std::map<std::string, Entry> entries_;
};

// Writes FP32 tensors: declare() for each tensor, then write_header(), then write() of all values in the same order.
class SafetensorsWriter : public OutputFile {
public:
    using OutputFile::OutputFile;
    void declare(const std::string& name, const std::vector<size_t>& shape);
    void write_header();

private:
    json header_ = {{"__metadata__", {{"format", "pt"}}}};   // transformers requires it
    size_t end_ = 0;
};

// The weights of a Hugging Face folder: model.safetensors, or the shards in the "weight_map" (tensor -> file) of
// model.safetensors.index.json. Names may share a prefix ("transformer.", "model.", "_orig_mod.transformer."). Causal
// masks and a head equal to the embedding, which older versions of transformers wrote, are ignored.
class WeightFiles {
public:
    // names: the parameters of a model with `layers` layers. Throws UserError if the folder has other tensors.
    WeightFiles(const std::string& dir, std::set<std::string> names, int layers);

    // Returns Safetensors::floats() of the tensor PREFIX + name.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape, size_t first,
                              size_t count) const {
        const auto found = tensors_.find(prefix_ + name);
        if (found == tensors_.end()) fail(format("tensor %s%s is missing", prefix_.c_str(), name.c_str()));
        return found->second->floats(found->first, shape, first, count);
    }

    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path_.c_str(), what.c_str()); }

private:
    const Safetensors& open_shard(const std::string& path) { return files_.try_emplace(path, path).first->second; }
    void read_index(const std::string& dir);

    std::string path_, prefix_;   // path_: of the file that lists the tensors
    std::map<std::string, Safetensors> files_;
    std::map<std::string, const Safetensors*> tensors_;
};

// ---- config.json --------------------------------------------------------------------------------

constexpr int MAX_LAYERS = 1 << 10, MAX_CHANNELS = 1 << 16, MAX_TOKENS = 1 << 22;   // byte counts do not overflow

// Throws UserError if the model is not supported. The message begins with `source`, the file or flags.
void require_supported(const Config& c, const std::string& source);
Config read_config(const std::string& path);
// Returns config.json for the checkpoints of a model from the folder `dir`: that folder's, for weights in FP32; if dir
// is empty, a new model's.
json config_json(const std::string& dir, const Config& c, float init_std, int end_of_text);
// Returns "bos_token_id" of config.json in `dir`, or -1 if it is not one of V tokens.
int bos_token(const std::string& dir, int V);

// ---- run folder ---------------------------------------------------------------------------------

constexpr const char* OPTIMIZER_FILE = "optimizer.state";   // in safetensors' format

inline std::string checkpoint_name(long step) { return format("step_%06ld", step); }

// Returns the checkpoint folders of a run folder, by step.
std::map<long, std::string> list_checkpoints(const std::string& out);

// Returns whether --resume has a run to continue in a folder.
inline bool holds_run(const std::string& out) {
    return !list_checkpoints(out).empty() || exists(out + "/log.jsonl");
}

// Returns the model folder for --from: the last checkpoint if `from` is a run folder, otherwise `from`.
std::string model_folder(const std::string& from);

// Name prefix of a folder that is being written or removed, so that a folder step_N is always complete.
constexpr const char* UNFINISHED = "unfinished_";
void remove_folder(const std::string& path);   // with its contents; does nothing if it does not exist
// Returns when the new name is on disk. If `to` exists, the two exchange their names, so that `to` exists at each
// moment.
void rename_folder(const std::string& from, const std::string& to);
void remove_checkpoint(const std::string& out, long step);
void remove_unfinished(const std::string& out);   // removes UNFINISHED folders that a crash left

// Returns a Failure: the checkpoint of this step could not be written because of `error`.
inline Failure not_written(long step, const std::exception& error) {
    return Failure("checkpoint of step %ld not written, earlier checkpoints are unchanged: %s", step, error.what());
}

// ---- options of a run ---------------------------------------------------------------------------

// For --resume: sets the options that are not on the command line to the values in the run's last checkpoint or log.
void restore_options(Options& o);

// Prints the changes since the checkpoint in `dir`, if a run is resumed: options and the number of training tokens.
// trainer: the checkpoint's trainer.json; null when not resuming. Throws UserError if --optimizer changed.
void print_changes(const Options& o, const json& trainer, const std::string& dir, size_t tokens);

// Returns a hint to append to an error message that begins with the path of the newest checkpoint in `out`; empty for
// other messages. The program does not use an older checkpoint by itself, because that would discard steps.
std::string resume_hint(const std::string& out, const std::string& message);

// ---- start of a run -----------------------------------------------------------------------------

// The state from which a run starts: random weights, --from or the last checkpoint.
struct Start {
    std::string dir;        // Hugging Face folder with the weights; empty: random weights
    json trainer;           // trainer.json; null unless resuming
    long step = 0;
    uint64_t window = 0;    // next window of the data
    std::shared_ptr<Descriptor> lock = nullptr;   // of the folder --out
};

// Creates and locks the folder --out, and returns the state from which the run starts.
Start find_start_in_folder(const Options& o);

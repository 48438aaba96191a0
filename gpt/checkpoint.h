// Checkpoints: safetensors, config.json, a Hugging Face folder's weights, the run folder, a run's options, its start.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "options.h"

// ---- safetensors --------------------------------------------------------------------------------
// 8 bytes: length of the header; the header, JSON: name -> dtype, shape, first and last byte; the tensors, contiguous
// and little-endian. https://github.com/huggingface/safetensors

float half_to_float(uint16_t half);
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
    const Entry& at(const std::string& name) const;
    // Elements first .. first + count of a tensor as floats; nothing else of it is read. Throws if its shape is not the
    // given one, or if a value is not finite.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape, size_t first = 0,
                              size_t count = ~size_t{0}) const;
    static size_t bytes_read;   // by floats(), of all files
    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path().c_str(), what.c_str()); }

private:
    Entry parse_entry(const std::string& name, const nlohmann::json& value, const char* data, size_t bytes) const;

    MappedFile file_;
    json metadata_;
    std::map<std::string, Entry> entries_;
};

// Writes FP32 tensors one after the other. All names and shapes are declared before the first is written.
class SafetensorsWriter {
public:
    explicit SafetensorsWriter(const std::string& path) : file_(path) {
        header_["__metadata__"] = {{"format", "pt"}};   // transformers requires it
    }
    void declare(const std::string& name, const std::vector<size_t>& shape);
    void write_header();
    void write(const float* values, size_t n) { file_.write(values, n * sizeof(float)); }
    void finish() { file_.finish(); }

private:
    OutputFile file_;
    json header_;
    size_t end_ = 0;
};

// The weights of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json lists
// ("weight_map": tensor -> file). Names may share a prefix ("transformer.", "model.", "_orig_mod.transformer."). Causal
// masks and a copy of the tied head, which older versions wrote, are ignored.
class WeightFiles {
public:
    // names: the parameters of a model with this number of layers.
    WeightFiles(const std::string& dir, std::set<std::string> names, int layers);

    // As Safetensors::floats(), without the prefix.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape, size_t first,
                              size_t count) const {
        return file_of(prefix_ + name).floats(prefix_ + name, shape, first, count);
    }

    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path_.c_str(), what.c_str()); }

private:
    const Safetensors& open_shard(const std::string& path) { return files_.try_emplace(path, path).first->second; }
    const Safetensors& file_of(const std::string& name) const;
    void read_index(const std::string& dir);
    void require_tied(const std::string& head) const;

    std::string path_, prefix_;   // of the file that lists the tensors
    std::map<std::string, Safetensors> files_;
    std::map<std::string, const Safetensors*> tensors_;
};

// ---- config.json --------------------------------------------------------------------------------

constexpr int MAX_LAYERS = 1 << 10, MAX_CHANNELS = 1 << 16, MAX_TOKENS = 1 << 22;   // no size in bytes overflows

// Throws if the model cannot be built; `source` names the file or flags in the message.
void require_supported(const Config& c, const std::string& source);
Config read_config(const std::string& path);
void write_config(const std::string& path, const Config& c, float init_std, int end_of_text);

// ---- run folder ---------------------------------------------------------------------------------

std::string checkpoint_name(long step);   // step_001000

// The checkpoints of a run folder, by step.
std::map<long, std::string> list_checkpoints(const std::string& out);

// The folder that --from names: itself or, of a run folder, its last checkpoint.
std::string folder_meant(const std::string& from);

// The prefix of a folder that is being written or removed, so that a folder step_N is always complete.
constexpr const char* UNFINISHED = "unfinished_";
void remove_folder(const std::string& path);   // and what it holds; it may be missing
void rename_folder(const std::string& from, const std::string& to);   // on disk when it returns
void remove_checkpoint(const std::string& out, long step);
void remove_unfinished(const std::string& out);   // folders that a crash has left

Failure not_written(long step, const std::exception& error);

// ---- options of a run ---------------------------------------------------------------------------

// --resume: takes the options of the run from its last checkpoint or log, except those given on the command line.
void take_options_of_run(Options& o);

// Prints in which options, or number of training tokens, a resumed run differs from its checkpoint in `dir`.
// `trainer`: the checkpoint's trainer.json, null when not resuming.
void note_changes(const Options& o, const json& trainer, const std::string& dir, size_t tokens);

// What to append to an error message that begins with the path of the newest checkpoint in `out`; else empty. Only the
// user can decide to drop the steps since the one before it.
std::string way_around(const std::string& out, const std::string& message);

// ---- start of a run -----------------------------------------------------------------------------

// Where a run starts: nothing, --from or the last checkpoint.
struct Start {
    std::string dir;        // of a Hugging Face folder, or empty
    json trainer;           // null unless resuming
    long step = 0;
    uint64_t window = 0;    // of the data
    std::shared_ptr<Descriptor> lock = nullptr;   // of --out
};

// Creates and locks --out.
Start find_start_in_folder(const Options& o);

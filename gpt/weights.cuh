// The weights of a Hugging Face folder, whoever wrote it: model.safetensors, or the shards that
// model.safetensors.index.json lists ("weight_map": tensor -> file). Names may share a prefix ("transformer.",
// "model.", "_orig_mod.transformer."); causal masks and a copy of the tied head, which older versions wrote, are known
// and left out. Included by train_gpt.cu.

#pragma once

#include "safetensors.cuh"

class WeightFiles {
public:
    // names: of the parameters of a model of so many layers.
    WeightFiles(const std::string& dir, std::set<std::string> names, int layers) {
        for (int l = 0; l < layers; l++)
            for (const char* mask : {"bias", "masked_bias"}) names.insert(format("h.%d.attn.%s", l, mask));
        const std::string whole = dir + "/model.safetensors", index = whole + ".index.json";
        if (fs::exists(whole) || !fs::exists(index)) {
            path_ = whole;
            require_safetensors(dir);
            for (const auto& [name, entry] : open_shard(whole).entries()) tensors_[name] = &files_.at(whole);
        } else {
            path_ = index;
            read_index(dir);
        }
        find_prefix();
        for (const auto& [name, file] : tensors_) {
            const bool ours = name.rfind(prefix_, 0) == 0;
            const std::string rest = ours ? name.substr(prefix_.size()) : name;
            if (is_head(name)) require_tied(name);
            else if (!ours || !names.count(rest))
                file->fail(format("tensor %s does not belong to a GPT-2 of %d layers", name.c_str(), layers));
        }
    }

    // As Safetensors has it, without the prefix.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape) const {
        return file_of(prefix_ + name).floats(prefix_ + name, shape);
    }

private:
    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path_.c_str(), what.c_str()); }

    const Safetensors& open_shard(const std::string& path) { return files_.try_emplace(path, path).first->second; }

    const Safetensors& file_of(const std::string& name) const {
        const auto found = tensors_.find(name);
        if (found == tensors_.end()) fail(format("tensor %s is missing", name.c_str()));
        return *found->second;
    }

    // PyTorch's own files are programs, which only PyTorch can run.
    static void require_safetensors(const std::string& dir) {
        for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
            if (fs::exists(dir + "/model.safetensors") || !fs::exists(dir + "/" + name)) continue;
            throw UserError("%s: holds %s, but model.safetensors is what can be read; transformers makes it of the "
                            "other: python3 -c \"import sys, transformers; transformers.GPT2LMHeadModel"
                            ".from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1], safe_serialization=True)\" %s",
                            dir.c_str(), name, shell_word(dir).c_str());
        }
    }

    void read_index(const std::string& dir) {
        const json index = read_json(path_);
        if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
            fail("no \"weight_map\" of tensors and files");
        const nlohmann::json places = index["weight_map"];   // by name
        for (const auto& [name, place] : places.items()) {
            if (!place.is_string()) fail(format("tensor %s is in no file", name.c_str()));
            const std::string file = place.get<std::string>();
            if (file.empty() || file.find('/') != file.npos)
                fail(format("tensor %s is in '%s', expected the name of a file beside this one", name.c_str(),
                            file.c_str()));
            if (!fs::exists(dir + "/" + file))
                fail(format("tensor %s is in %s/%s, which is missing", name.c_str(), dir.c_str(), file.c_str()));
            const Safetensors& shard = open_shard(dir + "/" + file);
            shard.at(name);
            tensors_[name] = &shard;
        }
        for (const auto& [path, shard] : files_)
            for (const auto& [name, entry] : shard.entries())
                if (!tensors_.count(name)) shard.fail(format("tensor %s is not in %s", name.c_str(), path_.c_str()));
    }

    // What stands before wte.weight, which no two models in one folder may have.
    void find_prefix() {
        const std::string last = "wte.weight";
        std::string found;
        for (const auto& [name, file] : tensors_) {
            if (!ends_with(name, last)) continue;
            const std::string before = name.substr(0, name.size() - last.size());
            if (!before.empty() && before.back() != '.') continue;
            if (!found.empty()) fail(format("two embeddings, %s and %s", found.c_str(), name.c_str()));
            found = name;
            prefix_ = before;
        }
        if (found.empty()) fail("tensor wte.weight is missing");
    }

    // lm_head.weight, beside "transformer." or inside of it.
    bool is_head(const std::string& name) const {
        const std::string last = "lm_head.weight";
        if (!ends_with(name, last)) return false;
        const std::string before = name.substr(0, name.size() - last.size());
        return prefix_.rfind(before, 0) == 0 && (before.empty() || before.back() == '.');
    }

    void require_tied(const std::string& head) const {
        const Safetensors& file = file_of(head);
        const std::string wte = prefix_ + "wte.weight";
        const std::vector<size_t>& shape = file_of(wte).at(wte).shape;
        if (file.floats(head, shape) != file_of(wte).floats(wte, shape))
            file.fail(format("tensor %s differs from %s: a head of its own, where GPT-2's is the embedding",
                             head.c_str(), wte.c_str()));
    }

    std::string path_, prefix_;   // of what lists the tensors
    std::map<std::string, Safetensors> files_;
    std::map<std::string, const Safetensors*> tensors_;
};

// AdamW's moments, and nothing else: m/NAME, and v/NAME, which are means of squares.
void require_moments(const Safetensors& file, const Config& c) {
    std::set<std::string> expected;
    for_each_parameter(c, [&](const ParameterRow& row, size_t, const std::string& name) {
        expected.insert({"m/" + name, "v/" + name});
        const std::vector<float> squares = file.floats("v/" + name, row.shape);
        const auto wrong = std::find_if(squares.begin(), squares.end(), [](float square) { return square < 0; });
        if (wrong != squares.end())
            file.fail(format("tensor v/%s holds %g at element %zu, expected a mean of squares", name.c_str(), *wrong,
                             size_t(wrong - squares.begin())));
    });
    for (const auto& [name, entry] : file.entries())
        if (!expected.count(name)) file.fail(format("tensor %s is no moment of the model's parameters", name.c_str()));
}

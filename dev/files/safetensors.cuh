// Tensors in files. 8 bytes: length of the header; the header, JSON: name -> dtype, shape, first and last byte; the
// tensors, back to back, little-endian. https://github.com/huggingface/safetensors

#pragma once

#include "files.cuh"

std::string shape_text(const std::vector<size_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); i++) text += format(i ? ", %zu" : "%zu", shape[i]);
    return text + ")";
}

float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                            : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

class Safetensors {
public:
    struct Entry {
        std::string dtype;
        std::vector<size_t> shape;
        const char* data;
        size_t elements;
    };

    explicit Safetensors(const std::string& path) : file_(path) {
        uint64_t length = 0;
        if (file_.size() >= sizeof(length)) memcpy(&length, file_.data(), sizeof(length));
        if (length == 0 || length > file_.size() - sizeof(length))
            fail(format("a header of %llu bytes does not fit in a file of %zu: truncated, or not safetensors",
                        static_cast<unsigned long long>(length), file_.size()));
        const char* data = file_.data() + sizeof(length) + length;
        const size_t bytes = file_.size() - sizeof(length) - length;
        try {
            const json header = json::parse(file_.data() + sizeof(length), data);
            for (const auto& [name, value] : header.items()) {
                if (name == "__metadata__") metadata_ = value;
                else entries_[name] = parse_entry(name, value, data, bytes);
            }
        } catch (const json::exception& error) {
            fail(format("damaged header: %s", error.what()));
        }
    }

    const std::map<std::string, Entry>& entries() const { return entries_; }
    const json& metadata() const { return metadata_; }
    const std::string& path() const { return file_.path(); }
    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path().c_str(), what.c_str()); }

    const Entry& at(const std::string& name) const {
        const auto found = entries_.find(name);
        if (found == entries_.end()) fail(format("tensor %s is missing", name.c_str()));
        return found->second;
    }

    // The tensor as floats; its shape must be the one given, and every value finite.
    std::vector<float> floats(const std::string& name, const std::vector<size_t>& shape) const {
        const Entry& entry = at(name);
        if (entry.shape != shape)
            fail(format("tensor %s has shape %s, expected %s", name.c_str(), shape_text(entry.shape).c_str(),
                        shape_text(shape).c_str()));
        std::vector<float> values(entry.elements);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(entry.data);
        if (entry.dtype == "F32") memcpy(values.data(), entry.data, entry.elements * sizeof(float));
        else if (entry.dtype == "F16") std::transform(halves, halves + entry.elements, values.begin(), half_to_float);
        else if (entry.dtype == "BF16")
            for (size_t i = 0; i < entry.elements; i++) {
                const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
                memcpy(&values[i], &bits, sizeof(bits));
            }
        else fail(format("tensor %s has dtype %s, expected F32, F16 or BF16", name.c_str(), entry.dtype.c_str()));
        for (size_t i = 0; i < values.size(); i++)
            if (!std::isfinite(values[i]))
                fail(format("tensor %s holds %f at element %zu", name.c_str(), values[i], i));
        return values;
    }

private:
    Entry parse_entry(const std::string& name, const json& value, const char* data, size_t bytes) const {
        static const std::map<std::string, size_t> SIZES = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                                                            {"I32", 4}, {"I16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}};
        Entry entry = {value.at("dtype"), value.at("shape").get<std::vector<size_t>>(), nullptr, 1};
        const size_t begin = value.at("data_offsets").at(0), end = value.at("data_offsets").at(1);
        for (size_t extent : entry.shape) entry.elements *= extent;
        const auto size = SIZES.find(entry.dtype);
        if (size == SIZES.end()) fail(format("tensor %s has unknown dtype %s", name.c_str(), entry.dtype.c_str()));
        if (begin > end || end > bytes)
            fail(format("tensor %s lies at bytes %zu to %zu of %zu: the file is truncated", name.c_str(), begin, end,
                        bytes));
        if (end - begin != entry.elements * size->second)
            fail(format("tensor %s of shape %s has %zu bytes, expected %zu", name.c_str(),
                        shape_text(entry.shape).c_str(), end - begin, entry.elements * size->second));
        entry.data = data + begin;
        return entry;
    }

    MappedFile file_;
    json metadata_;
    std::map<std::string, Entry> entries_;
};

// Writes FP32 tensors one after the other; all names and shapes are known beforehand.
class SafetensorsWriter {
public:
    explicit SafetensorsWriter(const std::string& path) : file_(path) {
        header_["__metadata__"] = {{"format", "pt"}};   // what transformers looks for
    }

    void declare(const std::string& name, const std::vector<size_t>& shape) {
        size_t bytes = sizeof(float);
        for (size_t extent : shape) bytes *= extent;
        header_[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {end_, end_ + bytes}}};
        end_ += bytes;
    }
    void write_header() {
        std::string text = header_.dump();
        text.resize(ceil_div(text.size(), 8) * 8, ' ');   // tensors begin at a multiple of 8
        const uint64_t length = text.size();
        file_.write(&length, sizeof(length));
        file_.write(text.data(), text.size());
    }
    void write(const float* values, size_t n) { file_.write(values, n * sizeof(float)); }
    void finish() { file_.finish(); }

private:
    OutputFile file_;
    json header_;
    size_t end_ = 0;
};

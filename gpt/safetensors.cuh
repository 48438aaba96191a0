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
        size_t elements, bytes;
    };

    explicit Safetensors(const std::string& path) : file_(path) {
        uint64_t length = 0;
        if (file_.size() >= sizeof(length)) memcpy(&length, file_.data(), sizeof(length));
        if (length == 0 || length > file_.size() - sizeof(length))
            fail(format("a header of %llu bytes does not fit in a file of %zu: truncated, or not safetensors",
                        static_cast<unsigned long long>(length), file_.size()));
        if (length > LARGEST_JSON)
            fail(format("a header of %zu bytes, expected at most %zu", size_t(length), LARGEST_JSON));
        const char* data = file_.data() + sizeof(length) + length;
        const size_t bytes = file_.size() - sizeof(length) - length;
        try {
            const Header header = parse_json<Header>(file_.data() + sizeof(length), data);
            if (!header.is_object()) fail("damaged header: no object of names and tensors");
            for (const auto& [name, value] : header.items()) {
                if (name == "__metadata__") metadata_ = json(value);
                else entries_[name] = parse_entry(name, value, data, bytes);
            }
        } catch (const JsonError& error) {
            fail(format("damaged header: %s", error.what()));
        } catch (const Header::exception& error) {
            fail(format("damaged header: %s", error.what()));
        }
        require_no_gaps(data, bytes);
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
        auto half = [&](size_t i) {   // which may begin at an odd address
            uint16_t bits;
            memcpy(&bits, entry.data + i * sizeof(bits), sizeof(bits));
            return bits;
        };
        if (entry.dtype == "F32") memcpy(values.data(), entry.data, entry.elements * sizeof(float));
        else if (entry.dtype == "F16")
            for (size_t i = 0; i < entry.elements; i++) values[i] = half_to_float(half(i));
        else if (entry.dtype == "BF16")
            for (size_t i = 0; i < entry.elements; i++) {
                const uint32_t bits = static_cast<uint32_t>(half(i)) << 16;
                memcpy(&values[i], &bits, sizeof(bits));
            }
        else fail(format("tensor %s has dtype %s, expected F32, F16 or BF16", name.c_str(), entry.dtype.c_str()));
        file_.require_whole();
        for (size_t i = 0; i < values.size(); i++)
            if (!std::isfinite(values[i]))
                fail(format("tensor %s holds %f at element %zu", name.c_str(), values[i], i));
        return values;
    }

private:
    using Header = nlohmann::json;   // a name among very many is found fast

    // Whole numbers only: what JSON would convert to one is damage.
    size_t parse_size(const std::string& name, const Header& value) const {
        if (!value.is_number_unsigned())
            fail(format("damaged header: tensor %s has %s where a size should be", name.c_str(),
                        value.dump().substr(0, 40).c_str()));
        return value;
    }

    Entry parse_entry(const std::string& name, const Header& value, const char* data, size_t bytes) const {
        static const std::map<std::string, size_t> SIZES = {
            {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},     {"I8", 1},
            {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
        Entry entry = {value.at("dtype").get<std::string>(), {}, nullptr, 1, 0};
        const Header &shape = value.at("shape"), &offsets = value.at("data_offsets");
        if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2)
            fail(format("damaged header: tensor %s lacks a list of sizes or two offsets", name.c_str()));
        for (const Header& extent : shape) entry.shape.push_back(parse_size(name, extent));
        const auto size = SIZES.find(entry.dtype);
        if (size == SIZES.end()) fail(format("tensor %s has unknown dtype %s", name.c_str(), entry.dtype.c_str()));
        const size_t begin = parse_size(name, offsets[0]), end = parse_size(name, offsets[1]);
        if (begin > end || end > bytes)
            fail(format("tensor %s lies at bytes %zu to %zu of %zu: the file is truncated", name.c_str(), begin, end,
                        bytes));
        entry.bytes = size->second;
        for (size_t extent : entry.shape)
            if (__builtin_mul_overflow(entry.elements, extent, &entry.elements) ||
                __builtin_mul_overflow(entry.elements, size->second, &entry.bytes))
                fail(format("tensor %s of shape %s is larger than any memory", name.c_str(),
                            shape_text(entry.shape).c_str()));
        if (end - begin != entry.bytes)
            fail(format("tensor %s of shape %s has %zu bytes, expected %zu", name.c_str(),
                        shape_text(entry.shape).c_str(), end - begin, entry.bytes));
        entry.data = data + begin;
        return entry;
    }

    // Every byte belongs to one tensor.
    void require_no_gaps(const char* data, size_t bytes) const {
        std::vector<std::tuple<size_t, size_t, const std::string*>> places;   // begin, end
        for (const auto& [name, entry] : entries_) {
            const size_t begin = entry.data - data;
            places.emplace_back(begin, begin + entry.bytes, &name);
        }
        std::sort(places.begin(), places.end());
        size_t reached = 0;
        for (const auto& [begin, end, name] : places) {
            if (begin != reached)
                fail(format("tensor %s begins at byte %zu, expected %zu: tensors %s", name->c_str(), begin, reached,
                            begin < reached ? "overlap" : "leave a hole"));
            reached = end;
        }
        if (reached != bytes) fail(format("%zu bytes follow the last tensor", bytes - reached));
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

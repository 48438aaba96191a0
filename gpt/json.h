// JSON that others wrote: nothing in it may crash the reader, or be guessed at.

#pragma once

#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include <nlohmann/json.hpp>

struct JsonError : std::runtime_error { using std::runtime_error::runtime_error; };

// Lists and objects inside each other, which a reader follows by calling itself; no file of a model has ten.
constexpr size_t DEEPEST_JSON = 100;

// Looks at every part of a file, and keeps none.
class JsonCheck : public nlohmann::json_sax<nlohmann::json> {
public:
    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(number_integer_t) override { return true; }
    bool number_unsigned(number_unsigned_t) override { return true; }
    bool number_float(number_float_t, const string_t&) override { return true; }
    bool string(string_t&) override { return true; }
    bool binary(binary_t&) override { return true; }
    bool start_array(size_t) override { return open(); }
    bool end_array() override { return close(); }
    bool start_object(size_t) override { return open(); }
    bool end_object() override { return close(); }
    bool key(string_t& name) override {
        if (!names_.back().insert(name).second)
            throw JsonError("not valid JSON: the name " + nlohmann::json(name).dump() + " occurs twice in an object");
        return true;
    }
    bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

private:
    bool open() {
        if (names_.size() == DEEPEST_JSON)
            throw JsonError("not valid JSON: more than " + std::to_string(DEEPEST_JSON) + " levels deep");
        names_.emplace_back();
        return true;
    }
    bool close() {
        names_.pop_back();
        return true;
    }

    std::vector<std::unordered_set<std::string>> names_;   // of each level
};

// Json: nlohmann's, which looks a name up fast, or its ordered_json, which keeps names in the file's order.
template <typename Json> Json parse_json(const char* begin, const char* end) {
    JsonCheck check;
    try {
        nlohmann::json::sax_parse(begin, end, &check);
        return Json::parse(begin, end);
    } catch (const nlohmann::json::exception& error) {
        throw JsonError(std::string("not valid JSON: ") + error.what());
    }
}

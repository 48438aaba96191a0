// Text to tokens and back: byte-level BPE, as GPT-2 has it, read from the files that transformers writes.
//
// Encoding cuts a text into words by GPT-2's pattern, and merges within each: a word begins as its bytes; of all
// neighbours that are a pair of the table, the pair that stands first in it becomes one token, the leftmost of equals;
// and so on until no pair is left. Decoding puts the tokens' bytes one after the other.
//
// Any bytes may be encoded. A byte that belongs to no UTF-8 character counts as one that is neither letter, number nor
// white space; as all 256 bytes are tokens, decode(encode(bytes)) == bytes always.
//
// Added tokens, such as <|endoftext|>, are looked for in the text before it is cut: the leftmost, of these the longest.
//
// Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2; Sennrich et al. 2016, "Neural
// Machine Translation of Rare Words with Subword Units"

#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <queue>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/stat.h>

#include "json.h"

// What is wrong with a file: its path, what was found, what was expected.
struct TokenizerError : std::runtime_error { using std::runtime_error::runtime_error; };

// ---- bytes and characters -----------------------------------------------------------------------

// The length of the UTF-8 character at the front of a text; 0: there is none. The bounds of the second byte leave out
// what could be written shorter, surrogates, and what is above U+10FFFF.
inline size_t character_length(std::string_view text) {
    auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const unsigned first = byte(0);
    if (text.empty()) return 0;
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const unsigned least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(1) < least || byte(1) > most) return 0;
    for (size_t i = 2; i < length; i++)
        if ((byte(i) & 0xc0) != 0x80) return 0;
    return length;
}

// How many bytes at the end of a text may be the beginning of a character that is not yet complete.
inline size_t incomplete_end(std::string_view text) {
    for (size_t n = 1; n <= std::min<size_t>(3, text.size()); n++) {
        const unsigned char first = text[text.size() - n];
        if ((first & 0xc0) == 0x80) continue;
        const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
        return first <= 0xf4 && n < length ? n : 0;
    }
    return 0;
}

// In the files a byte is written as a character that can be printed: itself in Latin-1 where that can, else the next
// free one from U+0100 on.
inline std::vector<std::string> byte_alphabet() {
    std::vector<std::string> alphabet;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; byte++) {
        const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
        const unsigned code = prints ? byte : next++;
        if (code < 0x80) alphabet.push_back(std::string(1, static_cast<char>(code)));
        else alphabet.push_back({static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))});
    }
    return alphabet;
}

// ---- words --------------------------------------------------------------------------------------

// GPT-2's pattern. White space is Unicode's property White_Space, spelled out: PCRE2's own \s has U+180E besides.
inline std::string word_pattern() {
    const std::string white = R"(\t-\r\x{85}\p{Z})";
    return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^)" + white + R"(\p{L}\p{N}]+|[)" + white + "]+(?![^" +
           white + "])|[" + white + "]+";
}

// Cuts texts into words.
class WordPattern {
public:
    WordPattern() {
        const std::string pattern = word_pattern();
        int error;
        PCRE2_SIZE at;
        code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                  PCRE2_UTF | PCRE2_ANCHORED, &error, &at, nullptr));
        if (!code_) throw std::runtime_error("PCRE2 does not take GPT-2's pattern: error " + std::to_string(error));
        pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);   // where there is no JIT, it is interpreted
    }

    // Calls visit(word) for each, in order; together they are the text.
    template <typename Visit> void for_each_word(std::string_view text, Visit visit) const {
        std::vector<size_t> stand_ins;
        const std::string valid = with_stand_ins(text, stand_ins);
        const std::unique_ptr<pcre2_match_data, Free> match(pcre2_match_data_create(1, nullptr));
        const size_t* range = pcre2_get_ovector_pointer(match.get());
        size_t passed = 0, done = 0;   // stand-ins; bytes of the text
        for (size_t at = 0; at < valid.size(); at = range[1]) {
            const int status = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(valid.data()), valid.size(), at,
                                           PCRE2_NO_UTF_CHECK, match.get(), nullptr);
            if (status < 0 || range[1] <= at) throw std::runtime_error("PCRE2: error " + std::to_string(status));
            while (passed < stand_ins.size() && stand_ins[passed] < range[1]) passed++;
            const size_t end = range[1] - passed * (STAND_IN.size() - 1);
            visit(text.substr(done, end - done));
            done = end;
        }
    }

private:
    // PCRE2 takes UTF-8 only. U+FFFF, which is no character, is of the class that broken bytes are to be of.
    static constexpr std::string_view STAND_IN = "\xef\xbf\xbf";

    // The text with a stand-in for each byte that belongs to no character, and where they are.
    static std::string with_stand_ins(std::string_view text, std::vector<size_t>& stand_ins) {
        std::string valid;
        valid.reserve(text.size());
        for (size_t at = 0, length; at < text.size(); at += std::max<size_t>(1, length)) {
            length = character_length(text.substr(at));
            if (length == 0) stand_ins.push_back(valid.size());
            valid += length ? text.substr(at, length) : STAND_IN;
        }
        return valid;
    }

    struct Free {
        void operator()(pcre2_code* code) const { pcre2_code_free(code); }
        void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
    };
    std::unique_ptr<pcre2_code, Free> code_;
};

// ---- the tokenizer ------------------------------------------------------------------------------

class Tokenizer {
public:
    // Whether a folder has the files of one.
    static bool is_in(const std::string& dir) {
        return exists(dir + "/tokenizer.json") || exists(dir + "/vocab.json") || exists(dir + "/merges.txt");
    }

    // From DIR/tokenizer.json, or else from DIR/vocab.json and DIR/merges.txt.
    explicit Tokenizer(const std::string& dir) {
        path_ = dir + (exists(dir + "/tokenizer.json") ? "/tokenizer.json" : "/vocab.json");
        try {
            const json file = parse(read(path_));
            if (exists(dir + "/tokenizer.json")) read_tokenizer(file);
            else {
                read_vocabulary(file, json::array());
                path_ = dir + "/merges.txt";
                read_merge_lines(read(path_));
                add_unmergeable();
            }
        } catch (const json::exception& error) {
            fail(error.what());
        }
        vocabulary_.clear();
    }

    size_t size() const { return bytes_.size(); }

    // Whether its tokens are the bytes, in their order.
    bool is_bytes() const {
        bool right = size() == byte_tokens_.size() && added_.empty();
        for (size_t byte = 0; right && byte < size(); byte++) right = byte_tokens_[byte] == static_cast<int>(byte);
        return right;
    }

    // Where a piece of a text that begins at `begin` may end, after `least` bytes or later: encoded piece by piece it
    // gives the same tokens. A word goes on to no white space, so a line break behind a visible character begins one.
    size_t piece_end(std::string_view text, size_t begin, size_t least) const {
        for (int token : added_)
            if (bytes_[token].find('\n') != std::string::npos) return text.size();
        for (size_t at = begin + least; at < text.size(); at++)
            if (text[at] == '\n' && text[at - 1] > ' ' && text[at - 1] < 0x7f) return at;
        return text.size();
    }

    std::vector<int> encode(std::string_view text) const {
        std::vector<int> tokens;
        Work work;
        size_t begin = 0;   // of what is not yet encoded
        auto encode_until = [&](size_t end) {
            words_.for_each_word(text.substr(begin, end - begin),
                                 [&](std::string_view word) { merge(tokens, word, work); });
        };
        for (size_t at = 0; at < text.size();) {
            const int added = added_at(text.substr(at));
            if (added < 0) {
                at++;
                continue;
            }
            encode_until(at);
            tokens.push_back(added);
            begin = at += bytes_[added].size();
        }
        encode_until(text.size());
        return tokens;
    }

    // A token's bytes, which need not be whole characters; none for a number that is no token.
    std::string decode(int token) const {
        return token >= 0 && static_cast<size_t>(token) < size() ? bytes_[token] : "";
    }

    std::string decode(const std::vector<int>& tokens) const {
        std::string text;
        for (int token : tokens) text += decode(token);
        return text;
    }

    // The token that is added with this text; -1: none is.
    int added(const std::string& text) const {
        for (int token : added_)
            if (bytes_[token] == text) return token;
        return -1;
    }

    // Whether a token stands for no text, but for something like its end. vocab.json says that of no added token: there
    // all are.
    bool is_special(int token) const { return std::find(special_.begin(), special_.end(), token) != special_.end(); }

private:
    using json = nlohmann::json;

    // ---- merging

    static constexpr size_t NONE = SIZE_MAX;

    struct Merge { int rank, token; };
    // A word's tokens as a list; a token that has become part of the one before it is -1.
    struct Link { int token; size_t previous, next; };
    // Neighbours that can be merged, the first of them at `at`; stale when one has become something else.
    struct Candidate {
        int rank;
        size_t at;
        int left, right, token;
        bool operator<(const Candidate& other) const { return std::tie(rank, at) > std::tie(other.rank, other.at); }
    };
    // What merging a word needs, kept from word to word.
    struct Work {
        std::vector<Link> links;
        std::priority_queue<Candidate> candidates;   // the smallest rank, of these the leftmost, is on top
    };

    static uint64_t pair(int left, int right) {
        return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
    }

    void propose(Work& work, size_t at) const {
        const size_t next = work.links[at].next;
        if (next == NONE) return;
        const int left = work.links[at].token, right = work.links[next].token;
        const auto found = merges_.find(pair(left, right));
        if (found != merges_.end())
            work.candidates.push({found->second.rank, at, left, right, found->second.token});
    }

    // Appends a word's tokens. Each merge takes a candidate off the heap and puts at most two on it: for n bytes
    // O(n log n).
    void merge(std::vector<int>& tokens, std::string_view word, Work& work) const {
        std::vector<Link>& links = work.links;
        links.resize(word.size());
        for (size_t i = 0; i < word.size(); i++)   // 0 - 1 is NONE
            links[i] = {byte_tokens_[static_cast<unsigned char>(word[i])], i - 1, i + 1 < word.size() ? i + 1 : NONE};
        for (size_t i = 0; i < word.size(); i++) propose(work, i);
        while (!work.candidates.empty()) {
            const Candidate best = work.candidates.top();
            work.candidates.pop();
            Link& left = links[best.at];
            if (left.token != best.left || left.next == NONE || links[left.next].token != best.right) continue;
            links[left.next].token = -1;
            left.token = best.token;
            left.next = links[left.next].next;
            if (left.next != NONE) links[left.next].previous = best.at;
            propose(work, best.at);
            if (left.previous != NONE) propose(work, left.previous);
        }
        for (size_t i = 0; i < word.size(); i = links[i].next) tokens.push_back(links[i].token);
    }

    // The longest added token that a text begins with; -1: none.
    int added_at(std::string_view text) const {
        if (!begins_added_[static_cast<unsigned char>(text[0])]) return -1;
        for (int token : added_)   // the longest first
            if (text.substr(0, bytes_[token].size()) == bytes_[token]) return token;
        return -1;
    }

    // ---- reading files

    static bool exists(const std::string& path) {
        struct stat info;
        return stat(path.c_str(), &info) == 0;
    }

    [[noreturn]] void fail(const std::string& what) const { throw TokenizerError(path_ + ": " + what); }

    std::string read(const std::string& path) const {
        struct stat info;
        if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
            throw TokenizerError(path + ": not a regular file");
        std::ifstream file(path, std::ios::binary);
        std::ostringstream content;
        // Of a folder only reading fails; of an empty file << does.
        if (!file || (file.peek() != EOF && !(content << file.rdbuf())) || file.bad())
            throw TokenizerError(path + ": " + strerror(errno));
        return content.str();
    }

    json parse(const std::string& text) const {
        try {
            return parse_json<json>(text.data(), text.data() + text.size());
        } catch (const JsonError& error) {
            fail(error.what());
        }
    }

    static std::string quoted(const std::string& text) { return "'" + text + "'"; }

    // part[key] must be one of some values; null stands for a key that is not there.
    void require(const json& part, const std::string& where, const char* key, const std::vector<json>& allowed) const {
        const json found = part.is_object() && part.contains(key) ? part.at(key) : json();
        if (std::find(allowed.begin(), allowed.end(), found) != allowed.end()) return;
        std::string expected;
        for (const json& value : allowed) expected += (expected.empty() ? "" : " or ") + value.dump();
        fail("\"" + where + key + "\" is " + found.dump().substr(0, 200) + ", expected " + expected);
    }

    // Only what GPT-2's does is done here: what a file asks for beyond that is refused.
    void require_byte_level(const json& file) const {
        if (!file.is_object()) fail("expected an object with \"model\", found " + file.dump().substr(0, 40));
        require(file, "", "normalizer", {nullptr});
        const json none, &before = file.contains("pre_tokenizer") ? file.at("pre_tokenizer") : none;
        require(before, "pre_tokenizer.", "type", {"ByteLevel"});
        require(before, "pre_tokenizer.", "add_prefix_space", {false, nullptr});
        require(before, "pre_tokenizer.", "use_regex", {true, nullptr});
        if (file.contains("post_processor") && !file.at("post_processor").is_null())
            require(file.at("post_processor"), "post_processor.", "type", {"ByteLevel"});
        const json& model = file.at("model");
        require(model, "model.", "type", {"BPE", nullptr});
        require(model, "model.", "dropout", {nullptr, 0.0});
        for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
            require(model, "model.", affix, {nullptr, ""});
        for (const char* option : {"byte_fallback", "ignore_merges"})
            require(model, "model.", option, {false, nullptr});
    }

    void read_tokenizer(const json& file) {
        require_byte_level(file);
        const json& model = file.at("model");
        read_vocabulary(model.at("vocab"), file.value("added_tokens", json::array()));
        for (const json& merge : model.at("merges")) {
            if (merge.is_array() && merge.size() == 2) add_merge(merge[0], merge[1]);
            else if (merge.is_string()) add_merge_line(merge);
            else fail("merge " + std::to_string(merges_.size()) + " is " + merge.dump() +
                      ", expected \"a b\" or [\"a\", \"b\"]");
        }
    }

    int id_of(const std::string& token, const json& id) const {
        if (!id.is_number_integer() || id < 0 || id > INT32_MAX)
            fail("token " + quoted(token) + " has the id " + id.dump() + ", expected a whole number from 0 on");
        return id;
    }

    void read_vocabulary(const json& vocabulary, const json& added) {
        if (!vocabulary.is_object())
            fail("the vocabulary is no object of tokens and ids: " + vocabulary.dump().substr(0, 40));
        for (const auto& [token, id] : vocabulary.items()) vocabulary_[token] = id_of(token, id);
        std::vector<std::pair<std::string, int>> more;   // not in the vocabulary
        for (const json& entry : added) {
            const std::string text = entry.at("content");
            const int id = id_of(text, entry.at("id"));
            for (const char* option : {"lstrip", "rstrip", "single_word"})
                require(entry, "added_tokens " + quoted(text) + ".", option, {false, nullptr});
            if (text.empty()) fail("the added token " + std::to_string(id) + " is empty");
            const auto found = vocabulary_.find(text);
            if (found == vocabulary_.end()) more.emplace_back(text, id);
            else if (found->second != id)
                fail("token " + quoted(text) + " has two ids, " + std::to_string(found->second) + " and " +
                     std::to_string(id));
            added_.push_back(id);
            if (entry.value("special", false)) special_.push_back(id);
        }
        number_tokens(more);
        for (const json& entry : added) bytes_[entry.at("id").get<int>()] = entry.at("content");
        find_byte_tokens();
        index_added();
    }

    // Fills bytes_: every id from 0 on exactly once.
    void number_tokens(const std::vector<std::pair<std::string, int>>& more) {
        const size_t count = vocabulary_.size() + more.size();
        std::vector<const std::string*> owner(count);
        bytes_.resize(count);
        std::unordered_map<std::string, char> byte_of;
        const std::vector<std::string> alphabet = byte_alphabet();
        for (size_t byte = 0; byte < alphabet.size(); byte++) byte_of[alphabet[byte]] = static_cast<char>(byte);
        auto number = [&](const std::string& token, int id) {
            if (static_cast<size_t>(id) >= count)
                fail("token " + quoted(token) + " has the id " + std::to_string(id) + ", expected at most " +
                     std::to_string(count - 1) + ": there are " + std::to_string(count) + " tokens");
            if (owner[id])
                fail("tokens " + quoted(*owner[id]) + " and " + quoted(token) + " both have the id " +
                     std::to_string(id));
            owner[id] = &token;
            for (size_t at = 0, length; at < token.size(); at += length) {
                length = std::max<size_t>(1, character_length(std::string_view(token).substr(at)));
                const auto found = byte_of.find(token.substr(at, length));
                if (found == byte_of.end()) {   // not written in the alphabet: it stands for itself
                    bytes_[id] = token;
                    return;
                }
                bytes_[id] += found->second;
            }
        };
        for (const auto& [token, id] : vocabulary_) number(token, id);
        for (const auto& [token, id] : more) number(token, id);
    }

    void find_byte_tokens() {
        const std::vector<std::string> alphabet = byte_alphabet();
        for (size_t byte = 0; byte < alphabet.size(); byte++) {
            const auto found = vocabulary_.find(alphabet[byte]);
            if (found == vocabulary_.end())
                fail("byte " + std::to_string(byte) + " (" + quoted(alphabet[byte]) +
                     ") is no token; expected all 256");
            byte_tokens_.push_back(found->second);
        }
    }

    void index_added() {
        std::sort(added_.begin(), added_.end(), [&](int a, int b) { return bytes_[a].size() > bytes_[b].size(); });
        begins_added_.assign(256, false);
        for (int token : added_) begins_added_[static_cast<unsigned char>(bytes_[token][0])] = true;
    }

    void add_merge(const std::string& left, const std::string& right) {
        const std::string where = "merge " + std::to_string(merges_.size()) + ", " + quoted(left + " " + right) + ": ";
        auto id = [&](const std::string& token) {
            const auto found = vocabulary_.find(token);
            if (found == vocabulary_.end()) fail(where + quoted(token) + " is no token of the vocabulary");
            return found->second;
        };
        const Merge merge = {static_cast<int>(merges_.size()), id(left + right)};
        if (!merges_.emplace(pair(id(left), id(right)), merge).second) fail(where + "this pair occurs twice");
    }

    void add_merge_line(const std::string& line) {
        const size_t space = line.find(' ');
        if (space == line.npos || space == 0 || space + 1 == line.size() || line.find(' ', space + 1) != line.npos)
            fail("merge " + std::to_string(merges_.size()) + " is " + quoted(line) +
                 ", expected two tokens with a space between");
        add_merge(line.substr(0, space), line.substr(space + 1));
    }

    void read_merge_lines(const std::string& text) {
        std::istringstream lines(text);
        bool first = true;
        for (std::string line; std::getline(lines, line); first = false) {
            if (!line.empty() && line.back() == '\r') line.pop_back();
            if (!line.empty() && !(first && line.rfind("#version", 0) == 0)) add_merge_line(line);
        }
    }

    // vocab.json does not say which tokens are added: they are those that are no byte and that no merge makes.
    void add_unmergeable() {
        std::vector<bool> made(size(), false);
        for (int token : byte_tokens_) made[token] = true;
        for (const auto& [pair, merge] : merges_) made[merge.token] = true;
        for (const auto& [token, id] : vocabulary_) {
            if (made[id] || token.empty()) continue;
            added_.push_back(id);
            bytes_[id] = token;
        }
        special_ = added_;
        index_added();
    }

    std::string path_;                                    // of the file that is being read
    std::unordered_map<std::string, int> vocabulary_;     // while reading: as the files write them
    std::vector<std::string> bytes_;                      // of each token
    std::vector<int> byte_tokens_, added_, special_;
    std::vector<bool> begins_added_;                      // whether an added token begins with a byte
    std::unordered_map<uint64_t, Merge> merges_;
    WordPattern words_;
};

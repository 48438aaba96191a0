#include "tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <numeric>
#include <queue>

std::vector<std::string> byte_alphabet() {
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

// Returns text as valid UTF-8, which PCRE2 requires. Each byte outside a character becomes U+0001, which has the same
// length and is neither a letter nor a number nor white space.
static std::string valid_utf8(std::string_view text) {
    std::string valid(text);
    for (size_t at = 0, length; at < text.size(); at += std::max<size_t>(1, length)) {
        length = character_length(text.substr(at));
        if (length == 0) valid[at] = '\1';
    }
    return valid;
}

// Compiles GPT-2's pattern. White space is Unicode's property White_Space, written out because PCRE2's \s also matches
// U+180E.
static std::shared_ptr<pcre2_code> compile_word_pattern() {
    const std::string white = R"(\t-\r\x{85}\p{Z})";
    const std::string pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^)" + white + R"(\p{L}\p{N}]+|[)" +
                                white + "]+(?![^" + white + "])|[" + white + "]+";
    int error;
    PCRE2_SIZE at;
    const std::shared_ptr<pcre2_code> code(
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_ANCHORED, &error,
                      &at, nullptr), pcre2_code_free);
    if (!code) throw Failure("PCRE2 rejects GPT-2's pattern: error %d", error);
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);   // without JIT, PCRE2 interprets the pattern
    return code;
}

void for_each_word(std::string_view text, const std::function<void(std::string_view)>& visit) {
    static const std::shared_ptr<pcre2_code> code = compile_word_pattern();
    const std::string valid = valid_utf8(text);
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    const size_t* range = pcre2_get_ovector_pointer(match.get());
    for (size_t at = 0; at < valid.size(); at = range[1]) {
        const int status = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(valid.data()), valid.size(), at,
                                       PCRE2_NO_UTF_CHECK, match.get(), nullptr);
        if (status < 0 || range[1] <= at) throw Failure("PCRE2 cannot split text into words: error %d", status);
        visit(text.substr(at, range[1] - at));
    }
}

// ---- encoding -----------------------------------------------------------------------------------

static uint64_t pair_key(int left, int right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

// Appends the tokens of a word. Each merge removes one pair from the heap and adds at most two, so n bytes take
// O(n log n) time.
void Tokenizer::merge(std::vector<int>& tokens, std::string_view word) const {
    constexpr size_t NONE = SIZE_MAX;
    struct Link { int token; size_t previous, next; };   // linked list of tokens
    std::vector<Link> links(word.size());
    using Pair = std::pair<int, size_t>;                 // rank, index of the left token
    std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;   // top: lowest rank, leftmost of equal ranks
    auto merge_at = [&](size_t at) {
        const size_t next = at == NONE ? NONE : links[at].next;
        const auto found = next == NONE ? merges_.end() : merges_.find(pair_key(links[at].token, links[next].token));
        return found == merges_.end() ? Merge{-1, -1} : found->second;
    };
    auto propose = [&](size_t at) {
        if (const Merge merge = merge_at(at); merge.rank >= 0) pairs.emplace(merge.rank, at);
    };
    for (size_t i = 0; i < word.size(); i++)   // size_t(0) - 1 == NONE
        links[i] = {byte_tokens_[static_cast<unsigned char>(word[i])], i - 1, i + 1 < word.size() ? i + 1 : NONE};
    for (size_t i = 0; i < word.size(); i++) propose(i);
    while (!pairs.empty()) {
        const auto [rank, at] = pairs.top();
        pairs.pop();
        const Merge merge = merge_at(at);
        if (merge.rank != rank) continue;   // stale: one of the two tokens was merged into another
        Link& left = links[at];
        const size_t after = std::exchange(links[left.next].next, NONE);   // pairs of the merged token become stale
        left = {merge.token, left.previous, after};
        if (left.next != NONE) links[left.next].previous = at;
        propose(at);
        propose(left.previous);
    }
    for (size_t i = 0; i < word.size(); i = links[i].next) tokens.push_back(links[i].token);
}

// Returns the longest added token at the start of a text, or -1.
int Tokenizer::added_at(std::string_view text) const {
    if (!begins_added_[static_cast<unsigned char>(text[0])]) return -1;
    for (int token : added_)   // longest first
        if (begins_with(text, bytes_[token])) return token;
    return -1;
}

std::vector<int> Tokenizer::encode(std::string_view text) const {
    std::vector<int> tokens;
    size_t begin = 0;   // start of the text that is not yet encoded
    auto encode_until = [&](size_t end) {
        const bool adds_space = adds_space_ && begin < end && text[begin] != ' ';
        const std::string with_space = adds_space ? " " + std::string(text.substr(begin, end - begin)) : "";
        for_each_word(adds_space ? with_space : text.substr(begin, end - begin),
                      [&](std::string_view word) { merge(tokens, word); });
    };
    for (size_t at = 0; at < text.size(); at++) {
        const int added = at < begin ? -1 : added_at(text.substr(at));
        if (added < 0) continue;
        encode_until(at);
        tokens.push_back(added);
        begin = at + bytes_[added].size();
    }
    encode_until(text.size());
    return tokens;
}

Tokenizer::Tokenizer() : byte_tokens_(BYTE_VOCAB) {
    std::iota(byte_tokens_.begin(), byte_tokens_.end(), 0);
    for (int byte : byte_tokens_) bytes_.push_back(std::string(1, static_cast<char>(byte)));
}

// ---- reading files ------------------------------------------------------------------------------

// Fills a Tokenizer from tokenizer.json, or from vocab.json and merges.txt, which transformers 4 writes for tokenizers
// implemented in Python. As in transformers, tokenizer_config.json, special_tokens_map.json and added_tokens.json add
// tokens and settings to these.
class TokenizerFile {
public:
    TokenizerFile(Tokenizer& t, const std::string& dir, size_t most)
        : t_(t), dir_(dir), most_(most),
          is_split_(!exists(dir + "/tokenizer.json") && exists(dir + "/vocab.json")) {
        try {
            read();
        } catch (const json::exception& error) {
            fail(error.what());
        }
    }

private:
    using json = nlohmann::json;   // fast lookup of names

    [[noreturn]] void fail(const std::string& what) const { throw UserError("%s: %s", path_.c_str(), what.c_str()); }

    // Returns the object in a file of the folder. From here on, errors name this file.
    json open(const std::string& name) {
        path_ = dir_ + "/" + name;
        return read_json<json>(path_);
    }
    json open_if_any(const std::string& name) { return exists(dir_ + "/" + name) ? open(name) : json::object(); }

    void read() {
        config_ = open_if_any("tokenizer_config.json");
        if (is_split_)   // other classes split words in other ways
            require_value(config_, "/tokenizer_class", {nullptr, "GPT2Tokenizer", "GPT2TokenizerFast"}, path_);
        searches_special_ = !config_.value("split_special_tokens", false);
        const bool is_old = !config_.contains("added_tokens_decoder");   // which replaces these two files
        names_ = is_old ? open_if_any("special_tokens_map.json") : json::object();
        const json numbers = is_old ? open_if_any("added_tokens.json") : json::object();
        const json file = is_split_ ? joined() : open("tokenizer.json");
        require_byte_level(file);
        const json name = config_.value("tokenizer_class", json());
        const bool is_general = name == "PreTrainedTokenizerFast" || name == "TokenizersBackend";
        t_.adds_space_ = is_general ? file["pre_tokenizer"].value("add_prefix_space", false)
                                    : config_.value("add_prefix_space", false);
        const json& model = file.at("model");
        for (const auto& [token, id] : model.at("vocab").items()) ids_[token] = id_of(token, id);
        add_tokens(file.value("added_tokens", json::array()));
        const std::string main = std::exchange(path_, dir_);
        add_tokens(declared(numbers));
        path_ = main;
        number_tokens();
        read_post_processor(file.value("post_processor", json()));
        for (const json& merge : model.at("merges")) read_merge(merge);
    }

    // Returns the content of vocab.json and merges.txt as one tokenizer.json.
    json joined() {
        json merges = json::array();
        std::istringstream lines(read_file(dir_ + "/merges.txt"));
        for (std::string line; std::getline(lines, line);) {
            if (!line.empty() && line.back() == '\r') line.pop_back();
            if (!line.empty() && !begins_with(line, "#version")) merges.push_back(line);
        }
        json single = json::array();   // with tokenizer.json, transformers ignores add_bos_token and add_eos_token
        const auto add = [&](const std::string& name) {
            if (config_.value("add_" + name, false))
                single.push_back({{"SpecialToken", {{"id", named(name).at(0).at("content")}}}});
        };
        add("bos_token");
        single.push_back({{"Sequence", {{"id", "A"}}}});
        add("eos_token");
        return {{"model", {{"vocab", open("vocab.json")}, {"merges", merges}}},
                {"pre_tokenizer", {{"type", "ByteLevel"}}},
                {"post_processor", {{"type", "TemplateProcessing"}, {"single", single}}}};
    }

    // Returns the tokens that special_tokens_map.json or tokenizer_config.json call `name`, in the format of
    // tokenizer.json's "added_tokens". They have a token or a list of tokens, as texts or objects with "content".
    json named(const std::string& name) const {
        static const std::set<std::string> WITH_DEFAULT = {"bos_token", "eos_token", "unk_token"};
        const json by_default = is_split_ && WITH_DEFAULT.count(name) ? json(END_OF_TEXT) : json();
        json found = names_.value(name, config_.value(name, by_default)), tokens = json::array();
        if (!found.is_structured() || found.contains("content")) found = json::array({found});
        for (json& token : found) {
            if (token.is_null() || token == "") continue;
            if (!token.is_object()) token = {{"content", token}};
            token["special"] = true;
            tokens.push_back(token);
        }
        return tokens;
    }

    // Returns the tokens that other files than tokenizer.json declare, in the same format.
    json declared(const json& numbers) const {
        json tokens = json::array();
        const json decoder = config_.value("added_tokens_decoder", json::object());
        for (const auto& [key, token] : decoder.items()) {
            int id;
            tokens.push_back(token);
            tokens.back()["id"] = parse_number(key, id) ? json(id) : json(key);
        }
        for (const auto& [text, id] : numbers.items()) tokens.push_back({{"content", text}, {"id", id}});
        for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                                 "mask_token", "additional_special_tokens", "extra_special_tokens"})
            for (const json& token : searches_special_ ? named(name) : json::array()) tokens.push_back(token);
        return tokens;
    }

    // Rejects settings other than GPT-2's, because only these are implemented. null stands for a missing key.
    void require_byte_level(const json& file) const {
        static const std::pair<const char*, std::vector<json>> ACCEPTED[] = {
            {"/normalizer", {nullptr}}, {"/pre_tokenizer/type", {"ByteLevel"}},
            {"/pre_tokenizer/use_regex", {true, nullptr}}, {"/model/type", {"BPE", nullptr}},
            {"/model/dropout", {nullptr, 0.0}},
            {"/model/continuing_subword_prefix", {nullptr, ""}}, {"/model/end_of_word_suffix", {nullptr, ""}},
            {"/model/byte_fallback", {false, nullptr}}, {"/model/ignore_merges", {false, nullptr}}};
        for (const auto& [key, values] : ACCEPTED) require_value(file, key, values, path_);
    }

    // "TemplateProcessing" lists the special tokens around a text (A), "ByteLevel" adds none, and "Sequence" is a list
    // of post-processors.
    void read_post_processor(const json& part) {
        const std::string type = part.is_null() ? "ByteLevel" : part.at("type").get<std::string>();
        if (type == "Sequence")
            for (const json& processor : part.at("processors")) read_post_processor(processor);
        if (type == "ByteLevel" || type == "Sequence") return;
        if (type != "TemplateProcessing") fail("post_processor is " + type + ", expected TemplateProcessing");
        bool text_passed = false;
        for (const json& piece : part.at("single")) {
            const bool is_text = piece.contains("Sequence");
            const std::string name = piece.at(is_text ? "Sequence" : "SpecialToken").at("id");
            const auto id = ids_.find(name);
            if (is_text ? text_passed || name != "A" : id == ids_.end() || !added_.count(id->second))
                fail("post_processor has " + piece.dump().substr(0, 200) +
                     ", expected added tokens and one sequence A");
            if (is_text) text_passed = true;
            else (text_passed ? t_.after_ : t_.before_).push_back(id->second);
        }
        if (!text_passed) fail("post_processor has no sequence A");
    }

    int id_of(const std::string& token, const json& id) const {
        if (!id.is_number_integer() || id < 0 || id > INT32_MAX)
            fail(format("token '%s' has the id %s, expected a whole number from 0", token.c_str(),
                        id.dump().c_str()));
        return id;
    }

    // Adds tokens that are matched before the split. One without an id is in the vocabulary or gets the next id.
    void add_tokens(const json& tokens) {
        for (const json& token : tokens) {
            const std::string text = token.at("content");
            if (text.empty()) fail("an added token is empty: " + token.dump());
            for (const char* option : {"/lstrip", "/rstrip", "/single_word"})
                require_value(token, option, {false, nullptr}, path_ + ": added token '" + text + "'");
            const auto known = ids_.find(text);
            if (!token.contains("id") && known == ids_.end() && ids_.size() >= most_) continue;
            const int next = known == ids_.end() ? static_cast<int>(ids_.size()) : known->second;
            const int id = token.contains("id") ? id_of(text, token["id"]) : next;
            if (known != ids_.end() && id != next)
                fail(format("token '%s' has two ids, %d and %d", text.c_str(), next, id));
            ids_[text] = id;
            const bool is_special = token.value("special", false);
            if (is_special) t_.special_.insert(id);
            if (!added_.emplace(id, text).second || (is_special && !searches_special_)) continue;
            t_.added_.push_back(id);
            t_.begins_added_[static_cast<unsigned char>(text[0])] = true;
        }
    }

    void number_tokens() {
        fill_bytes();
        for (const auto& [id, text] : added_) t_.bytes_[id] = text;
        auto longer = [&](int a, int b) { return t_.bytes_[a].size() > t_.bytes_[b].size(); };
        std::sort(t_.added_.begin(), t_.added_.end(), longer);
        for (const std::string& byte : byte_alphabet()) {
            const auto found = ids_.find(byte);
            if (found == ids_.end())
                fail(format("byte %zu ('%s') is not a token; expected all 256", t_.byte_tokens_.size(), byte.c_str()));
            t_.byte_tokens_.push_back(found->second);
        }
    }

    // Each id below the number of tokens must belong to exactly one token.
    void fill_bytes() {
        std::vector<const std::string*> owner(ids_.size());
        t_.bytes_.resize(ids_.size());
        std::unordered_map<std::string, char> byte_of;
        for (const std::string& letter : byte_alphabet()) byte_of.emplace(letter, static_cast<char>(byte_of.size()));
        for (const auto& [token, id] : ids_) {
            if (static_cast<size_t>(id) >= owner.size())
                fail(format("token '%s' has the id %d, expected at most %zu: there are %zu tokens", token.c_str(), id,
                            owner.size() - 1, owner.size()));
            if (owner[id])
                fail(format("tokens '%s' and '%s' both have the id %d", owner[id]->c_str(), token.c_str(), id));
            owner[id] = &token;
            for (size_t at = 0, length; at < token.size(); at += length) {
                length = std::max<size_t>(1, character_length(std::string_view(token).substr(at)));
                const auto found = byte_of.find(token.substr(at, length));
                if (found == byte_of.end()) {   // not in byte_alphabet(): the token is literal text
                    t_.bytes_[id] = token;
                    break;
                }
                t_.bytes_[id] += found->second;
            }
        }
    }

    // Adds a merge, "a b" or ["a", "b"], to the merge table.
    void read_merge(const json& merge) {
        const std::string text = merge.is_string() ? merge.get<std::string>() : "";
        const size_t space = text.find(' ');
        const bool is_pair = merge.is_array() && merge.size() == 2;
        if (!is_pair && (space == text.npos || text.find(' ', space + 1) != text.npos))
            fail(format("merge %zu is %s, expected \"a b\" or [\"a\", \"b\"]", t_.merges_.size(),
                        merge.dump().c_str()));
        const std::string left = is_pair ? merge[0].get<std::string>() : text.substr(0, space);
        const std::string right = is_pair ? merge[1].get<std::string>() : text.substr(space + 1);
        const int rank = static_cast<int>(t_.merges_.size());
        auto id = [&](const std::string& token) {
            const auto found = ids_.find(token);
            if (found == ids_.end())
                fail(format("merge %d is %s, but '%s' is not a token", rank, merge.dump().c_str(), token.c_str()));
            return found->second;
        };
        const Tokenizer::Merge merged = {rank, id(left + right)};
        if (!t_.merges_.emplace(pair_key(id(left), id(right)), merged).second)
            fail(format("merge %d, %s, occurs twice", rank, merge.dump().c_str()));
    }

    Tokenizer& t_;
    const std::string dir_;
    const size_t most_;
    const bool is_split_;   // vocab.json and merges.txt
    std::string path_;      // of the file that is being read
    json config_, names_;   // tokenizer_config.json and special_tokens_map.json
    bool searches_special_ = true;
    std::unordered_map<std::string, int> ids_;   // by the token's text in the file
    std::map<int, std::string> added_;
};

Tokenizer::Tokenizer(const std::string& dir, size_t most) { TokenizerFile(*this, dir, most); }

// ---- tokens as text -----------------------------------------------------------------------------

Text::Text(const std::string& dir, int V) : dir_(dir), V_(V) {
    if (!dir.empty() && Tokenizer::is_in(dir)) tokenizer_ = std::make_shared<Tokenizer>(dir, V);
    else if (V == BYTE_VOCAB) tokenizer_ = std::make_shared<Tokenizer>();
    if (tokenizer_ && tokenizer_->size() > static_cast<size_t>(V))   // V may include padding
        throw UserError("%s: the tokenizer has %zu tokens, expected at most the %d of config.json", dir.c_str(),
                        tokenizer_->size(), V);
}

bool Text::is_byte_level(const std::string& path) const {
    if (dir_.empty() && V_ < BYTE_VOCAB)
        throw UserError("%s: the bytes of text need a vocabulary of %d, found --vocab %d", path.c_str(), BYTE_VOCAB,
                        V_);
    if (!dir_.empty() && !tokenizer_)
        throw UserError("%s: found text, but the model in %s has %d tokens and no tokenizer; copy its tokenizer.json "
                        "there, or convert the text with scripts/prepare_text.py", path.c_str(), dir_.c_str(), V_);
    return !tokenizer_ || tokenizer_->is_bytes();
}

std::vector<int> Text::encode(const std::string& text) const {
    if (!tokenizer_)
        throw UserError("--prompt needs a tokenizer.json in %s, because the model's %d tokens are not bytes; without "
                        "one, use --prompt-tokens", dir_.c_str(), V_);
    std::vector<int> tokens = tokenizer_->before();
    for (int token : tokenizer_->encode(text)) tokens.push_back(token);
    return tokens;
}

int Text::first(int bos) const {
    if (!tokenizer_) return bos >= 0 ? bos : V_ - 1;
    if (bos >= 0 && static_cast<size_t>(bos) < tokenizer_->size() && !tokenizer_->is_bytes()) return bos;
    const int end_of_text = tokenizer_->added(END_OF_TEXT);
    return end_of_text >= 0 ? end_of_text : tokenizer_->encode("\n")[0];
}

std::vector<char> Text::encode_file(std::string_view text) const {
    std::vector<char> encoded;
    for (const std::vector<int>& tokens : {tokenizer_->before(), tokenizer_->encode(text), tokenizer_->after()})
        for (int token : tokens) {
            const char* number = reinterpret_cast<const char*>(&token);   // little-endian
            encoded.insert(encoded.end(), number, number + token_bytes());
        }
    return encoded;
}

Text text_if_any(const std::string& dir, int V) {
    try {
        return Text(dir, V);
    } catch (const UserError& error) {
        fprintf(stderr, "tokenizer  not used: %s\n", error.what());
        return Text("", V);
    }
}

std::vector<int> read_prompt(const Options& o, const Text& text, int V) {
    const bool as_text = o.prompt_tokens.empty();
    std::string input = as_text ? o.prompt : o.prompt_tokens;
    if (input == "-") input = {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
    std::vector<int> tokens;
    if (as_text) {
        tokens = text.encode(input);
        if (tokens.empty()) throw UserError("--prompt -: standard input is empty");
        return tokens;
    }
    std::replace(input.begin(), input.end(), ',', ' ');
    std::istringstream words(input);
    for (std::string word; words >> word;) {
        int token;
        if (!parse_number(word, token) || token < 0 || token >= V)
            throw UserError("--prompt-tokens: expected tokens from 0 to %d, found '%s'", V - 1, word.c_str());
        tokens.push_back(token);
    }
    if (tokens.empty()) throw UserError("--prompt-tokens: expected tokens, found none");
    return tokens;
}

// ---- text files of a checkpoint -----------------------------------------------------------------

// Adds the files of a tokenizer whose token i is byte i, for transformers. lm-evaluation-harness begins each text with
// the end-of-text token. It is byte 255, which does not occur in UTF-8 and which byte_alphabet() writes as a letter.
// With split_special_tokens, transformers encodes this letter in a text as its UTF-8 bytes, not as the special token.
static void add_byte_tokenizer(TextFiles& files, const Config& c) {
    json vocabulary;
    const std::vector<std::string> alphabet = byte_alphabet();
    for (const std::string& byte : alphabet) vocabulary[byte] = vocabulary.size();
    const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true},
                             {"use_regex", true}};
    const json model = {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr},
                        {"continuing_subword_prefix", nullptr}, {"end_of_word_suffix", nullptr}, {"fuse_unk", false},
                        {"byte_fallback", false}, {"ignore_merges", false}, {"vocab", vocabulary},
                        {"merges", json::array()}};
    const json tokenizer = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr},
                            {"added_tokens", json::array()}, {"normalizer", nullptr}, {"pre_tokenizer", byte_level},
                            {"post_processor", nullptr}, {"decoder", byte_level}, {"model", model}};
    // PreTrainedTokenizerFast uses tokenizer.json unchanged; GPT2TokenizerFast would add the token <|endoftext|>.
    const json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"model_max_length", c.context},
                         {"bos_token", alphabet.back()}, {"eos_token", alphabet.back()},
                         {"split_special_tokens", true}, {"clean_up_tokenization_spaces", false}};
    files["tokenizer.json"] = json_text(tokenizer, 2) + "\n";
    files["tokenizer_config.json"] = json_text(config, 2) + "\n";
}

// Returns the files in `dir` that have the names of transformers' tokenizer files.
static TextFiles tokenizer_files(const std::string& dir) {
    const char* const STARTS[] = {"tokeniz", "vocab.", "merges.", "added_tokens.", "special_tokens_map.",
                                  "chat_template", "additional_chat_templates/", "generation_config."};
    TextFiles files;
    for (const char* folder : {"/", "/additional_chat_templates/"})
        for (const std::string& path : paths_in(dir + folder)) {
            const std::string name = path.substr(dir.size() + 1);
            const auto is_start = [&](const char* start) { return begins_with(name, start); };
            std::error_code ignored;
            if (std::any_of(std::begin(STARTS), std::end(STARTS), is_start) && fs::is_regular_file(path, ignored))
                files[name] = fs::file_size(path, ignored) ? read_file(path) : "";
        }
    return files;
}

TextFiles text_files(const std::string& dir, const json& config, const Config& c, bool data_is_bytes) {
    TextFiles files;
    if (!dir.empty()) files = tokenizer_files(dir);
    if ((dir.empty() || !Tokenizer::is_in(dir)) && (c.vocab == BYTE_VOCAB || data_is_bytes))
        add_byte_tokenizer(files, c);
    json generation = {{"_from_model_config", true}};
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
        if (config.contains(key)) generation[key] = config[key];
    files.emplace("generation_config.json", json_text(generation, 2) + "\n");   // unless `dir` has one
    files["config.json"] = json_text(config, 2) + "\n";
    return files;
}

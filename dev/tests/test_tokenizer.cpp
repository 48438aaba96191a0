// Tests of gpt/tokenizer.h; run in the repository's root.
//
//   test_tokenizer [--list | --only NAME,NAME... | --reference DIR]
//
// --reference DIR: runs only the test "tokenizer: cases", on a folder written by dev/reference/make_tokenizer.py.
#include "../../gpt/tokenizer.h"

#include <sys/stat.h>

#include <algorithm>

#include "testing.h"

static std::string REFERENCE = "data/reference/tokenizer";

static json reference_json() { return json::parse(read_bytes(REFERENCE + "/tokenizer.json")); }

// Creates a folder with exactly these files; returns its path.
static std::string folder_of(const std::vector<std::pair<std::string, std::string>>& files) {
    const std::string dir = scratch("@/tokenizer");
    fs::remove_all(dir);
    fs::create_directory(dir);
    for (const auto& [name, content] : files) write_bytes(dir + "/" + name, content);
    return dir;
}
static std::string folder_of_json(const json& file) { return folder_of({{"tokenizer.json", file.dump()}}); }

// ==== words ==============================================================================================

TEST("tokenizer: words") {
    const std::vector<std::pair<std::string, std::string>> CASES = {
        {"It's 12 o'clock, isn't it?", "|It|'s| 12| o|'|clock|,| isn|'t| it|?"},
        {"a  b   c  ", "|a| | b|  | c|  "}, {"x\n\n y", "|x|\n\n| y"},
        {"caf\xc3\xa9 \xd0\xb4\xd0\xb0\xc2\xbd", "|caf\xc3\xa9| \xd0\xb4\xd0\xb0|\xc2\xbd"},
        // U+0085 is white space, U+180E is not
        {"!\xe1\xa0\x8e!", "|!\xe1\xa0\x8e!"}, {"!\xc2\x85!", "|!|\xc2\x85|!"},
        {"a\xff\xc3!b", "|a|\xff\xc3!|b"}, {" \xe2\x82 x", "| \xe2\x82| x"}, {"", ""}};
    std::string wrong;
    for (const auto& [text, expected] : CASES) {
        std::string found;
        for_each_word(text, [&](std::string_view word) { found += "|" + std::string(word); });
        if (found != expected) wrong += "'" + found + "', expected '" + expected + "'; ";
    }
    expect(wrong.empty(), "text is split into words as by GPT-2; an invalid byte is neither letter, number nor space",
           wrong);
}

TEST("tokenizer: characters") {
    int wrong = 0;
    for (unsigned code = 0; code < 0x110000; code++) {
        if (code >= 0xd800 && code < 0xe000) continue;
        auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
        std::string c;
        if (code < 0x80) c = {static_cast<char>(code)};
        else if (code < 0x800) c = {static_cast<char>(0xc0 | code >> 6), tail(0)};
        else if (code < 0x10000) c = {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
        else c = {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
        wrong += character_length(c) != c.size() || incomplete_end(c) != 0;
        for (size_t n = 1; n < c.size(); n++)
            wrong += character_length(c.substr(0, n)) != 0 || incomplete_end("a" + c.substr(0, n)) != n;
    }
    for (const char* broken : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                               "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3("})
        wrong += character_length(broken) != 0;
    expect(wrong == 0, "all Unicode characters are valid UTF-8; truncated and overlong forms and surrogates are not",
           std::to_string(wrong) + " wrong");
}

// ==== tokens =============================================================================================

static std::string decode(const Tokenizer& tokenizer, const std::vector<int>& tokens) {
    std::string text;
    for (int token : tokens) text += tokenizer.decode(token);
    return text;
}

// Returns the tokens of a text with those that the template puts around it.
static std::vector<int> all_tokens(const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int> tokens = tokenizer.before();
    for (const std::vector<int>& more : {tokenizer.encode(text), tokenizer.after()})
        tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
}

// Returns the number of texts whose tokens differ from those of Hugging Face's tokenizers (invalid UTF-8: of tiktoken).
static int differences(const std::string& dir, const json& cases) {
    const Tokenizer tokenizer(dir);
    int count = 0;
    for (const json& one : cases) {
        const std::string hex = one["hex"];
        std::string text;
        for (size_t i = 0; i < hex.size(); i += 2) text += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
        const std::vector<int> tokens = tokenizer.encode(text);
        const bool same = tokens == one["tokens"].get<std::vector<int>>() && decode(tokenizer, tokens) == text;
        if (!same && count++ == 0) printf("        first difference: %s\n", one.dump().substr(0, 300).c_str());
    }
    return count;
}

TEST("tokenizer: cases") {
    const json cases = json::parse(read_bytes(REFERENCE + "/cases.json"));
    expect(cases.size() > 100 && differences(REFERENCE, cases) == 0,
           "tokens equal those of the packages tokenizers and tiktoken", std::to_string(cases.size()) + " texts");
    json file = reference_json();
    std::string lines = "#version: 0.2\n";
    for (json& merge : file["model"]["merges"]) {
        merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
        lines += merge.get<std::string>() + "\n";
    }
    expect(differences(folder_of_json(file), cases) == 0, "merges written as \"a b\" give the same tokens");
    json vocabulary = file["model"]["vocab"];
    for (const json& token : file["added_tokens"]) vocabulary[token["content"]] = token["id"];
    const std::string split = folder_of({{"vocab.json", vocabulary.dump()}, {"merges.txt", lines}});
    expect(differences(split, cases) == 0, "vocab.json and merges.txt give the same tokens");
    for (const json& saved : json::parse(read_file("data/reference/tokenizer/saved.json"))) {
        const Tokenizer tokenizer(folder_of_json(saved["file"]));
        bool same = true;
        for (const auto& [text, expected] : saved["tokens"].items())
            same = same && all_tokens(tokenizer, text) == expected;
        expect(same, "tokens, including the post-processor's, equal those of " + saved["by"].get<std::string>());
    }
}

// Returns the files of a tokenizer with a token for each byte, <|endoftext|> (256) and <s> (257): "split" into
// vocab.json and merges.txt, or "whole" in tokenizer.json, or "spaced", whose tokenizer.json has add_prefix_space.
static std::vector<std::pair<std::string, std::string>> small_tokenizer(const std::string& kind) {
    json vocabulary, added;
    for (const std::string& byte : byte_alphabet()) vocabulary[byte] = vocabulary.size();
    for (const char* text : {"<|endoftext|>", "<s>"}) {
        added.push_back({{"id", vocabulary.size()}, {"content", text}, {"special", true}});
        vocabulary[text] = vocabulary.size();
    }
    if (kind == "split") return {{"vocab.json", vocabulary.dump()}, {"merges.txt", "#version: 0.2\n"}};
    json file = reference_json();
    file["model"]["vocab"] = vocabulary;
    file["model"]["merges"] = json::array();
    file["added_tokens"] = added;
    file["pre_tokenizer"]["add_prefix_space"] = kind == "spaced";
    return {{"tokenizer.json", file.dump()}};
}

// The tokens are those of AutoTokenizer in transformers 4.46.3 and 5.24, except that 4.46.3 ignores add_eos_token.
TEST("tokenizer: tokenizer_config.json and added tokens") {
    struct Case { const char *kind, *files, *text; std::vector<int> tokens; };
    const Case CASES[] = {
        {"split", R"({})", "a<s><|endoftext|>", {97, 60, 115, 62, 256}},
        {"split", R"({"added_tokens.json": {"NEW": 258}})", "aNEW", {97, 258}},
        {"split", R"({"tokenizer_config.json": {"added_tokens_decoder": {"258": {"content": "NEW"}}}})", "aNEW",
         {97, 258}},
        {"split", R"({"special_tokens_map.json": {"bos_token": "<s>"}})", "a<s>", {97, 257}},
        {"split", R"({"special_tokens_map.json": {"pad_token": "NEW", "mask_token": {"content": "<s>"}}})", "NEW<s>",
         {258, 257}},
        {"split", R"({"tokenizer_config.json": {"additional_special_tokens": ["<s>", "NEW"]}})", "NEW<s>", {258, 257}},
        {"split", R"({"tokenizer_config.json": {"add_bos_token": true, "bos_token": "<s>"}})", "a", {257, 97}},
        {"split", R"({"tokenizer_config.json": {"add_bos_token": true, "add_eos_token": true}})", "a", {256, 97, 256}},
        {"split", R"({"tokenizer_config.json": {"add_bos_token": true, "bos_token": "<|endoftext|>"},
                      "special_tokens_map.json": {"bos_token": "<s>"}})", "a", {257, 97}},
        {"split", R"({"tokenizer_config.json": {"add_prefix_space": true}})", "a<|endoftext|>b <|endoftext|> c",
         {32, 97, 256, 32, 98, 32, 256, 32, 99}},
        {"split", R"({"tokenizer_config.json": {"split_special_tokens": true, "bos_token": "<s>"}})", "<s>",
         {60, 115, 62}},
        {"whole", R"({})", "<s>NEW", {257, 78, 69, 87}},
        {"whole", R"({"tokenizer_config.json": {"add_bos_token": true, "pad_token": "NEW"}})", "<s>NEW", {257, 258}},
        {"whole", R"({"added_tokens.json": {"NEW": 258}})", "<s>NEW", {257, 258}},
        {"whole", R"({"tokenizer_config.json": {"add_prefix_space": true}})", "a<s>b", {32, 97, 257, 32, 98}},
        {"spaced", R"({"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}})", "a", {97}},
        {"spaced", R"({"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast",
                       "add_prefix_space": false}})", "a", {32, 97}}};
    for (const Case& c : CASES) {
        auto files = small_tokenizer(c.kind);
        const json others = json::parse(c.files);
        for (const auto& [name, content] : others.items()) files.push_back({name, content.dump()});
        const Tokenizer tokenizer(folder_of(files));
        const std::vector<int> tokens = all_tokens(tokenizer, c.text);
        expect(tokens == c.tokens, std::string(c.kind) + " " + c.files, json(tokens).dump());
    }
    auto files = small_tokenizer("whole");
    files.push_back({"tokenizer_config.json", R"({"pad_token": "NEW"})"});
    expect(Tokenizer(folder_of(files), 258).size() == 258, "a named token that exceeds the vocabulary is no token");
    expect(Tokenizer(folder_of(files), 259).is_special(258), "a named token is special");
}

// Uses a tokenizer whose tokens are all bytes and the results of four merges.
TEST("tokenizer: order of merges") {
    json file = reference_json();
    json &vocab = file["model"]["vocab"] = json::object(), &merges = file["model"]["merges"] = json::array();
    for (const std::string& byte : byte_alphabet()) vocab[byte] = vocab.size();
    for (const auto& [left, right] : {std::pair("a", "b"), {"a", "a"}, {"aa", "aa"}, {"b", "a"}}) {
        vocab[std::string(left) + right] = vocab.size();
        merges.push_back({left, right});
    }
    file["added_tokens"][0]["id"] = vocab.size();
    const Tokenizer tokenizer(folder_of_json(file));
    std::string wrong;
    for (const std::string expected : {"aa|a", "a|ab", "aaaa|a", "aaaa|aa|a", "ab|ab", "b|ab|ab", "ba|c|ba",
                                       "aa|ab|ba|c"}) {
        std::string text = expected, found;
        text.erase(std::remove(text.begin(), text.end(), '|'), text.end());
        for (int token : tokenizer.encode(text)) found += (found.empty() ? "" : "|") + tokenizer.decode(token);
        if (found != expected) wrong += found + ", expected " + expected + "; ";
    }
    expect(wrong.empty(), "the pair that is first in the table is merged first; of equal pairs the leftmost", wrong);
}

// Two added tokens, of which one begins with the other, and a template that puts them around each text.
TEST("tokenizer: added tokens and template") {
    json file = reference_json();
    json &added = file["added_tokens"], pieces = json::array();
    const int first = 1 + added[0]["id"].get<int>(), second = first + 1;
    added.push_back({{"content", "<a>"}, {"id", first}, {"special", true}});
    added.push_back({{"content", "<a>b"}, {"id", second}, {"special", false}});
    for (const auto& [kind, id] : {std::pair("SpecialToken", "<a>"), {"Sequence", "A"}, {"SpecialToken", "<a>b"}})
        pieces.push_back({{kind, {{"id", id}}}});
    file["post_processor"] = {{"type", "TemplateProcessing"}, {"single", pieces}};
    const std::string dir = folder_of_json(file);
    const Tokenizer tokenizer(dir);
    auto token_of = [&](const char* text) { return tokenizer.encode(text)[0]; };
    expect(tokenizer.encode("x<a>bc<a>") == std::vector<int>{token_of("x"), second, token_of("c"), first},
           "of two added tokens the longer one is matched");

    const Text small(dir, 1 << 16), large(dir, (1 << 16) + 1);
    std::vector<int> prompt = tokenizer.encode("two words");
    prompt.insert(prompt.begin(), first);
    expect(small.encode("two words") == prompt, "a prompt begins with the template's tokens before the text");
    const std::vector<int> whole = all_tokens(tokenizer, "two words");
    expect(whole.back() == second, "the tokens of a text end with the template's tokens after it");
    const std::vector<uint16_t> narrow(whole.begin(), whole.end());
    auto bytes = [](const auto& tokens) {
        const char* begin = reinterpret_cast<const char*>(tokens.data());
        return std::vector<char>(begin, begin + tokens.size() * sizeof(tokens[0]));
    };
    expect(small.encode_file("two words") == bytes(narrow) && large.encode_file("two words") == bytes(whole),
           "a file's text has the template's tokens around it, in 2 bytes up to a vocabulary of 65536, otherwise in 4");
    expect(small.bytes_of(first) == 0 && small.bytes_of(second) == 4 && small.bytes_of(token_of("x")) == 1,
           "special tokens count no bytes of text, other added tokens do");
}

static uint64_t next_random(uint64_t& state) {
    return (state = state * 6364136223846793005 + 1442695040888963407) >> 33;
}

TEST("tokenizer: any bytes") {
    const Tokenizer tokenizer(REFERENCE);
    uint64_t state = 1;
    int wrong = 0;
    for (int i = 0; i < 3000; i++) {
        std::string bytes;
        for (uint64_t n = next_random(state) % 40; n > 0; n--)
            bytes += static_cast<char>(next_random(state) % (next_random(state) % 256 + 1));
        wrong += decode(tokenizer, tokenizer.encode(bytes)) != bytes;
    }
    expect(wrong == 0, "decode(encode(bytes)) == bytes for 3000 random texts");
    expect(tokenizer.decode(-1).empty() && tokenizer.decode(static_cast<int>(tokenizer.size())).empty(),
           "decode() of an invalid token is empty");
    for (const char* unit : {"a", "the", "\xff"}) {   // O(n log n): with O(n^2) the test would not end
        std::string word;
        while (word.size() < 1 << 20) word += unit;
        expect(decode(tokenizer, tokenizer.encode(word)) == word, std::string("a word of 1 MiB is encoded: ") +
                                                                      (unit[0] == '\xff' ? "invalid bytes" : unit));
    }
}

// ==== rejected files =====================================================================================

// Expects that Tokenizer(dir) throws a UserError whose message contains all of `parts`.
static void expect_rejected(const std::string& what, const std::string& dir, const std::vector<std::string>& parts) {
    std::string error;
    try {
        const Tokenizer tokenizer(dir);
    } catch (const UserError& rejection) {
        error = rejection.what();
    }
    bool all = !error.empty();
    for (const std::string& part : parts) all = all && contains(error, part);
    expect(all, what + " is rejected", error.substr(0, 200));
}

TEST("tokenizer: rejected files") {
    const json good = reference_json();
    expect_rejected("vocab.json without merges.txt", folder_of({{"vocab.json", good["model"]["vocab"].dump()}}),
                    {"merges.txt: No such file"});
    const int count = static_cast<int>(good["model"]["vocab"].size()) + 1;
    const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, special = {{"SpecialToken", {{"id", "X"}}}};
    auto template_of = [](json pieces) { return json{{"type", "TemplateProcessing"}, {"single", pieces}}; };
    json renamed = good["model"]["vocab"];   // byte 33 without a token
    renamed["!!!"] = renamed["!"];
    renamed.erase("!");
    struct Case { const char* path; json value; std::vector<std::string> parts; };   // path "/-": adds to a list
    const std::vector<Case> CASES = {
        {"/post_processor", template_of(json::array()), {"sequence A"}},
        {"/post_processor", template_of({text, text}), {"sequence A"}},
        {"/post_processor", template_of({{{"Sequence", {{"id", "B"}}}}}), {"\"B\""}},
        {"/post_processor", template_of({special, text}), {"\"X\"", "added tokens"}},
        {"/post_processor", {{"type", "BertProcessing"}}, {"BertProcessing"}},
        {"/model/merges/-", {"zq", "qz"}, {"merge 500", "'zqqz'"}},
        {"/model/merges/-", "a b c", {"merge 500", "a b c"}},
        {"/model/merges/-", 7, {"merge 500", "7"}},
        {"/model/merges/-", good["model"]["merges"][3], {"merge 500", "twice"}},
        {"/model/vocab/!", 900, {"'!'", "900", std::to_string(count - 1)}},
        {"/model/vocab/!", 1, {"'!'", "'\"'", "both"}},
        {"/model/vocab/!", 1.5, {"'!'", "1.5"}},
        {"/model/vocab/!", -1, {"'!'", "-1"}},
        {"/model/vocab", renamed, {"byte 33", "'!'", "256"}},
        {"/added_tokens/0/id", count - 2, {"both", std::to_string(count - 2)}},
        {"/added_tokens/0/lstrip", true, {"<|endoftext|>", "lstrip"}},
        {"/model/type", "WordPiece", {"WordPiece", "BPE"}},
        {"/pre_tokenizer", {{"type", "Sequence"}}, {"pre_tokenizer/type", "Sequence", "ByteLevel"}},
        {"/pre_tokenizer", nullptr, {"pre_tokenizer", "ByteLevel"}},
        {"/normalizer", {{"type", "NFC"}}, {"normalizer", "NFC"}}};
    for (const Case& c : CASES) {
        json file = good;
        file[json::json_pointer(c.path)] = c.value;
        std::vector<std::string> parts = c.parts;
        parts.push_back(folder_of_json(file) + "/tokenizer.json: ");
        expect_rejected(std::string(c.path) + ": " + c.value.dump().substr(0, 70), folder_of_json(file), parts);
    }
    for (const std::string text : {"", "{", "[1, 2]", "{\"model\": 3}", "\"x\""})
        expect_rejected("tokenizer.json with the text '" + text + "'", folder_of({{"tokenizer.json", text}}),
                        {"tokenizer.json: "});
    expect_rejected("tokenizer.json with a million nested arrays",
                    folder_of({{"tokenizer.json", std::string(1000000, '[')}}), {"levels deep"});
    const std::pair<const char*, std::vector<std::string>> CONFIGS[] = {
        {R"({"tokenizer_class": "RobertaTokenizer"})", {"tokenizer_config.json", "RobertaTokenizer"}},
        {R"({"added_tokens_decoder": {"258": {"content": "NEW", "lstrip": true}}})", {"'NEW'", "lstrip"}},
        {R"({"added_tokens_decoder": {"256": {"content": "NEW"}}})", {"'NEW'", "'<|endoftext|>'", "both", "256"}},
        {R"({"added_tokens_decoder": {"x": {"content": "NEW"}}})", {"'NEW'", "\"x\""}},
        {"[1]", {"tokenizer_config.json", "[1]"}},
        {"version https://git-lfs.github.com/spec/v1\n", {"tokenizer_config.json", "git lfs pull"}}};
    for (const auto& [config, parts] : CONFIGS) {
        auto files = small_tokenizer("split");
        files.push_back({"tokenizer_config.json", config});
        expect_rejected(std::string("tokenizer_config.json ") + config, folder_of(files), parts);
    }
    const std::string empty = folder_of({});
    mkfifo((empty + "/tokenizer.json").c_str(), 0600);
    expect_rejected("a named pipe as tokenizer.json", empty, {"tokenizer.json: not a regular file"});
}

// ==== main ===============================================================================================

int main(int argc, char** argv) {
    if (argc != 3 || std::string(argv[1]) != "--reference") return run_tests(argc, argv, "--reference DIR");
    REFERENCE = argv[2];
    return run_tests("tokenizer: cases");
}

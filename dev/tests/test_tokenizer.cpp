// Tests of tokenizer.h, a claim a line; run in the repository's root.
//
//   test_tokenizer                 the claims
//   test_tokenizer --encode DIR    for check_tokenizer.py: reads texts (a uint32 of bytes, then these) from standard
//                                  input, writes the tokens of each (a uint32 of tokens, then an int32 each)
#include "../../gpt/tokenizer.h"

#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>

namespace fs = std::filesystem;

static int passed = 0, failed = 0;

static void claim(bool holds, const std::string& what, const std::string& detail = "") {
    const std::string numbers = detail.empty() ? "" : " (" + detail + ")";
    printf("%s  %s%s\n", holds ? "ok    " : "FAILED", what.c_str(), numbers.c_str());
    fflush(stdout);
    ++(holds ? passed : failed);
}

static const std::string REFERENCE = "data/reference/tokenizer";

static std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

static void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

// A folder for tokenizers that the tests write, gone at the end.
struct Scratch {
    std::string dir = (fs::temp_directory_path() / "gpt_tokenizer_XXXXXX").string();
    Scratch() { if (!mkdtemp(dir.data())) throw std::runtime_error(dir + ": cannot be made"); }
    ~Scratch() { fs::remove_all(dir); }
    void keep_only(const std::vector<std::pair<std::string, std::string>>& files) const {
        for (const auto& entry : fs::directory_iterator(dir)) fs::remove_all(entry.path());
        for (const auto& [name, content] : files) write_bytes(dir + "/" + name, content);
    }
};

static std::string from_hex(const std::string& hex) {
    std::string bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    return bytes;
}

// ==== the same tokens ====================================================================================

// On how many of the cases that tokenizers and tiktoken have answered a folder's tokenizer does not answer the same.
static int differences(const std::string& dir, const json& cases) {
    const Tokenizer tokenizer(dir);
    int count = 0;
    for (const json& one : cases) {
        const std::string text = from_hex(one["hex"]);
        const std::vector<int> tokens = tokenizer.encode(text);
        const bool same = tokens == one["tokens"].get<std::vector<int>>() && tokenizer.decode(tokens) == text;
        if (!same && count++ == 0) printf("        first difference: %s\n", one.dump().substr(0, 300).c_str());
    }
    return count;
}

static void test_cases(const Scratch& scratch) {
    const json cases = json::parse(read_bytes(REFERENCE + "/cases.json"));
    json file = json::parse(read_bytes(REFERENCE + "/tokenizer.json"));
    const std::string detail = std::to_string(cases.size()) + " texts";
    claim(cases.size() > 100 && differences(REFERENCE, cases) == 0,
          "the tokens of tokenizers and, for broken UTF-8, of tiktoken's merges; and back", detail);
    claim(file["model"]["merges"][0].is_array(), "their tokenizer.json has its merges as pairs");
    for (json& merge : file["model"]["merges"])
        merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    scratch.keep_only({{"tokenizer.json", file.dump()}});
    claim(differences(scratch.dir, cases) == 0, "the same with merges as \"a b\"", detail);
    const std::string vocabulary = read_bytes(REFERENCE + "/vocab.json");
    const std::string merges = read_bytes(REFERENCE + "/merges.txt");
    scratch.keep_only({{"vocab.json", vocabulary}, {"merges.txt", merges}});
    claim(differences(scratch.dir, cases) == 0, "the same from vocab.json and merges.txt", detail);
}

// What the pattern makes of a text, with a bar before each word.
static std::string cut(const std::string& text) {
    std::string out;
    WordPattern().for_each_word(text, [&](std::string_view word) { out += "|" + std::string(word); });
    return out;
}

static void test_words() {
    const std::vector<std::pair<std::string, std::string>> CASES = {
        {"It's 12 o'clock, isn't it?", "|It|'s| 12| o|'|clock|,| isn|'t| it|?"},
        {"a  b   c  ", "|a| | b|  | c|  "}, {"x\n\n y", "|x|\n\n| y"},
        {"caf\xc3\xa9 \xd0\xb4\xd0\xb0\xc2\xbd", "|caf\xc3\xa9| \xd0\xb4\xd0\xb0|\xc2\xbd"},
        {"!\xe1\xa0\x8e!", "|!\xe1\xa0\x8e!"}, {"!\xc2\x85!", "|!|\xc2\x85|!"},   // U+180E is no white space, U+0085 is
        {"a\xff\xc3!b", "|a|\xff\xc3!|b"}, {" \xe2\x82 x", "| \xe2\x82| x"}, {"", ""}};
    std::string wrong;
    for (const auto& [text, expected] : CASES)
        if (cut(text) != expected) wrong += "'" + cut(text) + "', expected '" + expected + "'; ";
    claim(wrong.empty(), "words are GPT-2's; a broken byte is neither letter, number nor space", wrong);
}

static void test_characters() {
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
    claim(wrong == 0, "every character of Unicode is one, no part of it is", std::to_string(wrong) + " are not");
    std::string taken;
    for (const char* broken : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                               "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3("})
        if (character_length(broken) != 0) taken += std::string(taken.empty() ? "" : " ") + broken;
    claim(taken.empty(), "no byte too many, surrogate, or character above U+10FFFF is", taken);
}

// A tokenizer of bytes and four merges, with tokens that can be told by hand.
static void test_order_of_merges(const Scratch& scratch) {
    json file = json::parse(read_bytes(REFERENCE + "/tokenizer.json"));
    file["model"]["vocab"] = json::object();
    file["model"]["merges"] = json::array();
    for (const std::string& byte : byte_alphabet()) file["model"]["vocab"][byte] = file["model"]["vocab"].size();
    for (const auto& [left, right] : {std::pair("a", "b"), {"a", "a"}, {"aa", "aa"}, {"b", "a"}}) {
        file["model"]["vocab"][std::string(left) + right] = file["model"]["vocab"].size();
        file["model"]["merges"].push_back({left, right});
    }
    file["added_tokens"][0]["id"] = file["model"]["vocab"].size();
    scratch.keep_only({{"tokenizer.json", file.dump()}});
    const Tokenizer tokenizer(scratch.dir);
    std::string wrong;
    for (const std::string expected : {"aa|a", "a|ab", "aaaa|a", "aaaa|aa|a", "ab|ab", "b|ab|ab", "ba|c|ba",
                                       "aa|ab|ba|c"}) {
        std::string text = expected, found;
        text.erase(std::remove(text.begin(), text.end(), '|'), text.end());
        for (int token : tokenizer.encode(text)) found += (found.empty() ? "" : "|") + tokenizer.decode(token);
        if (found != expected) wrong += found + ", expected " + expected + "; ";
    }
    claim(wrong.empty(), "the pair that stands first in the table is merged first, the leftmost of equals", wrong);
}

// ==== any bytes, of any length ===========================================================================

static void test_any_bytes() {
    const Tokenizer tokenizer(REFERENCE);
    uint64_t state = 1;
    auto random = [&] { return (state = state * 6364136223846793005 + 1442695040888963407) >> 33; };
    int wrong = 0;
    for (int i = 0; i < 3000; i++) {
        std::string bytes;
        for (uint64_t n = random() % 40; n > 0; n--) bytes += static_cast<char>(random() % (random() % 256 + 1));
        wrong += tokenizer.decode(tokenizer.encode(bytes)) != bytes;
    }
    claim(wrong == 0, "decode(encode(bytes)) is the bytes, whatever they are", "3000 random texts");
    claim(tokenizer.decode(-1).empty() && tokenizer.decode(static_cast<int>(tokenizer.size())).empty(),
          "a number that is no token has no text");
}

// Whether texts of many line breaks have the same tokens whole and in pieces; `cut`: how many pieces there were.
static bool same_in_pieces(const Tokenizer& tokenizer, int& cut) {
    const std::vector<std::string> SCRAPS = {
        "\n", "\n", "\n", "\r\n", " ", " \n", "\n ", "\t", "a", "The", "'s", "'", "12", "\u00e9", "\u3000", "\u0085",
        "\xff", "!", "<|endoftext|>", "a\nb", "<|", "|>\n"};
    uint64_t state = 1;
    auto random = [&] { return (state = state * 6364136223846793005 + 1442695040888963407) >> 33; };
    for (int i = 0; i < 3000; i++) {
        std::string text;
        for (uint64_t n = random() % 60; n > 0; n--) text += SCRAPS[random() % SCRAPS.size()];
        std::vector<int> tokens;
        const size_t least = 1 + random() % 8;
        for (size_t begin = 0, end; begin < text.size(); begin = end, cut++) {
            end = tokenizer.piece_end(text, begin, least);
            const std::vector<int> more = tokenizer.encode(std::string_view(text).substr(begin, end - begin));
            tokens.insert(tokens.end(), more.begin(), more.end());
        }
        if (tokens != tokenizer.encode(text)) return false;
    }
    return true;
}

static void test_pieces(const Scratch& scratch) {
    int pieces = 0, of_added = 0;
    json file = json::parse(read_bytes(REFERENCE + "/tokenizer.json"));
    json& model = file["model"];
    const std::string space = byte_alphabet()[' '], line = byte_alphabet()['\n'];
    int last = 0;
    for (const json& entry : file["added_tokens"]) last = std::max(last, entry["id"].get<int>());
    for (const auto& [left, right] : {std::pair(line, line), {space, line}, {line, space}, {space, space}}) {
        if (model["vocab"].contains(left + right)) continue;   // white space of which tokens are made: a cut would show
        model["vocab"][left + right] = ++last;
        model["merges"].push_back({left, right});
    }
    scratch.keep_only({{"tokenizer.json", file.dump()}});
    const bool same = same_in_pieces(Tokenizer(scratch.dir), pieces);
    claim(same && pieces > 10000, "a text in pieces has the tokens that it has whole",
          std::to_string(pieces) + " pieces");
    json added = file["added_tokens"][0];
    added["content"] = "a\nb";
    added["id"] = ++last;
    file["added_tokens"].push_back(added);
    scratch.keep_only({{"tokenizer.json", file.dump()}});
    claim(same_in_pieces(Tokenizer(scratch.dir), of_added), "also where an added token has a line break in it");
}

static double seconds_of(const std::function<void()>& work) {
    timespec begin, end;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    work();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    return static_cast<double>(end.tv_sec - begin.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
}

// Sixteen times the bytes: O(n log n) takes some twenty times as long, O(n^2) 256 times.
static void test_long_words() {
    const Tokenizer tokenizer(REFERENCE);
    for (const char* unit : {"a", "the", "\xff"}) {
        double seconds[2];
        bool same = true;
        for (int large = 0; large < 2; large++) {
            const size_t n = large ? 1 << 20 : 1 << 16;
            std::string word;
            while (word.size() < n) word += unit;
            seconds[large] = seconds_of([&] { same = same && tokenizer.decode(tokenizer.encode(word)) == word; });
        }
        char detail[100];
        snprintf(detail, sizeof(detail), "64 KiB: %.3f s, 1 MiB: %.3f s", seconds[0], seconds[1]);
        claim(same && seconds[1] < 80 * seconds[0], std::string("a word of 1 MiB of '") +
              (unit[0] == '\xff' ? "broken bytes" : unit) + "' takes no quadratic time", detail);
    }
}

// ==== files that transformers and tokenizers saved ===========================================================

static std::vector<int> joined(std::vector<int> before, const std::vector<int>& text, const std::vector<int>& after) {
    before.insert(before.end(), text.begin(), text.end());
    before.insert(before.end(), after.begin(), after.end());
    return before;
}

static void test_saved(const Scratch& scratch) {
    const json cases = read_json(REFERENCE + "/saved.json");
    for (const json& saved : cases) {
        scratch.keep_only({{"tokenizer.json", saved["file"].dump()}});
        const Tokenizer tokenizer(scratch.dir);
        bool same = true;
        for (const auto& [text, tokens] : saved["tokens"].items())
            same = same && tokens == joined(tokenizer.before(), tokenizer.encode(text), tokenizer.after());
        claim(same, "texts have the tokens of " + saved["by"].get<std::string>());
    }
}

// ==== broken files =======================================================================================

static void refuse(const std::string& what, const std::string& dir, const std::vector<std::string>& named) {
    std::string said = "nothing";
    try {
        const Tokenizer tokenizer(dir);
    } catch (const UserError& error) {
        said = error.what();
    }
    bool all = said != "nothing";
    for (const std::string& word : named) all = all && said.find(word) != said.npos;
    claim(all, what + " is refused", said.substr(0, 200));
}

static void test_broken_json(const Scratch& scratch) {
    const json good = json::parse(read_bytes(REFERENCE + "/tokenizer.json"));
    const size_t count = good["model"]["vocab"].size() + 1;
    auto refuse_json = [&](const std::string& what, const std::vector<std::string>& named,
                           const std::function<void(json&)>& spoil) {
        json file = good;
        spoil(file);
        scratch.keep_only({{"tokenizer.json", file.dump()}});
        std::vector<std::string> all = named;
        all.push_back(scratch.dir + "/tokenizer.json: ");
        refuse(what, scratch.dir, all);
    };
    for (const std::string text : {"", "{", "[1, 2]", "{\"model\": 3}", "\"x\""}) {
        scratch.keep_only({{"tokenizer.json", text}});
        refuse("tokenizer.json of '" + text + "'", scratch.dir, {"tokenizer.json: "});
    }
    fs::remove_all(scratch.dir + "/tokenizer.json");
    fs::create_directory(scratch.dir + "/tokenizer.json");
    refuse("a folder for tokenizer.json", scratch.dir, {"tokenizer.json: a folder, not a regular file"});
    fs::remove(scratch.dir + "/tokenizer.json");
    mkfifo((scratch.dir + "/tokenizer.json").c_str(), 0600);
    refuse("a pipe for tokenizer.json", scratch.dir, {"tokenizer.json: not a regular file"});
    fs::remove(scratch.dir + "/tokenizer.json");
    scratch.keep_only({{"tokenizer.json", std::string(1000000, '[')}});
    refuse("tokenizer.json a million levels deep", scratch.dir, {"tokenizer.json: ", "levels deep"});
    const json text_piece = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    auto refuse_template = [&](const std::string& what, const std::vector<std::string>& named, const json& single) {
        const json special = {{"X", {{"id", "X"}, {"ids", {99999}}, {"tokens", {"X"}}}}};
        refuse_json(what, named, [&](json& f) {
            f["post_processor"] = {{"type", "TemplateProcessing"}, {"single", single}, {"special_tokens", special}};
        });
    };
    refuse_template("a template without a text", {"no sequence A"}, json::array());
    refuse_template("a template with two texts", {"one sequence A"}, {text_piece, text_piece});
    refuse_template("a template with text B", {"Sequence.id\" is \"B\""}, {{{"Sequence", {{"id", "B"}}}}});
    refuse_template("a template with an unknown token", {"99999"}, {{{"SpecialToken", {{"id", "X"}}}}, text_piece});
    refuse_json("another post-processor", {"\"BertProcessing\"", "\"TemplateProcessing\""},
                [](json& f) { f["post_processor"] = {{"type", "BertProcessing"}}; });
    refuse_json("a merge of an unknown token", {"merge 500", "'zq qz'", "'zqqz'", "no token"},
                [](json& f) { f["model"]["merges"].push_back({"zq", "qz"}); });
    refuse_json("a merge of three", {"merge 500", "'a b c'", "two tokens"},
                [](json& f) { f["model"]["merges"].push_back("a b c"); });
    refuse_json("a merge that is a number", {"merge 500", "7", "\"a b\""},
                [](json& f) { f["model"]["merges"].push_back(7); });
    refuse_json("a merge given twice", {"merge 500", "twice"},
                [](json& f) { f["model"]["merges"].push_back(f["model"]["merges"][3]); });
    refuse_json("a hole in the ids", {"'!'", "900", "at most " + std::to_string(count - 1)},
                [](json& f) { f["model"]["vocab"]["!"] = 900; });
    refuse_json("an id of two tokens", {"'!'", "'\"'", "both", "1"}, [](json& f) { f["model"]["vocab"]["!"] = 1; });
    refuse_json("an id that is no number", {"'!'", "1.5"}, [](json& f) { f["model"]["vocab"]["!"] = 1.5; });
    refuse_json("an id below zero", {"'!'", "-1"}, [](json& f) { f["model"]["vocab"]["!"] = -1; });
    refuse_json("an added token with the id of another", {"both", std::to_string(count - 2)},
                [&](json& f) { f["added_tokens"][0]["id"] = count - 2; });
    refuse_json("a byte that is no token", {"byte 33", "'!'", "256"}, [](json& f) {
        f["model"]["vocab"]["!!!"] = f["model"]["vocab"]["!"];
        f["model"]["vocab"].erase("!");
    });
    refuse_json("another kind of model", {"model.type", "WordPiece", "BPE"},
                [](json& f) { f["model"]["type"] = "WordPiece"; });
    refuse_json("another pattern", {"pre_tokenizer.type", "Sequence", "ByteLevel"},
                [](json& f) { f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", json::array()}}; });
    refuse_json("no pattern", {"pre_tokenizer.type", "null", "ByteLevel"}, [](json& f) { f.erase("pre_tokenizer"); });
    refuse_json("a space before every text", {"add_prefix_space", "true"},
                [](json& f) { f["pre_tokenizer"]["add_prefix_space"] = true; });
    refuse_json("a normalizer", {"normalizer", "NFC"}, [](json& f) { f["normalizer"] = {{"type", "NFC"}}; });
    refuse_json("an added token that eats spaces", {"<|endoftext|>", "lstrip"},
                [](json& f) { f["added_tokens"][0]["lstrip"] = true; });
}

static void test_broken_pair(const Scratch& scratch) {
    const std::string vocabulary = read_bytes(REFERENCE + "/vocab.json");
    const std::string merges = read_bytes(REFERENCE + "/merges.txt");
    scratch.keep_only({{"vocab.json", vocabulary}});
    refuse("vocab.json alone", scratch.dir, {"merges.txt: No such file"});
    scratch.keep_only({{"merges.txt", merges}});
    refuse("merges.txt alone", scratch.dir, {"vocab.json: No such file"});
    scratch.keep_only({{"vocab.json", "[]"}, {"merges.txt", merges}});
    refuse("a vocab.json that is a list", scratch.dir, {"vocab.json: ", "no object", "[]"});
    scratch.keep_only({{"vocab.json", vocabulary}, {"merges.txt", merges + "zq qz\n"}});
    refuse("a merge of unknown tokens", scratch.dir, {"merges.txt: merge 500", "'zqqz'"});
    scratch.keep_only({{"vocab.json", vocabulary}, {"merges.txt", merges + "lonely\n"}});
    refuse("a line that is no merge", scratch.dir, {"merges.txt: merge 500", "'lonely'"});
}

// ==== main ===============================================================================================

static int encode_input(const std::string& dir) {
    const Tokenizer tokenizer(dir);
    for (uint32_t bytes; fread(&bytes, sizeof(bytes), 1, stdin) == 1;) {
        std::string text(bytes, '\0');
        if (fread(text.data(), 1, bytes, stdin) != bytes) return 2;
        const std::vector<int> tokens = tokenizer.encode(text);
        if (tokenizer.decode(tokens) != text) return 1;
        const uint32_t count = static_cast<uint32_t>(tokens.size());
        fwrite(&count, sizeof(count), 1, stdout);
        fwrite(tokens.data(), sizeof(int), count, stdout);
    }
    return 0;
}

// With --only: how the names of tests to run begin. With --list: names are printed, no test runs.
static std::vector<std::string> wanted;
static bool listing = false;

template <typename Function> void test(const std::string& name, Function function) {
    const auto begins = [&](const std::string& word) { return name.rfind(word, 0) == 0; };
    if (!wanted.empty() && std::none_of(wanted.begin(), wanted.end(), begins)) return;
    printf("%s\n", name.c_str());
    if (listing) return;
    const clock_t begin = clock();
    function();
    printf("        %.1f s\n", double(clock() - begin) / CLOCKS_PER_SEC);
}

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (argc == 3 && what == "--encode") return encode_input(argv[2]);
    listing = argc == 2 && what == "--list";
    if (argc == 3 && what == "--only") {
        std::istringstream names(argv[2]);
        for (std::string name; std::getline(names, name, ',');) wanted.push_back(name);
    } else if (argc != 1 && !listing) {
        fprintf(stderr, "usage: test_tokenizer | test_tokenizer --list | test_tokenizer --only WORDS | "
                        "test_tokenizer --encode DIR\n");
        return 2;
    }
    const Scratch scratch;
    test("tokenizer: characters", test_characters);
    test("tokenizer: words", test_words);
    test("tokenizer: cases", [&] { test_cases(scratch); });
    test("tokenizer: order of merges", [&] { test_order_of_merges(scratch); });
    test("tokenizer: any bytes", test_any_bytes);
    test("tokenizer: pieces", [&] { test_pieces(scratch); });
    test("tokenizer: long words", test_long_words);
    test("tokenizer: saved by transformers", [&] { test_saved(scratch); });
    test("tokenizer: broken JSON", [&] { test_broken_json(scratch); });
    test("tokenizer: broken pairs", [&] { test_broken_pair(scratch); });
    if (!listing) printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

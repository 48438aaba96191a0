// TEST("name") { ... } defines a test, which calls expect() for each fact; run_tests() runs the tests. Also string
// functions and a scratch folder. Used by test_gpt.cu and test_tokenizer.cpp.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;

// ==== strings ================================================================

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

inline std::string replaced(std::string text, const std::string& part, const std::string& by) {
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += by.size()) text.replace(at, part.size(), by);
    return text;
}

inline std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> parts;
    for (size_t at = 0, end; at <= text.size(); at = end + separator.size()) {
        end = std::min(text.size(), text.find(separator, at));
        parts.push_back(text.substr(at, end - at));
    }
    return parts;
}

// ==== results ================================================================

inline int passed = 0, failed = 0;

// Counts and prints a result: one line with "ok" or "FAILED", `text` and, in brackets, `detail`.
inline void expect(bool holds, const std::string& text, const std::string& detail = "") {
    (holds ? passed : failed)++;
    std::string line = detail.empty() ? text : text + " (" + detail + ")";
    std::replace(line.begin(), line.end(), '\n', ' ');   // run_tests.sh reads one line per result
    printf("%s  %s\n", holds ? "ok    " : "FAILED", line.c_str());
    fflush(stdout);
}

// Returns the message of the exception that f throws; "" if f returns.
template <typename F> std::string error_of(F f) {
    try {
        f();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

// ==== tests ==================================================================

struct Test { const char* name; void (*run)(); };
inline std::vector<Test> all_tests;   // in the order of their definitions
struct AddedTest { AddedTest(const char* name, void (*run)()) { all_tests.push_back({name, run}); } };
#define TEST_WITH_NUMBER(name, number) \
    static void test_##number(); \
    static const AddedTest added_test_##number(name, test_##number); \
    static void test_##number()
#define TEST_EXPANDED(name, number) TEST_WITH_NUMBER(name, number)
#define TEST(name) TEST_EXPANDED(name, __COUNTER__)

// Runs a test and prints its time. An exception is a failed result; later tests still run.
inline void run_test(const Test& test) {
    const auto begin = std::chrono::steady_clock::now();
    const std::string error = error_of(test.run);
    if (!error.empty()) expect(false, "the test ends early: an exception", error);
    printf("        %.1f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    fflush(stdout);
}

// Runs the tests whose names start with one of the prefixes in `only`, separated by commas. list_only: prints their
// names instead. Returns the exit code: 0 all results hold, 1 one does not, 2 a prefix matches no test.
inline int run_tests(const std::string& only = "", bool list_only = false) {
    std::map<std::string, int> matches;   // number of tests by prefix
    for (const std::string& prefix : split(only, ",")) matches[prefix] = 0;
    for (const Test& test : all_tests) {
        bool run = false;
        for (auto& [prefix, count] : matches)
            if (std::string(test.name).rfind(prefix, 0) == 0) run = ++count > 0;
        if (!run) continue;
        printf("%s\n", test.name);
        fflush(stdout);   // a kernel may abort the program
        if (!list_only) run_test(test);
    }
    for (const auto& [prefix, count] : matches)
        if (count == 0) {
            fprintf(stderr, "--only: no test's name starts with '%s'; --list prints all names\n", prefix.c_str());
            return 2;
        }
    if (!list_only) printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

// Runs the tests that a command line selects; returns the exit code. `others`: further options for the usage message.
inline int run_tests(int argc, char** argv, const char* others) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (argc == 1 || (argc == 2 && what == "--list")) return run_tests("", argc == 2);
    if (argc == 3 && what == "--only") return run_tests(argv[2]);
    fprintf(stderr, "usage: %s [--list | --only NAME,NAME... | %s]\n"
                    "--only runs the tests whose names start with a NAME, such as kernels or kernels: attention\n",
            argv[0], others);
    return 2;
}

// ==== files ==================================================================

// A temporary folder for all files that the tests write, removed at the end.
struct ScratchFolder {
    std::string path = (fs::temp_directory_path() / "tests.XXXXXX").string();

    ScratchFolder() {
        if (!mkdtemp(path.data())) throw std::runtime_error(path + ": mkdtemp failed");
    }
    ~ScratchFolder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
};

// Returns the text with each @ replaced by the path of the scratch folder.
inline std::string scratch(const std::string& text) {
    static const ScratchFolder folder;
    return replaced(text, "@", folder.path);
}

// Returns the contents of a file; "" if it cannot be read. The path may contain @.
inline std::string read_bytes(const std::string& path) {
    std::ifstream file(scratch(path), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(scratch(path), std::ios::binary).write(bytes.data(), bytes.size());
}

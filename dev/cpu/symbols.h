// The program's ELF symbol table: names of kernels, __shared__ arrays, which are thread_local variables here, and
// variables (__device__, __constant__, __managed__). (A stripped program has no symbol table: nothing is found.)
#pragma once

#include <elf.h>
#include <stdint.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

extern "C" char __executable_start, _end;  // defined by the linker: where the program was loaded, and its end

namespace cuda_cpu {
class Symbols {
public:
    // Returns the table of this program, which is read at the first call.
    static const Symbols& of_program() {
        static const Symbols* const value = new Symbols;
        return *value;
    }

    // Fills all arrays of this worker with 0xff bytes: NaN in every float type. anchor: &threadIdx of this worker.
    void fill(const void* anchor) const {
        for (const Array& a : arrays_) memset(const_cast<char*>(place(anchor, a)), 0xff, a.bytes);
    }

    // Returns the bytes of the arrays that the kernel itself declares or, if more, of those noted by note_used().
    size_t bytes_of(const void* kernel) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto noted = used_.find(kernel);
        return std::max(declared_bytes(kernel), noted == used_.end() ? 0 : noted->second);
    }

    // Notes which arrays a block of the kernel has written since fill(): those of the functions that it calls, too.
    // (On a GPU they also take the space that aligns dynamic shared memory after them.)
    void note_used(const void* kernel, const void* anchor) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t bytes = 0;
        for (const Array& a : arrays_) {
            const char* const begin = place(anchor, a);
            if (std::any_of(begin, begin + a.bytes, [](char c) { return c != '\xff'; })) bytes += a.bytes;
        }
        used_[kernel] = std::max(used_[kernel], bytes);
    }
    // Returns the mangled name of a kernel, or "" if it is unknown.
    const char* name_of(const void* kernel) const {
        const auto function = functions_.find(reinterpret_cast<uintptr_t>(kernel) - loaded_at_);
        return function == functions_.end() ? "" : function->second.c_str();
    }

    // Calls f(address, bytes, name) for each of this worker's arrays.
    template <class F> void each_array(const void* anchor, F f) const {
        for (const Array& a : arrays_) f(place(anchor, a), a.bytes, a.name.c_str());
    }

    // A variable with static storage duration. The symbol table does not tell a __device__ variable from a variable of
    // the host, but a kernel can access only the former.
    struct Variable {
        std::string name;      // mangled; empty: of the emulator, the C++ library or the compiler
        const void* place;
        size_t bytes;
        bool is_writable;
    };
    const std::vector<Variable>& variables() const { return variables_; }

private:
    struct Array {
        std::string name;
        int64_t at;  // offset in thread-local storage
        size_t bytes;
    };
    std::vector<Array> arrays_;
    std::vector<Variable> variables_;
    std::map<uintptr_t, std::string> functions_;
    int64_t anchor_ = 0;  // offset of threadIdx in thread-local storage
    uintptr_t loaded_at_ = 0;

    mutable std::mutex mutex_;
    mutable std::map<const void*, size_t> used_;

    size_t declared_bytes(const void* kernel) const {
        const std::string function = name_of(kernel);
        if (function.empty()) return 0;
        const std::string beginning = "_ZZ" + function.substr(2) + "E";
        size_t bytes = 0;
        for (const Array& a : arrays_)
            if (a.name.rfind(beginning, 0) == 0) bytes += a.bytes;
        return bytes;
    }

    // Returns the address of an array for the worker whose threadIdx is at `anchor`. (If the pointer were not volatile,
    // -D_FORTIFY_SOURCE would report a memset of the array as an overflow of threadIdx and end the program.)
    const char* place(const void* anchor, const Array& a) const {
        const void* volatile hidden = anchor;
        return static_cast<const char*>(hidden) + (a.at - anchor_);
    }

    Symbols() {
        std::ifstream file("/proc/self/exe", std::ios::binary);
        const std::string program((std::istreambuf_iterator<char>(file)), {});
        Elf64_Ehdr header;
        if (!read(program, 0, &header)) return;
        if (header.e_type == ET_DYN) loaded_at_ = reinterpret_cast<uintptr_t>(&__executable_start);
        for (unsigned i = 0; i < header.e_shnum; i++) {
            Elf64_Shdr symbols, names;
            if (!read(program, header.e_shoff + i * header.e_shentsize, &symbols) || symbols.sh_type != SHT_SYMTAB)
                continue;
            if (!read(program, header.e_shoff + symbols.sh_link * header.e_shentsize, &names)) continue;
            Elf64_Sym symbol;
            for (size_t at = 0; at < symbols.sh_size && read(program, symbols.sh_offset + at, &symbol);
                 at += sizeof(symbol)) {
                const size_t name = std::min<size_t>(program.size(), names.sh_offset + symbol.st_name);
                add_symbol(symbol, program.c_str() + name);
                Elf64_Shdr section;
                if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT && symbol.st_size > 0 &&
                    read(program, header.e_shoff + symbol.st_shndx * header.e_shentsize, &section))
                    add_variable(symbol, program.c_str() + name, (section.sh_flags & SHF_WRITE) != 0);
            }
        }
    }

    // Copies an object from offset `at` of the program's file. Returns false if it does not lie within the file.
    template <class T> static bool read(const std::string& program, size_t at, T* to) {
        if (at > program.size() || program.size() - at < sizeof(T)) return false;
        memcpy(to, program.data() + at, sizeof(T));
        return true;
    }

    // Returns whether a variable is one of the emulator, a library or the compiler.
    static bool is_internal(const std::string& name) {
        if (name.rfind("_Z", 0) != 0) return name.rfind("__", 0) == 0 || name.find('@') != std::string::npos;
        const size_t scope = std::min(name.find_first_not_of("ZNKL", 2), name.size());
        // S: namespace std; T and G: what the compiler generates, such as tables of virtual functions
        return name.compare(scope, 9, "8cuda_cpu") == 0 || strchr("STG", name[scope]) != nullptr;
    }

    // Adds a variable. Constants of a function are in its code or in registers on a GPU, so they do not count.
    void add_variable(const Elf64_Sym& symbol, const std::string& name, bool is_writable) {
        const bool is_in_code = !is_writable && name.rfind("_ZZ", 0) == 0;
        const void* const place = reinterpret_cast<const void*>(loaded_at_ + symbol.st_value);
        variables_.push_back({is_in_code || is_internal(name) ? "" : name, place, symbol.st_size, is_writable});
    }

    // Adds a function or an array. The mangled name of a variable in a function begins with "_ZZ".
    void add_symbol(const Elf64_Sym& symbol, const std::string& name) {
        const unsigned type = ELF64_ST_TYPE(symbol.st_info);
        if (type == STT_FUNC) functions_.emplace(symbol.st_value, name);
        if (type != STT_TLS) return;
        const auto at = static_cast<int64_t>(symbol.st_value);
        if (name == "threadIdx") anchor_ = at;
        if (name.rfind("_ZZ", 0) == 0 && !is_internal(name)) arrays_.push_back({name, at, symbol.st_size});
    }
};
}  // namespace cuda_cpu

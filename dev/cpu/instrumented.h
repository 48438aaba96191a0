// The functions that code calls if it is compiled with -fsanitize=thread, alignment and bounds.
// dev/inspect/recorder.cpp, which includes this file at its end, has what they call.
#pragma once

using namespace cuda_cpu::watch;

#define INSPECT_ACCESS(name, kind, bytes)                                      \
    extern "C" void name(void* address) {                                      \
        access(kind, By::THREAD, address, bytes, __builtin_return_address(0)); \
        let_others_run(address);                                               \
    }
#define INSPECT_WIDTH(prefix, bytes)                                           \
    INSPECT_ACCESS(__tsan_##prefix##read##bytes, Access::LOAD, bytes)          \
    INSPECT_ACCESS(__tsan_##prefix##write##bytes, Access::STORE, bytes)
#define INSPECT_WIDTHS(prefix)                                                 \
    INSPECT_WIDTH(prefix, 1)                                                   \
    INSPECT_WIDTH(prefix, 2)                                                   \
    INSPECT_WIDTH(prefix, 4)                                                   \
    INSPECT_WIDTH(prefix, 8)                                                   \
    INSPECT_WIDTH(prefix, 16)
INSPECT_WIDTHS()
INSPECT_WIDTHS(unaligned_)
INSPECT_WIDTHS(volatile_)
extern "C" void __tsan_read_range(void* address, size_t bytes) {
    access(Access::LOAD, By::THREAD, address, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
    access(Access::STORE, By::THREAD, address, bytes, __builtin_return_address(0));
}

// Called with -fsanitize=bounds: an index outside of an array with a constant size, as GCC describes it.
struct WrongIndex {
    struct Type {
        uint16_t kind, info;
        char name[];
    };
    const char* file;
    uint32_t line, column;
    const Type *array_type, *index_type;
};
extern "C" void __ubsan_handle_out_of_bounds(const WrongIndex* wrong, uintptr_t index) {
    wrong_index(wrong->array_type->name, static_cast<int64_t>(index), __builtin_return_address(0));
}
// Called with -fsanitize=alignment: a pointer or reference to an address that is misaligned for its type.
struct WrongAddress {
    const char* file;
    uint32_t line, column;
    const WrongIndex::Type* type;
    uint8_t log_of_alignment, use;
};
extern "C" void __ubsan_handle_type_mismatch_v1(const WrongAddress* wrong, uintptr_t address) {
    constexpr uint8_t store = 1;
    check_alignment(address, uint64_t{1} << wrong->log_of_alignment, wrong->type->name,
                    wrong->use == store ? Access::STORE : Access::LOAD, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void* caller) { entered(caller); }
extern "C" void __tsan_func_exit() { left(); }
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

static void accessed_atomically(const volatile void* place, size_t bytes, const void* pc,
                                Access kind = Access::STORE) {
    const void* const address = const_cast<const void*>(place);
    check_alignment(reinterpret_cast<uintptr_t>(address), bytes, "an atomic function", kind, pc);
    access(kind, By::ATOMIC, address, bytes, pc);
    let_others_run(address);
}

// Relaxed loads are not recorded: dev/cpu implements some atomics by a load and a compare-and-exchange loop.
#define INSPECT_ATOMIC_OP(bits, result, name, operation, ...)                                                   \
    extern "C" result __tsan_atomic##bits##_##name(volatile uint##bits##_t* place, __VA_ARGS__, int) {          \
        accessed_atomically(place, bits / 8, __builtin_return_address(0));                                      \
        return operation;                                                                                       \
    }
#define INSPECT_ATOMIC_CHANGE(bits, name, change)                                                               \
    INSPECT_ATOMIC_OP(bits, uint##bits##_t, name, change(place, value, __ATOMIC_SEQ_CST), uint##bits##_t value)
#define INSPECT_ATOMIC_COMPARE(bits, name)                                                                      \
    INSPECT_ATOMIC_OP(bits, int, name,                                                                          \
                      (compared(place), __atomic_compare_exchange_n(place, old, value, false, __ATOMIC_SEQ_CST, \
                                                                    __ATOMIC_SEQ_CST)),                         \
                      uint##bits##_t* old, uint##bits##_t value, int)
#define INSPECT_ATOMIC(bits)                                                                                    \
    extern "C" uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* place, int order) {     \
        if (order == __ATOMIC_RELAXED) loaded_to_change();                                                      \
        else accessed_atomically(place, bits / 8, __builtin_return_address(0), Access::LOAD);                   \
        return __atomic_load_n(place, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                           \
    extern "C" void __tsan_atomic##bits##_store(volatile uint##bits##_t* place, uint##bits##_t value, int) {    \
        overwritten(place, bits / 8);                                                                           \
        accessed_atomically(place, bits / 8, __builtin_return_address(0));                                      \
        __atomic_store_n(place, value, __ATOMIC_SEQ_CST);                                                       \
    }                                                                                                           \
    INSPECT_ATOMIC_COMPARE(bits, compare_exchange_strong)                                                       \
    INSPECT_ATOMIC_COMPARE(bits, compare_exchange_weak)                                                         \
    INSPECT_ATOMIC_CHANGE(bits, exchange, __atomic_exchange_n)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_add, __atomic_fetch_add)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_sub, __atomic_fetch_sub)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_and, __atomic_fetch_and)                                                  \
    INSPECT_ATOMIC_CHANGE(bits, fetch_or, __atomic_fetch_or)                                                    \
    INSPECT_ATOMIC_CHANGE(bits, fetch_xor, __atomic_fetch_xor)
INSPECT_ATOMIC(8)
INSPECT_ATOMIC(16)
INSPECT_ATOMIC(32)
INSPECT_ATOMIC(64)
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// What checked kernels call. They are compiled with -fsanitize=thread and -fsanitize=alignment, for the calls that g++ then
// makes at each access alone; the functions of those names here take the place of its own.
#include <string.h>

#include "state.h"

#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))

namespace {

void plain(void* address, size_t size, bool writes, uintptr_t pc) {
    if (launch && fiber && launch->options.check)
        check_access(reinterpret_cast<uintptr_t>(address), size, !writes, writes, false, pc);
}

void plain_range(const void* address, size_t size, bool writes, uintptr_t pc) {
    char* first = static_cast<char*>(const_cast<void*>(address));
    for (size_t done = 0; done < size; ++done) plain(first + done, 1, writes, pc);
}

void volatile_read(void* address, size_t size, uintptr_t pc) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (is_private(at)) return;
    give_up_turn(true);
    if (!launch->options.check) return;
    check_access(at, size, true, false, true, pc);
    acquire(at);
}

void volatile_write(void* address, size_t size, uintptr_t pc) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (is_private(at)) return;
    progress();
    if (!launch->options.check) return;
    check_access(at, size, false, true, true, pc);
    release(at);
}

} // namespace

#define HOOKS(prefix, N)                                                                       \
    void __tsan_##prefix##read##N(void* address) { plain(address, N, false, PC); }             \
    void __tsan_##prefix##write##N(void* address) { plain(address, N, true, PC); }
#define VOLATILE_HOOKS(prefix, N)                                                              \
    void __tsan_##prefix##volatile_read##N(void* address) { volatile_read(address, N, PC); }   \
    void __tsan_##prefix##volatile_write##N(void* address) { volatile_write(address, N, PC); }

extern "C" {

HOOKS(, 1) HOOKS(, 2) HOOKS(, 4) HOOKS(, 8) HOOKS(, 16)
HOOKS(unaligned_, 2) HOOKS(unaligned_, 4) HOOKS(unaligned_, 8) HOOKS(unaligned_, 16)
VOLATILE_HOOKS(, 1) VOLATILE_HOOKS(, 2) VOLATILE_HOOKS(, 4) VOLATILE_HOOKS(, 8) VOLATILE_HOOKS(, 16)
VOLATILE_HOOKS(unaligned_, 2) VOLATILE_HOOKS(unaligned_, 4) VOLATILE_HOOKS(unaligned_, 8) VOLATILE_HOOKS(unaligned_, 16)

// Called by what -fsanitize=alignment makes, before an access to an address that is not aligned for its type.
void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t address) {
    const auto log_alignment = *(static_cast<const unsigned char*>(data) + 3 * sizeof(void*));
    if (!launch || !launch->options.check) return;
    report(Fault::kMemory, PC, 0, "misaligned: an address of which a multiple of %d is needed ends in %#x; thread %d, block %ld",
           1 << log_alignment, static_cast<unsigned>(address & 0xff), fiber->thread, block->number);
    fail();
}

void cudacpu_constant(const volatile void* address, size_t size) {
    if (launch && fiber && launch->options.check) check_constant(reinterpret_cast<uintptr_t>(address), size, PC);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* address, size_t size) { plain_range(address, size, false, PC); }
void __tsan_write_range(void* address, size_t size) { plain_range(address, size, true, PC); }
void* __tsan_memcpy(void* to, const void* from, size_t size) {
    plain_range(from, size, false, PC);
    plain_range(to, size, true, PC);
    return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
    plain_range(from, size, false, PC);
    plain_range(to, size, true, PC);
    return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
    plain_range(to, size, true, PC);
    return memset(to, value, size);
}

} // extern "C"

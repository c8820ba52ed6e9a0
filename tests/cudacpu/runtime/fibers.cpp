// Changing from one fiber's stack to another's. Only what the calling convention asks a function to keep is kept.
#include <string.h>

#include "state.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl cudacpu_switch
.hidden cudacpu_switch
cudacpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void* first_stack_pointer(char* top, void (*entry)()) {
    void** slot = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
    *--slot = nullptr; // the address that `entry` would return to: it never does
    *--slot = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
    return slot;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl cudacpu_switch
.hidden cudacpu_switch
cudacpu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");

void* first_stack_pointer(char* top, void (*entry)()) {
    char* frame = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 160;
    memset(frame, 0, 160);
    *reinterpret_cast<void**>(frame + 88) = reinterpret_cast<void*>(entry);
    return frame;
}
#else
#error "cudacpu runs on x86-64 and on 64-bit ARM"
#endif

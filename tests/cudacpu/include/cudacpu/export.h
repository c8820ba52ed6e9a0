// How a kernel is called: with a pointer to each argument, as cuLaunchKernel takes them.
#pragma once

template <class... A> struct cudacpu_call {
    template <void (*kernel)(A...), size_t... I>
    __attribute__((no_sanitize("thread"), noinline)) static void unpack(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<typename std::remove_const<typename std::remove_reference<A>::type>::type*>(arguments[I])...);
    }
    template <void (*kernel)(A...)> __attribute__((no_sanitize("thread"), noinline)) static void run(void** arguments) {
        unpack<kernel>(arguments, std::index_sequence_for<A...>{});
    }
    __attribute__((no_sanitize("thread"), noinline)) static int sizes(int* out) {
        const int sizes[] = {static_cast<int>(sizeof(A))..., 0};
        for (size_t i = 0; i < sizeof...(A); ++i) out[i] = sizes[i];
        return sizeof...(A);
    }
};
template <class F> struct cudacpu_signature;
template <class... A> struct cudacpu_signature<void (*)(A...)> {
    using call = cudacpu_call<A...>;
};

#define CUDACPU_VISIBLE extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
#define CUDACPU_EXPORT(ID, ...)                                                                       \
    CUDACPU_VISIBLE void cudacpu_kernel_##ID(void** arguments) {                                      \
        cudacpu_signature<decltype(&__VA_ARGS__)>::call::template run<&__VA_ARGS__>(arguments);       \
    }                                                                                                 \
    CUDACPU_VISIBLE int cudacpu_sizes_##ID(int* out) {                                                \
        return cudacpu_signature<decltype(&__VA_ARGS__)>::call::sizes(out);                           \
    }

// Thread-local storage is made at the first touch; the runtime asks for that before it looks for it.
thread_local char cudacpu_anchor;
CUDACPU_VISIBLE void cudacpu_touch() { *const_cast<volatile char*>(&cudacpu_anchor) = 0; }

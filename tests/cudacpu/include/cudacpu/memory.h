// Loads and stores with cache hints, and atomics.
//
// A load past the first-level cache may be one of a loop that waits for another block, so it is a place where, now and
// then, threads change; an atomic is always one.
#pragma once

#define __isGlobal(address) true // what a program says of its pointers; addresses are checked where they are used
#define __builtin_assume(known) ((void)0)

// Through the read-only cache: what the launch writes there, whoever does it, may not be seen.
template <class T> __forceinline__ T __ldg(const T* from) {
    cudacpu_constant(from, sizeof(T));
    return *from;
}
template <class T> __forceinline__ T __ldcs(const T* from) { return *from; }
template <class T> __forceinline__ T __ldcg(const T* from) {
    cudacpu_poll(0);
    return *from;
}
template <class T> __forceinline__ T __ldcv(const T* from) {
    cudacpu_poll(0);
    return *from;
}
template <class T> __forceinline__ void __stcg(T* to, T value) { *to = value; }
template <class T> __forceinline__ void __stcs(T* to, T value) { *to = value; }
template <class T> __forceinline__ void __stwt(T* to, T value) { *to = value; }

template <class T> struct cudacpu_same { using type = T; }; // keeps an argument from deciding T

// The old value, replaced by what `change` makes of it. Nothing else runs meanwhile. It is no part of its caller, so that
// it returns to the place that reports are to name.
template <class T, class F> __attribute__((no_sanitize("thread"), noinline)) T cudacpu_atomic(T* address, F change) {
    cudacpu_before_atomic(address, sizeof(T), __builtin_return_address(0));
    T old;
    memcpy(&old, address, sizeof(T));
    const T now = change(old);
    memcpy(address, &now, sizeof(T));
    cudacpu_after_atomic(memcmp(&old, &now, sizeof(T)) != 0);
    return old;
}
#define CUDACPU_ATOMIC(NAME, EXPRESSION)                                                \
    template <class T> __forceinline__ T NAME(T* address, typename cudacpu_same<T>::type value) { \
        return cudacpu_atomic(address, [=](T old) { return (T)(EXPRESSION); });         \
    }
CUDACPU_ATOMIC(atomicAdd, old + value)
CUDACPU_ATOMIC(atomicSub, old - value)
CUDACPU_ATOMIC(atomicExch, value)
CUDACPU_ATOMIC(atomicMax, old > value ? old : value)
CUDACPU_ATOMIC(atomicMin, old < value ? old : value)
CUDACPU_ATOMIC(atomicAnd, old & value)
CUDACPU_ATOMIC(atomicOr, old | value)
CUDACPU_ATOMIC(atomicXor, old ^ value)
CUDACPU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef CUDACPU_ATOMIC
template <class T>
__forceinline__ T atomicCAS(T* address, typename cudacpu_same<T>::type expected, typename cudacpu_same<T>::type value) {
    return cudacpu_atomic(address, [=](T old) { return old == expected ? value : old; });
}

// Reading and writing in words of up to 16 bytes.

// Tells the compiler that an address is in global memory, so that loads do not check the kind of memory.
template <class T>
__device__ __forceinline__ T* global(T* at) {
    __builtin_assume(__isGlobal(at));
    return at;
}

// Hides from the compiler that a number is the same as before, so that values that depend on it are computed where they are
// used, and not kept in registers.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// N consecutive values, moved as words of up to 16 bytes.
template <class T, int N>
union Pack {
    static constexpr int kBytes = (int)sizeof(T) * N;
    T value[N];
    unsigned word[kBytes / 4 > 0 ? kBytes / 4 : 1];
    uint2 pair[kBytes / 8 > 0 ? kBytes / 8 : 1];
    uint4 quad[kBytes / 16 > 0 ? kBytes / 16 : 1];
    __device__ __forceinline__ Pack() : value{} {}
};

// Reads values from[0] to from[n - 1], n <= N. kAligned: `from` is a multiple of the word's size. kLast: nothing in this step
// reads them again, so they need not stay in the cache.
template <int N, bool kAligned, bool kLast, class T>
__device__ __forceinline__ Pack<T, N> read(const T* from, int n) {
    Pack<T, N> to;
    if (kAligned && N > 1 && n == N) {
        if constexpr (Pack<T, N>::kBytes % 16 == 0) {
            const uint4* words = reinterpret_cast<const uint4*>(global(from));
#pragma unroll
            for (int k = 0; k < Pack<T, N>::kBytes / 16; ++k) to.quad[k] = kLast ? __ldcs(words + k) : words[k];
        } else if constexpr (Pack<T, N>::kBytes % 8 == 0) {
            const uint2* words = reinterpret_cast<const uint2*>(global(from));
#pragma unroll
            for (int k = 0; k < Pack<T, N>::kBytes / 8; ++k) to.pair[k] = kLast ? __ldcs(words + k) : words[k];
        } else if constexpr (Pack<T, N>::kBytes == 4) {
            const unsigned* word = reinterpret_cast<const unsigned*>(global(from));
            to.word[0] = kLast ? __ldcs(word) : *word;
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j) to.value[j] = global(from)[j];
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (j < n) to.value[j] = global(from)[j];
            else to.value[j] = T{};
        }
    }
    return to;
}

// Writes values to[0] to to[n - 1]; see read().
template <int N, bool kLast, class T>
__device__ __forceinline__ void write(T* to, const Pack<T, N>& from, int n, bool aligned) {
    if (aligned && N > 1 && n == N) {
        if constexpr (Pack<T, N>::kBytes % 16 == 0) {
            uint4* words = reinterpret_cast<uint4*>(global(to));
#pragma unroll
            for (int k = 0; k < Pack<T, N>::kBytes / 16; ++k) {
                if (kLast) __stcs(words + k, from.quad[k]);
                else words[k] = from.quad[k];
            }
        } else if constexpr (Pack<T, N>::kBytes % 8 == 0) {
            uint2* words = reinterpret_cast<uint2*>(global(to));
#pragma unroll
            for (int k = 0; k < Pack<T, N>::kBytes / 8; ++k) {
                if (kLast) __stcs(words + k, from.pair[k]);
                else words[k] = from.pair[k];
            }
        } else if constexpr (Pack<T, N>::kBytes == 4) {
            unsigned* word = reinterpret_cast<unsigned*>(global(to));
            if (kLast) __stcs(word, from.word[0]);
            else *word = from.word[0];
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j) global(to)[j] = from.value[j];
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < n) global(to)[j] = from.value[j];
    }
}

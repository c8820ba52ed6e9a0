// How numbers lie in memory, and how they are read and written.
//
// Arithmetic is done in W, which is float or double. Parameters, gradients and slots may be stored in fewer bits: they are
// widened when read and rounded once, to nearest even, when written. The conversions are integer arithmetic, so that no
// header of a CUDA toolkit is needed and every pattern of bits is converted alike everywhere.

struct Half {
    unsigned short bits;
};

struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ float widen(Half x) {
    const unsigned sign = (unsigned)(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
    if (magnitude < 0x400u) return __uint_as_float(sign | __float_as_uint((float)magnitude * 0x1p-24f));  // subnormal
    return __uint_as_float(sign | (magnitude + 0x1c000u) << 13);
}

__device__ __forceinline__ void narrow(double x, float& to) { to = (float)x; }
__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(double x, double& to) { to = x; }

__device__ __forceinline__ void narrow(float x, BFloat16& to) {
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    to.bits = (unsigned short)(x == x ? rounded : bits >> 16 | 0x40u);
}

__device__ __forceinline__ void narrow(float x, Half& to) {
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    unsigned bits;
    if (magnitude > 0x7f800000u) bits = 0x7e00u | (magnitude >> 13 & 0x3ffu);  // NaN
    else if (magnitude >= 0x477ff000u) bits = 0x7c00u;                         // from 65520 on: infinity
    else if (magnitude < 0x38800000u) bits = (unsigned)rintf(__uint_as_float(magnitude) * 0x1p24f);  // subnormal
    else bits = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    to.bits = (unsigned short)(sign | bits);
}

__device__ __forceinline__ void narrow(double x, Half& to) { narrow((float)x, to); }
__device__ __forceinline__ void narrow(double x, BFloat16& to) { narrow((float)x, to); }

// The nearest number of bfloat16: what an operation in bfloat16 makes of its result in W, and a parameter of its master.
template <class T>
__device__ __forceinline__ float to_bfloat16(T x) {
    BFloat16 to;
    narrow(x, to);
    return widen(to);
}

// The nearest number of float16.
__device__ __forceinline__ float to_float16(float x) {
    Half to;
    narrow(x, to);
    return widen(to);
}

// An address in the device's memory, which is known as such to the compiler: what is loaded through it takes no look at where
// it lies.
template <class T>
__device__ __forceinline__ T* global(T* at) {
    __builtin_assume(__isGlobal(at));
    return at;
}

// N consecutive values, moved as words of up to 16 bytes.
template <class T, int N>
union Pack {
    static constexpr int kBytes = (int)sizeof(T) * N;
    T value[N];
    uint2 pair[kBytes / 8 > 0 ? kBytes / 8 : 1];
    uint4 quad[kBytes / 16 > 0 ? kBytes / 16 : 1];
    __device__ __forceinline__ Pack() : value{} {}
};

// Reads values from[0] to from[n - 1], n <= N. kAligned: `from` is a multiple of the word's size. kLast: nobody in this step
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

// Functions that generated loops for CPUs call.

static __forceinline__ double maximum(float a, double b) { return maximum((double)a, b); }
static __forceinline__ double maximum(double a, float b) { return maximum(a, (double)b); }
static __forceinline__ double minimum(float a, double b) { return minimum((double)a, b); }
static __forceinline__ double minimum(double a, float b) { return minimum(a, (double)b); }

// Selects a or b by a condition that is the same for all elements. g++ does not vectorize `?` with such a condition.
static __forceinline__ float chosen(bool first, float a, float b) {
    const unsigned mask = 0u - (unsigned)first;
    return __uint_as_float((__float_as_uint(a) & mask) | (__float_as_uint(b) & ~mask));
}
static __forceinline__ double chosen(bool first, double a, double b) {
    const __UINT64_TYPE__ mask = (__UINT64_TYPE__)0 - first;
    __UINT64_TYPE__ bits, other;
    __builtin_memcpy(&bits, &a, sizeof bits);
    __builtin_memcpy(&other, &b, sizeof other);
    bits = (bits & mask) | (other & ~mask);
    __builtin_memcpy(&a, &bits, sizeof a);
    return a;
}

// a * b + c, rounded once. Compilers fuse nothing else: they would do so in vectors and not in the elements that are left.
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
static __forceinline__ float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static __forceinline__ double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static __forceinline__ float fused(float a, float b, float c) { return a * b + c; }
static __forceinline__ double fused(double a, double b, double c) { return a * b + c; }
#endif
static __forceinline__ Complex fused(W a, Complex b, Complex c) {
    return {fused(a, b.real, c.real), fused(a, b.imag, c.imag)};
}
static __forceinline__ Complex fused(Complex a, W b, Complex c) { return fused(b, a, c); }

// The partial results of a total, of which the printer says what becomes one.
struct Lanes {
    W of[kSums];
    __forceinline__ Lanes(W first) {
        for (int i = 0; i < kSums; ++i) of[i] = first;
    }
    __forceinline__ W& operator[](int64_t i) { return of[i]; }
};

// Matrices to copy at a time: about 16 KB, which stay in the L1 cache while their elements are copied to each plane in turn.
static int64_t block_of(int64_t count) { return 4096 / count > 16 ? 4096 / count : 16; }

// Copies `lanes` matrices of `count` elements into planes: one for each element, with this element of all matrices.
template <class T>
static void take(const T* __restrict source, W* __restrict planes, int64_t lanes, int64_t count) {
    if (count == 1) {  // the compiler vectorizes this, since the stride is known
        for (int64_t i = 0; i < lanes; ++i) planes[i] = widen(source[i]);
        return;
    }
    const int64_t block = block_of(count);
    for (int64_t first = 0; first < lanes; first += block) {
        const int64_t n = least(block, lanes - first);
        for (int64_t j = 0; j < count; ++j)
            for (int64_t i = 0; i < n; ++i) planes[j * lanes + first + i] = widen(source[(first + i) * count + j]);
    }
}

template <class T>
static void give(T* __restrict target, const W* __restrict planes, int64_t lanes, int64_t count) {
    if (count == 1) {
        for (int64_t i = 0; i < lanes; ++i) narrow(planes[i], target[i]);
        return;
    }
    const int64_t block = block_of(count);
    for (int64_t first = 0; first < lanes; first += block) {
        const int64_t n = least(block, lanes - first);
        for (int64_t j = 0; j < count; ++j)
            for (int64_t i = 0; i < n; ++i) narrow(planes[j * lanes + first + i], target[(first + i) * count + j]);
    }
}

// Rows i0 to i1 of the product of an i x k and a k x j matrix, both in row-major order, by BLAS, which is column-major.
static void multiply(void* gemm, W* a, W* b, W* c, int64_t i0, int64_t i1, int64_t i, int64_t j, int64_t k, int ta, int tb,
                     int symmetric) {
    typedef void (*Gemm)(char*, char*, int*, int*, int*, W*, W*, int*, W*, int*, W*, W*, int*);
    char first = tb ? 'T' : 'N', second = ta ? 'T' : 'N';
    int rows = (int)(symmetric ? i1 : j), columns = (int)(i1 - i0), length = (int)k;
    int lda = (int)(tb ? k : j), ldb = (int)(ta ? i : k), ldc = (int)j;
    W one = 1, zero = 0;
    ((Gemm)gemm)(&first, &second, &rows, &columns, &length, &one, b, &lda, a + (ta ? i0 : i0 * k), &ldb, &zero, c + i0 * j,
                 &ldc);
    const int64_t tile = 32;
    for (int64_t c0 = 0; symmetric && c0 < i0; c0 += tile)
        for (int64_t r0 = i0; r0 < i1; r0 += tile)
            for (int64_t column = c0; column < least(c0 + tile, i0); ++column)
                for (int64_t r = r0; r < least(r0 + tile, i1); ++r) c[column * j + r] = c[r * j + column];
}

enum {
    kTogether = 16,  // blocks whose scales are computed at once
    kStretch = 256,  // maximum number of blocks of one loop
};

// Conversion of a block of codes to numbers, and back.
template <class C, class T>
static __forceinline__ void widen_block(const C* __restrict codes, float step, T* __restrict to) {
    for (int i = 0; i < kBlock; ++i) to[i] = (float)codes[i] * step;
}
template <class C, class T>
static __forceinline__ void narrow_block(const T* __restrict from, float factor, C* __restrict codes) {
    for (int i = 0; i < kBlock; ++i) codes[i] = code_of<C>((float)from[i], factor);
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)
// The same in single precision. g++ would use vectors of 8 numbers for such loops, because 32 codes fill such a vector, and
// these take twice as long.
#define VECTORS
enum { kLanes = 16 };
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int Integers __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned short Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef signed char Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef short Shorts __attribute__((vector_size(32), aligned(2), may_alias));
static __forceinline__ Floats all_of(Floats x) { return x; }
static __forceinline__ Floats all_of(float x) { return Floats{} + x; }
static __forceinline__ Floats not_lost(Floats x, signed char) { return x; }
static __forceinline__ Floats not_lost(Floats x, unsigned char) {
    asm("vcmpps $0x1e, %1, %0, %%k1\n\tvmaxps %2, %0, %0 %{%%k1%}"  // at least 1 if greater than 2^-100
        : "+v"(x) : "v"(Floats{} + 0x1p-100f), "v"(Floats{} + 1.0f) : "k1");
    return x;
}
#define BLOCKS_OF(C, wider, narrower)                                                                               \
    static __forceinline__ Floats decoded(const C* codes, float step) {                                             \
        Integers x;                                                                                                 \
        asm(wider " %1, %0" : "=v"(x) : "m"(*(const Bytes*)codes));                                                 \
        return __builtin_convertvector(x, Floats) * step;                                                           \
    }                                                                                                               \
    static __forceinline__ void widen_block(const C* __restrict codes, float step, float* __restrict to) {          \
        for (int i = 0; i < kBlock; i += kLanes) *(Floats*)(to + i) = decoded(codes + i, step);                     \
    }                                                                                                               \
    static __forceinline__ void narrow_block(const float* __restrict from, float factor, C* __restrict codes) {     \
        for (int i = 0; i < kBlock; i += kLanes) {                                                                  \
            Integers x;                                                                                             \
            asm("vcvtps2dq %1, %0" : "=v"(x) : "v"(not_lost(*(const Floats*)(from + i) * factor, (C)0)));           \
            asm(narrower " %1, %0" : "=m"(*(Bytes*)(codes + i)) : "v"(x));                                          \
        }                                                                                                           \
    }
BLOCKS_OF(signed char, "vpmovsxbd", "vpmovsdb")
BLOCKS_OF(unsigned char, "vpmovzxbd", "vpmovusdb")

template <class A, class B>
static __forceinline__ Floats fused(A a, B b, Floats c) {
    typedef float Plain __attribute__((vector_size(64)));
    return (Floats)__builtin_ia32_vfmaddps512_mask((Plain)all_of(a), (Plain)all_of(b), (Plain)c, -1, 4);
}
template <class A, class B>
static __forceinline__ Floats fused(A a, B b, float c) {
    return fused(a, b, all_of(c));
}

static __forceinline__ Floats vector_at(const float* x) { return *(const Floats*)x; }
static __forceinline__ Floats vector_at(const BFloat16* x) {
    Integers wide;
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "m"(*(const Shorts*)x));
    return (Floats)(wide << 16);
}
static __forceinline__ Floats vector_at(const Half* x) {
    Floats wide;
    asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*(const Shorts*)x));
    return wide;
}
static __forceinline__ Floats vector_at(const double* x) {
    Floats found;
    for (int i = 0; i < kLanes; i++) found[i] = (float)x[i];
    return found;
}
template <class A, class B>
static __forceinline__ Floats chosen(bool first, A a, B b) { return first ? all_of(a) : all_of(b); }
static __forceinline__ Floats maximum(Floats a, float b) { return maximum(a, all_of(b)); }
static __forceinline__ Floats maximum(float a, Floats b) { return maximum(all_of(a), b); }
static __forceinline__ Floats minimum(Floats a, float b) { return minimum(a, all_of(b)); }
static __forceinline__ Floats minimum(float a, Floats b) { return minimum(all_of(a), b); }
static __forceinline__ Floats to_bfloat16(Floats x) {
    const Integers bits = (Integers)x;
    const Integers kept = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
    return (Floats)(kept & -0x10000);
}
static __forceinline__ void put_vector(Floats x, float* to) { *(Floats*)to = x; }
static __forceinline__ void put_vector(Floats x, BFloat16* to) {
    *(Halves*)to = __builtin_convertvector((Integers)to_bfloat16(x) >> 16, Halves);
}
static __forceinline__ void put_vector(Floats x, Half* to) {
    asm("vcvtps2ph $0, %1, %0" : "=m"(*(Shorts*)to) : "v"(x));
}

// Masters of 24 bits, as in storage.cuh, but the additional 8 bits are integers here. They are zero for infinite and NaN
// parameters. In bfloat16 they are not added to zeros.
static __forceinline__ Integers vector_at(const Low8* x) {
    Integers wide;
    asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(*(const Bytes*)x));
    return wide;
}
static __forceinline__ void put_vector(Integers x, Low8* to) { asm("vpmovsdb %1, %0" : "=m"(*(Bytes*)to) : "v"(x)); }
static __forceinline__ Floats joined_bfloat16(Integers low, Floats p) {
    asm("vfpclassps $0x9f, %0, %%k1\n\tknotw %%k1, %%k1\n\tvpaddd %1, %0, %0 %{%%k1%}" : "+v"(p) : "v"(low << 8) : "k1");
    return p;
}
static __forceinline__ Integers low_bfloat16(Floats master, Floats p) {
    const Floats rounded = to_bfloat16(p);
    Integers low = (Integers)master - (Integers)rounded + 128 >> 8;
    asm("vfpclassps $0x99, %1, %%k1\n\tknotw %%k1, %%k1\n\tvpmaxsd %2, %0, %0 %{%%k1%}%{z%}"
        : "+v"(low) : "v"(rounded), "v"(Integers{} - 127) : "k1");
    return low;
}
static __forceinline__ Floats to_float16(Floats x) {
    Shorts half;
    asm("vcvtps2ph $0, %1, %0\n\tvcvtph2ps %0, %1" : "=&v"(half), "+v"(x));
    return x;
}
static __forceinline__ Integers ordinary(Floats x) { return ((Integers)x & 0x7f800000) != 0x7f800000; }
static __forceinline__ Integers coarse(Floats x) { return ((Integers)x & 0x7fffffff) > 0x38800000; }  // above 2^-14
static __forceinline__ Floats joined_float16(Integers low, Floats p) {
    const Floats near = p + __builtin_convertvector(low, Floats) * 0x1p-32f;
    const Floats joined = coarse(p) ? (Floats)((Integers)p + low * 32) : near;
    return ordinary(p) & (low != 0) ? joined : p;
}
static __forceinline__ Integers low_float16(Floats master, Floats p) {
    const Floats rounded = to_float16(p);
    Integers near;
    asm("vcvtps2dq %1, %0" : "=v"(near) : "v"((master - rounded) * 0x1p32f));
    const Integers low = coarse(rounded) ? (Integers)master - (Integers)rounded + 16 >> 5 : near;
    const Integers most = low > 127 ? Integers{} + 127 : low;
    return (most < -127 ? Integers{} - 127 : most) & ordinary(rounded);
}
static __forceinline__ Floats sqrt(Floats x) {
    Floats y;
    asm("vsqrtps %1, %0" : "=v"(y) : "v"(x));
    return y;
}

static __forceinline__ Integers larger(Integers x, Integers y) { return x > y ? x : y; }

// The maximum of each lane and the lane half a vector further: for x in the even lanes, for y in the odd ones.
static __forceinline__ Integers halved(Integers x, Integers y) {
    return larger(__builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                  __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}

// The scales of as many blocks as a vector has lanes, and the factors from their numbers to codes. The loops are unrolled, so
// that all values stay in registers, which takes a third of the time.
template <class C>
static __forceinline__ void scale_blocks(const float* x, BFloat16* scales, float* factors) {
    Integers most[kLanes];
#pragma GCC unroll 16
    for (int b = 0; b < kLanes; ++b) {
        const Integers* here = (const Integers*)(x + b * kBlock);
        most[b] = larger(here[0] & 0x7fffffff, here[1] & 0x7fffffff);
    }
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int b = 0; b < half; ++b) most[b] = halved(most[b], most[b + half]);
    const Integers even = most[0] + 0x7fff + ((most[0] >> 16) & 1), nan = most[0] | 0x400000;
    Integers bits = (most[0] > 0x7f800000 ? nan : even) >> 16;
    bits &= bits >= 0x400;  // 2^-119
    *(Halves*)scales = __builtin_convertvector(bits, Halves);
    *(Floats*)factors = (Floats)((Integers)(top_of(C()) / (Floats)(bits << 16)) & (bits > 0));
}
#endif

// Prefetches a block that is read later: into the L1 cache, or into L2 if the loop stores its results, which fill L1.
// Prefetching beyond the array's end does no harm.
template <bool stores, class T>
static __forceinline__ void ask_for(const T* block) {
    enum { kAhead = 1024, kLine = 64 };
    const char* const later = (const char*)(block + kAhead);
    for (int i = 0; i < kBlock * (int)sizeof(T); i += kLine) __builtin_prefetch(later + i, 0, stores ? 2 : 3);
}

// The factors from codes to numbers of each block, for loops that convert codes themselves.
template <class C>
struct Steps {
    float of[kStretch];
    Steps(const BFloat16* scales, int64_t blocks) {
        for (int64_t i = 0; i < blocks; ++i) of[i] = step_of<C>(scales[i]);
    }
};

// Converts codes to numbers. The first code must be the first of a block. `beside` has arrays that the next loop reads.
// They are prefetched here, so that the memory transfers of both loops overlap.
template <class C, class... Beside>
static void dequantize(const C* __restrict codes, const BFloat16* __restrict scales, W* __restrict to, int64_t count,
                       const Beside*... beside) {
    int64_t first = 0;
    for (; first + kBlock <= count; first += kBlock) {
        ask_for<true>(codes + first);
        (ask_for<true>(beside + first), ...);
        widen_block(codes + first, step_of<C>(scales[first / kBlock]), to + first);
    }
    for (; first < count; ++first) to[first] = (float)codes[first] * step_of<C>(scales[first / kBlock]);
}

// The bits of the largest magnitude, as an integer.
static __forceinline__ int largest_of(const W* x, int64_t count) {
    int largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int bits = (int)(__float_as_uint((float)x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// The scales of blocks, and the factors from their numbers to codes, in two loops, because the compiler vectorizes these.
template <class C, class T>
static __forceinline__ void scale_blocks(const T* __restrict x, BFloat16* __restrict scales, float* __restrict factors) {
    int largest[kTogether];
    for (int b = 0; b < kTogether; ++b) largest[b] = largest_of(x + b * kBlock, kBlock);
    for (int b = 0; b < kTogether; ++b) {
        scales[b] = scale_of((unsigned)largest[b]);
        factors[b] = factor_of<C>(scales[b]);
    }
}

template <class C>
static __forceinline__ void put_block(const W* __restrict from, float factor, C* __restrict codes) {
    if (factor > 0)
        narrow_block(from, factor, codes);
    else
        for (int i = 0; i < kBlock; ++i) codes[i] = 0;
}

// Converts numbers to codes. All scales come first, because each has a long latency.
template <class C>
static void quantize(C* __restrict codes, BFloat16* __restrict scales, const W* __restrict x, int64_t count) {
    float factors[kStretch];
    int64_t i = 0;
    for (; i + kTogether * kBlock <= count; i += kTogether * kBlock)
        scale_blocks<C>(x + i, scales + i / kBlock, factors + i / kBlock);
    for (; i < count; i += kBlock) {
        const int64_t left = count - i;
        scales[i / kBlock] = scale_of((unsigned)(left < kBlock ? largest_of(x + i, left) : largest_of(x + i, kBlock)));
        factors[i / kBlock] = factor_of<C>(scales[i / kBlock]);
    }
    for (i = 0; i + kBlock <= count; i += kBlock) put_block(x + i, factors[i / kBlock], codes + i);
    for (; i < count; ++i) codes[i] = factors[i / kBlock] > 0 ? code_of<C>((float)x[i], factors[i / kBlock]) : (C)0;
}

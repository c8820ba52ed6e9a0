// What compiled loops for CPUs call.

static __forceinline__ double maximum(float a, double b) { return maximum((double)a, b); }
static __forceinline__ double maximum(double a, float b) { return maximum(a, (double)b); }
static __forceinline__ double minimum(float a, double b) { return minimum((double)a, b); }
static __forceinline__ double minimum(double a, float b) { return minimum(a, (double)b); }

// The first or the second, by a condition that is the same for all elements. g++ makes no vectors of `?` there.
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

#pragma omp declare reduction(largest : W : omp_out = maximum(omp_out, omp_in)) initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(smallest : W : omp_out = minimum(omp_out, omp_in)) initializer(omp_priv = INFINITY)

// Where the elements of the NumPy array at an address lie; 0 if not one after the other, or not aligned.
static int64_t look(int64_t array) {
    const int64_t* head = (const int64_t*)array;  // count, type, data, ndim, shape, strides, base, dtype, flags
    return (head[8] & 0x101) == 0x101 ? head[2] : 0;
}

// Some 16 KB are copied at a time: they stay in the first cache while each plane in turn takes its own.
static int64_t block_of(int64_t count) { return 4096 / count > 16 ? 4096 / count : 16; }

// Copies matrices of `count` elements into planes, one for each element, in which `lanes` matrices lie side by side.
template <class T>
static void take(const T* __restrict source, W* __restrict planes, int64_t lanes, int64_t count) {
    if (count == 1) {  // with a step that is known there are vectors
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

// Rows i0 to i1 of the product of i x k and k x j values, which lie row by row, by BLAS, which has columns.
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

// Reads codes as numbers; the first element of a stretch is the first of a block.
template <class C>
static void dequantize(const C* __restrict codes, const BFloat16* __restrict scales, W* __restrict to, int64_t count) {
    int64_t first = 0;
    for (; first + kBlock <= count; first += kBlock) {
        const float step = step_of<C>(scales[first / kBlock]);
        for (int i = 0; i < kBlock; ++i) to[first + i] = (float)codes[first + i] * step;
    }
    for (; first < count; ++first) to[first] = (float)codes[first] * step_of<C>(scales[first / kBlock]);
}

// The bits of the largest magnitude.
static __forceinline__ int largest_of(const W* x, int64_t count) {
    int largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int bits = (int)(__float_as_uint((float)x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// Stores numbers as codes. What is done of each of some blocks is a loop of its own, for these make vectors.
template <class C>
static void quantize(C* __restrict codes, BFloat16* __restrict scales, const W* __restrict from, int64_t count) {
    enum { kTogether = 32 };
    int largest[kTogether];
    float factor[kTogether];
    const float top = top_of(C());
    for (int64_t start = 0; start < count; start += kTogether * kBlock) {
        const int64_t left = least(count - start, kTogether * kBlock), full = left / kBlock;
        const int64_t blocks = (left + kBlock - 1) / kBlock;
        const W* const x = from + start;
        C* const to = codes + start;
        BFloat16* const scale = scales + start / kBlock;
        for (int64_t b = 0; b < full; ++b) largest[b] = largest_of(x + b * kBlock, kBlock);
        if (full < blocks) largest[full] = largest_of(x + full * kBlock, left - full * kBlock);
        for (int64_t b = 0; b < blocks; ++b) {
            scale[b] = scale_of((unsigned)largest[b]);
            factor[b] = factor_of<C>(scale[b]);
        }
        for (int64_t b = 0; b < full; ++b) {
            const W* const here = x + b * kBlock;
            C* const there = to + b * kBlock;
            if (factor[b] > 0)
                for (int i = 0; i < kBlock; ++i) there[i] = (C)code_of((float)here[i], factor[b], top);
            else
                for (int i = 0; i < kBlock; ++i) there[i] = 0;
        }
        for (int64_t i = full * kBlock; i < left; ++i)
            to[i] = factor[full] > 0 ? (C)code_of((float)x[i], factor[full], top) : (C)0;
    }
}

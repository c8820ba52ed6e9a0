// The beginning of sources for CPUs: defines the names of CUDA that the headers use. Nothing is included, which halves the
// time to compile a small source.

typedef __INT64_TYPE__ int64_t;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

// Functions of C. An operation on elements that calls one of them needs no line here.
#define OF_ONE(name)                                                                 \
    static __forceinline__ float name(float x) { return __builtin_##name##f(x); } \
    static __forceinline__ double name(double x) { return __builtin_##name(x); }
#define OF_TWO(name)                                                                             \
    static __forceinline__ float name(float x, float y) { return __builtin_##name##f(x, y); } \
    static __forceinline__ double name(double x, double y) { return __builtin_##name(x, y); } \
    static __forceinline__ double name(float x, double y) { return __builtin_##name(x, y); }  \
    static __forceinline__ double name(double x, float y) { return __builtin_##name(x, y); }

OF_ONE(acos)
OF_ONE(asin)
OF_ONE(atan)
OF_ONE(ceil)
OF_ONE(cos)
OF_ONE(cosh)
OF_ONE(erf)
OF_ONE(exp)
OF_ONE(exp2)
OF_ONE(expm1)
OF_ONE(fabs)
OF_ONE(floor)
OF_ONE(log)
OF_ONE(log10)
OF_ONE(log1p)
OF_ONE(log2)
OF_ONE(round)
OF_ONE(sin)
OF_ONE(sinh)
OF_ONE(sqrt)
OF_ONE(tan)
OF_ONE(tanh)
OF_ONE(trunc)
OF_TWO(fmod)
OF_TWO(hypot)
OF_TWO(pow)

static __forceinline__ float floorf(float x) { return __builtin_floorf(x); }
static __forceinline__ float rintf(float x) { return __builtin_rintf(x); }

static __forceinline__ float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static __forceinline__ unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static __forceinline__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static __forceinline__ int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

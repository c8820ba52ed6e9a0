// What sources for CPUs begin with: the words of CUDA that the headers use, and what compiled loops call.
//
// Nothing is included: the standard headers take longer to read than most rules' loops to compile.

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

typedef __INT64_TYPE__ int64_t;

#define FUNCTION(name)                                                                \
    static __forceinline__ float name(float x) { return __builtin_##name##f(x); } \
    static __forceinline__ double name(double x) { return __builtin_##name(x); }
FUNCTION(ceil)
FUNCTION(cos)
FUNCTION(exp)
FUNCTION(expm1)
FUNCTION(fabs)
FUNCTION(floor)
FUNCTION(log)
FUNCTION(log1p)
FUNCTION(log2)
FUNCTION(sin)
FUNCTION(sqrt)
FUNCTION(tanh)

#define FUNCTION_OF_TWO(name)                                                                        \
    static __forceinline__ float name(float a, float b) { return __builtin_##name##f(a, b); } \
    static __forceinline__ double name(double a, double b) { return __builtin_##name(a, b); } \
    template <class A, class B>                                                                 \
    static __forceinline__ double name(A a, B b) { return __builtin_##name((double)a, (double)b); }
FUNCTION_OF_TWO(hypot)
FUNCTION_OF_TWO(pow)

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

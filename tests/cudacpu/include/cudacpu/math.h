// Functions of numbers and of bits that <math.h> has not.
#pragma once

// glibc 2.42 has functions of these names.
static inline float cudacpu_rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double cudacpu_rsqrt(double x) { return 1.0 / sqrt(x); }
#define rsqrtf(x) cudacpu_rsqrtf(x)
#define rsqrt(x) cudacpu_rsqrt(x)
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __powf(x, y) powf(x, y)
// In functions of their own, so that no multiplication joins an addition.
__attribute__((noinline)) static float __fmul_rn(float a, float b) { return a * b; }
__attribute__((noinline)) static float __fadd_rn(float a, float b) { return a + b; }
__attribute__((noinline)) static double __dmul_rn(double a, double b) { return a * b; }
__attribute__((noinline)) static double __dadd_rn(double a, double b) { return a + b; }

static inline int __float_as_int(float x) { return cudacpu_from_bits<int>(cudacpu_bits(x)); }
static inline unsigned __float_as_uint(float x) { return cudacpu_from_bits<unsigned>(cudacpu_bits(x)); }
static inline float __int_as_float(int bits) { return cudacpu_from_bits<float>(cudacpu_bits(bits)); }
static inline float __uint_as_float(unsigned bits) { return cudacpu_from_bits<float>(cudacpu_bits(bits)); }
static inline long long __double_as_longlong(double x) { return cudacpu_from_bits<long long>(cudacpu_bits(x)); }
static inline double __longlong_as_double(long long bits) { return cudacpu_from_bits<double>(cudacpu_bits(bits)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }

template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }

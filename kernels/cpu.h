// What sources for CPUs begin with: the words of CUDA that the headers use, and what compiled loops call.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

using std::ceil;
using std::cos;
using std::exp;
using std::expm1;
using std::fabs;
using std::floor;
using std::hypot;
using std::log;
using std::log1p;
using std::log2;
using std::pow;
using std::sin;
using std::sqrt;
using std::tanh;

static __forceinline__ float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static __forceinline__ unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static __forceinline__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static __forceinline__ int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

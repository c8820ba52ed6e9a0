// Storage formats of numbers, and conversion from and to them.
//
// Arithmetic is in W, which is float or double. Parameters, gradients and slots may be stored in fewer bits: they are widened
// when read and rounded once, to nearest even, when written. The conversions use integer arithmetic, so that no header of a
// CUDA toolkit is needed, and all engines convert every bit pattern alike.

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
    else if (magnitude >= 0x477ff000u) bits = 0x7c00u;                         // infinity from 65520 on
    else if (magnitude < 0x38800000u) bits = (unsigned)rintf(__uint_as_float(magnitude) * 0x1p24f);  // subnormal
    else bits = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    to.bits = (unsigned short)(sign | bits);
}

__device__ __forceinline__ void narrow(double x, Half& to) { narrow((float)x, to); }
__device__ __forceinline__ void narrow(double x, BFloat16& to) { narrow((float)x, to); }

// Rounds to bfloat16, as an operation in bfloat16 rounds its result, and as a master is rounded to its parameter.
template <class T>
__device__ __forceinline__ float to_bfloat16(T x) {
    BFloat16 to;
    narrow(x, to);
    return widen(to);
}

// Rounds to float16.
__device__ __forceinline__ float to_float16(float x) {
    Half to;
    narrow(x, to);
    return widen(to);
}

// The 8 bits that the master of a 16-bit parameter has in addition to it; see arrayopt/randomness.py. This is not a struct,
// because NVRTC 13.0 does not compile __isGlobal() of a pointer to a struct of one byte.
enum Low8 : signed char {};

__device__ __forceinline__ float widen(Low8 x) { return (float)x; }
__device__ __forceinline__ void narrow(float x, Low8& to) { to = (Low8)(int)x; }

__device__ __forceinline__ bool ordinary(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ float joined_bfloat16(float low, float p) {
    const float joined = __uint_as_float(__float_as_uint(p) + (unsigned)((int)low * 256));
    return ordinary(p) && p != 0.0f ? joined : p;
}

__device__ __forceinline__ float joined_float16(float low, float p) {
    const float size = __uint_as_float(__float_as_uint(p) & 0x7fffffffu);
    const float large = __uint_as_float(__float_as_uint(p) + (unsigned)((int)low * 32));
    const float joined = size <= 0x1p-14f ? p + low * 0x1p-32f : large;
    return ordinary(p) && low != 0.0f ? joined : p;
}

__device__ __forceinline__ float within_low(float x) { return x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x; }

__device__ __forceinline__ float low_bfloat16(float master, float p) {
    const float rounded = to_bfloat16(p);
    const int apart = (int)(__float_as_uint(master) - __float_as_uint(rounded)) + 128 >> 8;
    return ordinary(rounded) ? within_low((float)apart) : 0.0f;
}

__device__ __forceinline__ float low_float16(float master, float p) {
    const float rounded = to_float16(p), size = __uint_as_float(__float_as_uint(rounded) & 0x7fffffffu);
    const int apart = (int)(__float_as_uint(master) - __float_as_uint(rounded)) + 16 >> 5;
    const float low = size <= 0x1p-14f ? rintf((master - rounded) * 0x1p32f) : (float)apart;
    return ordinary(rounded) ? within_low(low) : 0.0f;
}

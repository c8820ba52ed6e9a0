// __half and __nv_bfloat16: stored in two bytes, rounded to nearest even, computed in float.
#pragma once

static inline uint16_t cudacpu_half_bits(float value) {
    uint32_t bits = cudacpu_from_bits<uint32_t>(cudacpu_bits(value));
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fffu;                                 // CUDA has one NaN
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on: infinity
    if (bits < 0x33000001u) return static_cast<uint16_t>(sign);             // up to 2^-25: zero
    const uint32_t exponent = bits >> 23, mantissa = (bits & 0x7fffffu) | 0x800000u;
    const bool normal = exponent >= 113;
    const uint32_t shift = normal ? 13 : 126 - exponent;
    uint32_t result = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    if (normal) result = (result & 0x3ffu) | ((exponent - 112) << 10);
    result += rest > tie || (rest == tie && (result & 1));
    return static_cast<uint16_t>(sign | result);
}
static inline float cudacpu_half_value(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ffu;
    uint32_t bits = sign;
    if (exponent == 31) {
        bits |= 0x7f800000u | (mantissa << 13);
    } else if (exponent) {
        bits |= ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa) {
        const int shift = __builtin_clz(mantissa) - 21;
        bits |= ((113 - shift) << 23) | ((mantissa << (13 + shift)) & 0x7fffffu);
    }
    return cudacpu_from_bits<float>(bits);
}
static inline uint16_t cudacpu_bfloat16_bits(float value) {
    const uint32_t bits = cudacpu_from_bits<uint32_t>(cudacpu_bits(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
static inline float cudacpu_bfloat16_value(uint16_t bits) {
    return cudacpu_from_bits<float>(static_cast<uint32_t>(bits) << 16);
}

#define CUDACPU_HALF(N, BITS, VALUE)                                          \
    struct alignas(2) N {                                                     \
        uint16_t bits;                                                        \
        N() = default;                                                        \
        N(float value) : bits(BITS(value)) {}                                 \
        N(double value) : bits(BITS(static_cast<float>(value))) {}            \
        N(int value) : bits(BITS(static_cast<float>(value))) {}               \
        operator float() const { return VALUE(bits); }                        \
    };                                                                        \
    static inline N operator+(N a, N b) { return N((float)a + (float)b); }    \
    static inline N operator-(N a, N b) { return N((float)a - (float)b); }    \
    static inline N operator*(N a, N b) { return N((float)a * (float)b); }    \
    static inline N operator/(N a, N b) { return N((float)a / (float)b); }    \
    struct alignas(4) N##_pair { N x, y; };
CUDACPU_HALF(__half, cudacpu_half_bits, cudacpu_half_value)
CUDACPU_HALF(__nv_bfloat16, cudacpu_bfloat16_bits, cudacpu_bfloat16_value)
#undef CUDACPU_HALF
typedef __half half;
typedef __half_pair __half2;
typedef __half_pair half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat16_pair __nv_bfloat162;

static inline float __half2float(__half value) { return value; }
static inline __half __float2half(float value) { return value; }
static inline __half __float2half_rn(float value) { return value; }
static inline unsigned short __half_as_ushort(__half value) { return value.bits; }
static inline __half __ushort_as_half(unsigned short bits) { return cudacpu_from_bits<__half>(bits); }
static inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline float __bfloat162float(__nv_bfloat16 value) { return value; }
static inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return cudacpu_from_bits<__nv_bfloat16>(bits); }
static inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }

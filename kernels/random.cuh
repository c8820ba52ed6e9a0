// Random numbers as functions of a counter, by Threefry2x32-20 (Salmon et al., SC 2011), and stochastic rounding.
//
// The counter is an element's position in the whole tensor and the number of the update. The key is passed in 16-bit halves,
// which both types of W hold exactly. The bits are those of arrayopt/randomness.py, which has the details.

__device__ __forceinline__ unsigned joined(W high, W low) { return (unsigned)high << 16 | (unsigned)low; }

__device__ __forceinline__ W uniform(long long position, W a, W b, W c, W d, W t1, W t0) {
    const unsigned k0 = joined(a, b) + (unsigned)(position >> 32), k1 = joined(c, d);
    const unsigned keys[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
    const unsigned turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    unsigned x = (unsigned)position + k0, y = joined(t1, t0) + k1;
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC unroll 20
#else
#pragma unroll
#endif
    for (int i = 0; i < 20; ++i) {
        x += y;
        y = (y << turns[i % 8] | y >> (32 - turns[i % 8])) ^ x;
        if (i % 4 == 3) {
            const unsigned n = (unsigned)i / 4 + 1;
            x += keys[n % 3], y += keys[(n + 1) % 3] + n;
        }
    }
    return (W)(x >> 8) * (W)0x1p-24;
}

// Rounds x stochastically to a 16-bit dtype: away from zero if u, in [0, 1), is below the fraction that truncation would lose.
__device__ __forceinline__ float round_bfloat16(float x, float u) {
    const unsigned bits = __float_as_uint(x) + (unsigned)(u * 0x1p16f);
    return finite(x) ? __uint_as_float(bits & 0xffff0000u) : x;
}

__device__ __forceinline__ float round_float16(float x, float u) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    if (!finite(x)) return x;
    if (size >= 0x38800000u) return __uint_as_float((bits + (unsigned)(u * 0x1p13f)) & 0xffffe000u);
    const float steps = __uint_as_float(size) * 0x1p24f, whole = floorf(steps);  // below 2^-14, numbers are evenly spaced
    const float up = u < steps - whole ? 1.0f : 0.0f;
    return __uint_as_float(__float_as_uint((whole + up) * 0x1p-24f) | (bits & 0x80000000u));
}

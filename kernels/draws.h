// Random numbers and stochastic rounding in whole vectors, with the same bits as random.cuh.
#ifdef VECTORS
enum { kDrawn = 4 };  // vectors computed at once, because each round of one vector depends on the round before
typedef unsigned Words __attribute__((vector_size(64), may_alias));
typedef long long Longs __attribute__((vector_size(64)));

// `uniform` at `count` positions, `each` apart. `to` must have room for whole groups of kDrawn vectors.
static __attribute__((noinline)) void draw(float* to, int64_t count, int64_t first, int64_t each, float a, float b, float c, float d,
                                           float t1, float t0) {
    const unsigned turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const Words k1 = Words{} + joined(c, d);
    for (int64_t at = 0; at < count; at += kDrawn * kLanes) {
        Words x[kDrawn], y[kDrawn], keys[kDrawn][3];
#pragma GCC unroll 4
        for (int v = 0; v < kDrawn; ++v) {
            const Longs half = first + (at + v * kLanes + Longs{0, 1, 2, 3, 4, 5, 6, 7}) * each;
            const Words near = (Words)half, far = (Words)(half + 8 * each);
            const Words low = __builtin_shufflevector(near, far, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const Words high = __builtin_shufflevector(near, far, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            keys[v][0] = high + joined(a, b), keys[v][1] = k1, keys[v][2] = keys[v][0] ^ k1 ^ 0x1bd11bdau;
            x[v] = low + keys[v][0], y[v] = joined(t1, t0) + k1;
        }
#pragma GCC unroll 20
        for (int i = 0; i < 20; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < kDrawn; ++v) {
                x[v] += y[v];
                y[v] = (y[v] << turns[i % 8] | y[v] >> (32 - turns[i % 8])) ^ x[v];
                const unsigned n = (unsigned)i / 4 + 1;
                if (i % 4 == 3) x[v] += keys[v][n % 3], y[v] += keys[v][(n + 1) % 3] + n;
            }
#pragma GCC unroll 4
        for (int v = 0; v < kDrawn; ++v)
            *(Floats*)(to + at + v * kLanes) = __builtin_convertvector((Integers)(x[v] >> 8), Floats) * 0x1p-24f;
    }
}

struct Drawn {
    alignas(64) float of[kStretch * kBlock];
    template <class... Key>
    Drawn(int64_t count, int64_t first, int64_t each, Key... key) { draw(of, count, first, each, key...); }
};

// The integer part of numbers that are not negative.
static __forceinline__ Integers whole(Floats x) { return __builtin_convertvector(x, Integers); }

static __forceinline__ Floats round_bfloat16(Floats x, Floats u) {
    const Integers bits = (Integers)x + whole(u * 0x1p16f);
    return ordinary(x) ? (Floats)(bits & -0x10000) : x;
}

// Stores numbers that are already rounded.
static __forceinline__ void put_rounded(Floats x, BFloat16* to) {
    const Integers bits = x == x ? (Integers)x : (Integers)x | 0x400000;
    *(Halves*)to = __builtin_convertvector(bits >> 16, Halves);
}

static __forceinline__ Floats round_float16(Floats x, Floats u) {
    const Integers bits = (Integers)x, size = bits & 0x7fffffff;
    const Floats steps = (Floats)size * 0x1p24f, below = __builtin_convertvector(whole(steps), Floats);
    const Floats near = below + (u < steps - below ? Floats{} + 1.0f : Floats{});
    const Floats small = (Floats)((Integers)(near * 0x1p-24f) | (bits ^ size));
    const Floats large = (Floats)(bits + whole(u * 0x1p13f) & -0x2000);
    return ordinary(x) ? size < 0x38800000 ? small : large : x;
}
#endif

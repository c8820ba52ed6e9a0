// Slots in 8 bits: a code for each element, and a scale for each block of 32 neighbours. See arrayopt/state/quantized.py.

static const int kBlock = 32;

__device__ __forceinline__ float top_of(signed char) { return 127.0f; }
__device__ __forceinline__ float top_of(unsigned char) { return 255.0f; }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The factor from codes to numbers; NaN if the block contained infinity or NaN.
template <class C>
__device__ __forceinline__ float step_of(BFloat16 scale) {
    const float x = widen(scale) * (1.0f / top_of(C()));
    return is_finite(x) ? x : __uint_as_float(0x7fc00000u);
}

// The scale of a block whose largest magnitude has these bits.
__device__ __forceinline__ BFloat16 scale_of(unsigned largest) {
    BFloat16 scale;
    narrow(__uint_as_float(largest), scale);
    if (widen(scale) < 0x1p-119f) scale.bits = 0;
    return scale;
}

// The factor from numbers to codes; 0 if the block is zero, or contains infinity or NaN.
template <class C>
__device__ __forceinline__ float factor_of(BFloat16 scale) {
    const float x = widen(scale);
    return x > 0.0f && is_finite(x) ? top_of(C()) / x : 0.0f;
}

// Gives square roots, the unsigned codes, at least the code 1 unless they are zero.
__device__ __forceinline__ float not_lost(float x, signed char) { return x; }
__device__ __forceinline__ float not_lost(float x, unsigned char) { return x > 0x1p-100f && x < 1.0f ? 1.0f : x; }

// The code of a number; `factor` is that of factor_of().
template <class C>
__device__ __forceinline__ C code_of(float x, float factor) {
    const float y = rintf(not_lost(x * factor, C())), top = top_of(C());
    return (C)(int)(y < top ? y : top);
}

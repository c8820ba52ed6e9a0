// Writing slots in 8 bits: the threads that share a block of 32 neighbours compute its scale together.

// Writes the codes of x[0] to x[n - 1], which are the elements from i on; see write(). All threads of a block of codes must
// call it, even with n <= 0, if their elements lie beyond the end. The first of these threads must have an element.
template <int N, bool kLast, class C>
__device__ __forceinline__ void write_codes(C* codes, BFloat16* scales, long long i, int n, bool aligned, const float (&x)[N]) {
    constexpr int kLanes = kBlock / N;
    int largest = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int bits = j < n ? (int)(__float_as_uint(x[j]) & 0x7fffffffu) : 0;
        largest = bits > largest ? bits : largest;
    }
    const unsigned first = threadIdx.x % 32 / kLanes * kLanes;
    const unsigned mask = kLanes == 32 ? 0xffffffffu : ((1u << kLanes % 32) - 1u) << first;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        const int other = __shfl_xor_sync(mask, largest, distance);
        largest = other > largest ? other : largest;
    }
    const BFloat16 scale = scale_of((unsigned)largest);
    const float factor = factor_of<C>(scale);
    Pack<C, N> made;
#pragma unroll
    for (int j = 0; j < N; ++j) made.value[j] = factor > 0.0f ? code_of<C>(x[j], factor) : (C)0;
    write<N, kLast>(codes + i, made, n, aligned);
    __syncwarp(mask);  // all have read the old scale
    if (threadIdx.x % kLanes == 0) scales[i / kBlock] = scale;
}

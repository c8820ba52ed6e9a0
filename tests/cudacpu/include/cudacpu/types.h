// Words that qualify declarations, and vector types with CUDA's alignments.
#pragma once

#define __CUDACC__ 1
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define __global__
#define __device__
#define __host__
#define __constant__
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
// One block at a time has its shared memory in thread-local storage; the padding keeps variables apart.
#define __shared__ __attribute__((aligned(128))) thread_local

#define CUDACPU_VECTORS(T, N)                                                        \
    struct alignas(2 * sizeof(T)) N##2 { T x, y; };                                  \
    struct N##3 { T x, y, z; };                                                      \
    struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };  \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                      \
    static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }              \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDACPU_VECTORS(signed char, char)
CUDACPU_VECTORS(unsigned char, uchar)
CUDACPU_VECTORS(short, short)
CUDACPU_VECTORS(unsigned short, ushort)
CUDACPU_VECTORS(int, int)
CUDACPU_VECTORS(unsigned, uint)
CUDACPU_VECTORS(long long, longlong)
CUDACPU_VECTORS(unsigned long long, ulonglong)
CUDACPU_VECTORS(float, float)
CUDACPU_VECTORS(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

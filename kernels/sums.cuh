// Sums in a fixed order: lanes of a warp by a butterfly, warps of a block by their number. No float atomics, so that results
// repeat bit for bit, whatever the grid.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// The sums of N values over all threads of the block; each thread gets all of them. All threads must call it.
template <class T, int N>
__device__ __forceinline__ void block_sum(T (&x)[N]) {
    __shared__ T of_warp[N][kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        x[k] = warp_sum(x[k]);
        if (lane == 0) of_warp[k][warp] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
        x[k] = of_warp[k][0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) x[k] += of_warp[k][w];
    }
    __syncthreads();  // of_warp may be written again
}

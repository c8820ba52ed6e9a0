// Reductions in a fixed order: over the lanes of a warp by a butterfly, over the warps of a block in order. There are no float
// atomics, so results repeat bit for bit, whatever the grid.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// How to compute the k-th result: start() is the initial value, and fold() combines two values. These structs do the same for
// each k; generated structs choose one of them for each k. NaN stays NaN.
struct Sum {
    template <class T>
    static __device__ __forceinline__ T start(int, T) { return 0; }
    template <class T>
    static __device__ __forceinline__ T fold(int, T a, T b) { return a + b; }
};
struct Max {
    template <class T>
    static __device__ __forceinline__ T start(int, T) { return (T)__longlong_as_double(0xfff0000000000000ll); }
    template <class T>
    static __device__ __forceinline__ T fold(int, T a, T b) { return maximum(a, b); }
};
struct Min {
    template <class T>
    static __device__ __forceinline__ T start(int, T) { return (T)__longlong_as_double(0x7ff0000000000000ll); }
    template <class T>
    static __device__ __forceinline__ T fold(int, T a, T b) { return minimum(a, b); }
};

template <class Of, class T, int N>
__device__ __forceinline__ void start(T (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = Of::start(k, T());
}

// Reduces the k-th result over the lanes of a warp; each lane gets it.
template <class Of, class T>
__device__ __forceinline__ T warp_fold(int k, T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = Of::fold(k, x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Reduces N results over all threads of the block; each thread gets all of them. All threads must call it.
template <class Of, class T, int N>
__device__ __forceinline__ void block_fold(T (&x)[N]) {
    __shared__ T of_warp[N][kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        x[k] = warp_fold<Of>(k, x[k]);
        if (lane == 0) of_warp[k][warp] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
        x[k] = of_warp[k][0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) x[k] = Of::fold(k, x[k], of_warp[k][w]);
    }
    __syncthreads();  // of_warp may be written again
}

// A pass over rings: each thread of a block takes one vector of elements at a time, and loops over the members of the ring, so
// that code and registers do not grow with the number of members. Each sum, such as one per member, has a place for each warp.

__device__ __forceinline__ W& warp_sum(int k, int warp) {
    __shared__ W sums[kMostSums][kWarps];
    return sums[k][warp];
}

// Each warp initializes its own places.
template <class Of>
__device__ __forceinline__ void begin_sums(int count) {
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < count; k += 32) warp_sum(k, threadIdx.x / 32) = Of::start(k, W());
    __syncwarp();
}

// Adds the values of all lanes of the warp to the k-th sum.
template <class Of>
__device__ __forceinline__ void take_in(int k, W x) {
    x = warp_fold<Of>(k, x);
    W& sum = warp_sum(k, threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) sum = Of::fold(k, sum, x);
}

// Writes a piece's sums to `work` for the next stage. first: for each sum, the offset of its partial results.
template <class Of>
__device__ __forceinline__ void keep_all(int count, W* work, const long long* first, int piece) {
    __syncthreads();
#pragma unroll 1
    for (int k = threadIdx.x; k < count; k += kThreads) {
        W made = warp_sum(k, 0);
#pragma unroll
        for (int w = 1; w < kWarps; ++w) made = Of::fold(k, made, warp_sum(k, w));
        work[first[k] + piece] = made;
    }
}

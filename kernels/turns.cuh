// A pass over rings: a block takes a vector of each of its threads at a time, and goes over the members for these elements, so
// that neither code nor registers grow with their number. Each sum, as that of a member, has a place for each warp.

__device__ __forceinline__ W& warp_sum(int k, int warp) {
    __shared__ W sums[kMostSums][kWarps];
    return sums[k][warp];
}

// A warp begins its own places.
template <class Of>
__device__ __forceinline__ void begin_sums(int count) {
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < count; k += 32) warp_sum(k, threadIdx.x / 32) = Of::start(k, W());
    __syncwarp();
}

// The k-th sum takes in what all lanes of the warp have.
template <class Of>
__device__ __forceinline__ void take_in(int k, W x) {
    x = warp_fold<Of>(k, x);
    W& sum = warp_sum(k, threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) sum = Of::fold(k, sum, x);
}

// A piece's sums, for the stage after; first: the table's columns that say where they begin.
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

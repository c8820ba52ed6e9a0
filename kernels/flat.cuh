// A pass over a tensor that is seen as one row of elements.
//
// `Pass` is made from the plan: at() does what the pass does with up to N consecutive elements, and adds to its sums.

constexpr int kVector = 4;    // elements of a thread at a time

template <class Pass, bool kAligned>
__device__ __forceinline__ void flat_elements(const Pass& pass, long long begin, long long end, typename Pass::Sums& sums) {
    W columns[1][kVector];
    for (long long i = begin + threadIdx.x * kVector; i < end; i += kThreads * kVector) {
        const int n = end - i < kVector ? (int)(end - i) : kVector;
        pass.template at<kVector, kAligned>(i, n, 0, sums, columns);
    }
}

template <class Pass>
__device__ __forceinline__ void flat_piece(const Pass& pass, long long size, bool aligned, int piece) {
    const long long begin = (long long)piece * kChunk, end = begin + kChunk < size ? begin + kChunk : size;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole);
    if (aligned) flat_elements<Pass, true>(pass, begin, end, sums);
    else flat_elements<Pass, false>(pass, begin, end, sums);
    if constexpr (Pass::kWhole > 0) {
        block_fold<typename Pass::OfWhole>(sums.whole);
        if (threadIdx.x == 0) pass.keep_whole(piece, sums);
    }
}

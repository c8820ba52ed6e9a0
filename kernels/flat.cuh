// A pass over a tensor that is seen as one row of elements.
//
// `Pass` is made from the plan: load() reads up to N consecutive elements, work() does what the pass does with them, and adds
// to its sums. Pass::kAhead vectors are read before the first of them is used, so that enough bytes are on their way.

constexpr int kVector = 4;    // elements of a thread at a time

// The end of a thread's elements from i on; of those of the threads that write a block of codes together.
template <class Pass>
__device__ __forceinline__ long long end_of(long long i) {
    return Pass::kCodes ? i - i % 32 + 32 : i + kVector;
}

template <class Pass, bool kAligned>
__device__ __forceinline__ void flat_elements(const Pass& pass, long long begin, long long end, typename Pass::Sums& sums) {
    constexpr int kStride = kThreads * kVector;
    W columns[1][kVector];
    long long i = begin + threadIdx.x * kVector;
    if constexpr (kAligned && (Pass::kAhead > 1 || kStages == 1)) {
#pragma unroll 1
        for (; end_of<Pass>(i) + (Pass::kAhead - 1) * kStride <= end; i += Pass::kAhead * kStride) {
            typename Pass::template Loads<kVector> loads[Pass::kAhead];
#pragma unroll
            for (int u = 0; u < Pass::kAhead; ++u) loads[u] = pass.template load<kVector, true>(i + u * kStride, kVector);
#pragma unroll
            for (int u = 0; u < Pass::kAhead; ++u)
                pass.template work<kVector>(i + u * kStride, kVector, true, loads[u], {}, {}, sums, columns);
        }
    }
#pragma unroll 1
    for (; end_of<Pass>(i) - (Pass::kCodes ? 32 : kVector) < end; i += kStride) {
        const int n = end - i < kVector ? (int)(end - i) : kVector;
        pass.template work<kVector>(i, n, kAligned, pass.template load<kVector, kAligned>(i, n), {}, {}, sums, columns);
    }
}

template <class Pass>
__device__ __forceinline__ void flat_piece(const Pass& pass, long long size, long long chunk, bool aligned, int piece) {
    const long long begin = (long long)piece * chunk, end = begin + chunk < size ? begin + chunk : size;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole);
    if (aligned) flat_elements<Pass, true>(pass, begin, end, sums);
    else flat_elements<Pass, false>(pass, begin, end, sums);
    if constexpr (Pass::kWhole > 0) {
        block_fold<typename Pass::OfWhole>(sums.whole);
        if (threadIdx.x == 0) pass.keep_whole(piece, sums);
    }
}

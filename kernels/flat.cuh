// A pass over a tensor that is seen as one row of elements.
//
// `Pass` is generated from the plan: load() reads up to N consecutive elements, and work() computes with them and adds to the
// sums. Pass::kAhead vectors are read before the first of them is used, so that enough loads are in flight.

constexpr int kVector = 4;    // elements that a thread takes at a time

// The end of a thread's vector that starts at i. If the pass writes codes, the end of the block of codes around i.
template <class Pass>
__device__ __forceinline__ long long end_of(long long i) {
    return Pass::kCodes ? i - i % 32 + 32 : i + kVector;
}

// Whether all of a thread's next kAhead vectors, from i on, lie before `end`.
template <class Pass>
__device__ __forceinline__ bool all_there(long long i, long long end) {
    return end_of<Pass>(i) + (Pass::kAhead - 1) * kThreads * kVector <= end;
}

// kAhead vectors of a thread, all read before the first is used.
template <class Pass>
struct Group {
    static constexpr int kStride = kThreads * kVector;
    typename Pass::template Loads<kVector> loads[Pass::kAhead];

    __device__ __forceinline__ void load(const Pass& pass, long long i) {
#pragma unroll
        for (int u = 0; u < Pass::kAhead; ++u) loads[u] = pass.template load<kVector, true>(i + u * kStride, kVector);
    }
    __device__ __forceinline__ void work(const Pass& pass, long long i, typename Pass::Sums& sums) const {
        W columns[1][kVector];
#pragma unroll
        for (int u = 0; u < Pass::kAhead; ++u)
            pass.template work<kVector>(i + u * kStride, kVector, true, loads[u], {}, {}, sums, columns);
    }
};

// Processes a thread's elements from i to `end`.
template <class Pass, bool kAligned>
__device__ __forceinline__ void flat_rest(const Pass& pass, long long i, long long end, typename Pass::Sums& sums) {
    constexpr int kStride = kThreads * kVector;
    W columns[1][kVector];
    if constexpr (kAligned && (Pass::kAhead > 1 || kStages == 1)) {
#pragma unroll 1
        for (; all_there<Pass>(i, end); i += Pass::kAhead * kStride) {
            Group<Pass> group;
            group.load(pass, i);
            group.work(pass, i, sums);
        }
    }
#pragma unroll 1
    for (; end_of<Pass>(i) - (Pass::kCodes ? 32 : kVector) < end; i += kStride) {
        const int n = end - i < kVector ? (int)(end - i) : kVector;
        pass.template work<kVector>(i, n, kAligned, pass.template load<kVector, kAligned>(i, n), {}, {}, sums, columns);
    }
}

template <class Pass, bool kAligned>
__device__ __forceinline__ void flat_elements(const Pass& pass, long long begin, long long end, typename Pass::Sums& sums) {
    flat_rest<Pass, kAligned>(pass, begin + threadIdx.x * kVector, end, sums);
}

// Reduces a piece's sums over the block and stores them for the next stage.
template <class Pass>
__device__ __forceinline__ void keep_sums(const Pass& pass, int piece, typename Pass::Sums& sums) {
    if constexpr (Pass::kWhole > 0) {
        block_fold<typename Pass::OfWhole>(sums.whole);
        if (threadIdx.x == 0) pass.keep_whole(piece, sums);
    }
}

// Processes a piece that is one group for each thread, after starting to read the next piece, so that memory is busy while the
// block reduces its sums. there: whether `now` has been read. Returns whether `next` is being read.
template <class Pass>
__device__ __forceinline__ bool flat_piece_ahead(const Pass& pass, long long size, long long chunk, int piece, int last, bool there,
                                                 const Group<Pass>& now, Group<Pass>& next) {
    const long long begin = (long long)piece * chunk, end = begin + chunk < size ? begin + chunk : size;
    const long long i = begin + threadIdx.x * kVector, stop = end + chunk < size ? end + chunk : size;
    const bool ahead = piece + 1 < last && all_there<Pass>(i + chunk, stop);
    if (ahead) next.load(pass, i + chunk);
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole);
    if (there) now.work(pass, i, sums);
    flat_rest<Pass, true>(pass, there ? i + Pass::kAhead * Group<Pass>::kStride : i, end, sums);
    keep_sums(pass, piece, sums);
    return ahead;
}

// Processes a piece of a tensor, or all pieces of a ticket, if they need no separate sums or are read ahead.
template <class Pass>
__device__ __forceinline__ void flat_piece(const Pass& pass, long long size, long long chunk, bool aligned, int piece) {
    const long long begin = (long long)piece * chunk, all = begin + (Pass::kWhole == 0 ? now().count : 1) * chunk;
    const long long end = all < size ? all : size;
    if constexpr (Pass::kWhole > 0 && Pass::kAhead == 4) {
        if (aligned && now().count > 1) {
            const int last = piece + now().count;
            Group<Pass> one, other;  // used alternately, because a copy would wait for the loads
            bool there = false;
#pragma unroll 1
            for (; piece < last; ++piece) {
                there = flat_piece_ahead(pass, size, chunk, piece, last, there, one, other);
                if (++piece < last) there = flat_piece_ahead(pass, size, chunk, piece, last, there, other, one);
            }
            return pass_over_rest();
        }
    }
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole);
    if (aligned) flat_elements<Pass, true>(pass, begin, end, sums);
    else flat_elements<Pass, false>(pass, begin, end, sums);
    keep_sums(pass, piece, sums);
    if constexpr (Pass::kWhole == 0) pass_over_rest();
}

// Computation between passes, over rows, columns, matrices or whole tensors, from the passes' reductions.

// Reduces results [begin, end) of `length` terms each. Depending on `length`, one thread, one warp or the block computes a
// result. term(result, j) returns a term, and keep(result, made) stores a result. All threads of the block must call it.
template <class Of, class Term, class Keep>
__device__ __forceinline__ void fold_over(long long begin, long long end, long long length, Term term, Keep keep) {
    if (length <= 16) {
#pragma unroll 1
        for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
            double made = Of::start(0, 0.0);
#pragma unroll 1
            for (long long j = 0; j < length; ++j) made = Of::fold(0, made, term(i, j));
            keep(i, made);
        }
    } else if (end - begin >= kWarps) {
#pragma unroll 1
        for (long long i = begin + threadIdx.x / 32; i < end; i += kWarps) {
            double made = Of::start(0, 0.0);
#pragma unroll 1
            for (long long j = threadIdx.x % 32; j < length; j += 32) made = Of::fold(0, made, term(i, j));
            made = warp_fold<Of>(0, made);
            if (threadIdx.x % 32 == 0) keep(i, made);
        }
    } else {
#pragma unroll 1
        for (long long i = begin; i < end; ++i) {
            double made[1] = {Of::start(0, 0.0)};
#pragma unroll 1
            for (long long j = threadIdx.x; j < length; j += kThreads) made[0] = Of::fold(0, made[0], term(i, j));
            block_fold<Of>(made);
            if (threadIdx.x == 0) keep(i, made[0]);
        }
    }
}

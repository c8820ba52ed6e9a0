// Between the passes: what is computed over rows, columns, matrices or whole tensors, from the passes' sums.

// Results [begin, end), each the sum of `length` terms: one thread, one warp or the whole block takes a result, by their length.
// term(result, j) gives a term, keep(result, sum) takes a sum. All threads of the block must call it.
template <class Term, class Keep>
__device__ __forceinline__ void sum_over(long long begin, long long end, long long length, Term term, Keep keep) {
    if (length <= 16) {
        for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
            double sum = 0;
            for (long long j = 0; j < length; ++j) sum += term(i, j);
            keep(i, sum);
        }
    } else if (end - begin >= kWarps) {
        for (long long i = begin + threadIdx.x / 32; i < end; i += kWarps) {
            double sum = 0;
            for (long long j = threadIdx.x % 32; j < length; j += 32) sum += term(i, j);
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) keep(i, sum);
        }
    } else {
        for (long long i = begin; i < end; ++i) {
            double sum[1] = {0};
            for (long long j = threadIdx.x; j < length; j += kThreads) sum[0] += term(i, j);
            block_sum(sum);
            if (threadIdx.x == 0) keep(i, sum[0]);
        }
    }
}

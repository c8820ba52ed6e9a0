// Decides from all gradients whether a step is skipped, and what gradients are multiplied by. One block.

// Generated, below. square: the sum of squares of all norms. shrunk: that of the norms times kSmall, which does not overflow.
// given: the step's options from the host. state: the loss scale's, before the step. verdict: the verdict, then the new state.
__device__ void verdict_of(double square, double shrunk, const double* given, const double* state, double* verdict,
                           int* skip);

__device__ __forceinline__ double norm_at(long long place) { return *reinterpret_cast<const double*>(place); }

// Marks in skip[1] to skip[layers] the layers with a norm that is not finite. Returns whether only these layers are skipped:
// false if another tensor's norm is not finite, or if nothing else would be updated; then the whole step is skipped.
__device__ bool leave_out(const long long* norms, int count, const int* layer, int layers, int* skip) {
    int wrong = 0, rest = 0;
    for (int i = threadIdx.x; i < layers; i += kThreads) skip[1 + i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        if (isfinite(norm_at(norms[i]))) continue;
        if (layer[i] > 0) atomicExch(skip + layer[i], 1);
        wrong |= layer[i] == 0;
    }
    wrong = __syncthreads_or(wrong);
    for (int i = threadIdx.x; i < count; i += kThreads) rest |= layer[i] == 0 || skip[layer[i]] == 0;
    rest = __syncthreads_or(rest);
    return rest && !wrong;
}

// norms: the address of the norm of each tensor's gradient. layer: for each norm, its layer of stacked tensors, from 1, or 0
// for other tensors; null if single layers are never skipped. skip[0]: whether the step is skipped.
extern "C" __global__ void __launch_bounds__(kThreads)
judge(const long long* norms, int count, const int* layer, int layers, const double* given, const double* state,
      double* verdict, int* skip) {
    const bool alone = layer != nullptr && leave_out(norms, count, layer, layers, skip);
    double sum[2] = {0, 0};
    for (int i = threadIdx.x; i < count; i += kThreads) {
        if (alone && layer[i] > 0 && skip[layer[i]] != 0) continue;
        const double norm = norm_at(norms[i]), shrunk = norm * kSmall;
        sum[0] += norm * norm;
        sum[1] += shrunk * shrunk;
    }
    block_fold<Sum>(sum);
    if (threadIdx.x == 0) verdict_of(sum[0], sum[1], given, state, verdict, skip);
}

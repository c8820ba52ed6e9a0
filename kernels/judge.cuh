// What all gradients together mean for a step: whether it is skipped, and what gradients are multiplied by. One block.

// From the sum of the squares of tensors' norms, and that of the norms times kSmall, which does not overflow; below.
// given: what the host says of the step. state: of the loss scale, before the step. verdict: for the step, then the new state.
__device__ void verdict_of(double square, double shrunk, const double* given, const double* state, double* verdict,
                           int* skip);

__device__ __forceinline__ double norm_at(long long place) { return *reinterpret_cast<const double*>(place); }

// Marks in skip[1] to skip[layers] the layers that have a norm that is not finite. Whether they are skipped alone: not if the
// norm of anything else is not finite either, or if nothing is left.
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

// norms: where the norm of each tensor's gradient is. layer: for each of them which layer of stacked tensors it is of, from 1,
// or 0; null: layers are not skipped alone. skip[0]: whether the step is skipped.
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

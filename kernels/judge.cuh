// What all gradients together mean for a step: whether it is skipped, and what gradients are multiplied by. One block.

// From the sum of the squares of tensors' norms, and that of the norms times kSmall, which does not overflow; below.
// given: what the host says of the step. state: of the loss scale, before the step. verdict: for the step, then the new state.
__device__ void verdict_of(double square, double shrunk, const double* given, const double* state, double* verdict,
                           int* skip);

// norms: where the norm of each tensor's gradient is.
extern "C" __global__ void __launch_bounds__(kThreads)
judge(const long long* norms, int count, const double* given, const double* state, double* verdict, int* skip) {
    double sum[2] = {0, 0};
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const double norm = *reinterpret_cast<const double*>(norms[i]), shrunk = norm * kSmall;
        sum[0] += norm * norm;
        sum[1] += shrunk * shrunk;
    }
    block_fold<Sum>(sum);
    if (threadIdx.x == 0) verdict_of(sum[0], sum[1], given, state, verdict, skip);
}

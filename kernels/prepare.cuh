// Before a step: increments each tensor's count, and computes its scalars in double precision: hyper-parameters, and values
// that depend on them and on the count, such as bias corrections. Counts are on the device, so that a step can be replayed or
// skipped without the host.

// Computes the scalars of a step from the hyper-parameters of the tensor's group. The generated source defines it below.
__device__ void scalars_of(const long long* t, const double* hyper, double count, double factor, double* scalar,
                           W* working);

// part: for each tensor, whether the step updates it; null for all. factor: the factor for gradients. taken, done, skip, layer:
// see run(). counts: for each tensor, its updates, and the steps in which it was skipped while others were updated.
extern "C" __global__ void __launch_bounds__(kThreads)
prepare(const long long* table, const bool* part, int tensors, const double* hypers, long long* counts, double* scalars,
        W* working, unsigned* taken, int launches, unsigned* done, const double* factor, const int* skip,
        const int* layer) {
    const int tensor = blockIdx.x * kThreads + threadIdx.x;
    if (tensor < launches) taken[tensor] = 0;
    if (tensor >= tensors || (part != nullptr && !part[tensor]) || (skip != nullptr && *skip != 0)) return;
    const long long* const t = table + (long long)tensor * kColumns;
    done[tensor] = 0;
    if (layer != nullptr && skip[layer[tensor]] != 0) {
        ++counts[2 * t[IN_COUNT] + 1];
        return;
    }
    const double updates = (double)++counts[2 * t[IN_COUNT]];
    scalars_of(t, hypers + t[IN_GROUP] * kHypers, updates, *factor, scalars + (long long)tensor * kScalars,
               working + (long long)tensor * (kScalars + kValues));
}

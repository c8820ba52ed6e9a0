// Totals: reduces one number of each of several tensors, in their order, in double precision. A block for each total.

constexpr int kThreads = 256;

struct Add {
    static __device__ __forceinline__ double start() { return 0; }
    static __device__ __forceinline__ double fold(double a, double b) { return a + b; }
};

struct Most {
    static __device__ __forceinline__ double start() { return -__longlong_as_double(0x7ff0000000000000ll); }
    static __device__ __forceinline__ double fold(double a, double b) { return a != a || a > b ? a : b; }
};

// first: for each total, the index of its first number in `from` and `to`. from: the address of each number. to: the address
// to which its tensor gets the total. skip: see run(). A layer that is skipped is skipped in all tensors of its total.
template <class Fold>
__device__ void total(const int* first, const long long* from, const long long* to, const int* skip) {
    __shared__ double number[kThreads];
    if (skip != nullptr && *skip != 0) return;
    const int begin = first[blockIdx.x], end = first[blockIdx.x + 1];
    double made = Fold::start();
    for (int at = begin; at < end; at += kThreads) {
        const int mine = at + threadIdx.x;
        if (mine < end) number[threadIdx.x] = *reinterpret_cast<const double*>(from[mine]);
        __syncthreads();
        for (int i = 0; i < kThreads && at + i < end; ++i) made = Fold::fold(made, number[i]);
        __syncthreads();
    }
    for (int at = begin + threadIdx.x; at < end; at += kThreads) *reinterpret_cast<double*>(to[at]) = made;
}

extern "C" __global__ void __launch_bounds__(kThreads)
total_sum(const int* first, const long long* from, const long long* to, const int* skip) {
    total<Add>(first, from, to, skip);
}

extern "C" __global__ void __launch_bounds__(kThreads)
total_max(const int* first, const long long* from, const long long* to, const int* skip) {
    total<Most>(first, from, to, skip);
}

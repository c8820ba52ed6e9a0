// What the engine's kernels are simulated beside: a copy, AdamW in the form of PyTorch's fused kernel, and LAMB in apex's form.
// A block takes a chunk of a tensor. First moments stand in the place of apex's gradients after the first kernel.

struct Tensor {
    float *p, *g, *m, *v;
    long long size;
};
struct Chunk {
    int tensor, number;
};

constexpr int kBlock = 512, kChunk = 4096;

extern "C" __global__ void copying(const float4* from, float4* to, int n) {
    const int i = blockIdx.x * 1024 + threadIdx.x;
    float4 x[4];
#pragma unroll
    for (int u = 0; u < 4; ++u)
        if (i + u * 256 < n) x[u] = from[i + u * 256];
#pragma unroll
    for (int u = 0; u < 4; ++u)
        if (i + u * 256 < n) to[i + u * 256] = x[u];
}

__device__ __forceinline__ float4 at(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ void put(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

__device__ __forceinline__ void adamw_of(float& p, float g, float& m, float& v, float lr, float decay, float beta1, float beta2,
                                         float eps, float correction1, float root_correction2) {
    p -= lr * decay * p;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    p -= lr / correction1 * m / (sqrtf(v) / root_correction2 + eps);
}

extern "C" __global__ void __launch_bounds__(kBlock)
fused_adamw(const Tensor* tensors, const Chunk* chunks, float lr, float decay, float beta1, float beta2, float eps,
            float correction1, float root_correction2) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const long long begin = (long long)chunk.number * kChunk;
    for (long long i = begin + threadIdx.x * 4; i < begin + kChunk && i < t.size; i += kBlock * 4) {
        float4 p = at(t.p + i), g = at(t.g + i), m = at(t.m + i), v = at(t.v + i);
        adamw_of(p.x, g.x, m.x, v.x, lr, decay, beta1, beta2, eps, correction1, root_correction2);
        adamw_of(p.y, g.y, m.y, v.y, lr, decay, beta1, beta2, eps, correction1, root_correction2);
        adamw_of(p.z, g.z, m.z, v.z, lr, decay, beta1, beta2, eps, correction1, root_correction2);
        adamw_of(p.w, g.w, m.w, v.w, lr, decay, beta1, beta2, eps, correction1, root_correction2);
        put(t.p + i, p), put(t.m + i, m), put(t.v + i, v);
    }
}

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[kBlock / 32];
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < kBlock / 32; ++i) x += of_warp[i];
    __syncthreads();
    return x;
}

__device__ __forceinline__ void lamb_of(float p, float& g, float& m, float& v, float decay, float beta1, float beta2, float eps,
                                        float correction1, float correction2, float& of_p, float& of_u) {
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    g = m / correction1 / (sqrtf(v / correction2) + eps) + decay * p;
    of_p += p * p, of_u += g * g;
}

// partial: the squares of a chunk's parameters, and of its updates, which take the place of gradients.
extern "C" __global__ void __launch_bounds__(kBlock)
lamb_first(const Tensor* tensors, const Chunk* chunks, float* partial, float decay, float beta1, float beta2, float eps,
           float correction1, float correction2) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const long long begin = (long long)chunk.number * kChunk;
    float of_p = 0, of_u = 0;
    for (long long i = begin + threadIdx.x * 4; i < begin + kChunk && i < t.size; i += kBlock * 4) {
        float4 p = at(t.p + i), g = at(t.g + i), m = at(t.m + i), v = at(t.v + i);
        lamb_of(p.x, g.x, m.x, v.x, decay, beta1, beta2, eps, correction1, correction2, of_p, of_u);
        lamb_of(p.y, g.y, m.y, v.y, decay, beta1, beta2, eps, correction1, correction2, of_p, of_u);
        lamb_of(p.z, g.z, m.z, v.z, decay, beta1, beta2, eps, correction1, correction2, of_p, of_u);
        lamb_of(p.w, g.w, m.w, v.w, decay, beta1, beta2, eps, correction1, correction2, of_p, of_u);
        put(t.g + i, g), put(t.m + i, m), put(t.v + i, v);
    }
    of_p = block_sum(of_p), of_u = block_sum(of_u);
    if (threadIdx.x == 0) partial[2 * blockIdx.x] = of_p, partial[2 * blockIdx.x + 1] = of_u;
}

// firsts: the first chunk of each tensor. A block takes a tensor.
extern "C" __global__ void __launch_bounds__(kBlock) lamb_ratio(const int* firsts, const float* partial, float* ratio) {
    float of_p = 0, of_u = 0;
    for (int i = firsts[blockIdx.x] + threadIdx.x; i < firsts[blockIdx.x + 1]; i += kBlock)
        of_p += partial[2 * i], of_u += partial[2 * i + 1];
    of_p = block_sum(of_p), of_u = block_sum(of_u);
    if (threadIdx.x == 0) ratio[blockIdx.x] = of_p > 0 && of_u > 0 ? sqrtf(of_p) / sqrtf(of_u) : 1;
}

extern "C" __global__ void __launch_bounds__(kBlock)
lamb_second(const Tensor* tensors, const Chunk* chunks, const float* ratio, float lr) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const long long begin = (long long)chunk.number * kChunk;
    const float by = lr * ratio[chunk.tensor];
    for (long long i = begin + threadIdx.x * 4; i < begin + kChunk && i < t.size; i += kBlock * 4) {
        float4 p = at(t.p + i), u = at(t.g + i);
        p.x -= by * u.x, p.y -= by * u.y, p.z -= by * u.z, p.w -= by * u.w;
        put(t.p + i, p);
    }
}

"""AdamW and LAMB in the form of NVIDIA's apex, over CuPy's arrays in float32: a yardstick that needs no apex.

Tensors are cut into chunks of 65,536 elements, a block of 512 threads works on each, and a thread on four neighbours.
AdamW is one launch. LAMB is: the global norm of all gradients; a launch that writes both moments and each element's
update; the norms of parameters and of updates; and a launch that reads these two and writes parameters. Written anew
after the description in the documentation of `apex.optimizers`, and the papers of Adam and LAMB; numbers that do not
change from step to step are given once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["CHUNK", "adamw", "lamb"]

CHUNK, THREADS, COLUMNS = 65536, 512, 6

TEXT = r"""
// A row of the table: how many elements, and where p, g, m, v and the update are. Settings: `first` and `second`
// correct the moments, `most` is the largest norm.
struct Settings { float lr, beta1, beta2, eps, decay, first, second, most; };

template <class Work>
__device__ __forceinline__ void over(const long long* table, const int* chunks, int chunk, Work work) {
    const long long* const t = table + 6ll * chunks[2 * blockIdx.x];
    const long long begin = (long long)chunks[2 * blockIdx.x + 1] * chunk;
    const long long end = begin + chunk < t[0] ? begin + chunk : t[0];
    for (long long i = begin + 4 * threadIdx.x; i < end; i += 4 * blockDim.x)
        work(t, i, end - i < 4 ? (int)(end - i) : 4);
}

__device__ __forceinline__ float4 read(long long array, long long i, int n) {
    const float* from = reinterpret_cast<const float*>(array) + i;
    if (n == 4) return *reinterpret_cast<const float4*>(from);
    return {from[0], n > 1 ? from[1] : 0.0f, n > 2 ? from[2] : 0.0f, 0.0f};
}

__device__ __forceinline__ void write(long long array, long long i, int n, const float4& x) {
    float* to = reinterpret_cast<float*>(array) + i;
    if (n == 4) { *reinterpret_cast<float4*>(to) = x; return; }
    to[0] = x.x;
    if (n > 1) to[1] = x.y;
    if (n > 2) to[2] = x.z;
}

__device__ __forceinline__ float of_block(float x) {
    __shared__ float of_warp[16];
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
    return sum;
}

__device__ __forceinline__ float moved(float p, float g, float& m, float& v, const Settings& s) {
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    return m * s.first / (sqrtf(v * s.second) + s.eps) + s.decay * p;
}

// What every element's step is; of LAMB, where it is not made yet, it is kept.
__device__ __forceinline__ void stepped(const long long* table, const int* chunks, int chunk, const Settings& s,
                                        float scale, bool kept) {
    over(table, chunks, chunk, [&](const long long* t, long long i, int n) {
        float4 p = read(t[1], i, n), g = read(t[2], i, n), m = read(t[3], i, n), v = read(t[4], i, n);
        const float4 u = {moved(p.x, g.x * scale, m.x, v.x, s), moved(p.y, g.y * scale, m.y, v.y, s),
                          moved(p.z, g.z * scale, m.z, v.z, s), moved(p.w, g.w * scale, m.w, v.w, s)};
        write(t[3], i, n, m);
        write(t[4], i, n, v);
        if (kept) write(t[5], i, n, u);
        else write(t[1], i, n, {p.x - s.lr * u.x, p.y - s.lr * u.y, p.z - s.lr * u.z, p.w - s.lr * u.w});
    });
}

extern "C" __global__ void __launch_bounds__(512)
adamw(const long long* table, const int* chunks, int chunk, Settings s) {
    stepped(table, chunks, chunk, s, 1.0f, false);
}

extern "C" __global__ void __launch_bounds__(512)
lamb(const long long* table, const int* chunks, int chunk, Settings s, const float* norm) {
    stepped(table, chunks, chunk, s, *norm > s.most ? s.most / *norm : 1.0f, true);
}

// The sum of the squares of a chunk of one array.
extern "C" __global__ void __launch_bounds__(512)
squares(const long long* table, const int* chunks, int chunk, int of, float* sums) {
    float sum = 0;
    over(table, chunks, chunk, [&](const long long* t, long long i, int n) {
        const float4 x = read(t[of], i, n);
        sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    });
    sum = of_block(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The norm of the chunks of each tensor, or of all.
extern "C" __global__ void __launch_bounds__(512) norms(const float* sums, const int* starts, float* to) {
    float sum = 0;
    for (int i = starts[blockIdx.x] + threadIdx.x; i < starts[blockIdx.x + 1]; i += blockDim.x) sum += sums[i];
    sum = of_block(sum);
    if (threadIdx.x == 0) to[blockIdx.x] = sqrtf(sum);
}

extern "C" __global__ void __launch_bounds__(512)
apply(const long long* table, const int* chunks, int chunk, Settings s, const float* of_p, const float* of_u) {
    const int tensor = chunks[2 * blockIdx.x];
    const float a = of_p[tensor], b = of_u[tensor], step = s.lr * (a > 0.0f && b > 0.0f ? a / b : 1.0f);
    over(table, chunks, chunk, [&](const long long* t, long long i, int n) {
        const float4 p = read(t[1], i, n), u = read(t[5], i, n);
        write(t[1], i, n, {p.x - step * u.x, p.y - step * u.y, p.z - step * u.z, p.w - step * u.w});
    });
}
"""

SETTINGS = np.dtype([(x, "f4") for x in ("lr", "beta1", "beta2", "eps", "decay", "first", "second", "most")])
KERNELS = ("adamw", "lamb", "squares", "norms", "apply")


class _Form:
    """Tensors in chunks, their moments, and the kernels."""

    def __init__(self, params: list[Any], grads: list[Any], *, kept: bool, chunk: int, **settings: float) -> None:
        import cupy

        module = cupy.RawModule(code=TEXT, options=("-std=c++17",))
        self.kernels = {name: module.get_function(name) for name in KERNELS}
        self.settings, self.chunk, self.t = settings, np.int32(chunk), 0
        count = 3 if kept else 2
        self.own = [[cupy.zeros(p.shape, cupy.float32) for p in params] for _ in range(count)]
        self.held = params, grads
        columns = [params, grads, *self.own, *([params] if not kept else [])]
        rows = [[x[i].data.ptr for x in columns] for i in range(len(params))]
        sizes = [p.size for p in params]
        table = np.array([[n, *row] for n, row in zip(sizes, rows, strict=True)], np.int64)
        assert table.shape[1] == COLUMNS
        each = [-(-n // chunk) for n in sizes]
        chunks = [(i, k) for i, n in enumerate(each) for k in range(n)]
        self.count = len(chunks)
        self.given = cupy.asarray(table), cupy.asarray(np.array(chunks, np.int32)), self.chunk
        self.starts = cupy.asarray(np.cumsum([0, *each]).astype(np.int32))
        self.whole = cupy.asarray(np.array([0, self.count], np.int32))
        self.sums = cupy.zeros(self.count, cupy.float32)
        self.joint = cupy.zeros(1, cupy.float32)
        self.of = [cupy.zeros(len(params), cupy.float32) for _ in range(2)]

    def begin(self) -> Any:
        """The numbers of the next step."""
        self.t += 1
        first, second = (1 / (1 - self.settings[x] ** self.t) for x in ("beta1", "beta2"))
        known = self.settings | {"first": first, "second": second}
        return np.array(tuple(known[x] for x in SETTINGS.names or ()), SETTINGS)

    def over(self, name: str, *arguments: Any) -> None:
        """Launch a kernel over all chunks."""
        self.kernels[name]((self.count,), (THREADS,), (*self.given, *arguments))

    def norms(self, column: int, starts: Any, to: Any) -> None:
        """The norms of an array of each tensor, or of all tensors."""
        self.over("squares", np.int32(column), self.sums)
        self.kernels["norms"]((len(starts) - 1,), (THREADS,), (self.sums, starts, to))


def adamw(params: list[Any], grads: list[Any], chunk: int = CHUNK, **settings: float) -> Callable[[], None]:
    """A step of AdamW, as `torch.optim.AdamW` has it but for eps, which is not corrected with the second moment."""
    form = _Form(params, grads, kept=False, chunk=chunk, most=0.0, **settings)
    return lambda: form.over("adamw", form.begin())


def lamb(params: list[Any], grads: list[Any], chunk: int = CHUNK, **settings: float) -> Callable[[], None]:
    """A step of LAMB with gradients' global norm limited to `most`."""
    form = _Form(params, grads, kept=True, chunk=chunk, **settings)

    def step() -> None:
        known = form.begin()
        form.norms(2, form.whole, form.joint)
        form.over("lamb", known, form.joint)
        form.norms(1, form.starts, form.of[0])
        form.norms(5, form.starts, form.of[1])
        form.over("apply", known, *form.of)

    return step

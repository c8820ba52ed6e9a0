"""The harness that runs kernels on the CPU: its numbers are right, and it finds each kind of fault, with its line."""

import ml_dtypes
import numpy as np
import pytest

from tests.cudacpu import KernelError, Module, nvrtc

SOUND = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cooperative_groups.h>

struct Pair { float scale; long long count; };
__constant__ float table[4] = {1.0f, 10.0f, 100.0f, 1000.0f};

template <typename T, int N>
__global__ void __launch_bounds__(256, 2) scale(T* __restrict__ x, const Pair pair) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < pair.count) x[i] = x[i] * (T)pair.scale + (T)N;
}

extern "C" __global__ void to_half(const float* x, unsigned short* half, unsigned short* bfloat) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    half[i] = __half_as_ushort(__float2half_rn(x[i]));
    bfloat[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
}

extern "C" __global__ void from_half(float* half, float* bfloat) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    half[i] = __half2float(__ushort_as_half((unsigned short)i));
    bfloat[i] = __bfloat162float(__ushort_as_bfloat16((unsigned short)i));
}

extern "C" __global__ void atomics(unsigned* counts, unsigned long long* wide, float* sum, int* extremes) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&counts[i % 3], 1u);
    atomicInc(&counts[3], 6u);
    atomicAdd(wide, 0x100000000ull + 1);
    atomicMax(wide + 1, (unsigned long long)i << 33);
    atomicCAS(wide + 2, 7ull, 8ull);
    atomicAdd(sum, 0.5f);
    atomicMin(&extremes[0], -i);
    atomicMax(&extremes[1], i);
    atomicOr(&extremes[2], 1 << (i % 20));
    atomicExch(&extremes[3], 5);
}

extern "C" __global__ void warps(unsigned* ballots, int* up, int* down, int* crossed, float* halves, int* votes) {
    const int i = threadIdx.x, lane = i & 31;
    ballots[i] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    up[i] = __shfl_up_sync(0xffffffffu, i, 1);
    down[i] = __shfl_down_sync(0xffffffffu, i, 2, 8);
    crossed[i] = __shfl_xor_sync(0xffffffffu, i, 5);
    const unsigned mine = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    float value = (float)i;
    if (lane < 16) value = __shfl_sync(mine, value, 3);
    else value = __shfl_sync(mine, value, 20);
    halves[i] = value;
    votes[i] = __syncthreads_count(i < 40) * 4 + __syncthreads_and(i < 64) * 2 + __syncthreads_or(i == 63);
}

extern "C" __global__ void vectors(const uint4* x, uint4* y, const float4* a, float2* b, ushort4* c, int n) {
    extern __shared__ float staged[];
    const int i = threadIdx.x;
    const uint4 value = __ldcs(&x[i]);
    __stcs(&y[i], make_uint4(value.w, value.z, value.y, value.x));
    const float4 four = *reinterpret_cast<const float4*>(&a[i].x);
    staged[i] = four.x + four.y + table[i % 4];
    __syncthreads();
    __stcg(&b[i], make_float2(staged[n - 1 - i], __ldcg(&a[i].z)));
    c[i] = make_ushort4(i, i + 1, i + 2, i + 3);
}

extern "C" __global__ void functions(const double* x, double* y, float* z) {
    const int i = threadIdx.x;
    const float f = (float)x[i];
    y[i] = expm1(x[i]) + log(x[i]) * pow(x[i], 1.5) + exp(-x[i]) + rsqrt(x[i]) + fmin(x[i], 2.0);
    z[i] = expm1(f) + log(f) * pow(f, 1.5f) + expf(-f) + rsqrtf(f) + fmaxf(f, 2.0f);
}

// Each block takes tickets; the sum of a ticket needs that of the one before, which another block may have taken.
__device__ void chain(volatile unsigned* done, unsigned* next, unsigned* sums, int tickets, int how) {
    __shared__ int ticket;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) ticket = atomicAdd(next, 1u);
        __syncthreads();
        const int mine = ticket;
        if (mine >= tickets) return;
        if (threadIdx.x == 0 && mine > 0) {
            if (how == 0) while (atomicAdd((unsigned*)&done[mine - 1], 0u) == 0u) {}
            if (how == 1) while (done[mine - 1] == 0u) __nanosleep(20);
            __threadfence();
        }
        __syncthreads();
        const unsigned before = mine ? __ldcg(&sums[(mine - 1) * blockDim.x + threadIdx.x]) : 0u;
        sums[mine * blockDim.x + threadIdx.x] = before + mine;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            if (how == 0) atomicExch((unsigned*)&done[mine], 1u);
            if (how == 1) done[mine] = 1u;
        }
    }
}
extern "C" __global__ void chain_atomic(unsigned* done, unsigned* next, unsigned* sums, int n) {
    chain(done, next, sums, n, 0);
}
extern "C" __global__ void chain_volatile(unsigned* done, unsigned* next, unsigned* sums, int n) {
    chain(done, next, sums, n, 1);
}

// Block b waits for block b + 1, which starts later.
extern "C" __global__ void backwards(unsigned* flags) {
    if (threadIdx.x == 0) {
        if (blockIdx.x + 1 < gridDim.x) while (atomicAdd(&flags[blockIdx.x + 1], 0u) == 0u) {}
        atomicExch(&flags[blockIdx.x], 1u);
    }
}

extern "C" __global__ void turned(float* x, float* y) {
    auto grid = cooperative_groups::this_grid();
    const unsigned long long i = grid.thread_rank(), n = grid.size();
    x[i] = (float)i;
    grid.sync();
    y[i] = x[n - 1 - i];
}
"""
NAMES = [
    "scale<float, 3>", "scale<float, 0>", "scale<double, -1>", "to_half", "from_half", "atomics", "warps", "vectors",
    "functions", "chain_atomic", "chain_volatile", "backwards", "turned",
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def sound(request):
    return Module(code=SOUND, names=NAMES, check=request.param)


PAIR = np.dtype([("scale", "f4"), ("count", "i8")], align=True)


@pytest.mark.parametrize(("name", "dtype", "shift"), [("scale<float, 3>", "f4", 3), ("scale<double, -1>", "f8", -1)])
@pytest.mark.parametrize("random", [False, True])
def test_templates_and_structs_by_value(sound, name, dtype, shift, random):
    x = np.arange(1000, dtype=dtype)
    sound.get_function(name)((5,), (256,), (x, np.array((2.0, 999), PAIR)), random=random, seed=4)
    np.testing.assert_array_equal(x, [*(np.arange(999) * 2 + shift), 999])


def test_subnormal_numbers_are_zero_as_with_cupy(sound):
    for flush, expected in ((True, 0), (False, np.float32(2e-39))):
        x = np.full(1, 1e-39, "f4")
        kernel = sound.get_function("scale<float, 0>")
        kernel((1,), (32,), (x, np.array((2.0, 1), PAIR)), ftz=flush)
        assert x[0] == expected


def test_conversions_are_those_of_numpy(sound):
    every = np.arange(65536, dtype=np.uint16)
    half, bfloat = np.empty(65536, "f4"), np.empty(65536, "f4")
    sound.get_function("from_half")((256,), (256,), (half, bfloat), ftz=False)
    np.testing.assert_array_equal(half, every.view("f2").astype("f4"))
    np.testing.assert_array_equal(bfloat, every.view(ml_dtypes.bfloat16).astype("f4"))
    # all that lie on, just below and just above a representable number, or half way between two
    around = (every.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    halves = np.linspace(-70000, 70000, 65536).astype("f4")
    ties = np.concatenate([half[np.isfinite(half)], (half[:31743] + half[1:31744]) / 2, halves])
    for values in (*around.T.copy().view("f4"), np.resize(ties, 65536), np.resize(ties[::-1], 65536)):
        values = np.ascontiguousarray(values)
        got = np.empty((2, 65536), np.uint16)
        sound.get_function("to_half")((256,), (256,), (values, got[0], got[1]), ftz=False)
        numbers = ~np.isnan(values)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got[0][numbers], values[numbers].astype("f2").view("u2"))
        np.testing.assert_array_equal(got[1][numbers], values[numbers].astype(ml_dtypes.bfloat16).view("u2"))
        assert np.isnan(got[0].view("f2")[~numbers]).all()
        assert np.isnan(got[1].view(ml_dtypes.bfloat16)[~numbers].astype("f4")).all()


@pytest.mark.parametrize("random", [False, True])
def test_atomics(sound, random):
    counts, wide, total, extremes = np.zeros(4, "u4"), np.array([0, 0, 7], "u8"), np.zeros(1, "f4"), np.zeros(4, "i4")
    sound.get_function("atomics")((7,), (96,), (counts, wide, total, extremes), random=random, seed=1)
    assert counts.tolist() == [224, 224, 224, 0]  # 672 = 96 * 7, which atomicInc counts modulo 7
    assert wide.tolist() == [672 * (2**32 + 1), 671 << 33, 8]
    assert total[0] == 336
    assert extremes.tolist() == [-671, 671, 2**20 - 1, 5]


@pytest.mark.parametrize("random", [False, True])
def test_warp_operations(sound, random):
    i = np.arange(64)
    out = [np.zeros(64, dtype) for dtype in ("u4", "i4", "i4", "i4", "f4", "i4")]
    sound.get_function("warps")((1,), (64,), out, random=random)
    ballots, up, down, crossed, halves, votes = out
    assert set(ballots) == {sum(1 << lane for lane in range(0, 32, 3))}
    np.testing.assert_array_equal(up, np.where(i % 32 == 0, i, i - 1))
    np.testing.assert_array_equal(down, np.where(i % 8 < 6, i + 2, i))
    np.testing.assert_array_equal(crossed, i ^ 5)
    np.testing.assert_array_equal(halves, i // 32 * 32 + np.where(i % 32 < 16, 3, 20))
    assert set(votes) == {40 * 4 + 2 + 1}


def test_vectors_and_dynamic_shared_memory(sound):
    x, y = np.arange(256, dtype="u4"), np.zeros(256, "u4")
    a, b, c = np.arange(256, dtype="f4"), np.zeros((64, 2), "f4"), np.zeros((64, 4), "u2")
    sound.get_function("vectors")((1,), (64,), (x, y, a, b, c, np.int32(64)), 64 * 4)
    np.testing.assert_array_equal(y.reshape(64, 4), x.reshape(64, 4)[:, ::-1])
    staged = a[::4] + a[1::4] + np.resize([1, 10, 100, 1000], 64)
    np.testing.assert_array_equal(b, np.stack([staged[::-1], a[2::4]], 1))
    np.testing.assert_array_equal(c, np.arange(64)[:, None] + np.arange(4))


def test_functions_of_both_precisions(sound):
    x, y, z = np.linspace(0.1, 9, 32), np.zeros(32), np.zeros(32, "f4")
    sound.get_function("functions")((1,), (32,), (x, y, z))
    rest = np.expm1(x) + np.log(x) * x**1.5 + np.exp(-x) + x**-0.5
    np.testing.assert_allclose(y, rest + np.minimum(x, 2), rtol=1e-14)
    np.testing.assert_allclose(z, rest + np.maximum(x, 2), rtol=2e-6)


@pytest.mark.parametrize("name", ["chain_atomic", "chain_volatile"])
@pytest.mark.parametrize(
    "how",
    [{}, {"workers": 1}, {"coop": True}, {"random": True, "seed": 5}, {"coop": True, "random": True, "seed": 6}],
    ids=str,
)
def test_blocks_that_wait_for_each_other_take_turns(sound, name, how):
    done, next_, sums = np.zeros(50, "u4"), np.zeros(1, "u4"), np.zeros((50, 32), "u4")
    sound.get_function(name)((6,), (32,), (done, next_, sums, np.int32(50)), **how)
    np.testing.assert_array_equal(sums, np.repeat(np.cumsum(np.arange(50))[:, None], 32, 1))


def test_a_block_that_waits_for_a_later_one_needs_it_resident(sound):
    flags = np.zeros(4, "u4")
    for how in ({"coop": True}, {"workers": 4}, {"workers": 2, "random": True}):
        if how.get("workers") == 2:
            with pytest.raises(KernelError, match="deadlock: of 2 resident blocks"):
                sound.get_function("backwards")((4,), (32,), (np.zeros(4, "u4"),), **how)
        else:
            flags[:] = 0
            sound.get_function("backwards")((4,), (32,), (flags,), **how)
            assert flags.all()


def test_the_grid_waits_for_itself(sound):
    x, y = np.zeros(320, "f4"), np.zeros(320, "f4")
    sound.get_function("turned")((5,), (64,), (x, y), coop=True)
    np.testing.assert_array_equal(y, np.arange(320)[::-1])
    with pytest.raises(KernelError, match=r"kernel\.cu:\d+: grid synchronisation in a launch that is not cooperative"):
        sound.get_function("turned")((5,), (64,), (x, y))


def test_arrays_that_overlap_are_one_memory(sound):
    buffer = np.zeros(480, "f4")
    arguments = (buffer[:320], buffer[160:])
    if sound.check:
        with pytest.raises(KernelError, match=r"race: .* on global memory argument 0, argument 1\+"):
            sound.get_function("turned")((5,), (64,), arguments, coop=True)
    else:
        sound.get_function("turned")((5,), (64,), arguments, coop=True)


def test_a_seed_repeats_a_run(sound):
    def run(seed):
        total = np.zeros(1, "f4")
        counts, wide, extremes = np.zeros(4, "u4"), np.zeros(3, "u8"), np.zeros(4, "i4")
        sound.get_function("atomics")((4,), (64,), (counts, wide, total, extremes), random=True, seed=seed)
        return total.tobytes()

    assert run(1) == run(1)


# ---- compiled for devices -------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_the_same_text_compiles_for_devices(arch):
    options = (*nvrtc.CUPY_OPTIONS, "--ptxas-options=-v")
    code, mangled, log = nvrtc.compile(SOUND, arch=arch, names=NAMES, options=options)
    assert code.startswith(b"\x7fELF")
    assert set(mangled) == set(NAMES)
    taken = nvrtc.usage(log)
    assert set(taken) == set(mangled.values())
    assert all(0 < use.registers < 128 and use.spill_stores == use.spill_loads == 0 for use in taken.values())
    assert taken["chain_atomic"].shared >= 4 > taken["to_half"].shared == 0


@needs_nvrtc
def test_spills_are_told():
    loop = '_Pragma("unroll") for (int i = 0; i < 64; ++i)'
    text = f"""extern "C" __global__ void __launch_bounds__(1024, 2) spilling(double* y, int n) {{
        double x[64];
        {loop} x[i] = y[i * n + threadIdx.x];
        for (int k = 0; k < n; ++k) {loop} x[i] = x[i] * x[(i + 7) % 64] + k;
        {loop} y[i * n + threadIdx.x] = x[i];
    }}"""
    _, _, log = nvrtc.compile(text, options=(*nvrtc.CUPY_OPTIONS, "--ptxas-options=-v"))
    use = nvrtc.usage(log)["spilling"]
    assert use.registers == 32
    assert use.spill_stores > 0
    assert use.spill_loads > 0


@needs_nvrtc
def test_nvrtc_tells_what_is_wrong():
    with pytest.raises(KernelError, match=r'identifier "missing" is undefined'):
        nvrtc.compile('extern "C" __global__ void bad() { missing = 1; }')
    assert {75, 80, 90, 100, 120} <= set(nvrtc.archs())
    assert nvrtc.version() >= (12, 8)

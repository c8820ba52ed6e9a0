"""The harness for CUDA kernels: the faults that it finds."""

import contextlib
import re

import numpy as np
import pytest

from tests.cudacpu import KernelError, Module

FAULTY = r"""
extern "C" __global__ void beyond(float* x, int n) { if (blockIdx.x == 0) x[threadIdx.x + 1] = 1.0f; }  // HERE beyond
extern "C" __global__ void before(float* x, int n) { x[(int)threadIdx.x - 1] = 1.0f; }  // HERE before
extern "C" __global__ void freed(float** x, int n) { x[0][threadIdx.x] = 1.0f; }  // HERE freed
extern "C" __global__ void skewed(float* x, int n) {
    const float2 pair = *reinterpret_cast<float2*>(x + 1);  // HERE skewed
    if (threadIdx.x == 0) x[blockIdx.x * 2] = pair.x + pair.y;
}
extern "C" __global__ void unwritten(float* x, int n) {
    __shared__ float kept[64];
    if (threadIdx.x != 3) kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = kept[n - 1 - threadIdx.x];  // HERE unwritten
}
extern "C" __global__ void unwritten_global(float* x, int n) {
    x[threadIdx.x] += 1.0f;  // HERE unwritten_global
}
extern "C" __global__ void constant(float* x, int n) { x[threadIdx.x] = 1.0f; }  // HERE constant
extern "C" __global__ void shared_beyond(float* x, int n) {
    __shared__ float kept[60];
    kept[threadIdx.x] = x[threadIdx.x];  // HERE shared_beyond
    __syncthreads();
    x[threadIdx.x] = kept[n - 1 - threadIdx.x];
}
extern "C" __global__ void dynamic_beyond(float* x, int n) {
    extern __shared__ float some[];
    some[threadIdx.x] = x[threadIdx.x];  // HERE dynamic_beyond
    x[threadIdx.x] = some[threadIdx.x];
}
extern "C" __global__ void shared_race(float* x, int n) {
    __shared__ float kept[64];
    kept[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = kept[n - 1 - threadIdx.x];  // HERE shared_race
}
extern "C" __global__ void reused(float* x, int n) {
    __shared__ float kept;
    for (int i = 0; i < 4; ++i) {
        if (threadIdx.x == 40) kept = (float)i;  // HERE reused
        __syncthreads();
        x[threadIdx.x] += kept;
    }
}
extern "C" __global__ void warp_race(float* x, int n) {
    __shared__ float kept[64];
    kept[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    x[threadIdx.x] = kept[threadIdx.x ^ 32];  // HERE warp_race
}
extern "C" __global__ void global_race(float* x, int n) {
    x[0] += (float)n;  // HERE global_race
}
extern "C" __global__ void plain_and_atomic(float* x, int n) {
    if (blockIdx.x == 0) atomicAdd(x, 1.0f);
    else x[0] = 1.0f;  // HERE plain_and_atomic
}
__device__ void publish(float* x, unsigned* flag, bool write_fence, bool read_fence, bool barrier) {
    if (blockIdx.x == 0) {
        x[threadIdx.x] = 2.0f;
        if (barrier) __syncthreads();
        if (threadIdx.x == 0) {
            if (write_fence) __threadfence();
            atomicExch(flag, 1u);
        }
    } else if (blockIdx.x == 1) {
        if (threadIdx.x == 0) {
            while (atomicAdd(flag, 0u) == 0u) {}
            if (read_fence) __threadfence();
        }
        __syncthreads();
        x[64 + threadIdx.x] = x[63 - threadIdx.x];  // HERE publish
    }
}
extern "C" __global__ void published(float* x, unsigned* flag) { publish(x, flag, true, true, true); }
extern "C" __global__ void unfenced_write(float* x, unsigned* flag) { publish(x, flag, false, true, true); }
extern "C" __global__ void unfenced_read(float* x, unsigned* flag) { publish(x, flag, true, false, true); }
extern "C" __global__ void unsynchronised(float* x, unsigned* flag) { publish(x, flag, true, true, false); }
extern "C" __global__ void divergent(float* x, int n) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();  // HERE divergent
    x[threadIdx.x] = 1.0f;
}
extern "C" __global__ void part_of_a_barrier(float* x, int n) {
    if (threadIdx.x < 32) __syncthreads();  // HERE part_of_a_barrier
    else __shfl_sync(0xffffffffu, n, 0), __syncwarp(), x[threadIdx.x] = 0.0f;
    while (threadIdx.x == 40 && atomicAdd(x, 0.0f) == 0.0f) {}
}
extern "C" __global__ void never(float* x, int n) {
    while (atomicAdd(x, 0.0f) == 0.0f) {}
}
extern "C" __global__ void absent_lane(float* x, int n) {
    x[threadIdx.x] = __shfl_sync(0x0000ffffu, x[threadIdx.x], 0);  // HERE absent_lane
}
extern "C" __global__ void outside_mask(float* x, int n) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, x[threadIdx.x], 16);  // HERE outside_mask
}
extern "C" __global__ void ended_lane(float* x, int n) {
    if (threadIdx.x == 5) return;
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);  // HERE ended_lane
}
extern "C" __global__ void stale(float* x, int when) {
    if (when == 0) x[threadIdx.x] += 1.0f;
    x[threadIdx.x + 64] = __ldg(x + threadIdx.x);  // HERE stale0
    if (when == 1) x[threadIdx.x] = 1.0f;  // HERE stale1
}
extern "C" __global__ void trap(float* x, int n) { if (x[0] == 0.0f) __trap(); }  // HERE trap
"""
FAULTS = {
    "beyond": "out of bounds: write of 4 bytes of global memory, 0 bytes past the end of argument 0",
    "before": "out of bounds: write of 4 bytes of global memory",
    "skewed": "misaligned: an address of which a multiple of 8 is needed ends in",
    "unwritten": "uninitialised: read of shared memory",
    "constant": "write to read-only memory argument 0",
    "shared_beyond": "out of bounds: write of 4 bytes outside every shared variable",
    "dynamic_beyond": "out of bounds: write of 4 bytes at offset",
    "shared_race": "race: read after write on shared memory",
    "reused": "race: write after read on shared memory",
    "warp_race": "race: read after write on shared memory",
    "global_race": "race: read after write on global memory argument 0+0",
    "plain_and_atomic": "race: write after write on global memory argument 0+0",
    "divergent": "divergent barrier: threads of block 0 wait at line",
    "part_of_a_barrier": "deadlock: ",
    "never": "deadlock: of 2 resident blocks, 128 threads can go on",
    "absent_lane": "calls a warp operation with mask 0000ffff, which omits its own lane",
    "outside_mask": "lane 0 reads lane 16, which is not in mask 0000ffff",
    "ended_lane": "mask ffffffff names lane 5, which has ended",
    "trap": "__trap() in thread",
}
OTHERS = ["stale", "freed", "unwritten_global", "published", "unfenced_write", "unfenced_read", "unsynchronised"]


@pytest.fixture(scope="module")
def faulty():
    return Module(code=FAULTY, names=[*FAULTS, *OTHERS], check=True)


def line(name):
    """Where a report says that the line marked with a name is."""
    number = next(i for i, text in enumerate(FAULTY.splitlines(), 1) if text.endswith(f"// HERE {name}"))
    return rf"kernel\.cu:{number}: "


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_with_its_line(faulty, name, random):
    x = np.zeros(64, "f4")
    x.flags.writeable = name != "constant"
    place = "" if name == "never" else line(name)
    with pytest.raises(KernelError, match=place + ".*" + re.escape(FAULTS[name])):
        faulty.get_function(name)((2,), (64,), (x, np.int32(64)), 128, random=random, seed=2)


def test_memory_that_is_not_named_is_out_of_bounds(faulty):
    x = np.zeros(64, "f4")
    table = np.array([x.ctypes.data], np.uint64)
    faulty.get_function("freed")((1,), (64,), (table, np.int32(64)), memory=[x])
    assert x.all()
    with pytest.raises(KernelError, match=line("freed") + "out of bounds"):
        faulty.get_function("freed")((1,), (64,), (table, np.int32(64)))


@pytest.mark.parametrize("when", [0, 1, 2])
def test_what_a_launch_writes_is_not_read_through_the_read_only_cache(faulty, when):
    """Before or after, by whichever thread: a plain read of its own would be right here."""
    x = np.ones(128, "f4")
    expected = contextlib.nullcontext()
    if when < 2:
        told = r"read-only cache: argument 0\+\d+ is read through it and written in one launch"
        expected = pytest.raises(KernelError, match=line(f"stale{when}") + told)
    with expected:
        faulty.get_function("stale")((1,), (64,), (x, np.int32(when)))


def test_memory_can_be_said_to_be_unwritten(faulty):
    x = np.zeros(64, "f4")
    kernel = faulty.get_function("unwritten_global")
    kernel((1,), (64,), (x, np.int32(64)))
    with pytest.raises(KernelError, match=line("unwritten_global") + r"uninitialised: read of global memory x\+"):
        kernel((1,), (64,), (np.uint64(x.ctypes.data), np.int32(64)), memory=[(x, "x", True)])


@pytest.mark.parametrize("how", [{"coop": True}, {"workers": 2, "random": True, "seed": 3}], ids=str)
@pytest.mark.parametrize("name", ["published", "unfenced_write", "unfenced_read", "unsynchronised"])
def test_a_flag_orders_what_is_fenced(faulty, name, how):
    x, flag = np.zeros(128, "f4"), np.zeros(1, "u4")
    if name == "published":
        faulty.get_function(name)((2,), (64,), (x, flag), **how)
        assert (x == 2).all()
    else:
        with pytest.raises(KernelError, match=line("publish") + "race: read after write on global memory"):
            faulty.get_function(name)((2,), (64,), (x, flag), **how)


def test_a_launch_that_cannot_be_is_refused(faulty):
    kernel = faulty.get_function("beyond")
    x = np.zeros(64, "f4")
    with pytest.raises(TypeError, match="beyond takes 2 arguments; got 1"):
        kernel((1,), (32,), (x,))
    with pytest.raises(TypeError, match="argument 1 must have 4 bytes; got 8"):
        kernel((1,), (32,), (x, 64))
    with pytest.raises(ValueError, match="cannot be launched"):
        kernel((1,), (2048,), (x, np.int32(64)))
    with pytest.raises(KernelError, match="50000 bytes of dynamic shared memory were asked for"):
        faulty.get_function("dynamic_beyond")((1,), (32,), (x, np.int32(64)), 50000)


def test_a_text_that_does_not_compile_is_told_with_its_line():
    with pytest.raises(KernelError, match=r"kernel\.cu:2:.*missing.* was not declared"):
        Module(code='extern "C" __global__ void bad() {\n  missing = 1;\n}', names=["bad"])

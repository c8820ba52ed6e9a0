"""Calls of cuBLAS over the stand-in for it: compared with NumPy, and mistakes that a device would not report."""

import ctypes

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.fusion.layout import geometry
from arrayopt.fusion.plans import plan_for
from arrayopt.state.run import Run
from tests.cudacpu import KernelError
from tests.cudacpu.standin import cublas as fake
from tests.support.slow import settled

SIDES = st.integers(1, 6)
SHAPES = st.tuples(SIDES, SIDES, SIDES, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 2))


@pytest.fixture
def blas(cupy):
    from arrayopt.engines.cuda import cublas

    made = cublas.Blas(0)
    made.use()
    return made


def operands(cupy, shape, dtype, seed=0):
    """A, B and C of some products, with gaps between matrices; the expected results; and the `StridedProducts`."""
    from arrayopt.engines.cuda.cublas import StridedProducts

    m, n, k, ta, tb, count, apart = shape
    r, size = np.random.default_rng(seed), np.dtype(dtype).itemsize
    sides = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n)]
    host = [r.standard_normal((count, a * b + apart)).astype(np.dtype(dtype)) for a, b in sides]
    there = [cupy.asarray(x) for x in host]
    views = [x[:, : a * b].reshape(count, a, b) for x, (a, b) in zip(host, sides, strict=True)]
    x, y = views[0].mT if ta else views[0], views[1].mT if tb else views[1]
    expected = host[2].copy()
    expected[:, : m * n] = (x.astype("f8") @ y.astype("f8")).astype(x.dtype).reshape(count, -1)
    first, steps = (tuple(f(v) for v in there) for f in (lambda v: v.data.ptr, lambda v: v.shape[1] * size))
    return there, expected, StridedProducts((ta, tb), (m, n, k), first, steps, count)


@settled(30)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=3), dtype=st.sampled_from(["float32", "float64", "bfloat16"]))
def test_products_row_by_row(shapes, dtype):
    from tests.cudacpu import standin

    with standin.installed() as cupy:
        from arrayopt.engines.cuda import cublas

        blas = cublas.Blas(0)
        blas.use()
        made = [operands(cupy, shape, dtype, i) for i, shape in enumerate(shapes)]
        blas.multiply([cublas.strided_call(dtype, alike) for _, _, alike in made])
        for (_, _, c), expected, _ in made:
            near = {"rtol": 2.0**-7} if dtype == "bfloat16" else {"rtol": 1e-4}  # one rounding, either way
            np.testing.assert_allclose(c.get().astype("f8"), expected.astype("f8"), **near, atol=1e-5)


def test_all_matrices_of_a_tensor_are_multiplied(cupy):
    """Also of a tensor with two axes of matrices."""
    from arrayopt.engines.cuda.products import calls_of

    shape, rule = (2, 3, 4, 6), ao.Muon(lr=0.1, ns_steps=1, matrix="last")
    plan = plan_for(rule, len(shape), "float32", shape=shape, lean=True)
    at = dict.fromkeys(plan.spilled, np.array([1 << 12]))
    made = calls_of(plan, "float32", geometry([shape], plan.element), at, np.arange(1))
    numbers = [arguments[-3] for calls in made for _, arguments in calls]
    assert numbers == [6] * sum(x.multiplies for x in plan.passes)


def test_sums_in_bfloat16_are_in_float32(cupy, blas):
    from arrayopt.engines.cuda import cublas

    there, _, alike = operands(cupy, (8, 8, 512, False, False, 1, 0), "bfloat16")
    there[0][...], there[1][...] = 1.0, 1.0  # added up in bfloat16 they would be 256
    blas.multiply([cublas.strided_call("bfloat16", alike)])
    assert (there[2].get().astype("f8") == 512.0).all()


def refused(cublas, blas, call, why):
    with pytest.raises(cublas.BlasError, match="failed with status"):
        blas.multiply([call])
    assert why in fake.reasons[-1]


def test_what_is_wrong_when_it_is_called(cupy, blas):
    from arrayopt.engines.cuda import cublas

    there, _, alike = operands(cupy, (4, 3, 2, False, False, 2, 0), "float32")
    name, right = cublas.strided_call("float32", alike)
    order = "ta tb m n k alpha a of_a lda da b of_b ldb db beta c of_c ldc dc count compute"

    def but(**changes):
        made = list(right)
        for key, x in changes.items():
            made[order.split().index(key)] = x
        return name, tuple(made)

    refused(cublas, blas, but(lda=2), "the leading dimension of A is 2, and it has 3 rows")
    refused(cublas, blas, but(ldb=1), "the leading dimension of B")
    refused(cublas, blas, but(ldc=2), "the leading dimension of C")
    refused(cublas, blas, but(ta=1, lda=1), "the leading dimension of A is 1, and it has 2 rows")
    refused(cublas, blas, but(m=-1), "extents -1")
    refused(cublas, blas, but(compute=77), "computed in 77")
    refused(cublas, blas, but(of_c=1), "types")
    with cupy.cuda.Stream(non_blocking=True):
        refused(cublas, blas, (name, right), "stream is not the current one")
    with cupy.cuda.Device(1):
        refused(cublas, blas, (name, right), "a handle of device 0 on device 1")
    cublas._call("cublasSetMathMode", blas.handle, 3)
    refused(cublas, blas, (name, right), "operands would be rounded")
    cublas._call("cublasSetMathMode", blas.handle, 16)
    handle, blas.handle = blas.handle, 8
    refused(cublas, blas, (name, right), "8 is no handle")
    blas.handle = handle
    with pytest.raises(ctypes.ArgumentError):
        blas.multiply([(name, (*right[:-1], 1.5))])
    blas.multiply([(name, right)])
    there[2].get()


@pytest.mark.parametrize("what", ["stride", "address", "overlap", "results", "freed", "device", "workspace"])
def test_what_is_wrong_when_it_is_done(cupy, blas, what):
    from arrayopt.engines.cuda import cublas

    (a, b, c), _, alike = operands(cupy, (4, 3, 2, False, False, 2, 0), "float32")
    first, strides = list(alike.first), list(alike.strides)
    if what == "stride":
        strides[0] = 1 << 40  # where no other array may be
    if what == "address":
        first[1] += 4
    if what == "overlap":
        first[2] = first[1]
    if what == "results":
        strides[2] = 16
    if what == "device":
        with cupy.cuda.Device(1):
            other = cupy.empty(100, "float32")
        first[0] = other.data.ptr
    if what == "workspace":
        cublas._call("cublasSetWorkspace_v2", blas.handle, a.data.ptr & ~255, 1 << 20)
    if what == "freed":
        del a
    wrong = cublas.strided_call("float32", alike._replace(first=tuple(first), strides=tuple(strides)))
    blas.multiply([wrong])
    with pytest.raises(KernelError, match="overlap" if what in ("overlap", "results") else "bounds|is on device 1"):
        cupy.cuda.get_current_stream().synchronize()
    del b, c


def test_what_is_wrong_in_a_graph(cupy, blas):
    from arrayopt.engines.cuda import cublas

    there, expected, alike = operands(cupy, (4, 3, 2, False, True, 2, 0), "float64")
    call = cublas.strided_call("float64", alike)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        blas.use()
        cublas._call("cublasSetStream_v2", blas.handle, stream.ptr)  # which takes the workspace away
        stream.begin_capture()
        refused(cublas, blas, call, "the handle has no workspace")
        blas.use()
        blas.multiply([call])
        graph = stream.end_capture()
        graph.launch(stream)
        np.testing.assert_allclose(there[2].get(), expected)


def test_each_optimizer_and_device_has_its_own(cupy):
    from arrayopt.engines.cuda.cublas import blas_of

    runs = [Run(1), Run(1)]
    made = [blas_of(run, 0) for run in runs]
    with cupy.cuda.Device(1):
        made.append(blas_of(runs[0], 1))
    assert len({x.handle for x in made}) == len({x.workspace.data.ptr for x in made}) == 3
    assert blas_of(runs[0], 0) is made[0]
    assert made[2].workspace.device.id == 1
    assert made[0].workspace.nbytes == 32 << 20
    gone = {x.handle for x in made[:2]}
    runs.clear()
    made.clear()
    with cupy.cuda.Device(1):
        runs = [Run(1) for _ in range(3)]
        assert not gone & {blas_of(run, 1).handle for run in runs}


def test_scratch_memory_grows_and_who_has_the_smaller_keeps_it(cupy, blas):
    small = blas.buffer("spill0", 10, np.float32)
    assert blas.buffer("spill0", 8, np.float32) is small
    assert blas.buffer("spill1", 8, np.float32) is not small
    large = blas.buffer("spill0", 20, np.float32)
    assert (small.size, large.size) == (10, 20)
    assert blas.buffer("spill0", 10, np.float32) is large
    assert blas.buffer("spill0", 10, np.float64).dtype == np.float64

"""What the compiler makes of the kernels computes what the reference does: PTX, run in GPGPU-Sim."""

import subprocess
import sys

import numpy as np
import pytest

import arrayopt as ao
from tests.ptx.needs import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

from tests.engines.cuda.faults import FAULTS
from tests.engines.cuda.test_cupy import DTYPES, FIRST, ROWS, compare, make, pair, step, trees
from tests.engines.cuda.test_cupy_products import test_every_row as test_every_row_of_products  # noqa: F401
from tests.engines.cuda.test_cupy_products import unchecked  # noqa: F401
from tests.engines.cuda.test_cupy_ranks import test_ranks_compute_what_one_process_does  # noqa: F401
from tests.engines.cuda.test_cupy_rings import test_it_has_what_the_witness_has as test_rings  # noqa: F401
from tests.engines.cuda.test_cupy_totals import test_many_tensors_are_added_up_in_order  # noqa: F401
from tests.rules.test_quantized import test_cuda_kernels_make_the_same_codes  # noqa: F401
from tests.step.test_layers_skipped import test_cupy as test_layers_that_are_skipped_alone  # noqa: F401

SHAPES = {
    "scalar": (), "few": (7,), "more": (4097,), "prime": (5003,), "empty": (0,), "matrix": (40, 130),
    "narrow": (130, 40),
    "wide": (3, 16, 128), "kernels": (5, 4, 3, 3), "large": (1, 2, 70, 33),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_every_option_of_every_rule(cupy, row):
    opts = pair(cupy, make(*ROWS[row]), SHAPES)
    for k in range(3):
        step(cupy, opts, SHAPES, seed=10 * k, without=("few", "matrix") if k == 1 else ())
    compare(opts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", FIRST)
def test_every_dtype(cupy, row, dtype):
    rule = make(*ROWS[row])
    if dtype.startswith("complex") and not rule.complex_ok:
        pytest.skip(f"{row} is not defined for complex parameters")
    opts = pair(cupy, rule, SHAPES, dtype)
    for k in range(2):
        step(cupy, opts, SHAPES, dtype, seed=k)
    compare(opts, dtype)


JUDGED = {
    "a limit": {"clip_norm": 0.5},
    "a loss scale": {"loss_scale": ao.LossScale(init=4.0, window=2)},
    "both": {"loss_scale": ao.LossScale(init=4.0, window=2), "clip_norm": 1.0},
    "what is not finite": {"skip_nonfinite": True},
}


@pytest.mark.parametrize("what", JUDGED)
def test_what_the_device_decides(cupy, what):
    """Of more tensors than a block has threads; gradients overflow in the third of five steps."""
    shapes = {f"w{i}": (1 + i % 5,) for i in range(300)} | {"w": (70, 130)}
    opts = pair(cupy, ao.SGD(lr=0.1, momentum=0.9), shapes, **JUDGED[what])
    for k in range(5):
        grads = trees(shapes, "float32", k)
        grads["w"][3, 4] = np.inf if k == 2 and what != "a limit" else 1.0
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.step({name: xp.asarray(g) for name, g in grads.items()})
    compare(opts)
    norms = [np.asarray(opt.stats.global_norm.get() if k else opt.stats.global_norm) for k, opt in enumerate(opts)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_random_rounding_has_the_same_bits(cupy, kind):
    opts = pair(cupy, ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4), SHAPES, kind)
    for k in range(2):
        step(cupy, opts, SHAPES, kind, seed=k)
    for name, x in opts[0].params.items():
        assert np.array_equal(x, opts[1].params[name].get()), name


def trained(cupy, simulator, monkeypatch):
    """Two steps of LAMB in the timing model, in which blocks are at work at once and wait for each other."""
    from arrayopt.engines.cuda import launches

    monkeypatch.setattr(launches, "_cache", lambda: 1 << 40)  # one launch for all passes
    shapes = {"more": (9001,), "matrix": (40, 130), "few": (7,), "long": (30000,)}
    opts = pair(cupy, ao.LAMB(lr=0.1), shapes)
    simulator.log.clear()
    for k in range(2):
        step(cupy, opts, shapes, seed=k)
    compare(opts)
    return simulator.log


@pytest.fixture
def timing(simulator, monkeypatch):
    monkeypatch.setattr(simulator, "timing", True)
    monkeypatch.setattr(simulator, "most", 2_000_000)
    return simulator


def test_blocks_that_are_at_work_at_once_wait_for_each_other(cupy, timing, monkeypatch):
    log = trained(cupy, timing, monkeypatch)
    assert [x.name for x in log] == ["prepare", "run"] * 2
    assert all(x.cycles > 0 and x.read > 0 for x in log if x.name == "run")
    assert log[1].grid > 1


def test_a_ticket_that_does_not_wait_is_found(cupy, timing, monkeypatch):
    from arrayopt.engines.cuda import table

    _, old, new = next(x for x in FAULTS if x[0] == "a ticket that does not wait")
    emit = table.emit
    monkeypatch.setattr(table, "emit", lambda *args, **options: emit(*args, **options).replace(old, new))
    table._kernels.cache_clear()
    with pytest.raises(AssertionError):
        trained(cupy, timing, monkeypatch)
    table._kernels.cache_clear()


def test_copies_are_counted(timing):
    """A copy of 4 MB, of which the L2 cache holds a part: what is read from memory, and what is written."""
    text = """extern "C" __global__ void copied(const float4* x, float4* y) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        y[i] = x[i];
    }"""
    x = timing.array(np.arange(1 << 20, dtype=np.float32))
    y = timing.array(np.zeros_like(x))
    timing.launch(timing.load(text), "copied", 1024, 256, [np.uint64(z.ctypes.data).tobytes() for z in (x, y)])
    assert np.array_equal(x, y)
    seen = timing.log[-1]
    assert x.nbytes <= seen.read < 1.1 * x.nbytes
    assert x.nbytes - (timing.machine.cache << 10) <= seen.written <= x.nbytes


def test_an_instruction_that_the_simulator_does_not_know_is_named():
    """In a process of its own: the simulator reads no other text after it."""
    text = (
        """extern "C" __global__ void sought(unsigned* x) { asm("fns.b32 %0, %1, 0, 1;" : "=r"(x[0]) : "r"(x[1])); }"""
    )
    code = f"from tests.ptx.simulator import Machine, loaded\nloaded(Machine()).load({text!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "GPGPU-Sim: does not know 'fns.b32 %r" in done.stderr

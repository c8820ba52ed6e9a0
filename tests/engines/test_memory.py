"""A fused step makes no arrays that grow with the parameters."""

import tracemalloc

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.numpy.stacks import GROUP_SIZE
from tests.support.engines import FUSED, SLOW, each_fused
from tests.support.slow import marked

KERNELS = marked([((1024, 512, 3, 3),), ((2048, 1024, 1, 1),), ((100, 9000, 1, 5),)], lambda shape: shape[-1] == 3)
SHAPES = {
    "embedding": (1500, 1000),
    "batches": (9, 4, 160, 160),
    "matrix": (1000, 1003),
    "vector": (500_009,),
    "scalar": (),
    **{f"bias.{i}": (1000,) for i in range(100)},
}
RULES = {"LAMB": ao.LAMB(), "AdamW": ao.AdamW(), "CAME": ao.CAME(lr=0.01)}


def peak_of_a_step(opt, grads):
    """The most bytes that were allocated at once in a step, beyond what there was.

    The least of three: a thread that had nothing to do before makes its buffers when it first has.
    """
    peaks = []
    for _ in range(2):
        opt.step(grads)
    for _ in range(3):
        tracemalloc.start()
        try:
            opt.step(grads)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def made(engine, rule, dtype="float32", **options):
    """An optimizer of 4 million parameters, their gradients, and the bytes of parameters and state."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    params = {name: np.asarray(p) for name, p in params.items()}
    grads = {name: np.asarray(rng.standard_normal(p.shape).astype(dtype)) for name, p in params.items()}
    opt = ao.Optimizer(params, rule, engine=engine, **options)
    slots = [x for state in opt.state.values() for x in state.values() if isinstance(x, np.ndarray)]
    return opt, grads, sum(x.nbytes for x in [*params.values(), *slots])


EACH = [(engine, name) for engine in FUSED for name in RULES]


@pytest.mark.parametrize(("engine", "name"), marked(EACH, lambda engine, name: engine not in SLOW))
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_step_allocates_little(engine, name, threads, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", threads)
    opt, grads, total = made(engine, RULES[name])
    assert sum(p.size for p in opt.params.values()) > 4_000_000
    assert peak_of_a_step(opt, grads) < 0.05 * total


@each_fused
def test_reports_allocate_little(engine):
    opt, grads, total = made(engine, RULES["LAMB"], stats=True)
    assert peak_of_a_step(opt, grads) < 0.05 * total


def test_narrow_parameters_allocate_little(monkeypatch):
    """Each thread widens a block of parameter and gradient; and two values of its largest tensor are kept."""
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "1")
    opt, grads, total = made("numpy", RULES["LAMB"], "float16")
    largest = max(p.size for p in opt.params.values()) * 4
    assert peak_of_a_step(opt, grads) < 0.05 * total + 2 * largest


@each_fused
def test_clipping_by_the_global_norm_allocates_little(engine):
    opt, grads, total = made(engine, RULES["LAMB"], clip_norm=1.0)
    assert peak_of_a_step(opt, grads) < 0.05 * total


AROUND = {"loss scale": {"loss_scale": ao.LossScale(init=1.0)}, "accumulation": {"accumulate": 2}}


@pytest.mark.parametrize(
    ("engine", "what"),
    marked(
        ((engine, what) for engine in FUSED for what in AROUND),
        lambda engine, what: engine not in SLOW,
    ),
)
def test_mixed_precision_with_all_around_it_allocates_little(engine, what, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "1")
    rule = ao.LAMB(ema_decay=0.9, lookahead_steps=2, clip_tensor_norm=1.0, clip_value=1.0, state_dtype="float16")
    opt, grads, total = made(engine, rule, "float16", **AROUND[what])
    block = 4 * 2**18  # bytes; `numpy` computes masters block by block, with eight values of a block at once
    assert peak_of_a_step(opt, grads) < max(0.1 * total, 8.5 * block)


@each_fused
@pytest.mark.parametrize("shape", KERNELS)
def test_small_kernels_allocate_little(engine, shape, monkeypatch):
    """Their rows and columns are as many as their elements, or nearly; what is kept of them is state alone.

    The room in which they lie side by side is the same however many there are: eight values of a group in each thread.
    """
    room = 2 * 8 * 4 * GROUP_SIZE
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "2")
    kernels = {"k": np.ones(shape, "float32")}
    grads = {"k": np.full_like(kernels["k"], 0.5)}
    ao.Optimizer(dict(kernels), RULES["CAME"], engine=engine).step(grads)  # what is loaded once is loaded
    tracemalloc.start()
    try:
        opt = ao.Optimizer(kernels, RULES["CAME"], engine=engine)
        state = tracemalloc.get_traced_memory()[0]
        for _ in range(2):
            opt.step(grads)
        assert tracemalloc.get_traced_memory()[1] - state < max(room, 0.05 * (state + kernels["k"].nbytes))
    finally:
        tracemalloc.stop()


def test_the_measure_sees_what_the_reference_allocates():
    opt, grads, total = made("array_api", RULES["AdamW"])
    assert peak_of_a_step(opt, grads) > 0.5 * total

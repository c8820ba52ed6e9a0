"""Random numbers for rules: the same bits in every library and engine, and those that the documentation says."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import randomness
from arrayopt.rules.draws import Drawn
from arrayopt.state.tensors import Tensor
from tests.cudacpu import standin
from tests.support.draws import EXPECTED, SHAPES, WORD, Draws, T, block, check, drawn, numbers
from tests.support.engines import EVERY, SLOW, TORCH, each_fused
from tests.support.slow import marked

PUBLISHED = [  # Random123, kat_vectors: threefry2x32 20
    ((0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
    ((WORD, WORD, WORD, WORD), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("given", "expected"), PUBLISHED)
def test_the_generator_is_that_which_was_published(given, expected):
    assert block(*given) == expected
    x, y, k0, k1 = (randomness.signed(x) for x in given)
    made = randomness.threefry(np.array([x], np.int32), np.array([y], np.int32), k0, k1)
    assert int(made[0]) & WORD == expected[0]


FORMS = {"flat": {}, "rows": {"rows": True}, "products": {"products": True}}
ENGINES = [
    *(("numpy", engine) for engine in EVERY),
    ("array_api_strict", "array_api"),
    *(("torch", engine) for engine in TORCH),
    ("jax", "array_api"),
]


@pytest.mark.parametrize(
    ("library", "engine", "form"),
    marked(
        [(*x, form) for x in ENGINES for form in FORMS],
        lambda library, engine, form: library != "jax" and engine not in SLOW,
    ),
)
def test_every_engine_draws_what_is_documented(library, engine, form):
    check(drawn(library, engine, Draws(seed=11, **FORMS[form])), library)


@pytest.mark.parametrize("form", marked([("flat",), ("rows",)], lambda form: form == "flat"))
def test_a_device_draws_what_is_documented(cupy, form):
    check(drawn("cupy", "cupy", Draws(seed=11, **FORMS[form])), "cupy")


def test_a_captured_step_draws_other_numbers_each_time(cupy):
    opt = drawn("cupy", "cupy", Draws(seed=11), steps=0)
    grads = {name: cupy.asarray(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
    opt.step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        graph = stream.end_capture()
        graph.launch(stream)
        opt.advance()
        graph.launch(stream)
    stream.synchronize()
    check(opt, "cupy")  # as after three steps


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_in_double_precision_too(engine):
    check(drawn("numpy", engine, Draws(seed=11), dtype="float64"))


@pytest.mark.parametrize(
    ("library", "engine"),
    marked([x for x in ENGINES if x[0] != "array_api_strict"], lambda library, engine: engine == "numpy"),
)
def test_of_a_stack_the_positions_are_those_of_the_whole(library, engine):
    """So a rule draws the same with `stacked` and without."""
    expected = {("w", "u"): numbers(1, 0, "w", (4, 3, 5), 2)}
    for stacked in (False, True):
        check(drawn(library, engine, Draws(seed=1, stacked=stacked), {"w": (4, 3, 5)}, steps=2), library, expected)


FIRST = (1 << 33) - 4


@pytest.mark.parametrize(
    ("engine", "form"),
    marked(
        [(engine, form) for engine in (*EVERY, "cupy") for form in ("flat", "rows")],
        lambda engine, form: engine in EVERY and engine not in SLOW,
    ),
)
def test_positions_may_be_beyond_32_bits(engine, form, monkeypatch):
    """A layer that begins far on in a stack, which would take the memory of a large machine."""
    monkeypatch.setattr(Tensor, "origin", property(lambda self: ("w", FIRST)))
    shapes = {"w": (1, 3, 5)} if form == "rows" else {"w": (1, 9)}
    rule = Draws(seed=1, stacked=True, **FORMS[form])
    expected = {("w", "u"): numbers(1, 0, "w", shapes["w"], 2, FIRST)}
    if engine != "cupy":
        check(drawn("numpy", engine, rule, shapes, steps=2), expected=expected)
        return
    with standin.installed():
        check(drawn("cupy", engine, rule, shapes, steps=2), "cupy", expected)


def test_jax_has_tensors_of_31_bits():
    jax = pytest.importorskip("jax")
    large = jax.ShapeDtypeStruct(((1 << 31) + 1,), np.float32)
    with pytest.raises(ValueError, match=r"with JAX, a tensor may have up to 2\*\*31 elements"):
        jax.eval_shape(lambda p: Drawn(p, "float32", 0, "w", 1)(0), large)


@each_fused
def test_threads_change_no_bit(engine, monkeypatch):
    from arrayopt.engines.native import table as compiled
    from arrayopt.engines.numpy import engine as blocks

    monkeypatch.setattr(blocks, "LEAST_SHARED", 64)
    monkeypatch.setattr(blocks, "PACKED", 64)
    monkeypatch.setattr(compiled, "LEAST_SHARE", 64)
    monkeypatch.setattr(compiled, "MOST_ALONE", 64)
    for n in (1, 2, 3, 5):
        monkeypatch.setattr("arrayopt.engines.fused_step.thread_count", lambda n=n: n)
        check(drawn("numpy", engine, Draws(seed=11)))


def test_under_jit_with_a_count_that_is_traced():
    jax = pytest.importorskip("jax")
    rule, params = Draws(seed=11), {name: jax.numpy.ones(SHAPES[name], "float32") for name in ("few", "none")}
    step = jax.jit(lambda params, state: ao.update(rule, params, params, state))
    state = rule.init(params)
    for _ in range(T):
        params, state = step(params, state)
    for name, slot in ((name, slot) for name in params for slot in ("u", "v")):
        np.testing.assert_array_equal(np.asarray(state["tensors"][name][slot], "f8"), EXPECTED[name, slot])

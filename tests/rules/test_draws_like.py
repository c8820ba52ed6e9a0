"""Random numbers for rules: what they are functions of, what they are like, and what is refused."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from tests.support.draws import EXPECTED, SHAPES, Draws, T, drawn, numbers

# ---- what they are functions of -------------------------------------------------------------------------------------


def test_a_run_goes_on_as_it_would_have(tmp_path):
    params = {"w": np.ones((4, 9), np.float32)}
    rule = Draws(seed=2)
    straight = ao.Optimizer({"w": params["w"].copy()}, rule, engine="numpy")
    for _ in range(4):
        straight.step(params)
    first = ao.Optimizer({"w": params["w"].copy()}, rule, engine="numpy")
    for _ in range(2):
        first.step(params)
    first.save(tmp_path / "run.safetensors")
    second = ao.Optimizer({"w": np.zeros((4, 9), np.float32)}, rule, engine="array_api")
    second.load(tmp_path / "run.safetensors")
    for _ in range(2):
        second.step(params)
    np.testing.assert_array_equal(second.params["w"], straight.params["w"])
    with pytest.raises(ValueError, match="rule had seed=2, here 3"):
        ao.Optimizer({"w": params["w"].copy()}, Draws(seed=3)).load(tmp_path / "run.safetensors")


def test_order_groups_and_absent_gradients_do_not_matter():
    """A number follows from the tensor's own name and count."""
    whole = drawn("numpy", "numpy", Draws(seed=11))
    made = {name: np.ones(SHAPES[name], np.float32) for name in reversed(SHAPES)}
    opt = ao.Optimizer(made, Draws(seed=11), groups={"f*": {"clip_value": 9.0}}, engine="numpy")
    for k in range(T + 1):
        absent = {1: ["wide"], T: [name for name in made if name != "wide"]}.get(k, [])
        opt.step({name: None if name in absent else x for name, x in made.items()})
    assert opt.state["wide"]["t"] == opt.state["a"]["t"] == T
    for name, slot in EXPECTED:
        np.testing.assert_array_equal(opt.state[name][slot], whole.state[name][slot])


N = 1 << 16


def kept(seed=0, name="w", stream="u", steps=1):
    opt = drawn("numpy", "numpy", Draws(seed=seed), {name: (N,)}, steps=steps)
    return np.asarray(opt.state[name][stream], "f8")


def test_they_are_uniform_and_independent():
    """Mean, variance, the first byte, and correlations with neighbours, other steps, streams and tensors."""
    u = kept()
    assert u.min() >= 0.0
    assert u.max() < 1.0
    sigma = N**-0.5
    assert abs(u.mean() - 0.5) < 5 * sigma * (1 / 12) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * sigma * (1 / 180) ** 0.5
    assert (np.abs(np.bincount((u * 256).astype(int), minlength=256) - N / 256) < 5 * (N / 256) ** 0.5).all()
    for other in (
        np.roll(u, 1),
        np.roll(u, 2),
        np.roll(u, 256),
        kept(1),
        kept(name="v"),
        kept(stream="v"),
        kept(steps=2),
    ):
        assert abs(np.corrcoef(u, other)[0, 1]) < 5 * sigma


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "stream", "error", "words"),
    [
        ({}, 0, TypeError, "random: `h` must be the `h` of a rule's update or of a projection"),
        (None, "1", TypeError, "random: `stream` must be an integer; got '1'"),
        (None, True, TypeError, "random: `stream` must be an integer; got True"),
        (None, 1.0, TypeError, "random: `stream` must be an integer; got 1.0"),
        (None, -1, ValueError, "random: `stream` must be at least 0; got -1"),
    ],
)
@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_what_random_refuses(engine, h, stream, error, words):
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Wrong(ao.Rule):
        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, own):
            return p * ao.random(own if h is None else h, stream), {}

    opt = ao.Optimizer(np.ones(2), Wrong(), engine="array_api") if engine == "array_api" else None
    if opt is None:
        with pytest.raises(Exception, match="random: ") as caught:
            plan_for(Wrong(), 1, "float32")
        assert "Wrong.update, line " in str(caught.value)
        return
    with pytest.raises(error, match=words):
        opt.step(np.ones(2))
    assert (opt.params == 1).all()


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (1.0, TypeError, "Draws: `seed` must be an integer; got 1.0"),
        (True, TypeError, "Draws: `seed` must be an integer; got True"),
        ("1", TypeError, "Draws: `seed` must be an integer; got '1'"),
        (-1, ValueError, "Draws: `seed` must be at least 0; got -1"),
        (1 << 64, ValueError, r"Draws: `seed` must be below 2\*\*64; got"),
    ],
)
def test_what_a_seed_may_be(seed, error, words):
    with pytest.raises(error, match=words):
        Draws(seed=seed)
    assert Draws(seed=np.int64(3)) == Draws(seed=3)
    assert type(Draws(seed=np.int64(3)).seed) is int


def test_a_projection_may_draw():
    def dithered(xp, p, h):
        return xp.floor(p + ao.random(h))

    for engine in ("array_api", "numpy"):
        opt = ao.Optimizer({"w": np.full(N, 0.25)}, ao.SGD(lr=0.0, project=dithered), engine=engine)
        p = opt.step({"w": np.zeros(N)})["w"]
        np.testing.assert_array_equal(p, np.floor(0.25 + numbers_of("w")))
        assert set(np.unique(p)) == {0.0, 1.0}


def numbers_of(name):
    """The first numbers of a tensor of `N` elements, by another engine."""
    return np.asarray(drawn("numpy", "array_api", Draws(), {name: (N,)}, steps=1).state[name]["u"], "f8")


def test_a_complex_parameter_has_real_numbers():
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Turned(ao.Rule):
        complex_ok = True

        def slots(self, xp, p):
            return {"u": xp.zeros_like(xp.real(p))}

        def update(self, xp, p, g, s, h):
            u = ao.random(h)
            return p * u, {"u": u}

    for engine in ("array_api", "numpy"):
        opt = ao.Optimizer({"w": np.ones((2, 3), np.complex128)}, Turned(), engine=engine)
        opt.step({"w": np.ones((2, 3), np.complex128)})
        np.testing.assert_array_equal(opt.state["w"]["u"], numbers(0, 0, "w", (2, 3), 1))


def test_half_precision_draws_in_single():
    opt = ao.Optimizer({"w": np.ones((2, 3), ml_dtypes.bfloat16)}, Draws(), engine="numpy")
    opt.step({"w": np.ones((2, 3), ml_dtypes.bfloat16)})
    assert opt.state["w"]["u"].dtype == np.float32
    np.testing.assert_array_equal(opt.state["w"]["u"], numbers(0, 0, "w", (2, 3), 1))
